//! A pool of each format version as it was written once and is kept: it must open, list, check and print the
//! same for ever.
//!
//! `VARVE_MAKE_FIXTURE=1 cargo test --test fixture` makes that of the present version anew (only when the
//! format changes, see docs/reference/format.md); it needs a mount.
#![allow(clippy::unwrap_used)]

mod common;

use common::{LiveDirs, Pool, run_ok, text_of, varve};
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use varve_format::superblock::FORMAT_VERSION;
use varve_ipc::{ClientKind, Cred};
use varve_kernelfs::pool::{HostDaemon, HostPool};
use varve_libfs::{Fs, FsOptions, Posix, SocketConnector};
use varve_store::{OpenOptions, Store};

/// Two copies of one pool have one live directory: a test has them for itself.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Files of the pool, in the order of the archive.
const FILES: [&str; 4] = ["varve.toml", "nvm.img", "journal.img", "ssd.img"];

fn archive(version: u32) -> PathBuf {
    fixture(&format!("pool-v{version}.rle"))
}

fn printed(version: u32) -> PathBuf {
    fixture(&format!("pool-v{version}.json"))
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// Bytes of a run that is worth a token of its own.
const RUN: usize = 24;

/// An archive: for each file name length (2), name, bytes (8); then tokens until all bytes are there: length
/// (4), with the top bit set one byte that is repeated so often, else the bytes themselves. Little-endian.
fn pack(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, bytes) in files {
        out.extend((name.len() as u16).to_le_bytes());
        out.extend(name.as_bytes());
        out.extend((bytes.len() as u64).to_le_bytes());
        let (mut at, mut plain) = (0, 0);
        let flush = |out: &mut Vec<u8>, from: usize, to: usize| {
            if from < to {
                out.extend(((to - from) as u32).to_le_bytes());
                out.extend(&bytes[from..to]);
            }
        };
        while at < bytes.len() {
            let len = bytes[at..].iter().take_while(|byte| **byte == bytes[at]).count();
            if len >= RUN {
                flush(&mut out, plain, at);
                out.extend((len as u32 | 1 << 31).to_le_bytes());
                out.push(bytes[at]);
                plain = at + len;
            }
            at += len;
        }
        flush(&mut out, plain, bytes.len());
    }
    out
}

