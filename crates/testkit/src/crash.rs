//! Crash exploration: a workload is recorded on the simulated machine; at each crash point the images that a kill or a power cut may leave
//! are recovered and judged. Owns which states are allowed after which crash, and the judgement; refuses to know how recovery works.
//!
//! # The oracle
//! Let the states of the model be numbered: state `k` is the one after `k` operations. After a crash with `i` operations begun and `a` of
//! them returned, the recovered tree must be the one of a state
//! - `a..=i` after a kill, on every medium;
//! - `a..=i` after a power cut on `Dax` (a returned call is durable);
//! - `d..=i` after a power cut on `File`, where `d` operations returned before the last `fsync` (or explicit digest) that returned.
//!
//! All structures and all data must check clean, and the pool must go on working.

use crate::lockstep;
use crate::model::{Model, Tree};
use crate::ops::Op;
use crate::rig::{Rig, RigError, Shape};
use crate::target;
use crate::workload::Rng;
use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use varve_media::sim::{Crash, PointKind, Recording, SimMedium, SimWorld};

/// What is done while the machine is recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act {
    /// An operation.
    Op(Op),
    /// Everything in the log is digested.
    Digest,
    /// The daemon looks around: frees, forgets.
    Tick,
    /// The journal is emptied.
    Checkpoint,
    /// The session is sealed by force and resumes.
    Seal,
    /// The daemon is killed and starts again.
    Restart,
}

/// What is done before, and while, the machine is recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    /// Done before.
    pub before: Vec<Act>,
    /// Recorded.
    pub acts: Vec<Act>,
}

/// A finished recording and what is allowed after it.
pub struct Recorded {
    recording: Recording,
    shape: Shape,
    /// Events before each recorded operation and after it.
    spans: Vec<(usize, usize)>,
    /// After so many events, so many operations are durable whatever happens.
    durable: Vec<(usize, usize)>,
    /// States 0 (before the recording) to the last.
    models: Vec<Model>,
    trees: Vec<Tree>,
    /// The workload, for people.
    what: String,
}

fn say(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Script {
    /// Runs it on a new pool.
    ///
    /// # Errors
    /// When the file system does not agree with the model although nothing crashed.
    pub fn record(&self, shape: Shape) -> Result<Recorded, String> {
        let rig = Rig::new(shape).map_err(say)?;
        let fs = rig.mount().map_err(say)?;
        let mut model = Model::new();
        for act in &self.before {
            perform(&rig, &fs, &mut model, act)?;
        }
        rig.world.start_recording();
        let (mut spans, mut durable) = (Vec::new(), vec![(0, 0)]);
        let mut models = vec![model.clone()];
        for act in &self.acts {
            let begin = rig.world.events_len();
            perform(&rig, &fs, &mut model, act)?;
            let end = rig.world.events_len();
            if matches!(act, Act::Op(_)) {
                spans.push((begin, end));
                models.push(model.clone());
            }
            if matches!(act, Act::Op(Op::Fsync(_)) | Act::Digest) {
                durable.push((end, spans.len()));
            }
        }
        let recording = rig.world.finish_recording();
        let trees: Vec<_> = models.iter().map(Model::tree).collect();
        let got = target::tree(&fs).map_err(|errno| format!("{errno:?}"))?;
        match trees.last() {
            Some(want) if *want != got => {
                return Err(format!(
                    "without a crash: {}",
                    target::difference(want, &got).join("; ")
                ));
            }
            _ => {}
        }
        let list = |acts: &[Act]| {
            acts.iter()
                .map(|act| format!("{act}"))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let what = format!(
            "[{}] then [{}] on {:?}",
            list(&self.before),
            list(&self.acts),
            shape.medium
        );
        Ok(Recorded {
            recording,
            shape,
            spans,
            durable,
            models,
            trees,
            what,
        })
    }
}

impl std::fmt::Display for Act {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Op(op) => write!(f, "{op}"),
            other => write!(f, "{other:?}"),
        }
    }
}

fn perform(rig: &Rig, fs: &varve_libfs::Fs, model: &mut Model, act: &Act) -> Result<(), String> {
    match act {
        Act::Op(op) => lockstep::both(model, fs, op).map(|_| ()),
        Act::Digest => rig.kernel().digest_all().map_err(say),
        Act::Tick => {
            rig.settle();
            Ok(())
        }
        Act::Checkpoint => rig.kernel().store().checkpoint().map_err(say),
        Act::Seal => {
            rig.seal_all();
            Ok(())
        }
        Act::Restart => rig.restart().map_err(say),
    }
}

