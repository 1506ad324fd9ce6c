//! Requests that only read. Each checks the session's rights: by its leases, by its earlier lookups, by
//! permission bits.

use crate::error::no;
use crate::kernel::{Core, Faults, KernelFs};
use crate::ops::map::Windows;
use crate::placement::{Placement, Use};
use crate::session::state::Session;
use crate::session::table::Sessions;
use varve_format::{
    BLOCK_BYTES, ExtentFlags, FILE_BLOCKS_MAX, FileBlock, FileKind, InodeAttr, InodeKey, NAME_MAX,
};
use varve_ipc::{
    ClientKind, DATA_MAX, DirEntry, Grant, IpcError, LeaseMode, MAPPED_FILES_MAX, MappedExtent,
    NumberedBlocks, Owned, OwnedBlocks, READ_BLOCKS_MAX, READ_SUMS_MAX, READS_MAX, ReadRun, SUMS_MAX, StatFs,
    Summed, SummedBlocks, TOLD_MAX, Tell, USERS_MAX,
};
use varve_store::{MappedPart, OwnedPart, SpaceStats, Store, StoreError, SummedPart};

/// Most entries of one answer to `ReadDir`.
const ENTRIES_MAX: u32 = 1024;
/// How often a name is looked up again whose inode is gone.
const LOOKS_MAX: u32 = 100;
/// Most extents of one answer to `MapExtents`.
const EXTENTS_MAX: u32 = 8192;
/// Most bytes of names and values in one answer to `Xattrs`.
const XATTR_BYTES_MAX: usize = DATA_MAX;
/// Most bytes of contents that are told with the leases of one answer.
const TOLD_BYTES_MAX: usize = 64 << 10;
/// Bytes counted for an entry of those, besides its name.
const ENTRY_BYTES: usize = 32;
/// Names and values.
type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// Search permission.
const SEARCH: u32 = 1;
/// Read permission.
const READ: u32 = 4;

/// What is told of a range that ends at `end`, of which `parts` reach to `next`.
fn told_sums(parts: Vec<SummedPart>, next: FileBlock, end: FileBlock) -> Summed {
    Summed {
        parts: parts.into_iter().map(summed).collect(),
        next: (next < end).then_some(next),
    }
}

/// Checksums as a client is told them.
fn summed(part: SummedPart) -> SummedBlocks {
    SummedBlocks {
        file_block: part.file_block,
        number: part.number,
        sums: part.sums,
    }
}

/// Context of reads.
pub(crate) struct Reads<'k> {
    store: &'k Store,
    sessions: &'k Sessions,
    policy: &'k dyn Placement,
    faults: Faults<'k>,
    windows: Windows<'k>,
}

