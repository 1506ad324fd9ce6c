//! Transfers in the order in which an arm passes them. A device whose random reads take milliseconds has an
//! arm, and the time of a move grows with its length, so what waits for it is served in one sweep from the
//! lowest offset to the highest, again and again (C-LOOK). Lookups and waiting writes share the sweep: nobody
//! waits for more than one, and a block that is written on the way costs the shortest move there is.
//!
//! A device that answers quickly is left alone: its transfers go on side by side. Which of the two it is
//! follows from the times of its reads, and may change.

use super::{Device, DeviceError};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Mean time of a read, less the time that it waited for others, from which on the device has an arm; ns.
const ARM_FROM_NS: u64 = 2_000_000;
/// Mean time of a read below which it has none; ns.
const ARM_BELOW_NS: u64 = 1_000_000;
/// The most that one read adds to the mean, ns: a pause of the machine is no slow device.
const SAMPLE_MAX_NS: u64 = 20_000_000;
/// A read counts for this part of the mean.
const WEIGHT: u64 = 8;
/// Longer reads say more about the rate than about the arm, bytes.
const SAMPLE_BYTES_MAX: usize = 128 << 10;

/// Wraps a device and orders its transfers while it has an arm.
pub struct OrderedDevice {
    inner: Arc<dyn Device>,
    queue: Mutex<Queue>,
}

/// A place in the queue: the offset, and a number that makes it distinct.
type Place = (u64, u64);

#[derive(Default)]
struct Queue {
    has_arm: bool,
    /// Mean time of a read, ns.
    read_ns: u64,
    /// Transfers that go on side by side.
    beside: u64,
    /// Whether a transfer has its turn.
    is_busy: bool,
    /// Where the arm is, bytes.
    arm: u64,
    waiting: BTreeMap<Place, Arc<Waiter>>,
    count: u64,
}

/// A call that waits for its turn.
#[derive(Default)]
struct Waiter {
    /// The place whose turn it is; guarded by the queue's lock.
    turns: Mutex<Vec<Place>>,
    called: Condvar,
}

impl Queue {
    /// Whether a transfer has to wait for its turn.
    fn has_turns(&self) -> bool {
        self.has_arm || self.is_busy
    }

    fn enter(&mut self, off: u64, waiter: &Arc<Waiter>) -> Place {
        self.count += 1;
        let place = (off, self.count);
        self.waiting.insert(place, Arc::clone(waiter));
        place
    }

    /// Gives the turn to what the arm meets next; to all that waits, if there is no arm any more.
    fn call_next(&mut self) {
        while !self.is_busy || !self.has_arm {
            let ahead = self.waiting.range((self.arm, 0)..).next();
            let Some((&place, _)) = ahead.or_else(|| self.waiting.first_key_value()) else {
                return;
            };
            let Some(waiter) = self.waiting.remove(&place) else {
                return;
            };
            self.is_busy = true;
            waiter.turns.lock().push(place);
            waiter.called.notify_one();
        }
    }

    /// Takes in how long a read took, of `beside` that were under way.
    fn learn(&mut self, took_ns: u64, beside: u64) {
        let sample = (took_ns / beside.max(1)).min(SAMPLE_MAX_NS);
        self.read_ns = self.read_ns - self.read_ns / WEIGHT + sample / WEIGHT;
        self.has_arm = match self.has_arm {
            true => self.read_ns >= ARM_BELOW_NS,
            false => self.read_ns >= ARM_FROM_NS,
        };
    }
}

/// What is transferred.
struct Transfer {
    off: u64,
    len: usize,
    is_read: bool,
}

