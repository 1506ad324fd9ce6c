//! One session: its link, log, leases and worker; and the mount that outlives sessions. Knows no names and no
//! data.

mod forward;
#[cfg(all(test, feature = "shuttle"))]
mod interleavings;
mod mount;
mod opens;
pub(crate) mod worker;

pub(crate) use forward::{Asks, Forwarded};
pub(crate) use mount::{Mount, Try};
pub(crate) use opens::Opens;

use crossbeam_channel::Sender;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use varve_format::{InodeKey, LogSeq, SessionId, TimeNs};
use varve_ipc::{
    ClientKind, Clock, DENTRY_TTL_MAX, IpcError, LeaseMode, Link, PageState, Request, Response, SessionPage,
    Want, Welcome,
};

use crate::data::DataPlane;
use crate::errno::{Errno, OpError, OpResult};
use crate::kernel_cache::dentries::{CachedReply, ReplyVersion};
use crate::kernel_cache::pages::{Drops, KernelCall, drop_and_wait, drop_later};
use crate::lease::{AT_ONCE, Event, Leases, Node, Pins, Recalls, Use};
use crate::log::Stamp;
use crate::options::{CacheObserver, Connection, FsOptions, MountError};
use crate::sync::{Mutex, spawn};

/// A live (or just lost) session.
pub(crate) struct Session {
    pub welcome: Welcome,
    pub link: Arc<dyn Link>,
    pub page: Arc<dyn SessionPage>,
    pub data: DataPlane,
    pub leases: Arc<Leases>,
    pub options: FsOptions,
    pub opens: Arc<Opens>,
    /// Other sessions use the pool.
    shared: AtomicBool,
    events: Sender<Event>,
    /// Number of the last forwarded operation; held while one is under way, so that `last_forwarded`
    /// describes exactly one.
    forwarding: Mutex<u64>,
    pub forwarded: AtomicU64,
    /// Number of the last forwarded operation that the daemon has reported as done.
    pub answered: AtomicU64,
    pub revoked: AtomicU64,
    /// Time until cached replies have expired, from recalls on.
    pub expiring_ms: AtomicU64,
    /// Whether the kernel was told, or is being told, to drop its pages of files.
    data_dropped: AtomicBool,
}

impl Session {
    /// Starts the worker of a fresh connection.
    pub(crate) fn start(
        connection: Connection,
        options: &FsOptions,
        opens: &Arc<Opens>,
    ) -> Result<Arc<Self>, MountError> {
        let Connection {
            link,
            welcome,
            page,
            log,
            nvm,
            ssd,
            verified,
        } = connection;
        if !welcome.root.is_dir() {
            return Err(MountError::Protocol("the root is no directory"));
        }
        if log.is_none() && !welcome.read_only {
            return Err(MountError::Protocol("a session that may write has no log"));
        }
        let log = log.filter(|_| !welcome.read_only);
        let data = DataPlane::new(
            &welcome,
            Arc::clone(&link),
            Arc::clone(&page),
            log,
            nvm,
            verified,
            Arc::clone(&options.clock),
        )
        .reading_from(ssd);
        let (events, inbox) = crossbeam_channel::unbounded();
        let (asks, asked) = crossbeam_channel::unbounded();
        let kernel = options.kind == ClientKind::Shim && options.observer.is_some();
        let leases = Leases::new(
            Arc::clone(&link),
            Arc::clone(&page),
            events.clone(),
            asks,
            welcome.leases_max,
            kernel,
        );
        let leases = leases
            .with_clock(Arc::clone(&options.clock))
            .with_appetite(Arc::clone(&data.appetite));
        let leases = Arc::new(leases);
        let recalls = Recalls::new(Arc::clone(&leases), events.clone(), welcome.lease_ms);
        let session = Arc::new(Self {
            shared: AtomicBool::new(welcome.shared),
            welcome,
            link,
            page,
            data,
            leases,
            options: options.clone(),
            opens: Arc::clone(opens),
            events,
            forwarding: Mutex::new(0),
            forwarded: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            revoked: AtomicU64::new(0),
            expiring_ms: AtomicU64::new(0),
            data_dropped: AtomicBool::new(false),
        });
        worker::start(&session, inbox, asked, recalls)?;
        Ok(session)
    }

