//! The daemon behind a transport: permissions of requests, and the module that answers each.

use crate::counters::Counters;
use crate::error::{KernelError, no};
use crate::health::Reporter;
use crate::kernel::{Core, KernelFs, Parts};
use crate::ops::acquire::Leasing;
use crate::ops::devices::{DeviceAsked, DeviceOps};
use crate::ops::digest::{Digests, TakeOver};
use crate::ops::forward::Forwarding;
use crate::ops::handshake::{Handshake, LocalSession, random_bytes};
use crate::ops::holds::HeldInodes;
use crate::ops::jobs::Jobs;
use crate::ops::lifecycle::{self, Shutdown, Upkeep};
use crate::ops::log::LogRequests;
use crate::ops::migrate::Mover;
use crate::ops::numbers::InodeNumbers;
use crate::ops::pin::Pinning;
use crate::ops::read::{Reads, stat_fs};
use crate::ops::release::Releases;
use crate::ops::reserve::Reservations;
use crate::ops::rules::Ruling;
use crate::ops::sharing::Sharing;
use crate::ops::status::{SessionDetail, Status, View};
use crate::ops::sync::Syncer;
use crate::ops::teardown::Teardown;
use crate::ops::watch;
use crate::session::state::Session;
use crate::session::table::Phase;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use varve_format::SessionId;
use varve_ipc::{
    Admin, DevicePart, Hello, IpcError, Opened, Peer, RemovalAct, Request, Response, Service, Tell,
};
use varve_media::{BlockDevice, ReaderPart};
use varve_store::StoreError;

impl KernelFs {
    /// Takes a pool into service: seals and digests every session of an earlier daemon.
    ///
    /// # Errors
    /// Settings out of bounds; the store's and the logs', unless a device failed after the pool was open:
    /// then it starts read-only.
    pub fn open(parts: Parts) -> Result<Arc<Self>, KernelError> {
        lifecycle::open(parts).map(Arc::new)
    }

    /// Opens a session.
    ///
    /// # Errors
    /// `Protocol` for another version; `Errno` with EUSERS (too many sessions), ENOSPC (no room for its log)
    /// and others.
    pub fn open_session(&self, peer: Peer, hello: Hello) -> Result<LocalSession, IpcError> {
        Handshake::of(self).open_session(peer, hello)
    }

    /// Carries out a request.
    ///
    /// # Errors
    /// An errno; `Sealed` when the session is over; `Forward` when an inode is contended.
    pub fn call_session(&self, id: SessionId, request: Request) -> Result<Response, IpcError> {
        let _entered = self.lifecycle.begin_request()?;
        Counters::bump(&self.counters.requests);
        let session = self.locked().live(id).ok_or(IpcError::Sealed)?;
        if let Some(predecessor) = session.hears() {
            Teardown::of(self).forget_ended(predecessor);
        }
        let result = self.dispatch(&session, request);
        // A request that failed because the session was sealed meanwhile returns `Sealed`.
        match result {
            Err(IpcError::Errno(_)) if self.locked().live(id).is_none() => Err(IpcError::Sealed),
            other => other,
        }
    }

