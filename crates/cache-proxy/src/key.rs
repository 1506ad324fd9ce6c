//! Keys of the cache: scheme, authority, path and query, written as the URL itself, so that whole prefixes
//! can be purged.

use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, HeaderName};
use std::fmt::Write;
use std::ops::Range;

/// Longest key, bytes; requests with longer keys are not cached. The store takes 2,048 bytes, and parts of a
/// response need a suffix.
pub const KEY_MAX: usize = 1990;

/// Key of a response in the store, without the suffix of a variant.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key {
    text: String,
    /// Host and port within `text`.
    host: Range<usize>,
    /// Bytes of the URL at the beginning of `text`.
    url_len: usize,
}

impl Key {
    /// Makes the key of a request.
    pub fn new(scheme: &str, authority: &Authority, path: &PathAndQuery) -> Self {
        const BETWEEN: &str = "://";
        let (len, most) = (scheme.len() + BETWEEN.len(), authority.as_str().len());
        let mut text = String::with_capacity(len + most + path.as_str().len());
        text.push_str(scheme);
        text.push_str(BETWEEN);
        push_authority(&mut text, scheme, authority);
        let host = len..text.len();
        text.push_str(path.as_str());
        Self {
            url_len: text.len(),
            text,
            host,
        }
    }

    /// Makes the key of a URL that an operator typed.
    pub fn of_url(url: &str) -> Option<Self> {
        let uri: http::Uri = url.parse().ok()?;
        let path = uri
            .path_and_query()
            .cloned()
            .unwrap_or_else(|| PathAndQuery::from_static("/"));
        Some(Self::new(
            &uri.scheme_str()?.to_ascii_lowercase(),
            uri.authority()?,
            &path,
        ))
    }

    /// Makes the key of the forward mode. A response stored in one mode is never served in the other: in
    /// reverse mode the administrator configures a name's origin, in forward mode DNS resolves it.
    #[must_use]
    pub fn forward(mut self) -> Self {
        // A URL has no space, so this cannot be the key of another URL.
        self.text.push_str(" forward");
        self
    }

    /// Adds request fields that are part of the key.
    #[must_use]
    pub fn with_fields(mut self, names: &[HeaderName], headers: &HeaderMap) -> Self {
        for name in names {
            for value in headers.get_all(name) {
                let value = String::from_utf8_lossy(value.as_bytes());
                // A URL has no space; the length keeps one field's value from looking like two fields.
                self.text.push_str(&format!(" {name}:{}:{value}", value.len()));
            }
        }
        self
    }

    /// Returns the URL, without mode and fields.
    pub fn url(&self) -> &str {
        &self.text[..self.url_len]
    }

    /// Returns the tag under which every response of a URL with request fields in its key is stored, so that
    /// one purge reaches all of them. No tag that an origin gives is equal to it: those have no line feed.
    pub fn url_tag(&self) -> Vec<u8> {
        format!("\nurl\n{}", self.url()).into_bytes()
    }

    /// Whether request fields are part of the key.
    pub fn has_fields(&self) -> bool {
        !matches!(&self.text[self.url_len..], "" | " forward")
    }

    /// Whether the key is short enough to store a response under it.
    pub fn fits(&self) -> bool {
        self.text.len() <= KEY_MAX
    }

    /// Returns the key as bytes.
    pub fn bytes(&self) -> &[u8] {
        self.text.as_bytes()
    }

    /// Returns the key as text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns host and port, for purges by host.
    pub fn host(&self) -> &str {
        &self.text[self.host.clone()]
    }

    /// Makes the key of a part: a variant or a body. A URL has no line feed, so this cannot be the key of a
    /// URL.
    pub fn part(&self, kind: char, id: u64) -> Vec<u8> {
        format!("{}\n{kind}{id:016x}", self.text).into_bytes()
    }
}

/// Normalizes host and port: lower case, without the scheme's default port.
pub fn normal_authority(scheme: &str, authority: &Authority) -> String {
    let mut text = String::new();
    push_authority(&mut text, scheme, authority);
    text
}

fn push_authority(text: &mut String, scheme: &str, authority: &Authority) {
    let host = authority.host();
    let start = text.len();
    text.push_str(host.strip_suffix('.').unwrap_or(host));
    text[start..].make_ascii_lowercase();
    match (scheme, authority.port_u16()) {
        (_, None) | ("http", Some(80)) | ("https", Some(443)) => {}
        (_, Some(port)) => {
            // Writing to a string cannot fail.
            let _ = write!(text, ":{port}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn key_is_the_url_without_what_means_nothing() {
        let key = |url| Key::of_url(url).expect("a URL").text().to_owned();
        assert_eq!(key("http://EXAMPLE.org.:80/A?b"), "http://example.org/A?b");
        assert_eq!(key("HTTPS://example.org:80"), "https://example.org:80/");
        assert_eq!(Key::of_url("/path"), None);
    }

    #[test]
    fn fields_of_the_key_cannot_look_like_others() {
        let names = [HeaderName::from_static("a"), HeaderName::from_static("b")];
        let key = |a: &'static str, b: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            headers.insert("a", HeaderValue::from_static(a));
            b.map(|b| headers.insert("b", HeaderValue::from_static(b)));
            Key::of_url("http://h/")
                .expect("a URL")
                .with_fields(&names, &headers)
        };
        assert_ne!(key("1 b:1:2", None), key("1", Some("2")));
        assert!(key("1", None).has_fields());
        assert_eq!(key("1", None).url_tag(), key("2", Some("3")).url_tag());
        let plain = Key::of_url("http://h/").expect("a URL");
        assert!(!plain.has_fields() && !plain.forward().has_fields());
    }
}
