//! One flipped bit in each kind of structure, while the daemon serves the pool: what reads, changes, the
//! digest and the checks say then, and the next start. Never other bytes than were written without a word,
//! but where ADR 16 says so; no name is silently gone.
//!
//! Prints the table of `docs/results/media-faults.md`. `VARVE_FLIPS=n` flips more bits of each kind,
//! `VARVE_SEED=n` others.
#![allow(clippy::unwrap_used)]

mod damaged_pool;

use damaged_pool::{BLOCK, DEVICES, POOL, Pool, Rng, Thing, Tree, body, build, config, structures, world_of};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use varve_embed::{Embedded, SimPool, power_cut_logs};
use varve_ipc::{Cred, SystemClock};
use varve_kernelfs::Config;
use varve_libfs::{Errno, Posix};
use varve_media::sim::{Crash, SimWorld};
use varve_media::{BlockDevice, Region};
use varve_store::{OpenOptions, Store};

/// The log of a session, flipped while it lives.
const LIVE_LOG: &str = "log of a living session";
/// The log of a session that was killed with its daemon.
const DEAD_LOG: &str = "log of a killed session";
/// What all changes rest on: damage there must wait for a repair.
const FIXED: [&str; 6] = [
    "Bitmap",
    "ChecksumTable",
    "GrantTable",
    "PoolState",
    "SessionTable",
    "UnitTable",
];
/// Bound of a look at everything, where much of it waits in vain.
const PATIENCE: Duration = Duration::from_millis(800);
/// With `verify_nvm_reads`.
const VERIFIED: &str = "data on nvm, reads verified";

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// What a kill of everything leaves at this moment.
fn copy(world: &SimWorld) -> SimWorld {
    let (recording, ()) = world.clone().record(|| ());
    let last = recording.points().last().map_or(0, |point| point.index);
    recording.image(last, Crash::Kill).into_world()
}

fn flip_in(region: &dyn Region, at: u64, bit: usize) {
    let mut byte = [0];
    region.read(at, &mut byte).unwrap();
    region.write(at, &[byte[0] ^ 1 << bit]).unwrap();
    region.fence().unwrap();
}

fn flip(world: &SimWorld, device: &str, block: usize, bit: usize) {
    let at = (block * BLOCK + bit / 8) as u64;
    match world.region(device) {
        Some(region) => flip_in(&*region, at, bit % 8),
        None => {
            let device = world.block(device).unwrap();
            let mut content = vec![0; BLOCK];
            device.read((block * BLOCK) as u64, &mut content).unwrap();
            content[bit / 8] ^= 1 << (bit % 8);
            device.write((block * BLOCK) as u64, &content).unwrap();
        }
    }
}

/// Flips a bit in what a log holds.
fn flip_log(world: &SimWorld, rng: &mut Rng) {
    // The newest is that of the session at work.
    let id = power_cut_logs(world).into_iter().max().unwrap();
    let log = world.region(&format!("log-{id}")).unwrap();
    let mut bytes = vec![0; log.len_bytes() as usize];
    log.read(0, &mut bytes).unwrap();
    let used: Vec<_> = (0..bytes.len()).filter(|at| bytes[*at] != 0).collect();
    let at = used[rng.below(used.len())] as u64;
    flip_in(&*log, at, rng.below(8));
}

/// Every path with what may be there; `None`: nothing.
type Expected = BTreeMap<Vec<u8>, Vec<Option<Thing>>>;

fn expected(tree: &Tree) -> Expected {
    let all = tree.iter();
    all.map(|(path, thing)| (path.clone(), vec![Some(thing.clone())]))
        .collect()
}

/// What reading everything showed.
#[derive(Default, Debug, Clone, Copy)]
struct Seen {
    right: u64,
    errors: u64,
    wrong: u64,
    gone: u64,
    /// As it was before the last changes, though those returned.
    older: u64,
}

