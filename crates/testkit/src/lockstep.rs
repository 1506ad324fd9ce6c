//! Lockstep: random steps run on the model and on sessions of one pool; every result and, now and then, the
//! whole tree must be equal. Owns steps, comparison and shrinking; refuses to know how the file system is
//! built.

use crate::model::Model;
use crate::ops::Op;
use crate::rig::{Rig, Shape};
use crate::target;
use crate::workload::{Rng, likely_op};
use std::fmt;
use varve_libfs::{Errno, Fs};

/// One step of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LockstepStep {
    /// An operation by one of the sessions.
    Op(usize, Op),
    /// Digests all logs.
    Digest,
    /// Time passes and the daemon ticks.
    Tick(u64),
    /// All sessions are sealed by force; the clients resume.
    Seal,
    /// The daemon is killed and started again.
    Restart,
    /// The session is ended properly and another one takes its place.
    Remount(usize),
    /// Some metadata is demoted, and the journal is emptied.
    Checkpoint,
    /// Requires that all sessions see the model's tree and that the pool is sound.
    Compare,
}

impl fmt::Display for LockstepStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Op(session, op) => write!(f, "session {session}: {op}"),
            other => write!(f, "{other:?}"),
        }
    }
}

/// Counts of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LockstepStats {
    /// Operations carried out.
    pub ops: usize,
    /// Of these, refused with the errno of the model.
    pub refused: usize,
    /// Whole trees compared.
    pub trees: usize,
    /// Sessions lost and resumed.
    pub resumed: u64,
    /// Operations that the daemon did.
    pub forwarded: u64,
    /// Blocks of metadata demoted to slower tiers.
    pub cooled: u64,
}

impl LockstepStats {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.ops += other.ops;
        self.refused += other.refused;
        self.trees += other.trees;
        self.resumed += other.resumed;
        self.forwarded += other.forwarded;
        self.cooled += other.cooled;
    }
}

/// Generates random steps of `sessions` sessions.
#[must_use]
pub fn steps(seed: u64, sessions: usize, count: usize) -> Vec<LockstepStep> {
    let mut rng = Rng::new(seed ^ 0x10c_5713);
    let mut steps = Vec::with_capacity(count + count / 16);
    let (mut session, mut model) = (0, Model::new());
    for at in 1..=count {
        // Sessions take turns of a few operations, sometimes of one.
        if rng.below(3) == 0 {
            session = rng.below(sessions as u64) as usize;
        }
        steps.push(match rng.below(100) {
            0..=3 => LockstepStep::Digest,
            4..=8 => LockstepStep::Tick(rng.below(300)),
            9 => LockstepStep::Seal,
            10 => LockstepStep::Restart,
            11 => LockstepStep::Remount(rng.below(sessions as u64) as usize),
            12 => LockstepStep::Checkpoint,
            13 => LockstepStep::Tick(6_000),
            _ => LockstepStep::Op(session, likely_op(&mut rng, &mut model)),
        });
        if at % 16 == 0 {
            steps.push(LockstepStep::Compare);
        }
    }
    steps.push(LockstepStep::Compare);
    steps
}

/// A result, or a message on the failure.
type Outcome<T> = Result<T, String>;

fn compare(model: &Model, sessions: &[Fs], rig: &Rig) -> Outcome<usize> {
    let want = model.tree();
    for (index, fs) in sessions.iter().enumerate() {
        let got =
            target::tree(fs).map_err(|errno| format!("session {index} cannot read the tree: {errno:?}"))?;
        if got != want {
            let lines = target::difference(&want, &got);
            return Err(format!(
                "session {index} sees another tree:\n    {}",
                lines.join("\n    ")
            ));
        }
    }
    rig.check().map_err(|error| error.to_string())?;
    Ok(sessions.len())
}

/// Carries one operation out on both; the results must be equal.
///
/// # Errors
/// Both results, if they differ.
pub fn both(model: &mut Model, fs: &Fs, op: &Op) -> Result<bool, String> {
    both_by(model, op, || target::apply(fs, op))
}

/// As [`both`]; `carry_out` runs the operation on the file system, in any thread.
///
/// # Errors
/// Both results, if they differ.
pub(crate) fn both_by(
    model: &mut Model,
    op: &Op,
    carry_out: impl FnOnce() -> Result<(), Errno>,
) -> Result<bool, String> {
    let want = model.apply(op);
    let got = carry_out().map_err(|errno| errno.0);
    if want == got {
        Ok(got.is_ok())
    } else {
        Err(format!("{op}: the model says {want:?}, the file system {got:?}"))
    }
}

