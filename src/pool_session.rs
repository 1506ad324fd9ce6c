//! Files of a mounted pool, reached by a session of this process: finds the pool of a path by the table of
//! mounts, and opens the session. Knows no command.

use crate::pool::Pool;
use anyhow::{Context, bail};
use rustix::process::{getegid, geteuid, getgroups};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use varve_libfs::mounts::{PoolMount, pool_mounts};
use varve_libfs::{Cred, Fs, FsOptions, Posix, SocketConnector};

/// A path in a mounted pool.
#[derive(Debug)]
pub struct PoolPath {
    /// The mount through which the path leads.
    pub mount: PoolMount,
    /// From the pool's root.
    pub path: Vec<u8>,
}

/// The mounts of pools.
#[derive(Debug)]
pub struct Mounts(Vec<PoolMount>);

impl Mounts {
    /// Reads the table of mounts.
    pub fn read() -> anyhow::Result<Self> {
        let table = std::fs::read("/proc/self/mountinfo").context("cannot read the table of mounts")?;
        Ok(Self(pool_mounts(&table)))
    }

    /// Finds the pool of a path, of which all but the name must exist.
    pub fn locate(&self, path: &Path) -> anyhow::Result<PoolPath> {
        let at = crate::mounted::absolute(path).with_context(|| format!("cannot find {}", path.display()))?;
        let within = |mount: &&PoolMount| mount.is_whole && at.starts_with(&mount.at);
        let innermost = self
            .0
            .iter()
            .filter(within)
            .max_by_key(|mount| mount.at.as_os_str().len());
        let Some(mount) = innermost else {
            bail!(
                "{} is not in a mount of a pool: `varve status POOL` names the mounts of a pool",
                path.display()
            );
        };
        Ok(PoolPath {
            mount: mount.clone(),
            path: from_root(at.strip_prefix(&mount.at)?),
        })
    }
}

/// Makes a path below a mount one from the pool's root.
fn from_root(path: &Path) -> Vec<u8> {
    [b"/", path.as_os_str().as_bytes()].concat()
}

/// This process' user.
pub fn this_user() -> Cred {
    let groups = getgroups().unwrap_or_default();
    Cred {
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
        groups: groups.into_iter().map(|group| group.as_raw()).collect(),
    }
}

/// Opens a session of a pool whose daemon runs.
pub fn open(pool: &Pool) -> anyhow::Result<Posix> {
    pool.require_daemon()?;
    let connector = Arc::new(SocketConnector { path: pool.socket() });
    let fs = Fs::mount(connector, FsOptions::default()).context("cannot open a session")?;
    Ok(Posix::new(fs, this_user()))
}

/// Ends a session.
pub fn end(posix: &Posix) -> anyhow::Result<()> {
    posix
        .fs()
        .unmount()
        .map_err(|error| anyhow::anyhow!("the session did not end in order: {error}"))
}

/// A session of one mounted pool, and the mount.
pub struct PoolSession {
    /// The pool.
    pub pool: Pool,
    /// The session.
    pub posix: Posix,
    /// The mount that shows the files.
    pub mount: PoolMount,
    /// The session may act for all users: root's and the pool owner's.
    pub privileged: bool,
}

impl PoolSession {
    /// Opens a session of the pool in which all paths, which exist, lie.
    pub fn open(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let mounts = Mounts::read()?;
        let mut mount: Option<PoolMount> = None;
        for path in paths {
            std::fs::symlink_metadata(path).with_context(|| format!("cannot find {}", path.display()))?;
            let found = mounts.locate(path)?;
            match &mount {
                Some(mount) if mount.at != found.mount.at => bail!(
                    "{} is in another mount than {}: name paths of one mount at a time",
                    path.display(),
                    paths[0].display()
                ),
                _ => mount = Some(found.mount),
            }
        }
        let mount = mount.context("no path was given")?;
        let pool = Pool::open(&mount.pool)?;
        let posix = open(&pool)?;
        Ok(Self {
            posix,
            mount,
            privileged: pool.is_operator(),
            pool,
        })
    }

    /// The path of a file below the mount, from the pool's root.
    pub fn pool_path(&self, path: &Path) -> anyhow::Result<Vec<u8>> {
        let at = crate::mounted::absolute(path).with_context(|| format!("cannot find {}", path.display()))?;
        let inner = at
            .strip_prefix(&self.mount.at)
            .with_context(|| format!("{} is not below {}", path.display(), self.mount.at.display()))?;
        Ok(from_root(inner))
    }

    /// Bytes that the pool has free for new data.
    pub fn free_bytes(&self) -> anyhow::Result<u64> {
        let space = self
            .posix
            .fs()
            .statfs()
            .context("cannot ask for the free space")?;
        Ok(space.blocks_available * varve_format::BLOCK_BYTES)
    }

    /// Ends the session.
    pub fn end(self) -> anyhow::Result<()> {
        end(&self.posix)
    }
}
