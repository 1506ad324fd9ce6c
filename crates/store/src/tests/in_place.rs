//! Overwrites in place: which blocks qualify, when they are written, concurrent readers, and the feature.

use super::{NVM, Rig, SSD, assert_clean, devices_of, make, open, pattern};
use crate::check::Finding;
use crate::{
    DataTarget, OpenOptions, Payload, PayloadSource, PayloadUnavailable, Result, ShareRange, Store,
    StoreError,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use varve_format::features::LogIncompat;
use varve_format::seeded::{Bug, arm};
use varve_format::session::{GrantRow, SessionRow, SessionState};
use varve_format::{
    BLOCK_BYTES, BLOCK_SIZE, BlockNo, ExtentFlags, FileBlock, Ino, LastForwarded, LeaseNo, LogSeq, ROOT_INO,
    SessionId, Tier,
};
use varve_media::{DeviceInfo, MediaError, Region};

/// Payloads that a log holds: each is given once more after a crash.
struct Log(Vec<u8>);

impl PayloadSource for Log {
    fn fetch(&self, _: u64, skip: usize, out: &mut [u8]) -> std::result::Result<(), PayloadUnavailable> {
        out.copy_from_slice(&self.0[skip..skip + out.len()]);
        Ok(())
    }
}

fn redone(log: &Log, redone: bool) -> Payload<'_> {
    Payload::Deferred {
        source: log,
        id: 0,
        skip: 0,
        len: log.0.len(),
        redone,
    }
}

/// A pool that overwrites in place, with a file of eight blocks in NVM.
fn pool() -> (Rig, Ino) {
    let mut rig = Rig::new();
    rig.store.overwrite_in_place().unwrap();
    let ino = file(&rig.store, NVM);
    (rig, ino)
}

fn file(store: &Store, target: DataTarget) -> Ino {
    let mut tx = store.begin().unwrap();
    let ino = make(&mut tx, ROOT_INO, &format!("{target:?}"), 0o100_644)
        .unwrap()
        .ino;
    tx.write_data(ino, FileBlock(0), &pattern(8 * BLOCK_SIZE, 1), true, target)
        .unwrap();
    tx.commit().unwrap();
    ino
}

fn place(store: &Store, ino: Ino, block: u64) -> (Tier, u64) {
    let extent = store.map(ino, FileBlock(block), 1).unwrap()[0];
    (extent.tier, extent.block.0 + block - extent.file_block.0)
}

fn content(store: &Store, ino: Ino, block: u64) -> Vec<u8> {
    let mut out = vec![0; BLOCK_SIZE];
    store.read(ino, block * BLOCK_BYTES, &mut out).unwrap();
    out
}

#[test]
fn whole_blocks_that_are_redone_keep_their_places_and_change_nothing_before_the_commit() {
    let (rig, ino) = pool();
    let store = &rig.store;
    let before = (place(store, ino, 2), store.space());
    let log = Log(pattern(2 * BLOCK_SIZE, 2));
    let nvm_before = content(store, ino, 2);
    let mut tx = store.begin().unwrap();
    tx.write_pieces(ino, &[(2 * BLOCK_BYTES, redone(&log, true))], NVM)
        .unwrap();
    // The transaction sees it, the medium does not.
    let mut seen = vec![0; 2 * BLOCK_SIZE];
    tx.read(ino, 2 * BLOCK_BYTES, &mut seen).unwrap();
    assert_eq!(seen, log.0);
    let mut raw = vec![0; BLOCK_SIZE];
    store
        .devices
        .nvm
        .read(before.0.1 * BLOCK_BYTES, &mut raw)
        .unwrap();
    assert_eq!(raw, nvm_before);
    drop(tx);
    assert_eq!(content(store, ino, 2), nvm_before);
    let mut tx = store.begin().unwrap();
    tx.write_pieces(ino, &[(2 * BLOCK_BYTES, redone(&log, true))], NVM)
        .unwrap();
    tx.commit().unwrap();
    assert_eq!(content(store, ino, 2), log.0[..BLOCK_SIZE]);
    assert_eq!(content(store, ino, 3), log.0[BLOCK_SIZE..]);
    assert_eq!((place(store, ino, 2), store.space()), before);
    assert_clean(store);
    rig.reopen();
}

