//! The machine of the tests.

use crate::config::Config;
use crate::digest::FETCH_BLOCKS;
use crate::digest::{
    Applied, BatchLimit, Client, Digested, Environment, GatherLimits, Leases, SessionLog, Source, digest,
};
use crate::placement::{Driver, Meters, Pins};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use varve_format::log::{CHUNK_BYTES, crc_seed, entry_crc, entry_size, payload_crc};
use varve_format::session::{GrantRow, SessionRow, SessionState};
use varve_format::{
    EntryFlags, EntryMeta, FileKind, Ino, InodeAttr, InodeKey, LeaseNo, LogOp, LogSeq, SessionId,
};
use varve_media::Region;
use varve_media::sim::{SimMedium, SimWorld};
use varve_store::{Devices, MkfsOptions, OpenOptions, Store, StoreError};
use zerocopy::IntoBytes;

pub(super) const S: SessionId = SessionId(1);
pub(super) const ROOT: InodeKey = InodeKey::ROOT;
pub(super) const NONE: EntryFlags = EntryFlags::empty();
pub(super) const NOW: i64 = 1 << 50;

/// Leases that grant everything to everybody, except where a test sets a field.
#[derive(Default)]
pub(super) struct AllLeases {
    pub(super) held: RefCell<Vec<(SessionId, InodeKey)>>,
    pub(super) denied: RefCell<Vec<InodeKey>>,
    pub(super) rows: RefCell<Vec<GrantRow>>,
    pub(super) reserved: std::cell::Cell<Option<u64>>,
}

impl Leases for AllLeases {
    fn grants(&self, session: SessionId, key: InodeKey, out: &mut Vec<GrantRow>) {
        out.extend(self.rows.borrow().iter().filter(|row| row.session == session));
        if self.denied.borrow().contains(&key) {
            return;
        }
        out.push(GrantRow {
            session,
            lease: LeaseNo(u64::MAX),
            key,
            rights: 3,
            first_seq: LogSeq(0),
            last_seq: None,
            batch: 0,
        });
    }

    fn reserved(&self, _: SessionId) -> Option<u64> {
        self.reserved.get()
    }

    fn held(&self, key: InodeKey, except: &[SessionId]) -> bool {
        let held = self.held.borrow();
        held.iter()
            .any(|(session, held)| *held == key && !except.contains(session))
    }
}

pub(super) struct Machine {
    pub(super) world: SimWorld,
    pub(super) store: Store,
    pub(super) leases: AllLeases,
    pub(super) reader: SessionLog,
    placement: Driver,
    pins: Pins,
    /// User of the session, if it has no privilege.
    pub(super) unprivileged: Option<u32>,
    pub(super) dedup_scope: crate::config::DedupScope,
    seq: u64,
    end: u64,
    /// How often a digest answered [`Digested::Unsure`].
    pub(super) unsure: usize,
}

pub(super) fn devices(world: &SimWorld) -> Devices {
    Devices {
        nvm: world.region("nvm").unwrap(),
        journal: world.region("journal").unwrap(),
        ssd: world.block("ssd").map(|device| device as _),
        hdd: None,
        more: Vec::new(),
    }
}

const NVM_BYTES: u64 = 32 << 20;
const LOG_BYTES: u64 = 4 * CHUNK_BYTES;

impl Machine {
    pub(super) fn new() -> Self {
        Self::with_journal(4 << 20)
    }

    pub(super) fn with_journal(journal_bytes: u64) -> Self {
        Self::in_world(SimWorld::new(), journal_bytes)
    }

    /// Makes a machine with a slower tier that can take metadata.
    pub(super) fn with_flash() -> Self {
        let world = SimWorld::new();
        world.add_block("ssd", 16 << 20);
        Self::in_world(world, 4 << 20)
    }

    fn in_world(world: SimWorld, journal_bytes: u64) -> Self {
        world.add_region("nvm", SimMedium::File, NVM_BYTES, NVM_BYTES);
        world.add_region("journal", SimMedium::Dax, journal_bytes, journal_bytes);
        world.add_region("log", SimMedium::Dax, LOG_BYTES, LOG_BYTES);
        Store::mkfs(&devices(&world), &MkfsOptions::default()).unwrap();
        let machine = Self::open(world);
        let mut tx = machine.store.begin().unwrap();
        let id = tx.next_session_ids(1).unwrap();
        tx.session_put(&SessionRow {
            id,
            uid: 0,
            pid: 1,
            pid_start: 1,
            token: 5,
            state: SessionState::Live,
            digested: LogSeq(0),
            last_forwarded: varve_format::LastForwarded::default(),
            log_bytes: LOG_BYTES,
            created_ns: 0,
            flags: 0,
        })
        .unwrap();
        tx.commit().unwrap();
        assert_eq!(id, S);
        machine
    }

