//! The storage front end (RapidSwap, sections 4.1.1 and 4.2.2): objects in slabs, slabs in tiers.
//!
//! Owns which slab is in which tier and which objects are in use. One lock guards the records; bytes are
//! copied without it. A slab that is being read or written is pinned, and what it left is freed when the last
//! pin goes.

mod ahead;
mod load;
mod migrate;
pub use migrate::MOVES_MAX;
mod slab;
mod stats;

pub use stats::{SpaceStats, TierStats};

use crate::backend::{Backend, BackendError, SLAB_BYTES, Slot};
use crate::codec::{self, Class};
use crate::measure::{self, Speed};
use crate::page::Page;
use crate::place::{Place, SLABS_MAX};
use crate::reuse::Reuse;
use crate::table::Stored;
use crate::temperature::History;
use ahead::Ahead;
use parking_lot::Mutex;
use slab::Slab;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering};
use zerocopy::IntoBytes;

/// Why a page was not stored, or not read.
#[derive(Debug, thiserror::Error)]
pub enum SpaceError {
    /// No tier that may hold the page has room.
    #[error("far space is full")]
    Full,
    /// A backend failed.
    #[error("{tier}: {error}")]
    Io {
        /// The backend's name.
        tier: String,
        /// Its message.
        error: BackendError,
    },
    /// The bytes that were read are not those that were stored.
    #[error("{tier}: a page has a wrong checksum")]
    Checksum {
        /// The backend's name.
        tier: String,
    },
    /// No object is there. A mistake of the caller.
    #[error("no object at {0:?}")]
    NoObject(Place),
}

/// One backend that is to join.
pub struct TierConfig {
    /// Where slabs lie.
    pub backend: Box<dyn Backend>,
    /// Whether it holds compressed pages only and comes first: DRAM.
    pub is_compressed: bool,
}

/// A backend that joined.
pub(crate) struct Tier {
    backend: Box<dyn Backend>,
    is_compressed: bool,
    speed: Speed,
    /// Most slabs: its capacity, or less while [`Space::limit_compressed`] says so.
    limit_slabs: AtomicU32,
}

impl Tier {
    fn limit_slabs(&self) -> u32 {
        self.limit_slabs.load(Ordering::Relaxed)
    }
}

#[derive(Default)]
struct State {
    slabs: Vec<Option<Slab>>,
    free_numbers: Vec<u32>,
    /// Slabs in each tier.
    used: Vec<u32>,
    /// Slabs that may have free objects, by tier and class. Checked when used.
    open: BTreeMap<(usize, Class), Vec<u32>>,
    /// Users beyond the first, of objects that have several.
    shared: HashMap<Place, u32>,
    now_s: u64,
    ahead: Ahead,
    rest: [Rest; 2],
    stats: stats::Counters,
}

/// Far memory of one run.
pub struct Space {
    tiers: Vec<Tier>,
    /// The seed's T, in seconds; 0: found from reuse times.
    t_s: u64,
    state: Mutex<State>,
}

/// How long slabs rest before they are cold, of compressed ones or of the others.
struct Rest {
    reuse: Reuse,
    cold_s: u64,
}

/// T until reuse times are known, seconds (the seed's).
pub const T_FIRST_S: u64 = 5;

impl Default for Rest {
    fn default() -> Self {
        Self {
            reuse: Reuse::default(),
            cold_s: 2 * T_FIRST_S,
        }
    }
}

/// A page on its way into a slab.
struct Incoming<'a> {
    page: &'a Page,
    hash: u64,
    /// The compressed object, if it is one.
    object: Option<(Class, Vec<u8>)>,
}

/// The properties of a slab that `load` needs while it reads.
struct Pinned {
    tier: usize,
    slot: Slot,
    class: Class,
}

impl Space {
    /// Measures the backends and sorts them, fastest reads first; compressed DRAM stays in front. Gives also
    /// a sentence for each that did not join. `t_s` is the seed's T, in seconds; 0: it is found from how
    /// long slabs rest between accesses.
    #[must_use]
    pub fn new(joining: Vec<TierConfig>, t_s: u64) -> (Self, Vec<String>) {
        let mut refused = Vec::new();
        let mut tiers = Vec::new();
        for TierConfig {
            backend,
            is_compressed,
        } in joining
        {
            match measure::measure(&*backend) {
                Ok(speed) => tiers.push(Tier {
                    limit_slabs: AtomicU32::new(backend.capacity_slabs()),
                    backend,
                    is_compressed,
                    speed,
                }),
                Err(error) => refused.push(format!("{}: {error}", backend.name())),
            }
        }
        tiers.sort_by_key(|tier| (!tier.is_compressed, tier.speed.read));
        let state = State {
            stats: stats::Counters::new(tiers.len()),
            used: vec![0; tiers.len()],
            ..State::default()
        };
        let space = Self {
            tiers,
            t_s,
            state: Mutex::new(state),
        };
        (space, refused)
    }

