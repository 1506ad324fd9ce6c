//! The operations on names: create, link, unlink, rename. Link counts, parents and times of all inodes
//! concerned are computed here.

use crate::bytes::FileFold;
use crate::fold::{At, Fold, Known, Node, Step, can_link, links};
use crate::op::{Need, Refusal, Stop, View};
use std::collections::BTreeMap;
use varve_format::seeded::{Bug, armed};
use varve_format::{DIR_SIZE, FileKind, Ino, InodeAttr, InodeKey, LogOp, ROOT_INO, is_whiteout};

/// Maximum number of directories that an ancestor check walks.
const DEPTH_MAX: usize = 1 << 16;

/// A rename with its names taken apart.
struct Move<'n> {
    dir: InodeKey,
    name: &'n [u8],
    key: InodeKey,
    is_dir: bool,
    new_dir: InodeKey,
    new_name: &'n [u8],
}

impl<'a, V: View> Fold<'a, V> {
    /// Updates the times of a directory whose names changed, and adds `by` to its link count.
    fn touch_dir(&mut self, dir: InodeKey, at: &At<'_>, by: i32) {
        self.change(dir.ino, |node| {
            node.attr.mtime_ns = at.time_ns;
            node.attr.ctime_ns = at.time_ns;
            links(&mut node.attr, by);
        });
    }

    fn touch_inode(&mut self, key: InodeKey, at: &At<'_>, by: i32) {
        self.change(key.ino, |node| {
            node.attr.ctime_ns = at.time_ns;
            links(&mut node.attr, by);
        });
    }

    /// Returns the inode that `name` names after the operations so far.
    fn now(&mut self, dir: InodeKey, name: &[u8]) -> Step<Option<InodeKey>, V> {
        Ok(self.name(dir.ino, name).map_err(Stop::State)?.now)
    }

    fn names_nothing(&mut self, dir: InodeKey, name: &[u8]) -> Step<(), V> {
        match self.now(dir, name)? {
            None => Ok(()),
            Some(_) => Err(Refusal::Exists.into()),
        }
    }

    fn names_this(&mut self, dir: InodeKey, name: &[u8], key: InodeKey) -> Step<(), V> {
        if self.now(dir, name)? == Some(key) {
            Ok(())
        } else {
            Err(Refusal::NoEntry.into())
        }
    }

    /// Refuses to remove a name from a sticky directory unless the user owns the file or the directory.
    fn sticky_allows(&mut self, at: &At<'_>, dir: InodeKey, key: InodeKey) -> Step<(), V> {
        if at.trusted() {
            return Ok(());
        }
        let parent = &self.live_dir(dir)?.attr;
        if parent.mode & 0o1000 == 0 || parent.uid == at.actor.uid {
            return Ok(());
        }
        if self.live(key)?.attr.uid == at.actor.uid {
            Ok(())
        } else {
            Err(Refusal::NotPermitted.into())
        }
    }

    pub(crate) fn create(&mut self, at: &At<'_>, op: &LogOp<'a>) -> Step<(), V> {
        let LogOp::Create {
            dir,
            name,
            key,
            mode,
            uid,
            gid,
            rdev,
            target,
        } = *op
        else {
            return Err(Refusal::NoInode.into());
        };
        at.need(dir, Need::Write)?;
        at.need(key, Need::Write)?;
        let parent = self.live_dir(dir)?.attr.clone();
        if uid != at.actor.uid && !at.trusted() {
            return Err(Refusal::NotPermitted.into());
        }
        // A directory with the set-group-id bit hands its group on; any other group must be one of the
        // user's.
        let handed_on = parent.mode & 0o2000 != 0 && gid == parent.gid;
        let device = matches!(
            FileKind::from_mode(mode),
            Some(FileKind::CharDevice | FileKind::BlockDevice)
        ) && !is_whiteout(mode, rdev);
        if !at.actor.privileged && (device || !(handed_on || at.grants.may_give(gid))) {
            return Err(Refusal::NotPermitted.into());
        }
        match self.known(key.ino).map_err(Stop::State)? {
            Known::Reserved(generation) if *generation == key.generation => {}
            Known::Node(_) | Known::Vanished(_) => return Err(Refusal::Exists.into()),
            Known::Reserved(_) | Known::Free => return Err(Refusal::NoInode.into()),
        }
        let mut attr = InodeAttr {
            key,
            mode,
            uid,
            gid,
            nlink: u32::from(!name.is_empty()),
            size_bytes: target.len() as u64,
            sectors: 0,
            rdev,
            parent: Ino(0),
            atime_ns: at.time_ns,
            mtime_ns: at.time_ns,
            ctime_ns: at.time_ns,
            btime_ns: at.time_ns,
        };
        at.clear_foreign_sgid(&mut attr);
        if attr.is_dir() {
            can_link(&parent)?;
            attr.nlink = 2;
            attr.size_bytes = DIR_SIZE;
            attr.parent = dir.ino;
        }
        if !name.is_empty() {
            self.names_nothing(dir, name)?;
            self.set_name(dir.ino, name, Some(key));
            self.touch_dir(dir, at, i32::from(attr.is_dir()));
        }
        self.put_new(Node {
            old: None,
            attr,
            gone: false,
            target,
            file: FileFold::default(),
            xattrs: BTreeMap::new(),
            left: Vec::new(),
            changed: true,
            no_capability: true,
            more_bytes: 0,
        });
        Ok(())
    }

