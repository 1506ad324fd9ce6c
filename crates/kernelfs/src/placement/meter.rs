//! Measures the devices of the tiers: observes the daemon's transfers, and keeps [`Figures`] of each. Decides
//! nothing. Programs that write NVM by themselves are not measured.
//!
//! All transfers of SSD and HDD are measured; of NVM, where a copy takes less than a microsecond, one in
//! [`SHOWN_OF`]. Its figures stand for the others: depth and throughput are multiplied by that.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use varve_format::Tier;
use varve_ipc::Clock;
use varve_media::stats::{Observer, SHOWN_OF, Transfer};
use varve_placement::Op;
use varve_placement::figures::{Figures, Interval, OpFigures, Service};
use varve_store::Store;

/// Time between two ticks of the averages over time.
const TICK_NS: u64 = 100_000_000;

/// What a medium of this kind costs until it is measured: microseconds of a request and of each KiB, for
/// reads and writes.
const fn expected_us(tier: Tier) -> [[f64; 2]; 2] {
    match tier {
        Tier::Nvm => [[0.5, 0.2], [0.5, 0.3]],
        Tier::Ssd => [[80.0, 0.5], [25.0, 0.9]],
        Tier::Hdd => [[10_000.0, 5.0], [10_000.0, 5.0]],
    }
}

/// Requests that a medium of this kind serves at once.
const fn parallel(tier: Tier) -> u32 {
    match tier {
        Tier::Nvm => 4,
        Tier::Ssd => 8,
        Tier::Hdd => 1,
    }
}

#[derive(Debug)]
struct Measured {
    figures: Figures,
    in_flight: u32,
    /// Time of the last change of `in_flight`.
    at_ns: u64,
    /// Since the last tick.
    interval: Interval,
    ticked_ns: u64,
}

/// Figures of one device.
pub(crate) struct Meter {
    clock: Arc<dyn Clock>,
    parallel: u32,
    /// Transfers for which each measured one stands.
    weight: u32,
    measured: Mutex<Measured>,
}

impl Meter {
    fn new(clock: Arc<dyn Clock>, tier: Tier) -> Self {
        let [read, write] = expected_us(tier);
        let now_ns = clock.monotonic_ns();
        let figures = Figures {
            service: Service::probed(read, write),
            ..Figures::default()
        };
        Self {
            clock,
            parallel: parallel(tier),
            weight: if tier == Tier::Nvm { SHOWN_OF } else { 1 },
            measured: Mutex::new(Measured {
                figures,
                in_flight: 0,
                at_ns: now_ns,
                interval: Interval::default(),
                ticked_ns: now_ns,
            }),
        }
    }

    /// Requests that it serves at once.
    pub(super) const fn parallel(&self) -> u32 {
        self.parallel
    }

    /// Has the averages over time follow.
    fn tick(&self) {
        let now_ns = self.clock.monotonic_ns();
        let mut measured = self.measured.lock();
        measured.advance(now_ns, self.parallel, self.weight);
        measured.tick(now_ns, self.parallel);
    }

    /// The figures, and the transfers under way.
    pub(crate) fn figures(&self) -> (Figures, u32) {
        let measured = self.measured.lock();
        (measured.figures.clone(), measured.in_flight)
    }
}

impl Measured {
    /// Adds the time since the last change.
    fn advance(&mut self, now_ns: u64, parallel: u32, weight: u32) {
        let us = now_ns.saturating_sub(self.at_ns) as f64 / 1000.0 * f64::from(weight);
        self.at_ns = self.at_ns.max(now_ns);
        self.interval.depth_us += f64::from(self.in_flight) * us;
        self.interval.busy_us += f64::from(self.in_flight.min(parallel)) * us;
    }

    /// Ends the interval, if it is long enough.
    fn tick(&mut self, now_ns: u64, parallel: u32) {
        let passed_ns = now_ns.saturating_sub(self.ticked_ns);
        if passed_ns < TICK_NS {
            return;
        }
        self.ticked_ns = now_ns;
        let mut interval = std::mem::take(&mut self.interval);
        interval.us = passed_ns as f64 / 1000.0;
        self.figures.tick(&interval, parallel);
    }
}

