//! Checks a pool: walks every structure and reports contradictions, with the data that a repair needs.
//! Changes nothing.

mod finding;
mod names;
pub(crate) mod shared;

pub use finding::Finding;

use crate::pool::{Committed, Snapshot, Store};
use crate::reader::{MetaReader, POOL_INO, dir_root, is_shared};
use crate::tx::shared::SHARED;
use crate::{Result, StoreError};
use names::{Names, Seen, check_names};
use shared::{References, no_run};
use std::collections::{HashMap, HashSet};
use varve_extent_tree::{CheckVisitor, ExtentTree, MetaRead, TreeError};
use varve_format::inode::{Content, INODES_PER_BLOCK, Inode, InodeSlot};
use varve_format::space::UnitRow;
use varve_format::{
    BLOCK_BYTES, BLOCK_HEADER_SIZE, BlockKind, BlockNo, Extent, ExtentFlags, FileKind, Ino, Tier,
};

struct Usage {
    used: [Vec<u64>; 3],
    references: References,
    findings: Vec<Finding>,
}

impl Usage {
    fn claim(&mut self, store: &Store, tier: Tier, block: u64, owner: Ino) {
        if !store.layout.usable(tier, block) {
            self.findings.push(Finding::OutOfBounds {
                tier,
                block: BlockNo(block),
                owner,
            });
            return;
        }
        let word = &mut self.used[tier as usize][(block / 64) as usize];
        let mask = 1 << (block % 64);
        if *word & mask != 0 {
            self.findings.push(Finding::Shared {
                tier,
                block: BlockNo(block),
                owner,
            });
        }
        *word |= mask;
    }
}

/// Collects the results of tree walks.
struct Walk<'a> {
    owner: Ino,
    blocks: Vec<BlockNo>,
    findings: &'a mut Vec<Finding>,
}

impl CheckVisitor<StoreError> for Walk<'_> {
    fn block(&mut self, block: BlockNo, _kind: BlockKind) {
        self.blocks.push(block);
    }

    fn fault(&mut self, error: TreeError) {
        self.findings.push(Finding::Tree {
            owner: self.owner,
            block: None,
            what: error.to_string(),
        });
    }

    fn unreadable(&mut self, block: BlockNo, error: StoreError) {
        self.findings.push(Finding::Tree {
            owner: self.owner,
            block: Some(block),
            what: error.to_string(),
        });
    }
}

impl Store {
    /// Checks all structures. No transaction runs meanwhile.
    ///
    /// # Errors
    /// Only if not even the pool state can be read, or a device fails; everything else is a finding.
    pub fn check(&self) -> Result<Vec<Finding>> {
        self.check_since(self.begin_check())
    }

    pub(crate) fn check_since(&self, begun: u64) -> Result<Vec<Finding>> {
        // No device is added or taken out meanwhile.
        let _sharing = self.sharing.lock();
        let _writer = self.writer.lock();
        let snapshot = self.trusting_snapshot();
        let mut usage = Usage {
            used: Tier::ALL.map(|tier| vec![0; self.layout.blocks(tier).div_ceil(64) as usize]),
            references: References::default(),
            findings: self.check_fixed()?,
        };
        for block in self.layout.tables_among_data() {
            usage.claim(self, Tier::Nvm, block, Ino(0));
        }
        self.check_runs(begun, &snapshot, &mut usage)?;
        let mut inodes = HashMap::new();
        let mut names = Vec::new();
        self.check_inodes(begun, &snapshot, &mut usage, &mut inodes, &mut names)?;
        usage.findings.extend(usage.references.findings());
        check_names(&mut inodes, &names, &mut usage.findings);
        self.check_orphans(&snapshot, &inodes, &mut usage.findings)?;
        self.check_space(&mut usage)?;
        self.check_units(&snapshot, &mut usage)?;
        drop(snapshot);
        self.check_rows(&mut usage.findings);
        self.note_pass(
            |passes, pass| passes.structures = Some(pass),
            usage.findings.len(),
        );
        Ok(usage.findings)
    }

