//! Numbers with a meaning: inode, generation, block, sequence, session, transaction. No arithmetic beyond the
//! needs of each.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Bytes in one block on every tier and in every tree.
pub const BLOCK_SIZE: usize = 4096;
/// [`BLOCK_SIZE`] as an offset type.
pub const BLOCK_BYTES: u64 = BLOCK_SIZE as u64;
/// Reported size of every directory. It is constant because a client that changes a directory under a lease
/// could not know another value.
pub const DIR_SIZE: u64 = BLOCK_BYTES;
/// The root directory's inode number.
pub const ROOT_INO: Ino = Ino(1);
/// Longest name of a directory entry, in bytes.
pub const NAME_MAX: usize = 255;
/// Longest target of a symbolic link, in bytes: it fits in one block behind the header.
pub const SYMLINK_MAX: usize = BLOCK_SIZE - 32;
/// Most links to one inode.
pub const LINK_MAX: u32 = 65_000;
/// Longest value of an extended attribute, in bytes.
pub const XATTR_VALUE_MAX: usize = 65_536;
/// The attribute that holds file capabilities (capabilities(7)). Each change of the data or the owner removes
/// it.
pub const XATTR_CAPABILITY: &[u8] = b"security.capability";
/// Largest file, in bytes (2^60).
pub const FILE_SIZE_MAX: u64 = 1 << 60;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        pub struct $name(pub $inner);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// Inode number. 0 is never a file; 1 is the root directory.
    Ino(u64)
);
number!(
    /// How many times an inode number has been used; distinguishes a file from its predecessor.
    Generation(u32)
);
/// Block of [`BLOCK_SIZE`] bytes on one tier. Where the tier does not follow from elsewhere, as in a pointer
/// to metadata, bits 56 and above encode it; NVM is 0 there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct BlockNo(pub u64);

/// Bits of a [`BlockNo`] that hold the number on its tier.
const BLOCK_NUMBER_BITS: u32 = 56;

number!(
    /// Block of [`BLOCK_SIZE`] bytes within one file.
    FileBlock(u64)
);
number!(
    /// Sequence number in one session's log; starts at 1, dense.
    LogSeq(u64)
);
number!(
    /// A session and its log; never reused in a pool.
    SessionId(u64)
);
number!(
    /// Transaction of the metadata journal; starts at 1, dense.
    TxId(u64)
);
number!(
    /// One grant of a lease; unique while a daemon runs and across its restarts.
    LeaseNo(u64)
);

impl BlockNo {
    /// Builds the number of block `number` of `tier`, with the tier encoded in it.
    #[must_use]
    pub const fn on(tier: Tier, number: u64) -> Self {
        Self(number | (tier as u64) << BLOCK_NUMBER_BITS)
    }

    /// Returns the encoded tier, and the number on that tier; `None`: no such tier exists.
    #[must_use]
    pub const fn home(self) -> Option<(Tier, u64)> {
        // Eight bits are left.
        match Tier::from_u8((self.0 >> BLOCK_NUMBER_BITS) as u8) {
            Some(tier) => Some((tier, self.0 & ((1 << BLOCK_NUMBER_BITS) - 1))),
            None => None,
        }
    }

    /// Whether another tier than NVM is encoded.
    #[must_use]
    pub const fn is_cold(self) -> bool {
        self.0 >> BLOCK_NUMBER_BITS != Tier::Nvm as u64
    }

    /// Byte offset of the block on its tier.
    #[must_use]
    pub const fn offset_bytes(self) -> u64 {
        self.0 * BLOCK_BYTES
    }
}

impl fmt::Display for BlockNo {
    /// `77`, or `ssd:77` where another tier than NVM is encoded.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.home() {
            Some((Tier::Nvm, number)) => number.fmt(f),
            Some((tier, number)) => write!(f, "{}:{number}", tier.name()),
            None => write!(f, "{:#x}", self.0),
        }
    }
}

impl Ino {
    /// Returns the inode number in an [`InodeKey::number`], the form that programs see.
    #[must_use]
    pub const fn of_number(number: u64) -> Self {
        Self(number & ((1 << INO_BITS) - 1))
    }
}

impl LogSeq {
    /// The next number.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Bits of an inode number: enough for 10^12 inodes.
pub const INO_BITS: u32 = 40;
/// Bits of a generation in [`InodeKey::number`]: with those of the inode number it stays positive in 64 bits.
const GENERATION_BITS: u32 = 23;

/// Inode number and generation: identifies one file among all that used the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct InodeKey {
    /// Inode number.
    pub ino: Ino,
    /// Use of that number.
    pub generation: Generation,
}

impl InodeKey {
    /// The root directory.
    pub const ROOT: Self = Self {
        ino: ROOT_INO,
        generation: Generation(1),
    };

    /// Builds a key from its parts.
    #[must_use]
    pub const fn new(ino: u64, generation: u32) -> Self {
        Self {
            ino: Ino(ino),
            generation: Generation(generation),
        }
    }

