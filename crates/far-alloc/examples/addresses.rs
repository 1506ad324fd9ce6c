//! Random reads and writes of an array of 128-byte objects that is twenty times as large as memory, by
//! address: objects by `oalloc`, the same by handles, bytes by `malloc` (pages), a mapped file and swap,
//! both in a control group of as much memory. All sides in one run. `addresses [MIB [ACCESSES [DIR]]]`:
//! bytes of the array (default 256), accesses a row (default 5,000), directory of the store and of the swap
//! file (default: the temporary one).
//!
//! A write by address fills the object, after the object or page was read: a fault does not say how much
//! will be written. A write by handle reads nothing.
#![allow(unsafe_code)]

use rustix::fs::{Advice, fadvise};
use rustix::mm::{Advice as MapAdvice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::time::Instant;
use varve_far::FileSlabs;
use varve_far_alloc::{Config, FarAlloc};
use varve_far_objects::{FarHeap, FarVec};

const LEN: usize = 128;
const PAGE: usize = 4096;
const WRITE_PERCENTS: [u32; 5] = [0, 25, 50, 75, 100];
const PROT: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);
/// What a group needs beside the pages: page tables, buffer heads, pages that are being written.
const GROUP_SLACK: usize = 2 << 20;
const GROUPS: &str = "/sys/fs/cgroup/memory";

/// One side of the comparison.
trait Side {
    fn read(&mut self, index: usize) -> u8;
    fn write(&mut self, index: usize, byte: u8);
    /// Bytes written to the device by now, if that is known.
    fn written_bytes(&mut self) -> Option<u64> {
        None
    }
    fn note(&self) -> String {
        String::new()
    }
}

/// Memory by address: objects a stride apart.
struct Memory {
    start: usize,
    stride: usize,
    heap: Option<FarAlloc>,
}

impl Side for Memory {
    fn read(&mut self, index: usize) -> u8 {
        let at = std::ptr::with_exposed_provenance::<[u8; LEN]>(self.start + index * self.stride);
        // SAFETY: the side has `stride * count` bytes of memory, which nobody else uses.
        unsafe { at.read_volatile()[LEN - 1] }
    }

    fn write(&mut self, index: usize, byte: u8) {
        let at = std::ptr::with_exposed_provenance_mut::<[u8; LEN]>(self.start + index * self.stride);
        // SAFETY: as in `read`.
        unsafe { at.write_volatile([byte; LEN]) };
    }

    fn written_bytes(&mut self) -> Option<u64> {
        let heap = self.heap.as_ref()?;
        heap.flush().expect("pages leave");
        log_written(heap.objects().ok()?)
    }

    fn note(&self) -> String {
        let Some(heap) = &self.heap else {
            return String::new();
        };
        let (pages, objects) = (heap.stats().expect("counters"), heap.objects().expect("objects"));
        format!(
            "{} pages in memory, memory {:.1} of {:.1} MiB, {}, page tables of the process {} kB",
            pages.buffer_pages,
            objects.stats().memory_used_bytes as f64 / 1048576.0,
            objects.stats().memory_limit_bytes as f64 / 1048576.0,
            hits(objects),
            page_tables_kb(),
        )
    }
}

struct Handles {
    heap: FarHeap,
    all: FarVec<[u8; LEN]>,
}

impl Side for Handles {
    fn read(&mut self, index: usize) -> u8 {
        self.all.get(index).expect("a read")[LEN - 1]
    }

    fn write(&mut self, index: usize, byte: u8) {
        self.all.set(index, [byte; LEN]).expect("a write");
    }

    fn written_bytes(&mut self) -> Option<u64> {
        log_written(&self.heap)
    }

    fn note(&self) -> String {
        hits(&self.heap)
    }
}

fn log_written(heap: &FarHeap) -> Option<u64> {
    heap.evict_all().expect("eviction");
    Some(heap.stats().log.device_write_bytes)
}

fn hits(heap: &FarHeap) -> String {
    let stats = heap.stats();
    let share = 100.0 * stats.hits as f64 / (stats.hits + stats.misses).max(1) as f64;
    let moved = stats.log.moved_bytes as f64 / stats.log.appended_bytes.max(1) as f64;
    format!("packed cache hit {share:.1} %, cleaner moved {moved:.2} x what was written")
}

fn page_tables_kb() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:"));
    line.unwrap_or("?").trim().trim_end_matches(" kB").to_owned()
}

