//! Runs digests, and applies their results: pages, barriers, reservations, holds, rows.

use crate::counters::Counters;
use crate::digest::pipeline::BatchPrefetch;
use crate::digest::{
    self, Applied, Batch, BatchLimit, Client, Digested, Environment, FETCH_BLOCKS, GatherLimits, Leases,
    SessionLog, Source,
};
use crate::health::Health;
use crate::kernel::{BaseLimit, Core, Env, KernelFs};
use crate::leases::grants::RowChange;
use crate::ops::rows::write_rows;
use crate::placement::jobs::Placer;
use crate::session::state::{Reader, Session};
use crate::session::table::{Barrier, SessionTable, Sessions};
use crate::user_segments::Segments;
use parking_lot::MutexGuard;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use varve_format::log::HEADER_SIZE;
use varve_format::session::GrantRow;
use varve_format::{InodeKey, LogSeq, Seal, SessionId};
use varve_ipc::{PageState, SessionPage, Upcall};
use varve_media::Region;
use varve_store::StoreError;

/// Write payloads of at least this length are copied straight from the log to their blocks.
const LEAVE_BYTES: usize = 1024;

/// Most files that one barrier names.
const BARRIER_KEYS_MAX: usize = 4096;

/// Interval of log messages about a lack of space, in milliseconds.
const NO_SPACE_TOLD_MS: u64 = 60_000;

/// Returns the size of a batch. Two batches are under way at a time, one gathered and one applied; the client
/// must have chunks to write to meanwhile. Batches pass from one processor to the other, and small ones stay
/// in the cache. The number of entries stays at the default, so that other users of the transaction (requests
/// for leases and numbers, of any session) soon go on.
fn batch_limits(log_bytes: u64) -> GatherLimits {
    let limits = GatherLimits::default();
    GatherLimits {
        bytes: ((log_bytes / 8) as usize).clamp(limits.bytes / 8, limits.bytes),
        leave_bytes: LEAVE_BYTES,
        ..limits
    }
}

/// The leases as a digest sees them.
pub(crate) struct LeaseView<'k> {
    env: &'k Env,
    sessions: &'k Sessions,
}

impl<'k> LeaseView<'k> {
    pub(crate) const fn of(core: Core<'k>) -> Self {
        Self {
            env: core.env,
            sessions: core.sessions,
        }
    }

    fn locked(&self) -> MutexGuard<'k, SessionTable> {
        self.sessions.table.lock()
    }
}

impl Leases for LeaseView<'_> {
    fn grants(&self, session: SessionId, key: InodeKey, out: &mut Vec<GrantRow>) {
        out.extend(self.locked().rows.find(session, key).copied());
    }

    fn held(&self, key: InodeKey, except: &[SessionId]) -> bool {
        // Clients that have not reconnected yet may hold any inode.
        self.env.in_grace() || self.locked().holds.held(key, except)
    }

    fn in_group(&self, session: SessionId, gid: u32) -> bool {
        let sessions = self.locked();
        sessions
            .any(session)
            .is_some_and(|session| session.cred.in_group(gid))
    }

    fn may_give(&self, session: SessionId, gid: u32) -> bool {
        let sessions = self.locked();
        sessions
            .any(session)
            .is_some_and(|session| session.groups_unknown || session.cred.in_group(gid))
    }

    fn had(&self, session: SessionId, key: InodeKey) -> u32 {
        self.locked().any(session).map_or(0, |session| session.had(key))
    }

    fn reserved(&self, session: SessionId) -> Option<u64> {
        let sessions = self.locked();
        let session = &sessions.entries.get(&session)?.session;
        // A session's reservations before a restart are not known.
        (!session.of_earlier_daemon).then(|| session.reserved.load(Ordering::Acquire))
    }
}

