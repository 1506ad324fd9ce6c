//! The common part of directories and attributes: records found by the hash of their name.
//!
//! A record's key is its name's 48-bit hash and a 15-bit ordinal that tells names of one hash apart, given at
//! insertion and kept until removal. So keys have one size (in inner nodes, too), a key serves as a readdir
//! cookie that insertions and removals of other names do not change, and collisions work. At most 32,768
//! names may share a hash; nobody can make more without the pool's key.

use crate::btree::BTree;
use crate::{Fault, MetaRead, TreeError};
use std::ops::ControlFlow;
use varve_format::{ORDINAL_BITS, ORDINALS, Top};

/// The result of a search for a name.
pub(crate) struct Search<R> {
    /// The record's key and content.
    pub(crate) found: Option<(u64, R)>,
    /// The lowest unused key of the hash; `None` if all are taken.
    pub(crate) free: Option<u64>,
}

/// Returns the hash in a record's key.
pub(crate) const fn hash_of(key: u64) -> u64 {
    key >> ORDINAL_BITS
}

/// Searches the records of `hash`; `matches` returns the content of the wanted one.
pub(crate) fn search<M: MetaRead, R>(
    tree: &BTree,
    io: &M,
    top: &Top,
    hash: u64,
    mut matches: impl FnMut(&[u8]) -> Result<Option<R>, Fault>,
) -> Result<Search<R>, M::Error> {
    let first = hash << ORDINAL_BITS;
    let mut result = Search {
        found: None,
        free: None,
    };
    let mut next = first;
    tree.scan(io, top, first..first + ORDINALS, |leaf, key, value| {
        if key == next {
            next += 1;
        } else {
            result.free.get_or_insert(next);
        }
        let found = matches(value).map_err(|fault| tree.corrupt(leaf, fault))?;
        result.found = found.map(|content| (key, content));
        Ok(if result.found.is_some() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        })
    })?;
    if next < first + ORDINALS {
        result.free.get_or_insert(next);
    }
    Ok(result)
}

/// Checks during a walk that records have their names' hashes and that no name occurs twice.
#[derive(Default)]
pub(crate) struct NameCheck {
    hash: u64,
    names: std::collections::HashSet<Vec<u8>>,
    /// Records seen.
    pub(crate) count: u64,
}

impl NameCheck {
    /// Checks the next record.
    pub(crate) fn add(&mut self, key: u64, name: &[u8], expected: u64) -> Result<(), Fault> {
        let hash = hash_of(key);
        self.count += 1;
        if hash != expected {
            return Err(Fault::Hash {
                found: hash,
                expected,
            });
        }
        if hash != self.hash {
            self.hash = hash;
            self.names.clear();
        }
        if self.names.insert(name.to_vec()) {
            Ok(())
        } else {
            Err(Fault::DuplicateName(hash))
        }
    }
}

/// Returns a fault if the root's counter differs from the walk's.
pub(crate) fn check_count(tree: &BTree, what: &'static str, counted: u64, found: u64) -> Option<TreeError> {
    (counted != found).then(|| tree.bad_root(Fault::Count { what, counted, found }))
}
