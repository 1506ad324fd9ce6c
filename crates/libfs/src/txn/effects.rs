//! A group's log entries, and the effect of each in memory. Knows the inodes as locked; takes no lease and no
//! log space.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use varve_format::log::PAYLOAD_MAX;
use varve_format::{EntryFlags, FILE_SIZE_MAX, InodeAttr, InodeKey, LogOp, SeqRange};

use super::commit::TakenNumbers;
use super::plan::Step;
use crate::data::{changed, cut_short, publish_data};
use crate::dir::create::create_op;
use crate::dir::remove::last_closed;
use crate::dir::rename::Move;
use crate::dir::{Locked, Target, touch_dir};
use crate::errno::{Errno, Result};
use crate::lease::Node;
use crate::log::{Committed, Logged, Stamp};
use crate::session::{Mount, Session};

/// Effect of one log entry in memory.
pub(super) enum Effect<'g> {
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

/// Builds the entries and their effects, under the locks: with final numbers and offsets.
pub(super) fn entries<'g>(
    mount: &Mount,
    numbers: &TakenNumbers<'_>,
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
                let op = create_op(&attr, dir, name, target);
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
pub(super) struct Showing<'s, 'n> {
    pub(super) session: &'s Session,
    pub(super) locked: &'s mut Locked<'n>,
    pub(super) nodes: &'s HashMap<InodeKey, Arc<Node>>,
    pub(super) stamp: Stamp,
    pub(super) seqs: SeqRange,
}

impl Showing<'_, '_> {
    pub(super) fn show(&mut self, committed: &Committed<'_>, effects: &[Effect<'_>]) -> Result<()> {
        // All tables at once, so that no thread finds one name of the group and not the other.
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
            effect.names(|dir, name, target| {
                if let Some(names) = tables.get_mut(&dir) {
                    names.set(name, target, last, digested);
                }
            });
        }
        self.locked.logged(last);
        Ok(())
    }

    fn attributes(&mut self, effect: &Effect<'_>, entry: &Logged) -> Result<()> {
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
        self.locked.note_dead(victim, flags)?;
        if self.locked.get(victim)?.dead {
            self.session.leases.bury(victim, self.seqs.last);
        }
        Ok(())
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

    fn names(&self, mut set: impl FnMut(InodeKey, &[u8], Option<Target>)) {
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
