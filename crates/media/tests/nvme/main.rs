//! The NVMe driver over a simulated controller: what a good device is asked for, what a bad one can do, and
//! what is left after each.

#![allow(clippy::unwrap_used)]

#[path = "../doubles/mod.rs"]
mod doubles;
mod faults;
mod hostile;
mod plain;
mod random;

use std::sync::Arc;
use std::time::Duration;

use doubles::nvme::{Shape, SimController};
use varve_media::MediaError;
use varve_media::block::nvme::{Bus, NvmeDevice, NvmeOptions};

/// Short limits, since every time-out is waited for.
const OPTIONS: NvmeOptions = NvmeOptions {
    queue_pairs: 4,
    entries: 32,
    io_timeout: Duration::from_secs(2),
    admin_timeout: Duration::from_secs(2),
};

fn try_open(sim: &Arc<SimController>, options: NvmeOptions) -> Result<NvmeDevice, MediaError> {
    NvmeDevice::open(Arc::clone(sim) as Arc<dyn Bus>, "nvme:test".into(), 1, options)
}

/// A controller and its driver.
fn opened(shape: Shape) -> (Arc<SimController>, NvmeDevice) {
    let sim = SimController::new(shape, 7);
    let device = try_open(&sim, OPTIONS).unwrap();
    (sim, device)
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at * 7 + at / 4096 + seed * 31) as u8)
        .collect()
}

/// The driver gave the device no address and no doorbell that it should not have.
fn assert_clean(sim: &SimController) {
    assert_eq!(sim.violations(), Vec::<String>::new());
}
