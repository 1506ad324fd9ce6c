//! The gate between operations that belong together and cuts: many of the former at once, or one cut.
//!
//! A thread that is inside may enter again, also while a cut waits for it to leave.

use parking_lot::{Condvar, Mutex};
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

/// A cut is made or waits. The bits below count who is inside.
const CUT: u64 = 1 << 63;

static IDS: AtomicU64 = AtomicU64::new(0);

/// Gates that a thread may be inside of at once. Those beyond may not be entered again while a cut waits.
const GATES: usize = 16;

thread_local! {
    /// Gates that this thread is inside of, and how often; 0: a free place. Without a destructor, so that it
    /// is there for values that are dropped at the end of a thread.
    static INSIDE: Cell<[(u64, usize); GATES]> = const { Cell::new([(0, 0); GATES]) };
}

const _: () = assert!(!std::mem::needs_drop::<Cell<[(u64, usize); GATES]>>());

#[derive(Debug)]
pub(super) struct Gate {
    id: u64,
    state: AtomicU64,
    lock: Mutex<()>,
    changed: Condvar,
}

/// Somebody is inside. Of the thread that entered.
#[derive(Debug)]
pub(super) struct Inside<'a> {
    gate: &'a Gate,
    not_send: PhantomData<*const ()>,
}

/// Nobody is inside.
#[derive(Debug)]
pub(super) struct Closed<'a> {
    gate: &'a Gate,
}

impl Gate {
    pub(super) fn new() -> Self {
        Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            state: AtomicU64::new(0),
            lock: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Whether this thread is inside.
    pub(super) fn is_inside(&self) -> bool {
        let all = INSIDE.get();
        all.iter().any(|(id, count)| *id == self.id && *count != 0)
    }

    pub(super) fn enter(&self) -> Inside<'_> {
        let mut all = INSIDE.get();
        let is_first = match all.iter_mut().find(|(id, count)| *id == self.id && *count != 0) {
            Some((_, count)) => {
                *count += 1;
                false
            }
            None => {
                if let Some(free) = all.iter_mut().find(|(_, count)| *count == 0) {
                    *free = (self.id, 1);
                }
                true
            }
        };
        INSIDE.set(all);
        while self.state.fetch_add(1, Ordering::SeqCst) & CUT != 0 && is_first {
            self.leave();
            let mut lock = self.lock.lock();
            while self.state.load(Ordering::SeqCst) & CUT != 0 {
                self.changed.wait(&mut lock);
            }
        }
        Inside {
            gate: self,
            not_send: PhantomData,
        }
    }

    fn leave(&self) {
        if self.state.fetch_sub(1, Ordering::SeqCst) == CUT | 1 {
            drop(self.lock.lock());
            self.changed.notify_all();
        }
    }

    /// Waits until nobody is inside, and keeps others out. One at a time.
    pub(super) fn close(&self) -> Closed<'_> {
        self.state.fetch_or(CUT, Ordering::SeqCst);
        let mut lock = self.lock.lock();
        while self.state.load(Ordering::SeqCst) != CUT {
            self.changed.wait(&mut lock);
        }
        Closed { gate: self }
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut all = INSIDE.get();
        if let Some((_, count)) = all
            .iter_mut()
            .find(|(id, count)| *id == self.gate.id && *count != 0)
        {
            *count -= 1;
        }
        INSIDE.set(all);
        self.gate.leave();
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.gate.state.fetch_and(!CUT, Ordering::SeqCst);
        drop(self.gate.lock.lock());
        self.gate.changed.notify_all();
    }
}