impl<'k> Reads<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        let (store, sessions) = (kernel.store(), &kernel.sessions);
        let policy = &*kernel.placer.policy;
        Self {
            store,
            sessions,
            policy,
            faults: Core::of(kernel).faults(),
            windows: Windows {
                store,
                sessions,
                policy,
                clock: &*kernel.env.clock,
                lease_ms: kernel.env.config.lease_ms,
            },
        }
    }

    /// Checks that the session has a lease on `key`: EAGAIN if it has none (any more), ESTALE if it may not
    /// even name the inode or the inode is gone: when another thread of the session removes an inode, the
    /// daemon forgets its leases while this thread may still count on them.
    fn leased(&self, session: &Session, key: InodeKey) -> Result<(), IpcError> {
        if !session.knows(key) {
            return Err(no(libc::ESTALE));
        }
        if self.sessions.table.lock().table.mode(session.id, key).is_some() {
            return Ok(());
        }
        Err(match self.store.get_key(key) {
            Ok(_) => no(libc::EAGAIN),
            Err(error) => self.faults.refused(&error),
        })
    }

    fn readable(&self, session: &Session, key: InodeKey) -> Result<InodeAttr, IpcError> {
        let attr = self
            .store
            .get_key(key)
            .map_err(|error| self.faults.unreadable(&error))?
            .attr;
        if session.rights(&attr) & READ == 0 {
            return Err(no(libc::EACCES));
        }
        Ok(attr)
    }

    pub(crate) fn lookup(
        &self,
        session: &Session,
        dir: InodeKey,
        name: &[u8],
    ) -> Result<Option<InodeAttr>, IpcError> {
        if name.is_empty() || name.contains(&b'/') || name.contains(&0) {
            return Err(no(libc::EINVAL));
        }
        if name.len() > NAME_MAX {
            return Err(no(libc::ENAMETOOLONG));
        }
        self.leased(session, dir)?;
        let mut looks = 0;
        loop {
            match self.look_up(session, dir, name)? {
                // Between the two reads a digest has removed what was found, as another thread of the session has
                // it in its log: the name tells another thing now.
                Err(StoreError::NoInode(_)) if looks < LOOKS_MAX => looks += 1,
                found => return found.map_err(|error| self.faults.unreadable(&error)),
            }
        }
    }

    /// Looks once. The inner error: of the inode that the name led to.
    fn look_up(
        &self,
        session: &Session,
        dir: InodeKey,
        name: &[u8],
    ) -> Result<Result<Option<InodeAttr>, StoreError>, IpcError> {
        let attr = self
            .store
            .get_key(dir)
            .map_err(|error| self.faults.unreadable(&error))?
            .attr;
        if !attr.is_dir() {
            return Err(no(libc::ENOTDIR));
        }
        if !session.may(&attr, SEARCH) {
            return Err(no(libc::EACCES));
        }
        let found = if name == b".." {
            // Only the daemon knows the generation of a parent's number.
            self.store.get(attr.parent)
        } else {
            let found = self
                .store
                .dir_lookup(dir.ino, name)
                .map_err(|error| self.faults.unreadable(&error))?;
            let Some(item) = found else { return Ok(Ok(None)) };
            self.store.get_key(item.key)
        };
        Ok(found.map(|inode| {
            session.learn(inode.attr.key);
            Some(inode.attr)
        }))
    }

    pub(crate) fn read_dir(
        &self,
        session: &Session,
        dir: InodeKey,
        cookie: u64,
        max: u32,
    ) -> Result<(Vec<DirEntry>, bool), IpcError> {
        self.leased(session, dir)?;
        if !self.readable(session, dir)?.is_dir() {
            return Err(no(libc::ENOTDIR));
        }
        self.entries(dir, cookie, max.clamp(1, ENTRIES_MAX) as usize)
            .map_err(|error| self.faults.unreadable(&error))
    }

    /// Returns a page of a directory, and whether there are no entries beyond.
    fn entries(&self, dir: InodeKey, cookie: u64, max: usize) -> Result<(Vec<DirEntry>, bool), StoreError> {
        let mut items = self.store.dir_iter(dir.ino, cookie, max + 1)?;
        let complete = items.len() <= max;
        items.truncate(max);
        let entries = items.into_iter().map(|item| DirEntry {
            name: item.name,
            key: item.key,
            kind: item.kind,
            next_cookie: item.cookie,
        });
        Ok((entries.collect(), complete))
    }

    /// Adds to leases that were just granted what the client is likely to ask for next. What cannot be read
    /// is left out: who asks for it learns why.
    pub(crate) fn tell(&self, session: &Session, mut grants: Vec<Grant>, tell: Tell) -> Vec<Grant> {
        // A user's session is told of no inode that it has not looked up, and maps no blocks but its
        // segments.
        let all = session.privileged && session.segments.is_none();
        let mut room = TOLD_BYTES_MAX;
        for grant in &mut grants {
            let Ok(inode) = self.store.get_key(grant.attr.key) else {
                continue;
            };
            grant.told.bare = inode.xattrs.entries() == 0;
            let kind = inode.attr.kind();
            if all && tell.names && kind == FileKind::Directory {
                grant.told.names = self.told_names(grant.attr.key, &mut room);
            } else if all && tell.extents && kind == FileKind::Regular && grant.mode == LeaseMode::Read {
                grant.told.extents = self.told_extents(session, grant.attr.key, &mut room);
            }
        }
        grants
    }

    fn told_names(&self, dir: InodeKey, room: &mut usize) -> Option<Vec<DirEntry>> {
        if *room == 0 {
            return None;
        }
        let (entries, complete) = self.entries(dir, 0, TOLD_MAX).ok()?;
        let bytes: usize = entries.iter().map(|entry| entry.name.len() + ENTRY_BYTES).sum();
        let fits = complete && bytes <= *room;
        // What was read in vain counts too.
        *room = room.saturating_sub(bytes);
        fits.then_some(entries)
    }

    fn told_extents(&self, session: &Session, key: InodeKey, room: &mut usize) -> Option<Vec<MappedExtent>> {
        if *room < TOLD_MAX * ENTRY_BYTES {
            return None;
        }
        let (extents, complete) = self
            .map_extents(session, key, FileBlock(0), TOLD_MAX as u32)
            .ok()?;
        *room -= extents.len() * ENTRY_BYTES;
        complete.then_some(extents)
    }

    pub(crate) fn read_link(&self, session: &Session, key: InodeKey) -> Result<Vec<u8>, IpcError> {
        if !session.knows(key) {
            return Err(no(libc::ESTALE));
        }
        let attr = self
            .store
            .get_key(key)
            .map_err(|error| self.faults.unreadable(&error))?
            .attr;
        if attr.kind() != FileKind::Symlink {
            return Err(no(libc::EINVAL));
        }
        self.store
            .read_link(key.ino)
            .map_err(|error| self.faults.unreadable(&error))
    }

    pub(crate) fn xattrs(&self, session: &Session, key: InodeKey) -> Result<Xattrs, IpcError> {
        self.leased(session, key)?;
        let attr = self
            .store
            .get_key(key)
            .map_err(|error| self.faults.unreadable(&error))?
            .attr;
        let readable = session.rights(&attr) & READ != 0;
        let list = self
            .store
            .xattr_list(key.ino)
            .map_err(|error| self.faults.unreadable(&error))?;
        let mut out = Vec::with_capacity(list.len());
        let mut bytes = 0;
        for (name, _) in list {
            let visible = session.privileged
                || name.starts_with(b"security.")
                || name.starts_with(b"system.")
                || (readable && name.starts_with(b"user."));
            if !visible {
                continue;
            }
            let value = self
                .store
                .xattr_get(key.ino, &name)
                .map_err(|error| self.faults.unreadable(&error))?;
            let Some(value) = value else { continue };
            bytes += name.len() + value.len();
            if bytes > XATTR_BYTES_MAX {
                return Err(no(libc::E2BIG));
            }
            out.push((name, value));
        }
        Ok(out)
    }

    pub(crate) fn map_extents(
        &self,
        session: &Session,
        key: InodeKey,
        from: FileBlock,
        max: u32,
    ) -> Result<(Vec<MappedExtent>, bool), IpcError> {
        self.leased(session, key)?;
        let attr = self.readable(session, key)?;
        // Must precede the read of the tree: from here on the session is told when these blocks are replaced.
        if !self.sessions.table.lock().table.note_mapped(session.id, key) {
            return Err(no(libc::EAGAIN));
        }
        if let Some(segments) = &session.segments {
            let window = self.windows.map(segments, key, from);
            return window.map_err(|error| self.faults.refused(&error));
        }
        let max = max.clamp(1, EXTENTS_MAX) as usize;
        let parts = self
            .store
            .map_parts(key.ino, from, max)
            .map_err(|error| self.faults.unreadable(&error))?;
        let complete = parts.len() < max;
        for MappedPart { extent, .. } in &parts {
            self.policy
                .used(key, extent.file_block, extent.len.into(), Use::Mapped);
        }
        let may_know = may_know_numbers(session, &attr);
        let mapped = parts
            .into_iter()
            .map(|MappedPart { extent, number, .. }| MappedExtent {
                file_block: extent.file_block,
                len: extent.len,
                tier: extent.tier,
                block: extent.block,
                unwritten: extent.flags.contains(ExtentFlags::UNWRITTEN),
                number: number.filter(|_| may_know),
            });
        Ok((mapped.collect(), complete))
    }

    /// Returns the maps of several files, where they are small. A user's session maps no blocks but its
    /// segments, one window at a time.
    pub(crate) fn map_files(
        &self,
        session: &Session,
        keys: &[InodeKey],
    ) -> Result<Vec<Option<Vec<MappedExtent>>>, IpcError> {
        if keys.len() > MAPPED_FILES_MAX {
            return Err(no(libc::EINVAL));
        }
        let mut room = TOLD_BYTES_MAX;
        let windowed = session.segments.is_some();
        let mapped = keys.iter().map(|key| match windowed {
            true => None,
            false => self.told_extents(session, *key, &mut room),
        });
        Ok(mapped.collect())
    }

    /// Checks that the session may be told of the blocks of a file, beyond their bytes: it is privileged, or
    /// the user's own.
    fn told_of_blocks(&self, session: &Session, key: InodeKey) -> Result<(), IpcError> {
        if !session.knows(key) {
            return Err(no(libc::ESTALE));
        }
        let attr = self
            .store
            .get_key(key)
            .map_err(|error| self.faults.refused(&error))?
            .attr;
        if !session.privileged && attr.uid != session.peer.uid {
            return Err(no(libc::EPERM));
        }
        if attr.kind() != FileKind::Regular {
            return Err(no(libc::EINVAL));
        }
        Ok(())
    }

    /// Checksums of a file's blocks: for privileged sessions, and for the user who owns the file.
    pub(crate) fn checksums(
        &self,
        session: &Session,
        key: InodeKey,
        from: FileBlock,
        max: u32,
    ) -> Result<Summed, IpcError> {
        self.told_of_blocks(session, key)?;
        let end = FileBlock(FILE_BLOCKS_MAX);
        let (parts, next) = self
            .store
            .checksums(key.ino, from..end, max.clamp(1, SUMS_MAX).into())
            .map_err(|error| self.faults.unreadable(&error))?;
        Ok(told_sums(parts, next, end))
    }

    /// Checksums of the bytes of a range of a file, which are read for that: 4 bytes for a block go to the
    /// client, and no data. For those to whom [`checksums`](Self::checksums) tells.
    pub(crate) fn read_checksums(
        &self,
        session: &Session,
        key: InodeKey,
        from: FileBlock,
        blocks: u32,
    ) -> Result<Summed, IpcError> {
        self.told_of_blocks(session, key)?;
        if blocks > READ_SUMS_MAX || from.0 > FILE_BLOCKS_MAX {
            return Err(no(libc::EINVAL));
        }
        let range = from..FileBlock(from.0 + u64::from(blocks));
        let end = range.end;
        let (parts, next) = self
            .store
            .read_checksums(key.ino, range, blocks.into())
            .map_err(|error| self.faults.unreadable(&error))?;
        Ok(told_sums(parts, next, end))
    }

    /// Owners of a file's blocks: for privileged sessions, and for the user who owns the file.
    pub(crate) fn owners(
        &self,
        session: &Session,
        key: InodeKey,
        from: FileBlock,
        max: u32,
    ) -> Result<Owned, IpcError> {
        self.told_of_blocks(session, key)?;
        let users = {
            let sessions = self.sessions.table.lock();
            // A lease that was given back for a read leaves a hold if the file is still open.
            let others = sessions.holds.holders(key).filter(|id| *id != session.id);
            others
                .filter_map(|id| sessions.live(id))
                .filter(|other| other.kind == ClientKind::Linked)
                // Another user's process is not named.
                .map(
                    |other| match session.privileged || other.peer.uid == session.peer.uid {
                        true => other.peer.pid,
                        false => 0,
                    },
                )
                .take(USERS_MAX)
                .collect()
        };
        let max = max.min(EXTENTS_MAX) as usize;
        let parts = match max {
            0 => Vec::new(),
            max => self
                .store
                .owned_parts(key.ino, from..FileBlock(FILE_BLOCKS_MAX), max)
                .map_err(|error| self.faults.unreadable(&error))?,
        };
        let told = |part: &OwnedPart| OwnedBlocks {
            file_block: part.file_block,
            blocks: part.blocks,
            number: part.number,
            owners: if session.privileged {
                part.owners
            } else {
                part.owners.min(2)
            },
            tier: part.tier,
            block: part.block,
        };
        Ok(Owned {
            complete: max > 0 && parts.len() < max,
            parts: parts.iter().map(told).collect(),
            users,
        })
    }

    pub(crate) fn read_data(
        &self,
        session: &Session,
        key: InodeKey,
        offset: u64,
        len: u32,
    ) -> Result<(Vec<u8>, Vec<NumberedBlocks>), IpcError> {
        if len as usize > DATA_MAX {
            return Err(no(libc::EINVAL));
        }
        self.leased(session, key)?;
        let attr = self.readable(session, key)?;
        match attr.kind() {
            FileKind::Regular => {}
            FileKind::Directory => return Err(no(libc::EISDIR)),
            _ => return Err(no(libc::EINVAL)),
        }
        let len = u64::from(len).min(attr.size_bytes.saturating_sub(offset));
        let mut data = vec![0; len as usize];
        let (got, numbered) = self
            .store
            .read_numbered(key.ino, offset, &mut data)
            .map_err(|error| self.faults.unreadable(&error))?;
        data.truncate(got);
        let (first, end) = (offset / BLOCK_BYTES, (offset + got as u64).div_ceil(BLOCK_BYTES));
        self.policy.used(key, FileBlock(first), end - first, Use::Read);
        let may_know = may_know_numbers(session, &attr);
        let told = |part: varve_store::NumberedBlocks| NumberedBlocks {
            file_block: part.file_block,
            blocks: part.blocks,
            number: part.number,
        };
        Ok((
            data,
            numbered.into_iter().filter(|_| may_know).map(told).collect(),
        ))
    }
}

