//! Media that fail, each in every way, during each activity: what a user sees then, what the status says, and
//! what is there after the next start on sound media. Wrong bytes are never shown without a word, and a call
//! that returned is never lost to a fault that was noticed.
//!
//! Prints the table of `docs/results/media-faults.md`. `VARVE_SEED=n` chooses other moments,
//! `VARVE_FAULT_MOMENTS=n` more of them, `VARVE_SLOW_MS=n` slower media.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::Duration;
use varve_kernelfs::{HealthStatus, MediumStatus, Status};
use varve_libfs::Errno;
use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript};
use varve_media::sim::{Crash, SimMedium, SimWorld};
use varve_testkit::lockstep::both;
use varve_testkit::lookup;
use varve_testkit::model::{Model, Tree};
use varve_testkit::ops::{Op, write};
use varve_testkit::rig::{Faults, Policy, Rig, Shape};
use varve_testkit::target;
use varve_testkit::workload::Rng;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text}"))
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Medium {
    Nvm,
    Journal,
    Log,
    Ssd,
    Hdd,
}

impl Medium {
    const ALL: [Self; 5] = [Self::Nvm, Self::Journal, Self::Log, Self::Ssd, Self::Hdd];

    const fn name(self) -> &'static str {
        match self {
            Self::Nvm => "NVM",
            Self::Journal => "journal",
            Self::Log => "live log",
            Self::Ssd => "SSD",
            Self::Hdd => "HDD",
        }
    }

    /// Its name in the status.
    const fn key(self) -> &'static str {
        match self {
            Self::Nvm => "nvm",
            Self::Journal => "journal",
            Self::Log => "logs",
            Self::Ssd => "ssd",
            Self::Hdd => "hdd",
        }
    }

    fn script(self, faults: &Faults) -> &FaultScript {
        match self {
            Self::Nvm => &faults.nvm,
            Self::Journal => &faults.journal,
            Self::Log => &faults.log,
            Self::Ssd => &faults.ssd,
            Self::Hdd => &faults.hdd,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Error,
    Short,
    Torn,
    Slow,
    Full,
    Gone,
    Flip,
    Misdirected,
}

impl Kind {
    const ALL: [Self; 8] = [
        Self::Error,
        Self::Short,
        Self::Torn,
        Self::Slow,
        Self::Full,
        Self::Gone,
        Self::Flip,
        Self::Misdirected,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Error => "EIO",
            Self::Short => "short transfer, EIO",
            Self::Torn => "torn write that says success",
            Self::Slow => "slow",
            Self::Full => "full",
            Self::Gone => "gone",
            Self::Flip => "a bit flipped",
            Self::Misdirected => "transfer elsewhere that says success",
        }
    }

    /// The medium says that all is well.
    const fn lies(self) -> bool {
        matches!(self, Self::Torn | Self::Flip | Self::Misdirected)
    }

    /// Arms it; the first calls pass.
    fn arm(self, script: &FaultScript, skip: u64, rng: &mut Rng) {
        let push = |rule: FaultRule| script.push(rule.after(skip));
        match self {
            Self::Error => push(FaultRule::always(FaultOp::Any, Fault::Errno(libc::EIO))),
            Self::Short => {
                for op in [FaultOp::Read, FaultOp::Write] {
                    push(FaultRule::once(op, Fault::Short { bytes: 40 }));
                }
            }
            Self::Torn => push(FaultRule::once(FaultOp::Write, Fault::Torn { sectors: 1 })),
            Self::Slow => push(FaultRule {
                times: 3,
                ..FaultRule::once(
                    FaultOp::Any,
                    Fault::Slow(Duration::from_millis(number("VARVE_SLOW_MS", 10))),
                )
            }),
            Self::Full => {
                for op in [FaultOp::Write, FaultOp::Grow] {
                    push(FaultRule::always(op, Fault::Full));
                }
            }
            Self::Gone => push(FaultRule::once(FaultOp::Any, Fault::Gone)),
            Self::Flip => {
                for op in [FaultOp::Read, FaultOp::Write] {
                    let bit = rng.next_u64();
                    push(FaultRule::once(op, Fault::FlippedBit { bit }));
                }
            }
            Self::Misdirected => {
                for op in [FaultOp::Read, FaultOp::Write] {
                    push(FaultRule::once(op, Fault::Misdirected { by: 4096 }));
                }
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Activity {
    Write,
    Fsync,
    Digest,
    Migration,
    Read,
    Recovery,
    Fsck,
    Delete,
    Forwarded,
}

impl Activity {
    const ALL: [Self; 9] = [
        Self::Write,
        Self::Fsync,
        Self::Digest,
        Self::Migration,
        Self::Read,
        Self::Recovery,
        Self::Fsck,
        Self::Delete,
        Self::Forwarded,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Fsync => "fsync",
            Self::Digest => "digest",
            Self::Migration => "migration",
            Self::Read => "read",
            Self::Recovery => "start",
            Self::Fsck => "fsck, scrub",
            Self::Delete => "deletion",
            Self::Forwarded => "call by the daemon",
        }
    }
}

/// What a cell showed, over all moments.
#[derive(Debug, Default)]
struct Cell {
    runs: u64,
    fired: u64,
    seen: BTreeSet<String>,
}

const FILES: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
/// Directories to move one between: the daemon does that by itself, in one record.
const DIRS: [&str; 2] = ["x", "y"];

/// What a kill leaves at this moment, on media of its own.
fn copy(world: &SimWorld) -> SimWorld {
    let (recording, ()) = world.clone().record(|| ());
    let last = recording.points().last().map_or(0, |point| point.index);
    recording.image(last, Crash::Kill).into_world()
}

/// A pool with files on all tiers, everything digested, and its model.
fn prepared(shape: Shape) -> (SimWorld, Model) {
    let rig = Rig::new(shape).expect("a pool");
    let fs = rig.mount().expect("a mount");
    let mut model = Model::new();
    for (seed, name) in FILES.into_iter().enumerate() {
        both(&mut model, &fs, &Op::Create(vec![name])).expect("sound media");
        both(&mut model, &fs, &write(name, 0, 30_000, seed as u8)).expect("sound media");
    }
    for path in [vec![DIRS[0]], vec![DIRS[1]], vec![DIRS[0], "z"]] {
        both(&mut model, &fs, &Op::Mkdir(path)).expect("sound media");
    }
    drop(fs);
    rig.kernel().digest_all().expect("sound media");
    rig.settle();
    let used = rig
        .kernel()
        .status()
        .tiers
        .iter()
        .filter(|tier| tier.used_bytes > 0)
        .count();
    assert_eq!(used, 3, "data on all tiers");
    (copy(&rig.world), model)
}

/// A call's result in a word.
fn said(result: &Result<bool, String>) -> String {
    let Err(why) = result else { return "ok".into() };
    let errno = why.rsplit("Err(").next().and_then(|rest| rest.split(')').next());
    match errno.and_then(|number| number.parse::<i32>().ok()) {
        Some(libc::EIO) => "EIO".into(),
        Some(libc::ENOSPC) => "ENOSPC".into(),
        Some(libc::EROFS) => "EROFS".into(),
        Some(other) => format!("errno {other}"),
        None => why.clone(),
    }
}

/// The kind of an error message: its beginning, without numbers.
fn brief(error: impl std::fmt::Display) -> String {
    let text = error.to_string();
    let words: Vec<_> = text
        .split_whitespace()
        .filter(|word| !word.chars().any(|c| c.is_ascii_digit()))
        .take(7)
        .collect();
    words.join(" ")
}

struct Trial {
    medium: Medium,
    kind: Kind,
    activity: Activity,
    skip: u64,
    seed: u64,
}

/// Contents that a file had, newest last; more where a call may count or not.
type Versions = BTreeMap<String, Vec<Vec<u8>>>;

fn note(versions: &mut Versions, tree: &Tree) {
    for (path, seen) in tree {
        let of = versions.entry(path.clone()).or_default();
        if of.last() != Some(&seen.content) {
            of.push(seen.content.clone());
        }
    }
}

impl Trial {
    fn say(&self) -> String {
        format!(
            "{} of the {} during {}, after {} calls, seed {}",
            self.kind.name(),
            self.medium.name(),
            self.activity.name(),
            self.skip,
            self.seed
        )
    }

    /// Runs it; what was seen, and whether the fault came.
    fn run(&self, base: &SimWorld, shape: Shape, model: &Model) -> (String, bool) {
        let faults = Faults::default();
        let script = self.medium.script(&faults);
        let mut rng = Rng::new(self.seed);
        let mut model = model.clone();
        let mut versions = Versions::new();
        note(&mut versions, &model.tree());
        let rig = Rig::start_with_faults(copy(base), shape, &faults).expect("sound until now");
        let fs = rig.mount().expect("sound until now");
        let mut seen = String::new();
        let mut arm = || self.kind.arm(script, self.skip, &mut rng);
        // The tree if the call that failed counts.
        let mut perhaps = None;
        // Returned with success, in order.
        let mut acts = |model: &mut Model, versions: &mut Versions, ops: &[Op]| -> String {
            let mut last = "ok".to_owned();
            for op in ops {
                // One that fails may count or not.
                let mut after = model.clone();
                let _ = after.apply(op);
                note(versions, &after.tree());
                let mut tried = model.clone();
                let result = both(&mut tried, &fs, op);
                last = said(&result);
                if result.is_err() {
                    perhaps = Some(after.tree());
                    break;
                }
                *model = tried;
            }
            last
        };
        let writes: Vec<_> = FILES.iter().map(|name| write(name, 5000, 9000, 77)).collect();
        let (mut world, mut shown) = (None, None);
        match self.activity {
            Activity::Write => {
                arm();
                seen = acts(&mut model, &mut versions, &writes);
            }
            Activity::Fsync => {
                acts(&mut model, &mut versions, &writes);
                arm();
                seen = acts(&mut model, &mut versions, &[Op::Fsync(vec![])]);
            }
            Activity::Digest => {
                acts(&mut model, &mut versions, &writes);
                arm();
                let done = rig.kernel().digest_all();
                let _ = write!(seen, "{}", if done.is_ok() { "ok" } else { "waits in the logs" });
            }
            Activity::Migration => {
                arm();
                let moved = rig.kernel().place();
                seen = if moved > 0 {
                    "moves".into()
                } else {
                    "nothing moves".into()
                };
            }
            Activity::Read => {
                arm();
                let mut answers = BTreeSet::new();
                let want = model.tree();
                for name in FILES {
                    let path = format!("/{name}");
                    match target::content(&fs, &[name]) {
                        Err(errno) => answers.insert(said(&Err(format!("Err({})", errno.0)))),
                        Ok(content) if content == want[&path].content => answers.insert("ok".into()),
                        // Privileged clients copy out of NVM as out of memory; scrub and fsck look at the
                        // checksums.
                        Ok(_) if self.medium == Medium::Nvm && self.kind.lies() && !shape.verify_nvm => {
                            answers.insert("WRONG BYTES".into())
                        }
                        Ok(_) => panic!("{}: {name} shows wrong bytes", self.say()),
                    };
                }
                seen = answers.into_iter().collect::<Vec<_>>().join(", ");
            }
            Activity::Recovery => {
                acts(&mut model, &mut versions, &writes);
                world = Some(copy(&rig.world));
            }
            Activity::Fsck => {
                arm();
                let found = rig.kernel().store().check();
                let data = rig.kernel().store().check_data();
                seen = match (found, data) {
                    (Ok(a), Ok(b)) if a.is_empty() && b.is_empty() => "clean".into(),
                    (Ok(_), Ok(_)) => "found and named".into(),
                    (Err(error), _) | (_, Err(error)) => format!("error: {}", brief(error)),
                };
            }
            Activity::Delete => {
                let ops: Vec<_> = FILES[..6].iter().map(|name| Op::Unlink(vec![name])).collect();
                arm();
                seen = acts(&mut model, &mut versions, &ops);
                // They are freed.
                if rig.kernel().digest_all().is_err() {
                    seen.push_str(", waits in the logs");
                }
                rig.kernel().tick();
            }
            Activity::Forwarded => {
                let ends = DIRS.map(|dir| vec![dir, "z"]);
                let there = Op::Rename(ends[0].clone(), ends[1].clone());
                let back = Op::Rename(ends[1].clone(), ends[0].clone());
                arm();
                let ops = [there.clone(), back, there];
                seen = acts(&mut model, &mut versions, &ops);
                if seen == "ok" {
                    assert_eq!(fs.counters().forwarded, 3, "the daemon did them");
                }
            }
        }
        if let Some(world) = &world {
            arm();
            match Rig::start_with_faults(world.clone(), shape, &faults) {
                Err(error) => seen = format!("refused: {}", brief(error)),
                Ok(started) => {
                    let status = started.kernel().status();
                    seen = format!("starts{}", Self::state(&status));
                    shown = Some(status);
                }
            }
        } else {
            let status = rig.kernel().status();
            seen.push_str(&Self::state(&status));
            shown = Some(status);
        }
        let fired = script.fired() > 0;
        if let Some(status) = shown.filter(|_| fired) {
            self.require_shown(&seen, &status);
        }
        // The machine dies at once, and starts on media that have nothing any more.
        let world = copy(world.as_ref().unwrap_or(&rig.world));
        faults.clear();
        drop(fs);
        drop(rig);
        let then = self.judge(world, shape, &model, &versions, perhaps.as_ref());
        (format!("{seen}; then {then}"), fired)
    }

    /// What the status says.
    fn state(status: &Status) -> String {
        match (
            &status.latched,
            status.tiers.iter().any(|tier| tier.state != "ok"),
        ) {
            (Some(_), _) => ", pool read-only".into(),
            (None, true) => ", device failed".into(),
            (None, false) if status.jobs.iter().any(|job| job.contains("no space")) => {
                ", waits for space".into()
            }
            (None, false) => String::new(),
        }
    }

    /// Whatever was told by the medium, or noticed by a checksum, is in the status: on which medium, what
    /// kind, what was said last.
    fn require_shown(&self, seen: &str, status: &Status) {
        let of = |name: &str| {
            let medium = status.media.iter().find(|medium| medium.medium == name);
            medium.unwrap_or_else(|| panic!("no {name} in the status"))
        };
        let medium = of(self.medium.key());
        let errors = medium.read_errors + medium.write_errors;
        let slow_ms = number("VARVE_SLOW_MS", 10);
        let said = |last: &Option<HealthStatus>| last.as_ref().is_some_and(|last| !last.text.is_empty());
        let shown = match self.kind {
            Kind::Error | Kind::Short | Kind::Gone => errors > 0 && said(&medium.last),
            Kind::Full => medium.no_space > 0 && said(&medium.last),
            // Stores to the memory of a log are not timed; making it durable is, by its client.
            Kind::Slow if self.medium == Medium::Log => return,
            Kind::Slow if slow_ms < 1000 => medium.longest_ms * 2 >= slow_ms,
            Kind::Slow => medium.slow > 0 && said(&medium.last_slow),
            Kind::Torn | Kind::Flip | Kind::Misdirected => {
                let words = ["EIO", "found and named", "error", "EROFS", "left out"];
                if !words.iter().any(|word| seen.contains(word)) {
                    return;
                }
                let damages = |medium: &MediumStatus| medium.checksum_errors;
                let met: u64 = status.media.iter().map(damages).sum();
                let passes = [status.checks.structures, status.checks.data];
                let found: u64 = passes.iter().flatten().map(|pass| pass.findings).sum();
                met + found > 0
            }
        };
        assert!(
            shown,
            "{}: {seen}, and the status does not show it: {:#?}",
            self.say(),
            status.media
        );
        if matches!(self.activity, Activity::Read | Activity::Fsck) {
            // Who only looks changes nothing for those who write: one unreadable sector is no reason to
            // refuse them.
            assert!(
                status.latched.is_none(),
                "{}: {seen}, {:?}",
                self.say(),
                status.latched
            );
        }
        if self.medium == Medium::Log && !self.kind.lies() {
            assert!(status.logs.failed > 0, "{}: {:?}", self.say(), status.logs);
        }
    }

    fn judge(
        &self,
        world: SimWorld,
        shape: Shape,
        model: &Model,
        versions: &Versions,
        perhaps: Option<&Tree>,
    ) -> String {
        let rig = match Rig::start(world, shape) {
            Ok(rig) => rig,
            Err(error) if self.kind.lies() => return format!("the start is refused: {}", brief(error)),
            Err(error) => panic!("{}: the next start fails: {error}", self.say()),
        };
        let noticed = rig.check().is_err();
        let fs = match rig.mount() {
            Ok(fs) => fs,
            Err(error) if self.kind.lies() => return format!("no session: {}", brief(error)),
            Err(error) => panic!("{}: {error}", self.say()),
        };
        let (mut older, mut failed, mut wrong) = (false, false, false);
        let names = |path: &str| -> Vec<&'static str> {
            let all = FILES.iter().chain(&DIRS).chain(&["z"]);
            let known = |name: &str| all.clone().find(|known| **known == name).copied();
            path[1..].split('/').filter_map(known).collect()
        };
        let tree = model.tree();
        for path in versions.keys().filter(|path| !tree.contains_key(*path)) {
            // What was taken away is gone, unless the call that failed put it there.
            if lookup::find(&fs, &names(path)).is_ok()
                && perhaps.is_none_or(|perhaps| !perhaps.contains_key(path))
            {
                older = true;
            }
        }
        for (path, seen) in &tree {
            if path == "/" {
                continue;
            }
            let found = lookup::find(&fs, &names(path));
            let gone = matches!(found, Err(Errno(libc::ENOENT)));
            if gone && perhaps.is_some_and(|perhaps| !perhaps.contains_key(path)) {
                continue;
            }
            if seen.mode & libc::S_IFMT == libc::S_IFDIR {
                failed |= found.is_err();
                continue;
            }
            match target::content(&fs, &names(path)) {
                Ok(content) if content == seen.content => {}
                Ok(content) => {
                    // Of a call that returned nothing is missing, unless the medium lied.
                    let newer = versions[path].iter().rposition(|known| *known == content);
                    let now = versions[path].iter().rposition(|known| *known == seen.content);
                    match newer {
                        Some(at) if Some(at) > now => {}
                        Some(_) => older = true,
                        None if self.medium == Medium::Nvm
                            && self.kind.lies()
                            && noticed
                            && !shape.verify_nvm =>
                        {
                            wrong = true;
                        }
                        None => panic!("{}: {path} has bytes that it never had", self.say()),
                    }
                }
                Err(_) => failed = true,
            }
        }
        assert!(
            self.kind.lies() || !(older || failed || noticed || wrong),
            "{}: something is lost or damaged although the fault was told: older {older}, unreadable \
            {failed}, check {:?}",
            self.say(),
            rig.check()
        );
        if wrong {
            return "WRONG BYTES, check names the damage".into();
        }
        match (noticed, failed, older) {
            (false, false, false) => "all is there",
            (true, false, false) => "check names the damage",
            (_, true, _) => "reads fail, check names the damage",
            (true, _, true) => "an older state, check names the damage",
            (false, false, true) => "the last calls are missing",
        }
        .to_owned()
    }
}

/// Each fault on `media` during each activity, as tables.
fn explore(title: &str, shape: Shape, media: &[Medium], moments: u64) {
    let seed = number("VARVE_SEED", 1);
    let (base, model) = prepared(shape);
    let mut rng = Rng::new(seed);
    let (mut table, mut runs, mut fired_all) = (String::new(), 0, 0);
    let mut kinds_fired = BTreeSet::new();
    for medium in media.iter().copied() {
        let _ = writeln!(table, "\n### {}{title}\n", medium.name());
        let names: Vec<_> = Activity::ALL.iter().map(|activity| activity.name()).collect();
        let _ = writeln!(table, "| fault | {} |", names.join(" | "));
        let _ = writeln!(table, "| --- |{}", " --- |".repeat(names.len()));
        for kind in Kind::ALL {
            let mut line = format!("| {} |", kind.name());
            for activity in Activity::ALL {
                let mut cell = Cell::default();
                for moment in 0..moments {
                    let skip = if moment == 0 {
                        0
                    } else {
                        rng.below(1 << (2 * moment))
                    };
                    let trial = Trial {
                        medium,
                        kind,
                        activity,
                        skip,
                        seed: rng.next_u64(),
                    };
                    let (seen, fired) = trial.run(&base, shape, &model);
                    cell.runs += 1;
                    if fired {
                        cell.fired += 1;
                        kinds_fired.insert((medium, kind));
                        cell.seen.insert(seen);
                    } else {
                        assert!(
                            seen.ends_with("all is there"),
                            "{}: without a fault: {seen}",
                            trial.say()
                        );
                    }
                }
                runs += cell.runs;
                fired_all += cell.fired;
                let text = cell.seen.into_iter().collect::<Vec<_>>().join(" / ");
                let _ = write!(line, " {} |", if text.is_empty() { "–" } else { &text });
            }
            let _ = writeln!(table, "{line}");
        }
    }
    println!("{table}\n{runs} runs{title}, a fault came in {fired_all}");
    // Everything has met everything at least once.
    assert_eq!(
        kinds_fired.len(),
        media.len() * Kind::ALL.len(),
        "{kinds_fired:?}"
    );
}

#[test]
fn failing_media_never_show_wrong_bytes_without_a_word_and_lose_nothing_that_returned() {
    let shape = Shape::tiny(SimMedium::File).with(Policy::Rotate);
    explore("", shape, &Medium::ALL, number("VARVE_FAULT_MOMENTS", 3));
}

#[test]
fn failing_media_with_the_rules_of_dax_show_and_lose_nothing_else() {
    let shape = Shape::tiny(SimMedium::Dax).with(Policy::Rotate);
    let moments = number("VARVE_FAULT_MOMENTS", 2);
    explore(", rules of `dax`", shape, &Medium::ALL, moments);
}

#[test]
fn lying_nvm_shows_no_wrong_bytes_where_reads_are_verified() {
    let shape = Shape::tiny(SimMedium::File).with(Policy::Rotate).verifying();
    let moments = number("VARVE_FAULT_MOMENTS", 3);
    explore(", `verify_nvm_reads`", shape, &[Medium::Nvm], moments);
}
