//! Which parts of two ranges of files are not the same blocks yet. Pure: asks no store.

use std::ops::Range;
use varve_store::OwnedPart;

/// A part of a range that is not shared yet, in blocks from the beginning of the range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unshared {
    pub(super) blocks: Range<u64>,
    /// How many of the target's blocks only the target has.
    pub(super) alone: u64,
}

/// Extents of a file, and the block at which the range begins.
pub(super) type Extents<'a> = (&'a [OwnedPart], u64);

/// Returns the parts of two ranges of `blocks` blocks in which they are not the same shared blocks. Holes of
/// either are left out.
pub(super) fn unshared(source: Extents<'_>, target: Extents<'_>, blocks: u64) -> Vec<Unshared> {
    let mut found: Vec<Unshared> = Vec::new();
    let (mut sources, mut targets) = (source.0.iter().peekable(), target.0.iter().peekable());
    let relative = |part: &OwnedPart, first: u64| {
        let start = part.file_block.0 as i64 - first as i64;
        (start, start + i64::from(part.blocks))
    };
    while let (Some(from), Some(to)) = (sources.peek(), targets.peek()) {
        let ((from_start, from_end), (to_start, to_end)) = (relative(from, source.1), relative(to, target.1));
        let start = from_start.max(to_start).max(0);
        let end = from_end.min(to_end).min(blocks as i64);
        if start < end {
            let number = |part: &OwnedPart, at: i64| part.number.map(|first| first + (start - at) as u64);
            let (from_number, to_number) = (number(from, from_start), number(to, to_start));
            if from_number.is_none() || from_number != to_number {
                let (start, end) = (start as u64, end as u64);
                let alone = if to.owners == 1 { end - start } else { 0 };
                match found.last_mut() {
                    Some(last) if last.blocks.end == start => {
                        last.blocks.end = end;
                        last.alone += alone;
                    }
                    _ => found.push(Unshared {
                        blocks: start..end,
                        alone,
                    }),
                }
            }
        }
        if from_end <= to_end {
            sources.next();
        } else {
            targets.next();
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{Unshared, unshared};
    use varve_format::{BlockNo, FileBlock, Tier};
    use varve_store::OwnedPart;

    fn part(at: u64, blocks: u32, number: Option<u64>) -> OwnedPart {
        OwnedPart {
            file_block: FileBlock(at),
            blocks,
            number,
            owners: if number.is_some() { 2 } else { 1 },
            tier: Tier::Nvm,
            block: BlockNo(0),
        }
    }

    fn part_of(blocks: std::ops::Range<u64>, alone: u64) -> Unshared {
        Unshared { blocks, alone }
    }

    #[test]
    fn only_what_does_not_name_equal_numbers_is_to_be_shared() {
        let source = [part(10, 4, None), part(14, 6, Some(100)), part(25, 5, Some(7))];
        let target = [
            part(50, 2, Some(300)),
            part(52, 3, None),
            part(55, 3, Some(101)),
            part(58, 1, Some(9)),
            // A hole; then equal numbers at another place.
            part(66, 4, Some(8)),
        ];
        let found = unshared((&source, 10), (&target, 50), 20);
        // 4..5 of the target is plain, and of the source shared; 5..8 is shared with each other already.
        assert_eq!(found, [part_of(0..5, 3), part_of(8..9, 0)]);
        assert_eq!(unshared((&source, 10), (&target, 50), 2), [part_of(0..2, 0)]);
        assert_eq!(unshared((&[], 10), (&target, 50), 20), []);
    }
}
