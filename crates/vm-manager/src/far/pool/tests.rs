//! The session for slabs against a daemon that loses answers, goes away, takes slabs and refuses.
#![allow(clippy::unwrap_used)]

use super::session::Session;
use super::{PoolSlabs, open};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use varve_far::{Backend, BackendError, Page};
use varve_format::{InodeAttr, InodeKey, LeaseNo, SessionId, Tier};
use varve_ipc::socket::{Server, ServerOptions};
use varve_ipc::{
    Admin, DaxMaps, Descriptors, Hello, IpcError, Opened, Peer, Request, Response, Service, Upcall,
    UpcallQueue, Welcome,
};
use zerocopy::IntoBytes;

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It is carried out, and its answer does not arrive.
    AnswerLost,
    /// It does not arrive.
    Lost,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Hello,
    Slabs,
    Grant,
    Read,
}

#[derive(Default)]
struct State {
    sessions: u64,
    upcalls: BTreeMap<u64, Arc<UpcallQueue>>,
    /// Owner and bytes of each slab.
    slabs: BTreeMap<LeaseNo, (u64, Vec<u8>)>,
    next: u64,
    fates: VecDeque<(Kind, Fate)>,
    refuses: Option<i32>,
    read_only: bool,
    resumed: Vec<Option<u128>>,
}

impl State {
    fn fate(&mut self, kind: Kind) -> Option<Fate> {
        let (next, fate) = *self.fates.front()?;
        if next != kind {
            return None;
        }
        self.fates.pop_front();
        Some(fate)
    }
}

/// A daemon's end that does what ADR 68 says of slabs.
#[derive(Default)]
struct Daemon {
    state: Mutex<State>,
    wait_ms: u64,
}

const fn token(session: u64) -> u128 {
    session as u128 * 1_000 + 7
}

fn lost() -> IpcError {
    IpcError::Gone("the answer is lost".into())
}

impl Daemon {
    fn do_it(&self, state: &mut State, session: u64, request: Request) -> Result<Response, IpcError> {
        match request {
            Request::Slabs { former } => {
                for (owner, _) in state.slabs.values_mut() {
                    if former.contains(&token(*owner)) {
                        *owner = session;
                    }
                }
                let own = state.slabs.iter().filter(|(_, (owner, _))| *owner == session);
                let own = own.map(|(slab, _)| (*slab, Tier::Nvm)).collect();
                Ok(Response::Slabs(vec![(Tier::Nvm, 100)], own))
            }
            Request::GrantSlab { .. } => {
                state.next += 1;
                let slab = LeaseNo(state.next);
                state.slabs.insert(slab, (session, vec![0; 1 << 20]));
                Ok(Response::Slab(slab))
            }
            Request::FreeSlabs { slabs } => {
                for slab in slabs {
                    let own = state.slabs.get(&slab).is_some_and(|(owner, _)| *owner == session);
                    if !own {
                        return Err(IpcError::Errno(libc::ENXIO));
                    }
                    state.slabs.remove(&slab);
                }
                Ok(Response::Done)
            }
            Request::ReadSlab { slab, ranges } => match state.slabs.get(&slab) {
                Some((owner, bytes)) if *owner == session => {
                    let part = |(at, len): (u32, u32)| bytes[at as usize..(at + len) as usize].to_vec();
                    Ok(Response::Bytes(ranges.into_iter().flat_map(part).collect()))
                }
                _ => Err(IpcError::Errno(libc::ENXIO)),
            },
            Request::WriteSlab { slab, offset, bytes } => match state.slabs.get_mut(&slab) {
                Some((owner, all)) if *owner == session => {
                    all[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
                    Ok(Response::Done)
                }
                _ => Err(IpcError::Errno(libc::ENXIO)),
            },
            _ => Ok(Response::Done),
        }
    }
}

impl Service for Daemon {
    fn hello(&self, _: Peer, hello: Hello) -> Result<Opened, IpcError> {
        let mut state = self.state.lock();
        let fate = state.fate(Kind::Hello);
        if fate == Some(Fate::Lost) {
            return Err(lost());
        }
        state.sessions += 1;
        let id = state.sessions;
        state.resumed.push(hello.resume);
        let upcalls = Arc::new(UpcallQueue::new());
        state.upcalls.insert(id, Arc::clone(&upcalls));
        if fate == Some(Fate::AnswerLost) {
            return Err(lost());
        }
        let welcome = Welcome {
            session: SessionId(id),
            token: token(id),
            pool_uuid: [1; 16],
            root: InodeAttr::new(InodeKey::ROOT, 0o040_755, 0),
            privileged: true,
            acts_for: None,
            read_only: state.read_only,
            latched: state.read_only.then(|| "a device failed".into()),
            shared: false,
            log_bytes: 0,
            log_max_bytes: 0,
            nvm_bytes: 0,
            nvm_sums: None,
            nvm_sums_once: false,
            nvm_emulated: false,
            dax: DaxMaps::default(),
            lease_ms: 2000,
            wait_ms: self.wait_ms,
            digest_percent: 30,
            read_ahead_bytes: 0,
            sync_ms: 0,
            needs_sync: false,
            seal: None,
            last_forwarded: varve_format::LastForwarded::default(),
            leases_max: 10,
            name_hash: None,
            copies_at: None,
        };
        Ok(Opened {
            welcome,
            descriptors: Descriptors::default(),
            upcalls,
        })
    }

