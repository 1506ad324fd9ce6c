//! Reading: newest bytes from the log, then extents, then zeros. Direct copies happen under the inode's
//! shared lock, which keeps the log's chunks and the extents from being reused; slow tiers are read after its
//! release.

use super::cache::Keys;
use super::device::BUFFER_BLOCKS;
use super::replaced::is_small;
use super::{DataPlane, confused};
use crate::errno::{Errno, OpError, OpResult};
use crate::inode::extents::{ASK_EXTENTS, Below};
use crate::inode::overlay::Source;
use crate::inode::places::GROUP;
use crate::inode::{Inode, InodeBody};
use crate::seeded::{Bug, armed};
use std::sync::atomic::Ordering;
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, FileBlock, Tier};
use varve_ipc::{DATA_MAX, MAPPED_FILES_MAX, NumberedBlocks, Request, Response, WINDOW_BLOCKS};

/// Most requests for the map in one read: more means that the daemon's answers make no progress.
const ASKS_MAX: u32 = 100_000;
/// Below this number of blocks each is looked up by itself.
const FEW_BLOCKS: u64 = 16;
/// Size in bytes above which slow reads bypass the cache.
const CACHED_MAX: usize = 256 << 10;
/// Size in bytes up to which read-ahead grows while a file is read in order: what one transfer of a device has.
const AHEAD_MAX: u64 = BUFFER_BLOCKS * BLOCK_BYTES;

/// Result of a pass over a range.
enum Pass {
    Done,
    /// The map is missing from this block on.
    Unmapped(u64),
}

/// Ranges (position in the file, length) to be read from the daemon.
type Forwarded = Vec<(u64, usize)>;

/// Makes the pages of `out` present, so that the copy under the lock does not fault.
#[inline]
fn touch(out: &mut [u8]) {
    let last = out.len().saturating_sub(1);
    for at in (0..out.len())
        .step_by(BLOCK_SIZE)
        .chain((last > 0).then_some(last))
    {
        std::hint::black_box(&mut out[at]);
        out[at] = 0;
    }
}

impl DataPlane {
    /// Reads from `offset` up to the end of the file; returns the number of bytes. Needs a lease.
    ///
    /// # Errors
    /// `EIO` of a device; `SessionLost`, and the contents of `out` must not be used.
    #[inline]
    pub fn read(&self, inode: &Inode, offset: u64, out: &mut [u8]) -> OpResult<usize> {
        let known = (out.len() as u64).min(inode.size_hint().saturating_sub(offset)) as usize;
        touch(&mut out[..known]);
        let mut asks = 0;
        loop {
            let body = inode.read();
            let size = body.attr.size_bytes;
            if offset >= size {
                return Ok(0);
            }
            let len = (out.len() as u64).min(size - offset) as usize;
            let mut forwarded = Forwarded::new();
            let pass = self.copy(inode, &body, offset, &mut out[..len], &mut forwarded)?;
            let version = body.extents.version();
            let Pass::Unmapped(block) = pass else {
                let mut numbered = Vec::new();
                for (pos, len) in &forwarded {
                    let end = (pos + *len as u64).div_ceil(BLOCK_BYTES);
                    body.extents.numbers(pos / BLOCK_BYTES..end, &mut numbered);
                }
                drop(body);
                if !self.is_live() {
                    return Err(OpError::lost());
                }
                if !forwarded.is_empty() {
                    let keys = Keys {
                        inode: inode.id(),
                        version,
                        numbered: &numbered,
                    };
                    self.fetch_all(inode, keys, offset, out, &forwarded)?;
                }
                return Ok(len);
            };
            drop(body);
            asks += 1;
            if asks > ASKS_MAX {
                return Err(OpError::Failed(Errno(libc::EIO)));
            }
            self.load_map(inode, block)?;
        }
    }

