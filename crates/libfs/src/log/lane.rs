//! One thread's part of the log: slots in it, staging, commit. Knows the bytes of an entry's header through
//! `format` only.

use super::chunks::chunk_start;
use super::{Log, LogHost, Stamp, slots};
use crate::errno::{Errno, OpError, OpResult};
use crate::seeded::{Bug, armed};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{MutexGuard, spin_loop, yield_now};
use crossbeam_utils::CachePadded;
use std::cell::Cell;
use varve_format::log::{
    CHUNK_BYTES, HEADER_SIZE, PAYLOAD_MAX, TX_ENTRIES_MAX, entry_crc, entry_size, payload_crc,
};
use varve_format::{EntryFlags, EntryHeader, EntryMeta, LogOp, LogSeq, SeqRange};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// Value of `in_flight`: no number is in flight.
const IDLE: u64 = u64::MAX;
/// Value of `in_flight`: a number is being taken; wait until it is known.
const TAKING: u64 = 0;
/// Payloads up to this many bytes are put together with their header on the stack and stored at once.
const COMPOSE_MAX: usize = 448;
/// As [`COMPOSE_MAX`], in a smaller buffer.
const COMPOSE_SMALL: usize = 128;

/// A lane. Only the thread that has the lane (or holds the shared lane's lock) writes the words of `own`.
pub(super) struct Lane {
    /// Lowest number taken by this lane and not yet published, [`IDLE`] or [`TAKING`].
    in_flight: CachePadded<AtomicU64>,
    own: CachePadded<Own>,
}

#[derive(Default)]
struct Own {
    /// First byte for entries of the current chunk.
    start: AtomicU64,
    /// End of the committed entries.
    pos: AtomicU64,
    /// End of the current chunk; 0 if there is none.
    end: AtomicU64,
    /// Highest number written.
    last_seq: AtomicU64,
    busy: AtomicBool,
    /// Blocks reserved for this lane.
    reserved: AtomicU64,
}

impl Lane {
    pub(super) fn new() -> Self {
        Self {
            in_flight: CachePadded::new(AtomicU64::new(IDLE)),
            own: CachePadded::new(Own::default()),
        }
    }

    /// Returns the number of blocks reserved for the lane.
    pub(super) fn reserved(&self) -> u64 {
        self.own.reserved.load(Ordering::Relaxed)
    }

    /// Takes the lane's reserved blocks away.
    pub(super) fn take_reserved(&self) -> u64 {
        // Most lanes never had any.
        match self.reserved() {
            0 => 0,
            _ => self.own.reserved.swap(0, Ordering::Relaxed),
        }
    }

    /// Lowest number in flight, `u64::MAX` if none.
    #[inline]
    pub(super) fn in_flight(&self) -> u64 {
        let mut spins = 0_u32;
        loop {
            match self.in_flight.load(Ordering::Acquire) {
                TAKING if spins < 200 => spin_loop(),
                TAKING => yield_now(),
                seq => return seq,
            }
            spins += 1;
        }
    }

    /// Current chunk and how far it is committed: start and end of its entries.
    pub(super) fn committed(&self) -> (u64, u64) {
        (
            self.own.start.load(Ordering::Acquire),
            self.own.pos.load(Ordering::Acquire),
        )
    }
}

/// An entry whose payload is in the log, without its header.
#[derive(Debug, Clone, Copy)]
struct Piece {
    pos: u64,
    crc: u32,
    body_len: u32,
    header: EntryHeader,
}

/// A chunk that was left while staging: it is retired at the commit.
struct Left {
    start: u64,
    end: u64,
    /// Pieces staged before it was left.
    pieces: usize,
}

/// A slot's state beyond one entry.
#[derive(Default)]
struct Staging {
    pieces: Vec<Piece>,
    left: Vec<Left>,
    logged: Vec<Logged>,
}

