//! Sessions: their state, the table of all of them, requests in flight.

pub(crate) mod cached;
pub(crate) mod inflight;
pub(crate) mod state;
pub(crate) mod table;