#[test]
fn everything_else_goes_to_new_blocks() {
    let (rig, ino) = pool();
    let store = &rig.store;
    let log = Log(pattern(BLOCK_SIZE, 2));
    let moves = |ino, at: u64, payload: Payload<'_>, target| {
        let block = at / BLOCK_BYTES;
        let before = place(store, ino, block);
        let mut tx = store.begin().unwrap();
        tx.write_pieces(ino, &[(at, payload)], target).unwrap();
        tx.commit().unwrap();
        assert_clean(store);
        place(store, ino, block) != before
    };
    assert!(!moves(ino, BLOCK_BYTES, redone(&log, true), NVM));
    assert!(moves(ino, BLOCK_BYTES, redone(&log, false), NVM), "not redone");
    assert!(moves(ino, BLOCK_BYTES, Payload::Inline(&log.0), NVM), "in no log");
    assert!(
        moves(ino, BLOCK_BYTES + 1, redone(&log, true), NVM),
        "parts of blocks"
    );
    assert!(
        moves(ino, BLOCK_BYTES, redone(&log, true), SSD),
        "placed elsewhere"
    );
    let on_ssd = file(store, SSD);
    assert!(moves(on_ssd, BLOCK_BYTES, redone(&log, true), SSD), "not in NVM");
    // Blocks that are allocated and hold nothing.
    let mut tx = store.begin().unwrap();
    tx.zero(ino, 4 * BLOCK_BYTES, BLOCK_BYTES, false, NVM).unwrap();
    tx.commit().unwrap();
    assert!(
        store.map(ino, FileBlock(4), 1).unwrap()[0]
            .flags
            .contains(ExtentFlags::UNWRITTEN)
    );
    assert!(moves(ino, 4 * BLOCK_BYTES, redone(&log, true), NVM), "unwritten");
}

#[test]
fn block_that_the_same_transaction_has_allocated_is_written_twice_in_its_place() {
    let (rig, ino) = pool();
    let store = &rig.store;
    let (log, again) = (Log(pattern(BLOCK_SIZE, 2)), Log(pattern(BLOCK_SIZE, 3)));
    let mut tx = store.begin().unwrap();
    tx.write_pieces(ino, &[(5 * BLOCK_BYTES, Payload::Inline(&log.0))], NVM)
        .unwrap();
    tx.write_pieces(ino, &[(5 * BLOCK_BYTES, redone(&again, true))], NVM)
        .unwrap();
    tx.commit().unwrap();
    assert_eq!(content(store, ino, 5), again.0);
    assert_clean(store);
    rig.reopen();
}

#[test]
fn block_that_the_same_transaction_frees_is_left_alone() {
    let (rig, ino) = pool();
    let store = &rig.store;
    let log = Log(pattern(BLOCK_SIZE, 2));
    let (_, old) = place(store, ino, 7);
    let before = content(store, ino, 7);
    let mut tx = store.begin().unwrap();
    tx.write_pieces(ino, &[(7 * BLOCK_BYTES, redone(&log, true))], NVM)
        .unwrap();
    // The edge is put together from what is queued, in a new block.
    tx.truncate(ino, 7 * BLOCK_BYTES + 100).unwrap();
    tx.commit().unwrap();
    let mut expected = log.0[..100].to_vec();
    expected.resize(BLOCK_SIZE, 0);
    let mut out = vec![0; BLOCK_SIZE];
    assert_eq!(store.read(ino, 7 * BLOCK_BYTES, &mut out).unwrap(), 100);
    assert_eq!(out[..100], expected[..100]);
    let mut raw = vec![0; BLOCK_SIZE];
    store.devices.nvm.read(old * BLOCK_BYTES, &mut raw).unwrap();
    assert_eq!(raw, before);
    assert_clean(store);
}

/// NVM that stops amid a write of a data block, once it is told to, until it may go on.
struct Halting {
    inner: Arc<dyn Region>,
    on: AtomicBool,
    halted: Mutex<Sender<()>>,
    go_on: Mutex<Receiver<()>>,
}

