//! `varve pin`, `unpin`, `exclude` and `which-tier`: where data goes, what directories pass on, what stays
//! through restarts, and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, cannot_mount, run_ok, text_of, varve, wait_until};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const TIERS: [&str; 6] = ["--nvm", "64M", "--ssd", "128M", "--hdd", "256M"];

/// Files below a path by name: their tiers with bytes, and their pin.
fn placed(at: &Path) -> BTreeMap<String, (Vec<(String, u64)>, String)> {
    let said = text_of(varve().args(["which-tier", "--json"]).arg(at));
    let said: Value = serde_json::from_str(&said).unwrap();
    let files = said["files"].as_array().unwrap().iter();
    files
        .map(|file| {
            let name = Path::new(file["path"].as_str().unwrap()).file_name().unwrap();
            let tiers = file["tiers"].as_object().unwrap().iter();
            let tiers = tiers.map(|(tier, bytes)| (tier.clone(), bytes.as_u64().unwrap()));
            let pin = file["pin"].as_str().unwrap().to_owned();
            (name.to_str().unwrap().to_owned(), (tiers.collect(), pin))
        })
        .collect()
}

fn pin(tier: &str, at: &Path) {
    run_ok(varve().args(["pin", "--wait", "--tier", tier]).arg(at));
}

fn on(tier: &str, bytes: u64, pin: &str) -> (Vec<(String, u64)>, String) {
    (vec![(tier.to_owned(), bytes)], pin.to_owned())
}

#[test]
fn directory_that_is_pinned_has_its_data_on_the_tier_through_restarts() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&TIERS);
    let dir = pool.mnt().join("dir");
    std::fs::create_dir_all(dir.join("sub")).unwrap();
    let body: Vec<u8> = (0..3_000_000_u32).map(|i| (i ^ i >> 9) as u8).collect();
    std::fs::write(dir.join("old"), &body).unwrap();
    std::fs::write(pool.mnt().join("other"), &body).unwrap();
    pin("hdd", &dir);
    // Not digested yet, of this session and of one under run.
    std::fs::write(dir.join("sub/new"), &body[..100_000]).unwrap();
    run_ok(
        varve()
            .args(["run", "--session-after", "0", "--mount"])
            .arg(pool.mnt())
            .args(["--", "cp"])
            .arg(dir.join("old"))
            .arg(dir.join("sub/copied")),
    );
    let there = placed(pool.mnt().as_path());
    let large = 3_002_368;
    assert_eq!(there["old"], on("hdd", large, "hdd"));
    assert_eq!(there["new"], on("hdd", 102_400, "hdd"));
    assert_eq!(there["copied"], on("hdd", large, "hdd"));
    assert_eq!(there["other"], on("nvm", large, "policy"));

    pool.kill_all();
    pool.start();
    let dir = pool.mnt().join("dir");
    std::fs::write(dir.join("sub/later"), &body[..5000]).unwrap();
    std::fs::rename(dir.join("sub/new"), pool.mnt().join("left")).unwrap();
    std::fs::rename(pool.mnt().join("other"), dir.join("came")).unwrap();
    wait_until("the move of a file that came", || {
        placed(&dir)["came"] == on("hdd", large, "hdd")
    });
    let there = placed(pool.mnt().as_path());
    assert_eq!(there["later"], on("hdd", 8192, "hdd"));
    assert_eq!(there["left"].1, "policy");
    assert_eq!(std::fs::read(dir.join("came")).unwrap(), body);

    // Pins of their own stay; `unpin` ends the others.
    pin("ssd", &dir.join("sub"));
    let said = text_of(varve().arg("unpin").arg(&dir));
    assert!(said.contains("sub keeps its own"), "{said}");
    let there = placed(&dir);
    assert_eq!(there["later"], on("ssd", 8192, "ssd"));
    assert_eq!(there["old"].1, "policy");
    run_ok(varve().arg("exclude").arg(dir.join("old")));
    let said = text_of(varve().arg("which-tier").arg(dir.join("old")));
    assert!(said.contains("2.9 MiB on hdd (not moved)"), "{said}");
    for name in ["old", "came", "sub/copied"] {
        assert_eq!(std::fs::read(dir.join(name)).unwrap(), body);
    }
    pool.down();
    pool.fsck_clean();
}