fn unpack(archive: &[u8], dir: &Path) {
    let mut rest = archive;
    let mut take = |count: usize| {
        let (head, tail) = rest.split_at(count);
        rest = tail;
        head.to_vec()
    };
    let mut left = archive.len();
    while left > 0 {
        let name = u16::from_le_bytes(take(2).try_into().unwrap());
        let name = String::from_utf8(take(name.into())).unwrap();
        let len = u64::from_le_bytes(take(8).try_into().unwrap());
        left -= 10 + name.len();
        let path = dir.join(&name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
        let mut done = 0;
        while done < len {
            let token = u32::from_le_bytes(take(4).try_into().unwrap());
            let count = (token & !(1 << 31)) as usize;
            if token >> 31 == 1 {
                let byte = take(1)[0];
                left -= 5;
                file.write_all(&vec![byte; count]).unwrap();
            } else {
                file.write_all(&take(count)).unwrap();
                left -= 4 + count;
            }
            done += count as u64;
        }
        assert_eq!(done, len, "{name}");
        file.flush().unwrap();
    }
}

/// What `debug` prints of it, by command.
fn debug_all(dir: &Path) -> Value {
    let json = |words: &[&str], more: &[&str]| -> Value {
        let text = text_of(varve().arg("debug").args(words).arg("--json").arg(dir).args(more));
        serde_json::from_str(&text).unwrap()
    };
    let list = json(&["dir"], &["1"]);
    let ino = |name: &str| {
        let entries = list["entries"].as_array().or(list.as_array()).unwrap();
        let entry = entries.iter().find(|entry| entry["name"] == name).unwrap();
        entry["ino"]
            .as_u64()
            .or(entry["inode"].as_u64())
            .unwrap()
            .to_string()
    };
    // The roots in words are those of a Rust type, which may change.
    let inode = |name: &str| {
        let mut inode = json(&["inode"], &[&ino(name)]);
        inode.as_object_mut().unwrap().remove("content");
        inode
    };
    let mut log = json(&["log"], &[]);
    // Paths of the copy at hand.
    strip(&mut log, &dir.display().to_string());
    serde_json::json!({
        "super": json(&["super"], &[]),
        "log": log,
        "dir": list,
        "inode file": inode("file"),
        "inode link": inode("link"),
        "tree file": json(&["tree"], &[&ino("file")]),
        "tree holes": json(&["tree"], &[&ino("holes")]),
        "dir many": json(&["dir"], &[&ino("many")]),
    })
}

/// Takes a directory's path out of all texts.
fn strip(value: &mut Value, path: &str) {
    match value {
        Value::String(text) => *text = text.replace(path, "POOL"),
        Value::Array(items) => items.iter_mut().for_each(|item| strip(item, path)),
        Value::Object(fields) => fields.values_mut().for_each(|field| strip(field, path)),
        _ => {}
    }
}

/// Names in the directory `many`: a newer pool holds some of its metadata twice, and is to be no larger.
const fn names(version: u32) -> u32 {
    if version == 1 { 300 } else { 200 }
}

fn fill(mnt: &Path) {
    std::fs::create_dir(mnt.join("many")).unwrap();
    for number in 0..names(FORMAT_VERSION) {
        std::fs::write(
            mnt.join(format!("many/name-{number:03}")),
            format!("body {number}"),
        )
        .unwrap();
    }
    std::fs::write(mnt.join("file"), vec![b'v'; 3 << 20]).unwrap();
    std::fs::write(mnt.join("file2"), vec![b'w'; 3 << 20]).unwrap();
    let holes = std::fs::File::create(mnt.join("holes")).unwrap();
    for number in 0..200 {
        std::os::unix::fs::FileExt::write_all_at(&holes, b"island", number * 8192).unwrap();
    }
    holes.sync_all().unwrap();
    std::os::unix::fs::symlink("l".repeat(300), mnt.join("link")).unwrap();
    std::fs::hard_link(mnt.join("file"), mnt.join("second")).unwrap();
    rustix::fs::setxattr(
        mnt.join("file"),
        "user.long",
        &[b'a'; 5000],
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
}

/// Sends all metadata of a stopped pool to its slower tier.
fn cool(dir: &Path) {
    let host = HostPool::find(dir).unwrap();
    let _lock = host.lock().unwrap();
    let (store, _) = Store::open(host.devices().unwrap(), OpenOptions::default()).unwrap();
    assert!(store.demote(u64::MAX).unwrap() > 20);
    store.checkpoint().unwrap();
}

/// Makes the fixture of the present version.
fn make() {
    let mut pool = Pool::up(&["--nvm", "8M", "--ssd", "8M", "--hdd", "0"]);
    fill(&pool.mnt());
    run_ok(varve().arg("digest").arg(pool.dir()));
    pool.down();
    cool(&pool.dir());
    pool.start();
    // What stays in the log, on disk.
    for number in 0..5 {
        let mut file = std::fs::File::create(pool.mnt().join(format!("logged-{number}"))).unwrap();
        file.write_all(format!("in the log {number}").as_bytes()).unwrap();
        file.sync_all().unwrap();
    }
    std::fs::rename(pool.mnt().join("file2"), pool.mnt().join("renamed")).unwrap();
    std::fs::File::open(pool.mnt().join("renamed"))
        .unwrap()
        .sync_all()
        .unwrap();
    let live = pool.live_dirs();
    pool.kill_all();
    run_ok(varve().args(["umount", "--force"]).arg(pool.mnt()));
    for dir in live {
        std::fs::remove_dir_all(dir).unwrap();
    }
    let mut names: Vec<String> = FILES.iter().map(|name| (*name).to_owned()).collect();
    for entry in std::fs::read_dir(pool.dir().join("logs")).unwrap() {
        names.push(format!("logs/{}", entry.unwrap().file_name().to_str().unwrap()));
    }
    let files: Vec<_> = names
        .into_iter()
        .map(|name| {
            let bytes = std::fs::read(pool.dir().join(&name)).unwrap();
            (name, bytes)
        })
        .collect();
    let packed = pack(&files);
    println!("{} bytes", packed.len());
    std::fs::write(archive(FORMAT_VERSION), packed).unwrap();
    std::fs::write(printed(FORMAT_VERSION), format!("{}\n", debug_all(&pool.dir()))).unwrap();
}

#[test]
fn pool_of_version_1_opens_lists_checks_and_prints_as_it_did() {
    opens_lists_checks_and_prints_as_it_did(1);
}

#[test]
fn pool_of_version_2_opens_lists_checks_and_prints_as_it_did() {
    opens_lists_checks_and_prints_as_it_did(2);
}

#[test]
fn pool_of_version_3_opens_lists_checks_and_prints_as_it_did() {
    if std::env::var_os("VARVE_MAKE_FIXTURE").is_some() {
        make();
    }
    opens_lists_checks_and_prints_as_it_did(3);
}

/// Files of the pool with several devices.
const DEVICE_FILES: [&str; 5] = ["varve.toml", "nvm.img", "journal.img", "ssd.img", "ssd-2.img"];

/// Makes the fixture of a pool with a second SSD.
fn make_devices() {
    let mut pool = Pool::up(&["--nvm", "8M", "--ssd", "8M", "--ssd", "8M", "--hdd", "0"]);
    for number in 0..4_u8 {
        std::fs::write(
            pool.mnt().join(format!("f{number}")),
            vec![b'a' + number; 1 << 20],
        )
        .unwrap();
    }
    run_ok(varve().args(["pin", "--wait", "--tier", "ssd"]).arg(pool.mnt()));
    pool.down();
    let read = |name: &&str| ((*name).to_owned(), std::fs::read(pool.dir().join(name)).unwrap());
    let packed = pack(&DEVICE_FILES.iter().map(read).collect::<Vec<_>>());
    println!("{} bytes", packed.len());
    std::fs::write(fixture("pool-devices.rle"), packed).unwrap();
}

#[test]
fn pool_of_several_devices_opens_as_it_did() {
    let _alone = alone();
    if std::env::var_os("VARVE_MAKE_FIXTURE").is_some() {
        make_devices();
    }
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let _live = LiveDirs::of(&dir);
    let packed = std::fs::read(fixture("pool-devices.rle")).unwrap();
    assert!(packed.len() <= 200 << 10, "{} bytes", packed.len());
    unpack(&packed, &dir);
    let mut label = vec![0; 88];
    let second = std::fs::File::open(dir.join("ssd-2.img")).unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&second, &mut label, 0).unwrap();
    // Magic; tier; first number, blocks, unit and data offset.
    assert_eq!((&label[..8], label[40]), (&b"VARVEDEV"[..], 1));
    let word = |at: usize| u64::from_le_bytes(label[at..at + 8].try_into().unwrap());
    assert_eq!([48, 56, 64, 72].map(word), [2048, 1920, 128, 128 * 4096]);
    assert!(text_of(varve().arg("fsck").arg(&dir)).contains("clean"));
    let host = HostPool::find(&dir).unwrap();
    let (store, _) = Store::open(host.devices().unwrap(), OpenOptions::default()).unwrap();
    let devices = store.device_list().unwrap();
    assert_eq!(devices.len(), 2);
    assert!(devices.iter().all(|device| device.used() > 256), "{devices:?}");
    assert_eq!(devices[1].uuid.unwrap()[..], label[24..40]);
    for number in 0..4_u8 {
        let name = format!("f{number}");
        let item = store.dir_lookup(varve_format::ROOT_INO, name.as_bytes()).unwrap();
        let mut bytes = vec![0; 1 << 20];
        store.read(item.unwrap().key.ino, 0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == b'a' + number));
    }
    assert_eq!(store.check().unwrap(), []);
    assert_eq!(store.check_data().unwrap(), []);
}

