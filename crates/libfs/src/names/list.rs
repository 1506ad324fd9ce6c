//! Reading directories and symbolic links.

use varve_format::{FileKind, InodeKey};
use varve_ipc::{Cred, DirEntry, Request, Response};

use super::table::Asking;
use super::{Target, directory};
use crate::errno::{Errno, OpError, Result};
use crate::session::Mount;

/// Most entries asked for at once.
pub(super) const PAGE_MAX: usize = 1024;

/// A page of a directory. Our own changes of it are digested first, so that the daemon's order and cookies are the only ones.
/// Attributes come with it where `attrs` wants them and the daemon knows them.
pub(crate) fn readdir(
    mount: &Mount,
    dir: InodeKey,
    cookie: u64,
    max: usize,
    attrs: bool,
) -> Result<Vec<DirEntry>> {
    let max = max.clamp(1, PAGE_MAX) as u32;
    mount.look(|session| {
        let pins = session.pin_read(dir)?;
        let node = pins.node(dir)?;
        directory(session, node, &Cred::root(), 0)?;
        let last = node.inode.read().last_seq;
        session.digest(last)?;
        let _asking = Asking::all(&node.names);
        let answer = session.call(Request::ReadDir {
            dir,
            cookie,
            max,
            attrs,
        })?;
        let Response::Entries(mut entries) = answer else {
            return Err(OpError::Failed(Errno(libc::EIO)));
        };
        let digested = session.page.digested();
        {
            let mut names = node.names.lock();
            for entry in &entries {
                names.learn(
                    &entry.name,
                    Some(Target {
                        key: entry.key,
                        kind: entry.kind,
                    }),
                    digested,
                );
            }
        }
        // The daemon gives an ordinary user's session no leases on what it has not looked up.
        if session.welcome.privileged {
            session.leases.listed(entries.iter().map(|entry| entry.key));
        }
        for entry in entries.iter_mut().filter(|_| attrs) {
            // What we may have changed is not yet what the daemon says.
            if let Some(child) = session.node(entry.key)
                && child.mode().is_some()
            {
                let attr = child.inode.attr();
                entry.attr = if child.mode().is_some() && attr.mode != 0 {
                    Some(attr)
                } else {
                    None
                };
            }
        }
        Ok(entries)
    })
}

/// Target of a symbolic link.
pub(crate) fn readlink(mount: &Mount, key: InodeKey) -> Result<Vec<u8>> {
    mount.look(|session| {
        let pins = session.pin_read(key)?;
        let node = pins.node(key)?;
        if node.inode.read().attr.kind() != FileKind::Symlink {
            return Err(OpError::Failed(Errno(libc::EINVAL)));
        }
        if let Some(target) = node.target.get() {
            return Ok(target.clone());
        }
        match session.call(Request::ReadLink { key })? {
            Response::Bytes(target) => {
                let _ = node.target.set(target.clone());
                Ok(target)
            }
            _ => Err(OpError::Failed(Errno(libc::EIO))),
        }
    })
}
