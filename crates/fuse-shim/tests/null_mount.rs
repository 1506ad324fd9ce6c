//! Real mounts of the file system that does nothing: mounting, requests by both transports, and unmounting
//! work on this machine.

mod switch;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};
use switch::UringSwitch;
use varve_fuse_shim::{MountRequest, Mounted, Transport, check_host, mount_null};

/// Mounts at `dir`; `None` where nothing can be mounted.
fn mounted(dir: &Path, uring: bool) -> Option<Mounted> {
    let request = MountRequest {
        uring,
        ..MountRequest::new(dir, "varve-null")
    };
    let mounted = check_host(false).and_then(|()| mount_null(&request));
    mounted
        .inspect_err(|error| eprintln!("SKIPPED: no mount here: {error}"))
        .ok()
}

/// Switches FUSE over io_uring in the kernel; `None` where it cannot be.
fn switch(on: bool) -> Option<UringSwitch> {
    UringSwitch::set(on)
        .inspect_err(|error| eprintln!("SKIPPED: FUSE over io_uring cannot be switched here: {error}"))
        .ok()
}

#[test]
fn null_file_system_answers_when_mounted_and_is_gone_when_unmounted() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let Some(mounted) = mounted(dir.path(), true) else {
        return;
    };
    let mut file = File::open(dir.path().join("data")).expect("the one file");
    file.seek(SeekFrom::Start(1 << 20)).expect("seek");
    let mut buffer = [1; 4096];
    file.read_exact(&mut buffer).expect("read");
    assert!(buffer.iter().all(|byte| *byte == 0));
    let busy = mounted
        .unmount()
        .err()
        .map(|(mounted, error)| (mounted, error.raw_os_error()));
    let Some((mounted, errno)) = busy else {
        panic!("unmounted although a file was open")
    };
    assert_eq!(errno, Some(libc::EBUSY));
    drop(file);
    assert!(mounted.unmount().is_ok());
    assert!(!dir.path().join("data").exists());
}

/// Names, reads and writes, small and as large as a request may be, from each processor.
fn use_it(dir: &Path) {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for processor in 0..2 * processors {
            scope.spawn(move || {
                let mut here = rustix::thread::CpuSet::new();
                here.set(processor % processors);
                let _ = rustix::thread::sched_setaffinity(None, &here);
                let direct = File::options()
                    .read(true)
                    .write(true)
                    .custom_flags(libc::O_DIRECT)
                    .open(dir.join("data"))
                    .expect("the one file");
                for len in [1, 4096, 100_000, 1 << 20, 3 << 20] {
                    let mut buffer = vec![1; len];
                    direct.read_exact_at(&mut buffer, 5).expect("read");
                    assert!(buffer.iter().all(|byte| *byte == 0), "{len}");
                    direct.write_all_at(&buffer, 5).expect("write");
                }
                for round in 0..50 {
                    let name = dir.join(format!("new-{processor}-{round}-{}", "x".repeat(200)));
                    File::create(&name).expect("create").sync_all().expect("sync");
                    std::fs::remove_file(&name).expect("unlink");
                    let missing = std::fs::metadata(dir.join("missing")).expect_err("no such file");
                    assert_eq!(missing.raw_os_error(), Some(libc::ENOENT));
                    let xattr = rustix::fs::getxattr(&*dir.join("data"), "user.none", &mut [0_u8; 8]);
                    assert!(xattr.is_err());
                }
                assert_eq!(std::fs::read_dir(dir).expect("list").count(), 1);
            });
        }
    });
}

#[test]
fn requests_come_by_io_uring_where_it_is_on() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let Some(on) = switch(true) else {
        return;
    };
    let Some(on_rings) = mounted(dir.path(), true) else {
        return;
    };
    assert_eq!(on_rings.transport(), Transport::Rings);
    use_it(dir.path());
    let other = tempfile::tempdir().expect("a temporary directory");
    let on_device = mounted(other.path(), false).expect("a mount like the one before");
    assert_eq!(on_device.transport(), Transport::Device);
    use_it(other.path());
    on.turn(false).expect("it could be switched on");
    // A mount that began by rings goes on so.
    use_it(dir.path());
    assert!(on_rings.unmount().is_ok() && on_device.unmount().is_ok());
    let on_device = mounted(dir.path(), true).expect("a mount like the one before");
    assert_eq!(on_device.transport(), Transport::Device);
    use_it(dir.path());
    assert!(on_device.unmount().is_ok());
}

#[test]
fn mount_by_io_uring_that_is_taken_away_ends() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let Some(_on) = switch(true) else {
        return;
    };
    let Some(on_rings) = mounted(dir.path(), true) else {
        return;
    };
    let open = File::open(dir.path().join("data")).expect("the one file");
    rustix::mount::unmount(dir.path(), rustix::mount::UnmountFlags::DETACH).expect("detach");
    open.read_exact_at(&mut [0; 4096], 0).expect("still served");
    drop(open);
    let until = Instant::now() + Duration::from_secs(60);
    while !on_rings.is_finished() {
        assert!(Instant::now() < until, "its threads do not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}
