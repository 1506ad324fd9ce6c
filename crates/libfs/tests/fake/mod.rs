//! A daemon for tests, in plain maps: sessions with logs and seals, leases, digest by parsing entries,
//! mediation. It has faults on demand: sealing a session, and answering that an inode is contended.
#![allow(clippy::unwrap_used, dead_code, clippy::missing_panics_doc)]

mod apply;

use apply::Tree;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use varve_format::log::{
    CHUNK_BYTES, HEADER_SIZE, LIVE_HEADER_SIZE, PAYLOAD_MAX, crc_seed, entry_crc, entry_size, payload_crc,
};
use varve_format::{
    EntryHeader, Generation, Ino, InodeKey, LastForwarded, LeaseNo, LogOp, LogSeq, Seal, SessionId,
};
use varve_ipc::{
    Admin, Descriptors, DirEntry, ForwardedOp, ForwardedResult, Grant, Hello, InprocLink, IpcError,
    LeaseMode, Near, Opened, Page, Peer, Request, Response, Service, SessionPage, StatFs, Upcall,
    UpcallQueue, Want, Welcome,
};
use varve_libfs::{Connection, Connector};
use varve_media::{Backing, MappedOptions, MappedRegion, Region};
use zerocopy::FromBytes;

const LOG_BYTES: u64 = 4 * CHUNK_BYTES;
/// No test waits longer for anything.
const WAIT: Duration = Duration::from_secs(30);

#[derive(Clone, Copy)]
struct Holder {
    session: u64,
    mode: LeaseMode,
    number: LeaseNo,
    asked: bool,
}

struct Session {
    page: Arc<Page>,
    log: Option<Arc<dyn Region>>,
    upcalls: Arc<UpcallQueue>,
    token: u128,
    sealed: Option<Seal>,
    last_forwarded: LastForwarded,
    opens: HashSet<InodeKey>,
}

#[derive(Default)]
struct State {
    tree: Tree,
    sessions: HashMap<u64, Session>,
    leases: HashMap<InodeKey, Vec<Holder>>,
    next_number: u64,
    next_session: u64,
    next_ino: u64,
    tolerant: bool,
    /// Entries that were left out for want of a lease.
    refused: u64,
    /// Requests for space wait until this is over.
    holds_space: bool,
    /// Answers to requests for what is not used: session, blocks, and of how many it knew.
    given_back: Vec<(u64, u64, u64)>,
}

pub struct Fake {
    state: Mutex<State>,
    changed: Condvar,
    dir: tempfile::TempDir,
    /// Every request for a write lease is answered: contended.
    pub contended: AtomicBool,
    /// The next forwarded operation is done, its answer is lost, and nothing is contended from then on.
    pub lose_forwarded: AtomicBool,
    /// What is made then loses its name before its client comes back.
    pub unlink_lost: AtomicBool,
    /// All sessions end when the next forwarded operation has been answered.
    pub seal_after_forwarded: AtomicBool,
    /// Operations that were forwarded; those of a session that has ended are not.
    pub forwarded: AtomicU64,
    pub leases_max: AtomicU64,
    pub calls: Mutex<BTreeMap<&'static str, u64>>,
    /// Sessions sealed because a lease was not given back.
    pub late: AtomicU64,
    gates: Mutex<Vec<Arc<Gate>>>,
}

/// Where one request, or its answer, waits until the test lets it go.
pub struct Gate {
    session: u64,
    what: &'static str,
    key: InodeKey,
    answer: bool,
    /// Somebody is here; it is open.
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.0 = true;
        self.changed.notify_all();
        let left = self
            .changed
            .wait_timeout_while(state, WAIT, |state| !state.1)
            .unwrap();
        assert!(
            !left.1.timed_out(),
            "nobody lets {} of {} go",
            self.what,
            self.key
        );
    }

    /// Whether somebody comes within `time`.
    pub fn reached(&self, time: Duration) -> bool {
        let state = self.state.lock().unwrap();
        self.changed
            .wait_timeout_while(state, time, |state| !state.0)
            .unwrap()
            .0
            .0
    }

    /// Whoever waits here, or comes later, goes on.
    pub fn open(&self) {
        self.state.lock().unwrap().1 = true;
        self.changed.notify_all();
    }
}

