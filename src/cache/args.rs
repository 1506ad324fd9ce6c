//! Options and help of `varve cache`. No behaviour.

use clap::{Args, Subcommand};
use std::path::PathBuf;
use varve_cache::Policy;
use varve_kernelfs::pool::size;

/// The commands of `varve cache`.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Print what each index policy costs in memory and brings in requests a second on a disk
    Model(ModelArgs),
    /// Make a cache store on files or block devices
    Mkstore(MkstoreArgs),
    /// Show what a store is and how full
    Status(StoreArgs),
    /// Put a file or standard input into a store
    Put(PutArgs),
    /// Write an object of a store to standard output
    Get(GetArgs),
    /// Remove objects by key, tag, host or prefix, or all
    Purge(PurgeArgs),
    /// Read every object of a store to its last byte
    Check(StoreArgs),
    /// Serve a store as an HTTP proxy: runs `varve-cache-proxy serve`
    Serve(ProxyArgs),
    /// Show what an HTTP proxy does: runs `varve-cache-proxy top`
    Top(ProxyArgs),
    /// Fetch URLs into an HTTP proxy's store: runs `varve-cache-proxy warm`
    Warm(ProxyArgs),
}

/// Arguments that are passed on to `varve-cache-proxy`.
#[derive(Debug, Args)]
#[command(
    disable_help_flag = true,
    after_help = "The proxy is a program of its own, beside this one or in PATH; `varve-cache-proxy --help`
describes it."
)]
pub struct ProxyArgs {
    /// Arguments of `varve-cache-proxy`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<std::ffi::OsString>,
}

/// Arguments of `cache model`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve cache model --disk 1T                             a disk of 78 seeks a second, as the thesis has it
  varve cache model --disk 4T --seeks 120 --ram 1G        which policies fit in 1 GiB
  varve cache model --disk 60G --hits 0.6 --related 2 --json

Columns: bits an object and memory for the whole disk; seeks for a hit, a miss and a write (Table
2.3 of the HashCache thesis, with the false matches of 8 bits of hash counted); requests/s by the
thesis's text, by its Table 2.4 as printed, which for the policies with a log contradicts its own
Table 2.7, and with every seek counted: of hits, misses, writes, and of long objects, whose rest a
policy with a Disk Table reads by itself. --related, --alone and --long are of your load. The hot objects in memory are not counted, so
these are lower bounds.")]
pub struct ModelArgs {
    /// Size of the disk, for example 1T
    #[arg(long, value_name = "SIZE", default_value = "1T", value_parser = size::parse)]
    pub disk: u64,
    /// Memory for the index; policies that need more are marked
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub ram: Option<u64>,
    /// Random reads a second of the disk
    #[arg(long, value_name = "PER_SECOND", default_value_t = 78.0, value_parser = positive)]
    pub seeks: f64,
    /// Mean size of an object
    #[arg(long, value_name = "SIZE", default_value = "8K", value_parser = size::parse)]
    pub object: u64,
    /// Share of requests that are hits, above 0 and at most 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.6, value_parser = share)]
    pub hits: f64,
    /// Share of missed objects that may be stored, above 0 and at most 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.75, value_parser = share)]
    pub cacheable: f64,
    /// Related objects that one read brings, at least 1
    #[arg(long, value_name = "N", default_value_t = 2.0, value_parser = at_least_one)]
    pub related: f64,
    /// Share of the hits on objects that are not with their relatives: written again alone, for a validation
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = part)]
    pub alone: f64,
    /// Share of the objects that are longer than a block
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = part)]
    pub long: f64,
    /// Share of its sets that set-mem-lru keeps in memory
    #[arg(long, value_name = "SHARE", default_value_t = 0.3, value_parser = share)]
    pub resident: f64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `cache mkstore`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve cache mkstore /var/cache/varve.store --disk 100G --ram 512M
  varve cache mkstore /dev/sdb /dev/sdc --ram 2G          two whole disks; keys are spread over them
  varve cache mkstore ./store --disk 1G --policy log-lru --no-measure --json

The devices are measured first (random reads of 4 to 128 KiB, about two seconds each; a file is
filled with up to 64 MiB of noise for it): from that come block and set size, and the expected
requests/s. The policy is the fastest one whose index fits into --ram, unless --policy names one.
A device that holds a store already is refused without --force. Files are sparse: the file system
behind them may run out of space, which turns the store off until it is opened again.

