//! Jobs of operators that empty a tier (`varve evacuate`) or one device of it (`varve remove-device`): which
//! data of it moves next, at which pace, and why the rest does not. The rows in the store say which jobs there
//! are; this keeps what a restart may forget: how far a pass has come, what it found, the pace. Moves nothing.
//!
//! The other devices of the tier take what leaves a device while they have room, then the other tiers, below
//! their high mark. A pass goes over all data there ([`varve_placement::mover::Job`] plans its steps), then over all
//! metadata there. A pass that could move nothing is followed by a rest. Pins and `varve exclude` hold
//! nothing on a tier that is evacuated.

mod object;
mod pace;
mod search;
mod status;

pub(crate) use object::{Seen, emptied};
pub use status::{JobState, JobStatus};

use super::driver::devices_of;
use super::meter::Meters;
use super::units::{UNIT, Units};
use super::{At, Catalog, Cause, Job, Move};
use pace::{Pace, Rate};
use parking_lot::Mutex;
use search::OnTier;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use varve_format::state::EvacuationRow;
use varve_format::{BLOCK_BYTES, Tier};
use varve_placement::heat::Heat;
use varve_placement::mover::{self, JobId};
use varve_placement::policy::{Budget, Step, View};
use varve_placement::{DeviceId, DeviceState, DeviceView};
use varve_store::{Emptied, JobRow, Recalled};

/// Most runs remembered whose data cannot be read.
const BAD_MAX: usize = 4096;
/// Rest after a pass that could move nothing, in milliseconds.
const REST_MS: u64 = 10_000;

/// What a pass is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The data.
    Data,
    /// The metadata, from this block of the inode file on.
    Metadata(u64),
}

/// A job that is not cancelled.
#[derive(Debug)]
struct Evacuation {
    row: EvacuationRow,
    of: Emptied,
    plan: mover::Job,
    stage: Stage,
    /// This pass has moved something.
    moved: bool,
    rests_until_ms: u64,
    pace: Pace,
    rate: Rate,
    /// Data that cannot be read.
    bad: BTreeSet<At>,
    /// Why the mover stopped before the end of its last step.
    obstacle: Option<String>,
    /// Blocks of metadata that came away since the daemon started.
    metadata: u64,
    /// Why metadata stays, as the last pass has found, and this one.
    metadata_stays: Option<String>,
    metadata_found: Option<String>,
}

/// Metadata that is to be moved now.
#[derive(Debug, Clone)]
pub(crate) struct MetadataDue {
    pub(crate) of: Emptied,
    /// Block numbers on its tier.
    pub(crate) numbers: Range<u64>,
    /// Where to go on in the inode file.
    pub(crate) at: u64,
    /// Most blocks.
    pub(crate) blocks: u64,
}

/// The jobs that empty tiers and devices.
#[derive(Debug)]
pub(crate) struct Evacuations {
    /// Fill level, in percent, up to which other tiers take the data.
    high: u64,
    /// Policies count accesses; here it only tells the size of a unit.
    heat: Heat,
    /// Locked while inodes are read.
    jobs: Mutex<BTreeMap<Emptied, Evacuation>>,
}

impl Evacuation {
    fn new(of: Emptied, row: EvacuationRow, now_ms: u64) -> Self {
        let id = JobId(row.job.get());
        Self {
            row,
            of,
            plan: mover::Job::new(id, DeviceId(0), row.moved_bytes.get()),
            stage: Stage::Data,
            moved: false,
            rests_until_ms: 0,
            pace: Pace::default(),
            rate: Rate::from(now_ms, row.moved_bytes.get()),
            bad: BTreeSet::new(),
            obstacle: None,
            metadata: 0,
            metadata_stays: None,
            metadata_found: None,
        }
    }

    /// Begins the next pass, after a rest if this one has moved nothing.
    fn end_pass(&mut self, now_ms: u64) {
        if !std::mem::take(&mut self.moved) {
            self.rests_until_ms = now_ms + REST_MS;
        }
        self.metadata_stays = self.metadata_found.take();
        self.stage = Stage::Data;
        self.plan.resume();
    }

    /// Whether data waits for room, and some tier has room again.
    fn may_end_rest(&self, room: bool) -> bool {
        room && self.plan.stuck.keys().any(|reason| reason.ends_with("% full"))
    }
}

