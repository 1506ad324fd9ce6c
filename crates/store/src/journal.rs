//! The ring of redo records: scan, append, move the tail. Does not interpret the ranges.

use crate::seeded::{Bug, armed};
use crate::{Result, StoreError};
use std::sync::Arc;
use varve_format::journal::{
    HEADER_OFFSETS, JournalHeader, RECORD_ALIGN, RECORD_HEADER_SIZE, RECORD_MAX_BYTES, RING_START, Range,
    RangeHeader, RecordHeader, parse_ranges, record_crc,
};
use varve_format::{BlockNo, TxId};
use varve_media::Region;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of journal record for one small operation: begin none if [`Tx::room`](crate::Tx::room) is less.
pub const OP_ROOM: u64 = 24 << 10;
/// Bytes of the ring read at once by a scan.
const SCAN_BYTES: u64 = 1 << 20;
/// Message for a sound journal of another pool.
pub(crate) const STRANGER: &str = "it belongs to another pool";

/// The journal of an open pool; used under the writer's lock.
pub(crate) struct Journal {
    region: Arc<dyn Region>,
    uuid: [u8; 16],
    len: u64,
    sequence: u64,
    tail: u64,
    head: u64,
    newest: TxId,
    tail_tx: TxId,
}

/// Applies the ranges of one record to their blocks.
pub(crate) type Apply<'a> = dyn FnMut(&[Range<'_>]) -> Result<()> + 'a;

/// The result of a scan.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    pub(crate) records: u64,
    pub(crate) bytes: u64,
    pub(crate) torn: bool,
    /// Only one copy of the header has the tail: the other is damaged, or older.
    pub(crate) uneven: bool,
    pub(crate) damage: Option<StoreError>,
}

/// Maximum record bytes for the differences of a block: ranges are joined unless the gap between them costs
/// more than a range header.
pub(crate) const DIFF_MAX: u64 =
    (varve_format::BLOCK_SIZE + 2 * varve_format::journal::RANGE_HEADER_SIZE + 20) as u64;

/// Bytes of ranges, on their way into a record.
#[derive(Debug, Default)]
pub(crate) struct RedoRecord {
    pub(crate) bytes: Vec<u8>,
    pub(crate) ranges: u32,
}

impl RedoRecord {
    pub(crate) fn push(&mut self, block: BlockNo, offset: usize, bytes: &[u8]) {
        let header = RangeHeader {
            block: U64::new(block.0),
            offset: U16::new(offset as u16),
            len: U16::new(bytes.len() as u16),
        };
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(bytes);
        self.ranges += 1;
    }
}

/// Ranges of 8-byte words in which two blocks differ, near ones joined: `f(offset, len)`.
pub(crate) fn diff(old: &[u8], new: &[u8], mut f: impl FnMut(usize, usize)) {
    const WORD: usize = 8;
    /// A gap of this many bytes costs no more than another range header.
    const JOIN: usize = 16;
    let mut open: Option<(usize, usize)> = None;
    // Most of a block is unchanged: compare larger pieces first.
    for big in (0..old.len()).step_by(256) {
        if old[big..big + 256] == new[big..big + 256] {
            continue;
        }
        for at in (big..big + 256).step_by(WORD) {
            if old[at..at + WORD] == new[at..at + WORD] {
                continue;
            }
            open = match open {
                Some((start, end)) if at <= end + JOIN => Some((start, at + WORD)),
                Some((start, end)) => {
                    f(start, end - start);
                    Some((at, at + WORD))
                }
                None => Some((at, at + WORD)),
            };
        }
    }
    if let Some((start, end)) = open {
        f(start, end - start);
    }
}

impl Journal {
    /// Makes an empty journal; durable when this returns.
    pub(crate) fn format(region: &Arc<dyn Region>, uuid: [u8; 16], len: u64) -> Result<()> {
        Self::format_after(region, uuid, len, TxId(0))
    }

    /// Makes an empty journal that continues after transaction `newest`; durable when this returns.
    pub(crate) fn format_after(
        region: &Arc<dyn Region>,
        uuid: [u8; 16],
        len: u64,
        newest: TxId,
    ) -> Result<()> {
        let journal = Self {
            region: Arc::clone(region),
            uuid,
            len,
            sequence: 0,
            tail: RING_START,
            head: RING_START,
            newest,
            tail_tx: newest,
        };
        for (sequence, _) in (1..).zip(HEADER_OFFSETS) {
            journal.write_header(sequence)?;
        }
        // Records of an earlier pool are told apart by its uuid, unless the pool was made again by force with
        // the same uuid: so the ring is zeroed.
        let zeros = vec![0; 64 << 10];
        let mut at = RING_START;
        while at < len {
            let take = zeros.len().min((len - at) as usize);
            journal.region.write(at, &zeros[..take])?;
            at += take as u64;
        }
        journal.region.fence()?;
        journal.region.sync(0, len)?;
        Ok(())
    }

