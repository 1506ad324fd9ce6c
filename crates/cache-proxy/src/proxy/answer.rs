//! Answers from stored responses: the whole, a part, or "not modified", with their age and `Cache-Status`.

use super::{Asked, Proxy};
use crate::body::{BodyError, Outgoing};
use crate::conditional;
use crate::headers;
use crate::metrics::Outcome;
use crate::policy::Freshness;
use crate::ranges::{self, Wanted};
use crate::storage::{Found, piece_end};
use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Response, StatusCode};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::mpsc;

/// A response and its outcome for the metrics.
pub struct Answer {
    /// The response.
    pub response: Response<Outgoing>,
    /// How the request was answered.
    pub outcome: Outcome,
}

/// Fields that a 304 does not need; the client has them.
const NOT_IN_304: [HeaderName; 5] = [
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::CONTENT_LANGUAGE,
    header::CONTENT_RANGE,
];

/// Adds the `Cache-Status` of an answer (RFC 9211).
pub fn cache_status(headers: &mut HeaderMap, text: fmt::Arguments<'_>) {
    if let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(format!("varve; {text}"))) {
        headers.append(HeaderName::from_static("cache-status"), value);
    }
}

/// Removes the fields that are meant for the proxy if it acts as a surrogate of the origin.
pub fn strip_for_client(headers: &mut HeaderMap, is_surrogate: bool) {
    if is_surrogate {
        headers.remove("surrogate-control");
    }
}

impl Proxy {
    /// Builds the answer from a stored response. `None` if its bytes are gone, or do not cover the requested
    /// range.
    pub(super) async fn from_store(
        self: &Arc<Self>,
        asked: &Asked,
        found: &Found,
        fresh: &Freshness,
        outcome: Outcome,
        surrogate: bool,
    ) -> Option<Answer> {
        let stored = &found.stored;
        let mut headers = stored.headers.clone();
        headers.insert(header::AGE, HeaderValue::from(fresh.age_s));
        let ttl = i64::try_from(fresh.lifetime_s).unwrap_or(i64::MAX)
            - i64::try_from(fresh.age_s).unwrap_or(i64::MAX);
        match outcome {
            Outcome::Revalidated => {
                cache_status(&mut headers, format_args!("fwd=stale; fwd-status=304; ttl={ttl}"));
            }
            _ => cache_status(&mut headers, format_args!("hit; ttl={ttl}")),
        }
        strip_for_client(&mut headers, surrogate);
        let is_ok = stored.status == StatusCode::OK;
        if is_ok && conditional::is_not_modified(&asked.headers, &headers) {
            NOT_IN_304.iter().for_each(|name| {
                headers.remove(name);
            });
            return Some(made(
                StatusCode::NOT_MODIFIED,
                headers,
                Outgoing::empty(),
                outcome,
            ));
        }
        let whole_len = found.whole_len();
        let wanted =
            if is_ok && asked.method == Method::GET && conditional::range_holds(&asked.headers, &headers) {
                ranges::wanted(&asked.headers, whole_len)
            } else {
                Wanted::Whole
            };
        let (status, range) = match wanted {
            Wanted::Whole => (stored.status, 0..whole_len),
            Wanted::Unsatisfiable => {
                let value = HeaderValue::from_str(&format!("bytes */{whole_len}")).ok()?;
                headers.insert(header::CONTENT_RANGE, value);
                headers.remove(header::CONTENT_TYPE);
                return Some(made(
                    StatusCode::RANGE_NOT_SATISFIABLE,
                    headers,
                    Outgoing::empty(),
                    outcome,
                ));
            }
            Wanted::Part(range) => {
                let value = format!("bytes {}-{}/{whole_len}", range.start, range.end - 1);
                headers.insert(header::CONTENT_RANGE, HeaderValue::from_str(&value).ok()?);
                (StatusCode::PARTIAL_CONTENT, range)
            }
        };
        if !found.covers(&range) {
            return None;
        }
        if stored.status != StatusCode::NO_CONTENT {
            headers.insert(header::CONTENT_LENGTH, HeaderValue::from(range.end - range.start));
        }
        let body = if asked.method == Method::HEAD {
            Outgoing::empty()
        } else {
            self.stored_body(found, range).await?
        };
        Some(made(status, headers, body, outcome))
    }

    /// Makes a body of stored bytes: small ones at once, larger ones piece by piece as the client reads them.
    async fn stored_body(self: &Arc<Self>, found: &Found, range: Range<u64>) -> Option<Outgoing> {
        if range.is_empty() {
            return Some(Outgoing::empty());
        }
        let end = piece_end(range.start).min(range.end);
        let first = self.storage.read(found, range.start..end).await.ok()?;
        if end == range.end {
            return Some(Outgoing::Full(Some(first)));
        }
        // Reads one piece ahead of the client. The store does not wait for the reader: if the log overwrites
        // the object meanwhile, the body breaks off.
        let (pieces, body) = mpsc::channel(1);
        let (storage, found) = (Arc::clone(&self.storage), found.clone());
        tokio::spawn(async move {
            let mut piece = Ok(first);
            let mut at = end;
            loop {
                let is_last = piece.is_err() || at >= range.end;
                if pieces.send(piece).await.is_err() || is_last {
                    return;
                }
                let next = piece_end(at).min(range.end);
                piece = storage.read(&found, at..next).await.map_err(|_| BodyError::Gone);
                at = next;
            }
        });
        Some(Outgoing::Channel(body, range.end - range.start))
    }
}

fn made(status: StatusCode, headers: HeaderMap, body: Outgoing, outcome: Outcome) -> Answer {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    Answer { response, outcome }
}

/// Adds `Date` if the origin sent none.
pub fn ensure_date(headers: &mut HeaderMap, now_ms: u64) {
    if !headers.contains_key(header::DATE) {
        headers.insert(header::DATE, headers::format_date(now_ms / 1000));
    }
}
