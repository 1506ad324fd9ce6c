//! A whole pool in one process on a simulated machine: store, daemon, sessions; a manual clock, no background
//! threads of the daemon. Owns starting, killing, and the machine's crash; refuses to know the work in
//! between.

use crate::turns::Turns;
use crate::wire::{Ambush, Door, Entrance, RigClock, Seat, Weather};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use varve_format::{FileBlock, Ino, SessionId, Tier};
use varve_ipc::{ClientKind, ManualClock, Page, Service};
use varve_kernelfs::placement::{At, Catalog, Cause, Job, Move, Placement, Written};
use varve_kernelfs::{Config, KernelError, KernelFs, LogStore, Parts, PolicyName, SessionArea, SimLogs};
use varve_libfs::{Fs, FsOptions, MountError};
use varve_media::BlockDevice;
use varve_media::faulty::{FaultScript, FaultyDevice, FaultyRegion};
use varve_media::sim::{SimMedium, SimWorld};
use varve_media::{MediaError, Region};
use varve_store::{DataTarget, Devices, MkfsOptions, OpenOptions, SpaceStats, Store, StoreError};

const START_NS: i64 = 1_700_000_000_000_000_000;
const MIB: u64 = 1 << 20;

/// Sizes and media of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Rules of the media of NVM, journal and logs.
    pub medium: SimMedium,
    /// Bytes of NVM.
    pub nvm_bytes: u64,
    /// Bytes of the journal.
    pub journal_bytes: u64,
    /// Bytes of the SSD and of the HDD; 0: there is neither.
    pub blocks_bytes: u64,
    /// Placement of data.
    pub policy: Policy,
    /// `verify_nvm_reads` of the daemon's settings.
    pub verify_nvm: bool,
}

/// Placement of new data, and moves between tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// New data of every inode goes to one of the tiers, so that all of them are in use; nothing moves.
    Scatter,
    /// As [`Self::Scatter`], and each step of placement moves data to the next tier, cyclically.
    Rotate,
    /// The product's policy of this name, with low watermarks, so that a small pool has data to move.
    Hierarchy,
    /// As [`Self::Hierarchy`].
    Measured,
    /// As [`Self::Hierarchy`].
    Wardrop,
    /// As [`Self::Hierarchy`].
    Balance,
    /// The product's policy with its own watermarks and steps: a tier is full at 95 percent.
    Product,
    /// New data goes to SSD and HDD in turn while they have room; nothing moves.
    Slow,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 8] = [
        Self::Scatter,
        Self::Rotate,
        Self::Hierarchy,
        Self::Measured,
        Self::Wardrop,
        Self::Balance,
        Self::Product,
        Self::Slow,
    ];

    /// The product's policy, if it is one.
    const fn name(self) -> Option<PolicyName> {
        match self {
            Self::Hierarchy | Self::Product => Some(PolicyName::Hierarchy),
            Self::Measured => Some(PolicyName::Measured),
            Self::Wardrop => Some(PolicyName::Wardrop),
            Self::Balance => Some(PolicyName::Balance),
            Self::Scatter | Self::Rotate | Self::Slow => None,
        }
    }

    /// Daemon settings, of which only those of placement are used.
    fn config(self) -> Config {
        match self {
            Self::Product => Config::default(),
            _ => Config {
                placement_policy: self.name().unwrap_or_default(),
                placement_high_percent: 20,
                placement_low_percent: 10,
                placement_step_blocks: 64,
                ..Config::default()
            },
        }
    }
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
            verify_nvm: false,
        }
    }

    /// A smaller pool, whose images are checked faster.
    #[must_use]
    pub const fn tiny(medium: SimMedium) -> Self {
        Self {
            medium,
            nvm_bytes: 6 * MIB,
            journal_bytes: 256 << 10,
            blocks_bytes: 4 * MIB,
            policy: Policy::Scatter,
            verify_nvm: false,
        }
    }

    /// This shape, with reads of NVM verified by checksums.
    #[must_use]
    pub const fn verifying(self) -> Self {
        Self {
            verify_nvm: true,
            ..self
        }
    }

    /// This shape with another policy.
    #[must_use]
    pub const fn with(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }
}

