//! Every parser of bytes that another process or a medium can choose, as a function of bytes. Owns what is
//! required of each beside not to panic: what was read comes back the same when it is written and read again.
//! Refuses to know where the bytes come from. Each says whether it took anything in, so that a target that
//! never gets past its first check is noticed.
//!
//! `fuzz/run TARGET SECONDS` runs one under libFuzzer; `cargo test -p varve-fuzz` runs all on their corpus
//! and on seeded changes of it.
#![forbid(unsafe_code)]

mod cache;
mod devices;
mod far_addresses;
mod far_checkpoint;
mod images;
mod pool;
mod ram;
mod settings;
mod trees;

pub use cache::{cache_objects, cache_store};
pub use devices::device_rows;
pub use far_addresses::far_addresses;
pub use far_checkpoint::far_checkpoint;
pub use images::{clusters, images};
pub use pool::{pool_state, unit_footers, unit_rows};
pub use settings::{messages, settings};
pub use trees::{dir_nodes, extent_nodes};

use varve_digest::{BatchLimit, Cursors, GatherLimits, LogBytes, gather, seal_scan};
use varve_format::journal::{JournalHeader, RangeHeader, RecordHeader, parse_ranges};
use varve_format::log::{
    CHUNK_BYTES, HEADER_SIZE, LIVE_HEADER_SIZE, LiveHeader, PAYLOAD_MAX, crc_seed, entry_crc, entry_size,
    payload_crc,
};
use varve_format::session::{GrantRow, SessionRow};
use varve_format::superblock::Superblock;
use varve_format::{EntryHeader, EntryMeta, Ino, LogOp, LogSeq, SessionId, TxId, inode::InodeSlot};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A parser; whether it took anything in.
pub type Target = fn(&[u8]) -> bool;

/// All of them.
pub const TARGETS: &[(&str, Target)] = &[
    ("superblock", superblock),
    ("journal", journal),
    ("log_scan", log_scan),
    ("log_op", log_op),
    ("extent_nodes", extent_nodes),
    ("dir_nodes", dir_nodes),
    ("inode", inode),
    ("rows", rows),
    ("unit_rows", unit_rows),
    ("device_rows", device_rows),
    ("unit_footers", unit_footers),
    ("pool_state", pool_state),
    ("messages", messages),
    ("settings", settings),
    ("cache_objects", cache_objects),
    ("cache_store", cache_store),
    ("far_checkpoint", far_checkpoint),
    ("far_addresses", far_addresses),
    ("images", images),
    ("clusters", clusters),
];

/// The superblock, with its checksum as it is and made right.
pub fn superblock(data: &[u8]) -> bool {
    let mut taken = false;
    let mut block = data.to_vec();
    block.resize(4096, 0);
    let _ = Superblock::parse(data);
    let _ = Superblock::parse(&block);
    if let Ok((superblock, _)) = Superblock::read_from_prefix(&block) {
        let sealed = superblock.sealed();
        if let Ok(parsed) = Superblock::parse(sealed.as_bytes()) {
            assert_eq!(parsed, sealed);
            for tier in varve_format::Tier::ALL {
                let _ = parsed.tier(tier);
            }
            taken = true;
        }
    }
    taken
}

/// Headers of journal and record, and the ranges of a record: the first bytes say how many and of how large a
/// medium.
pub fn journal(data: &[u8]) -> bool {
    if let Ok((header, _)) = JournalHeader::read_from_prefix(data) {
        let _ = header.is_valid();
        assert!(header.sealed().as_bytes().len() >= 40);
    }
    if let Ok((header, payload)) = RecordHeader::read_from_prefix(data) {
        let _ = header.is_valid([7; 16]);
        let made = RecordHeader::new([7; 16], TxId(3), 1, payload);
        assert!(made.is_valid([7; 16]));
    }
    let Some((head, payload)) = data.split_at_checked(6) else {
        return false;
    };
    let ranges = u32::from_le_bytes([head[0], head[1], head[2], 0]) >> (head[3] % 24);
    let blocks = u64::from(u16::from_le_bytes([head[4], head[5]]));
    let (mended, count) = mend_ranges(payload);
    let mut taken = false;
    for (payload, ranges) in [(payload, ranges), (&mended, count)] {
        if let Ok(found) = parse_ranges(payload, ranges, blocks) {
            assert_eq!(found.len(), ranges as usize);
            for (block, offset, bytes) in &found {
                assert!(block.0 < blocks && usize::from(*offset) + bytes.len() <= 4096);
            }
            taken |= !found.is_empty();
        }
    }
    taken
}

