//! Block devices by SPDK, which is loaded where it is installed: an NVMe controller by its PCI address, or
//! any block device that a configuration of SPDK's makes. Owns when the library runs and what becomes of
//! requests; the library owns the devices.
//!
//! # Invariants
//! - The library is called on one thread only, which belongs to the reactor. Callers' memory is never handed
//!   to it: data is copied to and from memory that the library allocated.
//! - Memory of an operation whose end was not seen is never used again.
//! - A flush reaches the device: SPDK's NVMe driver answers one by itself unless told otherwise, so it is
//!   sent as a command.

mod attach;
mod config;
mod device;
mod library;
mod reactor;
#[allow(unsafe_code)]
mod sys;
mod turns;

pub(in crate::block) use attach::{HUGE_PAGES, open};
pub use device::{SpdkDevice, SpdkOptions};
pub use library::{Installed, VARIABLE, find};
pub use reactor::Reactor;
pub use sys::{Library, api, load};
