//! Changes of an open file's data: writes, its length, allocation, and their durability.

use std::sync::Arc;
use varve_format::log::PAYLOAD_MAX;
use varve_format::{EntryFlags, FILE_SIZE_MAX, FallocateMode, FileKind, InodeKey, LogOp, charge};
use varve_ipc::{Cred, LeaseMode};

use super::attr::clears;
use super::open::{OpenFile, Pinned};
use crate::dir::attr_of;
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::inode::Inode;
use crate::kernel_cache::{KernelCall, PageUse};
use crate::lease::Use;
use crate::session::{Asks, Forwarded, Session, Try};

/// Most blocks (64 MiB) that an `fallocate` may cost to be logged: the number that a session requests from
/// the daemon at once.
const FALLOCATE_LOGGED_BLOCKS: u32 = 16_384 + 8;

impl OpenFile {
    /// Ends a change of data: makes it durable if the flags or the mount ask for that.
    pub(super) fn settle<T: Clone>(&self, session: &Session, value: T) -> OpResult<T> {
        let flags = self.flags();
        if flags.sync || flags.dsync || session.options.sync_always {
            // Entries committed before a seal are digested by it: then the change counts, and is durable.
            let lost = OpError::SessionLost {
                committed: None,
                otherwise: Some(value.clone()),
            };
            match session.sync_log::<()>() {
                Ok(()) => {}
                Err(OpError::SessionLost { .. }) => return Err(lost),
                Err(error) => return Err(error.map(|()| value.clone())),
            }
        }
        Ok(value)
    }

    pub(super) fn for_writing(&self) -> Result<()> {
        if self.flags().write {
            Ok(())
        } else {
            Err(Errno(libc::EBADF))
        }
    }

