//! A program that knows every byte of its memory, does to it what programs do, and looks at it again and
//! again.
//!
//! Each thread owns a region. The contents of a page follow from its number and its version, so there is
//! nothing to compare with but the rule. Version 0 is a page of zeros.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::mm::{self, Advice, MapFlags, MprotectFlags, ProtFlags};

const PAGE: usize = 4096;
/// Rounds that each thread of the first program makes at least, however slow the machine is.
const ROUNDS_MIN: u32 = 60;

/// What a run of the program did.
#[derive(Default)]
pub struct Done {
    pub writes: AtomicU64,
    pub looks: AtomicU64,
    pub drops: AtomicU64,
    pub moves: AtomicU64,
    pub unmaps: AtomicU64,
    pub forks: AtomicU64,
    pub clones: AtomicU64,
    pub locks: AtomicU64,
    pub guards: AtomicU64,
    pub pipes: AtomicU64,
    pub spawns: AtomicU64,
}

/// The bytes of a page.
fn fill(page: u64, version: u32, bytes: &mut [u8]) {
    bytes.fill(0);
    if version == 0 {
        return;
    }
    let seed = page << 32 | u64::from(version);
    let mut rng = fastrand::Rng::with_seed(seed);
    match seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61 {
        // One word, repeated.
        0 => bytes
            .chunks_exact_mut(8)
            .for_each(|word| word.copy_from_slice(&seed.to_ne_bytes())),
        // Noise: does not shrink.
        1 | 2 => rng.fill(bytes),
        // Shrinks more or less.
        kind => {
            let noisy = 256 * kind as usize;
            rng.fill(&mut bytes[..noisy]);
            bytes[PAGE - 8..].copy_from_slice(&seed.to_ne_bytes());
        }
    }
}

struct Region {
    base: *mut u8,
    /// First page number, for the contents.
    number: u64,
    versions: Vec<u32>,
    rng: fastrand::Rng,
}

