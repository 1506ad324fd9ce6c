//! Mapped memory: the copy kernels, and the mappings of files that they work on.

pub(crate) mod guard;
mod map;
pub mod persist;

pub(crate) use map::{MapOptions, Mapping};
