//! The known names of one directory, while its lease is held. Pure.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, BuildHasherDefault};
use varve_format::{FileKind, HashKey, InodeKey, LogSeq};

use crate::hash::KeyHasher;
use crate::sync::Mutex;

/// Most names kept for one directory; beyond that, names that the shared area has are forgotten.
const NAMES_MAX: usize = 1 << 20;
/// Lookups of unknown names after which the next page of the directory is read, until all names are known. A
/// page costs about as much as these lookups.
const MISSES_A_PAGE: u32 = 16;
/// Removed names kept before those whose removal is digested are searched for.
const GONE_MIN: usize = 1024;
/// Names of a directory up to which pages are kept by name. Of a larger one, hashes are kept.
const LEARNT_MAX: usize = 1 << 16;
/// Most names of a directory that is listed from the names known here: each page looks at all of them.
const LISTED_MAX: usize = 1 << 12;
/// Most hashes of forgotten names that are kept (64 MiB of memory).
const SHED_MAX: usize = 4 << 20;

/// Target of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Target {
    pub key: InodeKey,
    pub kind: FileKind,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    target: Option<Target>,
    /// The log entry of this session that set it; 0: the daemon's answer.
    seq: LogSeq,
}

/// Names of one directory: those that exist, and those that are known not to exist.
#[derive(Debug, Default)]
pub(crate) struct DirNames {
    names: HashMap<Box<[u8]>, Known>,
    /// Every existing name is in `names`, or its hash is in `shed`.
    complete: bool,
    /// Hashes of forgotten names, so that other names are still known not to exist: otherwise each creation
    /// in a large directory would ask the daemon first. The daemon is asked for a name whose hash is here.
    shed: HashSet<u64, BuildHasherDefault<KeyHasher>>,
    /// Approximate number of `names` that were removed since the last search for those that need not be kept.
    gone: usize,
    /// Number of removed names that had to stay at that search.
    stayed: usize,
    /// How far the directory was read to know all its names.
    fill: Fill,
    /// Number of requests about names under way: their answers may be older than removals made meanwhile, so
    /// removed names are kept until then.
    asking: usize,
}

/// Progress of reading a directory that was not made here. It is read page by page, as names in it are asked
/// for: in the end names that do not exist are known, and a creation asks nothing.
#[derive(Debug, Default)]
struct Fill {
    /// The next page starts here.
    cookie: u64,
    misses: u32,
    /// The directory cannot be read, or is too large.
    off: bool,
}

/// A request about a directory's names, from before it is sent until its answer was processed.
pub(super) struct Asking<'n>(&'n Mutex<DirNames>);

impl<'n> Asking<'n> {
    /// Returns the known target of `name`, or begins a request.
    pub(super) fn unless_known(
        names: &'n Mutex<DirNames>,
        name: &[u8],
    ) -> std::result::Result<Option<Target>, Self> {
        let mut table = names.lock();
        if let Some(known) = table.get(name) {
            return Ok(known);
        }
        table.asking += 1;
        Err(Self(names))
    }

    /// Begins a request about all names.
    pub(super) fn all(names: &'n Mutex<DirNames>) -> Self {
        names.lock().asking += 1;
        Self(names)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.lock().asking -= 1;
    }
}

impl DirNames {
    /// Forgets everything: the lease is gone.
    pub(crate) fn clear(&mut self) {
        self.names = HashMap::new();
        self.shed = HashSet::default();
        self.complete = false;
        self.fill = Fill::default();
        (self.gone, self.stayed) = (0, 0);
    }

    /// Marks the directory as just made: all its names are known.
    pub(crate) fn set_complete(&mut self) {
        self.complete = true;
    }

    /// Whether [`has_any`](Self::has_any) proves the directory empty if it finds no name.
    pub(crate) fn is_complete(&self) -> bool {
        self.complete && self.shed.is_empty()
    }

    fn hash(&self, name: &[u8]) -> u64 {
        self.names.hasher().hash_one(name)
    }

