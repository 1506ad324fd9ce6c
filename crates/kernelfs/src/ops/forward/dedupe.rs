//! `Request::Dedupe`: many ranges that are compared and shared under one set of leases. The digest does it.

use super::{Forwarding, GROUPS_MAX, SHARE_BESIDE, SHARED_EXTENTS_A_BLOCK, client};
use crate::digest;
use crate::error::no;
use crate::ops::digest::LeaseView;
use crate::ops::reserve::Promised;
use crate::ops::rows::write_rows;
use crate::session::state::Session;
use std::sync::Arc;
use varve_format::InodeKey;
use varve_ipc::{DEDUPE_RANGES_MAX, DedupeOp, Deduped, ITEMS_MAX, IpcError, PageState, SessionPage};
use varve_store::StoreError;

/// The files of all ranges, each once.
fn files_of(op: &DedupeOp) -> Vec<InodeKey> {
    let both = op.ranges.iter().flat_map(|range| [range.source, range.target]);
    let mut keys: Vec<_> = both.collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

impl Forwarding<'_> {
    /// `Request::Dedupe`.
    pub(crate) fn dedupe(&self, session: &Arc<Session>, op: DedupeOp) -> Result<Vec<Deduped>, IpcError> {
        if session.read_only {
            return Err(no(libc::EROFS));
        }
        self.core.check_writable()?;
        let files = files_of(&op);
        let malformed = op.ranges.len() > DEDUPE_RANGES_MAX
            || files.len() > ITEMS_MAX
            || op.cred.groups.len() > GROUPS_MAX;
        if malformed {
            return Err(no(libc::EINVAL));
        }
        let mut op = op;
        // An unprivileged session acts for its own user only, whatever credentials it sends.
        if !session.privileged {
            op.cred = session.cred.clone();
        }
        for key in &files {
            if !session.knows(*key) || !self.known_inode(session, *key)? {
                return Err(no(libc::ESTALE));
            }
        }
        // What the session has written is compared, and takes no space a second time.
        self.digests
            .digest_session(session, None)
            .map_err(|error| self.core.refused(&error))?;
        let space = self
            .reservations
            .space_for(session, &|| self.dedupe_needs(&op, files.len()))?;
        if self.core.locked().live(session.id).is_none() {
            return Err(IpcError::Sealed);
        }
        let owner = self.exclusive(&files)?;
        let told = self
            .sharing
            .await_cached_replies(session, files.iter().copied())
            .and_then(|()| self.dedupe_leased(session, &op, files.len(), &space));
        let now_ms = self.core.now_ms();
        let mut sessions = self.core.locked();
        sessions.table.drop_session(owner);
        sessions.pump(now_ms);
        drop(sessions);
        self.held.free_or_leave();
        told
    }

    /// The most blocks that sharing can take: three trees grow for each file, and with the pieces.
    fn dedupe_needs(&self, op: &DedupeOp, files: usize) -> Result<u64, IpcError> {
        if op.dry_run {
            return Ok(0);
        }
        match digest::count_pieces(self.core.store, op) {
            Ok(pieces) => Ok(SHARE_BESIDE * files as u64 + pieces / SHARED_EXTENTS_A_BLOCK),
            Err(error) => Err(self.core.refused(&error)),
        }
    }

    /// Compares and shares under the leases.
    fn dedupe_leased(
        &self,
        session: &Arc<Session>,
        op: &DedupeOp,
        files: usize,
        space: &Promised<'_>,
    ) -> Result<Vec<Deduped>, IpcError> {
        self.digests
            .digest_session(session, None)
            .map_err(|error| self.core.refused(&error))?;
        if SessionPage::state(&*session.page) == PageState::Sealed {
            return Err(IpcError::Sealed);
        }
        // Under the leases the extents are known.
        if !space.fit(self.dedupe_needs(op, files)?) {
            return Err(no(libc::ENOSPC));
        }
        if !op.dry_run {
            self.core.store.share_extents().map_err(|error| match error {
                StoreError::Invalid(_) => no(libc::EOPNOTSUPP),
                error => self.core.refused(&error),
            })?;
        }
        let view = LeaseView::of(self.core);
        let env = self.digests.environment(&view);
        let change = self.core.begin_change();
        let done = digest::dedupe(self.core.store, client(session), op, &env);
        let (applied, told) = done.map_err(|error| match error {
            digest::ForwardError::Errno(errno) => no(errno),
            digest::ForwardError::Store(error) => self.core.refused(&error),
        })?;
        let rows = self.digests.take_over(&applied);
        drop(change);
        write_rows(self.core, &rows).map_err(|error| self.core.refused(&error))?;
        Ok(told)
    }
}
