//! Reads inodes, names, attributes and maps through any view of the metadata: the committed one, or a
//! transaction's.

pub(crate) mod checksums;

use crate::cache::{InodeFile, MetaCache};
use crate::layout::Layout;
use crate::{DirItem, MappedPart, Result, StoreError};
use std::mem::offset_of;
use std::ops::ControlFlow;
use std::sync::Arc;
use varve_extent_tree::{Directory, ExtentTree, Mapping, MetaRead, SharedRuns, Xattrs};
use varve_format::device::DeviceRow;
use varve_format::inode::{Content, INODE_SIZE, INODES_PER_BLOCK, Inode, InodeSlot};
use varve_format::space::UnitRow;
use varve_format::state::{POOL_STATE_SIZE, PoolState};
use varve_format::superblock::SuperblockError;
use varve_format::{
    BLOCK_BYTES, BLOCK_HEADER_SIZE, Block, BlockKind, BlockNo, DirRoot, Extent, ExtentFlags, FILE_BLOCKS_MAX,
    FileBlock, HashKey, Ino, InodeKey, SharedRoot, Tier, TreeRoot, sum_of_metadata, verify_block,
};
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

/// Owner of the inode file's tree and of the fixed areas.
pub(crate) const POOL_INO: Ino = Ino(0);

/// Reads of metadata, with methods that the trees' trait does not have.
pub(crate) trait View: MetaRead<Error = StoreError> {
    /// As [`MetaRead::read`], for a block without header; `check` is called when it is read from its medium.
    fn read_raw<R>(
        &self,
        block: BlockNo,
        check: impl FnOnce(&Block) -> Result<()>,
        f: impl FnOnce(&Block) -> R,
    ) -> Result<R>;

    /// Returns the known locations of the inode file, if this view sees its committed state.
    fn inode_file(&self) -> Option<&InodeFile>;

    /// Returns the cache of committed blocks.
    fn cache(&self) -> &MetaCache;

    /// Returns the checksums of a sealed unit, from its footer.
    fn footer(&self, tier: Tier, unit: u64, row: &UnitRow) -> Result<Arc<Vec<u32>>>;
}

/// A view and the pool's layout.
pub(crate) struct MetaReader<'a, V> {
    pub(crate) view: &'a V,
    pub(crate) layout: &'a Layout,
}

/// Whether the extent names the shared space, or a part of a run of it.
pub(crate) const fn is_shared(extent: &Extent) -> bool {
    extent.flags.contains(ExtentFlags::SHARED)
}

/// Checks kind, owner and number in a block's header.
fn expect(bytes: &Block, kind: BlockKind, owner: Ino, block: BlockNo) -> Result<()> {
    varve_format::BlockHeader::of(bytes)
        .expect(kind, owner, block)
        .map_err(|fault| StoreError::Block { block, fault })
}

