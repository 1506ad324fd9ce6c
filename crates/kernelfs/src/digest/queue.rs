//! Round-robin queue of sessions with background digest requests. The daemon's worker threads take from it;
//! nothing here blocks.
//!
//! Logs of different sessions touch different inodes, since one session at a time holds a lease for writing,
//! so they are digested side by side: each thread reads, checks and gathers its log. The records themselves
//! are committed one after another, as there is one journal.

use std::collections::BTreeSet;
use std::ops::Bound;
use varve_format::SessionId;

/// Sessions that wait for a digest, and sessions under digest. At most one worker digests a session: a second
/// one would only wait for the first.
#[derive(Debug, Default)]
pub(crate) struct DigestQueue {
    asked: BTreeSet<SessionId>,
    under_way: BTreeSet<SessionId>,
    /// The session served last: a session that asks repeatedly comes after all others.
    last: Option<SessionId>,
}

impl DigestQueue {
    /// Requests a digest of the session's log; if one is under way, another follows it.
    pub(crate) fn ask(&mut self, session: SessionId) {
        self.asked.insert(session);
    }

    /// Returns the session whose turn it is; [`done`](Self::done) follows.
    pub(crate) fn begin(&mut self) -> Option<SessionId> {
        let after = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        let later = self.asked.range((after, Bound::Unbounded));
        let free = |session: &&SessionId| !self.under_way.contains(session);
        let next = *later.chain(&self.asked).find(free)?;
        self.asked.remove(&next);
        self.under_way.insert(next);
        self.last = Some(next);
        Some(next)
    }

    /// Marks the session's digest as finished.
    pub(crate) fn done(&mut self, session: SessionId) {
        self.under_way.remove(&session);
    }
}

#[cfg(test)]
mod tests {
    use super::DigestQueue;
    use varve_format::SessionId;

    #[test]
    fn a_session_that_asks_again_and_again_lets_the_others_have_their_turns() {
        let mut asked = DigestQueue::default();
        for id in 1..=3 {
            asked.ask(SessionId(id));
        }
        let mut served = Vec::new();
        for _ in 0..6 {
            asked.ask(SessionId(1));
            let Some(next) = asked.begin() else { break };
            asked.done(next);
            served.push(next.0);
        }
        assert_eq!(served, [1, 2, 3, 1, 1, 1]);
    }

    #[test]
    fn a_session_has_one_thread_and_what_it_asks_meanwhile_is_done_afterwards() {
        let mut asked = DigestQueue::default();
        asked.ask(SessionId(1));
        assert_eq!(asked.begin(), Some(SessionId(1)));
        asked.ask(SessionId(1));
        assert_eq!(asked.begin(), None, "its log is being digested");
        asked.ask(SessionId(2));
        assert_eq!(asked.begin(), Some(SessionId(2)), "another log waits for nobody");
        asked.done(SessionId(1));
        assert_eq!(asked.begin(), Some(SessionId(1)));
        assert_eq!(asked.begin(), None);
    }
}
