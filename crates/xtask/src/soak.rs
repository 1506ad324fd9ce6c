//! The soak: suites, rounds, progress and the summary. Knows how a suite is started and gets its seed, but
//! not what it tests.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A suite.
struct Suite {
    name: &'static str,
    /// Arguments of `cargo test`; for another program, the whole command.
    args: &'static [&'static str],
    /// Test filters, one per round in turn, for a suite that is too long for one round.
    parts: &'static [&'static str],
    /// Whether `cargo test` runs it; otherwise `args` is the command.
    cargo: bool,
    /// Whether it needs debug assertions.
    debug: bool,
    env: &'static [(&'static str, &'static str)],
    /// The suite is left out if this file does not exist.
    file: &'static str,
}

const fn suite(name: &'static str, args: &'static [&'static str], file: &'static str) -> Suite {
    Suite {
        name,
        args,
        parts: &[],
        cargo: true,
        debug: false,
        env: &[],
        file,
    }
}

/// All suites, the quick ones first, so that a short soak runs most of them.
const SUITES: &[Suite] = &[
    Suite {
        debug: true,
        ..suite(
            "interleavings",
            &[
                "-p",
                "varve-libfs",
                "-p",
                "varve-ipc",
                "-p",
                "varve-kernelfs",
                "--features",
                "varve-libfs/shuttle,varve-ipc/shuttle,varve-kernelfs/shuttle",
                "--lib",
                "interleavings",
            ],
            "crates/libfs/src/lease/interleavings.rs",
        )
    },
    Suite {
        env: &[("VARVE_LOCKSTEP_RUNS", "100")],
        ..suite(
            "lockstep",
            &["-p", "varve-testkit", "--test", "lockstep"],
            "crates/testkit/tests/lockstep.rs",
        )
    },
    Suite {
        env: &[("VARVE_WHOLE_RUNS", "30"), ("VARVE_ABOVE_RUNS", "30")],
        // The second test uses seeded bugs.
        debug: true,
        ..suite(
            "whole system",
            &["-p", "varve-testkit", "--test", "whole", "--test", "above"],
            "crates/testkit/tests/whole.rs",
        )
    },
    suite(
        "media faults",
        &["-p", "varve-testkit", "--test", "media_faults"],
        "crates/testkit/tests/media_faults.rs",
    ),
    Suite {
        env: &[("VARVE_REPAIR_PAIRS", "3")],
        ..suite(
            "repairs",
            &["-p", "varve-testkit", "--test", "repair_crash"],
            "crates/testkit/tests/repair_crash/main.rs",
        )
    },
    suite(
        "models",
        &["-p", "varve-testkit", "--lib", "--test", "protocol"],
        "crates/testkit/src/lib.rs",
    ),
    suite(
        "memory manager",
        &["-p", "varve-vm-manager", "--lib"],
        "crates/vm-manager/src/lib.rs",
    ),
    suite(
        "interfaces",
        &["-p", "varve-capi", "-p", "varve-preload"],
        "crates/capi/src/lib.rs",
    ),
    Suite {
        env: &[("VARVE_PARSER_ROUNDS", "100000")],
        ..suite("parsers", &["-p", "varve-fuzz"], "fuzz/src/lib.rs")
    },
    Suite {
        env: &[("VARVE_CRASH_SCALE", "3")],
        ..suite(
            "crash",
            &["-p", "varve-testkit", "--test", "crash"],
            "crates/testkit/tests/crash.rs",
        )
    },
    suite(
        "groups",
        &["-p", "varve-testkit", "--test", "transactions"],
        "crates/testkit/tests/transactions.rs",
    ),
    Suite {
        // It uses seeded bugs.
        debug: true,
        ..suite(
            "made small",
            &["-p", "varve-testkit", "--test", "shrink"],
            "crates/testkit/tests/shrink.rs",
        )
    },
    Suite {
        env: &[("VARVE_KILL_ROUNDS", "30"), ("VARVE_POWER_ROUNDS", "10")],
        ..suite("kills", &["--test", "kill"], "tests/kill/main.rs")
    },
    Suite {
        env: &[("VARVE_HOSTILE_SECS", "120")],
        ..suite("hostile", &["--test", "hostile"], "tests/hostile/main.rs")
    },
    Suite {
        env: &[("VARVE_DAMAGE_IMAGES", "500")],
        ..suite(
            "damage",
            &["-p", "varve-embed", "--test", "damage"],
            "crates/embed/tests/damage.rs",
        )
    },
    Suite {
        env: &[("VARVE_FLIPS", "10")],
        ..suite(
            "flips",
            &["-p", "varve-embed", "--test", "flips"],
            "crates/embed/tests/flips.rs",
        )
    },
    suite(
        "several ways in",
        &["--test", "two_mounts", "--test", "locks"],
        "tests/two_mounts/main.rs",
    ),
    Suite {
        env: &[("VARVE_SHARING_SECS", "60")],
        ..suite("sharing", &["--test", "sharing"], "tests/sharing/main.rs")
    },
    suite("users", &["--test", "two_uids"], "tests/two_uids/main.rs"),
    suite("mounts", &["--test", "up"], "tests/up.rs"),
    suite("command line", &["--test", "cli"], "tests/cli.rs"),
    suite("programs", &["--test", "run"], "tests/run/main.rs"),
    suite("operators", &["--test", "observe"], "tests/observe.rs"),
    suite("old pools", &["--test", "fixture"], "tests/fixture.rs"),
    suite(
        "hosts",
        &[
            "--bins",
            "--test",
            "media",
            "--test",
            "mount_limits",
            "--test",
            "newcomer",
            "--test",
            "examples",
        ],
        "tests/newcomer.rs",
    ),
    Suite {
        debug: true,
        ..suite(
            "seeded bugs",
            &["-p", "varve-testkit", "--test", "seeded_bugs"],
            "crates/testkit/tests/seeded_bugs/main.rs",
        )
    },
    Suite {
        cargo: false,
        ..suite("coverage", &["fuzz/run", "all", "30"], "fuzz/run")
    },
    suite("media", &["-p", "varve-media"], "crates/media/src/lib.rs"),
    suite("shim", &["-p", "varve-fuse-shim"], "crates/fuse-shim/src/lib.rs"),
    Suite {
        cargo: false,
        ..suite("test machine", &["tests/vm/ci"], "tests/vm/ci")
    },
    suite("format", &["-p", "varve-format"], "crates/format/src/lib.rs"),
    suite(
        "trees",
        &["-p", "varve-extent-tree"],
        "crates/extent-tree/src/lib.rs",
    ),
    suite("digest", &["-p", "varve-digest"], "crates/digest/src/lib.rs"),
    Suite {
        debug: true,
        ..suite("store", &["-p", "varve-store"], "crates/store/src/lib.rs")
    },
    suite("daemon", &["-p", "varve-kernelfs"], "crates/kernelfs/src/lib.rs"),
    suite("clients", &["-p", "varve-libfs"], "crates/libfs/src/lib.rs"),
    suite("transport", &["-p", "varve-ipc"], "crates/ipc/src/lib.rs"),
    suite("one process", &["-p", "varve-embed"], "crates/embed/src/lib.rs"),
    Suite {
        env: &[("VARVE_CRASH_EVERY", "1")],
        parts: &[
            "single",
            "sequences",
            "sealed_amid",
            "big_files",
            "pairs",
            "pass_leases",
            "die_or_hang",
            "moves_between",
            "products_policy",
            "restart",
            "deletion",
            "again_and_again",
        ],
        ..suite(
            "every point",
            &["-p", "varve-testkit", "--test", "crash"],
            "crates/testkit/tests/crash.rs",
        )
    },
];

/// Time after which a suite counts as hanging.
const LONGEST: Duration = Duration::from_secs(90 * 60);

/// The command line's options.
pub struct SoakOptions {
    hours: f64,
    seed: u64,
    only: Vec<String>,
    list: bool,
    debug: bool,
}

impl SoakOptions {
    /// Reads the arguments after `soak`.
    ///
    /// # Errors
    /// A message about the wrong argument.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let clock = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(1, |since| since.as_secs());
        let mut options = Self {
            hours: 2.0,
            seed: clock % 1_000_000 * 1000,
            only: Vec::new(),
            list: false,
            debug: false,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            match arg.as_str() {
                "--hours" => options.hours = value()?.parse().map_err(|_| "--hours is not a number")?,
                "--seed" => options.seed = value()?.parse().map_err(|_| "--seed is not a number")?,
                "--only" => options.only = value()?.split(',').map(str::to_owned).collect(),
                "--list" => options.list = true,
                "--debug" => options.debug = true,
                other => return Err(format!("unknown argument {other}")),
            }
        }
        if !(0.0..=10_000.0).contains(&options.hours) {
            return Err("--hours must be from 0 to 10000".into());
        }
        for name in &options.only {
            if SUITES.iter().all(|suite| suite.name != name) {
                return Err(format!("there is no suite \"{name}\""));
            }
        }
        Ok(options)
    }
}

