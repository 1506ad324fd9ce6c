//! The two copies of the superblock: chooses the valid one, and writes them. Does not interpret the areas
//! that they name.
//!
//! Invariant: after a power failure at any time one whole copy is valid, and describes the pool's present
//! state.

use crate::layout::Layout;
use crate::{Devices, Result, Store, StoreError};
use varve_format::features::{Incompat, LogIncompat};
use varve_format::superblock::{
    Area, FORMAT_VERSION, SUPERBLOCK_BLOCKS, SUPERBLOCK_SIZE, Superblock, SuperblockError,
};
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, BlockNo, Features};
use zerocopy::{FromBytes, IntoBytes};

impl Store {
    /// Upgrades a pool to the format version that this program writes. Returns its old version. Durable when
    /// this returns; a crash before leaves a pool of either version, and the next call finishes it. The pool
    /// must not be open. The content of its journal and logs stays there.
    ///
    /// # Errors
    /// No pool, or one that this program cannot serve; devices that do not fit it; a device failed.
    pub fn upgrade(devices: &Devices) -> Result<u32> {
        let sb = read_superblock(devices)?;
        Layout::validate(sb, devices)?;
        refuse_unknown(devices, &sb)?;
        upgrade_superblocks(devices, &sb)
    }

    /// Returns the version of the format that a pool has, and the features that it uses.
    ///
    /// # Errors
    /// No pool, or one that this program cannot serve; a device failed.
    pub fn format_of(devices: &Devices) -> Result<(u32, Features)> {
        let sb = read_superblock(devices)?;
        Ok((sb.version.get(), sb.features()))
    }
}

/// Reads the valid copy: the newer one of those that are whole. If this program does not know its version,
/// the older one is not used either.
pub(crate) fn read_superblock(devices: &Devices) -> Result<Superblock> {
    let mut best: std::result::Result<Superblock, _> = Err(SuperblockError::Magic);
    for number in SUPERBLOCK_BLOCKS {
        match (superblock_copy(devices, number)?, &best) {
            (Ok(copy), Ok(sb)) if copy.sequence.get() <= sb.sequence.get() => {}
            (Ok(copy), _) => best = Ok(copy),
            // A damaged copy tells more than a missing one.
            (Err(fault), Err(SuperblockError::Magic)) => best = Err(fault),
            (Err(_), _) => {}
        }
    }
    let served = best.and_then(|sb: Superblock| sb.check().map(|()| sb));
    served.map_err(|fault| superblock_fault(devices, fault))
}

/// Reads one copy, if it is whole.
fn superblock_copy(
    devices: &Devices,
    number: u64,
) -> Result<std::result::Result<Superblock, SuperblockError>> {
    let mut bytes = [0; SUPERBLOCK_SIZE];
    devices.nvm.read(BlockNo(number).offset_bytes(), &mut bytes)?;
    Ok(Superblock::read(&bytes))
}

fn superblock_fault(devices: &Devices, fault: SuperblockError) -> StoreError {
    StoreError::Superblock {
        device: devices.nvm.info().name.to_string(),
        fault,
    }
}

/// Refuses to repair or upgrade a pool with unknown features, even if they do not prevent its use: their data
/// would be taken for damage.
///
/// # Errors
/// The pool has such features.
pub(crate) fn refuse_unknown(devices: &Devices, sb: &Superblock) -> Result<()> {
    let unknown = sb.features().without(&Features::BUILT);
    if unknown.is_empty() {
        return Ok(());
    }
    Err(superblock_fault(devices, SuperblockError::Features(unknown)))
}

/// Returns the copies of the superblock that differ from the good one.
pub(crate) fn bad_superblocks(devices: &Devices, good: &Superblock) -> Result<Vec<u64>> {
    let mut bad = Vec::new();
    for number in SUPERBLOCK_BLOCKS {
        if superblock_copy(devices, number)? != Ok(*good) {
            bad.push(number);
        }
    }
    Ok(bad)
}

/// Bytes of a write to NVM that a crash leaves whole or not done.
const WORD_BYTES: usize = 8;

