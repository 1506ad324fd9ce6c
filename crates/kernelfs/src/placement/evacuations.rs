//! Jobs of operators that evacuate a tier (`varve evacuate`): which data of it moves next, at which pace, and
//! why the rest does not. The rows in the store say which jobs there are; this keeps what a restart may
//! forget: how far a pass has come, what it found, the pace. Moves nothing.
//!
//! A pass goes over all data of the tier ([`varve_placement::mover::Job`] plans its steps), then over all
//! metadata there. A pass that could move nothing is followed by a rest. Pins and `varve exclude` hold
//! nothing on a tier that is evacuated.

mod pace;
mod search;
mod status;

pub use status::{JobState, JobStatus};

use super::driver::devices_of;
use super::fill::Fill;
use super::meter::Meters;
use super::units::{UNIT, Units};
use super::{At, Catalog, Cause, Job, Move};
use pace::{Pace, Rate};
use parking_lot::Mutex;
use search::OnTier;
use std::collections::{BTreeMap, BTreeSet};
use varve_format::state::EvacuationRow;
use varve_format::{BLOCK_BYTES, Tier};
use varve_placement::heat::Heat;
use varve_placement::mover::{self, JobId};
use varve_placement::policy::{Budget, Step, View};
use varve_placement::{DeviceId, DeviceState};
use varve_store::{Recalled, SpaceStats};

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
    tier: Tier,
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

/// The jobs that evacuate tiers.
#[derive(Debug)]
pub(crate) struct Evacuations {
    /// Fill level, in percent, up to which other tiers take the data.
    high: u64,
    /// Policies count accesses; here it only tells the size of a unit.
    heat: Heat,
    /// Locked while inodes are read.
    jobs: Mutex<BTreeMap<Tier, Evacuation>>,
}

