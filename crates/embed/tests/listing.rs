//! Listing directories of which a mount knows all names: without a digest, and as the pool lists them.
#![allow(clippy::unwrap_used)]

use varve_embed::{Embedded, SimPool};
use varve_format::InodeKey;
use varve_ipc::{Cred, DirEntry};
use varve_kernelfs::Config;
use varve_libfs::{Fs, RenameFlags};
use varve_media::sim::{SimMedium, SimWorld};

const POOL: SimPool = SimPool {
    medium: SimMedium::Dax,
    nvm_bytes: 64 << 20,
    journal_bytes: 2 << 20,
    ssd_bytes: 0,
    hdd_bytes: 0,
};

fn open(world: &SimWorld) -> Embedded {
    POOL.mkfs(world).unwrap();
    POOL.open(world, Config::default()).unwrap()
}

fn make(fs: &Fs, dir: InodeKey, name: &str, mode: u32) -> InodeKey {
    fs.create(dir, name.as_bytes(), mode, 0, &Cred::root())
        .unwrap()
        .key
}

/// All entries, by pages of `max`.
fn list(fs: &Fs, dir: InodeKey, max: usize) -> Vec<DirEntry> {
    let mut all: Vec<DirEntry> = Vec::new();
    loop {
        let page = fs
            .readdir(dir, all.last().map_or(0, |entry| entry.next_cookie), max)
            .unwrap();
        if page.is_empty() {
            return all;
        }
        assert!(page.len() <= max);
        all.extend(page);
    }
}

fn digested(embedded: &Embedded) -> u64 {
    embedded.kernel().status().digest.batches
}

/// Files come, go and are renamed between the pages that one mount lists; another mount, which makes the
/// first give its leases back, sees the same entries with the same cookies in the same order.
#[test]
fn directory_is_listed_without_a_digest_and_as_the_pool_lists_it() {
    let world = SimWorld::new();
    let embedded = open(&world);
    let me = Cred::root();
    let fs = embedded.mount().unwrap();
    let made = make(&fs, fs.root(), "made here", 0o040_755);
    for file in 0..100 {
        make(&fs, made, &format!("{file}"), 0o100_644);
    }
    for file in (0..100).step_by(3) {
        fs.unlink(made, format!("{file}").as_bytes(), &me).unwrap();
    }
    fs.rename(made, b"1", made, b"renamed", RenameFlags::default(), &me)
        .unwrap();
    fs.rename(made, b"2", made, b"4", RenameFlags::default(), &me)
        .unwrap();
    let before = digested(&embedded);
    let known = list(&fs, made, 7);
    assert_eq!(known.len(), 100 - 34 - 1);
    assert_eq!(digested(&embedded), before, "nothing had to be digested");
    let other = embedded.mount().unwrap();
    assert_eq!(other.lookup(other.root(), b"made here", &me).unwrap().key, made);
    assert_eq!(list(&other, made, 7), known);
    // Goes on where a page of the other's ended.
    let half = known[30].next_cookie;
    assert_eq!(fs.readdir(made, half, 1000).unwrap(), known[31..]);
    other.unmount().unwrap();
    fs.unmount().unwrap();
    embedded.shutdown().unwrap();
}

/// A directory that others made is read once, and known then; what is made in it afterwards is listed too, by
/// the cookies that it will have.
#[test]
fn directory_that_was_read_is_known() {
    let world = SimWorld::new();
    let embedded = open(&world);
    let me = Cred::root();
    let dir = {
        let fs = embedded.mount().unwrap();
        let dir = make(&fs, fs.root(), "d", 0o040_755);
        for file in 0..50 {
            make(&fs, dir, &format!("old {file}"), 0o100_644);
        }
        fs.unmount().unwrap();
        dir
    };
    let fs = embedded.mount().unwrap();
    assert_eq!(list(&fs, dir, 20).len(), 50);
    for file in 0..50 {
        make(&fs, dir, &format!("new {file}"), 0o100_644);
    }
    for file in (0..50).step_by(2) {
        fs.unlink(dir, format!("old {file}").as_bytes(), &me).unwrap();
    }
    let before = digested(&embedded);
    let known = list(&fs, dir, 20);
    assert_eq!(known.len(), 75);
    assert_eq!(digested(&embedded), before, "nothing had to be digested");
    fs.unmount().unwrap();
    let other = embedded.mount().unwrap();
    assert_eq!(other.lookup(other.root(), b"d", &me).unwrap().key, dir);
    assert_eq!(list(&other, dir, 1000), known);
    other.unmount().unwrap();
    embedded.shutdown().unwrap();
}