    pub(crate) fn link(&mut self, at: &At<'_>, dir: InodeKey, name: &'a [u8], key: InodeKey) -> Step<(), V> {
        at.need(dir, Need::Write)?;
        at.need(key, Need::Links)?;
        self.live_dir(dir)?;
        let attr = &self.live(key)?.attr;
        if attr.is_dir() {
            return Err(Refusal::IsDirectory.into());
        }
        can_link(attr)?;
        self.names_nothing(dir, name)?;
        self.set_name(dir.ino, name, Some(key));
        self.touch_dir(dir, at, 0);
        self.touch_inode(key, at, 1);
        Ok(())
    }

    pub(crate) fn unlink(&mut self, at: &At<'_>, dir: InodeKey, name: &[u8], key: InodeKey) -> Step<(), V> {
        at.need(dir, Need::Write)?;
        at.need(key, Need::Links)?;
        self.live_dir(dir)?;
        self.names_this(dir, name, key)?;
        self.removable(at, dir, key)?;
        self.set_name(dir.ino, name, None);
        self.drop_link(at, dir, key);
        Ok(())
    }

    /// Checks that a name of `key` in `dir` may be removed.
    fn removable(&mut self, at: &At<'_>, dir: InodeKey, key: InodeKey) -> Step<(), V> {
        self.sticky_allows(at, dir, key)?;
        let is_dir = self.live(key)?.attr.is_dir();
        if is_dir && !self.is_empty(key.ino).map_err(Stop::State)? {
            return Err(Refusal::NotEmpty.into());
        }
        Ok(())
    }

    /// Updates link counts and times after `key` has lost a name in `dir`.
    fn drop_link(&mut self, at: &At<'_>, dir: InodeKey, key: InodeKey) {
        let is_dir = matches!(self.nodes.get(&key.ino), Some(Known::Node(node)) if node.attr.is_dir());
        self.touch_dir(dir, at, -i32::from(is_dir));
        self.touch_inode(key, at, if is_dir { -2 } else { -1 });
        let nameless = matches!(self.nodes.get(&key.ino), Some(Known::Node(node)) if node.attr.nlink == 0);
        if nameless {
            let closed = at.flags.contains(varve_format::EntryFlags::LAST_CLOSED);
            self.leave(at, key, closed);
        }
    }

