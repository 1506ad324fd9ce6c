//! Media with scripted faults: errors, short and torn transfers, lost and misdirected writes, flipped bits,
//! want of space, slowness, absence. For tests of everything above. The script is shared, so a test changes
//! it while the device is in use.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::lock::Mutex;

use crate::error::{DeviceName, MediaError};
use crate::latch::Latch;
use crate::traits::{BlockDevice, DeviceInfo, DeviceState, Region};

/// The calls that a rule applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultOp {
    /// Reads.
    Read,
    /// Writes, with or without a checksum.
    Write,
    /// Flushes of block devices, syncs of regions.
    Flush,
    /// Fences of regions.
    Fence,
    /// Growth and allocation of regions.
    Grow,
    /// Trims.
    Trim,
    /// Any of these.
    Any,
}

/// The fault that a rule injects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The call fails with this errno, such as `libc::EIO`, and does nothing.
    Errno(i32),
    /// Only the first bytes are transferred, then the call fails with EIO.
    Short {
        /// Bytes transferred.
        bytes: usize,
    },
    /// Only the first sectors of 512 bytes are written and the call says *success*: a write torn by a power
    /// cut.
    Torn {
        /// Sectors written.
        sectors: usize,
    },
    /// Nothing is written and the call says success.
    Lost,
    /// The call takes this long and then succeeds.
    Slow(Duration),
    /// The host is full: `NoSpace`.
    Full,
    /// This call and all after it, of any kind, fail with ENODEV.
    Gone,
    /// One bit of the transferred bytes is wrong; the call says success.
    FlippedBit {
        /// Which bit, counted from the start of the transfer (modulo its length).
        bit: u64,
    },
    /// The transfer happens this many bytes further on; the call says success.
    Misdirected {
        /// Bytes added to the offset.
        by: i64,
    },
}

/// One line of a script.
#[derive(Debug, Clone)]
pub struct FaultRule {
    /// The calls it applies to.
    pub op: FaultOp,
    /// Calls that touch these bytes. Calls without a range (flush, fence) match any range.
    pub range: Range<u64>,
    /// Matching calls that pass before the fault begins.
    pub skip: u64,
    /// Matching calls that then fail; `u64::MAX` for ever.
    pub times: u64,
    /// The fault they get.
    pub fault: Fault,
}

impl FaultRule {
    /// A rule for the next matching call, anywhere, once.
    pub const fn once(op: FaultOp, fault: Fault) -> Self {
        Self {
            op,
            range: 0..u64::MAX,
            skip: 0,
            times: 1,
            fault,
        }
    }

    /// A rule for every matching call, anywhere.
    pub const fn always(op: FaultOp, fault: Fault) -> Self {
        Self {
            op,
            range: 0..u64::MAX,
            skip: 0,
            times: u64::MAX,
            fault,
        }
    }

    /// Limits the rule to calls that touch these bytes.
    #[must_use]
    pub fn within(mut self, range: Range<u64>) -> Self {
        self.range = range;
        self
    }

    /// Lets this many matching calls pass first.
    #[must_use]
    pub const fn after(mut self, calls: u64) -> Self {
        self.skip = calls;
        self
    }
}

/// The faults to come, shared between a test and its devices. Of several rules that match, the first that is
/// due wins.
#[derive(Clone, Default)]
pub struct FaultScript(Arc<Mutex<Script>>);

#[derive(Default)]
struct Script {
    rules: Vec<FaultRule>,
    fired: u64,
    gone: bool,
}

impl FaultScript {
    /// A script without faults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a rule.
    pub fn push(&self, rule: FaultRule) {
        self.0.lock().rules.push(rule);
    }

    /// Removes all rules, and brings a gone device back (a latch stays).
    pub fn clear(&self) {
        let mut script = self.0.lock();
        script.rules.clear();
        script.gone = false;
    }

    /// Number of injected faults: a test that relies on one must check that it happened.
    pub fn fired(&self) -> u64 {
        self.0.lock().fired
    }

