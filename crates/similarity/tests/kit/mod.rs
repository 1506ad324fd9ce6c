//! The crate's test kit: synthetic images of known families, k-medoids (PAM), and the adjusted Rand index.
//! For tests and benches only.
#![allow(dead_code, clippy::expect_used)]

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use varve_similarity::hash::mix;
use varve_similarity::measure::{Held, Overlap, View};
use varve_similarity::sketch::{Element, Sketch};
use varve_similarity::tree::{ImageId, Tree};

/// Numbers from a seed (SplitMix64).
pub struct Rng(pub u64);

impl Rng {
    /// The next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Puts items in another order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.below(i as u64 + 1) as usize;
            items.swap(i, j);
        }
    }
}

/// How many elements of an image are in all images, in its family's, and in it alone.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    pub base: u64,
    pub family: u64,
    pub own: u64,
    /// Of a hundred elements of base and family, how many a member lacks.
    pub lacks: u64,
}

/// The three kinds in which a tree must find the families.
pub const KINDS: [Kind; 3] = [
    Kind {
        name: "common base",
        base: 400,
        family: 200,
        own: 50,
        lacks: 0,
    },
    Kind {
        name: "small base",
        base: 50,
        family: 350,
        own: 250,
        lacks: 0,
    },
    Kind {
        name: "no base",
        base: 0,
        family: 400,
        own: 250,
        lacks: 0,
    },
];

/// A base, and nothing else in common; and nothing at all.
pub const ALONE: [Kind; 2] = [
    Kind {
        name: "base only",
        base: 400,
        family: 0,
        own: 250,
        lacks: 0,
    },
    Kind {
        name: "nothing in common",
        base: 0,
        family: 0,
        own: 650,
        lacks: 0,
    },
];

/// Images of a kind, and the family of each.
pub fn images(kind: Kind, count: u64, families: u64, seed: u64) -> (Vec<Arc<View>>, Vec<usize>) {
    let mut rng = Rng(seed);
    let mut views = Vec::new();
    let mut labels = Vec::new();
    for image in 0..count {
        let family = image % families;
        let named = |space: u64, n: u64| mix(mix(seed ^ space << 40) ^ n);
        let mut hashes = Vec::new();
        for n in 0..kind.base {
            hashes.push(named(1, n));
        }
        for n in 0..kind.family {
            hashes.push(named(2, family << 20 | n));
        }
        hashes.retain(|_| rng.below(100) >= kind.lacks);
        for n in 0..kind.own {
            hashes.push(named(3, image << 20 | n));
        }
        views.push(Arc::new(View::of(Sketch::of(
            hashes.into_iter().map(|hash| Element { hash, weight: 4096 }),
        ))));
        labels.push(family as usize);
    }
    (views, labels)
}

/// The cluster of each image, at a level of a tree whose images are numbered from 0.
pub fn labels_of(tree: &Tree, level: usize) -> Vec<usize> {
    let mut labels = vec![usize::MAX; tree.len()];
    for (cluster, images) in tree.clusters(level).iter().enumerate() {
        for ImageId(id) in images {
            labels[*id as usize] = cluster;
        }
    }
    labels
}

/// Agreement of two partitions beyond chance: 1 for equal ones, 0 for what chance gives (Hubert and Arabie,
/// 1985).
pub fn adjusted_rand_index(one: &[usize], other: &[usize]) -> f64 {
    assert_eq!(one.len(), other.len());
    let pairs = |n: u64| (n * n.saturating_sub(1) / 2) as f64;
    let mut cells: HashMap<(usize, usize), u64> = HashMap::new();
    let (mut rows, mut columns): (HashMap<usize, u64>, HashMap<usize, u64>) = Default::default();
    for (a, b) in one.iter().zip(other) {
        *cells.entry((*a, *b)).or_default() += 1;
        *rows.entry(*a).or_default() += 1;
        *columns.entry(*b).or_default() += 1;
    }
    let sum = |counts: &mut dyn Iterator<Item = &u64>| counts.map(|n| pairs(*n)).sum::<f64>();
    let both = sum(&mut cells.values());
    let (rows, columns) = (sum(&mut rows.values()), sum(&mut columns.values()));
    let expected = rows * columns / pairs(one.len() as u64).max(1.0);
    let most = (rows + columns) / 2.0;
    if (most - expected).abs() < 1e-12 {
        1.0
    } else {
        (both - expected) / (most - expected)
    }
}

