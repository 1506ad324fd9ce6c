//! Operations that the daemon does itself: POSIX's answers.

use super::machine::{DIR, FILE, Machine, NONE, ROOT};
use crate::digest::{Applied, Client, MediateError, apply_mediated};
use varve_format::{EntryFlags, EntryMeta, InodeKey, LogOp, SetAttr, SetAttrMask};
use varve_ipc::{Cred, MediatedOp, MediatedResult};
use zerocopy::IntoBytes;

struct Caller {
    machine: Machine,
    number: u64,
    cred: Cred,
    checked: bool,
}

type Answer = Result<(Applied, MediatedResult), i32>;

impl Caller {
    fn new() -> Self {
        Self {
            machine: Machine::new(),
            number: 0,
            cred: Cred::root(),
            checked: false,
        }
    }

    fn be(&mut self, uid: u32) {
        self.cred = Cred {
            uid,
            gid: uid,
            groups: vec![],
        };
    }

    fn call(&mut self, op: LogOp<'_>) -> Answer {
        self.call_with(op, NONE, false)
    }

    fn call_with(&mut self, op: LogOp<'_>, flags: EntryFlags, append: bool) -> Answer {
        self.number += 1;
        let mut payload = Vec::new();
        op.encode_body(&mut payload);
        let body = payload.len();
        payload.extend_from_slice(op.data());
        let meta = EntryMeta {
            flags,
            ..EntryMeta::default()
        };
        let mut entry = op.header(&meta, body).as_bytes().to_vec();
        entry.extend_from_slice(&payload);
        let op = MediatedOp {
            entry,
            append,
            open: false,
            cred: self.cred.clone(),
            number: self.number,
        };
        let client = Client {
            uid: self.cred.uid,
            privileged: true,
            checked: self.checked,
            ..self.machine.client()
        };
        match apply_mediated(
            &self.machine.store,
            client,
            &op,
            None,
            &self.machine.environment(),
        ) {
            Ok(done) => Ok(done),
            Err(MediateError::Errno(errno)) => Err(errno),
            Err(MediateError::Store(error)) => panic!("{error}"),
        }
    }

    fn make(&mut self, dir: InodeKey, name: &[u8], mode: u32) -> Result<InodeKey, i32> {
        let uid = self.cred.uid;
        let op = LogOp::Create {
            dir,
            name,
            key: InodeKey::new(0, 0),
            mode,
            uid,
            gid: uid,
            rdev: 0,
            target: b"",
        };
        self.call(op).map(|(_, result)| result.attr.unwrap().key)
    }

    fn rename(
        &mut self,
        from: (InodeKey, &[u8], InodeKey),
        to: (InodeKey, &[u8]),
        victim: Option<InodeKey>,
    ) -> Answer {
        self.call(LogOp::Rename {
            dir: from.0,
            name: from.1,
            key: from.2,
            new_dir: to.0,
            new_name: to.1,
            victim,
            exchange: false,
        })
    }
}

fn errno<T>(answer: Result<T, i32>) -> i32 {
    answer.err().unwrap_or(0)
}

#[test]
fn what_the_kernel_has_checked_is_not_refused_for_groups_that_it_does_not_tell() {
    let mut caller = Caller::new();
    let dir = caller.make(ROOT, b"shared", DIR & !0o777 | 0o770).unwrap();
    let file = caller.make(dir, b"f", FILE).unwrap();
    let group = |gid| LogOp::SetAttr {
        key: dir,
        attr: SetAttr {
            mask: SetAttrMask::GID,
            gid,
            ..SetAttr::default()
        },
    };
    caller.call(group(50)).unwrap();
    // A member of group 50, of which nothing is said here.
    caller.be(1000);
    let name = (dir, &b"f"[..], file);
    assert_eq!(errno(caller.make(dir, b"g", FILE)), libc::EACCES);
    assert_eq!(errno(caller.rename(name, (dir, b"h"), None)), libc::EACCES);
    caller.checked = true;
    caller.make(dir, b"g", FILE).unwrap();
    caller.rename(name, (dir, b"h"), None).unwrap();
    caller
        .call(LogOp::Unlink {
            dir,
            name: b"h",
            key: file,
        })
        .unwrap();
}

#[test]
fn names_are_made_and_removed_with_posix_answers() {
    let mut caller = Caller::new();
    let dir = caller.make(ROOT, b"d", DIR).unwrap();
    let file = caller.make(dir, b"f", FILE).unwrap();
    assert_eq!(errno(caller.make(dir, b"f", FILE)), libc::EEXIST);
    assert_eq!(errno(caller.make(file, b"x", FILE)), libc::ENOTDIR);
    assert_eq!(
        errno(caller.call(LogOp::Unlink {
            dir: ROOT,
            name: b"d",
            key: dir
        })),
        libc::ENOTEMPTY
    );
    assert_eq!(
        errno(caller.call(LogOp::Unlink {
            dir,
            name: b"x",
            key: file
        })),
        libc::ENOENT
    );
    assert_eq!(
        errno(caller.call(LogOp::Unlink {
            dir,
            name: b"f",
            key: dir
        })),
        libc::ESTALE
    );
    assert_eq!(
        errno(caller.call(LogOp::Link {
            dir,
            name: b"l",
            key: dir
        })),
        libc::EPERM
    );
    let unlink = LogOp::Unlink {
        dir,
        name: b"f",
        key: file,
    };
    let (applied, result) = caller.call_with(unlink, EntryFlags::LAST_CLOSED, false).unwrap();
    assert_eq!((result.victim, result.attr), (Some(file), None));
    assert_eq!(applied.freed, [file]);
    caller
        .call(LogOp::Unlink {
            dir: ROOT,
            name: b"d",
            key: dir,
        })
        .unwrap();
    assert_eq!(caller.machine.attr(ROOT).nlink, 2);
    caller.machine.dump();
}

