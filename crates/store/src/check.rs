//! Checking a pool: walks every structure and says what contradicts what, with the data a repair needs. Changes nothing.

use crate::cache::Committed;
use crate::lens::{Lens, POOL_INO, dir_root};
use crate::store::{Snapshot, Store};
use crate::{Result, StoreError};
use std::collections::{HashMap, HashSet};
use varve_extent_tree::{CheckVisitor, ExtentTree, MetaRead, TreeError};
use varve_format::inode::{Content, INODES_PER_BLOCK, Inode, InodeSlot};
use varve_format::space::UnitRow;
use varve_format::{
    BLOCK_BYTES, BLOCK_HEADER_SIZE, BlockKind, BlockNo, Extent, ExtentFlags, FileKind, Generation, Ino,
    InodeKey, ROOT_INO, Tier,
};

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// A tree or block is damaged; what hangs below was not looked at (so its blocks may show as `Leaked`).
    Tree {
        /// Inode whose tree it is; 0: the inode file.
        owner: Ino,
        /// The block, if it is one that cannot be read.
        block: Option<BlockNo>,
        /// What is wrong.
        what: String,
    },
    /// An inode image is damaged.
    Image {
        /// Inode.
        ino: Ino,
        /// What is wrong.
        what: String,
    },
    /// A fixed block or row is damaged or contradicts another.
    Table {
        /// What is wrong.
        what: String,
    },
    /// Somebody uses a block that no tier has, or a fixed one.
    OutOfBounds {
        /// Tier.
        tier: Tier,
        /// Block.
        block: BlockNo,
        /// User.
        owner: Ino,
    },
    /// A block in use whose bit is not set.
    NotMarked {
        /// Tier.
        tier: Tier,
        /// Block.
        block: BlockNo,
        /// User; 0: the inode file.
        owner: Ino,
    },
    /// Blocks whose bits are set though nobody uses them.
    Leaked {
        /// Tier.
        tier: Tier,
        /// First block.
        block: BlockNo,
        /// Blocks.
        len: u64,
    },
    /// A second user of a block.
    Shared {
        /// Tier.
        tier: Tier,
        /// Block.
        block: BlockNo,
        /// The second user.
        owner: Ino,
    },
    /// The allocator would give out a block in use, or never gives out a free one.
    Allocator {
        /// Tier.
        tier: Tier,
        /// Block.
        block: BlockNo,
        /// Whether its bit is set on media.
        used: bool,
    },
    /// A name whose inode is not in use, or has another generation or kind.
    Dangling {
        /// Directory.
        dir: Ino,
        /// Name.
        name: Vec<u8>,
        /// What it names.
        key: InodeKey,
    },
    /// A link count that is not the number of names (for a directory: 2 and its subdirectories).
    LinkCount {
        /// Inode.
        ino: Ino,
        /// In the image.
        stored: u32,
        /// By the names.
        found: u32,
    },
    /// A directory with more than one name.
    DirTwice {
        /// The directory.
        ino: Ino,
        /// Second parent.
        dir: Ino,
    },
    /// A directory whose parent pointer is wrong.
    Parent {
        /// The directory.
        ino: Ino,
        /// In the image.
        stored: Ino,
        /// By its name.
        found: Ino,
    },
    /// An inode that no path from the root leads to, and that is not in the orphan list.
    Lost {
        /// Inode.
        ino: Ino,
        /// Its kind.
        kind: FileKind,
    },
    /// The orphan list is broken.
    Orphans {
        /// What is wrong.
        what: String,
    },
    /// A counter of the pool is wrong.
    Counter {
        /// What is counted.
        what: &'static str,
        /// On media.
        stored: u64,
        /// Found.
        found: u64,
    },
    /// A size that contradicts what the inode is.
    Size {
        /// Inode.
        ino: Ino,
        /// In the image, in bytes.
        stored: u64,
    },
    /// A data block does not have its checksum.
    Data {
        /// File.
        ino: Ino,
        /// Tier.
        tier: Tier,
        /// Block.
        block: BlockNo,
        /// What is wrong.
        what: String,
    },
}

struct Usage {
    used: [Vec<u64>; 3],
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

/// Collects what the trees tell.
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

/// What is remembered of each inode.
struct Seen {
    generation: Generation,
    kind: FileKind,
    nlink: u32,
    parent: Ino,
    orphan: bool,
    names: u32,
    subdirs: u32,
    /// Directory that names it (the first one).
    dir: Option<Ino>,
}

type Names = Vec<(Ino, Vec<u8>, InodeKey, FileKind)>;

impl Store {
    /// Checks all structures. No transaction runs meanwhile.
    ///
    /// # Errors
    /// Only if not even the pool state can be read, or a device fails; everything else is a finding.
    pub fn check(&self) -> Result<Vec<Finding>> {
        self.check_since(self.begin_check())
    }

