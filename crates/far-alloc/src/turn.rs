//! Whose turn it is to wait for faults.
//!
//! One thread waits at a time: the kernel would wake all that do for each fault. Who has to wait for a device
//! gives the turn to another first.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;

/// The turn. Clones are the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Turn(Arc<(Mutex<bool>, Condvar)>);

impl Turn {
    /// Waits until nobody has it, and takes it.
    pub(crate) fn take(&self) {
        let mut is_taken = self.0.0.lock();
        while *is_taken {
            self.0.1.wait(&mut is_taken);
        }
        *is_taken = true;
    }

    /// Gives it to another.
    pub(crate) fn give(&self) {
        *self.0.0.lock() = false;
        self.0.1.notify_one();
    }
}

/// A thread's part in it.
#[derive(Debug, Default)]
pub(crate) struct Holder {
    turn: Option<Turn>,
    has_it: bool,
}

impl Holder {
    /// Of a thread that waits for faults.
    pub(crate) fn new(turn: &Turn) -> Self {
        Self {
            turn: Some(turn.clone()),
            has_it: false,
        }
    }

    /// Has the turn, after a wait if need be.
    pub(crate) fn take(&mut self) {
        if let Some(turn) = self.turn.as_ref().filter(|_| !self.has_it) {
            turn.take();
            self.has_it = true;
        }
    }

    /// Gives it away, before a wait for something else.
    pub(crate) fn give(&mut self) {
        if std::mem::take(&mut self.has_it)
            && let Some(turn) = &self.turn
        {
            turn.give();
        }
    }
}
