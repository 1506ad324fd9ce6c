//! Survey of a damaged pool: every readable image, tree and claim on a block. Changes nothing.

mod claims;
mod scan;
mod shared;

use crate::pool::Store;
use crate::reader::{MetaReader, POOL_INO, View, dir_root, state_in};
use crate::{Result, StoreError};
use shared::FoundRuns;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;
use varve_extent_tree::{CheckVisitor, ExtentTree, TreeError};
use varve_format::inode::{Content, INODE_SIZE, INODES_PER_BLOCK, Inode, InodeSlot};
use varve_format::state::PoolState;
use varve_format::{
    BLOCK_HEADER_SIZE, Block, BlockHeader, BlockKind, BlockNo, Extent, FileKind, Generation, Ino, InodeKey,
    ROOT_INO, Tier, TreeRoot,
};
use zerocopy::FromBytes;

/// A name in a directory.
#[derive(Debug, Clone)]
pub(super) struct Name {
    pub(super) name: Vec<u8>,
    pub(super) key: InodeKey,
    pub(super) kind: FileKind,
}

/// The remains of one inode.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) inode: Inode,
    pub(super) extents: Vec<Extent>,
    /// Shared extents, with their numbers of the shared space.
    pub(super) shared: Vec<Extent>,
    /// Extents that were taken out. If there are any, or any `copies` of shared blocks to make, the tree must
    /// be rebuilt.
    pub(super) dropped: Vec<Extent>,
    pub(super) copies: Vec<Extent>,
    pub(super) names: Vec<Name>,
    pub(super) attributes: Vec<Vec<u8>>,
    /// Reason to rebuild the tree or the names, and whether something may be missing.
    pub(super) tree: Option<(String, bool)>,
    /// As `tree`, for the attributes.
    pub(super) xattrs: Option<(String, bool)>,
    /// Reason why the target of a symbolic link is lost.
    pub(super) link: Option<String>,
    nodes: Vec<BlockNo>,
}

/// A bit for each block of a tier.
#[derive(Debug, Default)]
pub(super) struct BlockSet {
    words: Vec<u64>,
}

impl BlockSet {
    fn new(blocks: u64) -> Self {
        Self {
            words: vec![0; blocks.div_ceil(64) as usize],
        }
    }

    pub(super) fn has(&self, block: u64) -> bool {
        self.words
            .get((block / 64) as usize)
            .is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    pub(super) fn with(&self, other: &Self) -> Self {
        Self {
            words: self.words.iter().zip(&other.words).map(|(a, b)| a | b).collect(),
        }
    }

    /// Adds a block; false if it is there.
    fn add(&mut self, block: u64) -> bool {
        let word = &mut self.words[(block / 64) as usize];
        let old = *word;
        *word |= 1 << (block % 64);
        old != *word
    }
}

/// The results of a survey.
#[derive(Debug)]
pub(super) struct Survey {
    /// Damaged fixed blocks, by number.
    pub(super) bad_fixed: BTreeMap<u64, (BlockKind, String)>,
    pub(super) state: Option<PoolState>,
    /// Location of each block of the inode file.
    pub(super) inode_file: BTreeMap<u64, BlockNo>,
    /// Reason to rebuild the tree of the inode file.
    pub(super) inode_tree: Option<String>,
    pub(super) inode_blocks: u64,
    /// Inodes with readable images.
    pub(super) found: BTreeMap<Ino, Found>,
    pub(super) reserved: BTreeSet<Ino>,
    /// Unreadable images, with the reason.
    pub(super) bad_images: BTreeMap<Ino, String>,
    /// Images found in the place of another; they move to their own.
    pub(super) misplaced: BTreeMap<Ino, InodeSlot>,
    pub(super) runs: FoundRuns,
    /// Blocks in use.
    pub(super) claims: [BlockSet; 3],
    /// Blocks in use that hold metadata.
    pub(super) meta: [BlockSet; 3],
    /// Blocks whose bit is set, where the bitmap can be read.
    pub(super) marked: [BlockSet; 3],
}

/// Collects the nodes of one tree, and its worst fault.
struct Walk {
    nodes: Vec<BlockNo>,
    fault: Option<(String, bool)>,
}

impl Walk {
    const fn new() -> Self {
        Self {
            nodes: Vec::new(),
            fault: None,
        }
    }

    fn note(&mut self, what: String, lossy: bool) {
        match &mut self.fault {
            Some((_, known)) if *known || !lossy => {}
            fault => *fault = Some((what, lossy)),
        }
    }
}

impl CheckVisitor<StoreError> for Walk {
    fn block(&mut self, block: BlockNo, _kind: BlockKind) {
        self.nodes.push(block);
    }