/// Whether a request is about an inode.
fn names(request: &Request, key: InodeKey) -> bool {
    match request {
        Request::Acquire { wants } | Request::AcquireNear { wants, .. } => {
            wants.iter().any(|want| want.key == key)
        }
        Request::Release { items } => items.iter().any(|item| item.key == key),
        Request::Drop { keys } => keys.contains(&key),
        Request::ReadDir { dir, .. } | Request::Lookup { dir, .. } => *dir == key,
        Request::Forward(_) => true,
        _ => false,
    }
}

/// A connector to the fake, which may be away for a while.
pub struct FakeConnector {
    pub fake: Arc<Fake>,
}

impl Connector for FakeConnector {
    fn connect(&self, hello: Hello) -> Result<Connection, IpcError> {
        let opened = self.fake.hello(Peer::this_process(), hello)?;
        let id = opened.welcome.session;
        let state = self.fake.lock();
        let session = &state.sessions[&id.0];
        let (page, log) = (Arc::clone(&session.page), session.log.clone());
        drop(state);
        let service: Arc<dyn Service> = Arc::clone(&self.fake) as Arc<dyn Service>;
        let link = Arc::new(InprocLink::new(service, id, opened.upcalls));
        Ok(Connection {
            link,
            welcome: opened.welcome,
            page,
            log,
            nvm: None,
            ssd: None,
            verified: None,
        })
    }
}

fn errno<T>(errno: i32) -> Result<T, IpcError> {
    Err(IpcError::Errno(errno))
}

/// Entries of a log by number.
fn scan(session: u64, log: &dyn Region) -> BTreeMap<u64, (EntryHeader, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for chunk in 0..log.len_bytes() / CHUNK_BYTES {
        let mut pos = if chunk == 0 { LIVE_HEADER_SIZE as u64 } else { 0 };
        let mut last = 0;
        while pos + HEADER_SIZE as u64 <= CHUNK_BYTES {
            let mut bytes = [0; HEADER_SIZE];
            log.read(chunk * CHUNK_BYTES + pos, &mut bytes).unwrap();
            let header = EntryHeader::read_from_bytes(&bytes).unwrap();
            let (len, seq) = (header.payload_len.get() as usize, header.seq.get());
            if seq <= last || len > PAYLOAD_MAX || pos + entry_size(len) as u64 > CHUNK_BYTES {
                break;
            }
            let mut payload = vec![0; len];
            log.read(chunk * CHUNK_BYTES + pos + HEADER_SIZE as u64, &mut payload)
                .unwrap();
            if entry_crc(payload_crc(crc_seed(SessionId(session)), &payload), &header) != header.crc32c.get()
            {
                break;
            }
            found.insert(seq, (header, payload));
            last = seq;
            pos += entry_size(len) as u64;
        }
    }
    found
}

impl State {
    /// What a session may have ahead: leases that nobody else has.
    fn neighbours(&self, id: u64, near: Near) -> Vec<Want> {
        let numbers = near.after.0 + 1..=near.after.0 + u64::from(near.count);
        let free = |key: &InodeKey| {
            let holders = self.leases.get(key).map_or(&[][..], Vec::as_slice);
            let own = |holder: &Holder| holder.session == id && holder.mode < near.mode && !holder.asked;
            holders.iter().all(own)
        };
        let mut keys: Vec<_> = self.tree.inodes.keys().copied().collect();
        keys.retain(|key| (near.these.contains(key) || numbers.contains(&key.ino.0)) && free(key));
        let mode = near.mode;
        keys.into_iter().map(|key| Want { key, mode }).collect()
    }

