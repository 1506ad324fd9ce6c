//! `varve mkfs`.

use crate::cli::MkfsArgs;
use crate::out;
use crate::pool::{Pool, spec};
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
    let spec = spec(&args.tiers)?;
    let pool = Pool::create(&args.dir, &spec)?;
    crate::destroy::tell(&pool);
    if args.json {
        let host = pool.host();
        let made = json!({
            "directory": host.dir(),
            "uuid": uuid_text(&host.uuid()),
            "nvm": {
                "path": host.nvm_path(),
                "bytes": spec.nvm.bytes(),
                "memory_only": spec.nvm.is_memory(),
            },
            "ssd": place(&host.spec().ssd, host.ssd_path()),
            "hdd": place(&host.spec().hdd, host.hdd_path()),
            "journal": host.journal_path(),
            "durability": host.durability(),
        });
        out::line(&format!("{made:#}"));
    } else {
        out::line(&pool.made_text());
        out::line(&format!("next: varve up {}", args.dir.display()));
    }
    Ok(())
}
