//! One session as the daemon sees it. Owns the state of that session alone; leases and holds are in the
//! session table.

use crate::digest::SessionLog;
use crate::health::LogFaults;
use crate::process::ProcessId;
use crate::user_segments::UserSegments;
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use varve_format::session::{SESSION_MOUNT, SESSION_SYNCED, SessionRow, SessionState};
use varve_format::{InodeAttr, InodeKey, LastForwarded, LogSeq, SessionId, TimeNs};
use varve_ipc::{ClientKind, Cred, IpcError, Page, Peer, UpcallQueue};
use varve_media::{DeviceInfo, DeviceState, MediaError, Region};

/// Most inodes that an unprivileged session can name.
const KNOWN_MAX: usize = 1 << 20;

/// Inodes that an unprivileged client has looked up, and the rights (4 read, 2 write) that it had on each
/// while it held it; a session that continues another takes them over.
pub(crate) type Known = Arc<Mutex<HashMap<InodeKey, u32>>>;

/// Removes inodes that are gone from the known ones.
pub(crate) fn unlearn(known: &Known, keys: &[InodeKey]) {
    let mut known = known.lock();
    for key in keys {
        known.remove(key);
    }
}

/// The reading end of a session's log. Held while the log is digested.
pub(crate) struct Reader {
    pub(crate) log: SessionLog,
    pub(crate) digested: LogSeq,
}

/// The log of a client that the daemon's life must not depend on: the client can shorten the file under a
/// mapping, and a plain read of missing bytes would kill the reader. Missing bytes read as zeros: no entries.
struct GuardedLog(Arc<dyn Region>);

impl Region for GuardedLog {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.0.read_shared(off, out)
    }

    fn is_mapped(&self) -> bool {
        self.0.is_mapped()
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.0.write(off, src)
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        self.0.write_crc(off, src, seed)
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.0.fence()
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.0.sync(off, len)
    }

    fn sync_all(&self, ranges: &[(u64, u64)]) -> Result<(), MediaError> {
        self.0.sync_all(ranges)
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        self.0.grow(new_len)
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.0.allocate(off, len)
    }

    fn state(&self) -> DeviceState {
        self.0.state()
    }

    fn info(&self) -> DeviceInfo {
        self.0.info()
    }
}

/// Whether a session is known on media: its row, and the space of its log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recorded {
    /// Not yet: nothing on media rests on it.
    NotYet,
    /// Yes.
    Yes,
    /// Never: it only reads, or has ended.
    Never,
}

/// Carries out forwarded operations in the order of their numbers.
#[derive(Default)]
pub(crate) struct Turn {
    pub(crate) last: Mutex<u64>,
    pub(crate) next: Condvar,
}

/// One session.
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) kind: ClientKind,
    pub(crate) peer: Peer,
    pub(crate) process: ProcessId,
    pub(crate) cred: Cred,
    /// Opened by an earlier daemon: its reservation is not known.
    pub(crate) of_earlier_daemon: bool,
    /// Opened by an earlier daemon, and its process is gone: its groups are not known.
    pub(crate) groups_unknown: bool,
    pub(crate) privileged: bool,
    pub(crate) read_only: bool,
    pub(crate) token: u128,
    pub(crate) created_ns: TimeNs,
    pub(crate) upcalls: Arc<UpcallQueue>,
    pub(crate) page: Arc<Page>,
    pub(crate) log: Option<Arc<dyn Region>>,
    pub(crate) reader: Mutex<Reader>,
    pub(crate) turn: Turn,
    /// Held while its record is made.
    record: Mutex<Recorded>,
    /// The record is there.
    is_recorded: AtomicBool,
    /// The log was synced, or is about to be said so in the row.
    log_synced: AtomicBool,
    /// Whether the row says so. Held while that is written.
    synced_noted: Mutex<bool>,
    /// Held while rows of ended leases are written.
    pub(crate) row_changes: Mutex<()>,
    /// Reserved blocks that are not used up. Grows only under the lock of the session table.
    pub(crate) reserved: AtomicU64,
    /// All blocks ever granted to it. Changes when `reserved` grows.
    pub(crate) granted: AtomicU64,
    /// Time until which its holds count after its connection went; 0: as long as its process lives.
    pub(crate) holds_until_ms: AtomicU64,
    /// The session that it continues, if its client may not have learned how that one ended; 0: none.
    continues: AtomicU64,
    /// The session that it continues.
    pub(crate) predecessor: Option<SessionId>,
    /// A part of its log could not be used.
    suspect: AtomicBool,
    /// Segments in which an unprivileged session reads its user's files directly, if it has any.
    pub(crate) segments: Option<Arc<UserSegments>>,
    /// Faults of its log.
    pub(crate) log_faults: LogFaults,
    /// Inodes that an unprivileged session has looked up.
    known: Known,
}

