//! What a hostile client does: everything that it can reach, with seeded choices. Owns the acts; what must not come of them is looked at
//! from outside, in `main`.

use crate::client::{Given, Wire, frame};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use varve_format::log::{
    CHUNK_BYTES, EntryMeta, LIVE_HEADER_SIZE, crc_seed, entry_crc, entry_size, payload_crc,
};
use varve_format::{
    EntryFlags, FallocateMode, FileBlock, InodeKey, LeaseNo, LogOp, LogSeq, SetAttr, SetAttrMask, TxId,
};
use varve_ipc::{
    Admin, ClientKind, Cred, Hello, LeaseMode, MediatedOp, PROTOCOL_VERSION, ReleaseItem, Request, Response,
    Upcall, Want, Welcome,
};
use varve_testkit::workload::Rng;
use zerocopy::IntoBytes;

/// Written to standard output before what must not be.
pub const FORBIDDEN: &str = "FORBIDDEN";
/// Written before the counts of acts.
pub const ACTS: &str = "ACTS";
/// How long an answer is waited for: some are never given.
const PATIENCE: Duration = Duration::from_millis(400);
/// Sessions at once.
const SESSIONS_MAX: usize = 4;

/// What an attacker is told.
#[derive(Debug, Clone)]
pub struct Job {
    pub seed: u64,
    /// The owner of the pool, or an ordinary user.
    pub owner: bool,
    pub acts: u64,
    pub secs: u64,
    pub socket: PathBuf,
    /// A directory where everybody may make files.
    pub common: InodeKey,
    /// Inodes of others.
    pub victims: Vec<InodeKey>,
    /// Bytes that only their owner may read.
    pub secret: Vec<u8>,
}

struct Session {
    wire: Wire,
    welcome: Welcome,
    given: Given,
    log: Option<File>,
    seq: u64,
    /// Where the next entry goes.
    pos: u64,
    last: Option<(u64, usize)>,
    leases: Vec<(InodeKey, LeaseNo)>,
}

pub struct Attacker {
    job: Job,
    rng: Rng,
    sessions: Vec<Session>,
    /// Own inodes, made or to be made.
    own: Vec<InodeKey>,
    tokens: Vec<u128>,
    idle: Vec<Wire>,
    acts: BTreeMap<&'static str, u64>,
}

type Outcome = std::io::Result<()>;

impl Attacker {
    pub fn new(job: Job) -> Self {
        Self {
            rng: Rng::new(job.seed),
            job,
            sessions: Vec::new(),
            own: Vec::new(),
            tokens: Vec::new(),
            idle: Vec::new(),
            acts: BTreeMap::new(),
        }
    }

    pub fn run(mut self) {
        let until = Instant::now() + Duration::from_secs(self.job.secs);
        let mut done = 0;
        while done < self.job.acts && Instant::now() < until {
            done += 1;
            self.act();
        }
        println!("{ACTS} {done} {:?}", self.acts);
    }

    fn forbidden(&self, what: &str) {
        println!("{FORBIDDEN} seed {}: {what}", self.job.seed);
    }