    /// The machine after a restart.
    pub(super) fn open(world: SimWorld) -> Self {
        let devices = devices(&world);
        Self::open_on(world, devices)
    }

    /// As [`open`](Self::open), on these devices.
    pub(super) fn open_on(world: SimWorld, devices: Devices) -> Self {
        let (store, _) = Store::open(devices, OpenOptions::default()).unwrap();
        let clock = Arc::new(varve_ipc::ManualClock::new(0)) as Arc<dyn varve_ipc::Clock>;
        let meters = Arc::new(Meters::of(&store, &clock));
        let placement = Driver::new(&Config::default(), &store.space(), meters);
        Self {
            world,
            store,
            leases: AllLeases::default(),
            reader: SessionLog::new(S),
            placement,
            pins: Pins::new(95),
            unprivileged: None,
            dedup_scope: crate::config::DedupScope::User,
            seq: 1,
            end: 64,
            unsure: 0,
        }
    }

    pub(super) fn log(&self) -> std::sync::Arc<dyn Region> {
        self.world.region("log").unwrap()
    }

    /// Allocates inode numbers.
    pub(super) fn numbers(&self, count: u8) -> Vec<InodeKey> {
        let mut tx = self.store.begin().unwrap();
        let keys = tx.alloc_inodes(ROOT.ino, count).unwrap();
        tx.commit().unwrap();
        keys
    }

