//! The daemon's object: what it is made of, how it starts, ticks and ends. The calls are in the modules beside it.

use crate::config::Config;
use crate::core::Core;
use crate::entries::{Entered, Entries};
use crate::error::KernelError;
use crate::leases::{Limits, Table};
use crate::logs::LogStore;
use crate::placement::{Hierarchy, Marks, Placement, Placer};
use crate::segments::Segments;
use crate::status::Counters;
use crate::trouble::LogTroubles;
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use varve_format::{LeaseNo, TxId};
use varve_ipc::{Clock, IpcError};
use varve_store::{SpaceStats, Store, StoreError};

/// Lease numbers taken from the journal at once: for one run of the daemon.
const LEASE_NUMBERS: u64 = 1 << 40;

/// What operators ask for and others implement. Answers JSON.
pub type Hook = Box<dyn Fn(&KernelFs) -> Result<String, String> + Send + Sync>;

/// Blocks that the host under a tier can still hold, beyond what a margin keeps; a tier on a device of its own has no bound.
pub type HostRoom = Box<dyn Fn(varve_format::Tier) -> u64 + Send + Sync>;

/// Blocks that can be promised as far as the host under the pool's files goes; `None`: the pool itself is the bound.
pub type HostLeft = Box<dyn Fn(&SpaceStats) -> Option<u64> + Send + Sync>;

/// Where tokens of sessions come from in a deterministic test.
pub type Tokens = Box<dyn Fn() -> u128 + Send + Sync>;

/// What a daemon is made of.
pub struct Parts {
    /// The shared area.
    pub store: Store,
    /// Logs and pages.
    pub logs: Arc<dyn LogStore>,
    /// Settings, validated.
    pub config: Config,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Where new data goes, and what moves later.
    pub placement: Box<dyn Placement>,
    /// Owner of the pool: privileged besides root.
    pub owner_uid: u32,
    /// For `fsck` of the running pool.
    pub fsck: Option<Hook>,
    /// For `scrub`.
    pub scrub: Option<Hook>,
    /// Tokens of new sessions; `None`: the system's random numbers.
    pub tokens: Option<Tokens>,
}

impl Parts {
    /// Default policies, this process' user as the owner.
    pub fn new(store: Store, logs: Arc<dyn LogStore>, config: Config, clock: Arc<dyn Clock>) -> Self {
        let marks = Marks {
            high: config.placement_high_percent.into(),
            low: config.placement_low_percent.into(),
        };
        Self {
            store,
            logs,
            config,
            clock,
            placement: Box::new(Hierarchy::new(marks)),
            owner_uid: rustix::process::geteuid().as_raw(),
            fsck: None,
            scrub: None,
            tokens: None,
        }
    }
}

/// The daemon. Threads call it; it has none of its own (see [`crate::Daemon`]).
pub struct KernelFs {
    pub(crate) store: Store,
    pub(crate) logs: Arc<dyn LogStore>,
    pub(crate) config: Config,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) placement: Box<dyn Placement>,
    pub(crate) placer: Placer,
    pub(crate) owner_uid: u32,
    pub(crate) fsck: Option<Hook>,
    pub(crate) scrub: Option<Hook>,
    pub(crate) tokens: Option<Tokens>,
    pub(crate) core: Mutex<Core>,
    /// One move of a directory to another parent at a time.
    pub(crate) rename: Mutex<()>,
    pub(crate) counters: Counters,
    pub(crate) log_troubles: LogTroubles,
    /// What ordinary users' sessions map.
    pub(crate) segments: Segments,
    /// When it was opened, by the monotonic clock.
    pub(crate) started_ms: u64,
    /// No inode without a name is freed before.
    pub(crate) grace_until_ms: AtomicU64,
    /// Somebody else runs [`tick`](Self::tick), so that work may be left to it.
    pub(crate) background: AtomicBool,
    pub(crate) stopping: AtomicBool,
    pub(crate) entries: Entries,
    pub(crate) shutdown_asked: AtomicBool,
    pub(crate) bell: Bell,
    /// Rung when a session has asked for a digest that it does not wait for.
    pub(crate) digest_bell: Bell,
    /// What the host can still hold of a tier.
    pub(crate) host_room: std::sync::OnceLock<HostRoom>,
    /// What it can still hold at all.
    pub(crate) host_left: std::sync::OnceLock<HostLeft>,
    /// Held alone while space is looked for, shared where some is promised: see `credits`.
    pub(crate) space_turn: RwLock<()>,
    /// A mount has given its kernel's caches up.
    pub(crate) company_changed: parking_lot::Condvar,
}

/// Wakes background threads.
#[derive(Default)]
pub(crate) struct Bell {
    rung: Mutex<bool>,
    changed: parking_lot::Condvar,
}

impl Bell {
    pub(crate) fn ring(&self) {
        *self.rung.lock() = true;
        self.changed.notify_all();
    }

