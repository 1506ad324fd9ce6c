//! Reads of a disk with a head in the order of their positions: of those that wait, the next one upwards of
//! the head goes first, and after the topmost the lowest (C-LOOK; Worthington, Ganger and Patt 1994, §2.1).
//! For disks below which nobody sorts: a scheduler of the kernel does the same. Knows positions only; writes
//! pass.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;

use crate::lock::Mutex;

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
        let _turn = self.turn(off, off.saturating_add(out.len() as u64));
        self.inner.read(off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.inner.write(off, src)
    }

    fn write_durable(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.inner.write_durable(off, src)
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.inner.flush()
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.inner.trim(off, len)
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
            self.inner.read_batch(now)?;
            left = rest;
        }
        Ok(())
    }

    fn write_batch(&self, parts: &[(u64, &[u8])]) -> Result<(), MediaError> {
        self.inner.write_batch(parts)
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
    use crate::sim::SimWorld;
    use crate::traits::BlockDevice;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::Instant;

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
            ..DiskModel::HDD
        };
        let read_all = |sorted: bool| {
            let world = SimWorld::new();
            let disk: Arc<dyn BlockDevice> = Arc::new(EmulatedDisk::new(world.add_block("hdd", LEN), model));
            let disk = match sorted {
                true => Arc::new(Elevator::new(disk)),
                false => disk,
            };
            let begun = Instant::now();
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
            begun.elapsed()
        };
        let (sorted, unsorted) = (read_all(true), read_all(false));
        assert!(
            sorted < unsorted * 8 / 10,
            "{sorted:?}, {unsorted:?} without an order"
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
        let mut bytes = vec![0_u8; 100 * 4096 + (3 << 20)];
        let (small, large) = bytes.split_at_mut(100 * 4096);
        let mut parts: Vec<_> = (0..100)
            .rev()
            .map(|at| at * 8192)
            .zip(small.chunks_mut(4096))
            .collect();
        parts.push((1 << 30, large));
        disk.read_batch(&mut parts).unwrap();
        let batches = inner.batches.lock().clone();
        assert_eq!(batches.iter().map(|(count, _)| count).sum::<usize>(), 101);
        assert_eq!(
            batches.iter().map(|(_, bytes)| bytes).sum::<usize>(),
            100 * 4096 + (3 << 20)
        );
        for (count, bytes) in batches {
            assert!(
                count == 1 || (count <= 16 && bytes <= 1 << 20),
                "{count} parts, {bytes} bytes"
            );
        }
        disk.read_batch(&mut []).unwrap();
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
