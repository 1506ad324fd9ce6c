//! Shrinks a failing workload, and prints the command that repeats it. Knows no file system.

use super::explore::{Known, Moment, Wrong, explore_job, explore_jobs, unwound};
use super::text::job_text;
use super::{Act, Job, Script, Tally};
use crate::lockstep::shrink_with;
use std::time::{Duration, Instant};

/// Most runs of smaller workloads.
const RUNS_MAX: usize = 400;
/// Time after which the smallest failing workload so far is reported.
const TIME_MAX: Duration = Duration::from_secs(180);

/// A failing workload that could not be shrunk further.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shrunk {
    /// The workload.
    pub job: Job,
    /// The failure.
    pub why: String,
}

impl Shrunk {
    /// The command that repeats it.
    #[must_use]
    pub fn command(&self) -> String {
        format!(
            "VARVE_CRASH_SCRIPT='{}' cargo test -p varve-testkit --test crash given_script -- --nocapture",
            job_text(&self.job)
        )
    }
}

impl Script {
    /// Whether stopped clients do nothing, and nothing else would wait for them indefinitely.
    fn goes_on(&self) -> bool {
        let mut stopped = None;
        self.before.iter().chain(&self.acts).all(|act| match act {
            Act::Thaw(_) => {
                stopped = None;
                true
            }
            Act::By(session, _) | Act::Read(session, _) => stopped != Some(*session),
            Act::Op(_) | Act::Hold(_) | Act::LetGo => stopped != Some(0),
            Act::Freeze(session) => stopped.replace(*session).is_none(),
            Act::Digest
            | Act::Place
            | Act::Pin(_)
            | Act::PlaceShared(_)
            | Act::Evacuate(_)
            | Act::AddDevice(_)
            | Act::RemoveDevice(_)
            | Act::Checkpoint => true,
            _ => stopped.is_none(),
        })
    }
}

/// Removes acts that the failure does not need; `None` if the job does not fail. The smaller job fails at the
/// same kind of moment: without a crash, after one, or in a recovery.
#[must_use]
pub fn shrink(job: &Job) -> Option<Shrunk> {
    let wrong = try_job(job).err()?;
    let (script, shape, effort) = job;
    let effort = match wrong.at {
        // The workload decides which recoveries are crashed, so a smaller workload crashes all of them.
        Moment::Recovery => effort.with_recovery(1),
        _ => *effort,
    };
    let deadline = Instant::now() + TIME_MAX;
    let parts = [(true, &script.before), (false, &script.acts)];
    let all: Vec<_> = parts
        .iter()
        .flat_map(|(before, acts)| acts.iter().map(|act| (*before, act.clone())))
        .collect();
    let few = shrink_with(&all, RUNS_MAX, |acts| {
        let script = joined(acts);
        if Instant::now() > deadline || !script.goes_on() {
            return None;
        }
        let again = try_job(&(script, *shape, effort)).err()?;
        (again.at == wrong.at).then(|| acts.len().saturating_sub(1))
    });
    Some(told((joined(&few), *shape, effort), job, wrong))
}

/// Returns the small job, or the original one if the small job does not fail again.
fn told(small: Job, job: &Job, wrong: Wrong) -> Shrunk {
    match try_job(&small) {
        Err(again) => Shrunk {
            job: small,
            why: again.why,
        },
        Ok(_) => Shrunk {
            job: job.clone(),
            why: wrong.why,
        },
    }
}

fn joined(acts: &[(bool, Act)]) -> Script {
    let those = |which: bool| {
        let acts = acts.iter().filter(|(before, _)| *before == which);
        acts.map(|(_, act)| act.clone()).collect()
    };
    Script {
        before: those(true),
        acts: those(false),
    }
}

/// Runs a job alone: images known from other jobs would be skipped.
fn try_job(job: &Job) -> Result<Tally, Wrong> {
    unwound(|| explore_job(job, &Known::default()))
}

/// As [`explore_all`](super::explore_all); a failing workload is shrunk before it is reported.
///
/// # Errors
/// The first wrong image; the smallest failing workload found, its failure, and the command that repeats it.
pub fn explore_or_shrink(jobs: &[Job]) -> Result<Tally, String> {
    explore_jobs(jobs).map_err(|(index, wrong)| {
        let Some(small) = shrink(&jobs[index]) else {
            return format!("{}\n  by itself it does not fail", wrong.why);
        };
        let Script { before, acts } = &small.job.0;
        format!(
            "{}\n  shrunk to {} acts: {}\n  again: {}",
            wrong.why,
            before.len() + acts.len(),
            small.why,
            small.command()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::{Script, shrink};
    use crate::crash::Effort;
    use crate::rig::Shape;
    use varve_media::sim::SimMedium;

    #[test]
    fn stopped_client_is_left_alone_in_what_is_tried() {
        for (text, goes_on) in [
            (
                "[create /f] then [freeze 1, create /g, thaw 1, 1: create /h]",
                true,
            ),
            ("[] then [freeze 1, 1: create /h]", false),
            ("[] then [freeze 0, create /h, thaw 0]", false),
            ("[] then [freeze 1, restart, thaw 1]", false),
            ("[] then [freeze 1, freeze 0, thaw 1]", false),
        ] {
            let script: Script = text.parse().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(script.goes_on(), goes_on, "{text}");
        }
    }

    #[test]
    fn workload_that_does_not_fail_is_not_made_small() {
        let text = "[create /f] then [write /f offset=0 len=10 seed=1, digest]";
        let script = text.parse().unwrap_or_else(|error| panic!("{error}"));
        let job = (script, Shape::tiny(SimMedium::Dax), Effort::ordinary(1));
        assert_eq!(shrink(&job), None);
    }
}