/// Constituents of a session.
pub(crate) struct SessionParts {
    pub(crate) id: SessionId,
    pub(crate) kind: ClientKind,
    pub(crate) peer: Peer,
    pub(crate) privileged: bool,
    pub(crate) read_only: bool,
    pub(crate) token: u128,
    pub(crate) created_ns: TimeNs,
    pub(crate) page: Arc<Page>,
    pub(crate) log: Option<Arc<dyn Region>>,
    /// The peer's process, if it is known from a row: a session of an earlier daemon.
    pub(crate) process: Option<ProcessId>,
    /// Inodes that the continued session could name.
    pub(crate) known: Option<Known>,
    /// The ended session that it continues.
    pub(crate) continues: Option<SessionId>,
    /// Segments of an unprivileged session's user.
    pub(crate) segments: Option<Arc<UserSegments>>,
}

impl Session {
    /// Runs `allocate`; the memory of it comes from the NUMA node that the client runs on.
    pub(crate) fn allocate_near<T>(&self, allocate: impl FnOnce() -> T) -> T {
        match self.process.node() {
            Some(node) => node.prefer(allocate),
            None => allocate(),
        }
    }

    /// Whether its client may keep copies of data it reads for its maps. The client makes their file itself,
    /// in the live directory.
    pub(crate) fn keeps_copies(&self) -> bool {
        self.privileged && self.kind == ClientKind::Linked
    }

    pub(crate) fn new(parts: SessionParts) -> Self {
        let SessionParts {
            id,
            kind,
            peer,
            privileged,
            read_only,
            token,
            created_ns,
            page,
            log,
            process,
            known,
            continues,
            segments,
        } = parts;
        // For a session of an earlier daemon only its process is known, if that lives.
        let gone = process.is_some_and(|process| !process.is_alive());
        let known_groups = if privileged || gone {
            None
        } else {
            crate::process::groups_of(peer.pid, peer.uid)
        };
        let groups_unknown = process.is_some() && known_groups.is_none();
        let (gid, groups) = match known_groups {
            // The peer's group is that of its connect; for a session of an earlier daemon there is none.
            Some((gid, groups)) if process.is_some() => (gid, groups),
            Some((_, groups)) => (peer.gid, groups),
            None => (peer.gid, Vec::new()),
        };
        Self {
            id,
            kind,
            peer,
            process: process.unwrap_or_else(|| ProcessId::of(peer.pid)),
            of_earlier_daemon: process.is_some(),
            groups_unknown,
            cred: Cred {
                uid: peer.uid,
                gid,
                groups,
            },
            privileged,
            read_only,
            token,
            created_ns,
            upcalls: Arc::new(UpcallQueue::new()),
            page,
            // Only a client in this process cannot truncate the file under a mapping.
            log: log.map(|log| {
                if peer.pid == std::process::id() {
                    log
                } else {
                    Arc::new(GuardedLog(log))
                }
            }),
            reader: Mutex::new(Reader {
                log: SessionLog::new(id),
                digested: LogSeq(0),
            }),
            turn: Turn::default(),
            record: Mutex::new(match (read_only, process.is_some()) {
                (true, _) => Recorded::Never,
                (false, true) => Recorded::Yes,
                (false, false) => Recorded::NotYet,
            }),
            is_recorded: AtomicBool::new(process.is_some()),
            log_synced: AtomicBool::new(false),
            synced_noted: Mutex::new(false),
            row_changes: Mutex::new(()),
            reserved: AtomicU64::new(0),
            granted: AtomicU64::new(0),
            holds_until_ms: AtomicU64::new(0),
            continues: AtomicU64::new(continues.map_or(0, |id| id.0)),
            predecessor: continues,
            suspect: AtomicBool::new(false),
            segments,
            log_faults: LogFaults::default(),
            known: known.unwrap_or_else(|| Arc::new(Mutex::new(HashMap::from([(InodeKey::ROOT, 0)])))),
        }
    }

    /// Returns the session that it continues, until its client makes a first request.
    pub(crate) fn continues(&self) -> Option<SessionId> {
        let id = self.continues.load(Ordering::Acquire);
        (id != 0).then_some(SessionId(id))
    }

