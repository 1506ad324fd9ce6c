//! Bytes of the log: blocks of 128 KiB, sectors of 512 bytes, objects (section 3.2.3).
//!
//! Owns how objects lie in a block, and finds them again in bytes that may be anything. Knows no device and
//! no table.
//!
//! ```text
//! block    256 sectors of 512 bytes
//! sector   0  u16  offset in this sector of the first object that starts here (2..512), 0: none
//!          2  510 bytes of the block's stream; objects cross sectors, never blocks
//! object   0  u32  CRC-32C over the block's sequence number (u32), bytes 4..11 and the data
//!          4  u40  number of the object; 0: the stream ends here
//!          9  u16  bytes of data, less 1
//!         11  data
//! ```
//!
//! All numbers are little-endian. The sequence number is not stored: who reads knows it, so a block that was
//! written at another time, or never, has wrong checksums only.

/// Bytes of a block: what the log writes at once, and what the cleaner reads.
pub const BLOCK_BYTES: usize = 128 << 10;
/// Bytes of a sector, the unit of locations.
pub const SECTOR_BYTES: usize = 512;
/// Sectors of a block.
pub const BLOCK_SECTORS: usize = BLOCK_BYTES / SECTOR_BYTES;
/// Bytes before an object's data.
pub const HEADER_BYTES: usize = 11;
/// Bytes of objects, headers included, that fit into a block.
pub const BLOCK_PAYLOAD_BYTES: usize = BLOCK_SECTORS * SECTOR_PAYLOAD_BYTES;
/// Bytes of the largest object: an eighth of a block, so that little is lost at a block's end.
pub const OBJECT_MAX_BYTES: usize = 16 << 10;
/// The largest number of an object.
pub const NUMBER_MAX: u64 = (1 << 40) - 1;

const TAG_BYTES: usize = 2;
const SECTOR_PAYLOAD_BYTES: usize = SECTOR_BYTES - TAG_BYTES;

const _: () = assert!(OBJECT_MAX_BYTES <= 1 << 16 && OBJECT_MAX_BYTES + HEADER_BYTES <= BLOCK_PAYLOAD_BYTES);

/// Bytes of a block that an object takes.
#[must_use]
pub const fn footprint_bytes(len_bytes: usize) -> usize {
    HEADER_BYTES + len_bytes
}

/// Sectors to read, from the object's on, so that an object of `len_bytes` is inside; may pass the block's
/// end.
#[must_use]
pub const fn read_sectors(len_bytes: usize) -> usize {
    (SECTOR_PAYLOAD_BYTES - 1 + footprint_bytes(len_bytes)).div_ceil(SECTOR_PAYLOAD_BYTES)
}

/// An object as its header names it. Nothing of it is verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Number of the object, not 0.
    pub number: u64,
    /// Sector of the bytes that were searched.
    pub sector: usize,
    /// Bytes of data.
    pub len_bytes: usize,
    /// Where the object begins in the stream.
    at: usize,
    crc: u32,
}

/// Appends an object at `at` of the stream, where the caller knows that it fits. Gives the sector in which it
/// starts.
pub fn append(block: &mut [u8], at: usize, sequence: u32, number: u64, data: &[u8]) -> usize {
    debug_assert!(at + footprint_bytes(data.len()) <= BLOCK_PAYLOAD_BYTES);
    debug_assert!(number != 0 && number <= NUMBER_MAX && !data.is_empty());
    let sector = at / SECTOR_PAYLOAD_BYTES;
    let tag = &mut block[sector * SECTOR_BYTES..][..TAG_BYTES];
    if tag == [0; TAG_BYTES] {
        let offset = TAG_BYTES + at % SECTOR_PAYLOAD_BYTES;
        tag.copy_from_slice(&(offset as u16).to_le_bytes());
    }
    let mut header = [0; HEADER_BYTES];
    header[4..9].copy_from_slice(&number.to_le_bytes()[..5]);
    header[9..].copy_from_slice(&((data.len() - 1) as u16).to_le_bytes());
    let crc = checksum(sequence, &header, data);
    header[..4].copy_from_slice(&crc.to_le_bytes());
    put(block, at, &header);
    put(block, at + HEADER_BYTES, data);
    sector
}