    /// Digests what is contiguous; returns how far.
    fn digest(&mut self, id: u64) -> LogSeq {
        let Some(session) = self.sessions.get(&id) else {
            return LogSeq(0);
        };
        let (page, Some(log)) = (Arc::clone(&session.page), session.log.clone()) else {
            return LogSeq(0);
        };
        let mut next = page.digested().next();
        let found = scan(id, &*log);
        while let Some((header, payload)) = found.get(&next.0) {
            let op = LogOp::parse(header, payload).unwrap();
            self.apply(id, header, &op);
            next = next.next();
        }
        page.set_digested(LogSeq(next.0 - 1));
        LogSeq(next.0 - 1)
    }

    /// Applies an entry that must be covered by write leases and must fit: a client that logs nonsense fails
    /// the test.
    fn apply(&mut self, id: u64, header: &EntryHeader, op: &LogOp<'_>) {
        for key in apply::touched(op) {
            let covered = self.leases.get(&key).is_some_and(|holders| {
                holders
                    .iter()
                    .any(|holder| holder.session == id && holder.mode == LeaseMode::Write)
            });
            if self.tolerant && !covered {
                self.refused += 1;
                return;
            }
            assert!(
                covered,
                "session {id} logged {op:?} without a write lease on {key}"
            );
        }
        if let Err(errno) = self.tree.apply(header, op) {
            panic!("session {id} logged {op:?}, which fails with errno {errno}");
        }
    }

    fn seal(&mut self, id: u64) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        if session.sealed.is_some() {
            return;
        }
        session.page.seal();
        varve_ipc::page::membarrier();
        let last = self.digest(id);
        let session = self.sessions.get_mut(&id).unwrap();
        session.sealed = Some(Seal {
            last,
            missing: Vec::new(),
        });
        let _ = session.upcalls.push(Upcall::Sealed);
        session.upcalls.close();
        for holders in self.leases.values_mut() {
            holders.retain(|holder| holder.session != id);
        }
    }

    fn conflicting(&self, id: u64, want: &Want) -> Vec<Holder> {
        let against = |holder: &&Holder| {
            holder.session != id && (want.mode == LeaseMode::Write || holder.mode == LeaseMode::Write)
        };
        self.leases
            .get(&want.key)
            .into_iter()
            .flatten()
            .filter(against)
            .copied()
            .collect()
    }

    fn ask_back(&mut self, key: InodeKey, number: LeaseNo) {
        let Some(holder) = self
            .leases
            .get_mut(&key)
            .and_then(|h| h.iter_mut().find(|h| h.number == number))
        else {
            return;
        };
        if !holder.asked {
            holder.asked = true;
            let upcalls = Arc::clone(&self.sessions[&holder.session].upcalls);
            let _ = upcalls.push(Upcall::Revoke {
                key,
                lease: number,
                keep: None,
            });
        }
    }
}

