//! A pool in a simulated machine, and a tiny client that speaks the protocol and writes log entries.
#![allow(clippy::unwrap_used, dead_code)]

pub mod files;
pub mod timed;

use std::sync::Arc;
use std::time::Duration;
use varve_format::log::{CHUNK_BYTES, LIVE_HEADER_SIZE, crc_seed, entry_crc, entry_size, payload_crc};
use varve_format::{EntryFlags, EntryMeta, InodeAttr, InodeKey, LeaseNo, LogOp, LogSeq, SessionId};
use varve_ipc::{
    ClientKind, Cred, ForwardedOp, ForwardedResult, Grant, Hello, InprocLink, IpcError, LeaseMode, Link,
    ManualClock, PROTOCOL_VERSION, Page, PageState, Peer, ReleaseItem, Request, Response, SessionPage,
    Upcall, Want, Welcome,
};
use varve_kernelfs::{Config, KernelFs, Parts, SimLogs};
use varve_media::Region;
use varve_media::sim::{SimMedium, SimWorld};
use varve_placement::rules::Rules;
use varve_store::{Devices, MkfsOptions, OpenOptions, Store};
use zerocopy::IntoBytes;

pub const ROOT: InodeKey = InodeKey::ROOT;
pub const START_NS: i64 = 1_700_000_000_000_000_000;

/// A machine with a pool, and its daemon.
pub struct World {
    pub sim: SimWorld,
    pub logs: Arc<SimLogs>,
    pub clock: Arc<ManualClock>,
    pub config: Config,
    pub kernel: Arc<KernelFs>,
}

impl World {
    pub fn new() -> Self {
        Self::with(Config {
            log_initial_bytes: CHUNK_BYTES,
            users: varve_kernelfs::Users::All,
            ..Config::default()
        })
    }

    pub fn with(config: Config) -> Self {
        Self::with_tiers(config, &[])
    }

    /// With block devices, `ssd` and `hdd`, of so many bytes.
    pub fn with_tiers(config: Config, devices_bytes: &[(&str, u64)]) -> Self {
        Self::with_rules(config, devices_bytes, Rules::default())
    }

    pub fn with_rules(config: Config, devices_bytes: &[(&str, u64)], rules: Rules) -> Self {
        let sim = SimWorld::new();
        for (name, bytes) in devices_bytes {
            sim.add_block(name, *bytes);
        }
        sim.add_region("nvm", SimMedium::Dax, 32 << 20, 32 << 20);
        sim.add_region("journal", SimMedium::Dax, 4 << 20, 4 << 20);
        let options = MkfsOptions {
            pool_uuid: [7; 16],
            now_ns: START_NS,
            ..MkfsOptions::default()
        };
        Store::mkfs(&devices(&sim), &options).unwrap();
        let logs = Arc::new(SimLogs::new(sim.clone(), SimMedium::Dax));
        let clock = Arc::new(ManualClock::new(START_NS + 1_000_000_000));
        let kernel = start_with(&sim, &logs, &clock, &config, rules);
        Self {
            sim,
            logs,
            clock,
            config,
            kernel,
        }
    }

    /// The daemon starts anew, and its block devices take their time.
    pub fn with_times(self, ssd_ms: u64, hdd_ms: u64) -> Self {
        let devices = timed::devices(devices(&self.sim), &self.clock, [ssd_ms, hdd_ms]);
        self.restart_on(devices)
    }

    /// The daemon dies without a word and another one starts.
    pub fn restart(self) -> Self {
        let devices = devices(&self.sim);
        self.restart_on(devices)
    }

    fn restart_on(self, devices: Devices) -> Self {
        let Self {
            sim,
            logs,
            clock,
            config,
            kernel,
        } = self;
        drop(kernel);
        let kernel = start_on_devices(devices, &logs, &clock, &config, Rules::default());
        Self {
            sim,
            logs,
            clock,
            config,
            kernel,
        }
    }

    /// The daemon on an image of this machine's media.
    pub fn start_on(sim: SimWorld, config: &Config) -> Self {
        let logs = Arc::new(SimLogs::new(sim.clone(), SimMedium::Dax));
        let clock = Arc::new(ManualClock::new(START_NS + 2_000_000_000));
        let kernel = start(&sim, &logs, &clock, config);
        Self {
            sim,
            logs,
            clock,
            config: config.clone(),
            kernel,
        }
    }

    pub fn client(&self) -> Client {
        self.client_as(Peer::this_process(), hello())
    }

    pub fn client_as(&self, peer: Peer, hello: Hello) -> Client {
        Client::open(&self.kernel, peer, hello).unwrap()
    }

    pub fn check(&self) {
        let findings = self.kernel.store().check().unwrap();
        assert!(findings.is_empty(), "{findings:?}");
    }
}

pub fn devices(sim: &SimWorld) -> Devices {
    Devices {
        nvm: sim.region("nvm").unwrap(),
        journal: sim.region("journal").unwrap(),
        ssd: sim.block("ssd").map(|device| device as _),
        hdd: sim.block("hdd").map(|device| device as _),
        more: more_of(sim),
    }
}