#[test]
fn pin_that_cannot_be_is_refused_or_says_what_it_waits_for() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "64M", "--hdd", "0"]);
    let file = pool.mnt().join("f");
    std::fs::write(&file, vec![1; 5000]).unwrap();
    let fails = |arguments: &[&str], at: &Path| {
        let output = varve().args(arguments).arg(at).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = fails(&["pin", "--tier", "hdd"], &file);
    assert!(said.contains("has no hdd"), "{said}");
    let said = fails(&["pin", "--tier", "ssd"], &pool.mnt().join("missing"));
    assert!(said.contains("cannot find"), "{said}");
    let said = fails(&["unpin"], pool.outside());
    assert!(said.contains("is not in a mount of a pool"), "{said}");

    // More than the SSD holds: all of it is written, and what waits says why.
    let dir = pool.mnt().join("dir");
    std::fs::create_dir(&dir).unwrap();
    run_ok(varve().args(["pin", "--tier", "ssd"]).arg(&dir));
    for number in 0..20 {
        std::fs::write(dir.join(number.to_string()), vec![number; 4 << 20]).unwrap();
        run_ok(varve().arg("digest").arg(pool.dir()));
    }
    let said = fails(&["pin", "--wait", "--tier", "ssd"], &dir);
    assert!(said.contains("waiting: ssd 9"), "{said}");
    let said = text_of(varve().arg("which-tier").arg(&dir));
    assert!(said.contains("waiting: ssd 9"), "{said}");
    for number in 0..20 {
        assert_eq!(
            std::fs::read(dir.join(number.to_string())).unwrap(),
            vec![number; 4 << 20]
        );
    }
    pool.down();
    pool.fsck_clean();
}

/// Replaces the rules in a pool's settings.
fn set_rules(pool: &Pool, rules: &str) {
    let toml = pool.dir().join("varve.toml");
    let text = std::fs::read_to_string(&toml).unwrap();
    let settings = text.split("\n[[rule]]").next().unwrap();
    std::fs::write(&toml, format!("{settings}\n{rules}")).unwrap();
}

#[test]
fn wrong_rules_are_refused_at_the_start_and_keep_no_pool_away() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&TIERS);
    pool.down();
    for (rules, why) in [
        ("[[rule]]\nmatch = 'd/x'\ntier = 'ssd'", "begin it with"),
        (
            "[[rule]]\nmatch = 'a['\ntier = 'ssd'",
            "rule 1: \"a[\" is no pattern",
        ),
        ("[[rule]]\nmatch = '*'", "rule 1: give one of tier and exclude"),
        ("[[rule]]\nmatch = '*'\ntier = 'tape'", "tape"),
    ] {
        set_rules(&pool, rules);
        let output = varve().arg("serve").arg(pool.dir()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{said}");
    }
    // A mistake that is made while it runs does not keep it from being stopped.
    set_rules(&pool, "");
    pool.start();
    set_rules(&pool, "[[rule]]\nmatch = '*'\ntier = 'tape'");
    run_ok(varve().arg("status").arg(pool.dir()));
    let output = varve().arg("rules").arg(pool.mnt()).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("tape"));
    // Nor from being served by the next daemon, which says what is wrong.
    pool.replace_daemon();
    let said = text_of(varve().arg("status").arg(pool.dir()));
    assert!(said.contains("rules are not applied"), "{said}");
    let output = varve()
        .args(["rules", "--apply"])
        .arg(pool.mnt())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("mend them, and start it again"), "{said}");
    pool.down();
}

