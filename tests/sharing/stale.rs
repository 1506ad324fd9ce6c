//! What the kernel still shows of a mount whose process is stopped: each case that
//! docs/reference/semantics.md admits, and that it ends there. Owns these cases; what programs that are
//! stopped do is in [`stopped`](crate::stopped).

use crate::common::{Pool, cannot_mount, wait_until};
use crate::run::TIERS;
use crate::stopped::{Stopped, bound};
use crate::sys::{PAGE, Page};
use crate::ways::{Calls, Way};
use crate::worker::block;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// A call that has not returned by then waits for the process that is stopped.
const PATIENCE: Duration = Duration::from_secs(1);
/// Reads that must all show the same when the mount has caught up.
const LOOKS: usize = 100;
/// The name of the only file.
const FILE: &str = "shown";

/// Makes a call on a thread of its own: it may wait until the mount's process goes on.
fn aside<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (done, answer) = channel();
    std::thread::spawn(move || {
        let _ = done.send(call());
    });
    answer
}

/// The first word of a page.
fn first_word(file: &File, page: usize) -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, (page * PAGE) as u64)?;
    Ok(u64::from_le_bytes(bytes))
}

/// A pool with a file of two pages that say 1.
fn pool() -> Option<Pool> {
    if cannot_mount() {
        return None;
    }
    let pool = Pool::up(&TIERS);
    std::fs::write(pool.mnt().join(FILE), block(1, 2 * PAGE)).expect("written");
    Some(pool)
}

fn path(pool: &Pool) -> PathBuf {
    pool.mnt().join(FILE)
}

fn stop_mount(pool: &Pool) -> Stopped {
    Stopped::new(&[pool.child_pid("mount").expect("a mount")])
}

/// Makes a call of a linked program that must not wait for the stopped mount for longer than its leases.
fn in_time<T>(what: &str, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let value = call();
    let took = start.elapsed();
    println!("{what} took {took:?} while the mount was stopped");
    assert!(took < bound(), "{what} took {took:?}");
    value
}

fn end(linked: Calls, mut pool: Pool) {
    linked.end();
    pool.down();
    pool.fsck_clean();
}

#[test]
fn kernel_of_a_stopped_mount_shows_pages_that_it_has_until_the_mount_runs_again() {
    let Some(pool) = pool() else { return };
    let linked = Calls::new(Way::Linked, &pool.dir());
    let file = File::open(path(&pool)).expect("it is there");
    assert_eq!(first_word(&file, 0).expect("read"), 1);
    let stopped = stop_mount(&pool);
    in_time("a write by a linked program", || {
        let open = linked.open(FILE, libc::O_RDWR).expect("it is there");
        linked
            .write(&open, Some(0), &block(2, 2 * PAGE))
            .expect("written");
        let mut seen = [0; 8];
        linked.read(&open, 0, &mut seen).expect("read");
        assert_eq!(u64::from_le_bytes(seen), 2, "its own write");
        linked.close(open).expect("closed");
    });
    let reader = file.try_clone().expect("cloned");
    let answer = aside(move || first_word(&reader, 0).expect("read"));
    let seen = answer.recv_timeout(PATIENCE);
    println!("the stopped mount's kernel shows {seen:?}");
    // Where the kernel has given the page up, it waits; but nothing else than what was there once may be
    // seen.
    assert!(matches!(seen, Ok(1) | Err(_)), "{seen:?}");
    drop(stopped);
    let continued = Instant::now();
    wait_until("a read of what was written", || {
        first_word(&file, 0).expect("read") == 2
    });
    println!("{:?} after it was continued it shows 2", continued.elapsed());
    for look in 0..LOOKS {
        assert_eq!(first_word(&file, look % 2).expect("read"), 2, "look {look}");
    }
    drop(file);
    end(linked, pool);
}

#[test]
fn names_are_not_cached_when_another_session_came_while_the_mount_was_stopped() {
    let Some(pool) = pool() else { return };
    // Alone, the kernel may keep this answer for a second.
    std::fs::metadata(path(&pool)).expect("it is there");
    let stopped = stop_mount(&pool);
    let linked = in_time("a linked program's start", || {
        Calls::new(Way::Linked, &pool.dir())
    });
    in_time("its rename", || linked.rename(FILE, "renamed").expect("renamed"));
    let old = path(&pool);
    let answer = aside(move || std::fs::metadata(old).map(drop).map_err(|error| error.kind()));
    let seen = answer.recv_timeout(PATIENCE);
    println!("the stopped mount's kernel says of the old name: {seen:?}");
    assert!(
        !matches!(seen, Ok(Ok(()))),
        "a name that is not there any more is cached"
    );
    drop(stopped);
    let seen = seen.or_else(|_| answer.recv_timeout(bound())).expect("an answer");
    assert_eq!(seen, Err(std::io::ErrorKind::NotFound));
    std::fs::metadata(pool.mnt().join("renamed")).expect("it is there");
    end(linked, pool);
}

#[test]
fn store_to_a_map_of_a_stopped_mount_is_kept_and_may_take_its_page_with_it() {
    let Some(pool) = pool() else { return };
    let linked = Calls::new(Way::Linked, &pool.dir());
    let file = File::options()
        .read(true)
        .write(true)
        .open(path(&pool))
        .expect("it is there");
    let page = Page::map(&file).expect("mapped");
    assert_eq!(page.add(), 1);
    let stopped = stop_mount(&pool);
    let open = in_time("an open of the file", || {
        linked.open(FILE, libc::O_RDWR).expect("it is there")
    });
    in_time("a write into the page that was stored to", || {
        linked
            .write(&open, Some(8), &9_u64.to_le_bytes())
            .expect("written");
    });
    in_time("a write into the next page", || {
        linked
            .write(&open, Some(PAGE as u64), &9_u64.to_le_bytes())
            .expect("written");
    });
    drop(stopped);
    page.sync().expect("synced");
    let word = |at: u64| {
        let mut bytes = [0; 8];
        linked.read(&open, at, &mut bytes).expect("read");
        u64::from_le_bytes(bytes)
    };
    let (stored, beside, next) = (word(0), word(8), word(PAGE as u64));
    println!("stored to the map: {stored}; written beside it: {beside}; into the next page: {next}");
    assert_eq!(stored, 2, "what was stored and synced");
    assert!(
        matches!(beside, 1 | 9),
        "the other's write, or the page as it was: {beside}"
    );
    assert_eq!(next, 9, "a page that nobody stored to");
    wait_until("the mount's showing the same", || {
        first_word(&file, 0).expect("read") == stored && first_word(&file, 1).expect("read") == next
    });
    linked.close(open).expect("closed");
    drop((file, page));
    end(linked, pool);
}
