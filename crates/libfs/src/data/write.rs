//! Writing: into the log, then published in the inode. Three ways, by the effect that a call may have on the
//! file:
//!
//! - *in place*: small, whole blocks, below the size, no mode change. Under no lock; see [`crate::inode`].
//! - *direct*: small. Copied to the log under the inode's exclusive lock, if that is free: one drain of the
//!   write buffers. The user's pages are touched before, so that the copy does not fault.
//! - *staged*: large, or the lock is held. Copied first, then numbered and committed under the lock.

use super::DataPlane;
use crate::errno::{Errno, OpError, OpResult};
use crate::inode::{Inode, InodeWrite};
use crate::log::{Committed, Receipt, Slot, Stamp, TX_BYTES_MAX, slots};
use std::sync::Arc;
use varve_format::log::{HEADER_SIZE, PAYLOAD_MAX, entry_size};
use varve_format::{
    BLOCK_BYTES, BLOCK_SIZE, EntryFlags, FILE_SIZE_MAX, FallocateMode, InodeKey, LogOp, LogSeq, charge,
};

/// Largest write that is copied under the inode's lock.
const DIRECT_MAX: usize = 16 << 10;
/// Least payload room in a chunk for which staging begins an entry; with less, it takes the next chunk.
const ROOM_MIN: usize = 8 << 10;
/// Buffer of a copy between files.
const COPY_BYTES: usize = 1 << 20;

/// Loads a byte of each page, so that a later copy does not fault.
#[inline]
fn touch(data: &[u8]) {
    for at in (0..data.len()).step_by(BLOCK_SIZE) {
        std::hint::black_box(data[at]);
    }
    if let Some(last) = data.last() {
        std::hint::black_box(*last);
    }
}

/// Ends an overwrite in place.
struct InPlace(usize);

impl Drop for InPlace {
    #[inline]
    fn drop(&mut self) {
        slots::leave_overwrite(self.0);
    }
}

/// Position of a write.
#[derive(Clone, Copy)]
enum Place {
    At(u64),
    End,
}

impl Place {
    /// Most blocks that one entry for it may cost.
    fn worst(self, key: InodeKey, data: &[u8]) -> u32 {
        match self {
            Self::At(offset) => write_charge(key, offset, data),
            Self::End => write_charge(key, BLOCK_BYTES - 1, data),
        }
    }
}

/// Most blocks that a write costs, as the daemon counts them.
fn write_charge(key: InodeKey, offset: u64, data: &[u8]) -> u32 {
    charge(&LogOp::Write { key, offset, data })
}

/// A large write's entries, copied to the log and not committed yet.
struct Parts<'d> {
    /// Offset (of an append: from its beginning) and bytes of each.
    pieces: Vec<(u64, &'d [u8])>,
    /// Blocks consumed for them.
    blocks: u32,
}

impl DataPlane {
    /// Writes `data` at `offset`; on `dax` it is durable when this returns. `clear` names the set-id bits to
    /// clear. Needs the write lease. Calls up to 16 MiB (or a quarter of the log) happen as a whole or not at
    /// all.
    ///
    /// # Errors
    /// `EFBIG`, `ENOSPC` (nothing is logged), `EROFS`, `EIO`; `SessionLost`.
    #[inline]
    pub fn write(&self, inode: &Arc<Inode>, offset: u64, data: &[u8], clear: EntryFlags) -> OpResult<usize> {
        if data.is_empty() {
            return Ok(0);
        }
        let end = offset.saturating_add(data.len() as u64);
        if end > FILE_SIZE_MAX {
            return Err(OpError::Failed(Errno(libc::EFBIG)));
        }
        if data.len() > DIRECT_MAX {
            return self
                .write_large(inode, Place::At(offset), data, clear)
                .map(|(_, len)| len)
                .map_err(|e| e.map(|(_, len)| len));
        }
        let op = LogOp::Write {
            key: inode.key,
            offset,
            data,
        };
        // Room for a no-op, too: an overwrite in place may have to abandon its number.
        let mut slot = self.begin(entry_size(data.len()) + HEADER_SIZE, charge(&op))?;
        touch(data);
        let whole = (offset | data.len() as u64).is_multiple_of(BLOCK_BYTES);
        if whole
            && end <= inode.size_hint()
            && clear.is_empty()
            && slot.owns_lane()
            && let Some(receipt) = self.overwrite(inode, &mut slot, &op, offset, data.len())?
        {
            return receipt.check(data.len());
        }
        match self.write_locked(inode, slot, Place::At(offset), data, clear) {
            Ok(_) => Ok(data.len()),
            Err(error) => Err(error.map(|(_, len)| len)),
        }
    }

