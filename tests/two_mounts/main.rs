//! Two mounts of one pool and a linked program beside them, on the same names and files: what one did, the
//! others see as soon as its call has returned; what they do at once, none of them tears.
//!
//! `VARVE_SEED` chooses the steps, `VARVE_TWO_MOUNTS_STEPS` their number (600 if not given).
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod model;
mod ways;

use common::{Pool, cannot_mount, run_ok, varve, wait_until};
use model::Model;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};
use varve_libfs::{Cred, Fs, FsOptions, Posix, SocketConnector};
use varve_media::{Backing, MappedRegion, Region};
use varve_testkit::workload::Rng;
use ways::{Open, Way};

const TIERS: [&str; 6] = ["--nvm", "shm:64M", "--ssd", "64M", "--hdd", "128M"];
/// Most files that are held open at a time.
const OPENS_MAX: usize = 6;
/// Bytes of the file that stays mapped.
const MAPPED_BYTES: u64 = 64 << 10;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {text}"))
    })
}

/// The second mount; gone when dropped.
struct Second {
    at: PathBuf,
    child: Child,
}

impl Second {
    fn new(pool: &Pool) -> Self {
        let at = pool.outside().join("second");
        std::fs::create_dir(&at).unwrap();
        let child = varve().arg("mount").arg(pool.dir()).arg(&at).spawn().unwrap();
        let second = Self { at, child };
        wait_until("the second mount", || {
            let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
            table.contains(&format!(" {} ", second.at.display()))
        });
        second
    }

    fn end(mut self) {
        run_ok(varve().arg("umount").arg(&self.at));
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = varve().args(["umount", "--force"]).arg(&self.at).output();
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn linked(pool: &Pool) -> (Fs, Way) {
    let connector = Arc::new(SocketConnector {
        path: pool.dir().join("sock"),
    });
    let fs = Fs::mount(connector, FsOptions::default()).unwrap();
    let cred = Cred {
        uid: 0,
        gid: 0,
        groups: Vec::new(),
    };
    (fs.clone(), Way::Linked(Box::new(Posix::new(fs, cred))))
}

/// Runs `test` with the three ways into a fresh pool.
fn three_ways(test: impl FnOnce(&[Way])) {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&TIERS);
    let second = Second::new(&pool);
    let (fs, third) = linked(&pool);
    test(&[Way::Mount(pool.mnt()), Way::Mount(second.at.clone()), third]);
    fs.unmount().unwrap();
    second.end();
    run_ok(varve().arg("fsck").arg(pool.dir()));
    pool.down();
}

/// A file that is held open: by which way, and which file it is.
struct Held {
    way: usize,
    open: Option<Open>,
    file: usize,
}

struct Steps<'w> {
    ways: &'w [Way],
    rng: Rng,
    model: Model,
    held: Vec<Held>,
    seed: u64,
    step: u64,
    /// Inode numbers, as first seen.
    inos: BTreeMap<usize, u64>,
    told: Vec<String>,
}

