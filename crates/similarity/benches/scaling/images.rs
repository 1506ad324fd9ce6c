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

/// What of the set of packages tells a family, beside the release.
type By = fn(&str) -> &str;
/// Nothing: images of a release are a family.
const RELEASE: By = |_| "";
/// Sets that are as large as the base system and larger.
const LARGE: By = |set| if set == "db" || set == "java" { set } else { "" };

/// Whether an image has such a set.
fn is_large(name: &str) -> bool {
    !LARGE(name.split('-').nth(2).unwrap_or_default()).is_empty()
}

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
        let all = corpus.views.len();
        for count in [21, 24, 50, 99]
            .into_iter()
            .filter(|count| *count < all)
            .chain([all])
        {
            corpus.first(count).tell();
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

    /// Families by release, and large sets of which there are several images apart.
    fn several(&self) -> Vec<usize> {
        let (with_sets, releases) = (self.families(&LARGE), self.families(&RELEASE));
        let is_alone = |family: &usize| with_sets.iter().filter(|other| *other == family).count() == 1;
        let label = |(set, release): (&usize, &usize)| match is_alone(set) {
            true => *release,
            false => self.views.len() + set,
        };
        // A release is called by its number, its images without a large set by that of their family.
        let labels: Vec<usize> = with_sets.iter().zip(&releases).map(label).collect();
        let plain = |release: usize| {
            let mut of = self.names.iter().zip(&releases).zip(&labels);
            of.find(|((name, other), label)| {
                **other == release && **label >= self.views.len() && !is_large(name)
            })
            .map_or(release, |(_, label)| *label)
        };
        let call = |label: &usize| {
            if *label < self.views.len() {
                plain(*label)
            } else {
                *label
            }
        };
        labels.iter().map(call).collect()
    }

    /// Families by what the names tell.
    fn families(&self, by: &By) -> Vec<usize> {
        let mut known = BTreeMap::new();
        let label = |name: &String| {
            let mut words = name.split('-').skip(1);
            let (release, set) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let next = known.len();
            *known
                .entry((release.to_owned(), by(set).to_owned()))
                .or_insert(next)
        };
        self.names.iter().map(label).collect()
    }

    fn tell(&self) {
        let count = self.views.len();
        let (tree, seconds) = online(Mode::Rarity, &self.views);
        let ours = kit::labels_of(&tree, FAMILY);
        let all = (0..).map(ImageId).zip(self.views.iter().cloned());
        let built = Tree::build(Settings::of(Mode::Rarity), all);
        let built_labels = kit::labels_of(&built, FAMILY);
        let clusters = built.clusters(FAMILY).len();
        let (seed, seed_seconds) = online(Mode::Seed, &self.views);
        let seed_labels = kit::labels_of(&seed, FAMILY);
        let started = Instant::now();
        let distance = |a: usize, b: usize| kit::distance(&self.views[a], &self.views[b]);
        let (medoids, asked) = kit::pam(count, clusters, distance);
        let pam_seconds = started.elapsed().as_secs_f64();
        println!(
            "| {count} images | operations | seconds | clusters | saved, MiB | index by release, with large sets, \
             with those of several | strangers |"
        );
        println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: |");
        self.row("default, as they come", tree.work().comparisons, seconds, &ours);
        self.row(
            "default, built of all",
            built.work().comparisons,
            0.0,
            &built_labels,
        );
        self.row(
            "paper's tree",
            seed.work().comparisons,
            seed_seconds,
            &seed_labels,
        );
        self.row("k-medoids", asked, pam_seconds, &medoids);
        self.orders();
        self.one_more(&tree);
        for cluster in built.clusters(FAMILY) {
            let names: Vec<_> = cluster
                .iter()
                .map(|ImageId(id)| self.names[*id as usize].as_str())
                .collect();
            println!("  {}", names.join(" "));
        }
    }

    fn row(&self, way: &str, operations: u64, seconds: f64, labels: &[usize]) {
        let index = |families: Vec<usize>| kit::adjusted_rand_index(&families, labels);
        println!(
            "| {way} | {operations} | {seconds:.3} | {} | {:.0} | {:.3}, {:.3}, {:.3} | {} |",
            labels.iter().max().map_or(0, |most| most + 1),
            kit::saved(&self.views, labels) / f64::from(1 << 20),
            index(self.families(&RELEASE)),
            index(self.families(&LARGE)),
            index(self.several()),
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

    /// The tree in ten orders: as images come, and built of all, as `varve dedup cluster` does.
    fn orders(&self) {
        let mut order: Vec<usize> = (0..self.views.len()).collect();
        let (mut online, mut built): (Vec<Vec<usize>>, Vec<Vec<usize>>) = Default::default();
        for seed in 0..10 {
            kit::Rng(seed).shuffle(&mut order);
            let image = |at: &usize| (ImageId(u32::try_from(*at).expect("few")), self.views[*at].clone());
            let mut tree = Tree::new(Settings::of(Mode::Rarity));
            for (id, view) in order.iter().map(image) {
                tree.insert(id, view);
            }
            online.push(kit::labels_of(&tree, FAMILY));
            let tree = Tree::build(Settings::of(Mode::Rarity), order.iter().map(image));
            built.push(kit::labels_of(&tree, FAMILY));
        }
        for (way, found) in [("as they come", online), ("built of all", built)] {
            for (what, truth) in [
                ("release", self.families(&RELEASE)),
                ("release and large sets of several", self.several()),
                ("the first order's", found[0].clone()),
            ] {
                let index = |labels: &Vec<usize>| kit::adjusted_rand_index(&truth, labels);
                let indices: Vec<f64> = found.iter().map(index).collect();
                let least = indices.iter().copied().fold(f64::INFINITY, f64::min);
                let most = indices.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                println!("ten orders, {way}, against {what}: {least:.3} to {most:.3}");
            }
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
