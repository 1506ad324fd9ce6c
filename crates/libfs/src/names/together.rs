//! Groups of calls as one log transaction: works out what they mean one after the other, takes all leases, space and locks, logs them with
//! consecutive numbers, and shows all of it at once. docs/adr/0008 has the rules.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use varve_format::log::PAYLOAD_MAX;
use varve_format::{
    BLOCK_BYTES, EntryFlags, FILE_SIZE_MAX, FileKind, InodeAttr, InodeKey, LINK_MAX, LeaseNo, LogOp,
    SeqRange, charge,
};
use varve_ipc::{Cred, ITEMS_MAX};

use super::create::{Making, new_attr, take_number};
use super::remove::last_closed;
use super::rename::{Move, Views, check};
use super::{
    LOOKS_MAX, Locked, Target, check_name, is_dots, may_change, pin_or_mediate, resolve, settle, still_named,
    touch_dir,
};
use crate::attrs::{EXEC, may, may_remove, mode_after_write};
use crate::data::{changed, cut_short, publish_data};
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::lease::{Node, Pins};
use crate::log::{Committed, Stamp};
use crate::session::{Mount, Session};
use crate::setattr::clears;
use crate::transaction::made_key;

/// One call of a group. Directories and files are named by their keys; [`made_key`] stands for what the group itself makes.
pub(crate) enum Call {
    /// A file, directory or symbolic link.
    Make {
        dir: InodeKey,
        name: Vec<u8>,
        index: usize,
        mode: u32,
        target: Vec<u8>,
    },
    /// Data, at the end of the file if there is no offset.
    Write {
        file: InodeKey,
        offset: Option<u64>,
        data: Vec<u8>,
    },
    Truncate {
        file: InodeKey,
        size: u64,
    },
    Link {
        file: InodeKey,
        dir: InodeKey,
        name: Vec<u8>,
    },
    Unlink {
        dir: InodeKey,
        name: Vec<u8>,
    },
    Rename {
        dir: InodeKey,
        name: Vec<u8>,
        new_dir: InodeKey,
        new_name: Vec<u8>,
    },
}

/// A group to be committed.
pub(crate) struct Group<'g> {
    pub calls: &'g [Call],
    /// Bytes of log that the entries take.
    pub bytes: usize,
    /// Durable against a power cut before it returns.
    pub sync: bool,
    pub cred: &'g Cred,
}

/// A call of which is known what its names name.
enum Step<'g> {
    Make {
        dir: InodeKey,
        name: &'g [u8],
        attr: InodeAttr,
        target: &'g [u8],
    },
    Write {
        file: InodeKey,
        offset: Option<u64>,
        data: &'g [u8],
        clear: EntryFlags,
    },
    Truncate {
        file: InodeKey,
        size: u64,
        clear: EntryFlags,
    },
    Link {
        file: Target,
        dir: InodeKey,
        name: &'g [u8],
    },
    Unlink {
        dir: InodeKey,
        name: &'g [u8],
        victim: InodeKey,
    },
    Rename {
        moving: Move<'g>,
        moved: Target,
        victim: Option<InodeKey>,
    },
}

/// Refuses what can be no name of a group's call.
pub(crate) fn check_new_name(name: &[u8]) -> Result<()> {
    check_name(name)?;
    if is_dots(name) {
        return Err(Errno(libc::EINVAL));
    }
    Ok(())
}

const fn is_made(key: InodeKey) -> bool {
    // No inode that is there has generation 0.
    key.generation.0 == 0
}

impl Call {
    fn keys(&self) -> [Option<InodeKey>; 2] {
        match self {
            Self::Make { dir, .. } | Self::Unlink { dir, .. } => [Some(*dir), None],
            Self::Write { file, .. } | Self::Truncate { file, .. } => [Some(*file), None],
            Self::Link { file, dir, .. } => [Some(*file), Some(*dir)],
            Self::Rename { dir, new_dir, .. } => [Some(*dir), Some(*new_dir)],
        }
    }
}

impl Group<'_> {
    /// The inodes that calls name by key.
    fn keys(&self) -> Vec<InodeKey> {
        let all = self.calls.iter().flat_map(Call::keys).flatten();
        let mut keys: Vec<_> = all.filter(|key| !is_made(*key)).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }
}

