//! A local size from stall time: the share of time in which threads wait for far pages, and the law that
//! keeps it near a target (after Meta's TMO, which reads PSI; here the pager times what it serves itself).
//!
//! Knows no clock: times are nanoseconds of any clock that does not go back.

/// What a wait takes beyond the time in the pager: the way there and back, nanoseconds (ADR 36: a fault that
/// another process answers at once takes 6 to 9 µs, of which the pager sees 2 to 4).
pub const HOP_NS: u64 = 4_000;

/// Time in which at least one thread waits, as the `some` of PSI.
#[derive(Debug, Clone, Default)]
pub struct Waits {
    waiting: u64,
    since: u64,
    last_end: u64,
    total: u64,
    taken: u64,
}

impl Waits {
    /// Notes that `count` waits began at `at`.
    pub fn begin(&mut self, at: u64, count: u64) {
        if self.waiting == 0 && count > 0 {
            self.since = at.max(self.last_end);
            self.total += HOP_NS;
        }
        self.waiting += count;
    }

    /// Notes that `count` waits ended at `at`.
    pub fn end(&mut self, at: u64, count: u64) {
        self.waiting = self.waiting.saturating_sub(count);
        if self.waiting == 0 && count > 0 {
            self.total += at.saturating_sub(self.since);
            self.last_end = at.max(self.last_end);
        }
    }

    /// The share of the time since the last call, 0..=1. Waits that go on count up to `now`.
    pub fn take(&mut self, now: u64) -> f64 {
        if self.waiting > 0 {
            self.total += now.saturating_sub(self.since);
            self.since = now;
        }
        let time = now.saturating_sub(self.taken);
        let total = std::mem::take(&mut self.total);
        self.taken = now;
        if time == 0 {
            return 0.0;
        }
        (total as f64 / time as f64).min(1.0)
    }
}

/// What is looked at once a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Look {
    /// Share of the last second in which a thread waited.
    pub stall: f64,
    /// Bytes that are local.
    pub local: u64,
    /// Bytes of the programs, local and far.
    pub total: u64,
}

/// The stall that is left alone: this share of the target around it.
const BAND: f64 = 0.25;
/// Most growth in a second, as a share of the limit.
const GROW_MAX: f64 = 0.25;
/// Growth in a second for each target's worth of stall above it.
const GROW: f64 = 0.05;
/// Shrinking in a second while nothing ever stalled.
const SHRINK_FIRST: f64 = 0.04;
/// Most shrinking in a second later.
const SHRINK_MAX: f64 = 0.01;
/// Seconds without growth of the programs before the limit shrinks for the first time.
const SETTLED_S: u32 = 5;
/// Seconds for which a size that stalled is not tried again, the first time and at most.
const EDGE_S: u32 = 30;
const EDGE_MAX_S: u32 = 480;
/// Sizes are the same edge within this share.
const EDGE_NEAR: f64 = 0.15;

/// The size at which it stalled the last time.
#[derive(Debug, Clone, Copy)]
struct Edge {
    bytes: f64,
    /// Seconds for which nothing below it is tried.
    hold_s: u32,
    left_s: u32,
}

/// The law. Once a second:
///
/// - *Above the target*, by more than a quarter, in this second and in the mean of the last ones: the limit
///   grows by 5 % for each target's worth above it, at most 25 %.
/// - *Below it*, by more than a quarter: it shrinks, by at most 1 % (4 % until something stalled for the
///   first time), unless eviction has not reached the limit yet.
/// - *In between* nothing changes.
/// - *Edge*: a size that stalled is not tried again for 30 s, and twice as long each time that it stalls
///   again near there, at most 8 minutes.
/// - New memory is local: the limit grows by what the programs grew. It is at most 9/8 of all their memory.
#[derive(Debug, Clone)]
pub struct Control {
    target: f64,
    least: u64,
    limit: f64,
    mean: f64,
    total: u64,
    settled_s: u32,
    has_stalled: bool,
    edge: Option<Edge>,
}

impl Control {
    /// Starts at `limit` bytes. `target` is the share of time, above 0; the limit stays at or above `least`.
    #[must_use]
    pub fn new(target: f64, limit: u64, least: u64) -> Self {
        Self {
            target,
            least,
            limit: limit as f64,
            mean: 0.0,
            total: 0,
            settled_s: 0,
            has_stalled: false,
            edge: None,
        }
    }

    /// Looks and gives the limit for the next second, bytes.
    pub fn step(&mut self, look: &Look) -> u64 {
        self.mean = (self.mean + look.stall) / 2.0;
        self.follow(look.total);
        let over = look.stall / self.target;
        let mean = self.mean / self.target;
        if let Some(edge) = &mut self.edge {
            edge.left_s = edge.left_s.saturating_sub(1);
        }
        if over > 1.0 + BAND && mean > 1.0 {
            self.grow(over);
        } else if mean < 1.0 - BAND && over < 1.0 {
            self.shrink(look.local, mean);
        }
        let most = look.total as f64 * 9.0 / 8.0;
        self.limit = self.limit.min(most).max(self.least as f64);
        self.limit as u64
    }

