//! Reading ahead: objects that follow one that was read are kept for a while, where a slab is read in order
//! and what was kept before was used.
//!
//! Pages leave in the order of their addresses, so neighbours in a slab are neighbours in a program. What is
//! kept is compared with the hash of the page like everything that is read; what differs is read again.

use super::slab::Slab;
use crate::place::Place;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Tiers whose reads take at least this long are read ahead.
pub(super) const SLOW: Duration = Duration::from_micros(20);
/// Most objects that are kept: 1 MiB.
const KEPT_MAX: usize = 256;
/// Most objects that are read with one.
const AHEAD_MAX: u8 = 16;
/// Objects that may lie between two reads in order.
const GAP_MAX: u16 = 4;
/// Most waste that is remembered of a slab.
const WASTE_MAX: u8 = 8;

/// What a slab's reads were like.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reads {
    last: Option<u16>,
    /// Reads in order, without one out of it.
    streak: u8,
    /// Objects kept in vain, less those used, 0..=8: so many reads in order it takes before any are kept.
    waste: u8,
}

impl Reads {
    /// Notes a read. Gives the number of objects to read with it.
    fn note(&mut self, object: u16) -> u16 {
        let before = self.last.replace(object);
        let in_order = before.is_some_and(|last| object > last && object - last <= GAP_MAX);
        self.streak = if in_order {
            self.streak.saturating_add(1)
        } else {
            0
        };
        match self.streak.saturating_sub(self.waste) {
            0 => 0,
            grown => u16::from(AHEAD_MAX.min(1u8 << grown.min(4))),
        }
    }
}

/// Objects that were read ahead.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    kept: HashMap<Place, Box<[u8]>>,
    order: VecDeque<Place>,
    pub read: u64,
    pub used: u64,
    pub wasted: u64,
}

impl Ahead {
    /// Takes an object out, to use it. The read was one of its slab.
    pub fn take(&mut self, place: Place, slab: &mut Slab) -> Option<Box<[u8]>> {
        let bytes = self.kept.remove(&place)?;
        self.used += 1;
        slab.reads.note(place.object);
        slab.reads.waste = slab.reads.waste.saturating_sub(1);
        Some(bytes)
    }

    /// How many objects that follow `place` are to be read with it: those in use that are not here.
    pub fn plan(&self, place: Place, slab: &mut Slab) -> u16 {
        let most = slab.reads.note(place.object);
        let follows = |ahead: &u16| {
            let object = place.object + ahead;
            slab.has(object) && !self.kept.contains_key(&Place { object, ..place })
        };
        (1..=most).take_while(follows).count() as u16
    }

    /// Keeps what was read with another object. Gives the slabs of those that had to go unused.
    pub fn keep(&mut self, place: Place, bytes: Box<[u8]>) -> Option<u32> {
        self.read += 1;
        if self.kept.insert(place, bytes).is_none() {
            self.order.push_back(place);
        }
        // Places that were taken are still in the order.
        while self.kept.len() > KEPT_MAX || self.order.len() > 4 * KEPT_MAX {
            let oldest = self.order.pop_front()?;
            if self.kept.remove(&oldest).is_some() {
                self.wasted += 1;
                return Some(oldest.slab);
            }
        }
        None
    }

    /// Forgets an object that was freed.
    pub fn forget(&mut self, place: Place) {
        self.wasted += u64::from(self.kept.remove(&place).is_some());
    }
}

impl Slab {
    /// Notes that an object of it was kept in vain.
    pub(super) fn note_waste(&mut self) {
        self.reads.waste = (self.reads.waste + 1).min(WASTE_MAX);
    }
}
