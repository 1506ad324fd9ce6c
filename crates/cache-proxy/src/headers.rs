//! Header fields: lists, dates, and which of them may cross a proxy. Knows nothing of caches.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Fields that belong to one connection (RFC 9110 §7.6.1), or to a proxy and its client.
const HOP_BY_HOP: [&str; 12] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authentication-info",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "http2-settings",
    "proxy-status",
];

/// Request fields that origins may reflect into a response or route by, though they are in no cache key.
const FORWARDING: [&str; 16] = [
    "forwarded",
    "forwarded-for",
    "x-host",
    "x-http-host-override",
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
    "x-url-scheme",
    "front-end-https",
    "x-real-ip",
    "x-client-ip",
    "x-cluster-client-ip",
    "client-ip",
    "true-client-ip",
    "x-proxyuser-ip",
    "proxy",
];

/// Prefixes of further such fields, which are too many to list.
const FORWARDING_PREFIXES: [&str; 3] = ["x-forwarded", "x-original-", "x-rewrite-"];

/// Removes the fields of one connection: the known ones, and those that `Connection` names.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = list(headers, &header::CONNECTION)
        .filter_map(|name| HeaderName::from_bytes(name.as_bytes()).ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    // Most messages have one of them at most: looking at what is there is cheaper than asking for each.
    let is_known = |name: &&HeaderName| HOP_BY_HOP.contains(&name.as_str());
    while let Some(name) = headers.keys().find(is_known).cloned() {
        headers.remove(name);
    }
}

/// Removes request fields that origins may reflect, except for those that are part of the key.
pub fn strip_forwarding(headers: &mut HeaderMap, keyed: &[HeaderName]) {
    let reflects = |name: &&HeaderName| {
        let text = name.as_str();
        FORWARDING.contains(&text) || FORWARDING_PREFIXES.iter().any(|prefix| text.starts_with(prefix))
    };
    let names: Vec<HeaderName> = headers.keys().filter(reflects).cloned().collect();
    for name in names.iter().filter(|name| !keyed.contains(name)) {
        headers.remove(name);
    }
}

/// Iterates over the members of a list field in all its lines. Commas within quotes do not separate; empty
/// members are left out.
pub fn list<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> + use<'a> {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(split_list)
}

/// Splits one line of a list field into its members.
pub fn split_list(line: &str) -> Vec<&str> {
    let (mut members, mut start, mut quoted, mut escaped) = (Vec::new(), 0, false, false);
    for (at, byte) in line.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b',' if !quoted => {
                members.push(&line[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    members.push(&line[start..]);
    members.retain_mut(|member| {
        *member = member.trim_matches([' ', '\t']);
        !member.is_empty()
    });
    members
}

/// Returns the value of a field that has exactly one line, if it is text.
pub fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut lines = headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (Some(line), None) => line.to_str().ok(),
        _ => None,
    }
}

/// Parses a date field to seconds since 1970; `None` if it is missing, repeated, or not an HTTP date.
pub fn date_s(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    parse_date_s(single(headers, name)?)
}

/// Parses an HTTP date to seconds since 1970.
pub fn parse_date_s(text: &str) -> Option<u64> {
    let time = httpdate::parse_http_date(text).ok()?;
    Some(time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}

/// Formats seconds since 1970 as an HTTP date.
pub fn format_date(date_s: u64) -> HeaderValue {
    // The format has room for four digits of the year.
    let date_s = date_s.min(253_402_300_799);
    let text = httpdate::fmt_http_date(SystemTime::UNIX_EPOCH + Duration::from_secs(date_s));
    HeaderValue::from_str(&text).unwrap_or_else(|_| HeaderValue::from_static("Thu, 01 Jan 1970 00:00:00 GMT"))
}

/// Returns the time in milliseconds since 1970.
pub fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// Returns fields in memory of their own. The values of a message share the buffer that it was read into, so
/// that whoever keeps one keeps all of the buffer.
pub fn unshared(headers: &HeaderMap) -> HeaderMap {
    let own = headers.iter().filter_map(|(name, value)| {
        // The bytes are those of a value, so none is refused.
        let copy = HeaderValue::from_bytes(value.as_bytes()).ok()?;
        Some((name.clone(), copy))
    });
    own.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_parts_at_commas_outside_of_quotes() {
        assert_eq!(
            split_list(r#" a, b="c, d" ,, "x\",y" "#),
            ["a", r#"b="c, d""#, r#""x\",y""#]
        );
    }

    #[test]
    fn strip_hop_by_hop_removes_what_connection_names() {
        let mut headers = HeaderMap::new();
        headers.insert("connection", HeaderValue::from_static("close, X-Private"));
        headers.insert("x-private", HeaderValue::from_static("1"));
        headers.insert("te", HeaderValue::from_static("trailers"));
        headers.insert("x-kept", HeaderValue::from_static("1"));
        strip_hop_by_hop(&mut headers);
        assert_eq!(
            headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(),
            ["x-kept"]
        );
    }

    #[test]
    fn forwarding_fields_go_unless_they_are_keyed() {
        let mut headers = HeaderMap::new();
        headers.insert("x-forwarded-host", HeaderValue::from_static("evil"));
        headers.insert("x-forwarded-proto", HeaderValue::from_static("https"));
        strip_forwarding(&mut headers, &[HeaderName::from_static("x-forwarded-proto")]);
        assert_eq!(headers.len(), 1);
    }

    #[test]
    fn date_is_none_when_it_is_there_twice() {
        let mut headers = HeaderMap::new();
        let value = HeaderValue::from_static("Sun, 06 Nov 1994 08:49:37 GMT");
        headers.append("expires", value.clone());
        assert_eq!(date_s(&headers, &header::EXPIRES), Some(784_111_777));
        headers.append("expires", value);
        assert_eq!(date_s(&headers, &header::EXPIRES), None);
        assert_eq!(format_date(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
    }

    #[test]
    fn unshared_fields_do_not_keep_the_buffer_that_they_came_in() {
        let buffer = bytes::Bytes::from(vec![b'x'; 8192]);
        let mut fields = HeaderMap::new();
        for at in 0..3 {
            let value = HeaderValue::from_maybe_shared(buffer.slice(at..at + 4));
            fields.append("x-field", value.expect("a value"));
        }
        let own = unshared(&fields);
        assert_eq!(own, fields);
        drop(fields);
        assert!(buffer.is_unique());
    }
}
