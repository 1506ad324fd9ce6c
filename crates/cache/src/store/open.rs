//! Formatting a store, and recovering its state after a clean stop, a kill or a power cut.

use super::admission::Door;
use super::beside;
use super::checkpoint::{self, CheckpointHead};
use super::hot::Hot;
use super::journal::{Change, Journal, Replay, replay};
use super::layout::{DEVICES_MAX, PAGE, StorePlan, Superblock};
use super::positions::Waiting;
use super::purge::{Purges, ScopeHash};
use super::put::Recent;
use super::shard::{Shard, State, Writer};
use super::{Options, StoreError};
use crate::device::Device;
use crate::index::{Index, Lap, LogPoint, Set};
use crate::policy::{Policy, Shape};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// The identity of a device within a cache.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    /// The cache's number.
    pub cache_id: u64,
    /// The device's number.
    pub store_id: u64,
    /// The cache's secret.
    pub secret: [u8; 16],
    /// Tells the pages of its device aside, if it gets one, from those of others.
    pub aside: u32,
    /// The device's number, and the number of devices.
    pub device: (u8, u8),
    /// Upper ends of the devices' shares of hashes.
    pub shares: [u32; DEVICES_MAX],
}

impl Identity {
    /// The superblock of a store with this identity.
    const fn apply(&self, mut layout: Superblock) -> Superblock {
        layout.cache_id = self.cache_id;
        layout.store_id = self.store_id;
        layout.secret = self.secret;
        layout.device = self.device.0;
        layout.device_count = self.device.1 as u32;
        layout.shares = self.shares;
        layout
    }
}

/// The result of a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Opened {
    /// The store was closed before.
    pub clean: bool,
    /// Pages of the journal that were replayed.
    pub journal_pages: u64,
    /// Pages of the journal with only one sound copy.
    pub healed_pages: u64,
    /// Pages of the index that were damaged; their sets are empty.
    pub damaged_pages: u64,
    /// All objects, or all older than some version, were discarded because of damage.
    pub gave_up: bool,
}

impl Shard {
    /// Makes a store on a device. Existing data on it is lost.
    ///
    /// # Errors
    /// The plan does not fit; the device failed.
    pub fn format(
        device: &dyn Device,
        plan: &StorePlan,
        identity: &Identity,
    ) -> Result<Superblock, StoreError> {
        let laid_out = Superblock::lay_out(plan, device.len_bytes(), plan.is_aside_of(device))?;
        let mut layout = identity.apply(laid_out);
        if layout.aside != 0 {
            layout.aside = identity.aside | 1;
            if beside::open(device, &layout, true)?.is_none() {
                let alone = Superblock::lay_out(plan, device.len_bytes(), false)?;
                layout = identity.apply(alone);
            }
        }
        // No old superblock may be found beside the new one.
        device.write_at(0, &vec![0; 2 * PAGE as usize])?;
        device.flush()?;
        // Older checkpoints and journals carry another store's number.
        let mut head = checkpoint::head_of(1, 0, 0, LogPoint(0), 0, 0);
        head.clean = 1;
        checkpoint::write(device, &layout, head, &Purges::new(0), |_, _| {})?;
        layout.write(device)?;
        layout.epoch = 1;
        layout.write(device)?;
        device.flush()?;
        Ok(layout)
    }

    /// Opens the store of a device.
    ///
    /// # Errors
    /// There is none, or the device failed.
    pub fn open(device: Arc<dyn Device>, options: Options) -> Result<(Arc<Self>, Opened), StoreError> {
        let (mut layout, both_copies) = Superblock::read(&*device)?;
        let found = load(&*device, &layout, options.resident_share)?;
        let Loaded {
            mut index,
            mut waiting,
            mut purges,
            checkpoint,
            replay,
            mut opened,
        } = found;
        let seen = layout
            .epoch
            .max(replay.epoch)
            .max(checkpoint.map_or(0, |head| head.epoch));
        let mut epoch = seen + 1;
        if !both_copies && epoch % 2 == layout.epoch % 2 {
            // Keeps the only sound superblock from being overwritten.
            epoch += 1;
        }
        let mut floor = checkpoint
            .map_or(u64::MAX, |head| head.floor)
            .max(layout.floor)
            .max(replay.floor);
        if floor > epoch << 40 {
            (floor, opened.gave_up) = (epoch << 40, true);
            index = new_index(&layout, options.resident_share);
            waiting = Waiting::default();
            purges = Purges::new(layout.purges_max as usize);
        }
        layout.epoch = epoch;
        layout.floor = floor;
        layout.write(&*device)?;
        device.flush()?;
        let segment = layout.segment_units();
        let head = LogPoint(replay.head.0.next_multiple_of(segment));
        let cold = checkpoint.is_none() || floor == epoch << 40;
        let (since, sequence) = match checkpoint {
            Some(checkpoint) if !cold => (checkpoint.journal, replay.sequence),
            // Beyond any page left in the ring.
            _ => (epoch << 32, epoch << 32),
        };
        let whole_sets = device.moves_writes() && layout.shape().policy() == Policy::Set;
        let mut state = new_state(&layout, &options, head, (index, waiting, purges));
        state.recent = Recent::new(whole_sets);
        let aside = match layout.aside {
            0 => None,
            _ => Some(beside::open(&*device, &layout, false)?.ok_or_else(|| {
                StoreError::Devices(format!(
                    "{} was made with a file beside it for its index, and has none here",
                    device.name()
                ))
            })?),
        };
        let version = (epoch << 40).max(replay.version);
        let journal = Journal {
            sequence,
            durable: sequence,
            since,
            waiting: Vec::new(),
        };
        let writer = new_writer(&layout, &options, head, version, journal, checkpoint);
        let shard = Self::from_parts((device, aside), layout, options, state, writer);
        if cold {
            // A new checkpoint keeps the next start from reading the damaged state again.
            let mut writer = shard.writer.lock();
            shard.checkpoint_locked(&mut writer, false)?;
            drop(writer);
        }
        Ok((Arc::new(shard), opened))
    }
}