impl OrderedDevice {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Self {
            inner,
            queue: Mutex::default(),
        }
    }

    /// Whether the device has an arm, by the times of its reads.
    pub fn has_arm(&self) -> bool {
        self.queue.lock().has_arm
    }

    /// Waits until it is the turn of one of a waiter's places.
    fn wait(queue: &mut MutexGuard<'_, Queue>, waiter: &Waiter) -> Place {
        loop {
            if let Some(place) = waiter.turns.lock().pop() {
                return place;
            }
            waiter.called.wait(queue);
        }
    }

    /// Runs a transfer that has its turn, and gives the turn on.
    fn with_turn<T>(&self, transfer: &Transfer, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = work();
        let mut queue = self.queue.lock();
        if transfer.is_read && transfer.len <= SAMPLE_BYTES_MAX {
            queue.learn(began.elapsed().as_nanos() as u64, 1);
        }
        queue.is_busy = false;
        queue.arm = transfer.off + transfer.len as u64;
        queue.call_next();
        done
    }

    fn transfer<T>(&self, transfer: &Transfer, work: impl FnOnce() -> T) -> T {
        let mut queue = self.queue.lock();
        if queue.has_turns() {
            let waiter = Arc::new(Waiter::default());
            queue.enter(transfer.off, &waiter);
            queue.call_next();
            Self::wait(&mut queue, &waiter);
            drop(queue);
            return self.with_turn(transfer, work);
        }
        queue.beside += 1;
        let beside = queue.beside;
        drop(queue);
        let began = Instant::now();
        let done = work();
        let took_ns = began.elapsed().as_nanos() as u64;
        let mut queue = self.queue.lock();
        queue.beside -= 1;
        if transfer.is_read && transfer.len <= SAMPLE_BYTES_MAX {
            queue.learn(took_ns, beside);
        }
        done
    }
}

