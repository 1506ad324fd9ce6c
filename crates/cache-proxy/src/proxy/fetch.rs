//! Requests to origins. Their responses are stored on the way to the client, or passed on.

use super::answer::{cache_status, ensure_date, strip_for_client};
use super::cached::{passing_headers, stored_headers};
use super::{Answer, Asked, Live, Proxy, is_forward};
use crate::body::{BodyError, Outgoing, Through, Upload};
use crate::config::Limits;
use crate::flights::Lead;
use crate::headers::{self, now_ms};
use crate::key::Key;
use crate::metrics::Outcome;
use crate::origin::OriginError;
use crate::policy::{self, SURROGATE};
use crate::record::{Place, Stored};
use crate::storage::{Sink, Taken, Turn, part_of};
use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::Uri;
use http::{Method, Request, Response, StatusCode, Version};
use hyper::body::{Body, Incoming};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Most origins to try for one request.
const TRIES: usize = 3;
/// Pieces of a body buffered between the origin and the client.
const AHEAD: usize = 32;
/// When a client disconnects, the rest of its object is still fetched if it is at most this long.
const FINISH_BYTES: u64 = 64 << 20;

impl Proxy {
    /// Sends a request to the origin; of several, to the next one if one cannot be reached.
    pub(super) async fn ask(
        &self,
        live: &Live,
        asked: &Asked,
        method: &Method,
        mut headers: HeaderMap,
        body: Upload,
    ) -> Result<Response<Incoming>, OriginError> {
        self.metrics.origin_requests.inc();
        let via = HeaderValue::from_str(&format!("1.1 {}", self.pseudonym));
        if let Ok(via) = via {
            headers.append(header::VIA, via);
        }
        let answer = if is_forward(asked.mode) {
            self.ask_target(live, asked, method, headers, body).await
        } else {
            self.ask_site(live, asked, method, headers, body).await
        };
        if answer.is_err() {
            self.metrics.origin_errors.inc();
        }
        answer
    }

    async fn ask_target(
        &self,
        live: &Live,
        asked: &Asked,
        method: &Method,
        headers: HeaderMap,
        body: Upload,
    ) -> Result<Response<Incoming>, OriginError> {
        let uri = Uri::builder()
            .scheme(asked.scheme)
            .authority(asked.authority.clone());
        let uri = uri.path_and_query(asked.path.clone()).build();
        let uri = uri.map_err(|error| OriginError::Unreachable(error.to_string()))?;
        let host = asked.key.host();
        live.forward.ask(request(method, uri, host, headers, body)?).await
    }

