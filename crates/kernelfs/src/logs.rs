//! Storage of sessions' logs and pages. Owns the interface and its simulated form; the host's files are in
//! [`crate::pool`].

use crate::process::ProcessId;
use crate::user_segments::SegmentFile;
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use varve_format::SessionId;
use varve_ipc::{CopiesAt, DaxMaps, Descriptors, Page};
use varve_media::sim::{SimMedium, SimWorld};
use varve_media::{MediaError, Region};

/// Log and page of one session.
#[derive(Clone)]
pub struct SessionArea {
    /// The page, written by the daemon.
    pub page: Arc<Page>,
    /// The log; `None` for a session that only reads.
    pub log: Option<Arc<dyn Region>>,
}

/// Makes, finds and removes logs and pages.
pub trait LogStore: Send + Sync {
    /// Makes a log for `log_bytes` zeros that can grow to `log_max_bytes`, and a live page. With `None` it
    /// makes only a page. The log may be empty until it is [started](Self::start). Only the log of a
    /// `privileged` session may lie where its client could take space or reach other data.
    ///
    /// # Errors
    /// `NoSpace` and others of the medium; nothing is left behind then.
    fn create(
        &self,
        session: SessionId,
        log_bytes: Option<(u64, u64)>,
        privileged: bool,
    ) -> Result<SessionArea, MediaError>;

    /// Gives the `log` of a session `len_bytes` of space and a header, unless it has them. Survives the daemon
    /// when this returns, and a power cut from the first [`sync`](Self::sync) on; may be repeated after an
    /// error.
    ///
    /// # Errors
    /// `NoSpace` and others of the medium.
    fn start(&self, session: SessionId, log: &dyn Region, len_bytes: u64) -> Result<(), MediaError>;

    /// Makes ranges of a session's started `log` durable, each its first byte and its length, and with the
    /// first of them the log's header and name. A client with the backing file may write what comes later by
    /// itself.
    ///
    /// # Errors
    /// As [`Region::sync_all`].
    fn sync(&self, session: SessionId, log: &dyn Region, ranges: &[(u64, u64)]) -> Result<(), MediaError> {
        let _ = session;
        log.sync_all(ranges)
    }

    /// Returns the pages of all sessions of earlier daemons that clients may still read.
    ///
    /// # Errors
    /// Of the medium.
    fn pages(&self) -> Result<Vec<Arc<Page>>, MediaError>;

    /// Opens the log of a session of an earlier daemon; `None` if there is none (the session never logged, it
    /// ended, or it never synced before a power cut).
    ///
    /// # Errors
    /// Of the medium.
    fn open(&self, session: SessionId) -> Result<Option<Arc<dyn Region>>, MediaError>;

    /// Lists all existing logs by session.
    ///
    /// # Errors
    /// Of the medium.
    fn list(&self) -> Result<Vec<SessionId>, MediaError>;

    /// Removes log and page. A client that maps them keeps its mapping.
    fn remove(&self, session: SessionId);

    /// Removes the log, and leaves the page: it says that a client without a record may return.
    fn remove_log(&self, session: SessionId);

    /// Returns the descriptors for a client in another process; none where that is not possible. A client
    /// that is not `privileged` gets neither the NVM nor its log's backing file: it could fill the host's
    /// disk through it. The caller adds the descriptors of its segments.
    ///
    /// # Errors
    /// Of the medium.
    fn descriptors(&self, session: SessionId, privileged: bool) -> Result<Descriptors, MediaError> {
        let _ = (session, privileged);
        Ok(Descriptors::default())
    }

    /// Makes a file of `len_bytes` for the segments of a user; `None` where segments do not exist, or memory
    /// for them has run out.
    ///
    /// # Errors
    /// Of the medium.
    fn segment_file(&self, uid: u32, len_bytes: u64) -> Result<Option<Box<dyn SegmentFile>>, MediaError> {
        let _ = (uid, len_bytes);
        Ok(None)
    }

    /// Returns the place where a process may keep copies of data that it reads; `None` where it may not.
    fn copies_at(&self, process: ProcessId) -> Option<CopiesAt> {
        let _ = process;
        None
    }

    /// Empties the copies of a process, one of whose sessions was sealed. When this returns, the process
    /// shows no data of that session.
    fn drop_copies(&self, process: ProcessId) {
        let _ = process;
    }

