//! The other sides: the kernel's swap under a memory control group. All of it is undone when dropped.

use std::path::PathBuf;
use std::process::Command;

/// A policy file that compresses nothing.
pub struct Policy(PathBuf);

impl Policy {
    pub fn uncompressed() -> Self {
        let path = std::env::temp_dir().join(format!("varve-far-bench-{}.toml", std::process::id()));
        std::fs::write(&path, "[far]\ncompressed_share = 0\n").expect("a policy can be written");
        Self(path)
    }

    pub fn path(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

impl Drop for Policy {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A memory control group (version 1) with a limit.
pub struct Group(PathBuf);

impl Group {
    pub fn new(limit_bytes: u64) -> Option<Self> {
        let dir =
            PathBuf::from("/sys/fs/cgroup/memory").join(format!("varve-far-bench-{}", std::process::id()));
        std::fs::create_dir(&dir).ok()?;
        let group = Self(dir);
        std::fs::write(group.0.join("memory.limit_in_bytes"), limit_bytes.to_string()).ok()?;
        Some(group)
    }

    /// Has the program start in the group.
    pub fn enter(&self, command: &mut Command) {
        use std::os::unix::process::CommandExt;
        let procs = self.0.join("cgroup.procs");
        // SAFETY: the closure runs in a child of one thread's fork, before `exec`. It opens and writes one
        // file; this program has no other thread then, so no lock of the allocator is held.
        unsafe { command.pre_exec(move || std::fs::write(&procs, "0")) };
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

fn tool(name: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(name).args(arguments).output().ok()?;
    if !output.status.success() {
        eprintln!(
            "far: {name} {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        return None;
    }
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// A swap device, switched on.
pub struct Swap {
    device: String,
    kind: Kind,
    is_on: bool,
}

enum Kind {
    Loop(PathBuf),
    Zram,
}

impl Swap {
    /// On a loop device over a file in memory.
    pub fn memory() -> Option<Self> {
        let path = PathBuf::from(format!("/dev/shm/varve-far-bench-{}", std::process::id()));
        std::fs::File::create(&path)
            .and_then(|file| file.set_len(512 << 20))
            .ok()?;
        let mut swap = Self {
            device: String::new(),
            kind: Kind::Loop(path.clone()),
            is_on: false,
        };
        swap.device = tool("losetup", &["--find", "--show", path.to_str()?])?;
        swap.switch_on()
    }

    /// On `/dev/zram0`, if nobody uses it.
    pub fn zram() -> Option<Self> {
        let size = std::fs::read_to_string("/sys/block/zram0/disksize").ok()?;
        if size.trim() != "0" {
            eprintln!("far: /dev/zram0 is in use");
            return None;
        }
        let swap = Self {
            device: "/dev/zram0".into(),
            kind: Kind::Zram,
            is_on: false,
        };
        std::fs::write("/sys/block/zram0/comp_algorithm", "lz4").ok()?;
        std::fs::write("/sys/block/zram0/disksize", (512u64 << 20).to_string()).ok()?;
        swap.switch_on()
    }

    fn switch_on(mut self) -> Option<Self> {
        tool("mkswap", &[&self.device])?;
        tool("swapon", &[&self.device])?;
        self.is_on = true;
        Some(self)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if self.is_on {
            tool("swapoff", &[&self.device]);
        }
        match &self.kind {
            Kind::Loop(path) => {
                if !self.device.is_empty() {
                    tool("losetup", &["--detach", &self.device]);
                }
                let _ = std::fs::remove_file(path);
            }
            Kind::Zram => {
                let _ = std::fs::write("/sys/block/zram0/reset", "1");
                let _ = std::fs::write("/sys/block/zram0/comp_algorithm", "lzo-rle");
            }
        }
    }
}
