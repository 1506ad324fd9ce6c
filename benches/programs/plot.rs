//! Bars as SVG. Knows nothing of what they mean but that one side is the measure of the others.

use crate::report::{rows_of, shown, sides_of};
use serde_json::Value;
use std::fmt::Write;

const COLOURS: [(&str, &str); 5] = [
    ("run", "#1b6ca8"),
    ("mount", "#7fb2d9"),
    ("tmpfs", "#999999"),
    ("ext4+fsync", "#d08a2e"),
    ("xfs+fsync", "#8a5a9e"),
];
const LEFT: f64 = 270.0;
const WIDTH: f64 = 520.0;
const RIGHT: f64 = 110.0;
const BAR: f64 = 13.0;
const GAP: f64 = 12.0;
const TOP: f64 = 52.0;

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// How many times as fast `side` is as `base`.
fn speed(row: &Value, side: &str, base: &str) -> Option<f64> {
    let median = |side: &str| row["values"][side]["median"].as_f64();
    let ratio = median(side)? / median(base)?;
    Some(if row["unit"] == "µs" { 1.0 / ratio } else { ratio })
}

/// A plot of these rows; one file name and text for each workload of a table.
pub fn all(table: &Value) -> Vec<(String, String)> {
    let name = table["name"].as_str().unwrap_or_default();
    let base = if name == "disk" { "ext4+fsync" } else { "tmpfs" };
    let mut workloads: Vec<&str> = rows_of(table)
        .iter()
        .filter_map(|row| row["workload"].as_str())
        .collect();
    workloads.dedup();
    workloads
        .into_iter()
        .map(|workload| {
            let rows: Vec<_> = rows_of(table)
                .iter()
                .filter(|row| row["workload"] == workload)
                .collect();
            let title = format!("{workload}, {name}: speed relative to {base}");
            (
                format!("programs-{name}-{workload}.svg"),
                plot(&title, &rows, &sides_of(table), base),
            )
        })
        .collect()
}

/// A round number of about a fifth of `most`.
fn step(most: f64) -> f64 {
    let power = 10_f64.powf((most / 5.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|step| most / step <= 6.0).unwrap_or(most)
}

fn plot(title: &str, rows: &[&Value], sides: &[&str], base: &str) -> String {
    let group = BAR.mul_add(sides.len() as f64, GAP);
    let (height, full) = (TOP + group * rows.len() as f64 + 26.0, LEFT + WIDTH + RIGHT);
    let speeds = rows
        .iter()
        .flat_map(|row| sides.iter().filter_map(|side| speed(row, side, base)));
    let most = speeds.fold(1.0, f64::max) * 1.02;
    let x = |speed: f64| LEFT + speed / most * WIDTH;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {full} {height:.0}\" \
        font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"8\" y=\"18\" \
         font-size=\"14\">{}</text>\n",
        escaped(title)
    );
    let colour = |side: &str| {
        COLOURS
            .iter()
            .find(|known| known.0 == side)
            .map_or("black", |known| known.1)
    };
    for (at, side) in sides.iter().enumerate() {
        let left = LEFT + at as f64 * 100.0;
        let _ = writeln!(
            text,
            "<rect x=\"{left}\" y=\"28\" width=\"10\" height=\"10\" fill=\"{}\"/><text x=\"{}\" \
            y=\"37\">{side}</text>",
            colour(side),
            left + 14.0
        );
    }
    let (bottom, tick) = (height - 22.0, step(most));
    for number in 0..=(most / tick) as u32 {
        let value = f64::from(number) * tick;
        let at = x(value);
        let _ = writeln!(
            text,
            "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{:.4}</text>",
            height - 8.0,
            shown(value)
        );
    }
    for (number, row) in rows.iter().enumerate() {
        let top = group.mul_add(number as f64, TOP + GAP / 2.0);
        let label = format!(
            "{}, {}",
            row["row"].as_str().unwrap_or_default(),
            row["unit"].as_str().unwrap_or_default()
        );
        let middle = top + BAR * sides.len() as f64 / 2.0 + 4.0;
        let _ = writeln!(
            text,
            "<text x=\"{}\" y=\"{middle:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            escaped(&label)
        );
        for (at, side) in sides.iter().enumerate() {
            let (Some(speed), Some(median)) =
                (speed(row, side, base), row["values"][side]["median"].as_f64())
            else {
                continue;
            };
            let y = BAR.mul_add(at as f64, top);
            let _ = writeln!(
                text,
                "<rect x=\"{LEFT}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{}\" fill=\"{}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"10\">{}</text>",
                x(speed) - LEFT,
                BAR - 2.0,
                colour(side),
                x(speed) + 4.0,
                y + 9.5,
                shown(median)
            );
        }
    }
    let one = x(1.0);
    let _ = writeln!(
        text,
        "<line x1=\"{one:.1}\" y1=\"{TOP}\" x2=\"{one:.1}\" y2=\"{bottom:.1}\" stroke=\"#333333\" \
        stroke-dasharray=\"3 3\"/>\n</svg>"
    );
    text
}
