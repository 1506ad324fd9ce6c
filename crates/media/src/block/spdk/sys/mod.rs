//! The library itself: loaded, called, heard. The only part of this backend with unsafe code.

pub mod api;
mod inbox;
mod load;
mod memory;
mod runtime;
mod said;
mod signals;

pub(super) use inbox::{Ended, Event, Outcome};
pub(super) use load::is_exiting;
pub use load::{Library, load};
pub(super) use memory::DmaBuffer;
pub(super) use runtime::{Facts, OpenBdev, Operation, Runtime};
