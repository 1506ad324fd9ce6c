//! All leases of a session: pins the leases of an operation, and asks the daemon for missing ones.

mod dead;
mod neighbours;
mod pins;
mod replies;
mod spare_inodes;

use crossbeam_channel::Sender;
use smallvec::{SmallVec, smallvec};
use std::sync::{Arc, Weak};
use std::time::Duration;
use varve_format::{FileKind, Ino, InodeAttr, InodeKey, LeaseNo};
use varve_ipc::{
    Clock, Grant, IpcError, LeaseMode, Link, Request, Response, SessionPage, SystemClock, Told, Want,
    light_barrier,
};

pub(crate) use self::pins::{AT_ONCE, Held, Pin, Pins, SlotPin};

use self::dead::Dead;
use self::replies::RecallCount;
use self::spare_inodes::Spare;
use super::Use;
use super::forward::Contended;
use super::node::{Node, Phase};
use super::prefetch::Ahead;
use super::recall::Event;
use super::told::{Appetite, Barriers};
use crate::errno::{Errno, OpError, OpResult};
use crate::hash::{KeyMap, KeySet};
use crate::kernel_cache::pages::{Drops, KernelCall};
use crate::kernel_cache::regions::Regions;
use crate::kernel_cache::threads::Threads;
use crate::seeded::{Bug, armed};
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Mutex, RwLock, yield_now};

/// Longest sleep of a wait before it checks again that the session still lives.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Most rounds of requests for leases that are taken away before they are used.
const ROUNDS_MAX: usize = 1000;

/// Starts the thread that asks for inode numbers ahead.
pub(crate) type StartAsker = Box<dyn FnOnce() -> std::io::Result<()> + Send>;

/// The leases of one session.
pub(crate) struct Leases {
    link: Arc<dyn Link>,
    page: Arc<dyn SessionPage>,
    nodes: RwLock<KeyMap<Arc<Node>>>,
    /// Recalls that came before the grants that they name.
    early: Mutex<KeyMap<LeaseNo>>,
    /// Numbers of new inodes that are being made: the session has their leases, but not yet their nodes.
    reserved: Mutex<KeySet>,
    spare: Mutex<Spare>,
    /// Inodes that the daemon frees when their last entry is digested. Locked under `nodes`, never the other
    /// way.
    dead: Mutex<Dead>,
    /// Number of those inodes that have a node here.
    buried: AtomicUsize,
    events: Sender<Event>,
    /// Directories that will soon need more inode numbers.
    asks: Sender<Weak<Node>>,
    /// Starts the thread that asks for them; none once it runs.
    asker: Mutex<Option<StartAsker>>,
    /// The worker was told to start it.
    needs_asker: AtomicBool,
    held: AtomicUsize,
    leases_max: usize,
    trimming: AtomicBool,
    lost: AtomicBool,
    /// Whether there are kernel caches above.
    kernel: bool,
    acquires: AtomicU64,
    recalls: RecallCount,
    ahead: Ahead,
    barriers: Barriers,
    contended: Contended,
    regions: Regions,
    threads: Arc<Threads>,
    clock: Arc<dyn Clock>,
}

fn note_pages(node: &Node, call: &KernelCall) {
    node.above.note(call);
    node.data_used.store(true, Ordering::Release);
}

impl Leases {
    pub(crate) fn new(
        link: Arc<dyn Link>,
        page: Arc<dyn SessionPage>,
        events: Sender<Event>,
        asks: Sender<Weak<Node>>,
        leases_max: u32,
        kernel: bool,
    ) -> Self {
        Self {
            link,
            page,
            nodes: RwLock::new(KeyMap::default()),
            early: Mutex::new(KeyMap::default()),
            reserved: Mutex::new(KeySet::default()),
            spare: Mutex::new(Spare::default()),
            dead: Mutex::new(Dead::default()),
            buried: AtomicUsize::new(0),
            events,
            asks,
            asker: Mutex::new(None),
            needs_asker: AtomicBool::new(false),
            held: AtomicUsize::new(0),
            leases_max: (leases_max as usize).max(64),
            trimming: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            kernel,
            acquires: AtomicU64::new(0),
            recalls: RecallCount::default(),
            ahead: Ahead::new(),
            barriers: Barriers::default(),
            contended: Contended::default(),
            regions: Regions::default(),
            threads: Arc::new(Threads::new(kernel, Arc::new(SystemClock))),
            clock: Arc::new(SystemClock),
        }
    }