    fn dispatch(&self, session: &Arc<Session>, request: Request) -> Result<Response, IpcError> {
        let reads = || Reads::of(self);
        match request {
            Request::Hello(_) => Err(IpcError::Protocol("a second Hello".into())),
            Request::SharingNoted => {
                Sharing::of(self).shared_mode_noted(session.id);
                Ok(Response::Done)
            }
            Request::Lookup { dir, name } => reads().lookup(session, dir, &name).map(Response::Entry),
            Request::GetAttr { key } => Leasing::of(self).get_attr(session, key).map(Response::Attr),
            Request::Acquire { wants } => {
                let grants = Leasing::of(self).acquire(session, &wants)?;
                Ok(Response::Granted(reads().tell(session, grants, Tell::default())))
            }
            Request::AcquireNear { wants, near } => {
                let tell = near.tell;
                let grants = Leasing::of(self).acquire_near(session, &wants, near)?;
                Ok(Response::Granted(reads().tell(session, grants, tell)))
            }
            Request::Release { items } => Releases::of(self)
                .release(session, &items)
                .map(|()| Response::Done),
            Request::Drop { keys } => HeldInodes::of(self)
                .drop_holds(session, &keys)
                .map(|()| Response::Done),
            Request::Hold { keys } => HeldInodes::of(self).hold(session, &keys).map(|()| Response::Done),
            Request::AllocInodes { near, count } => InodeNumbers::of(self)
                .alloc_inodes(session, near, count)
                .map(Response::Inodes),
            Request::ReadDir { dir, cookie, max } => {
                let (entries, complete) = reads().read_dir(session, dir, cookie, max)?;
                Ok(Response::Entries(entries, complete))
            }
            Request::ReadLink { key } => reads().read_link(session, key).map(Response::Bytes),
            Request::Xattrs { key } => reads().xattrs(session, key).map(Response::Xattrs),
            Request::MapExtents { key, from, max } => {
                let (extents, complete) = reads().map_extents(session, key, from, max)?;
                Ok(Response::Extents(extents, complete))
            }
            Request::MapFiles { keys } => reads().map_files(session, &keys).map(Response::Mapped),
            Request::Owners { key, from, max } => {
                reads().owners(session, key, from, max).map(Response::Owned)
            }
            Request::Checksums { key, from, max } => {
                reads().checksums(session, key, from, max).map(Response::Summed)
            }
            Request::NoteReads { reads: runs } => reads().note_reads(session, &runs).map(|()| Response::Done),
            Request::ReadChecksums { key, from, blocks } => reads()
                .read_checksums(session, key, from, blocks)
                .map(Response::Summed),
            Request::ReadData { key, offset, len } => {
                let (bytes, numbered) = reads().read_data(session, key, offset, len)?;
                Ok(match numbered.is_empty() {
                    true => Response::Bytes(bytes),
                    false => Response::Numbered(bytes, numbered),
                })
            }
            Request::GrowLog { len_bytes } => LogRequests::of(self)
                .grow_log(session, len_bytes)
                .map(Response::LogBytes),
            Request::SyncLog { ranges } => LogRequests::of(self)
                .sync_log(session, &ranges)
                .map(|()| Response::Done),
            Request::SyncAll => Syncer::of(self)
                .sync_all(Some(session.id))
                .map(|_| Response::Done),
            Request::Reserve { blocks, least } => Reservations::of(self)
                .reserve(session, blocks, least)
                .map(Response::Reserved),
            Request::ReturnReservation { blocks, of } => {
                Reservations::of(self).return_reservation(session, blocks, of);
                Ok(Response::Done)
            }
            Request::Digest { upto, wait } => LogRequests::of(self)
                .digest_request(session, upto, wait)
                .map(Response::Digested),
            Request::Forward(op) => Forwarding::of(self)
                .forward(session, &op)
                .map(Response::Forwarded),
            Request::Dedupe(op) => Forwarding::of(self).dedupe(session, op).map(Response::Deduped),
            Request::BarrierAck { tx } => {
                TakeOver::of(self).barrier_ack(session, tx);
                Ok(Response::Done)
            }
            Request::SetWatched(watched) => {
                watch::set_watched(&self.sessions, session, watched).map(|()| Response::Done)
            }
            Request::Watched => {
                let (generation, watched) = watch::watched(&self.sessions);
                Ok(Response::Watched(generation, watched))
            }
            Request::StatFs => {
                let promisable = Reservations::of(self).promisable_to(session.id);
                Ok(Response::StatFs(stat_fs(&self.store.space(), promisable)))
            }
            Request::ClientFault(fault) => {
                let client = Reporter {
                    id: session.id,
                    pid: session.peer.pid,
                    log: &session.log_faults,
                    privileged: session.privileged,
                };
                self.health.client_fault(&self.store, &client, fault);
                Ok(Response::Done)
            }
            Request::Bye => {
                Teardown::of(self).seal(session.id, "it said goodbye", false);
                Teardown::of(self).finish_or_leave();
                Ok(Response::Done)
            }
            Request::Admin(admin) => self.admin_request(session.peer, admin),
        }
    }

    /// Refuses operators' requests of others than root and the pool's owner.
    ///
    /// # Errors
    /// EPERM.
    pub(crate) fn may_administer(&self, peer: Peer) -> Result<(), IpcError> {
        match self.env.is_privileged(peer.uid) {
            true => Ok(()),
            false => Err(no(libc::EPERM)),
        }
    }

