//! The command line.

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  A site, cached on a file of 10 GiB that is made at the first start:

    $ cat proxy.toml
    [store]
    devices = [\"/var/cache/varve/http.store\"]
    create_bytes = \"10G\"
    [[listen]]
    address = \"0.0.0.0:8080\"
    [[site]]
    hosts = [\"*\"]
    origins = [\"http://10.0.0.1:8000\", \"http://10.0.0.2:8000\"]
    health_path = \"/\"
    [admin]
    socket = \"/run/varve-cache-proxy/admin.sock\"

    $ varve-cache-proxy check --config proxy.toml
    $ varve-cache-proxy serve --config proxy.toml
    $ varve-cache-proxy status --socket /run/varve-cache-proxy/admin.sock
    $ varve-cache-proxy purge --socket /run/varve-cache-proxy/admin.sock --prefix http://example.org/news/

  An office's forward proxy: programs use http_proxy=http://proxy:3128. What passes as HTTPS is tunnelled
  and not cached; only client and server can read it:

    [[listen]]
    address = \"192.168.1.1:3128\"
    mode = \"forward\"
    [forward]
    clients = [\"192.168.1.0/24\"]
    ports = [80]
    connect_ports = [443]

Signals:
  TERM, INT  accepts no more, lets requests end (limits.drain_timeout_ms), closes the store
  HUP        reads the configuration anew, without dropping a connection; opens the access log anew.
             Keys that need a new start (store, listen addresses, admin, log) are told and refused.

Exit status: 0 after an orderly end; 1 if something is wrong, told on the standard error.";

/// An HTTP caching proxy over a HashCache store: terabytes of cache with an index of megabytes.
///
/// As a reverse proxy it stands before sites, as a forward proxy before people. It keeps to RFC 9111: Vary,
/// validation, stale-while-revalidate, stale-if-error, ranges, one fetch for many that wait. Objects outlive
/// restarts and kill -9. It needs no privileges.
#[derive(Debug, Parser)]
#[command(name = "varve-cache-proxy", version, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serves, until a signal ends it.
    #[command(after_long_help = EXAMPLES)]
    Serve(ConfigArgs),
    /// Says whether a configuration is right, without serving it.
    Check(CheckArgs),
    /// Shows what a proxy that runs has done.
    Status(StatusArgs),
    /// Removes what is stored: a URL, a tag, a host, a prefix of URLs, or everything.
    ///
    /// It costs the same whatever it covers, and is durable when the command ends.
    Purge(PurgeArgs),
    /// Prints the metrics as Prometheus reads them.
    Metrics(SocketArgs),
    /// Makes a proxy that runs read its configuration anew, as HUP does, and says what came of it.
    Reload(SocketArgs),
}

/// Where the configuration is.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// The configuration file (TOML).
    #[arg(long, short, value_name = "FILE")]
    pub config: PathBuf,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The configuration.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

/// Where the proxy is.
#[derive(Debug, Args)]
pub struct SocketArgs {
    /// The administration socket of the proxy (admin.socket).
    #[arg(long, short, value_name = "PATH")]
    pub socket: PathBuf,
}

/// Arguments of `status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// The proxy.
    #[command(flatten)]
    pub at: SocketArgs,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `purge`.
#[derive(Debug, Args)]
pub struct PurgeArgs {
    /// The proxy.
    #[command(flatten)]
    pub at: SocketArgs,
    /// The scope to remove.
    #[command(flatten)]
    pub what: What,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

/// The scope of a purge, exactly one.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct What {
    /// A URL, with all its variants.
    #[arg(long, value_name = "URL")]
    pub key: Option<String>,
    /// Responses whose Cache-Tag or Surrogate-Key names it.
    #[arg(long)]
    pub tag: Option<String>,
    /// A host, with its port unless that is 80 or 443.
    #[arg(long)]
    pub host: Option<String>,
    /// All URLs that begin so.
    #[arg(long, value_name = "URL")]
    pub prefix: Option<String>,
    /// Everything.
    #[arg(long)]
    pub everything: bool,
}
