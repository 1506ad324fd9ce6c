//! A pool that two users share, its daemon, and root's view of it; gone afterwards whatever happens.

use crate::common::{self, LIMIT, run_ok, text_of, varve, wait_until};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Instant;
use varve_libfs::{Cred, Fs, FsOptions, Posix, SocketConnector};

pub struct Place {
    // What a daemon that was killed left in memory goes before the directory does.
    _live: common::LiveDirs,
    dir: tempfile::TempDir,
}

impl Place {
    /// A new pool with these lines in the section `[daemon]`.
    pub fn new(settings: &str, nvm: &str) -> Self {
        let dir = common::memory_dir();
        let place = Self {
            _live: common::LiveDirs::of(&dir.path().join("pool")),
            dir,
        };
        common::make_pool(&place.pool(), nvm, "64M", settings);
        // The users reach the socket; everything else is closed by its own mode.
        std::fs::set_permissions(place.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        place
    }

    pub fn pool(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    pub fn socket(&self) -> PathBuf {
        self.pool().join("sock")
    }

    /// The directory of the live copies.
    pub fn live(&self) -> PathBuf {
        let text = std::fs::read_to_string(self.pool().join("varve.toml")).unwrap();
        let uuid = text
            .lines()
            .find_map(|line| line.strip_prefix("uuid = "))
            .unwrap();
        PathBuf::from(format!("/dev/shm/varve-{}-0", uuid.trim_matches('"')))
    }

    /// As a power cut does.
    pub fn lose_memory(&self) {
        std::fs::remove_dir_all(self.live()).unwrap();
    }

    pub fn start(&self) -> Daemon {
        let said = self.dir.path().join("said");
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&said)
            .unwrap();
        let mut child = varve()
            .arg("serve")
            .arg(self.pool())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        let daemon = Daemon { child, said };
        assert!(
            line.contains("serving"),
            "the daemon did not start: {}",
            daemon.said()
        );
        daemon
    }

    /// Root's own session.
    pub fn root(&self) -> Posix {
        let connector = SocketConnector { path: self.socket() };
        let fs = Fs::mount(Arc::new(connector), FsOptions::default()).expect("a session");
        assert!(fs.acts_for().is_none());
        Posix::new(fs, Cred::root())
    }

    /// Has all logs digested.
    pub fn digest(&self) {
        run_ok(varve().arg("digest").arg(self.pool()));
    }

    pub fn status(&self) -> serde_json::Value {
        serde_json::from_str(&text_of(varve().args(["status", "--json"]).arg(self.pool()))).unwrap()
    }

    /// Waits until no more sessions than these are there, and so all other logs are digested.
    pub fn wait_sessions(&self, daemon: &Daemon, most: usize) {
        let until = Instant::now() + LIMIT;
        while self.status()["sessions"].as_array().unwrap().len() > most {
            assert!(Instant::now() < until, "sessions do not end: {}", daemon.said());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    pub fn fsck(&self) {
        run_ok(varve().arg("fsck").arg(self.pool()));
    }
}

/// A daemon in a process of its own.
pub struct Daemon {
    child: Child,
    said: PathBuf,
}

impl Daemon {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn lives(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn stop(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.pid() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        assert!(
            status.success(),
            "the daemon ended with {status}: {}",
            self.said()
        );
    }

    /// What it logged.
    pub fn said(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.said).unwrap_or_default()).into_owned()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A pool that is up.
pub struct Up {
    child: Option<Child>,
    pool: PathBuf,
}

impl Up {
    pub fn new(child: Child, pool: &Path) -> Self {
        Self {
            child: Some(child),
            pool: pool.to_owned(),
        }
    }

    pub fn down(&mut self) {
        run_ok(varve().arg("down").arg(&self.pool));
        let status = self.child.take().unwrap().wait().unwrap();
        assert!(status.success(), "varve up ended with {status}");
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        let _ = varve().args(["down", "--force"]).arg(&self.pool).output();
        let _ = child.kill();
        let _ = child.wait();
        let _ = varve()
            .args(["umount", "--force"])
            .arg(self.pool.join("mnt"))
            .output();
        // Daemon and mount end when `up` does.
        let _ = std::panic::catch_unwind(|| {
            wait_until("the end of the daemon", || {
                std::os::unix::net::UnixStream::connect(self.pool.join("sock")).is_err()
            });
        });
    }
}
