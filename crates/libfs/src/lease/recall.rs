//! Recall: gives leases back. A state machine that never blocks on an inode: each event advances one lease.
//! Only the worker runs it.

use crossbeam_channel::Sender;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use varve_format::{InodeKey, LeaseNo, LogSeq};
use varve_ipc::{HELD_MAX, IpcError, RELEASED_MAX, ReleaseItem, Request};

use super::node::{Node, Phase};
use super::table::{Leases, Revoked};
use crate::kernel_cache::pages::{ALL, Drops, drop_all};
use crate::kernel_cache::threads::Threads;
use crate::options::{CacheObserver, Copies};
use crate::seeded::{Bug, armed};
use crate::sync::IdleThreads;

/// Pause before a release that was refused is sent again.
const RELEASE_AGAIN: Duration = Duration::from_millis(2);
/// Most spare numbers in one release request.
const SPARE_AT_ONCE: usize = RELEASED_MAX / 2;
/// Pause between two looks for a sign that threads have taken their replies in.
const SIGN: Duration = Duration::from_millis(10);
/// Most passes over a file's pages in the kernel while calls for which the lease suffices go on; if the
/// kernel still fills pages afterwards, all calls wait.
const OPEN_PASSES: u32 = 8;

/// Events that the worker acts on.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Event {
    /// The daemon recalls a lease.
    Revoke {
        /// Inode.
        key: InodeKey,
        /// Number of the grant.
        number: LeaseNo,
        /// Who waits for it wants to read.
        only_read: bool,
    },
    /// A request of this session wants a lease given back.
    GiveBack {
        /// Inode.
        key: InodeKey,
        /// Number of the grant; a newer one stays.
        number: LeaseNo,
    },
    /// The state of this inode changed: a last pin ended, or a request waits for more.
    Look(InodeKey),
    /// The kernel has dropped the inode's pages, in the pass of this number.
    Dropped(InodeKey, u64),
    /// The last open of this inode is gone.
    Closed(InodeKey),
    /// The session holds too many leases.
    Trim,
    /// Inode numbers are to be asked for ahead.
    StartAsker,
    /// The session ends.
    Stop,
}

/// Who waits for a lease that is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum For {
    /// Another session, which is to change the inode.
    Change,
    /// Another session, which only reads.
    Read,
    /// A request of this session, or nobody.
    Own,
}

struct Recall {
    node: Arc<Node>,
    number: LeaseNo,
    /// The lease is kept, and serves this session, until cached replies have expired: others are to change the
    /// inode. Otherwise the daemon is told when that is.
    kept: bool,
    /// Others want it.
    for_others: bool,
    /// Others are to change the inode, and its directory counts as contended.
    contended: bool,
    /// A newer grant, which the daemon gave in place of this one and recalled before it came here. Both go
    /// together: data read under this one must be dropped first.
    successor: Option<LeaseNo>,
    /// The kernel's pass over its pages that has not ended.
    pass: Option<Pass>,
    /// Number of passes begun, restarted ones counted once.
    passes: u32,
    /// The kernel takes too long: its pages are dropped once more when the lease is gone.
    late: bool,
    /// Pages under writeback were skipped and stay until the lease is gone.
    late_pages: bool,
    /// When to look again: the cached replies that depend on the lease have expired.
    expires: Option<Duration>,
    started: Duration,
    started_ms: u64,
}

/// One pass over a file's pages in the kernel.
struct Pass {
    number: u64,
    /// Number of calls that had begun to wait with locked pages when the pass began. The pass may wait for
    /// later ones, so it is begun anew then.
    held: u64,
}

/// The parts of the session that a recall needs.
pub(crate) trait Surroundings {
    /// Highest sequence number that may have been logged for the inode, which is at rest.
    fn last_seq(&self, node: &Node) -> LogSeq;
    /// Highest sequence number in the log.
    fn log_last(&self) -> LogSeq;
    /// Whether this mount has the inode open.
    fn is_open(&self, key: InodeKey) -> bool;
    /// The caches above.
    fn observer(&self) -> Option<Arc<dyn CacheObserver>>;
    /// Keeper of copies in the process.
    fn copies(&self) -> Option<Arc<dyn Copies>> {
        None
    }
}

