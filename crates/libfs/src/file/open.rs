//! Open files: keep an inode alive, and read and write it.

use parking_lot::RwLock;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use varve_format::log::PAYLOAD_MAX;
use varve_format::{
    EntryFlags, FILE_SIZE_MAX, FallocateMode, FileKind, InodeAttr, InodeKey, LogOp, SessionId, SetAttr,
    SetAttrMask, charge,
};
use varve_ipc::{CopiesAt, Cred, LeaseMode};

use crate::attrs::{OpenFlags, READ, WRITE, atime_is_due, may};
use crate::dir::{attr_of, begin, commit};
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::file::attr::clears;
use crate::kernel_cache::{KernelCall, PageUse};
use crate::lease::{Event, Node, Pin, SlotPin, Use};
use crate::options::Atime;
use crate::session::{Asks, Forwarded, Mount, Session, Try};

/// Most blocks (64 MiB) that an `fallocate` may cost to be logged: the number that a session requests from
/// the daemon at once.
const FALLOCATE_LOGGED_BLOCKS: u32 = 16_384 + 8;

/// An open file description. Keeps the inode alive while it exists; clones are the same description; the last
/// drop closes it.
#[derive(Clone)]
pub struct OpenFile {
    description: Arc<Description>,
}

struct Description {
    mount: Arc<Mount>,
    key: InodeKey,
    flags: OpenFlags,
    /// The session and the node of its first use: most calls find them without a lock, as long as that
    /// session lives.
    first: OnceLock<(Arc<Session>, Arc<Node>)>,
    /// The session and the node of its last use, if that was another session.
    node: RwLock<Option<(SessionId, Arc<Node>)>>,
}

/// A pinned inode.
enum Pinned<'s> {
    Slot(SlotPin<'s>),
    Counted(Pin<'s>),
}

impl Pinned<'_> {
    #[inline]
    fn node(&self) -> &Arc<Node> {
        match self {
            Self::Slot(pin) => pin.node(),
            Self::Counted(pin) => pin.node(),
        }
    }
}

/// The session under which data was read.
pub struct ReadUnder(Arc<Session>);

impl ReadUnder {
    /// Whether the session lives. If so, all that this thread did before the call was done before the daemon
    /// ends the session and empties [the file of copies](CopiesAt).
    #[must_use]
    pub fn holds(&self) -> bool {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.0.is_live()
    }

    /// Location of the copies that the daemon of this session empties.
    #[must_use]
    pub fn copies_at(&self) -> Option<&CopiesAt> {
        self.0.welcome.copies_at.as_ref()
    }
}

impl OpenFile {
    /// Creates a description of an inode whose open is already counted.
    pub(crate) fn over(mount: &Arc<Mount>, key: InodeKey, flags: OpenFlags) -> Self {
        let description = Description {
            mount: Arc::clone(mount),
            key,
            flags,
            first: OnceLock::new(),
            node: RwLock::new(None),
        };
        Self {
            description: Arc::new(description),
        }
    }

    /// As [`over`](Self::over), for an inode that was just made.
    pub(crate) fn made(mount: &Arc<Mount>, key: InodeKey, flags: OpenFlags) -> Self {
        let file = Self::over(mount, key, flags);
        let session = mount.session();
        if let Some(node) = session.node(key) {
            let _ = file.description.first.set((session, node));
        }
        file
    }

    pub(crate) fn open(mount: &Arc<Mount>, key: InodeKey, flags: OpenFlags, cred: &Cred) -> Result<Self> {
        let mut counted = false;
        let mut found = None;
        let outcome = mount.look(|session| {
            if flags.write || flags.truncate {
                session.may_write()?;
            }
            let known = session.leases.get(key);
            let pinned = known
                .as_ref()
                .and_then(|node| session.leases.try_pin_slot(node, LeaseMode::Read, Use::Own));
            let node = match &pinned {
                Some(pin) => {
                    admit(mount, session, pin.node(), flags, cred, &mut counted)?;
                    Arc::clone(pin.node())
                }
                None => {
                    let pins = session.pin_read(key)?;
                    let node = pins.node(key)?;
                    admit(mount, session, node, flags, cred, &mut counted)?;
                    Arc::clone(node)
                }
            };
            found = Some((Arc::clone(session), node));
            Ok(())
        });
        if let Err(errno) = outcome {
            if counted {
                mount.opens.close(key);
            }
            return Err(errno);
        }
        let file = Self::over(mount, key, flags);
        if let Some(found) = found {
            let _ = file.description.first.set(found);
        }
        if flags.truncate {
            file.resize(0, cred)?;
        }
        Ok(file)
    }

