//! One process: random operations until the time is over, each recorded. Owns what an operation is; whether
//! its answer is right is the checker's business.

use crate::record::{Kind, Record};
use crate::sys::{PAGE, Page};
use crate::ways::{Calls, Lock, Open, Outcome, Way};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;
use varve_testkit::workload::Rng;

/// Tells a test process that it is a worker: `WAY POOL OUTSIDE SEED PROCESS PROCESSES LOCKS`, a word a line;
/// the last says whether it takes the kernel's locks.
pub const ENV: &str = "VARVE_SHARING_WORKER";
/// Bytes of each register.
pub const REGISTERS: [usize; 6] = [8, 8, 4096, 4096, 20_000, 65_536];
/// Of them, those that are mapped too: of one word, which no load sees half changed.
const VIEWS: usize = 2;
/// Files that are replaced.
pub const REPLACED: u8 = 2;
/// Names of files, then of directories, in `names/`; then the lock file.
pub const FILES: u8 = 8;
pub const DIRS: u8 = 4;
pub const LOCK_FILE: u8 = FILES + DIRS;
/// What a `Hold` is of.
pub const LOCKS: [&str; 4] = ["lock file", "token", "flock", "record locks"];
/// Files that are unlinked while open.
const VICTIMS: u64 = 3;
/// How many of them a process holds.
const KEPT_MAX: usize = 4;
/// Bytes of a record of the log. A whole number of them is a page: a mount's append is one request.
pub const ENTRY: usize = 64;
/// Operations a second of a process, at most: a history of ten minutes must fit in memory.
const RATE: u64 = 1500;
/// How long a worker may go on after the others were told to end.
const STOP_LIMIT: Duration = Duration::from_secs(100);

/// Nanoseconds of the monotonic clock, the same for all processes.
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Where a process' history is.
pub fn history(outside: &Path, process: u8) -> PathBuf {
    outside.join(format!("history-{process}"))
}

/// Where a process says that it is ready.
pub fn ready(outside: &Path, process: u8) -> PathBuf {
    outside.join(format!("ready-{process}"))
}

/// Made by the test when all are ready: how many seconds.
pub fn go(outside: &Path) -> PathBuf {
    outside.join("go")
}

/// A block that says one value in every word.
pub fn block(value: u64, len: usize) -> Vec<u8> {
    value.to_le_bytes().repeat(len / 8)
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(word)
}

/// The first word of a block, and the first other one.
fn values(bytes: &[u8]) -> (u64, u64) {
    let first = word(bytes);
    let other = bytes.chunks_exact(8).map(word).find(|value| *value != first);
    (first, other.unwrap_or(first))
}

/// A record of the log.
pub fn entry(value: u64) -> [u8; ENTRY] {
    let mut bytes = [0; ENTRY];
    for (n, part) in bytes.chunks_exact_mut(8).enumerate() {
        part.copy_from_slice(&value.wrapping_add(n as u64 * 0x0101_0101_0101_0101).to_le_bytes());
    }
    bytes
}

/// The value of a record, if it is whole.
pub fn entry_value(bytes: &[u8]) -> Option<u64> {
    let value = word(bytes);
    (entry(value) == bytes).then_some(value)
}

/// Path of a name that is made and taken away.
pub fn name(object: u8) -> String {
    match object {
        LOCK_FILE => "lock".into(),
        dir if dir >= FILES => format!("names/d{}", dir - FILES),
        file => format!("names/f{file}"),
    }
}

/// What the first process finds.
pub fn plant(mnt: &Path, processes: u8) {
    let put = |name: &str, bytes: &[u8]| std::fs::write(mnt.join(name), bytes).expect("planted");
    for (n, len) in REGISTERS.iter().enumerate() {
        put(&format!("reg{n}"), &block(0, *len));
    }
    for n in 0..REPLACED {
        put(&format!("rep{n}"), &block(0, PAGE));
    }
    for n in 0..LOCKS.len() {
        put(&format!("count{n}"), &[0; 8]);
    }
    put("log", b"");
    put("map", &[0; PAGE]);
    put("token-0", b"");
    std::fs::create_dir(mnt.join("names")).expect("planted");
    assert!(processes > 0);
}

