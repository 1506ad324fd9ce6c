//! Origins: connections, selection among several, and health.

use crate::body::{BodyError, Upload};
use crate::config::{CacheRules, Limits, Site};
use crate::targets;
use http::uri::{Authority, PathAndQuery, Scheme, Uri};
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use ipnet::IpNet;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tower_service::Service;

/// Why an origin gave no answer.
#[derive(Debug, Error)]
pub enum OriginError {
    /// The origin cannot be connected to, or broke off.
    #[error("the origin cannot be reached: {0}")]
    Unreachable(String),
    /// The target is not allowed for the forward proxy.
    #[error("the target is not allowed: {0}")]
    Forbidden(String),
    /// The origin did not answer in time.
    #[error("the origin did not answer in time")]
    TimedOut,
    /// The framing of the origin's answer is ambiguous.
    #[error("the origin's answer is ambiguous")]
    Ambiguous,
    /// The client's body exceeds its limit.
    #[error("the request's body is larger than limits.request_body_bytes")]
    TooLarge,
}

/// Resolves names to the allowed addresses.
#[derive(Debug, Clone)]
struct Resolver {
    /// `None`: the origins are configured, and any address is allowed.
    allowed: Option<Arc<Vec<IpNet>>>,
}

impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let allowed = self.allowed.clone();
        Box::pin(async move {
            let addresses = match allowed {
                Some(allowed) => targets::resolve(name.as_str(), 0, &allowed).await?,
                None => tokio::net::lookup_host((name.as_str(), 0)).await?.collect(),
            };
            Ok(addresses.into_iter())
        })
    }
}

/// Sends requests to origins.
#[derive(Clone)]
pub struct Asker {
    newest: Client<HttpsConnector<HttpConnector<Resolver>>, Upload>,
    /// HTTP/1.1 only: for requests whose `Host` differs from the origin's name, which HTTP/2 cannot express.
    oldest: Client<HttpsConnector<HttpConnector<Resolver>>, Upload>,
    allowed: Option<Arc<Vec<IpNet>>>,
    timeout: Duration,
}

/// Builds the TLS configuration for origins, with the trusted certificate authorities.
///
/// # Errors
/// The file of `cache.origin_ca` cannot be read.
pub fn trust(rules: &CacheRules) -> io::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let system = hyper_rustls::ConfigBuilderExt::with_native_roots(ClientConfig::builder());
    if let Some(path) = &rules.origin_ca {
        let wrong = |error: &dyn std::fmt::Display| {
            io::Error::other(format!("cache.origin_ca: {}: {error}", path.display()))
        };
        let certificates = CertificateDer::pem_file_iter(path).map_err(|error| wrong(&error))?;
        for certificate in certificates {
            let certificate = certificate.map_err(|error| wrong(&error))?;
            roots.add(certificate).map_err(|error| wrong(&error))?;
        }
        return Ok(ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth());
    }
    Ok(match system {
        Ok(builder) => builder.with_no_client_auth(),
        Err(error) => {
            tracing::warn!(%error, "no certificate authorities of the system: https origins need cache.origin_ca");
            ClientConfig::builder()
                .with_root_certificates(roots)
                .with_no_client_auth()
        }
    })
}

impl Asker {
    /// Makes a client of origins. `allowed` restricts targets as for a forward proxy and lists the allowed
    /// private networks.
    pub fn new(tls: ClientConfig, limits: &Limits, allowed: Option<Vec<IpNet>>) -> Self {
        let allowed = allowed.map(Arc::new);
        let mut tcp = HttpConnector::new_with_resolver(Resolver {
            allowed: allowed.clone(),
        });
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(Limits::ms(limits.connect_timeout_ms)));
        let both = HttpsConnectorBuilder::new()
            .with_tls_config(tls.clone())
            .https_or_http();
        let both = both.enable_http1().enable_http2().wrap_connector(tcp.clone());
        let old = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
        let old = old.enable_http1().wrap_connector(tcp);
        let bytes = usize::try_from(limits.header_bytes.0).unwrap_or(usize::MAX);
        let mut client = Client::builder(TokioExecutor::new());
        client
            .pool_idle_timeout(Duration::from_secs(30))
            .pool_max_idle_per_host(64)
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .http1_max_buf_size(bytes.max(64 << 10))
            .http1_max_headers(limits.header_lines)
            .http2_max_header_list_size(u32::try_from(bytes).unwrap_or(u32::MAX))
            .set_host(false);
        Self {
            newest: client.build(both),
            oldest: client.build(old),
            allowed,
            timeout: Limits::ms(limits.response_timeout_ms),
        }
    }

    /// Sends a request and waits for the head of the answer.
    ///
    /// # Errors
    /// The origin gave no answer.
    pub async fn ask(&self, request: Request<Upload>) -> Result<Response<Incoming>, OriginError> {
        if let (Some(allowed), Some(host)) = (&self.allowed, request.uri().host())
            && let Ok(address) = host.trim_start_matches('[').trim_end_matches(']').parse()
            && !targets::may_reach(address, allowed)
        {
            return Err(OriginError::Forbidden(host.to_owned()));
        }
        let named = request
            .headers()
            .get(http::header::HOST)
            .map(http::HeaderValue::as_bytes);
        let is_same = named
            == request
                .uri()
                .authority()
                .map(|authority| authority.as_str().as_bytes());
        let client = if is_same { &self.newest } else { &self.oldest };
        let asked = tokio::time::timeout(self.timeout, client.request(request)).await;
        let response = asked
            .map_err(|_| OriginError::TimedOut)?
            .map_err(|error| why(&error))?;
        let headers = response.headers();
        if headers.contains_key(http::header::TRANSFER_ENCODING)
            && headers.contains_key(http::header::CONTENT_LENGTH)
        {
            return Err(OriginError::Ambiguous);
        }
        Ok(response)
    }
}

