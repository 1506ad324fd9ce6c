//! Far memory, the pure part: 1 MiB slabs over tiers of different speed, their temperature and migration
//! (RapidSwap, sections 4.1 and 4.2), and the table that says where each page of a program is.
//!
//! Owns where bytes are and whether they are the ones that were stored. Knows no process, no fault and no
//! clock: `varve-vm-manager` moves pages and gives the time.

#![forbid(unsafe_code)]

pub mod page;
pub mod wire;

pub mod userfault;

pub mod codec;

pub mod reuse;

pub mod temperature;

pub mod backend;

pub mod measure;

pub mod place;

pub mod space;

pub mod table;

pub mod aside;

pub mod regions;

pub mod stall;

pub use backend::{Backend, BackendError, Dram, FileSlabs, Slot};
pub use page::{PAGE_BYTES, Page};
pub use place::Place;
pub use space::{Space, SpaceError, SpaceStats, TierConfig};
