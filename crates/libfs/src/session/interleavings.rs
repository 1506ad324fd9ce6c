//! The epochs of a session under a scheduler that tries interleavings: sessions are sealed while calls are
//! under way, the mount goes on with the next, and a call of an old session returns late. Each call counts
//! exactly once, in any one of the sessions. Run by `cargo test -p varve-libfs --features shuttle --lib
//! interleavings`.
#![allow(clippy::unwrap_used)]

use super::Mount;
use crate::errno::OpResult;
use crate::log::Stamp;
use crate::options::{Connection, Connector, FsOptions};
use crate::seeded::{self, Bug};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use varve_format::log::{CHUNK_BYTES, HEADER_SIZE, crc_seed, entry_crc, entry_size, payload_crc};
use varve_format::{
    EntryFlags, EntryHeader, InodeAttr, InodeKey, LastForwarded, LogOp, LogSeq, Seal, SeqRange, SessionId,
    TxId,
};
use varve_ipc::{
    Cred, ForwardedResult, Hello, IpcError, Link, PageState, Request, Response, SessionPage, Upcall, Welcome,
};
use varve_media::Region;
use varve_media::sim::{SimMedium, SimWorld};
use zerocopy::FromBytes;

const CHUNKS: u64 = 8;
const FILE: InodeKey = InodeKey::new(5, 1);

/// A page whose word the scheduler sees.
#[derive(Default)]
struct EpochPage(AtomicU64);

impl SessionPage for EpochPage {
    fn state(&self) -> PageState {
        match self.0.load(Ordering::SeqCst) {
            0 => PageState::Live,
            _ => PageState::Sealed,
        }
    }

    fn digested(&self) -> LogSeq {
        LogSeq(0)
    }

    fn committed_tx(&self) -> TxId {
        TxId(0)
    }

    fn watched(&self) -> u64 {
        0
    }
}

/// The daemon's side of a session.
struct Epoch {
    id: SessionId,
    page: Arc<EpochPage>,
    log: Arc<dyn Region>,
    seal: Mutex<Option<Seal>>,
    last_forwarded: AtomicU64,
}

impl Epoch {
    /// Contents of each number of the log, if its entry is whole.
    fn scan(&self) -> BTreeMap<u64, u64> {
        let mut found = BTreeMap::new();
        for chunk in 0..CHUNKS {
            let mut at = chunk * CHUNK_BYTES + if chunk == 0 { 64 } else { 0 };
            loop {
                let mut bytes = [0; HEADER_SIZE];
                self.log.read(at, &mut bytes).unwrap();
                let header = EntryHeader::read_from_bytes(&bytes).unwrap();
                let (seq, len) = (header.seq.get(), header.payload_len.get() as usize);
                if seq == 0 || len != 8 {
                    break;
                }
                let mut payload = [0; 8];
                self.log.read(at + HEADER_SIZE as u64, &mut payload).unwrap();
                if entry_crc(payload_crc(crc_seed(self.id), &payload), &header) != header.crc32c.get() {
                    break;
                }
                found.insert(seq, u64::from_le_bytes(payload));
                at += entry_size(len) as u64;
            }
        }
        found
    }
}

/// The daemon: its sessions, and the operations that have counted.
#[derive(Default)]
struct Pool {
    epochs: Mutex<Vec<Arc<Epoch>>>,
    counted: Mutex<Vec<u64>>,
}

impl Pool {
    fn newest(&self) -> Arc<Epoch> {
        self.epochs.lock().last().cloned().unwrap()
    }

    /// Ends a session at one place: page, scan, seal, digest.
    fn seal(&self, epoch: &Epoch) -> Seal {
        let mut seal = epoch.seal.lock();
        if let Some(seal) = &*seal {
            return seal.clone();
        }
        epoch.page.0.store(1, Ordering::SeqCst);
        let scan = epoch.scan();
        let last = scan.keys().last().copied().unwrap_or(0);
        let missing = (1..last).filter(|seq| !scan.contains_key(seq)).map(LogSeq);
        let found = Seal {
            last: LogSeq(last),
            missing: missing
                .map(|seq| SeqRange {
                    first: seq,
                    last: seq,
                })
                .collect(),
        };
        self.counted.lock().extend(scan.values());
        *seal = Some(found.clone());
        found
    }
}

struct Wire {
    pool: Arc<Pool>,
    epoch: Arc<Epoch>,
}

impl Link for Wire {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        match request {
            Request::Forward(op) => {
                {
                    // Nothing is done for a session that is over, and every operation is done before its
                    // seal.
                    let seal = self.epoch.seal.lock();
                    if seal.is_some() {
                        return Err(IpcError::Sealed);
                    }
                    let id = u64::from_le_bytes(op.entry[HEADER_SIZE..HEADER_SIZE + 8].try_into().unwrap());
                    self.pool.counted.lock().push(id);
                    self.epoch.last_forwarded.store(op.number, Ordering::SeqCst);
                }
                // The answer is on its way; a session that ends meanwhile does not get it.
                thread::yield_now();
                match self.epoch.page.state() {
                    PageState::Live => Ok(Response::Forwarded(ForwardedResult::default())),
                    PageState::Sealed => Err(IpcError::Sealed),
                }
            }
            Request::Reserve { blocks, .. } => Ok(Response::Reserved(blocks)),
            // No space is asked for: the record of the session, which ends with it.
            Request::GrowLog { len_bytes: 0 } => match *self.epoch.seal.lock() {
                None => Ok(Response::LogBytes(0)),
                Some(_) => Err(IpcError::Sealed),
            },
            Request::Bye => Ok(Response::Done),
            other => panic!("{other:?}"),
        }
    }

    fn upcall(&self, _: Duration) -> Result<Option<Upcall>, IpcError> {
        Ok(None)
    }
}