    /// Notes a request of its client, which therefore knows how the continued session ended. Returns that
    /// session at the first request.
    #[inline]
    pub(crate) fn hears(&self) -> Option<SessionId> {
        if self.continues.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let id = self.continues.swap(0, Ordering::AcqRel);
        (id != 0).then_some(SessionId(id))
    }

    /// Whether the session has a row on media.
    #[inline]
    pub(crate) fn is_recorded(&self) -> bool {
        self.is_recorded.load(Ordering::Acquire)
    }

    /// Makes the session's record by `make`, unless it is there.
    ///
    /// # Errors
    /// `Sealed` if it has ended, or only reads; those of `make`, after which it may be tried again.
    pub(crate) fn record(&self, make: impl FnOnce() -> Result<(), IpcError>) -> Result<(), IpcError> {
        let mut recorded = self.record.lock();
        match *recorded {
            Recorded::Yes => Ok(()),
            Recorded::Never => Err(IpcError::Sealed),
            Recorded::NotYet => {
                make()?;
                *recorded = Recorded::Yes;
                self.is_recorded.store(true, Ordering::Release);
                Ok(())
            }
        }
    }

    /// From now on no record is made. Returns whether there is one.
    pub(crate) fn end_record(&self) -> bool {
        let mut recorded = self.record.lock();
        if *recorded == Recorded::NotYet {
            *recorded = Recorded::Never;
        }
        *recorded == Recorded::Yes
    }

    /// Marks the log as incomplete: it is damaged, gone, or an operation in it was refused.
    pub(crate) fn suspect(&self) {
        self.suspect.store(true, Ordering::Relaxed);
    }

    /// Whether the log was marked as incomplete.
    pub(crate) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Relaxed)
    }

    /// Returns the session's row on media.
    pub(crate) fn row(
        &self,
        state: SessionState,
        digested: LogSeq,
        last_forwarded: LastForwarded,
    ) -> SessionRow {
        SessionRow {
            id: self.id,
            uid: self.peer.uid,
            pid: self.process.pid,
            pid_start: self.process.start,
            token: self.token,
            state,
            digested,
            last_forwarded,
            log_bytes: self.log.as_ref().map_or(0, |log| log.len_bytes()),
            created_ns: self.created_ns,
            flags: match self.kind {
                ClientKind::Shim => SESSION_MOUNT,
                ClientKind::Linked => 0,
            } | match self.log_synced.load(Ordering::SeqCst) {
                true => SESSION_SYNCED,
                false => 0,
            },
        }
    }

    /// Notes that the log is durable, by `note` in the row, unless that is done.
    ///
    /// # Errors
    /// Those of `note`, after which it is tried again.
    pub(crate) fn note_synced(&self, note: impl FnOnce() -> Result<(), IpcError>) -> Result<(), IpcError> {
        let mut noted = self.synced_noted.lock();
        if !*noted {
            // Before: rows that others write from now on say it too.
            self.log_synced.store(true, Ordering::SeqCst);
            note()?;
            *noted = true;
        }
        Ok(())
    }

    /// Takes over what the row of a session of an earlier daemon says.
    pub(crate) fn set_log_synced(&self, synced: bool) {
        self.log_synced.store(synced, Ordering::SeqCst);
    }

    /// Lets an unprivileged session name `key`.
    pub(crate) fn learn(&self, key: InodeKey) {
        if !self.privileged {
            let mut known = self.known.lock();
            if known.len() < KNOWN_MAX {
                known.entry(key).or_insert(0);
            }
        }
    }

    /// Removes inodes that are gone: the session cannot name them any more.
    pub(crate) fn unlearn(&self, keys: &[InodeKey]) {
        if !self.privileged {
            unlearn(&self.known, keys);
        }
    }

    /// Returns the number of inodes that the session may name; 0 for a privileged one, which may name any.
    pub(crate) fn known_count(&self) -> usize {
        self.known.lock().len()
    }

    /// Returns the inodes that the session may name, for the session that continues it.
    pub(crate) fn known(&self) -> Known {
        Arc::clone(&self.known)
    }

    /// Whether the session may name `key`.
    pub(crate) fn knows(&self, key: InodeKey) -> bool {
        self.privileged || self.known.lock().contains_key(&key)
    }

    /// Returns the rights (4 read, 2 write) on an inode that the session holds: its user's present rights,
    /// and those that its user had at some time since the session holds the inode. A file stays open with the
    /// rights of its opening, whatever its mode becomes, and the session is taken to have opened it whenever
    /// it could. An owner has both rights, since it can give them to itself.
    pub(crate) fn rights(&self, attr: &InodeAttr) -> u32 {
        const DATA: u32 = 6;
        if self.privileged || (self.cred.uid == attr.uid && !attr.is_dir()) {
            return DATA;
        }
        let bits = [4, 2].into_iter().filter(|bit| may(attr, &self.cred, *bit));
        let now: u32 = bits.sum();
        match self.known.lock().get_mut(&attr.key) {
            Some(had) => {
                *had |= now;
                *had
            }
            None => now,
        }
    }

    /// Returns the rights that the session had at some time since it holds `key`.
    pub(crate) fn had(&self, key: InodeKey) -> u32 {
        self.known.lock().get(&key).copied().unwrap_or(0)
    }

    /// Ends the hold on `key`: from now on its mode alone decides the session's rights.
    pub(crate) fn forget_rights(&self, key: InodeKey) {
        if let Some(had) = self.known.lock().get_mut(&key) {
            *had = 0;
        }
    }

    /// Whether the session's user has the permission bits `mask` (4 read, 2 write, 1 search) on a file.
    pub(crate) fn may(&self, attr: &InodeAttr, mask: u32) -> bool {
        self.privileged || may(attr, &self.cred, mask)
    }

    /// Gives up to `blocks` of the reservation up; returns the number given up.
    pub(crate) fn spend(&self, blocks: u64) -> u64 {
        let mut spent = 0;
        let _ = self
            .reserved
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |have| {
                spent = have.min(blocks);
                Some(have - spent)
            });
        spent
    }
}

