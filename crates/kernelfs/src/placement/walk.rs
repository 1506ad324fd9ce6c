//! The walk that applies operators' rules: its state, and the pin that a file is to have.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;
use varve_format::inode::Inode;
use varve_format::{Ino, InodeKey, Pin, PinTo, PinnedBy, TimeNs};
use varve_placement::rules::{File, Rules};
use varve_store::Store;

/// Most files with several names that are remembered during a walk: the first name counts.
const LINKED_MAX: usize = 1 << 16;

/// Result of a walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RulesApplied {
    /// Files that were looked at.
    pub files: u64,
    /// Files whose pin has changed.
    pub changed: u64,
}

/// A directory on the way of a walk.
#[derive(Debug)]
pub(crate) struct Level {
    pub(crate) key: InodeKey,
    /// Its pin when the walk came there.
    pub(crate) pin: Pin,
    pub(crate) cookie: u64,
    /// Length of its path.
    pub(crate) path_len: usize,
}

/// State of the walk.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    pub(crate) levels: Vec<Level>,
    pub(crate) path: String,
    linked: BTreeSet<InodeKey>,
    pub(crate) so_far: RulesApplied,
    /// When the next one begins, if none is under way.
    pub(crate) due_ms: u64,
}

impl Walk {
    /// Goes on with what is in a directory; its path is that of the walk.
    pub(crate) fn enter(&mut self, store: &Store, dir: Ino) {
        if let Ok(inode) = store.get(dir) {
            self.levels.push(Level {
                key: inode.attr.key,
                pin: inode.pin,
                cookie: 0,
                path_len: self.path.len(),
            });
        }
    }

    /// Whether this walk has not seen the file by another name.
    pub(crate) fn is_first_name(&mut self, inode: &Inode) -> bool {
        if inode.attr.nlink < 2 {
            return true;
        }
        self.linked.len() < LINKED_MAX && self.linked.insert(inode.attr.key)
    }
}

/// The pin of a file in a directory with the pin `of_dir`.
pub(crate) fn wish(rules: &Rules, path: &str, inode: &Inode, of_dir: Pin, now_ns: TimeNs) -> Pin {
    if of_dir.to != PinTo::Policy {
        return of_dir.inherited();
    }
    let age_ns = now_ns.saturating_sub(inode.attr.mtime_ns).max(0);
    let file = File {
        path,
        size_bytes: inode.attr.size_bytes,
        age: Duration::from_nanos(age_ns as u64),
    };
    match rules.explain(&file).to {
        PinTo::Policy => Pin::NONE,
        to => Pin {
            to,
            by: PinnedBy::Rule,
        },
    }
}
