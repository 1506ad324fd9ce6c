//! `varve metrics`: the status in the text format of Prometheus, printed or served over HTTP. Formats a look
//! of `observe`.

use crate::cli::MetricsArgs;
use crate::observe::Look;
use crate::out;
use crate::pool::{NoDaemon, Pool};
use anyhow::Context;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use varve_kernelfs::placement::{Cause, DeviceFigures};
use varve_kernelfs::{JobStatus, TierDevice};
use varve_kernelfs::{MediumStatus, SessionStatus, TierStatus};

/// Time for a scraper to send its request and to read the answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest request head.
const HEAD_MAX: usize = 8 << 10;
const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// `varve metrics`.
pub fn metrics(args: &MetricsArgs) -> anyhow::Result<()> {
    let pool = Pool::open(&args.pool)?;
    let Some(address) = args.listen else {
        out::line(text(Some(&Look::at(&pool)?)).trim_end());
        return Ok(());
    };
    let listener = listen(address)?;
    out::line(&format!(
        "metrics on http://{}/metrics; Ctrl-C ends",
        listener.local_addr()?
    ));
    answer_all(&listener, &pool);
    Ok(())
}

/// Binds the address for the metrics.
pub fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).with_context(|| format!("no metrics on {address}"))
}

/// Serves metrics from a thread of this process.
pub fn serve_beside(listener: TcpListener, pool: &Pool) -> anyhow::Result<SocketAddr> {
    let bound = listener.local_addr()?;
    let pool = pool.clone();
    std::thread::Builder::new()
        .name("varve-metrics".into())
        .spawn(move || answer_all(&listener, &pool))?;
    Ok(bound)
}

