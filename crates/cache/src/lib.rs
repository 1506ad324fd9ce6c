//! HashCache: a cache of terabytes on disk whose index takes 0 to 55 bits an object in memory.
//!
//! After A. Badam, "Redesigning Caching Techniques for Memory Efficiency" (HashCache, NSDI '09; thesis
//! chapter 2).
//!
//! # Parts
//! - [`policy`]: the eight index policies, and how many bits each takes.
//! - [`index`]: the index in memory of the objects on disk. Pure: no I/O.
//! - [`store`]: objects on one device. [`Cache`]: one or several of them, the interface to use.
//! - [`device`]: the devices that a store lies on: files, block devices, memory, test doubles.
//! - `nonblocking` (feature `tokio`): the same interface for programs on tokio.
//! - [`aside`]: where what a policy leaves of its index on disk lies, for messages.
//! - [`model`]: expected bits, seeks and requests a second (Tables 2.3, 2.4 and 2.7).
//!
//! # Out of scope
//! HTTP, pools, LibFS. Keys are bytes; a device is anything that implements [`device::Device`].
#![forbid(unsafe_code)]

pub mod aside;
mod cache;
pub mod device;
pub mod hash;
pub mod index;
pub mod measure;
pub mod model;
#[cfg(feature = "tokio")]
pub mod nonblocking;
pub mod policy;
pub mod store;

pub use cache::{Cache, Related, Scope};
pub use hash::{KeyHash, Secret};
pub use policy::{Policy, Shape, ShapeError};
pub use store::{Hit, MemoryLookup, Options, PutOptions, PutOutcome, PutStream, StoreError, StorePlan};
