//! Trackers over a kernel, and the choice among them.

mod damon;
mod idle;
mod record;
mod written;

pub use damon::{ADMIN as DAMON_ADMIN, Damon, DamonConfig, available as damon_available};
pub use idle::{BITMAP as IDLE_BITMAP, IdleBitmap};
pub use record::Recorder;
pub use written::Written;

use crate::interfaces::{Touch, Tracker, TrackerError, TrackerInfo};
use crate::types::PageKey;

/// A tracker without observations, used when the kernel offers no source.
#[derive(Debug)]
pub struct Blind;

impl Tracker for Blind {
    fn info(&self) -> TrackerInfo {
        TrackerInfo {
            name: "none",
            resolution_bytes: 0,
            sees_reads: false,
            tells_writes: false,
            note:
                "no source of access bits: huge pages are given by utilisation alone, tiers stay as they are"
                    .to_owned(),
        }
    }

    fn observe(&mut self, pages: &[PageKey], out: &mut Vec<Touch>) -> Result<(), TrackerError> {
        out.extend(pages.iter().map(|_| Touch::Unknown));
        Ok(())
    }
}