/// Finds the last object of that number which starts in the first of `sectors`, and copies its data out.
/// False if there is none of that length or its checksum is wrong; `data` holds anything then.
#[must_use]
pub fn find(sectors: &[u8], sequence: u32, number: u64, data: &mut [u8]) -> bool {
    let mut last = None;
    for_each_in_sector(sectors, 0, |found| {
        if found.number == number {
            last = Some(found);
        }
    });
    last.is_some_and(|found| extract(sectors, sequence, &found, data))
}

/// Copies an object's data out. False if its length is not that of `data`, or its checksum is wrong.
#[must_use]
pub fn extract(sectors: &[u8], sequence: u32, found: &Found, data: &mut [u8]) -> bool {
    let mut header = [0; HEADER_BYTES];
    found.len_bytes == data.len()
        && get(sectors, found.at, &mut header)
        && get(sectors, found.at + HEADER_BYTES, data)
        && checksum(sequence, &header, data) == found.crc
}

/// Every object that starts in a sector of `block` and is the last of its number there.
#[must_use]
pub fn objects(block: &[u8]) -> Vec<Found> {
    let mut all: Vec<Found> = Vec::new();
    for sector in 0..block.len() / SECTOR_BYTES {
        let first = all.len();
        for_each_in_sector(block, sector, |found| {
            match all[first..].iter_mut().find(|other| other.number == found.number) {
                Some(older) => *older = found,
                None => all.push(found),
            }
        });
    }
    all
}

/// Walks the objects that start in one sector. Each step goes on by more than a header, whatever the bytes
/// are.
fn for_each_in_sector(bytes: &[u8], sector: usize, mut found: impl FnMut(Found)) {
    let Some(tag) = bytes
        .get(sector * SECTOR_BYTES..)
        .and_then(|rest| rest.first_chunk::<2>())
    else {
        return;
    };
    let offset = usize::from(u16::from_le_bytes(*tag));
    if !(TAG_BYTES..SECTOR_BYTES).contains(&offset) {
        return;
    }
    let mut at = sector * SECTOR_PAYLOAD_BYTES + offset - TAG_BYTES;
    let end = (sector + 1) * SECTOR_PAYLOAD_BYTES;
    let mut header = [0; HEADER_BYTES];
    while at < end && get(bytes, at, &mut header) {
        let [c0, c1, c2, c3, n0, n1, n2, n3, n4, l0, l1] = header;
        let number = u64::from_le_bytes([n0, n1, n2, n3, n4, 0, 0, 0]);
        if number == 0 {
            return;
        }
        let len_bytes = usize::from(u16::from_le_bytes([l0, l1])) + 1;
        found(Found {
            number,
            sector,
            len_bytes,
            at,
            crc: u32::from_le_bytes([c0, c1, c2, c3]),
        });
        at += footprint_bytes(len_bytes);
    }
}

fn checksum(sequence: u32, header: &[u8; HEADER_BYTES], data: &[u8]) -> u32 {
    let mut start = [0; 4 + HEADER_BYTES - 4];
    start[..4].copy_from_slice(&sequence.to_le_bytes());
    start[4..].copy_from_slice(&header[4..]);
    crc32c::crc32c_append(crc32c::crc32c(&start), data)
}

/// Where a byte of the stream lies in the sectors, and how many follow it in its sector.
const fn position(at: usize) -> (usize, usize) {
    let inside = at % SECTOR_PAYLOAD_BYTES;
    let offset = at / SECTOR_PAYLOAD_BYTES * SECTOR_BYTES + TAG_BYTES + inside;
    (offset, SECTOR_PAYLOAD_BYTES - inside)
}

fn put(block: &mut [u8], mut at: usize, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let (offset, room) = position(at);
        let (now, later) = bytes.split_at(room.min(bytes.len()));
        block[offset..offset + now.len()].copy_from_slice(now);
        at += now.len();
        bytes = later;
    }
}

