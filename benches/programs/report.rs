//! Rows, targets, and how they are shown: on standard output as they come, as JSON, and as a document with
//! plots. Measures nothing.

use crate::Options;
use crate::common::{load, machine, output};
use crate::idle;
use crate::plot;
use crate::sides::Calls;
use anyhow::Context;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// What the numbers of a row count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Microseconds: less is better.
    Micros,
    /// Something a second: more is better.
    Rate,
}

impl Unit {
    const fn name(self) -> &'static str {
        match self {
            Self::Micros => "µs",
            Self::Rate => "/s",
        }
    }
}

/// Something that a row is to reach.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// This side at least so many times as fast as the other.
    Faster(&'static str, f64, &'static str),
    /// This side at least so much.
    Above(&'static str, f64),
    /// How many times as fast as the other this side is: to be seen, not judged.
    Beside(&'static str, &'static str),
}

/// A row before it is measured.
pub struct Row {
    workload: &'static str,
    name: String,
    unit: Unit,
    targets: Vec<Target>,
}

impl Row {
    /// A row.
    pub fn new(workload: &'static str, name: &str, unit: Unit, targets: Vec<Target>) -> Self {
        Self {
            workload,
            name: name.to_owned(),
            unit,
            targets,
        }
    }

    /// How many times side `a` is as fast as side `b`.
    fn ratio(&self, values: &Map<String, Value>, a: &str, b: &str) -> Option<f64> {
        let (a, b) = (median_of(values, a)?, median_of(values, b)?);
        Some(if self.unit == Unit::Rate { a / b } else { b / a })
    }

    fn judge(&self, values: &Map<String, Value>, target: Target) -> Value {
        let (text, met) = match target {
            Target::Faster(own, least, other) => {
                let got = self.ratio(values, own, other);
                let shown = got.map_or("?".into(), |got| format!("{got:.2}"));
                (
                    format!("{own} {shown} × {other} (≥ {least})"),
                    got.map(|got| got >= least),
                )
            }
            Target::Above(own, least) => {
                let got = median_of(values, own);
                (
                    format!("{own} ≥ {least} {}", self.unit.name()),
                    got.map(|got| got >= least),
                )
            }
            Target::Beside(own, other) => {
                let got = self.ratio(values, own, other);
                let shown = got.map_or("?".into(), |got| format!("{got:.2}"));
                return json!({ "target": format!("{own} {shown} × {other}"), "seen": true });
            }
        };
        json!({ "target": text, "met": met })
    }
}

fn median_of(values: &Map<String, Value>, side: &str) -> Option<f64> {
    values.get(side)?.get("median")?.as_f64()
}

