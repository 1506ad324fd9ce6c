//! Threads that take no signal.

use std::io;
use std::thread::{Builder, JoinHandle};

/// Starts a thread with all signals blocked: a handler of the program that ran on it could touch memory that
/// only this thread brings.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // SAFETY: signal sets are plain bits, for which zeros are valid; both live over the calls.
    let (mut all, mut before) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: as above. The new thread inherits the mask, and this one gets its own back.
    unsafe {
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
    }
    let thread = Builder::new().name(name.to_owned()).spawn(work);
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    thread
}
