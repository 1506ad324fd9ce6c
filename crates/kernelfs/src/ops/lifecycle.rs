//! Starting, periodic work, stopping.

use crate::config::VerifyNvm;
use crate::counters::Counters;
use crate::error::KernelError;
use crate::health::Health;
use crate::kernel::{Core, Env, KernelFs, Lifecycle, Parts, SpaceLimits};
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
use varve_format::{BLOCK_BYTES, LeaseNo};
use varve_media::Verified;
use varve_store::{Store, StoreError};

/// Lease numbers taken from the journal for one run of the daemon.
const LEASE_NUMBERS: u64 = 1 << 40;

/// Makes an empty bitmap of compared NVM blocks. Shared with sessions where the host allows it.
fn new_verified(store: &Store) -> Arc<Verified> {
    let blocks = store.devices().nvm.len_bytes() / BLOCK_BYTES;
    Arc::new(Verified::shared(blocks).unwrap_or_else(|error| {
        tracing::warn!("each session compares what it reads from NVM for itself: {error}");
        Verified::heap(blocks)
    }))
}

/// Opens the daemon: see [`KernelFs::open`].
pub(crate) fn open(parts: Parts) -> Result<KernelFs, KernelError> {
    parts.config.validate()?;
    let Parts {
        mut store,
        logs,
        config,
        clock,
        placement,
        meters,
        rules,
        owner_uid,
        fsck,
        scrub,
        tokens,
    } = parts;
    let high_percent = config.placement_high_percent;
    let verify = config.verify_nvm_reads.on(logs.needs_sync());
    match verify {
        VerifyNvm::First => store.verify_nvm_once(new_verified(&store)),
        other => store.set_verify_nvm(other != VerifyNvm::Never),
    }
    // Must precede the first transaction: from here on no client of an earlier daemon trusts its reads or
    // writes.
    let pages = logs.pages()?;
    for page in &pages {
        page.seal();
    }
    varve_ipc::page::membarrier();
    logs.drop_left_copies();
    let base_limit = store.newest_tx();
    let is_durable = logs.fenced_is_durable(!config.users.is_owner_only());
    if config.overwrite_in_place && verify == VerifyNvm::Never && is_durable {
        match store.overwrite_in_place() {
            Err(error) if error.is_device() => {
                tracing::error!("blocks are not overwritten in place: {error}")
            }
            done => done?,
        }
    }
    let limits = Limits {
        min_hold_ms: config.min_hold_ms,
        lease_ms: config.lease_ms,
    };
    let first_lease = match first_lease(&store) {
        Ok(lease) => lease,
        Err(error) if error.is_device() => LeaseNo(1),
        Err(error) => return Err(error.into()),
    };
    let kernel = KernelFs {
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
        placer: Placer::new(placement, rules, high_percent.into(), meters),
        segments: Segments::default(),
        health: Health::default(),
        counters: Counters::default(),
        lifecycle: Lifecycle::default(),
        space: SpaceLimits::default(),
        session_ids: parking_lot::Mutex::default(),
    };
    let left = pages.iter().map(|page| page.session()).collect();
    Recovery::of(&kernel).recover(base_limit, left)?;
    Ok(kernel)
}

/// Context of periodic work.
pub(crate) struct Upkeep<'k> {
    core: Core<'k>,
    held: HeldInodes<'k>,
    sharing: Sharing<'k>,
    teardown: Teardown<'k>,
}

impl<'k> Upkeep<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            held: HeldInodes::of(kernel),
            sharing: Sharing::of(kernel),
            teardown: Teardown::of(kernel),
        }
    }

    /// See [`KernelFs::tick`].
    pub(crate) fn tick(&self) {
        let now_ms = self.core.now_ms();
        {
            let mut sessions = self.core.sessions.table.lock();
            sessions.cached.prune(self.core.env.tick_moment());
            sessions.pump(now_ms);
        }
        self.teardown.seal_doomed();
        self.teardown.finish_sealed();
        self.teardown.reap(now_ms);
        self.teardown.note_redone();
        self.held.free_unheld();
        self.sharing.note_exclusive(now_ms);
    }
}

/// Context of stopping.
pub(crate) struct Shutdown<'k> {
    core: Core<'k>,
    teardown: Teardown<'k>,
}

impl<'k> Shutdown<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            teardown: Teardown::of(kernel),
        }
    }

    /// See [`KernelFs::shutdown`].
    pub(crate) fn shutdown(&self) -> Result<(), StoreError> {
        self.core.lifecycle.stopping.store(true, Ordering::Release);
        self.core.store.end_checks();
        self.end_sessions();
        self.core.lifecycle.in_flight.close();
        // Also ends checks that were requested meanwhile.
        self.core.store.end_checks();
        let mut left_ms = self.core.env.config.wait_ms;
        // Later requests are counted for a moment and refused, so once there was no request under way, none
        // follows.
        let mut over = self.core.lifecycle.in_flight.are_over();
        while !over && left_ms > 0 {
            self.core.env.clock.pause(Duration::from_millis(1));
            self.teardown.finish_sealed();
            left_ms -= 1;
            over = self.core.lifecycle.in_flight.are_over();
        }
        if !over {
            tracing::warn!("some requests did not end in time: what they have not committed they do not");
        }
        // Sessions of requests that had begun before.
        self.end_sessions();
        let ended = match self.core.store.latched() {
            Some(reason) => Err(StoreError::Latched(reason)),
            None => self
                .core
                .store
                .checkpoint()
                .and_then(|()| if over { self.end_in_place() } else { Ok(()) })
                .inspect_err(|error| self.core.note_error(error)),
        };
        // Stops the store for all remaining owners of this object: the pool may have another daemon from here
        // on.
        self.core.store.close("the daemon has stopped");
        ended
    }

    /// Records that the next start needs no log: any program that knows the pool's version may open it.
    fn end_in_place(&self) -> Result<(), StoreError> {
        let nothing_waits = {
            let sessions = self.core.locked();
            sessions.entries.is_empty() && sessions.unfinished.is_empty() && sessions.to_finish.is_empty()
        };
        if nothing_waits {
            self.core.store.end_in_place()?;
        }
        Ok(())
    }

    fn end_sessions(&self) {
        let ids: Vec<_> = self.core.sessions.table.lock().entries.keys().copied().collect();
        for id in ids {
            self.teardown.seal_session(id, "the daemon stops");
        }
        self.teardown.finish_sealed();
    }
}

fn first_lease(store: &Store) -> Result<LeaseNo, StoreError> {
    let mut tx = store.begin()?;
    let first = tx.next_lease_nos(LEASE_NUMBERS)?;
    tx.commit()?;
    Ok(first)
}
