//! A pool that is up for one test, and gone afterwards whatever happens.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Generous bound on anything that should take a moment.
pub const LIMIT: Duration = Duration::from_secs(90);

/// The program under test.
pub fn varve() -> Command {
    Command::new(env!("CARGO_BIN_EXE_varve"))
}

/// Whether mounts cannot be tested here: tries one of a file system that does nothing. Says why on standard
/// error.
pub fn cannot_mount() -> bool {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let request = varve_fuse_shim::MountRequest::new(dir.path().to_owned(), "varve-test");
    match varve_fuse_shim::mount_null(&request) {
        Ok(mounted) => {
            drop(mounted);
            false
        }
        Err(error) => {
            eprintln!("SKIPPED: no FUSE mount here: {error}");
            true
        }
    }
}

/// Runs a command and returns its output; panics with it when the command fails.
pub fn run_ok(command: &mut Command) -> Output {
    let output = command.output().expect("the command starts");
    assert!(
        output.status.success(),
        "{command:?} ended with {}\nstdout: {}\nstderr: {}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Standard output of a command that must succeed.
pub fn text_of(command: &mut Command) -> String {
    String::from_utf8(run_ok(command).stdout).expect("text")
}

/// Waits until `ready`; panics after [`LIMIT`].
pub fn wait_until(what: &str, mut ready: impl FnMut() -> bool) {
    let until = Instant::now() + LIMIT;
    while !ready() {
        assert!(Instant::now() < until, "{what} did not happen within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A temporary directory with a pool that is (or was) up.
pub struct Pool {
    dir: tempfile::TempDir,
    up: Option<Child>,
    arguments: Vec<String>,
}

impl Pool {
    /// Starts `varve up` with small tiers and waits until it is mounted.
    pub fn up(arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut pool = Self {
            dir,
            up: None,
            arguments: arguments.iter().map(|&word| word.to_owned()).collect(),
        };
        pool.start();
        pool
    }

    /// The pool's directory.
    pub fn dir(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    /// Where it is mounted.
    pub fn mnt(&self) -> PathBuf {
        self.dir().join("mnt")
    }

    /// A place outside the pool.
    pub fn outside(&self) -> &Path {
        self.dir.path()
    }

    /// Starts it (again).
    pub fn start(&mut self) {
        let mut child = varve()
            .arg("up")
            .arg(self.dir())
            .args(&self.arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("varve up starts");
        let mut errors = child.stderr.take().expect("piped");
        let said = std::thread::spawn(move || {
            let mut text = String::new();
            let mut lines = BufReader::new(&mut errors).lines();
            while let Some(Ok(line)) = lines.next() {
                eprintln!("up: {line}");
                text.push_str(&line);
                text.push('\n');
            }
            text
        });
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mounted = lines
            .by_ref()
            .any(|line| line.is_ok_and(|line| line.contains("Ctrl-C")));
        if !mounted {
            let _ = child.wait();
            panic!("varve up did not start: {}", said.join().unwrap_or_default());
        }
        std::thread::spawn(move || lines.for_each(drop));
        self.up = Some(child);
    }

    /// Process id of `varve up`.
    pub fn up_pid(&self) -> u32 {
        self.up.as_ref().expect("it is up").id()
    }

    /// The child of `up` that runs `what` (`serve` or `mount`), when it is there.
    pub fn child_pid(&self, what: &str) -> Option<u32> {
        let up = self.up_pid();
        let children = std::fs::read_to_string(format!("/proc/{up}/task/{up}/children")).unwrap_or_default();
        children
            .split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .find(|pid: &u32| {
                let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                words.split(|byte| *byte == 0).nth(1) == Some(what.as_bytes())
            })
    }

    /// Kills the daemon, and waits until the next one answers.
    pub fn replace_daemon(&self) {
        let daemon = self.child_pid("serve").expect("a daemon");
        kill(daemon);
        wait_until("the next daemon", || {
            self.child_pid("serve").is_some_and(|next| next != daemon)
        });
        run_ok(varve().arg("status").arg(self.dir()));
    }

    /// Stops it with `varve down`.
    pub fn down(&mut self) {
        run_ok(varve().arg("down").arg(self.dir()));
        let mut child = self.up.take().expect("it is up");
        let status = child.wait().expect("up ends");
        assert!(status.success(), "varve up ended with {status}");
    }

    /// Kills daemon, mount and `up` with SIGKILL, all at once, and takes the dead mount away.
    pub fn kill_all(&mut self) {
        let up = self.up_pid();
        // When `up` dies its children end in order, and digest; and it starts again those that die. So it is
        // stopped first, and dies last.
        let stopped = rustix::process::Pid::from_raw(up as i32).expect("a pid");
        rustix::process::kill_process(stopped, rustix::process::Signal::STOP).expect("it stops");
        let pids = [self.child_pid("serve"), self.child_pid("mount"), Some(up)];
        let mut child = self.up.take().expect("it is up");
        for pid in pids.into_iter().flatten() {
            kill(pid);
        }
        child.wait().expect("up ends");
        for pid in pids.into_iter().flatten() {
            wait_until("the end of a killed process", || !alive(pid));
        }
        self.wait_unlocked();
    }

    /// Stops the mount's process, so that it answers nothing any more, and kills `up` and the daemon. Answers
    /// the stopped one's id.
    #[allow(dead_code)]
    pub fn leave_a_hung_mount(&mut self) -> u32 {
        let shim = self.child_pid("mount").expect("a mount");
        let pid = rustix::process::Pid::from_raw(shim as i32).expect("a pid");
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("it stops");
        let daemon = self.child_pid("serve").expect("a daemon");
        kill(self.up_pid());
        kill(daemon);
        self.up.take().expect("it is up").wait().expect("up ends");
        wait_until("the end of the daemon", || !alive(daemon));
        self.wait_unlocked();
        shim
    }

    /// Waits until no process has the pool. A killed process may look dead while some of its threads still
    /// end.
    pub fn wait_unlocked(&self) {
        for name in ["lock", "up.lock"] {
            wait_until("the end of what had the pool", || {
                let file = std::fs::File::options().write(true).open(self.dir().join(name));
                file.is_ok_and(|file| {
                    let how = rustix::fs::FlockOperation::NonBlockingLockExclusive;
                    rustix::fs::flock(&file, how).is_ok()
                })
            });
        }
    }

    /// Daemons and mounts of this pool that run, whoever started them.
    pub fn processes(&self) -> Vec<u32> {
        let dir = self.dir();
        let dir = dir.as_os_str().as_encoded_bytes();
        let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter(|&pid: &u32| {
                let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
                let ours = matches!(words.get(1), Some(&b"serve" | &b"mount"));
                ours && words.contains(&dir) && alive(pid)
            })
            .collect()
    }

    /// `varve fsck` must find nothing.
    pub fn fsck_clean(&self) {
        run_ok(varve().arg("fsck").arg(self.dir()));
    }

    /// Where the live copies of this pool's logs are.
    pub fn live_dirs(&self) -> Vec<PathBuf> {
        live_dirs(&self.dir())
    }
}

/// Live directories of the pool in `dir`.
fn live_dirs(dir: &Path) -> Vec<PathBuf> {
    let Ok(text) = std::fs::read_to_string(dir.join("varve.toml")) else {
        return Vec::new();
    };
    let uuid = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("uuid"))
        .unwrap_or_default();
    let uuid: String = uuid
        .chars()
        .filter(|c| c.is_ascii_hexdigit() || *c == '-')
        .collect();
    if uuid.len() < 16 {
        return Vec::new();
    }
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().contains(&uuid))
        .map(|entry| entry.path())
        .collect()
}

/// Removes what a pool has in memory when it is dropped. To be made before anything that must end first.
pub struct LiveDirs(PathBuf);

impl LiveDirs {
    /// Of the pool that is or will be in `dir`.
    pub fn of(dir: &Path) -> Self {
        Self(dir.to_owned())
    }
}

impl Drop for LiveDirs {
    fn drop(&mut self) {
        for live in live_dirs(&self.0) {
            let _ = std::fs::remove_dir_all(live);
        }
    }
}

/// Sends SIGKILL to one process.
pub fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("a pid");
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

/// Whether a process runs (a zombie does not).
pub fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit(')')
            .next()
            .is_some_and(|rest| !rest.trim_start().starts_with('Z'))
    })
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.up.is_some() {
            let _ = varve().args(["down", "--force"]).arg(self.dir()).output();
            let until = Instant::now() + Duration::from_secs(20);
            while let Some(child) = self.up.as_mut() {
                if child.try_wait().is_ok_and(|status| status.is_some()) {
                    self.up = None;
                } else if Instant::now() > until {
                    self.kill_all();
                } else {
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
        for pid in self.processes() {
            kill(pid);
        }
        let _ = varve().args(["umount", "--force"]).arg(self.mnt()).output();
        for live in self.live_dirs() {
            let _ = std::fs::remove_dir_all(live);
        }
    }
}

/// Makes a small tree with every kind of file below `at`.
pub fn plant(at: &Path) {
    std::fs::create_dir_all(at.join("a/b/c")).unwrap();
    for i in 0..200_u32 {
        let body: Vec<u8> = (0..i * 37).map(|j| (i ^ j) as u8).collect();
        std::fs::write(at.join(format!("a/file{i}")), body).unwrap();
    }
    std::fs::write(at.join("a/b/big"), vec![7_u8; 3 << 20]).unwrap();
    std::os::unix::fs::symlink("../file7", at.join("a/b/link")).unwrap();
    std::fs::hard_link(at.join("a/file9"), at.join("a/b/c/hard")).unwrap();
    std::fs::write(at.join("a/b/c/empty"), b"").unwrap();
}

/// Compares two trees with `diff -r`.
pub fn same_tree(left: &Path, right: &Path) {
    run_ok(
        Command::new("diff")
            .arg("-r")
            .arg("--no-dereference")
            .arg(left)
            .arg(right),
    );
}

/// A directory in memory where that can be: a host whose disk is busy for half a minute is not what is
/// tested.
pub fn memory_dir() -> tempfile::TempDir {
    let shm = Path::new("/dev/shm");
    if shm.is_dir() {
        tempfile::tempdir_in(shm).expect("a directory")
    } else {
        tempfile::tempdir().expect("a directory")
    }
}

/// Makes a pool without HDD, with these lines in the section `[daemon]` of its settings.
pub fn make_pool(pool: &Path, nvm: &str, ssd: &str, settings: &str) {
    run_ok(
        varve()
            .arg("mkfs")
            .arg(pool)
            .args(["--nvm", nvm, "--ssd", ssd, "--hdd", "0"]),
    );
    let toml = pool.join("varve.toml");
    let mut text = std::fs::read_to_string(&toml).expect("settings");
    assert!(text.trim_end().ends_with("[daemon]"), "{text}");
    text.push_str(settings);
    text.push('\n');
    std::fs::write(toml, text).expect("written");
}

/// What is mounted there, whatever it is, is unmounted when this goes.
pub struct Mounted(pub PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// A directory on a file system that is in the kernel itself, to compare with, until this goes.
pub struct KernelsOwn {
    kind: &'static str,
    dir: PathBuf,
    _mounted: Option<Mounted>,
    _made: tempfile::TempDir,
}

impl KernelsOwn {
    /// ext4 in an image below `outside` where this user may mount one, or where temporary files lie on ext4;
    /// else in memory. Everybody may come to it, nobody else uses it, and what is above it in its tree
    /// neither.
    pub fn new(outside: &Path) -> Self {
        if let Some(own) = Self::image(outside) {
            return own;
        }
        const EXT4: rustix::fs::FsWord = 0xef53;
        let plain = tempfile::tempdir_in(outside).expect("a directory");
        if rustix::fs::statfs(plain.path()).is_ok_and(|fs| fs.f_type == EXT4) {
            return Self::below("ext4", None, plain);
        }
        Self::below("tmpfs", None, memory_dir())
    }

    fn image(outside: &Path) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let made = tempfile::tempdir_in(outside).expect("a directory");
        let (image, at) = (made.path().join("image"), made.path().join("at"));
        std::fs::create_dir(&at).expect("a directory");
        let file = std::fs::File::create(&image).expect("an image");
        file.set_len(256 << 20).expect("a hole");
        let well = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
        let mounted = well(Command::new("mkfs.ext4").arg("-q").arg(&image))
            && well(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&at));
        mounted.then(|| {
            let mounted = Mounted(at);
            Self::below("ext4", Some(mounted), made)
        })
    }

    fn below(kind: &'static str, mounted: Option<Mounted>, made: tempfile::TempDir) -> Self {
        let open = |dir: &Path| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(dir, mode).expect("a mode");
        };
        open(made.path());
        let top = mounted
            .as_ref()
            .map_or(made.path(), |mounted| mounted.0.as_path());
        open(top);
        let dir = top.join("a/b/c");
        std::fs::create_dir_all(&dir).expect("directories");
        Self {
            kind,
            dir,
            _mounted: mounted,
            _made: made,
        }
    }

    /// What it is.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// Where.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// One more mount of a pool, and so one more session, until this goes.
pub struct SecondMount {
    at: PathBuf,
    child: Child,
}

impl SecondMount {
    /// Makes the directory `at` and mounts there.
    pub fn start(pool: &Pool, at: &Path) -> Self {
        std::fs::create_dir(at).expect("a directory");
        let child = varve().arg("mount").arg(pool.dir()).arg(at).spawn();
        let mut mount = Self {
            at: at.to_owned(),
            child: child.expect("varve mount starts"),
        };
        const FUSE: rustix::fs::FsWord = 0x6573_5546;
        let until = Instant::now() + LIMIT;
        loop {
            let found = rustix::fs::statfs(at).map(|fs| fs.f_type);
            if found == Ok(FUSE) {
                return mount;
            }
            let ended = mount.child.try_wait();
            assert!(
                Instant::now() < until && matches!(ended, Ok(None)),
                "no second mount: statfs says {found:x?}, the server {ended:?}, the table {:?}",
                std::fs::read_to_string("/proc/self/mountinfo")
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl SecondMount {
    /// Unmounts; how the server ended.
    #[allow(dead_code)]
    pub fn end(mut self) -> std::process::ExitStatus {
        run_ok(Command::new("umount").arg(&self.at));
        self.child.wait().expect("the server ends")
    }
}

impl Drop for SecondMount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.at).output();
        let until = Instant::now() + Duration::from_secs(20);
        while self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            if Instant::now() > until {
                kill(self.child.id());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Whether files have these contents.
pub fn all_right(files: &[(PathBuf, Vec<u8>)]) {
    for (path, body) in files {
        assert!(std::fs::read(path).unwrap() == *body, "{}", path.display());
    }
}

/// Bytes that look random.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut data: Vec<u8> = (0..bytes / 8 + 1).flat_map(|_| word().to_le_bytes()).collect();
    data.truncate(bytes);
    data
}
