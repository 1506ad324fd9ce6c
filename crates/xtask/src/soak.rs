//! The soak: suites, rounds, progress and the summary. Knows how a suite is started and how a seed is given to it; not what it tests.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A suite.
struct Suite {
    name: &'static str,
    /// After `cargo test`.
    args: &'static [&'static str],
    /// After `--`.
    test_args: &'static [&'static str],
    /// Needs debug assertions.
    debug: bool,
    env: &'static [(&'static str, &'static str)],
    /// A test of this name must exist, else the suite is left out.
    file: &'static str,
}

const fn suite(name: &'static str, args: &'static [&'static str], file: &'static str) -> Suite {
    Suite {
        name,
        args,
        test_args: &["--nocapture"],
        debug: false,
        env: &[],
        file,
    }
}

const SUITES: &[Suite] = &[
    Suite {
        env: &[("VARVE_CRASH_SCALE", "10")],
        ..suite(
            "crash",
            &["-p", "varve-testkit", "--test", "crash"],
            "crates/testkit/tests/crash.rs",
        )
    },
    Suite {
        env: &[("VARVE_SOAK", "1")],
        ..suite(
            "lockstep",
            &["-p", "varve-testkit", "--test", "lockstep"],
            "crates/testkit/tests/lockstep.rs",
        )
    },
    Suite {
        debug: true,
        ..suite(
            "seeded bugs",
            &["-p", "varve-testkit", "--test", "seeded_bugs"],
            "crates/testkit/tests/seeded_bugs.rs",
        )
    },
    suite(
        "models",
        &["-p", "varve-testkit", "--lib", "--test", "protocol"],
        "crates/testkit/src/lib.rs",
    ),
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
        env: &[("VARVE_KILL_ROUNDS", "20"), ("VARVE_POWER_ROUNDS", "5")],
        ..suite("kills", &["--test", "kill"], "tests/kill/main.rs")
    },
    Suite {
        env: &[("VARVE_DAMAGE_IMAGES", "1000")],
        ..suite(
            "damage",
            &["-p", "varve-embed", "--test", "damage"],
            "crates/embed/tests/damage.rs",
        )
    },
    suite(
        "media faults",
        &["-p", "varve-testkit", "--test", "media_faults"],
        "crates/testkit/tests/media_faults.rs",
    ),
    Suite {
        env: &[("VARVE_HOSTILE_SECS", "300")],
        ..suite("hostile", &["--test", "hostile"], "tests/hostile/main.rs")
    },
    Suite {
        env: &[("VARVE_PARSER_ROUNDS", "20000")],
        ..suite("parsers", &["-p", "varve-fuzz"], "fuzz/src/lib.rs")
    },
    suite("mounts", &["--test", "up"], "tests/up.rs"),
];

/// What was asked for.
pub struct Options {
    hours: f64,
    seed: u64,
    only: Vec<String>,
    list: bool,
}

impl Options {
    /// Reads the arguments after `soak`.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let clock = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(1, |since| since.as_secs());
        let mut options = Self {
            hours: 2.0,
            seed: clock % 1_000_000 * 1000,
            only: Vec::new(),
            list: false,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            match arg.as_str() {
                "--hours" => options.hours = value()?.parse().map_err(|_| "--hours is not a number")?,
                "--seed" => options.seed = value()?.parse().map_err(|_| "--seed is not a number")?,
                "--only" => options.only = value()?.split(',').map(str::to_owned).collect(),
                "--list" => options.list = true,
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

/// The number before `word` in a line.
fn number_before(line: &str, word: &str) -> Option<u64> {
    let before = line[..line.find(word)?].trim_end();
    before.rsplit(' ').next()?.parse().ok()
}

fn count_output(text: &str, count: &mut Count) {
    for line in text.lines() {
        if line.contains("test result:") {
            count.tests += number_before(line, " passed").unwrap_or(0);
        }
        if line.contains(" images of ") {
            count.images += number_before(line, " images of ").unwrap_or(0);
        }
    }
}

fn command(suite: &Suite, seed: u64) -> (Command, String) {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["test", "--quiet"]).args(suite.args);
    if !suite.debug {
        command.arg("--release");
    }
    command.arg("--").args(suite.test_args);
    let seed = seed.to_string();
    let given = [
        ("VARVE_SEED", seed.as_str()),
        ("PROPTEST_RNG_SEED", seed.as_str()),
    ];
    command.envs(given).envs(suite.env.iter().copied());
    let env = given
        .iter()
        .chain(suite.env)
        .map(|(name, value)| format!("{name}={value} "));
    let release = if suite.debug { "" } else { " --release" };
    let shown = format!(
        "{}cargo test {}{release} -- {}",
        env.collect::<String>(),
        suite.args.join(" "),
        suite.test_args.join(" ")
    );
    (command, shown)
}

fn run_suite(suite: &Suite, seed: u64, log: &Path, count: &mut Count) -> Result<(), String> {
    let (mut command, shown) = command(suite, seed);
    let started = Instant::now();
    let written = File::create(log).and_then(|out| {
        let err = out.try_clone()?;
        command.stdin(Stdio::null()).stdout(out).stderr(err).status()
    });
    count.runs += 1;
    count.secs += started.elapsed().as_secs_f64();
    let status = written.map_err(|error| format!("{shown}: {error}"))?;
    let text = fs::read(log).unwrap_or_default();
    count_output(&String::from_utf8_lossy(&text), count);
    if status.success() {
        // Kept for failures only.
        let _ = fs::remove_file(log);
        return Ok(());
    }
    Err(format!(
        "{status}\n  repeat: {shown}\n  output: {}",
        log.display()
    ))
}

/// Runs rounds until the time is over or a suite fails.
pub fn run(options: &Options) -> ExitCode {
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
            let result = run_suite(suite, seed, &log, count);
            println!(
                "[{}] round {round} seed {seed} {}: {} ({} tests, {} images, {:.0} s)",
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
    println!(
        "\nsoak of {}: {round} rounds from seed {}",
        clock(started),
        options.seed
    );
    println!(
        "{:<14} {:>6} {:>9} {:>11} {:>9}",
        "suite", "runs", "tests", "images", "seconds"
    );
    for (name, count) in &counts {
        println!(
            "{name:<14} {:>6} {:>9} {:>11} {:>9.0}",
            count.runs, count.tests, count.images, count.secs
        );
    }
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

#[cfg(test)]
mod tests {
    use super::{Count, Options, count_output, number_before};

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(line.split_whitespace().map(str::to_owned))
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
    fn tests_and_images_are_counted() {
        let mut count = Count::default();
        let text = "pairs: 1234 images of 961 workloads in 3 s\ntest result: ok. 5 passed; 0 failed\n";
        count_output(text, &mut count);
        assert_eq!((count.tests, count.images), (5, 1234));
        assert_eq!(number_before("x 5 passed", " failed"), None);
    }
}
