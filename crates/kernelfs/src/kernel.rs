//! The daemon's object: the nouns that operations work on, and their shared parts. The operations are in
//! `ops`.

use crate::bell::Bell;
use crate::config::Config;
use crate::counters::Counters;
use crate::error::refuse;
use crate::health::Health;
use crate::logs::LogStore;
use crate::placement::jobs::{DeviceGone, Placer};
use crate::placement::{Driver, Meters, Placement};
use crate::session::inflight::{InFlight, InFlightGuard};
use crate::session::table::{SessionTable, Sessions};
use crate::user_segments::Segments;
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use varve_format::TxId;
use varve_ipc::{Clock, IpcError};
use varve_placement::rules::Rules;
use varve_store::{SpaceStats, Store, StoreError};

/// A command for operators that a crate above implements. Answers JSON.
pub type Hook = Box<dyn Fn(&KernelFs) -> Result<String, String> + Send + Sync>;

/// Blocks that the host under a tier can still hold, beyond a margin; a tier on a device of its own has no
/// bound.
pub type HostRoom = Box<dyn Fn(varve_format::Tier) -> u64 + Send + Sync>;

/// Blocks that can be reserved as far as the host under the pool's files allows; `None`: the pool itself is
/// the bound.
pub type HostLeft = Box<dyn Fn(&SpaceStats) -> Option<u64> + Send + Sync>;

/// Source of session tokens in a deterministic test.
pub type Tokens = Box<dyn Fn() -> u128 + Send + Sync>;

/// Constituents of a daemon.
pub struct Parts {
    /// The shared area.
    pub store: Store,
    /// Logs and pages.
    pub logs: Arc<dyn LogStore>,
    /// Settings, validated.
    pub config: Config,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Placement of new data, and later moves.
    pub placement: Box<dyn Placement>,
    /// Measures the store's devices.
    pub meters: Arc<Meters>,
    /// Operators' rules, which come before it; `None`: they cannot be read.
    pub rules: Option<Rules>,
    /// Owner of the pool: privileged besides root.
    pub owner_uid: u32,
    /// Implements `fsck` of the running pool.
    pub fsck: Option<Hook>,
    /// Implements `scrub`.
    pub scrub: Option<Hook>,
    /// Tokens of new sessions; `None`: the system's random numbers.
    pub tokens: Option<Tokens>,
}

impl Parts {
    /// Fills in default policies, and this process' user as the owner.
    pub fn new(store: Store, logs: Arc<dyn LogStore>, config: Config, clock: Arc<dyn Clock>) -> Self {
        let meters = Arc::new(Meters::of(&store, &clock));
        let driver = Driver::new(&config, &store.space(), Arc::clone(&meters));
        Self {
            store,
            logs,
            config,
            clock,
            placement: Box::new(driver),
            meters,
            rules: Some(Rules::default()),
            owner_uid: rustix::process::geteuid().as_raw(),
            fsck: None,
            scrub: None,
            tokens: None,
        }
    }
}

/// The daemon's surroundings, and the time of its start.
pub(crate) struct Env {
    pub(crate) config: Config,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) owner_uid: u32,
    pub(crate) fsck: Option<Hook>,
    pub(crate) scrub: Option<Hook>,
    pub(crate) tokens: Option<Tokens>,
    /// Time of the start, by the monotonic clock.
    pub(crate) started_ms: u64,
    /// End of the grace period: before it, no inode without a name is freed.
    pub(crate) grace_until_ms: AtomicU64,
}

impl Env {
    /// Whether inodes without a name are kept for clients that may come back.
    pub(crate) fn in_grace(&self) -> bool {
        self.clock.monotonic_ms() < self.grace_until_ms.load(Ordering::Acquire)
    }

    /// The moment, by the clock, that the kernel's count of ticks has come to.
    pub(crate) fn tick_moment(&self) -> Duration {
        self.clock.moment().saturating_sub(self.clock.tick_lag())
    }

    /// Whether a user is root or the pool's owner.
    pub(crate) const fn is_privileged(&self, uid: u32) -> bool {
        uid == 0 || uid == self.owner_uid
    }
}

/// State of the daemon's life, and wake-ups of its threads.
#[derive(Default)]
pub(crate) struct Lifecycle {
    /// Another thread runs [`KernelFs::tick`], so work may be left to it.
    pub(crate) background: AtomicBool,
    pub(crate) stopping: AtomicBool,
    pub(crate) in_flight: InFlight,
    pub(crate) shutdown_asked: AtomicBool,
    pub(crate) bell: Bell,
    /// Rung when a session has asked for a digest that it does not wait for.
    pub(crate) digest_bell: Bell,
}