impl Evacuations {
    /// Other tiers take the data until they are `high` percent full.
    pub(crate) fn new(high: u64) -> Self {
        Self {
            high,
            heat: Heat::for_pool(UNIT, 0),
            jobs: Mutex::default(),
        }
    }

    /// Notes what the rows say.
    fn sync(&self, rows: &[JobRow], now_ms: u64) {
        let mut jobs = self.jobs.lock();
        let there = |of: &Emptied, job: &Evacuation| {
            let is_it = |found: &JobRow| found.of == *of && found.row.job == job.row.job;
            rows.iter().any(is_it)
        };
        jobs.retain(|of, job| there(of, job));
        for JobRow { of, row } in rows {
            let new = || Evacuation::new(*of, *row, now_ms);
            jobs.entry(*of).or_insert_with(new).row = *row;
        }
    }

    /// Returns the moves of the jobs, at most `most` blocks.
    pub(crate) fn plan(
        &self,
        rows: &[JobRow],
        seen: &Seen<'_>,
        catalog: &dyn Catalog,
        meters: &Meters,
        most: u64,
    ) -> Vec<Job> {
        let now_ms = meters.now_ns() / 1_000_000;
        self.sync(rows, now_ms);
        let mut jobs = self.jobs.lock();
        let (mut planned, mut left) = (Vec::new(), most);
        for job in jobs.values_mut() {
            job.pace.fill(now_ms, job.row.limit_bytes_per_s.get());
            job.rate.note(now_ms, job.row.moved_bytes.get());
            let room = self.room_beside(job.of, seen) * BLOCK_BYTES >= UNIT.bytes();
            let rests = now_ms < job.rests_until_ms && !job.may_end_rest(room);
            if job.row.is_paused() || rests || job.stage != Stage::Data || seen.used(job.of) == 0 {
                continue;
            }
            let bytes = job.pace.budget(left * BLOCK_BYTES);
            if bytes < UNIT.bytes() {
                continue;
            }
            let moves = self.plan_one(job, seen, catalog, meters, bytes);
            for moved in moves {
                left = left.saturating_sub(moved.blocks());
                planned.push(moved);
            }
        }
        planned
    }

    /// Plans moves of at most `bytes` of one job.
    fn plan_one(
        &self,
        job: &mut Evacuation,
        seen: &Seen<'_>,
        catalog: &dyn Catalog,
        meters: &Meters,
        bytes: u64,
    ) -> Vec<Job> {
        let (tiers, mut devices) = devices_of(seen.space, meters);
        let Some(own) = tiers.iter().position(|tier| *tier == job.of.tier()) else {
            return Vec::new();
        };
        job.plan.device = match job.of {
            Emptied::Tier(_) => {
                devices[own].state = DeviceState::Draining;
                DeviceId(own as u8)
            }
            Emptied::Device { .. } => apart(&mut devices, own),
        };
        let there = OnTier {
            units: Units::of(catalog),
            catalog,
            tier: job.of.tier(),
            numbers: seen.numbers(job.of),
            stays_on_tier: matches!(job.of, Emptied::Device { .. }),
            device: job.plan.device,
            bad: &job.bad,
        };
        let view = View {
            now_ms: meters.now_ns() / 1_000_000,
            devices: &devices,
            heat: &self.heat,
            catalog: &there,
            full: self.high as f64 / 100.0,
        };
        let passes = job.plan.passes;
        let plan = job.plan.plan(&view, Budget { bytes, quiet: true });
        let mut planned = Vec::new();
        for step in &plan.steps {
            let moves = there.moves(step.unit);
            add(&mut planned, (job.of, tiers[step.to.index()]), step, moves);
        }
        let blocks: u64 = planned.iter().map(Job::blocks).sum();
        job.pace.spend(blocks * BLOCK_BYTES);
        if job.plan.passes > passes {
            job.stage = Stage::Metadata(0);
        }
        planned
    }

    /// Returns the metadata that is to be moved now, at most about `most` blocks for each job.
    pub(crate) fn metadata_due(&self, seen: &Seen<'_>, most: u64) -> Vec<MetadataDue> {
        let jobs = self.jobs.lock();
        let due = |job: &Evacuation| match job.stage {
            Stage::Metadata(at) if !job.row.is_paused() && seen.used(job.of) > 0 => {
                let blocks = job.pace.budget(most * BLOCK_BYTES) / BLOCK_BYTES;
                (blocks > 0).then(|| MetadataDue {
                    of: job.of,
                    numbers: seen.numbers(job.of),
                    at,
                    blocks,
                })
            }
            _ => None,
        };
        jobs.values().filter_map(due).collect()
    }

