//! Slabs in a survey: which rows stay, and the blocks that they hold. What a file has is the file's.

use super::Survey;
use crate::pool::Store;
use std::collections::{BTreeMap, BTreeSet};
use varve_format::{LeaseNo, Tier};

/// The slab rows of a damaged pool.
#[derive(Debug, Default)]
pub(in crate::repair) struct FoundSlabs {
    /// Rows that go, by their places in the grant table, and why.
    pub(in crate::repair) bad: BTreeMap<u64, (LeaseNo, String)>,
    /// Units of slabs that stay.
    pub(in crate::repair) units: BTreeSet<(Tier, u64)>,
    /// Blocks of NVM in slabs that stay.
    pub(in crate::repair) nvm: BTreeSet<u64>,
}

impl Store {
    /// Claims the blocks of the slabs that stay. A program chose their bytes, so nothing is to be found there.
    pub(super) fn claim_slabs(&self, survey: &mut Survey) {
        // Rows in a damaged block of the table are lost.
        let rows = self.slab_rows().unwrap_or_default();
        for ((slot, row), fault) in rows.iter().zip(self.slab_faults(&rows)) {
            let unit = row.block.checked_div(self.layout.unit_blocks(row.tier));
            let known = unit.is_some_and(|unit| survey.slabs.units.contains(&(row.tier, unit)));
            let claims = &survey.claims[row.tier as usize];
            let fault = fault.or_else(|| {
                let mut held = self.held_by(row, unit);
                held.any(|block| !known && claims.has(block))
                    .then(|| "a file has some of its blocks".to_owned())
            });
            if let Some(what) = fault {
                survey.slabs.bad.insert(*slot, (row.lease, what));
                continue;
            }
            for block in self.held_by(row, unit) {
                survey.claims[row.tier as usize].add(block);
                if row.tier == Tier::Nvm {
                    survey.slabs.nvm.insert(block);
                }
            }
            survey.slabs.units.extend(unit.map(|unit| (row.tier, unit)));
        }
    }
}