/// Reason why a pool could not be started, or is not sound.
#[derive(Debug, thiserror::Error)]
pub enum RigError {
    /// Error of the store.
    #[error("store: {0}")]
    Store(#[from] StoreError),
    /// Error of the daemon.
    #[error("daemon: {0}")]
    Kernel(#[from] KernelError),
    /// Error of a mount.
    #[error("mount: {0}")]
    Mount(#[from] MountError),
    /// Structures or data are damaged.
    #[error("check: {0}")]
    Check(String),
}

/// The placement of [`Policy::Slow`].
struct Slow;

impl Placement for Slow {
    fn target(&self, data: &Written, _: &SpaceStats) -> DataTarget {
        DataTarget::prefer([Tier::Ssd, Tier::Hdd][(data.key.ino.0 % 2) as usize]).with_reserve()
    }

    fn plan(&self, _: &SpaceStats, _: &dyn Catalog, _: u64) -> Vec<Job> {
        Vec::new()
    }
}

/// The placement of [`Policy::Scatter`] and [`Policy::Rotate`].
struct Scatter {
    rotate: bool,
}

/// Most files that one step of rotation examines.
const ROTATED_MAX: usize = 64;

impl Placement for Scatter {
    fn target(&self, data: &Written, space: &SpaceStats) -> DataTarget {
        let there: Vec<_> = Tier::ALL
            .into_iter()
            .filter(|tier| space.tiers[*tier as usize].total > 0)
            .collect();
        let dice = data
            .key
            .ino
            .0
            .wrapping_mul(0x9e37_79b9)
            .wrapping_add(data.bytes / 4096);
        // NVM most often: only NVM holds metadata and data side by side.
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
                for part in catalog.extents(*key, FileBlock(0), ROTATED_MAX) {
                    let extent = part.extent;
                    if extent.tier == from && u64::from(extent.len) <= left {
                        left -= u64::from(extent.len);
                        moves.push(Move {
                            at: At::of(*key, &part),
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
                of: None,
                moves,
                waiting: None,
            });
        }
        jobs
    }
}

/// A pool with its daemon.
pub struct Rig {
    /// The simulated machine.
    pub world: SimWorld,
    /// The clock.
    pub clock: Arc<RigClock>,
    /// The scheduler of threads.
    pub turns: Arc<Turns>,
    shape: Shape,
    logs: Arc<SimLogs>,
    faults: Option<Faults>,
    config: Config,
    door: Arc<Door>,
    mounts: AtomicUsize,
    tokens: Arc<AtomicU64>,
}

/// Number of a mount of a rig.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MountNo(usize);

impl MountNo {
    /// Number of its process in [`Turns`].
    #[must_use]
    pub const fn number(self) -> usize {
        self.0
    }
}

/// Opens the devices of a pool on a machine without a daemon.
///
/// # Errors
/// A device is missing.
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
        more: more(world),
    })
}

/// Further devices of the tiers.
fn more(world: &SimWorld) -> Vec<(Tier, Arc<dyn BlockDevice>)> {
    let named = [(Tier::Ssd, "ssd-2"), (Tier::Hdd, "hdd-2")];
    let there = named
        .into_iter()
        .filter_map(|(tier, name)| Some((tier, world.block(name)? as _)));
    there.collect()
}

/// Faults of each medium of a rig. Scripts are shared: a test fills them while the pool is in use. A restart
/// of the daemon begins with devices that have not failed yet.
#[derive(Clone, Default)]
pub struct Faults {
    /// Faults of NVM.
    pub nvm: FaultScript,
    /// Faults of the journal.
    pub journal: FaultScript,
    /// Faults of the logs of all sessions.
    pub log: FaultScript,
    /// Faults of the SSD.
    pub ssd: FaultScript,
    /// Faults of the HDD.
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
            more: devices.more,
        }
    }

    /// Removes all faults (a failed device stays failed until the next start).
    pub fn clear(&self) {
        [&self.nvm, &self.journal, &self.log, &self.ssd, &self.hdd]
            .iter()
            .for_each(|script| script.clear());
    }

    /// Number of faults that have happened.
    #[must_use]
    pub fn fired(&self) -> u64 {
        [&self.nvm, &self.journal, &self.log, &self.ssd, &self.hdd]
            .iter()
            .map(|script| script.fired())
            .sum()
    }
}

