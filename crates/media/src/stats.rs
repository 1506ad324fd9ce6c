//! Faults of a medium since it was opened: errors, want of space, slow transfers, and damage that others
//! found on it. Counts them and keeps the last of each; decides nothing. Wrappers count the transfers that
//! pass through them, and tell an observer when each begins and ends.

use crate::lock::Mutex;
use rustix::time::{ClockId, clock_gettime};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::MediaError;
use crate::traits::{BlockDevice, DeviceInfo, DeviceState, Region};

/// Least duration of a slow transfer, unless [`MediaStats::set_slow`] says otherwise.
pub const SLOW: Duration = Duration::from_secs(1);
/// Equal damage found again within this time counts once: repeated reads do not multiply it.
const SAME: Duration = Duration::from_secs(1);

/// Kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediaFaultKind {
    /// A read failed.
    Read,
    /// A write, a flush or a sync failed.
    Write,
    /// The bytes read are not the bytes written.
    Checksum,
    /// The host had no space.
    NoSpace,
    /// A transfer took long.
    Slow,
}

/// One fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaFault {
    /// Kind.
    pub kind: MediaFaultKind,
    /// Description for a person.
    pub text: String,
    /// Place on the medium, such as `bytes 4096..+4096`; empty: all of it, or not known.
    pub place: String,
    /// Time, in nanoseconds since 1970.
    pub time_ns: i64,
}

/// Counts since the medium was opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes, flushes and syncs that failed. Refusals of a device that has failed before are not counted.
    pub write_errors: u64,
    /// Damaged reads.
    pub checksum_errors: u64,
    /// Writes that found no space on the host.
    pub no_space: u64,
    /// Transfers that took [`SLOW`] or longer.
    pub slow: u64,
    /// The longest transfer. The clock has steps of some milliseconds.
    pub longest: Duration,
    /// The last error of any kind but `Slow`.
    pub last: Option<MediaFault>,
    /// The last slow transfer.
    pub last_slow: Option<MediaFault>,
}

impl Tally {
    /// Whether no fault and no slow transfer was counted.
    #[must_use]
    pub const fn is_quiet(&self) -> bool {
        self.last.is_none() && self.last_slow.is_none()
    }
}

/// Least length of a transfer of a region that is shown to an observer, in bytes.
const SHOWN_BYTES: usize = 4096;
/// Of a region's transfers of that length one in so many is shown: copying a block takes not much longer than
/// reading the time.
pub const SHOWN_OF: u32 = 64;

/// Reads or writes of a medium that one call has begun together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// It reads; otherwise it writes.
    pub reading: bool,
    /// Ranges.
    pub parts: u32,
    /// Their bytes.
    pub bytes: u64,
}

/// Learns of transfers: all those of a block device, and one in [`SHOWN_OF`] of a region. Called by the
/// threads that transfer, so it must be quick.
pub trait Observer: Send + Sync {
    /// A transfer begins. Returns the time.
    fn begins(&self) -> u64;

    /// A transfer has ended that began at `begun`.
    fn ends(&self, begun: u64, transfer: Transfer, failed: bool);
}

/// Counters of one medium. Share it in an `Arc`.
pub struct MediaStats {
    observer: OnceLock<Arc<dyn Observer>>,
    /// Transfers of a region that could have been shown.
    regular: AtomicU64,
    /// [`Tally::longest`], in milliseconds. A transfer that is neither longer nor slow takes no lock.
    longest_ms: AtomicU64,
    slow_ms: AtomicU64,
    tally: Mutex<Tally>,
}

impl Default for MediaStats {
    fn default() -> Self {
        Self {
            observer: OnceLock::new(),
            regular: AtomicU64::new(0),
            longest_ms: AtomicU64::new(0),
            slow_ms: AtomicU64::new(SLOW.as_millis() as u64),
            tally: Mutex::default(),
        }
    }
}

impl fmt::Debug for MediaStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MediaStats")
            .field("longest_ms", &self.longest_ms)
            .field("tally", &self.tally)
            .finish_non_exhaustive()
    }
}

/// A clock that costs some nanoseconds and has steps of some milliseconds, which is enough to find slow
/// transfers.
fn coarse_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// The wall clock, in nanoseconds since 1970.
#[must_use]
pub fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// Returns the place of an error.
fn place_of(error: &MediaError) -> String {
    match error {
        MediaError::Io { off, len, .. } | MediaError::NoSpace { off, len, .. } if *len > 0 => {
            format!("bytes {off}..+{len}")
        }
        _ => String::new(),
    }
}