    /// Writes `data` at the end of the file; returns its offset. As [`write`](Self::write).
    ///
    /// # Errors
    /// As for `write`.
    #[inline]
    pub fn append(&self, inode: &Arc<Inode>, data: &[u8], clear: EntryFlags) -> OpResult<(u64, usize)> {
        if data.is_empty() {
            return Ok((inode.read().attr.size_bytes, 0));
        }
        if data.len() > self.part_max() {
            let _alone = inode.appends.write();
            return self.write_large(inode, Place::End, data, clear);
        }
        let _beside = inode.appends.read();
        if data.len() > DIRECT_MAX {
            return self.write_large(inode, Place::End, data, clear);
        }
        // The offset is known only under the lock: reserve for the most expensive one.
        let worst = Place::End.worst(inode.key, data);
        let slot = self.begin(entry_size(data.len()), worst)?;
        touch(data);
        self.write_locked(inode, slot, Place::End, data, clear)
    }

    /// Overwrites whole blocks below the size, under no lock. `None`: the inode is locked; the slot can be
    /// used again.
    #[inline]
    fn overwrite(
        &self,
        inode: &Arc<Inode>,
        slot: &mut Slot<'_>,
        op: &LogOp<'_>,
        offset: u64,
        len: usize,
    ) -> OpResult<Option<Receipt>, usize> {
        let stamp = self.stamp();
        slots::enter_overwrite(slot.index(), inode.id());
        let _in_place = InPlace(slot.index());
        // Taking the number is the full barrier between naming the inode and looking at its flag.
        let number = slot.take_number();
        if inode.is_exclusive() || offset + len as u64 > inode.size_hint() {
            slot.abandon(number);
            return Ok(None);
        }
        let receipt = slot
            .append_numbered(op, &[], EntryFlags::empty(), stamp, number)
            .map_err(OpError::Failed)?;
        if receipt.live {
            self.list(inode);
            inode.radix.publish(
                offset / BLOCK_BYTES,
                len as u64 / BLOCK_BYTES,
                receipt.addr,
                receipt.seq,
            );
            inode.note_overwrite(stamp.time_ns);
        }
        Ok(Some(receipt))
    }

    /// Performs a small write under the inode's lock.
    #[inline]
    fn write_locked(
        &self,
        inode: &Arc<Inode>,
        mut slot: Slot<'_>,
        place: Place,
        data: &[u8],
        clear: EntryFlags,
    ) -> OpResult<(u64, usize)> {
        let stamp = self.stamp();
        let key = inode.key;
        let Some(mut body) = inode.try_write() else {
            return self.write_behind(inode, slot, place, data, clear);
        };
        let offset = self.settle(&body, &slot, place, data)?;
        let op = LogOp::Write { key, offset, data };
        let receipt = slot.append_one(&op, &[], clear, stamp).map_err(OpError::Failed)?;
        if receipt.live {
            self.list(inode);
            publish_data(
                inode,
                &mut body,
                offset,
                data.len() as u64,
                receipt.addr,
                receipt.seq,
            );
            changed(&mut body, stamp, clear, receipt.seq);
        }
        // The number stays in flight until the slot goes, after this.
        drop(body);
        receipt.check((offset, data.len()))
    }

    /// Performs a small write to an inode that another thread has locked: copies while waiting.
    #[cold]
    fn write_behind(
        &self,
        inode: &Arc<Inode>,
        mut slot: Slot<'_>,
        place: Place,
        data: &[u8],
        clear: EntryFlags,
    ) -> OpResult<(u64, usize)> {
        let offset = if let Place::At(offset) = place { offset } else { 0 };
        let op = LogOp::Write {
            key: inode.key,
            offset,
            data,
        };
        // The slot may have no room left: an abandoned number took some.
        if let Err(error) = slot.stage(self, &op, clear) {
            slot.pay_back(place.worst(inode.key, data));
            return Err(error);
        }
        let mut body = inode.write();
        let stamp = self.stamp();
        let at = self.settle(&body, &slot, place, data)?;
        let committed = slot.commit(stamp, at - offset)?;
        self.publish(inode, &mut body, &committed, stamp, clear);
        committed.check((at, data.len()))
    }

