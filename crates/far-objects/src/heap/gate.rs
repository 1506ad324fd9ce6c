//! The gate between operations that belong together and cuts: many of the former at once, or one cut.
//!
//! A thread that is inside may enter again, also while a cut waits for it to leave.

use parking_lot::{Condvar, Mutex};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

/// A cut is made or waits. The bits below count who is inside.
const CUT: u64 = 1 << 63;

static IDS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Gates that this thread is inside of, and how often.
    static INSIDE: RefCell<Vec<(u64, usize)>> = const { RefCell::new(Vec::new()) };
}

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
        INSIDE.with_borrow(|all| all.iter().any(|(id, _)| *id == self.id))
    }

    pub(super) fn enter(&self) -> Inside<'_> {
        let is_first = INSIDE.with_borrow_mut(|all| match all.iter_mut().find(|(id, _)| *id == self.id) {
            Some((_, count)) => {
                *count += 1;
                false
            }
            None => {
                all.push((self.id, 1));
                true
            }
        });
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
        INSIDE.with_borrow_mut(|all| {
            if let Some(at) = all.iter().position(|(id, _)| *id == self.gate.id) {
                all[at].1 -= 1;
                if all[at].1 == 0 {
                    all.swap_remove(at);
                }
            }
        });
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
