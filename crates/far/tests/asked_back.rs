//! A space over a device that another process serves: it asks slabs back, takes them, is away for a while,
//! and allocates slowly.

#![allow(clippy::unwrap_used, missing_docs)]

use parking_lot::{Condvar, Mutex};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use varve_far::backend::{Backend, BackendError, Fault, Faulty, Slot};
use varve_far::table::Stored;
use varve_far::{Dram, FileSlabs, PAGE_BYTES, Page, Space, SpaceError, TierConfig};

/// Pages of a slab.
const PAGES: u64 = 256;

#[derive(Default)]
struct State {
    wanted: HashSet<Slot>,
    /// The device has taken these; only those in `told` are told.
    taken: HashSet<Slot>,
    told: HashSet<Slot>,
    /// Pages that cannot be read.
    damaged: HashSet<(Slot, usize)>,
    away_since: Option<Instant>,
    /// Allocations wait while it is set.
    is_slow: bool,
    waiting: usize,
    given: usize,
}

/// Another process's device.
#[derive(Clone)]
struct Other {
    inner: Arc<Dram>,
    state: Arc<Mutex<State>>,
    changed: Arc<Condvar>,
    reads: Arc<AtomicU64>,
    patience: Duration,
}

impl Other {
    fn new(slabs: u32) -> Self {
        Self {
            inner: Arc::new(Dram::new(slabs)),
            state: Arc::default(),
            changed: Arc::default(),
            reads: Arc::default(),
            patience: Duration::from_millis(400),
        }
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
        self.changed.notify_all();
    }

    fn check(&self, slot: Slot) -> Result<(), BackendError> {
        let state = self.state.lock();
        if state.away_since.is_some() {
            return Err(BackendError::Away("it is away".into()));
        }
        if state.taken.contains(&slot) {
            return Err(BackendError::Taken);
        }
        Ok(())
    }
}

impl Backend for Other {
    fn name(&self) -> &str {
        "other"
    }
    fn capacity_slabs(&self) -> u32 {
        self.inner.capacity_slabs()
    }
    fn alloc(&self) -> Result<Slot, BackendError> {
        let mut state = self.state.lock();
        if state.away_since.is_some() {
            return Err(BackendError::Away("it is away".into()));
        }
        state.waiting += 1;
        while state.is_slow {
            self.changed.wait(&mut state);
        }
        state.waiting -= 1;
        drop(state);
        self.inner.alloc()
    }
    fn dealloc(&self, slot: Slot) {
        let mut state = self.state.lock();
        state.given += 1;
        state.wanted.remove(&slot);
        state.taken.remove(&slot);
        state.told.remove(&slot);
        // Another part of the device has its number from now on.
        state.damaged.retain(|(at, _)| *at != slot);
        self.inner.dealloc(slot);
    }
    fn read(&self, slot: Slot, offset: usize, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.check(slot)?;
        let pages = offset / PAGE_BYTES..(offset + bytes.len()).div_ceil(PAGE_BYTES);
        let is_damaged = {
            let state = self.state.lock();
            pages
                .into_iter()
                .any(|page| state.damaged.contains(&(slot, page)))
        };
        if is_damaged {
            return Err(BackendError::Io(std::io::Error::from_raw_os_error(5)));
        }
        self.inner.read(slot, offset, bytes)
    }
    fn write(&self, slot: Slot, offset: usize, bytes: &[u8]) -> Result<(), BackendError> {
        self.check(slot)?;
        self.inner.write(slot, offset, bytes)
    }
    fn wanted_back(&self) -> Vec<Slot> {
        self.state.lock().wanted.iter().copied().collect()
    }
    fn taken(&self) -> Vec<Slot> {
        self.state.lock().told.iter().copied().collect()
    }
    fn may_be_away(&self) -> bool {
        true
    }
    fn is_away(&self) -> bool {
        self.state.lock().away_since.is_some()
    }
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        while let Some(since) = state.away_since {
            let left = self.patience.saturating_sub(since.elapsed());
            if left.is_zero() {
                return false;
            }
            self.changed.wait_for(&mut state, left);
        }
        true
    }
}

fn tier(backend: impl Backend + 'static) -> TierConfig {
    TierConfig {
        backend: Box::new(backend),
        is_compressed: false,
    }
}