    /// Gives new memory room.
    fn follow(&mut self, total: u64) {
        let grown = total.saturating_sub(self.total);
        self.limit += grown as f64;
        let has_grown = grown as f64 > total as f64 / 100.0;
        self.settled_s = if has_grown {
            0
        } else {
            self.settled_s.saturating_add(1)
        };
        self.total = total;
    }

    fn grow(&mut self, over: f64) {
        self.has_stalled = true;
        let near = |edge: &Edge| (edge.bytes - self.limit).abs() < edge.bytes * EDGE_NEAR;
        let hold_s = match &self.edge {
            // Growth that goes on is one violation.
            Some(edge) if near(edge) && edge.left_s + 5 >= edge.hold_s => edge.hold_s,
            Some(edge) if near(edge) => (edge.hold_s * 2).min(EDGE_MAX_S),
            _ => EDGE_S,
        };
        self.edge = Some(Edge {
            bytes: self.limit,
            hold_s,
            left_s: hold_s,
        });
        self.limit *= 1.0 + (GROW * (over - 1.0)).min(GROW_MAX);
    }

    fn shrink(&mut self, local: u64, mean: f64) {
        let is_reached = local as f64 <= self.limit * 1.02;
        if !is_reached || self.settled_s < SETTLED_S {
            return;
        }
        let step = if self.has_stalled {
            SHRINK_MAX * (1.0 - mean)
        } else {
            SHRINK_FIRST
        };
        let next = self.limit.min(local as f64) * (1.0 - step);
        // A little above the edge: at the edge it stalled.
        let floor = self
            .edge
            .filter(|edge| edge.left_s > 0)
            .map_or(0.0, |edge| edge.bytes * 1.02);
        if next >= floor {
            self.limit = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, HashMap};

    #[test]
    fn waits_that_overlap_count_once_and_those_that_go_on_count_so_far() {
        let mut waits = Waits::default();
        waits.begin(100_000, 1);
        waits.begin(150_000, 2);
        waits.end(180_000, 2);
        waits.end(200_000, 1);
        waits.begin(900_000, 1);
        let first = waits.take(1_000_000);
        assert!(
            (first - (0.2 + 2.0 * HOP_NS as f64 / 1e6)).abs() < 1e-9,
            "{first}"
        );
        assert!(
            (waits.take(2_000_000) - 1.0).abs() < 1e-9,
            "it waits all the time"
        );
        waits.end(2_500_000, 1);
        // Told late: it began before the last one ended.
        waits.begin(2_400_000, 1);
        waits.end(2_500_000, 1);
        let last = waits.take(3_000_000);
        assert!((last - (0.5 + HOP_NS as f64 / 1e6)).abs() < 1e-9, "{last}");
        assert_eq!(waits.take(4_000_000), 0.0);
    }

    const PAGE: u64 = 4096;

    /// A program whose local pages are those that it used last.
    struct Program {
        pages: u64,
        uses: HashMap<u64, u64>,
        local: BTreeMap<u64, u64>,
        clock: u64,
        rng: fastrand::Rng,
    }

    impl Program {
        fn new(pages: u64) -> Self {
            let mut program = Self {
                pages,
                uses: HashMap::new(),
                local: BTreeMap::new(),
                clock: 0,
                rng: fastrand::Rng::with_seed(3),
            };
            (0..pages).for_each(|page| program.touch(page));
            program
        }

        fn touch(&mut self, page: u64) {
            self.clock += 1;
            if let Some(before) = self.uses.insert(page, self.clock) {
                self.local.remove(&before);
            }
            self.local.insert(self.clock, page);
        }

        fn is_local(&self, page: u64) -> bool {
            self.uses
                .get(&page)
                .is_some_and(|used| self.local.contains_key(used))
        }

        /// A second: what does not fit leaves, then 4,000 accesses to the first `hot` pages, one of a
        /// hundred anywhere, and `scan`. A far page takes 100 µs.
        fn second(&mut self, limit: u64, hot: u64, scan: std::ops::Range<u64>) -> Look {
            while self.local.len() as u64 * PAGE > limit {
                self.local.pop_first();
            }
            let mut misses = 0;
            for _ in 0..4_000 {
                let anywhere = self.rng.u32(0..100) == 0;
                let page = self.rng.u64(0..if anywhere { self.pages } else { hot });
                misses += u64::from(!self.is_local(page));
                self.touch(page);
            }
            for page in scan {
                misses += u64::from(!self.is_local(page));
                self.touch(page);
            }
            Look {
                stall: (misses as f64 * 100e-6).min(1.0),
                local: self.local.len() as u64 * PAGE,
                total: self.pages * PAGE,
            }
        }
    }

    /// Runs for a time. Gives the limits in pages, and the stalls.
    fn run(
        control: &mut Control,
        program: &mut Program,
        limit: &mut u64,
        seconds: u64,
        hot: u64,
    ) -> (Vec<u64>, Vec<f64>) {
        let mut limits = Vec::new();
        let mut stalls = Vec::new();
        for _ in 0..seconds {
            let look = program.second(*limit, hot, 0..0);
            *limit = control.step(&look);
            limits.push(*limit / PAGE);
            stalls.push(look.stall);
        }
        (limits, stalls)
    }

    fn mean(values: &[f64]) -> f64 {
        values.iter().sum::<f64>() / values.len() as f64
    }

    const ALL: u64 = 20_000;

    fn begin() -> (Control, Program, u64) {
        let limit = ALL * PAGE;
        (Control::new(0.01, limit, 4 << 20), Program::new(ALL), limit)
    }

    #[test]
    fn limit_comes_near_the_working_set_and_stays_there() {
        let (mut control, mut program, mut limit) = begin();
        run(&mut control, &mut program, &mut limit, 120, 4_000);
        let (limits, stalls) = run(&mut control, &mut program, &mut limit, 600, 4_000);
        let (least, most) = (
            limits.iter().min().unwrap_or(&0),
            limits.iter().max().unwrap_or(&0),
        );
        println!(
            "between {least} and {most} pages, stall {:.2} %",
            mean(&stalls) * 100.0
        );
        assert!(*least > 3_600 && *most < 5_600, "{least} to {most}");
        assert!(mean(&stalls) < 0.01, "{}", mean(&stalls));
        let turns = limits.windows(2).filter(|pair| pair[1] > pair[0]).count();
        assert!(turns <= 20, "it grew {turns} times in ten minutes");
    }

    #[test]
    fn working_set_that_grows_gets_room_at_once_and_one_that_shrinks_gives_it_back() {
        let (mut control, mut program, mut limit) = begin();
        run(&mut control, &mut program, &mut limit, 200, 4_000);
        let (limits, _) = run(&mut control, &mut program, &mut limit, 60, 8_000);
        let there = limits.iter().position(|limit| *limit > 7_600);
        println!("there after {there:?} s, at most {:?} pages", limits.iter().max());
        assert!(there.is_some_and(|second| second < 15), "{there:?} of {limits:?}");
        assert!(limits.iter().all(|limit| *limit < 11_500), "{limits:?}");
        run(&mut control, &mut program, &mut limit, 200, 8_000);
        let (limits, _) = run(&mut control, &mut program, &mut limit, 700, 4_000);
        let back = limits.iter().position(|limit| *limit < 5_400);
        println!("back after {back:?} s");
        assert!(back.is_some_and(|second| second < 600), "{back:?}");
    }

    #[test]
    fn scan_takes_no_more_than_all_and_what_it_took_comes_back() {
        let (mut control, mut program, mut limit) = begin();
        run(&mut control, &mut program, &mut limit, 200, 4_000);
        let before = limit / PAGE;
        let mut most = 0;
        for second in 0..5 {
            let look = program.second(limit, 4_000, second * 4_000..(second + 1) * 4_000);
            limit = control.step(&look);
            most = most.max(limit / PAGE);
        }
        let (limits, stalls) = run(&mut control, &mut program, &mut limit, 300, 4_000);
        let back = limits.iter().position(|limit| *limit < before * 5 / 4);
        println!("{before} pages before, at most {most}, back after {back:?} s");
        assert!(most <= ALL * 9 / 8 && most < before * 4, "{most}");
        assert!(back.is_some_and(|second| second < 200), "{back:?}");
        assert!(mean(&stalls[20..]) < 0.01, "{}", mean(&stalls[20..]));
    }

    #[test]
    fn new_memory_is_local_and_an_idle_program_keeps_the_least() {
        let mut control = Control::new(0.01, 8 << 20, 4 << 20);
        let mut look = Look {
            stall: 0.0,
            local: 0,
            total: 0,
        };
        for mib in (0..512u64).step_by(32) {
            (look.local, look.total) = (mib << 20, mib << 20);
            let limit = control.step(&look);
            assert!(limit >= (mib << 20), "{limit} at {mib} MiB");
        }
        for _ in 0..200 {
            look.local = control.step(&look).min(look.local);
        }
        assert_eq!(look.local, 4 << 20);
    }

    #[test]
    fn size_that_stalled_is_tried_less_and_less_often() {
        // It stalls below 1,000 pages and nowhere else.
        let mut control = Control::new(0.01, 2_000 * PAGE, 4 * PAGE);
        let (mut limit, mut stalled_at) = (2_000 * PAGE, Vec::new());
        for second in 0..1_800u32 {
            let stall = if limit < 1_000 * PAGE { 0.03 } else { 0.0 };
            if stall > 0.0 {
                stalled_at.push(second);
            }
            limit = control.step(&Look {
                stall,
                local: limit,
                total: 2_000 * PAGE,
            });
        }
        let tries = stalled_at.windows(2).filter(|pair| pair[1] - pair[0] > 5).count();
        println!("{tries} further tries in half an hour: {stalled_at:?}");
        assert!((3..=8).contains(&tries), "{stalled_at:?}");
    }
}
