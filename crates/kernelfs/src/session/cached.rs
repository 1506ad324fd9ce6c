//! What the kernels above mounts may still use without a lease: cached replies about inodes that a mount gave
//! back, and about any inode of a mount that was sealed. Owns until when no other session may change them.

use hashbrown::HashMap;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::time::Duration;
use varve_format::seeded::{Bug, armed};
use varve_format::{InodeKey, SessionId};
use varve_ipc::DENTRY_TTL_MAX;

/// Longest time for which a kernel may use a cached reply, rounded up.
const MOST: Duration = DENTRY_TTL_MAX.saturating_add(Duration::from_millis(1));
/// As long as a kernel's ticks may lag behind the clock, what has expired by the clock is kept.
const LAG: Duration = Duration::from_secs(1);
/// Room for so many inodes is kept when there are none.
const KEPT: usize = 1024;

/// Sessions whose kernels may use cached replies, and until which moment of the clock.
type Until = SmallVec<[(SessionId, Duration); 1]>;

/// Cached replies of kernels above mounts.
#[derive(Debug, Default)]
pub(crate) struct CachedReplies {
    sealed: Vec<(SessionId, Duration)>,
    given_back: HashMap<InodeKey, Until>,
    /// The keys of `given_back`, and when to look whether they have expired.
    order: VecDeque<(Duration, InodeKey)>,
}

impl CachedReplies {
    /// Notes that the session of a mount is sealed at `now`, a [moment](varve_ipc::Clock::moment) of the
    /// clock.
    pub(crate) fn note_sealed(&mut self, id: SessionId, now: Duration) {
        self.sealed
            .retain(|(other, until)| *other != id && *until + LAG > now);
        self.sealed.push((id, now + DENTRY_TTL_MAX));
    }

    /// Notes that a session gives a lease back at `now`, which replies that its kernel may use for `cached_ms`
    /// depend on.
    pub(crate) fn note_given_back(&mut self, id: SessionId, key: InodeKey, cached_ms: u32, now: Duration) {
        self.prune(now.saturating_sub(LAG));
        let until = now + Duration::from_millis(cached_ms.into()).min(MOST);
        let of_key = self.given_back.entry(key).or_default();
        if of_key.is_empty() {
            self.order.push_back((now + MOST, key));
        }
        match of_key.iter_mut().find(|(other, _)| *other == id) {
            Some((_, known)) => *known = until.max(*known),
            None => of_key.push((id, until)),
        }
    }

    /// Forgets what has expired at `now`, by the kernels' ticks.
    pub(crate) fn prune(&mut self, now: Duration) {
        while let Some((due, key)) = self.order.front().copied()
            && due <= now
        {
            self.order.pop_front();
            if let Some(of_key) = self.given_back.get_mut(&key) {
                of_key.retain(|(_, until)| *until > now);
                if of_key.is_empty() {
                    self.given_back.remove(&key);
                } else {
                    self.order.push_back((now + MOST, key));
                }
            }
        }
        if self.given_back.is_empty() && self.given_back.capacity() > KEPT {
            self.given_back = HashMap::default();
            self.order = VecDeque::default();
        }
    }

    /// Returns the moment, by the kernels' ticks, until which nobody but `session` may change `keys`. Its own kernel, and that of the
    /// mount's session that it continues, learns of its changes.
    pub(crate) fn until(
        &self,
        session: SessionId,
        continues: Option<SessionId>,
        keys: impl IntoIterator<Item = InodeKey>,
    ) -> Duration {
        let mut last = Duration::ZERO;
        if !armed(Bug::ChangeAfterSealedMount) {
            let others = self.sealed.iter().filter(|(id, _)| Some(*id) != continues);
            last = others.fold(last, |last, (_, until)| last.max(*until));
        }
        if !self.given_back.is_empty() && !armed(Bug::ChangeWhileCached) {
            let of_keys = keys.into_iter().filter_map(|key| self.given_back.get(&key));
            let others = of_keys
                .flatten()
                .filter(|(id, _)| *id != session && Some(*id) != continues);
            last = others.fold(last, |last, (_, until)| last.max(*until));
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::CachedReplies;
    use std::time::Duration;
    use varve_format::{InodeKey, SessionId};

    const FILE: InodeKey = InodeKey::new(5, 1);
    const OTHER: InodeKey = InodeKey::new(6, 1);
    const ONE: SessionId = SessionId(1);
    const TWO: SessionId = SessionId(2);
    const THREE: SessionId = SessionId(3);

    const fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn inode_that_was_given_back_is_left_alone_by_others_until_its_replies_have_expired() {
        let mut cached = CachedReplies::default();
        cached.note_given_back(ONE, FILE, 200, at(1_000));
        assert_eq!(cached.until(TWO, None, [OTHER, FILE]), at(1_200));
        assert_eq!(cached.until(TWO, None, [OTHER]), at(0));
        assert_eq!(cached.until(ONE, None, [FILE]), at(0), "its own kernel");
        assert_eq!(cached.until(THREE, Some(ONE), [FILE]), at(0), "it goes on");
        // Of several, and of the same again, the last counts.
        cached.note_given_back(ONE, FILE, 10, at(1_050));
        cached.note_given_back(TWO, FILE, 100, at(1_050));
        assert_eq!(cached.until(TWO, None, [FILE]), at(1_200));
        assert_eq!(cached.until(ONE, None, [FILE]), at(1_150));
    }

    #[test]
    fn time_and_memory_are_bounded() {
        let mut cached = CachedReplies::default();
        cached.note_given_back(ONE, FILE, u32::MAX, at(0));
        let most = super::MOST;
        assert_eq!(cached.until(TWO, None, [FILE]), most);
        for ino in 10..1_000 {
            cached.note_given_back(ONE, InodeKey::new(ino, 1), 300, at(1));
        }
        cached.prune(most);
        assert_eq!(cached.given_back.len(), 990, "the first has expired");
        cached.prune(most + at(1));
        assert!(cached.given_back.is_empty() && cached.order.is_empty());
        // Said of one lease again and again, as a hostile client may.
        for ms in 0..10_000 {
            cached.note_given_back(ONE, FILE, 300, at(1_000 + ms));
            assert!(cached.order.len() <= 1);
            assert!(cached.until(TWO, None, [FILE]) >= at(1_300 + ms));
        }
    }
}