    /// Returns the offset of a write under the inode's lock. An append pays back the reserved blocks that its
    /// real offset does not cost.
    #[inline]
    fn settle(
        &self,
        body: &InodeWrite<'_>,
        slot: &Slot<'_>,
        place: Place,
        data: &[u8],
    ) -> OpResult<u64, (u64, usize)> {
        match place {
            Place::At(offset) => Ok(offset),
            Place::End => {
                let offset = body.attr.size_bytes;
                if offset.saturating_add(data.len() as u64) > FILE_SIZE_MAX {
                    slot.pay_back(place.worst(body.attr.key, data));
                    return Err(OpError::Failed(Errno(libc::EFBIG)));
                }
                let blocks =
                    |offset: u64| (offset + data.len() as u64).div_ceil(BLOCK_BYTES) - offset / BLOCK_BYTES;
                let back = blocks(BLOCK_BYTES - 1) - blocks(offset % BLOCK_BYTES);
                slot.pay_back(back as u32);
                Ok(offset)
            }
        }
    }

    /// Most bytes of one transaction of a write.
    fn part_max(&self) -> usize {
        (TX_BYTES_MAX.min(self.log_max_bytes / 4)).max(DIRECT_MAX as u64) as usize
    }

    /// Performs a large write: one transaction after the other.
    #[cold]
    fn write_large(
        &self,
        inode: &Arc<Inode>,
        place: Place,
        data: &[u8],
        clear: EntryFlags,
    ) -> OpResult<(u64, usize)> {
        let most = self.part_max();
        let mut place = place;
        let mut start = None;
        let mut done = 0;
        while done < data.len() {
            let piece = &data[done..data.len().min(done + most)];
            match self.write_staged(inode, place, piece, clear) {
                Ok((offset, len)) => {
                    start.get_or_insert(offset);
                    done += len;
                    // An append goes on where its first part ended, not after other threads' appends.
                    place = Place::At(offset + len as u64);
                }
                Err(OpError::SessionLost { committed, .. }) => {
                    let first = start;
                    return Err(OpError::SessionLost {
                        committed: committed
                            .map(|(seqs, (offset, len))| (seqs, (first.unwrap_or(offset), done + len))),
                        otherwise: first.map(|first| (first, done)),
                    });
                }
                // The part that was written counts: a short write.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok((start.unwrap_or(0), done))
    }

    /// Performs one transaction of a large write: entries end at block boundaries of the file, so that the
    /// rest is whole blocks.
    fn write_staged(
        &self,
        inode: &Arc<Inode>,
        place: Place,
        data: &[u8],
        clear: EntryFlags,
    ) -> OpResult<(u64, usize)> {
        // The offset of an append is a guess until the lock is held; only the cuts depend on it.
        let guess = match place {
            Place::At(offset) => offset,
            Place::End => inode.size_hint() % BLOCK_BYTES,
        };
        let log = self.log().map_err(OpError::Failed)?;
        let _room = log.room_for(self, data.len());
        let mut slot = self.begin(entry_size(BLOCK_SIZE), 0)?;
        let Parts { pieces, blocks } = self.stage_parts(&mut slot, inode.key, place, guess, data, clear)?;
        debug_assert!(!pieces.is_empty() && blocks > 0);
        let stamp = self.stamp();
        let mut body = inode.write();
        let offset = match place {
            Place::At(offset) => offset,
            Place::End => body.attr.size_bytes,
        };
        if offset.saturating_add(data.len() as u64) > FILE_SIZE_MAX {
            slot.pay_back(blocks);
            return Err(OpError::Failed(Errno(libc::EFBIG)));
        }
        let add = if matches!(place, Place::End) { offset } else { 0 };
        // The offset, and with it the cost, is known only under the lock.
        let real = pieces
            .iter()
            .map(|(at, data)| write_charge(inode.key, at + add, data));
        slot.pay_back(blocks - real.sum::<u32>());
        let committed = slot.commit(stamp, add)?;
        self.publish(inode, &mut body, &committed, stamp, clear);
        committed.check((offset, data.len()))
    }

    /// Copies the entries of one transaction to the log, each with the most reserved blocks that it may cost.
    /// A failure keeps none of the blocks.
    fn stage_parts<'d>(
        &self,
        slot: &mut Slot<'_>,
        key: InodeKey,
        place: Place,
        guess: u64,
        data: &'d [u8],
        clear: EntryFlags,
    ) -> OpResult<Parts<'d>, (u64, usize)> {
        let is_append = matches!(place, Place::End);
        let (mut pieces, mut blocks, mut done) = (Vec::new(), 0, 0);
        while done < data.len() {
            let at = guess + done as u64;
            let len = cut(at, data.len() - done, slot.room());
            let piece = &data[done..done + len];
            let offset = if is_append { done as u64 } else { at };
            // An append may turn out to begin elsewhere in its block.
            let most = write_charge(key, offset, piece) + u32::from(is_append);
            let op = LogOp::Write {
                key,
                offset,
                data: piece,
            };
            let staged = self.consume(slot, most).and_then(|()| {
                blocks += most;
                slot.stage(self, &op, clear)
            });
            if let Err(error) = staged {
                slot.pay_back(blocks);
                return Err(error);
            }
            pieces.push((offset, piece));
            done += len;
        }
        Ok(Parts { pieces, blocks })
    }

