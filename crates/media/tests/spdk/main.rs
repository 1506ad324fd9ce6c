//! The `spdk:` backend over a double of the library: what a good device is asked for, what a bad one can do,
//! and what is left after each.

#![allow(clippy::unwrap_used)]

#[path = "../doubles/spdk.rs"]
mod double;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use double::{API, Disk, Fault, LEFT, POLLS, Shape};
use proptest::prelude::{Strategy, any, prop, prop_assert, proptest};
use varve_media::block::spdk::{Reactor, SpdkDevice, SpdkOptions};
use varve_media::emulated::{DiskModel, EmulatedDisk};
use varve_media::faulty::{Fault as Injected, FaultOp, FaultRule, FaultScript, FaultyDevice};
use varve_media::{BlockDevice, DeviceState, MediaError};

/// A short limit, since every time-out is waited for.
const OPTIONS: SpdkOptions = SpdkOptions {
    io_timeout: Duration::from_millis(300),
};

/// Tests that count what all libraries of the process do run alone; all others run beside each other.
static ALONE: parking_lot::RwLock<()> = parking_lot::RwLock::new(());

fn reactor() -> Arc<Reactor> {
    Arc::new(Reactor::start(double::library(API), Vec::new(), true, String::new()).unwrap())
}

fn try_open(name: &str) -> Result<SpdkDevice, MediaError> {
    let label = format!("spdk:{name}").into();
    SpdkDevice::open(reactor(), label, Some(name.into()), String::new(), OPTIONS)
}

/// A disk and its device.
fn disk(name: &str, shape: Shape) -> (Arc<Disk>, SpdkDevice) {
    let disk = Disk::new(name, shape);
    (disk, try_open(name).unwrap())
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at * 7 + at / 4096 * 13 + seed * 31) as u8)
        .collect()
}

fn is_latched(device: &dyn BlockDevice) -> bool {
    matches!(device.state(), DeviceState::Failed { .. })
}

fn errno(error: &MediaError) -> i32 {
    match error {
        MediaError::Io { errno, .. } => *errno,
        other => panic!("{other}"),
    }
}

#[test]
fn device_reads_back_what_it_wrote_at_any_offset_and_length() {
    let _shared = ALONE.read();
    for (name, sector) in [("plain512", 512), ("plain4k", 4096)] {
        let shape = Shape {
            sector,
            sectors: (16 << 20) / u64::from(sector),
            ..Shape::default()
        };
        let (_, device) = disk(name, shape);
        assert_eq!(device.len_bytes(), 16 << 20);
        // More than all memory for transfers.
        let data = pattern(7 << 20, 3);
        device.write(8192, &data).unwrap();
        for (off, len) in [(0, 1), (511, 2), (4095, 70_001), (1, 6 << 20), (100_000, 0)] {
            let mut back = vec![0; len];
            device.read(8192 + off, &mut back).unwrap();
            assert!(back == data[off as usize..off as usize + len], "{off}+{len}");
        }
        device.trim(8192, 4096).unwrap();
        let mut back = vec![1; 4096];
        device.read(8192, &mut back).unwrap();
        assert_eq!(back, vec![0; 4096]);
        let info = device.info().to_string();
        assert!(info.contains("SPDK's double, huge pages, Double"), "{info}");
    }
}

#[test]
fn bad_ranges_are_refused_before_the_library_sees_them() {
    let _shared = ALONE.read();
    let (disk, device) = disk("ranges", Shape::default());
    let outside = device.read(16 << 20, &mut [0]).unwrap_err();
    assert!(matches!(outside, MediaError::OutOfRange { .. }), "{outside}");
    let odd = device.write(512, &[0; 4096]).unwrap_err();
    assert!(matches!(odd, MediaError::Misaligned { .. }), "{odd}");
    assert!(device.trim(0, 100).is_err());
    assert_eq!(disk.operations.load(Ordering::SeqCst), 0);
    assert!(!is_latched(&device));
}

#[test]
fn flush_reaches_the_device_whatever_the_library_makes_of_one() {
    let _shared = ALONE.read();
    for nvme in [true, false] {
        let shape = Shape {
            nvme,
            ..Shape::default()
        };
        let (disk, device) = disk(if nvme { "flushed" } else { "flushed-file" }, shape);
        let data = pattern(8192, 1);
        device.write(4096, &data).unwrap();
        assert_eq!(disk.durable(4096, 8192), vec![0; 8192]);
        device.flush().unwrap();
        assert_eq!(disk.durable(4096, 8192), data);
        device.write_durable(4096, &pattern(4096, 2)).unwrap();
        assert_eq!(disk.durable(4096, 4096), pattern(4096, 2));
    }
}

