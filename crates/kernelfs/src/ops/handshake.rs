//! Session handshake: session numbers, tokens, the change to shared mode, resumption.

use crate::config::{Emulated, VerifyNvm};
use crate::error::{no, no_log, refuse};
use crate::health::Health;
use crate::kernel::{Core, KernelFs};
use crate::logs::LogStore;
use crate::ops::acquire::leases_max;
use crate::ops::holds::HeldInodes;
use crate::ops::record::Records;
use crate::ops::sharing::Sharing;
use crate::ops::teardown::Teardown;
use crate::session::state::{Session, SessionParts};
use crate::session::table::{Phase, Reclaim, SessionEntry, SharedMode};
use crate::user_segments::{Segments, UserSegments};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use varve_format::{LastForwarded, ROOT_INO, SessionId};
use varve_ipc::{ClientKind, HELD_MAX, Hello, IpcError, PROTOCOL_VERSION, Peer, Welcome};
use varve_media::BlockDevice;
use varve_store::StoreError;

/// Session numbers that are taken from the pool at once.
const IDS_AHEAD: u64 = 128;

/// An open session, for a client in this process.
pub struct LocalSession {
    /// The answer.
    pub welcome: Welcome,
    /// Upcalls.
    pub upcalls: Arc<varve_ipc::UpcallQueue>,
    /// The page.
    pub page: Arc<varve_ipc::Page>,
    /// The log; `None` for a session that only reads.
    pub log: Option<Arc<dyn varve_media::Region>>,
    /// The NVM region; privileged sessions only.
    pub nvm: Option<Arc<dyn varve_media::Region>>,
    /// Bitmap of NVM blocks that were compared with their checksums, if each is compared once.
    pub verified: Option<Arc<varve_media::Verified>>,
    /// The SSD, if the session reads it by itself.
    pub ssd: Option<Arc<dyn BlockDevice>>,
    /// Segments that unprivileged sessions map instead.
    pub(crate) segments: Option<Arc<UserSegments>>,
}

/// Context of opening sessions.
pub(crate) struct Handshake<'k> {
    core: Core<'k>,
    logs: &'k dyn LogStore,
    health: &'k Health,
    segments: &'k Segments,
    held: HeldInodes<'k>,
    sharing: Sharing<'k>,
    teardown: Teardown<'k>,
    records: Records<'k>,
    ids: &'k Mutex<Range<u64>>,
}

