//! State and counters for operators. Counts and shows; decides nothing.

use crate::counters::Counters;
use crate::health::{Health, LogsStatus, MediumStatus};
use crate::kernel::{Env, KernelFs};
use crate::leases::{LeaseDetail, WaitStatus};
use crate::ops::devices::{DeviceOps, TierDevice};
use crate::ops::jobs::Jobs;
use crate::placement::jobs::Placer;
use crate::placement::{DeviceFigures, JobStatus, MovedStatus, PlacementStatus, TierHeat};
use crate::session::table::{Phase, SessionEntry, SessionTable, Sessions};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_format::{SessionId, Tier};
use varve_media::DeviceState;
use varve_store::{DemotionStats, Passes, SpaceStats, Store};

/// One tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierStatus {
    /// `nvm`, `ssd` or `hdd`.
    pub tier: String,
    /// Description of its device.
    pub device: String,
    /// Capacity in bytes.
    pub capacity_bytes: u64,
    /// In use, in bytes.
    pub used_bytes: u64,
    /// Freed, but not to be reused yet, in bytes.
    pub pending_bytes: u64,
    /// `ok`, or why the device failed.
    #[serde(default)]
    pub state: String,
    /// Read by the daemon since it started, in bytes. Excludes the reads of NVM that privileged clients do by
    /// themselves.
    #[serde(default)]
    pub read_bytes: u64,
    /// Written by the daemon since it started, metadata included, in bytes.
    #[serde(default)]
    pub written_bytes: u64,
    /// Moved here from other tiers since the daemon started, in bytes.
    #[serde(default)]
    pub moved_in_bytes: u64,
    /// Moved away to other tiers since the daemon started, in bytes.
    #[serde(default)]
    pub moved_out_bytes: u64,
    /// Accesses to its data that placement has counted.
    #[serde(default)]
    pub accesses: TierHeat,
    /// It is evacuated: it takes new data only when no other tier has room.
    #[serde(default)]
    pub evacuated: bool,
    /// Measured speed of its device.
    #[serde(default)]
    pub figures: DeviceFigures,
}

/// One session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Number.
    pub id: u64,
    /// Process.
    pub pid: u32,
    /// User.
    pub uid: u32,
    /// `shim` or `linked`.
    pub kind: String,
    /// `live` or `sealing`.
    pub state: String,
    /// For a mount, `shared` if it knows of other sessions, and opens files for writing past the kernel's page
    /// cache, or `exclusive`. For others empty.
    #[serde(default)]
    pub kernel: String,
    /// Reads only.
    pub read_only: bool,
    /// Bytes of its log.
    pub log_bytes: u64,
    /// Bytes of the log that hold undigested entries; `None` while it is being digested.
    #[serde(default)]
    pub log_used_bytes: Option<u64>,
    /// Everything up to this number is digested.
    pub digested: u64,
    /// Leases.
    pub leases: u64,
    /// Inodes that it keeps alive.
    pub holds: u64,
    /// Requests that wait for a lease.
    pub waits: u64,
    /// Leases that it was asked to give back and has not.
    #[serde(default)]
    pub asked_back: u64,
    /// Blocks reserved for it.
    pub credits: u64,
    /// `ok`, or why its log could not be written or read.
    #[serde(default)]
    pub log_state: String,
}

/// The digest since the daemon started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DigestStatus {
    /// Batches.
    pub batches: u64,
    /// Operations taken in.
    pub operations: u64,
    /// Operations refused.
    pub refused: u64,
    /// Bytes of file data in them.
    pub bytes_in: u64,
    /// Bytes of file data written; the rest was dropped.
    pub bytes_out: u64,
    /// Bytes of file data dropped, because they were overwritten or deleted before they were digested.
    #[serde(default)]
    pub dropped_bytes: u64,
    /// Writes merged with a neighbour.
    pub merged: u64,
    /// Short-lived files elided: made and deleted before they were written.
    pub vanished: u64,
}

