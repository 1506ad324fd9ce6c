//! `fallocate` of more than a session may be promised is the daemon's: what fits the pool is allocated, and
//! nothing of what does not.
#![allow(clippy::unwrap_used)]

use varve_embed::SimPool;
use varve_format::FallocateMode;
use varve_ipc::Cred;
use varve_kernelfs::Config;
use varve_libfs::{Errno, OpenFlags};
use varve_media::sim::{SimMedium, SimWorld};

const POOL: SimPool = SimPool {
    medium: SimMedium::Dax,
    nvm_bytes: 32 << 20,
    journal_bytes: 1 << 20,
    ssd_bytes: 64 << 20,
    hdd_bytes: 0,
};
const BLOCK: u64 = 4096;
/// Most blocks that a session may be promised: 2 MiB.
const PROMISED: u64 = 512;
const LARGE: u64 = 40 << 20;

#[test]
fn allocation_beyond_a_sessions_reservation_takes_what_the_pool_has_alone_and_in_shared_mode() {
    let world = SimWorld::new();
    POOL.mkfs(&world).unwrap();
    let config = Config {
        credits_max_blocks: PROMISED,
        grace_ms: 0,
        ..Config::default()
    };
    let embedded = POOL.open(&world, config).unwrap();
    let (one, other) = (embedded.mount().unwrap(), embedded.mount().unwrap());
    let me = Cred::root();
    let flags = OpenFlags {
        read: true,
        write: true,
        ..OpenFlags::default()
    };
    let key = one
        .create(one.root(), b"f", libc::S_IFREG | 0o644, 0, &me)
        .unwrap()
        .key;
    assert_eq!(other.lookup(other.root(), b"f", &me).unwrap().key, key);
    let (mine, theirs) = (
        one.open(key, flags, &me).unwrap(),
        other.open(key, flags, &me).unwrap(),
    );
    mine.write_at(9 * BLOCK, b"written", &me).unwrap();
    let free = || {
        embedded.kernel().digest_all().unwrap();
        embedded.kernel().store().checkpoint().unwrap();
        embedded
            .kernel()
            .store()
            .space()
            .tiers
            .iter()
            .map(|tier| tier.free)
            .sum::<u64>()
    };
    let before = free();
    theirs
        .fallocate(FallocateMode::AllocateKeepSize, 0, LARGE, &me)
        .unwrap();
    assert_eq!(mine.getattr().unwrap().size_bytes, 9 * BLOCK + 7);
    mine.fallocate(FallocateMode::Allocate, 0, LARGE, &me).unwrap();
    assert_eq!(theirs.getattr().unwrap().size_bytes, LARGE);
    let mut read = [0; 7];
    theirs.read_at(9 * BLOCK, &mut read).unwrap();
    assert_eq!(&read, b"written");
    let taken = before - free();
    assert!(
        (LARGE / BLOCK - 1..LARGE / BLOCK + 64).contains(&taken),
        "{taken}"
    );

    // More than there is, past what the file has: nothing changes.
    let refused = mine.fallocate(FallocateMode::Allocate, LARGE, 2 * LARGE, &me);
    assert_eq!(refused, Err(Errno(libc::ENOSPC)));
    assert_eq!(before - free(), taken);
    assert_eq!(mine.getattr().unwrap().size_bytes, LARGE);
    // Zeros where blocks are need none.
    theirs.fallocate(FallocateMode::ZeroRange, 0, LARGE, &me).unwrap();
    mine.read_at(9 * BLOCK, &mut read).unwrap();
    assert_eq!(read, [0; 7]);
    assert_eq!(before - free(), taken);

    // What was promised for it is nobody's any more.
    let status = embedded.kernel().status();
    let promised: u64 = status.sessions.iter().map(|session| session.credits).sum();
    assert_eq!((status.digest.refused, status.reserved_blocks), (0, promised));
    let findings = embedded.kernel().store().check().unwrap();
    assert!(findings.is_empty(), "{findings:?}");
    drop((mine, theirs));
    one.unmount().unwrap();
    other.unmount().unwrap();
    drop((one, other));
    embedded.shutdown().unwrap();
}
