#![allow(clippy::unwrap_used)]
use super::{Server, ServerOptions, admin, connect};
use crate::sync::lock;
use crate::{
    Admin, ClientKind, Descriptors, Hello, IpcError, Link, Opened, PROTOCOL_VERSION, Page, PageState, Peer,
    Request, Response, Service, SessionPage, Upcall, UpcallQueue, Welcome,
};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use varve_format::{InodeAttr, InodeKey, LogSeq, SessionId};

/// Answers `GetAttr` with ENOENT; `Digest` waits until `SharingNoted` came.
#[derive(Default)]
struct Toy {
    dir: Option<tempfile::TempDir>,
    state: Mutex<ToyState>,
    changed: Condvar,
}

#[derive(Default)]
struct ToyState {
    sessions: HashMap<u64, Arc<UpcallQueue>>,
    pages: HashMap<u64, Page>,
    gone: Vec<SessionId>,
    peers: Vec<Peer>,
    acked: bool,
    waiting: usize,
}

fn attr() -> InodeAttr {
    InodeAttr {
        key: InodeKey::ROOT,
        mode: 0o040_755,
        uid: 0,
        gid: 0,
        nlink: 2,
        size_bytes: 0,
        sectors: 0,
        rdev: 0,
        parent: InodeKey::ROOT.ino,
        atime_ns: 0,
        mtime_ns: 0,
        ctime_ns: 0,
        btime_ns: 0,
    }
}

impl Service for Toy {
    fn hello(&self, peer: Peer, hello: Hello) -> Result<Opened, IpcError> {
        if hello.version != PROTOCOL_VERSION {
            return Err(IpcError::Protocol("version".into()));
        }
        let mut state = lock(&self.state);
        state.peers.push(peer);
        let id = state.sessions.len() as u64 + 1;
        let upcalls = Arc::new(UpcallQueue::new());
        state.sessions.insert(id, Arc::clone(&upcalls));
        let path = self.dir.as_ref().unwrap().path().join(format!("page-{id}"));
        state
            .pages
            .insert(id, Page::create(&path, SessionId(id)).unwrap());
        let welcome = Welcome {
            session: SessionId(id),
            token: 9,
            pool_uuid: [1; 16],
            root: attr(),
            privileged: true,
            acts_for: None,
            read_only: hello.read_only,
            latched: None,
            shared: false,
            log_bytes: 0,
            log_max_bytes: 0,
            nvm_bytes: 0,
            nvm_sums: None,
            nvm_sums_once: false,
            nvm_emulated: false,
            dax: crate::DaxMaps::default(),
            lease_ms: 2000,
            wait_ms: 30_000,
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
        let page = Some(Page::open_for_client(&path).unwrap());
        Ok(Opened {
            welcome,
            descriptors: Descriptors {
                page,
                ..Descriptors::default()
            },
            upcalls,
        })
    }

    fn call(&self, session: SessionId, request: Request) -> Result<Response, IpcError> {
        let mut state = lock(&self.state);
        match request {
            Request::Digest { upto, .. } => {
                state.waiting += 1;
                self.changed.notify_all();
                while !state.acked {
                    if state.gone.contains(&session) {
                        return Err(IpcError::Sealed);
                    }
                    state = self.changed.wait(state).unwrap();
                }
                Ok(Response::Digested(upto))
            }
            Request::SharingNoted => {
                state.acked = true;
                self.changed.notify_all();
                assert!(state.sessions[&session.0].push(Upcall::Exclusive));
                state.pages[&session.0].set_digested(LogSeq(77));
                Ok(Response::Done)
            }
            Request::ReadData { len, .. } => Ok(Response::Bytes(vec![5; len as usize])),
            _ => Err(IpcError::Errno(libc::ENOENT)),
        }
    }

    fn admin(&self, _peer: Peer, _admin: Admin) -> Result<Response, IpcError> {
        Ok(Response::Json("{}".into()))
    }

    fn gone(&self, session: SessionId) {
        lock(&self.state).gone.push(session);
        self.changed.notify_all();
    }
}

struct Setup {
    toy: Arc<Toy>,
    server: Server,
    path: PathBuf,
}

fn setup() -> Setup {
    setup_with(ServerOptions::default())
}

fn setup_with(options: ServerOptions) -> Setup {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sock");
    let toy = Arc::new(Toy {
        dir: Some(dir),
        ..Toy::default()
    });
    let listener = UnixListener::bind(&path).unwrap();
    let server = Server::start(listener, Arc::clone(&toy) as _, options).unwrap();
    Setup { toy, server, path }
}

fn hello() -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        kind: ClientKind::Linked,
        read_only: false,
        resume: None,
        held: Vec::new(),
    }
}

