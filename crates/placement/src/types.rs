//! Types that all modules share: devices, units, accesses. No decisions.

use serde::{Deserialize, Serialize};
use std::fmt;
use varve_format::{InodeKey, Tier};

/// Number of a device of the pool; dense, from 0. At most [`DeviceId::MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceId(pub u8);

impl DeviceId {
    /// Most devices in a pool.
    pub const MAX: usize = 32;

    /// Its index in a table of devices.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}

/// Direction of an access: read or write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Data comes from the device.
    Read,
    /// Data goes to the device.
    Write,
}

/// Name of a part of a file that is placed as a whole: bytes `index * size ..` of it, where `size` is the
/// pool's [`UnitSize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct UnitId {
    /// File.
    pub key: InodeKey,
    /// Number within the file.
    pub index: u32,
}

impl fmt::Display for UnitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "inode {} unit {}", self.key.ino, self.index)
    }
}

/// Bytes of a unit: a power of two from 64 KiB to 1 MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct UnitSize(u32);

/// The size is not a valid unit size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} bytes are no size of a unit; choose a power of two from 65536 to 1048576")]
pub struct BadUnitSize(u64);

impl UnitSize {
    /// 64 KiB, the paper's best (Fig. 6b).
    pub const DEFAULT: Self = Self(64 << 10);

    /// Checks a size.
    ///
    /// # Errors
    /// `bytes` is no power of two, or outside 64 KiB to 1 MiB.
    pub const fn new(bytes: u64) -> Result<Self, BadUnitSize> {
        if bytes.is_power_of_two() && bytes >= 64 << 10 && bytes <= 1 << 20 {
            Ok(Self(bytes as u32))
        } else {
            Err(BadUnitSize(bytes))
        }
    }

    /// Bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0 as u64
    }

    /// Returns the unit that holds byte `offset_bytes` of a file.
    #[must_use]
    pub const fn unit(self, key: InodeKey, offset_bytes: u64) -> UnitId {
        UnitId {
            key,
            index: (offset_bytes / self.bytes()) as u32,
        }
    }
}

impl TryFrom<u64> for UnitSize {
    type Error = BadUnitSize;
    fn try_from(bytes: u64) -> Result<Self, BadUnitSize> {
        Self::new(bytes)
    }
}

impl From<UnitSize> for u64 {
    fn from(size: UnitSize) -> Self {
        size.bytes()
    }
}

/// The state of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceState {
    /// It is readable and writable.
    Online,
    /// An operator empties it: it serves reads, and writes in place, but gets no new data.
    Draining,
    /// It refuses writes.
    ReadOnly,
    /// It does not answer.
    Absent,
}

impl DeviceState {
    /// Whether it may get new data.
    #[must_use]
    pub const fn takes_new(self) -> bool {
        matches!(self, Self::Online)
    }

    /// Whether data can be read from it.
    #[must_use]
    pub const fn reads(self) -> bool {
        !matches!(self, Self::Absent)
    }

    /// Whether data on it can be overwritten.
    #[must_use]
    pub const fn writes(self) -> bool {
        matches!(self, Self::Online | Self::Draining)
    }
}

/// A completed access to a unit.
#[derive(Debug, Clone, Copy)]
pub struct Access {
    /// Unit.
    pub unit: UnitId,
    /// Direction.
    pub op: Op,
    /// Bytes accessed in the unit.
    pub bytes: u32,
    /// Bytes of the whole request, of which this access may be one part.
    pub request_bytes: u32,
    /// The device that served it.
    pub device: DeviceId,
}

impl Access {
    /// Whether it is part of a request larger than a unit: such data gains from striping ("Migration-2",
    /// Chapter II, Table II).
    #[must_use]
    pub fn is_wide(&self, unit: UnitSize) -> bool {
        u64::from(self.request_bytes) > unit.bytes()
    }
}

/// Data without a place.
#[derive(Debug, Clone, Copy)]
pub struct NewData {
    /// The unit that it belongs to.
    pub unit: UnitId,
    /// Bytes to place.
    pub bytes: u32,
    /// Bytes of the whole request.
    pub request_bytes: u32,
    /// Restricts the choice to devices of this tier, while one of them can take it (a rule, a pin).
    pub tier: Option<Tier>,
}
