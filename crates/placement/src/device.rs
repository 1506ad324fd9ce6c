//! A device as policies see it: how full it is, whether it can be used, what was measured. No decisions.

use crate::figures::Figures;
use crate::types::{DeviceId, DeviceState};
use varve_format::Tier;

/// A device as policies see it.
#[derive(Debug, Clone)]
pub struct DeviceView {
    /// Which.
    pub id: DeviceId,
    /// What kind of medium; a hint for `hierarchy` and for rules only.
    pub tier: Tier,
    /// Bytes that data may have.
    pub total_bytes: u64,
    /// Bytes of them that are free now.
    pub free_bytes: u64,
    /// Whether it can be used.
    pub state: DeviceState,
    /// Requests it serves at once (its channels). 1 for a disk.
    pub parallel: u32,
    /// Requests queued or under way now.
    pub queue: u32,
    /// What was measured.
    pub figures: Figures,
}

impl DeviceView {
    /// Share of the device in use, 0 to 1.
    #[must_use]
    pub fn fill(&self) -> f64 {
        if self.total_bytes == 0 {
            return 1.0;
        }
        1.0 - self.free_bytes as f64 / self.total_bytes as f64
    }

    /// Whether `bytes` more fit and leave it at most `mark` full.
    #[must_use]
    pub fn has_room(&self, bytes: u64, mark: f64) -> bool {
        let kept = self.total_bytes as f64 * (1.0 - mark);
        self.free_bytes as f64 - bytes as f64 >= kept
    }
}
