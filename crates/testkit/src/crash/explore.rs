//! Selection of crash points and images, and the judgement of an image: recover, check, compare, continue.
//! Knows no workload.

use super::oracle::{Cut, State};
use super::{Job, Recorded, say};
use crate::lockstep;
use crate::model::{Model, tree_hash};
use crate::ops::Op;
use crate::rig::Rig;
use crate::target;
use crate::workload::Rng;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use varve_format::seeded::set_record_ops;
use varve_media::sim::{Crash, CrashPoint, PointKind, Recording, SimMedium};

/// Extent of an exploration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Tries all points, instead of those before fences, syncs, flushes and at the end.
    pub every_point: bool,
    /// Number of kills amid a store, at each point before a store.
    pub torn: u64,
    /// Tries one point in `stride` (from a seeded start).
    pub stride: usize,
    /// Seeded subsets at each point.
    pub seeds: u64,
    /// Where at most four units are pending: tries every combination of them, and two images with an
    /// independent choice for each word or sector.
    pub combinations: bool,
    /// Crashes one image in `recovery_stride` also during its recovery; 0: none. The choice depends only on
    /// workload, point and crash.
    pub recovery_stride: usize,
    /// Seed of all random choices.
    pub seed: u64,
}

impl Effort {
    /// For the ordinary test run: points of durability, one seeded subset.
    #[must_use]
    pub const fn ordinary(seed: u64) -> Self {
        Self {
            every_point: false,
            torn: 0,
            stride: 1,
            seeds: 1,
            combinations: false,
            recovery_stride: 0,
            seed,
        }
    }

    /// Every point, several subsets at each.
    #[must_use]
    pub const fn thorough(seed: u64) -> Self {
        Self {
            every_point: true,
            torn: 1,
            seeds: 2,
            combinations: true,
            ..Self::ordinary(seed)
        }
    }

    /// Every point, more subsets at each, and crashes of some recoveries.
    #[must_use]
    pub const fn all(seed: u64) -> Self {
        Self {
            seeds: 4,
            recovery_stride: 97,
            ..Self::thorough(seed)
        }
    }

    /// This effort, with one image in `stride` crashed in its recovery.
    #[must_use]
    pub const fn with_recovery(self, stride: usize) -> Self {
        Self {
            recovery_stride: stride,
            ..self
        }
    }
}

/// Counts of an exploration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Workloads recorded.
    pub workloads: usize,
    /// Crash points.
    pub points: usize,
    /// Images built.
    pub built: usize,
    /// Distinct images recovered and judged.
    pub images: usize,
    /// Of these, images of a crashed recovery.
    pub of_recovery: usize,
    /// Images by the kind of event that follows their point.
    pub by_kind: BTreeMap<&'static str, usize>,
    /// Images by the activity at their point.
    pub by_activity: BTreeMap<&'static str, usize>,
    /// Images by the activity at their point and the rules of the NVM.
    pub by_medium: BTreeMap<(&'static str, &'static str), usize>,
    /// Images whose state has an operation that had not returned.
    pub ahead: usize,
    /// Images whose state lacks a returned operation (allowed where that was not durable).
    pub behind: usize,
    /// Operations that the daemon did for sessions, in the workloads.
    pub forwarded: u64,
    /// Sessions lost and continued, in the workloads.
    pub resumed: u64,
    /// Blocks moved between tiers, in the workloads.
    pub moved: u64,
    /// Of these, blocks moved to NVM.
    pub promoted: u64,
    /// Blocks of metadata demoted to slower tiers, in the workloads.
    pub cooled: u64,
}

impl Tally {
    /// Adds another tally.
    pub fn add(&mut self, other: &Self) {
        self.workloads += other.workloads;
        self.points += other.points;
        self.built += other.built;
        self.images += other.images;
        self.of_recovery += other.of_recovery;
        self.ahead += other.ahead;
        self.behind += other.behind;
        self.forwarded += other.forwarded;
        self.resumed += other.resumed;
        self.moved += other.moved;
        self.promoted += other.promoted;
        self.cooled += other.cooled;
        for (kind, count) in &other.by_kind {
            *self.by_kind.entry(kind).or_default() += count;
        }
        for (activity, count) in &other.by_activity {
            *self.by_activity.entry(activity).or_default() += count;
        }
        for (place, count) in &other.by_medium {
            *self.by_medium.entry(*place).or_default() += count;
        }
    }

