//! Starting, the work of time, digesting everything, stopping.

use crate::config::VerifyNvm;
use crate::counters::Counters;
use crate::error::KernelError;
use crate::health::Health;
use crate::kernel::{Env, KernelFs, Lifecycle, Parts, SpaceLimits};
use crate::leases::{Limits, Table};
use crate::ops::holds::HeldInodes;
use crate::ops::recovery::Recovery;
use crate::ops::sharing::Sharing;
use crate::ops::teardown::Teardown;
use crate::placement::jobs::Placer;
use crate::session::table::{SessionTable, Sessions};
use crate::user_segments::Segments;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use varve_format::LeaseNo;
use varve_store::{Store, StoreError};

/// Lease numbers taken from the journal at once: for one run of the daemon.
const LEASE_NUMBERS: u64 = 1 << 40;

impl KernelFs {
    /// Takes a pool into service: seals and digests every session of an earlier daemon, then is ready.
    ///
    /// # Errors
    /// Settings out of bounds; the store's and the logs', unless a device failed after the pool was open:
    /// then it starts read-only.
    pub fn open(parts: Parts) -> Result<Arc<Self>, KernelError> {
        parts.config.validate()?;
        let Parts {
            mut store,
            logs,
            config,
            clock,
            placement,
            owner_uid,
            fsck,
            scrub,
            tokens,
        } = parts;
        let verify = config.verify_nvm_reads.on(logs.needs_sync());
        store.set_verify_nvm(verify != VerifyNvm::Never);
        // Before the first transaction: from here on no client of an earlier daemon believes what it reads or
        // wrote.
        for page in logs.pages()? {
            page.seal();
        }
        varve_ipc::page::membarrier();
        logs.drop_left_copies();
        let base_limit = store.newest_tx();
        let limits = Limits {
            min_hold_ms: config.min_hold_ms,
            lease_ms: config.lease_ms,
        };
        let first_lease = match first_lease(&store) {
            Ok(lease) => lease,
            Err(error) if error.is_device() => LeaseNo(1),
            Err(error) => return Err(error.into()),
        };
        let kernel = Self {
            sessions: Sessions::new(SessionTable::new(Table::new(limits, first_lease))),
            env: Env {
                started_ms: clock.monotonic_ms(),
                grace_until_ms: AtomicU64::new(clock.monotonic_ms() + config.grace_ms),
                config,
                clock,
                owner_uid,
                fsck,
                scrub,
                tokens,
            },
            store,
            logs,
            placer: Placer::new(placement),
            segments: Segments::default(),
            health: Health::default(),
            counters: Counters::default(),
            lifecycle: Lifecycle::default(),
            space: SpaceLimits::default(),
        };
        Recovery::of(&kernel).recover(base_limit)?;
        Ok(Arc::new(kernel))
    }

    /// Work that time or others' misbehaviour makes necessary: late sessions, ended processes, logs left to
    /// digest, inodes to free. Also what background threads do; a deterministic test calls it instead of
    /// them.
    pub fn tick(&self) {
        let now_ms = self.now_ms();
        self.sessions.table.lock().pump(now_ms);
        Teardown::of(self).seal_doomed();
        Teardown::of(self).finish_sealed();
        Teardown::of(self).reap(now_ms);
        HeldInodes::of(self).free_unheld();
        Sharing::of(self).note_solitude(now_ms);
    }

    /// Ends all sessions and empties the journal. Requests fail with `Gone` from now on; those under way have
    /// ended when this returns, so that the pool may be opened again at once, in this process too. Always
    /// ends: what a failed device keeps from being digested stays in the logs, and a request that it keeps
    /// from ending, for longer than any may wait, changes nothing any more.
    ///
    /// # Errors
    /// The first error of a device; everything else was done.
    pub fn shutdown(&self) -> Result<(), StoreError> {
        self.lifecycle.stopping.store(true, Ordering::Release);
        self.store.end_checks();
        self.end_sessions();
        self.lifecycle.in_flight.close();
        // Those that were asked for meanwhile, too.
        self.store.end_checks();
        let mut left_ms = self.env.config.wait_ms;
        // Who comes now is counted for a moment and sent away: what was over once is over.
        let mut over = self.lifecycle.in_flight.are_over();
        while !over && left_ms > 0 {
            self.env.clock.pause(Duration::from_millis(1));
            Teardown::of(self).finish_sealed();
            left_ms -= 1;
            over = self.lifecycle.in_flight.are_over();
        }
        if !over {
            tracing::warn!("some requests did not end in time: what they have not committed they do not");
        }
        // Of those that had begun before.
        self.end_sessions();
        let ended = match self.store.latched() {
            Some(reason) => Err(StoreError::Latched(reason)),
            None => self
                .store
                .checkpoint()
                .inspect_err(|error| self.note_error(error)),
        };
        // Whoever still has this object, and whatever they do with it: the pool may have another daemon from
        // here on.
        self.store.close("the daemon has stopped");
        ended
    }

    fn end_sessions(&self) {
        let ids: Vec<_> = self.sessions.table.lock().entries.keys().copied().collect();
        for id in ids {
            Teardown::of(self).seal_session(id, "the daemon stops");
        }
        Teardown::of(self).finish_sealed();
    }
}

fn first_lease(store: &Store) -> Result<LeaseNo, StoreError> {
    let mut tx = store.begin()?;
    let first = tx.next_lease_nos(LEASE_NUMBERS)?;
    tx.commit()?;
    Ok(first)
}