    /// Writes one transaction to the log.
    pub(super) fn write(&mut self, ops: &[(EntryFlags, LogOp<'_>)]) {
        for (at, (flags, op)) in ops.iter().enumerate() {
            let mut payload = Vec::new();
            op.encode_body(&mut payload);
            let body = payload.len();
            payload.extend_from_slice(op.data());
            let left = CHUNK_BYTES - self.end % CHUNK_BYTES;
            if left < entry_size(payload.len()) as u64 {
                self.end = self.end.next_multiple_of(CHUNK_BYTES);
            }
            let meta = EntryMeta {
                seq: LogSeq(self.seq),
                stable_below: LogSeq(self.seq),
                tx_left: (ops.len() - at - 1) as u32,
                time_ns: 1000 + self.seq as i64,
                flags: *flags,
                ..EntryMeta::default()
            };
            let mut header = op.header(&meta, body);
            header.crc32c = entry_crc(payload_crc(crc_seed(S), &payload), &header).into();
            let log = self.log();
            log.write(self.end, header.as_bytes()).unwrap();
            log.write(self.end + 64, &payload).unwrap();
            log.fence().unwrap();
            self.end += entry_size(payload.len()) as u64;
            self.seq += 1;
        }
    }

    pub(super) fn op(&mut self, op: LogOp<'_>) {
        self.write(&[(NONE, op)]);
    }

    pub(super) fn create(&mut self, dir: InodeKey, name: &[u8], key: InodeKey, mode: u32) {
        self.op(create(dir, name, key, mode));
    }

    pub(super) fn client(&self) -> Client {
        Client {
            session: S,
            uid: self.unprivileged.unwrap_or(0),
            privileged: self.unprivileged.is_none(),
            checked: false,
        }
    }

    pub(super) fn environment(&self) -> Environment<'_> {
        Environment {
            leases: &self.leases,
            placement: &self.placement,
            pins: &self.pins,
            now_ns: NOW,
            dedup_scope: self.dedup_scope,
            rejoin: false,
            fetch_blocks: FETCH_BLOCKS,
        }
    }

    /// Digests everything, at most `entries` in one batch.
    pub(super) fn digest(&mut self, entries: usize) -> Result<Vec<Applied>, StoreError> {
        let mut limits = GatherLimits {
            entries,
            leave_bytes: 4096,
            ..GatherLimits::default()
        };
        let mut all = Vec::new();
        loop {
            let log = self.log();
            let digested = self.digested();
            let newest = self.store.newest_tx();
            let batch = self
                .reader
                .gather(&*log, digested, &|| newest, BatchLimit::Live(None), &limits)
                .unwrap();
            if batch.upto == digested {
                return Ok(all);
            }
            let source = Source {
                batch: &batch,
                log: &*log,
                client: self.client(),
            };
            let done = digest(
                &self.store,
                &[source],
                &self.environment(),
                || (),
                &mut |applied| {
                    for (session, key) in &applied.unheld {
                        self.leases
                            .held
                            .borrow_mut()
                            .retain(|held| held != &(*session, *key));
                    }
                    all.push(applied.clone());
                },
            )?;
            if done == Digested::Unsure {
                assert_ne!(limits.leave_bytes, usize::MAX, "nothing was left in the log");
                limits = limits.copying_all();
                self.unsure += 1;
                continue;
            }
            assert_eq!(self.digested(), batch.upto);
            self.reader.digested(&batch);
        }
    }

    /// Returns the number of the next entry and its place.
    pub(super) const fn at(&self) -> (u64, u64) {
        (self.seq, self.end)
    }

    /// Goes on with a log that was written before a restart.
    pub(super) const fn go_on_at(&mut self, seq: u64, end: u64) {
        (self.seq, self.end) = (seq, end);
    }

    /// Returns the offset of the next entry, if it fits into the chunk.
    pub(super) const fn end(&self) -> u64 {
        self.end
    }

    pub(super) fn digested(&self) -> LogSeq {
        self.store.sessions().unwrap()[0].digested
    }

    pub(super) fn lookup(&self, dir: InodeKey, name: &[u8]) -> Option<InodeKey> {
        self.store.dir_lookup(dir.ino, name).unwrap().map(|item| item.key)
    }

    pub(super) fn attr(&self, key: InodeKey) -> InodeAttr {
        self.store.get_key(key).unwrap().attr
    }

    pub(super) fn data(&self, key: InodeKey) -> Vec<u8> {
        let mut out = vec![0; self.attr(key).size_bytes as usize];
        let read = self.store.read(key.ino, 0, &mut out).unwrap();
        assert_eq!(read, out.len());
        out
    }

    /// Returns the ranges in which `lseek` finds data.
    pub(super) fn data_blocks(&self, key: InodeKey) -> Vec<(u64, u64)> {
        let (mut found, mut at) = (Vec::new(), 0);
        while let Some(data) = self.store.seek_data(key.ino, at).unwrap() {
            at = self.store.seek_hole(key.ino, data).unwrap().unwrap();
            found.push((data, at));
        }
        found
    }

    /// Returns everything that a program can see; asserts that the structures are sound.
    pub(super) fn dump(&self) -> BTreeMap<String, String> {
        assert_eq!(self.store.check().unwrap(), []);
        assert_eq!(self.store.check_data().unwrap(), []);
        let mut seen = BTreeMap::new();
        self.dump_dir(ROOT.ino, "", &mut seen);
        for orphan in self.store.orphans().unwrap() {
            self.dump_inode(orphan.ino, format!("orphan {orphan}"), &mut seen);
        }
        seen
    }

    fn dump_dir(&self, dir: Ino, path: &str, seen: &mut BTreeMap<String, String>) {
        self.dump_inode(dir, format!("{path}/"), seen);
        for item in self.store.dir_iter(dir, 0, 10_000).unwrap() {
            let path = format!("{path}/{}", String::from_utf8_lossy(&item.name));
            if item.kind == FileKind::Directory {
                self.dump_dir(item.key.ino, &path, seen);
            } else {
                self.dump_inode(item.key.ino, path, seen);
            }
        }
    }

    fn dump_inode(&self, ino: Ino, path: String, seen: &mut BTreeMap<String, String>) {
        let mut attr = self.store.get(ino).unwrap().attr;
        // The number of used blocks depends on a file's history.
        attr.sectors = 0;
        let data = match attr.kind() {
            FileKind::Regular => crc32c::crc32c(&self.data(attr.key)),
            FileKind::Symlink => crc32c::crc32c(&self.store.read_link(ino).unwrap()),
            _ => 0,
        };
        if attr.is_dir() {
            attr.size_bytes = 0;
        }
        let xattrs: BTreeMap<_, _> = self
            .store
            .xattr_list(ino)
            .unwrap()
            .into_iter()
            .map(|(name, _)| {
                let value = self.store.xattr_get(ino, &name).unwrap();
                (name, value)
            })
            .collect();
        let blocks = match attr.kind() {
            FileKind::Regular => self.data_blocks(attr.key),
            _ => Vec::new(),
        };
        seen.insert(path, format!("{attr:?} {data:#x} {xattrs:?} {blocks:?}"));
    }
}

pub(super) const fn create(dir: InodeKey, name: &[u8], key: InodeKey, mode: u32) -> LogOp<'_> {
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

pub(super) const FILE: u32 = 0o100_644;
pub(super) const DIR: u32 = 0o040_755;
