//! The commands.

use crate::cli::{Command, PurgeArgs, What};
use crate::{top, warm};
use anyhow::{Context, anyhow, bail};
use serde_json::{Value, json};
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_rustls::rustls::ServerConfig;
use varve_cache_proxy::access_log::AccessLog;
use varve_cache_proxy::admin::{self, Order};
use varve_cache_proxy::config::Config;
use varve_cache_proxy::metrics::Metrics;
use varve_cache_proxy::proxy::{Live, Proxy};
use varve_cache_proxy::server;
use varve_cache_proxy::storage::{Storage, open_cache};
use varve_cache_proxy::workers::Workers;

/// Runs a command.
pub fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Serve(args) => serve(&args.config),
        Command::Check(args) => check(&args.config.config, args.json),
        Command::Status(args) => status(&args.at.socket, args.json),
        Command::Top(args) => top::top(&args),
        Command::Warm(args) => warm::warm(&args),
        Command::Purge(args) => purge(&args),
        Command::Metrics(args) => print(&admin::ask(&args.socket, "GET", "/metrics", "")?),
        Command::Reload(args) => {
            admin::ask(&args.socket, "POST", "/reload", "")?;
            print("reloaded\n")
        }
    }
}

pub fn print(text: &str) -> anyhow::Result<()> {
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

fn check(path: &Path, as_json: bool) -> anyhow::Result<()> {
    let config = Config::load(path)?;
    for tls in config.listen.iter().filter_map(|listen| listen.tls.as_ref()) {
        server::read_tls(tls)?;
    }
    if as_json {
        return print(&format!(
            "{}\n",
            json!({"listen": config.listen.len(), "sites": config.site.len()})
        ));
    }
    let (listens, sites) = (config.listen.len(), config.site.len());
    print(&format!(
        "{}: right; {listens} address(es), {sites} site(s)\n",
        path.display()
    ))
}

fn status(socket: &Path, as_json: bool) -> anyhow::Result<()> {
    let text = admin::ask(socket, "GET", "/status", "")?;
    if as_json {
        return print(&format!("{text}\n"));
    }
    let status: Value = serde_json::from_str(&text).context("the proxy's answer is malformed")?;
    let requests = status["requests"].as_object().cloned().unwrap_or_default();
    let all: u64 = requests.values().filter_map(Value::as_u64).sum();
    let mut out = format!(
        "running for {} s, process {}; {} connections, {} requests wait\n",
        status["uptime_s"], status["pid"], status["connections"], status["waiting"]
    );
    out.push_str(&format!("  requests  {all}"));
    for (outcome, count) in requests.iter().filter(|(_, count)| count.as_u64() != Some(0)) {
        out.push_str(&format!("  {outcome} {count}"));
    }
    out.push_str(&format!(
        "\n  origins   {} requests, {} failed; {} stored, {} waited for another's fetch\n",
        status["origin_requests"], status["origin_errors"], status["stored"], status["collapsed"]
    ));
    for origin in status["origins"].as_array().into_iter().flatten() {
        let state = if origin["healthy"] == Value::Bool(true) {
            "healthy"
        } else {
            "fails"
        };
        out.push_str(&format!(
            "            {} {state}\n",
            origin["origin"].as_str().unwrap_or("?")
        ));
    }
    let store = &status["store"];
    out.push_str(&format!(
        "  store     {} lookups found, {} from memory, {} not; {} bytes written\n",
        store["hits"], store["memory_hits"], store["misses"], store["written_bytes"]
    ));
    print(&out)
}

fn purge(args: &PurgeArgs) -> anyhow::Result<()> {
    let What {
        key,
        tag,
        host,
        prefix,
        everything,
    } = &args.what;
    let order = match (key, tag, host, prefix, everything) {
        (Some(url), ..) => Order::Key(url.clone()),
        (_, Some(tag), ..) => Order::Tag(tag.clone()),
        (_, _, Some(host), ..) => Order::Host(host.clone()),
        (_, _, _, Some(prefix), _) => Order::Prefix(prefix.clone()),
        (.., true) => Order::Everything,
        _ => bail!("say what to purge: --key, --tag, --host, --prefix or --everything"),
    };
    let answer = admin::ask(&args.at.socket, "POST", "/purge", &serde_json::to_string(&order)?)?;
    print(
        if args.json {
            format!("{answer}\n")
        } else {
            "purged\n".to_owned()
        }
        .as_str(),
    )
}

fn serve(path: &Path) -> anyhow::Result<()> {
    let level = std::env::var("VARVE_LOG").unwrap_or_else(|_| "info".to_owned());
    let filter = tracing_subscriber::EnvFilter::try_new(&level)
        .context("VARVE_LOG is no filter; write info or debug")?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    let config = Config::load(path)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(serve_config(path, config));
    runtime.shutdown_timeout(Duration::from_secs(1));
    served
}

type Certificates = Vec<Option<watch::Sender<Arc<ServerConfig>>>>;

async fn serve_config(path: &Path, config: Config) -> anyhow::Result<()> {
    let mut hup = signal(SignalKind::hangup())?;
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    let store = config.store.clone();
    let cache = tokio::task::spawn_blocking(move || open_cache(&store)).await?;
    let cache = cache.with_context(|| format!("store.devices {:?}", config.store.devices))?;
    let workers = NonZeroUsize::new(config.store.workers).unwrap_or(NonZeroUsize::MIN);
    let storage = Storage::new(cache, workers, config.limits.in_flight_bytes.0);
    let metrics = Arc::new(Metrics::default());
    let log = AccessLog::start(config.log.access.clone(), Arc::clone(&metrics)).context("log.access")?;
    let (mut listeners, mut certificates) = (Vec::new(), Certificates::new());
    for listen in &config.listen {
        let (bound, sender) = server::bind(listen).await?;
        tracing::info!(address = %bound.address()?, mode = ?listen.mode, tls = listen.tls.is_some(), "listening");
        listeners.push(bound);
        certificates.push(sender);
    }
    let (reload, mut reloads) = mpsc::channel(1);
    let admin_socket = config.admin.socket.clone();
    let admin_bound = admin_socket.as_deref().map(admin::bind).transpose()?;
    let metrics_bound = match config.admin.metrics {
        Some(address) => Some(
            tokio::net::TcpListener::bind(address)
                .await
                .context("admin.metrics")?,
        ),
        None => None,
    };
    let proxy = Arc::new(Proxy::new(Live::new(config)?, storage, metrics, log));
    if let Some(socket) = admin_bound {
        tokio::spawn(admin::serve(Arc::clone(&proxy), socket, reload.clone()));
    }
    if let Some(socket) = metrics_bound {
        tokio::spawn(admin::serve_metrics(Arc::clone(&proxy), socket));
    }
    tokio::spawn(tick(Arc::clone(&proxy)));
    tokio::spawn(write_groups(Arc::clone(&proxy)));
    let (stop, stopped) = watch::channel(false);
    let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let workers = Arc::new(Workers::start(threads)?);
    let serving = server::serve(Arc::clone(&proxy), Arc::clone(&workers), listeners, stopped);
    let mut serving = tokio::spawn(serving);
    loop {
        tokio::select! {
            _ = hup.recv() => {
                if let Err(error) = reread(path, &proxy, &certificates) {
                    tracing::error!("not reloaded: {error:#}");
                }
            }
            Some(done) = reloads.recv() => {
                let done: oneshot::Sender<Result<(), String>> = done;
                let _ = done.send(reread(path, &proxy, &certificates).map_err(|error| format!("{error:#}")));
            }
            _ = term.recv() => break,
            _ = int.recv() => break,
            ended = &mut serving => return ended.map_err(Into::into),
        }
    }
    tracing::info!("stopping");
    let _ = stop.send(true);
    serving.await?;
    remove(admin_socket);
    proxy.storage.write_groups(Duration::ZERO, true).await;
    let cache = Arc::clone(proxy.storage.cache());
    let closed = tokio::task::spawn_blocking(move || cache.close()).await?;
    // Waits for the threads, so not on a thread of the runtime.
    tokio::task::spawn_blocking(move || drop(workers)).await?;
    Ok(closed?)
}

fn remove(socket: Option<PathBuf>) {
    if let Some(path) = socket {
        let _ = std::fs::remove_file(path);
    }
}

/// Writes the objects of pages that waited for each other long enough.
async fn write_groups(proxy: Arc<Proxy>) {
    let mut every = tokio::time::interval(Duration::from_millis(100));
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        let window = Duration::from_millis(proxy.live().config.cache.group_ms);
        proxy.storage.write_groups(window, false).await;
    }
}