impl MediaStats {
    /// Sets the duration from which a transfer counts as slow.
    pub fn set_slow(&self, from: Duration) {
        self.slow_ms.store(from.as_millis() as u64, Ordering::Relaxed);
    }

    /// Shows transfers to an observer from this call on. Only the first call counts.
    pub fn set_observer(&self, observer: Arc<dyn Observer>) {
        let _ = self.observer.set(observer);
    }

    /// Runs a transfer, and shows it to the observer.
    #[inline]
    fn shown<T>(
        &self,
        transfer: Transfer,
        run: impl FnOnce() -> Result<T, MediaError>,
    ) -> Result<T, MediaError> {
        let Some(observer) = self.observer.get() else {
            return run();
        };
        let begun = observer.begins();
        let result = run();
        observer.ends(begun, transfer, result.is_err());
        result
    }

    /// As [`shown`](Self::shown), for some of the transfers only.
    #[inline]
    fn shown_rarely<T>(
        &self,
        reading: bool,
        bytes: usize,
        run: impl FnOnce() -> Result<T, MediaError>,
    ) -> Result<T, MediaError> {
        let is_rare = || {
            let before = self.regular.fetch_add(1, Ordering::Relaxed);
            before.is_multiple_of(SHOWN_OF.into())
        };
        if bytes < SHOWN_BYTES || self.observer.get().is_none() || !is_rare() {
            return run();
        }
        let transfer = Transfer {
            reading,
            parts: 1,
            bytes: bytes as u64,
        };
        self.shown(transfer, run)
    }

    /// Returns the current counts.
    #[must_use]
    pub fn tally(&self) -> Tally {
        self.tally.lock().clone()
    }

    /// Counts a fault that is not a transfer of this process: damage that was found, or a client's fault.
    pub fn note(&self, kind: MediaFaultKind, place: String, text: String) {
        let time_ns = now_ns();
        let mut tally = self.tally.lock();
        let same = kind == MediaFaultKind::Checksum
            && tally.last.as_ref().is_some_and(|last| {
                let age_ns = time_ns.saturating_sub(last.time_ns);
                last.text == text && age_ns >= 0 && (age_ns as u128) < SAME.as_nanos()
            });
        if same {
            return;
        }
        match kind {
            MediaFaultKind::Read => tally.read_errors += 1,
            MediaFaultKind::Write => tally.write_errors += 1,
            MediaFaultKind::Checksum => tally.checksum_errors += 1,
            MediaFaultKind::NoSpace => tally.no_space += 1,
            MediaFaultKind::Slow => tally.slow += 1,
        }
        let fault = Some(MediaFault {
            kind,
            text,
            place,
            time_ns,
        });
        if kind == MediaFaultKind::Slow {
            tally.last_slow = fault;
        } else {
            tally.last = fault;
        }
    }

    /// Counts an error of this medium from a transfer that was reading (or writing). The caller's own
    /// mistakes are not the medium's fault.
    pub fn note_error(&self, error: &MediaError, reading: bool) {
        let kind = match error {
            MediaError::NoSpace { .. } => MediaFaultKind::NoSpace,
            MediaError::Io { .. }
            | MediaError::Setup { .. }
            | MediaError::Unfit { .. }
            | MediaError::Refused { .. } => match reading {
                true => MediaFaultKind::Read,
                false => MediaFaultKind::Write,
            },
            // The original failure was counted.
            MediaError::Failed { .. } => return,
            MediaError::OutOfRange { .. }
            | MediaError::Misaligned { .. }
            | MediaError::ReadOnly { .. }
            | MediaError::TooLong { .. } => return,
        };
        self.note(kind, place_of(error), error.to_string());
    }

    /// Runs a transfer, and counts its failure or slowness.
    #[inline]
    fn over<T>(
        &self,
        reading: bool,
        what: &'static str,
        (off, len): (u64, u64),
        transfer: impl FnOnce() -> Result<T, MediaError>,
    ) -> Result<T, MediaError> {
        let begun_ms = coarse_ms();
        let result = transfer();
        let took_ms = coarse_ms().saturating_sub(begun_ms);
        if took_ms > self.longest_ms.load(Ordering::Relaxed)
            || took_ms >= self.slow_ms.load(Ordering::Relaxed)
        {
            let place = match len {
                0 => String::new(),
                len => format!("bytes {off}..+{len}"),
            };
            self.note_time(what, place, Duration::from_millis(took_ms));
        }
        if let Err(error) = &result {
            self.note_error(error, reading);
        }
        result
    }

