//! Measured figures of a device. Owns the averages; does not know the decisions based on them.
//!
//! Two kinds of figures: *response times* as in the papers (0.99 of the old average and 0.01 of each sample,
//! Chapter II.B), which include the time in the queue, by direction and size class; and *service times*,
//! without the queue, by a regression ([`Service`]).

mod service;

pub use service::Service;

use crate::Op;
use serde::{Deserialize, Serialize};

/// Requests of similar size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(u8)]
pub enum SizeClass {
    /// Up to 4 KiB.
    Block = 0,
    /// Up to 16 KiB.
    Small = 1,
    /// Up to 64 KiB.
    Medium = 2,
    /// Up to 256 KiB.
    Large = 3,
    /// Larger requests.
    Huge = 4,
}

impl SizeClass {
    /// All classes, smallest first.
    pub const ALL: [Self; 5] = [Self::Block, Self::Small, Self::Medium, Self::Large, Self::Huge];

    /// Returns the class of a request.
    #[must_use]
    pub const fn of(bytes: u32) -> Self {
        match bytes.div_ceil(1024) {
            0..=4 => Self::Block,
            5..=16 => Self::Small,
            17..=64 => Self::Medium,
            65..=256 => Self::Large,
            _ => Self::Huge,
        }
    }
}

/// Weight of a new sample (Chapter II.B).
const SAMPLE: f64 = 0.01;

/// An exponential average; the first samples count as a plain mean, so that it is useful at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Average {
    value: f64,
    samples: u64,
}

impl Average {
    /// Adds a sample.
    pub fn add(&mut self, sample: f64) {
        self.samples = self.samples.saturating_add(1);
        let weight = (1.0 / self.samples as f64).max(SAMPLE);
        self.value += weight * (sample - self.value);
    }

    /// The average; `None` before the first sample.
    #[must_use]
    pub const fn get(&self) -> Option<f64> {
        if self.samples == 0 { None } else { Some(self.value) }
    }

    /// Number of samples.
    #[must_use]
    pub const fn samples(&self) -> u64 {
        self.samples
    }
}

/// Figures of one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct OpFigures {
    /// Response time over all sizes, in microseconds.
    pub response_us: Average,
    /// Response time by size class, in microseconds.
    pub by_class_us: [Average; 5],
    /// Mean bytes of a request.
    pub request_bytes: Average,
    /// Requests since the start.
    pub requests: u64,
    /// Bytes since the start.
    pub bytes: u64,
}

/// The measured speed of a device. Soft state: lost at a restart, measured anew.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Reads.
    pub read: OpFigures,
    /// Writes.
    pub write: OpFigures,
    /// Mean number of requests queued or being served.
    pub depth: f64,
    /// Bytes a second, both directions.
    pub bytes_per_s: f64,
    /// Requests a second, both directions.
    pub requests_per_s: f64,
    /// Share of its channels in use, 0 to 1.
    pub busy: f64,
    /// Service times.
    pub service: Service,
}

/// Activity of a device between two ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Interval {
    /// Length in microseconds.
    pub us: f64,
    /// Integral over time of the requests queued or being served, in request × microseconds.
    pub depth_us: f64,
    /// Integral over time of the channels in use, in channel × microseconds.
    pub busy_us: f64,
    /// Reads and writes that ended.
    pub requests: [u64; 2],
    /// Their bytes.
    pub bytes: [u64; 2],
}

/// Weight of a tick in the averages over time.
const TICK: f64 = 0.2;

impl Figures {
    /// Returns the figures of one direction.
    #[must_use]
    pub const fn of(&self, op: Op) -> &OpFigures {
        match op {
            Op::Read => &self.read,
            Op::Write => &self.write,
        }
    }

    /// Records a request that took `response_us`, including its time in the queue.
    pub fn sample(&mut self, op: Op, bytes: u32, response_us: f64) {
        let figures = match op {
            Op::Read => &mut self.read,
            Op::Write => &mut self.write,
        };
        figures.response_us.add(response_us);
        figures.by_class_us[SizeClass::of(bytes) as usize].add(response_us);
        figures.request_bytes.add(f64::from(bytes));
        figures.requests += 1;
        figures.bytes += u64::from(bytes);
    }

    /// Records the activity since the last tick, on a device with `parallel` channels.
    pub fn tick(&mut self, interval: &Interval, parallel: u32) {
        if interval.us <= 0.0 {
            return;
        }
        let old = |old: f64, new: f64| old + TICK * (new - old);
        self.depth = old(self.depth, interval.depth_us / interval.us);
        self.busy = old(
            self.busy,
            interval.busy_us / interval.us / f64::from(parallel.max(1)),
        );
        let seconds = interval.us / 1e6;
        let bytes = (interval.bytes[0] + interval.bytes[1]) as f64;
        let requests = (interval.requests[0] + interval.requests[1]) as f64;
        self.bytes_per_s = old(self.bytes_per_s, bytes / seconds);
        self.requests_per_s = old(self.requests_per_s, requests / seconds);
        self.service.learn(interval);
    }

    /// Response time of a direction, in microseconds; derived from the service times before the first sample.
    #[must_use]
    pub fn response_us(&self, op: Op) -> f64 {
        let figures = self.of(op);
        let bytes = figures.request_bytes.get().unwrap_or(4096.0);
        figures
            .response_us
            .get()
            .unwrap_or_else(|| self.service.us(op, bytes))
    }

    /// Mean response time over both directions, weighted by their numbers of requests; in microseconds.
    #[must_use]
    pub fn mean_response_us(&self) -> f64 {
        let (reads, writes) = (self.read.requests as f64, self.write.requests as f64);
        let (read, write) = (self.response_us(Op::Read), self.response_us(Op::Write));
        if reads + writes == 0.0 {
            return f64::midpoint(read, write);
        }
        (reads * read + writes * write) / (reads + writes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn average_weighs_a_hundredth_of_each_sample_once_it_has_a_hundred() {
        let mut average = Average::default();
        assert_eq!(average.get(), None);
        (0..100).for_each(|_| average.add(50.0));
        average.add(150.0);
        assert!((average.get().unwrap_or(0.0) - (0.99 * 50.0 + 0.01 * 150.0)).abs() < 1e-9);
    }

    #[test]
    fn average_starts_with_the_mean_of_what_came() {
        let mut average = Average::default();
        average.add(10.0);
        average.add(20.0);
        assert_eq!(average.get(), Some(15.0));
    }

    #[test]
    fn sizes_fall_into_their_class_at_its_edges() {
        let edges = [
            (1, 0),
            (4096, 0),
            (4097, 1),
            (16384, 1),
            (65536, 2),
            (262_144, 3),
            (262_145, 4),
        ];
        for (bytes, class) in edges {
            assert_eq!(SizeClass::of(bytes) as usize, class, "{bytes}");
        }
    }

    #[test]
    fn reads_and_writes_are_measured_apart() {
        let mut figures = Figures::default();
        figures.sample(Op::Read, 4096, 100.0);
        figures.sample(Op::Write, 65536, 900.0);
        assert_eq!(figures.read.by_class_us[0].get(), Some(100.0));
        assert_eq!(figures.write.by_class_us[2].get(), Some(900.0));
        assert_eq!(figures.write.by_class_us[0].get(), None);
        assert_eq!(figures.mean_response_us(), 500.0);
    }
}
