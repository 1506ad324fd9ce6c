//! Repairs inodes: images, trees, attributes, sizes, and blocks that two files use.

use crate::pool::Store;
use crate::repair::survey::{Found, Survey};
use crate::repair::{RepairOptions, RepairReport};
use crate::tx::TxState;
use crate::{DataTarget, Result, StoreError};
use varve_extent_tree::ExtentTree;
use varve_format::inode::{Content, INODE_SIZE, INODES_PER_BLOCK, Inode, InodeSlot};
use varve_format::{
    BLOCK_BYTES, BLOCK_SIZE, BlockNo, DIR_SIZE, DirRoot, Dirent, Extent, ExtentFlags, FILE_BLOCKS_MAX,
    FILE_SIZE_MAX, Ino, InodeAttr, InodeKey, ROOT_INO, TreeRoot, XattrRoot,
};

impl Store {
    /// Replaces unreadable images by free ones, and puts misplaced images in their places.
    pub(super) fn mend_images(
        &self,
        survey: &Survey,
        options: RepairOptions,
        report: &mut RepairReport,
    ) -> Result<()> {
        for (ino, why) in &survey.bad_images {
            let bytes = if *ino == ROOT_INO {
                new_root(options)
                    .encode(*ino)
                    .map_err(|fault| StoreError::Inode { ino: *ino, fault })?
            } else {
                free_image(survey, *ino, options)?
            };
            self.put_image(*ino, &bytes)?;
            report.mended(format!("inode {ino}: image made free ({why})"));
            report.lost(*ino, None, format!("inode {ino}: {why}"));
        }
        for (ino, slot) in &survey.misplaced {
            let bytes = slot
                .encode(*ino)
                .map_err(|fault| StoreError::Inode { ino: *ino, fault })?;
            self.put_image(*ino, &bytes)?;
            report.mended(format!("inode {ino}: its image lay in the place of another"));
        }
        Ok(())
    }

    fn put_image(&self, ino: Ino, bytes: &[u8]) -> Result<()> {
        let mut tx = self.begin()?;
        let block = tx
            .core
            .reader()
            .inode_block(ino.0 / INODES_PER_BLOCK)?
            .ok_or(StoreError::NoInode(InodeKey {
                ino,
                ..InodeKey::default()
            }))?;
        tx.core.put_image(ino, block, bytes)?;
        tx.commit().map(drop)
    }

    /// Reports files whose content may not be theirs.
    pub(super) fn note_doubts(&self, survey: &Survey, ino: Ino, found: &Found, report: &mut RepairReport) {
        let old = found.extents.iter().any(|extent| {
            (extent.block.0..extent.block.0 + u64::from(extent.len)).any(|block| {
                let (bitmap, _) = self.layout.bit(extent.tier, block);
                !survey.marked[extent.tier as usize].has(block) && !survey.bad_fixed.contains_key(&bitmap.0)
            })
        });
        if old {
            // A write of a metadata block was lost: the whole block is old, not only the part that shows.
            report.lost(
                ino,
                None,
                "some of its blocks counted as free: its content may be an old one, or another's",
            );
        }
        for copy in &found.copies {
            for (other, holder) in &survey.found {
                let shares = holder.extents.iter().find(|extent| {
                    extent.tier == copy.tier
                        && (extent.block.0..extent.block.0 + u64::from(extent.len)).contains(&copy.block.0)
                });
                if let Some(extent) = shares {
                    let at = (extent.file_block.0 + copy.block.0 - extent.block.0) * BLOCK_BYTES;
                    report.lost(
                        *other,
                        Some((at, at + BLOCK_BYTES)),
                        format!("inode {ino} used the same block: one of the two has wrong content"),
                    );
                }
            }
        }
    }