    fn call(&self, session: SessionId, request: Request) -> Result<Response, IpcError> {
        let mut state = self.state.lock();
        let kind = match &request {
            Request::Slabs { .. } => Some(Kind::Slabs),
            Request::GrantSlab { .. } => Some(Kind::Grant),
            Request::ReadSlab { .. } => Some(Kind::Read),
            _ => None,
        };
        if let (Some(errno), Some(Kind::Slabs | Kind::Grant)) = (state.refuses, kind) {
            return Err(IpcError::Errno(errno));
        }
        match kind.and_then(|kind| state.fate(kind)) {
            Some(Fate::Lost) => Err(lost()),
            Some(Fate::AnswerLost) => {
                let _ = self.do_it(&mut state, session.0, request);
                Err(lost())
            }
            None => self.do_it(&mut state, session.0, request),
        }
    }

    fn admin(&self, _: Peer, _: Admin) -> Result<Response, IpcError> {
        Err(IpcError::Errno(libc::ENOSYS))
    }

    fn gone(&self, _: SessionId) {}
}

fn serve(dir: &Path, daemon: &Arc<Daemon>) -> Server {
    let socket = dir.join("sock");
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).unwrap();
    let service: Arc<dyn Service> = daemon.clone();
    Server::start(listener, service, ServerOptions::default()).unwrap()
}

fn daemon(wait_ms: u64) -> (tempfile::TempDir, Arc<Daemon>, Server) {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Arc::new(Daemon {
        wait_ms,
        ..Daemon::default()
    });
    let server = serve(dir.path(), &daemon);
    (dir, daemon, server)
}

