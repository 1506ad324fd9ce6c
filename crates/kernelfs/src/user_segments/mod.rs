//! Segments: files in which an ordinary user's sessions read the digested data of the user's own files
//! directly. Owns their layout and the reuse of places; knows nothing of leases, permissions and files of the
//! host (see docs/adr/0009).
//!
//! A user's segments are one file, which never is another user's and holds only copies of blocks that were
//! that user's when they were copied. It is filled as a ring: a *window* of a file (64 blocks, or all of a
//! small file) at a time, oldest out first. A window that a client maps stays unchanged until a barrier has
//! told the client to forget it, like the blocks of the NVM itself.

use hashbrown::HashMap;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;
use varve_format::seeded::{Bug, armed};
use varve_format::{BLOCK_BYTES, InodeKey, TxId};
use varve_ipc::WINDOW_BLOCKS;
use varve_ipc::sync::{Condvar, Mutex, lock};
use varve_media::MediaError;

/// Share of the ring that is made free at once when it is full.
const EVICT_SHARE: u64 = 8;
/// Shortest time between two evictions: a user whose files do not fit reads the rest by message, instead of
/// having them copied round and round.
const EVICT_MS: u64 = 1_000;
/// Longest wait for another session's copy of the same window.
const FILL_WAIT: Duration = Duration::from_millis(500);

/// A file for one user's segments. Gone with its last reference, except for clients that map it.
pub trait SegmentFile: Send + Sync {
    /// Writes whole blocks at a byte offset.
    ///
    /// # Errors
    /// `NoSpace` and others of the medium; the earlier content does not count any more.
    fn write(&self, off: u64, bytes: &[u8]) -> Result<(), MediaError>;

    /// Returns a descriptor that can be read and mapped, and nothing else.
    ///
    /// # Errors
    /// Of the medium.
    fn share(&self) -> Result<OwnedFd, MediaError>;
}

/// A bit for each block of a window.
type Blocks = u64;

/// Returns the bits of `count` blocks of a window, from block `first` on.
pub(crate) const fn bits(first: u64, count: u64) -> Blocks {
    let ones = if count >= 64 { u64::MAX } else { (1 << count) - 1 };
    ones << first
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Its bytes are being copied; no client maps it.
    Filling,
    /// Its bytes are being copied in vain: this transaction replaced them meanwhile.
    Spoiled(TxId),
    /// Clients may map it.
    Live,
    /// No client is given it any more; free when no session can have it from before this transaction.
    Dead(TxId),
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    /// Position in the ring, which grows for ever.
    at: u64,
    len: u64,
    key: InodeKey,
    window: u64,
    /// Blocks that are here.
    have: Blocks,
    state: State,
}

/// A window of a file.
type Window = (InodeKey, u64);

#[derive(Default)]
struct Ring {
    /// By position. The slots at the front go first.
    slots: VecDeque<Slot>,
    /// Positions of live and filling slots.
    by_window: HashMap<Window, u64>,
    head: u64,
    evicted_ms: Option<u64>,
}

impl Ring {
    fn index(&self, at: u64) -> Option<usize> {
        self.slots.binary_search_by_key(&at, |slot| slot.at).ok()
    }

    fn slot(&mut self, at: u64) -> Option<&mut Slot> {
        let index = self.index(at)?;
        self.slots.get_mut(index)
    }

    /// Ends answers with this window; its place is free once the horizon has reached `tx`.
    fn kill(&mut self, at: u64, tx: TxId) {
        if let Some(slot) = self.slot(at) {
            slot.state = match slot.state {
                State::Filling if armed(Bug::SegmentStale) => return,
                // The filling thread still writes to its place.
                State::Filling => State::Spoiled(tx),
                State::Live => State::Dead(tx),
                State::Spoiled(_) | State::Dead(_) => return,
            };
            let window = (slot.key, slot.window);
            if self.by_window.get(&window) == Some(&at) {
                self.by_window.remove(&window);
            }
        }
    }

    /// Ends the filling of a slot, complete or given up: no thread writes to its place any more. Returns
    /// whether clients may map it.
    fn filled(&mut self, at: u64, good: bool) -> bool {
        let Some(slot) = self.slot(at) else { return false };
        match slot.state {
            State::Filling if good => slot.state = State::Live,
            State::Filling => {
                // No client was told of it.
                self.kill(at, TxId(0));
                self.filled(at, false);
                return false;
            }
            State::Spoiled(tx) => slot.state = State::Dead(tx),
            State::Live | State::Dead(_) => {}
        }
        self.slot(at).is_some_and(|slot| slot.state == State::Live)
    }