#[derive(Default)]
struct Count {
    runs: u64,
    secs: f64,
    tests: u64,
    /// Crash images.
    images: u64,
}

fn clock(since: Instant) -> String {
    let secs = since.elapsed().as_secs();
    format!("{:02}:{:02}:{:02}", secs / 3600, secs / 60 % 60, secs % 60)
}

/// Returns the number before `word` in a line.
fn number_before(line: &str, word: &str) -> Option<u64> {
    let before = line[..line.find(word)?].trim_end();
    before.rsplit(' ').next()?.parse().ok()
}

fn count_output(text: &str, count: &mut Count) {
    for line in text.lines() {
        if line.contains("test result:") {
            count.tests += number_before(line, " passed").unwrap_or(0);
        }
        // A parser under libFuzzer reports its runs in this line.
        count.tests += u64::from(line.starts_with("stat::number_of_executed_units"));
        if line.contains(" images of ") {
            count.images += number_before(line, " images of ").unwrap_or(0);
        }
    }
}

fn command(turn: &Turn<'_>) -> (Command, String) {
    let Turn {
        suite,
        seed,
        round,
        debug,
    } = *turn;
    let part = (round as usize)
        .checked_rem(suite.parts.len())
        .map(|at| suite.parts[at]);
    let mut words = Vec::new();
    if suite.cargo {
        words.extend(["test", "--quiet"]);
        words.extend(suite.args);
        if !suite.debug && !debug {
            words.push("--release");
        }
        words.extend(["--", "--nocapture"]);
        words.extend(part);
    } else {
        words.extend(&suite.args[1..]);
    }
    let program = if suite.cargo { "cargo" } else { suite.args[0] };
    let found = std::env::var_os("CARGO").filter(|_| suite.cargo);
    let mut command = Command::new(found.unwrap_or_else(|| program.into()));
    let seed = seed.to_string();
    let given = [
        ("VARVE_SEED", seed.as_str()),
        ("PROPTEST_RNG_SEED", seed.as_str()),
    ];
    command.args(&words).envs(given).envs(suite.env.iter().copied());
    let env = given
        .iter()
        .chain(suite.env)
        .map(|(name, value)| format!("{name}={value} "));
    let shown = format!("{}{program} {}", env.collect::<String>(), words.join(" "));
    (command, shown)
}

