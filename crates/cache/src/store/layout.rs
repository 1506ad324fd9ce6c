//! The superblock and the layout of a device. Two superblock copies are written in turn; the newer sound copy
//! is valid.
//!
//! ```text
//! superblock ×2 | journal A | journal B | checkpoint 0 | checkpoint 1 | position file | Disk Table |
//! circular log
//! ```
//!
//! The position file, or the file of sets, may be on a device aside (`aside`); its range of this device is
//! then not used.

use super::StoreError;
use crate::device::{DEVICE_BLOCK_BYTES, Device};
use crate::hash::Secret;
use crate::policy::{Policy, Shape};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 8] = *b"VARVECA1";
/// The version of the format of all areas: of a store with a device aside. One without it is of version 1.
pub const FORMAT_VERSION: u32 = 2;
const FORMAT_ALONE: u32 = 1;
/// The most devices in a cache.
pub const DEVICES_MAX: usize = 16;
/// Bytes of a page: superblock, journal, checkpoint and position file are made of them.
pub const PAGE: u64 = DEVICE_BLOCK_BYTES;
/// Content bytes of a page that ends with a seal.
pub const PAGE_CONTENT: u64 = PAGE - 16;

/// A range of the device, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Area {
    /// Offset of its beginning.
    pub off: u64,
    /// Its length.
    pub len: u64,
}

impl Area {
    /// Number of its pages.
    pub const fn pages(&self) -> u64 {
        self.len / PAGE
    }
}

/// The superblock. `crc32c` covers the bytes before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Superblock {
    magic: [u8; 8],
    format: u32,
    policy: u8,
    ways: u8,
    positions: u8,
    /// The number of this device among the cache's devices.
    pub device: u8,
    /// Identifies the cache; equal on all its devices.
    pub cache_id: u64,
    /// Identifies this device's store.
    pub store_id: u64,
    /// Secret that keys are hashed with; equal on all devices of a cache.
    pub secret: [u8; 16],
    /// Incremented at each opening of the store.
    pub epoch: u64,
    /// Objects with lower versions are discarded.
    pub floor: u64,
    /// Bytes of a bin of the Disk Table, and of the first read in the log.
    pub block_bytes: u32,
    /// Bytes of a log segment, which are written at once.
    pub segment_bytes: u32,
    /// The unit of positions in the log.
    pub unit_bytes: u32,
    /// Number of devices of the cache.
    pub device_count: u32,
    /// A key belongs to the first device whose share is above its hash.
    pub shares: [u32; DEVICES_MAX],
    /// Number of sets.
    pub sets: u64,
    /// Number of sets that `SetMemLru` keeps in memory.
    pub resident_sets: u64,
    /// The most purges that are kept one by one.
    pub purges_max: u64,
    /// The journal and its mirror.
    pub journal: [Area; 2],
    /// Two checkpoints of the index, written in turn.
    pub checkpoint: [Area; 2],
    /// The position file: positions that are not in memory; sets that are not in memory of `SetMemLru` with
    /// a device aside.
    pub positions_file: Area,
    /// The Disk Table.
    pub table: Area,
    /// The circular log.
    pub log: Area,
    /// Not 0: the position file is on the device aside, and this is in the seals of its pages, so that those
    /// of another file are not taken for this one's.
    pub aside: u32,
    crc32c: u32,
}

const _: () = {
    assert!(size_of::<Superblock>() <= PAGE as usize);
    assert!(size_of::<Superblock>().is_multiple_of(8));
};

/// Parameters of a new store.
#[derive(Debug, Clone)]
pub struct StorePlan {
    /// Policy, set size, positions.
    pub shape: Shape,
    /// Bytes of a bin, of the first read in the log.
    pub block_bytes: u32,
    /// Mean bytes of an object in the log: determines the number of objects that the index can hold.
    pub object_bytes: u64,
    /// Share of the device that the Disk Table gets; the rest is log for the tails.
    pub table_share: f64,
    /// Share of its sets that `SetMemLru` keeps in memory.
    pub resident_share: f64,
    /// The largest gathered write.
    pub segment_bytes: u32,
    /// Puts what the policy leaves of its index on disk on a device aside, if the device
    /// [moves writes](crate::device::Device::moves_writes) and has one. It is small, read in small pieces,
    /// and on a pool kept on NVM.
    pub aside: bool,
}

