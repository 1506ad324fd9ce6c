//! The interface of policies. A policy sees counters and device figures and answers with targets and moves,
//! each with its reason. It moves nothing, reads no clock, and does not know how its answers are carried out.
//!
//! The driver (the daemon or the simulator) calls [`Policy::target`] for data without a place,
//! [`Policy::route`] for a unit with two copies, [`Policy::accessed`] when an access has ended, and
//! [`Policy::plan`] at each tick. The driver maintains [`Heat`] and the figures.

mod balance;
mod caches;
mod fixed;
mod hierarchy;
mod measured;
mod wardrop;

pub use balance::{Balance, BalanceConfig};
pub use caches::{Smq, Writeback};
pub use fixed::{Fixed, Striped};
pub use hierarchy::{Hierarchy, HierarchyConfig};
pub use measured::{Measured, MeasuredConfig};
pub use wardrop::{Wardrop, WardropConfig};

use crate::heat::Heat;
use crate::{Access, DeviceId, DeviceView, NewData, Op, UnitId};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;

/// The place of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its device. For a unit spread over several devices, the one with most of its bytes.
    pub device: DeviceId,
    /// Its bytes on the device.
    pub bytes: u32,
    /// A second, equal copy.
    pub second: Option<DeviceId>,
    /// The reason why it must not move, if any.
    pub hold: Option<Hold>,
    /// Time of its arrival here, in the driver's milliseconds; 0: not known.
    pub since_ms: u64,
    /// The device that its last move took it from, if known.
    pub came_from: Option<DeviceId>,
}

impl Place {
    /// Whether a copy is on `device`.
    #[must_use]
    pub fn is_on(&self, device: DeviceId) -> bool {
        self.device == device || self.second == Some(device)
    }

    /// The device of its other copy, if one is on `device`.
    #[must_use]
    pub fn other_than(&self, device: DeviceId) -> Option<DeviceId> {
        let second = self.second.filter(|_| self.is_on(device))?;
        Some(if second == device { self.device } else { second })
    }

    /// The hold that prevents a step of this cause, if any. Planners and drivers both call this, so that no
    /// plan repeats a step that is never carried out.
    #[must_use]
    pub fn held_against(&self, cause: Cause) -> Option<Hold> {
        self.hold.filter(|hold| !hold.yields_to(cause))
    }
}

/// A reason to keep a unit at its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hold {
    /// An operator pinned it.
    Pinned,
    /// A session may still read or write it at its place.
    InUse {
        /// The session.
        session: u64,
    },
    /// Its data cannot be read.
    Damaged,
}

impl Hold {
    /// Whether a step of this cause overrides it: operators' jobs and rules move pinned units; nothing
    /// overrides a reader.
    #[must_use]
    pub const fn yields_to(self, cause: Cause) -> bool {
        matches!(self, Self::Pinned) && matches!(cause, Cause::Asked | Cause::Rule)
    }

    /// Whether it ends by itself.
    #[must_use]
    pub const fn ends(self) -> bool {
        matches!(self, Self::InUse { .. })
    }
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pinned => f.write_str("pinned"),
            Self::InUse { session } => write!(f, "in use by session {session}"),
            Self::Damaged => f.write_str("its data cannot be read"),
        }
    }
}

/// Units found on a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// Units with a copy there, or a part of them.
    pub units: Vec<UnitId>,
    /// Where to continue; `None`: there are no more.
    pub next: Option<UnitId>,
}

/// The places of units. Several calls do not see one consistent state: the mover drops a move if its unit is
/// not at the place that the plan assumed.
pub trait Catalog {
    /// Returns the place of a unit; `None` if it has no data.
    fn place(&self, unit: UnitId) -> Option<Place>;

    /// Returns units with a copy on a device, about `most` of them, from where an earlier call has ended.
    fn units_on(&self, device: DeviceId, after: Option<UnitId>, most: usize) -> Found;
}

/// All state that a policy may read.
#[derive(Clone, Copy)]
pub struct View<'v> {
    /// The present time, in milliseconds since any fixed time.
    pub now_ms: u64,
    /// Devices, by [`DeviceId::index`].
    pub devices: &'v [DeviceView],
    /// Counters of units.
    pub heat: &'v Heat,
    /// Places of units.
    pub catalog: &'v dyn Catalog,
    /// The fill above which a device gets no more data while another has room. [`FULL`], unless an operator
    /// wants another.
    pub full: f64,
}

impl<'v> View<'v> {
    /// A device.
    #[must_use]
    pub fn device(&self, id: DeviceId) -> &'v DeviceView {
        &self.devices[id.index()]
    }

    /// A device's name.
    #[must_use]
    pub fn name(&self, id: DeviceId) -> &'v str {
        &self.device(id).name
    }

    /// Bytes of a unit.
    #[must_use]
    pub const fn unit_bytes(&self) -> u64 {
        self.heat.unit().bytes()
    }

    /// Whether a device has room for one more unit and is not full afterwards.
    #[must_use]
    pub fn takes_unit(&self, id: DeviceId) -> bool {
        self.takes(id, self.unit_bytes())
    }

    /// As [`takes_unit`](Self::takes_unit), for `bytes`.
    #[must_use]
    pub fn takes(&self, id: DeviceId, bytes: u64) -> bool {
        let device = self.device(id);
        device.state.takes_new() && device.has_room(bytes, self.full)
    }

    /// Bytes that a device takes until it is full.
    #[must_use]
    pub fn room_bytes(&self, device: &DeviceView) -> u64 {
        if !device.state.takes_new() {
            return 0;
        }
        let kept = (device.total_bytes as f64 * (1.0 - self.full)) as u64;
        device.free_bytes.saturating_sub(kept)
    }
}