    /// Counts one image.
    fn note(&mut self, next: PointKind, activity: &'static str, medium: SimMedium) {
        self.images += 1;
        *self.by_kind.entry(kind_name(next)).or_default() += 1;
        *self.by_activity.entry(activity).or_default() += 1;
        *self.by_medium.entry((activity, medium_name(medium))).or_default() += 1;
    }
}

/// Images that were recovered already, with the hash of the resulting tree. Shared, so that no content is
/// recovered twice.
#[derive(Debug, Default)]
pub struct Known(Mutex<HashMap<u64, u64>>);

impl Known {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, image: u64) -> Option<u64> {
        self.lock().get(&image).copied()
    }

    /// Number of these images, and a hash over all of them.
    #[must_use]
    pub fn summary(&self) -> (usize, u64) {
        let known = self.lock();
        let mut images: Vec<_> = known.iter().collect();
        images.sort_unstable();
        let mut hasher = DefaultHasher::new();
        images.hash(&mut hasher);
        (images.len(), hasher.finish())
    }

    /// Returns `false` if the image was known.
    fn put(&self, image: u64, tree: u64) -> bool {
        self.lock().insert(image, tree).is_none()
    }
}

const fn kind_name(kind: PointKind) -> &'static str {
    match kind {
        PointKind::Store => "store",
        PointKind::Fence => "fence",
        PointKind::Sync => "sync",
        PointKind::Flush => "flush",
        PointKind::Trim => "trim",
        PointKind::Device => "device",
        PointKind::End => "end",
    }
}

const fn medium_name(medium: SimMedium) -> &'static str {
    match medium {
        SimMedium::Dax => "dax",
        SimMedium::DaxByStore(_) => "dax, store by store",
        SimMedium::File => "file",
        SimMedium::Shm => "shm",
        SimMedium::Block => "block",
    }
}

fn kinds_of_crash(
    recording: &Recording,
    point: &CrashPoint,
    medium: SimMedium,
    effort: &Effort,
    rng: &mut Rng,
) -> Vec<Crash> {
    let mut crashes = vec![Crash::Kill];
    if point.next == PointKind::Store {
        crashes.extend((0..effort.torn).map(|_| Crash::KillTorn(rng.next_u64())));
    }
    // On volatile memory a power cut leaves nothing to recover.
    if medium == SimMedium::Shm {
        return crashes;
    }
    crashes.extend([Crash::PowerNone, Crash::PowerAll]);
    crashes.extend((0..effort.seeds).map(|_| Crash::PowerSeeded(rng.next_u64())));
    if effort.combinations {
        let pending = recording.pending_units(point.index);
        if pending <= 4 {
            // The subsets of none and of all units are included above.
            crashes.extend((1..(1_u64 << pending).saturating_sub(1)).map(Crash::PowerUnits));
            let words = if pending > 0 { 2 } else { 0 };
            crashes.extend((0..words).map(|_| Crash::PowerWords(rng.next_u64())));
        }
    }
    crashes
}

/// While it lives, digests of this thread put one operation in each record.
struct SmallCuts;

impl SmallCuts {
    fn begin() -> Self {
        set_record_ops(1);
        Self
    }
}

impl Drop for SmallCuts {
    fn drop(&mut self) {
        set_record_ops(usize::MAX);
    }
}

/// One in 40 recoveries is also crashed in its own recovery.
const DEEPER_STRIDE: u64 = 40;

/// The purpose of a [`number_of`]: whether a recovery cuts batches at every operation. Other purposes are
/// depths of crashed recoveries.
const CUTS: usize = usize::MAX;

/// A number that depends only on a workload, a purpose, a point and a crash.
fn number_of(what: &str, purpose: usize, point: &CrashPoint, crash: Crash) -> u64 {
    let mut hasher = DefaultHasher::new();
    (what, purpose, point.index, format!("{crash:?}")).hash(&mut hasher);
    hasher.finish()
}

/// The state of judging one image.
struct Trial<'k> {
    known: &'k Known,
    effort: &'k Effort,
    rng: Rng,
    tally: Tally,
    /// Whether the image is of a crashed recovery.
    of_recovery: bool,
}

/// A failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wrong {
    /// The kind of moment at which it occurred.
    pub(super) at: Moment,
    /// The workload, the crash and the difference.
    pub(super) why: String,
}

/// The kind of moment of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moment {
    /// Without a crash.
    Run,
    /// After a crash.
    Crash,
    /// After a crash of a recovery.
    Recovery,
}

