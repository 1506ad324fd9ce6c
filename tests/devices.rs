//! `varve add-device`, `remove-device` and `replace` on a pool in use and on one that was stopped: what they do,
//! say and refuse, what is left of the settings, and a daemon that is killed meanwhile.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, all_right, cannot_mount, kill, noise, run_ok, text_of, varve, wait_until};
use serde_json::Value;
use std::path::PathBuf;

const MIB: usize = 1 << 20;

fn command(pool: &Pool, name: &str, words: &[&str]) -> std::process::Command {
    let mut command = varve();
    command.arg(name).arg(pool.dir()).args(words);
    command
}

fn refused(command: &mut std::process::Command) -> String {
    let output = command.output().unwrap();
    assert_ne!(output.status.code(), Some(0), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// File names, states and used bytes of the SSDs.
fn ssds(pool: &Pool) -> Vec<(String, String, u64)> {
    let told = run_ok(varve().arg("status").arg("--json").arg(pool.dir())).stdout;
    let told: Value = serde_json::from_slice(&told).unwrap();
    let devices = told["devices"].as_array().unwrap().clone();
    let ssds = devices.into_iter().filter(|device| device["tier"] == "ssd");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    ssds.map(|device| {
        let name = PathBuf::from(text(&device["name"]));
        let name = name.file_name().unwrap().to_string_lossy().into_owned();
        (
            name,
            text(&device["state"]),
            device["used_bytes"].as_u64().unwrap(),
        )
    })
    .collect()
}

fn names(pool: &Pool) -> Vec<String> {
    ssds(pool).into_iter().map(|(name, ..)| name).collect()
}

fn make(pool: &Pool, files: u64) -> Vec<(PathBuf, Vec<u8>)> {
    let one = |number: u64| {
        let (path, body) = (pool.mnt().join(number.to_string()), noise(number + 1, 4 * MIB));
        std::fs::write(&path, &body).unwrap();
        (path, body)
    };
    let made: Vec<_> = (0..files).map(one).collect();
    run_ok(varve().args(["pin", "--wait", "--tier", "ssd"]).arg(pool.mnt()));
    made
}

#[test]
fn devices_come_and_go_in_a_pool_in_use() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "128M", "--ssd", "128M", "--hdd", "0"]);
    assert_eq!(names(&pool), ["ssd.img", "ssd-2.img"]);
    let files = make(&pool, 12);
    let used: Vec<u64> = ssds(&pool).into_iter().map(|(.., used)| used).collect();
    assert!(used.iter().all(|used| *used > 16 * MIB as u64), "{used:?}");
    let text = text_of(varve().arg("status").arg(pool.dir()));
    assert!(text.contains("device   ssd in use"), "{text}");
    let text = text_of(varve().arg("metrics").arg(pool.dir()));
    assert!(text.contains("varve_device_used_bytes{tier=\"ssd\""), "{text}");

    let said = text_of(&mut command(&pool, "add-device", &["--tier", "ssd", "128M"]));
    assert!(
        said.contains("ssd-3.img is a device of the ssd tier now"),
        "{said}"
    );
    let nvm = refused(&mut command(&pool, "add-device", &["--tier", "nvm", "64M"]));
    assert!(nvm.contains("one device of NVM"), "{nvm}");
    let none = refused(&mut command(&pool, "add-device", &["--tier", "hdd", "64M"]));
    assert!(none.contains("it has no hdd tier"), "{none}");
    let image = pool.dir().join("ssd-2.img");
    let taken = refused(&mut command(
        &pool,
        "add-device",
        &["--tier", "ssd", image.to_str().unwrap()],
    ));
    assert!(taken.contains("a device of this pool already"), "{taken}");
    let full = pool.dir().join("mine");
    std::fs::write(&full, noise(5, 64 * MIB)).unwrap();
    let full = refused(&mut command(
        &pool,
        "add-device",
        &["--tier", "ssd", full.to_str().unwrap()],
    ));
    assert!(full.contains("is not empty"), "{full}");
    let unknown = refused(&mut command(&pool, "remove-device", &["sdz"]));
    assert!(unknown.contains("no device sdz"), "{unknown}");

    // Comments and line breaks of the settings stay.
    let toml = pool.dir().join("varve.toml");
    let before = std::fs::read_to_string(&toml).unwrap();
    let line = "ssd = [\"128M\", \"./ssd-2.img\", \"./ssd-3.img\"]";
    let lines = "ssd = [ # three\n  \"128M\",\n  \"./ssd-2.img\", # an old one\n  \"./ssd-3.img\" # new\n]";
    assert!(before.contains(line), "{before}");
    let before = before.replace(line, lines);
    std::fs::write(&toml, &before).unwrap();
    let said = text_of(&mut command(&pool, "remove-device", &["ssd-2.img", "--wait"]));
    assert!(
        said.ends_with("ssd-2.img is out of the pool and may be detached\n"),
        "{said}"
    );
    let after = std::fs::read_to_string(&toml).unwrap();
    assert_eq!(after, before.replace("  \"./ssd-2.img\", # an old one\n", ""));
    assert_eq!(names(&pool), ["ssd.img", "ssd-3.img"]);
    all_right(&files);
    let said = text_of(&mut command(&pool, "replace", &["ssd.img", "160M", "--wait"]));
    assert!(said.contains("ssd.img is out of the pool"), "{said}");
    let left = names(&pool);
    assert!(
        left.len() == 2 && !left.contains(&"ssd.img".to_owned()),
        "{left:?}"
    );
    all_right(&files);
    pool.down();

    // What was taken out is not needed, and the settings do not name it any more.
    for name in ["ssd.img", "ssd-2.img"] {
        if !left.contains(&name.to_owned()) {
            let _ = std::fs::remove_file(pool.dir().join(name));
        }
    }
    let after = std::fs::read_to_string(&toml).unwrap();
    assert!(after.contains("ssd = [ # three\n  \"0\",\n"), "{after}");
    pool.start();
    assert_eq!(names(&pool), left);
    all_right(&files);
    assert_eq!(std::fs::read_to_string(&toml).unwrap(), after);
    pool.down();
    // The daemon may end between the two: it starts with what is not part of the pool any more, and settles it.
    std::fs::write(&toml, &before).unwrap();
    let added = left
        .iter()
        .find(|name| !["ssd.img", "ssd-3.img"].contains(&name.as_str()))
        .unwrap();
    let before = before.replace("./ssd-2.img", &format!("./{added}"));
    std::fs::write(
        &toml,
        before.replace("  \"./ssd-3.img\"", "  \"./ssd-9.img\",\n  \"./ssd-3.img\""),
    )
    .unwrap();
    pool.start();
    assert_eq!(names(&pool).len(), left.len());
    all_right(&files);
    let settled = std::fs::read_to_string(&toml).unwrap();
    assert_eq!(settled, before.replace("\"128M\"", "\"0\""));
    pool.down();
    assert!(text_of(varve().arg("fsck").arg(pool.dir())).contains("clean"));
}