impl Evacuation {
    fn new(tier: Tier, row: EvacuationRow, now_ms: u64) -> Self {
        let id = JobId(row.job.get());
        Self {
            row,
            tier,
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

/// Blocks of a tier in use.
pub(crate) fn used_blocks(tier: Tier, space: &SpaceStats) -> u64 {
    let stats = &space.tiers[tier as usize];
    stats.total.saturating_sub(stats.free + stats.pending)
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

    /// Blocks that the other tiers take of a tier's data.
    pub(crate) fn room_beside(&self, tier: Tier, space: &SpaceStats) -> u64 {
        let others = Tier::ALL.into_iter().filter(|other| *other != tier);
        let room = |other: Tier| {
            let stats = &space.tiers[other as usize];
            let takes = stats.total > 0 && !stats.avoided;
            Fill::of(other, stats).below(self.high) * u64::from(takes)
        };
        others.map(room).sum()
    }

    /// Notes what the rows say.
    fn sync(&self, rows: &[EvacuationRow; 3], now_ms: u64) {
        let mut jobs = self.jobs.lock();
        for tier in Tier::ALL {
            let row = rows[tier as usize];
            let known = jobs.get(&tier).map(|job| job.row.job);
            if !row.is_job() {
                jobs.remove(&tier);
            } else if known != Some(row.job) {
                jobs.insert(tier, Evacuation::new(tier, row, now_ms));
            }
            if let Some(job) = jobs.get_mut(&tier) {
                job.row = row;
            }
        }
    }

    /// Returns the moves that empty the tiers with a job, at most `most` blocks.
    pub(crate) fn plan(
        &self,
        rows: &[EvacuationRow; 3],
        space: &SpaceStats,
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
            let room = self.room_beside(job.tier, space) * BLOCK_BYTES >= UNIT.bytes();
            let rests = now_ms < job.rests_until_ms && !job.may_end_rest(room);
            if job.row.is_paused() || rests || job.stage != Stage::Data || used_blocks(job.tier, space) == 0 {
                continue;
            }
            let bytes = job.pace.budget(left * BLOCK_BYTES);
            if bytes < UNIT.bytes() {
                continue;
            }
            let moves = self.plan_one(job, space, catalog, meters, bytes);
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
        space: &SpaceStats,
        catalog: &dyn Catalog,
        meters: &Meters,
        bytes: u64,
    ) -> Vec<Job> {
        let (tiers, mut devices) = devices_of(space, meters);
        let Some(device) = tiers.iter().position(|tier| *tier == job.tier) else {
            return Vec::new();
        };
        devices[device].state = DeviceState::Draining;
        job.plan.device = DeviceId(device as u8);
        let there = OnTier {
            units: Units::of(catalog),
            catalog,
            tier: job.tier,
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
            add(&mut planned, (job.tier, tiers[step.to.index()]), step, moves);
        }
        let blocks: u64 = planned.iter().map(Job::blocks).sum();
        job.pace.spend(blocks * BLOCK_BYTES);
        if job.plan.passes > passes {
            job.stage = Stage::Metadata(0);
        }
        planned
    }

    /// Returns the tiers whose metadata is to be moved now: where to go on, and most blocks.
    pub(crate) fn metadata_due(&self, space: &SpaceStats, most: u64) -> Vec<(Tier, u64, u64)> {
        let jobs = self.jobs.lock();
        let due = |job: &Evacuation| match job.stage {
            Stage::Metadata(at) if !job.row.is_paused() && used_blocks(job.tier, space) > 0 => {
                let blocks = job.pace.budget(most * BLOCK_BYTES) / BLOCK_BYTES;
                (blocks > 0).then_some((job.tier, at, blocks))
            }
            _ => None,
        };
        jobs.values().filter_map(due).collect()
    }

    /// Whether a tier has a job that is not paused.
    pub(crate) fn goes_on(&self, tier: Tier) -> bool {
        let jobs = self.jobs.lock();
        jobs.get(&tier).is_some_and(|job| !job.row.is_paused())
    }

    /// An operator lets a job try again what could not move.
    pub(crate) fn retry(&self, job: u64) {
        let mut jobs = self.jobs.lock();
        for found in jobs.values_mut().filter(|found| found.row.job.get() == job) {
            found.bad.clear();
            found.rests_until_ms = 0;
        }
    }

    /// Whether a tier is empty but for blocks that were freed.
    pub(crate) fn waits_for_tail(&self, tier: Tier, space: &SpaceStats) -> bool {
        self.goes_on(tier) && used_blocks(tier, space) == 0 && space.tiers[tier as usize].pending > 0
    }

    /// Metadata of a tier was moved, up to `at`.
    pub(crate) fn metadata_moved(&self, tier: Tier, at: u64, step: &Recalled, now_ms: u64) {
        let mut jobs = self.jobs.lock();
        let Some(job) = jobs.get_mut(&tier) else { return };
        job.pace.spend(step.moved * BLOCK_BYTES);
        job.metadata += step.moved;
        job.moved |= step.moved > 0;
        job.stage = Stage::Metadata(at);
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
        if job.cause == Cause::Evacuated
            && let Some(job) = self.jobs.lock().get_mut(&job.from)
        {
            job.moved = true;
            job.plan.done(u64::from(moved.len) * BLOCK_BYTES);
        }
    }

    /// A move of the last plan can never be done: its data cannot be read.
    pub(crate) fn failed(&self, from: Tier, failed: &Move) {
        if let Some(job) = self.jobs.lock().get_mut(&from)
            && job.bad.len() < BAD_MAX
        {
            job.bad.insert(failed.at);
        }
    }

    /// A step has ended, perhaps at an obstacle.
    pub(crate) fn stepped(&self, job: &Job) {
        if job.cause == Cause::Evacuated
            && let Some(ours) = self.jobs.lock().get_mut(&job.from)
        {
            ours.obstacle.clone_from(&job.waiting);
        }
    }

    /// Returns the jobs, for operators. `readers`: sessions that may still read what was moved.
    pub(crate) fn status(
        &self,
        rows: &[EvacuationRow; 3],
        space: &SpaceStats,
        readers: &[u64],
        now_ms: u64,
    ) -> Vec<JobStatus> {
        self.sync(rows, now_ms);
        let jobs = self.jobs.lock();
        jobs.values()
            .map(|job| status::of(job, space, readers, now_ms))
            .collect()
    }
}

/// Adds moves of a step to the job between its tiers.
fn add(jobs: &mut Vec<Job>, (from, to): (Tier, Tier), step: &Step, moves: Vec<Move>) {
    tracing::debug!(unit = %step.unit, from = from.name(), to = to.name(), "{}", step.reason);
    match jobs.iter_mut().find(|job| job.to == to) {
        Some(job) => job.moves.extend(moves),
        None => jobs.push(Job {
            from,
            to,
            cause: Cause::Evacuated,
            moves,
            waiting: None,
        }),
    }
}
