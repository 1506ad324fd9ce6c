//! Wakes background threads.

use parking_lot::Mutex;

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
