//! Operations of a workload as one transaction of the library. Owns the names within the group; the library
//! decides which operations a transaction takes.

use crate::lookup::{find, open};
use crate::model::LINK_TARGET;
use crate::ops::{Op, Path, pattern};
use std::collections::HashMap;
use varve_ipc::Cred;
use varve_libfs::{Errno, Fs, Made, OpenFile, Transaction, TxDir, TxFile};

type Outcome<T> = Result<T, Errno>;

/// The meaning of a path amid the group.
#[derive(Clone)]
enum Thing {
    Made(Made),
    Open(OpenFile),
    Gone,
}

struct Group<'f> {
    fs: &'f Fs,
    transaction: Transaction,
    things: HashMap<Path, Thing>,
    /// Sizes amid the group, which determine the offsets of appends.
    sizes: HashMap<Path, u64>,
}

/// Carries all of `ops` out in one transaction as the superuser.
///
/// # Errors
/// The file system's error; EOPNOTSUPP for an operation that no transaction takes.
pub(crate) fn together(fs: &Fs, ops: &[Op]) -> Outcome<()> {
    let mut group = Group {
        fs,
        transaction: fs.transaction(&Cred::root()),
        things: HashMap::new(),
        sizes: HashMap::new(),
    };
    ops.iter().try_for_each(|op| group.add(op))?;
    group.transaction.commit().map(|_| ())
}

impl Group<'_> {
    fn file(&mut self, path: &Path) -> Outcome<TxFile> {
        if !self.things.contains_key(path) {
            let file = open(self.fs, path)?;
            self.things.insert(path.clone(), Thing::Open(file));
        }
        match &self.things[path] {
            Thing::Made(made) => Ok((*made).into()),
            Thing::Open(file) => Ok(file.into()),
            Thing::Gone => Err(Errno(libc::ENOENT)),
        }
    }

    fn size(&mut self, path: &Path, file: &TxFile) -> Outcome<&mut u64> {
        let now = match file {
            TxFile::Open(file) => file.getattr()?.size_bytes,
            TxFile::Made(_) => 0,
        };
        Ok(self.sizes.entry(path.clone()).or_insert(now))
    }

    fn place<'p>(&self, path: &'p Path) -> Outcome<(TxDir, &'p [u8])> {
        let (name, above) = path.split_last().ok_or(Errno(libc::EEXIST))?;
        let dir = match self.things.get(above) {
            Some(Thing::Made(made)) => (*made).into(),
            _ => find(self.fs, above)?.key.into(),
        };
        Ok((dir, name.as_bytes()))
    }

    fn add(&mut self, op: &Op) -> Outcome<()> {
        match op {
            Op::Create(path) | Op::Mkdir(path) | Op::Symlink(path) => {
                let (dir, name) = self.place(path)?;
                let made = match op {
                    Op::Create(_) => self.transaction.create(dir, name, 0o644)?,
                    Op::Mkdir(_) => self.transaction.mkdir(dir, name, 0o755)?,
                    _ => self.transaction.symlink(dir, name, LINK_TARGET)?,
                };
                self.things.insert(path.clone(), Thing::Made(made));
                Ok(())
            }
            Op::Write {
                path,
                offset,
                len,
                seed,
            } => {
                let file = self.file(path)?;
                let size = self.size(path, &file)?;
                *size = (*size).max(*offset + u64::from(*len));
                self.transaction
                    .write_at(file, *offset, &pattern(*seed, *offset, *len as usize))
            }
            Op::Append { path, len, seed } => {
                let file = self.file(path)?;
                let size = self.size(path, &file)?;
                let data = pattern(*seed, *size, *len as usize);
                *size += data.len() as u64;
                self.transaction.append(file, &data)
            }
            Op::Truncate { path, size } => {
                let file = self.file(path)?;
                *self.size(path, &file)? = *size;
                self.transaction.truncate(file, *size)
            }
            Op::Link(from, to) => {
                let file = self.file(from)?;
                let (dir, name) = self.place(to)?;
                self.transaction.link(file, dir, name)
            }
            Op::Unlink(path) => {
                let (dir, name) = self.place(path)?;
                self.transaction.unlink(dir, name)?;
                self.things.insert(path.clone(), Thing::Gone);
                Ok(())
            }
            Op::Rename(from, to) => {
                let ((dir, name), (new_dir, new_name)) = (self.place(from)?, self.place(to)?);
                self.transaction.rename(dir, name, new_dir, new_name)?;
                if let Some(thing) = self.things.insert(from.clone(), Thing::Gone) {
                    self.things.insert(to.clone(), thing);
                }
                Ok(())
            }
            _ => Err(Errno(libc::EOPNOTSUPP)),
        }
    }
}
