//! Page metadata: 12 bytes a page in chunks of 64, with intrusive lists over slots.
//!
//! Owns storage and links; refuses to know the meaning of the lists.

use std::collections::HashMap;

use crate::types::{PageClass, PageKey, ProcId, TierId, VirtPage};

const CHUNK_PAGES: u64 = 64;
pub(super) const NIL: u32 = u32::MAX;

/// Position of a page in the table.
pub(super) type Slot = u32;

/// The list a page is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum ListKind {
    /// Candidates for demotion.
    Inactive = 0,
    /// Warm pages.
    Active = 1,
    /// Candidates for promotion; unused in the fastest tier.
    Promote = 2,
    /// Locked in memory; never scanned.
    Unevictable = 3,
}

const LIST_MASK: u8 = 0b0000_0011;
const REFERENCED: u8 = 0b0000_0100;
const FILE: u8 = 0b0000_1000;
const SPARED: u8 = 0b0001_0000;
const HUGE: u8 = 0b0010_0000;

/// Metadata of one page.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Meta {
    prev: u32,
    next: u32,
    flags: u8,
    tier: u8,
    /// Importance: decayed sum of touches, writes weighted.
    pub(super) heat: u8,
    /// The tier in which it was first found.
    origin: u8,
}

const _: () = assert!(size_of::<Meta>() == 12);

impl Meta {
    const EMPTY: Self = Self {
        prev: NIL,
        next: NIL,
        flags: 0,
        tier: 0,
        heat: 0,
        origin: 0,
    };

    pub(super) fn list(&self) -> ListKind {
        match self.flags & LIST_MASK {
            0 => ListKind::Inactive,
            1 => ListKind::Active,
            2 => ListKind::Promote,
            _ => ListKind::Unevictable,
        }
    }
    pub(super) fn referenced(&self) -> bool {
        self.flags & REFERENCED != 0
    }
    pub(super) fn set_referenced(&mut self, on: bool) {
        if on {
            self.flags |= REFERENCED
        } else {
            self.flags &= !REFERENCED
        }
    }
    pub(super) fn spared(&self) -> bool {
        self.flags & SPARED != 0
    }
    pub(super) fn set_spared(&mut self, on: bool) {
        if on {
            self.flags |= SPARED
        } else {
            self.flags &= !SPARED
        }
    }
    pub(super) fn huge(&self) -> bool {
        self.flags & HUGE != 0
    }
    pub(super) fn set_huge(&mut self, on: bool) {
        if on {
            self.flags |= HUGE
        } else {
            self.flags &= !HUGE
        }
    }
    pub(super) fn class(&self) -> PageClass {
        if self.flags & FILE != 0 {
            PageClass::File
        } else {
            PageClass::Anon
        }
    }
    pub(super) fn origin(&self) -> TierId {
        TierId(self.origin)
    }
    pub(super) fn tier(&self) -> TierId {
        TierId(self.tier)
    }
}

/// Head, tail and length of one list.
#[derive(Debug, Clone, Copy)]
pub(super) struct List {
    pub(super) head: Slot,
    pub(super) tail: Slot,
    pub(super) len: u64,
}

impl List {
    pub(super) const EMPTY: Self = Self {
        head: NIL,
        tail: NIL,
        len: 0,
    };
}

#[derive(Debug, Clone, Copy)]
struct Chunk {
    proc: ProcId,
    first: u64,
    present: u64,
}

/// All pages, and the lists of every tier.
#[derive(Debug)]
pub(super) struct Table {
    chunks: Vec<Chunk>,
    metas: Vec<Meta>,
    index: HashMap<(ProcId, u64), u32>,
    free: Vec<u32>,
    lists: Vec<[[List; 4]; 2]>,
    pages: u64,
}

fn class_index(class: PageClass) -> usize {
    match class {
        PageClass::Anon => 0,
        PageClass::File => 1,
    }
}

impl Table {
    pub(super) fn new(tiers: usize) -> Self {
        Self {
            chunks: Vec::new(),
            metas: Vec::new(),
            index: HashMap::new(),
            free: Vec::new(),
            lists: vec![[[List::EMPTY; 4]; 2]; tiers],
            pages: 0,
        }
    }