/// A list of ranges whose lengths add up, and how many they are.
fn mend_ranges(payload: &[u8]) -> (Vec<u8>, u32) {
    let (mut out, mut count, mut rest) = (Vec::new(), 0, payload);
    while let Ok((mut header, behind)) = RangeHeader::read_from_prefix(rest) {
        header.len.set(
            (header.len.get() % 4096)
                .min(behind.len().min(4096) as u16)
                .max(1),
        );
        let Some((bytes, behind)) = behind.split_at_checked(header.len.get().into()) else {
            break;
        };
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(bytes);
        (count, rest) = (count + 1, behind);
    }
    (out, count)
}

/// A log of two chunks whose beginnings are given; zeros behind.
struct Chunks {
    parts: [Vec<u8>; 2],
}

impl LogBytes for Chunks {
    type Error = std::convert::Infallible;

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Self::Error> {
        assert!(
            offset + out.len() as u64 <= self.len_bytes(),
            "outside of the log"
        );
        let part = &self.parts[(offset / CHUNK_BYTES) as usize];
        let from = (offset % CHUNK_BYTES) as usize;
        assert!(from + out.len() <= CHUNK_BYTES as usize, "across chunks");
        let there = part.get(from..).unwrap_or(&[]);
        let there = &there[..there.len().min(out.len())];
        out[..there.len()].copy_from_slice(there);
        out[there.len()..].fill(0);
        Ok(())
    }

    fn len_bytes(&self) -> u64 {
        2 * CHUNK_BYTES
    }
}

const SESSION: SessionId = SessionId(5);

/// Makes checksums of entries right, from `start` on: of all but one in sixteen.
fn seal_entries(part: &mut [u8], start: usize) {
    let mut at = start;
    while let Some(bytes) = part.get(at..at + HEADER_SIZE) {
        let mut header = EntryHeader::read_from_bytes(bytes).unwrap_or_else(|_| EntryHeader::new_zeroed());
        let len = (header.payload_len.get() as usize).min(PAYLOAD_MAX) % 4096;
        header.payload_len.set(len as u32);
        // Small numbers, so that some follow one another.
        header.seq.set(header.seq.get() % 64);
        if header.seq.get() % 4 != 0 {
            header.stable_delta.set(header.stable_delta.get() % 8);
            header.tx_left.set(header.tx_left.get() % 4);
        }
        let Some(payload) = part.get(at + HEADER_SIZE..at + HEADER_SIZE + len) else {
            break;
        };
        if header.time_ns.get() % 16 != 1 {
            header
                .crc32c
                .set(entry_crc(payload_crc(crc_seed(SESSION), payload), &header));
        }
        part[at..at + HEADER_SIZE].copy_from_slice(header.as_bytes());
        at += entry_size(len);
    }
}

