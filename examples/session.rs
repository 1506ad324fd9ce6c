//! A session of a running daemon: the pool's files from within this program, beside its mount and other
//! programs.
//!
//! `varve up ./pool` in one terminal, `cargo run --example session -- ./pool` in another.

use std::path::Path;
use std::sync::Arc;
use varve_ipc::Cred;
use varve_libfs::{Errno, Fs, FsOptions, OpenFlags, SocketConnector};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = std::env::args_os().nth(1).ok_or("usage: session POOL")?;
    run(Path::new(&pool))
}

/// Writes, reads and replaces files by inode.
pub fn run(pool: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let connector = SocketConnector {
        path: pool.join("sock"),
    };
    let fs = Fs::mount(Arc::new(connector), FsOptions::default())?;
    let me = Cred::root();
    let dir = match fs.create(fs.root(), b"example", libc::S_IFDIR | 0o755, 0, &me) {
        Err(Errno(libc::EEXIST)) => fs.lookup(fs.root(), b"example", &me)?,
        other => other?,
    };
    let both = OpenFlags::READ_WRITE;

    // A file, by single calls.
    let attr = match fs.create(dir.key, b"journal", libc::S_IFREG | 0o644, 0, &me) {
        Err(Errno(libc::EEXIST)) => fs.lookup(dir.key, b"journal", &me)?,
        other => other?,
    };
    let journal = fs.open(attr.key, both, &me)?;
    let (offset, len) = journal.append(b"an entry\n", &me)?;
    let mut back = vec![0; len];
    journal.read_at(offset, &mut back)?;
    assert_eq!(back, b"an entry\n");

    // Three files at once: `config` is replaced, `config.old` keeps what it was, `journal` says so. All of
    // it, or nothing.
    let mut change = fs.transaction(&me);
    let new = change.create(dir.key, b"config.new", 0o644)?;
    change.write_at(
        new,
        0,
        format!("entries end at {}\n", offset + len as u64).as_bytes(),
    )?;
    if fs.lookup(dir.key, b"config", &me).is_ok() {
        change.rename(dir.key, b"config", dir.key, b"config.old")?;
    }
    change.rename(dir.key, b"config.new", dir.key, b"config")?;
    change.append(&journal, b"configuration changed\n")?;
    let made = change.commit()?;
    println!("config is inode {} now", made[0].key.ino);

    journal.fsync(false)?;
    drop(journal);
    let counters = fs.counters();
    println!(
        "{} operations logged, {} lease requests",
        counters.logged, counters.acquires
    );
    fs.unmount()?;
    Ok(())
}
