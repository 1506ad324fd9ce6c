//! Settings of Ingens; the defaults are the seed's.

use serde::{Deserialize, Serialize};

/// Settings of Ingens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IngensConfig {
    /// Time between two steps, ms (10..=60000).
    pub period_ms: u64,
    /// Share of a region's base pages that must be used before it becomes a huge page (0.01..=1.0; seed:
    /// 0.9).
    pub utilisation: f64,
    /// Share below which a huge page is split (0.0..=`utilisation`).
    pub demote_below: f64,
    /// Weight α of the newest observation in the moving average (0.01..=1.0; seed: 0.4).
    pub alpha: f64,
    /// Frequency from which a region counts as frequently accessed, of 8 (1.0..=8.0; seed: 6).
    pub frequent_at: f64,
    /// Probability that the access bit of a frequently accessed page is read (0.01..=1.0; seed: 0.2).
    pub sampling: f64,
    /// Time between two scans of access bits, ms (100..=600000; seed: 2000).
    pub access_period_ms: u64,
    /// Longest time between two scans of access bits while nothing changes, as a multiple (1..=64).
    pub max_backoff: u64,
    /// Time between two scans of the normal list, ms (100..=600000; seed: 10000).
    pub scan_period_ms: u64,
    /// Address space that one scan of the normal list covers, bytes (2 MiB..=1 TiB; seed: 16 MB).
    pub scan_bytes: u64,
    /// How long a process without a promotion in a whole pass is left out, ms (0..=3600000; seed: 120000).
    pub exclude_ms: u64,
    /// Share priority of a process (1..=1000000; seed: 10000).
    pub share: f64,
    /// Idleness penalty τ (0.01..=1.0; 1.0 disregards idleness).
    pub tau: f64,
    /// Most huge pages made in one step (1..=65536).
    pub promote_batch: u64,
    /// Most huge pages given to all managed processes together; 0 is no limit.
    pub huge_budget: u64,
    /// Whether promotion is as eager as Linux' while memory is unfragmented (§3.5.2); costs bloat, so off.
    pub adaptive: bool,
    /// Fragmentation below which the adaptive mode is eager (0.0..=1.0; seed: 0.5).
    pub aggressive_below_fmfi: f64,
    /// Whether to compact memory proactively (needs root).
    pub compaction: bool,
    /// Fragmentation above which memory is compacted (0.0..=1.0; seed: 0.8).
    pub compact_above_fmfi: f64,
    /// Memory to compact in one round, bytes (2 MiB..=16 GiB; seed: 100 MB).
    pub compact_bytes: u64,
    /// Time between two rounds of compaction, ms (100..=600000; seed: 5000).
    pub compact_period_ms: u64,
    /// Share of memory that must stay available; below it nothing is promoted and bloat is recovered
    /// (0.0..=0.9).
    pub low_memory: f64,
    /// Whether frequently used huge pages are excluded from same-page merging.
    pub coordinate_sharing: bool,
    /// Most regions whose access bit is read in one scan (64..=1048576).
    pub scan_batch_pages: u64,
}

impl Default for IngensConfig {
    fn default() -> Self {
        Self {
            period_ms: 500,
            utilisation: 0.9,
            demote_below: 0.9,
            alpha: 0.4,
            frequent_at: 6.0,
            sampling: 0.2,
            access_period_ms: 2_000,
            max_backoff: 8,
            scan_period_ms: 10_000,
            scan_bytes: 16 << 20,
            exclude_ms: 120_000,
            share: 10_000.0,
            tau: 0.5,
            promote_batch: 64,
            huge_budget: 0,
            adaptive: false,
            aggressive_below_fmfi: 0.5,
            compaction: true,
            compact_above_fmfi: 0.8,
            compact_bytes: 100_000_000,
            compact_period_ms: 5_000,
            low_memory: 0.05,
            coordinate_sharing: true,
            scan_batch_pages: 8_192,
        }
    }
}