    pub(super) fn slot(&self, key: PageKey) -> Option<Slot> {
        let chunk = *self.index.get(&(key.proc, key.page.0 / CHUNK_PAGES))?;
        let offset = key.page.0 % CHUNK_PAGES;
        let here = self.chunks[chunk as usize].present >> offset & 1 == 1;
        here.then_some(chunk * CHUNK_PAGES as u32 + offset as u32)
    }

    pub(super) fn key(&self, slot: Slot) -> PageKey {
        let chunk = self.chunks[(slot / CHUNK_PAGES as u32) as usize];
        PageKey::new(chunk.proc, VirtPage(chunk.first + u64::from(slot) % CHUNK_PAGES))
    }

    pub(super) fn meta(&self, slot: Slot) -> &Meta {
        &self.metas[slot as usize]
    }

    pub(super) fn meta_mut(&mut self, slot: Slot) -> &mut Meta {
        &mut self.metas[slot as usize]
    }

    /// Returns the 64 presence bits of the chunk that starts at page `first` (a multiple of 64).
    pub(super) fn present(&self, proc: ProcId, first: u64) -> u64 {
        self.index
            .get(&(proc, first / CHUNK_PAGES))
            .map_or(0, |c| self.chunks[*c as usize].present)
    }

    /// Adds a page at the head of a list; `None` if it is present already or the table is full (2^32 pages).
    pub(super) fn insert(
        &mut self,
        key: PageKey,
        class: PageClass,
        tier: TierId,
        kind: ListKind,
    ) -> Option<Slot> {
        let number = key.page.0 / CHUNK_PAGES;
        let offset = key.page.0 % CHUNK_PAGES;
        let chunk = match self.index.get(&(key.proc, number)) {
            Some(chunk) => *chunk,
            None => self.new_chunk(key.proc, number)?,
        };
        let bits = &mut self.chunks[chunk as usize].present;
        if *bits >> offset & 1 == 1 {
            return None;
        }
        *bits |= 1 << offset;
        let slot = chunk * CHUNK_PAGES as u32 + offset as u32;
        let flags = if class == PageClass::File { FILE } else { 0 };
        self.metas[slot as usize] = Meta {
            flags,
            tier: tier.0,
            origin: tier.0,
            ..Meta::EMPTY
        };
        self.pages += 1;
        self.link(slot, tier, kind);
        Some(slot)
    }

    fn new_chunk(&mut self, proc: ProcId, number: u64) -> Option<u32> {
        let fresh = Chunk {
            proc,
            first: number * CHUNK_PAGES,
            present: 0,
        };
        let chunk = if let Some(chunk) = self.free.pop() {
            self.chunks[chunk as usize] = fresh;
            chunk
        } else {
            let chunk = u32::try_from(self.chunks.len())
                .ok()
                .filter(|c| *c < NIL / CHUNK_PAGES as u32)?;
            if self.chunks.len() == self.chunks.capacity() {
                // An eighth more at a time: doubling would leave up to half of the metadata unused.
                let more = self.chunks.len() / 8 + 16;
                self.chunks.reserve_exact(more);
                self.metas.reserve_exact(more * CHUNK_PAGES as usize);
            }
            self.chunks.push(fresh);
            self.metas.extend([Meta::EMPTY; CHUNK_PAGES as usize]);
            chunk
        };
        self.index.insert((proc, number), chunk);
        Some(chunk)
    }

    /// Forgets a page.
    pub(super) fn remove(&mut self, slot: Slot) {
        self.unlink(slot);
        self.pages -= 1;
        let chunk = slot / CHUNK_PAGES as u32;
        let entry = &mut self.chunks[chunk as usize];
        entry.present &= !(1 << (slot % CHUNK_PAGES as u32));
        if entry.present == 0 {
            self.index.remove(&(entry.proc, entry.first / CHUNK_PAGES));
            self.free.push(chunk);
        }
    }

    /// Moves a page to the head of a list of any tier.
    pub(super) fn move_to(&mut self, slot: Slot, tier: TierId, kind: ListKind) {
        self.unlink(slot);
        self.link(slot, tier, kind);
    }

    pub(super) fn rotate(&mut self, slot: Slot) {
        let meta = *self.meta(slot);
        self.move_to(slot, meta.tier(), meta.list());
    }

