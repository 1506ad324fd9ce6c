//! `varve clone`: makes a file that shares all blocks of another one. The kernel passes no `FICLONE` on to a
//! FUSE mount, so a session of this process asks the daemon.

use crate::cli::CloneArgs;
use crate::out;
use crate::pool::Pool;
use anyhow::{Context, bail};
use rustix::process::{getegid, geteuid, getgroups};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use varve_libfs::mounts::{PoolMount, pool_mounts};
use varve_libfs::posix::AT_FDCWD;
use varve_libfs::{Cred, Errno, Fs, FsOptions, Posix, RenameFlags, SocketConnector};

/// A path in a mounted pool.
struct Place {
    pool: PathBuf,
    /// From the pool's root.
    path: Vec<u8>,
}

/// `varve clone`.
pub fn clone(args: &CloneArgs) -> anyhow::Result<()> {
    let table = std::fs::read("/proc/self/mountinfo").context("cannot read the table of mounts")?;
    let mounts = pool_mounts(&table);
    let source = place(&mounts, &args.source)?;
    let name = args.source.file_name();
    let target = match name.filter(|_| args.target.is_dir()) {
        Some(name) => args.target.join(name),
        None => args.target.clone(),
    };
    let to = place(&mounts, &target)?;
    if to.pool != source.pool {
        bail!(
            "{} is in the pool {}, {} in {}: only files of one pool share blocks; copy it instead",
            args.source.display(),
            source.pool.display(),
            target.display(),
            to.pool.display()
        );
    }
    let pool = Pool::open(&source.pool)?;
    pool.require_daemon()?;
    let connector = Arc::new(SocketConnector { path: pool.socket() });
    let fs = Fs::mount(connector, FsOptions::default()).context("cannot open a session")?;
    let posix = Posix::new(fs, this_user());
    let cloned = make(&posix, &source.path, &to.path, args.force);
    let ended = posix.fs().unmount();
    let bytes = cloned.map_err(|errno| why(errno, args, &target))?;
    ended.map_err(|error| anyhow::anyhow!("the session did not end in order: {error}"))?;
    if args.json {
        let told = serde_json::json!({"source": args.source, "target": target, "bytes": bytes});
        out::line(&format!("{told:#}"));
    } else {
        out::line(&format!(
            "{} shares {bytes} bytes with {}",
            target.display(),
            args.source.display()
        ));
    }
    Ok(())
}

fn this_user() -> Cred {
    let groups = getgroups().unwrap_or_default();
    Cred {
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
        groups: groups.into_iter().map(|group| group.as_raw()).collect(),
    }
}

/// Finds the pool of a path, of which all but the name must exist, through the mount that shows it.
fn place(mounts: &[PoolMount], path: &Path) -> anyhow::Result<Place> {
    let at = crate::mounted::absolute(path).with_context(|| format!("cannot find {}", path.display()))?;
    let within = |mount: &&PoolMount| mount.is_whole && at.starts_with(&mount.at);
    let innermost = mounts
        .iter()
        .filter(within)
        .max_by_key(|mount| mount.at.as_os_str().len());
    let Some(mount) = innermost else {
        bail!(
            "{} is not in a mount of a pool: `varve status POOL` names the mounts of a pool",
            path.display()
        );
    };
    let inner = at.strip_prefix(&mount.at)?;
    Ok(Place {
        pool: mount.pool.clone(),
        path: [b"/", inner.as_os_str().as_bytes()].concat(),
    })
}

/// Makes the clone under another name, and gives it its own when it is whole. Returns its size in bytes.
fn make(posix: &Posix, source: &[u8], target: &[u8], replace: bool) -> Result<u64, Errno> {
    let from = posix.open(source, libc::O_RDONLY, 0)?;
    let attr = posix.fstat(from)?;
    let part = [target, format!(".varve-clone-{}", std::process::id()).as_bytes()].concat();
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY;
    let to = posix.open(&part, flags, attr.mode & 0o777)?;
    let flags = RenameFlags {
        noreplace: !replace,
        ..RenameFlags::default()
    };
    let made = posix
        .clone_range(from, 0, to, 0, 0)
        .and_then(|()| posix.fsync(to))
        .and_then(|()| posix.renameat2(AT_FDCWD, &part, AT_FDCWD, target, flags));
    if let Err(errno) = made {
        let _ = posix.unlink(&part);
        return Err(errno);
    }
    Ok(attr.size_bytes)
}

fn why(errno: Errno, args: &CloneArgs, target: &Path) -> anyhow::Error {
    let (source, to) = (args.source.display(), target.display());
    match errno.0 {
        libc::EEXIST => anyhow::anyhow!("{to} exists; --force replaces it"),
        libc::EOPNOTSUPP => anyhow::anyhow!(
            "the pool is of an older format, which has no shared blocks; stop it and run `varve upgrade POOL`"
        ),
        libc::EISDIR | libc::EINVAL => anyhow::anyhow!("{source} is not a regular file"),
        libc::EMLINK => {
            anyhow::anyhow!("a block of {source} has as many owners as a block can have; copy it instead")
        }
        errno => {
            let error = std::io::Error::from_raw_os_error(errno);
            anyhow::anyhow!("cannot clone {source} to {to}: {error}")
        }
    }
}
