//! Service times of a device: what a request costs it, without the time in the queue. Owns the regression;
//! knows no policy.
//!
//! Response times mix what a request costs with what was queued before it, so under load reads and writes of
//! one queue look alike. But the time that a device's channels are at work is the sum of what its requests
//! cost:
//!
//! ```text
//! busy = reads · a_r + read_KiB · b_r + writes · a_w + write_KiB · b_w      (channel × µs, each interval)
//! ```
//!
//! Recursive least squares with forgetting finds the four from intervals whose mixes differ. What it starts
//! from is a probe (a few requests when the device is added); a device without load goes back to it slowly,
//! so that one that was slow once is tried again.

use super::Interval;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Weight that old intervals keep at each new one: a memory of about 200.
const FORGET: f64 = 0.995;
/// Share of the way back to the probe that an interval without load goes.
const RETURN: f64 = 0.002;
/// How far one interval may move a coefficient, as a share of it: one odd interval is no new device.
const STEP: f64 = 0.25;
/// Least of what was probed that a coefficient may become, and most.
const RANGE: (f64, f64) = (0.02, 200.0);

/// `a + b · KiB` for reads and writes, in channel × microseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Service {
    /// `a_r`, `b_r`, `a_w`, `b_w`.
    now: [f64; 4],
    probed: [f64; 4],
    /// Covariance, in units of the probed coefficients.
    spread: [[f64; 4]; 4],
}

impl Default for Service {
    /// A device of which nothing is known: 1 ms a request, 10 µs a KiB.
    fn default() -> Self {
        Self::probed([1000.0, 10.0], [1000.0, 10.0])
    }
}

impl Service {
    /// From a probe: microseconds a request and a KiB, of reads and writes.
    #[must_use]
    pub fn probed(read: [f64; 2], write: [f64; 2]) -> Self {
        let probed = [read[0], read[1], write[0], write[1]].map(|us| us.max(1e-3));
        let mut spread = [[0.0; 4]; 4];
        for (at, row) in spread.iter_mut().enumerate() {
            row[at] = 1.0;
        }
        Self {
            now: probed,
            probed,
            spread,
        }
    }

    /// What a request costs, in channel × microseconds.
    #[must_use]
    pub fn us(&self, op: Op, bytes: f64) -> f64 {
        let at = match op {
            Op::Read => 0,
            Op::Write => 2,
        };
        self.now[at] + self.now[at + 1] * bytes / 1024.0
    }

    /// Takes in one interval.
    pub(super) fn learn(&mut self, interval: &Interval) {
        let requests = interval.requests.map(|n| n as f64);
        if requests[0] + requests[1] == 0.0 {
            if interval.busy_us == 0.0 {
                for (now, probed) in self.now.iter_mut().zip(self.probed) {
                    *now += RETURN * (probed - *now);
                }
            }
            return;
        }
        let kib = interval.bytes.map(|bytes| bytes as f64 / 1024.0);
        let raw = [requests[0], kib[0], requests[1], kib[1]];
        // In units of what was probed, so that the four are of one size; the whole divided by the expected
        // total, so that every interval weighs alike.
        let expected: f64 = raw.iter().zip(self.now).map(|(x, c)| x * c).sum();
        if expected <= 0.0 {
            return;
        }
        let x: [f64; 4] = std::array::from_fn(|at| raw[at] * self.probed[at] / expected);
        let y = interval.busy_us / expected;
        self.update(&x, y);
    }

    fn update(&mut self, x: &[f64; 4], y: f64) {
        let px: [f64; 4] = std::array::from_fn(|row| (0..4).map(|col| self.spread[row][col] * x[col]).sum());
        let xpx: f64 = (0..4).map(|at| x[at] * px[at]).sum();
        // Noise of an interval: a tenth of its total.
        let scale = 0.1 * FORGET + xpx;
        let scaled: [f64; 4] = std::array::from_fn(|at| self.now[at] / self.probed[at]);
        let error = y - (0..4).map(|at| x[at] * scaled[at]).sum::<f64>();
        for at in 0..4 {
            let step = (px[at] / scale * error).clamp(-STEP * scaled[at], STEP * scaled[at]);
            self.now[at] = (scaled[at] + step).clamp(RANGE.0, RANGE.1) * self.probed[at];
        }
        for row in 0..4 {
            for col in 0..4 {
                let less = px[row] * px[col] / scale;
                let kept = (self.spread[row][col] - less) / FORGET;
                // Without news of a coefficient its spread would grow for ever.
                self.spread[row][col] = kept.clamp(-4.0, 4.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(reads: u64, writes: u64, bytes: u64, cost: [f64; 4]) -> Interval {
        let kib = |n: u64| n as f64 * bytes as f64 / 1024.0;
        let busy =
            reads as f64 * cost[0] + kib(reads) * cost[1] + writes as f64 * cost[2] + kib(writes) * cost[3];
        Interval {
            us: 100_000.0,
            busy_us: busy,
            requests: [reads, writes],
            bytes: [reads * bytes, writes * bytes],
            ..Interval::default()
        }
    }

    #[test]
    fn regression_tells_slow_writes_from_fast_reads_of_one_queue() {
        let mut service = Service::probed([1000.0, 10.0], [1000.0, 10.0]);
        let truth = [150.0, 4.0, 5000.0, 20.0];
        for at in 0..400u64 {
            let writes = 5 + at * 7 % 11;
            service.learn(&interval(20 + at * 13 % 17, writes, 4096 << (at % 3), truth));
        }
        for (op, want) in [(Op::Read, 150.0 + 4.0 * 8.0), (Op::Write, 5000.0 + 20.0 * 8.0)] {
            let got = service.us(op, 8192.0);
            assert!((got / want - 1.0).abs() < 0.25, "{op:?}: {got} for {want}");
        }
    }

    #[test]
    fn service_returns_to_the_probe_when_a_device_is_not_used() {
        let mut service = Service::probed([100.0, 1.0], [100.0, 1.0]);
        for _ in 0..200 {
            service.learn(&interval(10, 10, 4096, [5000.0, 10.0, 5000.0, 10.0]));
        }
        assert!(service.us(Op::Read, 4096.0) > 2000.0);
        for _ in 0..3000 {
            service.learn(&Interval {
                us: 100_000.0,
                ..Interval::default()
            });
        }
        assert!(service.us(Op::Read, 4096.0) < 200.0);
    }

    #[test]
    fn service_stays_positive_whatever_is_measured() {
        let mut service = Service::default();
        for at in 0..1000u64 {
            let mut odd = interval(at % 3, at % 5, 4096, [0.0; 4]);
            odd.busy_us = if at % 2 == 0 { 0.0 } else { 1e12 };
            service.learn(&odd);
            for op in [Op::Read, Op::Write] {
                let us = service.us(op, 4096.0);
                assert!(us.is_finite() && us > 0.0, "{us}");
            }
        }
    }
}
