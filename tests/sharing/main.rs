//! Processes that share names and files by all ways in at once: the plain mount, `varve run`, and linked
//! programs. Every operation is recorded with its times outside of the pool; the history is then checked: no
//! stale read, no lost update, no two holders, nobody starves.
//!
//! `VARVE_SEED` chooses the operations, `VARVE_SHARING_SECS` how long.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod broken;
mod check;
mod record;
mod report;
mod run;
mod stale;
mod stopped;
mod sys;
mod ways;
mod worker;

use run::Run;
use ways::{WAYS, Way};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {text}"))
    })
}

/// Chooses the operations.
fn seed() -> u64 {
    number("VARVE_SEED", 1)
}

/// How long each test runs.
fn seconds() -> u64 {
    number("VARVE_SHARING_SECS", 12)
}

/// The process that the others start; does nothing in an ordinary run of the tests.
#[test]
fn worker() {
    worker::main();
}

#[test]
fn two_processes_of_each_pair_of_ways_see_each_other_at_once() {
    let seconds = seconds();
    for pair in [
        [Way::Mount, Way::Run],
        [Way::Run, Way::Linked],
        [Way::Linked, Way::Mount],
    ] {
        share(&pair, seconds.div_ceil(3));
    }
}

#[test]
fn eight_processes_of_all_ways_see_each_other_at_once() {
    let seconds = seconds();
    let ways: Vec<Way> = WAYS.into_iter().cycle().take(8).collect();
    share(&ways, seconds);
}

/// Lets processes of these ways share a fresh pool, and checks what they recorded.
fn share(ways: &[Way], seconds: u64) {
    if let Some(mut run) = Run::start(ways, seed()) {
        run.go(seconds);
        run.finish().judge();
    }
}
