//! Running digests, and what follows from them: pages, barriers, reservations, holds, rows.

use crate::counters::Counters;
use crate::digest::pipeline::BatchPrefetch;
use crate::digest::{
    self, Applied, Batch, BatchLimit, Client, Digested, Environment, GatherLimits, Leases, SessionLog, Source,
};
use crate::kernel::{BaseLimit, KernelFs};
use crate::leases::grants::RowChange;
use crate::session::state::{Reader, Session};
use crate::session::table::{Barrier, Sessions};
use crate::user_segments::Segments;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use varve_format::log::HEADER_SIZE;
use varve_format::session::GrantRow;
use varve_format::{InodeKey, LogSeq, Seal, SessionId};
use varve_ipc::{Clock, PageState, SessionPage, Upcall};
use varve_media::Region;
use varve_store::{Store, StoreError};

/// Payloads of writes that are so long are copied straight from the log to their place, or to the block that
/// they are a part of.
const LEAVE_BYTES: usize = 1024;

/// Most files that one barrier names.
const BARRIER_KEYS_MAX: usize = 4096;

/// Inodes without a name that are freed in one transaction at most.
const FREED_AT_ONCE: usize = 64;
/// Milliseconds after which freeing them makes way for other work.
const FREE_MS: u64 = 50;
/// How often it is told that there is no space, in milliseconds.
const NO_SPACE_TOLD_MS: u64 = 60_000;

/// How much is digested at once. Two batches are under way at a time, one gathered and one applied; the
/// client must have chunks to write to meanwhile. And they pass from one processor to the other: what is
/// small enough does that in the cache. Of entries no more than there are by default, so that what waits for
/// the transaction (requests for leases and numbers, of anybody) soon goes on.
fn batch_limits(log_bytes: u64) -> GatherLimits {
    let limits = GatherLimits::default();
    GatherLimits {
        bytes: ((log_bytes / 8) as usize).clamp(limits.bytes / 8, limits.bytes),
        leave_bytes: LEAVE_BYTES,
        ..limits
    }
}

/// The leases as a digest sees them.
pub(crate) struct LeaseView<'k>(pub(crate) &'k KernelFs);

impl Leases for LeaseView<'_> {
    fn grants(&self, session: SessionId, key: InodeKey, out: &mut Vec<GrantRow>) {
        out.extend(self.0.locked().rows.find(session, key).copied());
    }

    fn held(&self, key: InodeKey, except: &[SessionId]) -> bool {
        // Clients that have not come back yet may hold anything.
        self.0.in_grace() || self.0.locked().holds.held(key, except)
    }

    fn in_group(&self, session: SessionId, gid: u32) -> bool {
        let sessions = self.0.locked();
        sessions
            .any(session)
            .is_some_and(|session| session.cred.in_group(gid))
    }

    fn may_give(&self, session: SessionId, gid: u32) -> bool {
        let sessions = self.0.locked();
        sessions
            .any(session)
            .is_some_and(|session| session.groups_unknown || session.cred.in_group(gid))
    }

    fn had(&self, session: SessionId, key: InodeKey) -> u32 {
        self.0.locked().any(session).map_or(0, |session| session.had(key))
    }

    fn reserved(&self, session: SessionId) -> Option<u64> {
        let sessions = self.0.locked();
        let session = &sessions.entries.get(&session)?.session;
        // What a session had before a restart is not known.
        (!session.of_earlier_daemon).then(|| session.reserved.load(Ordering::Acquire))
    }
}

/// What taking over a digest's changes takes.
#[derive(Clone, Copy)]
pub(crate) struct TakeOver<'k> {
    store: &'k Store,
    sessions: &'k Sessions,
    segments: &'k Segments,
    counters: &'k Counters,
    clock: &'k dyn Clock,
    lease_ms: u64,
}

