//! Checkpoints: the whole index on the medium, in two areas used in turn, so that a start reads one
//! sequential range.

use super::StoreError;
use super::layout::{PAGE, PAGE_CONTENT, Superblock};
use super::purge::Purges;
use crate::device::Device;
use crate::index::LogPoint;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAGIC: u32 = 0x6B43_7656;
/// Pages read and written at once.
const BATCH_PAGES: usize = 256;

/// The first page of a checkpoint, written twice, after all others are durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct CheckpointHead {
    magic: u32,
    crc: u32,
    store_id: u64,
    /// Number of the checkpoint.
    pub sequence: u64,
    /// The epoch that wrote it.
    pub epoch: u64,
    /// The first journal page that the checkpoint does not include.
    pub journal: u64,
    /// The point up to which the log was promised.
    pub head: u64,
    /// Lower bound of the versions of later writes.
    pub version: u64,
    /// Objects with lower versions are discarded.
    pub floor: u64,
    /// Number of purges that follow.
    pub purges: u64,
    /// Bytes of the index that follow.
    pub index_bytes: u64,
    /// Whether the store was closed after this checkpoint.
    pub clean: u64,
}

impl CheckpointHead {
    fn parse(page: &[u8], layout: &Superblock) -> Option<Self> {
        let (head, _) = Self::read_from_prefix(page).ok()?;
        let mut plain = head;
        plain.crc = 0;
        let sound = head.magic == MAGIC
            && head.store_id == layout.store_id
            && head.crc == crc32c::crc32c(plain.as_bytes())
            && head.purges <= layout.purges_max;
        sound.then_some(head)
    }
}

/// The end of a page.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Seal {
    page: u64,
    sequence: u32,
    crc: u32,
}

fn crc(content: &[u8], store_id: u64, sequence: u32, page: u64) -> u32 {
    let crc = crc32c::crc32c_append(crc32c::crc32c(content), &store_id.to_le_bytes());
    crc32c::crc32c_append(
        crc32c::crc32c_append(crc, &sequence.to_le_bytes()),
        &page.to_le_bytes(),
    )
}

/// Seals a page in place: its last 16 bytes hold its number and the sequence number of its checkpoint or
/// sweep.
pub fn seal(page: &mut [u8], store_id: u64, sequence: u32, number: u64) {
    let (content, end) = page.split_at_mut(PAGE_CONTENT as usize);
    let crc = crc(content, store_id, sequence, number);
    end.copy_from_slice(
        Seal {
            page: number,
            sequence,
            crc,
        }
        .as_bytes(),
    );
}

/// Returns the content of a sealed page. `sequence`: `None` for any.
pub fn unseal(page: &[u8], store_id: u64, sequence: Option<u32>, number: u64) -> Option<&[u8]> {
    let (content, end) = page.split_at(PAGE_CONTENT as usize);
    let seal = Seal::read_from_bytes(end).ok()?;
    let sound = seal.page == number
        && sequence.is_none_or(|sequence| sequence == seal.sequence)
        && seal.crc == crc(content, store_id, seal.sequence, number);
    sound.then_some(content)
}

/// Writes pages of content one after the other.
struct Pages<'d> {
    device: &'d dyn Device,
    off: u64,
    store_id: u64,
    sequence: u32,
    number: u64,
    batch: Vec<u8>,
}

impl Pages<'_> {
    fn push(&mut self, content: &[u8]) -> Result<(), StoreError> {
        let start = self.batch.len();
        self.batch.extend_from_slice(content);
        self.batch.resize(start + PAGE as usize, 0);
        seal(
            &mut self.batch[start..],
            self.store_id,
            self.sequence,
            self.number,
        );
        self.number += 1;
        if self.batch.len() == BATCH_PAGES * PAGE as usize {
            self.write()?;
        }
        Ok(())
    }

    fn write(&mut self) -> Result<(), StoreError> {
        self.device.write_at(self.off, &self.batch)?;
        self.off += self.batch.len() as u64;
        self.batch.clear();
        Ok(())
    }
}

