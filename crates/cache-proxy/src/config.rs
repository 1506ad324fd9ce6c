//! The configuration: TOML, every key with its default and its bounds. Errors name the key and the allowed
//! values.

use crate::policy::Rules;
use crate::units::Bytes;
use http::HeaderName;
use http::uri::{Authority, Uri};
use ipnet::IpNet;
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// Errors of a configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{path}: {error}; give its path with --config")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: std::io::Error,
    },
    /// The file is not TOML, or has an unknown key.
    #[error("{path}: {error}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Position and cause.
        error: Box<toml::de::Error>,
    },
    /// A value is out of bounds.
    #[error("{path}: {key}: {problem}")]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The fault, and the allowed values.
        problem: String,
    },
}

/// The whole configuration.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The store of objects.
    pub store: Store,
    /// Addresses for clients.
    pub listen: Vec<Listen>,
    /// Sites of the reverse mode.
    #[serde(default)]
    pub site: Vec<Site>,
    /// Access to the forward proxy.
    #[serde(default)]
    pub forward: Forward,
    /// Rules for storing and freshness.
    #[serde(default)]
    pub cache: CacheRules,
    /// Bounds.
    #[serde(default)]
    pub limits: Limits,
    /// Access for the administrator.
    #[serde(default)]
    pub admin: Admin,
    /// Logs.
    #[serde(default)]
    pub log: Log,
}

/// The store of objects.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Store {
    /// Files or block devices of one store.
    pub devices: Vec<PathBuf>,
    /// Size of the files that are created for missing devices.
    pub create_bytes: Option<Bytes>,
    /// Mean bytes of an object in a new store: how many the index has room for. None: 8 KiB, and less in
    /// small stores ([`StorePlan::with_room`](varve_cache::StorePlan::with_room)).
    pub object_bytes: Option<Bytes>,
    /// Index policy of a new store.
    #[serde(default = "default_policy")]
    pub policy: String,
    /// Memory for hot objects.
    #[serde(default = "default_hot")]
    pub hot_bytes: Bytes,
    /// Threads for blocking device I/O.
    #[serde(default = "default_workers")]
    pub workers: usize,
    /// Whether a slow device gets one transfer at a time, in the order of their places; off for an array of
    /// several disks.
    #[serde(default = "default_true")]
    pub order_transfers: bool,
    /// On a pool: whether a new store has what its policy leaves of the index on disk in a file that is pinned
    /// to NVM.
    #[serde(default = "default_true")]
    pub pin: bool,
    /// `all`, or `second-request`: an object is written only when it is put for the second time.
    #[serde(default)]
    pub admission: Admission,
    /// Whether to open the store although devices are missing.
    #[serde(default)]
    pub degraded: bool,
}

/// Selects the objects that are written.
#[derive(Debug, Clone, Copy, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Admission {
    /// All.
    #[default]
    All,
    /// Objects that are put for the second time.
    SecondRequest,
}

fn default_policy() -> String {
    "log-lru".to_owned()
}

const fn default_hot() -> Bytes {
    Bytes(64 << 20)
}

const fn default_workers() -> usize {
    16
}

const fn default_true() -> bool {
    true
}

/// One address for clients.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Listen {
    /// Address and port.
    pub address: SocketAddr,
    /// The mode of the address.
    #[serde(default)]
    pub mode: Mode,
    /// Certificate and key: HTTPS, with HTTP/2.
    pub tls: Option<Tls>,
}

/// The mode of an address.
#[derive(Debug, Clone, Copy, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Sites of this configuration.
    #[default]
    Reverse,
    /// Any target, for the clients in `forward.clients`.
    Forward,
}

/// Files of a certificate.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The chain, PEM.
    pub certificate: PathBuf,
    /// The key, PEM.
    pub key: PathBuf,
}

