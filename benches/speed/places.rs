//! Where the sides lie: memory with huge pages if it can be had, an ext4 in that memory, the disk. Cleans up when dropped; knows nothing of
//! what is measured.

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

/// ext4 on a loop device whose file lies in memory.
pub struct Ext4 {
    _mount: Mounted,
    /// Its mountpoint.
    pub dir: PathBuf,
}

/// All places.
pub struct Places {
    // Dropped in this order: what lies in the memory goes before the memory.
    /// ext4 in memory, or why not.
    pub ext4: Result<Ext4, String>,
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

/// The loop device goes away with the mount: it is detached while it is busy, which the kernel does at its last use.
fn make_ext4(memory: &Path, bytes: u64, dir: &Path) -> anyhow::Result<Ext4> {
    let image = memory.join("ext4.img");
    std::fs::File::create(&image)?.set_len(bytes)?;
    std::fs::create_dir(dir)?;
    output(
        Command::new("mkfs.ext4")
            .args(["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"])
            .arg(&image),
    )?;
    let device = output(Command::new("losetup").args(["--find", "--show"]).arg(&image))?;
    let mounted = mount(&device, dir, "ext4", MountFlags::NOATIME, None::<&std::ffi::CStr>);
    let detached = output(Command::new("losetup").arg("--detach").arg(&device));
    mounted.with_context(|| format!("cannot mount {device}"))?;
    let ext4 = Ext4 {
        _mount: Mounted(dir.to_owned()),
        dir: dir.to_owned(),
    };
    detached?;
    Ok(ext4)
}

fn mount_tmpfs(dir: &Path, options: &std::ffi::CStr) -> anyhow::Result<Mounted> {
    std::fs::create_dir(dir)?;
    mount("tmpfs", dir, "tmpfs", MountFlags::NOATIME, Some(options))?;
    Ok(Mounted(dir.to_owned()))
}

impl Places {
    /// Makes them. `ext4_bytes` is the size of the ext4 in memory.
    pub fn prepare(ext4_bytes: u64) -> anyhow::Result<Self> {
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
        let ext4 = if rustix::process::geteuid().is_root() {
            make_ext4(&memory, ext4_bytes, &top.path().join("ext4")).map_err(|error| format!("{error:#}"))
        } else {
            Err("needs root, for a loop device".to_owned())
        };
        // The target directory, not /tmp: that may be memory.
        let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
        std::fs::create_dir_all(target)?;
        Ok(Self {
            ext4,
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
        if let Ok(ext4) = std::mem::replace(&mut self.ext4, Err(String::new())) {
            drop(ext4);
        }
        if self._memory_mount.is_none() {
            let _ = std::fs::remove_dir_all(&self.memory);
        }
    }
}
