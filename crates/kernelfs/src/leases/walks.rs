//! How many leases are asked back ahead for a session that takes one after the other from other sessions, as
//! where a program under `varve run` walks through a tree that was made on the mount. As readahead of a file:
//! nothing at first, then twice as many each time. To wait for a lease takes about as long as to ask [`MOST`] back
//! in vain, and to get them again.

use hashbrown::HashMap;
use varve_format::{Ino, SessionId};

/// Time without a wait after which a session counts as walking no more.
const PAUSE_MS: u64 = 250;
/// Leases that a session waits for before any is asked back ahead.
const WAITS: usize = 8;
/// Most leases asked back at once, at first and later.
const FIRST: usize = 16;
const MOST: usize = 256;
/// Most directories that are left for the next time.
const LEFT_MOST: usize = 4 * MOST;

#[derive(Debug, Default)]
struct Walk {
    last_ms: u64,
    waits: usize,
    window: usize,
    /// It waited since leases were asked back ahead.
    goes_on: bool,
    /// The session whose lease it waits for, or waited for last.
    holder: Option<SessionId>,
    /// Directories whose leases were asked back, and that were not looked through yet.
    left: Vec<Ino>,
}

/// The sessions that take leases of others.
#[derive(Debug, Default)]
pub(super) struct Walks(HashMap<SessionId, Walk>);

impl Walks {
    /// Notes that `session` waits for a lease of `holder`.
    pub(super) fn note_holder(&mut self, session: SessionId, holder: SessionId) {
        self.0.entry(session).or_default().holder = Some(holder);
    }

    /// Notes that a request of `session` got its leases after a wait.
    pub(super) fn note_waited(&mut self, session: SessionId, now_ms: u64) {
        let Some(walk) = self.0.get_mut(&session) else {
            return;
        };
        if walk.last_ms + PAUSE_MS < now_ms {
            *walk = Walk {
                holder: walk.holder,
                ..Walk::default()
            };
        }
        walk.last_ms = now_ms;
        walk.waits += 1;
        walk.goes_on = true;
    }

    /// Returns the session that `session` waited for last; only its leases are asked back ahead.
    pub(super) fn holder(&self, session: SessionId) -> Option<SessionId> {
        self.0.get(&session)?.holder
    }

    /// Returns how many leases may be asked back ahead for `session`, and the directories that were
    /// [left](Self::leave) last time. None, if there is no directory to look through: neither these nor one `more`.
    pub(super) fn room(&mut self, session: SessionId, more: bool) -> (usize, Vec<Ino>) {
        let Some(walk) = self.0.get_mut(&session) else {
            return (0, Vec::new());
        };
        if !walk.goes_on || walk.waits < WAITS || (walk.left.is_empty() && !more) {
            return (0, Vec::new());
        }
        walk.goes_on = false;
        walk.window = (2 * walk.window).clamp(FIRST, MOST);
        (walk.window, std::mem::take(&mut walk.left))
    }

    /// Keeps the directories, nearest last, that are to be looked through next time.
    pub(super) fn leave(&mut self, session: SessionId, mut dirs: Vec<Ino>) {
        if let Some(walk) = self.0.get_mut(&session) {
            walk.left.append(&mut dirs);
            let most = walk.left.len().saturating_sub(LEFT_MOST);
            walk.left.drain(..most);
        }
    }

    pub(super) fn forget(&mut self, session: SessionId) {
        self.0.remove(&session);
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRST, LEFT_MOST, MOST, PAUSE_MS, WAITS, Walks};
    use varve_format::{Ino, SessionId};

    const WALKER: SessionId = SessionId(7);
    const HOLDER: SessionId = SessionId(9);

    fn wait(walks: &mut Walks, count: usize, now_ms: u64) {
        walks.note_holder(WALKER, HOLDER);
        (0..count).for_each(|_| walks.note_waited(WALKER, now_ms));
    }

    #[test]
    fn window_opens_after_some_waits_and_doubles_with_each() {
        let mut walks = Walks::default();
        wait(&mut walks, WAITS - 1, 0);
        assert_eq!(walks.room(WALKER, true).0, 0, "it may have opened one file");
        wait(&mut walks, 1, 0);
        assert_eq!(walks.room(WALKER, false).0, 0, "no directory to look through");
        let mut windows = vec![walks.room(WALKER, true).0];
        assert_eq!(walks.room(WALKER, true).0, 0, "it has not waited since");
        assert_eq!(walks.room(SessionId(8), true).0, 0, "another's");
        for now_ms in 1..8 {
            wait(&mut walks, 1, now_ms);
            windows.push(walks.room(WALKER, true).0);
        }
        assert_eq!((windows[0], windows[1]), (FIRST, 2 * FIRST));
        assert_eq!(windows.last(), Some(&MOST));
    }

    #[test]
    fn pause_ends_it_and_what_was_left_is_bounded() {
        let mut walks = Walks::default();
        wait(&mut walks, WAITS, 0);
        assert_eq!(walks.room(WALKER, true), (FIRST, Vec::new()));
        walks.leave(WALKER, (0..LEFT_MOST as u64 + 5).map(Ino).collect());
        wait(&mut walks, 1, PAUSE_MS);
        let (_, left) = walks.room(WALKER, true);
        assert_eq!((left.len(), left[0]), (LEFT_MOST, Ino(5)), "the nearest stay");
        walks.leave(WALKER, left);
        wait(&mut walks, 1, 2 * PAUSE_MS + 1);
        assert_eq!(walks.room(WALKER, true), (0, Vec::new()));
        wait(&mut walks, WAITS, 2 * PAUSE_MS + 1);
        assert_eq!(walks.room(WALKER, true), (FIRST, Vec::new()), "as new");
    }
}
