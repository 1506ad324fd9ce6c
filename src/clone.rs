//! `varve clone`: makes a file that shares all blocks of another one. The kernel passes no `FICLONE` on to a
//! FUSE mount, so a session of this process asks the daemon.

use crate::cli::CloneArgs;
use crate::out;
use crate::pool::Pool;
use crate::pool_session::{self, Mounts};
use anyhow::bail;
use std::path::Path;
use varve_libfs::posix::AT_FDCWD;
use varve_libfs::{Errno, Posix, RenameFlags};

/// `varve clone`.
pub fn clone(args: &CloneArgs) -> anyhow::Result<()> {
    let mounts = Mounts::read()?;
    let source = mounts.locate(&args.source)?;
    let name = args.source.file_name();
    let target = match name.filter(|_| args.target.is_dir()) {
        Some(name) => args.target.join(name),
        None => args.target.clone(),
    };
    let to = mounts.locate(&target)?;
    if to.mount.pool != source.mount.pool {
        bail!(
            "{} is in the pool {}, {} in {}: only files of one pool share blocks; copy it instead",
            args.source.display(),
            source.mount.pool.display(),
            target.display(),
            to.mount.pool.display()
        );
    }
    let pool = Pool::open(&source.mount.pool)?;
    let posix = pool_session::open(&pool)?;
    let cloned = clone_file(&posix, &source.path, &to.path, args.force);
    let ended = pool_session::end(&posix);
    let bytes = cloned.map_err(|errno| describe(errno, args, &target))?;
    ended?;
    let Some(bytes) = bytes else {
        bail!(
            "{} and {} are the same file",
            args.source.display(),
            target.display()
        );
    };
    if args.json {
        let value = serde_json::json!({
            "source": out::path(&args.source),
            "target": out::path(&target),
            "bytes": bytes,
        });
        out::line(&format!("{value:#}"));
    } else {
        out::line(&format!(
            "{} shares {bytes} bytes with {}",
            target.display(),
            args.source.display()
        ));
    }
    Ok(())
}

/// Makes the clone under a temporary name, and renames it when it is whole. Returns its size in bytes; `None`:
/// the target is the source.
fn clone_file(posix: &Posix, source: &[u8], target: &[u8], replace: bool) -> Result<Option<u64>, Errno> {
    let from = posix.open(source, libc::O_RDONLY, 0)?;
    let attr = posix.fstat(from)?;
    if posix.lstat(target).is_ok_and(|there| there.key == attr.key) {
        return Ok(None);
    }
    let dir = target
        .iter()
        .rposition(|byte| *byte == b'/')
        .map_or(0, |at| at + 1);
    let part = [
        &target[..dir],
        format!(".varve-clone-{}", std::process::id()).as_bytes(),
    ]
    .concat();
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY;
    let to = posix.open(&part, flags, attr.mode & 0o777)?;
    let flags = RenameFlags {
        noreplace: !replace,
        ..RenameFlags::default()
    };
    let cloned = posix
        .clone_range(from, 0, to, 0, 0)
        .and_then(|()| posix.fsync(to))
        .and_then(|()| posix.renameat2(AT_FDCWD, &part, AT_FDCWD, target, flags));
    if let Err(errno) = cloned {
        let _ = posix.unlink(&part);
        return Err(errno);
    }
    Ok(Some(attr.size_bytes))
}

/// The message for a clone that failed.
fn describe(errno: Errno, args: &CloneArgs, target: &Path) -> anyhow::Error {
    let (source, to) = (args.source.display(), target.display());
    match errno.0 {
        libc::EEXIST => anyhow::anyhow!("{to} exists; --force replaces it"),
        libc::EOPNOTSUPP => anyhow::anyhow!(
            "the pool is of an older format, which has no shared blocks; stop it and run `varve upgrade POOL`"
        ),
        libc::EISDIR | libc::EINVAL | libc::ENXIO => anyhow::anyhow!("{source} is not a regular file"),
        libc::EMLINK => {
            anyhow::anyhow!("a block of {source} has as many owners as a block can have; copy it instead")
        }
        errno => {
            let error = std::io::Error::from_raw_os_error(errno);
            anyhow::anyhow!("cannot clone {source} to {to}: {error}")
        }
    }
}
