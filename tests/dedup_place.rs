//! `varve dedup place` and `unplace` on a mounted pool: where shared blocks go, what stays, what is said,
//! what is there after kills, and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, cannot_mount, noise, run_ok, text_of, varve, wait_until};
use serde_json::Value;
use std::path::{Path, PathBuf};

const MIB: usize = 1 << 20;

/// Images of 3 MiB, of which 2 are the same in all, which share these.
fn make_images(pool: &Pool) -> Vec<(PathBuf, Vec<u8>)> {
    let dir = pool.mnt().join("images");
    std::fs::create_dir(&dir).unwrap();
    let image = |number: u64| {
        let body = [noise(1, MIB), noise(10 + number, MIB), noise(2, MIB)].concat();
        let path = dir.join(format!("{number}.img"));
        std::fs::write(&path, &body).unwrap();
        (path, body)
    };
    let images = (0..4).map(image).collect();
    run_ok(varve().args(["dedup", "apply"]).arg(&dir));
    images
}

fn json(words: &[&str], paths: &[&Path]) -> Value {
    serde_json::from_slice(&run_ok(varve().args(words).arg("--json").args(paths)).stdout).unwrap()
}

/// Bytes of a file on each tier.
fn tiers(path: &Path) -> Value {
    json(&["which-tier"], &[path])["tiers"].clone()
}

