//! What an ordinary user's process does to get at what is another one's: by what it was given, by paths, by
//! processes, by requests, by its own log. Answers what it should not have got. Owns the attempts; what
//! became of what it logged is looked at by the test.

use crate::SECRET;
use crate::client::{Given, Wire};
use crate::person::{B, GROUP};
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use varve_format::log::{EntryMeta, LIVE_HEADER_SIZE, crc_seed, entry_crc, entry_size, payload_crc};
use varve_format::{FileBlock, Ino, InodeKey, LogOp, LogSeq, SetAttr, SetAttrMask};
use varve_ipc::{
    ClientKind, Cred, ForwardedOp, Grant, Hello, IpcError, LeaseMode, NEAR_MAX, Near, PROTOCOL_VERSION,
    Request, Response, Tell, Want, Welcome,
};
use zerocopy::IntoBytes;

/// How long an answer is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// What is attacked.
pub struct Job {
    pub uid: u32,
    pub socket: PathBuf,
    /// A file that only the other one reaches.
    pub secret: InodeKey,
    /// Of a session of the other one.
    pub token: u128,
    /// The daemon and the other one.
    pub pids: [u32; 2],
    pub live: PathBuf,
    pub pool: PathBuf,
}

/// What was got at that should not have been.
#[derive(Default)]
struct Found(Vec<String>);

impl Found {
    /// Notes `what` if `got`.
    fn if_so(&mut self, got: bool, what: impl std::fmt::Display) {
        if got {
            self.0.push(what.to_string());
        }
    }
}

/// A session by hand.
struct Session {
    wire: Wire,
    welcome: Welcome,
    given: Given,
    seq: u64,
    pos: u64,
}

const fn hello(resume: Option<u128>) -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        kind: ClientKind::Linked,
        read_only: false,
        resume,
        held: Vec::new(),
    }
}

/// Opens a session that stays as long as this process, and answers its token.
pub fn token_of(socket: &Path) -> u128 {
    let session = Session::open(socket, hello(None));
    let token = session.welcome.token;
    std::mem::forget(session);
    token
}

impl Session {
    fn open(socket: &Path, hello: Hello) -> Self {
        let mut wire = Wire::connect(socket).unwrap();
        let (welcome, given) = wire.hello(hello, PATIENCE).unwrap().expect("a session");
        Self {
            wire,
            welcome,
            given,
            seq: 0,
            pos: LIVE_HEADER_SIZE as u64,
        }
    }

    fn ask(&mut self, request: &Request) -> Result<Response, IpcError> {
        self.wire.ask(request, PATIENCE).unwrap().expect("an answer")
    }

    fn lease(&mut self, key: InodeKey, mode: LeaseMode) -> Result<Response, IpcError> {
        self.ask(&Request::Acquire {
            wants: vec![Want { key, mode }],
        })
    }

    fn look(&mut self, dir: InodeKey, name: &str) -> Option<InodeKey> {
        let request = Request::Lookup {
            dir,
            name: name.into(),
        };
        match self.ask(&request) {
            Ok(Response::Entry(Some(attr))) => Some(attr.key),
            _ => None,
        }
    }

    /// A name in a directory of the root, and the directory.
    fn find(&mut self, dir: &str, name: &str) -> (InodeKey, InodeKey) {
        self.lease(InodeKey::ROOT, LeaseMode::Read).unwrap();
        let at = self.look(InodeKey::ROOT, dir).unwrap();
        self.lease(at, LeaseMode::Read).unwrap();
        (at, self.look(at, name).unwrap())
    }

    /// Logs an operation, as the library does it, whatever it is.
    fn log(&mut self, op: &LogOp<'_>) {
        let mut body = Vec::new();
        op.encode_body(&mut body);
        self.seq += 1;
        let meta = EntryMeta {
            seq: LogSeq(self.seq),
            stable_below: LogSeq(self.seq),
            ..EntryMeta::default()
        };
        let mut header = op.header(&meta, body.len());
        body.extend_from_slice(op.data());
        header.crc32c = entry_crc(payload_crc(crc_seed(self.welcome.session), &body), &header).into();
        let log = copy(self.given.log.as_ref().expect("a log"));
        log.write_all_at(&[header.as_bytes(), body.as_slice()].concat(), self.pos)
            .unwrap();
        self.pos += entry_size(body.len()) as u64;
    }

