//! A client that is broken on purpose, and the proof that it is found. The library is the real one; the fault
//! is in the connection below it: of some of the leases that the daemon wants back, that connection says by
//! itself that they were given back, and never tells the library, which goes on using them. What was logged
//! until then is named rightly, so nothing is wrong but that.

use crate::run::Run;
use crate::ways::Way;
use crate::{report, seed};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use varve_format::LogSeq;
use varve_ipc::{Hello, IpcError, Link, ReleaseItem, Request, Response, Upcall};
use varve_libfs::{Connection, Connector, Fs, FsOptions, MountError, SocketConnector};

/// One in so many leases is kept.
const KEPT_ONE_IN: u64 = 8;
/// Runs until it is found, at most.
const RUNS_MAX: u64 = 4;
/// How long each takes.
const SECONDS: u64 = 3;

/// A mount whose leases do not all go back.
pub fn mount(socket: SocketConnector) -> Result<Fs, MountError> {
    let library = Arc::new(OnceLock::new());
    let connector = Broken {
        socket,
        library: Arc::clone(&library),
    };
    let fs = Fs::mount(Arc::new(connector), FsOptions::default())?;
    // The two refer to each other until the process ends.
    let _ = library.set(fs.clone());
    Ok(fs)
}

struct Broken {
    socket: SocketConnector,
    library: Arc<OnceLock<Fs>>,
}

impl Connector for Broken {
    fn connect(&self, hello: Hello) -> Result<Connection, IpcError> {
        let connection = self.socket.connect(hello)?;
        let link = BrokenLink {
            link: connection.link,
            library: Arc::clone(&self.library),
            before: logged(&self.library),
            wanted: AtomicU64::new(0),
        };
        Ok(Connection {
            link: Arc::new(link),
            ..connection
        })
    }

    fn pool_dir(&self) -> Option<PathBuf> {
        self.socket.pool_dir()
    }
}

/// Operations that all sessions of this mount have logged.
fn logged(library: &OnceLock<Fs>) -> u64 {
    library.get().map_or(0, |fs| fs.counters().logged)
}

struct BrokenLink {
    link: Arc<dyn Link>,
    library: Arc<OnceLock<Fs>>,
    /// What earlier sessions have logged.
    before: u64,
    /// Leases that were wanted back.
    wanted: AtomicU64,
}

impl Link for BrokenLink {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        self.link.call(request)
    }

    fn upcall(&self, timeout: Duration) -> Result<Option<Upcall>, IpcError> {
        let upcall = self.link.upcall(timeout)?;
        let Some(Upcall::Revoke { key, lease, .. }) = upcall else {
            return Ok(upcall);
        };
        let kept = self.wanted.fetch_add(1, Ordering::Relaxed) % KEPT_ONE_IN == KEPT_ONE_IN - 1;
        if !kept {
            return Ok(upcall);
        }
        let item = ReleaseItem {
            key,
            lease,
            downgrade: false,
            last_seq: LogSeq(logged(&self.library) - self.before),
            open: true,
            changes: u32::MAX,
            cached_ms: 0,
        };
        self.link.call(Request::Release { items: vec![item] })?;
        Ok(None)
    }

    fn close(&self) {
        self.link.close();
    }
}

#[test]
fn client_that_keeps_leases_it_gave_back_is_found() {
    let ways = [Way::Broken, Way::Linked, Way::Run];
    let first = seed();
    for seed in first..first + RUNS_MAX {
        let Some(mut run) = Run::start(&ways, seed) else {
            return;
        };
        run.go(SECONDS);
        let history = run.finish();
        let faults = history.faults();
        // An errno that cannot be would tell of a client that does not work, not of one that is wrong.
        let wrong: Vec<_> = faults
            .iter()
            .filter(|fault| !fault.what.starts_with("errno"))
            .filter(|fault| fault.proof.iter().any(|record| record.process == 0))
            .collect();
        println!(
            "VARVE_SEED={seed}: {} operations, {} faults, {} of them other than an errno and with the \
            broken client in their proof",
            history.records.len(),
            faults.len(),
            wrong.len()
        );
        if let Some(fault) = wrong.first() {
            return print!("{}", report::fault(fault, &ways));
        }
    }
    panic!("VARVE_SEED={first} and the {RUNS_MAX} seeds from there: nobody noticed the broken client");
}