impl<V: View> MetaReader<'_, V> {
    pub(crate) fn state_block(&self) -> BlockNo {
        BlockNo(self.layout.sb.state.start.get())
    }

    pub(crate) fn state(&self) -> Result<PoolState> {
        let block = self.state_block();
        self.view.read(block, |bytes| {
            expect(bytes, BlockKind::PoolState, POOL_INO, block)?;
            state_in(self.layout, bytes)
        })?
    }

    pub(crate) fn inode_root(&self) -> Result<TreeRoot> {
        let state = self.state()?;
        TreeRoot::read_from_bytes(&state.inode_root)
            .map_err(|_| StoreError::Damaged("inode file root".into()))
    }

    /// Returns block number `index` of the inode file, with its tier; `None` beyond its end.
    pub(crate) fn inode_block(&self, index: u64) -> Result<Option<BlockNo>> {
        let known = self.view.inode_file();
        if let Some(block) = known.and_then(|known| known.block(index)) {
            return Ok(Some(block));
        }
        let at = FileBlock(index);
        match ExtentTree::of(POOL_INO).lookup(self.view, &self.inode_root()?, at)? {
            Mapping::Mapped(extent) => {
                if let Some(known) = known {
                    known.learn(&extent);
                }
                Ok(Some(BlockNo::on(extent.tier, extent.block_at(at).0)))
            }
            Mapping::Hole { .. } => Ok(None),
        }
    }

    pub(crate) fn slot(&self, ino: Ino) -> Result<InodeSlot> {
        let missing = StoreError::NoInode(InodeKey {
            ino,
            ..InodeKey::default()
        });
        if ino.0 == 0 || ino.0 / INODES_PER_BLOCK >= FILE_BLOCKS_MAX {
            return Err(missing);
        }
        let block = self.inode_block(ino.0 / INODES_PER_BLOCK)?.ok_or(missing)?;
        self.images(block, |bytes| slot_in(bytes, ino))?
    }

    /// Reads a block of the inode file. Its images have their own checksums, but a block that was never
    /// written looks like one of unused inodes. So on slower tiers, which verify nothing themselves, the
    /// block must match its checksum.
    pub(crate) fn images<R>(&self, block: BlockNo, f: impl FnOnce(&Block) -> R) -> Result<R> {
        self.view
            .read_raw(block, |bytes| self.check_cold(block, bytes), f)
    }

    /// Compares a metadata block on a slower tier with the checksum in that tier's table.
    pub(crate) fn check_cold(&self, block: BlockNo, bytes: &Block) -> Result<()> {
        let Some((tier, number)) = block.home().filter(|(tier, _)| *tier != Tier::Nvm) else {
            return Ok(());
        };
        let sums = checksums::sums(self, tier, number, 1)?
            .resolve(|tier, unit, row| self.view.footer(tier, unit, row))?;
        if sums == [sum_of_metadata(crc32c::crc32c(bytes))] {
            Ok(())
        } else {
            Err(StoreError::DataChecksum {
                tier,
                block: BlockNo(number),
            })
        }
    }

    /// Returns the committed content of a block with a header. On a slower tier the block must match the
    /// checksum in that tier's table: after a lost write, an older block of the same owner looks whole.
    pub(crate) fn load_node(&self, block: BlockNo, trusting: bool) -> Result<Arc<Block>> {
        let cache = self.view.cache();
        if !block.is_cold() {
            return cache.load(block, false);
        }
        let whole = |bytes: &Block| verify_block(bytes).map_err(|fault| StoreError::Block { block, fault });
        let loaded = cache.load_checked(block, |bytes| {
            whole(bytes)?;
            self.check_cold(block, bytes)
        });
        match loaded {
            // A repair can use the content all the same, also where the checksums are lost. It is not cached,
            // or other readers would get it.
            Err(error) if trusting && !matches!(error, StoreError::Media(_)) => {
                let bytes = cache.read_medium(block)?;
                whole(&bytes)?;
                Ok(Arc::from(bytes))
            }
            other => other,
        }
    }

    pub(crate) fn get(&self, ino: Ino) -> Result<Inode> {
        match self.slot(ino)? {
            InodeSlot::Used(inode) => Ok(*inode),
            InodeSlot::Free(generation) | InodeSlot::Reserved(generation) => {
                Err(StoreError::NoInode(InodeKey { ino, generation }))
            }
        }
    }

    pub(crate) fn get_key(&self, key: InodeKey) -> Result<Inode> {
        let inode = self.get(key.ino)?;
        if inode.attr.key == key {
            Ok(inode)
        } else {
            Err(StoreError::NoInode(key))
        }
    }

    pub(crate) fn hash_key(&self) -> HashKey {
        HashKey(self.layout.sb.dir_hash_key)
    }

    pub(crate) fn directory(&self, ino: Ino) -> Directory {
        Directory::of(ino, self.hash_key())
    }

    pub(crate) fn xattrs(&self, ino: Ino) -> Xattrs {
        Xattrs::of(ino, self.hash_key())
    }

    pub(crate) fn dir_lookup(&self, dir: Ino, name: &[u8]) -> Result<Option<DirItem>> {
        let root = dir_root(&self.get(dir)?)?;
        let found = self.directory(dir).lookup(self.view, &root, name)?;
        Ok(found.map(|entry| DirItem {
            name: name.to_vec(),
            key: entry.key,
            kind: entry.kind,
            cookie: entry.cookie,
        }))
    }

    pub(crate) fn dir_iter(&self, dir: Ino, cookie: u64, max: usize) -> Result<Vec<DirItem>> {
        let root = dir_root(&self.get(dir)?)?;
        let mut out = Vec::new();
        if max == 0 {
            return Ok(out);
        }
        self.directory(dir)
            .for_each(self.view, &root, cookie, |cookie, entry| {
                out.push(DirItem {
                    name: entry.name.to_vec(),
                    key: entry.key,
                    kind: entry.kind,
                    cookie,
                });
                if out.len() < max {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                }
            })?;
        Ok(out)
    }

    pub(crate) fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        let inode = self.get(ino)?;
        match inode.content {
            Content::Symlink(target) => Ok(target),
            Content::SymlinkBlock(block) => self.view.read(block, |bytes| {
                expect(bytes, BlockKind::Symlink, ino, block)?;
                let len = inode.attr.size_bytes as usize;
                bytes[BLOCK_HEADER_SIZE..]
                    .get(..len)
                    .map(<[u8]>::to_vec)
                    .ok_or_else(|| StoreError::Damaged(format!("inode {ino}: target of {len} bytes")))
            })?,
            _ => Err(StoreError::WrongKind {
                ino,
                wanted: "symbolic link",
            }),
        }
    }

    pub(crate) fn xattr_get(&self, ino: Ino, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let inode = self.get(ino)?;
        self.xattrs(ino).get(self.view, &inode.xattrs, name)
    }

    pub(crate) fn xattr_list(&self, ino: Ino) -> Result<Vec<(Vec<u8>, usize)>> {
        let inode = self.get(ino)?;
        self.xattrs(ino).list(self.view, &inode.xattrs)
    }

    /// The first extents of a range, clipped to it, at most `max`. Of a shared extent, where its runs lie:
    /// such parts have the flag `SHARED`, and tier and block of the run.
    pub(crate) fn extents(
        &self,
        ino: Ino,
        root: &TreeRoot,
        from: u64,
        to: u64,
        max: usize,
    ) -> Result<Vec<Extent>> {
        let extents = self.unresolved(ino, root, from, to, max)?;
        if !extents.iter().any(is_shared) {
            return Ok(extents);
        }
        let parts = self.resolve(extents, max)?;
        Ok(parts.into_iter().map(|part| part.extent).collect())
    }

    /// As [`extents`](Self::extents), each with its number in the shared space, if it has one.
    pub(crate) fn parts(
        &self,
        ino: Ino,
        root: &TreeRoot,
        from: u64,
        to: u64,
        max: usize,
    ) -> Result<Vec<MappedPart>> {
        let extents = self.unresolved(ino, root, from, to, max)?;
        self.resolve(extents, max)
    }

    /// Finds the runs of shared extents. Not joined: as many parts as were asked for mean that there may be
    /// more.
    fn resolve(&self, extents: Vec<Extent>, max: usize) -> Result<Vec<MappedPart>> {
        let mut out: Vec<MappedPart> = Vec::with_capacity(extents.len());
        let mut shared = None;
        for extent in extents {
            if out.len() >= max {
                break;
            }
            if !is_shared(&extent) {
                out.push(MappedPart {
                    extent,
                    number: None,
                    owners: 1,
                });
                continue;
            }
            let root = match &shared {
                Some(root) => root,
                None => shared.insert(self.shared_root()?),
            };
            let first = extent.block.0;
            let numbers = first..first + u64::from(extent.len);
            for run in SharedRuns::new().runs(self.view, root, numbers, max - out.len())? {
                let extent = Extent {
                    file_block: FileBlock(extent.file_block.0 + (run.first - first)),
                    len: run.len,
                    tier: run.tier,
                    block: run.block,
                    flags: extent.flags,
                };
                out.push(MappedPart {
                    extent,
                    number: Some(run.first),
                    owners: run.refs,
                });
            }
        }
        Ok(out)
    }

    /// As [`extents`](Self::extents), with the numbers of the shared space that shared extents name.
    pub(crate) fn unresolved(
        &self,
        ino: Ino,
        root: &TreeRoot,
        from: u64,
        to: u64,
        max: usize,
    ) -> Result<Vec<Extent>> {
        if from >= to {
            return Ok(Vec::new());
        }
        ExtentTree::of(ino).extents(self.view, root, FileBlock(from)..FileBlock(to), max)
    }

    /// Root of the shared runs.
    pub(crate) fn shared_root(&self) -> Result<SharedRoot> {
        SharedRoot::read_from_bytes(&self.state()?.shared)
            .map_err(|_| StoreError::Damaged("root of the shared runs".into()))
    }

    pub(crate) fn map(&self, ino: Ino, from: FileBlock, max: usize) -> Result<Vec<Extent>> {
        let root = file_root(&self.get(ino)?)?;
        self.extents(ino, &root, from.0, FILE_BLOCKS_MAX, max)
    }

    pub(crate) fn map_parts(&self, ino: Ino, from: FileBlock, max: usize) -> Result<Vec<MappedPart>> {
        let root = file_root(&self.get(ino)?)?;
        self.parts(ino, &root, from.0, FILE_BLOCKS_MAX, max)
    }

    /// Returns the first byte of data (or of a hole) at or after `offset`.
    pub(crate) fn seek(&self, ino: Ino, offset: u64, data: bool) -> Result<Option<u64>> {
        let inode = self.get(ino)?;
        let root = file_root(&inode)?;
        let size = inode.attr.size_bytes;
        if offset >= size {
            return Ok(None);
        }
        let mut at = offset / BLOCK_BYTES;
        loop {
            let batch = self.extents(ino, &root, at, FILE_BLOCKS_MAX, 64)?;
            for extent in &batch {
                if extent.flags.contains(ExtentFlags::UNWRITTEN) {
                    if !data && extent.file_block.0 >= at {
                        return Ok(Some((at * BLOCK_BYTES).max(offset).min(size)));
                    }
                    if data {
                        at = at.max(extent.end().0);
                    }
                    continue;
                }
                if data {
                    let found = (extent.file_block.0.max(at) * BLOCK_BYTES).max(offset);
                    return Ok((found < size).then_some(found));
                }
                if extent.file_block.0 > at {
                    return Ok(Some((at * BLOCK_BYTES).max(offset).min(size)));
                }
                at = extent.end().0;
            }
            if batch.len() < 64 {
                return Ok((!data).then_some((at * BLOCK_BYTES).max(offset).min(size)));
            }
            if let Some(last) = batch.last() {
                at = at.max(last.end().0);
            }
        }
    }

    pub(crate) fn unit_row(&self, tier: Tier, unit: u64) -> Result<UnitRow> {
        let place = self.layout.unit_row(tier, unit);
        self.view.read(place.block, |bytes| {
            expect(bytes, BlockKind::UnitTable, POOL_INO, place.block)?;
            UnitRow::read_from_prefix(&bytes[place.offset..])
                .map(|(row, _)| row)
                .map_err(|_| StoreError::Damaged("unit row".into()))
        })?
    }

    /// Returns `count` checksums of a device's NVM table, from `index` on.
    pub(crate) fn table_checksums(&self, tier: Tier, run: usize, index: u64, count: u64) -> Result<Vec<u32>> {
        let mut out = Vec::with_capacity(count as usize);
        while (out.len() as u64) < count {
            let place = self.layout.checksum(tier, run, index + out.len() as u64);
            self.view.read(place.block, |bytes| {
                expect(bytes, BlockKind::ChecksumTable, POOL_INO, place.block)?;
                let left = count as usize - out.len();
                out.extend(
                    bytes[place.offset..]
                        .chunks_exact(4)
                        .take(left)
                        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])),
                );
                Ok::<_, StoreError>(())
            })??;
        }
        Ok(out)
    }

    /// Returns the open unit of a device.
    pub(crate) fn open_unit(&self, tier: Tier, run: usize) -> Result<Option<u64>> {
        let place = self.layout.runs(tier).nth(run).and_then(|run| run.row);
        let number = match place {
            None => self.state()?.open_unit[tier as usize],
            Some(place) => {
                let at = offset_of!(DeviceRow, open_unit);
                self.row(place, BlockKind::DeviceTable, |bytes| {
                    U64::read_from_prefix(&bytes[at..]).map_or(U64::ZERO, |(number, _)| number)
                })?
            }
        };
        Ok(number.get().checked_sub(1))
    }

    /// Returns whether a unit is the open one of its device.
    pub(crate) fn is_open_unit(&self, tier: Tier, unit: u64) -> Result<bool> {
        let run = self.layout.run_of(tier, unit * self.layout.unit_blocks(tier)).0;
        Ok(self.open_unit(tier, run)? == Some(unit))
    }

    /// Calls `f` with the bytes of a fixed row.
    pub(crate) fn row<R>(
        &self,
        place: crate::layout::Place,
        kind: BlockKind,
        f: impl FnOnce(&[u8]) -> R,
    ) -> Result<R> {
        self.view.read(place.block, |bytes| {
            expect(bytes, kind, POOL_INO, place.block)?;
            Ok(f(&bytes[place.offset..]))
        })?
    }
}

