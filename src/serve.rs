//! `varve serve`: the daemon in the foreground.

use crate::cli::ServeArgs;
use crate::out;
use crate::pool::Pool;
use crate::signals::Stop;
use anyhow::Context;
use std::time::Duration;
use varve_kernelfs::pool::HostDaemon;

/// Time between checks for signals.
const TICK: Duration = Duration::from_millis(20);
/// Longest time of the last digest. Entries not digested by then stay in the logs for the next start.
const STOP_LIMIT: Duration = Duration::from_secs(90);

/// Serves until a signal or an operator's request ends it.
pub fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    if args.supervised {
        crate::supervise::follow_parent()?;
    }
    // To be called before there are threads.
    varve_media::sys::bound_arenas();
    let stop = Stop::install()?;
    let pool = Pool::open(&args.pool)?;
    // Before the pool is touched: if the address is taken, the operator has to change it.
    let listener = args.metrics.map(crate::metrics::listen).transpose()?;
    if !args.supervised {
        // A daemon that is started again goes on without them.
        pool.host().rules()?;
    }
    let daemon = HostDaemon::start(pool.host())?;
    let recovered = daemon.recovered();
    let report = daemon.report();
    tracing::info!(
        replayed = report.replayed,
        live_logs = recovered.live,
        backing_logs = recovered.backing,
        "serving {}",
        pool.dir().display()
    );
    if recovered.backing > 0 {
        tracing::warn!(
            "{} logs were taken from disk, since their copies in memory are gone (a power cut or reboot): \
            what was fsynced is there",
            recovered.backing
        );
    }
    if let Some(listener) = listener {
        let bound = crate::metrics::serve_beside(listener, &pool)?;
        if !args.supervised {
            out::line(&format!("metrics on http://{bound}/metrics"));
        }
    }
    if !args.supervised {
        out::line(&format!(
            "serving {} ({})",
            pool.dir().display(),
            pool.durability()
        ));
        out::line(&format!(
            "mount it with `varve mount {} DIR`; Ctrl-C ends",
            pool.dir().display()
        ));
    }
    while stop.count() == 0 && !daemon.shutdown_asked() {
        std::thread::sleep(TICK);
    }
    std::thread::Builder::new().name("stop-limit".into()).spawn(|| {
        std::thread::sleep(STOP_LIMIT);
        crate::out::note(
            "varve: the last digest takes too long; ending now, the next start goes on from the logs",
        );
        std::process::exit(1);
    })?;
    daemon.stop().context(
        "a device failed, so not everything was digested; what is missing stays in the logs for \
            the next start",
    )
}
