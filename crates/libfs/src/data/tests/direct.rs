//! Reads of the SSD by the session itself: beside moves of the blocks, a seal, damage and failures of the
//! device.

use super::{Rig, contents};
use crate::errno::OpError;
use crate::inode::Inode;
use crate::seeded::{Bug, arm};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, EntryFlags, FileBlock};
use varve_ipc::{Link, ReadRun, Request, Response};
use varve_media::lock::Mutex;
use varve_media::{BlockDevice, DeviceInfo, MediaError, MediumKind, Region};

const NONE: EntryFlags = EntryFlags::empty();
type Hook = Box<dyn FnOnce() + Send>;

/// The SSD as the session sees it.
pub(crate) struct Disk {
    bytes: Arc<dyn Region>,
    /// Runs before the device delivers the bytes of the next read.
    hook: Mutex<Option<Hook>>,
    /// The next reads that fail.
    failing: AtomicU64,
    reads: AtomicU64,
}

impl Disk {
    pub(crate) fn of(bytes: Arc<dyn Region>) -> Self {
        Self {
            bytes,
            hook: Mutex::new(None),
            failing: AtomicU64::new(0),
            reads: AtomicU64::new(0),
        }
    }

    fn reads(&self) -> u64 {
        self.reads.load(Ordering::SeqCst)
    }
}

impl BlockDevice for Disk {
    fn len_bytes(&self) -> u64 {
        self.bytes.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        if let Some(hook) = self.hook.lock().take() {
            hook();
        }
        let fails = |left: u64| left.checked_sub(1);
        if self
            .failing
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, fails)
            .is_ok()
        {
            return Err(self.refusal());
        }
        self.bytes.read(off, out)
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), MediaError> {
        Err(self.refusal())
    }

    fn flush(&self) -> Result<(), MediaError> {
        Ok(())
    }

    fn trim(&self, _: u64, _: u64) -> Result<(), MediaError> {
        Err(self.refusal())
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: "disk".into(),
            kind: MediumKind::Block,
            backend: "a test".into(),
        }
    }
}

impl Disk {
    fn refusal(&self) -> MediaError {
        MediaError::Refused {
            device: self.name(),
            why: "the test says so".into(),
        }
    }
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at / 11) as u8 ^ (at / BLOCK_SIZE) as u8 | 1)
        .collect()
}

/// A file of so many blocks on SSD.
fn on_ssd(blocks: usize) -> (Rig, Arc<Disk>, Arc<Inode>, Vec<u8>) {
    let (rig, disk) = Rig::direct(8, 8);
    let (inode, data) = (Rig::inode(2), bytes(blocks * BLOCK_SIZE));
    rig.plane.write(&inode, 0, &data, NONE).unwrap();
    rig.plane.digest_all::<()>().unwrap();
    (rig, disk, inode, data)
}

/// Reads a block.
fn block(rig: &Rig, inode: &Inode, block: u64) -> Vec<u8> {
    let mut out = vec![0; BLOCK_SIZE];
    let len = rig.plane.read(inode, block * BLOCK_BYTES, &mut out).unwrap();
    assert_eq!(len, out.len());
    out
}

fn is_block(out: &[u8], data: &[u8], block: usize) -> bool {
    out == &data[block * BLOCK_SIZE..][..BLOCK_SIZE]
}

/// Places of the file's blocks, as the daemon says.
fn place(rig: &Rig, inode: &Inode, block: u64) -> u64 {
    let request = Request::MapExtents {
        key: inode.key,
        from: FileBlock(block),
        max: 1,
    };
    match rig.fake.call(request).unwrap() {
        Response::Extents(runs, _) => runs[0].block.0,
        other => panic!("{other:?}"),
    }
}

/// Another block with the same CRC-32C: the generator polynomial is added to it, bit 0 of a byte first.
fn twin(block: &[u8]) -> Vec<u8> {
    const GENERATOR: u64 = 1 << 32 | 0x1EDC_6F41;
    let mut other = block.to_vec();
    for bit in 0..33 {
        let at = 800 + bit;
        other[at / 8] ^= ((GENERATOR >> (32 - bit) & 1) as u8) << (at % 8);
    }
    assert_eq!(crc32c::crc32c(&other), crc32c::crc32c(block));
    assert!(other != block);
    other
}

