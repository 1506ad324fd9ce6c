//! The library's own heap. It never calls the program's `malloc`: a signal handler that calls `write` may
//! have interrupted `malloc` itself, and a `fork` in another thread may hold its locks.
//!
//! [dlmalloc] under one lock. In front of it, freed small blocks are kept in slots, and reused for the next
//! block of their size. Threads share slots; a thread that finds its slot busy takes the lock. A slot keeps
//! only a few blocks of each size, so threads that end leave little memory behind.
//!
//! # Invariants
//! 1. No thread waits for a lock that it holds itself: its holder is [inside](super::entry::inside), so
//!    signals are deferred; code called under it does not allocate (its pages come by plain system calls);
//!    and a forking thread holds it until the child exists ([`hold`]).
//! 2. No thread waits for a slot.
//! 3. A block's slot list and its place in dlmalloc depend on its layout alone, which is the same when it is
//!    freed.

use super::{entry, kernel, thread};
use dlmalloc::{Allocator, Dlmalloc};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Small blocks are multiples of this number of bytes.
const STEP: usize = 16;
/// Blocks of more bytes are not kept in slots.
const SMALL_MAX: usize = 1024;
const CLASSES: usize = SMALL_MAX / STEP;
const SLOTS: usize = 16;
const PAGE: usize = 4096;

/// The library's heap.
#[global_allocator]
pub static HEAP: Heap = Heap;

static LARGE: Mutex<Large> = Mutex::new(Large(Dlmalloc::new_with_allocator(Pages)));
static SMALL: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];
static NEXT_SLOT: AtomicU32 = AtomicU32::new(1);

/// Pages of the kernel.
struct Pages;

// SAFETY: memory from `mmap` is exclusive, page-aligned, zeroed, and stays until it is unmapped.
unsafe impl Allocator for Pages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
        let a = [0, size, protection, flags, usize::MAX, 0];
        // SAFETY: new memory, at a place of the kernel's choice.
        match unsafe { kernel::call(libc::SYS_mmap as usize, a) } {
            at if at < 0 => (null_mut(), 0, 0),
            at => (at as *mut u8, size, 0),
        }
    }

    fn remap(&self, ptr: *mut u8, old: usize, new: usize, can_move: bool) -> *mut u8 {
        let flags = if can_move {
            libc::MREMAP_MAYMOVE as usize
        } else {
            0
        };
        // SAFETY: dlmalloc passes memory that it has from `alloc`.
        match unsafe { kernel::call(libc::SYS_mremap as usize, [ptr as usize, old, new, flags, 0, 0]) } {
            at if at < 0 => null_mut(),
            at => at as *mut u8,
        }
    }

    fn free_part(&self, ptr: *mut u8, old: usize, new: usize) -> bool {
        !self.remap(ptr, old, new, false).is_null() || self.free(ptr.wrapping_add(new), old - new)
    }

    fn free(&self, ptr: *mut u8, size: usize) -> bool {
        // SAFETY: as in `remap`; the memory is no longer used.
        unsafe { kernel::call(libc::SYS_munmap as usize, [ptr as usize, size, 0, 0, 0, 0]) == 0 }
    }

    fn can_release_part(&self, _flags: u32) -> bool {
        true
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        PAGE
    }
}

/// The allocator of all blocks that are not in slots.
pub struct Large(Dlmalloc<Pages>);

// SAFETY: its pointers are to memory of its own, which any thread may use; it is used under the lock only.
unsafe impl Send for Large {}

/// Runs `work` on dlmalloc, under the lock.
fn with_large<T>(work: impl FnOnce(&mut Dlmalloc<Pages>) -> T) -> T {
    entry::inside(|| work(&mut LARGE.lock().unwrap_or_else(PoisonError::into_inner).0))
}

/// Takes the heap's lock, so that the heap of a child made meanwhile is consistent. The holder must not
/// allocate; signals are deferred.
pub fn hold() -> Hold {
    let inside = entry::stay_inside();
    Hold {
        _lock: LARGE.lock().unwrap_or_else(PoisonError::into_inner),
        _inside: inside,
    }
}

/// The heap's lock, held. The lock is released before signals are let in.
#[must_use]
pub struct Hold {
    _lock: MutexGuard<'static, Large>,
    _inside: entry::Inside,
}

/// Resets, in a child, whose only thread this is, the slots that other threads of the parent were using.
/// Their blocks are lost.
pub fn after_fork() {
    for slot in &SMALL {
        if slot.busy.load(Ordering::Relaxed) {
            // SAFETY: there is no other thread, and this one is in no slot: it has forked.
            unsafe { *slot.lists.get() = [List::EMPTY; CLASSES] };
            slot.busy.store(false, Ordering::Release);
        }
    }
}

