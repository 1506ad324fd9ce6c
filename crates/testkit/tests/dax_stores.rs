//! Runs of the whole system on persistent memory whose stores go through the copy and flush functions of
//! `dax`, each recorded as the processor makes it: streamed past the cache, left in the cache, written back,
//! fenced. Its crash images are those that the simulated medium allows, and each left-out step is found.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use varve_media::sim::{Crash, CrashPoint, Flaw, PointKind, SimMedium};
use varve_testkit::crash::{Effort, Flavour, Job, Recorded, Script, Strain, explore_all, shared};
use varve_testkit::rig::{Policy, Shape};

const BY_STORE: SimMedium = SimMedium::DaxByStore(Flaw::None);

/// A workload, and the pool for it on a medium.
type Work = (Script, fn(SimMedium) -> Shape);

fn works() -> Vec<Work> {
    let tiny = |medium| Shape::tiny(medium);
    let moving = |medium| Shape::tiny(medium).with(Policy::Rotate);
    vec![
        (Strain::OneFile.script(3), tiny),
        (Strain::Overwrites.script(1), |medium| {
            Strain::Overwrites.shape(medium)
        }),
        (Strain::Ring.script(2), |medium| Strain::Ring.shape(medium)),
        (shared(7, 2, 24, Flavour::Calm), tiny),
        (shared(11, 2, 24, Flavour::Moving), moving),
    ]
}

/// The points where the simulated medium makes stores durable, and the end. A sync of persistent memory is a
/// fence, which a recording by stores has as an event of its own before it.
fn points(recorded: &Recorded, is_by_store: bool) -> Vec<CrashPoint> {
    let mut points = recorded.recording().durability_points();
    let is_disk = |device: &Option<String>| {
        device
            .as_ref()
            .is_some_and(|name| name.contains("ssd") || name.contains("hdd"))
    };
    points.retain(|point| match point.next {
        PointKind::Sync => !is_by_store || is_disk(&point.device),
        _ => true,
    });
    points
}

#[test]
fn images_by_store_are_those_that_the_model_allows() {
    let (mut compared, mut distinct) = (0, BTreeSet::new());
    for (script, shape) in works() {
        let model = script.record(shape(SimMedium::Dax)).unwrap();
        let stores = script.record(shape(BY_STORE)).unwrap();
        let (points, others) = (points(&model, false), points(&stores, true));
        assert_eq!(points.len(), others.len(), "{script}");
        for (point, other) in points.iter().zip(&others) {
            for crash in [Crash::PowerNone, Crash::PowerAll, Crash::Kill] {
                let by_model = model.recording().image(point.index, crash).content_hash();
                let by_store = stores.recording().image(other.index, crash).content_hash();
                assert_eq!(
                    by_model, by_store,
                    "{script}: {crash:?} at {point:?} and {other:?}"
                );
                distinct.insert(by_model);
                compared += 1;
            }
        }
    }
    println!("{compared} pairs of images compared, {} distinct", distinct.len());
    assert!(compared > 1_000 && distinct.len() > 300, "{compared}");
}

#[test]
fn images_by_store_are_whole() {
    let efforts = [
        Effort::ordinary(1),
        Effort {
            stride: 40,
            torn: 0,
            ..Effort::thorough(2)
        },
    ];
    let jobs: Vec<Job> = works()
        .into_iter()
        .flat_map(|(script, shape)| efforts.map(|effort| (script.clone(), shape(BY_STORE), effort)))
        .collect();
    let tally = explore_all(&jobs).unwrap_or_else(|why| panic!("{why}"));
    println!("{} images by store", tally.images);
    assert!(tally.images > 1_000, "{tally:?}");
}

#[test]
fn step_that_is_left_out_is_found_by_a_crash_and_by_the_comparison() {
    for flaw in [Flaw::NoWriteBack, Flaw::NoFence] {
        let medium = SimMedium::DaxByStore(flaw);
        let mut found = None;
        let mut differ = 0;
        for (script, shape) in works() {
            let wrong = script.record(shape(medium)).unwrap();
            let right = script.record(shape(BY_STORE)).unwrap();
            let (last, end) = (wrong.recording().events_len(), right.recording().events_len());
            let lost = wrong.recording().image(last, Crash::PowerNone).content_hash();
            differ += usize::from(lost != right.recording().image(end, Crash::PowerNone).content_hash());
            if let Err((tally, why)) = wrong.explore(&Effort::ordinary(1)) {
                found.get_or_insert((tally.images, why));
            }
        }
        let Some((images, why)) = found else {
            panic!("{flaw:?} is not found");
        };
        println!(
            "{flaw:?}: found after {images} images: {}",
            why.lines().last().unwrap_or("")
        );
        assert!(differ > 0, "{flaw:?}: no image differs");
    }
}