/// Logs on faulty media.
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
    fn create(
        &self,
        session: SessionId,
        log_bytes: Option<(u64, u64)>,
        privileged: bool,
    ) -> Result<SessionArea, MediaError> {
        let area = self.inner.create(session, log_bytes, privileged)?;
        Ok(SessionArea {
            log: area.log.map(|log| self.over(log)),
            ..area
        })
    }

    fn start(&self, session: SessionId, log: &dyn Region, len_bytes: u64) -> Result<(), MediaError> {
        self.inner.start(session, log, len_bytes)
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

    fn remove_log(&self, session: SessionId) {
        self.inner.remove_log(session);
    }

    fn needs_sync(&self) -> bool {
        self.inner.needs_sync()
    }
}

impl Rig {
    /// Makes a pool and starts it; returns after the grace time.
    ///
    /// # Errors
    /// Errors of the store and the daemon.
    pub fn new(shape: Shape) -> Result<Self, RigError> {
        Self::scheduled(shape, 0)
    }

    /// As [`new`](Self::new), with the turns drawn from `schedule`.
    ///
    /// # Errors
    /// Errors of the store and the daemon.
    pub fn scheduled(shape: Shape, schedule: u64) -> Result<Self, RigError> {
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
        Self::start_on(world, shape, None, schedule)
    }

    /// Attaches a second device of each slower tier to the machine; it is no part of the pool.
    pub fn attach_more(&self) {
        let bytes = self.shape.blocks_bytes;
        for name in ["ssd-2", "hdd-2"] {
            if bytes > 0 && self.world.block(name).is_none() {
                self.world.add_block(name, bytes);
            }
        }
    }

    /// Starts the pool on a machine after everything on it died: recovery.
    ///
    /// # Errors
    /// Errors of the store and the daemon.
    pub fn start(world: SimWorld, shape: Shape) -> Result<Self, RigError> {
        Self::start_on(world, shape, None, 0)
    }

    /// As [`start`](Self::start), on media that can be made to fail.
    ///
    /// # Errors
    /// Errors of the store and the daemon.
    pub fn start_with_faults(world: SimWorld, shape: Shape, faults: &Faults) -> Result<Self, RigError> {
        Self::start_on(world, shape, Some(faults.clone()), 0)
    }

