//! A pool served by this program itself: no daemon, no mount, and yet every call is durable against its
//! death.
//!
//! `cargo run --example embedded -- /tmp/pool` makes a small pool there, or goes on with the one that is
//! there.

use std::path::Path;
use varve_embed::PoolHere;
use varve_ipc::Cred;
use varve_kernelfs::pool::PoolSpec;
use varve_libfs::{Errno, Posix};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = std::env::args_os().nth(1).ok_or("usage: embedded DIR")?;
    run(Path::new(&dir))
}

/// Counts its own runs in a file of the pool, and keeps a line for each.
pub fn run(dir: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let spec = PoolSpec::parse(Some("16M"), Some("0"), Some("0"))?;
    let here = PoolHere::open_or_create(dir, &spec)?;
    // POSIX calls with paths and descriptors; `here.mount()?` alone is the same by inode.
    let posix = Posix::new(here.mount()?, Cred::root());

    let count = match posix.open(b"/count", libc::O_RDWR, 0) {
        Ok(fd) => fd,
        Err(Errno(libc::ENOENT)) => posix.open(b"/count", libc::O_RDWR | libc::O_CREAT, 0o644)?,
        Err(errno) => return Err(errno.into()),
    };
    let mut text = [0; 20];
    let len = posix.pread(count, &mut text, 0)?;
    let runs: u64 = std::str::from_utf8(&text[..len])?.trim().parse().unwrap_or(0) + 1;

    // The number and its line, both or neither, wherever this is cut off.
    let mut both = posix.transaction();
    both.write(&posix, count, Some(0), format!("{runs}\n").as_bytes())?;
    let line = both.create(&posix, format!("/run-{runs}").as_bytes(), 0o644)?;
    both.write(
        &posix,
        line,
        Some(0),
        format!("run {runs}, process {}\n", std::process::id()).as_bytes(),
    )?;
    both.commit()?;
    // Against power loss too.
    posix.fsync(count)?;
    println!("run {runs} of {}", dir.display());

    posix.close(count)?;
    posix.fs().unmount()?;
    here.stop()?;
    Ok(())
}
