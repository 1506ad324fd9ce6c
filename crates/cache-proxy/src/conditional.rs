//! Conditions of requests (RFC 9110 §13) against a stored response, and the conditions with which the proxy
//! asks the origin whether its stored response is still valid.

use crate::headers;
use http::header::{self, HeaderMap, HeaderValue};

/// Fields of a request that make it conditional.
pub const CONDITIONS: [header::HeaderName; 5] = [
    header::IF_NONE_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_MATCH,
    header::IF_UNMODIFIED_SINCE,
    header::IF_RANGE,
];

/// Splits an entity tag into its opaque part and whether it is weak.
fn opaque(tag: &str) -> (&str, bool) {
    tag.strip_prefix("W/").map_or((tag, false), |tag| (tag, true))
}

/// Whether the client already has the stored response; the answer then is 304.
pub fn is_not_modified(request: &HeaderMap, stored: &HeaderMap) -> bool {
    if request.contains_key(header::IF_NONE_MATCH) {
        let Some(tag) = headers::single(stored, &header::ETAG) else {
            return headers::list(request, &header::IF_NONE_MATCH).any(|asked| asked == "*");
        };
        return headers::list(request, &header::IF_NONE_MATCH)
            .any(|asked| asked == "*" || opaque(asked).0 == opaque(tag).0);
    }
    let Some(since_s) = headers::date_s(request, &header::IF_MODIFIED_SINCE) else {
        return false;
    };
    let changed_s =
        headers::date_s(stored, &header::LAST_MODIFIED).or_else(|| headers::date_s(stored, &header::DATE));
    changed_s.is_some_and(|changed_s| changed_s <= since_s)
}

/// Whether `If-Range` allows a partial answer; true without `If-Range`.
pub fn range_holds(request: &HeaderMap, stored: &HeaderMap) -> bool {
    if !request.contains_key(header::IF_RANGE) {
        return true;
    }
    let Some(asked) = headers::single(request, &header::IF_RANGE) else {
        return false;
    };
    if let Some(tag) = headers::single(stored, &header::ETAG)
        && asked == tag
    {
        return !opaque(tag).1;
    }
    // A date matches only if it equals the stored `Last-Modified` and is a strong validator: at least a
    // second before `Date`.
    let (asked_s, changed_s) = (
        headers::parse_date_s(asked),
        headers::date_s(stored, &header::LAST_MODIFIED),
    );
    match (asked_s, changed_s, headers::date_s(stored, &header::DATE)) {
        (Some(asked_s), Some(changed_s), Some(date_s)) => asked_s == changed_s && changed_s < date_s,
        _ => false,
    }
}

/// Adds the validators of a stored response as conditions to a request to the origin. Returns false if it has
/// none.
pub fn ask_for_changes(request: &mut HeaderMap, stored: &HeaderMap) -> bool {
    for name in CONDITIONS {
        request.remove(name);
    }
    let tag = headers::single(stored, &header::ETAG).and_then(|tag| HeaderValue::from_str(tag).ok());
    let changed = headers::date_s(stored, &header::LAST_MODIFIED)
        .and_then(|_| stored.get(header::LAST_MODIFIED).cloned());
    let asks = tag.is_some() || changed.is_some();
    if let Some(tag) = tag {
        request.insert(header::IF_NONE_MATCH, tag);
    }
    if let Some(changed) = changed {
        request.insert(header::IF_MODIFIED_SINCE, changed);
    }
    asks
}

/// Whether a 304 is about the stored response (RFC 9111 §4.3.4). The proxy asks about one entity tag only, so
/// the answer is about it, even if the origin sends another tag.
pub fn speaks_of(not_modified: &HeaderMap, stored: &HeaderMap) -> bool {
    if stored.contains_key(header::ETAG) {
        return true;
    }
    match (
        not_modified.get(header::LAST_MODIFIED),
        stored.get(header::LAST_MODIFIED),
    ) {
        (Some(new), Some(old)) => new == old,
        _ => !not_modified.contains_key(header::ETAG),
    }
}

/// Fields that describe the stored bytes: a 304 or a HEAD does not change them (RFC 9111 §3.2).
const OF_THE_BYTES: [&str; 5] = [
    "content-encoding",
    "content-length",
    "content-md5",
    "content-range",
    "etag",
];

/// Updates the stored fields with those of a 304 or of a response to HEAD.
pub fn update(stored: &mut HeaderMap, new: &HeaderMap) {
    let names: Vec<_> = new
        .keys()
        .filter(|name| !OF_THE_BYTES.contains(&name.as_str()))
        .cloned()
        .collect();
    // If the update has no Age, the old one must not stay: it belongs to the old response.
    stored.remove(header::AGE);
    for name in names {
        stored.remove(&name);
        for value in new.get_all(&name) {
            stored.append(&name, value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderName;

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = fields
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        pairs.collect()
    }

    #[test]
    fn entity_tags_compare_weakly_for_304_and_strongly_for_ranges() {
        let stored = map(&[("etag", "W/\"a\"")]);
        assert!(is_not_modified(
            &map(&[("if-none-match", "\"b\", \"a\"")]),
            &stored
        ));
        assert!(!is_not_modified(&map(&[("if-none-match", "\"b\"")]), &stored));
        assert!(!range_holds(&map(&[("if-range", "W/\"a\"")]), &stored));
        assert!(range_holds(
            &map(&[("if-range", "\"a\"")]),
            &map(&[("etag", "\"a\"")])
        ));
    }

    #[test]
    fn date_holds_for_ranges_only_when_it_is_exact_and_strong() {
        let stored = map(&[
            ("last-modified", "Thu, 01 Jan 1970 00:00:10 GMT"),
            ("date", "Thu, 01 Jan 1970 00:01:00 GMT"),
        ]);
        assert!(range_holds(
            &map(&[("if-range", "Thu, 01 Jan 1970 00:00:10 GMT")]),
            &stored
        ));
        assert!(!range_holds(
            &map(&[("if-range", "Thu, 01 Jan 1970 00:00:11 GMT")]),
            &stored
        ));
        assert!(is_not_modified(
            &map(&[("if-modified-since", "Thu, 01 Jan 1970 00:00:11 GMT")]),
            &stored
        ));
    }

    #[test]
    fn update_leaves_what_describes_the_bytes() {
        let mut stored = map(&[
            ("etag", "\"a\""),
            ("content-length", "3"),
            ("x", "1"),
            ("age", "9"),
        ]);
        update(
            &mut stored,
            &map(&[("etag", "\"b\""), ("content-length", "0"), ("x", "2"), ("y", "3")]),
        );
        assert_eq!(
            stored,
            map(&[("etag", "\"a\""), ("content-length", "3"), ("x", "2"), ("y", "3")])
        );
    }
}
