//! Byte-addressable and block devices under a Varve pool.
//!
//! Two object-safe traits, [`Region`] and [`BlockDevice`], and the backends that implement them. Nothing above this crate
//! knows what is below: a DIMM, a file, the memory of a test.
//!
//! # Invariants
//! - Only [`pmem::persist`] stores to, flushes or fences a mapping.
//! - `unsafe` appears in `pmem/*` (mappings and copy kernels), `aio.rs` and `uring.rs` (buffers lent to the kernel) and `sys.rs` (the
//!   allocator's housekeeping, the start of a write-out), nowhere else.
//! - No Rust reference is ever made into memory that another process may write: raw copies and atomics only.
//! - A backend that has lost a write latches ([`DeviceState::Failed`]); want of space never does.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod aio;
mod aligned;
mod block;
mod direct;
pub mod emulated;
mod error;
pub mod faulty;
pub mod host;
mod latch;
mod live_log;
mod mapped;
#[allow(unsafe_code)]
pub mod pmem;
pub mod sim;
#[allow(unsafe_code)]
pub mod sys;
mod traits;
#[allow(unsafe_code)]
mod uring;
pub mod watch;

pub use block::{BlockOptions, FileDevice};
pub use direct::JournalFile;
pub use error::{DeviceName, MediaError};
pub use live_log::LiveLog;
pub use mapped::{Backing, MappedOptions, MappedRegion};
pub use pmem::persist::crc32c_append;
pub use traits::{BlockDevice, DeviceInfo, DeviceState, MediumKind, Region};

/// Writes to a [`BlockDevice`] begin and end at multiples of this many bytes.
pub const DEVICE_BLOCK_BYTES: u64 = 4096;
