//! The map of a file for an ordinary user's session: a window at a time, with data of files that the user
//! owns copied into its segments. Owns the order of lookup, copy and answer; [`crate::user_segments`] places
//! the windows.

use crate::placement::{Placement, Use};
use crate::session::table::{Barrier, Sessions};
use crate::user_segments::{Fill, Found, UserSegments, bits};
use std::collections::BTreeSet;
use std::sync::Arc;
use varve_format::{BLOCK_BYTES, BlockNo, Extent, ExtentFlags, FileBlock, InodeAttr, InodeKey, Tier};
use varve_ipc::{Clock, MappedExtent, Upcall, WINDOW_BLOCKS};
use varve_store::{MappedPart, Store, StoreError};

/// Most extents of a window, and one behind it.
const EXTENTS_MAX: usize = WINDOW_BLOCKS as usize + 2;

/// Returns the part of an extent within a window: first block and end, from the window's start.
fn within(extent: &Extent, start: u64) -> Option<(u64, u64)> {
    let first = extent.file_block.0.max(start);
    let end = extent.end().0.min(start + WINDOW_BLOCKS);
    (first < end).then(|| (first - start, end - start))
}

fn is_written_nvm(extent: &Extent) -> bool {
    extent.tier == Tier::Nvm && !extent.flags.contains(ExtentFlags::UNWRITTEN)
}

/// Context of building windows.
#[derive(Clone, Copy)]
pub(crate) struct Windows<'k> {
    pub(crate) store: &'k Store,
    pub(crate) sessions: &'k Sessions,
    pub(crate) policy: &'k dyn Placement,
    pub(crate) clock: &'k dyn Clock,
    pub(crate) lease_ms: u64,
}