    pub(super) fn mend_inode(&self, ino: Ino, found: &Found, report: &mut RepairReport) -> Result<()> {
        let file_changed = !found.dropped.is_empty() || !found.copies.is_empty();
        let mut inode = found.inode.clone();
        let size_wrong = self.size_wrong(&inode);
        if found.tree.is_none()
            && found.xattrs.is_none()
            && found.link.is_none()
            && !file_changed
            && !size_wrong
        {
            return Ok(());
        }
        let mut tx = self.begin()?;
        tx.use_reserve();
        let core = &mut tx.core;
        match &inode.content {
            Content::File(_) if found.tree.is_some() || file_changed => {
                mend_file(core, ino, &mut inode, found, report)?
            }
            Content::Dir(_) if found.tree.is_some() => mend_directory(core, ino, &mut inode, found, report)?,
            Content::SymlinkBlock(_) if found.link.is_some() => mend_link(ino, &mut inode, found, report),
            _ => {}
        }
        mend_attributes(core, ino, &mut inode, found, report)?;
        if matches!(inode.content, Content::Dir(_)) {
            inode.attr.size_bytes = DIR_SIZE;
        }
        if inode.attr.size_bytes > FILE_SIZE_MAX {
            inode.attr.size_bytes = found
                .extents
                .last()
                .map_or(0, |extent| extent.end().0 * BLOCK_BYTES);
        }
        if size_wrong {
            report.mended(format!("inode {ino}: its size"));
        }
        tx.core.put(&inode)?;
        tx.commit().map(drop)
    }

    /// Returns whether a size contradicts the kind of the inode.
    pub(crate) fn size_wrong(&self, inode: &Inode) -> bool {
        match &inode.content {
            // Older pools have the size of the directory's tree here.
            Content::Dir(_) => !inode.attr.size_bytes.is_multiple_of(BLOCK_BYTES),
            Content::File(_) => inode.attr.size_bytes > FILE_SIZE_MAX,
            Content::Symlink(_) | Content::SymlinkBlock(_) => false,
        }
    }
}

fn bytes_of(extent: &Extent) -> (u64, u64) {
    (
        extent.file_block.0.saturating_mul(BLOCK_BYTES),
        extent.end().0.saturating_mul(BLOCK_BYTES),
    )
}

pub(super) fn free_image(survey: &Survey, ino: Ino, options: RepairOptions) -> Result<[u8; INODE_SIZE]> {
    InodeSlot::Free(survey.generation(ino, options.now_ns))
        .encode(ino)
        .map_err(|fault| StoreError::Inode { ino, fault })
}

fn new_root(options: RepairOptions) -> InodeSlot {
    InodeSlot::Used(Box::new(Inode::new(InodeAttr {
        parent: ROOT_INO,
        ..InodeAttr::new(InodeKey::ROOT, 0o040_755, options.now_ns)
    })))
}

/// Builds a new tree of these extents, ascending; the blocks of an old tree are freed by the last pass over
/// the bitmaps.
pub(super) fn make_tree(core: &mut TxState<'_>, ino: Ino, extents: &[Extent]) -> Result<TreeRoot> {
    let tree = ExtentTree::of(ino);
    let mut root = TreeRoot::EMPTY;
    let mut joined: Vec<Extent> = Vec::new();
    for extent in extents {
        match joined.last_mut() {
            Some(last) if last.joins(extent) => last.len += extent.len,
            _ => joined.push(*extent),
        }
    }
    for part in joined.chunks(256) {
        let (Some(first), Some(last)) = (part.first(), part.last()) else {
            continue;
        };
        tree.replace(core, &mut root, first.file_block..last.end(), part)?;
    }
    Ok(root)
}

/// Returns the file's extents, with copies of the blocks that another file uses, too.
fn copy_shared(
    core: &mut TxState<'_>,
    ino: Ino,
    found: &Found,
    report: &mut RepairReport,
) -> Result<Vec<Extent>> {
    let mut extents = found.extents.clone();
    for copy in &found.copies {
        let span = core.alloc_data(DataTarget::prefer(copy.tier).with_reserve(), 1)?;
        if !copy.flags.contains(ExtentFlags::UNWRITTEN) {
            let mut bytes = vec![0; BLOCK_SIZE];
            if core
                .store
                .read_blocks(copy.tier, copy.block.0, &mut bytes)
                .is_err()
            {
                core.free_span(span, true)?;
                report.lost(
                    ino,
                    Some(bytes_of(copy)),
                    "its block cannot be read, and is another's too",
                );
                continue;
            }
            core.write_new(span, &bytes)?;
            report.lost(
                ino,
                Some(bytes_of(copy)),
                "another file used the same block: one of the two has wrong content",
            );
        }
        extents.push(Extent {
            tier: span.tier,
            block: BlockNo(span.start),
            ..*copy
        });
    }
    extents.extend(&found.shared);
    extents.sort_unstable_by_key(|extent| extent.file_block);
    extents.retain(|extent| extent.file_block.0 < FILE_BLOCKS_MAX);
    Ok(extents)
}

