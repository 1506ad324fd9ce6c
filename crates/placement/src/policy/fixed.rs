//! Layouts that never move anything: shares fixed in advance, and striping. Baselines for the adaptive
//! policies.

use super::{Policy, Target, View, best_target};
use crate::{DeviceId, NewData, UnitId};
use std::borrow::Cow;

/// Spreads new units by fixed shares of the devices, by a hash of their names.
#[derive(Debug, Clone)]
pub struct Fixed {
    name: String,
    /// Percentages by device.
    percent: Vec<u32>,
}

impl Fixed {
    /// `percent` by device; the last device gets the remainder to 100.
    #[must_use]
    pub fn new(percent: &[u32]) -> Self {
        let name = percent.iter().map(u32::to_string).collect::<Vec<_>>().join("/");
        Self {
            name: format!("static {name}"),
            percent: percent.to_vec(),
        }
    }
}

/// Spreads names evenly (the finaliser of SplitMix64).
fn mix(unit: UnitId) -> u64 {
    let mut x = unit.key.ino.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(unit.index);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Policy for Fixed {
    fn name(&self) -> Cow<'static, str> {
        self.name.clone().into()
    }

    fn target(&mut self, new: &NewData, view: &View<'_>) -> Target {
        let mut at = (mix(new.unit) % 100) as u32;
        let mut chosen = self.percent.len().saturating_sub(1);
        for (index, share) in self.percent.iter().enumerate() {
            if at < *share {
                chosen = index;
                break;
            }
            at -= share;
        }
        let chosen = DeviceId(chosen as u8);
        Target {
            device: best_target(new, view, |device| device.id != chosen),
            reason: "fixed share".into(),
        }
    }
}

/// Spreads new units over all devices in turn, as RAID 0 does; over those with room when one is full.
#[derive(Debug, Clone, Copy, Default)]
pub struct Striped;

impl Policy for Striped {
    fn name(&self) -> Cow<'static, str> {
        "striping".into()
    }

    fn target(&mut self, new: &NewData, view: &View<'_>) -> Target {
        let turn =
            new.unit.key.ino.0.wrapping_add(u64::from(new.unit.index)) % view.devices.len().max(1) as u64;
        Target {
            device: best_target(new, view, |device| u64::from(device.id.0) != turn),
            reason: "in turn".into(),
        }
    }
}
