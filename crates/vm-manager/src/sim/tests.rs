#![allow(clippy::unwrap_used)]

use super::baseline::{lru, offline_best, static_tiering};
use super::trace::{self, Kind};
use super::*;

const PAGES: u64 = 2_000;
const FAST: u64 = 600;
const TICK: usize = 1_000;
const ACCESSES: u64 = 240_000;

fn run(kind: Kind) -> (Score, Score, Score, Score) {
    let trace = kind.generate(PAGES, ACCESSES, 7);
    let mc = multi_clock(&trace, TICK, &[FAST, 4_000], MultiClockConfig::default());
    (
        mc,
        static_tiering(&trace, TICK, FAST),
        lru(&trace, TICK, FAST),
        offline_best(&trace, TICK, FAST),
    )
}

#[test]
fn multi_clock_beats_static_tiering_where_the_seed_says() {
    // PageRank (Fig. 6.6), Memcached (Fig. 6.8), two instances (Fig. 6.10); and a phase change.
    for kind in [
        Kind::PageRank,
        Kind::Memcached,
        Kind::TwoProcesses,
        Kind::PhaseChange,
        Kind::Zipfian,
    ] {
        let (mc, st, _, best) = run(kind);
        assert!(
            mc.hit_ratio() > st.hit_ratio() + 0.02,
            "{kind:?}: {} against {}",
            mc.hit_ratio(),
            st.hit_ratio()
        );
        assert!(
            mc.hit_ratio() <= best.hit_ratio(),
            "{kind:?}: nothing beats the offline best"
        );
    }
}

#[test]
fn offline_best_bounds_every_policy_on_every_trace() {
    for kind in Kind::ALL {
        let (mc, st, lru, best) = run(kind);
        for (name, score) in [("multi-clock", mc), ("static", st), ("lru", lru)] {
            assert!(score.fast_hits <= best.fast_hits, "{kind:?}: {name}");
        }
    }
}

#[test]
fn multi_clock_converges_after_a_phase_change_and_static_does_not() {
    let (mc, st, ..) = run(Kind::PhaseChange);
    let change = Kind::PhaseChange.change_at(PAGES, ACCESSES).unwrap() as usize / TICK;
    let dip = f64::from(mc.per_tick[change + 1]);
    assert!(dip < 0.5, "the change hurts first: {dip}");
    assert!(
        mc.convergence_ticks(change).unwrap() <= 20,
        "two simulated seconds"
    );
    assert!(mc.window(change + 30, change + 100) > 0.85);
    assert!(st.window(change + 30, change + 100) < 0.4);
}

#[test]
fn second_process_gets_fast_memory_when_the_first_goes_idle() {
    let (mc, st, ..) = run(Kind::TwoProcesses);
    let ticks = mc.per_tick.len();
    assert!(mc.window(ticks * 3 / 4, ticks) > 0.8);
    assert!(st.window(ticks * 3 / 4, ticks) < 0.1);
}

#[test]
fn migrations_stay_bounded_when_everything_is_scanned_in_order() {
    let (mc, _, lru, _) = run(Kind::Scan);
    assert!(
        mc.migrations < lru.migrations / 4,
        "{} against {}",
        mc.migrations,
        lru.migrations
    );
}

#[test]
fn trace_survives_a_round_trip_and_bad_lines_are_named() {
    let trace = Kind::Memcached.generate(50, 500, 3);
    let mut text = Vec::new();
    trace::write(&trace, &mut text).unwrap();
    assert_eq!(trace::read(&text[..]).unwrap(), trace);
    for bad in [
        "0 1",
        "x 1 r",
        "0 zz r",
        "0 1 q",
        "70000 1 r",
        "0 ffffffffffffffff r",
    ] {
        let text = format!("# head\n0 1 r\n{bad}\n");
        let error = trace::read(text.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("line 3:"), "{error}");
    }
}

#[test]
fn millions_of_pages_fit_in_24_bytes_each() {
    let trace = trace::load(0, 2_000_000);
    let score = multi_clock(&trace, 100_000, &[1 << 19, 1 << 22], MultiClockConfig::default());
    assert!(
        score.metadata_bytes_per_page <= 24.0,
        "{}",
        score.metadata_bytes_per_page
    );
}
