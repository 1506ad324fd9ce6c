//! Where the C library's `fork` asks the library before and after. Does not know what is done then.

/// Has `fork` call `before` and, when the child is there, `in_parent` or `in_child`, for as long as the
/// process lives. False if the C library has no room for them.
#[must_use]
pub fn at_fork(before: extern "C" fn(), in_parent: extern "C" fn(), in_child: extern "C" fn()) -> bool {
    // SAFETY: functions that live as long as the process; the library is never unloaded.
    unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) == 0 }
}