#[test]
fn random_reads_of_a_file_ask_for_its_checksums_and_then_for_nothing() {
    let (rig, disk, inode, data) = on_ssd(600);
    for at in (0..600).map(|step| (step * 7 + 3) % 600) {
        assert!(
            is_block(&block(&rig, &inode, at), &data, at as usize),
            "block {at}"
        );
    }
    assert_eq!(
        (rig.fake.called("sums"), rig.fake.called("read")),
        (1, 1),
        "the first read is the daemon's"
    );
    assert_eq!(disk.reads(), 599);
    // Parts of a block, from the cache.
    let mut out = [0; 100];
    rig.plane.read(&inode, 5 * BLOCK_BYTES + 77, &mut out).unwrap();
    assert_eq!(out, data[5 * BLOCK_SIZE + 77..][..100]);
    assert_eq!(disk.reads(), 599);
    rig.plane.report();
    let told = rig.fake.reads.lock();
    assert_eq!(told.iter().map(|run| run.blocks).sum::<u32>(), 599);
    assert!(told.iter().all(|run: &ReadRun| run.key == inode.key));
}

#[test]
fn small_file_that_is_read_once_costs_one_message() {
    let (rig, disk, inode, data) = on_ssd(1);
    assert_eq!(contents(&rig.plane, &inode), data);
    assert_eq!((rig.fake.called("read"), rig.fake.called("sums")), (1, 0));
    assert_eq!(disk.reads(), 0);
}

#[test]
fn large_reads_go_past_the_cache_at_any_offset() {
    let (rig, disk, inode, data) = on_ssd(900);
    for (at, len) in [
        (0, data.len()),
        (4096, 400_000),
        (5000, 1_300_000),
        (1, data.len() - 1),
    ] {
        let mut out = vec![0; len];
        assert_eq!(rig.plane.read(&inode, at as u64, &mut out), Ok(len));
        assert!(out == data[at..at + len], "{len} bytes at {at}");
    }
    assert!(disk.reads() > 0);
    assert_eq!(rig.fake.called("sums"), 1);
    // Only the parts beside whole blocks, and what begins within a block, are the daemon's.
    assert!(rig.fake.called("read") < 12, "{}", rig.fake.called("read"));
}

#[test]
fn sequential_small_reads_read_ahead_from_the_device() {
    let (rig, disk, inode, data) = on_ssd(512);
    for at in 0..512 {
        assert!(is_block(&block(&rig, &inode, at), &data, at as usize));
    }
    assert!(disk.reads() < 20, "{} transfers", disk.reads());
    assert!(rig.fake.called("read") <= 1);
}

#[test]
fn read_ahead_grows_with_what_is_read_in_order() {
    let (rig, disk, inode, _) = on_ssd(2048);
    let transfers = |blocks: std::ops::Range<u64>| {
        let before = disk.reads();
        for at in blocks {
            block(&rig, &inode, at);
        }
        disk.reads() - before
    };
    let (begin, end) = (transfers(0..256), transfers(1024..2048));
    assert!((2..=4).contains(&begin), "{begin} for the first MiB");
    // Anew after a jump.
    assert!((4..=7).contains(&end), "{end} for the last four");
}

/// Returns what a read shows amid which its block is moved, and its old place is written anew with a block
/// that has the same checksum.
fn read_amid_a_move(bug: Option<Bug>) -> bool {
    let (rig, disk, inode, data) = on_ssd(20);
    let rig = Arc::new(rig);
    for at in [3, 1] {
        block(&rig, &inode, at);
    }
    assert_eq!(disk.reads(), 1, "by itself from here on");
    let old = place(&rig, &inode, 7);
    let amid = (rig.clone(), inode.clone(), data.clone());
    *disk.hook.lock() = Some(Box::new(move || {
        let (rig, inode, data) = amid;
        // The daemon moves the block; the session forgets the old place and says so.
        let moved = std::thread::spawn(move || {
            let same = &data[7 * BLOCK_SIZE..][..BLOCK_SIZE];
            rig.plane
                .write(&inode, 7 * BLOCK_BYTES, &bytes(BLOCK_SIZE), NONE)
                .unwrap();
            rig.plane.write(&inode, 7 * BLOCK_BYTES, same, NONE).unwrap();
            rig.plane.digest_all::<()>().unwrap();
            rig.plane.forget_extents(&inode);
            rig.fake.poison(rig.fake.freed());
            rig.fake.nvm.write(old * BLOCK_BYTES, &twin(same)).unwrap();
        });
        moved.join().unwrap();
    }));
    arm(bug);
    let out = block(&rig, &inode, 7);
    arm(None);
    assert!(disk.hook.lock().is_none(), "the device was read");
    is_block(&out, &data, 7)
}

