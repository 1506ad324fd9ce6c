//! `varve cache` from the command line: make, put, get, purge, check, and what it refuses.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{run_ok, text_of, varve};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::path::Path;

fn json_of(words: &[&str], store: &Path) -> Value {
    let text = text_of(varve().arg("cache").args(words).arg(store).arg("--json"));
    serde_json::from_str(&text).unwrap()
}

fn make(store: &Path, policy: &str) {
    run_ok(
        varve()
            .args([
                "cache",
                "mkstore",
                "--disk",
                "64M",
                "--no-measure",
                "--policy",
                policy,
            ])
            .arg(store),
    );
}

fn put(store: &Path, key: &str, file: &Path, tag: &str) {
    run_ok(
        varve()
            .args(["cache", "put", "--key", key, "--tag", tag, "--file"])
            .arg(file)
            .arg(store),
    );
}

fn get(store: &Path, key: &str) -> Option<Vec<u8>> {
    let output = varve()
        .args(["cache", "get", "--key", key])
        .arg(store)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!text.contains("panicked"), "{text}");
    output.status.success().then_some(output.stdout)
}

#[test]
fn model_prints_the_table_of_the_thesis() {
    let text = text_of(varve().args(["cache", "model", "--disk", "1T", "--seeks", "79.2", "--json"]));
    let model: Value = serde_json::from_str(&text).unwrap();
    let row = |name: &str| {
        model["policies"]
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["policy"] == name)
            .unwrap()
            .clone()
    };
    assert_eq!(row("set-mem")["index_bytes"], 176.0 * 1048576.0);
    assert_eq!(row("log-prefetch")["bits"], 55.0);
    let rate = row("log-prefetch")["requests_per_s"].as_f64().unwrap();
    assert!((263.0..265.0).contains(&rate), "{rate}");
    let printed = row("log-prefetch")["requests_per_s_table_2_4"].as_f64().unwrap();
    assert!((104.0..107.0).contains(&printed), "{printed}");
    assert!(text_of(varve().args(["cache", "model", "--ram", "200M"])).contains("more than --ram"));
}

#[test]
fn objects_come_back_until_they_are_purged() {
    let dir = tempfile::tempdir().unwrap();
    let (small, large) = (dir.path().join("small"), dir.path().join("large"));
    std::fs::write(&small, b"a small object").unwrap();
    let bytes: Vec<u8> = (0..9 << 20)
        .map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    std::fs::write(&large, &bytes).unwrap();
    for policy in [
        "set",
        "set-mem",
        "set-mem-lru",
        "log",
        "log-lru",
        "log-prefetch",
        "log-lru-prefetch",
    ] {
        let store = dir.path().join(policy);
        make(&store, policy);
        put(&store, "http://a/small", &small, "s");
        put(&store, "http://a/large", &large, "l");
        assert_eq!(get(&store, "http://a/small").unwrap(), b"a small object");
        assert!(get(&store, "http://a/large").unwrap() == bytes, "{policy}");
        assert_eq!(get(&store, "http://a/none"), None);
        let checked = json_of(&["check"], &store);
        assert_eq!(
            (&checked["objects"], &checked["damaged"]),
            (&Value::from(2), &Value::from(0)),
            "{policy}"
        );
        let status = json_of(&["status"], &store);
        assert_eq!(status["stores"][0]["policy"], policy);
        assert_eq!(status["stores"][0]["clean"], true);
        json_of(&["purge", "--tag", "l"], &store);
        assert_eq!(get(&store, "http://a/large"), None, "{policy}");
        assert!(get(&store, "http://a/small").is_some());
        json_of(&["purge", "--prefix", "http://a/"], &store);
        assert_eq!(get(&store, "http://a/small"), None);
        put(&store, "http://a/small", &small, "s");
        json_of(&["purge", "--all"], &store);
        assert_eq!(get(&store, "http://a/small"), None);
    }
}

