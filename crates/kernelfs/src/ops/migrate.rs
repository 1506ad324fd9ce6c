//! Carries out a policy's jobs: a few blocks a transaction, like a digest without a log. Decides nothing.
//!
//! A move is copy-on-write: blocks are copied, the map is changed by one journal record, and the old blocks
//! wait until every session that may read them has been told. A crash leaves either map. There is nothing to
//! resume: the policy reads the state of the pool.

use crate::digest::Applied;
use crate::kernel::{Change, Core, Faults, KernelFs, SpaceLimits};
use crate::ops::digest::TakeOver;
use crate::placement::jobs::Placer;
use crate::placement::{
    At, Catalog, Cause, Held, Job, Move, PinnedFiles, PlacementStatus, Seen, Wish, emptied,
};
use crate::session::table::Sessions;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use varve_format::inode::{Content, Inode, InodeSlot};
use varve_format::seeded::{Bug, armed};
use varve_format::{BLOCK_BYTES, FileBlock, Ino, InodeKey, PinTo, Tier, TxId};
use varve_ipc::Clock;
use varve_store::{
    DataTarget, DeviceStatus, DeviceUse, Fetched, JobRow, MappedPart, OP_ROOM, SharedPart, Store, StoreError,
    Wanted,
};

/// Most blocks of one transaction of moves, which commits nothing else: 1 MiB.
const TX_BLOCKS: u64 = 256;
/// The same of a job while others change the pool: 128 KiB, so that nobody waits for it for long…
const BESIDE_TX_BLOCKS: u64 = 32;
/// …with so many blocks in a step, after which the moves that make room have their turn…
const BESIDE_STEP_BLOCKS: u64 = 128;
/// …and after each transaction a rest of so many times what it took, …
const BESIDE_REST: u32 = 4;
/// …but of no more than this, in milliseconds.
const BESIDE_REST_MAX_MS: u64 = 100;
/// Most moves of one transaction.
const TX_MOVES: usize = 32;
/// Most slots of the inode table that one scan passes.
const SLOTS: usize = 4096;
/// Longest time for which a move waits while others use its devices.
const YIELD_MS: u64 = 20;
/// Most steps of blocks that may wait for sessions.
const UNRELEASED_STEPS: u64 = 16;

/// The store for a policy and for pins. Damage is left to fsck: an unreadable file is not moved.
struct StoreCatalog<'s> {
    store: &'s Store,
    /// Shared blocks that the policy does not see.
    held: Held,
}

impl Catalog for StoreCatalog<'_> {
    fn files(&self, from: Ino, most: usize) -> (Vec<InodeKey>, Option<Ino>) {
        let mut keys = Vec::new();
        let next = self.scan(from, &mut |inode| {
            if movable(inode) {
                keys.push(inode.attr.key);
            }
            keys.len() < most
        });
        (keys, next)
    }

    fn extents(&self, key: InodeKey, from: FileBlock, most: usize) -> Vec<MappedPart> {
        match self.store.get_key(key) {
            Ok(inode) if !movable(&inode) => Vec::new(),
            Ok(inode) => {
                let is_pinned = inode.pin.to != PinTo::Policy;
                let shares = (is_pinned || !self.held.is_nothing()) && self.shares_blocks(key.ino);
                let sees = |part: &MappedPart| match part.owners {
                    1 => !is_pinned,
                    _ => !self.held.holds_part(part),
                };
                match (is_pinned, shares) {
                    (true, false) => Vec::new(),
                    (false, false) => self.store.map_parts(key.ino, from, most).unwrap_or_default(),
                    (_, true) => self.some_extents(key.ino, from, most, &sees),
                }
            }
            Err(_) => Vec::new(),
        }
    }

    fn shared(&self, numbers: Range<u64>, most: usize) -> Vec<SharedPart> {
        let mut parts = self.store.shared_parts(numbers, most).unwrap_or_default();
        parts.retain(|part| part.owners == 1 || !self.held.holds_run(part));
        parts
    }
}

