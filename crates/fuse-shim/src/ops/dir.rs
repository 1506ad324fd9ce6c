//! Listings of directories.

use super::{Outcome, Shim, answer};
use crate::convert::{errno, file_type};
use crate::transport::{DirRequests, ReplyDirectory, ReplyEmpty};
use fuser::{FileType, INodeNo};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
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
}

impl DirRequests for Shim {
    fn readdir(&self, ino: INodeNo, offset: u64, mut reply: ReplyDirectory<'_>) {
        match self.key(ino).and_then(|key| self.list(key, offset, &mut reply)) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn fsyncdir(&self, ino: INodeNo, datasync: bool, reply: ReplyEmpty<'_>) {
        answer(self.key(ino).and_then(|key| self.fs.fsync(key, datasync)), reply);
    }
}
