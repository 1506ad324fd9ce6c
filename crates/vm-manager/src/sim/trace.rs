//! Traces of page accesses: generators, and a text form for recording and replay.
//!
//! Every generator is a pure function of its seed.

use std::io::{BufRead, Write};

use crate::types::{PageKey, ProcId, VirtPage};

/// One access of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The page.
    pub page: PageKey,
    /// Whether it is a write.
    pub write: bool,
}

/// A small generator of pseudo-random numbers (splitmix64); own code, so that traces never change.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Makes a generator from a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }
    /// Returns the next 64 bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Returns a number uniform in `0..bound`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }
    /// Returns a number uniform in 0.0..1.0.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Draws ranks with probability proportional to 1 / rank^theta (YCSB's generator: 0.99).
#[derive(Debug, Clone)]
pub struct Zipf {
    cumulative: Vec<f64>,
    order: Vec<u32>,
}

impl Zipf {
    /// Makes a generator over `pages` pages, with popularity scattered over them by `seed`.
    pub fn new(pages: u64, theta: f64, seed: u64) -> Self {
        let mut sum = 0.0;
        let cumulative = (1..=pages)
            .map(|rank| {
                sum += (rank as f64).powf(-theta);
                sum
            })
            .collect();
        let mut order: Vec<u32> = (0..pages as u32).collect();
        let mut rng = Rng::new(seed);
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i as u64 + 1) as usize);
        }
        Self { cumulative, order }
    }

    /// Draws the next page.
    pub fn draw(&self, rng: &mut Rng) -> u64 {
        let total = self.cumulative.last().copied().unwrap_or(1.0);
        let point = rng.unit() * total;
        let rank = self
            .cumulative
            .partition_point(|c| *c <= point)
            .min(self.order.len() - 1);
        u64::from(self.order[rank])
    }
}

fn access(proc: u16, page: u64, write: bool) -> Access {
    Access {
        page: PageKey::new(ProcId(proc), VirtPage(page)),
        write,
    }
}

/// Returns accesses that touch every page once, in order: the load phase of a program.
pub fn load(proc: u16, pages: u64) -> Vec<Access> {
    (0..pages).map(|p| access(proc, p, true)).collect()
}

/// The kinds of trace that the evaluation runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Zipfian reads and 5 % writes over all pages.
    Zipfian,
    /// Sequential passes over everything.
    Scan,
    /// A hot tenth that jumps elsewhere half way.
    PhaseChange,
    /// One process fills fast memory and goes idle, then a second, identical one runs (Fig. 6.10).
    TwoProcesses,
    /// YCSB over a key-value store: zipfian, half updates, then a phase in which the newest keys are the
    /// popular ones.
    Memcached,
    /// Sequential edges with random reads of ranks whose popularity follows a power law.
    PageRank,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 6] = [
        Self::Zipfian,
        Self::Scan,
        Self::PhaseChange,
        Self::TwoProcesses,
        Self::Memcached,
        Self::PageRank,
    ];

    /// Generates a trace over `pages` pages with about `accesses` accesses after the load phase.
    pub fn generate(self, pages: u64, accesses: u64, seed: u64) -> Vec<Access> {
        let mut rng = Rng::new(seed);
        match self {
            Self::Zipfian => {
                let zipf = Zipf::new(pages, 0.99, seed);
                let mut out = load(0, pages);
                out.extend((0..accesses).map(|_| {
                    let page = zipf.draw(&mut rng);
                    access(0, page, rng.below(20) == 0)
                }));
                out
            }
            Self::Scan => {
                let mut out = load(0, pages);
                out.extend((0..accesses).map(|i| access(0, i % pages, false)));
                out
            }
            Self::PhaseChange => phase_change(pages, accesses, &mut rng),
            Self::TwoProcesses => two_processes(pages, accesses, seed),
            Self::Memcached => memcached(pages, accesses, seed),
            Self::PageRank => page_rank(pages, accesses, seed),
        }
    }

    /// Returns the index of the first access after the change of phase, if the trace has one.
    pub fn change_at(self, pages: u64, accesses: u64) -> Option<u64> {
        match self {
            Self::PhaseChange => Some(pages + accesses / 2),
            Self::TwoProcesses => Some(pages / 2 + accesses / 2),
            _ => None,
        }
    }
}

fn phase_change(pages: u64, accesses: u64, rng: &mut Rng) -> Vec<Access> {
    let hot = (pages / 10).max(1);
    let mut out = load(0, pages);
    for i in 0..accesses {
        let base = if i < accesses / 2 { pages / 2 } else { pages - hot };
        let page = if rng.below(10) < 9 {
            base + rng.below(hot)
        } else {
            rng.below(pages)
        };
        out.push(access(0, page.min(pages - 1), rng.below(4) == 0));
    }
    out
}