/// Returns the copies that a crash left behind while a feature was set or cleared: each word of them is
/// that of the good copy, or of the one before or after it. Any other copy is damaged.
pub(crate) fn interrupted_superblocks(devices: &Devices, good: &Superblock) -> Result<Vec<u64>> {
    let (mut interrupted, others) = (Vec::new(), neighbours(good));
    for number in bad_superblocks(devices, good)? {
        let mut bytes = [0; SUPERBLOCK_SIZE];
        devices.nvm.read(BlockNo(number).offset_bytes(), &mut bytes)?;
        let mixes = |other: &Superblock| {
            let sources = good
                .as_bytes()
                .chunks(WORD_BYTES)
                .zip(other.as_bytes().chunks(WORD_BYTES));
            let mut words = bytes.chunks(WORD_BYTES).zip(sources);
            words.all(|(word, (one, other))| word == one || word == other)
        };
        if others.iter().any(mixes) || is_of_devices(&bytes, good) {
            interrupted.push(number);
        }
    }
    Ok(interrupted)
}

/// Whether these bytes are of a copy to which the place of the device rows was being written, which nothing else
/// tells: sequence number and feature were durable before ([`write_devices_area`]).
fn is_of_devices(bytes: &[u8; SUPERBLOCK_SIZE], good: &Superblock) -> bool {
    let Ok(mut copy) = Superblock::read_from_bytes(bytes) else {
        return false;
    };
    let with = good.incompat.get() | Incompat::DEVICES.bits();
    if copy.sequence.get() != good.sequence.get().saturating_add(1) || copy.incompat.get() != with {
        return false;
    }
    copy.sequence = good.sequence;
    copy.incompat = good.incompat;
    copy.devices = good.devices;
    copy.crc32c = good.crc32c;
    copy == *good
}

/// Writes a superblock that says where the device rows are to both copies, one after the other. Durable when
/// this returns. The feature is durable in a copy before its area, so that a copy that a crash left behind is
/// told from a damaged one.
pub(crate) fn write_devices_area(devices: &Devices, old: &Superblock, new: Superblock) -> Result<()> {
    for number in SUPERBLOCK_BLOCKS {
        let mut before = *old;
        (before.sequence, before.incompat) = (new.sequence, new.incompat);
        write_superblocks(devices, before, &[number])?;
        write_superblocks(devices, new, &[number])?;
    }
    Ok(())
}

/// Returns the superblocks from which one write of the features leads to this one, or to which one leads.
fn neighbours(good: &Superblock) -> Vec<Superblock> {
    let sequence = good.sequence.get();
    let mut out = Vec::new();
    for sequence in [sequence.saturating_sub(1), sequence.saturating_add(1)] {
        for (incompat, log_incompat) in [
            (0, 0),
            (Incompat::SHARED_EXTENTS.bits(), 0),
            (0, LogIncompat::IN_PLACE.bits()),
        ] {
            let mut other = *good;
            other.sequence.set(sequence);
            other.incompat.set(good.incompat.get() ^ incompat);
            other.log_incompat.set(good.log_incompat.get() ^ log_incompat);
            out.push(other.sealed());
        }
        let mut other = *good;
        other.sequence.set(sequence);
        other.incompat.set(good.incompat.get() ^ Incompat::DEVICES.bits());
        out.push(other.sealed());
        // Before the first device was added.
        other.devices = Area::default();
        out.push(other.sealed());
    }
    out
}

/// As [`Store::upgrade`].
fn upgrade_superblocks(devices: &Devices, old: &Superblock) -> Result<u32> {
    let mut new = *old;
    if old.version.get() != FORMAT_VERSION {
        new.sequence.set(old.sequence.get().saturating_add(1));
        new = new.upgraded();
    }
    let stale = bad_superblocks(devices, &new)?;
    let not_counting = bad_superblocks(devices, old)?;
    // A copy that counts is written last.
    let (first, last): (Vec<u64>, Vec<u64>) = stale.iter().partition(|number| not_counting.contains(number));
    write_superblocks(devices, new, &first)?;
    write_superblocks(devices, new, &last)?;
    Ok(old.version.get())
}

/// Writes these copies, one after the other; durable when this returns.
pub(crate) fn write_superblocks(devices: &Devices, sb: Superblock, copies: &[u64]) -> Result<()> {
    for number in copies.iter().copied() {
        let mut block = [0; BLOCK_SIZE];
        block[..size_of::<Superblock>()].copy_from_slice(sb.as_bytes());
        let at = BlockNo(number).offset_bytes();
        devices.nvm.write(at, &block)?;
        devices.nvm.fence()?;
        devices.nvm.sync(at, BLOCK_BYTES)?;
    }
    Ok(())
}
