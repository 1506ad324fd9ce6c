//! The `[far]` table of the policy file, and what `--local` says.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::status::FarStatus;

/// How much of the programs' memory stays local.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Local {
    /// This number of bytes.
    Bytes(u64),
    /// This share of all private memory of the programs, local and far, above 0 and at most 1.
    Share(f64),
    /// As much as it takes so that threads wait for far pages for this share of the time, above 0 and at most
    /// 0.5.
    Stall(f64),
}

/// Least `--local`, in bytes.
pub const LOCAL_MIN_BYTES: u64 = 4 << 20;

impl FromStr for Local {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a size such as 8G or 512M, a share such as 60%, or stall=1%");
        if let Some(percent) = text.strip_prefix("stall=") {
            let percent = percent
                .strip_suffix('%')
                .and_then(|percent| percent.parse::<f64>().ok());
            return match percent {
                Some(percent) if (0.01..=50.0).contains(&percent) => Ok(Self::Stall(percent / 100.0)),
                _ => Err(format!(
                    "a stall is between stall=0.01% and stall=50% of the time, not {text}"
                )),
            };
        }
        if let Some(percent) = text.strip_suffix('%') {
            let percent: f64 = percent.parse().map_err(|_| wrong())?;
            if !(1.0..=100.0).contains(&percent) {
                return Err(format!("a share is between 1% and 100%, not {text}"));
            }
            return Ok(Self::Share(percent / 100.0));
        }
        let bytes = bytes(text).ok_or_else(wrong)?;
        if bytes < LOCAL_MIN_BYTES {
            return Err(format!(
                "{text} is too little: a program needs at least 4M of local memory"
            ));
        }
        Ok(Self::Bytes(bytes))
    }
}

impl fmt::Display for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => {
                let unit = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
                let unit = unit.iter().find(|(shift, _)| bytes.trailing_zeros() >= *shift);
                let (shift, name) = unit.unwrap_or(&(0, ""));
                write!(f, "{}{name}", bytes >> shift)
            }
            Self::Share(share) => write!(f, "{}%", percent(*share)),
            Self::Stall(share) => write!(f, "stall={}%", percent(*share)),
        }
    }
}

/// A share in percent, without the dust of its binary form.
fn percent(share: f64) -> f64 {
    (share * 1e8).round() / 1e6
}

/// A size such as 8G, in bytes.
fn bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Reads what `--far` says: a directory and a size.
///
/// # Errors
/// A sentence for people.
pub fn tier(text: &str) -> Result<FarTier, String> {
    let wrong = || format!("`{text}` is not a directory and a size, such as /dev/shm=4G");
    let (dir, size) = text.rsplit_once('=').ok_or_else(wrong)?;
    let mib = bytes(size).ok_or_else(wrong)? >> 20;
    let limit_mib = u32::try_from(mib).ok().filter(|mib| (1..=MIB_MAX).contains(mib));
    Ok(FarTier {
        dir: PathBuf::from(dir),
        limit_mib: limit_mib.ok_or_else(|| format!("{size} is not between 1M and 16T"))?,
    })
}

/// A directory that holds slabs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FarTier {
    /// The directory. A nameless file is made in it.
    pub dir: PathBuf,
    /// Most space, MiB (1..=16777216).
    pub limit_mib: u32,
}

/// Far memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FarConfig {
    /// Most compressed memory, as a share of the local memory (0..=0.9); 0: nothing is compressed.
    pub compressed_share: f64,
    /// Most compressed memory where the local memory is a share, MiB (0..=16777216).
    pub compressed_mib: u32,
    /// T: a slab that is not accessed for twice as long is cold, seconds (0..=3600); 0: found from how long
    /// slabs rest between accesses, at least 5.
    pub t_s: u64,
    /// Pages that wait in the set-aside area before they are written, as a share of those in memory
    /// (0.001..=0.5).
    pub aside_share: f64,
    /// z-score of the faults of 2 MiB above which the hand passes over them once (0.1..=10).
    pub z_active: f64,
    /// Threads that read slow slabs, for so many faults at a time (1..=64).
    pub readers: u32,
    /// Directories whose reads take at least this long are read by these threads, µs (0..=1000000).
    pub read_apart_us: u64,
    /// Prices, to tell what far memory saves.
    pub price: FarPrice,
    /// Slab files.
    pub tier: Vec<FarTier>,
}

/// Prices of a GiB, in any unit (0..=1000000). Without one of DRAM nothing is told.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FarPrice {
    /// Of DRAM, compressed or not.
    pub dram: f64,
    /// Of what holds the slabs of each directory; 0 where none is named.
    pub tier: BTreeMap<String, f64>,
}

const PRICE_MAX: f64 = 1e6;

impl FarPrice {
    /// What far pages save: the DRAM that they do not take, less the DRAM and the slabs that they take.
    pub(super) fn saved(&self, status: &FarStatus, is_dram: impl Fn(usize) -> bool) -> Option<f64> {
        if self.dram <= 0.0 {
            return None;
        }
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let page = varve_far::PAGE_BYTES as u64;
        let spared = gib(status.far_pages * page) - gib(status.table_bytes);
        let slabs = status.tiers.iter().enumerate().map(|(number, tier)| {
            let price = if is_dram(number) {
                self.dram
            } else {
                self.tier.get(&tier.name).copied().unwrap_or(0.0)
            };
            gib(u64::from(tier.slabs) << 20) * price
        });
        Some(spared * self.dram - slabs.sum::<f64>())
    }
}

