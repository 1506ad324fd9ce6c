//! Listings of directories.

use super::{Outcome, Shim, answer, attr_ttl};
use crate::convert::{errno, file_attr, file_type};
use crate::transport::{DirRequests, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty};
use fuser::{FileType, Generation, INodeNo};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use varve_format::{InodeAttr, InodeKey};
use varve_ipc::Cred;

/// Entries requested from LibFS at once while a directory is read.
const DIR_BATCH: usize = 256;
/// Offsets 1 and 2 of a directory stream are behind "." and ".."; the daemon's cookies follow.
const DOTS: u64 = 2;

impl Shim {
    /// Walks a directory from stream offset `offset`. `emit` gets key, kind, attributes (if `with_attr`),
    /// name and the offset after the entry, and returns whether its buffer is full.
    fn walk(
        &self,
        key: InodeKey,
        offset: u64,
        with_attr: bool,
        mut emit: impl FnMut(InodeKey, FileType, Option<&InodeAttr>, &[u8], u64) -> bool,
    ) -> Outcome<()> {
        if offset < DOTS {
            let own = self.fs.getattr(key)?;
            if offset == 0 && emit(key, FileType::Directory, Some(&own), b".", 1) {
                return Ok(());
            }
            let parent = self.fs.lookup(key, b"..", &Cred::root()).unwrap_or(own);
            if emit(parent.key, FileType::Directory, Some(&parent), b"..", DOTS) {
                return Ok(());
            }
        }
        let mut cookie = offset.saturating_sub(DOTS);
        loop {
            let entries = if with_attr {
                self.fs.readdir_plus(key, cookie, DIR_BATCH)?
            } else {
                self.fs.readdir(key, cookie, DIR_BATCH)?
            };
            let Some(last) = entries.last() else { return Ok(()) };
            cookie = last.next_cookie;
            for entry in &entries {
                let fetched = match (&entry.attr, with_attr) {
                    (None, true) => match self.fs.getattr(entry.key) {
                        Ok(attr) => Some(attr),
                        // It was removed after the page was read.
                        Err(_) => continue,
                    },
                    _ => None,
                };
                let attr = entry.attr.as_ref().or(fetched.as_ref());
                if emit(
                    entry.key,
                    file_type(entry.kind),
                    attr,
                    &entry.name,
                    entry.next_cookie + DOTS,
                ) {
                    return Ok(());
                }
            }
        }
    }
}

impl DirRequests for Shim {
    fn readdir(&self, ino: INodeNo, offset: u64, mut reply: ReplyDirectory<'_>) {
        let outcome = self.key(ino).and_then(|key| {
            self.walk(key, offset, false, |key, kind, _, name, next| {
                reply.add(INodeNo(key.number()), next, kind, OsStr::from_bytes(name))
            })
        });
        match outcome {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn readdirplus(&self, ino: INodeNo, offset: u64, mut reply: ReplyDirectoryPlus<'_>) {
        let asked = self.fs.asked();
        // The first answer is held until all entries are sent, since a session that joins waits for it. Until
        // then this session is alone, so no other one keeps it waiting.
        let mut held = None;
        let outcome = self.key(ino).and_then(|key| {
            self.walk(key, offset, true, |key, _, attr, name, next| {
                let Some(attr) = attr else { return false };
                let answer = self.fs.answer(asked);
                let generation = Generation(u64::from(key.generation.0));
                let number = INodeNo(key.number());
                let name = OsStr::from_bytes(name);
                let ttl = attr_ttl(attr, answer.ttl());
                let full = reply.add(number, next, name, &ttl, &file_attr(attr), generation);
                // The kernel counts a lookup for each entry that it gets, but not for the dots.
                if !full && name != "." && name != ".." {
                    self.nodes.learn(key);
                }
                held.get_or_insert(answer);
                full
            })
        });
        match outcome {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
        drop(held);
    }

    fn fsyncdir(&self, ino: INodeNo, datasync: bool, reply: ReplyEmpty<'_>) {
        answer(self.key(ino).and_then(|key| self.fs.fsync(key, datasync)), reply);
    }
}
