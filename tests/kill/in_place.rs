//! Whole blocks that a linked program writes again and again, which the digest overwrites in place
//! (`docs/adr/0033-overwrites-in-place-by-redo.md`), while its daemon, or everything, is killed.

use crate::common::{Pool, cannot_mount, wait_until};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use varve_libfs::{Cred, Fs, FsOptions, OpenFile, OpenFlags, SocketConnector};
use varve_testkit::workload::Rng;

/// In memory: there a write is durable as soon as it is ordered.
const TIERS: [&str; 6] = ["--nvm", "shm:48M", "--ssd", "0", "--hdd", "0"];
/// Tells a test process that it is the one that writes: the pool's socket, and where it keeps its ledger.
const ENV: &str = "VARVE_KILL_OVERWRITER";
const BLOCK: usize = 4096;
const BLOCKS: u64 = 1024;
const NAME: &[u8] = b"blocks";
/// Blocks that a round writes at least.
const WRITES_LEAST: u64 = 4000;

/// A block that says which one and which version it is, all over.
fn image(block: u64, version: u64) -> Vec<u8> {
    [block.to_le_bytes(), version.to_le_bytes()]
        .concat()
        .repeat(BLOCK / 16)
}

/// Of each block the version that was begun last, and the last that had returned. Outside of the pool, in a
/// file that outlives who writes it.
struct Ledger(File);

impl Ledger {
    fn open(path: &Path) -> Self {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        Self(file.expect("a ledger"))
    }

    fn note(&self, block: u64, returned: bool, version: u64) {
        let at = block * 16 + 8 * u64::from(returned);
        self.0
            .write_all_at(&version.to_le_bytes(), at)
            .expect("the ledger takes it");
    }

    /// Begun, returned.
    fn read(&self, block: u64) -> (u64, u64) {
        let word = |at| {
            let mut bytes = [0; 8];
            let _ = self.0.read_at(&mut bytes, at);
            u64::from_le_bytes(bytes)
        };
        (word(block * 16), word(block * 16 + 8))
    }

    fn returned(&self) -> u64 {
        (0..BLOCKS).map(|block| self.read(block).1).sum()
    }
}

fn mount(socket: &Path) -> Fs {
    let connector = SocketConnector {
        path: socket.to_owned(),
    };
    Fs::mount(Arc::new(connector), FsOptions::default()).expect("a session")
}

fn open(fs: &Fs) -> OpenFile {
    let cred = Cred::root();
    let attr = match fs.lookup(fs.root(), NAME, &cred) {
        Ok(attr) => attr,
        Err(_) => fs.create(fs.root(), NAME, 0o100_644, 0, &cred).expect("a file"),
    };
    fs.open(attr.key, OpenFlags::READ_WRITE, &cred).expect("it opens")
}

/// Writes until it is killed, with two threads that have every other block each.
fn overwrite(socket: &Path, ledger: &Path) {
    let (fs, ledger) = (mount(socket), Ledger::open(ledger));
    let file = open(&fs);
    let write = |block: u64| {
        let version = ledger.read(block).0 + 1;
        ledger.note(block, false, version);
        file.write_at(block * BLOCK as u64, &image(block, version), &Cred::root())
            .expect("a write");
        ledger.note(block, true, version);
    };
    if ledger.returned() == 0 {
        (0..BLOCKS).for_each(write);
    }
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let write = &write;
            scope.spawn(move || {
                let mut rng = Rng::new(u64::from(std::process::id()) * 2 + thread);
                loop {
                    write(rng.below(BLOCKS / 2) * 2 + thread);
                }
            });
        }
    });
}

/// The writing process; does nothing in an ordinary run of the tests.
#[test]
fn overwriter() {
    let Ok(words) = std::env::var(ENV) else { return };
    let (socket, ledger) = words.split_once('\n').expect("a socket and a ledger");
    overwrite(Path::new(socket), Path::new(ledger));
}

struct Writer(Child);

impl Writer {
    fn start(pool: &Pool, ledger: &Path) -> Self {
        let words = format!("{}\n{}", pool.dir().join("sock").display(), ledger.display());
        let child = Command::new(std::env::current_exe().expect("the test program"))
            .args([
                "in_place::overwriter",
                "--exact",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(ENV, words)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        Self(child.expect("a writer starts"))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Each block is whole, no older than what had returned, and no newer than what was begun.
fn judge(pool: &Pool, ledger: &Ledger) {
    let fs = mount(&pool.dir().join("sock"));
    let file = open(&fs);
    let mut bytes = vec![0; BLOCK];
    for block in 0..BLOCKS {
        file.read_at(block * BLOCK as u64, &mut bytes).expect("a read");
        let version = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        assert!(
            bytes == image(block, version),
            "block {block} is torn, or another's"
        );
        let (begun, returned) = ledger.read(block);
        assert!(
            (returned..=begun).contains(&version),
            "block {block} has version {version}; {returned} had returned, {begun} was begun"
        );
    }
    drop(file);
    fs.unmount().expect("it ends");
}

#[test]
fn blocks_overwritten_in_place_are_whole_and_newest_when_the_daemon_or_everything_is_killed() {
    if cannot_mount() {
        return;
    }
    let rounds = super::number("VARVE_KILL_ROUNDS", 8);
    let mut rng = Rng::new(super::number("VARVE_SEED", 1));
    let mut pool = Pool::up(&TIERS);
    let path: PathBuf = pool.outside().join("ledger");
    let ledger = Ledger::open(&path);
    for round in 0..rounds {
        let before = ledger.returned();
        let writer = Writer::start(&pool, &path);
        let written = || ledger.returned() - before;
        wait_until("writes", || written() >= WRITES_LEAST);
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        match round % 3 {
            // The program goes on with the next daemon.
            0 => {
                pool.replace_daemon();
                let by_then = written();
                wait_until("writes after it", || written() >= by_then + WRITES_LEAST);
            }
            1 => {
                pool.replace_daemon();
                std::thread::sleep(Duration::from_millis(rng.below(100)));
                pool.replace_daemon();
            }
            _ => {
                pool.kill_all();
                drop(writer);
                pool.start();
                judge(&pool, &ledger);
                println!("round {round}: everything, {} writes", written());
                continue;
            }
        }
        drop(writer);
        judge(&pool, &ledger);
        println!("round {round}: the daemon, {} writes", written());
    }
    pool.down();
    pool.fsck_clean();
}