    /// Whether there is a job that is not paused.
    pub(crate) fn goes_on(&self, of: Emptied) -> bool {
        let jobs = self.jobs.lock();
        jobs.get(&of).is_some_and(|job| !job.row.is_paused())
    }

    /// An operator lets a job try again what could not move.
    pub(crate) fn retry(&self, job: u64) {
        let mut jobs = self.jobs.lock();
        for found in jobs.values_mut().filter(|found| found.row.job.get() == job) {
            found.bad.clear();
            found.rests_until_ms = 0;
        }
    }

    /// Whether a job has nothing left to do but to wait for blocks that were freed.
    pub(crate) fn waits_for_tail(&self, seen: &Seen<'_>) -> bool {
        let waits =
            |job: &Evacuation| !job.row.is_paused() && seen.used(job.of) == 0 && seen.pending(job.of) > 0;
        self.jobs.lock().values().any(waits)
    }

    /// Metadata was moved, up to `due.at`.
    pub(crate) fn metadata_moved(&self, due: &MetadataDue, step: &Recalled, now_ms: u64) {
        let mut jobs = self.jobs.lock();
        let Some(job) = jobs.get_mut(&due.of) else { return };
        job.pace.spend(step.moved * BLOCK_BYTES);
        job.metadata += step.moved;
        job.moved |= step.moved > 0;
        job.stage = Stage::Metadata(due.at);
        if step.damaged > 0 {
            job.metadata_found = Some("metadata cannot be read: see `varve fsck`".into());
        } else if step.full {
            job.metadata_found = Some("waiting: nvm has no room for metadata".into());
        }
        if step.over || step.full {
            job.end_pass(now_ms);
        }
    }

    /// A move of the last plan was done.
    pub(crate) fn moved(&self, job: &Job, moved: &Move) {
        if let Some(of) = job.of
            && let Some(job) = self.jobs.lock().get_mut(&of)
        {
            job.moved = true;
            job.plan.done(u64::from(moved.len) * BLOCK_BYTES);
        }
    }

    /// A move of the last plan can never be done: its data cannot be read.
    pub(crate) fn failed(&self, job: &Job, failed: &Move) {
        if let Some(of) = job.of
            && let Some(job) = self.jobs.lock().get_mut(&of)
            && job.bad.len() < BAD_MAX
        {
            job.bad.insert(failed.at);
        }
    }

    /// A step has ended, perhaps at an obstacle.
    pub(crate) fn stepped(&self, job: &Job) {
        if let Some(of) = job.of
            && let Some(ours) = self.jobs.lock().get_mut(&of)
        {
            ours.obstacle.clone_from(&job.waiting);
        }
    }

    /// Returns the jobs, for operators. `readers`: sessions that may still read what was moved.
    pub(crate) fn status(
        &self,
        rows: &[JobRow],
        seen: &Seen<'_>,
        readers: &[u64],
        now_ms: u64,
    ) -> Vec<JobStatus> {
        self.sync(rows, now_ms);
        let jobs = self.jobs.lock();
        jobs.values()
            .map(|job| status::of(job, seen, readers, now_ms))
            .collect()
    }
}

/// Sets one device of a tier apart from the others, for the planner: it is a device more, from which all goes,
/// and the others of its tier take data until they are full. Returns its number.
fn apart(devices: &mut Vec<DeviceView>, own: usize) -> DeviceId {
    let id = DeviceId(devices.len() as u8);
    let emptied = DeviceView {
        id,
        state: DeviceState::Draining,
        ..devices[own].clone()
    };
    // No share of nothing is kept free.
    devices[own].total_bytes = 0;
    devices.push(emptied);
    id
}

/// Adds moves of a step to the job between its tiers.
fn add(jobs: &mut Vec<Job>, (of, to): (Emptied, Tier), step: &Step, moves: Vec<Move>) {
    let from = of.tier();
    tracing::debug!(unit = %step.unit, from = from.name(), to = to.name(), "{}", step.reason);
    match jobs.iter_mut().find(|job| job.to == to) {
        Some(job) => job.moves.extend(moves),
        None => jobs.push(Job {
            from,
            to,
            cause: match of {
                Emptied::Tier(_) => Cause::Evacuated,
                Emptied::Device { .. } => Cause::Removed,
            },
            of: Some(of),
            moves,
            waiting: None,
        }),
    }
}
