//! CONNECT: forwards bytes between a client and a target, if both are allowed. Nothing is cached: the bytes
//! are encrypted end to end.

use super::{Answer, Client, Live, Proxy, is_forward};
use crate::body::Outgoing;
use crate::config::Limits;
use crate::metrics::Outcome;
use crate::targets;
use http::{HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

/// Makes a refusal that ends the connection: the bytes after a CONNECT need not be HTTP.
fn refuse(status: StatusCode, text: &str) -> Answer {
    let mut answer = Answer::refuse(status, text);
    answer
        .response
        .headers_mut()
        .insert(header::CONNECTION, HeaderValue::from_static("close"));
    answer
}

impl Proxy {
    pub(super) async fn tunnel(
        &self,
        live: &Arc<Live>,
        client: Client,
        request: Request<Incoming>,
    ) -> Answer {
        let rules = &live.config.forward;
        if !is_forward(client.mode) {
            return refuse(
                StatusCode::METHOD_NOT_ALLOWED,
                "CONNECT is served by forward proxies only.",
            );
        }
        if !targets::may_use(client.peer.ip(), rules) {
            return refuse(
                StatusCode::FORBIDDEN,
                "This proxy does not serve your address (forward.clients).",
            );
        }
        let target = request
            .uri()
            .authority()
            .and_then(|target| Some((target.host().to_owned(), target.port_u16()?)));
        let Some((host, port)) = target else {
            return refuse(StatusCode::BAD_REQUEST, "CONNECT needs host:port.");
        };
        if !rules.connect_ports.contains(&port) {
            return refuse(
                StatusCode::FORBIDDEN,
                "This proxy makes no tunnels to that port (forward.connect_ports).",
            );
        }
        let Some(seat) = self.seat(client.peer.ip()) else {
            return refuse(
                StatusCode::SERVICE_UNAVAILABLE,
                "There are as many connections as there may be (limits.connections_per_address).",
            );
        };
        let timeout = Limits::ms(live.limits().connect_timeout_ms);
        let resolved =
            tokio::time::timeout(timeout, targets::resolve(&host, port, &rules.allow_private)).await;
        let addresses = match resolved.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(addresses) => addresses,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return refuse(
                    StatusCode::FORBIDDEN,
                    "This proxy does not go to that address (forward.allow_private).",
                );
            }
            Err(_) => return refuse(StatusCode::BAD_GATEWAY, "The target's name has no address."),
        };
        let Some(target) = connect(&addresses, timeout).await else {
            return refuse(StatusCode::BAD_GATEWAY, "The target cannot be reached.");
        };
        let idle = Limits::ms(live.limits().idle_timeout_ms);
        tokio::spawn(async move {
            if let Ok(client) = hyper::upgrade::on(request).await {
                carry(TokioIo::new(client), target, idle).await;
            }
            drop(seat);
        });
        Answer {
            response: Response::new(Outgoing::empty()),
            outcome: Outcome::Tunnel,
        }
    }
}

async fn connect(addresses: &[SocketAddr], timeout: Duration) -> Option<TcpStream> {
    for address in addresses {
        if let Ok(Ok(stream)) = tokio::time::timeout(timeout, TcpStream::connect(address)).await {
            let _ = stream.set_nodelay(true);
            return Some(stream);
        }
    }
    None
}

/// Forwards bytes both ways until both sides have ended or neither has sent anything for `idle`.
async fn carry(client: impl AsyncRead + AsyncWrite, target: TcpStream, idle: Duration) {
    let (client_reads, client_writes) = tokio::io::split(client);
    let (target_reads, target_writes) = target.into_split();
    let activity = Activity {
        begun: Instant::now(),
        last_ms: AtomicU64::new(0),
        idle,
    };
    let up = pump(client_reads, target_writes, &activity);
    let down = pump(target_reads, client_writes, &activity);
    // An error in one direction ends both; after an orderly end the other direction goes on.
    let (mut up, mut down) = (std::pin::pin!(up), std::pin::pin!(down));
    let (mut up_ended, mut down_ended) = (false, false);
    while !(up_ended && down_ended) {
        let ended_well = tokio::select! {
            done = &mut up, if !up_ended => { up_ended = true; done.is_ok() }
            done = &mut down, if !down_ended => { down_ended = true; done.is_ok() }
        };
        if !ended_well {
            return;
        }
    }
}

struct Activity {
    begun: Instant,
    last_ms: AtomicU64,
    idle: Duration,
}

impl Activity {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn silent(&self) -> Duration {
        Duration::from_millis(self.now_ms().saturating_sub(self.last_ms.load(Ordering::Relaxed)))
    }
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    activity: &Activity,
) -> io::Result<()> {
    let mut buffer = vec![0; 16 << 10];
    loop {
        let read = loop {
            match tokio::time::timeout(activity.idle, from.read(&mut buffer)).await {
                Ok(read) => break read?,
                Err(_) if activity.silent() < activity.idle => {}
                Err(_) => return Err(io::ErrorKind::TimedOut.into()),
            }
        };
        if read == 0 {
            return to.shutdown().await;
        }
        activity.last_ms.store(activity.now_ms(), Ordering::Relaxed);
        tokio::time::timeout(activity.idle, to.write_all(&buffer[..read])).await??;
    }
}
