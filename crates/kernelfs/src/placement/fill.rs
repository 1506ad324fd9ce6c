//! How full tiers are, for data.

use varve_format::Tier;
use varve_store::TierStats;

/// Fill levels of tiers, in percent of their space for data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Marks {
    /// From here on data moves down, and new data goes elsewhere while another tier has room.
    pub(super) high: u64,
    /// Data moves down until this level.
    pub(super) low: u64,
}

/// Fill level of a tier, for data, in blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fill {
    /// That data may occupy.
    pub(super) usable: u64,
    /// Free ones of them.
    pub(super) left: u64,
}

impl Fill {
    pub(super) fn of(tier: Tier, stats: &TierStats) -> Self {
        let kept = match tier {
            Tier::Nvm => stats.kept,
            Tier::Ssd | Tier::Hdd => stats.unit_blocks,
        };
        Self {
            usable: stats.total.saturating_sub(kept),
            left: stats.free.saturating_sub(kept),
        }
    }

    fn used(self) -> u64 {
        self.usable.saturating_sub(self.left)
    }

    pub(super) fn percent(self) -> u64 {
        (self.used() * 100).checked_div(self.usable).unwrap_or(100)
    }

    /// Returns the number of blocks until the tier is `mark` percent full.
    pub(super) fn below(self, mark: u64) -> u64 {
        (self.usable * mark / 100).saturating_sub(self.used())
    }
}