fn two_processes(pages: u64, accesses: u64, seed: u64) -> Vec<Access> {
    let each = pages / 2;
    let mut out = Vec::new();
    for proc in 0..2u16 {
        let zipf = Zipf::new(each, 0.8, seed);
        let mut rng = Rng::new(seed);
        out.extend(load(proc, each));
        out.extend((0..accesses / 2).map(|_| {
            let page = zipf.draw(&mut rng);
            access(proc, page, rng.below(4) == 0)
        }));
    }
    out
}

fn memcached(pages: u64, accesses: u64, seed: u64) -> Vec<Access> {
    let zipf = Zipf::new(pages, 0.99, seed);
    let mut rng = Rng::new(seed ^ 1);
    let mut out = load(0, pages);
    // Workload A (half updates), then D (95 % reads of the latest, 5 % inserts that move the window).
    out.extend((0..accesses / 2).map(|_| access(0, zipf.draw(&mut rng), rng.below(2) == 0)));
    let window = Zipf::new((pages / 4).max(1), 0.99, seed ^ 2);
    let mut newest = pages / 2;
    for i in 0..accesses - accesses / 2 {
        if i % (accesses / pages.max(1)).max(20) == 0 {
            newest = (newest + 1) % pages;
            out.push(access(0, newest, true));
        } else {
            let back = window
                .cumulative
                .partition_point(|c| *c <= rng.unit() * window.cumulative[window.cumulative.len() - 1]);
            out.push(access(0, (newest + pages - back as u64 % pages) % pages, false));
        }
    }
    out
}

fn page_rank(pages: u64, accesses: u64, seed: u64) -> Vec<Access> {
    // A fifth of memory holds vertices, the rest edges that each iteration streams through.
    let vertices = (pages / 5).max(1);
    let zipf = Zipf::new(vertices, 0.8, seed);
    let mut rng = Rng::new(seed ^ 3);
    let mut out = load(0, pages - vertices);
    out.extend((pages - vertices..pages).map(|p| access(0, p, true)));
    let edges = pages - vertices;
    let mut edge = 0;
    for i in 0..accesses {
        // An edge page holds many edges: eight rank reads for each step of the stream.
        out.push(if i % 9 == 0 {
            edge = (edge + 1) % edges;
            access(0, edge, false)
        } else {
            access(0, edges + zipf.draw(&mut rng), i % 18 == 1)
        });
    }
    out
}

/// Errors of a recorded trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A line that cannot be read.
    #[error("line {line}: {what}; expected `PROC PAGE r|w`")]
    Line {
        /// Number of the line, from 1.
        line: u64,
        /// The fault.
        what: String,
    },
    /// The file could not be read or written.
    #[error("trace: {0}")]
    Io(#[from] std::io::Error),
}

/// Longest accepted trace, in accesses: bounds the memory of a replay.
pub const MAX_ACCESSES: u64 = 200_000_000;

/// Writes a trace as text, one access a line.
///
/// # Errors
/// Errors of the writer.
pub fn write(trace: &[Access], mut to: impl Write) -> Result<(), TraceError> {
    writeln!(to, "# varve page trace v1: process page r|w")?;
    for a in trace {
        writeln!(
            to,
            "{} {:x} {}",
            a.page.proc.0,
            a.page.page.0,
            if a.write { 'w' } else { 'r' }
        )?;
    }
    Ok(())
}

/// Reads a trace.
///
/// # Errors
/// [`TraceError::Line`] for the first line that is not an access.
pub fn read(from: impl BufRead) -> Result<Vec<Access>, TraceError> {
    let mut out = Vec::new();
    for (n, line) in from.lines().enumerate() {
        let line = line?;
        let bad = |what: &str| TraceError::Line {
            line: n as u64 + 1,
            what: what.to_owned(),
        };
        if line.starts_with('#') || line.trim().is_empty() {
            continue;
        }
        if out.len() as u64 >= MAX_ACCESSES {
            return Err(bad("trace is longer than 200 million accesses"));
        }
        let mut words = line.split_ascii_whitespace();
        let mut word = |what| words.next().ok_or_else(|| bad(what));
        let proc = word("no process")?
            .parse::<u16>()
            .map_err(|e| bad(&e.to_string()))?;
        let page = u64::from_str_radix(word("no page")?, 16).map_err(|e| bad(&e.to_string()))?;
        let write = match word("no kind")? {
            "r" => false,
            "w" => true,
            other => return Err(bad(&format!("kind `{other}`"))),
        };
        if page >= 1 << 52 {
            return Err(bad("page number above 2^52"));
        }
        out.push(access(proc, page, write));
    }
    Ok(out)
}
