//! Far objects at addresses (SSDAlloc): memory of pointers that lies in a log on a slow device, but for what
//! is in use.
//!
//! Each object has a page of virtual memory of its own. Touching one that is not there is a fault, which a
//! thread of this library serves: it takes the object from the packed cache or the log of
//! [`varve_far_objects::FarHeap`] and puts it at the beginning of its page. Pages in memory (the *page
//! buffer*) are few; the oldest leave in the background. Everything is below one limit, page tables too.
//!
//! [`FarAlloc`] has `oalloc` for objects and arrays of them, and `malloc`, `calloc`, `realloc` for bytes in
//! pages. System calls may be given its addresses. A page that cannot be read is SIGBUS for who touches it.
//! A child of `fork` does not have the memory: touching it is SIGSEGV there.
//!
//! A heap in a file ([`FarAlloc::create`]) has checkpoints: [`FarAlloc::restore`] gives the last one at the
//! same addresses.
//!
//! Knows no pool and no daemon. Decides nothing about the store: `varve-far-objects` does.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod sys;

pub mod error;

mod blocks;

mod buffer;

mod turn;

mod ranges;

mod notes;

mod pages;

mod threads;

mod heap;

pub mod measure;

pub use error::Error;
pub use heap::{Config, FarAlloc, RECORD_MAX_BYTES};
pub use pages::Stats;
pub use varve_far_objects::{CheckpointFile, Checkpointed, Together};
