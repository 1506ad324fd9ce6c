//! Operations that the daemon does for a client. Owns the leases that this takes and the order of numbers; what an operation does is the
//! digest's.

use crate::digest::{self, Client, MediateError};
use crate::digesting::LeaseView;
use crate::error::no;
use crate::kernel::KernelFs;
use crate::session::Session;
use crate::status::Counters;
use std::sync::Arc;
use std::time::Duration;
use varve_format::log::{BODY_MAX, HEADER_SIZE, PAYLOAD_MAX};
use varve_format::{EntryHeader, InodeKey, LogOp};
use varve_ipc::{IpcError, LeaseMode, MediatedOp, MediatedResult, Want};
use zerocopy::FromBytes;

/// Most supplementary groups of a caller (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65_536;

/// What an operation touches, each once.
struct Touched {
    keys: Vec<InodeKey>,
    /// A name moves between directories: perhaps with a directory under it.
    moves: bool,
}

fn touched(op: &LogOp<'_>) -> Touched {
    let mut moves = false;
    let mut keys = match *op {
        LogOp::Noop => Vec::new(),
        LogOp::Write { key, .. }
        | LogOp::Truncate { key, .. }
        | LogOp::Fallocate { key, .. }
        | LogOp::SetAttr { key, .. }
        | LogOp::SetXattr { key, .. }
        | LogOp::RemoveXattr { key, .. }
        | LogOp::Forget { key } => vec![key],
        // The new inode is nobody's but the session's.
        LogOp::Create { dir, .. } => vec![dir],
        LogOp::Link { dir, key, .. } | LogOp::Unlink { dir, key, .. } => vec![dir, key],
        LogOp::Rename {
            dir,
            key,
            new_dir,
            victim,
            ..
        } => {
            moves = dir != new_dir;
            let mut keys = vec![dir, new_dir, key];
            keys.extend(victim);
            keys
        }
    };
    keys.sort_unstable();
    keys.dedup();
    Touched { keys, moves }
}

impl KernelFs {
    /// `Request::Mediate`.
    pub(crate) fn mediate(
        &self,
        session: &Arc<Session>,
        op: &MediatedOp,
    ) -> Result<MediatedResult, IpcError> {
        if session.read_only {
            return Err(no(libc::EROFS));
        }
        self.check_writable()?;
        let malformed = op.entry.len() > HEADER_SIZE + PAYLOAD_MAX.max(BODY_MAX)
            || op.cred.groups.len() > GROUPS_MAX
            || op.number == 0;
        if malformed {
            return Err(no(libc::EINVAL));
        }
        // An unprivileged session acts for its own user only, whatever it says.
        let mut own;
        let op = if session.privileged {
            op
        } else {
            own = op.clone();
            own.cred = session.cred.clone();
            &own
        };
        self.take_turn(session, op.number)?;
        let result = self.mediate_in_turn(session, op);
        let mut last = session.turn.last.lock();
        *last = (*last).max(op.number);
        session.turn.next.notify_all();
        drop(last);
        result
    }

    /// Waits until all lower numbers of the session were carried out. One that was carried out already is EALREADY.
    fn take_turn(&self, session: &Arc<Session>, number: u64) -> Result<(), IpcError> {
        let until_ms = self.now_ms() + self.config.wait_ms;
        let mut last = session.turn.last.lock();
        if number <= *last {
            return Err(no(libc::EALREADY));
        }
        while number > last.saturating_add(1) {
            if self.now_ms() >= until_ms {
                return Err(no(libc::ETIMEDOUT));
            }
            let _ = session.turn.next.wait_for(&mut last, Duration::from_millis(20));
            if session.upcalls.is_closed() {
                return Err(IpcError::Sealed);
            }
        }
        Ok(())
    }

    fn mediate_in_turn(&self, session: &Arc<Session>, op: &MediatedOp) -> Result<MediatedResult, IpcError> {
        let einval = || no(libc::EINVAL);
        let header = op.entry.get(..HEADER_SIZE).ok_or_else(einval)?;
        let header = EntryHeader::read_from_bytes(header).map_err(|_| einval())?;
        let parsed = LogOp::parse(&header, &op.entry[HEADER_SIZE..]).map_err(|_| einval())?;
        let touched = touched(&parsed);
        for key in &touched.keys {
            if !session.knows(*key) || !self.known_inode(session, *key)? {
                return Err(no(libc::ESTALE));
            }
        }
        let wait = Duration::from_millis(self.config.wait_ms);
        // Two moves with disjoint leases could otherwise make a cycle.
        let _moving = match touched.moves {
            true => Some(
                self.rename
                    .try_lock_for(wait)
                    .ok_or_else(|| no(libc::ETIMEDOUT))?,
            ),
            false => None,
        };
        if self.locked().live(session.id).is_none() {
            return Err(IpcError::Sealed);
        }
        let owner = self.locked().table.internal_session();
        let wants: Vec<_> = touched
            .keys
            .iter()
            .map(|key| Want {
                key: *key,
                mode: LeaseMode::Write,
            })
            .collect();
        if !wants.is_empty() {
            let until_ms = self.now_ms() + self.config.wait_ms;
            self.obtain(owner, &wants, until_ms)?;
        }
        let result = self.apply(session, op);
        let now_ms = self.now_ms();
        let mut core = self.locked();
        core.table.drop_session(owner);
        for key in &touched.keys {
            core.table.note_mediated(*key, session.id, now_ms);
        }
        core.pump(now_ms);
        drop(core);
        self.free_or_leave();
        Counters::bump(&self.counters.mediated);
        let result = result?;
        if let Some(attr) = &result.attr {
            session.learn(attr.key);
        }
        Ok(result)
    }

    /// Whether there is such an inode, perhaps only in the session's own log yet.
    fn known_inode(&self, session: &Arc<Session>, key: InodeKey) -> Result<bool, IpcError> {
        if self.exists(key).map_err(|error| self.refused(&error))? {
            return Ok(true);
        }
        Ok(self.locked().table.mode(session.id, key).is_some())
    }

    fn apply(&self, session: &Arc<Session>, op: &MediatedOp) -> Result<MediatedResult, IpcError> {
        // The session's own log comes first: what it has logged on other inodes may be named here.
        self.digest_session(session, None)
            .map_err(|error| self.refused(&error))?;
        let client = Client {
            session: session.id,
            uid: session.peer.uid,
            privileged: session.privileged,
        };
        let view = LeaseView(self);
        let env = self.environment(&view);
        let change = self.begin_change();
        let done = digest::apply_mediated(&self.store, client, op, &env);
        let (applied, result) = match done {
            Ok(done) => done,
            Err(MediateError::Errno(errno)) => return Err(no(errno)),
            Err(MediateError::Store(error)) => {
                drop(change);
                return Err(self.refused(&error));
            }
        };
        let rows = self.take_over(&applied);
        drop(change);
        self.write_rows(&rows).map_err(|error| self.refused(&error))?;
        Ok(result)
    }
}