/// False if the sectors end before.
fn get(sectors: &[u8], mut at: usize, mut out: &mut [u8]) -> bool {
    while !out.is_empty() {
        let (offset, room) = position(at);
        let (now, later) = out.split_at_mut(room.min(out.len()));
        let Some(bytes) = sectors.get(offset..offset + now.len()) else {
            return false;
        };
        now.copy_from_slice(bytes);
        at += now.len();
        out = later;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Fills a block; gives the objects' sectors, in order, and the stream's end.
    fn fill(block: &mut [u8], sequence: u32, objects: &[(u64, Vec<u8>)]) -> (Vec<usize>, usize) {
        let mut at = 0;
        let mut sectors = Vec::new();
        for (number, data) in objects {
            if at + footprint_bytes(data.len()) > BLOCK_PAYLOAD_BYTES {
                break;
            }
            sectors.push(append(block, at, sequence, *number, data));
            at += footprint_bytes(data.len());
        }
        (sectors, at)
    }

    fn object() -> impl Strategy<Value = (u64, Vec<u8>)> {
        let len = prop_oneof![8 => 1usize..300, 1 => 1usize..=OBJECT_MAX_BYTES];
        (1..40u64, len, any::<u8>()).prop_map(|(number, len, byte)| (number, vec![byte; len]))
    }

    proptest! {
        #[test]
        fn block_gives_back_the_last_object_of_each_sector(
            objects_in in proptest::collection::vec(object(), 1..400), sequence in any::<u32>()
        ) {
            let mut block = vec![0; BLOCK_BYTES];
            let (sectors, _) = fill(&mut block, sequence, &objects_in);
            let mut last = std::collections::BTreeMap::new();
            for (sector, (number, data)) in sectors.iter().zip(&objects_in) {
                last.insert((*sector, *number), data);
            }
            for ((sector, number), data) in &last {
                let end = (sector + read_sectors(data.len())).min(BLOCK_SECTORS);
                let bytes = &block[sector * SECTOR_BYTES..end * SECTOR_BYTES];
                let mut out = vec![0; data.len()];
                prop_assert!(find(bytes, sequence, *number, &mut out));
                prop_assert_eq!(&&out, data);
                prop_assert!(!find(bytes, sequence.wrapping_add(1), *number, &mut out));
            }
            let walked = objects(&block);
            prop_assert_eq!(walked.len(), last.len());
            for found in walked {
                let mut out = vec![0; found.len_bytes];
                prop_assert!(extract(&block, sequence, &found, &mut out));
                prop_assert_eq!(Some(&&out), last.get(&(found.sector, found.number)));
            }
        }

        #[test]
        fn changed_bytes_never_give_other_data(
            objects_in in proptest::collection::vec(object(), 1..100),
            changes in proptest::collection::vec((0..BLOCK_BYTES, 1u8..), 1..2000)
        ) {
            let mut block = vec![0; BLOCK_BYTES];
            let (sectors, _) = fill(&mut block, 7, &objects_in);
            for (at, change) in changes {
                block[at] ^= change;
            }
            for (sector, (number, data)) in sectors.iter().zip(&objects_in) {
                let mut out = vec![0; data.len()];
                if find(&block[sector * SECTOR_BYTES..], 7, *number, &mut out) {
                    // One of the versions that were stored under that number.
                    prop_assert!(objects_in.iter().any(|(other, bytes)| other == number && *bytes == out));
                }
            }
        }

        #[test]
        fn random_bytes_are_walked_to_an_end(seed in any::<u64>(), len in 0..BLOCK_BYTES) {
            let mut block = vec![0; len];
            fastrand::Rng::with_seed(seed).fill(&mut block);
            // Sectors with a plausible tag are walked further.
            for sector in block.chunks_mut(SECTOR_BYTES).filter(|sector| sector.len() > 2) {
                sector[1] &= 1;
            }
            for found in objects(&block) {
                let mut out = vec![0; found.len_bytes];
                prop_assert!(!extract(&block, 1, &found, &mut out));
            }
        }
    }
}