impl Toy {
    fn wait_until(&self, mut done: impl FnMut(&ToyState) -> bool) {
        let state = lock(&self.state);
        let (_state, late) = self
            .changed
            .wait_timeout_while(state, Duration::from_secs(60), |state| !done(state))
            .unwrap();
        assert!(!late.timed_out());
    }
}

#[test]
fn calls_one_after_another_need_few_threads() {
    let Setup { server, path, .. } = setup();
    let (link, ..) = connect(&path, hello()).unwrap();
    let mut most = 0;
    for _ in 0..5_000 {
        let missing = link.call(Request::GetAttr { key: InodeKey::ROOT });
        assert_eq!(missing, Err(IpcError::Errno(libc::ENOENT)));
        most = most.max(server.shared.threads.load(std::sync::atomic::Ordering::Acquire));
    }
    // The first worker, one that takes turns with it, one for upcalls, and one that is starting or ending.
    assert!(most <= 5, "{most} threads");
    assert!(server.stop());
}

#[test]
fn closed_link_ends_its_connection_though_it_is_still_there() {
    let Setup { toy, server, path } = setup();
    let (link, ..) = connect(&path, hello()).unwrap();
    link.close();
    toy.wait_until(|state| state.gone.len() == 1);
    while server.connections() > 0 || server.shared.threads.load(std::sync::atomic::Ordering::Acquire) > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(matches!(
        link.call(Request::GetAttr { key: InodeKey::ROOT }),
        Err(IpcError::Gone(_))
    ));
    assert!(server.stop());
}

#[test]
fn waiting_calls_do_not_block_others_and_descriptors_arrive() {
    let Setup { toy, server, path } = setup();
    let (link, welcome, descriptors) = connect(&path, hello()).unwrap();
    let page = Page::from_descriptor(descriptors.page.unwrap()).unwrap();
    assert!(descriptors.log.is_none() && descriptors.nvm.is_none());
    assert_eq!((page.session(), page.state()), (welcome.session, PageState::Live));
    let own = Peer::this_process();
    assert_eq!(lock(&toy.state).peers, [own]);
    let link = Arc::new(link);
    let waiters: Vec<_> = (1..=20)
        .map(|n| {
            let link = Arc::clone(&link);
            std::thread::spawn(move || {
                link.call(Request::Digest {
                    upto: LogSeq(n),
                    wait: true,
                })
            })
        })
        .collect();
    toy.wait_until(|state| state.waiting == 20);
    let key = InodeKey::ROOT;
    assert_eq!(
        link.call(Request::GetAttr { key }),
        Err(IpcError::Errno(libc::ENOENT))
    );
    let Response::Bytes(data) = link
        .call(Request::ReadData {
            key,
            offset: 0,
            len: 1 << 20,
        })
        .unwrap()
    else {
        panic!("other answer");
    };
    assert_eq!(data.len(), 1 << 20);
    link.call(Request::SharingNoted).unwrap();
    for (n, waiter) in (1..=20).zip(waiters) {
        assert_eq!(waiter.join().unwrap(), Ok(Response::Digested(LogSeq(n))));
    }
    assert_eq!(
        link.upcall(Duration::from_secs(60)).unwrap(),
        Some(Upcall::Exclusive)
    );
    assert_eq!(page.digested(), LogSeq(77));
    drop(link);
    toy.wait_until(|state| state.gone == [welcome.session]);
    assert!(server.stop());
}