    fn next(&self, op: FaultOp, range: Option<Range<u64>>) -> Option<Fault> {
        let mut script = self.0.lock();
        if script.gone {
            script.fired += 1;
            return Some(Fault::Gone);
        }
        let meets = |rule: &FaultRule| {
            let touches = |range: &Range<u64>| range.start < rule.range.end && rule.range.start < range.end;
            (rule.op == op || rule.op == FaultOp::Any) && range.as_ref().is_none_or(touches)
        };
        let mut due = None;
        for rule in script
            .rules
            .iter_mut()
            .filter(|rule| rule.times > 0 && meets(rule))
        {
            if rule.skip > 0 {
                rule.skip -= 1;
            } else if due.is_none() {
                rule.times = if rule.times == u64::MAX {
                    u64::MAX
                } else {
                    rule.times - 1
                };
                due = Some(rule.fault);
            }
        }
        script.fired += u64::from(due.is_some());
        script.gone |= due == Some(Fault::Gone);
        due
    }
}

/// State that the wrappers share.
struct Faults {
    script: FaultScript,
    name: DeviceName,
    latch: Latch,
}

impl Faults {
    /// Returns the fault for this call, if it is one that lets (some of) the transfer happen.
    fn meet(&self, op: FaultOp, what: &'static str, off: u64, len: u64) -> Result<Option<Fault>, MediaError> {
        let range = (len > 0).then(|| off..off.saturating_add(len));
        match self.script.next(op, range) {
            Some(Fault::Errno(errno)) => Err(self.fail(op, what, off, len, errno)),
            Some(Fault::Gone) => Err(self.fail(op, what, off, len, libc::ENODEV)),
            Some(Fault::Full) => Err(MediaError::NoSpace {
                device: self.name.clone(),
                off,
                len,
            }),
            Some(Fault::Slow(time)) => {
                std::thread::sleep(time);
                Ok(None)
            }
            other => Ok(other),
        }
    }

    /// Failed reads do not latch, as on a real device.
    fn fail(&self, op: FaultOp, what: &'static str, off: u64, len: u64, errno: i32) -> MediaError {
        let error = MediaError::from_errno(&self.name, what, off, len, errno);
        if op == FaultOp::Read {
            error
        } else {
            self.latch.note(error)
        }
    }

    fn read(
        &self,
        off: u64,
        out: &mut [u8],
        inner: impl Fn(u64, &mut [u8]) -> Result<(), MediaError>,
    ) -> Result<(), MediaError> {
        let len = out.len() as u64;
        match self.meet(FaultOp::Read, "read", off, len)? {
            Some(Fault::Short { bytes }) => {
                let bytes = bytes.min(out.len());
                inner(off, &mut out[..bytes])?;
                Err(self.fail(FaultOp::Read, "read", off, len, libc::EIO))
            }
            Some(Fault::FlippedBit { bit }) => {
                inner(off, out)?;
                flip(out, bit);
                Ok(())
            }
            Some(Fault::Misdirected { by }) => inner(off.saturating_add_signed(by), out),
            _ => inner(off, out),
        }
    }

    /// Calls `inner` with the bytes that are really written; for a block device they are whole blocks, with
    /// the missing bytes read by `fill`.
    fn write(
        &self,
        off: u64,
        src: &[u8],
        fill: impl Fn(u64, &mut [u8]) -> Result<(), MediaError>,
        inner: impl Fn(u64, &[u8]) -> Result<(), MediaError>,
    ) -> Result<(), MediaError> {
        self.latch.check(&self.name)?;
        let len = src.len() as u64;
        // A partial write: the old bytes follow the written ones.
        let part = |bytes: usize| {
            let mut mixed = vec![0; src.len()];
            fill(off, &mut mixed)?;
            let bytes = bytes.min(src.len());
            mixed[..bytes].copy_from_slice(&src[..bytes]);
            inner(off, &mixed)
        };
        match self.meet(FaultOp::Write, "write", off, len)? {
            Some(Fault::Short { bytes }) => {
                part(bytes)?;
                Err(self.fail(FaultOp::Write, "write", off, len, libc::EIO))
            }
            Some(Fault::Torn { sectors }) => part(sectors * 512),
            Some(Fault::Lost) => Ok(()),
            Some(Fault::FlippedBit { bit }) => {
                let mut wrong = src.to_vec();
                flip(&mut wrong, bit);
                inner(off, &wrong)
            }
            Some(Fault::Misdirected { by }) => inner(off.saturating_add_signed(by), src),
            _ => inner(off, src),
        }
    }

    fn other(&self, op: FaultOp, what: &'static str, off: u64, len: u64) -> Result<bool, MediaError> {
        self.latch.check(&self.name)?;
        // `false`: the call reports success without having done anything.
        Ok(self.meet(op, what, off, len)? != Some(Fault::Lost))
    }

