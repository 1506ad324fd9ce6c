//! What is printed of a history: how long the operations took by way and kind, what each process did, and
//! faults with their proof.

use crate::check::Fault;
use crate::record::{KINDS, Kind, Record};
use crate::ways::{ALL, Way};
use crate::worker::LOCKS;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// The least part of the mean of all processes that one must have done.
const LEAST_PART: f64 = 0.01;

fn micros(nanos: u64) -> String {
    format!("{:.1}", nanos as f64 / 1000.0)
}

/// The value that `part` of the sorted ones do not pass.
fn percentile(sorted: &[u64], part: f64) -> u64 {
    let at = (sorted.len() as f64 * part).ceil() as usize;
    sorted[at.clamp(1, sorted.len()) - 1]
}

/// Times in microseconds by way and kind, and what each process did.
pub fn table(records: &[Record], ways: &[Way], seed: u64) -> String {
    let mut times: BTreeMap<(Way, Kind), Vec<u64>> = BTreeMap::new();
    for record in records {
        let way = ways[usize::from(record.process)];
        let took = record.end - record.start;
        times.entry((way, record.kind)).or_default().push(took);
    }
    let mut out = format!(
        "VARVE_SEED={seed}: {} processes, {} operations\n| way | operation | number | median µs | 99 % | \
        99.9 % | longest |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |\n",
        ways.len(),
        records.len()
    );
    for way in ALL {
        let mut everything = Vec::new();
        for kind in KINDS {
            if let Some(sorted) = times.get_mut(&(way, kind)) {
                line(&mut out, way, &format!("{kind:?}"), sorted);
                everything.append(sorted);
            }
        }
        if !everything.is_empty() {
            line(&mut out, way, "all", &mut everything);
        }
    }
    let torn = records
        .iter()
        .filter(|record| record.kind == Kind::RegRead && record.a != record.b)
        .count();
    let _ = writeln!(
        out,
        "reads of a block amid a write of it that found parts of both: {torn}"
    );
    for (n, way) in ways.iter().enumerate() {
        let own = records.iter().filter(|record| usize::from(record.process) == n);
        let slowest = own
            .clone()
            .max_by_key(|record| record.end - record.start)
            .expect("it did something");
        let _ = writeln!(
            out,
            "process {n} ({}): {} operations, the slowest {:?} with {} µs",
            way.name(),
            own.count(),
            slowest.kind,
            micros(slowest.end - slowest.start)
        );
    }
    for (object, lock) in LOCKS.iter().enumerate() {
        let held: Vec<usize> = (0..ways.len())
            .map(|n| {
                records
                    .iter()
                    .filter(|each| {
                        each.kind == Kind::Hold
                            && usize::from(each.object) == object
                            && usize::from(each.process) == n
                    })
                    .count()
            })
            .collect();
        let _ = writeln!(out, "{lock}: held by each process {held:?} times");
    }
    out
}

fn line(out: &mut String, way: Way, what: &str, times: &mut [u64]) {
    times.sort_unstable();
    let [median, p99, p999, most] = [0.5, 0.99, 0.999, 1.0].map(|part| micros(percentile(times, part)));
    let _ = writeln!(
        out,
        "| {} | {what} | {} | {median} | {p99} | {p999} | {most} |",
        way.name(),
        times.len()
    );
}

/// A fault and its proof, a record a line.
pub fn fault(fault: &Fault, ways: &[Way]) -> String {
    let mut out = format!("* {}\n", fault.what);
    for record in &fault.proof {
        let way = ways
            .get(usize::from(record.process))
            .map_or("before", |way| way.name());
        let _ = writeln!(
            out,
            "    process {} ({way}): {:?} {} from {} to {} ns, errno {}, {:#x} {:#x}",
            record.process,
            record.kind,
            record.object,
            record.start,
            record.end,
            record.errno,
            record.a,
            record.b
        );
    }
    out
}

/// Every process did some of every kind that its way has (but locks, if it is `lockless`), none did far less
/// than the others, no operation took forever.
pub fn nobody_starved(records: &[Record], ways: &[Way], lockless: &[usize], slowest: Duration, seed: u64) {
    let mut done = vec![0_u64; ways.len()];
    let mut kinds = vec![0_u32; ways.len()];
    for record in records {
        let took = Duration::from_nanos(record.end - record.start);
        assert!(took < slowest, "VARVE_SEED={seed}: {record:?} took {took:?}");
        done[usize::from(record.process)] += 1;
        kinds[usize::from(record.process)] |= 1 << record.kind as u32;
    }
    let least = done.iter().sum::<u64>() as f64 / ways.len() as f64 * LEAST_PART;
    for (n, way) in ways.iter().enumerate() {
        assert!(
            done[n] as f64 >= least,
            "VARVE_SEED={seed}: process {n} did {} operations of {done:?}",
            done[n]
        );
        // Those that depend on what others leave to it are not in every short run.
        for kind in KINDS {
            let chance = matches!(kind, Kind::Hold | Kind::Hand | Kind::Again);
            let locks = matches!(kind, Kind::Flock | Kind::Posix | Kind::Ofd);
            let maps = matches!(kind, Kind::MapAdd | Kind::MapSync);
            let rare = matches!(
                kind,
                Kind::Create
                    | Kind::Unlink
                    | Kind::Mkdir
                    | Kind::Rmdir
                    | Kind::MapAdd
                    | Kind::MapSync
                    | Kind::MapRead
                    | Kind::Plant
            );
            let cannot = (maps && way.is_linked()) || (locks && lockless.contains(&n));
            let spared = chance || cannot || (rare && done[n] <= 2000);
            assert!(
                spared || kinds[n] & 1 << kind as u32 != 0,
                "VARVE_SEED={seed}: process {n} ({}) did no {kind:?}",
                way.name()
            );
        }
    }
}
