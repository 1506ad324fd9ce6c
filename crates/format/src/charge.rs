//! Charges: the most blocks that an operation may allocate. LibFS uses them before it logs, the daemon after
//! it digested.

use crate::{BLOCK_BYTES, LogOp};

/// Blocks that a small change of one tree may allocate (new leaf, new parents).
const TREE_BLOCKS: u32 = 3;

/// Returns the number of blocks that a range of bytes touches, limited so that [`TREE_BLOCKS`] can be added.
fn span(offset: u64, len: u64) -> u32 {
    if len == 0 {
        return 0;
    }
    let first = offset / BLOCK_BYTES;
    let last = (offset.saturating_add(len) - 1) / BLOCK_BYTES;
    (last - first)
        .saturating_add(1)
        .min(u64::from(u32::MAX) - u64::from(TREE_BLOCKS)) as u32
}

/// Returns the [`charge`] of a write of `len` bytes.
#[must_use]
pub fn charge_write(offset: u64, len: u64) -> u32 {
    span(offset, len) + TREE_BLOCKS
}

/// Returns the most blocks that the digest of `op` allocates. Operations that always free space cost
/// nothing: they use the reserve.
#[must_use]
pub fn charge(op: &LogOp<'_>) -> u32 {
    match op {
        LogOp::Write { offset, data, .. } => charge_write(*offset, data.len() as u64),
        LogOp::Fallocate {
            mode, offset, len, ..
        } => match mode {
            crate::FallocateMode::PunchHole => TREE_BLOCKS,
            _ => span(*offset, *len) + TREE_BLOCKS,
        },
        LogOp::Create { .. } | LogOp::Rename { .. } => 2 * TREE_BLOCKS,
        LogOp::Link { .. } => TREE_BLOCKS,
        LogOp::SetXattr { value, .. } => span(0, value.len() as u64) + TREE_BLOCKS,
        LogOp::Truncate { size: 0, .. } => 0,
        // If the block in which it ends is shared, the file's part of it takes a new one.
        LogOp::Truncate { size, .. } => u32::from(!size.is_multiple_of(BLOCK_BYTES)) + TREE_BLOCKS,
        LogOp::Noop
        | LogOp::SetAttr { .. }
        | LogOp::RemoveXattr { .. }
        | LogOp::Unlink { .. }
        | LogOp::Forget { .. } => 0,
        // The daemon knows how many extents it takes.
        LogOp::Share { .. } | LogOp::Unshare { .. } | LogOp::Defrag { .. } => 2 * TREE_BLOCKS,
    }
}

#[cfg(test)]
mod tests {
    use super::charge;
    use crate::{InodeKey, LogOp};

    #[test]
    fn charge_counts_both_edge_blocks_when_a_write_is_unaligned() {
        let key = InodeKey::new(2, 1);
        let aligned = charge(&LogOp::Write {
            key,
            offset: 4096,
            data: &[0; 4096],
        });
        let unaligned = charge(&LogOp::Write {
            key,
            offset: 4095,
            data: &[0; 4098],
        });
        assert_eq!(unaligned - aligned, 2);
        assert_eq!(
            charge(&LogOp::Unlink {
                dir: key,
                name: b"a",
                key
            }),
            0
        );
    }
}