#[test]
fn status_of_an_operation_becomes_its_errno() {
    let _shared = ALONE.read();
    let (disk, device) = disk("status", Shape::default());
    let mut back = [0; 4096];
    for (fault, wanted) in [
        (Fault::Nvme(2, 0x81), libc::EIO),
        (Fault::Errno(libc::ENXIO), libc::ENXIO),
        (Fault::Refused(libc::EINVAL), libc::EINVAL),
    ] {
        disk.fail([fault]);
        assert_eq!(errno(&device.read(0, &mut back).unwrap_err()), wanted);
    }
    // Want of space does not latch, nor did the reads.
    for fault in [Fault::Nvme(0, 0x81), Fault::Errno(libc::ENOSPC)] {
        disk.fail([fault]);
        assert!(device.write(0, &[1; 4096]).unwrap_err().is_no_space());
    }
    assert!(!is_latched(&device));
    disk.fail([Fault::Nvme(0, 0x06)]);
    assert_eq!(errno(&device.write(0, &[1; 4096]).unwrap_err()), libc::EIO);
    assert!(is_latched(&device));
    assert!(device.write(0, &[1; 4096]).is_err() && device.flush().is_err());
    device.read(0, &mut back).unwrap();
}

#[test]
fn operation_without_room_or_aborted_is_sent_again() {
    let _shared = ALONE.read();
    let (disk, device) = disk("again", Shape::default());
    disk.fail([
        Fault::NoRoom,
        Fault::NoRoom,
        Fault::Nvme(0, 8),
        Fault::NoRoom,
        Fault::Errno(libc::EAGAIN),
    ]);
    let data = pattern(1 << 20, 5);
    device.write(0, &data).unwrap();
    let mut back = vec![0; 1 << 20];
    device.read(0, &mut back).unwrap();
    assert!(back == data);
    disk.fail([Fault::Nvme(0, 8); 5]);
    assert_eq!(errno(&device.read(0, &mut back[..4096]).unwrap_err()), libc::EIO);
}

#[test]
fn operation_that_does_not_end_costs_a_reset_and_no_data() {
    let _shared = ALONE.read();
    let (disk, device) = disk("reset", Shape::default());
    disk.fail([Fault::UntilReset, Fault::UntilReset]);
    let data = pattern(256 << 10, 6);
    device.write(0, &data).unwrap();
    assert_eq!(disk.resets.load(Ordering::SeqCst), 1);
    let mut back = vec![0; 256 << 10];
    device.read(0, &mut back).unwrap();
    assert!(back == data && !is_latched(&device));
}

fn assert_closed(disk: &Disk) {
    let begun = Instant::now();
    while disk.is_open() {
        assert!(begun.elapsed() < Duration::from_secs(30), "not closed");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A device that was given up: what it says, and that every call to it ends.
fn assert_given_up(device: &SpdkDevice, said: &str) {
    let error = device.write(0, &[1; 4096]).unwrap_err().to_string();
    assert!(
        error.contains(said) && error.contains("restart the daemon"),
        "{error}"
    );
    let mut back = [0; 4096];
    assert!(matches!(
        device.read(0, &mut back),
        Err(MediaError::Failed { .. })
    ));
    assert!(device.flush().is_err() && device.trim(0, 4096).is_err());
    assert!(is_latched(device));
}

#[test]
fn device_that_cannot_be_reset_is_given_up() {
    let _shared = ALONE.read();
    let (disk, device) = disk("fails", Shape::default());
    disk.fail([Fault::UntilReset, Fault::Fails]);
    assert!(device.write(0, &[1; 4096]).is_err());
    assert_given_up(&device, "its reset failed");
    // A second reset ends what is under way, so that it can be closed.
    assert_closed(&disk);

    let shape = Shape {
        can_reset: false,
        ..Shape::default()
    };
    let (disk, device) = self::disk("no-reset", shape);
    disk.fail([Fault::Never]);
    assert!(device.read(0, &mut [0; 100]).is_err());
    assert_given_up(&device, "it does not answer");
}

#[test]
fn device_that_never_answers_is_given_up_within_its_limits() {
    let _shared = ALONE.read();
    let (disk, device) = disk("never", Shape::default());
    disk.fail([Fault::Never]);
    std::thread::scope(|scope| {
        for at in 0..3 {
            let device = &device;
            scope.spawn(move || {
                // Those that the disk still answers may be lucky.
                let _ = device.write(at << 20, &[1; 4096]);
            });
        }
    });
    assert_given_up(&device, "it does not answer");
    // And one more, perhaps, to end what is under way.
    assert!((3..=4).contains(&disk.resets.load(Ordering::SeqCst)));
    drop(device);
    // The library still has an operation.
    assert!(disk.is_open());
}

#[test]
fn removal_latches_and_ends_the_calls_under_way() {
    let _shared = ALONE.read();
    let (disk, device) = disk("removed", Shape::default());
    device.write(0, &[1; 4096]).unwrap();
    disk.fail([Fault::UntilReset]);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| device.write(0, &[2; 4096]));
        while disk.operations.load(Ordering::SeqCst) < 2 {
            std::thread::yield_now();
        }
        disk.tell(0);
        assert!(call.join().unwrap().is_err());
    });
    assert_given_up(&device, "it was removed");

    // One that is idle, and is closed then, so that its host can have it.
    let (disk, device) = self::disk("removed-idle", Shape::default());
    disk.tell(0);
    assert_closed(&disk);
    assert_given_up(&device, "it was removed");
}

