//! Operators' requests about jobs: starts the evacuation of a tier, pauses, bounds and ends jobs (those that
//! empty a device are started in `ops::devices`), and says how far they are. Moves nothing (`migrate` does).

use crate::error::no;
use crate::kernel::{Core, KernelFs};
use crate::placement::jobs::Placer;
use crate::placement::{JobStatus, Seen};
use serde::{Deserialize, Serialize};
use varve_format::state::EvacuationRow;
use varve_format::{BLOCK_BYTES, Tier};
use varve_ipc::{IpcError, JobAct};
use varve_store::{DeviceStatus, Emptied, JobRow, Store, StoreError};

/// Answer to the request for an evacuation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvacuationAsked {
    /// It has begun.
    Started(JobStatus),
    /// Nothing was changed: the other tiers do not take all that is on the tier.
    NoRoom {
        /// Bytes on the tier.
        used_bytes: u64,
        /// Bytes that the other tiers take below their high mark.
        room_bytes: u64,
        /// The high mark, in percent.
        high_percent: u8,
    },
}

/// Context of requests about jobs.
pub(crate) struct Jobs<'k> {
    core: Core<'k>,
    store: &'k Store,
    placer: &'k Placer,
}

impl<'k> Jobs<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            store: &kernel.store,
            placer: &kernel.placer,
        }
    }

    /// Returns all jobs that are not cancelled: of tiers, then of devices.
    ///
    /// # Errors
    /// EIO.
    pub(crate) fn list(&self) -> Result<Vec<JobStatus>, IpcError> {
        let refused = |error: StoreError| self.core.refused(&error);
        let rows = self.store.jobs().map_err(refused)?;
        let of_device = |row: &JobRow| matches!(row.of, Emptied::Device { .. });
        let devices = match rows.iter().any(of_device) {
            true => self.store.device_list().map_err(refused)?,
            false => Vec::new(),
        };
        Ok(self.of_rows(&rows, &devices))
    }

    fn of_rows(&self, rows: &[JobRow], devices: &[DeviceStatus]) -> Vec<JobStatus> {
        let readers: Vec<u64> = {
            let sessions = self.core.locked();
            let waits = sessions
                .entries
                .iter()
                .filter(|(_, member)| !member.barriers.is_empty());
            let mut readers: Vec<u64> = waits.map(|(id, _)| id.0).collect();
            readers.sort_unstable();
            readers
        };
        let now_ms = self.placer.meters.now_ns() / 1_000_000;
        let space = &self.store.space();
        let seen = Seen { space, devices };
        self.placer.evacuations.status(rows, &seen, &readers, now_ms)
    }

    /// Starts to evacuate a tier; `partly`: although the others do not take all of it. Durable when this
    /// returns; the data moves in the background.
    ///
    /// # Errors
    /// EINVAL for NVM, which has metadata and logs that cannot leave it; ENXIO if the pool has no such tier;
    /// EEXIST if it is evacuated already; EROFS, EIO.
    pub(crate) fn evacuate(&self, tier: Tier, partly: bool) -> Result<EvacuationAsked, IpcError> {
        self.core.check_writable()?;
        let space = self.store.space();
        if tier == Tier::Nvm {
            return Err(no(libc::EINVAL));
        }
        if space.tiers[tier as usize].total == 0 {
            return Err(no(libc::ENXIO));
        }
        if space.tiers[tier as usize].avoided {
            return Err(no(libc::EEXIST));
        }
        let seen = Seen {
            space: &space,
            devices: &[],
        };
        let of = Emptied::Tier(tier);
        let used = seen.used(of);
        let room = self.placer.evacuations.room_beside(of, &seen);
        if used > room && !partly {
            return Ok(EvacuationAsked::NoRoom {
                used_bytes: used * BLOCK_BYTES,
                room_bytes: room * BLOCK_BYTES,
                high_percent: self.core.env.config.placement_high_percent,
            });
        }
        let now_ns = self.core.env.clock.now_ns();
        let job = match self.store.start_evacuation(tier, now_ns) {
            Err(StoreError::Exists) => return Err(no(libc::EEXIST)),
            done => done.map_err(|error| self.core.refused(&error))?,
        };
        tracing::info!(job, tier = tier.name(), "evacuating a tier");
        self.wake();
        let started = self.find(job)?;
        Ok(EvacuationAsked::Started(started))
    }

    /// Pauses, resumes, bounds or ends a job; returns its last status. Durable when this returns. A transaction
    /// of moves that is under way (at most 1 MiB) is still done.
    ///
    /// # Errors
    /// ENOENT if there is no such job, EINVAL for a limit of 0, EROFS, EIO.
    pub(crate) fn act(&self, job: u64, act: JobAct) -> Result<JobStatus, IpcError> {
        self.core.check_writable()?;
        let before = self.find(job)?;
        if act == JobAct::Limit(Some(0)) {
            return Err(no(libc::EINVAL));
        }
        match self.change(job, act) {
            Err(StoreError::NotFound) => return Err(no(libc::ENOENT)),
            done => done.map_err(|error| self.core.refused(&error))?,
        }
        tracing::info!(job, ?act, "a job was changed");
        if act == JobAct::Resume {
            self.placer.evacuations.retry(job);
        }
        self.wake();
        // Also has a step under way see it.
        let now = self.list()?.into_iter().find(|found| found.id == job);
        match act {
            JobAct::Cancel => Ok(before),
            JobAct::Pause | JobAct::Resume | JobAct::Limit(_) => now.ok_or(no(libc::ENOENT)),
        }
    }

    fn change(&self, job: u64, act: JobAct) -> Result<(), StoreError> {
        let rows = self.store.jobs()?;
        let found = rows.iter().find(|found| found.row.job.get() == job);
        if let (Some(Emptied::Device { tier, first }), JobAct::Cancel) = (found.map(|found| found.of), act) {
            return self.store.cancel_emptying(tier, first);
        }
        self.store.change_evacuation(job, &mut |row| match act {
            JobAct::Pause => row.paused = 1,
            JobAct::Resume => row.paused = 0,
            JobAct::Cancel => *row = EvacuationRow::default(),
            JobAct::Limit(limit) => row.limit_bytes_per_s.set(limit.unwrap_or(0)),
        })
    }

    /// Has the mover look now, and for what pins want on a tier that takes data again.
    fn wake(&self) {
        self.placer.note_pins(true);
    }

    fn find(&self, job: u64) -> Result<JobStatus, IpcError> {
        let jobs = self.list()?;
        let found = jobs.into_iter().find(|found| found.id == job);
        found.ok_or(no(libc::ENOENT))
    }
}
