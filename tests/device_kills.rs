//! Devices that come and go under eight writers, while the daemon is killed at random moments: nothing that was
//! acknowledged is lost, and jobs go on. And what writers notice of a job. `VARVE_ROUNDS` sets how
//! many pools that is done to, with five kills each; `VARVE_PHASES=8` has the second one measured in so many
//! pairs of phases.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, all_right, cannot_mount, kill, noise, run_ok, text_of, varve, wait_until};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const WRITERS: u64 = 8;
/// Bytes of a record, and places for records in a file: a record overwrites the one of so many before.
const RECORD: usize = 8192;
const PLACES: u64 = 256;

fn told(command: &mut std::process::Command) -> Option<Value> {
    let output = command.output().unwrap();
    let parsed = serde_json::from_slice(&output.stdout).ok();
    parsed.filter(|_| output.status.success())
}

/// The jobs, and the names and states of the SSDs.
type Look = (Vec<Value>, Vec<(String, String)>);

/// Asks the daemon; `None`: none answers.
fn look(pool: &Pool) -> Option<Look> {
    let status = told(varve().args(["status", "--json"]).arg(pool.dir()))?;
    let jobs = status["operator_jobs"].as_array()?.clone();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let devices = status["devices"].as_array()?.iter();
    let ssds = devices.filter(|device| device["tier"] == "ssd");
    let name = |device: &Value| {
        let path = PathBuf::from(text(&device["name"]));
        path.file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    };
    Some((
        jobs,
        ssds.map(|device| (name(device), text(&device["state"])))
            .collect(),
    ))
}

