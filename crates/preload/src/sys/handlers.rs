//! Handlers of the program's calls: functions of the modules above, set once while the library starts.
//!
//! A reader in a signal handler is safe: it loads one pointer, and nothing is written after the start.

use super::args::Args;
use std::sync::OnceLock;

/// The functions that handle the program's calls, and switch the library off.
#[derive(Debug, Clone, Copy)]
pub struct Handlers {
    /// Makes a call of the program. `None` if the kernel is to make it.
    pub program: fn(&Args) -> Option<isize>,
    /// Prepares a call of a `vfork` child, which runs in this process' memory; the kernel makes the call.
    pub lent: fn(&Args),
    /// Switches serving off, when the program's calls cannot be intercepted.
    pub switch_off: fn(),
}

static HANDLERS: OnceLock<Handlers> = OnceLock::new();

/// Sets the functions, before any stub is reachable; a second call has no effect.
pub(super) fn set(handlers: Handlers) {
    let _ = HANDLERS.set(handlers);
}

/// Returns the functions; `None` before the library has started.
pub(super) fn get() -> Option<&'static Handlers> {
    HANDLERS.get()
}
