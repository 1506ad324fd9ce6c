//! Far memory in slabs of a pool: a program whose memory lies on NVM, SSD and HDD finds every byte, also when the
//! daemon is killed beside it; what is shown meanwhile, and that nothing is left. Needs root, `/dev/userfaultfd`
//! and `python3`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, cannot_mount, run_ok, text_of, varve, wait_until};
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Fills memory with bytes that do not shrink, then changes and compares it in turns.
const PROGRAM: &str = r#"
import hashlib, os, random, sys, time
mib, until = int(sys.argv[1]), time.time() + float(sys.argv[2])
def page(number, turn):
    return hashlib.shake_128(b"%d %d" % (number, turn)).digest(1 << 20)
parts = [bytearray(page(number, 0)) for number in range(mib)]
turns = [0] * mib
dice = random.Random(5)
looks = 0
while time.time() < until or looks < mib:
    number = looks % mib if looks < mib else dice.randrange(mib)
    assert parts[number] == page(number, turns[number]), "part %d is another's" % number
    if dice.randrange(3) == 0:
        turns[number] += 1
        parts[number][:] = page(number, turns[number])
    looks += 1
print("all right", looks)
"#;

fn cannot() -> bool {
    let python = Command::new("python3").arg("-V").output().is_ok();
    if rustix::process::geteuid().is_root() && Path::new("/dev/userfaultfd").exists() && python {
        return cannot_mount();
    }
    eprintln!("SKIPPED: far memory needs root, /dev/userfaultfd (Linux 6.8) and python3");
    true
}

/// Slabs take 32 MiB of NVM, 64 MiB of SSD, 128 MiB of HDD.
fn pool() -> Pool {
    Pool::up(&["--nvm", "128M", "--ssd", "256M", "--hdd", "512M"])
}

/// Starts the program with 40 MiB of its memory local, and nothing compressed.
fn start(pool: &Pool, far: &[&str], mib: u32, seconds: u32) -> Child {
    let policy = pool.outside().join("policy.toml");
    std::fs::write(&policy, "[far]\ncompressed_share = 0\n").unwrap();
    let mut command = varve();
    command.args(["vm", "run", "--json", "--local", "40M", "--policy"]);
    command.arg(policy);
    for far in far {
        command.args(["--far", far]);
    }
    command.args(["--", "python3", "-c", PROGRAM]);
    command.arg(mib.to_string()).arg(seconds.to_string());
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn end(child: Child) -> Value {
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    assert!(String::from_utf8_lossy(&output.stdout).contains("all right"));
    let told = errors
        .lines()
        .find(|line| line.starts_with('{'))
        .expect("a report");
    serde_json::from_str(told).unwrap()
}

fn slabs(pool: &Pool) -> Vec<u64> {
    let told = run_ok(varve().args(["status", "--json"]).arg(pool.dir())).stdout;
    let told: Value = serde_json::from_slice(&told).unwrap();
    let tiers = told["tiers"].as_array().unwrap();
    tiers.iter().map(|tier| tier["slabs"].as_u64().unwrap()).collect()
}

#[test]
fn program_finds_its_bytes_on_all_tiers_of_a_pool() {
    if cannot() {
        return;
    }
    let mut pool = pool();
    let at = pool.mnt();
    // The mount stands for the pool, and a directory of another file system for itself.
    let child = start(&pool, &[&format!("{}=400M", at.display())], 220, 8);
    wait_until("slabs on all tiers", || {
        slabs(&pool).iter().all(|count| *count > 0)
    });
    let shown = text_of(varve().arg("status").arg(pool.dir()));
    assert!(
        shown.contains("of far memory, which take") && shown.contains("in slabs"),
        "{shown}"
    );
    let report = end(child);
    assert_eq!(report["poisoned"], 0, "{report}");
    let tiers = report["tiers"].as_array().unwrap();
    assert_eq!(tiers.len(), 3, "{report}");
    for tier in tiers {
        assert!(tier["faults"]["count"].as_u64().unwrap() > 0, "{report}");
    }
    wait_until("the end of the slabs", || slabs(&pool) == [0, 0, 0]);
    assert!(text_of(varve().arg("fsck").arg(pool.dir())).contains("clean"));
    pool.down();
    assert!(text_of(varve().arg("fsck").arg(pool.dir())).contains("clean"));
}

#[test]
fn program_goes_on_when_the_daemon_was_killed() {
    if cannot() {
        return;
    }
    let mut pool = pool();
    let far = format!("{}=400M", pool.dir().display());
    let child = start(&pool, &[&far], 160, 14);
    wait_until("slabs", || slabs(&pool).iter().sum::<u64>() > 60);
    for _ in 0..4 {
        pool.replace_daemon();
        std::thread::sleep(std::time::Duration::from_millis(1500));
        assert!(
            slabs(&pool).iter().sum::<u64>() > 60,
            "its client has taken them up"
        );
    }
    let report = end(child);
    assert_eq!(report["poisoned"], 0, "{report}");
    wait_until("the end of the slabs", || slabs(&pool) == [0, 0, 0]);
    pool.down();
    assert!(text_of(varve().arg("fsck").arg(pool.dir())).contains("clean"));
}

#[test]
fn run_that_is_killed_leaves_no_slab() {
    if cannot() {
        return;
    }
    let pool = pool();
    let far = format!("{}=400M", pool.dir().display());
    let mut child = start(&pool, &[&far], 120, 60);
    wait_until("slabs", || slabs(&pool).iter().sum::<u64>() > 40);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the end of the slabs", || slabs(&pool) == [0, 0, 0]);
    assert!(text_of(varve().arg("fsck").arg(pool.dir())).contains("clean"));
}

#[test]
fn pool_without_a_daemon_or_without_a_share_is_refused_in_a_sentence() {
    if cannot() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "16M", "--ssd", "16M", "--hdd", "0"]);
    let far = format!("{}=10M", pool.dir().display());
    pool.down();
    let refused = |said: &str| {
        let output = start(&pool, &[&far], 1, 1).wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains(said), "{errors}");
    };
    refused("no daemon serves the pool");
    let settings = pool.dir().join("varve.toml");
    let text = std::fs::read_to_string(&settings).unwrap();
    let daemon = if text.contains("[daemon]") {
        text.replace("[daemon]", "[daemon]\nfar_percent = 0")
    } else {
        format!("{text}\n[daemon]\nfar_percent = 0\n")
    };
    std::fs::write(&settings, daemon).unwrap();
    pool.start();
    let output = start(&pool, &[&far], 1, 1).wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && errors.contains("far_percent"),
        "{errors}"
    );
}
