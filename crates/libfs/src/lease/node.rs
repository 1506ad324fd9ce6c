//! The lease on one inode: its state, and the word that requests pin it with.
//!
//! The word in [`Inode::lease`]: bits 0..32 count pins; `MAY_READ` and `MAY_WRITE` say what a pin allows;
//! `CLOSED` bars new pins. The flags change under the state's lock; pins are counted without it. A thread's
//! first pin is not counted in the word but named in its slot ([`slots::pin`]), so that threads that use one
//! file do not contend for the word: *name the inode, light barrier, look at the word* against *bar the
//! lease, heavy barrier, look at the slots*.

use std::sync::Arc;
use std::sync::OnceLock;
use std::time::Duration;
use varve_format::{InodeAttr, InodeKey, LeaseNo};
use varve_ipc::{Clock, LeaseMode, Told};

use crate::dir_cache::{DirNames, Target};
use crate::inode::Inode;
use crate::kernel_cache::dentries::CachedReplies;
use crate::kernel_cache::pages::{Above, KernelCall};
use crate::log::slots;
use crate::seeded::{Bug, armed};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, wait_for};

const COUNT: u64 = 0xffff_ffff;
const MAY_READ: u64 = 1 << 40;
const MAY_WRITE: u64 = 1 << 41;
const CLOSED: u64 = 1 << 42;

/// Purpose of a pin.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Use<'c> {
    /// The results are not kept beyond the pin.
    Own,
    /// The kernel keeps pages of the file after this call.
    Kernel(&'c KernelCall),
    /// The process keeps copies of the file's data.
    Copy,
}

/// Progress of giving a lease back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Held, or not there at all.
    Settled,
    /// Being given back: new pins are barred, existing ones finish.
    Draining,
    /// To be given back: cached replies that depend on the lease expire; calls for which the lease suffices
    /// go on.
    Expiring,
    /// Being given back: the kernel drops its pages; calls for which the lease suffices go on.
    Dropping,
    /// `Release` was sent.
    Releasing,
}

/// The slow half of a node.
#[derive(Debug)]
pub(crate) struct LeaseState {
    /// Number of the grant; meaningless without a mode.
    pub number: LeaseNo,
    /// Mode of the held lease.
    pub mode: Option<LeaseMode>,
    /// Highest number that was given back.
    pub given_back: LeaseNo,
    /// Progress of giving the lease back.
    pub phase: Phase,
}

/// Extended attributes of an inode, by name.
pub(crate) type Xattrs = std::collections::BTreeMap<Vec<u8>, Vec<u8>>;

/// A session's state for one inode.
pub(crate) struct Node {
    /// Attributes, log pointers and extents.
    pub inode: Arc<Inode>,
    state: Mutex<LeaseState>,
    gate: Condvar,
    /// Number of requests that want more than is held.
    pub waiters: AtomicU32,
    /// The kernel has asked for data since it was last told to drop its pages.
    pub data_used: AtomicBool,
    /// The process may keep copies of data that was read under the lease: they are dropped before it goes.
    pub copied: AtomicBool,
    /// Pages of this file that the kernel above keeps.
    pub above: Above,
    /// Replies to the kernel above that depend on the lease.
    pub replies: Arc<CachedReplies>,
    /// The lease was prefetched and not used yet: 1 plus its window's [slot](super::prefetch); 0: no.
    pub ahead: AtomicU32,
    /// Used since the last look for idle leases.
    pub recent: AtomicBool,
    /// Sequence number of the log entry that makes this inode; 0: it is older than the session.
    pub born: AtomicU64,
    /// The time of the last read was moved in memory only.
    pub atime_moved: AtomicBool,
    /// Names, if it is a directory.
    pub names: Mutex<DirNames>,
    /// Extended attributes, when loaded.
    pub xattrs: Mutex<Option<Xattrs>>,
    /// The directory that this directory was found in.
    pub parent: Mutex<Option<InodeKey>>,
    /// Target, if it is a symbolic link and it was read.
    pub target: OnceLock<Vec<u8>>,
    /// Numbers for new inodes in this directory.
    pub numbers: Mutex<Numbers>,
    /// Held by the one thread that asks for numbers when there are none.
    pub provider: Mutex<()>,
}

