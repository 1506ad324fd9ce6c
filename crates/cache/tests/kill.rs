//! `kill -9` of a process that writes, at random moments: what is found afterwards is a whole version of the
//! right object, none older than what was durable, and nearly all of what was written 5 s before.
//!
//! The process that is killed is this test's own program. It notes each call in files before and after it;
//! what was written to a file outlives a kill. `VARVE_CACHE_KILL_ROUNDS=100` for that many rounds.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, SECRET, body, format, key, options, plan};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use varve_cache::device::{Device, DeviceError, FileDevice};
use varve_cache::store::{Admission, Superblock};
use varve_cache::{Cache, KeyHash, Options, Policy, PutOptions, Related, Scope, Secret};

const LEN: u64 = 192 << 20;
const KEYS: usize = 1200;
const THREADS: u64 = 2;
const INTERVAL: Duration = Duration::from_secs(2);
/// What was written so long before a kill is still there.
const SAFE_US: u64 = 5_000_000;
/// Names the part that a child has, see [`child`].
const CHILD: &str = "VARVE_CACHE_KILL_CHILD";

fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64
}

fn run_options() -> Options {
    Options {
        flush_interval: INTERVAL,
        admission: Admission::All,
        ..options()
    }
}

/// Keys that never have to give way to each other, so that what is missing was lost: no two with the same tag
/// in a set, no set with more than there is room for.
fn keys(layout: &Superblock) -> Vec<u64> {
    let ways = layout.shape().ways();
    let mut taken = HashSet::new();
    let mut filled: HashMap<u64, usize> = HashMap::new();
    (0..)
        .filter(|&n| {
            let hash = KeyHash::of(&Secret(SECRET), &key(n));
            let set = hash.set(layout.sets);
            let count = filled.entry(set).or_default();
            let fits = *count < ways && taken.insert((set, hash.tag()));
            *count += usize::from(fits);
            fits
        })
        .take(KEYS)
        .collect()
}

const PUT: u64 = 1;
const REMOVE: u64 = 2;
const PURGE: u64 = 3;
const FLUSH: u64 = 4;
/// The call noted last has returned.
const DONE: u64 = 5;

/// A note of five numbers: kind, key or tag, version, length, time.
fn note(file: &mut File, kind: u64, what: u64, version: u64, len: u64) {
    let words = [kind, what, version, len, now_us()];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    // One write: it is whole or not there.
    file.write_all(&bytes).unwrap();
}

fn notes(path: &Path) -> Vec<[u64; 5]> {
    let bytes = std::fs::read(path).unwrap_or_default();
    let words: Vec<u64> = bytes
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
        .collect();
    words
        .chunks_exact(5)
        .map(|words| words.try_into().unwrap())
        .collect()
}

fn tag(thread: u64, n: u64) -> [u8; 2] {
    [thread as u8, (n % 8) as u8]
}

fn length(random: &mut Random) -> u64 {
    match random.below(100) {
        0 => 200_000 + random.below(500_000),
        1..25 => random.below(30_000),
        _ => 100 + random.below(6000),
    }
}

/// One thread of the process that will be killed.
struct Writing<'c> {
    cache: &'c Cache,
    thread: u64,
    keys: Vec<u64>,
    version: u64,
    random: Random,
    /// The next one of the keys that are seldom put.
    cold: usize,
    file: File,
    /// What this life did last to a key: its version and length, or its end.
    newest: HashMap<u64, Option<(u64, u64)>>,
}

