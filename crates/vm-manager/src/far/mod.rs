//! Far memory of unmodified programs: the pager (ADR 36).
//!
//! Owns the programs of a run, their tables of far pages, and the threads that serve them. Where pages lie,
//! and which slab is hot, is `varve_far`'s; what only the program itself can do is the agent's
//! (`varve-far-agent`).
//!
//! Lock order: a program's pages, then its agent, then the slab space. The list of programs is locked alone.

mod agent;
mod check;
pub mod config;
pub mod control;
mod counters;
mod drain;
mod evict;
mod faults;
mod goal;
mod hand;
mod join;
mod library;
mod pager;
mod program;
mod readers;
mod run;
mod status;
mod write_out;

pub use config::{FarConfig, Local};
pub use counters::{FaultKind, Latencies};
pub use goal::Drain;
pub use pager::Pager;
pub use run::run;
pub use status::{FarStatus, FarTierStatus};
