//! Media slowed down to a model: Strata's NVM (latency and bandwidth), an SSD, an HDD with seeks. Wraps any
//! backend; benchmark results carry its name. Knows time and bytes only.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::lock::Mutex;

use crate::error::MediaError;
use crate::traits::{BlockDevice, DeviceInfo, DeviceState, ReaderPart, Region};

/// Byte-addressable memory slower than DRAM (Strata, SOSP'17, §5: latency added to reads and barriers, writes
/// limited to a bandwidth).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvmModel {
    /// Added to each read, ns.
    pub read_latency_ns: u64,
    /// Added to each fence that follows a write, ns.
    pub barrier_latency_ns: u64,
    /// Reads, MB/s (10^6 bytes); 0: no limit.
    pub read_mb_s: u64,
    /// Writes, MB/s; 0: no limit. Paid at the fence.
    pub write_mb_s: u64,
}

impl NvmModel {
    /// After Strata: some 240 ns a read beyond DRAM, writes limited to 8 GB/s.
    pub const STRATA: Self = Self {
        read_latency_ns: 240,
        barrier_latency_ns: 100,
        read_mb_s: 0,
        write_mb_s: 8_000,
    };
}

/// Formats a bound on bandwidth, for humans.
fn rate(f: &mut fmt::Formatter<'_>, what: &str, mb_s: u64) -> fmt::Result {
    match mb_s {
        0 => write!(f, ", {what} at any rate"),
        mb_s => write!(f, ", {what} {mb_s} MB/s"),
    }
}

impl fmt::Display for NvmModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ns a read, {} ns a barrier",
            self.read_latency_ns, self.barrier_latency_ns
        )?;
        rate(f, "reads", self.read_mb_s)?;
        rate(f, "writes", self.write_mb_s)
    }
}

/// A disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskModel {
    /// Name in results: "ssd", "hdd".
    pub name: &'static str,
    /// Each read, ns.
    pub read_latency_ns: u64,
    /// Each write, ns.
    pub write_latency_ns: u64,
    /// Each flush, ns.
    pub flush_latency_ns: u64,
    /// Reads, MB/s; 0: no limit.
    pub read_mb_s: u64,
    /// Writes, MB/s; 0: no limit.
    pub write_mb_s: u64,
    /// Moving the head to a neighbouring track and half a turn, ns; 0: there is no head.
    pub seek_min_ns: u64,
    /// Moving the head over the whole disk and half a turn, ns.
    pub seek_max_ns: u64,
}

impl fmt::Display for DiskModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |ns: u64| ns as f64 / 1e3;
        write!(
            f,
            "{} µs a read, {} µs a write, {} µs a flush",
            us(self.read_latency_ns),
            us(self.write_latency_ns),
            us(self.flush_latency_ns)
        )?;
        if self.seek_max_ns > 0 {
            let (least, most) = (us(self.seek_min_ns), us(self.seek_max_ns));
            write!(f, ", seeks of {least} to {most} µs")?;
        }
        rate(f, "reads", self.read_mb_s)?;
        rate(f, "writes", self.write_mb_s)
    }
}

impl DiskModel {
    /// A data-centre NVMe drive.
    pub const SSD: Self = Self {
        name: "ssd",
        read_latency_ns: 80_000,
        write_latency_ns: 20_000,
        flush_latency_ns: 100_000,
        read_mb_s: 2_400,
        write_mb_s: 1_200,
        seek_min_ns: 0,
        seek_max_ns: 0,
    };
    /// One that takes no time; it counts.
    pub const NONE: Self = Self {
        name: "none",
        read_latency_ns: 0,
        write_latency_ns: 0,
        flush_latency_ns: 0,
        read_mb_s: 0,
        write_mb_s: 0,
        seek_min_ns: 0,
        seek_max_ns: 0,
    };
    /// A drive of 7,200 revolutions a minute.
    pub const HDD: Self = Self {
        name: "hdd",
        read_latency_ns: 100_000,
        write_latency_ns: 100_000,
        flush_latency_ns: 8_000_000,
        read_mb_s: 200,
        write_mb_s: 200,
        seek_min_ns: 5_000_000,
        seek_max_ns: 16_000_000,
    };

    /// Returns the seek time from `from` to `to` on a disk of `len_bytes`: proportional to the root of the
    /// distance, as arms accelerate.
    pub fn seek_ns(&self, from: u64, to: u64, len_bytes: u64) -> u64 {
        if from == to || self.seek_max_ns == 0 || len_bytes == 0 {
            return 0;
        }
        let distance = from.abs_diff(to) as f64 / len_bytes as f64;
        let span = self.seek_max_ns.saturating_sub(self.seek_min_ns) as f64;
        self.seek_min_ns + (span * distance.min(1.0).sqrt()) as u64
    }
}