impl Device for OrderedDevice {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, off: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let transfer = Transfer {
            off,
            len: out.len(),
            is_read: true,
        };
        self.transfer(&transfer, || self.inner.read_at(off, out))
    }

    fn write_at(&self, off: u64, data: &[u8]) -> Result<(), DeviceError> {
        let transfer = Transfer {
            off,
            len: data.len(),
            is_read: false,
        };
        self.transfer(&transfer, || self.inner.write_at(off, data))
    }

    fn write_scattered(&self, pieces: &[(u64, &[u8])]) -> Result<(), DeviceError> {
        let mut queue = self.queue.lock();
        if !queue.has_turns() {
            drop(queue);
            return pieces
                .iter()
                .try_for_each(|(off, data)| self.write_at(*off, data));
        }
        let waiter = Arc::new(Waiter::default());
        let places: BTreeMap<Place, &[u8]> = pieces
            .iter()
            .map(|(off, data)| (queue.enter(*off, &waiter), *data))
            .collect();
        queue.call_next();
        drop(queue);
        let mut result = Ok(());
        for _ in 0..places.len() {
            let place = Self::wait(&mut self.queue.lock(), &waiter);
            let transfer = Transfer {
                off: place.0,
                len: places[&place].len(),
                is_read: false,
            };
            self.with_turn(&transfer, || {
                // After a failure the rest only takes its turns.
                if result.is_ok() {
                    result = self.inner.write_at(place.0, places[&place]);
                }
            });
        }
        result
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.inner.flush()
    }

    fn moves_writes(&self) -> bool {
        self.inner.moves_writes()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::OrderedDevice;
    use crate::device::{Access, CountingDevice, Device, HookedDevice, MemoryDevice};
    use parking_lot::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Barrier};
    use std::time::Duration;

    const LEN: u64 = 4 << 20;
    const BLOCK: u64 = 4096;

    /// An arm: one transfer at a time, each of which takes a while. Notes the offsets.
    struct Arm {
        pause_us: AtomicU64,
        order: Mutex<Vec<u64>>,
        at_it: Mutex<()>,
    }

    impl Arm {
        fn new(pause_us: u64) -> Arc<Self> {
            Arc::new(Self {
                pause_us: AtomicU64::new(pause_us),
                order: Mutex::default(),
                at_it: Mutex::default(),
            })
        }

        /// A device with this arm.
        fn device(self: &Arc<Self>) -> Arc<dyn Device> {
            let arm = Arc::clone(self);
            Arc::new(HookedDevice::new(
                Arc::new(MemoryDevice::new(LEN)),
                move |access| {
                    let (Access::Read(off) | Access::Write(off)) = access;
                    let _at_it = arm.at_it.lock();
                    arm.order.lock().push(off / BLOCK);
                    std::thread::sleep(Duration::from_micros(arm.pause_us.load(Ordering::SeqCst)));
                },
            ))
        }
    }

    fn read(device: &OrderedDevice, block: u64) -> Vec<u8> {
        let mut out = vec![0; BLOCK as usize];
        device.read_at(block * BLOCK, &mut out).unwrap();
        out
    }

    /// Waits until so many transfers wait for their turn.
    fn until_waiting(device: &OrderedDevice, count: usize) {
        while device.queue.lock().waiting.len() < count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn slow_device_meets_reads_and_waiting_writes_in_one_sweep() {
        let arm = Arm::new(4000);
        let device = OrderedDevice::new(arm.device());
        for block in 0..10 {
            read(&device, block);
        }
        assert!(device.has_arm());
        arm.order.lock().clear();
        // Everybody comes while the arm is at block 500.
        arm.pause_us.store(300_000, Ordering::SeqCst);
        let data = [7; BLOCK as usize];
        let blocks = [700u64, 20, 900, 510, 10, 650];
        let writes: Vec<(u64, &[u8])> = [600u64, 601, 30]
            .iter()
            .map(|block| (block * BLOCK, &data[..]))
            .collect();
        std::thread::scope(|scope| {
            scope.spawn(|| read(&device, 500));
            while arm.order.lock().is_empty() {
                std::thread::yield_now();
            }
            for block in blocks {
                let device = &device;
                scope.spawn(move || read(device, block));
            }
            scope.spawn(|| device.write_scattered(&writes).unwrap());
            until_waiting(&device, blocks.len() + writes.len());
            arm.pause_us.store(4000, Ordering::SeqCst);
        });
        let order = arm.order.lock().clone();
        assert_eq!(order, [500, 510, 600, 601, 650, 700, 900, 10, 20, 30]);
        for block in [600, 601, 30] {
            assert_eq!(read(&device, block), data);
        }
    }

    #[test]
    fn quick_device_serves_side_by_side_and_a_slow_one_may_become_quick() {
        let arm = Arm::new(4000);
        let device = OrderedDevice::new(arm.device());
        for block in 0..10 {
            read(&device, block);
        }
        assert!(device.has_arm());
        arm.pause_us.store(0, Ordering::SeqCst);
        for block in 0..100 {
            read(&device, block);
        }
        assert!(!device.has_arm());

        // Reads go on only when two have come.
        let both = Barrier::new(2);
        let pairs = HookedDevice::new(Arc::new(MemoryDevice::new(LEN)), move |_| {
            both.wait();
        });
        let pairs = OrderedDevice::new(Arc::new(pairs));
        std::thread::scope(|scope| {
            scope.spawn(|| read(&pairs, 1));
            scope.spawn(|| read(&pairs, 2));
        });
    }

    #[test]
    fn failed_write_of_several_is_told_and_the_others_get_their_turns() {
        let arm = Arm::new(4000);
        let counting = Arc::new(CountingDevice::new(arm.device()));
        let device = OrderedDevice::new(Arc::clone(&counting) as Arc<dyn Device>);
        for block in 0..10 {
            read(&device, block);
        }
        assert!(device.has_arm());
        counting.fail_writes(true);
        let data = [7; BLOCK as usize];
        let writes = [(BLOCK, &data[..]), (9 * BLOCK, &data[..])];
        assert!(device.write_scattered(&writes).is_err());
        counting.fail_writes(false);
        device.write_scattered(&writes).unwrap();
        assert_eq!(read(&device, 9), data);
    }
}
