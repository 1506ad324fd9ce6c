//! Service times of a device: the channel time of a request, without the time in the queue. Owns the
//! regression; knows no policy.
//!
//! Response times include the requests queued before, so under load reads and writes of one queue look alike.
//! But the total time for which a device's channels are in use is the sum of the service times of its
//! requests:
//!
//! ```text
//! busy = reads · a_r + read_KiB · b_r + writes · a_w + write_KiB · b_w      (channel × µs, each interval)
//! ```
//!
//! Each of the four coefficients is the value from the probe (a few requests when the device is added), times
//! a factor of its own (*shape*), times one factor for the whole device (*pace*). The pace follows within
//! seconds, for any mix of requests. The shape is a least-squares fit over the last 200 observations or so,
//! as far as their mixes differ; directions that they do not determine keep the probe's values, because the
//! probe has a weight in every solution (ridge regression). So no coefficient drifts, however alike the
//! observations are. A device without load returns to its probe slowly, so that a device that was slow once
//! is tried again.
//!
//! A request that ends in one interval may have been served in the interval before. So intervals are merged
//! until they hold the work of many requests: an *observation*.

use super::Interval;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Weight of a new observation in the shape: a memory of about 200 observations.
const FORGET: f64 = 0.005;
/// Weight of a new observation in the pace: a memory of about 20.
const FOLLOW: f64 = 0.05;
/// Work of an observation, in requests of the more expensive direction.
const ENOUGH: f64 = 32.0;
/// Prior variance of the factor of one coefficient around the probe: a standard deviation of a half.
const DOUBT: f64 = 0.25;
/// Variance of an observation: the initial estimate, and the lower bound.
const NOISE: (f64, f64) = (0.1, 0.001);
/// Weight of the probe in the pace, in channel × microseconds.
const PROBE_US: f64 = 100_000.0;
/// Share of the remaining distance to the probe that an interval without load covers.
const RETURN: f64 = 0.005;
/// Smallest and largest factor by which a coefficient may differ from the probe.
const RANGE: (f64, f64) = (0.02, 200.0);
/// Passes over the four coefficients for one solution; each solution starts from the previous one.
const PASSES: usize = 32;

/// `a + b · KiB` for reads and writes, in channel × microseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Service {
    /// `a_r`, `b_r`, `a_w`, `b_w`.
    probed: [f64; 4],
    shape: [f64; 4],
    /// Weighted sums over observations of `x·xᵀ` and `x·y`. `x`: shares of the four coefficients in the time
    /// that the probe predicts; `y`: the actual time as a multiple of the predicted one, at a pace of 1.
    products: [[f64; 4]; 4],
    moments: [f64; 4],
    /// Variance of `y` around the prediction of the shape.
    noise: f64,
    /// Actual time at work, and the time that probe and shape predict; their ratio is the pace.
    worked_us: f64,
    expected_us: f64,
    /// The observation being collected: requests and KiB of reads and of writes, and time at work.
    open: [f64; 4],
    open_us: f64,
}

impl Default for Service {
    /// A device without a probe: 1 ms a request, 10 µs a KiB.
    fn default() -> Self {
        Self::probed([1000.0, 10.0], [1000.0, 10.0])
    }
}

impl Service {
    /// Starts from a probe: microseconds a request and a KiB, of reads and writes.
    #[must_use]
    pub fn probed(read: [f64; 2], write: [f64; 2]) -> Self {
        Self {
            probed: [read[0], read[1], write[0], write[1]].map(|us| us.max(1e-3)),
            shape: [1.0; 4],
            products: [[0.0; 4]; 4],
            moments: [0.0; 4],
            noise: NOISE.0,
            worked_us: PROBE_US,
            expected_us: PROBE_US,
            open: [0.0; 4],
            open_us: 0.0,
        }
    }

    /// Service time of a request, in channel × microseconds.
    #[must_use]
    pub fn us(&self, op: Op, bytes: f64) -> f64 {
        let at = match op {
            Op::Read => 0,
            Op::Write => 2,
        };
        self.now(at) + self.now(at + 1) * bytes / 1024.0
    }

    fn now(&self, at: usize) -> f64 {
        (self.shape[at] * self.pace()).clamp(RANGE.0, RANGE.1) * self.probed[at]
    }

    fn pace(&self) -> f64 {
        (self.worked_us / self.expected_us).clamp(RANGE.0, RANGE.1)
    }

    /// Records one interval.
    pub(super) fn learn(&mut self, interval: &Interval) {
        let [reads, writes] = interval.requests.map(|n| n as f64);
        let [read_kib, write_kib] = interval.bytes.map(|bytes| bytes as f64 / 1024.0);
        if reads + writes == 0.0 && interval.busy_us == 0.0 {
            return self.go_back();
        }
        for (sum, new) in self.open.iter_mut().zip([reads, read_kib, writes, write_kib]) {
            *sum += new;
        }
        self.open_us += interval.busy_us;
        let probed: [f64; 4] = std::array::from_fn(|at| self.open[at] * self.probed[at]);
        let dear = |at: usize| (probed[at] + probed[at + 1]) / self.open[at].max(1.0);
        if probed.iter().sum::<f64>() >= ENOUGH * dear(0).max(dear(2)).max(1e-3) {
            self.observe(&probed);
            (self.open, self.open_us) = ([0.0; 4], 0.0);
        }
    }

