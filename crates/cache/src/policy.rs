//! The eight index policies (thesis §2.3) and the state that each keeps in memory. Knows bits, not bytes on
//! media.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// An index policy: how objects on disk are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Policy {
    /// One object a bin of the Disk Table; nothing in memory (§2.3.1).
    Basic,
    /// Sets of N objects that lie together; nothing in memory (§2.3.2).
    Set,
    /// Eight bits of hash and a rank for each object: a miss costs no seek (§2.3.3).
    SetMem,
    /// As `SetMem`, for the most recently used sets only (§2.3.3).
    SetMemLru,
    /// No Disk Table: every object is in the circular log, its place in memory (§2.3.4).
    Log,
    /// As `Log`; only the most recently used objects of a set have their places in memory (§2.3.4).
    LogLru,
    /// `LogLru` that reads related objects together (§2.3.5).
    LogLruPrefetch,
    /// `Log` that reads related objects together (§2.3.5).
    LogPrefetch,
}

impl Policy {
    /// All policies, in the order of Table 2.3.
    pub const ALL: [Self; 8] = [
        Self::Basic,
        Self::Set,
        Self::SetMem,
        Self::SetMemLru,
        Self::Log,
        Self::LogLru,
        Self::LogLruPrefetch,
        Self::LogPrefetch,
    ];

    /// Its name on the command line and in configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Basic => "basic",
            Self::Set => "set",
            Self::SetMem => "set-mem",
            Self::SetMemLru => "set-mem-lru",
            Self::Log => "log",
            Self::LogLru => "log-lru",
            Self::LogLruPrefetch => "log-lru-prefetch",
            Self::LogPrefetch => "log-prefetch",
        }
    }

    /// Whether heads of objects lie in a Disk Table (their tails are in the log).
    pub const fn has_table(self) -> bool {
        matches!(self, Self::Basic | Self::Set | Self::SetMem | Self::SetMemLru)
    }

    /// Whether some positions are on disk only.
    pub const fn has_position_file(self) -> bool {
        matches!(self, Self::LogLru | Self::LogLruPrefetch)
    }

    /// Whether something of the index is on disk only: positions, or whole sets.
    pub const fn leaves_index(self) -> bool {
        self.has_position_file() || matches!(self, Self::SetMemLru)
    }

    /// Whether related objects are read together.
    pub const fn prefetches(self) -> bool {
        matches!(self, Self::LogPrefetch | Self::LogLruPrefetch)
    }

    /// Whether memory holds any state of single objects.
    pub const fn has_index(self) -> bool {
        !matches!(self, Self::Basic | Self::Set)
    }

    /// The policy's number on media.
    pub const fn code(self) -> u8 {
        match self {
            Self::Basic => 1,
            Self::Set => 2,
            Self::SetMem => 3,
            Self::SetMemLru => 4,
            Self::Log => 5,
            Self::LogLru => 6,
            Self::LogLruPrefetch => 7,
            Self::LogPrefetch => 8,
        }
    }

    /// Returns the policy of a number on media.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.code() == code)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == text);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("there is no policy `{text}`; there are {names}")
        })
    }
}

/// Bits of hash kept for an object.
pub const HASH_BITS: u32 = 8;
/// Bits of the log's generation.
pub const GENERATION_BITS: u32 = 4;
/// Bits of a position in the log.
pub const POSITION_BITS: u32 = 32;
/// Bits of a prefetch length, in blocks.
pub const PREFETCH_BITS: u32 = 8;
/// The most objects of a set.
pub const WAYS_MAX: usize = 16;

/// An invalid shape.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ShapeError {
    /// The set size is not supported.
    #[error("a set of {0} objects cannot be: choose 4, 8 or 16 (1 for the policy `basic`)")]
    Ways(u8),
    /// The number of positions in memory is not supported.
    #[error(
        "{positions} positions a set cannot be kept in memory: choose {least} to {most} for sets of {most}"
    )]
    Positions {
        /// The requested number of positions.
        positions: u8,
        /// The smallest valid number.
        least: u8,
        /// The largest valid number.
        most: u8,
    },
}

/// A policy with the size of its sets: together they determine the bits of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    policy: Policy,
    ways: u8,
    positions: u8,
}

impl Shape {
    /// The paper's defaults: sets of 8; `LogLru` keeps 4 positions a set.
    pub const fn new(policy: Policy) -> Self {
        let ways = if matches!(policy, Policy::Basic) { 1 } else { 8 };
        let positions = match policy {
            Policy::Log | Policy::LogPrefetch => ways,
            Policy::LogLru | Policy::LogLruPrefetch => ways / 2,
            _ => 0,
        };
        Self {
            policy,
            ways,
            positions,
        }
    }

