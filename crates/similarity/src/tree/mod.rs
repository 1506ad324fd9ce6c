//! The cluster tree (section 4.4.3): each level has a minimum similarity, each node is a cluster, each leaf
//! holds equal images.
//!
//! Two ways to choose the child that an image joins: [`Mode::Seed`], the paper's own (S against every child,
//! the greatest that reaches the level), and [`Mode::Rarity`], the default (ADR 28). Insertion and deletion
//! are online in both.

mod index;
mod place;
mod union;

pub use union::{Union, Weighed};

use crate::hash::HashedMap;
use crate::measure::View;
use crate::sketch::Sketch;
use index::Index;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Number of an image in a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ImageId(pub u32);

/// Number of a node in a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

const ROOT: NodeId = NodeId(0);

/// The way in which a child is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Mode {
    /// Content weighed by its rarity, children short-listed by an inverted index.
    #[default]
    Rarity,
    /// The paper's way: weighed by bytes, with every child compared.
    Seed,
}

/// Settings of a tree.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The way in which a child is chosen.
    pub mode: Mode,
    /// Minimum similarity of each level, from the root's (0) to the leaves' (1), ascending.
    pub levels: Vec<f64>,
    /// Most children that an image is compared with to the end at a level ([`Mode::Rarity`]).
    pub candidates: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            levels: vec![0.0, 0.5, 0.9, 1.0],
            candidates: 4,
        }
    }
}

impl Settings {
    /// The defaults with another mode.
    pub fn of(mode: Mode) -> Self {
        Self {
            mode,
            ..Self::default()
        }
    }

    /// Whether the levels ascend from 0 to 1.
    pub fn is_sound(&self) -> bool {
        self.levels.len() >= 2
            && self.levels.len() <= 16
            && self.levels.first() == Some(&0.0)
            && self.levels.last() == Some(&1.0)
            && self.levels.is_sorted_by(|a, b| a < b)
            && self.candidates > 0
    }
}

/// Counters of a tree's work since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Work {
    /// Similarity operations: an image against a cluster, to the end.
    pub comparisons: u64,
    /// Merge operations: an image into a cluster, or out of it.
    pub merges: u64,
    /// Entries of inverted indexes that were read, and elements that were looked up in a cluster until it was
    /// known to have too little of the image.
    pub postings: u64,
    /// Images that were placed again because the rarity of content was known better.
    pub replaced: u64,
}

#[derive(Debug)]
struct Node {
    parent: NodeId,
    level: usize,
    children: Vec<NodeId>,
    union: Union,
    index: Index,
    /// Images of a leaf.
    images: Vec<ImageId>,
}

impl Node {
    fn new(parent: NodeId, level: usize) -> Self {
        Self {
            parent,
            level,
            children: Vec::new(),
            union: Union::default(),
            index: Index::of_level(level),
            images: Vec::new(),
        }
    }
}

#[derive(Debug)]
struct Image {
    view: Arc<View>,
    leaf: NodeId,
}

/// Clusters of images.
#[derive(Debug)]
pub struct Tree {
    settings: Settings,
    nodes: Vec<Option<Node>>,
    free: Vec<NodeId>,
    images: BTreeMap<ImageId, Image>,
    /// Union of all images: the number of owners of an element gives its rarity.
    frequency: Union,
    /// Leaves by the fingerprint of their images.
    leaves: HashedMap<NodeId>,
    /// Number of images at which all are placed again.
    replace_at: usize,
    work: Work,
}

/// Number of images at which a tree first places all again; see [`next_replace`].
const FIRST_REPLACE: usize = 4;
/// From this number of images on, the rarity of content is known well: a weight differs only down to 1/16 of
/// the images ([`union`]), which is a share of 64 and more.
const KNOWN_WELL: usize = 1024;

/// The number of images at which all are placed again after it was done at `at`: four times as many, and when
/// their rarities are known well, sixteen times.
const fn next_replace(at: usize) -> usize {
    at.saturating_mul(if at < KNOWN_WELL { 4 } else { 16 })
}

/// The order in which images that are all known are placed: it depends on nothing but their content, and
/// those that are little more than what many have come before those that have much beside it.
fn smallest_first(images: &mut [(ImageId, Arc<View>)]) {
    images.sort_by_cached_key(|(id, view)| {
        let bytes: f64 = view.parts.iter().map(Sketch::weight).sum();
        (bytes as u64, view.fingerprint(), *id)
    });
}

impl Tree {
    /// An empty tree.
    ///
    /// # Panics
    /// If the settings are not sound ([`Settings::is_sound`]).
    pub fn new(settings: Settings) -> Self {
        assert!(
            settings.is_sound(),
            "levels must ascend from 0 to 1: {settings:?}"
        );
        Self {
            settings,
            nodes: vec![Some(Node::new(ROOT, 0))],
            free: Vec::new(),
            images: BTreeMap::new(),
            frequency: Union::default(),
            leaves: HashedMap::default(),
            replace_at: FIRST_REPLACE,
            work: Work::default(),
        }
    }

