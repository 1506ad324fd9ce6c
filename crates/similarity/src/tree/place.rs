//! Placement of an image in the tree: the two ways to choose a child.

use super::union::{Union, Weighed};
use super::{Image, ImageId, Mode, Node, NodeId, ROOT, Tree};
use crate::measure::View;
use std::sync::Arc;

/// Weight of a byte that all images have.
const COMMON: f64 = 0.3;

/// Weight of a byte that no other image has. Twice [`COMMON`]: an image that shares only common content joins
/// the others if that is two thirds of it. It does not grow with the number of images, as content of a single
/// image says nothing about others.
const UNIQUE: f64 = 2.0 * COMMON;

/// Upper bound of N/df: rare content must not outweigh everything else.
const RAREST: f64 = 16.0;

/// Weight of an element: its bytes by its rarity, [`COMMON`] + ln(N/df).
fn rarity(frequency: &Union, part: usize, hash: u64, bytes: u64) -> f64 {
    let owners = f64::from(frequency.owners(part, hash));
    if owners <= 1.0 {
        return bytes as f64 * UNIQUE;
    }
    let asked = f64::from(frequency.asked(part, hash));
    bytes as f64 * (COMMON + (asked / owners).clamp(1.0, RAREST).ln())
}

impl Tree {
    /// Places an image whose frequencies are already counted.
    pub(super) fn place(&mut self, id: ImageId, view: Arc<View>) {
        let leaf = match self.equal(&view) {
            Some(leaf) => leaf,
            None => self.find_leaf(&view),
        };
        if let Some(node) = self.node_mut(leaf) {
            node.images.push(id);
        }
        self.leaves.insert(view.fingerprint(), leaf);
        self.images.insert(id, Image { view, leaf });
    }

    /// Returns the leaf of images that are equal to this one; the view joins every cluster above it.
    fn equal(&mut self, view: &View) -> Option<NodeId> {
        if self.settings.mode == Mode::Seed {
            return None;
        }
        let leaf = *self.leaves.get(&view.fingerprint())?;
        let mut path = vec![leaf];
        while let Some(node) = self.node(*path.last()?).filter(|node| node.parent != ROOT) {
            path.push(node.parent);
        }
        path.iter().rev().for_each(|at| self.join(*at, view));
        Some(leaf)
    }

    /// Descends from the root to the best child of each level, or to a new one.
    fn find_leaf(&mut self, view: &View) -> NodeId {
        let last = self.settings.levels.len() - 1;
        let mut at = ROOT;
        for level in 1..=last {
            let best = match self.settings.mode {
                Mode::Seed => self.best_of_all(at, level, view),
                // Images with an equal one have been placed already.
                Mode::Rarity if level == last => None,
                Mode::Rarity => self.best_of_few(at, level, view),
            };
            let child = match best {
                Some(child) => child,
                None => self.new_child(at, level),
            };
            self.join(child, view);
            at = child;
        }
        at
    }

    /// The child with the greatest S (equation 4.2) that reaches its level.
    fn best_of_all(&mut self, at: NodeId, level: usize, view: &View) -> Option<NodeId> {
        let least = self.settings.levels[level];
        let children = self.node(at)?.children.clone();
        self.work.comparisons += children.len() as u64;
        let mut best: Option<(f64, NodeId)> = None;
        for child in children {
            let s = self.node(child)?.union.overlap(view).s();
            if s >= least && best.is_none_or(|(most, _)| s > most) {
                best = Some((s, child));
            }
        }
        best.map(|(_, child)| child)
    }

    /// Among the children that share rare content with the image, the one that covers it best: it has `level`
    /// of the image, and the image has level² of the content that most of its members have (or any small
    /// image would join any large cluster).
    fn best_of_few(&mut self, at: NodeId, level: usize, view: &View) -> Option<NodeId> {
        let least = self.settings.levels[level];
        let frequency = &self.frequency;
        let weight = |part, hash, bytes| rarity(frequency, part, hash, bytes);
        let index = &self.nodes.get(at.0 as usize)?.as_ref()?.index;
        let (candidates, weighs, read) = index.candidates(view, &weight);
        self.work.postings += read;
        let mut weighed = None;
        let mut best: Option<(f64, NodeId)> = None;
        let mut left = self.settings.candidates;
        for candidate in candidates.iter().filter(|candidate| candidate.at_most >= least) {
            let Some(child) = self.nodes[candidate.child.0 as usize].as_mut() else {
                continue;
            };
            // The image cannot have more of the core than it has in common with the child.
            let core = child.union.core_weight().unwrap_or(0.0);
            let core_at_most = (candidate.at_most * weighs / core).min(1.0);
            let to_win = best.map_or(0.0, |(most, _)| most - core_at_most);
            if core_at_most < least * least || candidate.at_most < to_win {
                continue;
            }
            let weighed = weighed.get_or_insert_with(|| Weighed::of(view, &weight));
            let (of_image, read) = child.union.share(weighed, least.max(to_win));
            let Some(of_image) = of_image else {
                self.work.postings += read;
                continue;
            };
            self.work.comparisons += 1;
            let of_core = child.union.share_of_core(view, &weight);
            let both = of_image + of_core;
            if of_core >= least * least && best.is_none_or(|(most, _)| both > most) {
                best = Some((both, candidate.child));
            }
            left -= 1;
            if left == 0 {
                break;
            }
        }
        best.map(|(_, child)| child)
    }

    fn new_child(&mut self, parent: NodeId, level: usize) -> NodeId {
        let node = Node::new(parent, level);
        let child = match self.free.pop() {
            Some(free) => {
                self.nodes[free.0 as usize] = Some(node);
                free
            }
            None => {
                let next = NodeId(u32::try_from(self.nodes.len()).expect("fewer than 2^32 nodes"));
                self.nodes.push(Some(node));
                next
            }
        };
        if let Some(parent) = self.node_mut(parent) {
            parent.children.push(child);
        }
        child
    }

    /// Merges a view into a node, and lists it under the node in the parent's index.
    fn join(&mut self, at: NodeId, view: &View) {
        self.work.merges += 1;
        let listed = self.settings.mode == Mode::Rarity;
        let last = self.settings.levels.len() - 1;
        let Some(node) = self.node_mut(at) else { return };
        node.union.insert(view, |_, _| ());
        let (parent, is_leaf) = (node.parent, node.level == last);
        if let Some(parent) = self.node_mut(parent).filter(|_| listed && !is_leaf) {
            parent.index.insert(view, at);
        }
    }
}