/// A name that was looked up in a directory that is there, and what it named.
type Found<'g> = (InodeKey, &'g [u8], Option<Target>);

/// Why working out stopped.
enum Halt<T> {
    /// This one is needed too.
    Pin((InodeKey, Vec<u8>, Target)),
    Error(OpError<T>),
}

impl<T> From<OpError<T>> for Halt<T> {
    fn from(error: OpError<T>) -> Self {
        Self::Error(error)
    }
}

impl<T> From<Errno> for Halt<T> {
    fn from(errno: Errno) -> Self {
        Self::Error(errno.into())
    }
}

/// Names and attributes as the calls so far leave them, and what that rests on.
struct Shadow<'v, 'g> {
    mount: &'v Mount,
    session: &'v Session,
    pins: &'v Pins<'v>,
    cred: &'v Cred,
    attrs: HashMap<InodeKey, InodeAttr>,
    names: HashMap<(InodeKey, &'g [u8]), Option<Target>>,
    /// Attributes that were found.
    base: Vec<InodeAttr>,
    /// Names that were found.
    facts: Vec<Found<'g>>,
}

impl<'g> Shadow<'_, 'g> {
    fn attr<T>(&mut self, key: InodeKey) -> OpResult<&mut InodeAttr, T> {
        if !self.attrs.contains_key(&key) {
            let attr = self.pins.node(key)?.inode.attr();
            self.base.push(attr.clone());
            self.attrs.insert(key, attr);
        }
        Ok(self.attrs.get_mut(&key).ok_or(Errno(libc::EIO))?)
    }

    /// A directory in which a name is looked up.
    fn dir<T>(&mut self, key: InodeKey) -> OpResult<InodeAttr, T> {
        let checks = self.session.options.check_permissions;
        let cred = self.cred;
        let attr = self.attr(key)?.clone();
        if !attr.is_dir() {
            return Err(Errno(libc::ENOTDIR).into());
        }
        if attr.nlink == 0 {
            return Err(Errno(libc::ENOENT).into());
        }
        if checks {
            may(&attr, cred, EXEC)?;
        }
        Ok(attr)
    }

    /// What a name names; its inode is pinned.
    fn name<T>(&mut self, dir: InodeKey, name: &'g [u8]) -> std::result::Result<Option<Target>, Halt<T>> {
        if let Some(known) = self.names.get(&(dir, name)) {
            return Ok(*known);
        }
        let target = if is_made(dir) {
            None
        } else {
            let target = resolve(self.mount, self.session, self.pins.node(dir)?, name)?;
            if let Some(target) = target
                && self.pins.node(target.key).is_err()
            {
                return Err(Halt::Pin((dir, name.to_vec(), target)));
            }
            self.facts.push((dir, name, target));
            target
        };
        self.names.insert((dir, name), target);
        Ok(target)
    }

    /// A regular file whose data changes; which set-id bits go.
    fn data<T>(&mut self, key: InodeKey) -> OpResult<EntryFlags, T> {
        let cred = self.cred;
        let attr = self.attr(key)?;
        match attr.kind() {
            FileKind::Regular => {}
            FileKind::Directory => return Err(Errno(libc::EISDIR).into()),
            _ => return Err(Errno(libc::EINVAL).into()),
        }
        if is_made(key) && attr.nlink == 0 {
            // Made and removed in this group: the log takes nothing of it any more.
            return Err(Errno(libc::ENOENT).into());
        }
        let clear = clears(attr, cred);
        attr.mode = mode_after_write(attr.mode, cred.uid == 0);
        Ok(clear)
    }

