//! Media of a whole pool: models of slower ones, tiers far larger than the host, and what the background
//! makes durable by itself.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Pool, cannot_mount, text_of, varve};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Writes settings of the daemon into a pool's `varve.toml`.
fn set(pool: &Path, lines: &str) {
    let path = pool.join("varve.toml");
    let mut table: toml::Table = toml::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let settings: toml::Table = toml::from_str(lines).unwrap();
    let daemon = table.entry("daemon").or_insert_with(|| toml::Table::new().into());
    daemon.as_table_mut().unwrap().extend(settings);
    std::fs::write(&path, toml::to_string(&table).unwrap()).unwrap();
}

fn status(pool: &Pool) -> String {
    text_of(varve().arg("status").arg(pool.dir()))
}

#[test]
fn emulated_media_are_named_and_keep_what_they_are_given() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "32M", "--ssd", "32M", "--hdd", "64M"]);
    assert!(!status(&pool).contains("emulated"));
    pool.down();
    set(&pool.dir(), "emulate = ['nvm', 'ssd', 'hdd']");
    pool.start();
    let text = status(&pool);
    for model in [
        "emulated nvm (240 ns a read, 100 ns a barrier",
        "emulated ssd (80 µs a read, 20 µs a write",
        "emulated hdd (100 µs a read, 100 µs a write, 8000 µs a flush, seeks of 5000 to 16000 µs",
    ] {
        assert!(text.contains(model), "{text}");
    }
    // More than fits NVM: all three are written, and read.
    let bytes = |n: u8| {
        (0..6 << 20)
            .map(|at: u32| at.to_le_bytes()[1] ^ n)
            .collect::<Vec<u8>>()
    };
    for n in 0..8 {
        std::fs::write(pool.mnt().join(format!("f{n}")), bytes(n)).unwrap();
    }
    pool.down();
    pool.start();
    for n in 0..8 {
        assert!(
            std::fs::read(pool.mnt().join(format!("f{n}"))).unwrap() == bytes(n),
            "file {n}"
        );
    }
    pool.down();
    pool.fsck_clean();
    // A tier that there is not is no tier to slow down.
    set(&pool.dir(), "emulate = ['tape']");
    let refused = varve().arg("serve").arg(pool.dir()).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && said.contains("tape") && said.contains("nvm"),
        "{said}"
    );
}

#[test]
fn tiers_of_terabytes_take_what_is_written_and_no_more() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "512M", "--ssd", "1T", "--hdd", "4T"]);
    let on_host = |name: &str| {
        let meta = std::fs::metadata(pool.dir().join(name)).unwrap();
        (meta.len(), meta.blocks() * 512)
    };
    assert_eq!((on_host("ssd.img").0, on_host("hdd.img").0), (1 << 40, 4 << 40));
    let data: Vec<u8> = (0..8 << 20).map(|at: u32| at.to_le_bytes()[2]).collect();
    std::fs::write(pool.mnt().join("file"), &data).unwrap();
    // A hole of terabytes with something at its end.
    let far = std::fs::File::options()
        .write(true)
        .create_new(true)
        .open(pool.mnt().join("far"))
        .unwrap();
    std::os::unix::fs::FileExt::write_all_at(&far, b"end", 3 << 40).unwrap();
    far.sync_all().unwrap();
    drop(far);
    pool.down();
    pool.fsck_clean();
    let taken =
        ["ssd.img", "hdd.img"].map(|name| std::fs::metadata(pool.dir().join(name)).unwrap().blocks() * 512);
    assert!(taken.iter().sum::<u64>() < 1 << 30, "{taken:?}");
    pool.start();
    assert!(std::fs::read(pool.mnt().join("file")).unwrap() == data);
    let far = std::fs::File::open(pool.mnt().join("far")).unwrap();
    assert_eq!(far.metadata().unwrap().len(), (3 << 40) + 3);
    let mut end = [0; 4];
    let n = std::os::unix::fs::FileExt::read_at(&far, &mut end, (3 << 40) - 1).unwrap();
    assert_eq!((n, &end), (4, b"\0end"));
    drop(far);
    // What the pool says that it has is no more than the host can still hold.
    let space = rustix::fs::statvfs(pool.mnt()).unwrap();
    let host = rustix::fs::statvfs(pool.dir()).unwrap();
    assert!(space.f_bavail * space.f_frsize <= host.f_bavail * host.f_frsize + (1 << 30));
    pool.down();
}

#[test]
fn what_nobody_synced_is_durable_after_sync_ms() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "0", "--hdd", "0"]);
    pool.down();
    // Nothing but the background's sync makes it durable: no digest comes in between.
    set(
        &pool.dir(),
        "sync_ms = 300\nidle_digest_ms = 60000\ndigest_percent = 90",
    );
    pool.start();
    let mut file = std::fs::File::create(pool.mnt().join("file")).unwrap();
    file.write_all(b"not synced").unwrap();
    let written = Instant::now();
    // Ten times as long, as the machine may be busy.
    while written.elapsed() < Duration::from_secs(3) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let live = pool.live_dirs();
    pool.kill_all();
    drop(file);
    // The power cut.
    live.iter().for_each(|dir| std::fs::remove_dir_all(dir).unwrap());
    pool.start();
    assert_eq!(std::fs::read(pool.mnt().join("file")).unwrap(), b"not synced");
    pool.down();
    pool.fsck_clean();
}