/// Times and bytes of one row.
#[derive(Clone, Copy)]
struct Outcome {
    us: f64,
    /// For each write.
    written_bytes: Option<f64>,
}

#[derive(Clone)]
struct Plan {
    bytes: usize,
    accesses: usize,
    dir: PathBuf,
}

impl Plan {
    fn count(&self) -> usize {
        self.bytes / LEN
    }

    fn memory(&self) -> usize {
        self.bytes / 20
    }

    fn store(&self) -> FileSlabs {
        // A third of the store is free, for all sides.
        let slabs = (self.bytes * 3 / 2).div_ceil(1 << 20) + 2;
        FileSlabs::open(&self.dir, slabs as u32).expect("a file for the store")
    }

    fn far(&self, is_object: bool) -> Memory {
        let mut config = Config::new(self.memory() as u64);
        config.page_buffer_bytes = 1 << 20;
        let heap = FarAlloc::new(self.store(), &config).expect("a heap");
        let (made, stride) = match is_object {
            true => (heap.oalloc(self.count(), LEN), PAGE),
            false => (heap.malloc(self.bytes), LEN),
        };
        let start = made.expect("an array").addr().get();
        Memory {
            start,
            stride,
            heap: Some(heap),
        }
    }

    fn handles(&self) -> Handles {
        let config = varve_far_objects::Config::new(self.memory() as u64);
        let heap = FarHeap::new(self.store(), &config).expect("a heap");
        let all = FarVec::zeroed(&heap, self.count()).expect("an array");
        Handles { heap, all }
    }

    /// A mapped file, or memory that is swapped.
    fn kernels(&self, is_file: bool) -> Memory {
        let address = if is_file {
            let mut file = tempfile::tempfile_in(&self.dir).expect("a file");
            file.write_all(&vec![0; self.bytes]).expect("a write");
            file.sync_all().expect("fsync");
            fadvise(&file, 0, None, Advice::DontNeed).expect("fadvise");
            // SAFETY: a new mapping at an address of the kernel's choice; nobody else has the file.
            let address = unsafe { mmap(null_mut(), self.bytes, PROT, MapFlags::SHARED, &file, 0) };
            let address = address.expect("mmap");
            // SAFETY: the mapping just made; this advice changes no bytes.
            unsafe { madvise(address, self.bytes, MapAdvice::Random) }.expect("madvise");
            address
        } else {
            // SAFETY: a new mapping at an address of the kernel's choice.
            unsafe { mmap_anonymous(null_mut(), self.bytes, PROT, MapFlags::PRIVATE) }.expect("mmap")
        };
        Memory {
            start: address.expose_provenance(),
            stride: LEN,
            heap: None,
        }
    }

    fn outcomes(&self, side: &mut dyn Side) -> Vec<Outcome> {
        (0..self.count()).for_each(|index| side.write(index, index as u8));
        let all = WRITE_PERCENTS
            .iter()
            .map(|percent| self.row(side, *percent))
            .collect();
        let note = side.note();
        if !note.is_empty() {
            println!("    {note}");
        }
        all
    }

    fn row(&self, side: &mut dyn Side, write_percent: u32) -> Outcome {
        let mut random = fastrand::Rng::with_seed(u64::from(write_percent) + 1);
        let before = side.written_bytes();
        let (mut sum, mut writes) = (0u64, 0u64);
        let begun = Instant::now();
        for access in 0..self.accesses {
            let index = random.usize(..self.count());
            if random.u32(..100) < write_percent {
                side.write(index, access as u8);
                writes += 1;
            } else {
                sum += u64::from(side.read(index));
            }
        }
        std::hint::black_box(sum);
        let us = begun.elapsed().as_secs_f64() * 1e6 / self.accesses as f64;
        let written = before
            .zip(side.written_bytes())
            .map(|(before, after)| after - before);
        Outcome {
            us,
            written_bytes: written
                .filter(|_| writes > 0)
                .map(|bytes| bytes as f64 / writes as f64),
        }
    }

