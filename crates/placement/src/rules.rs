//! Operators' rules about files: `[[rule]]` tables of `varve.toml`. Owns matching and its reasons; moves
//! nothing, and knows no file system: the caller passes a file's path, size and age. The first rule that
//! matches wins; what operators have said by command about a file or its directory comes before, and is not
//! known here.
//!
//! ```toml
//! [[rule]]
//! match = ["*.log", "/var/spool/**"]   # a pattern without "/" matches names in all directories
//! older_than = "7d"
//! larger_than = "1MiB"
//! tier = "hdd"
//!
//! [[rule]]
//! match = "/db/**"
//! tier = "ssd"
//!
//! [[rule]]
//! match = "*.iso"
//! exclude = true                       # is never moved
//! ```

mod units;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;
use units::{Age, Size};
use varve_format::{PinTo, Tier};

/// One pattern or several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Patterns {
    One(String),
    Many(Vec<String>),
}

/// A `[[rule]]` in its written form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleSpec {
    r#match: Patterns,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    older_than: Option<Age>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    younger_than: Option<Age>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    larger_than: Option<Size>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    smaller_than: Option<Size>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tier: Option<TierName>,
    #[serde(default)]
    exclude: bool,
}

/// `nvm`, `ssd` or `hdd`, as operators write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum TierName {
    Nvm,
    Ssd,
    Hdd,
}

impl From<TierName> for Tier {
    fn from(name: TierName) -> Self {
        match name {
            TierName::Nvm => Self::Nvm,
            TierName::Ssd => Self::Ssd,
            TierName::Hdd => Self::Hdd,
        }
    }
}

/// An unusable rule. Numbers begin at 1, as operators count.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// A pattern is invalid.
    #[error(
        "rule {rule}: \"{pattern}\" is no pattern ({reason}); see [[rule]] in docs/reference/configuration.md"
    )]
    Pattern {
        /// The rule's number.
        rule: usize,
        /// The pattern.
        pattern: String,
        /// The problem.
        reason: String,
    },
    /// A path that does not begin at the root.
    #[error(
        "rule {0}: \"{1}\" can match no path: begin it with \"/\", the pool's root, or \"**/\", any directory"
    )]
    Relative(usize, String),
    /// It ends like a directory.
    #[error("rule {0}: \"{1}\" can match no file: for all below a directory end it with \"/**\"")]
    Directory(usize, String),
    /// It has no pattern.
    #[error("rule {0}: match is empty; write match = \"**\" for all files")]
    Empty(usize),
    /// It has no action, or two.
    #[error("rule {0}: give one of tier and exclude")]
    NotOne(usize),
    /// No file can match it.
    #[error(
        "rule {0}: no file can match; older_than must be below younger_than, larger_than below smaller_than"
    )]
    Never(usize),
}

/// Properties of a file that rules match.
#[derive(Debug, Clone, Copy)]
pub struct File<'f> {
    /// Path within the pool, from its root: `/db/main`.
    pub path: &'f str,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Time since its data was last changed.
    pub age: Duration,
}

/// The reason why a rule does not match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Miss {
    /// Its path does not match.
    Path,
    /// It is too young, in seconds.
    Young {
        /// The rule's bound.
        older_than_s: u64,
    },
    /// It is too old.
    Old {
        /// The rule's bound.
        younger_than_s: u64,
    },
    /// It is too small, in bytes.
    Small {
        /// The rule's bound.
        larger_than: u64,
    },
    /// It is too large.
    Large {
        /// The rule's bound.
        smaller_than: u64,
    },
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path => f.write_str("the path does not match"),
            Self::Young { older_than_s } => write!(f, "changed less than {older_than_s} s ago"),
            Self::Old { younger_than_s } => write!(f, "changed {younger_than_s} s ago or earlier"),
            Self::Small { larger_than } => write!(f, "not larger than {larger_than} bytes"),
            Self::Large { smaller_than } => write!(f, "not smaller than {smaller_than} bytes"),
        }
    }
}

/// What a file's data is to be, with the reasons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The wished place.
    pub to: PinTo,
    /// The rule that matches, from 1.
    pub rule: Option<usize>,
    /// Rules that were tried before, and why they do not match.
    pub passed: Vec<(usize, Miss)>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to {
            PinTo::Tier(tier) => write!(f, "goes to {}", tier.name())?,
            PinTo::Stay => f.write_str("is not moved")?,
            PinTo::Policy => f.write_str("where the policy puts it")?,
        }
        match self.rule {
            Some(rule) => write!(f, " (rule {rule})"),
            None => f.write_str(" (no rule matches)"),
        }
    }
}

