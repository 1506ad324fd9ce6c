//! Dentry and attribute timeouts of the kernel above a mount. Owns what an answer with a timeout rests on,
//! until when the kernel may believe it, and where other sessions are at work; does not know the answers.
//!
//! An answer rests on leases: a name on its directory's, attributes on their inode's. It gets a timeout
//! ([`DENTRY_TTL`](varve_ipc::DENTRY_TTL)) only if these are held and no lease of the session was recalled
//! since before the operation. A recalled lease stays until no answer that rests on it is under way and the
//! last one has expired; requests for which the lease suffices go on meanwhile, and their answers get no
//! timeout (`docs/adr/0038-dentry-timeouts-rest-on-leases.md`).
//!
//! That wait is at most [`DENTRY_TTL_MAX`](varve_ipc::DENTRY_TTL_MAX). So that it is not paid for each inode,
//! answers in a [region](Regions) where a recall met such an answer get no timeout for a while.

#[cfg(all(test, feature = "shuttle"))]
mod interleavings;

use crate::hash::KeyMap;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use varve_format::{InodeKey, SessionId};
use varve_ipc::{Clock, DENTRY_TTL, DENTRY_TTL_MAX};

/// Pause before another look for an answer that is under way.
const UNDER_WAY: Duration = Duration::from_millis(1);
/// Time for which answers in a region get no timeout after the last recall there.
const CONTENDED_MS: u64 = 10_000;
/// Most regions that are remembered; with more, the whole pool is one.
const REGIONS_MAX: usize = 4_096;
/// Most directories from an inode upwards that are looked at for a region.
const DEPTH_MAX: usize = 32;

/// What the kernel above may believe that rests on one lease.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// Answers with a timeout that are not sent yet.
    under_way: AtomicU32,
    /// When the last sent answer has expired, in milliseconds of the monotonic clock.
    until_ms: AtomicU64,
    /// The directory in which the inode was last named.
    dir: Mutex<Option<InodeKey>>,
}

impl Told {
    /// Notes an answer that is under way.
    fn begin(&self) {
        self.under_way.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that the answer has been sent.
    fn sent(&self, now_ms: u64) {
        let until_ms = now_ms + DENTRY_TTL_MAX.as_millis() as u64 + 1;
        self.until_ms.fetch_max(until_ms, Ordering::SeqCst);
        self.under_way.fetch_sub(1, Ordering::SeqCst);
    }

    /// Notes that the answer gets no timeout after all.
    fn undo(&self) {
        self.under_way.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns how long the kernel may still believe an answer; zero if it believes none.
    pub(crate) fn left(&self, now_ms: u64) -> Duration {
        // `under_way` first: an answer that is not counted in it any more has set `until_ms` before.
        let under_way = self.under_way.load(Ordering::SeqCst);
        let left_ms = self.until_ms.load(Ordering::SeqCst).saturating_sub(now_ms);
        let left = Duration::from_millis(left_ms);
        if under_way > 0 { left.max(UNDER_WAY) } else { left }
    }

    /// Notes the directory in which the inode was named.
    pub(crate) fn set_dir(&self, dir: InodeKey) {
        *self.dir.lock() = Some(dir);
    }

    pub(crate) fn dir(&self) -> Option<InodeKey> {
        *self.dir.lock()
    }
}

/// The state before an operation whose answer the kernel may believe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// `None`: the answer gets no timeout.
    pub(crate) session: Option<SessionId>,
    pub(crate) recalls: u64,
    pub(crate) forwarded: u64,
}

/// An answer to the kernel: to be held until it is sent. Whoever wants a lease that it rests on waits for
/// that, so nothing may be waited for meanwhile.
#[derive(Default)]
pub struct Answer {
    rests_on: SmallVec<[Arc<Told>; 2]>,
    name: bool,
    attributes: bool,
    clock: Option<Arc<dyn Clock>>,
}

impl Answer {
    /// Notes that the kernel may believe an answer that rests on these leases.
    pub(crate) fn resting_on(
        leases: SmallVec<[Arc<Told>; 2]>,
        (name, attributes): (bool, bool),
        clock: &Arc<dyn Clock>,
    ) -> Self {
        leases.iter().for_each(|told| told.begin());
        Self {
            rests_on: leases,
            name,
            attributes,
            clock: Some(Arc::clone(clock)),
        }
    }