    fn fault(&mut self, error: TreeError) {
        // Wrong counters under right checksums come from a block that is older than the rest: something may
        // be missing.
        self.note(error.to_string(), true);
    }

    fn unreadable(&mut self, _block: BlockNo, error: StoreError) {
        self.note(error.to_string(), true);
    }
}

impl Store {
    pub(super) fn survey(&self) -> Result<Survey> {
        let sets = || Tier::ALL.map(|tier| BlockSet::new(self.layout.blocks(tier)));
        let mut survey = Survey {
            bad_fixed: self.bad_fixed()?,
            state: None,
            inode_file: BTreeMap::new(),
            inode_tree: None,
            inode_blocks: 0,
            found: BTreeMap::new(),
            reserved: BTreeSet::new(),
            bad_images: BTreeMap::new(),
            misplaced: BTreeMap::new(),
            runs: FoundRuns::default(),
            claims: sets(),
            meta: sets(),
            marked: sets(),
        };
        let snapshot = self.snapshot();
        let reader = snapshot.reader();
        let bad_state = survey.bad_fixed.contains_key(&reader.state_block().0);
        survey.state = reader.state().ok().filter(|_| !bad_state);
        self.load_marks(&mut survey);
        self.find_runs(&reader, &mut survey);
        let mut nodes = self.find_inode_file(&reader, &mut survey)?;
        self.read_images(&reader, &mut survey);
        for (ino, slot) in std::mem::take(&mut survey.misplaced) {
            if survey.bad_images.remove(&ino).is_some() {
                if let InodeSlot::Used(inode) = &slot {
                    survey.found.insert(ino, look(&reader, inode));
                }
                survey.misplaced.insert(ino, slot);
            }
        }
        nodes.extend(survey.inode_file.values().copied());
        nodes.extend(survey.runs.nodes());
        nodes.extend(self.layout.tables_among_data().map(BlockNo));
        self.claim_metadata(&nodes, &mut survey);
        self.claim_runs(&mut survey)?;
        self.claim_data(&mut survey);
        self.salvage_leaves(&mut survey)?;
        Self::count_references(&mut survey);
        Ok(survey)
    }

    /// Returns fixed blocks whose checksum, kind or place is wrong.
    pub(crate) fn bad_fixed(&self) -> Result<BTreeMap<u64, (BlockKind, String)>> {
        let mut bad = BTreeMap::new();
        for (area, kind) in self.layout.tables() {
            for number in area.start.get()..area.end() {
                let at = BlockNo(number);
                let fault = match self.cache.load(at, false) {
                    Ok(bytes) => match BlockHeader::of(&bytes).expect(kind, POOL_INO, at) {
                        Err(fault) => Some(fault.to_string()),
                        Ok(()) if kind == BlockKind::PoolState => match state_in(&self.layout, &bytes) {
                            // The root directory is made with the pool.
                            Ok(state) if state.inode_blocks.get() == 0 => {
                                Some("pool state: no inodes".into())
                            }
                            Ok(_) => None,
                            Err(fault) => Some(fault.to_string()),
                        },
                        Ok(()) => None,
                    },
                    Err(error @ StoreError::Block { .. }) => Some(error.to_string()),
                    Err(error) => return Err(error),
                };
                if let Some(fault) = fault {
                    bad.insert(number, (kind, fault));
                }
            }
        }
        Ok(bad)
    }

    fn load_marks(&self, survey: &mut Survey) {
        for tier in Tier::ALL {
            for (at, first, count) in self.layout.bitmap_blocks(tier) {
                if survey.bad_fixed.contains_key(&at.0) {
                    continue;
                }
                let Ok(bytes) = self.cache.load(at, false) else {
                    continue;
                };
                for (byte, value) in (0_u64..).zip(&bytes[BLOCK_HEADER_SIZE..]) {
                    for bit in (0..8).filter(|bit| value >> bit & 1 == 1) {
                        let (index, block) = (byte * 8 + bit, first + byte * 8 + bit);
                        if index < count && self.layout.usable(tier, block) {
                            survey.marked[tier as usize].add(block);
                        }
                    }
                }
            }
        }
    }