impl<'k> TakeOver<'k> {
    /// Out of the daemon's nouns.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            store: &kernel.store,
            sessions: &kernel.sessions,
            segments: &kernel.segments,
            counters: &kernel.counters,
            clock: &*kernel.env.clock,
            lease_ms: kernel.env.config.lease_ms,
        }
    }

    /// Takes over what one durable record changed. Answers row changes that are still to be written.
    pub(crate) fn take_over(&self, applied: &Applied) -> Vec<RowChange> {
        let until_ms = self.clock.monotonic_ms() + self.lease_ms;
        self.counters.add(&applied.counts);
        // A hostile log may hold thousands.
        for (session, refused) in applied.refused.iter().take(8) {
            tracing::warn!(%session, seq = %refused.seq, "a transaction was refused: {}", refused.why);
        }
        let mut sessions = self.sessions.table.lock();
        let sessions = &mut *sessions;
        for member in sessions.entries.values() {
            member.session.page.set_committed_tx(applied.tx);
        }
        for (id, blocks) in &applied.charged {
            if let Some(member) = sessions.entries.get(id) {
                self.store.unreserve(member.session.spend(*blocks));
            }
        }
        for (session, key) in &applied.unheld {
            sessions.unhold(*session, *key);
        }
        // The last hold may have gone between the digest's look and its record.
        for key in &applied.orphans {
            if !sessions.holds.held(*key, &[]) {
                sessions.unheld.insert(*key);
            }
        }
        let ids: Vec<_> = sessions.entries.keys().copied().collect();
        for id in &ids {
            let mapped = |key: &&InodeKey| sessions.table.mappers(**key).any(|mapper| mapper == *id);
            let keys: Vec<_> = applied.remapped.iter().filter(mapped).copied().collect();
            for part in keys.chunks(BARRIER_KEYS_MAX) {
                sessions.send(
                    *id,
                    Upcall::Barrier {
                        tx: applied.tx,
                        keys: part.to_vec(),
                    },
                );
            }
            if let Some(member) = sessions.entries.get_mut(id)
                && !keys.is_empty()
            {
                let parts = keys.len().div_ceil(BARRIER_KEYS_MAX);
                member.barriers.insert(applied.tx, Barrier { until_ms, parts });
            }
        }
        if self.segments.count() > 0 {
            let keys: HashSet<InodeKey> = applied.remapped.iter().chain(&applied.freed).copied().collect();
            self.segments.replaced(&|key| keys.contains(&key), applied.tx);
        }
        let mut changes = Vec::new();
        // A row that is part of the record is as it should be: it lost all these inodes there. One that came
        // since is not.
        let written = |change: &RowChange| change.lease().is_some_and(|lease| applied.wrote_row(lease));
        for key in &applied.freed {
            for id in &ids {
                let change = sessions.rows.end(*id, *key);
                changes.extend(change.filter(|change| !written(change)));
            }
            sessions.table.forget_inode(*key);
            sessions.holds.forget(*key);
            sessions.unheld.remove(key);
        }
        sessions.unlearn(&applied.freed);
        self.store.set_reader_horizon(sessions.reader_horizon());
        changes
    }
}

