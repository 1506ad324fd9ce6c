#![allow(clippy::unwrap_used)]
use super::{HostPool, TOML, create_pool, parse_uuid, uuid_text};
use crate::pool::{HostDaemon, PoolSpec};
use std::path::Path;
use varve_ipc::{Admin, ClientKind, Hello, PROTOCOL_VERSION, Request, Response};
use varve_store::{OpenOptions, Store};

/// Removes a pool's live directory at the end of the test, even of a failed one.
struct Live(HostPool);

impl Drop for Live {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.0.live());
    }
}

fn spec(nvm: &str) -> PoolSpec {
    PoolSpec::parse(Some(nvm), Some("16M"), Some("0")).unwrap()
}

fn hello() -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        kind: ClientKind::Linked,
        read_only: false,
        resume: None,
        held: Vec::new(),
    }
}

#[test]
fn uuid_text_is_read_back() {
    let uuid = *b"0123456789abcdef";
    assert_eq!(parse_uuid(&uuid_text(&uuid)), Some(uuid));
    assert_eq!(parse_uuid("no"), None);
    assert_eq!(parse_uuid(&"f".repeat(33)), None);
}

#[test]
fn pool_is_made_once_and_found_by_directory_or_file() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let made = Live(create_pool(&dir, &spec("16M")).unwrap());
    assert!(!made.0.live().exists(), "nothing is left in memory");
    for at in [dir.clone(), dir.join(TOML)] {
        let found = HostPool::find(&at).unwrap();
        assert_eq!((found.uuid(), found.spec()), (made.0.uuid(), made.0.spec()));
        assert_eq!(found.live(), made.0.live());
    }
    let again = create_pool(&dir, &spec("16M")).unwrap_err().to_string();
    assert!(again.contains("holds a pool already"), "{again}");
    let (store, report) = Store::open(made.0.devices_for_looking().unwrap(), OpenOptions::default()).unwrap();
    assert_eq!((store.pool_uuid(), report.inodes), (made.0.uuid(), 1));
    assert_eq!(store.check().unwrap(), []);
}

#[test]
fn pool_is_refused_with_a_reason_when_something_does_not_fit() {
    let temp = tempfile::tempdir().unwrap();
    let full = temp.path().join("full");
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("letter.txt"), "dear").unwrap();
    let error = create_pool(&full, &spec("16M")).unwrap_err().to_string();
    assert!(error.contains("letter.txt"), "{error}");
    let huge = temp.path().join("huge");
    let error = create_pool(&huge, &spec("100000T")).unwrap_err().to_string();
    assert!(error.contains("free"), "{error}");
    assert!(!huge.exists(), "nothing is left behind");
    let error = create_pool(&huge, &spec("shm:100000T")).unwrap_err().to_string();
    assert!(error.contains("--shm-size"), "{error}");
    assert!(!huge.exists());
    let device = temp.path().join("device");
    std::fs::write(&device, vec![7; 4 << 20]).unwrap();
    let spec = PoolSpec::parse(Some("16M"), device.to_str(), Some("0")).unwrap();
    let error = create_pool(&huge, &spec).unwrap_err().to_string();
    assert!(error.contains("not empty"), "{error}");
    assert_eq!(std::fs::read(&device).unwrap(), vec![7; 4 << 20]);
    assert!(
        HostPool::find(&huge)
            .unwrap_err()
            .to_string()
            .contains("no such pool")
    );
    assert!(
        HostPool::find(temp.path())
            .unwrap_err()
            .to_string()
            .contains("varve mkfs")
    );
}

#[test]
fn interrupted_mkfs_is_cleared_by_the_next() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path();
    std::fs::write(dir.join(super::TOML_NEW), "version").unwrap();
    std::fs::write(dir.join("nvm.img"), "part").unwrap();
    let _live = Live(create_pool(dir, &spec("16M")).unwrap());
    assert!(!dir.join(super::TOML_NEW).exists());
}

