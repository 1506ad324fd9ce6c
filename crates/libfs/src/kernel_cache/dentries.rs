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
/// Number of waits within [`CONTENDED_MS`] that make a region of the whole pool.
const WAITS_MAX: u32 = 12;
/// Time for which the whole pool is a region after the last recall that met one.
const ALL_MS: u64 = 60_000;
/// Number of directories in a directory that make a region of all that is below it.
const MANY: usize = 4;
/// Most directories that are remembered; with more, the whole pool is a region.
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

/// Directories in which other sessions work on what the kernel was told.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    /// When the last region ends; 0: there is none. Looked at without the lock.
    until_ms: AtomicU64,
    by_dir: Mutex<KeyMap<Region>>,
    all: Mutex<All>,
}

/// The whole pool as a region, where a few of its parts do not suffice.
#[derive(Debug, Default)]
struct All {
    until_ms: u64,
    /// Waits since `since_ms`.
    waits: u32,
    since_ms: u64,
}

/// A directory where a recall met an answer, or one above such directories.
#[derive(Debug, Default)]
struct Region {
    /// Until when names in it and its own attributes get no timeout.
    until_ms: u64,
    /// Until when nothing below it does.
    below_until_ms: u64,
    /// Directories in it that are regions, or hold some, and until when.
    within: SmallVec<[(InodeKey, u64); 2]>,
}

impl Region {
    fn is_over(&self, now_ms: u64) -> bool {
        let within = self.within.iter().map(|(_, until_ms)| *until_ms).max();
        self.until_ms.max(self.below_until_ms).max(within.unwrap_or(0)) <= now_ms
    }
}

impl Regions {
    /// Notes a recall that met what the kernel believes of something in `dirs`: a directory, and those above
    /// it. Where that happened in [`MANY`] directories of one, that one is a region with all that is below it;
    /// never the root, since a session that works there would make a region of the whole pool.
    /// With `waits`, the recall waits; many waits soon after another make a region of the whole pool, for
    /// longer.
    pub(crate) fn met(&self, dirs: &[InodeKey], root: InodeKey, waits: bool, now_ms: u64) {
        let until_ms = now_ms + CONTENDED_MS;
        {
            let mut all = self.all.lock();
            if now_ms >= all.since_ms + CONTENDED_MS {
                (all.waits, all.since_ms) = (0, now_ms);
            }
            all.waits += u32::from(waits);
            if all.waits >= WAITS_MAX || all.until_ms > now_ms {
                all.until_ms = now_ms + ALL_MS;
                self.until_ms.fetch_max(all.until_ms, Ordering::SeqCst);
            }
        }
        let mut by_dir = self.by_dir.lock();
        if by_dir.len() + dirs.len() > REGIONS_MAX {
            by_dir.retain(|_, region| !region.is_over(now_ms));
        }
        if by_dir.len() + dirs.len() <= REGIONS_MAX {
            if let Some(dir) = dirs.first() {
                by_dir.entry(*dir).or_default().until_ms = until_ms;
            }
            for pair in dirs.windows(2) {
                let (inner, outer) = (pair[0], pair[1]);
                if outer == root {
                    break;
                }
                let region = by_dir.entry(outer).or_default();
                region
                    .within
                    .retain(|(dir, until_ms)| *dir != inner && *until_ms > now_ms);
                region.within.push((inner, until_ms));
                if region.within.len() >= MANY {
                    region.below_until_ms = until_ms;
                    // The oldest goes, so that the list stays short.
                    region.within.remove(0);
                }
            }
        }
        self.until_ms.fetch_max(until_ms, Ordering::SeqCst);
    }

    /// Whether there may be a region at all.
    pub(crate) fn any(&self, now_ms: u64) -> bool {
        self.until_ms.load(Ordering::SeqCst) > now_ms
    }

    /// Whether one of the first `own` of `dirs` is a region, or something is below one; `dirs` are a directory
    /// and those above it.
    pub(crate) fn has(&self, dirs: &[InodeKey], own: usize, root: InodeKey, now_ms: u64) -> bool {
        if self.all.lock().until_ms > now_ms {
            return true;
        }
        let by_dir = self.by_dir.lock();
        if by_dir.len() + DEPTH_MAX > REGIONS_MAX {
            return true;
        }
        let regions = || dirs.iter().map(|dir| by_dir.get(dir));
        regions()
            .take(own)
            .flatten()
            .any(|region| region.until_ms > now_ms)
            || (dirs.iter().zip(regions()))
                .take_while(|(dir, _)| **dir != root)
                .any(|(_, region)| region.is_some_and(|region| region.below_until_ms > now_ms))
    }
}

