//! Rows, their targets and how they are printed. Measures nothing.

use crate::Options;
use crate::common::machine;
use crate::places::Places;
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Instant;

/// What the numbers of a row count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Given in nanoseconds, shown in microseconds.
    Micros,
    /// Given in nanoseconds a byte, shown in GB/s.
    Bandwidth,
    /// Given in nanoseconds, shown in thousands a second.
    KiloOps,
    /// Given in nanoseconds, shown in seconds.
    Seconds,
    /// Shown as it is.
    Plain,
}

impl Unit {
    fn show(self, value: f64) -> String {
        let value = self.scale(value);
        match self {
            Self::Micros | Self::Bandwidth | Self::Plain if value < 10.0 => format!("{value:.3}"),
            Self::Seconds => format!("{value:.3}"),
            _ => format!("{value:.1}"),
        }
    }

    fn scale(self, value: f64) -> f64 {
        match self {
            Self::Micros => value / 1e3,
            Self::Bandwidth => 1.0 / value,
            Self::KiloOps => 1e6 / value,
            Self::Seconds => value / 1e9,
            Self::Plain => value,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Micros => "µs",
            Self::Bandwidth => "GB/s",
            Self::KiloOps => "k/s",
            Self::Seconds => "s",
            Self::Plain => "",
        }
    }
}

