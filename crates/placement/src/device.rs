//! A device as policies see it: its fill, its state, its measured figures. No decisions.

use crate::figures::Figures;
use crate::types::{DeviceId, DeviceState};
use std::borrow::Cow;
use varve_format::Tier;

/// A device as policies see it.
#[derive(Debug, Clone)]
pub struct DeviceView {
    /// Its number.
    pub id: DeviceId,
    /// Its name, for reasons.
    pub name: Cow<'static, str>,
    /// Kind of medium; a hint for `hierarchy` and for rules only.
    pub tier: Tier,
    /// Bytes that data may occupy.
    pub total_bytes: u64,
    /// Free bytes of them.
    pub free_bytes: u64,
    /// Bytes that were freed and become free soon.
    pub pending_bytes: u64,
    /// Its state.
    pub state: DeviceState,
    /// Requests that it serves at once (its channels). 1 for a disk.
    pub parallel: u32,
    /// Requests queued or being served.
    pub queue: u32,
    /// Its measured figures.
    pub figures: Figures,
}

impl DeviceView {
    /// Share of the device in use, 0 to 1. What becomes free soon is not.
    #[must_use]
    pub fn fill(&self) -> f64 {
        if self.total_bytes == 0 {
            return 1.0;
        }
        1.0 - (self.free_bytes + self.pending_bytes) as f64 / self.total_bytes as f64
    }

    /// Its fill in whole percent, for reasons.
    #[must_use]
    pub fn percent(&self) -> u64 {
        (self.fill() * 100.0) as u64
    }

    /// Its fill when `bytes` more are on it.
    #[must_use]
    pub fn fill_with(&self, bytes: u64) -> f64 {
        self.fill() + bytes as f64 / self.total_bytes.max(1) as f64
    }

    /// Whether `bytes` more fit and leave it at most at a fill of `mark`.
    #[must_use]
    pub fn has_room(&self, bytes: u64, mark: f64) -> bool {
        let kept = self.total_bytes as f64 * (1.0 - mark);
        self.free_bytes as f64 - bytes as f64 >= kept
    }
}
