//! Requests that only read. Each checks that the session may: by its leases, by what it has looked up, by
//! permission bits.

use crate::error::no;
use crate::kernel::KernelFs;
use crate::placement::Use;
use crate::session::state::Session;
use std::sync::Arc;
use varve_format::{BLOCK_BYTES, ExtentFlags, FileBlock, FileKind, InodeAttr, InodeKey, NAME_MAX, SessionId};
use varve_ipc::{DATA_MAX, DirEntry, IpcError, MappedExtent, StatFs};
use varve_store::StoreError;

/// Most entries of one answer to `ReadDir`.
const ENTRIES_MAX: u32 = 1024;
/// Most extents of one answer to `MapExtents`.
const EXTENTS_MAX: u32 = 8192;
/// Most bytes of names and values in one answer to `Xattrs`.
const XATTR_BYTES_MAX: usize = DATA_MAX;
/// Names and values.
type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// Search permission.
const SEARCH: u32 = 1;
/// Read permission.
const READ: u32 = 4;

impl KernelFs {
    /// What a client is told whose read failed. One sector that cannot be read is one file's damage: the pool
    /// goes on.
    fn unreadable(&self, error: &StoreError) -> IpcError {
        if error.is_failed_read() {
            // The device has counted it.
            crate::error::refuse(error)
        } else {
            self.refused(error)
        }
    }

    /// The session must have a lease on `key`: EAGAIN if it has none (any more), ESTALE if it may not even
    /// name it or nothing is there: the leases of what another thread of the session removed are forgotten
    /// while this one has them still.
    fn leased(&self, session: &Session, key: InodeKey) -> Result<(), IpcError> {
        if !session.knows(key) {
            return Err(no(libc::ESTALE));
        }
        if self.locked().table.mode(session.id, key).is_some() {
            return Ok(());
        }
        Err(match self.store.get_key(key) {
            Ok(_) => no(libc::EAGAIN),
            Err(error) => self.refused(&error),
        })
    }

    fn readable(&self, session: &Session, key: InodeKey) -> Result<InodeAttr, IpcError> {
        let attr = self
            .store
            .get_key(key)
            .map_err(|error| self.unreadable(&error))?
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
        let attr = self
            .store
            .get_key(dir)
            .map_err(|error| self.unreadable(&error))?
            .attr;
        if !attr.is_dir() {
            return Err(no(libc::ENOTDIR));
        }
        if !session.may(&attr, SEARCH) {
            return Err(no(libc::EACCES));
        }
        if name == b".." {
            // Only the daemon knows the generation that goes with a parent's number.
            let parent = self
                .store
                .get(attr.parent)
                .map_err(|error| self.unreadable(&error))?
                .attr;
            session.learn(parent.key);
            return Ok(Some(parent));
        }
        let found = self
            .store
            .dir_lookup(dir.ino, name)
            .map_err(|error| self.unreadable(&error))?;
        let Some(item) = found else { return Ok(None) };
        session.learn(item.key);
        match self.store.get_key(item.key) {
            Ok(inode) => Ok(Some(inode.attr)),
            Err(error) => Err(self.unreadable(&error)),
        }
    }

    pub(crate) fn get_attr(&self, session: &Arc<Session>, key: InodeKey) -> Result<InodeAttr, IpcError> {
        if !session.knows(key) {
            return Err(no(libc::ESTALE));
        }
        self.attr_of(session, key)
    }

    pub(crate) fn read_dir(
        &self,
        session: &Session,
        dir: InodeKey,
        cookie: u64,
        max: u32,
        attrs: bool,
    ) -> Result<Vec<DirEntry>, IpcError> {
        self.leased(session, dir)?;
        if !self.readable(session, dir)?.is_dir() {
            return Err(no(libc::ENOTDIR));
        }
        let max = max.clamp(1, ENTRIES_MAX) as usize;
        let items = self
            .store
            .dir_iter(dir.ino, cookie, max)
            .map_err(|error| self.unreadable(&error))?;
        let mut entries = Vec::with_capacity(items.len());
        for item in items {
            // Attributes need search permission on the directory, which the next lookup checks.
            let told =
                attrs && session.privileged && !self.locked().table.written_by_other(session.id, item.key);
            let attr = if told {
                self.store.get_key(item.key).ok().map(|inode| inode.attr)
            } else {
                None
            };
            entries.push(DirEntry {
                name: item.name,
                key: item.key,
                kind: item.kind,
                next_cookie: item.cookie,
                attr,
            });
        }
        Ok(entries)
    }

