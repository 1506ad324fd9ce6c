//! `varve cache mkstore`: measures the devices, chooses the parameters, and makes the store.

use super::args::MkstoreArgs;
use super::index_json;
use super::model::AWAY;
use crate::exit::Usage;
use crate::out;
use anyhow::Context;
use serde_json::json;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;
use varve_cache::aside::IndexPlace;
use varve_cache::device::{Device, FileDevice};
use varve_cache::measure::{ReadSpeed, choose_set_bytes, prepare, random_reads};
use varve_cache::model::{Disk, Load, object_bits, seeks};
use varve_cache::store::Superblock;
use varve_cache::{Cache, Policy, Shape, StoreError, StorePlan};
use varve_kernelfs::pool::size::show;

/// Bytes of random data that a file is filled with for the measurement.
const NOISE_BYTES: u64 = 64 << 20;
const EACH: Duration = Duration::from_millis(300);
/// Policies, fastest first: the first one that fits in memory is taken.
const BY_SPEED: [Policy; 5] = [
    Policy::LogPrefetch,
    Policy::LogLruPrefetch,
    Policy::SetMem,
    Policy::SetMemLru,
    Policy::Set,
];

/// Makes the store; prints its parameters and expected performance.
pub fn mkstore(args: &MkstoreArgs) -> anyhow::Result<()> {
    let mut devices = Vec::new();
    for path in &args.devices {
        let is_block = std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device());
        let device = match args.disk {
            _ if is_block => FileDevice::open(path)?,
            Some(bytes) => FileDevice::create(path, bytes)?,
            None if path.exists() => FileDevice::open(path)?,
            None => {
                return Err(Usage(format!(
                    "{} is not there: give the file's size by --disk",
                    path.display()
                ))
                .into());
            }
        };
        if !args.force && Superblock::read(&device).is_ok() {
            return Err(StoreError::StoreExists {
                device: device.name(),
            }
            .into());
        }
        if !args.force && is_block && !starts_with_zeros(&device)? {
            let name = path.display();
            return Err(Usage(format!(
                "{name} does not begin with zeros: it may hold something; --force overwrites it"
            ))
            .into());
        }
        devices.push((path.as_path(), is_block, device));
    }
    let speeds = match (args.no_measure, devices.first()) {
        (false, Some((path, is_block, device))) => measure(path, *is_block, device)?,
        _ => Vec::new(),
    };
    let bytes: u64 = devices.iter().map(|(_, _, device)| device.len_bytes()).sum();
    let plan = plan(args, &speeds, bytes)?;
    let refs: Vec<&dyn Device> = devices
        .iter()
        .map(|(_, _, device)| device as &dyn Device)
        .collect();
    let made = Cache::format(&refs, &plan, args.force)?;
    report(args, &speeds, &plan, &made, bytes);
    Ok(())
}

fn starts_with_zeros(device: &dyn Device) -> anyhow::Result<bool> {
    let mut first = vec![0; 64 << 10];
    let len = first.len().min(device.len_bytes() as usize);
    device.read_at(0, &mut first[..len])?;
    Ok(first.iter().all(|&byte| byte == 0))
}

fn measure(path: &Path, is_block: bool, device: &FileDevice) -> anyhow::Result<Vec<ReadSpeed>> {
    let _progress = out::Progress::start("measuring random reads");
    let mut within = device.len_bytes();
    if !is_block {
        within = within.min(NOISE_BYTES);
        prepare(device, within)
            .with_context(|| format!("{} could not be filled for the measurement", path.display()))?;
    }
    Ok(random_reads(device, within, EACH)?)
}