    /// Writes at `offset`, also when opened for appending. Durable against a kill of any process when it
    /// returns; atomic up to 16 MiB or a quarter of the longest log, whichever is less. On a contended file
    /// at most 1 MiB is written.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn write_at(&self, offset: u64, data: &[u8], cred: &Cred) -> Result<usize> {
        Ok(self.write(Some(offset), data, cred, Use::Own)?.1)
    }

    /// Writes at the end, atomically with finding it; returns the offset. As [`write_at`](Self::write_at):
    /// the pieces of a larger call follow the first, over other threads' concurrent appends.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn append(&self, data: &[u8], cred: &Cred) -> Result<(u64, usize)> {
        self.write(None, data, cred, Use::Own)
    }

    /// As [`write_at`](Self::write_at), or without an offset as [`append`](Self::append), for a kernel that
    /// keeps pages of the file. When it returns, the kernel's pages show the written data.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn write_pages(
        &self,
        call: &KernelCall,
        offset: Option<u64>,
        data: &[u8],
        cred: &Cred,
    ) -> Result<usize> {
        let (at, count) = self.write(offset, data, cred, Use::Kernel(call))?;
        let session = self.mount().session();
        if let Some(node) = session.node(self.key()) {
            let now = session.clock().moment();
            let overtaken = match offset {
                Some(_) => node.above.written(call, now),
                None => {
                    // The kernel has dropped pages at the end that it knew of.
                    let usage = PageUse::Direct { dropped: false };
                    node.above.written(
                        &KernelCall::new(usage, 0, at, count).by_clock(session.clock()),
                        now,
                    )
                }
            };
            if session.drop_pages(self.key(), call, overtaken.drops) {
                node.above.forget(&overtaken.reads);
            }
        }
        Ok(count)
    }

    fn write(&self, offset: Option<u64>, data: &[u8], cred: &Cred, usage: Use<'_>) -> Result<(u64, usize)> {
        self.for_writing()?;
        self.with_session(|session, attempt| {
            let done = match self.pin_to_change(session, attempt, usage) {
                Ok(pin) => {
                    let inode = &pin.node().inode;
                    let clear = self.clears(inode, cred);
                    match offset {
                        Some(offset) => {
                            let count = session.data.write(inode, offset, data, clear);
                            (offset, count.map_err(|error| error.map(|count| (offset, count)))?)
                        }
                        None => session.data.append(inode, data, clear)?,
                    }
                }
                Err(OpError::Forward) => {
                    let node = session.leases.node_of(self.key())?;
                    let _held = match usage {
                        Use::Own | Use::Copy => None,
                        Use::Kernel(call) => Some(session.leases.before_forwarded(&node, call, |drops| {
                            session.drop_pages(self.key(), call, drops);
                        })?),
                    };
                    self.forward_write(session, attempt, offset, data, cred)?
                }
                Err(error) => return Err(error),
            };
            self.settle(session, done)
        })
    }

    fn clears(&self, inode: &Inode, cred: &Cred) -> EntryFlags {
        if cred.uid == 0 || !inode.may_have_set_id() {
            EntryFlags::empty()
        } else {
            clears(&inode.read().attr, cred)
        }
    }

    /// Pins for a change; `Forward` also if the daemon has made it already, in a session that was lost:
    /// [`Session::forward`] returns that result.
    fn pin_to_change<'s, T>(
        &'s self,
        session: &'s Arc<Session>,
        attempt: &Try,
        usage: Use<'_>,
    ) -> OpResult<Pinned<'s>, T> {
        if attempt.is_done() {
            return Err(OpError::Forward);
        }
        self.pin(session, LeaseMode::Write, usage)
    }

    /// Has the daemon write, at `offset` or at the end; at most one message's worth.
    fn forward_write<T>(
        &self,
        session: &Session,
        attempt: &mut Try,
        offset: Option<u64>,
        data: &[u8],
        cred: &Cred,
    ) -> OpResult<(u64, usize), T> {
        let key = self.key();
        if data.is_empty() {
            return Ok((attr_of(session, key)?.size_bytes, 0));
        }
        let data = &data[..data.len().min(PAYLOAD_MAX)];
        let op = LogOp::Write {
            key,
            offset: offset.unwrap_or(0),
            data,
        };
        op_end(offset.unwrap_or(0), data.len())?;
        // The daemon decides which set-id bits to clear, and where the end is: no lease is taken for that.
        let asks = Asks {
            append: offset.is_none(),
            ..Asks::NOTHING
        };
        let forwarded = session.forward(attempt, &[key], &op, EntryFlags::empty(), asks, cred)?;
        let at = match (offset, forwarded) {
            (Some(offset), _) => offset,
            (None, Forwarded::Done(result)) => result.offset,
            (None, Forwarded::DoneBefore(done)) => done.offset,
        };
        Ok((at, data.len()))
    }

    /// Sets the length.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn truncate(&self, size: u64, cred: &Cred) -> Result<()> {
        if !self.flags().write {
            return Err(Errno(libc::EINVAL));
        }
        self.resize(size, cred)
    }

    pub(super) fn resize(&self, size: u64, cred: &Cred) -> Result<()> {
        let key = self.key();
        self.change(&LogOp::Truncate { key, size }, cred, |session, inode| {
            if inode.read().attr.kind() != FileKind::Regular {
                return Err(Errno(libc::EINVAL).into());
            }
            session.data.truncate(inode, size, self.clears(inode, cred))
        })
    }

    /// Changes the data by `local`, under the lease, or has the daemon carry out `op`: if the file is
    /// contended, if the session's reservation has no space, or if `local` returns `Forward`.
    fn change(
        &self,
        op: &LogOp<'_>,
        cred: &Cred,
        local: impl Fn(&Session, &Arc<Inode>) -> OpResult<()>,
    ) -> Result<()> {
        self.mount().with_session(|session, attempt| {
            let changed = match self.pin_to_change(session, attempt, Use::Own) {
                Ok(pin) => local(session, &pin.node().inode),
                Err(OpError::Forward) => Err(OpError::Forward),
                Err(error) => return Err(error),
            };
            match changed {
                Ok(()) => self.settle(session, ()),
                Err(OpError::Forward | OpError::Failed(Errno(libc::ENOSPC))) => {
                    self.forward(session, attempt, &[self.key()], op, cred)
                }
                Err(error) => Err(error),
            }
        })
    }

    /// Has the daemon carry out `op`, which concerns the files `keys`, and settles it as a change made here.
    pub(super) fn forward(
        &self,
        session: &Session,
        attempt: &mut Try,
        keys: &[InodeKey],
        op: &LogOp<'_>,
        cred: &Cred,
    ) -> OpResult<()> {
        session.forward(attempt, keys, op, EntryFlags::empty(), Asks::NOTHING, cred)?;
        self.settle(session, ())
    }

    /// Allocates, punches or zeroes, all or nothing. The daemon does large ranges, and those that find no
    /// space in the session's reservation: it knows the blocks that the file has already, and charges only
    /// the missing ones.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn fallocate(&self, mode: FallocateMode, offset: u64, len: u64, cred: &Cred) -> Result<()> {
        self.for_writing()?;
        if len == 0 {
            return Err(Errno(libc::EINVAL));
        }
        if offset.checked_add(len).is_none_or(|end| end > FILE_SIZE_MAX) {
            return Err(Errno(libc::EFBIG));
        }
        let op = LogOp::Fallocate {
            key: self.key(),
            mode,
            offset,
            len,
        };
        self.change(&op, cred, |session, inode| {
            match inode.read().attr.kind() {
                FileKind::Regular => {}
                FileKind::Fifo => return Err(Errno(libc::ESPIPE).into()),
                _ => return Err(Errno(libc::ENODEV).into()),
            }
            if charge(&op) > FALLOCATE_LOGGED_BLOCKS {
                return Err(OpError::Forward);
            }
            session
                .data
                .fallocate(inode, mode, offset, len, self.clears(inode, cred))
        })
    }

    /// As [`Fs::fsync`](crate::Fs::fsync).
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn fsync(&self, data_only: bool) -> Result<()> {
        let _ = data_only;
        self.mount().with_session(|session, _| session.sync_log())
    }
}

fn op_end(offset: u64, len: usize) -> Result<u64> {
    let end = offset.saturating_add(len as u64);
    if end > FILE_SIZE_MAX {
        Err(Errno(libc::EFBIG))
    } else {
        Ok(end)
    }
}