impl Region for Halting {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> std::result::Result<(), MediaError> {
        self.inner.read(off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> std::result::Result<(), MediaError> {
        if src.len() == BLOCK_SIZE && self.on.swap(false, Ordering::AcqRel) {
            self.inner.write(off, &src[..BLOCK_SIZE / 2])?;
            self.halted.lock().unwrap().send(()).unwrap();
            self.go_on.lock().unwrap().recv().unwrap();
        }
        self.inner.write(off, src)
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> std::result::Result<u32, MediaError> {
        self.inner.write_crc(off, src, seed)
    }

    fn fence(&self) -> std::result::Result<(), MediaError> {
        self.inner.fence()
    }

    fn sync(&self, off: u64, len: u64) -> std::result::Result<(), MediaError> {
        self.inner.sync(off, len)
    }

    fn grow(&self, new_len: u64) -> std::result::Result<(), MediaError> {
        self.inner.grow(new_len)
    }

    fn allocate(&self, off: u64, len: u64) -> std::result::Result<(), MediaError> {
        self.inner.allocate(off, len)
    }

    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
}

/// Returns the bytes that a reader gets while a block of zeros is half overwritten with ones; `bug`: in the
/// reader.
fn read_beside(bug: Option<Bug>) -> Vec<u8> {
    let Rig { world, store } = Rig::new();
    drop(store);
    let (halted, has_halted) = channel();
    let (go, go_on) = channel();
    let mut devices = devices_of(&world);
    let nvm = Arc::new(Halting {
        inner: Arc::clone(&devices.nvm),
        on: AtomicBool::new(false),
        halted: Mutex::new(halted),
        go_on: Mutex::new(go_on),
    });
    devices.nvm = Arc::clone(&nvm) as _;
    let (mut store, _) = Store::open(devices, OpenOptions::default()).unwrap();
    store.overwrite_in_place().unwrap();
    let ino = file(&store, NVM);
    let mut tx = store.begin().unwrap();
    tx.write_data(ino, FileBlock(0), &[0; BLOCK_SIZE], true, NVM)
        .unwrap();
    tx.commit().unwrap();
    let store = &store;
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || {
            let log = Log(vec![1; BLOCK_SIZE]);
            let mut tx = store.begin().unwrap();
            tx.write_pieces(ino, &[(0, redone(&log, true))], NVM).unwrap();
            nvm.on.store(true, Ordering::Release);
            tx.commit().unwrap();
        });
        has_halted.recv().unwrap();
        let (done, is_done) = channel();
        let reader = scope.spawn(move || {
            arm(bug);
            let bytes = content(store, ino, 0);
            let verified = store.verify_block(Tier::Nvm, BlockNo(place(store, ino, 0).1));
            let _ = done.send(());
            (bytes, verified)
        });
        // One that waits for the writer goes on when that does.
        let _ = is_done.recv_timeout(Duration::from_millis(100));
        go.send(()).unwrap();
        writer.join().unwrap();
        let (bytes, verified) = reader.join().unwrap();
        if bug.is_none() {
            verified.unwrap();
        }
        bytes
    })
}

#[test]
fn reader_beside_an_overwrite_gets_one_or_the_other() {
    assert_eq!(read_beside(None), [1; BLOCK_SIZE]);
    if cfg!(debug_assertions) {
        let torn = read_beside(Some(Bug::ReadBesideInPlace));
        assert!(
            torn.contains(&0) && torn.contains(&1),
            "the bug shows half a block"
        );
    }
}

