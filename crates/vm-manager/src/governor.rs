//! Keeps the manager's own processor time within its shares: one for tracking, one for carrying out actions.
//!
//! After a step that used `c`, the next one starts no sooner than `c / share` later, so the share holds for
//! steps of any cost. The number of pages requested in a step follows from the cost of the last steps.

use std::time::Duration;

/// Fewest pages in a step. The rest between steps keeps the share; a smaller step would only prolong a pass.
const LEAST_PAGES: u64 = 2_048;

/// The governor.
#[derive(Debug, Clone)]
pub struct Governor {
    scan_share: f64,
    work_share: f64,
    budget_pages: u64,
    most_pages: u64,
    scan_total: Duration,
    work_total: Duration,
}

impl Governor {
    /// Makes a governor of these shares of one core and this bound on the pages of a step.
    pub const fn new(scan_share: f64, work_share: f64, most_pages: u64) -> Self {
        let (scan_total, work_total) = (Duration::ZERO, Duration::ZERO);
        Self {
            scan_share,
            work_share,
            budget_pages: most_pages,
            most_pages,
            scan_total,
            work_total,
        }
    }

    /// Accounts one step; returns the least time to rest before the next.
    pub fn account(&mut self, scan: Duration, work: Duration, step: Duration) -> Duration {
        self.scan_total += scan;
        self.work_total += work;
        let target = step.as_secs_f64() * self.scan_share;
        if scan.as_secs_f64() > 2.0 * target {
            self.budget_pages = (self.budget_pages / 2).max(LEAST_PAGES.min(self.most_pages));
        } else if scan.as_secs_f64() < target / 2.0 {
            self.budget_pages = (self.budget_pages + self.budget_pages / 4 + 16).min(self.most_pages);
        }
        let for_scan = scan.as_secs_f64() / self.scan_share - scan.as_secs_f64();
        let for_work = work.as_secs_f64() / self.work_share - work.as_secs_f64();
        // Bounded, so that one very expensive step does not stop the manager for minutes.
        Duration::from_secs_f64(for_scan.max(for_work).clamp(0.0, 10.0))
    }

    /// Returns the number of pages that the next step may request.
    pub const fn budget_pages(&self) -> u64 {
        self.budget_pages
    }

    /// Returns the processor time since the start: tracking, and carrying out actions.
    pub const fn totals(&self) -> (Duration, Duration) {
        (self.scan_total, self.work_total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(100);

    #[test]
    fn rest_keeps_the_share_whatever_a_step_costs() {
        let mut g = Governor::new(0.01, 0.25, 10_000);
        for cost_us in [10, 100, 1_000, 50_000] {
            let cost = Duration::from_micros(cost_us);
            let rest = g.account(cost, Duration::ZERO, STEP);
            let share = cost.as_secs_f64() / (cost + rest).as_secs_f64();
            assert!((share - 0.01).abs() < 1e-6, "{share}");
        }
        let rest = g.account(Duration::ZERO, Duration::from_millis(100), STEP);
        assert_eq!(rest, Duration::from_millis(300));
    }

    #[test]
    fn budget_shrinks_when_steps_are_dear_and_grows_back_when_they_are_cheap() {
        let mut g = Governor::new(0.01, 0.25, 10_000);
        for _ in 0..20 {
            g.account(Duration::from_millis(50), Duration::ZERO, STEP);
        }
        assert_eq!(g.budget_pages(), LEAST_PAGES, "never starves");
        for _ in 0..60 {
            g.account(Duration::from_micros(10), Duration::ZERO, STEP);
        }
        assert_eq!(g.budget_pages(), 10_000);
    }
}
