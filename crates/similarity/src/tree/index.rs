//! The inverted index of a node: from elements to the children that have them. It short-lists children for an
//! image without comparing with each. Knows no similarity.

use super::NodeId;
use super::union::Weight;
use crate::hash::{HashedMap, combine};
use crate::measure::View;
use std::collections::HashMap;

/// Elements of an image that are looked up and listed: its prefix of at most so many. The sample is chosen by
/// hash, so equal elements are in it on both sides.
const LOOKED_UP: usize = 1024;

/// Children of the root that an element is listed under. An element of more tells little, and its list would
/// make insertion slower the more children there are.
const LISTED: usize = 64;
/// The same below the root, where the images of a family have most elements in common.
const LISTED_BELOW: usize = 16;

#[derive(Debug, Clone)]
enum Posting {
    Children(Vec<NodeId>),
    /// It was in too many children.
    Common,
}

/// A child that has something of the image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The child.
    pub child: NodeId,
    /// Estimate of the image's share that the child may have at most.
    pub at_most: f64,
    /// Estimate of the share that it has for certain (without what is common to many children).
    pub at_least: f64,
}

/// Which child has which elements.
#[derive(Debug, Clone)]
pub struct Index {
    postings: HashedMap<Posting>,
    /// Children that an element is listed under, at most.
    listed: usize,
    /// Whether an image was too large to be listed whole.
    sampled: bool,
}

impl Index {
    /// The empty index of a node: the root's is for level 0.
    pub fn of_level(level: usize) -> Self {
        Self {
            postings: HashedMap::default(),
            listed: if level == 0 { LISTED } else { LISTED_BELOW },
            sampled: false,
        }
    }

    /// Lists the elements of an image under the child that it has joined.
    pub fn insert(&mut self, view: &View, child: NodeId) {
        for (part, sketch) in view.parts.iter().enumerate() {
            let elements = sketch.prefix(LOOKED_UP);
            self.sampled |= elements.len() < sketch.elements().len();
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

    /// Takes an element off a child that has it no more.
    pub fn remove(&mut self, part: usize, hash: u64, child: NodeId) {
        let key = key(part, hash);
        if let Some(Posting::Children(children)) = self.postings.get_mut(&key) {
            children.retain(|listed| *listed != child);
            if children.is_empty() {
                self.postings.remove(&key);
            }
        }
    }

    /// The children that share something rare with the view, best first, and how many postings were read.
    pub fn candidates(&self, view: &View, weight: Weight<'_>) -> (Vec<Candidate>, u64) {
        let mut scores: HashMap<NodeId, f64> = HashMap::new();
        let (mut all, mut squares, mut common, mut read) = (0.0, 0.0, 0.0, 0);
        let mut sampled = self.sampled;
        for (part, sketch) in view.parts.iter().enumerate() {
            let elements = sketch.prefix(LOOKED_UP);
            sampled |= elements.len() < sketch.elements().len();
            // A part that is looked up in a coarser sample than it is held in stands for more.
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
        // all²/squares. What was listed and looked up whole is no estimate; the margin is for sums in another
        // order.
        let doubt = |p: f64| match sampled {
            true => 3.0 * (p * (1.0 - p) * squares).max(0.0).sqrt() / f64::max(all, 1.0),
            false => 1e-9,
        };
        let mut found: Vec<_> = scores
            .into_iter()
            .map(|(child, score)| {
                let most = share(score + common).min(1.0);
                Candidate {
                    child,
                    at_most: most + doubt(most),
                    at_least: share(score),
                }
            })
            .collect();
        found.sort_by(|a, b| b.at_least.total_cmp(&a.at_least).then(a.child.cmp(&b.child)));
        (found, read)
    }
}

/// One key space for all parts.
fn key(part: usize, hash: u64) -> u64 {
    if part == 0 {
        hash
    } else {
        combine(hash, part as u64)
    }
}
