//! The shared area of the fake daemon: a tree in maps, and what each operation does to it.

use std::collections::{BTreeMap, HashMap};
use varve_format::{
    EntryFlags, EntryHeader, FallocateMode, Ino, InodeAttr, InodeKey, LogOp, MODE_PERM_MASK, SetAttrMask,
    TimeNs,
};

#[derive(Clone)]
pub struct Inode {
    pub attr: InodeAttr,
    pub data: Vec<u8>,
    pub names: BTreeMap<Vec<u8>, InodeKey>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub target: Vec<u8>,
}

pub struct Tree {
    pub inodes: HashMap<InodeKey, Inode>,
}

type Outcome<T> = Result<T, i32>;

fn inode(key: InodeKey, mode: u32, nlink: u32) -> Inode {
    let attr = InodeAttr {
        nlink,
        ..InodeAttr::new(key, mode, 1)
    };
    Inode {
        attr,
        data: Vec::new(),
        names: BTreeMap::new(),
        xattrs: BTreeMap::new(),
        target: Vec::new(),
    }
}

impl Default for Tree {
    fn default() -> Self {
        let mut root = inode(InodeKey::ROOT, 0o040_777, 2);
        root.attr.parent = InodeKey::ROOT.ino;
        Self {
            inodes: HashMap::from([(InodeKey::ROOT, root)]),
        }
    }
}

/// Inodes that must be leased for an operation.
pub fn touched(op: &LogOp<'_>) -> Vec<InodeKey> {
    match *op {
        LogOp::Noop => vec![],
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
        LogOp::Create { dir, key, .. } | LogOp::Link { dir, key, .. } | LogOp::Unlink { dir, key, .. } => {
            vec![dir, key]
        }
        LogOp::Rename {
            dir,
            key,
            new_dir,
            victim,
            ..
        } => {
            let mut keys = vec![dir, new_dir, key];
            keys.extend(victim);
            keys
        }
    }
}

impl Tree {
    pub fn get(&self, key: InodeKey) -> Outcome<&Inode> {
        self.inodes.get(&key).ok_or(libc::ESTALE)
    }

    fn get_mut(&mut self, key: InodeKey) -> Outcome<&mut Inode> {
        self.inodes.get_mut(&key).ok_or(libc::ESTALE)
    }

    pub fn by_ino(&self, ino: Ino) -> InodeKey {
        self.inodes
            .keys()
            .copied()
            .find(|key| key.ino == ino)
            .unwrap_or_default()
    }

    fn touch(&mut self, dir: InodeKey, now: TimeNs) -> Outcome<()> {
        let attr = &mut self.get_mut(dir)?.attr;
        (attr.mtime_ns, attr.ctime_ns) = (now, now);
        Ok(())
    }

    /// One name of `key` went.
    fn unlinked(&mut self, dir: InodeKey, key: InodeKey, now: TimeNs) -> Outcome<()> {
        let victim = self.get_mut(key)?;
        if victim.attr.is_dir() {
            if !victim.names.is_empty() {
                return Err(libc::ENOTEMPTY);
            }
            victim.attr.nlink = 0;
            victim.attr.ctime_ns = now;
            self.get_mut(dir)?.attr.nlink -= 1;
        } else {
            victim.attr.nlink -= 1;
            victim.attr.ctime_ns = now;
        }
        Ok(())
    }

    fn named(&self, dir: InodeKey, name: &[u8], want: Option<InodeKey>) -> Outcome<()> {
        if self.get(dir)?.names.get(name).copied() == want {
            Ok(())
        } else {
            Err(libc::ESTALE)
        }
    }