    fn digest(&mut self) -> u64 {
        let request = Request::Digest {
            upto: LogSeq(self.seq),
            wait: true,
        };
        match self.ask(&request) {
            Ok(Response::Digested(upto)) => upto.0,
            other => panic!("{other:?}"),
        }
    }
}

fn copy(fd: &OwnedFd) -> File {
    File::from(fd.try_clone().unwrap())
}

/// The segments that a session of this user is given; they outlive it.
pub fn segments(socket: &Path) -> File {
    let session = Session::open(socket, hello(None));
    let given = session.given.nvm.as_ref().expect("segments");
    assert_eq!(session.welcome.nvm_bytes, copy(given).metadata().unwrap().len());
    copy(given)
}

/// Whether a file holds these bytes anywhere.
pub fn holds(file: &File, bytes: &[u8]) -> bool {
    let mut all = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut all, 0).unwrap();
    all.windows(bytes.len()).any(|part| part == bytes)
}

/// Everything; "nothing" is as it should be.
pub fn all(job: &Job) -> String {
    let mut found = Found::default();
    let mut session = Session::open(&job.socket, hello(None));
    found.if_so(session.welcome.privileged, "all rights");
    descriptors(job, &session, &mut found);
    paths(job, &mut found);
    processes(job, &mut found);
    requests(job, &mut session, &mut found);
    drop(session);
    resume(job, &mut found);
    logs(job, &mut found);
    cut_off(job, &mut found);
    if found.0.is_empty() {
        return "nothing".into();
    }
    found.0.join("; ")
}

/// Opens what a descriptor stands for once more.
fn open_again(file: &File, options: &OpenOptions) -> bool {
    options
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .is_ok()
}

/// What was given is what is its own, and no more can be made of it than was meant.
fn descriptors(job: &Job, session: &Session, found: &mut Found) {
    let given = &session.given;
    // It can be done, with a file of its own: what follows does not fail for another reason.
    let own = rustix::fs::memfd_create("own", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&own, 4096).unwrap();
    let own = File::from(own);
    let can = open_again(&own, File::options().write(true)) && maps_for_writing(&own);
    found.if_so(!can, "nothing at all can be opened again");
    found.if_so(
        given.backing.is_some(),
        "a file on the host's disk, to be filled at will",
    );
    found.if_so(!given.ssd.is_empty(), "the SSD, with everybody's data");
    let list = [
        ("page", &given.page, false),
        ("log", &given.log, true),
        ("segments", &given.nvm, false),
    ];
    for (what, fd, writable) in list {
        let Some(fd) = fd else { continue };
        let file = copy(fd);
        let meta = file.metadata().unwrap();
        // Who owns a file can open it again for anything, or let others.
        found.if_so(meta.uid() == job.uid, format!("{what}: a file of its own"));
        found.if_so(meta.mode() & 0o077 != 0, format!("{what}: open to others"));
        found.if_so(
            open_again(&file, File::options().write(true)),
            format!("{what}: opened again to write"),
        );
        found.if_so(
            open_again(&file, File::options().read(true)),
            format!("{what}: opened again to read"),
        );
        let mode = rustix::fs::Mode::from_raw_mode(0o666);
        found.if_so(
            rustix::fs::fchmod(&file, mode).is_ok(),
            format!("{what}: its mode changed"),
        );
        let own = Some(rustix::fs::Uid::from_raw(job.uid));
        found.if_so(
            rustix::fs::fchown(&file, own, None).is_ok(),
            format!("{what}: taken over"),
        );
        if writable {
            continue;
        }
        found.if_so(file.write_at(b"x", 0).is_ok(), format!("{what}: written"));
        found.if_so(file.set_len(0).is_ok(), format!("{what}: cut off"));
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        found.if_so(
            rustix::fs::fallocate(&file, punch, 0, 4096).is_ok(),
            format!("{what}: a hole in it"),
        );
        let grow = rustix::fs::FallocateFlags::empty();
        found.if_so(
            rustix::fs::fallocate(&file, grow, 0, 1 << 30).is_ok(),
            format!("{what}: made longer"),
        );
        let seals = rustix::fs::SealFlags::SEAL;
        found.if_so(
            rustix::fs::fcntl_add_seals(file.as_fd(), seals).is_ok(),
            format!("{what}: sealed"),
        );
        found.if_so(maps_for_writing(&file), format!("{what}: mapped for writing"));
    }
}

