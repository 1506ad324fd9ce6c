//! Requests of the administrator: a URL is fetched as for a client and its body goes nowhere, so that the
//! next client finds it stored.

use super::{Answer, Asked, Client, Proxy};
use crate::config::Mode;
use crate::metrics::Outcome;
use http::{HeaderMap, Method, Request, StatusCode, Uri, header};
use http_body_util::BodyExt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

/// The outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Warmed {
    /// The status of the answer.
    pub status: StatusCode,
    /// How it was answered.
    pub outcome: Outcome,
    /// Bytes of its body.
    pub bytes: u64,
    /// Whether the body came to its end.
    pub is_whole: bool,
}

impl Proxy {
    /// Fetches a whole URL through the cache: as a site's client if a site has its host, else as a client of
    /// the forward proxy, for which `forward.ports` and the rules on addresses hold. It is not in the access
    /// log.
    ///
    /// # Errors
    /// The URL or the fields are malformed.
    pub async fn warm(self: &Arc<Self>, url: &str, fields: &HeaderMap) -> Result<Warmed, String> {
        let live = self.live();
        let uri: Uri = url.parse().map_err(|error| format!("{url}: {error}"))?;
        let (Some(authority), Some("http" | "https")) = (uri.authority().cloned(), uri.scheme_str()) else {
            return Err(format!(
                "{url} is no URL; write it whole, as in http://example.org/a"
            ));
        };
        let mode = if live.config.site_of(&authority).is_some() {
            Mode::Reverse
        } else {
            Mode::Forward
        };
        let client = Client {
            peer: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            mode,
            is_tls: uri.scheme_str() == Some("https"),
        };
        let request = Request::builder()
            .method(Method::GET)
            .uri(uri)
            .header(header::HOST, authority.as_str());
        let (mut parts, ()) = request
            .body(())
            .map_err(|error| format!("{url}: {error}"))?
            .into_parts();
        parts.headers.extend(fields.clone());
        let answer = match Asked::of(&live, client, parts) {
            Ok(asked) if asked.is_cacheable() => self.cached(&live, Arc::new(asked)).await,
            Ok(_) => Answer::refuse(StatusCode::BAD_REQUEST, "Nothing of this URL can be stored."),
            Err(refusal) => *refusal,
        };
        let status = answer.response.status();
        let mut body = answer.response.into_body();
        let (mut bytes, mut is_whole) = (0, true);
        while let Some(frame) = body.frame().await {
            match frame {
                Ok(frame) => bytes += frame.data_ref().map_or(0, bytes::Bytes::len) as u64,
                Err(_) => {
                    is_whole = false;
                    break;
                }
            }
        }
        Ok(Warmed {
            status,
            outcome: answer.outcome,
            bytes,
            is_whole,
        })
    }
}