    fn step<T>(&mut self, call: &'g Call) -> std::result::Result<Option<Step<'g>>, Halt<T>> {
        Ok(Some(match call {
            Call::Make {
                dir,
                name,
                index,
                mode,
                target,
            } => self.make(*dir, name, *index, *mode, target)?,
            Call::Write { file, offset, data } => Step::Write {
                file: *file,
                offset: *offset,
                data,
                clear: self.data(*file)?,
            },
            Call::Truncate { file, size } => Step::Truncate {
                file: *file,
                size: *size,
                clear: self.data(*file)?,
            },
            Call::Link { file, dir, name } => self.link(*file, *dir, name)?,
            Call::Unlink { dir, name } => self.unlink(*dir, name)?,
            Call::Rename {
                dir,
                name,
                new_dir,
                new_name,
            } => {
                let moving = Move {
                    dir: *dir,
                    name,
                    new_dir: *new_dir,
                    new_name,
                    exchange: false,
                };
                return self.rename(moving);
            }
        }))
    }

    fn make<T>(
        &mut self,
        dir: InodeKey,
        name: &'g [u8],
        index: usize,
        mode: u32,
        target: &'g [u8],
    ) -> std::result::Result<Step<'g>, Halt<T>> {
        let parent = self.dir(dir)?;
        if self.name(dir, name)?.is_some() {
            return Err(Errno(libc::EEXIST).into());
        }
        may_change(self.session, &parent, self.cred)?;
        let making = Making {
            mode,
            rdev: 0,
            target,
        };
        let attr = new_attr(&parent, made_key(index), &making, true, self.cred, 0);
        if attr.is_dir() {
            if parent.nlink >= LINK_MAX {
                return Err(Errno(libc::EMLINK).into());
            }
            self.attr(dir)?.nlink += 1;
        }
        self.attrs.insert(attr.key, attr.clone());
        let found = Target {
            key: attr.key,
            kind: attr.kind(),
        };
        self.names.insert((dir, name), Some(found));
        Ok(Step::Make {
            dir,
            name,
            attr,
            target,
        })
    }

    fn link<T>(
        &mut self,
        file: InodeKey,
        dir: InodeKey,
        name: &'g [u8],
    ) -> std::result::Result<Step<'g>, Halt<T>> {
        let parent = self.dir(dir)?;
        if self.name(dir, name)?.is_some() {
            return Err(Errno(libc::EEXIST).into());
        }
        may_change(self.session, &parent, self.cred)?;
        let linkable = !is_made(file) && self.mount.opens.is_linkable(file);
        let attr = self.attr(file)?;
        if attr.is_dir() {
            return Err(Errno(libc::EPERM).into());
        }
        if attr.nlink == 0 && !linkable {
            return Err(Errno(libc::ENOENT).into());
        }
        if attr.nlink >= LINK_MAX {
            return Err(Errno(libc::EMLINK).into());
        }
        attr.nlink += 1;
        let target = Target {
            key: file,
            kind: attr.kind(),
        };
        self.names.insert((dir, name), Some(target));
        Ok(Step::Link {
            file: target,
            dir,
            name,
        })
    }

    fn unlink<T>(&mut self, dir: InodeKey, name: &'g [u8]) -> std::result::Result<Step<'g>, Halt<T>> {
        let parent = self.dir(dir)?;
        let victim = self.name(dir, name)?.ok_or(Errno(libc::ENOENT))?.key;
        may_change(self.session, &parent, self.cred)?;
        let (checks, cred) = (self.session.options.check_permissions, self.cred);
        let attr = self.attr(victim)?;
        if checks {
            may_remove(&parent, attr, cred)?;
        }
        if attr.is_dir() {
            return Err(Errno(libc::EISDIR).into());
        }
        attr.nlink = attr.nlink.saturating_sub(1);
        self.names.insert((dir, name), None);
        Ok(Step::Unlink { dir, name, victim })
    }

    /// `None`: both are names of one file already.
    fn rename<T>(&mut self, moving: Move<'g>) -> std::result::Result<Option<Step<'g>>, Halt<T>> {
        let parent = self.dir(moving.dir)?;
        let new_parent = self.dir(moving.new_dir)?;
        let moved = self.name(moving.dir, moving.name)?.ok_or(Errno(libc::ENOENT))?;
        let victim = self.name(moving.new_dir, moving.new_name)?;
        if victim.is_some_and(|victim| victim.key == moved.key) {
            return Ok(None);
        }
        let is_dir = moved.kind == FileKind::Directory;
        let views = Views {
            parent,
            new_parent,
            from: self.attr(moved.key)?.clone(),
            to: match victim {
                Some(victim) => Some(self.attr(victim.key)?.clone()),
                None => None,
            },
        };
        check(self.session, &moving, &views, self.cred)?;
        if is_dir && (moving.dir != moving.new_dir || victim.is_some()) {
            return Err(Errno(libc::EOPNOTSUPP).into());
        }
        if let Some(victim) = victim {
            let attr = self.attr(victim.key)?;
            attr.nlink = attr.nlink.saturating_sub(1);
        }
        self.names.insert((moving.dir, moving.name), None);
        self.names.insert((moving.new_dir, moving.new_name), Some(moved));
        Ok(Some(Step::Rename {
            moving,
            moved,
            victim: victim.map(|victim| victim.key),
        }))
    }
}

/// Numbers for what is made; those that are not used go back.
struct Numbers<'s> {
    session: &'s Session,
    taken: Vec<(Arc<Node>, (InodeKey, LeaseNo))>,
}