/// The usual [`View::full`] (95 %, Strata).
pub const FULL: f64 = 0.95;

/// The chosen device for new data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The first choice.
    pub device: DeviceId,
    /// The reason.
    pub reason: Cow<'static, str>,
}

/// An operation on a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Act {
    /// It moves to the other device and leaves its own.
    Move,
    /// It gets a second copy there.
    Copy,
    /// Its copy there is dropped: no I/O.
    Drop,
}

/// The cause of a step. The mover starts steps in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// An operator asked for it.
    Asked,
    /// A rule or a pin assigns it there.
    Rule,
    /// Its device is nearly full.
    Full,
    /// It is used so much that another device serves it better.
    Hot,
    /// The devices are unequally loaded.
    Load,
    /// A cache writes back.
    Writeback,
    /// It is unused, and its room is needed for data in use.
    Cold,
}

/// One step of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Unit.
    pub unit: UnitId,
    /// The operation.
    pub act: Act,
    /// The device that its data is read from.
    pub from: DeviceId,
    /// The device that it goes to; for [`Act::Drop`], the device that loses the copy.
    pub to: DeviceId,
    /// The cause, in one word.
    pub cause: Cause,
    /// The reason, with figures, for `which-tier` and `jobs`.
    pub reason: Cow<'static, str>,
}

/// Data that should move but cannot yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// Its device.
    pub from: DeviceId,
    /// The device that it should go to.
    pub to: DeviceId,
    /// The cause of the move.
    pub cause: Cause,
    /// Bytes, as far as known.
    pub bytes: u64,
    /// The obstacle: `waiting: device 0 97 % full`.
    pub reason: Cow<'static, str>,
}

/// An answer to [`Policy::plan`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// Steps, the most urgent first.
    pub steps: Vec<Step>,
    /// Data that has to wait.
    pub waiting: Vec<Waiting>,
}

/// Limits of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Bytes to be moved or copied.
    pub bytes: u64,
    /// Whether no foreground request waits anywhere: the time for cold data.
    pub quiet: bool,
}

/// Decides on the placement of data; moves nothing.
pub trait Policy: fmt::Debug + Send {
    /// The name that operators use.
    fn name(&self) -> Cow<'static, str>;

    /// Chooses the device for data without a place. If that device cannot take it, the driver uses another
    /// with room.
    fn target(&mut self, new: &NewData, view: &View<'_>) -> Target;

    /// Chooses the copy that serves an access, of a unit with two. A write makes the other copy stale, and it
    /// is dropped.
    fn route(&mut self, _unit: UnitId, _op: Op, _bytes: u32, place: &Place, view: &View<'_>) -> DeviceId {
        fastest_of(place, view)
    }

    /// Called when an access has ended and is counted. The policy may move the unit: if all of it was read or
    /// written the move needs no read.
    fn accessed(&mut self, _access: &Access, _place: &Place, _view: &View<'_>) -> Option<Step> {
        None
    }

    /// Returns the steps to do at this tick, within the budget.
    fn plan(&mut self, _view: &View<'_>, _budget: Budget) -> Plan {
        Plan::default()
    }

    /// Whether the counters of a unit are reset when it has moved (Chapter II.B).
    fn resets(&self) -> bool {
        true
    }

    /// Called when a step was carried out.
    fn done(&mut self, _step: &Step, _view: &View<'_>) {}

    /// Called when a step cannot be carried out.
    fn failed(&mut self, _step: &Step, _view: &View<'_>) {}
}

/// The copy on the fastest kind of device among those that answer.
fn fastest_of(place: &Place, view: &View<'_>) -> DeviceId {
    let Some(second) = place.second else {
        return place.device;
    };
    let key = |id: DeviceId| {
        let device = view.device(id);
        (!device.state.reads(), device.tier)
    };
    if key(second) < key(place.device) {
        second
    } else {
        place.device
    }
}

/// The smallest by `key` among the devices that a new unit may go to. If none has room, any online device, or
/// the first of all.
fn best_target<K: PartialOrd>(new: &NewData, view: &View<'_>, key: impl Fn(&DeviceView) -> K) -> DeviceId {
    let least = |ids: &mut dyn Iterator<Item = &DeviceView>| -> Option<DeviceId> {
        let mut best: Option<(K, DeviceId)> = None;
        for device in ids {
            let key = key(device);
            if best.as_ref().is_none_or(|(least, _)| key < *least) {
                best = Some((key, device.id));
            }
        }
        best.map(|(_, id)| id)
    };
    let wanted = |device: &&DeviceView| new.tier.is_none_or(|tier| device.tier == tier);
    let bytes = view.unit_bytes().max(new.bytes.into());
    let fits = |device: &&DeviceView| view.takes(device.id, bytes);
    let some = |device: &&DeviceView| device.state.takes_new() && device.free_bytes >= u64::from(new.bytes);
    least(&mut view.devices.iter().filter(wanted).filter(fits))
        .or_else(|| least(&mut view.devices.iter().filter(wanted).filter(some)))
        .or_else(|| least(&mut view.devices.iter().filter(fits)))
        .or_else(|| least(&mut view.devices.iter().filter(some)))
        .unwrap_or(DeviceId(0))
}