/// The calling thread's lane, with space taken in it. Dropped without commit, it leaves nothing.
///
/// Small on purpose: bytes stored after a non-temporal copy cannot be loaded in another width before the
/// write buffers are drained (a failed store-to-load forwarding waits for them), so nothing large may be
/// moved between the copy and the return.
pub struct Slot<'l> {
    log: &'l Log,
    lane: &'l Lane,
    index: usize,
    start: u64,
    pos: u64,
    end: u64,
    staging: Option<Box<Staging>>,
    // Also keeps a slot on its thread: the guard cannot be sent.
    _shared: Option<MutexGuard<'l, ()>>,
}

/// A committed entry's number and the location of its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Logged {
    /// Its number.
    pub seq: LogSeq,
    /// Log address of the data.
    pub addr: u64,
    /// Bytes of data.
    pub len: u32,
    /// The header's offset field.
    pub offset: u64,
}

/// Result of one write, while its slot still keeps the number in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Receipt {
    pub(crate) seq: LogSeq,
    /// Log address of the data.
    pub(crate) addr: u64,
    pub(crate) live: bool,
}

impl Receipt {
    /// As [`Committed::check`].
    #[inline]
    pub(crate) fn check<T>(self, result: T) -> OpResult<T> {
        if self.live {
            return Ok(result);
        }
        Err(OpError::SessionLost {
            committed: Some((
                SeqRange {
                    first: self.seq,
                    last: self.seq,
                },
                result,
            )),
            otherwise: None,
        })
    }
}

/// A committed transaction. While this exists its numbers count as in flight: publish, then drop it.
pub struct Committed<'l> {
    slot: Slot<'l>,
    /// The only entry of a transaction of one.
    only: Logged,
    /// Its numbers.
    pub seqs: SeqRange,
    /// The session was live after the commit. If not, the seal decides whether the transaction counts.
    pub live: bool,
}

