//! A real mount of the file system that does nothing: mounting, requests and unmounting work on this machine.

use std::io::{Read, Seek, SeekFrom};
use varve_fuse_shim::{MountRequest, check_host, mount_null};

#[test]
fn null_file_system_answers_when_mounted_and_is_gone_when_unmounted() {
    if let Err(error) = check_host(false) {
        eprintln!("SKIPPED: no mount here: {error}");
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let request = MountRequest {
        mountpoint: dir.path().to_owned(),
        source: "varve-null".into(),
        allow_other: false,
        read_only: false,
        flags: varve_fuse_shim::MountFlags::empty(),
    };
    let mounted = match mount_null(&request) {
        Ok(mounted) => mounted,
        Err(error) => {
            eprintln!("SKIPPED: no mount here: {error}");
            return;
        }
    };
    let mut file = std::fs::File::open(dir.path().join("data")).expect("the one file");
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
