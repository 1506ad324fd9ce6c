//! Administration: status, purges, warming, reload and metrics, on a Unix socket that is open only to its
//! owner and root. The `metrics` address is for Prometheus and serves nothing else.

use crate::body::BodyError;
use crate::key::{Key, normal_authority};
use crate::metrics::Outcome;
use crate::proxy::Proxy;
use crate::storage::Purge;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::mpsc;

/// Longest body of a request, bytes.
const QUESTION_MAX: usize = 16 << 10;
/// How long the commands wait for an answer; to warm a large object takes its time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);
/// How long a request may take to arrive.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(10);

/// The scope of a purge, as sent over the socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Order {
    /// A URL.
    Key(String),
    /// A tag.
    Tag(String),
    /// A host.
    Host(String),
    /// A prefix of URLs.
    Prefix(String),
    /// All.
    Everything,
}

/// A URL to fetch, as sent over the socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmOrder {
    /// The whole URL.
    pub url: String,
    /// Request fields, `Name: value`.
    #[serde(default)]
    pub fields: Vec<String>,
}

impl Order {
    /// Converts the order to the store's scope; the error is a message for the operator. `fields`: whether
    /// request fields are part of keys.
    fn purge(self, fields: bool) -> Result<Purge, String> {
        Ok(match self {
            Self::Key(url) => {
                let key = Key::of_url(&url)
                    .ok_or_else(|| format!("{url} is no URL; write it whole, as in http://example.org/a"))?;
                if fields {
                    Purge::KeyWithFields(key)
                } else {
                    Purge::Key(key)
                }
            }
            Self::Tag(tag) => Purge::Tag(tag),
            Self::Host(host) => {
                let authority = host
                    .parse()
                    .map_err(|_| format!("{host} is no host; write example.org or example.org:8080"))?;
                Purge::Host(normal_authority("", &authority))
            }
            Self::Prefix(prefix) if prefix.contains("://") => Purge::Prefix(prefix),
            Self::Prefix(prefix) => {
                return Err(format!(
                    "{prefix} is no beginning of a URL; write it with http:// or https://"
                ));
            }
            Self::Everything => Purge::Everything,
        })
    }
}

/// Channel of reload requests. Each carries a sender for the outcome.
pub type Reload = mpsc::Sender<tokio::sync::oneshot::Sender<Result<(), String>>>;

type Reply = Response<Full<Bytes>>;

/// Binds the socket so that at no moment another user can connect.
///
/// # Errors
/// Another proxy listens there, or the directory is missing.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    let wrong =
        |error: io::Error| io::Error::new(error.kind(), format!("admin.socket {}: {error}", path.display()));
    if UnixStream::connect(path).is_ok() {
        return Err(wrong(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another process listens there",
        )));
    }
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    let apart = Path::new(&name);
    let _ = std::fs::remove_file(apart);
    let socket = UnixListener::bind(apart).map_err(wrong)?;
    std::fs::set_permissions(apart, std::fs::Permissions::from_mode(0o600)).map_err(wrong)?;
    std::fs::rename(apart, path).map_err(wrong)?;
    Ok(socket)
}