/// How much is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// All points, instead of those before fences, syncs, flushes and at the end.
    pub every_point: bool,
    /// Only one in so many points (from a seeded start).
    pub stride: usize,
    /// Seeded subsets at each point.
    pub seeds: u64,
    /// One in so many images is also crashed during its recovery; 0: none.
    pub recovery_stride: usize,
    /// Seed of everything.
    pub seed: u64,
    /// Stop at the first image that is wrong.
    pub stop_at_first: bool,
}

impl Effort {
    /// For the ordinary run of the tests.
    #[must_use]
    pub const fn ordinary(seed: u64) -> Self {
        Self {
            every_point: false,
            stride: 1,
            seeds: 1,
            recovery_stride: 0,
            seed,
            stop_at_first: true,
        }
    }

    /// Everything.
    #[must_use]
    pub const fn all(seed: u64) -> Self {
        Self {
            every_point: true,
            stride: 1,
            seeds: 4,
            recovery_stride: 97,
            seed,
            stop_at_first: true,
        }
    }
}

/// What was tried.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Crash points.
    pub points: usize,
    /// Images built.
    pub built: usize,
    /// Distinct images recovered.
    pub images: usize,
    /// Of these, images of a recovery.
    pub of_recovery: usize,
    /// Images by what came next at their point.
    pub by_kind: BTreeMap<&'static str, usize>,
    /// Images whose state is that of some operation that had not returned.
    pub ahead: usize,
    /// Images whose state lacks a returned operation (allowed where that was not durable).
    pub behind: usize,
}

