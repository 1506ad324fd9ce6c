//! Inodes that are watched in mounts' kernels, as reported by the mounts. Owns their union and the number of
//! its last change; knows nothing of its readers, nor of a session's reaction (ADR 26).

use std::collections::BTreeMap;
use varve_format::SessionId;
use varve_ipc::{WATCHED_MAX, Watched};

/// The reports of all mounts.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    by_mount: BTreeMap<SessionId, Watched>,
    /// Union of all reports.
    all: Watched,
    /// Number of changes of the union.
    changes: u64,
}

impl Watches {
    /// Replaces a mount's report. Returns whether that changes the union.
    pub(crate) fn set(&mut self, mount: SessionId, watched: Watched) -> bool {
        if watched.is_empty() {
            self.by_mount.remove(&mount);
        } else {
            self.by_mount.insert(mount, watched);
        }
        let mut all = Watched::default();
        for one in self.by_mount.values() {
            all.all |= one.all;
            all.numbers.extend_from_slice(&one.numbers);
        }
        all.numbers.sort_unstable();
        all.numbers.dedup();
        if all.all || all.numbers.len() > WATCHED_MAX {
            all = Watched {
                all: true,
                numbers: Vec::new(),
            };
        }
        let changed = all != self.all;
        self.all = all;
        self.changes += u64::from(changed);
        changed
    }

    /// Returns the number for the sessions' pages: 0 while nothing is watched.
    pub(crate) fn generation(&self) -> u64 {
        if self.all.is_empty() { 0 } else { self.changes }
    }

    /// Returns all watched inodes.
    pub(crate) const fn watched(&self) -> &Watched {
        &self.all
    }
}

#[cfg(test)]
mod tests {
    use super::Watches;
    use varve_format::SessionId;
    use varve_ipc::{WATCHED_MAX, Watched};

    fn some(numbers: &[u64]) -> Watched {
        Watched {
            all: false,
            numbers: numbers.to_vec(),
        }
    }

    #[test]
    fn generation_changes_with_the_union_and_is_zero_without_watches() {
        let mut watches = Watches::default();
        let (a, b) = (SessionId(1), SessionId(2));
        assert_eq!(watches.generation(), 0);
        assert!(watches.set(a, some(&[3, 7])));
        let first = watches.generation();
        assert_ne!(first, 0);
        assert!(!watches.set(b, some(&[7])), "the union is what it was");
        assert_eq!(watches.generation(), first);
        assert!(watches.set(b, some(&[5, 7])));
        assert_ne!(watches.generation(), first);
        assert_eq!(watches.watched(), &some(&[3, 5, 7]));
        assert!(watches.set(a, Watched::default()));
        assert_eq!(watches.watched(), &some(&[5, 7]));
        assert!(watches.set(b, Watched::default()));
        assert_eq!(watches.generation(), 0);
        assert!(watches.set(a, some(&[1])));
        assert!(watches.generation() > first, "no number comes twice");
    }

    #[test]
    fn more_than_can_be_named_is_everything() {
        let mut watches = Watches::default();
        let half: Vec<u64> = (0..WATCHED_MAX as u64).collect();
        watches.set(SessionId(1), some(&half));
        assert!(!watches.watched().all);
        watches.set(SessionId(2), some(&[u64::MAX]));
        assert!(watches.watched().all && watches.watched().numbers.is_empty());
    }
}