impl Steps<'_> {
    fn path(&mut self) -> String {
        let dir = *self.rng.pick(&["", "d0/", "d1/", "e0/"]);
        format!("{dir}f{}", self.rng.below(3))
    }

    fn data(&mut self) -> Vec<u8> {
        let len = match self.rng.below(8) {
            0 => 20_000,
            1 => 4096,
            _ => 1 + self.rng.below(300),
        };
        let byte = (self.step % 251) as u8 + 1;
        vec![byte; len as usize]
    }

    fn fail(&self, what: &str) -> ! {
        let from = self.told.len().saturating_sub(25);
        panic!(
            "VARVE_SEED={}, step {}: {what}\nthe last steps:\n{}",
            self.seed,
            self.step,
            self.told[from..].join("\n")
        );
    }

    fn same<T: PartialEq + std::fmt::Debug>(&self, what: &str, is: &T, must: &T) {
        if is != must {
            self.fail(&format!("{what}: is {is:?}, must be {must:?}"));
        }
    }

    fn same_bytes(&self, what: &str, is: &[u8], must: &[u8]) {
        if is != must {
            let at = is.iter().zip(must).position(|(a, b)| a != b);
            self.fail(&format!(
                "{what}: {} bytes, must be {}; first other byte {at:?}",
                is.len(),
                must.len()
            ));
        }
    }

    /// One random step by one way, and a look by all.
    fn step(&mut self) {
        let way = self.rng.below(self.ways.len() as u64) as usize;
        let ways = self.ways;
        let w = &ways[way];
        let path = self.path();
        let mut touched = vec![path.clone()];
        let kind = self.rng.below(100);
        match kind {
            0..25 => {
                let (append, data) = (self.rng.below(2) == 0, self.data());
                self.told.push(format!(
                    "{}: write {path} append {append} {} bytes",
                    w.name(),
                    data.len()
                ));
                let flags = libc::O_CREAT | libc::O_RDWR | if append { libc::O_APPEND } else { 0 };
                let at = self.rng.below(10_000);
                let is = w.open(&path, flags).and_then(|open| {
                    let wrote = w.write(&open, (!append).then_some(at), &data);
                    w.close(open)?;
                    wrote
                });
                let must = self.model.find_or_make(&path).map(|file| {
                    let body = &mut self.model.files[file].data;
                    let at = if append { body.len() } else { at as usize };
                    body.resize(body.len().max(at + data.len()), 0);
                    body[at..at + data.len()].copy_from_slice(&data);
                });
                self.same("write", &is, &must);
            }
            25..33 => {
                let size = self.rng.below(12_000);
                self.told.push(format!("{}: truncate {path} to {size}", w.name()));
                let is = w.open(&path, libc::O_RDWR).and_then(|open| {
                    let done = w.truncate(&open, size);
                    w.close(open)?;
                    done
                });
                let must = self
                    .model
                    .find(&path)
                    .map(|file| self.model.files[file].data.resize(size as usize, 0));
                self.same("truncate", &is, &must);
            }
            33..48 => {
                let to = self.path();
                self.told.push(format!("{}: rename {path} {to}", w.name()));
                let (is, must) = (w.rename(&path, &to), self.model.rename(&path, &to));
                self.same("rename", &is, &must);
                touched.push(to);
            }
            48..56 => {
                let to = self.path();
                self.told.push(format!("{}: link {path} {to}", w.name()));
                let (is, must) = (w.link(&path, &to), self.model.link(&path, &to));
                self.same("link", &is, &must);
                touched.push(to);
            }
            56..68 => {
                self.told.push(format!("{}: unlink {path}", w.name()));
                let (is, must) = (w.unlink(&path), self.model.unlink(&path));
                self.same("unlink", &is, &must);
            }
            68..74 => {
                let permissions = *self.rng.pick(&[0o600, 0o644, 0o755]);
                self.told
                    .push(format!("{}: chmod {path} {permissions:o}", w.name()));
                let is = w.chmod(&path, permissions);
                let must = self
                    .model
                    .find(&path)
                    .map(|file| self.model.files[file].permissions = permissions);
                self.same("chmod", &is, &must);
            }
            74..82 => {
                let make = self.rng.below(2) == 0;
                self.told.push(format!(
                    "{}: {} e0",
                    w.name(),
                    if make { "mkdir" } else { "rmdir" }
                ));
                let (is, must) = if make {
                    (w.mkdir("e0"), self.model.mkdir("e0"))
                } else {
                    (w.rmdir("e0"), self.model.rmdir("e0"))
                };
                self.same("mkdir or rmdir", &is, &must);
            }
            82..90 => self.hold(way, &path),
            _ => self.use_held(),
        }
        for path in &touched {
            self.look(path);
        }
    }

    /// Opens a file for later; or closes one.
    fn hold(&mut self, way: usize, path: &str) {
        if self.held.len() >= OPENS_MAX {
            let at = self.rng.below(self.held.len() as u64) as usize;
            let mut held = self.held.swap_remove(at);
            let closed = self.ways[held.way].close(held.open.take().unwrap());
            self.same("close", &closed, &Ok(()));
            return;
        }
        self.told.push(format!("{}: open {path}", self.ways[way].name()));
        match (self.ways[way].open(path, libc::O_RDWR), self.model.find(path)) {
            (Ok(open), Ok(file)) => self.held.push(Held {
                way,
                open: Some(open),
                file,
            }),
            (is, must) => self.same("open", &is.map(|_| ()), &must.map(|_| ())),
        }
    }

    /// Writes to, or looks at, a file that is held open, whether it has a name or not.
    fn use_held(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let held = self.rng.below(self.held.len() as u64) as usize;
        let data = self.data();
        let at = self.rng.below(8000);
        let writes = self.rng.below(2) == 0;
        let Held { way, open, file } = &self.held[held];
        let (way, file) = (&self.ways[*way], *file);
        let open = open.as_ref().unwrap();
        self.told
            .push(format!("{}: held file {file}, writes {writes}", way.name()));
        if writes {
            let is = way.write(open, Some(at), &data);
            let at = at as usize;
            let body = &mut self.model.files[file].data;
            body.resize(body.len().max(at + data.len()), 0);
            body[at..at + data.len()].copy_from_slice(&data);
            self.same("write to an open file", &is, &Ok(()));
        }
        for other in self.held.iter().filter(|held| held.file == file) {
            let (way, open) = (&self.ways[other.way], other.open.as_ref().unwrap());
            let what = format!("file {file} held open by {}", way.name());
            let stat = way
                .fstat(open)
                .unwrap_or_else(|errno| self.fail(&format!("{what}: fstat: errno {errno}")));
            let must = &self.model.files[file];
            self.same(
                &what,
                &(stat.size, stat.nlink, stat.permissions),
                &(must.data.len() as u64, must.nlink, must.permissions),
            );
            match way.read(open) {
                Ok(bytes) => self.same_bytes(&what, &bytes, &must.data),
                Err(errno) => self.fail(&format!("{what}: read: errno {errno}")),
            }
        }
    }

    /// What all ways see at `path` and of its directory.
    fn look(&mut self, path: &str) {
        let dir = path.rsplit_once('/').map_or("", |(dir, _)| dir);
        // In another order each time: the first look takes the leases.
        let first = self.rng.below(self.ways.len() as u64) as usize;
        let must = self.model.find(path);
        for n in 0..self.ways.len() {
            let way = &self.ways[(first + n) % self.ways.len()];
            let what = format!("{} looks at {path}", way.name());
            match (way.stat(path), must) {
                (Ok(stat), Ok(file)) => {
                    let ino = *self.inos.entry(file).or_insert(stat.ino);
                    let must = &self.model.files[file];
                    self.same(
                        &what,
                        &(stat.size, stat.nlink, stat.permissions, stat.is_dir, stat.ino),
                        &(must.data.len() as u64, must.nlink, must.permissions, false, ino),
                    );
                    let read = way.open(path, libc::O_RDONLY).and_then(|open| {
                        let bytes = way.read(&open);
                        way.close(open)?;
                        bytes
                    });
                    match read {
                        Ok(bytes) => self.same_bytes(&what, &bytes, &must.data),
                        Err(errno) => self.fail(&format!("{what}: read: errno {errno}")),
                    }
                }
                (is, must) => self.same(&what, &is.map(|_| ()), &must.map(|_| ())),
            }
            if dir.is_empty() || self.model.dirs.contains(dir) {
                self.same(
                    &format!("{} lists {dir:?}", way.name()),
                    &way.list(dir),
                    &Ok(self.model.list(dir)),
                );
            } else {
                self.same(
                    &format!("{} lists {dir:?}", way.name()),
                    &way.list(dir),
                    &Err(libc::ENOENT),
                );
            }
        }
    }
}