/// POSIX permission check: owner, group or others; the superuser passes all but execution.
pub(crate) fn may(attr: &InodeAttr, cred: &Cred, mask: u32) -> bool {
    if cred.uid == 0 {
        return mask & 1 == 0 || attr.is_dir() || attr.mode & 0o111 != 0;
    }
    let shift = if cred.uid == attr.uid {
        6
    } else if cred.in_group(attr.gid) {
        3
    } else {
        0
    };
    attr.mode >> shift & mask == mask
}

#[cfg(test)]
mod tests {
    use super::may;
    use varve_format::{InodeAttr, InodeKey};
    use varve_ipc::Cred;

    fn file(mode: u32) -> InodeAttr {
        InodeAttr {
            uid: 10,
            gid: 20,
            ..InodeAttr::new(InodeKey::new(5, 1), 0o100_000 | mode, 0)
        }
    }

    #[test]
    fn permission_is_that_of_the_first_class_that_fits() {
        let cred = |uid, gid, groups: &[u32]| Cred {
            uid,
            gid,
            groups: groups.to_vec(),
        };
        assert!(may(&file(0o600), &cred(10, 1, &[]), 6));
        assert!(
            !may(&file(0o066), &cred(10, 20, &[]), 4),
            "the owner's class decides for the owner"
        );
        assert!(may(&file(0o040), &cred(11, 1, &[20]), 4));
        assert!(!may(&file(0o047), &cred(11, 20, &[]), 2));
        assert!(may(&file(0o004), &cred(11, 1, &[]), 4));
        assert!(may(&file(0), &Cred::root(), 6) && !may(&file(0), &Cred::root(), 1));
    }
}

#[cfg(test)]
mod guarded {
    #![allow(clippy::unwrap_used)]
    use super::GuardedLog;
    use std::sync::Arc;
    use varve_media::{Backing, MappedOptions, MappedRegion, Region};

    #[test]
    fn guarded_log_reads_zeros_when_its_client_has_shortened_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let options = MappedOptions {
            backing: Backing::Shm,
            len_bytes: 1 << 20,
            max_bytes: 1 << 20,
            sparse: false,
        };
        let log = GuardedLog(Arc::new(MappedRegion::create(&path, options).unwrap()));
        log.write(8000, b"entry").unwrap();
        let mut bytes = [1; 5];
        log.read(8000, &mut bytes).unwrap();
        assert_eq!(&bytes, b"entry");
        std::fs::File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(8002)
            .unwrap();
        log.read(8000, &mut bytes).unwrap();
        assert_eq!(&bytes, b"en\0\0\0");
        log.read(500_000, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 5]);
        assert!(log.read(1 << 20, &mut bytes).is_err());
    }
}