    /// Reads a range without a lock if it is in the log as whole blocks, or in NVM at known locations.
    /// `None`: nothing was read, and [`read`](Self::read) must do it. `may` says whether the lease suffices;
    /// it is called before and after, so that no pin is needed: the returned bytes were current at the moment
    /// of the last call. Bytes of `out` may have changed in any case.
    #[inline]
    pub(crate) fn try_read(
        &self,
        inode: &Inode,
        offset: u64,
        out: &mut [u8],
        may: impl Fn() -> bool,
    ) -> Option<usize> {
        if !may() {
            return None;
        }
        let version = inode.version()?;
        let size = inode.size_hint();
        let end = size.min(offset.saturating_add(out.len() as u64));
        let mut pos = offset;
        while pos < end {
            let block = pos / BLOCK_BYTES;
            let mut stop = end.min((block + 1) * BLOCK_BYTES);
            let at = (pos - offset) as usize;
            if let Some(word) = inode.radix.get(block) {
                let addr = word.addr() + pos % BLOCK_BYTES;
                while stop < end
                    && inode
                        .radix
                        .get(stop / BLOCK_BYTES)
                        .is_some_and(|next| next.addr() == addr + (stop - pos))
                {
                    stop = end.min(stop + BLOCK_BYTES);
                }
                let into = &mut out[at..(stop - offset) as usize];
                self.log.as_ref()?.region().read(addr, into).ok()?;
            } else {
                let place = inode.places.get(block)?;
                let logged = !inode.radix.is_empty();
                while stop < end
                    && inode.places.get(stop / BLOCK_BYTES) == Some(place + stop / BLOCK_BYTES - block)
                    && !(logged && inode.radix.get(stop / BLOCK_BYTES).is_some())
                {
                    stop = end.min(stop + BLOCK_BYTES);
                }
                let into = &mut out[at..(stop - offset) as usize];
                self.nvm.as_ref()?.read(place, pos % BLOCK_BYTES, into).ok()?;
                // The daemon may have overwritten a block in place with an entry that another thread has
                // logged since this one looked at the log.
                if is_logged(inode, block, stop.div_ceil(BLOCK_BYTES)) {
                    return None;
                }
            }
            pos = stop;
        }
        // Act, then check: the copied bytes are discarded if the lease, the inode's version or the session
        // changed meanwhile. The lease first: one that was given back and granted again has changed the
        // version before it counts.
        let same = || inode.is_still(version) || armed(Bug::TriedReadOvertaken);
        let live = || self.is_live() || armed(Bug::TriedReadSealed);
        (may() && same() && live()).then_some(pos.saturating_sub(offset) as usize)
    }

    /// Copies the bytes that are in log and NVM, and notes the ranges to ask for.
    #[inline]
    fn copy<T>(
        &self,
        inode: &Inode,
        body: &InodeBody,
        offset: u64,
        out: &mut [u8],
        forwarded: &mut Forwarded,
    ) -> OpResult<Pass, T> {
        let end = offset + out.len() as u64;
        let simple = body.pieces.is_empty();
        let mut pos = offset;
        while pos < end {
            let block = pos / BLOCK_BYTES;
            let word = inode.radix.get(block);
            let (source, mut stop) = if simple {
                let stop = end.min((block + 1) * BLOCK_BYTES);
                (
                    word.map_or(Source::Below, |word| Source::Log(word.addr() + pos % BLOCK_BYTES)),
                    stop,
                )
            } else {
                body.pieces.find(word, pos, end)
            };
            let at = (pos - offset) as usize;
            match source {
                Source::Log(addr) => {
                    if simple {
                        // Blocks of one entry are consecutive in the log: one copy for all.
                        while stop < end
                            && inode
                                .radix
                                .get(stop / BLOCK_BYTES)
                                .is_some_and(|next| next.addr() == addr + (stop - pos))
                        {
                            stop = end.min(stop + BLOCK_BYTES);
                        }
                    }
                    let log = self.log.as_ref().ok_or(OpError::Failed(Errno(libc::EIO)))?;
                    let into = &mut out[at..(stop - offset) as usize];
                    log.region().read(addr, into).map_err(|e| OpError::from(&e))?;
                }
                Source::Zero => out[at..(stop - offset) as usize].fill(0),
                Source::Below => {
                    if simple {
                        let limit = end.div_ceil(BLOCK_BYTES);
                        stop = inode
                            .radix
                            .next_used(block + 1, limit)
                            .map_or(end, |next| next * BLOCK_BYTES);
                    }
                    let into = &mut out[at..(stop - offset) as usize];
                    let asked = (forwarded.len(), forwarded.last().copied());
                    let below = self.copy_below(inode, body, pos, into, forwarded);
                    // As in `try_read`: blocks that are in the log by now are read again, whatever came from
                    // below. Under the lock nothing leaves the log, so this ends.
                    let (first, end) = (block, stop.div_ceil(BLOCK_BYTES));
                    if word.is_none() && is_logged(inode, first, end) {
                        forwarded.truncate(asked.0);
                        if let (Some(last), Some(before)) = (forwarded.last_mut(), asked.1) {
                            *last = before;
                        }
                        continue;
                    }
                    if let Pass::Unmapped(block) = below? {
                        return Ok(Pass::Unmapped(block));
                    }
                }
            }
            pos = stop;
        }
        Ok(Pass::Done)
    }