/// Inode numbers that a directory keeps for new inodes.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    /// The numbers with their leases, the next one last.
    pub kept: Vec<(InodeKey, LeaseNo)>,
    /// Number of them in the last request.
    pub asked: u16,
    /// A request for more is under way or queued.
    pub asking: bool,
}

impl Node {
    /// A node without a lease.
    pub(crate) fn new(attr: InodeAttr) -> Self {
        Self::over(Arc::new(Inode::new(attr)))
    }

    /// A node without a lease over an inode.
    pub(crate) fn over(inode: Arc<Inode>) -> Self {
        Self {
            inode,
            state: Mutex::new(LeaseState {
                number: LeaseNo(0),
                mode: None,
                given_back: LeaseNo(0),
                phase: Phase::Settled,
            }),
            gate: Condvar::new(),
            waiters: AtomicU32::new(0),
            data_used: AtomicBool::new(false),
            copied: AtomicBool::new(false),
            above: Above::default(),
            replies: Arc::default(),
            ahead: AtomicU32::new(0),
            recent: AtomicBool::new(true),
            born: AtomicU64::new(0),
            atime_moved: AtomicBool::new(false),
            names: Mutex::new(DirNames::default()),
            xattrs: Mutex::new(None),
            parent: Mutex::new(None),
            target: OnceLock::new(),
            numbers: Mutex::new(Numbers::default()),
            provider: Mutex::new(()),
        }
    }

    /// The inode's key.
    pub(crate) fn key(&self) -> InodeKey {
        self.inode.key
    }

    fn word(&self) -> &AtomicU64 {
        &self.inode.lease
    }

    /// Pins if the held mode suffices and nothing bars it.
    #[inline]
    pub(crate) fn try_pin(&self, mode: LeaseMode) -> bool {
        let need = match mode {
            LeaseMode::Read => MAY_READ,
            LeaseMode::Write => MAY_WRITE,
        };
        let mut seen = self.word().load(Ordering::Relaxed);
        loop {
            if seen & need == 0 || seen & CLOSED != 0 {
                return false;
            }
            match self
                .word()
                .compare_exchange_weak(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => {
                    if !self.recent.load(Ordering::Relaxed) {
                        self.recent.store(true, Ordering::Relaxed);
                    }
                    return true;
                }
                Err(now) => seen = now,
            }
        }
    }

    /// Pins in the calling thread's slot. `Err`: the slot is taken, or the held mode does not suffice, or the
    /// lease is barred; with `true` if the worker may have seen the attempt and must look again.
    #[inline]
    pub(crate) fn try_pin_slot(&self, mode: LeaseMode) -> Result<usize, bool> {
        let lane = slots::pin(self.inode.id()).ok_or(false)?;
        if self.suffices(mode) {
            self.note_recent();
            return Ok(lane);
        }
        Err(self.unpin_slot(lane))
    }

    /// Notes a use, for the search for idle leases.
    #[inline]
    pub(crate) fn note_recent(&self) {
        if !self.recent.load(Ordering::Relaxed) {
            self.recent.store(true, Ordering::Relaxed);
        }
    }

    /// Ends a pin in a slot; `true` if a thread may wait for that.
    #[inline]
    pub(crate) fn unpin_slot(&self, lane: usize) -> bool {
        slots::unpin(lane);
        self.word().load(Ordering::Acquire) & CLOSED != 0
    }

    /// Whether the held mode suffices, and nothing bars its use.
    #[inline]
    pub(crate) fn suffices(&self, mode: LeaseMode) -> bool {
        let need = match mode {
            LeaseMode::Read => MAY_READ,
            LeaseMode::Write => MAY_WRITE,
        };
        self.word().load(Ordering::Acquire) & (need | CLOSED) == need
    }

