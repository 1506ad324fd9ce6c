//! Threads that write without locks, and tell each other by what they write: a checkpoint is one moment of
//! all of them.

use crate::common::{at, load, store};
use crate::recorded::Recorded;
use crate::{Ends, TAG, config, create, create_with, numbers_of, record_of, without_thread};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use varve_far_alloc::{Error, FarAlloc};

const SLABS: u32 = 40;
const WRITERS: usize = 2;
/// Cells of a writer: small objects, of which two lie in one stored object, then words of memory pages.
const SMALL: usize = 40;
const PAGES: usize = 30;
const RING: usize = 3;
const STRIDE: usize = 4096;

fn cell(address: usize) -> &'static AtomicU64 {
    // SAFETY: tests give allocated words, aligned, that are used as atomics alone and outlive their users.
    unsafe { AtomicU64::from_ptr(at(address).cast().as_ptr()) }
}

/// Where everything is.
#[derive(Clone)]
struct Places {
    ring: usize,
    small: usize,
    pages: usize,
    /// Heads of lists of objects, one for each writer.
    heads: usize,
}

impl Places {
    fn new(heap: &FarAlloc) -> Self {
        let at = |made: std::ptr::NonNull<u8>| made.addr().get();
        Self {
            ring: at(heap.oalloc(RING, 8).unwrap()),
            small: at(heap.oalloc(WRITERS * SMALL, 64).unwrap()),
            pages: at(heap.calloc(WRITERS * PAGES, STRIDE).unwrap()),
            heads: at(heap.oalloc(WRITERS, 8).unwrap()),
        }
    }

    fn names(&self) -> [u64; 4] {
        [self.ring, self.small, self.pages, self.heads].map(|name| name as u64)
    }

    fn open(names: [u64; 4]) -> Self {
        let [ring, small, pages, heads] = names.map(|name| name as usize);
        Self {
            ring,
            small,
            pages,
            heads,
        }
    }

    /// Cells of a writer in the order in which it writes them.
    fn cells(&self, writer: usize) -> impl Iterator<Item = &'static AtomicU64> {
        let small = (0..SMALL).map(move |index| self.small + (writer * SMALL + index) * STRIDE);
        // Not in the order of their addresses.
        let pages = (0..PAGES).map(move |index| self.pages + (writer * PAGES + index * 7 % PAGES) * STRIDE);
        small.chain(pages).map(cell)
    }

    fn head(&self, writer: usize) -> &'static AtomicU64 {
        cell(self.heads + writer * STRIDE)
    }

    /// Each cell is never ahead of the one that is written before it, and behind it by one at most.
    fn check(&self, heap: &FarAlloc) -> Result<u64, String> {
        let ring: Vec<u64> = (0..RING)
            .map(|index| self.ring_cell(index).load(Ordering::Relaxed))
            .collect();
        in_order(&ring).map_err(|what| format!("ring: {what}"))?;
        for writer in 0..WRITERS {
            let cells: Vec<u64> = self
                .cells(writer)
                .map(|cell| cell.load(Ordering::Relaxed))
                .collect();
            in_order(&cells).map_err(|what| format!("writer {writer}: {what}"))?;
            let (mut node, mut before) = (self.head(writer).load(Ordering::Relaxed) as usize, u64::MAX);
            while node != 0 {
                let (number, next) = read_node(node);
                if number >= before || number % 8 != writer as u64 {
                    return Err(format!("a node of {number} after {before}"));
                }
                before = number;
                heap.free(at(node)).map_err(|error| format!("a node: {error}"))?;
                node = next;
            }
        }
        for all in [self.ring, self.small, self.pages, self.heads] {
            heap.free(at(all)).map_err(|error| error.to_string())?;
        }
        // What a writer had allocated or taken out and not yet linked or freed.
        let left = heap.objects().unwrap().stats().log.promised_bytes;
        let most = (WRITERS * 2 * (8192 + 64)) as u64;
        if left > most {
            return Err(format!("{left} bytes are allocated that nobody has"));
        }
        Ok(ring[0])
    }

    fn ring_cell(&self, index: usize) -> &'static AtomicU64 {
        cell(self.ring + index * STRIDE)
    }
}

