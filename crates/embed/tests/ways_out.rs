//! Every way on which bytes of a block of NVM leave the pool, or go on to another block, looks at the block's
//! checksum first: with a bit flipped in the stopped pool each gives EIO for that block and the right bytes
//! of all others. And without that look each shows what this test is there to find.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use varve_embed::{Embedded, SimPool};
use varve_format::seeded::{Bug, arm};
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, FileBlock, Ino, ROOT_INO, Tier};
use varve_ipc::{ClientKind, Cred, Hello, IpcError, Peer};
use varve_kernelfs::{Config, Users, VerifyNvm};
use varve_libfs::{Connection, Connector, Fs, FsOptions, Posix};
use varve_media::Region;
use varve_media::sim::{SimMedium, SimWorld};
use varve_store::{OpenOptions, Store};

const POOL: SimPool = SimPool {
    medium: SimMedium::File,
    nvm_bytes: 16 << 20,
    journal_bytes: 512 << 10,
    ssd_bytes: 8 << 20,
    hdd_bytes: 0,
};
const BLOCKS: usize = 16;
/// The block of the file that is damaged.
const HURT: usize = 5;
const FILE: &[u8] = b"/file";
const USER: u32 = 4711;

fn byte(at: usize) -> u8 {
    (at / 7 % 251) as u8 + 1
}

fn body() -> Vec<u8> {
    (0..BLOCKS * BLOCK_SIZE).map(byte).collect()
}

fn config() -> Config {
    Config {
        grace_ms: 0,
        users: Users::All,
        ..Config::default()
    }
}

/// A stopped pool with a file on NVM.
fn pool() -> SimWorld {
    let world = SimWorld::new();
    POOL.mkfs(&world).unwrap();
    let embedded = POOL.open(&world, config()).unwrap();
    let posix = Posix::new(embedded.mount().unwrap(), Cred::root());
    let fd = posix.open(FILE, libc::O_CREAT | libc::O_WRONLY, 0o666).unwrap();
    assert_eq!(posix.write(fd, &body()).unwrap(), BLOCKS * BLOCK_SIZE);
    posix.close(fd).unwrap();
    posix.fs().unmount().unwrap();
    embedded.shutdown().unwrap();
    world
}

fn ino(store: &Store) -> Ino {
    store.dir_lookup(ROOT_INO, &FILE[1..]).unwrap().unwrap().key.ino
}

/// Flips a bit of the file's block, wherever it lies in NVM.
fn flip(world: &SimWorld, store: &Store) {
    let found = store.map(ino(store), FileBlock(HURT as u64), 1).unwrap();
    let extent = found.first().unwrap();
    assert_eq!(extent.tier, Tier::Nvm);
    let block = extent.block.0 + (HURT as u64 - extent.file_block.0);
    let region = world.region("nvm").unwrap();
    let at = block * BLOCK_BYTES + 1000;
    let mut byte = [0];
    region.read(at, &mut byte).unwrap();
    region.write(at, &[byte[0] ^ 4]).unwrap();
    region.fence().unwrap();
    region.sync(0, region.len_bytes()).unwrap();
}

/// A stopped pool with a damaged block.
fn hurt_pool() -> SimWorld {
    let world = pool();
    let devices = SimPool::devices(&world).unwrap();
    let (store, _) = Store::open(devices, OpenOptions::default()).unwrap();
    flip(&world, &store);
    world
}

/// Sessions that map no NVM: data comes by message.
struct ByMessage(Arc<dyn Connector>);

impl Connector for ByMessage {
    fn connect(&self, hello: Hello) -> Result<Connection, IpcError> {
        let mut connection = self.0.connect(hello)?;
        connection.nvm = None;
        Ok(connection)
    }
}

#[derive(Debug, Clone, Copy)]
enum Way {
    Mapped,
    ByMessage,
    OfOthers,
}

const WAYS: [Way; 3] = [Way::Mapped, Way::ByMessage, Way::OfOthers];

fn session(embedded: &Embedded, way: Way) -> Posix {
    let other = Peer {
        uid: USER,
        gid: USER,
        ..Peer::this_process()
    };
    let (connector, cred) = match way {
        Way::Mapped => (embedded.connector(), Cred::root()),
        Way::ByMessage => (Arc::new(ByMessage(embedded.connector())) as _, Cred::root()),
        Way::OfOthers => (
            embedded.connector_as(other),
            Cred {
                uid: USER,
                gid: USER,
                groups: Vec::new(),
            },
        ),
    };
    let options = FsOptions {
        kind: ClientKind::Linked,
        ..FsOptions::default()
    };
    Posix::new(Fs::mount(connector, options).unwrap(), cred)
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    right: usize,
    refused: usize,
    wrong: usize,
}

/// One block was refused, all others are right.
const SOUND: Seen = Seen {
    right: BLOCKS - 1,
    refused: 1,
    wrong: 0,
};