/// Whether a mapping of the file can be had that takes stores.
fn maps_for_writing(file: &File) -> bool {
    let len = 4096;
    let map = |protection| {
        // SAFETY: a new mapping at an address of the kernel's choice; nothing else is touched.
        unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        }
    };
    let writable = map(libc::PROT_READ | libc::PROT_WRITE);
    if writable != libc::MAP_FAILED {
        return true;
    }
    let readable = map(libc::PROT_READ);
    if readable == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: the mapping was just made, is used by nobody, and goes right after.
    unsafe {
        let changed = libc::mprotect(readable, len, libc::PROT_READ | libc::PROT_WRITE) == 0;
        libc::munmap(readable, len);
        changed
    }
}

/// No file of the pool or of another session can be opened by its path.
fn paths(job: &Job, found: &mut Found) {
    found.if_so(std::fs::read_dir(&job.live).is_ok(), "the list of the live files");
    let mut all: Vec<PathBuf> = ["nvm.img", "journal.img", "ssd.img", "lock", "up.lock"]
        .map(|name| job.pool.join(name))
        .to_vec();
    for session in 0..40 {
        all.push(job.live.join(format!("log-{session}")));
        all.push(job.live.join(format!("page-{session}")));
        all.push(job.pool.join(format!("logs/{session}.log")));
    }
    for number in 0..40 {
        for uid in [job.uid, B] {
            all.push(job.live.join(format!("user-{uid}-{number}")));
        }
    }
    for name in ["nvm.img", "journal.img"] {
        all.push(job.live.join(name));
    }
    for path in all {
        found.if_so(File::open(&path).is_ok(), path.display());
        found.if_so(File::options().write(true).open(&path).is_ok(), path.display());
    }
}

/// Nor through the processes that have them.
fn processes(job: &Job, found: &mut Found) {
    for pid in job.pids {
        let proc = PathBuf::from(format!("/proc/{pid}"));
        found.if_so(
            std::fs::read_dir(proc.join("fd")).is_ok(),
            format!("descriptors of {pid}"),
        );
        found.if_so(
            std::fs::read_dir(proc.join("map_files")).is_ok(),
            format!("mappings of {pid}"),
        );
        found.if_so(File::open(proc.join("mem")).is_ok(), format!("memory of {pid}"));
        for fd in 0..64 {
            let path = proc.join(format!("fd/{fd}"));
            found.if_so(File::open(&path).is_ok(), path.display());
        }
        let mut bytes = [0_u8; 8];
        let local = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let remote = libc::iovec {
            iov_base: std::ptr::dangling_mut::<u8>().cast(),
            iov_len: bytes.len(),
        };
        // SAFETY: the local part is a buffer that lives through the call; the remote one is another process'
        // business.
        let read =
            unsafe { libc::process_vm_readv(pid as i32, &raw const local, 1, &raw const remote, 1, 0) };
        let errno = std::io::Error::last_os_error().raw_os_error();
        // Not even whether there is something at the address.
        found.if_so(
            read >= 0 || errno != Some(libc::EPERM),
            format!("memory of {pid} by a call: {errno:?}"),
        );
        let raw = rustix::process::Pid::from_raw(pid as i32).unwrap();
        let pidfd = rustix::process::pidfd_open(raw, rustix::process::PidfdFlags::empty()).unwrap();
        for fd in 0..64 {
            let flags = rustix::process::PidfdGetfdFlags::empty();
            let got = rustix::process::pidfd_getfd(&pidfd, fd, flags);
            found.if_so(got.is_ok(), format!("descriptor {fd} of {pid}"));
        }
        // SAFETY: a request about another process; no memory of this one.
        let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid as i32, 0, 0) };
        found.if_so(seized == 0, format!("{pid}, by ptrace"));
    }
}

/// Whether an answer holds something of the secret.
fn leaks(answer: &Result<Response, IpcError>) -> bool {
    match answer {
        Ok(Response::Bytes(bytes)) => !bytes.is_empty(),
        Ok(Response::Extents(extents, _)) => !extents.is_empty(),
        Ok(Response::Attr(_) | Response::Granted(_) | Response::Xattrs(_)) => true,
        Ok(Response::Entry(entry)) => entry.is_some(),
        Ok(Response::Entries(entries, _)) => !entries.is_empty(),
        Ok(_) | Err(_) => false,
    }
}

