//! Operations that the daemon does for the session, because an inode is contended or a move needs a view of
//! the whole tree.

use std::sync::atomic::Ordering;
use varve_format::{EntryFlags, EntryMeta, InodeKey, LastForwarded, LogOp};
use varve_ipc::{Cred, DedupeOp, Deduped, ForwardedOp, ForwardedResult, IpcError, Request, Response};
use zerocopy::IntoBytes;

use super::{Session, Try};
use crate::errno::{Errno, OpError, OpResult};
use crate::sync::lock_held_long;

/// Outcome of a forwarded operation.
pub(crate) enum Forwarded {
    /// The daemon answered.
    Done(ForwardedResult),
    /// The daemon carried it out in a session that was lost afterwards. Holds the known part of its answer.
    DoneBefore(LastForwarded),
}

/// Options of a forwarded operation beside the operation itself.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Asks {
    /// A write goes to the end of the file.
    pub append: bool,
    /// A new inode is open at once.
    pub open: bool,
    /// A rename leaves a whiteout behind.
    pub whiteout: bool,
}

impl Asks {
    /// Nothing.
    pub(crate) const NOTHING: Self = Self {
        append: false,
        open: false,
        whiteout: false,
    };
}

impl Session {
    /// Has the daemon compare and share ranges of the files `keys`; what became of each. This session's own
    /// leases on them are given back first; the caller holds no pins and no locks.
    pub(crate) fn dedupe<T>(&self, keys: &[InodeKey], op: DedupeOp) -> OpResult<Vec<Deduped>, T> {
        self.may_write()?;
        self.leases.give_back(keys)?;
        let asked = op.ranges.len();
        match self.call(Request::Dedupe(op))? {
            Response::Deduped(told) if told.len() == asked => Ok(told),
            _ => Err(OpError::Failed(Errno(libc::EIO))),
        }
    }

    /// Has the daemon do `op`, once in all attempts: a call has one forwarded operation. This session's own
    /// leases on `keys` are given back first, so nothing here goes stale; the caller holds no pins and no
    /// locks.
    pub(crate) fn forward<T>(
        &self,
        attempt: &mut Try,
        keys: &[InodeKey],
        op: &LogOp<'_>,
        flags: EntryFlags,
        asks: Asks,
        cred: &Cred,
    ) -> OpResult<Forwarded, T> {
        if let Some(done) = attempt.done() {
            return Ok(Forwarded::DoneBefore(done));
        }
        self.may_write()?;
        self.data.be_recorded()?;
        self.leases.give_back(keys)?;
        let mut body = Vec::new();
        op.encode_body(&mut body);
        let stamp = self.stamp();
        let meta = EntryMeta {
            time_ns: stamp.time_ns,
            base: stamp.base,
            flags,
            ..EntryMeta::default()
        };
        let mut entry = op.header(&meta, body.len()).as_bytes().to_vec();
        entry.extend_from_slice(&body);
        entry.extend_from_slice(op.data());
        let mut last = lock_held_long(self.clock(), &self.forwarding);
        let number = *last + 1;
        *last = number;
        let request = ForwardedOp {
            entry,
            append: asks.append,
            open: asks.open,
            whiteout: asks.whiteout,
            cred: cred.clone(),
            number,
        };
        match self.link.call(Request::Forward(request)) {
            Ok(Response::Forwarded(result)) => {
                let made = match op {
                    LogOp::Create { .. } => result.attr.as_ref().map(|attr| attr.key),
                    _ => None,
                };
                attempt.note_done(LastForwarded {
                    number,
                    made,
                    open: asks.open,
                    offset: result.offset,
                });
                self.answered.store(number, Ordering::Release);
                self.leases.contended().learn(keys, &result.contended);
                self.forwarded.fetch_add(1, Ordering::SeqCst);
                Ok(Forwarded::Done(result))
            }
            Ok(_) => Err(OpError::Failed(Errno(libc::EIO))),
            Err(error @ (IpcError::Sealed | IpcError::Gone(_))) => {
                attempt.asked = Some((self.id(), number));
                Err(OpError::from(error))
            }
            Err(error) => Err(OpError::from(error)),
        }
    }
}