impl Recorded {
    /// The recorded stores.
    #[must_use]
    pub const fn recording(&self) -> &Recording {
        &self.recording
    }

    /// The activity at this point.
    fn activity(&self, at: usize) -> &'static str {
        let under_way = self.activities.iter().find(|(end, _)| at < *end);
        under_way
            .or(self.activities.last())
            .map_or("nothing", |(_, what)| *what)
    }

    /// Explores the crash points; the error names the workload, the point and the crash.
    ///
    /// # Errors
    /// The first wrong image, and the counts until then.
    #[expect(clippy::result_large_err, reason = "once a run, and both are printed")]
    pub fn explore(&self, effort: &Effort) -> Result<Tally, (Tally, String)> {
        self.explore_knowing(effort, &Known::default())
    }

    /// As [`explore`](Self::explore), without the known images.
    ///
    /// # Errors
    /// As `explore`.
    #[expect(clippy::result_large_err, reason = "once a run, and both are printed")]
    pub fn explore_knowing(&self, effort: &Effort, known: &Known) -> Result<Tally, (Tally, String)> {
        self.explore_marked(effort, known)
            .map_err(|(tally, wrong)| (tally, wrong.why))
    }

    #[expect(clippy::result_large_err, reason = "once a run, and both are printed")]
    fn explore_marked(&self, effort: &Effort, known: &Known) -> Result<Tally, (Tally, Wrong)> {
        let mut trial = Trial {
            known,
            effort,
            rng: Rng::new(effort.seed),
            tally: Tally {
                workloads: 1,
                forwarded: self.forwarded,
                resumed: self.resumed,
                moved: self.moved,
                promoted: self.promoted,
                cooled: self.cooled,
                ..Tally::default()
            },
            of_recovery: false,
        };
        match self.explore_points(&mut trial) {
            Ok(()) => Ok(trial.tally),
            Err(why) => {
                let at = if trial.of_recovery {
                    Moment::Recovery
                } else {
                    Moment::Crash
                };
                Err((trial.tally, Wrong { at, why }))
            }
        }
    }

    fn explore_points(&self, trial: &mut Trial<'_>) -> Result<(), String> {
        let effort = trial.effort;
        let points = if effort.every_point {
            self.recording.points()
        } else {
            self.recording.durability_points()
        };
        let first = trial.rng.below(effort.stride as u64) as usize;
        let last = points.len() - 1;
        let chosen = points
            .iter()
            .enumerate()
            .filter(|(i, _)| *i % effort.stride == first || *i == last);
        for (_, point) in chosen {
            trial.tally.points += 1;
            let medium = self.shape.medium;
            for crash in kinds_of_crash(&self.recording, point, medium, effort, &mut trial.rng) {
                self.try_image(point, crash, trial).map_err(|why| {
                    format!(
                        "{}\n  crash {crash:?} before event {} ({}, {:?}) during {}: {why}",
                        self.what,
                        point.index,
                        kind_name(point.next),
                        point.device,
                        self.activity(point.index),
                    )
                })?;
            }
        }
        Ok(())
    }

    fn try_image(&self, point: &CrashPoint, crash: Crash, trial: &mut Trial<'_>) -> Result<(), String> {
        let bounds = self.history.bounds(point.index, crash, self.shape.medium);
        let image = self.recording.image(point.index, crash);
        trial.tally.built += 1;
        let content = image.content_hash();
        // Independent of the images tried so far and of other explorations: each run crashes the same
        // recoveries.
        let stride = trial.effort.recovery_stride as u64;
        let again = stride > 0 && number_of(&self.what, 0, point, crash).is_multiple_of(stride);
        if let Some(tree) = trial.known.get(content) {
            match self.history.find(&bounds, tree) {
                None => {
                    return Err(format!(
                        "an image seen before is not allowed here: not of {bounds:?}"
                    ));
                }
                Some(_) if !again => return Ok(()),
                Some(_) => {}
            }
        }
        let world = image.into_world();
        // Half of the recoveries cut the logs' batches at every operation: a digest does not know where an
        // interrupted one cut them. Not chosen by content, which has a pool's random identity.
        let cuts = number_of(&self.what, CUTS, point, crash).is_multiple_of(2);
        let _cuts = cuts.then(SmallCuts::begin);
        let (hash, cut) = if again {
            let (recovery, rig) = world.clone().record(|| Rig::start(world, self.shape));
            let found = self.judge(rig.map_err(say)?, &bounds, self.keeps_sealed(crash))?;
            trial.of_recovery = true;
            self.crash_recovery(&recovery, &bounds, found.0, trial, 2)?;
            trial.of_recovery = false;
            found
        } else {
            let rig = Rig::start(world, self.shape).map_err(say)?;
            self.judge(rig, &bounds, self.keeps_sealed(crash))?
        };
        if trial.known.put(content, hash) {
            let tally = &mut trial.tally;
            tally.note(point.next, self.activity(point.index), self.shape.medium);
            let returned = self.history.returned(point.index);
            let mut pairs = cut.iter().zip(&returned);
            tally.ahead += usize::from(pairs.clone().any(|(cut, returned)| cut > returned));
            tally.behind += usize::from(pairs.any(|(cut, returned)| cut < returned));
        }
        Ok(())
    }

    /// Whether the entries that a seal names are in the log after this crash. Where a log is durable only
    /// when it is synced, a seal may be durable without the log's end: no promise is broken then, but the
    /// recovery finds fewer entries than the seal names.
    const fn keeps_sealed(&self, crash: Crash) -> bool {
        let is_kill = matches!(crash, Crash::Kill | Crash::KillTorn(_));
        is_kill || !self.seals || !matches!(self.shape.medium, SimMedium::File)
    }

    /// Judges a recovered pool; returns the hash of its tree, and the operations in it. `all_count`: the
    /// digest may leave out no operation.
    fn judge(&self, rig: Rig, bounds: &(Cut, Cut), all_count: bool) -> Result<(u64, Cut), String> {
        rig.check().map_err(|error| format!("after recovery: {error}"))?;
        // No client came back to hold them.
        let orphans = rig.kernel().store().orphans().map_err(say)?;
        if !orphans.is_empty() {
            return Err(format!(
                "after recovery files without a name are left: {orphans:?}"
            ));
        }
        // Correct clients log nothing that a digest may refuse, and nothing twice.
        let refused = rig.kernel().status().digest.refused;
        if all_count && refused > 0 {
            return Err(format!("recovery left {refused} operations out of the digest"));
        }
        let fs = rig.mount().map_err(say)?;
        let got = target::tree(&fs).map_err(|errno| format!("the tree cannot be read: {errno:?}"))?;
        let hash = tree_hash(&got);
        let Some((cut, state)) = self.history.find(bounds, hash) else {
            let (least, most) = bounds;
            // A tree of another moment and a tree of no moment are reported as different faults.
            let all = (vec![0; least.len()], self.history.returned(usize::MAX));
            if let Some((cut, _)) = self.history.find(&all, hash) {
                return Err(format!(
                    "the state is that after {cut:?} operations, not {least:?} to {most:?}"
                ));
            }
            let near: Option<Arc<State>> = self.history.state(most);
            let lines = near.map_or_else(Vec::new, |state| target::difference(&state.tree, &got));
            return Err(format!(
                "the tree is that of no moment; from the one after {most:?} operations it differs by:\n    \
                {}",
                lines.join("\n    ")
            ));
        };
        let mut model = state.model.clone();
        go_on(&rig, &fs, &mut model).map_err(|why| format!("after recovery it does not go on: {why}"))?;
        Ok((hash, cut))
    }

    /// Crashes a recovery: the next one must produce the same tree.
    fn crash_recovery(
        &self,
        recovery: &Recording,
        bounds: &(Cut, Cut),
        tree: u64,
        trial: &mut Trial<'_>,
        depth: usize,
    ) -> Result<(), String> {
        let effort = Effort {
            every_point: false,
            torn: 0,
            combinations: false,
            seeds: trial.effort.seeds,
            ..*trial.effort
        };
        for point in &recovery.durability_points() {
            for crash in kinds_of_crash(recovery, point, self.shape.medium, &effort, &mut trial.rng) {
                let image = recovery.image(point.index, crash);
                trial.tally.built += 1;
                let content = image.content_hash();
                // Some recoveries of the crashed recovery are crashed too.
                let number = number_of(&self.what, depth, point, crash);
                let deeper = depth > 1 && number.is_multiple_of(DEEPER_STRIDE);
                if !deeper && trial.known.get(content).is_some_and(|known| known == tree) {
                    continue;
                }
                let world = image.into_world();
                let told = |why: String| {
                    let (at, next) = (point.index, kind_name(point.next));
                    format!("recovery crashed ({crash:?} before event {at}, {next}): {why}")
                };
                let (again, rig) = if deeper {
                    let (again, rig) = world.clone().record(|| Rig::start(world, self.shape));
                    (Some(again), rig)
                } else {
                    (None, Rig::start(world, self.shape))
                };
                let rig = rig.map_err(|error| told(say(error)))?;
                // A recovery seals all sessions, so on `File` entries that a seal names may be missing.
                let all_count = !matches!(self.shape.medium, SimMedium::File);
                let (found, _) = self.judge(rig, bounds, all_count).map_err(told)?;
                if found != tree {
                    return Err(told("another state than without that crash".into()));
                }
                if let Some(again) = again {
                    self.crash_recovery(&again, bounds, tree, trial, depth - 1)
                        .map_err(told)?;
                }
                if trial.known.put(content, found) {
                    trial.tally.of_recovery += 1;
                    trial.tally.note(point.next, "recovery", self.shape.medium);
                }
            }
        }
        Ok(())
    }
}

