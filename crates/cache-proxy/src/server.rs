//! Listeners and connections: limits, TLS, HTTP/1.1 and HTTP/2, and an orderly end.

use crate::config::{Limits, Listen, Mode, Tls};
use crate::framing::HeadBounds;
use crate::guard::Guard;
use crate::proxy::{Client, Proxy};
use crate::workers::Workers;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Reads certificate and key.
///
/// # Errors
/// A file cannot be read, or the key does not match the certificate.
pub fn read_tls(tls: &Tls) -> io::Result<ServerConfig> {
    let wrong = |path: &std::path::Path, error: &dyn std::fmt::Display| {
        io::Error::other(format!(
            "{}: {error}; give PEM files in listen.tls",
            path.display()
        ))
    };
    let chain =
        CertificateDer::pem_file_iter(&tls.certificate).map_err(|error| wrong(&tls.certificate, &error))?;
    let chain = chain
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| wrong(&tls.certificate, &error))?;
    let key = PrivateKeyDer::from_pem_file(&tls.key).map_err(|error| wrong(&tls.key, &error))?;
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| wrong(&tls.certificate, &error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// A bound listener.
pub struct Bound {
    socket: TcpListener,
    mode: Mode,
    /// The current certificate; a reload replaces it.
    tls: Option<watch::Receiver<Arc<ServerConfig>>>,
}

/// Binds an address. Returns the listener and, with TLS, the sender for new certificates.
///
/// # Errors
/// The address is taken, or the certificate cannot be read.
pub async fn bind(listen: &Listen) -> io::Result<(Bound, Option<watch::Sender<Arc<ServerConfig>>>)> {
    let wrong = |error: io::Error| {
        io::Error::new(
            error.kind(),
            format!("listen.address {}: {error}", listen.address),
        )
    };
    let socket = TcpListener::bind(listen.address).await.map_err(wrong)?;
    let (sender, tls) = match &listen.tls {
        Some(tls) => {
            let (sender, receiver) = watch::channel(Arc::new(read_tls(tls)?));
            (Some(sender), Some(receiver))
        }
        None => (None, None),
    };
    let mode = listen.mode;
    Ok((Bound { socket, mode, tls }, sender))
}

impl Bound {
    /// Returns the bound address, with the port that the system chose if 0 was configured.
    ///
    /// # Errors
    /// The system call fails.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

/// Serves the listeners until `stop` is true, then lets running requests end, at most for the drain timeout.
pub async fn serve(
    proxy: Arc<Proxy>,
    workers: Arc<Workers>,
    listeners: Vec<Bound>,
    stop: watch::Receiver<bool>,
) {
    // Nothing is sent: the channel closes when the last connection has dropped its sender.
    let (running, mut done) = mpsc::channel::<Infallible>(1);
    let mut accepting = tokio::task::JoinSet::new();
    for bound in listeners {
        let (proxy, workers) = (Arc::clone(&proxy), Arc::clone(&workers));
        accepting.spawn(accept(proxy, workers, bound, stop.clone(), running.clone()));
    }
    while accepting.join_next().await.is_some() {}
    drop(running);
    let drain = Limits::ms(proxy.live().config.limits.drain_timeout_ms);
    let ended = async {
        done.recv().await;
        proxy.storage.drain().await;
    };
    let _ = tokio::time::timeout(drain, ended).await;
}

async fn accept(
    proxy: Arc<Proxy>,
    workers: Arc<Workers>,
    bound: Bound,
    mut stop: watch::Receiver<bool>,
    running: mpsc::Sender<Infallible>,
) {
    loop {
        let accepted = tokio::select! {
            accepted = bound.socket.accept() => accepted,
            () = stopped(&mut stop) => return,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Mostly out of descriptors; they come back when connections end.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Some(seat) = proxy.seat(peer.ip()) else {
            continue;
        };
        let tls = bound.tls.as_ref().map(|tls| Arc::clone(&tls.borrow()));
        let client = Client {
            peer,
            mode: bound.mode,
            is_tls: tls.is_some(),
        };
        // The thread that serves the connection registers it anew.
        let Ok(stream) = stream.into_std() else {
            continue;
        };
        let (proxy, stop, running) = (Arc::clone(&proxy), stop.clone(), running.clone());
        workers.spawn(move || async move {
            if let Ok(stream) = TcpStream::from_std(stream) {
                connection(proxy, stream, client, tls, stop).await;
            }
            drop((seat, running));
        });
    }
}

/// Waits for the request to stop.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn connection(
    proxy: Arc<Proxy>,
    stream: TcpStream,
    client: Client,
    tls: Option<Arc<ServerConfig>>,
    stop: watch::Receiver<bool>,
) {
    let _ = stream.set_nodelay(true);
    let live = proxy.live();
    let limits = &live.config.limits;
    let bounds = HeadBounds {
        bytes: usize::try_from(limits.header_bytes.0).unwrap_or(usize::MAX),
        lines: limits.header_lines,
    };
    let rate = limits.min_rate_bytes_s;
    let metrics = Arc::clone(&proxy.metrics);
    let Some(tls) = tls else {
        return http1(
            &proxy,
            Guard::new(stream, Some(bounds), rate, metrics),
            client,
            limits,
            stop,
        )
        .await;
    };
    let handshake = TlsAcceptor::from(tls).accept(stream);
    let Ok(Ok(stream)) = tokio::time::timeout(Limits::ms(limits.header_timeout_ms), handshake).await else {
        return;
    };
    if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
        http2(
            &proxy,
            Guard::new(stream, None, rate, metrics),
            client,
            limits,
            stop,
        )
        .await;
    } else {
        http1(
            &proxy,
            Guard::new(stream, Some(bounds), rate, metrics),
            client,
            limits,
            stop,
        )
        .await;
    }
}

/// Serves a connection to its end; after a stop, requests in progress are completed.
async fn drive<C: Future<Output = hyper::Result<()>>>(
    connection: C,
    finish: impl FnOnce(Pin<&mut C>),
    stop: watch::Receiver<bool>,
    client: Client,
) {
    let mut connection = std::pin::pin!(connection);
    // A poll of `stopping` takes a lock that all connections share. It registers the waker of this task,
    // which does not change, so one poll is enough until the value does.
    let value = stop.clone();
    let mut stop = stop;
    let mut stopping = std::pin::pin!(stopped(&mut stop));
    let mut is_registered = false;
    let ended = std::future::poll_fn(|context| {
        if let Poll::Ready(ended) = connection.as_mut().poll(context) {
            return Poll::Ready(Some(ended));
        }
        if !is_registered || value.has_changed().unwrap_or(true) {
            is_registered = true;
            return stopping.as_mut().poll(context).map(|()| None);
        }
        Poll::Pending
    })
    .await;
    let ended = match ended {
        Some(ended) => ended,
        None => {
            finish(connection.as_mut());
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(peer = %client.peer, %error, "connection ended");
    }
}

async fn http1<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    proxy: &Arc<Proxy>,
    stream: S,
    client: Client,
    limits: &Limits,
    stop: watch::Receiver<bool>,
) {
    let proxy = Arc::clone(proxy);
    let service = service_fn(move |request| {
        let proxy = Arc::clone(&proxy);
        async move { Ok::<_, Infallible>(proxy.serve(client, request).await) }
    });
    let bytes = usize::try_from(limits.header_bytes.0).unwrap_or(usize::MAX);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Limits::ms(limits.header_timeout_ms))
        .max_headers(limits.header_lines)
        .max_buf_size(bytes.max(64 << 10))
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    drive(
        connection,
        |connection| connection.graceful_shutdown(),
        stop,
        client,
    )
    .await;
}

async fn http2<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    proxy: &Arc<Proxy>,
    stream: S,
    client: Client,
    limits: &Limits,
    stop: watch::Receiver<bool>,
) {
    let proxy = Arc::clone(proxy);
    let service = service_fn(move |request| {
        let proxy = Arc::clone(&proxy);
        async move { Ok::<_, Infallible>(proxy.serve(client, request).await) }
    });
    let timeout = Limits::ms(limits.header_timeout_ms);
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.streams)
        .max_header_list_size(u32::try_from(limits.header_bytes.0).unwrap_or(u32::MAX))
        .max_send_buf_size(64 << 10)
        .keep_alive_interval(timeout)
        .keep_alive_timeout(timeout)
        .serve_connection(TokioIo::new(stream), service);
    drive(
        connection,
        |connection| connection.graceful_shutdown(),
        stop,
        client,
    )
    .await;
}