thread_local! {
    static BODY: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

impl<'l> Slot<'l> {
    #[inline]
    pub(super) fn take<T>(log: &'l Log, host: &dyn LogHost, bytes: usize) -> OpResult<Self, T> {
        let mut index = slots::lane();
        let mut guard = None;
        if index >= log.own_lanes {
            index = slots::SHARED;
            guard = Some(log.lock_shared());
        }
        let lane = &log.lanes[index];
        let own = &lane.own;
        if own.busy.load(Ordering::Relaxed) {
            return Err(OpError::Failed(Errno(libc::EDEADLK)));
        }
        own.busy.store(true, Ordering::Relaxed);
        let mut slot = Self {
            log,
            lane,
            index,
            start: own.start.load(Ordering::Relaxed),
            pos: own.pos.load(Ordering::Relaxed),
            end: own.end.load(Ordering::Relaxed),
            staging: None,
            _shared: guard,
        };
        if slot.pos + bytes as u64 > slot.end {
            slot.turn(host, bytes)?;
        }
        Ok(slot)
    }

    /// Goes to a fresh chunk before anything is staged.
    #[cold]
    fn turn<T>(&mut self, host: &dyn LogHost, bytes: usize) -> OpResult<(), T> {
        if bytes as u64 > CHUNK_BYTES - HEADER_SIZE as u64 {
            return Err(OpError::Failed(Errno(libc::EINVAL)));
        }
        let own = &self.lane.own;
        if self.end != 0 {
            // Retired before a new one is taken: in a small log it may be the one that is reused.
            let mut pool = self.log.pool.lock();
            pool.retire(
                self.index,
                self.start,
                self.pos,
                own.last_seq.load(Ordering::Relaxed),
            );
            pool.synced[self.index] = 0;
            own.start.store(0, Ordering::Release);
            own.pos.store(0, Ordering::Release);
            own.end.store(0, Ordering::Release);
            (self.start, self.pos, self.end) = (0, 0, 0);
        }
        let start = self.log.take_chunk(host)?;
        let mut pool = self.log.pool.lock();
        pool.synced[self.index] = start;
        own.start.store(start, Ordering::Release);
        own.pos.store(start, Ordering::Release);
        own.end.store(chunk_end(start), Ordering::Release);
        (self.start, self.pos, self.end) = (start, start, chunk_end(start));
        Ok(())
    }

    /// Index of the lane.
    pub(crate) const fn index(&self) -> usize {
        self.index
    }

    /// Whether the thread has this lane for itself, so that it may overwrite in place.
    pub(crate) const fn owns_lane(&self) -> bool {
        self.index != slots::SHARED
    }

    /// Blocks reserved for this lane: the slot's holder spends them, and other threads may take the rest.
    pub(crate) fn reserved(&self) -> &AtomicU64 {
        &self.lane.own.reserved
    }

    /// Returns reserved blocks that were consumed for entries that are not logged after all.
    #[inline]
    pub(crate) fn pay_back(&self, blocks: u32) {
        if blocks > 0 {
            self.reserved().fetch_add(u64::from(blocks), Ordering::Relaxed);
        }
    }

    /// Most payload bytes that one entry can have before the lane needs another chunk.
    #[must_use]
    pub fn room(&self) -> usize {
        ((self.end - self.pos) as usize)
            .saturating_sub(HEADER_SIZE)
            .min(PAYLOAD_MAX)
    }

    /// Copies the payload of one entry to the log, loading each byte of the data once. May be called again:
    /// the entries make one transaction (at most [`TX_ENTRIES_MAX`]). No inode may be locked. Takes further
    /// chunks where needed.
    ///
    /// # Errors
    /// As [`Log::reserve`]; `E2BIG` for too many entries, `EINVAL` for too long a payload.
    pub fn stage<T>(&mut self, host: &dyn LogHost, op: &LogOp<'_>, flags: EntryFlags) -> OpResult<(), T> {
        let staged = self.staged();
        if staged as u64 >= u64::from(TX_ENTRIES_MAX) {
            return Err(OpError::Failed(Errno(libc::E2BIG)));
        }
        with_body(op, |body| {
            let payload_len = body.len() + op.data().len();
            if payload_len > PAYLOAD_MAX {
                return Err(OpError::Failed(Errno(libc::EINVAL)));
            }
            let size = entry_size(payload_len) as u64;
            if self.pos + size > self.end {
                let start = self.log.take_chunk(host)?;
                let left = Left {
                    start: self.start,
                    end: self.pos,
                    pieces: staged,
                };
                self.staging.get_or_insert_default().left.push(left);
                (self.start, self.pos, self.end) = (start, start, chunk_end(start));
            }
            let crc = self.store_payload(body, op.data())?;
            let meta = EntryMeta {
                flags,
                ..EntryMeta::default()
            };
            let piece = Piece {
                pos: self.pos,
                crc,
                body_len: body.len() as u32,
                header: op.header(&meta, body.len()),
            };
            self.pos += size;
            self.staging.get_or_insert_default().pieces.push(piece);
            Ok(())
        })
    }

    fn staged(&self) -> usize {
        self.staging.as_ref().map_or(0, |staging| staging.pieces.len())
    }

    /// Gives the staged entries their numbers, writes their headers and fences once: committed when this
    /// returns. `add_offset` is added to the offset of every staged write. Called under the locks of the
    /// inodes concerned.
    ///
    /// # Errors
    /// The region's; nothing counts then.
    pub fn commit<T>(mut self, stamp: Stamp, add_offset: u64) -> OpResult<Committed<'l>, T> {
        let Some(mut staging) = self.staging.take().filter(|staging| !staging.pieces.is_empty()) else {
            return Err(OpError::Failed(Errno(libc::EINVAL)));
        };
        let count = staging.pieces.len() as u64;
        let (first, stable) = self.number(count);
        let Staging { pieces, logged, .. } = &mut *staging;
        for (index, piece) in pieces.iter_mut().enumerate() {
            let index = index as u64;
            let header = &mut piece.header;
            if header.op == varve_format::OpCode::Write as u8 {
                header.offset = U64::new(header.offset.get() + add_offset);
            }
            complete(
                header,
                stamp,
                first + index,
                stable,
                (count - 1 - index) as u32,
                index > 0,
            );
            header.crc32c = U32::new(entry_crc(piece.crc, header));
            if let Err(error) = self.log.region.write(piece.pos, header.as_bytes()) {
                return Err(OpError::Failed(self.log.refused(&error)));
            }
            logged.push(Logged {
                seq: LogSeq(first + index),
                addr: piece.pos + (HEADER_SIZE as u64) + u64::from(piece.body_len),
                len: header.payload_len.get() - piece.body_len,
                offset: header.offset.get(),
            });
        }
        let only = logged[0];
        let left = std::mem::take(&mut staging.left);
        self.staging = Some(staging);
        self.log
            .commit_fence()
            .map_err(|error| OpError::Failed(self.log.refused(&error)))?;
        if !left.is_empty() {
            self.retire_left(&left, first);
        }
        Ok(self.committed(first, count, only))
    }

    /// Numbers, copies and commits one operation with a single drain of the processor's write buffers. The
    /// payload is copied under the caller's locks: it must be in memory that cannot fault for long (touch
    /// user memory before).
    ///
    /// # Errors
    /// As [`commit`](Self::commit); `EINVAL` if it is larger than the reserved space.
    #[inline]
    pub fn append<T>(
        mut self,
        op: &LogOp<'_>,
        flags: EntryFlags,
        stamp: Stamp,
    ) -> OpResult<Committed<'l>, T> {
        let receipt =
            with_body(op, |body| self.append_one(op, body, flags, stamp)).map_err(OpError::Failed)?;
        let only = Logged {
            seq: receipt.seq,
            addr: receipt.addr,
            len: op.data().len() as u32,
            offset: 0,
        };
        let seqs = SeqRange {
            first: receipt.seq,
            last: receipt.seq,
        };
        Ok(Committed {
            slot: self,
            only,
            seqs,
            live: receipt.live,
        })
    }

    /// As [`append`](Self::append), without consuming the slot, for one operation whose encoded body is
    /// `body`.
    #[inline]
    pub(crate) fn append_one(
        &mut self,
        op: &LogOp<'_>,
        body: &[u8],
        flags: EntryFlags,
        stamp: Stamp,
    ) -> Result<Receipt, Errno> {
        let number = self.number(1);
        self.append_numbered(op, body, flags, stamp, number)
    }

    /// As [`append`](Self::append), for several operations that count together or not at all.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn append_all<T>(
        mut self,
        ops: &[(LogOp<'_>, EntryFlags)],
        stamp: Stamp,
    ) -> OpResult<Committed<'l>, T> {
        let count = ops.len() as u64;
        if count == 0 || count > u64::from(TX_ENTRIES_MAX) {
            return Err(OpError::Failed(Errno(libc::EINVAL)));
        }
        let mut staging = Box::<Staging>::default();
        let (first, stable) = self.number(count);
        for (index, (op, flags)) in ops.iter().enumerate() {
            let index = index as u64;
            let stored = with_body(op, |body| {
                let part = Part {
                    seq: first + index,
                    stable,
                    left: (count - 1 - index) as u32,
                    continues: index > 0,
                };
                self.put(op, body, *flags, stamp, part)
            });
            match stored {
                Ok(addr) => staging.logged.push(Logged {
                    seq: LogSeq(first + index),
                    addr,
                    len: op.data().len() as u32,
                    offset: 0,
                }),
                Err(errno) => {
                    self.fill_with_noops((first, stable), count);
                    return Err(OpError::Failed(errno));
                }
            }
        }
        let only = staging.logged[0];
        self.staging = Some(staging);
        self.log
            .commit_fence()
            .map_err(|error| OpError::Failed(self.log.refused(&error)))?;
        Ok(self.committed(first, count, only))
    }

    /// Stores one entry, header and all, at the slot's position; returns the log address of its data.
    #[inline]
    fn put(
        &mut self,
        op: &LogOp<'_>,
        body: &[u8],
        flags: EntryFlags,
        stamp: Stamp,
        part: Part,
    ) -> Result<u64, Errno> {
        let data = op.data();
        let len = body.len() + data.len();
        let size = entry_size(len) as u64;
        if len > PAYLOAD_MAX || self.pos + size > self.end {
            return Err(Errno(libc::EINVAL));
        }
        let meta = EntryMeta {
            flags,
            ..EntryMeta::default()
        };
        let mut header = op.header(&meta, body.len());
        complete(
            &mut header,
            stamp,
            part.seq,
            part.stable,
            part.left,
            part.continues,
        );
        if len <= COMPOSE_SMALL {
            self.compose::<{ HEADER_SIZE + COMPOSE_SMALL }>(header, body, data)?;
        } else if len <= COMPOSE_MAX {
            self.compose::<{ HEADER_SIZE + COMPOSE_MAX }>(header, body, data)?;
        } else {
            let crc = self
                .store_payload::<()>(body, data)
                .map_err(|_| Errno(libc::EIO))?;
            let line = header_line(header, crc);
            if let Err(error) = self.log.region.write(self.pos, line.as_bytes()) {
                return Err(self.log.refused(&error));
            }
        }
        let addr = self.pos + (HEADER_SIZE + body.len()) as u64;
        self.pos += size;
        Ok(addr)
    }

    /// Assembles a small entry on the stack and stores it at once.
    #[inline]
    fn compose<const N: usize>(&self, header: EntryHeader, body: &[u8], data: &[u8]) -> Result<(), Errno> {
        let mut bytes = [0_u8; N];
        let len = body.len() + data.len();
        bytes[HEADER_SIZE..HEADER_SIZE + body.len()].copy_from_slice(body);
        bytes[HEADER_SIZE + body.len()..HEADER_SIZE + len].copy_from_slice(data);
        let crc = payload_crc(self.log.seed, &bytes[HEADER_SIZE..HEADER_SIZE + len]);
        bytes[..HEADER_SIZE].copy_from_slice(header_line(header, crc).as_bytes());
        match self.log.region.write(self.pos, &bytes[..entry_size(len)]) {
            Ok(()) => Ok(()),
            Err(error) => Err(self.log.refused(&error)),
        }
    }

    /// Copies a payload to the slot's position, after the space of its header; returns its checksum.
    #[inline]
    fn store_payload<T>(&self, body: &[u8], data: &[u8]) -> OpResult<u32, T> {
        let region = &self.log.region;
        let at = self.pos + HEADER_SIZE as u64;
        let mut crc = self.log.seed;
        for (at, bytes) in [(at, body), (at + body.len() as u64, data)] {
            if !bytes.is_empty() {
                crc = region
                    .write_crc(at, bytes, crc)
                    .map_err(|error| OpError::Failed(self.log.refused(&error)))?;
            }
        }
        if armed(Bug::EntryPayloadUnchecked) {
            return Ok(self.log.seed);
        }
        if armed(Bug::EntryTailUnchecked) {
            return Ok(payload_crc(self.log.seed, &[body, data].concat()));
        }
        Ok(crc)
    }

    /// Takes `count` numbers, which are in flight from here on, and computes the stable number below them.
    #[inline]
    fn number(&self, count: u64) -> (u64, u64) {
        if !armed(Bug::NumberBeforeFlight) {
            self.lane.in_flight.store(TAKING, Ordering::Relaxed);
        }
        // A thread that sees a later number also sees the store above: this is a release, and its load an
        // acquire.
        let first = self.log.next_seq.fetch_add(count, Ordering::SeqCst);
        self.lane.in_flight.store(first, Ordering::Release);
        (first, self.log.stable(self.index, first))
    }

    /// Extends the lane's committed part, after the fence.
    #[inline]
    fn advance(&self, last: u64) {
        let own = &self.lane.own;
        own.last_seq.store(last, Ordering::Relaxed);
        own.pos.store(self.pos, Ordering::Release);
    }

    fn committed(self, first: u64, count: u64, only: Logged) -> Committed<'l> {
        let last = first + count - 1;
        self.advance(last);
        let live = self.log.is_live();
        Committed {
            seqs: SeqRange {
                first: LogSeq(first),
                last: LogSeq(last),
            },
            live,
            only,
            slot: self,
        }
    }

    /// Retires the chunks that staging has filled, and makes the last one the lane's current chunk.
    #[cold]
    fn retire_left(&self, lefts: &[Left], first: u64) {
        let own = &self.lane.own;
        let mut pool = self.log.pool.lock();
        let before = own.last_seq.load(Ordering::Relaxed);
        for left in lefts {
            let last = if left.pieces == 0 {
                before
            } else {
                first + left.pieces as u64 - 1
            };
            pool.retire(self.index, left.start, left.end, last);
            pool.synced[self.index] = 0;
        }
        pool.synced[self.index] = self.start;
        own.start.store(self.start, Ordering::Release);
        own.pos.store(self.start, Ordering::Release);
        own.end.store(self.end, Ordering::Release);
    }

    /// Writes no-ops for numbers whose entries could not be written, so that the log stays dense. They claim
    /// no higher stable number than [`number`](Self::number) returned: lower numbers may be in flight.
    #[cold]
    fn fill_with_noops(&mut self, (first, stable): (u64, u64), count: u64) {
        let stable = if armed(Bug::NoopClaimsStable) {
            first
        } else {
            stable
        };
        let own = &self.lane.own;
        self.pos = own.pos.load(Ordering::Relaxed);
        for seq in first..first + count {
            let mut header = LogOp::Noop.header(&EntryMeta::default(), 0);
            complete(&mut header, Stamp::default(), seq, stable, 0, false);
            header.crc32c = U32::new(entry_crc(payload_crc(self.log.seed, &[]), &header));
            if self.pos + HEADER_SIZE as u64 > own.end.load(Ordering::Relaxed)
                || self
                    .log
                    .region
                    .write(self.pos, header.as_bytes())
                    .inspect_err(|error| self.log.note_failure(error))
                    .is_err()
            {
                // The rest of the log cannot be digested past this number before the session is sealed.
                tracing::error!(seq, "a log number was lost");
                return;
            }
            self.pos += HEADER_SIZE as u64;
        }
        if self.log.region.fence().is_ok() {
            own.last_seq.store(first + count - 1, Ordering::Relaxed);
            own.pos.store(self.pos, Ordering::Release);
        }
    }

    /// Replaces a taken number by a no-op; for an overwrite in place that finds the inode locked.
    #[cold]
    pub(crate) fn abandon(&mut self, number: (u64, u64)) {
        self.fill_with_noops(number, 1);
    }

    /// First half of [`append`](Self::append): takes one number.
    #[inline]
    pub(crate) fn take_number(&self) -> (u64, u64) {
        self.number(1)
    }

    /// Second half of [`append_one`](Self::append_one).
    #[inline]
    pub(crate) fn append_numbered(
        &mut self,
        op: &LogOp<'_>,
        body: &[u8],
        flags: EntryFlags,
        stamp: Stamp,
        (seq, stable): (u64, u64),
    ) -> Result<Receipt, Errno> {
        let part = Part {
            seq,
            stable,
            left: 0,
            continues: false,
        };
        let addr = match self.put(op, body, flags, stamp, part) {
            Ok(addr) => addr,
            Err(errno) => {
                self.fill_with_noops((seq, stable), 1);
                return Err(errno);
            }
        };
        if let Err(error) = self.log.commit_fence() {
            return Err(self.log.refused(&error));
        }
        self.advance(seq);
        Ok(Receipt {
            seq: LogSeq(seq),
            addr,
            live: self.log.is_live(),
        })
    }
}

