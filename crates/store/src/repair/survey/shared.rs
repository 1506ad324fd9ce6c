//! The shared runs of a damaged pool: those that can still be read, and how many extents name each.

use super::{Survey, Walk, check_cold_nodes};
use crate::Result;
use crate::check::shared::References;
use crate::pool::Store;
use crate::reader::{MetaReader, POOL_INO, View, is_shared};
use crate::tx::shared::SHARED;
use varve_format::features::Incompat;
use varve_format::{
    BlockHeader, BlockKind, BlockNo, NodeRef, SharedRoot, SharedRun, SharedValue, verify_block,
};
use zerocopy::FromBytes;

/// The shared runs that a survey found.
#[derive(Debug, Default)]
pub(in crate::repair) struct FoundRuns {
    /// Runs in the tree; sound ones, ascending.
    stored: Vec<SharedRun>,
    /// The runs by the extents that name them: the tree that there should be.
    pub(in crate::repair) wanted: Vec<SharedRun>,
    /// Why the tree must be made again; and whether runs may be missing.
    pub(in crate::repair) fault: Option<(String, bool)>,
    nodes: Vec<BlockNo>,
}

impl FoundRuns {
    /// Blocks of the tree.
    pub(super) fn nodes(&self) -> &[BlockNo] {
        &self.nodes
    }

    /// Whether the tree is as the extents say.
    pub(in crate::repair) fn is_sound(&self) -> bool {
        self.fault.is_none() && self.stored == self.wanted
    }

    /// Why the tree is made again.
    pub(in crate::repair) fn why(&self) -> &str {
        self.fault.as_ref().map_or("their counts", |(what, _)| what)
    }
}

impl Store {
    /// Reads the tree of the shared runs.
    pub(super) fn find_runs<V: View>(&self, reader: &MetaReader<'_, V>, survey: &mut Survey) {
        if self.layout.features().incompat.get() & Incompat::SHARED_EXTENTS.bits() == 0 {
            return;
        }
        let mut walk = Walk::new();
        let runs = &mut survey.runs.stored;
        match survey
            .state
            .as_ref()
            .map(|state| SharedRoot::read_from_bytes(&state.shared))
        {
            Some(Ok(root)) => SHARED.check(reader.view, &root, &mut walk, |run| runs.push(run)),
            Some(Err(_)) => walk.note("root of the shared runs".into(), true),
            None => walk.note("pool state".into(), true),
        }
        check_cold_nodes(reader, &mut walk, 0);
        survey.runs.fault = walk.fault;
        survey.runs.nodes = walk.nodes;
    }

    /// Finds leaves of a damaged tree again, and gives the runs their blocks: parts whose blocks are metadata
    /// or another run's are left out.
    pub(super) fn claim_runs(&self, survey: &mut Survey) -> Result<()> {
        // Also after a repair that was cut off between the pool state and this tree.
        let known = References::of(survey.runs.stored.clone());
        let extents = survey.found.values().flat_map(|found| &found.extents);
        let mut parts = extents
            .filter(|extent| is_shared(extent))
            .flat_map(|extent| known.parts(extent));
        if parts.any(|(_, has_run)| !has_run) {
            survey.runs.fault = Some(("numbers that files name are in no run".into(), true));
        }
        if survey.runs.fault.as_ref().is_some_and(|(_, lossy)| *lossy) {
            self.salvage_runs(survey)?;
        }
        let mut runs = std::mem::take(&mut survey.runs.stored);
        runs.sort_by_key(|run| run.first);
        let mut end = 0;
        let mut sound: Vec<SharedRun> = Vec::new();
        let mut cut = false;
        for run in runs {
            let Some(run) = run.clip(end, run.end()) else {
                cut = true;
                continue;
            };
            end = run.end();
            for at in 0..u64::from(run.len) {
                let one = run.clip(run.first + at, run.first + at + 1);
                let Some(one) = one.filter(|one| self.layout.usable(one.tier, one.block.0)) else {
                    cut = true;
                    continue;
                };
                let tier = one.tier as usize;
                if survey.meta[tier].has(one.block.0) || !survey.claims[tier].add(one.block.0) {
                    cut = true;
                    continue;
                }
                match sound.last_mut() {
                    Some(last) if last.joins(&one) => last.len += 1,
                    _ => sound.push(one),
                }
            }
        }
        if cut && survey.runs.fault.is_none() {
            survey.runs.fault = Some(("blocks of shared runs are others'".into(), true));
        }
        survey.runs.stored = sound;
        Ok(())
    }

    /// Leaves of the tree of the shared runs that no node leads to any more.
    fn salvage_runs(&self, survey: &mut Survey) -> Result<()> {
        let mut leaves = Vec::new();
        self.scan(survey, |block, bytes| {
            let fits = BlockHeader::of(bytes)
                .expect(BlockKind::SharedLeaf, POOL_INO, block)
                .is_ok();
            if fits && verify_block(bytes).is_ok() {
                leaves.push((block, Box::new(*bytes)));
            }
        })?;
        for (block, bytes) in leaves {
            let Ok(node) = NodeRef::open(&bytes) else { continue };
            if node.level() != 0 || node.check().is_err() {
                continue;
            }
            // It stays as it is until its runs are somewhere else.
            if let Some((tier, number)) = block.home() {
                survey.claims[tier as usize].add(number);
                survey.meta[tier as usize].add(number);
            }
            let records = (0..node.count()).filter_map(|index| node.record(index).ok());
            for run in records.filter_map(|(key, value)| SharedValue::parse(key, value).ok()) {
                let known = |known: &SharedRun| known.first < run.end() && run.first < known.end();
                if !survey.runs.stored.iter().any(known) {
                    survey.runs.stored.push(run);
                }
            }
        }
        Ok(())
    }

    /// Counts the extents that name each run. Parts of extents whose numbers are in no run are dropped.
    pub(super) fn count_references(survey: &mut Survey) {
        let mut references = References::of(survey.runs.stored.clone());
        for found in survey.found.values_mut() {
            let mut end = 0;
            for extent in std::mem::take(&mut found.shared) {
                if extent.file_block.0 < end {
                    found.dropped.push(extent);
                    continue;
                }
                end = extent.end().0;
                for (part, has_run) in references.parts(&extent) {
                    if has_run && references.count(&part).is_ok() {
                        found.shared.push(part);
                    } else {
                        found.dropped.push(part);
                    }
                }
            }
        }
        survey.runs.wanted = references.counted();
    }
}