struct Door(Arc<Pool>);

impl Connector for Door {
    fn connect(&self, hello: Hello) -> Result<Connection, IpcError> {
        let old = hello
            .resume
            .map(|token| self.0.epochs.lock()[token as usize - 1].clone());
        let seal = old.as_ref().map(|old| self.0.seal(old));
        let bytes = CHUNKS * CHUNK_BYTES;
        let mut epochs = self.0.epochs.lock();
        let id = SessionId(epochs.len() as u64 + 1);
        let epoch = Arc::new(Epoch {
            id,
            page: Arc::default(),
            log: SimWorld::new().add_region("log", SimMedium::Dax, bytes, bytes),
            seal: Mutex::new(None),
            last_forwarded: AtomicU64::new(0),
        });
        epochs.push(Arc::clone(&epoch));
        drop(epochs);
        let welcome = Welcome {
            session: id,
            token: u128::from(id.0),
            pool_uuid: [0; 16],
            root: InodeAttr::new(InodeKey::ROOT, 0o040_755, 0),
            privileged: true,
            acts_for: None,
            read_only: false,
            latched: None,
            shared: false,
            log_bytes: bytes,
            log_max_bytes: bytes,
            nvm_bytes: 0,
            nvm_sums: None,
            nvm_sums_once: false,
            nvm_emulated: false,
            dax: varve_ipc::DaxMaps::default(),
            lease_ms: 1_000,
            wait_ms: 1_000,
            digest_percent: 90,
            read_ahead_bytes: 0,
            sync_ms: 0,
            needs_sync: false,
            seal,
            last_forwarded: LastForwarded {
                number: old.map_or(0, |old| old.last_forwarded.load(Ordering::SeqCst)),
                ..LastForwarded::default()
            },
            leases_max: 64,
            name_hash: None,
            copies_at: None,
        };
        Ok(Connection {
            link: Arc::new(Wire {
                pool: Arc::clone(&self.0),
                epoch: Arc::clone(&epoch),
            }),
            welcome,
            page: Arc::clone(&epoch.page) as _,
            log: Some(Arc::clone(&epoch.log)),
            nvm: None,
            ssd: None,
            verified: None,
        })
    }
}

/// Logs one operation that says `id`.
fn log(mount: &Mount, id: u64) {
    let data = id.to_le_bytes();
    let op = LogOp::Write {
        key: FILE,
        offset: 0,
        data: &data,
    };
    mount
        .with_session(|session, _| -> OpResult<(), ()> {
            let slot = session.data.begin(entry_size(data.len()), 0)?;
            let committed = slot.append(&op, EntryFlags::empty(), Stamp::default())?;
            committed.check(())
        })
        .unwrap();
}

/// Has the daemon do one operation.
fn forward(mount: &Mount, id: u64) {
    let data = id.to_le_bytes();
    let op = LogOp::Write {
        key: FILE,
        offset: 0,
        data: &data,
    };
    let cred = Cred::root();
    mount
        .with_session(|session, attempt| -> OpResult<(), ()> {
            let asks = super::Asks::NOTHING;
            session
                .forward(attempt, &[], &op, EntryFlags::empty(), asks, &cred)
                .map(drop)
        })
        .unwrap();
}

/// Threads log and have operations done, while the daemon seals one session after the other.
fn each_call_counts_once() {
    let pool = Arc::new(Pool::default());
    let door = Arc::new(Door(Arc::clone(&pool)));
    let mount = Arc::new(Mount::new(door, FsOptions::default()).unwrap());
    let loggers: Vec<_> = (0..2)
        .map(|logger| {
            let mount = Arc::clone(&mount);
            thread::spawn(move || (0..2).for_each(|step| log(&mount, 10 * (logger + 1) + step)))
        })
        .collect();
    let asker = {
        let mount = Arc::clone(&mount);
        thread::spawn(move || (0..2).for_each(|step| forward(&mount, 100 + step)))
    };
    for _ in 0..2 {
        pool.seal(&pool.newest());
        thread::yield_now();
    }
    for thread in loggers.into_iter().chain([asker]) {
        thread.join().unwrap();
    }
    // Operations acknowledged in the live session are in its log.
    pool.seal(&pool.newest());
    let mut counted = pool.counted.lock().clone();
    counted.sort_unstable();
    assert_eq!(counted, [10, 11, 20, 21, 100, 101]);
}

#[test]
fn call_that_returns_late_from_a_sealed_session_counts_once() {
    shuttle::check_random(each_call_counts_once, 4_000);
    shuttle::check_pct(each_call_counts_once, 2_000, 3);
}

#[test]
fn late_call_that_is_judged_by_another_sessions_seal_is_caught() {
    assert!(seeded::is_found(Bug::LateCallOfAnother, &[each_call_counts_once]));
}
