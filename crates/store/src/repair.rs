//! Mending a damaged pool: what can be put right is, what is lost is named. Owns the order of the passes; a
//! stopped pool only.
//!
//! A pass looks at everything first (`survey.rs`: changes nothing), then mends from the bottom up: fixed
//! blocks and bitmaps, the inode file and images, trees (`mend.rs`), then names and link counts (`names.rs`),
//! then data (`data.rs`). Each step is a transaction of its own, and each leaves a pool that another repair
//! can take up: nothing that is still to be saved is written over, because new blocks come only from space
//! that neither a bitmap nor a structure claims, and space is set free only when a pass found nothing else to
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

/// Passes after which a repair gives up; three do for what is known.
const PASSES_MAX: u32 = 8;

/// How a repair goes about it.
#[derive(Debug, Clone, Copy, Default)]
pub struct RepairOptions {
    /// Time of what is made new.
    pub now_ns: TimeNs,
}

/// Something that cannot be had back, or cannot be trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// Inode; 0: not of one file.
    pub ino: Ino,
    /// A path that leads or led to it, if one is known.
    pub path: Option<Vec<u8>>,
    /// First byte, and the byte after the last; `None`: not a range of data.
    pub bytes: Option<(u64, u64)>,
    /// What happened to it.
    pub what: String,
}

/// What a repair found and did.
#[derive(Debug, Clone, Default)]
pub struct RepairReport {
    /// What was mended, in the order of work.
    pub mended: Vec<String>,
    /// What was lost or is doubtful.
    pub losses: Vec<Loss>,
    /// What is still wrong.
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
        // Neighbours become one.
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
    /// Mends the pool on `devices`, which nobody else uses. Durable when this returns; cut off at any point,
    /// the next repair goes on.
    ///
    /// # Errors
    /// No superblock, a newer version, a journal of another pool, devices that do not fit, no space for what
    /// must be made new, or a device failed. What was mended before stays.
    pub fn repair(devices: &Devices, options: RepairOptions) -> Result<RepairReport> {
        let mut report = RepairReport::default();
        let mut paths = BTreeMap::new();
        for pass in 1..=PASSES_MAX {
            let store = Self::open_damaged(devices, &mut report)?;
            let before = report.mended.len();
            store.mend_pass(options, &mut report, &mut paths)?;
            store.checkpoint()?;
            drop(store);
            // Only what a fresh look confirms is done.
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
