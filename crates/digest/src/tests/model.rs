//! A file system in memory that does one operation after another, the obvious way.

use crate::{Fate, Op, Plan, Slot, View};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use varve_format::{
    DIR_SIZE, EntryFlags, FallocateMode, FileKind, Generation, Ino, InodeAttr, InodeKey, LogOp, SessionId,
    SetAttrMask,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Session(pub(super) u64);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct File {
    pub(super) attr: InodeAttr,
    data: Vec<u8>,
    pub(super) names: BTreeMap<Vec<u8>, InodeKey>,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    target: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Model {
    pub(super) files: BTreeMap<Ino, File>,
    pub(super) reserved: BTreeSet<Ino>,
    held: BTreeSet<(Session, InodeKey)>,
}

/// Of a new inode.
fn size_at_first(attr: &InodeAttr, target: &[u8]) -> u64 {
    if attr.is_dir() {
        DIR_SIZE
    } else {
        target.len() as u64
    }
}

const GENERATION: Generation = Generation(3);

fn attr(key: InodeKey, mode: u32, time: i64) -> InodeAttr {
    InodeAttr {
        key,
        mode,
        uid: 0,
        gid: 0,
        nlink: 1,
        size_bytes: 0,
        sectors: 0,
        rdev: 0,
        parent: Ino(0),
        atime_ns: time,
        mtime_ns: time,
        ctime_ns: time,
        btime_ns: time,
    }
}

fn empty(attr: InodeAttr) -> File {
    File {
        attr,
        data: Vec::new(),
        names: BTreeMap::new(),
        xattrs: BTreeMap::new(),
        target: Vec::new(),
    }
}

impl Model {
    pub(super) fn new() -> Self {
        let root = InodeAttr {
            nlink: 2,
            parent: Ino(1),
            ..attr(InodeKey::ROOT, 0o040_755, 0)
        };
        let reserved: BTreeSet<Ino> = (2..30).map(Ino).collect();
        let held = reserved
            .iter()
            .map(|ino| {
                (
                    Session(1),
                    InodeKey {
                        ino: *ino,
                        generation: GENERATION,
                    },
                )
            })
            .collect();
        Self {
            files: BTreeMap::from([(Ino(1), empty(root))]),
            reserved,
            held,
        }
    }

    pub(super) fn hold(&mut self, session: Session, key: InodeKey) {
        self.held.insert((session, key));
    }

    pub(super) fn make(&mut self, dir: InodeKey, name: &[u8], key: InodeKey, mode: u32) {
        let op = Op {
            seq: varve_format::LogSeq(0),
            time_ns: 0,
            flags: EntryFlags::empty(),
            op: super::create(dir, name, key, mode),
            left: None,
        };
        assert!(self.transaction(Session(1), &[op]));
    }

    /// Returns the differences from `other`, short enough to read.
    pub(super) fn differences(&self, other: &Self) -> Vec<String> {
        let mut found = Vec::new();
        let inos: BTreeSet<_> = self.files.keys().chain(other.files.keys()).collect();
        for ino in inos {
            match (self.files.get(ino), other.files.get(ino)) {
                (Some(a), Some(b)) if a == b => {}
                (Some(a), Some(b)) => {
                    let byte = a.data.iter().zip(&b.data).position(|(a, b)| a != b);
                    let rest = (&a.attr, &b.attr, &a.names, &b.names, &a.xattrs, &b.xattrs);
                    found.push(format!("{ino}: byte {byte:?}, {rest:?}"));
                }
                (a, b) => found.push(format!("{ino}: {} {}", a.is_some(), b.is_some())),
            }
        }
        if self.reserved != other.reserved || self.held != other.held {
            found.push(format!("{:?} {:?}", self.reserved, other.reserved));
            found.push(format!("{:?}", self.held.symmetric_difference(&other.held)));
        }
        found
    }

    fn file(&mut self, key: InodeKey) -> Option<&mut File> {
        self.files.get_mut(&key.ino).filter(|file| file.attr.key == key)
    }

    fn dir(&mut self, key: InodeKey) -> Option<&mut File> {
        self.file(key)
            .filter(|file| file.attr.is_dir() && file.attr.nlink > 0)
    }

    fn regular(&mut self, key: InodeKey) -> Option<&mut File> {
        self.file(key)
            .filter(|file| file.attr.kind() == FileKind::Regular)
    }

    fn touch_dir(&mut self, key: InodeKey, time: i64) -> Option<&mut File> {
        let dir = self.dir(key)?;
        dir.attr.mtime_ns = time;
        dir.attr.ctime_ns = time;
        Some(dir)
    }

    /// All or nothing.
    pub(super) fn transaction(&mut self, session: Session, ops: &[Op<'_>]) -> bool {
        let before = self.clone();
        let done = ops.iter().all(|op| self.apply(session, op).is_some());
        if !done {
            *self = before;
        }
        done
    }

    fn drop_if_unused(&mut self, key: InodeKey) {
        let held = self.held.iter().any(|(_, held)| *held == key);
        if !held && self.files.get(&key.ino).is_some_and(|file| file.attr.nlink == 0) {
            self.files.remove(&key.ino);
        }
    }

    fn remove_name(&mut self, session: Session, dir: InodeKey, key: InodeKey, op: &Op<'_>) -> Option<()> {
        let victim = self.file(key)?;
        if victim.attr.is_dir() {
            if !victim.names.is_empty() {
                return None;
            }
            victim.attr.nlink = 0;
            self.dir(dir)?.attr.nlink -= 1;
        } else {
            victim.attr.nlink -= 1;
        }
        let victim = self.file(key)?;
        victim.attr.ctime_ns = op.time_ns;
        if victim.attr.nlink == 0 && op.flags.contains(EntryFlags::LAST_CLOSED) {
            self.held.remove(&(session, key));
        }
        self.drop_if_unused(key);
        Some(())
    }

    fn apply(&mut self, session: Session, op: &Op<'_>) -> Option<()> {
        let time = op.time_ns;
        let cleared = |file: &mut File| {
            if op.flags.contains(EntryFlags::CLEAR_SUID) {
                file.attr.mode &= !0o4000;
            }
            if op.flags.contains(EntryFlags::CLEAR_SGID) {
                file.attr.mode &= !0o2000;
            }
        };
        let touched = |file: &mut File| {
            file.attr.mtime_ns = time;
            file.attr.ctime_ns = time;
            cleared(file);
            file.xattrs.remove(varve_format::XATTR_CAPABILITY);
            file.attr.size_bytes = file.data.len() as u64;
        };
        match op.op {
            LogOp::Noop => {}
            LogOp::Share { .. } | LogOp::Unshare { .. } | LogOp::Defrag { .. } => {
                unreachable!("no log has it")
            }
            LogOp::Write { key, offset, data } => {
                let file = self.regular(key)?;
                let (start, end) = (offset as usize, offset as usize + data.len());
                if file.data.len() < end {
                    file.data.resize(end, 0);
                }
                file.data[start..end].copy_from_slice(data);
                touched(file);
            }
            LogOp::Truncate { key, size } => {
                let file = self.regular(key)?;
                file.data.resize(size as usize, 0);
                touched(file);
            }
            LogOp::Fallocate {
                key,
                mode,
                offset,
                len,
            } => {
                let file = self.regular(key)?;
                let (start, end) = (offset as usize, (offset + len) as usize);
                if mode.grows() && file.data.len() < end {
                    file.data.resize(end, 0);
                }
                if !matches!(mode, FallocateMode::Allocate | FallocateMode::AllocateKeepSize) {
                    let end = end.min(file.data.len());
                    file.data[start.min(end)..end].fill(0);
                }
                touched(file);
            }
            LogOp::SetAttr { key, attr } => {
                let file = self.file(key)?;
                if attr.mask.contains(SetAttrMask::MODE) {
                    file.attr.mode = (file.attr.mode & !0o7777) | attr.mode;
                }
                if attr.mask.contains(SetAttrMask::MTIME) {
                    file.attr.mtime_ns = attr.mtime_ns;
                }
                file.attr.ctime_ns = time;
                cleared(file);
            }
            LogOp::SetXattr { key, name, value } => {
                let file = self.file(key)?;
                file.xattrs.insert(name.to_vec(), value.to_vec());
                file.attr.ctime_ns = time;
            }
            LogOp::RemoveXattr { key, name } => {
                let file = self.file(key)?;
                if file.xattrs.remove(name).is_some() {
                    file.attr.ctime_ns = time;
                } else if name != varve_format::XATTR_CAPABILITY {
                    return None;
                }
            }
            LogOp::Create {
                dir,
                name,
                key,
                mode,
                target,
                ..
            } => {
                if !self.reserved.contains(&key.ino) || key.generation != GENERATION {
                    return None;
                }
                let mut file = empty(attr(key, mode, time));
                file.target = target.to_vec();
                file.attr.size_bytes = size_at_first(&file.attr, target);
                self.dir(dir)?;
                if name.is_empty() {
                    file.attr.nlink = 0;
                } else {
                    let parent = self.touch_dir(dir, time)?;
                    if parent.names.insert(name.to_vec(), key).is_some() {
                        return None;
                    }
                    if file.attr.is_dir() {
                        parent.attr.nlink += 1;
                        file.attr.nlink = 2;
                        file.attr.parent = dir.ino;
                    }
                }
                self.reserved.remove(&key.ino);
                self.files.insert(key.ino, file);
            }
            LogOp::Link { dir, name, key } => {
                self.file(key).filter(|file| !file.attr.is_dir())?;
                if self
                    .touch_dir(dir, time)?
                    .names
                    .insert(name.to_vec(), key)
                    .is_some()
                {
                    return None;
                }
                let file = self.file(key)?;
                file.attr.nlink += 1;
                file.attr.ctime_ns = time;
            }
            LogOp::Unlink { dir, name, key } => {
                if self.touch_dir(dir, time)?.names.remove(name) != Some(key) {
                    return None;
                }
                self.remove_name(session, dir, key, op)?;
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
                self.rename(
                    session,
                    op,
                    (dir, name, key),
                    (new_dir, new_name, victim),
                    exchange,
                )?;
            }
            LogOp::Forget { key } => {
                self.file(key).filter(|file| file.attr.nlink == 0)?;
                self.held.remove(&(session, key));
                self.drop_if_unused(key);
            }
        }
        Some(())
    }

    fn rename(
        &mut self,
        session: Session,
        op: &Op<'_>,
        (dir, name, key): (InodeKey, &[u8], InodeKey),
        (new_dir, new_name, victim): (InodeKey, &[u8], Option<InodeKey>),
        exchange: bool,
    ) -> Option<()> {
        let found = self.dir(dir)?.names.get(name).copied();
        let there = self.dir(new_dir)?.names.get(new_name).copied();
        if found != Some(key) || there != victim {
            return None;
        }
        if victim == Some(key) {
            return Some(());
        }
        let is_dir = self.file(key)?.attr.is_dir();
        let victim_is_dir = match victim {
            Some(victim) => Some(self.file(victim)?.attr.is_dir()),
            None => None,
        };
        if dir != new_dir && (is_dir || (exchange && victim_is_dir == Some(true))) {
            return None;
        }
        self.touch_dir(dir, op.time_ns)?.names.remove(name);
        self.touch_dir(new_dir, op.time_ns)?
            .names
            .insert(new_name.to_vec(), key);
        self.file(key)?.attr.ctime_ns = op.time_ns;
        if let (Some(victim), true) = (victim, exchange) {
            self.dir(dir)?.names.insert(name.to_vec(), victim);
            self.file(victim)?.attr.ctime_ns = op.time_ns;
        } else if let Some(victim) = victim {
            if victim_is_dir != Some(is_dir) {
                return None;
            }
            self.remove_name(session, new_dir, victim, op)?;
        }
        Some(())
    }

    /// Does what a plan says, and checks that the plan keeps its promises.
    pub(super) fn carry_out(&mut self, plan: &Plan<'_>) {
        for inode in plan.inodes.iter().filter(|inode| inode.fate == Fate::Made) {
            let key = inode.attr.key;
            assert!(self.reserved.remove(&key.ino));
            let mut file = empty(inode.attr.clone());
            // As the store has it; data makes it longer.
            file.attr.size_bytes = size_at_first(&inode.attr, b"");
            file.target = inode.target.to_vec();
            assert!(self.files.insert(key.ino, file).is_none());
        }
        for change in &plan.names {
            let names = &mut self.files.get_mut(&change.dir).unwrap().names;
            let before = match change.new {
                Some((key, _)) => names.insert(change.name.to_vec(), key),
                None => names.remove(&change.name[..]),
            };
            assert_eq!(before, change.old);
            if let Some((key, kind)) = change.new {
                assert_eq!(self.files[&key.ino].attr.kind(), kind);
            }
        }
        for key in &plan.vanished {
            self.held.retain(|(_, held)| held != key);
            assert!(self.reserved.remove(&key.ino));
        }
        for inode in &plan.inodes {
            let key = inode.attr.key;
            for session in &inode.left {
                self.held.remove(&(Session(session.0), key));
            }
            match inode.fate {
                Fate::Deleted => assert!(self.files.remove(&key.ino).is_some()),
                Fate::Made | Fate::Changed => {
                    let file = self.files.get_mut(&key.ino).unwrap();
                    assert_eq!(inode.old.is_some(), inode.fate == Fate::Changed);
                    file.carry_out(inode);
                }
            }
        }
    }
}

impl File {
    fn carry_out(&mut self, plan: &crate::InodePlan<'_>) {
        if plan.attr.kind() == FileKind::Regular {
            if let Some(size) = plan.file.truncate {
                assert!(size <= self.data.len() as u64);
                self.data.truncate(size as usize);
            }
            for hole in &plan.file.holes {
                let end = ((hole.offset + hole.len) as usize).min(self.data.len());
                self.data[(hole.offset as usize).min(end)..end].fill(0);
            }
            let mut from = 0;
            for (offset, piece) in &plan.file.pieces {
                let piece = piece.here().unwrap();
                assert!(*offset >= from && !piece.is_empty());
                from = offset + piece.len() as u64;
                if (self.data.len() as u64) < from {
                    self.data.resize(from as usize, 0);
                }
                self.data[*offset as usize..from as usize].copy_from_slice(piece);
            }
            // Only what keeps a block that was written to may lie behind the end.
            let kept = plan
                .file
                .pieces
                .last()
                .is_some_and(|(_, piece)| piece.here() == Some(&[0]));
            assert!(self.data.len() as u64 <= plan.file.size || kept);
            self.data.resize(plan.file.size as usize, 0);
        }
        for (name, value) in &plan.xattrs {
            match value {
                Some(value) => self.xattrs.insert(name.to_vec(), value.to_vec()),
                None => self.xattrs.remove(*name),
            };
        }
        self.attr = plan.attr.clone();
    }
}

impl View for Model {
    type Error = Infallible;

    fn slot(&mut self, ino: Ino) -> Result<Slot, Infallible> {
        Ok(match self.files.get(&ino) {
            Some(file) => Slot::Used(file.attr.clone()),
            None if self.reserved.contains(&ino) => Slot::Reserved(GENERATION),
            None => Slot::Free(GENERATION),
        })
    }

    fn lookup(&mut self, dir: Ino, name: &[u8]) -> Result<Option<InodeKey>, Infallible> {
        Ok(self.files[&dir].names.get(name).copied())
    }

    fn any_name(&mut self, dir: Ino, gone: &mut dyn FnMut(&[u8]) -> bool) -> Result<bool, Infallible> {
        Ok(self.files[&dir].names.keys().any(|name| !gone(name)))
    }

    fn has_xattr(&mut self, ino: Ino, name: &[u8]) -> Result<bool, Infallible> {
        Ok(self.files[&ino].xattrs.contains_key(name))
    }

    fn held(&mut self, key: InodeKey, except: &[SessionId]) -> bool {
        self.held
            .iter()
            .any(|(session, held)| *held == key && !except.contains(&SessionId(session.0)))
    }
}
