//! The devices of a pool whose tiers have several: reads their rows from NVM, finds each by its label, and
//! makes one device of those of a tier. Changes nothing; what changes rows is in `tx/devices`.
//!
//! A pool without the feature `devices` has one device a tier, the one that was given.

use crate::layout::Layout;
use crate::reader::POOL_INO;
use crate::{Devices, Result, StoreError};
use std::sync::Arc;
use varve_format::device::{DeviceLabel, DeviceRow, device_rows};
use varve_format::features::Incompat;
use varve_format::state::{POOL_STATE_SIZE, PoolState};
use varve_format::superblock::Superblock;
use varve_format::{
    BLOCK_BYTES, BLOCK_HEADER_SIZE, BLOCK_SIZE, Block, BlockHeader, BlockKind, BlockNo, Tier, verify_block,
};
use varve_media::span::{Span, SpanPart};
use varve_media::{BlockDevice, DeviceState, Region};
use zerocopy::FromBytes;

/// Device rows in use, with their numbers.
pub(crate) type Rows = Vec<(usize, DeviceRow)>;

/// Returns the device rows of a pool whose journal was replayed; none if it does not use them.
///
/// # Errors
/// The rows cannot be read, or cannot be: no device but a tier's first can be found then, so that the pool is
/// neither opened nor repaired.
pub(crate) fn read_rows(nvm: &dyn Region, sb: &Superblock) -> Result<Option<Rows>> {
    if sb.features().incompat.get() & Incompat::DEVICES.bits() == 0 {
        return Ok(None);
    }
    let area = sb.devices;
    let blocks: Vec<_> = (area.start.get()..area.end())
        .map(|number| fixed_block(nvm, BlockNo(number), BlockKind::DeviceTable))
        .collect();
    let state = BlockNo(sb.state.start.get());
    let used = match fixed_block(nvm, state, BlockKind::PoolState) {
        // Set in the superblock, and a crash came before the first use.
        Ok(block) => {
            let body = &block[BLOCK_HEADER_SIZE..BLOCK_HEADER_SIZE + POOL_STATE_SIZE];
            let state = PoolState::read_from_bytes(body);
            state.is_ok_and(|state| state.features.incompat.get() & Incompat::DEVICES.bits() != 0)
        }
        // One block that is whole tells that there are rows: without them a repair would take all that is on
        // further devices for damage.
        Err(_) => blocks.iter().any(Result::is_ok),
    };
    if !used {
        return Ok(None);
    }
    let blocks: Vec<Box<Block>> = blocks.into_iter().collect::<Result<_>>().map_err(|error| {
        StoreError::Devices(format!(
            "the table of the pool's devices cannot be read ({error}): without it nothing on SSD and HDD can \
             be found, so the pool is left as it is. Restore NVM from a copy"
        ))
    })?;
    let bodies: Vec<&[u8]> = blocks.iter().map(|block| &block[BLOCK_HEADER_SIZE..]).collect();
    match device_rows(&bodies, sb) {
        Ok(rows) => Ok(Some(rows)),
        Err(fault) => Err(StoreError::Damaged(fault.to_string())),
    }
}

fn fixed_block(nvm: &dyn Region, at: BlockNo, kind: BlockKind) -> Result<Box<Block>> {
    let mut bytes: Box<Block> = Box::new([0; BLOCK_SIZE]);
    nvm.read(at.offset_bytes(), bytes.as_mut_slice())?;
    verify_block(&bytes)
        .and_then(|()| BlockHeader::of(&bytes).expect(kind, POOL_INO, at))
        .map_err(|fault| StoreError::Block { block: at, fault })?;
    Ok(bytes)
}

/// A further device that was given, and what its first bytes say.
struct Candidate<'d> {
    tier: Tier,
    device: &'d Arc<dyn BlockDevice>,
    label: Option<DeviceLabel>,
    /// Why the label could not be read.
    unread: Option<String>,
    taken: bool,
}

impl Candidate<'_> {
    /// For a person: what it is instead of the device that is missing.
    fn told(&self, pool: [u8; 16]) -> String {
        if let DeviceState::Failed { reason } = self.device.state() {
            return reason.to_string();
        }
        if let Some(why) = &self.unread {
            return format!("{} cannot be read: {why}", self.device.name());
        }
        let what = match self.label {
            None => "no label of a Varve device",
            Some(label) if label.pool_uuid != pool => "the label of another pool",
            Some(_) => "the label of a device of this pool that was taken out, or never put in",
        };
        format!("{} has {what}", self.device.name())
    }
}

/// Reads the label of a device; `None`: it has none.
pub(crate) fn label_of(device: &dyn BlockDevice) -> Result<Option<DeviceLabel>> {
    let mut bytes = vec![0; BLOCK_SIZE];
    if device.len_bytes() < BLOCK_BYTES {
        return Ok(None);
    }
    device.read(0, &mut bytes)?;
    Ok(DeviceLabel::read(&bytes))
}

/// The text of a device's UUID.
pub(crate) fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    parts.join("-")
}