/// Returns the directory that holds `key`, and those above it, as far as `dir_of` knows them; `key` first if
/// it is a directory itself, or if its directory is not known.
pub(crate) fn upwards(
    key: InodeKey,
    is_dir: bool,
    dir_of: impl Fn(InodeKey) -> Option<InodeKey>,
) -> SmallVec<[InodeKey; 8]> {
    let mut dirs = SmallVec::new();
    let mut at = if is_dir {
        Some(key)
    } else {
        dir_of(key).or(Some(key))
    };
    while let Some(dir) = at.filter(|dir| dirs.len() < DEPTH_MAX && !dirs.contains(dir)) {
        dirs.push(dir);
        at = dir_of(dir);
    }
    dirs
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::{ALL_MS, CONTENDED_MS, MANY, REGIONS_MAX, Regions, Told, WAITS_MAX, upwards};
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
    fn region_is_one_directory_and_nothing_below_or_beside_it() {
        let regions = Regions::default();
        let (root, a, b, deep) = (key(ROOT), key(2), key(3), key(4));
        assert!(!regions.any(0));
        regions.met(&[a, root], root, false, 0);
        assert!(regions.any(0));
        assert!(regions.has(&[a, root], 1, root, 0));
        assert!(regions.has(&[deep, a, root], 2, root, 0), "its name is in it");
        assert!(!regions.has(&[deep, a, root], 1, root, 0), "below it");
        assert!(!regions.has(&[b, root], 1, root, 0), "beside it");
        assert!(!regions.has(&[root], 1, root, 0));
        regions.met(&[root], root, false, 0);
        assert!(regions.has(&[root], 1, root, 0));
        assert!(!regions.has(&[b, root], 1, root, 0));
        assert!(!regions.has(&[a, root], 1, root, CONTENDED_MS));
        assert!(!regions.any(CONTENDED_MS));
    }

    #[test]
    fn many_directories_in_another_make_a_region_of_all_below_it() {
        let regions = Regions::default();
        let (root, top) = (key(ROOT), key(2));
        let inner = |at: usize| [key(10 + at as u64), top, root];
        for at in 0..MANY - 1 {
            regions.met(&inner(at), root, false, 0);
            regions.met(&inner(at), root, false, 0);
        }
        assert!(!regions.has(&inner(90), 1, root, 0), "these are not many");
        regions.met(&inner(MANY), root, false, 0);
        assert!(regions.has(&inner(90), 1, root, 0));
        assert!(!regions.has(&[key(3), root], 1, root, 0), "beside it");
        let later = 2 * CONTENDED_MS;
        regions.met(&inner(0), root, false, later);
        assert!(!regions.has(&inner(90), 1, root, later), "that was long ago");
        // Many directories of the root are no region of the whole pool.
        (0..10).for_each(|at| regions.met(&[key(50 + at), root], root, false, later));
        assert!(!regions.has(&[key(99), root], 1, root, later));
    }

    #[test]
    fn many_waits_soon_after_another_make_a_region_of_the_whole_pool() {
        let regions = Regions::default();
        let (root, other) = (key(ROOT), [key(99), key(ROOT)]);
        for at in 0..u64::from(WAITS_MAX) - 1 {
            regions.met(&[key(10 + at), root], root, true, at);
        }
        assert!(!regions.has(&other, 1, root, 20));
        regions.met(&[key(50), root], root, true, 20);
        assert!(
            regions.has(&other, 1, root, 19 + ALL_MS),
            "for longer than another region"
        );
        regions.met(&[key(51), root], root, false, ALL_MS);
        assert!(
            regions.has(&other, 1, root, 2 * ALL_MS - 1),
            "as long as there are recalls"
        );
        let later = 2 * ALL_MS;
        assert!(!regions.has(&other, 1, root, later) && !regions.any(later));
        // Waits that are few in each time make none.
        for at in 0..40 {
            let now_ms = later + at * CONTENDED_MS / 5;
            regions.met(&[key(60), root], root, true, now_ms);
            assert!(!regions.has(&other, 1, root, now_ms));
        }
    }

    #[test]
    fn memory_for_regions_is_bounded_and_too_many_are_one() {
        let regions = Regions::default();
        for ino in 0..2 * REGIONS_MAX as u64 {
            regions.met(&[key(10 + ino)], key(ROOT), false, 0);
        }
        assert_eq!(regions.by_dir.lock().len(), REGIONS_MAX);
        assert!(regions.has(&[key(5)], 1, key(ROOT), 0));
        regions.met(&[key(5)], key(ROOT), false, CONTENDED_MS);
        assert!(!regions.has(&[key(6)], 1, key(ROOT), CONTENDED_MS));
    }

    #[test]
    fn directories_above_are_found_as_far_as_they_are_known() {
        let dir_of = |key: InodeKey| (key.ino.0 > 2).then(|| InodeKey::new(key.ino.0 - 1, 1));
        assert_eq!(upwards(key(4), false, dir_of)[..], [key(3), key(2)]);
        assert_eq!(upwards(key(4), true, dir_of)[..], [key(4), key(3), key(2)]);
        assert_eq!(upwards(key(2), false, dir_of)[..], [key(2)]);
        // Two threads may see a directory move between two others.
        let round = |at: InodeKey| Some(InodeKey::new(7 - at.ino.0, 1));
        assert_eq!(upwards(key(3), false, round).len(), 2);
    }
}