/// A site in reverse mode.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Site {
    /// Host names of the site; `*` for all.
    pub hosts: Vec<String>,
    /// Origin servers: `http://host:port` or `https://…`.
    pub origins: Vec<String>,
    /// `Host` sent to the origin, in place of the client's.
    pub host: Option<String>,
    /// Path of the health check: a healthy origin answers it with a status below 500. None: only connection
    /// failures count.
    pub health_path: Option<String>,
    /// Time between two health checks.
    #[serde(default = "default_health_interval")]
    pub health_interval_ms: u64,
}

const fn default_health_interval() -> u64 {
    5_000
}

/// Allowed clients and targets of the forward proxy. If empty, nothing is allowed.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct Forward {
    /// Networks of clients.
    pub clients: Vec<IpNet>,
    /// Ports of targets.
    pub ports: Vec<u16>,
    /// Ports to which tunnels (CONNECT) may go.
    pub connect_ports: Vec<u16>,
    /// Private, loopback or link-local networks that are allowed as targets.
    pub allow_private: Vec<IpNet>,
}

/// Rules for storing and freshness.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct CacheRules {
    /// Whether responses that set cookies are stored.
    pub store_set_cookie: bool,
    /// Whether `Surrogate-Control` is honoured (reverse mode).
    pub surrogate_control: bool,
    /// Percent of the time since the last change for which a response without a lifetime is fresh.
    pub heuristic_percent: u64,
    /// Longest heuristic lifetime.
    pub heuristic_max_s: u64,
    /// `stale-if-error` of responses that have no such directive.
    pub stale_if_error_s: u64,
    /// Request fields that are part of the key. They are passed to the origin even if it may reflect them.
    pub key_headers: Vec<String>,
    /// How long small objects of a page wait for each other, so that they are written side by side, with the
    /// store's policies that read groups at once. 0: they do not.
    pub group_ms: u64,
    /// Certificate authorities trusted for origins in addition to the system's, PEM.
    pub origin_ca: Option<PathBuf>,
}

impl Default for CacheRules {
    fn default() -> Self {
        Self {
            store_set_cookie: false,
            surrogate_control: true,
            heuristic_percent: 10,
            heuristic_max_s: 86_400,
            stale_if_error_s: 3600,
            key_headers: Vec::new(),
            group_ms: 1000,
            origin_ca: None,
        }
    }
}

/// Bounds on every resource that clients or origins can use up.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Bytes of a request's header.
    pub header_bytes: Bytes,
    /// Lines of a header.
    pub header_lines: usize,
    /// How long a client may take for a header, and be silent between requests.
    pub header_timeout_ms: u64,
    /// Bytes a second that a client must send or take of a body, on average over 10 s.
    pub min_rate_bytes_s: u64,
    /// Connections of clients.
    pub connections: usize,
    /// Connections from one address.
    pub connections_per_address: usize,
    /// Concurrent requests of one HTTP/2 connection.
    pub streams: u32,
    /// Bytes of a request's body.
    pub request_body_bytes: Bytes,
    /// Bytes of an object; larger ones pass through.
    pub object_bytes: Bytes,
    /// Bytes of an object whose length the origin does not say; larger ones pass through.
    pub unknown_length_bytes: Bytes,
    /// Memory for objects in flight into the store, bytes. Responses beyond it pass through without being
    /// stored.
    pub in_flight_bytes: Bytes,
    /// Requests that may wait for another's fetch of the same object; further ones ask the origin themselves.
    pub waiting: usize,
    /// How long a request waits for another's fetch.
    pub waiting_timeout_ms: u64,
    /// How long connecting to an origin may take.
    pub connect_timeout_ms: u64,
    /// How long an origin may take to start its answer.
    pub response_timeout_ms: u64,
    /// How long an origin may be silent within a body, and a tunnel on both sides.
    pub idle_timeout_ms: u64,
    /// How long requests may continue after the signal to stop.
    pub drain_timeout_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            header_bytes: Bytes(32 << 10),
            header_lines: 100,
            header_timeout_ms: 15_000,
            min_rate_bytes_s: 500,
            connections: 4096,
            connections_per_address: 256,
            streams: 100,
            request_body_bytes: Bytes(1 << 30),
            object_bytes: Bytes(16 << 30),
            unknown_length_bytes: Bytes(8 << 20),
            in_flight_bytes: Bytes(64 << 20),
            waiting: 4096,
            waiting_timeout_ms: 10_000,
            connect_timeout_ms: 5_000,
            response_timeout_ms: 30_000,
            idle_timeout_ms: 60_000,
            drain_timeout_ms: 10_000,
        }
    }
}