/// Leases that are being given back.
pub(crate) struct Recalls {
    leases: Arc<Leases>,
    events: Sender<Event>,
    under_way: HashMap<InodeKey, Recall>,
    /// Those of them that wait for cached replies to expire.
    expiring: BTreeSet<(Duration, InodeKey)>,
    ready: Vec<InodeKey>,
    /// Leases whose grants never came here.
    unknown: Vec<ReleaseItem>,
    /// Numbers that directories kept, after the directories' leases are gone: no request waits for them, and
    /// there may be thousands.
    spare: Vec<ReleaseItem>,
    /// Inodes that are no longer open, and not leased.
    dropped: Vec<InodeKey>,
    /// Threads on which the kernel drops pages.
    threads: IdleThreads,
    /// Longest wait for the kernel to drop its pages.
    patience: Duration,
    /// Passes over the kernel's pages so far.
    passes: u64,
    revoked: u64,
    /// Time, from recalls by others on, until cached replies have expired.
    expiring_ms: u64,
}

impl Recalls {
    pub(crate) fn new(leases: Arc<Leases>, events: Sender<Event>, lease_ms: u64) -> Self {
        Self {
            leases,
            events,
            under_way: HashMap::new(),
            expiring: BTreeSet::new(),
            ready: Vec::new(),
            unknown: Vec::new(),
            spare: Vec::new(),
            dropped: Vec::new(),
            threads: IdleThreads::new("varve-drop"),
            patience: Duration::from_millis(lease_ms / 2),
            passes: 0,
            revoked: 0,
            expiring_ms: 0,
        }
    }

    /// Processes an event. Nothing is sent until [`flush`](Self::flush).
    pub(crate) fn take(&mut self, event: Event, around: &dyn Surroundings) {
        match event {
            Event::Revoke {
                key,
                number,
                only_read,
            } => match self.leases.revoked(key, number) {
                Revoked::Held(node) => {
                    let why = if only_read { For::Read } else { For::Change };
                    self.begin(node, number, why, around);
                }
                Revoked::Early => {}
                Revoked::Unknown { replaced: None } => self.give_back_unknown(key, number, around),
                Revoked::Unknown {
                    replaced: Some((node, held)),
                } => {
                    if armed(Bug::SuccessorAhead) {
                        self.give_back_unknown(key, number, around);
                    }
                    self.begin(node, held, For::Change, around);
                    if let Some(recall) = self.under_way.get_mut(&key) {
                        recall.successor = recall.successor.max(Some(number));
                    } else {
                        self.give_back_unknown(key, number, around);
                    }
                }
            },
            Event::GiveBack { key, number } => {
                if let Some(node) = self.leases.get(key) {
                    if node.held_number() == Some(number) {
                        self.begin(node, number, For::Own, around);
                    } else if node.state().phase != Phase::Releasing {
                        node.open_gate();
                    }
                    // Otherwise the gate opens when the daemon has the lease that is being released. A thread
                    // woken before that would see no change and ask again, for ever if that kept the worker
                    // from sending the release.
                }
            }
            Event::Look(key) => self.look(key, around),
            Event::Dropped(key, number) => {
                if let Some(recall) = self.under_way.get_mut(&key)
                    && recall.pass.as_ref().is_some_and(|pass| pass.number == number)
                {
                    recall.pass = None;
                    recall.node.above.end_drop();
                    close(&recall.node);
                }
                self.look(key, around);
            }
            Event::Trim => {
                for node in self.leases.idle(self.under_way.len()) {
                    let number = node.state().number;
                    self.begin(node, number, For::Own, around);
                }
            }
            Event::StartAsker => self.leases.start_asker(),
            Event::Closed(key) => self.closed(key, around),
            Event::Stop => {}
        }
    }