    fn write_header(&self, sequence: u64) -> Result<()> {
        let offset = self.store_header(sequence)?;
        self.region.fence()?;
        self.region.sync(offset, 64)?;
        Ok(())
    }

    /// Stores the header, not durably; returns its offset.
    fn store_header(&self, sequence: u64) -> Result<u64> {
        let header = JournalHeader {
            magic: JournalHeader::MAGIC,
            pool_uuid: self.uuid,
            sequence: U64::new(sequence),
            tail_offset: U64::new(self.tail),
            tail_tx: U64::new(self.tail_tx.0),
            len_bytes: U64::new(self.len),
            version: U32::new(1),
            crc32c: U32::new(0),
        }
        .sealed();
        let copy = if armed(Bug::OneJournalHeader) && sequence > 2 {
            0
        } else {
            sequence % 2
        };
        let offset = HEADER_OFFSETS[copy as usize];
        self.region.write(offset, header.as_bytes())?;
        Ok(offset)
    }

    /// Finds the tail and passes every committed record to `apply`, in order.
    pub(crate) fn open(
        region: Arc<dyn Region>,
        uuid: [u8; 16],
        len: u64,
        nvm_blocks: u64,
        apply: &mut Apply<'_>,
    ) -> Result<(Self, Scan)> {
        let mut best: Option<JournalHeader> = None;
        let mut tails = Vec::new();
        for offset in HEADER_OFFSETS {
            let mut bytes = [0; 64];
            region.read(offset, &mut bytes)?;
            let header = JournalHeader::read_from_bytes(&bytes)
                .map_err(|_| StoreError::Journal("its header cannot be read"))?;
            if header.is_valid() {
                tails.push(header.tail_tx.get());
            }
            if header.is_valid() && best.is_none_or(|best| header.sequence.get() > best.sequence.get()) {
                best = Some(header);
            }
        }
        let header = best.ok_or(StoreError::Journal("neither copy of its header is valid"))?;
        if header.pool_uuid != uuid {
            return Err(StoreError::Journal(STRANGER));
        }
        let tail = header.tail_offset.get();
        if header.version.get() != 1
            || header.len_bytes.get() != len
            || !(RING_START..=len).contains(&tail)
            || tail % RECORD_ALIGN != 0
        {
            return Err(StoreError::Journal("its header makes no sense"));
        }
        let mut journal = Self {
            region,
            uuid,
            len,
            sequence: header.sequence.get(),
            tail,
            head: tail,
            newest: TxId(header.tail_tx.get()),
            tail_tx: TxId(header.tail_tx.get()),
        };
        let mut scan = Scan {
            uneven: tails != [journal.tail_tx.0; HEADER_OFFSETS.len()],
            ..Scan::default()
        };
        while let Some((start, header, payload)) = journal.next_record()? {
            let ranges = match parse_ranges(&payload, header.ranges.get(), nvm_blocks) {
                Ok(ranges) => ranges,
                Err(_) => {
                    return Err(StoreError::Journal(
                        "a record with a right checksum makes no sense",
                    ));
                }
            };
            apply(&ranges)?;
            scan.records += 1;
            scan.bytes += payload.len() as u64;
            journal.newest = TxId(journal.newest.0 + 1);
            journal.head = start + RecordHeader::record_bytes(payload.len() as u64);
        }
        journal.look_beyond(&mut scan)?;
        if armed(Bug::TxReusedAfterRestart) {
            journal.newest = journal.tail_tx;
        }
        Ok((journal, scan))
    }

    /// Returns the record `newest + 1`, at the head or at the start of the ring.
    fn next_record(&self) -> Result<Option<(u64, RecordHeader, Vec<u8>)>> {
        let wraps = usize::from(!armed(Bug::ReplayNoWrap));
        for start in [self.head, RING_START].into_iter().take(1 + wraps) {
            if let Some(header) = self.header_at(start)?
                && header.tx.get() == self.newest.0 + 1
            {
                let len = u64::from(header.payload_len.get());
                if start + RecordHeader::record_bytes(len) > self.len {
                    continue;
                }
                let mut payload = vec![0; len as usize];
                self.region
                    .read(start + RECORD_HEADER_SIZE as u64, &mut payload)?;
                let good = record_crc(&payload) == header.payload_crc32c.get();
                if good || armed(Bug::RecordChecksumIgnored) || armed(Bug::RecordMark) {
                    return Ok(Some((start, header, payload)));
                }
            }
        }
        Ok(None)
    }

