//! The inodes of the mount with marks of `inotify` or `fanotify`. Linked programs make changes of these
//! through the mount, whose kernel raises the events (ADR 26). Owns the scans of `/proc` and their results;
//! does not know how the results are used.
//!
//! The kernel does not report marks to a FUSE server, but shows them in `/proc/PID/fdinfo` of the process
//! that set them. A program under `varve run` reports its own marks by asking the root for an attribute that
//! does not exist ([`ATTRIBUTE`]).

use fuser::INodeNo;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fs, io};
use varve_ipc::{WATCHED_MAX, Watched};
use varve_libfs::Fs;

/// Attribute requested of the root. By itself, it makes the caller wait until the last scan is no older than
/// [`PAUSE`]. Followed by a dot and an inode number in hexadecimal digits, it reports a new mark on that
/// inode; followed by `.all`, on the whole mount.
pub(crate) const ATTRIBUTE: &[u8] = b"system.varve.watched";
/// Pause between two scans while there are other sessions; longer if a scan takes long.
const PAUSE: Duration = Duration::from_secs(1);
/// Scans take at most one part in `SHARE` of a processor's time.
const SHARE: u32 = 200;
/// Longest wait of a caller for a scan.
const WAIT: Duration = Duration::from_millis(200);
/// Upper bound on the inodes recorded from programs' reports.
const SAID_MAX: usize = WATCHED_MAX + 1;

/// The marks on one mount.
pub(crate) struct Watches {
    fs: Fs,
    state: Mutex<State>,
    /// Signalled when a scan is requested or has ended, or scans are to stop.
    changed: Condvar,
    /// The set that the daemon was told last. Locked while the daemon is told, so that an older set never
    /// arrives after a newer one.
    told: Mutex<Watched>,
}

#[derive(Default)]
struct State {
    /// A scan is requested, though there may be no other session.
    wanted: bool,
    ended: bool,
    /// Number of scans begun.
    begun: u64,
    /// Start time of the last scan that has ended.
    newest: Option<Instant>,
    /// Result of that scan.
    seen: Watched,
    /// Marks that programs reported, each with the number of scans begun by then: a later scan sees the mark
    /// unless it is gone.
    said: BTreeMap<u64, u64>,
    /// As `said`, for the whole mount.
    said_all: Option<u64>,
}

impl State {
    fn watched(&self) -> Watched {
        let mut numbers: BTreeSet<u64> = self.seen.numbers.iter().copied().collect();
        numbers.extend(self.said.keys());
        if self.seen.all || self.said_all.is_some() || numbers.len() > WATCHED_MAX {
            return Watched {
                all: true,
                numbers: Vec::new(),
            };
        }
        Watched {
            all: false,
            numbers: numbers.into_iter().collect(),
        }
    }
}

impl Watches {
    pub(crate) fn new(fs: Fs) -> Arc<Self> {
        Arc::new(Self {
            fs,
            state: Mutex::default(),
            changed: Condvar::new(),
            told: Mutex::default(),
        })
    }