impl Seen {
    fn say(&self) -> String {
        let counts = [
            (self.wrong, "WRONG BYTES in"),
            (self.gone, "gone:"),
            (self.older, "last change missing in"),
            (self.errors, "error for"),
        ];
        let said: Vec<_> = counts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{what} {}", some(*count)))
            .collect();
        if said.is_empty() {
            "right".into()
        } else {
            said.join(", ")
        }
    }
}

fn some(count: u64) -> &'static str {
    match count {
        1 => "one",
        2..50 => "some",
        _ => "many",
    }
}

fn thing(posix: &Posix, path: &[u8]) -> Result<Thing, Errno> {
    let attr = posix.lstat(path)?;
    Ok(match attr.kind() {
        varve_format::FileKind::Directory => Thing::Dir,
        varve_format::FileKind::Symlink => Thing::Link(posix.readlink(path)?),
        varve_format::FileKind::Regular => {
            let fd = posix.open(path, libc::O_RDONLY, 0)?;
            let mut bytes = vec![0; attr.size_bytes as usize];
            let got = posix.pread(fd, &mut bytes, 0);
            posix.close(fd)?;
            bytes.truncate(got?);
            Thing::File(bytes)
        }
        _ => Thing::Other,
    })
}

fn look(posix: &Posix, expected: &Expected) -> Seen {
    let mut seen = Seen::default();
    let began = Instant::now();
    for (path, may) in expected {
        if began.elapsed() > PATIENCE {
            // Everything that has to wait for a log does.
            break;
        }
        let now = match thing(posix, path) {
            Ok(thing) => Some(thing),
            Err(Errno(libc::ENOENT)) => None,
            Err(_) => {
                seen.errors += 1;
                continue;
            }
        };
        match may.iter().rposition(|known| *known == now) {
            Some(at) if at + 1 == may.len() => seen.right += 1,
            Some(_) => seen.older += 1,
            None if now.is_none() => seen.gone += 1,
            None => seen.wrong += 1,
        }
    }
    for (path, name, value) in attributes() {
        match posix.getxattr(path, name.as_bytes()) {
            Ok(now) if now == value => seen.right += 1,
            Ok(_) => seen.wrong += 1,
            Err(Errno(libc::ENODATA | libc::ENOENT)) => seen.gone += 1,
            Err(_) => seen.errors += 1,
        }
        if began.elapsed() > PATIENCE {
            break;
        }
    }
    seen
}

/// Extended attributes that are there at the last stage.
fn attributes() -> impl Iterator<Item = (&'static [u8], String, Vec<u8>)> {
    let short = (0..30).map(|number| {
        let name = format!("user.attribute-{number}");
        (&b"/a/b/file-2"[..], name, body(number, 200))
    });
    short.chain([(&b"/a/b/file-3"[..], "user.long".to_owned(), body(52, 7000))])
}

/// Changes of all kinds. What returned may count; what failed may count, too.
fn change(posix: &Posix, expected: &mut Expected) -> String {
    let mut errors = BTreeSet::new();
    let mut count = |result: Result<(), Errno>| {
        if let Err(errno) = &result {
            errors.insert(errno.to_string());
        }
        result.is_ok()
    };
    let paths = [
        "/a/b/file-0",
        "/a/b/file-6",
        "/tiers/0",
        "/tiers/1",
        "/tiers/6",
        "/stage-1-2",
    ];
    for path in paths {
        let put = |posix: &Posix| {
            let fd = posix.open(path.as_bytes(), libc::O_RDWR, 0)?;
            let result = posix.pwrite(fd, &[0x77; 3000], 2500);
            posix.close(fd)?;
            result.map(drop)
        };
        let done = count(put(posix));
        let may = expected.get_mut(path.as_bytes()).unwrap();
        if let Some(Some(Thing::File(bytes))) = may.last().cloned() {
            let mut after = bytes.clone();
            after[2500..5500].fill(0x77);
            may.push(Some(Thing::File(after)));
            if !done {
                may.push(Some(Thing::File(bytes)));
            }
        }
    }
    for path in ["/many/name-0250", "/a/second-name"] {
        let done = count(posix.unlink(path.as_bytes()));
        let may = expected.get_mut(path.as_bytes()).unwrap();
        let was = may.last().cloned().unwrap();
        may.push(None);
        if !done {
            may.push(was);
        }
    }
    let made = count(posix.mkdir(b"/a/new", 0o755));
    let may = if made {
        vec![None, Some(Thing::Dir)]
    } else {
        vec![Some(Thing::Dir), None]
    };
    expected.insert(b"/a/new".to_vec(), may);
    if errors.is_empty() {
        "ok".into()
    } else {
        errors.into_iter().collect::<Vec<_>>().join(", ")
    }
}

