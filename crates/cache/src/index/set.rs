//! One set, unpacked: the tag, rank and place of each slot. Packed, its parts follow each other as whole
//! bytes: tags, ranks (each xor its slot), generations, positions, prefetch lengths. All zeros is the empty
//! set.

use crate::policy::{Shape, WAYS_MAX};

/// Where an object lies in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    /// Units from the beginning of the log.
    pub position: u32,
    /// The lap's number modulo 16.
    pub generation: u8,
    /// Blocks from here to the end of the group that was written together; 0: unknown.
    pub prefetch: u8,
}

/// One object of a set as the index knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Its slot.
    pub slot: usize,
    /// Eight bits of its key's hash.
    pub tag: u8,
    /// Rank in the order of use; 0 is the most recently used object.
    pub rank: usize,
    /// Generation of the log it was written in; 0 for policies with a table.
    pub generation: u8,
    /// Its place; `None` if the place is on disk, or the policy keeps none.
    pub place: Option<Place>,
}

/// An object whose position left memory and has to be kept on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demoted {
    /// Its slot.
    pub slot: usize,
    /// Its place.
    pub place: Place,
}

/// The result of an insertion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inserted {
    /// The object's slot.
    pub slot: usize,
    /// The former object of the slot, dead or alive.
    pub evicted: Option<Entry>,
    /// The object whose position left memory.
    pub demoted: Option<Demoted>,
}

/// One set. Its ranks are always a permutation, and no tag but 0 (empty) is in it twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    shape: Shape,
    tags: [u8; WAYS_MAX],
    ranks: [u8; WAYS_MAX],
    generations: [u8; WAYS_MAX],
    /// Positions by rank, of the first `shape.positions()` ranks.
    positions: [u32; WAYS_MAX],
    prefetches: [u8; WAYS_MAX],
}

impl Set {
    /// A set without objects.
    pub fn empty(shape: Shape) -> Self {
        let mut ranks = [0; WAYS_MAX];
        for (slot, rank) in ranks.iter_mut().enumerate() {
            *rank = slot as u8;
        }
        Self {
            shape,
            tags: [0; WAYS_MAX],
            ranks,
            generations: [0; WAYS_MAX],
            positions: [0; WAYS_MAX],
            prefetches: [0; WAYS_MAX],
        }
    }

    /// Returns the object with this tag.
    pub fn find(&self, tag: u8) -> Option<Entry> {
        debug_assert_ne!(tag, 0, "0 is the empty slot");
        let slot = self.tags[..self.shape.ways()].iter().position(|&t| t == tag)?;
        Some(self.entry(slot))
    }

    /// Returns the object of a slot; its tag is 0 if the slot is empty.
    pub fn entry(&self, slot: usize) -> Entry {
        let rank = usize::from(self.ranks[slot]);
        let place = (rank < self.shape.positions()).then(|| Place {
            position: self.positions[rank],
            generation: self.generations[slot],
            prefetch: self.prefetches[rank],
        });
        Entry {
            slot,
            tag: self.tags[slot],
            rank,
            generation: self.generations[slot],
            place,
        }
    }