On a pool set-mem-lru and the log-lru policies have a small file beside each device, NAME.index,
for what they do not keep in memory. It is pinned to the pool's NVM, if this user may do that, and
belongs to the store: copy and remove both together.")]
pub struct MkstoreArgs {
    /// Files or block devices of the store, at most 16
    #[arg(required = true, num_args = 1..=16)]
    pub devices: Vec<PathBuf>,
    /// Size of each file; block devices are used whole
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub disk: Option<u64>,
    /// Memory that the index may take
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = size::parse)]
    pub ram: u64,
    /// basic, set, set-mem, set-mem-lru, log, log-lru, log-lru-prefetch or log-prefetch
    #[arg(long)]
    pub policy: Option<Policy>,
    /// Mean size of an object: how many the index has room for
    #[arg(long, value_name = "SIZE", default_value = "8K", value_parser = size::parse)]
    pub object: u64,
    /// On a pool: leave what the policy has of its index on disk within the store, not in a file pinned to
    /// NVM
    #[arg(long)]
    pub no_pin: bool,
    /// Do not measure: blocks of 8 KiB, sets of 64 KiB
    #[arg(long)]
    pub no_measure: bool,
    /// Make a new store over an old one; all it holds is lost
    #[arg(long)]
    pub force: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Devices of a store, and how to print.
#[derive(Debug, Args)]
#[command(
    after_help = "`status` only looks, also at a store that another process has open; then it shows what was
durable lately. `check` needs the store for itself; damaged objects are counted and are misses
anyway, its exit code is 3 if there are any."
)]
pub struct StoreArgs {
    /// Files or block devices of the store
    #[arg(required = true, num_args = 1..=16)]
    pub devices: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `cache put`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve cache put ./store --key http://example.org/a.deb --file a.deb --tag debian
  tar c dir | varve cache put ./store --key backup

The object is durable when the command ends. An older version of it is gone, also when the new
one is not admitted.")]
pub struct PutArgs {
    /// Files or block devices of the store
    #[arg(required = true, num_args = 1..=16)]
    pub devices: Vec<PathBuf>,
    /// Its key
    #[arg(long)]
    pub key: String,
    /// The file; without it standard input, read to its end into memory
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// A tag to purge it by; may be given up to 15 times
    #[arg(long = "tag")]
    pub tags: Vec<String>,
    /// A host to purge it by
    #[arg(long)]
    pub host: Option<String>,
    /// Not served after so many seconds
    #[arg(long, value_name = "SECONDS")]
    pub ttl: Option<u64>,
}

/// Arguments of `cache get`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit code 1 and a message if it is not there. Bytes are checked before they are written; \
        if the
rest of a large object turns out damaged, the command ends with 1 after part of it."
)]
pub struct GetArgs {
    /// Files or block devices of the store
    #[arg(required = true, num_args = 1..=16)]
    pub devices: Vec<PathBuf>,
    /// Its key
    #[arg(long)]
    pub key: String,
}

/// Arguments of `cache purge`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve cache purge ./store --prefix http://example.org/debian/
  varve cache purge ./store --tag release-12 --tag release-11

Durable when the command ends; it takes the same time whatever it covers. What is put afterwards
is kept. The space is used again when the log or the sets come to it.")]
pub struct PurgeArgs {
    /// Files or block devices of the store
    #[arg(required = true, num_args = 1..=16)]
    pub devices: Vec<PathBuf>,
    /// One object
    #[arg(long = "key")]
    pub keys: Vec<String>,
    /// Objects put with this tag
    #[arg(long = "tag")]
    pub tags: Vec<String>,
    /// Objects put with this host
    #[arg(long = "host")]
    pub hosts: Vec<String>,
    /// Objects whose keys begin so
    #[arg(long = "prefix")]
    pub prefixes: Vec<String>,
    /// Everything
    #[arg(long)]
    pub all: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn number(text: &str, ok: impl Fn(f64) -> bool, what: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if ok(number) => Ok(number),
        _ => Err(what.to_owned()),
    }
}

fn part(text: &str) -> Result<f64, String> {
    number(text, |n| (0.0..=1.0).contains(&n), "a number from 0 to 1")
}

fn share(text: &str) -> Result<f64, String> {
    number(text, |n| n > 0.0 && n <= 1.0, "a number above 0, at most 1")
}

fn positive(text: &str) -> Result<f64, String> {
    number(text, |n| n > 0.0 && n < 1e9, "a number above 0")
}

fn at_least_one(text: &str) -> Result<f64, String> {
    number(text, |n| (1.0..1e6).contains(&n), "a number, at least 1")
}
