//! Counters, for Prometheus and for the status.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// How a request was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// From the store.
    Hit,
    /// From the store after the origin confirmed it.
    Revalidated,
    /// From the store although it is stale.
    Stale,
    /// From the origin: nothing usable was stored.
    Miss,
    /// From the origin, past the cache.
    Pass,
    /// A tunnel.
    Tunnel,
    /// Refused: not allowed, or malformed.
    Refused,
    /// The origin failed.
    Error,
}

impl Outcome {
    /// Returns the label for metrics and logs.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Revalidated => "revalidated",
            Self::Stale => "stale",
            Self::Miss => "miss",
            Self::Pass => "pass",
            Self::Tunnel => "tunnel",
            Self::Refused => "refused",
            Self::Error => "error",
        }
    }

    /// All outcomes.
    pub const ALL: [Self; 8] = [
        Self::Hit,
        Self::Revalidated,
        Self::Stale,
        Self::Miss,
        Self::Pass,
        Self::Tunnel,
        Self::Refused,
        Self::Error,
    ];
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct By {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Why {
    reason: &'static str,
}

/// All counters.
pub struct Metrics {
    registry: Registry,
    /// By outcome, in the order of [`Outcome::ALL`].
    requests: [Counter; Outcome::ALL.len()],
    bytes: [Counter; Outcome::ALL.len()],
    refusals: Family<Why, Counter>,
    seconds: Histogram,
    /// Open connections of clients.
    pub connections: Gauge,
    /// Connections that were refused because of a limit.
    pub connections_refused: Counter,
    /// Requests to origins.
    pub origin_requests: Counter,
    /// Requests to origins that failed.
    pub origin_errors: Counter,
    /// Responses that were stored.
    pub stored: Counter,
    /// Requests that waited for another request's fetch.
    pub collapsed: Counter,
    /// Lines of the access log that were dropped because they could not be written fast enough.
    pub log_dropped: Counter,
}

/// Returns the counters of a family by outcome, so that counting looks nothing up.
fn by_outcome(family: &Family<By, Counter>) -> [Counter; Outcome::ALL.len()] {
    Outcome::ALL.map(|outcome| {
        let by = By {
            outcome: outcome.label(),
        };
        family.get_or_create(&by).clone()
    })
}

impl Default for Metrics {
    fn default() -> Self {
        let (requests, bytes) = (Family::default(), Family::default());
        let mut registry = Registry::with_prefix("varve_cache_proxy");
        let metrics = Self {
            requests: by_outcome(&requests),
            bytes: by_outcome(&bytes),
            refusals: Family::default(),
            seconds: Histogram::new([
                0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
            ]),
            connections: Gauge::default(),
            connections_refused: Counter::default(),
            origin_requests: Counter::default(),
            origin_errors: Counter::default(),
            stored: Counter::default(),
            collapsed: Counter::default(),
            log_dropped: Counter::default(),
            registry: Registry::default(),
        };
        registry.register("requests", "Requests by how they were answered", requests);
        registry.register("response_bytes", "Bytes of response bodies", bytes);
        registry.register(
            "refusals",
            "Requests refused for how they were framed",
            metrics.refusals.clone(),
        );
        registry.register(
            "response_seconds",
            "Time to the first byte",
            metrics.seconds.clone(),
        );
        registry.register(
            "connections",
            "Connections of clients",
            metrics.connections.clone(),
        );
        registry.register(
            "connections_refused",
            "Connections turned away",
            metrics.connections_refused.clone(),
        );
        registry.register(
            "origin_requests",
            "Requests to origins",
            metrics.origin_requests.clone(),
        );
        registry.register(
            "origin_errors",
            "Requests to origins that failed",
            metrics.origin_errors.clone(),
        );
        registry.register("stored", "Responses stored", metrics.stored.clone());
        registry.register(
            "collapsed",
            "Requests that waited for another's fetch",
            metrics.collapsed.clone(),
        );
        registry.register(
            "log_dropped",
            "Access log lines left out",
            metrics.log_dropped.clone(),
        );
        Self { registry, ..metrics }
    }
}

impl Metrics {
    /// Counts a request whose answer has started, with its time to the first byte.
    pub fn request(&self, outcome: Outcome, seconds: f64) {
        self.requests[outcome as usize].inc();
        self.seconds.observe(seconds);
    }

    /// Counts bytes of an answer's body.
    pub fn sent(&self, outcome: Outcome, bytes: u64) {
        self.bytes[outcome as usize].inc_by(bytes);
    }

    /// Counts a request that was refused because of its framing.
    pub fn refused(&self, reason: &'static str) {
        self.refusals.get_or_create(&Why { reason }).inc();
    }

    /// Returns the number of requests with this outcome.
    pub fn requests(&self, outcome: Outcome) -> u64 {
        self.requests[outcome as usize].get()
    }

    /// Returns the bytes of bodies that were sent with this outcome.
    pub fn bytes(&self, outcome: Outcome) -> u64 {
        self.bytes[outcome as usize].get()
    }

    /// Returns all counters and those of the store in the text format of Prometheus.
    pub fn text(&self, store: &[(&'static str, u64)]) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        let mut all = text.strip_suffix("# EOF\n").unwrap_or(&text).to_owned();
        for (name, value) in store {
            all.push_str(&format!(
                "# TYPE varve_cache_{name} counter\nvarve_cache_{name}_total {value}\n"
            ));
        }
        all.push_str("# EOF\n");
        all
    }
}
