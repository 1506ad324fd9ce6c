//! Reservations under a scheduler that tries interleavings: threads that write, and a daemon that reclaims
//! unused blocks. Run by `cargo test -p varve-libfs --features shuttle --lib interleavings`.
#![allow(clippy::unwrap_used)]

use crate::data::DataPlane;
use crate::data::interleavings::welcome;
use crate::errno::{Errno, OpError};
use crate::inode::Inode;
use crate::log::interleavings::DrivenPage;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use std::sync::Arc;
use std::time::Duration;
use varve_format::log::CHUNK_BYTES;
use varve_format::{EntryFlags, InodeAttr, InodeKey, LogSeq};
use varve_ipc::{IpcError, Link, ManualClock, Request, Response, Upcall};
use varve_media::sim::{SimMedium, SimWorld};

/// Most blocks that one write costs, and the blocks that the daemon grants at once.
const COST: u64 = 4;
const GRANT: u64 = 10;
const WRITES: u64 = 3;

/// The daemon's blocks, and the blocks that it has granted.
struct Book {
    free: u64,
    granted: u64,
    given_back: u64,
}

struct Daemon {
    book: Mutex<Book>,
    /// Writes that were begun, and those that are in the log.
    begun: AtomicU64,
    logged: AtomicU64,
}

impl Link for Daemon {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        let mut book = self.book.lock();
        match request {
            Request::Reserve { least, .. } => {
                let amount = book.free.min(GRANT);
                if amount < u64::from(least) {
                    return Err(IpcError::Errno(libc::ENOSPC));
                }
                book.free -= amount;
                book.granted += amount;
                drop(book);
                // The answer is under way.
                thread::yield_now();
                Ok(Response::Reserved(amount as u32))
            }
            Request::ReturnReservation { blocks, of } => {
                assert!(of <= book.granted);
                book.free += blocks;
                book.given_back += blocks;
                let has = book.granted - book.given_back;
                let logged = COST * self.logged.load(Ordering::SeqCst);
                assert!(has >= logged, "{logged} blocks are logged, and {has} paid for");
                let begun = COST * self.begun.load(Ordering::SeqCst);
                assert!(
                    of < book.granted || has <= begun,
                    "it says that it knows of all, and keeps {has} for {begun}"
                );
                Ok(Response::Done)
            }
            Request::Digest { .. } => Ok(Response::Digested(LogSeq(0))),
            other => panic!("{other:?}"),
        }
    }

    fn upcall(&self, _: Duration) -> Result<Option<Upcall>, IpcError> {
        Ok(None)
    }
}

/// Two threads write, each in its own lane; unused blocks go back now and then. `free` blocks are there at
/// first.
fn reserved_blocks_are_in_one_place(free: u64) {
    let world = SimWorld::new();
    let log = world.add_region("log", SimMedium::Dax, 8 * CHUNK_BYTES, 8 * CHUNK_BYTES);
    let daemon = Arc::new(Daemon {
        book: Mutex::new(Book {
            free,
            granted: 0,
            given_back: 0,
        }),
        begun: AtomicU64::new(0),
        logged: AtomicU64::new(0),
    });
    let data = Arc::new(DataPlane::new(
        &welcome(&*log, &*log),
        Arc::clone(&daemon) as _,
        Arc::new(DrivenPage::default()),
        Some(log),
        None,
        None,
        Arc::new(ManualClock::new(1_000)),
    ));
    let writers = [1, 2].map(|number| {
        let (daemon, data) = (Arc::clone(&daemon), Arc::clone(&data));
        let attr = InodeAttr::new(InodeKey::new(number + 4, 1), 0o100_644, 0);
        let inode = Arc::new(Inode::new(attr));
        thread::spawn(move || {
            for at in 0..WRITES {
                daemon.begun.fetch_add(1, Ordering::SeqCst);
                match data.write(&inode, at * 4096, &[1; 8], EntryFlags::empty()) {
                    Ok(_) => daemon.logged.fetch_add(1, Ordering::SeqCst),
                    // Its blocks may have gone back to its lane after the lane was looked at: they stay
                    // counted.
                    Err(OpError::Failed(Errno(libc::ENOSPC))) => 0,
                    Err(error) => panic!("{error:?}"),
                };
            }
        })
    });
    for _ in 0..2 {
        data.return_reservation();
        thread::yield_now();
    }
    for writer in writers {
        writer.join().unwrap();
    }
    data.return_reservation();
    let book = daemon.book.lock();
    let logged = daemon.logged.load(Ordering::SeqCst);
    assert_eq!(book.granted - book.given_back, COST * logged);
    assert_eq!(
        book.free + COST * logged,
        free,
        "nothing is made, and nothing is lost"
    );
    assert_eq!(data.reserved_left(), 0);
}

#[test]
fn credits_that_go_back_are_in_no_lane_no_call_and_no_log() {
    let plenty = || reserved_blocks_are_in_one_place(1000);
    shuttle::check_random(plenty, 3_000);
    shuttle::check_pct(plenty, 2_000, 3);
    // Some writes find none.
    let few = || reserved_blocks_are_in_one_place(4 * COST);
    shuttle::check_random(few, 3_000);
    shuttle::check_pct(few, 2_000, 3);
}