/// Reads the file by blocks, twice, and whole.
fn look(posix: &Posix, expected: &[u8]) -> Seen {
    let mut seen = by_blocks(posix, expected);
    assert_eq!(seen, by_blocks(posix, expected), "read again");
    let fd = posix.open(FILE, libc::O_RDONLY, 0).unwrap();
    let mut bytes = vec![0; expected.len()];
    if let Ok(len) = posix.pread(fd, &mut bytes, 0) {
        seen.wrong += usize::from(!expected.starts_with(&bytes[..len]));
    }
    posix.close(fd).unwrap();
    seen
}

/// Reads the file by blocks.
fn by_blocks(posix: &Posix, expected: &[u8]) -> Seen {
    let fd = posix.open(FILE, libc::O_RDONLY, 0).unwrap();
    let mut seen = Seen::default();
    for (block, expected) in expected.chunks(BLOCK_SIZE).enumerate() {
        let mut bytes = vec![0; expected.len()];
        match posix.pread(fd, &mut bytes, (block * BLOCK_SIZE) as u64) {
            Ok(_) if bytes == expected => seen.right += 1,
            Ok(_) => seen.wrong += 1,
            Err(errno) => {
                assert_eq!((errno.0, block), (libc::EIO, HURT));
                seen.refused += 1;
            }
        }
    }
    posix.close(fd).unwrap();
    seen
}

fn faults(embedded: &Embedded) -> u64 {
    embedded
        .kernel()
        .store()
        .media_stats()
        .tier(Tier::Nvm)
        .tally()
        .checksum_errors
}

#[test]
fn damaged_block_is_refused_by_every_read_and_counted() {
    for first in 0..WAYS.len() {
        // Each of them is the first once.
        let world = hurt_pool();
        let embedded = POOL.open(&world, config()).unwrap();
        for turn in 0..WAYS.len() {
            let way = WAYS[(first + turn) % WAYS.len()];
            let posix = session(&embedded, way);
            assert_eq!(look(&posix, &body()), SOUND, "{way:?}, turn {turn}");
            posix.fs().unmount().unwrap();
            assert!(faults(&embedded) > 0, "{way:?}");
        }
        let verified = Arc::clone(embedded.kernel().store().verified().unwrap());
        // All sessions and the daemon know the same.
        assert_eq!(verified.count(), BLOCKS as u64 - 1);
        embedded.shutdown().unwrap();
    }
}

#[test]
fn nothing_that_was_compared_before_the_start_is_believed() {
    let world = pool();
    for way in WAYS {
        let embedded = POOL.open(&world, config()).unwrap();
        assert_eq!(embedded.kernel().store().verified().unwrap().count(), 0);
        let posix = session(&embedded, way);
        let all = Seen {
            right: BLOCKS,
            ..Seen::default()
        };
        assert_eq!(look(&posix, &body()), all, "{way:?}");
        posix.fs().unmount().unwrap();
        assert_eq!(
            embedded.kernel().store().verified().unwrap().count(),
            BLOCKS as u64
        );
        embedded.shutdown().unwrap();
    }
    let devices = SimPool::devices(&world).unwrap();
    flip(&world, &Store::open(devices, OpenOptions::default()).unwrap().0);
    let embedded = POOL.open(&world, config()).unwrap();
    assert_eq!(look(&session(&embedded, Way::Mapped), &body()), SOUND);
}

#[test]
fn block_that_a_scrub_finds_damaged_is_refused_although_it_was_right_before() {
    let world = pool();
    let embedded = POOL.open(&world, config()).unwrap();
    let posix = session(&embedded, Way::Mapped);
    assert_eq!(look(&posix, &body()).right, BLOCKS);
    let store = embedded.kernel().store();
    flip(&world, store);
    assert_eq!(store.check_data().unwrap().len(), 1);
    assert_eq!(look(&posix, &body()), SOUND);
    assert_eq!(look(&session(&embedded, Way::ByMessage), &body()), SOUND);
}

/// Overwrites a part of the damaged block, and digests it: what the same session reads then, and what is read
/// after a restart.
fn overwrite(world: &SimWorld, offset: usize, len: usize) -> [Seen; 2] {
    let mut expected = body();
    expected[offset..offset + len].fill(0xee);
    let embedded = POOL.open(world, config()).unwrap();
    let posix = session(&embedded, Way::Mapped);
    let fd = posix.open(FILE, libc::O_RDWR, 0).unwrap();
    let written = posix
        .pwrite(fd, &expected[offset..offset + len], offset as u64)
        .unwrap();
    assert_eq!(written, len);
    let mut bytes = vec![0; len];
    assert_eq!(posix.pread(fd, &mut bytes, offset as u64).unwrap(), len);
    assert_eq!(bytes, vec![0xee; len], "what the log has needs no block");
    posix.close(fd).unwrap();
    let before = look(&posix, &expected);
    assert_eq!(before, SOUND, "not digested");
    embedded.kernel().digest_all().unwrap();
    // Once: the session hears of the digest some time later, and reads the old block until then.
    let seen = by_blocks(&posix, &expected);
    posix.fs().unmount().unwrap();
    embedded.shutdown().unwrap();
    let embedded = POOL.open(world, config()).unwrap();
    [seen, look(&session(&embedded, Way::ByMessage), &expected)]
}