    pub fn apply(&mut self, header: &EntryHeader, op: &LogOp<'_>) -> Outcome<()> {
        let now = header.time_ns.get();
        let flags = EntryFlags::from_bits_truncate(header.flags);
        match *op {
            LogOp::Noop | LogOp::Forget { .. } => {}
            // This daemon has no shared blocks.
            LogOp::Share { .. } | LogOp::Unshare { .. } | LogOp::Defrag { .. } => {
                return Err(libc::EOPNOTSUPP);
            }
            LogOp::Write { key, offset, data } => {
                let file = self.get_mut(key)?;
                let end = offset as usize + data.len();
                if file.data.len() < end {
                    file.data.resize(end, 0);
                }
                file.data[offset as usize..end].copy_from_slice(data);
                changed(file, flags, now);
            }
            LogOp::Truncate { key, size } => {
                let file = self.get_mut(key)?;
                file.data.resize(size as usize, 0);
                changed(file, flags, now);
            }
            LogOp::Fallocate {
                key,
                mode,
                offset,
                len,
            } => {
                let file = self.get_mut(key)?;
                let end = (offset + len) as usize;
                if mode.grows() && file.data.len() < end {
                    file.data.resize(end, 0);
                }
                if !matches!(mode, FallocateMode::Allocate | FallocateMode::AllocateKeepSize) {
                    let end = end.min(file.data.len());
                    if (offset as usize) < end {
                        file.data[offset as usize..end].fill(0);
                    }
                }
                changed(file, flags, now);
            }
            LogOp::SetAttr { key, attr: new } => {
                let attr = &mut self.get_mut(key)?.attr;
                if new.mask.contains(SetAttrMask::MODE) {
                    attr.mode = (attr.mode & !MODE_PERM_MASK) | new.mode;
                }
                if new.mask.contains(SetAttrMask::UID) {
                    attr.uid = new.uid;
                }
                if new.mask.contains(SetAttrMask::GID) {
                    attr.gid = new.gid;
                }
                if new.mask.contains(SetAttrMask::ATIME) {
                    attr.atime_ns = new.atime_ns;
                }
                if new.mask.contains(SetAttrMask::MTIME) {
                    attr.mtime_ns = new.mtime_ns;
                }
                attr.ctime_ns = now;
            }
            LogOp::SetXattr { key, name, value } => {
                let node = self.get_mut(key)?;
                node.xattrs.insert(name.to_vec(), value.to_vec());
                node.attr.ctime_ns = now;
            }
            LogOp::RemoveXattr { key, name } => {
                let node = self.get_mut(key)?;
                node.xattrs.remove(name).ok_or(libc::ENODATA)?;
                node.attr.ctime_ns = now;
            }
            LogOp::Create {
                dir,
                name,
                key,
                mode,
                uid,
                gid,
                rdev,
                target,
            } => {
                if !name.is_empty() && self.get(dir)?.names.contains_key(name) {
                    return Err(libc::EEXIST);
                }
                if self.inodes.contains_key(&key) {
                    return Err(libc::EINVAL);
                }
                let mut new = inode(key, mode, u32::from(!name.is_empty()));
                new.attr = InodeAttr {
                    uid,
                    gid,
                    rdev,
                    size_bytes: target.len() as u64,
                    ..new.attr
                };
                for time in [
                    &mut new.attr.atime_ns,
                    &mut new.attr.mtime_ns,
                    &mut new.attr.ctime_ns,
                    &mut new.attr.btime_ns,
                ] {
                    *time = now;
                }
                new.target = target.to_vec();
                if new.attr.is_dir() {
                    new.attr.nlink = 2;
                    new.attr.parent = dir.ino;
                    self.get_mut(dir)?.attr.nlink += 1;
                }
                self.inodes.insert(key, new);
                if !name.is_empty() {
                    self.get_mut(dir)?.names.insert(name.to_vec(), key);
                    self.touch(dir, now)?;
                }
            }
            LogOp::Link { dir, name, key } => {
                self.named(dir, name, None)?;
                let attr = &mut self.get_mut(key)?.attr;
                attr.nlink += 1;
                attr.ctime_ns = now;
                self.get_mut(dir)?.names.insert(name.to_vec(), key);
                self.touch(dir, now)?;
            }
            LogOp::Unlink { dir, name, key } => {
                self.named(dir, name, Some(key))?;
                self.unlinked(dir, key, now)?;
                self.get_mut(dir)?.names.remove(name);
                self.touch(dir, now)?;
            }
            LogOp::Rename {
                dir,
                name,
                key,
                new_dir,
                new_name,
                victim,
                exchange,
            } => {
                self.named(dir, name, Some(key))?;
                self.named(new_dir, new_name, victim)?;
                if let (Some(victim), false) = (victim, exchange) {
                    self.unlinked(new_dir, victim, now)?;
                }
                self.get_mut(dir)?.names.remove(name);
                self.get_mut(new_dir)?.names.insert(new_name.to_vec(), key);
                self.moved(key, dir, new_dir, now)?;
                if let (Some(victim), true) = (victim, exchange) {
                    self.get_mut(dir)?.names.insert(name.to_vec(), victim);
                    self.moved(victim, new_dir, dir, now)?;
                }
                self.touch(dir, now)?;
                self.touch(new_dir, now)?;
            }
        }
        Ok(())
    }

    fn moved(&mut self, key: InodeKey, from: InodeKey, to: InodeKey, now: TimeNs) -> Outcome<()> {
        let attr = &mut self.get_mut(key)?.attr;
        attr.ctime_ns = now;
        if attr.is_dir() && from != to {
            attr.parent = to.ino;
            self.get_mut(from)?.attr.nlink -= 1;
            self.get_mut(to)?.attr.nlink += 1;
        }
        Ok(())
    }
}

fn changed(file: &mut Inode, flags: EntryFlags, now: TimeNs) {
    file.attr.size_bytes = file.data.len() as u64;
    (file.attr.mtime_ns, file.attr.ctime_ns) = (now, now);
    if flags.contains(EntryFlags::CLEAR_SUID) {
        file.attr.mode &= !libc::S_ISUID;
    }
    if flags.contains(EntryFlags::CLEAR_SGID) {
        file.attr.mode &= !libc::S_ISGID;
    }
}