/// Finds the devices of all rows and makes one device of those of each tier; notes the rows in the layout.
///
/// # Errors
/// `Devices`: one is missing, too small, or not the one that the row names.
pub(crate) fn attach(
    devices: &Devices,
    layout: &Layout,
    rows: Option<&Rows>,
) -> Result<[Option<Arc<Span>>; 2]> {
    let none = Rows::new();
    if rows.is_some() {
        layout.set_device_table(layout.sb.devices);
    }
    let rows = rows.unwrap_or(&none);
    let mut candidates = Vec::new();
    for (tier, device) in &devices.more {
        // One that cannot be read need not be a part of the pool.
        let (label, unread) = match label_of(&**device) {
            Ok(label) => (label, None),
            Err(error) => (None, Some(error.to_string())),
        };
        candidates.push(Candidate {
            tier: *tier,
            device,
            label,
            unread,
            taken: false,
        });
    }
    let mut spans = [None, None];
    for (slot, tier) in spans.iter_mut().zip([Tier::Ssd, Tier::Hdd]) {
        if layout.sb.tier(tier).blocks.get() > 0 {
            *slot = Some(Arc::new(attach_tier(
                devices,
                layout,
                rows,
                tier,
                &mut candidates,
            )?));
        }
    }
    for (row_slot, row) in rows {
        layout.add_device(*row_slot, row);
    }
    for candidate in candidates.iter().filter(|candidate| !candidate.taken) {
        let tier = candidate.tier.name();
        let told = candidate.told(layout.sb.pool_uuid);
        tracing::warn!("{told}: it is given as a {tier} device and not part of the pool, so it is not used");
    }
    Ok(spans)
}

fn attach_tier(
    devices: &Devices,
    layout: &Layout,
    rows: &Rows,
    tier: Tier,
    candidates: &mut [Candidate<'_>],
) -> Result<Span> {
    let own = || {
        rows.iter()
            .map(|(_, row)| row)
            .filter(|row| row.tier() == Some(tier))
    };
    let first = own().find(|row| row.first.get() == 0);
    let first_is_gone = first.is_some_and(|row| row.state == DeviceRow::GONE);
    if !first_is_gone {
        layout.fits_first(tier, devices)?;
    }
    let mut parts = vec![SpanPart {
        first_byte: 0,
        len_bytes: layout.sb.tier(tier).blocks.get() * BLOCK_BYTES,
        data_offset: 0,
        device: devices.block_device(tier).filter(|_| !first_is_gone).cloned(),
    }];
    for row in own().filter(|row| row.first.get() > 0) {
        let device = match row.state {
            DeviceRow::GONE => None,
            _ => Some(find(row, layout, tier, devices, candidates)?),
        };
        parts.push(SpanPart {
            first_byte: row.first.get() * BLOCK_BYTES,
            len_bytes: row.blocks.get() * BLOCK_BYTES,
            data_offset: row.data_offset.get(),
            device,
        });
    }
    Ok(Span::new(parts)?)
}

/// Finds the device of a row among those given.
fn find(
    row: &DeviceRow,
    layout: &Layout,
    tier: Tier,
    devices: &Devices,
    candidates: &mut [Candidate<'_>],
) -> Result<Arc<dyn BlockDevice>> {
    let pool = layout.sb.pool_uuid;
    let is_it = |label: &DeviceLabel| label.pool_uuid == pool && label.uuid == row.uuid;
    let mut fitting: Vec<&mut Candidate<'_>> = candidates
        .iter_mut()
        .filter(|candidate| candidate.label.as_ref().is_some_and(is_it))
        .collect();
    let refuse = |text: String| Err(StoreError::Devices(text));
    let uuid = uuid_text(&row.uuid);
    if let [one, other, ..] = &fitting[..] {
        return refuse(format!(
            "{} and {} both have the label of device {uuid}: one is a copy of the other; leave the copy out",
            one.device.name(),
            other.device.name()
        ));
    }
    let Some(found) = fitting.pop() else {
        return refuse(missing(row, layout, tier, devices, candidates));
    };
    found.taken = true;
    let name = found.device.name();
    if found.tier != tier {
        return refuse(format!(
            "{name} is given as a {} device, and its label says that it is of the {} tier: correct the \
             settings",
            found.tier.name(),
            tier.name()
        ));
    }
    if found.label != Some(DeviceLabel::of(row, pool)) {
        return refuse(format!(
            "{name} has the label of device {uuid}, but of another size or place than the pool knows: it was \
             restored from a copy, or NVM was. Give the device that belongs to this NVM"
        ));
    }
    let (has, needed) = (found.device.len_bytes(), row.needed_bytes());
    if has < needed {
        return refuse(format!(
            "{name} has {has} bytes, and the pool uses {needed} of device {uuid}: it has become \
             smaller. Give it its old size again"
        ));
    }
    Ok(Arc::clone(found.device))
}

/// For a person: which device is missing, what was given instead, and what to do.
fn missing(
    row: &DeviceRow,
    layout: &Layout,
    tier: Tier,
    devices: &Devices,
    candidates: &[Candidate<'_>],
) -> String {
    let pool = layout.sb.pool_uuid;
    let mut told: Vec<String> = candidates
        .iter()
        .filter(|candidate| !candidate.taken && candidate.tier == tier)
        // Of one with a label of this pool the row is another one.
        .filter(|candidate| candidate.label.is_none_or(|label| label.pool_uuid != pool))
        .map(|candidate| candidate.told(pool))
        .collect();
    if let Some(first) = devices.block_device(tier)
        && let Ok(Some(label)) = label_of(&**first)
        && label.pool_uuid == pool
        && label.uuid == row.uuid
    {
        told.push(format!(
            "{} has its label, but is given as the first device of the tier: put it after the first",
            first.name()
        ));
    }
    let instead = match told.is_empty() {
        true => String::new(),
        false => format!(" ({})", told.join("; ")),
    };
    format!(
        "a device of the {} tier is missing: {}, of {} MiB{instead}. Attach it, or correct its path in the \
         pool's settings; without it the pool is not opened, and nothing on the other devices was changed",
        tier.name(),
        uuid_text(&row.uuid),
        (row.blocks.get() * BLOCK_BYTES) >> 20,
    )
}