/// Access for the administrator.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct Admin {
    /// A Unix socket: status, purges, metrics. None: no administration.
    pub socket: Option<PathBuf>,
    /// An address for Prometheus: metrics only.
    pub metrics: Option<SocketAddr>,
}

/// Logs.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// A file for a line of JSON for each request; `-` is the standard output. None: no access log.
    pub access: Option<PathBuf>,
}

/// Checks that a value is within its bounds; the error is the key and a message.
fn within(key: &str, value: u64, least: u64, most: u64) -> Result<(), (String, String)> {
    if (least..=most).contains(&value) {
        Ok(())
    } else {
        Err((
            key.to_owned(),
            format!("{value} is out of bounds; give {least} to {most}"),
        ))
    }
}

type Problem = (String, String);

fn problem(key: impl Into<String>, text: impl Into<String>) -> Problem {
    (key.into(), text.into())
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The fault with its key, as [`ConfigError`].
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Read {
            path: path.to_owned(),
            error,
        })?;
        Self::parse(&text, path)
    }

    /// Parses and checks a text; `path` is for messages.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|error| ConfigError::Syntax {
            path: path.to_owned(),
            error: Box::new(error),
        })?;
        config.check().map_err(|(key, problem)| ConfigError::Value {
            path: path.to_owned(),
            key,
            problem,
        })?;
        Ok(config)
    }

    fn check(&self) -> Result<(), Problem> {
        self.store.check()?;
        if self.listen.is_empty() || self.listen.len() > 64 {
            return Err(problem(
                "listen",
                "give 1 to 64 of [[listen]], each with an address",
            ));
        }
        let serves = |mode| self.listen.iter().any(|listen| listen.mode == mode);
        if serves(Mode::Reverse) && self.site.is_empty() {
            return Err(problem(
                "site",
                "an address in reverse mode needs a [[site]] with hosts and origins",
            ));
        }
        if serves(Mode::Forward) && self.forward.clients.is_empty() {
            return Err(problem(
                "forward.clients",
                "an address in forward mode serves nobody; list networks, as in [\"192.0.2.0/24\"]",
            ));
        }
        self.site
            .iter()
            .enumerate()
            .try_for_each(|(n, site)| site.check(n))?;
        self.cache.check()?;
        self.limits.check()
    }

    /// Returns the site of an authority: one that names it, or else one with `*`.
    pub fn site_of(&self, authority: &Authority) -> Option<(usize, &Site)> {
        let named = |name: &str| {
            self.site
                .iter()
                .position(|site| site.hosts.iter().any(|host| host.eq_ignore_ascii_case(name)))
        };
        let at = named(authority.as_str())
            .or_else(|| named(authority.host()))
            .or_else(|| named("*"))?;
        self.site.get(at).map(|site| (at, site))
    }

    /// Returns the rules of the policy for requests of one mode.
    pub fn rules(&self, mode: Mode) -> Rules {
        Rules {
            store_set_cookie: self.cache.store_set_cookie,
            surrogate: self.cache.surrogate_control && mode == Mode::Reverse,
            heuristic_percent: self.cache.heuristic_percent,
            heuristic_max_s: self.cache.heuristic_max_s,
            stale_if_error_s: self.cache.stale_if_error_s,
        }
    }

    /// Returns the request fields that are part of the key.
    pub fn key_headers(&self) -> Vec<HeaderName> {
        self.cache
            .key_headers
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect()
    }
}