    /// Takes the timeout back.
    pub(crate) fn undone(mut self) -> Self {
        self.rests_on.drain(..).for_each(|told| told.undo());
        Self::default()
    }

    /// The timeout of the name, or of its absence.
    #[must_use]
    pub const fn name_ttl(&self) -> Duration {
        if self.name { DENTRY_TTL } else { Duration::ZERO }
    }

    /// The timeout of the attributes.
    #[must_use]
    pub const fn attr_ttl(&self) -> Duration {
        if self.attributes {
            DENTRY_TTL
        } else {
            Duration::ZERO
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let Some(clock) = &self.clock {
            let now_ms = clock.monotonic_ms();
            self.rests_on.iter().for_each(|told| told.sent(now_ms));
        }
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer")
            .field("name_ttl", &self.name_ttl())
            .field("attr_ttl", &self.attr_ttl())
            .finish()
    }
}

/// Directories below which other sessions work on what the kernel was told.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    /// When the last region ends; 0: there is none. Looked at without the lock.
    until_ms: AtomicU64,
    by_dir: Mutex<KeyMap<Region>>,
}

/// A directory with what is below it. The root is one without: else a session that works in the root would
/// make a region of the whole pool.
#[derive(Debug, Default)]
struct Region {
    /// 0: only directories in it were met.
    until_ms: u64,
    /// The last directory in it that became a region, and when it ends.
    within: Option<(InodeKey, u64)>,
}

impl Regions {
    /// Notes a recall that met what the kernel believes of something in `dirs`: a directory, and those above
    /// it. Two directories in a third make a region of that one.
    pub(crate) fn met(&self, dirs: &[InodeKey], root: InodeKey, now_ms: u64) {
        let until_ms = now_ms + CONTENDED_MS;
        let mut by_dir = self.by_dir.lock();
        if by_dir.len() >= REGIONS_MAX {
            by_dir.retain(|_, region| {
                region.until_ms > now_ms || region.within.is_some_and(|(_, until_ms)| until_ms > now_ms)
            });
        }
        let full = by_dir.len() >= REGIONS_MAX;
        if let Some(dir) = dirs.first().filter(|_| !full) {
            by_dir.entry(*dir).or_default().until_ms = until_ms;
        }
        for pair in dirs.windows(2) {
            let (inner, outer) = (pair[0], pair[1]);
            if outer == root || full {
                break;
            }
            let region = by_dir.entry(outer).or_default();
            let other = region.within.replace((inner, until_ms));
            if other.is_none_or(|(other, until_ms)| other == inner || until_ms <= now_ms) {
                break;
            }
            region.until_ms = until_ms;
        }
        self.until_ms.fetch_max(until_ms, Ordering::SeqCst);
    }

    /// Whether there may be a region at all.
    pub(crate) fn any(&self, now_ms: u64) -> bool {
        self.until_ms.load(Ordering::SeqCst) > now_ms
    }