impl Windows<'_> {
    /// Maps the window that contains `from`. The session has a lease on `key`, its user may read the file,
    /// and the session is already noted as mapping it.
    pub(crate) fn map(
        &self,
        segments: &Arc<UserSegments>,
        key: InodeKey,
        from: FileBlock,
    ) -> Result<(Vec<MappedExtent>, bool), StoreError> {
        let start = from.0 / WINDOW_BLOCKS * WINDOW_BLOCKS;
        let attr = self.store.get_key(key)?.attr;
        let parts = self.store.map_parts(key.ino, FileBlock(start), EXTENTS_MAX)?;
        let extents: Vec<Extent> = parts.iter().map(|part| part.extent).collect();
        let place = self.place_of_window(segments, &attr, start, &extents);
        for extent in &extents {
            if let Some((first, end)) = within(extent, start) {
                self.policy
                    .used(key, FileBlock(start + first), end - first, Use::Mapped);
            }
        }
        let complete = extents.len() < EXTENTS_MAX
            && extents
                .last()
                .is_none_or(|last| last.end().0 <= start + WINDOW_BLOCKS);
        // A user may know which blocks of own files are shared.
        let own = attr.uid == segments.uid();
        let number = |part: &MappedPart| part.number.filter(|_| own);
        let numbers: Vec<Option<u64>> = parts.iter().map(number).collect();
        Ok((tell(start, &extents, &numbers, place, complete), complete))
    }

    /// Returns the window's place in the user's segments, if it has one; copies it there if it can.
    fn place_of_window(
        &self,
        segments: &Arc<UserSegments>,
        attr: &InodeAttr,
        start: u64,
        extents: &[Extent],
    ) -> Option<u64> {
        let parts: Vec<(u64, u64)> = extents
            .iter()
            .filter(|extent| is_written_nvm(extent))
            .filter_map(|extent| within(extent, start))
            .collect();
        let need = parts
            .iter()
            .fold(0, |need, (first, end)| need | bits(*first, end - first));
        // Only files that the user owns.
        if need == 0 || attr.uid != segments.uid() {
            return None;
        }
        // A file that ends in its first window needs only its length; a longer file needs a whole window.
        let file = attr
            .size_bytes
            .div_ceil(BLOCK_BYTES)
            .clamp(1, WINDOW_BLOCKS)
            .next_power_of_two();
        let end = parts.iter().map(|(_, end)| *end).max().unwrap_or(1);
        let len = if start == 0 { file.max(end) } else { WINDOW_BLOCKS };
        for _ in 0..2 {
            {
                // Under the lock under which blocks are marked as replaced: an older horizon would free
                // windows that were killed after it was read.
                let sessions = self.sessions.table.lock();
                segments.release(sessions.reader_horizon());
            }
            let found = segments.find(
                attr.key,
                start / WINDOW_BLOCKS,
                need,
                len,
                self.clock.monotonic_ms(),
            );
            match found {
                Found::At(at) => return Some(at),
                Found::Fill(fill) => {
                    return self
                        .fill(fill, segments, attr, start, &parts)
                        .unwrap_or_else(|error| {
                            tracing::warn!(key = %attr.key, "a file cannot be copied for its user: {error}");
                            self.store.note_damage(&error);
                            None
                        });
                }
                Found::Full(old) if old.is_empty() => return None,
                Found::Full(old) => self.forget_windows(segments, &old),
            }
        }
        None
    }

    /// Copies parts of a window, if the file is still the user's.
    fn fill(
        &self,
        fill: Fill,
        segments: &UserSegments,
        attr: &InodeAttr,
        start: u64,
        parts: &[(u64, u64)],
    ) -> Result<Option<u64>, StoreError> {
        let mut copies = Vec::with_capacity(parts.len());
        for (first, end) in parts {
            // Bytes beyond the file's end read as zeros.
            let mut bytes = vec![0; ((end - first) * BLOCK_BYTES) as usize];
            self.store
                .read(attr.key.ino, (start + first) * BLOCK_BYTES, &mut bytes)?;
            copies.push((*first, bytes));
        }
        // The copies stay in the daemon's memory until they are known to be of this user's file: any change
        // of owner changes ctime.
        let now = self.store.get_key(attr.key)?.attr;
        if now.uid != segments.uid() || now.ctime_ns != attr.ctime_ns {
            return Ok(None);
        }
        for (first, bytes) in copies {
            fill.write(first, &bytes)?;
        }
        Ok(fill.publish())
    }

    /// Makes room: tells sessions of the user to forget these windows' files, as if their blocks had moved.
    fn forget_windows(&self, segments: &UserSegments, old: &[(u64, InodeKey)]) {
        let files: BTreeSet<InodeKey> = old.iter().map(|(_, key)| *key).collect();
        let until_ms = self.clock.monotonic_ms() + self.lease_ms;
        let mut sessions = self.sessions.table.lock();
        let sessions = &mut *sessions;
        let tx = self.store.newest_tx();
        let users: Vec<_> = sessions
            .entries
            .values()
            .filter(|member| {
                member
                    .session
                    .segments
                    .as_ref()
                    .is_some_and(|own| own.uid() == segments.uid())
            })
            .map(|member| member.session.id)
            .collect();
        for id in users {
            let mapped = |key: &&InodeKey| sessions.table.mappers(**key).any(|mapper| mapper == id);
            let keys: Vec<_> = files.iter().filter(mapped).copied().collect();
            if keys.is_empty() {
                continue;
            }
            sessions.send(id, Upcall::Barrier { tx, keys });
            if let Some(member) = sessions.entries.get_mut(&id) {
                let barrier = member
                    .barriers
                    .entry(tx)
                    .or_insert(Barrier { until_ms, parts: 0 });
                barrier.parts += 1;
                barrier.until_ms = barrier.until_ms.max(until_ms);
            }
        }
        segments.forget(old, tx);
        self.store.set_reader_horizon(sessions.reader_horizon());
    }
}