    fn act(&mut self) {
        if self.sessions.is_empty() {
            self.count("open a session");
            let _ = self.open();
            if self.sessions.is_empty() {
                std::thread::sleep(Duration::from_millis(20));
            }
            return;
        }
        let dice = self.rng.below(100);
        let (name, outcome) = match dice {
            0..=4 => ("open a session", self.open()),
            5..=9 => ("behave", self.behave()),
            10..=27 => ("ask for anything", self.ask_anything()),
            28..=45 => ("log operations", self.log_operations()),
            46..=53 => ("log noise", self.log_noise()),
            54..=60 => ("change the log while it is read", self.race()),
            61..=67 => ("change the files' lengths", self.lengths()),
            68..=70 => ("write where only the daemon may", self.write_page()),
            71..=77 => ("send no message", self.raw()),
            78..=81 => ("send descriptors", self.descriptors()),
            82..=86 => ("flood", self.flood()),
            87..=90 => ("connect and say nothing", self.hang()),
            91..=94 => ("resume", self.resume()),
            95..=96 => ("say goodbye and go on", self.goodbye()),
            _ => {
                let at = self.some_session();
                self.sessions.swap_remove(at);
                ("die", Ok(()))
            }
        };
        self.count(name);
        if outcome.is_err() {
            // The daemon has closed a connection, as it should: the session is over.
            self.sessions.retain_mut(|session| {
                session
                    .wire
                    .ask(&Request::StatFs, PATIENCE)
                    .is_ok_and(|answer| !matches!(answer, Some(Err(varve_ipc::IpcError::Sealed))))
            });
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.acts.entry(what).or_default() += 1;
    }

    fn some_session(&mut self) -> usize {
        self.rng.below(self.sessions.len() as u64) as usize
    }

    fn hello(&mut self) -> Hello {
        let held = (0..self.rng.below(8)).map(|_| self.any_key()).collect();
        Hello {
            version: PROTOCOL_VERSION,
            kind: if self.rng.below(4) == 0 {
                ClientKind::Shim
            } else {
                ClientKind::Linked
            },
            read_only: self.rng.below(8) == 0,
            resume: None,
            held,
        }
    }

    fn open(&mut self) -> Outcome {
        let hello = self.hello();
        self.open_with(hello)
    }

    fn open_with(&mut self, hello: Hello) -> Outcome {
        let mut wire = Wire::connect(&self.job.socket)?;
        let Some((welcome, given)) = wire.hello(hello, Duration::from_secs(3))? else {
            return Ok(());
        };
        if welcome.privileged != self.job.owner {
            self.forbidden("the session has other rights than its user");
        }
        if given.nvm.is_some() != self.job.owner {
            self.forbidden("the pool's memory is given to a user who may not have it");
        }
        let log = given
            .log
            .as_ref()
            .and_then(|fd| fd.try_clone().ok())
            .map(File::from);
        self.tokens.push(welcome.token);
        if self.sessions.len() >= SESSIONS_MAX {
            let at = self.some_session();
            self.sessions.swap_remove(at);
        }
        self.sessions.push(Session {
            wire,
            welcome,
            given,
            log,
            seq: 0,
            pos: LIVE_HEADER_SIZE as u64,
            last: None,
            leases: Vec::new(),
        });
        self.settle()
    }

    /// Takes leases and numbers, so that entries of the newest session can count.
    fn settle(&mut self) -> Outcome {
        let common = self.job.common;
        let Some(session) = self.sessions.last_mut() else {
            return Ok(());
        };
        let root = Want {
            key: InodeKey::ROOT,
            mode: LeaseMode::Read,
        };
        session
            .wire
            .ask(&Request::Acquire { wants: vec![root] }, PATIENCE)?;
        let name = b"common".to_vec();
        session.wire.ask(
            &Request::Lookup {
                dir: InodeKey::ROOT,
                name,
            },
            PATIENCE,
        )?;
        let wants = vec![Want {
            key: common,
            mode: LeaseMode::Write,
        }];
        if let Some(Ok(Response::Granted(grants))) =
            session.wire.ask(&Request::Acquire { wants }, PATIENCE)?
        {
            session
                .leases
                .extend(grants.iter().map(|grant| (common, grant.lease)));
        }
        let numbers = Request::AllocInodes {
            near: common,
            count: 8,
        };
        if let Some(Ok(Response::Inodes(keys))) = session.wire.ask(&numbers, PATIENCE)? {
            self.own.extend(keys.iter().map(|(key, _)| *key));
            session.leases.extend(keys);
        }
        let excess = self.own.len().saturating_sub(32);
        self.own.drain(..excess);
        self.log_what_it_may()
    }

    /// A file of its own, written as a client that keeps the rules would: what follows it in the log is read, too.
    fn log_what_it_may(&mut self) -> Outcome {
        let name = format!("own{}", self.rng.below(40));
        let Some(at) = self.sessions.len().checked_sub(1) else {
            return Ok(());
        };
        let dir = self.job.common;
        let leases = &self.sessions[at].leases;
        if !leases.iter().any(|(key, _)| *key == dir) {
            return Ok(());
        }
        let Some((key, _)) = leases.iter().find(|(key, _)| *key != dir).copied() else {
            return Ok(());
        };
        let user = if self.job.owner { 0 } else { 65_534 };
        let ops = [
            LogOp::Create {
                dir,
                name: name.as_bytes(),
                key,
                mode: 0o100_644,
                uid: user,
                gid: user,
                rdev: 0,
                target: b"",
            },
            LogOp::Write {
                key,
                offset: 0,
                data: b"its own",
            },
        ];
        for op in ops {
            let mut body = Vec::new();
            op.encode_body(&mut body);
            let seq = self.sessions[at].seq + 1;
            let meta = EntryMeta {
                seq: LogSeq(seq),
                stable_below: LogSeq(seq),
                ..EntryMeta::default()
            };
            let mut header = op.header(&meta, body.len());
            body.extend_from_slice(op.data());
            let session = &mut self.sessions[at];
            header.crc32c = entry_crc(payload_crc(crc_seed(session.welcome.session), &body), &header).into();
            let Some(log) = &session.log else { return Ok(()) };
            let _ = log.write_all_at(&[header.as_bytes(), body.as_slice()].concat(), session.pos);
            session.pos += entry_size(body.len()) as u64;
            session.seq = seq;
        }
        self.digest(at)
    }

    fn own_key(&mut self) -> InodeKey {
        let common = self.job.common;
        match self.own.as_slice() {
            [] => common,
            own => *self.rng.pick(own),
        }
    }

    fn any_key(&mut self) -> InodeKey {
        match self.rng.below(10) {
            0..=3 => self.own_key(),
            4..=6 if !self.job.victims.is_empty() => *self.rng.pick(&self.job.victims),
            7 => self.job.common,
            8 => InodeKey::ROOT,
            _ => InodeKey::new(self.extreme(), self.rng.next_u64() as u32),
        }
    }

    /// Keys on which the owner of the pool could do what is asked: own ones only then.
    fn key_to_change(&mut self) -> InodeKey {
        if self.job.owner {
            self.own_key()
        } else {
            self.any_key()
        }
    }

    fn extreme(&mut self) -> u64 {
        let any = self.rng.next_u64();
        match self.rng.below(9) {
            0 => 0,
            1 => u64::MAX,
            2 => u64::MAX - self.rng.below(5000),
            3 => 1 << self.rng.below(64),
            4 => (1 << self.rng.below(63)) - 1,
            5 => any % 20,
            6 => any % 10_000,
            7 => any % (1 << 30),
            _ => any,
        }
    }

    fn name(&mut self) -> Vec<u8> {
        let names: [&[u8]; 14] = [
            b"a", b"b", b"c", b"d", b"f", b"g", b".", b"..", b"", b"x/y", b"nul\0", b"secret", b"vault",
            b"common",
        ];
        match self.rng.below(12) {
            0 => vec![b'n'; 255 + self.rng.below(3) as usize],
            1 => (0..self.rng.below(300))
                .map(|_| self.rng.next_u64() as u8)
                .collect(),
            _ => self.rng.pick(&names).to_vec(),
        }
    }

    /// Does what the daemon asks for, at last.
    fn behave(&mut self) -> Outcome {
        let at = self.some_session();
        let session = &mut self.sessions[at];
        session.wire.ask(&Request::StatFs, PATIENCE)?;
        for upcall in std::mem::take(&mut session.wire.upcalls) {
            let request = match upcall {
                Upcall::Revoke { key, lease, .. } => {
                    session.leases.retain(|(of, _)| *of != key);
                    Request::Release {
                        items: vec![ReleaseItem {
                            key,
                            lease,
                            downgrade: false,
                            last_seq: LogSeq(0),
                            open: false,
                        }],
                    }
                }
                Upcall::Barrier { tx, .. } => Request::BarrierAck { tx },
                Upcall::Company => Request::CompanyAck,
                Upcall::Solo | Upcall::Sealed => continue,
            };
            session.wire.send(&request)?;
        }
        Ok(())
    }

    fn request(&mut self) -> Request {
        let extreme = |rng: &mut Self| rng.extreme();
        match self.rng.below(24) {
            0 => Request::Hello(self.hello()),
            1 => Request::CompanyAck,
            2 => Request::Lookup {
                dir: self.any_key(),
                name: self.name(),
            },
            3 => Request::GetAttr { key: self.any_key() },
            4..=5 => {
                let count = if self.rng.below(20) == 0 {
                    300
                } else {
                    self.rng.below(5)
                };
                let write = self.rng.below(2) == 0;
                let wants = (0..count).map(|_| Want {
                    key: if write {
                        self.key_to_change()
                    } else {
                        self.any_key()
                    },
                    mode: if write { LeaseMode::Write } else { LeaseMode::Read },
                });
                Request::Acquire {
                    wants: wants.collect(),
                }
            }
            6 => {
                let items = (0..self.rng.below(6)).map(|_| ReleaseItem {
                    key: self.any_key(),
                    lease: LeaseNo(self.extreme()),
                    downgrade: self.rng.below(2) == 0,
                    last_seq: LogSeq(self.extreme()),
                    open: self.rng.below(2) == 0,
                });
                Request::Release {
                    items: items.collect(),
                }
            }
            7 | 8 => {
                let count = if self.rng.below(10) == 0 {
                    5000
                } else {
                    self.rng.below(200)
                };
                let keys = (0..count).map(|_| self.any_key()).collect();
                if self.rng.below(2) == 0 {
                    Request::Drop { keys }
                } else {
                    Request::Hold { keys }
                }
            }
            9 => Request::AllocInodes {
                near: self.any_key(),
                count: self.rng.next_u64() as u8,
            },
            10 => Request::ReadDir {
                dir: self.any_key(),
                cookie: extreme(self),
                max: extreme(self) as u32,
            },
            11 => Request::ReadLink { key: self.any_key() },
            12 => Request::Xattrs { key: self.any_key() },
            13 => Request::MapExtents {
                key: self.any_key(),
                from: FileBlock(extreme(self)),
                max: extreme(self) as u32,
            },
            14..=15 => Request::ReadData {
                key: self.any_key(),
                offset: extreme(self),
                len: extreme(self) as u32 % (2 << 20),
            },
            16 => Request::GrowLog {
                len_bytes: extreme(self) & !(CHUNK_BYTES - 1) | self.rng.below(2),
            },
            17 => Request::Credits {
                blocks: extreme(self) as u32,
                least: extreme(self) as u32,
            },
            18 => Request::Digest {
                upto: LogSeq(extreme(self)),
                wait: self.rng.below(2) == 0,
            },
            19..=20 => self.mediate(),
            21 => Request::BarrierAck {
                tx: TxId(extreme(self)),
            },
            22 => Request::StatFs,
            _ if self.job.owner => Request::Admin(Admin::Status),
            _ => Request::Admin(
                [
                    Admin::Status,
                    Admin::DigestAll,
                    Admin::Fsck,
                    Admin::Scrub,
                    Admin::Shutdown,
                ][self.rng.below(5) as usize]
                    .clone(),
            ),
        }
    }

    fn mediate(&mut self) -> Request {
        let mut data = vec![0; self.rng.below(9000) as usize];
        let (name, other) = (self.name(), self.name());
        let keys = [
            self.key_to_change(),
            self.key_to_change(),
            self.key_to_change(),
            self.key_to_change(),
        ];
        let op = self.op(keys, &name, &other, &mut data);
        let mut entry = Vec::new();
        op.encode_body(&mut entry);
        let body_len = entry.len().min(usize::from(u16::MAX));
        entry.extend_from_slice(op.data());
        let mut bytes = op.header(&EntryMeta::default(), body_len).as_bytes().to_vec();
        bytes.extend(entry);
        if self.rng.below(3) == 0 && !bytes.is_empty() {
            let at = self.rng.below(bytes.len() as u64) as usize;
            // Not the inode of an owner's operation: that would be an operation that it may do.
            if !(self.job.owner && (24..40).contains(&at)) {
                bytes[at] = self.rng.next_u64() as u8;
            }
        }
        bytes.truncate(match self.rng.below(8) {
            0 => self.rng.below(bytes.len() as u64 + 1) as usize,
            _ => usize::MAX,
        });
        // Rename and others have inodes in their body: what an owner says must be its own there too.
        let cred = if self.job.owner || self.rng.below(2) == 0 {
            Cred {
                uid: 65_534,
                gid: 65_534,
                groups: Vec::new(),
            }
        } else {
            Cred {
                uid: 0,
                gid: 0,
                groups: vec![0; self.rng.below(100) as usize],
            }
        };
        Request::Mediate(MediatedOp {
            entry: bytes,
            append: self.rng.below(2) == 0,
            cred,
            number: match self.rng.below(4) {
                0 => self.extreme(),
                _ => 1 + self.rng.below(20),
            },
        })
    }

    fn op<'b>(
        &mut self,
        keys: [InodeKey; 4],
        name: &'b [u8],
        other: &'b [u8],
        data: &'b mut Vec<u8>,
    ) -> LogOp<'b> {
        let [key, dir, new_dir, victim] = keys;
        data.iter_mut().for_each(|byte| *byte = 0xee);
        let data: &'b [u8] = data;
        let offset = match self.rng.below(3) {
            0 => self.extreme(),
            _ => self.rng.below(50_000),
        };
        match self.rng.below(13) {
            0..=2 => LogOp::Write { key, offset, data },
            3 => LogOp::Truncate { key, size: offset },
            4 => LogOp::Fallocate {
                key,
                mode: FallocateMode::from_u32(self.rng.below(5) as u32).unwrap_or(FallocateMode::PunchHole),
                offset,
                len: self.extreme(),
            },
            5 => LogOp::SetAttr {
                key,
                attr: SetAttr {
                    mask: SetAttrMask::from_bits_truncate(self.rng.next_u64() as u32),
                    mode: self.rng.next_u64() as u32 & 0o7777,
                    uid: self.rng.below(3) as u32 * 32_767,
                    gid: self.rng.below(3) as u32 * 32_767,
                    atime_ns: self.rng.next_u64() as i64,
                    mtime_ns: self.rng.next_u64() as i64,
                },
            },
            6 => LogOp::SetXattr {
                key,
                name: if self.rng.below(2) == 0 { b"user.k" } else { name },
                value: data,
            },
            7 => LogOp::RemoveXattr { key, name: b"user.k" },
            8..=9 => LogOp::Create {
                dir,
                name,
                key,
                mode: [0o100_644, 0o040_777, 0o106_755, 0o060_600, 0o120_777, 0][self.rng.below(6) as usize],
                uid: if self.rng.below(4) == 0 { 0 } else { 65_534 },
                gid: 65_534,
                rdev: 0,
                target: if self.rng.below(4) == 0 { other } else { b"" },
            },
            10 => LogOp::Link { dir, name, key },
            11 => LogOp::Unlink { dir, name, key },
            _ => LogOp::Rename {
                dir,
                name,
                key,
                new_dir,
                new_name: other,
                victim: (self.rng.below(2) == 0).then_some(victim),
                exchange: self.rng.below(4) == 0,
            },
        }
    }

    fn ask_anything(&mut self) -> Outcome {
        let request = self.request();
        let at = self.some_session();
        let answer = self.sessions[at].wire.ask(&request, PATIENCE)?;
        match answer {
            Some(Ok(Response::Granted(grants))) => {
                if let Request::Acquire { wants } = &request {
                    let keys = wants.iter().map(|want| want.key);
                    self.sessions[at]
                        .leases
                        .extend(keys.zip(grants).map(|(key, grant)| (key, grant.lease)));
                }
            }
            Some(Ok(Response::Bytes(bytes))) if !self.job.owner => {
                let secret = &self.job.secret;
                if bytes.windows(secret.len()).any(|window| window == secret) {
                    self.forbidden(&format!("{request:?} shows what another user keeps secret"));
                }
            }
            Some(Ok(Response::Json(_))) if !self.job.owner => {
                self.forbidden("an operator's question was answered")
            }
            _ => {}
        }
        Ok(())
    }

    /// Entries whose checksums are right, and what they say not always.
    fn log_operations(&mut self) -> Outcome {
        let at = self.some_session();
        let owner = self.job.owner;
        for _ in 0..1 + self.rng.below(12) {
            let mut data = vec![0; 1 + self.rng.below(6000) as usize];
            let (name, other) = (self.name(), self.name());
            // In the log even the owner of the pool changes only what it has leases on: anything may be named.
            let keys = if self.rng.below(2) == 0 {
                [self.own_key(), self.job.common, self.job.common, self.own_key()]
            } else {
                [self.any_key(), self.any_key(), self.any_key(), self.any_key()]
            };
            let _ = owner;
            let op = self.op(keys, &name, &other, &mut data);
            let mut body = Vec::new();
            op.encode_body(&mut body);
            let body_len = body.len().min(usize::from(u16::MAX));
            body.extend_from_slice(op.data());
            let strange = self.rng.below(4) == 0;
            let (seq, stable, base, tx_left) = if strange {
                (
                    self.extreme(),
                    self.extreme(),
                    self.extreme(),
                    self.rng.below(70) as u32,
                )
            } else {
                let next = self.sessions[at].seq + 1;
                (next, next, 0, 0)
            };
            let meta = EntryMeta {
                seq: LogSeq(seq),
                stable_below: LogSeq(stable),
                base: TxId(base),
                tx_left,
                time_ns: self.rng.next_u64() as i64,
                flags: EntryFlags::from_bits_retain(if self.rng.below(4) == 0 {
                    self.rng.next_u64() as u8
                } else {
                    0
                }),
            };
            let mut header = op.header(&meta, body_len);
            if self.rng.below(8) == 0 {
                let place = 4 + self.rng.below(60) as usize;
                header.as_mut_bytes()[place] = self.rng.next_u64() as u8;
            }
            let session = &mut self.sessions[at];
            let seed = crc_seed(session.welcome.session);
            header.crc32c = entry_crc(payload_crc(seed, &body), &header).into();
            let Some(log) = &session.log else { return Ok(()) };
            let bytes = [header.as_bytes(), body.as_slice()].concat();
            let size = entry_size(body.len());
            if session.pos % CHUNK_BYTES + size as u64 > CHUNK_BYTES {
                session.pos = session.pos.next_multiple_of(CHUNK_BYTES);
                if session.pos >= session.welcome.log_bytes {
                    session.pos = LIVE_HEADER_SIZE as u64;
                }
            }
            let _ = log.write_all_at(&bytes, session.pos);
            session.last = Some((session.pos, bytes.len()));
            if !strange {
                session.seq += 1;
            }
            session.pos += size as u64;
        }
        self.digest(at)
    }

    fn digest(&mut self, at: usize) -> Outcome {
        let request = Request::Digest {
            upto: LogSeq(self.sessions[at].seq),
            wait: true,
        };
        self.sessions[at].wire.ask(&request, PATIENCE)?;
        Ok(())
    }

    fn log_noise(&mut self) -> Outcome {
        let at = self.some_session();
        for _ in 0..1 + self.rng.below(20) {
            let bytes: Vec<u8> = (0..1 + self.rng.below(200))
                .map(|_| self.rng.next_u64() as u8)
                .collect();
            let session = &self.sessions[at];
            let place = match (self.rng.below(3), session.last) {
                (0, Some((place, len))) => place + self.rng.below(len as u64),
                (1, _) => self.rng.below(512),
                _ => self.rng.below(session.welcome.log_bytes.max(1)),
            };
            if let Some(log) = &self.sessions[at].log {
                let _ = log.write_all_at(&bytes, place);
            }
        }
        self.digest(at)
    }

    /// A second thread changes bytes of entries and the file's length while the daemon reads.
    fn race(&mut self) -> Outcome {
        self.log_operations()?;
        let at = self.some_session();
        let seed = self.rng.next_u64();
        let session = &mut self.sessions[at];
        let Some(log) = session.log.as_ref().and_then(|log| log.try_clone().ok()) else {
            return Ok(());
        };
        let (place, len) = session.last.unwrap_or((LIVE_HEADER_SIZE as u64, 256));
        let (len, size) = (len as u64, session.welcome.log_bytes);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut rng = Rng::new(seed);
                let mut good = vec![0; len as usize];
                let _ = log.read_exact_at(&mut good, place);
                while !stop.load(Ordering::Relaxed) {
                    match rng.below(8) {
                        0 => {
                            let _ = log.set_len(rng.below(size));
                            let _ = log.set_len(size);
                        }
                        1..=3 => {
                            let _ = log.write_all_at(&good, place);
                        }
                        _ => {
                            let byte = [rng.next_u64() as u8];
                            let _ = log.write_all_at(&byte, place + rng.below(len));
                        }
                    }
                }
            });
            let outcome = (|| {
                for _ in 0..4 {
                    let upto = LogSeq(session.seq);
                    session
                        .wire
                        .ask(&Request::Digest { upto, wait: true }, PATIENCE)?;
                }
                Ok(())
            })();
            stop.store(true, Ordering::Relaxed);
            outcome
        })
    }

    /// Logs that are shorter or longer than they were.
    fn lengths(&mut self) -> Outcome {
        let at = self.some_session();
        let len = match self.rng.below(8) {
            0 => 0,
            1 => 64,
            2 => 4095,
            3 => 4096,
            4 => 1 << 20,
            5 => 1 << 40,
            6 => self.rng.below(8 << 20),
            _ => 4 << 20,
        };
        let which = self.rng.below(3);
        let session = &mut self.sessions[at];
        for (turn, fd) in [(0, &session.given.log), (1, &session.given.backing)] {
            if which != 2 && which != turn {
                continue;
            }
            if let Some(file) = fd.as_ref().and_then(|fd| fd.try_clone().ok()).map(File::from) {
                let _ = file.set_len(len);
                if len == 4 << 20 {
                    // Space, not only a length.
                    let _ = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 16 << 20);
                }
                let _ = file.write_all_at(b"more", len.min(1 << 41));
            }
        }
        self.digest(at)?;
        if self.rng.below(3) == 0 {
            let request = Request::GrowLog { len_bytes: 8 << 20 };
            self.sessions[at].wire.ask(&request, PATIENCE)?;
        }
        Ok(())
    }

    fn write_page(&mut self) -> Outcome {
        let at = self.some_session();
        let given = &self.sessions[at].given;
        let mut wrong = Vec::new();
        for (what, fd) in [
            ("the session page", &given.page),
            ("the pool's memory", &given.nvm),
        ] {
            let Some(file) = fd.as_ref().and_then(|fd| fd.try_clone().ok()).map(File::from) else {
                continue;
            };
            // Another open file on the same inode would be the owner's own right.
            if file.write_all_at(&[2; 64], 0).is_ok() || file.set_len(0).is_ok() {
                wrong.push(what);
            }
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
            if !self.job.owner && File::options().write(true).open(path).is_ok() {
                wrong.push(what);
            }
        }
        for what in wrong {
            self.forbidden(&format!("{what} can be written"));
        }
        Ok(())
    }

    /// Bytes that are no message, and messages in the wrong order.
    fn raw(&mut self) -> Outcome {
        let hello = frame(0, &Request::Hello(self.hello()));
        let request = frame(1, &self.request());
        let mut wire = Wire::connect(&self.job.socket)?;
        let noise: Vec<u8> = (0..self.rng.below(5000))
            .map(|_| self.rng.next_u64() as u8)
            .collect();
        let _ = match self.rng.below(8) {
            0 => wire.send_bytes(&noise),
            1 => wire.send_bytes(&u32::MAX.to_le_bytes()),
            2 => wire.send_bytes(&0_u32.to_le_bytes()),
            3 => wire.send_bytes(&hello[..self.rng.below(hello.len() as u64) as usize]),
            4 => wire.send_bytes(&request),
            5 => {
                // A frame whose length is right and whose inside is not.
                let mut bytes = (noise.len() as u32).to_le_bytes().to_vec();
                bytes.extend(&noise);
                wire.send_bytes(&bytes)
            }
            6 => {
                let mut bytes = hello.clone();
                let at = 4 + self.rng.below(bytes.len() as u64 - 4) as usize;
                bytes[at] ^= 1 << self.rng.below(8);
                wire.send_bytes(&bytes)
            }
            _ => wire.send_bytes(&[hello.clone(), hello, request].concat()),
        };
        wire.drain();
        if self.rng.below(2) == 0 {
            let at = self.some_session();
            let bytes = frame(7, &self.request());
            let cut = self.rng.below(bytes.len() as u64) as usize;
            self.sessions[at].wire.send_bytes(&bytes[..cut])?;
            self.sessions.swap_remove(at);
        }
        Ok(())
    }

    fn descriptors(&mut self) -> Outcome {
        let file = File::open("/dev/null")?;
        let fds = vec![file.as_fd(); 1 + self.rng.below(30) as usize];
        let bytes = frame(1_000_000, &Request::StatFs);
        let at = self.some_session();
        let cut = 1 + self.rng.below(bytes.len() as u64) as usize;
        let session = &self.sessions[at];
        let sent = session.wire.send_with(&bytes[..cut], &fds)?;
        session.wire.send_bytes(&bytes[sent..])?;
        let fresh = Wire::connect(&self.job.socket)?;
        let hello = frame(0, &Request::Hello(self.hello()));
        fresh.send_with(&hello, &fds)?;
        Ok(())
    }

    fn flood(&mut self) -> Outcome {
        let at = self.some_session();
        let requests: Vec<_> = (0..16).map(|_| frame(9, &self.request())).collect();
        for _ in 0..20 {
            for bytes in &requests {
                self.sessions[at].wire.send_bytes(bytes)?;
            }
        }
        // Half of the time nobody reads the answers.
        if self.rng.below(2) == 0 {
            self.sessions[at].wire.drain();
        } else {
            self.sessions.swap_remove(at);
        }
        Ok(())
    }

    fn hang(&mut self) -> Outcome {
        for _ in 0..self.rng.below(12) {
            let wire = Wire::connect(&self.job.socket)?;
            if self.rng.below(2) == 0 {
                let _ = wire.send_bytes(&[9, 0]);
            }
            self.idle.push(wire);
        }
        if self.idle.len() > 40 {
            self.idle.drain(..30);
        }
        Ok(())
    }

    fn resume(&mut self) -> Outcome {
        let token = match (self.rng.below(3), self.tokens.as_slice()) {
            (1.., [_, ..]) => *self.rng.pick(&self.tokens),
            _ => u128::from(self.rng.next_u64()),
        };
        let mut hello = self.hello();
        hello.resume = Some(token);
        let victims = self.job.victims.clone();
        hello.held.extend(&victims);
        self.open_with(hello)?;
        if self.job.owner {
            return Ok(());
        }
        // What it says to have open it may not read for that.
        let at = self.sessions.len().saturating_sub(1);
        for key in victims {
            let wants = vec![Want {
                key,
                mode: LeaseMode::Read,
            }];
            let secret = self.job.secret.clone();
            let Some(session) = self.sessions.get_mut(at) else {
                break;
            };
            session.wire.ask(&Request::Acquire { wants }, PATIENCE)?;
            let read = Request::ReadData {
                key,
                offset: 0,
                len: 4096,
            };
            if let Some(Ok(Response::Bytes(bytes))) = session.wire.ask(&read, PATIENCE)?
                && bytes.windows(secret.len()).any(|window| window == secret)
            {
                self.forbidden("a session that says to have had a file open may read it");
            }
        }
        Ok(())
    }

    fn goodbye(&mut self) -> Outcome {
        let at = self.some_session();
        self.sessions[at].wire.send(&Request::Bye)?;
        for _ in 0..4 {
            let request = self.request();
            self.sessions[at].wire.ask(&request, PATIENCE)?;
        }
        Ok(())
    }
}
