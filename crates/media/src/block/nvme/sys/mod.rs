//! Memory and registers of real devices. The only part of the driver with unsafe code: raw copies and single
//! loads and stores.

mod pages;
mod uio;
mod vfio;
mod window;

use std::time::Duration;

pub(super) use uio::UioBus;
pub(super) use vfio::VfioBus;

/// How long a waiting thread spins, and how long it then only yields, before it sleeps between polls.
const SPIN: Duration = Duration::from_micros(20);
const YIELD: Duration = Duration::from_millis(1);
const NAP: Duration = Duration::from_micros(50);

/// Passes the time between two polls of a completion queue.
fn pause(waited: Duration) {
    if waited < SPIN {
        std::hint::spin_loop();
    } else if waited < YIELD {
        std::thread::yield_now();
    } else {
        std::thread::sleep(NAP);
    }
}

/// Command register of a PCI function's configuration space.
const PCI_COMMAND: u64 = 4;
/// The function answers accesses to its memory.
const PCI_MEMORY: u16 = 1 << 1;
/// The function may read and write memory.
const PCI_BUS_MASTER: u16 = 1 << 2;