    /// Handles a request for [`ATTRIBUTE`]. False for any other attribute.
    pub(crate) fn asked(&self, ino: INodeNo, name: &OsStr) -> bool {
        let Some(rest) = name.as_bytes().strip_prefix(ATTRIBUTE) else {
            return false;
        };
        if ino != INodeNo::ROOT {
            return false;
        }
        match rest {
            b"" => self.look_now(),
            b".all" => self.said(None),
            _ => {
                let digits = rest
                    .strip_prefix(b".")
                    .and_then(|digits| str::from_utf8(digits).ok());
                if let Some(number) = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()) {
                    self.said(Some(number));
                }
            }
        }
        true
    }

    /// Records a program's report of a mark on an inode, or on the whole mount for `None`.
    fn said(&self, number: Option<u64>) {
        {
            let mut state = self.state.lock();
            let begun = state.begun;
            match number {
                Some(number) if state.said.len() < SAID_MAX => {
                    state.said.insert(number, begun);
                }
                _ => state.said_all = Some(begun),
            }
            state.wanted = true;
        }
        self.changed.notify_all();
        self.tell();
    }

    /// Waits, for at most [`WAIT`], for a scan that is no older than [`PAUSE`].
    fn look_now(&self) {
        let until = Instant::now() + WAIT;
        let young = |state: &State| state.newest.is_some_and(|began| began.elapsed() < PAUSE);
        let mut state = self.state.lock();
        while !young(&state) && !state.ended {
            state.wanted = true;
            self.changed.notify_all();
            if self.changed.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }

    /// Tells the daemon the set of watched inodes, if it has changed or the daemon may have lost it.
    fn tell(&self) {
        let mut told = self.told.lock();
        let watched = self.state.lock().watched();
        // The session may have been replaced, so a set that is not empty is always sent again.
        if watched != *told || !watched.is_empty() {
            match self.fs.set_watched(&watched) {
                Ok(()) => *told = watched,
                Err(error) => tracing::debug!("what is watched could not be told: {error}"),
            }
        }
    }

    /// Starts a thread that scans repeatedly while there are other sessions, or on request. `device` is the
    /// mount's `st_dev`.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub(crate) fn start(self: Arc<Self>, device: (u32, u32)) -> io::Result<Looker> {
        let watches = Arc::clone(&self);
        let thread = std::thread::Builder::new()
            .name("varve-watches".into())
            .spawn(move || watches.look_on(device))?;
        Ok(Looker {
            watches: self,
            thread: Some(thread),
        })
    }

    fn look_on(&self, device: (u32, u32)) {
        let mut pause = PAUSE;
        loop {
            let number = {
                let mut state = self.state.lock();
                if self.fs.shared() {
                    let until = Instant::now() + pause;
                    while !state.ended
                        && !state.wanted
                        && !self.changed.wait_until(&mut state, until).timed_out()
                    {}
                } else {
                    while !state.ended && !state.wanted {
                        self.changed.wait(&mut state);
                    }
                }
                if state.ended {
                    return;
                }
                state.wanted = false;
                state.begun += 1;
                state.begun
            };
            let began = Instant::now();
            let seen = look(Path::new("/proc"), device);
            {
                let mut state = self.state.lock();
                state.seen = seen;
                state.said.retain(|_, begun| *begun >= number);
                state.said_all = state.said_all.filter(|begun| *begun >= number);
            }
            self.tell();
            self.state.lock().newest = Some(began);
            self.changed.notify_all();
            pause = PAUSE.max(began.elapsed() * SHARE);
        }
    }
}

/// The thread that scans. Dropping this ends it.
pub(crate) struct Looker {
    watches: Arc<Watches>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Looker {
    fn drop(&mut self) {
        self.watches.state.lock().ended = true;
        self.watches.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Scans the marks of all visible processes. A process that cannot be read counts as having none.
fn look(proc: &Path, device: (u32, u32)) -> Watched {
    let mut numbers = BTreeSet::new();
    let mut all = false;
    let mounts = mounts_of(proc, device);
    let processes = fs::read_dir(proc).into_iter().flatten().flatten();
    for process in processes.filter(|entry| entry.file_name().as_bytes().iter().all(u8::is_ascii_digit)) {
        let descriptors = fs::read_dir(process.path().join("fd"))
            .into_iter()
            .flatten()
            .flatten();
        for descriptor in descriptors {
            let Ok(target) = fs::read_link(descriptor.path()) else {
                continue;
            };
            let target = target.as_os_str().as_bytes();
            if target != b"anon_inode:inotify" && target != b"anon_inode:[fanotify]" {
                continue;
            }
            let info = process.path().join("fdinfo").join(descriptor.file_name());
            let text = fs::read_to_string(info).unwrap_or_default();
            for mark in text.lines().filter_map(|line| mark(line, device, &mounts)) {
                match mark {
                    Mark::Inode(number) => {
                        numbers.insert(number);
                    }
                    Mark::All => all = true,
                }
            }
        }
    }
    if all || numbers.len() > WATCHED_MAX {
        return Watched {
            all: true,
            numbers: Vec::new(),
        };
    }
    Watched {
        all: false,
        numbers: numbers.into_iter().collect(),
    }
}

/// Returns the numbers of the mounts that show the device, in this process' mount namespace.
fn mounts_of(proc: &Path, (major, minor): (u32, u32)) -> BTreeSet<u64> {
    let table = fs::read_to_string(proc.join("self/mountinfo")).unwrap_or_default();
    let device = format!("{major}:{minor}");
    let lines = table.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let number = words.next()?.parse().ok()?;
        (words.nth(1)? == device).then_some(number)
    });
    lines.collect()
}

#[derive(Debug, PartialEq, Eq)]
enum Mark {
    Inode(u64),
    All,
}

/// Returns the mark in a line of `fdinfo` (proc(5)), if it is on the mount.
fn mark(line: &str, (major, minor): (u32, u32), mounts: &BTreeSet<u64>) -> Option<Mark> {
    let kind = line.split(' ').next()?;
    if kind != "inotify" && kind != "fanotify" {
        return None;
    }
    let word = |name: &str| {
        let text = line.split(' ').find_map(|word| word.strip_prefix(name))?;
        u64::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
    };
    if let Some(mount) = word("mnt_id:") {
        return mounts.contains(&mount).then_some(Mark::All);
    }
    // The kernel's internal encoding, with twenty bits for the minor number.
    if word("sdev:")? != u64::from(major) << 20 | u64::from(minor) {
        return None;
    }
    Some(word("ino:").map_or(Mark::All, Mark::Inode))
}

#[cfg(test)]
mod tests {
    use super::{Mark, look, mark};
    use std::collections::BTreeSet;
    use std::path::Path;

