//! The position file: positions of `LogLru` that are not in memory, five bytes a slot. New positions wait in
//! memory and are written in one sweep over the file, so that writing an object costs no seek here.

use super::StoreError;
use super::checkpoint::{seal, unseal};
use super::layout::{PAGE, PAGE_CONTENT, Superblock};
use crate::device::Device;
use crate::index::Place;
use crate::policy::Shape;
use std::collections::BTreeMap;

/// Bytes of a position and a prefetch length.
const ENTRY: usize = 5;
/// Pages that a sweep reads and writes at once.
const SWEEP_PAGES: u64 = 256;

/// Number of sets whose positions fit a page.
pub const fn sets_a_page(shape: Shape) -> u64 {
    PAGE_CONTENT / (ENTRY * shape.ways()) as u64
}

/// A set and slot, and a position and prefetch length.
pub type SlotPosition = ((u32, u8), (u32, u8));

/// Positions that are not yet in the file, by set and slot.
#[derive(Debug, Default)]
pub struct Waiting(BTreeMap<(u32, u8), (u32, u8)>);

impl Waiting {
    /// Adds a position.
    pub fn add(&mut self, set: u32, slot: usize, place: Place) {
        self.0.insert((set, slot as u8), (place.position, place.prefetch));
    }

    /// Drops the position of a slot whose object is gone or has its position in memory.
    pub fn forget(&mut self, set: u32, slot: usize) {
        self.0.remove(&(set, slot as u8));
    }

    /// The position of a slot, if it waits here.
    pub fn get(&self, set: u32, slot: usize) -> Option<(u32, u8)> {
        self.0.get(&(set, slot as u8)).copied()
    }

    /// Number of waiting positions.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns all waiting positions; the caller removes them with [`done`](Self::done) when they are
    /// written.
    pub fn copy(&self) -> Vec<SlotPosition> {
        self.0.iter().map(|(slot, position)| (*slot, *position)).collect()
    }

    /// Removes positions that were written, except those that changed meanwhile.
    pub fn done(&mut self, written: &[SlotPosition]) {
        for (slot, position) in written {
            if self.0.get(slot) == Some(position) {
                self.0.remove(slot);
            }
        }
    }
}

/// Reads a position from the file. `None` if its page is damaged or was never written.
///
/// # Errors
/// The device failed.
pub fn read(
    device: &dyn Device,
    layout: &Superblock,
    set: u32,
    slot: usize,
) -> Result<Option<(u32, u8)>, StoreError> {
    let shape = layout.shape();
    let (number, within) = (
        u64::from(set) / sets_a_page(shape),
        u64::from(set) % sets_a_page(shape),
    );
    let mut page = vec![0; PAGE as usize];
    device.read_at(layout.positions_file.off + number * PAGE, &mut page)?;
    let Some(content) = unseal(&page, layout.positions_id(), None, number) else {
        return Ok(None);
    };
    let at = (within as usize * shape.ways() + slot) * ENTRY;
    let entry = &content[at..at + ENTRY];
    let position = u32::from_le_bytes(entry[..4].try_into().expect("four bytes"));
    Ok(Some((position, entry[4])))
}

/// Writes positions (in order of set and slot) to the file, in one sweep. Returns the bytes written.
///
/// # Errors
/// The device failed.
pub fn sweep(
    device: &dyn Device,
    layout: &Superblock,
    positions: &[SlotPosition],
) -> Result<u64, StoreError> {
    let shape = layout.shape();
    let page_of = |set: u32| u64::from(set) / sets_a_page(shape);
    let (mut rest, mut written) = (positions, 0);
    while let Some(((set, _), _)) = rest.first() {
        let first = page_of(*set) / SWEEP_PAGES * SWEEP_PAGES;
        let pages = SWEEP_PAGES.min(layout.positions_file.pages() - first);
        let count = rest.partition_point(|((set, _), _)| page_of(*set) < first + pages);
        let (mine, others) = rest.split_at(count);
        rest = others;
        let off = layout.positions_file.off + first * PAGE;
        let mut bytes = vec![0; (pages * PAGE) as usize];
        device.read_at(off, &mut bytes)?;
        for (n, page) in bytes.chunks_exact_mut(PAGE as usize).enumerate() {
            let number = first + n as u64;
            if unseal(page, layout.positions_id(), None, number).is_none() {
                // A page that was never written, or is damaged: position u32::MAX stands for none.
                page.fill(0xFF);
            }
            let from = mine.partition_point(|((set, _), _)| page_of(*set) < number);
            for ((set, slot), (position, prefetch)) in &mine[from..] {
                if page_of(*set) != number {
                    break;
                }
                let within = u64::from(*set) % sets_a_page(shape);
                let at = (within as usize * shape.ways() + usize::from(*slot)) * ENTRY;
                page[at..at + 4].copy_from_slice(&position.to_le_bytes());
                page[at + 4] = *prefetch;
            }
            seal(page, layout.positions_id(), 0, number);
        }
        device.write_at(off, &bytes)?;
        written += bytes.len() as u64;
    }
    Ok(written)
}