fn refused(words: &[&str], path: &Path) -> String {
    let output = varve().args(words).arg(path).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn up() -> Option<Pool> {
    (!cannot_mount()).then(|| Pool::up(&["--nvm", "64M", "--ssd", "128M", "--hdd", "256M"]))
}

#[test]
fn what_images_share_is_placed_once_and_stays_through_kills_and_restarts() {
    let Some(mut pool) = up() else { return };
    let images = make_images(&pool);
    let paths: Vec<&Path> = images.iter().map(|(path, _)| path.as_path()).collect();
    run_ok(varve().args(["pin", "--wait", "--tier", "hdd"]).args(&paths));
    let shared = 2 * MIB as u64;
    let own = MIB as u64;
    assert_eq!(tiers(paths[0])["hdd"], own);

    // Asked for one of them, it holds for what all have.
    let said = text_of(
        varve()
            .args(["dedup", "place", "--tier", "ssd", "--wait"])
            .arg(paths[1]),
    );
    assert!(
        said.contains("placed on ssd: what 1 files share, 2.0 MiB, kept in 2.0 MiB"),
        "{said}"
    );
    for path in &paths {
        let found = tiers(path);
        assert_eq!(
            (&found["ssd"], &found["hdd"]),
            (&shared.into(), &own.into()),
            "{found}"
        );
    }
    let said = text_of(varve().arg("which-tier").args(&paths));
    assert_eq!(
        said.matches("pinned to hdd; pinned to ssd: shared part").count(),
        4,
        "{said}"
    );
    assert_eq!(said.matches("as another file").count(), 3, "{said}");

    for kill in [true, false] {
        if kill {
            pool.kill_all();
        } else {
            pool.down();
        }
        pool.start();
        // Pins and rules are another matter.
        run_ok(varve().args(["rules", "--apply"]).arg(pool.mnt()));
        run_ok(varve().args(["unpin"]).args(&paths));
        let said = text_of(varve().arg("which-tier").arg(paths[1]));
        assert!(
            said.contains("where the policy puts it; pinned to ssd: shared part)"),
            "{said}"
        );
        assert_eq!(tiers(paths[3])["ssd"], shared);
    }

    // All of them on NVM: the fastest counts. What it shares is the same, whoever asks.
    let told = json(
        &["dedup", "place", "--tier", "nvm", "--wait"],
        &[&pool.mnt().join("images")],
    );
    assert_eq!(
        (&told["files"], &told["shared_bytes"], &told["set_shared_bytes"]),
        (&4.into(), &(4 * shared).into(), &shared.into())
    );
    assert_eq!(tiers(paths[1])["nvm"], shared);

    // An undo gives one of them blocks of its own, which the wish does not hold.
    run_ok(varve().args(["dedup", "undo"]).arg(paths[1]));
    let said = text_of(varve().arg("which-tier").arg(paths[1]));
    assert!(
        said.contains("where the policy puts it; pinned to nvm: shared part)"),
        "{said}"
    );
    run_ok(varve().args(["pin", "--wait", "--tier", "hdd"]).arg(paths[1]));
    assert_eq!(tiers(paths[1])["hdd"], 3 * own);
    assert_eq!(tiers(paths[0])["nvm"], shared);
    // Shared again, it follows.
    run_ok(varve().args(["dedup", "apply"]).arg(pool.mnt().join("images")));
    wait_until("the shared part to come back", || {
        tiers(paths[1])["nvm"] == shared
    });

    let said = text_of(varve().args(["dedup", "unplace"]).args(&paths));
    assert!(said.contains("not placed any more: what 4 files share"), "{said}");
    wait_until("the wishes to end", || {
        let said = text_of(varve().arg("which-tier").args(&paths));
        !said.contains("shared part")
    });
    for (path, body) in &images {
        assert!(std::fs::read(path).unwrap() == *body, "{}", path.display());
    }
    pool.down();
    pool.fsck_clean();
}

#[test]
fn wishes_that_cannot_be_are_refused_and_what_waits_says_why() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "64M", "--hdd", "0"]);
    let images = make_images(&pool);
    let image = &images[0].0;
    let place = ["dedup", "place", "--tier"];
    let said = refused(&[place[0], place[1], place[2], "hdd"], image);
    assert!(said.contains("has no hdd"), "{said}");
    let said = refused(
        &[place[0], place[1], place[2], "ssd"],
        &pool.mnt().join("missing"),
    );
    assert!(said.contains("cannot find"), "{said}");
    let said = refused(&["dedup", "unplace"], pool.outside());
    assert!(said.contains("is not in a mount of a pool"), "{said}");
    let fifo = pool.mnt().join("fifo");
    run_ok(std::process::Command::new("mkfifo").arg(&fifo));
    let said = refused(&["dedup", "unplace"], &fifo);
    assert!(said.contains("neither a file nor a directory"), "{said}");
    for words in [&["dedup", "place", "--tier", "tape"][..], &["dedup", "place"]] {
        let output = varve().args(words).arg(image).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
    let said = text_of(varve().args(["dedup", "place", "--tier", "ssd"]).arg({
        let alone = pool.mnt().join("alone");
        std::fs::write(&alone, b"nothing shared").unwrap();
        alone
    }));
    assert!(said.contains("1 of them share nothing yet"), "{said}");

    // The SSD is full of data that is pinned there: nothing is lost, and it says what it waits for.
    let filler = pool.mnt().join("filler");
    std::fs::create_dir(&filler).unwrap();
    run_ok(varve().args(["pin", "--tier", "ssd"]).arg(&filler));
    for number in 0..16 {
        std::fs::write(filler.join(number.to_string()), noise(100 + number, 4 * MIB)).unwrap();
        run_ok(varve().arg("digest").arg(pool.dir()));
    }
    let said = refused(&["dedup", "place", "--wait", "--tier", "ssd"], image);
    assert!(said.contains("waiting: ssd 9"), "{said}");
    let said = text_of(varve().arg("which-tier").arg(image));
    assert!(said.contains("pinned to ssd: shared part"), "{said}");
    assert!(said.contains("waiting: ssd 9"), "{said}");
    // It follows when there is room.
    for number in 0..8 {
        std::fs::remove_file(filler.join(number.to_string())).unwrap();
    }
    wait_until("room on the SSD", || tiers(image)["ssd"] == 2 * MIB as u64);
    for (path, body) in &images {
        assert!(std::fs::read(path).unwrap() == *body, "{}", path.display());
    }
    pool.down();
    pool.fsck_clean();
}
