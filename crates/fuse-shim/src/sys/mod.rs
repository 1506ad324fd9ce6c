//! The system calls without a safe form: duplicating a descriptor of a mount's device, and exchanging
//! requests with the kernel through memory that it writes.

mod device;
mod entry;

pub(crate) use device::one_more;
pub(crate) use entry::{Entry, Parts};