    /// Makes committed writes visible. Nothing is published in a lost session: its inodes are read anew.
    #[inline]
    fn publish(
        &self,
        inode: &Arc<Inode>,
        body: &mut InodeWrite<'_>,
        committed: &Committed<'_>,
        stamp: Stamp,
        clear: EntryFlags,
    ) {
        if !committed.live {
            return;
        }
        self.list(inode);
        for entry in committed.entries() {
            publish_data(
                inode,
                body,
                entry.offset,
                u64::from(entry.len),
                entry.addr,
                entry.seq,
            );
        }
        changed(body, stamp, clear, committed.seqs.last);
    }

    /// Sets the length. Needs the write lease.
    ///
    /// # Errors
    /// `EFBIG`, `ENOSPC`, `EROFS`, `EIO`; `SessionLost`. Where it finds no space the daemon may still do
    /// it, out of the pool's reserve.
    pub fn truncate(&self, inode: &Arc<Inode>, size: u64, clear: EntryFlags) -> OpResult<()> {
        if size > FILE_SIZE_MAX {
            return Err(OpError::Failed(Errno(libc::EFBIG)));
        }
        let op = LogOp::Truncate { key: inode.key, size };
        let slot = self.begin(entry_size(0), charge(&op))?;
        let stamp = self.stamp();
        let mut body = inode.write();
        if let Err(errno) = body.check_alive() {
            slot.pay_back(charge(&op));
            return Err(OpError::Failed(errno));
        }
        let committed = slot.append(&op, clear, stamp)?;
        if committed.live {
            self.list(inode);
            cut_short(&mut body, size, committed.seqs.last);
            changed(&mut body, stamp, clear, committed.seqs.last);
        }
        committed.check(())
    }

    /// Allocates, zeroes or punches. Needs the write lease.
    ///
    /// # Errors
    /// `EINVAL` for an empty range, `EFBIG`, `ENOSPC`, `EROFS`, `EIO`; `SessionLost`.
    pub fn fallocate(
        &self,
        inode: &Arc<Inode>,
        mode: FallocateMode,
        offset: u64,
        len: u64,
        clear: EntryFlags,
    ) -> OpResult<()> {
        if len == 0 {
            return Err(OpError::Failed(Errno(libc::EINVAL)));
        }
        let end = offset.saturating_add(len);
        if end > FILE_SIZE_MAX {
            return Err(OpError::Failed(Errno(libc::EFBIG)));
        }
        let op = LogOp::Fallocate {
            key: inode.key,
            mode,
            offset,
            len,
        };
        let slot = self.begin(entry_size(16), charge(&op))?;
        let stamp = self.stamp();
        let mut body = inode.write();
        if let Err(errno) = body.check_alive() {
            slot.pay_back(charge(&op));
            return Err(OpError::Failed(errno));
        }
        let committed = slot.append(&op, clear, stamp)?;
        if committed.live {
            self.list(inode);
            match mode {
                FallocateMode::Allocate | FallocateMode::AllocateKeepSize => {}
                FallocateMode::PunchHole | FallocateMode::ZeroRange | FallocateMode::ZeroRangeKeepSize => {
                    body.pieces.zero(offset, end, committed.seqs.last);
                }
            }
            if mode.grows() {
                grow(&mut body, offset, end);
            }
            changed(&mut body, stamp, clear, committed.seqs.last);
        }
        committed.check(())
    }