impl Store {
    fn check(&self) -> Result<(), Problem> {
        if self.devices.is_empty() || self.devices.len() > 16 {
            return Err(problem(
                "store.devices",
                "give 1 to 16 files or block devices of one store",
            ));
        }
        if let Some(Bytes(bytes)) = self.create_bytes {
            within("store.create_bytes", bytes, 16 << 20, 1 << 50)?;
        }
        if let Some(Bytes(bytes)) = self.object_bytes {
            within("store.object_bytes", bytes, 512, 1 << 30)?;
        }
        if self.policy.parse::<varve_cache::Policy>().is_err() {
            let names = "log, log-lru, log-prefetch, log-lru-prefetch, set-mem, set-mem-lru, set or basic";
            return Err(problem(
                "store.policy",
                format!("`{}` is none; give {names}", self.policy),
            ));
        }
        within("store.hot_bytes", self.hot_bytes.0, 0, 1 << 40)?;
        within("store.workers", self.workers as u64, 1, 512)
    }
}

impl Site {
    fn check(&self, n: usize) -> Result<(), Problem> {
        let key = |name: &str| format!("site[{n}].{name}");
        if self.hosts.is_empty() {
            return Err(problem(
                key("hosts"),
                "give the names that it answers to, or [\"*\"]",
            ));
        }
        if let Some(host) = self
            .hosts
            .iter()
            .find(|host| *host != "*" && !crate::framing::is_host(host))
        {
            return Err(problem(
                key("hosts"),
                format!("`{host}` is no host; write example.org or example.org:8080"),
            ));
        }
        if self.origins.is_empty() || self.origins.len() > 64 {
            return Err(problem(
                key("origins"),
                "give 1 to 64 of them, as in [\"http://10.0.0.1:8000\"]",
            ));
        }
        for origin in &self.origins {
            let uri: Result<Uri, _> = origin.parse();
            let right = uri.is_ok_and(|uri| {
                matches!(uri.scheme_str(), Some("http" | "https"))
                    && uri
                        .authority()
                        .is_some_and(|authority| crate::framing::is_host(authority.as_str()))
                    && uri.path_and_query().is_none_or(|path| path.as_str() == "/")
            });
            if !right {
                return Err(problem(
                    key("origins"),
                    format!(
                        "`{origin}` is no origin; write http://host:port or https://host:port, without a path"
                    ),
                ));
            }
        }
        if self
            .host
            .as_deref()
            .is_some_and(|host| !crate::framing::is_host(host))
        {
            return Err(problem(
                key("host"),
                "it is no host; write example.org or example.org:8080",
            ));
        }
        if self
            .health_path
            .as_deref()
            .is_some_and(|path| !path.starts_with('/') || path.parse::<Uri>().is_err())
        {
            return Err(problem(
                key("health_path"),
                "it is no path; write one that begins with /",
            ));
        }
        within(
            &key("health_interval_ms"),
            self.health_interval_ms,
            100,
            3_600_000,
        )
    }
}

impl CacheRules {
    fn check(&self) -> Result<(), Problem> {
        within("cache.heuristic_percent", self.heuristic_percent, 0, 100)?;
        within("cache.heuristic_max_s", self.heuristic_max_s, 0, 31_536_000)?;
        within("cache.stale_if_error_s", self.stale_if_error_s, 0, 31_536_000)?;
        within("cache.group_ms", self.group_ms, 0, 60_000)?;
        if self.key_headers.len() > 16 {
            return Err(problem("cache.key_headers", "give at most 16"));
        }
        if let Some(name) = self
            .key_headers
            .iter()
            .find(|name| name.parse::<HeaderName>().is_err())
        {
            return Err(problem(
                "cache.key_headers",
                format!("`{name}` is no name of a header field"),
            ));
        }
        Ok(())
    }
}

