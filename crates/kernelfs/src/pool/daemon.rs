//! A daemon of a pool of files, from lock to socket and back. Owns the order of steps at start and stop.

use super::files::{HostPool, PoolLock};
use super::logs::HostLogs;
use super::more::Settings;
use super::prefault::Touching;
use super::report::CheckReport;
use super::service::HostService;
use super::space::HostSpace;
use super::spec::NvmSpec;
use super::{devices, live};
use crate::{Daemon, Hook, KernelError, KernelFs, Parts};
use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use varve_format::Tier;
use varve_ipc::SystemClock;
use varve_ipc::socket::{Server, ServerOptions};
use varve_store::{OpenOptions, OpenReport, Store, StoreError};

/// A running daemon. [`stop`](Self::stop) ends it in order; a drop leaves the logs to the next start.
pub struct HostDaemon {
    server: Server,
    daemon: Daemon,
    pool: HostPool,
    logs: Arc<HostLogs>,
    report: OpenReport,
    remarks: Vec<String>,
    touching: Option<Touching>,
    /// Locked note: the live directory is in use.
    _note: File,
    _lock: PoolLock,
}

impl HostDaemon {
    /// Takes a pool into service: its lock, recovery, then the socket. Clients can connect when this returns.
    ///
    /// # Errors
    /// Another daemon serves it; a newer format; missing files; damage. Each says what to do.
    pub fn start(pool: &HostPool) -> Result<Self, KernelError> {
        pool.check_owner()?;
        let lock = pool.lock()?;
        std::fs::write(pool.pid_file(), format!("{}\n", std::process::id()))
            .map_err(|error| KernelError::io(format!("cannot write {}", pool.pid_file().display()), error))?;
        let devices::Opened { devices, arena } = pool.opened()?;
        devices::fill_holes(pool, &devices)?;
        live::ensure(pool.live())?;
        let note = live::note_pool(pool.live(), pool.dir())?;
        let (config, smaller) = live::fit(pool.config(), devices.nvm.len_bytes(), pool.live())?;
        let config = match &arena {
            Some(arena) => live::fit_slot(config, devices.nvm.len_bytes(), arena.slot_bytes()),
            None => config,
        };
        let mut remarks = devices::remarks(pool, &devices);
        remarks.extend(smaller);
        let mut space = HostSpace::new();
        for (tier, path) in [(Tier::Ssd, pool.ssd_path()), (Tier::Hdd, pool.hdd_path())] {
            let more = pool.spec().more.iter().filter(|(of, _)| *of == tier);
            let more = more.filter_map(|(_, spec)| Some(pool.dir().join(spec.device()?.path()?)));
            path.into_iter()
                .chain(more)
                .for_each(|path| space.watch(tier, path));
        }
        let logs = Arc::new(pool.logs_with(arena)?);
        logs.forget_segments();
        let memory = if matches!(pool.spec().nvm, NvmSpec::Shm(_) | NvmSpec::Dax(_)) {
            vec![Arc::clone(&devices.nvm), Arc::clone(&devices.journal)]
        } else {
            Vec::new()
        };
        let more = devices.more.iter();
        let names: Vec<String> = more.map(|(_, device)| device.name().to_string()).collect();
        let (store, report) = open_store(pool, devices)?;
        if store.pool_uuid() != pool.uuid() {
            return Err(KernelError::Pool(format!(
                "{} is of another pool than {} says; put the right files together",
                pool.nvm_path().display(),
                super::files::TOML
            )));
        }
        let settings = Arc::new(Settings::new(pool.clone(), names));
        settings.tidy(&store);
        let mut parts = Parts::new(store, Arc::clone(&logs) as _, config, Arc::new(SystemClock));
        // A mistake in them must not keep a pool away whose daemon starts again.
        let unread = |error| remarks.push(format!("the placement rules are not applied: {error}"));
        parts.rules = pool.rules().map_err(unread).ok();
        parts.fsck = Some(hook(CheckReport::of_structures));
        parts.scrub = Some(hook(CheckReport::of_data));
        let kernel = KernelFs::open(parts)?;
        let missing = space.missing_blocks(&kernel.store().space());
        if missing > 0 {
            remarks.push(format!(
                "the host has {} less than the tiers could still take; `df` shows the smaller number",
                super::size::show(missing * varve_format::BLOCK_BYTES)
            ));
        }
        for remark in &remarks {
            tracing::warn!("{remark}");
        }
        let own = Arc::clone(&settings);
        kernel.set_device_gone(Box::new(move |store| own.tidy(store)));
        let room = space.clone();
        kernel.set_host_room(Box::new(move |tier| room.room(tier)));
        let service = HostService::new(
            Arc::clone(&kernel),
            pool.clone(),
            Arc::clone(&logs),
            settings,
            space,
            remarks.clone(),
        );
        let daemon = Daemon::start(kernel).map_err(threads)?;
        let touching = if memory.is_empty() {
            None
        } else {
            Some(Touching::start(memory).map_err(threads)?)
        };
        let listener = listen(pool)?;
        let server = Server::start(listener, Arc::new(service), ServerOptions::default())
            .map_err(|error| KernelError::io("cannot start the socket's threads", error))?;
        Ok(Self {
            server,
            daemon,
            pool: pool.clone(),
            logs,
            report,
            remarks,
            touching,
            _note: note,
            _lock: lock,
        })
    }