impl StorePlan {
    /// The paper's defaults for a policy.
    pub const fn new(policy: Policy) -> Self {
        Self {
            shape: Shape::new(policy),
            block_bytes: 8192,
            object_bytes: 8192,
            table_share: 0.5,
            resident_share: 0.3,
            segment_bytes: 4 << 20,
            aside: true,
        }
    }

    /// Gives the index of a small store more room than its objects need: a slot for each KiB of the device,
    /// up to a million slots (4 to 7 MiB of memory). Objects of a set need different tags of eight bits, so
    /// that of `n` objects in `s` sets some `n² / (510 · s)` take the place of another before the store is
    /// full; the room makes `s` larger. No effect on policies with a Disk Table, whose sets are blocks, or
    /// from 8 GiB on.
    #[must_use]
    pub fn with_room(mut self, len_bytes: u64) -> Self {
        const SLOTS: u64 = 1 << 20;
        if !self.shape.policy().has_table() {
            self.object_bytes = self.object_bytes.min((len_bytes / SLOTS).max(1024));
        }
        self
    }

    /// Whether a store on this device has a device aside.
    pub fn is_aside_of(&self, device: &dyn Device) -> bool {
        self.aside && self.shape.policy().leaves_index() && device.moves_writes()
    }

    fn check(&self) -> Result<(), StoreError> {
        let refuse = |why: &str| Err(StoreError::Plan(why.to_owned()));
        if !self.block_bytes.is_power_of_two() || !(4096..=65536).contains(&self.block_bytes) {
            return refuse("blocks are a power of two from 4096 to 65536 bytes");
        }
        if !(512..=1 << 30).contains(&self.object_bytes) {
            return refuse("the mean object has 512 bytes to 1 GiB");
        }
        if !(0.05..=0.95).contains(&self.table_share) || !(0.001..=1.0).contains(&self.resident_share) {
            return refuse("the Disk Table's share is 0.05 to 0.95, the share of sets in memory 0.001 to 1");
        }
        if !self.segment_bytes.is_power_of_two() || !(128 << 10..=64 << 20).contains(&self.segment_bytes) {
            return refuse("segments are a power of two from 128 KiB to 64 MiB");
        }
        Ok(())
    }
}

/// Pages of a journal, a checkpoint and the position file for `objects` objects.
fn area_pages(shape: Shape, objects: u64, purges_max: u64, aside: bool) -> [u64; 3] {
    let policy = shape.policy();
    let sets = (objects / shape.ways() as u64).max(1);
    let indexed = policy.has_index() && policy != Policy::SetMemLru;
    let index_bytes = if indexed {
        sets * shape.set_bytes() as u64
    } else {
        0
    };
    let journal = if indexed { (objects / 8 / 168).max(64) } else { 64 };
    let purges = 2 * (purges_max * 24).div_ceil(PAGE_CONTENT);
    let positions = position_pages(shape, sets, aside);
    [
        journal,
        2 + purges + index_bytes.div_ceil(PAGE_CONTENT),
        positions,
    ]
}

/// The areas before the Disk Table: journals, checkpoints, position file.
fn first_areas(
    [journal_pages, checkpoint_pages, mut position_pages]: [u64; 3],
    set_disk_bytes: u64,
    policy: Policy,
) -> ([Area; 2], [Area; 2], Area) {
    if policy.has_table() {
        // Sets begin at multiples of their length, so that none is in two units of a pool's placement.
        let before = 2 + 2 * (journal_pages + checkpoint_pages) + position_pages;
        position_pages += before.next_multiple_of(set_disk_bytes / PAGE) - before;
    }
    let mut off = 2 * PAGE;
    let mut area = |pages: u64| {
        let len = pages * PAGE;
        let area = Area { off, len };
        off += len;
        area
    };
    let journal = [area(journal_pages), area(journal_pages)];
    let checkpoint = [area(checkpoint_pages), area(checkpoint_pages)];
    (journal, checkpoint, area(position_pages))
}