    /// Ends an observation. `probed`: the times that the probe predicts for each of the four coefficients.
    fn observe(&mut self, probed: &[f64; 4]) {
        let busy_us = self.open_us;
        let expected: f64 = probed.iter().zip(self.shape).map(|(us, shape)| us * shape).sum();
        self.worked_us += busy_us - FOLLOW * self.worked_us;
        self.expected_us += expected - FOLLOW * self.expected_us;
        let all: f64 = probed.iter().sum();
        let (x, y) = (probed.map(|us| us / all), busy_us / self.pace() / all);
        for (at, row) in self.products.iter_mut().enumerate() {
            for (sum, other) in row.iter_mut().zip(x) {
                *sum += x[at] * other - FORGET * *sum;
            }
            self.moments[at] += x[at] * y - FORGET * self.moments[at];
        }
        let error = y - x.iter().zip(self.shape).map(|(x, shape)| x * shape).sum::<f64>();
        self.noise += FOLLOW * (error * error - self.noise);
        self.solve();
    }

    /// Moves the measured values a step towards the probe.
    fn go_back(&mut self) {
        for (moment, row) in self.moments.iter_mut().zip(&self.products) {
            *moment += RETURN * (row.iter().sum::<f64>() - *moment);
        }
        self.worked_us += RETURN * (self.expected_us - self.worked_us);
        self.solve();
    }

    /// Solves `(products + ridge) · shape = moments + ridge` within [`RANGE`], by coordinate descent: the
    /// matrix is positive definite, so each pass comes nearer. The ridge is the weight of the probe relative
    /// to one observation.
    fn solve(&mut self) {
        let ridge = self.noise.max(NOISE.1) / DOUBT;
        for _ in 0..PASSES {
            for at in 0..4 {
                let others: f64 = (0..4)
                    .filter(|other| *other != at)
                    .map(|other| self.products[at][other] * self.shape[other])
                    .sum();
                let best = (self.moments[at] + ridge - others) / (self.products[at][at] + ridge);
                self.shape[at] = best.clamp(RANGE.0, RANGE.1);
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
    fn long_loads_of_one_mix_do_not_carry_the_times_away() {
        // One process, then ten: mixes differ by chance only, and some intervals are half erasing.
        let truth = [105.0, 14.0, 250.0, 50.0];
        let mut service = Service::probed([105.0, 14.0], [250.0, 50.0]);
        let mut rng = fastrand::Rng::with_seed(1);
        for at in 0..20_000 {
            let channels = if at % 4000 < 2000 { 1 } else { 4 };
            let writes = (0..200 * channels).filter(|_| rng.u32(0..100) < 53).count() as u64;
            let reads = 200 * channels - writes;
            let bytes = [reads * 18_000, writes * 6000].map(|sum| sum + rng.u64(0..20_000));
            let kib = bytes.map(|bytes| bytes as f64 / 1024.0);
            let us =
                reads as f64 * truth[0] + kib[0] * truth[1] + writes as f64 * truth[2] + kib[1] * truth[3];
            let erased = rng.u64(0..50) < channels;
            let erasing = if erased { 40_000.0 * channels as f64 } else { 0.0 };
            let one = Interval {
                busy_us: us * (0.95 + 0.1 * rng.f64()) + erasing,
                requests: [reads, writes],
                bytes,
                ..interval(0, 0, 0, truth)
            };
            service.learn(&one);
            for (op, bytes) in [(Op::Read, 18_000.0), (Op::Write, 6000.0), (Op::Write, 65_536.0)] {
                let base = if op == Op::Read { 0 } else { 2 };
                let want = truth[base] + truth[base + 1] * bytes / 1024.0;
                let ratio = service.us(op, bytes) / want;
                assert!(
                    (0.6..1.6).contains(&ratio),
                    "{op:?} of {bytes} bytes after {at}: {ratio:.2}"
                );
            }
        }
    }

    #[test]
    fn device_that_is_slower_as_a_whole_is_known_to_be_after_seconds() {
        let mut service = Service::probed([100.0, 1.0], [300.0, 3.0]);
        let truth = [3000.0, 30.0, 9000.0, 90.0];
        (0..1000).for_each(|_| service.learn(&interval(20, 20, 4096, [100.0, 1.0, 300.0, 3.0])));
        (0..50).for_each(|_| service.learn(&interval(20, 20, 4096, truth)));
        for (op, probed) in [(Op::Read, 104.0), (Op::Write, 312.0)] {
            let ratio = service.us(op, 4096.0) / probed;
            assert!(ratio > 4.0, "{op:?}: {ratio:.1} times");
        }
    }

    #[test]
    fn time_at_work_on_requests_longer_than_an_interval_is_counted() {
        let mut service = Service::probed([1000.0, 1.0], [1000.0, 1.0]);
        for at in 0..4000 {
            // Each request takes four intervals.
            let ended = u64::from(at % 4 == 3);
            let mut one = interval(ended, 0, 4096, [0.0; 4]);
            one.busy_us = 100_000.0;
            service.learn(&one);
        }
        let us = service.us(Op::Read, 4096.0);
        assert!(us > 150_000.0, "{us}");
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
