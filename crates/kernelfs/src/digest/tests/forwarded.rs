//! Forwarded operations: POSIX's answers.

use super::machine::{DIR, FILE, Machine, NONE, ROOT};
use crate::digest::{Applied, Client, ForwardError, apply_forwarded};
use std::cell::Cell;
use std::rc::Rc;
use varve_format::{
    BLOCK_BYTES, EntryFlags, EntryMeta, FallocateMode, FileBlock, Ino, InodeKey, LogOp, SetAttr, SetAttrMask,
    Tier,
};
use varve_ipc::{Cred, ForwardedOp, ForwardedResult};
use varve_media::sim::Crash;
use varve_store::{DataTarget, Progress, Store, StoreError};
use zerocopy::IntoBytes;

/// Callback for the records of large allocations.
pub(super) type Spent = Box<dyn Fn(&Store, u64)>;

pub(super) struct Caller {
    pub(super) machine: Machine,
    number: u64,
    pub(super) cred: Cred,
    checked: bool,
    whiteout: bool,
    pub(super) spent: Spent,
}

pub(super) type Answer = Result<(Applied, ForwardedResult), i32>;

impl Caller {
    pub(super) fn new() -> Self {
        Self::on(Machine::new())
    }

    pub(super) fn on(machine: Machine) -> Self {
        Self {
            machine,
            number: 0,
            cred: Cred::root(),
            checked: false,
            whiteout: false,
            spent: Box::new(|_, _| ()),
        }
    }

    pub(super) fn be(&mut self, uid: u32) {
        self.cred = Cred {
            uid,
            gid: uid,
            groups: vec![],
        };
    }

    pub(super) fn call(&mut self, op: LogOp<'_>) -> Answer {
        self.call_with(op, NONE, false)
    }

    pub(super) fn call_with(&mut self, op: LogOp<'_>, flags: EntryFlags, append: bool) -> Answer {
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
        let op = ForwardedOp {
            entry,
            append,
            open: false,
            whiteout: self.whiteout,
            cred: self.cred.clone(),
            number: self.number,
        };
        let client = Client {
            uid: self.cred.uid,
            privileged: true,
            checked: self.checked,
            ..self.machine.client()
        };
        match apply_forwarded(
            &self.machine.store,
            client,
            &op,
            None,
            &self.machine.environment(),
            &|blocks| (self.spent)(&self.machine.store, blocks),
        ) {
            Ok(done) => Ok(done),
            Err(ForwardError::Errno(errno)) => Err(errno),
            Err(ForwardError::Store(error)) if error.is_no_space() => Err(libc::ENOSPC),
            Err(ForwardError::Store(error)) => panic!("{error}"),
        }
    }

