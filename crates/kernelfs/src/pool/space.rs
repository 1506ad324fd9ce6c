//! Free space of the host's disks. The pool's sparse files may promise more than the host has; this module
//! finds the smaller number, so that a lack of space shows before anything is logged.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use varve_format::{BLOCK_BYTES, Tier};
use varve_media::host::host_capacity;
use varve_store::{SpaceStats, TierStats};

/// Left to the host: growth of logs, footers, blocks that wait to be freed, and reserved blocks that sessions
/// took before space became scarce.
const MARGIN_BYTES: u64 = 96 << 20;

/// A tier that is a sparse file.
#[derive(Debug, Clone)]
struct Sparse {
    tier: Tier,
    path: PathBuf,
}

/// The sparse files of a pool.
#[derive(Debug, Clone, Default)]
pub struct HostSpace {
    files: Vec<Sparse>,
}

impl HostSpace {
    /// Starts without sparse files.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Watches a tier if it is a plain file.
    pub fn watch(&mut self, tier: Tier, path: PathBuf) {
        if std::fs::metadata(&path).is_ok_and(|meta| meta.is_file()) {
            self.files.push(Sparse { tier, path });
        }
    }

    /// Returns the blocks that can still be written, at most the pool's own free blocks.
    #[must_use]
    pub fn usable_blocks(&self, stats: &SpaceStats) -> u64 {
        let mut usable = 0_u64;
        for tier in Tier::ALL {
            if !self.files.iter().any(|file| file.tier == tier) {
                usable += stats.tiers[tier as usize].free;
            }
        }
        // Files on one host file system share its free space.
        let mut hosts: Vec<(u64, u64, u64, u64)> = Vec::new();
        for of in Tier::ALL {
            let tier = &stats.tiers[of as usize];
            // Those of one tier count as one, on the host of the first.
            let files = self.files.iter().filter(|file| file.tier == of);
            let mut files = files.filter_map(|file| Some((file, std::fs::metadata(&file.path).ok()?)));
            let Some((file, meta)) = files.next() else {
                continue;
            };
            let size = |meta: &std::fs::Metadata| [meta.len(), meta.blocks() * 512].map(|n| n / BLOCK_BYTES);
            let [blocks, allocated] = files.fold(size(&meta), |[blocks, allocated], (_, meta)| {
                let [more, given] = size(&meta);
                [blocks + more, allocated + given]
            });
            let slack = slack(tier, blocks, allocated);
            match hosts.iter_mut().find(|host| host.0 == meta.dev()) {
                Some(host) => {
                    host.1 += tier.free;
                    host.2 += slack;
                }
                None => {
                    let available = host_capacity(&file.path).map_or(0, |space| space.available_bytes);
                    let available = available.saturating_sub(MARGIN_BYTES) / BLOCK_BYTES;
                    hosts.push((meta.dev(), tier.free, slack, available));
                }
            }
        }
        for (_, free, slack, available) in hosts {
            usable += free.min(slack + available);
        }
        usable
    }

    /// Returns the blocks that the host can still give to one tier's file, less the margin; no bound for a
    /// tier that is not sparse.
    #[must_use]
    pub fn room(&self, tier: Tier) -> u64 {
        let Some(file) = self.files.iter().find(|file| file.tier == tier) else {
            return u64::MAX;
        };
        host_capacity(&file.path).map_or(0, |space| {
            space.available_bytes.saturating_sub(MARGIN_BYTES) / BLOCK_BYTES
        })
    }

    /// Returns the blocks that the pool counts as free though its host cannot hold them.
    #[must_use]
    pub fn missing_blocks(&self, stats: &SpaceStats) -> u64 {
        let free: u64 = stats.tiers.iter().map(|tier| tier.free).sum();
        free.saturating_sub(self.usable_blocks(stats))
    }
}

/// Returns the free blocks that the host has already given to the tier's file, which has `file` blocks,
/// `allocated` of them on the host. Blocks for tables and footers do not count: data cannot use them.
fn slack(tier: &TierStats, file: u64, allocated: u64) -> u64 {
    let tables = file.saturating_sub(tier.total);
    let used = tier.total.saturating_sub(tier.free);
    allocated.saturating_sub(used + tables).min(tier.free)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{HostSpace, slack};
    use varve_format::{BLOCK_BYTES, Tier};
    use varve_media::host::host_capacity;
    use varve_store::{SpaceStats, TierStats};

    #[test]
    fn free_space_is_bounded_by_the_host_when_files_are_sparse() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hdd.img");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let mut space = HostSpace::new();
        space.watch(Tier::Hdd, path);
        let mut stats = SpaceStats::default();
        stats.tiers[0].free = 100;
        stats.tiers[2].total = 1 << 50;
        stats.tiers[2].free = 1 << 50;
        let host = host_capacity(dir.path()).unwrap();
        let usable = space.usable_blocks(&stats);
        assert!(
            usable >= 100 && usable <= 100 + host.total_bytes / BLOCK_BYTES,
            "{usable}"
        );
        assert_eq!(space.missing_blocks(&stats), 100 + (1 << 50) - usable);
        stats.tiers[2].free = 1;
        stats.tiers[2].total = 1;
        assert!(space.usable_blocks(&stats) <= 101);
        assert_eq!(HostSpace::new().missing_blocks(&stats), 0);
    }

    #[test]
    fn what_tables_have_of_a_sparse_file_is_no_room_for_data() {
        // 8 blocks of tables.
        let tier = TierStats {
            total: 56,
            free: 20,
            ..TierStats::default()
        };
        assert_eq!(slack(&tier, 64, 40), 0, "36 of data, and 4 of tables");
        assert_eq!(slack(&tier, 64, 47), 3);
        assert_eq!(slack(&tier, 64, 64), 20, "all is there");
    }
}