    /// Builds a tree of images that are all known before the first is placed, so that their rarities are
    /// right from the start. With [`Mode::Rarity`] the clusters are the same in whatever order the images
    /// come.
    ///
    /// # Panics
    /// As [`Tree::new`].
    pub fn build(settings: Settings, images: impl IntoIterator<Item = (ImageId, Arc<View>)>) -> Self {
        let mut tree = Self::new(settings);
        let mut images: Vec<_> = images.into_iter().collect();
        for (_, view) in &images {
            tree.frequency.insert(view, |_, _| ());
        }
        if tree.settings.mode == Mode::Rarity {
            smallest_first(&mut images);
        }
        for (id, view) in images {
            tree.place(id, view);
        }
        while tree.replace_at <= tree.images.len() {
            tree.replace_at = next_replace(tree.replace_at);
        }
        tree
    }

    /// Adds an image. An image with the same number is removed first.
    pub fn insert(&mut self, id: ImageId, view: Arc<View>) {
        self.remove(id);
        self.frequency.insert(&view, |_, _| ());
        self.place(id, view);
        if self.settings.mode == Mode::Rarity && self.images.len() >= self.replace_at {
            self.replace_at = next_replace(self.replace_at);
            self.place_all_again();
        }
    }

    /// Removes an image; false if it is not in the tree.
    pub fn remove(&mut self, id: ImageId) -> bool {
        let Some(image) = self.images.remove(&id) else {
            return false;
        };
        self.frequency.remove(&image.view, |_, _| ());
        let leaf = image.leaf;
        if let Some(node) = self.node_mut(leaf) {
            node.images.retain(|listed| *listed != id);
            if node.images.is_empty() {
                self.leaves.remove(&image.view.fingerprint());
            }
        }
        let mut at = leaf;
        while at != ROOT {
            at = self.leave(at, &image.view);
        }
        true
    }

    /// Removes a view from a node, and the node from its parent when no image is left; returns the parent.
    fn leave(&mut self, at: NodeId, view: &View) -> NodeId {
        self.work.merges += 1;
        let mut gone = Vec::new();
        let Some(node) = self.node_mut(at) else {
            return ROOT;
        };
        let parent = node.parent;
        node.union.remove(view, |part, hash| gone.push((part, hash)));
        let empty = node.union.members() == 0;
        if let Some(above) = self.node_mut(parent) {
            for (part, hash) in gone {
                above.index.remove(part, hash, at);
            }
            if empty {
                above.children.retain(|child| *child != at);
                above.index.forget(at);
            }
        }
        if empty {
            self.nodes[at.0 as usize] = None;
            self.free.push(at);
        }
        parent
    }

    /// Places all images again.
    fn place_all_again(&mut self) {
        let images = std::mem::take(&mut self.images);
        self.nodes = vec![Some(Node::new(ROOT, 0))];
        self.free.clear();
        self.leaves.clear();
        self.work.replaced += images.len() as u64;
        let mut images: Vec<_> = images.into_iter().map(|(id, image)| (id, image.view)).collect();
        smallest_first(&mut images);
        for (id, view) in images {
            self.place(id, view);
        }
    }

    /// Number of images.
    pub fn len(&self) -> usize {
        self.images.len()
    }

    /// Whether there is no image.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// Its settings.
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Counters of its work.
    pub const fn work(&self) -> Work {
        self.work
    }

    /// The view of an image.
    pub fn view(&self, id: ImageId) -> Option<&Arc<View>> {
        self.images.get(&id).map(|image| &image.view)
    }

    /// The clusters of a level (an index into [`Settings::levels`]), largest first, then by their first
    /// image. Images of a cluster ascend.
    pub fn clusters(&self, level: usize) -> Vec<Vec<ImageId>> {
        let mut by_node: BTreeMap<NodeId, Vec<ImageId>> = BTreeMap::new();
        for (id, image) in &self.images {
            by_node
                .entry(self.above(image.leaf, level))
                .or_default()
                .push(*id);
        }
        let mut clusters: Vec<_> = by_node.into_values().collect();
        clusters.sort_by(|a, b| b.len().cmp(&a.len()).then(a.first().cmp(&b.first())));
        clusters
    }

    /// All images, in an order that keeps clusters of every level contiguous.
    pub fn in_order(&self) -> Vec<ImageId> {
        let mut order = Vec::with_capacity(self.images.len());
        let mut stack = vec![ROOT];
        while let Some(at) = stack.pop() {
            if let Some(node) = self.node(at) {
                order.extend(&node.images);
                stack.extend(&node.children);
            }
        }
        order
    }

    /// The node of `level` above `at`.
    fn above(&self, mut at: NodeId, level: usize) -> NodeId {
        while let Some(node) = self.node(at).filter(|node| node.level > level) {
            at = node.parent;
        }
        at
    }

    fn node(&self, at: NodeId) -> Option<&Node> {
        self.nodes.get(at.0 as usize)?.as_ref()
    }

    fn node_mut(&mut self, at: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(at.0 as usize)?.as_mut()
    }
}

#[cfg(test)]
mod tests;