fn map(bytes: usize) -> *mut u8 {
    // SAFETY: a new private mapping anywhere.
    let at = unsafe {
        mm::mmap_anonymous(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    };
    at.expect("memory can be mapped").cast()
}

impl Region {
    fn new(number: u64, pages: usize, seed: u64) -> Self {
        Self {
            base: map(pages * PAGE),
            number,
            versions: vec![0; pages],
            rng: fastrand::Rng::with_seed(seed),
        }
    }

    fn pages(&self) -> usize {
        self.versions.len()
    }

    fn at(&self, page: usize) -> *mut std::ffi::c_void {
        assert!(page <= self.pages());
        // SAFETY: inside the mapping, or one past it.
        unsafe { self.base.add(page * PAGE) }.cast()
    }

    fn bytes(&mut self, page: usize) -> &mut [u8] {
        assert!(page < self.pages());
        // SAFETY: a page of the mapping, which this region alone uses.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(page * PAGE), PAGE) }
    }

    fn write(&mut self, page: usize) {
        self.versions[page] += 1;
        let (number, version) = (self.number + page as u64, self.versions[page]);
        fill(number, version, self.bytes(page));
    }

    fn look(&mut self, page: usize) {
        let mut expected = [0u8; PAGE];
        fill(self.number + page as u64, self.versions[page], &mut expected);
        let version = self.versions[page];
        let address = self.at(page);
        let found = self.bytes(page);
        if *found != expected {
            let differs = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
            let zero = found.iter().all(|byte| *byte == 0);
            eprintln!(
                "WRONG: page {page} at {address:p}, version {version}: {differs} bytes differ, zero: {zero}"
            );
            std::process::abort();
        }
    }

    fn look_at_all(&mut self) {
        (0..self.pages()).for_each(|page| self.look(page));
    }

    /// A run of pages: the first and how many.
    fn some(&mut self, most: usize) -> (usize, usize) {
        let first = self.rng.usize(..self.pages());
        (first, 1 + self.rng.usize(..most).min(self.pages() - first - 1))
    }

    fn drop_some(&mut self) {
        let (first, count) = self.some(40);
        // SAFETY: pages of this region; their contents are given up.
        unsafe { mm::madvise(self.at(first), count * PAGE, Advice::LinuxDontNeed) }.expect("advice is taken");
        self.versions[first..first + count].fill(0);
        for page in first..first + count {
            if self.rng.bool() {
                self.look(page);
            }
        }
    }

    /// Moves some pages to another address and back. The kernel may refuse where they lie in several
    /// mappings; then they are mapped anew. Whether they moved.
    fn move_away(&mut self) -> bool {
        let (first, count) = self.some(200);
        let (bytes, home) = (count * PAGE, self.at(first));
        let away = map(bytes).cast();
        let step = |from: *mut libc::c_void, to: *mut libc::c_void| {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: both are mappings of this region alone; the target's is replaced.
            let at: *mut libc::c_void = unsafe { libc::mremap(from, bytes, bytes, flags, to) };
            at == to
        };
        let moved = step(home, away) && {
            // SAFETY: nothing is mapped there now; a mapping that the pages will replace.
            let hole = unsafe {
                mm::mmap_anonymous(home, bytes, ProtFlags::READ, MapFlags::PRIVATE | MapFlags::FIXED)
            };
            assert_eq!(hole.expect("it can be mapped"), home);
            step(away, home)
        };
        if !moved {
            self.map_again(first, count);
            // SAFETY: the mapping of above, or what is left of it.
            unsafe { mm::munmap(away, bytes) }.expect("it can be unmapped");
        }
        (first..first + count).for_each(|page| self.look(page));
        moved
    }

    fn map_again(&mut self, first: usize, count: usize) {
        let at = self.at(first);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: pages of this region.
        let again =
            unsafe { mm::mmap_anonymous(at, count * PAGE, ProtFlags::READ | ProtFlags::WRITE, flags) };
        assert_eq!(again.expect("it can be mapped"), at);
        self.versions[first..first + count].fill(0);
    }

    fn unmap_some(&mut self) {
        let (first, count) = self.some(100);
        let at = self.at(first);
        if self.rng.bool() {
            // SAFETY: pages of this region, mapped again at once.
            unsafe { mm::munmap(at, count * PAGE) }.expect("it can be unmapped");
        }
        self.map_again(first, count);
        (first..first + count).for_each(|page| {
            if self.rng.bool() {
                self.write(page)
            }
        });
    }

    fn guard_some(&mut self) {
        let (first, count) = self.some(40);
        let at = self.at(first);
        let none = self.rng.bool();
        let set = |flags| {
            // SAFETY: pages of this region; nothing writes to them until they are writable again.
            unsafe { mm::mprotect(at, count * PAGE, flags) }.expect("protection can be set");
        };
        set(if none {
            MprotectFlags::empty()
        } else {
            MprotectFlags::READ
        });
        if !none {
            (first..first + count).for_each(|page| self.look(page));
        }
        set(MprotectFlags::READ | MprotectFlags::WRITE);
        (first..first + count).for_each(|page| self.look(page));
    }

    fn lock_some(&mut self) {
        let (first, count) = self.some(16);
        // SAFETY: pages of this region.
        let locked = unsafe { mm::mlock(self.at(first), count * PAGE) };
        (first..first + count).for_each(|page| self.look(page));
        if locked.is_ok() {
            // SAFETY: as above.
            unsafe { mm::munlock(self.at(first), count * PAGE) }.expect("it can be unlocked");
        }
    }

    /// The kernel reads and writes far pages: through a pipe, from one page to another.
    fn pipe_some(&mut self) {
        let (from, to) = (self.rng.usize(..self.pages()), self.rng.usize(..self.pages()));
        let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
        self.write(to);
        self.look(from);
        let bytes = self.bytes(from).as_ptr();
        // SAFETY: a page of this region, not written meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts(bytes, PAGE) };
        writer.write_all(bytes).expect("a pipe holds a page");
        drop(writer);
        let mut scratch = vec![0u8; PAGE];
        let (number, version) = (self.number + to as u64, self.versions[to] + 1);
        if from == to {
            reader.read_exact(&mut scratch).expect("what was written");
        } else {
            reader.read_exact(self.bytes(to)).expect("what was written");
            // What is there now belongs to another page: written anew.
            fill(number, version, self.bytes(to));
            self.versions[to] = version;
        }
        self.look(to);
    }

    /// A child with the C library's fork, or with a bare `clone`: it sees what the parent had, and its writes
    /// are its own.
    fn fork(&mut self, bare: bool) {
        // SAFETY: the child uses this region, which no other thread has, and ends without running anything
        // else. It allocates nothing.
        let child = unsafe {
            if bare {
                libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as libc::pid_t
            } else {
                libc::fork()
            }
        };
        assert!(child >= 0, "no fork: {}", std::io::Error::last_os_error());
        if child == 0 {
            self.rng = fastrand::Rng::with_seed(u64::from(std::process::id()));
            for _ in 0..3 {
                self.look_at_all();
                for _ in 0..self.pages() / 4 {
                    let page = self.rng.usize(..self.pages());
                    self.write(page);
                }
            }
            self.look_at_all();
            // SAFETY: ends the child alone.
            unsafe { libc::_exit(0) };
        }
        // Meanwhile the parent goes on: what it writes is not the child's.
        for _ in 0..self.pages() / 4 {
            let page = self.rng.usize(..self.pages());
            self.write(page);
        }
        self.drop_some();
        let mut status = 0;
        // SAFETY: waits for the child that was made above.
        let got = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(got, child);
        assert_eq!(
            status,
            0,
            "the child of a {} saw something wrong",
            if bare { "clone" } else { "fork" }
        );
        self.look_at_all();
    }
}

/// Forks, ends, and leaves the child behind, which looks at its memory and writes to it for `seconds` and
/// says how it was.
pub fn orphan(seconds: f64, mib: usize) {
    let mut region = Region::new(0, (mib << 20) / PAGE, 1);
    (0..region.pages()).for_each(|page| region.write(page));
    region.look_at_all();
    // SAFETY: this process has one thread of the program's own.
    if unsafe { libc::fork() } != 0 {
        std::process::exit(0);
    }
    // A child that forks at once: its own child must be told from it.
    // SAFETY: as above; the grandchild looks at its memory and ends.
    let grandchild = unsafe { libc::fork() };
    if grandchild == 0 {
        region.look_at_all();
        // SAFETY: ends the grandchild alone.
        unsafe { libc::_exit(0) };
    }
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    while Instant::now() < until {
        region.look_at_all();
        for _ in 0..region.pages() / 2 {
            let page = region.rng.usize(..region.pages());
            region.write(page);
        }
    }
    region.look_at_all();
    let mut status = 1;
    // SAFETY: waits for the grandchild that was made above.
    unsafe { libc::waitpid(grandchild, &raw mut status, 0) };
    assert_eq!(status, 0, "the grandchild saw something wrong");
    println!("the child found all");
}

/// Fills memory, says so, and reads it for ever. Says `WRONG` and ends when it reads something else than it
/// wrote.
pub fn reader(mib: usize) {
    let mut region = Region::new(0, (mib << 20) / PAGE, 1);
    (0..region.pages()).for_each(|page| region.write(page));
    region.look_at_all();
    println!("{}", std::process::id());
    let mut expected = [0u8; PAGE];
    loop {
        for page in 0..region.pages() {
            fill(page as u64, region.versions[page], &mut expected);
            if *region.bytes(page) != expected {
                println!("WRONG: page {page}");
                std::process::exit(3);
            }
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// What one thread does.
fn play(region: &mut Region, until: Instant, done: &Done, starts_others: bool) {
    for page in 0..region.pages() {
        region.write(page);
    }
    let mut rounds = 0;
    while (starts_others && rounds < ROUNDS_MIN) || Instant::now() < until {
        rounds += 1;
        for _ in 0..200 {
            let page = region.rng.usize(..region.pages());
            if region.rng.bool() {
                region.write(page);
                count(&done.writes);
            } else {
                region.look(page);
                count(&done.looks);
            }
        }
        match region.rng.u32(..64) {
            0..12 => region.drop_some_counted(done),
            12..16 => {
                done.moves
                    .fetch_add(u64::from(region.move_away()), Ordering::Relaxed);
            }
            16..22 => {
                region.unmap_some();
                count(&done.unmaps);
            }
            22..30 => {
                region.guard_some();
                count(&done.guards);
            }
            30..36 => {
                region.lock_some();
                count(&done.locks);
            }
            36..44 => {
                region.pipe_some();
                count(&done.pipes);
            }
            44..46 => {
                region.fork(false);
                count(&done.forks);
            }
            46 => {
                region.fork(true);
                count(&done.clones);
            }
            47 if starts_others => {
                spawn();
                count(&done.spawns);
            }
            _ => {}
        }
    }
    region.look_at_all();
}

impl Region {
    fn drop_some_counted(&mut self, done: &Done) {
        self.drop_some();
        count(&done.drops);
    }
}

// SAFETY: the memory behind `base` belongs to the region alone.
unsafe impl Send for Region {}

/// Another program by `exec`, which has memory of its own. It starts no other one: `small` plays without.
fn spawn() {
    let me = std::env::current_exe().expect("the path of this program");
    let small = ["--small"];
    let status = std::process::Command::new(me)
        .args(small)
        .stdout(std::process::Stdio::null())
        .status();
    assert!(
        status.expect("a program starts").success(),
        "a program that was started saw something wrong"
    );
}

/// What a program that was started does: a little of it, in one thread, and it starts no other.
pub fn small() {
    let mut region = Region::new(0, (4 << 20) / PAGE, 1);
    play(
        &mut region,
        Instant::now() + Duration::from_millis(200),
        &Done::default(),
        false,
    );
}

/// Runs for `seconds` over `mib` MiB in `threads` threads, and tells what it did.
pub fn run(seconds: f64, mib: usize, threads: usize) {
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let pages = (mib << 20) / PAGE / threads;
    let done = Done::default();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let done = &done;
            scope.spawn(move || {
                let mut region = Region::new((thread * pages) as u64, pages, thread as u64);
                play(&mut region, until, done, true);
            });
        }
    });
    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        "{{\"writes\":{},\"looks\":{},\"drops\":{},\"moves\":{},\"unmaps\":{},\"guards\":{},\"locks\":{},\"pipes\":{},\"forks\":{},\"clones\":{},\"spawns\":{}}}",
        of(&done.writes),
        of(&done.looks),
        of(&done.drops),
        of(&done.moves),
        of(&done.unmaps),
        of(&done.guards),
        of(&done.locks),
        of(&done.pipes),
        of(&done.forks),
        of(&done.clones),
        of(&done.spawns),
    );
}

