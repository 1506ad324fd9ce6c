//! Reading directories and symbolic links.

use varve_format::{FileKind, InodeKey};
use varve_ipc::{Cred, DirEntry, Request, Response};

use super::{Target, directory};
use crate::dir_cache::Asking;
use crate::errno::{Errno, OpError, Result};
use crate::lease::Node;
use crate::session::{Mount, Session};

/// Most entries requested at once.
pub(super) const PAGE_MAX: usize = 1024;

/// Adds the names of the page that starts at `cookie`, while an [`Asking`] is held; returns the cookie of the
/// next page, if it was not the last.
pub(super) fn take_in(dir: &Node, cookie: u64, entries: &[DirEntry], complete: bool) -> Option<u64> {
    let next = entries
        .last()
        .map(|entry| entry.next_cookie)
        .filter(|_| !complete);
    let names = entries.iter().map(|entry| {
        let (key, kind) = (entry.key, entry.kind);
        (&*entry.name, Target { key, kind })
    });
    dir.names.lock().take_page(cookie, names, next);
    next
}

/// Returns a page of a directory whose names are all known here, as the daemon would return it after a digest
/// of everything.
fn known_page(session: &Session, dir: &Node, cookie: u64, max: usize) -> Option<Vec<DirEntry>> {
    let order = session.welcome.name_hash.as_ref()?;
    let names = dir.names.lock();
    let page = names.page(order, cookie, max)?;
    let entry = |(next_cookie, name, target): (u64, &[u8], Target)| DirEntry {
        name: name.to_vec(),
        key: target.key,
        kind: target.kind,
        next_cookie,
    };
    Some(page.into_iter().map(entry).collect())
}

fn note_listed(session: &Session, entries: &[DirEntry]) {
    session
        .leases
        .listed(entries.iter().map(|entry| (entry.key, entry.kind)));
}

/// Returns a page of a directory. If not all names are known here, this session's changes to the directory
/// are digested first, so that the daemon knows them: in both cases the order and the cookies are the pool's.
pub(crate) fn readdir(mount: &Mount, dir: InodeKey, cookie: u64, max: usize) -> Result<Vec<DirEntry>> {
    let max = max.clamp(1, PAGE_MAX) as u32;
    mount.look(|session| {
        let pins = session.pin_read(dir)?;
        let node = pins.node(dir)?;
        directory(session, node, &Cred::root(), 0)?;
        if cookie == 0 {
            session.leases.note_asked_names();
        }
        if let Some(entries) = known_page(session, node, cookie, max as usize) {
            note_listed(session, &entries);
            return Ok(entries);
        }
        let last = node.inode.read().last_seq;
        session.digest(last)?;
        let _asking = Asking::all(&node.names);
        let answer = session.call(Request::ReadDir { dir, cookie, max })?;
        let Response::Entries(entries, complete) = answer else {
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
        // The names are known by now: this notes how far the directory was read.
        take_in(node, cookie, &entries, complete);
        // The daemon gives an ordinary user's session no leases on inodes that it has not looked up.
        if session.welcome.privileged {
            note_listed(session, &entries);
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
