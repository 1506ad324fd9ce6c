//! A devdax device as a pool's fast tier: NVM, journal and the logs of privileged sessions, each a part of
//! the one range that the device is. Owns the place of each part and the table of logs; the bytes of header
//! and table are `varve_format::dax`'s.
//!
//! A slot is not used again while a process maps it: its client may have been sealed and not know it yet.
//! Each client's descriptor has a lock on the first byte of its slot, which the kernel takes back with the
//! last descriptor and the last mapping.

use super::devices::journal_bytes;
use super::size;
use crate::KernelError;
use parking_lot::Mutex;
use std::fs::File;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use varve_format::dax::{
    DAX_COPY_OFF, DAX_PART_BYTES, DAX_ROW_SIZE, DAX_ROWS_OFF, DAX_ROWS_PER_SLOT, DAX_SLOTS_MAX, DaxHeader,
    DaxRow,
};
use varve_format::log::CHUNK_BYTES;
use varve_format::superblock::NVM_MIN_BYTES;
use varve_format::{BLOCK_BYTES, SessionId};
use varve_ipc::DaxAt;
use varve_media::dax::DaxDevice;
use varve_media::sys::{hold_byte, is_held};
use varve_media::{DeviceInfo, DeviceName, DeviceState, MappedRegion, MediaError, Region};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Share of the device that the logs have.
const LOGS_SHARE: u64 = 3;
/// Slots that there should be.
const SLOTS: u64 = 16;
/// Least bytes of a slot.
const SLOT_MIN_BYTES: u64 = 2 * CHUNK_BYTES;
/// Most bytes of a slot.
const SLOT_MAX_BYTES: u64 = 1 << 30;
/// Bytes that are zeroed at a time.
const STEP_BYTES: u64 = 1 << 20;

/// A slot of the table.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    log: Option<(SessionId, u64)>,
    generation: u64,
}

/// An opened device.
pub(super) struct Arena {
    device: DaxDevice,
    header: DaxHeader,
    head: MappedRegion,
    slots: Mutex<Vec<Slot>>,
}

/// Returns the parts of a device of `total` bytes; `None`: it is too small.
fn layout(total: u64, pool_uuid: [u8; 16]) -> Option<DaxHeader> {
    let whole = |bytes: u64| bytes / DAX_PART_BYTES * DAX_PART_BYTES;
    let journal = journal_bytes(total / 8 * 5).next_multiple_of(DAX_PART_BYTES);
    let area = whole(total).checked_sub(DAX_PART_BYTES + journal)?;
    let logs = area / LOGS_SHARE;
    let slot = whole(logs / SLOTS).clamp(SLOT_MIN_BYTES, SLOT_MAX_BYTES);
    let slots = (logs / slot).min(DAX_SLOTS_MAX);
    let nvm = area - slots * slot;
    if slots == 0 || nvm < NVM_MIN_BYTES {
        return None;
    }
    let nvm_off = DAX_PART_BYTES + journal;
    let header = DaxHeader {
        pool_uuid,
        total_bytes: U64::new(total),
        journal_off: U64::new(DAX_PART_BYTES),
        journal_bytes: U64::new(journal),
        nvm_off: U64::new(nvm_off),
        nvm_bytes: U64::new(nvm / BLOCK_BYTES * BLOCK_BYTES),
        slots_off: U64::new(nvm_off + nvm),
        slot_bytes: U64::new(slot),
        slots: U64::new(slots),
        ..DaxHeader::new_zeroed()
    };
    Some(header.sealed())
}

fn zero(region: &dyn Region, off: u64, len: u64) -> Result<(), MediaError> {
    let zeros = vec![0; STEP_BYTES as usize];
    let mut at = off;
    while at < off + len {
        let n = STEP_BYTES.min(off + len - at);
        region.write(at, &zeros[..n as usize])?;
        at += n;
    }
    region.fence()
}

impl Arena {
    fn head_of(device: &DaxDevice) -> Result<MappedRegion, MediaError> {
        MappedRegion::of_device(
            device.descriptor()?,
            device.name().clone(),
            device.part(0),
            DAX_PART_BYTES,
            DAX_PART_BYTES,
            true,
        )
    }

