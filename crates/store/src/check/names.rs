//! Compares names with inodes: link counts, parents, kinds, and inodes without a name.

use super::Finding;
use std::collections::{HashMap, HashSet};
use varve_format::inode::Inode;
use varve_format::{FileKind, Generation, Ino, InodeKey, ROOT_INO};

/// The state of an inode that the check of names needs.
pub(super) struct Seen {
    pub(super) generation: Generation,
    pub(super) kind: FileKind,
    pub(super) nlink: u32,
    pub(super) parent: Ino,
    pub(super) orphan: bool,
    pub(super) names: u32,
    pub(super) subdirs: u32,
    /// Directory that names it (the first one).
    pub(super) dir: Option<Ino>,
}

pub(super) type Names = Vec<(Ino, Vec<u8>, InodeKey, FileKind)>;

impl Seen {
    pub(super) fn of(inode: &Inode) -> Self {
        Self {
            generation: inode.attr.key.generation,
            kind: inode.attr.kind(),
            nlink: inode.attr.nlink,
            parent: inode.attr.parent,
            orphan: inode.orphan.is_some(),
            names: 0,
            subdirs: 0,
            dir: None,
        }
    }
}

/// Compares names with inodes, in both directions.
pub(super) fn check_names(inodes: &mut HashMap<Ino, Seen>, names: &Names, findings: &mut Vec<Finding>) {
    let children = count_names(inodes, names, findings);
    let reached = reached_from_root(children);
    if !inodes.contains_key(&ROOT_INO) {
        findings.push(Finding::Table {
            what: "there is no root directory".into(),
        });
    }
    compare_counts(inodes, &reached, findings);
}

/// Counts the names of each inode; returns the directories in each directory.
fn count_names(
    inodes: &mut HashMap<Ino, Seen>,
    names: &Names,
    findings: &mut Vec<Finding>,
) -> HashMap<Ino, Vec<Ino>> {
    let mut children: HashMap<Ino, Vec<Ino>> = HashMap::new();
    for (dir, name, key, kind) in names {
        let fits = inodes
            .get(&key.ino)
            .is_some_and(|seen| seen.generation == key.generation && seen.kind == *kind);
        if !fits {
            findings.push(Finding::Dangling {
                dir: *dir,
                name: name.clone(),
                key: *key,
            });
            continue;
        }
        if *kind == FileKind::Directory {
            if let Some(parent) = inodes.get_mut(dir) {
                parent.subdirs += 1;
            }
            children.entry(*dir).or_default().push(key.ino);
        }
        if let Some(seen) = inodes.get_mut(&key.ino) {
            seen.names += 1;
            if *kind == FileKind::Directory && seen.dir.replace(*dir).is_some() {
                findings.push(Finding::DirTwice {
                    ino: key.ino,
                    dir: *dir,
                });
            }
        }
    }
    children
}

/// Returns the directories that a path from the root leads to.
fn reached_from_root(mut children: HashMap<Ino, Vec<Ino>>) -> HashSet<Ino> {
    let mut reached = HashSet::from([ROOT_INO]);
    let mut queue = vec![ROOT_INO];
    while let Some(dir) = queue.pop() {
        for child in children.remove(&dir).unwrap_or_default() {
            if reached.insert(child) {
                queue.push(child);
            }
        }
    }
    reached
}

/// Compares the link counts and parents in the inodes with the names.
fn compare_counts(inodes: &HashMap<Ino, Seen>, reached: &HashSet<Ino>, findings: &mut Vec<Finding>) {
    let mut all: Vec<_> = inodes.iter().collect();
    all.sort_unstable_by_key(|(ino, _)| **ino);
    for (&ino, seen) in all {
        let is_dir = seen.kind == FileKind::Directory;
        let named = seen.names > 0 || ino == ROOT_INO;
        let found = match (named, is_dir) {
            (true, true) => 2 + seen.subdirs,
            (true, false) => seen.names,
            (false, _) => 0,
        };
        if seen.nlink != found {
            findings.push(Finding::LinkCount {
                ino,
                stored: seen.nlink,
                found,
            });
        }
        if !seen.orphan && (!named || is_dir && !reached.contains(&ino)) {
            findings.push(Finding::Lost { ino, kind: seen.kind });
        }
        if let Some(dir) = seen.dir.filter(|dir| is_dir && seen.parent != *dir) {
            findings.push(Finding::Parent {
                ino,
                stored: seen.parent,
                found: dir,
            });
        }
    }
}
