//! The ways to an NVMe device on hardware that is there: controllers of the test machine
//! (`tests/vm/devices`), told apart by their serial numbers. Skips loudly anywhere else.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use varve_media::block::nvme::Places;
use varve_media::block::{BlockOptions, DeviceSpec, PciAddress, open};
use varve_media::{BlockDevice, DeviceState};

/// Controllers are taken and given back: one test at a time.
static ONE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

struct Controller {
    address: PciAddress,
}

/// The controller with a serial number, or a word that there is none.
fn controller(serial: &str) -> Option<Controller> {
    if std::env::var_os("VARVE_VM_GUEST").is_none() {
        println!("SKIPPED: needs the test machine; run tests/vm/devices");
        return None;
    }
    let found = fs::read_dir("/sys/class/nvme")
        .into_iter()
        .flatten()
        .flatten()
        .find_map(|entry| {
            let dir = entry.path();
            let its = fs::read_to_string(dir.join("serial")).ok()?;
            let address = fs::read_to_string(dir.join("address")).ok()?;
            (its.trim() == serial).then(|| Controller {
                address: PciAddress::parse(address.trim()).unwrap(),
            })
        });
    if found.is_none() {
        println!("SKIPPED: no controller with the serial number {serial}; run tests/vm/devices");
    }
    found
}

/// The ways that take a controller from the kernel; with SPDK where that is installed.
fn takers() -> Vec<&'static str> {
    match varve_media::block::spdk::find() {
        Ok(_) => vec!["nvme", "spdk"],
        Err(error) => {
            println!("SKIPPED: by spdk: {error}");
            vec!["nvme"]
        }
    }
}

/// All ways.
fn ways() -> Vec<&'static str> {
    let mut ways = takers();
    ways.extend(["ng", "uring"]);
    ways
}

impl Controller {
    fn spec(&self, way: &str) -> DeviceSpec {
        let text = match way {
            "nvme" | "spdk" => format!("{way}:{}", self.address),
            "ng" => format!("ng:/dev/{}", self.node().replace("nvme", "ng")),
            way => format!("{way}:/dev/{}", self.node()),
        };
        DeviceSpec::parse(&text).unwrap().unwrap()
    }

    fn open(&self, way: &str) -> Arc<dyn BlockDevice> {
        open(&self.spec(way), BlockOptions::default()).unwrap().device
    }

    fn refusal(&self, way: &str) -> String {
        let refused = open(&self.spec(way), BlockOptions::default())
            .map(|_| ())
            .unwrap_err();
        println!("refused: {refused}");
        refused.to_string()
    }

    /// `nvme0n1`, if the kernel has it.
    fn find_node(&self) -> Option<String> {
        let node = Places::default().namespaces(self.address).into_iter().next()?;
        Path::new("/dev").join(&node).exists().then_some(node)
    }

    fn node(&self) -> String {
        self.find_node().unwrap()
    }

    /// The kernel has it again, with its nodes.
    fn assert_given_back(&self) {
        assert_eq!(Places::default().driver(self.address).as_deref(), Some("nvme"));
        wait_for("its node", || self.find_node().is_some());
    }
}