    const DEVICE: (u32, u32) = (0, 0x2f);

    #[test]
    fn marks_are_read_from_fdinfo() {
        let mounts = BTreeSet::from([0x1c]);
        let mark = |line| mark(line, DEVICE, &mounts);
        let inotify = "inotify wd:1 ino:10a sdev:2f mask:3cf ignored_mask:0 fhandle-bytes:8 fhandle-type:81 f_handle:00";
        assert_eq!(mark(inotify), Some(Mark::Inode(0x10a)));
        assert_eq!(
            mark("inotify wd:2 ino:10a sdev:800001 mask:3cf ignored_mask:0"),
            None
        );
        assert_eq!(
            mark("fanotify ino:7 sdev:2f mflags:0 mask:3b ignored_mask:0 fhandle-bytes:8"),
            Some(Mark::Inode(7))
        );
        assert_eq!(
            mark("fanotify sdev:2f mflags:0 mask:3b ignored_mask:0"),
            Some(Mark::All)
        );
        assert_eq!(
            mark("fanotify mnt_id:1c mflags:0 mask:3b ignored_mask:0"),
            Some(Mark::All)
        );
        assert_eq!(mark("fanotify mnt_id:1d mflags:0 mask:3b ignored_mask:0"), None);
        for other in [
            "",
            "pos:\t0",
            "inotify",
            "fanotify flags:0 event-flags:0",
            "inotify wd:1 ino:zz sdev:2f x",
        ] {
            let found = mark(other);
            assert!(found.is_none() || other.contains("zz"), "{other}: {found:?}");
        }
    }

    #[test]
    fn look_finds_marks_of_all_processes_and_skips_what_it_cannot_read() {
        let proc = tempfile::tempdir().expect("a directory");
        let process = proc.path().join("12");
        for part in ["fd", "fdinfo"] {
            std::fs::create_dir_all(process.join(part)).expect("a directory");
        }
        std::fs::create_dir_all(proc.path().join("34/fd")).expect("a directory");
        std::fs::create_dir_all(proc.path().join("self")).expect("a directory");
        let descriptor = |number: &str, target: &str, info: Option<&str>| {
            std::os::unix::fs::symlink(target, process.join("fd").join(number)).expect("a link");
            if let Some(info) = info {
                std::fs::write(process.join("fdinfo").join(number), info).expect("a file");
            }
        };
        descriptor("3", "/etc/passwd", Some("inotify wd:1 ino:1 sdev:2f mask:1\n"));
        descriptor(
            "4",
            "anon_inode:inotify",
            Some("pos:\t0\ninotify wd:1 ino:9 sdev:2f mask:1\n"),
        );
        descriptor("5", "anon_inode:inotify", None);
        let found = look(proc.path(), DEVICE);
        assert_eq!((found.all, found.numbers), (false, vec![9]));
        descriptor(
            "6",
            "anon_inode:[fanotify]",
            Some("fanotify sdev:2f mflags:0 mask:1 ignored_mask:0\n"),
        );
        assert!(look(proc.path(), DEVICE).all);
        assert!(look(Path::new("/nonexistent"), DEVICE).is_empty());
    }
}
