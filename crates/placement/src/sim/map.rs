//! The places of units on the simulated devices. Owns space; knows no time.

use crate::policy::{Catalog, Found, Hold, Place};
use crate::{DeviceId, UnitId};
use hashbrown::HashMap;
use std::collections::BTreeSet;
use std::ops::Bound;

/// A unit's places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) place: Place,
    /// Its slot on its device, and on the second.
    pub(super) slots: [u64; 2],
    /// Number of writes.
    pub(super) version: u64,
}

/// The places of all units.
#[derive(Debug)]
pub struct Map {
    unit_bytes: u64,
    units: HashMap<UnitId, Entry>,
    on: Vec<BTreeSet<UnitId>>,
    free: Vec<Slots>,
}

#[derive(Debug)]
struct Slots {
    next: u64,
    total: u64,
    freed: BTreeSet<u64>,
    /// Slots reserved for copies in progress.
    reserved: BTreeSet<u64>,
}

impl Slots {
    fn left(&self) -> u64 {
        self.total - self.next + self.freed.len() as u64
    }

    fn take(&mut self) -> Option<u64> {
        // Freed slots first, in order: the next ones taken are likely neighbours.
        if let Some(slot) = self.freed.pop_first() {
            return Some(slot);
        }
        (self.next < self.total).then(|| {
            self.next += 1;
            self.next - 1
        })
    }
}

impl Map {
    /// Empty devices of these sizes.
    #[must_use]
    pub fn new(unit_bytes: u64, totals: &[u64]) -> Self {
        let slots = totals.iter().map(|total| Slots {
            next: 0,
            total: total / unit_bytes,
            freed: BTreeSet::new(),
            reserved: BTreeSet::new(),
        });
        Self {
            unit_bytes,
            units: HashMap::new(),
            on: totals.iter().map(|_| BTreeSet::new()).collect(),
            free: slots.collect(),
        }
    }

    /// Bytes free on a device.
    #[must_use]
    pub fn free_bytes(&self, device: DeviceId) -> u64 {
        self.free[device.index()].left() * self.unit_bytes
    }

    /// Units with a copy on a device.
    #[must_use]
    pub fn count(&self, device: DeviceId) -> usize {
        self.on[device.index()].len()
    }

    pub(super) fn get(&self, unit: UnitId) -> Option<&Entry> {
        self.units.get(&unit)
    }

    /// Adds a new unit on a device. Returns `false` if the device is full, or the unit exists already.
    pub(super) fn add(&mut self, unit: UnitId, device: DeviceId, now_ms: u64) -> bool {
        if self.units.contains_key(&unit) {
            return false;
        }
        let Some(slot) = self.free[device.index()].take() else {
            return false;
        };
        self.on[device.index()].insert(unit);
        let place = Place {
            device,
            bytes: self.unit_bytes as u32,
            second: None,
            hold: None,
            since_ms: now_ms,
            came_from: None,
        };
        let entry = Entry {
            place,
            slots: [slot, 0],
            version: 0,
        };
        self.units.insert(unit, entry);
        true
    }

    /// Reserves room for a copy.
    pub(super) fn reserve(&mut self, device: DeviceId) -> Option<u64> {
        let free = &mut self.free[device.index()];
        let slot = free.take()?;
        free.reserved.insert(slot);
        Some(slot)
    }

    /// Releases a reserved slot.
    pub(super) fn unreserve(&mut self, device: DeviceId, slot: u64) {
        self.free[device.index()].reserved.remove(&slot);
        self.free[device.index()].freed.insert(slot);
    }

    /// Makes the finished copy in `slot` the second one.
    pub(super) fn commit_copy(&mut self, unit: UnitId, to: DeviceId, slot: u64) {
        match self.units.get_mut(&unit) {
            Some(entry) if !entry.place.is_on(to) && entry.place.second.is_none() => {
                entry.place.second = Some(to);
                entry.slots[1] = slot;
                self.on[to.index()].insert(unit);
                self.free[to.index()].reserved.remove(&slot);
            }
            _ => self.unreserve(to, slot),
        }
    }