    async fn ask_site(
        &self,
        live: &Live,
        asked: &Asked,
        method: &Method,
        mut headers: HeaderMap,
        body: Upload,
    ) -> Result<Response<Incoming>, OriginError> {
        let unknown = || OriginError::Unreachable("the site is not configured any more".to_owned());
        let site = live.config.site.get(asked.site).ok_or_else(unknown)?;
        let pool = live.pools.get(asked.site).ok_or_else(unknown)?;
        let host = site.host.as_deref().unwrap_or(asked.key.host());
        if live.config.cache.surrogate_control {
            let value = HeaderValue::from_static("varve=\"Surrogate/1.0\"");
            debug_assert_eq!(SURROGATE, "varve");
            headers.insert(HeaderName::from_static("surrogate-capability"), value);
        }
        // A streamed body can be sent only once.
        let may_repeat = body.is_end_stream() && method.is_idempotent();
        let tries = if may_repeat { TRIES } else { 1 };
        let mut body = Some(body);
        let mut last = unknown();
        for at in pool.order().into_iter().take(tries) {
            let uri = pool.uri(at, &asked.path).ok_or_else(unknown)?;
            let body = body.take().unwrap_or(Upload::Empty);
            match live
                .reverse
                .ask(request(method, uri, host, headers.clone(), body)?)
                .await
            {
                Ok(response) => {
                    pool.tell(at, true);
                    return Ok(response);
                }
                Err(error @ (OriginError::Unreachable(_) | OriginError::TimedOut)) => {
                    pool.tell(at, false);
                    tracing::debug!(origin = at, %error, "origin failed");
                    last = error;
                }
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    /// Builds the answer to the client when the origin gave none.
    pub(super) fn origin_failed(error: &OriginError) -> Answer {
        let status = match error {
            OriginError::Unreachable(_) | OriginError::Ambiguous => StatusCode::BAD_GATEWAY,
            OriginError::TimedOut => StatusCode::GATEWAY_TIMEOUT,
            OriginError::Forbidden(_) => {
                return Answer::refuse(
                    StatusCode::FORBIDDEN,
                    "This proxy does not go to that address (forward.allow_private).",
                );
            }
            OriginError::TooLarge => {
                return Answer::refuse(
                    StatusCode::PAYLOAD_TOO_LARGE,
                    "The body is larger than this proxy takes (limits.request_body_bytes).",
                );
            }
        };
        tracing::info!(%error, "no answer from an origin");
        let text = if status == StatusCode::GATEWAY_TIMEOUT {
            "The origin did not answer in time."
        } else {
            "The origin cannot be reached."
        };
        Answer::own(status, text, Outcome::Error)
    }

    /// Handles the response to a GET or HEAD: stores it if allowed and if there is room, and passes it to the
    /// client.
    pub(super) async fn take(
        self: &Arc<Self>,
        live: &Arc<Live>,
        asked: &Asked,
        response: Response<Incoming>,
        asked_ms: u64,
        turn: Turn,
        lead: Option<Lead>,
    ) -> Answer {
        let rules = live.config.rules(asked.mode);
        let idle = Limits::ms(live.limits().idle_timeout_ms);
        let came_ms = now_ms();
        let (mut parts, body) = response.into_parts();
        // The HTTP version of the answer is the proxy's own.
        parts.version = Version::HTTP_11;
        headers::strip_hop_by_hop(&mut parts.headers);
        ensure_date(&mut parts.headers, came_ms);
        let len = body.size_hint().exact();
        let may = may_store(asked, &parts.headers, parts.status, len, live);
        let sink = if may.is_ok() {
            let part = if parts.status == StatusCode::PARTIAL_CONTENT {
                part_of(&parts.headers, len)
            } else {
                None
            };
            let mut headers = stored_headers(&parts.headers);
            if part.is_some() {
                headers.remove(header::CONTENT_RANGE);
            }
            let stored = Stored {
                status: if part.is_some() {
                    StatusCode::OK
                } else {
                    parts.status
                },
                headers,
                asked_ms,
                came_ms,
                place: Place::Here,
            };
            self.storage
                .begin(Taken {
                    key: &asked.key,
                    request: &asked.headers,
                    stored,
                    part,
                    len,
                    unknown_max: live.limits().unknown_length_bytes.0,
                    turn,
                    group: self.group_of(live, asked, &parts.headers),
                })
                .await
        } else {
            // A newer response that may not be stored invalidates the stored one.
            if asked.method == Method::GET
                && parts.status.is_success()
                && parts.status != StatusCode::PARTIAL_CONTENT
            {
                self.forget_if_there(asked).await;
            }
            None
        };
        let detail = if sink.is_some() { "; stored" } else { "" };
        cache_status(
            &mut parts.headers,
            format_args!("fwd=uri-miss; fwd-status={}{detail}", parts.status.as_u16()),
        );
        strip_for_client(&mut parts.headers, rules.surrogate);
        let body = match sink {
            Some(sink) => self.copy(body, sink, lead, len, idle),
            None => {
                if let (Some(lead), Err(_)) = (lead, may) {
                    lead.unstorable();
                }
                Outgoing::through(body, idle)
            }
        };
        Answer {
            response: Response::from_parts(parts, body),
            outcome: Outcome::Miss,
        }
    }

    /// Returns the group of a response: objects that one client loads within a short time for one page, which
    /// is the one that `Referer` names, or a page of HTML itself.
    fn group_of(&self, live: &Live, asked: &Asked, response: &HeaderMap) -> Option<u64> {
        if live.config.cache.group_ms == 0 {
            return None;
        }
        let is_page = headers::single(response, &header::CONTENT_TYPE)
            .is_some_and(|kind| kind.trim_start().to_ascii_lowercase().starts_with("text/html"));
        let page = if is_page {
            asked.key.url().to_owned()
        } else {
            let referer = headers::single(&asked.headers, &header::REFERER)?;
            Key::of_url(referer.split('#').next()?)?.url().to_owned()
        };
        self.storage.group(asked.client, &page)
    }

    async fn forget_if_there(&self, asked: &Asked) {
        if self.storage.lookup(&asked.key, &asked.headers).await.is_some() {
            self.forget(asked).await;
        }
    }

    /// Copies a body to the client and to the store. Storing may continue after the client has disconnected.
    fn copy(
        self: &Arc<Self>,
        body: Incoming,
        sink: Sink,
        lead: Option<Lead>,
        len: Option<u64>,
        idle: Duration,
    ) -> Outgoing {
        let (pieces, client) = mpsc::channel(AHEAD);
        let proxy = Arc::clone(self);
        tokio::spawn(async move {
            let mut from = Through::new(body, idle);
            if let Some(sink) = copy_pieces(&mut from, sink, &pieces, len, idle).await {
                if sink.finish().await {
                    proxy.metrics.stored.inc();
                } else {
                    tracing::debug!(
                        "a response was not stored: invalidated meanwhile, not admitted, or no device"
                    );
                }
            }
            // Wakes the waiting requests before the client sees the end of the body.
            drop(lead);
            drop(pieces);
        });
        match len {
            Some(len) => Outgoing::Channel(client, len),
            None => Outgoing::Copied(client),
        }
    }

    /// Passes a request to the origin past the store. A successful unsafe method invalidates the stored
    /// responses of its key.
    pub(super) async fn pass(self: &Arc<Self>, live: &Arc<Live>, asked: &Asked, body: Incoming) -> Answer {
        let limits = live.limits();
        let most = limits.request_body_bytes.0;
        if body.size_hint().lower() > most {
            return Self::origin_failed(&OriginError::TooLarge);
        }
        let upload = if body.is_end_stream() {
            Upload::Empty
        } else {
            Upload::Client(body, most)
        };
        let response = match self
            .ask(live, asked, &asked.method, asked.headers.clone(), upload)
            .await
        {
            Ok(response) => response,
            Err(error) => return Self::origin_failed(&error),
        };
        let (mut parts, body) = response.into_parts();
        parts.version = Version::HTTP_11;
        if !asked.method.is_safe() && (parts.status.is_success() || parts.status.is_redirection()) {
            self.invalidate(asked, &parts.headers).await;
        }
        passing_headers(
            &mut parts.headers,
            live.config.rules(asked.mode).surrogate,
            now_ms(),
        );
        cache_status(&mut parts.headers, format_args!("fwd=bypass"));
        let body = Outgoing::through(body, Limits::ms(limits.idle_timeout_ms));
        Answer {
            response: Response::from_parts(parts, body),
            outcome: Outcome::Pass,
        }
    }

    /// Invalidates stored responses after an unsafe method (RFC 9111 §4.4).
    async fn invalidate(&self, asked: &Asked, response: &HeaderMap) {
        self.forget(asked).await;
        for name in [header::LOCATION, header::CONTENT_LOCATION] {
            let nearby = headers::single(response, &name).and_then(|reference| asked.key_nearby(reference));
            if let Some(key) = nearby
                && let Err(error) = self.storage.remove(&key).await
            {
                tracing::warn!(key = key.text(), %error, "the store failed to remove an object");
            }
        }
    }
}

/// Copies a body to the client and to `sink`. Returns the sink when the whole body has arrived.
async fn copy_pieces(
    from: &mut Through,
    sink: Sink,
    client: &mpsc::Sender<Result<Bytes, BodyError>>,
    len: Option<u64>,
    idle: Duration,
) -> Option<Sink> {
    let mut sink = Some(sink);
    let mut has_client = true;
    let mut left = len;
    while let Some(piece) = from.next().await {
        let bytes = match piece {
            Ok(bytes) => bytes,
            Err(error) => {
                let _ = client.send(Err(error)).await;
                return None;
            }
        };
        left = left.map(|left| left.saturating_sub(bytes.len() as u64));
        if let Some(open) = &mut sink
            && !open.write(&bytes).await
        {
            sink = None;
        }
        if has_client {
            has_client = client.send_timeout(Ok(bytes), idle).await.is_ok();
        }
        let worth = sink.is_some() && left.is_none_or(|left| left <= FINISH_BYTES);
        if !has_client && !worth {
            return None;
        }
    }
    sink
}

/// Whether a response is stored: the policy's verdict, and the limits of this implementation.
fn may_store(
    asked: &Asked,
    response: &HeaderMap,
    status: StatusCode,
    len: Option<u64>,
    live: &Live,
) -> Result<(), ()> {
    let rules = live.config.rules(asked.mode);
    let is_part = status == StatusCode::PARTIAL_CONTENT;
    if is_part && (part_of(response, len).is_none() || response.contains_key(header::VARY)) {
        return Err(());
    }
    if len.is_some_and(|len| len > live.limits().object_bytes.0) {
        return Err(());
    }
    let status = if is_part { StatusCode::OK } else { status };
    policy::may_store(&asked.method, &asked.headers, status, response, &rules).map_err(|why| {
        tracing::trace!(key = asked.key.text(), ?why, "not stored");
    })
}

fn request(
    method: &Method,
    uri: Uri,
    host: &str,
    mut headers: HeaderMap,
    body: Upload,
) -> Result<Request<Upload>, OriginError> {
    let host = HeaderValue::from_str(host).map_err(|error| OriginError::Unreachable(error.to_string()))?;
    headers.insert(header::HOST, host);
    let mut request = Request::new(body);
    *request.method_mut() = method.clone();
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    Ok(request)
}
