//! Bits that flip in the files of a stopped pool never come out as data, with the settings that a new pool
//! has: not by messages, not out of mapped NVM, and not by a partial overwrite, which would give them a
//! checksum.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use varve_embed::PoolHere;
use varve_ipc::{Cred, Hello, IpcError};
use varve_kernelfs::pool::PoolSpec;
use varve_libfs::{Connection, Connector, Fs, FsOptions, Posix};

const POOLS: u64 = 12;
const FLIPS: u64 = 20;
const FILES: u64 = 24;
const BLOCK: usize = 4096;

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

/// Sessions that map no NVM: data comes by message.
struct ByMessage(Arc<dyn Connector>);

impl Connector for ByMessage {
    fn connect(&self, hello: Hello) -> Result<Connection, IpcError> {
        let mut connection = self.0.connect(hello)?;
        connection.nvm = None;
        Ok(connection)
    }
}

#[derive(Debug, Default)]
struct Seen {
    /// Blocks.
    right: u64,
    refused: u64,
    wrong: u64,
    /// Files that could not be opened.
    unopened: u64,
    pools_refused: u64,
}

/// What the files should hold.
type Files = Vec<Vec<u8>>;

/// Opens it, unless it is refused: what else may be said is EIO.
fn open(posix: &Posix, file: usize, flags: i32) -> Option<i32> {
    let opened = posix.open(format!("/{file}").as_bytes(), flags, 0);
    opened
        .map_err(|errno| assert_eq!(errno.0, libc::EIO, "/{file}"))
        .ok()
}

/// Reads all files: each at once, then by blocks.
fn read_all(posix: &Posix, files: &Files, seen: &mut Seen) {
    for (file, expected) in files.iter().enumerate() {
        let Some(fd) = open(posix, file, libc::O_RDONLY) else {
            seen.unopened += 1;
            continue;
        };
        let mut bytes = vec![0; expected.len() + 1];
        match posix.read(fd, &mut bytes) {
            // Wherever a read ends early, what came before is right.
            Ok(len) => seen.wrong += u64::from(!expected.starts_with(&bytes[..len])),
            Err(errno) => assert_eq!(errno.0, libc::EIO, "/{file}"),
        }
        for (block, expected) in expected.chunks(BLOCK).enumerate() {
            let bytes = &mut bytes[..expected.len()];
            match posix.pread(fd, bytes, (block * BLOCK) as u64) {
                Ok(len) if bytes[..len] == *expected => seen.right += 1,
                Ok(_) => seen.wrong += 1,
                Err(errno) => {
                    assert_eq!(errno.0, libc::EIO, "/{file}");
                    seen.refused += 1;
                }
            }
        }
        posix.close(fd).unwrap();
    }
}

/// Overwrites a few bytes within some blocks of each file.
fn overwrite(posix: &Posix, files: &mut Files, rng: &mut Rng) {
    for (file, expected) in files.iter_mut().enumerate() {
        let Some(fd) = open(posix, file, libc::O_WRONLY) else {
            continue;
        };
        for _ in 0..3 {
            let at = rng.below(expected.len() as u64) as usize;
            let end = expected.len().min((at / BLOCK + 1) * BLOCK);
            let len = end.min(at + 1 + rng.below(900) as usize) - at;
            let bytes = vec![rng.next() as u8; len];
            match posix.pwrite(fd, &bytes, at as u64) {
                Ok(written) => expected[at..at + written].copy_from_slice(&bytes[..written]),
                Err(errno) => assert_eq!(errno.0, libc::EIO, "/{file}"),
            }
        }
        let _ = posix.fsync(fd);
        posix.close(fd).unwrap();
    }
}

/// Serves the pool for `work`, whose session maps NVM or not; counts if the pool is refused.
fn serve(dir: &Path, mapped: bool, seen: &mut Seen, work: impl FnOnce(&Posix, &mut Seen)) {
    let Ok(here) = PoolHere::open(dir) else {
        seen.pools_refused += 1;
        return;
    };
    let connector = if mapped {
        here.connector()
    } else {
        Arc::new(ByMessage(here.connector()))
    };
    if let Ok(fs) = Fs::mount(connector, FsOptions::default()) {
        let posix = Posix::new(fs, Cred::root());
        work(&posix, seen);
        let _ = posix.fs().unmount();
    } else {
        seen.pools_refused += 1;
    }
    let _ = here.stop();
}

fn damaged(dir: &Path, pool: u64) -> Files {
    make(dir, pool);
    let mut rng = Rng(1000 + pool);
    for _ in 0..FLIPS {
        flip(dir, &mut rng);
    }
    (0..FILES).map(|file| content(pool, file)).collect()
}

#[test]
fn flipped_bits_of_a_stopped_pool_never_come_out_as_data() {
    let [mut by_message, mut mapped, mut changed, mut after] = [(); 4].map(|()| Seen::default());
    for pool in 0..POOLS {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("pool");
        let mut files = damaged(&dir, pool);
        serve(&dir, false, &mut by_message, |posix, seen| {
            read_all(posix, &files, seen)
        });
        serve(&dir, true, &mut mapped, |posix, seen| {
            read_all(posix, &files, seen)
        });
        let mut rng = Rng(2000 + pool);
        serve(&dir, true, &mut changed, |posix, seen| {
            overwrite(posix, &mut files, &mut rng);
            read_all(posix, &files, seen);
        });
        serve(&dir, true, &mut after, |posix, seen| {
            read_all(posix, &files, seen)
        });
    }
    println!("{POOLS} pools, {FLIPS} flips each, blocks read");
    for (what, seen) in [
        ("by message", &by_message),
        ("mapped", &mapped),
        ("after partial overwrites", &changed),
        ("when those are digested, by the next daemon", &after),
    ] {
        println!("{what}: {seen:?}");
        assert_eq!(seen.wrong, 0, "{what}: {seen:?}");
        // Flips were met, and most of what is there is whole.
        assert!(seen.refused > 20 && seen.right > 2000, "{what}: {seen:?}");
    }
}

#[test]
fn flipped_bits_come_out_where_nothing_is_compared() {
    let mut seen = Seen::default();
    for pool in 0..2 {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("pool");
        let files = damaged(&dir, pool);
        let toml = dir.join(varve_kernelfs::pool::TOML);
        let text = std::fs::read_to_string(&toml).unwrap();
        std::fs::write(&toml, format!("{text}\nverify_nvm_reads = false\n")).unwrap();
        serve(&dir, true, &mut seen, |posix, seen| read_all(posix, &files, seen));
    }
    println!("verify_nvm_reads = false: {seen:?}");
    assert!(seen.wrong > 0, "{seen:?}");
}
