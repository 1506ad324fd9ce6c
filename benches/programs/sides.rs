//! Sides of a table: a directory to work in, and how a program is started there. Owns pools and their end;
//! knows nothing of workloads.

use crate::common::output;
use crate::report::Report;
use crate::running::{end_group, group, interrupted};
use anyhow::{Context, bail};
use rustix::process::Signal;
use serde_json::Value;
use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Names of all sides, as `--sides` takes them.
pub const NAMES: [&str; 5] = ["run", "mount", "tmpfs", "ext4+fsync", "xfs+fsync"];
/// How long a pool may take to be mounted, and to end.
const LIMIT: Duration = Duration::from_secs(60);

/// Calls that were served in-process, and that were not.
#[derive(Debug, Clone, Copy, Default)]
pub struct Calls {
    /// Served.
    pub served: u64,
    /// Left to the kernel.
    pub fell_back: u64,
}

/// A place where programs run.
pub struct Side {
    /// Column.
    pub name: &'static str,
    dir: PathBuf,
    /// The mount whose files are served in-process, and the program under test.
    serve: Option<(PathBuf, PathBuf)>,
    counting: Cell<bool>,
    calls: Cell<Calls>,
}

impl Side {
    /// A directory of the kernel's.
    pub fn plain(name: &'static str, dir: &Path) -> Self {
        Self {
            name,
            dir: dir.to_owned(),
            serve: None,
            counting: Cell::new(false),
            calls: Cell::default(),
        }
    }

    /// A mount, served in-process by `varve`.
    pub fn served(name: &'static str, mount: &Path, varve: &Path) -> Self {
        Self {
            serve: Some((mount.to_owned(), varve.to_owned())),
            ..Self::plain(name, mount)
        }
    }

    /// `program` as it is started on this side.
    pub fn command(&self, program: &Path) -> Command {
        let Some((mount, varve)) = &self.serve else {
            return Command::new(program);
        };
        let mut command = Command::new(varve);
        command.arg("run");
        if self.counting.get() {
            command.arg("--stats");
        }
        command.arg("--mount").arg(mount).arg("--").arg(program);
        command
    }

    /// An empty directory on this side.
    pub fn fresh_dir(&self) -> anyhow::Result<PathBuf> {
        let dir = self.dir.join(format!("work-{}", self.name));
        if dir.exists() {
            std::fs::remove_dir_all(&dir)?;
        }
        std::fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir)
    }

    /// The same place without the library: what looks at a program's data afterwards comes in by another way.
    pub fn checker(&self) -> Self {
        Self::plain(self.name, &self.dir)
    }

    /// Whether calls can be counted here.
    pub const fn counts_calls(&self) -> bool {
        self.serve.is_some()
    }

    /// Whether they are counted now.
    pub const fn counting(&self) -> bool {
        self.counting.get()
    }

    /// Runs `work` with the calls counted; fails if none was served.
    pub fn counted<T>(&self, work: impl FnOnce(&Self) -> anyhow::Result<T>) -> anyhow::Result<T> {
        self.calls.set(Calls::default());
        self.counting.set(true);
        let result = work(self);
        self.counting.set(false);
        let result = result?;
        anyhow::ensure!(self.calls.get().served > 0, "no call was served in-process");
        Ok(result)
    }

    /// Adds the counters that a run printed.
    pub fn count(&self, line: &str) -> anyhow::Result<()> {
        let counters: Value = serde_json::from_str(line).with_context(|| format!("no counters: {line}"))?;
        let number = |key: &str| counters[key].as_u64().unwrap_or_default();
        let mut calls = self.calls.get();
        calls.served += number("served_total");
        calls.fell_back += number("fell_back_total");
        self.calls.set(calls);
        Ok(())
    }

    /// What was counted last.
    pub const fn share(&self) -> Calls {
        self.calls.get()
    }
}

/// A pool that is up.
pub struct Pool {
    dir: PathBuf,
    varve: PathBuf,
    up: Option<Child>,
}

impl Pool {
    /// Makes a pool in `dir`, with its memory in `live`, and mounts it.
    pub fn up(varve: &Path, dir: &Path, nvm: &str, live: &Path) -> anyhow::Result<Self> {
        let mut mkfs = Command::new(varve);
        output(
            mkfs.arg("mkfs")
                .arg(dir)
                .args(["--nvm", nvm, "--ssd", "0", "--hdd", "0"]),
        )?;
        let mut pool = Self {
            dir: dir.to_owned(),
            varve: varve.to_owned(),
            up: None,
        };
        let in_memory = nvm.starts_with("shm:");
        pool.move_to(live)?;
        let mut command = Command::new(varve);
        command
            .arg("up")
            .arg(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if in_memory {
            command.arg("--recreate");
        }
        // It says that it found an unfinished pool, which is so: its memory was moved.
        command.args(["--log", "error"]);
        group(&mut command, Signal::TERM);
        let mut child = command.spawn().context("varve up does not start")?;
        let said = child.stdout.take().context("no pipe")?;
        pool.up = Some(child);
        let mut lines = BufReader::new(said).lines().map_while(Result::ok);
        if !lines.any(|line| line.contains("Ctrl-C")) {
            bail!("varve up did not mount {}", dir.display());
        }
        std::thread::spawn(move || lines.for_each(drop));
        // In its first seconds a daemon keeps what is deleted, for clients from before.
        let until = Instant::now() + Duration::from_secs(6);
        while Instant::now() < until && !interrupted() {
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(pool)
    }

    /// Where it is mounted.
    pub fn mount(&self) -> PathBuf {
        self.dir.join("mnt")
    }

    /// Has its live files in `live` from the next start on; those of a pool in memory are gone with this.
    fn move_to(&self, live: &Path) -> anyhow::Result<()> {
        let path = self.dir.join("varve.toml");
        let text = std::fs::read_to_string(&path)?;
        let mut moved = String::new();
        for line in text.lines() {
            moved.push_str(line);
            moved.push('\n');
            if let Some(uuid) = line.strip_prefix("uuid = ") {
                let _ = std::fs::remove_dir_all(format!("/dev/shm/varve-{}-0", uuid.trim_matches('"')));
                moved.push_str(&format!("live = {:?}\n", live.to_string_lossy()));
            }
        }
        Ok(std::fs::write(&path, moved)?)
    }

    /// Ends it in order and checks what it left.
    pub fn end(mut self, report: &mut Report) {
        let mut down = Command::new(&self.varve);
        if let Err(error) = output(down.arg("down").arg(&self.dir)) {
            report.failed(&format!("varve down: {error:#}"));
            return;
        }
        let ended = self.wait();
        if !ended {
            report.failed("varve up did not end");
            return;
        }
        let mut fsck = Command::new(&self.varve);
        match output(fsck.arg("fsck").arg(&self.dir)) {
            Ok(_) => report.remark("the pool is clean (fsck)"),
            Err(error) => report.failed(&format!("{error:#}")),
        }
    }

    fn wait(&mut self) -> bool {
        let until = Instant::now() + LIMIT;
        while let Some(up) = &mut self.up {
            if up.try_wait().is_ok_and(|status| status.is_some()) {
                self.up = None;
            } else if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.up.is_none() {
            return;
        }
        let _ = Command::new(&self.varve)
            .args(["down", "--force"])
            .arg(&self.dir)
            .output();
        if !self.wait()
            && let Some(mut up) = self.up.take()
        {
            end_group(&mut up);
            let _ = Command::new(&self.varve)
                .args(["umount", "--force"])
                .arg(self.mount())
                .output();
        }
    }
}