    /// Waits for a ring, at most `ms`.
    pub(crate) fn wait(&self, ms: u64) {
        let mut rung = self.rung.lock();
        if !*rung {
            let _ = self
                .changed
                .wait_for(&mut rung, std::time::Duration::from_millis(ms));
        }
        *rung = false;
    }
}

impl KernelFs {
    /// Takes a pool into service: seals and digests every session of an earlier daemon, then is ready.
    ///
    /// # Errors
    /// Settings out of bounds; the store's and the logs', unless a device failed after the pool was open: then it starts read-only.
    pub fn open(parts: Parts) -> Result<Arc<Self>, KernelError> {
        parts.config.validate()?;
        let Parts {
            mut store,
            logs,
            config,
            clock,
            placement,
            owner_uid,
            fsck,
            scrub,
            tokens,
        } = parts;
        store.set_verify_nvm(config.verify_nvm_reads);
        // Before the first transaction: from here on no client of an earlier daemon believes what it reads or wrote.
        for page in logs.pages()? {
            page.seal();
        }
        varve_ipc::page::membarrier();
        logs.drop_left_copies();
        let base_limit = store.newest_tx();
        let limits = Limits {
            min_hold_ms: config.min_hold_ms,
            lease_ms: config.lease_ms,
        };
        let first_lease = match first_lease(&store) {
            Ok(lease) => lease,
            Err(error) if error.is_device() => LeaseNo(1),
            Err(error) => return Err(error.into()),
        };
        let kernel = Self {
            core: Mutex::new(Core::new(Table::new(limits, first_lease))),
            started_ms: clock.monotonic_ms(),
            grace_until_ms: AtomicU64::new(clock.monotonic_ms() + config.grace_ms),
            store,
            logs,
            config,
            clock,
            placement,
            placer: Placer::default(),
            owner_uid,
            fsck,
            scrub,
            tokens,
            rename: Mutex::new(()),
            counters: Counters::default(),
            log_troubles: LogTroubles::default(),
            segments: Segments::default(),
            background: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            entries: Entries::default(),
            shutdown_asked: AtomicBool::new(false),
            bell: Bell::default(),
            digest_bell: Bell::default(),
            host_room: std::sync::OnceLock::new(),
            host_left: std::sync::OnceLock::new(),
            space_turn: RwLock::new(()),
            company_changed: parking_lot::Condvar::new(),
        };
        kernel.recover(base_limit)?;
        Ok(Arc::new(kernel))
    }

    /// The shared area.
    #[must_use]
    pub const fn store(&self) -> &Store {
        &self.store
    }

    /// Settings.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Bounds what is moved to tiers by what their host can hold. The first one stays.
    pub fn set_host_room(&self, room: HostRoom) {
        let _ = self.host_room.set(room);
    }

    /// Bounds what is promised by what the host can hold. The first one stays.
    pub fn set_host_left(&self, left: HostLeft) {
        let _ = self.host_left.set(left);
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.monotonic_ms()
    }

    /// Whether inodes without a name are kept for clients that may come back.
    pub(crate) fn in_grace(&self) -> bool {
        self.now_ms() < self.grace_until_ms.load(Ordering::Acquire)
    }

    /// Makes the pool read-only when a device could not write, or is gone, and ends every wait. Damage is counted; other errors do nothing: what
    /// cannot be read, its device has counted.
    pub(crate) fn note_error(&self, error: &StoreError) {
        self.note_damage(error);
        if error.stops_writing() {
            self.stop_writing(error);
        }
    }

    /// Makes the pool read-only, and ends every wait.
    pub(crate) fn stop_writing(&self, error: &StoreError) {
        if self.store.latched().is_none() {
            self.store.latch(&error.to_string());
        }
        let now_ms = self.now_ms();
        let mut core = self.core.lock();
        if !core.latched {
            core.latched = true;
            tracing::error!("the pool is read-only from now on: {error}");
        }
        core.pump(now_ms);
    }

    /// Refused because the pool is read-only, if it is.
    pub(crate) fn check_writable(&self) -> Result<(), IpcError> {
        if self.stopping.load(Ordering::Acquire) {
            return Err(IpcError::Gone("the daemon is stopping".into()));
        }
        match self.store.latched() {
            Some(_) => Err(IpcError::Errno(libc::EROFS)),
            None => Ok(()),
        }
    }