impl Tally {
    /// Adds another one.
    pub fn add(&mut self, other: &Self) {
        self.points += other.points;
        self.built += other.built;
        self.images += other.images;
        self.of_recovery += other.of_recovery;
        self.ahead += other.ahead;
        self.behind += other.behind;
        for (kind, count) in &other.by_kind {
            *self.by_kind.entry(kind).or_default() += count;
        }
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

impl Recorded {
    /// Operations that have returned at this point.
    fn returned(&self, at: usize) -> usize {
        self.spans.iter().filter(|(_, end)| *end <= at).count()
    }

    /// States allowed after a crash at this point.
    fn allowed(&self, at: usize, crash: Crash) -> RangeInclusive<usize> {
        // A torn store has happened in part.
        let reached = at + usize::from(matches!(crash, Crash::KillTorn(_)));
        let begun = self.spans.iter().filter(|(begin, _)| *begin < reached).count();
        let returned = self.returned(at);
        let synced = || {
            self.durable
                .iter()
                .filter(|(end, _)| *end <= at)
                .map(|(_, ops)| *ops)
                .max()
                .unwrap_or(0)
        };
        let kill = matches!(crash, Crash::Kill | Crash::KillTorn(_));
        let least = if kill || self.shape.medium == SimMedium::Dax {
            returned
        } else {
            synced()
        };
        least..=begun.max(least)
    }

    /// Explores the crash points; the error names the workload, the point and the crash.
    ///
    /// # Errors
    /// The first image that is wrong.
    pub fn explore(&self, effort: &Effort) -> Result<Tally, (Tally, String)> {
        let mut tally = Tally::default();
        let mut known: HashMap<u64, Vec<usize>> = HashMap::new();
        let points = if effort.every_point {
            self.recording.points()
        } else {
            self.recording.durability_points()
        };
        let mut rng = Rng::new(effort.seed);
        let first = rng.below(effort.stride as u64) as usize;
        let last = points.len() - 1;
        let chosen = points
            .iter()
            .enumerate()
            .filter(|(i, _)| *i % effort.stride == first || *i == last);
        for (_, point) in chosen {
            // On memory a power cut leaves nothing to recover.
            let power = self.shape.medium != SimMedium::Shm;
            let mut crashes = vec![Crash::Kill];
            if power {
                crashes.extend([Crash::PowerNone, Crash::PowerAll]);
                crashes.extend((0..effort.seeds).map(|_| Crash::PowerSeeded(rng.next_u64())));
            }
            if effort.every_point && point.next == PointKind::Store {
                crashes.push(Crash::KillTorn(rng.next_u64()));
            }
            if power && effort.every_point && self.recording.pending_units(point.index) <= 4 {
                crashes.extend((1..15).map(Crash::PowerUnits));
            }
            tally.points += 1;
            for crash in crashes {
                let allowed = self.allowed(point.index, crash);
                let image = self.recording.image(point.index, crash);
                tally.built += 1;
                let hash = image.content_hash();
                let fail = |tally: &Tally, why: String| {
                    let why = format!(
                        "{}\n  crash {crash:?} before event {} ({}, {:?}): {why}",
                        self.what,
                        point.index,
                        kind_name(point.next),
                        point.device
                    );
                    (tally.clone(), why)
                };
                if let std::collections::hash_map::Entry::Vacant(unknown) = known.entry(hash) {
                    tally.images += 1;
                    *tally.by_kind.entry(kind_name(point.next)).or_default() += 1;
                    let again =
                        effort.recovery_stride > 0 && tally.images.is_multiple_of(effort.recovery_stride);
                    let world = image.into_world();
                    let states = self
                        .judge(world, &allowed, again.then_some((&mut rng, &mut tally)), 2)
                        .map_err(|why| fail(&tally, why))?;
                    let returned = self.returned(point.index);
                    tally.ahead += usize::from(states.iter().all(|state| *state > returned));
                    tally.behind += usize::from(states.iter().all(|state| *state < returned));
                    unknown.insert(states);
                }
                let states = &known[&hash];
                if !states.iter().any(|state| allowed.contains(state)) {
                    return Err(fail(
                        &tally,
                        format!("the state is that after {states:?} operations, not {allowed:?}"),
                    ));
                }
            }
        }
        Ok(tally)
    }

    /// Recovers a machine. Answers which states its tree is equal to.
    fn judge(
        &self,
        world: SimWorld,
        allowed: &RangeInclusive<usize>,
        again: Option<(&mut Rng, &mut Tally)>,
        depth: usize,
    ) -> Result<Vec<usize>, String> {
        let (rig, recovery) = if again.is_some() {
            let (recovery, rig) = world.clone().record(|| Rig::start(world, self.shape));
            (rig.map_err(say)?, Some(recovery))
        } else {
            (Rig::start(world, self.shape).map_err(say)?, None)
        };
        rig.check().map_err(|error| format!("after recovery: {error}"))?;
        let fs = rig.mount().map_err(say)?;
        let got = target::tree(&fs).map_err(|errno| format!("the tree cannot be read: {errno:?}"))?;
        let states: Vec<_> = (0..self.trees.len())
            .filter(|state| self.trees[*state] == got)
            .collect();
        let Some(state) = states
            .iter()
            .find(|state| allowed.contains(state))
            .or(states.first())
        else {
            let near = &self.trees[*allowed.end()];
            return Err(format!(
                "the tree is that of no moment; from the one after {} operations it differs by:\n    {}",
                allowed.end(),
                target::difference(near, &got).join("\n    ")
            ));
        };
        let mut model = self.models[*state].clone();
        go_on(&rig, &fs, &mut model).map_err(|why| format!("after recovery it does not go on: {why}"))?;
        drop(fs);
        if let (Some(recovery), Some((rng, tally))) = (recovery, again) {
            self.crash_recovery(&recovery, &states, rng, tally, depth)?;
        }
        Ok(states)
    }

    /// Crashes a recovery: what comes out of the next one is the same.
    fn crash_recovery(
        &self,
        recovery: &Recording,
        states: &[usize],
        rng: &mut Rng,
        tally: &mut Tally,
        depth: usize,
    ) -> Result<(), String> {
        let points = recovery.durability_points();
        let power = self.shape.medium != SimMedium::Shm;
        let mut known = std::collections::HashSet::new();
        for point in &points {
            let seeded = Crash::PowerSeeded(rng.next_u64());
            let crashes = if power {
                vec![Crash::Kill, Crash::PowerNone, seeded]
            } else {
                vec![Crash::Kill]
            };
            for crash in crashes {
                let image = recovery.image(point.index, crash);
                tally.built += 1;
                if !known.insert(image.content_hash()) {
                    continue;
                }
                tally.images += 1;
                tally.of_recovery += 1;
                // Now and then the recovery of the recovery crashes too.
                let deeper = depth > 1 && tally.of_recovery.is_multiple_of(50);
                let allowed = states[0]..=states[states.len() - 1];
                let found = self
                    .judge(
                        image.into_world(),
                        &allowed,
                        deeper.then_some((rng, tally)),
                        depth - 1,
                    )
                    .map_err(|why| {
                        format!(
                            "recovery crashed ({crash:?} before event {}, {}): {why}",
                            point.index,
                            kind_name(point.next)
                        )
                    })?;
                if found.iter().all(|state| !states.contains(state)) {
                    return Err(format!(
                        "recovery crashed ({crash:?} before event {}): state {found:?}, without that crash {states:?}",
                        point.index
                    ));
                }
            }
        }
        Ok(())
    }
}

/// A few operations on a recovered pool, which touch what there may be and make something new.
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
    rig.kernel()
        .digest_all()
        .map_err(|error: varve_store::StoreError| error.to_string())?;
    let (want, got) = (
        model.tree(),
        target::tree(fs).map_err(|errno| format!("{errno:?}"))?,
    );
    if want != got {
        return Err(target::difference(&want, &got).join("; "));
    }
    rig.check().map_err(|error: RigError| error.to_string())
}