/// Free blocks of one size; the first word of each is the address of the next.
#[derive(Clone, Copy)]
struct List {
    first: *mut *mut u8,
    count: usize,
}

impl List {
    const EMPTY: Self = Self {
        first: null_mut(),
        count: 0,
    };
}

/// Free blocks, by size.
#[repr(align(64))]
struct Slot {
    busy: AtomicBool,
    lists: UnsafeCell<[List; CLASSES]>,
}

// SAFETY: only the thread that has made the slot busy touches `lists`.
unsafe impl Sync for Slot {}

impl Slot {
    const fn new() -> Self {
        Self {
            busy: AtomicBool::new(false),
            lists: UnsafeCell::new([List::EMPTY; CLASSES]),
        }
    }

    /// Runs `work` on the list of one size in this thread's slot. `None` if the slot is busy, with another
    /// thread, or with this one if a signal handler has interrupted it.
    fn with<T>(class: usize, work: impl FnOnce(&mut List) -> Option<T>) -> Option<T> {
        let number = thread::with(|thread| match thread.slot.get() {
            0 => {
                let number = NEXT_SLOT.fetch_add(1, Ordering::Relaxed).max(1);
                thread.slot.set(number);
                number
            }
            number => number,
        });
        let slot = &SMALL[number as usize % SLOTS];
        if slot.busy.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: the slot was not busy, and is now.
        let done = work(unsafe { &mut (&mut *slot.lists.get())[class] });
        slot.busy.store(false, Ordering::Release);
        done
    }
}

/// Upper bound on the blocks of one class that a slot keeps: some 350 KiB of all classes together.
const fn kept_max(class: usize) -> usize {
    if class < 16 { 48 } else { 8 }
}

/// Returns the size class of a block of this layout, if it is small.
const fn class(layout: Layout) -> Option<usize> {
    if layout.size() <= SMALL_MAX && layout.align() <= STEP {
        Some(layout.size().saturating_sub(1) / STEP)
    } else {
        None
    }
}

/// Returns the size in bytes of the blocks of a class.
const fn bytes(class: usize) -> usize {
    (class + 1) * STEP
}

/// The library's heap.
#[derive(Debug)]
pub struct Heap;