    /// Notes the duration of a transfer at `place`.
    #[cold]
    pub fn note_time(&self, what: &str, place: String, took: Duration) {
        let took_ms = took.as_millis() as u64;
        self.longest_ms.fetch_max(took_ms, Ordering::Relaxed);
        {
            let mut tally = self.tally.lock();
            tally.longest = tally.longest.max(took);
        }
        if took_ms >= self.slow_ms.load(Ordering::Relaxed) {
            self.note(MediaFaultKind::Slow, place, format!("{what} took {took_ms} ms"));
        }
    }
}

/// A region whose transfers are counted.
pub struct CountingRegion {
    inner: Arc<dyn Region>,
    stats: Arc<MediaStats>,
}

impl CountingRegion {
    /// Wraps `inner`, counted in `stats`.
    #[must_use]
    pub fn new(inner: Arc<dyn Region>, stats: Arc<MediaStats>) -> Self {
        Self { inner, stats }
    }
}

impl Region for CountingRegion {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let place = (off, out.len() as u64);
        self.stats.over(true, "read", place, || {
            self.stats
                .shown_rarely(true, out.len(), || self.inner.read(off, out))
        })
    }

    fn read_shared(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let place = (off, out.len() as u64);
        self.stats.over(true, "read", place, || {
            self.stats
                .shown_rarely(true, out.len(), || self.inner.read_shared(off, out))
        })
    }

    fn is_mapped(&self) -> bool {
        self.inner.is_mapped()
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        let place = (off, src.len() as u64);
        self.stats.over(false, "write", place, || {
            self.stats
                .shown_rarely(false, src.len(), || self.inner.write(off, src))
        })
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        let place = (off, src.len() as u64);
        self.stats.over(false, "write", place, || {
            self.stats
                .shown_rarely(false, src.len(), || self.inner.write_crc(off, src, seed))
        })
    }

    fn is_written_by_calls(&self) -> bool {
        self.inner.is_written_by_calls()
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.stats.over(false, "fence", (0, 0), || self.inner.fence())
    }

    fn retire(&self) {
        self.inner.retire();
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.stats
            .over(false, "sync", (off, len), || self.inner.sync(off, len))
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        self.stats
            .over(false, "grow", (0, 0), || self.inner.grow(new_len))
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.stats
            .over(false, "allocate", (off, len), || self.inner.allocate(off, len))
    }

    fn populate(&self, off: u64, len: u64) {
        self.inner.populate(off, len);
    }

    fn residency(&self, off: u64, pages: &mut [u8]) -> bool {
        self.inner.residency(off, pages)
    }

    fn as_ptr(&self) -> Option<NonNull<u8>> {
        self.inner.as_ptr()
    }

    fn state(&self) -> DeviceState {
        self.inner.state()
    }

    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
}

/// A block device whose transfers are counted.
pub struct CountingDevice {
    inner: Arc<dyn BlockDevice>,
    stats: Arc<MediaStats>,
}

impl CountingDevice {
    /// Wraps `inner`, counted in `stats`.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockDevice>, stats: Arc<MediaStats>) -> Self {
        Self { inner, stats }
    }
}

