//! Registration of handlers with the C library's `fork`. Does not know what the handlers do.

/// Has `fork` call `before` and, once the child exists, `in_parent` or `in_child`, as long as the process
/// lives. False if the C library has no room for them.
#[must_use]
pub fn at_fork(before: extern "C" fn(), in_parent: extern "C" fn(), in_child: extern "C" fn()) -> bool {
    // SAFETY: functions that live as long as the process; the library is never unloaded.
    unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) == 0 }
}
