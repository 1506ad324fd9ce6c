//! The interface of policies. A policy sees counters and device figures and answers with targets and moves,
//! each with its reason. It moves nothing, reads no clock, and does not know what carries its answers out.
//!
//! Who drives it (the daemon, the simulator) calls [`Policy::target`] for data without a place,
//! [`Policy::route`] for a unit with two copies, [`Policy::accessed`] when an access has ended, and
//! [`Policy::plan`] at each tick. [`Heat`] and the figures are kept by the driver.

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

/// Where a unit lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its device. Of a unit spread over several, the one with most of its bytes.
    pub device: DeviceId,
    /// Its bytes that count against the device.
    pub bytes: u32,
    /// A second, equal copy.
    pub second: Option<DeviceId>,
    /// Why it must not move now.
    pub hold: Option<Hold>,
    /// When it came here, in the driver's milliseconds.
    pub since_ms: u64,
}

impl Place {
    /// Whether a copy is on `device`.
    #[must_use]
    pub fn is_on(&self, device: DeviceId) -> bool {
        self.device == device || self.second == Some(device)
    }

    /// The device of its other copy.
    #[must_use]
    pub fn other_than(&self, device: DeviceId) -> Option<DeviceId> {
        let copies = [Some(self.device), self.second];
        copies.into_iter().flatten().find(|copy| *copy != device)
    }

    /// What keeps it where it is against a step of this cause: planners and drivers ask this, so that nothing
    /// is planned for ever that is never carried out.
    #[must_use]
    pub fn held_against(&self, cause: Cause) -> Option<Hold> {
        self.hold.filter(|hold| !hold.yields_to(cause))
    }
}

/// What keeps a unit where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hold {
    /// An operator said so.
    Pinned,
    /// A session may still read or write it at its place.
    InUse {
        /// Which.
        session: u64,
    },
    /// Its data cannot be read.
    Damaged,
}

impl Hold {
    /// What operators say moves pinned units too; nothing overrules a reader.
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

/// What lies where. Several calls see no one state: a move whose unit is not where the plan thought is
/// dropped by the mover.
pub trait Catalog {
    /// Where a unit lies; `None`: it has no data.
    fn place(&self, unit: UnitId) -> Option<Place>;

    /// Units with a copy on a device, in the order of their names, after `after`, at most `most`.
    fn units_on(&self, device: DeviceId, after: Option<UnitId>, most: usize) -> Vec<UnitId>;
}

/// All that a policy may look at.
#[derive(Clone, Copy)]
pub struct View<'v> {
    /// Now, in milliseconds since any fixed time.
    pub now_ms: u64,
    /// Devices, by [`DeviceId::index`].
    pub devices: &'v [DeviceView],
    /// Counters.
    pub heat: &'v Heat,
    /// Places.
    pub catalog: &'v dyn Catalog,
}

impl<'v> View<'v> {
    /// A device.
    #[must_use]
    pub fn device(&self, id: DeviceId) -> &'v DeviceView {
        &self.devices[id.index()]
    }

    /// Bytes of a unit.
    #[must_use]
    pub const fn unit_bytes(&self) -> u64 {
        self.heat.unit().bytes()
    }

    /// Whether a unit more may go to a device, which it leaves at most [`FULL`].
    #[must_use]
    pub fn takes_unit(&self, id: DeviceId) -> bool {
        let device = self.device(id);
        device.state.takes_new() && device.has_room(self.unit_bytes(), FULL)
    }
}

/// How full a device may become before nothing more is sent there while another has room (95 %, Strata).
pub const FULL: f64 = 0.95;

/// Where new data shall go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The first choice.
    pub device: DeviceId,
    /// Why.
    pub reason: Cow<'static, str>,
}

/// What is to be done with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Act {
    /// It goes to the other device, and from its own.
    Move,
    /// It gets a second copy there.
    Copy,
    /// Its copy there is dropped: no I/O.
    Drop,
}

/// Why something moves. The order is that of the mover: the first goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// An operator asked for it.
    Asked,
    /// A rule or a pin wants it there.
    Rule,
    /// Its device becomes full.
    Full,
    /// It is used so much that another device serves it better.
    Hot,
    /// The devices are unequally loaded.
    Load,
    /// A cache writes back.
    Writeback,
    /// It is not used, and its device is wanted for what is.
    Cold,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Unit.
    pub unit: UnitId,
    /// What.
    pub act: Act,
    /// Where its data is read.
    pub from: DeviceId,
    /// Where it goes; of a [`Act::Drop`], where it goes from.
    pub to: DeviceId,
    /// Why, in one word.
    pub cause: Cause,
    /// Why, with figures, for `which-tier` and `jobs`.
    pub reason: Cow<'static, str>,
}

/// Something that should move and does not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// Where it is.
    pub from: DeviceId,
    /// Where it should go.
    pub to: DeviceId,
    /// Why it should go.
    pub cause: Cause,
    /// Bytes, as far as known.
    pub bytes: u64,
    /// What it waits for: `waiting: device 0 97 % full`.
    pub reason: Cow<'static, str>,
}

/// An answer to [`Policy::plan`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// What to do, first things first.
    pub steps: Vec<Step>,
    /// What waits.
    pub waiting: Vec<Waiting>,
}

/// How much may be planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Bytes to be moved or copied.
    pub bytes: u64,
    /// Whether no foreground request waits anywhere: the time for cold data.
    pub quiet: bool,
}

/// Decides where data goes; moves nothing.
pub trait Policy: fmt::Debug + Send {
    /// As operators name it.
    fn name(&self) -> Cow<'static, str>;

    /// Where data without a place shall go. The driver takes another device with room if that one cannot.
    fn target(&mut self, new: &NewData, view: &View<'_>) -> Target;

    /// Which copy of a unit with two serves an access. A write makes the other copy stale, and it is dropped.
    fn route(&mut self, _unit: UnitId, _op: Op, _bytes: u32, place: &Place, view: &View<'_>) -> DeviceId {
        fastest_of(place, view)
    }

    /// An access has ended and is counted. The unit may be moved now: if all of it was read or written it
    /// costs no read.
    fn accessed(&mut self, _access: &Access, _place: &Place, _view: &View<'_>) -> Option<Step> {
        None
    }

    /// What shall move now, within the budget.
    fn plan(&mut self, _view: &View<'_>, _budget: Budget) -> Plan {
        Plan::default()
    }

    /// Whether the counters of a unit are set back when it has moved (Chapter II.B).
    fn resets(&self) -> bool {
        true
    }

    /// A step was carried out.
    fn done(&mut self, _step: &Step, _view: &View<'_>) {}

    /// A step cannot be carried out.
    fn failed(&mut self, _step: &Step, _view: &View<'_>) {}
}

/// The copy on the device that answers, of the fastest kind.
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

/// Of the devices that a new unit may go to, the first by `key`; any that is online, or the first of all,
/// where none has room.
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
    let fits = |device: &&DeviceView| view.takes_unit(device.id);
    let some = |device: &&DeviceView| device.state.takes_new() && device.free_bytes >= u64::from(new.bytes);
    least(&mut view.devices.iter().filter(wanted).filter(fits))
        .or_else(|| least(&mut view.devices.iter().filter(wanted).filter(some)))
        .or_else(|| least(&mut view.devices.iter().filter(fits)))
        .or_else(|| least(&mut view.devices.iter().filter(some)))
        .unwrap_or(DeviceId(0))
}
