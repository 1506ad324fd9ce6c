//! A pool of files on this host, served by this process: no daemon to start, and yet others can connect (a
//! mount, `varve status`).

use std::path::Path;
use std::sync::Arc;
use varve_ipc::ClientKind;
use varve_kernelfs::KernelError;
use varve_kernelfs::pool::{HostDaemon, HostPool, PoolSpec, TOML, create_pool};
use varve_libfs::{Connector, Fs, FsOptions, MountError, SocketConnector};

/// A pool directory that this process serves until [`stop`](Self::stop). A drop leaves the logs to the next
/// start.
pub struct PoolHere {
    daemon: HostDaemon,
    pool: HostPool,
}

impl PoolHere {
    /// Serves the pool in `dir`.
    ///
    /// # Errors
    /// As [`HostDaemon::start`]: another process serves it, files are missing or damaged.
    pub fn open(dir: &Path) -> Result<Self, KernelError> {
        let pool = HostPool::find(dir)?;
        Ok(Self {
            daemon: HostDaemon::start(&pool)?,
            pool,
        })
    }

    /// Serves the pool in `dir`, creating it from `spec` first if there is none.
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`create_pool`].
    pub fn open_or_create(dir: &Path, spec: &PoolSpec) -> Result<Self, KernelError> {
        if !dir.join(TOML).exists() {
            create_pool(dir, spec)?;
        }
        Self::open(dir)
    }

    /// The pool.
    #[must_use]
    pub const fn pool(&self) -> &HostPool {
        &self.pool
    }

    /// Returns a connector that opens sessions with the pool.
    #[must_use]
    pub fn connector(&self) -> Arc<dyn Connector> {
        Arc::new(SocketConnector {
            path: self.pool.socket(),
        })
    }

    /// Opens a session of this process, with default options.
    ///
    /// # Errors
    /// As [`Fs::mount`].
    pub fn mount(&self) -> Result<Fs, MountError> {
        Fs::mount(
            self.connector(),
            FsOptions {
                kind: ClientKind::Linked,
                ..FsOptions::default()
            },
        )
    }

    /// Shuts down in order: all sessions, then the rest; everything is digested. Unmount your own sessions
    /// before.
    ///
    /// # Errors
    /// If a device failed; undigested entries stay in the logs.
    pub fn stop(self) -> Result<(), varve_store::StoreError> {
        self.daemon.stop()
    }
}
