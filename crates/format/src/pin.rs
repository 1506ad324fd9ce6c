//! An operator's wish about the place of a file's data (`varve pin`, `varve exclude`), one byte of the inode.
//! It is a hint: a program that does not know it may lose it, and then the policy decides.

use crate::Tier;
use serde::{Deserialize, Serialize};

const BY_COMMAND: u8 = 0x80;
const BY_RULE: u8 = 0x40;
const STAY: u8 = 4;

/// Where an operator wants a file's data, and that of files made in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PinTo {
    /// Where the policy puts it.
    #[default]
    Policy,
    /// On this tier while there is room; nothing is moved away from it.
    Tier(Tier),
    /// Where it is: nothing is moved.
    Stay,
}

/// Who has set a pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PinnedBy {
    /// It comes from the directory where the inode got its name, and changes when the inode is renamed into
    /// another one.
    #[default]
    Directory,
    /// A command, on this inode.
    Command,
    /// A rule of the pool's configuration that matched the file.
    Rule,
}

/// The pin of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Pin {
    /// The wish.
    pub to: PinTo,
    /// Who has set it.
    pub by: PinnedBy,
}

impl Pin {
    /// No wish.
    pub const NONE: Self = Self {
        to: PinTo::Policy,
        by: PinnedBy::Directory,
    };

    /// Returns what an inode takes over from a directory with this pin.
    #[must_use]
    pub const fn inherited(self) -> Self {
        Self {
            by: PinnedBy::Directory,
            ..self
        }
    }

    /// Whether data may not be moved away from `tier`.
    #[must_use]
    pub fn keeps_on(self, tier: Tier) -> bool {
        match self.to {
            PinTo::Policy => false,
            PinTo::Tier(wanted) => wanted == tier,
            PinTo::Stay => true,
        }
    }

    /// The tier that it names.
    #[must_use]
    pub const fn tier(self) -> Option<Tier> {
        match self.to {
            PinTo::Tier(tier) => Some(tier),
            PinTo::Policy | PinTo::Stay => None,
        }
    }

    /// The byte in an inode's image.
    pub(crate) const fn encode(self) -> u8 {
        let to = match self.to {
            PinTo::Policy => 0,
            PinTo::Tier(tier) => tier as u8 + 1,
            PinTo::Stay => STAY,
        };
        match self.by {
            PinnedBy::Directory => to,
            PinnedBy::Command => to | BY_COMMAND,
            PinnedBy::Rule => to | BY_RULE,
        }
    }

    /// `None`: it is never written.
    pub(crate) const fn decode(byte: u8) -> Option<Self> {
        let to = match byte & !(BY_COMMAND | BY_RULE) {
            0 => PinTo::Policy,
            STAY => PinTo::Stay,
            number => match Tier::from_u8(number - 1) {
                Some(tier) => PinTo::Tier(tier),
                None => return None,
            },
        };
        let by = match byte & (BY_COMMAND | BY_RULE) {
            0 => PinnedBy::Directory,
            BY_COMMAND => PinnedBy::Command,
            BY_RULE => PinnedBy::Rule,
            _ => return None,
        };
        Some(Self { to, by })
    }
}

/// The byte of an inode's image that says where an operator wants what the file shares with others.
pub(crate) const fn encode_shared(tier: Option<Tier>) -> u8 {
    match tier {
        None => 0,
        Some(tier) => tier as u8 + 1,
    }
}

/// As it is a hint, a value that is not known is none.
pub(crate) fn decode_shared(byte: u8) -> Option<Tier> {
    byte.checked_sub(1).and_then(Tier::from_u8)
}

#[cfg(test)]
mod tests {
    use super::Pin;

    #[test]
    fn pins_come_back_equal_and_others_are_refused() {
        for byte in 0..=u8::MAX {
            let pin = Pin::decode(byte);
            assert_eq!(pin.is_some(), byte & 0x3f <= 4 && byte < 0xc0, "{byte:#x}");
            assert_eq!(pin.map_or(byte, Pin::encode), byte);
        }
    }
}