/// Pages of the position file, or of the file of sets.
fn position_pages(shape: Shape, sets: u64, aside: bool) -> u64 {
    match shape.policy() {
        policy if policy.has_position_file() => sets.div_ceil(super::positions::sets_a_page(shape)),
        policy if policy.leaves_index() && aside => sets.div_ceil(super::away::sets_a_page(shape)),
        _ => 0,
    }
}

/// Rounds `bytes` down to a multiple of `step`.
const fn floor_to(bytes: u64, step: u64) -> u64 {
    bytes / step * step
}

impl Superblock {
    /// Lays a store out on `len_bytes`; with `aside`, one that has a device aside. Identity and secret are
    /// zero.
    ///
    /// # Errors
    /// The plan is out of bounds, or there is not enough room.
    pub fn lay_out(plan: &StorePlan, len_bytes: u64, aside: bool) -> Result<Self, StoreError> {
        plan.check()?;
        let shape = plan.shape;
        let policy = shape.policy();
        let ways = shape.ways() as u64;
        let set_disk_bytes = ways * u64::from(plan.block_bytes);
        let too_small = StoreError::TooSmall { len_bytes };
        // The areas before the log are sized for the objects of the whole device; their own room is
        // subtracted later.
        let objects = if policy.has_table() {
            (len_bytes as f64 * plan.table_share) as u64 / u64::from(plan.block_bytes)
        } else {
            len_bytes / plan.object_bytes
        };
        let sets_most = (objects / ways).max(1);
        let purges_max = (objects / 64).clamp(64, 65536);
        let pages = area_pages(shape, objects, purges_max, aside);
        let (journal, checkpoint, positions_file) = first_areas(pages, set_disk_bytes, policy);
        let start = positions_file.off + positions_file.len;
        let left = len_bytes.checked_sub(start).ok_or(too_small)?;
        let table_len = if policy.has_table() {
            floor_to((left as f64 * plan.table_share) as u64, set_disk_bytes).min(sets_most * set_disk_bytes)
        } else {
            0
        };
        let log_most = left - table_len;
        let fitting = (log_most / 16).max(1);
        let segment = u64::from(plan.segment_bytes)
            .min(1 << fitting.ilog2())
            .max(128 << 10);
        let log_len = floor_to(log_most, segment);
        if log_len < 4 * segment || policy.has_table() && table_len < set_disk_bytes {
            return Err(StoreError::TooSmall { len_bytes });
        }
        let mut unit = 512;
        while log_len / unit > 1 << 32 {
            unit *= 2;
        }
        let sets = if policy.has_table() {
            table_len / set_disk_bytes
        } else {
            log_len / plan.object_bytes / ways
        };
        if sets == 0 || sets > sets_most || sets >= u64::from(u32::MAX) {
            return Err(StoreError::TooSmall { len_bytes });
        }
        let mut made = Self::of(plan, sets);
        made.segment_bytes = segment as u32;
        made.unit_bytes = unit as u32;
        if aside {
            (made.format, made.aside) = (FORMAT_VERSION, 1);
        }
        made.purges_max = purges_max;
        made.journal = journal;
        made.checkpoint = checkpoint;
        made.positions_file = positions_file;
        made.table = Area {
            off: start,
            len: table_len,
        };
        made.log = Area {
            off: start + table_len,
            len: log_len,
        };
        Ok(made)
    }

    /// Returns a superblock with the plan's parameters and empty areas.
    fn of(plan: &StorePlan, sets: u64) -> Self {
        let shape = plan.shape;
        let mut made = Self::new_zeroed();
        made.magic = MAGIC;
        made.format = FORMAT_ALONE;
        made.policy = shape.policy().code();
        made.ways = shape.ways() as u8;
        made.positions = shape.positions() as u8;
        made.block_bytes = plan.block_bytes;
        made.device_count = 1;
        made.sets = sets;
        made.resident_sets = (sets as f64 * plan.resident_share) as u64;
        made
    }

