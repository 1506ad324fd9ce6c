//! The probe of a device when it is added: a few requests, one at a time.

use crate::Op;
use crate::figures::Service;
use crate::sim::device::{Device, Io, Model};

/// Requests of each kind.
const TRIES: u64 = 32;

/// Service times from random requests of 4 and 64 KiB.
pub(super) fn service(model: &Model, rng: &mut fastrand::Rng) -> Service {
    let [read, write] = [Op::Read, Op::Write].map(|op| {
        let small = mean_us(model, op, 4096, rng);
        let large = mean_us(model, op, 65536, rng);
        let kib_us = ((large - small) / 60.0).max(small / 1000.0);
        [(small - 4.0 * kib_us).max(small / 10.0), kib_us]
    });
    Service::probed(read, write)
}

fn mean_us(model: &Model, op: Op, bytes: u32, rng: &mut fastrand::Rng) -> f64 {
    let mut device = Device::new(model.clone());
    let (mut now_ns, mut started) = (0, Vec::new());
    for tag in 0..TRIES {
        // Within the part that data occupies at first.
        let at = rng.u64(0..model.total_bytes / 65536 / 4) * 65536;
        let io = Io {
            tag: tag as usize,
            op,
            at,
            bytes,
            background: false,
            since_ns: now_ns,
        };
        device.submit(io, now_ns);
        device.start(now_ns, rng, &mut started);
        for piece in started.drain(..) {
            now_ns = now_ns.max(piece.ends_ns);
            device.ended(false, true, now_ns);
        }
    }
    now_ns as f64 / 1000.0 / TRIES as f64
}
