//! Persistent memory on the test machine (`tests/vm/dax`): a file system with DAX at `/tmp/pm`, a devdax
//! device
//! `/dev/dax1.0`. Skips loudly elsewhere. The tests of bad memory leave bad pages until the next boot.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use varve_media::dax::{DaxDevice, KernelDirs, bad_parts, is_dax_dir};
use varve_media::{Backing, DeviceState, MappedOptions, MappedRegion, MediaError, Region};

const DEVICE: &str = "/dev/dax1.0";
const DIR: &str = "/tmp/pm";
const LEN: u64 = 4 << 20;

fn is_there() -> bool {
    let there = std::env::var_os("VARVE_VM_GUEST").is_some() && Path::new(DEVICE).exists();
    if !there {
        eprintln!("SKIPPED: needs the test machine: tests/vm/dax");
    }
    there
}

/// A file that goes with the test.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn file(name: &str) -> (Scratch, MappedRegion) {
    let path = Path::new(DIR).join(name);
    let _ = std::fs::remove_file(&path);
    let options = MappedOptions {
        backing: Backing::Dax,
        len_bytes: LEN,
        max_bytes: LEN,
        sparse: false,
    };
    let region = MappedRegion::create(&path, options).unwrap();
    (Scratch(path), region)
}

fn device() -> MappedRegion {
    let device = DaxDevice::open(Path::new(DEVICE)).unwrap();
    // Behind the part where a pool has its header and, with the offset, its journal.
    MappedRegion::of_device(
        device.descriptor().unwrap(),
        device.name().clone(),
        device.part(2 << 20),
        LEN,
        LEN,
        true,
    )
    .unwrap()
}

/// Writes of all alignments and lengths around a line, a page and a huge page are read back.
fn round_trip(region: &dyn Region) {
    let mut at = 1;
    for len in [1, 7, 63, 64, 65, 500, 4096, 5000, 300_000] {
        let bytes: Vec<u8> = (0..len).map(|byte| (byte * 7 + len) as u8).collect();
        for off in [at, at * 64, (2 << 20) - 30] {
            let crc = region.write_crc(off, &bytes, 5).unwrap();
            assert_eq!(crc, varve_media::crc32c_append(5, &bytes));
            region.sync(off, bytes.len() as u64).unwrap();
            let mut back = vec![0; len];
            region.read(off, &mut back).unwrap();
            assert!(back == bytes, "{len} bytes at {off}");
        }
        at += 13;
    }
    assert_eq!(region.state(), DeviceState::Ok);
    let info = region.info().to_string();
    let by = ["clwb", "clflushopt", "clflush"];
    assert!(
        info.contains("MAP_SYNC") && by.iter().any(|by| info.contains(by)),
        "{info}"
    );
    println!("{info}");
}

#[test]
fn memory_of_a_file_is_mapped_and_found_again() {
    if !is_there() {
        return;
    }
    assert!(is_dax_dir(Path::new(DIR)) && !is_dax_dir(Path::new("/dev/shm")));
    let (path, region) = file("memory");
    round_trip(&region);
    region.write(70_001, b"kept").unwrap();
    region.fence().unwrap();
    drop(region);
    let region = MappedRegion::open(&path.0, Backing::Dax, 0, false).unwrap();
    let mut back = [0; 4];
    region.read(70_001, &mut back).unwrap();
    assert_eq!(&back, b"kept");
    assert!(matches!(region.write(0, b"x"), Err(MediaError::ReadOnly { .. })));
    // Past the page cache: a read by the file system sees the store at once.
    let bytes = std::fs::read(&path.0).unwrap();
    assert_eq!(&bytes[70_001..70_005], b"kept");
}

#[test]
fn memory_of_a_file_grows_in_place() {
    if !is_there() {
        return;
    }
    let path = Scratch(Path::new(DIR).join("growing"));
    let options = MappedOptions {
        backing: Backing::Dax,
        len_bytes: 4096,
        max_bytes: 16 << 20,
        sparse: false,
    };
    let region = MappedRegion::create(&path.0, options).unwrap();
    region.grow(12 << 20).unwrap();
    region.write((12 << 20) - 4, b"last").unwrap();
    region.sync(0, 12 << 20).unwrap();
    assert!(matches!(region.grow(17 << 20), Err(MediaError::TooLong { .. })));
}

