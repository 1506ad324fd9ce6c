//! A body that reports its end to the access log and the counters.

use super::{Client, Proxy};
use crate::access_log::Line;
use crate::body::{BodyError, Outgoing};
use crate::headers::now_ms;
use crate::metrics::Outcome;
use bytes::Bytes;
use http::{Request, StatusCode, Version, header};
use http_body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

/// Longest method, URL or agent in the log, characters.
const TEXT_MAX: usize = 2048;

fn short(text: &str) -> String {
    text.chars().take(TEXT_MAX).collect()
}

/// Makes the log line of a request at its arrival.
pub(super) fn begin<B>(client: &Client, request: &Request<B>) -> Line {
    let host = request
        .headers()
        .get(header::HOST)
        .and_then(|host| host.to_str().ok())
        .unwrap_or("-");
    let url = if request.uri().authority().is_some() {
        request.uri().to_string()
    } else {
        let scheme = if client.is_tls { "https" } else { "http" };
        format!("{scheme}://{host}{}", request.uri())
    };
    let agent = request.headers().get(header::USER_AGENT);
    Line {
        time_ms: now_ms(),
        client: client.peer.ip().to_canonical().to_string(),
        method: short(request.method().as_str()),
        url: short(&url),
        version: match request.version() {
            Version::HTTP_10 => "1.0",
            Version::HTTP_2 => "2",
            _ => "1.1",
        },
        status: 0,
        cache: "",
        bytes: 0,
        first_byte_ms: 0.0,
        total_ms: 0.0,
        agent: agent.map(|agent| short(&String::from_utf8_lossy(agent.as_bytes()))),
    }
}

/// Adds the values that are known at the start of the answer.
pub(super) fn answered(line: Line, status: StatusCode, outcome: Outcome, first_byte: Duration) -> Line {
    Line {
        status: status.as_u16(),
        cache: outcome.label(),
        first_byte_ms: first_byte.as_secs_f64() * 1000.0,
        ..line
    }
}

/// A body in transit to a client.
pub struct Logged {
    inner: Outgoing,
    line: Option<Line>,
    outcome: Outcome,
    bytes: u64,
    started: Instant,
    proxy: Arc<Proxy>,
}

impl Logged {
    pub(super) const fn new(
        inner: Outgoing,
        line: Option<Line>,
        outcome: Outcome,
        started: Instant,
        proxy: Arc<Proxy>,
    ) -> Self {
        Self {
            inner,
            line,
            outcome,
            bytes: 0,
            started,
            proxy,
        }
    }
}

impl Body for Logged {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.inner).poll_frame(context));
        if let Some(Ok(frame)) = &frame {
            this.bytes += frame.data_ref().map_or(0, Bytes::len) as u64;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        self.proxy.metrics.sent(self.outcome, self.bytes);
        if let Some(mut line) = self.line.take() {
            line.bytes = self.bytes;
            line.total_ms = self.started.elapsed().as_secs_f64() * 1000.0;
            self.proxy.log.write(line);
        }
    }
}
