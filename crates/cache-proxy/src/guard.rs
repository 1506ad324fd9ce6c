//! A client's connection between the socket and the HTTP library. It holds requests to the strict framing and
//! drops clients that send or read too slowly. Knows no HTTP beyond [`Framing`].

use crate::framing::{Framing, HeadBounds, Refusal};
use crate::metrics::Metrics;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Time over which the rate is averaged.
const WINDOW: Duration = Duration::from_secs(10);
/// Bytes read at once.
const READ_BYTES: usize = 16 << 10;
/// Bytes passed to the HTTP library in place of a refused head: it answers 400 and ends the connection.
const REFUSED: &[u8] = b"\x00\r\n\r\n";

/// Minimum rate of bytes; only the time spent waiting for the client counts.
#[derive(Debug)]
struct Rate {
    least_bytes: u64,
    moved_bytes: u64,
    waited: Duration,
    since: Option<Instant>,
    sleep: Pin<Box<Sleep>>,
}

impl Rate {
    fn new(least_bytes_s: u64) -> Self {
        Self {
            least_bytes: least_bytes_s.saturating_mul(WINDOW.as_secs()),
            moved_bytes: 0,
            waited: Duration::ZERO,
            since: None,
            sleep: Box::pin(tokio::time::sleep(WINDOW)),
        }
    }

    fn reset(&mut self) {
        self.moved_bytes = 0;
        self.waited = Duration::ZERO;
        self.since = None;
    }

    fn moved(&mut self, bytes: usize) {
        self.moved_bytes += bytes as u64;
        if let Some(since) = self.since.take() {
            self.waited += since.elapsed();
        }
        if self.waited >= WINDOW && self.moved_bytes >= self.least_bytes {
            self.reset();
        }
    }

    /// Ready when the rate fell below the minimum.
    fn poll_slow(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.least_bytes == 0 {
            return Poll::Pending;
        }
        let now = Instant::now();
        if self.since.is_none() {
            self.since = Some(now);
            self.sleep
                .as_mut()
                .reset(now + WINDOW.saturating_sub(self.waited));
        }
        ready!(self.sleep.as_mut().poll(context));
        if self.moved_bytes < self.least_bytes {
            return Poll::Ready(());
        }
        self.reset();
        self.poll_slow(context)
    }
}

/// A connection under guard.
pub struct Guard<S> {
    inner: S,
    /// `None`: not HTTP/1; the library does the framing.
    framing: Option<Framing>,
    ready: Vec<u8>,
    given: usize,
    refused: bool,
    reads: Rate,
    writes: Rate,
    metrics: Arc<Metrics>,
}

impl<S> Guard<S> {
    /// Guards a connection: HTTP/1 with `bounds`, other protocols without.
    pub fn new(inner: S, bounds: Option<HeadBounds>, least_bytes_s: u64, metrics: Arc<Metrics>) -> Self {
        Self {
            inner,
            framing: bounds.map(Framing::new),
            ready: Vec::new(),
            given: 0,
            refused: false,
            reads: Rate::new(least_bytes_s),
            writes: Rate::new(least_bytes_s),
            metrics,
        }
    }

    fn refuse(&mut self, refusal: Refusal) -> io::Result<()> {
        self.refused = true;
        self.metrics.refused(refusal.label());
        tracing::debug!(%refusal, "request refused");
        if self.framing.as_ref().is_some_and(Framing::in_body) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, refusal));
        }
        self.ready.extend_from_slice(REFUSED);
        Ok(())
    }
}

fn too_slow() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the client is too slow")
}