    /// Copies digested data.
    fn copy_below<T>(
        &self,
        inode: &Inode,
        body: &InodeBody,
        mut pos: u64,
        out: &mut [u8],
        forwarded: &mut Forwarded,
    ) -> OpResult<Pass, T> {
        let mut rest = out;
        let Some(nvm) = &self.nvm else {
            note(forwarded, pos, rest.len());
            return Ok(Pass::Done);
        };
        while !rest.is_empty() {
            let block = pos / BLOCK_BYTES;
            let within = pos % BLOCK_BYTES;
            let found = body.extents.find(block);
            let blocks = match found {
                Below::Unknown => return Ok(Pass::Unmapped(block)),
                Below::Mapped(_, _, blocks) | Below::Zeros(blocks) => blocks,
            };
            let len = blocks
                .saturating_mul(BLOCK_BYTES)
                .saturating_sub(within)
                .min(rest.len() as u64) as usize;
            let (into, after) = rest.split_at_mut(len);
            match found {
                Below::Mapped(Tier::Nvm, place, _) => {
                    nvm.read_for_certain(place, within, into)?;
                    let end = (block + (within + len as u64).div_ceil(BLOCK_BYTES)).next_multiple_of(GROUP);
                    if let Some((first, place, count)) =
                        body.extents.around(block, block / GROUP * GROUP, end)
                    {
                        inode.places.note(first, place, count);
                    }
                }
                Below::Mapped(..) => note(forwarded, pos, len),
                Below::Zeros(_) | Below::Unknown => into.fill(0),
            }
            rest = after;
            pos += len as u64;
        }
        Ok(Pass::Done)
    }

    /// Asks for the map around `block` and keeps the answer unless the map changed meanwhile. No lock is held
    /// across the request.
    pub(super) fn load_map<T>(&self, inode: &Inode, block: u64) -> OpResult<(), T> {
        let (version, from, small) = {
            let body = inode.read();
            let from = if self.windowed {
                block / WINDOW_BLOCKS * WINDOW_BLOCKS
            } else {
                body.extents.ask_from(block)
            };
            (body.extents.version(), from, is_small(body.attr.size_bytes))
        };
        self.appetite.asked_extents();
        if from == 0 && small && !self.windowed && self.load_maps(inode, version)? {
            return Ok(());
        }
        let request = Request::MapExtents {
            key: inode.key,
            from: FileBlock(from),
            max: ASK_EXTENTS,
        };
        match self.call(request).map_err(OpError::from)? {
            Response::Extents(runs, end) => {
                if runs.is_empty() && !end {
                    return Err(OpError::from(confused("MapExtents")));
                }
                inode.write().extents.learn(version, from, runs, end);
                Ok(())
            }
            _ => Err(OpError::from(confused("MapExtents"))),
        }
    }