/// Slower than any other here.
struct Last(Dram);

impl Backend for Last {
    fn name(&self) -> &str {
        "last"
    }
    fn capacity_slabs(&self) -> u32 {
        self.0.capacity_slabs()
    }
    fn alloc(&self) -> Result<Slot, BackendError> {
        self.0.alloc()
    }
    fn dealloc(&self, slot: Slot) {
        self.0.dealloc(slot);
    }
    fn read(&self, slot: Slot, offset: usize, bytes: &mut [u8]) -> Result<(), BackendError> {
        std::thread::sleep(Duration::from_micros(100));
        self.0.read(slot, offset, bytes)
    }
    fn write(&self, slot: Slot, offset: usize, bytes: &[u8]) -> Result<(), BackendError> {
        self.0.write(slot, offset, bytes)
    }
}

/// Never looks for cold slabs: only what is asked for moves.
const T_S: u64 = 1_000_000;

fn space(tiers: Vec<TierConfig>) -> Space {
    let (space, refused) = Space::new(tiers, T_S);
    assert!(refused.is_empty(), "{refused:?}");
    space
}

fn page(seed: u64) -> Page {
    let mut page = Page::default();
    fastrand::Rng::with_seed(seed).fill(&mut page.0);
    page
}

fn store(space: &Space, seeds: std::ops::Range<u64>) -> Vec<(u64, Stored)> {
    let pages: Vec<Page> = seeds.clone().map(page).collect();
    let stored = space.store(&pages).into_iter();
    seeds
        .zip(stored)
        .map(|(seed, stored)| (seed, stored.unwrap()))
        .collect()
}

fn is_whole(space: &Space, (seed, stored): &(u64, Stored)) -> bool {
    let mut read = Page::default();
    space.load(stored, &mut read).is_ok() && read.0 == page(*seed).0
}

/// The slots are given in the order of the slabs, from 0 on.
fn slots(of: std::ops::Range<u32>) -> impl Iterator<Item = Slot> {
    of.map(Slot)
}

fn slabs_on(space: &Space, name: &str) -> u32 {
    let tiers = space.stats().tiers;
    tiers.iter().find(|tier| tier.name == name).unwrap().slabs
}

#[test]
fn slabs_that_were_taken_are_left_alone_and_others_get_their_turn() {
    let other = Other::new(200);
    let space = space(vec![tier(other.clone()), tier(Last(Dram::new(200)))]);
    let pages = store(&space, 0..100 * PAGES);
    assert_eq!(slabs_on(&space, "other"), 100);
    // More than leave at one look, and they are the first ones. Nothing says that they are gone.
    other.set(|state| {
        state.wanted.extend(slots(0..90));
        state.taken.extend(slots(0..90));
    });
    space.tick(1);
    other.set(|state| state.wanted.extend(slots(90..100)));
    space.tick(2);
    assert_eq!(
        slabs_on(&space, "other"),
        0,
        "those asked for later had their turn"
    );
    let (vain, reads) = (space.stats().failed_moves, other.reads.load(Ordering::Relaxed));
    (3..20).for_each(|now| {
        space.tick(now);
    });
    assert_eq!(space.stats().failed_moves, vain, "nothing is tried again");
    assert_eq!(other.reads.load(Ordering::Relaxed), reads);
    let mut read = Page::default();
    let lost = space.load(&pages[0].1, &mut read);
    assert!(
        matches!(
            &lost,
            Err(SpaceError::Io {
                error: BackendError::Taken,
                ..
            })
        ),
        "{lost:?}"
    );
    assert_eq!(
        other.reads.load(Ordering::Relaxed),
        reads,
        "it is known without a message"
    );
    assert!(
        pages[90 * PAGES as usize..]
            .iter()
            .all(|page| is_whole(&space, page))
    );
    for (_, stored) in pages {
        space.release(stored.place);
    }
    assert_eq!(
        other.state.lock().given,
        101,
        "each slot was given back once, and that of the measurement"
    );
}

