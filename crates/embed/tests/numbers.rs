//! Inode numbers are handed to clients sixteen at a time: those that they did not use come back.
#![allow(clippy::unwrap_used)]

use varve_embed::{Embedded, SimPool};
use varve_ipc::Cred;
use varve_kernelfs::Config;
use varve_libfs::Fs;
use varve_media::sim::SimWorld;

const FILE: u32 = libc::S_IFREG | 0o644;
const DIR: u32 = libc::S_IFDIR | 0o755;

fn open(world: &SimWorld, config: Config) -> Embedded {
    SimPool::default().open(world, config).unwrap()
}

/// `count` directories with a file each.
fn make(fs: &Fs, count: usize) {
    let me = Cred::root();
    for n in 0..count {
        let dir = fs
            .create(fs.root(), format!("d{n}").as_bytes(), DIR, 0, &me)
            .unwrap();
        fs.create(dir.key, b"f", FILE, 0, &me).unwrap();
    }
}

fn used(embedded: &Embedded) -> u64 {
    embedded.kernel().status().inodes_used
}

#[test]
fn numbers_that_were_not_used_come_back_at_the_end_of_the_session() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let embedded = open(&world, Config::default());
    let before = used(&embedded);
    let fs = embedded.mount().unwrap();
    make(&fs, 10);
    assert!(used(&embedded) > before + 20, "numbers are reserved");
    fs.unmount().unwrap();
    drop(fs);
    embedded.tick();
    assert_eq!(used(&embedded), before + 20);
    embedded.shutdown().unwrap();
}

#[test]
fn numbers_that_were_not_used_come_back_with_the_leases_of_their_directories() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let config = Config {
        leases_max: 64,
        ..Config::default()
    };
    let embedded = open(&world, config);
    embedded.start().unwrap();
    let before = used(&embedded);
    let fs = embedded.mount().unwrap();
    make(&fs, 300);
    // Leases beyond 64 are given back in the background, and with a directory's its spare numbers.
    let bound = before + 600 + 16 * 80;
    for _ in 0..1000 {
        if used(&embedded) <= bound {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(used(&embedded) <= bound, "{} of {bound}", used(&embedded));
    fs.unmount().unwrap();
    drop(fs);
    embedded.shutdown().unwrap();
}

#[test]
fn numbers_that_were_not_used_come_back_when_the_daemon_starts_again() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let embedded = open(&world, Config::default());
    let before = used(&embedded);
    let fs = embedded.mount().unwrap();
    make(&fs, 10);
    embedded.kernel().digest_all().unwrap();
    assert!(used(&embedded) > before + 20, "numbers are reserved");
    // The daemon dies with its client.
    embedded.cut_links();
    std::mem::forget(fs);
    std::mem::forget(embedded);
    let embedded = open(&world, Config::default());
    assert_eq!(used(&embedded), before + 20);
    let fs = embedded.mount().unwrap();
    assert!(fs.lookup(fs.root(), b"d9", &Cred::root()).unwrap().is_dir());
    fs.unmount().unwrap();
    drop(fs);
    embedded.shutdown().unwrap();
}
