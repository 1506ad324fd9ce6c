//! Keys that are chosen to fall into a few sets. An attacker who knows the source and not the store's secret
//! neither chooses what is evicted nor makes lookups cost more. With the secret both would be easy, which the
//! same keys show on a store whose secret they were made for.
#![allow(clippy::unwrap_used)]

mod common;

use common::{SECRET, key, options};
use std::sync::Arc;
use varve_cache::device::{Device, MemoryDevice};
use varve_cache::{Cache, KeyHash, Policy, PutOptions, Secret, StorePlan};

const LEN: u64 = 128 << 20;
/// One set of so many is aimed at.
const SHARE: u64 = 128;
const VICTIMS: u64 = 8_000;
const AIMED: usize = 100_000;
/// Further aimed keys, which are only asked for.
const ASKED: usize = 10_000;

fn made(secret: Option<[u8; 16]>) -> Cache {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(LEN));
    let plan = StorePlan::new(Policy::Log).with_room(LEN);
    match secret {
        Some(secret) => Cache::format_with(&[&*device], &plan, true, secret).unwrap(),
        None => Cache::format(&[&*device], &plan, true).unwrap(),
    };
    Cache::open(vec![device], &options(), false).unwrap().0
}

fn sets(cache: &Cache) -> u64 {
    cache.shards().next().unwrap().layout().sets
}

/// What became of a store after an attack.
#[derive(Debug)]
struct After {
    /// Victims in the sets that are aimed at, and lost ones.
    aimed_at: (u64, u64),
    /// Other victims, and lost ones.
    elsewhere: (u64, u64),
    /// Lookups of absent keys that had to read the device.
    reads: u64,
}

fn attack<'k>(cache: &Cache, secret: &Secret, keys: impl Iterator<Item = &'k Vec<u8>>) -> After {
    for n in 0..VICTIMS {
        cache.put(&key(n), b"victim", PutOptions::default()).unwrap();
    }
    let mut keys = keys;
    for key in keys.by_ref().take(AIMED) {
        cache.put(key, b"attack", PutOptions::default()).unwrap();
    }
    let (mut aimed_at, mut elsewhere) = ((0, 0), (0, 0));
    let sets = sets(cache);
    for n in 0..VICTIMS {
        let is_aimed_at = KeyHash::of(secret, &key(n)).set(sets) < sets / SHARE;
        let (all, lost) = if is_aimed_at {
            &mut aimed_at
        } else {
            &mut elsewhere
        };
        *all += 1;
        *lost += u64::from(cache.get_body(&key(n)).is_none());
    }
    let before = cache.stats().false_matches;
    for key in keys.take(ASKED) {
        assert!(cache.get(key).is_none());
    }
    After {
        aimed_at,
        elsewhere,
        reads: cache.stats().false_matches - before,
    }
}

/// Whether two counts out of `all` come from the same chance, within five standard deviations.
fn alike(one: u64, other: u64, all: u64) -> bool {
    let share = (one + other) as f64 / (2 * all) as f64;
    let deviation = (2.0 * all as f64 * share * (1.0 - share)).sqrt();
    one.abs_diff(other) as f64 <= 5.0 * deviation + 3.0
}

#[test]
fn keys_aimed_without_the_secret_evict_and_cost_as_random_ones_do() {
    let guess = Secret(SECRET);
    let known = made(Some(SECRET));
    let sets = sets(&known);
    let stranger = |n: u64| format!("http://attack.example/{n}").into_bytes();
    let aimed: Vec<Vec<u8>> = (0..)
        .map(stranger)
        .filter(|key| KeyHash::of(&guess, key).set(sets) < sets / SHARE)
        .take(AIMED + ASKED)
        .collect();
    let random: Vec<Vec<u8>> = (1 << 40..).map(stranger).take(AIMED + ASKED).collect();

    let with_secret = attack(&known, &guess, aimed.iter());
    drop(known);
    let unknown = made(None);
    assert_eq!(self::sets(&unknown), sets);
    let without = attack(&unknown, &guess, aimed.iter());
    drop(unknown);
    let by_chance = attack(&made(None), &guess, random.iter());
    println!(
        "{AIMED} keys aimed at {} of {sets} sets; victims there and elsewhere, of each the lost ones",
        sets / SHARE
    );
    for (what, after) in [
        ("with the secret", &with_secret),
        ("without it", &without),
        ("random keys", &by_chance),
    ] {
        let After {
            aimed_at,
            elsewhere,
            reads,
        } = after;
        println!(
            "  {what:<16} {aimed_at:?} {elsewhere:?}; {reads} of {ASKED} lookups of absent keys read the device"
        );
    }

    let (all, lost) = with_secret.aimed_at;
    assert!(all > 20 && lost == all, "who knows the secret evicts these alone");
    assert!(with_secret.elsewhere.1 * 20 < with_secret.elsewhere.0);
    let lost = |after: &After| after.aimed_at.1 + after.elsewhere.1;
    assert!(alike(lost(&without), lost(&by_chance), VICTIMS));
    let scaled = |(all, lost): (u64, u64), to: u64| lost * to / all;
    let all = without.aimed_at.0;
    assert!(
        alike(without.aimed_at.1, scaled(without.elsewhere, all), all),
        "those that are aimed at fare as the others"
    );
    assert!(alike(without.reads, by_chance.reads, ASKED as u64));
}
