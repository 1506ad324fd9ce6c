//! A pool's daemon as an object in this process, and links to it without a socket.

use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use varve_ipc::{ClientKind, Hello, InprocLink, IpcError, Link, Peer, Service};
use varve_kernelfs::{Daemon, KernelError, KernelFs, Parts};
use varve_libfs::{Connection, Connector, Fs, FsOptions, MountError, named_by_daemon};

/// A pool served in this process.
pub struct Embedded {
    kernel: Arc<KernelFs>,
    daemon: Mutex<Option<Daemon>>,
    links: Arc<Mutex<Vec<Weak<InprocLink>>>>,
}

impl Embedded {
    /// Opens a pool for service: recovers first, as a daemon does. No threads are started.
    ///
    /// # Errors
    /// As [`KernelFs::open`].
    pub fn open(parts: Parts) -> Result<Self, KernelError> {
        Ok(Self {
            kernel: KernelFs::open(parts)?,
            daemon: Mutex::new(None),
            links: Arc::default(),
        })
    }

    /// Starts the background threads (digest when idle, late leases, ended processes).
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(&self) -> std::io::Result<()> {
        let mut daemon = self.daemon.lock();
        if daemon.is_none() {
            *daemon = Some(Daemon::start(Arc::clone(&self.kernel))?);
        }
        Ok(())
    }

    /// The daemon's object.
    #[must_use]
    pub const fn kernel(&self) -> &Arc<KernelFs> {
        &self.kernel
    }

    /// Does the due background work in the calling thread.
    pub fn tick(&self) {
        self.kernel.tick();
    }

    /// Returns a connector that opens sessions with this pool, as this process' user.
    #[must_use]
    pub fn connector(&self) -> Arc<dyn Connector> {
        self.connector_as(Peer::this_process())
    }

    /// Returns a connector that opens sessions as `peer`.
    #[must_use]
    pub fn connector_as(&self, peer: Peer) -> Arc<dyn Connector> {
        Arc::new(LocalConnector {
            kernel: Arc::clone(&self.kernel),
            links: Arc::clone(&self.links),
            peer,
        })
    }

    /// Mounts the pool for this process: a linked client with default options.
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

    /// Cuts every session's link as the death of the daemon would: clients see it as gone and reconnect.
    pub fn cut_links(&self) {
        for link in self.links.lock().drain(..) {
            if let Some(link) = link.upgrade() {
                link.cut();
            }
        }
    }

    /// Shuts down in order: the threads, then the sessions; everything is digested.
    ///
    /// # Errors
    /// As [`KernelFs::shutdown`].
    pub fn shutdown(self) -> Result<(), varve_store::StoreError> {
        match self.daemon.lock().take() {
            Some(daemon) => daemon.stop(),
            None => self.kernel.shutdown(),
        }
    }
}

struct LocalConnector {
    kernel: Arc<KernelFs>,
    links: Arc<Mutex<Vec<Weak<InprocLink>>>>,
    peer: Peer,
}

impl Connector for LocalConnector {
    fn connect(&self, hello: Hello) -> Result<Connection, IpcError> {
        let session = self.kernel.open_session(self.peer, hello)?;
        let service: Arc<dyn Service> = Arc::clone(&self.kernel) as _;
        let link = Arc::new(InprocLink::new(service, session.welcome.session, session.upcalls));
        let mut links = self.links.lock();
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(&link));
        drop(links);
        let named = |log| named_by_daemon(log, Arc::clone(&link) as Arc<dyn Link>);
        let log = match session.welcome.needs_sync {
            true => session.log.map(named),
            false => session.log,
        };
        Ok(Connection {
            link,
            welcome: session.welcome,
            page: session.page,
            log,
            nvm: session.nvm,
            ssd: session.ssd,
            verified: session.verified,
        })
    }
}