impl<S: AsyncRead + Unpin> AsyncRead for Guard<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let Some(framing) = &mut this.framing else {
            return Pin::new(&mut this.inner).poll_read(context, out);
        };
        let mut buffer = [const { MaybeUninit::uninit() }; READ_BYTES];
        loop {
            if this.given < this.ready.len() {
                let now = out.remaining().min(this.ready.len() - this.given);
                out.put_slice(&this.ready[this.given..this.given + now]);
                this.given += now;
                if this.given == this.ready.len() {
                    this.ready.clear();
                    this.given = 0;
                }
                return Poll::Ready(Ok(()));
            }
            if this.refused {
                return Poll::Ready(Ok(()));
            }
            let mut read = ReadBuf::uninit(&mut buffer);
            match Pin::new(&mut this.inner).poll_read(context, &mut read) {
                Poll::Ready(done) => done?,
                Poll::Pending if framing.in_body() => {
                    ready!(this.reads.poll_slow(context));
                    return Poll::Ready(Err(too_slow()));
                }
                Poll::Pending => return Poll::Pending,
            }
            let bytes = read.filled();
            if bytes.is_empty() {
                return Poll::Ready(Ok(()));
            }
            if framing.in_body() {
                this.reads.moved(bytes.len());
            } else {
                this.reads.reset();
            }
            if let Err(refusal) = framing.feed(bytes, &mut this.ready) {
                this.refuse(refusal)?;
                return Pin::new(this).poll_read(context, out);
            }
        }
    }
}

impl<S> Guard<S> {
    /// Accounts the result of a write; a write below the minimum rate becomes an error.
    fn wrote(
        &mut self,
        context: &mut Context<'_>,
        wrote: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(done) = wrote {
            self.writes.moved(done.as_ref().map_or(0, |written| *written));
            return Poll::Ready(done);
        }
        ready!(self.writes.poll_slow(context));
        Poll::Ready(Err(too_slow()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guard<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = Pin::new(&mut this.inner).poll_write(context, bytes);
        this.wrote(context, wrote)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = Pin::new(&mut this.inner).poll_write_vectored(context, bytes);
        this.wrote(context, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const BOUNDS: HeadBounds = HeadBounds {
        bytes: 4096,
        lines: 20,
    };

    /// Runs `work` under simulated time, which advances whenever all tasks wait.
    fn run(work: impl Future<Output = ()>) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(work);
    }

    fn pair(least_bytes_s: u64) -> (tokio::io::DuplexStream, Guard<tokio::io::DuplexStream>) {
        let (client, server) = tokio::io::duplex(1024);
        (
            client,
            Guard::new(server, Some(BOUNDS), least_bytes_s, Arc::default()),
        )
    }

    #[test]
    fn client_that_drips_a_body_is_let_go_and_one_that_sends_enough_is_not() {
        run(async {
            for (each, slow) in [(1_usize, true), (200, false)] {
                let (mut client, mut guard) = pair(100);
                let sender = tokio::spawn(async move {
                    let _ = client
                        .write_all(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 6000\r\n\r\n")
                        .await;
                    for _ in 0..30 {
                        tokio::time::sleep(Duration::from_secs(1)).await;
                        if client.write_all(&vec![b'x'; each]).await.is_err() {
                            break;
                        }
                    }
                    client
                });
                let mut bytes = [0; 256];
                let mut got = 0;
                let ended = loop {
                    match guard.read(&mut bytes).await {
                        Ok(read) if got + read >= 6000 => break None,
                        Ok(read) => got += read,
                        Err(error) => break Some(error.kind()),
                    }
                };
                assert_eq!(
                    ended,
                    slow.then_some(io::ErrorKind::TimedOut),
                    "{each} bytes a second"
                );
                drop(guard);
                let _ = sender.await;
            }
        });
    }

    #[test]
    fn client_that_takes_nothing_is_let_go() {
        run(async {
            let (client, mut guard) = pair(100);
            let sent = guard.write_all(&[0; 4096]).await;
            assert_eq!(sent.map_err(|error| error.kind()), Err(io::ErrorKind::TimedOut));
            drop(client);
        });
    }

    #[test]
    fn refused_head_is_replaced_by_one_that_the_library_refuses() {
        run(async {
            let (mut client, mut guard) = pair(0);
            client
                .write_all(b"GET / HTTP/1.1\nHost: a\n\n")
                .await
                .expect("there is room");
            let mut got = Vec::new();
            guard.read_to_end(&mut got).await.expect("it ends");
            assert_eq!(got, REFUSED);
        });
    }
}
