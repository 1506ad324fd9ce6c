//! The policy file: one TOML file, every field documented, bounded and optional.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::far::FarConfig;
use crate::ingens::IngensConfig;
use crate::multiclock::MultiClockConfig;
use crate::tracker::DamonConfig;

/// The source of access bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrackerChoice {
    /// The best that the kernel offers: idle bitmap, DAMON, write tracking, none.
    Auto,
    /// Idle page tracking.
    Idle,
    /// DAMON over physical addresses.
    Damon,
    /// Write tracking in cooperating processes.
    Written,
    /// None: promotion by utilisation alone.
    None,
}

/// When to read huge pages to find hollow ones, whose base pages are mostly zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hollow {
    /// Never.
    Never,
    /// While memory is short.
    Short,
    /// All the time, within the scanning budget.
    Always,
}

/// The memory of a process after the manager leaves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leave {
    /// Split the huge pages that the manager made, and move pages back.
    Restore,
    /// Keep the memory as it is; restore only settings of the kernel.
    Keep,
}

/// One memory tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierConfig {
    /// NUMA nodes of the tier.
    pub nodes: Vec<u32>,
    /// Most memory of the tier that managed processes may fill, MiB (1..=67108864); if absent, all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_mib: Option<u64>,
}

/// The whole policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyFile {
    /// Whether huge pages are managed (Ingens).
    pub huge_pages: bool,
    /// Whether tiers are managed (MULTI-CLOCK); has no effect with one tier.
    pub tiering: bool,
    /// The source of access bits.
    pub tracker: TrackerChoice,
    /// With `tracker = "written"`: whether an unwritten page counts as idle, although it may have been read.
    pub unwritten_is_idle: bool,
    /// Share of one core for tracking and surveys (0.0001..=0.5).
    pub scan_cpu_share: f64,
    /// Share of one core for moving, collapsing and splitting (0.001..=1.0).
    pub work_cpu_share: f64,
    /// Shortest time between two surveys of a process' page tables, ms (50..=600000).
    pub survey_period_ms: u64,
    /// Address space surveyed in one step, bytes (2 MiB..=1 TiB).
    pub survey_bytes: u64,
    /// When to read huge pages to find base pages that hold only zeros.
    pub hollow: Hollow,
    /// Huge pages read in one step (1..=4096).
    pub hollow_batch: u64,
    /// Whether `run` keeps huge pages out of the program's fault path (Linux 6.18).
    pub thp_by_request: bool,
    /// Whether children are managed too.
    pub follow_children: bool,
    /// The memory of processes after the manager leaves them.
    pub leave: Leave,
    /// Whether to track and decide only, without changing anything.
    pub dry_run: bool,
    /// Tiers, fastest first; empty: nodes with processors, then memory-only ones.
    pub tier: Vec<TierConfig>,
    /// MULTI-CLOCK.
    pub multi_clock: MultiClockConfig,
    /// Ingens.
    pub ingens: IngensConfig,
    /// DAMON.
    pub damon: DamonConfig,
    /// Far memory.
    pub far: FarConfig,
}

impl Default for PolicyFile {
    fn default() -> Self {
        Self {
            huge_pages: true,
            tiering: true,
            tracker: TrackerChoice::Auto,
            unwritten_is_idle: false,
            scan_cpu_share: 0.005,
            work_cpu_share: 0.25,
            survey_period_ms: 500,
            survey_bytes: 1 << 30,
            hollow: Hollow::Short,
            hollow_batch: 8,
            thp_by_request: true,
            follow_children: true,
            leave: Leave::Restore,
            dry_run: false,
            tier: Vec::new(),
            multi_clock: MultiClockConfig::default(),
            ingens: IngensConfig::default(),
            damon: DamonConfig::default(),
            far: FarConfig::default(),
        }
    }
}

