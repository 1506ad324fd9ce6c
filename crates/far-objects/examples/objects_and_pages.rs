//! Random reads and writes of an array that is twenty times as large as memory: as far objects, as whole
//! pages of 4 KiB in the same store (the seed's memory pages), and as a mapped file in a control group of
//! as much memory. All sides in one run. `objects_and_pages [MIB [ACCESSES [DIR [WARM]]]]`: bytes of the array
//! (default 128), accesses a row (default 20,000), directory of the store (default: the temporary one), random
//! writes of each object before the first row (default 0: the store's blocks are used the first time).
//!
//! Prints the time of an access and the bytes that were written to the device for each write, with ratios.
//! `evict_all` before and after a row, so that what is written is counted where it was caused; the log writes
//! whole blocks, so bytes are printed for rows of many writes only.

use rustix::fs::{Advice, fadvise};
use rustix::mm::{Advice as MapAdvice, MapFlags, ProtFlags, madvise, mmap};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr::{NonNull, null_mut};
use std::time::Instant;
use varve_far::FileSlabs;
use varve_far_objects::{Config, FarHeap, FarVec};

const PAGE: usize = 4096;
type Page = [u8; PAGE];

/// One side of the comparison: an array of objects of `N` bytes.
trait Side {
    fn read(&mut self, index: usize) -> u8;
    fn write(&mut self, index: usize, byte: u8);
    /// Bytes written to the device, after all that was written is on its way to it.
    fn written_bytes(&mut self) -> u64;
    fn note(&self) -> String;
}

/// Each object by itself.
struct Objects<const N: usize> {
    heap: FarHeap,
    all: FarVec<[u8; N]>,
}

/// Objects in pages, each page an object of the store.
struct Pages<const N: usize> {
    heap: FarHeap,
    all: FarVec<Page>,
}

fn heap(dir: &Path, bytes: usize, memory: usize) -> FarHeap {
    // A third of the store is free, for all sides.
    let slabs = (bytes * 3 / 2).div_ceil(1 << 20) + 2;
    let file = FileSlabs::open(dir, slabs as u32).expect("a file for the store");
    FarHeap::new(file, &Config::new(memory as u64)).expect("a heap")
}

fn note(heap: &FarHeap) -> String {
    let stats = heap.stats();
    let log = stats.log;
    format!(
        "hits {:.1} %, cached {}, memory {:.1} of {:.1} MiB, cleaner moved {:.2} x what was written",
        100.0 * stats.hits as f64 / (stats.hits + stats.misses).max(1) as f64,
        stats.cached,
        stats.memory_used_bytes as f64 / 1048576.0,
        stats.memory_limit_bytes as f64 / 1048576.0,
        log.moved_bytes as f64 / log.appended_bytes.max(1) as f64
    )
}

fn log_written(heap: &FarHeap) -> u64 {
    heap.evict_all().expect("eviction");
    heap.stats().log.device_write_bytes
}

impl<const N: usize> Objects<N> {
    fn new(dir: &Path, count: usize, memory: usize) -> Self {
        let heap = heap(dir, count * N, memory);
        let all = FarVec::zeroed(&heap, count).expect("an array");
        (0..count).for_each(|index| all.set(index, [index as u8; N]).expect("a write"));
        Self { heap, all }
    }
}

impl<const N: usize> Side for Objects<N> {
    fn read(&mut self, index: usize) -> u8 {
        self.all.get(index).expect("a read")[N - 1]
    }

    fn write(&mut self, index: usize, byte: u8) {
        self.all.set(index, [byte; N]).expect("a write");
    }

    fn written_bytes(&mut self) -> u64 {
        log_written(&self.heap)
    }

    fn note(&self) -> String {
        note(&self.heap)
    }
}

/// The same, where a write changes one byte, so that it has to read the rest.
struct Changed<const N: usize>(Objects<N>);

impl<const N: usize> Side for Changed<N> {
    fn read(&mut self, index: usize) -> u8 {
        self.0.read(index)
    }

    fn write(&mut self, index: usize, byte: u8) {
        let changed = self.0.all.update(index, |mut object| {
            object[0] = byte;
            object
        });
        changed.expect("a write");
    }

    fn written_bytes(&mut self) -> u64 {
        self.0.written_bytes()
    }

    fn note(&self) -> String {
        String::new()
    }
}

impl<const N: usize> Pages<N> {
    fn new(dir: &Path, count: usize, memory: usize) -> Self {
        let heap = heap(dir, count * N, memory);
        let all = FarVec::<Page>::zeroed(&heap, count * N / PAGE).expect("an array");
        for page in 0..all.len() {
            all.set(page, std::array::from_fn(|at| ((page * PAGE + at) / N) as u8))
                .expect("a write");
        }
        Self { heap, all }
    }
}

impl<const N: usize> Side for Pages<N> {
    fn read(&mut self, index: usize) -> u8 {
        self.all.get(index * N / PAGE).expect("a read")[(index * N + N - 1) % PAGE]
    }

    fn write(&mut self, index: usize, byte: u8) {
        let mut page = self.all.write(index * N / PAGE).expect("a write");
        page[index * N % PAGE..][..N].fill(byte);
    }