#[test]
fn more_waiting_calls_than_the_bound_queue_in_the_client() {
    let Setup { toy, server, path } = setup();
    let link = Arc::new(connect(&path, hello()).unwrap().0);
    let waiters: Vec<_> = (1..=super::WAITING_MAX as u64 + 10)
        .map(|n| {
            let link = Arc::clone(&link);
            std::thread::spawn(move || {
                link.call(Request::Digest {
                    upto: LogSeq(n),
                    wait: true,
                })
            })
        })
        .collect();
    // The waiting calls of the connection, and the one on the line.
    toy.wait_until(|state| state.waiting == super::WAITING_MAX + 1);
    link.call(Request::SharingNoted).unwrap();
    for waiter in waiters {
        assert!(matches!(waiter.join().unwrap(), Ok(Response::Digested(_))));
    }
    drop(link);
    assert!(server.stop());
}

#[test]
fn waiting_calls_fail_at_once_when_the_server_stops() {
    let Setup { toy, server, path } = setup();
    let link = Arc::new(connect(&path, hello()).unwrap().0);
    let waiter = std::thread::spawn({
        let link = Arc::clone(&link);
        move || {
            link.call(Request::Digest {
                upto: LogSeq(1),
                wait: true,
            })
        }
    });
    toy.wait_until(|state| state.waiting == 1);
    assert!(server.stop());
    assert!(matches!(waiter.join().unwrap(), Err(IpcError::Gone(_))));
    assert!(matches!(link.call(Request::StatFs), Err(IpcError::Gone(_))));
    assert!(matches!(
        link.upcall(Duration::from_secs(60)),
        Err(IpcError::Gone(_))
    ));
}

#[test]
fn session_ends_when_the_client_sends_nonsense() {
    let Setup { toy, server, path } = setup();
    for bytes in [&[0xff; 64][..], &[4, 0, 0, 0, 1, 2, 3, 4], &[1, 0, 0, 0, 0]] {
        let mut raw = UnixStream::connect(&path).unwrap();
        raw.write_all(bytes).unwrap();
        let mut rest = Vec::new();
        let _ = raw.read_to_end(&mut rest);
    }
    let mut raw = UnixStream::connect(&path).unwrap();
    crate::wire::write(
        &raw,
        &crate::wire::CallFrame {
            id: 0,
            request: Request::Hello(hello()),
        },
    )
    .unwrap();
    let _: crate::wire::ServerFrame = crate::wire::read(&raw).unwrap();
    raw.write_all(&[0xff; 64]).unwrap();
    toy.wait_until(|state| state.gone == [SessionId(1)]);
    assert!(
        connect(
            &path,
            Hello {
                version: 99,
                ..hello()
            }
        )
        .is_err()
    );
    assert_eq!(admin(&path, Admin::Status).unwrap(), "{}");
    assert!(server.stop());
}

#[test]
fn connection_ends_when_its_first_message_comes_byte_by_byte() {
    let Setup { server, path, .. } = setup_with(ServerOptions {
        patience: Duration::from_millis(300),
        ..ServerOptions::default()
    });
    let mut raw = UnixStream::connect(&path).unwrap();
    // Each byte arrives in time, the whole message never does.
    let ended = (0..2000).any(|_| {
        std::thread::sleep(Duration::from_millis(30));
        raw.write_all(&[1]).is_err()
    });
    assert!(ended, "it was waited for");
    assert!(server.stop());
}

#[test]
fn connect_says_gone_when_nobody_listens() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(
        connect(&dir.path().join("sock"), hello()),
        Err(IpcError::Gone(_))
    ));
}

#[test]
fn ordinary_user_has_a_quarter_of_the_connections_and_leaves_a_quarter_to_root() {
    let admits = |users: &[(u32, usize)], uid| {
        let users = users.iter().flat_map(|(uid, count)| vec![*uid; *count]);
        super::server::has_room(users, uid, uid == 0, 16)
    };
    assert!(admits(&[(7, 3)], 7));
    assert!(!admits(&[(7, 4)], 7), "a quarter is his");
    assert!(admits(&[(7, 4)], 8), "the others have theirs");
    assert!(!admits(&[(7, 4), (8, 4), (9, 4)], 10), "a quarter is root's");
    assert!(admits(&[(7, 4), (8, 4), (9, 4)], 0));
    assert!(!admits(&[(0, 16)], 0));
}
