//! Slabs of sessions: grants them, moves their bytes, asks them back when files need their space, and takes what is
//! not given back. What must hold is in docs/adr/0068; rows and blocks are the store's.

use crate::error::no;
use crate::kernel::{Core, KernelFs, SpaceLimits};
use crate::ops::record::Records;
use crate::session::state::Session;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, LeaseNo, SessionId, Tier};
use varve_ipc::{IpcError, Response, SLAB_BYTES, SLAB_RANGES_MAX, SLABS_AT_ONCE, Upcall};
use varve_store::{SlabRow, StoreError};

/// Blocks of a slab.
const SLAB_BLOCKS: u32 = (SLAB_BYTES / BLOCK_BYTES) as u32;
/// A user who is neither root nor the pool's owner has at most this part of what slabs may take.
const USER_PART: u64 = 4;
/// Pause between two looks whether slabs that were asked back are there.
const NAP: Duration = Duration::from_millis(2);

/// Context of slabs.
#[derive(Clone, Copy)]
pub(crate) struct Slabs<'k> {
    core: Core<'k>,
    space: &'k SpaceLimits,
    records: Records<'k>,
}

impl<'k> Slabs<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            space: &kernel.space,
            records: Records::of(kernel),
        }
    }

    /// `Request::GrantSlab`.
    pub(crate) fn grant(&self, session: &Session, tier: Tier) -> Result<LeaseNo, IpcError> {
        if session.read_only {
            return Err(no(libc::EROFS));
        }
        self.core.check_writable()?;
        // Who searches for space gets what it finds.
        let Some(_beside) = self.space.turn.try_read() else {
            return Err(no(libc::ENOSPC));
        };
        let most = self.most(tier);
        let own_full = !session.privileged
            && self.of_user(session.peer.uid, tier) + u64::from(SLAB_BLOCKS) > most / USER_PART;
        if most == 0 || own_full || self.space.promisable(self.core.store) < SLAB_BLOCKS.into() {
            return Err(no(libc::ENOSPC));
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
    pub(crate) fn list(&self, session: &Session) -> Response {
        let stats = self.core.store.space();
        let there = Tier::ALL.into_iter().zip(&stats.tiers);
        let part = if session.privileged { 1 } else { USER_PART };
        let tiers = there
            .filter(|(_, stats)| stats.total > 0)
            .map(|(tier, _)| (tier, self.most(tier) / part / u64::from(SLAB_BLOCKS)));
        let own = self.core.store.slabs_of(session.id);
        let own = own.iter().map(|row| (row.lease, row.tier));
        Response::Slabs(tiers.collect(), own.collect())
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

    /// Gives what the session that this one continues had to it. Must precede the end of the former's row.
    pub(crate) fn take_over(&self, session: &Session, former: SessionId) {
        let rows = self.core.store.slabs_of(former);
        if rows.is_empty() || session.read_only {
            return;
        }
        let slabs: Vec<_> = rows.iter().map(|row| row.lease).collect();
        let passed = self.records.make(session).and_then(|()| {
            let passed = self.core.store.pass_slabs(former, session.id, &slabs);
            passed.map_err(|error| self.core.refused(&error))
        });
        let asked = self.space.slabs_asked.lock();
        let again: Vec<_> = slabs
            .into_iter()
            .filter(|slab| asked.contains_key(slab))
            .collect();
        drop(asked);
        for slabs in again.chunks(SLABS_AT_ONCE) {
            let slabs = slabs.to_vec();
            self.core.locked().send(session.id, Upcall::YieldSlabs { slabs });
        }
        if let Err(error) = passed {
            tracing::error!(session = %session.id, "slabs of its client are lost: {error}");
        }
    }

    /// Asks for slabs whose space files need, and waits until `enough`, or until those that were asked for are
    /// gone: given back, or taken after half of `wait_ms`.
    pub(crate) fn make_room(&self, blocks: u64, enough: &dyn Fn() -> bool) -> Result<(), StoreError> {
        let began = self.core.env.clock.moment();
        let most = Duration::from_millis(self.core.env.config.wait_ms / 2);
        let mut asked = self.worth(blocks);
        if asked.is_empty() || enough() {
            return Ok(());
        }
        self.ask(&asked, self.core.now_ms() + self.core.env.config.wait_ms / 2);
        // A test's clock may stand still.
        while !enough() && self.core.env.clock.moment() - began < most {
            let left: BTreeSet<_> = self.core.store.slabs().iter().map(|row| row.lease).collect();
            asked.retain(|row| left.contains(&row.lease));
            if asked.is_empty() {
                return Ok(());
            }
            self.core.env.clock.pause(NAP);
        }
        if enough() {
            return Ok(());
        }
        self.take(&asked)
    }

    /// Slabs that give `blocks` blocks back when they are freed: in whole units on SSD and HDD, those with the
    /// fewest slabs first.
    fn worth(&self, blocks: u64) -> Vec<SlabRow> {
        let mut groups: Vec<Vec<SlabRow>> = self.groups().into_values().collect();
        groups.sort_by_key(|rows| (rows.len(), std::cmp::Reverse(rows[0].tier)));
        let stats = self.core.store.space();
        let mut out = Vec::new();
        let mut given = 0;
        for rows in groups {
            if given >= blocks {
                break;
            }
            given += match rows[0].tier {
                Tier::Nvm => rows.iter().map(|row| u64::from(row.blocks)).sum(),
                tier => stats.tiers[tier as usize].unit_blocks,
            };
            out.extend(rows);
        }
        out
    }

    /// All slabs: each of NVM, and together those of a unit.
    fn groups(&self) -> BTreeMap<(Tier, u64), Vec<SlabRow>> {
        let stats = self.core.store.space();
        let mut groups = BTreeMap::<_, Vec<SlabRow>>::new();
        for row in self.core.store.slabs() {
            let unit = row.block.checked_div(stats.tiers[row.tier as usize].unit_blocks);
            let group = (row.tier, unit.unwrap_or(row.block));
            groups.entry(group).or_default().push(row);
        }
        groups
    }

    /// Asks sessions for slabs, those that were not asked for before. They are taken at `until_ms`.
    fn ask(&self, rows: &[SlabRow], until_ms: u64) {
        let mut new = BTreeMap::<SessionId, Vec<LeaseNo>>::new();
        {
            let mut asked = self.space.slabs_asked.lock();
            for row in rows.iter().filter(|row| !asked.contains_key(&row.lease)) {
                new.entry(row.session).or_default().push(row.lease);
            }
            asked.extend(new.values().flatten().map(|lease| (*lease, until_ms)));
        }
        let mut sessions = self.core.locked();
        for (id, slabs) in new {
            for slabs in slabs.chunks(SLABS_AT_ONCE) {
                let slabs = slabs.to_vec();
                sessions.send(id, Upcall::YieldSlabs { slabs });
            }
        }
    }

    fn take(&self, rows: &[SlabRow]) -> Result<(), StoreError> {
        for row in rows {
            match self.core.store.free_slabs(row.session, &[row.lease]) {
                Ok(()) => tracing::warn!(
                    session = %row.session,
                    slab = %row.lease,
                    "a slab that was not given back in time is taken: {} needs its space",
                    row.tier.name()
                ),
                Err(StoreError::NoGrant(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Asks for the slabs on tiers and devices that are to be emptied, and takes those that are late.
    pub(crate) fn tick(&self, now_ms: u64) {
        if self.core.store.slab_use().iter().all(|tier| tier.slabs == 0) {
            self.space.slabs_asked.lock().clear();
            return;
        }
        let rows = self.core.store.slabs();
        let late: Vec<_> = {
            let mut asked = self.space.slabs_asked.lock();
            let there: BTreeSet<_> = rows.iter().map(|row| row.lease).collect();
            asked.retain(|lease, _| there.contains(lease));
            let is_late = |row: &&SlabRow| asked.get(&row.lease).is_some_and(|until| now_ms >= *until);
            rows.iter().filter(is_late).copied().collect()
        };
        if let Err(error) = self.take(&late) {
            self.core.note_error(&error);
        }
        let in_the_way: Vec<_> = rows
            .into_iter()
            .filter(|row| self.core.store.is_to_be_emptied(row.tier, row.block))
            .collect();
        self.ask(&in_the_way, now_ms + self.core.env.config.wait_ms / 2);
    }
}
