//! Where the sides lie: loop devices over files of one directory, file systems on them, pools. Each ends with
//! its value.

use crate::common::output;
use anyhow::Context;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use varve_libfs::{Cred, Fs, FsOptions, Posix, SocketConnector};

/// Name of the file system and its device below a directory.
pub fn disk_of(dir: &Path) -> String {
    let mut command = Command::new("findmnt");
    let said = output(command.args(["-n", "-o", "FSTYPE,SOURCE", "-T"]).arg(dir));
    said.unwrap_or_else(|_| "unknown".into())
}

/// A loop device over a file, without the page cache of the file.
pub struct Loop {
    pub path: PathBuf,
    file: PathBuf,
}

impl Loop {
    /// Makes it; its file is allocated and written once.
    pub fn make(dir: &Path, name: &str, bytes: u64) -> anyhow::Result<Self> {
        let file = dir.join(format!("{name}.img"));
        fill(&file, bytes, 0)?;
        let mut losetup = Command::new("losetup");
        let path = output(losetup.args(["--find", "--show", "--direct-io=on"]).arg(&file))?;
        Ok(Self {
            path: path.into(),
            file,
        })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = output(Command::new("losetup").arg("--detach").arg(&self.path));
        let _ = std::fs::remove_file(&self.file);
    }
}

/// Writes a file of `bytes` with one byte, durably.
pub fn fill(file: &Path, bytes: u64, byte: u8) -> anyhow::Result<()> {
    use std::io::Write;
    let mut file = std::fs::File::create(file)?;
    let piece = vec![byte; 1 << 20];
    for _ in 0..bytes / crate::MIB {
        file.write_all(&piece)?;
    }
    Ok(file.sync_all()?)
}

/// A mounted file system on a loop device.
pub struct Mounted {
    pub dir: PathBuf,
    _device: Loop,
}

impl Mounted {
    pub fn make(top: &Path, kind: &str, bytes: u64) -> anyhow::Result<Self> {
        let device = Loop::make(top, kind, bytes)?;
        let dir = top.join(kind);
        std::fs::create_dir(&dir)?;
        let mut command = Command::new(format!("mkfs.{kind}"));
        match kind {
            "ext4" => command.args(["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"]),
            _ => command.args(["-q", "-f"]),
        };
        output(command.arg(&device.path))?;
        mount(
            &device.path,
            &dir,
            kind,
            MountFlags::NOATIME,
            None::<&std::ffi::CStr>,
        )?;
        Ok(Self { dir, _device: device })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.dir, UnmountFlags::empty());
    }
}

/// A pool and its daemon.
pub struct Pool {
    pub dir: PathBuf,
    daemon: Option<Child>,
    /// From the start of the program to its word that it serves.
    pub started: Duration,
    _device: Option<Loop>,
}

fn varve() -> Command {
    Command::new(env!("CARGO_BIN_EXE_varve"))
}

impl Pool {
    /// Makes and serves a pool with NVM in a file beside its SSD. `settings` are lines of `varve.toml`.
    pub fn make(
        top: &Path,
        name: &str,
        nvm: &str,
        ssd: &str,
        device: Option<Loop>,
        settings: &str,
    ) -> anyhow::Result<Self> {
        let dir = top.join(name);
        let mut mkfs = varve();
        output(
            mkfs.arg("mkfs")
                .arg(&dir)
                .args(["--nvm", nvm, "--ssd", ssd, "--hdd", "0"]),
        )?;
        let toml = dir.join("varve.toml");
        let text = std::fs::read_to_string(&toml)?;
        std::fs::write(&toml, format!("{text}\n{settings}\n"))?;
        let mut pool = Self {
            dir,
            daemon: None,
            started: Duration::ZERO,
            _device: device,
        };
        pool.serve()?;
        Ok(pool)
    }

    pub fn serve(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        let mut child = varve()
            .arg("serve")
            .arg(&self.dir)
            .stdout(Stdio::piped())
            .spawn()
            .context("the daemon does not start")?;
        let mut line = String::new();
        let out = child.stdout.take().context("it has an output")?;
        BufReader::new(out).read_line(&mut line)?;
        anyhow::ensure!(line.contains("serving"), "the daemon said {line:?}");
        self.started = begun.elapsed();
        self.daemon = Some(child);
        Ok(())
    }

    /// Stops the daemon; returns how long that took.
    pub fn stop(&mut self) -> anyhow::Result<Duration> {
        let Some(mut daemon) = self.daemon.take() else {
            return Ok(Duration::ZERO);
        };
        let begun = Instant::now();
        if let Some(pid) = rustix::process::Pid::from_raw(daemon.id().cast_signed()) {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        }
        daemon.wait()?;
        Ok(begun.elapsed())
    }

    pub fn pid(&self) -> u32 {
        self.daemon.as_ref().map_or(0, Child::id)
    }

    /// A new session of this process, with empty caches.
    pub fn session(&self) -> anyhow::Result<Posix> {
        let path = self.dir.join("sock");
        let fs = Fs::mount(Arc::new(SocketConnector { path }), FsOptions::default());
        let fs = fs.map_err(|error| anyhow::anyhow!("no session: {error}"))?;
        Ok(Posix::new(fs, Cred::root()))
    }

    /// Has all logs digested.
    pub fn digest(&self) -> anyhow::Result<()> {
        output(varve().arg("digest").arg(&self.dir)).map(drop)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = self.stop();
        let _ = output(varve().args(["destroy", "--yes"]).arg(&self.dir));
    }
}
