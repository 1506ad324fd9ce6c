//! Reads of a disk with a head in the order of their positions: of those that wait, the next one upwards of
//! the head goes first, and after the topmost the lowest (C-LOOK; Worthington, Ganger and Patt 1994, §2.1).
//! For disks below which nobody sorts: a scheduler of the kernel does the same. What lies around a read is
//! read with it (`read_ahead`). Knows positions only; writes pass.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;

use crate::lock::Mutex;
use crate::read_ahead::{ReadAhead, range};

use crate::error::{DeviceName, MediaError};
use crate::traits::{BlockDevice, DeviceInfo, DeviceState, ReaderPart};

/// A read that so many others have passed, and twice as many more as waited with it at most, goes next.
/// Without it one program that reads upwards would keep all below it waiting until it has come to the end of
/// the disk.
const PASSES_MAX: u64 = 64;
/// Most parts of a batch, and bytes, that go in one turn: others need not wait for the rest.
const TURN_PARTS: usize = 16;
const TURN_BYTES: usize = 1 << 20;

/// A read that waits for its turn.
struct Waiter {
    thread: Thread,
    has_turn: AtomicBool,
}

/// The reads of a disk.
#[derive(Default)]
struct Queue {
    /// A read is under way.
    busy: bool,
    /// End of the last read that began.
    head: u64,
    /// Reads that came, and that got their turn.
    came: u64,
    went: u64,
    /// By position, then by arrival.
    waiting: BTreeMap<(u64, u64), Arc<Waiter>>,
    /// By arrival: position, and how many reads had got their turn then.
    arrivals: BTreeMap<u64, (u64, u64)>,
    /// Most reads that waited since the oldest of them is the oldest.
    peak: usize,
}

impl Queue {
    /// Takes the next read out of those that wait.
    fn next(&mut self) -> Option<Arc<Waiter>> {
        let passes_max = PASSES_MAX + 2 * self.peak as u64;
        let oldest = self.arrivals.first_key_value();
        let passed = oldest.filter(|(_, (_, went))| self.went - went >= passes_max);
        let key = match passed {
            Some((ticket, (off, _))) => (*off, *ticket),
            None => {
                let above = self.waiting.range((self.head, 0)..).next();
                *above.or_else(|| self.waiting.first_key_value())?.0
            }
        };
        let was_oldest = self
            .arrivals
            .first_key_value()
            .is_some_and(|(ticket, _)| *ticket == key.1);
        self.arrivals.remove(&key.1);
        let next = self.waiting.remove(&key);
        if was_oldest {
            self.peak = self.waiting.len();
        }
        next
    }

    /// Lets a read wait from `off` on.
    fn add(&mut self, off: u64, waiter: Arc<Waiter>) {
        let ticket = self.came;
        self.came += 1;
        self.waiting.insert((off, ticket), waiter);
        self.arrivals.insert(ticket, (off, self.went));
        self.peak = self.peak.max(self.waiting.len());
    }
}

/// A disk whose reads go one at a time, in the order of their positions.
pub struct Elevator {
    inner: Arc<dyn BlockDevice>,
    queue: Mutex<Queue>,
    ahead: ReadAhead,
}

/// The turn of a read; passed on when it is dropped.
struct Turn<'e>(&'e Elevator);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock();
        let next = queue.next();
        queue.busy = next.is_some();
        drop(queue);
        if let Some(next) = next {
            next.has_turn.store(true, Ordering::Release);
            next.thread.unpark();
        }
    }
}

impl Elevator {
    /// Wraps a disk.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockDevice>) -> Self {
        Self {
            inner,
            queue: Mutex::default(),
            ahead: ReadAhead::default(),
        }
    }

    /// Waits for the turn of a read from `off` to `end`.
    fn turn(&self, off: u64, end: u64) -> Turn<'_> {
        let mut queue = self.queue.lock();
        if queue.busy {
            let waiter = Arc::new(Waiter {
                thread: std::thread::current(),
                has_turn: AtomicBool::new(false),
            });
            queue.add(off, Arc::clone(&waiter));
            drop(queue);
            while !waiter.has_turn.load(Ordering::Acquire) {
                std::thread::park();
            }
            queue = self.queue.lock();
        }
        queue.busy = true;
        queue.went += 1;
        queue.head = end;
        Turn(self)
    }
}

