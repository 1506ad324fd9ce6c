//! The inverted index of a node: from elements to the children that have them. It short-lists children for an
//! image without comparing each of them. Knows no similarity.

use super::NodeId;
use super::union::Weight;
use crate::hash::{HashedMap, combine};
use crate::measure::View;
use std::collections::{HashMap, HashSet};

/// Largest prefix of an image's sample that is looked up and listed. The sample is chosen by hash, so equal
/// elements are in it on both sides.
const LOOKED_UP: usize = 1024;

/// Most children of the root that an element is listed under. An element of more children says little, and
/// its list would slow insertion down as the number of children grows.
const LISTED: usize = 64;
/// As [`LISTED`], below the root, where the images of a family have most elements in common.
const LISTED_BELOW: usize = 16;

#[derive(Debug, Clone)]
enum Posting {
    Children(Vec<NodeId>),
    /// The element is in too many children.
    Common,
}

/// A child that shares content with the image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The child.
    pub child: NodeId,
    /// Estimated upper bound of the image's share that the child has.
    pub at_most: f64,
    /// Estimated lower bound of that share (without elements common to many children).
    pub at_least: f64,
}

/// The children of each element.
#[derive(Debug, Clone)]
pub struct Index {
    postings: HashedMap<Posting>,
    /// Most children that an element is listed under.
    listed: usize,
    /// Children with an image that was too large to be listed completely.
    partly: HashSet<NodeId>,
}

impl Index {
    /// The empty index of a node of this level; the root's level is 0.
    pub fn of_level(level: usize) -> Self {
        Self {
            postings: HashedMap::default(),
            listed: if level == 0 { LISTED } else { LISTED_BELOW },
            partly: HashSet::new(),
        }
    }

    /// Lists the elements of an image under the child that it has joined.
    pub fn insert(&mut self, view: &View, child: NodeId) {
        for (part, sketch) in view.parts.iter().enumerate() {
            let elements = sketch.prefix(LOOKED_UP);
            if elements.len() < sketch.elements().len() {
                self.partly.insert(child);
            }
            for element in elements {
                let key = key(part, element.hash);
                let posting = self.postings.entry(key).or_insert(Posting::Children(Vec::new()));
                if let Posting::Children(children) = posting {
                    if children.contains(&child) {
                        continue;
                    }
                    children.push(child);
                    if children.len() > self.listed {
                        *posting = Posting::Common;
                    }
                }
            }
        }
    }

    /// Removes an element from a child that no longer has it.
    pub fn remove(&mut self, part: usize, hash: u64, child: NodeId) {
        let key = key(part, hash);
        if let Some(Posting::Children(children)) = self.postings.get_mut(&key) {
            children.retain(|listed| *listed != child);
            if children.is_empty() {
                self.postings.remove(&key);
            }
        }
    }

    /// Forgets about a child that is gone; its elements have been removed.
    pub fn forget(&mut self, child: NodeId) {
        self.partly.remove(&child);
    }

    /// The children that share a rare element with the view, best first, the view's weight, and the number of
    /// postings read.
    pub fn candidates(&self, view: &View, weight: Weight<'_>) -> (Vec<Candidate>, f64, u64) {
        let mut scores: HashMap<NodeId, f64> = HashMap::new();
        let (mut all, mut squares, mut common, mut read) = (0.0, 0.0, 0.0, 0);
        let mut sampled = false;
        for (part, sketch) in view.parts.iter().enumerate() {
            let elements = sketch.prefix(LOOKED_UP);
            sampled |= elements.len() < sketch.elements().len();
            // If a part is looked up in a coarser sample than it is held in, its elements stand for more.
            let scale = sketch.elements().len() as f64 / elements.len().max(1) as f64 * sketch.rate().scale();
            for element in elements {
                let wt = scale * weight(part, element.hash, element.weight);
                all += wt;
                squares += wt * wt;
                match self.postings.get(&key(part, element.hash)) {
                    None => {}
                    Some(Posting::Common) => common += wt,
                    Some(Posting::Children(children)) => {
                        read += children.len() as u64;
                        children
                            .iter()
                            .for_each(|child| *scores.entry(*child).or_default() += wt);
                    }
                }
            }
        }
        let share = |wt: f64| if all > 0.0 { wt / all } else { 0.0 };
        // Three standard deviations of a share estimated from a sample, whose size in equal elements is
        // all²/squares. Without sampling the share is exact; the margin is for sums in another order.
        let doubt = |p: f64, child: &NodeId| match sampled || self.partly.contains(child) {
            true => 3.0 * (p * (1.0 - p) * squares).max(0.0).sqrt() / f64::max(all, 1.0),
            false => 1e-9,
        };
        let mut found: Vec<_> = scores
            .into_iter()
            .map(|(child, score)| {
                let most = share(score + common).min(1.0);
                Candidate {
                    child,
                    at_most: most + doubt(most, &child),
                    at_least: share(score),
                }
            })
            .collect();
        found.sort_by(|a, b| b.at_least.total_cmp(&a.at_least).then(a.child.cmp(&b.child)));
        (found, all, read)
    }
}

/// Maps the hashes of all parts to one key space.
fn key(part: usize, hash: u64) -> u64 {
    if part == 0 {
        hash
    } else {
        combine(hash, part as u64)
    }
}
