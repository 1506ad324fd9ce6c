//! Clusters of real images against their families, which their names tell: `NN-RELEASE-SET.img`. All ways in
//! one run, over several insertion orders.

use super::{kit, online};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use varve_similarity::manifest::Manifest;
use varve_similarity::measure::{View, Weigh};
use varve_similarity::tree::{ImageId, Mode, Settings, Tree};

/// The level of families (0.5).
const FAMILY: usize = 1;

/// Images of one measure, with what their names tell.
struct Corpus {
    views: Vec<Arc<View>>,
    names: Vec<String>,
}

/// Prints the tables of a manifest.
pub fn tell(path: &Path) {
    let manifest = Manifest::read(path).expect("a manifest");
    for (weigh, by) in [
        (Weigh::Blocks, "blocks"),
        (Weigh::Files, "files"),
        (Weigh::Packages, "packages"),
        (Weigh::Mix, "blocks and packages"),
    ] {
        let listed = manifest.images().map(|(_, listed)| &listed.profile);
        let mut corpus = Corpus {
            views: Vec::new(),
            names: Vec::new(),
        };
        for profile in listed {
            let view = profile.sketches.view(weigh);
            if !view.is_empty() {
                let name = Path::new(&profile.name).file_stem().unwrap_or_default();
                corpus.names.push(name.to_string_lossy().into_owned());
                corpus.views.push(Arc::new(view));
            }
        }
        println!("\n{} images by {by}", corpus.views.len());
        for count in [10, 21, 24, 50, 99] {
            if count <= corpus.views.len() {
                corpus.first(count).tell();
            }
        }
    }
}

impl Corpus {
    fn first(&self, count: usize) -> Self {
        Self {
            views: self.views[..count].to_vec(),
            names: self.names[..count].to_vec(),
        }
    }

    /// Families by the first `words` of the names after the number.
    fn families(&self, words: usize) -> Vec<usize> {
        let mut known = BTreeMap::new();
        let label = |name: &String| {
            let family: Vec<_> = name.split('-').skip(1).take(words).map(str::to_owned).collect();
            let next = known.len();
            *known.entry(family).or_insert(next)
        };
        self.names.iter().map(label).collect()
    }

    fn tell(&self) {
        let count = self.views.len();
        let (tree, seconds) = online(Mode::Rarity, &self.views);
        let ours = kit::labels_of(&tree, FAMILY);
        let clusters = tree.clusters(FAMILY).len();
        let (seed, seed_seconds) = online(Mode::Seed, &self.views);
        let seed_labels = kit::labels_of(&seed, FAMILY);
        let started = Instant::now();
        let distance = |a: usize, b: usize| kit::distance(&self.views[a], &self.views[b]);
        let (medoids, asked) = kit::pam(count, clusters, distance);
        let pam_seconds = started.elapsed().as_secs_f64();
        println!(
            "| {count} images | operations | seconds | clusters | saved, MiB | index by release, by set | strangers |"
        );
        println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: |");
        self.row("default", tree.work().comparisons, seconds, &ours);
        self.row(
            "paper's tree",
            seed.work().comparisons,
            seed_seconds,
            &seed_labels,
        );
        self.row("k-medoids", asked, pam_seconds, &medoids);
        self.orders();
        self.one_more(&tree);
        for cluster in tree.clusters(FAMILY) {
            let names: Vec<_> = cluster
                .iter()
                .map(|ImageId(id)| self.names[*id as usize].as_str())
                .collect();
            println!("  {}", names.join(" "));
        }
    }

    fn row(&self, way: &str, operations: u64, seconds: f64, labels: &[usize]) {
        let index = |words| kit::adjusted_rand_index(&self.families(words), labels);
        println!(
            "| {way} | {operations} | {seconds:.3} | {} | {:.0} | {:.3}, {:.3} | {} |",
            labels.iter().max().map_or(0, |most| most + 1),
            kit::saved(&self.views, labels) / f64::from(1 << 20),
            index(1),
            index(2),
            self.strangers(labels),
        );
    }

    /// Members of clusters that are nearer (SIM) to an image of another cluster than to any of their own: a
    /// cluster that draws small images has them.
    fn strangers(&self, labels: &[usize]) -> usize {
        let count = labels.len();
        let nearest = |i: usize, same: bool| {
            let others = (0..count).filter(|j| *j != i && (labels[*j] == labels[i]) == same);
            others
                .map(|j| kit::distance(&self.views[i], &self.views[j]))
                .fold(f64::INFINITY, f64::min)
        };
        let stranger = |i: &usize| {
            let own = nearest(*i, true);
            own.is_finite() && nearest(*i, false) < own
        };
        (0..count).filter(stranger).count()
    }

    /// The tree in ten orders of insertion, each against the families and against the first.
    fn orders(&self) {
        let mut order: Vec<usize> = (0..self.views.len()).collect();
        let mut found: Vec<Vec<usize>> = Vec::new();
        for seed in 0..10 {
            kit::Rng(seed).shuffle(&mut order);
            let mut tree = Tree::new(Settings::of(Mode::Rarity));
            for at in &order {
                let id = ImageId(u32::try_from(*at).expect("few"));
                tree.insert(id, self.views[*at].clone());
            }
            found.push(kit::labels_of(&tree, FAMILY));
        }
        for (what, truth) in [
            ("release", self.families(1)),
            ("release and set", self.families(2)),
            ("the first order's", found[0].clone()),
        ] {
            let indices: Vec<f64> = found
                .iter()
                .map(|labels| kit::adjusted_rand_index(&truth, labels))
                .collect();
            let least = indices.iter().copied().fold(f64::INFINITY, f64::min);
            let most = indices.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            println!("ten orders, against {what}: {least:.3} to {most:.3}");
        }
    }

    /// The time for the last image once all others are there.
    fn one_more(&self, tree: &Tree) {
        let last = ImageId(u32::try_from(self.views.len() - 1).expect("few"));
        let mut others = Tree::new(Settings::of(Mode::Rarity));
        for (id, view) in (0..).zip(&self.views[..self.views.len() - 1]) {
            others.insert(ImageId(id), view.clone());
        }
        let started = Instant::now();
        others.insert(last, self.views[last.0 as usize].clone());
        println!(
            "one more: {:.4} s; {} clusters at 0.9; peak memory {} MiB",
            started.elapsed().as_secs_f64(),
            tree.clusters(FAMILY + 1).len(),
            super::peak_mib()
        );
    }
}
