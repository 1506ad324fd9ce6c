//! Bits that flip in the files of a stopped pool never come out as data, with the settings that a new pool
//! has: not by messages, not out of mapped NVM, and not by a partial overwrite, which would give them a
//! checksum.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use varve_embed::PoolHere;
use varve_format::{Block, verify_block};
use varve_ipc::{Cred, Hello, IpcError};
use varve_kernelfs::pool::PoolSpec;
use varve_libfs::{Connection, Connector, Fs, FsOptions, Posix};

const POOLS: u64 = 12;
const FLIPS: usize = 20;
const FILES: u64 = 40;
const BLOCK: usize = 4096;
/// Where tables and bitmaps of so small a pool have ended.
const FIXED_BYTES: u64 = 64 * BLOCK as u64;

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

/// Long enough that the directory has blocks of its own.
fn path(file: u64) -> String {
    format!("/d/{file:0>200}")
}

fn fs_of(pool: &PoolHere) -> Posix {
    Posix::new(pool.mount().unwrap(), Cred::root())
}

/// A stopped pool with files on all tiers.
fn make(dir: &Path, pool: u64) {
    let spec = PoolSpec::parse(Some("6M"), Some("4M"), Some("8M")).unwrap();
    let here = PoolHere::open_or_create(dir, &spec).unwrap();
    let posix = fs_of(&here);
    posix.mkdir(b"/d", 0o755).unwrap();
    for file in 0..FILES {
        let fd = posix
            .open(path(file).as_bytes(), libc::O_CREAT | libc::O_WRONLY, 0o644)
            .unwrap();
        let bytes = content(pool, file);
        assert_eq!(posix.write(fd, &bytes).unwrap(), bytes.len());
        posix.fsync(fd).unwrap();
        posix.close(fd).unwrap();
    }
    posix.fs().unmount().unwrap();
    here.stop().unwrap();
}

/// Where a bit is flipped.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// Any byte in use of the tiers.
    Used,
    /// Any byte in use of a block of metadata in NVM that has no fixed place: trees, directories. With a
    /// flip in a bitmap or a table no pool is opened.
    Metadata,
    /// Any byte of the journal, which is empty, or of the superblock and its copy.
    Beside,
}

/// Flips a bit in one of the pool's files.
fn flip(dir: &Path, place: Place, rng: &mut Rng) {
    // What is whole and of that kind runs out.
    let _ = (0..8).any(|_| flipped(dir, place, rng));
}

/// Flips one if such a place is found soon: a tier may be empty.
fn flipped(dir: &Path, place: Place, rng: &mut Rng) -> bool {
    let image = match place {
        Place::Used => ["nvm.img", "nvm.img", "ssd.img", "hdd.img"][rng.below(4) as usize],
        Place::Metadata => "nvm.img",
        Place::Beside => ["journal.img", "nvm.img"][rng.below(2) as usize],
    };
    let file = File::options()
        .read(true)
        .write(true)
        .open(dir.join(image))
        .unwrap();
    let len = file.metadata().unwrap().len();
    let mut block: Box<Block> = Box::new([0; BLOCK]);
    for _ in 0..5_000 {
        let at = rng.below(len);
        let (first, within) = (at / BLOCK as u64 * BLOCK as u64, at as usize % BLOCK);
        file.read_exact_at(&mut block[..], first).unwrap();
        let is_it = match place {
            Place::Used => block[within] != 0,
            Place::Metadata => first >= FIXED_BYTES && block[within] != 0 && verify_block(&block).is_ok(),
            Place::Beside => image == "journal.img" || first < 2 * BLOCK as u64,
        };
        if is_it {
            file.write_all_at(&[block[within] ^ 1 << rng.below(8)], at)
                .unwrap();
            return true;
        }
    }
    false
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
    let opened = posix.open(path(file as u64).as_bytes(), flags, 0);
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
    let here = match PoolHere::open(dir) {
        Ok(here) => here,
        Err(error) => {
            println!("refused: {error}");
            seen.pools_refused += 1;
            return;
        }
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

/// A stopped pool with flipped bits, in these places by turns.
fn damaged(dir: &Path, pool: u64, places: &[Place]) -> Files {
    make(dir, pool);
    let mut rng = Rng(1000 + pool);
    for place in places.iter().cycle().take(FLIPS) {
        flip(dir, *place, &mut rng);
    }
    (0..FILES).map(|file| content(pool, file)).collect()
}

/// Sets what the daemon does.
fn set(dir: &Path, line: &str) {
    let toml = dir.join(varve_kernelfs::pool::TOML);
    let text = std::fs::read_to_string(&toml).unwrap();
    std::fs::write(&toml, format!("{text}\n{line}\n")).unwrap();
}

/// What reads show of pools with bits flipped at these places: by message, mapped, after partial overwrites,
/// and when those are digested and the next daemon serves.
fn look(places: &[Place]) -> [Seen; 4] {
    let mut all = [(); 4].map(|()| Seen::default());
    let [by_message, mapped, changed, after] = &mut all;
    for pool in 0..POOLS {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("pool");
        let mut files = damaged(&dir, pool, places);
        // What is not to be had is not waited for long.
        set(&dir, "lease_ms = 200\nwait_ms = 500");
        serve(&dir, false, by_message, |posix, seen| {
            read_all(posix, &files, seen)
        });
        serve(&dir, true, mapped, |posix, seen| read_all(posix, &files, seen));
        let mut rng = Rng(2000 + pool);
        serve(&dir, true, changed, |posix, seen| {
            overwrite(posix, &mut files, &mut rng);
            read_all(posix, &files, seen);
        });
        serve(&dir, true, after, |posix, seen| read_all(posix, &files, seen));
    }
    println!("{POOLS} pools, {FLIPS} flips each, {places:?}, blocks read");
    for (what, seen) in [
        "by message",
        "mapped",
        "after partial overwrites",
        "after their digest",
    ]
    .iter()
    .zip(&all)
    {
        println!("{what}: {seen:?}");
        assert_eq!(seen.wrong, 0, "{what}: {seen:?}");
    }
    all
}

#[test]
fn flipped_bits_of_a_stopped_pool_never_come_out_as_data() {
    for seen in look(&[Place::Used]) {
        // Flips were met, and most of what is there is whole.
        assert!(seen.refused > 20 && seen.right > 2000, "{seen:?}");
    }
}

#[test]
fn flipped_bits_of_metadata_and_data_never_come_out_as_data() {
    for seen in look(&[Place::Used, Place::Metadata, Place::Used, Place::Beside]) {
        assert!(seen.refused + seen.unopened > 20, "{seen:?}");
    }
}

#[test]
fn flipped_bits_come_out_where_nothing_is_compared() {
    let mut seen = Seen::default();
    for pool in 0..2 {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("pool");
        let files = damaged(&dir, pool, &[Place::Used]);
        set(&dir, "verify_nvm_reads = false");
        serve(&dir, true, &mut seen, |posix, seen| read_all(posix, &files, seen));
    }
    println!("verify_nvm_reads = false: {seen:?}");
    assert!(seen.wrong > 0, "{seen:?}");
}