    /// Stores pages, neighbours together where they can be. A page that does not shrink, or finds no room in
    /// DRAM, goes as it is to the fastest other tier with room.
    pub fn store(&self, pages: &[Page]) -> Vec<Result<Stored, SpaceError>> {
        let compresses = self.tiers.first().is_some_and(|tier| tier.is_compressed);
        let incoming: Vec<Incoming<'_>> = pages
            .iter()
            .map(|page| {
                let mut object = Vec::new();
                let class = compresses.then(|| codec::compress(page, &mut object)).flatten();
                Incoming {
                    page,
                    hash: page.hash(),
                    object: class.map(|class| (class, object)),
                }
            })
            .collect();
        let placed: Vec<Option<(Place, Pinned)>> = {
            let mut state = self.state.lock();
            incoming
                .iter()
                .map(|page| self.allocate(&mut state, page))
                .collect()
        };
        let written = self.write(&incoming, &placed);
        let mut state = self.state.lock();
        let finish = |((page, placed), written): ((&Incoming<'_>, &Option<(Place, Pinned)>), _)| {
            let Some((place, pinned)) = placed else {
                state.stats.full += 1;
                return Err(SpaceError::Full);
            };
            self.unpin(&mut state, place.slab);
            let Some(error): Option<BackendError> = written else {
                let raw = pinned.class.object_bytes() as u64;
                state.stats.stored[pinned.tier] += 1;
                state.stats.stored_bytes += raw;
                return Ok(Stored {
                    place: *place,
                    hash: page.hash,
                });
            };
            let error = self.retire(&mut state, place.slab, pinned.tier, error);
            self.give_up(&mut state, *place);
            Err(error)
        };
        incoming.iter().zip(&placed).zip(written).map(finish).collect()
    }

    /// An object for a page, its slab pinned.
    fn allocate(&self, state: &mut State, page: &Incoming<'_>) -> Option<(Place, Pinned)> {
        let compressed = page
            .object
            .as_ref()
            .and_then(|(class, _)| self.allocate_in(state, 0, *class));
        let place = compressed.or_else(|| {
            let raw = (0..self.tiers.len()).filter(|tier| !self.tiers[*tier].is_compressed);
            raw.into_iter()
                .find_map(|tier| self.allocate_in(state, tier, Class::RAW))
        })?;
        let slab = state.slabs[place.slab as usize].as_mut()?;
        slab.pins += 1;
        let pinned = Pinned {
            tier: slab.tier,
            slot: slab.slot,
            class: slab.class,
        };
        Some((place, pinned))
    }

    fn allocate_in(&self, state: &mut State, tier: usize, class: Class) -> Option<Place> {
        let open = state.open.entry((tier, class)).or_default();
        while let Some(number) = open.last() {
            let slab = state.slabs[*number as usize].as_mut();
            let fits = slab.filter(|slab| slab.tier == tier && slab.class == class && slab.takes_objects());
            if let Some((slab, object)) = fits.and_then(|slab| slab.take_free().map(|object| (slab, object)))
            {
                slab.history.touch();
                return Some(Place {
                    slab: *number,
                    object,
                });
            }
            if let Some(Some(slab)) = open.pop().map(|number| state.slabs[number as usize].as_mut()) {
                slab.is_listed = false;
            }
        }
        if state.used[tier] >= self.tiers[tier].limit_slabs() {
            return None;
        }
        let slot = self.tiers[tier].backend.alloc().ok()?;
        let mut slab = Slab::new(tier, slot, class, History::new(state.now_s));
        slab.is_listed = true;
        let object = slab.take_free()?;
        let number = match state.free_numbers.pop() {
            Some(number) => number,
            None if state.slabs.len() < SLABS_MAX as usize => {
                state.slabs.push(None);
                (state.slabs.len() - 1) as u32
            }
            None => {
                self.tiers[tier].backend.dealloc(slot);
                return None;
            }
        };
        state.slabs[number as usize] = Some(slab);
        state.used[tier] += 1;
        state.open.entry((tier, class)).or_default().push(number);
        Some(Place { slab: number, object })
    }

    /// Writes the pages to their places, without the lock: the slabs are pinned. Gives the error of each.
    fn write(
        &self,
        incoming: &[Incoming<'_>],
        placed: &[Option<(Place, Pinned)>],
    ) -> Vec<Option<BackendError>> {
        let mut errors: Vec<Option<BackendError>> = Vec::new();
        let mut at = 0;
        while at < placed.len() {
            let Some((place, pinned)) = &placed[at] else {
                errors.push(None);
                at += 1;
                continue;
            };
            let backend = &self.tiers[pinned.tier].backend;
            let offset = usize::from(place.object) * pinned.class.object_bytes();
            if let (true, Some((_, object))) = (pinned.class.is_compressed(), &incoming[at].object) {
                errors.push(backend.write(pinned.slot, offset, object).err());
                at += 1;
                continue;
            }
            let follows = |next: &usize| {
                let ahead = (next - at) as u16;
                matches!(&placed[*next], Some((other, _)) if other.slab == place.slab && other.object == place.object + ahead)
            };
            let run = (at..placed.len()).take_while(follows).count();
            let ranges: Vec<&[u8]> = incoming[at..at + run]
                .iter()
                .map(|page| page.page.as_bytes())
                .collect();
            let error = backend.sg_write(pinned.slot, offset, &ranges).err();
            let failed = error.is_some();
            errors.push(error);
            // One error for the run; its other pages are said to have failed too.
            errors.extend((1..run).map(|_| failed.then_some(BackendError::OutOfRange(pinned.slot.0))));
            at += run;
        }
        errors
    }

    /// The tier of an object, 0 the fastest.
    #[must_use]
    pub fn tier_of(&self, place: Place) -> Option<usize> {
        let state = self.state.lock();
        let slab = state.slabs.get(place.slab as usize)?.as_ref()?;
        slab.has(place.object).then_some(slab.tier)
    }

    /// Whether a tier is compressed DRAM.
    #[must_use]
    pub fn is_dram(&self, tier: usize) -> bool {
        self.tiers.get(tier).is_some_and(|tier| tier.is_compressed)
    }

    /// Counts one more user of an object.
    pub fn retain(&self, place: Place) {
        let mut state = self.state.lock();
        *state.shared.entry(place).or_insert(0) += 1;
    }

    /// One user of an object less. The last one frees it.
    pub fn release(&self, place: Place) {
        let mut state = self.state.lock();
        if let Some(others) = state.shared.get_mut(&place) {
            *others -= 1;
            if *others == 0 {
                state.shared.remove(&place);
            }
            return;
        }
        self.give_up(&mut state, place);
    }

    fn give_up(&self, state: &mut State, place: Place) {
        let Some(slab) = state.slabs.get_mut(place.slab as usize).and_then(Option::as_mut) else {
            return;
        };
        if !slab.free(place.object) {
            return;
        }
        state.ahead.forget(place);
        if !slab.is_listed
            && slab.takes_objects()
            && self.tiers[slab.tier].is_compressed == slab.class.is_compressed()
        {
            slab.is_listed = true;
            let (tier, class) = (slab.tier, slab.class);
            state.open.entry((tier, class)).or_default().push(place.slab);
        }
        self.free_if_empty(state, place.slab);
    }

    /// Frees a slab that holds nothing and that nobody uses.
    fn free_if_empty(&self, state: &mut State, number: u32) {
        let slot = &mut state.slabs[number as usize];
        if slot
            .as_ref()
            .is_some_and(|slab| slab.used == 0 && slab.pins == 0 && !slab.is_moving)
            && let Some(slab) = slot.take()
        {
            // A place that failed is not used again.
            if !slab.is_retired {
                self.tiers[slab.tier].backend.dealloc(slab.slot);
            }
            state.free_numbers.push(number);
            state.used[slab.tier] -= 1;
            if let Some(open) = state.open.get_mut(&(slab.tier, slab.class)) {
                open.retain(|other| *other != number);
            }
        }
    }

    fn unpin(&self, state: &mut State, number: u32) {
        let Some(slab) = state.slabs[number as usize].as_mut() else {
            return;
        };
        slab.pins -= 1;
        if slab.pins == 0 {
            if let Some((tier, slot)) = slab.left.take() {
                self.tiers[tier].backend.dealloc(slot);
            }
            self.free_if_empty(state, number);
        }
    }

    /// Takes a slab out of use for new objects and keeps the reason.
    fn retire(&self, state: &mut State, number: u32, tier: usize, error: BackendError) -> SpaceError {
        if let Some(slab) = state.slabs[number as usize].as_mut() {
            slab.is_retired = true;
        }
        let tier = self.tiers[tier].backend.name().to_owned();
        let error = SpaceError::Io { tier, error };
        state.stats.io_errors += 1;
        state.stats.reason = Some(error.to_string());
        error
    }

    /// Bytes of slabs in DRAM.
    #[must_use]
    pub fn dram_bytes(&self) -> u64 {
        let state = self.state.lock();
        let used = state.used.iter().zip(&self.tiers);
        let slabs: u64 = used
            .filter(|(_, tier)| tier.is_compressed)
            .map(|(used, _)| u64::from(*used))
            .sum();
        slabs * SLAB_BYTES as u64
    }

    /// Bounds the compressed tier from now on, at most by its capacity. Slabs above the bound go down at the
    /// next ticks; where no other tier is, what is there stays, and the bound is not below it.
    pub fn limit_compressed(&self, slabs: u32) {
        let state = self.state.lock();
        for (tier, used) in self.tiers.iter().zip(&state.used) {
            if tier.is_compressed {
                let least = if self.tiers.len() == 1 { *used } else { 0 };
                let limit = slabs.clamp(least, tier.backend.capacity_slabs());
                tier.limit_slabs.store(limit, Ordering::Relaxed);
            }
        }
    }

    /// Whether there is any tier.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tiers.is_empty()
    }
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.tiers.iter().map(|tier| tier.backend.name()).collect();
        f.debug_struct("Space").field("tiers", &names).finish()
    }
}
