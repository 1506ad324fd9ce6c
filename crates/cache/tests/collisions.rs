//! Objects that are lost although there is room: two of a set with the same tag. Each loss has that cause,
//! there are as many as chance says, and the room that small stores get makes them rare.
#![allow(clippy::unwrap_used)]

mod common;

use common::{SECRET, body, key, options};
use std::collections::HashMap;
use std::sync::Arc;
use varve_cache::device::{Device, MemoryDevice};
use varve_cache::{Cache, KeyHash, Policy, PutOptions, Secret, StorePlan};

/// Puts `objects` small ones into an empty store. Returns how many are lost, and how many chance takes.
fn lost(plan: &StorePlan, len_bytes: u64, objects: u64) -> (u64, f64) {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(len_bytes));
    Cache::format_with(&[&*device], plan, true, SECRET).unwrap();
    let (cache, _) = Cache::open(vec![device], &options(), false).unwrap();
    let layout = *cache.shards().next().unwrap().layout();
    let place = |n: u64| {
        let hash = KeyHash::of(&Secret(SECRET), &key(n));
        (hash.set(layout.sets), hash.tag())
    };
    let mut last = HashMap::new();
    let mut in_set: HashMap<u64, u64> = HashMap::new();
    for n in 0..objects {
        cache
            .put(&key(n), &body(n, 1, 300), PutOptions::default())
            .unwrap();
        last.insert(place(n), n);
        *in_set.entry(place(n).0).or_default() += 1;
    }
    let full = in_set.values().any(|&count| count > layout.shape().ways() as u64);
    assert!(!full, "no set is full: nobody has to give way for room");
    let mut lost = 0;
    for n in 0..objects {
        let found = cache.get_body(&key(n));
        let is_last = last[&place(n)] == n;
        assert_eq!(
            found.is_some(),
            is_last,
            "{}: object {n} is there exactly if no later one has its set and tag",
            plan.shape.policy()
        );
        assert!(found.is_none_or(|found| found == body(n, 1, 300)));
        lost += u64::from(!is_last);
    }
    (lost, (objects * objects) as f64 / (510 * layout.sets) as f64)
}

#[test]
fn objects_are_lost_early_only_to_others_of_their_set_and_tag() {
    const LEN: u64 = 256 << 20;
    const OBJECTS: u64 = 4000;
    println!("{OBJECTS} objects in a store of 256 MiB: lost, and what chance takes");
    for policy in [Policy::SetMem, Policy::Log, Policy::LogLru] {
        let plan = StorePlan::new(policy);
        let mut plain = plan.clone();
        // Sets of 32 KiB objects: no set of 16 is full.
        plain.shape = varve_cache::Shape::with(policy, 16, None).unwrap();
        let (found, expected) = lost(&plain, LEN, OBJECTS);
        println!("  {policy:<10} as the thesis has it {found:>4} {expected:>6.1}");
        let within =
            |found: u64, expected: f64| (found as f64 - expected).abs() < 5.0 * expected.sqrt() + 2.0;
        assert!(within(found, expected), "{policy}: {found}, not {expected}");
        if policy.has_table() {
            continue;
        }
        let (roomy, expected) = lost(&plain.with_room(LEN), LEN, OBJECTS);
        println!("  {policy:<10} with room           {roomy:>4} {expected:>6.1}");
        assert!(within(roomy, expected) && roomy * 4 < found);
    }
}

#[test]
fn room_is_for_small_stores_only() {
    let of = |policy, len| StorePlan::new(policy).with_room(len).object_bytes;
    assert_eq!(of(Policy::LogLru, 256 << 20), 1024);
    assert_eq!(of(Policy::LogLru, 4 << 30), 4096);
    assert_eq!(of(Policy::LogLru, 8 << 30), 8192);
    assert_eq!(of(Policy::LogLru, 1 << 40), 8192);
    assert_eq!(of(Policy::SetMem, 256 << 20), 8192);
}
