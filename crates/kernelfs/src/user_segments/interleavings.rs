//! The ring of segments under a scheduler that tries interleavings: two sessions of one user map, read and
//! forget windows of two files while blocks are replaced. Blocks that a session maps stay unchanged until it
//! has forgotten them, and new answers are not older than the forgotten ones. Run by `cargo test -p
//! varve-kernelfs --features shuttle --lib interleavings`.
#![allow(clippy::unwrap_used)]

use super::{Found, SegmentFile, Segments, UserSegments, bits};
use shuttle::thread;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use varve_format::seeded::{Bug, is_found};
use varve_format::{BLOCK_BYTES, InodeKey, TxId};
use varve_ipc::WINDOW_BLOCKS;
use varve_ipc::sync::{Mutex, lock};
use varve_media::MediaError;

const FILES: usize = 2;
const CLIENTS: usize = 2;
/// Number of replacements of blocks.
const CHANGES: u64 = 3;

const fn file(index: usize) -> InodeKey {
    InodeKey::new(index as u64 + 1, 1)
}

/// First word of a block: its file, and its transaction.
type Content = (u8, u8);

/// Content of the segments' file by place; a store of a block takes a while.
#[derive(Default)]
struct Bytes(Mutex<BTreeMap<u64, Content>>);

/// A block during a store.
const TORN: Content = (u8::MAX, u8::MAX);

struct Shared(Arc<Bytes>);

impl SegmentFile for Shared {
    fn write(&self, off: u64, bytes: &[u8]) -> Result<(), MediaError> {
        let place = off / BLOCK_BYTES;
        lock(&self.0.0).insert(place, TORN);
        lock(&self.0.0).insert(place, (bytes[0], bytes[1]));
        Ok(())
    }

    fn share(&self) -> Result<OwnedFd, MediaError> {
        Ok(std::fs::File::open("/dev/null").unwrap().into())
    }
}

/// A session's map of a file: the place of its window, and the content that it read there first.
#[derive(Clone, Copy, Default)]
struct Mapped {
    /// Grows with each barrier: the answer to an earlier request is not kept.
    version: u64,
    place: Option<(u64, Content)>,
    /// The transaction up to which it forgot.
    forgotten: u8,
}

#[derive(Default)]
struct SessionTable {
    newest: u8,
    /// The transaction before a change whose barriers are not known yet.
    change: Option<u8>,
    /// For each file, the transaction that last replaced its blocks.
    content: [u8; FILES],
    mapped: [[bool; CLIENTS]; FILES],
    /// Transactions with unacknowledged barriers, once for each reason.
    barriers: Vec<u8>,
}

impl SessionTable {
    /// Sends the barrier to the sessions that map the file.
    fn tell(&mut self, of: usize, tx: u8) -> Told {
        self.barriers.push(tx);
        let clients = (0..CLIENTS).filter(|client| self.mapped[of][*client]).collect();
        Told { tx, of, clients }
    }

    /// As `SessionTable::reader_horizon`.
    fn horizon(&self) -> TxId {
        let oldest = self.barriers.iter().map(|tx| tx - 1).chain(self.change).min();
        TxId(oldest.map_or(u64::MAX, u64::from))
    }
}

struct Stage {
    /// Blocks that each window takes.
    len: u64,
    all: Segments,
    user: Arc<UserSegments>,
    bytes: Arc<Bytes>,
    sessions: Mutex<SessionTable>,
    clients: [[Mutex<Mapped>; FILES]; CLIENTS],
}

/// Makes a stage with room for `windows` windows.
fn stage(windows: u64) -> Arc<Stage> {
    let bytes = Arc::new(Bytes::default());
    let shared = Shared(Arc::clone(&bytes));
    let all = Segments::default();
    let user = all
        .of(7, WINDOW_BLOCKS * BLOCK_BYTES, || Ok(Some(Box::new(shared))))
        .unwrap();
    Arc::new(Stage {
        len: WINDOW_BLOCKS / windows,
        user: user.unwrap(),
        all,
        bytes,
        sessions: Mutex::new(SessionTable {
            newest: 1,
            ..SessionTable::default()
        }),
        clients: Default::default(),
    })
}

/// A barrier: the daemon makes these sessions forget the file up to `tx`.
struct Told {
    tx: u8,
    of: usize,
    clients: Vec<usize>,
}

