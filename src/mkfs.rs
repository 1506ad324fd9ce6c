//! `varve mkfs`.

use crate::cli::MkfsArgs;
use crate::out;
use crate::pool::Pool;
use serde_json::json;
use std::path::PathBuf;
use varve_kernelfs::pool::{TierSpec, uuid_text};

/// Returns the location of a tier: its path, or the name of a device that has no path.
fn place(spec: &TierSpec, path: Option<PathBuf>) -> Option<String> {
    match (spec, path) {
        (_, Some(path)) => Some(path.to_string_lossy().into_owned()),
        (TierSpec::Device(device), None) => Some(device.to_string()),
        _ => None,
    }
}

/// Makes a pool and prints its parameters.
pub fn mkfs(args: &MkfsArgs) -> anyhow::Result<()> {
    let (pool, text) = Pool::create(&args.dir, &args.tiers)?;
    crate::destroy::tell(&pool);
    if args.json {
        let host = pool.host();
        let nvm = &host.spec().nvm;
        let further = host.spec().more.iter();
        let more: Vec<_> = further
            .map(|(tier, device)| json!({ "tier": tier.name(), "device": device.to_string() }))
            .collect();
        let made = json!({
            "directory": out::path(host.dir()),
            "uuid": uuid_text(&host.uuid()),
            "nvm": {
                "path": out::path(&host.nvm_path()),
                "bytes": nvm.bytes(),
                "memory_only": nvm.is_memory(),
                "dax": nvm.is_dax(),
            },
            "ssd": place(&host.spec().ssd, host.ssd_path()),
            "hdd": place(&host.spec().hdd, host.hdd_path()),
            "more": more,
            "journal": out::path(&host.journal_path()),
            "durability": host.durability(),
        });
        out::line(&format!("{made:#}"));
    } else {
        out::line(&text);
        out::line(&format!("next: varve up {}", args.dir.display()));
    }
    Ok(())
}
