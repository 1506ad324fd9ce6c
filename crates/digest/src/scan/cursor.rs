//! One cursor for each chunk: the position of the next entry and a copy of its header. Decides only whether
//! bytes are an entry.

use super::{LogBytes, ScanError};
use varve_format::log::{
    CHUNK_BYTES, HEADER_SIZE, LIVE_HEADER_SIZE, PAYLOAD_MAX, crc_seed, entry_crc, entry_size,
};
use varve_format::seeded::{Bug, armed};
use varve_format::{EntryHeader, LogSeq, SessionId};
use zerocopy::{FromBytes, FromZeros};

/// Maximum number of chunks read of one log (8 GiB).
const CHUNKS_MAX: u64 = 4096;

/// Positions up to which the chunks of a log have been digested. Kept between digests, so that a log is not
/// read again from its start. A chunk that the client has reused is recognised by its first entry and read
/// from its start.
#[derive(Debug, Clone, Default)]
pub struct Cursors {
    pub(super) chunks: Vec<Cursor>,
}

impl Cursors {
    /// Returns cursors at the start of every chunk.
    #[must_use]
    pub const fn new() -> Self {
        Self { chunks: Vec::new() }
    }
}

/// Position in one chunk.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cursor {
    /// Offset in the chunk of the next entry.
    pub(super) pos: u64,
    /// Number of the entry before; 0 at the start.
    pub(super) last_seq: u64,
    /// Number and checksum of the chunk's first entry when `pos` left it.
    first: Option<(u64, u32)>,
}

/// The possible entry at a chunk's cursor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub(super) chunk: usize,
    pub(super) header: EntryHeader,
}

impl Head {
    pub(super) const fn seq(&self) -> u64 {
        self.header.seq.get()
    }

    pub(super) const fn payload_len(&self) -> usize {
        self.header.payload_len.get() as usize
    }
}

const fn chunk_start(chunk: usize) -> u64 {
    if chunk == 0 { LIVE_HEADER_SIZE as u64 } else { 0 }
}

/// Bytes read at a time by the search behind the end of a chunk.
const LOOK_BYTES: usize = 64 << 10;

/// Bytes copied and checksummed at a time: few enough to be still in the nearest cache for the checksum.
const SUM_BYTES: usize = 16 << 10;

/// Walks the chunks of one log.
pub(super) struct Walker<'l, L: LogBytes> {
    log: &'l L,
    seed: u32,
    pub(super) cursors: Cursors,
}

impl<'l, L: LogBytes> Walker<'l, L> {
    /// Starts at `cursors` where they are still valid, and at the start of chunks that were reused.
    pub(super) fn new(
        log: &'l L,
        session: SessionId,
        cursors: &Cursors,
    ) -> Result<Self, ScanError<L::Error>> {
        let chunks = (log.len_bytes() / CHUNK_BYTES).min(CHUNKS_MAX) as usize;
        let mut walker = Self {
            log,
            seed: crc_seed(session),
            cursors: Cursors {
                chunks: vec![Cursor::default(); chunks],
            },
        };
        for chunk in 0..chunks {
            let start = chunk_start(chunk);
            let mut cursor = Cursor {
                pos: start,
                ..Cursor::default()
            };
            if let Some(known) = cursors.chunks.get(chunk)
                && known.first.is_some()
            {
                let header = walker.read_header(chunk, start)?;
                if known.first == Some((header.seq.get(), header.crc32c.get())) {
                    cursor = *known;
                }
            }
            walker.cursors.chunks[chunk] = cursor;
        }
        Ok(walker)
    }

    pub(super) fn chunks(&self) -> usize {
        self.cursors.chunks.len()
    }

    fn read_header(&self, chunk: usize, pos: u64) -> Result<EntryHeader, ScanError<L::Error>> {
        let mut bytes = [0; HEADER_SIZE];
        self.log
            .read(chunk as u64 * CHUNK_BYTES + pos, &mut bytes)
            .map_err(ScanError::Device)?;
        // Reading a plain struct from an array of its size cannot fail.
        Ok(EntryHeader::read_from_bytes(&bytes).unwrap_or_else(|_| EntryHeader::new_zeroed()))
    }

    /// Returns the chunk's next possible entry: its length and its number are plausible, its checksum is not
    /// verified.
    pub(super) fn peek(&self, chunk: usize) -> Result<Option<Head>, ScanError<L::Error>> {
        let cursor = self.cursors.chunks[chunk];
        if cursor.pos + HEADER_SIZE as u64 > CHUNK_BYTES {
            return Ok(None);
        }
        let header = self.read_header(chunk, cursor.pos)?;
        let payload_len = header.payload_len.get() as usize;
        let seq = header.seq.get();
        let possible = seq > cursor.last_seq
            && seq < u64::MAX
            && payload_len <= PAYLOAD_MAX
            && cursor.pos + entry_size(payload_len) as u64 <= CHUNK_BYTES;
        Ok(possible.then_some(Head { chunk, header }))
    }

    /// Copies the payload of `head` to `out`, which has the payload's length, and returns whether the
    /// checksum is right.
    pub(super) fn copy_payload(&self, head: &Head, out: &mut [u8]) -> Result<bool, ScanError<L::Error>> {
        let mut pos = self.cursors.chunks[head.chunk].pos + HEADER_SIZE as u64;
        let mut sum = self.seed;
        for piece in out.chunks_mut(SUM_BYTES) {
            self.log
                .read(head.chunk as u64 * CHUNK_BYTES + pos, piece)
                .map_err(ScanError::Device)?;
            sum = self.log.payload_crc(sum, piece);
            pos += piece.len() as u64;
        }
        Ok(is_sound(&head.header, sum))
    }

