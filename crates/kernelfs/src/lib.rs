//! The KernelFS daemon: sessions, leases, digest, recovery, placement.
//!
//! [`KernelFs`] is the daemon as an object; a transport of `varve_ipc` calls it, and [`Daemon`] adds its
//! background threads.
//!
//! Modules from the ground up: nouns (`config`, `counters`, `logs`, `leases`, `placement`, `user_segments`,
//! `watches`, `digest`, `health`, `session`), each with its own state; the object that holds them (`kernel`);
//! one file for each operation that a client or the clock requests (`ops`); `pool`, `service` and `daemon`.
//!
//! # Lock order
//! A thread that holds a lock takes only locks further down:
//! 0. `SpaceLimits::turn`: exclusive for a search for space (waits for clients, bounded by `lease_ms`, and
//!    for digests), shared for grants;
//! 1. `Sessions::rename`: one move of a directory at a time;
//! 2. leases of a forwarded operation (waits for clients, bounded by `wait_ms`);
//! 3. `Session::row_changes` of one session;
//! 4. `Session::reader` of one session: held while its log is scanned or digested;
//! 5. a store transaction (the store has one at a time);
//! 6. `Sessions::table`: leases, holds, sessions. Held for table work only: never across media, a digest, or
//!    a wait other than on its own condition variables;
//! 7. leaves: `Session::turn`, upcall queues, `Bell`.
//!
//! The policy of placement has a lock of its own, held by the mover's step while it plans, across reads of the
//! store. A digest takes it only if it is free, so it never waits for a plan.
//!
//! A digest (4 to 6) waits for no client, so a release, which needs a digest, always ends: a client that
//! obeys can always give back. Nothing waits for a session that is late: the first thread to notice seals it
//! (waiting threads check).
//!
//! # Effects of a device error
//! It makes the pool read-only (`latched`): waiting requests end with EIO, changes are refused with EROFS,
//! reads and read-only sessions go on, and logs keep undigested entries for the next start.
#![forbid(unsafe_code)]

// The world of `tests/common` serves the unit tests, too.
#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;
#[cfg(test)]
extern crate self as varve_kernelfs;

mod bell;
pub mod config;
mod counters;
mod daemon;
pub mod digest;
mod error;
mod health;
mod kernel;
pub mod leases;
pub mod logs;
mod ops;
pub mod placement;
pub mod pool;
mod process;
mod service;
mod session;
mod user_segments;
mod watches;

pub use config::{AtimeSetting, Config, ConfigError, DedupScope, PolicyName, Users, VerifyNvm};
pub use daemon::Daemon;
pub use error::{KernelError, errno};
pub use health::{HealthStatus, LogsStatus, MediumStatus};
pub use kernel::{Hook, HostLeft, HostRoom, KernelFs, Parts, Tokens};
pub use leases::{HolderStatus, LeaseDetail, WaitStatus};
pub use logs::{LogStore, SessionArea, SimLogs};
pub use ops::devices::{DeviceAsked, TierDevice};
pub use ops::handshake::LocalSession;
pub use ops::jobs::EvacuationAsked;
pub use ops::pin::{PinsSet, PlacedExtent, PlacedFile};
pub use ops::status::{DigestStatus, LeaseStatus, SessionDetail, SessionStatus, Status, TierStatus};
pub use placement::jobs::DeviceGone;
pub use placement::walk::RulesApplied;
pub use placement::{JobState, JobStatus, PlacementStatus};
pub use process::ProcessId;
pub use user_segments::SegmentFile;
