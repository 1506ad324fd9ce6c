//! The `spdk:` backend over an installed SPDK: block devices in memory and over files, on ordinary pages. A
//! controller is for the test machine (`tests/vm/devices`). Skips loudly where there is no library.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use varve_media::block::spdk::{VARIABLE, find};
use varve_media::block::{BlockOptions, DeviceSpec, open};
use varve_media::{BlockDevice, DeviceState, MediaError};

/// The library is one for the process.
static ONE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

fn is_installed() -> bool {
    match find() {
        Ok(found) => {
            println!("{} in {}", found.version, found.dirs[0].display());
            true
        }
        Err(error) => {
            println!("SKIPPED: {error} ({VARIABLE})");
            false
        }
    }
}

fn try_open(text: &str) -> Result<Arc<dyn BlockDevice>, MediaError> {
    let spec = DeviceSpec::parse(text).unwrap().unwrap();
    Ok(open(&spec, BlockOptions::default())?.device)
}

/// A configuration with block devices of 64 MiB, in memory or over files of `dir`.
fn config(dir: &Path, entries: &[(&str, &str)]) -> String {
    let entries: Vec<String> = entries
        .iter()
        .map(|(method, params)| format!(r#"{{"method":"{method}","params":{{{params}}}}}"#))
        .collect();
    let json = format!(
        r#"{{"subsystems":[{{"subsystem":"bdev","config":[{}]}}]}}"#,
        entries.join(",")
    );
    let path = dir.join("spdk.json");
    fs::write(&path, json).unwrap();
    format!("spdk:{}", path.display())
}

fn memory(dir: &Path, sector: u32) -> String {
    let blocks = (64 << 20) / sector;
    let params = format!(r#""name":"Malloc0","num_blocks":{blocks},"block_size":{sector}"#);
    config(dir, &[("bdev_malloc_create", &params)])
}

fn over_file(dir: &Path) -> String {
    let file = dir.join("disk");
    if !file.exists() {
        fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    }
    let params = format!(
        r#""name":"Aio0","filename":"{}","block_size":4096"#,
        file.display()
    );
    config(dir, &[("bdev_aio_create", &params)])
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at * 7 + at / 4096 * 13 + seed * 31) as u8)
        .collect()
}

#[test]
fn device_in_memory_reads_back_what_it_wrote() {
    let _one = ONE.lock();
    if !is_installed() {
        return;
    }
    for sector in [512, 4096] {
        let dir = tempfile::tempdir().unwrap();
        let device = try_open(&memory(dir.path(), sector)).unwrap();
        println!("{}", device.info());
        assert_eq!(device.len_bytes(), 64 << 20);
        let data = pattern(9 << 20, 1);
        device.write(4096, &data).unwrap();
        device.flush().unwrap();
        let mut back = vec![0; 5 << 20];
        device.read(4096 + 777, &mut back).unwrap();
        assert!(back == data[777..777 + (5 << 20)]);
        device.trim(4096, 4096).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..3u64 {
                let device = &device;
                scope.spawn(move || {
                    for round in 0..100 {
                        let off = ((16 + thread * 16) << 20) + round * (64 << 10);
                        let data = pattern(64 << 10, (thread * 1000 + round) as usize);
                        device.write(off, &data).unwrap();
                        let mut back = vec![0; data.len()];
                        device.read(off, &mut back).unwrap();
                        assert!(back == data, "thread {thread}, round {round}");
                    }
                });
            }
        });
        assert_eq!(device.state(), DeviceState::Ok);
    }
}

#[test]
fn device_over_a_file_keeps_its_bytes_over_restarts_of_the_library() {
    let _one = ONE.lock();
    if !is_installed() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let text = over_file(dir.path());
    for round in 0..3u64 {
        let device = try_open(&text).unwrap();
        if round > 0 {
            let mut back = vec![0; 1 << 20];
            device.read((round - 1) << 20, &mut back).unwrap();
            assert!(back == pattern(1 << 20, round as usize - 1), "round {round}");
        }
        let data = pattern(1 << 20, round as usize);
        device.write(round << 20, &data).unwrap();
        device.write_durable(round << 20, &data[..4096]).unwrap();
        drop(device);
        let bytes = fs::read(dir.path().join("disk")).unwrap();
        let at = (round << 20) as usize;
        assert!(bytes[at..at + (1 << 20)] == data, "round {round}");
    }
}

