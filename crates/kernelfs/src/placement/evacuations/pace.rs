//! How fast a job may go, and how fast it goes.

use super::super::units::UNIT;
use std::collections::VecDeque;

/// Most samples of a rate, one a second.
const SAMPLES: usize = 10;
/// Time between two samples, in milliseconds.
const SAMPLE_MS: u64 = 1000;

/// A bound on the bytes moved a second.
#[derive(Debug, Default)]
pub(super) struct Pace {
    limit_bytes_per_s: u64,
    /// Bytes that may be moved now.
    tokens: u64,
    filled_ms: Option<u64>,
}

impl Pace {
    /// Adds what the time since the last call allows. A quarter of a second's bytes may be saved up, and
    /// always two units, so that a small limit moves something in the end.
    pub(super) fn fill(&mut self, now_ms: u64, limit_bytes_per_s: u64) {
        let most = (limit_bytes_per_s / 4).max(2 * UNIT.bytes());
        let ms = now_ms.saturating_sub(self.filled_ms.unwrap_or(now_ms));
        let new = u128::from(ms) * u128::from(limit_bytes_per_s) / 1000;
        if new > 0 || self.filled_ms.is_none() || limit_bytes_per_s != self.limit_bytes_per_s {
            self.filled_ms = Some(now_ms);
        }
        let new = u64::try_from(new).unwrap_or(u64::MAX);
        self.limit_bytes_per_s = limit_bytes_per_s;
        self.tokens = self.tokens.saturating_add(new).min(most);
    }

    /// Bytes of `most` that may be moved now.
    pub(super) fn budget(&self, most: u64) -> u64 {
        match self.limit_bytes_per_s {
            0 => most,
            _ => most.min(self.tokens),
        }
    }

    pub(super) const fn spend(&mut self, bytes: u64) {
        self.tokens = self.tokens.saturating_sub(bytes);
    }
}

/// Bytes moved a second, over the last seconds.
#[derive(Debug)]
pub(super) struct Rate {
    /// Times, and bytes moved until then.
    samples: VecDeque<(u64, u64)>,
}

impl Rate {
    pub(super) fn from(now_ms: u64, moved_bytes: u64) -> Self {
        Self {
            samples: VecDeque::from([(now_ms, moved_bytes)]),
        }
    }

    pub(super) fn note(&mut self, now_ms: u64, moved_bytes: u64) {
        let last_ms = self.samples.back().map_or(0, |sample| sample.0);
        if now_ms < last_ms + SAMPLE_MS {
            return;
        }
        self.samples.push_back((now_ms, moved_bytes));
        while self.samples.len() > SAMPLES {
            self.samples.pop_front();
        }
    }

    /// The rate until now; `None`: it is not known yet.
    pub(super) fn bytes_per_s(&self, now_ms: u64, moved_bytes: u64) -> Option<u64> {
        let (from_ms, from_bytes) = *self.samples.front()?;
        let ms = now_ms.saturating_sub(from_ms);
        let bytes = moved_bytes.saturating_sub(from_bytes);
        (ms >= SAMPLE_MS).then(|| (u128::from(bytes) * 1000 / u128::from(ms)) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::{Pace, Rate, UNIT};

    #[test]
    fn pace_lets_as_much_through_as_its_limit() {
        for limit in [1, 100_000, 1 << 20, 1 << 30, u64::MAX] {
            let (mut pace, mut moved) = (Pace::default(), 0_u64);
            let seconds = 1000;
            for now_ms in (0..=seconds * 1000).step_by(100) {
                pace.fill(now_ms, limit);
                let bytes = pace.budget(4 << 20);
                if bytes >= UNIT.bytes() {
                    pace.spend(bytes);
                    moved = moved.saturating_add(bytes);
                }
            }
            let most = limit.saturating_mul(seconds).saturating_add(2 * UNIT.bytes());
            assert!(moved <= most, "{moved} of {most}");
            let least = (limit.saturating_mul(seconds) / 10 * 9).min(40 << 30);
            assert!(
                moved + 2 * UNIT.bytes() > least.min(seconds * 10 * (4 << 20)),
                "{moved} at {limit}"
            );
        }
        let mut none = Pace::default();
        none.fill(5, 0);
        assert_eq!(none.budget(123), 123, "without a limit");
    }

    #[test]
    fn rate_is_that_of_the_last_seconds() {
        let mut rate = Rate::from(0, 500);
        assert_eq!(rate.bytes_per_s(999, 900), None, "too early to say");
        for second in 1..=60_u64 {
            rate.note(second * 1000, 500 + second * 100);
        }
        assert_eq!(rate.bytes_per_s(60_000, 6500), Some(100));
        for second in 61..=100_u64 {
            rate.note(second * 1000, 6500);
        }
        assert_eq!(rate.bytes_per_s(100_000, 6500), Some(0), "it has stopped");
    }
}
