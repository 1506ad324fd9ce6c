//! A digest that finds no space: nothing is lost, nothing is latched, and it goes on when there is space
//! again.
#![allow(clippy::unwrap_used)]

use varve_embed::{Embedded, SimPool};
use varve_format::{Ino, InodeAttr, ROOT_INO, Tier};
use varve_ipc::Cred;
use varve_kernelfs::Config;
use varve_libfs::Posix;
use varve_media::sim::SimWorld;
use varve_store::{DataTarget, Progress, StoreError};

const POOL: SimPool = SimPool {
    medium: varve_media::sim::SimMedium::Dax,
    nvm_bytes: 24 << 20,
    journal_bytes: 1 << 20,
    ssd_bytes: 0,
    hdd_bytes: 0,
};

fn open(world: &SimWorld) -> Embedded {
    let config = Config {
        grace_ms: 0,
        ..Config::default()
    };
    POOL.open(world, config).unwrap()
}

/// Takes all space behind the sessions' backs, as a fault of the host would. Answers the hog.
fn take_all(embedded: &Embedded) -> Ino {
    let store = embedded.kernel().store();
    let mut tx = store.begin().unwrap();
    let key = tx.alloc_inodes(ROOT_INO, 1).unwrap()[0];
    tx.create(&InodeAttr::new(key, 0o100_600, 0), &[]).unwrap();
    tx.commit().unwrap();
    let target = DataTarget::only(Tier::Nvm).with_reserve();
    let mut at = 0;
    loop {
        // Metadata keeps its share; data of the log cannot have that either.
        let mut tx = store.begin().unwrap();
        tx.use_reserve();
        match tx.allocate(key.ino, at, 64 << 10, true, target) {
            Ok(Progress::Done) => at += 64 << 10,
            Ok(Progress::More) => {}
            Err(StoreError::NoSpace { .. }) => break,
            Err(error) => panic!("{error}"),
        }
        tx.commit().unwrap();
    }
    assert!(at > 4 << 20, "only {at} bytes were free");
    key.ino
}

fn give_back(embedded: &Embedded, hog: Ino) {
    let store = embedded.kernel().store();
    let mut tx = store.begin().unwrap();
    tx.edit(hog, |attr| attr.nlink = 0).unwrap();
    tx.commit().unwrap();
    loop {
        let mut tx = store.begin().unwrap();
        let progress = tx.continue_free(hog, 10_000).unwrap();
        tx.commit().unwrap();
        if progress == Progress::Done {
            break;
        }
    }
    store.checkpoint().unwrap();
}

fn write(posix: &Posix, path: &str, byte: u8) {
    let fd = posix
        .open(path.as_bytes(), libc::O_RDWR | libc::O_CREAT, 0o644)
        .unwrap();
    assert_eq!(posix.pwrite(fd, &vec![byte; 1 << 20], 0).unwrap(), 1 << 20);
    posix.close(fd).unwrap();
}

fn assert_whole(posix: &Posix, path: &str, byte: u8) {
    let fd = posix.open(path.as_bytes(), libc::O_RDONLY, 0).unwrap();
    let mut bytes = vec![0; 1 << 20];
    assert_eq!(posix.pread(fd, &mut bytes, 0).unwrap(), 1 << 20);
    assert!(bytes.iter().all(|is| *is == byte), "{path}");
    posix.close(fd).unwrap();
}

#[test]
fn digest_waits_for_space_and_goes_on_when_there_is_some() {
    let world = SimWorld::new();
    POOL.mkfs(&world).unwrap();
    let embedded = open(&world);
    let posix = Posix::new(embedded.mount().unwrap(), Cred::root());
    write(&posix, "/a", 1);
    let hog = take_all(&embedded);
    let error = embedded.kernel().digest_all().unwrap_err();
    assert!(error.is_no_space(), "{error}");
    let status = embedded.kernel().status();
    assert_eq!(status.latched, None);
    assert!(
        status.jobs.iter().any(|job| job.contains("waiting")),
        "{:?}",
        status.jobs
    );
    assert_whole(&posix, "/a", 1);
    give_back(&embedded, hog);
    embedded.kernel().digest_all().unwrap();
    assert_eq!(embedded.kernel().status().jobs, Vec::<String>::new());
    assert_whole(&posix, "/a", 1);
    posix.fs().unmount().unwrap();
    drop(posix);
    embedded.shutdown().unwrap();
    let embedded = open(&world);
    let posix = Posix::new(embedded.mount().unwrap(), Cred::root());
    assert_whole(&posix, "/a", 1);
    posix.fs().unmount().unwrap();
    assert_eq!(embedded.kernel().store().check().unwrap(), []);
}

#[test]
fn sealed_log_is_digested_when_there_is_space_again() {
    let world = SimWorld::new();
    POOL.mkfs(&world).unwrap();
    let embedded = open(&world);
    let posix = Posix::new(embedded.mount().unwrap(), Cred::root());
    write(&posix, "/a", 2);
    let hog = take_all(&embedded);
    // The session ends with a log that cannot be digested; what that tells the client is its own affair.
    let _ = posix.fs().unmount();
    drop(posix);
    for _ in 0..3 {
        embedded.tick();
    }
    assert_eq!(embedded.kernel().status().latched, None);
    give_back(&embedded, hog);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !embedded.kernel().status().sessions.is_empty() {
        assert!(std::time::Instant::now() < until, "the session never ends");
        embedded.tick();
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let posix = Posix::new(embedded.mount().unwrap(), Cred::root());
    assert_whole(&posix, "/a", 2);
    posix.fs().unmount().unwrap();
    assert_eq!(embedded.kernel().store().check().unwrap(), []);
}

#[test]
fn log_that_found_no_space_at_the_start_keeps_its_leases_until_it_is_digested() {
    let world = SimWorld::new();
    POOL.mkfs(&world).unwrap();
    let embedded = open(&world);
    let posix = Posix::new(embedded.mount().unwrap(), Cred::root());
    write(&posix, "/a", 3);
    embedded.kernel().digest_all().unwrap();
    write(&posix, "/a", 4);
    let hog = take_all(&embedded);
    // Daemon and client die.
    embedded.cut_links();
    std::mem::forget(posix);
    std::mem::forget(embedded);
    let config = Config {
        grace_ms: 0,
        lease_ms: 100,
        wait_ms: 300,
        ..Config::default()
    };
    let embedded = POOL.open(&world, config).unwrap();
    let posix = Posix::new(embedded.mount().unwrap(), Cred::root());
    let early = posix.open(b"/a", libc::O_RDWR, 0);
    assert_eq!(
        early.map_err(|errno| errno.0),
        Err(libc::ETIMEDOUT),
        "what the log holds is not there yet"
    );
    give_back(&embedded, hog);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while embedded.kernel().status().sessions.len() > 1 {
        assert!(std::time::Instant::now() < until, "the old session never ends");
        embedded.tick();
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_whole(&posix, "/a", 4);
    write(&posix, "/a", 5);
    posix.fs().unmount().unwrap();
    assert_eq!(embedded.kernel().store().check().unwrap(), []);
}
