//! The two copies of the superblock: which one counts, and writing them. Does not know what the areas that
//! they name hold.
//!
//! Invariant: whenever the power goes, one whole copy counts, and it is of the pool as it is.

use crate::layout::Layout;
use crate::{Devices, Result, Store, StoreError};
use varve_format::superblock::{
    FORMAT_VERSION, SUPERBLOCK_BLOCKS, SUPERBLOCK_SIZE, Superblock, SuperblockError,
};
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, BlockNo, Features};
use zerocopy::IntoBytes;

impl Store {
    /// Brings a pool up to the version of the format that this program writes. Answers the version that it
    /// had. Durable when this returns; a crash before leaves a pool of either version, and the next call
    /// finishes it. Nobody may have the pool open. What waits in its journal and logs stays there.
    ///
    /// # Errors
    /// No pool, or one that this program cannot serve; devices that do not fit it; a device failed.
    pub fn upgrade(devices: &Devices) -> Result<u32> {
        let sb = read_superblock(devices)?;
        Layout::validate(sb, devices)?;
        refuse_unknown(devices, &sb)?;
        upgrade_superblocks(devices, &sb)
    }

    /// The version of the format that a pool has, and the features that it uses.
    ///
    /// # Errors
    /// No pool, or one that this program cannot serve; a device failed.
    pub fn format_of(devices: &Devices) -> Result<(u32, Features)> {
        let sb = read_superblock(devices)?;
        Ok((sb.version.get(), sb.features()))
    }
}

/// The copy that counts: of those that are whole the newer one. If this program does not know its version,
/// the older one does not count either.
pub(crate) fn read_superblock(devices: &Devices) -> Result<Superblock> {
    let mut best: std::result::Result<Superblock, _> = Err(SuperblockError::Magic);
    for number in SUPERBLOCK_BLOCKS {
        match (superblock_copy(devices, number)?, &best) {
            (Ok(copy), Ok(sb)) if copy.sequence.get() <= sb.sequence.get() => {}
            (Ok(copy), _) => best = Ok(copy),
            // Damage tells more than nothing at all.
            (Err(fault), Err(SuperblockError::Magic)) => best = Err(fault),
            (Err(_), _) => {}
        }
    }
    let served = best.and_then(|sb: Superblock| sb.check().map(|()| sb));
    served.map_err(|fault| superblock_fault(devices, fault))
}

/// One copy, if it is whole.
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

/// Refuses to repair or upgrade a pool with features that need not be known to use it: what they left would
/// be taken for damage.
///
/// # Errors
/// There are such.
pub(crate) fn refuse_unknown(devices: &Devices, sb: &Superblock) -> Result<()> {
    let unknown = sb.features().without(&Features::BUILT);
    if unknown.is_empty() {
        return Ok(());
    }
    Err(superblock_fault(devices, SuperblockError::Features(unknown)))
}

/// Copies of the superblock that are not as the good one.
pub(crate) fn bad_superblocks(devices: &Devices, good: &Superblock) -> Result<Vec<u64>> {
    let mut bad = Vec::new();
    for number in SUPERBLOCK_BLOCKS {
        if superblock_copy(devices, number)? != Ok(*good) {
            bad.push(number);
        }
    }
    Ok(bad)
}

/// Whole copies of the superblock that were written before this one.
pub(crate) fn older_superblocks(devices: &Devices, newest: &Superblock) -> Result<Vec<u64>> {
    let mut older = Vec::new();
    for number in SUPERBLOCK_BLOCKS {
        if superblock_copy(devices, number)?.is_ok_and(|copy| copy.sequence.get() < newest.sequence.get()) {
            older.push(number);
        }
    }
    Ok(older)
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
