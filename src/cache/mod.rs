//! `varve cache`: the cache store of `varve-cache` from the command line. Stands alone: no pool, no daemon.

pub mod args;
mod make;
mod model;
mod objects;
mod proxy;

use crate::out;
use args::CacheCommand;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use varve_cache::aside::IndexPlace;
use varve_cache::device::pool::Pinned;
use varve_cache::device::{Device, FileDevice};
use varve_cache::store::{Inspection, inspect};
use varve_cache::{Cache, Options};
use varve_kernelfs::pool::size::show;

/// Runs a command of `varve cache`.
pub fn run(command: CacheCommand) -> anyhow::Result<ExitCode> {
    let done = |()| ExitCode::SUCCESS;
    match command {
        CacheCommand::Model(args) => {
            model::model(&args);
            Ok(ExitCode::SUCCESS)
        }
        CacheCommand::Mkstore(args) => make::mkstore(&args).map(done),
        CacheCommand::Status(args) => status(&args.devices, args.json).map(done),
        CacheCommand::Put(args) => objects::put(&args).map(done),
        CacheCommand::Get(args) => objects::get(&args).map(done),
        CacheCommand::Purge(args) => objects::purge(&args).map(done),
        CacheCommand::Check(args) => objects::check(&args.devices, args.json),
        CacheCommand::Serve(args) => proxy::run("serve", &args.arguments),
        CacheCommand::Top(args) => proxy::run("top", &args.arguments),
        CacheCommand::Warm(args) => proxy::run("warm", &args.arguments),
    }
}

/// Opens the cache on these devices.
fn open(paths: &[PathBuf]) -> anyhow::Result<Cache> {
    let device = |path: &PathBuf| FileDevice::open(path).map(|device| Arc::new(device) as Arc<dyn Device>);
    let devices = paths.iter().map(device).collect::<Result<Vec<_>, _>>()?;
    let (cache, opened) = Cache::open(devices, &Options::default(), false)?;
    if opened.iter().any(|opened| opened.gave_up) {
        crate::out::note(
            "varve: older objects of this store were given up: its journal or index was damaged",
        );
    }
    Ok(cache)
}

fn look(path: &Path) -> anyhow::Result<Inspection> {
    Ok(inspect(&FileDevice::open_read_only(path)?)?)
}

fn status(paths: &[PathBuf], as_json: bool) -> anyhow::Result<()> {
    let mut stores = Vec::new();
    for path in paths {
        let found = look(path)?;
        let (layout, opened) = (&found.layout, &found.opened);
        let shape = layout.shape();
        let room = layout.sets * shape.ways() as u64;
        let laps = found.log_head as f64 / layout.lap_units() as f64;
        let place = IndexPlace::of(path, layout);
        if as_json {
            stores.push(json!({
                "device": out::path(path), "cache": format!("{:016x}", layout.cache_id), "number": layout.device,
                "devices": layout.device_count, "policy": shape.policy().name(), "ways": shape.ways(),
                "positions": shape.positions(), "block_bytes": layout.block_bytes,
                "segment_bytes": layout.segment_bytes, "table_bytes": layout.table.len,
                "log_bytes": layout.log.len,
                "objects": found.objects, "room": room, "log_laps": laps, "index_bytes": found.index_bytes,
                "purges": found.purges, "opened": layout.epoch - 1, "clean": opened.clean,
                "journal_pages": opened.journal_pages, "damaged_pages": opened.damaged_pages,
                "index_file": place.as_ref().map(index_json),
            }));
            continue;
        }
        out::line(&format!(
            "{}: cache {:016x}, device {} of {}",
            path.display(),
            layout.cache_id,
            layout.device + 1,
            layout.device_count
        ));
        out::line(&format!(
            "  policy    {}, sets of {} blocks of {}; index {} in memory",
            shape.policy(),
            shape.ways(),
            show(layout.block_bytes.into()),
            show(found.index_bytes)
        ));
        out::line(&format!(
            "  space     {} Disk Table, {} log, {} full",
            show(layout.table.len),
            show(layout.log.len),
            laps_text(laps)
        ));
        if let Some(place) = place {
            out::line(&format!("  index     on disk: {place}"));
        }
        let known = shape.policy().has_index() && found.index_bytes > 0 && layout.checkpoint[0].pages() > 0;
        let objects = if known && shape.policy() != varve_cache::Policy::SetMemLru {
            format!("{} of {room}", found.objects)
        } else {
            format!("room for {room}; this policy counts none")
        };
        out::line(&format!(
            "  objects   {objects}; {} purges in force",
            found.purges
        ));
        let stop = match opened.clean {
            true => "closed",
            false => "open, or not closed: it will be recovered",
        };
        out::line(&format!(
            "  state     {stop}; {} journal pages, {} damaged index pages",
            opened.journal_pages, opened.damaged_pages
        ));
    }
    if as_json {
        out::line(&format!("{:#}", json!({ "stores": stores })));
    }
    Ok(())
}

/// Where what a policy leaves on disk lies, for scripts.
fn index_json(place: &IndexPlace) -> serde_json::Value {
    let pin = match &place.pinned {
        Pinned::To(tier) => Some(tier.clone()),
        Pinned::NotPermitted => Some("not permitted".into()),
        Pinned::NoPool => None,
    };
    json!({ "path": place.file.as_deref().map(out::path), "pin": pin, "note": place.to_string() })
}

fn laps_text(laps: f64) -> String {
    if laps < 1.0 {
        format!("{:.1} %", laps * 100.0)
    } else {
        format!("{laps:.2} times")
    }
}
