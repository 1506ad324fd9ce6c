//! The Unix-socket transport. Owns connections, threads and descriptor passing; refuses to know the meaning
//! of requests.
//!
//! One connection carries one session: numbered calls, so that many can wait at once, and upcalls in the
//! other direction. The end of either process closes the connection, which the other side sees at once.
//!
//! Beside it each session has a *line*, a pair of sockets for one call at a time: the calling thread itself
//! sends the request and reads the answer, one thread of the daemon receives and answers it, and no other
//! thread is woken. A call that finds the line busy uses the connection.

mod client;
mod server;

pub use client::{SocketLink, admin, connect};
pub use server::{Server, ServerOptions};

use crate::Request;

/// Most calls of one session that may wait in the daemon at once; a client queues further calls itself.
pub(crate) const WAITING_MAX: usize = 32;
/// Most threads that the daemon spends on one session: one is always free to receive the request that waiting
/// ones depend on.
pub(crate) const WORKERS_MAX: usize = WAITING_MAX + 8;

/// Whether the daemon may make this request wait for another client or for a digest.
pub(crate) const fn may_wait(request: &Request) -> bool {
    match request {
        Request::Acquire { .. }
        | Request::AcquireNear { .. }
        | Request::AllocInodes { .. }
        | Request::Reserve { .. }
        | Request::Digest { .. }
        | Request::GrowLog { .. }
        | Request::SyncLog { .. }
        | Request::SyncAll
        | Request::Forward(_)
        | Request::Dedupe(_)
        | Request::Admin(_) => true,
        Request::Hello(_)
        | Request::SharingNoted
        | Request::Lookup { .. }
        | Request::GetAttr { .. }
        | Request::Release { .. }
        | Request::Drop { .. }
        | Request::Hold { .. }
        | Request::ReadDir { .. }
        | Request::ReadLink { .. }
        | Request::Xattrs { .. }
        | Request::MapExtents { .. }
        | Request::MapFiles { .. }
        | Request::Owners { .. }
        | Request::Checksums { .. }
        | Request::ReadChecksums { .. }
        | Request::ReadData { .. }
        | Request::NoteReads { .. }
        | Request::BarrierAck { .. }
        | Request::ReturnReservation { .. }
        | Request::SetWatched(_)
        | Request::Watched
        | Request::StatFs
        | Request::ClientFault(_)
        | Request::Bye => false,
    }
}

/// Bits of the descriptor mask in a `Hello`'s answer.
mod mask {
    pub(super) const PAGE: u8 = 1;
    pub(super) const LOG: u8 = 2;
    pub(super) const LOG_BACKING: u8 = 4;
    pub(super) const NVM: u8 = 8;
    /// The client's end of the line, used by the transport itself.
    pub(super) const LINE: u8 = 16;
    pub(super) const VERIFIED: u8 = 32;
    /// Number of kinds.
    pub(super) const KINDS: usize = 6;
    /// Most descriptors of devices, which come after those of the mask.
    pub(super) const DEVICES_MAX: usize = 32;
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
