//! A whole pool in one process on a simulated machine: store, daemon, sessions; a manual clock, no background threads of the daemon. Owns
//! starting, killing, and the machine's crash; refuses to know what is done in between.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use varve_format::{FileBlock, Ino, InodeKey, SessionId, Tier};
use varve_ipc::{
    ClientKind, Clock, Hello, IpcError, Link, ManualClock, Page, Peer, Request, Response, Service,
    SessionPage, Upcall, UpcallQueue,
};
use varve_kernelfs::placement::{Catalog, Cause, Job, Move, Placement};
use varve_kernelfs::{Config, KernelError, KernelFs, LogStore, Parts, SessionArea, SimLogs};
use varve_libfs::{Connection, Connector, Fs, FsOptions, MountError};
use varve_media::faulty::{FaultScript, FaultyDevice, FaultyRegion};
use varve_media::sim::{SimMedium, SimWorld};
use varve_media::{DeviceInfo, DeviceState, MediaError, Region};
use varve_store::{DataTarget, Devices, MkfsOptions, OpenOptions, SpaceStats, Store, StoreError};

const START_NS: i64 = 1_700_000_000_000_000_000;
const MIB: u64 = 1 << 20;

/// Sizes and media of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Rules of NVM, journal and logs.
    pub medium: SimMedium,
    /// Bytes of NVM.
    pub nvm_bytes: u64,
    /// Bytes of the journal.
    pub journal_bytes: u64,
    /// Bytes of the SSD and of the HDD; 0: none.
    pub blocks_bytes: u64,
    /// Where data goes, and what moves.
    pub policy: Policy,
}

/// Where data goes, and what moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// New data of every inode to one of the tiers, so that all of them are in use; nothing moves.
    Scatter,
    /// The same, and each step of placement moves data to the next tier, round and round.
    Rotate,
    /// The product's policy, with low marks, so that a small pool has something to move.
    Hierarchy,
}

impl Shape {
    /// A small pool of three tiers.
    #[must_use]
    pub const fn small(medium: SimMedium) -> Self {
        Self {
            medium,
            nvm_bytes: 16 * MIB,
            journal_bytes: 512 << 10,
            blocks_bytes: 8 * MIB,
            policy: Policy::Scatter,
        }
    }

    /// A smaller one, of which an image is checked faster.
    #[must_use]
    pub const fn tiny(medium: SimMedium) -> Self {
        Self {
            medium,
            nvm_bytes: 6 * MIB,
            journal_bytes: 256 << 10,
            blocks_bytes: 4 * MIB,
            policy: Policy::Scatter,
        }
    }

    /// The same pool with another policy.
    #[must_use]
    pub const fn with(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }
}