    /// Reports as free a lease whose grant never came here. If the daemon holds it against this session after
    /// all, every entry that may have been logged under it counts.
    fn give_back_unknown(&mut self, key: InodeKey, number: LeaseNo, around: &dyn Surroundings) {
        self.unknown.push(ReleaseItem {
            key,
            lease: number,
            downgrade: false,
            last_seq: around.log_last(),
            open: around.is_open(key),
            changes: 0,
            cached_ms: 0,
        });
    }

    /// Only the worker releases and drops, so a release that says "open" is never overtaken by the close.
    fn closed(&mut self, key: InodeKey, around: &dyn Surroundings) {
        if around.is_open(key) {
            return;
        }
        match self.leases.get(key).map(|node| (node.held_number(), node)) {
            // Without a name and without an open, the inode is to be freed: give the lease back without
            // waiting for a recall.
            Some((Some(number), node)) => {
                if node.inode.attr().nlink == 0 {
                    self.begin(node, number, For::Own, around);
                }
            }
            _ => self.dropped.push(key),
        }
    }

    /// As a trim.
    #[cfg(test)]
    pub(super) fn begin_unwanted(&mut self, node: Arc<Node>, number: LeaseNo, around: &dyn Surroundings) {
        self.begin(node, number, For::Own, around);
    }

    /// Begins to give a lease back, to other sessions or not, always as a whole. The daemon would let a
    /// reader keep a read lease, unless a writer waits by then; but its answer does not say which.
    fn begin(&mut self, node: Arc<Node>, number: LeaseNo, why: For, around: &dyn Surroundings) {
        let key = node.key();
        if let Some(known) = self.under_way.get_mut(&key) {
            let same = known.number == number;
            if same && why == For::Change && !known.contended {
                known.contended = true;
                self.leases.note_contention(&node, true);
            }
            // A request of this session does not wait for what its own kernel has cached.
            known.kept &= !same || why != For::Own;
            known.for_others |= why != For::Own;
            self.look(key, around);
            if same {
                return;
            }
        }
        self.revoked += 1;
        {
            // Before the recall is counted: a reply to an operation that begins later gets no timeout.
            let mut state = node.state();
            if state.phase == Phase::Settled {
                state.phase = Phase::Expiring;
            }
        }
        self.leases.count_recall(key);
        look_at_threads(&self.leases, &node, around);
        if why != For::Own {
            // Who reads first and then changes the inode waits for what is cached meanwhile.
            self.leases.note_contention(&node, why == For::Change);
        }
        self.under_way.insert(
            key,
            Recall {
                node,
                number,
                kept: why == For::Change,
                for_others: why != For::Own,
                contended: why == For::Change,
                successor: None,
                pass: None,
                passes: 0,
                late: false,
                late_pages: false,
                expires: None,
                started: self.leases.clock().moment(),
                started_ms: self.leases.clock().monotonic_ms(),
            },
        );
        self.look(key, around);
    }

