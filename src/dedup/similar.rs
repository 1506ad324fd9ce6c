//! `varve dedup similar`.

use super::args::{FileArgs, SimilarArgs};
use super::images::Reader;
use super::{show, weigh_text};
use crate::out;
use serde_json::json;
use varve_similarity::image::Profile;
use varve_similarity::manifest::Manifest;
use varve_similarity::similar::{Difference, Near, nearest};

/// Most lines of a list in the text output.
const SHOWN: usize = 20;

/// Prints the images nearest to one, and the differences to one of them.
pub fn similar(args: &SimilarArgs) -> anyhow::Result<()> {
    let manifest = Manifest::read(&args.manifest)?;
    let name = args.image.display().to_string();
    let known = manifest.find(&name);
    let profile: Profile = match known.and_then(|id| manifest.get(id)) {
        Some(listed) => listed.profile.clone(),
        None => {
            let all = FileArgs {
                include: Vec::new(),
                exclude: Vec::new(),
                min_age: 0,
                rate: None,
            };
            Reader::new(&all, &args.limits)?.read(&args.image)?.profile
        }
    };
    let mut near = nearest(&manifest, &profile.sketches.view(manifest.weigh), known);
    let other = match &args.to {
        Some(to) => {
            let to = to.display().to_string();
            let found = near.iter().find(|near| near.name == to).cloned();
            Some(found.ok_or_else(|| anyhow::anyhow!("{to} is not in {}", args.manifest.display()))?)
        }
        None => near.first().cloned(),
    };
    near.truncate(args.count);
    let there = other
        .as_ref()
        .and_then(|other| Some((other, manifest.get(manifest.find(&other.name)?)?)));
    let difference = there.map(|(other, listed)| (other, Difference::of(&profile, &listed.profile)));
    if args.json {
        let value = json!({
            "image": name,
            "weigh": weigh_text(manifest.weigh),
            "notes": profile.notes,
            "nearest": near,
            "compared_to": difference.as_ref().map(|(other, _)| other),
            "difference": difference.as_ref().map(|(_, difference)| difference),
        });
        out::line(&format!("{value:#}"));
        return Ok(());
    }
    if near.is_empty() {
        out::line("there is no other image in the manifest");
    }
    for near in &near {
        out::line(&format!(
            "SIM {:.3}  S {:.3}  {} in both, {} only here, {} only there  {}",
            near.sim,
            near.s,
            show(near.shared_bytes),
            show(near.only_here_bytes),
            show(near.only_there_bytes),
            near.name,
        ));
    }
    if let Some((other, difference)) = &difference {
        tell(other, difference);
    }
    Ok(())
}

fn tell(other: &Near, difference: &Difference) {
    out::line(&format!("against {}:", other.name));
    if *difference == Difference::default() {
        out::line("  no package and no directory differs");
    }
    list("packages only here", difference.only_here.iter().cloned());
    list("packages only there", difference.only_there.iter().cloned());
    let versions = difference.versions.iter();
    list(
        "other versions",
        versions.map(|package| format!("{} {} (there {})", package.name, package.here, package.there)),
    );
    let areas = difference.areas.iter().map(|area| {
        format!(
            "/{}: {} files, {} (there {}, {})",
            area.path,
            area.here.0,
            show(area.here.1 as f64),
            area.there.0,
            show(area.there.1 as f64),
        )
    });
    list("directories that differ", areas);
}

fn list(title: &str, items: impl ExactSizeIterator<Item = String>) {
    let count = items.len();
    if count == 0 {
        return;
    }
    out::line(&format!("  {title}: {count}"));
    items
        .take(SHOWN)
        .for_each(|item| out::line(&format!("    {item}")));
    if count > SHOWN {
        out::line(&format!("    … and {} more (--json has all)", count - SHOWN));
    }
}
