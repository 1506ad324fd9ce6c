//! Where the sides lie: memory, file systems on loop devices in that memory, and the disk. All of it is
//! mounted for this process and its children alone, so that nothing is left however it ends; knows nothing of
//! what is measured.

use crate::Options;
use crate::common::output;
use crate::report::Report;
use crate::running::{has, install};
use crate::sides::{Pool, Side};
use anyhow::Context;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::ffi::CStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;
/// Bytes of a loop device.
const fn loop_bytes(quick: bool, on_disk: bool) -> u64 {
    if quick || on_disk { 1 << 30 } else { 2 << 30 }
}

/// NVM of the pool.
const fn nvm(quick: bool, on_disk: bool) -> &'static str {
    match (quick, on_disk) {
        (true, false) => "shm:2G",
        (false, false) => "shm:4G",
        (_, true) => "2G",
    }
}

/// Memory that must be free: for the pool, the loop devices, and what lies in the tmpfs at a time.
const fn memory_bytes(quick: bool) -> u64 {
    if quick { 5 << 30 } else { 10 << 30 }
}

/// From now on mounts are seen by this process and what it starts only, and end with them. Does nothing
/// without root's rights.
pub fn separate() -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    // SAFETY: only the mount namespace is made anew; file descriptors and memory stay as they are, and this
    // is the only thread.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.context("cannot have mounts of its own")?;
    let how = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", how).context("cannot have mounts of its own")
}

/// A mount that ends with the value.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

fn mount_tmpfs(dir: &Path, options: &CStr) -> anyhow::Result<Mounted> {
    std::fs::create_dir(dir)?;
    mount("tmpfs", dir, "tmpfs", MountFlags::NOATIME, Some(options))?;
    Ok(Mounted(dir.to_owned()))
}

/// A file system of `kind` on a loop device over the file `image`, which is on the disk if `direct`. The
/// device goes away with the mount: it is detached while it is busy, which the kernel does at its last use.
fn on_loop(kind: &str, image: &Path, dir: &Path, bytes: u64, direct: bool) -> anyhow::Result<Mounted> {
    let mut file = std::fs::File::create(image)?;
    if direct {
        // Written once, so that the disk's file system has no extents to convert later.
        for _ in 0..bytes / MIB {
            file.write_all(&vec![0; MIB as usize])?;
        }
        file.sync_all()?;
    } else {
        file.set_len(bytes)?;
    }
    std::fs::create_dir(dir)?;
    let mut mkfs = Command::new(format!("mkfs.{kind}"));
    match kind {
        "ext4" => mkfs.args([
            "-q",
            "-F",
            "-E",
            "lazy_itable_init=0,lazy_journal_init=0,nodiscard",
        ]),
        _ => mkfs.args(["-q", "-f", "-K"]),
    };
    output(mkfs.arg(image))?;
    let mut losetup = Command::new("losetup");
    losetup.args(["--find", "--show"]);
    if direct {
        losetup.arg("--direct-io=on");
    }
    let device = output(losetup.arg(image))?;
    let mounted = mount(&device, dir, kind, MountFlags::NOATIME, None::<&CStr>);
    let detached = output(Command::new("losetup").arg("--detach").arg(&device));
    std::fs::remove_file(image)?;
    mounted.with_context(|| format!("cannot mount {device} as {kind}"))?;
    let mounted = Mounted(dir.to_owned());
    detached?;
    Ok(mounted)
}

/// Why there can be no xfs here.
fn xfs_there() -> anyhow::Result<()> {
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !known.lines().any(|line| line.trim() == "xfs") {
        let _ = Command::new("modprobe").arg("xfs").output();
        let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
        anyhow::ensure!(
            known.lines().any(|line| line.trim() == "xfs"),
            "this kernel has no xfs"
        );
    }
    install(&["xfsprogs"], || has("mkfs.xfs"))
}

fn free_memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("MemAvailable"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.unwrap_or_default() * 1024
}

/// Memory and disk.
pub struct Places {
    // Dropped in this order: what lies in the memory goes before the memory.
    loops: Vec<Mounted>,
    _mounts: Vec<Mounted>,
    memory: PathBuf,
    tmpfs: PathBuf,
    quick: bool,
    disk: tempfile::TempDir,
    _top: tempfile::TempDir,
}