#[test]
fn device_of_another_size_takes_no_more_writes() {
    let _shared = ALONE.read();
    let (disk, device) = disk("resized", Shape::default());
    disk.tell(1);
    let begun = Instant::now();
    while !is_latched(&device) {
        assert!(begun.elapsed() < Duration::from_secs(30), "not noticed");
        std::thread::sleep(Duration::from_millis(10));
    }
    let error = device.write(0, &[0; 4096]).unwrap_err().to_string();
    assert!(error.contains("its size has changed"), "{error}");
    device.read(0, &mut [0; 100]).unwrap();
}

#[test]
fn device_that_does_not_fit_is_refused_with_what_to_do() {
    let _shared = ALONE.read();
    let refusal = |name: &str, shape: Shape| {
        Disk::new(name, shape);
        try_open(name).err().unwrap().to_string()
    };
    let plain = Shape::default();
    for (name, shape, said) in [
        ("md", Shape { metadata: 8, ..plain }, "nvme format --lbaf=N"),
        ("520", Shape { sector: 520, ..plain }, "sectors of 520 bytes"),
        (
            "8k",
            Shape {
                sector: 8192,
                ..plain
            },
            "sectors of 8192 bytes",
        ),
        ("empty", Shape { sectors: 0, ..plain }, "no room"),
    ] {
        let error = refusal(name, shape);
        assert!(error.contains(said), "{error}");
    }
    let absent = try_open("absent").err().unwrap().to_string();
    assert!(absent.contains("there is no block device absent"), "{absent}");
    // What was refused is free again; what is open is not.
    let (_, device) = disk("taken", plain);
    let error = try_open("taken").err().unwrap().to_string();
    assert!(error.contains("belongs to another block device"), "{error}");
    drop(device);
    drop(try_open("taken").unwrap());
}

#[test]
fn library_with_another_layout_is_refused_and_older_ones_are_known() {
    let _shared = ALONE.read();
    let start = |env_opts_init| {
        let library = double::library(varve_media::block::spdk::api::Api { env_opts_init, ..API });
        Reactor::start(library, Vec::new(), true, String::new())
    };
    let error = start(double::old_env_opts_init).err().unwrap();
    assert!(
        error.contains("laid out in a way that is not known") && error.contains("24.05"),
        "{error}"
    );
    assert!(start(double::short_env_opts_init).is_ok());
}

#[test]
fn wrong_configuration_is_refused_with_what_the_library_says() {
    let _alone = ALONE.write();
    let json = r#"{"subsystems":[{"subsystem":"bdev","config":[{"method":"wrong"}]}]}"#;
    let library = double::library(API);
    let error = Reactor::start(library, Vec::new(), true, json.into())
        .err()
        .unwrap();
    assert!(
        error.contains("SPDK says: Method 'wrong' was not found"),
        "{error}"
    );
    // The same library can be started after that, and again.
    for _ in 0..2 {
        let reactor = Arc::new(Reactor::start(library, Vec::new(), true, String::new()).unwrap());
        Disk::new("later", Shape::default());
        let open = |json: &str| {
            let bdev = Some("later".to_owned());
            SpdkDevice::open(
                Arc::clone(&reactor),
                "spdk:later".into(),
                bdev,
                json.into(),
                OPTIONS,
            )
        };
        let error = open(json).err().unwrap().to_string();
        assert!(error.contains("Method 'wrong' was not found"), "{error}");
        open("").unwrap().write(0, &[7; 4096]).unwrap();
    }
}