impl Limits {
    fn check(&self) -> Result<(), Problem> {
        const DAY_MS: u64 = 86_400_000;
        let bounds: [(&str, u64, u64, u64); 17] = [
            ("header_bytes", self.header_bytes.0, 8192, 1 << 20),
            ("header_lines", self.header_lines as u64, 16, 1000),
            ("header_timeout_ms", self.header_timeout_ms, 100, DAY_MS),
            ("min_rate_bytes_s", self.min_rate_bytes_s, 0, 1 << 30),
            ("connections", self.connections as u64, 1, 1_000_000),
            (
                "connections_per_address",
                self.connections_per_address as u64,
                1,
                1_000_000,
            ),
            ("streams", u64::from(self.streams), 1, 10_000),
            ("request_body_bytes", self.request_body_bytes.0, 0, 1 << 50),
            ("object_bytes", self.object_bytes.0, 0, 1 << 50),
            ("unknown_length_bytes", self.unknown_length_bytes.0, 0, 1 << 30),
            ("in_flight_bytes", self.in_flight_bytes.0, 1 << 20, 1 << 40),
            ("waiting", self.waiting as u64, 0, 1_000_000),
            ("waiting_timeout_ms", self.waiting_timeout_ms, 0, DAY_MS),
            ("connect_timeout_ms", self.connect_timeout_ms, 10, DAY_MS),
            ("response_timeout_ms", self.response_timeout_ms, 10, DAY_MS),
            ("idle_timeout_ms", self.idle_timeout_ms, 10, DAY_MS),
            ("drain_timeout_ms", self.drain_timeout_ms, 0, DAY_MS),
        ];
        bounds
            .into_iter()
            .try_for_each(|(name, value, least, most)| within(&format!("limits.{name}"), value, least, most))
    }

    /// Converts milliseconds to a duration.
    pub const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: &str = r#"
        [store]
        devices = ["/tmp/x"]
        [[listen]]
        address = "127.0.0.1:8080"
        [[site]]
        hosts = ["*"]
        origins = ["http://127.0.0.1:8000"]
    "#;

    fn wrong(change: impl Fn(&str) -> String) -> String {
        Config::parse(&change(LEAST), Path::new("c.toml"))
            .expect_err("it is wrong")
            .to_string()
    }

    #[test]
    fn least_configuration_has_defaults_within_bounds() {
        let config = Config::parse(LEAST, Path::new("c.toml")).expect("it is right");
        assert_eq!(config.limits, Limits::default());
        assert!(config.site_of(&"any:80".parse().expect("an authority")).is_some());
    }

    #[test]
    fn messages_name_the_key_and_what_is_right() {
        let message = wrong(|text| format!("{text}\n[limits]\nconnections = 0"));
        assert!(
            message.contains("limits.connections") && message.contains("give 1 to 1000000"),
            "{message}"
        );
        let message = wrong(|text| text.replace("http://127.0.0.1:8000", "127.0.0.1:8000/x"));
        assert!(
            message.contains("site[0].origins") && message.contains("http://host:port"),
            "{message}"
        );
        let message = wrong(|text| format!("{text}\n[limits]\nconections = 1"));
        assert!(message.contains("conections"), "{message}");
        let message = wrong(|text| text.replace("8080\"", "8080\"\nmode = \"forward\""));
        assert!(message.contains("forward.clients"), "{message}");
        let message = wrong(|text| text.replace("[store]", "[store]\npolicy = \"x\""));
        assert!(
            message.contains("store.policy") && message.contains("log-lru"),
            "{message}"
        );
    }

    #[test]
    fn site_that_names_a_host_goes_before_one_that_takes_all() {
        let text = format!("{LEAST}\n[[site]]\nhosts = [\"Example.org\"]\norigins = [\"http://b\"]");
        let config = Config::parse(&text, Path::new("c.toml")).expect("it is right");
        let at = |name: &str| {
            config
                .site_of(&name.parse().expect("an authority"))
                .map(|(at, _)| at)
        };
        assert_eq!((at("example.org:81"), at("other")), (Some(1), Some(0)));
    }
}
