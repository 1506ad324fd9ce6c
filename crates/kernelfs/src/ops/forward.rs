//! Forwarded operations. Owns the leases that they take and the order of numbers; the digest executes them.

mod dedupe;

use crate::counters::Counters;
use crate::digest::{self, Applied, Client, Environment, ForwardError, SharedCount};
use crate::error::no;
use crate::kernel::{Core, KernelFs};
use crate::ops::acquire::Leasing;
use crate::ops::digest::{Digests, LeaseView};
use crate::ops::holds::HeldInodes;
use crate::ops::read::exists;
use crate::ops::reserve::{Promised, Reservations};
use crate::ops::rows::write_rows;
use crate::ops::sharing::Sharing;
use crate::session::state::Session;
use crate::session::table::HOLDS_MAX;
use parking_lot::MutexGuard;
use std::sync::Arc;
use std::time::Duration;
use varve_format::log::{BODY_MAX, HEADER_SIZE, PAYLOAD_MAX};
use varve_format::{BLOCK_BYTES, EntryHeader, InodeKey, LogOp, SessionId, charge, charge_write};
use varve_ipc::{
    ClientKind, ForwardedOp, ForwardedResult, IpcError, LeaseMode, PageState, SessionPage, Want,
};
use varve_store::StoreError;
use zerocopy::FromBytes;

/// Most supplementary groups of a caller (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65_536;
/// Rounds of looking up a name that other sessions rename meanwhile.
const LOOKS_MAX: usize = 16;
/// Most blocks that an `fallocate` takes beside those of its holes: two that it zeroes in part, and three of
/// the file's map.
const FALLOCATE_BESIDE: u64 = 5;

/// Most blocks that a share takes beside those for many extents: three trees grow.
const SHARE_BESIDE: u64 = 12;
/// Extents of a share that a block of the three trees holds at least, halves of full nodes counted.
const SHARED_EXTENTS_A_BLOCK: u64 = 20;

/// Inodes that an operation touches, each once.
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
        | LogOp::Unshare { key, .. }
        | LogOp::Defrag { key, .. }
        | LogOp::SetAttr { key, .. }
        | LogOp::SetXattr { key, .. }
        | LogOp::RemoveXattr { key, .. }
        | LogOp::Forget { key } => vec![key],
        LogOp::Share { key, source, .. } => vec![key, source],
        // Only the session knows the new inode.
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
            let mut keys = vec![dir, new_dir];
            keys.extend(Some(key).filter(|key| key.ino.0 != 0));
            keys.extend(victim);
            keys
        }
    };
    keys.sort_unstable();
    keys.dedup();
    Touched { keys, moves }
}

/// Whether the space that an operation takes depends on the extents of its files, also on those that are in
/// logs.
const fn looks_at_extents(op: &LogOp<'_>) -> bool {
    matches!(
        op,
        LogOp::Fallocate { .. } | LogOp::Share { .. } | LogOp::Unshare { .. } | LogOp::Defrag { .. }
    )
}

/// Returns the most blocks that an operation can take.
fn cost(op: &LogOp<'_>, asked: &ForwardedOp) -> u64 {
    let blocks = match op {
        // The offset is not known yet.
        LogOp::Write { data, .. } if asked.append => charge_write(BLOCK_BYTES - 1, data.len() as u64),
        // Making a whiteout costs as much as moving a name.
        _ if asked.whiteout => 2 * charge(op),
        // It is done at once, out of the reserve.
        LogOp::Truncate { .. } => 0,
        _ => charge(op),
    };
    blocks.into()
}

/// The operation under way.
#[derive(Clone, Copy)]
struct Work<'w> {
    op: &'w ForwardedOp,
    parsed: &'w LogOp<'w>,
    space: &'w Promised<'w>,
}

/// A rename of the inode that has the name, which the client does not know.
struct ByName<'o> {
    dir: InodeKey,
    name: &'o [u8],
    new_dir: InodeKey,
    new_name: &'o [u8],
    replaces: bool,
}