impl<'s> Numbers<'s> {
    fn take<T>(session: &'s Session, pins: &Pins<'_>, steps: &[Step<'_>]) -> OpResult<Self, T> {
        let mut numbers = Self {
            session,
            taken: Vec::new(),
        };
        let mut anchors: HashMap<InodeKey, InodeKey> = HashMap::new();
        for step in steps {
            if let Step::Make { dir, attr, .. } = step {
                // What lies in a directory that is made here too gets its number near the first one above that is there.
                let anchor = anchors.get(dir).copied().unwrap_or(*dir);
                anchors.insert(attr.key, anchor);
                let node = pins.node(anchor)?;
                let number = take_number(session, node)?;
                numbers.taken.push((Arc::clone(node), number));
            }
        }
        Ok(numbers)
    }

    /// The key that an inode really has.
    fn real(&self, key: InodeKey) -> InodeKey {
        if !is_made(key) {
            return key;
        }
        let index = (u64::MAX - key.ino.0) as usize;
        self.taken.get(index).map_or(key, |(_, number)| number.0)
    }

    /// They are in the log, whether that counts or not.
    fn spend(mut self) -> Vec<(InodeKey, LeaseNo)> {
        let taken = std::mem::take(&mut self.taken);
        taken.into_iter().map(|(_, number)| number).collect()
    }
}

impl Drop for Numbers<'_> {
    fn drop(&mut self) {
        for (dir, number) in self.taken.drain(..) {
            self.session.leases.put_number_back(&dir, number);
        }
    }
}

/// Blocks that the steps may cost at most, wherever appends go.
fn cost(steps: &[Step<'_>]) -> u32 {
    let nobody = InodeKey::new(0, 0);
    let sum = |step: &Step<'_>| match step {
        Step::Make { .. } | Step::Rename { .. } => charge(&LogOp::Rename {
            dir: nobody,
            name: b"",
            key: nobody,
            new_dir: nobody,
            new_name: b"",
            victim: None,
            exchange: false,
        }),
        Step::Link { .. } => charge(&LogOp::Link {
            dir: nobody,
            name: b"",
            key: nobody,
        }),
        Step::Write { offset, data, .. } => data
            .chunks(PAYLOAD_MAX)
            .map(|data| {
                charge(&LogOp::Write {
                    key: nobody,
                    offset: offset.unwrap_or(BLOCK_BYTES - 1),
                    data,
                }) + 1
            })
            .sum(),
        Step::Truncate { .. } | Step::Unlink { .. } => 0,
    };
    steps.iter().map(sum).sum()
}

/// What one log entry means in memory.
enum Effect<'g> {
    Make {
        dir: InodeKey,
        name: &'g [u8],
        attr: InodeAttr,
    },
    Write {
        file: InodeKey,
        offset: u64,
        len: u64,
        clear: EntryFlags,
    },
    Truncate {
        file: InodeKey,
        size: u64,
        clear: EntryFlags,
    },
    Link {
        file: Target,
        dir: InodeKey,
        name: &'g [u8],
    },
    Unlink {
        dir: InodeKey,
        name: &'g [u8],
        victim: InodeKey,
        flags: EntryFlags,
    },
    Rename {
        moving: Move<'g>,
        moved: Target,
        victim: Option<InodeKey>,
        flags: EntryFlags,
    },
}