    /// Takes an empty device for a new pool: zeros all of it but the slots, then writes the header. Durable
    /// when this returns.
    ///
    /// # Errors
    /// It is not a devdax device, not empty, or too small: each says what to do.
    pub(super) fn create(path: &Path, pool_uuid: [u8; 16]) -> Result<Self, KernelError> {
        let device = DaxDevice::open(path)?;
        let head = Self::head_of(&device)?;
        let mut start = vec![0; DAX_PART_BYTES as usize];
        head.read(0, &mut start)?;
        if start.iter().any(|byte| *byte != 0) {
            let whose = match DaxHeader::read_from_prefix(&start) {
                Ok((header, _)) if header.is_whole() => "it holds a pool",
                _ => "its first 2M are not all zero",
            };
            return Err(KernelError::Pool(format!(
                "{0} is not empty: {whose}. If nothing on it is needed, wipe it first (`varve destroy` of the \
                 pool does, or `daxio --zero --len=2M --output={0}`)",
                path.display()
            )));
        }
        let Some(header) = layout(device.size_bytes(), pool_uuid) else {
            return Err(KernelError::Pool(format!(
                "{} has {}, which is too little for NVM, a journal and logs; the least is about {}",
                path.display(),
                size::show(device.size_bytes()),
                size::show(NVM_MIN_BYTES + (20 << 20))
            )));
        };
        let arena = Self {
            device,
            header,
            head,
            slots: Mutex::new(vec![Slot::default(); header.slots.get() as usize]),
        };
        for part in [arena.journal()?, arena.nvm()?] {
            zero(&part, 0, part.len_bytes())?;
        }
        for at in [DAX_COPY_OFF, 0] {
            arena.head.write(at, header.as_bytes())?;
            arena.head.fence()?;
        }
        Ok(arena)
    }

    /// Opens the device of a pool.
    ///
    /// # Errors
    /// It holds no pool or another one, or is smaller than when the pool was made: each says what to do.
    pub(super) fn open(path: &Path, pool_uuid: [u8; 16]) -> Result<Self, KernelError> {
        Self::of(DaxDevice::open(path)?, path, pool_uuid)
    }

    /// [`open`](Self::open) beside the devices of the pool, which this process has open.
    ///
    /// # Errors
    /// As for `open`.
    pub(super) fn open_beside(path: &Path, pool_uuid: [u8; 16]) -> Result<Self, KernelError> {
        Self::of(DaxDevice::open_unclaimed(path)?, path, pool_uuid)
    }