    /// Ends a pin; `true` if it was the last and the worker waits for that.
    #[inline]
    pub(crate) fn unpin(&self) -> bool {
        let before = self.word().fetch_sub(1, Ordering::AcqRel);
        before & COUNT == 1 && before & CLOSED != 0
    }

    /// Number of requests that use the lease. For a barred lease: a request that this misses sees the bar,
    /// and has the worker look again.
    pub(crate) fn pins(&self) -> u64 {
        slots::pins(self.inode.id()) + (self.word().load(Ordering::Acquire) & COUNT)
    }

    /// Whether any request seems to use the lease.
    pub(crate) fn seems_pinned(&self) -> bool {
        self.word().load(Ordering::Relaxed) & COUNT != 0 || slots::pins_about(self.inode.id()) != 0
    }

    /// The slow half, locked.
    pub(crate) fn state(&self) -> MutexGuard<'_, LeaseState> {
        self.state.lock()
    }

    /// Returns the held mode, and whether the lease is settled, that is, not being given back.
    pub(crate) fn settled(&self) -> (Option<LeaseMode>, bool) {
        let state = self.state.lock();
        (state.mode, state.phase == Phase::Settled)
    }

    /// Returns the held mode.
    pub(crate) fn mode(&self) -> Option<LeaseMode> {
        self.state.lock().mode
    }

    /// Sets the flags for pins from the state, and bars new pins if `closed`.
    pub(crate) fn publish(&self, state: &LeaseState, closed: bool) {
        let mut flags = match state.mode {
            None => 0,
            Some(LeaseMode::Read) => MAY_READ,
            Some(LeaseMode::Write) => MAY_READ | MAY_WRITE,
        };
        if closed {
            flags |= CLOSED;
        }
        let mut seen = self.word().load(Ordering::Relaxed);
        while let Err(now) = self.word().compare_exchange_weak(
            seen,
            (seen & COUNT) | flags,
            Ordering::AcqRel,
            Ordering::Relaxed,
        ) {
            seen = now;
        }
    }

    /// Counts the pin of a fresh grant, even if new pins are barred.
    pub(crate) fn pin_granted(&self) {
        self.word().fetch_add(1, Ordering::AcqRel);
        self.recent.store(true, Ordering::Relaxed);
    }

    /// Wakes all threads that wait at the gate.
    pub(crate) fn open_gate(&self) {
        // The lock orders the wake after the change that it announces.
        drop(self.state.lock());
        self.gate.notify_all();
    }

    /// Waits while pins are barred (bounded by `timeout`, for callers that must look at more than this node).
    pub(crate) fn wait_at_gate(&self, clock: &dyn Clock, timeout: Duration) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Draining | Phase::Releasing) {
            wait_for(clock, &self.gate, &mut state, timeout);
        }
    }

    /// Returns the number of the held grant.
    pub(crate) fn held_number(&self) -> Option<LeaseNo> {
        let state = self.state.lock();
        state.mode.map(|_| state.number)
    }

    /// Waits until grant `number` is held no more (bounded by `timeout`).
    pub(crate) fn wait_given_back(&self, clock: &dyn Clock, number: LeaseNo, timeout: Duration) -> bool {
        let mut state = self.state.lock();
        let done = |state: &LeaseState| {
            (state.mode.is_none() || state.number != number) && state.phase != Phase::Releasing
        };
        if !done(&state) {
            wait_for(clock, &self.gate, &mut state, timeout);
        }
        done(&state)
    }

    /// Installs a grant that replaced grant `replaces` without a gap. `false`: it was given back already.
    pub(crate) fn install(
        &self,
        number: LeaseNo,
        mode: LeaseMode,
        replaces: Option<LeaseNo>,
        known: Option<(InodeAttr, Told)>,
        pin: bool,
    ) -> bool {
        let mut state = self.state.lock();
        if number <= state.given_back || (state.mode.is_some() && number < state.number) {
            return false;
        }
        // Between another grant and this one other sessions may have changed everything.
        let goes_on =
            number == state.number || (replaces == Some(state.number) && state.phase != Phase::Releasing);
        let fresh = state.mode.is_none() || !goes_on;
        if fresh {
            self.forget();
            if let Some((attr, told)) = known
                && !(armed(Bug::CacheKeptAfterRevocation) && state.given_back > LeaseNo(0))
            {
                self.inode.reset(attr);
                // Before any pin is possible, so no change made here can be older.
                self.take_in(told);
            }
        }
        let more = fresh || state.mode.is_none_or(|held| mode > held || number > state.number);
        if more {
            state.number = number;
            state.mode = Some(mode);
        }
        let closed = matches!(state.phase, Phase::Draining | Phase::Releasing) && !(fresh && more);
        self.publish(&state, closed);
        if pin {
            self.pin_granted();
        }
        true
    }

    fn take_in(&self, told: Told) {
        if told.bare {
            *self.xattrs.lock() = Some(Xattrs::new());
        }
        if let Some(entries) = told.names {
            let names = entries.iter().map(|entry| {
                let (key, kind) = (entry.key, entry.kind);
                (&*entry.name, Target { key, kind })
            });
            self.names.lock().take_page(0, names, None);
        }
        if let Some(extents) = told.extents {
            let mut body = self.inode.write();
            let version = body.extents.version();
            body.extents.learn(version, 0, extents, true);
        }
    }

    /// Drops the cached names, attributes and parent beside the inode.
    pub(crate) fn forget(&self) {
        self.names.lock().clear();
        *self.xattrs.lock() = None;
        self.inode.renew_capability();
        *self.parent.lock() = None;
        self.atime_moved.store(false, Ordering::Relaxed);
    }
}