    pub(crate) fn rename(&mut self, at: &At<'_>, op: &LogOp<'a>) -> Step<(), V> {
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
            return Err(Refusal::NoEntry.into());
        };
        at.need(dir, Need::Write)?;
        at.need(new_dir, Need::Write)?;
        self.live_dir(dir)?;
        self.live_dir(new_dir)?;
        self.names_this(dir, name, key)?;
        if self.now(new_dir, new_name)? != victim {
            return Err(match victim {
                None => Refusal::Exists,
                Some(_) => Refusal::NoEntry,
            }
            .into());
        }
        self.sticky_allows(at, dir, key)?;
        if victim == Some(key) {
            // Two names of one inode: POSIX does nothing.
            return Ok(());
        }
        let is_dir = self.live(key)?.attr.is_dir();
        let plan = Move {
            dir,
            name,
            key,
            is_dir,
            new_dir,
            new_name,
        };
        self.may_move(at, key, is_dir, dir, new_dir)?;
        match victim {
            Some(other) if exchange => self.exchange(at, &plan, other),
            _ => self.replace(at, &plan, victim),
        }
    }

    /// Checks that a directory changes its parent only by a forwarded operation, and never to its own
    /// descendant.
    fn may_move(
        &mut self,
        at: &At<'_>,
        key: InodeKey,
        is_dir: bool,
        from: InodeKey,
        to: InodeKey,
    ) -> Step<(), V> {
        if !is_dir || from == to {
            return Ok(());
        }
        if !at.actor.forwarded {
            return Err(Refusal::DirectoryMove.into());
        }
        let mut above = to.ino;
        for _ in 0..DEPTH_MAX {
            if above == key.ino {
                return Err(Refusal::Loop.into());
            }
            if above == ROOT_INO {
                return Ok(());
            }
            match self.known(above).map_err(Stop::State)? {
                Known::Node(node) if node.attr.is_dir() => above = node.attr.parent,
                _ => return Err(Refusal::NoInode.into()),
            }
        }
        Err(Refusal::Loop.into())
    }

    fn replace(&mut self, at: &At<'_>, plan: &Move<'_>, victim: Option<InodeKey>) -> Step<(), V> {
        let moves_parent = plan.is_dir && plan.dir != plan.new_dir;
        if let Some(victim) = victim {
            at.need(victim, Need::Links)?;
            match (plan.is_dir, self.live(victim)?.attr.is_dir()) {
                (true, false) => return Err(Refusal::NotDirectory.into()),
                (false, true) => return Err(Refusal::IsDirectory.into()),
                _ => {}
            }
            self.removable(at, plan.new_dir, victim)?;
        } else if moves_parent {
            can_link(&self.live(plan.new_dir)?.attr)?;
        }
        self.set_name(plan.dir.ino, plan.name, None);
        self.set_name(plan.new_dir.ino, plan.new_name, Some(plan.key));
        let by = i32::from(moves_parent);
        self.touch_dir(plan.dir, at, -by);
        self.touch_dir(plan.new_dir, at, by);
        self.touch_inode(plan.key, at, 0);
        if moves_parent {
            self.set_parent(plan.key, plan.new_dir);
        }
        if let Some(victim) = victim {
            if armed(Bug::VictimKeepsLink) && self.live(victim)?.attr.nlink > 1 {
                return Ok(());
            }
            self.drop_link(at, plan.new_dir, victim);
        }
        Ok(())
    }

    fn exchange(&mut self, at: &At<'_>, plan: &Move<'_>, other: InodeKey) -> Step<(), V> {
        let other_is_dir = self.live(other)?.attr.is_dir();
        self.sticky_allows(at, plan.new_dir, other)?;
        self.may_move(at, other, other_is_dir, plan.new_dir, plan.dir)?;
        let across = plan.dir != plan.new_dir;
        let by = i32::from(across && other_is_dir) - i32::from(across && plan.is_dir);
        if by > 0 {
            can_link(&self.live(plan.dir)?.attr)?;
        } else if by < 0 {
            can_link(&self.live(plan.new_dir)?.attr)?;
        }
        self.set_name(plan.dir.ino, plan.name, Some(other));
        self.set_name(plan.new_dir.ino, plan.new_name, Some(plan.key));
        self.touch_dir(plan.dir, at, by);
        self.touch_dir(plan.new_dir, at, -by);
        for (key, is_dir, parent) in [
            (plan.key, plan.is_dir, plan.new_dir),
            (other, other_is_dir, plan.dir),
        ] {
            self.touch_inode(key, at, 0);
            if is_dir && across {
                self.set_parent(key, parent);
            }
        }
        Ok(())
    }

    fn set_parent(&mut self, key: InodeKey, parent: InodeKey) {
        self.change(key.ino, |node| node.attr.parent = parent.ino);
    }
}
