//! What happens when the library is loaded, and in a child after `fork`.

use super::{entry, patch, signals};
use crate::config::Config;
use crate::{process, syscalls};

/// The value of a variable of the environment, which is wrong afterwards, so that no program that inherits it
/// believes it. Before the program has threads.
#[must_use]
pub fn take_variable(name: &str) -> Option<String> {
    let name = std::ffi::CString::new(name).ok()?;
    // SAFETY: a text that ends with a zero byte.
    let at = unsafe { libc::getenv(name.as_ptr()) };
    if at.is_null() {
        return None;
    }
    // SAFETY: `getenv` hands a text that ends with a zero byte, in memory of this process that may be
    // written; nobody else looks at it yet.
    unsafe {
        let text = std::ffi::CStr::from_ptr(at).to_str().ok().map(str::to_owned);
        if *at != 0 {
            *at = b'x' as libc::c_char;
        }
        text
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Runs before the program's own code. Nothing of the library can be called before: it exports nothing.
extern "C" fn start() {
    // A panic must not leave this function.
    let _ = std::panic::catch_unwind(|| {
        let Some(config) = Config::from_environment() else {
            return;
        };
        if !process::begin(config) || !process::forking::watch() {
            return;
        }
        crate::calls::limits::look();
        // While there is one thread, it takes no time; with several the kernel waits for all processors, some
        // 10 ms.
        varve_ipc::page::register_for_membarrier();
        signals::begin();
        let rings = [libc::SYS_io_setup, libc::SYS_io_uring_setup].map(|number| number as u32);
        let all = syscalls::all();
        for number in &all {
            entry::want(*number);
        }
        let wanted = |number: u32| entry::is_wanted(number as usize);
        let mut patched = false;
        for library in patch::loaded() {
            let name = library.name.as_slice();
            let file = name.rsplit(|byte| *byte == b'/').next().unwrap_or(name);
            let entry = entry::address();
            if file.starts_with(b"libc.so.") || file.starts_with(b"libc-2.") {
                // SAFETY: the loader runs constructors in one thread, before the program has any other.
                let done = unsafe { patch::patch(&library, entry, wanted, true) };
                patched |= done.is_some_and(|count| count > 0);
            } else if file.starts_with(b"libaio.so") || file.starts_with(b"liburing.so") {
                // SAFETY: as above.
                unsafe { patch::patch(&library, entry, |number| rings.contains(&number), false) };
            }
        }
        if !patched {
            process::switch_off();
        }
    });
}
