//! Mapped memory: the copy kernels, the mappings of files that they work on, and the set of blocks that are
//! trusted without a checksum.

pub(crate) mod guard;
mod map;
pub mod persist;
mod poison;
pub(crate) mod steps;
mod verified;

pub use map::DaxPart;
pub(crate) use map::{MapOptions, Mapping};
pub use verified::Verified;