/// Is the whole process if it was started as a worker; else does nothing.
pub fn main() {
    let Ok(words) = std::env::var(ENV) else {
        return;
    };
    let words: Vec<&str> = words.lines().collect();
    let [way, pool, outside, seed, process, processes, locks] = words.as_slice() else {
        panic!("{ENV} is incomplete");
    };
    let way = crate::ways::ALL
        .into_iter()
        .find(|each| each.name() == *way)
        .expect("a way");
    let (seed, process): (u64, u8) = (seed.parse().expect("a seed"), process.parse().expect("a number"));
    let outside = PathBuf::from(outside);
    // One that is stopped would not see the end of the pipe when the test is killed.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    std::thread::spawn(|| {
        // The end of the pipe: the test is over or gone.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::thread::sleep(STOP_LIMIT);
        std::process::exit(3);
    });
    let mut worker = Worker::new(
        way,
        Path::new(pool),
        seed,
        process,
        processes.parse().expect("a number"),
        locks.parse().expect("whether it takes locks"),
    );
    std::fs::write(ready(&outside, process), b"").expect("ready");
    let seconds = loop {
        match std::fs::read_to_string(go(&outside)) {
            Ok(text) if !text.is_empty() => break text.parse().expect("seconds"),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    worker.work(seconds);
    crate::record::store(&history(&outside, process), &worker.records).expect("stored");
    worker.end();
    std::process::exit(0);
}

struct Worker {
    calls: Calls,
    way: Way,
    process: u8,
    processes: u8,
    rng: Rng,
    counter: u64,
    records: Vec<Record>,
    registers: Vec<Open>,
    counters: Vec<Open>,
    log: Open,
    /// Files under locks: under `flock`, and under record locks of either kind.
    locked: Option<(Open, Open)>,
    /// Not of a linked program.
    mapped: Option<Page>,
    /// Maps of the first registers, to read only; not of a linked program. Under `varve run` they show copies
    /// that the process keeps.
    views: Vec<Page>,
    map: Open,
    kept: BTreeMap<u64, Open>,
}

impl Worker {
    fn new(way: Way, pool: &Path, seed: u64, process: u8, processes: u8, locks: bool) -> Self {
        let calls = Calls::new(way, pool);
        let open = |name: String| calls.open(&name, libc::O_RDWR).expect("it is there");
        let registers = (0..REGISTERS.len()).map(|n| open(format!("reg{n}"))).collect();
        let counters = (0..2).map(|n| open(format!("count{n}"))).collect();
        let locked = locks.then(|| (open("count2".into()), open("count3".into())));
        let mapped = (!way.is_linked()).then(|| {
            let path = pool.join("mnt/map");
            let file = File::options().read(true).write(true).open(path);
            Page::map(&file.expect("it is there")).expect("mapped")
        });
        let view = |n: usize| {
            let file = File::open(pool.join(format!("mnt/reg{n}")));
            Page::view(&file.expect("it is there")).expect("mapped")
        };
        let views = if way.is_linked() {
            Vec::new()
        } else {
            (0..VIEWS).map(view).collect()
        };
        Self {
            registers,
            views,
            counters,
            log: calls
                .open("log", libc::O_WRONLY | libc::O_APPEND)
                .expect("it is there"),
            map: open("map".into()),
            locked,
            mapped,
            calls,
            way,
            process,
            processes,
            rng: Rng::new(seed ^ ((u64::from(process) + 1) << 32)),
            counter: 0,
            records: Vec::new(),
            kept: BTreeMap::new(),
        }
    }

    fn end(self) {
        let locked = self
            .locked
            .into_iter()
            .flat_map(|(whole, ranges)| [whole, ranges]);
        let opens = self.registers.into_iter().chain(self.counters).chain(locked);
        for open in opens.chain(self.kept.into_values()).chain([self.log, self.map]) {
            let _ = self.calls.close(open);
        }
        self.calls.end();
    }

    fn work(&mut self, seconds: u64) {
        let begin = now();
        let nanos = seconds * 1_000_000_000;
        // Each once, then as it comes: every process makes progress in everything.
        for act in 0..100 {
            self.act(act);
        }
        while now() - begin < nanos {
            for _ in 0..1 + self.rng.below(64) {
                let act = self.rng.below(100);
                self.act(act);
            }
            let due = self.records.len() as u64 * (1_000_000_000 / RATE);
            let left = (begin + due).saturating_sub(now());
            std::thread::sleep(Duration::from_nanos(left));
        }
    }

    /// A value that nobody else writes; never 0.
    fn value(&mut self) -> u64 {
        self.counter += 1;
        ((u64::from(self.process) + 1) << 48) | self.counter
    }

    fn note(&mut self, kind: Kind, object: u8, start: u64, end: u64, result: Outcome<(u64, u64)>) {
        let (errno, (a, b)) = match result {
            Ok(values) => (0, values),
            Err(errno) => (errno, (0, 0)),
        };
        self.records.push(Record {
            process: self.process,
            kind,
            object,
            errno,
            start,
            end,
            a,
            b,
        });
    }

    /// Makes an operation and records it; whether it succeeded.
    fn record(
        &mut self,
        kind: Kind,
        object: u8,
        operation: impl FnOnce(&mut Self) -> Outcome<(u64, u64)>,
    ) -> bool {
        let start = now();
        let result = operation(self);
        let end = now();
        self.note(kind, object, start, end, result);
        result.is_ok()
    }

    fn act(&mut self, act: u64) {
        match act {
            0..12 => self.write_register(),
            12..30 => self.read_register(),
            30..34 => self.replace(),
            34..42 => self.read_replaced(),
            42..52 => {
                let value = self.value();
                self.record(Kind::Append, 0, |w| {
                    w.calls.write(&w.log, None, &entry(value))?;
                    Ok((value, 0))
                });
            }
            52..56 => {
                self.record(Kind::Stat, 0, |w| w.calls.stat("log"));
            }
            56..58 => self.tail(),
            58..70 => self.change_name(),
            70..74 => self.look(),
            74..78 => self.list(),
            78..82 => self.lock_file(),
            82..86 => self.token(),
            86..91 => self.locks(),
            91..95 => self.map(),
            95..97 => self.plant(),
            97..98 => self.keep(),
            _ => self.again(),
        }
    }

    fn write_register(&mut self) {
        let (n, value) = (self.rng.below(REGISTERS.len() as u64) as usize, self.value());
        let bytes = block(value, REGISTERS[n]);
        let anew = self.rng.below(3) == 0;
        self.record(Kind::RegWrite, n as u8, |w| {
            if anew {
                let open = w.calls.open(&format!("reg{n}"), libc::O_WRONLY)?;
                let done = w.calls.write(&open, Some(0), &bytes);
                w.calls.close(open)?;
                done?;
            } else {
                w.calls.write(&w.registers[n], Some(0), &bytes)?;
            }
            Ok((value, 0))
        });
    }

    fn read_register(&mut self) {
        let n = self.rng.below(REGISTERS.len() as u64) as usize;
        let mut bytes = vec![0; REGISTERS[n]];
        let (anew, look) = (self.rng.below(3) == 0, self.rng.below(2) == 0);
        self.record(Kind::RegRead, n as u8, |w| {
            if let Some(view) = w.views.get(n).filter(|_| look) {
                let value = view.load();
                return Ok((value, value));
            }
            if anew {
                w.read_anew(&format!("reg{n}"), &mut bytes)?;
            } else {
                w.calls.read(&w.registers[n], 0, &mut bytes)?;
            }
            Ok(values(&bytes))
        });
    }

    fn read_anew(&self, path: &str, bytes: &mut [u8]) -> Outcome<()> {
        let open = self.calls.open(path, libc::O_RDONLY)?;
        let done = self.calls.read(&open, 0, bytes);
        self.calls.close(open)?;
        done
    }

    /// A new file with one value, under a name of this process.
    fn temporary(&mut self, value: u64) -> Outcome<String> {
        let path = format!("tmp-{}", self.process);
        let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY;
        let open = self.calls.open(&path, flags)?;
        let done = self.calls.write(&open, Some(0), &block(value, PAGE));
        self.calls.close(open)?;
        done.map(|()| path)
    }

    /// Replaces `to` by a new file; only the rename is timed.
    fn renamed_over(&mut self, kind: Kind, object: u8, to: &str) {
        let value = self.value();
        match self.temporary(value) {
            Ok(from) => {
                self.record(kind, object, |w| {
                    w.calls.rename(&from, to)?;
                    Ok((value, 0))
                });
            }
            Err(errno) => {
                let time = now();
                self.note(kind, object, time, time, Err(errno));
            }
        }
    }

    fn replace(&mut self) {
        let n = self.rng.below(u64::from(REPLACED)) as u8;
        self.renamed_over(Kind::Replace, n, &format!("rep{n}"));
    }

    fn read_replaced(&mut self) {
        let n = self.rng.below(u64::from(REPLACED)) as u8;
        let mut bytes = vec![0; PAGE];
        let look = self.rng.below(4) == 0;
        self.record(Kind::ReadReplaced, n, |w| {
            if look {
                w.calls.stat(&format!("rep{n}"))?;
            }
            w.read_anew(&format!("rep{n}"), &mut bytes)?;
            Ok(values(&bytes))
        });
    }

    fn tail(&mut self) {
        self.record(Kind::Tail, 0, |w| {
            let (size, _) = w.calls.stat("log")?;
            if size == 0 {
                return Ok((1, 0));
            }
            let mut bytes = [0; ENTRY];
            let open = w.calls.open("log", libc::O_RDONLY)?;
            let done = w.calls.read(&open, size - ENTRY as u64, &mut bytes);
            w.calls.close(open)?;
            done?;
            let whole = size % ENTRY as u64 == 0 && entry_value(&bytes).is_some();
            Ok((u64::from(whole), size))
        });
    }

    fn change_name(&mut self) {
        let object = self.rng.below(u64::from(FILES + DIRS)) as u8;
        let make = self.rng.below(2) == 0;
        if object >= FILES {
            if make {
                self.record(Kind::Mkdir, object, |w| {
                    w.calls.mkdir(&name(object)).map(|()| (0, 0))
                });
            } else {
                self.record(Kind::Rmdir, object, |w| {
                    w.calls.rmdir(&name(object)).map(|()| (0, 0))
                });
            }
        } else if make {
            self.create(object);
        } else {
            self.record(Kind::Unlink, object, |w| {
                w.calls.unlink(&name(object)).map(|()| (0, 0))
            });
        }
    }

    fn create(&mut self, object: u8) -> bool {
        let mut made = None;
        let done = self.record(Kind::Create, object, |w| {
            let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY;
            made = Some(w.calls.open(&name(object), flags)?);
            Ok((0, 0))
        });
        if let Some(open) = made {
            let _ = self.calls.close(open);
        }
        done
    }

    fn look(&mut self) {
        let object = self.rng.below(u64::from(LOCK_FILE) + 1) as u8;
        self.record(Kind::Look, object, |w| {
            w.calls.stat(&name(object)).map(|_| (0, 0))
        });
    }

    fn list(&mut self) {
        self.record(Kind::List, 0, |w| {
            let (mut seen, mut wrong) = (0_u64, 0);
            for found in w.calls.list("names")? {
                let object = (0..LOCK_FILE).find(|each| name(*each).as_bytes()[6..] == found[..]);
                match object {
                    Some(object) if seen & 1 << object == 0 => seen |= 1 << object,
                    _ => wrong += 1,
                }
            }
            Ok((seen, wrong))
        });
    }

    /// The counter of a lock, one more: what it was.
    fn count(&self, open: &Open) -> Outcome<u64> {
        let mut bytes = [0; 8];
        self.calls.read(open, 0, &mut bytes)?;
        let was = word(&bytes);
        self.calls.write(open, Some(0), &(was + 1).to_le_bytes())?;
        Ok(was)
    }

    fn lock_file(&mut self) {
        if !self.create(LOCK_FILE) {
            return;
        }
        self.record(Kind::Hold, 0, |w| w.count(&w.counters[0]).map(|was| (was, 0)));
        self.record(Kind::Unlink, LOCK_FILE, |w| {
            w.calls.unlink(&name(LOCK_FILE)).map(|()| (0, 0))
        });
    }

    fn token(&mut self) {
        let (own, held) = (
            format!("token-{}", self.process),
            format!("held-{}", self.process),
        );
        if !self.record(Kind::Take, 0, |w| w.calls.rename(&own, &held).map(|()| (0, 0))) {
            return;
        }
        self.record(Kind::Hold, 1, |w| w.count(&w.counters[1]).map(|was| (was, 0)));
        let next = (self.process + 1) % self.processes;
        self.record(Kind::Hand, 0, |w| {
            w.calls.rename(&held, &format!("token-{next}"))?;
            Ok((u64::from(next), 0))
        });
    }

    fn locks(&mut self) {
        let Some(locked) = self.locked.take() else {
            return self.look();
        };
        let (whole, ranges) = &locked;
        for (kind, object, open, lock) in [
            (Kind::Flock, 2, whole, Lock::Flock),
            (Kind::Posix, 3, ranges, Lock::Process),
            (Kind::Ofd, 3, ranges, Lock::Description),
        ] {
            let taken = self.record(kind, object, |w| w.calls.lock(open, lock, true).map(|()| (0, 0)));
            if !taken {
                continue;
            }
            self.record(Kind::Hold, object, |w| w.count(open).map(|was| (was, 0)));
            if let Err(errno) = self.calls.lock(open, lock, false) {
                let time = now();
                self.note(kind, object, time, time, Err(errno));
            }
        }
        self.locked = Some(locked);
    }

    fn map(&mut self) {
        let choice = self.rng.below(8);
        if let Some(page) = &self.mapped {
            if choice < 4 {
                let start = now();
                let was = page.add();
                let end = now();
                return self.note(Kind::MapAdd, 0, start, end, Ok((was, 0)));
            }
            if choice == 4 {
                let start = now();
                let was = page.add();
                let end = now();
                let synced = page
                    .sync()
                    .map(|()| (was + 1, 0))
                    .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO) as u16);
                let done = now();
                self.note(Kind::MapAdd, 0, start, end, Ok((was, 0)));
                return self.note(Kind::MapSync, 0, end, done, synced);
            }
        }
        let object = u8::from(self.way.is_linked());
        self.record(Kind::MapRead, object, |w| {
            let mut bytes = [0; 8];
            w.calls.read(&w.map, 0, &mut bytes)?;
            Ok((word(&bytes), 0))
        });
    }

    fn plant(&mut self) {
        let n = self.rng.below(VICTIMS);
        if self.rng.below(3) > 0 {
            self.renamed_over(Kind::Plant, n as u8, &format!("victim{n}"));
            return;
        }
        let start = now();
        let result = self.calls.unlink(&format!("victim{n}"));
        let end = now();
        if result != Err(libc::ENOENT as u16) {
            self.note(Kind::Plant, n as u8, start, end, result.map(|()| (0, 0)));
        }
    }

    /// Opens one and keeps it open.
    fn keep(&mut self) {
        if self.kept.len() >= KEPT_MAX {
            let (_, open) = self.kept.pop_first().expect("some");
            let _ = self.calls.close(open);
        }
        let n = self.rng.below(VICTIMS);
        let mut kept = None;
        self.record(Kind::Keep, n as u8, |w| {
            let open = w.calls.open(&format!("victim{n}"), libc::O_RDONLY)?;
            let mut bytes = vec![0; PAGE];
            let done = w.calls.read(&open, 0, &mut bytes);
            let found = values(&bytes);
            kept = Some((found.0, open));
            done.map(|()| found)
        });
        if let Some((value, open)) = kept
            && let Some(old) = self.kept.insert(value, open)
        {
            let _ = self.calls.close(old);
        }
    }

    fn again(&mut self) {
        let Some(&value) = self
            .kept
            .keys()
            .nth(self.rng.below(self.kept.len() as u64) as usize)
        else {
            return self.keep();
        };
        self.record(Kind::Again, 0, |w| {
            let mut bytes = vec![0; PAGE];
            w.calls.read(&w.kept[&value], 0, &mut bytes)?;
            let (first, other) = values(&bytes);
            Ok((if first == value { other } else { first }, value))
        });
    }
}