    /// Policy and set size.
    pub fn shape(&self) -> Shape {
        let policy = Policy::from_code(self.policy);
        let shape = policy.and_then(|policy| Shape::with(policy, self.ways, Some(self.positions)).ok());
        shape.expect("checked when it was read")
    }

    /// The secret.
    pub const fn secret(&self) -> Secret {
        Secret(self.secret)
    }

    /// What the pages of the position file are sealed with.
    pub const fn positions_id(&self) -> u64 {
        self.store_id ^ (self.aside as u64) << 32
    }

    /// Bytes of a set in the Disk Table.
    pub fn set_disk_bytes(&self) -> u64 {
        self.shape().ways() as u64 * u64::from(self.block_bytes)
    }

    /// Units of one lap of the log.
    pub const fn lap_units(&self) -> u64 {
        self.log.len / self.unit_bytes as u64
    }

    /// Units of a segment.
    pub const fn segment_units(&self) -> u64 {
        self.segment_bytes as u64 / self.unit_bytes as u64
    }

    fn parse(page: &[u8], len_bytes: u64) -> Option<Self> {
        let (found, _) = Self::read_from_prefix(page).ok()?;
        let sums = crc32c::crc32c(&found.as_bytes()[..size_of::<Self>() - 4]) == found.crc32c;
        let is_known = match found.format {
            FORMAT_ALONE => found.aside == 0,
            FORMAT_VERSION => found.aside != 0,
            _ => false,
        };
        if found.magic != MAGIC || !is_known || !sums {
            return None;
        }
        found.is_sound(len_bytes).then_some(found)
    }

    /// The version of a superblock that a later program has written.
    fn later_version(page: &[u8]) -> Option<u32> {
        let (found, _) = Self::read_from_prefix(page).ok()?;
        (found.magic == MAGIC && found.format > FORMAT_VERSION).then_some(found.format)
    }

    /// Whether its numbers are consistent with each other and the device: a correct checksum does not prove
    /// it.
    fn is_sound(&self, len_bytes: u64) -> bool {
        let Some(policy) = Policy::from_code(self.policy) else {
            return false;
        };
        let Ok(shape) = Shape::with(policy, self.ways, Some(self.positions)) else {
            return false;
        };
        let (segment, unit) = (u64::from(self.segment_bytes), u64::from(self.unit_bytes));
        if !segment.is_power_of_two() || !unit.is_power_of_two() || unit < 512 || unit > segment {
            return false;
        }
        let areas = [self.journal, self.checkpoint].concat();
        let areas = areas.iter().chain([&self.positions_file, &self.table, &self.log]);
        let mut end = 2 * PAGE;
        for area in areas {
            if area.off != end || !area.len.is_multiple_of(PAGE) || area.len > len_bytes {
                return false;
            }
            end += area.len;
        }
        let block = u64::from(self.block_bytes);
        let table_fits =
            !policy.has_table() || self.sets.checked_mul(block * shape.ways() as u64) == Some(self.table.len);
        let indexed = policy.has_index() && policy != Policy::SetMemLru;
        let index_pages = (self.sets.saturating_mul(shape.set_bytes() as u64)).div_ceil(PAGE_CONTENT);
        let purge_pages = self.purges_max.saturating_mul(24).div_ceil(PAGE_CONTENT);
        let needed = 2 + 2 * purge_pages + if indexed { index_pages } else { 0 };
        let position_pages = position_pages(shape, self.sets, self.aside != 0);
        end <= len_bytes
            && segment <= 64 << 20
            && block.is_power_of_two()
            && (4096..=65536).contains(&block)
            && self.log.len >= 4 * segment
            && self.log.len.is_multiple_of(segment)
            && self.log.len / unit <= 1 << 32
            && self.sets > 0
            && self.sets < u64::from(u32::MAX)
            && table_fits
            && self.journal[0].len == self.journal[1].len
            && self.journal[0].pages() >= 64
            && self.checkpoint.iter().all(|area| area.pages() >= needed)
            && self.positions_file.pages() >= position_pages
            && (1..=DEVICES_MAX as u32).contains(&self.device_count)
            && u32::from(self.device) < self.device_count
            && self.epoch < 1 << 23
    }

