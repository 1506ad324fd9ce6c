//! `cargo bench --bench speed`: LibFS beside the medium's own limit, tmpfs, and ext4 and xfs with fsync, in
//! one run on the same memory.
//!
//! ```console
//! cargo bench --bench speed                         # everything, about 20 minutes
//! cargo bench --bench speed -- --quick              # the table of small calls, less than 3 minutes
//! cargo bench --bench speed -- --only data --json out.json
//! cargo bench --bench speed -- --only data --rows sequential --sides LibFS   # for a profiler
//! ```
//!
//! Every row runs its sides in rounds, one side after the other, so that noise hits all of them; medians over
//! the rounds are shown. *LibFS* is a session of a separate daemon process with leases, checksums and digest;
//! a write row writes at least ten times the log in each round. *Embedded* is the same without a daemon's
//! process, *no digest* has a log that holds the whole round, *new blocks* is *LibFS* with a digest that
//! overwrites nothing in place. The *limit* is a non-temporal copy of the data and of one line, then one
//! fence; for reads a copy out of the mapping.

#[path = "../common/mod.rs"]
mod common;
mod data_rows;
mod disk_rows;
mod fuse_rows;
mod growth_rows;
mod load_rows;
mod name_rows;
mod places;
mod pools;
mod preload_rows;
mod report;
#[path = "../../crates/fuse-shim/tests/switch/mod.rs"]
mod switch;
mod timing;

use places::Places;
use report::Report;
use std::path::PathBuf;

/// What was asked for.
#[derive(Debug, Clone)]
pub struct Options {
    /// Only the table of small calls, with fewer rounds.
    pub quick: bool,
    /// Groups of rows to run; all if empty.
    pub only: Vec<String>,
    /// Rows of the group `data` to run, by the beginning of their names; all if empty.
    pub rows: Vec<String>,
    /// Where the result is written as JSON.
    pub json: Option<PathBuf>,
}

impl Options {
    /// `quick` in the quick mode, else `full`.
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Whether this row is to run.
    pub fn wants(&self, row: &str) -> bool {
        self.rows.is_empty() || self.rows.iter().any(|wanted| row.starts_with(wanted))
    }
}

/// Groups of rows and what runs them.
type Group = (
    &'static str,
    fn(&Options, &Places, &mut Report) -> anyhow::Result<()>,
);
const GROUPS: [Group; 7] = [
    ("data", data_rows::run),
    ("names", name_rows::run),
    ("fuse", fuse_rows::run),
    ("preload", preload_rows::run),
    ("disk", disk_rows::run),
    ("load", load_rows::run),
    ("growth", growth_rows::run),
];

/// The names after an option.
fn list(option: &str, word: Option<String>) -> Result<Vec<String>, String> {
    let word = word.ok_or_else(|| format!("{option} needs names, with commas between"))?;
    Ok(word.split(',').map(str::to_owned).collect())
}

fn parse() -> Result<Option<Options>, String> {
    let mut options = Options {
        quick: false,
        only: Vec::new(),
        rows: Vec::new(),
        json: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            // `cargo test --benches` and `cargo bench -- --list`: nothing is measured.
            "--test" | "--list" => return Ok(None),
            "--bench" => {}
            "--quick" => options.quick = true,
            "--json" => options.json = Some(words.next().ok_or("--json needs a path")?.into()),
            "--only" => options.only = list("--only", words.next())?,
            "--rows" => options.rows = list("--rows", words.next())?,
            "--sides" => timing::only_sides(list("--sides", words.next())?),
            other => {
                let names: Vec<_> = GROUPS.iter().map(|(name, _)| *name).collect();
                return Err(format!(
                    "{other}: not known. Options: --quick, --only {}, --rows NAMES, --sides NAMES, --json \
                    PATH",
                    names.join(",")
                ));
            }
        }
    }
    for name in &options.only {
        if !GROUPS.iter().any(|(known, _)| known == name) {
            return Err(format!("there is no group {name}"));
        }
    }
    Ok(Some(options))
}

fn main() -> anyhow::Result<()> {
    if fuse_rows::serve_null_if_asked()? || preload_rows::drive_if_asked()? {
        return Ok(());
    }
    let options = match parse() {
        Ok(Some(options)) => options,
        Ok(None) => return Ok(()),
        Err(what) => {
            eprintln!("{what}");
            std::process::exit(2);
        }
    };
    timing::end_in_order()?;
    let places = Places::prepare(options.pick(2 << 30, 3 << 30))?;
    let mut report = Report::begin(&options, &places);
    for (name, run) in GROUPS {
        let wanted = options.only.is_empty() || options.only.iter().any(|wanted| wanted == name);
        if wanted && let Err(error) = run(&options, &places, &mut report) {
            report.failed(name, &error);
        }
    }
    report.end(&options)
}
