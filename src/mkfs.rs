//! `varve mkfs`.

use crate::cli::MkfsArgs;
use crate::out;
use crate::pool::{Pool, spec};
use serde_json::json;
use varve_kernelfs::host::uuid_text;

/// Makes a pool and says what was made.
pub fn mkfs(args: &MkfsArgs) -> anyhow::Result<()> {
    let spec = spec(&args.tiers)?;
    let pool = Pool::create(&args.dir, &spec)?;
    if args.json {
        let host = pool.host();
        let made = json!({
            "directory": host.dir(),
            "uuid": uuid_text(&host.uuid()),
            "nvm": { "path": host.nvm_path(), "bytes": spec.nvm.bytes(), "memory_only": spec.nvm.is_memory() },
            "ssd": host.ssd_path(),
            "hdd": host.hdd_path(),
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
