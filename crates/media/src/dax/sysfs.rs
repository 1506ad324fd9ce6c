//! What sysfs says of persistent memory. Parses text and follows links; opens no device.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};

use super::KernelDirs;

/// Bytes of a sector of a list of bad blocks.
const SECTOR_BYTES: u64 = 512;

/// Reads one attribute; `None` if it is not there.
pub(super) fn text(dir: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(dir.join(name)).ok()?;
    Some(text.trim().to_owned())
}

/// Reads a number, decimal or hexadecimal.
pub(super) fn number(dir: &Path, name: &str) -> Option<u64> {
    let text = text(dir, name)?;
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The last part of a link's target, such as the name of a driver.
pub(super) fn link_name(dir: &Path, name: &str) -> Option<String> {
    let target = fs::read_link(dir.join(name)).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

fn of_number(dirs: &KernelDirs, kind: &str, number: u64) -> Option<PathBuf> {
    let name = format!("{}:{}", major(number), minor(number));
    fs::canonicalize(dirs.sys.join("dev").join(kind).join(name)).ok()
}

/// Directory of a character device.
pub(super) fn char_dir(dirs: &KernelDirs, rdev: u64) -> Option<PathBuf> {
    of_number(dirs, "char", rdev)
}

/// Directory of a block device: of the whole disk, with the first byte of the partition in it.
pub(super) fn disk_dir(dirs: &KernelDirs, dev: u64) -> Option<(PathBuf, u64)> {
    let dir = of_number(dirs, "block", dev)?;
    if dir.join("partition").exists() {
        let start = number(&dir, "start")? * SECTOR_BYTES;
        return Some((dir.parent()?.to_owned(), start));
    }
    Some((dir, 0))
}

/// Parses a list of bad blocks: lines of a first sector and a number of sectors. Bytes.
pub(super) fn parse_bad_blocks(text: &str) -> Vec<(u64, u64)> {
    let line = |line: &str| {
        let mut words = line.split_whitespace().map(str::parse::<u64>);
        let (first, count) = (words.next()?.ok()?, words.next()?.ok()?);
        Some((first.checked_mul(SECTOR_BYTES)?, count.checked_mul(SECTOR_BYTES)?))
    };
    text.lines().filter_map(line).collect()
}

/// Bad parts of a disk or partition, by its own offsets.
pub(super) fn bad_of_disk(dirs: &KernelDirs, dev: u64) -> Vec<(u64, u64)> {
    let Some((dir, start)) = disk_dir(dirs, dev) else {
        return Vec::new();
    };
    let bad = parse_bad_blocks(&text(&dir, "badblocks").unwrap_or_default());
    let of_partition = |(off, len): (u64, u64)| {
        let skipped = start.saturating_sub(off).min(len);
        (len > skipped).then(|| (off + skipped - start, len - skipped))
    };
    bad.into_iter().filter_map(of_partition).collect()
}

/// Bad parts of a devdax device, by its own offsets: the list of its region, which begins before it.
pub(super) fn bad_of_device(dirs: &KernelDirs, rdev: u64) -> Vec<(u64, u64)> {
    let shifted = || {
        let dir = char_dir(dirs, rdev)?;
        let own = number(&dir, "resource")?;
        let region = dir.ancestors().find(|dir| dir.join("badblocks").is_file())?;
        let shift = own.checked_sub(number(region, "resource")?)?;
        let size = number(&dir, "size")?;
        let bad = parse_bad_blocks(&text(region, "badblocks")?);
        let inside = |(off, len): (u64, u64)| {
            let (from, to) = (off.max(shift), (off + len).min(shift + size));
            (from < to).then(|| (from - shift, to - from))
        };
        Some(bad.into_iter().filter_map(inside).collect())
    };
    shifted().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{bad_of_device, bad_of_disk, parse_bad_blocks};
    use crate::dax::KernelDirs;
    use crate::dax::device::tests::machine;
    use rustix::fs::makedev;
    use std::fs;

    #[test]
    fn bad_blocks_are_sectors_and_other_lines_are_not_taken() {
        assert_eq!(parse_bad_blocks("8 1\n2048 16\n"), [(4096, 512), (1 << 20, 8192)]);
        assert_eq!(
            parse_bad_blocks("\nx 1\n5\n18446744073709551615 9\n"),
            Vec::<(u64, u64)>::new()
        );
    }

    #[test]
    fn bad_blocks_of_a_device_are_those_of_its_region_behind_its_start() {
        let machine = machine();
        // The device begins 4 MiB after its region and is 64 MiB long.
        fs::write(
            machine.region().join("badblocks"),
            "0 8\n8190 4\n8200 8\n999999 1\n",
        )
        .unwrap();
        let dirs = machine.dirs();
        assert_eq!(bad_of_device(&dirs, makedev(252, 0)), [(0, 1024), (4096, 4096)]);
        assert!(bad_of_device(&dirs, makedev(252, 9)).is_empty());
    }

    #[test]
    fn bad_blocks_of_a_partition_are_those_of_the_disk_behind_its_start() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = KernelDirs {
            sys: dir.path().into(),
            dev: dir.path().into(),
        };
        let disk = dir.path().join("devices/pmem0");
        let partition = disk.join("pmem0p1");
        fs::create_dir_all(&partition).unwrap();
        fs::write(disk.join("badblocks"), "2047 2\n4096 8\n").unwrap();
        fs::write(partition.join("partition"), "1\n").unwrap();
        fs::write(partition.join("start"), "2048\n").unwrap();
        fs::create_dir_all(dir.path().join("dev/block")).unwrap();
        std::os::unix::fs::symlink(&partition, dir.path().join("dev/block/259:1")).unwrap();
        std::os::unix::fs::symlink(&disk, dir.path().join("dev/block/259:0")).unwrap();
        assert_eq!(bad_of_disk(&dirs, makedev(259, 1)), [(0, 512), (1 << 20, 4096)]);
        assert_eq!(
            bad_of_disk(&dirs, makedev(259, 0)),
            [(2047 * 512, 1024), (2 << 20, 4096)]
        );
    }
}