    /// Advances one lease as far as it goes.
    fn look(&mut self, key: InodeKey, around: &dyn Surroundings) {
        let Some(recall) = self.under_way.get_mut(&key) else {
            return;
        };
        let node = Arc::clone(&recall.node);
        let mut state = node.state();
        if state.number != recall.number || state.mode.is_none() {
            // A newer grant took its place: this one is not released, and a later release under its key is
            // for the newer one.
            state.phase = Phase::Settled;
            node.publish(&state, false);
            drop(state);
            node.open_gate();
            let successor = recall.successor;
            if let Some(expires) = recall.expires {
                self.expiring.remove(&(expires, key));
            }
            self.under_way.remove(&key);
            self.ready.retain(|other| *other != key);
            if let Some(number) = successor {
                self.give_back_unknown(key, number, around);
            }
            return;
        }
        if state.phase == Phase::Expiring {
            if let Some(expires) = recall.expires.take() {
                self.expiring.remove(&(expires, key));
            }
            // No reply begins in this phase.
            let remaining = match recall.kept {
                true => remaining(&self.leases, &node, around),
                false => node.replies.sending(),
            };
            if !remaining.is_zero() && !armed(Bug::RecallBeforeExpiry) {
                let expires = self.leases.clock().moment() + remaining;
                recall.expires = Some(expires);
                self.expiring.insert((expires, key));
                return;
            }
            if recall.for_others {
                let until_ms = node.replies.until_ms(self.leases.threads());
                self.expiring_ms += until_ms.saturating_sub(recall.started_ms);
            }
            state.phase = Phase::Draining;
            node.publish(&state, true);
        }
        if armed(Bug::KernelLetGo)
            && state.phase == Phase::Dropping
            && node.waiters.load(Ordering::SeqCst) > 0
        {
            state.phase = Phase::Draining;
            node.publish(&state, true);
            recall.pass = None;
            recall.late = true;
        }
        let open = state.phase == Phase::Dropping;
        if !open && (state.phase != Phase::Draining || node.pins() > 0) {
            return;
        }
        let due = match &recall.pass {
            // A pass that began before a call locked its pages may wait for that call, and the call for the
            // lease.
            Some(pass) if pass.held == node.above.held() => return,
            Some(_) => true,
            // Looked at after the pins: reads under any of them, and reads without a pin, are seen here.
            None => {
                let used = node.data_used.swap(false, Ordering::AcqRel);
                let seen = recall.passes == 0 || !armed(Bug::KernelReadMissed);
                (used && seen) || (recall.passes == 0 && node.above.any())
            }
        };
        if due
            && !recall.late
            && let Some(observer) = around.observer()
        {
            let again = recall.pass.is_some();
            self.passes += 1;
            let (drops, held, stays) = node.above.begin_drop(self.leases.clock().moment());
            recall.late_pages |= stays;
            recall.passes += u32::from(!again);
            recall.pass = Some(Pass {
                number: self.passes,
                held,
            });
            if !again && recall.passes <= OPEN_PASSES {
                state.phase = Phase::Dropping;
                node.publish(&state, false);
            }
            drop(state);
            self.drop_pages(observer, &node, drops, self.passes);
            node.open_gate();
            return;
        }
        // No pin is left, and none comes: every copy made under one has been noted.
        if node.copied.swap(false, Ordering::AcqRel)
            && let Some(copies) = around.copies()
        {
            copies.drop_copies(key);
        }
        state.phase = Phase::Releasing;
        // Under the lock under which the pins were checked: an answer that brings this grant once more comes
        // too late.
        if !armed(Bug::GivenBackLate) {
            state.given_back = state.given_back.max(state.number);
        }
        self.ready.push(key);
    }

    /// Has the kernel drop pages on a thread of its own, since the kernel may wait for requests that hold
    /// page locks.
    fn drop_pages(&self, observer: Arc<dyn CacheObserver>, node: &Arc<Node>, drops: Drops, pass: u64) {
        let (events, node) = (self.events.clone(), Arc::clone(node));
        let clock = Arc::clone(self.leases.clock());
        let work = move || {
            let key = node.key();
            drop_all(&*observer, key, &drops);
            // Perhaps long after it began.
            node.above.note_dropped(clock.moment());
            let _ = events.send(Event::Dropped(key, pass));
        };
        // Without a thread the pass never ends by itself: `tick` ends it, and the pages are dropped late.
        if let Err(error) = self.threads.run(&**self.leases.clock(), Box::new(work)) {
            tracing::warn!(%error, "no thread to drop the kernel's pages");
        }
    }

