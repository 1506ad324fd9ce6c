//! `cargo bench --bench programs`: programs as people run them, on Varve and on the file systems beside it,
//! in one run on the same memory.
//!
//! ```console
//! cargo bench --bench programs                        # everything, about 12 minutes
//! cargo bench --bench programs -- --quick             # the same with few operations, about 3 minutes
//! cargo bench --bench programs -- --publish           # and docs/results/programs-speed.md with its plots
//! cargo bench --bench programs -- --rows sqlite,redis --sides run,tmpfs --json out.json
//! cargo bench --bench programs -- --from-json memory.json,disk.json   # the document, of a run in parts
//! ```
//!
//! *run* is the program under `varve run` on a pool whose NVM is memory, *mount* the same program on that
//! pool's plain mount, *tmpfs* persists nothing, *ext4+fsync* and *xfs+fsync* lie on loop devices in the same
//! memory. A second table has the rows that sync with everything on the disk: a pool whose NVM is a file of
//! the disk's file system, and the file systems on that disk.
//!
//! The programs are Redis, LevelDB and SQLite of the machine's distribution (installed by `apt-get` where
//! they are missing; the libraries are loaded at run time), and this binary itself, started again as the
//! driver of the other workloads: it uses the standard library's calls only, and is served, or not, as any
//! program. Each workload is run shortly with the calls counted before it is measured, and what it left is
//! looked at through the plain mount afterwards: a program that was not served, or whose data is wrong, is a
//! failure.

mod clib;
#[path = "../common/mod.rs"]
mod common;
mod filebench;
mod idle;
mod isolation;
mod leveldb;
mod places;
mod plot;
mod redis;
mod report;
mod rpc;
mod running;
mod sharing;
mod sides;
mod sqlite;
mod workload;

use places::Places;
use report::Report;
use sides::Side;
use std::path::PathBuf;
use workload::{Plan, WORKLOADS, Workload};

/// What was asked for.
#[derive(Debug, Clone)]
pub struct Options {
    /// Few operations and one round.
    pub quick: bool,
    /// Workloads to run; all if empty.
    pub rows: Vec<String>,
    /// Sides to run; all if empty.
    pub sides: Vec<String>,
    /// Which tables: `memory`, `disk`; both if empty.
    pub tables: Vec<String>,
    /// Rounds of each workload.
    pub rounds: Option<usize>,
    /// Where the result is written as JSON.
    pub json: Option<PathBuf>,
    /// Whether the documents are written.
    pub publish: bool,
    /// What is to be said of the machine's state.
    pub state: Option<String>,
    /// The program under test.
    pub varve: PathBuf,
    /// Only the document is made anew, from the JSON of runs.
    pub from_json: Vec<String>,
}

fn wanted(names: &[String], name: &str) -> bool {
    names.is_empty() || names.iter().any(|wanted| wanted == name)
}

const HELP: &str = "Options: --quick, --rows NAMES, --sides NAMES, --tables memory,disk, --rounds N, --json \
    PATH, --publish, \
                    --from-json PATHS, --state TEXT, --varve PATH";

fn parse() -> Result<Option<Options>, String> {
    let mut options = Options {
        quick: false,
        rows: Vec::new(),
        sides: Vec::new(),
        tables: Vec::new(),
        rounds: None,
        json: None,
        publish: false,
        state: None,
        varve: env!("CARGO_BIN_EXE_varve").into(),
        from_json: Vec::new(),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        let split = |list: String| list.split(',').map(str::to_owned).collect();
        match word.as_str() {
            // `cargo test --benches` and `cargo bench -- --list`: nothing is measured.
            "--test" | "--list" => return Ok(None),
            "--bench" => {}
            "--quick" => options.quick = true,
            "--publish" => options.publish = true,
            "--rows" => options.rows = split(value()?),
            "--sides" => options.sides = split(value()?),
            "--tables" => options.tables = split(value()?),
            "--json" => options.json = Some(value()?.into()),
            "--from-json" => options.from_json = split(value()?),
            "--state" => options.state = Some(value()?),
            "--varve" => options.varve = value()?.into(),
            "--rounds" => {
                let number = value()?.parse().ok().filter(|number| *number > 0);
                options.rounds = Some(number.ok_or("--rounds needs a number above 0")?);
            }
            other => return Err(format!("{other}: not known. {HELP}")),
        }
    }
    let known = |list: &[String], names: &[&str]| {
        let odd = list.iter().find(|name| !names.contains(&name.as_str()));
        odd.map_or(Ok(()), |name| {
            Err(format!("{name}: not one of {}", names.join(", ")))
        })
    };
    known(&options.rows, &WORKLOADS.map(|workload| workload.name))?;
    known(&options.sides, &sides::NAMES)?;
    known(&options.tables, &["memory", "disk"])?;
    Ok(Some(options))
}