#[test]
fn rules_of_the_pool_say_which_files_they_match_and_move_them() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&TIERS);
    pool.down();
    set_rules(
        &pool,
        "[[rule]]\nmatch = '*.log'\nlarger_than = '1MiB'\ntier = 'hdd'\n\
         [[rule]]\nmatch = '/db/**'\ntier = 'ssd'\n\
         [[rule]]\nmatch = '*.iso'\nexclude = true\n",
    );
    pool.start();
    let mnt = pool.mnt();
    std::fs::create_dir_all(mnt.join("db/deep")).unwrap();
    let large = vec![3; 2 << 20];
    for name in ["db/large.log", "small.log", "db/deep/table", "image.iso", "other"] {
        let body = if name == "small.log" {
            &large[..100]
        } else {
            &large
        };
        std::fs::write(mnt.join(name), body).unwrap();
    }
    let said = text_of(varve().args(["rules", "--why"]).arg(&mnt));
    for line in [
        "db/large.log: goes to hdd (rule 1)",
        "db/deep/table: goes to ssd (rule 2)",
        "small.log: where the policy puts it (no rule matches)",
        "  not rule 1: not larger than 1048576 bytes",
        "image.iso: is not moved (rule 3)",
        "no rule: 2 files, 2.0 MiB",
    ] {
        assert!(said.contains(line), "{line:?} in {said}");
    }
    let said = text_of(varve().args(["rules", "--json"]).arg(mnt.join("db")));
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["files"].as_array().unwrap().len(), 2);
    let said = text_of(varve().args(["rules", "--apply"]).arg(&mnt));
    assert!(said.contains("5 files looked at, 3 placed anew"), "{said}");
    wait_until("the moves of the rules", || {
        let there = placed(&mnt);
        there["large.log"] == on("hdd", 2 << 20, "hdd") && there["table"] == on("ssd", 2 << 20, "ssd")
    });
    assert_eq!(placed(&mnt)["image.iso"], on("nvm", 2 << 20, "stay"));
    run_ok(varve().args(["pin", "--tier", "nvm"]).arg(mnt.join("db/deep")));
    let said = text_of(varve().arg("rules").arg(&mnt));
    for line in [
        "db/deep/table: pinned to nvm, as its directory (before the rules; else: goes to ssd (rule 2))",
        "pinned, which comes before the rules: 1 files, 2.0 MiB",
    ] {
        assert!(said.contains(line), "{line:?} in {said}");
    }
    assert_eq!(placed(&mnt)["other"], on("nvm", 2 << 20, "policy"));
    pool.down();
    pool.fsck_clean();
}

#[test]
fn names_that_are_no_text_and_trees_that_move_are_pinned_too() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&TIERS);
    let mnt = pool.mnt();
    let odd = mnt.join(OsStr::from_bytes(b"odd\xff"));
    std::fs::create_dir(&odd).unwrap();
    std::fs::write(odd.join(OsStr::from_bytes(b"\xfe\n")), vec![1; 5000]).unwrap();
    for command in [
        &["pin", "--json", "--tier", "ssd"][..],
        &["which-tier", "--json"],
        &["rules", "--json"],
        &["unpin", "--json"],
    ] {
        let said = text_of(varve().args(command).arg(&odd));
        serde_json::from_str::<Value>(&said).unwrap();
    }

    // Directories are renamed within the tree while it is pinned: nothing is left out, or it says so.
    let tree = mnt.join("tree");
    for dir in 0..4 {
        let dir = tree.join(format!("d{dir}"));
        std::fs::create_dir_all(&dir).unwrap();
        for file in 0..300 {
            std::fs::write(dir.join(file.to_string()), b"x").unwrap();
        }
    }
    let done = AtomicBool::new(false);
    let pinned = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0;
            while !done.load(Ordering::Relaxed) {
                let (from, to) = [("d3", "e3"), ("e3", "d3")][round % 2];
                std::fs::rename(tree.join(from), tree.join(to)).unwrap();
                std::thread::sleep(Duration::from_millis(7));
                round += 1;
            }
        });
        let output = varve()
            .args(["pin", "--tier", "ssd"])
            .arg(&tree)
            .output()
            .unwrap();
        done.store(true, Ordering::Relaxed);
        output
    });
    let left = placed(&tree).values().filter(|(_, pin)| pin != "ssd").count();
    let said = String::from_utf8_lossy(&pinned.stderr);
    assert!(left == 0 || !pinned.status.success(), "{left} left out: {said}");

    // What was unpinned in a pinned directory stays so.
    let file = tree.join("d0/0");
    run_ok(varve().arg("unpin").arg(&file));
    std::fs::rename(&file, tree.join("d0/renamed")).unwrap();
    run_ok(varve().arg("digest").arg(pool.dir()));
    assert_eq!(placed(&tree.join("d0"))["renamed"].1, "policy");
    let said = text_of(varve().arg("which-tier").arg(&tree));
    assert!(said.contains("tree/: pinned to ssd"), "{said}");
    assert!(said.contains("d0/renamed: 4.0 KiB on "), "{said}");
    pool.down();
    pool.fsck_clean();
}

