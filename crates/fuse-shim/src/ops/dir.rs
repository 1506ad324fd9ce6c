//! Listings of directories.

use super::{Outcome, Shim, answer, timeouts};
use crate::convert::{errno, file_attr, file_type};
use crate::transport::{DirRequests, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, Timeouts};
use fuser::{FileType, Generation, INodeNo};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;
use varve_format::{InodeAttr, InodeKey};
use varve_ipc::Cred;

/// Entries requested from LibFS at once while a directory is read.
const DIR_BATCH: usize = 256;
/// Offsets 1 and 2 of a directory stream are behind "." and ".."; the daemon's cookies follow.
const DOTS: u64 = 2;

impl Shim {
    /// The dots of a directory, with their offsets, as far as they lie behind `offset`.
    fn dots(&self, key: InodeKey, offset: u64) -> Outcome<Vec<(&'static [u8], InodeAttr, u64)>> {
        let mut dots = Vec::new();
        if offset < DOTS {
            let own = self.fs.getattr(key)?;
            let parent = self
                .fs
                .lookup(key, b"..", &Cred::root())
                .unwrap_or_else(|_| own.clone());
            if offset == 0 {
                dots.push((&b"."[..], own, 1));
            }
            dots.push((&b".."[..], parent, DOTS));
        }
        Ok(dots)
    }

    fn list(&self, key: InodeKey, offset: u64, reply: &mut ReplyDirectory<'_>) -> Outcome<()> {
        for (name, attr, next) in self.dots(key, offset)? {
            let (ino, name) = (INodeNo(attr.key.number()), OsStr::from_bytes(name));
            if reply.add(ino, next, FileType::Directory, name) {
                return Ok(());
            }
        }
        let mut cookie = offset.saturating_sub(DOTS);
        loop {
            let entries = self.fs.readdir(key, cookie, DIR_BATCH)?;
            let Some(last) = entries.last() else { return Ok(()) };
            cookie = last.next_cookie;
            for entry in &entries {
                let (ino, name) = (INodeNo(entry.key.number()), OsStr::from_bytes(&entry.name));
                if reply.add(ino, entry.next_cookie + DOTS, file_type(entry.kind), name) {
                    return Ok(());
                }
            }
        }
    }

    /// Adds one page of entries: while answers are held, nothing may be waited for.
    fn list_plus(&self, key: InodeKey, offset: u64, mut reply: ReplyDirectoryPlus<'_>) {
        let asked = self.fs.asked();
        let none = Timeouts {
            name: Duration::ZERO,
            attr: Duration::ZERO,
        };
        let most = reply.most().clamp(1, DIR_BATCH);
        let outcome = self.dots(key, offset).and_then(|dots| {
            let mut cookie = offset.saturating_sub(DOTS);
            loop {
                let entries = self.fs.readdir_plus(key, cookie, most)?;
                match entries.last() {
                    // All were removed meanwhile. An empty answer would be the end of the directory.
                    Some(last) if entries.iter().all(|entry| entry.attr.is_none()) => {
                        cookie = last.next_cookie;
                    }
                    _ => return Ok((dots, entries)),
                }
            }
        });
        let (dots, entries) = match outcome {
            Ok(listed) => listed,
            Err(error) => return reply.error(errno(error)),
        };
        for (name, attr, next) in dots {
            let generation = Generation(u64::from(attr.key.generation.0));
            let (ino, name) = (INodeNo(attr.key.number()), OsStr::from_bytes(name));
            if reply.add(ino, next, name, &none, &file_attr(&attr), generation) {
                return reply.ok();
            }
        }
        let mut held = Vec::with_capacity(entries.len());
        for entry in entries {
            // Attributes without a lease are the daemon's: another session may have changed them.
            let known = self.fs.known_attr(entry.key);
            // Without attributes, the inode was removed after the page was read.
            let seen = known.as_ref().map(|attr| attr.key);
            let Some(attr) = known.or(entry.attr) else {
                continue;
            };
            let answer = self.fs.answer_name(asked, key, seen);
            let ttl = timeouts(&attr, &answer);
            let generation = Generation(u64::from(attr.key.generation.0));
            let (ino, next) = (INodeNo(attr.key.number()), entry.next_cookie + DOTS);
            let name = OsStr::from_bytes(&entry.name);
            if reply.add(ino, next, name, &ttl, &file_attr(&attr), generation) {
                break;
            }
            // The kernel counts a lookup for each entry that it gets, but not for the dots.
            self.nodes.learn(attr.key);
            held.push(answer);
        }
        reply.ok();
        drop(held);
    }
}

impl DirRequests for Shim {
    fn readdir(&self, ino: INodeNo, offset: u64, mut reply: ReplyDirectory<'_>) {
        match self.key(ino).and_then(|key| self.list(key, offset, &mut reply)) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn readdirplus(&self, ino: INodeNo, offset: u64, reply: ReplyDirectoryPlus<'_>) {
        match self.key(ino) {
            Ok(key) => self.list_plus(key, offset, reply),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn fsyncdir(&self, ino: INodeNo, datasync: bool, reply: ReplyEmpty<'_>) {
        answer(self.key(ino).and_then(|key| self.fs.fsync(key, datasync)), reply);
    }
}