/// With a log that waits.
#[test]
fn older_pools_are_upgraded_with_all_that_is_in_them() {
    let _alone = alone();
    for version in 1..FORMAT_VERSION {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("pool");
        let _live = LiveDirs::of(&dir);
        unpack(&std::fs::read(archive(version)).unwrap(), &dir);
        let upgrade = |words: &[&str]| text_of(varve().arg("upgrade").args(words).arg(&dir));
        let nvm = std::fs::read(dir.join("nvm.img")).unwrap();
        let said = upgrade(&["--check"]);
        assert!(
            said.contains(&format!("format version {version}; `varve upgrade")),
            "{said}"
        );
        assert!(
            std::fs::read(dir.join("nvm.img")).unwrap() == nvm,
            "--check changed the pool"
        );
        let done: Value = serde_json::from_str(&upgrade(&["--json"])).unwrap();
        assert_eq!(
            (&done["found_version"], &done["version"]),
            (&version.into(), &FORMAT_VERSION.into())
        );
        let after = std::fs::read(dir.join("nvm.img")).unwrap();
        assert!(
            after[8192..] == nvm[8192..],
            "more than the superblocks was changed"
        );
        assert!(upgrade(&[]).contains("nothing to do"));
        let printed: Value =
            serde_json::from_str(&text_of(varve().args(["debug", "super", "--json"]).arg(&dir))).unwrap();
        assert_eq!(printed["copies"][1]["features"], serde_json::json!([]));
        serves_what_it_held(&dir, version);
        // What was in the log is digested now, and the pool whole.
        let fsck = text_of(varve().arg("fsck").arg(&dir));
        assert!(fsck.contains("clean"), "{fsck}");
    }
}