/// Returns the time that `len` bytes take at `mb_s`.
fn transfer_ns(len: u64, mb_s: u64) -> u64 {
    (len * 1000).checked_div(mb_s).unwrap_or(0)
}

/// Waits until `deadline`: asleep while it is far, spinning at the end, since sleeping overshoots by some 50
/// µs.
fn wait_until(deadline: Instant) {
    const SPIN: Duration = Duration::from_micros(100);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if left > SPIN {
            std::thread::sleep(left - SPIN);
        } else {
            std::hint::spin_loop();
        }
    }
}

/// A medium that does one thing at a time: a transfer queues behind those under way.
struct Channel {
    origin: Instant,
    /// When it is idle again, ns after `origin`.
    busy_until_ns: AtomicU64,
}

impl Channel {
    fn new() -> Self {
        Self {
            origin: Instant::now(),
            busy_until_ns: AtomicU64::new(0),
        }
    }

    /// Takes the channel for `ns`, after all queued work. Returns the moment of completion.
    fn occupy(&self, ns: u64) -> Instant {
        let now = self.origin.elapsed().as_nanos() as u64;
        let mut until = 0;
        let queue = |busy: u64| {
            until = busy.max(now) + ns;
            Some(until)
        };
        // The closure never refuses, so this always succeeds.
        let _ = self
            .busy_until_ns
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, queue);
        self.origin + Duration::from_nanos(until)
    }
}

/// A region slowed down to a model.
pub struct EmulatedRegion {
    inner: Arc<dyn Region>,
    model: NvmModel,
    reads: Channel,
    writes: Channel,
    /// Bytes written since the last fence.
    unfenced_bytes: AtomicU64,
}

impl EmulatedRegion {
    /// Slows `inner` down.
    pub fn new(inner: Arc<dyn Region>, model: NvmModel) -> Self {
        Self {
            inner,
            model,
            reads: Channel::new(),
            writes: Channel::new(),
            unfenced_bytes: AtomicU64::new(0),
        }
    }

    /// Returns the moment at which a read of `bytes` bytes that begins now is done.
    fn begin_read(&self, bytes: usize) -> Instant {
        let done = self.reads.occupy(transfer_ns(bytes as u64, self.model.read_mb_s));
        done + Duration::from_nanos(self.model.read_latency_ns)
    }

    fn drain(&self) {
        let bytes = self.unfenced_bytes.swap(0, Ordering::Relaxed);
        if bytes > 0 {
            let done = self.writes.occupy(transfer_ns(bytes, self.model.write_mb_s));
            wait_until(done + Duration::from_nanos(self.model.barrier_latency_ns));
        }
    }
}

impl Region for EmulatedRegion {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let deadline = self.begin_read(out.len());
        self.inner.read(off, out)?;
        wait_until(deadline);
        Ok(())
    }

    fn read_shared(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let deadline = self.begin_read(out.len());
        self.inner.read_shared(off, out)?;
        wait_until(deadline);
        Ok(())
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.inner.write(off, src)?;
        self.unfenced_bytes.fetch_add(src.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        let crc = self.inner.write_crc(off, src, seed)?;
        self.unfenced_bytes.fetch_add(src.len() as u64, Ordering::Relaxed);
        Ok(crc)
    }

    fn is_written_by_calls(&self) -> bool {
        self.inner.is_written_by_calls()
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.inner.fence()?;
        self.drain();
        Ok(())
    }

    fn retire(&self) {
        self.inner.retire();
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.inner.sync(off, len)?;
        self.drain();
        Ok(())
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        self.inner.grow(new_len)
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.inner.allocate(off, len)
    }

    fn populate(&self, off: u64, len: u64) {
        self.inner.populate(off, len);
    }

    fn residency(&self, off: u64, pages: &mut [u8]) -> bool {
        self.inner.residency(off, pages)
    }

    fn state(&self) -> DeviceState {
        self.inner.state()
    }

    fn info(&self) -> DeviceInfo {
        let inner = self.inner.info();
        let backend = format!("emulated nvm ({}) over {}", self.model, inner.backend);
        DeviceInfo { backend, ..inner }
    }
}

/// Transfers of an [`EmulatedDisk`]. A seek is a transfer that does not begin where the one before ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskCounts {
    /// Reads.
    pub reads: u64,
    /// Reads that moved the head.
    pub read_seeks: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Writes that moved the head.
    pub write_seeks: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Time in which the head moved, bytes were transferred or a flush was under way, ns.
    pub busy_ns: u64,
}

/// Whether a transfer reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

/// The head of a disk, and what it has done.
#[derive(Debug, Default)]
struct Head {
    /// Its position, in bytes.
    at: u64,
    counts: DiskCounts,
}