    /// With another clock than the system's.
    pub(crate) fn with_clock(self, clock: Arc<dyn Clock>) -> Self {
        Self {
            contended: Contended::new(Arc::clone(&clock)),
            threads: Arc::new(Threads::new(self.kernel, Arc::clone(&clock))),
            clock,
            ..self
        }
    }

    /// With a record of requests for contents that others keep too.
    pub(crate) fn with_appetite(mut self, appetite: Arc<Appetite>) -> Self {
        self.ahead.appetite = appetite;
        self
    }

    /// Notes that the daemon takes back what it told of extents: before those of any inode are forgotten.
    pub(crate) fn note_barrier(&self) {
        self.barriers.note();
    }

    /// Time, and how to wait.
    pub(crate) const fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Ends the session: wakes all waiting threads.
    pub(crate) fn lose(&self) {
        self.lost.store(true, Ordering::SeqCst);
        for node in self.all() {
            node.open_gate();
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Notes that these inodes were listed: a walk may want them next.
    pub(crate) fn listed(&self, items: impl Iterator<Item = (InodeKey, FileKind)>) {
        self.ahead.listed(items);
    }

    /// Notes that a program lists a directory.
    pub(crate) fn note_asked_names(&self) {
        self.ahead.appetite.asked_names();
    }

    /// Lease requests sent.
    pub(crate) fn acquires(&self) -> u64 {
        self.acquires.load(Ordering::Relaxed)
    }

    pub(crate) fn all(&self) -> Vec<Arc<Node>> {
        self.nodes.read().values().cloned().collect()
    }

    /// Returns the node of an inode, if it is known.
    pub(crate) fn get(&self, key: InodeKey) -> Option<Arc<Node>> {
        self.nodes.read().get(&key).cloned()
    }

    /// Shows the known nodes, under a lock: `see` must not take any other.
    #[inline]
    pub(crate) fn see<T>(&self, see: impl FnOnce(&KeyMap<Arc<Node>>) -> T) -> T {
        see(&self.nodes.read())
    }

    /// Returns a node whose lease is held, by inode number alone: a number that is in use has one generation.
    pub(crate) fn by_ino(&self, ino: Ino) -> Option<Arc<Node>> {
        self.nodes
            .read()
            .values()
            .find(|node| node.key().ino == ino && node.mode().is_some())
            .cloned()
    }

    /// ESTALE for an inode that is dead and [taken down](Self::take_down): the daemon, which does not know
    /// that yet, would report it as alive.
    #[inline]
    fn get_or_make(&self, key: InodeKey) -> Result<Arc<Node>, Errno> {
        match self.get(key) {
            Some(node) => Ok(node),
            None => self.make(key),
        }
    }

    #[cold]
    fn make(&self, key: InodeKey) -> Result<Arc<Node>, Errno> {
        let mut nodes = self.nodes.write();
        if let Some(node) = nodes.get(&key) {
            return Ok(Arc::clone(node));
        }
        if self.dead.lock().has_node.contains_key(&key) {
            return Err(Errno(libc::ESTALE));
        }
        let node = Arc::new(Node::new(empty(key)));
        nodes.insert(key, Arc::clone(&node));
        Ok(node)
    }

    fn unpin(&self, node: &Arc<Node>) {
        if node.unpin() {
            let _ = self.events.send(Event::Look(node.key()));
        }
    }

    /// Sends an event to the worker.
    pub(crate) fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }

    /// Pins one inode whose node is at hand, without the daemon.
    #[inline]
    pub(crate) fn try_pin_node(&self, node: &Arc<Node>, mode: LeaseMode, usage: Use<'_>) -> Option<Pin<'_>> {
        if !node.try_pin(mode) {
            return None;
        }
        self.note_use(node, usage);
        Some(Pin {
            leases: self,
            node: Arc::clone(node),
        })
    }

    /// As [`try_pin_node`](Self::try_pin_node), in the thread's slot.
    #[inline]
    pub(crate) fn try_pin_slot<'s>(
        &'s self,
        node: &'s Arc<Node>,
        mode: LeaseMode,
        usage: Use<'_>,
    ) -> Option<SlotPin<'s>> {
        match node.try_pin_slot(mode) {
            Ok(lane) => {
                self.note_use(node, usage);
                Some(SlotPin {
                    leases: self,
                    node,
                    lane,
                    _here: std::marker::PhantomData,
                })
            }
            Err(seen) => {
                if seen {
                    self.tell(Event::Look(node.key()));
                }
                None
            }
        }
    }