    fn state(&self, inner: DeviceState) -> DeviceState {
        match self.latch.state() {
            DeviceState::Ok => inner,
            failed => failed,
        }
    }
}

fn flip(bytes: &mut [u8], bit: u64) {
    if !bytes.is_empty() {
        let bit = bit % (bytes.len() as u64 * 8);
        bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
    }
}

/// A block device with faults.
pub struct FaultyDevice {
    inner: Arc<dyn BlockDevice>,
    faults: Faults,
}

impl FaultyDevice {
    /// Wraps `inner`, which fails as `script` says.
    pub fn new(inner: Arc<dyn BlockDevice>, script: FaultScript) -> Self {
        let name = inner.name();
        Self {
            inner,
            faults: Faults {
                script,
                name,
                latch: Latch::default(),
            },
        }
    }
}

impl BlockDevice for FaultyDevice {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.faults.read(off, out, |off, out| self.inner.read(off, out))
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        let fill = |off, out: &mut [u8]| self.inner.read(off, out);
        self.faults
            .write(off, src, fill, |off, src| self.inner.write(off, src))
    }

    fn flush(&self) -> Result<(), MediaError> {
        if self.faults.other(FaultOp::Flush, "flush", 0, 0)? {
            self.inner.flush()
        } else {
            Ok(())
        }
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        if self.faults.other(FaultOp::Trim, "trim", off, len)? {
            self.inner.trim(off, len)
        } else {
            Ok(())
        }
    }

    fn state(&self) -> DeviceState {
        self.faults.state(self.inner.state())
    }

    fn info(&self) -> DeviceInfo {
        let inner = self.inner.info();
        DeviceInfo {
            backend: format!("faulty over {}", inner.backend),
            ..inner
        }
    }
}

/// A region with faults.
pub struct FaultyRegion {
    inner: Arc<dyn Region>,
    faults: Faults,
}

impl FaultyRegion {
    /// Wraps `inner`, which fails as `script` says.
    pub fn new(inner: Arc<dyn Region>, script: FaultScript) -> Self {
        let name = inner.info().name;
        Self {
            inner,
            faults: Faults {
                script,
                name,
                latch: Latch::default(),
            },
        }
    }
}