#[cfg(all(test, feature = "shuttle"))]
mod interleavings {
    //! The lease word under a scheduler that tries interleavings.
    #![allow(clippy::unwrap_used)]

    use super::{Node, Phase};
    use crate::sync::atomic::{AtomicU64, Ordering};
    use shuttle::sync::mpsc::channel;
    use std::sync::Arc;
    use varve_format::{InodeKey, LeaseNo};
    use varve_ipc::LeaseMode;

    /// Threads pin and unpin while the lease is closed and given back: no thread has a pin when it goes, and
    /// the thread that gives it back is woken.
    fn nobody_uses_what_was_given_back() {
        let node = Arc::new(Node::new(crate::lease::table::empty(InodeKey::new(5, 1))));
        {
            let mut state = node.state();
            (state.number, state.mode) = (LeaseNo(1), Some(LeaseMode::Write));
            node.publish(&state, false);
        }
        let gone = Arc::new(AtomicU64::new(0));
        let (last, woken) = channel();
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (node, gone, last) = (Arc::clone(&node), Arc::clone(&gone), last.clone());
                shuttle::thread::spawn(move || {
                    for _ in 0..2 {
                        if node.try_pin(LeaseMode::Write) {
                            assert_eq!(gone.load(Ordering::SeqCst), 0, "pinned after it was given back");
                            if node.unpin() {
                                last.send(()).unwrap();
                            }
                        }
                    }
                })
            })
            .collect();
        {
            let mut state = node.state();
            state.phase = Phase::Draining;
            node.publish(&state, true);
        }
        // As the worker does: look, and if there is a pin, wait for the last one to end.
        while node.pins() > 0 {
            woken.recv().unwrap();
        }
        gone.store(1, Ordering::SeqCst);
        {
            let mut state = node.state();
            (state.mode, state.phase) = (None, Phase::Settled);
            node.publish(&state, false);
        }
        node.open_gate();
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(!node.try_pin(LeaseMode::Read));
    }

    #[test]
    fn lease_goes_only_without_pins() {
        shuttle::check_random(nobody_uses_what_was_given_back, 5_000);
        shuttle::check_pct(nobody_uses_what_was_given_back, 3_000, 3);
    }
}
