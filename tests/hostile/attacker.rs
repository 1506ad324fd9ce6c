//! What a hostile client does: everything that it can reach, with seeded choices. Owns which act comes next,
//! sessions, and names and keys to use; what must not come of it is looked at from outside, in `main`.

mod logs;
mod messages;

use crate::client::{Given, Wire};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use varve_format::log::LIVE_HEADER_SIZE;
use varve_format::{InodeKey, LeaseNo};
use varve_ipc::{ClientKind, Hello, LeaseMode, PROTOCOL_VERSION, Request, Response, Want, Welcome};
use varve_testkit::workload::Rng;

/// Written to standard output before what must not be.
pub const FORBIDDEN: &str = "FORBIDDEN";
/// Written before the counts of acts.
pub const ACTS: &str = "ACTS";
/// Written every so often before the number of acts until then.
pub const SO_FAR: &str = "SO FAR";
/// How often.
const SAID_EVERY: u64 = 20;
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
            if done % SAID_EVERY == 0 {
                println!("{SO_FAR} {done}");
            }
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
        // An ordinary user is given segments of its own: looked at for the secret, as all that it gets.
        if let Some(segments) = given.nvm.as_ref().filter(|_| !self.job.owner) {
            let mut bytes = vec![0; welcome.nvm_bytes as usize];
            let file = File::from(segments.try_clone()?);
            let whole = std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).is_ok();
            if !whole
                || bytes
                    .windows(self.job.secret.len())
                    .any(|part| part == self.job.secret)
            {
                self.forbidden("the pool's memory is given to a user who may not have it");
            }
        }
        if given.backing.is_some() && !self.job.owner {
            self.forbidden("a file on the host's disk is given to a user who could fill it");
        }
        if given.verified.is_some() && !self.job.owner {
            self.forbidden("a user may say which blocks are whole");
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
}