impl Writing<'_> {
    fn step(&mut self) {
        let mut n = self.keys[self.random.below(self.keys.len() as u64 / 4) as usize];
        self.version += 1;
        match self.random.below(1000) {
            0..100 => {
                // The others come round in ten seconds, so that some have been left alone for five.
                let cold = &self.keys[self.keys.len() / 4..];
                n = cold[self.cold % cold.len()];
                self.cold += 1;
                self.put(n);
            }
            100..700 => self.put(n),
            700..730 => self.put_group(n),
            730..930 => {
                let found = self.cache.get_body(&key(n));
                if let (Some(found), Some(newest)) = (found, self.newest.get(&n)) {
                    let right = newest.map(|(version, len)| body(n, version, len as usize));
                    assert!(right == Some(found), "not the newest version of key {n}");
                }
            }
            930..990 => {
                note(&mut self.file, REMOVE, n, self.version, 0);
                self.cache.remove(&key(n)).unwrap();
                note(&mut self.file, DONE, 0, 0, 0);
                self.newest.insert(n, None);
            }
            990 if self.random.below(2) == 0 => {
                let tag = tag(self.thread, n);
                note(&mut self.file, PURGE, u64::from(tag[1]), self.version, 0);
                self.cache.purge(Scope::Tag(&tag)).unwrap();
                note(&mut self.file, DONE, 0, 0, 0);
                let gone = self.keys.iter().filter(|other| *other % 8 == n % 8);
                self.newest.extend(gone.map(|&n| (n, None)));
            }
            _ => {
                note(&mut self.file, FLUSH, 0, 0, 0);
                self.cache.flush().unwrap();
                note(&mut self.file, DONE, 0, 0, 0);
            }
        }
    }

    fn put(&mut self, n: u64) {
        let len = length(&mut self.random);
        let tag = tag(self.thread, n);
        let options = PutOptions {
            tags: &[&tag],
            ..PutOptions::default()
        };
        let bytes = body(n, self.version, len as usize);
        note(&mut self.file, PUT, n, self.version, len);
        if len > 100_000 {
            let stream = self.cache.put_stream(&key(n), len, options).unwrap();
            let mut stream = stream.unwrap();
            for piece in bytes.chunks(50_000) {
                stream.write(piece).unwrap();
            }
            stream.finish().unwrap();
        } else {
            self.cache.put(&key(n), &bytes, options).unwrap();
        }
        note(&mut self.file, DONE, 0, 0, 0);
        self.newest.insert(n, Some((self.version, len)));
    }

    fn put_group(&mut self, first: u64) {
        let at = self.keys.iter().position(|&n| n == first).unwrap();
        let members: Vec<u64> = self.keys[at..].iter().copied().take(4).collect();
        let keys: Vec<_> = members.iter().map(|&n| key(n)).collect();
        let bodies: Vec<_> = members.iter().map(|&n| body(n, self.version, 1200)).collect();
        let tags: Vec<_> = members.iter().map(|&n| tag(self.thread, n)).collect();
        let tags: Vec<[&[u8]; 1]> = tags.iter().map(|tag| [&tag[..]]).collect();
        let group: Vec<_> = (0..members.len())
            .map(|at| Related {
                key: &keys[at],
                body: &bodies[at],
                options: PutOptions {
                    tags: &tags[at],
                    ..PutOptions::default()
                },
            })
            .collect();
        for &n in &members {
            note(&mut self.file, PUT, n, self.version, 1200);
        }
        self.cache.put_related(&group).unwrap();
        note(&mut self.file, DONE, 0, 0, 0);
        self.newest
            .extend(members.iter().map(|&n| (n, Some((self.version, 1200)))));
    }
}

/// What the process does that is killed: `DIR ROUND`. In other runs of the tests it is no test.
#[test]
fn child() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let (dir, round) = task.rsplit_once(' ').unwrap();
    let (dir, round): (PathBuf, u64) = (dir.into(), round.parse().unwrap());
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(&dir.join("store")).unwrap());
    let (cache, _) = Cache::open(vec![device], &run_options(), false).unwrap();
    let all = keys(cache.shards().next().unwrap().layout());
    let mut ticks = File::create(dir.join("ticks")).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let mut writing = Writing {
                cache: &cache,
                thread,
                keys: all.iter().copied().filter(|n| n % THREADS == thread).collect(),
                version: round << 32,
                random: Random(round * 1000 + thread),
                cold: (round * 100) as usize,
                file: File::create(dir.join(format!("notes-{thread}"))).unwrap(),
                newest: HashMap::new(),
            };
            scope.spawn(move || {
                let start = Instant::now();
                for step in 0.. {
                    writing.step();
                    // At most 500 calls a second, so that the log does not come round within a life.
                    let due = Duration::from_millis(2 * step);
                    std::thread::sleep(due.saturating_sub(start.elapsed()));
                }
            });
        }
        loop {
            let at = now_us();
            cache.tick().unwrap();
            note(&mut ticks, DONE, at, 0, 0);
            std::thread::sleep(Duration::from_millis(200));
        }
    });
}

