//! A device that says of itself what cannot be.

use super::doubles::nvme::{Quirk, Shape, SimController};
use super::{OPTIONS, assert_clean, try_open};
use varve_media::BlockDevice;
use varve_media::block::nvme::NvmeDevice;

/// What opening such a device is refused with.
fn refusal(shape: Shape) -> String {
    let sim = SimController::new(shape, 3);
    let error = try_open(&sim, OPTIONS).map(|_| ()).unwrap_err();
    assert!(sim.counts().dma_stops >= 1 || sim.counts().enables == 0);
    assert_clean(&sim);
    error.to_string()
}

#[test]
fn impossible_device_is_refused_with_what_is_wrong() {
    let of = Shape::default();
    for (shape, said) in [
        (Shape { mqes: 0, ..of }, "MQES"),
        (
            Shape {
                cap_flips: 1 << 37,
                ..of
            },
            "command set",
        ),
        (
            Shape {
                cap_flips: 3 << 48,
                ..of
            },
            "32768 bytes",
        ),
        (
            Shape {
                registers_bytes: 0x1000,
                ..of
            },
            "doorbells",
        ),
        (
            Shape {
                registers_bytes: 64,
                ..of
            },
            "too small for an NVMe controller",
        ),
        (
            Shape {
                doorbell_shift: 15,
                ..of
            },
            "doorbells",
        ),
        (Shape { namespaces: 0, ..of }, "there is no namespace 1"),
        (Shape { sectors: 0, ..of }, "no active namespace 1"),
        (
            Shape {
                sectors: u64::MAX,
                ..of
            },
            "18446744073709551615 sectors",
        ),
        (
            Shape {
                metadata_bytes: 8,
                ..of
            },
            "nvme format",
        ),
        (
            Shape {
                sector_shift: 0,
                ..of
            },
            "sectors of 1 bytes",
        ),
        (
            Shape {
                sector_shift: 200,
                ..of
            },
            "sectors of 0 bytes",
        ),
        (
            Shape {
                never_ready: true,
                ..of
            },
            "did not come back in time",
        ),
        (
            Shape { queues_real: 0, ..of },
            "refused to create a completion queue",
        ),
    ] {
        let error = refusal(shape);
        assert!(error.contains(said), "{error}");
        assert!(error.starts_with("nvme:test: cannot be used: "), "{error}");
    }
}

#[test]
fn absent_device_is_refused() {
    let sim = SimController::new(Shape::default(), 1);
    sim.pull_out();
    let error = try_open(&sim, OPTIONS).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("removed"), "{error}");
}

#[test]
fn huge_limits_are_taken_for_what_the_driver_can_use() {
    let shape = Shape {
        mqes: u16::MAX,
        mdts: 255,
        queues: 0,
        namespaces: u32::MAX,
        ..Shape::default()
    };
    // The double's own limit on transfers would overflow.
    let sim = SimController::new(shape, 1);
    let device = try_open(&sim, OPTIONS).unwrap();
    assert_eq!(device.queue_pairs(), 1);
    sim.reshape(|shape| shape.mdts = 0);
    device.write(0, &[1; 1 << 20]).unwrap();
    assert_clean(&sim);
}

#[test]
fn random_identities_crash_nothing() {
    let mut usable = 0;
    for seed in 0..300 {
        let shape = Shape {
            random_identity: true,
            ..Shape::default()
        };
        let sim = SimController::new(shape, seed);
        usable += usize::from(try_open(&sim, OPTIONS).is_ok());
        assert_clean(&sim);
    }
    assert!(usable < 300);
}

#[test]
fn random_capabilities_crash_nothing() {
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..500u64 {
        let flips = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) & 0xffff_ffff_00ff_0000;
        let shape = Shape {
            cap_flips: flips,
            ..Shape::default()
        };
        let sim = SimController::new(shape, seed);
        // Where it opens the flips were of no matter to the queues: the doorbells' distance is.
        let result: Result<NvmeDevice, _> = try_open(&sim, OPTIONS);
        seen.insert(result.is_ok());
    }
    assert!(seen.contains(&false));
}

#[test]
fn lie_about_success_harms_only_what_it_lied_about() {
    let (sim, device) = super::opened(Shape::default());
    device.write(0, &[1; 8192]).unwrap();
    sim.at(0, Quirk::Lie);
    device.write(0, &[2; 4096]).unwrap();
    let mut back = [0; 8192];
    device.read(0, &mut back).unwrap();
    assert_eq!((back[0], back[8191]), (1, 1));
    assert_clean(&sim);
}

/// Opening sends six commands or more: two identifies, one feature, two for each of four queue pairs.
const ADMIN_COMMANDS: u64 = 11;

#[test]
fn admin_command_that_goes_wrong_is_a_refusal_that_says_so() {
    for at in 0..ADMIN_COMMANDS {
        for (quirk, said) in [
            (Quirk::Drop, "in time"),
            (Quirk::WrongPhase, "in time"),
            (Quirk::WrongId(1), "names no command in flight"),
            (Quirk::WrongQueue, "another queue"),
            (Quirk::HeadPastEnd, "past the queue's end"),
            (Quirk::Garbage, "protocol"),
            (Quirk::Status(0x4002), "refused to"),
            (Quirk::Fatal, "fatal error"),
            (Quirk::Remove, "removed"),
        ] {
            let sim = SimController::new(Shape::default(), at);
            sim.at_admin(at, quirk);
            let opened = try_open(&sim, OPTIONS);
            // A queue pair that is refused is done without, if there is one already.
            let done_without = at >= 5 && matches!(quirk, Quirk::Status(_));
            match opened {
                Ok(device) => assert!(done_without && device.queue_pairs() < 4, "{quirk:?} at {at}"),
                Err(error) => assert!(error.to_string().contains(said), "{quirk:?} at {at}: {error}"),
            }
            assert_clean(&sim);
        }
    }
}

#[test]
fn admin_command_that_goes_wrong_during_a_reset_gives_the_device_up() {
    for at in 0..ADMIN_COMMANDS {
        for quirk in [
            Quirk::Drop,
            Quirk::Garbage,
            Quirk::Status(0x4002),
            Quirk::Fatal,
            Quirk::Lie,
        ] {
            let (sim, device) = super::opened(Shape::default());
            sim.at(0, Quirk::Fatal);
            sim.at_admin(at, quirk);
            let result = device.write(0, &[1; 4096]);
            // A lie about a queue shows only when the queue does not answer; then the next reset mends it.
            if quirk != Quirk::Lie {
                let error = result.unwrap_err().to_string();
                assert!(error.contains("could not be reset"), "{quirk:?} at {at}: {error}");
                assert!(sim.counts().dma_stops >= 1);
            }
            drop(device);
            assert!(
                quirk == Quirk::Lie || sim.violations().is_empty(),
                "{:?}",
                sim.violations()
            );
        }
    }
}