    /// Whether something in `dirs`, a directory and those above it, is in a region.
    pub(crate) fn has(&self, dirs: &[InodeKey], root: InodeKey, now_ms: u64) -> bool {
        let by_dir = self.by_dir.lock();
        if by_dir.len() >= REGIONS_MAX {
            return true;
        }
        let is_region = |dir| by_dir.get(dir).is_some_and(|region| region.until_ms > now_ms);
        let mut dirs = dirs.iter();
        dirs.next().is_some_and(is_region) || dirs.take_while(|dir| **dir != root).any(is_region)
    }
}

/// Returns the directory that holds `key`, and those above it, as far as `dir_of` knows them; `key` first if
/// it is a directory itself.
pub(crate) fn upwards(
    key: InodeKey,
    is_dir: bool,
    dir_of: impl Fn(InodeKey) -> Option<InodeKey>,
) -> SmallVec<[InodeKey; 8]> {
    let mut dirs = SmallVec::new();
    let mut at = if is_dir { Some(key) } else { dir_of(key) };
    while let Some(dir) = at.filter(|dir| dirs.len() < DEPTH_MAX && !dirs.contains(dir)) {
        dirs.push(dir);
        at = dir_of(dir);
    }
    dirs
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::{CONTENDED_MS, REGIONS_MAX, Regions, Told, upwards};
    use std::time::Duration;
    use varve_format::InodeKey;
    use varve_ipc::DENTRY_TTL_MAX;

    fn key(ino: u64) -> InodeKey {
        InodeKey::new(ino, 1)
    }

    const ROOT: u64 = 1;

    #[test]
    fn lease_stays_while_an_answer_is_under_way_and_until_it_has_expired() {
        let told = Told::default();
        assert_eq!(told.left(5_000), Duration::ZERO);
        told.begin();
        assert!(told.left(5_000) > Duration::ZERO, "it is not sent");
        told.sent(5_000);
        let max_ms = DENTRY_TTL_MAX.as_millis() as u64;
        assert!(told.left(5_000 + max_ms) > Duration::ZERO);
        assert_eq!(told.left(5_001 + max_ms), Duration::ZERO);
        told.begin();
        told.undo();
        assert_eq!(told.left(5_001 + max_ms), Duration::ZERO);
    }

    #[test]
    fn region_is_a_directory_with_what_is_below_it_and_the_root_alone() {
        let regions = Regions::default();
        let (root, a, b, deep) = (key(ROOT), key(2), key(3), key(4));
        assert!(!regions.any(0));
        regions.met(&[a, root], root, 0);
        assert!(regions.any(0));
        assert!(regions.has(&[a, root], root, 0));
        assert!(regions.has(&[deep, a, root], root, 0), "below it");
        assert!(!regions.has(&[b, root], root, 0), "beside it");
        assert!(!regions.has(&[root], root, 0));
        regions.met(&[root], root, 0);
        assert!(regions.has(&[root], root, 0));
        assert!(!regions.has(&[b, root], root, 0), "the root is no region of all");
        assert!(!regions.has(&[a, root], root, CONTENDED_MS));
        assert!(!regions.any(CONTENDED_MS));
    }

    #[test]
    fn two_directories_in_a_third_make_a_region_of_it() {
        let regions = Regions::default();
        let (root, top, a, b, c) = (key(ROOT), key(2), key(3), key(4), key(5));
        regions.met(&[a, top, root], root, 0);
        regions.met(&[a, top, root], root, 0);
        assert!(!regions.has(&[c, top, root], root, 0), "it is the one again");
        regions.met(&[b, top, root], root, 0);
        assert!(regions.has(&[c, top, root], root, 0));
        let later = 2 * CONTENDED_MS;
        regions.met(&[a, top, root], root, later);
        assert!(!regions.has(&[c, top, root], root, later), "that was long ago");
    }

    #[test]
    fn memory_for_regions_is_bounded_and_too_many_are_one() {
        let regions = Regions::default();
        for ino in 0..2 * REGIONS_MAX as u64 {
            regions.met(&[key(10 + ino)], key(ROOT), 0);
        }
        assert_eq!(regions.by_dir.lock().len(), REGIONS_MAX);
        assert!(regions.has(&[key(5)], key(ROOT), 0));
        regions.met(&[key(5)], key(ROOT), CONTENDED_MS);
        assert!(!regions.has(&[key(6)], key(ROOT), CONTENDED_MS));
    }

    #[test]
    fn directories_above_are_found_as_far_as_they_are_known() {
        let dir_of = |key: InodeKey| (key.ino.0 > 2).then(|| InodeKey::new(key.ino.0 - 1, 1));
        assert_eq!(upwards(key(4), false, dir_of)[..], [key(3), key(2)]);
        assert_eq!(upwards(key(4), true, dir_of)[..], [key(4), key(3), key(2)]);
        assert!(upwards(key(2), false, dir_of).is_empty());
        // Two threads may see a directory move between two others.
        let round = |at: InodeKey| Some(InodeKey::new(7 - at.ino.0, 1));
        assert_eq!(upwards(key(3), false, round).len(), 2);
    }
}
