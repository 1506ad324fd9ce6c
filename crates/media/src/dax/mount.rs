//! Whether files of a directory can be mapped as persistent memory, and if not, what would change that.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::device::remake;
use super::{KernelDirs, sysfs};
use crate::error::DeviceName;
use crate::host::allocate_file;
use crate::pmem::{DaxPart, MapOptions, Mapping};

/// Bytes of the file that is mapped for a trial.
const TRIAL_BYTES: u64 = 4096;

/// Whether new files of `dir` are mapped as persistent memory: makes one, maps it, removes it. `false` where
/// that cannot be tried.
#[must_use]
pub fn is_dax_dir(dir: &Path) -> bool {
    let path = dir.join(format!(".varve-dax-{}", std::process::id()));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path);
    let Ok(file) = file else { return false };
    let is_mapped = allocate_file(&file, 0, TRIAL_BYTES).is_ok() && can_map(&file, &path);
    // Best effort: it is empty, and its name says whose it is.
    let _ = fs::remove_file(&path);
    is_mapped
}

fn can_map(file: &File, path: &Path) -> bool {
    let options = MapOptions {
        len_bytes: TRIAL_BYTES,
        max_bytes: TRIAL_BYTES,
        writable: true,
        dax: Some(DaxPart::FILE),
    };
    Mapping::new(&DeviceName::from(path), file, options).is_ok()
}

/// What the file system of `dir` is, and the commands that give it DAX.
#[must_use]
pub fn why_not(dir: &Path) -> String {
    match fs::metadata(dir) {
        Ok(meta) => advice(&KernelDirs::default(), meta.dev()),
        Err(error) => format!("cannot be looked at: {error}"),
    }
}

/// The namespace that a disk's directory lies in, such as `namespace0.0`.
pub(super) fn namespace_of(dir: &Path) -> Option<String> {
    let names = dir.ancestors().filter_map(Path::file_name);
    let mut names = names.map(|name| name.to_string_lossy().into_owned());
    names.find(|name| name.starts_with("namespace"))
}

/// Why a file system on the device of this number has no DAX, with the commands that mend it.
pub(super) fn advice(dirs: &KernelDirs, dev: u64) -> String {
    let mount = "`mkfs.ext4 -b 4096 /dev/pmemN` (which ERASES it) and `mount -o dax=always /dev/pmemN DIR`";
    let none = format!(
        "its file system is not on persistent memory. Where the machine has some, make a namespace with {} \
         and a file system with {mount}",
        remake("fsdax", None)
    );
    let Some((disk, _)) = sysfs::disk_dir(dirs, dev) else {
        return none;
    };
    let name = disk
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    if !name.starts_with("pmem") {
        return none;
    }
    if sysfs::number(&disk.join("queue"), "dax") == Some(1) {
        return format!(
            "its file system, on {name}, is mounted without DAX. Unmount it and `mount -o dax=always \
             /dev/{name} DIR`; that needs blocks of 4 KiB (`mkfs.ext4 -b 4096`)"
        );
    }
    format!(
        "{name} is a namespace without DAX. Make it one with {}, which ERASES it, then {}",
        remake("fsdax", namespace_of(&disk).as_deref()),
        mount.replace("pmemN", &name)
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{advice, is_dax_dir};
    use crate::dax::KernelDirs;
    use rustix::fs::makedev;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn advice_names_the_commands_for_the_disk_that_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = KernelDirs {
            sys: dir.path().into(),
            dev: dir.path().into(),
        };
        fs::create_dir_all(dir.path().join("dev/block")).unwrap();
        for (number, place, dax) in [
            (0, "region0/namespace0.0/block/pmem0", "0"),
            (1, "region0/pfn0.1/block/pmem0.1", "1"),
            (2, "pci/block/vda", "0"),
        ] {
            let disk = dir.path().join("devices").join(place);
            fs::create_dir_all(disk.join("queue")).unwrap();
            fs::write(disk.join("queue/dax"), dax).unwrap();
            symlink(&disk, dir.path().join(format!("dev/block/259:{number}"))).unwrap();
        }
        let raw = advice(&dirs, makedev(259, 0));
        assert!(
            raw.contains("`ndctl create-namespace -f -e namespace0.0 -m fsdax`"),
            "{raw}"
        );
        let unmounted = advice(&dirs, makedev(259, 1));
        assert!(
            unmounted.contains("mount -o dax=always /dev/pmem0.1"),
            "{unmounted}"
        );
        for number in [2, 9] {
            let none = advice(&dirs, makedev(259, number));
            assert!(none.contains("not on persistent memory"), "{none}");
        }
    }

    #[test]
    fn trial_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let _ = is_dax_dir(dir.path());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(!is_dax_dir(&dir.path().join("none")));
    }
}
