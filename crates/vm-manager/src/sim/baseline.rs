//! Baselines for MULTI-CLOCK: static tiering, LRU at every access, and the offline best.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::Score;
use super::trace::Access;
use crate::types::PageKey;

/// Simulates static tiering: pages stay in the tier of their first touch.
pub fn static_tiering(trace: &[Access], per_tick: usize, fast_pages: u64) -> Score {
    let mut fast: HashSet<PageKey> = HashSet::new();
    let mut seen: HashSet<PageKey> = HashSet::new();
    let mut score = Score::default();
    for tick in trace.chunks(per_tick.max(1)) {
        let mut hits = 0;
        for a in tick {
            if seen.insert(a.page) && (fast.len() as u64) < fast_pages {
                fast.insert(a.page);
            }
            hits += u64::from(fast.contains(&a.page));
        }
        score.tick(hits, tick.len() as u64);
    }
    score
}

/// Simulates exact LRU with promotion at every miss: it sees each access, which no scanner can, and pays
/// nothing for it.
pub fn lru(trace: &[Access], per_tick: usize, fast_pages: u64) -> Score {
    let mut stamp: HashMap<PageKey, u64> = HashMap::new();
    let mut order: BTreeSet<(u64, PageKey)> = BTreeSet::new();
    let mut seen: HashSet<PageKey> = HashSet::new();
    let mut score = Score::default();
    let mut now = 0;
    for tick in trace.chunks(per_tick.max(1)) {
        let mut hits = 0;
        for a in tick {
            now += 1;
            let fresh = seen.insert(a.page);
            if let Some(old) = stamp.insert(a.page, now) {
                order.remove(&(old, a.page));
                hits += 1;
            } else {
                let full = order.len() as u64 >= fast_pages;
                if full && let Some((_, page)) = order.pop_first() {
                    stamp.remove(&page);
                }
                // One move up and, if the tier was full, one down.
                score.migrations += u64::from(!fresh) + u64::from(full);
                hits += u64::from(fresh);
            }
            order.insert((now, a.page));
        }
        score.tick(hits, tick.len() as u64);
    }
    score
}

/// Simulates the offline best (Belady's MIN with bypass): it knows the future, keeps the pages with the
/// nearest next use, and may leave a page in its tier. No policy can have more hits; it does not minimize
/// migrations. Every first touch counts as a hit, as in [`lru`].
pub fn offline_best(trace: &[Access], per_tick: usize, fast_pages: u64) -> Score {
    let never = usize::MAX;
    let mut next = vec![never; trace.len()];
    let mut last: HashMap<PageKey, usize> = HashMap::new();
    for (i, a) in trace.iter().enumerate().rev() {
        next[i] = last.insert(a.page, i).unwrap_or(never);
    }
    let mut until: HashMap<PageKey, usize> = HashMap::new();
    let mut order: BTreeSet<(usize, PageKey)> = BTreeSet::new();
    let mut seen: HashSet<PageKey> = HashSet::new();
    let mut score = Score::default();
    let mut i = 0;
    for tick in trace.chunks(per_tick.max(1)) {
        let mut hits = 0;
        for a in tick {
            let fresh = seen.insert(a.page);
            let held = until
                .remove(&a.page)
                .is_some_and(|use_at| order.remove(&(use_at, a.page)));
            hits += u64::from(held || fresh);
            let entry = (next[i], a.page);
            i += 1;
            let worse = order.last().is_some_and(|l| *l <= entry) || entry.0 == never;
            if order.len() as u64 >= fast_pages {
                if worse {
                    continue;
                }
                if let Some((_, page)) = order.pop_last() {
                    until.remove(&page);
                    score.migrations += 1;
                }
            }
            score.migrations += u64::from(!held && !fresh);
            order.insert(entry);
            until.insert(a.page, entry.0);
        }
        score.tick(hits, tick.len() as u64);
    }
    score
}