/// Context of applying a digest's changes to the daemon's state.
#[derive(Clone, Copy)]
pub(crate) struct TakeOver<'k> {
    core: Core<'k>,
    segments: &'k Segments,
    counters: &'k Counters,
    placer: &'k Placer,
}

impl<'k> TakeOver<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) const fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            segments: &kernel.segments,
            counters: &kernel.counters,
            placer: &kernel.placer,
        }
    }

    /// Applies the changes of one durable record to the daemon's state. Returns row changes that are still to
    /// be written.
    pub(crate) fn take_over(&self, applied: &Applied) -> Vec<RowChange> {
        let until_ms = self.core.now_ms() + self.core.env.config.lease_ms;
        self.counters.add(&applied.counts);
        self.placer.note_pins(applied.pinned);
        // A hostile log may hold thousands of bad transactions.
        for (session, refused) in applied.refused.iter().take(8) {
            tracing::warn!(%session, seq = %refused.seq, "a transaction was refused: {}", refused.why);
        }
        let mut sessions = self.core.locked();
        let sessions = &mut *sessions;
        for member in sessions.entries.values() {
            member.session.page.set_committed_tx(applied.tx);
        }
        for (id, blocks) in &applied.charged {
            if let Some(member) = sessions.entries.get(id) {
                self.core.store.unreserve(member.session.spend(*blocks));
            }
        }
        for (session, key) in &applied.unheld {
            sessions.unhold(*session, *key);
        }
        // The last hold may have gone between the digest's check and its record.
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
        // A row that the record wrote is up to date: it lost all these inodes there. A row that was added
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
        self.core.store.set_reader_horizon(sessions.reader_horizon());
        changes
    }

    /// Notes that a session has obeyed a barrier.
    pub(crate) fn barrier_ack(&self, session: &Session, tx: varve_format::TxId) {
        let mut sessions = self.core.locked();
        if let Some(member) = sessions.entries.get_mut(&session.id) {
            // Acknowledges this barrier only: digests and moves in several threads may send theirs in another
            // order than they commit.
            if let Some(barrier) = member.barriers.get_mut(&tx) {
                barrier.parts = barrier.parts.saturating_sub(1);
                if barrier.parts == 0 {
                    member.barriers.remove(&tx);
                }
            }
        }
        self.core.store.set_reader_horizon(sessions.reader_horizon());
    }
}

/// Context of digesting logs.
#[derive(Clone, Copy)]
pub(crate) struct Digests<'k> {
    core: Core<'k>,
    health: &'k Health,
    counters: &'k Counters,
    placer: &'k Placer,
    take_over: TakeOver<'k>,
}