fn in_order(cells: &[u64]) -> Result<(), String> {
    let is_right = cells.windows(2).all(|two| two[0] >= two[1]) && cells[0] - cells[cells.len() - 1] <= 1;
    if is_right {
        Ok(())
    } else {
        Err(format!("{cells:?}"))
    }
}

/// A node: number, next one, and the number in its last byte.
fn read_node(node: usize) -> (u64, usize) {
    let len = node_len(cell(node).load(Ordering::Relaxed));
    let number = cell(node).load(Ordering::Relaxed);
    assert_eq!(load(at(node), len - 1), number as u8, "a node of {len} bytes");
    (number, cell(node + 8).load(Ordering::Relaxed) as usize)
}

fn node_len(number: u64) -> usize {
    [24, 40, 100, 128, 700, 4096, 5000][number as usize / 8 % 7]
}

fn write(heap: &FarAlloc, places: &Places, writer: usize, is_ending: &AtomicBool) {
    let mut random = fastrand::Rng::with_seed(writer as u64);
    let head = places.head(writer);
    let (mut round, mut number, mut nodes) = (0, writer as u64, 0);
    while !is_ending.load(Ordering::Relaxed) {
        round += 1;
        for cell in places.cells(writer) {
            cell.store(round, Ordering::Release);
        }
        for _ in 0..4 {
            if nodes < 60 && random.bool() {
                number += 8;
                let len = node_len(number);
                let made = match random.bool() {
                    true => heap.oalloc(1, len),
                    false => heap.malloc(len),
                };
                let node = made.unwrap();
                cell(node.addr().get()).store(number, Ordering::Relaxed);
                store(node, len - 1, number as u8);
                cell(node.addr().get() + 8).store(head.load(Ordering::Relaxed), Ordering::Relaxed);
                head.store(node.addr().get() as u64, Ordering::Release);
                nodes += 1;
            } else if nodes > 0 {
                let node = head.load(Ordering::Relaxed) as usize;
                let (_, next) = read_node(node);
                head.store(next as u64, Ordering::Release);
                heap.free(at(node)).unwrap();
                nodes -= 1;
            }
        }
    }
}

/// Passes numbers on: each cell gets what the one before it has.
fn pass(places: &Places, index: usize, is_ending: &AtomicBool) {
    let own = places.ring_cell(index);
    while !is_ending.load(Ordering::Relaxed) {
        let other = places
            .ring_cell((index + RING - 1) % RING)
            .load(Ordering::Acquire);
        let is = own.load(Ordering::Relaxed);
        if index == 0 && other == is {
            own.store(is + 1, Ordering::Release);
        } else if index != 0 && other > is {
            own.store(other, Ordering::Release);
        } else {
            std::thread::yield_now();
        }
    }
}

#[test]
fn checkpoint_is_one_moment_of_all_threads() {
    let (mut moments, mut stopped) = (std::collections::BTreeSet::new(), Duration::ZERO);
    for round in 0..4 {
        let file = Recorded::default();
        if round % 2 == 1 {
            // Much happens while pages are saved.
            file.after_writes(Some(Box::new(|| std::thread::sleep(Duration::from_millis(2)))));
        }
        let Some(heap) = create(file.clone(), SLABS) else {
            return;
        };
        let places = Places::new(&heap);
        let is_ending = AtomicBool::new(false);
        let mut images = Vec::new();
        std::thread::scope(|scope| {
            let _ends = Ends(&is_ending);
            for index in 0..RING {
                let (places, is_ending) = (&places, &is_ending);
                scope.spawn(move || pass(places, index, is_ending));
            }
            for writer in 0..WRITERS {
                let (heap, places, is_ending) = (&heap, &places, &is_ending);
                scope.spawn(move || write(heap, places, writer, is_ending));
            }
            for number in 0..10 {
                let made = heap.checkpoint(&record_of(&places.names())).unwrap();
                stopped = stopped.max(made.stopped);
                images.push(file.bytes());
                std::thread::sleep(Duration::from_millis(number));
            }
            is_ending.store(true, Ordering::Relaxed);
        });
        drop(heap);
        for image in images {
            let (heap, record) = FarAlloc::restore(Recorded::of(image), TAG, &config()).unwrap();
            let names = numbers_of(&record);
            let places = Places::open(*names.first_chunk().unwrap());
            moments.insert(places.check(&heap).unwrap());
        }
    }
    println!(
        "{} different moments of 40, threads stopped {stopped:?} at most",
        moments.len()
    );
    assert!(moments.len() > 10);
}

