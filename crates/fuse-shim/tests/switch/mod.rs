//! FUSE over io_uring as the kernel's switch has it, for tests and benches.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

const FILE: &str = "/sys/module/fuse/parameters/enable_uring";
static ALONE: Mutex<()> = Mutex::new(());

/// Switches it in the kernel, and back when dropped. It counts for the mounts that are made in between; one
/// thread of a process has it at a time.
pub struct UringSwitch {
    before: String,
    _alone: MutexGuard<'static, ()>,
}

impl UringSwitch {
    /// Switches it on or off.
    ///
    /// # Errors
    /// The kernel does not have it, or this is not root.
    pub fn set(on: bool) -> io::Result<Self> {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::fs::read_to_string(FILE)?;
        let switch = Self {
            before,
            _alone: alone,
        };
        switch.turn(on)?;
        Ok(switch)
    }

    /// Switches it again.
    ///
    /// # Errors
    /// Of writing.
    pub fn turn(&self, on: bool) -> io::Result<()> {
        std::fs::write(FILE, if on { "Y" } else { "N" })
    }
}

impl Drop for UringSwitch {
    fn drop(&mut self) {
        let _ = std::fs::write(FILE, &self.before);
    }
}
