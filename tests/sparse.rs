//! Space and holes of files, through the mount and under `varve run`, alone and beside another session: large
//! allocations, and where data is.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, SecondMount, cannot_mount, run_ok, text_of, varve};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// How a program comes to the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Mount,
    Run,
}

/// A pool and the program `sparse`; `None` where these cannot be, which is said.
struct Place {
    pool: Pool,
    program: PathBuf,
}

impl Place {
    fn new(tiers: &[&str]) -> Option<Self> {
        if cannot_mount() {
            return None;
        }
        if Command::new("cc").arg("--version").output().is_err() {
            eprintln!("SKIPPED: no C compiler (cc)");
            return None;
        }
        let pool = Pool::up(tiers);
        let program = pool.outside().join("sparse");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/preload/sparse.c");
        run_ok(
            Command::new("cc")
                .args(["-O1", "-w", "-o"])
                .arg(&program)
                .arg(source),
        );
        Some(Self { pool, program })
    }

    /// The program, by one of the ways.
    fn command(&self, way: Way) -> Command {
        match way {
            Way::Mount => Command::new(&self.program),
            Way::Run => {
                let mut run = varve();
                run.args(["run", "--session-after", "0", "--mount"])
                    .arg(self.pool.mnt())
                    .arg("--");
                run.arg(&self.program);
                run
            }
        }
    }

    /// Does steps on a file of the pool; what was said.
    fn does(&self, way: Way, file: &Path, steps: &[&str]) -> String {
        text_of(self.command(way).arg(file).args(steps))
    }

    /// Bytes that `df` says are there.
    fn left(&self) -> u64 {
        let fs = rustix::fs::statvfs(self.pool.mnt()).unwrap();
        fs.f_bavail * fs.f_frsize
    }
}

/// Takes the line of step `n` off the end: it must say this size, and these bytes of blocks with those of the
/// file's map, a few.
fn counted<'s>(said: &'s str, size: u64, blocks: u64, of: &str) -> &'s str {
    let (rest, line) = said.trim_end().rsplit_once('\n').unwrap_or(("", said));
    let numbers: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .map(|n| n.parse().unwrap())
        .collect();
    assert_eq!(numbers[0], size, "{of}: {said}");
    assert!(
        (blocks..=blocks + (64 << 10)).contains(&numbers[1]),
        "{of}: {said}"
    );
    rest
}

const WAYS: [(Way, bool); 4] = [
    (Way::Mount, false),
    (Way::Run, false),
    (Way::Mount, true),
    (Way::Run, true),
];

/// A second session that has written to the file, if there is to be one.
fn second_mount(place: &Place, wanted: bool, name: &str) -> Option<SecondMount> {
    wanted.then(|| {
        let at = place.pool.outside().join(format!("second of {name}"));
        let second = SecondMount::start(&place.pool, &at);
        assert_eq!(place.does(Way::Mount, &at.join(name), &["w:8192:4096"]), "");
        second
    })
}

