//! The connection between sessions and the daemon of a rig: connecting, links, logs, and faults on the way.
//! Owns the faults of a transport; refuses to know the messages' meaning.
//!
//! Possible behaviour of the real transport (`ipc::socket`): a request, an answer or an upcall takes any
//! time, during which other threads run; an upcall overtakes an answer or is overtaken by it, while upcalls
//! stay in order; the connection breaks, and messages in flight are lost: the daemon has carried out the
//! requests that it had received, and the client does not know. No message is lost without its connection,
//! doubled, or changed.

use crate::turns::Turns;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use varve_format::{SessionId, TimeNs};
use varve_ipc::{
    Clock, Hello, IpcError, Link, ManualClock, Peer, Request, Response, Service, SessionPage, Upcall,
    UpcallQueue,
};
use varve_kernelfs::KernelFs;
use varve_libfs::{Connection, Connector};
use varve_media::{DeviceInfo, DeviceState, MediaError, Region};

/// Probabilities of the fates of messages, each per mille.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Weather {
    /// Others run before a request reaches the daemon, or its answer the client.
    pub slow: u64,
    /// The connection breaks before the request arrives.
    pub request_lost: u64,
    /// The connection breaks before the answer arrives.
    pub answer_lost: u64,
    /// The connection breaks while an upcall is in flight.
    pub upcall_lost: u64,
}

impl Weather {
    /// Messages are delayed but arrive.
    pub const SLOW: Self = Self {
        slow: 700,
        request_lost: 0,
        answer_lost: 0,
        upcall_lost: 0,
    };
    /// A connection breaks now and then.
    pub const ROUGH: Self = Self {
        slow: 700,
        request_lost: 15,
        answer_lost: 15,
        upcall_lost: 15,
    };
    /// Few connections last.
    pub const STORM: Self = Self {
        slow: 400,
        request_lost: 90,
        answer_lost: 120,
        upcall_lost: 60,
    };
}

/// Most turns of others while a message is in flight.
const UNDER_WAY_MAX: u64 = 24;

/// An event at a client's store to its log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ambush {
    /// The client is stopped before the store.
    Stop,
    /// The client dies before the store.
    Die,
}

/// A session that the daemon knows.
#[derive(Clone)]
pub(crate) struct Seat {
    pub id: SessionId,
    pub mount: usize,
    upcalls: Arc<UpcallQueue>,
    broken: Arc<AtomicBool>,
}

impl Seat {
    /// Ends its connection, as the daemon ends.
    pub(crate) fn close(&self) {
        self.broken.store(true, Ordering::Relaxed);
        self.upcalls.close();
    }
}

#[derive(Default)]
pub(crate) struct Gate {
    pub kernel: Option<Arc<KernelFs>>,
    /// Number of daemons so far.
    pub daemons: u64,
    pub sessions: Vec<Seat>,
    /// Mounts whose process is dead.
    pub dead: BTreeSet<usize>,
    /// Number of stores until an event for a mount's process, and the event.
    pub ambushes: BTreeMap<usize, (u64, Ambush)>,
    pub weather: Weather,
    /// Number of lost messages.
    pub lost: u64,
}

/// The place where sessions find the current daemon.
pub(crate) struct Door {
    gate: Mutex<Gate>,
    pub turns: Arc<Turns>,
    /// Stores of all clients to their logs until a session is sealed just before one; 0: none will be.
    pub amid: AtomicU64,
}

