//! The caches of the kernel above a mount: names and attributes (`dentries`), pages of files (`pages`). Knows
//! no leases.

pub(crate) mod dentries;
#[cfg(test)]
mod model;
pub(crate) mod pages;

pub use dentries::{Answer, Asked};
pub use pages::{KernelCall, PageUse};
