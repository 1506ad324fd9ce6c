//! Fetches ahead: blocks of SSD and HDD that a transaction will merge with new bytes are read before it
//! begins, all at once and in the order of their device, while other transactions go on. Only a matter of
//! speed: what is not fetched is read by the transaction, and what is fetched is compared with its checksum
//! there like any other bytes.

use super::Store;
use super::read::Reader;
use super::scattered::{gap_max, transfers};
use crate::Result;
use crate::reader::{MetaReader, View, file_root, is_shared};
use std::collections::HashMap;
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

/// Blocks that a transaction will read.
#[derive(Debug, Default)]
pub struct Wanted {
    /// Blocks of files, ascending; each file once.
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
    reader: Option<Reader<'s>>,
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

    /// Adds blocks of one tier, in the order of the device.
    fn read(&mut self, store: &Store, tier: Tier, runs: Vec<Range<u64>>) -> Result<()> {
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
            device.read_batch(&mut batch)?;
            store.count_read(tier, bytes);
            let mut from = 0;
            for piece in now {
                while let Some(block) = wanted.next_if(|block| *block < piece.end) {
                    let at = from + (block - piece.start) as usize * BLOCK_SIZE;
                    self.places.insert((tier, block), self.bytes.len());
                    self.bytes.extend_from_slice(&buffer[at..at + BLOCK_SIZE]);
                }
                from += bytes_of(piece);
            }
        }
        Ok(())
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
    /// Whether the pool has devices from which blocks can be fetched.
    #[must_use]
    pub fn has_far_tiers(&self) -> bool {
        self.device(Tier::Ssd).is_ok() || self.device(Tier::Hdd).is_ok()
    }

    /// Reads what lies on SSD and HDD of `wanted`. Faults of metadata and devices are left to whoever reads
    /// the blocks then.
    ///
    /// # Errors
    /// More than `most` blocks lie there: their number. None was read.
    pub fn fetch(&self, wanted: &Wanted, most: usize) -> std::result::Result<Fetched<'_>, usize> {
        let mut fetched = Fetched::default();
        let mut runs: FarRuns = Default::default();
        {
            // What is in use in this state is not used for anything else before the reader leaves.
            let snapshot = self.snapshot();
            let reader = snapshot.reader();
            for (ino, blocks) in &wanted.files {
                // The reader of the transaction meets the fault again.
                let _ = find_file_blocks(&reader, *ino, blocks, &mut runs);
            }
            if !wanted.shared.is_empty() {
                let _ = find_shared_blocks(&reader, &wanted.shared, &mut runs);
            }
            let blocks = runs.iter().flatten().map(|run| run.end - run.start).sum::<u64>() as usize;
            if blocks > most {
                return Err(blocks);
            }
            if blocks > 0 {
                fetched.reader = Some(self.enter(snapshot.tx()));
            }
        }
        for (tier, runs) in [Tier::Ssd, Tier::Hdd].into_iter().zip(runs) {
            if !runs.is_empty()
                && let Err(error) = fetched.read(self, tier, runs)
            {
                tracing::debug!(%error, "blocks were not fetched ahead");
            }
        }
        Ok(fetched)
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

fn find_file_blocks<V: View>(
    reader: &MetaReader<'_, V>,
    ino: Ino,
    blocks: &[FileBlock],
    runs: &mut FarRuns,
) -> Result<()> {
    let inode = reader.get(ino)?;
    let root = file_root(&inode)?;
    if !has_far_blocks(&root) {
        return Ok(());
    }
    let size_blocks = inode.attr.size_bytes.div_ceil(BLOCK_BYTES);
    let mut known: Option<Extent> = None;
    for at in blocks
        .iter()
        .map(|block| block.0)
        .take_while(|at| *at < size_blocks)
    {
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
    Ok(())
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
