//! A hash table: [`FarMap`], by linear hashing over buckets that are far objects.
//!
//! A bucket holds as many entries as fit into half a kilobyte (at least 4, where entries are larger), and
//! others follow it in a chain. The table grows by one bucket at a time, which splits one other: no insertion
//! waits for all to be hashed anew. No part of the index but the object tables stays in memory.
//!
//! Locks: shape, then one stripe of the buckets, then the overflow buckets, then the heap's. A split has the
//! shape for
//! itself, and is put off where it cannot have it at once: nobody waits to write the shape, so a thread that
//! reads it
//! may read it again.

mod bucket;

use crate::error::Error;
use crate::heap::{Array, FarHeap, Intent, MapState, Pin};
use crate::table::Key;
use crate::value::Plain;
use bucket::{Link, Shape};
use parking_lot::{Mutex, RwLock};
use siphasher::sip::SipHasher13;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const STRIPES: usize = 64;
/// Buckets that an insertion adds at most.
const SPLITS_AT_ONCE: usize = 8;
/// A chain that is longer is none that was stored: a device that forges checksums could link one to itself.
const CHAIN_MAX: usize = 1 << 16;
/// Memory that the list of free ones takes for each bucket of a chain.
const FREE_BYTES: u64 = 2 * size_of::<u32>() as u64;

/// A hash map in far memory, from plain keys to plain values; keys are the same if their bytes are.
///
/// Every operation is atomic, and may be made by several threads. Dropping the map frees everything, without
/// I/O.
///
/// ```
/// use varve_far::Dram;
/// use varve_far_objects::{Config, FarHeap, FarMap};
///
/// let heap = FarHeap::new(Dram::new(8), &Config::new(4 << 20))?;
/// let map: FarMap<u64, [u8; 100]> = FarMap::new(&heap)?;
/// map.insert(7, [1; 100])?;
/// assert_eq!(map.get(&7)?, Some([1; 100]));
/// assert_eq!(map.remove(&7)?, Some([1; 100]));
/// assert!(map.is_empty());
/// # Ok::<(), varve_far_objects::Error>(())
/// ```
pub struct FarMap<K: Plain, V: Plain> {
    heap: FarHeap,
    shape: Shape,
    /// Its name in checkpoints, where there are some.
    name: u64,
    buckets: RwLock<Array>,
    /// Buckets of chains.
    overflow: RwLock<Array>,
    stripes: Box<[Mutex<()>]>,
    state: Arc<MapState>,
    entry: PhantomData<(K, V)>,
}

impl<K: Plain, V: Plain> FarMap<K, V> {
    /// An empty map.
    ///
    /// # Errors
    /// `ZeroSize`, `TooLarge` where an entry does not fit into an object; `Full`, `MemoryLimit`, `Io`.
    pub fn new(heap: &FarHeap) -> Result<Self, Error> {
        let shape = Shape::new(size_of::<K>(), size_of::<V>())?;
        let core = heap.core();
        let _together = core.together();
        let random = RandomState::new();
        let state = MapState {
            key_bytes: size_of::<K>() as u32,
            value_bytes: size_of::<V>() as u32,
            secret: [random.hash_one(0u64), random.hash_one(1u64)],
            len: AtomicUsize::new(0),
            free: Mutex::default(),
        };
        let mut map = Self {
            heap: heap.clone(),
            shape,
            name: 0,
            buckets: RwLock::new(Array::new(core, shape.bucket_bytes())?),
            overflow: RwLock::new(Array::new(core, shape.bucket_bytes())?),
            stripes: (0..STRIPES).map(|_| Mutex::default()).collect(),
            state: Arc::new(state),
            entry: PhantomData,
        };
        map.buckets.get_mut().grow(core, 1)?;
        map.name = core.note_map(&map.state, map.buckets.get_mut(), map.overflow.get_mut());
        Ok(map)
    }

    /// The map of a name, in a restored heap or after [`Self::keep`].
    ///
    /// # Errors
    /// `Refused` where there is none of keys and values of these sizes, or it is open already;
    /// `NoCheckpoints`.
    pub fn open(heap: &FarHeap, name: u64) -> Result<Self, Error> {
        let shape = Shape::new(size_of::<K>(), size_of::<V>())?;
        let core = heap.core();
        let sizes = (size_of::<K>() as u32, size_of::<V>() as u32);
        let (state, buckets, overflow) = core.open_map(name, sizes, shape.bucket_bytes())?;
        core.count_memory(overflow.len() as u64 * FREE_BYTES);
        Ok(Self {
            heap: heap.clone(),
            shape,
            name,
            buckets: RwLock::new(buckets),
            overflow: RwLock::new(overflow),
            stripes: (0..STRIPES).map(|_| Mutex::default()).collect(),
            state,
            entry: PhantomData,
        })
    }

