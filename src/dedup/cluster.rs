//! `varve dedup cluster`.

use super::args::{ClusterArgs, TreeArg};
use super::images::{Reader, form_text, stamp};
use super::{percent, show, weigh_text};
use crate::exit::Usage;
use crate::out;
use serde_json::json;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use varve_similarity::manifest::{Listed, Manifest};
use varve_similarity::measure::{Held, View, Weigh};
use varve_similarity::tree::{ImageId, Mode, Settings};

/// Looks at images, keeps them in the manifest, and shows the clusters.
pub fn cluster(args: &ClusterArgs) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut manifest = wanted_manifest(args)?;
    let (read, failed) = read_images(args, &mut manifest)?;
    let read_seconds = started.elapsed().as_secs_f64();
    if read > 0 || !args.remove.is_empty() || args.weigh.is_some() || args.tree.is_some() {
        manifest.write(&args.manifest)?;
    }
    let grouping = Instant::now();
    let tree = manifest.tree();
    let cluster_seconds = grouping.elapsed().as_secs_f64();
    let clusters = tree.clusters(usize::from(args.level));
    if args.json {
        let images = |cluster: &Vec<ImageId>| -> Vec<_> {
            let listed = cluster.iter().filter_map(|id| Some((id, manifest.get(*id)?)));
            listed.map(|(id, listed)| image_json(*id, listed)).collect()
        };
        let clusters: Vec<_> = clusters
            .iter()
            .map(|cluster| json!({ "held": held(&manifest, cluster), "images": images(cluster) }))
            .collect();
        let value = json!({
            "images": manifest.len(),
            "images_read": read,
            "errors": failed,
            "weigh": weigh_text(manifest.weigh),
            "level": manifest.settings.levels[usize::from(args.level)],
            "settings": manifest.settings,
            "work": tree.work(),
            "seconds_reading": read_seconds,
            "seconds_clustering": cluster_seconds,
            "clusters": clusters,
        });
        out::line(&format!("{value:#}"));
    } else {
        for (n, cluster) in clusters.iter().enumerate() {
            tell(&manifest, n + 1, cluster);
        }
        out::line(&format!(
            "{} images in {} clusters by {}; {read} read in {read_seconds:.1} s",
            manifest.len(),
            clusters.len(),
            weigh_text(manifest.weigh),
        ));
    }
    if !failed.is_empty() {
        failed
            .iter()
            .for_each(|error| crate::out::note(&format!("varve: {error}")));
        anyhow::bail!(
            "{} images could not be read; the others are in the manifest",
            failed.len()
        );
    }
    Ok(())
}

/// Reads the manifest, or makes a new one, with the settings of the arguments and without the images that
/// they remove.
fn wanted_manifest(args: &ClusterArgs) -> anyhow::Result<Manifest> {
    let mut manifest = match Manifest::read(&args.manifest) {
        Ok(manifest) => manifest,
        Err(_) if !args.manifest.exists() => {
            if args.images.is_empty() {
                let path = args.manifest.display();
                return Err(Usage(format!("{path} is not there yet: name images to put in it")).into());
            }
            Manifest::new(Settings::default(), Weigh::default())
        }
        Err(error) => return Err(error.into()),
    };
    if let Some(weigh) = args.weigh {
        manifest.weigh = weigh.weigh();
    }
    if let Some(tree) = args.tree {
        manifest.settings.mode = match tree {
            TreeArg::Rarity => Mode::Rarity,
            TreeArg::Seed => Mode::Seed,
        };
    }
    for path in &args.remove {
        let name = path.display().to_string();
        let Some(id) = manifest.find(&name) else {
            anyhow::bail!(
                "{name} is not in {}; nothing was changed",
                args.manifest.display()
            );
        };
        manifest.remove(id);
    }
    Ok(manifest)
}

/// Reads new and changed images, several at once, into the manifest. Returns their number and the error
/// messages.
fn read_images(args: &ClusterArgs, manifest: &mut Manifest) -> anyhow::Result<(usize, Vec<String>)> {
    let known = |path: &PathBuf| {
        let listed = manifest
            .find(&path.display().to_string())
            .and_then(|id| manifest.get(id));
        let now = stamp(path).ok().filter(|(_, time)| *time >= 0);
        listed.is_some_and(|listed| Some(listed.stamp) == now)
    };
    let wanted: Vec<&PathBuf> = args.images.iter().filter(|path| !known(path)).collect();
    let reader = Reader::new(&args.files, &args.limits)?;
    let bar = indicatif::ProgressBar::new(wanted.len() as u64);
    if let Ok(style) = indicatif::ProgressStyle::with_template("{bar:40} {pos}/{len} images {elapsed} {msg}")
    {
        bar.set_style(style);
    }
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<anyhow::Result<Listed>>>> =
        Mutex::new(wanted.iter().map(|_| None).collect());
    std::thread::scope(|scope| {
        for _ in 0..usize::from(args.jobs).min(wanted.len()) {
            scope.spawn(|| {
                while let Some((n, path)) = {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    wanted.get(n).map(|path| (n, path))
                } {
                    bar.set_message(path.display().to_string());
                    let result = reader.read(path);
                    if let Ok(mut results) = results.lock() {
                        results[n] = Some(result);
                    }
                    bar.inc(1);
                }
            });
        }
    });
    bar.finish_and_clear();
    let mut failed = Vec::new();
    let mut read = 0;
    let results = results.into_inner().unwrap_or_default();
    for result in results.into_iter().flatten() {
        match result {
            Ok(listed) => {
                read += 1;
                manifest.insert(listed);
            }
            Err(error) => failed.push(crate::exit::message(&error)),
        }
    }
    Ok((read, failed))
}

fn held(manifest: &Manifest, cluster: &[ImageId]) -> Held {
    let listed = cluster.iter().filter_map(|id| manifest.get(*id));
    let views: Vec<View> = listed
        .map(|listed| listed.profile.sketches.view(manifest.weigh))
        .collect();
    Held::of(views.iter())
}

fn image_json(id: ImageId, listed: &Listed) -> serde_json::Value {
    let profile = &listed.profile;
    json!({
        "id": id,
        "name": profile.name,
        "form": form_text(profile.form),
        "bytes": profile.bytes,
        "files": profile.files,
        "packages": profile.packages.len(),
        "sampled": 1u64 << profile.sketches.blocks.rate().k(),
        "notes": profile.notes,
    })
}

fn tell(manifest: &Manifest, number: usize, cluster: &[ImageId]) {
    let held = held(manifest, cluster);
    out::line(&format!(
        "cluster {number}: {} images, {} apart, {} together ({:.0} % saved)",
        cluster.len(),
        show(held.apart),
        show(held.together),
        percent(held.saved(), held.apart),
    ));
    for listed in cluster.iter().filter_map(|id| manifest.get(*id)) {
        let profile = &listed.profile;
        out::line(&format!(
            "  {}  ({}, {}, {} packages)",
            profile.name,
            form_text(profile.form),
            show(profile.bytes as f64),
            profile.packages.len(),
        ));
        profile
            .notes
            .iter()
            .for_each(|note| out::line(&format!("    {note}")));
    }
}
