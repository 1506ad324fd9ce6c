//! `varve evacuate` and `varve jobs` on a mounted pool: what they do and say, what they refuse, and what is
//! there after the daemon was killed again and again under writers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, all_right, cannot_mount, kill, noise, run_ok, text_of, varve, wait_until};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const MIB: usize = 1 << 20;

fn refused(command: &mut std::process::Command, code: i32) -> String {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn evacuate(pool: &Pool, words: &[&str]) -> std::process::Command {
    let mut command = varve();
    command.arg("evacuate").arg(pool.dir()).args(words);
    command
}

/// `varve jobs WORD POOL MORE`.
fn jobs(pool: &Pool, word: &str, more: &[&str]) -> std::process::Command {
    let mut command = varve();
    command.args(["jobs", word]).arg(pool.dir()).args(more);
    command
}

fn list(pool: &Pool) -> Vec<Value> {
    let told = run_ok(&mut jobs(pool, "list", &["--json"])).stdout;
    let told: Value = serde_json::from_slice(&told).unwrap();
    told["jobs"].as_array().unwrap().clone()
}

fn status(pool: &Pool) -> Value {
    let told = run_ok(varve().arg("status").arg("--json").arg(pool.dir())).stdout;
    serde_json::from_slice(&told).unwrap()
}

fn used(pool: &Pool, tier: usize) -> u64 {
    status(pool)["tiers"][tier]["used_bytes"].as_u64().unwrap()
}

/// Files of 2 MiB with their data on a tier.
fn make(pool: &Pool, tier: &str, files: u64) -> Vec<(PathBuf, Vec<u8>)> {
    let dir = pool.mnt().join(tier);
    std::fs::create_dir(&dir).unwrap();
    let one = |number: u64| {
        let (path, body) = (dir.join(number.to_string()), noise(number + 1, 2 * MIB));
        std::fs::write(&path, &body).unwrap();
        (path, body)
    };
    let made = (0..files).map(one).collect();
    run_ok(varve().args(["pin", "--wait", "--tier", tier]).arg(&dir));
    run_ok(varve().arg("unpin").arg(&dir));
    made
}

#[test]
fn evacuation_is_watched_changed_and_ended_by_commands() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "128M", "--hdd", "256M"]);
    let files = make(&pool, "ssd", 16);
    // The policy may have taken some of it back to NVM.
    assert!(used(&pool, 1) > 20 * MIB as u64);
    assert_eq!(text_of(&mut jobs(&pool, "list", &[])), "no jobs\n");

    let said = text_of(&mut evacuate(&pool, &["--tier", "ssd"]));
    assert!(
        said.starts_with("job 1: moving ") && said.contains(" off ssd"),
        "{said}"
    );
    let said = text_of(&mut jobs(&pool, "limit", &["1", "1MiB"]));
    assert!(said.contains("limit 1.0 MiB/s"), "{said}");
    let said = text_of(&mut jobs(&pool, "pause", &["1"]));
    assert!(said.starts_with("job 1 evacuates ssd: paused, "), "{said}");
    // A transaction of moves that was under way is still done.
    std::thread::sleep(std::time::Duration::from_secs(1));
    let before = list(&pool)[0]["moved_bytes"].clone();
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert_eq!(list(&pool)[0]["moved_bytes"], before, "it is paused");
    pool.down();
    pool.start();
    // The command without a word lists, too.
    let said = text_of(varve().arg("jobs").arg(pool.dir()));
    assert!(
        said.contains("paused") && said.contains("limit 1.0 MiB/s"),
        "{said}"
    );
    assert_eq!(list(&pool)[0]["moved_bytes"], before);
    let line = text_of(varve().arg("status").arg(pool.dir()));
    assert!(
        line.contains("evacuated") && line.contains("job 1 evacuates ssd: paused"),
        "{line}"
    );
    let told = text_of(varve().arg("metrics").arg(pool.dir()));
    let labels = "{job=\"1\",kind=\"evacuate\",tier=\"ssd\"}";
    let metric = format!("varve_operator_job_limit_bytes_per_second{labels} {MIB}\n");
    assert!(told.contains(&metric), "{told}");

    run_ok(&mut jobs(&pool, "limit", &["1", "none"]));
    let told = run_ok(&mut jobs(&pool, "resume", &["1", "--json"])).stdout;
    let told: Value = serde_json::from_slice(&told).unwrap();
    assert_eq!(
        (&told["id"], &told["limit_bytes_per_s"]),
        (&1.into(), &Value::Null)
    );
    wait_until("an empty SSD", || list(&pool)[0]["state"] == "done");
    assert_eq!(used(&pool, 1), 0);
    all_right(&files);
    let said = text_of(&mut jobs(&pool, "list", &[]));
    assert!(
        said.contains("done, ") && said.contains(" MiB moved, 0 B left"),
        "{said}"
    );
    // The policy may have moved some of it.
    assert!(
        list(&pool)[0]["moved_bytes"].as_u64().unwrap() > 16 * MIB as u64,
        "{said}"
    );

    // It stays empty, whatever is pinned there.
    let more = pool.mnt().join("more");
    run_ok(std::process::Command::new("mkdir").arg(&more));
    run_ok(varve().args(["pin", "--tier", "ssd"]).arg(&more));
    std::fs::write(more.join("file"), noise(99, 4 * MIB)).unwrap();
    run_ok(varve().arg("digest").arg(pool.dir()));
    assert_eq!(used(&pool, 1), 0);
    wait_until("what waits to be told", || {
        let said = text_of(&mut jobs(&pool, "list", &[]));
        said.contains("pinned data from nvm to ssd") && said.contains("waiting: ssd is evacuated")
    });
    let said = text_of(&mut evacuate(&pool, &["--tier", "ssd", "--cancel"]));
    assert!(
        said.contains("job 1 is cancelled: ssd takes new data again"),
        "{said}"
    );
    wait_until("the pinned data on the SSD", || used(&pool, 1) >= 4 * MIB as u64);
    let said = text_of(&mut evacuate(&pool, &["--tier", "ssd", "--wait"]));
    assert_eq!(said, "job 2: ssd is empty and takes no new data\n");
    assert_eq!(used(&pool, 1), 0);
    all_right(&files);
    pool.down();
    pool.fsck_clean();
}

