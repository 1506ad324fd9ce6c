//! The processes that write: this test program, run again. Owns how a call is made, through the mount or
//! through the library.

use crate::calls::{Call, Calls, State, slot_offset};
use crate::ledger::{Ledger, SHORT, Ticks, WRONG};
use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use varve_libfs::posix::{Fd, Posix};
use varve_libfs::{Cred, Fs, FsOptions, SocketConnector};

/// Tells a test process that it is a worker: `linked|mount POOL OUTSIDE SEED ROUND WRITER…`, a word a line.
const ENV: &str = "VARVE_KILL_WORKER";
/// How long a worker that was told to stop may take before it ends anyway.
const STOP_LIMIT: Duration = Duration::from_secs(80);

/// A worker process; killed when dropped.
pub struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
}

/// How a worker reaches the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// System calls on the mount.
    Mount,
    /// The library, in the worker's own process.
    Linked,
}

impl Worker {
    /// Starts one that has these writers as threads.
    pub fn start(
        way: Way,
        pool: &Path,
        outside: &Path,
        seed: u64,
        round: u32,
        writers: std::ops::Range<u32>,
    ) -> Self {
        let mut words = vec![
            format!("{way:?}"),
            pool.display().to_string(),
            outside.display().to_string(),
            seed.to_string(),
            round.to_string(),
        ];
        words.extend(writers.map(|writer| writer.to_string()));
        let mut child = Command::new(std::env::current_exe().expect("the test program"))
            .args(["worker", "--exact", "--nocapture", "--test-threads=1"])
            .env(ENV, words.join("\n"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("a worker starts");
        let stdin = child.stdin.take();
        Self { child, stdin }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_none())
    }

    /// Tells it to end after the calls under way and waits.
    pub fn stop(mut self) {
        self.stdin = None;
        crate::common::wait_until("the end of a worker", || !self.runs());
        let status = self.child.wait().expect("it has ended");
        assert!(status.success(), "a worker ended with {status}");
    }

    /// Waits for one that was killed.
    pub fn reap(mut self) {
        let _ = self.child.kill();
        self.child.wait().expect("it ends");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Is the whole process if it was started as a worker; else does nothing.
pub fn main() {
    let Ok(words) = std::env::var(ENV) else {
        return;
    };
    let words: Vec<&str> = words.lines().collect();
    let [way, pool, outside, seed, round, writers @ ..] = words.as_slice() else {
        panic!("{ENV} is incomplete");
    };
    let (pool, outside) = (PathBuf::from(pool), PathBuf::from(outside));
    let (seed, round) = (seed.parse().expect("a seed"), round.parse().expect("a round"));
    let stop: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
    std::thread::spawn(move || {
        // The end of the pipe: told to stop, or the test is gone.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        stop.store(true, Ordering::SeqCst);
        std::thread::sleep(STOP_LIMIT);
        std::process::exit(3);
    });
    let ticks = Ticks::new();
    let linked = (*way == "Linked").then(|| {
        let connector = Arc::new(SocketConnector {
            path: pool.join("sock"),
        });
        Fs::mount(connector, FsOptions::default()).expect("a session")
    });
    std::thread::scope(|scope| {
        for writer in writers {
            let writer: u32 = writer.parse().expect("a writer");
            let (linked, ticks, pool, outside) = (linked.clone(), &ticks, &pool, &outside);
            scope.spawn(move || {
                let ledger = Ledger::new(&crate::ledger::path(outside, writer, round), ticks);
                let calls = Calls::new(seed, writer, round);
                match linked {
                    Some(fs) => write(Linked::new(fs, writer), calls, ledger, stop),
                    None => write(Mounted::new(&pool.join("mnt"), writer), calls, ledger, stop),
                }
            });
        }
    });
    if let Some(fs) = linked {
        fs.unmount().expect("the session ends in order");
    }
    std::process::exit(0);
}

/// One writer.
fn write(mut way: impl Caller, calls: Calls, mut ledger: Ledger<'_>, stop: &AtomicBool) {
    let mut state = State::of(way.files());
    for call in calls {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        ledger.begin();
        let result = way.call(&call);
        let (must, _) = state.apply(&call);
        let errno = match result {
            Ok(Some(bytes)) => {
                let Call::Read(name) = &call else {
                    panic!("{call:?} reads nothing")
                };
                if state.files.get(name) == Some(&bytes) {
                    0
                } else {
                    WRONG
                }
            }
            Ok(None) => 0,
            Err(errno) => errno as u16,
        };
        ledger.end(errno);
        if i32::from(errno) != must {
            return;
        }
    }
}

/// Makes calls in one writer's directory. Bytes only for a read; else the errno.
trait Caller {
    fn call(&mut self, call: &Call) -> Result<Option<Vec<u8>>, i32>;
    fn files(&self) -> BTreeMap<String, Vec<u8>>;
}

/// Everything in a writer's directory, seen through the library.
pub fn files_through_library(pool: &Path, writer: u32) -> Option<BTreeMap<String, Vec<u8>>> {
    let connector = Arc::new(SocketConnector {
        path: pool.join("sock"),
    });
    let fs = Fs::mount(connector, FsOptions::default()).ok()?;
    let files = Linked::new(fs.clone(), writer).files();
    fs.unmount().ok()?;
    Some(files)
}

/// The directory of a writer.
pub fn dir_name(writer: u32) -> String {
    format!("w{writer}")
}

/// Everything in a directory of the mount.
pub fn files_of(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    entries
        .map(|entry| {
            let entry = entry.expect("an entry");
            let body = std::fs::read(entry.path())
                .unwrap_or_else(|error| panic!("{}: {error}", entry.path().display()));
            (entry.file_name().into_string().expect("a name"), body)
        })
        .collect()
}

#[derive(Default)]
struct Mounted {
    dir: PathBuf,
    log: Option<OwnedFd>,
    slots: Option<OwnedFd>,
    fresh: Option<OwnedFd>,
}

impl Mounted {
    fn new(mnt: &Path, writer: u32) -> Self {
        Self {
            dir: mnt.join(dir_name(writer)),
            ..Self::default()
        }
    }
}

/// A call that wrote less than it was given is wrong: no record is longer than one call takes.
fn whole(done: usize, len: usize) -> Result<Option<Vec<u8>>, i32> {
    if done == len {
        Ok(None)
    } else {
        Err(i32::from(SHORT) + done as i32)
    }
}

fn fd(open: &Option<OwnedFd>) -> &OwnedFd {
    open.as_ref().expect("it was opened")
}

impl Caller for Mounted {
    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        files_of(&self.dir)
    }

    fn call(&mut self, call: &Call) -> Result<Option<Vec<u8>>, i32> {
        use rustix::fs::{Mode, OFlags};
        let mode = Mode::from_raw_mode(0o644);
        let dir = self.dir.clone();
        let at = |name: &str| dir.join(name);
        let done = |result: rustix::io::Result<()>| result.map(|()| None).map_err(|e| e.raw_os_error());
        let opened = |name: &str, flags| {
            rustix::fs::open(at(name), flags | OFlags::CLOEXEC, mode)
                .map(Some)
                .map_err(|e| e.raw_os_error())
        };
        match call {
            Call::Open("log") => {
                self.log = opened("log", OFlags::CREATE | OFlags::WRONLY | OFlags::APPEND)?;
                Ok(None)
            }
            Call::Open(name) => {
                self.slots = opened(name, OFlags::CREATE | OFlags::RDWR)?;
                Ok(None)
            }
            Call::Append(body) => match rustix::io::write(fd(&self.log), body) {
                Ok(n) => whole(n, body.len()),
                Err(error) => Err(error.raw_os_error()),
            },
            Call::Put(slot, body) => match rustix::io::pwrite(fd(&self.slots), body, slot_offset(*slot)) {
                Ok(n) => whole(n, body.len()),
                Err(error) => Err(error.raw_os_error()),
            },
            Call::Cut(len) => done(rustix::fs::ftruncate(fd(&self.slots), *len)),
            Call::Fresh(name) => {
                self.fresh = opened(name, OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY)?;
                Ok(None)
            }
            Call::Fill(body) => match rustix::io::write(fd(&self.fresh), body) {
                Ok(n) => whole(n, body.len()),
                Err(error) => Err(error.raw_os_error()),
            },
            Call::Fsync(fresh) => done(rustix::fs::fsync(fd(if *fresh {
                &self.fresh
            } else {
                &self.log
            }))),
            Call::Rename(from, to) => done(rustix::fs::rename(at(from), at(to))),
            Call::Unlink(name) => done(rustix::fs::unlink(at(name))),
            Call::Read(name) => match std::fs::read(at(name)) {
                Ok(bytes) => Ok(Some(bytes)),
                Err(error) => Err(error.raw_os_error().unwrap_or(libc::EIO)),
            },
        }
    }
}

struct Linked {
    posix: Posix,
    log: Fd,
    slots: Fd,
    fresh: Fd,
}

impl Linked {
    fn new(fs: Fs, writer: u32) -> Self {
        let cred = Cred {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
        };
        let posix = Posix::new(fs, cred);
        posix
            .chdir(dir_name(writer).as_bytes())
            .expect("the writer's directory");
        Self {
            posix,
            log: -1,
            slots: -1,
            fresh: -1,
        }
    }

    fn open(&self, old: Fd, name: &str, flags: i32) -> Result<Fd, i32> {
        let fd = self.posix.open(name.as_bytes(), flags, 0o644).map_err(|e| e.0)?;
        if old >= 0 {
            self.posix.close(old).map_err(|e| e.0)?;
        }
        Ok(fd)
    }

    fn read(&self, name: &str) -> varve_libfs::Result<Vec<u8>> {
        let fd = self.posix.open(name.as_bytes(), libc::O_RDONLY, 0)?;
        let mut bytes = Vec::new();
        let mut part = vec![0; 1 << 16];
        let result = loop {
            match self.posix.read(fd, &mut part) {
                Ok(0) => break Ok(bytes),
                Ok(n) => bytes.extend(&part[..n]),
                Err(error) => break Err(error),
            }
        };
        self.posix.close(fd)?;
        result
    }
}

impl Caller for Linked {
    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let dir = self
            .posix
            .open(b".", libc::O_RDONLY | libc::O_DIRECTORY, 0)
            .expect("the directory");
        let mut files = BTreeMap::new();
        loop {
            let entries = self.posix.readdir(dir, 64).expect("entries");
            if entries.is_empty() {
                break;
            }
            for entry in entries {
                let name = String::from_utf8(entry.name.to_vec()).expect("a name");
                if name != "." && name != ".." {
                    let body = self.read(&name).expect("a file");
                    files.insert(name, body);
                }
            }
        }
        self.posix.close(dir).expect("it closes");
        files
    }

    fn call(&mut self, call: &Call) -> Result<Option<Vec<u8>>, i32> {
        let done = |result: varve_libfs::Result<()>| result.map(|()| None).map_err(|e| e.0);
        let wrote = |result: varve_libfs::Result<usize>, len| match result {
            Ok(n) => whole(n, len),
            Err(error) => Err(error.0),
        };
        match call {
            Call::Open("log") => {
                self.log = self.open(self.log, "log", libc::O_CREAT | libc::O_WRONLY | libc::O_APPEND)?;
                Ok(None)
            }
            Call::Open(name) => {
                self.slots = self.open(self.slots, name, libc::O_CREAT | libc::O_RDWR)?;
                Ok(None)
            }
            Call::Append(body) => wrote(self.posix.write(self.log, body), body.len()),
            Call::Put(slot, body) => wrote(
                self.posix.pwrite(self.slots, body, slot_offset(*slot)),
                body.len(),
            ),
            Call::Cut(len) => done(self.posix.ftruncate(self.slots, *len)),
            Call::Fresh(name) => {
                self.fresh = self.open(self.fresh, name, libc::O_CREAT | libc::O_TRUNC | libc::O_WRONLY)?;
                Ok(None)
            }
            Call::Fill(body) => wrote(self.posix.write(self.fresh, body), body.len()),
            Call::Fsync(fresh) => done(self.posix.fsync(if *fresh { self.fresh } else { self.log })),
            Call::Rename(from, to) => done(self.posix.rename(from.as_bytes(), to.as_bytes())),
            Call::Unlink(name) => done(self.posix.unlink(name.as_bytes())),
            Call::Read(name) => self.read(name).map(Some).map_err(|e| e.0),
        }
    }
}