impl Door {
    pub(crate) fn new(turns: Arc<Turns>) -> Self {
        Self {
            gate: Mutex::default(),
            turns,
            amid: AtomicU64::new(0),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_dead(&self, mount: usize) -> bool {
        self.lock().dead.contains(&mount)
    }

    /// Draws an event with this probability per mille.
    fn falls(&self, per_mille: u64) -> bool {
        per_mille > 0 && self.turns.draw(1000) < per_mille
    }

    /// Delays a message.
    fn carry(&self) {
        let weather = self.lock().weather;
        if self.falls(weather.slow) {
            let turns = self.turns.draw(UNDER_WAY_MAX);
            self.turns.step_aside(turns);
        }
    }

    /// Tells the daemon that a connection is gone.
    fn hang_up(self: &Arc<Self>, daemon: u64, kernel: &Weak<KernelFs>, session: SessionId) {
        let (door, kernel) = (Arc::clone(self), kernel.clone());
        let learn = move || {
            // Runs later, in a thread of its own.
            door.turns
                .tell(|| format!("the daemon hears that {session} is gone"));
            door.turns.in_daemon(daemon, || {
                if let Some(kernel) = kernel.upgrade() {
                    kernel.gone(session);
                }
            });
        };
        if self.turns.is_over() {
            learn();
        } else if self.turns.spawn("gone", None, Box::new(learn)).is_err() {
            unreachable!("a test machine has threads");
        }
    }
}

/// Time as the threads of one process see it, or the threads of none.
pub struct RigClock {
    manual: Arc<ManualClock>,
    turns: Arc<Turns>,
    process: Option<usize>,
}

impl RigClock {
    pub(crate) const fn new(manual: Arc<ManualClock>, turns: Arc<Turns>, process: Option<usize>) -> Self {
        Self {
            manual,
            turns,
            process,
        }
    }

    /// The same clock, for a process.
    pub(crate) fn of(&self, process: usize) -> Self {
        Self::new(Arc::clone(&self.manual), Arc::clone(&self.turns), Some(process))
    }

    /// Advances the clock.
    pub fn advance_ms(&self, ms: u64) {
        self.manual.advance_ms(ms);
    }
}

impl Clock for RigClock {
    fn now_ns(&self) -> TimeNs {
        self.manual.now_ns()
    }

    fn monotonic_ms(&self) -> u64 {
        self.manual.monotonic_ms()
    }

    fn moment(&self) -> Duration {
        Duration::from_millis(self.manual.monotonic_ms())
    }

    fn pause(&self, time: Duration) {
        self.turns.pause(time);
    }

    fn takes_turns(&self) -> bool {
        true
    }

    fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> std::io::Result<()> {
        self.turns.spawn(name, self.process, work)
    }
}

/// A session's connection.
struct DoorLink {
    door: Arc<Door>,
    mount: usize,
    daemon: u64,
    kernel: Weak<KernelFs>,
    session: SessionId,
    upcalls: Arc<UpcallQueue>,
    broken: Arc<AtomicBool>,
}

fn gone() -> IpcError {
    IpcError::Gone("the connection is gone".into())
}

impl DoorLink {
    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed) || self.door.is_dead(self.mount)
    }

    /// Breaks the connection: both sides learn of it.
    fn break_off(&self, what: &str) -> IpcError {
        if !self.broken.swap(true, Ordering::Relaxed) {
            self.door.lock().lost += 1;
            self.door
                .turns
                .tell(|| format!("{}: {what} is lost", self.session));
            self.door.hang_up(self.daemon, &self.kernel, self.session);
        }
        gone()
    }
}

impl Link for DoorLink {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        let (door, turns) = (&self.door, &self.door.turns);
        let weather = door.lock().weather;
        turns.tell(|| format!("{} asks {request:?}", self.session));
        door.carry();
        if self.is_broken() {
            return Err(gone());
        }
        if door.falls(weather.request_lost) {
            return Err(self.break_off("a request"));
        }
        let answer = turns.in_daemon(self.daemon, || {
            let kernel = self.kernel.upgrade().ok_or_else(gone)?;
            kernel.call_session(self.session, request)
        });
        let answer = answer.unwrap_or_else(|| Err(gone()));
        turns.tell(|| format!("{} is answered {answer:?}", self.session));
        door.carry();
        if self.is_broken() {
            return Err(gone());
        }
        if door.falls(weather.answer_lost) {
            return Err(self.break_off("an answer"));
        }
        answer
    }

    fn upcall(&self, timeout: Duration) -> Result<Option<Upcall>, IpcError> {
        let (door, turns) = (&self.door, &self.door.turns);
        if self.is_broken() {
            return Err(gone());
        }
        let upcall = match self.upcalls.pop(Duration::ZERO)? {
            Some(upcall) => Some(upcall),
            None => {
                turns.pause(timeout);
                if self.is_broken() {
                    return Err(gone());
                }
                self.upcalls.pop(Duration::ZERO)?
            }
        };
        let Some(upcall) = upcall else { return Ok(None) };
        door.carry();
        turns.tell(|| format!("{} hears {upcall:?}", self.session));
        let weather = door.lock().weather;
        if self.is_broken() {
            return Err(gone());
        }
        if door.falls(weather.upcall_lost) {
            return Err(self.break_off("an upcall"));
        }
        Ok(Some(upcall))
    }
}

impl Drop for DoorLink {
    fn drop(&mut self) {
        if !self.broken.swap(true, Ordering::Relaxed) && self.kernel.strong_count() > 0 {
            self.door.hang_up(self.daemon, &self.kernel, self.session);
        }
    }
}

