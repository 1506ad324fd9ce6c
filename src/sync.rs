//! `varve sync`: makes the completed operations of all programs on a pool durable. The mounts' kernels write
//! back changes in mapped memory; the daemon does the rest.

use crate::cli::SyncArgs;
use crate::out;
use crate::pool::Pool;
use anyhow::{Context, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;
use varve_ipc::Admin;
use varve_libfs::mounts::pool_mounts;

/// How long a mount's kernel may take to write back changes in mapped memory.
const MOUNT_LIMIT: Duration = Duration::from_secs(30);

/// `varve sync`.
pub fn sync(args: &SyncArgs) -> anyhow::Result<()> {
    let pool = Pool::open(&args.pool)?;
    pool.require_daemon()?;
    let json = {
        let _progress = out::Progress::start("making everything durable");
        for mount in mounts_of(pool.dir())? {
            write_mapped(&mount)?;
        }
        pool.ask(Admin::Sync).context("not everything is durable")?
    };
    let synced: Value = serde_json::from_str(&json).context("the daemon's answer is not JSON")?;
    if args.json {
        out::line(&format!("{synced:#}"));
    } else {
        out::line(&format!(
            "everything that {} sessions did is in the pool ({})",
            synced["sessions"].as_u64().unwrap_or(0),
            pool.durability()
        ));
    }
    Ok(())
}

/// Returns the mounts of the pool that this process sees.
fn mounts_of(pool: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let table = std::fs::read("/proc/self/mountinfo").context("cannot read the table of mounts")?;
    let mounts = pool_mounts(&table).into_iter();
    Ok(mounts
        .filter(|mount| mount.pool == pool)
        .map(|mount| mount.at)
        .collect())
}

/// Makes a mount's kernel write back changes in mapped memory.
fn write_mapped(mount: &Path) -> anyhow::Result<()> {
    let (done, ended) = std::sync::mpsc::channel();
    let at = mount.to_owned();
    // A mount with a stopped process never answers, and the call cannot be interrupted.
    std::thread::spawn(move || {
        let synced = std::fs::File::open(&at).and_then(|root| Ok(rustix::fs::syncfs(root)?));
        let _ = done.send(synced);
    });
    match ended.recv_timeout(MOUNT_LIMIT) {
        Ok(synced) => synced.with_context(|| format!("{} could not be synced", mount.display())),
        Err(_) => bail!(
            "the mount at {} did not answer within {MOUNT_LIMIT:?}; what programs changed in memory mapped \
            there is not durable",
            mount.display()
        ),
    }
}