#[test]
fn permissions_and_sticky_directories_are_obeyed() {
    let mut caller = Caller::new();
    let private = caller.make(ROOT, b"private", 0o040_700).unwrap();
    let tmp = caller.make(ROOT, b"tmp", 0o041_777).unwrap();
    caller.be(5);
    assert_eq!(errno(caller.make(private, b"x", FILE)), libc::EACCES);
    assert_eq!(errno(caller.make(ROOT, b"x", FILE)), libc::EACCES);
    let mine = caller.make(tmp, b"mine", FILE).unwrap();
    caller.be(6);
    let unlink = LogOp::Unlink {
        dir: tmp,
        name: b"mine",
        key: mine,
    };
    assert_eq!(errno(caller.call(unlink)), libc::EPERM);
    assert_eq!(
        errno(caller.rename((tmp, b"mine", mine), (tmp, b"yours"), None)),
        libc::EPERM
    );
    let chmod = |mode| LogOp::SetAttr {
        key: mine,
        attr: SetAttr {
            mask: SetAttrMask::MODE,
            mode,
            ..SetAttr::default()
        },
    };
    assert_eq!(errno(caller.call(chmod(0o777))), libc::EPERM);
    let xattr = LogOp::SetXattr {
        key: mine,
        name: b"user.x",
        value: b"",
    };
    assert_eq!(errno(caller.call(xattr)), libc::EACCES);
    caller.be(5);
    assert_eq!(caller.call(chmod(0o600)).unwrap().1.attr.unwrap().mode, 0o100_600);
    let chown = SetAttr {
        mask: SetAttrMask::UID,
        uid: 6,
        ..SetAttr::default()
    };
    assert_eq!(
        errno(caller.call(LogOp::SetAttr {
            key: mine,
            attr: chown
        })),
        libc::EPERM
    );
    caller.call(unlink).unwrap();
    caller.machine.dump();
}

#[test]
fn directory_moves_but_not_below_itself() {
    let mut caller = Caller::new();
    let a = caller.make(ROOT, b"a", DIR).unwrap();
    let b = caller.make(a, b"b", DIR).unwrap();
    let file = caller.make(ROOT, b"f", FILE).unwrap();
    assert_eq!(
        errno(caller.rename((ROOT, b"a", a), (b, b"x"), None)),
        libc::EINVAL
    );
    assert_eq!(
        errno(caller.rename((a, b"b", b), (ROOT, b"a"), Some(a))),
        libc::ENOTEMPTY
    );
    assert_eq!(
        errno(caller.rename((a, b"b", b), (ROOT, b"f"), Some(file))),
        libc::ENOTDIR
    );
    assert_eq!(
        errno(caller.rename((ROOT, b"f", file), (a, b"b"), Some(b))),
        libc::EISDIR
    );
    assert_eq!(
        errno(caller.rename((ROOT, b"f", file), (a, b"b"), None)),
        libc::EEXIST
    );
    caller.rename((a, b"b", b), (ROOT, b"b"), None).unwrap();
    assert_eq!(
        (caller.machine.attr(ROOT).nlink, caller.machine.attr(a).nlink),
        (4, 2)
    );
    assert_eq!(caller.machine.attr(b).parent, ROOT.ino);
    caller.machine.dump();
}

#[test]
fn append_goes_to_the_end_wherever_that_is() {
    let mut caller = Caller::new();
    let key = caller.make(ROOT, b"log", FILE).unwrap();
    for (at, text) in [&b"one "[..], b"two ", b"three"].into_iter().enumerate() {
        let (_, result) = caller
            .call_with(
                LogOp::Write {
                    key,
                    offset: 999,
                    data: text,
                },
                NONE,
                true,
            )
            .unwrap();
        assert_eq!(result.offset, at as u64 * 4);
    }
    assert_eq!(caller.machine.data(key), b"one two three");
    assert_eq!(
        errno(caller.call(LogOp::Write {
            key: ROOT,
            offset: 0,
            data: b"x"
        })),
        libc::EISDIR
    );
    assert_eq!(
        errno(caller.call(LogOp::Truncate {
            key: InodeKey::new(99, 1),
            size: 0
        })),
        libc::ESTALE
    );
}

#[test]
fn mediated_number_is_carried_out_once() {
    let mut caller = Caller::new();
    caller.make(ROOT, b"f", FILE).unwrap();
    caller.number -= 1;
    assert_eq!(errno(caller.make(ROOT, b"g", FILE)), libc::EALREADY);
    assert_eq!(caller.machine.lookup(ROOT, b"g"), None);
    assert_eq!(
        caller.machine.store.sessions().unwrap()[0].last_mediated.number,
        1
    );
}
