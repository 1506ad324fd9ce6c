//! Returns of leases by clients: the holder's log is digested up to its last entry about the inode, and the
//! grant's row ends, before another session is granted a lease.

use crate::error::no;
use crate::kernel::{Core, KernelFs};
use crate::leases::grants::RowChange;
use crate::ops::digest::Digests;
use crate::ops::holds::HeldInodes;
use crate::ops::rows::write_rows;
use crate::session::state::Session;
use crate::session::table::SessionTable;
use std::sync::Arc;
use std::time::Duration;
use varve_format::LogSeq;
use varve_format::seeded::{Bug, armed};
use varve_ipc::{ClientKind, IpcError, LeaseMode, RELEASED_MAX, ReleaseItem};

/// Context of releases.
pub(crate) struct Releases<'k> {
    core: Core<'k>,
    digests: Digests<'k>,
    held: HeldInodes<'k>,
}

impl<'k> Releases<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) const fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            digests: Digests::of(kernel),
            held: HeldInodes::of(kernel),
        }
    }

    /// `Request::Release`.
    pub(crate) fn release(&self, session: &Arc<Session>, items: &[ReleaseItem]) -> Result<(), IpcError> {
        if items.len() > RELEASED_MAX {
            return Err(no(libc::E2BIG));
        }
        let (begun, upto) = {
            let (began_ms, now) = (self.core.now_ms(), self.core.env.clock.moment());
            let mut sessions = self.core.locked();
            sessions.table.begin_work(session.id, began_ms);
            let mut begun = Vec::new();
            let mut upto = LogSeq(0);
            for item in items {
                if let Some(mode) = sessions.table.begin_release(session.id, item.key, item.lease) {
                    if mode == LeaseMode::Write && !armed(Bug::LeaseBeforeDigest) {
                        let short = u64::from(armed(Bug::HandOverShort));
                        upto = upto.max(LogSeq(item.last_seq.0.saturating_sub(short)));
                    }
                    if mode == LeaseMode::Write {
                        let count = sessions.changes_under(session.id, item);
                        sessions.table.note_changes(item.key, session.id, count);
                    }
                    begun.push((*item, mode));
                } else if sessions.table.mode(session.id, item.key).is_some() {
                    // A newer grant took the place of the lease, under which replies may be cached yet.
                    note_cached(&mut sessions, session, item, now);
                }
            }
            (begun, upto)
        };
        if armed(Bug::RowGoneBeforeDigest) {
            self.rows_first(session, &begun)?;
        }
        let done = self
            .digest_until(session, upto)
            .and_then(|()| self.end_rows(session, &begun));
        let (now_ms, now) = (self.core.now_ms(), self.core.env.clock.moment());
        let mut sessions = self.core.locked();
        sessions.table.end_work(session.id, now_ms);
        for (item, _) in &begun {
            if done.is_err() {
                sessions
                    .table
                    .abort_release(session.id, item.key, item.lease, now_ms);
                continue;
            }
            note_cached(&mut sessions, session, item, now);
            let stays =
                sessions
                    .table
                    .finish_release(session.id, item.key, item.lease, item.downgrade, now_ms);
            if !stays && !item.open {
                sessions.unhold(session.id, item.key);
            }
        }
        sessions.pump(now_ms);
        drop(sessions);
        self.held.free_or_leave();
        done
    }

    /// Removes the rows of write leases that end, in DRAM too.
    fn end_rows(&self, session: &Arc<Session>, begun: &[(ReleaseItem, LeaseMode)]) -> Result<(), IpcError> {
        let ending = || {
            begun
                .iter()
                .filter(|(_, mode)| *mode == LeaseMode::Write)
                .map(|(item, _)| item.key)
        };
        // Rows of a batch are shared: all their changes happen under one lock and in one order.
        let _one_at_a_time = session.row_changes.lock();
        let changes: Vec<RowChange> = {
            let mut sessions = self.core.locked();
            let mut changes: Vec<RowChange> = Vec::new();
            for key in ending() {
                changes.extend(sessions.rows.give_back_changes(session.id, key));
                sessions.rows.end(session.id, key);
            }
            changes
        };
        write_rows(self.core, &changes).map_err(|error| self.core.refused(&error))
    }

    /// Removes the rows on media only (seeded bug only).
    fn rows_first(&self, session: &Arc<Session>, begun: &[(ReleaseItem, LeaseMode)]) -> Result<(), IpcError> {
        let written = begun.iter().filter(|(_, mode)| *mode == LeaseMode::Write);
        let changes: Vec<_> = {
            let sessions = self.core.locked();
            written
                .filter_map(|(item, _)| sessions.rows.end_change(session.id, item.key))
                .collect()
        };
        write_rows(self.core, &changes).map_err(|error| self.core.refused(&error))
    }

    /// Digests a session's log up to `upto`. Waits, within `lease_ms`, for lower numbers that other threads
    /// have not committed yet.
    fn digest_until(&self, session: &Arc<Session>, upto: LogSeq) -> Result<(), IpcError> {
        let until_ms = self.core.now_ms() + self.core.env.config.lease_ms;
        let mut tries = 0;
        while varve_ipc::SessionPage::digested(&*session.page) < upto {
            let digested = self
                .digests
                .digest_session(session, Some(upto))
                .map_err(|error| self.core.refused(&error))?;
            if digested >= upto {
                break;
            }
            tries += 1;
            if self.core.now_ms() >= until_ms || tries > 4 * self.core.env.config.lease_ms {
                return Err(no(libc::EAGAIN));
            }
            if self.core.locked().live(session.id).is_none() {
                return Err(IpcError::Sealed);
            }
            self.core.env.clock.pause(Duration::from_micros(250));
        }
        Ok(())
    }
}

/// Notes what the kernel above a mount may use of what it was told under the lease.
fn note_cached(sessions: &mut SessionTable, session: &Session, item: &ReleaseItem, now: Duration) {
    if item.cached_ms > 0 && session.kind == ClientKind::Shim {
        sessions
            .cached
            .note_given_back(session.id, item.key, item.cached_ms, now);
    }
}
