//! Heat maps: address space over time, in the terminal and as SVG. Unobserved ranges are drawn as "not seen".

use std::fmt::Write;

use serde::{Deserialize, Serialize};

/// Most rows (address ranges) of a map.
pub const ROWS: usize = 48;
/// Most columns (samples) of a map.
pub const COLUMNS: usize = 72;

/// Heat map of one process.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HeatMap {
    /// The process.
    pub pid: i32,
    /// Name of the process.
    pub name: String,
    /// First and last address of each row.
    pub rows: Vec<(u64, u64)>,
    /// Samples, oldest first: heat 0..=100 of each row, `None` where nothing was observed.
    pub columns: Vec<Vec<Option<u8>>>,
    /// Seconds between two columns.
    pub step_s: f64,
}

impl HeatMap {
    /// Adds a sample. `regions` are (first address, one past the last, heat 0.0..=1.0 if observed) in rising
    /// order. When the layout of rows changes, older samples are dropped: their addresses would be wrong.
    pub fn push(&mut self, regions: &[(u64, u64, Option<f64>)]) {
        // A row spans a gap only if there are too many gaps to show.
        let runs = regions.chunk_by(|a, b| a.1 == b.0);
        let per_row = regions.len().div_ceil(ROWS / 2).max(1);
        let mut chunks: Vec<_> = runs.flat_map(|run| run.chunks(per_row)).collect();
        if chunks.len() > ROWS {
            chunks = regions.chunks(regions.len().div_ceil(ROWS)).collect();
        }
        let rows: Vec<(u64, u64)> = chunks.iter().map(|c| (c[0].0, c[c.len() - 1].1)).collect();
        if rows != self.rows {
            self.columns.clear();
            self.rows = rows;
        }
        let column = chunks.iter().map(|c| {
            let seen: Vec<f64> = c.iter().filter_map(|r| r.2).collect();
            let mean = seen.iter().sum::<f64>() / seen.len() as f64;
            (!seen.is_empty()).then(|| (mean * 100.0).clamp(0.0, 100.0) as u8)
        });
        self.columns.push(column.collect());
        if self.columns.len() > COLUMNS {
            self.columns.remove(0);
        }
    }

    /// Draws the map for a terminal: with `color` by 24-bit escapes, else by characters.
    pub fn terminal(&self, color: bool) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{} ({}): {} rows, {} moments of {:.1} s, newest right",
            self.name,
            self.pid,
            self.rows.len(),
            self.columns.len(),
            self.step_s
        );
        for (r, (start, end)) in self.rows.iter().enumerate() {
            let _ = write!(out, "{start:>14x} {:>6} MiB |", (end - start) >> 20);
            for column in &self.columns {
                let heat = column.get(r).copied().flatten();
                if color {
                    let (red, green, blue) = rgb(heat);
                    let _ = write!(out, "\x1b[48;2;{red};{green};{blue}m \x1b[0m");
                } else {
                    out.push(shade(heat));
                }
            }
            out.push_str("|\n");
        }
        out.push_str("cold ");
        for heat in [0u8, 20, 40, 60, 80, 100] {
            if color {
                let (red, green, blue) = rgb(Some(heat));
                let _ = write!(out, "\x1b[48;2;{red};{green};{blue}m  \x1b[0m");
            } else {
                out.push(shade(Some(heat)));
            }
        }
        out.push_str(" hot; ? not seen\n");
        out
    }

    /// Draws the map as SVG.
    pub fn svg(&self) -> String {
        const CELL: usize = 10;
        const LEFT: usize = 190;
        let (width, height) = (LEFT + COLUMNS * CELL + 10, 50 + self.rows.len() * CELL);
        let mut out = String::new();
        let _ = writeln!(
            out,
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" font-size="9">"#
        );
        let _ = writeln!(out, r#"<rect width="100%" height="100%" fill="white"/>"#);
        let name: String = self
            .name
            .chars()
            .filter(|c| c.is_ascii_alphanumeric() || "-_. ".contains(*c))
            .collect();
        let _ = writeln!(
            out,
            r#"<text x="4" y="14" font-size="12">{name} ({}): heat by address, {:.1} s a column, newest right; hatched: not seen</text>"#,
            self.pid, self.step_s
        );
        let _ = writeln!(
            out,
            r##"<defs><pattern id="n" width="4" height="4" patternUnits="userSpaceOnUse"><path d="M0 4L4 0" stroke="#bbb"/></pattern></defs>"##
        );
        for (r, (start, end)) in self.rows.iter().enumerate() {
            let y = 24 + r * CELL;
            let _ = writeln!(
                out,
                r#"<text x="4" y="{}">{start:x} {} MiB</text>"#,
                y + 8,
                (end - start) >> 20
            );
            for (c, column) in self.columns.iter().enumerate() {
                let x = LEFT + (COLUMNS - self.columns.len() + c) * CELL;
                let heat = column.get(r).copied().flatten();
                let fill = match heat {
                    None => "url(#n)".to_owned(),
                    some => {
                        let (red, green, blue) = rgb(some);
                        format!("#{red:02x}{green:02x}{blue:02x}")
                    }
                };
                let _ = writeln!(
                    out,
                    r#"<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{fill}"/>"#
                );
            }
        }
        out.push_str("</svg>\n");
        out
    }
}

/// Maps heat to a colour from blue to red; grey for "not seen".
fn rgb(heat: Option<u8>) -> (u8, u8, u8) {
    let Some(heat) = heat else { return (70, 70, 70) };
    let t = f64::from(heat.min(100)) / 100.0;
    (
        (40.0 + 215.0 * t) as u8,
        (60.0 + 120.0 * (1.0 - (2.0 * t - 1.0).abs())) as u8,
        (160.0 * (1.0 - t)) as u8,
    )
}

fn shade(heat: Option<u8>) -> char {
    match heat {
        None => '?',
        Some(0..=4) => '.',
        Some(5..=24) => ':',
        Some(25..=49) => '-',
        Some(50..=74) => '+',
        Some(75..=89) => '#',
        Some(_) => '@',
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn regions(heat: &[Option<f64>]) -> Vec<(u64, u64, Option<f64>)> {
        heat.iter()
            .enumerate()
            .map(|(i, h)| ((i as u64) << 21, (i as u64 + 1) << 21, *h))
            .collect()
    }

    #[test]
    fn unseen_rows_stay_unseen_when_drawn() {
        let mut map = HeatMap {
            pid: 1,
            name: "a<b&".to_owned(),
            step_s: 1.0,
            ..HeatMap::default()
        };
        map.push(&regions(&[Some(1.0), None, Some(0.0)]));
        let text = map.terminal(false);
        assert!(
            text.contains("|@|") && text.contains("|?|") && text.contains("|.|"),
            "{text}"
        );
        let svg = map.svg();
        assert_eq!(svg.matches(r#"fill="url(#n)""#).count(), 1);
        assert!(svg.contains(">ab (1)"), "names cannot break the drawing");
    }

    #[test]
    fn moments_are_dropped_when_the_layout_changes_and_bounded_otherwise() {
        let mut map = HeatMap::default();
        for _ in 0..200 {
            map.push(&regions(&[Some(0.5); 300]));
        }
        assert_eq!(map.columns.len(), COLUMNS);
        assert!(map.rows.len() <= ROWS);
        map.push(&regions(&[Some(0.5); 2]));
        assert_eq!((map.columns.len(), map.rows.len()), (1, 2));
    }
}