    pub(crate) fn check_since(&self, begun: u64) -> Result<Vec<Finding>> {
        let _writer = self.writer.lock();
        let snapshot = self.trusting_snapshot();
        let mut usage = Usage {
            used: Tier::ALL.map(|tier| vec![0; self.layout.blocks(tier).div_ceil(64) as usize]),
            findings: self.check_fixed()?,
        };
        let mut inodes = HashMap::new();
        let mut names = Vec::new();
        self.check_inodes(begun, &snapshot, &mut usage, &mut inodes, &mut names)?;
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

    /// Superblock copies, the journal's headers, the fixed areas' blocks.
    fn check_fixed(&self) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        for copy in crate::repair::bad_copies(&self.devices, &self.layout.sb)? {
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

    /// Data on NVM that does not have its checksum: reads of it do not compare. Transactions go on meanwhile.
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

    /// Compares all data with its checksums. Transactions go on meanwhile.
    ///
    /// # Errors
    /// The inodes cannot be enumerated, or [checks have ended](Self::end_checks).
    pub fn check_data(&self) -> Result<Vec<Finding>> {
        self.check_data_since(self.begin_check())
    }

    pub(crate) fn check_data_since(&self, begun: u64) -> Result<Vec<Finding>> {
        let mut inos = Vec::new();
        let mut findings = Vec::new();
        let blocks = self.snapshot().lens().state()?.inode_blocks.get();
        for ino in (1..blocks * INODES_PER_BLOCK).map(Ino) {
            self.goes_on(begun)?;
            // One image that is damaged is no reason not to look at the other files.
            match self.slot(ino) {
                Ok(InodeSlot::Used(inode))
                    if matches!(inode.content, Content::File(_))
                        && inode.attr.kind() == FileKind::Regular =>
                {
                    inos.push(ino);
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
                    // Removed meanwhile.
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
            // The file may have changed since the map was read: then the block is not its any more.
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

    fn check_inodes(
        &self,
        begun: u64,
        snapshot: &Snapshot<'_>,
        usage: &mut Usage,
        inodes: &mut HashMap<Ino, Seen>,
        names: &mut Names,
    ) -> Result<()> {
        let lens = snapshot.lens();
        let state = lens.state()?;
        let root = lens.inode_root()?;
        let mut extents = Vec::new();
        let mut walk = Walk {
            owner: POOL_INO,
            blocks: Vec::new(),
            findings: &mut usage.findings,
        };
        ExtentTree::of(POOL_INO).check(lens.view, &root, &mut walk, |extent| extents.push(extent));
        let nodes = walk.blocks;
        for block in nodes {
            self.claim_node(&lens, usage, block, POOL_INO);
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
            match lens.slot(ino) {
                Ok(InodeSlot::Free(_)) => {}
                Ok(InodeSlot::Reserved(_)) => in_use += 1,
                Ok(InodeSlot::Used(inode)) => {
                    in_use += 1;
                    self.check_inode(&lens, &inode, usage, names)?;
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

    /// A node of a tree, or a block of its own. On a slower tier it must also have its checksum there.
    fn claim_node(&self, lens: &Lens<'_, Committed<'_>>, usage: &mut Usage, block: BlockNo, owner: Ino) {
        let Some((tier, number)) = block.home() else {
            let tier = Tier::Nvm;
            usage.findings.push(Finding::OutOfBounds { tier, block, owner });
            return;
        };
        usage.claim(self, tier, number, owner);
        // That it can be read is known, or named already.
        if tier != Tier::Nvm
            && let Ok(Err(error)) = lens.view.read(block, |bytes| lens.check_cold(block, bytes))
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
        lens: &Lens<'_, Committed<'_>>,
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
                ExtentTree::of(ino).check(lens.view, root, &mut walk, |extent| extents.push(extent));
            }
            Content::Dir(_) => {
                let root = dir_root(inode)?;
                lens.directory(ino)
                    .check(lens.view, &root, &mut walk, |_, entry| {
                        names.push((ino, entry.name.to_vec(), entry.key, entry.kind));
                    });
            }
            Content::Symlink(_) => {}
            Content::SymlinkBlock(block) => {
                walk.blocks.push(*block);
                if let Err(error) = lens.read_link(ino) {
                    walk.unreadable(*block, error);
                }
            }
        }
        lens.xattrs(ino)
            .check(lens.view, &inode.xattrs, &mut walk, |_, _| {});
        let nodes = walk.blocks;
        for block in nodes {
            self.claim_node(lens, usage, block, ino);
        }
        for extent in extents {
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
        let lens = snapshot.lens();
        let state = lens.state()?;
        let mut listed = HashSet::new();
        let (mut prev, mut next) = (Ino(0), Ino(state.orphan_head.get()));
        while next.0 != 0 {
            let links = lens.get(next).ok().and_then(|inode| inode.orphan);
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

    /// Compares bitmaps with what is used, and the allocator with the bitmaps.
    fn check_space(&self, usage: &mut Usage) -> Result<()> {
        for tier in Tier::ALL {
            let mut leak: Option<(u64, u64)> = None;
            let mut bits: Option<(BlockNo, std::sync::Arc<varve_format::Block>)> = None;
            let space = self.space.lock();
            for block in 0..self.layout.blocks(tier) {
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
        let lens = snapshot.lens();
        for tier in [Tier::Ssd, Tier::Hdd] {
            let unit_blocks = self.layout.unit_blocks(tier);
            if unit_blocks == 0 {
                continue;
            }
            let open = lens.open_unit(tier)?;
            for unit in 0..self.layout.blocks(tier) / unit_blocks {
                // One that cannot be read is named already.
                let Ok(row) = lens.unit_row(tier, unit) else {
                    continue;
                };
                if (row.state == UnitRow::OPEN) != (open == Some(unit)) {
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

impl Seen {
    fn of(inode: &Inode) -> Self {
        Self {
            generation: inode.attr.key.generation,
            kind: inode.attr.kind(),
            nlink: inode.attr.nlink,
            parent: inode.attr.parent,
            orphan: inode.orphan.is_some(),
            names: 0,
            subdirs: 0,
            dir: None,
        }
    }
}

/// Whether an error is about an image, or the block that it is in, and not about all of them.
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

/// Names against inodes: both ways.
fn check_names(inodes: &mut HashMap<Ino, Seen>, names: &Names, findings: &mut Vec<Finding>) {
    let mut children: HashMap<Ino, Vec<Ino>> = HashMap::new();
    for (dir, name, key, kind) in names {
        let fits = inodes
            .get(&key.ino)
            .is_some_and(|seen| seen.generation == key.generation && seen.kind == *kind);
        if !fits {
            findings.push(Finding::Dangling {
                dir: *dir,
                name: name.clone(),
                key: *key,
            });
            continue;
        }
        if *kind == FileKind::Directory {
            if let Some(parent) = inodes.get_mut(dir) {
                parent.subdirs += 1;
            }
            children.entry(*dir).or_default().push(key.ino);
        }
        if let Some(seen) = inodes.get_mut(&key.ino) {
            seen.names += 1;
            if *kind == FileKind::Directory && seen.dir.replace(*dir).is_some() {
                findings.push(Finding::DirTwice {
                    ino: key.ino,
                    dir: *dir,
                });
            }
        }
    }
    let mut reached = HashSet::from([ROOT_INO]);
    let mut queue = vec![ROOT_INO];
    while let Some(dir) = queue.pop() {
        for child in children.remove(&dir).unwrap_or_default() {
            if reached.insert(child) {
                queue.push(child);
            }
        }
    }
    if !inodes.contains_key(&ROOT_INO) {
        findings.push(Finding::Table {
            what: "there is no root directory".into(),
        });
    }
    let mut all: Vec<_> = inodes.iter().collect();
    all.sort_unstable_by_key(|(ino, _)| **ino);
    for (&ino, seen) in all {
        let is_dir = seen.kind == FileKind::Directory;
        let named = seen.names > 0 || ino == ROOT_INO;
        let found = match (named, is_dir) {
            (true, true) => 2 + seen.subdirs,
            (true, false) => seen.names,
            (false, _) => 0,
        };
        if seen.nlink != found {
            findings.push(Finding::LinkCount {
                ino,
                stored: seen.nlink,
                found,
            });
        }
        if !seen.orphan && (!named || is_dir && !reached.contains(&ino)) {
            findings.push(Finding::Lost { ino, kind: seen.kind });
        }
        if let Some(dir) = seen.dir.filter(|dir| is_dir && seen.parent != *dir) {
            findings.push(Finding::Parent {
                ino,
                stored: seen.parent,
                found: dir,
            });
        }
    }
}