/// A store's index file: its tiers and its pin, and what the commands say.
#[test]
fn index_file_of_a_cache_store_is_kept_on_nvm() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "0", "--hdd", "512M"]);
    let mkstore = |policy: &str, more: &[&str], store: &Path| {
        let words = [
            "cache",
            "mkstore",
            "--disk",
            "128M",
            "--no-measure",
            "--policy",
            policy,
        ];
        let mut make = varve();
        make.args(words).args(more).arg(store);
        make
    };
    let [by_mount, by_run, none] = ["mount", "run", "none"].map(|name| pool.mnt().join(name));
    let said = text_of(&mut mkstore("log-lru", &[], &by_mount));
    assert!(said.contains("pinned to the pool's NVM"), "{said}");
    // Less than half of its sets fit in this memory.
    let made = mkstore("set-mem-lru", &["--ram", "8K"], &by_run);
    let mut run = varve();
    run.args(["run", "--session-after", "0", "--mount"])
        .arg(pool.mnt());
    run.arg("--").arg(made.get_program()).args(made.get_args());
    let said = text_of(&mut run);
    assert!(said.contains("pinned to the pool's NVM"), "{said}");
    let said = text_of(&mut mkstore("log-lru", &["--no-pin"], &none));
    assert!(said.contains("a seek more"), "{said}");
    assert!(!pool.mnt().join("none.index").exists());

    // More than the NVM has, so that what is not pinned leaves it.
    let body: Vec<u8> = (0..90_000_000_u32).map(|i| (i ^ i >> 11) as u8).collect();
    std::fs::write(pool.mnt().join("other"), &body).unwrap();
    let mut put = varve();
    put.args(["cache", "put", "--key", "k", "--file"])
        .arg(pool.mnt().join("pinned"));
    std::fs::write(pool.mnt().join("pinned"), &body[..100_000]).unwrap();
    run_ok(put.arg(&by_mount));
    wait_until("data to leave NVM", || {
        let there = placed(pool.mnt().as_path());
        there["other"].0.iter().any(|(tier, _)| tier == "hdd")
    });
    let there = placed(pool.mnt().as_path());
    for (name, store) in [("mount.index", &by_mount), ("run.index", &by_run)] {
        let (tiers, pin) = &there[name];
        assert_eq!(pin, "nvm");
        assert!(
            tiers.len() == 1 && tiers[0].0 == "nvm" && tiers[0].1 > 0,
            "{name}: {tiers:?}"
        );
        let said = text_of(varve().args(["cache", "status"]).arg(store));
        assert!(said.contains("pinned to the pool's NVM"), "{said}");
        let said = text_of(varve().args(["which-tier"]).arg(pool.mnt().join(name)));
        assert!(said.contains("on nvm (pinned to nvm)"), "{said}");
    }
    let said = text_of(varve().args(["cache", "status"]).arg(&none));
    assert!(said.contains("in no file of its own"), "{said}");
    run_ok(varve().arg("unpin").arg(pool.mnt().join("mount.index")));
    let said = text_of(varve().args(["cache", "status"]).arg(&by_mount));
    assert!(said.contains("varve pin --tier nvm"), "{said}");
    let got = run_ok(varve().args(["cache", "get", "--key", "k"]).arg(&by_mount)).stdout;
    assert!(got == body[..100_000]);
    pool.down();
    pool.fsck_clean();
}