/// One workload on all sides of a table: a short run with the calls counted, then the rounds.
fn measure(options: &Options, workload: &Workload, sides: &[Side], plan: &Plan, report: &mut Report) {
    if let Err(why) = (workload.prepare)() {
        report.skipped(&format!("{}: {why:#}", workload.name));
        return;
    }
    let rows = (workload.rows)(plan);
    let mut values = vec![vec![Vec::new(); sides.len()]; rows.len()];
    let mut broken = vec![false; sides.len()];
    for round in 0..=options.rounds.unwrap_or(plan.rounds) {
        for (at, side) in sides.iter().enumerate() {
            if broken[at] || (round == 0 && !side.counts_calls()) {
                continue;
            }
            idle::settle();
            let result = if round == 0 {
                side.counted(|side| workload.run(side, &Plan::tiny(plan)))
            } else {
                workload.run(side, plan)
            };
            match result {
                Ok(measured) if round > 0 => {
                    for (row, value) in values.iter_mut().zip(measured) {
                        row[at].push(value);
                    }
                }
                Ok(_) => report.served(workload.name, side.share()),
                Err(error) => {
                    broken[at] = true;
                    report.failed(&format!("{} on {}: {error:#}", workload.name, side.name));
                }
            }
            if running::interrupted() {
                return;
            }
        }
    }
    let names: Vec<_> = sides.iter().map(|side| side.name).collect();
    for (row, values) in rows.into_iter().zip(values) {
        report.row(row, &names, values);
    }
}

/// The rows of one table.
fn table(options: &Options, places: &mut Places, on_disk: bool, report: &mut Report) -> anyhow::Result<()> {
    report.table(on_disk);
    let (sides, _alive) = places.sides(options, on_disk, report)?;
    let plan = if options.quick {
        Plan::quick(on_disk)
    } else {
        Plan::full(on_disk)
    };
    for workload in &WORKLOADS {
        if wanted(&options.rows, workload.name) && (workload.syncs || !on_disk) && !running::interrupted() {
            measure(options, workload, &sides, &plan, report);
        }
    }
    _alive.end(report);
    Ok(())
}

fn run(options: &Options) -> anyhow::Result<()> {
    places::separate()?;
    running::end_in_order()?;
    let mut report = Report::begin(options);
    let mut places = Places::prepare(options, &mut report)?;
    for (name, on_disk) in [("memory", false), ("disk", true)] {
        if wanted(&options.tables, name)
            && !running::interrupted()
            && let Err(error) = table(options, &mut places, on_disk, &mut report)
        {
            report.failed(&format!("the table of {name}: {error:#}"));
        }
    }
    drop(places);
    anyhow::ensure!(!running::interrupted(), "interrupted");
    report.end(options)
}

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().collect();
    if let [_, drive, name, rest @ ..] = &words[..]
        && drive == workload::DRIVE
    {
        return workload::drive(name, rest);
    }
    let options = match parse() {
        Ok(Some(options)) => options,
        Ok(None) => return Ok(()),
        Err(what) => {
            eprintln!("{what}");
            std::process::exit(2);
        }
    };
    if options.from_json.is_empty() {
        return run(&options);
    }
    let values: anyhow::Result<Vec<serde_json::Value>> = options
        .from_json
        .iter()
        .map(|path| Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?))
        .collect();
    report::publish(&report::together(values?)?)
}