impl Observer for Meter {
    fn begins(&self) -> u64 {
        let now_ns = self.clock.monotonic_ns();
        let mut measured = self.measured.lock();
        measured.advance(now_ns, self.parallel, self.weight);
        measured.in_flight += 1;
        now_ns
    }

    fn ends(&self, begun: u64, transfer: Transfer, failed: bool) {
        let now_ns = self.clock.monotonic_ns();
        let mut measured = self.measured.lock();
        measured.advance(now_ns, self.parallel, self.weight);
        measured.in_flight = measured.in_flight.saturating_sub(1);
        let took_ns = now_ns.saturating_sub(begun);
        // On a test's clock that stands still, nothing is known.
        if failed || took_ns == 0 {
            return;
        }
        let op = if transfer.reading { Op::Read } else { Op::Write };
        let bytes = u32::try_from(transfer.bytes).unwrap_or(u32::MAX);
        measured.figures.sample(op, bytes, took_ns as f64 / 1000.0);
        let at = usize::from(op == Op::Write);
        let weight = u64::from(self.weight);
        measured.interval.requests[at] += u64::from(transfer.parts) * weight;
        measured.interval.bytes[at] += transfer.bytes * weight;
    }
}

/// Figures of the devices of all tiers.
pub struct Meters {
    tiers: [Arc<Meter>; 3],
    clock: Arc<dyn Clock>,
}

impl Meters {
    /// Measures the devices of a store from now on.
    #[must_use]
    pub fn of(store: &Store, clock: &Arc<dyn Clock>) -> Self {
        let meters = Self::new(clock);
        for tier in Tier::ALL {
            let meter = Arc::clone(&meters.tiers[tier as usize]);
            store.media_stats().tier(tier).set_observer(meter);
        }
        meters
    }

    /// Meters that measure nothing yet.
    pub(super) fn new(clock: &Arc<dyn Clock>) -> Self {
        Self {
            tiers: Tier::ALL.map(|tier| Arc::new(Meter::new(Arc::clone(clock), tier))),
            clock: Arc::clone(clock),
        }
    }

    /// Monotonic time.
    pub(crate) fn now_ns(&self) -> u64 {
        self.clock.monotonic_ns()
    }

    /// Whether a transfer of this tier's device is under way.
    pub(crate) fn is_at_work(&self, tier: Tier) -> bool {
        self.tier(tier).measured.lock().in_flight > 0
    }

    /// Has the averages over time follow.
    pub(crate) fn tick(&self) {
        self.tiers.iter().for_each(|meter| meter.tick());
    }

    /// The device of a tier.
    pub(crate) fn tier(&self, tier: Tier) -> &Meter {
        &self.tiers[tier as usize]
    }
}

/// Response times of requests of similar size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SizeFigures {
    /// Largest bytes of a request; `None`: any larger than those before.
    pub up_to_bytes: Option<u64>,
    /// Average response time, in nanoseconds.
    pub response_ns: u64,
}

/// Measured figures of reads or writes, since the daemon started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectionFigures {
    /// Average time from the beginning of a request to its end, in nanoseconds; `None`: none was measured. A
    /// new request counts for a hundredth.
    pub response_ns: Option<u64>,
    /// The same by size, for sizes that were measured.
    pub by_size: Vec<SizeFigures>,
    /// Time at work on a request of 4 KiB, without the wait for others, in nanoseconds: learned, at first
    /// what media of this kind take.
    pub service_ns: u64,
    /// Requests that were measured: of NVM one in 64.
    pub samples: u64,
}

/// Measured figures of a tier's device. They are lost when the daemon ends.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFigures {
    /// Reads.
    pub read: DirectionFigures,
    /// Writes.
    pub write: DirectionFigures,
    /// Requests under way.
    pub queue: u32,
    /// Average number of requests under way, in thousandths.
    pub depth_thousandths: u64,
    /// Average share of time at work, in thousandths.
    pub busy_thousandths: u64,
    /// Average throughput, in bytes a second.
    pub bytes_per_s: u64,
    /// Average requests a second.
    pub requests_per_s: u64,
}

/// Largest bytes of each size class.
const UP_TO_KIB: [Option<u64>; 5] = [Some(4), Some(16), Some(64), Some(256), None];