    /// As [`load_map`](Self::load_map) for a small file, together with others whose maps are likely to be
    /// asked for next. `false`: its own is still to be asked for.
    fn load_maps<T>(&self, inode: &Inode, version: u64) -> OpResult<bool, T> {
        let others = self.replaced.take(MAPPED_FILES_MAX - 1, inode);
        if others.is_empty() {
            return Ok(false);
        }
        let keys = std::iter::once(inode.key).chain(others.iter().map(|(other, _)| other.key));
        let request = Request::MapFiles { keys: keys.collect() };
        let Response::Mapped(maps) = self.call(request).map_err(OpError::from)? else {
            return Err(OpError::from(confused("MapFiles")));
        };
        let mut maps = maps.into_iter();
        let own = maps.next().flatten();
        for ((other, version), runs) in others.iter().zip(maps) {
            // One that is in use is asked for by itself. Each counts by the rule for an answer of its own: the
            // version is from before the request.
            if let Some(runs) = runs
                && let Some(mut body) = other.try_write_idle()
            {
                body.extents.learn(*version, 0, runs, true);
            }
        }
        let Some(runs) = own else { return Ok(false) };
        inode.write().extents.learn(version, 0, runs, true);
        Ok(true)
    }

    #[cold]
    fn fetch_all<T>(
        &self,
        inode: &Inode,
        keys: Keys<'_>,
        offset: u64,
        out: &mut [u8],
        forwarded: &Forwarded,
    ) -> OpResult<(), T> {
        for &(pos, len) in forwarded {
            let at = (pos - offset) as usize;
            let into = &mut out[at..at + len];
            let ahead = self.ahead(inode, pos, len as u64);
            if len > CACHED_MAX {
                self.fetch_large(inode, keys.version, pos, into)?;
            } else {
                self.fetch_cached(inode, keys, pos, into, ahead as usize)?;
            }
        }
        Ok(())
    }

    /// Notes a read. Returns by how many bytes to read ahead of it: 0 unless the read before ended where this one
    /// begins, else as many as were read in order until now, within bounds.
    fn ahead(&self, inode: &Inode, pos: u64, len: u64) -> u64 {
        let least = self.read_ahead_bytes;
        if inode.read_end.swap(pos + len, Ordering::Relaxed) != pos {
            inode.read_in_order.store(0, Ordering::Relaxed);
            return 0;
        }
        let in_order = inode.read_in_order.fetch_add(len, Ordering::Relaxed) + len;
        match least {
            0 => 0,
            _ => in_order.clamp(least, least.max(AHEAD_MAX)),
        }
    }

    /// Reads `out.len()` bytes past the cache.
    fn fetch_large<T>(&self, inode: &Inode, version: u64, mut pos: u64, out: &mut [u8]) -> OpResult<(), T> {
        let mut rest = out;
        while !rest.is_empty() {
            let within = (pos % BLOCK_BYTES) as usize;
            let len = rest.len().min(DATA_MAX - within);
            let piece = &mut rest[..len];
            let direct = match within {
                0 => self.read_from_device(inode, version, pos / BLOCK_BYTES, piece),
                _ => None,
            };
            let took = match direct {
                Some(took) => took,
                None => {
                    let (bytes, _) = self.ask_data(inode, pos, len)?;
                    piece[..bytes.len()].copy_from_slice(&bytes);
                    piece[bytes.len()..].fill(0);
                    len
                }
            };
            pos += took as u64;
            rest = &mut rest[took..];
        }
        Ok(())
    }

