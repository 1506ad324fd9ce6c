//! `varve dedup plan`.

use super::args::PlanArgs;
use super::{percent, show, weigh_text};
use crate::out;
use serde_json::json;
use std::sync::Arc;
use varve_similarity::manifest::Manifest;
use varve_similarity::plan::{self, Bound, Item, Plan};
use varve_similarity::tree::ImageId;

/// Prints the placement of images and the savings over a random one.
pub fn plan(args: &PlanArgs) -> anyhow::Result<()> {
    let mut manifest = Manifest::read(&args.manifest)?;
    if let Some(weigh) = args.weigh {
        manifest.weigh = weigh.weigh();
    }
    let order = manifest.tree().in_order();
    let items: Vec<Item> = order
        .iter()
        .filter_map(|id| {
            let view = manifest.get(*id)?.profile.sketches.view(manifest.weigh);
            Some(Item {
                id: *id,
                bytes: view.parts.iter().map(|part| part.weight()).sum(),
                view: Arc::new(view),
            })
        })
        .collect();
    let (plan, group) = match (args.waves, args.hosts, args.memory) {
        (Some(waves), ..) => (plan::waves(&items, waves)?, "wave"),
        (None, Some(hosts), Some(memory)) => {
            (plan::plan(&items, hosts, Bound::Bytes(memory as f64))?, "host")
        }
        _ => return Err(crate::exit::Usage("give --hosts and --memory, or --waves".into()).into()),
    };
    let names = |group: &[ImageId]| -> Vec<&str> {
        let listed = group.iter().filter_map(|id| manifest.get(*id));
        listed.map(|listed| listed.profile.name.as_str()).collect()
    };
    if args.json {
        let groups: Vec<_> = plan
            .groups
            .iter()
            .zip(&plan.held)
            .map(|(group, held)| json!({ "images": names(group), "held": held }))
            .collect();
        let value = json!({
            "kind": group,
            "weigh": weigh_text(manifest.weigh),
            "groups": groups,
            "saved_bytes": plan.saved,
            "random": plan.random,
            "round_robin_saved_bytes": plan.round_robin,
        });
        out::line(&format!("{value:#}"));
        return Ok(());
    }
    for (n, (images, held)) in plan.groups.iter().zip(&plan.held).enumerate() {
        out::line(&format!(
            "{group} {}: {} images, {} apart, {} together",
            n + 1,
            images.len(),
            show(held.apart),
            show(held.together),
        ));
        names(images)
            .iter()
            .for_each(|name| out::line(&format!("  {name}")));
    }
    tell_savings(&plan);
    Ok(())
}

fn tell_savings(plan: &Plan) {
    let apart: f64 = plan.held.iter().map(|held| held.apart).sum();
    out::line(&format!(
        "saved: {} of {} ({:.1} %)",
        show(plan.saved),
        show(apart),
        percent(plan.saved, apart),
    ));
    let random = &plan.random;
    if random.plans > 0 {
        out::line(&format!(
            "by chance: {} (from {} to {} in {} random plans)",
            show(random.mean),
            show(random.least),
            show(random.most),
            random.plans,
        ));
    } else {
        out::line("by chance: no random plan found room for all");
    }
    if let Some(saved) = plan.round_robin {
        out::line(&format!("in turn: {}", show(saved)));
    }
}