    pub(super) fn make(&mut self, dir: InodeKey, name: &[u8], mode: u32) -> Result<InodeKey, i32> {
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

pub(super) fn errno<T>(answer: Result<T, i32>) -> i32 {
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
    // The daemon does not know that the caller is a member of group 50.
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
fn forwarded_number_is_carried_out_once() {
    let mut caller = Caller::new();
    caller.make(ROOT, b"f", FILE).unwrap();
    caller.number -= 1;
    assert_eq!(errno(caller.make(ROOT, b"g", FILE)), libc::EALREADY);
    assert_eq!(caller.machine.lookup(ROOT, b"g"), None);
    assert_eq!(
        caller.machine.store.sessions().unwrap()[0].last_forwarded.number,
        1
    );
}

/// Returns mode and device of the inode that `name` in `dir` names.
fn device(caller: &Caller, dir: InodeKey, name: &[u8]) -> Option<(u32, u32)> {
    let key = caller.machine.lookup(dir, name)?;
    let attr = caller.machine.attr(key);
    Some((attr.mode, attr.rdev))
}

#[test]
fn rename_leaves_a_whiteout_in_place_of_a_file_and_of_a_directory() {
    let mut caller = Caller::new();
    let upper = caller.make(ROOT, b"upper", 0o042_777).unwrap();
    let work = caller.make(ROOT, b"work", 0o040_777).unwrap();
    caller.be(1000);
    let file = caller.make(upper, b"f", FILE).unwrap();
    let dir = caller.make(upper, b"d", DIR).unwrap();
    let empty = caller.make(work, b"empty", DIR).unwrap();
    caller.whiteout = true;
    let gone = caller.rename((upper, b"f", dir), (work, b"g"), None);
    assert_eq!(errno(gone), libc::ESTALE);
    caller.rename((upper, b"f", file), (work, b"g"), None).unwrap();
    caller
        .rename((upper, b"d", dir), (work, b"empty"), Some(empty))
        .unwrap();
    for name in [&b"f"[..], b"d"] {
        assert_eq!(device(&caller, upper, name), Some((libc::S_IFCHR, 0)));
    }
    let made = caller.machine.lookup(upper, b"f").unwrap();
    let attr = caller.machine.attr(made);
    assert_eq!(
        (attr.uid, attr.gid, attr.nlink),
        (1000, 0, 1),
        "the directory hands its group on"
    );
    assert_eq!(caller.machine.lookup(work, b"g"), Some(file));
    assert_eq!(caller.machine.lookup(work, b"empty"), Some(dir));
    assert_eq!(caller.machine.attr(upper).nlink, 2);
    // Only a rename leaves a whiteout, an exchange does not.
    let exchange = LogOp::Rename {
        dir: work,
        name: b"g",
        key: file,
        new_dir: work,
        new_name: b"empty",
        victim: Some(dir),
        exchange: true,
    };
    assert_eq!(errno(caller.call(exchange)), libc::EINVAL);
    assert_eq!(errno(caller.make(work, b"h", FILE)), libc::EINVAL);
    caller.machine.dump();
}

#[test]
fn ordinary_user_makes_whiteouts_and_no_other_devices() {
    let mut caller = Caller::new();
    let dir = caller.make(ROOT, b"d", 0o040_777).unwrap();
    caller.be(1000);
    let device = |kind, rdev| LogOp::Create {
        dir,
        name: b"dev",
        key: InodeKey::new(0, 0),
        mode: kind,
        uid: 1000,
        gid: 1000,
        rdev,
        target: b"",
    };
    assert_eq!(errno(caller.call(device(libc::S_IFCHR, 0x103))), libc::EPERM);
    assert_eq!(errno(caller.call(device(libc::S_IFBLK, 0))), libc::EPERM);
    caller.call(device(libc::S_IFCHR, 0)).unwrap();
}

#[test]
fn whiteout_is_there_after_a_crash_if_and_only_if_the_name_has_moved() {
    let mut caller = Caller::new();
    let file = caller.make(ROOT, b"f", FILE).unwrap();
    let before = caller.machine.dump();
    caller.whiteout = true;
    let world = caller.machine.world.clone();
    let (recording, after) = world.record(|| {
        caller.rename((ROOT, b"f", file), (ROOT, b"g"), None).unwrap();
        caller.machine.dump()
    });
    assert_ne!(before, after);
    let points = recording.durability_points();
    let mut seen = (0, 0);
    for point in &points {
        for crash in [
            Crash::PowerNone,
            Crash::PowerSeeded(point.index as u64),
            Crash::Kill,
        ] {
            let found = Machine::open(recording.image(point.index, crash).into_world()).dump();
            assert!(
                found == before || found == after,
                "{point:?}, {crash:?}: {found:?}"
            );
            seen.0 += usize::from(found == before);
            seen.1 += usize::from(found == after);
        }
    }
    assert!(seen.0 > 0 && seen.1 > 0, "crashes before and after: {seen:?}");
}

const ALLOCATED: u64 = 1000;

const fn allocates(key: InodeKey, mode: FallocateMode) -> LogOp<'static> {
    LogOp::Fallocate {
        key,
        mode,
        offset: 0,
        len: ALLOCATED * BLOCK_BYTES,
    }
}

/// A file with data in a few blocks and holes between them.
fn sparse_file(caller: &mut Caller) -> InodeKey {
    let file = caller.make(ROOT, b"f", FILE).unwrap();
    for block in [0, 7, 8, 300] {
        caller
            .call(LogOp::Write {
                key: file,
                offset: block * BLOCK_BYTES,
                data: &[block as u8 + 1; 4096],
            })
            .unwrap();
    }
    file
}

/// Returns the number of allocated blocks of a file.
pub(super) fn blocks(store: &Store, key: InodeKey) -> u64 {
    let extents = store.map(key.ino, FileBlock(0), usize::MAX).unwrap();
    extents.iter().map(|extent| u64::from(extent.len)).sum()
}

/// Gives all the free space to a file.
pub(super) fn fill_up(store: &Store, ino: Ino) {
    let target = DataTarget::prefer(Tier::Nvm);
    for at in 0.. {
        let mut tx = store.begin().unwrap();
        match tx.allocate(ino, at * BLOCK_BYTES, BLOCK_BYTES, false, target) {
            Ok(Progress::Done) => drop(tx.commit().unwrap()),
            Ok(Progress::More) => panic!("one block fits into a record"),
            Err(StoreError::NoSpace { .. }) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn large_allocation_is_done_in_records_that_say_what_they_took() {
    for mode in [FallocateMode::Allocate, FallocateMode::ZeroRange] {
        let mut caller = Caller::new();
        let file = sparse_file(&mut caller);
        let (records, taken) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let seen = (Rc::clone(&records), Rc::clone(&taken));
        caller.spent = Box::new(move |_, blocks| {
            seen.0.set(seen.0.get() + 1);
            seen.1.set(seen.1.get() + blocks);
        });
        let before = caller.machine.data(file);
        caller.call(allocates(file, mode)).unwrap();
        assert_eq!(blocks(&caller.machine.store, file), ALLOCATED);
        let after = caller.machine.data(file);
        assert_eq!(after.len() as u64, ALLOCATED * BLOCK_BYTES);
        match mode {
            FallocateMode::Allocate => assert!(after.starts_with(&before)),
            _ => assert!(after.iter().all(|byte| *byte == 0)),
        }
        caller.machine.dump();
        assert!(records.get() > 10);
        assert_eq!(taken.get(), ALLOCATED - 4);
    }
}

#[test]
fn large_allocation_that_finds_no_space_midway_changes_nothing() {
    for mode in [
        FallocateMode::Allocate,
        FallocateMode::AllocateKeepSize,
        FallocateMode::ZeroRange,
    ] {
        let mut caller = Caller::new();
        let file = sparse_file(&mut caller);
        let other = caller.make(ROOT, b"other", FILE).unwrap();
        let before = (caller.machine.dump(), blocks(&caller.machine.store, file));
        let calls = Rc::new(Cell::new(0));
        let seen = Rc::clone(&calls);
        caller.spent = Box::new(move |store, _| {
            seen.set(seen.get() + 1);
            if seen.get() == 3 {
                fill_up(store, other.ino);
            }
        });
        assert_eq!(errno(caller.call(allocates(file, mode))), libc::ENOSPC);
        assert!((3..8).contains(&calls.get()), "it failed midway: {calls:?}");
        assert_eq!(
            (caller.machine.dump(), blocks(&caller.machine.store, file)),
            before
        );
        caller.call(LogOp::Truncate { key: other, size: 0 }).unwrap();
        caller.spent = Box::new(|_, _| ());
        caller.call(allocates(file, mode)).unwrap();
        assert_eq!(blocks(&caller.machine.store, file), ALLOCATED);
        caller.machine.dump();
    }
}

#[test]
fn large_allocation_that_crashes_midway_leaves_size_and_data_as_they_were_or_is_done() {
    let mut caller = Caller::new();
    let file = sparse_file(&mut caller);
    let before = caller.machine.dump();
    let world = caller.machine.world.clone();
    let (recording, after) = world.record(|| {
        caller.call(allocates(file, FallocateMode::Allocate)).unwrap();
        caller.machine.dump()
    });
    let mut seen = (0, 0);
    for point in &recording.durability_points() {
        for crash in [Crash::PowerNone, Crash::PowerSeeded(point.index as u64)] {
            let found = Machine::open(recording.image(point.index, crash).into_world()).dump();
            assert!(found == before || found == after, "{point:?}, {crash:?}");
            seen.0 += usize::from(found == before);
            seen.1 += usize::from(found == after);
        }
    }
    assert!(seen.0 > 20 && seen.1 > 0, "crashes before and after: {seen:?}");
}