impl<'k> Handshake<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            logs: &*kernel.logs,
            health: &kernel.health,
            segments: &kernel.segments,
            held: HeldInodes::of(kernel),
            sharing: Sharing::of(kernel),
            teardown: Teardown::of(kernel),
            records: Records::of(kernel),
            ids: &kernel.session_ids,
        }
    }

    /// See [`KernelFs::open_session`].
    pub(crate) fn open_session(&self, peer: Peer, hello: Hello) -> Result<LocalSession, IpcError> {
        let _entered = self.core.lifecycle.begin_request()?;
        if hello.version != PROTOCOL_VERSION {
            return Err(IpcError::Protocol(format!(
                "the daemon speaks version {PROTOCOL_VERSION}, the client {}",
                hello.version
            )));
        }
        if !self.core.env.is_privileged(peer.uid) && !self.core.env.config.users.admit(peer.uid) {
            return Err(no(libc::EACCES));
        }
        if hello.held.len() > HELD_MAX {
            return Err(no(libc::E2BIG));
        }
        if self.core.lifecycle.stopping.load(Ordering::Acquire) {
            return Err(IpcError::Gone("the daemon is stopping".into()));
        }
        let predecessor = hello.resume.and_then(|token| self.end_predecessor(token, peer));
        self.teardown.reap(self.core.now_ms());
        let latched = self.core.store.latched();
        let read_only = hello.read_only || latched.is_some();
        self.check_room(peer, read_only)?;
        let made = self.make_session(peer, &hello, read_only, predecessor.as_ref());
        let session = Arc::new(made.inspect_err(|error| {
            tracing::warn!(pid = peer.pid, "no session: {error}");
        })?);
        let shared = self.enter(&session, &hello, predecessor.as_ref());
        if shared {
            self.sharing.announce_shared_mode(session.id);
        }
        let root = self.core.store.get(ROOT_INO).map_err(|error| {
            self.teardown.seal(session.id, "its opening failed", false);
            self.teardown.finish_or_leave();
            self.core.store.note_damage(&error);
            refuse(&error)
        })?;
        let nvm = &self.core.store.devices().nvm;
        let verify = self.core.env.config.verify_nvm_reads.on(self.logs.needs_sync());
        let needs_sync = self.logs.log_needs_sync(session.id);
        let welcome = Welcome {
            session: session.id,
            token: session.token,
            pool_uuid: self.core.store.pool_uuid(),
            root: root.attr,
            privileged: session.privileged,
            acts_for: (!session.privileged).then(|| session.cred.clone()),
            read_only,
            latched: latched.map(|reason| reason.to_string()),
            shared,
            log_bytes: session.log.as_ref().map_or(0, |log| log.len_bytes()),
            log_max_bytes: self.core.env.config.log_limit(nvm.len_bytes()),
            nvm_bytes: match &session.segments {
                Some(segments) => segments.len_bytes(),
                None => nvm.len_bytes(),
            },
            nvm_sums: (session.privileged && verify != VerifyNvm::Never)
                .then(|| self.core.store.nvm_checksums_at()),
            nvm_sums_once: verify == VerifyNvm::First,
            nvm_emulated: self.core.env.config.emulate.contains(&Emulated::Nvm),
            dax: self.logs.dax_maps(session.id, session.privileged),
            lease_ms: self.core.env.config.lease_ms,
            wait_ms: self.core.env.config.wait_ms,
            digest_percent: self.core.env.config.digest_percent,
            read_ahead_bytes: self.core.env.config.read_ahead_bytes,
            sync_ms: if needs_sync {
                self.core.env.config.sync_ms
            } else {
                0
            },
            needs_sync,
            seal: predecessor.as_ref().map(|ended| ended.seal.clone()),
            last_forwarded: predecessor
                .as_ref()
                .map_or(LastForwarded::default(), |ended| ended.last_forwarded),
            leases_max: leases_max(&self.core.env.config, &session),
            name_hash: session.privileged.then(|| self.core.store.hash_key()),
            copies_at: session
                .keeps_copies()
                .then(|| self.logs.copies_at(session.process))
                .flatten(),
        };
        Ok(LocalSession {
            welcome,
            upcalls: Arc::clone(&session.upcalls),
            page: Arc::clone(&session.page),
            log: session.log.clone(),
            nvm: session.privileged.then(|| Arc::clone(nvm)),
            verified: self.core.store.verified().filter(|_| session.privileged).cloned(),
            ssd: self.readable_ssd(&session),
            segments: session.segments.clone(),
        })
    }

    /// The SSD, for a session that reads it by itself: it is privileged, so it may read all data, and it is
    /// given the checksums.
    fn readable_ssd(&self, session: &Session) -> Option<Arc<dyn BlockDevice>> {
        let direct = session.privileged && self.core.env.config.direct_reads;
        self.core.store.devices().ssd.clone().filter(|_| direct)
    }

    /// Seals and digests the session of this token, if it still lives, and finds its remains.
    fn end_predecessor(&self, token: u128, peer: Peer) -> Option<crate::session::table::Ended> {
        let alive = {
            let sessions = self.core.locked();
            let mut entries = sessions.entries.values();
            entries
                .find(|member| member.session.token == token && member.session.peer.uid == peer.uid)
                .map(|member| member.session.id)
        };
        if let Some(id) = alive {
            self.teardown.seal_session(id, "its client resumes");
            self.teardown.finish_sealed();
            // Another thread may be ending it.
            let until_ms = self.core.now_ms() + self.core.env.config.wait_ms;
            while self.core.locked().entries.contains_key(&id) {
                if self.core.now_ms() >= until_ms || self.core.store.latched().is_some() {
                    break;
                }
                self.core.env.clock.pause(std::time::Duration::from_millis(1));
                self.teardown.finish_sealed();
            }
        }
        let ended = {
            let sessions = self.core.locked();
            let mut all = sessions.ended.iter();
            all.find(|ended| ended.token == token && ended.uid == peer.uid)
                .cloned()
        }?;
        self.forget_unheard(&ended);
        Some(ended)
    }

    /// Forgets sessions that the returning client of `ended` cannot know. It shows the token of `ended`, so
    /// it knows how the session before ended, and got no answer about a session that was to continue `ended`.
    /// It may not get the next answer either, so `ended` itself is kept until the client is known to have it.
    fn forget_unheard(&self, ended: &crate::session::table::Ended) {
        let (living, forgotten) = {
            let sessions = self.core.locked();
            let unheard = |continues: Option<SessionId>| continues == Some(ended.id);
            let entries = sessions.entries.values();
            let living: Vec<_> = entries
                .filter(|member| unheard(member.session.continues()))
                .map(|member| member.session.id)
                .collect();
            let others = sessions.ended.iter().filter(|other| unheard(other.continues));
            let forgotten: Vec<_> = others.map(|other| other.id).chain(ended.continues).collect();
            (living, forgotten)
        };
        for id in living {
            self.teardown.seal(id, "its client has not heard of it", false);
            self.teardown.finish_or_leave();
        }
        for id in forgotten {
            self.teardown.forget_ended(id);
        }
    }

    /// Checks whether another session may be opened, and recorded unless it only reads. Ended sessions, which
    /// are only kept for their clients' return, make room.
    fn check_room(&self, peer: Peer, read_only: bool) -> Result<(), IpcError> {
        let most = self.core.env.config.sessions_max as usize;
        let rows = match read_only {
            true => usize::MAX,
            false => usize::try_from(self.core.store.sessions_max()).unwrap_or(usize::MAX),
        };
        let own_most = if self.core.env.is_privileged(peer.uid) {
            most
        } else {
            most.div_ceil(4)
        };
        loop {
            let sessions = self.core.locked();
            let entries = || sessions.entries.values().map(|member| &member.session);
            let living = entries().count();
            let own = entries().filter(|session| session.peer.uid == peer.uid).count();
            let writers = entries().filter(|session| !session.read_only).count();
            let ended = sessions.ended.len();
            let ended_rows = sessions.ended.iter().filter(|ended| ended.row).count();
            drop(sessions);
            if living >= most || own >= own_most || writers >= rows {
                return Err(no(libc::EUSERS));
            }
            let lacks_row = writers + ended_rows >= rows;
            if living + ended < most && !lacks_row {
                return Ok(());
            }
            if !self.teardown.forget_crowd(lacks_row) {
                return Err(no(libc::EUSERS));
            }
        }
    }

    fn make_session(
        &self,
        peer: Peer,
        hello: &Hello,
        read_only: bool,
        predecessor: Option<&crate::session::table::Ended>,
    ) -> Result<Session, IpcError> {
        let id = if read_only {
            let mut sessions = self.core.locked();
            sessions.next_read_only += 1;
            SessionId(sessions.next_read_only)
        } else {
            self.fresh_id().map_err(|error| self.core.refused(&error))?
        };
        let privileged = self.core.env.is_privileged(peer.uid);
        let token = match &self.core.env.tokens {
            Some(tokens) => tokens(),
            None => random_bytes().map(u128::from_le_bytes).map_err(|error| {
                tracing::error!("no random numbers from /dev/urandom: {error}");
                no(libc::EIO)
            })?,
        };
        let (config, nvm) = (&self.core.env.config, self.core.store.devices().nvm.len_bytes());
        let log_bytes = (config.log_at_first(nvm), config.log_limit(nvm));
        let area = self
            .logs
            .create(id, (!read_only).then_some(log_bytes), privileged)
            .map_err(|error| {
                tracing::error!("no room for a session's log: {error}");
                self.health.log_failed(id, None, &error);
                no_log(&error)
            })?;
        area.page.set_committed_tx(self.core.store.newest_tx());
        let segments = if privileged {
            None
        } else {
            self.segments_of(peer.uid)
        };
        let session = Session::new(SessionParts {
            id,
            kind: hello.kind,
            peer,
            privileged,
            read_only,
            token,
            created_ns: self.core.env.clock.now_ns(),
            page: area.page,
            log: area.log,
            process: None,
            // The new session may name the inodes that its predecessor could name.
            known: predecessor.and_then(|ended| ended.known.clone()),
            continues: predecessor.map(|ended| ended.id),
            segments,
        });
        // The kernel of a mount answers by what it was told, also after a restart of the daemon, which must
        // know of it.
        if !read_only && hello.kind == ClientKind::Shim {
            let recorded = self.records.make(&session);
            recorded.inspect_err(|_| self.logs.remove(id))?;
        }
        Ok(session)
    }

    /// Returns a session number that was never given before. Numbers are taken from the pool by the hundred:
    /// what is left of them at the end is not used again.
    fn fresh_id(&self) -> Result<SessionId, StoreError> {
        let mut ids = self.ids.lock();
        if ids.is_empty() {
            let mut tx = self.core.store.begin()?;
            let first = tx.next_session_ids(IDS_AHEAD)?;
            tx.commit()?;
            *ids = first.0..first.0 + IDS_AHEAD;
        }
        let id = ids.next().ok_or(StoreError::Invalid("no session number"))?;
        Ok(SessionId(id))
    }

    /// Returns the user's segments. Without them data is read by message.
    fn segments_of(&self, uid: u32) -> Option<Arc<UserSegments>> {
        let len_bytes = self.core.env.config.user_bytes;
        let made = self
            .segments
            .of(uid, len_bytes, || self.logs.segment_file(uid, len_bytes));
        made.unwrap_or_else(|error| {
            tracing::warn!(
                uid,
                "no segments for a user, whose sessions read by message: {error}"
            );
            None
        })
    }

    /// Enters the new session into the table. Returns whether there are other sessions.
    fn enter(
        &self,
        session: &Arc<Session>,
        hello: &Hello,
        predecessor: Option<&crate::session::table::Ended>,
    ) -> bool {
        // The client may not know the inode that its last forwarded operation made and opened, and so not
        // list it in `held`.
        let made = predecessor
            .map(|ended| ended.last_forwarded)
            .filter(|last| last.open)
            .and_then(|last| last.made);
        let held: Vec<_> = hello
            .held
            .iter()
            .chain(&made)
            .filter(|key| self.held.may_hold(session, **key, hello.resume.is_some()))
            .collect();
        let mut sessions = self.core.locked();
        let shared = sessions.is_shared(session.id);
        let member = SessionEntry {
            session: Arc::clone(session),
            phase: Phase::Live,
            shared_mode: SharedMode::at_entry(shared),
            barriers: BTreeMap::new(),
            reclaim: Reclaim::None,
        };
        session.page.set_watched(sessions.watches.generation());
        sessions.entries.insert(session.id, member);
        for key in held {
            sessions.holds.add(session.id, *key);
        }
        shared
    }
}

/// Returns sixteen unpredictable bytes.
pub(crate) fn random_bytes() -> std::io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}
