//! The programs that are managed: memory with known contents, worked on as told over standard input.

use std::io::{BufRead, Write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: usize = 4096;

/// An anonymous mapping of whole pages, aligned to 2 MiB, whose page `i` holds `mark(i)` in its first and
/// last word.
struct Memory {
    at: *mut u8,
    pages: usize,
    seed: u64,
}

fn mark(seed: u64, page: usize) -> u64 {
    (page as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed
}

fn map(len: usize) -> *mut u8 {
    let (prot, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a new anonymous mapping anywhere.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED, "mmap");
    at.cast()
}

impl Memory {
    fn new(pages: usize, seed: u64) -> Self {
        let huge = 2 << 20;
        let raw = map(pages * PAGE + huge);
        let at = (raw as usize).next_multiple_of(huge) as *mut u8;
        let mut memory = Self { at, pages, seed };
        memory.fill();
        memory
    }

    fn word(&self, page: usize, offset: usize) -> *mut u64 {
        assert!(page < self.pages && offset <= PAGE - 8);
        // SAFETY: inside of the mapping, as just asserted.
        unsafe { self.at.add(page * PAGE + offset).cast() }
    }

    fn fill(&mut self) {
        for page in 0..self.pages {
            for offset in [0, PAGE - 8] {
                // SAFETY: `word` gives an aligned address inside of our own mapping.
                unsafe { self.word(page, offset).write_volatile(mark(self.seed, page)) };
            }
        }
    }

    /// The first page whose contents are wrong.
    fn wrong(&self) -> Option<usize> {
        (0..self.pages).find(|page| {
            [0, PAGE - 8].iter().any(|offset| {
                // SAFETY: as in `fill`.
                unsafe { self.word(*page, *offset).read_volatile() != mark(self.seed, *page) }
            })
        })
    }

    fn touch(&self, pages: Range<usize>, step: usize) {
        for page in pages.step_by(step) {
            let word = self.word(page, 0);
            // SAFETY: as in `fill`; what is written is what is there.
            unsafe { word.write_volatile(word.read_volatile()) };
        }
    }

    fn advise(
        &self,
        call: unsafe extern "C" fn(*const libc::c_void, libc::size_t) -> libc::c_int,
        pages: Range<usize>,
    ) -> bool {
        // SAFETY: `mlock`/`munlock` of a part of our own mapping.
        unsafe { call(self.at.add(pages.start * PAGE).cast(), pages.len() * PAGE) == 0 }
    }

    fn unmap(self) {
        // SAFETY: our own mapping; `self` is consumed, so nothing refers to it afterwards.
        unsafe { libc::munmap(self.at.cast(), self.pages * PAGE) };
    }

    /// Moves the mapping to another address.
    fn remap(self) -> Self {
        let len = self.pages * PAGE;
        let target = map(len);
        // SAFETY: both are mappings of ours of this length; the target's old contents are given up.
        let at = unsafe {
            libc::mremap(
                self.at.cast(),
                len,
                len,
                libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
                target.cast::<libc::c_void>(),
            )
        };
        assert_ne!(at, libc::MAP_FAILED, "mremap");
        Self {
            at: at.cast(),
            ..self
        }
    }
}

fn say(what: &str) {
    println!("{what}");
    let _ = std::io::stdout().flush();
}

pub fn run(kind: &str, mib: usize) {
    let mut memory = Memory::new(mib << 8, 0);
    if kind == "same" || kind == "stranger" {
        // Every page like its neighbour: food for same-page merging.
        memory.seed = 1;
        for page in 0..memory.pages {
            for offset in (0..PAGE).step_by(8) {
                // SAFETY: as in `fill`.
                unsafe { memory.word(page, offset).write_volatile((page % 2) as u64 + 5) };
            }
        }
    }
    let start = memory.at as u64;
    let arena = start..start + (memory.pages * PAGE) as u64;
    // Its manager, if there is one, may track writes and switch merging; there is nothing to give back.
    // SAFETY: the mapping is ours and stays; the hook never says that a page is free.
    let arenas = unsafe { varve_vm_manager::sys::Arenas::new(vec![arena]) }.expect("whole pages");
    let whole = arenas.ranges()[0].clone();
    if kind == "stranger" {
        // Wants its memory merged, and knows of no manager.
        arenas.set_mergeable(&whole, true).expect("merging");
    }
    let holes = arenas.clone();
    let cooperator = (kind != "stranger").then(|| {
        varve_vm_manager::coop::Cooperator::start(arenas, Box::new(|_, _| {})).expect("cooperation")
    });
    say(&format!("ready {:x}", memory.at as u64));
    if kind == "churn" {
        return churn(memory);
    }
    // The range of pages that is hot, packed: first << 32 | end.
    let hot = Arc::new(AtomicU64::new(0));
    let (at, pages) = (memory.at as usize, memory.pages);
    let shared = hot.clone();
    std::thread::spawn(move || {
        let memory = Memory {
            at: at as *mut u8,
            pages,
            seed: 0,
        };
        loop {
            let packed = shared.load(Ordering::Relaxed);
            let range = (packed >> 32) as usize..(packed & 0xffff_ffff) as usize;
            // Not without pause: the manager needs the emulated processor too.
            std::thread::sleep(std::time::Duration::from_millis(5));
            memory.touch(range, 1);
        }
    });
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let number = |i: usize| words.get(i).and_then(|w| w.parse::<usize>().ok()).unwrap_or(0);
        match words.first().copied() {
            Some("hot") => {
                hot.store((number(1) << 8 << 32 | number(2) << 8) as u64, Ordering::Relaxed);
                say("ok");
            }
            Some("idle") => {
                hot.store(0, Ordering::Relaxed);
                std::thread::sleep(std::time::Duration::from_millis(100));
                say("ok");
            }
            Some("touch") => {
                memory.touch(0..memory.pages, number(1).max(1));
                say("ok");
            }
            Some("fault") => {
                // New pages push older ones out of the processors' batches and onto the kernel's lists.
                Memory::new(512, 9).unmap();
                say("ok");
            }
            Some("lock") => say(if memory.advise(libc::mlock, number(1) << 8..number(2) << 8) {
                "ok"
            } else {
                "mlock failed"
            }),
            Some("holes") => {
                // Every second page goes: what stays lies scattered.
                for page in (whole.start..whole.end).step_by(2 * PAGE) {
                    holes.drop_pages(&(page..page + PAGE as u64)).expect("own pages");
                }
                say("ok");
            }
            Some("check") if kind == "same" || kind == "stranger" => {
                // SAFETY: as in `fill`.
                let bad = (0..memory.pages)
                    .find(|p| unsafe { memory.word(*p, 64).read_volatile() } != (*p % 2) as u64 + 5);
                say(&bad.map_or_else(|| "ok".to_owned(), |p| format!("page {p} is wrong")));
            }
            Some("check") => say(&memory
                .wrong()
                .map_or_else(|| "ok".to_owned(), |p| format!("page {p} is wrong"))),
            _ => say("what?"),
        }
    }
    drop(cooperator);
}

/// Changes of the address space, with contents checked after each; ends with status 0 when all were right.
fn churn(mut memory: Memory) {
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
    let rounds: u64 = line
        .split_ascii_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or(1);
    for round in 0..rounds {
        let fresh = Memory::new(300, round);
        match round % 4 {
            0 => {
                // SAFETY: the child only reads memory and leaves by `_exit`; no lock is taken in it.
                let child = unsafe { libc::fork() };
                assert!(child >= 0, "fork");
                if child == 0 {
                    let good = memory.wrong().is_none() && fresh.wrong().is_none();
                    // SAFETY: ends the child without running anything of ours.
                    unsafe { libc::_exit(i32::from(!good)) };
                }
                // The parent writes while the child reads: copies on write, of pages that are being moved.
                memory.fill();
                let mut status = 0;
                // SAFETY: waits for our own child.
                let got = unsafe { libc::waitpid(child, &raw mut status, 0) };
                assert_eq!((got, status), (child, 0), "the child saw wrong contents");
            }
            1 => memory = memory.remap(),
            2 => {
                assert!(memory.advise(libc::mlock, 0..256), "mlock");
                assert_eq!(memory.wrong(), None);
                assert!(memory.advise(libc::munlock, 0..256), "munlock");
            }
            _ => {
                let other = Memory::new(700, round + 1);
                assert_eq!(other.wrong(), None);
                other.unmap();
            }
        }
        assert_eq!(memory.wrong(), None, "round {round}");
        assert_eq!(fresh.wrong(), None, "round {round}");
        fresh.unmap();
    }
    // Ends here, in the middle of whatever is being moved.
}