    /// The inode.
    #[must_use]
    pub fn key(&self) -> InodeKey {
        self.description.key
    }

    /// The flags of its open.
    #[must_use]
    pub fn flags(&self) -> OpenFlags {
        self.description.flags
    }

    pub(super) fn mount(&self) -> &Mount {
        &self.description.mount
    }

    /// Runs an operation, in the session of the file's first use if that lives.
    #[inline]
    fn with_session<T>(&self, op: impl FnMut(&Arc<Session>, &mut Try) -> OpResult<T, T>) -> Result<T> {
        match self.description.first.get() {
            Some((session, _)) => self.mount().with_session_from(session, op),
            None => self.mount().with_session(op),
        }
    }

    /// Pins the inode, without a lookup if it was used before.
    #[inline]
    fn pin<'s, T>(
        &'s self,
        session: &'s Arc<Session>,
        mode: LeaseMode,
        usage: Use<'_>,
    ) -> OpResult<Pinned<'s>, T> {
        if let Some((first, node)) = self.description.first.get()
            && Arc::ptr_eq(first, session)
            && let Some(pin) = session.leases.try_pin_slot(node, mode, usage)
        {
            return Ok(Pinned::Slot(pin));
        }
        self.pin_slowly(session, mode, usage).map(Pinned::Counted)
    }

    fn pin_slowly<'s, T>(
        &self,
        session: &'s Arc<Session>,
        mode: LeaseMode,
        usage: Use<'_>,
    ) -> OpResult<Pin<'s>, T> {
        if let Some((id, node)) = &*self.description.node.read()
            && *id == session.id()
            && let Some(pin) = session.leases.try_pin_node(node, mode, usage)
        {
            return Ok(pin);
        }
        let pin = session.leases.pin_one(self.key(), mode, usage)?;
        let known = || (Arc::clone(session), Arc::clone(pin.node()));
        // While a description refers to a node, it stays its session's node: only the session can change.
        if !Arc::ptr_eq(&self.description.first.get_or_init(known).0, session) {
            *self.description.node.write() = Some((session.id(), Arc::clone(pin.node())));
        }
        Ok(pin)
    }

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
        if let Some((session, node)) = self.description.first.get() {
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

    fn clears(&self, inode: &crate::inode::Inode, cred: &Cred) -> EntryFlags {
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

    fn resize(&self, size: u64, cred: &Cred) -> Result<()> {
        self.mount().with_session(|session, attempt| {
            match self.pin_to_change(session, attempt, Use::Own) {
                Ok(pin) => {
                    let inode = &pin.node().inode;
                    if inode.read().attr.kind() != FileKind::Regular {
                        return Err(Errno(libc::EINVAL).into());
                    }
                    match session.data.truncate(inode, size, self.clears(inode, cred)) {
                        Err(OpError::Failed(Errno(libc::ENOSPC))) => {}
                        other => {
                            other?;
                            return self.settle(session, ());
                        }
                    }
                }
                Err(OpError::Forward) => {}
                Err(error) => return Err(error),
            }
            let key = self.key();
            let op = LogOp::Truncate { key, size };
            session.forward(attempt, &[key], &op, EntryFlags::empty(), Asks::NOTHING, cred)?;
            self.settle(session, ())
        })
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
        self.mount().with_session(|session, attempt| {
            match self.pin_to_change(session, attempt, Use::Own) {
                Ok(pin) => {
                    let inode = &pin.node().inode;
                    match inode.read().attr.kind() {
                        FileKind::Regular => {}
                        FileKind::Fifo => return Err(Errno(libc::ESPIPE).into()),
                        _ => return Err(Errno(libc::ENODEV).into()),
                    }
                    if charge(&op) <= FALLOCATE_LOGGED_BLOCKS {
                        let clears = self.clears(inode, cred);
                        match session.data.fallocate(inode, mode, offset, len, clears) {
                            Err(OpError::Failed(Errno(libc::ENOSPC))) => {}
                            other => {
                                other?;
                                return self.settle(session, ());
                            }
                        }
                    }
                }
                Err(OpError::Forward) => {}
                Err(error) => return Err(error),
            }
            let none = EntryFlags::empty();
            session.forward(attempt, &[self.key()], &op, none, Asks::NOTHING, cred)?;
            self.settle(session, ())
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

    /// Fails with EXDEV if the files are of different pools.
    pub(super) fn same_pool(&self, other: &Self) -> Result<()> {
        if Arc::ptr_eq(&self.description.mount, &other.description.mount) {
            Ok(())
        } else {
            Err(Errno(libc::EXDEV))
        }
    }

    /// As [`Fs::fsync`](crate::Fs::fsync).
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn fsync(&self, data_only: bool) -> Result<()> {
        let _ = data_only;
        self.mount().with_session(|session, _| session.sync_log())
    }

    /// Attributes.
    ///
    /// # Errors
    /// As `fstat`.
    pub fn getattr(&self) -> Result<InodeAttr> {
        self.mount().look(|session| attr_of(session, self.key()))
    }
}

/// Checks whether a pinned inode may be opened with `flags`; counts the open, once.
fn admit<T>(
    mount: &Mount,
    session: &Session,
    node: &Node,
    flags: OpenFlags,
    cred: &Cred,
    counted: &mut bool,
) -> OpResult<(), T> {
    let key = node.key();
    let body = node.inode.read();
    let attr = &body.attr;
    match attr.kind() {
        FileKind::Directory if flags.write || flags.truncate => {
            return Err(Errno(libc::EISDIR).into());
        }
        FileKind::Symlink => return Err(Errno(libc::ELOOP).into()),
        _ => {}
    }
    if session.options.check_permissions {
        let want = if flags.read { READ } else { 0 } | if flags.write || flags.truncate { WRITE } else { 0 };
        may(attr, cred, want)?;
    }
    // Under the inode's lock, where an unlink decides whether it is open.
    if !*counted {
        if attr.nlink == 0 && !mount.opens.open_again(key) {
            return Err(Errno(libc::ENOENT).into());
        }
        if attr.nlink > 0 {
            mount.opens.open(key);
        }
        *counted = true;
    }
    Ok(())
}

fn op_end(offset: u64, len: usize) -> Result<u64> {
    let end = offset.saturating_add(len as u64);
    if end > varve_format::FILE_SIZE_MAX {
        Err(Errno(libc::EFBIG))
    } else {
        Ok(end)
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
fn log_atime(session: &Session, node: &Arc<Node>) -> OpResult<(), ()> {
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

fn log_forget(session: &Session, node: &Arc<Node>) -> OpResult<(), ()> {
    let key = node.key();
    let Some(_pin) = session.leases.try_pin_node(node, LeaseMode::Write, Use::Own) else {
        return Ok(());
    };
    let op = LogOp::Forget { key };
    let slot = begin(session, &op)?;
    let mut body = node.inode.write();
    // Opened again, or unlinked between the close and here by a thread that saw it closed.
    if body.dead || session.opens.is_open(key) {
        return Ok(());
    }
    let committed = commit(session, slot, &op, EntryFlags::empty(), session.now_ns())?;
    body.dead = true;
    body.logged(committed.seqs.last);
    drop(body);
    session.leases.bury(key, committed.seqs.last);
    Ok(())
}

impl Drop for Description {
    fn drop(&mut self) {
        if !self.mount.opens.close(self.key) || self.mount.is_unmounted() {
            return;
        }
        match self.first.get() {
            Some((session, node)) if session.is_live() => closed(session, Some(node), self.key),
            _ => {
                let session = self.mount.session();
                // The next session does not name it among the inodes that it holds.
                if session.is_live() {
                    closed(&session, session.node(self.key).as_ref(), self.key);
                }
            }
        }
    }
}

/// Handles the last close of an inode.
fn closed(session: &Session, node: Option<&Arc<Node>>, key: InodeKey) {
    if let Some(node) = node {
        let (mode, settled) = node.settled();
        let named = node.inode.is_surely_named();
        if mode == Some(LeaseMode::Write) {
            // Failures here lose an access time, or keep a file until the end of the session: a close does
            // not report them.
            if !named && node.inode.attr().nlink == 0 {
                let _ = log_forget(session, node);
            } else if node.atime_moved.load(Ordering::Relaxed)
                && node.atime_moved.swap(false, Ordering::Relaxed)
            {
                let _ = log_atime(session, node);
            }
        }
        // A held lease that stays reports whether the file is open when it is given back.
        if named && settled && mode.is_some() {
            return;
        }
    }
    session.leases.tell(Event::Closed(key));
}
