//! `varve status` and `varve digest`: the daemon's answer, as a table or as JSON.

use crate::cli::PoolJsonArgs;
use crate::observe::Look;
use crate::out;
use crate::pool::Pool;
use anyhow::Context;
use serde_json::Value;
use std::fmt::Write;
use varve_ipc::Admin;
use varve_kernelfs::pool::size::show;
use varve_kernelfs::{Status, TierDevice};

/// `varve status`.
pub fn status(args: &PoolJsonArgs) -> anyhow::Result<()> {
    let pool = Pool::open(&args.pool)?;
    let Look {
        json: mut value,
        status,
        ..
    } = Look::at(&pool)?;
    if args.json {
        add_up(&pool, &mut value);
        value["orphans"] = crate::destroy::list(&crate::destroy::beside(&pool));
        out::line(&format!("{value:#}"));
        return Ok(());
    }
    out::line(table(&pool, &status, &value["host"]).trim_end());
    if let Some(remark) = crate::destroy::remark(&crate::destroy::beside(&pool)) {
        out::line(&format!("orphans  {remark}"));
    }
    Ok(())
}

/// Adds the fields that `up` knows and the daemon does not.
fn add_up(pool: &Pool, value: &mut Value) {
    if let Value::Object(map) = value {
        let up = std::fs::read_to_string(pool.up_pid())
            .ok()
            .and_then(|text| text.trim().parse::<u32>().ok());
        map.insert("up_pid".into(), up.into());
        let shims = map.get("sessions").and_then(Value::as_array).map(|sessions| {
            sessions
                .iter()
                .filter(|session| session["kind"] == "shim")
                .map(|s| s["pid"].clone())
                .collect()
        });
        map.insert("shim_pids".into(), Value::Array(shims.unwrap_or_default()));
        let mountpoint = pool.mountpoint();
        let mounted = crate::mounted::is_mounted(&mountpoint).then_some(mountpoint);
        map.insert(
            "mountpoint".into(),
            serde_json::json!(mounted.as_deref().map(crate::out::path)),
        );
    }
}

fn table(pool: &Pool, status: &Status, host: &Value) -> String {
    let mut text = String::new();
    put_pool(&mut text, pool, status, host);
    put_tiers(&mut text, pool, status);
    put_sessions(&mut text, status);
    put_work(&mut text, status);
    text
}

