//! What is measured: programs that touch memory and print nanoseconds for one touch.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use varve_far::Page;
use varve_vm_manager::sys::{Event, Faults, Pagemap, userfault_device};
use varve_vm_manager::types::Pid;

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

/// Runs the load that the arguments name, and prints its time.
pub fn run(arguments: &[String]) {
    let number = |at: usize| {
        arguments
            .get(at)
            .and_then(|text| text.parse::<usize>().ok())
            .unwrap_or(1)
    };
    let time = match arguments[0].as_str() {
        "nothing-in" => nothing(number(1), false),
        "nothing-out" => nothing(number(1), true),
        "refault" => refault(number(1), false),
        "refault-steady" => refault(number(1), true),
        "first" => first(),
        "random" => random(number(1), number(2)),
        other => panic!("no load is called {other}"),
    };
    println!("{time:.1}");
}

/// Pages of memory, shared by threads by atomic bytes.
fn memory(bytes: usize) -> &'static [AtomicU8] {
    // Zeroed memory of this size comes from a mapping of its own and is not touched.
    let memory: &'static mut [u8] = vec![0u8; bytes + PAGE].leak();
    let skip = memory.as_ptr().align_offset(PAGE);
    let (pages, _) = memory[skip..].split_at_mut(bytes);
    // The same layout; safe code has no other way than one by one.
    AtomicU8::from_mut_slice_of(pages)
}

trait FromMutSlice {
    fn from_mut_slice_of(bytes: &'static mut [u8]) -> &'static [AtomicU8];
}

impl FromMutSlice for AtomicU8 {
    fn from_mut_slice_of(bytes: &'static mut [u8]) -> &'static [AtomicU8] {
        let len = bytes.len();
        // SAFETY: `AtomicU8` has the layout of `u8`, and the slice is given up for ever.
        unsafe { std::slice::from_raw_parts(bytes.as_mut_ptr().cast(), len) }
    }
}

/// Half noise: compresses to about half.
fn fill(memory: &[AtomicU8]) {
    let mut rng = fastrand::Rng::with_seed(1);
    for page in memory.chunks(PAGE) {
        for byte in &page[..PAGE / 2] {
            byte.store(rng.u8(..), Ordering::Relaxed);
        }
        for byte in &page[PAGE / 2..] {
            byte.store(7, Ordering::Relaxed);
        }
    }
}

/// Touches these pages once each, in `threads` threads. Nanoseconds for one, as a thread sees it.
fn touch(memory: &'static [AtomicU8], mut pages: Vec<usize>, threads: usize) -> f64 {
    fastrand::Rng::with_seed(2).shuffle(&mut pages);
    let share = pages.len() / threads;
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for part in pages.chunks(share.max(1)) {
            scope.spawn(move || {
                part.iter()
                    .map(|page| u64::from(memory[page * PAGE].load(Ordering::Relaxed)))
                    .sum::<u64>()
            });
        }
    });
    begun.elapsed().as_nanos() as f64 / share as f64
}

/// A handler that puts the same page in for every fault: in a thread, or in another process.
fn nothing(threads: usize, is_apart: bool) -> f64 {
    let pages = 64 * MIB / PAGE;
    let memory = memory(pages * PAGE);
    let device = userfault_device().expect("/dev/userfaultfd");
    let fd = Faults::of_this_process(device.as_fd()).expect("a userfaultfd");
    let start = memory.as_ptr().addr() as u64;
    let begin = move || {
        let faults = Faults::begin(fd).expect("its features");
        faults
            .register(start, (pages * PAGE) as u64)
            .expect("memory can be registered");
        faults
    };
    if is_apart {
        // The handler's process asks for events and registers: a fork after that would wait for its event to
        // be read.
        let (mut ready, mut is_ready) = std::io::pipe().expect("a pipe");
        // SAFETY: this process has one thread.
        if unsafe { libc::fork() } == 0 {
            // SAFETY: this call takes integers only.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let faults = begin();
            is_ready.write_all(b"r").expect("the program waits");
            answer(&faults);
        }
        ready.read_exact(&mut [0]).expect("the handler begins");
    } else {
        let faults = begin();
        std::thread::spawn(move || answer(&faults));
    }
    touch(memory, (0..pages).collect(), threads)
}

fn answer(faults: &Faults) -> ! {
    let page = Page::default();
    let mut events = Vec::new();
    loop {
        let _ = poll(&mut [PollFd::new(faults, PollFlags::IN)], None);
        while faults.read(&mut events).is_ok_and(|count| count > 0) {
            for event in events.drain(..) {
                if let Event::Fault(address) = event {
                    let _ = faults.copy(address & !0xfff, &page);
                }
            }
        }
    }
}

/// Pages that are not in memory.
fn absent(memory: &[AtomicU8]) -> Vec<usize> {
    let start = memory.as_ptr().addr() as u64;
    let mut is_there = vec![false; memory.len() / PAGE];
    let map = Pagemap::open(Pid(std::process::id() as i32)).expect("the page map");
    map.present(start, start + memory.len() as u64, |run| {
        for address in (run.start..run.end).step_by(PAGE) {
            is_there[(address - start) as usize / PAGE] = true;
        }
    })
    .expect("the page map");
    (0..is_there.len()).filter(|page| !is_there[*page]).collect()
}

/// Touches pages that were evicted. Without `is_steady` there is so much room then that nothing is evicted
/// meanwhile.
fn refault(threads: usize, is_steady: bool) -> f64 {
    let cold = memory(32 * MIB);
    fill(cold);
    let mut other = vec![0u8; 64 * MIB];
    let until = Instant::now() + Duration::from_secs(60);
    while absent(cold).len() < 30 * MIB / PAGE {
        assert!(
            Instant::now() < until,
            "{} pages were evicted",
            absent(cold).len()
        );
        for (number, page) in other.chunks_mut(PAGE).enumerate() {
            page[number % PAGE] = page[number % PAGE].wrapping_add(1);
            page[7] = number as u8;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    if !is_steady {
        drop(other);
        std::thread::sleep(Duration::from_millis(300));
    }
    let pages = absent(cold);
    touch(cold, pages, threads)
}

/// Touches fresh memory, while other memory is far.
fn first() -> f64 {
    let cold = memory(64 * MIB);
    fill(cold);
    std::thread::sleep(Duration::from_millis(500));
    let pages = 16 * MIB / PAGE;
    let fresh = memory(pages * PAGE);
    let begun = Instant::now();
    for page in 0..pages {
        fresh[page * PAGE].store(1, Ordering::Relaxed);
    }
    begun.elapsed().as_nanos() as f64 / pages as f64
}

/// Reads or writes a byte of random pages.
fn random(mib: usize, seconds: usize) -> f64 {
    let memory = memory(mib * MIB);
    fill(memory);
    let pages = memory.len() / PAGE;
    let mut rng = fastrand::Rng::with_seed(3);
    let mut play = |seconds: f64| {
        let begun = Instant::now();
        let (mut accesses, mut sum) = (0u64, 0u64);
        while begun.elapsed().as_secs_f64() < seconds {
            for _ in 0..256 {
                let byte = &memory[rng.usize(..pages) * PAGE + rng.usize(..PAGE / 2)];
                if rng.bool() {
                    byte.store(accesses as u8, Ordering::Relaxed);
                } else {
                    sum += u64::from(byte.load(Ordering::Relaxed));
                }
                accesses += 1;
            }
        }
        std::hint::black_box(sum);
        begun.elapsed().as_nanos() as f64 / accesses as f64
    };
    play(seconds as f64 / 2.0);
    play(seconds as f64)
}