    pub(crate) fn read_link(&self, session: &Session, key: InodeKey) -> Result<Vec<u8>, IpcError> {
        if !session.knows(key) {
            return Err(no(libc::ESTALE));
        }
        let attr = self
            .store
            .get_key(key)
            .map_err(|error| self.unreadable(&error))?
            .attr;
        if attr.kind() != FileKind::Symlink {
            return Err(no(libc::EINVAL));
        }
        self.store
            .read_link(key.ino)
            .map_err(|error| self.unreadable(&error))
    }

    pub(crate) fn xattrs(&self, session: &Session, key: InodeKey) -> Result<Xattrs, IpcError> {
        self.leased(session, key)?;
        let attr = self
            .store
            .get_key(key)
            .map_err(|error| self.unreadable(&error))?
            .attr;
        let readable = session.rights(&attr) & READ != 0;
        let list = self
            .store
            .xattr_list(key.ino)
            .map_err(|error| self.unreadable(&error))?;
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
                .map_err(|error| self.unreadable(&error))?;
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
        self.readable(session, key)?;
        if let Some(segments) = &session.segments {
            return self.map_window(session, segments, key, from);
        }
        // Before the tree is read: whatever replaces these blocks from here on tells the session.
        if !self.locked().table.note_mapped(session.id, key) {
            return Err(no(libc::EAGAIN));
        }
        let max = max.clamp(1, EXTENTS_MAX) as usize;
        let extents = self
            .store
            .map(key.ino, from, max)
            .map_err(|error| self.unreadable(&error))?;
        let complete = extents.len() < max;
        for extent in &extents {
            self.placer
                .policy
                .used(key, extent.file_block, extent.len.into(), Use::Mapped);
        }
        let mapped = extents.into_iter().map(|extent| MappedExtent {
            file_block: extent.file_block,
            len: extent.len,
            tier: extent.tier,
            block: extent.block,
            unwritten: extent.flags.contains(ExtentFlags::UNWRITTEN),
        });
        Ok((mapped.collect(), complete))
    }

    pub(crate) fn read_data(
        &self,
        session: &Session,
        key: InodeKey,
        offset: u64,
        len: u32,
    ) -> Result<Vec<u8>, IpcError> {
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
        let got = self
            .store
            .read(key.ino, offset, &mut data)
            .map_err(|error| self.unreadable(&error))?;
        data.truncate(got);
        let (first, end) = (offset / BLOCK_BYTES, (offset + got as u64).div_ceil(BLOCK_BYTES));
        self.placer
            .policy
            .used(key, FileBlock(first), end - first, Use::Read);
        Ok(data)
    }

    pub(crate) fn stat_fs(&self, asks: SessionId) -> StatFs {
        let space = self.store.space();
        let blocks = space.tiers.iter().map(|tier| tier.total).sum();
        let blocks_free: u64 = space.tiers.iter().map(|tier| tier.free + tier.pending).sum();
        StatFs {
            blocks,
            blocks_free: blocks_free.min(blocks),
            blocks_available: self.promisable_to(asks).min(blocks_free),
            inodes_used: space.inodes_used,
            inodes_free: space.inodes_free,
        }
    }

    /// Whether the store still knows the inode.
    pub(crate) fn exists(&self, key: InodeKey) -> Result<bool, StoreError> {
        match self.store.get_key(key) {
            Ok(_) => Ok(true),
            Err(StoreError::NoInode(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