impl Lifecycle {
    /// Begins a request; it is under way as long as the returned guard lives.
    ///
    /// # Errors
    /// `Gone` when the daemon has stopped.
    pub(crate) fn begin_request(&self) -> Result<InFlightGuard<'_>, IpcError> {
        self.in_flight
            .enter()
            .ok_or_else(|| IpcError::Gone("the daemon has stopped".into()))
    }
}

/// Bounds of the space that can be reserved.
#[derive(Default)]
pub(crate) struct SpaceLimits {
    /// Blocks of a tier that the host can still hold.
    pub(crate) host_room: OnceLock<HostRoom>,
    /// Blocks that the host can still hold in all.
    pub(crate) host_left: OnceLock<HostLeft>,
    /// Held exclusively during a search for space, shared during a grant: see `ops::reserve`.
    pub(crate) turn: RwLock<()>,
}

impl SpaceLimits {
    /// Blocks that can be reserved.
    pub(crate) fn promisable(&self, store: &Store) -> u64 {
        let stats = store.space();
        match self.host_left.get().and_then(|left| left(&stats)) {
            Some(left) => left.min(stats.available),
            None => stats.available,
        }
    }
}

/// The daemon: it owns the state that operations work on. Threads call it; it has none of its own (see
/// [`crate::Daemon`]).
pub struct KernelFs {
    pub(crate) env: Env,
    pub(crate) store: Store,
    pub(crate) logs: Arc<dyn LogStore>,
    pub(crate) placer: Placer,
    pub(crate) sessions: Sessions,
    /// Segments that ordinary users' sessions map.
    pub(crate) segments: Segments,
    pub(crate) health: Health,
    pub(crate) counters: Counters,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) space: SpaceLimits,
    /// Session numbers that are taken from the pool and not given yet.
    pub(crate) session_ids: Mutex<Range<u64>>,
}

impl KernelFs {
    /// The shared area.
    #[must_use]
    pub const fn store(&self) -> &Store {
        &self.store
    }

    /// Settings.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.env.config
    }

    /// Whether an operator has asked the daemon to end.
    #[must_use]
    pub fn shutdown_asked(&self) -> bool {
        self.lifecycle.shutdown_asked.load(Ordering::Acquire)
    }

    /// Bounds moves to a tier by the space of its host. Only the first call counts.
    pub fn set_host_room(&self, room: HostRoom) {
        let _ = self.space.host_room.set(room);
    }

    /// Has this called after a device was taken out of the pool. Only the first call counts.
    pub fn set_device_gone(&self, told: DeviceGone) {
        let _ = self.placer.device_gone.set(told);
    }

    /// Bounds reservations by the space of the host. Only the first call counts.
    pub fn set_host_left(&self, left: HostLeft) {
        let _ = self.space.host_left.set(left);
    }

    /// Sessions that have been sealed since the daemon started.
    pub(crate) fn sealed_until_now(&self) -> u64 {
        self.counters.seals.load(Ordering::Relaxed)
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.env.clock.monotonic_ms()
    }

    pub(crate) fn locked(&self) -> MutexGuard<'_, SessionTable> {
        self.sessions.table.lock()
    }
}

/// The parts that every changing operation works on: the shared area, the sessions, settings and time, and
/// the daemon's life cycle.
#[derive(Clone, Copy)]
pub(crate) struct Core<'k> {
    pub(crate) env: &'k Env,
    pub(crate) store: &'k Store,
    pub(crate) sessions: &'k Sessions,
    pub(crate) lifecycle: &'k Lifecycle,
}