impl<'k> Digests<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) const fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            health: &kernel.health,
            counters: &kernel.counters,
            placer: &kernel.placer,
            take_over: TakeOver::of(kernel),
        }
    }

    pub(crate) fn environment<'a>(&self, leases: &'a LeaseView<'a>) -> Environment<'a>
    where
        'k: 'a,
    {
        Environment {
            leases,
            placement: &*self.placer.policy,
            pins: &self.placer.pins,
            now_ns: self.core.env.clock.now_ns(),
            dedup_scope: self.core.env.config.dedup_scope,
            rejoin: false,
            // Without room for their new places nothing comes of old blocks.
            fetch_blocks: match self.counters.no_space_ms.load(Ordering::Relaxed) {
                0 => FETCH_BLOCKS,
                _ => 0,
            },
        }
    }

    /// Digests a session's log as far as it is contiguous and, if given, up to `upto`: at least its present
    /// entries. Returns the digested number. Durable.
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
            // Its client may have appended since, and repeats those operations elsewhere: only entries that
            // its seal covers count.
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

    /// Digests the committed entries of all logs.
    ///
    /// # Errors
    /// The store's; every log was tried.
    pub(crate) fn digest_all(&self) -> Result<(), StoreError> {
        let sessions: Vec<_> = {
            let sessions = self.core.locked();
            sessions
                .entries
                .values()
                .map(|member| Arc::clone(&member.session))
                .collect()
        };
        let next = AtomicUsize::new(0);
        let work = || {
            let mut first = Ok(());
            while let Some(session) = sessions.get(next.fetch_add(1, Ordering::Relaxed)) {
                let digested = self.digest_session(session, None);
                first = first.and(digested.map(|_| ()));
            }
            first
        };
        // A deterministic test starts no threads of its own accord.
        let background = self.core.lifecycle.background.load(Ordering::Acquire);
        let threads = if background {
            self.core.env.config.digest_threads()
        } else {
            1
        };
        std::thread::scope(|scope| {
            let spawn = |_| {
                let thread = std::thread::Builder::new().name("varve-digest".into());
                // If a thread cannot be started, the others do its part.
                thread.spawn_scoped(scope, work).ok()
            };
            let others: Vec<_> = (1..threads.min(sessions.len())).filter_map(spawn).collect();
            let mut first = work();
            for other in others {
                first = first.and(other.join().unwrap_or(Ok(())));
            }
            first
        })
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
        // Set when a payload that was left in the log did not match its header: from then on all payloads are
        // checked before the fold.
        let unsure = AtomicBool::new(false);
        let gather = |reading: &SessionLog, digested| {
            let newest_tx = || limit.newest(self.core.store);
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
                            .log_failed(session.id, Some(&session.log_faults), &error);
                        let error = StoreError::from(error);
                        // The entries exist nowhere else: sessions that wait for its leases would wait for
                        // ever.
                        if error.is_device() {
                            self.core.stop_writing(&error);
                        }
                        break Err(error);
                    }
                };
                if batch.upto <= reader.digested {
                    break Ok(reader.digested);
                }
                let entries = batch.upto.0 - reader.digested.0;
                done_bytes += batch.log_bytes.max(entries * HEADER_SIZE as u64);
                // These batches hold everything that was in the log at the beginning, so the request is
                // satisfied. A client may log as fast as this loop digests, and other sessions, and a seal,
                // wait for the thread and the reader.
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
                    // The other devices of its tier take the batch: each device is lost once.
                    Err(error) if error.is_device_lost() => continue,
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
                self.core.note_error(error);
            }
        }
        result
    }

    /// Digests one batch, and advances the reader. On an error the reader stands behind the last durable
    /// record.
    fn apply_batch(
        &self,
        session: &Arc<Session>,
        reader: &mut Reader,
        batch: &Batch,
        log: &dyn Region,
    ) -> Result<Digested, StoreError> {
        if !batch.refused.is_empty() {
            session.suspect();
        }
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
        let view = LeaseView::of(self.core);
        let env = self.environment(&view);
        let sources = [Source { batch, log, client }];
        let mut gone = Vec::new();
        let begin_change = || self.core.begin_change();
        let done = digest::digest(self.core.store, &sources, &env, begin_change, &mut |applied| {
            for (id, upto) in &applied.digested {
                if *id == session.id {
                    reader.digested = reader.digested.max(*upto);
                }
            }
            if !applied.refused.is_empty() {
                session.suspect();
            }
            gone.extend(self.take_over(applied));
            session.page.set_digested(reader.digested);
        });
        let done = done?;
        write_rows(self.core, &gone)?;
        if done == Digested::Unsure {
            return Ok(done);
        }
        reader.log.digested(batch);
        reader.digested = reader.digested.max(batch.upto);
        session.page.set_digested(reader.digested);
        self.counters.digests.fetch_add(1, Ordering::Relaxed);
        Ok(done)
    }

    /// Leaves logs as they are until there is space again: asks the mover to make some, and logs a message
    /// once a minute.
    pub(crate) fn wait_for_space(&self, error: &StoreError) {
        let now_ms = self.core.now_ms().max(1);
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
        self.take_over.take_over(applied)
    }
}

#[cfg(test)]
mod barriers;