    /// Reads `out.len()` bytes through the cache; missing blocks are requested with up to `ahead` bytes
    /// beyond, but for those that another thread has requested.
    fn fetch_cached<T>(
        &self,
        inode: &Inode,
        keys: Keys<'_>,
        pos: u64,
        out: &mut [u8],
        ahead: usize,
    ) -> OpResult<(), T> {
        let end = pos + out.len() as u64;
        let (mut at, mut most, mut has_waited) = (pos, AHEAD_MAX as usize, false);
        while at < end {
            let block = at / BLOCK_BYTES;
            let within = (at % BLOCK_BYTES) as usize;
            let len = (BLOCK_SIZE - within).min((end - at) as usize);
            let rest = &mut out[(at - pos) as usize..];
            if self.cache.get(keys, block, within, &mut rest[..len]) {
                at += len as u64;
                has_waited = false;
                continue;
            }
            let first = block * BLOCK_BYTES;
            let want = ((end - first).next_multiple_of(BLOCK_BYTES) as usize + ahead).min(most);
            let blocks = block..block + want.div_ceil(BLOCK_SIZE) as u64;
            let begun = self.flights.begin((keys.inode, keys.version), blocks, has_waited);
            let Some(flight) = begun else {
                has_waited = true;
                continue;
            };
            let end = block + flight.blocks();
            if let Some(took) = self.fetch_from_device(inode, keys, block..end, within, rest) {
                at += took as u64;
                has_waited = false;
                continue;
            }
            let mut want = want.min(flight.blocks() as usize * BLOCK_SIZE).min(DATA_MAX);
            let (bytes, numbered) = match self.ask_data(inode, first, want) {
                // The damage may be in a later block: ask for this block alone.
                Err(OpError::Failed(Errno(libc::EIO))) if want > BLOCK_SIZE => {
                    (most, want) = (BLOCK_SIZE, BLOCK_SIZE);
                    self.ask_data(inode, first, want)?
                }
                other => other?,
            };
            // The numbers of the answer: the map may be older than its bytes.
            let read = Keys {
                numbered: &numbered,
                ..keys
            };
            self.cache.put(read, block, &bytes);
            // Bytes beyond the digested end of the file are zero.
            let have = bytes.get(within..).unwrap_or(&[]);
            let take = have.len().min(rest.len());
            rest[..take].copy_from_slice(&have[..take]);
            let zeros = rest.len().min(want - within);
            rest[take..zeros.max(take)].fill(0);
            at += zeros.max(take) as u64;
        }
        Ok(())
    }

    /// Returns data, and the shared blocks that it was read from.
    fn ask_data<T>(
        &self,
        inode: &Inode,
        offset: u64,
        len: usize,
    ) -> OpResult<(Vec<u8>, Vec<NumberedBlocks>), T> {
        match self
            .call(Request::ReadData {
                key: inode.key,
                offset,
                len: len as u32,
            })
            .map_err(OpError::from)?
        {
            Response::Bytes(bytes) if bytes.len() <= len => Ok((bytes, Vec::new())),
            Response::Numbered(bytes, numbered) if bytes.len() <= len => Ok((bytes, numbered)),
            _ => Err(OpError::from(confused("ReadData"))),
        }
    }
}

/// Whether the log holds any of these blocks whole. The caller has loaded their bytes from below before: an
/// entry is published here before the daemon may overwrite a block with it.
#[inline]
fn is_logged(inode: &Inode, first: u64, end: u64) -> bool {
    if armed(Bug::ReadUnderOverwrite) {
        return false;
    }
    std::sync::atomic::fence(Ordering::Acquire);
    if inode.radix.is_empty() {
        return false;
    }
    // `next_used` scans all words of a leaf.
    match end - first {
        0..FEW_BLOCKS => (first..end).any(|block| inode.radix.get(block).is_some()),
        _ => inode.radix.next_used(first, end).is_some(),
    }
}

/// Notes a range, merged with the previous one if they are adjacent.
fn note(forwarded: &mut Forwarded, pos: u64, len: usize) {
    match forwarded.last_mut() {
        Some((last, last_len)) if *last + *last_len as u64 == pos => *last_len += len,
        _ => forwarded.push((pos, len)),
    }
}