/// The entries and what they mean, under the locks: everything has its final number and place.
fn entries<'g>(
    mount: &Mount,
    numbers: &Numbers<'_>,
    locked: &mut Locked<'_>,
    steps: &[Step<'g>],
    now: varve_format::TimeNs,
) -> Result<Vec<(LogOp<'g>, EntryFlags, Effect<'g>)>> {
    let real = |key| numbers.real(key);
    let target = |target: Target| Target {
        key: numbers.real(target.key),
        ..target
    };
    let mut sizes: HashMap<InodeKey, u64> = HashMap::new();
    let mut out = Vec::with_capacity(steps.len());
    for step in steps {
        match step {
            Step::Make {
                dir,
                name,
                attr,
                target,
            } => {
                let (dir, mut attr) = (real(*dir), attr.clone());
                attr.key = real(attr.key);
                if attr.is_dir() {
                    attr.parent = dir.ino;
                }
                (attr.atime_ns, attr.mtime_ns, attr.ctime_ns, attr.btime_ns) = (now, now, now, now);
                sizes.insert(attr.key, attr.size_bytes);
                let op = super::create::create_op(&attr, dir, name, target);
                out.push((op, EntryFlags::empty(), Effect::Make { dir, name, attr }));
            }
            Step::Write {
                file,
                offset,
                data,
                clear,
            } => {
                let file = real(*file);
                let size = match sizes.get(&file) {
                    Some(size) => *size,
                    None => locked.attr(file)?.size_bytes,
                };
                let mut at = offset.unwrap_or(size);
                if at.saturating_add(data.len() as u64) > FILE_SIZE_MAX {
                    return Err(Errno(libc::EFBIG));
                }
                sizes.insert(file, size.max(at + data.len() as u64));
                for piece in data.chunks(PAYLOAD_MAX) {
                    let op = LogOp::Write {
                        key: file,
                        offset: at,
                        data: piece,
                    };
                    let effect = Effect::Write {
                        file,
                        offset: at,
                        len: piece.len() as u64,
                        clear: *clear,
                    };
                    out.push((op, *clear, effect));
                    at += piece.len() as u64;
                }
            }
            Step::Truncate { file, size, clear } => {
                let (file, size, clear) = (real(*file), *size, *clear);
                sizes.insert(file, size);
                let op = LogOp::Truncate { key: file, size };
                out.push((op, clear, Effect::Truncate { file, size, clear }));
            }
            Step::Link { file, dir, name } => {
                let (file, dir) = (target(*file), real(*dir));
                let op = LogOp::Link {
                    dir,
                    name,
                    key: file.key,
                };
                out.push((op, EntryFlags::empty(), Effect::Link { file, dir, name }));
            }
            Step::Unlink { dir, name, victim } => {
                let (dir, victim) = (real(*dir), real(*victim));
                let flags = last_closed(mount, victim);
                let op = LogOp::Unlink {
                    dir,
                    name,
                    key: victim,
                };
                let effect = Effect::Unlink {
                    dir,
                    name,
                    victim,
                    flags,
                };
                out.push((op, flags, effect));
            }
            Step::Rename {
                moving,
                moved,
                victim,
            } => {
                let moving = Move {
                    dir: real(moving.dir),
                    new_dir: real(moving.new_dir),
                    ..*moving
                };
                let (moved, victim) = (target(*moved), victim.map(real));
                let flags = victim.map_or(EntryFlags::empty(), |victim| last_closed(mount, victim));
                let op = LogOp::Rename {
                    dir: moving.dir,
                    name: moving.name,
                    key: moved.key,
                    new_dir: moving.new_dir,
                    new_name: moving.new_name,
                    victim,
                    exchange: false,
                };
                let effect = Effect::Rename {
                    moving,
                    moved,
                    victim,
                    flags,
                };
                out.push((op, flags, effect));
            }
        }
    }
    Ok(out)
}

/// Makes a committed group visible. The caller has every inode locked, the new ones too.
struct Showing<'s, 'n> {
    session: &'s Session,
    locked: &'s mut Locked<'n>,
    nodes: &'s HashMap<InodeKey, Arc<Node>>,
    stamp: Stamp,
    seqs: SeqRange,
}

