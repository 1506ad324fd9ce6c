//! The FUSE mount of a Varve pool: one more LibFS client, whose caches are the kernel's.
//!
//! Architecture invariants:
//! - Every request is served by `varve_libfs::Fs`; nothing here touches media or talks to the daemon.
//! - Names and attributes are cached by the kernel under leases of this mount
//!   ([`DENTRY_TTL`](varve_ipc::DENTRY_TTL)), which stay until the answers have expired. So no name is ever
//!   invalidated by a notification, and no deadlock with the kernel's directory locks is possible.
//! - File data may be in the kernel's page cache as long as LibFS holds a lease on the file; LibFS' worker
//!   thread calls [`KernelCaches`] before it lets a lease go. No request thread ever sends a notification.
//! - The kernel's write-back cache is never used; `O_APPEND` writes go to the server's end of file, whatever
//!   offset the kernel sent.
#![deny(unsafe_code)]

mod caches;
mod callers;
mod convert;
mod handles;
mod mount;
mod nodes;
mod null;
mod ops;
#[expect(unsafe_code, reason = "the one module that makes raw system calls")]
mod sys;
mod transport;
mod watches;

pub use caches::KernelCaches;
pub use mount::{MountError, MountRequest, Mounted, check_host, mount};
pub use null::{NullFs, mount_null};
pub use ops::Shim;
pub use rustix::mount::MountFlags;
pub use transport::{Transport, UringSupport, uring_support};