    /// Says what a device of this name is, after it was added.
    pub(crate) fn device_named(&self, name: &str) -> DeviceAsked {
        DeviceOps::of(self).named(name)
    }

    fn new_uuid(&self) -> Result<[u8; 16], IpcError> {
        match &self.env.tokens {
            Some(tokens) => Ok(tokens().to_le_bytes()),
            None => random_bytes().map_err(|_| no(libc::EIO)),
        }
    }

    /// Carries out an operator's request. Root and the pool's owner only, except for the status.
    ///
    /// # Errors
    /// EPERM, EIO with the cause in the daemon's log, ENOSYS where no hook implements it.
    pub fn admin_request(&self, peer: Peer, admin: Admin) -> Result<Response, IpcError> {
        let _entered = self.lifecycle.begin_request()?;
        self.may_administer(peer)?;
        let json = match admin {
            Admin::Status => serde_json::to_string(&self.status()).map_err(|_| no(libc::EIO))?,
            Admin::DigestAll => {
                self.digest_all()
                    .map_err(|error| Core::of(self).refused(&error))?;
                self.tick();
                serde_json::to_string(&self.status().digest).map_err(|_| no(libc::EIO))?
            }
            Admin::Sync => {
                let synced = Syncer::of(self).sync_all(None)?;
                serde_json::to_string(&synced).map_err(|_| no(libc::EIO))?
            }
            Admin::Fsck => match &self.env.fsck {
                Some(hook) => hook(self).map_err(IpcError::Protocol)?,
                None => {
                    let findings = self
                        .store
                        .check()
                        .map_err(|error| Core::of(self).refused(&error))?;
                    let findings: Vec<_> = findings.iter().map(|finding| format!("{finding:?}")).collect();
                    serde_json::json!({ "clean": findings.is_empty(), "findings": findings }).to_string()
                }
            },
            Admin::Scrub => match &self.env.scrub {
                Some(hook) => hook(self).map_err(IpcError::Protocol)?,
                None => return Err(no(libc::ENOSYS)),
            },
            Admin::Session(id) => {
                let detail = self.session_detail(SessionId(id)).ok_or(no(libc::ENOENT))?;
                serde_json::to_string(&detail).map_err(|_| no(libc::EIO))?
            }
            Admin::Pin {
                inodes,
                pin,
                over_own,
            } => {
                let set = Pinning::of(self).set(&inodes, pin, over_own)?;
                serde_json::to_string(&set).map_err(|_| no(libc::EIO))?
            }
            Admin::PlaceShared { files, to } => {
                let set = Pinning::of(self).place_shared(&files, to)?;
                serde_json::to_string(&set).map_err(|_| no(libc::EIO))?
            }
            Admin::Jobs => {
                let jobs = Jobs::of(self).list()?;
                serde_json::to_string(&jobs).map_err(|_| no(libc::EIO))?
            }
            Admin::Evacuate { tier, partly } => {
                let asked = Jobs::of(self).evacuate(tier, partly)?;
                serde_json::to_string(&asked).map_err(|_| no(libc::EIO))?
            }
            Admin::Job { id, act } => {
                let job = Jobs::of(self).act(id, act)?;
                serde_json::to_string(&job).map_err(|_| no(libc::EIO))?
            }
            Admin::AddDevice { .. } => return Err(no(libc::ENOSYS)),
            Admin::RemoveDevice { device, act } => {
                let ops = DeviceOps::of(self);
                let asked = match act {
                    RemovalAct::Begin { partly } => ops.remove(&device, self.new_uuid()?, partly)?,
                    RemovalAct::Cancel => ops.keep(&device)?,
                };
                serde_json::to_string(&asked).map_err(|_| no(libc::EIO))?
            }
            Admin::ApplyRules => {
                let applied = Ruling::of(self).apply()?;
                serde_json::to_string(&applied).map_err(|_| no(libc::EIO))?
            }
            Admin::Placed { inodes } => {
                let placed = Pinning::of(self).placed(&inodes)?;
                serde_json::to_string(&placed).map_err(|_| no(libc::EIO))?
            }
            Admin::Shutdown => {
                self.lifecycle
                    .shutdown_asked
                    .store(true, std::sync::atomic::Ordering::Release);
                self.lifecycle.bell.ring();
                "{}".into()
            }
        };
        Ok(Response::Json(json))
    }