#[test]
fn settings_that_cannot_be_changed_are_told_of_with_the_line() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "64M", "--ssd", "64M", "--hdd", "0"]);
    let toml = pool.dir().join("varve.toml");
    let text = std::fs::read_to_string(&toml).unwrap();
    let odd = text.replace("ssd = [", "'ssd' = [");
    std::fs::write(&toml, &odd).unwrap();
    let said = text_of(&mut command(&pool, "remove-device", &["ssd-2.img", "--wait"]));
    assert!(
        said.contains("varve.toml still names it: delete \"./ssd-2.img\""),
        "{said}"
    );
    assert_eq!(std::fs::read_to_string(&toml).unwrap(), odd);
    pool.down();
    pool.start();
    assert_eq!(names(&pool), ["ssd.img"]);
    pool.down();
    pool.fsck_clean();
}

#[test]
fn missing_device_is_named_and_nothing_is_changed_without_it() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "128M", "--hdd", "0"]);
    let files = make(&pool, 6);
    pool.down();
    // Stopped, it takes a device too.
    text_of(&mut command(&pool, "add-device", &["--tier", "ssd", "128M"]));
    let (image, away) = (pool.dir().join("ssd-2.img"), pool.dir().join("away"));
    std::fs::rename(&image, &away).unwrap();
    let before = std::fs::read(pool.dir().join("nvm.img")).unwrap();
    for words in [&["fsck"][..], &["fsck", "--repair"], &["serve"]] {
        let said = refused(varve().args(words).arg(pool.dir()));
        assert!(
            said.contains("a device of the ssd tier is missing") && said.contains("ssd-2.img"),
            "{said}"
        );
    }
    assert!(std::fs::read(pool.dir().join("nvm.img")).unwrap() == before);
    std::fs::rename(&away, &image).unwrap();
    pool.start();
    all_right(&files);
}