#[test]
fn what_cannot_be_is_refused_in_a_sentence() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "128M", "--hdd", "0"]);
    let says = |command: &mut std::process::Command, code, part: &str| {
        let said = refused(command, code);
        assert!(said.contains(part), "{said}");
    };
    says(
        &mut evacuate(&pool, &["--tier", "nvm"]),
        1,
        "nvm cannot be evacuated: it holds the metadata",
    );
    says(
        &mut evacuate(&pool, &["--tier", "hdd"]),
        1,
        "has no hdd: `varve status",
    );
    says(&mut evacuate(&pool, &["--tier", "tape"]), 2, "nvm, ssd or hdd");
    says(&mut evacuate(&pool, &[]), 2, "--tier");
    says(
        &mut evacuate(&pool, &["--tier", "ssd", "--cancel"]),
        1,
        "ssd is not being evacuated",
    );
    says(&mut jobs(&pool, "pause", &["7"]), 1, "no job has number 7");
    says(
        &mut jobs(&pool, "limit", &["7", "0"]),
        2,
        "`varve jobs pause` stops it",
    );
    says(&mut jobs(&pool, "limit", &["7", "fast"]), 2, "fast");
    says(varve().arg("jobs"), 2, "POOL");
    says(varve().args(["jobs", "list", "/nowhere"]), 1, "/nowhere");

    // More than NVM takes.
    let files = make(&pool, "ssd", 34);
    let said = refused(&mut evacuate(&pool, &["--tier", "ssd"]), 1);
    assert!(
        said.contains("ssd holds 6") && said.contains("--partly"),
        "{said}"
    );
    assert!(
        said.contains("95 % full") && said.contains("nothing was changed"),
        "{said}"
    );
    assert!(list(&pool).is_empty());
    let said = refused(&mut evacuate(&pool, &["--tier", "ssd", "--partly", "--wait"]), 1);
    assert!(
        said.contains("waiting: nvm ") && said.contains("% full"),
        "{said}"
    );
    says(
        &mut evacuate(&pool, &["--tier", "ssd", "--partly"]),
        1,
        "ssd is being evacuated already",
    );
    let job = &list(&pool)[0];
    let left = job["left_bytes"].as_u64().unwrap();
    let stays = job["stays"].as_object().unwrap().values();
    let stays: u64 = stays.map(|bytes| bytes.as_u64().unwrap()).sum();
    assert!(left > 0 && stays == left, "each byte has a reason: {job}");
    all_right(&files);
    // Room makes it go on.
    for (path, _) in &files[..24] {
        std::fs::remove_file(path).unwrap();
    }
    wait_until("an empty SSD", || list(&pool)[0]["state"] == "done");
    all_right(&files[24..]);
    pool.down();
    assert!(refused(&mut jobs(&pool, "list", &[]), 4).contains("no daemon serves"));
    assert!(refused(&mut evacuate(&pool, &["--tier", "ssd"]), 4).contains("no daemon serves"));
    pool.fsck_clean();
}

/// Records after which a writer goes slowly: 64 MiB.
const RECORDS_AT_ONCE: u64 = 8192;

