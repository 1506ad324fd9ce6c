//! States of a page and the edges between them (Figure 6.4), with a counter for each edge.

use serde::Serialize;

use super::table::ListKind;
use crate::types::TierId;

/// Policy state of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageState {
    /// The tier that holds it.
    pub tier: TierId,
    /// The list it is on.
    pub list: ListKind,
    /// Whether it was referenced since the last scan.
    pub referenced: bool,
}

macro_rules! edges {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Every change of state that a page can go through.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Edge { $($(#[$doc])* $name),+ }

        impl Edge {
            /// All edges.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];
        }
    };
}

edges! {
    /// A new page: inactive, not referenced.
    Allocate,
    /// Inactive, not referenced → inactive, referenced.
    InactiveReference,
    /// Inactive, referenced → active, not referenced ("activated").
    Activate,
    /// Active, not referenced → active, referenced.
    ActiveReference,
    /// Active, referenced → promote ("re-activated").
    Reactivate,
    /// Active, referenced stays so: the fastest tier has no promote list.
    TopReference,
    /// Promote, touched again while it waits.
    PromoteReference,
    /// Inactive, referenced → inactive, not referenced: skipped over by a scan.
    InactiveAge,
    /// Active, referenced → active, not referenced: skipped over by a scan.
    ActiveAge,
    /// Active, not referenced → inactive, not referenced.
    Deactivate,
    /// Promote → active, not referenced, in the tier above.
    PromoteUp,
    /// Promote → active in the same tier: the move was not possible.
    PromoteFail,
    /// Inactive, not referenced → inactive of the tier below.
    Demote,
    /// Inactive, not referenced, in the lowest tier → written back.
    Evict,
    /// Any list → unevictable.
    Lock,
    /// Unevictable → inactive, not referenced.
    Unlock,
    /// The page was freed.
    Free,
}

/// Counters of taken edges.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EdgeCounts([u64; 17]);

const _: () = assert!(Edge::ALL.len() == 17);

impl EdgeCounts {
    pub(super) fn count(&mut self, edge: Edge) {
        self.0[edge as usize] += 1;
    }
    /// Returns how often `edge` was taken.
    pub fn get(&self, edge: Edge) -> u64 {
        self.0[edge as usize]
    }
    /// Iterates over all edges with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Edge, u64)> + '_ {
        Edge::ALL.iter().map(|e| (*e, self.get(*e)))
    }
    /// Returns the number of taken edges that change a page's state; `TopReference` and `PromoteReference` do
    /// not.
    pub(super) fn changes(&self) -> u64 {
        self.0.iter().sum::<u64>() - self.get(Edge::TopReference) - self.get(Edge::PromoteReference)
    }
}
