//! Faults of the media, for the status: counts of the store's devices, the daemon's own faults with logs, and
//! clients' reports. Remembers and shows; decides nothing.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use varve_format::{SessionId, Tier, TimeNs};
use varve_ipc::ClientFault;
use varve_media::MediaError;
use varve_media::stats::{MediaFault, MediaFaultKind, MediaStats, SLOW, Tally};
use varve_store::Store;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthStatus {
    /// Description for a person.
    pub text: String,
    /// Place on the medium; empty: not known, or all of it.
    pub place: String,
    /// Time, in nanoseconds since 1970.
    pub time_ns: TimeNs,
}

/// Faults of one medium since the daemon started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediumStatus {
    /// `nvm`, `ssd`, `hdd`, `journal`, or `logs` for the logs of all sessions.
    pub medium: String,
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes, flushes and syncs that failed.
    pub write_errors: u64,
    /// Reads that returned other data than was written.
    pub checksum_errors: u64,
    /// Writes that found no space on the host.
    pub no_space: u64,
    /// Transfers that took a second or longer.
    pub slow: u64,
    /// The longest transfer, in milliseconds.
    pub longest_ms: u64,
    /// The last fault, slow transfers left out.
    pub last: Option<HealthStatus>,
    /// The last slow transfer.
    pub last_slow: Option<HealthStatus>,
}

impl MediumStatus {
    fn new(medium: &str, tally: Tally) -> Self {
        let shown = |fault: Option<MediaFault>| {
            fault.map(|fault| HealthStatus {
                text: fault.text,
                place: fault.place,
                time_ns: fault.time_ns,
            })
        };
        Self {
            medium: medium.to_owned(),
            read_errors: tally.read_errors,
            write_errors: tally.write_errors,
            checksum_errors: tally.checksum_errors,
            no_space: tally.no_space,
            slow: tally.slow,
            longest_ms: tally.longest.as_millis() as u64,
            last: shown(tally.last),
            last_slow: shown(tally.last_slow),
        }
    }

    /// Whether there was neither a fault nor a slow transfer.
    #[must_use]
    pub const fn is_quiet(&self) -> bool {
        self.last.is_none() && self.last_slow.is_none()
    }
}

/// Logs with faults, since the daemon started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogsStatus {
    /// Logs with a damaged part; the entries behind it were left out.
    pub damaged: u64,
    /// Sessions whose log could not be written or read.
    pub failed: u64,
}

/// Faults of the media and of all sessions' logs.
#[derive(Debug, Default)]
pub(crate) struct Health {
    stats: MediaStats,
    damaged: AtomicU64,
    failed: AtomicU64,
}

/// Faults of one session's log.
#[derive(Debug, Default)]
pub(crate) struct LogFaults {
    failed: AtomicBool,
    /// The last failure.
    text: Mutex<Option<String>>,
}

impl LogFaults {
    /// Returns `ok`, or the last failure of the log.
    pub(crate) fn text(&self) -> String {
        self.text.lock().clone().unwrap_or_else(|| "ok".into())
    }
}

/// The session whose client reports a fault.
pub(crate) struct Reporter<'s> {
    pub(crate) id: SessionId,
    pub(crate) pid: u32,
    pub(crate) log: &'s LogFaults,
    /// Maps all of the NVM.
    pub(crate) privileged: bool,
}

impl Health {
    /// Returns the faults of each medium of the pool.
    pub(crate) fn media_status(&self, store: &Store) -> Vec<MediumStatus> {
        let (devices, media_stats) = (store.devices(), store.media_stats());
        let there = |tier: &Tier| *tier == Tier::Nvm || devices.block_device(*tier).is_some();
        let tiers = Tier::ALL.into_iter().filter(there);
        let tiers = tiers.map(|tier| MediumStatus::new(tier.name(), media_stats.tier(tier).tally()));
        let others = [("journal", media_stats.journal()), ("logs", &self.stats)];
        let others = others.map(|(name, stats)| MediumStatus::new(name, stats.tally()));
        tiers.chain(others).collect()
    }

    pub(crate) fn logs_status(&self) -> LogsStatus {
        LogsStatus {
            damaged: self.damaged.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
        }
    }

    /// Notes that the daemon could not make, find, read or write a log.
    pub(crate) fn log_failed(&self, id: SessionId, log: Option<&LogFaults>, error: &MediaError) {
        if error.is_caller_fault() {
            return;
        }
        let kind = match error {
            error if error.is_no_space() => MediaFaultKind::NoSpace,
            error if error.is_failed_read() => MediaFaultKind::Read,
            _ => MediaFaultKind::Write,
        };
        self.note_log(id, log, kind, error.to_string());
    }

    fn note_log(&self, id: SessionId, log: Option<&LogFaults>, kind: MediaFaultKind, text: String) {
        let first = log.is_none_or(|log| {
            *log.text.lock() = Some(text.clone());
            !log.failed.swap(true, Ordering::Relaxed)
        });
        self.failed.fetch_add(u64::from(first), Ordering::Relaxed);
        self.stats.note(kind, format!("session {id}"), text);
    }

    /// Notes that a log has a damaged part; the entries behind it are left out.
    pub(crate) fn log_damaged(&self, id: SessionId, text: String) {
        self.damaged.fetch_add(1, Ordering::Relaxed);
        let place = format!("session {id}");
        self.stats.note(MediaFaultKind::Checksum, place, text);
    }

    /// Notes a client's report of its own session. No decision rests on it, and the text is the daemon's.
    pub(crate) fn client_fault(&self, store: &Store, client: &Reporter<'_>, fault: ClientFault) {
        let Reporter {
            id,
            pid,
            log,
            privileged,
        } = *client;
        match fault {
            ClientFault::LogFailed { errno } => {
                let kind = if errno == libc::ENOSPC {
                    MediaFaultKind::NoSpace
                } else {
                    MediaFaultKind::Write
                };
                let why = std::io::Error::from_raw_os_error(errno);
                let text = format!("process {pid} cannot write its log: {why}");
                if !log.failed.load(Ordering::Relaxed) {
                    tracing::warn!(session = %id, "{text}");
                }
                self.note_log(id, Some(log), kind, text);
            }
            // Unprivileged clients map no NVM.
            ClientFault::NvmDamaged { block } if privileged => {
                let also = match store.verify_block(Tier::Nvm, block) {
                    Ok(()) => "; the daemon reads them right",
                    Err(_) => "",
                };
                let text = format!("process {pid} read other bytes than were written{also}");
                tracing::error!(session = %id, %block, "{text}");
                let stats = store.media_stats().tier(Tier::Nvm);
                stats.note(MediaFaultKind::Checksum, format!("block {block}"), text);
            }
            ClientFault::NvmDamaged { .. } => {}
            ClientFault::LogSlow { ms } => {
                let took = std::time::Duration::from_millis(ms.into());
                if took >= SLOW {
                    let what = format!("sync of the log of process {pid}");
                    self.stats.note_time(&what, format!("session {id}"), took);
                }
            }
        }
    }

    /// Runs work on a log for its client, and measures its duration.
    pub(crate) fn log_work<T>(
        &self,
        id: SessionId,
        log: &LogFaults,
        what: &str,
        work: impl FnOnce() -> Result<T, MediaError>,
    ) -> Result<T, MediaError> {
        let begun = std::time::Instant::now();
        let result = work();
        let place = format!("session {id}");
        self.stats.note_time(what, place, begun.elapsed());
        if let Err(error) = &result {
            self.log_failed(id, Some(log), error);
        }
        result
    }
}