    /// A shape with sets of `ways` objects, of which `positions` have their places in memory (`None`: half).
    ///
    /// # Errors
    /// `Ways` unless 4, 8 or 16 (1 for `Basic`); `Positions` unless a quarter of `ways` to all of them.
    pub const fn with(policy: Policy, ways: u8, positions: Option<u8>) -> Result<Self, ShapeError> {
        let basic = matches!(policy, Policy::Basic);
        if !(basic && ways == 1 || !basic && matches!(ways, 4 | 8 | 16)) {
            return Err(ShapeError::Ways(ways));
        }
        let kept = match (policy, positions) {
            (Policy::Log | Policy::LogPrefetch, _) => ways,
            (Policy::LogLru | Policy::LogLruPrefetch, None) => ways / 2,
            (Policy::LogLru | Policy::LogLruPrefetch, Some(kept)) => kept,
            _ => 0,
        };
        if policy.has_position_file() && (kept < ways / 4 || kept > ways) {
            return Err(ShapeError::Positions {
                positions: kept,
                least: ways / 4,
                most: ways,
            });
        }
        Ok(Self {
            policy,
            ways,
            positions: kept,
        })
    }

    /// The policy.
    pub const fn policy(self) -> Policy {
        self.policy
    }

    /// Objects a set.
    pub const fn ways(self) -> usize {
        self.ways as usize
    }

    /// Positions kept in memory for a set.
    pub const fn positions(self) -> usize {
        self.positions as usize
    }

    /// Prefetch lengths kept in memory for a set: one beside each position.
    pub const fn prefetches(self) -> usize {
        if self.policy.prefetches() {
            self.positions()
        } else {
            0
        }
    }

    /// Bits of a rank.
    pub const fn rank_bits(self) -> u32 {
        (self.ways as u32).ilog2()
    }

    /// Whether generations of the log are kept.
    pub const fn has_generations(self) -> bool {
        !self.policy.has_table()
    }

    /// Bits of one set in memory; 0 for policies without an index.
    pub const fn set_bits(self) -> u32 {
        if !self.policy.has_index() {
            return 0;
        }
        let generation = if self.has_generations() {
            GENERATION_BITS
        } else {
            0
        };
        self.ways as u32 * (HASH_BITS + self.rank_bits() + generation)
            + self.positions as u32 * POSITION_BITS
            + self.prefetches() as u32 * PREFETCH_BITS
    }

    /// Bytes of one set in memory. Each part of a set is rounded up to whole bytes.
    pub const fn set_bytes(self) -> usize {
        self.set_bits() as usize / 8
    }

    /// Bits an object in memory, as Table 2.3 counts them.
    pub fn object_bits(self) -> f64 {
        f64::from(self.set_bits()) / f64::from(self.ways)
    }
}

#[cfg(test)]
mod tests {
    use super::{Policy, Shape, ShapeError};

    #[test]
    fn bits_are_those_of_the_thesis() {
        let bits = |policy| Shape::new(policy).object_bits();
        assert_eq!(bits(Policy::Basic), 0.0);
        assert_eq!(bits(Policy::Set), 0.0);
        assert_eq!(bits(Policy::SetMem), 11.0);
        assert_eq!(bits(Policy::Log), 47.0);
        assert_eq!(bits(Policy::LogLru), 31.0);
        assert_eq!(bits(Policy::LogLruPrefetch), 35.0);
        assert_eq!(bits(Policy::LogPrefetch), 55.0);
    }

    #[test]
    fn every_shape_is_whole_bytes() {
        for policy in Policy::ALL {
            for ways in [4, 8, 16] {
                for positions in ways / 4..=ways {
                    if let Ok(shape) = Shape::with(policy, ways, Some(positions)) {
                        assert_eq!(shape.set_bits() % 8, 0, "{shape:?}");
                    }
                }
            }
            assert_eq!(Policy::from_code(policy.code()), Some(policy));
            assert_eq!(policy.name().parse(), Ok(policy));
        }
    }

    #[test]
    fn shape_refuses_what_cannot_be() {
        assert_eq!(Shape::with(Policy::Log, 5, None), Err(ShapeError::Ways(5)));
        assert_eq!(Shape::with(Policy::Basic, 8, None), Err(ShapeError::Ways(8)));
        assert!(Shape::with(Policy::LogLru, 8, Some(1)).is_err());
        assert!(Shape::with(Policy::LogLru, 8, Some(9)).is_err());
    }
}