fn wait_for(what: &str, mut there: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !there() {
        assert!(begun.elapsed() < Duration::from_secs(60), "waited for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at * 7 + at / 4096 * 13 + seed * 31) as u8)
        .collect()
}

#[test]
fn each_way_sees_what_the_others_wrote() {
    let _one = ONE.lock();
    for serial in ["varve", "varve4k"] {
        let Some(controller) = controller(serial) else {
            return;
        };
        let mut written: Vec<(u64, Vec<u8>)> = Vec::new();
        let mut order = vec!["uring", "ng", "nvme", "ng", "nvme", "uring"];
        if takers().contains(&"spdk") {
            order.extend(["spdk", "nvme", "spdk", "uring"]);
        }
        for (round, way) in order.into_iter().enumerate() {
            let device = controller.open(way);
            println!("{serial} by {way}: {}", device.info());
            for (off, data) in &written {
                let mut back = vec![0; data.len()];
                device.read(*off, &mut back).unwrap();
                assert!(back == *data, "{serial}: {way} reads other bytes at {off}");
                let mut odd = vec![0; 5001];
                device.read(off + 4095, &mut odd).unwrap();
                assert!(odd == data[4095..4095 + 5001], "{serial}: {way}, unaligned");
            }
            let off = round as u64 * (2 << 20);
            let data = pattern(1 << 20, round);
            device.write(off, &data).unwrap();
            let parts: Vec<(u64, &[u8])> = data
                .chunks(4096)
                .enumerate()
                .map(|(at, part)| (off + (1 << 20) + at as u64 * 4096, part))
                .collect();
            device.write_batch(&parts[..100]).unwrap();
            device.write_durable(off + (1 << 20), parts[0].1).unwrap();
            device.flush().unwrap();
            device.trim(off + (1 << 20) + (100 << 12), 4096).unwrap();
            written.push((off, data));
            drop(device);
            controller.assert_given_back();
        }
    }
}

#[test]
fn threads_write_and_read_through_their_own_queues() {
    let _one = ONE.lock();
    let Some(controller) = controller("varve") else {
        return;
    };
    for way in ways() {
        let device = controller.open(way);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for thread in 0..3u64 {
                let device = &device;
                scope.spawn(move || {
                    for round in 0..100u64 {
                        let data = pattern(4096 << (round % 5), (thread * 1000 + round) as usize);
                        let off = (thread << 24) + round % 16 * (64 << 10);
                        device.write(off, &data).unwrap();
                        let mut back = vec![0; data.len()];
                        device.read(off, &mut back).unwrap();
                        assert!(back == data, "{way}: thread {thread}, round {round}");
                    }
                    device.flush().unwrap();
                });
            }
        });
        println!(
            "{way}: 3 threads, 300 writes and reads back in {:?}",
            begun.elapsed()
        );
        drop(device);
        controller.assert_given_back();
    }
}

#[test]
fn mounted_device_is_refused_and_left_alone() {
    let _one = ONE.lock();
    let Some(controller) = controller("varve") else {
        return;
    };
    let node = format!("/dev/{}", controller.node());
    let run = |program: &str, args: &[&str]| {
        assert!(
            Command::new(program).args(args).status().unwrap().success(),
            "{program}"
        )
    };
    run("mkfs.ext4", &["-q", "-F", &node]);
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().to_str().unwrap();
    run("mount", &[&node, place]);
    for way in ways().into_iter().filter(|way| *way != "uring") {
        let said = controller.refusal(way);
        assert!(said.contains(&format!("is mounted at {place}")), "{said}");
    }
    assert!(controller.refusal("uring").contains("is in use: mounted"));
    run("umount", &[place]);
    run(
        "dd",
        &[
            "if=/dev/zero",
            &format!("of={node}"),
            "bs=1M",
            "count=2",
            "conv=fsync",
            "status=none",
        ],
    );
    controller.assert_given_back();
}

#[test]
fn device_is_for_one_user_at_a_time() {
    let _one = ONE.lock();
    let Some(controller) = controller("varve") else {
        return;
    };
    for way in takers() {
        let held = controller.open(way);
        assert!(controller.refusal("nvme").contains("another process of varve"));
        let said = match way {
            "spdk" => "is in use in this process",
            _ => "another process of varve",
        };
        if takers().contains(&"spdk") {
            assert!(controller.refusal("spdk").contains(said));
        }
        drop(held);
        controller.assert_given_back();
    }
    let held = controller.open("ng");
    assert!(controller.refusal("ng").contains("in use"));
    assert!(controller.refusal("nvme").contains("in use"));
    assert!(controller.refusal("uring").contains("in use"));
    drop(held);
    let held = controller.open("uring");
    for way in ways() {
        assert!(controller.refusal(way).contains("in use"));
    }
    drop(held);
}

#[test]
fn metadata_format_is_refused_and_given_back() {
    let _one = ONE.lock();
    let Some(controller) = controller("varvemd") else {
        return;
    };
    for way in ways().into_iter().filter(|way| *way != "uring") {
        assert!(controller.refusal(way).contains("8 bytes of metadata"));
        controller.assert_given_back();
    }
}

