//! What jobs empty: how much is on it, and the room that others have for it.

use super::super::fill::Fill;
use super::Evacuations;
use std::ops::Range;
use varve_format::Tier;
use varve_store::{DeviceStatus, DeviceUse, Emptied, SpaceStats};

/// The pool's space, as it is now.
#[derive(Clone, Copy)]
pub(crate) struct Seen<'s> {
    pub(crate) space: &'s SpaceStats,
    /// The devices of SSD and HDD; may be none while no device is emptied.
    pub(crate) devices: &'s [DeviceStatus],
}

/// What empties a device, once it is begun.
pub(crate) const fn emptied(device: &DeviceStatus) -> Emptied {
    Emptied::Device {
        tier: device.tier,
        first: device.numbers.0,
    }
}

impl Seen<'_> {
    pub(super) fn device(&self, of: Emptied) -> Option<&DeviceStatus> {
        self.devices.iter().find(|device| emptied(device) == of)
    }

    /// Blocks in use.
    pub(crate) fn used(&self, of: Emptied) -> u64 {
        let stats = &self.space.tiers[of.tier() as usize];
        match of {
            Emptied::Tier(_) => stats.total.saturating_sub(stats.free + stats.pending),
            Emptied::Device { .. } => self.device(of).map_or(0, DeviceStatus::used),
        }
    }

    /// Blocks that were freed and may still be read.
    pub(super) fn pending(&self, of: Emptied) -> u64 {
        match of {
            Emptied::Tier(tier) => self.space.tiers[tier as usize].pending,
            Emptied::Device { .. } => self.device(of).map_or(0, |device| device.pending),
        }
    }

    /// Its block numbers.
    pub(super) fn numbers(&self, of: Emptied) -> Range<u64> {
        let all = matches!(of, Emptied::Tier(_)).then_some(0..u64::MAX);
        let of_device = || {
            let (first, blocks) = self.device(of)?.numbers;
            Some(first..first + blocks)
        };
        all.or_else(of_device).unwrap_or(0..0)
    }

    fn takes(&self, tier: Tier, mark: u64) -> u64 {
        let stats = &self.space.tiers[tier as usize];
        let takes = stats.total > 0 && !stats.avoided;
        Fill::of(tier, stats).below(mark) * u64::from(takes)
    }
}

impl Evacuations {
    /// Blocks that others take of what a job empties: other tiers, until their high mark, and the other
    /// devices of the tier while they have room.
    pub(crate) fn room_beside(&self, of: Emptied, seen: &Seen<'_>) -> u64 {
        let room = |tier: Tier| match of {
            Emptied::Tier(own) if own == tier => 0,
            Emptied::Device { tier: own, .. } if own == tier => seen.takes(tier, 100),
            _ => seen.takes(tier, self.high),
        };
        Tier::ALL.into_iter().map(room).sum()
    }

    /// Returns the blocks that others take of what is on a device below their high mark, and that are
    /// promised to nobody.
    pub(crate) fn room_beside_device(&self, device: &DeviceStatus, space: &SpaceStats) -> u64 {
        // Free blocks of a device that is emptied, or has failed, do not count any more.
        let counts = device.state == DeviceUse::InUse && device.failed.is_none();
        let counted = if counts { device.free } else { 0 };
        let mut without = *space;
        let own = &mut without.tiers[device.tier as usize];
        own.free = own.free.saturating_sub(counted);
        own.total = own.total.saturating_sub(counted);
        let seen = Seen {
            space: &without,
            devices: &[],
        };
        let room = Tier::ALL.into_iter().map(|tier| seen.takes(tier, self.high));
        room.sum::<u64>().min(space.available.saturating_sub(counted))
    }
}
