//! Admission policies: the choice of objects that are worth a write.

use crate::hash::KeyHash;

/// The choice of put objects that are written.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Admission {
    /// All objects.
    #[default]
    All,
    /// Objects put for the second time within about `window` objects; two bytes of memory for each.
    SecondRequest {
        /// Number of remembered objects.
        window: u32,
    },
    /// A random share of the objects, 0 to 1.
    Probability(f64),
}

/// The state of an admission policy.
#[derive(Debug)]
pub struct Door {
    policy: Admission,
    /// Two generations of a Bloom filter of four probes; the older one is dropped when the newer is full.
    filters: [Vec<u64>; 2],
    in_newer: u32,
    random: u64,
}

/// Bits of a filter for each object.
const FILTER_BITS: usize = 8;

impl Door {
    /// A door that has seen no objects. `seed` starts its random choices.
    pub fn new(policy: Admission, seed: u64) -> Self {
        let words = match policy {
            Admission::SecondRequest { window } => (window.max(64) as usize / 2 * FILTER_BITS).div_ceil(64),
            _ => 0,
        };
        Self {
            policy,
            filters: [vec![0; words], vec![0; words]],
            in_newer: 0,
            random: seed | 1,
        }
    }

    /// Decides whether to write an object.
    pub fn admits(&mut self, hash: KeyHash) -> bool {
        match self.policy {
            Admission::All => true,
            Admission::Probability(share) => {
                // xorshift64*
                self.random ^= self.random >> 12;
                self.random ^= self.random << 25;
                self.random ^= self.random >> 27;
                let drawn = self.random.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11;
                (drawn as f64) < share * (1u64 << 53) as f64
            }
            Admission::SecondRequest { window } => self.seen(hash, window),
        }
    }

    fn seen(&mut self, hash: KeyHash, window: u32) -> bool {
        let bits = (self.filters[0].len() * 64) as u64;
        let probes = [0, 32, 64, 96].map(|shift| (u64::from((hash.0 >> shift) as u32) * bits) >> 32);
        let has = |filter: &[u64]| {
            probes
                .iter()
                .all(|&bit| filter[bit as usize / 64] >> (bit % 64) & 1 == 1)
        };
        if self.filters.iter().any(|filter| has(filter)) {
            return true;
        }
        if self.in_newer >= window.max(64) / 2 {
            self.filters.swap(0, 1);
            self.filters[0].fill(0);
            self.in_newer = 0;
        }
        for bit in probes {
            self.filters[0][bit as usize / 64] |= 1 << (bit % 64);
        }
        self.in_newer += 1;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::{Admission, Door};
    use crate::hash::{KeyHash, Secret};

    fn hash(n: u32) -> KeyHash {
        KeyHash::of(&Secret([3; 16]), &n.to_le_bytes())
    }

    #[test]
    fn second_request_admits_what_comes_back_and_little_else() {
        let mut door = Door::new(Admission::SecondRequest { window: 10_000 }, 1);
        let first = (0..4000).filter(|&n| door.admits(hash(n))).count();
        assert!(first < 120, "false positives: {first}");
        assert!((0..4000).all(|n| door.admits(hash(n))));
        // A put is forgotten after a window.
        (100_000..120_000).for_each(|n| {
            door.admits(hash(n));
        });
        let later = (0..4000).filter(|&n| door.admits(hash(n))).count();
        assert!(later < 400, "{later}");
    }

    #[test]
    fn probability_admits_its_share() {
        let mut door = Door::new(Admission::Probability(0.25), 7);
        let admitted = (0..40_000).filter(|&n| door.admits(hash(n))).count();
        assert!((9_000..11_000).contains(&admitted), "{admitted}");
    }
}
