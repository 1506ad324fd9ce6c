//! The daemon's object: the nouns that operations work on, and what they share. The operations are in `ops`.

use crate::bell::Bell;
use crate::config::Config;
use crate::counters::Counters;
use crate::error::refuse;
use crate::health::Health;
use crate::logs::LogStore;
use crate::placement::jobs::Placer;
use crate::placement::{Hierarchy, Marks, Placement};
use crate::session::inflight::{InFlight, InFlightGuard};
use crate::session::table::{SessionTable, Sessions};
use crate::user_segments::Segments;
use parking_lot::{MutexGuard, RwLock};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use varve_format::TxId;
use varve_ipc::{Clock, IpcError};
use varve_store::{SpaceStats, Store, StoreError};

/// What operators ask for and others implement. Answers JSON.
pub type Hook = Box<dyn Fn(&KernelFs) -> Result<String, String> + Send + Sync>;

/// Blocks that the host under a tier can still hold, beyond what a margin keeps; a tier on a device of its
/// own has no bound.
pub type HostRoom = Box<dyn Fn(varve_format::Tier) -> u64 + Send + Sync>;

/// Blocks that can be promised as far as the host under the pool's files goes; `None`: the pool itself is the
/// bound.
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

/// What a daemon was given, and when it began.
pub(crate) struct Env {
    pub(crate) config: Config,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) owner_uid: u32,
    pub(crate) fsck: Option<Hook>,
    pub(crate) scrub: Option<Hook>,
    pub(crate) tokens: Option<Tokens>,
    /// When it was opened, by the monotonic clock.
    pub(crate) started_ms: u64,
    /// No inode without a name is freed before.
    pub(crate) grace_until_ms: AtomicU64,
}

impl Env {
    /// Whether inodes without a name are kept for clients that may come back.
    pub(crate) fn in_grace(&self) -> bool {
        self.clock.monotonic_ms() < self.grace_until_ms.load(Ordering::Acquire)
    }

    /// Whether a user is root or the pool's owner.
    pub(crate) const fn is_privileged(&self, uid: u32) -> bool {
        uid == 0 || uid == self.owner_uid
    }
}

/// How far the daemon is in its life, and who works for it.
#[derive(Default)]
pub(crate) struct Lifecycle {
    /// Somebody else runs [`KernelFs::tick`], so that work may be left to it.
    pub(crate) background: AtomicBool,
    pub(crate) stopping: AtomicBool,
    pub(crate) in_flight: InFlight,
    pub(crate) shutdown_asked: AtomicBool,
    pub(crate) bell: Bell,
    /// Rung when a session has asked for a digest that it does not wait for.
    pub(crate) digest_bell: Bell,
}

impl Lifecycle {
    /// A request begins: it is carried out while the answer lives.
    ///
    /// # Errors
    /// `Gone` when the daemon has stopped.
    pub(crate) fn begin_request(&self) -> Result<InFlightGuard<'_>, IpcError> {
        self.in_flight
            .enter()
            .ok_or_else(|| IpcError::Gone("the daemon has stopped".into()))
    }
}

/// What bounds the space that is promised.
#[derive(Default)]
pub(crate) struct SpaceLimits {
    /// What the host can still hold of a tier.
    pub(crate) host_room: OnceLock<HostRoom>,
    /// What it can still hold at all.
    pub(crate) host_left: OnceLock<HostLeft>,
    /// Held alone while space is looked for, shared where some is promised: see `ops::reserve`.
    pub(crate) turn: RwLock<()>,
}

impl SpaceLimits {
    /// Blocks that can be promised now.
    pub(crate) fn promisable(&self, store: &Store) -> u64 {
        let stats = store.space();
        match self.host_left.get().and_then(|left| left(&stats)) {
            Some(left) => left.min(stats.available),
            None => stats.available,
        }
    }
}

/// The daemon: the nouns that operations work on. Threads call it; it has none of its own (see
/// [`crate::Daemon`]).
pub struct KernelFs {
    pub(crate) env: Env,
    pub(crate) store: Store,
    pub(crate) logs: Arc<dyn LogStore>,
    pub(crate) placer: Placer,
    pub(crate) sessions: Sessions,
    /// What ordinary users' sessions map.
    pub(crate) segments: Segments,
    pub(crate) health: Health,
    pub(crate) counters: Counters,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) space: SpaceLimits,
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

    /// Bounds what is moved to tiers by what their host can hold. The first one stays.
    pub fn set_host_room(&self, room: HostRoom) {
        let _ = self.space.host_room.set(room);
    }

    /// Bounds what is promised by what the host can hold. The first one stays.
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

/// What every operation that changes something works on: the shared area, the sessions, settings and time,
/// and how far the daemon is in its life.
#[derive(Clone, Copy)]
pub(crate) struct Core<'k> {
    pub(crate) env: &'k Env,
    pub(crate) store: &'k Store,
    pub(crate) sessions: &'k Sessions,
    pub(crate) lifecycle: &'k Lifecycle,
}

impl<'k> Core<'k> {
    /// Out of the daemon's nouns.
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

    /// What errors of the store do to the pool.
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

    /// Refused because the pool is read-only, if it is.
    pub(crate) fn check_writable(&self) -> Result<(), IpcError> {
        if self.lifecycle.stopping.load(Ordering::Acquire) {
            return Err(IpcError::Gone("the daemon is stopping".into()));
        }
        match self.store.latched() {
            Some(_) => Err(IpcError::Errno(libc::EROFS)),
            None => Ok(()),
        }
    }

    /// Blocks that are freed while the answer lives are not reused before the sessions that may read them
    /// have been told.
    pub(crate) fn begin_change(&self) -> Change<'k> {
        Change::begin(self.store, self.sessions)
    }

    /// Waits for a condition to change, at most so long.
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

/// What errors of the store do to the pool.
#[derive(Clone, Copy)]
pub(crate) struct Faults<'k> {
    store: &'k Store,
    sessions: &'k Sessions,
    clock: &'k dyn Clock,
}

impl Faults<'_> {
    /// Makes the pool read-only when a device could not write, or is gone, and ends every wait. Damage is
    /// counted; other errors do nothing: what cannot be read, its device has counted.
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

    /// What a client is told whose request failed by `error`, which is noted: logged, and latched, as needed.
    /// That something cannot be read, also of the metadata on slower tiers, is no reason to write nothing any
    /// more; the device has counted it.
    pub(crate) fn refused(&self, error: &StoreError) -> IpcError {
        self.note_error(error);
        refuse(error)
    }

    /// What a client is told whose read failed. One sector that cannot be read is one file's damage: the pool
    /// goes on.
    pub(crate) fn unreadable(&self, error: &StoreError) -> IpcError {
        if error.is_failed_read() {
            // The device has counted it.
            refuse(error)
        } else {
            self.refused(error)
        }
    }
}

/// See [`Core::begin_change`].
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
