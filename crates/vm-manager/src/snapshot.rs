//! Published state of a running manager: a JSON file that `status`, `top` and `heat` read.
//!
//! The file is replaced atomically; its directory belongs to the user alone.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::heat::HeatMap;

/// One managed process.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessStatus {
    /// Its pid.
    pub pid: i32,
    /// Its name.
    pub name: String,
    /// 2 MiB regions that hold data.
    pub regions: u64,
    /// Bytes of base pages in use.
    pub used_bytes: u64,
    /// Its huge pages.
    pub huge_pages: u64,
    /// Its huge pages that are not frequently accessed.
    pub idle_huge_pages: u64,
    /// Promotion metric M, shares per MiB.
    pub metric: f64,
    /// Whether it cooperates.
    pub cooperating: bool,
    /// Pages in far memory.
    pub far_pages: u64,
}

/// One tier.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TierStatus {
    /// The NUMA nodes.
    pub nodes: Vec<u32>,
    /// Free bytes.
    pub free_bytes: u64,
    /// Pages on the inactive, active, promote and unevictable lists.
    pub lists: [u64; 4],
}

/// Sums since the manager started.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Pages whose access bit was read.
    pub scanned: u64,
    /// Pages moved up.
    pub promoted: u64,
    /// Pages moved down.
    pub demoted: u64,
    /// Pages evicted.
    pub evicted: u64,
    /// Huge pages made.
    pub collapsed: u64,
    /// Huge pages split.
    pub split: u64,
    /// Actions that the kernel declined.
    pub failed: u64,
    /// Rounds of compaction.
    pub compactions: u64,
    /// Sharing permissions changed.
    pub sharing: u64,
}

/// The whole state.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Snapshot {
    /// Version of this format: 1.
    pub version: u32,
    /// The manager's pid.
    pub manager: u32,
    /// Seconds since it started.
    pub uptime_s: f64,
    /// Active policies.
    pub policies: Vec<String>,
    /// The tracker, with its resolution.
    pub tracker: String,
    /// Features that could not be used, with the reason.
    pub notes: Vec<String>,
    /// Processes.
    pub processes: Vec<ProcessStatus>,
    /// Tiers, fastest first.
    pub tiers: Vec<TierStatus>,
    /// Sums.
    pub totals: Totals,
    /// Processor time for tracking and surveys, share of one core since start.
    pub scan_cpu_share: f64,
    /// Processor time for carrying out actions, share of one core since start.
    pub work_cpu_share: f64,
    /// Processor time of DAMON's kernel thread, share of one core since start.
    pub kdamond_cpu_share: f64,
    /// Time in compaction, s.
    pub compaction_s: f64,
    /// Bytes moved while compacting.
    pub compaction_bytes: u64,
    /// Free huge pages gained by compaction.
    pub compaction_gained: u64,
    /// Bytes of bookkeeping.
    pub metadata_bytes: u64,
    /// Pages in the bookkeeping.
    pub metadata_pages: u64,
    /// Free memory fragmentation index.
    pub fmfi: Option<f64>,
    /// Bytes that can be allocated before reclaim hurts.
    pub available_bytes: u64,
    /// Fairness objective O.
    pub fairness: f64,
    /// Heat of each process.
    pub heat: Vec<HeatMap>,
    /// Far memory, where the manager is a pager.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub far: Option<crate::far::FarStatus>,
}

/// Returns the directory for state files of the calling user; creates it, private to the user.
///
/// # Errors
/// It cannot be made, or exists and belongs to another user.
pub fn state_dir() -> io::Result<PathBuf> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    let uid = rustix::process::geteuid().as_raw();
    let dir = match std::env::var_os("XDG_RUNTIME_DIR") {
        _ if uid == 0 => PathBuf::from("/run/varve-vm"),
        Some(base) => PathBuf::from(base).join("varve-vm"),
        None => std::env::temp_dir().join(format!("varve-vm-{uid}")),
    };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
    let meta = fs::symlink_metadata(&dir)?;
    if !meta.is_dir() || meta.uid() != uid {
        let what = format!("{} belongs to somebody else", dir.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    Ok(dir)
}

/// Returns the path of the state file of a manager.
pub fn state_file(dir: &Path, manager: u32) -> PathBuf {
    dir.join(format!("{manager}.json"))
}

/// Returns the path of the socket at which a pager takes requests.
pub fn control_file(dir: &Path, pager: u32) -> PathBuf {
    dir.join(format!("{pager}.far"))
}

impl Snapshot {
    /// Replaces the state file.
    ///
    /// # Errors
    /// Errors of writing; the old file stays then.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let new = path.with_extension("new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(&new, path)
    }

    /// Reads the snapshots of all running managers of this user; files of dead ones are removed.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn all() -> io::Result<Vec<Self>> {
        let mut out: Vec<Self> = Vec::new();
        for entry in fs::read_dir(state_dir()?)?.flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|e| e != "json") {
                continue;
            }
            let Some(found) = fs::read(&path)
                .ok()
                .and_then(|b| serde_json::from_slice::<Self>(&b).ok())
            else {
                continue;
            };
            if Path::new(&format!("/proc/{}", found.manager)).exists() {
                out.push(found);
            } else {
                let _ = fs::remove_file(&path);
            }
        }
        out.sort_by_key(|s| s.manager);
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn snapshot_survives_a_round_trip_and_is_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = state_file(dir.path(), 7);
        let snapshot = Snapshot {
            version: 1,
            manager: 7,
            policies: vec!["ingens".to_owned()],
            ..Snapshot::default()
        };
        snapshot.write(&path).unwrap();
        snapshot.write(&path).unwrap();
        let back: Snapshot = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!((back.manager, back.policies), (7, snapshot.policies));
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            1,
            "nothing is left over"
        );
    }
}
