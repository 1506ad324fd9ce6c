//! What checkpoints know of handles: arrays and maps by name, and whether a handle of the program has them.
//!
//! Under the locks here nothing is locked but the list of free buckets of a map.

use super::{Array, Core};
use crate::budget::Budget;
use crate::checkpoint::{ArrayRecord, MapRecord};
use crate::error::Error;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Memory of what is known of a handle, about.
const HANDLE_BYTES: u64 = 192;

/// What of a map stays in memory, beside its arrays.
#[derive(Debug)]
pub(crate) struct MapState {
    pub(crate) key_bytes: u32,
    pub(crate) value_bytes: u32,
    pub(crate) secret: [u64; 2],
    pub(crate) len: AtomicUsize,
    /// Buckets of chains that nobody uses.
    pub(crate) free: Mutex<Vec<u32>>,
}

#[derive(Debug)]
struct KnownArray {
    record: ArrayRecord,
    is_open: bool,
    /// A map has it.
    is_owned: bool,
}

#[derive(Debug)]
struct KnownMap {
    state: Arc<MapState>,
    buckets: u64,
    chains: u64,
    is_open: bool,
}

impl KnownMap {
    fn record(&self, handle: u64) -> MapRecord {
        MapRecord {
            handle,
            key_bytes: self.state.key_bytes,
            value_bytes: self.state.value_bytes,
            secret: self.state.secret,
            buckets: self.buckets,
            chains: self.chains,
            len: self.state.len.load(Ordering::Relaxed) as u64,
            free: self.state.free.lock().clone(),
        }
    }
}

/// All arrays and maps that have names.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    arrays: HashMap<u64, KnownArray>,
    maps: HashMap<u64, KnownMap>,
    touched: HashSet<u64>,
    gone: HashSet<u64>,
    last: u64,
}

/// What of them goes into a checkpoint.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) arrays: Vec<ArrayRecord>,
    pub(crate) maps: Vec<MapRecord>,
    pub(crate) gone: Vec<u64>,
    pub(crate) next: u64,
    touched: HashSet<u64>,
}

impl Handles {
    /// Notes what an array is now; a new one gets a name.
    pub(crate) fn note_array(&mut self, mut record: ArrayRecord, tables: &[u32], budget: &Budget) -> u64 {
        if record.handle == 0 {
            self.last += 1;
            record.handle = self.last;
        }
        let handle = record.handle;
        self.touched.insert(handle);
        let known = self.arrays.entry(handle).or_insert_with(|| {
            budget.force(HANDLE_BYTES);
            KnownArray {
                record: ArrayRecord {
                    tables: Vec::new(),
                    ..record.clone()
                },
                is_open: true,
                is_owned: false,
            }
        });
        known.record.len = record.len;
        let before = known.record.tables.len();
        let common = before.min(tables.len());
        if known.record.tables[..common].last() == tables[..common].last() {
            known.record.tables.truncate(common);
            known.record.tables.extend_from_slice(&tables[common..]);
        } else {
            known.record.tables = tables.to_vec();
        }
        budget.force(4 * tables.len() as u64);
        budget.give_back(4 * before as u64);
        handle
    }

    /// Notes a map; gives its name.
    pub(crate) fn note_map(
        &mut self,
        state: &Arc<MapState>,
        buckets: u64,
        chains: u64,
        budget: &Budget,
    ) -> u64 {
        self.last += 1;
        budget.force(HANDLE_BYTES);
        let known = KnownMap {
            state: Arc::clone(state),
            buckets,
            chains,
            is_open: true,
        };
        self.maps.insert(self.last, known);
        self.own(buckets);
        self.own(chains);
        self.last
    }

    fn own(&mut self, array: u64) {
        if let Some(known) = self.arrays.get_mut(&array) {
            known.is_owned = true;
        }
    }

