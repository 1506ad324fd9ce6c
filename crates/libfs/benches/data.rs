//! The data path against the medium's own limit, in one process: rounds of each case are interleaved with
//! rounds of the limit, and medians and minima are shown as ratios.
//!
//! `cargo bench -p varve-libfs --bench data [-- FILTER]`. The limit of a write is a non-temporal copy of the
//! payload and one line for the commit, then one fence; of a read, `memcpy` from the same mapping.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use varve_format::space::CHECKSUMS_PER_BLOCK;
use varve_format::{
    BLOCK_HEADER_SIZE, BlockNo, EntryFlags, FileBlock, InodeAttr, InodeKey, LogSeq, SessionId, Tier,
};
use varve_ipc::{
    IpcError, Link, MappedExtent, Page, Request, Response, SessionPage, SystemClock, Upcall, Welcome,
};
use varve_libfs::data::DataPlane;
use varve_libfs::inode::Inode;
use varve_media::{Backing, MappedOptions, MappedRegion, Region, Verified};

const LOG_BYTES: u64 = 1 << 30;
const FILE_BYTES: u64 = 256 << 20;
const ROUNDS: usize = 15;
const NONE: EntryFlags = EntryFlags::empty();

/// A daemon that digests by saying so.
struct Link0 {
    page: Arc<Page>,
    at_once: AtomicBool,
    last: AtomicU64,
}

impl Link for Link0 {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        Ok(match request {
            Request::Reserve { blocks, .. } => Response::Reserved(blocks),
            Request::Digest { upto, wait } => {
                if wait || self.at_once.load(Ordering::Relaxed) {
                    self.page.set_digested(upto);
                }
                self.last.store(upto.0, Ordering::Relaxed);
                Response::Digested(self.page.digested())
            }
            Request::MapExtents { from, .. } => {
                let blocks = FILE_BYTES / 4096 - from.0;
                let run = MappedExtent {
                    file_block: from,
                    len: blocks as u32,
                    tier: Tier::Nvm,
                    block: BlockNo(from.0),
                    unwritten: false,
                    number: None,
                };
                let _: FileBlock = run.file_block;
                Response::Extents(vec![run], true)
            }
            _ => return Err(IpcError::Errno(libc::ENOSYS)),
        })
    }

    fn upcall(&self, _: Duration) -> Result<Option<Upcall>, IpcError> {
        Ok(None)
    }
}

struct Rig {
    plane: DataPlane,
    page: Arc<Page>,
    link: Arc<Link0>,
    raw: Arc<dyn Region>,
    nvm: Arc<dyn Region>,
    /// The same with `verify_nvm_reads`.
    verifying: DataPlane,
    /// The same with `verify_nvm_reads = "first"`.
    verifying_once: DataPlane,
    /// Makes another of those, which has compared nothing.
    fresh: Box<dyn Fn() -> DataPlane + Send + Sync>,
}

fn region(dir: &Path, name: &str, bytes: u64) -> Arc<dyn Region> {
    let options = MappedOptions {
        backing: Backing::Shm,
        len_bytes: bytes,
        max_bytes: bytes,
        sparse: false,
    };
    let region = MappedRegion::create(&dir.join(name), options).expect("space in /dev/shm");
    let zeros = vec![1; 1 << 20];
    for at in (0..bytes).step_by(zeros.len()) {
        region.write(at, &zeros).expect("in the region");
    }
    let zeros = vec![0; 1 << 20];
    for at in (0..bytes).step_by(zeros.len()) {
        region.write(at, &zeros).expect("in the region");
    }
    Arc::new(region)
}

/// The table of checksums behind the file's blocks, which are zeros.
fn fill_sums(nvm: &dyn Region) {
    let sum = crc32c::crc32c(&[0; 4096]).to_le_bytes();
    for block in 0..FILE_BYTES / 4096 {
        let at = FILE_BYTES
            + block / CHECKSUMS_PER_BLOCK * 4096
            + BLOCK_HEADER_SIZE as u64
            + block % CHECKSUMS_PER_BLOCK * 4;
        nvm.write(at, &sum).expect("in the region");
    }
}