/// Rebuilds a file's tree from the extents that are left, and reports its losses.
fn mend_file(
    core: &mut TxState<'_>,
    ino: Ino,
    inode: &mut Inode,
    found: &Found,
    report: &mut RepairReport,
) -> Result<()> {
    let extents = copy_shared(core, ino, found, report)?;
    inode.content = Content::File(make_tree(core, ino, &extents)?);
    for gone in &found.dropped {
        report.lost(
            ino,
            Some(bytes_of(gone)),
            "its blocks belong to somebody else or to nobody",
        );
    }
    if let Some((what, true)) = &found.tree {
        let mut at = 0;
        let end = inode.attr.size_bytes.div_ceil(BLOCK_BYTES);
        for extent in extents.iter().filter(|extent| extent.file_block.0 < end) {
            if extent.file_block.0 > at {
                report.lost(
                    ino,
                    Some((at * BLOCK_BYTES, extent.file_block.0 * BLOCK_BYTES)),
                    format!("reads as zeros: {what}"),
                );
            }
            at = extent.end().0;
        }
        if at < end {
            report.lost(
                ino,
                Some((at * BLOCK_BYTES, inode.attr.size_bytes)),
                format!("reads as zeros: {what}"),
            );
        }
    }
    report.mended(format!("inode {ino}: its extents made again"));
    Ok(())
}

/// Rebuilds a directory from the names that are left.
fn mend_directory(
    core: &mut TxState<'_>,
    ino: Ino,
    inode: &mut Inode,
    found: &Found,
    report: &mut RepairReport,
) -> Result<()> {
    let directory = core.reader().directory(ino);
    let mut root = DirRoot::default();
    for name in &found.names {
        let entry = Dirent {
            key: name.key,
            kind: name.kind,
            name: &name.name,
        };
        match directory.insert(core, &mut root, &entry) {
            Ok(_) | Err(StoreError::Tree(varve_extent_tree::TreeError::Exists)) => {}
            Err(error) => return Err(error),
        }
    }
    inode.content = Content::Dir(root);
    if let Some((what, true)) = &found.tree {
        report.lost(ino, None, format!("names of this directory, if any: {what}"));
    }
    report.mended(format!("directory {ino}: its names made again"));
    Ok(())
}

/// Gives a symbolic link a target in place of the lost one.
fn mend_link(ino: Ino, inode: &mut Inode, found: &Found, report: &mut RepairReport) {
    let target = b"lost-by-damage";
    inode.content = Content::Symlink(target.to_vec());
    inode.attr.size_bytes = target.len() as u64;
    report.lost(
        ino,
        None,
        format!(
            "target of a symbolic link: {}",
            found.link.as_deref().unwrap_or("")
        ),
    );
    report.mended(format!("inode {ino}: a target in place of the lost one"));
}

/// Rebuilds attributes from those that are readable, in a new tree.
fn mend_attributes(
    core: &mut TxState<'_>,
    ino: Ino,
    inode: &mut Inode,
    found: &Found,
    report: &mut RepairReport,
) -> Result<()> {
    if let Some((what, lossy)) = &found.xattrs {
        let old = inode.xattrs;
        let xattrs = core.reader().xattrs(ino);
        let mut root = XattrRoot::default();
        for name in &found.attributes {
            match xattrs.get(core, &old, name) {
                Ok(Some(value)) => {
                    xattrs.set(core, &mut root, name, &value)?;
                }
                _ => report.lost(
                    ino,
                    None,
                    format!("attribute {}: {what}", String::from_utf8_lossy(name)),
                ),
            }
        }
        inode.xattrs = root;
        if *lossy {
            report.lost(ino, None, format!("attributes, if there were more: {what}"));
        }
        report.mended(format!("inode {ino}: its attributes made again"));
    }
    Ok(())
}