fn answer_all(listener: &TcpListener, pool: &Pool) {
    for stream in listener.incoming() {
        match stream {
            Ok(stream) => {
                if let Err(error) = answer(stream, pool) {
                    tracing::debug!(%error, "a scraper went away");
                }
            }
            // Out of descriptors, or the like: do not retry at once.
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn answer(mut stream: TcpStream, pool: &Pool) -> std::io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let head = head(&mut stream)?;
    let mut words = head.split(|byte| *byte == b' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (status, body) = match (method, path) {
        (b"GET" | b"HEAD", b"/metrics" | b"/") => match Look::at(pool) {
            Ok(look) => ("200 OK", text(Some(&look))),
            // A stopped daemon is reported in the metrics; it is not a fault of the exporter.
            Err(error) if error.is::<NoDaemon>() => ("200 OK", text(None)),
            Err(error) => ("500 Internal Server Error", format!("{error:#}\n")),
        },
        (b"GET" | b"HEAD", _) => ("404 Not Found", "the metrics are at /metrics\n".into()),
        _ => ("405 Method Not Allowed", String::new()),
    };
    let kind = if status.starts_with("200") {
        KIND
    } else {
        "text/plain; charset=utf-8"
    };
    let length = body.len();
    let mut answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    if method != b"HEAD" {
        answer.push_str(&body);
    }
    stream.write_all(answer.as_bytes())
}

/// Reads the request up to the empty line, within a bound of bytes and time.
fn head(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let until = Instant::now() + PATIENCE;
    let mut head = Vec::new();
    let mut part = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < HEAD_MAX {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part)? {
            0 => break,
            got => head.extend_from_slice(&part[..got]),
        }
    }
    Ok(head)
}

type Labels = Vec<(String, String)>;
type Rows = Vec<(Labels, u64)>;

fn one(value: u64) -> Rows {
    vec![(Labels::new(), value)]
}

fn tagged(rows: &[(&str, u64)], label: &str) -> Rows {
    let row = |(tag, value): &(&str, u64)| (vec![(label.to_owned(), (*tag).to_owned())], *value);
    rows.iter().map(row).collect()
}

struct Page {
    registry: Registry,
}

impl Page {
    fn gauge(&mut self, name: &str, help: &str, rows: Rows) {
        // A family would print `name{}`.
        if let [(labels, value)] = &*rows
            && labels.is_empty()
        {
            let gauge = Gauge::<u64, AtomicU64>::default();
            gauge.set(*value);
            self.registry.register(name, help, gauge);
            return;
        }
        let family = Family::<Labels, Gauge<u64, AtomicU64>>::default();
        for (labels, value) in rows {
            family.get_or_create(&labels).set(value);
        }
        self.registry.register(name, help, family);
    }

    /// Adds a counter; the encoder appends `_total` to its name.
    fn counter(&mut self, name: &str, help: &str, rows: Rows) {
        if let [(labels, value)] = &*rows
            && labels.is_empty()
        {
            let counter: Counter = Counter::default();
            counter.inc_by(*value);
            self.registry.register(name, help, counter);
            return;
        }
        let family = Family::<Labels, Counter>::default();
        for (labels, value) in rows {
            family.get_or_create(&labels).inc_by(value);
        }
        self.registry.register(name, help, family);
    }
}

/// Formats a look in the text format of Prometheus (OpenMetrics); `None`: no daemon serves the pool.
fn text(look: Option<&Look>) -> String {
    let mut page = Page {
        registry: Registry::with_prefix("varve"),
    };
    page.gauge(
        "up",
        "Whether a daemon serves the pool",
        one(u64::from(look.is_some())),
    );
    if let Some(look) = look {
        pool_metrics(&mut page, look);
        tier_metrics(&mut page, look);
        access_metrics(&mut page, look);
        device_metrics(&mut page, look);
        medium_metrics(&mut page, look);
        session_metrics(&mut page, look);
        lease_metrics(&mut page, look);
    }
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = encode(&mut out, &page.registry);
    out
}

fn pool_metrics(page: &mut Page, look: &Look) {
    let status = &look.status;
    page.gauge(
        "uptime_milliseconds",
        "Since the daemon started",
        one(status.uptime_ms),
    );
    page.gauge(
        "latched",
        "1: the pool is read-only since a device failed",
        one(u64::from(status.latched.is_some())),
    );
    page.gauge(
        "journal_failed",
        "1: the journal's device failed",
        one(u64::from(status.journal_state != "ok")),
    );
    page.counter(
        "transactions",
        "Newest transaction of the journal",
        one(status.newest_tx),
    );
    page.gauge("inodes_used", "Inodes in use", one(status.inodes_used));
    page.gauge(
        "inodes_free",
        "Inodes that can still be made",
        one(status.inodes_free),
    );
    page.gauge(
        "reserved_blocks",
        "Blocks of 4 KiB reserved for sessions",
        one(status.reserved_blocks),
    );
    page.gauge("jobs", "Background jobs", one(status.jobs.len() as u64));
    page.gauge(
        "host_missing_bytes",
        "Bytes that the tiers could still take and the host does not have",
        look.json["host"]["missing_bytes"]
            .as_u64()
            .map_or_else(Rows::new, one),
    );
    page.counter(
        "metadata_blocks",
        "Blocks of metadata that went to slower tiers, came back to be changed, were read there",
        tagged(
            &[
                ("away", status.metadata.away),
                ("back", status.metadata.back),
                ("read", status.metadata.reads),
            ],
            "kind",
        ),
    );
    each_device_metrics(page, &status.devices);
    move_metrics(page, look);
    digest_metrics(page, look);
}

/// Adds what moves between tiers.
fn move_metrics(page: &mut Page, look: &Look) {
    let status = &look.status;
    let labels = |from: &str, to: &str, cause: Cause| -> Labels {
        let cause = format!("{cause:?}").to_lowercase();
        let labels = [("from", from), ("to", to), ("cause", &cause)];
        labels.map(|(name, value)| (name.into(), value.into())).into()
    };
    let jobs = status
        .placement
        .iter()
        .map(|job| (labels(&job.from, &job.to, job.cause), job.moved_blocks));
    page.gauge(
        "job_moved_blocks",
        "Of the jobs that move data between tiers: blocks of 4 KiB moved between the two for this cause since \
        the daemon started",
        jobs.collect(),
    );
    job_metrics(page, &status.operator_jobs);
    let moved = status
        .moved
        .iter()
        .map(|moved| (labels(&moved.from, &moved.to, moved.cause), moved.blocks));
    page.counter(
        "moved_blocks",
        "Blocks of 4 KiB moved between tiers since the daemon started, by cause",
        moved.collect(),
    );
}

/// Adds the devices of SSD and HDD.
fn each_device_metrics(page: &mut Page, devices: &[TierDevice]) {
    let labels = |device: &TierDevice, more: &[(&str, &str)]| -> Labels {
        let uuid = device.uuid.as_deref().unwrap_or("");
        let own = [
            ("tier", device.tier.as_str()),
            ("device", &device.name),
            ("uuid", uuid),
        ];
        let all = own.iter().chain(more);
        all.map(|(name, value)| ((*name).into(), (*value).into()))
            .collect()
    };
    let of = |value: &dyn Fn(&TierDevice) -> u64| -> Vec<_> {
        let each = devices.iter();
        each.map(|device| (labels(device, &[]), value(device))).collect()
    };
    let state = |device: &TierDevice| (labels(device, &[("state", &device.state)]), 1);
    page.gauge(
        "device",
        "Devices of SSD and HDD with their state: in use, emptying or failed",
        devices.iter().map(state).collect(),
    );
    page.gauge(
        "device_capacity_bytes",
        "Bytes that a device can hold",
        of(&|device| device.capacity_bytes),
    );
    page.gauge(
        "device_used_bytes",
        "Bytes in use on a device",
        of(&|device| device.used_bytes),
    );
    page.gauge(
        "device_pending_bytes",
        "Bytes of a device that were freed and may still be read",
        of(&|device| device.pending_bytes),
    );
}

/// Adds the jobs of operators.
fn job_metrics(page: &mut Page, jobs: &[JobStatus]) {
    let labels = |job: &JobStatus, more: &[(&str, &str)]| -> Labels {
        let id = job.id.to_string();
        let own = [("job", id.as_str()), ("kind", &job.kind), ("tier", &job.tier)];
        let device = job.device.as_deref().map(|device| ("device", device));
        let all = own.iter().chain(&device).chain(more);
        all.map(|(name, value)| ((*name).into(), (*value).into()))
            .collect()
    };
    let of = |value: &dyn Fn(&JobStatus) -> Option<u64>| -> Vec<_> {
        let some = jobs
            .iter()
            .filter_map(|job| Some((labels(job, &[]), value(job)?)));
        some.collect()
    };
    let state = |job: &JobStatus| (labels(job, &[("state", job.state.name())]), 1);
    page.gauge(
        "operator_job",
        "Jobs of operators, with their states",
        jobs.iter().map(state).collect(),
    );
    page.gauge(
        "operator_job_moved_bytes",
        "Bytes of data that a job has moved since it was started, over restarts of the daemon",
        of(&|job| Some(job.moved_bytes)),
    );
    page.gauge(
        "operator_job_moved_metadata_bytes",
        "Bytes of metadata that a job has moved since the daemon started",
        of(&|job| Some(job.moved_metadata_bytes)),
    );
    page.gauge(
        "operator_job_left_bytes",
        "Bytes in use on the tier or the device of a job",
        of(&|job| Some(job.left_bytes)),
    );
    page.gauge(
        "operator_job_bytes_per_second",
        "Bytes of data that a job moves a second; absent while not known",
        of(&|job| job.bytes_per_s),
    );
    page.gauge(
        "operator_job_limit_bytes_per_second",
        "Most bytes that a job may move a second; absent without a limit",
        of(&|job| job.limit_bytes_per_s),
    );
    page.gauge(
        "operator_job_eta_seconds",
        "Estimated time until a job is done; absent while not known",
        of(&|job| job.eta_s),
    );
    let stays = jobs.iter().flat_map(|job| {
        let one = |(reason, bytes): (&String, &u64)| (labels(job, &[("reason", reason)]), *bytes);
        job.stays.iter().map(one).collect::<Vec<_>>()
    });
    page.gauge(
        "operator_job_stays_bytes",
        "Bytes that do not move, by reason",
        stays.collect(),
    );
}

fn digest_metrics(page: &mut Page, look: &Look) {
    let digest = &look.status.digest;
    page.counter("digest_batches", "Batches digested", one(digest.batches));
    page.counter("digest_operations", "Operations digested", one(digest.operations));
    page.counter(
        "digest_refused",
        "Operations refused by the digest",
        one(digest.refused),
    );
    page.counter(
        "digest_bytes",
        "Bytes of file data: logged, written by the digest, dropped before",
        tagged(
            &[
                ("logged", digest.bytes_in),
                ("written", digest.bytes_out),
                ("dropped", digest.dropped_bytes),
            ],
            "kind",
        ),
    );
    page.counter(
        "digest_merged_writes",
        "Writes merged with a neighbour",
        one(digest.merged),
    );
    page.counter(
        "digest_vanished_inodes",
        "Short-lived files elided: made and deleted before they were written",
        one(digest.vanished),
    );
}

/// A row for each tier.
fn of_tiers(look: &Look, value: impl Fn(&TierStatus) -> u64) -> Rows {
    let tiers = look.status.tiers.iter();
    tiers
        .map(|tier| (vec![("tier".to_owned(), tier.tier.clone())], value(tier)))
        .collect()
}

fn tier_metrics(page: &mut Page, look: &Look) {
    let of = |value: &dyn Fn(&TierStatus) -> u64| of_tiers(look, value);
    page.gauge(
        "tier_capacity_bytes",
        "Capacity of a tier",
        of(&|t| t.capacity_bytes),
    );
    page.gauge("tier_used_bytes", "In use of a tier", of(&|t| t.used_bytes));
    page.gauge(
        "tier_pending_bytes",
        "Freed, but not to be used again yet",
        of(&|t| t.pending_bytes),
    );
    page.gauge(
        "tier_failed",
        "1: the tier's device failed",
        of(&|t| u64::from(t.state != "ok")),
    );
    page.counter("tier_read_bytes", "Read by the daemon", of(&|t| t.read_bytes));
    page.counter(
        "tier_written_bytes",
        "Written by the daemon",
        of(&|t| t.written_bytes),
    );
    page.counter(
        "tier_moved_in_bytes",
        "Moved here from other tiers",
        of(&|t| t.moved_in_bytes),
    );
    page.counter(
        "tier_moved_out_bytes",
        "Moved away to other tiers",
        of(&|t| t.moved_out_bytes),
    );
}

/// Adds the accesses that placement has counted.
fn access_metrics(page: &mut Page, look: &Look) {
    let mut accesses = Rows::new();
    for tier in &look.status.tiers {
        for (op, count) in [("read", tier.accesses.reads), ("write", tier.accesses.writes)] {
            let labels = [("tier", tier.tier.as_str()), ("op", op)];
            accesses.push((
                labels.map(|(name, value)| (name.into(), value.into())).into(),
                count,
            ));
        }
    }
    page.counter(
        "tier_accesses",
        "Accesses to a tier's data that placement has counted, each to 64 KiB of a file",
        accesses,
    );
}

/// Adds the measured speed of the tiers' devices.
fn device_metrics(page: &mut Page, look: &Look) {
    let [mut all, mut by_size, mut service, mut samples] = [const { Rows::new() }; 4];
    for tier in &look.status.tiers {
        for (op, figures) in [("read", &tier.figures.read), ("write", &tier.figures.write)] {
            let labels = [("tier", tier.tier.as_str()), ("op", op)];
            let labels: Labels = labels.map(|(name, value)| (name.into(), value.into())).into();
            all.extend(figures.response_ns.map(|ns| (labels.clone(), ns)));
            service.push((labels.clone(), figures.service_ns));
            samples.push((labels.clone(), figures.samples));
            for size in &figures.by_size {
                let up_to = size.up_to_bytes.map_or("+Inf".into(), |bytes| bytes.to_string());
                let labels = [&labels[..], &[("up_to_bytes".into(), up_to)]].concat();
                by_size.push((labels, size.response_ns));
            }
        }
    }
    page.gauge(
        "tier_response_nanoseconds",
        "Average time of a request of the daemon; left out before the first",
        all,
    );
    page.gauge(
        "tier_response_by_size_nanoseconds",
        "The same by size, for sizes that were measured",
        by_size,
    );
    page.gauge(
        "tier_service_nanoseconds",
        "Learned work of a request of 4 KiB, without its wait for others",
        service,
    );
    page.counter("tier_requests_measured", "Requests that were measured", samples);
    let of = |value: &dyn Fn(&DeviceFigures) -> u64| of_tiers(look, |tier| value(&tier.figures));
    page.gauge(
        "tier_requests_in_flight_thousandths",
        "Average number of requests under way, in thousandths",
        of(&|figures| figures.depth_thousandths),
    );
    page.gauge(
        "tier_requests_in_flight",
        "Requests under way at the moment",
        of(&|figures| figures.queue.into()),
    );
    page.gauge(
        "tier_requests_per_second",
        "Average number of requests of the daemon",
        of(&|figures| figures.requests_per_s),
    );
    page.gauge(
        "tier_busy_thousandths",
        "Average share of time that the device is at work, in thousandths",
        of(&|figures| figures.busy_thousandths),
    );
    page.gauge(
        "tier_throughput_bytes_per_second",
        "Average throughput of the daemon's requests",
        of(&|figures| figures.bytes_per_s),
    );
}

/// Adds the faults of tiers, journal and logs.
fn medium_metrics(page: &mut Page, look: &Look) {
    let status = &look.status;
    type Count = fn(&MediumStatus) -> u64;
    let kinds: [(&str, Count); 5] = [
        ("read", |m| m.read_errors),
        ("write", |m| m.write_errors),
        ("checksum", |m| m.checksum_errors),
        ("no_space", |m| m.no_space),
        ("slow", |m| m.slow),
    ];
    let mut rows = Rows::new();
    for medium in &status.media {
        for (kind, count) in kinds {
            let labels = vec![
                ("medium".to_owned(), medium.medium.clone()),
                ("kind".to_owned(), kind.to_owned()),
            ];
            rows.push((labels, count(medium)));
        }
    }
    page.counter(
        "medium_errors",
        "What went wrong with a medium: reads and writes that failed, damaged bytes, no space, transfers of \
        a second or longer",
        rows,
    );
    let longest = status.media.iter();
    page.gauge(
        "medium_longest_transfer_milliseconds",
        "The longest transfer since the daemon started",
        longest
            .map(|m| (vec![("medium".to_owned(), m.medium.clone())], m.longest_ms))
            .collect(),
    );
    page.counter(
        "logs_with_trouble",
        "Logs that could not be written or read, and logs with a damaged end",
        tagged(
            &[("failed", status.logs.failed), ("damaged", status.logs.damaged)],
            "kind",
        ),
    );
    let passes = [
        ("structures", status.checks.structures),
        ("data", status.checks.data),
    ];
    let ended: Vec<_> = passes
        .iter()
        .filter_map(|(what, pass)| Some((*what, (*pass)?)))
        .collect();
    let rows = |f: fn(&varve_store::Pass) -> u64| {
        let rows: Vec<_> = ended.iter().map(|(what, pass)| (*what, f(pass))).collect();
        tagged(&rows, "what")
    };
    page.gauge(
        "check_findings",
        "What the last fsck (structures) and scrub (data) of the served pool found; left out before the \
        first",
        rows(|pass| pass.findings),
    );
    page.gauge(
        "check_time_seconds",
        "When they ended, in seconds since 1970",
        rows(|pass| pass.ended_ns.max(0) as u64 / 1_000_000_000),
    );
}

fn session_metrics(page: &mut Page, look: &Look) {
    let sessions = &look.status.sessions;
    page.gauge("sessions", "Sessions at the moment", one(sessions.len() as u64));
    page.gauge(
        "sessions_ended",
        "Sealed sessions whose client may come back",
        one(look.status.ended_sessions),
    );
    let labels = |session: &SessionStatus| {
        let program = look.programs.get(&session.pid).cloned().unwrap_or_default();
        vec![
            ("session".to_owned(), session.id.to_string()),
            ("pid".to_owned(), session.pid.to_string()),
            ("uid".to_owned(), session.uid.to_string()),
            ("kind".to_owned(), session.kind.clone()),
            ("program".to_owned(), program),
        ]
    };
    let of = |f: &dyn Fn(&SessionStatus) -> u64| -> Rows {
        sessions
            .iter()
            .map(|session| (labels(session), f(session)))
            .collect()
    };
    page.gauge(
        "session_log_bytes",
        "Length of a session's log",
        of(&|s| s.log_bytes),
    );
    let filled = sessions
        .iter()
        .filter_map(|s| Some((labels(s), s.log_used_bytes?)));
    page.gauge(
        "session_log_used_bytes",
        "Of them, what is not digested yet; left out while it is being digested",
        filled.collect(),
    );
    page.counter(
        "session_digested_entries",
        "Entries of its log that are digested",
        of(&|s| s.digested),
    );
    page.gauge("session_leases", "Leases of a session", of(&|s| s.leases));
    page.gauge(
        "session_leases_asked_back",
        "Leases that it was asked to give back and has not",
        of(&|s| s.asked_back),
    );
    page.gauge(
        "session_waits",
        "Its requests that wait for leases",
        of(&|s| s.waits),
    );
    page.gauge(
        "session_held_inodes",
        "Inodes that it keeps alive",
        of(&|s| s.holds),
    );
    page.gauge(
        "session_credits_blocks",
        "Blocks of 4 KiB reserved for it",
        of(&|s| s.credits),
    );
}

fn lease_metrics(page: &mut Page, look: &Look) {
    let leases = &look.status.leases;
    page.counter("requests", "Requests of sessions", one(leases.requests));
    page.counter("lease_grants", "Lease requests granted", one(leases.grants));
    page.counter("lease_waits", "Of them, after a wait", one(leases.waits));
    page.counter(
        "mediated_operations",
        "Operations done by the daemon because sessions contended",
        one(leases.mediated),
    );
    page.counter("sessions_sealed", "Sessions sealed", one(leases.seals));
    page.gauge(
        "lease_rows",
        "Durable write grants at the moment",
        one(leases.rows),
    );
    page.gauge(
        "inodes_contended",
        "Inodes that sessions take from each other for little: the daemon makes their changes at the moment",
        one(leases.contended),
    );
    let waiting = &look.status.waiting;
    page.gauge(
        "leases_waited_for",
        "Inodes that requests wait for",
        one(waiting.len() as u64),
    );
    page.gauge(
        "lease_longest_wait_milliseconds",
        "How long the oldest of these requests has waited",
        one(waiting.iter().map(|wait| wait.waited_ms).max().unwrap_or(0)),
    );
    let mut pairs: std::collections::BTreeMap<(u64, u64), u64> = std::collections::BTreeMap::new();
    for wait in waiting {
        for holder in &wait.holders {
            *pairs.entry((wait.session, holder.session)).or_default() += 1;
        }
    }
    let pair = |((waiter, holder), inodes): ((u64, u64), u64)| {
        let labels = vec![
            ("waiter".to_owned(), waiter.to_string()),
            ("holder".to_owned(), holder.to_string()),
        ];
        (labels, inodes)
    };
    page.gauge(
        "lease_waits_for",
        "Inodes for which session `waiter` waits for session `holder` (0: the daemon)",
        pairs.into_iter().map(pair).collect(),
    );
}

#[cfg(test)]
mod tests {
    use super::text;
    use crate::observe::{Look, example};
    use serde_json::{Value, json};

    /// Numbers of the status that are not exported as values: identities, which are labels where they matter,
    /// and positions in queues, which are for people.
    const NO_MEASURE: [&str; 5] = [
        "/pid",
        "/operator_jobs/0/started_ns",
        "/waiting/0/inode",
        "/waiting/0/before",
        "/waiting/0/holders/0/asked_ms",
    ];

    /// Gives each number of the status a distinct value and collects their paths.
    fn number(value: &mut Value, path: &str, next: &mut u64, numbers: &mut Vec<(String, u64)>) {
        match value {
            Value::Number(_) => {
                *next += 1;
                *value = json!(*next);
                numbers.push((path.to_owned(), *next));
            }
            Value::Array(items) => {
                for (n, item) in items.iter_mut().enumerate() {
                    number(item, &format!("{path}/{n}"), next, numbers);
                }
            }
            Value::Object(fields) => {
                for (name, field) in fields {
                    number(field, &format!("{path}/{name}"), next, numbers);
                }
            }
            _ => {}
        }
    }

    #[test]
    fn metrics_are_the_numbers_of_the_status() {
        let mut status = serde_json::to_value(&example().status).unwrap_or_else(|error| panic!("{error}"));
        status["placement"] =
            json!([{ "from": "nvm", "to": "ssd", "cause": "full", "moved_blocks": 1, "waiting": null }]);
        status["moved"] = json!([{ "from": "hdd", "to": "nvm", "cause": "hot", "blocks": 1 }]);
        status["operator_jobs"] = json!([{
            "id": 0, "kind": "evacuate", "tier": "ssd", "state": "running", "moved_bytes": 1,
            "moved_metadata_bytes": 1, "left_bytes": 1, "limit_bytes_per_s": 1, "bytes_per_s": 1, "eta_s": 1,
            "started_ns": 0, "stays": { "waiting: hdd 97 % full": 1 },
        }]);
        status["sessions"][1]["log_used_bytes"] = json!(1);
        status["waiting"][0]["holders"][0]["session"] = json!(0);
        let (mut next, mut numbers) = (7_000_000, Vec::new());
        number(&mut status, "", &mut next, &mut numbers);
        let look = Look {
            json: status.clone(),
            status: serde_json::from_value(status).unwrap_or_else(|error| panic!("{error}")),
            programs: std::collections::BTreeMap::new(),
        };
        let text = text(Some(&look));
        let missing: Vec<_> = numbers
            .iter()
            .filter(|(path, _)| !NO_MEASURE.iter().any(|no| path.starts_with(no)))
            .filter(|(_, value)| !text.contains(&value.to_string()))
            .collect();
        assert!(numbers.len() > 60, "{numbers:?}");
        assert!(missing.is_empty(), "no metric of {missing:?} in\n{text}");
    }

    #[test]
    fn every_number_of_the_status_is_a_metric() {
        let text = text(Some(&example()));
        for wanted in [
            "varve_up 1\n",
            "varve_uptime_milliseconds 60000\n",
            "varve_latched 0\n",
            "varve_digest_operations_total 100\n",
            "varve_digest_bytes_total{kind=\"dropped\"} 524288\n",
            "varve_tier_used_bytes{tier=\"nvm\"} 268435456\n",
            "varve_tier_moved_out_bytes_total{tier=\"nvm\"} 8192\n",
            "varve_session_log_used_bytes{session=\"4\",pid=\"1\",uid=\"0\",kind=\"shim\",program=\"redis\"} 1048576\n",
            "varve_session_waits{session=\"5\"",
            "varve_medium_errors_total{medium=\"ssd\",kind=\"checksum\"} 0\n",
            "varve_medium_longest_transfer_milliseconds{medium=\"journal\"} 12\n",
            "varve_logs_with_trouble_total{kind=\"failed\"} 0\n",
            "varve_lease_waits_for{waiter=\"5\",holder=\"4\"} 1\n",
            "varve_lease_longest_wait_milliseconds 120\n",
        ] {
            assert!(text.contains(wanted), "{wanted} in\n{text}");
        }
        // The fill of a log is unknown while it is digested.
        assert!(!text.contains("varve_session_log_used_bytes{session=\"5\""));
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn daemon_that_is_away_is_a_metric_too() {
        let text = text(None);
        assert!(
            text.contains("varve_up 0\n") && !text.contains("varve_tier"),
            "{text}"
        );
    }
}