    pub(crate) fn id(&self) -> SessionId {
        self.welcome.session
    }

    /// Whether results seen under this session's leases count: to be asked *after* they were seen.
    #[inline]
    pub(crate) fn is_live(&self) -> bool {
        self.page.state() == PageState::Live && !self.leases.is_lost()
    }

    /// Ends all waiting in this session: it is over, and its mount goes on with another.
    pub(crate) fn lose(&self) {
        self.end();
        if !self.data_dropped.swap(true, Ordering::SeqCst) {
            self.drop_kernel_data();
        }
    }

    /// Ends all waiting in this session: it is over, and its mount with it.
    pub(crate) fn end(&self) {
        self.leases.lose();
        // Its worker, which would close devices that are taken out, ends; files that are open refer to it
        // yet.
        self.data.let_go_of_devices();
        let _ = self.events.send(Event::Stop);
    }

    /// Has the kernel drop its pages of files. They were read under leases that are gone: other sessions may
    /// write to the files. On a thread of its own, since the kernel may wait for requests, and one of them
    /// may be here.
    fn drop_kernel_data(&self) {
        let nodes = self.leases.all().into_iter();
        let keys: Vec<_> = nodes
            .filter(|node| node.above.any())
            .map(|node| node.key())
            .collect();
        let Some(observer) = self.observer().filter(|_| !keys.is_empty()) else {
            return;
        };
        let drop_all = move || {
            keys.into_iter()
                .for_each(|key| observer.invalidate_data(key, 0, 0))
        };
        if let Err(error) = spawn(self.clock(), "varve-drop", drop_all) {
            tracing::error!(%error, "no thread to drop the kernel's data: what others write may not be seen");
        }
    }

    /// Has the kernel above, if there is one, drop pages that `call` touches: before the call goes on, if
    /// that is possible. Returns whether they are dropped.
    pub(crate) fn drop_pages(&self, key: InodeKey, call: &KernelCall, drops: Drops) -> bool {
        match &self.options.observer {
            Some(observer) if call.drops_late() => {
                drop_later(self.clock(), observer, key, drops);
                false
            }
            Some(observer) => drop_and_wait(self.clock(), observer, key, drops, self.patience()),
            None => true,
        }
    }

    /// Longest wait for the kernel.
    pub(crate) const fn patience(&self) -> Duration {
        Duration::from_millis(self.welcome.lease_ms / 2)
    }

    /// Time, and how to wait.
    pub(crate) fn clock(&self) -> &dyn Clock {
        &*self.options.clock
    }

    pub(crate) fn now_ns(&self) -> TimeNs {
        self.options.clock.now_ns()
    }

    /// The stamp of an operation that begins now.
    pub(crate) fn stamp(&self) -> Stamp {
        self.data.stamp()
    }

    /// Whether the session takes changes.
    pub(crate) fn may_write(&self) -> Result<(), Errno> {
        if self.welcome.read_only {
            Err(Errno(libc::EROFS))
        } else {
            Ok(())
        }
    }

    /// Makes everything that any session has logged until now durable against a power cut.
    pub(crate) fn sync_all<T>(&self) -> OpResult<(), T> {
        self.sync_log()?;
        match self.link.call(Request::SyncAll)? {
            Response::Done => Ok(()),
            _ => Err(OpError::Failed(Errno(libc::EIO))),
        }
    }