/// Requests about a file in a directory that it may not enter.
fn requests(job: &Job, session: &mut Session, found: &mut Found) {
    let key = job.secret;
    session.lease(InodeKey::ROOT, LeaseMode::Read).unwrap();
    let dir = session.look(InodeKey::ROOT, "b").unwrap();
    session.lease(dir, LeaseMode::Read).unwrap();
    session.ask(&Request::Hold { keys: vec![key] }).unwrap();
    let read = Request::ReadData {
        key,
        offset: 0,
        len: 100,
    };
    let wants = vec![Want {
        key,
        mode: LeaseMode::Read,
    }];
    for (what, request) in [
        (
            "its name",
            Request::Lookup {
                dir,
                name: b"secret".to_vec(),
            },
        ),
        (
            "the names beside it",
            Request::ReadDir {
                dir,
                cookie: 0,
                max: 10,
            },
        ),
        ("its attributes", Request::GetAttr { key }),
        ("a lease", Request::Acquire { wants }),
        ("its extended attributes", Request::Xattrs { key }),
        ("its target", Request::ReadLink { key }),
        (
            "its place",
            Request::MapExtents {
                key,
                from: FileBlock(0),
                max: 10,
            },
        ),
        (
            "the owners of its blocks",
            Request::Owners {
                key,
                from: FileBlock(0),
                max: 10,
            },
        ),
        ("its data", read),
    ] {
        let answer = session.ask(&request);
        found.if_so(leaks(&answer), format!("by request: {what}: {answer:?}"));
    }
    // As the neighbour of what it may have.
    let near = Request::AcquireNear {
        wants: vec![Want {
            key: InodeKey::ROOT,
            mode: LeaseMode::Read,
        }],
        near: Near {
            these: vec![key],
            after: Ino(key.ino.0 - 1),
            count: NEAR_MAX,
            mode: LeaseMode::Read,
            tell: Tell {
                names: true,
                extents: true,
            },
        },
    };
    match session.ask(&near) {
        Ok(Response::Granted(grants)) => {
            let secret = grants.iter().any(|grant| grant.attr.key == key);
            found.if_so(secret, "a lease, as a neighbour");
            let told = |grant: &Grant| grant.told.names.is_some() || grant.told.extents.is_some();
            found.if_so(grants.iter().any(told), "names or places, with a lease");
        }
        other => panic!("{other:?}"),
    }
    // In root's name.
    let op = LogOp::SetAttr {
        key,
        attr: SetAttr {
            mask: SetAttrMask::MODE,
            mode: 0o777,
            ..SetAttr::default()
        },
    };
    let share = |compare| LogOp::Share {
        key,
        offset: 4096,
        source: key,
        source_offset: 0,
        len: 4096,
        compare,
    };
    let undo = LogOp::Unshare {
        key,
        offset: 0,
        len: 0,
    };
    let ops = [
        ("changing its mode", op),
        ("a comparison with it", share(true)),
        ("a clone of it", share(false)),
        ("an undo of its shares", undo),
    ];
    for (number, (what, op)) in (1..).zip(ops) {
        let mut entry = Vec::new();
        op.encode_body(&mut entry);
        let header = op.header(&EntryMeta::default(), entry.len());
        let op = ForwardedOp {
            entry: [header.as_bytes(), &entry].concat(),
            append: false,
            open: false,
            whiteout: false,
            cred: Cred::root(),
            number,
        };
        let answer = session.ask(&Request::Forward(op));
        found.if_so(
            answer.is_ok(),
            format!("the daemon's hand, in root's name: {what}"),
        );
    }
}

/// With the token of the other one's session.
fn resume(job: &Job, found: &mut Found) {
    let mut hello = hello(Some(job.token));
    hello.held = vec![job.secret];
    let mut session = Session::open(&job.socket, hello);
    found.if_so(session.welcome.seal.is_some(), "another one's session, taken up");
    let read = session.lease(job.secret, LeaseMode::Read);
    found.if_so(read.is_ok(), "another one's open file");
}

