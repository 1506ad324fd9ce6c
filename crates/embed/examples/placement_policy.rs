//! A placement policy of one's own: small files on NVM, large ones on the SSD.
//!
//! All that a policy needs is the trait [`Placement`]; the line that registers it is `parts.placement = …`
//! below. `cargo run -p varve-embed --example placement_policy` writes one file of each kind and shows where
//! it lies.

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use varve_embed::SimPool;
use varve_format::{FileBlock, InodeKey, Tier};
use varve_ipc::{Cred, SystemClock};
use varve_kernelfs::Config;
use varve_kernelfs::placement::{At, Catalog, Cause, Job, Move, Placement, Use, Written};
use varve_libfs::OpenFlags;
use varve_media::sim::SimWorld;
use varve_store::{DataTarget, SpaceStats};

/// Bytes from which on a file is large.
const LARGE_BYTES: u64 = 256 << 10;
/// Bytes of a block.
const BLOCK_BYTES: u64 = 4096;

/// Puts the data of large files on the SSD, and moves what they got on NVM while they were small there, too.
#[derive(Default)]
struct BySize {
    /// Lengths seen, in blocks.
    blocks: Mutex<HashMap<InodeKey, u64>>,
}

impl BySize {
    fn is_large(&self, key: InodeKey) -> bool {
        let blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks
            .get(&key)
            .is_some_and(|blocks| blocks * BLOCK_BYTES >= LARGE_BYTES)
    }
}

impl Placement for BySize {
    fn target(&self, data: &Written, _: &SpaceStats) -> DataTarget {
        let large = data.bytes >= LARGE_BYTES || self.is_large(data.key);
        DataTarget::prefer(if large { Tier::Ssd } else { Tier::Nvm })
    }

    fn used(&self, key: InodeKey, from: FileBlock, blocks: u64, how: Use) {
        if how == Use::Written {
            let mut known = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
            let known = known.entry(key).or_default();
            *known = (*known).max(from.0 + blocks);
        }
    }

    fn plan(&self, _: &SpaceStats, catalog: &dyn Catalog, most: u64) -> Vec<Job> {
        let known: Vec<InodeKey> = self
            .blocks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .keys()
            .copied()
            .collect();
        let mut left = most;
        let mut moves = Vec::new();
        for key in known.into_iter().filter(|key| self.is_large(*key)) {
            for part in catalog.extents(key, FileBlock(0), 128) {
                let extent = part.extent;
                let len = u64::from(extent.len).min(left) as u32;
                if extent.tier == Tier::Nvm && len > 0 {
                    moves.push(Move {
                        at: At::of(key, &part),
                        len,
                        block: extent.block,
                    });
                    left -= u64::from(len);
                }
            }
        }
        if moves.is_empty() {
            return Vec::new();
        }
        vec![Job {
            from: Tier::Nvm,
            to: Tier::Ssd,
            cause: Cause::Full,
            of: None,
            moves,
            waiting: None,
        }]
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    run()
}

/// Writes a small and a large file, and fails when they do not lie where the policy puts them.
pub fn run() -> Result<(), Box<dyn Error>> {
    let (world, pool, user) = (SimWorld::new(), SimPool::default(), Cred::root());
    pool.mkfs(&world)?;
    let (mut parts, _) = pool.parts(&world, Config::default(), Arc::new(SystemClock))?;
    parts.placement = Box::new(BySize::default());
    let pool = varve_embed::Embedded::open(parts)?;
    let fs = pool.mount()?;
    let used = || -> Vec<u64> {
        pool.kernel()
            .status()
            .tiers
            .iter()
            .map(|tier| tier.used_bytes)
            .collect()
    };
    let mut before = used();
    for (name, len, tier) in [("small", 64_usize << 10, 0), ("large", 4 << 20, 1)] {
        let attr = fs.create(fs.root(), name.as_bytes(), 0o100_644, 0, &user)?;
        let file = fs.open(attr.key, OpenFlags::READ_WRITE, &user)?;
        let mut at = 0;
        while at < len {
            at += file.write_at(at as u64, &vec![7; (len - at).min(64 << 10)], &user)?;
        }
        drop(file);
        fs.sync()?;
        pool.kernel().digest_all()?;
        while pool.kernel().place() > 0 {}
        let after = used();
        let grown = after[tier].saturating_sub(before[tier]);
        println!("{name}: {len} bytes, {grown} of them on tier {tier}");
        if grown < len as u64 {
            return Err(format!("{name} does not lie on tier {tier}: {before:?}, then {after:?}").into());
        }
        before = after;
    }
    fs.unmount()?;
    Ok(pool.shutdown()?)
}
