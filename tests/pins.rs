//! `varve pin`, `unpin`, `exclude` and `which-tier`: where data goes, what directories pass on, what stays
//! through restarts, and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, cannot_mount, run_ok, text_of, varve, wait_until};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

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
    let said = fails(&["unpin"], &pool.outside());
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