/// Does a few operations on a recovered pool: on existing files and on a new one.
fn go_on(rig: &Rig, fs: &varve_libfs::Fs, model: &mut Model) -> Result<(), String> {
    let ops = [
        Op::Append {
            path: vec!["f"],
            len: 300,
            seed: 77,
        },
        Op::Create(vec!["after"]),
        Op::Write {
            path: vec!["after"],
            offset: 10,
            len: 5000,
            seed: 78,
        },
        Op::Unlink(vec!["g"]),
        Op::Rename(vec!["d", "f"], vec!["moved"]),
    ];
    for op in &ops {
        lockstep::both(model, fs, op)?;
    }
    rig.kernel().digest_all().map_err(say)?;
    let (want, got) = (
        model.tree(),
        target::tree(fs).map_err(|errno| format!("{errno:?}"))?,
    );
    if want != got {
        return Err(target::difference(&want, &got).join("; "));
    }
    rig.check().map_err(say)
}

/// Images that this process has recovered, by content.
static TRIED: Mutex<Option<HashSet<u64>>> = Mutex::new(None);

/// Number of distinct images that all explorations of this process have recovered so far.
#[must_use]
pub fn tried() -> usize {
    let tried = TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    tried.as_ref().map_or(0, HashSet::len)
}

/// Number of threads that explore at once.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(8)
}

