//! The map book: which range of the program's memory shows which range of which file. It only keeps records;
//! it maps nothing.

use crate::ofd::Ofd;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use varve_format::InodeKey;

/// A part of a map with uniform attributes.
#[derive(Clone)]
pub(super) struct Piece {
    /// Addresses.
    pub at: Range<usize>,
    /// Offset of its pages in the file of copies. The pages are mapped nowhere else, and belong to no other
    /// piece.
    pub stored_at: u64,
    /// The file, which stays open.
    pub ofd: Arc<Ofd>,
    /// File offset of the first byte.
    pub offset: u64,
    /// `MAP_SHARED`.
    pub shared: bool,
    /// The protection given by `mmap` and `mprotect`.
    pub protection: i32,
    /// The file has no such pages, or they could not be read: loads raise SIGBUS, and the fault handler does
    /// not fill them.
    pub bars: bool,
}

impl Piece {
    /// Returns the part of it within `range`.
    fn clipped(&self, range: &Range<usize>) -> Self {
        let at = self.at.start.max(range.start)..self.at.end.min(range.end);
        let skipped = (at.start - self.at.start) as u64;
        Self {
            at,
            stored_at: self.stored_at + skipped,
            offset: self.offset + skipped,
            ..self.clone()
        }
    }

    pub(super) fn len(&self) -> usize {
        self.at.len()
    }

    pub(super) fn key(&self) -> InodeKey {
        self.ofd.key()
    }

    /// Returns the range of its pages in the file of copies.
    pub(super) fn stored(&self) -> Range<u64> {
        self.stored_at..self.stored_at + self.len() as u64
    }

    /// Returns the address at which it shows the byte at a file offset, if it does.
    pub(super) fn address_of(&self, offset: u64) -> Option<usize> {
        let skipped = usize::try_from(offset.checked_sub(self.offset)?).ok()?;
        (skipped < self.len()).then_some(self.at.start + skipped)
    }

    /// Returns the range in the file of copies of the pages that show bytes of `part` of the file.
    pub(super) fn stored_of(&self, part: &Range<u64>) -> Range<u64> {
        const PAGE: u64 = super::PAGE as u64;
        let end = self.offset + self.len() as u64;
        let first = (part.start & !(PAGE - 1)).clamp(self.offset, end);
        let last = part.end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        let last = last.clamp(first, end);
        self.stored_at + (first - self.offset)..self.stored_at + (last - self.offset)
    }

    fn goes_on_in(&self, next: &Self) -> bool {
        self.at.end == next.at.start
            && self.stored().end == next.stored_at
            && self.offset + self.len() as u64 == next.offset
            && Arc::ptr_eq(&self.ofd, &next.ofd)
            && (self.shared, self.protection, self.bars) == (next.shared, next.protection, next.bars)
    }
}

/// All pieces, by start address; none overlap.
#[derive(Default)]
pub(super) struct Book {
    pieces: BTreeMap<usize, Piece>,
}

impl Book {
    /// Returns the piece at an address.
    pub(super) fn at(&self, address: usize) -> Option<&Piece> {
        let (_, piece) = self.pieces.range(..=address).next_back()?;
        piece.at.contains(&address).then_some(piece)
    }

    pub(super) fn insert(&mut self, piece: Piece) {
        debug_assert!(self.within(&piece.at).is_empty() && !piece.at.is_empty());
        self.pieces.insert(piece.at.start, piece);
    }

    /// Returns the pieces in `range`, clipped to it.
    pub(super) fn within(&self, range: &Range<usize>) -> Vec<Piece> {
        let mut found = Vec::new();
        for (_, piece) in self.pieces.range(..range.end).rev() {
            if piece.at.end <= range.start {
                break;
            }
            found.push(piece.clipped(range));
        }
        found.reverse();
        found
    }

    /// Removes `range` and returns the removed pieces.
    pub(super) fn cut(&mut self, range: &Range<usize>) -> Vec<Piece> {
        let gone = self.within(range);
        for part in &gone {
            let Some(whole) = self.at(part.at.start).cloned() else {
                continue;
            };
            self.pieces.remove(&whole.at.start);
            for left in [whole.at.start..part.at.start, part.at.end..whole.at.end] {
                if !left.is_empty() {
                    let left = whole.clipped(&left);
                    self.pieces.insert(left.at.start, left);
                }
            }
        }
        gone
    }

    /// Changes the pieces in `range`.
    pub(super) fn amend(&mut self, range: &Range<usize>, change: impl Fn(&mut Piece)) {
        for mut piece in self.cut(range) {
            change(&mut piece);
            self.insert(piece);
        }
        self.join();
    }