/// Flushes devices whose interval is over, so that stored objects become durable also when no further ones
/// follow.
async fn tick(proxy: Arc<Proxy>) {
    let mut every = tokio::time::interval(Duration::from_secs(1));
    let mut failed = false;
    loop {
        every.tick().await;
        let cache = Arc::clone(proxy.storage.cache());
        let done = tokio::task::spawn_blocking(move || cache.tick()).await;
        if let (Ok(Err(error)), false) = (done, failed) {
            failed = true;
            tracing::error!(%error, "a device failed: the proxy goes on without it");
        }
    }
}

/// Reloads the configuration. If a key changed that is fixed while the proxy runs, reports it and changes
/// nothing.
fn reread(path: &Path, proxy: &Proxy, certificates: &Certificates) -> anyhow::Result<()> {
    let new = Config::load(path)?;
    let old = proxy.live();
    let old = &old.config;
    let addresses = |config: &Config| -> Vec<_> {
        config
            .listen
            .iter()
            .map(|listen| (listen.address, listen.mode, listen.tls.is_some()))
            .collect()
    };
    let fixed = [
        ("store", new.store == old.store),
        ("listen", addresses(&new) == addresses(old)),
        ("admin", new.admin == old.admin),
        ("log", new.log == old.log),
        (
            "limits.in_flight_bytes",
            new.limits.in_flight_bytes == old.limits.in_flight_bytes,
        ),
    ];
    if let Some((key, _)) = fixed.iter().find(|(_, same)| !same) {
        return Err(anyhow!(
            "{}: {key} cannot change while the proxy runs; start it anew, or undo the change",
            path.display()
        ));
    }
    let mut renewed = Vec::new();
    for (listen, sender) in new.listen.iter().zip(certificates) {
        if let (Some(tls), Some(sender)) = (&listen.tls, sender) {
            renewed.push((sender, Arc::new(server::read_tls(tls)?)));
        }
    }
    let live = Live::new(new)?;
    for (sender, tls) in renewed {
        let _ = sender.send(tls);
    }
    proxy.replace(live);
    tracing::info!("configuration read anew");
    Ok(())
}
