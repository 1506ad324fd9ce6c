//! Where what a policy leaves of its index on disk lies, and what that costs: for messages.

use crate::device::FileDevice;
use crate::device::pool::{Pinned, pin_at};
use crate::policy::{Policy, Shape};
use crate::store::Superblock;
use std::fmt;
use std::path::{Path, PathBuf};

/// Where the index file of a store's device lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexPlace {
    shape: Shape,
    /// The file beside the store's, if it has one.
    pub file: Option<PathBuf>,
    /// Where the data of that file, or of the store's own, is to be.
    pub pinned: Pinned,
    len_bytes: u64,
}

impl IndexPlace {
    /// Looks at the store of a device; `None` if nothing of its index is left on disk.
    pub fn of(device: &Path, layout: &Superblock) -> Option<Self> {
        let shape = layout.shape();
        // With half of its sets in memory `SetMemLru` keeps all of them.
        let keeps_all =
            shape.policy() == Policy::SetMemLru && layout.resident_sets >= layout.sets.div_ceil(2);
        if !shape.policy().leaves_index() || keeps_all {
            return None;
        }
        let file = (layout.aside != 0).then(|| FileDevice::index_path(device));
        Some(Self {
            shape,
            pinned: pin_at(file.as_deref().unwrap_or(device)),
            file,
            len_bytes: layout.positions_file.len,
        })
    }

    /// What it costs that the file is not on NVM.
    const fn cost(&self) -> &'static str {
        match self.shape.policy() {
            Policy::SetMemLru => {
                "a lookup in a set that is not in memory reads the set from the disk: a seek for a miss, \
                 and for a put"
            }
            _ => {
                "a hit whose position is not in memory reads it from the disk first: a seek more, for a hit \
                 in ten if it is of what was used lately"
            }
        }
    }
}

impl fmt::Display for IndexPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cost = self.cost();
        let Some(file) = &self.file else {
            return match self.pinned.is_on_pool() {
                true => write!(f, "in no file of its own, as the store was made: {cost}"),
                false => write!(f, "on the store's own disk: {cost}"),
            };
        };
        write!(f, "{} ({} KiB), ", file.display(), self.len_bytes >> 10)?;
        match &self.pinned {
            pinned if pinned.is_on_nvm() => f.write_str("pinned to the pool's NVM: no seek to read it"),
            Pinned::NotPermitted => write!(
                f,
                "not pinned, as only root and the pool's owner may do that: once the pool moves it to its \
                 disk, {cost}"
            ),
            Pinned::NoPool => write!(f, "on no pool: {cost}"),
            Pinned::To(_) => write!(
                f,
                "not pinned: once the pool moves it to its disk, {cost}; `varve pin --tier nvm {}` pins it, for \
                 root and the pool's owner",
                file.display()
            ),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::IndexPlace;
    use crate::device::FileDevice;
    use crate::device::pool::Pinned;
    use crate::policy::Policy;
    use crate::store::{StorePlan, Superblock};

    #[test]
    fn place_says_what_it_costs_and_nothing_of_policies_that_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let layout = |policy, aside| Superblock::lay_out(&StorePlan::new(policy), 64 << 20, aside).unwrap();
        for policy in Policy::ALL {
            let place = IndexPlace::of(&path, &layout(policy, false));
            assert_eq!(place.is_some(), policy.leaves_index(), "{policy}");
        }
        let text = |aside, pinned: Option<Pinned>| {
            let mut place = IndexPlace::of(&path, &layout(Policy::LogLru, aside)).unwrap();
            place.pinned = pinned.unwrap_or(place.pinned);
            place.to_string()
        };
        assert!(
            text(false, None).contains("own disk: a hit"),
            "{}",
            text(false, None)
        );
        let name = FileDevice::index_path(&path).display().to_string();
        let pinned = text(true, Some(Pinned::To("nvm".into())));
        assert!(pinned.starts_with(&name) && pinned.contains("pinned to the pool's NVM"));
        assert!(text(true, Some(Pinned::To("policy".into()))).contains("varve pin --tier nvm"));
        assert!(text(true, Some(Pinned::NotPermitted)).contains("only root"));
    }
}