    /// The objects of the set.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let slots = (0..self.shape.ways()).filter(|&slot| self.tags[slot] != 0);
        slots.map(|slot| self.entry(slot))
    }

    /// Moves a slot to rank 0. `place` is the place of its object (ignored by policies that keep no
    /// positions). Returns the object whose position left memory, if there is one.
    pub fn touch(&mut self, slot: usize, place: Place) -> Option<Demoted> {
        let kept = self.shape.positions();
        let from = usize::from(self.ranks[slot]);
        let demoted = (kept > 0 && from >= kept)
            .then(|| self.slot_of_rank(kept - 1))
            .filter(|&slot| self.tags[slot] != 0)
            .map(|slot| Demoted {
                slot,
                place: Place {
                    position: self.positions[kept - 1],
                    generation: self.generations[slot],
                    prefetch: self.prefetches[kept - 1],
                },
            });
        for rank in &mut self.ranks[..self.shape.ways()] {
            if usize::from(*rank) < from {
                *rank += 1;
            }
        }
        self.ranks[slot] = 0;
        if kept > 0 {
            let last = from.min(kept - 1);
            self.positions.copy_within(..last, 1);
            self.prefetches.copy_within(..last, 1);
            self.positions[0] = place.position;
            self.prefetches[0] = place.prefetch;
            self.generations[slot] = place.generation;
        }
        demoted
    }

    /// Puts an object with this tag at `place`: into the slot of the same tag, else an empty one, else that
    /// of a dead object, else that of the least recently used object. An equal tag mostly belongs to the
    /// object's old version; the old version never stays beside a new one.
    pub fn insert(&mut self, tag: u8, place: Place, dead: impl Fn(&Entry) -> bool) -> Inserted {
        let slot = self.victim(tag, dead);
        self.insert_at(slot, tag, place)
    }

    /// Returns the slot that [`insert`](Self::insert) would take.
    pub fn victim(&self, tag: u8, dead: impl Fn(&Entry) -> bool) -> usize {
        let ways = self.shape.ways();
        let by_tag = |tag| self.tags[..ways].iter().position(|&t| t == tag);
        let oldest_dead = || {
            let dead = self.entries().filter(|entry| dead(entry));
            dead.max_by_key(|entry| entry.rank).map(|entry| entry.slot)
        };
        by_tag(tag)
            .or_else(|| by_tag(0))
            .or_else(oldest_dead)
            .unwrap_or_else(|| self.slot_of_rank(ways - 1))
    }

    /// Puts an object into a slot, replacing the object there. Another slot with the same tag is emptied.
    pub fn insert_at(&mut self, slot: usize, tag: u8, place: Place) -> Inserted {
        debug_assert_ne!(tag, 0, "0 is the empty slot");
        let old = self.entry(slot);
        let demoted = self.touch(slot, place);
        for other in &mut self.tags[..self.shape.ways()] {
            if *other == tag {
                *other = 0;
            }
        }
        self.tags[slot] = tag;
        Inserted {
            slot,
            evicted: (old.tag != 0).then_some(old),
            demoted: demoted.filter(|demoted| self.tags[demoted.slot] != 0),
        }
    }

    /// Empties a slot. All ranks stay.
    pub fn remove(&mut self, slot: usize) {
        self.tags[slot] = 0;
    }

    fn slot_of_rank(&self, rank: usize) -> usize {
        let ranks = &self.ranks[..self.shape.ways()];
        let found = ranks.iter().position(|&r| usize::from(r) == rank);
        found.expect("ranks are a permutation")
    }

    /// Writes the set as `shape.set_bytes()` bytes.
    pub fn pack(&self, out: &mut [u8]) {
        let (shape, ways) = (self.shape, self.shape.ways());
        let (tags, rest) = out.split_at_mut(ways);
        tags.copy_from_slice(&self.tags[..ways]);
        let bits = shape.rank_bits();
        let mut ranks = 0u64;
        for (slot, &rank) in self.ranks[..ways].iter().enumerate() {
            ranks |= (u64::from(rank) ^ slot as u64) << (slot as u32 * bits);
        }
        let (field, mut rest) = rest.split_at_mut(ways * bits as usize / 8);
        field.copy_from_slice(&ranks.to_le_bytes()[..field.len()]);
        if shape.has_generations() {
            let (field, after) = rest.split_at_mut(ways / 2);
            for (pair, byte) in field.iter_mut().enumerate() {
                *byte = self.generations[2 * pair] & 15 | self.generations[2 * pair + 1] << 4;
            }
            rest = after;
        }
        let (field, rest) = rest.split_at_mut(4 * shape.positions());
        for (bytes, position) in field.chunks_exact_mut(4).zip(self.positions) {
            bytes.copy_from_slice(&position.to_le_bytes());
        }
        rest.copy_from_slice(&self.prefetches[..shape.prefetches()]);
    }

    /// Reads a packed set; `None` if its ranks are no permutation or a tag occurs twice, as in a set whose
    /// content is on disk ([`unloaded`](Self::unloaded)) or in damaged bytes.
    pub fn unpack(shape: Shape, bytes: &[u8]) -> Option<Self> {
        let ways = shape.ways();
        let mut set = Self::empty(shape);
        let (tags, rest) = bytes.split_at(ways);
        set.tags[..ways].copy_from_slice(tags);
        let bits = shape.rank_bits();
        let (field, mut rest) = rest.split_at(ways * bits as usize / 8);
        let mut packed = [0; 8];
        packed[..field.len()].copy_from_slice(field);
        let packed = u64::from_le_bytes(packed);
        let mut seen = 0u32;
        for slot in 0..ways {
            let stored = packed >> (slot as u32 * bits) & (ways as u64 - 1);
            let rank = stored ^ slot as u64;
            set.ranks[slot] = rank as u8;
            seen |= 1 << rank;
        }
        if seen.count_ones() as usize != ways {
            return None;
        }
        if shape.has_generations() {
            let (field, after) = rest.split_at(ways / 2);
            for (pair, byte) in field.iter().enumerate() {
                set.generations[2 * pair] = byte & 15;
                set.generations[2 * pair + 1] = byte >> 4;
            }
            rest = after;
        }
        let (field, rest) = rest.split_at(4 * shape.positions());
        for (position, bytes) in set.positions.iter_mut().zip(field.chunks_exact(4)) {
            *position = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        set.prefetches[..shape.prefetches()].copy_from_slice(&rest[..shape.prefetches()]);
        let twice = |(n, tag): (usize, &u8)| *tag != 0 && set.tags[..n].contains(tag);
        (!set.tags[..ways].iter().enumerate().any(twice)).then_some(set)
    }

    /// Writes bytes that no valid set has: they mark a set whose content is on disk, not in memory.
    pub fn unloaded(shape: Shape, out: &mut [u8]) {
        out.fill(0);
        // Slots 0 and 1 get equal ranks.
        out[shape.ways()] = 1;
    }
}
