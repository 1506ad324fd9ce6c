//! The lease on one inode: its state, and the word that requests pin it with.
//!
//! The word in [`Inode::lease`]: bits 0..32 count pins; `MAY_READ` and `MAY_WRITE` say what a pin may do;
//! `CLOSED` bars new pins. The flags change under the state's lock; pins are counted without it. A thread's
//! first pin is not counted in the word but named in its slot ([`slots::pin`]), so that threads that use one
//! file do not take the word from each other: *name, light barrier, look at the word* against *bar, heavy
//! barrier, look at the slots*.

use std::sync::Arc;
use std::sync::OnceLock;
use std::time::Duration;
use varve_format::{InodeAttr, InodeKey, LeaseNo};
use varve_ipc::{Clock, LeaseMode};

use crate::dir_cache::DirNames;
use crate::inode::Inode;
use crate::kernel_cache::pages::{Above, KernelCall};
use crate::log::slots;
use crate::seeded::{Bug, armed};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, wait_for};

const COUNT: u64 = 0xffff_ffff;
const MAY_READ: u64 = 1 << 40;
const MAY_WRITE: u64 = 1 << 41;
const CLOSED: u64 = 1 << 42;

/// Whom a pin is for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Use<'c> {
    /// What is seen under it is not kept beyond it.
    Own,
    /// The kernel keeps pages of what it is for.
    Kernel(&'c KernelCall),
    /// Copies of it are kept in the process.
    Copy,
}

/// How far giving back has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Held, or not there at all.
    Settled,
    /// Being given back: nothing new is pinned, those who have pins finish.
    Draining,
    /// Being given back: the kernel drops its pages; what the lease suffices for goes on.
    Dropping,
    /// `Release` was sent.
    Releasing,
}

/// The slow half of a node.
#[derive(Debug)]
pub(crate) struct LeaseState {
    /// Number of the grant; meaningless without a mode.
    pub number: LeaseNo,
    /// What is held.
    pub mode: Option<LeaseMode>,
    /// Highest number that was given back.
    pub given_back: LeaseNo,
    /// How far giving back has come.
    pub phase: Phase,
}

/// Extended attributes of an inode, by name.
pub(crate) type Xattrs = std::collections::BTreeMap<Vec<u8>, Vec<u8>>;

/// Everything that a session knows of one inode.
pub(crate) struct Node {
    /// Attributes, log pointers and extents.
    pub inode: Arc<Inode>,
    state: Mutex<LeaseState>,
    gate: Condvar,
    /// Requests that want more than is held.
    pub waiters: AtomicU32,
    /// The kernel asked for data since it was last told to drop what it has.
    pub data_used: AtomicBool,
    /// Copies may be kept of what was read under the lease: they are dropped before it goes.
    pub copied: AtomicBool,
    /// What the kernel above keeps of this file.
    pub above: Above,
    /// The lease came ahead of its use: 1 to read, 2 to write.
    pub ahead: AtomicU32,
    /// Used since the last look for idle leases.
    pub recent: AtomicBool,
    /// The entry of our log that makes this inode; 0: it is older than the session.
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
    /// Held by the one thread that asks for numbers because there are none.
    pub provider: Mutex<()>,
}

/// Numbers for new inodes that a directory keeps.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    /// The numbers with their leases, the next one last.
    pub kept: Vec<(InodeKey, LeaseNo)>,
    /// How many were asked for the last time.
    pub asked: u16,
    /// More are being asked for ahead.
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

    /// Pins if what is held suffices and nothing bars it.
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

    /// Pins in the calling thread's slot. `Err`: it is taken, or what is held does not suffice, or something
    /// bars it; `true` with it if the worker may have seen the attempt and must look again.
    #[inline]
    pub(crate) fn try_pin_slot(&self, mode: LeaseMode) -> Result<usize, bool> {
        let lane = slots::pin(self.inode.id()).ok_or(false)?;
        if self.suffices(mode) {
            self.note_recent();
            return Ok(lane);
        }
        Err(self.unpin_slot(lane))
    }

    /// Notes a use, for those who look for idle leases.
    #[inline]
    pub(crate) fn note_recent(&self) {
        if !self.recent.load(Ordering::Relaxed) {
            self.recent.store(true, Ordering::Relaxed);
        }
    }

    /// Ends a pin in a slot; `true` if somebody may wait for that.
    #[inline]
    pub(crate) fn unpin_slot(&self, lane: usize) -> bool {
        slots::unpin(lane);
        self.word().load(Ordering::Acquire) & CLOSED != 0
    }

    /// Whether what is held suffices, and nothing bars its use.
    #[inline]
    pub(crate) fn suffices(&self, mode: LeaseMode) -> bool {
        let need = match mode {
            LeaseMode::Read => MAY_READ,
            LeaseMode::Write => MAY_WRITE,
        };
        self.word().load(Ordering::Acquire) & (need | CLOSED) == need
    }

    /// Ends a pin; `true` if it was the last and somebody waits for that.
    #[inline]
    pub(crate) fn unpin(&self) -> bool {
        let before = self.word().fetch_sub(1, Ordering::AcqRel);
        before & COUNT == 1 && before & CLOSED != 0
    }

    /// Requests that use the lease now. New ones are barred; one that is missed here looks again when it
    /// ends.
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

    /// What is held, and whether it stays so as far as is known.
    pub(crate) fn settled(&self) -> (Option<LeaseMode>, bool) {
        let state = self.state.lock();
        (state.mode, state.phase == Phase::Settled)
    }

    /// What is held.
    pub(crate) fn mode(&self) -> Option<LeaseMode> {
        self.state.lock().mode
    }

    /// Sets what pins may do to fit the state, and bars new ones if `closed`.
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

    /// Counts a pin that a fresh grant gives, whatever bars others.
    pub(crate) fn pin_granted(&self) {
        self.word().fetch_add(1, Ordering::AcqRel);
        self.recent.store(true, Ordering::Relaxed);
    }

    /// Wakes all who wait at the gate.
    pub(crate) fn open_gate(&self) {
        // The lock orders the wake after the change that it announces.
        drop(self.state.lock());
        self.gate.notify_all();
    }

    /// Waits while pins are barred (bounded by `timeout`, for those who must look at more than this node).
    pub(crate) fn wait_at_gate(&self, clock: &dyn Clock, timeout: Duration) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Draining | Phase::Releasing) {
            wait_for(clock, &self.gate, &mut state, timeout);
        }
    }

    /// Number of what is held.
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

    /// Takes over a grant, which took the place of grant `replaces` without a gap. `false`: it was given back
    /// already.
    pub(crate) fn install(
        &self,
        number: LeaseNo,
        mode: LeaseMode,
        replaces: Option<LeaseNo>,
        attr: Option<InodeAttr>,
        pin: bool,
    ) -> bool {
        let mut state = self.state.lock();
        if number <= state.given_back || (state.mode.is_some() && number < state.number) {
            return false;
        }
        // Between another grant and this one others may have changed everything.
        let goes_on =
            number == state.number || (replaces == Some(state.number) && state.phase != Phase::Releasing);
        let fresh = state.mode.is_none() || !goes_on;
        if fresh {
            self.forget();
            if let Some(attr) = attr
                && !(armed(Bug::CacheKeptAfterRevocation) && state.given_back > LeaseNo(0))
            {
                self.inode.reset(attr);
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

    /// Drops what is known of names and attributes beside the inode.
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

    /// Threads pin and unpin while the lease is closed and given back: nobody has a pin when it goes, and the
    /// one who gives it back is woken.
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
        // As the worker does: look, and if somebody is there, wait for the last one's word.
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
