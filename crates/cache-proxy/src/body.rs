//! Bodies in transit: to clients (`Outgoing`) and to origins (`Upload`). Each bounds how long the other side
//! may be silent, or how much it may send.

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};

/// Why a body broke off.
#[derive(Debug, Error)]
pub enum BodyError {
    /// The other side broke off.
    #[error("the body broke off: {0}")]
    Broken(#[from] hyper::Error),
    /// The other side was silent for too long.
    #[error("the body stalled")]
    Stalled,
    /// The body exceeds its bound.
    #[error("the body is larger than allowed")]
    TooLarge,
    /// The producing task ended early: the stored object was overwritten, or the origin broke off.
    #[error("the rest of the body is gone")]
    Gone,
}

/// A body to a client.
pub enum Outgoing {
    /// The whole body, or an empty one.
    Full(Option<Bytes>),
    /// Streamed from an origin.
    Through(Through),
    /// Sent by a task; the length is known.
    Channel(mpsc::Receiver<Result<Bytes, BodyError>>, u64),
    /// Sent by a task that also stores the bytes; the origin did not state the length.
    Copied(mpsc::Receiver<Result<Bytes, BodyError>>),
}

/// A body that comes from an origin.
pub struct Through {
    inner: Incoming,
    idle: Duration,
    sleep: Pin<Box<Sleep>>,
    waits: bool,
}

impl Outgoing {
    /// Makes an empty body.
    pub const fn empty() -> Self {
        Self::Full(None)
    }

    /// Makes a body of a text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Full(Some(Bytes::from(text.into())))
    }

    /// Streams an origin's body; fails if the origin is silent for longer than `idle`.
    pub fn through(inner: Incoming, idle: Duration) -> Self {
        Self::Through(Through::new(inner, idle))
    }
}

impl Through {
    /// Wraps `inner`; reading fails after `idle` without bytes.
    pub fn new(inner: Incoming, idle: Duration) -> Self {
        Self {
            inner,
            idle,
            sleep: Box::pin(tokio::time::sleep(idle)),
            waits: false,
        }
    }

    /// Returns the next bytes. Trailers are left out.
    ///
    /// # Errors
    /// The body broke off or stalled.
    pub async fn next(&mut self) -> Option<Result<Bytes, BodyError>> {
        loop {
            match std::future::poll_fn(|context| self.poll(context)).await? {
                Ok(frame) => {
                    if let Ok(bytes) = frame.into_data() {
                        return Some(Ok(bytes));
                    }
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match Pin::new(&mut self.inner).poll_frame(context) {
            Poll::Ready(frame) => {
                self.waits = false;
                Poll::Ready(frame.map(|frame| frame.map_err(BodyError::Broken)))
            }
            Poll::Pending => {
                // The limit counts from the start of a wait, not from the last bytes.
                if !self.waits {
                    self.waits = true;
                    self.sleep.as_mut().reset(Instant::now() + self.idle);
                }
                ready!(self.sleep.as_mut().poll(context));
                Poll::Ready(Some(Err(BodyError::Stalled)))
            }
        }
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            Self::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Through(through) => through.poll(context),
            Self::Channel(bytes, left) => {
                let next = ready!(bytes.poll_recv(context));
                Poll::Ready(match next {
                    Some(Ok(bytes)) => {
                        *left = left.saturating_sub(bytes.len() as u64);
                        Some(Ok(Frame::data(bytes)))
                    }
                    Some(Err(error)) => Some(Err(error)),
                    None if *left > 0 => Some(Err(BodyError::Gone)),
                    None => None,
                })
            }
            Self::Copied(bytes) => {
                let next = ready!(bytes.poll_recv(context));
                Poll::Ready(next.map(|bytes| bytes.map(Frame::data)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.is_none(),
            Self::Through(through) => through.inner.is_end_stream(),
            Self::Channel(_, left) => *left == 0,
            Self::Copied(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Through(through) => through.inner.size_hint(),
            Self::Channel(_, left) => SizeHint::with_exact(*left),
            Self::Copied(_) => SizeHint::default(),
        }
    }
}

/// A body to an origin.
pub enum Upload {
    /// No body.
    Empty,
    /// From a client, up to this number of bytes.
    Client(Incoming, u64),
}

impl Body for Upload {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            Self::Empty => Poll::Ready(None),
            Self::Client(inner, left) => {
                let frame = ready!(Pin::new(inner).poll_frame(context));
                Poll::Ready(frame.map(|frame| {
                    let frame = frame?;
                    let len = frame.data_ref().map_or(0, Bytes::len) as u64;
                    *left = left.checked_sub(len).ok_or(BodyError::TooLarge)?;
                    Ok(frame.map_trailers_away())
                }))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty => true,
            Self::Client(inner, _) => inner.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty => SizeHint::with_exact(0),
            Self::Client(inner, _) => inner.size_hint(),
        }
    }
}

/// Trailers of requests are not passed on: origins may take them for headers.
trait WithoutTrailers {
    fn map_trailers_away(self) -> Self;
}

impl WithoutTrailers for Frame<Bytes> {
    fn map_trailers_away(self) -> Self {
        if self.is_trailers() {
            Self::trailers(HeaderMap::new())
        } else {
            self
        }
    }
}