fn backend(dir: &Path, limit: u32) -> PoolSlabs {
    open(dir, limit).unwrap().pop().unwrap()
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn page(byte: u8) -> Page {
    Page([byte; 4096])
}

/// Reads as the space does: again after a wait.
fn read(slabs: &PoolSlabs, slot: varve_far::Slot) -> Result<Page, BackendError> {
    let mut back = Page::default();
    loop {
        match slabs.read(slot, 4096, back.as_mut_bytes()) {
            Err(BackendError::Away(_)) if slabs.wait() => {}
            done => return done.map(|()| back),
        }
    }
}

#[test]
fn slabs_are_found_whatever_answer_is_lost() {
    use Fate::{AnswerLost, Lost};
    use Kind::{Hello, Slabs};
    let (dir, daemon, _server) = daemon(20_000);
    let slabs = backend(dir.path(), 10);
    let slots: Vec<_> = (0..3).map(|_| slabs.alloc().unwrap()).collect();
    for (byte, slot) in slots.iter().enumerate() {
        slabs.write(*slot, 4096, page(byte as u8 + 1).as_bytes()).unwrap();
    }
    let ways: [&[(Kind, Fate)]; 7] = [
        &[],
        &[(Slabs, AnswerLost)],
        &[(Slabs, Lost)],
        &[(Hello, AnswerLost), (Slabs, AnswerLost)],
        &[(Slabs, AnswerLost), (Slabs, Lost), (Slabs, AnswerLost)],
        &[
            (Slabs, AnswerLost),
            (Hello, AnswerLost),
            (Slabs, AnswerLost),
            (Hello, Lost),
        ],
        &[(Slabs, AnswerLost); 70],
    ];
    for way in ways {
        {
            let mut state = daemon.state.lock();
            state.fates.extend([(Kind::Read, Lost)]);
            state.fates.extend(way);
        }
        for (byte, slot) in slots.iter().enumerate() {
            let back = read(&slabs, *slot).unwrap();
            assert!(back.0 == page(byte as u8 + 1).0, "{way:?}");
        }
        let state = daemon.state.lock();
        assert!(state.fates.is_empty(), "all of it happened: {:?}", state.fates);
        assert_eq!(state.slabs.len(), 3);
    }
}

#[test]
fn grant_whose_answer_was_lost_is_given_back_soon() {
    let (dir, daemon, _server) = daemon(20_000);
    let slabs = backend(dir.path(), 10);
    let slot = slabs.alloc().unwrap();
    slabs.write(slot, 4096, page(5).as_bytes()).unwrap();
    daemon
        .state
        .lock()
        .fates
        .push_back((Kind::Grant, Fate::AnswerLost));
    assert!(matches!(slabs.alloc(), Err(BackendError::Away(_))));
    assert_eq!(daemon.state.lock().next, 2, "it was granted");
    // Nobody asks for another one.
    until("it is given back", || daemon.state.lock().slabs.len() == 1);
    assert!(read(&slabs, slot).unwrap().0 == page(5).0);
}

#[test]
fn slabs_that_were_taken_are_told_and_do_not_count_against_the_size() {
    let (dir, daemon, _server) = daemon(100);
    let slabs = backend(dir.path(), 3);
    let slots: Vec<_> = (0..3).map(|_| slabs.alloc().unwrap()).collect();
    assert!(matches!(slabs.alloc(), Err(BackendError::Full)));
    let asked = vec![LeaseNo(1), LeaseNo(2)];
    let upcalls = daemon.state.lock().upcalls[&1].clone();
    assert!(upcalls.push(Upcall::YieldSlabs { slabs: asked }));
    until("they are asked for", || slabs.wanted_back() == slots[..2]);
    assert!(slabs.taken().is_empty());
    // One is taken; nobody reads it. The other one is not needed any more.
    daemon.state.lock().slabs.remove(&LeaseNo(1));
    until("it is found out", || slabs.taken() == slots[..1]);
    assert_eq!(slabs.wanted_back(), slots[1..2]);
    slabs.dealloc(slots[0]);
    assert!(slabs.taken().is_empty());
    let again = slabs.alloc().unwrap();
    slabs.write(again, 4096, page(9).as_bytes()).unwrap();
    assert!(matches!(slabs.alloc(), Err(BackendError::Full)));
    slabs.dealloc(slots[1]);
    until("it is given back", || daemon.state.lock().slabs.len() == 2);
    assert!(slabs.wanted_back().is_empty());
}

#[test]
fn calls_do_not_wait_for_a_daemon_that_is_away_and_reads_wait_once() {
    let (dir, daemon, server) = daemon(600);
    let slabs = backend(dir.path(), 10);
    let slot = slabs.alloc().unwrap();
    slabs.write(slot, 4096, page(3).as_bytes()).unwrap();
    let begun = Instant::now();
    drop(server);
    until("it is away", || slabs.is_away());
    let short = Instant::now();
    for _ in 0..100 {
        let written = slabs.write(slot, 0, page(1).as_bytes());
        assert!(matches!(written, Err(BackendError::Away(_))), "{written:?}");
        assert!(matches!(slabs.alloc(), Err(BackendError::Away(_))));
    }
    assert!(
        short.elapsed() < Duration::from_millis(300),
        "{:?}",
        short.elapsed()
    );
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5 {
                    assert!(matches!(read(&slabs, slot), Err(BackendError::Away(_))));
                }
            });
        }
    });
    let took = begun.elapsed();
    let (least, most) = (Duration::from_millis(590), Duration::from_millis(1_200));
    assert!(
        took > least && took < most,
        "twenty reads wait until one moment: {took:?}"
    );
    let _server = serve(dir.path(), &daemon);
    until("it is back", || !slabs.is_away());
    assert!(read(&slabs, slot).unwrap().0 == page(3).0);
}

#[test]
fn refusals_say_what_to_do() {
    let (dir, daemon, server) = daemon(100);
    let said = |change: &dyn Fn(&mut State)| {
        change(&mut daemon.state.lock());
        let error = Session::open(dir.path(), 10).map(drop).unwrap_err();
        error.to_string()
    };
    let said_before = said(&|state| state.refuses = Some(libc::EOPNOTSUPP));
    assert!(said_before.contains("varve upgrade"), "{said_before}");
    let said_read_only = said(&|state| state.read_only = true);
    assert!(
        said_read_only.contains("read-only") && said_read_only.contains("a device failed"),
        "{said_read_only}"
    );
    daemon.state.lock().read_only = false;
    daemon.state.lock().refuses = None;
    let slabs = backend(dir.path(), 10);
    for (errno, word) in [
        (libc::EROFS, "read-only"),
        (libc::EDQUOT, "far_percent"),
        (libc::ENOSPC, "no room for a slab"),
    ] {
        daemon.state.lock().refuses = Some(errno);
        let error = slabs.alloc().unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    drop(server);
    let said_nothing_serves = said(&|_| {});
    assert!(said_nothing_serves.contains("varve up"), "{said_nothing_serves}");
}