    /// Returns the offset of the payload of `head` in the log.
    pub(super) fn payload_at(&self, head: &Head) -> u64 {
        head.chunk as u64 * CHUNK_BYTES + self.cursors.chunks[head.chunk].pos + HEADER_SIZE as u64
    }

    /// Searches behind the end of a chunk for an entry above `last` that says that the number after `last`
    /// was committed. Such an entry proves that something before it is damaged. Skips a chunk that was never
    /// used.
    pub(super) fn hidden(
        &self,
        chunk: usize,
        last: LogSeq,
    ) -> Result<Option<EntryHeader>, ScanError<L::Error>> {
        let start = self.cursors.chunks[chunk].pos;
        if start + HEADER_SIZE as u64 > CHUNK_BYTES || self.read_header(chunk, start)?.seq.get() == 0 {
            return Ok(None);
        }
        let mut piece = vec![0; LOOK_BYTES.min((CHUNK_BYTES - start) as usize)];
        let mut payload = Vec::new();
        for from in (start..CHUNK_BYTES).step_by(LOOK_BYTES) {
            let len = LOOK_BYTES.min((CHUNK_BYTES - from) as usize);
            self.log
                .read(chunk as u64 * CHUNK_BYTES + from, &mut piece[..len])
                .map_err(ScanError::Device)?;
            for (pos, bytes) in (from..)
                .step_by(HEADER_SIZE)
                .zip(piece[..len].chunks_exact(HEADER_SIZE))
            {
                let header =
                    EntryHeader::read_from_bytes(bytes).unwrap_or_else(|_| EntryHeader::new_zeroed());
                let len = header.payload_len.get() as usize;
                let possible = header.seq.get() > last.0 + 1
                    && stable_below(&header).0 > last.0 + 1
                    && len <= PAYLOAD_MAX
                    && pos + entry_size(len) as u64 <= CHUNK_BYTES;
                if !possible {
                    continue;
                }
                payload.resize(len, 0);
                self.log
                    .read(
                        chunk as u64 * CHUNK_BYTES + pos + HEADER_SIZE as u64,
                        &mut payload,
                    )
                    .map_err(ScanError::Device)?;
                let sum = self.log.payload_crc(self.seed, &payload);
                if entry_crc(sum, &header) == header.crc32c.get() {
                    return Ok(Some(header));
                }
            }
        }
        Ok(None)
    }

    /// Steps over `head`, whose checksum was right.
    pub(super) fn step(&mut self, head: &Head) {
        let cursor = &mut self.cursors.chunks[head.chunk];
        if cursor.pos == chunk_start(head.chunk) {
            cursor.first = Some((head.seq(), head.header.crc32c.get()));
        }
        cursor.pos += entry_size(head.payload_len()) as u64;
        cursor.last_seq = head.seq();
    }
}

/// Maximum number of entries that [`pending_bytes`] reads.
const LOOKS_MAX: usize = 1 << 18;

/// Returns the bytes of log that hold entries above `digested`, judged by their headers alone; for display
/// only. Reads at most 2^18 entries.
///
/// # Errors
/// The log cannot be read.
pub fn pending_bytes<L: LogBytes>(
    log: &L,
    session: SessionId,
    digested: LogSeq,
    cursors: &Cursors,
) -> Result<u64, ScanError<L::Error>> {
    let mut walker = Walker::new(log, session, cursors)?;
    let (mut sum, mut looks) = (0, 0);
    for chunk in 0..walker.chunks() {
        while let Some(head) = walker.peek(chunk)? {
            looks += 1;
            if looks > LOOKS_MAX {
                return Ok(sum);
            }
            if head.seq() > digested.0 {
                sum += entry_size(head.payload_len()) as u64;
            }
            walker.step(&head);
        }
    }
    Ok(sum)
}

/// Returns the highest sequence number in the log, judged by the headers alone. Its entry may not count, and
/// may lie behind a gap that is still being filled.
///
/// # Errors
/// The log cannot be read.
pub fn newest_entry<L: LogBytes>(
    log: &L,
    session: SessionId,
    cursors: &Cursors,
) -> Result<LogSeq, ScanError<L::Error>> {
    let mut walker = Walker::new(log, session, cursors)?;
    let mut newest = 0;
    for chunk in 0..walker.chunks() {
        while let Some(head) = walker.peek(chunk)? {
            newest = newest.max(head.seq());
            walker.step(&head);
        }
    }
    Ok(LogSeq(newest))
}

/// Returns whether the checksum of the entry whose payload begins at `at` is right; does not keep the
/// payload.
pub(super) fn is_sound_at<L: LogBytes>(
    log: &L,
    session: SessionId,
    header: &EntryHeader,
    at: u64,
) -> Result<bool, ScanError<L::Error>> {
    let mut piece = [0; SUM_BYTES];
    let (mut sum, end) = (crc_seed(session), at + u64::from(header.payload_len.get()));
    for from in (at..end).step_by(SUM_BYTES) {
        let piece = &mut piece[..SUM_BYTES.min((end - from) as usize)];
        log.read(from, piece).map_err(ScanError::Device)?;
        sum = log.payload_crc(sum, piece);
    }
    Ok(is_sound(header, sum))
}

/// Returns whether an entry's checksum is right, given the checksum of its payload.
pub(super) fn is_sound(header: &EntryHeader, payload_crc: u32) -> bool {
    entry_crc(payload_crc, header) == header.crc32c.get() || armed(Bug::EntryChecksumIgnored)
}

/// Returns the number below which all entries were committed when this entry was written.
pub(super) const fn stable_below(header: &EntryHeader) -> LogSeq {
    LogSeq(header.seq.get().saturating_sub(header.stable_delta.get() as u64))
}