    /// Findings of the start.
    #[must_use]
    pub const fn report(&self) -> &OpenReport {
        &self.report
    }

    /// Returns the copies of logs that were used at the start.
    #[must_use]
    pub fn recovered(&self) -> super::logs::Recovered {
        self.logs.recovered()
    }

    /// Remarks on the host for a person.
    #[must_use]
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Whether an operator has asked the daemon to end.
    #[must_use]
    pub fn shutdown_asked(&self) -> bool {
        self.daemon.kernel().shutdown_asked()
    }

    /// Closes all connections, digests everything, empties the journal. Always ends: entries that a failed
    /// device keeps from being digested stay in the logs for the next start.
    ///
    /// # Errors
    /// The first error of a device.
    pub fn stop(self) -> Result<(), StoreError> {
        let Self {
            server,
            daemon,
            pool,
            logs,
            touching,
            _lock,
            ..
        } = self;
        drop(touching);
        let _ = std::fs::remove_file(pool.socket());
        if !server.stop() {
            tracing::warn!("some requests did not end in time");
        }
        let result = daemon.stop();
        let _ = std::fs::remove_file(pool.pid_file());
        logs.forget_segments();
        logs.forget_copies();
        if !pool.spec().nvm.is_memory() {
            // Empty if every session is digested; else it stays, with the logs.
            live::remove_empty(pool.live());
        }
        result
    }
}

fn threads(error: io::Error) -> KernelError {
    KernelError::io("cannot start the daemon's threads", error)
}

fn hook(check: fn(&Store) -> Result<CheckReport, StoreError>) -> Hook {
    Box::new(move |kernel: &KernelFs| {
        let report = check(kernel.store()).map_err(|error| error.to_string())?;
        serde_json::to_string(&report).map_err(|error| error.to_string())
    })
}

/// Opens the store; for a newer format the error's message says what to do.
fn open_store(pool: &HostPool, devices: varve_store::Devices) -> Result<(Store, OpenReport), KernelError> {
    let options = OpenOptions {
        shared_blocks: (pool.config().shared_cache_bytes / varve_format::BLOCK_BYTES) as usize,
        ..OpenOptions::default()
    };
    Store::open(devices, options).map_err(|error| explain(pool, error))
}

/// Adds advice to errors that a person can act on.
pub fn explain(pool: &HostPool, error: StoreError) -> KernelError {
    use varve_format::superblock::SuperblockError;
    match &error {
        StoreError::Superblock {
            fault: SuperblockError::Version(version),
            ..
        } => KernelError::Pool(format!(
            "{} is a pool of format version {version}, this program knows version {}: use a newer varve",
            pool.dir().display(),
            varve_format::superblock::FORMAT_VERSION
        )),
        StoreError::Superblock {
            fault: SuperblockError::Features(features),
            ..
        } => KernelError::Pool(format!(
            "{} uses features that this program cannot serve: {features}. Use a newer varve",
            pool.dir().display(),
        )),
        StoreError::Superblock {
            fault: fault @ SuperblockError::Stale(_),
            ..
        } => KernelError::Pool(format!(
            "{}: {fault}. It is not opened, so that nothing gets worse: restore {} from a backup",
            pool.dir().display(),
            pool.nvm_path().display()
        )),
        StoreError::JournalDamaged { .. } => KernelError::Pool(format!(
            "{error}. The pool is not opened, so that nothing gets worse. Look with `varve fsck {}`, and \
            restore {} from a backup if you have one",
            pool.dir().display(),
            pool.journal_path().display()
        )),
        _ => error.into(),
    }
}

/// Binds the pool's socket, for its owner and root, or for all users if others may have sessions: their
/// identity is checked in the handshake. Hold the lock: an existing socket is a dead one.
fn listen(pool: &HostPool) -> Result<UnixListener, KernelError> {
    let path = pool.socket();
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(KernelError::io(
                format!("cannot remove {}", path.display()),
                error,
            ));
        }
        _ => {}
    }
    // Made under another name, so that no client connects before its permissions are right.
    let new = path.with_extension("new");
    let _ = std::fs::remove_file(&new);
    let mode = if pool.config().users.is_owner_only() {
        0o600
    } else {
        0o666
    };
    let made = UnixListener::bind(&new).and_then(|listener| {
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(mode))?;
        std::fs::rename(&new, &path)?;
        Ok(listener)
    });
    made.map_err(|error| KernelError::io(format!("cannot listen at {}", path.display()), error))
}
