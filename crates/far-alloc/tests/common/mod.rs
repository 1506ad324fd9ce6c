//! Heaps, raw bytes, and touches that may be signals.
#![allow(dead_code, unsafe_code, clippy::unwrap_used)]

use std::cell::Cell;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Once};
use varve_far::{Backend, BackendError, Dram, Slot};
use varve_far_alloc::{Config, Error, FarAlloc};

/// A heap over slabs in memory; `None`, said aloud, where the kernel does not let faults be served.
pub fn heap(slabs: u32, memory: u64) -> Option<FarAlloc> {
    heap_over(Dram::new(slabs), memory)
}

pub fn heap_over(backend: impl Backend + 'static, memory: u64) -> Option<FarAlloc> {
    match FarAlloc::new(backend, &Config::new(memory)) {
        Ok(heap) => Some(heap),
        Err(error @ Error::Userfault { .. }) => {
            eprintln!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

pub fn at(address: usize) -> NonNull<u8> {
    NonNull::new(std::ptr::with_exposed_provenance_mut(address)).unwrap()
}

pub fn store(at: NonNull<u8>, index: usize, byte: u8) {
    // SAFETY: tests give allocated bytes.
    unsafe { at.as_ptr().add(index).write_volatile(byte) };
}

pub fn load(at: NonNull<u8>, index: usize) -> u8 {
    // SAFETY: tests give allocated bytes, or expect a signal.
    unsafe { at.as_ptr().add(index).read_volatile() }
}

pub fn try_read_at(file: &File, at: NonNull<u8>, len: usize, offset: i64) -> Result<usize, i32> {
    // SAFETY: tests give allocated bytes, or expect an error.
    let got = unsafe { libc::pread(file.as_raw_fd(), at.as_ptr().cast(), len, offset) };
    usize::try_from(got).map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap())
}

pub fn read_at(file: &File, at: NonNull<u8>, len: usize, offset: i64) {
    assert_eq!(try_read_at(file, at, len, offset), Ok(len));
}

pub fn write_all(file: &File, at: NonNull<u8>, len: usize) {
    // SAFETY: tests give allocated bytes.
    let got = unsafe { libc::write(file.as_raw_fd(), at.as_ptr().cast(), len) };
    assert_eq!(got, len as isize);
}

pub fn drop_page(at: NonNull<u8>) {
    // SAFETY: tests give an allocated page, which is used through raw pointers alone.
    let result = unsafe { libc::madvise(at.as_ptr().cast(), 4096, libc::MADV_DONTNEED) };
    assert_eq!(result, 0);
}

/// Bytes of a range that are in memory, and kilobytes of the process's page tables.
pub fn in_memory(at: NonNull<u8>, len: usize) -> (usize, u64) {
    let mut pages = vec![0u8; len.div_ceil(4096)];
    // SAFETY: the range is mapped, and the answer has a byte for each page.
    let result = unsafe { libc::mincore(at.as_ptr().cast(), len, pages.as_mut_ptr()) };
    assert_eq!(result, 0);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmPTE:"))
        .unwrap();
    let tables = line.split_whitespace().next().unwrap().parse().unwrap();
    (pages.iter().filter(|page| **page & 1 != 0).count() * 4096, tables)
}

thread_local! {
    static IS_TOUCHING: Cell<bool> = const { Cell::new(false) };
}

static HANDLER: Once = Once::new();

extern "C" fn on_signal(signal: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    if !IS_TOUCHING.get() {
        // SAFETY: a handler may call this. The touch is repeated, and ends the process.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    // It is one instruction of two bytes, `rep movsb`: go on behind it, with the signal in `rdx`.
    // SAFETY: the kernel gives the context of the interrupted touch, below.
    unsafe {
        let registers = &mut (*context).uc_mcontext.gregs;
        registers[libc::REG_RDX as usize] = i64::from(signal);
        registers[libc::REG_RIP as usize] += 2;
    }
}

fn handle_signals() {
    HANDLER.call_once(|| {
        for signal in [libc::SIGBUS, libc::SIGSEGV] {
            // SAFETY: the action is whole, and the handler does only what handlers may.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_signal as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                assert_eq!(
                    libc::sigaction(signal, &raw const action, std::ptr::null_mut()),
                    0
                );
            }
        }
    });
}

/// Copies bytes. The signal, if that is one; a part is copied then.
///
/// # Safety
/// One of both is memory of the caller, the other far.
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> Result<(), i32> {
    handle_signals();
    IS_TOUCHING.set(true);
    let signal: u64;
    // SAFETY: the caller's promise; the handler passes over it where it faults.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rsi") from => _,
            inout("rdi") to => _,
            inout("rcx") len => _,
            inout("rdx") 0u64 => signal,
            options(nostack, preserves_flags)
        );
    }
    IS_TOUCHING.set(false);
    if signal == 0 { Ok(()) } else { Err(signal as i32) }
}

