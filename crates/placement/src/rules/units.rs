//! Sizes and ages in operators' notation: `64KiB`, `7d`. Plain numbers are bytes and seconds.

use serde::{Deserialize, Serialize};

/// Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "u64")]
pub(super) struct Size(pub(super) u64);

/// Seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "u64")]
pub(super) struct Age(pub(super) u64);

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Written {
    Number(u64),
    Text(String),
}

const SIZES: [(&str, u64); 5] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];
const AGES: [(&str, u64); 5] = [("s", 1), ("min", 60), ("h", 3600), ("d", 86_400), ("w", 604_800)];

impl Written {
    fn read(self, units: &[(&str, u64)]) -> Result<u64, String> {
        let text = match self {
            Self::Number(number) => return Ok(number),
            Self::Text(text) => text,
        };
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let names = || units.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        let wrong = || format!("\"{text}\" is no number with one of the units {}", names());
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let (_, each) = units
            .iter()
            .find(|(name, _)| *name == unit.trim())
            .ok_or_else(wrong)?;
        number
            .checked_mul(*each)
            .ok_or_else(|| format!("\"{text}\" is too large"))
    }
}

impl TryFrom<Written> for Size {
    type Error = String;
    fn try_from(written: Written) -> Result<Self, String> {
        written.read(&SIZES).map(Self)
    }
}

impl TryFrom<Written> for Age {
    type Error = String;
    fn try_from(written: Written) -> Result<Self, String> {
        written.read(&AGES).map(Self)
    }
}

impl From<Size> for u64 {
    fn from(size: Size) -> Self {
        size.0
    }
}

impl From<Age> for u64 {
    fn from(age: Age) -> Self {
        age.0
    }
}
