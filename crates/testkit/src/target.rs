//! Runs operations on a mounted [`Fs`] and reads its visible attributes back.

use crate::lookup::{find, open};
use crate::model::{LINK_TARGET, Seen, Tree};
use crate::ops::{Op, Path, RDEV, pattern, set_by_hand, set_times};
use std::collections::BTreeMap;
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, FallocateMode, FileKind, InodeAttr, InodeKey};
use varve_ipc::Cred;
use varve_libfs::{AttrChange, Errno, Fs, OpenFile, OpenFlags, RangePair, RenameFlags, SetTime};

/// Name of the one extended attribute of workloads.
pub const XATTR_NAME: &[u8] = b"user.k";

type Outcome<T> = Result<T, Errno>;

const fn error(errno: i32) -> Errno {
    Errno(errno)
}

fn parent<'p>(fs: &Fs, path: &'p Path) -> Outcome<(InodeKey, &'p [u8])> {
    let (name, above) = path.split_last().ok_or(error(libc::EEXIST))?;
    let dir = find(fs, above)?;
    match dir.kind() {
        FileKind::Directory => Ok((dir.key, name.as_bytes())),
        FileKind::Symlink => Err(error(libc::ENOENT)),
        _ => Err(error(libc::ENOTDIR)),
    }
}

fn rename(fs: &Fs, from: &Path, to: &Path, flags: RenameFlags) -> Outcome<()> {
    let (dir, name) = parent(fs, from)?;
    let (new_dir, new_name) = parent(fs, to)?;
    fs.rename(dir, name, new_dir, new_name, flags, &Cred::root())
}

fn make(fs: &Fs, path: &Path, mode: u32, rdev: u32) -> Outcome<()> {
    let (dir, name) = parent(fs, path)?;
    fs.create(dir, name, mode, rdev, &Cred::root()).map(|_| ())
}

fn tmpfile(fs: &Fs, path: &Path, data: &[u8]) -> Outcome<()> {
    let root = Cred::root();
    let (dir, name) = parent(fs, path)?;
    let file = fs.tmpfile(dir, 0o600, &root)?;
    full(file.write_at(0, data, &root)?, data.len())?;
    fs.link(file.key(), dir, name, &root).map(|_| ())
}

fn fallocate(fs: &Fs, path: &Path, mode: FallocateMode, offset: u64, len: u64) -> Outcome<()> {
    open(fs, path)?.fallocate(mode, offset, len, &Cred::root())
}

/// Sets both times, and checks them at once: a later read may update the access time.
fn utimens(fs: &Fs, path: &Path, secs: i64) -> Outcome<()> {
    let (mtime_ns, atime_ns) = set_times(secs);
    let change = AttrChange {
        atime: Some(SetTime::At(atime_ns)),
        mtime: Some(SetTime::At(mtime_ns)),
        ..AttrChange::default()
    };
    let key = find(fs, path)?.key;
    let told = fs.setattr(key, &change, &Cred::root())?;
    for attr in [told, fs.getattr(key)?] {
        if (attr.mtime_ns, attr.atime_ns) != (mtime_ns, atime_ns) {
            return Err(error(libc::EIO));
        }
    }
    Ok(())
}

fn full(written: usize, wanted: usize) -> Outcome<()> {
    if written == wanted {
        Ok(())
    } else {
        Err(error(libc::EIO))
    }
}

