//! The feature words of a pool: which optional fields of the format are in use. Owns their bits and names;
//! does not know their location (superblock and pool state).

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

bitflags::bitflags! {
    /// Features that a program must know to open a pool.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Incompat: u64 {
        /// Extents may be shared by files.
        const SHARED_EXTENTS = 1;
        /// Snapshots.
        const SNAPSHOTS = 1 << 1;
        /// Small writes may lie beside the block that they change.
        const PATCHES = 1 << 2;
        /// An extent may have a copy on another device.
        const SECOND_COPIES = 1 << 3;
        /// Extents may be compressed.
        const COMPRESSION = 1 << 4;
        /// Blocks have keyed tags.
        const TAGS = 1 << 5;
        /// A tier may have several devices.
        const DEVICES = 1 << 6;
        /// Clients may have runs of blocks for memory.
        const SLABS = 1 << 7;
    }

    /// Features that a program must know to change a pool.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct RoCompat: u64 {
        /// Inodes belong to projects, which have quotas.
        const PROJECTS = 1;
    }

    /// Features of undigested logs and of the journal; cleared when these are empty.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct LogIncompat: u64 {
        /// Entries may name blocks that hold their payload.
        const PLACED_PAYLOAD = 1;
        /// Blocks in use may be written by the redo of entries.
        const IN_PLACE = 1 << 1;
        /// Entries may rest on those of other logs.
        const DEPENDENT_LOGS = 1 << 2;
    }
}

/// The four words. Displayed as the features' names; bits without a name as their word and bits.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Features {
    /// An [`Incompat`].
    pub incompat: U64,
    /// A [`RoCompat`].
    pub ro_compat: U64,
    /// Features that need not be known; none has a name.
    pub compat: U64,
    /// A [`LogIncompat`].
    pub log_incompat: U64,
}

impl Features {
    /// No feature.
    pub const NONE: Self = Self {
        incompat: U64::ZERO,
        ro_compat: U64::ZERO,
        compat: U64::ZERO,
        log_incompat: U64::ZERO,
    };

    /// The features that this program supports.
    pub const BUILT: Self = Self {
        incompat: U64::new(Incompat::SHARED_EXTENTS.bits() | Incompat::DEVICES.bits()),
        log_incompat: U64::new(LogIncompat::IN_PLACE.bits()),
        ..Self::NONE
    };

    /// Returns the features that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let without = |word: U64, other: U64| U64::new(word.get() & !other.get());
        Self {
            incompat: without(self.incompat, other.incompat),
            ro_compat: without(self.ro_compat, other.ro_compat),
            compat: without(self.compat, other.compat),
            log_incompat: without(self.log_incompat, other.log_incompat),
        }
    }

    /// Returns the features that this program must know to open the pool, and does not support.
    #[must_use]
    pub fn unserved(&self) -> Self {
        Self {
            compat: U64::ZERO,
            ..self.without(&Self::BUILT)
        }
    }

    /// Whether no feature is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::NONE
    }

    /// Returns the names, in the order of words and bits.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let incompat = Incompat::from_bits_retain(self.incompat.get());
        let ro_compat = RoCompat::from_bits_retain(self.ro_compat.get());
        let log_incompat = LogIncompat::from_bits_retain(self.log_incompat.get());
        let named = incompat.iter_names().map(|(name, _)| name);
        let named = named.chain(ro_compat.iter_names().map(|(name, _)| name));
        let named = named.chain(log_incompat.iter_names().map(|(name, _)| name));
        let nameless = [
            ("incompat", incompat.bits() & !Incompat::all().bits()),
            ("ro_compat", ro_compat.bits() & !RoCompat::all().bits()),
            ("compat", self.compat.get()),
            ("log_incompat", log_incompat.bits() & !LogIncompat::all().bits()),
        ];
        let nameless = nameless
            .into_iter()
            .filter(|(_, bits)| *bits != 0)
            .map(|(word, bits)| format!("{word} {bits:#x}"));
        named.map(str::to_ascii_lowercase).chain(nameless).collect()
    }
}

impl std::fmt::Display for Features {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.names().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::{Features, Incompat, LogIncompat, RoCompat};
    use zerocopy::little_endian::U64;

    #[test]
    fn features_are_told_by_name_and_unknown_ones_by_bit() {
        let all = Features {
            incompat: U64::new((Incompat::COMPRESSION | Incompat::TAGS).bits() | 1 << 40),
            ro_compat: U64::new(RoCompat::PROJECTS.bits()),
            compat: U64::new(1 << 63),
            log_incompat: U64::new(LogIncompat::IN_PLACE.bits()),
        };
        let said = "compression, tags, projects, in_place, incompat 0x10000000000, compat 0x8000000000000000";
        assert_eq!(all.to_string(), said);
        assert_eq!(all.without(&all), Features::NONE);
        assert!(Features::NONE.names().is_empty());
    }

    #[test]
    fn features_keep_their_bits() {
        let bits: Vec<_> = Incompat::all()
            .iter_names()
            .map(|(name, bit)| (name, bit.bits()))
            .collect();
        let expected = [
            "SHARED_EXTENTS",
            "SNAPSHOTS",
            "PATCHES",
            "SECOND_COPIES",
            "COMPRESSION",
            "TAGS",
            "DEVICES",
            "SLABS",
        ];
        let expected: Vec<_> = (0..)
            .zip(expected)
            .map(|(bit, name)| (name, 1_u64 << bit))
            .collect();
        assert_eq!(bits, expected);
        assert_eq!(RoCompat::PROJECTS.bits(), 1);
        let log = [
            LogIncompat::PLACED_PAYLOAD,
            LogIncompat::IN_PLACE,
            LogIncompat::DEPENDENT_LOGS,
        ];
        assert_eq!(log.map(|bit| bit.bits()), [1, 2, 4]);
    }
}
