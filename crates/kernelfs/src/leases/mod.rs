//! Leases. Owns leases, their queue and the holds on open inodes, as plain state machines: no locks, no
//! clock, no I/O. The caller brings the time, makes grants durable, and carries messages.

mod contention;
pub(crate) mod grants;
mod holds;
mod table;
#[cfg(test)]
mod tests;
mod walks;
mod work;

pub use holds::Holds;
pub use table::{
    Decision, GrantedLease, HolderStatus, LeaseDetail, Limits, Refusal, Revocation, Table, Ticket, WaitStatus,
};
