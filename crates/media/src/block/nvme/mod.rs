//! An NVMe driver in user space: a controller taken from the kernel, with its queues in this process. Owns
//! the protocol; [`Bus`] is the interface to the machine.
//!
//! # Invariants
//! - The device is not trusted: fields are checked where they are parsed (`registers`, `identify`),
//!   completions where they are taken (`queue`). Whatever it does, calls end within their time limits.
//! - Memory whose address the device has is reused only when the command has ended or the controller is
//!   disabled, and is freed only after [`Bus::stop_dma`].
//! - A command whose end was not seen is sent again after a reset: reads, whole-block writes, flushes and
//!   deallocations may all be repeated.

mod attach;
mod binding;
mod bus;
pub(in crate::block) mod command;
mod controller;
mod device;
pub(in crate::block) mod identify;
mod pci;
mod queue;
mod registers;
#[allow(unsafe_code)]
mod sys;
mod transfer;

pub(in crate::block) use attach::open;
pub(in crate::block) use binding::Taken;
pub use bus::{Bus, DmaMemory, PAGE_BYTES};
pub use device::{NvmeDevice, NvmeOptions};
pub use pci::{Places, Use};

#[cfg(test)]
pub(in crate::block) use pci::tests as pci_tests;
