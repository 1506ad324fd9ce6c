#![allow(clippy::unwrap_used)]
use super::*;
use varve_format::{Generation, Ino, InodeKey};

fn step(ino: u64, cause: Cause) -> Step {
    let key = InodeKey {
        ino: Ino(ino),
        generation: Generation(1),
    };
    Step {
        unit: UnitId { key, index: 0 },
        act: Act::Move,
        from: DeviceId(0),
        to: DeviceId(1),
        cause,
        reason: "a test".into(),
    }
}

const MIB: u64 = 1 << 20;

fn mover(in_flight: usize) -> Mover {
    Mover::new(Limits {
        bytes_per_s: MIB,
        burst_bytes: 2 * MIB,
        in_flight,
        queued: 4,
    })
}

#[test]
fn mover_starts_by_cause_then_by_age() {
    let mut mover = mover(9);
    for (ino, cause) in [
        (1, Cause::Cold),
        (2, Cause::Hot),
        (3, Cause::Asked),
        (4, Cause::Hot),
    ] {
        assert!(mover.offer(step(ino, cause), 1));
    }
    let order: Vec<_> = std::iter::from_fn(|| mover.next(0, |_| false))
        .map(|(_, step, _)| step.unit.key.ino.0)
        .collect();
    assert_eq!(order, [3, 2, 4, 1]);
}

#[test]
fn mover_keeps_its_rate_and_its_bound_in_flight() {
    let mut mover = mover(1);
    (1..=4).for_each(|ino| assert!(mover.offer(step(ino, Cause::Hot), MIB)));
    let (first, ..) = mover.next(0, |_| false).unwrap();
    assert!(mover.next(0, |_| false).is_none(), "one at a time");
    mover.fail(first);
    assert!(
        mover
            .next(0, |_| false)
            .is_some_and(|(no, ..)| mover.fail(no).is_some())
    );
    assert!(mover.next(999, |_| false).is_none(), "no tokens are left");
    assert!(mover.next(1000, |_| false).is_some());
}

#[test]
fn rate_loses_nothing_to_rounding_when_asked_often() {
    let mut mover = Mover::new(Limits {
        bytes_per_s: 300,
        burst_bytes: 1000,
        in_flight: 1,
        queued: 4,
    });
    mover.tokens = 0;
    (1..=1000).for_each(|now_ms| mover.fill(now_ms));
    assert_eq!(mover.tokens, 300);
}

#[test]
fn full_queue_refuses_the_worst() {
    let mut mover = mover(1);
    (1..=4).for_each(|ino| assert!(mover.offer(step(ino, Cause::Load), 1)));
    assert!(!mover.offer(step(5, Cause::Cold), 1), "a worse one is refused");
    assert!(
        mover.offer(step(6, Cause::Asked), 1),
        "a better one takes its place"
    );
    assert_eq!(mover.len(), (0, 4));
    assert!(
        !mover.has(step(4, Cause::Load).unit),
        "the youngest of the worst went"
    );
}

#[test]
fn unit_has_one_step_and_a_better_cause_takes_its_place() {
    let mut mover = mover(2);
    assert!(mover.offer(step(1, Cause::Cold), 1));
    assert!(!mover.offer(step(1, Cause::Cold), 1));
    assert!(mover.offer(step(1, Cause::Asked), 1));
    let (no, started, _) = mover.next(0, |_| false).unwrap();
    assert_eq!(started.cause, Cause::Asked);
    assert!(!mover.offer(step(1, Cause::Asked), 1), "it is under way");
    assert_eq!(mover.fail(no), Some(started));
    assert!(mover.offer(step(1, Cause::Cold), 1));
}

#[test]
fn step_goes_through_its_parts_and_is_counted_at_the_commit_only() {
    let mut mover = mover(1);
    mover.offer(step(1, Cause::Hot), 100);
    let (no, _, part) = mover.next(0, |_| false).unwrap();
    assert_eq!(part, Part::Read);
    assert_eq!(mover.advance(no).unwrap().1, Some(Part::Write));
    assert_eq!(mover.advance(no).unwrap().1, Some(Part::Commit));
    assert_eq!(mover.tallies().count(), 0);
    assert_eq!(mover.advance(no).unwrap().1, None);
    assert!(mover.advance(no).is_none());
    let (_, _, cause, tally) = mover.tallies().next().unwrap();
    assert_eq!(
        (cause, tally.steps, tally.bytes, tally.failed),
        (Cause::Hot, 1, 100, 0)
    );
}

#[test]
fn data_in_memory_is_not_read_and_a_drop_does_no_io() {
    let mut mover = mover(2);
    mover.offer(step(1, Cause::Hot), 1);
    let drop = Step {
        act: Act::Drop,
        ..step(2, Cause::Load)
    };
    mover.offer(drop, 1);
    assert_eq!(mover.next(0, |_| true).unwrap().2, Part::Write);
    assert_eq!(mover.next(0, |_| true).unwrap().2, Part::Commit);
}

#[test]
fn lost_device_takes_its_waiting_steps_along() {
    let mut mover = mover(1);
    mover.offer(step(1, Cause::Hot), 1);
    mover.offer(
        Step {
            from: DeviceId(2),
            to: DeviceId(3),
            ..step(2, Cause::Hot)
        },
        1,
    );
    mover.device_lost(DeviceId(1));
    assert_eq!(mover.len(), (0, 1));
    assert!(!mover.has(step(1, Cause::Hot).unit));
}
