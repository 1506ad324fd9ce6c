//! The thread that writes full blocks and cleans before blocks are missing.

use super::clean::Cleaned;
use super::{Arc, Core};
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Free blocks below which it cleans.
const CLEAN_BELOW_BLOCKS: usize = 8;
/// Objects that a step moves, so that an end does not wait long.
const STEP_OBJECTS: usize = 256;
/// How long it rests after an error; who needs memory does not wait for it.
const REST: Duration = Duration::from_millis(100);

/// Wakes the thread.
#[derive(Debug, Default)]
pub(super) struct Signal {
    has_thread: AtomicBool,
    state: Mutex<SignalState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct SignalState {
    has_work: bool,
    is_ending: bool,
}

impl Signal {
    pub(super) fn has_thread(&self) -> bool {
        self.has_thread.load(Ordering::Relaxed)
    }

    pub(super) fn wake(&self) {
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.has_work, true) {
            self.changed.notify_one();
        }
    }

    /// Waits for work. False at the end.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        while !state.has_work && !state.is_ending {
            self.changed.wait(&mut state);
        }
        state.has_work = false;
        !state.is_ending
    }

    fn is_ending(&self) -> bool {
        self.state.lock().is_ending
    }

    fn rest(&self) {
        let mut state = self.state.lock();
        if !state.is_ending {
            self.changed.wait_for(&mut state, REST);
        }
    }
}

/// The thread. Dropping this ends it.
pub(super) struct Background {
    running: Option<(Arc<Core>, JoinHandle<()>)>,
}

impl Background {
    /// Starts it, if there is to be one.
    pub(super) fn start(core: Option<&Arc<Core>>) -> std::io::Result<Self> {
        let Some(core) = core else {
            return Ok(Self { running: None });
        };
        let of_thread = Arc::clone(core);
        let builder = std::thread::Builder::new().name("far-objects".into());
        let thread = builder.spawn(move || of_thread.work())?;
        core.signal.has_thread.store(true, Ordering::Relaxed);
        Ok(Self {
            running: Some((Arc::clone(core), thread)),
        })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some((core, thread)) = self.running.take() {
            core.signal.state.lock().is_ending = true;
            core.signal.changed.notify_one();
            // A panic of it was printed; there is nobody to tell.
            let _ = thread.join();
        }
    }
}

impl Core {
    fn work(&self) {
        while self.signal.wait() {
            if self.write_and_clean().is_err() {
                // Counted by the log. Who needs memory gets the error where it matters.
                self.signal.rest();
            }
        }
    }

    /// Whether few blocks are free. What the next checkpoint frees counts, but for the last few.
    fn is_short_of_blocks(&self) -> bool {
        let available = self.log.available_blocks();
        available < CLEAN_BELOW_BLOCKS && available + self.log.held_blocks() < 2 * CLEAN_BELOW_BLOCKS
    }

    fn write_and_clean(&self) -> Result<(), crate::Error> {
        while self.log.has_pending() {
            self.log.write_pending()?;
        }
        while self.is_short_of_blocks() && !self.signal.is_ending() {
            if self.clean_step(STEP_OBJECTS)? == Cleaned::Nothing {
                break;
            }
            while self.log.has_pending() {
                self.log.write_pending()?;
            }
        }
        Ok(())
    }
}