    /// Whether an inode may be read without a pin. Ask before and after: a value read in between counts if
    /// both answers are yes and the session is still live.
    #[inline]
    pub(crate) fn may_look(&self, node: &Node, usage: Use<'_>) -> bool {
        // Noted before the check: a worker that bars the lease either sees the note, or is seen by the check.
        if let Use::Kernel(call) = usage {
            note_pages(node, call);
            light_barrier();
        }
        let may = node.suffices(LeaseMode::Read);
        if may {
            node.note_recent();
            self.note_use(node, Use::Own);
        }
        may
    }

    /// Pins one inode.
    pub(crate) fn pin_one<T>(&self, key: InodeKey, mode: LeaseMode, usage: Use<'_>) -> OpResult<Pin<'_>, T> {
        let mut pins = self.pin(&[Want { key, mode }], usage)?;
        let node = pins.nodes.pop().ok_or(Errno(libc::EIO))?;
        Ok(Pin { leases: self, node })
    }

    #[inline]
    fn note_use(&self, node: &Node, usage: Use<'_>) {
        if node.ahead.load(Ordering::Relaxed) != 0 {
            self.ahead.used(node);
        }
        match usage {
            Use::Own => {}
            Use::Kernel(call) => note_pages(node, call),
            // Noted under the pin: the worker that gives the lease back looks when the last pin is gone.
            Use::Copy => node.copied.store(true, Ordering::Release),
        }
    }

    /// Notes that a call of the kernel begins to wait with locked pages, which a recall must not wait for.
    pub(crate) fn hold<'n>(&self, node: &'n Arc<Node>, call: &KernelCall) -> Held<'n> {
        let number = node.above.hold(call);
        // A drop that begins after this sees the call; if one has begun, the phase shows that, and the worker
        // looks again.
        if node.state().phase != Phase::Settled {
            self.tell(Event::Look(node.key()));
        }
        Held { node, number }
    }

    /// Prepares for the daemon to carry out a write of the kernel: gives this session's lease back, and drops
    /// the data that the kernel has copied into its pages, which would stay there without a lease. The call
    /// counts as waiting, with its last page locked, until the returned value is dropped.
    pub(crate) fn before_forwarded<'n, T>(
        &self,
        node: &'n Arc<Node>,
        call: &KernelCall,
        drop_pages: impl FnOnce(Drops),
    ) -> OpResult<Held<'n>, T> {
        let held = self.hold(node, call);
        self.give_back(&[node.key()])?;
        if !armed(Bug::KernelPagesForwarded) {
            drop_pages(node.above.take_own(call));
        }
        Ok(held)
    }

    /// Returns the node of an inode; makes it if it is not known.
    ///
    /// # Errors
    /// `ESTALE` for a dead inode.
    pub(crate) fn node_of(&self, key: InodeKey) -> Result<Arc<Node>, Errno> {
        self.get_or_make(key)
    }

    /// Pins all of `wants` at once; asks the daemon for missing leases, holding nothing meanwhile.
    pub(crate) fn pin<T>(&self, wants: &[Want], usage: Use<'_>) -> OpResult<Pins<'_>, T> {
        let mut wants = SmallVec::<[Want; AT_ONCE]>::from_slice(wants);
        wants.sort_by_key(|want| (want.key, std::cmp::Reverse(want.mode)));
        wants.dedup_by_key(|want| want.key);
        let mut nodes = SmallVec::<[_; AT_ONCE]>::new();
        for want in &wants {
            nodes.push(self.get_or_make(want.key)?);
        }
        let first = nodes.first().cloned();
        let mut held = None;
        for _ in 0..ROUNDS_MAX {
            if self.is_lost() {
                return Err(OpError::lost());
            }
            let taken = nodes
                .iter()
                .zip(&wants)
                .take_while(|(node, want)| node.try_pin(want.mode))
                .count();
            if taken == nodes.len() {
                for node in &nodes {
                    self.note_use(node, usage);
                }
                return Ok(Pins { leases: self, nodes });
            }
            for node in &nodes[..taken] {
                self.unpin(node);
            }
            if let (None, Use::Kernel(call), Some(node)) = (&held, usage, &first) {
                held = Some(self.hold(node, call));
            }
            let phase = nodes[taken].state().phase;
            if matches!(phase, Phase::Draining | Phase::Releasing) {
                nodes[taken].wait_at_gate(&*self.clock, LOOK_AGAIN);
                continue;
            }
            if self.acquire(&nodes, &wants)? {
                for node in &nodes {
                    self.note_use(node, usage);
                }
                return Ok(Pins { leases: self, nodes });
            }
        }
        let keys = nodes
            .iter()
            .map(|node| node.key().to_string())
            .collect::<Vec<_>>();
        tracing::error!("leases of {keys:?} were lost again and again before they could be used");
        Err(OpError::Failed(Errno(libc::EIO)))
    }

    /// Whether the inode was made in this session and is not digested: the daemon does not know it, so no
    /// other session can want it.
    fn is_unborn(&self, node: &Node) -> bool {
        node.born.load(Ordering::Relaxed) > self.page.digested().0 && node.mode().is_some()
    }

    /// Asks for the leases on all inodes that the daemon knows; `true`: granted and pinned.
    fn acquire<T>(&self, nodes: &[Arc<Node>], wants: &[Want]) -> OpResult<bool, T> {
        let (own, asked): (Vec<_>, Vec<_>) = nodes
            .iter()
            .zip(wants.iter().copied())
            .partition(|(node, _)| self.is_unborn(node));
        if asked.is_empty() {
            // There is nothing to ask for: the lease is being given back.
            if self.clock.takes_turns() {
                self.clock.pause(LOOK_AGAIN);
            } else {
                yield_now();
            }
            return Ok(false);
        }
        for (node, _) in &asked {
            node.waiters.fetch_add(1, Ordering::SeqCst);
        }
        let contended = |want: &Want| want.mode == LeaseMode::Write && self.contended.is(want.key);
        if asked.iter().any(|(_, want)| contended(want)) {
            for (node, _) in &asked {
                node.waiters.fetch_sub(1, Ordering::SeqCst);
                self.recall_early(node.key());
            }
            return Err(OpError::Forward);
        }
        self.acquires.fetch_add(1, Ordering::Relaxed);
        let wants = asked.iter().map(|(_, want)| *want).collect();
        let barriers = self.barriers.count();
        let wish = self.see(|nodes| self.ahead.wish(&asked, nodes));
        let (request, most) = match &wish {
            Some((near, _)) => (
                Request::AcquireNear {
                    wants,
                    near: near.clone(),
                },
                near.these.len() + usize::from(near.count),
            ),
            None => (Request::Acquire { wants }, 0),
        };
        let granted = self.call(request).map_err(OpError::from);
        let answer = granted.and_then(|answer| {
            let Response::Granted(mut grants) = answer else {
                return Err(OpError::Failed(Errno(libc::EIO)));
            };
            if grants.len() < asked.len() || grants.len() > asked.len() + most {
                return Err(OpError::Failed(Errno(libc::EIO)));
            }
            if let Some((near, _)) = &wish {
                self.ahead.answered(near, grants.len() - asked.len());
                for grant in grants.drain(asked.len()..) {
                    self.install_ahead(grant, near, barriers);
                }
            }
            let mut pinned = Vec::new();
            for ((node, want), grant) in asked.iter().zip(grants) {
                let enough = grant.mode >= want.mode && grant.attr.key == want.key;
                if enough && self.install(node, grant, true, barriers) {
                    pinned.push(*node);
                }
            }
            pinned.extend(
                own.iter()
                    .filter(|(node, want)| node.try_pin(want.mode))
                    .map(|(node, _)| *node),
            );
            if pinned.len() == nodes.len() {
                return Ok(true);
            }
            for node in pinned {
                self.unpin(node);
            }
            Ok(false)
        });
        for (node, _) in &asked {
            node.waiters.fetch_sub(1, Ordering::SeqCst);
            self.recall_early(node.key());
        }
        answer
    }

    /// Sends the worker a recall again that came before its grant.
    fn recall_early(&self, key: InodeKey) {
        let early = self.early.lock().remove(&key);
        if let Some(number) = early {
            self.tell(Event::Revoke {
                key,
                number,
                only_read: false,
            });
        }
    }

    /// Installs a grant, pinned or not, that was asked for after so many `barriers`.
    fn install(&self, node: &Node, grant: Grant, pin: bool, barriers: u64) -> bool {
        let had = node.mode().is_some();
        let Grant {
            lease,
            mode,
            replaces,
            attr,
            told,
        } = grant;
        let installed = self.barriers.during(barriers, |extents_count| {
            let extents = told.extents.filter(|_| extents_count);
            let told = Told { extents, ..told };
            node.install(lease, mode, replaces, Some((attr, told)), pin)
        });
        if installed && !had {
            self.held.fetch_add(1, Ordering::Relaxed);
            self.trim_if_too_many();
        }
        installed
    }

    /// Number of leases that stay until they are given back. Leases on dead inodes go by themselves; giving
    /// them back would only cost a digest.
    pub(super) fn living(&self) -> usize {
        let buried = self.buried.load(Ordering::Relaxed);
        self.held.load(Ordering::Relaxed).saturating_sub(buried)
    }

    fn trim_if_too_many(&self) {
        if self.living() > self.leases_max {
            self.ask_trim();
        }
    }

    fn ask_trim(&self) {
        if !self.trimming.swap(true, Ordering::AcqRel) {
            self.tell(Event::Trim);
        }
    }

    /// Ends the reservation of a number, which is in use, or will not be used.
    pub(crate) fn unreserve(&self, key: InodeKey) {
        self.reserved.lock().remove(&key);
        self.recall_early(key);
    }

    /// Adds a new inode under the lease that came with its number, pinned.
    pub(crate) fn adopt(&self, node: Arc<Node>, number: LeaseNo) -> Pins<'_> {
        {
            let mut state = node.state();
            state.number = number;
            state.mode = Some(LeaseMode::Write);
            node.publish(&state, false);
        }
        node.pin_granted();
        self.held.fetch_add(1, Ordering::Relaxed);
        self.nodes.write().insert(node.key(), Arc::clone(&node));
        self.unreserve(node.key());
        self.trim_if_too_many();
        Pins {
            leases: self,
            nodes: smallvec![node],
        }
    }

    /// Classifies a recall of `number`. A recall that comes before its grant was installed waits for the
    /// grant once; when the daemon repeats it, the grant is refused when it comes, since the request that
    /// brings it may itself wait for this lease.
    pub(crate) fn revoked(&self, key: InodeKey, number: LeaseNo) -> Revoked {
        if self.get(key).is_none() {
            // It may be a spare number for an inode that is not made yet: then it must not be used any more,
            // unless the inode is just being made.
            let keeper = {
                let mut spare = self.spare.lock();
                let keeper = spare.keepers.remove(&key);
                if keeper.is_none() && spare.asking > 0 {
                    spare.denied.insert(key);
                }
                keeper
            };
            if let Some(dir) = keeper.and_then(|dir| dir.upgrade()) {
                dir.numbers.lock().kept.retain(|(other, _)| *other != key);
            }
            let reserved = self.reserved.lock();
            if reserved.contains(&key) {
                self.early.lock().insert(key, number);
                return Revoked::Early;
            }
        }
        // Before the node is looked at: a prefetched grant that is installed meanwhile is seen there.
        self.ahead.note_gone(key, number);
        let mut replaced = None;
        if let Some(node) = self.get(key) {
            let mut state = node.state();
            if state.mode.is_some() && number == state.number {
                drop(state);
                return Revoked::Held(node);
            }
            let may_come = number > state.given_back && node.waiters.load(Ordering::SeqCst) > 0;
            if may_come && self.early.lock().insert(key, number) != Some(number) {
                return Revoked::Early;
            }
            if state.mode.is_none() || number > state.number {
                state.given_back = state.given_back.max(number);
            }
            // The newer grant took the place of the held one.
            let held = state.mode.map(|_| state.number).filter(|held| *held < number);
            drop(state);
            replaced = held.map(|held| (node, held));
        }
        self.early.lock().remove(&key);
        Revoked::Unknown { replaced }
    }

    /// Notes that a lease is gone: forgets the node unless it is in use.
    pub(crate) fn gone(&self, key: InodeKey) {
        self.held.fetch_sub(1, Ordering::Relaxed);
        let mut nodes = self.nodes.write();
        let Some(node) = nodes.get(&key) else { return };
        let (mode, given_back) = {
            let state = node.state();
            (state.mode, state.given_back)
        };
        // One reference is the map's, one the caller's.
        if Arc::strong_count(node) <= 2 && mode.is_none() && !armed(Bug::CacheKeptAfterRevocation) {
            self.ahead.note_gone(key, given_back);
            nodes.remove(&key);
        }
    }

    /// Returns idle leases to give back: least recently used first, as far as one bit tells; last come
    /// directories, whose cached names go with the lease, and inodes without a name, which go by themselves.
    /// Leases that are `under_way` already count as given back. Ends the trim.
    pub(crate) fn idle(&self, under_way: usize) -> Vec<Arc<Node>> {
        self.trimming.store(false, Ordering::Release);
        let held = self.living().saturating_sub(under_way);
        if held <= self.leases_max {
            return Vec::new();
        }
        let target = self.leases_max - self.leases_max / 8;
        let wanted = held.saturating_sub(target);
        let mut idle = Vec::new();
        let mut nodes = self.all();
        for round in 0..4 {
            nodes.retain(|node| {
                if idle.len() >= wanted {
                    return false;
                }
                let used = node.recent.swap(false, Ordering::Relaxed) && round % 2 == 0;
                let last = || {
                    let attr = &node.inode.read().attr;
                    attr.is_dir() || attr.nlink == 0
                };
                // A lease prefetched a moment ago is about to be used.
                let to_come = || round == 1 && node.ahead.load(Ordering::Relaxed) != 0;
                if used || to_come() || (round < 2 && last()) {
                    return true;
                }
                let state = node.state();
                let settled = state.phase == Phase::Settled && state.mode.is_some();
                drop(state);
                let take = settled && !node.seems_pinned();
                if take {
                    idle.push(Arc::clone(node));
                }
                !take
            });
        }
        idle
    }

    /// Gives back the leases on `keys` and waits until the daemon has them: before the daemon does an
    /// operation on these inodes itself.
    pub(crate) fn give_back<T>(&self, keys: &[InodeKey]) -> OpResult<(), T> {
        // With several keys, the worker hears of all of them first, and sends many in a message.
        for key in keys.iter().filter(|_| keys.len() > 1) {
            if let Some(number) = self.get(*key).and_then(|node| node.held_number()) {
                self.tell(Event::GiveBack { key: *key, number });
            }
        }
        for key in keys {
            let Some(node) = self.get(*key) else { continue };
            let Some(number) = node.held_number() else {
                continue;
            };
            node.waiters.fetch_add(1, Ordering::SeqCst);
            let mut done = false;
            while !done && !self.is_lost() {
                self.tell(Event::GiveBack { key: *key, number });
                done = node.wait_given_back(&*self.clock, number, LOOK_AGAIN);
            }
            node.waiters.fetch_sub(1, Ordering::SeqCst);
            if !done {
                return Err(OpError::lost());
            }
        }
        Ok(())
    }

    /// The inodes that the daemon has reported as contended.
    pub(crate) const fn contended(&self) -> &Contended {
        &self.contended
    }

    /// Sends a request on the session's link.
    pub(crate) fn call(&self, request: Request) -> Result<Response, IpcError> {
        self.link.call(request)
    }
}

/// Outcome of [`Leases::revoked`].
pub(crate) enum Revoked {
    /// A lease that is held.
    Held(Arc<Node>),
    /// A lease whose grant is under way: the worker is told of the recall again.
    Early,
    /// A lease whose grant never came here: report it as free. The lease that it replaced is not held any
    /// more, though this session still counts it as held.
    Unknown {
        /// The replaced lease, if it counts as held here.
        replaced: Option<(Arc<Node>, LeaseNo)>,
    },
}

/// Placeholder attributes of an unknown inode: replaced when the lease is granted, never shown.
pub(super) const fn empty(key: InodeKey) -> InodeAttr {
    InodeAttr {
        nlink: 0,
        ..InodeAttr::new(key, 0, 0)
    }
}