/// Something that was done to a key.
#[derive(Debug, Clone, Copy)]
struct Done {
    version: u64,
    /// The length of an object that was put; `None`: an end.
    put: Option<u64>,
    /// When it returned; `None`: it was killed in it.
    ended_us: Option<u64>,
    /// Certainly durable, as a flush or a purge of the same thread returned later.
    flushed: bool,
}

type History = HashMap<u64, Vec<Done>>;

/// Adds what a thread noted.
fn learn(history: &mut History, path: &Path, thread: u64, keys: &[u64]) {
    // Calls that have not returned, and those that no flush has covered: key and place in its list.
    let mut open = Vec::<(u64, usize)>::new();
    let mut unflushed = Vec::<(u64, usize)>::new();
    let mut flushes = false;
    for [kind, what, version, len, time] in notes(path) {
        let touched: Vec<u64> = match kind {
            PUT | REMOVE => vec![what],
            PURGE => {
                let mine = keys.iter().filter(|n| *n % THREADS == thread && *n % 8 == what);
                mine.copied().collect()
            }
            _ => Vec::new(),
        };
        flushes |= matches!(kind, PURGE | FLUSH);
        for n in touched {
            let list = history.entry(n).or_default();
            open.push((n, list.len()));
            list.push(Done {
                version,
                put: (kind == PUT).then_some(len),
                ended_us: None,
                flushed: false,
            });
        }
        if kind == DONE {
            for (n, at) in open.drain(..) {
                history.get_mut(&n).unwrap()[at].ended_us = Some(time);
                unflushed.push((n, at));
            }
            if flushes {
                for (n, at) in unflushed.drain(..) {
                    history.get_mut(&n).unwrap()[at].flushed = true;
                }
                flushes = false;
            }
        }
    }
}

/// A file whose writes are dropped from some moment on, as by a kill at that moment.
struct Stoppable {
    inner: FileDevice,
    stopped: AtomicBool,
}

impl Device for Stoppable {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, off: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.inner.read_at(off, out)
    }

    fn write_at(&self, off: u64, data: &[u8]) -> Result<(), DeviceError> {
        match self.stopped.load(Ordering::Relaxed) {
            true => Ok(()),
            false => self.inner.write_at(off, data),
        }
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.inner.flush()
    }
}

/// What the rounds of a policy came to.
#[derive(Debug, Default)]
struct Sum {
    rounds: u64,
    /// Rounds that lived so long that something was safe.
    long_rounds: u64,
    calls: u64,
    safe: u64,
    safe_found: u64,
    found: u64,
    slowest_open: Duration,
}

struct Lives {
    policy: Policy,
    dir: tempfile::TempDir,
    keys: Vec<u64>,
    history: History,
    random: Random,
    sum: Sum,
}

impl Lives {
    fn new(policy: Policy, seed: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let device = FileDevice::create(&path, LEN).unwrap();
        format(&device, &plan(policy));
        let layout = Superblock::read(&device).unwrap().0;
        Self {
            policy,
            keys: keys(&layout),
            dir,
            history: History::new(),
            random: Random(seed),
            sum: Sum::default(),
        }
    }