    /// Frees places that no session reads any more, oldest first.
    fn release(&mut self, horizon: TxId) {
        while let Some(slot) = self.slots.front()
            && matches!(slot.state, State::Dead(tx) if tx <= horizon || armed(Bug::SegmentReusedEarly))
        {
            self.slots.pop_front();
        }
    }

    /// Returns a place of `len` blocks in one piece, if one is free.
    fn place(&self, len: u64, capacity: u64) -> Option<u64> {
        let mut at = self.head;
        if at % capacity + len > capacity {
            at = at.next_multiple_of(capacity);
        }
        let oldest = self.slots.front().map_or(at, |slot| slot.at);
        (at + len - oldest <= capacity).then_some(at)
    }

    /// Returns the oldest slots that make up a share of the ring.
    fn oldest(&self, capacity: u64) -> Vec<(u64, InodeKey)> {
        let mut blocks = 0;
        let share = (capacity / EVICT_SHARE).max(1);
        let old = self.slots.iter().take_while(|slot| {
            let more = blocks < share;
            blocks += slot.len;
            more
        });
        old.filter(|slot| slot.state == State::Live)
            .map(|slot| (slot.at, slot.key))
            .collect()
    }
}

/// Result of looking for a window.
pub(crate) enum Found {
    /// It is at this block of the segments.
    At(u64),
    /// It is to be copied.
    Fill(Fill),
    /// There is no place now. Forgetting these old windows would make some.
    Full(Vec<(u64, InodeKey)>),
}

/// A place that is being filled. Given up when it is dropped before [`publish`](Fill::publish).
pub(crate) struct Fill {
    user: Arc<UserSegments>,
    at: u64,
    done: bool,
}

impl Fill {
    /// Writes blocks of the window from block `block` on.
    pub(crate) fn write(&self, block: u64, bytes: &[u8]) -> Result<(), MediaError> {
        let at = (self.at % self.user.blocks + block) * BLOCK_BYTES;
        self.user.file.write(at, bytes)
    }

    /// Makes the written window available to clients. Returns its first block, unless the file's blocks were
    /// replaced meanwhile.
    pub(crate) fn publish(mut self) -> Option<u64> {
        self.done = true;
        let live = lock(&self.user.ring).filled(self.at, true);
        self.user.filled.notify_all();
        live.then_some(self.at % self.user.blocks)
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        if !self.done {
            lock(&self.user.ring).filled(self.at, false);
            self.user.filled.notify_all();
        }
    }
}

/// The segments of one user.
pub(crate) struct UserSegments {
    uid: u32,
    file: Box<dyn SegmentFile>,
    /// Length of the file.
    blocks: u64,
    ring: Mutex<Ring>,
    filled: Condvar,
}

impl UserSegments {
    /// Returns the user.
    pub(crate) const fn uid(&self) -> u32 {
        self.uid
    }

    /// Returns the length of the file, in bytes.
    pub(crate) const fn len_bytes(&self) -> u64 {
        self.blocks * BLOCK_BYTES
    }

    /// Returns a descriptor for a client.
    pub(crate) fn share(&self) -> Result<OwnedFd, MediaError> {
        self.file.share()
    }

    /// Frees windows that were forgotten up to transaction `horizon`: no session reads them any more. Call it
    /// under the lock that protects the horizon and calls of [`Segments::replaced`], and never with an older
    /// horizon: it would free places that were given up meanwhile.
    pub(crate) fn release(&self, horizon: TxId) {
        lock(&self.ring).release(horizon);
    }

