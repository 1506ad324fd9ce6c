//! Operations that a client or the clock requests, one a file. Each takes the nouns below it; none calls
//! another's internals.
//!
//! An operation is a struct of references that [`KernelFs`](crate::KernelFs) lends for one call (`of`). An
//! operation that needs another holds it as a field, and only one from an earlier line:
//! - `devices`, `jobs`, `map`, `rows`, `watch` need no other;
//! - `digest`, `read`, `status`;
//! - `holds`, `migrate`, `pin`, `teardown`;
//! - `record`, `recovery`, `release`, `reserve`, `rules`, `sharing`, `sync`;
//! - `acquire`, `lifecycle`, `log`;
//! - `forward`, `handshake`, `numbers`.

pub(crate) mod acquire;
pub(crate) mod devices;
pub(crate) mod digest;
pub(crate) mod forward;
pub(crate) mod handshake;
pub(crate) mod holds;
pub(crate) mod jobs;
pub(crate) mod lifecycle;
pub(crate) mod log;
pub(crate) mod map;
pub(crate) mod migrate;
pub(crate) mod numbers;
pub(crate) mod pin;
pub(crate) mod read;
pub(crate) mod record;
pub(crate) mod recovery;
pub(crate) mod release;
pub(crate) mod reserve;
pub(crate) mod rows;
pub(crate) mod rules;
pub(crate) mod sharing;
pub(crate) mod status;
pub(crate) mod sync;
pub(crate) mod teardown;
pub(crate) mod watch;