    /// Makes everything logged until now durable against a power cut.
    pub(crate) fn sync_log<T>(&self) -> OpResult<(), T> {
        let synced = self.data.sync();
        self.data.report_faults();
        // The entries of a sealed log are digested, and so durable, before the session that follows begins.
        if !self.is_live() {
            return Err(OpError::lost());
        }
        if synced.is_err() {
            // The daemon syncs the log, the first time or always; and the daemon may be away. Then the
            // next session's digest makes the entries durable.
            let alive = self.link.call(Request::StatFs);
            if matches!(alive, Err(IpcError::Gone(_) | IpcError::Sealed)) {
                return Err(OpError::lost());
            }
        }
        Ok(synced?)
    }

    pub(crate) fn observer(&self) -> Option<Arc<dyn CacheObserver>> {
        self.options.observer.clone()
    }

    /// Notes whether other sessions use the pool.
    pub(crate) fn set_shared(&self, shared: bool) {
        self.shared.store(shared, Ordering::SeqCst);
    }

    /// Whether other sessions use the pool.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.load(Ordering::SeqCst)
    }

    /// Returns the version of the session's leases, before an operation for a thread whose reply the kernel
    /// above may cache.
    pub(crate) fn reply_version(&self, thread: u32) -> ReplyVersion {
        // A recall must end within `lease_ms`, and may also wait for the kernel's pages.
        let in_time = 4 * DENTRY_TTL_MAX <= Duration::from_millis(self.welcome.lease_ms);
        let caches = self.options.kind == ClientKind::Shim && in_time;
        ReplyVersion {
            session: caches.then(|| self.id()),
            recalls: self.leases.recalls(),
            forwarded: self.forwarded.load(Ordering::SeqCst),
            thread,
        }
    }

    /// Looks which of the threads that called lately have ended.
    pub(crate) fn look_for_ended_threads(&self) {
        if let Some(observer) = &self.options.observer {
            let threads = self.leases.threads();
            threads.sweep(|thread| observer.has_ended(thread));
        }
    }

    /// Begins the reply to an operation that has found a name in `dir` and attributes of `inode`.
    pub(crate) fn begin_reply(
        &self,
        version: ReplyVersion,
        dir: Option<InodeKey>,
        inode: Option<InodeKey>,
    ) -> CachedReply {
        // The result of a forwarded operation was read under no lease.
        let is_current =
            version.session == Some(self.id()) && version.forwarded == self.forwarded.load(Ordering::SeqCst);
        if !is_current {
            return CachedReply::default();
        }
        let reply = self
            .leases
            .begin_reply(version.recalls, version.thread, dir, inode);
        // After the reply counts as in flight.
        if self.is_live() { reply } else { reply.cancel() }
    }

    /// Pins leases for names and attributes.
    pub(crate) fn pin<T>(&self, keys: &[InodeKey], mode: LeaseMode) -> OpResult<Pins<'_>, T> {
        let wants: SmallVec<[_; AT_ONCE]> = keys.iter().map(|key| Want { key: *key, mode }).collect();
        self.leases.pin(&wants, Use::Own)
    }

    /// Pins one inode for reading its attributes.
    pub(crate) fn pin_read<T>(&self, key: InodeKey) -> OpResult<Pins<'_>, T> {
        self.pin(&[key], LeaseMode::Read)
    }

    /// Asks the daemon.
    pub(crate) fn call<T>(&self, request: Request) -> OpResult<Response, T> {
        self.link
            .call(request)
            .map_err(|error: IpcError| OpError::from(error))
    }

    /// Digests this session's log up to `upto` and waits for it, if it is not digested yet.
    pub(crate) fn digest<T>(&self, upto: LogSeq) -> OpResult<(), T> {
        if self.page.digested() < upto {
            self.call(Request::Digest { upto, wait: true })?;
        }
        Ok(())
    }

    /// The node of an inode, if the session knows it.
    pub(crate) fn node(&self, key: InodeKey) -> Option<Arc<Node>> {
        self.leases.get(key)
    }
}