    /// Looks for a window that must have the blocks `need`, and may grow to `len` blocks.
    pub(crate) fn find(
        self: &Arc<Self>,
        key: InodeKey,
        window: u64,
        need: Blocks,
        len: u64,
        now_ms: u64,
    ) -> Found {
        let mut ring = lock(&self.ring);
        while let Some(at) = ring.by_window.get(&(key, window)).copied() {
            let Some(slot) = ring.slot(at).copied() else { break };
            match slot.state {
                State::Filling => {
                    let waited = self.filled.wait_timeout(ring, FILL_WAIT);
                    let (again, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                    if timeout.timed_out() {
                        return Found::Full(Vec::new());
                    }
                    ring = again;
                }
                State::Live if need & !slot.have == 0 => return Found::At(at % self.blocks),
                // The file has more blocks by now: mapped windows stay as they are, until they are forgotten.
                State::Live => return Found::Full(vec![(at, key)]),
                State::Spoiled(_) | State::Dead(_) => break,
            }
        }
        let Some(at) = ring.place(len, self.blocks) else {
            let due = ring.evicted_ms.is_none_or(|last| now_ms >= last + EVICT_MS);
            if !due {
                return Found::Full(Vec::new());
            }
            ring.evicted_ms = Some(now_ms);
            return Found::Full(ring.oldest(self.blocks));
        };
        ring.head = at + len;
        ring.slots.push_back(Slot {
            at,
            len,
            key,
            window,
            have: need,
            state: State::Filling,
        });
        ring.by_window.insert((key, window), at);
        Found::Fill(Fill {
            user: Arc::clone(self),
            at,
            done: false,
        })
    }

    /// Ends answers with these windows, which all sessions have forgotten when the horizon has reached `tx`.
    pub(crate) fn forget(&self, slots: &[(u64, InodeKey)], tx: TxId) {
        let mut ring = lock(&self.ring);
        for (at, _) in slots {
            ring.kill(*at, tx);
        }
    }

    /// Notes that `tx` replaced the blocks of these files; the sessions that map them are being told.
    fn replaced(&self, keys: &dyn Fn(InodeKey) -> bool, tx: TxId) {
        let mut ring = lock(&self.ring);
        let stale: Vec<u64> = ring
            .by_window
            .iter()
            .filter(|((key, _), _)| keys(*key))
            .map(|(_, at)| *at)
            .collect();
        for at in stale {
            ring.kill(at, tx);
        }
    }
}

/// The segments of all users that have sessions.
#[derive(Default)]
pub(crate) struct Segments {
    users: Mutex<HashMap<u32, Weak<UserSegments>>>,
}

impl Segments {
    /// Returns the segments of `uid`, made by `make` if there are none. They go with the last session that
    /// has them.
    pub(crate) fn of(
        &self,
        uid: u32,
        len_bytes: u64,
        make: impl FnOnce() -> Result<Option<Box<dyn SegmentFile>>, MediaError>,
    ) -> Result<Option<Arc<UserSegments>>, MediaError> {
        let mut users = lock(&self.users);
        if let Some(user) = users.get(&uid).and_then(Weak::upgrade) {
            return Ok(Some(user));
        }
        users.retain(|_, user| user.strong_count() > 0);
        let blocks = len_bytes / BLOCK_BYTES;
        let file = if blocks < WINDOW_BLOCKS { None } else { make()? };
        let user = file.map(|file| {
            Arc::new(UserSegments {
                uid,
                file,
                blocks,
                ring: Mutex::default(),
                filled: Condvar::new(),
            })
        });
        if let Some(user) = &user {
            users.insert(uid, Arc::downgrade(user));
        }
        Ok(user)
    }

    /// Returns the number of users with segments.
    pub(crate) fn count(&self) -> usize {
        let users = lock(&self.users);
        users.values().filter(|user| user.strong_count() > 0).count()
    }

    /// Notes that `tx` replaced or freed the blocks of these files. Call it under the lock under which the
    /// sessions that map them are told.
    pub(crate) fn replaced(&self, keys: &dyn Fn(InodeKey) -> bool, tx: TxId) {
        let users: Vec<_> = lock(&self.users).values().filter_map(Weak::upgrade).collect();
        for user in users {
            user.replaced(keys, tx);
        }
    }
}

#[cfg(all(test, feature = "shuttle"))]
mod interleavings;

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{EVICT_MS, Found, SegmentFile, Segments, UserSegments, bits};
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use varve_format::{InodeKey, TxId};
    use varve_ipc::WINDOW_BLOCKS;
    use varve_ipc::sync::lock;
    use varve_media::MediaError;

    const BLOCKS: u64 = 4 * WINDOW_BLOCKS;
    const NONE: TxId = TxId(u64::MAX);

    struct Nowhere;

    impl SegmentFile for Nowhere {
        fn write(&self, off: u64, bytes: &[u8]) -> Result<(), MediaError> {
            assert!(off + bytes.len() as u64 <= BLOCKS * 4096);
            Ok(())
        }

        fn share(&self) -> Result<OwnedFd, MediaError> {
            Ok(std::fs::File::open("/dev/null").unwrap().into())
        }
    }

    fn segments() -> (Segments, Arc<UserSegments>) {
        let all = Segments::default();
        let made = all.of(7, BLOCKS * 4096, || Ok(Some(Box::new(Nowhere)))).unwrap();
        (all, made.unwrap())
    }

    const fn file(ino: u64) -> InodeKey {
        InodeKey::new(ino, 1)
    }

    fn fill(user: &Arc<UserSegments>, ino: u64, window: u64, len: u64, horizon: TxId) -> Option<u64> {
        user.release(horizon);
        match user.find(file(ino), window, bits(0, len), len, 0) {
            Found::Fill(fill) => {
                fill.write(0, &vec![0; (len * 4096) as usize]).unwrap();
                fill.publish()
            }
            _ => None,
        }
    }

