//! Results of a run. Numbers only.

use crate::DeviceId;
use crate::mover::Tally;
use crate::policy::Cause;

/// One second of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Second {
    /// Requests that ended.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes written to each device by the foreground.
    pub written: Vec<u64>,
    /// Bytes read from each device by the foreground.
    pub read: Vec<u64>,
}

/// Results of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Policy.
    pub policy: String,
    /// Load.
    pub load: String,
    /// By second.
    pub seconds: Vec<Second>,
    /// Duration of each request in the measured part, in microseconds; sorted.
    pub latency_us: Vec<f32>,
    /// First second of the measured part.
    pub from_s: usize,
    /// Bytes moved or copied.
    pub moved_bytes: u64,
    /// Moves by devices and cause.
    pub moves: Vec<(DeviceId, DeviceId, Cause, Tally)>,
    /// Share of the data by device at the end.
    pub share: Vec<f64>,
    /// Requests that found no device to serve them, and were tried again.
    pub refused: u64,
    /// Requests served from memory.
    pub hits: u64,
}

impl Report {
    /// Requests a second, over seconds `from..to`.
    #[must_use]
    pub fn rate_in(&self, from: usize, to: usize) -> f64 {
        let seconds = &self.seconds[from.min(self.seconds.len())..to.min(self.seconds.len())];
        let sum: u64 = seconds.iter().map(|second| second.requests).sum();
        sum as f64 / seconds.len().max(1) as f64
    }

    /// Requests a second in the measured part.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.rate_in(self.from_s, self.seconds.len())
    }

    /// Megabytes a second in the measured part.
    #[must_use]
    pub fn megabytes(&self) -> f64 {
        let seconds = &self.seconds[self.from_s.min(self.seconds.len())..];
        let sum: u64 = seconds.iter().map(|second| second.bytes).sum();
        sum as f64 / 1e6 / seconds.len().max(1) as f64
    }

    /// Mean duration of a request in the measured part, in microseconds.
    #[must_use]
    pub fn mean_us(&self) -> f64 {
        let sum: f64 = self.latency_us.iter().map(|us| f64::from(*us)).sum();
        sum / self.latency_us.len().max(1) as f64
    }

    /// Duration within which `percent` of the requests ended, in microseconds.
    #[must_use]
    pub fn percentile_us(&self, percent: f64) -> f64 {
        let at = (self.latency_us.len() as f64 * percent / 100.0) as usize;
        let last = self.latency_us.len().saturating_sub(1);
        self.latency_us.get(at.min(last)).map_or(0.0, |us| f64::from(*us))
    }
}
