//! The inodes watched in mounts' kernels, as this process knows them. Owns the set of the newest generation;
//! does not know how calls on watched inodes are made ([`calls`](crate::calls) does, ADR 26).

use crate::config::PoolId;
use crate::ofd::Ofd;
use crate::walk::FileId;
use smallvec::SmallVec;
use std::sync::Arc;
use varve_format::InodeKey;
use varve_libfs::{Fs, Watched};
use varve_media::lock::RwLock;

/// The attribute of the mount's root by which the mount's process is told of marks; see `watches.rs` of the
/// mount.
pub const ATTRIBUTE: &str = "system.varve.watched";

/// The set of watched inodes.
#[derive(Debug, Clone, Default)]
pub struct Set(Arc<Watched>);

impl Set {
    /// Whether a mark lies on the inode itself.
    #[must_use]
    pub fn has(&self, key: InodeKey) -> bool {
        self.0.all || self.0.numbers.binary_search(&key.number()).is_ok()
    }

    /// Whether calls on an open file raise events: for the file, or in the directory where it was opened.
    #[must_use]
    pub fn has_open(&self, ofd: &Ofd) -> bool {
        self.has(ofd.key()) || self.has(ofd.parent)
    }
}

/// The watched files of each pool that has any.
#[derive(Debug, Clone, Default)]
pub struct Sets(SmallVec<[(PoolId, Set); 1]>);

impl Sets {
    /// Adds what is watched in one more pool.
    pub fn add(&mut self, pool: PoolId, set: Set) {
        self.0.push((pool, set));
    }

    /// Whether nothing is watched anywhere.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a mark lies on the inode itself.
    #[must_use]
    pub fn has(&self, id: FileId) -> bool {
        self.0
            .iter()
            .any(|(pool, set)| *pool == id.pool && set.has(id.key))
    }

    /// As [`Set::has_open`].
    #[must_use]
    pub fn has_open(&self, ofd: &Ofd) -> bool {
        self.0
            .iter()
            .any(|(pool, set)| *pool == ofd.pool && set.has_open(ofd))
    }
}

/// The newest set that this process has asked for.
#[derive(Debug, Default)]
pub struct Watches {
    known: RwLock<(u64, Set)>,
}

impl Watches {
    /// Returns the present set, if there are watches, and whether it is new.
    #[must_use]
    pub fn now(&self, fs: &Fs) -> Option<(Set, bool)> {
        let generation = fs.watch_generation();
        if generation == 0 {
            return None;
        }
        {
            let known = self.known.read();
            if known.0 == generation {
                return Some((known.1.clone(), false));
            }
        }
        // Without a reply, any inode may be watched.
        let (generation, watched) = fs.watched().unwrap_or((
            0,
            Watched {
                all: true,
                numbers: Vec::new(),
            },
        ));
        let set = Set(Arc::new(watched));
        *self.known.write() = (generation, set.clone());
        Some((set, true))
    }
}