impl Showing<'_, '_> {
    fn show(&mut self, committed: &Committed<'_>, effects: &[Effect<'_>]) -> Result<()> {
        // All tables at once, so that nobody finds one name of the group and not the other.
        let mut dirs: Vec<InodeKey> = effects.iter().flat_map(Effect::dirs).flatten().collect();
        dirs.sort_unstable();
        dirs.dedup();
        let mut tables = BTreeMap::new();
        for dir in dirs {
            tables.insert(dir, self.nodes.get(&dir).ok_or(Errno(libc::EIO))?.names.lock());
        }
        let (last, digested) = (self.seqs.last, self.session.page.digested());
        for (effect, entry) in effects.iter().zip(committed.entries()) {
            self.attributes(effect, entry)?;
            effect.names(&mut |dir, name, target| {
                if let Some(names) = tables.get_mut(&dir) {
                    names.set(name, target, last, digested);
                }
            });
        }
        self.locked.logged(last);
        Ok(())
    }

    fn attributes(&mut self, effect: &Effect<'_>, entry: &crate::log::Logged) -> Result<()> {
        let now = self.stamp.time_ns;
        match effect {
            Effect::Make { dir, attr, .. } => {
                let parent = self.locked.attr(*dir)?;
                touch_dir(parent, now);
                parent.nlink += u32::from(attr.is_dir());
            }
            Effect::Write {
                file,
                offset,
                len,
                clear,
            } => {
                let node = self.nodes.get(file).ok_or(Errno(libc::EIO))?;
                let body = self.locked.write(*file)?;
                self.session.data.list(&node.inode);
                publish_data(&node.inode, body, *offset, *len, entry.addr, entry.seq);
                changed(body, self.stamp, *clear, entry.seq);
            }
            Effect::Truncate { file, size, clear } => {
                let node = self.nodes.get(file).ok_or(Errno(libc::EIO))?;
                let body = self.locked.write(*file)?;
                self.session.data.list(&node.inode);
                cut_short(body, *size, entry.seq);
                changed(body, self.stamp, *clear, entry.seq);
            }
            Effect::Link { file, dir, .. } => {
                touch_dir(self.locked.attr(*dir)?, now);
                let attr = self.locked.attr(file.key)?;
                attr.nlink += 1;
                attr.ctime_ns = now;
            }
            Effect::Unlink {
                dir, victim, flags, ..
            } => {
                touch_dir(self.locked.attr(*dir)?, now);
                self.lose_name(*victim, *flags)?;
            }
            Effect::Rename {
                moving,
                moved,
                victim,
                flags,
            } => {
                touch_dir(self.locked.attr(moving.dir)?, now);
                touch_dir(self.locked.attr(moving.new_dir)?, now);
                self.locked.attr(moved.key)?.ctime_ns = now;
                if let Some(victim) = victim {
                    self.lose_name(*victim, *flags)?;
                }
            }
        }
        Ok(())
    }

    fn lose_name(&mut self, victim: InodeKey, flags: EntryFlags) -> Result<()> {
        let gone = self.locked.attr(victim)?;
        gone.nlink = gone.nlink.saturating_sub(1);
        gone.ctime_ns = self.stamp.time_ns;
        self.locked.note_dead(victim, flags)
    }
}

impl Effect<'_> {
    fn dirs(&self) -> [Option<InodeKey>; 2] {
        match self {
            Self::Make { dir, .. } | Self::Link { dir, .. } | Self::Unlink { dir, .. } => [Some(*dir), None],
            Self::Rename { moving, .. } => [Some(moving.dir), Some(moving.new_dir)],
            Self::Write { .. } | Self::Truncate { .. } => [None, None],
        }
    }

    fn names(&self, set: &mut dyn FnMut(InodeKey, &[u8], Option<Target>)) {
        match self {
            Self::Make { dir, name, attr } => {
                let target = Target {
                    key: attr.key,
                    kind: attr.kind(),
                };
                set(*dir, name, Some(target));
            }
            Self::Link { file, dir, name } => set(*dir, name, Some(*file)),
            Self::Unlink { dir, name, .. } => set(*dir, name, None),
            Self::Rename { moving, moved, .. } => {
                set(moving.dir, moving.name, None);
                set(moving.new_dir, moving.new_name, Some(*moved));
            }
            Self::Write { .. } | Self::Truncate { .. } => {}
        }
    }
}

