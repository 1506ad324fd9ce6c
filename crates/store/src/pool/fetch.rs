//! Fetches ahead: blocks of SSD and HDD that a transaction will merge with new bytes are read before it
//! begins, all at once and in the order of their device, while other transactions go on. Only a matter of
//! speed: what is not fetched is read by the transaction, and what is fetched is compared with its checksum
//! there like any other bytes.

use super::read::Reader;
use super::scattered::{gap_max, transfers};
use super::{FOOTERS_CACHED, Store};
use crate::Result;
use crate::reader::checksums::sums;
use crate::reader::{MetaReader, View, file_root, is_shared};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use varve_extent_tree::SharedRuns;
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, Extent, ExtentFlags, FileBlock, Ino, Tier, TreeForm, TreeRoot};
use varve_media::AlignedBuf;

/// Most blocks of one transfer: 1 MiB.
const PIECE_BLOCKS: u64 = 256;
/// Most blocks of transfers that are under way together: 8 MiB.
const TOGETHER_BLOCKS: u64 = 2048;
/// Most runs of one range of shared blocks that are fetched.
const RUNS_MAX: usize = 64;

/// Blocks of a file that are looked up while the committed state stays.
const BLOCKS_AT_ONCE: usize = 64;
/// Most blocks that others may have freed, 32 MiB, for a fetch to go on: they are used again only behind it.
const PENDING_MAX: u64 = if cfg!(test) { 16 } else { 8192 };

/// Why blocks were not fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unfetched {
    /// There are more than may be: so many.
    TooMany(usize),
    /// Others have freed blocks that are used again only when the fetch is over.
    OthersWait,
}

/// Blocks that a transaction will read.
#[derive(Debug, Default)]
pub struct Wanted {
    /// Blocks of files.
    pub files: Vec<(Ino, Vec<FileBlock>)>,
    /// Numbers of the shared space.
    pub shared: Vec<Range<u64>>,
}

/// Blocks of slower tiers, as they are in the newest state when [`Store::fetch`] is called. None of them is
/// used for other data as long as this lives.
#[derive(Default)]
pub struct Fetched<'s> {
    /// Where the bytes of a block begin.
    places: HashMap<(Tier, u64), usize>,
    bytes: Vec<u8>,
    _reader: Option<Reader<'s>>,
}

impl Fetched<'_> {
    /// Returns whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Copies blocks if all of them were fetched; returns whether they were.
    pub(crate) fn copy_to(&self, tier: Tier, start: u64, out: &mut [u8]) -> bool {
        let at = |index: usize| self.places.get(&(tier, start + index as u64));
        if self.places.is_empty() || (0..out.len() / BLOCK_SIZE).any(|index| at(index).is_none()) {
            return false;
        }
        for (index, block) in out.chunks_exact_mut(BLOCK_SIZE).enumerate() {
            if let Some(from) = at(index) {
                block.copy_from_slice(&self.bytes[*from..from + BLOCK_SIZE]);
            }
        }
        true
    }

    /// Adds blocks of one tier, in the order of the device. Returns false if it has stopped because
    /// `others_wait` for blocks that they have freed.
    fn read(
        &mut self,
        store: &Store,
        tier: Tier,
        runs: Vec<Range<u64>>,
        others_wait: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let runs = transfers(runs, 0, 0);
        let pieces: Vec<_> = transfers(runs.clone(), gap_max(tier), u64::MAX)
            .into_iter()
            .flat_map(|run| {
                let starts = run.clone().step_by(PIECE_BLOCKS as usize);
                starts.map(move |start| start..run.end.min(start + PIECE_BLOCKS))
            })
            .collect();
        let device = store.device(tier)?;
        let mut wanted = runs.into_iter().flatten().peekable();
        let mut rest = &pieces[..];
        // A device takes a batch at once only into aligned memory.
        let most = pieces.iter().map(|piece| piece.end - piece.start).sum::<u64>();
        let mut buffer = AlignedBuf::new((most.min(TOGETHER_BLOCKS) * BLOCK_BYTES) as usize);
        let buffer = buffer.bytes_mut();
        while !rest.is_empty() {
            if others_wait() {
                return Ok(false);
            }
            let mut blocks = 0;
            let fits = rest.iter().take_while(|piece| {
                blocks += piece.end - piece.start;
                blocks <= TOGETHER_BLOCKS
            });
            let (now, later) = rest.split_at(fits.count().max(1));
            rest = later;
            let bytes_of = |piece: &Range<u64>| ((piece.end - piece.start) * BLOCK_BYTES) as usize;
            let mut batch = Vec::with_capacity(now.len());
            let mut left = &mut buffer[..];
            let mut bytes = 0;
            for piece in now {
                let (out, more) = left.split_at_mut(bytes_of(piece));
                bytes += out.len();
                batch.push((piece.start * BLOCK_BYTES, out));
                left = more;
            }
            let is_read = device.read_batch(&mut batch).is_ok();
            store.count_read(tier, bytes);
            let mut from = 0;
            for piece in now {
                while let Some(block) = wanted.next_if(|block| *block < piece.end) {
                    let at = from + (block - piece.start) as usize * BLOCK_SIZE;
                    let out = &mut buffer[at..at + BLOCK_SIZE];
                    // What has failed may lie in a gap that nobody wants.
                    if is_read || device.read(block * BLOCK_BYTES, out).is_ok() {
                        self.places.insert((tier, block), self.bytes.len());
                        self.bytes.extend_from_slice(out);
                    }
                }
                from += bytes_of(piece);
            }
        }
        Ok(true)
    }
}