fn record(writer: u64, number: u64) -> Vec<u8> {
    let mut bytes = noise(writer << 40 | number, RECORD);
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Writes numbered records, each durable before it is counted.
fn write_on(dir: &Path, writer: u64, over: &AtomicBool, acknowledged: &AtomicU64) {
    let path = dir.join(format!("writer{writer}"));
    let mut next = 0;
    while !over.load(Ordering::Relaxed) {
        let mut write = || -> std::io::Result<()> {
            let file = std::fs::File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&path)?;
            while !over.load(Ordering::Relaxed) {
                file.write_all_at(&record(writer, next), next % PLACES * RECORD as u64)?;
                file.sync_data()?;
                next += 1;
                acknowledged.store(next, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok(())
        };
        // While no daemon is there, calls wait or fail: the record is written again.
        if write().is_err() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// All that was acknowledged is there: each place has the last record of it, or the next one.
fn check(dir: &Path, acknowledged: &[AtomicU64]) {
    for (writer, count) in (0..).zip(acknowledged) {
        let count = count.load(Ordering::Relaxed);
        let found = std::fs::read(dir.join(format!("writer{writer}"))).unwrap();
        for number in count.saturating_sub(PLACES)..count {
            let at = (number % PLACES) as usize * RECORD;
            let there = &found[at..at + RECORD];
            let newest = u64::from_le_bytes(there[..8].try_into().unwrap());
            assert!(
                newest == number || newest == count && number + PLACES == count,
                "writer {writer}: {newest} in place of {number} of {count}"
            );
            assert!(
                there == record(writer, newest),
                "writer {writer}: record {newest}"
            );
        }
    }
}

/// Runs a command until it succeeds: the daemon may be killed under it. False: the end came before.
fn insist(pool: &Pool, over: &AtomicBool, words: &[&str], is_done: &dyn Fn() -> bool) -> bool {
    while !over.load(Ordering::Relaxed) {
        let mut command = varve();
        let output = command
            .arg(words[0])
            .arg(pool.dir())
            .args(&words[1..])
            .output()
            .unwrap();
        if output.status.success() || is_done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    false
}

fn names(pool: &Pool, over: &AtomicBool) -> Vec<String> {
    while !over.load(Ordering::Relaxed) {
        if let Some((_, ssds)) = look(pool) {
            return ssds.into_iter().map(|(name, _)| name).collect();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Vec::new()
}

/// Ends the other threads of a test, also when it fails.
struct End<'o>(&'o AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Adds, removes and replaces devices, and evacuates the tier, in turns. Returns how often each was done.
fn operate(pool: &Pool, over: &AtomicBool) -> [u64; 4] {
    let mut done = [0; 4];
    let until = |ready: &dyn Fn() -> bool| {
        while !over.load(Ordering::Relaxed) && !ready() {
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    while !over.load(Ordering::Relaxed) {
        let before = names(pool, over);
        let more = || names(pool, over).len() > before.len();
        if !insist(pool, over, &["add-device", "--tier", "ssd", "160M"], &more) {
            break;
        }
        done[0] += 1;
        let Some(oldest) = names(pool, over).into_iter().next() else {
            break;
        };
        let is_begun = || {
            look(pool)
                .is_some_and(|(jobs, ssds)| !jobs.is_empty() || ssds.iter().all(|(name, _)| *name != oldest))
        };
        insist(pool, over, &["remove-device", &oldest, "--partly"], &is_begun);
        until(&|| !names(pool, over).contains(&oldest));
        done[1] += 1;
        let Some(oldest) = names(pool, over).into_iter().next() else {
            break;
        };
        let is_begun = || {
            look(pool).is_some_and(|(jobs, ssds)| {
                jobs.iter().any(|job| job["kind"] == "remove") || ssds.iter().all(|(name, _)| *name != oldest)
            })
        };
        insist(pool, over, &["replace", &oldest, "160M"], &is_begun);
        until(&|| !names(pool, over).contains(&oldest));
        done[2] += 1;
        let is_begun = || look(pool).is_some_and(|(jobs, _)| !jobs.is_empty());
        insist(pool, over, &["evacuate", "--tier", "ssd", "--partly"], &is_begun);
        let from = Instant::now();
        until(&|| {
            let is_done = |job: &Value| job["state"] == "done";
            let is_empty = look(pool).is_some_and(|(jobs, _)| jobs.iter().any(is_done));
            is_empty || from.elapsed() > Duration::from_secs(6)
        });
        let is_ended = || look(pool).is_some_and(|(jobs, _)| jobs.is_empty());
        insist(pool, over, &["evacuate", "--tier", "ssd", "--cancel"], &is_ended);
        done[3] += 1;
    }
    done
}

/// Kills the daemon, and waits for the next one. Returns whether a job was there and goes on.
fn kill_once(pool: &Pool) -> bool {
    let before = look(pool).map(|(jobs, _)| jobs).unwrap_or_default();
    let daemon = pool.child_pid("serve").expect("a daemon");
    kill(daemon);
    wait_until("another daemon", || {
        pool.child_pid("serve").is_some_and(|pid| pid != daemon) && look(pool).is_some()
    });
    let (after, ssds) = look(pool).unwrap_or_default();
    let mut goes_on = false;
    for job in before {
        match after.iter().find(|other| other["id"] == job["id"]) {
            Some(other) => {
                let moved = |job: &Value| job["moved_bytes"].as_u64().unwrap_or(0);
                assert!(moved(other) >= moved(&job), "{job}, {other}");
                assert_eq!(other["kind"], job["kind"]);
                goes_on = true;
            }
            // The device is out, or the operator has ended it.
            None if job["kind"] == "remove" => {
                let device = PathBuf::from(job["device"].as_str().unwrap_or_default());
                let name = device
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned();
                assert!(
                    ssds.iter().all(|(other, _)| *other != name),
                    "{job} is gone: {ssds:?}"
                );
            }
            None => {}
        }
    }
    goes_on
}

/// Kills of one pool's daemon: `varve up` gives it up after five restarts in a minute.
const KILLS: u64 = 5;

#[test]
fn devices_come_and_go_under_eight_writers_and_kills() {
    if cannot_mount() {
        return;
    }
    let rounds: u64 = std::env::var("VARVE_ROUNDS").map_or(1, |text| text.parse().unwrap());
    for round in 0..rounds {
        come_and_go(round);
    }
}

fn come_and_go(round: u64) {
    let mut pool = Pool::up(&["--nvm", "96M", "--ssd", "160M", "--hdd", "512M"]);
    let dir = pool.mnt().join("writers");
    std::fs::create_dir(&dir).unwrap();
    run_ok(varve().args(["pin", "--tier", "ssd"]).arg(pool.mnt()));
    let one = |number: u64| {
        let (path, body) = (pool.mnt().join(number.to_string()), noise(number + 1, 4 * MIB));
        std::fs::write(&path, &body).unwrap();
        (path, body)
    };
    let files: Vec<_> = (0..12).map(one).collect();
    run_ok(varve().args(["pin", "--wait", "--tier", "ssd"]).arg(pool.mnt()));
    let over = AtomicBool::new(false);
    let acknowledged: Vec<AtomicU64> = (0..WRITERS).map(|_| AtomicU64::new(0)).collect();
    let (mut gone_on, mut done) = (0, [0; 4]);
    std::thread::scope(|scope| {
        for (writer, count) in (0..).zip(&acknowledged) {
            let (dir, over) = (&dir, &over);
            scope.spawn(move || write_on(dir, writer, over, count));
        }
        let operator = scope.spawn(|| operate(&pool, &over));
        let end = End(&over);
        for kill in 0..KILLS {
            let random = u16::from_le_bytes(noise((round + 1) << 32 | kill, 8)[..2].try_into().unwrap());
            std::thread::sleep(Duration::from_millis(50 + u64::from(random) % 2500));
            gone_on += u64::from(kill_once(&pool));
        }
        drop(end);
        done = operator.join().unwrap();
    });
    let counts: Vec<u64> = acknowledged
        .iter()
        .map(|count| count.load(Ordering::Relaxed))
        .collect();
    println!(
        "round {round}: {KILLS} kills, {gone_on} of them in a job that went on; added, removed, replaced, evacuated: {done:?}; \
        records: {counts:?}"
    );
    all_right(&files);
    check(&dir, &acknowledged);
    assert!(counts.iter().all(|count| *count > 10), "{counts:?}");
    // A job that is left goes on to its end.
    for job in look(&pool).unwrap().0 {
        match job["kind"].as_str() {
            Some("remove") => wait_until("the device to be out", || look(&pool).unwrap().0.is_empty()),
            _ => drop(text_of(
                varve()
                    .args(["evacuate", "--cancel", "--tier", "ssd"])
                    .arg(pool.dir()),
            )),
        }
    }
    pool.kill_all();
    pool.start();
    all_right(&files);
    check(&dir, &acknowledged);
    pool.down();
    pool.fsck_clean();
}

/// Length of a phase, in seconds.
const PHASE_S: f64 = 2.0;

/// Latencies of the durable writes of eight threads in a phase, in microseconds, sorted.
fn latencies(dir: &Path, seconds: f64) -> Vec<u64> {
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let one = |writer: u64| {
        let path = dir.join(format!("timed{writer}"));
        let file = std::fs::File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)
            .unwrap();
        let mut times = Vec::new();
        for number in 0.. {
            let from = Instant::now();
            if from >= until {
                break;
            }
            file.write_all_at(&[number as u8; 4096], number % 64 * 4096)
                .unwrap();
            file.sync_data().unwrap();
            times.push(from.elapsed().as_micros() as u64);
            std::thread::sleep(Duration::from_millis(1));
        }
        times
    };
    let mut all: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..WRITERS)
            .map(|writer| scope.spawn(move || one(writer)))
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    all.sort_unstable();
    all
}

/// What eight writers notice of a job that takes a device out: phases by turns with the job paused and running.
#[test]
fn writers_beside_a_job() {
    let rounds: usize = std::env::var("VARVE_PHASES").map_or(0, |text| text.parse().unwrap());
    if rounds == 0 || cannot_mount() {
        return println!("skipped: a measurement; VARVE_PHASES=8 runs it");
    }
    let limit = std::env::var("VARVE_LIMIT").ok();
    let pool = Pool::up(&["--nvm", "128M", "--ssd", "2G", "--ssd", "2G", "--hdd", "0"]);
    let dir = pool.mnt().join("writers");
    std::fs::create_dir(&dir).unwrap();
    for number in 0..400 {
        std::fs::write(pool.mnt().join(number.to_string()), noise(number + 1, 4 * MIB)).unwrap();
    }
    run_ok(varve().args(["pin", "--wait", "--tier", "ssd"]).arg(pool.mnt()));
    run_ok(varve().args(["unpin"]).arg(pool.mnt()));
    run_ok(varve().arg("remove-device").arg(pool.dir()).arg("ssd-2.img"));
    let job =
        |word: &str, more: &[&str]| run_ok(varve().args(["jobs", word]).arg(pool.dir()).arg("1").args(more));
    job("pause", &[]);
    if let Some(limit) = &limit {
        job("limit", &[limit]);
    }
    let moved = || {
        let (jobs, _) = look(&pool).unwrap();
        let job = jobs.first().expect("the job ended: give it more to move");
        job["moved_bytes"].as_u64().unwrap()
    };
    let at = |all: &[u64], part: f64| all[(all.len() as f64 * part) as usize];
    latencies(&dir, 1.0);
    let mut sums = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for running in [false, true] {
            job(if running { "resume" } else { "pause" }, &[]);
            let before = moved();
            let all = latencies(&dir, PHASE_S);
            let rate = (moved() - before) as f64 / PHASE_S / MIB as f64;
            println!(
                "round {round}, {}: {} writes, p50 {} us, p99 {} us, p99.9 {} us, {rate:.0} MiB/s moved",
                if running { "running" } else { "paused " },
                all.len(),
                at(&all, 0.5),
                at(&all, 0.99),
                at(&all, 0.999),
            );
            sums[usize::from(running)].extend(all);
        }
    }
    let [paused, running] = sums.map(|mut all| {
        all.sort_unstable();
        [0.5, 0.99, 0.999].map(|part| at(&all, part))
    });
    println!("all: p50, p99, p99.9 in us paused {paused:?}, running {running:?}");
}