impl StoreCatalog<'_> {
    fn shares_blocks(&self, ino: Ino) -> bool {
        self.store.shares_blocks(ino).unwrap_or(false)
    }

    /// Those extents of a file that `sees` admits.
    fn some_extents(
        &self,
        ino: Ino,
        mut from: FileBlock,
        most: usize,
        sees: &dyn Fn(&MappedPart) -> bool,
    ) -> Vec<MappedPart> {
        let mut seen = Vec::new();
        while seen.len() < most {
            let parts = self.store.map_parts(ino, from, most).unwrap_or_default();
            let Some(last) = parts.last() else { break };
            from = last.extent.end();
            seen.extend(parts.into_iter().filter(|part| sees(part)));
        }
        seen.truncate(most);
        seen
    }

    /// Calls `each` with inodes in use with numbers from `from` on until it returns false. Returns where to
    /// continue; `None`: there are no more.
    fn scan(&self, from: Ino, each: &mut dyn FnMut(&Inode) -> bool) -> Option<Ino> {
        let (mut next, mut slots, mut more) = (None, 0, true);
        let walked = self.store.for_each_inode_from(from, &mut |ino, slot| {
            if slots == SLOTS || !more {
                next = Some(ino);
                return false;
            }
            slots += 1;
            if let InodeSlot::Used(inode) = slot {
                more = each(&inode);
            }
            true
        });
        if let Err(error) = walked {
            tracing::warn!("the inode table cannot be read for placement: {error}");
            self.store.note_damage(&error);
        }
        next
    }
}

impl PinnedFiles for StoreCatalog<'_> {
    fn pinned(&self, from: Ino, most: usize) -> (Vec<Wish>, Option<Ino>) {
        let mut found = Vec::new();
        let next = self.scan(from, &mut |inode| {
            // What has no name is about to go, and keeps nothing anywhere.
            let shared = inode.shared_pin.filter(|_| inode.attr.nlink > 0);
            if inode.pin.to != PinTo::Policy || shared.is_some() {
                found.push(Wish {
                    key: inode.attr.key,
                    pin: inode.pin,
                    shared,
                });
            }
            found.len() < most
        });
        (found, next)
    }

    fn extents(&self, key: InodeKey, from: FileBlock, most: usize) -> Vec<MappedPart> {
        match self.store.get_key(key) {
            Ok(inode) if movable(&inode) => self.store.map_parts(key.ino, from, most).unwrap_or_default(),
            _ => Vec::new(),
        }
    }

    fn shared(&self, numbers: Range<u64>, most: usize) -> Vec<SharedPart> {
        self.store.shared_parts(numbers, most).unwrap_or_default()
    }
}

/// All files and shared blocks, whatever pins hold: for jobs of operators.
struct Unheld<'c, 's>(&'c StoreCatalog<'s>);

impl Catalog for Unheld<'_, '_> {
    fn files(&self, from: Ino, most: usize) -> (Vec<InodeKey>, Option<Ino>) {
        self.0.files(from, most)
    }

    fn extents(&self, key: InodeKey, from: FileBlock, most: usize) -> Vec<MappedPart> {
        PinnedFiles::extents(self.0, key, from, most)
    }

    fn shared(&self, numbers: Range<u64>, most: usize) -> Vec<SharedPart> {
        PinnedFiles::shared(self.0, numbers, most)
    }
}

/// Whether the inode is a regular file without an unfinished truncation.
fn movable(inode: &Inode) -> bool {
    matches!(inode.content, Content::File(_)) && (inode.orphan.is_none() || inode.attr.nlink == 0)
}

/// A move, and whether it was done: false if its blocks were no longer there.
type Tried = (Move, bool);

/// Result of a transaction of moves.
enum Ended {
    /// This number of moves was handled.
    Done { moves: usize, blocks: u64 },
    /// There is no room at the target after all.
    NoRoom,
    /// The first move failed alone.
    Bad(StoreError),
    /// Nothing was moved because of a later move: the first is to be tried alone.
    Alone,
}

/// Context of moves between tiers.
pub(crate) struct Mover<'k> {
    store: &'k Store,
    sessions: &'k Sessions,
    placer: &'k Placer,
    space: &'k SpaceLimits,
    stopping: &'k AtomicBool,
    clock: &'k dyn Clock,
    /// `placement_step_blocks`.
    step_blocks: u64,
    faults: Faults<'k>,
    take_over: TakeOver<'k>,
}