/// Prints the pool, its daemon, and the location of its logs.
fn put_pool(text: &mut String, pool: &Pool, status: &Status, host: &Value) {
    let mut put = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    put(format!(
        "pool     {}  (daemon pid {})",
        pool.dir().display(),
        status.pid
    ));
    if crate::mounted::is_mounted(&pool.mountpoint()) {
        put(format!("mounted  {}", pool.mountpoint().display()));
    }
    put(format!("lasting  {}", pool.durability()));
    if let Some(reason) = &status.latched {
        put(format!("READ-ONLY since an error: {reason}"));
    }
    let live = &host["recovered_logs"];
    put(format!(
        "live     {}  (logs found at the start: {} in memory, {} on disk, {} refused)",
        host["live_directory"].as_str().unwrap_or("-"),
        live["live"],
        live["backing"],
        live["ignored"]
    ));
    for remark in host["remarks"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
    {
        put(format!("note     {remark}"));
    }
}

/// The devices of tiers that have several.
fn several(devices: &[TierDevice]) -> impl Iterator<Item = &TierDevice> {
    let of = |tier: &str| devices.iter().filter(|device| device.tier == tier).count();
    devices.iter().filter(move |device| of(&device.tier) > 1)
}

/// A device in one line.
fn device_line(device: &TierDevice) -> String {
    let percent = device.used_bytes * 100 / device.capacity_bytes.max(1);
    let mut text = format!(
        "device   {} {:<8} {:>11} {:>11} {percent:>4}%   {}",
        device.tier,
        device.state,
        show(device.capacity_bytes),
        show(device.used_bytes),
        device.name
    );
    if let Some(uuid) = &device.uuid {
        let _ = write!(text, " ({uuid})");
    }
    if let Some(why) = &device.why {
        let _ = write!(text, ": {why}");
    }
    text
}

/// Prints the tiers, their faults and their contents.
fn put_tiers(text: &mut String, pool: &Pool, status: &Status) {
    let mut put = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    put(String::new());
    put("tier     capacity        used   use        read     written   device".into());
    for tier in &status.tiers {
        let percent = tier.used_bytes * 100 / tier.capacity_bytes.max(1);
        put(format!(
            "{:<5} {:>11} {:>11} {percent:>4}% {:>11} {:>11}   {}",
            tier.tier,
            show(tier.capacity_bytes),
            show(tier.used_bytes),
            show(tier.read_bytes),
            show(tier.written_bytes),
            tier.device
        ));
    }
    for device in several(&status.devices) {
        put(device_line(device));
    }
    for tier in status.tiers.iter().filter(|tier| tier.evacuated) {
        put(format!(
            "note     {} is evacuated: new data goes to other tiers",
            tier.tier
        ));
    }
    for tier in status.tiers.iter().filter(|tier| tier.state != "ok") {
        put(format!("FAILED   {}: {}", tier.tier, tier.state));
    }
    if status.journal_state != "ok" {
        put(format!("FAILED   journal: {}", status.journal_state));
    }
    crate::health::lines(pool.dir(), status)
        .into_iter()
        .for_each(&mut put);
    put(format!(
        "inodes   {} in use, {} free; transaction {}",
        status.inodes_used, status.inodes_free, status.newest_tx
    ));
    let metadata = &status.metadata;
    if metadata.away + metadata.back + metadata.reads > 0 {
        put(format!(
            "metadata {} blocks went to slower tiers, {} came back, {} were read there",
            metadata.away, metadata.back, metadata.reads
        ));
    }
}

/// Prints a line for each session.
fn put_sessions(text: &mut String, status: &Status) {
    let mut put = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    put(String::new());
    if status.sessions.is_empty() {
        put("sessions none".into());
    } else {
        put("session      pid    uid  kind    state          log  full  digested to   leases".into());
    }
    for session in &status.sessions {
        put(format!(
            "{:<7} {:>8} {:>6}  {:<7} {:<9} {:>8} {:>5} {:>12} {:>8}{}",
            session.id,
            session.pid,
            session.uid,
            session.kind,
            session.state,
            show(session.log_bytes),
            // The fill of a log is unknown while it is digested.
            session.log_used_bytes.map_or("…".into(), |used| {
                format!("{}%", used * 100 / session.log_bytes.max(1))
            }),
            session.digested,
            session.leases,
            if session.read_only { "  read-only" } else { "" }
        ));
    }
}

/// Prints the digest and lease counters, and work in progress.
fn put_work(text: &mut String, status: &Status) {
    let mut put = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    let digest = &status.digest;
    put(String::new());
    put(format!(
        "digest   {} operations in {} batches ({} refused, {} writes merged, {} short-lived files elided)",
        digest.operations, digest.batches, digest.refused, digest.merged, digest.vanished
    ));
    put(format!(
        "         {} logged, {} written, {} dropped",
        show(digest.bytes_in),
        show(digest.bytes_out),
        show(digest.dropped_bytes)
    ));
    let leases = &status.leases;
    put(format!(
        "leases   {} granted, {} after a wait; {} operations done by the daemon, {} sessions sealed",
        leases.grants, leases.waits, leases.mediated, leases.seals
    ));
    for job in &status.operator_jobs {
        crate::jobs::text(job)
            .lines()
            .for_each(|line| put(line.to_owned()));
    }
    for job in &status.jobs {
        put(format!("job      {job}"));
    }
}

/// `varve digest`.
pub fn digest(args: &PoolJsonArgs) -> anyhow::Result<()> {
    let pool = Pool::open(&args.pool)?;
    pool.require_daemon()?;
    let json = {
        let _progress = out::Progress::start("digesting");
        pool.ask(Admin::DigestAll)?
    };
    let value: Value = serde_json::from_str(&json).context("the daemon's answer is not JSON")?;
    if args.json {
        out::line(&format!("{value:#}"));
    } else {
        out::line(&format!(
            "everything logged is digested ({} operations since the daemon started)",
            value["operations"].as_u64().unwrap_or(0)
        ));
    }
    Ok(())
}
