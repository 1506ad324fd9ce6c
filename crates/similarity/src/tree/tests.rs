//! The tree alone; its quality against known families is in `tests/quality.rs`.
#![expect(clippy::single_range_in_vec_init, reason = "an image is a list of ranges")]

use super::*;
use crate::hash::mix;
use crate::sketch::{Element, Sketch};

/// An image of numbered elements of 4 KiB.
fn view(ranges: &[std::ops::Range<u64>]) -> Arc<View> {
    let elements = ranges.iter().cloned().flatten().map(|number| Element {
        hash: mix(number + 1),
        weight: 4096,
    });
    Arc::new(View::of(Sketch::of(elements)))
}

fn ids(numbers: &[u32]) -> Vec<ImageId> {
    numbers.iter().map(|number| ImageId(*number)).collect()
}

/// A tree of the five images of figure 4.4: S(A,B) = 0.75, S(C,E) = 0.95, S(CE,D) = 0.8.
fn figure_4_4(mode: Mode) -> Tree {
    let mut tree = Tree::new(Settings::of(mode));
    let images = [
        view(&[0..100]),
        view(&[0..75, 200..225]),
        view(&[1000..1100]),
        view(&[1000..1080, 1200..1220]),
        view(&[1000..1095, 1300..1305]),
    ];
    for (id, image) in (0..).zip(images) {
        tree.insert(ImageId(id), image);
    }
    tree
}

#[test]
fn seed_tree_is_as_in_figure_4_4() {
    let tree = figure_4_4(Mode::Seed);
    assert_eq!(tree.clusters(0), [ids(&[0, 1, 2, 3, 4])]);
    assert_eq!(tree.clusters(1), [ids(&[2, 3, 4]), ids(&[0, 1])]);
    assert_eq!(tree.clusters(2), [ids(&[2, 4]), ids(&[0]), ids(&[1]), ids(&[3])]);
    assert_eq!(tree.clusters(3).len(), 5);
}

#[test]
fn default_tree_has_the_clusters_of_figure_4_4() {
    let tree = figure_4_4(Mode::Rarity);
    assert_eq!(tree.clusters(1), [ids(&[2, 3, 4]), ids(&[0, 1])]);
}

#[test]
fn equal_images_share_a_leaf_without_a_comparison() {
    let mut tree = Tree::new(Settings::default());
    tree.insert(ImageId(1), view(&[0..500]));
    let before = tree.work().comparisons;
    tree.insert(ImageId(2), view(&[0..500]));
    assert_eq!(tree.clusters(3), [ids(&[1, 2])]);
    assert_eq!(tree.work().comparisons, before);
    assert!(tree.remove(ImageId(1)));
    tree.insert(ImageId(3), view(&[0..500]));
    assert_eq!(tree.clusters(3), [ids(&[2, 3])]);
}

#[test]
fn tree_is_empty_again_when_all_images_are_taken_out() {
    for mode in [Mode::Seed, Mode::Rarity] {
        let mut tree = figure_4_4(mode);
        for id in [3, 0, 4, 1, 2] {
            assert!(tree.remove(ImageId(id)));
            assert!(!tree.remove(ImageId(id)));
        }
        assert!(tree.is_empty() && tree.clusters(1).is_empty());
        assert_eq!(tree.nodes.iter().flatten().count(), 1, "only the root is left");
        assert_eq!(tree.frequency.weight(), 0.0);
        assert!(tree.leaves.is_empty());
    }
}

#[test]
fn image_taken_out_and_put_back_has_its_cluster_again() {
    for mode in [Mode::Seed, Mode::Rarity] {
        let mut tree = figure_4_4(mode);
        let before = tree.clusters(1);
        for id in (0..5).map(ImageId) {
            let view = tree.view(id).expect("it is there").clone();
            tree.insert(id, view);
            assert_eq!(tree.clusters(1), before, "{mode:?}, image {id:?}");
        }
    }
}

#[test]
fn small_common_image_is_no_member_of_a_large_cluster() {
    let base = 0..400;
    let mut images = Vec::new();
    for family in 0..6u64 {
        for own in 0..8u64 {
            let start = 10_000 * (family + 1);
            let own = start + 1000 + 50 * own..start + 1050 + 50 * own;
            images.push(view(&[base.clone(), start..start + 600, own]));
        }
    }
    // An image of only the base, and one of all but a little of it.
    images.push(view(&[0..400]));
    images.push(view(&[0..396]));
    let count = u32::try_from(images.len()).expect("few");
    let tree = Tree::build(Settings::default(), (0..count).map(ImageId).zip(images));
    let clusters = tree.clusters(1);
    assert_eq!(clusters.len(), 7, "{clusters:?}");
    assert_eq!(clusters.last(), Some(&ids(&[48, 49])));
    // The paper's S of these and any cluster is 1.
    let cluster = tree.above(tree.images[&ImageId(0)].leaf, 1);
    let union = &tree.node(cluster).expect("it is there").union;
    assert_eq!(union.overlap(tree.view(ImageId(48)).expect("there")).s(), 1.0);
}

#[test]
fn images_of_a_cluster_follow_each_other() {
    let tree = figure_4_4(Mode::Rarity);
    let order = tree.in_order();
    let at = |id| {
        order
            .iter()
            .position(|other| *other == ImageId(id))
            .expect("listed")
    };
    assert_eq!(order.len(), 5);
    assert_eq!(at(0).abs_diff(at(1)), 1);
    let own = [at(2), at(3), at(4)];
    assert_eq!(
        own.iter().max().zip(own.iter().min()).map(|(a, b)| a - b),
        Some(2)
    );
}

#[test]
#[should_panic(expected = "levels must ascend")]
fn levels_out_of_order_are_refused() {
    let _ = Tree::new(Settings {
        levels: vec![0.0, 0.9, 0.5, 1.0],
        ..Settings::default()
    });
}
