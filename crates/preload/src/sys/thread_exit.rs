//! Destructors of thread-local values. The C library's list of them (`__cxa_thread_atexit_impl`) calls `malloc`
//! for each entry, which a signal handler that calls `write` may have interrupted. So the standard library, as
//! it is linked here, finds this list instead. It is run as the destructor of thread-specific data: after those
//! of the program's `thread_local` objects, which may make calls on a mount. Nothing is run in the main thread
//! when the process exits.

use super::entry;
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::OnceLock;

/// To be run on `on`; then comes `next`.
struct Destructor {
    run: unsafe extern "C" fn(*mut u8),
    on: *mut u8,
    next: *mut Self,
}

thread_local! {
    /// The thread's destructors, the newest first.
    static DESTRUCTORS: Cell<*mut Destructor> = const { Cell::new(null_mut()) };
}

static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();

// Not visible to the program, whose own destructors stay with the C library. Of x86-64, as all of `sys`.
std::arch::global_asm!(
    ".pushsection .text.varve_thread_atexit,\"ax\",@progbits",
    ".hidden __cxa_thread_atexit_impl",
    ".globl __cxa_thread_atexit_impl",
    ".type __cxa_thread_atexit_impl,@function",
    "__cxa_thread_atexit_impl:",
    "jmp {register}",
    ".popsection",
    register = sym register,
);

/// Reserves the keys of thread-specific data, this module's and the standard library's, which has one for
/// threads' handles. To be called when the library is loaded: for the first 32 keys of a process the C library
/// allocates nothing. False if none is left.
pub fn begin() -> bool {
    let _ = std::thread::current();
    key().is_some()
}

fn key() -> Option<libc::pthread_key_t> {
    *KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: `key` is a place for the result; `run_all` lives as long as the process.
        let made = unsafe { libc::pthread_key_create(&raw mut key, Some(run_all)) };
        (made == 0).then_some(key)
    })
}

/// Has `run` called on `on` at the end of this thread. As `__cxa_thread_atexit_impl`: 0, or -1 if it cannot.
///
/// # Safety
/// `run` may be called on `on` in this thread until that ends.
unsafe extern "C" fn register(run: unsafe extern "C" fn(*mut u8), on: *mut u8, _library: *mut u8) -> i32 {
    let _inside = entry::stay_inside();
    let next = DESTRUCTORS.get();
    if next.is_null() {
        let Some(key) = key() else { return -1 };
        // SAFETY: a key of this process; the value only says that there are entries.
        if unsafe { libc::pthread_setspecific(key, std::ptr::dangling::<c_void>()) } != 0 {
            return -1;
        }
    }
    DESTRUCTORS.set(Box::into_raw(Box::new(Destructor { run, on, next })));
    0
}

/// Runs this thread's destructors, and those that they register.
unsafe extern "C" fn run_all(_: *mut c_void) {
    let _inside = entry::stay_inside();
    loop {
        let first = DESTRUCTORS.get();
        if first.is_null() {
            return;
        }
        // SAFETY: `register` made it from a box, and each is taken off the list once.
        let first = unsafe { Box::from_raw(first) };
        DESTRUCTORS.set(first.next);
        // SAFETY: the caller of `register`.
        unsafe { (first.run)(first.on) };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::{Arc, Mutex};

    struct Says(Arc<Mutex<Vec<u32>>>, u32);

    impl Drop for Says {
        fn drop(&mut self) {
            self.0.lock().expect("whole").push(self.1);
            if self.1 == 1 {
                // Made in a destructor: run as well.
                LATE.with_borrow_mut(|late| *late = Some(Says(Arc::clone(&self.0), 3)));
            }
        }
    }

    thread_local! {
        static FIRST: RefCell<Option<Says>> = const { RefCell::new(None) };
        static SECOND: RefCell<Option<Says>> = const { RefCell::new(None) };
        static LATE: RefCell<Option<Says>> = const { RefCell::new(None) };
    }

    #[test]
    fn what_a_thread_leaves_is_dropped_at_its_end() {
        let dropped = Arc::new(Mutex::new(Vec::new()));
        let said = Arc::clone(&dropped);
        let seen = std::thread::spawn(move || {
            FIRST.with_borrow_mut(|first| *first = Some(Says(Arc::clone(&said), 1)));
            SECOND.with_borrow_mut(|second| *second = Some(Says(said, 2)));
            !super::DESTRUCTORS.get().is_null()
        });
        assert!(
            seen.join().expect("it ends"),
            "the standard library has its own list"
        );
        assert_eq!(*dropped.lock().expect("whole"), [2, 1, 3]);
    }
}