impl Region for FaultyRegion {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.faults.read(off, out, |off, out| self.inner.read(off, out))
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        let fill = |off, out: &mut [u8]| self.inner.read(off, out);
        self.faults
            .write(off, src, fill, |off, src| self.inner.write(off, src))
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        // The checksum covers the bytes that should have been stored: the caller must not notice a silent
        // fault.
        let copy = src.to_vec();
        self.write(off, &copy)?;
        Ok(crate::crc32c_append(seed, &copy))
    }

    fn is_written_by_calls(&self) -> bool {
        self.inner.is_written_by_calls()
    }

    fn fence(&self) -> Result<(), MediaError> {
        if self.faults.other(FaultOp::Fence, "fence", 0, 0)? {
            self.inner.fence()
        } else {
            Ok(())
        }
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        if self.faults.other(FaultOp::Flush, "sync", off, len)? {
            self.inner.sync(off, len)
        } else {
            Ok(())
        }
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        if self.faults.other(FaultOp::Grow, "grow", 0, 0)? {
            self.inner.grow(new_len)
        } else {
            Ok(())
        }
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        if self.faults.other(FaultOp::Grow, "allocate", off, len)? {
            self.inner.allocate(off, len)
        } else {
            Ok(())
        }
    }

    fn state(&self) -> DeviceState {
        self.faults.state(self.inner.state())
    }

    fn info(&self) -> DeviceInfo {
        let inner = self.inner.info();
        DeviceInfo {
            backend: format!("faulty over {}", inner.backend),
            ..inner
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice, FaultyRegion};
    use crate::sim::{SimMedium, SimWorld};
    use crate::{BlockDevice, DeviceState, MediaError, Region};

    fn disk() -> (FaultyDevice, FaultScript) {
        let script = FaultScript::new();
        (
            FaultyDevice::new(SimWorld::new().add_block("disk", 1 << 20), script.clone()),
            script,
        )
    }

    fn byte(device: &FaultyDevice, off: u64) -> u8 {
        let mut out = [0];
        device.read(off, &mut out).unwrap();
        out[0]
    }

    #[test]
    fn write_error_latches_when_it_is_its_turn_and_in_range() {
        let (disk, script) = disk();
        script.push(
            FaultRule::once(FaultOp::Write, Fault::Errno(libc::EIO))
                .within(4096..8192)
                .after(1),
        );
        disk.write(0, &[1; 4096]).unwrap();
        disk.write(4096, &[1; 4096]).unwrap();
        disk.write(8192, &[1; 4096]).unwrap();
        assert_eq!(script.fired(), 0);
        assert!(matches!(
            disk.write(4096, &[2; 4096]),
            Err(MediaError::Io { errno: libc::EIO, .. })
        ));
        assert_eq!(script.fired(), 1);
        assert!(matches!(disk.state(), DeviceState::Failed { .. }));
        assert!(matches!(
            disk.write(0, &[2; 4096]),
            Err(MediaError::Failed { .. })
        ));
        assert_eq!(byte(&disk, 4096), 1, "reads go on");
    }

    #[test]
    fn full_host_does_not_latch() {
        let (disk, script) = disk();
        script.push(FaultRule::once(FaultOp::Write, Fault::Full));
        assert!(disk.write(0, &[1; 4096]).unwrap_err().is_no_space());
        disk.write(0, &[1; 4096]).unwrap();
        assert_eq!(disk.state(), DeviceState::Ok);
    }

    #[test]
    fn torn_write_keeps_its_first_sectors_and_says_success() {
        let (disk, script) = disk();
        disk.write(0, &[1; 4096]).unwrap();
        script.push(FaultRule::once(FaultOp::Write, Fault::Torn { sectors: 3 }));
        disk.write(0, &[2; 4096]).unwrap();
        assert_eq!((byte(&disk, 1535), byte(&disk, 1536)), (2, 1));
        script.push(FaultRule::once(FaultOp::Write, Fault::Short { bytes: 10 }));
        assert!(disk.write(0, &[3; 4096]).is_err());
        assert_eq!((byte(&disk, 9), byte(&disk, 10)), (3, 2));
    }

    #[test]
    fn silent_faults_say_success_and_do_damage() {
        let (disk, script) = disk();
        disk.write(0, &[0; 8192]).unwrap();
        script.push(FaultRule::once(FaultOp::Read, Fault::FlippedBit { bit: 9 }));
        let mut out = [0; 4];
        disk.read(0, &mut out).unwrap();
        assert_eq!(out, [0, 2, 0, 0]);
        script.push(FaultRule::once(FaultOp::Write, Fault::Misdirected { by: 4096 }));
        disk.write(0, &[7; 4096]).unwrap();
        assert_eq!((byte(&disk, 0), byte(&disk, 4096)), (0, 7));
        script.push(FaultRule::once(FaultOp::Write, Fault::Lost));
        disk.write(0, &[8; 4096]).unwrap();
        assert_eq!(byte(&disk, 0), 0);
        assert_eq!(script.fired(), 3);
    }

    #[test]
    fn gone_device_fails_everything_until_the_script_is_cleared() {
        let (disk, script) = disk();
        script.push(FaultRule::once(FaultOp::Flush, Fault::Gone));
        assert!(disk.flush().is_err());
        assert!(matches!(
            disk.read(0, &mut [0; 4]),
            Err(MediaError::Io {
                errno: libc::ENODEV,
                ..
            })
        ));
        script.clear();
        disk.read(0, &mut [0; 4]).unwrap();
        assert!(disk.write(0, &[0; 4096]).is_err(), "what was lost stays lost");
    }

    #[test]
    fn faulty_region_fails_sync_and_flips_what_it_stores() {
        let script = FaultScript::new();
        let inner = SimWorld::new().add_region("nvm", SimMedium::File, 8192, 8192);
        let region = FaultyRegion::new(inner, script.clone());
        script.push(FaultRule::once(FaultOp::Write, Fault::FlippedBit { bit: 0 }));
        assert_eq!(
            region.write_crc(0, b"abc", 3).unwrap(),
            crc32c::crc32c_append(3, b"abc")
        );
        let mut out = [0; 3];
        region.read(0, &mut out).unwrap();
        assert_eq!(&out, b"`bc");
        script.push(FaultRule::once(FaultOp::Grow, Fault::Full));
        assert!(region.grow(8192).unwrap_err().is_no_space());
        script.push(FaultRule::always(FaultOp::Flush, Fault::Errno(libc::EIO)));
        assert!(region.sync(0, 10).is_err());
        assert!(matches!(region.fence(), Err(MediaError::Failed { .. })));
    }
}