    /// Writes the older of the two copies. Durable after the device's next flush.
    ///
    /// # Errors
    /// The device failed.
    pub fn write(&mut self, device: &dyn Device) -> Result<(), StoreError> {
        self.crc32c = crc32c::crc32c(&self.as_bytes()[..size_of::<Self>() - 4]);
        let mut page = vec![0; PAGE as usize];
        page[..size_of::<Self>()].copy_from_slice(self.as_bytes());
        Ok(device.write_at(self.epoch % 2 * PAGE, &page)?)
    }

    /// Returns the newer sound copy, and whether the other one was sound too.
    ///
    /// # Errors
    /// The device failed, or holds no store.
    pub fn read(device: &dyn Device) -> Result<(Self, bool), StoreError> {
        let mut pages = vec![0; 2 * PAGE as usize];
        if device.len_bytes() < 2 * PAGE {
            return Err(StoreError::NoStore {
                device: device.name(),
            });
        }
        device.read_at(0, &mut pages)?;
        let copies: Vec<_> = pages
            .chunks(PAGE as usize)
            .filter_map(|page| Self::parse(page, device.len_bytes()))
            .collect();
        let newest = copies.iter().max_by_key(|copy| copy.epoch);
        let newest = newest.ok_or_else(|| {
            let device = device.name();
            match pages.chunks(PAGE as usize).find_map(Self::later_version) {
                Some(version) => StoreError::Version { device, version },
                None => StoreError::NoStore { device },
            }
        })?;
        Ok((*newest, copies.len() == 2))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{FORMAT_VERSION, StorePlan, Superblock};
    use crate::device::{Device, MemoryDevice};
    use crate::policy::Policy;

    #[test]
    fn layout_fits_and_is_read_back_for_every_policy_and_size() {
        for policy in Policy::ALL {
            for len in [3 << 20, 64 << 20, (1 << 30) + 4096 * 7, 1u64 << 40] {
                let device = MemoryDevice::new(len);
                let plan = StorePlan::new(policy);
                let aside = len < 1 << 30 && policy.leaves_index();
                let mut made = Superblock::lay_out(&plan, len, aside).unwrap();
                assert_eq!(made.aside != 0, aside);
                if policy.has_table() {
                    assert_eq!(made.table.off % made.set_disk_bytes(), 0);
                }
                made.write(&device).unwrap();
                made.epoch = 1;
                made.write(&device).unwrap();
                let (read, both) = Superblock::read(&device).unwrap();
                assert!(both);
                assert_eq!(read, made, "{policy} {len}");
                assert!(made.log.off + made.log.len <= len);
                let used = made.table.len + made.log.len;
                assert!(
                    len < 8 << 20 || used as f64 > len as f64 * 0.95,
                    "{policy} {len}: {used}"
                );
                device.flip(4096 + 100, 3);
                let (older, both) = Superblock::read(&device).unwrap();
                assert_eq!((older.epoch, both), (0, false));
            }
            assert!(Superblock::lay_out(&StorePlan::new(policy), 256 << 10, false).is_err());
        }
    }

    #[test]
    fn store_of_a_later_version_is_refused_as_such() {
        let device = MemoryDevice::new(64 << 20);
        let mut made = Superblock::lay_out(&StorePlan::new(Policy::Log), device.len_bytes(), false).unwrap();
        made.format = FORMAT_VERSION + 1;
        made.write(&device).unwrap();
        let refused = Superblock::read(&device).unwrap_err().to_string();
        assert!(refused.contains("version 3"), "{refused}");
    }
}
