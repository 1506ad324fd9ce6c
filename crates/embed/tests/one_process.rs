//! A pool, its daemon and several clients in one process.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use varve_embed::{Embedded, SimPool};
use varve_ipc::{Cred, SystemClock};
use varve_kernelfs::Config;
use varve_libfs::{Fs, OpenFlags, RenameFlags};
use varve_media::sim::SimWorld;

fn open(world: &SimWorld) -> Embedded {
    let (parts, _) = SimPool::default()
        .parts(world, Config::default(), Arc::new(SystemClock))
        .unwrap();
    Embedded::open(parts).unwrap()
}

fn write_file(fs: &Fs, name: &[u8], body: &[u8]) {
    let root = Cred::root();
    let attr = fs.create(fs.root(), name, 0o100_644, 0, &root).unwrap();
    let file = fs.open(attr.key, OpenFlags::READ_WRITE, &root).unwrap();
    assert_eq!(file.write_at(0, body, &root).unwrap(), body.len());
}

fn read_file(fs: &Fs, name: &[u8]) -> Vec<u8> {
    let root = Cred::root();
    let attr = fs.lookup(fs.root(), name, &root).unwrap();
    let file = fs.open(attr.key, OpenFlags::READ, &root).unwrap();
    let mut body = vec![0; attr.size_bytes as usize + 10];
    let count = file.read_at(0, &mut body).unwrap();
    body.truncate(count);
    body
}

#[test]
fn files_are_the_same_before_and_after_digest_and_restart() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let embedded = open(&world);
    let fs = embedded.mount().unwrap();
    let body: Vec<u8> = (0..100_000_u32).map(|i| ((i * 7) >> 3) as u8).collect();
    write_file(&fs, b"a", &body);
    assert_eq!(read_file(&fs, b"a"), body);
    fs.rename(
        fs.root(),
        b"a",
        fs.root(),
        b"b",
        RenameFlags::default(),
        &Cred::root(),
    )
    .unwrap();
    embedded.kernel().digest_all().unwrap();
    assert_eq!(read_file(&fs, b"b"), body);
    assert_eq!(
        fs.lookup(fs.root(), b"a", &Cred::root()).unwrap_err().0,
        libc::ENOENT
    );
    fs.unmount().unwrap();
    embedded.shutdown().unwrap();
    let embedded = open(&world);
    let fs = embedded.mount().unwrap();
    assert_eq!(read_file(&fs, b"b"), body);
}

#[test]
fn second_session_sees_what_the_first_wrote_at_once() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let embedded = open(&world);
    embedded.start().unwrap();
    let (one, two) = (embedded.mount().unwrap(), embedded.mount().unwrap());
    for round in 0..20_u8 {
        let (from, to) = if round % 2 == 0 {
            (&one, &two)
        } else {
            (&two, &one)
        };
        let name = format!("f{round}").into_bytes();
        write_file(from, &name, &[round; 5000]);
        assert_eq!(read_file(to, &name), [round; 5000]);
        to.unlink(to.root(), &name, &Cred::root()).unwrap();
        assert_eq!(
            from.lookup(from.root(), &name, &Cred::root()).unwrap_err().0,
            libc::ENOENT
        );
    }
    one.unmount().unwrap();
    two.unmount().unwrap();
    embedded.shutdown().unwrap();
    let (parts, _) = SimPool::default()
        .parts(&world, Config::default(), Arc::new(SystemClock))
        .unwrap();
    let findings = parts.store.check().unwrap();
    assert!(findings.is_empty(), "{findings:?}");
}
