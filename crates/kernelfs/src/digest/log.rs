//! A session's log as the daemon sees it: where the next digest starts to read, and how it reads. Interprets
//! no entry.

use std::cell::RefCell;
use std::collections::HashMap;
use varve_digest::{
    Batch, BatchLimit, Cursors, GatherLimits, LogBytes, NewestTx, ScanError, SealScan, gather, seal_scan,
};
use varve_format::log::CHUNK_BYTES;
use varve_format::seeded::{Bug, armed};
use varve_format::{LogSeq, SessionId};
use varve_media::{MediaError, Region};

/// Bytes read ahead in a chunk that is read in order.
const AHEAD_BYTES: u64 = 16 << 10;

/// From this length on the medium's checksum, by wide multiplication, is faster than the format's: three
/// times, when the bytes are cached.
const MANY_BYTES: usize = 512;

/// State of the sequential reads of a chunk.
#[derive(Default)]
struct BatchPrefetch {
    /// End of the last read, where the next one is expected.
    end: u64,
    /// Offset of the bytes that were read ahead.
    start: u64,
    bytes: Vec<u8>,
}

/// The bytes of a log in a region, for one scan. Where a log is read by system calls, small sequential reads
/// are served from larger ones. Bytes read ahead are as old as the scan at most.
pub(super) struct RegionLog<'r> {
    region: &'r dyn Region,
    ahead: RefCell<HashMap<u64, BatchPrefetch>>,
}

impl<'r> RegionLog<'r> {
    pub(super) fn new(region: &'r dyn Region) -> Self {
        Self {
            region,
            ahead: RefCell::default(),
        }
    }
}

impl LogBytes for RegionLog<'_> {
    type Error = MediaError;

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), MediaError> {
        if self.region.is_mapped() {
            return self.region.read(offset, out);
        }
        let end = offset + out.len() as u64;
        let mut ahead = self.ahead.borrow_mut();
        let chunk = ahead.entry(offset / CHUNK_BYTES).or_default();
        let had_end = std::mem::replace(&mut chunk.end, end);
        if let Some(from) = offset.checked_sub(chunk.start)
            && let Some(known) = chunk.bytes.get(from as usize..)
            && let Some(known) = known.get(..out.len())
        {
            out.copy_from_slice(known);
            return Ok(());
        }
        // Sequential: from the end of the last read, or after its padding.
        let in_order = had_end > 0 && offset >= had_end && offset - had_end < 64;
        let chunk_end = (offset / CHUNK_BYTES + 1) * CHUNK_BYTES;
        let until = (offset + AHEAD_BYTES).min(chunk_end).min(self.region.len_bytes());
        if !in_order || end > until {
            return self.region.read(offset, out);
        }
        chunk.bytes.resize((until - offset) as usize, 0);
        chunk.start = offset;
        if let Err(error) = self.region.read(offset, &mut chunk.bytes) {
            chunk.bytes.clear();
            return Err(error);
        }
        out.copy_from_slice(&chunk.bytes[..out.len()]);
        Ok(())
    }

    fn payload_crc(&self, seed: u32, payload: &[u8]) -> u32 {
        let differs = armed(Bug::EntryPayloadUnchecked) || armed(Bug::EntryTailUnchecked);
        if payload.len() < MANY_BYTES || differs {
            return varve_format::log::payload_crc(seed, payload);
        }
        varve_media::crc32c_append(seed, payload)
    }

    fn len_bytes(&self) -> u64 {
        self.region.len_bytes()
    }
}

/// The reading end of one session's log. Costs a few words for each 2 MiB of log.
#[derive(Debug)]
pub struct SessionLog {
    session: SessionId,
    cursors: Cursors,
}

impl SessionLog {
    /// Starts to read at the beginning of the log.
    #[must_use]
    pub const fn new(session: SessionId) -> Self {
        Self {
            session,
            cursors: Cursors::new(),
        }
    }

    /// Copies entries above `digested` out of the log: see [`varve_digest::gather`]. Changes nothing: call
    /// [`digested`](Self::digested) when the batch is durable in the shared area.
    ///
    /// # Errors
    /// The region's.
    pub fn gather(
        &self,
        log: &dyn Region,
        digested: LogSeq,
        newest_tx: NewestTx<'_>,
        cut: BatchLimit<'_>,
        limits: &GatherLimits,
    ) -> Result<Batch, MediaError> {
        gather(
            &RegionLog::new(log),
            self.session,
            digested,
            newest_tx,
            cut,
            limits,
            &self.cursors,
        )
        .map_err(device)
    }

    /// Finds where the log ends: see [`varve_digest::seal_scan`]. The session's page must say SEALED before,
    /// to all processors.
    ///
    /// # Errors
    /// The region's.
    pub fn seal_scan(
        &self,
        log: &dyn Region,
        digested: LogSeq,
        newest_tx: NewestTx<'_>,
    ) -> Result<SealScan, MediaError> {
        seal_scan(
            &RegionLog::new(log),
            self.session,
            digested,
            newest_tx,
            &self.cursors,
        )
        .map_err(device)
    }

    /// Returns about how many bytes of the log hold undigested entries.
    ///
    /// # Errors
    /// The region's.
    pub fn pending_bytes(&self, log: &dyn Region, digested: LogSeq) -> Result<u64, MediaError> {
        varve_digest::pending_bytes(&RegionLog::new(log), self.session, digested, &self.cursors)
            .map_err(device)
    }

    /// Returns the highest number in the log: see [`varve_digest::newest_entry`].
    ///
    /// # Errors
    /// The region's.
    pub(crate) fn newest(&self, log: &dyn Region) -> Result<LogSeq, MediaError> {
        varve_digest::newest_entry(&RegionLog::new(log), self.session, &self.cursors).map_err(device)
    }

    /// Returns the reading end as it will be when `batch` is digested.
    pub(crate) fn after(&self, batch: &Batch) -> Self {
        Self {
            session: self.session,
            cursors: batch.cursors.clone(),
        }
    }

    /// Makes the next scan start after `batch`.
    pub fn digested(&mut self, batch: &Batch) {
        self.cursors.clone_from(&batch.cursors);
    }
}

fn device(error: ScanError<MediaError>) -> MediaError {
    match error {
        ScanError::Device(error) => error,
    }
}