// SAFETY: dlmalloc hands out exclusive blocks of the requested size and alignment; lists hold free blocks of
// their class, and hand each out once.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some(class) = class(layout) else {
            // SAFETY: the caller's layout.
            return with_large(|large| unsafe { large.malloc(layout.size(), layout.align()) });
        };
        let kept = Slot::with(class, |list| {
            let first = list.first;
            if first.is_null() {
                return None;
            }
            // SAFETY: the first of a list, as `dealloc` has left it there.
            list.first = unsafe { *first }.cast();
            list.count -= 1;
            Some(first.cast())
        });
        // SAFETY: a size that is not zero, and an alignment that is a power of two.
        kept.unwrap_or_else(|| with_large(|large| unsafe { large.malloc(bytes(class), STEP) }))
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        let Some(class) = class(layout) else {
            // SAFETY: the caller has it from `alloc`, with the same layout.
            return with_large(|large| unsafe { large.free(ptr, layout.size(), layout.align()) });
        };
        let kept = Slot::with(class, |list| {
            if list.count >= kept_max(class) {
                return None;
            }
            let block = ptr.cast::<*mut u8>();
            // SAFETY: a free block of at least STEP bytes, aligned to STEP.
            unsafe { *block = list.first.cast() };
            list.first = block;
            list.count += 1;
            Some(())
        });
        if kept.is_none() {
            // SAFETY: `alloc` has allocated it with this size and alignment.
            with_large(|large| unsafe { large.free(ptr, bytes(class), STEP) });
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if class(layout).is_none() {
            // SAFETY: the caller's layout.
            return with_large(|large| unsafe { large.calloc(layout.size(), layout.align()) });
        }
        // SAFETY: the caller's layout; the block has `layout.size()` bytes, or is null.
        unsafe {
            let ptr = self.alloc(layout);
            if !ptr.is_null() {
                ptr.write_bytes(0, layout.size());
            }
            ptr
        }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller vouches that the size is a layout's.
        let new = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        match (class(layout), class(new)) {
            (None, None) => with_large(|large| {
                // SAFETY: the caller has it from `alloc`, with this layout.
                unsafe { large.realloc(ptr, layout.size(), layout.align(), new_size) }
            }),
            (Some(old), Some(new)) if old == new => ptr,
            // SAFETY: both blocks have at least as many bytes as are copied, and are distinct.
            _ => unsafe {
                let moved = self.alloc(new);
                if !moved.is_null() {
                    moved.copy_from_nonoverlapping(ptr, layout.size().min(new_size));
                    self.dealloc(ptr, layout);
                }
                moved
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    /// A block filled with a pattern of its own.
    struct Block {
        bytes: *mut u8,
        layout: Layout,
        mark: u8,
    }

    // SAFETY: its memory is its own.
    unsafe impl Send for Block {}

    static MARKS: AtomicU64 = AtomicU64::new(0);

    impl Block {
        fn new(size: usize, align: usize, zeroed: bool) -> Self {
            let layout = Layout::from_size_align(size, align).expect("it can be");
            // SAFETY: a size that is not zero.
            let bytes = unsafe {
                if zeroed {
                    HEAP.alloc_zeroed(layout)
                } else {
                    HEAP.alloc(layout)
                }
            };
            assert!(!bytes.is_null() && (bytes as usize).is_multiple_of(align));
            let mut block = Self {
                bytes,
                layout,
                mark: 0,
            };
            if zeroed {
                block.check();
            }
            block.paint();
            block
        }

        fn paint(&mut self) {
            self.mark = MARKS.fetch_add(1, Ordering::Relaxed) as u8;
            // SAFETY: its own bytes.
            unsafe { self.bytes.write_bytes(self.mark, self.layout.size()) };
        }

        fn holds(&self, len: usize) {
            // SAFETY: its own bytes.
            let bytes = unsafe { std::slice::from_raw_parts(self.bytes, len) };
            assert!(bytes.iter().all(|byte| *byte == self.mark));
        }

        fn check(&self) {
            self.holds(self.layout.size());
        }

        fn grow(&mut self, size: usize) {
            let kept = size.min(self.layout.size());
            // SAFETY: its own block, and a size that is not zero.
            self.bytes = unsafe { HEAP.realloc(self.bytes, self.layout, size) };
            assert!(!self.bytes.is_null() && (self.bytes as usize).is_multiple_of(self.layout.align()));
            self.layout = Layout::from_size_align(size, self.layout.align()).expect("it can be");
            self.holds(kept);
            self.paint();
        }
    }

    impl Drop for Block {
        fn drop(&mut self) {
            self.check();
            // SAFETY: it has it from `alloc`, with this layout.
            unsafe { HEAP.dealloc(self.bytes, self.layout) };
        }
    }

    fn next(random: &mut u64) -> u64 {
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *random >> 33
    }

    /// Takes, changes and gives back blocks; some of them go to another thread through `pool`.
    fn churn(mut random: u64, pool: &Mutex<Vec<Block>>) {
        let mut own: Vec<Block> = Vec::new();
        for _ in 0..20_000 {
            let size = match next(&mut random) % 8 {
                0 => 1 + next(&mut random) as usize % 200_000,
                1 => SMALL_MAX - 20 + next(&mut random) as usize % 40,
                _ => 1 + next(&mut random) as usize % 300,
            };
            match next(&mut random) % 6 {
                0..=2 => own.push(Block::new(size, 1 << (next(&mut random) % 8), size % 3 == 0)),
                3 if !own.is_empty() => {
                    let at = next(&mut random) as usize % own.len();
                    own[at].grow(size);
                }
                4 if !own.is_empty() => {
                    let block = own.swap_remove(next(&mut random) as usize % own.len());
                    pool.lock().expect("it can be").push(block);
                }
                _ => {
                    let other = pool.lock().expect("it can be").pop();
                    drop(other);
                    own.truncate(500);
                }
            }
        }
    }

    #[test]
    fn blocks_are_nobody_elses_and_keep_what_is_in_them() {
        let pool = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            // More than there are slots.
            for seed in 0..20 {
                let pool = &pool;
                scope.spawn(move || churn(seed, pool));
            }
        });
    }

    #[test]
    fn a_child_of_a_fork_allocates_whatever_other_threads_did_then() {
        let pool = Mutex::new(Vec::new());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for seed in 0..3 {
                let (pool, stop) = (&pool, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        churn(seed, pool);
                    }
                });
            }
            for _ in 0..200 {
                let held = hold();
                // SAFETY: the child makes only the calls under test, and ends.
                let child = unsafe { kernel::call(libc::SYS_fork as usize, [0; 6]) };
                drop(held);
                if child == 0 {
                    after_fork();
                    for size in 1..2000 {
                        Block::new(size, 16, false);
                    }
                    // SAFETY: ends this process.
                    unsafe { kernel::call(libc::SYS_exit_group as usize, [0; 6]) };
                }
                let mut status = 0;
                // SAFETY: a child of this process, and a place for its status.
                let waited = unsafe { libc::waitpid(child as i32, &raw mut status, 0) };
                assert!(waited == child as i32 && status == 0, "{status:x}");
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