impl Places {
    /// Makes the memory.
    pub fn prepare(options: &Options, report: &mut Report) -> anyhow::Result<Self> {
        let (free, needed) = (free_memory_bytes(), memory_bytes(options.quick));
        anyhow::ensure!(
            free >= needed,
            "{} MiB of memory are free; {} are needed",
            free / MIB,
            needed / MIB
        );
        let root = rustix::process::geteuid().is_root();
        // The target directory, not /tmp: that may be memory.
        let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
        std::fs::create_dir_all(target)?;
        let disk = tempfile::Builder::new().prefix("programs-").tempdir_in(target)?;
        let (top, mounts, memory, tmpfs);
        if root {
            top = tempfile::Builder::new().prefix("varve-programs-").tempdir()?;
            memory = top.path().join("memory");
            tmpfs = top.path().join("tmpfs");
            mounts = vec![
                mount_tmpfs(&memory, c"huge=always,size=90%")?,
                mount_tmpfs(&tmpfs, c"huge=never,size=90%")?,
            ];
        } else {
            report.skipped("ext4 and xfs: need root, for loop devices");
            top = tempfile::Builder::new()
                .prefix("varve-programs-")
                .tempdir_in("/dev/shm")?;
            memory = top.path().join("memory");
            tmpfs = top.path().join("tmpfs");
            std::fs::create_dir(&memory)?;
            std::fs::create_dir(&tmpfs)?;
            mounts = Vec::new();
        }
        Ok(Self {
            loops: Vec::new(),
            _mounts: mounts,
            memory,
            tmpfs,
            quick: options.quick,
            disk,
            _top: top,
        })
    }

    /// The file system `kind` on a loop device, or nothing, which is said.
    fn kind(&mut self, kind: &'static str, on_disk: bool, report: &mut Report) -> Option<PathBuf> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let under = if on_disk { self.disk.path() } else { &self.memory };
        let (image, dir) = (under.join(format!("{kind}.img")), under.join(kind));
        let made = if kind == "xfs" { xfs_there() } else { Ok(()) };
        match made.and_then(|()| on_loop(kind, &image, &dir, loop_bytes(self.quick, on_disk), on_disk)) {
            Ok(mounted) => {
                self.loops.push(mounted);
                Some(dir)
            }
            Err(error) => {
                report.skipped(&format!("{kind}: {error:#}"));
                None
            }
        }
    }

    /// The sides of a table that are wanted, and the pool that two of them are on.
    pub fn sides(
        &mut self,
        options: &Options,
        on_disk: bool,
        report: &mut Report,
    ) -> anyhow::Result<(Vec<Side>, Pool)> {
        // What the last table had.
        self.loops.clear();
        for entry in std::fs::read_dir(&self.memory)?.flatten() {
            std::fs::remove_dir_all(entry.path())?;
        }
        let wanted = |name: &str| crate::wanted(&options.sides, name);
        let dir = self
            .disk
            .path()
            .join(if on_disk { "on-disk" } else { "in-memory" });
        let pool = Pool::up(&options.varve, &dir, nvm(self.quick, on_disk), &self.memory)?;
        let mut sides = vec![
            Side::served("run", &pool.mount(), &options.varve),
            Side::plain("mount", &pool.mount()),
        ];
        if !on_disk {
            sides.push(Side::plain("tmpfs", &self.tmpfs));
        }
        if on_disk {
            let dir = self.disk.path().join("files");
            std::fs::create_dir(&dir)?;
            sides.push(Side::plain("ext4+fsync", &dir));
            report.disk(&dir);
        } else if wanted("ext4+fsync")
            && let Some(dir) = self.kind("ext4", on_disk, report)
        {
            sides.push(Side::plain("ext4+fsync", &dir));
        }
        if wanted("xfs+fsync")
            && let Some(dir) = self.kind("xfs", on_disk, report)
        {
            sides.push(Side::plain("xfs+fsync", &dir));
        }
        sides.retain(|side| wanted(side.name));
        Ok((sides, pool))
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        self.loops.clear();
    }
}