/// Carries out one operation as the superuser.
///
/// # Errors
/// The file system's error.
pub fn apply(fs: &Fs, op: &Op) -> Outcome<()> {
    let root = Cred::root();
    match op {
        Op::Create(path) => make(fs, path, 0o100_644, 0),
        Op::Mkdir(path) => make(fs, path, 0o040_755, 0),
        Op::Mkfifo(path) => make(fs, path, 0o010_644, 0),
        Op::Mknod(path) => make(fs, path, 0o020_644, RDEV),
        Op::Tmpfile { path, len, seed } => tmpfile(fs, path, &pattern(*seed, 0, *len as usize)),
        Op::Symlink(path) => {
            let (dir, name) = parent(fs, path)?;
            fs.symlink(dir, name, LINK_TARGET, &root).map(|_| ())
        }
        Op::Write {
            path,
            offset,
            len,
            seed,
        } => {
            let data = pattern(*seed, *offset, *len as usize);
            full(open(fs, path)?.write_at(*offset, &data, &root)?, data.len())
        }
        Op::Append { path, len, seed } => {
            let file = open(fs, path)?;
            let offset = file.getattr()?.size_bytes;
            let data = pattern(*seed, offset, *len as usize);
            let (at, written) = file.append(&data, &root)?;
            if at == offset {
                full(written, data.len())
            } else {
                Err(error(libc::EIO))
            }
        }
        Op::Truncate { path, size } => open(fs, path)?.truncate(*size, &root),
        Op::Punch { path, offset, len } => fallocate(fs, path, FallocateMode::PunchHole, *offset, *len),
        Op::Zero { path, offset, len } => fallocate(fs, path, FallocateMode::ZeroRange, *offset, *len),
        Op::ZeroKeep { path, offset, len } => {
            fallocate(fs, path, FallocateMode::ZeroRangeKeepSize, *offset, *len)
        }
        Op::Allocate { path, offset, len } => fallocate(fs, path, FallocateMode::Allocate, *offset, *len),
        Op::AllocateKeep { path, offset, len } => {
            fallocate(fs, path, FallocateMode::AllocateKeepSize, *offset, *len)
        }
        Op::Clone {
            from,
            offset,
            to,
            to_offset,
            len,
        } => {
            // As the model: the source is looked at first.
            let source = open(fs, from)?;
            source.clone_range_to(*offset, &open(fs, to)?, *to_offset, *len, &root)
        }
        Op::Dedupe {
            from,
            offset,
            to,
            to_offset,
            len,
        } => {
            let source = open(fs, from)?;
            match source.dedupe_range_with(*offset, &open(fs, to)?, *to_offset, *len, &root)? {
                true => Ok(()),
                false => Err(Errno(libc::EILSEQ)),
            }
        }
        Op::DedupeBlocks {
            from,
            to,
            offset,
            len,
        } => {
            let files = [open(fs, from)?, open(fs, to)?];
            for file in &files {
                if file.getattr()?.kind() != FileKind::Regular {
                    return Err(Errno(libc::EINVAL));
                }
            }
            let blocks = (*offset..*offset + *len).step_by(BLOCK_SIZE);
            let pairs: Vec<_> = blocks
                .map(|at| RangePair {
                    from: &files[0],
                    offset: at,
                    to: &files[1],
                    to_offset: at,
                    len: BLOCK_BYTES,
                })
                .collect();
            // What became of each block does not show in its bytes.
            OpenFile::dedupe_ranges(&pairs, false, &root).map(drop)
        }
        Op::Unshare { path, offset, len } => open(fs, path)?.unshare_range(*offset, *len, &root),
        Op::Defrag { path, offset, len } => open(fs, path)?.defrag_range(*offset, *len, &root).map(drop),
        Op::Link(from, to) => {
            let attr = find(fs, from)?;
            let (dir, name) = parent(fs, to)?;
            fs.link(attr.key, dir, name, &root).map(|_| ())
        }
        Op::Unlink(path) => {
            let (dir, name) = parent(fs, path)?;
            fs.unlink(dir, name, &root)
        }
        Op::Rmdir(path) => {
            let (dir, name) = parent(fs, path)?;
            fs.rmdir(dir, name, &root)
        }
        Op::Rename(from, to) => rename(fs, from, to, RenameFlags::default()),
        Op::RenameNoReplace(from, to) => rename(
            fs,
            from,
            to,
            RenameFlags {
                noreplace: true,
                ..RenameFlags::default()
            },
        ),
        Op::Exchange(from, to) => rename(
            fs,
            from,
            to,
            RenameFlags {
                exchange: true,
                ..RenameFlags::default()
            },
        ),
        Op::Chmod(path, mode) => {
            let attr = find(fs, path)?;
            if attr.kind() == FileKind::Symlink {
                return Err(error(libc::EOPNOTSUPP));
            }
            let change = AttrChange {
                mode: Some(*mode),
                ..AttrChange::default()
            };
            fs.setattr(attr.key, &change, &root).map(|_| ())
        }
        Op::Chown(path, uid, gid) => {
            let change = AttrChange {
                uid: Some(*uid),
                gid: Some(*gid),
                ..AttrChange::default()
            };
            fs.setattr(find(fs, path)?.key, &change, &root).map(|_| ())
        }
        Op::Utimens { path, secs } => utimens(fs, path, *secs),
        Op::SetXattr(path, len, seed) => {
            let value = pattern(*seed, 0, usize::from(*len));
            fs.setxattr(find(fs, path)?.key, XATTR_NAME, &value, false, false, &root)
        }
        Op::RemoveXattr(path) => fs.removexattr(find(fs, path)?.key, XATTR_NAME, &root),
        Op::Fsync(path) => fs.fsync(find(fs, path)?.key, false),
        Op::Together(ops) => crate::group::together(fs, ops),
    }
}

/// Everything visible through `fs`.
///
/// # Errors
/// The first error of any call: an unreadable tree is never right.
pub fn tree(fs: &Fs) -> Outcome<Tree> {
    tree_without(fs, &[])
}

/// The bytes of the file at `path`.
///
/// # Errors
/// As `lookup` and `read`.
pub fn content(fs: &Fs, path: &[&str]) -> Outcome<Vec<u8>> {
    content_of(fs, &find(fs, path)?)
}

