//! A device that works.

use std::sync::Arc;
use std::time::Duration;

use super::doubles::nvme::{Shape, SimController};
use super::{OPTIONS, assert_clean, opened, pattern, try_open};
use varve_media::block::nvme::NvmeOptions;
use varve_media::emulated::{DiskModel, EmulatedDisk};
use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice};
use varve_media::{BlockDevice, DeviceState, MediaError};

const READ: u8 = 2;
const WRITE: u8 = 1;
const FLUSH: u8 = 0;
const DEALLOCATE: u8 = 9;

/// Shapes that differ in what decides how a transfer is cut.
fn shapes() -> Vec<Shape> {
    let small = Shape {
        mdts: 1,
        mqes: 1,
        doorbell_shift: 3,
        ..Shape::default()
    };
    let large = Shape {
        sectors: 4096,
        sector_shift: 12,
        mdts: 0,
        mqes: u16::MAX,
        ..Shape::default()
    };
    vec![Shape::default(), small, large]
}

#[test]
fn device_reads_back_what_it_wrote_whatever_its_limits() {
    for shape in shapes() {
        let (sim, device) = opened(shape);
        let data = pattern(1 << 20, 1);
        device.write(8192, &data).unwrap();
        for (off, len) in [
            (0, 1 << 20),
            (0, 1),
            (4095, 2),
            (511, 4097),
            (12_345, 70_001),
            (0, 0),
        ] {
            let mut back = vec![0xee; len];
            device.read(8192 + off as u64, &mut back).unwrap();
            assert!(back == data[off..off + len], "{shape:?} {off}+{len}");
        }
        let mut before = vec![1; 8192];
        device.read(0, &mut before).unwrap();
        assert!(before.iter().all(|byte| *byte == 0));
        assert!(sim.content()[8192..][..data.len()] == data[..]);
        assert_eq!(device.resets(), 0);
        assert_clean(&sim);
    }
}

#[test]
fn device_keeps_a_whole_batch_in_flight_on_one_queue() {
    let (sim, device) = opened(Shape::default());
    let data = pattern(100 * 4096, 2);
    let parts: Vec<(u64, &[u8])> = data
        .chunks(4096)
        .enumerate()
        .map(|(at, part)| ((at as u64 * 17 % 100) * 8192, part))
        .collect();
    let begun = sim.elapsed();
    device.write_batch(&parts).unwrap();
    // Each command takes 10 µs in the mean: one after the other they would take a millisecond.
    assert!(sim.elapsed() - begun < Duration::from_micros(500));
    let mut back = vec![0; data.len()];
    let mut wanted: Vec<(u64, &mut [u8])> = back
        .chunks_mut(4096)
        .enumerate()
        .map(|(at, part)| ((at as u64 * 17 % 100) * 8192, part))
        .collect();
    device.read_batch(&mut wanted).unwrap();
    assert!(back == data);
    let used = sim.counts().commands;
    let queues: Vec<u16> = used
        .keys()
        .map(|(queue, _)| *queue)
        .filter(|id| *id > 0)
        .collect();
    assert!(queues.iter().all(|id| *id == queues[0]), "{queues:?}");
    assert_clean(&sim);
}

#[test]
fn threads_use_queue_pairs_of_their_own() {
    let (sim, device) = opened(Shape::default());
    assert_eq!(device.queue_pairs(), 4);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let device = &device;
            scope.spawn(move || {
                let data = pattern(64 << 10, thread as usize);
                for round in 0..20 {
                    let off = (thread << 20) + round * (64 << 10) % (1 << 20);
                    device.write(off, &data).unwrap();
                    let mut back = vec![0; data.len()];
                    device.read(off, &mut back).unwrap();
                    assert!(back == data);
                }
            });
        }
    });
    let commands = sim.counts().commands;
    let used = (1..=4).filter(|id| commands.contains_key(&(*id, WRITE))).count();
    assert!(used >= 2, "{commands:?}");
    assert_clean(&sim);
}

#[test]
fn device_gives_fewer_queues_than_asked_for_and_all_threads_still_work() {
    for (queues, real, expected) in [(1, 8, 1), (2, 8, 2), (8, 3, 3)] {
        let shape = Shape {
            queues,
            queues_real: real,
            ..Shape::default()
        };
        let (sim, device) = opened(shape);
        assert_eq!(device.queue_pairs(), expected);
        std::thread::scope(|scope| {
            for thread in 0..6u64 {
                let device = &device;
                scope.spawn(move || device.write(thread * 8192, &[thread as u8; 8192]).unwrap());
            }
        });
        for thread in 0..6u8 {
            assert_eq!(sim.content()[usize::from(thread) * 8192], thread);
        }
        assert_clean(&sim);
    }
}