/// An entry's place in its transaction.
#[derive(Clone, Copy)]
struct Part {
    seq: u64,
    stable: u64,
    left: u32,
    continues: bool,
}

/// A header with its checksum, as whole words: they are stored and loaded in the same width.
#[inline]
fn header_line(header: EntryHeader, payload_crc: u32) -> [u64; 8] {
    let mut words: [u64; 8] = zerocopy::transmute!(header);
    let crc = crc32c::crc32c_append(payload_crc, &words.as_bytes()[4..]);
    words[0] |= u64::from(crc).to_le();
    words
}

impl Drop for Slot<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(staging) = &self.staging
            && !staging.left.is_empty()
        {
            // Staged over several chunks and not committed (a commit takes these): the lane is still in the
            // first.
            let mut pool = self.log.pool.lock();
            for later in &staging.left[1..] {
                pool.give_back(later.start);
            }
            pool.give_back(self.start);
        }
        self.lane.in_flight.store(IDLE, Ordering::Release);
        self.lane.own.busy.store(false, Ordering::Relaxed);
    }
}

impl Committed<'_> {
    /// The entries, in order. The offset is set for staged writes; entries of [`Slot::append`] and
    /// [`Slot::append_all`] have 0 here.
    pub fn entries(&self) -> &[Logged] {
        match &self.slot.staging {
            Some(staging) => &staging.logged,
            None => std::slice::from_ref(&self.only),
        }
    }

    /// Returns `result` if the session was live after the commit, else the lost session's error with it.
    ///
    /// # Errors
    /// `SessionLost` with the transaction's numbers.
    pub fn check<T>(&self, result: T) -> OpResult<T> {
        if self.live {
            Ok(result)
        } else {
            Err(OpError::SessionLost {
                committed: Some((self.seqs, result)),
                otherwise: None,
            })
        }
    }
}