/// Further devices of the tiers.
fn more_of(sim: &SimWorld) -> Vec<(varve_format::Tier, Arc<dyn varve_media::BlockDevice>)> {
    let named = [
        (varve_format::Tier::Ssd, "ssd-2"),
        (varve_format::Tier::Hdd, "hdd-2"),
    ];
    let there = named
        .into_iter()
        .filter_map(|(tier, name)| Some((tier, sim.block(name)? as _)));
    there.collect()
}

fn start(sim: &SimWorld, logs: &Arc<SimLogs>, clock: &Arc<ManualClock>, config: &Config) -> Arc<KernelFs> {
    start_with(sim, logs, clock, config, Rules::default())
}

fn start_with(
    sim: &SimWorld,
    logs: &Arc<SimLogs>,
    clock: &Arc<ManualClock>,
    config: &Config,
    rules: Rules,
) -> Arc<KernelFs> {
    start_on_devices(devices(sim), logs, clock, config, rules)
}

fn start_on_devices(
    devices: Devices,
    logs: &Arc<SimLogs>,
    clock: &Arc<ManualClock>,
    config: &Config,
    rules: Rules,
) -> Arc<KernelFs> {
    let (store, _) = Store::open(devices, OpenOptions::default()).unwrap();
    let mut parts = Parts::new(
        store,
        Arc::clone(logs) as _,
        config.clone(),
        Arc::clone(clock) as _,
    );
    parts.rules = Some(rules);
    KernelFs::open(parts).unwrap()
}

pub fn hello() -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        kind: ClientKind::Linked,
        read_only: false,
        resume: None,
        held: Vec::new(),
    }
}

pub fn want(key: InodeKey, mode: LeaseMode) -> Want {
    Want { key, mode }
}

/// One session.
pub struct Client {
    pub link: InprocLink,
    pub welcome: Welcome,
    pub page: Arc<Page>,
    pub log: Option<Arc<dyn Region>>,
    pub seq: u64,
    pub offset: u64,
    pub forwarded: u64,
}

impl Client {
    pub fn open(kernel: &Arc<KernelFs>, peer: Peer, hello: Hello) -> Result<Self, IpcError> {
        let opened = kernel.open_session(peer, hello)?;
        let link = InprocLink::new(Arc::clone(kernel) as _, opened.welcome.session, opened.upcalls);
        Ok(Self {
            link,
            welcome: opened.welcome,
            page: opened.page,
            log: opened.log,
            seq: 0,
            offset: LIVE_HEADER_SIZE as u64,
            forwarded: 0,
        })
    }

    pub fn id(&self) -> SessionId {
        self.welcome.session
    }

    pub fn acquire(&self, wants: &[Want]) -> Result<Vec<Grant>, IpcError> {
        match self.link.call(Request::Acquire {
            wants: wants.to_vec(),
        })? {
            Response::Granted(grants) => Ok(grants),
            other => panic!("{other:?}"),
        }
    }

    pub fn write_lease(&self, key: InodeKey) -> Grant {
        self.acquire(&[want(key, LeaseMode::Write)]).unwrap().remove(0)
    }

    pub fn read_lease(&self, key: InodeKey) -> Grant {
        self.acquire(&[want(key, LeaseMode::Read)]).unwrap().remove(0)
    }

    pub fn release(&self, key: InodeKey, lease: LeaseNo, open: bool) {
        self.release_cached(key, lease, open, 0);
    }

    /// Gives a lease back under which the kernel above may use replies for a while.
    pub fn release_cached(&self, key: InodeKey, lease: LeaseNo, open: bool, cached_ms: u32) {
        let last_seq = LogSeq(self.seq);
        let items = vec![ReleaseItem {
            key,
            lease,
            downgrade: false,
            last_seq,
            open,
            changes: 0,
            cached_ms,
        }];
        assert_eq!(self.link.call(Request::Release { items }), Ok(Response::Done));
    }

    /// Takes the next upcall, which must be there.
    pub fn upcall(&self) -> Upcall {
        self.link.upcall(Duration::from_secs(20)).unwrap().unwrap()
    }

    /// Obeys the next upcall, a revocation.
    pub fn obey(&self) {
        let Upcall::Revoke { key, lease, .. } = self.upcall() else {
            panic!("another upcall")
        };
        self.release(key, lease, true);
    }

    pub fn alloc(&self, count: u16) -> Vec<(InodeKey, LeaseNo)> {
        match self
            .link
            .call(Request::AllocInodes { near: ROOT, count })
            .unwrap()
        {
            Response::Inodes(inodes) => inodes,
            other => panic!("{other:?}"),
        }
    }

    /// Logs an operation; durable when this returns.
    pub fn log_op(&mut self, op: &LogOp<'_>) -> LogSeq {
        self.log_flagged(op, EntryFlags::empty())
    }

    pub fn log_flagged(&mut self, op: &LogOp<'_>, flags: EntryFlags) -> LogSeq {
        self.seq += 1;
        let meta = EntryMeta {
            seq: LogSeq(self.seq),
            stable_below: LogSeq(self.seq),
            base: self.page.committed_tx(),
            tx_left: 0,
            time_ns: START_NS + 5,
            flags,
        };
        self.log_raw(op, &meta);
        LogSeq(self.seq)
    }