impl Fake {
    pub fn new() -> Arc<Self> {
        let state = State {
            next_number: 1,
            next_session: 1,
            next_ino: 2,
            ..State::default()
        };
        Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            dir: tempfile::tempdir().unwrap(),
            contended: AtomicBool::new(false),
            lose_forwarded: AtomicBool::new(false),
            seal_after_forwarded: AtomicBool::new(false),
            unlink_lost: AtomicBool::new(false),
            forwarded: AtomicU64::new(0),
            leases_max: AtomicU64::new(10_000),
            calls: Mutex::default(),
            late: AtomicU64::new(0),
            gates: Mutex::default(),
        })
    }

    pub fn connector(self: &Arc<Self>) -> Arc<FakeConnector> {
        Arc::new(FakeConnector {
            fake: Arc::clone(self),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Requests for space wait while `on`.
    pub fn hold_space(&self, on: bool) {
        self.lock().holds_space = on;
        self.changed.notify_all();
    }

    /// Asks all sessions for the space that they do not use: of each how much it gives back, and of how much
    /// it knew, by age.
    pub fn recall_space(&self) -> Vec<(u64, u64)> {
        let mut state = self.lock();
        state.given_back.clear();
        let asked = state.sessions.values().filter(|session| session.sealed.is_none());
        let asked = asked
            .filter(|session| session.upcalls.push(Upcall::ReclaimReservations))
            .count();
        let waits = |state: &mut State| state.given_back.len() < asked;
        let (mut state, late) = self.changed.wait_timeout_while(state, WAIT, waits).unwrap();
        assert!(!late.timed_out(), "a session does not answer");
        state.given_back.sort_unstable();
        state
            .given_back
            .iter()
            .map(|(_, blocks, of)| (*blocks, *of))
            .collect()
    }

    /// Seals all sessions, as a restart does.
    pub fn seal_all(&self) {
        let mut state = self.lock();
        let ids: Vec<_> = state.sessions.keys().copied().collect();
        for id in ids {
            state.seal(id);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The next change is forwarded, and its answer lost.
    pub fn lose_next(&self) {
        self.contended.store(true, Ordering::SeqCst);
        self.lose_forwarded.store(true, Ordering::SeqCst);
    }

    /// From now on entries without a lease are left out and counted, instead of failing the test.
    pub fn tolerate(&self) {
        self.lock().tolerant = true;
    }

    /// Entries that were left out.
    pub fn refused(&self) -> u64 {
        self.lock().refused
    }

    /// Holds the next request of a session (they count from 1) of this name that is about `key`, or the
    /// answer to it.
    pub fn hold(&self, session: u64, what: &'static str, key: InodeKey, answer: bool) -> Arc<Gate> {
        let gate = Arc::new(Gate {
            session,
            what,
            key,
            answer,
            state: Mutex::new((false, false)),
            changed: Condvar::new(),
        });
        self.gates.lock().unwrap().push(Arc::clone(&gate));
        gate
    }

    /// How often a session was asked to give its lease on an inode back.
    pub fn revoked(&self, session: u64, key: InodeKey) -> usize {
        let state = self.lock();
        let holders = state.leases.get(&key).into_iter().flatten();
        holders
            .filter(|holder| holder.session == session && holder.asked)
            .count()
    }

    /// Whether a session has a lease on an inode.
    pub fn has(&self, session: u64, key: InodeKey) -> bool {
        let state = self.lock();
        let mut holders = state.leases.get(&key).into_iter().flatten();
        holders.any(|holder| holder.session == session)
    }

    fn gate(&self, session: SessionId, what: &str, request: &Request) -> Option<Arc<Gate>> {
        let mut gates = self.gates.lock().unwrap();
        let mine =
            |gate: &Arc<Gate>| gate.session == session.0 && gate.what == what && names(request, gate.key);
        let at = gates.iter().position(mine)?;
        Some(gates.remove(at))
    }

    /// Inodes that the shared area has.
    pub fn inodes(&self) -> usize {
        self.lock().tree.inodes.len()
    }

    pub fn count(&self, what: &str) -> u64 {
        self.calls.lock().unwrap().get(what).copied().unwrap_or(0)
    }

    /// Waits until `want` conflicts with nobody.
    fn settle<'g>(
        &'g self,
        mut state: MutexGuard<'g, State>,
        id: u64,
        wants: &[Want],
    ) -> Result<MutexGuard<'g, State>, IpcError> {
        let start = Instant::now();
        loop {
            let conflicts: Vec<_> = wants
                .iter()
                .flat_map(|want| state.conflicting(id, want).into_iter().map(|h| (want.key, h)))
                .collect();
            if conflicts.is_empty() {
                return Ok(state);
            }
            for (key, holder) in conflicts {
                state.ask_back(key, holder.number);
            }
            if start.elapsed() > WAIT {
                self.late.fetch_add(1, Ordering::SeqCst);
                return errno(libc::ETIMEDOUT);
            }
            state = self
                .changed
                .wait_timeout(state, Duration::from_millis(100))
                .unwrap()
                .0;
            if state
                .sessions
                .get(&id)
                .is_some_and(|session| session.sealed.is_some())
            {
                return Err(IpcError::Sealed);
            }
        }
    }

    fn acquire(&self, id: u64, asked: &[Want], near: Option<Near>) -> Result<Response, IpcError> {
        if self.contended.load(Ordering::SeqCst) && asked.iter().any(|want| want.mode == LeaseMode::Write) {
            return Err(IpcError::Forward);
        }
        let mut state = self.settle(self.lock(), id, asked)?;
        for want in asked {
            state.tree.get(want.key).map_err(IpcError::Errno)?;
        }
        let mut wants = asked.to_vec();
        let ahead = near.map(|near| state.neighbours(id, near)).unwrap_or_default();
        wants.extend(
            ahead
                .into_iter()
                .filter(|want| asked.iter().all(|asked| asked.key != want.key)),
        );
        let mut grants = Vec::new();
        for want in &wants {
            let fresh = LeaseNo(state.next_number);
            let holders = state.leases.entry(want.key).or_default();
            let held = holders.iter_mut().find(|holder| holder.session == id);
            let (number, mode, replaces) = match held {
                Some(holder) if holder.mode >= want.mode => (holder.number, holder.mode, None),
                Some(holder) => {
                    let replaced = holder.number;
                    *holder = Holder {
                        mode: want.mode,
                        number: fresh,
                        asked: false,
                        ..*holder
                    };
                    (fresh, want.mode, Some(replaced))
                }
                None => {
                    holders.push(Holder {
                        session: id,
                        mode: want.mode,
                        number: fresh,
                        asked: false,
                    });
                    (fresh, want.mode, None)
                }
            };
            state.next_number += 1;
            let attr = state.tree.get(want.key).map_err(IpcError::Errno)?.attr.clone();
            grants.push(Grant {
                lease: number,
                mode,
                replaces,
                attr,
                told: varve_ipc::Told::default(),
            });
        }
        Ok(Response::Granted(grants))
    }

    fn forward(&self, id: u64, op: &ForwardedOp) -> Result<Response, IpcError> {
        let header = EntryHeader::read_from_bytes(&op.entry[..HEADER_SIZE]).unwrap();
        let mut parsed = LogOp::parse(&header, &op.entry[HEADER_SIZE..]).unwrap();
        assert!(!op.whiteout, "whiteouts are the real daemon's");
        let contended = self.contended.load(Ordering::SeqCst);
        if let LogOp::Rename {
            dir,
            name,
            key,
            new_dir,
            new_name,
            ..
        } = &mut parsed
            && key.ino.0 == 0
        {
            let state = self.lock();
            let named = |dir: InodeKey, name: &[u8]| {
                let found = state.tree.get(dir).map_err(IpcError::Errno)?;
                Ok(found.names.get(name).copied())
            };
            let found: Option<InodeKey> = named(*dir, name)?;
            if !contended || named(*new_dir, new_name)?.is_some() {
                return errno(libc::EAGAIN);
            }
            *key = found.ok_or(IpcError::Errno(libc::ENOENT))?;
        }
        let mut keys = apply::touched(&parsed);
        if let LogOp::Create { key, .. } = parsed {
            keys.retain(|other| *other != key);
        }
        let wants: Vec<_> = keys
            .iter()
            .map(|key| Want {
                key: *key,
                mode: LeaseMode::Write,
            })
            .collect();
        let mut state = self.settle(self.lock(), id, &wants)?;
        state.digest(id);
        if let LogOp::Rename {
            new_dir,
            new_name,
            victim: None,
            ..
        } = parsed
            && let Ok(dir) = state.tree.get(new_dir)
            && dir.names.contains_key(new_name)
        {
            return errno(libc::EEXIST);
        }
        if let LogOp::Create { key, .. } = &mut parsed {
            assert_eq!(key.ino, Ino(0), "the daemon takes the number");
            *key = InodeKey::new(state.next_ino, 1);
            state.next_ino += 1;
        }
        let mut offset = 0;
        let result = match parsed {
            LogOp::Write { key, data, .. } if op.append => {
                offset = state.tree.get(key).map_err(IpcError::Errno)?.attr.size_bytes;
                state.tree.apply(&header, &LogOp::Write { key, offset, data })
            }
            op => state.tree.apply(&header, &op),
        };
        let made = match parsed {
            LogOp::Create { key, .. } => Some(key),
            _ => None,
        };
        let session = state.sessions.get_mut(&id).unwrap();
        session.last_forwarded = LastForwarded {
            number: op.number,
            made,
            open: op.open,
            offset,
        };
        result.map_err(IpcError::Errno)?;
        if op.open {
            session.opens.extend(made);
        }
        self.forwarded.fetch_add(1, Ordering::SeqCst);
        let key = match parsed {
            LogOp::Write { key, .. } | LogOp::Truncate { key, .. } | LogOp::SetAttr { key, .. } => Some(key),
            LogOp::Create { key, .. } | LogOp::Link { key, .. } => Some(key),
            _ => None,
        };
        let attr = key
            .and_then(|key| state.tree.get(key).ok())
            .map(|inode| inode.attr.clone());
        if self.lose_forwarded.swap(false, Ordering::SeqCst) {
            if let LogOp::Create { dir, name, key, .. } = parsed
                && self.unlink_lost.load(Ordering::SeqCst)
            {
                let removed = state.tree.apply(&header, &LogOp::Unlink { dir, name, key });
                removed.map_err(IpcError::Errno)?;
            }
            drop(state);
            self.contended.store(false, Ordering::SeqCst);
            self.seal_all();
            return Err(IpcError::Gone("the answer is lost".into()));
        }
        if self.seal_after_forwarded.swap(false, Ordering::SeqCst) {
            drop(state);
            self.seal_all();
        }
        Ok(Response::Forwarded(ForwardedResult {
            attr,
            offset,
            victim: None,
            contended: if contended { keys } else { Vec::new() },
        }))
    }

    fn answer(&self, id: u64, request: Request) -> Result<Response, IpcError> {
        let mut state = self.lock();
        match request {
            Request::Lookup { dir, name } => {
                let tree = &state.tree;
                let node = tree.get(dir).map_err(IpcError::Errno)?;
                let key = if name == b".." {
                    Some(tree.by_ino(node.attr.parent))
                } else {
                    node.names.get(&name).copied()
                };
                Ok(Response::Entry(
                    key.and_then(|key| tree.get(key).ok())
                        .map(|inode| inode.attr.clone()),
                ))
            }
            Request::GetAttr { key } => state
                .tree
                .get(key)
                .map(|i| Response::Attr(i.attr.clone()))
                .map_err(IpcError::Errno),
            Request::Release { items } => {
                for item in items {
                    let held = |holder: &Holder| holder.session == id && holder.number == item.lease;
                    if !state
                        .leases
                        .get(&item.key)
                        .is_some_and(|holders| holders.iter().any(held))
                    {
                        continue;
                    }
                    if state.sessions[&id].page.digested() < item.last_seq {
                        assert!(
                            state.digest(id) >= item.last_seq,
                            "a release names what is not committed"
                        );
                    }
                    state
                        .leases
                        .get_mut(&item.key)
                        .unwrap()
                        .retain(|holder| !held(holder));
                    if item.open {
                        state.sessions.get_mut(&id).unwrap().opens.insert(item.key);
                    }
                }
                drop(state);
                self.changed.notify_all();
                Ok(Response::Done)
            }
            Request::Drop { keys } => {
                for key in keys {
                    state.sessions.get_mut(&id).unwrap().opens.remove(&key);
                }
                Ok(Response::Done)
            }
            Request::AllocInodes { count, .. } => {
                let mut batch = Vec::new();
                for _ in 0..count {
                    let key = InodeKey {
                        ino: Ino(state.next_ino),
                        generation: Generation(1),
                    };
                    let number = LeaseNo(state.next_number);
                    state.next_ino += 1;
                    state.next_number += 1;
                    let holder = Holder {
                        session: id,
                        mode: LeaseMode::Write,
                        number,
                        asked: false,
                    };
                    state.leases.entry(key).or_default().push(holder);
                    batch.push((key, number));
                }
                Ok(Response::Inodes(batch))
            }
            Request::ReadDir { dir, cookie, max } => {
                let node = state.tree.get(dir).map_err(IpcError::Errno)?;
                let at_end = cookie as usize + max as usize >= node.names.len();
                let page = node
                    .names
                    .iter()
                    .enumerate()
                    .skip(cookie as usize)
                    .take(max as usize);
                let entries = page.map(|(at, (name, key))| {
                    let attr = state.tree.get(*key).unwrap().attr.clone();
                    DirEntry {
                        name: name.clone(),
                        key: *key,
                        kind: attr.kind(),
                        next_cookie: at as u64 + 1,
                    }
                });
                Ok(Response::Entries(entries.collect(), at_end))
            }
            Request::ReadLink { key } => state
                .tree
                .get(key)
                .map(|inode| Response::Bytes(inode.target.clone()))
                .map_err(IpcError::Errno),
            Request::Xattrs { key } => {
                let node = state.tree.get(key).map_err(IpcError::Errno)?;
                Ok(Response::Xattrs(
                    node.xattrs.iter().map(|(n, v)| (n.clone(), v.clone())).collect(),
                ))
            }
            Request::MapExtents { key, .. } => {
                let node = state.tree.get(key).map_err(IpcError::Errno)?;
                let blocks = node.data.len().div_ceil(4096) as u32;
                let run = varve_ipc::MappedExtent {
                    file_block: varve_format::FileBlock(0),
                    len: blocks,
                    tier: varve_format::Tier::Hdd,
                    block: varve_format::BlockNo(0),
                    unwritten: false,
                    number: None,
                };
                Ok(Response::Extents(
                    if blocks == 0 { Vec::new() } else { vec![run] },
                    true,
                ))
            }
            Request::ReadData { key, offset, len } => {
                let data = &state.tree.get(key).map_err(IpcError::Errno)?.data;
                let from = (offset as usize).min(data.len());
                Ok(Response::Bytes(
                    data[from..(from + len as usize).min(data.len())].to_vec(),
                ))
            }
            Request::GrowLog { .. } => Ok(Response::LogBytes(LOG_BYTES)),
            Request::Reserve { blocks, .. } => {
                let held = |state: &mut State| state.holds_space;
                let held = self.changed.wait_timeout_while(state, WAIT, held).unwrap();
                assert!(!held.1.timed_out(), "nobody lets the space go");
                Ok(Response::Reserved(blocks))
            }
            Request::SyncAll => Ok(Response::Done),
            Request::ReturnReservation { blocks, of } => {
                state.given_back.push((id, blocks, of));
                drop(state);
                self.changed.notify_all();
                Ok(Response::Done)
            }
            Request::Digest { .. } => Ok(Response::Digested(state.digest(id))),
            Request::ClientFault(_) => Ok(Response::Done),
            Request::StatFs => Ok(Response::StatFs(StatFs {
                blocks: 1000,
                ..StatFs::default()
            })),
            Request::Bye => {
                state.seal(id);
                drop(state);
                self.changed.notify_all();
                Ok(Response::Done)
            }
            Request::Hold { .. } | Request::SharingNoted | Request::BarrierAck { .. } => Ok(Response::Done),
            _ => errno(libc::ENOSYS),
        }
    }
}

impl Service for Fake {
    fn hello(&self, _peer: Peer, hello: Hello) -> Result<Opened, IpcError> {
        let mut state = self.lock();
        let mut old = None;
        if let Some(token) = hello.resume {
            let id = state
                .sessions
                .iter()
                .find(|(_, session)| session.token == token)
                .map(|(id, _)| *id);
            let Some(id) = id else { return errno(libc::ESTALE) };
            state.seal(id);
            old = state.sessions.remove(&id);
        }
        let id = state.next_session;
        state.next_session += 1;
        let page = Arc::new(Page::heap(SessionId(id)));
        let options = MappedOptions {
            backing: Backing::Shm,
            len_bytes: LOG_BYTES,
            max_bytes: LOG_BYTES,
            sparse: true,
        };
        let log = (!hello.read_only).then(|| {
            let region = MappedRegion::create(&self.dir.path().join(format!("log-{id}")), options).unwrap();
            Arc::new(region) as Arc<dyn Region>
        });
        let upcalls = Arc::new(UpcallQueue::new());
        let session = Session {
            page,
            log,
            upcalls: Arc::clone(&upcalls),
            token: u128::from(id) + 1000,
            sealed: None,
            last_forwarded: LastForwarded::default(),
            opens: hello
                .held
                .iter()
                .copied()
                .chain(
                    old.as_ref()
                        .and_then(|old| old.last_forwarded.made.filter(|_| old.last_forwarded.open)),
                )
                .collect(),
        };
        let welcome = Welcome {
            session: SessionId(id),
            token: session.token,
            pool_uuid: [7; 16],
            root: state.tree.get(InodeKey::ROOT).unwrap().attr.clone(),
            privileged: true,
            acts_for: None,
            read_only: hello.read_only,
            latched: None,
            shared: state.sessions.len() > 1,
            log_bytes: LOG_BYTES,
            log_max_bytes: LOG_BYTES,
            nvm_bytes: 0,
            nvm_sums: None,
            nvm_sums_once: false,
            nvm_emulated: false,
            dax: varve_ipc::DaxMaps::default(),
            lease_ms: 20_000,
            wait_ms: 10_000,
            digest_percent: 30,
            read_ahead_bytes: 0,
            sync_ms: 0,
            needs_sync: false,
            seal: old.as_ref().and_then(|old| old.sealed.clone()),
            last_forwarded: old.map_or(LastForwarded::default(), |old| old.last_forwarded),
            leases_max: self.leases_max.load(Ordering::SeqCst) as u32,
            name_hash: None,
            copies_at: None,
        };
        state.sessions.insert(id, session);
        Ok(Opened {
            welcome,
            descriptors: Descriptors::default(),
            upcalls,
        })
    }

    fn call(&self, session: SessionId, request: Request) -> Result<Response, IpcError> {
        let name = match &request {
            Request::Acquire { .. } | Request::AcquireNear { .. } => "acquire",
            Request::Lookup { .. } => "lookup",
            Request::Forward(_) => "mediate",
            Request::Release { .. } => "release",
            Request::Drop { .. } => "drop",
            Request::ReadDir { .. } => "readdir",
            _ => "other",
        };
        *self.calls.lock().unwrap().entry(name).or_default() += 1;
        let gate = self.gate(session, name, &request);
        if let Some(gate) = gate.as_ref().filter(|gate| !gate.answer) {
            gate.pass();
        }
        let sealed = self
            .lock()
            .sessions
            .get(&session.0)
            .is_none_or(|session| session.sealed.is_some());
        if sealed {
            return Err(IpcError::Sealed);
        }
        let answer = match request {
            Request::Acquire { wants } => self.acquire(session.0, &wants, None),
            Request::AcquireNear { wants, near } => self.acquire(session.0, &wants, Some(near)),
            Request::Forward(op) => self.forward(session.0, &op),
            request => self.answer(session.0, request),
        };
        if let Some(gate) = gate.filter(|gate| gate.answer) {
            gate.pass();
        }
        answer
    }

    fn admin(&self, _peer: Peer, _admin: Admin) -> Result<Response, IpcError> {
        errno(libc::ENOSYS)
    }

    fn gone(&self, session: SessionId) {
        self.lock().seal(session.0);
        self.changed.notify_all();
    }
}