#[test]
fn slab_without_a_place_to_go_lets_others_go_first() {
    let other = Other::new(200);
    // Room for ten.
    let space = space(vec![tier(other.clone()), tier(Last(Dram::new(10)))]);
    let pages = store(&space, 0..80 * PAGES);
    other.set(|state| state.wanted.extend(slots(0..70)));
    space.tick(1);
    assert_eq!(slabs_on(&space, "other"), 70);
    assert_eq!(space.stuck().len(), 60);
    other.set(|state| state.wanted.extend(slots(70..75)));
    for (_, stored) in &pages[..5 * PAGES as usize] {
        space.release(stored.place);
    }
    space.tick(2);
    let later = &pages[70 * PAGES as usize..75 * PAGES as usize];
    assert!(
        later
            .iter()
            .all(|(_, stored)| space.tier_of(stored.place) == Some(1)),
        "those that were not tried before come first"
    );
    let vain = space.stats().failed_moves;
    (3..9).for_each(|now| {
        space.tick(now);
    });
    assert_eq!(space.stats().failed_moves, vain, "without room nothing is tried");
    assert!(
        pages[5 * PAGES as usize..]
            .iter()
            .all(|page| is_whole(&space, page))
    );
}

#[test]
fn taken_slabs_do_not_count_against_the_size() {
    let other = Other::new(4);
    let space = space(vec![tier(other.clone())]);
    let pages = store(&space, 0..4 * PAGES);
    assert!(matches!(space.store(&[page(9_999)])[0], Err(SpaceError::Full)));
    // Nobody reads them; the device tells.
    other.set(|state| {
        for set in [&mut state.wanted, &mut state.taken, &mut state.told] {
            set.extend(slots(1..3));
        }
    });
    space.tick(1);
    assert_eq!((slabs_on(&space, "other"), space.stats().taken), (2, 2));
    let more = store(&space, 50_000..50_000 + 2 * PAGES);
    assert!(more.iter().all(|page| is_whole(&space, page)));
    assert!(!is_whole(&space, &pages[PAGES as usize]));
    assert!(is_whole(&space, &pages[0]));
}

#[test]
fn slab_that_failed_is_emptied_and_does_not_count_against_the_size() {
    let other = Other::new(4);
    let space = space(vec![tier(other.clone()), tier(Last(Dram::new(1)))]);
    let pages = store(&space, 0..4 * PAGES);
    let damaged = |state: &mut State| {
        state.damaged.insert((Slot(1), 7));
    };
    other.set(damaged);
    assert!(!is_whole(&space, &pages[PAGES as usize + 7]));
    assert!(
        !space.holds(pages[PAGES as usize].1.place),
        "no page is to rely on it"
    );
    for now in 1..4 {
        space.tick(now);
    }
    assert!(
        space.holds(pages[PAGES as usize].1.place),
        "it lies in a sound place"
    );
    let lost: Vec<u64> = pages
        .iter()
        .filter(|page| !is_whole(&space, page))
        .map(|(seed, _)| *seed)
        .collect();
    assert_eq!(lost, [PAGES + 7], "all the others were moved");
    for (_, stored) in &pages {
        space.release(stored.place);
    }
    let more = store(&space, 50_000..50_000 + 5 * PAGES);
    assert!(
        more.iter().all(|page| is_whole(&space, page)),
        "all the room is there again"
    );
}

#[test]
fn file_has_the_room_of_slabs_that_failed() {
    let dir = tempfile::tempdir().unwrap();
    let faulty = Faulty::new(FileSlabs::open(dir.path(), 2).unwrap());
    let space = space(vec![tier(faulty.clone())]);
    for _ in 0..5 {
        faulty.set(Fault::WriteError);
        let failed = space.store(&[page(1)]);
        assert!(matches!(failed[0], Err(SpaceError::Io { .. })), "{failed:?}");
        faulty.set(Fault::None);
        let stored = store(&space, 2..3);
        assert!(is_whole(&space, &stored[0]));
        space.release(stored[0].1.place);
    }
    let all = store(&space, 10..10 + 2 * PAGES);
    assert!(
        all.iter().all(|page| is_whole(&space, page)),
        "both slabs are there"
    );
    assert!(
        matches!(space.store(&[page(9_999)])[0], Err(SpaceError::Full)),
        "and no more"
    );
}