    fn of(device: DaxDevice, path: &Path, pool_uuid: [u8; 16]) -> Result<Self, KernelError> {
        let head = Self::head_of(&device)?;
        let header = Self::header(&head, path)?;
        let refuse = |what: String| Err(KernelError::Pool(format!("{}: {what}", path.display())));
        if header.version.get() > DaxHeader::VERSION {
            return refuse("it was laid out by a newer varve: use that".into());
        }
        if header.pool_uuid != pool_uuid {
            return refuse(format!(
                "it holds another pool than {} says; put the right ones together",
                super::files::TOML
            ));
        }
        if header.total_bytes.get() > device.size_bytes() {
            return refuse(format!(
                "the namespace has {}, the pool on it {}: it was made smaller, or this is another one. Give \
                 it its size back (`ndctl list -N`), or restore the pool on a larger one from a backup",
                size::show(device.size_bytes()),
                size::show(header.total_bytes.get())
            ));
        }
        if !header.is_sound() {
            return refuse("its header names parts that do not fit together".into());
        }
        let slots = (0..header.slots.get()).map(|slot| read_slot(&head, slot));
        let slots = slots.collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            device,
            header,
            head,
            slots: Mutex::new(slots),
        })
    }

    /// Returns the header, or its copy where it cannot be read.
    fn header(head: &MappedRegion, path: &Path) -> Result<DaxHeader, KernelError> {
        let mut found = Err(KernelError::Pool(format!(
            "{}: no pool is on it, or its header is damaged; is it the right device?",
            path.display()
        )));
        for at in [DAX_COPY_OFF, 0] {
            let mut header = DaxHeader::new_zeroed();
            match head.read(at, header.as_mut_bytes()) {
                Ok(()) if header.is_whole() => found = Ok(header),
                Ok(()) => {}
                Err(error) => tracing::warn!("{error}"),
            }
        }
        found
    }

    /// Removes the header, if it is that of this pool: the device is empty then.
    pub(super) fn wipe(path: &Path, pool_uuid: [u8; 16]) -> Result<(), KernelError> {
        let device = DaxDevice::open(path)?;
        let head = Self::head_of(&device)?;
        if Self::header(&head, path)?.pool_uuid == pool_uuid {
            zero(&head, 0, DAX_PART_BYTES)?;
        }
        Ok(())
    }

    /// The device's name.
    pub(super) const fn name(&self) -> &DeviceName {
        self.device.name()
    }

    /// Most bytes of a log.
    pub(super) const fn slot_bytes(&self) -> u64 {
        self.header.slot_bytes.get()
    }

    fn map(&self, off: u64, len: u64, max: u64) -> Result<MappedRegion, MediaError> {
        let (file, name) = (self.device.descriptor()?, self.device.name().clone());
        MappedRegion::of_device(file, name, self.device.part(off), len, max, true)
    }

    /// Maps the NVM.
    pub(super) fn nvm(&self) -> Result<MappedRegion, MediaError> {
        let len = self.header.nvm_bytes.get();
        self.map(self.header.nvm_off.get(), len, len)
    }

    /// Maps the journal.
    pub(super) fn journal(&self) -> Result<MappedRegion, MediaError> {
        let len = self.header.journal_bytes.get();
        self.map(self.header.journal_off.get(), len, len)
    }

    /// Where clients map the NVM.
    pub(super) fn nvm_at(&self) -> DaxAt {
        self.at(self.header.nvm_off.get())
    }

    fn at(&self, off: u64) -> DaxAt {
        DaxAt {
            off,
            align_bytes: self.device.part(off).align_bytes,
            is_device: true,
        }
    }

    fn slot_off(&self, slot: usize) -> u64 {
        self.header.slots_off.get() + slot as u64 * self.slot_bytes()
    }

    /// Writes a change of a slot to the row that does not count now, and fences it.
    fn set(&self, slots: &mut [Slot], slot: usize, log: Option<(SessionId, u64)>) -> Result<(), MediaError> {
        let generation = slots[slot].generation + 1;
        let at = row_off(slot as u64, generation % DAX_ROWS_PER_SLOT);
        self.head.write(at, DaxRow::new(log, generation).as_bytes())?;
        self.head.fence()?;
        slots[slot] = Slot { log, generation };
        Ok(())
    }

    /// Makes a log of zeros in a free slot; `None` if there is none that is long enough.
    ///
    /// # Errors
    /// Of the device.
    pub(super) fn take(
        self: &Arc<Self>,
        session: SessionId,
        len: u64,
    ) -> Result<Option<SlotLog>, MediaError> {
        if len > self.slot_bytes() {
            return Ok(None);
        }
        let mut slots = self.slots.lock();
        let file = self.device.descriptor()?;
        let free = (0..slots.len())
            .filter(|slot| slots[*slot].log.is_none())
            .find(|slot| !is_held(&file, self.slot_off(*slot)).unwrap_or(true));
        let Some(slot) = free else { return Ok(None) };
        let region = self.map(self.slot_off(slot), len, self.slot_bytes())?;
        zero(&region, 0, len)?;
        self.set(&mut slots, slot, Some((session, len)))?;
        drop(slots);
        Ok(Some(SlotLog {
            region,
            arena: Arc::clone(self),
            session,
        }))
    }

    fn slot_of(slots: &[Slot], session: SessionId) -> Option<(usize, u64)> {
        let mut all = slots.iter().enumerate();
        all.find_map(|(index, slot)| match slot.log {
            Some((of, len)) if of == session => Some((index, len)),
            _ => None,
        })
    }

    /// Maps the log of a session, if it has one here.
    ///
    /// # Errors
    /// Of the device.
    pub(super) fn find(self: &Arc<Self>, session: SessionId) -> Result<Option<SlotLog>, MediaError> {
        let found = Self::slot_of(&self.slots.lock(), session);
        let Some((slot, len)) = found else { return Ok(None) };
        let len = len.min(self.slot_bytes());
        Ok(Some(SlotLog {
            region: self.map(self.slot_off(slot), len, self.slot_bytes())?,
            arena: Arc::clone(self),
            session,
        }))
    }

    /// Sessions whose logs are here.
    pub(super) fn list(&self) -> Vec<SessionId> {
        let slots = self.slots.lock();
        slots.iter().filter_map(|slot| Some(slot.log?.0)).collect()
    }

    /// Frees the slot of a session, if it has one.
    ///
    /// # Errors
    /// Of the device.
    pub(super) fn free(&self, session: SessionId) -> Result<(), MediaError> {
        let mut slots = self.slots.lock();
        match Self::slot_of(&slots, session) {
            Some((slot, _)) => self.set(&mut slots, slot, None),
            None => Ok(()),
        }
    }

    /// Opens the device for the client of a session, with the slot's lock, and returns the place of its log.
    ///
    /// # Errors
    /// The host's.
    pub(super) fn share(&self, session: SessionId) -> Result<Option<File>, MediaError> {
        let Some((slot, _)) = Self::slot_of(&self.slots.lock(), session) else {
            return Ok(None);
        };
        let open = || {
            let file = File::options().read(true).write(true).open(self.device.path())?;
            hold_byte(&file, self.slot_off(slot))?;
            Ok(file)
        };
        open()
            .map(Some)
            .map_err(|error| super::logs::setup(self.device.path(), "share it", &error))
    }

    /// Where the client of a session maps its log.
    pub(super) fn log_at(&self, session: SessionId) -> Option<DaxAt> {
        let (slot, _) = Self::slot_of(&self.slots.lock(), session)?;
        Some(self.at(self.slot_off(slot)))
    }
}

