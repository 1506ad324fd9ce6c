//! Requests on names: lookups, creation, renames and removal.

use super::{Outcome, STALE, Shim, answer, cred, gone, timeouts};
use crate::convert::{errno, file_attr};
use crate::transport::{LookupRequests, ReplyEmpty, ReplyEntry, ReplyLink, Request, Timeouts};
use fuser::{Generation, INodeNo, RenameFlags};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;
use varve_format::{InodeAttr, InodeKey};
use varve_ipc::Cred;
use varve_libfs::{CachedReply, ReplyVersion};

impl Shim {
    /// Returns the inode with a number from a file handle (name_to_handle_at(2)), or its parent directory:
    /// the kernel looks up `.` and `..` only for that. The kernel may have forgotten the inode long ago, or
    /// this may be another mount; the kernel checks the generation itself.
    fn by_number(&self, ino: INodeNo, name: &OsStr) -> Outcome<InodeAttr> {
        let key = self
            .nodes
            .key(ino.0)
            .unwrap_or_else(|| InodeKey::of_number(ino.0));
        let found = if name == "." {
            self.fs.getattr(key)
        } else {
            self.fs.lookup(key, name.as_bytes(), &Cred::root())
        };
        match found {
            Ok(attr) if attr.nlink == 0 => Err(STALE),
            other => other.map_err(gone),
        }
    }

    /// Answers an operation that finds or makes a name in `parent`.
    fn answer_entry(
        &self,
        request: &Request,
        parent: INodeNo,
        reply: ReplyEntry<'_>,
        operation: impl FnOnce(InodeKey) -> Outcome<InodeAttr>,
    ) {
        let version = self.reply_version(request);
        match self.key(parent) {
            Ok(dir) => self.entry(version, Some(dir), operation(dir), reply),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn entry(
        &self,
        version: ReplyVersion,
        dir: Option<InodeKey>,
        outcome: Outcome<InodeAttr>,
        reply: ReplyEntry<'_>,
    ) {
        match outcome {
            Ok(attr) => {
                self.nodes.learn(attr.key);
                let cached = match dir {
                    Some(dir) => self.fs.name_reply(version, dir, Some(attr.key)),
                    None => CachedReply::default(),
                };
                reply.entry(
                    &timeouts(&attr, &cached),
                    &file_attr(&attr),
                    Generation(u64::from(attr.key.generation.0)),
                );
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    /// Answers a lookup. A negative entry (number 0) is cached too, if names may be cached.
    fn answer_lookup(
        &self,
        request: &Request,
        parent: INodeNo,
        reply: ReplyEntry<'_>,
        operation: impl FnOnce(InodeKey) -> Outcome<InodeAttr>,
    ) {
        let version = self.reply_version(request);
        let dir = match self.key(parent) {
            Ok(dir) => dir,
            Err(error) => return reply.error(errno(error)),
        };
        let outcome = operation(dir);
        if outcome.as_ref().is_err_and(|error| error.0 == libc::ENOENT) {
            let cached = self.fs.name_reply(version, dir, None);
            let name = cached.name_ttl();
            if !name.is_zero() {
                let nothing = InodeAttr::new(InodeKey::new(0, 0), 0o100_000, 0);
                let attr = Duration::ZERO;
                return reply.entry(&Timeouts { name, attr }, &file_attr(&nothing), Generation(0));
            }
        }
        self.entry(version, Some(dir), outcome, reply);
    }
}

impl LookupRequests for Shim {
    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry<'_>) {
        if name == "." || name == ".." {
            return self.entry(ReplyVersion::default(), None, self.by_number(parent, name), reply);
        }
        self.answer_lookup(request, parent, reply, |dir| {
            self.fs.lookup(dir, name.as_bytes(), &cred(request))
        });
    }

    fn forget(&self, ino: INodeNo, lookups: u64) {
        if let Some(key) = self.nodes.forget(ino.0, lookups) {
            self.fs.forgotten(key);
        }
    }

    fn readlink(&self, ino: INodeNo, reply: ReplyLink<'_>) {
        match self.key(ino).and_then(|key| self.fs.readlink(key)) {
            Ok(target) => reply.target(&target),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        rdev: u32,
        reply: ReplyEntry<'_>,
    ) {
        let mode = if mode & libc::S_IFMT == 0 {
            mode | libc::S_IFREG
        } else {
            mode
        };
        self.answer_entry(request, parent, reply, |dir| {
            self.fs.create(dir, name.as_bytes(), mode, rdev, &cred(request))
        });
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, reply: ReplyEntry<'_>) {
        let mode = libc::S_IFDIR | (mode & 0o7777);
        self.answer_entry(request, parent, reply, |dir| {
            self.fs.create(dir, name.as_bytes(), mode, 0, &cred(request))
        });
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty<'_>) {
        answer(
            self.key(parent)
                .and_then(|dir| self.fs.unlink(dir, name.as_bytes(), &cred(request))),
            reply,
        );
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty<'_>) {
        answer(
            self.key(parent)
                .and_then(|dir| self.fs.rmdir(dir, name.as_bytes(), &cred(request))),
            reply,
        );
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry<'_>,
    ) {
        self.answer_entry(request, parent, reply, |dir| {
            self.fs.symlink(
                dir,
                link_name.as_bytes(),
                target.as_os_str().as_bytes(),
                &cred(request),
            )
        });
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty<'_>,
    ) {
        let wanted = varve_libfs::RenameFlags {
            noreplace: flags.contains(RenameFlags::RENAME_NOREPLACE),
            exchange: flags.contains(RenameFlags::RENAME_EXCHANGE),
            whiteout: flags.contains(RenameFlags::RENAME_WHITEOUT),
        };
        let outcome = self.key(parent).and_then(|dir| {
            let new_dir = self.key(newparent)?;
            self.fs.rename(
                dir,
                name.as_bytes(),
                new_dir,
                newname.as_bytes(),
                wanted,
                &cred(request),
            )
        });
        answer(outcome, reply);
    }

    fn link(
        &self,
        request: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry<'_>,
    ) {
        self.answer_entry(request, newparent, reply, |dir| {
            self.fs
                .link(self.key(ino)?, dir, newname.as_bytes(), &cred(request))
        });
    }
}