    /// A side of the kernel's, in a process of its own. `None` if there may be no control group.
    fn in_group(&self, side: &str) -> Option<Vec<Outcome>> {
        let mut child = Command::new(std::env::current_exe().ok()?)
            .args(["--side", side])
            .args([&(self.bytes >> 20).to_string(), &self.accesses.to_string()])
            .arg(&self.dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let group = Path::new(GROUPS).join(format!("varve-far-alloc-{}", child.id()));
        let has_group = std::fs::create_dir(&group).is_ok();
        let limit = (self.memory() + GROUP_SLACK).to_string();
        let is_ready = has_group
            && std::fs::write(group.join("memory.limit_in_bytes"), limit).is_ok()
            && std::fs::write(group.join("cgroup.procs"), child.id().to_string()).is_ok();
        child
            .stdin
            .take()?
            .write_all(if is_ready { b"go\n" } else { b"end\n" })
            .ok()?;
        let output = child.wait_with_output().ok()?;
        if has_group {
            std::fs::remove_dir(&group).ok()?;
        }
        let text = String::from_utf8(output.stdout).ok()?;
        let times = text.lines().filter_map(|line| line.parse().ok());
        let all: Vec<_> = times
            .map(|us| Outcome {
                us,
                written_bytes: None,
            })
            .collect();
        (all.len() == WRITE_PERCENTS.len()).then_some(all)
    }

    fn swap(&self) -> Option<Vec<Outcome>> {
        let swap = Swap::on(&self.dir, self.bytes + (64 << 20))?;
        let all = self.in_group("swap");
        drop(swap);
        all
    }
}

/// A swap file, switched on.
struct Swap(PathBuf);

impl Swap {
    fn on(dir: &Path, bytes: usize) -> Option<Self> {
        let swap = Self(dir.join(format!("varve-far-alloc-swap-{}", std::process::id())));
        let mut file = std::fs::File::create(&swap.0).ok()?;
        let zeros = vec![0; 1 << 20];
        for _ in 0..bytes >> 20 {
            file.write_all(&zeros).ok()?;
        }
        file.sync_all().ok()?;
        let is_on = Self::tool("mkswap", &swap.0) && Self::tool("swapon", &swap.0);
        is_on.then_some(swap)
    }

    fn tool(name: &str, path: &Path) -> bool {
        let output = Command::new(name).arg(path).output();
        output.is_ok_and(|output| output.status.success())
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        Self::tool("swapoff", &self.0);
        let _ = std::fs::remove_file(&self.0);
    }
}

fn child(plan: &Plan, side: &str) {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a line");
    if line.trim() == "go" {
        for outcome in plan.outcomes(&mut plan.kernels(side == "mapped")) {
            println!("{}", outcome.us);
        }
    }
}

fn print(sides: &[(&str, Option<Vec<Outcome>>)]) {
    for (name, all) in sides {
        let Some(all) = all else {
            println!("    {name:<12} SKIPPED: needs root and memory control groups of version 1");
            continue;
        };
        print!("    {name:<12}");
        for (row, outcome) in all.iter().enumerate() {
            let base = sides.first().and_then(|(_, base)| Some(base.as_ref()?[row].us));
            print!(
                " {:>8.2} us {:>5.2} x",
                outcome.us,
                outcome.us / base.unwrap_or(f64::NAN)
            );
        }
        let written: Vec<_> = all.iter().filter_map(|outcome| outcome.written_bytes).collect();
        if let Some(last) = written.last() {
            print!("   {last:>6.0} B a write at 100 %");
        }
        println!();
    }
}

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_child = arguments.first().is_some_and(|first| first == "--side");
    let side = is_child.then(|| arguments.drain(..2).nth(1)).flatten();
    let number = |at: usize, default: usize| {
        arguments
            .get(at)
            .and_then(|text| text.parse().ok())
            .unwrap_or(default)
    };
    let plan = Plan {
        bytes: number(0, 256) << 20,
        accesses: number(1, 5000),
        dir: arguments.get(2).map_or_else(std::env::temp_dir, PathBuf::from),
    };
    if let Some(side) = side {
        return child(&plan, &side);
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load average {}", load.trim());
    println!(
        "{LEN}-byte objects, {} MiB of them, {:.1} MiB of memory, {} accesses a row, in {}",
        plan.bytes >> 20,
        plan.memory() as f64 / 1048576.0,
        plan.accesses,
        plan.dir.display()
    );
    let trap = plan.outcomes(&mut plan.far(true));
    let handles = plan.outcomes(&mut plan.handles());
    let pages = plan.outcomes(&mut plan.far(false));
    let sides = [
        ("address", Some(trap)),
        ("handle", Some(handles)),
        ("page mode", Some(pages)),
        ("mapped file", plan.in_group("mapped")),
        ("swap", plan.swap()),
    ];
    let columns: Vec<_> = WRITE_PERCENTS
        .iter()
        .map(|percent| format!("{percent:>8} % writes  "))
        .collect();
    println!("    {:<12}{}", "", columns.concat());
    print(&sides);
}