impl KernelFs {
    pub(crate) fn environment<'a>(&'a self, leases: &'a LeaseView<'a>) -> Environment<'a> {
        Environment {
            leases,
            placement: &*self.placer.policy,
            now_ns: self.env.clock.now_ns(),
        }
    }

    /// Digests a session's log as far as it is contiguous and, if given, up to `upto`: at least what is in it
    /// now. Answers how far it is digested. Durable.
    ///
    /// # Errors
    /// The store's. A device's error latches the pool.
    pub(crate) fn digest_session(
        &self,
        session: &Arc<Session>,
        upto: Option<LogSeq>,
    ) -> Result<LogSeq, StoreError> {
        let mut reader = session.reader.lock();
        if SessionPage::state(&*session.page) == PageState::Sealed {
            // Its client may have appended since, and will do that again elsewhere: only what its seal covers
            // counts.
            return Ok(reader.digested);
        }
        self.digest_reader(session, &mut reader, BatchLimit::Live(upto), BaseLimit::Now)
    }

    /// Digests a sealed log to its end.
    ///
    /// # Errors
    /// As [`digest_session`](Self::digest_session).
    pub(crate) fn digest_sealed(
        &self,
        session: &Arc<Session>,
        seal: &Seal,
        limit: BaseLimit,
    ) -> Result<LogSeq, StoreError> {
        let mut reader = session.reader.lock();
        self.digest_reader(session, &mut reader, BatchLimit::Sealed(seal), limit)
    }

    fn digest_reader(
        &self,
        session: &Arc<Session>,
        reader: &mut Reader,
        cut: BatchLimit<'_>,
        limit: BaseLimit,
    ) -> Result<LogSeq, StoreError> {
        let Some(log) = session.log.as_deref() else {
            return Ok(reader.digested);
        };
        let len_bytes = log.len_bytes();
        let limits = batch_limits(len_bytes);
        // Something that was left in the log was not what it seemed to be: from then on all is looked at
        // before it is folded.
        let unsure = AtomicBool::new(false);
        let gather = |reading: &SessionLog, digested| {
            let newest_tx = || limit.newest(&self.store);
            let limits = match unsure.load(Ordering::Acquire) {
                true => limits.copying_all(),
                false => limits,
            };
            reading.gather(log, digested, &newest_tx, cut, &limits)
        };
        let mut done_bytes = 0;
        let result = std::thread::scope(|scope| {
            let mut ahead = BatchPrefetch::new(scope, gather);
            loop {
                let gathered = ahead
                    .take(reader.digested)
                    .unwrap_or_else(|| gather(&reader.log, reader.digested));
                let batch = match gathered {
                    Ok(batch) => batch,
                    Err(error) => {
                        self.health
                            .log_failed(session.id, Some(&session.log_trouble), &error);
                        let error = StoreError::from(error);
                        // Its entries are nowhere else: who waits for its leases would wait for ever.
                        if error.is_device() {
                            self.stop_writing(&error);
                        }
                        break Err(error);
                    }
                };
                if batch.upto <= reader.digested {
                    break Ok(reader.digested);
                }
                let entries = batch.upto.0 - reader.digested.0;
                done_bytes += batch.log_bytes.max(entries * HEADER_SIZE as u64);
                // What was in the log at the beginning is in these batches, so this is all that was asked
                // for. A client may log as fast as this goes on, and there are others, and a seal, that wait
                // for the thread and the reader.
                let enough = done_bytes >= len_bytes && matches!(cut, BatchLimit::Live(_));
                if batch.more && !enough {
                    ahead.begin(&reader.log, &batch);
                }
                let before = reader.digested;
                match self.apply_batch(session, reader, &batch, log) {
                    Ok(Digested::All) => {}
                    Ok(Digested::Unsure) => {
                        unsure.store(true, Ordering::Release);
                        continue;
                    }
                    Err(error) => break Err(error),
                }
                if !batch.more || enough || reader.digested == before {
                    break Ok(reader.digested);
                }
            }
        });
        match &result {
            Ok(_) => self.counters.no_space_ms.store(0, Ordering::Relaxed),
            Err(error) if error.is_no_space() => self.wait_for_space(error),
            Err(error) => {
                tracing::error!(session = %session.id, "the log cannot be digested: {error}");
                self.note_error(error);
            }
        }
        result
    }

    /// Digests one batch, and moves the reader on. On an error the reader stands where the last durable
    /// record left it.
    fn apply_batch(
        &self,
        session: &Arc<Session>,
        reader: &mut Reader,
        batch: &Batch,
        log: &dyn Region,
    ) -> Result<Digested, StoreError> {
        for refused in &batch.refused {
            tracing::warn!(session = %session.id, "left out of the digest: {}", refused.why);
        }
        self.counters
            .refused
            .fetch_add(batch.refused.len() as u64, Ordering::Relaxed);
        let client = Client {
            session: session.id,
            uid: session.peer.uid,
            privileged: session.privileged,
            checked: false,
        };
        let view = LeaseView(self);
        let env = self.environment(&view);
        let change = self.begin_change();
        let sources = [Source { batch, log, client }];
        let mut gone = Vec::new();
        let done = digest::digest(&self.store, &sources, &env, &mut |applied| {
            for (id, upto) in &applied.digested {
                if *id == session.id {
                    reader.digested = reader.digested.max(*upto);
                }
            }
            gone.extend(self.take_over(applied));
            session.page.set_digested(reader.digested);
        });
        drop(change);
        let done = done?;
        self.write_rows(&gone)?;
        if done == Digested::Unsure {
            return Ok(done);
        }
        reader.log.digested(batch);
        reader.digested = reader.digested.max(batch.upto);
        session.page.set_digested(reader.digested);
        self.counters.digests.fetch_add(1, Ordering::Relaxed);
        Ok(done)
    }

    /// Logs stay as they are until there is space again: the mover is asked to make some, and it is told once
    /// a minute.
    pub(crate) fn wait_for_space(&self, error: &StoreError) {
        let now_ms = self.now_ms().max(1);
        self.counters.no_space_ms.store(now_ms, Ordering::Relaxed);
        let told_ms = self.counters.no_space_told_ms.load(Ordering::Relaxed);
        if told_ms == 0 || now_ms >= told_ms + NO_SPACE_TOLD_MS {
            self.counters.no_space_told_ms.store(now_ms, Ordering::Relaxed);
            tracing::warn!(
                "logs cannot be digested now: {error}. Nothing is lost; it goes on when there is space \
                (delete or truncate files)"
            );
        }
        self.placer.bell.ring();
    }

    /// As [`TakeOver::take_over`].
    pub(crate) fn take_over(&self, applied: &Applied) -> Vec<RowChange> {
        TakeOver::of(self).take_over(applied)
    }

    /// Writes row changes to media. Durable when this returns.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn write_rows(&self, changes: &[RowChange]) -> Result<(), StoreError> {
        if changes.is_empty() {
            return Ok(());
        }
        let mut tx = self.store.begin_with_room()?;
        let mut room = self.store.room_for_ops();
        let mut never_made = Vec::new();
        for change in changes {
            match change {
                RowChange::Put(row) => {
                    // A part of a batch was given back while its session ended, and the row with it: it must
                    // not come again. Nor must a part that a digest took out since the row was looked at:
                    // parts only ever go.
                    let now = tx.grant(row.lease)?.map(|now| now.batch & row.batch);
                    match now {
                        None => {}
                        Some(0) => tx.grant_remove(row.lease)?,
                        Some(batch) => tx.grant_put(&GrantRow { batch, ..*row })?,
                    }
                }
                RowChange::Remove(lease) => match tx.grant_remove(*lease) {
                    Ok(()) | Err(StoreError::NoGrant(_)) => {}
                    Err(error) => return Err(error),
                },
                RowChange::FreeNumber(key) => match tx.release_inode(*key) {
                    Ok(()) => never_made.push(*key),
                    // Made by now, and perhaps gone again.
                    Err(StoreError::NoInode(_)) => {}
                    Err(error) => return Err(error),
                },
            }
            // The inodes of a number may have to come back from a slower tier.
            room -= usize::from(matches!(change, RowChange::FreeNumber(_)));
            if tx.room_at_least(varve_store::OP_ROOM) < varve_store::OP_ROOM || room == 0 {
                tx.commit()?;
                tx = self.store.begin_with_room()?;
                room = self.store.room_for_ops();
            }
        }
        tx.commit()?;
        if !never_made.is_empty() {
            self.locked().unlearn(&never_made);
        }
        Ok(())
    }

    /// A session has obeyed a barrier.
    pub(crate) fn barrier_ack(&self, session: &Session, tx: varve_format::TxId) {
        let mut sessions = self.locked();
        if let Some(member) = sessions.entries.get_mut(&session.id) {
            // Only this one: digests and moves in several threads may send theirs in another order than they
            // commit.
            if let Some(barrier) = member.barriers.get_mut(&tx) {
                barrier.parts = barrier.parts.saturating_sub(1);
                if barrier.parts == 0 {
                    member.barriers.remove(&tx);
                }
            }
        }
        self.store.set_reader_horizon(sessions.reader_horizon());
    }

    /// Frees inodes that lost their last hold and have no name, for about [`FREE_MS`]: sessions that ended,
    /// and whoever waits for their leases, wait for the thread that does this. The rest is left to the next
    /// tick.
    pub(crate) fn free_unheld(&self) {
        self.free_unheld_for(FREE_MS);
    }

    /// As [`free_unheld`](Self::free_unheld), for so many milliseconds; whether the time was too short.
    pub(crate) fn free_unheld_for(&self, ms: u64) -> bool {
        if self.in_grace() || self.store.latched().is_some() {
            return false;
        }
        let started_ms = self.now_ms();
        loop {
            let keys: Vec<_> = {
                let mut sessions = self.locked();
                let next = || sessions.unheld.pop_first();
                std::iter::from_fn(next).take(FREED_AT_ONCE).collect()
            };
            if keys.is_empty() || !self.free_these(&keys) {
                return false;
            }
            if self.now_ms() >= started_ms.saturating_add(ms) {
                self.lifecycle.bell.ring();
                return true;
            }
        }
    }

    /// Frees those of `keys` that may be freed; what needs more than one transaction is unheld again.
    /// `false`: not now.
    fn free_these(&self, keys: &[InodeKey]) -> bool {
        let change = self.begin_change();
        let freed = digest::free_orphans(&self.store, keys, &LeaseView(self));
        drop(change);
        match freed {
            Ok(freed) => {
                self.locked().unheld.extend(freed.left);
                self.forget_freed(&freed.gone);
                true
            }
            // One that is damaged, or that there is no space for, keeps no other.
            Err(error) if keys.len() > 1 && !error.stops_writing() => {
                let kept = keys
                    .iter()
                    .position(|key| !self.free_these(std::slice::from_ref(key)));
                if let Some(kept) = kept {
                    self.locked().unheld.extend(&keys[kept + 1..]);
                }
                kept.is_none()
            }
            Err(error) if error.is_no_space() => {
                self.locked().unheld.extend(keys);
                self.wait_for_space(&error);
                false
            }
            Err(error) => {
                tracing::error!("inode {:?} without a name cannot be freed: {error}", keys.first());
                self.note_error(&error);
                !error.stops_writing()
            }
        }
    }

    /// Leases, holds and rows of inodes that are gone.
    fn forget_freed(&self, keys: &[InodeKey]) {
        let sessions: Vec<_> = {
            let mut sessions = self.locked();
            for key in keys {
                sessions.table.forget_inode(*key);
                sessions.holds.forget(*key);
            }
            sessions.unlearn(keys);
            let with_row = |session: &Arc<Session>| {
                let row = |key: &InodeKey| sessions.rows.find(session.id, *key).is_some();
                keys.iter().any(row)
            };
            let sessions = sessions
                .entries
                .values()
                .map(|member| Arc::clone(&member.session));
            sessions.filter(with_row).collect()
        };
        for session in sessions {
            // The session cannot end between the two: rows end before their session.
            let _one_at_a_time = session.row_changes.lock();
            let mut changes = Vec::new();
            {
                let mut sessions = self.locked();
                for key in keys {
                    changes.extend(sessions.rows.end_change(session.id, *key));
                    sessions.rows.end(session.id, *key);
                }
            }
            if let Err(error) = self.write_rows(&changes) {
                self.note_error(&error);
            }
        }
    }
}

#[cfg(test)]
mod barriers;