/// What the checks of a store say.
fn check(store: &Store) -> String {
    match (store.check(), store.check_data()) {
        (Ok(a), Ok(b)) if a.is_empty() && b.is_empty() => "clean".into(),
        (Ok(_), Ok(_)) => "named".into(),
        (Err(_), _) | (_, Err(_)) => "refused".into(),
    }
}

/// As `varve fsck` looks at a stopped pool.
fn check_stopped(world: &SimWorld) -> String {
    let options = OpenOptions {
        accept_journal_damage: true,
        verify_nvm: true,
        ..OpenOptions::default()
    };
    match Store::open(SimPool::devices(world).unwrap(), options) {
        Ok((store, report)) => match check(&store).as_str() {
            "clean" if report.damage.is_some() => "named".into(),
            said => said.into(),
        },
        Err(_) => "named: cannot be opened".into(),
    }
}

fn serve(world: &SimWorld, verify: bool) -> Result<(Embedded, Posix), String> {
    let config = Config {
        verify_nvm_reads: verify.into(),
        // What is not to be had is not waited for long.
        lease_ms: 100,
        wait_ms: 100,
        ..config()
    };
    let (parts, _) = POOL
        .parts(world, config, Arc::new(SystemClock))
        .map_err(|_| "refused".to_owned())?;
    let embedded = Embedded::open(parts).map_err(|_| "refused".to_owned())?;
    let fs = embedded.mount().map_err(|_| "starts, no session".to_owned())?;
    Ok((embedded, Posix::new(fs, Cred::root())))
}

/// What was said, column by column.
type Row = [String; 7];
const COLUMNS: [&str; 7] = [
    "read, served",
    "changes",
    "digest",
    "fsck, scrub, served",
    "fsck of the stopped pool",
    "next start",
    "read then",
];

struct Trial<'p> {
    pool: &'p Pool,
    kind: &'p str,
    /// Device, block, bit.
    place: Option<(usize, usize, usize)>,
}

