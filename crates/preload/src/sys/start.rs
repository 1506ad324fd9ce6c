//! Runs when the library is loaded. Calls one function by which the modules above set themselves up.

use super::handlers::{self, Handlers};
use super::{entry, patch, signals, thread_exit};
use crate::syscalls;

/// Returns the value of an environment variable and spoils it, so that programs that inherit it ignore it. To
/// be called before the program has threads.
#[must_use]
pub fn take_variable(name: &str) -> Option<String> {
    let name = std::ffi::CString::new(name).ok()?;
    // SAFETY: a text that ends with a zero byte.
    let at = unsafe { libc::getenv(name.as_ptr()) };
    if at.is_null() {
        return None;
    }
    // SAFETY: `getenv` returns a text that ends with a zero byte, in writable memory of this process; no
    // other code uses it yet.
    unsafe {
        let text = std::ffi::CStr::from_ptr(at).to_str().ok().map(str::to_owned);
        if *at != 0 {
            *at = b'x' as libc::c_char;
        }
        text
    }
}

/// Has the library start with `$begin`, which returns the handlers of calls.
macro_rules! at_load {
    ($begin:path) => {
        #[used]
        #[unsafe(link_section = ".init_array")]
        static START: extern "C" fn() = {
            extern "C" fn start() {
                // SAFETY: the loader runs constructors in one thread, before the program has any other.
                unsafe { $crate::sys::start::run($begin) };
            }
            start
        };
    };
}
pub(crate) use at_load;

/// Starts the library, before the program's own code. No code of the library can run before: it exports no
/// symbol.
///
/// # Safety
/// For `at_load` only: the process must have one thread.
pub unsafe fn run(begin: fn() -> Option<Handlers>) {
    // A panic must not leave this function.
    let _ = std::panic::catch_unwind(|| {
        if !thread_exit::begin() {
            return;
        }
        let Some(handlers) = begin() else { return };
        handlers::set(handlers);
        // With one thread this takes no time; with several the kernel waits for all processors, some 10 ms.
        varve_ipc::page::register_for_membarrier();
        signals::begin();
        for number in &syscalls::all() {
            entry::want(*number);
        }
        // SAFETY: the caller vouches for one thread.
        if !unsafe { patch_libraries() } {
            (handlers.switch_off)();
        }
    });
}

/// Diverts the system calls of the C library to the stubs, and in the libraries for asynchronous I/O those
/// that set up rings. False if none in the C library can be replaced.
///
/// # Safety
/// To be called before the program has threads.
unsafe fn patch_libraries() -> bool {
    let rings = [libc::SYS_io_setup, libc::SYS_io_uring_setup].map(|number| number as u32);
    let wanted = |number: u32| entry::is_wanted(number as usize);
    let mut patched = false;
    for library in patch::loaded() {
        let name = library.name.as_slice();
        let file = name.rsplit(|byte| *byte == b'/').next().unwrap_or(name);
        let entry = entry::address();
        if file.starts_with(b"libc.so.") || file.starts_with(b"libc-2.") {
            // SAFETY: the caller promises that there is one thread.
            let done = unsafe { patch::patch(&library, entry, wanted, true) };
            patched |= done.is_some_and(|count| count > 0);
        } else if file.starts_with(b"libaio.so") || file.starts_with(b"liburing.so") {
            // SAFETY: as above.
            unsafe { patch::patch(&library, entry, |number| rings.contains(&number), false) };
        }
    }
    patched
}