#[test]
fn flush_makes_writes_durable_and_is_left_out_without_a_cache() {
    let (sim, device) = opened(Shape::default());
    device.write(0, &[1; 4096]).unwrap();
    device.flush().unwrap();
    device.write(4096, &[2; 4096]).unwrap();
    device.write_durable(8192, &[3; 4096]).unwrap();
    assert_eq!(sim.counts().io(FLUSH), 1);
    assert_eq!(sim.counts().durable_writes, 1);
    std::mem::forget(device);
    sim.cut_power(false);
    let content = sim.content();
    assert!(content[..4096] == [1; 4096] && content[8192..12_288] == [3; 4096]);
    assert_clean(&sim);

    let without = Shape {
        write_cache: false,
        ..Shape::default()
    };
    let (sim, device) = opened(without);
    device.write(0, &[4; 4096]).unwrap();
    device.write_durable(4096, &[5; 4096]).unwrap();
    device.flush().unwrap();
    assert_eq!((sim.counts().io(FLUSH), sim.counts().durable_writes), (0, 0));
    std::mem::forget(device);
    sim.cut_power(false);
    assert!(sim.content()[..4096] == [4; 4096] && sim.content()[4096..8192] == [5; 4096]);
}

#[test]
fn lie_about_a_flush_is_seen_after_a_power_cut() {
    let shape = Shape {
        lies_about_flush: true,
        ..Shape::default()
    };
    let (sim, device) = opened(shape);
    let data = pattern(1 << 20, 3);
    device.write(0, &data).unwrap();
    device.flush().unwrap();
    std::mem::forget(device);
    sim.cut_power(true);
    // No driver can do anything about it; the point is that this double can tell.
    assert!(sim.content()[..data.len()] != data[..]);
}

#[test]
fn trim_deallocates_and_is_nothing_where_the_device_cannot() {
    for can_deallocate in [true, false] {
        let shape = Shape {
            can_deallocate,
            ..Shape::default()
        };
        let (sim, device) = opened(shape);
        device.write(0, &[7; 16_384]).unwrap();
        device.trim(4096, 8192).unwrap();
        device.trim(0, 0).unwrap();
        assert_eq!(sim.counts().io(DEALLOCATE), u64::from(can_deallocate));
        let kept = if can_deallocate { 0 } else { 7 };
        assert_eq!(sim.content()[4096], kept);
        assert_eq!((sim.content()[0], sim.content()[12_288]), (7, 7));
        assert!(matches!(device.trim(1, 4096), Err(MediaError::Misaligned { .. })));
        assert_clean(&sim);
    }
}

#[test]
fn callers_faults_reach_no_device() {
    let (sim, device) = opened(Shape::default());
    let end = device.len_bytes();
    assert_eq!(end, 16 << 20);
    for error in [
        device.write(end, &[0; 4096]).unwrap_err(),
        device.write(u64::MAX - 4095, &[0; 4096]).unwrap_err(),
        device.write(512, &[0; 4096]).unwrap_err(),
        device.write(0, &[0; 512]).unwrap_err(),
        device.read(end - 1, &mut [0; 2]).unwrap_err(),
    ] {
        assert!(error.is_caller_fault(), "{error}");
    }
    assert_eq!((sim.counts().io(READ), sim.counts().io(WRITE)), (0, 0));
    assert_eq!(device.state(), DeviceState::Ok);
}

#[test]
fn device_is_shut_down_in_order_when_it_is_closed() {
    let (sim, device) = opened(Shape::default());
    device.write(0, &[9; 4096]).unwrap();
    drop(device);
    assert_eq!((sim.counts().shutdowns, sim.counts().dma_stops), (1, 1));
    sim.cut_power(false);
    assert_eq!(sim.content()[..4096], [9; 4096]);
    assert_clean(&sim);
}

#[test]
fn wrappers_slow_and_break_it_as_any_other_device() {
    let (sim, device) = opened(Shape::default());
    let script = FaultScript::new();
    let faulty = Arc::new(FaultyDevice::new(Arc::new(device), script.clone()));
    let model = DiskModel {
        write_latency_ns: 2_000_000,
        ..DiskModel::SSD
    };
    let slow = EmulatedDisk::new(faulty, model);
    let begun = std::time::Instant::now();
    slow.write(0, &[6; 4096]).unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(2));
    script.push(FaultRule::once(FaultOp::Read, Fault::Errno(libc::EIO)));
    assert!(slow.read(0, &mut [0; 512]).is_err());
    assert_eq!(sim.content()[0], 6);
    let backend = slow.info().backend;
    assert!(backend.starts_with("emulated ssd") && backend.contains("nvme in user space, simulated"));
}

#[test]
fn device_says_what_it_is() {
    let (_, device) = opened(Shape::default());
    let said = device.info().to_string();
    for part in [
        "nvme:test",
        "MODEL (SERIAL)",
        "4 queue pairs of 32",
        "sectors of 512",
        "volatile",
    ] {
        assert!(said.contains(part), "{said}");
    }
    let sim = SimController::new(Shape::default(), 7);
    let tiny = NvmeOptions {
        queue_pairs: 1,
        entries: 0,
        ..OPTIONS
    };
    let device = try_open(&sim, tiny).unwrap();
    assert!(device.info().backend.contains("1 queue pairs of 2"));
}