/// Errors of a policy file.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("policy file {path}: {error}")]
    Io {
        /// The file.
        path: String,
        /// The cause.
        error: std::io::Error,
    },
    /// Not TOML, or a field that does not exist.
    #[error("policy file: {0}")]
    Toml(#[from] toml::de::Error),
    /// A value out of bounds.
    #[error("policy file: `{field}` is {value}, allowed is {least} to {most}")]
    Bounds {
        /// The field, with its table.
        field: &'static str,
        /// Its value.
        value: f64,
        /// Least allowed.
        least: f64,
        /// Most allowed.
        most: f64,
    },
    /// The tiers are inconsistent.
    #[error("policy file: {0}")]
    Tiers(String),
}

const MIB2: f64 = (2 << 20) as f64;

impl PolicyFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`ConfigError`]; an invalid value is never replaced by a default.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Io {
            path: path.display().to_string(),
            error,
        })?;
        Self::parse(&text)
    }

    /// Parses and checks text.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let file: Self = toml::from_str(text)?;
        file.check()?;
        Ok(file)
    }

    /// Formats the policy as TOML, for `varve vm policy`.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_default()
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.check_bounds()?;
        self.check_tiers()
    }

    fn check_bounds(&self) -> Result<(), ConfigError> {
        let (m, i, d) = (&self.multi_clock, &self.ingens, &self.damon);
        let bounds: &[(&'static str, f64, f64, f64)] = &[
            ("scan_cpu_share", self.scan_cpu_share, 0.0001, 0.5),
            ("work_cpu_share", self.work_cpu_share, 0.001, 1.0),
            ("survey_period_ms", self.survey_period_ms as f64, 50.0, 600_000.0),
            (
                "survey_bytes",
                self.survey_bytes as f64,
                MIB2,
                (1u64 << 40) as f64,
            ),
            ("hollow_batch", self.hollow_batch as f64, 1.0, 4_096.0),
            ("multi_clock.period_ms", m.period_ms as f64, 10.0, 60_000.0),
            (
                "multi_clock.scan_batch_pages",
                m.scan_batch_pages as f64,
                64.0,
                1_048_576.0,
            ),
            (
                "multi_clock.promote_batch_pages",
                m.promote_batch_pages as f64,
                1.0,
                1_048_576.0,
            ),
            ("multi_clock.write_weight", m.write_weight, 1.0, 4.0),
            ("multi_clock.watermark_scale", m.watermark_scale, 0.1, 100.0),
            ("multi_clock.max_backoff", m.max_backoff as f64, 1.0, 64.0),
            ("ingens.period_ms", i.period_ms as f64, 10.0, 60_000.0),
            ("ingens.utilisation", i.utilisation, 0.01, 1.0),
            ("ingens.demote_below", i.demote_below, 0.0, i.utilisation),
            ("ingens.alpha", i.alpha, 0.01, 1.0),
            ("ingens.frequent_at", i.frequent_at, 1.0, 8.0),
            ("ingens.sampling", i.sampling, 0.01, 1.0),
            (
                "ingens.access_period_ms",
                i.access_period_ms as f64,
                100.0,
                600_000.0,
            ),
            ("ingens.max_backoff", i.max_backoff as f64, 1.0, 64.0),
            ("ingens.scan_period_ms", i.scan_period_ms as f64, 100.0, 600_000.0),
            (
                "ingens.scan_bytes",
                i.scan_bytes as f64,
                MIB2,
                (1u64 << 40) as f64,
            ),
            ("ingens.exclude_ms", i.exclude_ms as f64, 0.0, 3_600_000.0),
            ("ingens.share", i.share, 1.0, 1_000_000.0),
            ("ingens.tau", i.tau, 0.01, 1.0),
            ("ingens.promote_batch", i.promote_batch as f64, 1.0, 65_536.0),
            ("ingens.aggressive_below_fmfi", i.aggressive_below_fmfi, 0.0, 1.0),
            ("ingens.compact_above_fmfi", i.compact_above_fmfi, 0.0, 1.0),
            (
                "ingens.compact_bytes",
                i.compact_bytes as f64,
                MIB2,
                (16u64 << 30) as f64,
            ),
            (
                "ingens.compact_period_ms",
                i.compact_period_ms as f64,
                100.0,
                600_000.0,
            ),
            ("ingens.low_memory", i.low_memory, 0.0, 0.9),
            (
                "ingens.scan_batch_pages",
                i.scan_batch_pages as f64,
                64.0,
                1_048_576.0,
            ),
            ("damon.sample_us", d.sample_us as f64, 5_000.0, 10_000_000.0),
            (
                "damon.aggregate_us",
                d.aggregate_us as f64,
                d.sample_us as f64,
                100_000_000.0,
            ),
            ("damon.max_regions", d.max_regions as f64, 10.0, 8_192.0),
            (
                "damon.max_region_bytes",
                d.max_region_bytes as f64,
                MIB2,
                (1u64 << 30) as f64,
            ),
        ];
        for (field, value, least, most) in bounds.iter().copied().chain(self.far.bounds()) {
            // This form of the test rejects NaN too.
            if !(least..=most).contains(&value) {
                return Err(ConfigError::Bounds {
                    field,
                    value,
                    least,
                    most,
                });
            }
        }
        Ok(())
    }

    fn check_tiers(&self) -> Result<(), ConfigError> {
        let mut seen = std::collections::BTreeSet::new();
        for tier in &self.tier {
            if tier.nodes.is_empty() {
                return Err(ConfigError::Tiers("a [[tier]] names no node".to_owned()));
            }
            if tier.limit_mib.is_some_and(|l| !(1..=1 << 26).contains(&l)) {
                return Err(ConfigError::Tiers(
                    "a tier's `limit_mib` is not between 1 and 67108864".to_owned(),
                ));
            }
            if let Some(node) = tier.nodes.iter().find(|n| !seen.insert(**n)) {
                return Err(ConfigError::Tiers(format!("node {node} is in two tiers")));
            }
        }
        if let Some(wrong) = self.far.wrong_tiers() {
            return Err(ConfigError::Tiers(wrong));
        }
        if self.tier.len() > 8 {
            return Err(ConfigError::Tiers("more than 8 tiers".to_owned()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn defaults_are_valid_and_survive_a_round_trip() {
        let file = PolicyFile::default();
        assert_eq!(PolicyFile::parse(&file.to_toml()).unwrap(), file);
        assert_eq!(PolicyFile::parse("").unwrap(), file);
    }

    #[test]
    fn values_out_of_bounds_are_named() {
        for (text, field) in [
            ("scan_cpu_share = 0.9", "scan_cpu_share"),
            ("[ingens]\nutilisation = 1.5\n", "ingens.utilisation"),
            (
                "[ingens]\nutilisation = 0.5\ndemote_below = 0.6",
                "ingens.demote_below",
            ),
            ("[ingens]\ntau = nan", "ingens.tau"),
            ("[multi_clock]\nperiod_ms = 1", "multi_clock.period_ms"),
            ("[damon]\nmax_regions = 1000000", "damon.max_regions"),
            ("[far]\nreaders = 0", "far.readers"),
            ("[far]\nreaders = 65", "far.readers"),
            ("[far]\nread_apart_us = 2000000", "far.read_apart_us"),
            ("[far]\nt_s = 3601", "far.t_s"),
            ("[far.price]\ndram = -1.0", "far.price.dram"),
            ("[far.price]\ndram = inf", "far.price.dram"),
            ("[far.price.tier]\n\"/ssd\" = nan", "/ssd in [far.price.tier]"),
        ] {
            let error = PolicyFile::parse(text).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }

    #[test]
    fn unknown_fields_and_impossible_tiers_are_refused() {
        assert!(PolicyFile::parse("speed = 3").is_err());
        assert!(PolicyFile::parse("[[tier]]\nnodes = [0]\n[[tier]]\nnodes = [1, 0]").is_err());
        assert!(PolicyFile::parse("[[tier]]\nnodes = []").is_err());
    }
}
