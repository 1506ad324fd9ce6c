//! The caches of the kernel above a mount: names and attributes (`dentries`, `threads` that were told them,
//! and `regions` in which it keeps none), pages of files (`pages`). Knows no leases.

pub(crate) mod dentries;
#[cfg(test)]
mod model;
pub(crate) mod pages;
pub(crate) mod regions;
pub(crate) mod threads;

pub use dentries::{CachedReply, ReplyVersion};
pub use pages::{KernelCall, PageUse};
