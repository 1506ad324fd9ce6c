//! Fair distribution of huge pages: the promotion metric (equation 3.2) and the fairness objective (equation
//! 3.3).

use crate::types::HUGE_BYTES;

/// One process' claim on contiguous memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Claim {
    /// Share priority S; 10,000 is ordinary.
    pub share: f64,
    /// Huge pages held.
    pub huge_pages: u64,
    /// Number of them that are idle (not frequently accessed).
    pub idle_huge_pages: u64,
}

/// Returns M = S / (H · (f + τ·(1 − f))), in shares per byte.
///
/// H is taken as one huge page for a process that holds none, which keeps M finite and still the largest
/// among equals. The factor is τ if no huge page is idle and 1 if all are, so holders of idle huge pages get
/// the smaller M.
pub fn promotion_metric(claim: &Claim, tau: f64) -> f64 {
    let held = claim.huge_pages.max(1);
    let f = if claim.huge_pages == 0 {
        0.0
    } else {
        claim.idle_huge_pages as f64 / held as f64
    };
    claim.share / ((held * HUGE_BYTES) as f64 * (f + tau * (1.0 - f)))
}

/// Returns O = Σ (Mᵢ − M̄)²: 0 when the distribution is fair.
pub fn objective(metrics: &[f64]) -> f64 {
    let mean = metrics.iter().sum::<f64>() / metrics.len().max(1) as f64;
    metrics.iter().map(|m| (m - mean).powi(2)).sum()
}

/// Whether O is "close to 0": the metrics deviate from their mean by no more than one part in a hundred. M
/// shrinks as all processes hold more, so a fixed bound on O would call large unequal shares fair.
pub fn is_fair(metrics: &[f64]) -> bool {
    let n = metrics.len().max(1) as f64;
    let mean = metrics.iter().sum::<f64>() / n;
    objective(metrics) <= n * (0.01 * mean).powi(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(huge_pages: u64, idle_huge_pages: u64) -> Claim {
        Claim {
            share: 10_000.0,
            huge_pages,
            idle_huge_pages,
        }
    }

    #[test]
    fn metric_prefers_who_holds_less_when_shares_are_equal() {
        assert!(promotion_metric(&claim(5, 0), 0.5) > promotion_metric(&claim(10, 0), 0.5));
        assert!(promotion_metric(&claim(0, 0), 0.5) >= promotion_metric(&claim(1, 0), 0.5));
    }

    #[test]
    fn metric_punishes_idle_huge_pages_unless_tau_is_one() {
        assert!(promotion_metric(&claim(10, 10), 0.25) < promotion_metric(&claim(10, 0), 0.25));
        let same = promotion_metric(&claim(10, 10), 1.0) - promotion_metric(&claim(10, 0), 1.0);
        assert!(same.abs() < 1e-12);
    }

    #[test]
    fn metric_equals_the_equation_when_half_is_idle() {
        let m = promotion_metric(&claim(4, 2), 0.5);
        assert!((m - 10_000.0 / (4.0 * 2_097_152.0 * 0.75)).abs() < 1e-15);
    }

    #[test]
    fn fairness_does_not_depend_on_how_much_everybody_holds() {
        for held in [10, 1_000, 100_000] {
            let metrics = |extra| [held, held, held + extra].map(|h| promotion_metric(&claim(h, 0), 0.5));
            assert!(is_fair(&metrics(0)) && !is_fair(&metrics(held / 10)), "{held}");
        }
        assert!(is_fair(&[]));
    }

    #[test]
    fn objective_is_zero_only_when_all_are_equal() {
        assert_eq!(objective(&[2.0, 2.0, 2.0]), 0.0);
        assert!(objective(&[1.0, 2.0, 3.0]) > 1.9);
        assert_eq!(objective(&[]), 0.0);
    }
}