/// Fills 64 MiB, says its pid, and reads the first 8 MiB for ever; all of it after SIGUSR1. Says `WRONG` when
/// it reads something else than it wrote.
pub fn part_reader() {
    let all_of_it = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    signal_hook::flag::register(libc::SIGUSR1, all_of_it.clone()).expect("a signal can be waited for");
    let mut region = Region::new(0, (64 << 20) / PAGE, 1);
    (0..region.pages()).for_each(|page| region.write(page));
    println!("{}", std::process::id());
    let mut expected = [0u8; PAGE];
    loop {
        let pages = if all_of_it.load(Ordering::Relaxed) {
            region.pages()
        } else {
            (8 << 20) / PAGE
        };
        for page in 0..pages {
            fill(page as u64, region.versions[page], &mut expected);
            if *region.bytes(page) != expected {
                println!("WRONG: page {page}");
                std::process::exit(3);
            }
        }
    }
}

/// Threads read pages while another one gives them up: what was given up must never come back. Says `WRONG`
/// and ends when it does.
pub fn racer(seconds: f64) {
    const PAGES: usize = (32 << 20) / PAGE;
    const RUN: usize = 32;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe {
        mm::mmap_anonymous(
            std::ptr::null_mut(),
            PAGES * PAGE,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    };
    let base = base.expect("memory").addr();
    // SAFETY: a word of the mapping, which stays for ever; all accesses are atomic.
    let word = |page: usize, at: usize| unsafe { &*((base + page * PAGE + at * 8) as *const AtomicU64) };
    let fill = |page: usize| {
        for at in 0..PAGE / 8 {
            word(page, at).store((page * 512 + at + 1) as u64, Ordering::Relaxed);
        }
    };
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    (0..PAGES).for_each(fill);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(thread);
                while Instant::now() < until {
                    let page = rng.usize(..PAGES);
                    let found = word(page, 7).load(Ordering::Relaxed);
                    if found != 0 && found != (page * 512 + 8) as u64 {
                        println!("WRONG: page {page} holds {found}");
                        std::process::exit(3);
                    }
                }
            });
        }
        let mut rng = fastrand::Rng::with_seed(9);
        while Instant::now() < until {
            let first = rng.usize(..PAGES - RUN);
            let start = (base + first * PAGE) as *mut std::ffi::c_void;
            // SAFETY: a part of the mapping, whose contents are atomics.
            unsafe { mm::madvise(start, RUN * PAGE, Advice::LinuxDontNeed) }.expect("it can be given up");
            for _ in 0..4 {
                for page in first..first + RUN {
                    let found = word(page, 9).load(Ordering::Relaxed);
                    if found != 0 {
                        println!("WRONG: page {page} was given up and holds {found}");
                        std::process::exit(3);
                    }
                }
            }
            (first..first + RUN).for_each(fill);
        }
    });
    println!("nothing came back");
}