/// A block device slowed down to a model; it counts its transfers and seeks.
pub struct EmulatedDisk {
    inner: Arc<dyn BlockDevice>,
    model: DiskModel,
    channel: Channel,
    head: Mutex<Head>,
}

impl EmulatedDisk {
    /// Slows `inner` down.
    pub fn new(inner: Arc<dyn BlockDevice>, model: DiskModel) -> Self {
        Self {
            inner,
            model,
            channel: Channel::new(),
            head: Mutex::default(),
        }
    }

    /// Returns what was transferred since the disk was made.
    pub fn counts(&self) -> DiskCounts {
        self.head.lock().counts
    }

    /// Queues a transfer. The head and the channel are busy for its duration; latency is added and overlaps
    /// with that of others.
    fn begin(&self, off: u64, len: u64, direction: Direction) -> Instant {
        let model = &self.model;
        let mut head = self.head.lock();
        let has_to_seek = u64::from(head.at != off);
        let seek_ns = model.seek_ns(head.at, off, self.inner.len_bytes());
        head.at = off.saturating_add(len);
        let counts = &mut head.counts;
        let (mb_s, latency_ns) = match direction {
            Direction::Read => {
                counts.reads += 1;
                counts.read_seeks += has_to_seek;
                counts.read_bytes += len;
                (model.read_mb_s, model.read_latency_ns)
            }
            Direction::Write => {
                counts.writes += 1;
                counts.write_seeks += has_to_seek;
                counts.written_bytes += len;
                (model.write_mb_s, model.write_latency_ns)
            }
        };
        let busy_ns = seek_ns + transfer_ns(len, mb_s);
        counts.busy_ns += busy_ns;
        self.channel.occupy(busy_ns) + Duration::from_nanos(latency_ns)
    }
}