/// Leases since the daemon started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// Requests granted.
    pub grants: u64,
    /// Granted requests that had to wait.
    pub waits: u64,
    /// Operations done by the daemon.
    pub mediated: u64,
    /// Sessions sealed.
    pub seals: u64,
    /// Durable rows at the moment.
    pub rows: u64,
    /// Inodes that sessions take from each other for little work, so that the daemon makes their changes.
    #[serde(default)]
    pub contended: u64,
    /// Requests of sessions, of every kind.
    #[serde(default)]
    pub requests: u64,
}

/// Output of `varve status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The pool, in hexadecimal.
    pub pool: String,
    /// The daemon's process.
    pub pid: u32,
    /// Milliseconds since the daemon started: a counter's growth divided by the growth of this is a rate.
    #[serde(default)]
    pub uptime_ms: u64,
    /// Newest transaction.
    pub newest_tx: u64,
    /// Why the pool is read-only, if it is.
    pub latched: Option<String>,
    /// The journal's device: `ok`, or why it failed.
    #[serde(default)]
    pub journal_state: String,
    /// Tiers of the pool.
    pub tiers: Vec<TierStatus>,
    /// Faults of each medium since the daemon started: tiers, journal, logs.
    #[serde(default)]
    pub media: Vec<MediumStatus>,
    /// Logs with faults since the daemon started.
    #[serde(default)]
    pub logs: LogsStatus,
    /// The last checks of all structures and of all data (`fsck` and `scrub` of the served pool).
    #[serde(default)]
    pub checks: Passes,
    /// Blocks reserved for sessions.
    pub reserved_blocks: u64,
    /// Inodes in use.
    pub inodes_used: u64,
    /// Inodes that can still be made.
    pub inodes_free: u64,
    /// Sessions, by number.
    pub sessions: Vec<SessionStatus>,
    /// Sealed sessions whose client may come back.
    pub ended_sessions: u64,
    /// Metadata on slower tiers, since the daemon started, in blocks.
    #[serde(default)]
    pub metadata: DemotionStats,
    /// Digest.
    pub digest: DigestStatus,
    /// Leases.
    pub leases: LeaseStatus,
    /// Waiting requests with the sessions that they wait for, oldest first.
    #[serde(default)]
    pub waiting: Vec<WaitStatus>,
    /// Background jobs and their obstacles.
    pub jobs: Vec<String>,
    /// Policy that decides on the place of data.
    #[serde(default)]
    pub placement_policy: String,
    /// What was moved between tiers, by cause.
    #[serde(default)]
    pub moved: Vec<MovedStatus>,
    /// Those jobs that move data between tiers.
    #[serde(default)]
    pub placement: Vec<PlacementStatus>,
    /// Jobs of operators (`varve jobs`).
    #[serde(default)]
    pub operator_jobs: Vec<JobStatus>,
    /// The devices of SSD and HDD.
    #[serde(default)]
    pub devices: Vec<TierDevice>,
}

/// Output of `varve debug session`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionDetail {
    /// As in the status.
    pub session: SessionStatus,
    /// Opened, in nanoseconds since 1970.
    pub created_ns: i64,
    /// It may act for any credentials and reads NVM by itself.
    pub privileged: bool,
    /// Inodes that an unprivileged session may name: those that it has looked up or made, and that still
    /// exist.
    #[serde(default)]
    pub known: u64,
    /// Its leases, oldest first; at most 1000.
    pub leases: Vec<LeaseDetail>,
    /// Requests of this session that wait.
    pub waiting: Vec<WaitStatus>,
    /// Requests that wait for this session.
    pub awaited: Vec<WaitStatus>,
    /// Messages of the daemon that it has not taken.
    pub upcalls: u64,
    /// Messages about moved blocks that it has not answered.
    pub barriers: u64,
}

/// Most leases that [`SessionDetail`] names.
pub const LEASES_SHOWN: usize = 1000;

/// Context of a status.
pub(crate) struct View<'k> {
    store: &'k Store,
    sessions: &'k Sessions,
    placer: &'k Placer,
    health: &'k Health,
    counters: &'k Counters,
    env: &'k Env,
    jobs: Jobs<'k>,
    devices: DeviceOps<'k>,
}