/// A client's log with events at stores: its session is sealed, as another client's request may do at any
/// moment; its process is stopped; or it dies, and stores nothing from then on.
struct AmidLog {
    inner: Arc<dyn Region>,
    door: Arc<Door>,
    mount: usize,
    session: SessionId,
}

impl AmidLog {
    /// Returns `false` if the client is dead.
    fn before_store(&self) -> bool {
        if self.door.amid.load(Ordering::Relaxed) > 0
            && self.door.amid.fetch_sub(1, Ordering::Relaxed) == 1
            && let Some(kernel) = self.door.lock().kernel.clone()
        {
            kernel.gone(self.session);
        }
        let ambush = {
            let mut gate = self.door.lock();
            match gate.ambushes.get_mut(&self.mount) {
                Some((stores, _)) if *stores > 1 => {
                    *stores -= 1;
                    None
                }
                Some(_) => gate.ambushes.remove(&self.mount),
                None => None,
            }
        };
        match ambush {
            Some((_, Ambush::Stop)) => {
                self.door
                    .turns
                    .tell(|| format!("{} is stopped amid a store", self.session));
                self.door.turns.stop_here(self.mount);
            }
            Some((_, Ambush::Die)) => {
                self.door
                    .turns
                    .tell(|| format!("{} dies amid a store", self.session));
                self.door.lock().dead.insert(self.mount);
            }
            None => {}
        }
        !self.door.is_dead(self.mount)
    }
}

impl Region for AmidLog {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.inner.read(off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        if self.before_store() {
            self.inner.write(off, src)?;
        }
        Ok(())
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        if self.before_store() {
            return self.inner.write_crc(off, src, seed);
        }
        Ok(seed)
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.inner.fence()
    }

    fn retire(&self) {
        self.inner.retire();
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.inner.sync(off, len)
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        self.inner.grow(new_len)
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.inner.allocate(off, len)
    }

    fn state(&self) -> DeviceState {
        self.inner.state()
    }

    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
}

/// The connector of one mount.
pub(crate) struct Entrance {
    pub door: Arc<Door>,
    pub mount: usize,
}

impl Connector for Entrance {
    fn connect(&self, hello: Hello) -> Result<Connection, IpcError> {
        let (door, turns) = (&self.door, &self.door.turns);
        turns.tell(|| format!("mount {} says {hello:?}", self.mount));
        door.carry();
        let (kernel, daemon, weather) = {
            let gate = door.lock();
            if gate.dead.contains(&self.mount) {
                return Err(IpcError::Errno(libc::ESRCH));
            }
            (gate.kernel.clone().ok_or_else(gone)?, gate.daemons, gate.weather)
        };
        if door.falls(weather.request_lost) {
            door.lock().lost += 1;
            return Err(gone());
        }
        let (weak, opening) = (Arc::downgrade(&kernel), kernel);
        let opened = turns.in_daemon(daemon, move || opening.open_session(Peer::this_process(), hello));
        let opened = opened.unwrap_or_else(|| Err(gone()))?;
        let id = opened.welcome.session;
        turns.tell(|| format!("mount {} is {id}", self.mount));
        let broken = Arc::new(AtomicBool::new(false));
        let seat = Seat {
            id,
            mount: self.mount,
            upcalls: Arc::clone(&opened.upcalls),
            broken: Arc::clone(&broken),
        };
        {
            let mut gate = door.lock();
            gate.sessions.retain(|seat| !seat.upcalls.is_closed());
            if gate.daemons == daemon && gate.kernel.is_some() {
                gate.sessions.push(seat);
            } else {
                seat.close();
            }
        }
        let link = Arc::new(DoorLink {
            door: Arc::clone(door),
            mount: self.mount,
            daemon,
            kernel: weak,
            session: id,
            upcalls: opened.upcalls,
            broken,
        });
        door.carry();
        if link.is_broken() {
            return Err(gone());
        }
        if door.falls(weather.answer_lost) {
            return Err(link.break_off("a welcome"));
        }
        Ok(Connection {
            link,
            welcome: opened.welcome,
            page: opened.page as Arc<dyn SessionPage>,
            log: opened.log.map(|inner| {
                Arc::new(AmidLog {
                    inner,
                    door: Arc::clone(door),
                    mount: self.mount,
                    session: id,
                }) as Arc<dyn Region>
            }),
            nvm: opened.nvm,
            ssd: opened.ssd,
            verified: opened.verified,
        })
    }
}