/// The scans of a log: what is gathered is in order and whole, and what a seal covers can be gathered.
pub fn log_scan(data: &[u8]) -> bool {
    let mut taken = false;
    let (first, second) = data.split_at(data.len() / 2);
    let mut parts = [first.to_vec(), second.to_vec()];
    seal_entries(&mut parts[0], LIVE_HEADER_SIZE);
    seal_entries(&mut parts[1], 0);
    let _ = LiveHeader::read_from_prefix(&parts[0]).map(|(header, _)| header.is_valid());
    let log = Chunks { parts };
    let newest = || TxId(9);
    let limits = GatherLimits {
        bytes: 8192,
        entries: 20,
        leave_bytes: if data.len() % 2 == 1 { 4096 } else { usize::MAX },
    };
    let mut digested = LogSeq(0);
    for cut in [BatchLimit::Live(None), BatchLimit::Live(Some(LogSeq(7)))] {
        let Ok(batch) = gather(&log, SESSION, digested, &newest, cut, &limits, &Cursors::new());
        let mut last = digested.0;
        taken |= !batch.entries.is_empty();
        for entry in &batch.entries {
            assert!(entry.seq().0 > last && entry.seq() <= batch.upto, "out of order");
            last = entry.seq().0;
            let op = batch.op(entry);
            let end = |at: u64| at + u64::from(entry.header.payload_len.get());
            assert!(
                entry
                    .left_at()
                    .is_none_or(|at| op.is_ok() && end(at) <= log.len_bytes()),
                "what is no write was left in the log"
            );
        }
        for transaction in &batch.transactions {
            assert!(transaction.first + transaction.len <= batch.entries.len());
        }
        digested = batch.upto;
    }
    let Ok(found) = seal_scan(&log, SESSION, LogSeq(0), &newest, &Cursors::new());
    let row = SessionRow {
        id: SESSION,
        uid: 1,
        pid: 2,
        pid_start: 3,
        token: 4,
        state: varve_format::session::SessionState::Sealed(found.seal.clone()),
        digested: LogSeq(0),
        last_forwarded: varve_format::LastForwarded::default(),
        log_bytes: 0,
        created_ns: 0,
        flags: 0,
    };
    assert!(
        row.encode().is_ok(),
        "a seal that cannot be made durable: {:?}",
        found.seal
    );
    let mut at = LogSeq(0);
    for _ in 0..1000 {
        let cut = BatchLimit::Sealed(&found.seal);
        let Ok(batch) = gather(&log, SESSION, at, &newest, cut, &limits, &Cursors::new());
        if batch.upto <= at {
            break;
        }
        at = batch.upto;
    }
    assert!(
        at >= found.seal.last,
        "a sealed log is never digested: {at:?} of {:?}",
        found.seal
    );
    taken
}

/// One operation of a log: its header and payload.
pub fn log_op(data: &[u8]) -> bool {
    let Some((head, payload)) = data.split_at_checked(HEADER_SIZE) else {
        return false;
    };
    let Ok(mut header) = EntryHeader::read_from_bytes(head) else {
        return false;
    };
    let _ = LogOp::parse(&header, payload);
    header.payload_len.set(payload.len() as u32);
    header.op %= 14;
    header.flags &= 0x1f;
    let Ok(op) = LogOp::parse(&header, payload) else {
        return false;
    };
    let _ = varve_format::charge(&op);
    let mut body = Vec::new();
    op.encode_body(&mut body);
    let again = op.header(&EntryMeta::default(), body.len());
    body.extend_from_slice(op.data());
    assert_eq!(LogOp::parse(&again, &body), Ok(op));
    true
}

/// An inode's image, with its checksum as it is and made right.
pub fn inode(data: &[u8]) -> bool {
    let _ = InodeSlot::decode(data, Ino(9));
    let mut image = data.to_vec();
    image.resize(varve_format::inode::INODE_SIZE, 0);
    let Ok(model) = InodeSlot::Free(varve_format::Generation(1)).encode(Ino(9)) else {
        return false;
    };
    // The number is where an image of inode 9 has it.
    let Some(place) = (4..model.len() - 8).find(|at| model[*at..*at + 8] == 9_u64.to_le_bytes()) else {
        return false;
    };
    image[place..place + 8].copy_from_slice(&9_u64.to_le_bytes());
    let sum = varve_format::log::payload_crc(0, &image[4..]);
    image[..4].copy_from_slice(&sum.to_le_bytes());
    let Ok(slot) = InodeSlot::decode(&image, Ino(9)) else {
        return false;
    };
    let used = matches!(slot, InodeSlot::Used(_));
    if let InodeSlot::Used(inode) = &slot {
        let _ = inode.blocks();
    }
    if let Ok(again) = slot.encode(Ino(9)) {
        assert_eq!(InodeSlot::decode(&again, Ino(9)), Ok(slot));
    }
    used
}

/// Rows of the session and grant tables.
pub fn rows(data: &[u8]) -> bool {
    let mut taken = false;
    if let Ok(Some(row)) = SessionRow::decode(data) {
        let again = row.encode().map(|bytes| SessionRow::decode(&bytes));
        assert_eq!(again, Ok(Ok(Some(row))));
        taken = true;
    }
    if let Ok(Some(row)) = GrantRow::decode(data) {
        let again = row.encode().map(|bytes| GrantRow::decode(&bytes));
        assert_eq!(again, Ok(Ok(Some(row))));
        taken = true;
    }
    taken
}

#[cfg(test)]
mod tests;