    /// Copies up to `len` bytes between files (or within one); returns the number of bytes, which is lower at
    /// the end of `from`. Needs a lease on `from` and the write lease on `to`. Copied by value, in pieces of
    /// 1 MiB.
    ///
    /// # Errors
    /// `EINVAL` when the ranges overlap in one file; as for [`read`](Self::read) and [`write`](Self::write),
    /// when nothing was copied.
    pub fn copy_range(
        &self,
        from: &Arc<Inode>,
        from_offset: u64,
        to: &Arc<Inode>,
        to_offset: u64,
        len: u64,
        clear: EntryFlags,
    ) -> OpResult<u64> {
        let len = if from.key == to.key {
            within_one_file(from.attr().size_bytes, from_offset, to_offset, len).map_err(OpError::Failed)?
        } else {
            len
        };
        let mut buffer = vec![0; COPY_BYTES.min(len as usize)];
        let mut done = 0;
        while done < len {
            let want = buffer.len().min((len - done) as usize);
            let step = self
                .read(from, from_offset + done, &mut buffer[..want])
                .and_then(|got| self.write(to, to_offset + done, &buffer[..got], clear));
            match step {
                Ok(0) => break,
                Ok(copied) => done += copied as u64,
                Err(OpError::SessionLost { committed, otherwise }) => {
                    return Err(OpError::SessionLost {
                        committed: committed.map(|(seqs, copied)| (seqs, done + copied as u64)),
                        otherwise: otherwise
                            .map(|copied| done + copied as u64)
                            .or((done > 0).then_some(done)),
                    });
                }
                Err(_) if done > 0 => break,
                Err(error) => return Err(error.cast()),
            }
        }
        Ok(done)
    }
}

/// Number of bytes that a copy of `len` bytes within one file of `size_bytes` covers: only bytes that exist
/// when it begins, since programs pass a large length for "the rest".
///
/// # Errors
/// `EINVAL` when the source and the target overlap.
pub(crate) fn within_one_file(size_bytes: u64, from: u64, to: u64, len: u64) -> Result<u64, Errno> {
    let len = len.min(size_bytes.saturating_sub(from));
    if from < to.saturating_add(len) && to < from.saturating_add(len) {
        return Err(Errno(libc::EINVAL));
    }
    Ok(len)
}

/// Length of the next entry of a large write: the rest, or up to a block boundary of the file.
fn cut(at: u64, left: usize, room: usize) -> usize {
    let room = if room < ROOM_MIN { PAYLOAD_MAX } else { room };
    if left <= room {
        return left;
    }
    room - ((at + room as u64) % BLOCK_BYTES) as usize
}

/// Publishes one entry's data in the overlay and extends the file to its end.
#[inline]
pub(crate) fn publish_data(
    inode: &Inode,
    body: &mut InodeWrite<'_>,
    start: u64,
    len: u64,
    addr: u64,
    seq: LogSeq,
) {
    let end = start + len;
    let mut pos = start;
    while pos < end {
        let block = pos / BLOCK_BYTES;
        let base = block * BLOCK_BYTES;
        let at = addr + (pos - start);
        if pos == base && end - base >= BLOCK_BYTES {
            let blocks = (end - base) / BLOCK_BYTES;
            if !body.pieces.is_empty() {
                for block in block..block + blocks {
                    body.pieces.forget_block(block);
                }
            }
            inode.radix.publish(block, blocks, at, seq);
            pos += blocks * BLOCK_BYTES;
        } else {
            let stop = end.min(base + BLOCK_BYTES);
            body.pieces
                .put(block, (pos - base) as u16, (stop - base) as u16, at, seq);
            pos = stop;
        }
    }
    grow(body, start, end);
}

/// Extends the file to at least `end`. Blocks beyond the old end are new; those below are counted as
/// digested.
#[inline]
fn grow(body: &mut InodeWrite<'_>, start: u64, end: u64) {
    let old = body.attr.size_bytes;
    if end > old {
        let first = (start / BLOCK_BYTES).max(old.div_ceil(BLOCK_BYTES));
        body.attr.sectors += end.div_ceil(BLOCK_BYTES).saturating_sub(first) * (BLOCK_BYTES / 512);
        body.attr.size_bytes = end;
    }
}

/// Sets the length to `size` from entry `seq` on; bytes beyond read as zeros if the file grows again.
pub(crate) fn cut_short(body: &mut InodeWrite<'_>, size: u64, seq: LogSeq) {
    if size < body.attr.size_bytes {
        body.pieces.zero(size, u64::MAX, seq);
        let kept = size.div_ceil(BLOCK_BYTES) * (BLOCK_BYTES / 512);
        body.attr.sectors = body.attr.sectors.min(kept);
    }
    body.attr.size_bytes = size;
}

/// Updates times, set-id bits, file capabilities and number after a change of the data.
#[inline]
pub(crate) fn changed(body: &mut InodeWrite<'_>, stamp: Stamp, clear: EntryFlags, last: LogSeq) {
    body.drop_capability();
    let body = &mut **body;
    body.attr.mtime_ns = stamp.time_ns;
    body.attr.ctime_ns = stamp.time_ns;
    if clear.contains(EntryFlags::CLEAR_SUID) {
        body.attr.mode &= !0o4000;
    }
    if clear.contains(EntryFlags::CLEAR_SGID) {
        body.attr.mode &= !0o2000;
    }
    body.logged(last);
}