/// Appends numbered records to a file of its own, each durable before it is counted.
fn write_on(dir: &Path, worker: u64, over: &AtomicBool, acknowledged: &AtomicU64) {
    use std::io::Write;
    let path = dir.join(format!("writer{worker}"));
    let mut next = 0;
    while !over.load(Ordering::Relaxed) {
        let mut append = || -> std::io::Result<()> {
            let mut file = std::fs::File::options().create(true).append(true).open(&path)?;
            loop {
                let mut record = noise(worker * 1_000_000 + next, 8192);
                record[..8].copy_from_slice(&next.to_le_bytes());
                file.write_all(&record)?;
                file.sync_data()?;
                next += 1;
                acknowledged.store(next, Ordering::Relaxed);
                if over.load(Ordering::Relaxed) {
                    return Ok(());
                }
                // A job gives way to writers: it ends only if they leave it room to move to.
                if next > RECORDS_AT_ONCE {
                    std::thread::sleep(std::time::Duration::from_millis(50));
                }
            }
        };
        // While no daemon is there, calls wait or fail: what was not acknowledged may be there or not.
        if append().is_err() {
            let there = std::fs::metadata(&path).map_or(0, |found| found.len() / 8192);
            next = next.max(there);
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

#[test]
fn daemon_killed_again_and_again_under_writers_loses_nothing_and_the_job_goes_on() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "160M", "--hdd", "512M"]);
    let files = make(&pool, "ssd", 40);
    let dir = pool.mnt().join("writers");
    std::fs::create_dir(&dir).unwrap();
    // They would write to the SSD.
    run_ok(varve().args(["pin", "--tier", "ssd"]).arg(&dir));
    run_ok(&mut evacuate(&pool, &["--tier", "ssd"]));
    run_ok(&mut jobs(&pool, "limit", &["1", "12MiB"]));
    let over = AtomicBool::new(false);
    let acknowledged = [AtomicU64::new(0), AtomicU64::new(0)];
    let mut kills = 0;
    std::thread::scope(|scope| {
        for (worker, count) in (0..).zip(&acknowledged) {
            let (dir, over) = (&dir, &over);
            scope.spawn(move || write_on(dir, worker, over, count));
        }
        let mut moved = Vec::new();
        while kills < 4 {
            let before = moved.last().copied().unwrap_or(0);
            wait_until("the job to move more", || {
                let told = jobs(&pool, "list", &["--json"]).output().unwrap();
                let told: Value = serde_json::from_slice(&told.stdout).unwrap_or_default();
                let now = told["jobs"][0]["moved_bytes"].as_u64().unwrap_or(0);
                now > before + 4 * MIB as u64 || told["jobs"][0]["state"] == "done"
            });
            let told = list(&pool);
            moved.push(told[0]["moved_bytes"].as_u64().unwrap());
            let daemon = pool.child_pid("serve").expect("a daemon");
            kill(daemon);
            kills += 1;
            wait_until("another daemon", || {
                pool.child_pid("serve").is_some_and(|pid| pid != daemon)
                    && jobs(&pool, "list", &[]).output().unwrap().status.success()
            });
            let told = list(&pool);
            assert_eq!(told[0]["id"], 1, "it goes on");
            assert_eq!(told[0]["limit_bytes_per_s"], 12 * MIB);
            assert!(
                told[0]["moved_bytes"].as_u64().unwrap() >= moved[kills - 1],
                "{told:?}"
            );
        }
        println!("moved before each kill: {moved:?}");
        run_ok(&mut jobs(&pool, "limit", &["1", "none"]));
        wait_until("an empty SSD", || list(&pool)[0]["state"] == "done");
        over.store(true, Ordering::Relaxed);
    });
    all_right(&files);
    let check = |pool: &Pool| {
        for (worker, count) in (0_u64..).zip(&acknowledged) {
            let count = count.load(Ordering::Relaxed);
            let found = std::fs::read(pool.mnt().join("writers").join(format!("writer{worker}"))).unwrap();
            assert!(
                found.len() as u64 >= count * 8192,
                "writer {worker}: {count} records"
            );
            for (number, record) in (0_u64..).zip(found.chunks(8192)).take(count as usize) {
                let mut wanted = noise(worker * 1_000_000 + number, 8192);
                wanted[..8].copy_from_slice(&number.to_le_bytes());
                assert!(record == wanted, "writer {worker}: record {number} of {count}");
            }
        }
    };
    check(&pool);
    let counts: Vec<_> = acknowledged
        .iter()
        .map(|count| count.load(Ordering::Relaxed))
        .collect();
    println!("{kills} kills, records written: {counts:?}");
    assert!(counts.iter().all(|count| *count > 10), "{counts:?}");
    // Once more with everything killed at once, and after a clean stop.
    pool.kill_all();
    pool.start();
    all_right(&files);
    check(&pool);
    assert_eq!(list(&pool)[0]["state"], "done");
    pool.down();
    pool.fsck_clean();
}