/// A number with about three digits.
pub fn shown(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{:.2} M", value / 1e6),
        value if value >= 1e4 => format!("{:.1} k", value / 1e3),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

/// All that came so far.
pub struct Report {
    machine: Value,
    tables: Vec<Value>,
    remarks: Vec<String>,
    failures: Vec<String>,
    served: Vec<Value>,
    began: Instant,
}

fn version(program: &str) -> String {
    let said = Command::new(program).arg("--version").output();
    said.map_or_else(
        |_| "none".into(),
        |said| {
            String::from_utf8_lossy(&said.stdout)
                .lines()
                .next()
                .unwrap_or_default()
                .to_owned()
        },
    )
}

impl Report {
    /// Says on what it runs.
    pub fn begin(options: &Options) -> Self {
        let machine = machine(json!({
            "processors used by others before": idle::others(),
            "redis": version("redis-server"),
            "mode": if options.quick { "quick" } else { "full" },
            "state": options.state,
        }));
        println!("{machine:#}");
        Self {
            machine,
            tables: Vec::new(),
            remarks: Vec::new(),
            failures: Vec::new(),
            served: Vec::new(),
            began: Instant::now(),
        }
    }

    /// Begins a table.
    pub fn table(&mut self, on_disk: bool) {
        let name = if on_disk { "disk" } else { "memory" };
        println!("--- {name}");
        self.tables.push(json!({ "name": name, "rows": [] }));
    }

    /// Notes something that a reader must know.
    pub fn remark(&mut self, text: &str) {
        println!("note: {text}");
        self.remarks.push(text.to_owned());
    }

    /// Something is left out.
    pub fn skipped(&mut self, text: &str) {
        eprintln!("SKIPPED: {text}");
        self.remark(&format!("SKIPPED: {text}"));
    }

    /// Something went wrong.
    pub fn failed(&mut self, text: &str) {
        println!("FAILED: {text}");
        self.failures.push(text.to_owned());
    }

    /// The calls of a short run.
    pub fn served(&mut self, workload: &str, calls: Calls) {
        let share = calls.served as f64 / (calls.served + calls.fell_back).max(1) as f64;
        println!(
            "{workload}: {} calls served, {} fell back ({:.1} %)",
            calls.served,
            calls.fell_back,
            share * 100.0
        );
        if self.served.iter().all(|known| known["workload"] != workload) {
            let (served, fell_back) = (calls.served, calls.fell_back);
            self.served
                .push(json!({ "workload": workload, "served": served, "fell_back": fell_back }));
        }
    }

    /// Names the file system on the disk.
    pub fn disk(&mut self, dir: &Path) {
        let mut df = Command::new("df");
        df.args(["--output=source,fstype"]).arg(dir);
        let said = output(&mut df).unwrap_or_default();
        let what = said
            .lines()
            .last()
            .unwrap_or_default()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(", ");
        self.remark(&format!(
            "on the disk, ext4+fsync is the disk's own file system ({what}); xfs is on a \
            loop device with direct I/O over a file of it"
        ));
    }

    /// Adds a row with all rounds of each side, and shows it.
    pub fn row(&mut self, row: Row, sides: &[&'static str], rounds: Vec<Vec<f64>>) {
        let mut values = Map::new();
        for (side, mut rounds) in sides.iter().zip(rounds) {
            rounds.sort_by(f64::total_cmp);
            if let Some(median) = rounds.get(rounds.len() / 2) {
                values.insert((*side).to_owned(), json!({ "median": median, "rounds": rounds }));
            }
        }
        let targets: Vec<_> = row
            .targets
            .iter()
            .map(|target| row.judge(&values, *target))
            .collect();
        print!("{}: {} [{}]:", row.workload, row.name, row.unit.name());
        for (side, value) in &values {
            print!("  {side} {}", shown(value["median"].as_f64().unwrap_or(f64::NAN)));
        }
        println!();
        for target in &targets {
            println!("    {}", in_words(target));
        }
        let value = json!({
            "workload": row.workload, "row": row.name, "unit": row.unit.name(), "values": values,
            "targets": targets,
        });
        if let Some(rows) = self
            .tables
            .last_mut()
            .and_then(|table| table["rows"].as_array_mut())
        {
            rows.push(value);
        }
    }

    /// Shows the tables, writes what is to be written. Fails if something failed.
    pub fn end(mut self, options: &Options) -> anyhow::Result<()> {
        self.machine["load after"] = load().into();
        let value = json!({
            "machine": self.machine, "tables": self.tables, "remarks": self.remarks,
            "failures": self.failures,
            "served": self.served, "seconds": self.began.elapsed().as_secs(),
        });
        println!("{}", markdown(&value));
        if let Some(path) = &options.json {
            std::fs::write(path, format!("{value:#}\n"))?;
        }
        if options.publish {
            publish(&value)?;
        }
        anyhow::ensure!(self.failures.is_empty(), "failed: {}", self.failures.join("; "));
        Ok(())
    }
}

fn in_words(target: &Value) -> String {
    if target["seen"] == true {
        return target["target"].as_str().unwrap_or_default().to_owned();
    }
    let mark = match target["met"].as_bool() {
        Some(true) => "met",
        Some(false) => "**missed**",
        None => "not measured",
    };
    format!("{mark}: {}", target["target"].as_str().unwrap_or_default())
}

/// The sides that a table has, in the order of the columns.
pub fn sides_of(table: &Value) -> Vec<&'static str> {
    let has = |side: &&str| rows_of(table).iter().any(|row| !row["values"][side].is_null());
    crate::sides::NAMES.into_iter().filter(has).collect()
}

/// The rows of a table.
pub fn rows_of(table: &Value) -> &[Value] {
    table["rows"].as_array().map_or(&[], Vec::as_slice)
}

fn markdown(value: &Value) -> String {
    let mut text = String::new();
    let mut counts = [0, 0, 0];
    for table in value["tables"].as_array().into_iter().flatten() {
        let sides = sides_of(table);
        let title = if table["name"] == "disk" {
            "On the disk"
        } else {
            "In memory"
        };
        let _ = writeln!(text, "## {title}\n\n| row | {} | target |", sides.join(" | "));
        let _ = writeln!(text, "| --- |{} --- |", " ---: |".repeat(sides.len()));
        for row in rows_of(table) {
            let word = |key: &str| row[key].as_str().unwrap_or_default();
            let _ = write!(
                text,
                "| {}: {}, {} |",
                word("workload"),
                word("row"),
                word("unit")
            );
            for side in &sides {
                let median = row["values"][side]["median"].as_f64();
                let _ = write!(text, " {} |", median.map_or("–".into(), shown));
            }
            let targets = row["targets"].as_array().into_iter().flatten();
            let words: Vec<_> = targets
                .map(|target| {
                    if target["seen"] == true {
                        return in_words(target);
                    }
                    counts[target["met"].as_bool().map_or(2, |met| usize::from(!met))] += 1;
                    in_words(target)
                })
                .collect();
            let _ = writeln!(text, " {} |", words.join("; "));
        }
        text.push('\n');
    }
    let _ = writeln!(
        text,
        "{} targets met, {} missed, {} not measured; {} s.",
        counts[0], counts[1], counts[2], value["seconds"]
    );
    text
}

const INTRODUCTION: &str = "# Programs at speed

`cargo bench --bench programs` (`benches/programs/`) runs programs on Varve and on the file systems beside it, in one run, one side after the other in
rounds, each when the machine has done what the one before left to do; medians are shown. *run* is the program under `varve run` on a pool whose NVM is memory (in the second table: a file on the disk), *mount* the same
program on that pool's plain mount, *tmpfs* persists nothing, *ext4+fsync* and *xfs+fsync* lie on loop devices in the same memory. All sides run the
same program with the same calls; `fileserver` and `sharing` sync nothing on any side. Rates (/s) are better when higher, times (µs) when lower. After
each round the program's data is looked at by another process through the plain mount.

This page and its plots are written by `cargo bench --bench programs -- --publish`; what stands below *Notes* is kept.
";
const NOTES: &str = "## Notes";

fn results() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/results")
}