impl Default for FarConfig {
    fn default() -> Self {
        Self {
            compressed_share: 0.5,
            compressed_mib: 1024,
            t_s: 0,
            aside_share: 1.0 / 16.0,
            z_active: varve_far::regions::Z_ACTIVE,
            readers: 8,
            read_apart_us: 20,
            price: FarPrice::default(),
            tier: Vec::new(),
        }
    }
}

const MIB_MAX: u32 = 1 << 24;

impl FarConfig {
    /// Fields with their bounds: name, value, least, most.
    #[must_use]
    pub fn bounds(&self) -> [(&'static str, f64, f64, f64); 8] {
        [
            ("far.compressed_share", self.compressed_share, 0.0, 0.9),
            (
                "far.compressed_mib",
                f64::from(self.compressed_mib),
                0.0,
                f64::from(MIB_MAX),
            ),
            ("far.t_s", self.t_s as f64, 0.0, 3_600.0),
            ("far.aside_share", self.aside_share, 0.001, 0.5),
            ("far.z_active", self.z_active, 0.1, 10.0),
            ("far.readers", f64::from(self.readers), 1.0, 64.0),
            ("far.read_apart_us", self.read_apart_us as f64, 0.0, 1e6),
            ("far.price.dram", self.price.dram, 0.0, PRICE_MAX),
        ]
    }

    /// The fault in the tiers.
    #[must_use]
    pub fn wrong_tiers(&self) -> Option<String> {
        let wrong = self
            .tier
            .iter()
            .find(|tier| !(1..=MIB_MAX).contains(&tier.limit_mib));
        if let Some(tier) = wrong {
            return Some(format!(
                "`limit_mib` of {} is not between 1 and {MIB_MAX}",
                tier.dir.display()
            ));
        }
        let wrong = self
            .price
            .tier
            .iter()
            .find(|(_, price)| !(0.0..=PRICE_MAX).contains(*price));
        if let Some((dir, price)) = wrong {
            return Some(format!(
                "the price of {dir} in [far.price.tier] is {price}, allowed is 0 to {PRICE_MAX}"
            ));
        }
        (self.tier.len() > 8).then(|| "more than 8 tables [[far.tier]]".to_owned())
    }

    /// Most slabs of compressed memory.
    #[must_use]
    pub fn compressed_slabs(&self, local: Local) -> u32 {
        let bytes = match local {
            Local::Bytes(bytes) => bytes as f64 * self.compressed_share,
            Local::Share(_) | Local::Stall(_) if self.compressed_share > 0.0 => {
                f64::from(self.compressed_mib) * 1_048_576.0
            }
            Local::Share(_) | Local::Stall(_) => 0.0,
        };
        (bytes / varve_far::backend::SLAB_BYTES as f64) as u32
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn local_sizes_are_read_and_bad_ones_refused() {
        assert_eq!("8G".parse(), Ok(Local::Bytes(8 << 30)));
        assert_eq!("64MiB".parse(), Ok(Local::Bytes(64 << 20)));
        assert_eq!("60%".parse(), Ok(Local::Share(0.6)));
        for bad in [
            "",
            "0",
            "0%",
            "101%",
            "-1G",
            "G",
            "4X",
            "1K",
            "99999999999999999999",
            "16777216T",
            "nan%",
            "stall=",
            "stall=1",
            "stall=0%",
            "stall=51%",
            "stall=nan%",
        ] {
            assert!(bad.parse::<Local>().is_err(), "{bad}");
        }
        for words in [
            "8G",
            "513M",
            "4194305",
            "60%",
            "33.3%",
            "1T",
            "stall=1%",
            "stall=0.05%",
        ] {
            assert_eq!(
                words.parse::<Local>().map(|local| local.to_string()),
                Ok(words.to_owned())
            );
        }
    }

    #[test]
    fn far_pages_save_the_dram_that_they_do_not_take() {
        let tier = |name: &str, slabs| crate::far::FarTierStatus {
            name: name.to_owned(),
            slabs,
            ..Default::default()
        };
        let status = FarStatus {
            far_pages: 4 << 18,
            table_bytes: 1 << 28,
            tiers: vec![
                tier("compressed DRAM", 512),
                tier("/ssd", 2048),
                tier("/unknown", 9),
            ],
            ..FarStatus::default()
        };
        let mut price = FarPrice::default();
        assert_eq!(price.saved(&status, |tier| tier == 0), None);
        price.dram = 8.0;
        price.tier.insert("/ssd".to_owned(), 1.0);
        // 4 GiB far, less a quarter for tables and a half for compressed pages, less 2 GiB of SSD.
        assert_eq!(price.saved(&status, |tier| tier == 0), Some(8.0 * 3.25 - 2.0));
    }

    #[test]
    fn directories_with_sizes_are_read_and_bad_ones_refused() {
        let far = tier("/a=b=4G").unwrap();
        assert_eq!((far.dir, far.limit_mib), (PathBuf::from("/a=b"), 4096));
        for bad in ["/dev/shm", "/dev/shm=", "/dev/shm=1K", "/dev/shm=17T", "=x"] {
            assert!(tier(bad).is_err(), "{bad}");
        }
    }
}