    fn written_bytes(&mut self) -> u64 {
        log_written(&self.heap)
    }

    fn note(&self) -> String {
        note(&self.heap)
    }
}

/// A mapped file, in a control group that has as much memory as the others.
struct Mapped<const N: usize> {
    address: NonNull<u8>,
    bytes: usize,
    before: u64,
}

impl<const N: usize> Mapped<N> {
    fn new(dir: &Path, count: usize, memory: usize) -> Self {
        let bytes = count * N;
        let mut file = tempfile::tempfile_in(dir).expect("a file");
        for index in 0..count {
            file.write_all(&[index as u8; N]).expect("a write");
        }
        file.sync_all().expect("fsync");
        fadvise(&file, 0, None, Advice::DontNeed).expect("fadvise");
        // SAFETY: a new mapping at an address that the kernel chooses; nobody else has the file.
        let address = unsafe { mmap(null_mut(), bytes, PROT, MapFlags::SHARED, &file, 0) }.expect("mmap");
        // Without this the kernel reads and dirties up to 2 MiB around each access.
        // SAFETY: the range is the mapping just made, and this advice changes no bytes.
        unsafe { madvise(address, bytes, MapAdvice::Random) }.expect("madvise");
        // What the process had before is not counted: the file's pages alone are.
        let group = Path::new(GROUPS).join(group_name(std::process::id()));
        let limit = memory + GROUP_SLACK;
        std::fs::write(group.join("memory.limit_in_bytes"), limit.to_string()).expect("a limit");
        std::fs::write(group.join("cgroup.procs"), std::process::id().to_string()).expect("joins");
        Self {
            address: NonNull::new(address.cast()).expect("an address"),
            bytes,
            before: io_written(),
        }
    }

    /// Address of an object.
    fn object(&self, index: usize) -> *mut [u8; N] {
        assert!((index + 1) * N <= self.bytes);
        // SAFETY: the object ends inside the mapping, by the line above.
        unsafe { self.address.as_ptr().add(index * N).cast() }
    }
}

impl<const N: usize> Side for Mapped<N> {
    fn read(&mut self, index: usize) -> u8 {
        // SAFETY: inside the mapping, which is readable; bytes have no alignment; one thread uses it.
        let object = unsafe { self.object(index).read_volatile() };
        object[N - 1]
    }

    fn write(&mut self, index: usize, byte: u8) {
        // SAFETY: as in `read`; the mapping is writable.
        unsafe { self.object(index).write_volatile([byte; N]) };
    }

    fn written_bytes(&mut self) -> u64 {
        io_written() - self.before
    }

    fn note(&self) -> String {
        String::new()
    }
}

const PROT: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);
/// What a group needs beside the file's pages: page tables, buffer heads, pages that are being written.
const GROUP_SLACK: usize = 2 << 20;
/// Bytes of written objects below which a row says nothing about the blocks that they took.
const COUNTED_BYTES: f64 = 2e6;
const GROUPS: &str = "/sys/fs/cgroup/memory";

fn group_name(pid: u32) -> String {
    format!("varve-far-objects-{pid}")
}

/// Bytes of pages that this process made dirty, as the kernel counts them.
fn io_written() -> u64 {
    let io = std::fs::read_to_string("/proc/self/io").expect("/proc/self/io");
    let line = io.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    line.and_then(|bytes| bytes.parse().ok()).expect("write_bytes")
}

/// What one side took.
#[derive(Clone, Copy)]
struct Outcome {
    us: f64,
    written_bytes: f64,
}

/// Random accesses, of which a share writes.
fn run(side: &mut dyn Side, objects: usize, accesses: usize, write_percent: u32) -> Outcome {
    let mut random = fastrand::Rng::with_seed(u64::from(write_percent) + 1);
    let before = side.written_bytes();
    let start = Instant::now();
    let mut sum = 0u64;
    for access in 0..accesses {
        let index = random.usize(..objects);
        if random.u32(..100) < write_percent {
            side.write(index, access as u8);
        } else {
            sum += u64::from(side.read(index));
        }
    }
    std::hint::black_box(sum);
    let us = start.elapsed().as_secs_f64() * 1e6 / accesses as f64;
    let written = (side.written_bytes() - before) as f64;
    let writes = (accesses as f64 * f64::from(write_percent) / 100.0).max(1.0);
    Outcome {
        us,
        written_bytes: written / writes,
    }
}

const WRITE_PERCENTS: [u32; 5] = [0, 25, 50, 75, 100];

#[derive(Clone)]
struct Plan {
    dir: PathBuf,
    bytes: usize,
    accesses: usize,
    /// Writes of each object before the first row, at random.
    warm: usize,
}

impl Plan {
    fn memory(&self) -> usize {
        self.bytes / 20
    }

    fn outcomes(&self, side: &mut dyn Side, object_bytes: usize) -> Vec<Outcome> {
        let objects = self.bytes / object_bytes;
        run(side, objects, self.warm * objects, 100);
        let of = |percent: &u32| run(side, objects, self.accesses, *percent);
        let all = WRITE_PERCENTS.iter().map(of).collect();
        let note = side.note();
        if !note.is_empty() {
            println!("    {note}");
        }
        all
    }