#[test]
fn bad_sector_is_an_error_of_that_read_alone() {
    let _one = ONE.lock();
    let Some(controller) = controller("varveerr") else {
        return;
    };
    for way in ways() {
        let device = controller.open(way);
        let error = device.read(1 << 20, &mut [0; 4096]).unwrap_err();
        println!("{way}: {error}");
        assert!(error.is_failed_read(), "{error}");
        device.read(0, &mut [0; 4096]).unwrap();
        device.write(0, &[1; 4096]).unwrap();
        assert_eq!(device.state(), DeviceState::Ok);
        drop(device);
        controller.assert_given_back();
    }
}

/// Not a test of its own: what [`killed_process_loses_nothing_durable_and_the_device_comes_back`] kills.
#[test]
fn child_that_is_killed() {
    let Ok(name) = std::env::var("VARVE_DEVICES_CHILD") else {
        return;
    };
    let spec = DeviceSpec::parse(&name).unwrap().unwrap();
    let device = open(&spec, BlockOptions::default()).unwrap().device;
    device.write(8 << 20, &pattern(1 << 20, 99)).unwrap();
    device.flush().unwrap();
    println!("child: written");
    // In the middle of writes elsewhere.
    loop {
        device.write(16 << 20, &pattern(1 << 20, 1)).unwrap();
    }
}

#[test]
fn killed_process_loses_nothing_durable_and_the_device_comes_back() {
    let _one = ONE.lock();
    let Some(controller) = controller("varve") else {
        return;
    };
    let of = |way| [(way, false), (way, true)];
    for (way, adopted) in takers().into_iter().flat_map(of) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_is_killed", "--nocapture"])
            .env("VARVE_DEVICES_CHILD", controller.spec(way).to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(
            lines
                .map_while(Result::ok)
                .any(|line| line.contains("child: written"))
        );
        std::thread::sleep(Duration::from_millis(200));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_ne!(
            Places::default().driver(controller.address).as_deref(),
            Some("nvme")
        );
        if adopted {
            // The next user takes it as it is, and gives it back to whom it was taken from.
            drop(controller.open(way));
        } else {
            let done = Places::default().give_back_abandoned();
            println!("{done:?}");
            assert_eq!(done.len(), 1);
        }
        controller.assert_given_back();
        let mut back = vec![0; 1 << 20];
        controller.open("uring").read(8 << 20, &mut back).unwrap();
        assert!(back == pattern(1 << 20, 99));
    }
}

#[test]
fn start_and_stop_take_little_time() {
    let _one = ONE.lock();
    let Some(controller) = controller("varve") else {
        return;
    };
    for way in ways() {
        let begun = Instant::now();
        let device = controller.open(way);
        let opened = begun.elapsed();
        drop(device);
        println!(
            "{way}: opened in {opened:?}, closed in {:?}",
            begun.elapsed() - opened
        );
        controller.assert_given_back();
    }
}

/// Writes to a device that is pulled out meanwhile, until it says so. Its state is clear then, and it is let
/// go, which the kernel waits for.
fn assert_removal_latches(controller: &Controller, device: Arc<dyn BlockDevice>, id: &str) {
    device.write(0, &[1; 4096]).unwrap();
    fs::write(PathBuf::from("/tmp/out/remove"), id).unwrap();
    let begun = Instant::now();
    let error = loop {
        assert!(begun.elapsed() < Duration::from_secs(60), "not removed");
        match device.write(4096, &[2; 8192]) {
            Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => break error.to_string(),
        }
    };
    println!("removed: {error}");
    assert!(
        error.contains("took it back") || error.contains("removed"),
        "{error}"
    );
    assert!(matches!(device.state(), DeviceState::Failed { .. }));
    assert!(device.read(0, &mut [0; 512]).is_err());
    drop(device);
    wait_for("the end of the removal", || {
        !Places::default().function(controller.address).exists()
    });
}

/// Last in its name's order: the device does not come back.
#[test]
fn zz_removed_device_latches_with_a_clear_state() {
    let _one = ONE.lock();
    for (way, serial, id) in [("spdk", "varvehot2", "hot2"), ("nvme", "varvehot", "hot")] {
        if !takers().contains(&way) {
            continue;
        }
        let Some(controller) = controller(serial) else {
            return;
        };
        assert_removal_latches(&controller, controller.open(way), id);
    }
}
