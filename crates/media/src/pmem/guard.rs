//! Copies out of a mapping whose file another process can shorten meanwhile: a missing page ends the copy,
//! not this process. Knows one instruction and one signal; its caller knows the use of the bytes.
//!
//! Words of a device's registers are loaded and stored in this way too: the pages of a device that is pulled
//! out disappear.
//!
//! The copy is a single instruction at a known address. Touching a page that the file no longer has raises
//! SIGBUS at it; the handler then continues behind the copy, as the kernel does with its own copies from user
//! space. A SIGBUS of persistent memory that is watched goes to [`poison`](super::poison), any other to a
//! handler that was adopted from a loaded library, then to the previous one.

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::poison;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

    std::arch::global_asm!(
        ".hidden varve_media_guarded_copy",
        ".hidden varve_media_guarded_copy_at",
        ".hidden varve_media_guarded_copy_cut",
        ".globl varve_media_guarded_copy",
        ".globl varve_media_guarded_copy_at",
        ".globl varve_media_guarded_copy_cut",
        ".p2align 4",
        // (rdi: to, rsi: from, rdx: bytes) -> bytes that were not copied
        "varve_media_guarded_copy:",
        "mov rcx, rdx",
        "varve_media_guarded_copy_at:",
        "rep movsb",
        "varve_media_guarded_copy_cut:",
        "mov rax, rcx",
        "ret",
        ".hidden varve_media_guarded_load",
        ".hidden varve_media_guarded_load_at",
        ".hidden varve_media_guarded_load_cut",
        ".globl varve_media_guarded_load",
        ".globl varve_media_guarded_load_at",
        ".globl varve_media_guarded_load_cut",
        ".p2align 4",
        // (rdi: from) -> the word, or all of rax set if there is none
        "varve_media_guarded_load:",
        "mov rax, -1",
        "varve_media_guarded_load_at:",
        // Writes the upper half of rax as zeros.
        "mov eax, dword ptr [rdi]",
        "varve_media_guarded_load_cut:",
        "ret",
        ".hidden varve_media_guarded_store",
        ".hidden varve_media_guarded_store_at",
        ".hidden varve_media_guarded_store_cut",
        ".globl varve_media_guarded_store",
        ".globl varve_media_guarded_store_at",
        ".globl varve_media_guarded_store_cut",
        ".p2align 4",
        // (rdi: to, esi: word)
        "varve_media_guarded_store:",
        "varve_media_guarded_store_at:",
        "mov dword ptr [rdi], esi",
        "varve_media_guarded_store_cut:",
        "ret",
    );

    unsafe extern "C" {
        fn varve_media_guarded_copy(to: *mut u8, from: *const u8, bytes: usize) -> usize;
        static varve_media_guarded_copy_at: u8;
        static varve_media_guarded_copy_cut: u8;
        fn varve_media_guarded_load(from: *const u32) -> u64;
        static varve_media_guarded_load_at: u8;
        static varve_media_guarded_load_cut: u8;
        fn varve_media_guarded_store(to: *mut u32, word: u32);
        static varve_media_guarded_store_at: u8;
        static varve_media_guarded_store_cut: u8;
    }

    /// Whether the handler is set. Threads that ask for the first time each set it: one that waited for
    /// another would wait for ever in a child that is forked meanwhile.
    static IS_SET: AtomicBool = AtomicBool::new(false);
    /// The previous action for SIGBUS, kept for ever; null before there is one.
    static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

    /// The handler of a library that was loaded later.
    static ADOPTED: OnceLock<libc::sigaction> = OnceLock::new();
    /// The last address that the adopted handler was asked about.
    static ASKED: AtomicUsize = AtomicUsize::new(0);

    /// Asks a handler that a loaded library set about each fault that is not expected here. One that returns
    /// without having mended the fault meets it again at once, and is not asked a second time.
    pub fn adopt(action: libc::sigaction) {
        // The first one is kept.
        let _ = ADOPTED.set(action);
    }

    /// Calls the handler of an action, if it has one.
    ///
    /// # Safety
    /// Only within a handler of `signal`, with what the kernel passed to it.
    unsafe fn call(
        action: &libc::sigaction,
        signal: libc::c_int,
        info: *mut libc::siginfo_t,
        context: *mut libc::c_void,
    ) -> bool {
        if action.sa_sigaction == libc::SIG_DFL || action.sa_sigaction == libc::SIG_IGN {
            return false;
        }
        if action.sa_flags & libc::SA_SIGINFO != 0 {
            type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: with SA_SIGINFO the field holds a handler of this type.
            let handler: Handler = unsafe { std::mem::transmute(action.sa_sigaction) };
            handler(signal, info, context);
        } else {
            // SAFETY: without SA_SIGINFO, and neither default nor ignored, it holds a handler of this type.
            let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(action.sa_sigaction) };
            handler(signal);
        }
        true
    }

    extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: the kernel hands the context of the interrupted thread to a handler with SA_SIGINFO, and
        // takes changes of it over; the symbols are only compared by their addresses.
        unsafe {
            let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
            let at = &raw mut registers[libc::REG_RIP as usize];
            for (guarded, cut) in [
                (
                    &raw const varve_media_guarded_copy_at,
                    &raw const varve_media_guarded_copy_cut,
                ),
                (
                    &raw const varve_media_guarded_load_at,
                    &raw const varve_media_guarded_load_cut,
                ),
                (
                    &raw const varve_media_guarded_store_at,
                    &raw const varve_media_guarded_store_cut,
                ),
            ] {
                if *at == guarded as i64 {
                    *at = cut as i64;
                    return;
                }
            }
        }
        // SAFETY: the kernel passes a valid record; for SIGBUS it holds an address.
        let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
        // SAFETY: only reads and restores this thread's error number.
        unsafe {
            let errno = *libc::__errno_location();
            // Other codes are sent by processes.
            let is_mended = code > 0 && poison::mend(address);
            *libc::__errno_location() = errno;
            if is_mended {
                return;
            }
        }
        if let Some(action) = ADOPTED.get()
            && code > 0
            && ASKED.swap(address, Ordering::Relaxed) != address
        {
            // SAFETY: this is the handler, and these are its parameters.
            unsafe { call(action, signal, info, context) };
            return;
        }
        // SAFETY: null, or a record that is kept for ever and not changed.
        let before = unsafe { BEFORE.load(Ordering::Acquire).as_ref() };
        // SAFETY: as above.
        if !before.is_some_and(|action| unsafe { call(action, signal, info, context) }) {
            // The access is repeated after the return, and the signal then ends the process as without this
            // handler.
            // SAFETY: `signal` is async-signal-safe, and the default action needs no handler.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    }

    /// Whether guarded accesses can be made. Sets the handler, once in a process.
    pub fn is_ready() -> bool {
        if IS_SET.load(Ordering::Acquire) {
            return true;
        }
        let is_set = set_handler();
        IS_SET.store(is_set, Ordering::Release);
        is_set
    }

    /// Sets the handler, when the one before it is known to it.
    fn set_handler() -> bool {
        // SAFETY: all-zero bytes are a valid `sigaction`; the calls get pointers to values that live through
        // them, or null.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            libc::sigemptyset(&raw mut action.sa_mask);
            let mut before: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) != 0 {
                return false;
            }
            if before.sa_sigaction == action.sa_sigaction {
                return true;
            }
            let before = Box::into_raw(Box::new(before));
            let null = std::ptr::null_mut();
            if BEFORE
                .compare_exchange(null, before, Ordering::AcqRel, Ordering::Relaxed)
                .is_err()
            {
                drop(Box::from_raw(before));
            }
            libc::sigaction(libc::SIGBUS, &raw const action, null) == 0
        }
    }

    /// Copies `out.len()` bytes at `from`. Returns the number of bytes copied before a missing page.
    ///
    /// # Safety
    /// `from..from + out.len()` must lie in a mapping, whose pages may be missing; [`is_ready`] must have
    /// returned true.
    pub unsafe fn copy(from: *const u8, out: &mut [u8]) -> usize {
        // SAFETY: `out` is writable and is never a part of the mapping; the source is one, and the handler
        // ends the copy at a missing page.
        out.len() - unsafe { varve_media_guarded_copy(out.as_mut_ptr(), from, out.len()) }
    }

    /// Loads a word with one access; `None` where its page is gone.
    ///
    /// # Safety
    /// `from` must be aligned and lie in a mapping, whose pages may be missing; [`is_ready`] must have
    /// returned true.
    pub unsafe fn load_word(from: *const u32) -> Option<u32> {
        // SAFETY: as the caller promises; at a missing page the handler ends the load.
        u32::try_from(unsafe { varve_media_guarded_load(from) }).ok()
    }

    /// Stores a word with one access; has no effect where its page is gone.
    ///
    /// # Safety
    /// As for [`load_word`]; no Rust reference to the word may exist.
    pub unsafe fn store_word(to: *mut u32, word: u32) {
        // SAFETY: as the caller promises; at a missing page the handler ends the store.
        unsafe { varve_media_guarded_store(to, word) };
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::copy;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{adopt, is_ready, load_word, store_word};

#[cfg(not(target_arch = "x86_64"))]
mod none {
    /// No such copy exists for this processor.
    pub const fn is_ready() -> bool {
        false
    }

    /// Keeps nothing.
    pub const fn adopt(_: libc::sigaction) {}

    /// Copies nothing.
    ///
    /// # Safety
    /// None needed.
    pub const unsafe fn copy(_: *const u8, _: &mut [u8]) -> usize {
        0
    }

    /// Loads a word with one access.
    ///
    /// # Safety
    /// `from` must be aligned and lie in a mapping, whose pages exist.
    pub unsafe fn load_word(from: *const u32) -> Option<u32> {
        // SAFETY: as the caller says.
        Some(unsafe { from.read_volatile() })
    }

    /// Stores a word with one access.
    ///
    /// # Safety
    /// As for [`load_word`]; no Rust reference to the word may exist.
    pub unsafe fn store_word(to: *mut u32, word: u32) {
        // SAFETY: as the caller says.
        unsafe { to.write_volatile(word) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) use none::copy;
#[cfg(not(target_arch = "x86_64"))]
pub(crate) use none::{adopt, is_ready, load_word, store_word};