#[test]
fn whatever_fits_the_pool_is_allocated_and_nothing_of_what_does_not() {
    const LARGE: u64 = 2 << 30;
    let Some(mut place) = Place::new(&["--nvm", "64M", "--ssd", "512M", "--hdd", "3G"]) else {
        return;
    };
    let empty = place.left();
    for (way, beside) in WAYS {
        let name = format!("{way:?} {beside}");
        let file = place.pool.mnt().join(&name);
        // What the round before has removed is freed in the background.
        common::wait_until("the space of removed files", || place.left() + (16 << 20) > empty);
        let _second = second_mount(&place, beside, &name);
        let data = if beside {
            "m 8192-12288 of 12288\n"
        } else {
            "m of 0\n"
        };
        assert_eq!(place.does(way, &file, &["m"]), data, "{name}");
        // The mount counts blocks twice that its session is given while it asks.
        let before = place.left().min(empty);
        let said = place.does(way, &file, &[&format!("a:0:{LARGE}"), "n"]);
        assert_eq!(counted(&said, LARGE, LARGE, &name), "");
        // What the program's session had reserved and not used comes back when the session has ended.
        common::wait_until("the right space taken", || {
            let taken = before.saturating_sub(place.left());
            (LARGE - (1 << 20)..LARGE + (8 << 20)).contains(&taken)
        });
        // What it has needs no space again; what there is not is refused, and takes nothing.
        let more = format!("k:0:{}", LARGE + (1 << 20));
        let said = place.does(way, &file, &[&format!("a:0:{LARGE}"), &more, "n"]);
        assert_eq!(counted(&said, LARGE, LARGE + (1 << 20), &name), "");
        let left = place.left();
        let other = place.pool.mnt().join("other");
        let too_much = format!("a:0:{}", left + (1 << 30));
        let said = place.does(way, &other, &["w:0:4096", &too_much, "s", "n"]);
        let refused = format!("{too_much}: errno 28");
        assert_eq!(counted(&said, 4096, 4096, &name), refused, "{name}");
        // All but what the map of the file may take.
        let rest = left - (8 << 20);
        let said = place.does(way, &other, &[&format!("k:0:{rest}"), "m", "n"]);
        assert_eq!(counted(&said, 4096, rest, &name), "m 0-4096 of 4096", "{name}");
        // A hole that large, and zeros: the blocks stay.
        let all = format!("p:0:{LARGE}");
        let said = place.does(way, &file, &["w:0:4096", &format!("z:0:{LARGE}"), "m", &all, "m"]);
        assert_eq!(said, format!("m of {LARGE}\n").repeat(2), "{name}");
        run_ok(varve().arg("digest").arg(place.pool.dir()));
        common::wait_until("the space of the hole", || place.left() > LARGE - (16 << 20));
        std::fs::remove_file(&file).unwrap();
        std::fs::remove_file(&other).unwrap();
    }
    place.pool.down();
    place.pool.fsck_clean();
}

/// Steps, and where data is after each, by blocks of 4 KiB: a block is data from the first write to it until
/// one call makes a hole of all of it, or cuts the file before it.
const STEPS: [(&[&str], &str); 15] = [
    (&["t:0"], "m of 0"),
    (&["w:0:100"], "m 0-100 of 100"),
    (&["w:10000:5000"], "m 0-4096 8192-15000 of 15000"),
    (&["t:40000"], "m 0-4096 8192-16384 of 40000"),
    (&["w:20480:4096"], "m 0-4096 8192-16384 20480-24576 of 40000"),
    (&["p:0:100"], "m 0-4096 8192-16384 20480-24576 of 40000"),
    (&["p:8192:4096"], "m 0-4096 12288-16384 20480-24576 of 40000"),
    (&["z:12288:4096"], "m 0-4096 20480-24576 of 40000"),
    (&["p:20480:2000", "p:22480:2096"], "m 0-4096 20480-24576 of 40000"),
    (
        &["w:30000:10", "p:30000:10"],
        "m 0-4096 20480-24576 28672-32768 of 40000",
    ),
    (&["t:30001"], "m 0-4096 20480-24576 28672-30001 of 30001"),
    (&["a:0:65536"], "m 0-4096 20480-24576 28672-32768 of 65536"),
    (
        &["w:40000:1"],
        "m 0-4096 20480-24576 28672-32768 36864-40960 of 65536",
    ),
    (
        &["y:20480:8192", "w:24576:1"],
        "m 0-4096 24576-32768 36864-40960 of 65536",
    ),
    (&["t:0", "t:5000"], "m of 5000"),
];