    fn start_on(
        world: SimWorld,
        shape: Shape,
        faults: Option<Faults>,
        schedule: u64,
    ) -> Result<Self, RigError> {
        let seed = world.content_hash();
        let logs = Arc::new(SimLogs::new(world.clone(), shape.medium));
        let config = Config {
            min_hold_ms: 0,
            sync_ms: 0,
            log_initial_bytes: 2 * MIB,
            // Enough chunks that each thread of the process has a lane of its own: with fewer, the threads of
            // other tests would matter.
            log_max_bytes: 256 * MIB,
            digest_percent: 5,
            // Long enough that a stopped client is waited for until it is late, however slow the machine is.
            wait_ms: 600_000,
            verify_nvm_reads: shape.verify_nvm.into(),
            ..shape.policy.config()
        };
        let manual = Arc::new(ManualClock::new(START_NS + 1_000_000_000));
        let turns = Turns::new(schedule, Arc::clone(&manual));
        let clock = Arc::new(RigClock::new(manual, Arc::clone(&turns), None));
        let rig = Self {
            world,
            clock,
            turns: Arc::clone(&turns),
            shape,
            logs,
            faults,
            config,
            door: Arc::new(Door::new(turns)),
            mounts: AtomicUsize::new(0),
            // Other numbers than this pool gave out before.
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
        // Deterministic, so that equal work leaves equal bytes.
        let tokens = Arc::clone(&self.tokens);
        parts.tokens = Some(Box::new(move || {
            u128::from(tokens.fetch_add(1, Ordering::Relaxed))
        }));
        match self.shape.policy {
            Policy::Scatter => parts.placement = Box::new(Scatter { rotate: false }),
            Policy::Rotate => parts.placement = Box::new(Scatter { rotate: true }),
            Policy::Slow => parts.placement = Box::new(Slow),
            policy => debug_assert!(policy.name().is_some(), "the settings name it"),
        }
        let kernel = KernelFs::open(parts)?;
        let mut gate = self.door.lock();
        gate.kernel = Some(kernel);
        gate.daemons += 1;
        Ok(())
    }

    /// Lets the grace time pass, and runs the work that waits for it.
    pub fn settle(&self) {
        self.clock.advance_ms(self.config.grace_ms + 1);
        self.kernel().tick();
    }

    /// Lets threads run until all of them wait.
    pub fn rest(&self) {
        let now_ms = || varve_ipc::Clock::monotonic_ms(&*self.clock);
        let until_ms = now_ms() + 1;
        while now_ms() < until_ms {
            // Time advances only when no thread can run.
            self.turns.pause(Duration::from_millis(1));
        }
    }

    /// The daemon.
    ///
    /// # Panics
    /// Between a kill and the next start, which no caller can observe.
    #[must_use]
    pub fn kernel(&self) -> Arc<KernelFs> {
        match &self.door.lock().kernel {
            Some(kernel) => Arc::clone(kernel),
            None => unreachable!("there is a daemon except inside `restart`"),
        }
    }

    /// The daemon, if one is running.
    #[must_use]
    pub fn kernel_if_any(&self) -> Option<Arc<KernelFs>> {
        self.door.lock().kernel.clone()
    }

    /// The shape of the pool.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// Kills the daemon without notice and starts another one on the same machine; sessions resume by
    /// themselves.
    ///
    /// # Errors
    /// Errors of the store and the new daemon.
    pub fn restart(&self) -> Result<(), RigError> {
        self.kill();
        self.raise()
    }

    /// Kills the daemon without notice: its work for clients ends at the next point where it waits.
    /// [`restart`](Self::restart) starts another.
    pub fn kill(&self) {
        let (kernel, sessions, number) = {
            let mut gate = self.door.lock();
            let sessions = std::mem::take(&mut gate.sessions);
            (gate.kernel.take(), sessions, gate.daemons)
        };
        // From here on no thread reaches it, and all of it is gone before the next one starts.
        let old = kernel.as_ref().map(Arc::downgrade);
        drop(kernel);
        sessions.iter().for_each(Seat::close);
        self.turns.kill_daemons(number);
        while old.as_ref().is_some_and(|kernel| kernel.strong_count() > 0) {
            self.turns.pause(Duration::from_millis(1));
        }
    }

    /// Cuts the connections of all sessions: their logs are sealed and digested, the clients resume.
    pub fn seal_all(&self) {
        self.cut(|_| true);
    }

    /// Cuts the connection of one mount: its log is sealed and digested. The client resumes at its next use.
    pub fn seal(&self, mount: MountNo) {
        self.cut(|seat| seat.mount == mount.0);
    }

    fn cut(&self, which: impl Fn(&Seat) -> bool) {
        let sessions = self.door.lock().sessions.clone();
        let kernel = self.kernel();
        let cut = sessions.iter().filter(|seat| which(seat));
        cut.for_each(|seat| kernel.gone(seat.id));
    }

    /// Seals a session just before the `stores`-th store from now on that any client makes to its log: the
    /// session of that client.
    pub fn seal_before_store(&self, stores: u64) {
        self.door.amid.store(stores, Ordering::Relaxed);
    }

    /// Stops or continues the process of a mount. Time advances when all others wait for it.
    pub fn freeze(&self, mount: MountNo, frozen: bool) {
        self.turns.tell(|| format!("{mount:?} is stopped: {frozen}"));
        self.turns.stop(mount.0, frozen);
    }

    /// Kills the client of a mount: its call in progress never returns, and its connection breaks.
    pub fn die(&self, mount: MountNo) {
        self.turns.tell(|| format!("{mount:?} dies"));
        self.door.lock().dead.insert(mount.0);
        self.turns.stop(mount.0, false);
        self.seal(mount);
    }

    /// Arms `ambush` for the process of a mount, before the `stores`-th store to its log from now on.
    pub fn lie_in_wait(&self, mount: MountNo, stores: u64, ambush: Ambush) {
        self.door.lock().ambushes.insert(mount.0, (stores.max(1), ambush));
    }

    /// Disarms all ambushes.
    pub fn spring_no_ambush(&self) {
        self.door.lock().ambushes.clear();
    }

    /// Whether the process of a mount is stopped.
    #[must_use]
    pub fn is_stopped(&self, mount: MountNo) -> bool {
        self.turns.is_stopped(mount.0)
    }

    /// Whether the client of a mount is dead.
    #[must_use]
    pub fn is_dead(&self, mount: MountNo) -> bool {
        self.door.lock().dead.contains(&mount.0)
    }

    /// Sets the fates of messages from now on.
    pub fn set_weather(&self, weather: Weather) {
        self.door.lock().weather = weather;
    }

    /// Number of messages lost with their connections so far.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.door.lock().lost
    }

