//! Where the sides lie: memory with huge pages if it can be had, an ext4 and an xfs in that memory, the disk.
//! Cleans up when dropped; knows nothing of what is measured.

use crate::common::output;
use anyhow::Context;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use varve_media::{Backing, MappedOptions, MappedRegion, Region};

/// A mount that ends with the value.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// A file system on a loop device whose file lies in memory.
pub struct OnLoop {
    _mount: Mounted,
    /// Its mountpoint.
    pub dir: PathBuf,
    /// Its columns: as it is, with a sync after each write, and where it keeps nothing for certain.
    pub names: [&'static str; 3],
}

const EXT4: [&str; 3] = ["ext4", "ext4+fsync", "ext4, nothing durable"];
const XFS: [&str; 3] = ["xfs", "xfs+fsync", "xfs, nothing durable"];

/// All places.
pub struct Places {
    // Dropped in this order: what lies in the memory goes before the memory.
    /// ext4 and xfs in memory, as far as they can be had.
    pub hosts: Vec<OnLoop>,
    /// Why the others cannot.
    pub missing: Vec<String>,
    _memory_mount: Option<Mounted>,
    _tmpfs_mount: Option<Mounted>,
    memory: PathBuf,
    tmpfs: PathBuf,
    /// Whether the memory is of huge pages.
    pub huge: bool,
    /// A directory on the disk.
    disk: tempfile::TempDir,
    _top: tempfile::TempDir,
}

/// The loop device goes away with the mount: it is detached while it is busy, which the kernel does at its
/// last use.
fn make_on_loop(names: [&'static str; 3], memory: &Path, bytes: u64, top: &Path) -> anyhow::Result<OnLoop> {
    let [kind, ..] = names;
    let (image, dir) = (memory.join(format!("{kind}.img")), top.join(kind));
    std::fs::File::create(&image)?.set_len(bytes)?;
    std::fs::create_dir(&dir)?;
    let mut command = Command::new(format!("mkfs.{kind}"));
    if kind == "ext4" {
        command.args(["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"]);
    } else {
        command.args(["-q", "-f"]);
    }
    output(command.arg(&image))?;
    let device = output(Command::new("losetup").args(["--find", "--show"]).arg(&image))?;
    let mounted = mount(&device, &dir, kind, MountFlags::NOATIME, None::<&std::ffi::CStr>);
    let detached = output(Command::new("losetup").arg("--detach").arg(&device));
    mounted.with_context(|| format!("cannot mount {device}"))?;
    let made = OnLoop {
        _mount: Mounted(dir.clone()),
        dir,
        names,
    };
    detached?;
    Ok(made)
}

fn mount_tmpfs(dir: &Path, options: &std::ffi::CStr) -> anyhow::Result<Mounted> {
    std::fs::create_dir(dir)?;
    mount("tmpfs", dir, "tmpfs", MountFlags::NOATIME, Some(options))?;
    Ok(Mounted(dir.to_owned()))
}

impl Places {
    /// Makes them. `host_bytes` is the size of each file system in memory.
    pub fn prepare(host_bytes: u64) -> anyhow::Result<Self> {
        let top = tempfile::Builder::new().prefix("varve-bench-").tempdir()?;
        let mounted = mount_tmpfs(&top.path().join("memory"), c"huge=always,size=90%");
        let huge = mounted.is_ok();
        let (memory, memory_mount) = if let Ok(mounted) = mounted {
            (mounted.0.clone(), Some(mounted))
        } else {
            let shm = tempfile::Builder::new()
                .prefix("varve-bench-")
                .tempdir_in("/dev/shm")?;
            let dir = top.path().join("shm");
            std::os::unix::fs::symlink(shm.path(), &dir)?;
            (shm.keep(), None)
        };
        let tmpfs_mount = mount_tmpfs(&top.path().join("tmpfs"), c"huge=never,size=90%").ok();
        let tmpfs = tmpfs_mount
            .as_ref()
            .map_or_else(|| memory.clone(), |mounted| mounted.0.clone());
        let (mut hosts, mut missing) = (Vec::new(), Vec::new());
        for names in [EXT4, XFS] {
            let made = if rustix::process::geteuid().is_root() {
                make_on_loop(names, &memory, host_bytes, top.path()).map_err(|error| format!("{error:#}"))
            } else {
                Err("needs root, for a loop device".to_owned())
            };
            match made {
                Ok(host) => hosts.push(host),
                Err(why) => missing.push(format!("{} in memory: {why}", names[0])),
            }
        }
        // The target directory, not /tmp: that may be memory.
        let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
        std::fs::create_dir_all(target)?;
        Ok(Self {
            hosts,
            missing,
            _memory_mount: memory_mount,
            _tmpfs_mount: tmpfs_mount,
            memory,
            tmpfs,
            huge,
            disk: tempfile::Builder::new().prefix("bench-").tempdir_in(target)?,
            _top: top,
        })
    }

    /// Directory in memory.
    pub fn memory(&self) -> &Path {
        &self.memory
    }

    /// A tmpfs as machines have it, without huge pages: there a small file would cost the clearing of one.
    pub fn tmpfs(&self) -> &Path {
        &self.tmpfs
    }

    /// Directory on the disk.
    pub fn disk(&self) -> &Path {
        self.disk.path()
    }

    /// A region in memory, every page of it touched; its file is gone with it.
    pub fn region(&self, bytes: u64) -> anyhow::Result<Arc<dyn Region>> {
        let path = self.memory.join("raw");
        let options = MappedOptions {
            backing: Backing::Shm,
            len_bytes: bytes,
            max_bytes: bytes,
            sparse: false,
        };
        let region = MappedRegion::create(&path, options)?;
        std::fs::remove_file(&path)?;
        let block = vec![1; 1 << 20];
        for at in (0..bytes).step_by(block.len()) {
            region.write(at, &block)?;
        }
        Ok(Arc::new(region))
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        // Before the memory is unmounted: detached, it would live as long as the loop device.
        self.hosts.clear();
        if self._memory_mount.is_none() {
            let _ = std::fs::remove_dir_all(&self.memory);
        }
    }
}
