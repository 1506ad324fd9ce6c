//! Extended attributes.

use super::{Outcome, Shim, answer, cred};
use crate::convert::errno;
use crate::transport::{ReplyEmpty, ReplyXattr, Request, XattrRequests};
use fuser::{Errno, INodeNo};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use varve_ipc::RUN_ATTRIBUTE;

/// Replies with an attribute's value or a list of names, in the two-step protocol of getxattr(2).
fn answer_xattr(outcome: Outcome<Vec<u8>>, size: u32, reply: ReplyXattr<'_>) {
    match outcome {
        Ok(value) if size == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(value) => reply.data(&value),
        Err(error) => reply.error(errno(error)),
    }
}

impl XattrRequests for Shim {
    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        reply: ReplyEmpty<'_>,
    ) {
        let outcome = self.key(ino).and_then(|key| {
            let create = flags & libc::XATTR_CREATE != 0;
            let replace = flags & libc::XATTR_REPLACE != 0;
            self.fs
                .setxattr(key, name.as_bytes(), value, create, replace, &cred(request))
        });
        answer(outcome, reply);
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr<'_>) {
        if self.watches.asked(ino, name) {
            return reply.error(Errno::ENODATA);
        }
        if name == RUN_ATTRIBUTE {
            self.callers.note_run(request.thread());
            // Nobody asks this amid another call. The program may soon change what it has looked at on its
            // way here, or what others that have ended by now have.
            self.fs.thread_calls(request.thread());
            self.fs.look_for_ended_threads();
            return reply.error(Errno::ENODATA);
        }
        let outcome = self
            .key(ino)
            .and_then(|key| self.fs.getxattr(key, name.as_bytes(), &cred(request)));
        answer_xattr(outcome, size, reply);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr<'_>) {
        let outcome = self
            .key(ino)
            .and_then(|key| self.fs.listxattr(key, &cred(request)))
            .map(|names| {
                let mut list = Vec::new();
                for name in names {
                    list.extend_from_slice(&name);
                    list.push(0);
                }
                list
            });
        answer_xattr(outcome, size, reply);
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty<'_>) {
        answer(
            self.key(ino)
                .and_then(|key| self.fs.removexattr(key, name.as_bytes(), &cred(request))),
            reply,
        );
    }
}
