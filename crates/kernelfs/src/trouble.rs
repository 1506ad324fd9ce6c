//! What went wrong with the media, for the status: what the store's devices count, what the daemon meets in logs, and what clients tell of
//! their own. Remembers and shows; decides nothing.

use crate::kernel::KernelFs;
use crate::session::Session;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use varve_format::{SessionId, Tier, TimeNs};
use varve_ipc::Trouble;
use varve_media::MediaError;
use varve_media::watch::{self, SLOW, Tally, TroubleKind, Watch};
use varve_store::StoreError;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TroubleStatus {
    /// What happened, for a person.
    pub text: String,
    /// Where on the medium; empty: not known, or all of it.
    pub place: String,
    /// When, in nanoseconds since 1970.
    pub time_ns: TimeNs,
}

/// What went wrong with one medium since the daemon started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediumStatus {
    /// `nvm`, `ssd`, `hdd`, `journal`, or `logs` for those of all sessions.
    pub medium: String,
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes, flushes and syncs that failed.
    pub write_errors: u64,
    /// How often something was met that is not what was written.
    pub checksum_errors: u64,
    /// Writes that found no space on the host.
    pub no_space: u64,
    /// Transfers that took a second or longer.
    pub slow: u64,
    /// The longest transfer, in milliseconds.
    pub longest_ms: u64,
    /// The last of them, slow transfers left out.
    pub last: Option<TroubleStatus>,
    /// The last slow transfer.
    pub last_slow: Option<TroubleStatus>,
}

impl MediumStatus {
    fn new(medium: &str, tally: Tally) -> Self {
        let shown = |trouble: Option<watch::Trouble>| {
            trouble.map(|trouble| TroubleStatus {
                text: trouble.text,
                place: trouble.place,
                time_ns: trouble.time_ns,
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

    /// Nothing went wrong, and nothing was slow.
    #[must_use]
    pub const fn is_quiet(&self) -> bool {
        self.last.is_none() && self.last_slow.is_none()
    }
}

/// Logs with trouble, since the daemon started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogsStatus {
    /// Logs with a damaged part, of which what came behind it was left out.
    pub damaged: u64,
    /// Sessions whose log could not be written or read.
    pub failed: u64,
}

/// What is known of the logs of all sessions.
#[derive(Debug, Default)]
pub(crate) struct LogTroubles {
    watch: Watch,
    damaged: AtomicU64,
    failed: AtomicU64,
}

/// What is known of one session's log.
#[derive(Debug, Default)]
pub(crate) struct LogTrouble {
    failed: AtomicBool,
    /// The last failure.
    text: Mutex<Option<String>>,
}

impl LogTrouble {
    /// `ok`, or why the log failed last.
    pub(crate) fn text(&self) -> String {
        self.text.lock().clone().unwrap_or_else(|| "ok".into())
    }
}

impl KernelFs {
    /// What went wrong with each medium that there is.
    pub(crate) fn media_status(&self) -> Vec<MediumStatus> {
        let (devices, watches) = (self.store.devices(), self.store.watches());
        let there = |tier: &Tier| *tier == Tier::Nvm || devices.block_device(*tier).is_some();
        let tiers = Tier::ALL.into_iter().filter(there);
        let tiers = tiers.map(|tier| MediumStatus::new(tier.name(), watches.tier(tier).tally()));
        let others = [("journal", watches.journal()), ("logs", &self.log_troubles.watch)];
        let others = others.map(|(name, watch)| MediumStatus::new(name, watch.tally()));
        tiers.chain(others).collect()
    }

    pub(crate) fn logs_status(&self) -> LogsStatus {
        LogsStatus {
            damaged: self.log_troubles.damaged.load(Ordering::Relaxed),
            failed: self.log_troubles.failed.load(Ordering::Relaxed),
        }
    }

    /// A log could not be made, found, read or written by the daemon.
    pub(crate) fn log_failed(&self, id: SessionId, session: Option<&Session>, error: &MediaError) {
        if error.is_caller_fault() {
            return;
        }
        let kind = match error {
            error if error.is_no_space() => TroubleKind::NoSpace,
            error if error.is_failed_read() => TroubleKind::Read,
            _ => TroubleKind::Write,
        };
        self.note_log(id, session, kind, error.to_string());
    }

    fn note_log(&self, id: SessionId, session: Option<&Session>, kind: TroubleKind, text: String) {
        let first = session.is_none_or(|session| {
            *session.log_trouble.text.lock() = Some(text.clone());
            !session.log_trouble.failed.swap(true, Ordering::Relaxed)
        });
        self.log_troubles
            .failed
            .fetch_add(u64::from(first), Ordering::Relaxed);
        self.log_troubles.watch.note(kind, format!("session {id}"), text);
    }

    /// A log has a damaged part; what comes behind it is left out.
    pub(crate) fn log_damaged(&self, id: SessionId, text: String) {
        self.log_troubles.damaged.fetch_add(1, Ordering::Relaxed);
        let place = format!("session {id}");
        self.log_troubles.watch.note(TroubleKind::Checksum, place, text);
    }

    /// What a client says of its own session: nothing rests on it, and its words are the daemon's.
    pub(crate) fn client_trouble(&self, session: &Session, trouble: Trouble) {
        let (id, pid) = (session.id, session.peer.pid);
        match trouble {
            Trouble::LogFailed { errno } => {
                let kind = if errno == libc::ENOSPC {
                    TroubleKind::NoSpace
                } else {
                    TroubleKind::Write
                };
                let why = std::io::Error::from_raw_os_error(errno);
                let text = format!("process {pid} cannot write its log: {why}");
                if !session.log_trouble.failed.load(Ordering::Relaxed) {
                    tracing::warn!(session = %id, "{text}");
                }
                self.note_log(id, Some(session), kind, text);
            }
            // Others have no NVM to read.
            Trouble::NvmDamaged { block } if session.privileged => {
                let also = match self.store.verify_block(Tier::Nvm, block) {
                    Ok(()) => "; the daemon reads them right",
                    Err(_) => "",
                };
                let text = format!("process {pid} read other bytes than were written{also}");
                tracing::error!(session = %id, %block, "{text}");
                let watch = self.store.watches().tier(Tier::Nvm);
                watch.note(TroubleKind::Checksum, format!("block {block}"), text);
            }
            Trouble::NvmDamaged { .. } => {}
            Trouble::LogSlow { ms } => {
                let took = std::time::Duration::from_millis(ms.into());
                if took >= SLOW {
                    let what = format!("sync of the log of process {pid}");
                    self.log_troubles
                        .watch
                        .note_time(&what, format!("session {id}"), took);
                }
            }
        }
    }

    /// Carries out work on a log for its client, and looks how long it takes.
    pub(crate) fn log_work<T>(
        &self,
        session: &Session,
        what: &str,
        work: impl FnOnce() -> Result<T, MediaError>,
    ) -> Result<T, MediaError> {
        let begun = std::time::Instant::now();
        let result = work();
        let place = format!("session {}", session.id);
        self.log_troubles.watch.note_time(what, place, begun.elapsed());
        if let Err(error) = &result {
            self.log_failed(session.id, Some(session), error);
        }
        result
    }

    /// Counts an error of the store if it is damage.
    pub(crate) fn note_damage(&self, error: &StoreError) {
        self.store.note_damage(error);
    }
}