    /// Returns at most `max` names after `cookie` with their cookies, in the pool's order; `None`: they are
    /// not all known, or too many, or two share a hash, and only the pool knows which has which cookie. (If
    /// one of two such names is removed, the other keeps its cookie, which is not known here. With 48 bits
    /// that is as rare as it is harmless: a listing that goes on in the pool may return it twice.)
    pub(super) fn page(&self, order: &HashKey, cookie: u64, max: usize) -> Option<Vec<(u64, &[u8], Target)>> {
        if !self.is_complete() || self.names.len() > LISTED_MAX {
            return None;
        }
        let there = self.names.iter().filter_map(|(name, known)| {
            let target = known.target?;
            Some((order.first_cookie(name), &**name, target))
        });
        let mut page: Vec<_> = there.filter(|(at, ..)| *at > cookie).collect();
        page.sort_unstable_by_key(|(at, ..)| *at);
        page.truncate(max.saturating_add(1));
        if page.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            return None;
        }
        page.truncate(max);
        Some(page)
    }

    /// Returns the target of `name`; `None`: not known here.
    pub(crate) fn get(&self, name: &[u8]) -> Option<Option<Target>> {
        match self.names.get(name) {
            Some(known) => Some(known.target),
            None if self.complete && (self.shed.is_empty() || !self.shed.contains(&self.hash(name))) => {
                Some(None)
            }
            None => None,
        }
    }

    /// Whether any name is known to exist.
    pub(crate) fn has_any(&self) -> bool {
        self.names.values().any(|known| known.target.is_some())
    }

    /// Adds the daemon's answer, unless more is known; returns the target known afterwards.
    pub(crate) fn learn(&mut self, name: &[u8], target: Option<Target>, digested: LogSeq) -> Option<Target> {
        if let Some(known) = self.get(name) {
            return known;
        }
        self.make_room(digested);
        self.names.insert(
            name.into(),
            Known {
                target,
                seq: LogSeq(0),
            },
        );
        target
    }

    /// Sets a name as this session's log says. It stays until it is digested.
    pub(crate) fn set(&mut self, name: &[u8], target: Option<Target>, seq: LogSeq, digested: LogSeq) {
        self.make_room(digested);
        match self.names.get_mut(name) {
            Some(known) => *known = Known { target, seq },
            None => {
                self.names.insert(name.into(), Known { target, seq });
            }
        }
        self.gone += usize::from(target.is_none());
        if self.asking == 0 && self.gone >= GONE_MIN.max(self.stayed).max(self.names.len() / 4) {
            self.forget_gone(digested);
        }
    }

    /// Forgets removed names whose removal the daemon has digested: the table of a directory with short-lived
    /// files stays small.
    fn forget_gone(&mut self, digested: LogSeq) {
        let mut stayed = 0;
        self.names.retain(|_, known| {
            let stays = known.target.is_some() || known.seq > digested;
            stayed += usize::from(stays && known.target.is_none());
            stays
        });
        (self.gone, self.stayed) = (0, stayed);
    }

    /// Forgets an answer of the daemon that may be out of date, so that the daemon is asked again.
    pub(crate) fn doubt(&mut self, name: &[u8], target: Target, digested: LogSeq) {
        if self
            .names
            .get(name)
            .is_some_and(|known| known.target == Some(target) && known.seq <= digested)
        {
            self.names.remove(name);
            self.complete = false;
            self.fill = Fill::default();
        }
    }

    /// Notes that the daemon was asked for a name. Returns the start of the page of the directory that should
    /// be read, if any.
    pub(super) fn missed(&mut self) -> Option<u64> {
        self.fill.misses += 1;
        let due = self.fill.misses.is_multiple_of(MISSES_A_PAGE) && !self.complete && !self.fill.off;
        due.then_some(self.fill.cookie)
    }

    /// Adds the names of the page that starts at `cookie`, while the lease and an [`Asking`] are held; the
    /// next page starts at `next`. No names: that was the end. In a large directory, a page's names are asked
    /// for once more when they are needed.
    pub(super) fn take_page<'p>(
        &mut self,
        cookie: u64,
        names: impl Iterator<Item = (&'p [u8], Target)>,
        next: Option<u64>,
    ) {
        // Another thread reads it too, or it is read from the start again.
        if self.fill.cookie != cookie || self.complete {
            return;
        }
        for (name, target) in names {
            if self.names.contains_key(name) {
                continue;
            }
            if self.names.len() < LEARNT_MAX {
                let (target, seq) = (Some(target), LogSeq(0));
                self.names.insert(name.into(), Known { target, seq });
            } else {
                let hash = self.hash(name);
                self.shed.insert(hash);
            }
        }
        match next {
            Some(next) => self.fill.cookie = next,
            None => self.complete = true,
        }
        self.bound_shed();
    }

    /// Notes that the directory cannot be read.
    pub(super) fn stop_reading(&mut self) {
        self.fill.off = true;
    }

    fn bound_shed(&mut self) {
        if self.shed.len() > SHED_MAX {
            self.shed = HashSet::default();
            self.complete = false;
            self.fill.off = true;
        }
    }

    fn make_room(&mut self, digested: LogSeq) {
        if self.names.len() < NAMES_MAX || !self.names.len().is_power_of_two() {
            return;
        }
        let (hasher, shed, asking) = (self.names.hasher().clone(), &mut self.shed, self.asking > 0);
        // Also for pages that were read before these names were made, or are being requested.
        let counts = self.complete || !self.fill.off;
        self.names.retain(|name, known| {
            let stays = known.seq > digested || (asking && known.target.is_none());
            if !stays && known.target.is_some() && counts {
                shed.insert(hasher.hash_one(&**name));
            }
            stays
        });
        self.bound_shed();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Asking, DirNames, GONE_MIN, LEARNT_MAX, LISTED_MAX, MISSES_A_PAGE, NAMES_MAX, Target};
    use crate::sync::Mutex;
    use varve_format::{FileKind, HashKey, InodeKey, LogSeq};

    fn target(ino: u64) -> Target {
        Target {
            key: InodeKey::new(ino, 1),
            kind: FileKind::Regular,
        }
    }

    fn page<'p>(names: &'p [&'p [u8]]) -> impl Iterator<Item = (&'p [u8], Target)> {
        names.iter().copied().zip((0..).map(target))
    }

    #[test]
    fn directory_whose_names_are_known_is_listed_in_the_pools_order() {
        let order = HashKey([3; 16]);
        let mut names = DirNames::default();
        assert!(names.page(&order, 0, 10).is_none(), "not all are known");
        names.take_page(0, page(&[b"a", b"b", b"c"]), Some(1 << 50));
        names.take_page(1 << 50, page(&[]), None);
        names.set(b"d", Some(target(9)), LogSeq(5), LogSeq(0));
        names.set(b"a", None, LogSeq(6), LogSeq(0));
        let told = |names: &DirNames, from, max| -> Vec<(u64, Vec<u8>, Target)> {
            let page = names.page(&order, from, max).unwrap();
            page.into_iter()
                .map(|(at, name, target)| (at, name.to_vec(), target))
                .collect()
        };
        let all = told(&names, 0, 10);
        assert_eq!(all.len(), 3);
        assert!(all.is_sorted_by_key(|(at, ..)| *at));
        for (at, name, _) in &all {
            assert_eq!(*at, order.first_cookie(name));
        }
        assert!(all.iter().any(|(_, name, key)| name == b"d" && *key == target(9)));
        let mut parts = told(&names, 0, 1);
        parts.extend(told(&names, parts[0].0, 1));
        parts.extend(told(&names, parts[1].0, 1));
        assert_eq!(parts, all);
        assert!(told(&names, all[2].0, 5).is_empty());
        for i in 0..LISTED_MAX as u64 {
            names.set(&i.to_le_bytes(), Some(target(i)), LogSeq(7), LogSeq(0));
        }
        assert!(
            names.page(&order, 0, 10).is_none(),
            "each page would look at all of them"
        );
    }

    #[test]
    fn names_of_a_large_directory_that_was_read_are_asked_for() {
        let mut names = DirNames::default();
        let many: Vec<_> = (0..LEARNT_MAX as u64 + 1).map(u64::to_le_bytes).collect();
        let many: Vec<&[u8]> = many.iter().map(|name| &name[..]).collect();
        names.take_page(0, page(&many), Some(1));
        names.take_page(1, page(&[]), None);
        assert_eq!(names.get(many[0]), Some(Some(target(0))));
        assert_eq!(names.get(many[LEARNT_MAX]), None, "it is asked for");
        assert_eq!(names.get(b"x"), Some(None));
        assert!(!names.is_complete());
        // The removal, made while the page was on its way, is newer and stays.
        let mut names = DirNames::default();
        names.set(b"a", None, LogSeq(3), LogSeq(0));
        names.take_page(0, page(&[b"a"]), Some(1));
        assert_eq!(names.get(b"a"), Some(None));
    }

    #[test]
    fn own_change_wins_over_what_the_daemon_says() {
        let mut names = DirNames::default();
        assert_eq!(names.get(b"a"), None);
        names.set(b"a", None, LogSeq(7), LogSeq(0));
        assert_eq!(names.learn(b"a", Some(target(3)), LogSeq(0)), None);
        names.doubt(b"a", target(3), LogSeq(9));
        assert_eq!(names.get(b"a"), Some(None));
    }

    #[test]
    fn new_directory_knows_that_names_are_missing() {
        let mut names = DirNames::default();
        names.set_complete();
        assert_eq!(names.get(b"x"), Some(None));
        assert!(!names.has_any());
        names.set(b"x", Some(target(9)), LogSeq(1), LogSeq(0));
        assert!(names.has_any());
        names.clear();
        assert_eq!(names.get(b"x"), None);
    }

    #[test]
    fn full_table_keeps_what_is_not_digested() {
        let mut names = DirNames::default();
        names.set_complete();
        for i in 0..NAMES_MAX as u64 {
            names.set(&i.to_le_bytes(), Some(target(i)), LogSeq(i + 1), LogSeq(0));
        }
        names.set(b"one more", Some(target(1)), LogSeq(1 << 40), LogSeq(10));
        assert_eq!(names.get(&9_u64.to_le_bytes()), None);
        assert_eq!(names.get(&10_u64.to_le_bytes()), Some(Some(target(10))));
        // Forgotten names are asked for; names that never existed are known not to exist.
        assert_eq!(names.get(b"never made"), Some(None));
        assert!(!names.is_complete());
        assert_eq!(
            names.learn(&9_u64.to_le_bytes(), Some(target(9)), LogSeq(10)),
            Some(target(9))
        );
        names.set(&9_u64.to_le_bytes(), None, LogSeq(1 << 41), LogSeq(10));
        assert_eq!(names.get(&9_u64.to_le_bytes()), Some(None));
    }

    #[test]
    fn removed_names_are_forgotten_when_their_removal_is_digested() {
        let mut names = DirNames::default();
        names.set_complete();
        names.set(b"stays", Some(target(1)), LogSeq(1), LogSeq(0));
        for seq in 2..100_000_u64 {
            // Digested up to 5,000 entries ago.
            names.set(
                &seq.to_le_bytes(),
                None,
                LogSeq(seq),
                LogSeq(seq.saturating_sub(5000)),
            );
            assert!(names.names.len() < 3 * 5000 + GONE_MIN, "{}", names.names.len());
        }
        // Kept as long as the daemon may still report them as existing.
        assert_eq!(
            names.learn(&99_000_u64.to_le_bytes(), Some(target(9)), LogSeq(0)),
            None
        );
        assert_eq!(names.get(b"stays"), Some(Some(target(1))));
        assert_eq!(names.get(&9_u64.to_le_bytes()), Some(None));
        let mut partly = DirNames::default();
        for seq in 1..10_000_u64 {
            partly.set(&seq.to_le_bytes(), None, LogSeq(seq), LogSeq(seq));
        }
        assert_eq!(partly.get(&9_u64.to_le_bytes()), None, "the daemon is asked");
    }

    #[test]
    fn directory_that_was_read_knows_that_names_are_missing() {
        let mut names = DirNames::default();
        let due: Vec<_> = (0..3 * MISSES_A_PAGE).filter_map(|_| names.missed()).collect();
        assert_eq!(due, [0; 3]);
        names.take_page(0, page(&[b"a", b"b"]), Some(7));
        assert_eq!(
            names.get(b"a"),
            Some(Some(target(0))),
            "a page says what its names name"
        );
        assert_eq!(names.get(b"x"), None, "there may be more");
        // Made and digested between the pages, and forgotten.
        for i in 0..=NAMES_MAX as u64 {
            names.set(&i.to_le_bytes(), Some(target(i)), LogSeq(1), LogSeq(1));
        }
        assert_eq!(names.get(&5_u64.to_le_bytes()), None);
        names.take_page(0, page(&[b"late"]), None);
        assert!(!names.complete, "another thread's answer");
        names.take_page(7, page(&[b"c"]), Some(9));
        names.take_page(9, page(&[]), None);
        assert_eq!(names.get(b"x"), Some(None));
        assert_eq!(names.get(b"c"), Some(Some(target(0))));
        for forgotten in [&b"a"[..], b"b", &5_u64.to_le_bytes()] {
            assert_eq!(names.get(forgotten), None, "it is asked for");
        }
        assert_eq!(names.missed(), None);
        // The daemon's answer was wrong: from the start.
        names.learn(b"a", Some(target(1)), LogSeq(1));
        names.doubt(b"a", target(1), LogSeq(2));
        assert_eq!(names.get(b"x"), None);
        assert_eq!((1..MISSES_A_PAGE).find_map(|_| names.missed()), None);
        assert_eq!(names.missed(), Some(0));
    }

    #[test]
    fn removal_stays_known_while_an_older_answer_may_come() {
        let names = Mutex::new(DirNames::default());
        assert!(names.lock().learn(b"known", Some(target(3)), LogSeq(0)).is_some());
        assert_eq!(
            Asking::unless_known(&names, b"known").map_err(|_| ()),
            Ok(Some(target(3)))
        );
        let asking = Asking::unless_known(&names, b"f").err().unwrap();
        for seq in 0..2 * NAMES_MAX as u64 {
            names
                .lock()
                .set(&seq.to_le_bytes(), None, LogSeq(seq + 1), LogSeq(seq + 1));
        }
        // The answer was given before the removal.
        let first = 0_u64.to_le_bytes();
        assert_eq!(names.lock().learn(&first, Some(target(9)), LogSeq(1 << 20)), None);
        drop(asking);
        assert_eq!(names.lock().asking, 0);
        for seq in 0..GONE_MIN as u64 {
            names.lock().set(b"x", None, LogSeq(seq), LogSeq(1 << 20));
        }
        assert_eq!(names.lock().get(&first), None);
    }

    #[test]
    fn forgotten_name_that_is_removed_is_not_there_again() {
        let mut names = DirNames::default();
        names.set_complete();
        for i in 0..=NAMES_MAX as u64 {
            names.set(&i.to_le_bytes(), Some(target(i)), LogSeq(1), LogSeq(1));
        }
        assert_eq!(names.get(&5_u64.to_le_bytes()), None);
        names.set(&5_u64.to_le_bytes(), None, LogSeq(2), LogSeq(1));
        // Its removal is digested and forgotten in turn: the daemon is asked.
        for i in 0..=NAMES_MAX as u64 {
            names.set(
                &(i + (1 << 32)).to_le_bytes(),
                Some(target(i)),
                LogSeq(3),
                LogSeq(3),
            );
        }
        assert_eq!(names.get(&5_u64.to_le_bytes()), None);
        names.clear();
        names.set_complete();
        assert_eq!(names.get(&5_u64.to_le_bytes()), Some(None));
    }
}