    pub fn log_raw(&mut self, op: &LogOp<'_>, meta: &EntryMeta) {
        let mut payload = Vec::new();
        op.encode_body(&mut payload);
        let mut header = op.header(meta, payload.len());
        payload.extend_from_slice(op.data());
        let crc = payload_crc(crc_seed(self.id()), &payload);
        header.crc32c.set(entry_crc(crc, &header));
        let log = self.log.as_ref().unwrap();
        if log.len_bytes() == 0 {
            self.link.call(Request::GrowLog { len_bytes: 0 }).unwrap();
        }
        log.write(self.offset + 64, &payload).unwrap();
        log.write(self.offset, header.as_bytes()).unwrap();
        log.fence().unwrap();
        self.offset += entry_size(payload.len()) as u64;
    }

    pub fn create(&mut self, name: &[u8], key: InodeKey) -> LogSeq {
        self.log_op(&create(ROOT, name, key, 0o100_644))
    }

    pub fn lookup(&self, name: &[u8]) -> Option<InodeAttr> {
        match self
            .link
            .call(Request::Lookup {
                dir: ROOT,
                name: name.to_vec(),
            })
            .unwrap()
        {
            Response::Entry(attr) => attr,
            other => panic!("{other:?}"),
        }
    }

    pub fn read(&self, key: InodeKey, len: u32) -> Vec<u8> {
        match self.link.call(Request::ReadData { key, offset: 0, len }).unwrap() {
            Response::Bytes(bytes) | Response::Numbered(bytes, _) => bytes,
            other => panic!("{other:?}"),
        }
    }

    pub fn forward(&mut self, op: &LogOp<'_>) -> Result<ForwardedResult, IpcError> {
        self.forwarded += 1;
        let number = self.forwarded;
        self.forward_as(op, number, Cred::root())
    }

    /// As `forward`; what it makes is held open from then on.
    pub fn forward_open(&mut self, op: &LogOp<'_>) -> Result<ForwardedResult, IpcError> {
        self.forwarded += 1;
        self.forward_with(op, self.forwarded, Cred::root(), true)
    }

    pub fn forward_as(&self, op: &LogOp<'_>, number: u64, cred: Cred) -> Result<ForwardedResult, IpcError> {
        self.forward_with(op, number, cred, false)
    }

    fn forward_with(
        &self,
        op: &LogOp<'_>,
        number: u64,
        cred: Cred,
        open: bool,
    ) -> Result<ForwardedResult, IpcError> {
        let mut body = Vec::new();
        op.encode_body(&mut body);
        let header = op.header(&EntryMeta::default(), body.len());
        let mut entry = header.as_bytes().to_vec();
        entry.extend_from_slice(&body);
        entry.extend_from_slice(op.data());
        match self.link.call(Request::Forward(ForwardedOp {
            entry,
            append: false,
            open,
            whiteout: false,
            cred,
            number,
        }))? {
            Response::Forwarded(result) => Ok(result),
            other => panic!("{other:?}"),
        }
    }

    pub fn is_live(&self) -> bool {
        self.page.state() == PageState::Live
    }

    pub fn resume(self, kernel: &Arc<KernelFs>, held: Vec<InodeKey>) -> Self {
        let hello = Hello {
            resume: Some(self.welcome.token),
            held,
            ..hello()
        };
        Self::open(kernel, Peer::this_process(), hello).unwrap()
    }
}

/// Making an empty file whose number the daemon takes.
pub const fn make(name: &[u8]) -> LogOp<'_> {
    create(ROOT, name, InodeKey::new(0, 0), 0o100_600)
}

/// Making an inode of root's.
pub const fn create(dir: InodeKey, name: &[u8], key: InodeKey, mode: u32) -> LogOp<'_> {
    LogOp::Create {
        dir,
        name,
        key,
        mode,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: b"",
    }
}

/// Removing a name of the root.
pub const fn unlink(name: &[u8], key: InodeKey) -> LogOp<'_> {
    LogOp::Unlink { dir: ROOT, name, key }
}

/// Makes `name` with `data` in the log, under the leases that it takes.
pub fn write_file(client: &mut Client, name: &[u8], data: &[u8]) -> InodeKey {
    client.write_lease(ROOT);
    let (key, _) = client.alloc(1)[0];
    client.create(name, key);
    client.log_op(&LogOp::Write { key, offset: 0, data });
    key
}

/// An ordinary user's process.
pub fn stranger() -> Peer {
    Peer {
        pid: std::process::id(),
        uid: 4711,
        gid: 4711,
    }
}

pub fn chmod(client: &mut Client, key: InodeKey, mode: u32) {
    client.log_op(&LogOp::SetAttr {
        key,
        attr: varve_format::SetAttr {
            mask: varve_format::SetAttrMask::MODE,
            mode,
            ..varve_format::SetAttr::default()
        },
    });
}