impl BlockDevice for EmulatedDisk {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let deadline = self.begin(off, out.len() as u64, Direction::Read);
        self.inner.read(off, out)?;
        wait_until(deadline);
        Ok(())
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        let deadline = self.begin(off, src.len() as u64, Direction::Write);
        self.inner.write(off, src)?;
        wait_until(deadline);
        Ok(())
    }

    // Parts of a batch are under way together: their transfers queue, their latencies overlap.

    fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        let begin = |part: &(u64, &mut [u8])| self.begin(part.0, part.1.len() as u64, Direction::Read);
        let deadline = parts.iter().map(begin).max();
        self.inner.read_batch(parts)?;
        deadline.into_iter().for_each(wait_until);
        Ok(())
    }

    fn write_batch(&self, parts: &[(u64, &[u8])]) -> Result<(), MediaError> {
        let begin = |part: &(u64, &[u8])| self.begin(part.0, part.1.len() as u64, Direction::Write);
        let deadline = parts.iter().map(begin).max();
        self.inner.write_batch(parts)?;
        deadline.into_iter().for_each(wait_until);
        Ok(())
    }

    fn flush(&self) -> Result<(), MediaError> {
        {
            let counts = &mut self.head.lock().counts;
            counts.flushes += 1;
            counts.busy_ns += self.model.flush_latency_ns;
        }
        let deadline = self.channel.occupy(self.model.flush_latency_ns);
        self.inner.flush()?;
        wait_until(deadline);
        Ok(())
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.inner.trim(off, len)
    }

    /// Of an SSD: each process then has a model of its own, so that their transfers do not queue.
    fn reader_parts(&self) -> Vec<ReaderPart> {
        if self.model != DiskModel::SSD {
            return Vec::new();
        }
        let mut parts = self.inner.reader_parts();
        parts.iter_mut().for_each(|part| part.emulated = true);
        parts
    }

    fn wants_order(&self) -> bool {
        self.model.seek_max_ns > 0 || self.inner.wants_order()
    }

    fn state(&self) -> DeviceState {
        self.inner.state()
    }

    fn info(&self) -> DeviceInfo {
        let inner = self.inner.info();
        let backend = format!(
            "emulated {} ({}) over {}",
            self.model.name, self.model, inner.backend
        );
        DeviceInfo { backend, ..inner }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::{Duration, Instant};

    use super::{Channel, DiskModel, EmulatedDisk, EmulatedRegion, NvmModel, transfer_ns};
    use crate::sim::{SimMedium, SimWorld};
    use crate::{BlockDevice, Region};

    #[test]
    fn seek_grows_with_distance_and_is_nothing_when_the_head_is_there() {
        let hdd = DiskModel::HDD;
        assert_eq!(hdd.seek_ns(77, 77, 1000), 0);
        assert!(hdd.seek_ns(0, 10, 1000) < hdd.seek_ns(0, 500, 1000));
        assert_eq!(hdd.seek_ns(0, 1000, 1000), hdd.seek_max_ns);
        assert_eq!(hdd.seek_ns(900, 0, 1000), hdd.seek_ns(0, 900, 1000));
        assert_eq!(DiskModel::SSD.seek_ns(0, 900, 1000), 0);
    }

    #[test]
    fn transfer_takes_a_thousand_ns_a_kilobyte_when_the_rate_is_a_gigabyte() {
        assert_eq!(transfer_ns(1000, 1000), 1000);
        assert_eq!(transfer_ns(1000, 0), 0);
    }

    #[test]
    fn channel_queues_work_behind_what_is_under_way() {
        let channel = Channel::new();
        let first = channel.occupy(1_000_000_000);
        let second = channel.occupy(1_000_000_000);
        assert_eq!(second - first, Duration::from_secs(1));
    }

    #[test]
    fn emulated_disk_takes_at_least_its_time_and_keeps_the_bytes() {
        let disk = SimWorld::new().add_block("disk", 1 << 20);
        let model = DiskModel {
            write_mb_s: 10,
            seek_max_ns: 0,
            ..DiskModel::HDD
        };
        let disk = EmulatedDisk::new(disk, model);
        let begin = Instant::now();
        disk.write(0, &[3; 40_960]).unwrap();
        assert!(begin.elapsed() >= Duration::from_nanos(4_096_000 + model.write_latency_ns));
        let mut back = [0; 8];
        disk.read(40_000, &mut back).unwrap();
        assert_eq!(back, [3; 8]);
        assert!(disk.info().backend.starts_with("emulated hdd (100 µs a read, "));
    }

    #[test]
    fn emulated_disk_counts_a_seek_where_a_transfer_does_not_follow_the_one_before() {
        let disk = SimWorld::new().add_block("disk", 1 << 20);
        let model = DiskModel {
            flush_latency_ns: 1000,
            seek_min_ns: 2000,
            seek_max_ns: 2000,
            ..DiskModel::HDD
        };
        let disk = EmulatedDisk::new(disk, model);
        disk.write(0, &[1; 8192]).unwrap();
        disk.write(8192, &[2; 4096]).unwrap();
        disk.read(0, &mut [0; 4096]).unwrap();
        let [first, second] = &mut [[0; 4096]; 2];
        disk.read_batch(&mut [(4096, first), (65_536, second)]).unwrap();
        disk.flush().unwrap();
        let counts = disk.counts();
        assert_eq!(
            (counts.writes, counts.write_seeks, counts.written_bytes),
            (2, 0, 12_288)
        );
        assert_eq!(
            (counts.reads, counts.read_seeks, counts.read_bytes),
            (3, 2, 12_288)
        );
        assert_eq!(
            (counts.flushes, counts.busy_ns),
            (1, 1000 + 2 * 2000 + 24_576 * 5)
        );
    }

    #[test]
    fn emulated_disk_overlaps_the_latencies_of_a_batch_and_not_its_transfers() {
        let disk = SimWorld::new().add_block("disk", 1 << 20);
        let model = DiskModel {
            write_latency_ns: 20_000_000,
            write_mb_s: 10,
            ..DiskModel::SSD
        };
        let disk = EmulatedDisk::new(disk, model);
        let parts: Vec<(u64, &[u8])> = (0..20).map(|n| (n * 8192, &[7; 4096][..])).collect();
        let begin = Instant::now();
        disk.write_batch(&parts).unwrap();
        let took = begin.elapsed();
        assert!(took >= Duration::from_nanos(20 * 409_600 + model.write_latency_ns));
        assert!(
            took < Duration::from_nanos(20 * model.write_latency_ns),
            "one after the other: {took:?}"
        );
        let mut back = [[0; 4096]; 2];
        let [first, second] = &mut back;
        disk.read_batch(&mut [(8192, first), (4096, second)]).unwrap();
        assert_eq!(back, [[7; 4096], [0; 4096]]);
    }

    #[test]
    fn emulated_nvm_pays_for_writes_at_the_fence() {
        let nvm = SimWorld::new().add_region("nvm", SimMedium::Dax, 1 << 20, 1 << 20);
        let model = NvmModel {
            read_latency_ns: 0,
            barrier_latency_ns: 1000,
            read_mb_s: 0,
            write_mb_s: 100,
        };
        let nvm = EmulatedRegion::new(nvm, model);
        let begin = Instant::now();
        let crc = nvm.write_crc(0, &[1; 100_000], 5).unwrap();
        nvm.fence().unwrap();
        assert!(begin.elapsed() >= Duration::from_nanos(1_001_000));
        assert_eq!(crc, crc32c::crc32c_append(5, &[1; 100_000]));
        assert!(nvm.as_ptr().is_none(), "a pointer would go round the model");
    }
}
