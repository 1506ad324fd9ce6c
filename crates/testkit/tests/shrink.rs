//! What the crash exploration finds is made small: shown on faults that are planted, in long random
//! workloads.

#![cfg(debug_assertions)]

use varve_format::seeded::{Bug, arm};
use varve_media::sim::SimMedium;
use varve_testkit::crash::{Act, Effort, Flavour, Job, Script, Shrunk, shared, shrink};
use varve_testkit::ops::Op;
use varve_testkit::rig::{Policy, Shape};

/// The bug in a workload that it does not need most of.
fn small(bug: Bug, job: &Job) -> Shrunk {
    arm(Some(bug));
    let small = shrink(job);
    arm(None);
    small.unwrap_or_else(|| panic!("{bug:?} is not found"))
}

/// It fails again as its command says it, and does not without the bug.
fn is_repeated_by_its_command(bug: Bug, small: &Shrunk) {
    let command = small.command();
    let text = command
        .split('\'')
        .nth(1)
        .unwrap_or_else(|| panic!("no workload in {command}"));
    let job = Script::job_from(text).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(job, small.job);
    arm(Some(bug));
    let fails = shrink(&job);
    arm(None);
    assert_eq!(fails.map(|again| again.job), Some(job.clone()), "not the least");
    assert_eq!(shrink(&job), None, "wrong without the bug");
}

fn acts(small: &Shrunk) -> Vec<&Act> {
    let Script { before, acts } = &small.job.0;
    before.iter().chain(acts).collect()
}

#[test]
fn missing_sync_is_shrunk_to_an_operation_and_its_fsync() {
    let script = shared(11, 2, 24, Flavour::Calm);
    let long = script.before.len() + script.acts.len();
    let job = (script, Shape::tiny(SimMedium::File), Effort::ordinary(1));
    let small = small(Bug::NoSyncAtFsync, &job);
    println!("{long} acts to {}: {}", acts(&small).len(), small.command());
    let left = acts(&small);
    // What is synced, and at most what it needs before.
    assert!(long > 24 && left.len() <= 3, "{left:?}");
    assert!(
        matches!(
            left.last(),
            Some(Act::Op(Op::Fsync(_)) | Act::By(_, Op::Fsync(_)))
        ),
        "{left:?}"
    );
    is_repeated_by_its_command(Bug::NoSyncAtFsync, &small);
}

#[test]
fn fault_that_recovery_has_when_it_crashes_is_shrunk_too() {
    let script = shared(3, 2, 12, Flavour::All);
    let shape = Shape::tiny(SimMedium::File).with(Policy::Rotate);
    let job = (script, shape, Effort::ordinary(1).with_recovery(3));
    let small = small(Bug::NoSyncAfterReplay, &job);
    println!("{}", small.command());
    assert!(small.why.contains("recovery crashed"), "{}", small.why);
    assert!(acts(&small).len() < 6, "{:?}", acts(&small));
}