    /// Blocks that are freed while the answer lives are not reused before the sessions that may read them have been told.
    pub(crate) fn begin_change(&self) -> Change<'_> {
        let mut core = self.core.lock();
        let number = core.next_change;
        core.next_change += 1;
        core.changes.insert(number, self.store.newest_tx());
        self.store.set_reader_horizon(core.reader_horizon());
        Change { kernel: self, number }
    }

    /// Work that time or others' misbehaviour makes necessary: late sessions, ended processes, logs left to digest, inodes to free. Also
    /// what background threads do; a deterministic test calls it instead of them.
    pub fn tick(&self) {
        let now_ms = self.now_ms();
        self.core.lock().pump(now_ms);
        self.seal_doomed();
        self.finish_sealed();
        self.reap(now_ms);
        self.free_unheld();
        self.note_solitude(now_ms);
    }

    /// Digests what is committed in all logs.
    ///
    /// # Errors
    /// The store's; every log was tried.
    pub fn digest_all(&self) -> Result<(), StoreError> {
        let sessions: Vec<_> = {
            let core = self.core.lock();
            core.members
                .values()
                .map(|member| Arc::clone(&member.session))
                .collect()
        };
        let next = AtomicUsize::new(0);
        let work = || {
            let mut first = Ok(());
            while let Some(session) = sessions.get(next.fetch_add(1, Ordering::Relaxed)) {
                let digested = self.digest_session(session, None);
                first = first.and(digested.map(|_| ()));
            }
            first
        };
        // A deterministic test runs without threads of its own accord.
        let background = self.background.load(Ordering::Acquire);
        let threads = if background {
            self.config.digest_threads()
        } else {
            1
        };
        std::thread::scope(|scope| {
            let spawn = |_| {
                let thread = std::thread::Builder::new().name("varve-digest".into());
                // Without one to spare the others take its part.
                thread.spawn_scoped(scope, work).ok()
            };
            let others: Vec<_> = (1..threads.min(sessions.len())).filter_map(spawn).collect();
            let mut first = work();
            for other in others {
                first = first.and(other.join().unwrap_or(Ok(())));
            }
            first
        })
    }

    /// Ends all sessions and empties the journal. Requests fail with `Gone` from now on; those under way have ended when this returns, so that the
    /// pool may be opened again at once, in this process too. Always ends: what a failed device keeps from being digested stays in the logs,
    /// and a request that it keeps from ending, for longer than any may wait, changes nothing any more.
    ///
    /// # Errors
    /// The first error of a device; everything else was done.
    pub fn shutdown(&self) -> Result<(), StoreError> {
        self.stopping.store(true, Ordering::Release);
        self.store.end_checks();
        self.end_sessions();
        self.entries.close();
        // Those that were asked for meanwhile, too.
        self.store.end_checks();
        let mut left_ms = self.config.wait_ms;
        // Who comes now is counted for a moment and sent away: what was over once is over.
        let mut over = self.entries.are_over();
        while !over && left_ms > 0 {
            self.clock.pause(Duration::from_millis(1));
            self.finish_sealed();
            left_ms -= 1;
            over = self.entries.are_over();
        }
        if !over {
            tracing::warn!("some requests did not end in time: what they have not committed they do not");
        }
        // Of those that had begun before.
        self.end_sessions();
        let ended = match self.store.latched() {
            Some(reason) => Err(StoreError::Latched(reason)),
            None => self
                .store
                .checkpoint()
                .inspect_err(|error| self.note_error(error)),
        };
        // Whoever still has this object, and whatever they do with it: the pool may have another daemon from here on.
        self.store.close("the daemon has stopped");
        ended
    }

    fn end_sessions(&self) {
        let ids: Vec<_> = self.core.lock().members.keys().copied().collect();
        for id in ids {
            self.seal_session(id, "the daemon stops");
        }
        self.finish_sealed();
    }

    /// A request begins: it is carried out while the answer lives.
    ///
    /// # Errors
    /// `Gone` when the daemon has stopped.
    pub(crate) fn begin_request(&self) -> Result<Entered<'_>, IpcError> {
        self.entries
            .enter()
            .ok_or_else(|| IpcError::Gone("the daemon has stopped".into()))
    }

    /// Waits for a condition to change, at most so long.
    pub(crate) fn nap<T>(
        &self,
        changed: &parking_lot::Condvar,
        guard: &mut MutexGuard<'_, T>,
        time: Duration,
    ) {
        if self.clock.takes_turns() {
            MutexGuard::unlocked(guard, || self.clock.pause(time));
        } else {
            let _ = changed.wait_for(guard, time);
        }
    }

    pub(crate) fn locked(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }
}

fn first_lease(store: &Store) -> Result<LeaseNo, StoreError> {
    let mut tx = store.begin()?;
    let first = tx.next_lease_nos(LEASE_NUMBERS)?;
    tx.commit()?;
    Ok(first)
}

/// See [`KernelFs::begin_change`].
pub(crate) struct Change<'k> {
    kernel: &'k KernelFs,
    number: u64,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut core = self.kernel.core.lock();
        core.changes.remove(&self.number);
        self.kernel.store.set_reader_horizon(core.reader_horizon());
    }
}

/// The newest transaction that an entry of a log may rest on.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BaseLimit {
    /// Whatever is committed now: the session lives in this run.
    Now,
    /// What was in the journal at the start.
    AtStart(TxId),
}

impl BaseLimit {
    /// The transaction, as of this moment.
    pub(crate) fn newest(self, store: &Store) -> TxId {
        match self {
            Self::Now => store.newest_tx(),
            Self::AtStart(tx) => tx,
        }
    }
}