/// Decodes the pool state from its block.
pub(crate) fn state_in(layout: &Layout, bytes: &Block) -> Result<PoolState> {
    let state = PoolState::read_from_bytes(&bytes[BLOCK_HEADER_SIZE..BLOCK_HEADER_SIZE + POOL_STATE_SIZE])
        .map_err(|_| StoreError::Damaged("pool state block".into()))?;
    let stale = state.features.without(&layout.features());
    if !stale.is_empty() {
        return Err(StoreError::Superblock {
            device: "NVM".into(),
            fault: SuperblockError::Stale(stale),
        });
    }
    match layout.doubt(&state) {
        None => Ok(state),
        Some(doubt) => Err(StoreError::Damaged(format!("pool state: {doubt}"))),
    }
}

/// Decodes the image of `ino` from its block.
pub(crate) fn slot_in(bytes: &Block, ino: Ino) -> Result<InodeSlot> {
    let at = (ino.0 % INODES_PER_BLOCK) as usize * INODE_SIZE;
    InodeSlot::decode(&bytes[at..at + INODE_SIZE], ino).map_err(|fault| StoreError::Inode { ino, fault })
}

/// Returns the root of a directory's names.
pub(crate) fn dir_root(inode: &Inode) -> Result<DirRoot> {
    match &inode.content {
        Content::Dir(root) => Ok(*root),
        _ => Err(StoreError::WrongKind {
            ino: inode.attr.key.ino,
            wanted: "directory",
        }),
    }
}

/// Returns the root of a regular file's extents.
pub(crate) fn file_root(inode: &Inode) -> Result<TreeRoot> {
    match &inode.content {
        Content::File(root) if inode.attr.kind() == varve_format::FileKind::Regular => Ok(*root),
        _ => Err(StoreError::WrongKind {
            ino: inode.attr.key.ino,
            wanted: "regular file",
        }),
    }
}
