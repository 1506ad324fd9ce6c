//! Findings of a check, for people and programs. Words only.

use serde::{Deserialize, Serialize};
use varve_format::Tier;
use varve_store::check::Finding;
use varve_store::repair::Loss;
use varve_store::{Store, StoreError};

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckItem {
    /// Kind, such as `leaked` or `link_count`.
    pub kind: String,
    /// Description of the fault.
    pub text: String,
}

/// Result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Nothing was found.
    pub clean: bool,
    /// Findings; at most `ITEMS_SHOWN` of them.
    pub findings: Vec<CheckItem>,
    /// Number of all findings.
    pub count: u64,
}

/// Most findings that a report names one by one.
pub const ITEMS_SHOWN: usize = 1000;

impl CheckReport {
    fn new(findings: &[Finding]) -> Self {
        Self {
            clean: findings.is_empty(),
            count: findings.len() as u64,
            findings: findings.iter().take(ITEMS_SHOWN).map(describe).collect(),
        }
    }

    /// Checks the structures of a pool.
    ///
    /// # Errors
    /// See [`Store::check`].
    pub fn of_structures(store: &Store) -> Result<Self, StoreError> {
        Ok(Self::new(&store.check()?))
    }

    /// Checks the structures, and the data on NVM, which no read compares with its checksums.
    ///
    /// # Errors
    /// See [`Store::check`].
    pub fn of_stopped(store: &Store) -> Result<Self, StoreError> {
        let mut findings = store.check()?;
        // A damaged tree is named above; its data cannot be found.
        match store.check_nvm_data() {
            Ok(bad) => findings.extend(bad),
            Err(error) if findings.is_empty() => return Err(error),
            Err(_) => {}
        }
        Ok(Self::new(&findings))
    }

    /// Compares all data with its checksums.
    ///
    /// # Errors
    /// See [`Store::check_data`].
    pub fn of_data(store: &Store) -> Result<Self, StoreError> {
        Ok(Self::new(&store.check_data()?))
    }
}

/// Describes a finding in words.
#[must_use]
pub fn describe(finding: &Finding) -> CheckItem {
    let (kind, text) = match finding {
        Finding::Tree { owner, block, what } => {
            let at = block.map_or(String::new(), |block| match block.home() {
                Some((tier, number)) if tier != Tier::Nvm => format!(" at {} block {number}", tier.name()),
                _ => format!(" at NVM block {block}"),
            });
            ("tree", format!("tree of inode {owner}{at}: {what}"))
        }
        Finding::Image { ino, what } => ("image", format!("inode {ino}: {what}")),
        Finding::Table { what } => ("table", what.clone()),
        Finding::OutOfBounds { tier, block, owner } => (
            "out_of_bounds",
            format!(
                "inode {owner} uses {} block {block}, which cannot be used",
                tier.name()
            ),
        ),
        Finding::NotMarked { tier, block, owner } => (
            "not_marked",
            format!(
                "inode {owner} uses {} block {block}, which counts as free",
                tier.name()
            ),
        ),
        Finding::Leaked { tier, block, len } => (
            "leaked",
            format!("{} blocks {block}..+{len} belong to nobody", tier.name()),
        ),
        Finding::Shared { tier, block, owner } => (
            "shared",
            format!(
                "inode {owner} uses {} block {block}, which another one uses too",
                tier.name()
            ),
        ),
        Finding::Allocator { tier, block, used } => (
            "allocator",
            format!(
                "{} block {block} is {} on media, the allocator believes otherwise",
                tier.name(),
                if *used { "in use" } else { "free" }
            ),
        ),
        Finding::Dangling { dir, name, key } => (
            "dangling",
            format!(
                "`{}` in directory {dir} names {key}, which is not there",
                String::from_utf8_lossy(name)
            ),
        ),
        Finding::LinkCount { ino, stored, found } => (
            "link_count",
            format!("inode {ino} counts {stored} links, there are {found}"),
        ),
        Finding::DirTwice { ino, dir } => (
            "dir_twice",
            format!("directory {ino} has a second name, in directory {dir}"),
        ),
        Finding::Parent { ino, stored, found } => (
            "parent",
            format!("directory {ino} says that its parent is {stored}, it is {found}"),
        ),
        Finding::Lost { ino, kind } => (
            "lost",
            format!("inode {ino} ({kind:?}) is in use, but no path leads to it"),
        ),
        Finding::Orphans { what } => ("orphans", format!("list of inodes without a name: {what}")),
        Finding::Counter { what, stored, found } => (
            "counter",
            format!("the pool counts {stored} {what}, there are {found}"),
        ),
        Finding::References {
            first,
            len,
            stored,
            found,
        } => (
            "references",
            format!(
                "shared blocks {first} to {}: {stored} owners, found {found}",
                first + len - 1
            ),
        ),
        Finding::NoRun { ino, number } => (
            "no_run",
            format!("inode {ino}: names shared block {number}, which no run has"),
        ),
        Finding::Size { ino, stored } => (
            "size",
            format!("inode {ino} has a size of {stored} bytes, which contradicts what it is"),
        ),
        Finding::Data {
            ino,
            tier,
            block,
            what,
        } => (
            "data",
            format!("inode {ino}, {} block {block}: {what}", tier.name()),
        ),
        other => ("other", format!("{other:?}")),
    };
    CheckItem {
        kind: kind.to_owned(),
        text,
    }
}

/// Describes a loss in words: path, bytes, cause.
#[must_use]
pub fn describe_loss(loss: &Loss) -> String {
    let mut text = match &loss.path {
        Some(path) => format!("{}: ", String::from_utf8_lossy(path)),
        None if loss.ino.0 > 0 => format!("inode {}: ", loss.ino),
        None => String::new(),
    };
    if let Some((from, to)) = loss.bytes {
        text.push_str(&format!("bytes {from} to {}: ", to.saturating_sub(1)));
    }
    text.push_str(&loss.what);
    text
}

#[cfg(test)]
mod tests {
    use super::describe;
    use varve_format::{BlockNo, Ino, Tier};
    use varve_store::check::Finding;

    #[test]
    fn finding_names_the_tier_that_a_node_lies_on() {
        let text = |block| {
            let finding = Finding::Tree {
                owner: Ino(9),
                block: Some(block),
                what: "gone".into(),
            };
            describe(&finding).text
        };
        assert_eq!(text(BlockNo(77)), "tree of inode 9 at NVM block 77: gone");
        let away = BlockNo::on(Tier::Ssd, 77);
        assert_eq!(text(away), "tree of inode 9 at ssd block 77: gone");
    }
}