#[test]
fn idle_library_is_hardly_polled_and_leaves_nothing() {
    let _alone = ALONE.write();
    LEFT.store(0, Ordering::SeqCst);
    let (disk, device) = disk("idle", Shape::default());
    device.write(0, &[1; 4096]).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let (before, begun) = (POLLS.load(Ordering::SeqCst), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let polls = POLLS.load(Ordering::SeqCst) - before;
    let most = begun.elapsed().as_millis() as u64 / 20 + 2;
    assert!(polls <= most, "{polls} polls, at most {most} were due");
    drop(device);
    assert!(!disk.is_open());
    assert_eq!(LEFT.load(Ordering::SeqCst), 0);
}

#[test]
fn other_backends_wrap_it() {
    let _shared = ALONE.read();
    let (_, device) = disk("wrapped", Shape::default());
    let script = FaultScript::new();
    let faulty = Arc::new(FaultyDevice::new(Arc::new(device), script.clone()));
    let slow = EmulatedDisk::new(faulty, DiskModel::SSD);
    slow.write(0, &[9; 8192]).unwrap();
    script.push(FaultRule::once(FaultOp::Read, Injected::Errno(libc::EIO)));
    assert!(slow.read(0, &mut [0; 10]).is_err());
    let mut back = [0; 10];
    slow.read(5000, &mut back).unwrap();
    assert_eq!(back, [9; 10]);
}

#[test]
fn threads_share_a_device_with_passing_faults() {
    let _shared = ALONE.read();
    let (disk, device) = disk("threads", Shape::default());
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (disk, device) = (&disk, &device);
            scope.spawn(move || {
                for round in 0..100 {
                    if round % 9 == 0 {
                        disk.fail([Fault::NoRoom, Fault::Nvme(0, 8)]);
                    }
                    let off = ((thread * 4) << 20) + (round % 15) * (200 << 10);
                    let data = pattern(200 << 10, (thread * 1000 + round) as usize);
                    device.write(off, &data).unwrap();
                    let mut back = vec![0; data.len()];
                    device.read(off, &mut back).unwrap();
                    assert!(back == data, "thread {thread}, round {round}");
                }
            });
        }
    });
}

fn fault() -> impl Strategy<Value = Option<Fault>> {
    prop::sample::select(vec![
        None,
        None,
        None,
        Some(Fault::NoRoom),
        Some(Fault::Nvme(0, 8)),
        Some(Fault::Nvme(2, 0x81)),
        Some(Fault::Errno(libc::EIO)),
        Some(Fault::Errno(libc::ENOSPC)),
    ])
}

proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(48))]
    /// Whatever fails, what a successful flush covered is there, and reads see what was written.
    #[test]
    fn device_with_faults_is_a_device(
        steps in prop::collection::vec((0u64..16, 1u64..20, any::<u8>(), 0u8..4, fault()), 1..40)
    ) {
        let _shared = ALONE.read();
        let name = format!("random-{:?}", std::thread::current().id());
        let (disk, device) = disk(&name, Shape::default());
        // A block that a failed write may have left either way is `None`.
        let mut now: Vec<Option<u8>> = vec![Some(0); 64];
        for (first, blocks, byte, kind, fault) in steps {
            disk.fail(fault);
            let (off, len) = (first * 4096, blocks as usize * 4096);
            let blocks = first as usize..(first + blocks) as usize;
            match kind {
                0 | 1 => {
                    let result = device.write(off, &vec![byte; len]);
                    now[blocks].fill(result.ok().map(|()| byte));
                }
                2 => {
                    let mut back = vec![0; len];
                    if device.read(off, &mut back).is_ok() {
                        for (at, block) in blocks.zip(back.chunks(4096)) {
                            prop_assert!(now[at].is_none_or(|byte| block.iter().all(|it| *it == byte)));
                        }
                    }
                }
                _ => {
                    if device.flush().is_ok() {
                        for (at, byte) in now.iter().enumerate() {
                            let block = disk.durable(at * 4096, 4096);
                            prop_assert!(byte.is_none_or(|byte| block.iter().all(|it| *it == byte)));
                        }
                    }
                }
            }
        }
    }
}
