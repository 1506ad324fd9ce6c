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
struct Sweep {
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
pub(super) struct Sweeps(HashMap<SessionId, Sweep>);

impl Sweeps {
    /// Notes that `session` waits for a lease of `holder`.
    pub(super) fn note_holder(&mut self, session: SessionId, holder: SessionId) {
        self.0.entry(session).or_default().holder = Some(holder);
    }

    /// Notes that a request of `session` got its leases after a wait.
    pub(super) fn note_waited(&mut self, session: SessionId, now_ms: u64) {
        let Some(sweep) = self.0.get_mut(&session) else {
            return;
        };
        if sweep.last_ms + PAUSE_MS < now_ms {
            *sweep = Sweep {
                holder: sweep.holder,
                ..Sweep::default()
            };
        }
        sweep.last_ms = now_ms;
        sweep.waits += 1;
        sweep.goes_on = true;
    }

    /// Returns the session that `session` waited for last; only its leases are asked back ahead.
    pub(super) fn holder(&self, session: SessionId) -> Option<SessionId> {
        self.0.get(&session)?.holder
    }

    /// Returns how many leases may be asked back ahead for `session`, and the directories that were
    /// [left](Self::leave) last time. None, if there is no directory to look through: neither these nor one `more`.
    pub(super) fn room(&mut self, session: SessionId, more: bool) -> (usize, Vec<Ino>) {
        let Some(sweep) = self.0.get_mut(&session) else {
            return (0, Vec::new());
        };
        if !sweep.goes_on || sweep.waits < WAITS || (sweep.left.is_empty() && !more) {
            return (0, Vec::new());
        }
        sweep.goes_on = false;
        sweep.window = (2 * sweep.window).clamp(FIRST, MOST);
        (sweep.window, std::mem::take(&mut sweep.left))
    }

    /// Keeps the directories, nearest last, that are to be looked through next time.
    pub(super) fn leave(&mut self, session: SessionId, mut dirs: Vec<Ino>) {
        if let Some(sweep) = self.0.get_mut(&session) {
            sweep.left.append(&mut dirs);
            let most = sweep.left.len().saturating_sub(LEFT_MOST);
            sweep.left.drain(..most);
        }
    }

    pub(super) fn forget(&mut self, session: SessionId) {
        self.0.remove(&session);
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRST, LEFT_MOST, MOST, PAUSE_MS, Sweeps, WAITS};
    use varve_format::{Ino, SessionId};

    const WALKER: SessionId = SessionId(7);
    const HOLDER: SessionId = SessionId(9);

    fn wait(sweeps: &mut Sweeps, count: usize, now_ms: u64) {
        sweeps.note_holder(WALKER, HOLDER);
        (0..count).for_each(|_| sweeps.note_waited(WALKER, now_ms));
    }

    #[test]
    fn window_opens_after_some_waits_and_doubles_with_each() {
        let mut sweeps = Sweeps::default();
        wait(&mut sweeps, WAITS - 1, 0);
        assert_eq!(sweeps.room(WALKER, true).0, 0, "it may have opened one file");
        wait(&mut sweeps, 1, 0);
        assert_eq!(sweeps.room(WALKER, false).0, 0, "no directory to look through");
        let mut windows = vec![sweeps.room(WALKER, true).0];
        assert_eq!(sweeps.room(WALKER, true).0, 0, "it has not waited since");
        assert_eq!(sweeps.room(SessionId(8), true).0, 0, "another's");
        for now_ms in 1..8 {
            wait(&mut sweeps, 1, now_ms);
            windows.push(sweeps.room(WALKER, true).0);
        }
        assert_eq!((windows[0], windows[1]), (FIRST, 2 * FIRST));
        assert_eq!(windows.last(), Some(&MOST));
    }

    #[test]
    fn pause_ends_it_and_what_was_left_is_bounded() {
        let mut sweeps = Sweeps::default();
        wait(&mut sweeps, WAITS, 0);
        assert_eq!(sweeps.room(WALKER, true), (FIRST, Vec::new()));
        sweeps.leave(WALKER, (0..LEFT_MOST as u64 + 5).map(Ino).collect());
        wait(&mut sweeps, 1, PAUSE_MS);
        let (_, left) = sweeps.room(WALKER, true);
        assert_eq!((left.len(), left[0]), (LEFT_MOST, Ino(5)), "the nearest stay");
        sweeps.leave(WALKER, left);
        wait(&mut sweeps, 1, 2 * PAUSE_MS + 1);
        assert_eq!(sweeps.room(WALKER, true), (0, Vec::new()));
        wait(&mut sweeps, WAITS, 2 * PAUSE_MS + 1);
        assert_eq!(sweeps.room(WALKER, true), (FIRST, Vec::new()), "as new");
    }
}