impl Reads<'_> {
    /// Counts what a session has read by itself.
    pub(crate) fn note_reads(&self, session: &Session, reads: &[ReadRun]) -> Result<(), IpcError> {
        if !session.privileged {
            return Err(no(libc::EPERM));
        }
        if reads.len() > READS_MAX {
            return Err(no(libc::E2BIG));
        }
        let leased: Vec<&ReadRun> = {
            let sessions = self.sessions.table.lock();
            // No reader notes more than a window at a time.
            let has = |run: &&ReadRun| {
                run.blocks <= READ_BLOCKS_MAX && sessions.table.mode(session.id, run.key).is_some()
            };
            reads.iter().filter(has).collect()
        };
        for run in leased {
            let blocks = u64::from(run.blocks).min(FILE_BLOCKS_MAX.saturating_sub(run.from.0));
            if blocks > 0 {
                self.policy.used(run.key, run.from, blocks, Use::Read);
            }
        }
        Ok(())
    }
}

/// Whether the session may know which of a file's blocks are those of another file, as [`Reads::owners`]
/// does.
fn may_know_numbers(session: &Session, attr: &InodeAttr) -> bool {
    session.privileged || attr.uid == session.peer.uid
}

/// Returns the answer to `statfs` for a session that can reserve `promisable` blocks.
pub(crate) fn stat_fs(space: &SpaceStats, promisable: u64) -> StatFs {
    let blocks = space.tiers.iter().map(|tier| tier.total).sum();
    let blocks_free: u64 = space.tiers.iter().map(|tier| tier.free + tier.pending).sum();
    StatFs {
        blocks,
        blocks_free: blocks_free.min(blocks),
        blocks_available: promisable.min(blocks_free),
        inodes_used: space.inodes_used,
        inodes_free: space.inodes_free,
    }
}

/// Whether the inode still exists in the store.
pub(crate) fn exists(store: &Store, key: InodeKey) -> Result<bool, StoreError> {
    match store.get_key(key) {
        Ok(_) => Ok(true),
        Err(StoreError::NoInode(_)) => Ok(false),
        Err(error) => Err(error),
    }
}