/// Runs steps on a new pool.
///
/// # Errors
/// The number of the failed step (from 0), and the failure.
pub fn run(shape: Shape, sessions: usize, steps: &[LockstepStep]) -> Result<LockstepStats, (usize, String)> {
    let fail = |at: usize| move |why: String| (at, why);
    let rig = Rig::new(shape).map_err(|error| (0, error.to_string()))?;
    let mut mounts = Vec::new();
    for _ in 0..sessions {
        mounts.push(rig.mount().map_err(|error| (0, error.to_string()))?);
    }
    let (mut model, mut stats) = (Model::new(), LockstepStats::default());
    for (at, step) in steps.iter().enumerate() {
        let note = |fs: &Fs, stats: &mut LockstepStats| {
            let counters = fs.counters();
            stats.resumed += counters.resumed;
            stats.forwarded += counters.forwarded;
        };
        match step {
            LockstepStep::Op(session, op) => {
                let done = both(&mut model, &mounts[*session], op).map_err(fail(at))?;
                stats.ops += 1;
                stats.refused += usize::from(!done);
            }
            LockstepStep::Digest => rig
                .kernel()
                .digest_all()
                .map_err(|error| (at, error.to_string()))?,
            LockstepStep::Tick(ms) => {
                rig.clock.advance_ms(*ms);
                rig.kernel().tick();
            }
            LockstepStep::Seal => rig.seal_all(),
            LockstepStep::Restart => rig.restart().map_err(|error| (at, error.to_string()))?,
            LockstepStep::Remount(session) => {
                let fs = rig.mount().map_err(|error| (at, error.to_string()))?;
                note(&mounts[*session], &mut stats);
                mounts[*session]
                    .unmount()
                    .map_err(|errno| (at, format!("unmount: {errno:?}")))?;
                mounts[*session] = fs;
            }
            LockstepStep::Checkpoint => {
                let kernel = rig.kernel();
                stats.cooled += kernel
                    .store()
                    .demote(1 + at as u64 % 64)
                    .map_err(|error| (at, error.to_string()))?;
                kernel
                    .store()
                    .checkpoint()
                    .map_err(|error| (at, error.to_string()))?;
            }
            LockstepStep::Compare => stats.trees += compare(&model, &mounts, &rig).map_err(fail(at))?,
        }
        if at + 1 == steps.len() && *step == LockstepStep::Compare {
            let counted = rig.check_reservations(mounts.iter());
            counted.map_err(|error| (at, error.to_string()))?;
        }
        if at + 1 == steps.len() {
            mounts.iter().for_each(|fs| note(fs, &mut stats));
        }
    }
    Ok(stats)
}

/// Returns the fewest steps found that still fail, within `runs` attempts.
#[must_use]
pub fn shrink(shape: Shape, sessions: usize, steps: &[LockstepStep], runs: usize) -> Vec<LockstepStep> {
    shrink_with(steps, runs, |steps| {
        run(shape, sessions, steps).err().map(|(at, _)| at)
    })
}

/// As [`shrink`], for steps of any kind; `fails` returns the step at which they fail.
pub(crate) fn shrink_with<S: Clone>(
    steps: &[S],
    runs: usize,
    fails: impl Fn(&[S]) -> Option<usize>,
) -> Vec<S> {
    let mut best = steps.to_vec();
    if let Some(at) = fails(&best) {
        best.truncate(at + 1);
    }
    let mut left = runs;
    let mut size = best.len().div_ceil(2);
    while size > 0 && left > 0 {
        let (mut from, mut smaller) = (0, false);
        while from < best.len() && left > 0 {
            let mut fewer = best.clone();
            fewer.drain(from..(from + size).min(best.len()));
            left -= 1;
            match fails(&fewer) {
                Some(at) => {
                    fewer.truncate(at + 1);
                    best = fewer;
                    smaller = true;
                }
                None => from += size,
            }
        }
        if !smaller || size > best.len() {
            size /= 2;
        }
    }
    best
}

/// Runs a seed; on failure the message has the seed and the shrunk steps.
///
/// # Errors
/// The message.
pub fn run_seed(shape: Shape, sessions: usize, seed: u64, count: usize) -> Result<LockstepStats, String> {
    let all = steps(seed, sessions, count);
    run(shape, sessions, &all).map_err(|(at, why)| {
        let few = shrink(shape, sessions, &all, 400);
        let now = match run(shape, sessions, &few) {
            Err((_, why)) => why,
            Ok(_) => "does not fail each time".into(),
        };
        let list: Vec<_> = few.iter().map(|step| format!("    {step}")).collect();
        format!(
            "VARVE_SEED={seed} ({sessions} sessions, {:?}) failed at step {at}: {why}\n  shrunk to {} \
            steps:\n{}\n  which fail with: {now}",
            shape.medium,
            few.len(),
            list.join("\n"),
        )
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{LockstepStep, run, run_seed, shrink};
    use crate::ops::{CLOCK_SECS, Op, write};
    use crate::rig::Shape;
    use varve_media::sim::SimMedium;

    #[test]
    fn short_run_agrees_with_the_model() {
        let stats = run_seed(Shape::small(SimMedium::Dax), 1, 1, 60).unwrap_or_else(|why| panic!("{why}"));
        assert!(stats.ops > 30 && stats.trees > 2, "{stats:?}");
    }

    #[test]
    fn write_in_place_ends_a_time_that_was_set_by_hand() {
        let steps = [
            Op::Create(vec!["f"]),
            write("f", 0, 8192, 1),
            Op::Utimens {
                path: vec!["f"],
                secs: CLOCK_SECS.end,
            },
            write("f", 4096, 4096, 2),
        ];
        let steps: Vec<_> = steps
            .into_iter()
            .flat_map(|op| [LockstepStep::Op(0, op), LockstepStep::Compare])
            .collect();
        assert_eq!(
            run(Shape::small(SimMedium::Dax), 1, &steps).map(|stats| stats.ops),
            Ok(4)
        );
    }

    #[test]
    fn shrinking_keeps_only_what_is_needed() {
        // No step fails, so `shrink` keeps all of them.
        let shape = Shape::small(SimMedium::Dax);
        let steps: Vec<_> = (0..6)
            .map(|_| LockstepStep::Op(0, Op::Create(vec!["f"])))
            .collect();
        assert!(run(shape, 1, &steps).is_ok());
        assert_eq!(shrink(shape, 1, &steps, 10), steps);
    }
}