    /// The mapped file's side, in a process of its own. `None` if there may be no control group.
    fn mapped(&self, object_bytes: usize) -> Option<Vec<Outcome>> {
        let mut child = Command::new(std::env::current_exe().ok()?)
            .args(["--mapped", &object_bytes.to_string()])
            .args([&(self.bytes >> 20).to_string(), &self.accesses.to_string()])
            .arg(&self.dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let group = Path::new(GROUPS).join(group_name(child.id()));
        let has_group = std::fs::create_dir(&group).is_ok();
        // The child waits for this: it may go on, or end.
        let go = if has_group { "go\n" } else { "end\n" };
        child.stdin.take()?.write_all(go.as_bytes()).ok()?;
        let output = child.wait_with_output().ok()?;
        if has_group {
            std::fs::remove_dir(&group).ok()?;
        }
        let text = String::from_utf8(output.stdout).ok()?;
        let lines = text.lines().filter_map(|line| {
            let (us, written) = line.split_once(' ')?;
            Some(Outcome {
                us: us.parse().ok()?,
                written_bytes: written.parse().ok()?,
            })
        });
        let all: Vec<_> = lines.collect();
        (all.len() == WRITE_PERCENTS.len()).then_some(all)
    }

    fn compare<const N: usize>(&self) {
        println!(
            "{N}-byte objects, {} MiB of them, {:.1} MiB of memory, {} accesses a row, in {}",
            self.bytes >> 20,
            self.memory() as f64 / 1048576.0,
            self.accesses,
            self.dir.display()
        );
        let count = self.bytes / N;
        let mut side = Objects::<N>::new(&self.dir, count, self.memory());
        let objects = self.outcomes(&mut side, N);
        let changed = self.outcomes(&mut Changed(side), N);
        let pages = self.outcomes(&mut Pages::<N>::new(&self.dir, count, self.memory()), N);
        let mapped = self.mapped(N);
        if mapped.is_none() {
            println!("    mapped file: SKIPPED: needs root and memory control groups of version 1");
        }
        println!(
            "    writes  objects     changed            pages              mapped             bytes for each write"
        );
        for (row, percent) in WRITE_PERCENTS.iter().enumerate() {
            let (one, page) = (objects[row], pages[row]);
            print!("    {percent:>4} % {:>7.2} us", one.us);
            for other in [changed[row], page] {
                print!("  {:>7.2} us {:>6.2} x", other.us, other.us / one.us);
            }
            let mapped = mapped.as_ref().map(|all| all[row]);
            match mapped {
                Some(mapped) => print!("  {:>7.2} us {:>6.2} x", mapped.us, mapped.us / one.us),
                None => print!("  {:>17}", "-"),
            }
            let written = (self.accesses * N) as f64 * f64::from(*percent) / 100.0;
            if written >= COUNTED_BYTES {
                let ratio = |other: Outcome| other.written_bytes / one.written_bytes;
                print!(
                    "  {:>6.0} B, {:>6.0} B {:>5.2} x",
                    one.written_bytes,
                    page.written_bytes,
                    ratio(page)
                );
                if let Some(mapped) = mapped {
                    print!(", {:>6.0} B {:>5.2} x", mapped.written_bytes, ratio(mapped));
                }
            }
            println!();
        }
        println!();
    }
}

fn mapped_child(plan: &Plan, object_bytes: usize) {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a line");
    if line.trim() != "go" {
        return;
    }
    let mut side: Box<dyn Side> = match object_bytes {
        128 => Box::new(Mapped::<128>::new(&plan.dir, plan.bytes / 128, plan.memory())),
        1024 => Box::new(Mapped::<1024>::new(&plan.dir, plan.bytes / 1024, plan.memory())),
        _ => Box::new(Mapped::<2048>::new(&plan.dir, plan.bytes / 2048, plan.memory())),
    };
    for outcome in plan.outcomes(&mut *side, object_bytes) {
        println!("{} {}", outcome.us, outcome.written_bytes);
    }
    // Out of the group, so that it can be removed.
    std::fs::write(
        Path::new(GROUPS).join("cgroup.procs"),
        std::process::id().to_string(),
    )
    .expect("leaves");
}

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let child = if arguments.first().is_some_and(|first| first == "--mapped") {
        arguments.drain(..2).nth(1)
    } else {
        None
    };
    let number =
        |at: usize, default: usize| arguments.get(at).and_then(|n| n.parse().ok()).unwrap_or(default);
    let plan = Plan {
        bytes: number(0, 128) << 20,
        accesses: number(1, 20_000),
        warm: number(3, 0),
        dir: arguments.get(2).map_or_else(std::env::temp_dir, PathBuf::from),
    };
    if let Some(object_bytes) = child.and_then(|bytes| bytes.parse().ok()) {
        return mapped_child(&plan, object_bytes);
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load average {}", load.trim());
    plan.compare::<128>();
    plan.compare::<1024>();
    plan.compare::<2048>();
}
