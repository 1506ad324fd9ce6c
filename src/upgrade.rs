//! `varve upgrade`: converts a stopped pool of an older format version to this program's.

use crate::cli::UpgradeArgs;
use crate::out;
use crate::pool::Pool;
use anyhow::bail;
use serde_json::json;
use varve_format::superblock::FORMAT_VERSION;
use varve_kernelfs::pool::explain;
use varve_store::Store;

/// `varve upgrade`.
pub fn upgrade(args: &UpgradeArgs) -> anyhow::Result<()> {
    let pool = Pool::open(&args.pool)?;
    let host = pool.host();
    let dir = pool.dir().display();
    if pool.has_daemon() {
        bail!("a daemon serves {dir}: `varve down {dir}` first");
    }
    let _lock = host.lock()?;
    let from = if args.check {
        Store::format_of(&host.devices_for_looking()?).map(|(version, _)| version)
    } else {
        Store::upgrade(&host.devices()?)
    };
    let from = from.map_err(|error| explain(host, error))?;
    let is_older = from < FORMAT_VERSION;
    if args.json {
        let done = json!({
            "pool": out::path(pool.dir()),
            "found_version": from,
            "version": if args.check { from } else { FORMAT_VERSION },
            "newest_version": FORMAT_VERSION,
        });
        out::line(&format!("{done:#}"));
        return Ok(());
    }
    out::line(&match (is_older, args.check) {
        (true, true) => format!(
            "{dir} is a pool of format version {from}; `varve upgrade {dir}` makes it one of version \
            {FORMAT_VERSION}"
        ),
        (true, false) => {
            format!("{dir} was a pool of format version {from} and is one of version {FORMAT_VERSION}")
        }
        (false, _) => format!("{dir} is a pool of format version {FORMAT_VERSION}: nothing to do"),
    });
    Ok(())
}