    /// Empties the copies of all processes that had sessions with earlier daemons, whose pages are sealed.
    fn drop_left_copies(&self) {}

    /// Removes the copies of processes that are gone; `lives` identifies processes that are not.
    fn sweep_copies(&self, lives: &dyn Fn(ProcessId) -> bool) {
        let _ = lives;
    }

    /// Whether clients must write their logs back for power failures, unless one is on better memory
    /// ([`log_needs_sync`](Self::log_needs_sync)).
    fn needs_sync(&self) -> bool {
        false
    }

    /// Whether the client of this session must.
    fn log_needs_sync(&self, session: SessionId) -> bool {
        let _ = session;
        self.needs_sync()
    }

    /// Whether what a client has fenced in its log survives all that the medium can survive, in every log
    /// that there is or, with `others`, may be: other users than root and the pool's owner have sessions.
    fn fenced_is_durable(&self, others: bool) -> bool {
        let _ = others;
        !self.needs_sync()
    }

    /// Returns which of the session's [descriptors](Self::descriptors) are persistent memory.
    fn dax_maps(&self, session: SessionId, privileged: bool) -> DaxMaps {
        let _ = (session, privileged);
        DaxMaps::default()
    }
}

/// Logs in a simulated machine; pages in the heap, which survive the daemon but not the machine.
pub struct SimLogs {
    world: SimWorld,
    medium: SimMedium,
    pages: Mutex<HashMap<SessionId, Arc<Page>>>,
    /// Removed logs: like a file that is still mapped, they take stores of clients that do not know yet.
    removed: Mutex<VecDeque<SessionId>>,
}

/// Removed logs that are kept for clients that still store to them.
const REMOVED_MAX: usize = 64;

impl SimLogs {
    /// Logs are regions `log-<session>` of `world`.
    #[must_use]
    pub fn new(world: SimWorld, medium: SimMedium) -> Self {
        Self {
            world,
            medium,
            pages: Mutex::default(),
            removed: Mutex::default(),
        }
    }

    fn name(session: SessionId) -> String {
        format!("log-{session}")
    }
}

impl LogStore for SimLogs {
    fn create(
        &self,
        session: SessionId,
        log_bytes: Option<(u64, u64)>,
        _: bool,
    ) -> Result<SessionArea, MediaError> {
        let page = Arc::new(Page::heap(session));
        let log = log_bytes.map(|(_, max_bytes)| {
            let name = Self::name(session);
            // A session that was never committed may have left a region of this name.
            self.world.remove(&name);
            self.world.add_region(&name, self.medium, 0, max_bytes) as Arc<dyn Region>
        });
        self.pages.lock().insert(session, Arc::clone(&page));
        Ok(SessionArea { page, log })
    }

    fn start(&self, _: SessionId, log: &dyn Region, len_bytes: u64) -> Result<(), MediaError> {
        log.grow(len_bytes)
    }

    fn pages(&self) -> Result<Vec<Arc<Page>>, MediaError> {
        Ok(self.pages.lock().values().cloned().collect())
    }

    fn open(&self, session: SessionId) -> Result<Option<Arc<dyn Region>>, MediaError> {
        if self.removed.lock().contains(&session) {
            return Ok(None);
        }
        Ok(self
            .world
            .region(&Self::name(session))
            .map(|region| region as Arc<dyn Region>))
    }

    fn list(&self) -> Result<Vec<SessionId>, MediaError> {
        let names = self.world.names();
        let numbers = names
            .iter()
            .filter_map(|name| name.strip_prefix("log-")?.parse().ok());
        let removed = self.removed.lock();
        Ok(numbers
            .map(SessionId)
            .filter(|session| !removed.contains(session))
            .collect())
    }

    fn remove(&self, session: SessionId) {
        self.pages.lock().remove(&session);
        self.remove_log(session);
    }

    fn remove_log(&self, session: SessionId) {
        let mut removed = self.removed.lock();
        if self.world.region(&Self::name(session)).is_some() && !removed.contains(&session) {
            removed.push_back(session);
        }
        if removed.len() > REMOVED_MAX
            && let Some(oldest) = removed.pop_front()
        {
            self.world.remove(&Self::name(oldest));
        }
    }

    fn needs_sync(&self) -> bool {
        self.medium == SimMedium::File
    }
}