/// Serves the socket until the future is dropped.
pub async fn serve(proxy: Arc<Proxy>, socket: UnixListener, reload: Reload) {
    let me = rustix::process::geteuid().as_raw();
    loop {
        let Ok((stream, _)) = socket.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        // The socket's mode restricts access already, but some file systems ignore the mode.
        if !stream
            .peer_cred()
            .is_ok_and(|peer| peer.uid() == 0 || peer.uid() == me)
        {
            continue;
        }
        let (proxy, reload) = (Arc::clone(&proxy), reload.clone());
        let service = service_fn(move |request| {
            let (proxy, reload) = (Arc::clone(&proxy), reload.clone());
            async move { Ok::<_, Infallible>(answer(&proxy, &reload, request).await) }
        });
        tokio::spawn(async move {
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new())
                .header_read_timeout(QUESTION_TIMEOUT)
                .keep_alive(false);
            let _ = http.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

/// Serves metrics to Prometheus.
pub async fn serve_metrics(proxy: Arc<Proxy>, socket: TcpListener) {
    loop {
        let Ok((stream, _)) = socket.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let proxy = Arc::clone(&proxy);
        let service = service_fn(move |request: Request<Incoming>| {
            let reply = match (request.method(), request.uri().path()) {
                (&Method::GET, "/metrics") => metrics(&proxy),
                _ => text(StatusCode::NOT_FOUND, "There is only /metrics.\n"),
            };
            async move { Ok::<_, Infallible>(reply) }
        });
        tokio::spawn(async move {
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new())
                .header_read_timeout(QUESTION_TIMEOUT)
                .keep_alive(false);
            let served = http.serve_connection(TokioIo::new(stream), service);
            let _ = tokio::time::timeout(QUESTION_TIMEOUT, served).await;
        });
    }
}

fn text(status: StatusCode, text: impl Into<String>) -> Reply {
    let mut reply = Response::new(Full::new(Bytes::from(text.into())));
    *reply.status_mut() = status;
    reply
}

fn metrics(proxy: &Proxy) -> Reply {
    let store = proxy.storage.cache().stats().fields();
    let mut reply = text(StatusCode::OK, proxy.metrics.text(&store));
    let kind = http::HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    reply.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    reply
}

async fn answer(proxy: &Arc<Proxy>, reload: &Reload, request: Request<Incoming>) -> Reply {
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/status") => text(StatusCode::OK, status(proxy).to_string()),
        (&Method::GET, "/metrics") => metrics(proxy),
        (&Method::POST, "/warm") => match warm(proxy, request).await {
            Ok(done) => text(StatusCode::OK, done.to_string()),
            Err(problem) => text(StatusCode::BAD_REQUEST, problem),
        },
        (&Method::POST, "/purge") => match read_purge(proxy, request).await {
            Ok(what) => match proxy.storage.purge(what).await {
                Ok(()) => text(StatusCode::OK, json!({"purged": true}).to_string()),
                Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
            },
            Err(problem) => text(StatusCode::BAD_REQUEST, problem),
        },
        (&Method::POST, "/reload") => {
            let (done, result) = tokio::sync::oneshot::channel();
            let _ = reload.send(done).await;
            match result.await {
                Ok(Ok(())) => text(StatusCode::OK, json!({"reloaded": true}).to_string()),
                Ok(Err(problem)) => text(StatusCode::CONFLICT, problem),
                Err(_) => text(StatusCode::SERVICE_UNAVAILABLE, "the proxy is about to end"),
            }
        }
        _ => text(
            StatusCode::NOT_FOUND,
            "there are GET /status, GET /metrics, POST /purge, POST /warm and POST /reload",
        ),
    }
}

async fn read<T: serde::de::DeserializeOwned>(request: Request<Incoming>) -> Result<T, String> {
    let body = Limited::new(request.into_body(), QUESTION_MAX).collect();
    let body = tokio::time::timeout(QUESTION_TIMEOUT, body)
        .await
        .map_err(|_| BodyError::Stalled.to_string())?;
    let body = body.map_err(|error| error.to_string())?.to_bytes();
    serde_json::from_slice(&body).map_err(|error| error.to_string())
}

async fn read_purge(proxy: &Proxy, request: Request<Incoming>) -> Result<Purge, String> {
    let fields = !proxy.live().config.cache.key_headers.is_empty();
    read::<Order>(request).await?.purge(fields)
}

async fn warm(proxy: &Arc<Proxy>, request: Request<Incoming>) -> Result<serde_json::Value, String> {
    let WarmOrder { url, fields } = read(request).await?;
    let mut headers = HeaderMap::new();
    for field in &fields {
        let parsed = field.split_once(':').and_then(|(name, value)| {
            let name = HeaderName::from_bytes(name.trim().as_bytes()).ok()?;
            Some((name, HeaderValue::from_str(value.trim()).ok()?))
        });
        let (name, value) = parsed.ok_or_else(|| format!("{field} is no field; write Name: value"))?;
        headers.append(name, value);
    }
    let done = proxy.warm(&url, &headers).await?;
    Ok(json!({
        "url": url,
        "status": done.status.as_u16(),
        "cache": done.outcome.label(),
        "bytes": done.bytes,
        "whole": done.is_whole,
    }))
}

/// Sizes of what grows with use, within its bounds.
fn memory(proxy: &Proxy) -> serde_json::Value {
    let mut sizes = varve_cache::store::MemorySizes::default();
    let cache = proxy.storage.cache();
    cache.shards().for_each(|shard| sizes.add(&shard.memory_sizes()));
    let (fetches, unstorable) = proxy.fetches();
    json!({
        "index_bytes": sizes.index_bytes,
        "hot_bytes": sizes.hot_bytes,
        "hot_objects": sizes.hot_objects,
        "waiting_positions": sizes.waiting_positions,
        "waiting_changes": sizes.waiting_changes,
        "waiting_bins": sizes.waiting_bins,
        "fetches": fetches,
        "unstorable_keys": unstorable,
    })
}

/// Builds the answer to `status`.
fn status(proxy: &Arc<Proxy>) -> serde_json::Value {
    let live = proxy.live();
    let stats = proxy.storage.cache().stats();
    let requests: serde_json::Map<_, _> = Outcome::ALL
        .into_iter()
        .map(|outcome| (outcome.label().to_owned(), proxy.metrics.requests(outcome).into()))
        .collect();
    let bytes: serde_json::Map<_, _> = Outcome::ALL
        .into_iter()
        .map(|outcome| (outcome.label().to_owned(), proxy.metrics.bytes(outcome).into()))
        .collect();
    let origins: Vec<_> = live
        .pools
        .iter()
        .zip(&live.config.site)
        .flat_map(|(pool, site)| {
            pool.state().into_iter().map(
                |(origin, is_healthy)| json!({"site": site.hosts, "origin": origin, "healthy": is_healthy}),
            )
        })
        .collect();
    let store: serde_json::Map<_, _> = stats
        .fields()
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.into()))
        .collect();
    json!({
        "uptime_s": proxy.uptime_s(),
        "pid": std::process::id(),
        "connections": proxy.metrics.connections.get(),
        "waiting": proxy.waiting(),
        "in_flight_left_bytes": proxy.storage.in_flight_left_bytes(),
        "requests": requests,
        "response_bytes": bytes,
        "origin_requests": proxy.metrics.origin_requests.get(),
        "origin_errors": proxy.metrics.origin_errors.get(),
        "stored": proxy.metrics.stored.get(),
        "collapsed": proxy.metrics.collapsed.get(),
        "origins": origins,
        "store": store,
        "memory": memory(proxy),
    })
}