impl Log {
    #[cold]
    fn lock_shared(&self) -> MutexGuard<'_, ()> {
        let guard = self.shared.lock();
        // Before any number is taken in the shared lane, so a thread that sees the number looks at the lane.
        self.shared_used.store(true, Ordering::SeqCst);
        guard
    }
}

const fn chunk_end(start: u64) -> u64 {
    (start / CHUNK_BYTES + 1) * CHUNK_BYTES
}

/// Fills in the header fields that are known at the commit.
#[inline]
fn complete(header: &mut EntryHeader, stamp: Stamp, seq: u64, stable: u64, tx_left: u32, continues: bool) {
    header.seq = U64::new(seq);
    header.time_ns = zerocopy::little_endian::I64::new(stamp.time_ns);
    header.base = U64::new(stamp.base.0);
    header.stable_delta = U32::new(seq.saturating_sub(stable).min(u64::from(u32::MAX)) as u32);
    header.tx_left = U32::new(tx_left);
    if continues {
        header.flags |= EntryFlags::CONTINUES.bits();
    }
}

/// Calls `run` with the encoded body of `op`, in a buffer that the thread keeps.
#[inline]
pub(crate) fn with_body<R>(op: &LogOp<'_>, run: impl FnOnce(&[u8]) -> R) -> R {
    if matches!(
        op,
        LogOp::Write { .. } | LogOp::Truncate { .. } | LogOp::Noop | LogOp::Forget { .. }
    ) {
        return run(&[]);
    }
    let mut body = BODY.try_with(Cell::take).unwrap_or_default();
    body.clear();
    op.encode_body(&mut body);
    let result = run(&body);
    let _ = BODY.try_with(|kept| kept.set(body));
    result
}

const _: () = assert!(chunk_start(0) == 64 && chunk_end(64) == CHUNK_BYTES);