#[test]
fn block_that_moves_while_it_is_read_is_read_again() {
    assert!(read_amid_a_move(None));
    if cfg!(debug_assertions) {
        assert!(!read_amid_a_move(Some(Bug::DeviceReadOvertaken)));
    }
}

#[test]
fn session_that_is_sealed_during_a_transfer_is_lost() {
    let (rig, disk, inode, _) = on_ssd(20);
    for at in [3, 1] {
        block(&rig, &inode, at);
    }
    let page = rig.fake.page.clone();
    *disk.hook.lock() = Some(Box::new(move || page.seal()));
    let mut out = [0; BLOCK_SIZE];
    // The fake's answers do not look at the seal: what the device delivered must not have been taken.
    let before = rig.fake.called("read");
    let _ = rig.plane.read(&inode, 7 * BLOCK_BYTES, &mut out);
    assert_eq!(rig.fake.called("read"), before + 1);
    assert_eq!(rig.plane.read(&inode, 0, &mut out), Err(OpError::lost()));
}

fn read_damage(bug: Option<Bug>) -> bool {
    let (rig, disk, inode, data) = on_ssd(20);
    for at in [3, 1] {
        block(&rig, &inode, at);
    }
    let at = place(&rig, &inode, 7) * BLOCK_BYTES + 99;
    rig.fake.nvm.write(at, &[0x77]).unwrap();
    arm(bug);
    let out = block(&rig, &inode, 7);
    arm(None);
    assert_eq!(disk.reads(), 2);
    is_block(&out, &data, 7)
}

#[test]
fn damage_is_left_to_the_daemon() {
    assert!(read_damage(None), "its answer counts, and it notes the damage");
    if cfg!(debug_assertions) {
        assert!(!read_damage(Some(Bug::DeviceReadUnverified)));
    }
}

#[test]
fn device_that_fails_is_read_by_the_daemon() {
    let (rig, disk, inode, data) = on_ssd(300);
    disk.failing.store(u64::MAX, Ordering::SeqCst);
    for at in 0..10 {
        assert!(is_block(&block(&rig, &inode, at * 29), &data, at as usize * 29));
    }
    assert!(contents(&rig.plane, &inode) == data);
    assert!(disk.reads() > 5);
    disk.failing.store(0, Ordering::SeqCst);
    let before = rig.fake.called("read");
    assert!(is_block(&block(&rig, &inode, 299), &data, 299));
    assert_eq!(rig.fake.called("read"), before, "it works again");
}

#[test]
fn threads_that_read_while_blocks_move_see_what_was_written() {
    let (rig, _, inode, mut data) = on_ssd(64);
    data[63 * BLOCK_SIZE..].fill(0);
    let moved = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let (rig, inode, data, moved) = (&rig, &inode, &data, &moved);
        let readers: Vec<_> = (0..3_u64)
            .map(|reader| {
                scope.spawn(move || {
                    // Until some have moved, however the threads are scheduled, or if none moves any more.
                    let some_moved = || moved.load(Ordering::SeqCst) > 3;
                    let is_enough = |step| step >= 2000 && some_moved() || step > 10_000_000;
                    for step in (0..).take_while(|step| !is_enough(*step)) {
                        let at = (step * 13 + reader * 21) % 63;
                        assert!(is_block(&block(rig, inode, at), data, at as usize), "block {at}");
                    }
                })
            })
            .collect();
        let mut round = 0;
        while readers.iter().any(|reader| !reader.is_finished()) {
            let at = round * 5 % 63;
            let same = &data[at * BLOCK_SIZE..][..BLOCK_SIZE];
            let (pos, other) = (at as u64 * BLOCK_BYTES, 63 * BLOCK_BYTES);
            rig.plane
                .write(inode, other, &[round as u8; BLOCK_SIZE], NONE)
                .unwrap();
            rig.plane.write(inode, pos, same, NONE).unwrap();
            rig.plane.digest_all::<()>().unwrap();
            let freed = rig.fake.freed();
            rig.plane.forget_extents(inode);
            rig.fake.poison(freed);
            round += 1;
            moved.fetch_add(1, Ordering::SeqCst);
        }
    });
}
