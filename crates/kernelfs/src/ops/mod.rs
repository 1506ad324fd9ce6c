//! What a client or the clock asks for, one operation a file. Each takes the nouns below it; none calls
//! another's inside.
//!
//! An operation is a struct of references that [`KernelFs`](crate::KernelFs) lends for one call (`of`). One
//! that needs another holds it as a field, and only one of a row above its own in this table:
//!
//! | operations | what they do |
//! | --- | --- |
//! | `rows`, `map`, `status`, `watch` | need no other |
//! | `digest`, `read` | digest a log and take over what changed; answer from the store |
//! | `holds`, `teardown`, `migrate`, `log` | free inodes that nobody holds; end sessions; move data; serve logs |
//! | `recovery`, `sharing`, `reserve`, `release`, `sync` | end sessions of an earlier daemon; admit changes; promise space; take leases back; sync all logs |
//! | `acquire`, `lifecycle` | grant leases; start, tick, stop |
//! | `numbers`, `forward`, `handshake` | grant inode numbers; do an operation for a client; open a session |

pub(crate) mod acquire;
pub(crate) mod digest;
pub(crate) mod forward;
pub(crate) mod handshake;
pub(crate) mod holds;
pub(crate) mod lifecycle;
pub(crate) mod log;
pub(crate) mod map;
pub(crate) mod migrate;
pub(crate) mod numbers;
pub(crate) mod read;
pub(crate) mod recovery;
pub(crate) mod release;
pub(crate) mod reserve;
pub(crate) mod rows;
pub(crate) mod sharing;
pub(crate) mod status;
pub(crate) mod sync;
pub(crate) mod teardown;
pub(crate) mod watch;