impl BlockDevice for Elevator {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let range = range(off, out.len() as u64);
        if self.ahead.take(&range, out) {
            return Ok(());
        }
        let _turn = self.turn(range.start, range.end);
        self.ahead.read(&*self.inner, &mut [(off, out)])
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.ahead
            .change([range(off, src.len() as u64)], || self.inner.write(off, src))
    }

    fn write_durable(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.ahead.change([range(off, src.len() as u64)], || {
            self.inner.write_durable(off, src)
        })
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.inner.flush()
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.ahead.change([range(off, len)], || self.inner.trim(off, len))
    }

    /// In the order of positions, some at a time.
    fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        parts.sort_unstable_by_key(|(off, _)| *off);
        let mut left = parts;
        while let Some((first, _)) = left.first() {
            let first = *first;
            let (mut count, mut bytes, mut end) = (0, 0, first);
            for (off, out) in left.iter().take(TURN_PARTS) {
                if count > 0 && bytes + out.len() > TURN_BYTES {
                    break;
                }
                count += 1;
                bytes += out.len();
                end = off.saturating_add(out.len() as u64);
            }
            let (now, rest) = left.split_at_mut(count);
            let _turn = self.turn(first, end);
            self.ahead.read(&*self.inner, now)?;
            left = rest;
        }
        Ok(())
    }

    fn write_batch(&self, parts: &[(u64, &[u8])]) -> Result<(), MediaError> {
        let ranges = parts.iter().map(|(off, src)| range(*off, src.len() as u64));
        self.ahead.change(ranges, || self.inner.write_batch(parts))
    }

    fn reader_parts(&self) -> Vec<ReaderPart> {
        self.inner.reader_parts()
    }

    fn gone_parts(&self) -> u64 {
        self.inner.gone_parts()
    }

    fn state(&self) -> DeviceState {
        self.inner.state()
    }

    fn name(&self) -> DeviceName {
        self.inner.name()
    }

    fn info(&self) -> DeviceInfo {
        let inner = self.inner.info();
        let backend = format!("{}, reads by position", inner.backend);
        DeviceInfo { backend, ..inner }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Elevator, PASSES_MAX, Queue, Waiter};
    use crate::emulated::{DiskModel, EmulatedDisk};
    use crate::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice};
    use crate::read_ahead::TRACK;
    use crate::sim::SimWorld;
    use crate::traits::BlockDevice;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    fn add(queue: &mut Queue, off: u64) {
        let waiter = Waiter {
            thread: std::thread::current(),
            has_turn: AtomicBool::new(false),
        };
        queue.add(off, Arc::new(waiter));
    }

    /// Takes the next; returns its position.
    fn take(queue: &mut Queue) -> Option<u64> {
        let before: Vec<u64> = queue.waiting.keys().map(|(off, _)| *off).collect();
        queue.next()?;
        queue.went += 1;
        let mut after = queue.waiting.keys().map(|(off, _)| *off);
        let off = before.into_iter().find(|off| after.next() != Some(*off)).unwrap();
        queue.head = off + 1;
        Some(off)
    }

    #[test]
    fn reads_go_upwards_from_the_head_and_then_from_the_lowest() {
        let mut queue = Queue {
            head: 50,
            ..Queue::default()
        };
        for off in [70, 10, 50, 90, 49, 60] {
            add(&mut queue, off);
        }
        let order: Vec<u64> = std::iter::from_fn(|| take(&mut queue)).collect();
        assert_eq!(order, [50, 60, 70, 90, 10, 49]);
        assert!(queue.arrivals.is_empty());
    }

    #[test]
    fn read_is_passed_by_a_bounded_number_of_others() {
        let mut queue = Queue {
            head: 1000,
            ..Queue::default()
        };
        add(&mut queue, 5);
        add(&mut queue, 1000);
        let mut passed = 0;
        loop {
            // Always one more just above.
            match take(&mut queue).unwrap() {
                5 => break,
                off => add(&mut queue, off + 1),
            }
            passed += 1;
        }
        assert_eq!(passed, PASSES_MAX + 2 * 2, "two waited");
    }

    #[test]
    fn readers_get_their_bytes_and_move_the_head_less() {
        const LEN: u64 = 64 << 20;
        const READERS: u64 = 8;
        let model = DiskModel {
            seek_min_ns: 50_000,
            seek_max_ns: 2_000_000,
            read_latency_ns: 0,
            read_mb_s: 20_000,
            ..DiskModel::HDD
        };
        let read_all = |sorted: bool| {
            let world = SimWorld::new();
            let head = Arc::new(EmulatedDisk::new(world.add_block("hdd", LEN), model));
            let disk: Arc<dyn BlockDevice> = match sorted {
                true => Arc::new(Elevator::new(Arc::clone(&head) as _)),
                false => Arc::clone(&head) as _,
            };
            let done = AtomicU64::new(0);
            std::thread::scope(|scope| {
                for reader in 0..READERS {
                    let (disk, done) = (&disk, &done);
                    scope.spawn(move || {
                        for step in 0..20 {
                            let at = (step * 7919 + reader * 104_729) % (LEN / 4096) * 4096;
                            let mut out = [1; 4096];
                            disk.read(at, &mut out).unwrap();
                            assert_eq!(out, [0; 4096]);
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
            });
            assert_eq!(done.into_inner(), READERS * 20);
            // Not by the clock: other programs take time, too.
            head.counts().busy_ns
        };
        let (sorted, unsorted) = (read_all(true), read_all(false));
        assert!(
            sorted < unsorted * 8 / 10,
            "{sorted} ns, {unsorted} without an order"
        );
    }

    /// A device on which a read of one block waits for another thread's, once a batch has begun.
    #[derive(Default)]
    struct Counts {
        batches: crate::lock::Mutex<Vec<(usize, usize)>>,
    }

    impl BlockDevice for Counts {
        fn len_bytes(&self) -> u64 {
            1 << 40
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), crate::MediaError> {
            Ok(())
        }

        fn write(&self, _: u64, _: &[u8]) -> Result<(), crate::MediaError> {
            Ok(())
        }

        fn flush(&self) -> Result<(), crate::MediaError> {
            Ok(())
        }

        fn trim(&self, _: u64, _: u64) -> Result<(), crate::MediaError> {
            Ok(())
        }

        fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), crate::MediaError> {
            let bytes = parts.iter().map(|(_, out)| out.len()).sum();
            self.batches.lock().push((parts.len(), bytes));
            Ok(())
        }

        fn name(&self) -> crate::error::DeviceName {
            "counts".into()
        }

        fn info(&self) -> crate::traits::DeviceInfo {
            panic!("nobody asks")
        }
    }

    #[test]
    fn batch_gives_others_their_turn_and_is_read_whole() {
        let inner = Arc::new(Counts::default());
        let disk = Elevator::new(Arc::clone(&inner) as _);
        let mut bytes = vec![0_u8; 40 * 4096 + (3 << 20)];
        let (small, large) = bytes.split_at_mut(40 * 4096);
        let mut parts: Vec<_> = (0..40)
            .rev()
            .map(|at| at * 2 * TRACK)
            .zip(small.chunks_mut(4096))
            .collect();
        parts.push((1 << 30, large));
        disk.read_batch(&mut parts).unwrap();
        let batches = inner.batches.lock().clone();
        assert_eq!(batches.iter().map(|(count, _)| count).sum::<usize>(), 41);
        let track = TRACK as usize;
        assert_eq!(
            batches.iter().map(|(_, bytes)| bytes).sum::<usize>(),
            40 * track + (3 << 20)
        );
        for (count, bytes) in batches {
            assert!(
                count == 1 || (count <= 16 && bytes <= 16 * track),
                "{count} parts, {bytes} bytes"
            );
        }
        disk.read_batch(&mut []).unwrap();
    }

    /// A disk of 8 MiB whose transfers are counted; `fill` says what each of its blocks holds.
    fn counted(fill: impl Fn(u64) -> u8) -> (Arc<EmulatedDisk>, Elevator) {
        let world = SimWorld::new();
        let inner = world.add_block("hdd", 8 << 20);
        for block in 0..inner.len_bytes() / 4096 {
            inner.write(block * 4096, &[fill(block); 4096]).unwrap();
        }
        let model = DiskModel {
            seek_min_ns: 1,
            seek_max_ns: 1,
            read_latency_ns: 0,
            flush_latency_ns: 0,
            read_mb_s: 20_000,
            write_mb_s: 20_000,
            ..DiskModel::HDD
        };
        let disk = Arc::new(EmulatedDisk::new(inner, model));
        (Arc::clone(&disk), Elevator::new(disk))
    }

    fn read_block(disk: &Elevator, block: u64) -> u8 {
        let mut out = [0xee; 4096];
        disk.read(block * 4096, &mut out).unwrap();
        assert!(out.iter().all(|byte| *byte == out[0]), "block {block} is torn");
        out[0]
    }

    #[test]
    fn neighbours_come_with_a_read_and_each_is_given_out_once() {
        let (inner, disk) = counted(|block| block as u8);
        // To and fro, as two requests of a kernel that reads ahead.
        for block in [10, 14, 12, 11, 13, 63, 9] {
            assert_eq!(read_block(&disk, block), block as u8);
        }
        assert_eq!(inner.counts().reads, 1);
        // One that was given out is read from the disk again.
        assert_eq!(read_block(&disk, 12), 12);
        assert_eq!(inner.counts().reads, 2);
        // Over the border of two tracks: the second is missing.
        let mut out = [0; 3 * 4096];
        disk.read(63 * 4096, &mut out).unwrap();
        assert_eq!([out[0], out[4096], out[2 * 4096]], [63, 64, 65]);
        let counts = inner.counts();
        assert_eq!((counts.reads, counts.read_bytes), (3, 3 * TRACK));
    }

    #[test]
    fn what_is_written_is_read() {
        let (_, disk) = counted(|_| 1);
        assert_eq!(read_block(&disk, 5), 1);
        disk.write(6 * 4096, &[2; 4096]).unwrap();
        assert_eq!(read_block(&disk, 6), 2);
        assert_eq!(read_block(&disk, 7), 1);
        disk.write_batch(&[(8 * 4096, &[3; 4096]), (99 * 4096, &[3; 4096])])
            .unwrap();
        assert_eq!(read_block(&disk, 8), 3);
        assert_eq!(read_block(&disk, 98), 1);
        disk.write_durable(100 * 4096, &[4; 4096]).unwrap();
        assert_eq!(read_block(&disk, 100), 4);
        assert_eq!(read_block(&disk, 101), 1);
        disk.trim(102 * 4096, 4096).unwrap();
        assert_eq!(read_block(&disk, 102), 0);
    }

    #[test]
    fn readers_beside_writers_never_get_what_was_there_before() {
        // A writer counts each of its blocks up; readers get at least what was written before they asked.
        const BLOCKS: u64 = 192;
        let (_, disk) = counted(|_| 0);
        let written: Vec<_> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (disk, written, done) = (&disk, &written, &done);
            for reader in 0..3_u64 {
                scope.spawn(move || {
                    let mut at = reader;
                    while !done.load(Ordering::Relaxed) {
                        at = (at * 69_069 + 1) % (1 << 32);
                        let block = (at >> 16) % BLOCKS;
                        let least = written[block as usize].load(Ordering::Acquire);
                        let mut out = [0; 4096];
                        disk.read(block * 4096, &mut out).unwrap();
                        let found = u64::from_le_bytes(out[..8].try_into().unwrap());
                        assert!(found >= least, "block {block}: {found}, {least} was written");
                    }
                });
            }
            let mut at = 1_u64;
            for _ in 0..20_000 {
                at = at * 75 % 65_537;
                let block = at % BLOCKS;
                let next = written[block as usize].load(Ordering::Relaxed) + 1;
                let mut bytes = [0; 4096];
                bytes[..8].copy_from_slice(&next.to_le_bytes());
                disk.write(block * 4096, &bytes).unwrap();
                written[block as usize].store(next, Ordering::Release);
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn bad_neighbour_harms_nobody() {
        let (inner, _) = counted(|block| block as u8);
        let script = FaultScript::new();
        let bad = 20 * 4096..21 * 4096;
        script.push(FaultRule::always(FaultOp::Read, Fault::Errno(libc::EIO)).within(bad.clone()));
        let disk = Elevator::new(Arc::new(FaultyDevice::new(inner, script.clone())));
        for block in (0..64).filter(|block| *block != 20) {
            assert_eq!(read_block(&disk, block), block as u8);
        }
        // It is met once: a real disk tries for seconds.
        assert_eq!(script.fired(), 1);
        // Until something around it is written.
        disk.write(3 * 4096, &[3; 4096]).unwrap();
        assert_eq!(read_block(&disk, 3), 3);
        assert_eq!(read_block(&disk, 4), 4);
        assert_eq!(script.fired(), 2);
        let mut out = [0; 4096];
        disk.read(bad.start, &mut out).unwrap_err();
        // Beyond the end as before, and at the end.
        disk.read(8 << 20, &mut out).unwrap_err();
        assert_eq!(read_block(&disk, (8 << 20) / 4096 - 1), 0xff);
    }

    #[test]
    fn reads_here_and_there_are_not_widened_for_long() {
        let inner = Arc::new(Counts::default());
        let disk = Elevator::new(Arc::clone(&inner) as _);
        let mut at = 1;
        for _ in 0..4000 {
            at = (at * 69_069 + 1) % (1 << 32);
            disk.read((at >> 4) * 4096, &mut [0; 4096]).unwrap();
        }
        let bytes = inner.batches.lock().iter().map(|(_, bytes)| bytes).sum::<usize>();
        assert!(bytes < 4000 * TRACK as usize / 5, "{bytes}");
        // Nor are they for ever: a stream has its neighbours again.
        let before = inner.batches.lock().len();
        for block in 0..20_000 {
            disk.read((1 << 39) + block * 4096, &mut [0; 4096]).unwrap();
        }
        let reads = inner.batches.lock().len() - before;
        assert!(reads < 1000, "{reads}");
    }

    #[test]
    fn where_many_wait_position_counts_for_more_than_age() {
        let mut queue = Queue::default();
        (0..200).rev().for_each(|off| add(&mut queue, off * 10));
        queue.head = 0;
        let order: Vec<_> = (0..200).map(|_| take(&mut queue).unwrap()).collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(order, sorted);
    }
}