fn row_off(slot: u64, row: u64) -> u64 {
    DAX_ROWS_OFF + (slot * DAX_ROWS_PER_SLOT + row) * DAX_ROW_SIZE
}

/// Returns the newest valid row of a slot. A slot whose rows cannot be read holds no log that can be found:
/// what was in it is lost, as with a log's file that cannot be opened.
fn read_slot(head: &MappedRegion, slot: u64) -> Result<Slot, MediaError> {
    let mut newest = Slot::default();
    for row in 0..DAX_ROWS_PER_SLOT {
        let mut bytes = DaxRow::new_zeroed();
        head.read(row_off(slot, row), bytes.as_mut_bytes())?;
        if bytes.is_valid() && bytes.generation.get() > newest.generation {
            newest = Slot {
                log: bytes.log(),
                generation: bytes.generation.get(),
            };
        }
    }
    Ok(newest)
}

/// A log in a slot.
pub(super) struct SlotLog {
    region: MappedRegion,
    arena: Arc<Arena>,
    session: SessionId,
}

impl Region for SlotLog {
    fn len_bytes(&self) -> u64 {
        self.region.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.region.read(off, out)
    }

    fn read_shared(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.region.read_shared(off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.region.write(off, src)
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        self.region.write_crc(off, src, seed)
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.region.fence()
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.region.sync(off, len)
    }

    /// Zeros the new part, which held other logs, before the table says that it belongs to this one.
    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        let mut slots = self.arena.slots.lock();
        let old = self.region.len_bytes();
        if new_len <= old {
            return Ok(());
        }
        self.region.grow(new_len)?;
        zero(&self.region, old, new_len - old)?;
        match Arena::slot_of(&slots, self.session) {
            Some((slot, _)) => self.arena.set(&mut slots, slot, Some((self.session, new_len))),
            None => Ok(()),
        }
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.region.allocate(off, len)
    }

    fn populate(&self, off: u64, len: u64) {
        self.region.populate(off, len);
    }

    fn as_ptr(&self) -> Option<NonNull<u8>> {
        self.region.as_ptr()
    }

    fn state(&self) -> DeviceState {
        self.region.state()
    }

    fn info(&self) -> DeviceInfo {
        self.region.info()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{DAX_PART_BYTES, NVM_MIN_BYTES, SLOTS, layout};

    #[test]
    fn device_of_any_size_has_sound_parts_and_most_of_it_is_nvm() {
        let mut total = 64 << 20;
        while total < 16 << 40 {
            let header = layout(total, [7; 16]).unwrap();
            assert!(header.is_sound() && header.is_whole(), "{total}");
            assert!(
                header.nvm_bytes.get() >= NVM_MIN_BYTES && header.nvm_bytes.get() * 2 > total,
                "{total}"
            );
            assert!(total < 256 << 20 || header.slots.get() >= SLOTS, "{total}");
            let end = header.slots_off.get() + header.slots.get() * header.slot_bytes.get();
            assert!(total - end < DAX_PART_BYTES, "{total}: {end}");
            total = total * 7 / 5 / 4096 * 4096;
        }
    }

    #[test]
    fn device_that_is_too_small_has_no_layout() {
        for total in [0, DAX_PART_BYTES, 16 << 20] {
            assert!(layout(total, [7; 16]).is_none(), "{total}");
        }
    }
}
