//! A devdax device: one range of persistent memory without a file system. Owns what it is and whether it can
//! be used; knows nothing of what lies on it.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::{KernelDirs, sysfs};
use crate::error::{DeviceName, MediaError};
use crate::pmem::DaxPart;

/// Parts of a device begin on this many bytes.
const PART_BYTES: u64 = 2 << 20;

/// A device that can be mapped.
#[derive(Debug)]
pub struct DaxDevice {
    name: DeviceName,
    path: PathBuf,
    file: File,
    size_bytes: u64,
    align_bytes: u64,
}

impl DaxDevice {
    /// Opens a device for reading and writing, for this process alone among pools.
    ///
    /// # Errors
    /// `Refused`, with the commands that make such a device, for anything else; `Setup`.
    pub fn open(path: &Path) -> Result<Self, MediaError> {
        let device = Self::open_unclaimed(path)?;
        rustix::fs::flock(&device.file, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(
            |_| MediaError::Refused {
                device: device.name.clone(),
                why: "is in use by another pool".into(),
            },
        )?;
        Ok(device)
    }

    /// [`open`](Self::open) for a process that holds the pool already.
    ///
    /// # Errors
    /// As for `open`.
    pub fn open_unclaimed(path: &Path) -> Result<Self, MediaError> {
        Self::open_at(path, &KernelDirs::default())
    }

    fn open_at(path: &Path, dirs: &KernelDirs) -> Result<Self, MediaError> {
        let name = DeviceName::from(path);
        let meta = fs::metadata(path).map_err(|error| MediaError::setup(&name, "look at it", &error))?;
        let refused = |why: String| MediaError::Refused {
            device: name.clone(),
            why: why.into(),
        };
        if !meta.file_type().is_char_device() {
            let commands = match meta.file_type().is_block_device() {
                true => {
                    let dir = sysfs::disk_dir(dirs, meta.rdev()).map(|(dir, _)| dir);
                    let namespace = dir.and_then(|dir| super::mount::namespace_of(&dir));
                    remake("devdax", namespace.as_deref())
                }
                false => remake("devdax", None),
            };
            return Err(refused(format!(
                "is not a devdax device (a character device such as /dev/dax0.0). Make one with {commands}, \
                 which ERASES the namespace; or make a pool in a directory of a file system that is mounted \
                 with DAX"
            )));
        }
        let (size_bytes, align_bytes) = Self::look(dirs, meta.rdev()).map_err(refused)?;
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.map_err(|error| MediaError::setup(&name, "open it", &error))?;
        Ok(Self {
            name,
            path: path.to_owned(),
            file,
            size_bytes,
            align_bytes,
        })
    }

    /// Returns size and alignment of the device of this number, or why it cannot be used.
    fn look(dirs: &KernelDirs, rdev: u64) -> Result<(u64, u64), String> {
        let not_one = || format!("is not a devdax device; make one with {}", remake("devdax", None));
        let dir = sysfs::char_dir(dirs, rdev).ok_or_else(not_one)?;
        if sysfs::link_name(&dir, "subsystem").as_deref() != Some("dax") {
            return Err(not_one());
        }
        let device = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if sysfs::link_name(&dir, "driver").as_deref() == Some("kmem") {
            return Err(format!(
                "is in use as ordinary memory; `daxctl reconfigure-device --mode=devdax {device}` gives it \
                 back"
            ));
        }
        let size = sysfs::number(&dir, "size").filter(|size| *size > 0);
        let size = size.ok_or_else(|| format!("has no size; `ndctl list -X -d {device}` shows its state"))?;
        let align = sysfs::number(&dir, "align").unwrap_or(PART_BYTES);
        if !PART_BYTES.is_multiple_of(align.max(1)) || align < 4096 {
            return Err(format!(
                "has an alignment of {align} bytes; make it with 2 MiB: {}",
                remake("devdax -a 2M", None)
            ));
        }
        Ok((size / PART_BYTES * PART_BYTES, align))
    }

    /// Name for messages.
    pub const fn name(&self) -> &DeviceName {
        &self.name
    }

    /// Its node.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that can be mapped, a multiple of 2 MiB.
    pub const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The part that begins at `off`, a multiple of 2 MiB.
    pub const fn part(&self, off: u64) -> DaxPart {
        DaxPart {
            off,
            align_bytes: self.align_bytes,
        }
    }

    /// A descriptor to map it.
    ///
    /// # Errors
    /// Too many open files.
    pub fn descriptor(&self) -> Result<File, MediaError> {
        let copy = self.file.try_clone();
        copy.map_err(|error| MediaError::setup(&self.name, "share it", &error))
    }
}

/// The command that makes a namespace of another mode.
pub(super) fn remake(mode: &str, namespace: Option<&str>) -> String {
    match namespace {
        Some(name) => format!("`ndctl create-namespace -f -e {name} -m {mode}`"),
        None => format!("`ndctl create-namespace -m {mode}` (`ndctl list -NR` shows what there is)"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{DaxDevice, KernelDirs};
    use rustix::fs::makedev;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::{Path, PathBuf};

    /// A sysfs with one region of persistent memory, and in it one devdax device of 64 MiB.
    pub(in crate::dax) struct Machine(tempfile::TempDir);

    impl Machine {
        pub(in crate::dax) fn dirs(&self) -> KernelDirs {
            KernelDirs {
                sys: self.0.path().join("sys"),
                dev: self.0.path().join("dev"),
            }
        }

        pub(in crate::dax) fn region(&self) -> PathBuf {
            self.0.path().join("sys/devices/ndbus0/region0")
        }

        pub(in crate::dax) fn dax(&self) -> PathBuf {
            self.region().join("dax0.1/dax0.0")
        }

        pub(in crate::dax) fn set(&self, dir: &Path, name: &str, text: &str) {
            fs::write(dir.join(name), format!("{text}\n")).unwrap();
        }
    }

    pub(in crate::dax) fn machine() -> Machine {
        let machine = Machine(tempfile::tempdir().unwrap());
        let (sys, dax) = (machine.dirs().sys, machine.dax());
        fs::create_dir_all(&dax).unwrap();
        for dir in [
            "dev/char",
            "dev/block",
            "bus/dax/devices",
            "bus/dax/drivers",
            "class/block",
        ] {
            fs::create_dir_all(sys.join(dir)).unwrap();
        }
        fs::create_dir_all(machine.dirs().dev).unwrap();
        for driver in ["device_dax", "kmem"] {
            fs::create_dir_all(sys.join("bus/dax/drivers").join(driver)).unwrap();
        }
        symlink(&dax, sys.join("dev/char/252:0")).unwrap();
        symlink(&dax, sys.join("bus/dax/devices/dax0.0")).unwrap();
        symlink(sys.join("bus/dax"), dax.join("subsystem")).unwrap();
        symlink(sys.join("bus/dax/drivers/device_dax"), dax.join("driver")).unwrap();
        machine.set(&dax, "size", "67108864");
        machine.set(&dax, "align", "2097152");
        machine.set(&dax, "resource", "0x140400000");
        machine.set(&machine.region(), "resource", "0x140000000");
        machine
    }

    #[test]
    fn device_has_the_size_and_alignment_that_sysfs_says() {
        let machine = machine();
        let look = || DaxDevice::look(&machine.dirs(), makedev(252, 0));
        assert_eq!(look(), Ok((64 << 20, 2 << 20)));
        machine.set(&machine.dax(), "size", "67112960");
        machine.set(&machine.dax(), "align", "4096");
        assert_eq!(look(), Ok((64 << 20, 4096)));
    }

    #[test]
    fn device_that_cannot_be_used_is_refused_with_the_command() {
        let machine = machine();
        let look = |number| DaxDevice::look(&machine.dirs(), makedev(252, number)).unwrap_err();
        assert!(look(7).contains("ndctl create-namespace -m devdax"));
        machine.set(&machine.dax(), "align", "1073741824");
        assert!(look(0).contains("devdax -a 2M"));
        machine.set(&machine.dax(), "align", "2097152");
        machine.set(&machine.dax(), "size", "0");
        assert!(look(0).contains("ndctl list -X"));
        machine.set(&machine.dax(), "size", "67108864");
        fs::remove_file(machine.dax().join("driver")).unwrap();
        symlink("../../drivers/kmem", machine.dax().join("driver")).unwrap();
        assert!(look(0).contains("daxctl reconfigure-device --mode=devdax dax0.0"));
        fs::remove_file(machine.dax().join("subsystem")).unwrap();
        symlink("/sys/class/mem", machine.dax().join("subsystem")).unwrap();
        assert!(look(0).contains("not a devdax device"));
    }

    #[test]
    fn file_and_other_device_are_not_devices_of_persistent_memory() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("nvm");
        fs::write(&file, "x").unwrap();
        for path in [file.as_path(), Path::new("/dev/null")] {
            let error = DaxDevice::open(path).unwrap_err().to_string();
            assert!(error.contains("ndctl create-namespace -m devdax"), "{error}");
        }
        assert!(DaxDevice::open(&dir.path().join("none")).is_err());
    }
}
