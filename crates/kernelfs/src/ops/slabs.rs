//! Slabs of sessions: grants them, moves their bytes, asks them back when files need their space, and takes what is
//! not given back. What must hold is in docs/adr/0068; rows and blocks are the store's.

use crate::error::no;
use crate::kernel::{Core, KernelFs, SpaceLimits};
use crate::ops::record::Records;
use crate::ops::teardown::Teardown;
use crate::session::state::Session;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, LeaseNo, SessionId, Tier};
use varve_ipc::{IpcError, Response, SLAB_BYTES, SLAB_FORMERS_MAX, SLAB_RANGES_MAX, SLABS_AT_ONCE, Upcall};
use varve_store::{SlabRow, StoreError};

/// Blocks of a slab.
const SLAB_BLOCKS: u32 = (SLAB_BYTES / BLOCK_BYTES) as u32;
/// A user who is neither root nor the pool's owner has at most this part of what slabs may take.
const USER_PART: u64 = 4;
/// A search for space asks for at least this part of all slabs: the next ones find what it asked for.
const ASKED_PART: u64 = 8;
/// For how many times `wait_ms` a session is late whose slabs had to be taken.
const LATE_WAITS: u64 = 10;
/// Pause between two looks whether slabs that were asked back are there.
const NAP: Duration = Duration::from_millis(2);

/// Context of slabs.
#[derive(Clone, Copy)]
pub(crate) struct Slabs<'k> {
    core: Core<'k>,
    space: &'k SpaceLimits,
    records: Records<'k>,
    teardown: Teardown<'k>,
}