#[test]
fn data_and_holes_are_the_same_before_and_after_a_digest() {
    let Some(mut place) = Place::new(&["--nvm", "shm:64M", "--ssd", "128M", "--hdd", "0"]) else {
        return;
    };
    for (way, beside) in WAYS {
        let name = format!("{way:?} {beside}");
        let file = place.pool.mnt().join(&name);
        let _second = second_mount(&place, beside, &name);
        // All of it in one log.
        let all: Vec<_> = STEPS
            .iter()
            .flat_map(|(steps, _)| steps.iter().copied().chain(["m"]))
            .collect();
        let expected: String = STEPS.iter().map(|(_, map)| format!("{map}\n")).collect();
        assert_eq!(place.does(way, &file, &all), expected, "{name}");
        // Each digested before the next.
        for (steps, map) in STEPS {
            let before: Vec<_> = steps.iter().copied().chain(["m"]).collect();
            assert_eq!(
                place.does(way, &file, &before),
                format!("{map}\n"),
                "{name}, {steps:?}"
            );
            run_ok(varve().arg("digest").arg(place.pool.dir()));
            assert_eq!(
                place.does(way, &file, &["m"]),
                format!("{map}\n"),
                "{name}, {steps:?} digested"
            );
        }
    }
    place.pool.down();
    place.pool.fsck_clean();
}

/// What a power cut leaves of a file that the mount has written while a program under `varve run` had a
/// session, which then took `step`.
fn after_a_power_cut(step: Option<&str>, then: impl Fn(&Place)) -> Option<usize> {
    let mut place = Place::new(&["--nvm", "64M", "--ssd", "0", "--hdd", "0"])?;
    place.pool.down();
    // Nothing else makes it durable.
    let toml = place.pool.dir().join("varve.toml");
    let mut settings = std::fs::read_to_string(&toml).unwrap();
    settings.push_str("sync_ms = 0\nidle_digest_ms = 60000\ndigest_percent = 90\n");
    std::fs::write(toml, settings).unwrap();
    place.pool.start();
    let (theirs, ours) = (place.pool.mnt().join("theirs"), place.pool.mnt().join("ours"));
    let mut file = std::fs::File::create(&theirs).unwrap();
    file.sync_all().unwrap();
    let mut program = place.command(Way::Run);
    program.arg(&ours).args(["w:0:1000", "r"]).args(step).arg("r");
    let mut program = program
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(program.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "waits");
    file.write_all(&[7; 100_000]).unwrap();
    let mut go = program.stdin.take().unwrap();
    go.write_all(b"\n").unwrap();
    assert_eq!(said.next().unwrap().unwrap(), "waits", "the step went well");
    then(&place);
    let live = place.pool.live_dirs();
    place.pool.kill_all();
    program.kill().unwrap();
    program.wait().unwrap();
    drop(file);
    live.iter().for_each(|dir| std::fs::remove_dir_all(dir).unwrap());
    place.pool.start();
    let left = std::fs::read(&theirs).unwrap();
    assert!(left.iter().all(|byte| *byte == 7));
    place.pool.down();
    place.pool.fsck_clean();
    Some(left.len())
}

#[test]
fn syncfs_under_run_makes_durable_what_others_have_written() {
    let nothing = |_: &Place| ();
    let Some(left) = after_a_power_cut(Some("f"), nothing) else {
        return;
    };
    assert_eq!(left, 100_000);
    assert_eq!(
        after_a_power_cut(None, nothing),
        Some(0),
        "without it they are lost"
    );
}

#[test]
fn sync_command_makes_durable_what_all_programs_have_written() {
    let sync = |place: &Place| {
        let said = text_of(varve().args(["sync", "--json"]).arg(place.pool.dir()));
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert!(said["sessions"].as_u64() >= Some(2), "{said}");
        // None, if the daemon has digested them by itself.
        assert!(said["entries"].is_u64(), "{said}");
        let again = text_of(varve().arg("sync").arg(place.pool.dir()));
        assert!(again.contains("in the pool"), "{again}");
    };
    if let Some(left) = after_a_power_cut(None, sync) {
        assert_eq!(left, 100_000);
    }
}