impl BlockDevice for CountingDevice {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let place = (off, out.len() as u64);
        let transfer = Transfer {
            reading: true,
            parts: 1,
            bytes: place.1,
        };
        self.stats.over(true, "read", place, || {
            self.stats.shown(transfer, || self.inner.read(off, out))
        })
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        let place = (off, src.len() as u64);
        let transfer = Transfer {
            reading: false,
            parts: 1,
            bytes: place.1,
        };
        self.stats.over(false, "write", place, || {
            self.stats.shown(transfer, || self.inner.write(off, src))
        })
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.stats.over(false, "flush", (0, 0), || self.inner.flush())
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.stats
            .over(false, "trim", (off, len), || self.inner.trim(off, len))
    }

    fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        let place = parts
            .first()
            .map_or((0, 0), |(off, out)| (*off, out.len() as u64));
        let transfer = Transfer {
            reading: true,
            parts: parts.len() as u32,
            bytes: parts.iter().map(|(_, out)| out.len() as u64).sum(),
        };
        self.stats.over(true, "read", place, || {
            self.stats.shown(transfer, || self.inner.read_batch(parts))
        })
    }

    fn write_batch(&self, parts: &[(u64, &[u8])]) -> Result<(), MediaError> {
        let place = parts
            .first()
            .map_or((0, 0), |(off, src)| (*off, src.len() as u64));
        let transfer = Transfer {
            reading: false,
            parts: parts.len() as u32,
            bytes: parts.iter().map(|(_, src)| src.len() as u64).sum(),
        };
        self.stats.over(false, "write", place, || {
            self.stats.shown(transfer, || self.inner.write_batch(parts))
        })
    }

    // Transfers of other processes are not counted.
    fn reader_parts(&self) -> Vec<crate::traits::ReaderPart> {
        self.inner.reader_parts()
    }

    fn gone_parts(&self) -> u64 {
        self.inner.gone_parts()
    }

    fn state(&self) -> DeviceState {
        self.inner.state()
    }

    fn name(&self) -> crate::DeviceName {
        self.inner.name()
    }

    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{CountingDevice, CountingRegion, MediaFaultKind, MediaStats};
    use crate::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice, FaultyRegion};
    use crate::sim::{SimMedium, SimWorld};
    use crate::{BlockDevice, Region};
    use std::sync::Arc;
    use std::time::Duration;

    fn disk() -> (CountingDevice, FaultScript, Arc<MediaStats>) {
        let (script, stats) = (FaultScript::new(), Arc::new(MediaStats::default()));
        let disk = SimWorld::new().add_block("disk", 1 << 20);
        let faulty = Arc::new(FaultyDevice::new(disk, script.clone()));
        (CountingDevice::new(faulty, Arc::clone(&stats)), script, stats)
    }

    #[test]
    fn errors_are_counted_by_kind_with_the_last_ones_place() {
        let (disk, script, stats) = disk();
        script.push(FaultRule::once(FaultOp::Read, Fault::Errno(libc::EIO)));
        assert!(disk.read(8192, &mut [0; 512]).is_err());
        script.push(FaultRule::once(FaultOp::Write, Fault::Full));
        assert!(disk.write(0, &[0; 4096]).is_err());
        assert!(stats.tally().last.unwrap().text.contains("no space"));
        script.push(FaultRule::once(FaultOp::Flush, Fault::Errno(libc::EIO)));
        assert!(disk.flush().is_err() && disk.flush().is_err(), "it has latched");
        // Neither the caller's own mistakes nor the refusals of a failed device.
        assert!(disk.read(1 << 40, &mut [0]).is_err());
        let tally = stats.tally();
        let counts = (tally.read_errors, tally.write_errors, tally.no_space, tally.slow);
        assert_eq!(counts, (1, 1, 1, 0));
        let last = tally.last.unwrap();
        assert_eq!((last.kind, &*last.place), (MediaFaultKind::Write, ""));
        assert!(last.text.contains("flush") && last.time_ns > 0, "{last:?}");
    }

    #[test]
    fn slow_transfer_is_counted_from_the_mark_on_and_the_longest_always() {
        let (disk, script, stats) = disk();
        let slow = |ms| FaultRule::once(FaultOp::Read, Fault::Slow(Duration::from_millis(ms)));
        script.push(slow(60));
        disk.read(0, &mut [0; 512]).unwrap();
        let tally = stats.tally();
        assert!(tally.slow == 0 && tally.longest.as_millis() >= 40, "{tally:?}");
        assert!(tally.is_quiet());
        stats.set_slow(Duration::from_millis(20));
        script.push(slow(50));
        disk.read(4096, &mut [0; 512]).unwrap();
        let tally = stats.tally();
        assert_eq!((tally.slow, tally.last.is_none()), (1, true));
        assert_eq!(tally.last_slow.unwrap().place, "bytes 4096..+512");
    }

    #[test]
    fn same_damage_met_at_once_again_counts_once() {
        let stats = MediaStats::default();
        for block in [7, 7, 8] {
            let text = format!("block {block}");
            stats.note(MediaFaultKind::Checksum, text.clone(), text);
        }
        assert_eq!(stats.tally().checksum_errors, 2);
    }

    #[test]
    fn watched_region_passes_everything_through() {
        let (script, stats) = (FaultScript::new(), Arc::new(MediaStats::default()));
        let inner = SimWorld::new().add_region("nvm", SimMedium::File, 8192, 8192);
        let faulty = Arc::new(FaultyRegion::new(inner, script.clone()));
        let region = CountingRegion::new(faulty, Arc::clone(&stats));
        assert_eq!(
            region.write_crc(5, b"abc", 1).unwrap(),
            crc32c::crc32c_append(1, b"abc")
        );
        region.fence().unwrap();
        region.sync(0, 8).unwrap();
        let mut out = [0; 3];
        region.read(5, &mut out).unwrap();
        assert_eq!((&out, region.len_bytes()), (b"abc", 8192));
        assert!(stats.tally().is_quiet());
        script.push(FaultRule::once(FaultOp::Grow, Fault::Errno(libc::EIO)));
        assert!(region.allocate(0, 4096).is_err());
        assert_eq!(stats.tally().write_errors, 1);
    }
}