#[test]
fn every_way_sees_what_another_did_when_its_call_has_returned() {
    let (seed, steps) = (number("VARVE_SEED", 1), number("VARVE_TWO_MOUNTS_STEPS", 600));
    three_ways(|ways| {
        let mut model = Model::default();
        for (way, dir) in ["d0", "d1"].into_iter().enumerate() {
            ways[way].mkdir(dir).unwrap();
            model.mkdir(dir).unwrap();
        }
        let mut run = Steps {
            ways,
            rng: Rng::new(seed),
            model,
            held: Vec::new(),
            seed,
            step: 0,
            inos: BTreeMap::new(),
            told: Vec::new(),
        };
        for step in 0..steps {
            run.step = step;
            run.step();
        }
        assert!(
            !run.model.names.is_empty() && run.model.files.len() > 20,
            "too little happened"
        );
        for mut held in run.held.drain(..) {
            ways[held.way].close(held.open.take().unwrap()).unwrap();
        }
    });
}

/// How late a page may be on a machine that is busy with other things.
const LATE: Duration = Duration::from_secs(20);

#[test]
fn mapping_of_one_way_shows_what_another_wrote() {
    let seed = number("VARVE_SEED", 1);
    three_ways(|ways| {
        let mut rng = Rng::new(seed);
        let mut must = vec![0_u8; MAPPED_BYTES as usize];
        let open = ways[0].open("mapped", libc::O_CREAT | libc::O_RDWR).unwrap();
        ways[0].write(&open, Some(0), &must).unwrap();
        ways[0].close(open).unwrap();
        let maps: Vec<(String, MappedRegion)> = ways
            .iter()
            .filter_map(|way| match way {
                Way::Mount(at) => {
                    let map = MappedRegion::open(&at.join("mapped"), Backing::File, MAPPED_BYTES, false);
                    Some((way.name(), map.unwrap()))
                }
                Way::Linked(_) => None,
            })
            .collect();
        let opens: Vec<Open> = ways
            .iter()
            .map(|way| way.open("mapped", libc::O_RDWR).unwrap())
            .collect();
        for step in 0..300_u64 {
            let way = rng.below(3) as usize;
            let len = 1 + rng.below(9000);
            let at = rng.below(MAPPED_BYTES - len);
            let data = vec![(step % 255) as u8 + 1; len as usize];
            ways[way].write(&opens[way], Some(at), &data).unwrap();
            must[at as usize..(at + len) as usize].copy_from_slice(&data);
            for (name, map) in &maps {
                let wrong = || {
                    let mut is = vec![0; MAPPED_BYTES as usize];
                    map.read(0, &mut is).unwrap();
                    is.iter().zip(&must).position(|(a, b)| a != b)
                };
                let Some(first) = wrong() else { continue };
                // A lease goes without waiting for the kernel when the machine gets to nothing within half
                // its time: then a moment later.
                let since = Instant::now();
                while wrong().is_some() && since.elapsed() < LATE {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let what = format!(
                    "VARVE_SEED={seed}, step {step}: {name} has another byte at {first} after a write of {} \
                    to {at}..+{len}",
                    ways[way].name()
                );
                assert_eq!(wrong(), None, "{what}, for good");
                println!("{what}, for {:?}", since.elapsed());
            }
        }
        for (way, open) in ways.iter().zip(opens) {
            way.close(open).unwrap();
        }
    });
}

#[test]
fn appends_of_all_ways_at_once_are_whole_and_in_order() {
    const EACH: u32 = 150;
    three_ways(|ways| {
        std::thread::scope(|scope| {
            for (n, way) in ways.iter().enumerate() {
                scope.spawn(move || {
                    let open = way
                        .open("log", libc::O_CREAT | libc::O_WRONLY | libc::O_APPEND)
                        .unwrap();
                    for number in 0..EACH {
                        let line = format!("{n} {number} {}\n", "x".repeat((number as usize * 7) % 300));
                        way.write(&open, None, line.as_bytes()).unwrap();
                    }
                    way.close(open).unwrap();
                });
            }
        });
        for way in ways {
            let open = way.open("log", libc::O_RDONLY).unwrap();
            let text = String::from_utf8(way.read(&open).unwrap()).expect("whole lines");
            way.close(open).unwrap();
            let mut next = [0; 3];
            for line in text.lines() {
                let words: Vec<&str> = line.split(' ').collect();
                let [n, number, tail] = words.as_slice() else {
                    panic!("{} sees a torn line: {line:?}", way.name())
                };
                let n: usize = n.parse().unwrap();
                assert_eq!(number.parse(), Ok(next[n]), "{} sees: {line:?}", way.name());
                assert_eq!(tail.len(), (next[n] as usize * 7) % 300);
                next[n] += 1;
            }
            assert_eq!(next, [EACH; 3]);
        }
    });
}

#[test]
fn lock_file_made_by_one_way_keeps_the_others_out() {
    const EACH: u32 = 25;
    three_ways(|ways| {
        let open = ways[0].open("count", libc::O_CREAT | libc::O_RDWR).unwrap();
        ways[0].write(&open, Some(0), b"0       ").unwrap();
        ways[0].close(open).unwrap();
        std::thread::scope(|scope| {
            for way in ways {
                scope.spawn(move || {
                    for _ in 0..EACH {
                        let mut lock = None;
                        wait_until("the lock", || {
                            match way.open("lock", libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY) {
                                Ok(open) => {
                                    lock = Some(open);
                                    true
                                }
                                Err(libc::EEXIST) => false,
                                Err(errno) => panic!("{}: lock: errno {errno}", way.name()),
                            }
                        });
                        // A new file renamed over the old one, which is what programs do.
                        let old = way.open("count", libc::O_RDONLY).unwrap();
                        let text = String::from_utf8(way.read(&old).unwrap()).unwrap();
                        way.close(old).unwrap();
                        let count: u32 = text.trim().parse().unwrap();
                        let new = way
                            .open("count.new", libc::O_CREAT | libc::O_TRUNC | libc::O_WRONLY)
                            .unwrap();
                        way.write(&new, Some(0), format!("{:<8}", count + 1).as_bytes())
                            .unwrap();
                        way.close(new).unwrap();
                        way.rename("count.new", "count").unwrap();
                        way.close(lock.unwrap()).unwrap();
                        way.unlink("lock").unwrap();
                    }
                });
            }
        });
        for way in ways {
            let open = way.open("count", libc::O_RDONLY).unwrap();
            assert_eq!(
                way.read(&open).unwrap(),
                format!("{:<8}", EACH * 3).into_bytes(),
                "{}",
                way.name()
            );
            way.close(open).unwrap();
        }
    });
}
