//! What is done with the program's calls: functions from above, set once while the library starts.
//!
//! A reader in a signal handler is safe: it loads one pointer, and nothing is written after the start.

use super::args::Args;
use std::sync::OnceLock;

/// What the modules above do with calls, and with the library itself.
#[derive(Debug, Clone, Copy)]
pub struct Handlers {
    /// Makes a call of the program. `None`: the kernel is to make it.
    pub program: fn(&Args) -> Option<isize>,
    /// Sees a call of a child that has this process' memory for a while (`vfork`): the kernel makes it.
    pub lent: fn(&Args),
    /// Nothing is to be served: the program's calls could not be reached.
    pub switch_off: fn(),
}

static HANDLERS: OnceLock<Handlers> = OnceLock::new();

/// Sets the functions, before any stub is reachable; a second time changes nothing.
pub(super) fn set(handlers: Handlers) {
    let _ = HANDLERS.set(handlers);
}

/// The functions; `None` before the library has started.
pub(super) fn get() -> Option<&'static Handlers> {
    HANDLERS.get()
}
