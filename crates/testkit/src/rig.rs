//! A whole pool in one process on a simulated machine: store, daemon, sessions; a manual clock, no background threads of the daemon. Owns
//! starting, killing, and the machine's crash; refuses to know what is done in between.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use varve_format::{InodeKey, SessionId, Tier};
use varve_ipc::{
    ClientKind, Hello, IpcError, Link, ManualClock, Peer, Request, Response, Service, SessionPage, Upcall,
    UpcallQueue,
};
use varve_kernelfs::digest::Placement;
use varve_kernelfs::{Config, KernelError, KernelFs, Parts, SimLogs};
use varve_libfs::{Connection, Connector, Fs, FsOptions, MountError};
use varve_media::sim::{SimMedium, SimWorld};
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
        }
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

/// New data of every inode to one of the tiers, so that all of them are in use.
struct Scatter;

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
}

#[derive(Default)]
struct Gate {
    kernel: Option<Arc<KernelFs>>,
    sessions: Vec<(SessionId, Arc<UpcallQueue>)>,
}

/// Where sessions find the daemon of the moment.
#[derive(Default)]
struct Door(Mutex<Gate>);

impl Door {
    fn lock(&self) -> MutexGuard<'_, Gate> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct DoorLink {
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
        self.upcalls.pop(timeout)
    }
}

impl Drop for DoorLink {
    fn drop(&mut self) {
        if let Some(kernel) = self.kernel.upgrade() {
            kernel.gone(self.session);
        }
    }
}

impl Connector for Door {
    fn connect(&self, hello: Hello) -> Result<Connection, IpcError> {
        let kernel = self.lock().kernel.clone().ok_or_else(gone)?;
        let opened = kernel.open_session(Peer::this_process(), hello)?;
        let session = opened.welcome.session;
        let mut gate = self.lock();
        gate.sessions.retain(|(_, upcalls)| !upcalls.is_closed());
        gate.sessions.push((session, Arc::clone(&opened.upcalls)));
        Ok(Connection {
            link: Arc::new(DoorLink {
                kernel: Arc::downgrade(&kernel),
                session,
                upcalls: opened.upcalls,
            }),
            welcome: opened.welcome,
            page: opened.page as Arc<dyn SessionPage>,
            log: opened.log,
            nvm: opened.nvm,
        })
    }
}

/// A pool with its daemon.
pub struct Rig {
    /// The machine.
    pub world: SimWorld,
    /// Time.
    pub clock: Arc<ManualClock>,
    shape: Shape,
    logs: Arc<SimLogs>,
    config: Config,
    door: Arc<Door>,
    restarts: AtomicUsize,
}

fn devices(world: &SimWorld) -> Result<Devices, RigError> {
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
        let logs = Arc::new(SimLogs::new(world.clone(), shape.medium));
        let config = Config {
            min_hold_ms: 0,
            sync_ms: 0,
            log_initial_bytes: 2 * MIB,
            log_max_bytes: 8 * MIB,
            ..Config::default()
        };
        let rig = Self {
            world,
            clock: Arc::new(ManualClock::new(START_NS + 1_000_000_000)),
            shape,
            logs,
            config,
            door: Arc::default(),
            restarts: AtomicUsize::new(0),
        };
        rig.raise()?;
        rig.settle();
        Ok(rig)
    }

    fn raise(&self) -> Result<(), RigError> {
        let (store, _) = Store::open(devices(&self.world)?, OpenOptions::default())?;
        let mut parts = Parts::new(
            store,
            Arc::clone(&self.logs) as _,
            self.config.clone(),
            Arc::clone(&self.clock) as _,
        );
        parts.placement = Box::new(Scatter);
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
        sessions.iter().for_each(|(_, upcalls)| upcalls.close());
        while old.as_ref().is_some_and(|kernel| kernel.strong_count() > 0) {
            std::thread::sleep(Duration::from_micros(50));
        }
        self.restarts.fetch_add(1, Ordering::Relaxed);
        self.raise()
    }

    /// Cuts the connections of all sessions: their logs are sealed and digested, the clients resume.
    pub fn seal_all(&self) {
        let sessions = self.door.lock().sessions.clone();
        let kernel = self.kernel();
        sessions.iter().for_each(|(id, _)| kernel.gone(*id));
    }

    /// A new session.
    ///
    /// # Errors
    /// Of the daemon.
    pub fn mount(&self) -> Result<Fs, RigError> {
        let options = FsOptions {
            kind: ClientKind::Linked,
            clock: Arc::clone(&self.clock) as _,
            ..FsOptions::default()
        };
        Ok(Fs::mount(Arc::clone(&self.door) as _, options)?)
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
