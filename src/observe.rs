//! A look at a running daemon, and the rates between two looks. The only source of `status`, `top` and the
//! metrics; prints nothing itself.

use crate::pool::Pool;
use anyhow::Context;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use varve_ipc::Admin;
use varve_kernelfs::Status;

/// A daemon's status at one moment (a look).
#[derive(Debug, Clone)]
pub struct Look {
    /// The status as received.
    pub json: Value,
    /// The parsed status.
    pub status: Status,
    /// Names of the sessions' programs, by process id; those in other containers are not known.
    pub programs: BTreeMap<u32, String>,
}

impl Look {
    /// Requests the status from the daemon.
    pub fn at(pool: &Pool) -> anyhow::Result<Self> {
        let json = pool.ask(Admin::Status)?;
        let json: Value = serde_json::from_str(&json).context("the daemon's answer is not JSON")?;
        let status: Status =
            serde_json::from_value(json.clone()).context("the daemon is of another version")?;
        let programs = status
            .sessions
            .iter()
            .filter_map(|session| Some((session.pid, program(session.pid)?)))
            .collect();
        Ok(Self {
            json,
            status,
            programs,
        })
    }

    /// Formats a session for people: number and program.
    pub fn session_name(&self, id: u64) -> String {
        if id == 0 {
            return "the daemon".into();
        }
        let session = self.status.sessions.iter().find(|session| session.id == id);
        match session.and_then(|session| self.programs.get(&session.pid)) {
            Some(program) => format!("session {id} ({program})"),
            None => format!("session {id}"),
        }
    }
}

/// Returns the name of a process, if it is visible.
pub fn program(pid: u32) -> Option<String> {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    let name = name.trim();
    (!name.is_empty()).then(|| name.chars().filter(|c| !c.is_control()).collect())
}

/// A tier's traffic per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TierRates {
    /// `nvm`, `ssd` or `hdd`.
    pub tier: String,
    /// Read by the daemon, in bytes.
    pub read_bytes: f64,
    /// Written by the daemon, in bytes.
    pub written_bytes: f64,
    /// Moved here from other tiers, in bytes.
    pub moved_in_bytes: f64,
    /// Moved away to other tiers, in bytes.
    pub moved_out_bytes: f64,
    /// Accesses to its data that placement counts.
    pub accesses: f64,
}

/// A session's progress per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SessionRates {
    /// Number of the session.
    pub id: u64,
    /// Its log entries digested.
    pub digested: f64,
}

/// Rates between two looks, per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rates {
    /// Time between the looks, in seconds.
    pub seconds: f64,
    /// Operations digested.
    pub digest_operations: f64,
    /// Bytes of file data taken in by the digest.
    pub digest_bytes_in: f64,
    /// Bytes of file data written by the digest.
    pub digest_bytes_out: f64,
    /// Lease requests granted.
    pub grants: f64,
    /// Lease requests granted after a wait.
    pub waits: f64,
    /// Operations forwarded to the daemon because sessions contended.
    pub mediated: f64,
    /// Tiers.
    pub tiers: Vec<TierRates>,
    /// Sessions present in both looks.
    pub sessions: Vec<SessionRates>,
}

impl Rates {
    /// Computes the rates. `None`: the looks are of different runs of the daemon, or no time has passed.
    pub fn between(before: &Status, after: &Status) -> Option<Self> {
        let ms = after.uptime_ms.checked_sub(before.uptime_ms)?;
        if before.pid != after.pid || before.pool != after.pool || ms == 0 {
            return None;
        }
        let seconds = ms as f64 / 1e3;
        let rate = |old: u64, new: u64| new.saturating_sub(old) as f64 / seconds;
        let tiers = after.tiers.iter().filter_map(|new| {
            let old = before.tiers.iter().find(|old| old.tier == new.tier)?;
            Some(TierRates {
                tier: new.tier.clone(),
                read_bytes: rate(old.read_bytes, new.read_bytes),
                written_bytes: rate(old.written_bytes, new.written_bytes),
                moved_in_bytes: rate(old.moved_in_bytes, new.moved_in_bytes),
                moved_out_bytes: rate(old.moved_out_bytes, new.moved_out_bytes),
                accesses: rate(
                    old.accesses.reads + old.accesses.writes,
                    new.accesses.reads + new.accesses.writes,
                ),
            })
        });
        let sessions = after.sessions.iter().filter_map(|new| {
            let old = before.sessions.iter().find(|old| old.id == new.id)?;
            Some(SessionRates {
                id: new.id,
                digested: rate(old.digested, new.digested),
            })
        });
        let (old, new) = (&before.digest, &after.digest);
        let (leases_old, leases_new) = (&before.leases, &after.leases);
        Some(Self {
            seconds,
            digest_operations: rate(old.operations, new.operations),
            digest_bytes_in: rate(old.bytes_in, new.bytes_in),
            digest_bytes_out: rate(old.bytes_out, new.bytes_out),
            grants: rate(leases_old.grants, leases_new.grants),
            waits: rate(leases_old.waits, leases_new.waits),
            mediated: rate(leases_old.mediated, leases_new.mediated),
            tiers: tiers.collect(),
            sessions: sessions.collect(),
        })
    }
}