/// Sends a request to the running proxy, for the commands.
///
/// # Errors
/// No proxy listens on the socket, or it refuses the request; the error has its message.
pub fn ask(socket: &Path, method: &str, path: &str, body: &str) -> io::Result<String> {
    let wrong = |error: io::Error| {
        let text = format!(
            "{}: {error}; is the proxy running, with this path as admin.socket?",
            socket.display()
        );
        io::Error::new(error.kind(), text)
    };
    let mut stream = UnixStream::connect(socket).map_err(wrong)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let len = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: admin\r\nConnection: close\r\nContent-Length: {len}\r\n\r\n{body}"
    )?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, "the proxy's answer is malformed");
    let (head, body) = reply.split_once("\r\n\r\n").ok_or_else(malformed)?;
    let status = head.split(' ').nth(1).ok_or_else(malformed)?;
    if status == "200" {
        Ok(body.to_owned())
    } else {
        Err(io::Error::other(body.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_whole_urls_and_normal_hosts() {
        assert!(Order::Key("/a".to_owned()).purge(false).is_err());
        assert!(Order::Prefix("a".to_owned()).purge(false).is_err());
        let host = Order::Host("Example.org:8080".to_owned()).purge(false);
        assert_eq!(host, Ok(Purge::Host("example.org:8080".to_owned())));
        let order: Order = serde_json::from_str(r#"{"tag":"x"}"#).expect("an order");
        assert_eq!(order, Order::Tag("x".to_owned()));
    }
}