#[test]
fn upgrade_refuses_a_pool_that_is_served() {
    let pool = Pool::up(&["--nvm", "8M", "--ssd", "0", "--hdd", "0"]);
    let output = varve().arg("upgrade").arg(pool.dir()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("varve down"), "{said}");
}

fn opens_lists_checks_and_prints_as_it_did(version: u32) {
    let _alone = alone();
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let _live = LiveDirs::of(&dir);
    let packed = std::fs::read(archive(version)).unwrap();
    assert!(packed.len() <= 200 << 10, "{} bytes", packed.len());
    unpack(&packed, &dir);
    let expected: Value = serde_json::from_str(&std::fs::read_to_string(printed(version)).unwrap()).unwrap();
    let now = debug_all(&dir);
    for (command, printed) in expected.as_object().unwrap() {
        assert_eq!(now[command], *printed, "debug {command}");
    }
    let fsck = text_of(varve().arg("fsck").arg(&dir));
    assert!(fsck.contains("clean") && fsck.contains("1 logs wait"), "{fsck}");
    // Every debug command has a text too.
    for words in [&["super"][..], &["log"]] {
        assert!(!text_of(varve().arg("debug").args(words).arg(&dir)).is_empty());
    }
    serves_what_it_held(&dir, version);
    run_ok(varve().arg("fsck").arg(&dir));
}

fn serves_what_it_held(dir: &Path, version: u32) {
    let host = HostPool::find(dir).unwrap();
    let daemon = HostDaemon::start(&host).unwrap();
    let options = FsOptions {
        kind: ClientKind::Linked,
        ..FsOptions::default()
    };
    let connector = Arc::new(SocketConnector { path: host.socket() });
    let posix = Posix::new(Fs::mount(connector, options).unwrap(), Cred::root());
    let read = |path: &str| {
        let fd = posix.open(path.as_bytes(), libc::O_RDONLY, 0).unwrap();
        let mut bytes = vec![0; posix.fstat(fd).unwrap().size_bytes as usize];
        let mut done = 0;
        while done < bytes.len() {
            let n = posix.pread(fd, &mut bytes[done..], done as u64).unwrap();
            assert!(n > 0, "{path} ends at {done}");
            done += n;
        }
        posix.close(fd).unwrap();
        bytes
    };
    for number in 0..names(version) {
        assert_eq!(
            read(&format!("/many/name-{number:03}")),
            format!("body {number}").as_bytes()
        );
    }
    assert!(read("/second") == vec![b'v'; 3 << 20]);
    assert!(read("/renamed") == vec![b'w'; 3 << 20]);
    let holes = read("/holes");
    assert!(holes[8192..8198] == *b"island" && holes[10_000..16_384].iter().all(|byte| *byte == 0));
    for number in 0..5 {
        assert_eq!(
            read(&format!("/logged-{number}")),
            format!("in the log {number}").as_bytes()
        );
    }
    assert_eq!(posix.readlink(b"/link").unwrap(), [b'l'; 300]);
    assert_eq!(posix.getxattr(b"/file", b"user.long").unwrap(), vec![b'a'; 5000]);
    assert_eq!(posix.stat(b"/file").unwrap().nlink, 2);
    posix.fs().unmount().unwrap();
    drop(posix);
    daemon.stop().unwrap();
}

#[test]
fn archive_gives_back_what_was_packed() {
    let temp = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = [
        vec![0; 5000],
        (0..=255).collect(),
        vec![7; 23],
        vec![8; 24],
        vec![1],
    ]
    .concat();
    let files = vec![("a".to_owned(), bytes.clone()), ("b/c".to_owned(), Vec::new())];
    let packed = pack(&files);
    assert!(packed.len() < 600);
    unpack(&packed, temp.path());
    assert_eq!(std::fs::read(temp.path().join("a")).unwrap(), bytes);
    assert!(std::fs::read(temp.path().join("b/c")).unwrap().is_empty());
}
