//! Writes every touch that a tracker observed to a trace, for replay in the simulator.

use std::io::Write;

use crate::interfaces::{Touch, Tracker, TrackerError, TrackerInfo};
use crate::types::PageKey;

/// Most touches written to one trace file: about 4 GiB of text.
const MOST: u64 = 200_000_000;

/// A tracker that forwards and records the observations of another one.
pub struct Recorder<W: Write> {
    inner: Box<dyn Tracker>,
    out: W,
    written: u64,
}

impl<W: Write> std::fmt::Debug for Recorder<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder")
            .field("written", &self.written)
            .finish_non_exhaustive()
    }
}

impl<W: Write> Recorder<W> {
    /// Records the observations of `inner`. The trace is complete when this is dropped.
    pub fn new(inner: Box<dyn Tracker>, mut out: W) -> std::io::Result<Self> {
        writeln!(out, "# varve page trace v1: process page r|w")?;
        Ok(Self {
            inner,
            out,
            written: 0,
        })
    }
}

impl<W: Write> Tracker for Recorder<W> {
    fn info(&self) -> TrackerInfo {
        self.inner.info()
    }

    fn observe(&mut self, pages: &[PageKey], out: &mut Vec<Touch>) -> Result<(), TrackerError> {
        let from = out.len();
        self.inner.observe(pages, out)?;
        for (page, touch) in pages.iter().zip(&out[from..]) {
            let kind = match touch {
                Touch::Read => 'r',
                Touch::Written => 'w',
                Touch::Idle | Touch::Unknown => continue,
            };
            if self.written >= MOST {
                return Ok(());
            }
            self.written += 1;
            writeln!(self.out, "{} {:x} {kind}", page.proc.0, page.page.0).map_err(|e| {
                TrackerError::Unusable {
                    tracker: "trace",
                    what: format!("cannot write the trace: {e}"),
                }
            })?;
        }
        Ok(())
    }
}