/// One result of runs with different rows; the machine is that of the first.
pub fn together(values: Vec<Value>) -> anyhow::Result<Value> {
    let mut values = values.into_iter();
    let mut all = values.next().context("no result")?;
    for mut more in values {
        for key in ["remarks", "failures", "served"] {
            let (Some(old), Some(new)) = (all[key].as_array_mut(), more[key].as_array_mut()) else {
                continue;
            };
            new.retain(|value| !old.contains(value));
            old.append(new);
        }
        for table in more["tables"].as_array().into_iter().flatten() {
            let tables = all["tables"].as_array_mut().context("no tables")?;
            match tables.iter_mut().find(|known| known["name"] == table["name"]) {
                Some(known) => {
                    let rows = known["rows"].as_array_mut().context("no rows")?;
                    rows.extend_from_slice(rows_of(table));
                }
                None => tables.push(table.clone()),
            }
        }
        let seconds = |value: &Value| value["seconds"].as_u64().unwrap_or_default();
        all["seconds"] = (seconds(&all) + seconds(&more)).into();
    }
    Ok(all)
}

/// Writes the document and its plots.
pub fn publish(value: &Value) -> anyhow::Result<()> {
    let page = results().join("programs-speed.md");
    let before = std::fs::read_to_string(&page).unwrap_or_default();
    let notes = before.find(NOTES).map_or("", |at| &before[at..]);
    let mut text = format!("{INTRODUCTION}\n");
    let machine = value["machine"].as_object().context("no machine")?;
    for (key, value) in machine.iter().filter(|(_, value)| !value.is_null()) {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let _ = writeln!(text, "- {key}: {value}");
    }
    let _ = writeln!(text, "\n{}", markdown(value));
    for (key, title) in [("failures", "FAILED"), ("remarks", "Remark")] {
        for word in value[key].as_array().into_iter().flatten() {
            let _ = writeln!(text, "- {title}: {}", word.as_str().unwrap_or_default());
        }
    }
    text.push_str(
        "\n## Calls served in-process\n\nCounted in a short run of each workload before it is \
        measured.\n\n| workload | served | fell back |\n| --- | ---: | ---: |\n",
    );
    for row in value["served"].as_array().into_iter().flatten() {
        let workload = row["workload"].as_str().unwrap_or_default();
        let _ = writeln!(text, "| {workload} | {} | {} |", row["served"], row["fell_back"]);
    }
    text.push_str(
        "\n## Plots\n\nBars are speeds relative to tmpfs, on the disk to ext4; the numbers at \
        their ends are the medians.\n\n",
    );
    for table in value["tables"].as_array().into_iter().flatten() {
        for (name, svg) in plot::all(table) {
            std::fs::write(results().join(&name), svg)?;
            let _ = writeln!(text, "![{name}]({name})");
        }
    }
    let _ = write!(text, "\n{notes}");
    std::fs::write(&page, format!("{}\n", text.trim_end()))?;
    println!("written: {}", page.display());
    Ok(())
}