/// Why a pool could not be taken into service, or is not sound.
#[derive(Debug, thiserror::Error)]
pub enum RigError {
    /// The store.
    #[error("store: {0}")]
    Store(#[from] StoreError),
    /// The daemon.
    #[error("daemon: {0}")]
    Kernel(#[from] KernelError),
    /// A mount.
    #[error("mount: {0}")]
    Mount(#[from] MountError),
    /// Structures or data are damaged.
    #[error("check: {0}")]
    Check(String),
}

/// See [`Policy::Scatter`] and [`Policy::Rotate`].
struct Scatter {
    rotate: bool,
}

/// Most files that one step of rotation looks at.
const ROTATED_MAX: usize = 64;

impl Placement for Scatter {
    fn target(&self, key: InodeKey, bytes: u64, space: &SpaceStats) -> DataTarget {
        let there: Vec<_> = Tier::ALL
            .into_iter()
            .filter(|tier| space.tiers[*tier as usize].total > 0)
            .collect();
        let dice = key.ino.0.wrapping_mul(0x9e37_79b9).wrapping_add(bytes / 4096);
        // NVM most often: only there is metadata and data side by side.
        let tier = there.get((dice % 5) as usize).copied().unwrap_or(Tier::Nvm);
        DataTarget::prefer(tier).with_reserve()
    }

    fn plan(&self, _: &SpaceStats, catalog: &dyn Catalog, most: u64) -> Vec<Job> {
        let mut jobs = Vec::new();
        if !self.rotate {
            return jobs;
        }
        let (files, _) = catalog.files(Ino(0), ROTATED_MAX);
        let mut left = most;
        for from in Tier::ALL {
            let mut moves = Vec::new();
            for key in &files {
                for extent in catalog.extents(*key, FileBlock(0), ROTATED_MAX) {
                    if extent.tier == from && u64::from(extent.len) <= left {
                        left -= u64::from(extent.len);
                        moves.push(Move {
                            key: *key,
                            at: extent.file_block,
                            len: extent.len,
                            block: extent.block,
                        });
                    }
                }
            }
            jobs.push(Job {
                from,
                to: Tier::ALL[(from as usize + 1) % Tier::ALL.len()],
                cause: Cause::Full,
                moves,
                waiting: None,
            });
        }
        jobs
    }
}

/// A session that the daemon knows.
#[derive(Clone)]
struct Seat {
    id: SessionId,
    mount: usize,
    upcalls: Arc<UpcallQueue>,
}

#[derive(Default)]
struct Gate {
    kernel: Option<Arc<KernelFs>>,
    sessions: Vec<Seat>,
    /// Mounts whose process is stopped.
    frozen: BTreeSet<usize>,
}

/// Where sessions find the daemon of the moment.
struct Door {
    gate: Mutex<Gate>,
    clock: Arc<RigClock>,
    /// Stores of clients to their logs until one of them finds its session sealed; 0: none will.
    amid: AtomicU64,
}

impl Door {
    fn lock(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A clock that tests move. While a client is stopped, each look at it takes a tenth of a second: whoever waits for that client waits long
/// enough, in a time that does not depend on the machine.
pub struct RigClock {
    manual: ManualClock,
    hung: AtomicBool,
}

impl RigClock {
    /// Moves the clock on.
    pub fn advance_ms(&self, ms: u64) {
        self.manual.advance_ms(ms);
    }
}

impl Clock for RigClock {
    fn now_ns(&self) -> varve_format::TimeNs {
        self.manual.now_ns()
    }

    fn monotonic_ms(&self) -> u64 {
        if self.hung.load(Ordering::Relaxed) {
            self.manual.advance_ms(100);
        }
        self.manual.monotonic_ms()
    }
}

struct DoorLink {
    door: Arc<Door>,
    mount: usize,
    kernel: Weak<KernelFs>,
    session: SessionId,
    upcalls: Arc<UpcallQueue>,
}

fn gone() -> IpcError {
    IpcError::Gone("the daemon was killed".into())
}

impl Link for DoorLink {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        self.kernel
            .upgrade()
            .ok_or_else(gone)?
            .call_session(self.session, request)
    }

    fn upcall(&self, timeout: Duration) -> Result<Option<Upcall>, IpcError> {
        // A stopped process does not hear of a broken connection either.
        if self.door.lock().frozen.contains(&self.mount) {
            std::thread::sleep(timeout.min(Duration::from_millis(1)));
            return Ok(None);
        }
        self.upcalls.pop(timeout)
    }
}

/// A client's log, during a store to which its session is sealed: what another thread, or another client's want, may do at any moment.
struct AmidLog {
    inner: Arc<dyn Region>,
    door: Arc<Door>,
    session: SessionId,
}

impl AmidLog {
    fn before_store(&self) {
        if self.door.amid.load(Ordering::Relaxed) > 0
            && self.door.amid.fetch_sub(1, Ordering::Relaxed) == 1
            && let Some(kernel) = self.door.lock().kernel.clone()
        {
            kernel.gone(self.session);
        }
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
        self.before_store();
        self.inner.write(off, src)
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        self.before_store();
        self.inner.write_crc(off, src, seed)
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

/// The way in of one mount.
struct Entrance {
    door: Arc<Door>,
    mount: usize,
}

impl Drop for DoorLink {
    fn drop(&mut self) {
        if let Some(kernel) = self.kernel.upgrade() {
            kernel.gone(self.session);
        }
    }
}

impl Connector for Entrance {
    fn connect(&self, hello: Hello) -> Result<Connection, IpcError> {
        let kernel = self.door.lock().kernel.clone().ok_or_else(gone)?;
        let opened = kernel.open_session(Peer::this_process(), hello)?;
        let id = opened.welcome.session;
        let mut gate = self.door.lock();
        gate.sessions.retain(|seat| !seat.upcalls.is_closed());
        gate.sessions.push(Seat {
            id,
            mount: self.mount,
            upcalls: Arc::clone(&opened.upcalls),
        });
        Ok(Connection {
            link: Arc::new(DoorLink {
                door: Arc::clone(&self.door),
                mount: self.mount,
                kernel: Arc::downgrade(&kernel),
                session: id,
                upcalls: opened.upcalls,
            }),
            welcome: opened.welcome,
            page: opened.page as Arc<dyn SessionPage>,
            log: opened.log.map(|inner| {
                Arc::new(AmidLog {
                    inner,
                    door: Arc::clone(&self.door),
                    session: id,
                }) as Arc<dyn Region>
            }),
            nvm: opened.nvm,
        })
    }
}

/// A pool with its daemon.
pub struct Rig {
    /// The machine.
    pub world: SimWorld,
    /// Time.
    pub clock: Arc<RigClock>,
    shape: Shape,
    logs: Arc<SimLogs>,
    faults: Option<Faults>,
    config: Config,
    door: Arc<Door>,
    mounts: AtomicUsize,
    tokens: Arc<AtomicU64>,
}

/// A mount of a rig, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MountNo(usize);

/// The devices of a pool on a machine that nobody serves.
///
/// # Errors
/// One is missing.
pub fn devices(world: &SimWorld) -> Result<Devices, RigError> {
    let region = |name: &str| {
        world
            .region(name)
            .ok_or_else(|| RigError::Check(format!("the device {name} is gone")))
    };
    Ok(Devices {
        nvm: region("nvm")?,
        journal: region("journal")?,
        ssd: world.block("ssd").map(|device| device as _),
        hdd: world.block("hdd").map(|device| device as _),
    })
}

/// What goes wrong with which medium of a rig. Scripts are shared: a test fills them while the pool is in use. A restart of the daemon begins
/// with devices that have not failed yet.
#[derive(Clone, Default)]
pub struct Faults {
    /// NVM.
    pub nvm: FaultScript,
    /// Journal.
    pub journal: FaultScript,
    /// Logs of all sessions.
    pub log: FaultScript,
    /// SSD.
    pub ssd: FaultScript,
    /// HDD.
    pub hdd: FaultScript,
}

impl Faults {
    fn over(&self, devices: Devices) -> Devices {
        let region = |inner, script: &FaultScript| Arc::new(FaultyRegion::new(inner, script.clone())) as _;
        let block = |inner, script: &FaultScript| Arc::new(FaultyDevice::new(inner, script.clone())) as _;
        Devices {
            nvm: region(devices.nvm, &self.nvm),
            journal: region(devices.journal, &self.journal),
            ssd: devices.ssd.map(|device| block(device, &self.ssd)),
            hdd: devices.hdd.map(|device| block(device, &self.hdd)),
        }
    }

    /// Nothing goes wrong any more (what has failed stays so until the next start).
    pub fn clear(&self) {
        [&self.nvm, &self.journal, &self.log, &self.ssd, &self.hdd]
            .iter()
            .for_each(|script| script.clear());
    }

    /// Faults that have happened.
    #[must_use]
    pub fn fired(&self) -> u64 {
        [&self.nvm, &self.journal, &self.log, &self.ssd, &self.hdd]
            .iter()
            .map(|script| script.fired())
            .sum()
    }
}

/// Logs on media that fail.
struct FaultyLogs {
    inner: Arc<SimLogs>,
    script: FaultScript,
}

impl FaultyLogs {
    fn over(&self, log: Arc<dyn Region>) -> Arc<dyn Region> {
        Arc::new(FaultyRegion::new(log, self.script.clone()))
    }
}

impl LogStore for FaultyLogs {
    fn create(&self, session: SessionId, log_bytes: Option<(u64, u64)>) -> Result<SessionArea, MediaError> {
        let area = self.inner.create(session, log_bytes)?;
        Ok(SessionArea {
            log: area.log.map(|log| self.over(log)),
            ..area
        })
    }

    fn pages(&self) -> Result<Vec<Arc<Page>>, MediaError> {
        self.inner.pages()
    }

    fn open(&self, session: SessionId) -> Result<Option<Arc<dyn Region>>, MediaError> {
        Ok(self.inner.open(session)?.map(|log| self.over(log)))
    }

    fn list(&self) -> Result<Vec<SessionId>, MediaError> {
        self.inner.list()
    }

    fn remove(&self, session: SessionId) {
        self.inner.remove(session);
    }

    fn needs_sync(&self) -> bool {
        self.inner.needs_sync()
    }
}

impl Rig {
    /// Makes a pool and takes it into service; past the grace time.
    ///
    /// # Errors
    /// Of the store and the daemon.
    pub fn new(shape: Shape) -> Result<Self, RigError> {
        let world = SimWorld::new();
        world.add_region("nvm", shape.medium, shape.nvm_bytes, shape.nvm_bytes);
        world.add_region("journal", shape.medium, shape.journal_bytes, shape.journal_bytes);
        if shape.blocks_bytes > 0 {
            world.add_block("ssd", shape.blocks_bytes);
            world.add_block("hdd", shape.blocks_bytes);
        }
        let units = (shape.blocks_bytes > 0).then_some(64);
        let options = MkfsOptions {
            pool_uuid: [7; 16],
            dir_hash_key: [9; 16],
            now_ns: START_NS,
            ssd_unit_blocks: units,
            hdd_unit_blocks: units,
            ..MkfsOptions::default()
        };
        Store::mkfs(&devices(&world)?, &options)?;
        Self::start(world, shape)
    }

    /// Takes the pool on a machine into service after everything on it died: recovery.
    ///
    /// # Errors
    /// Of the store and the daemon.
    pub fn start(world: SimWorld, shape: Shape) -> Result<Self, RigError> {
        Self::start_on(world, shape, None)
    }

    /// The same on media that can be made to fail.
    ///
    /// # Errors
    /// Of the store and the daemon.
    pub fn start_with_faults(world: SimWorld, shape: Shape, faults: &Faults) -> Result<Self, RigError> {
        Self::start_on(world, shape, Some(faults.clone()))
    }

    fn start_on(world: SimWorld, shape: Shape, faults: Option<Faults>) -> Result<Self, RigError> {
        let seed = world.content_hash();
        let logs = Arc::new(SimLogs::new(world.clone(), shape.medium));
        let config = Config {
            min_hold_ms: 0,
            sync_ms: 0,
            log_initial_bytes: 2 * MIB,
            log_max_bytes: 64 * MIB,
            // A stopped client is waited for until it is late, whatever the machine does meanwhile.
            wait_ms: 600_000,
            placement_high_percent: 20,
            placement_low_percent: 10,
            placement_step_blocks: 64,
            ..Config::default()
        };
        let clock = Arc::new(RigClock {
            manual: ManualClock::new(START_NS + 1_000_000_000),
            hung: AtomicBool::new(false),
        });
        let rig = Self {
            world,
            clock: Arc::clone(&clock),
            shape,
            logs,
            faults,
            config,
            door: Arc::new(Door {
                gate: Mutex::default(),
                clock,
                amid: AtomicU64::new(0),
            }),
            mounts: AtomicUsize::new(0),
            // Other numbers than those that this pool gave out before.
            tokens: Arc::new(AtomicU64::new(seed)),
        };
        rig.raise()?;
        rig.settle();
        Ok(rig)
    }

    fn raise(&self) -> Result<(), RigError> {
        let devices = devices(&self.world)?;
        let (devices, logs) = match &self.faults {
            None => (devices, Arc::clone(&self.logs) as Arc<dyn LogStore>),
            Some(faults) => {
                let logs = FaultyLogs {
                    inner: Arc::clone(&self.logs),
                    script: faults.log.clone(),
                };
                (faults.over(devices), Arc::new(logs) as _)
            }
        };
        let (store, _) = Store::open(devices, OpenOptions::default())?;
        let mut parts = Parts::new(store, logs, self.config.clone(), Arc::clone(&self.clock) as _);
        // The same work leaves the same bytes.
        let tokens = Arc::clone(&self.tokens);
        parts.tokens = Some(Box::new(move || {
            u128::from(tokens.fetch_add(1, Ordering::Relaxed))
        }));
        match self.shape.policy {
            Policy::Scatter => parts.placement = Box::new(Scatter { rotate: false }),
            Policy::Rotate => parts.placement = Box::new(Scatter { rotate: true }),
            Policy::Hierarchy => {}
        }
        self.door.lock().kernel = Some(KernelFs::open(parts)?);
        Ok(())
    }

    /// Lets the grace time pass, and what waits for it happen.
    pub fn settle(&self) {
        self.clock.advance_ms(self.config.grace_ms + 1);
        self.kernel().tick();
    }

    /// The daemon.
    ///
    /// # Panics
    /// Between a kill and the next start, which no caller can see.
    #[must_use]
    pub fn kernel(&self) -> Arc<KernelFs> {
        match &self.door.lock().kernel {
            Some(kernel) => Arc::clone(kernel),
            None => unreachable!("there is a daemon except inside `restart`"),
        }
    }

    /// The shape of the pool.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// Kills the daemon without a word and starts another one on the same machine; sessions resume by themselves.
    ///
    /// # Errors
    /// Of the store and the new daemon.
    pub fn restart(&self) -> Result<(), RigError> {
        let (kernel, sessions) = {
            let mut gate = self.door.lock();
            (gate.kernel.take(), std::mem::take(&mut gate.sessions))
        };
        // Nobody gets at it from here on; what is inside ends first, since two daemons at once are not what is tested.
        let old = kernel.as_ref().map(Arc::downgrade);
        drop(kernel);
        sessions.iter().for_each(|seat| seat.upcalls.close());
        while old.as_ref().is_some_and(|kernel| kernel.strong_count() > 0) {
            std::thread::sleep(Duration::from_micros(50));
        }
        self.raise()
    }

    /// Cuts the connections of all sessions: their logs are sealed and digested, the clients resume.
    pub fn seal_all(&self) {
        self.cut(|_| true);
    }

    /// Cuts the connection of one mount: its log is sealed and digested. The client resumes if it is used again.
    pub fn seal(&self, mount: MountNo) {
        self.cut(|seat| seat.mount == mount.0);
    }

    fn cut(&self, which: impl Fn(&Seat) -> bool) {
        let sessions = self.door.lock().sessions.clone();
        let kernel = self.kernel();
        let cut = sessions.iter().filter(|seat| which(seat));
        cut.for_each(|seat| kernel.gone(seat.id));
    }

    /// Seals the session whose client makes the `stores`-th store to a log from now on, just before that store.
    pub fn seal_before_store(&self, stores: u64) {
        self.door.amid.store(stores, Ordering::Relaxed);
    }

    /// Stops the process of a mount (it hears nothing), or continues it. Others that wait for it do not wait in real time.
    pub fn freeze(&self, mount: MountNo, frozen: bool) {
        let mut gate = self.door.lock();
        if frozen {
            gate.frozen.insert(mount.0);
        } else {
            gate.frozen.remove(&mount.0);
        }
        self.door
            .clock
            .hung
            .store(!gate.frozen.is_empty(), Ordering::Relaxed);
    }

    /// A new session.
    ///
    /// # Errors
    /// Of the daemon.
    pub fn mount(&self) -> Result<Fs, RigError> {
        self.mount_no().map(|(fs, _)| fs)
    }

    /// A new session, and its number.
    ///
    /// # Errors
    /// Of the daemon.
    pub fn mount_no(&self) -> Result<(Fs, MountNo), RigError> {
        let mount = self.mounts.fetch_add(1, Ordering::Relaxed);
        let options = FsOptions {
            kind: ClientKind::Linked,
            clock: Arc::clone(&self.clock) as _,
            ..FsOptions::default()
        };
        let entrance = Entrance {
            door: Arc::clone(&self.door),
            mount,
        };
        Ok((Fs::mount(Arc::new(entrance), options)?, MountNo(mount)))
    }

    /// Requires that all structures are sound, and that data matches its checksums.
    ///
    /// # Errors
    /// What is found.
    pub fn check(&self) -> Result<(), RigError> {
        let kernel = self.kernel();
        let mut findings = kernel.store().check()?;
        findings.extend(kernel.store().check_data()?);
        if findings.is_empty() {
            return Ok(());
        }
        findings.truncate(8);
        Err(RigError::Check(format!("{findings:?}")))
    }
}