/// Direct I/O to pages while checkpoints are made: nothing that it read is lost, and pages that it does not
/// write to are in the checkpoint as they were.
#[test]
fn device_writes_beside_checkpoints_are_not_lost() {
    const LEN: usize = 32 * 4096;
    const READS: usize = 8;
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("data");
    let bytes: Vec<u8> = (0..4 * LEN)
        .map(|index| (index / 4096 * 7 + index % 251) as u8)
        .collect();
    std::fs::write(&path, &bytes).unwrap();
    let opened = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path);
    let Ok(direct) = opened else {
        eprintln!("SKIPPED: /var/tmp takes no direct I/O");
        return;
    };
    let file = Recorded::default();
    let Some(heap) = create(file.clone(), SLABS) else {
        return;
    };
    let target = heap.malloc(LEN + 4096).unwrap();
    let to = target.addr().get().next_multiple_of(4096);
    let fixed = heap.malloc(4096).unwrap();
    store(fixed, 7, 77);
    let (is_ending, reads) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let _ends = Ends(&is_ending);
        let reader = scope.spawn(|| {
            let target = at(to);
            while !is_ending.load(Ordering::Relaxed) {
                let read = reads.load(Ordering::Relaxed);
                let from = read % 4 * LEN;
                crate::common::read_at(&direct, target, LEN, from as i64);
                for index in (0..LEN).step_by(97) {
                    assert_eq!(
                        load(target, index),
                        bytes[from + index],
                        "read {read} lost byte {index}"
                    );
                }
                store(target, read * 4096 % LEN, 1);
                reads.store(read + 1, Ordering::Relaxed);
            }
        });
        // Until each has done enough beside the other, however the machine shares its time.
        let mut made = 0;
        while (made < 40 || reads.load(Ordering::Relaxed) < READS) && !reader.is_finished() {
            heap.checkpoint(&record_of(&[fixed.addr().get() as u64])).unwrap();
            made += 1;
        }
    });
    let reads = reads.load(Ordering::Relaxed);
    let kept = heap.stats().unwrap().kept;
    println!("{reads} direct reads, {kept} times a page was in use when it was to leave");
    assert!(reads >= READS);
    drop(heap);
    let (heap, record) = FarAlloc::restore(Recorded::of(file.bytes()), TAG, &config()).unwrap();
    assert_eq!(load(at(numbers_of(&record)[0] as usize), 7), 77);
    drop(heap);
}

#[test]
fn pinned_pages_and_pages_of_small_objects_are_saved_and_stay() {
    let file = Recorded::default();
    let Some(heap) = create(file.clone(), SLABS) else {
        return;
    };
    let small = heap.oalloc(64, 16).unwrap();
    let pinned = heap.malloc(3 * 4096).unwrap();
    heap.pin(pinned, 3 * 4096).unwrap();
    let fill = |byte: u8| {
        for index in 0..64 {
            store(at(small.addr().get() + index * STRIDE), 3, byte + index as u8);
        }
        for index in 0..3 {
            store(pinned, index * 4096, byte);
        }
    };
    let record = record_of(&[small.addr().get() as u64, pinned.addr().get() as u64]);
    let mut images = Vec::new();
    for byte in 1..6 {
        fill(byte);
        heap.checkpoint(&record).unwrap();
        images.push((byte, file.bytes()));
        fill(100);
        if byte == 3 {
            heap.flush().unwrap();
        }
    }
    heap.unpin(pinned, 3 * 4096).unwrap();
    drop(heap);
    for (byte, image) in images {
        let (heap, record) = FarAlloc::restore(Recorded::of(image), TAG, &config()).unwrap();
        let [small, pinned] = *numbers_of(&record).first_chunk().unwrap();
        for index in 0..64 {
            assert_eq!(load(at(small as usize + index * STRIDE), 3), byte + index as u8);
        }
        assert!((0..3).all(|index| load(at(pinned as usize), index * 4096) == byte));
        assert!(
            heap.unpin(at(pinned as usize), 4096).is_err(),
            "pins end with the process"
        );
    }
}

