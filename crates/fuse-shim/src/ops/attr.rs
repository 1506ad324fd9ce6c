//! Attributes of inodes and of the file system.

use super::{Outcome, Shim, answer, cred, gone, timeouts};
use crate::convert::{errno, file_attr, time_ns};
use crate::transport::{AttrRequests, Changes, ReplyAttr, ReplyEmpty, ReplyStatfs, Request, Space};
use fuser::{INodeNo, TimeOrNow};
use varve_format::InodeAttr;
use varve_libfs::{AttrChange, SetTime};

fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::SpecificTime(at) => SetTime::At(time_ns(at)),
        TimeOrNow::Now => SetTime::Now,
    }
}

impl Shim {
    fn answer_attr(
        &self,
        request: &Request,
        reply: ReplyAttr<'_>,
        operation: impl FnOnce() -> Outcome<InodeAttr>,
    ) {
        let version = self.reply_version(request);
        match operation() {
            Ok(attr) => {
                let cached = self.fs.attr_reply(version, attr.key);
                reply.attr(&timeouts(&attr, &cached).attr, &file_attr(&attr));
            }
            Err(error) => reply.error(errno(error)),
        }
    }
}

impl AttrRequests for Shim {
    fn getattr(&self, request: &Request, ino: INodeNo, reply: ReplyAttr<'_>) {
        self.answer_attr(request, reply, || {
            let attr = self.key(ino).and_then(|key| self.fs.getattr(key));
            attr.map_err(gone)
        });
    }

    fn setattr(&self, request: &Request, ino: INodeNo, changes: &Changes, reply: ReplyAttr<'_>) {
        let change = AttrChange {
            mode: changes.mode.map(|mode| mode & 0o7777),
            uid: changes.uid,
            gid: changes.gid,
            size: changes.size,
            atime: changes.atime.map(set_time),
            mtime: changes.mtime.map(set_time),
            kill_set_id: changes.kill_set_id,
        };
        self.answer_attr(request, reply, || {
            let key = self.key(ino)?;
            self.fs.setattr(key, &change, &cred(request))
        });
    }

    fn statfs(&self, reply: ReplyStatfs<'_>) {
        match self.fs.statfs() {
            Ok(space) => reply.statfs(&Space {
                blocks: space.blocks,
                blocks_free: space.blocks_free,
                blocks_available: space.blocks_available,
                files: space.inodes_used + space.inodes_free,
                files_free: space.inodes_free,
                block_size: varve_format::BLOCK_SIZE as u32,
                name_max: varve_format::NAME_MAX as u32,
            }),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn access(&self, ino: INodeNo, reply: ReplyEmpty<'_>) {
        // With `default_permissions` the kernel has checked the mode bits; only the inode's existence is left
        // to check.
        // to check.
        answer(
            self.key(ino).and_then(|key| self.fs.getattr(key)).map(|_| ()),
            reply,
        );
    }
}