    /// Returns the file's number for programs and kernels (`st_ino`, `d_ino`, a node of FUSE): the inode
    /// number, and above its [`INO_BITS`] the number of earlier uses (modulo 2^23). A reused inode number
    /// thus gives a different result. A kernel must never see two files under one number: an answer about the
    /// older file may still be in flight when the kernel learns of the newer one, and would make calls on the
    /// newer one fail with `EIO`.
    #[must_use]
    pub const fn number(self) -> u64 {
        let lives = self.generation.0.saturating_sub(1) as u64 & ((1 << GENERATION_BITS) - 1);
        self.ino.0 | lives << INO_BITS
    }
}

impl InodeKey {
    /// Returns the key of a [`number`](Self::number), if the inode number was used at most 2^23 times; else
    /// the key of an earlier, deleted file.
    #[must_use]
    pub const fn of_number(number: u64) -> Self {
        let lives = (number >> INO_BITS) as u32 & ((1 << GENERATION_BITS) - 1);
        Self {
            ino: Ino::of_number(number),
            generation: Generation(lives + 1),
        }
    }
}

impl fmt::Display for InodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.ino, self.generation)
    }
}

/// A medium's place in the hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Tier {
    /// Byte-addressable, fastest.
    Nvm = 0,
    /// Flash.
    Ssd = 1,
    /// Disk.
    Hdd = 2,
}

impl Tier {
    /// All tiers, fastest first.
    pub const ALL: [Self; 3] = [Self::Nvm, Self::Ssd, Self::Hdd];

    /// The tier with this number.
    #[must_use]
    pub const fn from_u8(raw: u8) -> Option<Self> {
        match raw {
            0 => Some(Self::Nvm),
            1 => Some(Self::Ssd),
            2 => Some(Self::Hdd),
            _ => None,
        }
    }

    /// The tier with this [name](Self::name).
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tier| tier.name() == name)
    }

    /// `nvm`, `ssd` or `hdd`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvm => "nvm",
            Self::Ssd => "ssd",
            Self::Hdd => "hdd",
        }
    }
}

/// A run of log sequence numbers, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SeqRange {
    /// First number.
    pub first: LogSeq,
    /// Last number.
    pub last: LogSeq,
}

impl SeqRange {
    /// Whether `seq` lies in the run.
    #[must_use]
    pub const fn contains(&self, seq: LogSeq) -> bool {
        self.first.0 <= seq.0 && seq.0 <= self.last.0
    }
}

/// Most missing runs that a seal can name: one for each lane.
pub const SEAL_MISSING_MAX: usize = 64;

/// The final end of a session's log.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Seal {
    /// Highest sequence number that counts.
    pub last: LogSeq,
    /// Numbers below `last` that do not count (their writers had not committed); ascending, at most
    /// [`SEAL_MISSING_MAX`].
    pub missing: Vec<SeqRange>,
}

impl Seal {
    /// Whether the entry `seq` counts.
    #[must_use]
    pub fn covers(&self, seq: LogSeq) -> bool {
        seq.0 >= 1 && seq <= self.last && !self.missing.iter().any(|run| run.contains(seq))
    }
}

#[cfg(test)]
mod tests {
    use super::{BlockNo, INO_BITS, Ino, InodeKey, Tier};

    #[test]
    fn block_number_keeps_its_tier() {
        assert_eq!(BlockNo::on(Tier::Nvm, 77), BlockNo(77));
        for tier in Tier::ALL {
            let block = BlockNo::on(tier, (1 << 48) - 1);
            assert_eq!(block.home(), Some((tier, (1 << 48) - 1)));
            assert_eq!(block.is_cold(), tier != Tier::Nvm);
        }
        assert_eq!(BlockNo(3 << 56).home(), None);
        let names =
            [BlockNo(7), BlockNo::on(Tier::Ssd, 8), BlockNo(3 << 56 | 9)].map(|block| block.to_string());
        assert_eq!(names, ["7", "ssd:8", "0x300000000000009"]);
    }

    #[test]
    fn each_life_of_an_inode_number_has_its_own_to_programs() {
        assert_eq!(InodeKey::ROOT.number(), 1, "what FUSE names the root");
        assert_eq!(InodeKey::new(0, 0).number(), 0, "what FUSE takes for nothing");
        assert_eq!(InodeKey::new(7, 1).number(), 7);
        assert_eq!(InodeKey::new(7, 3).number(), 7 | 2 << INO_BITS);
        for generation in [0, 1, 2, 1 << 23, u32::MAX] {
            let number = InodeKey::new((1 << INO_BITS) - 1, generation).number();
            assert_eq!(Ino::of_number(number), Ino((1 << INO_BITS) - 1));
            assert!(i64::try_from(number).is_ok(), "programs take it for signed");
        }
        for key in [InodeKey::ROOT, InodeKey::new(7, 3), InodeKey::new(9, 1 << 23)] {
            assert_eq!(InodeKey::of_number(key.number()), key);
        }
        let late = InodeKey::new(9, 5 + (1 << 23));
        assert_eq!(InodeKey::of_number(late.number()), InodeKey::new(9, 5));
    }
}
