//! Repairs a damaged pool as far as possible, and reports losses. Owns the order of the passes; works on a
//! stopped pool only.
//!
//! A pass first surveys everything (`survey.rs`: changes nothing), then mends from the bottom up: fixed
//! blocks and bitmaps, the inode file and images, trees (`mend.rs`), then names and link counts (`names.rs`),
//! then data (`data.rs`). Each step is a transaction of its own, and each leaves a pool that another repair
//! can continue with. Content that is still to be saved is never overwritten: new blocks come only from space
//! that neither a bitmap nor a structure claims, and space is freed only when a pass found nothing else to
//! do.

mod data;
mod mend;
mod names;
mod open;
mod survey;

use crate::check::Finding;
use crate::{Devices, Result, Store};
use std::collections::BTreeMap;
use varve_format::{Ino, TimeNs};

/// Passes after which a repair gives up; three suffice for all known damage.
const PASSES_MAX: u32 = 8;

/// Options of a repair.
#[derive(Debug, Clone, Copy, Default)]
pub struct RepairOptions {
    /// Time of inodes that the repair makes.
    pub now_ns: TimeNs,
    /// Goes on with devices that seem to be another pool's.
    pub any_device: bool,
}

/// A part of the pool that is lost, or cannot be trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// Inode; 0: not of one file.
    pub ino: Ino,
    /// A path that leads or led to it, if one is known.
    pub path: Option<Vec<u8>>,
    /// First byte, and the byte after the last; `None`: not a range of data.
    pub bytes: Option<(u64, u64)>,
    /// Description of the loss.
    pub what: String,
}

/// The result of a repair.
#[derive(Debug, Clone, Default)]
pub struct RepairReport {
    /// Repairs made, in the order of work.
    pub mended: Vec<String>,
    /// Lost or doubtful parts of the pool.
    pub losses: Vec<Loss>,
    /// Findings that remain.
    pub left: Vec<Finding>,
}

impl RepairReport {
    fn mended(&mut self, what: impl Into<String>) {
        self.mended.push(what.into());
    }

    fn lost(&mut self, ino: Ino, bytes: Option<(u64, u64)>, what: impl Into<String>) {
        let loss = Loss {
            ino,
            path: None,
            bytes,
            what: what.into(),
        };
        // Adjacent ranges are joined.
        if let Some(last) = self.losses.last_mut()
            && let (Some((_, end)), Some((from, to))) = (&mut last.bytes, bytes)
            && *end == from
            && (last.ino, &last.what) == (loss.ino, &loss.what)
        {
            *end = to;
            return;
        }
        if !self.losses.contains(&loss) {
            self.losses.push(loss);
        }
    }
}

impl Store {
    /// Repairs the pool on `devices`, which must not be in use. Durable when this returns. If it is
    /// interrupted at any point, the next repair continues.
    ///
    /// # Errors
    /// No superblock, a newer version, a journal of another pool, devices that do not fit, no space for
    /// blocks that must be made new, or a device failed. Repairs made before stay.
    pub fn repair(devices: &Devices, options: RepairOptions) -> Result<RepairReport> {
        let mut report = RepairReport::default();
        let mut paths = BTreeMap::new();
        for pass in 1..=PASSES_MAX {
            let store = Self::open_damaged(devices, options.any_device, &mut report)?;
            let before = report.mended.len();
            store.mend_pass(options, &mut report, &mut paths)?;
            store.checkpoint()?;
            drop(store);
            // A fresh check decides whether the repair is done.
            report.left = match Self::open(devices.clone(), crate::OpenOptions::default()) {
                Ok((store, _)) => store.check()?,
                Err(error) if error.is_device() => return Err(error),
                Err(error) => vec![Finding::Table {
                    what: error.to_string(),
                }],
            };
            if report.left.is_empty() || pass > 1 && report.mended.len() == before {
                break;
            }
        }
        for loss in &mut report.losses {
            loss.path = loss.path.take().or_else(|| paths.get(&loss.ino).cloned());
        }
        Ok(report)
    }

    fn mend_pass(
        &self,
        options: RepairOptions,
        report: &mut RepairReport,
        paths: &mut BTreeMap<Ino, Vec<u8>>,
    ) -> Result<()> {
        let survey = self.survey()?;
        survey.note_paths(paths);
        self.mend_structures(&survey, options, report)?;
        drop(survey);
        self.mend_names(options, report, paths)?;
        self.condemn_data(report)
    }
}