#[test]
fn settings_are_refused_by_name() {
    let at = Path::new("/tmp/varve.toml");
    let good = "version = 1\nuuid = \"00000000-0000-4000-8000-000000000000\"\n[tiers]\nnvm = \"1G\"\n";
    for (from, to, said) in [
        ("version = 1", "version = 2", "use a newer varve"),
        ("version = 1\n", "", "missing"),
        ("0000-4000", "x", "not a UUID"),
        ("\"1G\"", "\"much\"", "[tiers]"),
        ("[tiers]", "color = 1\n[tiers]", "color"),
        ("\"1G\"\n", "\"1G\"\n[daemon]\nlease_ms = 1\n", "lease_ms"),
    ] {
        let error = HostPool::parse(&good.replace(from, to), at)
            .unwrap_err()
            .to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn daemon_serves_once_and_leaves_nothing_in_memory() {
    let temp = tempfile::tempdir().unwrap();
    let pool = Live(create_pool(&temp.path().join("p"), &spec("16M")).unwrap());
    let daemon = HostDaemon::start(&pool.0).unwrap();
    let second = HostDaemon::start(&pool.0).err().unwrap().to_string();
    assert!(
        second.contains(&format!("pid {}", std::process::id())),
        "{second}"
    );
    let (link, welcome, fds) = varve_ipc::socket::connect(&pool.0.socket(), hello()).unwrap();
    assert!(fds.log.is_some() && fds.log_backing.is_some() && fds.page.is_some());
    assert!(welcome.privileged && fds.nvm.is_some());
    let Response::StatFs(stat) = varve_ipc::Link::call(&link, Request::StatFs).unwrap() else {
        panic!("statfs")
    };
    assert!(stat.blocks_free > 0);
    let status = varve_ipc::socket::admin(&pool.0.socket(), Admin::Status).unwrap();
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["sessions"].as_array().unwrap().len(), 1);
    assert!(status["host"]["live_directory"].is_string());
    let report = varve_ipc::socket::admin(&pool.0.socket(), Admin::Fsck).unwrap();
    assert!(report.contains("\"clean\":true"), "{report}");
    drop(link);
    daemon.stop().unwrap();
    assert!(!pool.0.live().exists() && !pool.0.socket().exists());
    HostDaemon::start(&pool.0).unwrap().stop().unwrap();
}

#[test]
fn memory_pool_outlives_its_daemon_and_says_so_when_its_memory_is_gone() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("p");
    let pool = Live(create_pool(&dir, &spec("shm:16M")).unwrap());
    HostDaemon::start(&pool.0).unwrap().stop().unwrap();
    let daemon = HostDaemon::start(&pool.0).unwrap();
    daemon.stop().unwrap();
    assert!(
        pool.0
            .recreate()
            .unwrap_err()
            .to_string()
            .contains("does not need")
    );
    std::fs::remove_dir_all(pool.0.live()).unwrap();
    let error = HostDaemon::start(&pool.0).err().unwrap().to_string();
    assert!(
        error.contains("--recreate") && error.contains("memory"),
        "{error}"
    );
    // Foreign files and settings stay.
    for name in ["preload-0123456789abcdef.so", "notes.txt"] {
        std::fs::write(dir.join(name), name).unwrap();
    }
    let toml = dir.join("varve.toml");
    let text = std::fs::read_to_string(&toml).unwrap();
    let uuid = text.lines().find(|line| line.starts_with("uuid")).unwrap();
    // The UUID in a comment is not the setting.
    std::fs::write(&toml, format!("# {uuid}\n{text}digest_percent = 42\n")).unwrap();
    let pool = Live(HostPool::find(&dir).unwrap());
    let again = Live(pool.0.recreate().unwrap());
    assert_ne!(again.0.uuid(), pool.0.uuid());
    for found in [&again.0, &HostPool::find(&dir).unwrap()] {
        assert_eq!(found.config().digest_percent, 42);
        assert_eq!(found.uuid(), again.0.uuid());
    }
    assert_eq!(
        std::fs::read_to_string(dir.join("notes.txt")).unwrap(),
        "notes.txt"
    );
    HostDaemon::start(&HostPool::find(&dir).unwrap())
        .unwrap()
        .stop()
        .unwrap();
}

#[test]
fn missing_image_is_named() {
    let temp = tempfile::tempdir().unwrap();
    let pool = Live(create_pool(&temp.path().join("p"), &spec("16M")).unwrap());
    std::fs::remove_file(pool.0.dir().join("ssd.img")).unwrap();
    let error = HostDaemon::start(&pool.0).err().unwrap().to_string();
    assert!(error.contains("ssd.img is not there"), "{error}");
}

/// A child that another thread starts has all descriptors of this process until it runs its program.
#[test]
fn pool_is_free_when_its_lock_goes_though_a_child_still_has_the_descriptor() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let made = Live(create_pool(&dir, &spec("16M")).unwrap());
    let lock = made.0.lock().unwrap();
    let childs = lock.file.try_clone().unwrap();
    assert!(made.0.lock().is_err());
    drop(lock);
    drop(made.0.lock().unwrap());
    drop(childs);
}

#[test]
fn persistent_memory_that_is_none_is_refused_with_the_commands_and_nothing_is_left() {
    let temp = tempfile::tempdir().unwrap();
    if varve_media::dax::is_dax_dir(temp.path()) {
        eprintln!("SKIPPED: the directory for temporary files is on persistent memory");
        return;
    }
    let dir = temp.path().join("pool");
    for (nvm, said) in [
        ("dax:16M", "ndctl create-namespace -m fsdax"),
        ("dax:/dev/null", "ndctl create-namespace -m devdax"),
        ("dax:/dev/not-there", "not-there"),
    ] {
        let error = create_pool(&dir, &spec(nvm)).unwrap_err().to_string();
        assert!(error.contains(said), "{nvm}: {error}");
        assert!(!dir.exists(), "{nvm}");
    }
    // A plain size stays a file here.
    let mut plain = spec("16M");
    assert_eq!(plain.choose_nvm(&dir), None);
    assert_eq!(plain, spec("16M"));
}

#[test]
fn log_of_a_device_fits_its_slot() {
    let config = crate::Config::default();
    let fitted = crate::pool::live::fit_slot(config.clone(), 1 << 30, 6 << 20);
    assert_eq!(
        (fitted.log_initial_bytes, fitted.log_limit(1 << 30)),
        (4 << 20, 6 << 20)
    );
    fitted.validate().unwrap();
    let roomy = crate::pool::live::fit_slot(config.clone(), 64 << 20, 64 << 20);
    assert_eq!(roomy.log_max_bytes, config.log_max_bytes);
}