impl<'k> Slabs<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            space: &kernel.space,
            records: Records::of(kernel),
            teardown: Teardown::of(kernel),
        }
    }

    /// `Request::GrantSlab`.
    pub(crate) fn grant(&self, session: &Session, tier: Tier) -> Result<LeaseNo, IpcError> {
        self.check_format()?;
        if session.read_only {
            return Err(no(libc::EROFS));
        }
        self.core.check_writable()?;
        // Who searches for space gets what it finds.
        let Some(_beside) = self.space.turn.try_read() else {
            return Err(no(libc::ENOSPC));
        };
        // Else two sessions of a user could both find room for their last one.
        let _one_at_a_time = self.space.slab_grants.lock();
        let most = self.most(tier);
        if most == 0 || self.space.promisable(self.core.store) < SLAB_BLOCKS.into() {
            return Err(no(libc::ENOSPC));
        }
        if !session.privileged
            && self.of_user(session.peer.uid, tier) + u64::from(SLAB_BLOCKS) > most / USER_PART
        {
            return Err(no(libc::EDQUOT));
        }
        self.records.make(session)?;
        let granted = self
            .core
            .store
            .use_slabs()
            .and_then(|()| self.core.store.grant_slab(session.id, tier, SLAB_BLOCKS, most));
        let slab = granted.map_err(|error| self.refused(&error))?;
        // Its end may have come before the grant, and seen none.
        if self.core.locked().live(session.id).is_none() {
            let _ = self.core.store.free_slabs(session.id, &[slab]);
            return Err(IpcError::Sealed);
        }
        Ok(slab)
    }

    /// Refuses pools of formats that have no slabs.
    fn check_format(&self) -> Result<(), IpcError> {
        match self.core.store.may_use_slabs() {
            true => Ok(()),
            false => Err(no(libc::EOPNOTSUPP)),
        }
    }

    /// Most blocks of a tier that slabs take.
    fn most(&self, tier: Tier) -> u64 {
        let total = self.core.store.space().tiers[tier as usize].total;
        total * u64::from(self.core.env.config.far_percent) / 100
    }

    /// Blocks of a tier in a user's slabs.
    fn of_user(&self, uid: u32, tier: Tier) -> u64 {
        let owners = self.core.store.slab_owners();
        let sessions = self.core.locked();
        let living = sessions.entries.values();
        let own = living.map(|member| (member.session.id, member.session.peer.uid));
        let ended = sessions.ended.iter().map(|ended| (ended.id, ended.uid));
        let own: BTreeSet<SessionId> = own
            .chain(ended)
            .filter(|(_, user)| *user == uid)
            .map(|(id, _)| id)
            .collect();
        let has = owners.iter().filter(|(id, _)| own.contains(id));
        has.map(|(_, tiers)| tiers[tier as usize].blocks).sum()
    }

    /// `Request::FreeSlabs`.
    pub(crate) fn free(&self, session: &Session, slabs: &[LeaseNo]) -> Result<(), IpcError> {
        if slabs.len() > SLABS_AT_ONCE {
            return Err(no(libc::E2BIG));
        }
        let freed = self.core.store.free_slabs(session.id, slabs);
        freed.map_err(|error| self.refused(&error))
    }

    /// `Request::ReadSlab`.
    pub(crate) fn read(
        &self,
        session: &Session,
        slab: LeaseNo,
        ranges: &[(u32, u32)],
    ) -> Result<Vec<u8>, IpcError> {
        if ranges.len() > SLAB_RANGES_MAX {
            return Err(no(libc::E2BIG));
        }
        let bytes: u64 = ranges.iter().map(|(_, len)| u64::from(*len)).sum();
        if bytes > SLAB_BYTES {
            return Err(no(libc::EINVAL));
        }
        let mut out = vec![0; bytes as usize];
        let mut rest = &mut out[..];
        for (offset, len) in ranges {
            let (part, more) = rest.split_at_mut(*len as usize);
            rest = more;
            let read = self
                .core
                .store
                .read_slab(session.id, slab, u64::from(*offset), part);
            read.map_err(|error| self.refused(&error))?;
        }
        Ok(out)
    }

    /// `Request::WriteSlab`.
    pub(crate) fn write(
        &self,
        session: &Session,
        slab: LeaseNo,
        offset: u32,
        bytes: &[u8],
    ) -> Result<(), IpcError> {
        if !bytes.len().is_multiple_of(BLOCK_SIZE) || bytes.len() as u64 > SLAB_BYTES {
            return Err(no(libc::EINVAL));
        }
        let store = self.core.store;
        let written = store.write_slab(session.id, slab, u64::from(offset), bytes);
        written.map_err(|error| self.refused(&error))
    }

    /// `Request::Slabs`.
    pub(crate) fn list(&self, session: &Session, former: &[u128]) -> Result<Response, IpcError> {
        if former.len() > SLAB_FORMERS_MAX {
            return Err(no(libc::E2BIG));
        }
        self.check_format()?;
        for token in former {
            self.take_over(session, *token)?;
        }
        let stats = self.core.store.space();
        let there = Tier::ALL.into_iter().zip(&stats.tiers);
        let part = if session.privileged { 1 } else { USER_PART };
        let tiers = there
            .filter(|(_, stats)| stats.total > 0)
            .map(|(tier, _)| (tier, self.most(tier) / part / u64::from(SLAB_BLOCKS)));
        let own = self.core.store.slabs_of(session.id);
        let own = own.iter().map(|row| (row.lease, row.tier));
        Ok(Response::Slabs(tiers.collect(), own.collect()))
    }

    fn refused(&self, error: &StoreError) -> IpcError {
        match error {
            StoreError::NoGrant(_) => no(libc::ENXIO),
            StoreError::NoSession(_) => IpcError::Sealed,
            StoreError::Invalid(_) => no(libc::EINVAL),
            StoreError::TableFull(_) => no(libc::ENOSPC),
            error => self.core.faults().unreadable(error),
        }
    }

    /// Gives a session the slabs of its user's other session of this token, which ends if it still lives. After an
    /// error it can be asked for again.
    fn take_over(&self, session: &Session, token: u128) -> Result<(), IpcError> {
        let (living, ended) = {
            let sessions = self.core.locked();
            let members = sessions.entries.values();
            let mut own = members.filter(|member| {
                let other = &member.session;
                other.token == token && other.peer.uid == session.peer.uid && other.id != session.id
            });
            let living = own.next().map(|member| member.session.id);
            let mut ended = sessions.ended.iter();
            let ended = ended.find(|ended| ended.token == token && ended.uid == session.peer.uid);
            (living, ended.map(|ended| ended.id))
        };
        if let Some(id) = living {
            // It is granted no more slabs from here on.
            self.teardown
                .seal_session(id, "its client goes on in another session");
            self.teardown.finish_or_leave();
        }
        let Some(former) = living.or(ended) else {
            return Ok(());
        };
        if !self.core.store.has_slabs(former) {
            return Ok(());
        }
        if session.read_only {
            return Err(no(libc::EROFS));
        }
        self.core.check_writable()?;
        self.records.make(session)?;
        let passed = self.core.store.pass_slabs(former, session.id);
        let passed = passed.map_err(|error| self.refused(&error))?;
        self.ask_again(session.id, former, &passed);
        // Its own slabs are gone, so nothing is lost with it.
        self.teardown.forget_heard(former);
        Ok(())
    }

    /// Asks a session for those of these slabs for which the one before was asked. If that one was late, so is this.
    fn ask_again(&self, id: SessionId, former: SessionId, slabs: &[LeaseNo]) {
        let again: Vec<_> = {
            let mut wanted = self.space.slabs_wanted.lock();
            if let Some(until_ms) = wanted.late.remove(&former) {
                wanted.late.insert(id, until_ms);
            }
            let asked = slabs.iter().filter(|slab| wanted.asked.contains_key(slab));
            asked.copied().collect()
        };
        for slabs in again.chunks(SLABS_AT_ONCE) {
            let slabs = slabs.to_vec();
            self.core.locked().send(id, Upcall::YieldSlabs { slabs });
        }
    }

    /// When a part of `wait_ms` will have passed, in milliseconds.
    pub(crate) fn patience(&self, part: u64) -> u64 {
        self.core.now_ms() + self.core.env.config.wait_ms / part
    }

    /// Has sessions give back slabs that are worth `lacks` blocks: asks for them and waits until `until_ms`, or
    /// `is_enough`, and takes what is not there then. Those that were asked for before and are overdue, and those of
    /// sessions that were late, are taken at once. If all together are not worth so much, none is asked for. Returns
    /// whether any went.
    pub(crate) fn make_room(
        &self,
        lacks: u64,
        until_ms: u64,
        is_enough: &dyn Fn() -> bool,
    ) -> Result<bool, StoreError> {
        let began = self.core.env.clock.moment();
        let now_ms = self.core.now_ms();
        let groups = self.groups(now_ms);
        let all: u64 = groups.iter().map(|group| group.worth).sum();
        let pending: u64 = self
            .core
            .store
            .space()
            .tiers
            .iter()
            .map(|tier| tier.pending)
            .sum();
        if lacks > all + pending {
            return Ok(false);
        }
        let chosen = first_worth(&groups, lacks);
        if chosen.iter().any(|group| group.turn > Turn::Now) {
            self.ask_for(&groups, lacks.max(all / ASKED_PART), until_ms);
            let due_ms = self.due_ms(chosen).min(until_ms);
            let wait = Duration::from_millis(due_ms.saturating_sub(now_ms));
            // A test's clock may stand still.
            while !is_enough() && self.given(&groups) < lacks && self.core.env.clock.moment() - began < wait {
                self.core.env.clock.pause(NAP);
            }
        }
        let given = self.given(&groups);
        if given >= lacks || is_enough() {
            return Ok(given > 0);
        }
        let there = self.there();
        let left: Vec<_> = groups.into_iter().filter(|group| group.is_in(&there)).collect();
        let rows = first_worth(&left, lacks - given)
            .iter()
            .flat_map(|group| &group.rows);
        let taken = self.take(&rows.copied().collect::<Vec<_>>())?;
        let mut wanted = self.space.slabs_wanted.lock();
        let until_ms = now_ms + LATE_WAITS * self.core.env.config.wait_ms;
        wanted
            .late
            .extend(taken.iter().map(|row| (row.session, until_ms)));
        Ok(given > 0 || !taken.is_empty())
    }

    /// All slabs, in the order in which files take them: each of NVM, and together those of a unit. Those that cost
    /// no wait come first, then those with the fewest slabs.
    fn groups(&self, now_ms: u64) -> Vec<Group> {
        let stats = self.core.store.space();
        let mut groups = BTreeMap::<_, Vec<SlabRow>>::new();
        for row in self.core.store.slabs() {
            let unit = row.block.checked_div(stats.tiers[row.tier as usize].unit_blocks);
            let group = (row.tier, unit.unwrap_or(row.block));
            groups.entry(group).or_default().push(row);
        }
        let wanted = self.space.slabs_wanted.lock();
        let turn = |row: &SlabRow| match wanted.asked.get(&row.lease) {
            _ if wanted.late.get(&row.session).is_some_and(|until| now_ms < *until) => Turn::Now,
            Some(until) if now_ms >= *until => Turn::Now,
            Some(_) => Turn::Asked,
            None => Turn::Later,
        };
        let mut groups: Vec<_> = groups
            .into_values()
            .map(|rows| Group {
                turn: rows.iter().map(turn).max().unwrap_or(Turn::Later),
                worth: self.core.store.slabs_worth(&rows),
                rows,
            })
            .filter(|group| group.worth > 0)
            .collect();
        groups.sort_by_key(|group| {
            (
                group.turn,
                group.rows.len(),
                std::cmp::Reverse(group.rows[0].tier),
            )
        });
        groups
    }

    /// Numbers of the slabs that there are.
    fn there(&self) -> BTreeSet<LeaseNo> {
        self.core.store.slabs().iter().map(|row| row.lease).collect()
    }

    /// What the groups of these are worth that are gone.
    fn given(&self, groups: &[Group]) -> u64 {
        let there = self.there();
        let gone = groups.iter().filter(|group| !group.is_in(&there));
        gone.map(|group| group.worth).sum()
    }

    /// When all slabs of these groups may be taken, in milliseconds.
    fn due_ms(&self, groups: &[Group]) -> u64 {
        let wanted = self.space.slabs_wanted.lock();
        let rows = groups.iter().flat_map(|group| &group.rows);
        let due = rows.filter_map(|row| wanted.asked.get(&row.lease).copied());
        due.max().unwrap_or(0)
    }

    /// Asks for groups that are worth `blocks`, and for one of each session: who does not give in time is late, and
    /// all of them are found out with one wait.
    fn ask_for(&self, groups: &[Group], blocks: u64, until_ms: u64) {
        let (mut worth, mut rows) = (0, Vec::new());
        let mut heard = BTreeSet::new();
        for group in groups {
            let is_first = group.rows.iter().any(|row| !heard.contains(&row.session));
            if worth < blocks || is_first {
                worth += group.worth;
                heard.extend(group.rows.iter().map(|row| row.session));
                rows.extend(group.rows.iter().copied());
            }
        }
        self.ask(&rows, until_ms);
    }

    /// Asks sessions for slabs, those that were not asked for before. They may be taken from `until_ms` on.
    fn ask(&self, rows: &[SlabRow], until_ms: u64) {
        let mut new = BTreeMap::<SessionId, Vec<LeaseNo>>::new();
        {
            let mut wanted = self.space.slabs_wanted.lock();
            for row in rows.iter().filter(|row| !wanted.asked.contains_key(&row.lease)) {
                new.entry(row.session).or_default().push(row.lease);
            }
            let leases = new.values().flatten();
            wanted.asked.extend(leases.map(|lease| (*lease, until_ms)));
        }
        let mut sessions = self.core.locked();
        for (id, slabs) in new {
            for slabs in slabs.chunks(SLABS_AT_ONCE) {
                let slabs = slabs.to_vec();
                sessions.send(id, Upcall::YieldSlabs { slabs });
            }
        }
    }

    /// Takes those of these slabs that their sessions still have, and returns them.
    fn take(&self, rows: &[SlabRow]) -> Result<Vec<SlabRow>, StoreError> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let taken = self.core.store.take_slabs(rows)?;
        for row in &taken {
            tracing::warn!(
                session = %row.session,
                slab = %row.lease,
                "a slab that was not given back in time is taken: {} needs its space",
                row.tier.name()
            );
        }
        Ok(taken)
    }

    /// Asks for the slabs on tiers and devices that are to be emptied, and takes those that are late. What a search
    /// for space asked for is taken only by a search.
    pub(crate) fn tick(&self, now_ms: u64) {
        {
            let mut wanted = self.space.slabs_wanted.lock();
            wanted.late.retain(|_, until_ms| now_ms < *until_ms);
            if self.core.store.slab_use().iter().all(|tier| tier.slabs == 0) {
                wanted.asked.clear();
                return;
            }
        }
        let rows = self.core.store.slabs();
        let there: BTreeSet<_> = rows.iter().map(|row| row.lease).collect();
        let in_the_way: Vec<_> = rows
            .into_iter()
            .filter(|row| self.core.store.is_to_be_emptied(row.tier, row.block))
            .collect();
        self.ask(&in_the_way, now_ms + self.core.env.config.wait_ms / 2);
        let late: Vec<_> = {
            let mut wanted = self.space.slabs_wanted.lock();
            wanted.asked.retain(|lease, _| there.contains(lease));
            let is_late = |row: &&SlabRow| wanted.asked.get(&row.lease).is_some_and(|until| now_ms >= *until);
            in_the_way.iter().filter(is_late).copied().collect()
        };
        if let Err(error) = self.take(&late) {
            self.core.note_error(&error);
        }
    }
}

/// When slabs are taken by a search for space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    /// At once: they are overdue.
    Now,
    /// When they are overdue: they were asked for.
    Asked,
    /// They were not asked for.
    Later,
}

/// Slabs that give space back together: one of NVM, or all of a unit.
#[derive(Debug)]
struct Group {
    rows: Vec<SlabRow>,
    /// Blocks that files can have when they are gone.
    worth: u64,
    turn: Turn,
}

impl Group {
    /// Whether any of them is among these.
    fn is_in(&self, there: &BTreeSet<LeaseNo>) -> bool {
        self.rows.iter().any(|row| there.contains(&row.lease))
    }
}

/// The first of these that are worth `blocks` together, or all.
fn first_worth(groups: &[Group], blocks: u64) -> &[Group] {
    let mut worth = 0;
    let few = groups.iter().position(|group| {
        worth += group.worth;
        worth >= blocks
    });
    &groups[..few.map_or(groups.len(), |last| last + 1)]
}