    fn there(user: &Arc<UserSegments>, ino: u64, window: u64) -> Option<u64> {
        match user.find(file(ino), window, 1, 1, 0) {
            Found::At(at) => Some(at),
            _ => None,
        }
    }

    #[test]
    fn window_is_found_where_it_was_put_until_its_file_changes() {
        let (all, user) = segments();
        assert_eq!(fill(&user, 1, 0, WINDOW_BLOCKS, NONE), Some(0));
        assert_eq!(fill(&user, 1, 3, 2, NONE), Some(WINDOW_BLOCKS));
        assert_eq!(
            (there(&user, 1, 0), there(&user, 1, 3)),
            (Some(0), Some(WINDOW_BLOCKS))
        );
        assert_eq!(fill(&user, 2, 0, 1, NONE), Some(WINDOW_BLOCKS + 2));
        all.replaced(&|key| key == file(1), TxId(9));
        assert_eq!(there(&user, 2, 0), Some(WINDOW_BLOCKS + 2));
        // Its place is not used before all sessions have forgotten it.
        assert_eq!(fill(&user, 1, 0, WINDOW_BLOCKS, TxId(8)), Some(WINDOW_BLOCKS + 3));
        assert_eq!(all.count(), 1);
        drop(user);
        assert_eq!(all.count(), 0);
    }

    #[test]
    fn place_is_used_again_only_when_the_horizon_has_passed_it() {
        let (all, user) = segments();
        for window in 0..4 {
            assert_eq!(
                fill(&user, 1, window, WINDOW_BLOCKS, NONE),
                Some(window * WINDOW_BLOCKS)
            );
        }
        all.replaced(&|key| key == file(1), TxId(5));
        assert_eq!(fill(&user, 2, 0, WINDOW_BLOCKS, TxId(4)), None);
        assert_eq!(fill(&user, 2, 0, WINDOW_BLOCKS, TxId(5)), Some(0));
    }

    #[test]
    fn place_is_not_used_again_by_a_horizon_from_before_it_was_given_up() {
        let (all, user) = segments();
        for window in 0..4 {
            fill(&user, 1, window, WINDOW_BLOCKS, NONE).unwrap();
        }
        // First no session has anything to forget; then one has.
        user.release(NONE);
        all.replaced(&|key| key == file(1), TxId(5));
        assert!(matches!(user.find(file(2), 0, 1, 1, 0), Found::Full(_)));
    }

    #[test]
    fn copy_of_what_was_replaced_meanwhile_is_told_to_nobody() {
        let (all, user) = segments();
        let Found::Fill(filling) = user.find(file(1), 0, 1, 1, 0) else {
            panic!("no place");
        };
        all.replaced(&|key| key == file(1), TxId(5));
        // No other window gets its place as long as it may be written to.
        assert_eq!(fill(&user, 2, 0, 1, NONE), Some(1));
        assert_eq!(lock(&user.ring).slots.len(), 2);
        assert_eq!(filling.publish(), None);
        fill(&user, 3, 0, 1, NONE).unwrap();
        assert_eq!(lock(&user.ring).slots.len(), 2);
        let Found::Fill(given_up) = user.find(file(1), 0, 1, 1, 0) else {
            panic!("no place");
        };
        drop(given_up);
        assert_eq!(there(&user, 1, 0), None);
    }

    #[test]
    fn full_ring_names_its_oldest_windows_now_and_then() {
        let (_all, user) = segments();
        for window in 0..4 {
            fill(&user, 1, window, WINDOW_BLOCKS, NONE).unwrap();
        }
        let find = |now_ms| user.find(file(2), 0, 1, 1, now_ms);
        let Found::Full(old) = find(10) else {
            panic!("there was room")
        };
        assert_eq!(old, [(0, file(1))]);
        assert!(
            matches!(find(11), Found::Full(old) if old.is_empty()),
            "not again at once"
        );
        user.forget(&old, TxId(3));
        user.release(TxId(2));
        assert!(matches!(find(12), Found::Full(_)));
        user.release(TxId(3));
        assert!(matches!(find(12), Found::Fill(_)));
        assert!(matches!(find(10 + EVICT_MS), Found::At(_) | Found::Fill(_)));
    }

    #[test]
    fn window_that_has_grown_is_copied_anew() {
        let (_all, user) = segments();
        fill(&user, 1, 0, 2, NONE).unwrap();
        let Found::Full(old) = user.find(file(1), 0, bits(0, 3), WINDOW_BLOCKS, 0) else {
            panic!("half of it is there");
        };
        user.forget(&old, TxId(1));
        assert_eq!(fill(&user, 1, 0, 3, NONE), Some(2));
    }
}