/// Records and explores one workload.
pub(super) fn explore_job((script, shape, effort): &Job, known: &Known) -> Result<Tally, Wrong> {
    let recorded = script
        .record(*shape)
        .map_err(|why| Wrong { at: Moment::Run, why })?;
    recorded.explore_marked(effort, known).map_err(|(_, wrong)| wrong)
}

/// Records and explores workloads, several at once. No image is recovered twice.
///
/// # Errors
/// The first wrong image, with its workload.
pub fn explore_all(jobs: &[Job]) -> Result<Tally, String> {
    explore_jobs(jobs).map_err(|(_, wrong)| wrong.why)
}

/// As [`explore_all`]; the error has the index of the wrong job, and the failure.
pub(super) fn explore_jobs(jobs: &[Job]) -> Result<Tally, (usize, Wrong)> {
    let (known, next, stop) = (Known::default(), AtomicUsize::new(0), AtomicBool::new(false));
    let work = || {
        let mut sum = Tally::default();
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(index) else {
                break;
            };
            match unwound(|| explore_job(job, &known)) {
                Ok(tally) => sum.add(&tally),
                Err(wrong) => {
                    stop.store(true, Ordering::Relaxed);
                    return Err((index, wrong));
                }
            }
        }
        Ok(sum)
    };
    let sum = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads()).map(|_| scope.spawn(work)).collect();
        let mut sum = Ok(Tally::default());
        for thread in threads {
            let part = thread
                .join()
                .unwrap_or_else(|payload| std::panic::resume_unwind(payload));
            match (&mut sum, part) {
                (Ok(sum), Ok(part)) => sum.add(&part),
                (sum @ Ok(_), Err(wrong)) => *sum = Err(wrong),
                (Err(_), _) => {}
            }
        }
        sum
    });
    let mut tried = TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    tried.get_or_insert_default().extend(known.lock().keys());
    sum
}

/// Turns a panic of the tested code into a failure.
pub(super) fn unwound(work: impl FnOnce() -> Result<Tally, Wrong>) -> Result<Tally, Wrong> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        let said = payload.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| payload.downcast_ref::<&str>().copied());
        Err(Wrong {
            at: Moment::Crash,
            why: format!("panic: {}", said.unwrap_or("without a word")),
        })
    })
}