    /// Locates the blocks of the inode file; returns its nodes.
    fn find_inode_file<V: View>(
        &self,
        reader: &MetaReader<'_, V>,
        survey: &mut Survey,
    ) -> Result<Vec<BlockNo>> {
        let mut walk = Walk::new();
        if let Some(state) = &survey.state {
            match TreeRoot::read_from_bytes(&state.inode_root) {
                Ok(root) => {
                    let map = &mut survey.inode_file;
                    let mut strange = None;
                    ExtentTree::of(POOL_INO).check(reader.view, &root, &mut walk, |extent| {
                        for at in self.layout.to_look_at(&extent) {
                            let block = extent.block.0.saturating_add(at);
                            if self.layout.usable(extent.tier, block) {
                                map.insert(extent.file_block.0 + at, BlockNo::on(extent.tier, block));
                            } else {
                                strange = Some(format!("inode file: {} block {block}", extent.tier.name()));
                            }
                        }
                    });
                    if let Some(what) = strange {
                        walk.note(what, true);
                    }
                }
                Err(_) => walk.note("root of the inode file".into(), true),
            }
            survey.inode_blocks = state.inode_blocks.get();
        } else {
            walk.note("pool state".into(), true);
        }
        leave_foreign_blocks(reader, survey, &mut walk);
        self.leave_bad_images(reader, survey);
        let known = survey.inode_file.len() as u64;
        let holes = survey.inode_blocks > known
            || survey
                .inode_file
                .keys()
                .any(|index| *index >= survey.inode_blocks);
        if walk.fault.as_ref().is_some_and(|(_, lossy)| *lossy) || holes {
            for (index, block) in self.scan_for_images(survey)? {
                if survey.state.is_none() || index < survey.inode_blocks {
                    survey.inode_file.entry(index).or_insert(block);
                }
            }
            if holes {
                walk.note("inode file: its length".into(), true);
            }
        }
        leave_shared_blocks(reader, survey, &mut walk);
        if survey.state.is_none() {
            survey.inode_blocks = survey.inode_file.keys().next_back().map_or(1, |last| last + 1);
        }
        let limit = survey.inode_blocks.min(self.blocks_in_all());
        if limit < survey.inode_blocks {
            survey.inode_blocks = limit.max(known);
        }
        let end = survey.inode_blocks;
        survey.inode_file.retain(|index, _| *index < end);
        survey.inode_tree = walk.fault.map(|(what, _)| what);
        Ok(walk.nodes)
    }

    fn blocks_in_all(&self) -> u64 {
        Tier::ALL.map(|tier| self.layout.blocks(tier)).iter().sum()
    }

    /// Takes out blocks of the inode file on slower tiers that are unreadable or have wrong checksums. Their
    /// readable images go to a new place.
    fn leave_bad_images<V: View>(&self, reader: &MetaReader<'_, V>, survey: &mut Survey) {
        let cold: Vec<_> = survey
            .inode_file
            .iter()
            .filter(|(_, block)| block.is_cold())
            .map(|(index, block)| (*index, *block))
            .collect();
        for (index, block) in cold {
            let bad =
                |error: &StoreError| matches!(error, StoreError::DataChecksum { .. } | StoreError::Media(_));
            if !reader.images(block, |_| ()).is_err_and(|error| bad(&error)) {
                continue;
            }
            survey.inode_file.remove(&index);
            for ino in (index * INODES_PER_BLOCK).max(1)..(index + 1) * INODES_PER_BLOCK {
                let slot =
                    reader
                        .view
                        .read_raw(block, |_| Ok(()), |bytes| crate::reader::slot_in(bytes, Ino(ino)));
                if let Ok(Ok(slot @ (InodeSlot::Used(_) | InodeSlot::Reserved(_)))) = slot {
                    survey.misplaced.insert(Ino(ino), slot);
                }
            }
            // Otherwise later reads would get the cached block without verification.
            self.cache.forget(block.0);
        }
    }

