//! The journal: changes of the index since the last checkpoint, in a ring of pages, each written twice. Each
//! page also records the point up to which the log is promised, so that no point of the log is used for two
//! writes.
//!
//! If a page is missing and a later page says that it was flushed, both copies are damaged: changes are lost,
//! so all objects older than the damage are discarded ([`Replay::floor`]).

use super::StoreError;
use super::layout::{PAGE, Superblock};
use crate::device::Device;
use crate::index::{LogPoint, Place};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

const MAGIC: u32 = 0x6A43_7656;
/// The most changes in a page.
pub const ENTRIES_MAX: usize = 168;
/// Pages read at once.
const READ_PAGES: u64 = 256;

/// A change of the index or of the purges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// An object was put into a slot.
    Insert {
        /// Its set.
        set: u32,
        /// Its slot.
        slot: u8,
        /// Its tag.
        tag: u8,
        /// Its place in the log.
        place: Place,
    },
    /// A slot was emptied.
    Remove {
        /// The set.
        set: u32,
        /// The slot.
        slot: u8,
        /// The tag that the slot must have; otherwise the change is ignored.
        tag: u8,
    },
    /// A scope was purged.
    Purge {
        /// The scope's hash.
        scope: u64,
        /// Bytes of a prefix; 0 for a tag or a host.
        prefix_len: u16,
        /// Objects with lower versions are purged.
        version: u64,
    },
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Packed {
    kind: u8,
    slot: u8,
    tag: u8,
    generation: u8,
    prefetch: u8,
    reserved: u8,
    prefix_len: u16,
    set: u32,
    position: u32,
    version: u64,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct PageHead {
    magic: u32,
    crc: u32,
    store_id: u64,
    sequence: u64,
    epoch: u64,
    /// The point up to which the log is promised.
    head: u64,
    /// Lower bound of the versions of later writes.
    version: u64,
    /// Pages before this one were flushed before this page was written.
    durable: u64,
    count: u32,
    reserved: u32,
}

const HEAD: usize = size_of::<PageHead>();
const _: () = assert!(HEAD + ENTRIES_MAX * size_of::<Packed>() <= PAGE as usize);

impl Change {
    fn pack(&self) -> Packed {
        let mut packed = Packed::new_zeroed();
        match *self {
            Self::Insert {
                set,
                slot,
                tag,
                place,
            } => {
                packed.kind = 1;
                (packed.set, packed.slot, packed.tag) = (set, slot, tag);
                packed.generation = place.generation;
                (packed.position, packed.prefetch) = (place.position, place.prefetch);
            }
            Self::Remove { set, slot, tag } => {
                packed.kind = 2;
                (packed.set, packed.slot, packed.tag) = (set, slot, tag);
            }
            Self::Purge {
                scope,
                prefix_len,
                version,
            } => {
                packed.kind = 3;
                (packed.set, packed.position) = (scope as u32, (scope >> 32) as u32);
                (packed.prefix_len, packed.version) = (prefix_len, version);
            }
        }
        packed
    }

    fn unpack(packed: &Packed) -> Option<Self> {
        let Packed { set, slot, tag, .. } = *packed;
        match packed.kind {
            1 => Some(Self::Insert {
                set,
                slot,
                tag,
                place: Place {
                    position: packed.position,
                    generation: packed.generation & 15,
                    prefetch: packed.prefetch,
                },
            }),
            2 => Some(Self::Remove { set, slot, tag }),
            3 => Some(Self::Purge {
                scope: u64::from(packed.set) | u64::from(packed.position) << 32,
                prefix_len: packed.prefix_len,
                version: packed.version,
            }),
            _ => None,
        }
    }
}

/// The writing side of the journal.
#[derive(Debug)]
pub struct Journal {
    /// Sequence number of the next page.
    pub sequence: u64,
    /// Pages before this are durable.
    pub durable: u64,
    /// The first page that the last checkpoint does not include.
    pub since: u64,
    /// Changes not yet written.
    pub waiting: Vec<Change>,
}

impl Journal {
    /// Whether a checkpoint is due.
    pub fn is_nearly_full(&self, layout: &Superblock) -> bool {
        let waiting = self.waiting.len().div_ceil(ENTRIES_MAX) as u64;
        self.sequence + waiting - self.since >= layout.journal[0].pages() * 3 / 4
    }

    /// Writes the waiting changes, at least one page. Durable after the device's next flush.
    ///
    /// # Errors
    /// The device failed, or the ring is full (an overdue checkpoint did not happen).
    pub fn write(
        &mut self,
        device: &dyn Device,
        layout: &Superblock,
        head: LogPoint,
        version: u64,
    ) -> Result<(), StoreError> {
        let pages = self.waiting.len().div_ceil(ENTRIES_MAX).max(1) as u64;
        let ring = layout.journal[0].pages();
        if self.sequence + pages - self.since > ring {
            return Err(StoreError::JournalFull);
        }
        let changes = std::mem::take(&mut self.waiting);
        let mut bytes = vec![0; (pages * PAGE) as usize];
        for (n, page) in bytes.chunks_exact_mut(PAGE as usize).enumerate() {
            let mine = changes.iter().skip(n * ENTRIES_MAX).take(ENTRIES_MAX);
            let mut count = 0;
            for (at, change) in page[HEAD..].chunks_exact_mut(size_of::<Packed>()).zip(mine) {
                at.copy_from_slice(change.pack().as_bytes());
                count += 1;
            }
            let page_head = PageHead {
                magic: MAGIC,
                crc: 0,
                store_id: layout.store_id,
                sequence: self.sequence + n as u64,
                epoch: layout.epoch,
                head: head.0,
                version,
                durable: self.durable,
                count,
                reserved: 0,
            };
            page[..HEAD].copy_from_slice(page_head.as_bytes());
            let crc = crc32c::crc32c(page);
            page[4..8].copy_from_slice(&crc.to_le_bytes());
        }
        for area in layout.journal {
            let mut rest = &bytes[..];
            let mut sequence = self.sequence;
            while !rest.is_empty() {
                let at = sequence % ring;
                let now = ((ring - at) * PAGE).min(rest.len() as u64) as usize;
                device.write_at(area.off + at * PAGE, &rest[..now])?;
                sequence += now as u64 / PAGE;
                rest = &rest[now..];
            }
        }
        self.sequence += pages;
        Ok(())
    }
}

fn parse(page: &[u8], store_id: u64) -> Option<PageHead> {
    let (head, _) = PageHead::read_from_prefix(page).ok()?;
    let crc = crc32c::crc32c(&page[..4]);
    let crc = crc32c::crc32c_append(crc32c::crc32c_append(crc, &[0; 4]), &page[8..]);
    let mine = head.magic == MAGIC && head.store_id == store_id;
    (mine && head.crc == crc && head.count as usize <= ENTRIES_MAX).then_some(head)
}

/// The result of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Replay {
    /// Sequence number of the next page.
    pub sequence: u64,
    /// The point up to which the log is promised.
    pub head: LogPoint,
    /// Lower bound of the versions of later writes.
    pub version: u64,
    /// The greatest epoch seen.
    pub epoch: u64,
    /// Objects with lower versions have to be discarded, because flushed pages are damaged. `u64::MAX`: all
    /// existing objects.
    pub floor: u64,
    /// Pages replayed.
    pub pages: u64,
    /// Pages with one damaged copy.
    pub healed: u64,
}