/// Returns a status for the tests of the commands that show it.
#[cfg(test)]
pub fn example() -> Look {
    let media = ["nvm", "ssd", "journal", "logs"].map(|medium| {
        serde_json::json!({
            "medium": medium, "read_errors": 0, "write_errors": 0, "checksum_errors": 0, "no_space": 0,
            "slow": 0,
            "longest_ms": 12, "last": null, "last_slow": null
        })
    });
    let json = serde_json::json!({
        "pool": "00112233", "pid": 77, "uptime_ms": 60_000, "newest_tx": 9, "latched": null,
        "journal_state": "ok",
        "tiers": [{
            "tier": "nvm", "device": "file nvm.img", "capacity_bytes": 1 << 30, "used_bytes": 1 << 28,
            "pending_bytes": 4096,
            "state": "ok", "read_bytes": 1 << 20, "written_bytes": 1 << 21, "moved_in_bytes": 0,
            "moved_out_bytes": 8192,
            "figures": {
                "read": { "response_ns": 81_500, "service_ns": 900, "samples": 12,
                          "by_size": [{ "up_to_bytes": 4096, "response_ns": 640 }] },
                "write": { "response_ns": null, "service_ns": 1100, "samples": 0, "by_size": [] },
                "queue": 2, "depth_thousandths": 1500, "busy_thousandths": 120, "bytes_per_s": 4096,
                "requests_per_s": 31
            }
        }],
        "media": media,
        "reserved_blocks": 16, "inodes_used": 3, "inodes_free": 100,
        "sessions": [
            { "id": 4, "pid": 1, "uid": 0, "kind": "shim", "state": "live", "read_only": false, "log_bytes": 4 << 20,
              "log_used_bytes": 1 << 20, "digested": 100, "leases": 7, "holds": 8, "waits": 0,
              "asked_back": 1, "credits": 64 },
            { "id": 5, "pid": 4_000_000_000_u32, "uid": 1000, "kind": "linked", "state": "live", "read_only": false,
              "log_bytes": 4 << 20, "log_used_bytes": null, "digested": 0, "leases": 0, "holds": 0,
              "waits": 1, "credits": 0 }
        ],
        "ended_sessions": 0,
        "digest": { "batches": 2, "operations": 100, "refused": 0, "bytes_in": 1 << 20, "bytes_out": 1 << 19,
                    "dropped_bytes": 1 << 19, "merged": 1, "vanished": 0 },
        "leases": { "grants": 20, "waits": 3, "mediated": 1, "seals": 0, "rows": 7 },
        "waiting": [{
            "session": 5, "inode": 33, "mode": "write", "waited_ms": 120, "before": 0,
            "holders": [{ "session": 4, "mode": "write", "state": "asked back", "asked_ms": 118 }]
        }],
        "jobs": ["nvm to ssd: cold data"], "placement": []
    });
    let status = serde_json::from_value(json.clone()).unwrap_or_else(|error| panic!("{error}"));
    Look {
        json,
        status,
        programs: BTreeMap::from([(1, "redis".to_owned())]),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Rates, example};

    #[test]
    fn rates_are_differences_over_the_daemons_own_time() {
        let before = example().status;
        let mut after = before.clone();
        after.uptime_ms += 2_000;
        after.digest.operations += 500;
        after.tiers[0].written_bytes += 4096;
        after.sessions[0].digested += 10;
        let rates = Rates::between(&before, &after).unwrap();
        assert_eq!((rates.seconds, rates.digest_operations), (2.0, 250.0));
        assert_eq!(rates.tiers[0].written_bytes, 2048.0);
        assert_eq!(rates.sessions[0].digested, 5.0);
    }

    #[test]
    fn another_run_of_the_daemon_has_no_rates() {
        let before = example().status;
        let mut after = before.clone();
        after.uptime_ms = 10;
        assert_eq!(Rates::between(&before, &after), None);
        after.uptime_ms = 99_000;
        after.pid += 1;
        assert_eq!(Rates::between(&before, &after), None);
    }
}