/// The node of a new inode that is known to nobody yet.
fn new_node(attr: &InodeAttr, target: &[u8]) -> Arc<Node> {
    let node = Node::new(attr.clone());
    if attr.is_dir() {
        node.names.lock().set_complete();
    }
    *node.xattrs.lock() = Some(crate::xattrs::Xattrs::new());
    if !target.is_empty() {
        let _ = node.target.set(target.to_vec());
    }
    Arc::new(node)
}

/// Whether what the steps rest on is still so.
fn holds(pins: &Pins<'_>, locked: &mut Locked<'_>, shadow: &Shadow<'_, '_>) -> Result<bool> {
    for base in &shadow.base {
        let body = locked.get(base.key)?;
        let (now, then) = (&body.attr, base);
        let same = (now.mode, now.uid, now.gid, now.nlink) == (then.mode, then.uid, then.gid, then.nlink);
        if !same || body.dead {
            return Ok(false);
        }
    }
    for (dir, name, found) in &shadow.facts {
        let known = pins.node(*dir)?.names.lock().get(name);
        if known.is_none_or(|known| known.map(|t| t.key) != found.map(|t| t.key)) {
            return Ok(false);
        }
    }
    Ok(true)
}

type Done = (SeqRange, bool, Vec<InodeAttr>);

