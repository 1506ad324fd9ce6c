//! Two mounts that write and read one file: nobody sees a block that is torn, foreign, or older than what had
//! returned before.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use varve_embed::{Embedded, SimPool};
use varve_ipc::{Cred, SystemClock};
use varve_kernelfs::Config;
use varve_libfs::{Fs, OpenFile, OpenFlags};
use varve_media::sim::SimWorld;

const BLOCKS: u64 = 8;
const STEPS: u64 = 150;
const BLOCK: usize = 4096;

fn image(block: u64, version: u64) -> Vec<u8> {
    let words = [block.to_le_bytes(), version.to_le_bytes()].concat();
    words.repeat(BLOCK / words.len())
}

fn open(fs: &Fs) -> OpenFile {
    let attr = fs.lookup(fs.root(), b"shared", &Cred::root()).unwrap();
    let flags = OpenFlags::READ_WRITE;
    fs.open(attr.key, flags, &Cred::root()).unwrap()
}

/// Reads all over the file until `done`; how often.
fn watch(file: &OpenFile, returned: &[AtomicU64], done: &AtomicBool) -> u64 {
    let (mut reads, mut out) = (0, vec![0; BLOCK]);
    loop {
        // At least once, however late this thread comes.
        let last = done.load(Ordering::SeqCst);
        for block in 0..BLOCKS {
            let least = returned[block as usize].load(Ordering::SeqCst);
            assert_eq!(file.read_at(block * BLOCK as u64, &mut out), Ok(BLOCK));
            let version = u64::from_le_bytes(out[8..16].try_into().unwrap());
            assert!(
                out == image(block, version),
                "block {block} holds foreign or torn bytes"
            );
            assert!(
                version >= least,
                "block {block} is at {version}, and {least} had returned"
            );
            reads += 1;
        }
        if last {
            return reads;
        }
    }
}

#[test]
fn mounts_that_share_a_file_read_whole_blocks_that_are_never_too_old() {
    let world = SimWorld::new();
    let pool = SimPool::default();
    pool.mkfs(&world).unwrap();
    let (parts, _) = pool
        .parts(&world, Config::default(), Arc::new(SystemClock))
        .unwrap();
    let embedded = Embedded::open(parts).unwrap();
    embedded.start().unwrap();
    let mounts = [embedded.mount().unwrap(), embedded.mount().unwrap()];
    let root = mounts[0].root();
    mounts[0]
        .create(root, b"shared", libc::S_IFREG | 0o644, 0, &Cred::root())
        .unwrap();
    let files = [open(&mounts[0]), open(&mounts[1])];
    for block in 0..BLOCKS {
        files[0]
            .write_at(block * BLOCK as u64, &image(block, 0), &Cred::root())
            .unwrap();
    }
    let returned: Vec<_> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (returned, done) = (&returned, &done);
        let readers: Vec<_> = files
            .iter()
            .map(|file| scope.spawn(move || watch(file, returned, done)))
            .collect();
        let writers: Vec<_> = files
            .iter()
            .zip(0..)
            .map(|(file, mount)| {
                scope.spawn(move || {
                    for step in 1..=STEPS {
                        // Each mount has its own blocks, so that versions only grow.
                        let block = (step % (BLOCKS / 2)) * 2 + mount;
                        let body = image(block, step);
                        file.write_at(block * BLOCK as u64, &body, &Cred::root()).unwrap();
                        returned[block as usize].store(step, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        done.store(true, Ordering::SeqCst);
        assert!(ended.iter().all(Result::is_ok));
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
    });
}
