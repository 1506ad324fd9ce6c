//! The only contract between LibFS and KernelFS: messages, the session page, links, transports and the clock.
//!
//! Three seams take a test double: the medium (elsewhere), the [`Clock`] and the message ([`Link`]). A daemon
//! is a [`Service`]; it is reached within the process ([`InprocLink`]) or over a Unix socket ([`socket`]).

mod blob;
mod clock;
mod inproc;
mod messages;
pub mod page;
mod service;
pub mod socket;
pub mod sync;
mod wire;

pub use clock::{Clock, ManualClock, SystemClock};
pub use inproc::InprocLink;
pub use messages::{
    Admin, ClientFault, ClientKind, CopiesAt, Cred, DATA_MAX, DEDUPE_RANGES_MAX, DaxAt, DaxMaps, DedupeOp,
    DedupeRange, Deduped, DevicePart, DirEntry, ForwardedOp, ForwardedResult, Grant, HELD_MAX, Hello,
    ITEMS_MAX, IpcError, JobAct, LeaseMode, Link, MAPPED_FILES_MAX, MappedExtent, NEAR_MAX, NUMBERS_MAX,
    Near, NumberedBlocks, Owned, OwnedBlocks, PINS_MAX, PROTOCOL_VERSION, Pinned, READ_BLOCKS_MAX,
    READ_SUMS_MAX, READS_MAX, RELEASED_MAX, ReadRun, ReleaseItem, RemovalAct, Request, Response, SUMS_MAX,
    SYNC_RANGES_MAX, StatFs, Summed, SummedBlocks, TOLD_MAX, Tell, Told, USERS_MAX, Upcall, WATCHED_MAX,
    WINDOW_BLOCKS, Want, Watched, Welcome,
};
pub use page::{Page, PageState, SessionPage, heavy_barrier, light_barrier};
pub use service::{Descriptors, Opened, Peer, Service, UPCALLS_MAX, UpcallQueue};
pub use wire::FRAME_MAX;

/// Beginning of the names of the environment variables that `varve run` sets.
pub const PRELOAD_VARIABLES: &str = "VARVE_PRELOAD_";

/// An attribute that no file has. `varve run` looks it up in a mount, which then tells programs under
/// `varve run` from others.
pub const RUN_ATTRIBUTE: &str = "system.varve.run";

/// The attribute of every file of a pool that says where its data is to be: `nvm`, `ssd`, `hdd`, `stay` or
/// `policy`. To set it is to pin the file; removing it unpins. It is not listed.
pub const PIN_ATTRIBUTE: &str = "system.varve.pin";

/// Dentry and attribute timeout of the kernel above a mount.
pub const DENTRY_TTL: std::time::Duration = std::time::Duration::from_millis(100);
/// Upper bound on the lifetime of a cached answer, from its sending on. The kernel starts to count when the
/// asking thread runs again, for which a quarter of a second is allowed, and counts in ticks of up to 10 ms.
pub const DENTRY_TTL_MAX: std::time::Duration = std::time::Duration::from_millis(370);
/// As [`DENTRY_TTL_MAX`], from a moment at which the asking thread is known to have taken the answer in. The
/// kernel rounds up to a tick; how far its ticks lag is measured ([`Clock::tick_lag`]).
pub const DENTRY_TTL_TAKEN: std::time::Duration = std::time::Duration::from_millis(160);