    fn header_at(&self, at: u64) -> Result<Option<RecordHeader>> {
        if at + RECORD_HEADER_SIZE as u64 > self.len {
            return Ok(None);
        }
        let mut bytes = [0; RECORD_HEADER_SIZE];
        self.region.read(at, &mut bytes)?;
        Ok(RecordHeader::read_from_bytes(&bytes)
            .ok()
            .filter(|header| header.is_valid(self.uuid)))
    }

    /// Visits every valid header in a ring, at every place where a record may start, ascending. Reads large
    /// pieces: for a journal in a file each read is a system call that bypasses the page cache.
    fn each_header(
        region: &Arc<dyn Region>,
        uuid: [u8; 16],
        len: u64,
        visit: &mut dyn FnMut(u64, RecordHeader),
    ) -> Result<()> {
        let mut piece = vec![0; SCAN_BYTES.min(len.saturating_sub(RING_START)) as usize];
        let mut start = RING_START;
        while start < len {
            let take = piece.len().min((len - start) as usize);
            region.read(start, &mut piece[..take])?;
            let places = (start..).step_by(RECORD_ALIGN as usize);
            for (at, bytes) in places.zip(piece[..take].chunks(RECORD_ALIGN as usize)) {
                if let Ok((header, _)) = RecordHeader::read_from_prefix(bytes)
                    && header.is_valid(uuid)
                {
                    visit(at, header);
                }
            }
            start += take as u64;
        }
        Ok(())
    }

    /// Searches behind the last good record for a torn one, and for later committed ones, which prove damage.
    fn look_beyond(&self, scan: &mut Scan) -> Result<()> {
        Self::each_header(&self.region, self.uuid, self.len, &mut |_, header| {
            let tx = TxId(header.tx.get());
            if tx.0 == self.newest.0 + 1 {
                scan.torn = true;
            } else if tx > self.newest && scan.damage.is_none() {
                scan.damage = Some(StoreError::JournalDamaged {
                    tx: TxId(self.newest.0 + 1),
                    offset: self.head,
                    later: tx,
                });
            }
        })
    }

    /// Passes the sound records behind accepted damage to `apply`, ascending, and empties the ring. Changes
    /// of the damaged record may be in place already (they are, unless the power failed). Replay has just put
    /// older records over them, so the later records are needed, too.
    pub(crate) fn skip_damage(&mut self, nvm_blocks: u64, apply: &mut Apply<'_>) -> Result<()> {
        let mut later = Vec::new();
        Self::each_header(&self.region, self.uuid, self.len, &mut |at, header| {
            if header.tx.get() > self.newest.0 {
                later.push((header.tx.get(), at, header));
            }
        })?;
        later.sort_unstable_by_key(|(tx, ..)| *tx);
        for (tx, at, header) in later {
            let len = u64::from(header.payload_len.get());
            if at + RecordHeader::record_bytes(len) <= self.len {
                let mut payload = vec![0; len as usize];
                self.region.read(at + RECORD_HEADER_SIZE as u64, &mut payload)?;
                if record_crc(&payload) == header.payload_crc32c.get()
                    && let Ok(ranges) = parse_ranges(&payload, header.ranges.get(), nvm_blocks)
                {
                    apply(&ranges)?;
                }
            }
            self.newest = TxId(tx);
        }
        self.head = RING_START;
        Ok(())
    }

    /// Returns the newest transaction with a record in a ring whose headers are lost.
    pub(crate) fn newest_in_ring(region: &Arc<dyn Region>, uuid: [u8; 16], len: u64) -> Result<TxId> {
        let mut newest = TxId(0);
        Self::each_header(region, uuid, len, &mut |_, header| {
            newest = newest.max(TxId(header.tx.get()));
        })?;
        Ok(newest)
    }

    /// Returns the offsets of the damaged copies of the header.
    pub(crate) fn bad_headers(region: &Arc<dyn Region>) -> Result<Vec<u64>> {
        let mut bad = Vec::new();
        for offset in HEADER_OFFSETS {
            let mut bytes = [0; 64];
            region.read(offset, &mut bytes)?;
            if !JournalHeader::read_from_bytes(&bytes).is_ok_and(|header| header.is_valid()) {
                bad.push(offset);
            }
        }
        Ok(bad)
    }

    pub(crate) const fn newest(&self) -> TxId {
        self.newest
    }

    pub(crate) const fn tail_tx(&self) -> TxId {
        self.tail_tx
    }

    /// Returns the maximum bytes of a record's payload.
    pub(crate) fn bound(&self) -> u64 {
        RECORD_MAX_BYTES.min((self.len - RING_START) / 4) - RECORD_HEADER_SIZE as u64
    }

