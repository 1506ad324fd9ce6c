//! Files of a mounted [`Fs`] by the paths of workloads.

use crate::ops::Path;
use varve_format::{FileKind, InodeAttr};
use varve_ipc::Cred;
use varve_libfs::{Errno, Fs, OpenFile, OpenFlags};

type Outcome<T> = Result<T, Errno>;

const fn error(errno: i32) -> Errno {
    Errno(errno)
}

/// Returns the inode at `path`; no symbolic link is followed.
///
/// # Errors
/// As `lookup`.
pub fn find(fs: &Fs, path: &[&str]) -> Outcome<InodeAttr> {
    let root = Cred::root();
    let mut attr = fs.getattr(fs.root())?;
    for name in path {
        attr = fs.lookup(attr.key, name.as_bytes(), &root)?;
    }
    Ok(attr)
}

pub(crate) fn open(fs: &Fs, path: &Path) -> Outcome<OpenFile> {
    let attr = find(fs, path)?;
    match attr.kind() {
        FileKind::Regular => {}
        FileKind::Directory => return Err(error(libc::EISDIR)),
        _ => return Err(error(libc::EINVAL)),
    }
    fs.open(attr.key, OpenFlags::READ_WRITE, &Cred::root())
}