/// What is allocated and freed while pages are saved, and records are not yet.
#[test]
fn records_that_change_before_the_checkpoint_comes_to_them_are_saved_first() {
    const PAGES: usize = 100;
    let (file, config) = (Recorded::default(), without_thread());
    let Some(heap) = create_with(file.clone(), SLABS, &config) else {
        return;
    };
    let heap = Arc::new(heap);
    let pages = heap.malloc(PAGES * STRIDE).unwrap();
    heap.checkpoint(&[]).unwrap();
    let there = [heap.malloc(5000), heap.oalloc(1, 40), heap.oalloc(3, 40)].map(Result::unwrap);
    (0..PAGES).for_each(|index| store(pages, index * STRIDE, 1));
    let epoch = heap.objects().unwrap().epoch();
    let later = Arc::new(Mutex::new(Vec::new()));
    let change = {
        let (heap, later) = (Arc::clone(&heap), Arc::clone(&later));
        let there = there.map(|at| at.addr().get());
        move || {
            let mut later = later.lock().unwrap();
            if later.is_empty() && heap.objects().unwrap().epoch() != epoch {
                let made = [heap.malloc(9000), heap.oalloc(1, 40), heap.oalloc(1, 60)];
                later.extend(made.map(|made| made.unwrap().addr().get()));
                there.iter().for_each(|there| heap.free(at(*there)).unwrap());
            }
        }
    };
    file.after_writes(Some(Box::new(change)));
    heap.checkpoint(&[]).unwrap();
    file.after_writes(None);
    drop(heap);
    let (heap, _) = FarAlloc::restore(Recorded::of(file.bytes()), TAG, &config).unwrap();
    let later = std::mem::take(&mut *later.lock().unwrap());
    assert_eq!(later.len(), 3, "nothing was written while pages were saved");
    for later in later {
        assert!(heap.free(at(later)).is_err(), "{later:#x} was allocated later");
    }
    assert!((0..PAGES).all(|index| load(pages, index * STRIDE) == 1));
    for there in there.into_iter().chain([pages]) {
        heap.free(there).unwrap();
    }
    assert_eq!(heap.objects().unwrap().stats().log.promised_bytes, 0);
}

/// Ranges that end while a checkpoint is written that fails, and another over their addresses: the next
/// checkpoint has what is there.
#[test]
fn ranges_that_ended_in_a_checkpoint_that_failed_are_not_in_the_next_one() {
    const PAGES: usize = 100;
    /// So many that the one over them is hardly told of last, whatever the order.
    const ENDS: usize = 60;
    let (file, config) = (Recorded::default(), without_thread());
    let Some(heap) = create_with(file.clone(), SLABS, &config) else {
        return;
    };
    let heap = Arc::new(heap);
    let pages = heap.malloc(PAGES * STRIDE).unwrap();
    // The first one has all, the next ones what changed.
    assert!(heap.checkpoint(&[]).unwrap().is_whole);
    // Side by side, with nothing free around them.
    let below = heap.oalloc(2, 40).unwrap();
    let ends: Vec<usize> = (0..ENDS)
        .map(|_| heap.oalloc(2, 40).unwrap().addr().get())
        .collect();
    let beside = heap.oalloc(2, 40).unwrap();
    assert_eq!(beside.addr().get(), below.addr().get() + (ENDS + 1) * 2 * STRIDE);
    heap.free(below).unwrap();
    (0..PAGES).for_each(|index| store(pages, index * STRIDE, 1));
    let epoch = heap.objects().unwrap().epoch();
    let over = Arc::new(Mutex::new(None));
    let change = {
        let (heap, file, over) = (Arc::clone(&heap), file.clone(), Arc::clone(&over));
        let ends = ends.clone();
        move || {
            let mut over = over.lock().unwrap();
            if over.is_none() && heap.objects().unwrap().epoch() != epoch {
                ends.iter().for_each(|ends| heap.free(at(*ends)).unwrap());
                *over = Some(heap.oalloc((ENDS + 1) * 2, 40).unwrap().addr().get());
                file.fail_writes_after(Some(0));
            }
        }
    };
    file.after_writes(Some(Box::new(change)));
    let failed = heap.checkpoint(&[]);
    assert!(
        matches!(failed, Err(Error::Objects(varve_far_objects::Error::Io { .. }))),
        "{failed:?}"
    );
    file.after_writes(None);
    file.fail_writes_after(None);
    let over = over.lock().unwrap().take().unwrap();
    assert_eq!(over, below.addr().get(), "it has the addresses of all");
    store(at(over), 5 * STRIDE, 8);
    heap.checkpoint(&[]).unwrap();
    drop(heap);
    let (heap, _) = FarAlloc::restore(Recorded::of(file.bytes()), TAG, &config).unwrap();
    assert_eq!(load(at(over), 5 * STRIDE), 8);
    assert!((0..PAGES).all(|index| load(pages, index * STRIDE) == 1));
    assert!(
        ends.iter().all(|ends| heap.free(at(*ends)).is_err()),
        "they ended"
    );
    for there in [at(over), beside, pages] {
        heap.free(there).unwrap();
    }
    assert_eq!(heap.objects().unwrap().stats().log.promised_bytes, 0);
}