/// Reads the pages from `start.sequence` on and calls `apply` for each change. `start` holds the values of
/// the checkpoint.
///
/// # Errors
/// The device failed.
pub fn replay(
    device: &dyn Device,
    layout: &Superblock,
    start: Replay,
    mut apply: impl FnMut(Change),
) -> Result<Replay, StoreError> {
    let ring = layout.journal[0].pages();
    let mut found = start;
    let mut gap = None;
    let mut at = start.sequence;
    while at < found.sequence + ring {
        let now = READ_PAGES.min(ring - at % ring);
        let mut copies = [vec![0; (now * PAGE) as usize], vec![0; (now * PAGE) as usize]];
        for (copy, area) in copies.iter_mut().zip(layout.journal) {
            // A copy that cannot be read counts as damaged.
            if device.read_at(area.off + at % ring * PAGE, copy).is_err() {
                copy.fill(0);
            }
        }
        for n in 0..now {
            let range = (n * PAGE) as usize..((n + 1) * PAGE) as usize;
            let pages = [&copies[0][range.clone()], &copies[1][range]];
            let heads = pages.map(|page| parse(page, layout.store_id));
            if heads.iter().flatten().any(|head| head.sequence > at + n) {
                // The page was reused: a checkpoint newer than the one that was read is lost, and its changes
                // with it.
                found.floor = u64::MAX;
            }
            let heads = heads.map(|head| head.filter(|head| head.sequence == at + n));
            let sound = heads.iter().flatten().count() as u64;
            let best = heads
                .iter()
                .zip(pages)
                .find_map(|(head, page)| head.map(|head| (head, page)));
            let Some((page_head, page)) = best else {
                gap.get_or_insert(at + n);
                continue;
            };
            // The page was written before a crash, after which the ring continued from an earlier page.
            if page_head.epoch < found.epoch {
                gap.get_or_insert(at + n);
                continue;
            }
            match gap {
                // Never flushed: a power cut lost the page before it. This page was not flushed either.
                Some(gap) if page_head.durable <= gap => continue,
                Some(_) => found.floor = found.floor.max(page_head.version),
                None => {}
            }
            gap = None;
            found.healed += 2 - sound;
            found.pages += 1;
            found.sequence = at + n + 1;
            found.epoch = page_head.epoch;
            found.head = found.head.max(LogPoint(page_head.head));
            found.version = found.version.max(page_head.version);
            let packed = page[HEAD..].chunks_exact(size_of::<Packed>());
            for packed in packed.take(page_head.count as usize) {
                let packed = Packed::read_from_bytes(packed).ok();
                if let Some(change) = packed.and_then(|packed| Change::unpack(&packed)) {
                    apply(change);
                }
            }
        }
        at += now;
    }
    Ok(found)
}