    /// Returns the present state and counters.
    #[must_use]
    pub fn status(&self) -> Status {
        View::of(self).status()
    }

    /// Returns the present state of one session; `None`: no session has this number.
    #[must_use]
    pub fn session_detail(&self, id: SessionId) -> Option<SessionDetail> {
        View::of(self).session_detail(id)
    }

    /// Does one step of placement: the policy's moves, bounded by `placement_step_blocks`. Returns the number
    /// of moved blocks. Durable when this returns. Background threads call it; a deterministic test calls it
    /// instead of them.
    pub fn place(&self) -> u64 {
        Ruling::of(self).step();
        Mover::of(self).place()
    }

    /// Does the work that the passage of time or clients' misbehaviour makes necessary: late sessions, ended
    /// processes, logs to digest, inodes to free. Background threads call it; a deterministic test calls it
    /// instead of them.
    pub fn tick(&self) {
        Upkeep::of(self).tick();
    }

    /// Ends all sessions and empties the journal. New requests fail with `Gone`; those under way have ended
    /// when this returns, so that the pool may be opened again at once, in this process too. Always ends:
    /// entries that a failed device keeps from being digested stay in the logs, and a request that such a
    /// device blocks beyond the longest wait changes nothing any more.
    ///
    /// # Errors
    /// The first error of a device; everything else was done.
    pub fn shutdown(&self) -> Result<(), StoreError> {
        Shutdown::of(self).shutdown()
    }

    /// Digests the committed entries of all logs.
    ///
    /// # Errors
    /// The store's; every log was tried.
    pub fn digest_all(&self) -> Result<(), StoreError> {
        Digests::of(self).digest_all()
    }

    /// Returns the number of sessions, including those that are being sealed.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.locked().entries.len()
    }

    /// Whether a session is live.
    #[must_use]
    pub fn is_live(&self, id: SessionId) -> bool {
        self.locked()
            .entries
            .get(&id)
            .is_some_and(|member| member.phase == Phase::Live)
    }
}

impl Service for KernelFs {
    fn hello(&self, peer: Peer, hello: Hello) -> Result<Opened, IpcError> {
        let _entered = self.lifecycle.begin_request()?;
        let opened = self.open_session(peer, hello)?;
        let session = opened.welcome.session;
        let given = self.logs.descriptors(session, opened.welcome.privileged);
        let descriptors = given
            .and_then(|mut given| {
                if let Some(segments) = &opened.segments {
                    given.nvm = Some(segments.share()?);
                }
                // What a client cannot read by itself it asks for.
                given.ssd = opened.ssd.map_or_else(Vec::new, |ssd| shared_parts(&*ssd));
                // A client without the bitmap compares blocks for itself.
                given.verified = opened.verified.and_then(|verified| verified.descriptor().ok()?);
                Ok(given)
            })
            .map_err(|error| {
                tracing::error!(%session, "no descriptors for a client: {error}");
                Teardown::of(self).seal(session, "its opening failed", false);
                Teardown::of(self).finish_or_leave();
                no(libc::EIO)
            })?;
        Ok(Opened {
            welcome: opened.welcome,
            descriptors,
            upcalls: opened.upcalls,
        })
    }

    fn call(&self, session: SessionId, request: Request) -> Result<Response, IpcError> {
        self.call_session(session, request)
    }

    fn admin(&self, peer: Peer, admin: Admin) -> Result<Response, IpcError> {
        self.admin_request(peer, admin)
    }

    fn gone(&self, session: SessionId) {
        Teardown::of(self).connection_gone(session);
    }
}

/// Descriptors by which a client reads a device.
fn shared_parts(device: &dyn BlockDevice) -> Vec<(DevicePart, OwnedFd)> {
    let of = |part: ReaderPart| {
        let told = DevicePart {
            index: part.index,
            first_byte: part.first_byte,
            len_bytes: part.len_bytes,
            data_offset: part.data_offset,
            emulated: part.emulated,
        };
        (told, part.file.into())
    };
    device.reader_parts().into_iter().map(of).collect()
}