    /// Merges adjacent pieces that continue each other.
    fn join(&mut self) {
        let mut last: Option<Piece> = None;
        for piece in std::mem::take(&mut self.pieces).into_values() {
            last = match last {
                Some(mut before) if before.goes_on_in(&piece) => {
                    before.at.end = piece.at.end;
                    Some(before)
                }
                Some(before) => {
                    self.pieces.insert(before.at.start, before);
                    Some(piece)
                }
                None => Some(piece),
            };
        }
        if let Some(last) = last {
            self.pieces.insert(last.at.start, last);
        }
    }

    pub(super) fn of(&self, key: InodeKey) -> impl Iterator<Item = &Piece> {
        self.pieces.values().filter(move |piece| piece.key() == key)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Piece> {
        self.pieces.values()
    }
}

#[cfg(test)]
mod tests {
    use super::{Book, Piece};
    use crate::config::PoolId;
    use crate::ofd::Ofd;
    use crate::walk::FileId;
    use std::ops::Range;
    use std::sync::Arc;
    use varve_format::InodeKey;

    fn id(ino: u64) -> FileId {
        FileId {
            pool: PoolId(0),
            key: InodeKey::new(ino, 1),
        }
    }

    fn piece(at: Range<usize>, stored_at: u64, ino: u64) -> Piece {
        Piece {
            at,
            stored_at,
            ofd: Arc::new(Ofd::adopted(-1, id(ino), 0)),
            offset: 0x4000,
            shared: false,
            protection: 1,
            bars: false,
        }
    }

    fn shown(pieces: &[Piece]) -> Vec<(Range<usize>, u64, u64)> {
        pieces
            .iter()
            .map(|piece| (piece.at.clone(), piece.stored_at, piece.offset))
            .collect()
    }

    #[test]
    fn parts_keep_their_places_in_both_files() {
        let mut book = Book::default();
        book.insert(piece(0x10_000..0x20_000, 0x90_000, 5));
        book.insert(piece(0x30_000..0x40_000, 0xa0_000, 6));
        assert!(book.at(0xffff).is_none() && book.at(0x20_000).is_none());
        let gone = book.cut(&(0x18_000..0x31_000));
        assert_eq!(
            shown(&gone),
            [
                (0x18_000..0x20_000, 0x98_000, 0xc000),
                (0x30_000..0x31_000, 0xa0_000, 0x4000)
            ]
        );
        let left = book.within(&(0..usize::MAX));
        assert_eq!(
            shown(&left),
            [
                (0x10_000..0x18_000, 0x90_000, 0x4000),
                (0x31_000..0x40_000, 0xa1_000, 0x5000)
            ]
        );
        let gone = book.cut(&(0x11_000..0x12_000));
        assert_eq!(shown(&gone), [(0x11_000..0x12_000, 0x91_000, 0x5000)]);
        assert_eq!(book.of(InodeKey::new(5, 1)).count(), 2);
        assert_eq!(book.at(0x12_000).map(|piece| piece.stored_at), Some(0x92_000));
    }

    #[test]
    fn what_was_changed_and_changed_back_is_one_again() {
        let mut book = Book::default();
        book.insert(piece(0x10_000..0x20_000, 0x90_000, 5));
        book.amend(&(0x14_000..0x15_000), |piece| piece.bars = true);
        assert_eq!(book.all().count(), 3);
        assert!(book.at(0x14_000).is_some_and(|piece| piece.bars));
        book.amend(&(0x14_000..0x15_000), |piece| piece.bars = false);
        assert_eq!(
            shown(&book.within(&(0..usize::MAX))),
            [(0x10_000..0x20_000, 0x90_000, 0x4000)]
        );
    }

    #[test]
    fn bytes_of_the_file_are_found_where_their_pages_are_stored() {
        let piece = piece(0x10_000..0x20_000, 0x90_000, 5);
        for (part, stored) in [
            (0..u64::MAX, 0x90_000..0xa0_000),
            (0x4001..0x4002, 0x90_000..0x91_000),
            (0x5fff..0x6001, 0x91_000..0x93_000),
            (0..0x4000, 0x90_000..0x90_000),
            (0x14_000..0x15_000, 0xa0_000..0xa0_000),
            (0x13_fff..u64::MAX, 0x9f_000..0xa0_000),
        ] {
            assert_eq!(piece.stored_of(&part), stored, "{part:x?}");
        }
    }
}