    /// Ends slow passes: a lease whose pages the kernel does not drop in time is given back without waiting
    /// for the kernel.
    ///
    /// Also looks at leases whose cached replies have expired.
    pub(crate) fn tick(&mut self, around: &dyn Surroundings) {
        let patience = self.patience;
        let now = self.leases.clock().moment();
        while let Some((expires, key)) = self.expiring.first().copied()
            && expires <= now
        {
            self.expiring.pop_first();
            self.look(key, around);
        }
        let slow = self
            .under_way
            .iter_mut()
            .filter(|(_, recall)| recall.pass.is_some() && now - recall.started >= patience);
        let slow: Vec<_> = slow
            .map(|(key, recall)| {
                recall.pass = None;
                recall.late = true;
                close(&recall.node);
                *key
            })
            .collect();
        for key in slow {
            tracing::debug!(%key, "the kernel has not dropped its pages in time");
            self.look(key, around);
        }
    }

    /// Whether a pass of the kernel is waited for.
    pub(crate) fn has_passes(&self) -> bool {
        self.under_way.values().any(|recall| recall.pass.is_some())
    }

    /// Returns the time until cached replies of a lease have expired.
    pub(crate) fn next_expiry(&self) -> Option<Duration> {
        let (expires, _) = self.expiring.first()?;
        Some(expires.saturating_sub(self.leases.clock().moment()))
    }

    /// Whether there are releases that other parties wait for.
    fn has_ready(&self) -> bool {
        !self.ready.is_empty() || !self.unknown.is_empty()
    }

    /// Whether [`flush`](Self::flush) has left spare numbers, to be sent when no event waits.
    pub(crate) const fn has_left(&self) -> bool {
        !self.spare.is_empty()
    }

    /// Sends the ready releases, and some of the spare numbers.
    ///
    /// # Errors
    /// The link's: the session is lost then.
    pub(crate) fn flush(&mut self, around: &dyn Surroundings) -> Result<(), IpcError> {
        for keys in std::mem::take(&mut self.dropped).chunks(HELD_MAX) {
            match self.leases.call(Request::Drop { keys: keys.to_vec() }) {
                Ok(_) | Err(IpcError::Errno(_)) => {}
                Err(error) => return Err(error),
            }
        }
        while self.has_ready() {
            // Two lease numbers for each inode, at most.
            let count = self.ready.len().min(RELEASED_MAX / 4);
            let batch: Vec<_> = self.ready.drain(..count).collect();
            let spare = self.unknown.len().min(RELEASED_MAX / 2);
            let mut items: Vec<_> = self.unknown.drain(..spare).collect();
            let mut done = Vec::new();
            for key in batch {
                let Some(recall) = self.under_way.remove(&key) else {
                    continue;
                };
                let item = release_item(&recall, around, self.leases.threads());
                if let Some(lease) = recall.successor {
                    let last_seq = around.log_last();
                    items.push(ReleaseItem {
                        lease,
                        last_seq,
                        ..item
                    });
                }
                items.push(item);
                if armed(Bug::GivenBackLate) {
                    let mut state = recall.node.state();
                    state.given_back = state.given_back.max(recall.number);
                }
                done.push(recall);
            }
            self.release(items)?;
            for recall in done {
                self.finish(&recall, around);
            }
        }
        self.release_some_spare()
    }

    /// Gives some of the spare numbers back. All of them at once would delay threads that wait for a lease.
    fn release_some_spare(&mut self) -> Result<(), IpcError> {
        if self.spare.is_empty() {
            return Ok(());
        }
        let some = self.spare.len().saturating_sub(SPARE_AT_ONCE);
        let items = self.spare.split_off(some);
        self.release(items)
    }