    fn read_images<V: View>(&self, reader: &MetaReader<'_, V>, survey: &mut Survey) {
        let places: Vec<_> = survey
            .inode_file
            .iter()
            .map(|(index, block)| (*index, *block))
            .collect();
        let present: HashSet<u64> = places.iter().map(|(index, _)| *index).collect();
        for index in (0..survey.inode_blocks).filter(|index| !present.contains(index)) {
            for ino in (index * INODES_PER_BLOCK).max(1)..(index + 1) * INODES_PER_BLOCK {
                survey
                    .bad_images
                    .insert(Ino(ino), "its block of the inode file is lost".into());
            }
        }
        for (index, block) in places {
            for image in 0..INODES_PER_BLOCK {
                let ino = Ino(index * INODES_PER_BLOCK + image);
                if ino.0 == 0 {
                    continue;
                }
                let slot =
                    reader
                        .view
                        .read_raw(block, |_| Ok(()), |bytes| crate::reader::slot_in(bytes, ino));
                match slot.and_then(|slot| slot) {
                    Ok(InodeSlot::Free(_)) => {}
                    Ok(InodeSlot::Reserved(_)) => {
                        survey.reserved.insert(ino);
                    }
                    Ok(InodeSlot::Used(inode)) => {
                        survey.found.insert(ino, look(reader, &inode));
                    }
                    Err(error) => {
                        if let StoreError::Inode {
                            fault: varve_format::inode::InodeFault::Stranger(real),
                            ..
                        } = error
                        {
                            let decode = |bytes: &Block| {
                                let at = image as usize * INODE_SIZE;
                                InodeSlot::decode(&bytes[at..at + INODE_SIZE], Ino(real))
                            };
                            let slot = reader.view.read_raw(block, |_| Ok(()), decode);
                            if let Ok(Ok(slot)) = slot {
                                survey.misplaced.insert(Ino(real), slot);
                            }
                        }
                        survey.bad_images.insert(ino, error.to_string());
                    }
                }
            }
        }
        if !survey.found.contains_key(&ROOT_INO) {
            survey
                .bad_images
                .entry(ROOT_INO)
                .or_insert_with(|| "there is no root directory".into());
        }
    }
}

/// Reads everything below an image.
fn look<V: View>(reader: &MetaReader<'_, V>, inode: &Inode) -> Found {
    let ino = inode.attr.key.ino;
    let mut found = Found {
        inode: inode.clone(),
        extents: Vec::new(),
        shared: Vec::new(),
        dropped: Vec::new(),
        copies: Vec::new(),
        names: Vec::new(),
        attributes: Vec::new(),
        tree: None,
        xattrs: None,
        link: None,
        nodes: Vec::new(),
    };
    let mut walk = Walk::new();
    match &inode.content {
        Content::File(root) => {
            let extents = &mut found.extents;
            ExtentTree::of(ino).check(reader.view, root, &mut walk, |extent| extents.push(extent));
            extents.sort_by_key(|extent| extent.file_block);
        }
        Content::Dir(_) => {
            let names = &mut found.names;
            if let Ok(root) = dir_root(inode) {
                reader
                    .directory(ino)
                    .check(reader.view, &root, &mut walk, |_, entry| {
                        names.push(Name {
                            name: entry.name.to_vec(),
                            key: entry.key,
                            kind: entry.kind,
                        });
                    });
            }
        }
        Content::Symlink(_) => {}
        Content::SymlinkBlock(block) => {
            let fits = reader.view.read(*block, |bytes| {
                BlockHeader::of(bytes)
                    .expect(BlockKind::Symlink, ino, *block)
                    .is_ok()
                    && inode.attr.size_bytes <= varve_format::SYMLINK_MAX as u64
            });
            match fits {
                Ok(true) => walk.nodes.push(*block),
                Ok(false) => found.link = Some(format!("block {block} does not hold its target")),
                Err(error) => found.link = Some(error.to_string()),
            }
        }
    }
    check_cold_nodes(reader, &mut walk, 0);
    found.tree = walk.fault.take();
    let before = walk.nodes.len();
    let mut attributes = Walk {
        nodes: walk.nodes,
        fault: None,
    };
    let list = &mut found.attributes;
    reader
        .xattrs(ino)
        .check(reader.view, &inode.xattrs, &mut attributes, |name, _| {
            list.push(name.to_vec());
        });
    check_cold_nodes(reader, &mut attributes, before);
    found.xattrs = attributes.fault;
    found.nodes = attributes.nodes;
    found
}

/// Notes nodes on slower tiers, from the one at `first` on, that do not match their checksums there: they are
/// older than the pointers to them.
fn check_cold_nodes<V: View>(reader: &MetaReader<'_, V>, walk: &mut Walk, first: usize) {
    let cold: Vec<BlockNo> = walk.nodes[first..]
        .iter()
        .filter(|block| block.is_cold())
        .copied()
        .collect();
    for block in cold {
        let checked = reader.view.read(block, |bytes| reader.check_cold(block, bytes));
        if let Ok(Err(error @ StoreError::DataChecksum { .. })) = checked {
            walk.note(error.to_string(), true);
        }
    }
}

impl Survey {
    /// Returns the blocks in `among` that hold data of files.
    pub(super) fn data_blocks(&self, tier: Tier, among: Range<u64>) -> BTreeSet<u64> {
        let extents = self
            .found
            .values()
            .flat_map(|found| found.extents.iter().chain(&found.copies));
        let runs = self.runs.wanted.iter().map(|run| (run.tier, run.block, run.len));
        extents
            .map(|extent| (extent.tier, extent.block, extent.len))
            .chain(runs)
            .filter(|(at, ..)| *at == tier)
            .flat_map(|(_, block, len)| block.0..block.0 + u64::from(len))
            .filter(|block| among.contains(block))
            .collect()
    }