/// Reads far bytes. The signal, if that is one.
pub fn try_load(at: NonNull<u8>, bytes: &mut [u8]) -> Result<(), i32> {
    // SAFETY: the target is a slice of the same length.
    unsafe { copy(at.as_ptr(), bytes.as_mut_ptr(), bytes.len()) }
}

/// Writes far bytes. The signal, if that is one; a part is written then.
pub fn try_store(at: NonNull<u8>, bytes: &[u8]) -> Result<(), i32> {
    // SAFETY: the source is a slice of the same length.
    unsafe { copy(bytes.as_ptr(), at.as_ptr(), bytes.len()) }
}

/// Reads a byte. The signal, if that is one.
pub fn touch(at: NonNull<u8>) -> Result<(), i32> {
    try_load(at, &mut [0])
}

/// Runs in a child of fork. Its exit status, or the signal that ended it.
pub fn in_child(work: impl FnOnce() -> i32) -> Result<i32, i32> {
    handle_signals();
    // SAFETY: the child runs `work` alone, which uses no lock that another thread may hold, and ends by
    // `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        for signal in [libc::SIGBUS, libc::SIGSEGV] {
            // SAFETY: as if nobody had set a handler.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        let status = work();
        // SAFETY: ends the child without anything of its parent's.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if libc::WIFEXITED(status) {
        Ok(libc::WEXITSTATUS(status))
    } else {
        Err(libc::WTERMSIG(status))
    }
}

/// As [`in_child`], with a value that parent and child both have then.
pub fn in_child_once<T>(
    value: T,
    work: impl FnOnce(T) -> i32,
) -> (std::mem::ManuallyDrop<T>, Result<i32, i32>) {
    let value = std::mem::ManuallyDrop::new(value);
    let outcome = in_child(|| {
        // SAFETY: the child's copy; the parent's is another.
        let of_child = unsafe { std::ptr::read(&raw const *value) };
        work(of_child)
    });
    (value, outcome)
}

/// Slabs in memory that fail on request, now and then or always. Clones share them.
#[derive(Clone)]
pub struct Bad {
    inner: Arc<Dram>,
    fails_reads: Arc<AtomicBool>,
    fails_writes: Arc<AtomicBool>,
    /// Of so many reads and writes, one fails; 0: none.
    pub one_of: Arc<AtomicU32>,
    calls: Arc<AtomicU32>,
}

impl Bad {
    pub fn new(slabs: u32) -> Self {
        Self {
            inner: Arc::new(Dram::new(slabs)),
            fails_reads: Arc::default(),
            fails_writes: Arc::default(),
            one_of: Arc::default(),
            calls: Arc::default(),
        }
    }

    pub fn fails_reads(&self, fails: bool) {
        self.fails_reads.store(fails, Ordering::SeqCst);
    }

    pub fn fails_writes(&self, fails: bool) {
        self.fails_writes.store(fails, Ordering::SeqCst);
    }

    fn check(&self, fails: &AtomicBool) -> Result<(), BackendError> {
        let one_of = self.one_of.load(Ordering::Relaxed);
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if fails.load(Ordering::SeqCst) || (one_of != 0 && call.is_multiple_of(one_of)) {
            return Err(BackendError::Io(std::io::Error::from_raw_os_error(libc::EIO)));
        }
        Ok(())
    }
}

impl Backend for Bad {
    fn name(&self) -> &str {
        "bad"
    }

    fn capacity_slabs(&self) -> u32 {
        self.inner.capacity_slabs()
    }

    fn alloc(&self) -> Result<Slot, BackendError> {
        self.inner.alloc()
    }

    fn dealloc(&self, slot: Slot) {
        self.inner.dealloc(slot);
    }

    fn read(&self, slot: Slot, offset_bytes: usize, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.check(&self.fails_reads)?;
        self.inner.read(slot, offset_bytes, bytes)
    }

    fn write(&self, slot: Slot, offset_bytes: usize, bytes: &[u8]) -> Result<(), BackendError> {
        self.check(&self.fails_writes)?;
        self.inner.write(slot, offset_bytes, bytes)
    }
}