impl<'k> Mover<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            store: &kernel.store,
            sessions: &kernel.sessions,
            placer: &kernel.placer,
            space: &kernel.space,
            stopping: &kernel.lifecycle.stopping,
            clock: &*kernel.env.clock,
            step_blocks: kernel.env.config.placement_step_blocks,
            faults: Core::of(kernel).faults(),
            take_over: TakeOver::of(kernel),
        }
    }

    /// See [`KernelFs::place`].
    pub(crate) fn place(&self) -> u64 {
        if self.stopping.load(Ordering::Acquire) || self.store.latched().is_some() {
            return 0;
        }
        let Some(_turn) = self.placer.turn.try_lock() else {
            return 0;
        };
        self.placer.meters.tick();
        let mut catalog = StoreCatalog {
            store: self.store,
            held: Held::All,
        };
        let space = self.store.space();
        let mut jobs = self.placer.pins.plan(&space, &catalog, self.step_blocks);
        let devices = self.emptied_devices();
        let seen = Seen {
            space: &space,
            devices: &devices,
        };
        jobs.extend(self.evacuate(&seen, &catalog, self.left(&jobs)));
        catalog.held = self.placer.pins.held();
        let left = self.left(&jobs);
        jobs.extend(self.placer.policy.plan(&space, &catalog, left));
        let mut total = 0;
        let mut shown = Vec::with_capacity(jobs.len());
        for mut job in jobs {
            if space.tiers[job.to as usize].avoided && !job.moves.is_empty() {
                job.moves.clear();
                job.waiting = Some(format!("waiting: {} is evacuated", job.to.name()));
            }
            let moved = self.carry_job(&mut job);
            total += moved;
            self.placer.evacuations.stepped(&job);
            shown.push(PlacementStatus {
                from: job.from.name().into(),
                to: job.to.name().into(),
                cause: job.cause,
                moved_blocks: self.placer.moved(&job),
                waiting: job.waiting,
            });
        }
        total += self.evacuate_metadata(&devices, left);
        self.take_devices_out();
        let (cooled, waiting) = self.cool_metadata();
        shown.extend(self.metadata_status(cooled, waiting));
        *self.placer.jobs.lock() = shown;
        total + cooled
    }

    /// Blocks that a step may still move beside these jobs.
    fn left(&self, jobs: &[Job]) -> u64 {
        let planned: u64 = jobs.iter().map(Job::blocks).sum();
        self.step_blocks.saturating_sub(planned)
    }

    /// Plans the moves of operators' jobs.
    fn evacuate(&self, seen: &Seen<'_>, catalog: &StoreCatalog<'_>, most: u64) -> Vec<Job> {
        let (evacuations, meters) = (&self.placer.evacuations, &self.placer.meters);
        let most = match self.are_others_active() {
            true => most.min(BESIDE_STEP_BLOCKS),
            false => most,
        };
        match self.job_rows(seen.devices) {
            Ok(rows) => evacuations.plan(&rows, seen, &Unheld(catalog), meters, most),
            Err(error) => {
                self.faults.note_error(&error);
                Vec::new()
            }
        }
    }

    /// Returns the jobs; each device that is emptied has one then.
    fn job_rows(&self, devices: &[DeviceStatus]) -> Result<Vec<JobRow>, StoreError> {
        let rows = self.store.jobs()?;
        let has = |device: &&DeviceStatus| rows.iter().any(|row| row.of == emptied(device));
        let mut emptying = devices
            .iter()
            .filter(|device| device.state == DeviceUse::Emptying);
        if emptying.all(|device| has(&device)) {
            return Ok(rows);
        }
        self.store.adopt_removals(self.clock.now_ns())?;
        self.store.jobs()
    }

    /// Moves metadata of what is emptied, at most about `most` blocks for each. Returns their number.
    fn evacuate_metadata(&self, devices: &[DeviceStatus], most: u64) -> u64 {
        let space = &self.store.space();
        let seen = Seen { space, devices };
        let evacuations = &self.placer.evacuations;
        let mut moved = 0;
        for mut due in evacuations.metadata_due(&seen, most) {
            let (tier, numbers) = (due.of.tier(), due.numbers.clone());
            match self
                .store
                .recall_metadata_of(tier, numbers, &mut due.at, due.blocks)
            {
                Ok(step) => {
                    moved += step.moved;
                    let now_ms = self.placer.meters.now_ns() / 1_000_000;
                    evacuations.metadata_moved(&due, &step, now_ms);
                }
                Err(error) => self.faults.note_error(&error),
            }
        }
        // Metadata that was freed is there until the journal's tail has passed.
        if evacuations.waits_for_tail(&seen)
            && self.store.pending_frees().blocks == 0
            && let Err(error) = self.store.checkpoint()
        {
            self.faults.note_error(&error);
        }
        moved
    }

    /// Returns the devices of the pool, if some are to be emptied.
    fn emptied_devices(&self) -> Vec<DeviceStatus> {
        if !self.store.empties_devices() {
            return Vec::new();
        }
        self.store.device_list().unwrap_or_else(|error| {
            self.faults.note_error(&error);
            Vec::new()
        })
    }

    /// Takes devices out on which nothing is any more, unless their jobs are paused.
    fn take_devices_out(&self) {
        let evacuations = &self.placer.evacuations;
        for device in self.emptied_devices() {
            let is_empty = device.state == DeviceUse::Emptying && device.used() + device.pending == 0;
            if !is_empty || !evacuations.goes_on(emptied(&device)) {
                continue;
            }
            match self.store.take_out(device.tier, device.numbers.0) {
                Ok(true) => {
                    self.tell_gone();
                    tracing::warn!(
                        device = device.name,
                        "nothing is on the device any more: it is not part of the pool and may be detached"
                    );
                    if let Some(told) = self.placer.device_gone.get() {
                        told(self.store);
                    }
                }
                Ok(false) | Err(StoreError::NotFound) => {}
                Err(error) => self.faults.note_error(&error),
            }
        }
    }

    /// Tells sessions which devices of the SSD are no part of the pool any more, so that they close them.
    fn tell_gone(&self) {
        let Some(ssd) = &self.store.devices().ssd else {
            return;
        };
        let gone = ssd.gone_parts();
        for entry in self.sessions.table.lock().entries.values() {
            entry.session.page.add_gone_devices(gone);
        }
    }

    /// Moves metadata to slower tiers before the NVM has too little room for more: returns the number of
    /// blocks, and why it stopped.
    fn cool_metadata(&self) -> (u64, Option<String>) {
        match self.store.demote_ahead() {
            Ok(0) if self.store.demotes_in_vain() => {
                (0, Some("waiting: no slower tier has room for metadata".into()))
            }
            Ok(blocks) => (blocks, None),
            Err(error) => {
                self.faults.note_error(&error);
                (0, Some(format!("waiting: {error}")))
            }
        }
    }

    /// Returns the status of the job, if it moved blocks or waits.
    fn metadata_status(&self, cooled: u64, waiting: Option<String>) -> Option<PlacementStatus> {
        (cooled > 0 || waiting.is_some()).then(|| PlacementStatus {
            from: Tier::Nvm.name().into(),
            to: "slower tiers".into(),
            cause: Cause::Metadata,
            moved_blocks: self.store.demotion_stats().away,
            waiting,
        })
    }

    fn carry_job(&self, job: &mut Job) -> u64 {
        let need = job.blocks();
        if need == 0 {
            return 0;
        }
        let unreleased = self.store.pending_frees().blocks;
        if unreleased > self.step_blocks * UNRELEASED_STEPS {
            job.waiting = Some(format!(
                "waiting: sessions may still read {unreleased} freed blocks"
            ));
            return 0;
        }
        if self.space.host_room.get().is_some_and(|room| room(job.to) < need) {
            job.waiting = Some(format!(
                "waiting: the host's disk has no room for {}",
                job.to.name()
            ));
            return 0;
        }
        // The move takes both old and new blocks until the old ones are released: never from reserved space,
        // nor during a search for space.
        let _beside = self.space.turn.try_read();
        if _beside.is_none() || self.store.reserve(need).is_err() {
            job.waiting = Some("waiting: the free space is promised to sessions".into());
            return 0;
        }
        let moved = self.carry_moves(job);
        self.store.unreserve(need);
        moved
    }

    fn carry_moves(&self, job: &mut Job) -> u64 {
        let (mut at, mut total, mut most) = (0, 0, TX_MOVES);
        while at < job.moves.len() && !self.stopping.load(Ordering::Acquire) {
            if job.of.is_some_and(|of| !self.placer.evacuations.goes_on(of)) {
                break;
            }
            self.let_others_go_first(job);
            let from_ns = self.clock.monotonic_ns();
            let ended = self.carry_some(job, &job.moves[at..], most);
            if job.of.is_some() && self.are_others_active() {
                let took = Duration::from_nanos(self.clock.monotonic_ns().saturating_sub(from_ns));
                let rest = took * BESIDE_REST;
                self.clock
                    .pause(rest.min(Duration::from_millis(BESIDE_REST_MAX_MS)));
            }
            match ended {
                Ended::Done { moves, blocks } => {
                    at += moves.max(1);
                    total += blocks;
                    most = TX_MOVES;
                }
                Ended::Alone => most = 1,
                Ended::NoRoom => {
                    job.waiting = Some(format!("waiting: {} has no room", job.to.name()));
                    break;
                }
                Ended::Bad(error) => {
                    if error.stops_writing() {
                        self.faults.note_error(&error);
                        job.waiting = Some(format!("waiting: {error}"));
                        break;
                    }
                    let bad = job.moves[at];
                    tracing::error!(at = ?bad.at, "data cannot be moved: {error}");
                    self.store.note_damage(&error);
                    match job.cause {
                        Cause::Pinned => self.placer.pins.failed(&bad),
                        Cause::Evacuated | Cause::Removed => self.placer.evacuations.failed(job, &bad),
                        _ => self.placer.policy.failed(&bad),
                    }
                    at += 1;
                    most = TX_MOVES;
                }
            }
        }
        total
    }

    /// Whether others have changed the pool in the last half second.
    fn are_others_active(&self) -> bool {
        let now_ms = self.clock.monotonic_ms();
        self.placer.others.are_active(self.store.newest_tx(), now_ms)
    }

    /// Waits while others use the devices of the job, though not for long. Moves that make room do not wait:
    /// writers may need it.
    fn let_others_go_first(&self, job: &Job) {
        let meters = &self.placer.meters;
        let others = || [job.from, job.to].into_iter().any(|tier| meters.is_at_work(tier));
        let mut left_ms = if job.cause == Cause::Full { 0 } else { YIELD_MS };
        while left_ms > 0 && others() && !self.stopping.load(Ordering::Acquire) {
            self.clock.pause(Duration::from_millis(1));
            left_ms -= 1;
        }
    }

    /// Carries out one transaction.
    fn carry_some(&self, job: &Job, moves: &[Move], most: usize) -> Ended {
        let limit = match job.of.is_some() && self.are_others_active() {
            true => BESIDE_TX_BLOCKS,
            false => TX_BLOCKS,
        };
        let moves = &moves[..most.min(moves.len())];
        let fetched = self.fetch(job, moves, limit);
        let change = Change::begin(self.store, self.sessions);
        let ended = self.move_some(job, moves, limit, fetched);
        let (done, tx) = match ended {
            Ok(done) => done,
            Err((_, error)) if error.is_device_lost() => return Ended::NoRoom,
            Err((_, StoreError::NoSpace { .. })) => return Ended::NoRoom,
            Err((0, error)) => return Ended::Bad(error),
            Err((_, error)) if most == 1 || error.stops_writing() => return Ended::Bad(error),
            Err(_) => return Ended::Alone,
        };
        let (mut remapped, mut shared) = (Vec::new(), false);
        for (moved, _) in done.iter().filter(|(_, done)| *done) {
            match moved.at {
                At::File(key, _) => remapped.push(key),
                At::Shared(_) => shared = true,
            }
        }
        // A run is moved for all files that share it, and does not know which these are.
        if shared && !armed(Bug::SharedMoveNotTold) {
            let mapped = self.sessions.table.lock().table.mapped();
            remapped.extend(mapped.into_iter().filter(|key| self.shares_blocks(*key)));
        }
        remapped.sort_unstable();
        remapped.dedup();
        let changes = self.take_over.take_over(&Applied {
            tx,
            remapped,
            ..Applied::default()
        });
        debug_assert!(changes.is_empty(), "moving frees no inode");
        drop(change);
        let mut blocks = 0;
        for (moved, _) in done.iter().filter(|(_, done)| *done) {
            blocks += u64::from(moved.len);
            self.placer.policy.moved(job, moved);
            self.placer.evacuations.moved(job, moved);
        }
        self.placer.count(job, blocks);
        Ended::Done {
            moves: done.len(),
            blocks,
        }
    }

    /// Whether the file may have shared blocks.
    fn shares_blocks(&self, key: InodeKey) -> bool {
        self.store.shares_blocks(key.ino).unwrap_or(true)
    }

    /// Reads what moves from a slower tier are to copy, at most `limit` blocks, before their transaction
    /// begins: others go on meanwhile.
    fn fetch(&self, job: &Job, moves: &[Move], limit: u64) -> Fetched<'_> {
        let mut wanted = Wanted::default();
        let mut left = limit;
        for moved in moves.iter().filter(|_| job.from != Tier::Nvm) {
            let len = u64::from(moved.len);
            // The first move is made in any case.
            if len > left && left < limit {
                break;
            }
            left = left.saturating_sub(len);
            match moved.at {
                At::Shared(number) => wanted.shared.push(number..number + len),
                At::File(key, at) => {
                    let blocks = (at.0..at.0 + len).map(FileBlock);
                    match wanted.files.last_mut() {
                        Some((ino, known)) if *ino == key.ino => known.extend(blocks),
                        _ => wanted.files.push((key.ino, blocks.collect())),
                    }
                }
            }
        }
        self.store.fetch(&wanted, usize::MAX, false).unwrap_or_default()
    }

    /// Does moves of at most about `limit` blocks, with what was fetched for them; returns each with whether
    /// it was done or had become pointless. An error comes with the
    /// number of moves done before it, which are undone.
    fn move_some(
        &self,
        job: &Job,
        moves: &[Move],
        limit: u64,
        fetched: Fetched<'_>,
    ) -> Result<(Vec<Tried>, TxId), (usize, StoreError)> {
        let (mut done, mut blocks) = (Vec::new(), 0);
        let mut tx = self.store.begin_with_room().map_err(|error| (0, error))?;
        tx.use_fetched(&fetched);
        let enough = tx.room() / 2;
        for moved in moves {
            blocks += u64::from(moved.len);
            let more = blocks <= limit && tx.room() >= enough.max(2 * OP_ROOM);
            if !done.is_empty() && !more {
                break;
            }
            let from = (job.from, moved.block);
            let to = DataTarget::only(job.to);
            let result = match moved.at {
                At::Shared(number) => tx.migrate_shared(number, moved.len, from, to),
                At::File(key, at) => match tx.get_key(key) {
                    Ok(inode) if movable(&inode) => tx.migrate(key.ino, at, moved.len, from, to),
                    Ok(_) | Err(StoreError::NoInode(_)) => Ok(false),
                    Err(error) => Err(error),
                },
            };
            match result {
                Ok(did) => done.push((*moved, did)),
                Err(error) => return Err((done.len(), error)),
            }
        }
        if let Some(of) = job.of {
            let moved = done
                .iter()
                .filter(|(_, did)| *did)
                .map(|(moved, _)| u64::from(moved.len));
            let bytes = moved.sum::<u64>() * BLOCK_BYTES;
            tx.note_evacuated(of, bytes)
                .map_err(|error| (done.len(), error))?;
        }
        let tx = tx.commit().map_err(|error| (done.len(), error))?;
        self.placer.others.have_moved(tx, self.clock.monotonic_ms());
        Ok((done, tx))
    }
}