/// Returns the ids of a process and all its descendants.
fn descendants(root: u32) -> Vec<String> {
    let parent_of = |pid: &str| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (_, fields) = stat.rsplit_once(')')?;
        fields.split_whitespace().nth(1).map(str::to_owned)
    };
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pairs: Vec<_> = pids
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter_map(|pid| parent_of(&pid).map(|parent| (pid, parent)))
        .collect();
    let mut found = vec![root.to_string()];
    let mut at = 0;
    while let Some(parent) = found.get(at).cloned() {
        found.extend(
            pairs
                .iter()
                .filter(|(_, of)| *of == parent)
                .map(|(pid, _)| pid.clone()),
        );
        at += 1;
    }
    found
}

/// Runs a command until it ends or [`LONGEST`] has passed.
fn wait(command: &mut Command, log: &Path) -> Result<Option<ExitStatus>, std::io::Error> {
    let out = File::create(log)?;
    let err = out.try_clone()?;
    let mut child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn()?;
    let started = Instant::now();
    while started.elapsed() < LONGEST {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    // Its descendants are killed too.
    let pids = descendants(child.id());
    let _ = Command::new("kill").arg("-KILL").args(&pids).status();
    child.wait().map(|_| None)
}

/// One run of a suite.
struct Turn<'s> {
    suite: &'s Suite,
    seed: u64,
    /// Counted from 0.
    round: u64,
    /// Whether every suite runs with debug assertions.
    debug: bool,
}

fn run_suite(turn: &Turn<'_>, log: &Path, count: &mut Count) -> Result<(), String> {
    let (mut command, shown) = command(turn);
    let started = Instant::now();
    let ended = wait(&mut command, log);
    count.runs += 1;
    count.secs += started.elapsed().as_secs_f64();
    let status = ended.map_err(|error| format!("{shown}: {error}"))?;
    let text = fs::read(log).unwrap_or_default();
    count_output(&String::from_utf8_lossy(&text), count);
    if status.is_some_and(|status| status.success()) {
        // Logs are kept only for failures.
        let _ = fs::remove_file(log);
        return Ok(());
    }
    let how = status.map_or_else(
        || format!("not over after {LONGEST:?}"),
        |status| status.to_string(),
    );
    Err(format!("{how}\n  repeat: {shown}\n  output: {}", log.display()))
}

