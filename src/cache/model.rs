//! `varve cache model`.

use super::args::ModelArgs;
use crate::out;
use serde_json::json;
use varve_cache::model::{Disk, Load, object_bits, seeks};
use varve_cache::{Policy, Shape};
use varve_kernelfs::pool::size::show;

/// Share of the hits of `log-lru` that need a second read because the position is on disk. Half of the
/// objects have theirs in memory, and those are the most recently used.
pub(super) const AWAY: f64 = 0.1;

/// Prints Tables 2.3 and 2.4 for a disk.
pub fn model(args: &ModelArgs) {
    let disk = Disk {
        bytes: args.disk,
        seeks_per_s: args.seeks,
        object_bytes: args.object,
    };
    let load = Load {
        hit_rate: args.hits,
        cacheable_rate: args.cacheable,
        related: args.related,
        alone: args.alone,
        long: args.long,
    };
    let mut rows = Vec::new();
    if !args.json {
        let objects = disk.objects();
        out::line(&format!(
            "{} of objects of {}: {objects} objects; {} seeks/s; {:.0} % hits, {:.0} % of misses stored, \
             {} related objects a read\n",
            show(args.disk),
            show(args.object),
            args.seeks,
            args.hits * 100.0,
            args.cacheable * 100.0,
            args.related
        ));
        out::line(&format!(
            "{:<18} {:>6} {:>10} {:>6} {:>6} {:>6} {:>8} {:>8} {:>8}",
            "policy", "bits", "memory", "hit", "miss", "write", "req/s", "Tab. 2.4", "counted"
        ));
    }
    for policy in Policy::ALL {
        let shape = Shape::new(policy);
        let bits = object_bits(shape, args.resident);
        let bytes = disk.index_bytes(shape, args.resident);
        let cost = seeks(shape, &load, args.resident, AWAY);
        let rate = load.requests_per_s(policy, args.seeks);
        let printed = load.requests_per_s_printed(policy, args.seeks);
        let counted = args.seeks / load.seeks_a_request(shape, args.resident, AWAY);
        let fits = args.ram.is_none_or(|ram| bytes <= ram as f64);
        if args.json {
            rows.push(json!({
                "policy": policy.name(), "bits": bits, "index_bytes": bytes, "fits": fits,
                "hit_seeks": cost.hit, "miss_seeks": cost.miss, "write_seeks": cost.write,
                "requests_per_s": rate, "requests_per_s_table_2_4": printed,
                "requests_per_s_counted": counted,
            }));
        } else {
            out::line(&format!(
                "{policy:<18} {bits:>6.2} {:>10} {:>6.2} {:>6.2} {:>6.2} {rate:>8.0} {printed:>8.0} \
                 {counted:>8.0}{}",
                show(bytes as u64),
                cost.hit,
                cost.miss,
                cost.write,
                if fits { "" } else { "  more than --ram" }
            ));
        }
    }
    if args.json {
        out::line(&format!(
            "{:#}",
            json!({ "objects": disk.objects(), "policies": rows })
        ));
    }
}