/// Builds the state of a store that was just opened.
fn new_state(
    layout: &Superblock,
    options: &Options,
    head: LogPoint,
    (index, waiting, purges): (Index, Waiting, Purges),
) -> State {
    State {
        index,
        lap: Lap {
            units: layout.lap_units(),
            head,
        },
        segment: None,
        flushing: None,
        pending: BTreeMap::new(),
        waiting,
        index_made: 0,
        recent: Recent::new(false),
        hot: Hot::new(options.hot_bytes),
        purges,
        floor: layout.floor,
        mutations: [0; 256],
        frozen: false,
    }
}

/// Builds the writer of a store that was just opened.
fn new_writer(
    layout: &Superblock,
    options: &Options,
    head: LogPoint,
    version: u64,
    journal: Journal,
    checkpoint: Option<CheckpointHead>,
) -> Writer {
    Writer {
        version,
        journal,
        checkpoint: checkpoint.map_or(1, |head| head.sequence),
        door: Door::new(options.admission, layout.store_id ^ layout.epoch),
        last_flush: Instant::now(),
        promised: head.0,
        dirty: false,
        closed: false,
    }
}

/// Contents of a store's medium, read without opening the store.
#[derive(Debug, Clone, Copy)]
pub struct Inspection {
    /// The superblock.
    pub layout: Superblock,
    /// The result that a start would have.
    pub opened: Opened,
    /// Objects in the index; 0 for policies that keep none on the medium.
    pub objects: u64,
    /// The point up to which the log is written or promised, in units over all laps.
    pub log_head: u64,
    /// Purges in force.
    pub purges: u64,
    /// Bytes of memory that the index takes.
    pub index_bytes: u64,
}

/// Inspects a store without changing it. Another process may have it open; the result then is a recent state.
///
/// # Errors
/// There is no store, or the device failed.
pub fn inspect(device: &dyn Device) -> Result<Inspection, StoreError> {
    let (layout, _) = Superblock::read(device)?;
    let mut found = load(device, &layout, None)?;
    let head = found.replay.head;
    let lap = Lap {
        units: layout.lap_units(),
        head,
    };
    let shape = layout.shape();
    let kept = shape.policy().has_index() && shape.policy() != Policy::SetMemLru;
    let live = |set: Set| {
        set.entries()
            .filter(|entry| super::put::lives(&lap, shape, entry))
            .count() as u64
    };
    let sets = if kept { layout.sets } else { 0 };
    let objects = (0..sets)
        .filter_map(|number| found.index.get(number))
        .map(live)
        .sum();
    Ok(Inspection {
        layout,
        opened: found.opened,
        objects,
        log_head: head.0,
        purges: found.purges.len() as u64,
        index_bytes: found.index.memory_bytes(),
    })
}

fn new_index(layout: &Superblock, resident_share: Option<f64>) -> Index {
    let wished = resident_share.map(|share| (layout.sets as f64 * share.clamp(0.0, 1.0)) as u64);
    let mut index = Index::new(
        layout.shape(),
        layout.sets,
        wished.unwrap_or(layout.resident_sets),
    );
    if layout.aside != 0 {
        index.keep_left();
    }
    index
}

/// The state that the medium holds.
struct Loaded {
    index: Index,
    waiting: Waiting,
    purges: Purges,
    checkpoint: Option<CheckpointHead>,
    replay: Replay,
    opened: Opened,
}