impl Stage {
    /// As `Reads::map_extents`: the session is noted as mapping before anything is looked up.
    fn map(&self, client: usize, of: usize) -> Option<u64> {
        lock(&self.sessions).mapped[of][client] = true;
        {
            let sessions = lock(&self.sessions);
            self.user.release(sessions.horizon());
        }
        match self.user.find(file(of), 0, bits(0, 1), self.len, 0) {
            Found::At(at) => Some(at),
            Found::Fill(fill) => {
                let content = lock(&self.sessions).content[of];
                let mut block = vec![0; BLOCK_BYTES as usize];
                (block[0], block[1]) = (of as u8, content);
                fill.write(0, &block).unwrap();
                fill.publish()
            }
            Found::Full(old) => {
                self.forget(&old);
                None
            }
        }
    }

    /// As `Windows::forget_windows`: to make room.
    fn forget(&self, old: &[(u64, InodeKey)]) {
        let announced: Vec<_> = {
            let mut sessions = lock(&self.sessions);
            let tx = sessions.newest;
            let files = (0..FILES).filter(|of| old.iter().any(|(_, key)| *key == file(*of)));
            let announced = files.map(|of| sessions.tell(of, tx)).collect();
            self.user.forget(old, TxId(u64::from(tx)));
            announced
        };
        announced
            .into_iter()
            .for_each(|announced| self.obey(&announced, false));
    }

    /// The sessions forget the file, and acknowledge.
    fn obey(&self, announced: &Told, replaced: bool) {
        for client in &announced.clients {
            let mut mapped = lock(&self.clients[*client][announced.of]);
            mapped.version += 1;
            mapped.place = None;
            if replaced {
                mapped.forgotten = announced.tx;
            }
        }
        let mut sessions = lock(&self.sessions);
        let at = sessions.barriers.iter().position(|tx| *tx == announced.tx);
        sessions.barriers.remove(at.unwrap());
    }

    /// A session asks for a window and reads it, as long as it has not forgotten it.
    fn look(&self, client: usize, of: usize) {
        let (known, asked) = {
            let mapped = lock(&self.clients[client][of]);
            (mapped.place.is_some(), mapped.version)
        };
        if !known {
            let answer = self.map(client, of);
            let mut mapped = lock(&self.clients[client][of]);
            if mapped.version == asked
                && let Some(at) = answer
            {
                let content = lock(&self.bytes.0)[&at];
                assert_eq!(usize::from(content.0), of, "foreign or torn bytes were told");
                assert!(
                    content.1 >= mapped.forgotten,
                    "what transaction {} left is told after {} replaced it",
                    content.1,
                    mapped.forgotten
                );
                mapped.place = Some((at, content));
            }
        }
        thread::yield_now();
        let mapped = lock(&self.clients[client][of]);
        if let Some((at, content)) = mapped.place {
            assert_eq!(lock(&self.bytes.0)[&at], content, "what was told was overwritten");
        }
    }

    /// The daemon replaces a file's blocks, and makes the sessions that map it forget them.
    fn replace(&self, of: usize) {
        {
            let mut sessions = lock(&self.sessions);
            sessions.change = Some(sessions.newest);
        }
        let tx = {
            let mut sessions = lock(&self.sessions);
            sessions.newest += 1;
            sessions.content[of] = sessions.newest;
            sessions.newest
        };
        // Under the lock under which the mapping sessions are told.
        let told = {
            let mut sessions = lock(&self.sessions);
            self.all.replaced(&|key| key == file(of), TxId(u64::from(tx)));
            sessions.change = None;
            sessions.tell(of, tx)
        };
        self.obey(&told, true);
    }
}

fn told_stays_until_it_is_forgotten(windows: u64) {
    let stage = stage(windows);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let stage = Arc::clone(&stage);
            thread::spawn(move || {
                for step in 0..3 {
                    stage.look(client, (client + step) % FILES);
                }
            })
        })
        .collect();
    for change in 0..CHANGES {
        stage.replace(change as usize % FILES);
    }
    for client in clients {
        client.join().unwrap();
    }
}

fn with_room_for_one() {
    told_stays_until_it_is_forgotten(1);
}

fn with_room_for_two() {
    told_stays_until_it_is_forgotten(2);
}

#[test]
fn window_that_was_told_stays_until_all_have_forgotten_it() {
    for work in [with_room_for_one, with_room_for_two] {
        shuttle::check_random(work, 6_000);
        shuttle::check_pct(work, 4_000, 3);
    }
}

#[test]
fn window_that_is_told_although_it_was_replaced_is_caught() {
    assert!(is_found(
        Bug::SegmentStale,
        &[with_room_for_one, with_room_for_two]
    ));
}

#[test]
fn place_that_is_used_again_early_is_caught() {
    assert!(is_found(
        Bug::SegmentReusedEarly,
        &[with_room_for_one, with_room_for_two]
    ));
}