/// Chooses the parameters of the store: the fastest policy that fits in memory, and sets as large as the
/// device reads at once.
fn plan(args: &MkstoreArgs, speeds: &[ReadSpeed], bytes: u64) -> anyhow::Result<StorePlan> {
    let disk = Disk {
        bytes,
        seeks_per_s: 1.0,
        object_bytes: args.object,
    };
    let needs = |policy, share| disk.index_bytes(Shape::new(policy), share);
    let ram = args.ram as f64;
    let fits = |policy: &Policy| match policy {
        // With less than a twentieth of its sets in memory it is no better than `set`.
        Policy::SetMemLru => needs(*policy, 0.05) <= ram,
        policy => needs(*policy, 1.0) <= ram,
    };
    let policy = args
        .policy
        .or_else(|| BY_SPEED.into_iter().find(fits))
        .unwrap_or(Policy::Set);
    let mut plan = StorePlan::new(policy);
    plan.object_bytes = args.object;
    plan.aside = !args.no_pin;
    if !speeds.is_empty() {
        let ways = plan.shape.ways().max(8);
        plan.block_bytes = (choose_set_bytes(speeds) / ways) as u32;
    }
    if policy == Policy::SetMemLru {
        let one = needs(policy, 0.1) / 0.1;
        plan.resident_share = if one > 0.0 {
            (ram / one).clamp(0.001, 1.0)
        } else {
            1.0
        };
    }
    let needed = needs(policy, plan.resident_share);
    if needed > ram {
        let (policy, needed) = (policy.name(), show(needed as u64));
        return Err(Usage(format!(
            "the index of {policy} takes {needed}, --ram gives {}: give more, or let the policy be chosen",
            show(args.ram)
        ))
        .into());
    }
    Ok(plan)
}

fn report(args: &MkstoreArgs, speeds: &[ReadSpeed], plan: &StorePlan, made: &[Superblock], bytes: u64) {
    let shape = plan.shape;
    let seeks_per_s = speeds
        .iter()
        .find(|speed| speed.bytes >= plan.block_bytes as usize)
        .map(|speed| speed.per_s);
    let bits = object_bits(shape, plan.resident_share);
    let objects: u64 = made.iter().map(|layout| layout.sets * shape.ways() as u64).sum();
    let index = objects as f64 * bits / 8.0;
    let devices = args.devices.iter().zip(made);
    let places: Vec<IndexPlace> = devices
        .filter_map(|(at, layout)| IndexPlace::of(at, layout))
        .collect();
    // What is left on disk costs no seek where it is on NVM.
    let is_near = !places.is_empty() && places.iter().all(|place| place.pinned.is_on_nvm());
    let (resident, away) = match is_near {
        true => (1.0, 0.0),
        false => (plan.resident_share, AWAY),
    };
    let cost = seeks(shape, &Load::POLYMIX, resident, away);
    let rate = seeks_per_s.map(|t| Load::POLYMIX.requests_per_s(shape.policy(), t) * made.len() as f64);
    if args.json {
        let speeds: Vec<_> = speeds
            .iter()
            .map(|speed| json!({ "bytes": speed.bytes, "reads_per_s": speed.per_s, "latency_ms": speed.latency_ms }))
            .collect();
        let text = json!({
            "devices": args.devices.iter().map(|path| out::path(path)).collect::<Vec<_>>(), "bytes": bytes, "policy": shape.policy().name(), "ways": shape.ways(),
            "block_bytes": plan.block_bytes, "objects": objects, "bits": bits, "index_bytes": index,
            "hit_seeks": cost.hit, "miss_seeks": cost.miss, "write_seeks": cost.write,
            "requests_per_s": rate, "measured": speeds,
            "index_files": places.iter().map(index_json).collect::<Vec<_>>(),
        });
        return out::line(&format!("{text:#}"));
    }
    if !speeds.is_empty() {
        out::line(&format!("{:>9} {:>12} {:>10}", "read", "reads/s", "ms/read"));
        for speed in speeds {
            out::line(&format!(
                "{:>9} {:>12.0} {:>10.3}",
                show(speed.bytes as u64),
                speed.per_s,
                speed.latency_ms
            ));
        }
    }
    out::line(&format!(
        "made a store of {} on {} device(s): policy {}, sets of {} blocks of {}",
        show(bytes),
        made.len(),
        shape.policy(),
        shape.ways(),
        show(plan.block_bytes.into())
    ));
    out::line(&format!(
        "  room for {objects} objects; index {bits:.2} bits an object, {} in memory",
        show(index as u64)
    ));
    out::line(&format!(
        "  seeks: {:.2} a hit, {:.2} a miss, {:.2} a write",
        cost.hit, cost.miss, cost.write
    ));
    for place in &places {
        out::line(&format!("  index on disk: {place}"));
    }
    if let Some(rate) = rate {
        out::line(&format!(
            "  expected at 60 % hits: {rate:.0} requests/s, before hot objects in memory"
        ));
    }
}
