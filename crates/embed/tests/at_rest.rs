//! Bits that flip in the files of a stopped pool never come out as data, with the settings that a new pool
//! has.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use varve_embed::PoolHere;
use varve_ipc::Cred;
use varve_kernelfs::pool::PoolSpec;
use varve_libfs::Posix;

const POOLS: u64 = 12;
const FLIPS: u64 = 20;
const FILES: u64 = 24;

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

fn content(pool: u64, file: u64) -> Vec<u8> {
    let mut rng = Rng(pool << 32 | file);
    let len = 1 + rng.below(300 << 10);
    (0..len).map(|_| rng.next() as u8).collect()
}

fn fs_of(pool: &PoolHere) -> Posix {
    Posix::new(pool.mount().unwrap(), Cred::root())
}

/// A stopped pool with files on all tiers.
fn make(dir: &Path, pool: u64) {
    let spec = PoolSpec::parse(Some("6M"), Some("4M"), Some("8M")).unwrap();
    let here = PoolHere::open_or_create(dir, &spec).unwrap();
    let posix = fs_of(&here);
    for file in 0..FILES {
        let path = format!("/{file}");
        let fd = posix
            .open(path.as_bytes(), libc::O_CREAT | libc::O_WRONLY, 0o644)
            .unwrap();
        let bytes = content(pool, file);
        assert_eq!(posix.write(fd, &bytes).unwrap(), bytes.len());
        posix.fsync(fd).unwrap();
        posix.close(fd).unwrap();
    }
    posix.fs().unmount().unwrap();
    here.stop().unwrap();
}

/// Flips a bit of a byte that is in use, in one of the pool's files.
fn flip(dir: &Path, rng: &mut Rng) {
    let image = ["nvm.img", "nvm.img", "ssd.img", "hdd.img"][rng.below(4) as usize];
    let file = File::options()
        .read(true)
        .write(true)
        .open(dir.join(image))
        .unwrap();
    let len = file.metadata().unwrap().len();
    let mut byte = [0];
    for _ in 0..10_000 {
        let at = rng.below(len);
        file.read_exact_at(&mut byte, at).unwrap();
        if byte[0] != 0 {
            byte[0] ^= 1 << rng.below(8);
            file.write_all_at(&byte, at).unwrap();
            return;
        }
    }
}

#[derive(Debug, Default)]
struct Seen {
    right: u64,
    refused: u64,
    pools_refused: u64,
}

fn look(dir: &Path, pool: u64, seen: &mut Seen) {
    let Ok(here) = PoolHere::open(dir) else {
        seen.pools_refused += 1;
        return;
    };
    let posix = fs_of(&here);
    for file in 0..FILES {
        let expected = content(pool, file);
        let mut bytes = vec![0; expected.len() + 1];
        let path = format!("/{file}");
        let read = posix.open(path.as_bytes(), libc::O_RDONLY, 0).and_then(|fd| {
            let read = posix.read(fd, &mut bytes);
            posix.close(fd).unwrap();
            read
        });
        match read {
            Ok(len) => {
                // Wherever a read ends early, what came before is right.
                assert!(
                    expected.starts_with(&bytes[..len]),
                    "pool {pool}: wrong bytes in {path}"
                );
                if len == expected.len() {
                    seen.right += 1;
                } else {
                    seen.refused += 1;
                }
            }
            Err(errno) => {
                assert_eq!(errno.0, libc::EIO, "pool {pool}: {path}");
                seen.refused += 1;
            }
        }
    }
    let _ = posix.fs().unmount();
    let _ = here.stop();
}

#[test]
fn flipped_bits_of_a_stopped_pool_never_come_out_as_data() {
    let mut seen = Seen::default();
    for pool in 0..POOLS {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("pool");
        make(&dir, pool);
        let mut rng = Rng(1000 + pool);
        for _ in 0..FLIPS {
            flip(&dir, &mut rng);
        }
        look(&dir, pool, &mut seen);
    }
    println!("{POOLS} pools, {FLIPS} flips each: {seen:?}");
    // Flips were met, and most of what is there is whole.
    assert!(seen.refused > 20 && seen.right > 60, "{seen:?}");
}