    /// Makes the finished copy in `slot` the only one.
    pub(super) fn commit_move(&mut self, unit: UnitId, to: DeviceId, slot: u64, now_ms: u64) {
        self.commit_copy(unit, to, slot);
        self.keep_only(unit, to, now_ms);
    }

    /// Gives a unit a second copy immediately. Returns `false` if it has one, or there is no room.
    pub fn add_copy(&mut self, unit: UnitId, to: DeviceId) -> bool {
        let alone = |entry: &Entry| !entry.place.is_on(to) && entry.place.second.is_none();
        if !self.units.get(&unit).is_some_and(alone) {
            return false;
        }
        let Some(slot) = self.reserve(to) else {
            return false;
        };
        self.commit_copy(unit, to, slot);
        true
    }

    /// Drops the copy on a device, if there is another.
    pub(super) fn drop_copy(&mut self, unit: UnitId, from: DeviceId, now_ms: u64) -> bool {
        let Some(entry) = self.units.get(&unit) else {
            return false;
        };
        let Some(second) = entry.place.second else {
            return false;
        };
        let kept = if from == second {
            entry.place.device
        } else {
            second
        };
        entry.place.is_on(from) && {
            self.keep_only(unit, kept, now_ms);
            true
        }
    }

    /// Drops all copies except that on `device`.
    pub(super) fn keep_only(&mut self, unit: UnitId, device: DeviceId, now_ms: u64) {
        let Some(entry) = self.units.get_mut(&unit) else {
            return;
        };
        let Some(second) = entry.place.second else {
            return;
        };
        let (gone, slot) = if device == second {
            let gone = (entry.place.device, entry.slots[0]);
            entry.place.device = second;
            entry.slots[0] = entry.slots[1];
            entry.place.since_ms = now_ms;
            entry.place.came_from = Some(gone.0);
            gone
        } else {
            (second, entry.slots[1])
        };
        entry.place.second = None;
        self.on[gone.index()].remove(&unit);
        self.unreserve(gone, slot);
    }

    pub(super) fn written(&mut self, unit: UnitId) {
        if let Some(entry) = self.units.get_mut(&unit) {
            entry.version += 1;
        }
    }

    /// Sets or removes the hold of a unit.
    pub fn hold(&mut self, unit: UnitId, hold: Option<Hold>) {
        if let Some(entry) = self.units.get_mut(&unit) {
            entry.place.hold = hold;
        }
    }

    /// Removes a unit.
    pub(super) fn remove(&mut self, unit: UnitId) {
        let Some(entry) = self.units.remove(&unit) else {
            return;
        };
        let copies = [Some(entry.place.device), entry.place.second];
        for (device, slot) in copies.into_iter().zip(entry.slots) {
            if let Some(device) = device {
                self.on[device.index()].remove(&unit);
                self.unreserve(device, slot);
            }
        }
    }

    /// Whether no two units share a slot, and every slot is accounted for.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let mut used: Vec<BTreeSet<u64>> = self.on.iter().map(|_| BTreeSet::new()).collect();
        for (unit, entry) in &self.units {
            let copies = [Some(entry.place.device), entry.place.second];
            for (device, slot) in copies.into_iter().zip(entry.slots) {
                let Some(device) = device else { continue };
                let alone = used[device.index()].insert(slot);
                if !alone || !self.on[device.index()].contains(unit) {
                    return false;
                }
            }
        }
        let devices = used.iter().zip(&self.on).zip(&self.free);
        devices.into_iter().all(|((used, on), free)| {
            let apart = used.is_disjoint(&free.freed) && used.is_disjoint(&free.reserved);
            let all = (used.len() + free.reserved.len()) as u64 + free.left();
            apart && used.len() == on.len() && all == free.total
        })
    }
}

impl Catalog for Map {
    fn place(&self, unit: UnitId) -> Option<Place> {
        self.units.get(&unit).map(|entry| entry.place.clone())
    }

    fn units_on(&self, device: DeviceId, after: Option<UnitId>, most: usize) -> Found {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let units = self.on[device.index()].range((from, Bound::Unbounded));
        let units: Vec<_> = units.take(most).copied().collect();
        let next = units.last().copied().filter(|_| units.len() == most);
        Found { units, next }
    }
}
