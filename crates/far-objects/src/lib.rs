//! Far objects (SSDAlloc): a heap whose objects are packed in memory as long as they are used, and lie in a
//! log on
//! a slow device otherwise.
//!
//! Where memory is short, a page holds one object that is wanted and many that are not. This heap keeps
//! objects, not pages: memory holds hot objects side by side, and what is written to the device is the
//! objects that changed, in blocks of 128 KiB. All memory that it takes, tables included, is below a limit.
//!
//! [`Far`], [`FarVec`] and [`FarMap`] hold plain values ([`Plain`]). Device errors, a full store and the
//! limit
//! are [`Error`]s; nothing here ends the program. The store is the backend's slabs ([`varve_far::Backend`]):
//! a
//! file without a name, memory, or what a daemon grants. It ends with the heap.
//!
//! ```
//! use varve_far::FileSlabs;
//! use varve_far_objects::{Config, FarHeap, FarVec};
//!
//! // 32 MiB of a file for the objects, 4 MiB of memory for everything.
//! let file = FileSlabs::open(&std::env::temp_dir(), 32)?;
//! let heap = FarHeap::new(file, &Config::new(4 << 20))?;
//! let records: FarVec<[u8; 128]> = FarVec::zeroed(&heap, 100_000)?;
//! for index in 0..records.len() {
//!     records.set(index, [index as u8; 128])?;
//! }
//! assert_eq!(records.get(77_777)?, [77_777u32 as u8; 128]);
//! assert!(heap.stats().memory_used_bytes <= 4 << 20);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A heap in a file ([`FarHeap::create`]) has checkpoints ([`FarHeap::checkpoint`]): after the program's end
//! or a crash [`FarHeap::restore`] gives the last one.
//!
//! ```
//! use varve_far_objects::{Config, FarHeap, FarVec};
//!
//! # let dir = tempfile::tempdir()?;
//! let path = dir.path().join("heap");
//! let config = Config::new(8 << 20);
//! const TAG: u64 = 1;
//! {
//!     let file = std::fs::File::create_new(&path)?;
//!     let heap = FarHeap::create(file, 64, TAG, &config)?;
//!     let records: FarVec<u64> = FarVec::zeroed(&heap, 1000)?;
//!     records.set(7, 49)?;
//!     heap.checkpoint(&records.name()?.to_le_bytes())?;
//!     records.set(7, 0)?;
//! }
//! let file = std::fs::File::options().read(true).write(true).open(&path)?;
//! let (heap, record) = FarHeap::restore(file, TAG, &config)?;
//! let name = u64::from_le_bytes(record[..].try_into()?);
//! let records: FarVec<u64> = FarVec::open(&heap, name)?;
//! assert_eq!(records.get(7)?, 49);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Not here: pointers that fault (`varve-far-alloc`, over [`FarSlots`] of a [`SlotsHeap`], and [`SlotsOwner`]
//! for checkpoints).
//! Knows no process, no fault, no clock, no pool; forbids unsafe.

#![forbid(unsafe_code)]

// Files of tests/ that unit tests share name the crate so.
#[cfg(test)]
extern crate self as varve_far_objects;

pub mod error;

mod layout;

mod file;

mod table;

mod checkpoint;

mod budget;

mod frames;

mod pools;

mod log;

mod heap;

mod value;

mod handle;

mod vec;

mod slots;

mod map;

pub use checkpoint::{CHECKPOINT_VERSION, RECORD_MAX_BYTES, SlotsRecord};
pub use error::{Error, Refusal};
pub use file::CheckpointFile;
pub use handle::{Far, FarMut};
pub use heap::{
    Checkpointed, Cleaned, Config, FarHeap, MEMORY_MIN_BYTES, ObjectId, SlotsHeap, SlotsOut, SlotsOwner,
    Stats, Together,
};
pub use layout::{BLOCK_BYTES, OBJECT_MAX_BYTES};
pub use log::LogStats;
pub use map::FarMap;
pub use slots::{FarSlots, Reserved, RestoredSlots};
pub use value::Plain;
pub use vec::FarVec;