impl DirectionFigures {
    fn of(op: Op, figures: &Figures) -> Self {
        let ns = |us: f64| (us * 1000.0) as u64;
        let OpFigures {
            response_us,
            by_class_us,
            ..
        } = figures.of(op);
        let by_size = UP_TO_KIB.iter().zip(by_class_us).filter_map(|(kib, average)| {
            Some(SizeFigures {
                up_to_bytes: kib.map(|kib| kib << 10),
                response_ns: ns(average.get()?),
            })
        });
        Self {
            response_ns: response_us.get().map(ns),
            by_size: by_size.collect(),
            service_ns: ns(figures.service.us(op, 4096.0)),
            samples: response_us.samples(),
        }
    }
}

impl DeviceFigures {
    /// What is shown of a device.
    pub(crate) fn of(meter: &Meter) -> Self {
        let (figures, queue) = meter.figures();
        let thousandths = |value: f64| (value * 1000.0) as u64;
        Self {
            read: DirectionFigures::of(Op::Read, &figures),
            write: DirectionFigures::of(Op::Write, &figures),
            queue,
            depth_thousandths: thousandths(figures.depth),
            busy_thousandths: thousandths(figures.busy.min(1.0)),
            bytes_per_s: figures.bytes_per_s as u64,
            requests_per_s: figures.requests_per_s as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DeviceFigures, Meter};
    use std::sync::Arc;
    use varve_format::Tier;
    use varve_ipc::{Clock, ManualClock};
    use varve_media::stats::{Observer, SHOWN_OF, Transfer};

    const READ: Transfer = Transfer {
        reading: true,
        parts: 2,
        bytes: 8192,
    };

    fn meter(tier: Tier) -> (Meter, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::new(0));
        (Meter::new(Arc::clone(&clock) as Arc<dyn Clock>, tier), clock)
    }

    #[test]
    fn transfers_are_measured_by_direction_and_size_with_the_queue_that_they_make() {
        let (meter, clock) = meter(Tier::Hdd);
        let first = meter.begins();
        clock.advance_ms(10);
        let second = meter.begins();
        clock.advance_ms(10);
        meter.ends(first, READ, false);
        assert_eq!(DeviceFigures::of(&meter).queue, 1);
        clock.advance_ms(80);
        meter.ends(second, READ, true);
        meter.tick();
        let shown = DeviceFigures::of(&meter);
        assert_eq!(shown.read.response_ns, Some(20_000_000));
        assert_eq!(
            (shown.read.samples, shown.read.by_size.len()),
            (1, 1),
            "one has failed"
        );
        assert_eq!(shown.read.by_size[0].up_to_bytes, Some(16 << 10));
        assert_eq!(shown.write.response_ns, None);
        // Of 100 ms 110 request-milliseconds and 100 at work, a fifth of what was before.
        assert_eq!((shown.depth_thousandths, shown.busy_thousandths), (220, 200));
        assert_eq!((shown.bytes_per_s, shown.requests_per_s), (16_384, 4));
    }

    #[test]
    fn measured_transfers_of_nvm_stand_for_others_and_a_clock_that_stands_tells_nothing() {
        let (meter, clock) = meter(Tier::Nvm);
        let begun = meter.begins();
        meter.ends(begun, READ, false);
        assert_eq!(DeviceFigures::of(&meter).read.samples, 0);
        let begun = meter.begins();
        clock.advance_ms(100);
        meter.ends(begun, READ, false);
        meter.tick();
        let shown = DeviceFigures::of(&meter);
        assert_eq!(shown.requests_per_s, 4 * u64::from(SHOWN_OF));
        assert_eq!(shown.read.response_ns, Some(100_000_000));
        assert_eq!(shown.busy_thousandths, 1000);
    }

    #[test]
    fn media_are_expected_to_be_as_fast_as_their_kind_until_they_are_measured() {
        let [nvm, ssd, hdd] = Tier::ALL.map(|tier| DeviceFigures::of(&meter(tier).0));
        assert!(nvm.read.service_ns < ssd.read.service_ns && ssd.read.service_ns < hdd.read.service_ns);
        assert!(nvm.write.service_ns < ssd.write.service_ns && ssd.write.service_ns < hdd.write.service_ns);
    }
}
