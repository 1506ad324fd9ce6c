//! T from a miss-ratio curve: how long slabs rest between accesses, of a sample of them, and the shortest
//! time without access after which leaving the fast tier costs no hits worth speaking of.
//!
//! After SHARDS: a slab is in the sample or not, by a hash of its number, so that its reuse times are whole.
//! Knows no tier and no clock.

/// Most slabs that are sampled.
const SAMPLE: u64 = 4096;
/// Longest time that is told apart, seconds: twice the longest T.
const LONGEST_S: u64 = 7200;
/// Reuses before the curve is believed.
const BELIEVED: f64 = 32.0;
/// Hits of a hundred that may be lost to a shorter time.
const SLACK: f64 = 0.02;
/// The share of a tier that the slabs within the time may fill.
const FILL: f64 = 0.9;
/// The share of the times that is kept at each choice.
const KEPT: f64 = 0.97;
/// Seconds between two choices.
pub const CHOOSE_S: u64 = 10;

/// Times between accesses, and ages.
#[derive(Debug, Clone, Default)]
pub struct Reuse {
    /// Accesses by the seconds since the one before, in buckets.
    times: Vec<f64>,
    /// Slabs by the seconds since their last access, in buckets; summed over the looks since the last choice.
    ages: Vec<f64>,
    looks: f64,
}

/// The bucket of a time: each second up to 64, then 16 for each doubling.
fn bucket(seconds: u64) -> usize {
    let seconds = seconds.min(LONGEST_S);
    if seconds < 64 {
        return seconds as usize;
    }
    let doubling = seconds.ilog2();
    let part = (seconds >> (doubling - 4)) & 15;
    64 + (doubling as usize - 6) * 16 + part as usize
}

/// The longest time of a bucket.
fn longest(bucket: usize) -> u64 {
    if bucket < 64 {
        return bucket as u64;
    }
    let (doubling, part) = ((bucket - 64) / 16 + 6, (bucket - 64) as u64 % 16);
    ((16 + part + 1) << (doubling - 4)) - 1
}

/// Whether a slab is in the sample, of about this many slabs.
#[must_use]
pub fn is_sampled(slab: u32, slabs: u64) -> bool {
    // A multiplicative hash spreads numbers that follow each other.
    let hash = u64::from(slab.wrapping_mul(0x9e37_79b1));
    slabs <= SAMPLE || hash * slabs < SAMPLE << 32
}

impl Reuse {
    /// Notes an access `seconds` after the one before.
    pub fn note(&mut self, seconds: u64) {
        add(&mut self.times, bucket(seconds), 1.0);
    }

    /// Notes that a slab was not accessed for `seconds`, at a look.
    pub fn age(&mut self, seconds: u64) {
        add(&mut self.ages, bucket(seconds), 1.0);
    }

    /// Ends a look at `slabs` slabs, those that were not sampled among them.
    pub fn end_look(&mut self, slabs: u64) {
        // Each one of the sample stands for so many.
        self.looks += (SAMPLE as f64 / slabs as f64).min(1.0);
    }

    /// The share of accesses that came more than `seconds` after the one before.
    #[must_use]
    pub fn misses(&self, seconds: u64) -> f64 {
        let all: f64 = self.times.iter().sum();
        if all == 0.0 {
            return 0.0;
        }
        self.times.iter().skip(bucket(seconds) + 1).sum::<f64>() / all
    }

    /// The shortest time without access, in seconds, after which slabs may leave a tier of `slabs` slabs: of
    /// those times within which at most nine tenths of the tier are in use, the shortest whose misses are
    /// within 2 % of the longest one's. `None` while little is known. Forgets 3 % of the
    /// times, and all ages.
    pub fn choose(&mut self, slabs: u32) -> Option<u64> {
        let (ages, looks) = (std::mem::take(&mut self.ages), std::mem::take(&mut self.looks));
        let all: f64 = self.times.iter().sum();
        if all < BELIEVED || looks == 0.0 {
            return None;
        }
        let room = f64::from(slabs) * FILL;
        let (mut held, mut fits) = (0.0, 0);
        for number in 0..=bucket(LONGEST_S) {
            held += ages.get(number).copied().unwrap_or(0.0) / looks;
            if held > room && number > 0 {
                break;
            }
            fits = number;
        }
        let least = self.misses(longest(fits)) + SLACK;
        let shortest = (0..=fits).find(|number| self.misses(longest(*number)) <= least);
        for count in &mut self.times {
            *count *= KEPT;
        }
        shortest.map(|number| longest(number).clamp(1, LONGEST_S))
    }
}

fn add(counts: &mut Vec<f64>, at: usize, weight: f64) {
    if counts.len() <= at {
        counts.resize(at + 1, 0.0);
    }
    counts[at] += weight;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_in_order_and_hold_what_they_say() {
        for seconds in 0..=LONGEST_S {
            let bucket = bucket(seconds);
            assert!(
                longest(bucket) >= seconds && (bucket == 0 || longest(bucket - 1) < seconds),
                "{seconds}"
            );
        }
    }

    #[test]
    fn sample_is_all_of_few_slabs_and_a_bounded_part_of_many() {
        assert!((0..1000).all(|slab| is_sampled(slab, 1000)));
        let sampled = (0..1 << 20).filter(|slab| is_sampled(*slab, 1 << 20)).count();
        assert!((3_500..4_700).contains(&sampled), "{sampled}");
    }

    /// `slabs` slabs, each accessed every `period` seconds, for ten minutes.
    fn cycle(slabs: u64, period: u64) -> Reuse {
        let mut reuse = Reuse::default();
        for now in 0..600 {
            for slab in 0..slabs {
                let age = (now + slab) % period;
                if age == 0 {
                    reuse.note(period);
                }
                reuse.age(age);
            }
            reuse.end_look(slabs);
        }
        reuse
    }

    #[test]
    fn time_is_the_period_where_the_slabs_fit_and_short_where_they_do_not() {
        assert_eq!(cycle(20, 30).choose(40), Some(30));
        assert_eq!(
            cycle(20, 100).choose(40).map(|time| (100..104).contains(&time)),
            Some(true)
        );
        // 20 slabs in a tier of 10: no time keeps them, so none is kept in vain.
        assert_eq!(cycle(20, 30).choose(10), Some(1));
        assert_eq!(Reuse::default().choose(10), None, "nothing is known");
    }

    #[test]
    fn slabs_that_never_come_again_are_not_waited_for() {
        let mut reuse = cycle(10, 4);
        for age in 0..18_000 {
            reuse.age(age / 30);
        }
        assert_eq!(reuse.choose(1000), Some(4));
    }
}