/// Writes a checkpoint and makes it durable. `index(from, out)` copies bytes of the packed index; `head`
/// describes the checkpoint, and its sequence number chooses the area.
///
/// # Errors
/// The device failed; the previous checkpoint remains valid.
pub fn write(
    device: &dyn Device,
    layout: &Superblock,
    mut head: CheckpointHead,
    purges: &Purges,
    mut index: impl FnMut(u64, &mut [u8]),
) -> Result<(), StoreError> {
    let area = layout.checkpoint[(head.sequence % 2) as usize];
    let mut pages = Pages {
        device,
        off: area.off + 2 * PAGE,
        store_id: layout.store_id,
        sequence: head.sequence as u32,
        number: 0,
        batch: Vec::new(),
    };
    // Written twice: without its purges a checkpoint is useless.
    let packed = purges.pack();
    for content in packed
        .chunks(PAGE_CONTENT as usize)
        .chain(packed.chunks(PAGE_CONTENT as usize))
    {
        pages.push(content)?;
    }
    let mut content = vec![0; PAGE_CONTENT as usize];
    let mut from = 0;
    while from < head.index_bytes {
        let now = PAGE_CONTENT.min(head.index_bytes - from) as usize;
        index(from, &mut content[..now]);
        pages.push(&content[..now])?;
        from += now as u64;
    }
    if !pages.batch.is_empty() {
        pages.write()?;
    }
    device.flush()?;
    head.magic = MAGIC;
    head.store_id = layout.store_id;
    head.purges = purges.len() as u64;
    head.crc = 0;
    head.crc = crc32c::crc32c(head.as_bytes());
    let mut first = vec![0; 2 * PAGE as usize];
    for copy in first.chunks_exact_mut(PAGE as usize) {
        copy[..size_of::<CheckpointHead>()].copy_from_slice(head.as_bytes());
    }
    device.write_at(area.off, &first)?;
    Ok(device.flush()?)
}

/// Returns a head for [`write`].
pub fn head_of(
    sequence: u64,
    epoch: u64,
    journal: u64,
    head: LogPoint,
    version: u64,
    floor: u64,
) -> CheckpointHead {
    CheckpointHead {
        magic: 0,
        crc: 0,
        store_id: 0,
        sequence,
        epoch,
        journal,
        head: head.0,
        version,
        floor,
        purges: 0,
        index_bytes: 0,
        clean: 0,
    }
}

/// Returns the newest checkpoint whose head is sound; `None` if there is none.
pub fn newest(device: &dyn Device, layout: &Superblock) -> Option<CheckpointHead> {
    let heads = layout.checkpoint.iter().flat_map(|area| {
        let mut first = vec![0; 2 * PAGE as usize];
        let read = device.read_at(area.off, &mut first);
        let copies: Vec<_> = first
            .chunks(PAGE as usize)
            .filter_map(|page| CheckpointHead::parse(page, layout))
            .collect();
        copies.into_iter().take(if read.is_ok() { 2 } else { 0 })
    });
    heads.max_by_key(|head| head.sequence)
}

/// Reads a checkpoint: its purges (`None` if damaged), and its index page by page, `None` for a damaged one.
///
/// # Errors
/// The device failed at the purges; pages of the index that cannot be read count as damaged.
pub fn read(
    device: &dyn Device,
    layout: &Superblock,
    head: &CheckpointHead,
    mut index: impl FnMut(u64, Option<&[u8]>),
) -> Result<Option<Purges>, StoreError> {
    let area = layout.checkpoint[(head.sequence % 2) as usize];
    let sequence = Some(head.sequence as u32);
    let purge_bytes = head.purges * super::purge::PACKED_BYTES as u64;
    let purge_pages = purge_bytes.div_ceil(PAGE_CONTENT);
    let index_pages = head.index_bytes.div_ceil(PAGE_CONTENT);
    let copies = 2 * purge_pages;
    let mut packed = vec![None; purge_pages as usize];
    let all = (copies + index_pages).min(area.pages() - 2);
    let mut number = 0;
    while number < all {
        let now = (all - number).min(BATCH_PAGES as u64);
        let mut batch = vec![0; (now * PAGE) as usize];
        let readable = device.read_at(area.off + (2 + number) * PAGE, &mut batch).is_ok();
        for (n, page) in batch.chunks_exact(PAGE as usize).enumerate() {
            let number = number + n as u64;
            let content = unseal(page, layout.store_id, sequence, number).filter(|_| readable);
            match number.checked_sub(copies) {
                None => {
                    let known = &mut packed[(number % purge_pages) as usize];
                    if known.is_none() {
                        *known = content.map(<[u8]>::to_vec);
                    }
                }
                Some(page) => index(page * PAGE_CONTENT, content),
            }
        }
        number += now;
    }
    let Some(pages) = packed.into_iter().collect::<Option<Vec<_>>>() else {
        return Ok(None);
    };
    let mut packed = pages.concat();
    packed.truncate(purge_bytes as usize);
    Ok(Some(Purges::unpack(&packed, layout.purges_max as usize)))
}
