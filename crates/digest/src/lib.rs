//! The part of a digest that runs before anything is written: finds the entries of a log, decides which ones
//! count, and folds them into a plan.
//!
//! Pure: no I/O, no clock, no locks (but one around spare memory). Bytes of logs come through [`LogBytes`],
//! the digested state through [`View`], rights through [`Grants`]; all three are implemented by the daemon.
//! Nothing that a client wrote is trusted, and nothing in it can make this crate panic, loop without bound or
//! hold more memory than its limits say.
#![forbid(unsafe_code)]

mod bytes;
mod fold;
mod names;
mod op;
mod plan;
mod scan;

pub use bytes::{ByteRange, FilePlan, LogResident, WriteData};
pub use fold::Fold;
pub use op::{Actor, Counts, Grants, Need, Op, Refusal, RefusedTx, Slot, View};
pub use plan::{Fate, InodePlan, NameChange, Plan};
pub use scan::{
    Batch, BatchLimit, Cursors, Damage, Entry, GatherLimits, LogBytes, NewestTx, Refused, ScanError,
    SealScan, Transaction, gather, newest_entry, pending_bytes, seal_scan,
};

#[cfg(test)]
mod tests;