/// Runs rounds until the time is over or a suite fails.
pub fn run(options: &SoakOptions) -> ExitCode {
    let wanted: Vec<_> = SUITES
        .iter()
        .filter(|suite| options.only.is_empty() || options.only.iter().any(|name| name == suite.name))
        .filter(|suite| Path::new(suite.file).exists())
        .collect();
    if options.list {
        wanted.iter().for_each(|suite| println!("{}", suite.name));
        return ExitCode::SUCCESS;
    }
    let dir = PathBuf::from("target/soak");
    if let Err(error) = fs::create_dir_all(&dir) {
        eprintln!("{}: {error}", dir.display());
        return ExitCode::from(2);
    }
    let (started, until) = (Instant::now(), Duration::from_secs_f64(options.hours * 3600.0));
    let mut counts: BTreeMap<&str, Count> = BTreeMap::new();
    let (mut round, mut failure) = (0, None);
    'rounds: loop {
        let seed = options.seed + round;
        round += 1;
        for suite in &wanted {
            let count = counts.entry(suite.name).or_default();
            let (tests, images, secs) = (count.tests, count.images, count.secs);
            let log = dir.join(format!("{}-{seed}.log", suite.name.replace(' ', "-")));
            print!("[{}] round {round} seed {seed} {} …", clock(started), suite.name);
            let _ = std::io::stdout().flush();
            let turn = Turn {
                suite,
                seed,
                round: round - 1,
                debug: options.debug,
            };
            let result = run_suite(&turn, &log, count);
            println!(
                "\r[{}] round {round} seed {seed} {}: {} ({} tests, {} images, {:.0} s)",
                clock(started),
                suite.name,
                if result.is_ok() { "ok" } else { "FAILED" },
                count.tests - tests,
                count.images - images,
                count.secs - secs,
            );
            let _ = std::io::stdout().flush();
            if let Err(why) = result {
                failure = Some(format!("{}: {why}", suite.name));
                break 'rounds;
            }
            if started.elapsed() >= until {
                break 'rounds;
            }
        }
    }
    summary(started, round, options.seed, &counts);
    match failure {
        Some(why) => {
            println!("FAILED: {why}");
            ExitCode::FAILURE
        }
        None => {
            println!("no failure");
            ExitCode::SUCCESS
        }
    }
}

/// Prints what was run.
fn summary(started: Instant, round: u64, seed: u64, counts: &BTreeMap<&str, Count>) {
    println!("\nsoak of {}: {round} rounds from seed {}", clock(started), seed);
    println!(
        "{:<16} {:>6} {:>9} {:>11} {:>9}",
        "suite", "runs", "tests", "images", "seconds"
    );
    for (name, count) in counts {
        println!(
            "{name:<16} {:>6} {:>9} {:>11} {:>9.0}",
            count.runs, count.tests, count.images, count.secs
        );
    }
}

#[cfg(test)]
mod tests {
    use super::{Count, SUITES, SoakOptions, Turn, command, count_output, descendants, number_before};
    use std::path::Path;

    fn parse(line: &str) -> Result<SoakOptions, String> {
        SoakOptions::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn arguments_are_read_and_bad_ones_named() {
        let options = parse("--hours 0.5 --seed 7 --only crash,lockstep").expect("they are right");
        assert_eq!((options.hours, options.seed, options.only.len()), (0.5, 7, 2));
        for (line, word) in [
            ("--hours", "--hours"),
            ("--hours x", "--hours"),
            ("--only x", "\"x\""),
            ("-q", "-q"),
        ] {
            let why = parse(line).err().expect("it is wrong");
            assert!(why.contains(word), "{why}");
        }
    }

    #[test]
    fn parts_of_a_suite_come_by_turns_and_the_seed_is_in_the_command() {
        let all = SUITES
            .iter()
            .find(|suite| suite.name == "every point")
            .expect("it is there");
        let shown = |round, debug| {
            let turn = Turn {
                suite: all,
                seed: 7,
                round,
                debug,
            };
            command(&turn).1
        };
        assert!(shown(0, false).ends_with("--release -- --nocapture single"));
        assert!(shown(1, true).ends_with("--test crash -- --nocapture sequences"));
        assert_eq!(shown(0, true), shown(all.parts.len() as u64, true));
        assert!(
            shown(0, true).starts_with("VARVE_SEED=7 PROPTEST_RNG_SEED=7 VARVE_CRASH_EVERY=1 cargo test")
        );
    }

    #[test]
    fn descendants_of_a_process_are_found() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sleep 60 & echo; wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("a shell");
        let mut out = child.stdout.take().expect("piped");
        std::io::Read::read_exact(&mut out, &mut [0]).expect("it has started it");
        let found = descendants(child.id());
        assert_eq!(found.len(), 2, "{found:?}");
        let killed = std::process::Command::new("kill")
            .arg("-KILL")
            .args(&found)
            .status();
        assert!(killed.is_ok_and(|status| status.success()));
        let _ = child.wait();
    }

    #[test]
    fn every_suite_names_a_file_that_is_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for suite in SUITES {
            assert!(root.join(suite.file).exists(), "{}", suite.name);
        }
    }

    #[test]
    fn tests_and_images_are_counted() {
        let mut count = Count::default();
        let text = "pairs: 1234 images of 961 workloads in 3 s\ntest result: ok. 5 passed; 0 failed\n";
        count_output(text, &mut count);
        assert_eq!((count.tests, count.images), (5, 1234));
        assert_eq!(number_before("x 5 passed", " failed"), None);
    }
}