    /// Notes the paths of inodes, for the report.
    pub(super) fn note_paths(&self, paths: &mut BTreeMap<Ino, Vec<u8>>) {
        paths.entry(ROOT_INO).or_insert_with(|| b"/".to_vec());
        let mut queue = vec![(ROOT_INO, Vec::new())];
        // Directories that are unreachable from the root are named by their numbers.
        queue.extend(
            self.found
                .iter()
                .filter(|(_, found)| !found.names.is_empty())
                .map(|(ino, _)| (*ino, format!("#{}", ino.0).into_bytes()))
                .rev(),
        );
        let mut done = HashSet::new();
        let mut at = 0;
        while at < queue.len() {
            // The root's own tree first, then the rest.
            let (dir, path) = queue[at].clone();
            at += 1;
            let mut stack = vec![(dir, path)];
            while let Some((dir, path)) = stack.pop() {
                let Some(found) = self.found.get(&dir).filter(|_| done.insert(dir)) else {
                    continue;
                };
                for name in &found.names {
                    let mut full = path.clone();
                    full.push(b'/');
                    full.extend_from_slice(&name.name);
                    paths.entry(name.key.ino).or_insert_with(|| full.clone());
                    if name.kind == FileKind::Directory {
                        stack.push((name.key.ino, full));
                    }
                }
            }
        }
    }

    /// Returns a generation that the number has not had, for a lost image.
    pub(super) fn generation(&self, ino: Ino, now_ns: i64) -> Generation {
        let seconds = u32::try_from(now_ns / 1_000_000_000).unwrap_or(1);
        let named = self
            .found
            .values()
            .flat_map(|found| &found.names)
            .filter(|name| name.key.ino == ino)
            .map(|name| name.key.generation.0)
            .max()
            .unwrap_or(0);
        Generation(seconds.max(named).min(u32::MAX - 2))
    }
}

/// Returns the number of images in `block`, and the number of those that belong to block `index` of the inode
/// file.
fn images_in<V: View>(reader: &MetaReader<'_, V>, block: BlockNo, index: u64) -> Result<(usize, usize)> {
    let count = |bytes: &Block| {
        let inos = index * INODES_PER_BLOCK..(index + 1) * INODES_PER_BLOCK;
        let images = bytes.chunks_exact(INODE_SIZE).zip(inos);
        let there: Vec<_> = images
            .filter(|(image, _)| image.iter().any(|byte| *byte != 0))
            .collect();
        let own = there
            .iter()
            .filter(|(_, ino)| crate::reader::slot_in(bytes, Ino(*ino)).is_ok());
        (there.len(), own.count())
    };
    reader.view.read_raw(block, |_| Ok(()), count)
}

/// Takes out blocks in the tree of the inode file that hold images or other data, but no image that belongs
/// there: free images would overwrite the content of another owner.
fn leave_foreign_blocks<V: View>(reader: &MetaReader<'_, V>, survey: &mut Survey, walk: &mut Walk) {
    survey.inode_file.retain(|index, block| {
        // On a slower tier the checksum shows whether the block has the content written there.
        let foreign =
            !block.is_cold() && matches!(images_in(reader, *block, *index), Ok((there, 0)) if there > 0);
        if foreign {
            walk.note(format!("inode file: block {block} is another's"), true);
        }
        !foreign
    });
}

/// Leaves a block that is mapped at several places to one of them: to the place of which it holds most
/// images, or the first.
fn leave_shared_blocks<V: View>(reader: &MetaReader<'_, V>, survey: &mut Survey, walk: &mut Walk) {
    let mut places: BTreeMap<BlockNo, Vec<u64>> = BTreeMap::new();
    for (index, block) in &survey.inode_file {
        places.entry(*block).or_default().push(*index);
    }
    for (block, indexes) in places.into_iter().filter(|(_, indexes)| indexes.len() > 1) {
        let own = |index: u64| images_in(reader, block, index).map_or(0, |(_, own)| own);
        let owner = indexes
            .iter()
            .copied()
            .max_by_key(|index| (own(*index), std::cmp::Reverse(*index)));
        for index in indexes.into_iter().filter(|index| Some(*index) != owner) {
            survey.inode_file.remove(&index);
        }
        walk.note(format!("inode file: block {block} in several places"), true);
    }
}