    /// Checks the superblock copies, the journal's headers and the blocks of the fixed areas.
    fn check_fixed(&self) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        for copy in crate::pool::bad_superblocks(&self.devices, &self.superblock())? {
            findings.push(Finding::Table {
                what: format!("copy {copy} of the superblock is damaged"),
            });
        }
        for offset in crate::journal::Journal::bad_headers(&self.devices.journal)? {
            findings.push(Finding::Table {
                what: format!("the journal's header at byte {offset} is damaged"),
            });
        }
        for (block, (kind, fault)) in self.bad_fixed()? {
            findings.push(Finding::Table {
                what: format!("{kind:?} block {block}: {fault}"),
            });
        }
        Ok(findings)
    }

    /// Finds data on NVM with a wrong checksum, which reads do not compare. Transactions continue meanwhile.
    ///
    /// # Errors
    /// A tree is damaged, or a device failed.
    pub fn check_nvm_data(&self) -> Result<Vec<Finding>> {
        let bad = self.bad_nvm_data()?;
        Ok(bad
            .into_iter()
            .map(|(ino, at, block)| Finding::Data {
                ino,
                tier: Tier::Nvm,
                block,
                what: format!("data checksum is wrong (byte {} of the file)", at.0 * BLOCK_BYTES),
            })
            .collect())
    }

    /// Compares all data with its checksums. Transactions continue meanwhile.
    ///
    /// # Errors
    /// The inodes cannot be enumerated, or [checks have ended](Self::end_checks).
    pub fn check_data(&self) -> Result<Vec<Finding>> {
        self.check_data_since(self.begin_check())
    }

    pub(crate) fn check_data_since(&self, begun: u64) -> Result<Vec<Finding>> {
        let mut inos = Vec::new();
        let mut findings = Vec::new();
        let blocks = self.snapshot().reader().state()?.inode_blocks.get();
        for ino in (1..blocks * INODES_PER_BLOCK).map(Ino) {
            self.goes_on(begun)?;
            // A damaged image must not end the check of the other files.
            match self.slot(ino) {
                Ok(InodeSlot::Used(inode))
                    if matches!(inode.content, Content::File(_))
                        && inode.attr.kind() == FileKind::Regular =>
                {
                    // Blocks that a log redoes are not damaged.
                    if !self.may_be_torn(ino) {
                        inos.push(ino);
                    }
                }
                Ok(_) => {}
                Err(error) if is_one_block(&error) => {
                    self.note_damage(&error);
                    let what = error.to_string();
                    findings.push(Finding::Image { ino, what });
                }
                Err(error) => return Err(error),
            }
        }
        for ino in inos {
            let mut from = varve_format::FileBlock(0);
            loop {
                let batch = match self.map(ino, from, 64) {
                    Ok(batch) => batch,
                    // The file was removed meanwhile.
                    Err(StoreError::NoInode(_) | StoreError::WrongKind { .. }) => break,
                    Err(error) => {
                        self.note_damage(&error);
                        findings.push(Finding::Tree {
                            owner: ino,
                            block: None,
                            what: error.to_string(),
                        });
                        break;
                    }
                };
                let Some(last) = batch.last() else { break };
                from = last.end();
                for extent in batch
                    .iter()
                    .filter(|extent| !extent.flags.contains(ExtentFlags::UNWRITTEN))
                {
                    self.verify_extent(begun, ino, extent, &mut findings)?;
                }
            }
        }
        self.note_pass(|passes, pass| passes.data = Some(pass), findings.len());
        Ok(findings)
    }

    fn verify_extent(
        &self,
        begun: u64,
        ino: Ino,
        extent: &Extent,
        findings: &mut Vec<Finding>,
    ) -> Result<()> {
        for at in self.layout.to_look_at(extent) {
            self.goes_on(begun)?;
            let block = BlockNo(extent.block.0 + at);
            let Err(error) = self.verify_block(extent.tier, block) else {
                continue;
            };
            // The file may have changed since the map was read, and the block may no longer be part of it.
            let file_block = varve_format::FileBlock(extent.file_block.0 + at);
            let still = self.map(ino, file_block, 1).is_ok_and(|now| {
                now.first()
                    .is_some_and(|now| (now.tier, now.block) == (extent.tier, block))
            });
            if still {
                self.note_damage(&error);
                findings.push(Finding::Data {
                    ino,
                    tier: extent.tier,
                    block,
                    what: error.to_string(),
                });
            }
        }
        Ok(())
    }

    /// The tree of the shared runs, and the blocks that they hold.
    fn check_runs(&self, begun: u64, snapshot: &Snapshot<'_>, usage: &mut Usage) -> Result<()> {
        let reader = snapshot.reader();
        let mut runs = Vec::new();
        let mut walk = Walk {
            owner: POOL_INO,
            blocks: Vec::new(),
            findings: &mut usage.findings,
        };
        SHARED.check(reader.view, &reader.shared_root()?, &mut walk, |run| {
            runs.push(run)
        });
        let nodes = walk.blocks;
        for block in nodes {
            self.claim_node(&reader, usage, block, POOL_INO);
        }
        let next = reader.state()?.next_shared.get();
        if let Some(run) = runs.iter().find(|run| run.end() > next) {
            count(&mut usage.findings, "numbers of shared blocks", next, run.end());
        }
        for run in &runs {
            self.goes_on(begun)?;
            let there = self.layout.blocks(run.tier).saturating_sub(run.block.0);
            for at in 0..u64::from(run.len).min(there + 1) {
                usage.claim(self, run.tier, run.block.0 + at, POOL_INO);
            }
        }
        usage.references = References::of(runs);
        Ok(())
    }

    fn check_inodes(
        &self,
        begun: u64,
        snapshot: &Snapshot<'_>,
        usage: &mut Usage,
        inodes: &mut HashMap<Ino, Seen>,
        names: &mut Names,
    ) -> Result<()> {
        let reader = snapshot.reader();
        let state = reader.state()?;
        let root = reader.inode_root()?;
        let mut extents = Vec::new();
        let mut walk = Walk {
            owner: POOL_INO,
            blocks: Vec::new(),
            findings: &mut usage.findings,
        };
        ExtentTree::of(POOL_INO).check(reader.view, &root, &mut walk, |extent| extents.push(extent));
        let nodes = walk.blocks;
        for block in nodes {
            self.claim_node(&reader, usage, block, POOL_INO);
        }
        let mut blocks = 0;
        for extent in extents {
            for at in self.layout.to_look_at(&extent) {
                usage.claim(self, extent.tier, extent.block.0 + at, POOL_INO);
            }
            blocks += u64::from(extent.len);
        }
        count(
            &mut usage.findings,
            "blocks of the inode file",
            state.inode_blocks.get(),
            blocks,
        );
        let mut in_use = 0;
        for ino in (1..state.inode_blocks.get() * INODES_PER_BLOCK).map(Ino) {
            self.goes_on(begun)?;
            match reader.slot(ino) {
                Ok(InodeSlot::Free(_)) => {}
                Ok(InodeSlot::Reserved(_)) => in_use += 1,
                Ok(InodeSlot::Used(inode)) => {
                    in_use += 1;
                    self.check_inode(&reader, &inode, usage, names)?;
                    inodes.insert(ino, Seen::of(&inode));
                }
                Err(error) => usage.findings.push(Finding::Image {
                    ino,
                    what: error.to_string(),
                }),
            }
        }
        count(
            &mut usage.findings,
            "inodes in use",
            state.inodes_used.get(),
            in_use,
        );
        Ok(())
    }

    /// Claims a node of a tree, or a block of its own. On a slower tier the block must also have its checksum
    /// in that tier's table.
    fn claim_node(
        &self,
        reader: &MetaReader<'_, Committed<'_>>,
        usage: &mut Usage,
        block: BlockNo,
        owner: Ino,
    ) {
        let Some((tier, number)) = block.home() else {
            let tier = Tier::Nvm;
            usage.findings.push(Finding::OutOfBounds { tier, block, owner });
            return;
        };
        usage.claim(self, tier, number, owner);
        // Failures to read it were reported by the walk.
        if tier != Tier::Nvm
            && let Ok(Err(error)) = reader.view.read(block, |bytes| reader.check_cold(block, bytes))
        {
            usage.findings.push(Finding::Tree {
                owner,
                block: Some(block),
                what: error.to_string(),
            });
        }
    }

    fn check_inode(
        &self,
        reader: &MetaReader<'_, Committed<'_>>,
        inode: &Inode,
        usage: &mut Usage,
        names: &mut Names,
    ) -> Result<()> {
        let ino = inode.attr.key.ino;
        if self.size_wrong(inode) {
            usage.findings.push(Finding::Size {
                ino,
                stored: inode.attr.size_bytes,
            });
        }
        let mut extents = Vec::new();
        let mut walk = Walk {
            owner: ino,
            blocks: Vec::new(),
            findings: &mut usage.findings,
        };
        match &inode.content {
            Content::File(root) => {
                ExtentTree::of(ino).check(reader.view, root, &mut walk, |extent| extents.push(extent));
            }
            Content::Dir(_) => {
                let root = dir_root(inode)?;
                reader
                    .directory(ino)
                    .check(reader.view, &root, &mut walk, |_, entry| {
                        names.push((ino, entry.name.to_vec(), entry.key, entry.kind));
                    });
            }
            Content::Symlink(_) => {}
            Content::SymlinkBlock(block) => {
                walk.blocks.push(*block);
                if let Err(error) = reader.read_link(ino) {
                    walk.unreadable(*block, error);
                }
            }
        }
        reader
            .xattrs(ino)
            .check(reader.view, &inode.xattrs, &mut walk, |_, _| {});
        let nodes = walk.blocks;
        for block in nodes {
            self.claim_node(reader, usage, block, ino);
        }
        for extent in extents {
            if is_shared(&extent) {
                if let Err(number) = usage.references.count(&extent) {
                    usage.findings.push(no_run(ino, number));
                }
                continue;
            }
            for at in self.layout.to_look_at(&extent) {
                usage.claim(self, extent.tier, extent.block.0 + at, ino);
            }
        }
        Ok(())
    }

    fn check_orphans(
        &self,
        snapshot: &Snapshot<'_>,
        inodes: &HashMap<Ino, Seen>,
        findings: &mut Vec<Finding>,
    ) -> Result<()> {
        let reader = snapshot.reader();
        let state = reader.state()?;
        let mut listed = HashSet::new();
        let (mut prev, mut next) = (Ino(0), Ino(state.orphan_head.get()));
        while next.0 != 0 {
            let links = reader.get(next).ok().and_then(|inode| inode.orphan);
            let Some(links) = links.filter(|links| links.prev == prev && listed.insert(next)) else {
                findings.push(Finding::Orphans {
                    what: format!("inode {next} after {prev} does not belong there"),
                });
                break;
            };
            (prev, next) = (next, links.next);
        }
        count(findings, "orphans", state.orphans.get(), listed.len() as u64);
        for (ino, seen) in inodes {
            if seen.orphan != listed.contains(ino) {
                findings.push(Finding::Orphans {
                    what: format!("inode {ino} and the list disagree on whether it is in it"),
                });
            }
        }
        Ok(())
    }

    /// Compares the bitmaps with the blocks in use, and the allocator with the bitmaps.
    fn check_space(&self, usage: &mut Usage) -> Result<()> {
        for tier in Tier::ALL {
            let mut leak: Option<(u64, u64)> = None;
            let mut bits: Option<(BlockNo, std::sync::Arc<varve_format::Block>)> = None;
            let space = self.space.lock();
            let runs = self.layout.live_runs(tier).map(|(_, run)| run.first..run.end());
            for block in runs.flatten() {
                let (at, bit) = self.layout.bit(tier, block);
                if bits.as_ref().is_none_or(|(loaded, _)| *loaded != at) {
                    bits = match self.cache.load(at, false) {
                        Ok(content) => Some((at, content)),
                        Err(error) => {
                            usage.findings.push(Finding::Table {
                                what: error.to_string(),
                            });
                            break;
                        }
                    };
                }
                let marked = bits.as_ref().is_some_and(|(_, bytes)| {
                    bytes[BLOCK_HEADER_SIZE + (bit / 8) as usize] >> (bit % 8) & 1 == 1
                });
                let used = usage.used[tier as usize][(block / 64) as usize] >> (block % 64) & 1 == 1;
                if used && !marked {
                    usage.findings.push(Finding::NotMarked {
                        tier,
                        block: BlockNo(block),
                        owner: Ino(0),
                    });
                }
                leak = match leak {
                    Some((start, len)) if marked && !used && start + len == block => Some((start, len + 1)),
                    _ if marked && !used => {
                        usage.findings.extend(leaked(tier, leak));
                        Some((block, 1))
                    }
                    other => other,
                };
                if self.layout.usable(tier, block) {
                    let free = space.is_free(tier, block);
                    if free == marked && (marked || !space.is_pending(tier, block)) {
                        usage.findings.push(Finding::Allocator {
                            tier,
                            block: BlockNo(block),
                            used: marked,
                        });
                    }
                }
            }
            usage.findings.extend(leaked(tier, leak));
        }
        Ok(())
    }

    fn check_units(&self, snapshot: &Snapshot<'_>, usage: &mut Usage) -> Result<()> {
        let reader = snapshot.reader();
        for tier in [Tier::Ssd, Tier::Hdd] {
            let unit_blocks = self.layout.unit_blocks(tier);
            if unit_blocks == 0 {
                continue;
            }
            for unit in self.layout.live_units(tier) {
                // An unreadable row was reported before.
                let Ok(row) = reader.unit_row(tier, unit) else {
                    continue;
                };
                if (row.state == UnitRow::OPEN) != reader.is_open_unit(tier, unit)? {
                    usage.findings.push(Finding::Table {
                        what: format!("{} unit {unit}: its row and the pool state disagree", tier.name()),
                    });
                }
                let used = (unit * unit_blocks..(unit + 1) * unit_blocks)
                    .any(|block| usage.used[tier as usize][(block / 64) as usize] >> (block % 64) & 1 == 1);
                let fault = match row.state {
                    UnitRow::OPEN => None,
                    UnitRow::SEALED if used => {
                        self.footer(tier, unit, &row).err().map(|error| error.to_string())
                    }
                    UnitRow::SEALED | UnitRow::EMPTY if !used => None,
                    _ => Some(format!(
                        "{} unit {unit} holds data but has state {}",
                        tier.name(),
                        row.state
                    )),
                };
                usage.findings.extend(fault.map(|what| Finding::Table { what }));
            }
        }
        Ok(())
    }

    fn check_rows(&self, findings: &mut Vec<Finding>) {
        let known: HashSet<_> = match self.sessions() {
            Ok(rows) => rows.into_iter().map(|row| row.id).collect(),
            Err(error) => {
                findings.push(Finding::Table {
                    what: error.to_string(),
                });
                return;
            }
        };
        match self.grants() {
            Ok(rows) => findings.extend(rows.into_iter().filter(|row| !known.contains(&row.session)).map(
                |row| Finding::Table {
                    what: format!(
                        "grant {} is of session {}, which has no row",
                        row.lease, row.session
                    ),
                },
            )),
            Err(error) => findings.push(Finding::Table {
                what: error.to_string(),
            }),
        }
    }
}

/// Returns whether an error concerns only one image, or the block that contains it.
fn is_one_block(error: &StoreError) -> bool {
    let damaged = matches!(
        error,
        StoreError::Inode { .. } | StoreError::DataChecksum { .. } | StoreError::Footer { .. }
    );
    damaged || error.is_failed_read()
}

fn leaked(tier: Tier, run: Option<(u64, u64)>) -> Option<Finding> {
    run.map(|(start, len)| Finding::Leaked {
        tier,
        block: BlockNo(start),
        len,
    })
}

fn count(findings: &mut Vec<Finding>, what: &'static str, stored: u64, found: u64) {
    if stored != found {
        findings.push(Finding::Counter { what, stored, found });
    }
}