/// Something that a row is to reach.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// Time of this column at most so many times that of the other.
    AtMost(&'static str, f64, &'static str),
    /// This column at least so many times as fast as the other.
    Faster(&'static str, f64, &'static str),
    /// This column's value at least so many times that of the other.
    AtLeast(&'static str, f64, &'static str),
    /// This column at most so much, in the unit shown.
    Below(&'static str, f64),
    /// This column at least so much, in the unit shown.
    Above(&'static str, f64),
    /// Time of this column at most so much longer than that of the other, in the unit shown.
    Over(&'static str, f64, &'static str),
}

/// A row.
pub struct Row {
    /// What was done.
    pub name: String,
    /// Unit of the values.
    pub unit: Unit,
    /// Columns with their values, as [`Unit`] says.
    pub values: Vec<(&'static str, f64)>,
    /// What is to be reached.
    pub targets: Vec<Target>,
}

impl Row {
    fn value(&self, column: &str) -> Option<f64> {
        self.values
            .iter()
            .find(|(name, _)| *name == column)
            .map(|(_, value)| *value)
            .filter(|value| value.is_finite())
    }

    /// The target in words, and whether it is reached; `None` where a side is missing.
    fn judge(&self, target: Target) -> (String, Option<bool>) {
        let ratio = |a: &str, b: &str| Some(self.value(a)? / self.value(b)?);
        match target {
            Target::AtMost(own, most, other) => {
                let got = ratio(own, other);
                let text = got.map_or("?".into(), |got| format!("{got:.2}"));
                (
                    format!("{own} {text} × {other} (≤ {most})"),
                    got.map(|got| got <= most),
                )
            }
            Target::Faster(own, least, other) => {
                let got = ratio(other, own);
                let text = got.map_or("?".into(), |got| format!("{got:.2}"));
                (
                    format!("{own} {text} × as fast as {other} (≥ {least})"),
                    got.map(|got| got >= least),
                )
            }
            Target::AtLeast(own, least, other) => {
                let got = ratio(own, other);
                let text = got.map_or("?".into(), |got| format!("{got:.2}"));
                (
                    format!("{own} {text} × {other} (≥ {least})"),
                    got.map(|got| got >= least),
                )
            }
            Target::Below(own, most) => {
                let got = self.value(own).map(|value| self.unit.scale(value));
                (
                    format!("{own} ≤ {most} {}", self.unit.name()),
                    got.map(|got| got <= most),
                )
            }
            Target::Above(own, least) => {
                let got = self.value(own).map(|value| self.unit.scale(value));
                (
                    format!("{own} ≥ {least} {}", self.unit.name()),
                    got.map(|got| got >= least),
                )
            }
            Target::Over(own, most, other) => {
                let value = |column| Some(self.unit.scale(self.value(column)?));
                let got = value(own).and_then(|own| Some(own - value(other)?));
                let text = got.map_or("?".into(), |got| format!("{got:+.3}"));
                (
                    format!("{own} {text} {} over {other} (≤ {most})", self.unit.name()),
                    got.map(|got| got <= most),
                )
            }
        }
    }

    fn lines(&self) -> String {
        let mut text = format!("{}\n   ", self.name);
        for (name, value) in &self.values {
            let _ = write!(text, " {name} {} {}  ", self.unit.show(*value), self.unit.name());
        }
        text.push('\n');
        for target in &self.targets {
            let (words, met) = self.judge(*target);
            let verdict = match met {
                Some(true) => "met",
                Some(false) => "MISSED",
                None => "not measured",
            };
            let _ = writeln!(text, "    {verdict:<12} {words}");
        }
        text
    }

    fn json(&self) -> Value {
        let values: serde_json::Map<_, _> = self
            .values
            .iter()
            .map(|(name, value)| ((*name).to_owned(), json!(self.unit.scale(*value))))
            .collect();
        let targets: Vec<_> = self
            .targets
            .iter()
            .map(|target| {
                let (words, met) = self.judge(*target);
                json!({ "target": words, "met": met })
            })
            .collect();
        json!({ "row": self.name, "unit": self.unit.name(), "values": values, "targets": targets })
    }
}

/// All rows so far.
pub struct Report {
    machine: Value,
    rows: Vec<Row>,
    remarks: Vec<String>,
    failures: Vec<String>,
    began: Instant,
}

impl Report {
    /// Says on what it runs.
    pub fn begin(options: &Options, places: &Places) -> Self {
        let machine = machine(json!({
            "huge_pages": places.huge,
            "mode": options.pick("quick", "full"),
        }));
        println!("{machine:#}");
        let mut report = Self {
            machine,
            rows: Vec::new(),
            remarks: Vec::new(),
            failures: Vec::new(),
            began: Instant::now(),
        };
        for why in &places.missing {
            report.remark(format!("SKIPPED: {why}"));
        }
        if !places.huge {
            report.remark("the memory has no huge pages: no tmpfs could be mounted (needs root)".into());
        }
        report
    }

    /// Notes something that a reader must know.
    pub fn remark(&mut self, text: String) {
        println!("note: {text}");
        self.remarks.push(text);
    }

    /// A group ended early.
    pub fn failed(&mut self, group: &str, error: &anyhow::Error) {
        println!("FAILED: {group}: {error:#}");
        self.failures.push(format!("{group}: {error:#}"));
    }

    /// Adds a row and shows it.
    pub fn row(&mut self, row: Row) {
        println!("{}", row.lines());
        self.rows.push(row);
    }

    /// Shows the table, writes the JSON. Fails if a group did not come to its end.
    pub fn end(self, options: &Options) -> anyhow::Result<()> {
        println!("{}", self.markdown());
        if let Some(path) = &options.json {
            let value = json!({
                "machine": self.machine,
                "remarks": self.remarks,
                "failures": self.failures,
                "seconds": self.began.elapsed().as_secs(),
                "rows": self.rows.iter().map(Row::json).collect::<Vec<_>>(),
            });
            std::fs::write(path, format!("{value:#}\n"))?;
        }
        anyhow::ensure!(self.failures.is_empty(), "failed: {}", self.failures.join("; "));
        Ok(())
    }

    fn markdown(&self) -> String {
        let mut text = String::from("| row | measured | target |\n| --- | --- | --- |\n");
        let mut counts = [0, 0, 0];
        for row in &self.rows {
            let values: Vec<_> = row
                .values
                .iter()
                .map(|(name, value)| format!("{name} {}", row.unit.show(*value)))
                .collect();
            let targets: Vec<_> = row
                .targets
                .iter()
                .map(|target| {
                    let (words, met) = row.judge(*target);
                    let (slot, mark) = match met {
                        Some(true) => (0, "met"),
                        Some(false) => (1, "**missed**"),
                        None => (2, "not measured"),
                    };
                    counts[slot] += 1;
                    format!("{mark}: {words}")
                })
                .collect();
            let _ = writeln!(
                text,
                "| {}, {} | {} | {} |",
                row.name,
                row.unit.name(),
                values.join(", "),
                targets.join("; ")
            );
        }
        let _ = writeln!(
            text,
            "\n{} targets met, {} missed, {} not measured; {} s",
            counts[0],
            counts[1],
            counts[2],
            self.began.elapsed().as_secs()
        );
        text
    }
}