    /// A life of a process, its end, and a look at what it left.
    fn round(&mut self, number: u64, lives: Duration) {
        let dir = self.dir.path();
        for name in ["notes-0", "notes-1", "ticks"] {
            let _ = std::fs::remove_file(dir.join(name));
        }
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture"])
            .env(CHILD, format!("{} {number}", dir.display()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(lives);
        let killed_us = now_us();
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(9),
            "{}: it ended by itself, see above",
            self.policy
        );
        for thread in 0..THREADS {
            let path = dir.join(format!("notes-{thread}"));
            self.sum.calls += notes(&path).iter().filter(|note| note[0] == DONE).count() as u64;
            learn(&mut self.history, &path, thread, &self.keys);
        }
        let last_tick_us = notes(&dir.join("ticks")).last().map_or(0, |note| note[1]);
        self.look(killed_us, last_tick_us);
        self.sum.rounds += 1;
    }

    fn look(&mut self, killed_us: u64, last_tick_us: u64) {
        let start = Instant::now();
        let device = Arc::new(Stoppable {
            inner: FileDevice::open(&self.dir.path().join("store")).unwrap(),
            stopped: AtomicBool::new(false),
        });
        let opened = Cache::open(vec![device.clone() as Arc<dyn Device>], &run_options(), false);
        let (cache, opened) = opened.unwrap();
        self.sum.slowest_open = self.sum.slowest_open.max(start.elapsed());
        assert!(!opened[0].gave_up, "{}: a kill is no damage", self.policy);
        let durable_us = last_tick_us.saturating_sub(INTERVAL.as_micros() as u64);
        let safe_us = killed_us - SAFE_US;
        // Else the machine was so busy that the flushes came late; that was not asked for.
        let counts = durable_us >= safe_us;
        let mut safe = 0;
        for (&n, done) in &mut self.history {
            let durable = |done: &Done| done.flushed || done.ended_us.is_some_and(|end| end < durable_us);
            let first = done.iter().rposition(durable).unwrap_or(0);
            let found = cache.get_body(&key(n));
            let is_safe = done.last().is_some_and(|last| {
                // Not what an earlier life put: the log may have come round to that.
                last.put.is_some() && last.ended_us.is_some_and(|end| end > 0 && end < safe_us)
            });
            if counts && is_safe {
                safe += 1;
                self.sum.safe_found += u64::from(found.is_some());
            }
            *done = match found {
                None => vec![Done {
                    version: 0,
                    put: None,
                    ended_us: Some(0),
                    flushed: true,
                }],
                Some(found) => {
                    self.sum.found += 1;
                    let right = done[first..].iter().find(|done| {
                        done.put == Some(found.len() as u64) && body(n, done.version, found.len()) == found
                    });
                    let Some(right) = right else {
                        panic!(
                            "{}: key {n} gives {} bytes that it must not give: {done:?}, durable {durable_us}",
                            self.policy,
                            found.len()
                        );
                    };
                    vec![Done {
                        ended_us: Some(0),
                        flushed: true,
                        ..*right
                    }]
                }
            };
        }
        self.sum.safe += safe;
        self.sum.long_rounds += u64::from(safe > 0);
        // The next life begins after a clean end, or where this look found the store.
        device.stopped.store(self.random.below(2) == 0, Ordering::Relaxed);
    }
}

#[test]
fn killed_process_loses_nothing_that_is_five_seconds_old_and_leaves_no_other_bytes() {
    let rounds = std::env::var("VARVE_CACHE_KILL_ROUNDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(16u64);
    let each = rounds.div_ceil(Policy::ALL.len() as u64);
    let sums: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = Policy::ALL
            .into_iter()
            .zip(0..)
            .map(|(policy, n)| {
                scope.spawn(move || {
                    let mut lives = Lives::new(policy, 7 + n);
                    for number in 1..=each {
                        // Every other life ends early.
                        let ms = match number % 2 {
                            0 => 50 + lives.random.below(2500),
                            _ => 7500 + lives.random.below(2500),
                        };
                        lives.round(number, Duration::from_millis(ms));
                    }
                    (policy, lives.sum)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (policy, sum) in sums {
        println!(
            "{policy:<17} {} kills, {} calls; {} of {} objects of 5 s before found ({} rounds); {} found in all; \
             slowest start {:.3} s",
            sum.rounds,
            sum.calls,
            sum.safe_found,
            sum.safe,
            sum.long_rounds,
            sum.found,
            sum.slowest_open.as_secs_f64()
        );
        assert!(
            sum.safe_found as f64 >= 0.99 * sum.safe as f64,
            "{policy}: {sum:?}"
        );
        assert!(sum.slowest_open < Duration::from_secs(5), "{policy}: {sum:?}");
    }
}