    /// The map's name, for [`Self::open`].
    ///
    /// # Errors
    /// `NoCheckpoints`.
    pub fn name(&self) -> Result<u64, Error> {
        self.heap.core().check_checkpoints()?;
        Ok(self.name)
    }

    /// Ends the handle and leaves the map. Gives its name.
    ///
    /// # Errors
    /// `NoCheckpoints`: the map is dropped.
    pub fn keep(mut self) -> Result<u64, Error> {
        let name = self.name()?;
        let core = self.heap.core();
        core.uncount_memory(self.overflow.get_mut().len() as u64 * FREE_BYTES);
        self.buckets.get_mut().close(core);
        self.overflow.get_mut().close(core);
        core.close_map(name);
        self.name = 0;
        Ok(name)
    }

    /// Entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.state.len.load(Ordering::Relaxed)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn bucket_of(&self, key: &[u8], buckets: usize) -> usize {
        let [first, second] = self.state.secret;
        let mut hasher = SipHasher13::new_with_keys(first, second);
        hasher.write(key);
        let hash = hasher.finish() as usize;
        let bits = buckets.ilog2();
        let wide = hash & ((2 << bits) - 1);
        if wide < buckets {
            wide
        } else {
            hash & ((1 << bits) - 1)
        }
    }

    /// The object of a bucket of a chain.
    fn overflow_key(&self, link: Link) -> Result<Key, Error> {
        self.overflow.read().place(link.0 as usize).map(|(key, _)| key)
    }

    /// Calls `visit` with each bucket of a chain until it gives something.
    fn walk<R>(
        &self,
        first: Key,
        mut visit: impl FnMut(Key, &[u8]) -> Option<R>,
    ) -> Result<Option<R>, Error> {
        let mut key = first;
        for _ in 0..CHAIN_MAX {
            let (found, next) = self
                .heap
                .core()
                .read_with(key, |bytes| (visit(key, bytes), self.shape.next(bytes)))?;
            match (found, next) {
                (Some(found), _) => return Ok(Some(found)),
                (None, None) => return Ok(None),
                (None, Some(link)) => key = self.overflow_key(link)?,
            }
        }
        Err(Error::NotAllocated(first.number()))
    }

    /// Does something with the first bucket of a key's chain, while nobody else changes the chain.
    fn with_chain<R>(&self, key: &[u8], act: impl FnOnce(Key) -> Result<R, Error>) -> Result<R, Error> {
        let buckets = self.buckets.read();
        let bucket = self.bucket_of(key, buckets.len());
        let _stripe = self.stripes[bucket % STRIPES].lock();
        act(buckets.place(bucket)?.0)
    }

    /// The value of a key.
    ///
    /// # Errors
    /// `Io`, `Damaged`.
    pub fn get(&self, key: &K) -> Result<Option<V>, Error> {
        let key = key.as_bytes();
        self.with_chain(key, |first| {
            self.walk(first, |_, bytes| {
                let index = self.shape.find(bytes, key)?;
                V::read_from_bytes(self.shape.value(bytes, index)?).ok()
            })
        })
    }

    /// Whether there is a key.
    ///
    /// # Errors
    /// `Io`, `Damaged`.
    pub fn contains_key(&self, key: &K) -> Result<bool, Error> {
        self.get(key).map(|value| value.is_some())
    }

    /// Stores a value and gives the one before.
    ///
    /// # Errors
    /// `Full`, `MemoryLimit`, `Io`, `Damaged`: the map is as it was.
    pub fn insert(&self, key: K, value: V) -> Result<Option<V>, Error> {
        let (key, value) = (key.as_bytes(), value.as_bytes());
        let _together = self.heap.core().together();
        let before = self.with_chain(key, |first| self.insert_into(first, key, value))?;
        if before.is_none() {
            self.state.len.fetch_add(1, Ordering::Relaxed);
            self.split_if_full();
        }
        Ok(before)
    }

    fn insert_into(&self, first: Key, key: &[u8], value: &[u8]) -> Result<Option<V>, Error> {
        let mut with_room = None;
        let found = self.walk(first, |object, bytes| {
            if with_room.is_none() && self.shape.has_room(bytes) {
                with_room = Some(object);
            }
            self.shape.find(bytes, key).map(|index| (object, index))
        })?;
        let core = self.heap.core();
        if let Some((object, index)) = found {
            return core.write_with(object, Intent::Change, |bytes| {
                let before = self
                    .shape
                    .value(bytes, index)
                    .and_then(|old| V::read_from_bytes(old).ok());
                self.shape.set_value(bytes, index, value);
                before
            });
        }
        match with_room {
            Some(object) => {
                core.write_with(object, Intent::Change, |bytes| self.shape.push(bytes, key, value))?
            }
            None => self.chain(first, key, value)?,
        }
        Ok(None)
    }

    /// Puts a new bucket with one entry behind the first of a chain.
    fn chain(&self, first: Key, key: &[u8], value: &[u8]) -> Result<(), Error> {
        let (link, object) = self.take_overflow()?;
        let core = self.heap.core();
        let linked = core
            .read_with(first, |bytes| self.shape.next(bytes))
            .and_then(|next| {
                core.write_with(object, Intent::Replace, |bytes| {
                    self.shape.clear(bytes, next);
                    self.shape.push(bytes, key, value);
                })?;
                core.write_with(first, Intent::Change, |bytes| {
                    self.shape.set_next(bytes, Some(link))
                })
            });
        if linked.is_err() {
            self.state.free.lock().push(link.0);
        }
        linked
    }

    fn take_overflow(&self) -> Result<(Link, Key), Error> {
        let mut overflow = self.overflow.write();
        let free = self.state.free.lock().pop();
        let number = match free {
            Some(number) => number,
            None => {
                let number = overflow.len();
                overflow.grow(self.heap.core(), number + 1)?;
                self.heap.core().count_memory(FREE_BYTES);
                number as u32
            }
        };
        let (key, _) = overflow.place(number as usize)?;
        Ok((Link(number), key))
    }

    /// Takes a key out and gives its value.
    ///
    /// # Errors
    /// `MemoryLimit`, `Io`, `Full`, `Damaged`: the map is as it was.
    pub fn remove(&self, key: &K) -> Result<Option<V>, Error> {
        let key = key.as_bytes();
        let _together = self.heap.core().together();
        let removed = self.with_chain(key, |first| {
            let found = self.walk(first, |object, bytes| {
                self.shape.find(bytes, key).map(|index| (object, index))
            })?;
            let Some((object, index)) = found else {
                return Ok(None);
            };
            self.heap.core().write_with(object, Intent::Change, |bytes| {
                let value = self
                    .shape
                    .value(bytes, index)
                    .and_then(|old| V::read_from_bytes(old).ok());
                self.shape.remove(bytes, index);
                value
            })
        })?;
        if removed.is_some() {
            self.state.len.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(removed)
    }

    /// Calls `each` with every entry that is there all the time, once; with others once or not at all. `each` may
    /// use the map.
    ///
    /// # Errors
    /// `Io`, `Damaged`: what follows was not seen.
    pub fn for_each(&self, mut each: impl FnMut(K, V)) -> Result<(), Error> {
        // Buckets are split meanwhile: many walks, one after the other, would else leave chains as long as
        // they get. Number of buckets at the visits from each bucket on.
        let mut lens: Vec<(usize, usize)> = Vec::new();
        let mut entries = Vec::new();
        for bucket in 0.. {
            {
                let buckets = self.buckets.read();
                let len = buckets.len();
                if bucket >= len {
                    break;
                }
                if lens.last().is_none_or(|(_, before)| *before != len) {
                    lens.push((bucket, len));
                }
                let (first, _) = buckets.place(bucket)?;
                let _stripe = self.stripes[bucket % STRIPES].lock();
                self.walk(first, |_, bytes| {
                    entries.extend(self.shape.entries(bytes).map(<[u8]>::to_vec));
                    None::<()>
                })?;
            }
            for entry in entries.drain(..) {
                let (key, value) = entry.split_at(size_of::<K>());
                if self.was_visited(key, bucket, &lens) {
                    continue;
                }
                if let (Ok(key), Ok(value)) = (K::read_from_bytes(key), V::read_from_bytes(value)) {
                    each(key, value);
                }
            }
        }
        Ok(())
    }

    /// Whether a walk that has come to `bucket` has seen a key of it in a bucket from which that was split, when
    /// the key was there still.
    fn was_visited(&self, key: &[u8], bucket: usize, lens: &[(usize, usize)]) -> bool {
        let mut before = bucket;
        while before > 0 {
            before -= 1 << before.ilog2();
            let known = lens.partition_point(|(from, _)| *from <= before);
            if known > 0 && self.bucket_of(key, lens[known - 1].1) == before {
                return true;
            }
        }
        false
    }

    /// Adds buckets where chains get long. Where it cannot be done now it is done after a later insertion, with
    /// those that are missing by then.
    fn split_if_full(&self) {
        let Some(mut buckets) = self.buckets.try_write() else {
            return;
        };
        for _ in 0..SPLITS_AT_ONCE {
            if self.len().saturating_mul(4) < buckets.len() * self.shape.capacity() * 3 {
                return;
            }
            let new = buckets.len();
            let core = self.heap.core();
            if buckets.grow(core, new + 1).is_err() {
                return;
            }
            if self.split(&buckets, new).is_err() {
                buckets.truncate(core, new);
                return;
            }
        }
    }

    /// Fills bucket `new` with its entries of the bucket that they are in until now. All or nothing.
    fn split(&self, buckets: &Array, new: usize) -> Result<(), Error> {
        let (old_key, _) = buckets.place(new - (1 << new.ilog2()))?;
        // Pinned, so that the last step cannot fail.
        let (pins, links) = self.pin_chain(old_key)?;
        let (mut stay, mut leave) = (Vec::new(), Vec::new());
        for pin in &pins {
            pin.read(|bytes| {
                for entry in self.shape.entries(bytes) {
                    let bucket = self.bucket_of(&entry[..size_of::<K>()], buckets.len());
                    let side = if bucket == new { &mut leave } else { &mut stay };
                    side.push(entry.to_vec());
                }
            });
        }
        self.write_chain(buckets.place(new)?.0, &leave)?;
        let needed = stay.len().div_ceil(self.shape.capacity()).max(1);
        for (number, pin) in pins.iter().enumerate().take(needed) {
            let next = if number + 1 < needed {
                links.get(number).copied()
            } else {
                None
            };
            let entries = stay
                .iter()
                .skip(number * self.shape.capacity())
                .take(self.shape.capacity());
            pin.write(|bytes| self.shape.fill(bytes, next, entries));
        }
        drop(pins);
        self.state
            .free
            .lock()
            .extend(links.iter().skip(needed - 1).map(|link| link.0));
        Ok(())
    }

    fn pin_chain(&self, first: Key) -> Result<(Vec<Pin<'_>>, Vec<Link>), Error> {
        let mut pins = vec![self.heap.core().pin(first)?];
        let mut links = Vec::new();
        while let Some(Some(link)) = pins
            .last()
            .and_then(|pin| pin.read(|bytes| self.shape.next(bytes)))
        {
            pins.push(self.heap.core().pin(self.overflow_key(link)?)?);
            links.push(link);
        }
        Ok((pins, links))
    }

    /// Writes entries to a bucket and, where they are too many, to others behind it.
    fn write_chain(&self, first: Key, entries: &[Vec<u8>]) -> Result<(), Error> {
        let parts: Vec<&[Vec<u8>]> = entries.chunks(self.shape.capacity()).collect();
        let mut taken: Vec<(Link, Key)> = Vec::new();
        let mut write = || -> Result<(), Error> {
            for _ in 1..parts.len() {
                taken.push(self.take_overflow()?);
            }
            for number in (0..parts.len()).rev() {
                let key = if number == 0 { first } else { taken[number - 1].1 };
                let next = taken.get(number).map(|(link, _)| *link);
                self.heap.core().write_with(key, Intent::Replace, |bytes| {
                    self.shape.fill(bytes, next, parts[number].iter());
                })?;
            }
            Ok(())
        };
        let written = write();
        if written.is_err() {
            let free = taken.iter().map(|(link, _)| link.0);
            self.state.free.lock().extend(free);
        }
        written
    }
}

impl<K: Plain, V: Plain> Drop for FarMap<K, V> {
    fn drop(&mut self) {
        let core = self.heap.core();
        let _together = core.together();
        core.end_map(self.name);
        self.buckets.get_mut().end(core);
        let overflow = self.overflow.get_mut();
        core.uncount_memory(overflow.len() as u64 * FREE_BYTES);
        overflow.end(core);
    }
}

impl<K: Plain, V: Plain> std::fmt::Debug for FarMap<K, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FarMap")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}