impl<'o> ByName<'o> {
    const fn of(op: &LogOp<'o>) -> Option<Self> {
        match *op {
            LogOp::Rename {
                dir,
                name,
                key,
                new_dir,
                new_name,
                victim,
                exchange,
            } if key.ino.0 == 0 => Some(Self {
                dir,
                name,
                new_dir,
                new_name,
                replaces: victim.is_some() || exchange,
            }),
            _ => None,
        }
    }
}

fn client(session: &Session) -> Client {
    Client {
        session: session.id,
        uid: session.peer.uid,
        privileged: session.privileged,
        checked: session.privileged && session.kind == ClientKind::Shim,
    }
}

/// Context of forwarded operations.
pub(crate) struct Forwarding<'k> {
    core: Core<'k>,
    counters: &'k Counters,
    digests: Digests<'k>,
    held: HeldInodes<'k>,
    sharing: Sharing<'k>,
    leasing: Leasing<'k>,
    reservations: Reservations<'k>,
}

impl<'k> Forwarding<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            counters: &kernel.counters,
            digests: Digests::of(kernel),
            held: HeldInodes::of(kernel),
            sharing: Sharing::of(kernel),
            leasing: Leasing::of(kernel),
            reservations: Reservations::of(kernel),
        }
    }

    /// `Request::Forward`.
    pub(crate) fn forward(
        &self,
        session: &Arc<Session>,
        op: &ForwardedOp,
    ) -> Result<ForwardedResult, IpcError> {
        if session.read_only {
            return Err(no(libc::EROFS));
        }
        self.core.check_writable()?;
        let malformed = op.entry.len() > HEADER_SIZE + PAYLOAD_MAX.max(BODY_MAX)
            || op.cred.groups.len() > GROUPS_MAX
            || op.number == 0;
        if malformed {
            return Err(no(libc::EINVAL));
        }
        // An unprivileged session acts for its own user only, whatever credentials it sends.
        let mut own;
        let op = if session.privileged {
            op
        } else {
            own = op.clone();
            own.cred = session.cred.clone();
            &own
        };
        self.leasing.records.make(session)?;
        self.take_turn(session, op.number)?;
        let result = self.forward_in_turn(session, op);
        let mut last = session.turn.last.lock();
        *last = (*last).max(op.number);
        session.turn.next.notify_all();
        drop(last);
        result
    }

    /// Waits until all lower numbers of the session were carried out. Fails with EALREADY if `number` was
    /// carried out already.
    fn take_turn(&self, session: &Arc<Session>, number: u64) -> Result<(), IpcError> {
        let until_ms = self.core.now_ms() + self.core.env.config.wait_ms;
        let mut last = session.turn.last.lock();
        if number <= *last {
            return Err(no(libc::EALREADY));
        }
        while number > last.saturating_add(1) {
            if self.core.now_ms() >= until_ms {
                return Err(no(libc::ETIMEDOUT));
            }
            self.core
                .nap(&session.turn.next, &mut last, Duration::from_millis(20));
            if session.upcalls.is_closed() {
                return Err(IpcError::Sealed);
            }
        }
        Ok(())
    }

    fn forward_in_turn(&self, session: &Arc<Session>, op: &ForwardedOp) -> Result<ForwardedResult, IpcError> {
        let einval = || no(libc::EINVAL);
        let header = op.entry.get(..HEADER_SIZE).ok_or_else(einval)?;
        let header = EntryHeader::read_from_bytes(header).map_err(|_| einval())?;
        let parsed = LogOp::parse(&header, &op.entry[HEADER_SIZE..]).map_err(|_| einval())?;
        if op.open && !matches!(parsed, LogOp::Create { .. })
            || op.whiteout && !matches!(parsed, LogOp::Rename { exchange: false, .. })
        {
            return Err(einval());
        }
        let touched = touched(&parsed);
        for key in &touched.keys {
            if !session.knows(*key) || !self.known_inode(session, *key)? {
                return Err(no(libc::ESTALE));
            }
        }
        let by_name = ByName::of(&parsed);
        if let Some(by_name) = &by_name {
            self.may_go_by_name(by_name)?;
            // In this order: a name that was missing when no client was changing the directory, or that went
            // later, was missing at some moment of this call.
            if self.is_as_digested(by_name) && self.find_by_name(session, by_name, op)?.is_none() {
                return Err(no(libc::ENOENT));
            }
        }
        if looks_at_extents(&parsed) {
            // Blocks that the session has allocated itself need no space again, and what it has written is
            // shared.
            self.digests
                .digest_session(session, None)
                .map_err(|error| self.core.refused(&error))?;
        }
        // Takes unreserved space, as a session does before it logs.
        let space = self
            .reservations
            .space_for(session, &|| self.needs(&parsed, op))?;
        let work = Work {
            op,
            parsed: &parsed,
            space: &space,
        };
        let wait = Duration::from_millis(self.core.env.config.wait_ms);
        // Two moves with disjoint leases could otherwise make a cycle.
        let _moving = match touched.moves {
            true => Some(self.one_move(wait).ok_or_else(|| no(libc::ETIMEDOUT))?),
            false => None,
        };
        {
            let sessions = self.core.locked();
            if sessions.live(session.id).is_none() {
                return Err(IpcError::Sealed);
            }
            if op.open && sessions.holds.count(session.id) >= HOLDS_MAX {
                return Err(no(libc::EMFILE));
            }
        }
        let result = match &by_name {
            None => self.under_leases(session, work, &touched.keys, None)?,
            Some(by_name) => self.forward_by_name(session, work, by_name)?,
        };
        if let Some(attr) = &result.attr {
            session.learn(attr.key);
        }
        Ok(result)
    }

    /// Returns the most blocks that an operation can take; for an `fallocate` the blocks of its holes, as
    /// digested.
    fn needs(&self, parsed: &LogOp<'_>, op: &ForwardedOp) -> Result<u64, IpcError> {
        if let LogOp::Share { source, .. } = parsed {
            return match self.core.store.extents_of(source.ino) {
                Ok(extents) => Ok(SHARE_BESIDE + extents / SHARED_EXTENTS_A_BLOCK),
                Err(StoreError::NoInode(_) | StoreError::WrongKind { .. }) => Ok(0),
                Err(error) => Err(self.core.refused(&error)),
            };
        }
        if let Some((count, beside)) = self.counted(parsed)? {
            return Ok(match parsed {
                LogOp::Unshare { .. } => count.shared + beside,
                // What lies together does not move.
                _ if count.places < 2 => 0,
                _ => count.alone + beside,
            });
        }
        match digest::blocks_missing(self.core.store, parsed) {
            Ok(Some(holes)) => Ok(holes + FALLOCATE_BESIDE),
            Ok(None) => Ok(cost(parsed, op)),
            Err(error) => Err(self.core.refused(&error)),
        }
    }

    /// Returns the blocks of the range of an undo of shares, or of a defragmentation, and the most blocks of
    /// trees that it takes.
    fn counted(&self, parsed: &LogOp<'_>) -> Result<Option<(SharedCount, u64)>, IpcError> {
        let (LogOp::Unshare { key, offset, len } | LogOp::Defrag { key, offset, len }) = *parsed else {
            return Ok(None);
        };
        match digest::count_shared(self.core.store, key, (offset, len)) {
            Ok(count) => Ok(Some((count, SHARE_BESIDE + count.parts / SHARED_EXTENTS_A_BLOCK))),
            Err(StoreError::NoInode(_) | StoreError::WrongKind { .. }) => {
                Ok(Some((SharedCount::default(), 0)))
            }
            Err(error) => Err(self.core.refused(&error)),
        }
    }

    /// Takes the lock on moves of directories, within `wait`. It is held during waits for leases.
    fn one_move(&self, wait: Duration) -> Option<MutexGuard<'_, ()>> {
        if !self.core.env.clock.takes_turns() {
            return self.core.sessions.rename.try_lock_for(wait);
        }
        let began = self.core.env.clock.moment();
        loop {
            match self.core.sessions.rename.try_lock() {
                None if self.core.env.clock.moment() - began < wait => {
                    self.core.env.clock.pause(Duration::from_millis(1))
                }
                guard => return guard,
            }
        }
    }

    /// Takes exclusive leases on `keys`, all at once, for a session of the daemon's own. They end with it.
    fn exclusive(&self, keys: &[InodeKey]) -> Result<SessionId, IpcError> {
        let owner = self.core.locked().table.internal_session();
        let wants: Vec<_> = keys
            .iter()
            .map(|key| Want {
                key: *key,
                mode: LeaseMode::Write,
            })
            .collect();
        if !wants.is_empty() {
            let until_ms = self.core.now_ms() + self.core.env.config.wait_ms;
            self.leasing.obtain(owner, &wants, until_ms)?;
        }
        Ok(owner)
    }

    /// Does the operation under exclusive leases on `keys`.
    fn under_leases(
        &self,
        session: &Arc<Session>,
        work: Work<'_>,
        keys: &[InodeKey],
        named: Option<InodeKey>,
    ) -> Result<ForwardedResult, IpcError> {
        let owner = self.exclusive(keys)?;
        let mut result = self
            .sharing
            .await_cached_replies(session, keys.iter().copied())
            .and_then(|()| self.apply(session, work, named));
        let now_ms = self.core.now_ms();
        let mut sessions = self.core.locked();
        sessions.table.drop_session(owner);
        for key in keys {
            sessions.table.note_forwarded(*key, session.id, now_ms);
        }
        if let Ok(result) = &mut result {
            let contended = |key: &&InodeKey| sessions.table.is_contended(**key, now_ms);
            result.contended = keys.iter().filter(contended).copied().collect();
        }
        sessions.pump(now_ms);
        drop(sessions);
        self.held.free_or_leave();
        Counters::bump(&self.counters.forwarded);
        result
    }

    /// Renames the inode that has the name. All leases are requested at once, so the name is looked up before
    /// the request and again under the leases.
    fn forward_by_name(
        &self,
        session: &Arc<Session>,
        work: Work<'_>,
        by_name: &ByName<'_>,
    ) -> Result<ForwardedResult, IpcError> {
        let op = work.op;
        for _ in 0..LOOKS_MAX {
            let named = self.find_by_name(session, by_name, op)?;
            let mut keys = vec![by_name.dir, by_name.new_dir];
            keys.extend(named);
            keys.sort_unstable();
            keys.dedup();
            let Some(named) = named else {
                // The name may be in a log that is not digested; under the leases every log on these
                // directories is.
                self.under_leases_find(session, by_name, op, &keys)?;
                continue;
            };
            match self.under_leases(session, work, &keys, Some(named)) {
                // The name is gone by now, or names another inode.
                Err(IpcError::Errno(libc::ESTALE | libc::ENOENT)) => {}
                // The target exists: only the caller knows whether to replace it.
                Err(IpcError::Errno(libc::EEXIST)) => return Err(no(libc::EAGAIN)),
                other => return other,
            }
        }
        Err(no(libc::EAGAIN))
    }

    /// Fails with ENOENT if the name is missing when all logs on its directory are digested.
    fn under_leases_find(
        &self,
        session: &Session,
        by_name: &ByName<'_>,
        op: &ForwardedOp,
        keys: &[InodeKey],
    ) -> Result<(), IpcError> {
        let owner = self.exclusive(keys)?;
        let found = self.find_by_name(session, by_name, op);
        let mut sessions = self.core.locked();
        sessions.table.drop_session(owner);
        sessions.pump(self.core.now_ms());
        drop(sessions);
        match found? {
            Some(_) => Ok(()),
            None => Err(no(libc::ENOENT)),
        }
    }

    /// Allows renames by name only in contended directories: elsewhere clients know the names under leases,
    /// and need no such rename.
    fn may_go_by_name(&self, by_name: &ByName<'_>) -> Result<(), IpcError> {
        let sessions = self.core.locked();
        let now_ms = self.core.now_ms();
        let contended = |dir| sessions.table.is_contended(dir, now_ms);
        if contended(by_name.dir) && contended(by_name.new_dir) && !by_name.replaces {
            Ok(())
        } else {
            Err(no(libc::EAGAIN))
        }
    }

    /// Whether no client may be changing the directories at this moment: then their digested state is
    /// complete.
    fn is_as_digested(&self, by_name: &ByName<'_>) -> bool {
        let sessions = self.core.locked();
        !sessions.table.is_written(by_name.dir) && !sessions.table.is_written(by_name.new_dir)
    }

    /// Looks the name up, as digested; with the rights of the caller in both directories.
    fn find_by_name(
        &self,
        session: &Session,
        by_name: &ByName<'_>,
        op: &ForwardedOp,
    ) -> Result<Option<InodeKey>, IpcError> {
        let found = digest::find_named(
            self.core.store,
            client(session),
            by_name.dir,
            by_name.name,
            &op.cred,
        )
        .and_then(|found| {
            if by_name.new_dir != by_name.dir {
                digest::find_named(
                    self.core.store,
                    client(session),
                    by_name.new_dir,
                    by_name.new_name,
                    &op.cred,
                )?;
            }
            Ok(found)
        });
        found.map_err(|error| match error {
            ForwardError::Errno(errno) => no(errno),
            ForwardError::Store(error) => self.core.refused(&error),
        })
    }

    /// Whether the inode exists, perhaps only in the session's own log.
    fn known_inode(&self, session: &Arc<Session>, key: InodeKey) -> Result<bool, IpcError> {
        if exists(self.core.store, key).map_err(|error| self.core.refused(&error))? {
            return Ok(true);
        }
        Ok(self.core.locked().table.mode(session.id, key).is_some())
    }

    fn apply(
        &self,
        session: &Arc<Session>,
        Work { op, parsed, space }: Work<'_>,
        named: Option<InodeKey>,
    ) -> Result<ForwardedResult, IpcError> {
        // The session's own log comes first: the operation may name inodes from it.
        self.digests
            .digest_session(session, None)
            .map_err(|error| self.core.refused(&error))?;
        // A sealed log is not digested here: the operation would overtake the session's logged ones.
        if SessionPage::state(&*session.page) == PageState::Sealed {
            return Err(IpcError::Sealed);
        }
        // Pieces are joined where that takes no space which others need.
        let rejoin = match (parsed, self.counted(parsed)?) {
            (LogOp::Unshare { .. }, Some((count, beside))) if count.parts > 1 => {
                space.fit(count.blocks + beside)
            }
            _ => false,
        };
        // Under the lease the allocated blocks and the extents are known.
        if !rejoin && looks_at_extents(parsed) && !space.fit(self.needs(parsed, op)?) {
            return Err(no(libc::ENOSPC));
        }
        if matches!(parsed, LogOp::Share { .. }) {
            self.core.store.share_extents().map_err(|error| match error {
                StoreError::Invalid(_) => no(libc::EOPNOTSUPP),
                error => self.core.refused(&error),
            })?;
        }
        let client = client(session);
        let view = LeaseView::of(self.core);
        let env = Environment {
            rejoin,
            ..self.digests.environment(&view)
        };
        let change = self.core.begin_change();
        let done = digest::apply_forwarded(self.core.store, client, op, named, &env, &|blocks| {
            space.spent(blocks)
        });
        let (applied, result) = match done {
            Ok(done) => done,
            Err(error) => {
                if let LogOp::Share { key, .. } | LogOp::Unshare { key, .. } | LogOp::Defrag { key, .. } =
                    parsed
                {
                    // Records before the one that failed may have replaced blocks.
                    self.digests.take_over(&Applied {
                        tx: self.core.store.newest_tx(),
                        remapped: vec![*key],
                        ..Applied::default()
                    });
                }
                drop(change);
                return Err(match error {
                    ForwardError::Errno(errno) => no(errno),
                    ForwardError::Store(error) => self.core.refused(&error),
                });
            }
        };
        // Must come before any other session can find and remove the inode, and before an inode without a
        // name counts as unheld.
        if op.open
            && let Some(attr) = &result.attr
        {
            let mut sessions = self.core.locked();
            if sessions.live(session.id).is_some() {
                sessions.holds.add(session.id, attr.key);
            }
        }
        let rows = self.digests.take_over(&applied);
        drop(change);
        write_rows(self.core, &rows).map_err(|error| self.core.refused(&error))?;
        Ok(result)
    }
}