impl<'k> View<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            store: &kernel.store,
            sessions: &kernel.sessions,
            placer: &kernel.placer,
            health: &kernel.health,
            counters: &kernel.counters,
            env: &kernel.env,
            jobs: Jobs::of(kernel),
            devices: DeviceOps::of(kernel),
        }
    }

    /// See [`KernelFs::session_detail`].
    pub(crate) fn session_detail(&self, id: SessionId) -> Option<SessionDetail> {
        let used = self.log_fill();
        let now_ms = self.env.clock.monotonic_ms();
        let sessions = self.sessions.table.lock();
        let member = sessions.entries.get(&id)?;
        let waits = sessions.table.waits(now_ms);
        let (waiting, others): (Vec<_>, Vec<_>) = waits.into_iter().partition(|wait| wait.session == id.0);
        let in_the_way = |wait: &WaitStatus| wait.holders.iter().any(|holder| holder.session == id.0);
        Some(SessionDetail {
            session: session_status(&sessions, member, &used),
            created_ns: member.session.created_ns,
            privileged: member.session.privileged,
            known: member.session.known_count() as u64,
            leases: sessions.table.leases_of(id, LEASES_SHOWN, now_ms),
            waiting,
            awaited: others.into_iter().filter(in_the_way).collect(),
            upcalls: member.session.upcalls.len() as u64,
            barriers: member.barriers.len() as u64,
        })
    }

    fn tiers(&self, space: &SpaceStats) -> Vec<TierStatus> {
        let devices = self.store.devices();
        let block = varve_format::BLOCK_BYTES;
        let mut tiers = Vec::new();
        let io = self.store.io();
        let heat = self.placer.policy.served();
        for (tier, stats) in Tier::ALL.into_iter().zip(&space.tiers) {
            let (device, state) = match (tier, devices.block_device(tier)) {
                (Tier::Nvm, _) => (devices.nvm.info().to_string(), devices.nvm.state()),
                (_, Some(device)) => (device.info().to_string(), device.state()),
                (_, None) => continue,
            };
            tiers.push(TierStatus {
                tier: tier.name().into(),
                device,
                capacity_bytes: stats.total * block,
                used_bytes: stats.total.saturating_sub(stats.free + stats.pending) * block,
                pending_bytes: stats.pending * block,
                state: state_text(&state),
                read_bytes: io[tier as usize].read_bytes,
                written_bytes: io[tier as usize].written_bytes,
                moved_in_bytes: get(&self.placer.moved_in[tier as usize]) * block,
                moved_out_bytes: get(&self.placer.moved_out[tier as usize]) * block,
                accesses: heat[tier as usize],
                evacuated: stats.avoided,
                figures: DeviceFigures::of(self.placer.meters.tier(tier)),
            });
        }
        tiers
    }

    /// Returns the background jobs besides placement.
    fn jobs(&self, sessions: &SessionTable) -> Vec<String> {
        let mut jobs = if sessions.unheld.is_empty() {
            Vec::new()
        } else {
            let grace = if self.env.in_grace() {
                " (waiting: grace time for clients that come back)"
            } else {
                ""
            };
            vec![format!(
                "freeing {} inodes without a name{grace}",
                sessions.unheld.len()
            )]
        };
        if get(&self.counters.no_space_ms) > 0 {
            jobs.push(
                "digesting logs (waiting: the tiers, or the host's disk, have no space; delete or truncate \
                files)"
                    .into(),
            );
        }
        if get(&self.counters.no_space_ms) == 0 && !sessions.unfinished.is_empty() {
            jobs.push(format!(
                "digesting {} logs of ended sessions (waiting: something that they rest on is damaged, or \
                cannot be read; `fsck` names it)",
                sessions.unfinished.len()
            ));
        }
        jobs
    }

    /// See [`KernelFs::status`].
    pub(crate) fn status(&self) -> Status {
        let space = self.store.space();
        let tiers = self.tiers(&space);
        let placement = self.placer.jobs();
        // A damaged pool state is told by `latched` and `fsck`.
        let operator_jobs = self.jobs.list().unwrap_or_default();
        let devices = self.devices.list();
        let used = self.log_fill();
        let counters = &self.counters;
        let now_ms = || self.env.clock.monotonic_ms();
        let sessions = self.sessions.table.lock();
        let mut listed: Vec<_> = sessions
            .entries
            .values()
            .map(|member| session_status(&sessions, member, &used))
            .collect();
        listed.sort_unstable_by_key(|session| session.id);
        let mut jobs = self.jobs(&sessions);
        jobs.extend(placement.iter().map(ToString::to_string));
        Status {
            pool: self
                .store
                .pool_uuid()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
            pid: std::process::id(),
            uptime_ms: now_ms().saturating_sub(self.env.started_ms),
            newest_tx: self.store.newest_tx().0,
            latched: self.store.latched().map(|reason| reason.to_string()),
            journal_state: state_text(&self.store.devices().journal.state()),
            tiers,
            media: self.health.media_status(self.store),
            logs: self.health.logs_status(),
            checks: self.store.passes(),
            reserved_blocks: space.reserved,
            inodes_used: space.inodes_used,
            inodes_free: space.inodes_free,
            sessions: listed,
            ended_sessions: sessions.ended.len() as u64,
            metadata: self.store.demotion_stats(),
            digest: DigestStatus {
                batches: get(&counters.digests),
                operations: get(&counters.operations),
                refused: get(&counters.refused),
                bytes_in: get(&counters.bytes_in),
                bytes_out: get(&counters.bytes_out),
                dropped_bytes: get(&counters.bytes_in).saturating_sub(get(&counters.bytes_out)),
                merged: get(&counters.merged),
                vanished: get(&counters.vanished),
            },
            leases: LeaseStatus {
                grants: get(&counters.grants),
                waits: get(&counters.waits),
                mediated: get(&counters.forwarded),
                seals: get(&counters.seals),
                rows: sessions.rows.len() as u64,
                contended: sessions.table.contended(now_ms()) as u64,
                requests: get(&counters.requests),
            },
            waiting: sessions.table.waits(now_ms()),
            jobs,
            moved: self.placer.all_moved(),
            placement_policy: self.placer.policy.name().into(),
            placement,
            operator_jobs,
            devices,
        }
    }

    /// Returns the bytes of each log that wait to be digested; a log that is being digested is left out.
    fn log_fill(&self) -> HashMap<SessionId, u64> {
        let sessions: Vec<_> = self
            .sessions
            .table
            .lock()
            .entries
            .values()
            .map(|member| Arc::clone(&member.session))
            .collect();
        let mut fill = HashMap::new();
        for session in sessions {
            if let Some(log) = session.log.as_deref()
                && let Some(reader) = session.reader.try_lock()
            {
                match reader.log.pending_bytes(log, reader.digested) {
                    Ok(bytes) => drop(fill.insert(session.id, bytes)),
                    Err(error) => self
                        .health
                        .log_failed(session.id, Some(&session.log_faults), &error),
                }
            }
        }
        fill
    }
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn session_status(
    sessions: &SessionTable,
    member: &SessionEntry,
    used: &HashMap<SessionId, u64>,
) -> SessionStatus {
    let session = &member.session;
    SessionStatus {
        id: session.id.0,
        pid: session.peer.pid,
        uid: session.peer.uid,
        kind: match session.kind {
            varve_ipc::ClientKind::Shim => "shim".into(),
            varve_ipc::ClientKind::Linked => "linked".into(),
        },
        state: match member.phase {
            Phase::Live => "live".into(),
            Phase::Sealing => "sealing".into(),
        },
        kernel: match (session.kind, &member.shared_mode) {
            (varve_ipc::ClientKind::Linked, _) => String::new(),
            (_, shared_mode) if shared_mode.noted => "shared".into(),
            _ => "exclusive".into(),
        },
        read_only: session.read_only,
        log_bytes: session.log.as_ref().map_or(0, |log| log.len_bytes()),
        log_used_bytes: used.get(&session.id).copied(),
        digested: varve_ipc::SessionPage::digested(&*session.page).0,
        leases: sessions.table.count(session.id) as u64,
        holds: sessions.holds.count(session.id) as u64,
        waits: sessions.table.waiting(session.id) as u64,
        asked_back: sessions.table.asked_back(session.id) as u64,
        credits: session.reserved.load(Ordering::Relaxed),
        log_state: session.log_faults.text(),
    }
}

fn state_text(state: &DeviceState) -> String {
    match state {
        DeviceState::Ok => "ok".into(),
        DeviceState::Failed { reason } => format!("failed: {reason}"),
    }
}