#[test]
fn two_devices_share_the_library() {
    let _one = ONE.lock();
    if !is_installed() {
        return;
    }
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = try_open(&format!("{}#Malloc0", memory(dir.path(), 512))).unwrap();
    let second = try_open(&format!("{}#Aio0", over_file(other.path()))).unwrap();
    // The same configuration is carried out once; its device is open already.
    let error = try_open(&format!("{}#Malloc0", memory(dir.path(), 512)))
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(error.contains("is in use in this process"), "{error}");
    first.write(0, &[1; 4096]).unwrap();
    second.write(0, &[2; 4096]).unwrap();
    drop(first);
    let mut back = [0; 4096];
    second.read(0, &mut back).unwrap();
    assert_eq!(back, [2; 4096]);
}

#[test]
fn what_is_wrong_is_said_with_what_the_library_says() {
    let _one = ONE.lock();
    if !is_installed() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let refusal = |text: &str| {
        let error = try_open(text).map(|_| ()).unwrap_err().to_string();
        println!("refused: {error}");
        error
    };
    assert!(refusal("spdk:/nowhere/spdk.json").contains("cannot read /nowhere/spdk.json"));
    let name = config(dir.path(), &[("bdev_nowhere_create", "")]);
    assert!(refusal(&name).contains("bdev_nowhere_create"));
    let absent = format!("{}#Malloc7", memory(dir.path(), 512));
    assert!(refusal(&absent).contains("there are: Malloc0"));
    fs::write(dir.path().join("spdk.json"), "{ not json").unwrap();
    assert!(refusal(&format!("spdk:{}/spdk.json", dir.path().display())).contains("no JSON"));
    let several = config(
        dir.path(),
        &[
            (
                "bdev_malloc_create",
                r#""name":"A","num_blocks":8192,"block_size":512"#,
            ),
            (
                "bdev_malloc_create",
                r#""name":"B","num_blocks":8192,"block_size":512"#,
            ),
        ],
    );
    assert!(refusal(&several).contains("add #NAME"));
    let metadata = config(
        dir.path(),
        &[(
            "bdev_malloc_create",
            r#""name":"M","num_blocks":8192,"block_size":512,"md_size":8"#,
        )],
    );
    assert!(refusal(&metadata).contains("metadata"));
    // A controller that is not there; nothing is started for it.
    assert!(refusal("spdk:ffff:ff:1f.7").contains("no such PCI function"));
    // After all of these the library still works.
    try_open(&memory(dir.path(), 4096))
        .unwrap()
        .write(0, &[1; 4096])
        .unwrap();
}

/// Processor time of the library's thread, in clock ticks.
fn ticks() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let stats = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
    let mut of_thread = stats.filter(|stat| stat.contains("(spdk)"));
    let stat = of_thread.next().unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// The handler of SIGBUS, and whether SIGTERM has one.
fn handlers() -> (usize, usize) {
    let of = |signal| {
        // SAFETY: only asks; all-zero bytes are a valid `sigaction`.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &raw mut action);
            action.sa_sigaction
        }
    };
    (of(libc::SIGBUS), of(libc::SIGTERM))
}

#[test]
fn idle_library_costs_next_to_nothing_and_changes_no_handler() {
    let _one = ONE.lock();
    if !is_installed() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // Loaded once by now, whichever test was first: the handler of this crate is there.
    drop(try_open(&memory(dir.path(), 4096)).unwrap());
    let before = handlers();
    let device = try_open(&memory(dir.path(), 4096)).unwrap();
    assert_eq!(handlers(), before);
    device.write(0, &[1; 4096]).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let begun = ticks();
    let seconds = 4;
    std::thread::sleep(Duration::from_secs(seconds));
    let used = (ticks() - begun) as f64;
    // 100 ticks a second.
    let percent = used / seconds as f64;
    println!("idle: {used} ticks of 10 ms in {seconds} s: {percent} % of a processor");
    // A bound for any machine; docs/results/devices.md has what was measured.
    assert!(percent < 10.0, "{percent} %");
}