/// Operations that nobody would let it do, in its own log.
fn logs(job: &Job, found: &mut Found) {
    let mut session = Session::open(&job.socket, hello(None));
    let (mine, own) = session.find("a", "own");
    let (sticky, theirs) = session.find("sticky", "theirs");
    let (_, program) = session.find("common", "set-id");
    let closed = session.look(InodeKey::ROOT, "b").unwrap();
    for key in [InodeKey::ROOT, mine, own, sticky, theirs, program, closed] {
        session.lease(key, LeaseMode::Write).unwrap();
    }
    let Ok(Response::Inodes(numbers)) = session.ask(&Request::AllocInodes {
        near: mine,
        count: 16,
    }) else {
        panic!("no numbers");
    };
    let made = |number: usize, dir, name: &'static [u8], mode, uid, gid| LogOp::Create {
        dir,
        name,
        key: numbers[number].0,
        mode,
        uid,
        gid,
        rdev: 0x801,
        target: b"",
    };
    let set = |key, mask, mode, uid, gid| LogOp::SetAttr {
        key,
        attr: SetAttr {
            mask,
            mode,
            uid,
            gid,
            ..SetAttr::default()
        },
    };
    let uid = job.uid;
    let write = |key, data| LogOp::Write { key, offset: 0, data };
    let forbidden = [
        // A file that it cannot even name, and one that it cannot write.
        write(job.secret, b"planted"),
        set(job.secret, SetAttrMask::MODE, 0o777, 0, 0),
        write(theirs, b"planted"),
        LogOp::Truncate { key: theirs, size: 0 },
        set(theirs, SetAttrMask::MODE, 0o666, 0, 0),
        set(theirs, SetAttrMask::UID, 0, uid, 0),
        LogOp::SetXattr {
            key: theirs,
            name: b"user.planted",
            value: b"x",
        },
        // Its own file, given away, or with rights that are root's to give.
        set(own, SetAttrMask::UID, 0, B, 0),
        set(own, SetAttrMask::GID, 0, 0, GROUP),
        LogOp::SetXattr {
            key: own,
            name: b"security.capability",
            value: b"\x01",
        },
        LogOp::SetXattr {
            key: own,
            name: b"trusted.planted",
            value: b"x",
        },
        // New files of others, for others, and ones that the kernel would take for devices.
        made(0, mine, b"of-b", 0o104_755, B, B),
        made(1, mine, b"of-root", 0o104_755, 0, 0),
        made(2, mine, b"foreign-group", 0o102_755, uid, GROUP),
        made(3, mine, b"device", 0o060_666, uid, uid),
        // Names where it may not write, and of others where only they may.
        made(4, closed, b"planted", 0o100_644, uid, uid),
        made(5, InodeKey::ROOT, b"planted", 0o100_644, uid, uid),
        LogOp::Unlink {
            dir: sticky,
            name: b"theirs",
            key: theirs,
        },
        LogOp::Rename {
            dir: sticky,
            name: b"theirs",
            key: theirs,
            new_dir: sticky,
            new_name: b"moved",
            victim: None,
            exchange: false,
        },
    ];
    for op in &forbidden {
        session.log(op);
    }
    // This it may do: its group may write the program. That it does not go on running as B is the daemon's to
    // see to.
    session.log(&write(program, b"A's program"));
    session.log(&made(6, mine, b"control", 0o100_600, uid, uid));
    session.log(&write(numbers[6].0, b"logged by hand"));
    let digested = session.digest();
    found.if_so(
        digested != session.seq,
        format!("a log that is not digested: {digested} of {}", session.seq),
    );
}

/// Its own log, cut off, full of holes, and kept after the session's end; and the page.
fn cut_off(job: &Job, found: &mut Found) {
    let mut session = Session::open(&job.socket, hello(None));
    let log = copy(session.given.log.as_ref().unwrap());
    session.log(&LogOp::Noop);
    log.set_len(100).unwrap();
    session.digest();
    log.set_len(4 << 20).unwrap();
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&log, punch, 0, 4 << 20).unwrap();
    session.digest();
    let _ = session.ask(&Request::SyncLog {
        ranges: vec![(0, 4 << 20)],
    });
    log.set_len(0).unwrap();
    let _ = session.ask(&Request::SyncLog {
        ranges: vec![(0, 4 << 20)],
    });
    log.set_len(8 << 20).unwrap();
    let page = copy(session.given.page.as_ref().unwrap());
    let _ = session.ask(&Request::Bye);
    drop(session);
    // Other sessions come and go: what they get is not what this one has kept.
    for _ in 0..4 {
        drop(Session::open(&job.socket, hello(None)));
    }
    for (what, mut file) in [("log", log), ("page", page)] {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        found.if_so(
            bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes()),
            format!("the secret, in an old {what}"),
        );
        found.if_so(
            bytes.is_empty(),
            format!("an empty {what}: nothing was looked at"),
        );
    }
}
