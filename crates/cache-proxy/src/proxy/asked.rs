//! A parsed request, without the fields that must not be forwarded.

use super::{Answer, Live, is_forward};
use crate::cache_control::CacheControl;
use crate::config::Mode;
use crate::framing::{host_of, is_host};
use crate::headers;
use crate::key::{Key, normal_authority};
use http::header::{self, HeaderMap};
use http::request::Parts;
use http::uri::{Authority, PathAndQuery};
use http::{Method, StatusCode};
use std::net::{IpAddr, SocketAddr};

/// The client and listener of a request.
#[derive(Debug, Clone, Copy)]
pub struct Client {
    /// Address of the client.
    pub peer: SocketAddr,
    /// Mode of the listener.
    pub mode: Mode,
    /// Whether the connection is encrypted.
    pub is_tls: bool,
}

/// A request to answer.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Address of the client.
    pub client: IpAddr,
    /// The method.
    pub method: Method,
    /// End-to-end fields, without those that origins may reflect.
    pub headers: HeaderMap,
    /// `http` or `https`.
    pub scheme: &'static str,
    /// Authority of the target.
    pub authority: Authority,
    /// Path and query of the target.
    pub path: PathAndQuery,
    /// The mode of the listener.
    pub mode: Mode,
    /// The site, in reverse mode.
    pub site: usize,
    /// Key of the response in the store.
    pub key: Key,
    /// The parsed `Cache-Control`.
    pub directives: CacheControl,
}

impl Asked {
    /// Parses a request of a client that may use this proxy; the error is the refusal to answer with.
    pub fn of(live: &Live, client: Client, parts: Parts) -> Result<Self, Box<Answer>> {
        let refuse = |status, text| Box::new(Answer::refuse(status, text));
        let bad = |text| refuse(StatusCode::BAD_REQUEST, text);
        let authority = authority_of(&parts).map_err(bad)?;
        let scheme = if is_forward(client.mode) {
            match parts.uri.scheme_str() {
                Some("http") => "http",
                Some("https") => "https",
                _ => {
                    return Err(bad(
                        "This is a forward proxy: ask for a whole URL, with http:// or https://.",
                    ));
                }
            }
        } else if client.is_tls {
            "https"
        } else {
            "http"
        };
        let site = if is_forward(client.mode) {
            let port = authority
                .port_u16()
                .unwrap_or(if scheme == "https" { 443 } else { 80 });
            if !live.config.forward.ports.contains(&port) {
                return Err(refuse(
                    StatusCode::FORBIDDEN,
                    "This proxy does not go to that port (forward.ports).",
                ));
            }
            0
        } else {
            let site = live.config.site_of(&authority);
            site.ok_or_else(|| {
                refuse(
                    StatusCode::MISDIRECTED_REQUEST,
                    "No site of that name is served here.",
                )
            })?
            .0
        };
        let path = match parts.uri.path_and_query() {
            Some(path) if path.as_str() == "*" => return Err(bad("A request for * is not served.")),
            Some(path) if path.as_str().starts_with('/') => path.clone(),
            Some(path) => format!("/{path}")
                .parse()
                .map_err(|_| bad("The path is malformed."))?,
            None => PathAndQuery::from_static("/"),
        };
        let mut headers = parts.headers;
        let directives = CacheControl::of_request(&headers);
        headers::strip_hop_by_hop(&mut headers);
        headers::strip_forwarding(&mut headers, &live.key_headers);
        for name in [header::EXPECT, header::HOST, header::MAX_FORWARDS] {
            headers.remove(name);
        }
        let mut key = Key::new(scheme, &authority, &path);
        if is_forward(client.mode) {
            key = key.forward();
        }
        let key = key.with_fields(&live.key_headers, &headers);
        Ok(Self {
            client: client.peer.ip().to_canonical(),
            method: parts.method,
            headers,
            scheme,
            authority,
            path,
            mode: client.mode,
            site,
            key,
            directives,
        })
    }

    /// Whether an answer may come from the store.
    pub fn is_cacheable(&self) -> bool {
        matches!(self.method, Method::GET | Method::HEAD)
            && self.key.fits()
            && !self.directives.no_store
            && !self.headers.contains_key(header::IF_MATCH)
            && !self.headers.contains_key(header::IF_UNMODIFIED_SINCE)
    }

    /// Returns the key of a URL that a response names, if it is on the same host.
    pub fn key_nearby(&self, reference: &str) -> Option<Key> {
        let absolute = if reference.contains("://") {
            reference.to_owned()
        } else if let Some(rest) = reference.strip_prefix("//") {
            format!("{}://{rest}", self.scheme)
        } else if reference.starts_with('/') {
            format!("{}://{}{reference}", self.scheme, self.authority)
        } else {
            let folder = self.path.path().rsplit_once('/').map_or("", |(folder, _)| folder);
            format!("{}://{}{folder}/{reference}", self.scheme, self.authority)
        };
        let key = Key::of_url(absolute.split('#').next()?)?;
        let is_near = key.host() == normal_authority(self.scheme, &self.authority);
        let key = if is_forward(self.mode) { key.forward() } else { key };
        is_near.then_some(key)
    }
}

/// Returns the authority of a request: that of the target, or `Host`. If both are given, they must be equal.
fn authority_of(parts: &Parts) -> Result<Authority, &'static str> {
    let mut hosts = parts.headers.get_all(header::HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (_, Some(_)) => return Err("Host is there twice."),
        (Some(host), None) => {
            let host = host.to_str().ok().and_then(host_of);
            Some(host.ok_or("Host is malformed.")?)
        }
        (None, None) => None,
    };
    match (parts.uri.authority(), host) {
        (Some(target), _) if !is_host(target.as_str()) => Err("The target's authority is malformed."),
        (Some(target), Some(host)) => {
            let scheme = parts.uri.scheme_str().unwrap_or("http");
            if normal_authority(scheme, target) == normal_authority(scheme, &host) {
                Ok(target.clone())
            } else {
                Err("Host is not that of the target.")
            }
        }
        (Some(target), None) => Ok(target.clone()),
        (None, Some(host)) => Ok(host),
        (None, None) => Err("Host is missing."),
    }
}