    /// Number of the current daemon.
    #[must_use]
    pub fn daemon(&self) -> u64 {
        self.door.lock().daemons
    }

    /// Opens a new session.
    ///
    /// # Errors
    /// Errors of the daemon.
    pub fn mount(&self) -> Result<Fs, RigError> {
        self.mount_no().map(|(fs, _)| fs)
    }

    /// Opens a new session; also returns its number.
    ///
    /// # Errors
    /// Errors of the daemon.
    pub fn mount_no(&self) -> Result<(Fs, MountNo), RigError> {
        self.mount_as(FsOptions {
            kind: ClientKind::Linked,
            ..FsOptions::default()
        })
    }

    /// Opens a new session with these options; also returns its number. The clock is the rig's.
    ///
    /// # Errors
    /// Errors of the daemon.
    pub fn mount_as(&self, options: FsOptions) -> Result<(Fs, MountNo), RigError> {
        let mount = self.mounts.fetch_add(1, Ordering::Relaxed);
        let options = FsOptions {
            clock: Arc::new(self.clock.of(mount)),
            ..options
        };
        let entrance = Entrance {
            door: Arc::clone(&self.door),
            mount,
        };
        Ok((Fs::mount(Arc::new(entrance), options)?, MountNo(mount)))
    }

    /// Requires that the reservations of all sessions equal the blocks that these clients may still use;
    /// `clients` must include all of them. Digests all logs.
    ///
    /// # Errors
    /// Both numbers, or the digest's error.
    pub fn check_reservations<'f>(&self, clients: impl Iterator<Item = &'f Fs>) -> Result<(), RigError> {
        let kernel = self.kernel();
        kernel.digest_all().map_err(KernelError::from)?;
        let left: u64 = clients.map(|fs| fs.counters().credits).sum();
        let reserved: u64 = kernel.status().sessions.iter().map(|s| s.credits).sum();
        if left == reserved {
            return Ok(());
        }
        Err(RigError::Check(format!(
            "{reserved} blocks are reserved for sessions, which count with {left}"
        )))
    }

    /// Requires that all structures are sound, and that data matches its checksums.
    ///
    /// # Errors
    /// The damage found.
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

impl Drop for Rig {
    fn drop(&mut self) {
        self.turns.end();
    }
}