    pub(super) fn list(&self, tier: TierId, class: PageClass, kind: ListKind) -> List {
        self.lists[tier.index()][class_index(class)][kind as usize]
    }

    /// Collects up to `count` slots from the tail (the oldest), nearest to the tail first.
    pub(super) fn tail(
        &self,
        tier: TierId,
        class: PageClass,
        kind: ListKind,
        count: u64,
        out: &mut Vec<Slot>,
    ) {
        out.clear();
        let mut slot = self.list(tier, class, kind).tail;
        while slot != NIL && (out.len() as u64) < count {
            out.push(slot);
            slot = self.meta(slot).prev;
        }
    }

    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    pub(super) fn slots_of(&self, proc: ProcId) -> Vec<Slot> {
        let mine = self.index.iter().filter(|((p, _), _)| *p == proc);
        mine.flat_map(|(_, chunk)| {
            let present = self.chunks[*chunk as usize].present;
            let base = chunk * CHUNK_PAGES as u32;
            (0..CHUNK_PAGES as u32)
                .filter(move |o| present >> o & 1 == 1)
                .map(move |o| base + o)
        })
        .collect()
    }

    /// Returns the bytes of bookkeeping, with the index and unused capacity.
    pub(super) fn bytes(&self) -> u64 {
        let chunk = self.chunks.capacity() * size_of::<Chunk>() + self.free.capacity() * 4;
        let metas = self.metas.capacity() * size_of::<Meta>();
        let index = self.index.capacity() * 8 / 7 * (size_of::<((ProcId, u64), u32)>() + 1);
        (chunk + metas + index) as u64
    }

    fn link(&mut self, slot: Slot, tier: TierId, kind: ListKind) {
        let class = class_index(self.meta(slot).class());
        let list = &mut self.lists[tier.index()][class][kind as usize];
        let old = list.head;
        list.head = slot;
        list.len += 1;
        if old == NIL {
            list.tail = slot;
        } else {
            self.metas[old as usize].prev = slot;
        }
        let meta = &mut self.metas[slot as usize];
        meta.prev = NIL;
        meta.next = old;
        meta.tier = tier.0;
        meta.flags = meta.flags & !LIST_MASK | kind as u8;
    }

    fn unlink(&mut self, slot: Slot) {
        let meta = *self.meta(slot);
        let list = &mut self.lists[meta.tier().index()][class_index(meta.class())][meta.list() as usize];
        list.len -= 1;
        if meta.prev == NIL {
            list.head = meta.next
        }
        if meta.next == NIL {
            list.tail = meta.prev
        }
        if meta.prev != NIL {
            self.metas[meta.prev as usize].next = meta.next
        }
        if meta.next != NIL {
            self.metas[meta.next as usize].prev = meta.prev
        }
    }

    /// Checks every list in both directions and the counts; for tests and for `debug` builds.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut seen = std::collections::HashSet::new();
        for (t, classes) in self.lists.iter().enumerate() {
            for (c, kinds) in classes.iter().enumerate() {
                for (k, list) in kinds.iter().enumerate() {
                    let (mut slot, mut before, mut count) = (list.head, NIL, 0u64);
                    while slot != NIL {
                        let meta = self.meta(slot);
                        if meta.prev != before {
                            return Err(format!("slot {slot}: broken back link"));
                        }
                        let right = meta.tier as usize == t
                            && meta.list() as usize == k
                            && class_index(meta.class()) == c;
                        if !right {
                            return Err(format!("slot {slot} is on a list that its state does not name"));
                        }
                        if !seen.insert(slot) {
                            return Err(format!("slot {slot} is in two lists"));
                        }
                        count += 1;
                        before = slot;
                        slot = meta.next;
                    }
                    if count != list.len || before != list.tail {
                        return Err(format!("list {t}/{c}/{k}: wrong length or tail"));
                    }
                }
            }
        }
        let present: u64 = self
            .chunks
            .iter()
            .map(|c| u64::from(c.present.count_ones()))
            .sum();
        if seen.len() as u64 != self.pages || present != self.pages {
            return Err(format!(
                "{} pages listed, {present} present, {} counted",
                seen.len(),
                self.pages
            ));
        }
        Ok(())
    }
}