/// An io_uring that has these bytes as a registered buffer: the kernel holds their pages.
fn register(address: usize, len: usize) -> std::io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
    let mut params = [0u64; 15];
    // SAFETY: `struct io_uring_params` has 120 bytes, which the call fills.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) };
    let fd = i32::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new.
    let ring = unsafe { OwnedFd::from_raw_fd(fd) };
    let buffer = libc::iovec {
        iov_base: at(address).as_ptr().cast(),
        iov_len: len,
    };
    // SAFETY: one buffer, of allocated bytes. 0: IORING_REGISTER_BUFFERS.
    let done = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            ring.as_raw_fd(),
            0,
            &raw const buffer,
            1,
        )
    };
    match done {
        0 => Ok(ring),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[test]
fn pages_that_the_kernel_holds_are_saved_where_they_are() {
    const COUNT: usize = 8;
    let file = Recorded::default();
    let Some(heap) = create(file.clone(), SLABS) else {
        return;
    };
    let bytes = heap.malloc((COUNT + 1) * STRIDE).unwrap().addr().get();
    let first = bytes.next_multiple_of(STRIDE);
    let ring = match register(first, COUNT * STRIDE) {
        Ok(ring) => ring,
        Err(error) => {
            eprintln!("SKIPPED: no io_uring: {error}");
            return;
        }
    };
    let is_ending = AtomicBool::new(false);
    let mut images = Vec::new();
    std::thread::scope(|scope| {
        let _ends = Ends(&is_ending);
        scope.spawn(|| {
            let mut round = 0;
            while !is_ending.load(Ordering::Relaxed) {
                round += 1;
                for index in 0..COUNT {
                    cell(first + index * STRIDE).store(round, Ordering::Release);
                }
            }
        });
        for _ in 0..20 {
            heap.checkpoint(&record_of(&[first as u64])).unwrap();
            images.push(file.bytes());
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    let stats = heap.stats().unwrap();
    println!(
        "{} pages saved, {} of them in place",
        stats.saved, stats.saved_in_place
    );
    assert!(stats.saved_in_place > COUNT as u64);
    drop(ring);
    drop(heap);
    let mut last = 0;
    for image in images {
        let (_heap, record) = FarAlloc::restore(Recorded::of(image), TAG, &config()).unwrap();
        let first = numbers_of(&record)[0] as usize;
        let cells: Vec<u64> = (0..COUNT)
            .map(|index| cell(first + index * STRIDE).load(Ordering::Relaxed))
            .collect();
        in_order(&cells).unwrap();
        last = cells[0].max(last);
    }
    assert!(last > 1);
}