#[test]
fn check_counts_damage_and_get_does_not_give_it() {
    let dir = tempfile::tempdir().unwrap();
    let (store, object) = (dir.path().join("store"), dir.path().join("object"));
    std::fs::write(&object, vec![0xA5; 6000]).unwrap();
    make(&store, "log");
    put(&store, "k", &object, "t");
    let bytes = std::fs::read(&store).unwrap();
    let at = bytes
        .windows(4000)
        .position(|window| window.iter().all(|&byte| byte == 0xA5))
        .unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&store).unwrap();
    file.write_all_at(b"x", at as u64 + 1000).unwrap();
    let output = varve().args(["cache", "check"]).arg(&store).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert_eq!(get(&store, "k"), None);
}

#[test]
fn bad_input_is_told_what_to_do_and_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    make(&store, "log");
    for (words, code, said) in [
        (&["mkstore", "--no-measure"][..], 1, "--force"),
        (&["purge"], 2, "say what to purge"),
        (&["purge", "--prefix", ""], 2, "--all"),
        (
            &[
                "mkstore",
                "--force",
                "--no-measure",
                "--policy",
                "log",
                "--ram",
                "1K",
            ],
            2,
            "give more",
        ),
        (&["mkstore", "--policy", "lru"], 2, "there is no policy"),
    ] {
        let output = varve().arg("cache").args(words).arg(&store).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {text}");
        assert!(
            text.contains(said) && !text.contains("panicked"),
            "{words:?}: {text}"
        );
    }
    let missing = dir.path().join("missing");
    let output = varve().args(["cache", "mkstore"]).arg(&missing).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("--disk") && !missing.exists());
    let not_a_store = dir.path().join("text");
    std::fs::write(&not_a_store, vec![b'x'; 10_000]).unwrap();
    for command in ["status", "check"] {
        let output = varve()
            .args(["cache", command])
            .arg(&not_a_store)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains("no cache store"));
    }
    assert_eq!(json_of(&["status"], &store)["stores"][0]["policy"], "log");
}

#[test]
fn mkstore_measures_and_takes_what_fits_the_memory() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let made = |ram: &str| {
        let words = [
            "cache", "mkstore", "--force", "--disk", "64M", "--json", "--ram", ram,
        ];
        let text = text_of(varve().args(words).arg(&store));
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let large = made("1M");
    assert_eq!(large["policy"], "log-prefetch");
    assert_eq!(large["measured"].as_array().unwrap().len(), 6);
    assert!(large["requests_per_s"].as_f64().unwrap() > 0.0);
    assert_eq!(made("40K")["policy"], "log-lru-prefetch");
    assert_eq!(made("12K")["policy"], "set-mem");
    assert_eq!(made("5K")["policy"], "set-mem-lru");
    assert_eq!(made("0")["policy"], "set");
}

#[test]
fn proxy_commands_run_the_program_beside_this_one() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    // A copy of its own, with a proxy of its own beside it.
    let varve = dir.path().join("varve");
    std::fs::copy(env!("CARGO_BIN_EXE_varve"), &varve).unwrap();
    let run = |words: &[&str]| {
        std::process::Command::new(&varve)
            .args(words)
            .env("PATH", "/nonexistent")
            .output()
            .unwrap()
    };
    let missing = run(&["cache", "top", "--socket", "x"]);
    let text = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(
        !missing.status.success() && text.contains("cargo build"),
        "{text}"
    );
    let proxy = dir.path().join("varve-cache-proxy");
    std::fs::write(&proxy, "#!/bin/sh\necho \"$@\"\nexit 7\n").unwrap();
    std::fs::set_permissions(&proxy, std::fs::Permissions::from_mode(0o755)).unwrap();
    for command in ["serve", "top", "warm"] {
        let done = run(&["cache", command, "--socket", "x", "--help"]);
        assert_eq!(done.status.code(), Some(7));
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        assert_eq!(said.trim(), format!("{command} --socket x --help"));
    }
}