/// The jobs of a pool.
fn jobs(pool: &Pool) -> Vec<Value> {
    let told = run_ok(varve().args(["jobs", "list", "--json"]).arg(pool.dir())).stdout;
    let told: Value = serde_json::from_slice(&told).unwrap();
    told["jobs"].as_array().unwrap().clone()
}

fn job_command(pool: &Pool, name: &str, words: &[&str]) -> String {
    text_of(varve().args(["jobs", name]).arg(pool.dir()).args(words))
}

/// Kills the daemon, and waits for the next one.
fn kill_daemon(pool: &Pool) {
    let pid = std::fs::read_to_string(pool.dir().join("pid")).unwrap();
    kill(pid.trim().parse().unwrap());
    wait_until("the daemon is back", || {
        varve()
            .arg("status")
            .arg(pool.dir())
            .output()
            .is_ok_and(|output| output.status.success())
    });
}

#[test]
fn removal_is_a_job_that_goes_on_after_the_daemon_was_killed() {
    if cannot_mount() {
        return;
    }
    let pool = Pool::up(&["--nvm", "64M", "--ssd", "160M", "--ssd", "160M", "--hdd", "0"]);
    let files = make(&pool, 24);
    let said = text_of(&mut command(&pool, "remove-device", &["ssd-2.img"]));
    assert!(
        said.starts_with("job 1: moving ") && said.contains("`varve jobs"),
        "{said}"
    );
    let said = job_command(&pool, "limit", &["1", "4MiB"]);
    assert!(
        said.contains("job 1 takes ") && said.contains("ssd-2.img out of ssd"),
        "{said}"
    );
    let mut moved = 0;
    for _ in 0..3 {
        kill_daemon(&pool);
        let job = jobs(&pool).remove(0);
        assert_eq!((&job["id"], &job["kind"]), (&1.into(), &"remove".into()));
        assert_eq!(job["limit_bytes_per_s"], 4 << 20);
        let now = job["moved_bytes"].as_u64().unwrap();
        assert!(now >= moved, "{job}");
        moved = now;
    }
    let said = job_command(&pool, "pause", &["1"]);
    assert!(said.contains("paused"), "{said}");
    job_command(&pool, "limit", &["1", "none"]);
    kill_daemon(&pool);
    let paused = jobs(&pool).remove(0);
    assert_eq!(paused["state"], "paused");
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(jobs(&pool)[0]["moved_bytes"], paused["moved_bytes"]);
    let said = job_command(&pool, "cancel", &["1"]);
    assert!(said.contains("ssd-2.img takes new data again"), "{said}");
    assert_eq!(ssds(&pool)[1].1, "in use");
    assert_eq!(jobs(&pool), Vec::<Value>::new());
    let said = text_of(&mut command(&pool, "remove-device", &["ssd-2.img"]));
    assert!(said.starts_with("job 2: "), "{said}");
    wait_until("it is out", || names(&pool) == ["ssd.img"]);
    assert_eq!(jobs(&pool), Vec::<Value>::new());
    all_right(&files);
}
