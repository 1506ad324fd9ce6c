//! Single values: [`Far`], and the guard of a value that is being changed.

use crate::error::Error;
use crate::heap::{Core, FarHeap, Intent, ObjectId, Pin};
use crate::pools::Class;
use crate::table::Key;
use crate::value::{self, Plain};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// The name of a value that a handle has no more.
const NO_OBJECT: ObjectId = ObjectId::from_u64(0);

/// A value in far memory: 24 bytes here, the value wherever there is room. Dropping it frees the value.
///
/// Every operation is atomic: threads that share a `Far` see the value before or after it.
///
/// ```
/// use varve_far::Dram;
/// use varve_far_objects::{Config, Far, FarHeap};
///
/// let heap = FarHeap::new(Dram::new(8), &Config::new(4 << 20))?;
/// let mut far = Far::new(&heap, [1u64, 2, 3])?;
/// far.write()?[1] = 20;
/// assert_eq!(far.get()?, [1, 20, 3]);
/// # Ok::<(), varve_far_objects::Error>(())
/// ```
pub struct Far<T: Plain> {
    heap: FarHeap,
    id: ObjectId,
    value: PhantomData<T>,
}

impl<T: Plain> Far<T> {
    /// Stores a value.
    ///
    /// # Errors
    /// `ZeroSize`, `TooLarge`, `TooMany`, `Full`, `MemoryLimit`; `Io` and `Damaged` where it shares a batch
    /// with others
    /// that cannot be read, or where nothing can leave memory.
    pub fn new(heap: &FarHeap, value: T) -> Result<Self, Error> {
        let _together = heap.core().together();
        let place = heap.core().alloc(size_of::<T>())?;
        let far = Self {
            heap: heap.clone(),
            id: place.id(),
            value: PhantomData,
        };
        // Dropped, and so freed, if that fails.
        far.set(value)?;
        Ok(far)
    }

    /// The value of a name, in a restored heap or after [`Self::keep`].
    ///
    /// # Errors
    /// `Refused` where there is none of this size, or it is open already; `NoCheckpoints`.
    pub fn open(heap: &FarHeap, name: ObjectId) -> Result<Self, Error> {
        heap.core().claim(name, size_of::<T>())?;
        Ok(Self {
            heap: heap.clone(),
            id: name,
            value: PhantomData,
        })
    }

    /// The value's name, for [`Self::open`].
    #[must_use]
    pub fn name(&self) -> ObjectId {
        self.id
    }

    /// Ends the handle and leaves the value. Gives its name.
    pub fn keep(mut self) -> ObjectId {
        self.heap.core().unclaim(self.id);
        std::mem::replace(&mut self.id, NO_OBJECT)
    }

    fn place(&self) -> (Key, usize, Intent) {
        let class = Class::of(size_of::<T>());
        let (key, index) = self.id.parts();
        let offset = index as usize * class.element_bytes(size_of::<T>());
        let intent = if class.per_batch() == 1 {
            Intent::Replace
        } else {
            Intent::Change
        };
        (key, offset, intent)
    }

    /// The value.
    ///
    /// # Errors
    /// `Io`, `Damaged`.
    pub fn get(&self) -> Result<T, Error> {
        let (key, offset, _) = self.place();
        get(self.heap.core(), key, offset)
    }

    /// Stores another value.
    ///
    /// # Errors
    /// `MemoryLimit`, `Io`, `Full`, and `Damaged` where values share a batch: the value is as it was.
    pub fn set(&self, value: T) -> Result<(), Error> {
        let (key, offset, intent) = self.place();
        set(self.heap.core(), key, offset, intent, &value)
    }

    /// Changes the value by `change`, which is called again if another thread stored meanwhile. It may use
    /// the heap. Gives the value that was stored.
    ///
    /// # Errors
    /// As [`Self::get`] and [`Self::set`].
    pub fn update(&self, change: impl FnMut(T) -> T) -> Result<T, Error> {
        let (key, offset, _) = self.place();
        update(self.heap.core(), key, offset, change)
    }

    /// A guard with the value, to change it in place. The object stays in memory while the guard lives.
    ///
    /// # Errors
    /// `PageBuffer`, and as [`Self::set`].
    pub fn write(&mut self) -> Result<FarMut<'_, T>, Error> {
        let (key, offset, _) = self.place();
        FarMut::new(self.heap.core(), key, offset)
    }
}

impl<T: Plain> Drop for Far<T> {
    fn drop(&mut self) {
        if self.id != NO_OBJECT {
            let freed = self.heap.core().free(self.id);
            debug_assert!(freed.is_ok());
        }
    }
}

impl<T: Plain> std::fmt::Debug for Far<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Far")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

pub(crate) fn get<T: Plain>(core: &Core, key: Key, offset: usize) -> Result<T, Error> {
    core.read_with(key, |bytes| value::load(bytes, offset))?
        .ok_or(Error::NotAllocated(key.number()))
}

pub(crate) fn set<T: Plain>(
    core: &Core,
    key: Key,
    offset: usize,
    intent: Intent,
    value: &T,
) -> Result<(), Error> {
    core.write_with(key, intent, |bytes| value::store(bytes, offset, value))
}

/// Compares and swaps until nobody was in between.
pub(crate) fn update<T: Plain>(
    core: &Core,
    key: Key,
    offset: usize,
    mut change: impl FnMut(T) -> T,
) -> Result<T, Error> {
    loop {
        let load = |bytes: &[u8]| -> Option<(T, T)> {
            Some((value::load(bytes, offset)?, value::load(bytes, offset)?))
        };
        let (before, value) = core
            .read_with(key, load)?
            .ok_or(Error::NotAllocated(key.number()))?;
        let value = change(value);
        let is_stored = core.write_with(key, Intent::Change, |bytes| {
            let now = bytes.get(offset..offset + size_of::<T>());
            let is_same = now.is_some_and(|now| now == before.as_bytes());
            if is_same {
                value::store(bytes, offset, &value);
            }
            is_same
        })?;
        if is_stored {
            return Ok(value);
        }
    }
}

/// A value that is being changed. What was changed is stored when the guard is dropped, which cannot fail:
/// the object stays in memory as long.
pub struct FarMut<'a, T: Plain> {
    pin: Pin<'a>,
    offset: usize,
    value: T,
    is_changed: bool,
}

impl<'a, T: Plain> FarMut<'a, T> {
    pub(crate) fn new(core: &'a Core, key: Key, offset: usize) -> Result<Self, Error> {
        let pin = core.pin(key)?;
        let value = pin.read(|bytes| value::load(bytes, offset)).flatten();
        Ok(Self {
            value: value.ok_or(Error::NotAllocated(key.number()))?,
            pin,
            offset,
            is_changed: false,
        })
    }
}

impl<T: Plain> Deref for FarMut<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Plain> DerefMut for FarMut<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.is_changed = true;
        &mut self.value
    }
}

impl<T: Plain> Drop for FarMut<'_, T> {
    fn drop(&mut self) {
        if self.is_changed {
            self.pin
                .write(|bytes| value::store(bytes, self.offset, &self.value));
        }
    }
}

impl<T: Plain + std::fmt::Debug> std::fmt::Debug for FarMut<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.value.fmt(f)
    }
}
