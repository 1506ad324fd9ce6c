//! Byte-addressable and block devices under a Varve pool.
//!
//! Two object-safe traits, [`Region`] and [`BlockDevice`], and the backends that implement them. Only this
//! crate knows whether a medium is a DIMM, a file or the memory of a test.
//!
//! # Invariants
//! - Only [`pmem::persist`] stores to, flushes or fences the mapping of a region.
//! - `unsafe` appears in `pmem/*` (mappings, copy kernels, guarded accesses), `aio.rs` and `block/ring.rs`
//!   (buffers lent to the kernel), `block/nvme/sys` (registers and memory of devices), `block/ng/ioctl.rs`,
//!   `block/spdk/sys` (calls of a loaded library and its memory), and `sys.rs` (the allocator's housekeeping, the start of a write-out, memory policies, extents and locks of files),
//!   nowhere else.
//! - No Rust reference is ever made into memory that another process may write: raw copies and atomics only.
//! - A backend that has lost a write latches ([`DeviceState::Failed`]); want of space never does.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod aio;
mod aligned;
pub mod block;
pub mod dax;
mod direct;
pub mod elevator;
pub mod emulated;
mod error;
pub mod faulty;
mod finding;
pub mod host;
mod latch;
mod live_log;
pub mod lock;
mod mapped;
pub mod numa;
#[allow(unsafe_code)]
pub mod pmem;
mod read_ahead;
pub mod sim;
pub mod span;
pub mod stats;
#[allow(unsafe_code)]
pub mod sys;
mod traits;

pub use aligned::{AlignedBuf, BufPool};
pub use block::{BlockOptions, DeviceSpec, FileDevice};
pub use direct::JournalFile;
pub use error::{DeviceName, MediaError};
pub use finding::{Finding, Verdict};
pub use live_log::LiveLog;
pub use mapped::{Backing, MappedOptions, MappedRegion};
pub use pmem::persist::crc32c_append;
pub use pmem::{DaxPart, Verified};
pub use traits::{BlockDevice, DEVICE_BLOCK_BYTES, DeviceInfo, DeviceState, MediumKind, ReaderPart, Region};
