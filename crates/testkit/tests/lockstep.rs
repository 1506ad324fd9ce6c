//! Random operations on one, two and three sessions of a pool and on the reference model, step by step the
//! same; with digests, ticks, forced seals, remounts and daemon restarts in between.
//!
//! A failure prints its seed and the shrunk steps. `VARVE_SEED=n` runs that seed only,
//! `VARVE_LOCKSTEP_RUNS=n` runs n seeds for each test, from `VARVE_SEED` on if that is given too.

use varve_media::sim::SimMedium;
use varve_testkit::lockstep::{LockstepStats, run_seed};
use varve_testkit::rig::Shape;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text}")),
    )
}

/// Runs seeds on all media in turn.
fn runs(sessions: usize, seeds: u64, steps: usize) -> LockstepStats {
    let seeds = match number("VARVE_SEED") {
        Some(seed) => seed..seed + number("VARVE_LOCKSTEP_RUNS").unwrap_or(1),
        None => 1..number("VARVE_LOCKSTEP_RUNS").unwrap_or(seeds) + 1,
    };
    let mut stats = LockstepStats::default();
    for seed in seeds {
        let medium = [SimMedium::Dax, SimMedium::File, SimMedium::Shm][(seed % 3) as usize];
        match run_seed(Shape::small(medium), sessions, seed, steps) {
            Ok(one) => stats.add(&one),
            Err(why) => panic!("{why}"),
        }
    }
    eprintln!("{sessions} sessions: {stats:?}");
    assert!(
        stats.cooled > 50 || number("VARVE_SEED").is_some(),
        "no metadata went to slower tiers: {stats:?}"
    );
    stats
}

#[test]
fn one_session_does_what_the_model_does() {
    let stats = runs(1, 24, 250);
    assert!(
        stats.ops > 150 && stats.refused > 20 && stats.trees > 10,
        "{stats:?}"
    );
}

#[test]
fn two_sessions_see_each_other_at_once() {
    let stats = runs(2, 16, 250);
    assert!(
        stats.ops > 150 && stats.refused > 20 && stats.trees > 10,
        "{stats:?}"
    );
}

#[test]
fn three_sessions_see_each_other_at_once() {
    let stats = runs(3, 10, 250);
    assert!(
        stats.ops > 150 && stats.refused > 20 && stats.trees > 10,
        "{stats:?}"
    );
}