    /// Gives an array to a handle, or to the map that has it.
    pub(crate) fn open_array(&mut self, handle: u64, is_of_map: bool) -> Result<ArrayRecord, &'static str> {
        let known = self.arrays.get_mut(&handle).ok_or("not an array's")?;
        if known.is_owned != is_of_map {
            return Err("part of a map");
        }
        if std::mem::replace(&mut known.is_open, true) {
            return Err("open already");
        }
        Ok(known.record.clone())
    }

    /// Gives a map to a handle: its state, and the names of its arrays.
    pub(crate) fn open_map(&mut self, handle: u64) -> Result<(Arc<MapState>, u64, u64), &'static str> {
        let known = self.maps.get_mut(&handle).ok_or("not a map's")?;
        if std::mem::replace(&mut known.is_open, true) {
            return Err("open already");
        }
        Ok((Arc::clone(&known.state), known.buckets, known.chains))
    }

    /// No handle of the program has it any more; it stays.
    pub(crate) fn close(&mut self, handle: u64) {
        if let Some(known) = self.arrays.get_mut(&handle) {
            known.is_open = false;
        }
        if let Some(known) = self.maps.get_mut(&handle) {
            known.is_open = false;
        }
    }

    /// A name for slots of somebody outside.
    pub(crate) fn name_slots(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// They are no more.
    pub(crate) fn end_slots(&mut self, handle: u64) {
        self.gone.insert(handle);
    }

    /// It is no more.
    pub(crate) fn end(&mut self, handle: u64, budget: &Budget) {
        if let Some(known) = self.arrays.remove(&handle) {
            budget.give_back(HANDLE_BYTES + 4 * known.record.tables.len() as u64);
            self.gone.insert(handle);
        }
        if self.maps.remove(&handle).is_some() {
            budget.give_back(HANDLE_BYTES);
            self.gone.insert(handle);
        }
        self.touched.remove(&handle);
    }

    /// All that is known, or what changed since the last call: maps always.
    pub(crate) fn snapshot(&mut self, is_whole: bool) -> Snapshot {
        let touched = std::mem::take(&mut self.touched);
        let arrays = self.arrays.iter();
        Snapshot {
            arrays: arrays
                .filter(|(handle, _)| is_whole || touched.contains(handle))
                .map(|(_, known)| known.record.clone())
                .collect(),
            maps: self
                .maps
                .iter()
                .map(|(handle, known)| known.record(*handle))
                .collect(),
            gone: std::mem::take(&mut self.gone).into_iter().collect(),
            next: self.last + 1,
            touched,
        }
    }

    /// What a checkpoint did not save is for the next one.
    pub(crate) fn give_back(&mut self, snapshot: Snapshot) {
        let arrays = &self.arrays;
        self.touched.extend(
            snapshot
                .touched
                .into_iter()
                .filter(|handle| arrays.contains_key(handle)),
        );
        self.gone.extend(snapshot.gone);
    }

    /// What a checkpoint has; no handle of the program has any of it.
    pub(crate) fn restore(
        arrays: impl Iterator<Item = ArrayRecord>,
        maps: impl Iterator<Item = MapRecord>,
        next: u64,
        budget: &Budget,
    ) -> Self {
        let arrays = arrays.map(|record| {
            budget.force(HANDLE_BYTES + 4 * record.tables.len() as u64);
            let known = KnownArray {
                record,
                is_open: false,
                is_owned: false,
            };
            (known.record.handle, known)
        });
        let maps = maps.map(|record| {
            budget.force(HANDLE_BYTES);
            let state = MapState {
                key_bytes: record.key_bytes,
                value_bytes: record.value_bytes,
                secret: record.secret,
                len: AtomicUsize::new(record.len as usize),
                free: Mutex::new(record.free),
            };
            let known = KnownMap {
                state: Arc::new(state),
                buckets: record.buckets,
                chains: record.chains,
                is_open: false,
            };
            (record.handle, known)
        });
        let mut all = Self {
            arrays: arrays.collect(),
            maps: maps.collect(),
            last: next.saturating_sub(1),
            ..Self::default()
        };
        let owned: Vec<_> = all.maps.values().map(|map| (map.buckets, map.chains)).collect();
        for (buckets, chains) in owned {
            all.own(buckets);
            all.own(chains);
        }
        all
    }
}

/// Shapes of all tables, and which of them are new.
#[derive(Debug, Default)]
pub(crate) struct Shapes {
    /// Slots and length of new objects by number; no slots: no table.
    pub(crate) all: Vec<(u32, u16)>,
    /// Tables that were made, became longer or ended since the last cut; whether they were made or ended.
    pub(crate) touched: HashMap<u32, bool>,
}

impl Shapes {
    pub(crate) fn note(&mut self, number: u32, slots: usize, len_bytes: u16, is_new: bool, budget: &Budget) {
        let at = number as usize;
        if self.all.len() <= at {
            budget.force((at + 1 - self.all.len()) as u64 * 8);
            self.all.resize(at + 1, (0, 0));
        }
        self.all[at] = (slots as u32, len_bytes);
        *self.touched.entry(number).or_default() |= is_new;
    }
}

impl Core {
    /// Notes a new map; gives its name.
    pub(crate) fn note_map(&self, state: &Arc<MapState>, buckets: &Array, chains: &Array) -> u64 {
        let (Ok(buckets), Ok(chains)) = (buckets.handle(self), chains.handle(self)) else {
            return 0;
        };
        let Ok(saver) = self.saver() else { return 0 };
        saver
            .handles
            .lock()
            .note_map(state, buckets, chains, &self.budget)
    }

    /// The map of a name: its state, its buckets, those of chains.
    pub(crate) fn open_map(
        &self,
        name: u64,
        sizes: (u32, u32),
        bucket_bytes: usize,
    ) -> Result<(Arc<MapState>, Array, Array), Error> {
        let handles = &self.saver()?.handles;
        let opened = handles.lock().open_map(name);
        let (state, buckets, chains) = opened.map_err(|what| self.refused_handle(name, what))?;
        if (state.key_bytes, state.value_bytes) != sizes {
            handles.lock().close(name);
            return Err(self.refused_handle(name, "a map of keys and values of other sizes"));
        }
        let open = |handle| Array::open(self, handle, bucket_bytes, true);
        let arrays = open(buckets).and_then(|mut buckets| match open(chains) {
            Ok(chains) => Ok((buckets, chains)),
            Err(error) => {
                buckets.close(self);
                Err(error)
            }
        });
        match arrays {
            Ok((buckets, chains)) => Ok((state, buckets, chains)),
            Err(error) => {
                handles.lock().close(name);
                Err(error)
            }
        }
    }

    /// Ends the use of a map, which stays.
    pub(crate) fn close_map(&self, name: u64) {
        if let Some(saver) = &self.saver {
            saver.handles.lock().close(name);
        }
    }

    /// The map is no more.
    pub(crate) fn end_map(&self, name: u64) {
        if let Some(saver) = &self.saver {
            saver.handles.lock().end(name, &self.budget);
        }
    }
}