    /// Returns the offset for a record of `bytes`, or `None` if the tail must move first.
    fn place(&self, bytes: u64) -> Option<u64> {
        // `head == tail` only when the ring is empty, since a record never ends right at the tail.
        if self.tail_tx == self.newest {
            return Some(if self.head + bytes <= self.len {
                self.head
            } else {
                RING_START
            });
        }
        if self.head > self.tail {
            if self.head + bytes <= self.len {
                return Some(self.head);
            }
            let before_tail = RING_START + bytes < self.tail;
            return (before_tail || armed(Bug::RingOverTail)).then_some(RING_START);
        }
        (self.head + bytes < self.tail).then_some(self.head)
    }

    /// Returns whether a record with this payload fits without moving the tail.
    pub(crate) fn fits(&self, payload: u64) -> bool {
        self.place(RecordHeader::record_bytes(payload)).is_some()
    }

    /// Writes the record of the next transaction. Durable when this returns.
    pub(crate) fn append(&mut self, payload: &RedoRecord) -> Result<TxId> {
        let tx = TxId(self.newest.0 + 1);
        let bytes = RecordHeader::record_bytes(payload.bytes.len() as u64);
        let start = self
            .place(bytes)
            .ok_or(StoreError::Journal("it is full although its tail was moved"))?;
        let header = RecordHeader::new(self.uuid, tx, payload.ranges, &payload.bytes);
        if !armed(Bug::RecordMark) {
            self.region.write(start, header.as_bytes())?;
        }
        self.region
            .write(start + RECORD_HEADER_SIZE as u64, &payload.bytes)?;
        if armed(Bug::RecordMark) {
            self.region.write(start, header.as_bytes())?;
        }
        if !armed(Bug::NoFenceAfterRecord) && !armed(Bug::RecordInSameFence) {
            self.region.fence()?;
            self.region.sync(start, bytes)?;
        }
        self.head = start + bytes;
        self.newest = tx;
        Ok(tx)
    }

    /// Stores the record of the next transaction, as [`append`](Self::append) will again (seeded bug only).
    pub(crate) fn store_record(&self, payload: &RedoRecord) -> Result<()> {
        let bytes = RecordHeader::record_bytes(payload.bytes.len() as u64);
        if let Some(start) = self.place(bytes) {
            let tx = TxId(self.newest.0 + 1);
            let header = RecordHeader::new(self.uuid, tx, payload.ranges, &payload.bytes);
            self.region.write(start, header.as_bytes())?;
            self.region
                .write(start + RECORD_HEADER_SIZE as u64, &payload.bytes)?;
        }
        Ok(())
    }

    /// Stores the header of the next tail, as [`advance_tail`](Self::advance_tail) will again (seeded bug
    /// only).
    pub(crate) fn store_tail(&mut self) -> Result<()> {
        self.tail = self.head;
        self.tail_tx = self.newest;
        self.store_header(self.sequence + 1).map(drop)
    }

    /// Empties the ring, after everything committed is in place and durable. Durable in both copies of the
    /// header when this returns: blocks that the old records name are reused afterwards, so an older tail
    /// must not be all that is left when one copy goes bad.
    pub(crate) fn advance_tail(&mut self) -> Result<()> {
        self.tail = self.head;
        self.tail_tx = self.newest;
        if armed(Bug::TwoHeadersOneFence) {
            self.store_header(self.sequence + 2)?;
        }
        for _ in HEADER_OFFSETS {
            self.write_header(self.sequence + 1)?;
            self.sequence += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::diff;

    /// `DIFF_MAX` is the cost that a transaction assumes for a block not compared yet.
    #[test]
    fn no_differences_cost_more_than_is_reckoned_with() {
        let old = vec![0_u8; 4096];
        for (every, of) in (1..=512_usize).flat_map(|of| [(1, of), (of.div_ceil(2), of), (of - 1, of)]) {
            let mut new = old.clone();
            for word in (0..512).filter(|word| word % of < every) {
                new[word * 8] = 1;
            }
            let mut cost = 20;
            diff(&old, &new, |_, len| {
                cost += (len + varve_format::journal::RANGE_HEADER_SIZE) as u64
            });
            assert!(cost <= super::DIFF_MAX, "{every} of {of} words: {cost}");
        }
    }

    #[test]
    fn diff_names_all_changed_words_and_joins_near_ones() {
        let old = vec![0_u8; 4096];
        let mut new = old.clone();
        new[0] = 1;
        new[20] = 1;
        new[1000] = 1;
        new[4095] = 1;
        let mut found = Vec::new();
        diff(&old, &new, |at, len| found.push((at, len)));
        assert_eq!(found, [(0, 24), (1000, 8), (4088, 8)]);
        let mut copy = old;
        for (at, len) in found {
            copy[at..at + len].copy_from_slice(&new[at..at + len]);
        }
        assert_eq!(copy, new);
    }
}