/// `None`: something changed, look again.
fn commit_once<T>(
    mount: &Mount,
    session: &Session,
    keys: &[InodeKey],
    shadow: &Shadow<'_, '_>,
    steps: &[Step<'_>],
    bytes: usize,
) -> OpResult<Option<Done>, T> {
    let pins = shadow.pins;
    let mut nodes: HashMap<InodeKey, Arc<Node>> = HashMap::new();
    for key in keys {
        nodes.insert(*key, Arc::clone(pins.node(*key)?));
    }
    let numbers = Numbers::take(session, pins, steps)?;
    let blocks = cost(steps);
    let slot = session.data.begin(bytes, blocks)?;
    let olds: Vec<_> = keys.iter().filter_map(|key| pins.node(*key).ok()).collect();
    let mut fresh: Vec<(Arc<Node>, LeaseNo)> = Vec::new();
    let mut locked = Locked::new(&olds);
    if !holds(pins, &mut locked, shadow)? {
        slot.pay_back(blocks);
        return Ok(None);
    }
    let stamp = Stamp {
        time_ns: session.now_ns(),
        ..session.stamp()
    };
    let planned = match entries(mount, &numbers, &mut locked, steps, stamp.time_ns) {
        Ok(planned) => planned,
        Err(errno) => {
            slot.pay_back(blocks);
            return Err(errno.into());
        }
    };
    let (mut ops, mut effects) = (
        Vec::with_capacity(planned.len()),
        Vec::with_capacity(planned.len()),
    );
    for (op, flags, effect) in planned {
        if let (LogOp::Create { target, .. }, Effect::Make { attr, .. }) = (&op, &effect) {
            let number = numbers.taken.get(fresh.len()).ok_or(Errno(libc::EIO))?.1;
            fresh.push((new_node(attr, target), number.1));
        }
        ops.push((op, flags));
        effects.push(effect);
    }
    for (node, _) in &fresh {
        nodes.insert(node.key(), Arc::clone(node));
        locked.guards.push((node.key(), node.inode.write()));
    }
    let committed = match slot.append_all(&ops, stamp) {
        Ok(committed) => committed,
        Err(error) => {
            drop(locked);
            for (key, _) in numbers.spend() {
                session.leases.unreserve(key);
            }
            return Err(error);
        }
    };
    let spent = numbers.spend();
    let (seqs, live) = (committed.seqs, committed.live);
    let mut made = Vec::with_capacity(fresh.len());
    let mut pinned = Vec::new();
    if live {
        for (node, number) in &fresh {
            locked.get(node.key())?.extents.set_empty();
            node.born.store(seqs.last.0, Ordering::Relaxed);
            // Known before their names are: whoever finds a name finds the lease.
            pinned.push(session.leases.adopt(Arc::clone(node), *number));
        }
        for effect in &effects {
            if let Effect::Make { dir, attr, .. } = effect
                && attr.is_dir()
                && let Some(node) = nodes.get(&attr.key)
            {
                *node.parent.lock() = Some(*dir);
            }
        }
        Showing {
            session,
            locked: &mut locked,
            nodes: &nodes,
            stamp,
            seqs,
        }
        .show(&committed, &effects)?;
        for (node, _) in &fresh {
            made.push(locked.attr(node.key())?.clone());
        }
    } else {
        // The seal will say whether it counts; nothing of this session is used any more.
        made.extend(effects.iter().filter_map(|effect| match effect {
            Effect::Make { attr, .. } => Some(attr.clone()),
            _ => None,
        }));
        for (key, _) in spent {
            session.leases.unreserve(key);
        }
    }
    drop(committed);
    drop(locked);
    drop(pinned);
    Ok(Some((seqs, live, made)))
}

/// Works the calls out under pins.
fn draw<'v, 'g, T>(
    mount: &'v Mount,
    session: &'v Session,
    pins: &'v Pins<'v>,
    group: &Group<'g>,
) -> std::result::Result<(Shadow<'v, 'g>, Vec<Step<'g>>), Halt<T>>
where
    'g: 'v,
{
    let mut shadow = Shadow {
        mount,
        session,
        pins,
        cred: group.cred,
        attrs: HashMap::new(),
        names: HashMap::new(),
        base: Vec::new(),
        facts: Vec::new(),
    };
    let mut steps = Vec::with_capacity(group.calls.len());
    for call in group.calls {
        steps.extend(shadow.step(call)?);
    }
    Ok((shadow, steps))
}

/// Commits a group of calls, wholly or not at all. Returns what it made, in order.
pub(crate) fn commit_together(mount: &Mount, group: &Group<'_>) -> Result<Vec<InodeAttr>> {
    let made = mount.with_session(|session, attempt| {
        session.may_write()?;
        let _ = attempt.take_done();
        let made = commit_in(mount, session, group)?;
        if group.sync {
            // What was committed before a seal is digested by it: then it counts, and is durable.
            match session.sync_log::<()>() {
                Ok(()) => {}
                Err(OpError::SessionLost { .. }) => {
                    return Err(OpError::SessionLost {
                        committed: None,
                        otherwise: Some(made),
                    });
                }
                Err(_) => return Err(Errno(libc::EIO).into()),
            }
        }
        Ok(made)
    })?;
    for call in group.calls {
        if let Call::Link { file, .. } = call {
            mount.opens.set_linkable(*file, false);
        }
    }
    Ok(made)
}

fn commit_in(mount: &Mount, session: &Arc<Session>, group: &Group<'_>) -> OpResult<Vec<InodeAttr>> {
    let start = Instant::now();
    let mut keys = group.keys();
    let mut found: Vec<(InodeKey, Vec<u8>, Target)> = Vec::new();
    let mut contended = 0;
    for _ in 0..LOOKS_MAX {
        if keys.len() > ITEMS_MAX {
            return Err(Errno(libc::E2BIG).into());
        }
        let pins = match pin_or_mediate(session, &keys) {
            // A name's inode is gone, with its name: look again.
            Err(OpError::Failed(Errno(libc::ESTALE))) if !found.is_empty() => {
                for (dir, name, target) in found.drain(..) {
                    still_named(session, dir, &name, target)?;
                }
                keys = group.keys();
                continue;
            }
            other => other?,
        };
        let Some(pins) = pins else {
            // The daemon does single operations only. What is contended will be free in a moment.
            if start.elapsed() > Duration::from_millis(session.welcome.wait_ms) {
                break;
            }
            contended += 1;
            std::thread::sleep(Duration::from_millis(1 + contended / 10));
            continue;
        };
        let (shadow, steps) = match draw(mount, session, &pins, group) {
            Ok(drawn) => drawn,
            Err(Halt::Pin(more)) => {
                keys.push(more.2.key);
                keys.sort_unstable();
                keys.dedup();
                found.push(more);
                continue;
            }
            Err(Halt::Error(error)) => return Err(error),
        };
        if steps.is_empty() {
            return Ok(Vec::new());
        }
        if let Some((seqs, live, made)) = commit_once(mount, session, &keys, &shadow, &steps, group.bytes)? {
            drop(shadow);
            drop(pins);
            return settle(session, seqs, live, made);
        }
    }
    Err(Errno(libc::EAGAIN).into())
}
