//! The rights of the caller of a forwarded operation: POSIX's checks in POSIX's order, with its credentials.
//! Executes nothing.

use super::types::{Check, Client, Leases, refuse};
use crate::config::DedupScope;
use varve_format::{FileKind, InodeAttr, InodeKey, LINK_MAX, LogOp, SetAttr, SetAttrMask, is_whiteout};
use varve_ipc::Cred;
use varve_store::{StoreError, Tx};

pub(super) fn live(tx: &Tx<'_>, key: InodeKey) -> Check<InodeAttr> {
    match tx.get_key(key) {
        Ok(inode) => Ok(inode.attr),
        Err(StoreError::NoInode(_) | StoreError::Invalid(_)) => refuse(libc::ESTALE),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn check_dir(tx: &Tx<'_>, key: InodeKey) -> Check<InodeAttr> {
    let attr = live(tx, key)?;
    if !attr.is_dir() {
        return refuse(libc::ENOTDIR);
    }
    Ok(attr)
}

const READ_BIT_SHIFTS: [u32; 3] = [6, 3, 0];
const MAY_READ: u32 = 4;
const MAY_WRITE: u32 = 2;
pub(super) const MAY_SEARCH: u32 = 1;

/// Whether the permission bits grant `want` to `cred`. The superuser may do everything with directories and
/// data.
fn permits(attr: &InodeAttr, cred: &Cred, want: u32) -> bool {
    if cred.uid == 0 {
        return true;
    }
    let [owner, group, other] = READ_BIT_SHIFTS;
    let shift = if attr.uid == cred.uid {
        owner
    } else if cred.in_group(attr.gid) {
        group
    } else {
        other
    };
    (attr.mode >> shift) & want == want
}

pub(super) fn need(attr: &InodeAttr, cred: &Cred, want: u32) -> Check<()> {
    if permits(attr, cred, want) {
        Ok(())
    } else {
        refuse(libc::EACCES)
    }
}

fn owner(attr: &InodeAttr, cred: &Cred) -> bool {
    cred.uid == 0 || cred.uid == attr.uid
}

/// One caller's rights.
pub(super) struct Caller<'c, 's> {
    pub(super) tx: &'c Tx<'s>,
    pub(super) client: Client,
    pub(super) cred: &'c Cred,
    pub(super) leases: &'c dyn Leases,
    pub(super) dedup_scope: DedupScope,
}

impl Caller<'_, '_> {
    /// Checks an operation, and returns the operation to execute.
    pub(super) fn check<'o>(&self, op: LogOp<'o>) -> Check<LogOp<'o>> {
        match op {
            LogOp::Noop => {}
            LogOp::Write { key, .. } | LogOp::Truncate { key, .. } | LogOp::Fallocate { key, .. } => {
                self.data(key)?
            }
            LogOp::Share {
                key, source, compare, ..
            } => self.share(key, source, compare)?,
            LogOp::Unshare { key, .. } | LogOp::Defrag { key, .. } => {
                let attr = live(self.tx, key)?;
                // Who owns the file may, as with a comparison: no byte of it changes.
                if !owner(&attr, self.cred) || attr.kind() != FileKind::Regular {
                    self.data(key)?;
                }
            }
            LogOp::SetAttr { key, attr } => {
                let attr = self.set_attr(&live(self.tx, key)?, attr)?;
                return Ok(LogOp::SetAttr { key, attr });
            }
            LogOp::SetXattr { key, name, .. } | LogOp::RemoveXattr { key, name } => self.xattr(key, name)?,
            LogOp::Create {
                dir,
                name,
                mode,
                uid,
                rdev,
                ..
            } => self.create(dir, name, (mode, rdev), uid)?,
            LogOp::Link { dir, name, key } => self.link(dir, name, key)?,
            LogOp::Unlink { dir, name, key } => self.unlink(dir, name, key)?,
            LogOp::Rename { .. } => self.rename(&op)?,
            LogOp::Forget { key } => {
                live(self.tx, key)?;
            }
        }
        Ok(op)
    }

    /// Checks write access to file data. For privileged clients and mounts it was checked when the file was
    /// opened, by the client or the kernel; for others it is checked here again.
    fn data(&self, key: InodeKey) -> Check<()> {
        let attr = live(self.tx, key)?;
        match attr.kind() {
            FileKind::Regular => {}
            FileKind::Directory => return refuse(libc::EISDIR),
            _ => return refuse(libc::EINVAL),
        }
        let opened = || self.leases.had(self.client.session, key) & MAY_WRITE != 0;
        if self.client.privileged || owner(&attr, self.cred) || opened() {
            return Ok(());
        }
        self.need(&attr, MAY_WRITE)
    }

    /// Checks read access to the source of a share, and write access to its target. Who owns the target may
    /// have it compared without write access, as in Linux; files out of the scope are not even compared.
    fn share(&self, key: InodeKey, source: InodeKey, compare: bool) -> Check<()> {
        let (attr, from) = (live(self.tx, key)?, live(self.tx, source)?);
        if attr.is_dir() || from.is_dir() {
            return refuse(libc::EISDIR);
        }
        if attr.kind() != FileKind::Regular || from.kind() != FileKind::Regular {
            return refuse(libc::EINVAL);
        }
        let opened = self.leases.had(self.client.session, source) & MAY_READ != 0;
        if !self.client.privileged && !owner(&from, self.cred) && !opened {
            self.need(&from, MAY_READ)?;
        }
        if !compare || !owner(&attr, self.cred) {
            self.data(key)?;
        }
        if compare && !self.dedup_scope.admits(&attr, &from) {
            return refuse(libc::EPERM);
        }
        Ok(())
    }

    fn need(&self, attr: &InodeAttr, want: u32) -> Check<()> {
        if self.client.checked {
            Ok(())
        } else {
            need(attr, self.cred, want)
        }
    }

    fn set_attr(&self, old: &InodeAttr, mut new: SetAttr) -> Check<SetAttr> {
        if self.client.checked {
            return Ok(new);
        }
        let owner = owner(old, self.cred);
        let root = self.cred.uid == 0;
        if new.mask.contains(SetAttrMask::UID) && !root && !(owner && new.uid == old.uid) {
            return refuse(libc::EPERM);
        }
        if new.mask.contains(SetAttrMask::GID)
            && !root
            && !(owner && (new.gid == old.gid || self.cred.in_group(new.gid)))
        {
            return refuse(libc::EPERM);
        }
        if new.mask.contains(SetAttrMask::MODE) {
            if !owner {
                return refuse(libc::EPERM);
            }
            let group = if new.mask.contains(SetAttrMask::GID) {
                new.gid
            } else {
                old.gid
            };
            if !root && !self.cred.in_group(group) {
                new.mode &= !0o2000;
            }
        }
        let times = SetAttrMask::ATIME | SetAttrMask::MTIME;
        if new.mask.intersects(times) && !owner && !permits(old, self.cred, MAY_WRITE) {
            return refuse(libc::EACCES);
        }
        Ok(new)
    }

    fn xattr(&self, key: InodeKey, name: &[u8]) -> Check<()> {
        let attr = live(self.tx, key)?;
        if name.starts_with(b"user.") {
            if !matches!(attr.kind(), FileKind::Regular | FileKind::Directory) {
                return refuse(libc::EPERM);
            }
            let sticky = attr.is_dir() && attr.mode & 0o1000 != 0;
            if sticky && !owner(&attr, self.cred) {
                return refuse(libc::EPERM);
            }
            return self.need(&attr, MAY_WRITE);
        }
        let allowed = if name.starts_with(b"trusted.") || name.starts_with(b"security.") {
            self.cred.uid == 0
        } else {
            owner(&attr, self.cred)
        };
        if allowed { Ok(()) } else { refuse(libc::EPERM) }
    }

    /// Checks a directory that names are looked up in.
    fn search(&self, dir: InodeKey) -> Check<InodeAttr> {
        let attr = check_dir(self.tx, dir)?;
        self.need(&attr, MAY_SEARCH)?;
        Ok(attr)
    }

    /// Checks that `dir` may get a name.
    fn may_add(&self, dir: &InodeAttr) -> Check<()> {
        if dir.nlink == 0 {
            return refuse(libc::ENOENT);
        }
        self.need(dir, MAY_WRITE | MAY_SEARCH)
    }

    /// Checks that `dir` may lose the name of `attr`.
    fn may_remove(&self, dir: &InodeAttr, attr: &InodeAttr) -> Check<()> {
        self.need(dir, MAY_WRITE | MAY_SEARCH)?;
        if dir.mode & 0o1000 != 0 && !owner(dir, self.cred) && self.cred.uid != attr.uid {
            return refuse(libc::EPERM);
        }
        Ok(())
    }

    fn lookup(&self, dir: InodeKey, name: &[u8]) -> Check<Option<InodeKey>> {
        Ok(self.tx.dir_lookup(dir.ino, name)?.map(|item| item.key))
    }

    fn create(&self, dir: InodeKey, name: &[u8], (mode, rdev): (u32, u32), uid: u32) -> Check<()> {
        let parent = self.search(dir)?;
        if !name.is_empty() && self.lookup(dir, name)?.is_some() {
            return refuse(libc::EEXIST);
        }
        self.may_add(&parent)?;
        let kind = FileKind::from_mode(mode);
        let device =
            matches!(kind, Some(FileKind::CharDevice | FileKind::BlockDevice)) && !is_whiteout(mode, rdev);
        if (device || uid != self.cred.uid) && self.cred.uid != 0 {
            return refuse(libc::EPERM);
        }
        if kind == Some(FileKind::Directory) && parent.nlink >= LINK_MAX {
            return refuse(libc::EMLINK);
        }
        Ok(())
    }

    fn link(&self, dir: InodeKey, name: &[u8], key: InodeKey) -> Check<()> {
        let attr = live(self.tx, key)?;
        let parent = self.search(dir)?;
        if self.lookup(dir, name)?.is_some() {
            return refuse(libc::EEXIST);
        }
        self.may_add(&parent)?;
        if attr.is_dir() {
            return refuse(libc::EPERM);
        }
        if attr.nlink >= LINK_MAX {
            return refuse(libc::EMLINK);
        }
        Ok(())
    }

    fn unlink(&self, dir: InodeKey, name: &[u8], key: InodeKey) -> Check<()> {
        let parent = self.search(dir)?;
        let attr = self.named(dir, name, key)?;
        self.may_remove(&parent, &attr)?;
        self.empty(&attr)
    }

    /// Returns the attributes of `key`, if `name` names it.
    fn named(&self, dir: InodeKey, name: &[u8], key: InodeKey) -> Check<InodeAttr> {
        match self.lookup(dir, name)? {
            None => refuse(libc::ENOENT),
            Some(other) if other != key => refuse(libc::ESTALE),
            Some(_) => live(self.tx, key),
        }
    }

    fn empty(&self, attr: &InodeAttr) -> Check<()> {
        if attr.is_dir() && !self.tx.dir_iter(attr.key.ino, 0, 1)?.is_empty() {
            return refuse(libc::ENOTEMPTY);
        }
        Ok(())
    }

    /// Whether `key` is `below` or one of its ancestors.
    fn is_above(&self, key: InodeKey, below: InodeKey) -> Check<bool> {
        let mut at = below.ino;
        for _ in 0..=u16::MAX {
            if at == key.ino {
                return Ok(true);
            }
            if at == varve_format::ROOT_INO || at.0 == 0 {
                return Ok(false);
            }
            at = self.tx.get(at)?.attr.parent;
        }
        refuse(libc::ELOOP)
    }

    fn rename(&self, op: &LogOp<'_>) -> Check<()> {
        let LogOp::Rename {
            dir,
            name,
            key,
            new_dir,
            new_name,
            victim,
            exchange,
        } = *op
        else {
            return Ok(());
        };
        let from = self.search(dir)?;
        let to = self.search(new_dir)?;
        let attr = self.named(dir, name, key)?;
        let there = self.lookup(new_dir, new_name)?;
        if exchange && there.is_none() {
            return refuse(libc::ENOENT);
        }
        if there != victim {
            // Without an expected victim the client may have meant not to replace anything.
            return refuse(if victim.is_none() {
                libc::EEXIST
            } else {
                libc::ESTALE
            });
        }
        let victim = victim.filter(|victim| *victim != key);
        let across = dir != new_dir;
        if attr.is_dir() && across && self.is_above(key, new_dir)? {
            return refuse(libc::EINVAL);
        }
        if let Some(victim) = victim
            && across
            && live(self.tx, victim)?.is_dir()
            && self.is_above(victim, dir)?
        {
            return refuse(if exchange { libc::EINVAL } else { libc::ENOTEMPTY });
        }
        self.may_remove(&from, &attr)?;
        match victim {
            None => self.may_add(&to)?,
            Some(victim) => self.may_replace(&attr, &to, &live(self.tx, victim)?, exchange)?,
        }
        if across && attr.is_dir() {
            // The move changes its entry "..".
            self.need(&attr, MAY_WRITE)?;
            if victim.is_none() && to.nlink >= LINK_MAX {
                return refuse(libc::EMLINK);
            }
        }
        Ok(())
    }

    fn may_replace(&self, attr: &InodeAttr, to: &InodeAttr, victim: &InodeAttr, exchange: bool) -> Check<()> {
        self.may_remove(to, victim)?;
        if exchange {
            return Ok(());
        }
        match (attr.is_dir(), victim.is_dir()) {
            (true, false) => refuse(libc::ENOTDIR),
            (false, true) => refuse(libc::EISDIR),
            _ => self.empty(victim),
        }
    }
}
