//! Plans the calls of a group, one after the other, each against the state that the calls before it leave.
//! Reads under pins; changes and logs nothing.

use std::collections::HashMap;
use varve_format::{EntryFlags, FileKind, InodeAttr, InodeKey, LINK_MAX};
use varve_ipc::Cred;

use super::commit::{Call, Group, is_made};
use super::made_key;
use crate::attrs::{EXEC, may, may_remove, mode_after_write};
use crate::dir::create::{Making, new_attr};
use crate::dir::rename::{Move, Views, check};
use crate::dir::{Target, may_change, resolve};
use crate::errno::{Errno, OpError, OpResult};
use crate::file::attr::clears;
use crate::lease::Pins;
use crate::session::{Mount, Session};

/// A call whose names are resolved.
pub(super) enum Step<'g> {
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

impl Step<'_> {
    /// The file to whose end it writes.
    pub(super) fn appends_to(&self) -> Option<InodeKey> {
        match self {
            Self::Write {
                file, offset: None, ..
            } => Some(*file),
            _ => None,
        }
    }
}

/// A name that was looked up in an existing directory, and its target.
pub(super) type Found<'g> = (InodeKey, &'g [u8], Option<Target>);

/// Reason why the planning stopped.
pub(super) enum Halt<T> {
    /// This inode must be pinned, too.
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

/// Names and attributes as the calls so far leave them, and the state that they rely on.
pub(super) struct Shadow<'v, 'g> {
    mount: &'v Mount,
    session: &'v Session,
    pub(super) pins: &'v Pins<'v>,
    cred: &'v Cred,
    attrs: HashMap<InodeKey, InodeAttr>,
    names: HashMap<(InodeKey, &'g [u8]), Option<Target>>,
    /// Attributes that were read.
    pub(super) base: Vec<InodeAttr>,
    /// Names that were looked up.
    pub(super) facts: Vec<Found<'g>>,
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

    /// Returns the attributes of a directory in which a name is looked up.
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

    /// Looks a name up; its target is pinned.
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

    /// Checks a regular file whose data changes; returns the set-id bits to clear.
    fn data<T>(&mut self, key: InodeKey) -> OpResult<EntryFlags, T> {
        let cred = self.cred;
        let attr = self.attr(key)?;
        match attr.kind() {
            FileKind::Regular => {}
            FileKind::Directory => return Err(Errno(libc::EISDIR).into()),
            _ => return Err(Errno(libc::EINVAL).into()),
        }
        if is_made(key) && attr.nlink == 0 {
            // Made and removed in this group: the log takes no more entries of it.
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

    /// Plans a rename. `None`: both names have the same file as target already.
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

/// Plans the calls under pins.
pub(super) fn draw<'v, 'g, T>(
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
