//! Reads of an open file, and the time of the last one.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use varve_format::{EntryFlags, InodeAttr, LogOp, SetAttr, SetAttrMask};
use varve_ipc::{CopiesAt, LeaseMode};

use super::open::OpenFile;
use crate::attrs::atime_is_due;
use crate::dir::{begin, commit};
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::kernel_cache::KernelCall;
use crate::lease::{Node, Use};
use crate::options::Atime;
use crate::session::Session;

/// The session under which data was read.
pub struct ReadUnder(Arc<Session>);

impl ReadUnder {
    /// Whether the session lives. If so, all that this thread did before the call was done before the daemon
    /// ends the session and empties [the file of copies](CopiesAt).
    #[must_use]
    pub fn holds(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.is_live()
    }

    /// Location of the copies that the daemon of this session empties.
    #[must_use]
    pub fn copies_at(&self) -> Option<&CopiesAt> {
        self.0.welcome.copies_at.as_ref()
    }
}

impl OpenFile {
    /// Reads; fewer bytes only at the end of the file.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        self.read(offset, out, Use::Own)
    }

    /// As [`read_at`](Self::read_at), for a kernel that caches the data until it is told to drop it.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn read_pages(&self, call: &KernelCall, offset: u64, out: &mut [u8]) -> Result<usize> {
        self.read(offset, out, Use::Kernel(call))
    }

    /// As [`read_at`](Self::read_at), for copies that are kept until they are dropped
    /// ([`Copies`](crate::Copies)). Data read before a drop and stored after it is out of date, so the keeper
    /// of copies counts their drops. A session that ends drops nothing here: the keeper asks
    /// [`ReadUnder::holds`] when it stores the copy, and before the copy becomes visible.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn read_copy(&self, offset: u64, out: &mut [u8]) -> Result<(usize, ReadUnder)> {
        if !self.flags().read {
            return Err(Errno(libc::EBADF));
        }
        let mut under = None;
        let count = self.with_session(|session, _| {
            let pin = self.pin(session, LeaseMode::Read, Use::Copy)?;
            let count = session.data.read(&pin.node().inode, offset, out)?;
            if !session.is_live() {
                return Err(OpError::lost());
            }
            under = Some(ReadUnder(Arc::clone(session)));
            Ok(count)
        })?;
        Ok((count, under.ok_or(Errno(libc::EIO))?))
    }

    fn read(&self, offset: u64, out: &mut [u8], usage: Use<'_>) -> Result<usize> {
        if !self.flags().read {
            return Err(Errno(libc::EBADF));
        }
        if let Some((session, node)) = self.first() {
            let may = || session.leases.may_look(node, usage);
            if !self.mount().is_unmounted()
                && let Some(count) = session.data.try_read(&node.inode, offset, out, may)
            {
                self.note_read(session, node);
                return Ok(count);
            }
        }
        self.read_pinned(offset, out, usage)
    }

    fn read_pinned(&self, offset: u64, out: &mut [u8], usage: Use<'_>) -> Result<usize> {
        self.with_session(|session, _| {
            let pin = self.pin(session, LeaseMode::Read, usage)?;
            let node = pin.node();
            if node.inode.read().attr.is_dir() {
                return Err(Errno(libc::EISDIR).into());
            }
            let count = session.data.read(&node.inode, offset, out)?;
            if !session.is_live() {
                return Err(OpError::lost());
            }
            self.note_read(session, node);
            Ok(count)
        })
    }

    #[inline]
    fn note_read(&self, session: &Session, node: &Node) {
        if !self.flags().no_atime {
            note_read(session, node);
        }
    }

    /// Reads a range that has no holes, under one lease; `false`: it has some, or the file ends before. Moves no
    /// times.
    pub(super) fn read_dense(&self, offset: u64, out: &mut [u8]) -> Result<bool> {
        let end = offset.saturating_add(out.len() as u64);
        self.mount().look(|session| {
            let pin = self.pin(session, LeaseMode::Read, Use::Own)?;
            let (data, inode) = (&session.data, &pin.node().inode);
            let len = out.len();
            let all = |got: usize| got == len;
            Ok(data.is_dense(inode, offset..end)?
                && data
                    .read(inode, offset, out)
                    .map(all)
                    .map_err(|error| error.map(all))?)
        })
    }

    /// First byte of data at or after `offset`; ENXIO if there is none.
    ///
    /// # Errors
    /// As `lseek`.
    pub fn seek_data(&self, offset: u64) -> Result<u64> {
        self.mount().look(|session| {
            let pin = self.pin(session, LeaseMode::Read, Use::Own)?;
            session.data.seek_data(&pin.node().inode, offset)
        })
    }

    /// First byte of a hole at or after `offset` (the end of the file is one).
    ///
    /// # Errors
    /// As `lseek`.
    pub fn seek_hole(&self, offset: u64) -> Result<u64> {
        self.mount().look(|session| {
            let pin = self.pin(session, LeaseMode::Read, Use::Own)?;
            session.data.seek_hole(&pin.node().inode, offset)
        })
    }
}

/// Moves the time of the last read in memory, if the mount's policy says so. It is logged at the last close,
/// if the write lease is still held; it is lost when the lease goes before that.
#[inline]
fn note_read(session: &Session, node: &Node) {
    let is_due = match session.options.atime.get() {
        Atime::Relative => node.inode.is_atime_due(session.now_ns()),
        Atime::Never => false,
        Atime::Strict => true,
    };
    if is_due && !session.welcome.read_only {
        move_atime(session, node);
    }
}

#[cold]
fn move_atime(session: &Session, node: &Node) {
    let now = session.now_ns();
    let strict = session.options.atime.get() == Atime::Strict;
    let attr_says = |attr: &InodeAttr| match strict {
        true => attr.atime_ns < now,
        false => atime_is_due(attr, now),
    };
    if !attr_says(&node.inode.read().attr) {
        return;
    }
    if let Some(mut body) = node.inode.try_write() {
        body.attr.atime_ns = now;
        drop(body);
        node.atime_moved.store(true, Ordering::Relaxed);
    }
}

/// Logs the time of the last read. The entry is stamped with the inode's ctime, which it must not move.
pub(super) fn log_atime(session: &Session, node: &Arc<Node>) -> OpResult<(), ()> {
    let key = node.key();
    let Some(_pin) = session.leases.try_pin_node(node, LeaseMode::Write, Use::Own) else {
        return Ok(());
    };
    let mut attr = SetAttr {
        mask: SetAttrMask::ATIME,
        ..SetAttr::default()
    };
    let slot = begin(session, &LogOp::SetAttr { key, attr })?;
    let mut body = node.inode.write();
    body.check_alive()?;
    attr.atime_ns = body.attr.atime_ns;
    // An ordinary user's session sets times of its own files only; for other files the new time is lost.
    let acts_for = session.welcome.acts_for.as_ref();
    if acts_for.is_some_and(|cred| cred.uid != body.attr.uid) {
        return Ok(());
    }
    let ctime = body.attr.ctime_ns;
    let committed = commit(
        session,
        slot,
        &LogOp::SetAttr { key, attr },
        EntryFlags::empty(),
        ctime,
    )?;
    body.logged(committed.seqs.last);
    Ok(())
}