fn why(error: &hyper_util::client::legacy::Error) -> OriginError {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(BodyError::TooLarge) = inner.downcast_ref() {
            return OriginError::TooLarge;
        }
        if let Some(inner) = inner.downcast_ref::<io::Error>()
            && inner.kind() == io::ErrorKind::PermissionDenied
        {
            return OriginError::Forbidden(inner.to_string());
        }
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    OriginError::Unreachable(text)
}

/// One origin of a site.
struct Origin {
    scheme: Scheme,
    authority: Authority,
    failures: AtomicU32,
    /// End of the time in which the origin counts as down, milliseconds of the pool's clock.
    down_until_ms: AtomicU64,
}

/// The origins of a site.
pub struct Pool {
    origins: Vec<Origin>,
    next: AtomicUsize,
    started: Instant,
    health: Option<(PathAndQuery, Duration)>,
}

/// Consecutive failures after which an origin counts as down.
const FAILURES: u32 = 2;
/// How long it counts as down if there is no health check.
const LEFT_ALONE_MS: u64 = 5_000;

impl Pool {
    /// Makes the origins of a site, whose configuration was checked.
    pub fn new(site: &Site) -> Self {
        let origins = site.origins.iter().filter_map(|origin| {
            let parts = origin.parse::<Uri>().ok()?.into_parts();
            Some(Origin {
                scheme: parts.scheme?,
                authority: parts.authority?,
                failures: AtomicU32::new(0),
                down_until_ms: AtomicU64::new(0),
            })
        });
        let path = site.health_path.as_ref().and_then(|path| path.parse().ok());
        Self {
            origins: origins.collect(),
            next: AtomicUsize::new(0),
            started: Instant::now(),
            health: path.map(|path| (path, Duration::from_millis(site.health_interval_ms))),
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn is_up(&self, at: usize) -> bool {
        self.origins[at].down_until_ms.load(Ordering::Relaxed) <= self.now_ms()
    }

    /// Returns the order in which to try the origins: healthy ones first, round robin.
    pub fn order(&self) -> Vec<usize> {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let mut order: Vec<usize> = (0..self.origins.len())
            .map(|n| first.wrapping_add(n) % self.origins.len())
            .collect();
        order.sort_by_key(|&at| !self.is_up(at));
        order
    }

    /// Makes the URI of a path at an origin.
    pub fn uri(&self, at: usize, path: &PathAndQuery) -> Option<Uri> {
        let origin = self.origins.get(at)?;
        let uri = Uri::builder()
            .scheme(origin.scheme.clone())
            .authority(origin.authority.clone());
        uri.path_and_query(path.clone()).build().ok()
    }

    /// Records the outcome of a request to an origin.
    pub fn tell(&self, at: usize, went_well: bool) {
        let Some(origin) = self.origins.get(at) else {
            return;
        };
        if went_well {
            origin.failures.store(0, Ordering::Relaxed);
            origin.down_until_ms.store(0, Ordering::Relaxed);
        } else if origin.failures.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES {
            let for_ms = if self.health.is_some() {
                u64::MAX / 2
            } else {
                LEFT_ALONE_MS
            };
            origin
                .down_until_ms
                .store(self.now_ms().saturating_add(for_ms), Ordering::Relaxed);
        }
    }

    /// Returns the URL of each origin and whether it is healthy.
    pub fn state(&self) -> Vec<(String, bool)> {
        let states = self.origins.iter().enumerate().map(|(at, origin)| {
            (
                format!("{}://{}", origin.scheme, origin.authority),
                self.is_up(at),
            )
        });
        states.collect()
    }

    /// Checks the health of the origins periodically; ends when the pool is dropped.
    pub async fn look_after(pool: std::sync::Weak<Self>, asker: Asker, host: Option<String>) {
        loop {
            let Some(interval) = pool
                .upgrade()
                .and_then(|pool| pool.health.as_ref().map(|(_, interval)| *interval))
            else {
                return;
            };
            let Some(now) = pool.upgrade() else { return };
            for at in 0..now.origins.len() {
                let Some(uri) = now.health.as_ref().and_then(|(path, _)| now.uri(at, path)) else {
                    continue;
                };
                let name = host
                    .clone()
                    .unwrap_or_else(|| now.origins[at].authority.to_string());
                let request = Request::get(uri)
                    .header(http::header::HOST, name)
                    .body(Upload::Empty);
                let Ok(request) = request else { continue };
                let answer = asker.ask(request).await;
                now.tell(at, answer.is_ok_and(|answer| !answer.status().is_server_error()));
            }
            drop(now);
            tokio::time::sleep(interval).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> Pool {
        Pool::new(&Site {
            hosts: vec!["*".to_owned()],
            origins: vec!["http://a".to_owned(), "https://b:1".to_owned()],
            host: None,
            health_path: None,
            health_interval_ms: 1000,
        })
    }

    #[test]
    fn origins_are_asked_in_turn_and_those_that_fail_last() {
        let pool = pool();
        assert_ne!(pool.order()[0], pool.order()[0]);
        pool.tell(0, false);
        assert_ne!(pool.order()[0], pool.order()[0], "one failure is none");
        pool.tell(0, false);
        assert_eq!((pool.order()[0], pool.order()[0]), (1, 1));
        pool.tell(0, true);
        assert_ne!(pool.order()[0], pool.order()[0]);
    }
}