#[test]
fn memory_of_a_device_is_for_one_user_and_mapped_by_parts() {
    if !is_there() {
        return;
    }
    let device = DaxDevice::open(Path::new(DEVICE)).unwrap();
    assert!(device.size_bytes() >= 100 << 20 && device.size_bytes().is_multiple_of(2 << 20));
    let second = DaxDevice::open(Path::new(DEVICE)).unwrap_err().to_string();
    assert!(second.contains("in use"), "{second}");
    let map = |off| {
        let (file, name) = (device.descriptor().unwrap(), device.name().clone());
        MappedRegion::of_device(file, name, device.part(off), LEN, LEN, true).unwrap()
    };
    let (first, other) = (map(2 << 20), map(6 << 20));
    round_trip(&first);
    other.write(0, &[9; 4096]).unwrap();
    other.fence().unwrap();
    // The same range by another mapping.
    let both = MappedRegion::of_device(
        device.descriptor().unwrap(),
        "both".into(),
        device.part(2 << 20),
        8 << 20,
        8 << 20,
        true,
    )
    .unwrap();
    let mut back = [0; 4096];
    both.read(4 << 20, &mut back).unwrap();
    assert!(back == [9; 4096]);
    // As it was: a pool is made here next.
    both.write(0, &vec![0; 8 << 20]).unwrap();
    both.fence().unwrap();
}

/// Has the kernel treat the page at `off` as lost, for all who map it.
fn lose(region: &MappedRegion, off: u64) {
    let at = region.as_ptr().unwrap().as_ptr().wrapping_add(off as usize);
    // SAFETY: one page of the region's mapping, which the region's handler replaces when the signal comes.
    let done = unsafe { libc::madvise(at.cast(), 4096, libc::MADV_HWPOISON) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

fn is_eio<T>(result: Result<T, MediaError>) -> bool {
    matches!(result, Err(MediaError::Io { errno: libc::EIO, .. }))
}

#[test]
fn poison_in_a_file_is_an_error_of_its_block_alone() {
    if !is_there() {
        return;
    }
    let (_path, region) = file("poison");
    region.write(0, &vec![3; LEN as usize]).unwrap();
    region.fence().unwrap();
    lose(&region, 8192);
    let mut page = [0; 4096];
    assert!(is_eio(region.read(8192 + 100, &mut page[..8])));
    assert!(is_eio(region.write(8192, &[1; 64])));
    for off in [0, 4096, 12_288, LEN - 4096] {
        region.read(off, &mut page).unwrap();
        assert!(page == [3; 4096], "{off}");
        region.write(off, &[3; 4096]).unwrap();
    }
}

#[test]
fn poison_in_a_device_is_an_error_and_no_crash() {
    if !is_there() {
        return;
    }
    let region = device();
    let mut page = [0; 4096];
    region.read(8192, &mut page).unwrap();
    lose(&region, 8192);
    assert!(is_eio(region.read(8192 + 100, &mut page[..8])));
    // The device is mapped in huge pages: the rest of this one may be lost to this process, the next is not.
    region.read(2 << 20, &mut page).unwrap();
}

#[test]
fn poison_that_the_kernel_lists_is_found_by_its_place_in_the_file() {
    if !is_there() {
        return;
    }
    let (path, region) = file("listed");
    region.write(0, &vec![4; LEN as usize]).unwrap();
    region.sync(0, LEN).unwrap();
    drop(region);
    let open = || {
        std::fs::File::options()
            .read(true)
            .custom_flags(libc::O_CLOEXEC)
            .open(&path.0)
    };
    let before = bad_parts(&KernelDirs::default(), &open().unwrap());
    assert!(before.is_empty(), "{before:?}");
    let frag = std::process::Command::new("filefrag")
        .args(["-v", "-b4096"])
        .arg(&path.0)
        .output()
        .unwrap();
    let text = String::from_utf8(frag.stdout).unwrap();
    // "   0:        0..    1023:      34816..     35839:   1024: …"
    let line = text
        .lines()
        .find(|line| line.trim_start().starts_with("0:"))
        .unwrap();
    let place: u64 = line
        .split(':')
        .nth(2)
        .unwrap()
        .split("..")
        .next()
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    std::fs::write("/sys/block/pmem0/badblocks", format!("{} 8", (place + 3) * 8)).unwrap();
    assert_eq!(
        bad_parts(&KernelDirs::default(), &open().unwrap()),
        [(3 * 4096, 4096)]
    );
    let region = MappedRegion::open(&path.0, Backing::Dax, 0, true).unwrap();
    let mut page = [0; 4096];
    assert!(is_eio(region.read(3 * 4096 + 9, &mut page[..8])));
    region.read(2 * 4096, &mut page).unwrap();
    assert!(page == [4; 4096]);
}