#[test]
fn partial_overwrite_does_not_give_a_damaged_block_a_fresh_checksum() {
    let at = HURT * BLOCK_SIZE;
    for (offset, len) in [(at, 10), (at + 2000, 100), (at + BLOCK_SIZE - 1, 1)] {
        assert_eq!(overwrite(&hurt_pool(), offset, len), [SOUND, SOUND]);
    }
}

#[test]
fn whole_overwrite_heals_the_block() {
    let world = hurt_pool();
    let mut expected = body();
    expected[HURT * BLOCK_SIZE..][..BLOCK_SIZE].fill(9);
    let embedded = POOL.open(&world, config()).unwrap();
    let posix = session(&embedded, Way::Mapped);
    assert_eq!(look(&posix, &body()), SOUND);
    let fd = posix.open(FILE, libc::O_WRONLY, 0).unwrap();
    let at = (HURT * BLOCK_SIZE) as u64;
    assert_eq!(posix.pwrite(fd, &[9; BLOCK_SIZE], at).unwrap(), BLOCK_SIZE);
    posix.close(fd).unwrap();
    embedded.kernel().digest_all().unwrap();
    assert_eq!(look(&posix, &expected).right, BLOCKS);
}

#[test]
fn end_within_a_damaged_block_leaves_it_damaged() {
    let world = hurt_pool();
    let embedded = POOL.open(&world, config()).unwrap();
    let posix = session(&embedded, Way::Mapped);
    let end = HURT * BLOCK_SIZE + 1500;
    posix.truncate(FILE, end as u64).unwrap();
    let mut expected = body();
    expected[end..].fill(0);
    posix.truncate(FILE, expected.len() as u64).unwrap();
    posix.fs().unmount().unwrap();
    embedded.shutdown().unwrap();
    let embedded = POOL.open(&world, config()).unwrap();
    let posix = session(&embedded, Way::ByMessage);
    let fd = posix.open(FILE, libc::O_RDONLY, 0).unwrap();
    let mut bytes = vec![0; BLOCK_SIZE];
    let at = (HURT * BLOCK_SIZE) as u64;
    assert_eq!(posix.pread(fd, &mut bytes, at).unwrap_err().0, libc::EIO);
}

#[test]
fn move_to_another_tier_does_not_carry_damage_along() {
    let world = hurt_pool();
    let devices = SimPool::devices(&world).unwrap();
    let (store, _) = Store::open(devices, OpenOptions::default()).unwrap();
    let ino = ino(&store);
    let mut refused = 0;
    for extent in store.map(ino, FileBlock(0), 64).unwrap() {
        let mut tx = store.begin().unwrap();
        let from = (extent.tier, extent.block);
        let target = varve_store::DataTarget::only(Tier::Ssd);
        let moved = tx.migrate(ino, extent.file_block, extent.len, from, target);
        match moved {
            Ok(_) => drop(tx.commit().unwrap()),
            Err(error) => {
                assert!(
                    matches!(error, varve_store::StoreError::DataChecksum { .. }),
                    "{error}"
                );
                refused += 1;
            }
        }
    }
    assert_eq!(refused, 1);
    drop(store);
    let embedded = POOL.open(&world, config()).unwrap();
    assert_eq!(look(&session(&embedded, Way::Mapped), &body()), SOUND);
}

#[test]
fn first_reads_of_one_block_by_many_threads_and_sessions_are_right() {
    let world = hurt_pool();
    let embedded = POOL.open(&world, config()).unwrap();
    let sessions = WAYS.map(|way| session(&embedded, way));
    std::thread::scope(|scope| {
        for posix in sessions.iter().chain(&sessions) {
            scope.spawn(|| assert_eq!(look(posix, &body()), SOUND));
        }
    });
}

#[test]
fn reads_that_compare_nothing_show_the_damage() {
    let world = hurt_pool();
    for way in WAYS {
        let config = Config {
            verify_nvm_reads: VerifyNvm::Never,
            ..config()
        };
        let embedded = POOL.open(&world, config).unwrap();
        assert!(look(&session(&embedded, way), &body()).wrong > 0, "{way:?}");
    }
}

#[test]
fn block_that_is_believed_unread_is_caught() {
    for way in WAYS {
        let embedded = POOL.open(&hurt_pool(), config()).unwrap();
        let posix = session(&embedded, way);
        arm(Some(Bug::NvmBelieved));
        let seen = look(&posix, &body());
        arm(None);
        assert!(seen.wrong > 0, "{way:?}: {seen:?}");
    }
}

#[test]
fn merge_that_believes_what_it_keeps_is_caught() {
    arm(Some(Bug::MergeBelieved));
    let seen = overwrite(&hurt_pool(), HURT * BLOCK_SIZE + 2000, 100);
    arm(None);
    assert!(seen[1].wrong > 0, "{seen:?}");
}