    /// Sends a release until the daemon takes it: a digest may fail for a moment.
    fn release(&self, items: Vec<ReleaseItem>) -> Result<(), IpcError> {
        let clock = self.leases.clock();
        let started = clock.moment();
        loop {
            match self.leases.call(Request::Release { items: items.clone() }) {
                Ok(_) => return Ok(()),
                Err(IpcError::Errno(errno)) if clock.moment() - started < 2 * self.patience => {
                    tracing::debug!(errno, "a lease is not taken back yet");
                    clock.pause(RELEASE_AGAIN);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn finish(&mut self, recall: &Recall, around: &dyn Surroundings) {
        let node = &recall.node;
        let mut spare = Vec::new();
        let mut state = node.state();
        state.phase = Phase::Settled;
        let gone = state.number == recall.number;
        // An operation that began after the recall may have read what has changed when this session gets the
        // next lease, which may be here already.
        if !armed(Bug::ReplyAcrossRecall) {
            self.leases.count_recall(node.key());
        }
        if gone {
            state.mode = None;
            // Before a newer grant can be installed, which has names and numbers of its own. No request
            // creates files under this lease any more, and no other code would give its numbers back.
            spare = self.leases.take_spare(node);
            node.forget();
        }
        node.publish(&state, false);
        drop(state);
        let last_seq = around.log_last();
        let item = |(key, lease)| ReleaseItem {
            key,
            lease,
            downgrade: false,
            last_seq,
            open: false,
            changes: 0,
            cached_ms: 0,
        };
        self.spare.extend(spare.into_iter().map(item));
        if gone {
            self.leases.gone(node.key());
        }
        node.open_gate();
        // The kernel's pages of the file must not stay.
        if (recall.late || recall.late_pages)
            && let Some(observer) = around.observer()
        {
            self.drop_pages(observer, node, vec![ALL], 0);
        }
    }

    /// Describes the leases that are being given back, for the log.
    pub(crate) fn describe(&self) -> Vec<String> {
        let one = |(key, recall): (&InodeKey, &Recall)| {
            let phase = recall.node.state().phase;
            format!(
                "{} of {key}: {phase:?} for {:?}, {} pins, {} waiters, kernel {}",
                recall.number,
                self.leases.clock().moment() - recall.started,
                recall.node.pins(),
                recall.node.waiters.load(Ordering::SeqCst),
                if recall.pass.is_some() {
                    "drops its pages"
                } else {
                    "idle"
                },
            )
        };
        self.under_way.iter().take(16).map(one).collect()
    }

    /// Leases given back so far.
    pub(crate) const fn revoked(&self) -> u64 {
        self.revoked
    }

    /// Time, from recalls by others on, until cached replies have expired, of all so far.
    pub(crate) const fn expiring_ms(&self) -> u64 {
        self.expiring_ms
    }
}

fn release_item(recall: &Recall, around: &dyn Surroundings, threads: &Threads) -> ReleaseItem {
    let node = &recall.node;
    ReleaseItem {
        key: node.key(),
        lease: recall.number,
        downgrade: false,
        last_seq: around.last_seq(node),
        open: around.is_open(node.key()),
        changes: node.inode.changes(),
        cached_ms: match armed(Bug::CachedNotTold) {
            true => 0,
            false => node.replies.remaining(threads).as_millis() as u32,
        },
    }
}

/// Looks which threads have ended that were told of the inode.
fn look_at_threads(leases: &Leases, node: &Node, around: &dyn Surroundings) {
    if let Some(observer) = around.observer() {
        let has_ended = |thread| observer.has_ended(thread);
        leases.threads().look(&node.replies, has_ended);
    }
}

/// Returns how long to wait until cached replies have expired, or until another look.
fn remaining(leases: &Leases, node: &Node, around: &dyn Surroundings) -> Duration {
    look_at_threads(leases, node, around);
    let remaining = node.replies.remaining(leases.threads());
    // Asked last: a reply that was in flight may have been sent meanwhile.
    if node.replies.awaits_sign() {
        remaining.min(SIGN)
    } else {
        remaining
    }
}

/// Bars new pins; existing ones finish.
fn close(node: &Node) {
    let mut state = node.state();
    if matches!(state.phase, Phase::Settled | Phase::Dropping) {
        state.phase = Phase::Draining;
        node.publish(&state, true);
    }
}