fn content_of(fs: &Fs, attr: &InodeAttr) -> Outcome<Vec<u8>> {
    let flags = OpenFlags::READ;
    let file = fs.open(attr.key, flags, &Cred::root())?;
    let mut content = vec![0xa5; attr.size_bytes as usize + 1];
    let count = file.read_at(0, &mut content)?;
    content.truncate(count);
    Ok(content)
}

/// As [`tree`], without some names of the root directory, which others are changing.
///
/// # Errors
/// As [`tree`].
pub fn tree_without(fs: &Fs, without: &[&str]) -> Outcome<Tree> {
    let mut tree = Tree::new();
    let mut first = BTreeMap::new();
    walk(
        fs,
        &fs.getattr(fs.root())?,
        String::from("/"),
        without,
        &mut first,
        &mut tree,
    )?;
    Ok(tree)
}

fn names(fs: &Fs, dir: InodeKey) -> Outcome<Vec<(String, InodeKey)>> {
    let mut names = Vec::new();
    let mut cookie = 0;
    loop {
        let page = fs.readdir(dir, cookie, 16)?;
        let Some(last) = page.last() else { break };
        cookie = last.next_cookie;
        names.extend(
            page.iter()
                .map(|entry| (String::from_utf8_lossy(&entry.name).into_owned(), entry.key)),
        );
    }
    names.sort();
    Ok(names)
}

fn walk(
    fs: &Fs,
    attr: &InodeAttr,
    path: String,
    without: &[&str],
    first: &mut BTreeMap<InodeKey, String>,
    tree: &mut Tree,
) -> Outcome<()> {
    let root = Cred::root();
    let same_as = first.entry(attr.key).or_insert_with(|| path.clone()).clone();
    let content = match attr.kind() {
        FileKind::Regular => content_of(fs, attr)?,
        FileKind::Symlink => fs.readlink(attr.key)?,
        _ => Vec::new(),
    };
    let xattr = match attr.kind() {
        FileKind::Regular | FileKind::Directory => match fs.getxattr(attr.key, XATTR_NAME, &root) {
            Ok(value) => Some(value),
            Err(errno) if errno.0 == libc::ENODATA => None,
            Err(other) => return Err(other),
        },
        _ => None,
    };
    // The size of a directory is up to the file system.
    let size = if attr.is_dir() { 0 } else { attr.size_bytes };
    let mtime_ns = set_by_hand(attr.mtime_ns);
    if let (Some(mtime_ns), Some(atime_ns)) = (mtime_ns, set_by_hand(attr.atime_ns))
        && atime_ns - mtime_ns != set_times(0).1 - set_times(0).0
    {
        return Err(error(libc::EUCLEAN)); // Times of two different calls.
    }
    let seen = Seen {
        mode: attr.mode,
        uid: attr.uid,
        gid: attr.gid,
        links: attr.nlink,
        size,
        content,
        xattr,
        rdev: attr.rdev,
        mtime_ns,
        same_as,
    };
    let below = if path == "/" {
        String::from("/")
    } else {
        format!("{path}/")
    };
    tree.insert(path, seen);
    if attr.is_dir() {
        let entries = names(fs, attr.key)?;
        for pair in entries.windows(2) {
            if pair[0].0 == pair[1].0 {
                return Err(error(libc::EUCLEAN)); // A name listed twice.
            }
        }
        for (name, key) in entries {
            if without.contains(&name.as_str()) {
                continue;
            }
            let child = fs.lookup(attr.key, name.as_bytes(), &root)?;
            if child.key != key {
                return Err(error(libc::EUCLEAN));
            }
            walk(fs, &child, format!("{below}{name}"), &[], first, tree)?;
        }
    }
    Ok(())
}

/// The differences between two trees, one a line (at most 20).
#[must_use]
pub fn difference(want: &Tree, got: &Tree) -> Vec<String> {
    let mut lines = Vec::new();
    for (path, seen) in want {
        match got.get(path) {
            None => lines.push(format!("{path}: missing")),
            Some(other) if other != seen => {
                let at = seen.content.iter().zip(&other.content).position(|(a, b)| a != b);
                let brief = |s: &Seen| {
                    format!(
                        "mode={:o} {}:{} links={} size={} same_as={} rdev={:x} mtime={:?} xattr={:?}",
                        s.mode,
                        s.uid,
                        s.gid,
                        s.links,
                        s.size,
                        s.same_as,
                        s.rdev,
                        s.mtime_ns,
                        s.xattr.as_ref().map(Vec::len)
                    )
                };
                lines.push(format!(
                    "{path}: want {} got {} first differing byte {at:?}",
                    brief(seen),
                    brief(other)
                ));
            }
            Some(_) => {}
        }
    }
    lines.extend(
        got.keys()
            .filter(|path| !want.contains_key(*path))
            .map(|path| format!("{path}: should not be there")),
    );
    lines.truncate(20);
    lines
}