#[derive(Debug, Clone)]
struct Rule {
    paths: GlobSet,
    spec: RuleSpec,
    to: PinTo,
}

/// Compiled rules.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    rules: Vec<Rule>,
}

impl Rules {
    /// Compiles `[[rule]]` tables, in their order.
    ///
    /// # Errors
    /// The first unusable rule.
    pub fn new(specs: Vec<RuleSpec>) -> Result<Self, RuleError> {
        let compiled = specs
            .into_iter()
            .enumerate()
            .map(|(at, spec)| compile(at + 1, spec));
        Ok(Self {
            rules: compiled.collect::<Result<_, _>>()?,
        })
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The tiers that they name.
    pub fn tiers(&self) -> impl Iterator<Item = Tier> {
        self.rules.iter().filter_map(|rule| match rule.to {
            PinTo::Tier(tier) => Some(tier),
            PinTo::Policy | PinTo::Stay => None,
        })
    }

    /// Returns what the rules wish for a file, and the reasons.
    #[must_use]
    pub fn explain(&self, file: &File<'_>) -> Explanation {
        let mut passed = Vec::new();
        for (number, rule) in (1..).zip(&self.rules) {
            match rule.miss(file) {
                None => {
                    return Explanation {
                        to: rule.to,
                        rule: Some(number),
                        passed,
                    };
                }
                Some(miss) => passed.push((number, miss)),
            }
        }
        Explanation {
            to: PinTo::Policy,
            rule: None,
            passed,
        }
    }
}

/// Removes slashes at the end.
fn normal(path: &str) -> &str {
    let path = path.trim_end_matches('/');
    if path.is_empty() { "/" } else { path }
}

fn compile(number: usize, spec: RuleSpec) -> Result<Rule, RuleError> {
    let patterns = match &spec.r#match {
        Patterns::One(pattern) => std::slice::from_ref(pattern),
        Patterns::Many(patterns) => patterns,
    };
    if patterns.is_empty() {
        return Err(RuleError::Empty(number));
    }
    let mut set = GlobSetBuilder::new();
    let wrong = |pattern: &str, error: &globset::Error| RuleError::Pattern {
        rule: number,
        pattern: pattern.into(),
        reason: error.kind().to_string(),
    };
    for pattern in patterns {
        if pattern.is_empty() {
            return Err(RuleError::Empty(number));
        }
        if pattern.contains('/') && !pattern.starts_with('/') && !pattern.starts_with("**/") {
            return Err(RuleError::Relative(number, pattern.clone()));
        }
        if pattern.ends_with('/') {
            return Err(RuleError::Directory(number, pattern.clone()));
        }
        // A pattern without a slash matches names in all directories.
        let whole = if pattern.contains('/') {
            pattern.clone()
        } else {
            format!("**/{pattern}")
        };
        let glob = GlobBuilder::new(&whole).literal_separator(true).build();
        set.add(glob.map_err(|error| wrong(pattern, &error))?);
    }
    let paths = set.build().map_err(|error| wrong("match", &error))?;
    let to = match (spec.tier, spec.exclude) {
        (Some(tier), false) => PinTo::Tier(tier.into()),
        (None, true) => PinTo::Stay,
        _ => return Err(RuleError::NotOne(number)),
    };
    let ages = spec.older_than.zip(spec.younger_than);
    let sizes = spec.larger_than.zip(spec.smaller_than);
    if ages.is_some_and(|(older, younger)| older.0 >= younger.0)
        || sizes.is_some_and(|(larger, smaller)| larger.0 + 1 >= smaller.0)
    {
        return Err(RuleError::Never(number));
    }
    Ok(Rule { paths, spec, to })
}

impl Rule {
    fn miss(&self, file: &File<'_>) -> Option<Miss> {
        if !self.paths.is_match(normal(file.path)) {
            return Some(Miss::Path);
        }
        let (age_s, size) = (file.age.as_secs(), file.size_bytes);
        let spec = &self.spec;
        let young = spec
            .older_than
            .filter(|age| age_s < age.0)
            .map(|age| Miss::Young { older_than_s: age.0 });
        let old = spec
            .younger_than
            .filter(|age| age_s >= age.0)
            .map(|age| Miss::Old {
                younger_than_s: age.0,
            });
        let small = spec
            .larger_than
            .filter(|least| size <= least.0)
            .map(|least| Miss::Small { larger_than: least.0 });
        let large = spec
            .smaller_than
            .filter(|most| size >= most.0)
            .map(|most| Miss::Large { smaller_than: most.0 });
        young.or(old).or(small).or(large)
    }
}

#[cfg(test)]
mod tests;