/// Reads checkpoint and journal. Changes nothing.
fn load(device: &dyn Device, layout: &Superblock, resident_share: Option<f64>) -> Result<Loaded, StoreError> {
    let shape = layout.shape();
    let mut index = new_index(layout, resident_share);
    let mut purges = Purges::new(layout.purges_max as usize);
    let mut opened = Opened::default();
    let mut purges_lost = false;
    let checkpoint = checkpoint::newest(device, layout);
    if let Some(head) = checkpoint {
        opened.clean = head.clean == 1;
        let (found, damaged) = load_index(device, layout, &head, &mut index)?;
        opened.damaged_pages = damaged;
        match found {
            Some(found) => purges = found,
            None => purges_lost = true,
        }
    }
    let mut waiting = Waiting::default();
    let start = checkpoint.map_or(Replay::default(), |head| Replay {
        sequence: head.journal,
        head: LogPoint(head.head),
        version: head.version,
        // Pages of earlier epochs are left from before a crash, and were never flushed.
        epoch: head.epoch,
        ..Replay::default()
    });
    let mut folded = 0;
    let mut replay = replay(device, layout, start, |change| {
        if let Change::Purge {
            scope, prefix_len, ..
        } = change
            && purges.is_full_for(ScopeHash {
                hash: scope,
                prefix_len,
            })
        {
            folded = folded.max(purges.drop_older_half());
        }
        apply(shape, layout, &mut index, &mut waiting, &mut purges, change);
    })?;
    opened.gave_up = replay.floor > 0;
    replay.floor = replay.floor.max(folded);
    if purges_lost {
        // The purges are unknown.
        opened.gave_up = true;
        replay.floor = u64::MAX;
    }
    opened.clean &= replay.pages == 0;
    opened.journal_pages = replay.pages;
    opened.healed_pages = replay.healed;
    Ok(Loaded {
        index,
        waiting,
        purges,
        checkpoint,
        replay,
        opened,
    })
}

/// Fills the index from a checkpoint. Returns its purges, and the number of damaged pages.
fn load_index(
    device: &dyn Device,
    layout: &Superblock,
    head: &CheckpointHead,
    index: &mut Index,
) -> Result<(Option<Purges>, u64), StoreError> {
    let set_bytes = layout.shape().set_bytes() as u64;
    let mut damaged = Vec::new();
    let mut bytes = match index {
        Index::Full(full) if layout.shape().policy() != Policy::SetMemLru => full.bytes_mut(),
        _ => &mut [],
    };
    let len = (bytes.len() as u64).min(head.index_bytes);
    bytes = &mut bytes[..len as usize];
    let purges = checkpoint::read(device, layout, head, |from, content| {
        let Some(out) = bytes.get_mut(from as usize..) else {
            return;
        };
        match content {
            Some(content) => {
                let now = out.len().min(content.len());
                out[..now].copy_from_slice(&content[..now]);
            }
            None => damaged.push(from),
        }
    })?;
    for from in &damaged {
        // A set that is partly in a damaged page is emptied.
        let first = from / set_bytes * set_bytes;
        let end = (from + super::layout::PAGE_CONTENT)
            .next_multiple_of(set_bytes)
            .min(bytes.len() as u64);
        bytes[first as usize..end as usize].fill(0);
    }
    let pages = damaged.len() as u64;
    if let Index::Full(full) = index
        && layout.shape().policy() != Policy::SetMemLru
    {
        full.mend();
    }
    Ok((purges, pages))
}

/// Applies a change to the index or the purges.
fn apply(
    shape: Shape,
    layout: &Superblock,
    index: &mut Index,
    waiting: &mut Waiting,
    purges: &mut Purges,
    change: Change,
) {
    let fits = |set: u32, slot: u8| u64::from(set) < layout.sets && usize::from(slot) < shape.ways();
    match change {
        Change::Insert {
            set,
            slot,
            tag,
            place,
        } if fits(set, slot) && tag != 0 => {
            let mut found = index.get(u64::from(set)).unwrap_or_else(|| Set::empty(shape));
            let inserted = found.insert_at(usize::from(slot), tag, place);
            if shape.policy().has_position_file() {
                waiting.forget(set, usize::from(slot));
                if let Some(demoted) = inserted.demoted {
                    waiting.add(set, demoted.slot, demoted.place);
                }
            }
            index.put(u64::from(set), &found);
        }
        Change::Remove { set, slot, tag } if fits(set, slot) => {
            if let Some(mut found) = index.get(u64::from(set))
                && found.entry(usize::from(slot)).tag == tag
            {
                found.remove(usize::from(slot));
                index.put(u64::from(set), &found);
            }
        }
        Change::Purge {
            scope,
            prefix_len,
            version,
        } => {
            let scope = ScopeHash {
                hash: scope,
                prefix_len,
            };
            purges.add(scope, version);
        }
        _ => {}
    }
}
