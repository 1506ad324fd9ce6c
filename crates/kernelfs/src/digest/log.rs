//! A session's log as the daemon sees it: where the next digest starts to read, and how it reads. Looks into no entry.

use varve_digest::{
    Batch, Cursors, Cut, GatherLimits, LogBytes, NewestTx, ScanError, SealScan, gather, seal_scan,
};
use varve_format::{LogSeq, SessionId};
use varve_media::{MediaError, Region};

/// The bytes of a log in a region.
struct RegionLog<'r>(&'r dyn Region);

impl LogBytes for RegionLog<'_> {
    type Error = MediaError;

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.0.read(offset, out)
    }

    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }
}

/// The reading end of one session's log. Costs a few words for each 2 MiB of log.
#[derive(Debug)]
pub struct SessionLog {
    session: SessionId,
    cursors: Cursors,
}

impl SessionLog {
    /// Reads from the start at first.
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
        cut: Cut<'_>,
        limits: &GatherLimits,
    ) -> Result<Batch, MediaError> {
        gather(
            &RegionLog(log),
            self.session,
            digested,
            newest_tx,
            cut,
            limits,
            &self.cursors,
        )
        .map_err(device)
    }

    /// Finds where the log ends: see [`varve_digest::seal_scan`]. The session's page must say SEALED before, to all processors.
    ///
    /// # Errors
    /// The region's.
    pub fn seal_scan(
        &self,
        log: &dyn Region,
        digested: LogSeq,
        newest_tx: NewestTx<'_>,
    ) -> Result<SealScan, MediaError> {
        seal_scan(&RegionLog(log), self.session, digested, newest_tx, &self.cursors).map_err(device)
    }

    /// Bytes of the log that hold entries which are not digested, about.
    ///
    /// # Errors
    /// The region's.
    pub fn pending_bytes(&self, log: &dyn Region, digested: LogSeq) -> Result<u64, MediaError> {
        varve_digest::pending_bytes(&RegionLog(log), self.session, digested, &self.cursors).map_err(device)
    }

    /// The next scan starts after `batch`.
    pub fn digested(&mut self, batch: &Batch) {
        self.cursors.clone_from(&batch.cursors);
    }
}

fn device(error: ScanError<MediaError>) -> MediaError {
    match error {
        ScanError::Device(error) => error,
    }
}