/// k-medoids by PAM (Kaufman and Rousseeuw): BUILD, then the best SWAP until none helps. `distance` is asked
/// once a pair. Returns the cluster of each item and how often `distance` was asked.
pub fn pam(count: usize, k: usize, distance: impl Fn(usize, usize) -> f64) -> (Vec<usize>, u64) {
    let mut matrix = vec![0.0; count * count];
    let mut asked = 0;
    for i in 0..count {
        for j in 0..i {
            asked += 1;
            let far = distance(i, j);
            (matrix[i * count + j], matrix[j * count + i]) = (far, far);
        }
    }
    let far = |i: usize, j: usize| matrix[i * count + j];
    let cost = |medoids: &[usize]| -> f64 {
        let near = |i| medoids.iter().map(|m| far(i, *m)).fold(f64::INFINITY, f64::min);
        (0..count).map(near).sum()
    };
    let mut medoids: Vec<usize> = Vec::new();
    let mut nearest = vec![f64::INFINITY; count];
    while medoids.len() < k.min(count) {
        let gain = |m: usize| -> f64 { (0..count).map(|i| nearest[i].min(far(i, m))).sum() };
        let free = (0..count).filter(|m| !medoids.contains(m));
        let best = free
            .min_by(|a, b| gain(*a).total_cmp(&gain(*b)))
            .expect("k <= count");
        medoids.push(best);
        (0..count).for_each(|i| nearest[i] = nearest[i].min(far(i, best)));
    }
    let mut least = cost(&medoids);
    loop {
        let mut best = None;
        for at in 0..medoids.len() {
            // Distance to the nearest of the others, so that a swap costs one pass.
            let others = |i: usize| {
                let rest = medoids.iter().enumerate().filter(|(other, _)| *other != at);
                rest.map(|(_, m)| far(i, *m)).fold(f64::INFINITY, f64::min)
            };
            let others: Vec<f64> = (0..count).map(others).collect();
            for item in (0..count).filter(|item| !medoids.contains(item)) {
                let total: f64 = (0..count).map(|i| others[i].min(far(i, item))).sum();
                if total < least - 1e-9 {
                    (least, best) = (total, Some((at, item)));
                }
            }
        }
        let Some((at, item)) = best else { break };
        medoids[at] = item;
    }
    let nearest = |i: usize| {
        let by_distance = |a: &usize, b: &usize| far(i, medoids[*a]).total_cmp(&far(i, medoids[*b]));
        (0..medoids.len()).min_by(by_distance).expect("there is a medoid")
    };
    ((0..count).map(nearest).collect(), asked)
}

/// Bytes saved when each cluster keeps what its images share once.
pub fn saved(views: &[Arc<View>], labels: &[usize]) -> f64 {
    let mut clusters: BTreeMap<usize, Vec<&View>> = BTreeMap::new();
    for (view, label) in views.iter().zip(labels) {
        clusters.entry(*label).or_default().push(view);
    }
    let of = |views: &Vec<&View>| Held::of(views.iter().copied()).saved();
    clusters.values().map(of).sum()
}

/// 1 − SIM of two views: PAM's distance (section 4.3.2).
pub fn distance(one: &View, other: &View) -> f64 {
    1.0 - Overlap::of(one, other).sim()
}

/// b of y = a·x^b through the first and the last point.
pub fn exponent(points: &[(f64, f64)]) -> f64 {
    let (first, last) = (points[0], points[points.len() - 1]);
    (last.1 / first.1).ln() / (last.0 / first.0).ln()
}
