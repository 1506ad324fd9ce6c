//! What the daemon's memory is made of while it is attacked. Looks from outside, at `/proc`; judges nothing.

use std::time::{Duration, Instant};

/// The C library's allocator begins an arena of a thread at a multiple of this, which is also its greatest
/// length.
const ARENA_BYTES: u64 = 64 << 20;
/// Longer than the daemon keeps free memory after sessions have ended.
const GIVEN_BACK: Duration = Duration::from_secs(12);
/// Length of a thread's stack here.
const STACK_BYTES: u64 = 2 << 20;

/// Resident memory of a process by what it is of, in KiB.
#[derive(Debug, Clone, Copy, Default)]
struct Parts {
    /// The allocator's first arena.
    heap: u64,
    /// Its others, which threads share.
    arenas: u64,
    /// How many there are.
    arenas_count: u64,
    stacks: u64,
    /// Anonymous memory of other kinds: large blocks, the program's data.
    other: u64,
    /// Of files, shared with others: the pool's memory, logs, pages, the program.
    mapped: u64,
}

/// A line of `smaps` that begins a mapping: its ends, its rights, what it is of.
fn mapping(line: &str) -> Option<(u64, u64, &str, &str)> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?;
    let of = words.nth(3).unwrap_or("");
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some((number(start)?, number(end)?, rights, of))
}

impl Parts {
    fn of(pid: u32) -> Self {
        let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
        let mut parts = Self::default();
        let mut unused = 0;
        let mut kind = &mut unused;
        let mut resident = 0;
        for line in smaps.lines() {
            if let Some((start, end, rights, of)) = mapping(line) {
                let is_arena = start % ARENA_BYTES == 0 && end - start <= ARENA_BYTES;
                let is_stack = end - start == STACK_BYTES;
                kind = match of {
                    "[heap]" => &mut parts.heap,
                    "" if is_arena && rights.starts_with("rw") => {
                        parts.arenas_count += 1;
                        &mut parts.arenas
                    }
                    "" if is_stack => &mut parts.stacks,
                    _ => &mut parts.other,
                };
                continue;
            }
            let Some((name, kib)) = line.split_once(':') else {
                continue;
            };
            let kib = || kib.trim().trim_end_matches(" kB").parse().unwrap_or(0);
            match name {
                "Rss" => resident = kib(),
                "Anonymous" => {
                    *kind += kib();
                    parts.mapped += resident - kib();
                }
                _ => {}
            }
        }
        parts
    }

    const fn anonymous(&self) -> u64 {
        self.heap + self.arenas + self.stacks + self.other
    }
}

/// Prints a line of a table every so often.
pub struct Samples {
    every: Duration,
    began: Instant,
    taken: u32,
}

impl Samples {
    /// Never with 0.
    pub fn every(secs: u64) -> Self {
        Self {
            every: Duration::from_secs(secs),
            began: Instant::now(),
            taken: 0,
        }
    }

    /// Takes one if it is time; after processor time of `ticks` and so many `acts`.
    pub fn take(&mut self, pid: u32, ticks: u64, acts: impl FnOnce() -> u64) {
        if !self.every.is_zero() && self.began.elapsed() >= self.every * self.taken {
            self.print(pid, ticks, acts());
        }
    }

    /// Takes two, whatever time it is: one now, one when the daemon has given back what it keeps for a while.
    pub fn last(&mut self, pid: u32, ticks: u64, acts: u64) {
        if !self.every.is_zero() {
            self.print(pid, ticks, acts);
            std::thread::sleep(GIVEN_BACK);
            self.print(pid, ticks, acts);
        }
    }

    fn print(&mut self, pid: u32, ticks: u64, acts: u64) {
        if self.taken == 0 {
            println!(
                "| s | acts | anonymous MB | heap | arenas | of | stacks | other | mapped | fds | threads | \
                processor s |"
            );
            println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
        }
        self.taken += 1;
        let parts = Parts::of(pid);
        let count = |of: &str| std::fs::read_dir(format!("/proc/{pid}/{of}")).map_or(0, Iterator::count);
        let mb = |kib: u64| kib as f64 / 1024.0;
        println!(
            "| {:.0} | {acts} | {:.1} | {:.1} | {:.1} | {} | {:.1} | {:.1} | {:.1} | {} | {} | {:.1} |",
            self.began.elapsed().as_secs_f64(),
            mb(parts.anonymous()),
            mb(parts.heap),
            mb(parts.arenas),
            parts.arenas_count,
            mb(parts.stacks),
            mb(parts.other),
            mb(parts.mapped),
            count("fd"),
            count("task"),
            ticks as f64 / rustix::param::clock_ticks_per_second() as f64,
        );
    }
}
