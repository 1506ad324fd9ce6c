//! Claims on blocks: gives each block in use one owner, and finds the remains of damaged trees.

use super::{BlockSet, Found, Name, Survey};
use crate::Result;
use crate::pool::Store;
use crate::reader::is_shared;
use std::collections::HashMap;
use varve_format::inode::Content;
use varve_format::{BlockHeader, BlockKind, BlockNo, Extent, ExtentValue, Ino, NodeRef, verify_block};

impl Store {
    /// Claims the blocks of metadata for their owners.
    pub(super) fn claim_metadata(&self, pool: &[BlockNo], survey: &mut Survey) {
        let usable = |block: &BlockNo| {
            let home = block.home();
            home.filter(|(tier, number)| self.layout.usable(*tier, *number))
        };
        let (claims, meta) = (&mut survey.claims, &mut survey.meta);
        for (tier, number) in pool.iter().filter_map(usable) {
            claims[tier as usize].add(number);
            meta[tier as usize].add(number);
        }
        for found in survey.found.values_mut() {
            for block in &found.nodes {
                match usable(block) {
                    Some((tier, number)) if meta[tier as usize].add(number) => {
                        claims[tier as usize].add(number);
                    }
                    _ => {
                        found.tree = Some((format!("block {block} belongs to somebody else"), true));
                    }
                }
            }
        }
    }

    /// Gives data blocks to the files that have them alone. Shared extents are set apart.
    pub(super) fn claim_data(&self, survey: &mut Survey) {
        for found in survey.found.values_mut() {
            let old = std::mem::take(&mut found.extents);
            let (shared, old): (Vec<_>, Vec<_>) = old.into_iter().partition(is_shared);
            found.shared = shared;
            let mut end = 0;
            for extent in old {
                let last = extent.block.0.saturating_add(u64::from(extent.len) - 1);
                let unit = self.layout.unit_blocks(extent.tier);
                let one_unit = extent.block.0.checked_div(unit) == last.checked_div(unit);
                if extent.file_block.0 < end
                    || !self.layout.usable(extent.tier, extent.block.0)
                    || !self.layout.usable(extent.tier, last)
                    || !one_unit
                {
                    found.dropped.push(extent);
                    continue;
                }
                end = extent.end().0;
                // Block by block, because parts of the extent may belong to another owner.
                for at in 0..u64::from(extent.len) {
                    let one = Extent {
                        file_block: varve_format::FileBlock(extent.file_block.0 + at),
                        len: 1,
                        block: BlockNo(extent.block.0 + at),
                        ..extent
                    };
                    if survey.meta[extent.tier as usize].has(one.block.0) {
                        found.dropped.push(one);
                    } else if survey.claims[extent.tier as usize].add(one.block.0) {
                        match found.extents.last_mut() {
                            Some(last) if last.joins(&one) => last.len += 1,
                            _ => found.extents.push(one),
                        }
                    } else {
                        found.copies.push(one);
                    }
                }
            }
        }
    }

    /// Finds leaves of damaged trees that no node points to any more.
    pub(super) fn salvage_leaves(&self, survey: &mut Survey) -> Result<()> {
        let wanted: HashMap<Ino, BlockKind> = survey
            .found
            .iter()
            .filter(|(_, found)| found.tree.as_ref().is_some_and(|(_, lossy)| *lossy))
            .filter_map(|(ino, found)| match found.inode.content {
                Content::File(_) => Some((*ino, BlockKind::ExtentLeaf)),
                Content::Dir(_) => Some((*ino, BlockKind::DirLeaf)),
                _ => None,
            })
            .collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let mut leaves = Vec::new();
        self.scan(survey, |block, bytes| {
            let owner = Ino(BlockHeader::of(bytes).owner.get());
            let fits = wanted
                .get(&owner)
                .is_some_and(|kind| BlockHeader::of(bytes).expect(*kind, owner, block).is_ok());
            if fits && verify_block(bytes).is_ok() {
                leaves.push((owner, block, Box::new(*bytes)));
            }
        })?;
        let hash = varve_format::HashKey(self.layout.sb.dir_hash_key);
        for (owner, block, bytes) in leaves {
            let Some(found) = survey.found.get_mut(&owner) else {
                continue;
            };
            let Ok(node) = NodeRef::open(&bytes) else { continue };
            if node.level() != 0 || node.check().is_err() {
                continue;
            }
            let records: Vec<(u64, Vec<u8>)> = (0..node.count())
                .filter_map(|index| node.record(index).ok().map(|(key, value)| (key, value.to_vec())))
                .collect();
            // The leaf is kept until its records are stored elsewhere.
            if let Some((tier, number)) = block.home() {
                survey.claims[tier as usize].add(number);
                survey.meta[tier as usize].add(number);
            }
            for (key, value) in records {
                if matches!(found.inode.content, Content::Dir(_)) {
                    if let Ok(entry) = varve_format::Dirent::parse(&value)
                        && hash.name_hash(entry.name) == key >> varve_format::ORDINAL_BITS
                        && !found.names.iter().any(|known| known.name == entry.name)
                    {
                        found.names.push(Name {
                            name: entry.name.to_vec(),
                            key: entry.key,
                            kind: entry.kind,
                        });
                    }
                } else if let Ok(extent) = ExtentValue::parse(key, &value) {
                    self.salvage_extent(found, extent, &mut survey.claims);
                }
            }
        }
        Ok(())
    }

    fn salvage_extent(&self, found: &mut Found, extent: Extent, claims: &mut [BlockSet; 3]) {
        let last = extent.block.0.saturating_add(u64::from(extent.len) - 1);
        let free = found
            .extents
            .iter()
            .chain(&found.shared)
            .all(|known| known.end() <= extent.file_block || extent.end() <= known.file_block);
        if free && is_shared(&extent) {
            found.shared.push(extent);
            found.shared.sort_unstable_by_key(|extent| extent.file_block);
            return;
        }
        let usable = self.layout.usable(extent.tier, extent.block.0) && self.layout.usable(extent.tier, last);
        if !free || !usable || (extent.block.0..=last).any(|block| claims[extent.tier as usize].has(block)) {
            return;
        }
        for block in extent.block.0..=last {
            claims[extent.tier as usize].add(block);
        }
        found.extents.push(extent);
        found.extents.sort_unstable_by_key(|extent| extent.file_block);
    }
}
