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
    $ varve-cache-proxy top --socket /run/varve-cache-proxy/admin.sock
    $ varve-cache-proxy warm --socket /run/varve-cache-proxy/admin.sock --list urls.txt
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
    /// Shows what a proxy does, a second at a time: requests by how they were answered, bytes, store.
    Top(TopArgs),
    /// Fetches URLs through a proxy that runs, so that clients find them stored.
    ///
    /// They are asked for as its clients would: of a site if one has the host, else as the forward proxy does.
    Warm(WarmArgs),
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

/// Arguments of `top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// The proxy.
    #[command(flatten)]
    pub at: SocketArgs,
    /// Seconds between two looks, 0.1 to 3600.
    #[arg(long, short, default_value_t = 1.0, value_parser = interval)]
    pub interval: f64,
    /// Ends after so many looks; without it, at Ctrl-C.
    #[arg(long, short = 'n', value_name = "LOOKS")]
    pub count: Option<u64>,
    /// Prints a line of JSON a look.
    #[arg(long)]
    pub json: bool,
}

fn interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds from 0.1 to 3600".to_owned()),
    }
}

/// Arguments of `warm`.
#[derive(Debug, Args)]
pub struct WarmArgs {
    /// The proxy.
    #[command(flatten)]
    pub at: SocketArgs,
    /// Whole URLs.
    #[arg(value_name = "URL", required_unless_present = "list")]
    pub urls: Vec<String>,
    /// A file with a URL a line; `-` is the standard input. Empty lines and those with # are left out.
    #[arg(long, value_name = "FILE")]
    pub list: Option<PathBuf>,
    /// A request field, `Name: value`: what clients send that responses vary by. May be given several times.
    #[arg(long = "field", short = 'H', value_name = "FIELD")]
    pub fields: Vec<String>,
    /// URLs at once, 1 to 64.
    #[arg(long, short, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub jobs: u8,
    /// Prints a line of JSON a URL.
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
    /// A URL, with all its variants, in both modes; with cache.key_headers, whatever values those fields have.
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