#[test]
fn feature_is_there_from_before_the_first_overwrite_to_after_the_last() {
    let bit = LogIncompat::IN_PLACE.bits();
    let words = |store: &Store| {
        let state = store.snapshot().reader().state().unwrap();
        (
            Store::format_of(&store.devices).unwrap().1.log_incompat.get(),
            state.features.log_incompat.get(),
        )
    };
    let (rig, _) = pool();
    assert_eq!(words(&rig.store), (bit, bit));
    // As after a crash; an older copy of the superblock is written anew.
    let rig = rig.reopen();
    let sb = rig.store.superblock();
    let mut older = sb;
    older.log_incompat.set(0);
    older.sequence.set(sb.sequence.get() - 1);
    crate::pool::write_superblocks(&rig.store.devices, older.sealed(), &[1]).unwrap();
    assert_eq!(rig.store.check().unwrap().len(), 1);
    let mut rig = rig.reopen();
    rig.store.overwrite_in_place().unwrap();
    assert_clean(&rig.store);
    rig.store.end_in_place().unwrap();
    assert_eq!(words(&rig.store), (0, 0));
    assert_clean(&rig.store);
    let rig = rig.reopen();
    assert_eq!(words(&rig.store), (0, 0));
    rig.store.end_in_place().unwrap();
}

#[test]
fn blocks_that_a_log_redoes_are_no_damage_until_it_is_digested() {
    let (rig, ino) = pool();
    let (session, key) = (SessionId(9), rig.store.get(ino).unwrap().attr.key);
    let mut tx = rig.store.begin().unwrap();
    tx.session_put(&SessionRow {
        id: session,
        state: SessionState::Live,
        digested: LogSeq(0),
        last_forwarded: LastForwarded::default(),
        pid: 1,
        pid_start: 1,
        uid: 0,
        flags: 0,
        token: 1,
        created_ns: 1,
        log_bytes: 0,
    })
    .unwrap();
    tx.grant_put(&GrantRow {
        session,
        lease: LeaseNo(5),
        key,
        rights: 1,
        first_seq: LogSeq(1),
        last_seq: None,
        batch: 0,
    })
    .unwrap();
    tx.commit().unwrap();
    let (_, block) = place(&rig.store, ino, 3);
    rig.store
        .devices
        .nvm
        .write(block * BLOCK_BYTES, &[7; 100])
        .unwrap();
    let Rig { world, store } = rig;
    drop(store);
    let store = open(&world).unwrap();
    assert!(store.is_torn());
    assert_eq!(store.check_data().unwrap(), []);
    assert_eq!(store.check_nvm_data().unwrap(), []);
    let moved = |store: &Store| -> Result<bool> {
        let extent = store.map(ino, FileBlock(0), 1)?[0];
        let mut tx = store.begin()?;
        tx.migrate(ino, extent.file_block, extent.len, (Tier::Nvm, extent.block), SSD)
    };
    assert!(!moved(&store).unwrap());
    assert_eq!(store.torn_blocks(ino).unwrap(), [3 * BLOCK_BYTES]);
    // Torn blocks that no log redoes are damage.
    store.forget_torn();
    assert!(!store.is_torn());
    assert!(matches!(
        store.check_data().unwrap()[..],
        [Finding::Data { ino: found, .. }] if found == ino
    ));
    assert!(matches!(moved(&store), Err(StoreError::DataChecksum { .. })));
}

/// Whether a clone keeps its content when its source is overwritten.
fn clone_keeps(bug: Option<Bug>) -> bool {
    let (rig, ino) = pool();
    let store = &rig.store;
    store.share_extents().unwrap();
    let mut tx = store.begin().unwrap();
    let clone = make(&mut tx, ROOT_INO, "clone", 0o100_644).unwrap().ino;
    let range = ShareRange {
        from: ino,
        from_block: FileBlock(0),
        to: clone,
        to_block: FileBlock(0),
        blocks: 8,
        size_bytes: 8 * BLOCK_BYTES,
    };
    assert_eq!(tx.share(&range, 0).unwrap(), 8);
    tx.commit().unwrap();
    let (log, before) = (Log(pattern(BLOCK_SIZE, 2)), content(store, clone, 3));
    arm(bug);
    let mut tx = store.begin().unwrap();
    tx.write_pieces(ino, &[(3 * BLOCK_BYTES, redone(&log, true))], NVM)
        .unwrap();
    tx.commit().unwrap();
    arm(None);
    assert_eq!(content(store, ino, 3), log.0);
    content(store, clone, 3) == before
}

#[test]
fn shared_blocks_are_not_overwritten() {
    assert!(clone_keeps(None));
    assert!(!clone_keeps(Some(Bug::SharedInPlace)));
}