/// Returns the answer for a window that lies at block `place` of its segments. Without gaps, so that the
/// client knows the whole window.
fn tell(
    start: u64,
    extents: &[Extent],
    numbers: &[Option<u64>],
    place: Option<u64>,
    complete: bool,
) -> Vec<MappedExtent> {
    let run = |first: u64, len: u64, tier, block, unwritten| MappedExtent {
        file_block: FileBlock(first),
        len: u32::try_from(len).unwrap_or(u32::MAX),
        tier,
        block: BlockNo(block),
        unwritten,
        number: None,
    };
    let mut told = Vec::with_capacity(2 * extents.len() + 1);
    let mut at = start;
    for (extent, number) in extents.iter().zip(numbers) {
        let Some((first, end)) = within(extent, start) else {
            continue;
        };
        if start + first > at {
            told.push(run(at, start + first - at, Tier::Nvm, 0, true));
        }
        let unwritten = extent.flags.contains(ExtentFlags::UNWRITTEN);
        let (tier, block) = match place {
            Some(place) if is_written_nvm(extent) => (Tier::Nvm, place + first),
            _ if unwritten => (Tier::Nvm, 0),
            _ => (Tier::Ssd, 0),
        };
        // An extent may begin before the window.
        let skipped = (start + first) - extent.file_block.0;
        told.push(MappedExtent {
            number: number.map(|number| number + skipped),
            ..run(start + first, end - first, tier, block, unwritten)
        });
        at = start + end;
    }
    // The range up to the next extent is a hole. That extent may start in this window, if it ends behind it.
    let next = extents
        .iter()
        .find(|extent| extent.end().0 > start + WINDOW_BLOCKS)
        .map(|extent| extent.file_block.0);
    let hole = next.unwrap_or(start + WINDOW_BLOCKS).max(start + WINDOW_BLOCKS);
    if !complete && hole > at {
        told.push(run(at, hole - at, Tier::Nvm, 0, true));
    }
    told
}

#[cfg(test)]
mod tests {
    use super::tell;
    use varve_format::{BlockNo, Extent, ExtentFlags, FileBlock, Tier};

    fn extent(first: u64, len: u32, tier: Tier, flags: ExtentFlags) -> Extent {
        Extent {
            file_block: FileBlock(first),
            len,
            tier,
            block: BlockNo(1000 + first),
            flags,
        }
    }

    /// First block, length, place in the segments if it is there, whether it reads as zeros.
    fn told(extents: &[Extent], place: Option<u64>, complete: bool) -> Vec<(u64, u32, Option<u64>, bool)> {
        let runs = tell(64, extents, &vec![None; extents.len()], place, complete);
        runs.iter()
            .map(|run| {
                let direct = run.tier == Tier::Nvm && !run.unwritten;
                (
                    run.file_block.0,
                    run.len,
                    direct.then_some(run.block.0),
                    run.unwritten,
                )
            })
            .collect()
    }

    #[test]
    fn window_is_told_without_gaps_and_no_block_of_the_pool_is_named() {
        let none = ExtentFlags::empty();
        let extents = [
            extent(60, 10, Tier::Nvm, none),
            extent(72, 4, Tier::Ssd, none),
            extent(76, 4, Tier::Nvm, ExtentFlags::UNWRITTEN),
            extent(120, 30, Tier::Nvm, none),
        ];
        assert_eq!(
            told(&extents, Some(500), false),
            [
                (64, 6, Some(500), false),
                (70, 2, None, true),
                (72, 4, None, false),
                (76, 4, None, true),
                (80, 40, None, true),
                (120, 8, Some(556), false),
            ]
        );
        // Nothing of it is in the segments: all is read by message.
        assert_eq!(told(&extents[..1], None, true), [(64, 6, None, false)]);
        // A hole extends to the next extent.
        let beyond = [extent(64, 1, Tier::Nvm, none), extent(1000, 1, Tier::Nvm, none)];
        assert_eq!(
            told(&beyond, Some(0), false),
            [(64, 1, Some(0), false), (65, 935, None, true)]
        );
    }

    #[test]
    fn nothing_is_told_of_what_an_extent_holds_behind_its_window() {
        let none = ExtentFlags::empty();
        let through = extent(64, 134, Tier::Nvm, none);
        let next = extent(198, 10, Tier::Nvm, none);
        assert_eq!(told(&[through, next], Some(0), false), [(64, 64, Some(0), false)]);
        // Neither is the space between such an extent and the window's end, wherever the extent begins.
        let late = extent(120, 78, Tier::Nvm, none);
        assert_eq!(
            told(&[late, next], Some(0), false),
            [(64, 56, None, true), (120, 8, Some(56), false)]
        );
    }
}
