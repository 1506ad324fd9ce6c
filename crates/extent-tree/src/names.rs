//! What directories and attributes share: records found by the hash of their name.
//!
//! A record's key is its name's 48-bit hash and a 15-bit ordinal that tells names of one hash apart, given at
//! insertion and kept until removal. So keys are of one size (inner nodes too), a key serves as a readdir
//! cookie that no other name's coming or going changes, and any collision works; 32,768 names of one hash,
//! which nobody can make who does not know the pool's key, are refused beyond.

use crate::btree::BTree;
use crate::{Fault, MetaRead, TreeError};
use std::ops::ControlFlow;
use varve_format::{ORDINAL_BITS, ORDINALS, Top};

/// What a search for a name found.
pub(crate) struct Search<R> {
    /// The record's key and content.
    pub(crate) found: Option<(u64, R)>,
    /// The lowest key of the hash that no record has; `None` if all are taken.
    pub(crate) free: Option<u64>,
}

/// The hash in a record's key.
pub(crate) const fn hash_of(key: u64) -> u64 {
    key >> ORDINAL_BITS
}

/// Looks through the records of `hash`; `matches` gives the content of the one that is meant.
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

/// During a walk: checks that records have their names' hashes and that no name comes twice.
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

/// A root that counts otherwise than the walk.
pub(crate) fn check_count(tree: &BTree, what: &'static str, counted: u64, found: u64) -> Option<TreeError> {
    (counted != found).then(|| tree.bad_root(Fault::Count { what, counted, found }))
}
