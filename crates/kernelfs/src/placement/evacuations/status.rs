//! Jobs as operators see them.

use super::{Evacuation, Seen};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use varve_format::BLOCK_BYTES;
use varve_store::Emptied;

/// The state of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It moves data.
    Running,
    /// All that is left waits for something.
    Waiting,
    /// An operator has paused it.
    Paused,
    /// All that is left does not move, whatever it waits for.
    Incomplete,
    /// Nothing is left. New data goes elsewhere until the job is cancelled. The job of a device ends instead.
    Done,
}

impl JobState {
    /// All states.
    pub const ALL: [Self; 5] = [
        Self::Running,
        Self::Waiting,
        Self::Paused,
        Self::Incomplete,
        Self::Done,
    ];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Paused => "paused",
            Self::Incomplete => "incomplete",
            Self::Done => "done",
        }
    }
}

/// A job of an operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStatus {
    /// Its number, which no other job of the pool has or had.
    pub id: u64,
    /// What it does: `evacuate` empties a tier, `remove` a device, which is then taken out.
    pub kind: String,
    /// The tier that all data leaves, or whose device it leaves: `ssd` or `hdd`.
    pub tier: String,
    /// Path or given name of the device; `None`: it empties a whole tier.
    #[serde(default)]
    pub device: Option<String>,
    /// State.
    pub state: JobState,
    /// Bytes of data moved since it was started, over restarts of the daemon.
    pub moved_bytes: u64,
    /// Bytes of metadata moved since the daemon started.
    pub moved_metadata_bytes: u64,
    /// Bytes in use on the tier or the device, data and metadata.
    pub left_bytes: u64,
    /// Most bytes moved a second; `None`: as fast as other moves, which let reads and writes go first.
    pub limit_bytes_per_s: Option<u64>,
    /// Bytes of data moved a second, over the last ten seconds; `None`: not known yet.
    pub bytes_per_s: Option<u64>,
    /// Estimated time until it is done, in seconds; `None`: not known.
    pub eta_s: Option<u64>,
    /// When it was started, in nanoseconds since 1970.
    pub started_ns: i64,
    /// Bytes that do not move, by reason.
    pub stays: BTreeMap<String, u64>,
}

/// Bytes that do not move now, by reason; `left_bytes` are on the tier.
fn stays(job: &Evacuation, seen: &Seen<'_>, readers: &[u64], left_bytes: u64) -> BTreeMap<String, u64> {
    let mut stays = BTreeMap::new();
    let mut rest = left_bytes;
    let mut add = |reason: String, bytes: u64| {
        let bytes = bytes.min(rest);
        rest -= bytes;
        if bytes > 0 {
            *stays.entry(reason).or_default() += bytes;
        }
    };
    for (reason, bytes) in &job.plan.stuck {
        add(reason.clone(), *bytes);
    }
    if let Some(reason) = &job.obstacle {
        add(reason.clone(), u64::MAX);
    }
    if let Some(reason) = &job.metadata_stays {
        add(reason.clone(), u64::MAX);
    }
    let pending = seen.pending(job.of) * BLOCK_BYTES;
    if left_bytes == 0 && pending > 0 {
        let reason = match readers {
            [] => "waiting: freed, and not yet reusable".into(),
            some => {
                let named: Vec<_> = some.iter().take(8).map(u64::to_string).collect();
                format!("waiting: in use by session {}", named.join(", "))
            }
        };
        stays.insert(reason, pending);
    }
    stays
}

/// The status of a job.
pub(super) fn of(job: &Evacuation, seen: &Seen<'_>, readers: &[u64], now_ms: u64) -> JobStatus {
    let left_bytes = seen.used(job.of) * BLOCK_BYTES;
    let pending = seen.pending(job.of);
    let mut stays = stays(job, seen, readers, left_bytes);
    let rests = now_ms < job.rests_until_ms;
    let moved_bytes = job.row.moved_bytes.get();
    if rests && stays.is_empty() && left_bytes > 0 {
        let reason = "waiting: of files that are being deleted or truncated, or damaged: see `varve fsck`";
        stays.insert(reason.into(), left_bytes);
    }
    let of_device = matches!(job.of, Emptied::Device { .. });
    let is_empty = left_bytes == 0 && pending == 0;
    if of_device && is_empty {
        // Else it is taken out at once.
        stays.insert("waiting: its room may be promised to sessions".into(), 0);
    }
    let state = if job.row.is_paused() {
        JobState::Paused
    } else if of_device && is_empty {
        JobState::Waiting
    } else if is_empty {
        JobState::Done
    } else if !rests && left_bytes > 0 {
        JobState::Running
    } else if stays.keys().all(|reason| !reason.starts_with("waiting")) {
        JobState::Incomplete
    } else {
        JobState::Waiting
    };
    let rate = (state != JobState::Done).then(|| job.rate.bytes_per_s(now_ms, moved_bytes));
    let rate = rate.flatten();
    let eta = |rate: u64| left_bytes.checked_div(rate);
    JobStatus {
        id: job.row.job.get(),
        kind: if of_device { "remove" } else { "evacuate" }.into(),
        tier: job.of.tier().name().into(),
        device: seen.device(job.of).map(|device| device.name.clone()),
        state,
        moved_bytes,
        moved_metadata_bytes: job.metadata * BLOCK_BYTES,
        left_bytes,
        limit_bytes_per_s: Some(job.row.limit_bytes_per_s.get()).filter(|limit| *limit > 0),
        bytes_per_s: rate,
        eta_s: rate.filter(|_| state == JobState::Running).and_then(eta),
        started_ns: job.row.started_ns.get(),
        stays,
    }
}
