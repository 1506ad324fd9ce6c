//! Arrays of values: [`FarVec`].

use crate::error::Error;
use crate::handle::{self, FarMut};
use crate::heap::{Array, FarHeap};
use crate::value::Plain;
use std::marker::PhantomData;

/// A growable array in far memory. 4 bytes an element stay here, less where elements have under 128 bytes.
///
/// Reads and writes of elements are atomic each and may be made by several threads; what changes the length
/// needs
/// the array for itself. Dropping it frees everything, without I/O.
///
/// ```
/// use varve_far::Dram;
/// use varve_far_objects::{Config, FarHeap, FarVec};
///
/// let heap = FarHeap::new(Dram::new(8), &Config::new(4 << 20))?;
/// let squares: FarVec<u64> = FarVec::zeroed(&heap, 1000)?;
/// for index in 0..1000 {
///     squares.set(index, (index * index) as u64)?;
/// }
/// assert_eq!(squares.get(31)?, 961);
/// # Ok::<(), varve_far_objects::Error>(())
/// ```
pub struct FarVec<T: Plain> {
    heap: FarHeap,
    array: Array,
    value: PhantomData<T>,
}

impl<T: Plain> FarVec<T> {
    /// An empty array.
    ///
    /// # Errors
    /// `ZeroSize`, `TooLarge`, by the size of `T`.
    pub fn new(heap: &FarHeap) -> Result<Self, Error> {
        Ok(Self {
            heap: heap.clone(),
            array: Array::new(heap.core(), size_of::<T>())?,
            value: PhantomData,
        })
    }

    /// An array of `len` values of zero bytes. They take no room in the store until they are written, but it
    /// is promised to them.
    ///
    /// # Errors
    /// As [`Self::new`]; `TooMany`, `Full`, `MemoryLimit`, `Io`.
    pub fn zeroed(heap: &FarHeap, len: usize) -> Result<Self, Error> {
        let mut all = Self::new(heap)?;
        all.array.grow(heap.core(), len)?;
        Ok(all)
    }

    /// The array of a name, in a restored heap or after [`Self::keep`].
    ///
    /// # Errors
    /// `Refused` where there is none of elements of this size, or it is open already; `NoCheckpoints`.
    pub fn open(heap: &FarHeap, name: u64) -> Result<Self, Error> {
        Ok(Self {
            heap: heap.clone(),
            array: Array::open(heap.core(), name, size_of::<T>(), false)?,
            value: PhantomData,
        })
    }

    /// The array's name, for [`Self::open`].
    ///
    /// # Errors
    /// `NoCheckpoints`.
    pub fn name(&self) -> Result<u64, Error> {
        self.array.handle(self.heap.core())
    }

    /// Ends the handle and leaves the array. Gives its name.
    ///
    /// # Errors
    /// `NoCheckpoints`: the array is dropped.
    pub fn keep(mut self) -> Result<u64, Error> {
        let name = self.name()?;
        self.array.close(self.heap.core());
        Ok(name)
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.array.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// An element.
    ///
    /// # Errors
    /// `OutOfRange`, `Io`, `Damaged`.
    pub fn get(&self, index: usize) -> Result<T, Error> {
        let (key, offset) = self.array.place(index)?;
        handle::get(self.heap.core(), key, offset)
    }

    /// Stores an element.
    ///
    /// # Errors
    /// `OutOfRange`, `MemoryLimit`, `Io`, `Full`, and `Damaged` where elements share a batch: nothing
    /// changed.
    pub fn set(&self, index: usize, value: T) -> Result<(), Error> {
        let (key, offset) = self.array.place(index)?;
        handle::set(self.heap.core(), key, offset, self.array.intent(), &value)
    }

    /// Changes an element as [`Far::update`](crate::Far::update) does.
    ///
    /// # Errors
    /// As [`Self::get`] and [`Self::set`].
    pub fn update(&self, index: usize, change: impl FnMut(T) -> T) -> Result<T, Error> {
        let (key, offset) = self.array.place(index)?;
        handle::update(self.heap.core(), key, offset, change)
    }

    /// A guard with an element, to change it in place.
    ///
    /// # Errors
    /// `PageBuffer`, and as [`Self::set`].
    pub fn write(&mut self, index: usize) -> Result<FarMut<'_, T>, Error> {
        let (key, offset) = self.array.place(index)?;
        FarMut::new(self.heap.core(), key, offset)
    }

    /// Appends an element.
    ///
    /// # Errors
    /// `TooMany`, `Full`, `MemoryLimit`, `Io`, `Damaged`: the array is as it was.
    pub fn push(&mut self, value: T) -> Result<(), Error> {
        let heap = self.heap.clone();
        let _together = heap.core().together();
        let index = self.len();
        self.array.grow(self.heap.core(), index + 1)?;
        let stored = self.set(index, value);
        if stored.is_err() {
            self.truncate(index);
        }
        stored
    }

    /// Takes the last element.
    ///
    /// # Errors
    /// `Io`, `Damaged`: it stays.
    pub fn pop(&mut self) -> Result<Option<T>, Error> {
        let Some(index) = self.len().checked_sub(1) else {
            return Ok(None);
        };
        let value = self.get(index)?;
        self.truncate(index);
        Ok(Some(value))
    }

    /// Drops the elements from `len` on. No I/O.
    pub fn truncate(&mut self, len: usize) {
        self.array.truncate(self.heap.core(), len);
    }

    /// All elements in order. After an error the next ones follow.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Result<T, Error>> + '_ {
        (0..self.len()).map(|index| self.get(index))
    }
}

impl<T: Plain> Drop for FarVec<T> {
    fn drop(&mut self) {
        self.array.end(self.heap.core());
    }
}

impl<T: Plain> std::fmt::Debug for FarVec<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FarVec")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}