fn attr(ino: u64, size_bytes: u64) -> InodeAttr {
    InodeAttr {
        size_bytes,
        ..InodeAttr::new(InodeKey::new(ino, 1), 0o100_644, 0)
    }
}

impl Rig {
    fn new(dir: &Path) -> Self {
        let page = Arc::new(Page::heap(SessionId(1)));
        let link = Arc::new(Link0 {
            page: page.clone(),
            at_once: AtomicBool::new(false),
            last: AtomicU64::new(0),
        });
        let welcome = Welcome {
            session: SessionId(1),
            token: 1,
            pool_uuid: [0; 16],
            root: attr(1, 0),
            privileged: true,
            acts_for: None,
            read_only: false,
            latched: None,
            shared: false,
            log_bytes: LOG_BYTES,
            log_max_bytes: LOG_BYTES,
            nvm_bytes: FILE_BYTES,
            nvm_sums: None,
            nvm_sums_once: false,
            nvm_emulated: false,
            dax: varve_ipc::DaxMaps::default(),
            lease_ms: 2000,
            wait_ms: 30_000,
            digest_percent: 30,
            read_ahead_bytes: 256 << 10,
            sync_ms: 0,
            needs_sync: false,
            seal: None,
            last_forwarded: varve_format::LastForwarded::default(),
            leases_max: 1000,
            name_hash: None,
            copies_at: None,
        };
        let nvm = region(dir, "nvm", FILE_BYTES + (8 << 20));
        fill_sums(&*nvm);
        let log = region(dir, "log", LOG_BYTES);
        let plane = DataPlane::new(
            &welcome,
            link.clone(),
            page.clone(),
            Some(log),
            Some(nvm.clone()),
            None,
            Arc::new(SystemClock),
        );
        let (own_link, own_page, own_nvm) = (link.clone(), page.clone(), nvm.clone());
        let verifying = move |once| {
            DataPlane::new(
                &Welcome {
                    nvm_sums: Some(FILE_BYTES),
                    nvm_sums_once: once,
                    nvm_emulated: false,
                    ..welcome.clone()
                },
                own_link.clone(),
                own_page.clone(),
                None,
                Some(own_nvm.clone()),
                None,
                Arc::new(SystemClock),
            )
        };
        Self {
            verifying: verifying(false),
            verifying_once: verifying(true),
            fresh: Box::new(move || verifying(true)),
            plane,
            page,
            link,
            raw: region(dir, "raw", FILE_BYTES),
            nvm,
        }
    }

    /// Lets the log be used again, outside of what is timed.
    fn recycle(&self) {
        let last = self.plane.log().expect("a log").last_seq();
        self.page.set_digested(LogSeq(last.0));
        self.plane.reclaim();
    }
}

/// A cheap generator, so that no thread waits for another.
struct Dice(u64);

