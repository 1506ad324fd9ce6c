//! Reading one page.

use super::{Pinned, Space, SpaceError, ahead};
use crate::backend::SLAB_BYTES;
use crate::codec::{self, Class};
use crate::page::{PAGE_BYTES, Page};
use crate::place::Place;
use crate::table::Stored;
use zerocopy::IntoBytes;

/// What is known before a page is read.
struct Plan {
    pinned: Pinned,
    /// The object, if it was read ahead.
    kept: Option<Box<[u8]>>,
    /// Objects after it to read as well.
    ahead: u16,
}

impl Space {
    /// Reads a page and compares its hash. Gives the tier's number, 0 the fastest.
    ///
    /// # Errors
    /// `Io` and `Checksum`: the slab takes no objects from now on, and `page` holds anything.
    pub fn load(&self, stored: &Stored, page: &mut Page) -> Result<usize, SpaceError> {
        let place = stored.place;
        let plan = self.pin(place).ok_or(SpaceError::NoObject(place))?;
        let Pinned { tier, class, .. } = plan.pinned;
        let is_kept = plan
            .kept
            .as_ref()
            .is_some_and(|object| unpack(class, object, page) && page.hash() == stored.hash);
        let (read, whole) = match (is_kept, plan.ahead) {
            (true, _) => (Ok(()), true),
            (false, 0) => self.read_one(place, &plan.pinned, page),
            (false, ahead) => match self.read_ahead(place, &plan.pinned, ahead, page) {
                Some(whole) => (Ok(()), whole),
                // Alone: the object that was asked for may be sound.
                None => self.read_one(place, &plan.pinned, page),
            },
        };
        let same = whole && page.hash() == stored.hash;
        let mut state = self.state.lock();
        self.unpin(&mut state, place.slab);
        match read {
            Ok(()) if same => {
                state.stats.loaded[tier] += 1;
                Ok(tier)
            }
            Ok(()) => {
                let tier = self.tiers[tier].backend.name().to_owned();
                let error = SpaceError::Checksum { tier };
                state.stats.checksums += 1;
                state.stats.reason = Some(error.to_string());
                if let Some(slab) = state.slabs[place.slab as usize].as_mut() {
                    slab.is_retired = true;
                }
                Err(error)
            }
            Err(error) => Err(self.retire(&mut state, place.slab, tier, error)),
        }
    }

    /// How long a read of an object takes, by the measurement of its tier; none for compressed DRAM, which
    /// takes no time worth waiting for elsewhere.
    #[must_use]
    pub fn read_time(&self, place: Place) -> Option<std::time::Duration> {
        let tier = &self.tiers[self.tier_of(place)?];
        (!tier.is_compressed).then_some(tier.speed.read)
    }

    /// Reads an object alone. Gives also whether it could be unpacked.
    fn read_one(
        &self,
        place: Place,
        pinned: &Pinned,
        page: &mut Page,
    ) -> (Result<(), crate::backend::BackendError>, bool) {
        let bytes = pinned.class.object_bytes();
        let offset = usize::from(place.object) * bytes;
        let backend = &self.tiers[pinned.tier].backend;
        if pinned.class.is_compressed() {
            let mut object = [0u8; codec::COMPRESSED_MAX_BYTES];
            let object = &mut object[..bytes];
            let read = backend.read(pinned.slot, offset, object);
            (read, codec::decompress(object, page))
        } else {
            (backend.read(pinned.slot, offset, page.as_mut_bytes()), true)
        }
    }

    /// Reads an object and those after it, and keeps these. `None` when they could not be read.
    fn read_ahead(&self, place: Place, pinned: &Pinned, ahead: u16, page: &mut Page) -> Option<bool> {
        let bytes = pinned.class.object_bytes();
        let first = usize::from(place.object) * bytes;
        let len = (usize::from(ahead) + 1) * bytes;
        debug_assert!(first + len <= SLAB_BYTES);
        let mut all = Page::zeroed(len.div_ceil(PAGE_BYTES));
        let all = &mut all.as_mut_bytes()[..len];
        self.tiers[pinned.tier]
            .backend
            .read(pinned.slot, first, all)
            .ok()?;
        let (object, rest) = all.split_at(bytes);
        let mut state = self.state.lock();
        for (object, bytes) in (place.object + 1..).zip(rest.chunks(bytes)) {
            let next = Place { object, ..place };
            // It may have been freed meanwhile.
            let is_there = |slab: &&mut super::Slab| slab.has(object);
            if state.slabs[place.slab as usize]
                .as_mut()
                .filter(is_there)
                .is_none()
            {
                continue;
            }
            if let Some(slab) = state.ahead.keep(next, bytes.into())
                && let Some(Some(slab)) = state.slabs.get_mut(slab as usize)
            {
                slab.note_waste();
            }
        }
        drop(state);
        Some(unpack(pinned.class, object, page))
    }

    fn pin(&self, place: Place) -> Option<Plan> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let slab = state.slabs.get_mut(place.slab as usize)?.as_mut()?;
        if !slab.has(place.object) {
            return None;
        }
        slab.history.touch();
        slab.pins += 1;
        let kept = state.ahead.take(place, slab);
        let is_slow = self.tiers[slab.tier].speed.read >= ahead::SLOW;
        let ahead = if is_slow && kept.is_none() {
            state.ahead.plan(place, slab)
        } else {
            0
        };
        let pinned = Pinned {
            tier: slab.tier,
            slot: slab.slot,
            class: slab.class,
        };
        Some(Plan { pinned, kept, ahead })
    }
}

/// Makes a page of an object. False for one that is damaged.
fn unpack(class: Class, object: &[u8], page: &mut Page) -> bool {
    if class.is_compressed() {
        codec::decompress(object, page)
    } else {
        page.as_mut_bytes().copy_from_slice(object);
        true
    }
}
