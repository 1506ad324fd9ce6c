//! The file of sets: sets of `SetMemLru` that left memory, on a device aside. They are read back from there
//! instead of from the Disk Table, a small page instead of a whole set, and with their order of use.
//!
//! It is a part of memory and not of the store: pages of an earlier epoch, or from before the index was made
//! anew, are not taken. So nothing in it can be older than the Disk Table.

use super::StoreError;
use super::checkpoint::{seal, unseal};
use super::layout::{PAGE, PAGE_CONTENT, Superblock};
use crate::device::Device;
use crate::index::Set;
use crate::policy::Shape;

/// The byte before a set that is there.
const HERE: u8 = 1;

const fn set_bytes(shape: Shape) -> usize {
    1 + shape.set_bytes()
}

/// Number of sets in a page.
pub const fn sets_a_page(shape: Shape) -> u64 {
    PAGE_CONTENT / set_bytes(shape) as u64
}

/// The number in the seals of pages that count: of this opening of the store, and this making of its index.
const fn sequence(layout: &Superblock, made: u8) -> u32 {
    (layout.epoch as u32) << 8 | made as u32
}

/// Page of a set, and its offset in there.
fn place(layout: &Superblock, set: u32) -> (u64, usize) {
    let each = sets_a_page(layout.shape());
    let within = u64::from(set) % each;
    (u64::from(set) / each, within as usize * set_bytes(layout.shape()))
}

/// Reads a set. `None` if it is not there.
///
/// # Errors
/// The device failed.
pub fn read(device: &dyn Device, layout: &Superblock, made: u8, set: u32) -> Result<Option<Set>, StoreError> {
    let (number, at) = place(layout, set);
    let mut page = vec![0; PAGE as usize];
    device.read_at(layout.positions_file.off + number * PAGE, &mut page)?;
    let content = unseal(&page, layout.positions_id(), Some(sequence(layout, made)), number);
    let packed = content.map(|content| &content[at..at + set_bytes(layout.shape())]);
    Ok(packed
        .filter(|packed| packed[0] == HERE)
        .and_then(|packed| Set::unpack(layout.shape(), &packed[1..])))
}

/// Writes sets, in order of their numbers. Returns the bytes written.
///
/// # Errors
/// The device failed.
pub fn write(
    device: &dyn Device,
    layout: &Superblock,
    made: u8,
    sets: &[(u32, Set)],
) -> Result<u64, StoreError> {
    let sequence = sequence(layout, made);
    let mut page = vec![0; PAGE as usize];
    let mut written = 0;
    for mine in sets.chunk_by(|(one, _), (other, _)| place(layout, *one).0 == place(layout, *other).0) {
        let (number, _) = place(layout, mine[0].0);
        let off = layout.positions_file.off + number * PAGE;
        device.read_at(off, &mut page)?;
        if unseal(&page, layout.positions_id(), Some(sequence), number).is_none() {
            page.fill(0);
        }
        for (set, content) in mine {
            let (_, at) = place(layout, *set);
            page[at] = HERE;
            content.pack(&mut page[at + 1..at + set_bytes(layout.shape())]);
        }
        seal(&mut page, layout.positions_id(), sequence, number);
        device.write_at(off, &page)?;
        written += PAGE;
    }
    Ok(written)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{read, write};
    use crate::device::MemoryDevice;
    use crate::index::{Place, Set};
    use crate::policy::Policy;
    use crate::store::{StorePlan, Superblock};

    #[test]
    fn set_is_read_back_until_the_store_is_opened_again() {
        let device = MemoryDevice::new(256 << 20);
        let plan = StorePlan::new(Policy::SetMemLru);
        let mut layout = Superblock::lay_out(&plan, 256 << 20, true).unwrap();
        let sets: Vec<(u32, Set)> = [0, 7, 338, 339, 340, layout.sets as u32 - 1]
            .map(|number| {
                let mut set = Set::empty(layout.shape());
                set.insert_at(number as usize % 8, 9, Place::default());
                (number, set)
            })
            .into();
        let written = write(&device, &layout, 3, &sets).unwrap();
        assert!(
            written < sets.len() as u64 * 4096,
            "those of one page are one write"
        );
        for (number, set) in &sets {
            assert_eq!(read(&device, &layout, 3, *number).unwrap().as_ref(), Some(set));
        }
        assert_eq!(read(&device, &layout, 3, 8).unwrap(), None);
        assert_eq!(
            read(&device, &layout, 4, 7).unwrap(),
            None,
            "the index was made anew"
        );
        device.flip(layout.positions_file.off + 5, 1);
        assert_eq!(read(&device, &layout, 3, 7).unwrap(), None, "damage");
        let last = layout.sets as u32 - 1;
        layout.epoch += 1;
        assert_eq!(read(&device, &layout, 3, last).unwrap(), None, "another epoch");
    }
}
