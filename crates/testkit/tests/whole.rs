//! The whole system under a seed: see `varve_testkit::whole`.
//!
//! A failure prints its seed and the shrunk steps. `VARVE_SEED=n` runs that seed only, `VARVE_WHOLE_RUNS=n` n
//! seeds for each test, from `VARVE_SEED` on if that is given too; `VARVE_TRACE=n` prints the last n things
//! that happened before a failure.

use varve_media::sim::SimMedium;
use varve_testkit::rig::{Policy, Shape};
use varve_testkit::whole::{Plan, Stats, run, run_seed, steps};
use varve_testkit::wire::Weather;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text}")),
    )
}

fn plan(seed: u64, clients: usize, weather: Weather) -> Plan {
    let medium = [SimMedium::Dax, SimMedium::File, SimMedium::Shm][(seed % 3) as usize];
    let policy = [Policy::Scatter, Policy::Rotate][(seed / 3 % 2) as usize];
    Plan {
        shape: Shape::small(medium).with(policy),
        clients,
        seed,
        weather,
    }
}

fn runs(clients: usize, seeds: u64, count: usize, weather: Weather) -> Stats {
    let seeds = match number("VARVE_SEED") {
        Some(seed) => seed..seed + number("VARVE_WHOLE_RUNS").unwrap_or(1),
        None => 1..number("VARVE_WHOLE_RUNS").unwrap_or(seeds) + 1,
    };
    let mut stats = Stats::default();
    for seed in seeds {
        match run_seed(&plan(seed, clients, weather), count) {
            Ok(one) => stats.add(&one),
            Err(why) => panic!("{why}"),
        }
    }
    eprintln!("{clients} clients: {stats:?}");
    stats
}

#[test]
fn two_clients_do_what_the_model_may_do_while_messages_take_their_time() {
    let stats = runs(2, 12, 200, Weather::SLOW);
    assert!(stats.calls > 100 && stats.together > 10, "{stats:?}");
}

#[test]
fn three_clients_do_what_the_model_may_do_while_connections_break() {
    let stats = runs(3, 12, 200, Weather::ROUGH);
    assert!(
        stats.calls > 100 && stats.lost > 0 && stats.resumed > 0,
        "{stats:?}"
    );
}

#[test]
fn two_clients_do_what_the_model_may_do_though_few_connections_last() {
    let stats = runs(2, 8, 120, Weather::STORM);
    assert!(stats.lost > 50 && stats.forwarded > 10, "{stats:?}");
}

#[test]
fn same_seed_does_the_same_twice() {
    for seed in [1, 2, 3] {
        let plan = plan(seed, 3, Weather::ROUGH);
        let steps = steps(seed, 3, 120);
        let once = run(&plan, &steps).unwrap_or_else(|(at, why)| panic!("step {at}: {why}"));
        let twice = run(&plan, &steps).unwrap_or_else(|(at, why)| panic!("step {at}: {why}"));
        assert_eq!(once, twice, "seed {seed}");
    }
}
