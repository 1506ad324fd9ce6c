//! A device that fails, and is well again after a reset or a second try.

use super::doubles::nvme::{Quirk, Shape};
use super::{assert_clean, opened, pattern};
use varve_media::{BlockDevice, DeviceState, MediaError};

const AGAIN: u16 = 0x07;
const NOT_READY: u16 = 0x82;
const MEDIA_READ: u16 = 0x281;
const MEDIA_WRITE: u16 = 0x280;
const FULL: u16 = 0x81;

#[test]
fn one_fault_costs_a_reset_and_no_data() {
    for quirk in [
        Quirk::Drop,
        Quirk::WrongPhase,
        Quirk::WrongId(0x20),
        Quirk::WrongId(0x1f),
        Quirk::WrongQueue,
        Quirk::HeadPastEnd,
        Quirk::Garbage,
        Quirk::Fatal,
        Quirk::Late(60_000),
        Quirk::Late(3_000),
    ] {
        for at in [0, 3, 17] {
            let (sim, device) = opened(Shape::default());
            let data = pattern(1 << 20, 4);
            sim.at(at, quirk);
            device.write(0, &data).unwrap();
            sim.at(at, quirk);
            let mut back = vec![0; data.len()];
            device.read(0, &mut back).unwrap();
            assert!(back == data, "{quirk:?} at {at}");
            assert!(
                (1..=6).contains(&device.resets()),
                "{quirk:?}: {}",
                device.resets()
            );
            assert_eq!(device.state(), DeviceState::Ok);
            assert_clean(&sim);
        }
    }
}

#[test]
fn duplicate_answer_is_found_out() {
    let (sim, device) = opened(Shape::default());
    let data = pattern(1 << 20, 5);
    sim.at(2, Quirk::Duplicate);
    device.write(0, &data).unwrap();
    let mut back = vec![0; data.len()];
    device.read(0, &mut back).unwrap();
    assert!(back == data);
    assert!(device.resets() >= 1);
    assert_clean(&sim);
}

#[test]
fn passing_status_is_tried_again_and_a_lasting_one_is_not() {
    let (sim, device) = opened(Shape::default());
    for status in [AGAIN, NOT_READY] {
        sim.at(0, Quirk::Status(status));
        device.write(0, &[1; 4096]).unwrap();
    }
    sim.at(0, Quirk::Status(MEDIA_READ));
    let error = device.read(0, &mut [0; 4096]).unwrap_err();
    assert!(error.is_failed_read(), "{error}");
    sim.at(0, Quirk::Status(FULL));
    assert!(device.write(0, &[2; 4096]).unwrap_err().is_no_space());
    assert_eq!(device.state(), DeviceState::Ok);
    sim.at(1, Quirk::Status(MEDIA_WRITE));
    assert!(matches!(
        device.write(0, &[3; 1 << 18]),
        Err(MediaError::Io { errno: libc::EIO, .. })
    ));
    assert!(matches!(device.state(), DeviceState::Failed { .. }));
    assert!(matches!(
        device.write(0, &[3; 4096]),
        Err(MediaError::Failed { .. })
    ));
    // What is there can still be read.
    let mut back = [0; 4096];
    device.read(0, &mut back).unwrap();
    assert_eq!(device.resets(), 0);
    assert_clean(&sim);
}

#[test]
fn status_that_never_passes_is_an_error_at_last() {
    let (sim, device) = opened(Shape::default());
    for at in 0..100 {
        sim.at(at, Quirk::Status(AGAIN));
    }
    assert!(device.read(0, &mut [0; 4096]).is_err());
    assert!(sim.counts().io(2) < 10);
}

#[test]
fn device_that_always_times_out_fails_the_call_within_its_limits() {
    let (sim, device) = opened(Shape::default());
    for at in 0..1000 {
        sim.at(at, Quirk::Drop);
    }
    let begun = sim.elapsed();
    assert!(matches!(
        device.read(0, &mut [0; 4096]),
        Err(MediaError::Io {
            errno: libc::ETIMEDOUT,
            ..
        })
    ));
    assert_eq!(device.state(), DeviceState::Ok);
    assert!((sim.elapsed() - begun).as_secs() < 20, "{:?}", sim.elapsed());
    assert!(device.write(0, &[0; 4096]).is_err());
    assert!(matches!(device.state(), DeviceState::Failed { .. }));
    assert_clean(&sim);
}

#[test]
fn controller_that_does_not_come_back_is_given_up() {
    let (sim, device) = opened(Shape::default());
    sim.reshape(|shape| shape.never_ready = true);
    sim.at(0, Quirk::Fatal);
    let error = device.write(0, &[0; 4096]).unwrap_err().to_string();
    assert!(
        error.contains("could not be reset") && error.contains("restart"),
        "{error}"
    );
    assert!(device.read(0, &mut [0; 1]).is_err() && device.flush().is_err());
    assert!(sim.counts().dma_stops >= 1);
    drop(device);
    assert_clean(&sim);
}

#[test]
fn another_device_in_its_place_is_not_written_to() {
    let (sim, device) = opened(Shape::default());
    sim.reshape(|shape| shape.sectors -= 8);
    sim.at(0, Quirk::Drop);
    let error = device.write(0, &[0; 4096]).unwrap_err().to_string();
    assert!(error.contains("another device"), "{error}");
}

#[test]
fn removal_latches_and_says_so() {
    // While it is used, while it is idle, and when the host asks for it.
    let (sim, device) = opened(Shape::default());
    sim.at(5, Quirk::Remove);
    let error = device.write(0, &[1; 1 << 20]).unwrap_err().to_string();
    assert!(error.contains("removed"), "{error}");
    let commands = sim.counts().commands;
    assert!(device.read(0, &mut [0; 512]).is_err() && device.flush().is_err());
    assert_eq!(sim.counts().commands, commands);

    let (sim, device) = opened(Shape::default());
    assert_eq!(device.look(), DeviceState::Ok);
    sim.pull_out();
    let DeviceState::Failed { reason } = device.look() else {
        panic!("not latched");
    };
    assert!(reason.contains("all ones"), "{reason}");

    let (sim, device) = opened(Shape::default());
    sim.want_back();
    let DeviceState::Failed { reason } = device.look() else {
        panic!("not latched");
    };
    assert!(reason.contains("took it back"), "{reason}");
    assert_eq!(sim.counts().dma_stops, 1);
    drop(device);
    assert_clean(&sim);

    // One that fails while it goes.
    let (sim, device) = opened(Shape::default());
    sim.at(0, Quirk::Fatal);
    sim.want_back();
    let error = device.write(0, &[1; 4096]).unwrap_err().to_string();
    assert!(error.contains("took it back"), "{error}");
}

#[test]
fn reset_under_load_loses_nothing() {
    let (sim, device) = opened(Shape::default());
    sim.fail_every(97);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let device = &device;
            scope.spawn(move || {
                for round in 0..30u64 {
                    let data = pattern(32 << 10, (thread * 100 + round) as usize);
                    let off = (thread << 20) + round % 4 * (64 << 10);
                    device.write(off, &data).unwrap();
                    let mut back = vec![0; data.len()];
                    device.read(off, &mut back).unwrap();
                    assert!(back == data, "thread {thread}, round {round}");
                    if round % 5 == 0 {
                        device.flush().unwrap();
                    }
                }
            });
        }
    });
    assert!(device.resets() >= 2, "{}", device.resets());
    assert_eq!(device.state(), DeviceState::Ok);
    assert_clean(&sim);
}
