//! State of one 2 MiB region: util bit vector, access bit vector and its moving average (§3.3.1).

use crate::types::UtilVector;

/// One region of one process.
#[derive(Debug, Clone, Default)]
pub struct Region {
    /// Base pages in use.
    pub util: UtilVector,
    /// Base pages that only our own collapse filled, with zeros: the page table shows them as present, but
    /// the program does not use them. Exact again after a split, which frees them.
    pub filled: UtilVector,
    /// The last eight observations, newest in bit 0.
    pub access: u8,
    /// Exponential moving average F of the weight of `access` (equation 3.1).
    pub frequency: f32,
    /// Number of observations, saturating; 0: accesses are unknown.
    pub looks: u8,
    /// Whether its contents were read in this round.
    pub inspected: bool,
    /// Whether reading its contents found it hollow; the next survey must not overwrite that with "all used".
    pub hollow: bool,
    /// Whether the manager made it a huge page.
    pub made: bool,
    /// Whether one huge page maps it.
    pub huge: bool,
    /// Whether it was a huge page before and was split (a base page was freed in it).
    pub was_huge: bool,
    /// Whether it may become a huge page at all.
    pub eligible: bool,
    /// Whether it waits in the high priority list.
    pub queued: bool,
    /// Whether it is excluded from same-page merging.
    pub sharing_denied: bool,
    /// Whether promotion was postponed because same-page merging saves memory in it.
    pub merged: bool,
    /// Failed promotions; the wait doubles with each.
    pub failures: u8,
    /// Earliest time of the next attempt to promote.
    pub retry_ms: u64,
}

impl Region {
    /// Records an observation: shifts the access vector and updates F = α·weight + (1 − α)·F.
    pub fn looked(&mut self, touched: bool, alpha: f64) {
        self.looks = self.looks.saturating_add(1);
        self.access = self.access << 1 | u8::from(touched);
        let weight = self.access.count_ones() as f32;
        self.frequency = alpha as f32 * weight + (1.0 - alpha as f32) * self.frequency;
    }

    /// Whether F ≥ `threshold`: by default three quarters of the vector's size, 6 of 8.
    pub fn frequently_accessed(&self, threshold: f64) -> bool {
        f64::from(self.frequency) >= threshold
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequency_follows_equation_3_1_when_always_touched() {
        let mut r = Region::default();
        let mut f = 0.0f32;
        for n in 1..=20 {
            r.looked(true, 0.4);
            f = 0.4 * n.min(8) as f32 + 0.6 * f;
            assert!((r.frequency - f).abs() < 1e-4);
        }
        assert!(r.frequently_accessed(6.0));
    }

    #[test]
    fn region_is_not_frequent_before_enough_looks_and_stops_when_idle() {
        let mut r = Region::default();
        for _ in 0..6 {
            r.looked(true, 0.4);
        }
        assert!(!r.frequently_accessed(6.0), "{}", r.frequency);
        for _ in 0..10 {
            r.looked(true, 0.4);
        }
        assert!(r.frequently_accessed(6.0));
        for _ in 0..4 {
            r.looked(false, 0.4);
        }
        assert!(!r.frequently_accessed(6.0), "{}", r.frequency);
    }
}