impl Trial<'_> {
    /// Whether reads may show other bytes than were written (ADR 16).
    fn may_be_wrong(&self, of_log: bool) -> bool {
        self.kind == "data on nvm" || (of_log && self.kind == LIVE_LOG)
    }

    fn hurt(&self, world: &SimWorld, rng: &mut Rng) {
        match self.place {
            Some((device, block, bit)) => flip(world, DEVICES[device], block, bit),
            None => flip_log(world, rng),
        }
    }

    /// `told`: it was said that operations were left out.
    fn require(&self, seen: &Seen, of_log: bool, told: bool, when: &str) {
        let may_be_older = self.place.is_none() || told;
        assert!(
            (seen.wrong == 0 || self.may_be_wrong(of_log))
                && seen.gone == 0
                && (seen.older == 0 || may_be_older),
            "{}, {:?}, {when}: {seen:?}",
            self.kind,
            self.place
        );
    }

    fn run(&self, rng: &mut Rng) -> Row {
        let verify = self.kind == VERIFIED;
        let world = world_of(&self.pool.past[2]);
        let mut expected = expected(&self.pool.trees[2]);
        let (embedded, posix) = serve(&world, verify).unwrap();
        let mut row = Row::default();
        let of_log = self.place.is_none();
        if !of_log {
            self.hurt(&world, rng);
            let seen = look(&posix, &expected);
            self.require(&seen, false, false, "read");
            row[0] = seen.say();
        }
        row[1] = change(&posix, &mut expected);
        if self.kind == LIVE_LOG {
            self.hurt(&world, rng);
            let seen = look(&posix, &expected);
            self.require(&seen, true, false, "read");
            row[0] = seen.say();
        }
        let mut killed = None;
        if self.kind == DEAD_LOG {
            killed = Some(copy(&world));
        } else {
            let digested = embedded.kernel().digest_all();
            let status = embedded.kernel().status();
            row[2] = match (
                digested,
                &status.latched,
                status.digest.refused,
                status.logs.damaged,
            ) {
                (Err(_), Some(_), ..) => "waits, pool read-only".into(),
                (Err(_), None, ..) => "waits in the logs".into(),
                (Ok(()), _, 0, 0) => "ok".into(),
                (Ok(()), ..) => "something left out, and told".into(),
            };
            row[3] = check(embedded.kernel().store());
            // What was met, or found, is in the status.
            let status = embedded.kernel().status();
            let met: u64 = status.media.iter().map(|medium| medium.checksum_errors).sum();
            let passes = [status.checks.structures, status.checks.data];
            let found: u64 = passes.iter().flatten().map(|pass| pass.findings).sum();
            let noticed = row
                .iter()
                .any(|said| said.contains("error") || said.contains("EIO"));
            assert!(
                !noticed || met + found > 0,
                "{}, {:?}: {row:?}",
                self.kind,
                self.place
            );
            killed.get_or_insert_with(|| copy(&world));
        }
        let world = killed.unwrap();
        drop(posix);
        drop(embedded);
        if self.kind == DEAD_LOG {
            self.hurt(&world, rng);
        }
        row[4] = check_stopped(&copy(&world));
        match serve(&world, verify) {
            Err(why) => row[5] = why,
            Ok((embedded, posix)) => {
                let status = embedded.kernel().status();
                row[5] = match status.logs.damaged + status.digest.refused {
                    0 => "starts".into(),
                    _ => "starts, something left out, and told".into(),
                };
                let seen = look(&posix, &expected);
                let told = row[2].contains("left out") || row[5].contains("left out");
                self.require(&seen, false, told, "read after the start");
                row[6] = seen.say();
            }
        }
        let shared = FIXED.contains(&self.kind) && row.iter().any(|said| said.contains("left out"));
        assert!(
            !shared,
            "acknowledged operations are left out for a table's damage: {row:?}"
        );
        row
    }
}

#[test]
fn flipped_bit_in_any_structure_is_never_shown_without_a_word() {
    let pool = build();
    let kinds = structures(&pool.past[2]);
    let (count, mut rng) = (number("VARVE_FLIPS", 2), Rng(number("VARVE_SEED", 1)));
    let mut names: Vec<&str> = kinds.keys().map(String::as_str).collect();
    names.extend([VERIFIED, LIVE_LOG, DEAD_LOG]);
    assert!(names.len() >= 22, "{names:?}");
    println!("\n| a bit flipped in | {} |", COLUMNS.join(" | "));
    println!("| --- |{}", " --- |".repeat(COLUMNS.len()));
    for kind in names {
        let mut cells: [BTreeSet<String>; 7] = Default::default();
        for _ in 0..count {
            let place = kinds
                .get(if kind == VERIFIED { "data on nvm" } else { kind })
                .map(|places| {
                    let (device, block) = places[rng.below(places.len())];
                    // Of those that are small, the part that is used.
                    let used = match kind {
                        "superblock" | "journal header" => 64,
                        "PoolState" => 128,
                        // Of the shortest files.
                        _ if kind.contains("data on") => 30,
                        _ => BLOCK,
                    };
                    (device, block, rng.below(used * 8))
                });
            let trial = Trial {
                pool: &pool,
                kind,
                place,
            };
            for (cell, said) in cells.iter_mut().zip(trial.run(&mut rng)) {
                cell.insert(said);
            }
        }
        let said = cells.map(|cell| {
            let said: Vec<_> = cell.into_iter().filter(|said| !said.is_empty()).collect();
            if said.is_empty() {
                "–".into()
            } else {
                said.join(" / ")
            }
        });
        println!("| {kind} | {} |", said.join(" | "));
    }
}
