//! The first page of a device aside: whose it is, so that no file that merely has its name is written to, and
//! none of another store is taken for this one's.

use super::StoreError;
use super::layout::{PAGE, Superblock};
use crate::device::Device;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 8] = *b"VARVECAX";
/// The two copies, each within a sector.
const COPIES: [usize; 2] = [0, 2048];

/// Where the position file, or the file of sets, begins on a device aside.
pub const BEGIN: u64 = PAGE;

/// A copy of the head. `crc32c` covers the bytes before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Head {
    magic: [u8; 8],
    store_id: u64,
    aside: u32,
    crc32c: u32,
}

const _: () = assert!(size_of::<Head>() == 24);

impl Head {
    fn of(layout: &Superblock) -> Self {
        let mut head = Self {
            magic: MAGIC,
            store_id: layout.store_id,
            aside: layout.aside,
            crc32c: 0,
        };
        head.crc32c = head.crc();
        head
    }

    fn crc(&self) -> u32 {
        crc32c::crc32c(&self.as_bytes()[..size_of::<Self>() - 4])
    }

    fn read(copy: &[u8]) -> Option<Self> {
        let (head, _) = Self::read_from_prefix(copy).ok()?;
        (head.magic == MAGIC && head.crc32c == head.crc()).then_some(head)
    }
}

/// The device aside of a store that has one. A file that is missing is made; what it had are misses. With
/// `is_new` the store is being made, and takes the file of an earlier one. `None`: the device has none.
///
/// # Errors
/// The file is another store's, or no store's; a device failed.
pub fn open(
    device: &dyn Device,
    layout: &Superblock,
    is_new: bool,
) -> Result<Option<Arc<dyn Device>>, StoreError> {
    // First as long as it is: another's is not to be changed.
    let Some(aside) = device.aside(0)? else {
        return Ok(None);
    };
    let mut page = vec![0; PAGE as usize];
    if aside.len_bytes() >= PAGE {
        aside.read_at(0, &mut page)?;
    }
    let found = COPIES.iter().find_map(|&at| Head::read(&page[at..]));
    let mine = Head::of(layout);
    match found {
        Some(head) if head == mine => {
            drop(aside);
            return Ok(device.aside(BEGIN + layout.positions_file.len)?);
        }
        Some(_) if !is_new => {
            let name = aside.name();
            return Err(StoreError::Devices(format!(
                "{name} belongs to another cache store: bring the one that belongs to {}, or remove it, \
                 which costs objects",
                device.name()
            )));
        }
        None if page.iter().any(|&byte| byte != 0) => {
            let name = aside.name();
            return Err(StoreError::Devices(format!(
                "{name} is no file of a cache store, and this store needs one of that name: move it away"
            )));
        }
        _ => {}
    }
    page.fill(0);
    for at in COPIES {
        page[at..at + size_of::<Head>()].copy_from_slice(mine.as_bytes());
    }
    drop(aside);
    let aside = device.aside(BEGIN + layout.positions_file.len)?;
    if let Some(aside) = &aside {
        aside.write_at(0, &page)?;
        aside.flush()?;
    }
    Ok(aside)
}