/// Whether any block of a file may lie on SSD or HDD.
fn has_far_blocks(root: &TreeRoot) -> bool {
    let is_far = |extent: &Extent| extent.tier != Tier::Nvm || is_shared(extent);
    match root.form() {
        Ok(TreeForm::Inline(extents)) => extents.iter().any(is_far),
        Ok(TreeForm::Nodes(_, counts)) => {
            counts.mapped[Tier::Ssd as usize] + counts.mapped[Tier::Hdd as usize] + counts.shared > 0
        }
        Err(_) => false,
    }
}

impl Store {
    /// Whether there is anything on SSD or HDD that could be fetched.
    #[must_use]
    pub fn uses_far_tiers(&self) -> bool {
        self.space.lock().uses_far_tiers()
    }

    /// Reads what lies on SSD and HDD of `wanted`. Faults of metadata and devices are left to whoever reads
    /// the blocks then. `yields`: not while others have freed much that is not to be used again meanwhile.
    ///
    /// # Errors
    /// More than `most` blocks lie there, and none was read; or others wait.
    pub fn fetch(
        &self,
        wanted: &Wanted,
        most: usize,
        yields: bool,
    ) -> std::result::Result<Fetched<'_>, Unfetched> {
        let mut runs: FarRuns = Default::default();
        // What is in use in this state or a later one is not used for anything else before the reader leaves.
        let reader = {
            let snapshot = self.snapshot();
            self.enter(snapshot.tx())
        };
        for (ino, blocks) in &wanted.files {
            // The reader of the transaction meets a fault again.
            let _ = self.find_file_blocks(*ino, blocks, &mut runs);
        }
        if !wanted.shared.is_empty() {
            let _ = find_shared_blocks(&self.snapshot().reader(), &wanted.shared, &mut runs);
        }
        let blocks = runs.iter().flatten().map(|run| run.end - run.start).sum::<u64>() as usize;
        if blocks == 0 {
            return Ok(Fetched::default());
        }
        if blocks > most {
            return Err(Unfetched::TooMany(blocks));
        }
        let mut fetched = Fetched {
            _reader: Some(reader),
            ..Fetched::default()
        };
        let others_wait = || yields && self.pending_frees().blocks > PENDING_MAX;
        for (tier, runs) in [Tier::Ssd, Tier::Hdd].into_iter().zip(runs) {
            if runs.is_empty() {
                continue;
            }
            self.read_footers(tier, &runs);
            match fetched.read(self, tier, runs, &others_wait) {
                Ok(true) => {}
                Ok(false) => return Err(Unfetched::OthersWait),
                Err(error) => tracing::debug!(%error, "blocks were not fetched ahead"),
            }
        }
        Ok(fetched)
    }

    /// Finds the blocks of a file that lie on SSD and HDD. The committed state may change between some of
    /// them and the next.
    fn find_file_blocks(&self, ino: Ino, blocks: &[FileBlock], runs: &mut FarRuns) -> Result<()> {
        for blocks in blocks.chunks(BLOCKS_AT_ONCE) {
            let snapshot = self.snapshot();
            let reader = snapshot.reader();
            let inode = reader.get(ino)?;
            let root = file_root(&inode)?;
            if !has_far_blocks(&root) {
                return Ok(());
            }
            let size_blocks = inode.attr.size_bytes.div_ceil(BLOCK_BYTES);
            let mut known: Option<Extent> = None;
            for at in blocks.iter().map(|block| block.0).filter(|at| *at < size_blocks) {
                let covers = |extent: &Extent| extent.file_block.0 <= at && at < extent.end().0;
                if !known.as_ref().is_some_and(covers) {
                    known = reader.extents(ino, &root, at, size_blocks, 1)?.first().copied();
                }
                let Some(extent) = known.filter(covers) else {
                    continue;
                };
                if !extent.flags.contains(ExtentFlags::UNWRITTEN) {
                    let block = extent.block.0 + (at - extent.file_block.0);
                    push_run(runs, extent.tier, block..block + 1);
                }
            }
        }
        Ok(())
    }

    /// Has the checksums of sealed units read, as many as are kept in memory.
    fn read_footers(&self, tier: Tier, runs: &[Range<u64>]) {
        let unit_blocks = self.layout.unit_blocks(tier).max(1);
        let units: BTreeMap<u64, u64> = runs
            .iter()
            .map(|run| (run.start / unit_blocks, run.start))
            .collect();
        for block in units.into_values().take(FOOTERS_CACHED.get() / 2) {
            let of_unit = sums(&self.snapshot().reader(), tier, block, 1);
            if let Ok(of_unit) = of_unit {
                let _ = of_unit.resolve(|tier, unit, row| self.footer(tier, unit, row));
            }
        }
    }
}

/// Runs of blocks on SSD and HDD.
type FarRuns = [Vec<Range<u64>>; 2];

fn push_run(runs: &mut FarRuns, tier: Tier, run: Range<u64>) {
    let Some(index) = (tier as usize).checked_sub(1) else {
        return;
    };
    match runs[index].last_mut() {
        Some(last) if last.end == run.start => last.end = run.end,
        _ => runs[index].push(run),
    }
}

fn find_shared_blocks<V: View>(
    reader: &MetaReader<'_, V>,
    numbers: &[Range<u64>],
    runs: &mut FarRuns,
) -> Result<()> {
    let root = reader.shared_root()?;
    for numbers in numbers {
        for run in SharedRuns::new().runs(reader.view, &root, numbers.clone(), RUNS_MAX)? {
            push_run(runs, run.tier, run.block.0..run.block.0 + u64::from(run.len));
        }
    }
    Ok(())
}