#[test]
fn slab_that_is_asked_back_takes_no_new_pages() {
    let other = Other::new(10);
    let space = space(vec![tier(other.clone()), tier(Last(Dram::new(1)))]);
    let first = store(&space, 0..10);
    assert!(space.holds(first[0].1.place));
    other.set(|state| {
        state.wanted.insert(Slot(0));
    });
    // At once, before any look.
    let second = store(&space, 10..20);
    assert!(
        second
            .iter()
            .all(|(_, stored)| stored.place.slab != first[0].1.place.slab)
    );
    assert!(
        !space.holds(first[0].1.place),
        "a page in memory does not rely on it"
    );
    // A place that becomes free in it is not filled either.
    space.release(first[3].1.place);
    let third = store(&space, 20..30);
    assert!(
        third
            .iter()
            .all(|(_, stored)| stored.place.slab != first[0].1.place.slab)
    );
    for (_, stored) in first
        .iter()
        .enumerate()
        .filter(|(at, _)| *at != 3)
        .map(|(_, page)| page)
    {
        space.release(stored.place);
    }
    assert!(other.state.lock().wanted.is_empty(), "the last page gave it back");
}

#[test]
fn reads_of_a_device_that_is_away_wait_once_and_keep_nobody_else() {
    let other = Other::new(1);
    let space = space(vec![tier(other.clone()), tier(Last(Dram::new(10)))]);
    let away = store(&space, 0..PAGES);
    let near = store(&space, PAGES..2 * PAGES);
    assert_eq!(slabs_on(&space, "other"), 1);
    let begun = Instant::now();
    other.set(|state| state.away_since = Some(begun));
    std::thread::scope(|scope| {
        let reads: Vec<_> = (0..4)
            .map(|part| {
                let (space, away) = (&space, &away);
                scope.spawn(move || {
                    (part..40)
                        .step_by(4)
                        .filter(|at| is_whole(space, &away[*at]))
                        .count()
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(50));
        // All calls of others go on meanwhile.
        assert!(near.iter().take(20).all(|page| is_whole(&space, page)));
        let more = store(&space, 70_000..70_100);
        assert!(
            more.iter().all(|page| is_whole(&space, page)),
            "they go to the next tier"
        );
        space.tick(1);
        space.release(more[0].1.place);
        assert!(begun.elapsed() < other.patience, "{:?}", begun.elapsed());
        let whole: usize = reads.into_iter().map(|read| read.join().unwrap()).sum();
        assert_eq!(whole, 0);
    });
    let took = begun.elapsed();
    assert!(
        took >= other.patience && took < other.patience * 2,
        "ten reads of each thread wait until the same moment: {took:?}"
    );
    other.set(|state| state.away_since = None);
    assert!(away.iter().all(|page| is_whole(&space, page)), "it did not fail");
    assert!(space.holds(away[0].1.place));
    // An absence that ends in time is not noticed.
    other.set(|state| state.away_since = Some(Instant::now()));
    std::thread::scope(|scope| {
        let read = scope.spawn(|| is_whole(&space, &away[5]));
        std::thread::sleep(Duration::from_millis(30));
        other.set(|state| state.away_since = None);
        assert!(read.join().unwrap());
    });
}

#[test]
fn nobody_waits_for_a_slab_that_is_being_allocated() {
    let other = Other::new(20);
    let space = space(vec![tier(other.clone()), tier(Last(Dram::new(10)))]);
    let there = store(&space, 0..PAGES);
    other.set(|state| state.is_slow = true);
    std::thread::scope(|scope| {
        let stores = scope.spawn(|| store(&space, 1_000..1_000 + PAGES));
        while other.state.lock().waiting == 0 {
            std::thread::yield_now();
        }
        // With the lock held these would wait for ever.
        let (done, is_done) = std::sync::mpsc::channel();
        let (space, there) = (&space, &there);
        scope.spawn(move || {
            assert!(there.iter().take(9).all(|page| is_whole(space, page)));
            space.release(there[9].1.place);
            done.send(()).unwrap();
        });
        let went_on = is_done.recv_timeout(Duration::from_secs(10)).is_ok();
        other.set(|state| state.is_slow = false);
        assert!(went_on, "reads wait for an allocation");
        assert!(stores.join().unwrap().iter().all(|page| is_whole(space, page)));
    });
}