impl Dice {
    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

/// Nanoseconds an operation.
fn timed(count: u64, mut run: impl FnMut(u64)) -> f64 {
    let start = Instant::now();
    for step in 0..count {
        run(step);
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

fn raw_writes(raw: &dyn Region, len: usize, part: (u64, u64), count: u64) -> f64 {
    let data = vec![7_u8; len];
    let size = (len as u64 + 64).next_multiple_of(64);
    let header = [1_u8; 64];
    let mut at = part.0;
    timed(count, |_| {
        if at + size > part.1 {
            at = part.0;
        }
        raw.write(at + 64, &data).expect("in the region");
        raw.write(at, &header).expect("in the region");
        raw.fence().expect("memory");
        at += size;
    })
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Interleaves rounds of the limit and of the case and prints both.
fn compare(name: &str, mut limit: impl FnMut() -> f64, mut case: impl FnMut() -> f64) {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    if filter.is_some_and(|filter| !name.contains(&filter)) {
        return;
    }
    let (mut limits, mut cases, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (a, b) = (limit(), case());
        limits.push(a);
        cases.push(b);
        ratios.push(b / a);
    }
    let (limit, case, ratio) = (median(&mut limits), median(&mut cases), median(&mut ratios));
    println!(
        "{name:<34} limit {limit:7.0} (min {:6.0})  ours {case:7.0} (min {:6.0})  ratio {ratio:5.2}  of \
        minima {:5.2}",
        limits[0],
        cases[0],
        cases[0] / limits[0]
    );
}

/// Two threads at once; nanoseconds an operation of one thread.
fn two(run: impl Fn(u64) -> f64 + Sync) -> f64 {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|index| {
                scope.spawn({
                    let run = &run;
                    move || run(index)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .sum::<f64>()
            / 2.0
    })
}

fn writes(rig: &Rig) {
    let blocks = FILE_BYTES / 4096;
    let file = Arc::new(Inode::new(attr(2, FILE_BYTES)));
    let page = vec![9_u8; 4096];
    let mut dice = Dice(88172645463325252);
    let half = FILE_BYTES / 2;
    for at_once in [false, true] {
        let suffix = if at_once { ", digest at once" } else { "" };
        rig.link.at_once.store(at_once, Ordering::Relaxed);
        compare(
            &format!("overwrite 4 KiB{suffix}"),
            || raw_writes(&*rig.raw, 4096, (0, FILE_BYTES), 30_000),
            || {
                let ns = timed(30_000, |_| {
                    let at = dice.next(blocks) * 4096;
                    rig.plane.write(&file, at, &page, NONE).expect("space");
                });
                if !at_once {
                    rig.recycle();
                }
                ns
            },
        );
        for len in [128_usize, 1024, 4096, 65_536] {
            let count = if len > 4096 { 2_000 } else { 30_000 };
            let data = vec![5_u8; len];
            compare(
                &format!("append {len} B{suffix}"),
                || raw_writes(&*rig.raw, len, (0, FILE_BYTES), count),
                || {
                    let file = Arc::new(Inode::new(attr(3, 0)));
                    let ns = timed(count, |_| {
                        rig.plane.append(&file, &data, NONE).expect("space");
                    });
                    if !at_once {
                        rig.recycle();
                    }
                    ns
                },
            );
        }
    }
    rig.link.at_once.store(false, Ordering::Relaxed);
    compare(
        "overwrite 128 B",
        || raw_writes(&*rig.raw, 128, (0, FILE_BYTES), 30_000),
        || {
            let ns = timed(30_000, |_| {
                let at = dice.next(blocks) * 4096 + 512;
                rig.plane.write(&file, at, &page[..128], NONE).expect("space");
            });
            rig.recycle();
            ns
        },
    );
    compare(
        "two threads, one file, 4 KiB",
        || two(|thread| raw_writes(&*rig.raw, 4096, (thread * half, (thread + 1) * half), 30_000)),
        || {
            let ns = two(|thread| {
                let mut dice = Dice(thread * 7919 + 1234567);
                timed(30_000, |_| {
                    let at = dice.next(blocks) * 4096;
                    rig.plane.write(&file, at, &page, NONE).expect("space");
                })
            });
            rig.recycle();
            ns
        },
    );
    compare(
        "two threads, two files, append 4 KiB",
        || two(|thread| raw_writes(&*rig.raw, 4096, (thread * half, (thread + 1) * half), 30_000)),
        || {
            let ns = two(|thread| {
                let file = Arc::new(Inode::new(attr(4 + thread, 0)));
                timed(30_000, |_| {
                    rig.plane.append(&file, &page, NONE).expect("space");
                })
            });
            rig.recycle();
            ns
        },
    );
}

fn raw_reads(from: &dyn Region, dice: &mut Dice, len: usize, count: u64) -> f64 {
    let base = from.as_ptr().expect("a mapping");
    let mut out = vec![0_u8; len];
    let places = FILE_BYTES / len as u64;
    timed(count, |_| {
        let at = (dice.next(places) * len as u64) as usize;
        // SAFETY: `at + len` is at most `FILE_BYTES`, the region's length; nobody writes to it now.
        unsafe { std::ptr::copy_nonoverlapping(base.as_ptr().add(at), out.as_mut_ptr(), len) };
        black_box(&mut out);
    })
}

fn reads(rig: &Rig) {
    let in_log = Arc::new(Inode::new(attr(20, 0)));
    let chunk = vec![3_u8; 1 << 20];
    for _ in 0..FILE_BYTES >> 20 {
        rig.plane.append(&in_log, &chunk, NONE).expect("space");
    }
    let below = Arc::new(Inode::new(attr(21, FILE_BYTES)));
    for len in [100_usize, 4096, 1 << 20] {
        let count = if len > 4096 { 500 } else { 40_000 };
        for (name, plane, file) in [
            ("log", &rig.plane, &in_log),
            ("nvm", &rig.plane, &below),
            ("nvm verified", &rig.verifying, &below),
            ("nvm verified once", &rig.verifying_once, &below),
        ] {
            let (mut a, mut b) = (Dice(4711), Dice(815));
            let mut out = vec![0_u8; len];
            compare(
                &format!("read {len} B at random, {name}"),
                || raw_reads(&*rig.nvm, &mut a, len, count),
                || {
                    timed(count, |_| {
                        let at = b.next(FILE_BYTES / len as u64) * len as u64;
                        assert_eq!(plane.read(file, at, &mut out), Ok(len));
                        black_box(&mut out);
                    })
                },
            );
        }
    }
    verified_once(rig, &below);
    compare(
        "two threads, one file, read 4 KiB",
        || two(|thread| raw_reads(&*rig.nvm, &mut Dice(thread + 99), 4096, 40_000)),
        || {
            two(|thread| {
                let (mut dice, mut out) = (Dice(thread + 77), vec![0_u8; 4096]);
                timed(40_000, |_| {
                    let at = dice.next(FILE_BYTES / 4096) * 4096;
                    assert_eq!(rig.plane.read(&below, at, &mut out), Ok(4096));
                    black_box(&mut out);
                })
            })
        },
    );
}

/// What it costs to compare each block once: the limit is the same read without. Each place is read once a
/// round.
fn verified_once(rig: &Rig, file: &Arc<Inode>) {
    let blocks = FILE_BYTES / 4096;
    let reads = |plane: &DataPlane, len: usize| {
        let mut out = vec![0_u8; len];
        let count = FILE_BYTES / len as u64;
        timed(count, |step| {
            // Odd, so that no place comes twice.
            let at = step * 40_503 % count * len as u64;
            assert_eq!(plane.read(file, at, &mut out), Ok(len));
            black_box(&mut out);
        })
    };
    for len in [4096, 65_536] {
        compare(
            &format!("read {len} B, compared before"),
            || reads(&rig.plane, len),
            || reads(&rig.verifying_once, len),
        );
        compare(
            &format!("read {len} B, for the first time"),
            || reads(&rig.plane, len),
            || reads(&(rig.fresh)(), len),
        );
    }
    let verified = Verified::heap(blocks);
    (0..blocks).for_each(|block| verified.note(block));
    compare(
        "look for dropped pages, a block",
        || timed(blocks, |block| _ = black_box(verified.has(block, block + 1))),
        || {
            let mut next = 0;
            let steps = blocks / 4096;
            timed(steps, |_| next = verified.forget_absent(&*rig.nvm, next, 4096)) / 4096.0
        },
    );
    assert_eq!(verified.count(), blocks);
}

fn main() {
    // `cargo test --benches` runs this too: nothing is measured then.
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").expect("/dev/shm");
    let rig = Rig::new(dir.path());
    writes(&rig);
    reads(&rig);
}