impl<'k> Core<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) const fn of(kernel: &'k KernelFs) -> Self {
        Self {
            env: &kernel.env,
            store: &kernel.store,
            sessions: &kernel.sessions,
            lifecycle: &kernel.lifecycle,
        }
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.env.clock.monotonic_ms()
    }

    pub(crate) fn locked(&self) -> MutexGuard<'k, SessionTable> {
        self.sessions.table.lock()
    }

    /// Returns the handler of the store's errors.
    pub(crate) fn faults(&self) -> Faults<'k> {
        Faults {
            store: self.store,
            sessions: self.sessions,
            clock: &*self.env.clock,
        }
    }

    /// As [`Faults::note_error`].
    pub(crate) fn note_error(&self, error: &StoreError) {
        self.faults().note_error(error);
    }

    /// As [`Faults::stop_writing`].
    pub(crate) fn stop_writing(&self, error: &StoreError) {
        self.faults().stop_writing(error);
    }

    /// As [`Faults::refused`].
    pub(crate) fn refused(&self, error: &StoreError) -> IpcError {
        self.faults().refused(error)
    }

    /// Refuses changes if the pool is read-only.
    pub(crate) fn check_writable(&self) -> Result<(), IpcError> {
        if self.lifecycle.stopping.load(Ordering::Acquire) {
            return Err(IpcError::Gone("the daemon is stopping".into()));
        }
        match self.store.latched() {
            Some(_) => Err(IpcError::Errno(libc::EROFS)),
            None => Ok(()),
        }
    }

    /// Begins a change of the pool's blocks. As long as the returned guard lives, freed blocks are not reused
    /// before the sessions that may read them have been told.
    pub(crate) fn begin_change(&self) -> Change<'k> {
        Change::begin(self.store, self.sessions)
    }

    /// Waits for `changed`, at most `time`.
    pub(crate) fn nap<T>(
        &self,
        changed: &parking_lot::Condvar,
        guard: &mut MutexGuard<'_, T>,
        time: Duration,
    ) {
        if self.env.clock.takes_turns() {
            MutexGuard::unlocked(guard, || self.env.clock.pause(time));
        } else {
            let _ = changed.wait_for(guard, time);
        }
    }
}

/// Handles errors of the store that concern the whole pool.
#[derive(Clone, Copy)]
pub(crate) struct Faults<'k> {
    store: &'k Store,
    sessions: &'k Sessions,
    clock: &'k dyn Clock,
}

impl Faults<'_> {
    /// Makes the pool read-only when a device could not write, or is gone, and ends every wait. Counts
    /// damage. Other errors do nothing here: the device has counted failed reads.
    pub(crate) fn note_error(&self, error: &StoreError) {
        self.store.note_damage(error);
        if error.stops_writing() {
            self.stop_writing(error);
        }
    }

    /// Makes the pool read-only, and ends every wait.
    pub(crate) fn stop_writing(&self, error: &StoreError) {
        if self.store.latched().is_none() {
            self.store.latch(&error.to_string());
        }
        let now_ms = self.clock.monotonic_ms();
        let mut sessions = self.sessions.table.lock();
        if !sessions.latched {
            sessions.latched = true;
            tracing::error!("the pool is read-only from now on: {error}");
        }
        sessions.pump(now_ms);
    }

    /// Returns a client's answer to a request that failed by `error`, and notes the error: logs it, and
    /// latches the pool as needed. An unreadable block, also of metadata on slower tiers, does not latch the
    /// pool; the device has counted it.
    pub(crate) fn refused(&self, error: &StoreError) -> IpcError {
        self.note_error(error);
        refuse(error)
    }

    /// Returns a client's answer to a read that failed. An unreadable sector is damage of one file: the pool
    /// goes on.
    pub(crate) fn unreadable(&self, error: &StoreError) -> IpcError {
        if error.is_failed_read() {
            // The device has counted the error.
            refuse(error)
        } else {
            self.refused(error)
        }
    }
}

/// A change under way: see [`Core::begin_change`].
pub(crate) struct Change<'k> {
    store: &'k Store,
    sessions: &'k Sessions,
    number: u64,
}

impl<'k> Change<'k> {
    /// As [`Core::begin_change`].
    pub(crate) fn begin(store: &'k Store, sessions: &'k Sessions) -> Self {
        let mut table = sessions.table.lock();
        let number = table.next_change;
        table.next_change += 1;
        table.changes.insert(number, store.newest_tx());
        store.set_reader_horizon(table.reader_horizon());
        drop(table);
        Self {
            store,
            sessions,
            number,
        }
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut sessions = self.sessions.table.lock();
        sessions.changes.remove(&self.number);
        self.store.set_reader_horizon(sessions.reader_horizon());
    }
}

/// The newest transaction that a log entry's base may name.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BaseLimit {
    /// The newest committed transaction: the session lives in this run.
    Now,
    /// The newest transaction of the journal at the start.
    AtStart(TxId),
}

impl BaseLimit {
    /// Returns the transaction at this moment.
    pub(crate) fn newest(self, store: &Store) -> TxId {
        match self {
            Self::Now => store.newest_tx(),
            Self::AtStart(tx) => tx,
        }
    }
}
