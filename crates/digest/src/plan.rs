//! The result of a fold: the changes to write, each of them once. No I/O; the daemon carries the plan out in
//! one transaction.

use crate::bytes::FilePlan;
use crate::fold::{Fold, Known, Node};
use crate::op::{Counts, RefusedTx, View};
use varve_format::{FileKind, Ino, InodeAttr, InodeKey, SessionId};

/// A name that changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameChange {
    /// Directory.
    pub dir: Ino,
    /// Name.
    pub name: Box<[u8]>,
    /// Inode that it names in the digested state.
    pub old: Option<InodeKey>,
    /// Inode that it is to name, and its kind.
    pub new: Option<(InodeKey, FileKind)>,
}

/// The effect of a batch on an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is made.
    Made,
    /// It is changed.
    Changed,
    /// It is deleted. All its names are removed before; its attributes have no meaning.
    Deleted,
}

/// One inode to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InodePlan<'a> {
    /// Whether it is made, changed or deleted.
    pub fate: Fate,
    /// Final attributes (the store computes `sectors`). Without a link it is an orphan.
    pub attr: InodeAttr,
    /// Attributes before; `None`: it is new.
    pub old: Option<InodeAttr>,
    /// Target of a new symbolic link.
    pub target: &'a [u8],
    /// Data.
    pub file: FilePlan<'a>,
    /// Extended attributes set or (`None`) removed.
    pub xattrs: Vec<(&'a [u8], Option<&'a [u8]>)>,
    /// Sessions that do not hold it any more.
    pub left: Vec<SessionId>,
}

/// Everything that a batch changes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan<'a> {
    /// Names: removals first, then the others in the order in which they were made.
    pub names: Vec<NameChange>,
    /// Inodes, by number.
    pub inodes: Vec<InodePlan<'a>>,
    /// Inodes that were made and deleted in this batch, by number: only their reserved numbers are given
    /// back.
    pub vanished: Vec<InodeKey>,
    /// Transactions that were refused.
    pub refused: Vec<(SessionId, RefusedTx)>,
    /// Counters of the batch's operations and bytes.
    pub counts: Counts,
}

impl<'a, V: View> Fold<'a, V> {
    /// Ends the fold.
    #[must_use]
    pub fn finish(self) -> Plan<'a> {
        let Self {
            nodes,
            names,
            mut counts,
            refused,
            ..
        } = self;
        let kind_of = |key: InodeKey| match nodes.get(&key.ino) {
            Some(Known::Node(node)) => node.attr.kind(),
            _ => FileKind::Regular,
        };
        let mut changes: Vec<(u64, NameChange)> = Vec::new();
        for (dir, names) in names {
            if matches!(nodes.get(&dir), Some(Known::Vanished(_))) {
                continue;
            }
            for (name, state) in names {
                if state.old == state.now {
                    continue;
                }
                let change = NameChange {
                    dir,
                    name,
                    old: state.old,
                    new: state.now.map(|key| (key, kind_of(key))),
                };
                changes.push((state.order, change));
            }
        }
        // Ties are broken by name, so that a log always makes its changes in the same order.
        changes.sort_by(|(left_order, left), (right_order, right)| {
            let left = (left.new.is_some(), left_order, left.dir, &left.name);
            left.cmp(&(right.new.is_some(), right_order, right.dir, &right.name))
        });
        // The indexes are sorted instead of the plans, which are large: each plan is moved once.
        let mut vanished = Vec::new();
        let changed = |known: Known<'a>| match known {
            Known::Node(node) if node.changed => Some(node),
            Known::Vanished(key) => {
                vanished.push(key);
                None
            }
            _ => None,
        };
        let mut plans: Vec<_> = nodes
            .into_values()
            .filter_map(changed)
            .map(|node| Some(node.plan(&mut counts)))
            .collect();
        let mut order: Vec<_> = (plans.iter().enumerate())
            .filter_map(|(at, plan)| Some((plan.as_ref()?.attr.key.ino, at)))
            .collect();
        order.sort_unstable();
        vanished.sort_unstable();
        counts.vanished += vanished.len() as u64;
        let inodes = order.iter().filter_map(|(_, at)| plans[*at].take()).collect();
        Plan {
            names: changes.into_iter().map(|(_, change)| change).collect(),
            inodes,
            vanished,
            refused,
            counts,
        }
    }
}

impl<'a> Node<'a> {
    fn plan(self, counts: &mut Counts) -> InodePlan<'a> {
        let fate = match (self.gone, self.old.is_some()) {
            (true, _) => Fate::Deleted,
            (false, true) => Fate::Changed,
            (false, false) => Fate::Made,
        };
        let regular = self.attr.kind() == FileKind::Regular;
        let file = if regular && !self.gone {
            let old = self.old.as_ref().map(|old| old.size_bytes);
            let (file, merged) = self.file.plan(old, self.attr.size_bytes);
            counts.merged += merged;
            counts.bytes_out += file.data_bytes();
            file
        } else {
            FilePlan {
                size: self.attr.size_bytes,
                ..FilePlan::default()
            }
        };
        let new = self.old.is_none();
        let xattrs = self.xattrs.into_iter();
        InodePlan {
            fate,
            attr: self.attr,
            old: self.old,
            target: self.target,
            file,
            // A new inode has nothing to remove.
            xattrs: xattrs.filter(|(_, value)| !new || value.is_some()).collect(),
            left: self.left,
        }
    }
}
