//! `Cache-Control` of requests and responses (RFC 9111 §5.2, RFC 5861, RFC 8246), and `Surrogate-Control`.
//! Parses only: `policy` interprets the directives.

use crate::headers;
use http::header::{self, HeaderMap, HeaderName};

/// Largest lifetime in seconds; greater values are clamped to it (RFC 9111 §1.2.2).
pub const SECONDS_MAX: u64 = 1 << 31;

/// Directives of a message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheControl {
    /// `no-store`.
    pub no_store: bool,
    /// `no-cache` without fields.
    pub no_cache: bool,
    /// Fields that `no-cache="…"` names.
    pub no_cache_fields: Vec<HeaderName>,
    /// `private` without fields.
    pub private: bool,
    /// Fields that `private="…"` names.
    pub private_fields: Vec<HeaderName>,
    /// `public`.
    pub public: bool,
    /// `must-revalidate`.
    pub must_revalidate: bool,
    /// `proxy-revalidate`.
    pub proxy_revalidate: bool,
    /// `must-understand`.
    pub must_understand: bool,
    /// `only-if-cached`.
    pub only_if_cached: bool,
    /// `max-age`, seconds.
    pub max_age: Option<u64>,
    /// `s-maxage`, seconds.
    pub s_maxage: Option<u64>,
    /// `max-stale`, seconds; any if it had no value.
    pub max_stale: Option<u64>,
    /// `min-fresh`, seconds.
    pub min_fresh: Option<u64>,
    /// `stale-while-revalidate`, seconds.
    pub stale_while_revalidate: Option<u64>,
    /// `stale-if-error`, seconds.
    pub stale_if_error: Option<u64>,
}

/// Parses digits as seconds; `None` if the value has any other character.
fn seconds(value: &str) -> Option<u64> {
    if value.is_empty() || !value.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // A number that overflows is clamped, not rejected.
    Some(value.parse().unwrap_or(SECONDS_MAX).min(SECONDS_MAX))
}

fn unquote(value: &str) -> &str {
    value
        .strip_prefix('"')
        .and_then(|value| value.strip_suffix('"'))
        .unwrap_or(value)
}

/// Merges a lifetime of a response into `slot`: a malformed value counts as 0, and of two the shorter holds.
fn lifetime(slot: &mut Option<u64>, value: Option<&str>) {
    let value = value.and_then(seconds).unwrap_or(0);
    *slot = Some(slot.map_or(value, |old| old.min(value)));
}

fn fields(into: &mut Vec<HeaderName>, value: &str) {
    into.extend(
        headers::split_list(value)
            .into_iter()
            .filter_map(|name| HeaderName::from_bytes(name.as_bytes()).ok()),
    );
}

impl CacheControl {
    /// Parses the directives of `Cache-Control`.
    pub fn of(headers: &HeaderMap) -> Self {
        let mut all = Self::default();
        for member in headers::list(headers, &header::CACHE_CONTROL) {
            all.take(member);
        }
        all
    }

    /// Parses the directives of a request: `Pragma: no-cache` counts where there is no `Cache-Control`.
    pub fn of_request(headers: &HeaderMap) -> Self {
        let mut all = Self::of(headers);
        if !headers.contains_key(header::CACHE_CONTROL) {
            all.no_cache =
                headers::list(headers, &header::PRAGMA).any(|word| word.eq_ignore_ascii_case("no-cache"));
        }
        all
    }

    /// Parses the directives of `Surrogate-Control` that are addressed to everybody or to `me`; `None` if
    /// there are none.
    pub fn of_surrogate(headers: &HeaderMap, me: &str) -> Option<Self> {
        let name = HeaderName::from_static("surrogate-control");
        if !headers.contains_key(&name) {
            return None;
        }
        let mut all = Self::default();
        let mut mine = Self::default();
        let mut has_mine = false;
        let mut any = false;
        for member in headers::list(headers, &name) {
            let (directive, target) = member
                .split_once(';')
                .map_or((member, None), |(directive, target)| {
                    (directive.trim_end(), Some(target.trim()))
                });
            match target {
                None => {
                    any |= known_to_surrogates(directive);
                    all.take(directive);
                }
                Some(target) if target == me => {
                    has_mine |= known_to_surrogates(directive);
                    mine.take(directive);
                }
                Some(_) => {}
            }
        }
        if has_mine {
            return Some(mine);
        }
        any.then_some(all)
    }

    fn take(&mut self, member: &str) {
        let (name, value) = match member.split_once('=') {
            Some((name, value)) => (name, Some(unquote(value))),
            None => (member, None),
        };
        match (name.to_ascii_lowercase().as_str(), value) {
            ("no-store", _) => self.no_store = true,
            ("no-cache", None) => self.no_cache = true,
            ("no-cache", Some(names)) => fields(&mut self.no_cache_fields, names),
            ("private", None) => self.private = true,
            ("private", Some(names)) => fields(&mut self.private_fields, names),
            ("public", _) => self.public = true,
            ("must-revalidate", _) => self.must_revalidate = true,
            ("proxy-revalidate", _) => self.proxy_revalidate = true,
            ("must-understand", _) => self.must_understand = true,
            ("only-if-cached", _) => self.only_if_cached = true,
            ("max-age", value) => lifetime(&mut self.max_age, value),
            ("s-maxage", value) => lifetime(&mut self.s_maxage, value),
            ("max-stale", None) => self.max_stale = Some(SECONDS_MAX),
            ("max-stale", Some(value)) => self.max_stale = seconds(value),
            ("min-fresh", Some(value)) => self.min_fresh = seconds(value),
            ("stale-while-revalidate", Some(value)) => self.stale_while_revalidate = seconds(value),
            ("stale-if-error", Some(value)) => self.stale_if_error = seconds(value),
            _ => {}
        }
    }
}

fn known_to_surrogates(directive: &str) -> bool {
    let name = directive.split_once('=').map_or(directive, |(name, _)| name);
    ["max-age", "no-store"]
        .iter()
        .any(|known| name.eq_ignore_ascii_case(known))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn of(value: &'static str) -> CacheControl {
        let mut headers = HeaderMap::new();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(value));
        CacheControl::of(&headers)
    }

    #[test]
    fn lifetime_takes_digits_only_and_the_shorter_of_two() {
        assert_eq!(of("max-age=003600").max_age, Some(3600));
        assert_eq!(of("MaX-AgE=\"60\"").max_age, Some(60));
        assert_eq!(of("max-age='60'").max_age, Some(0));
        assert_eq!(of("max-age=-1").max_age, Some(0));
        assert_eq!(of("max-age=1.5").max_age, Some(0));
        assert_eq!(of("max-age").max_age, Some(0));
        assert_eq!(of("max-age=60, max-age=5").max_age, Some(5));
        assert_eq!(of("max-age=99999999999999999999999").max_age, Some(SECONDS_MAX));
    }

    #[test]
    fn directives_within_quotes_are_not_seen() {
        let all = of(r#"extension="max-age=3600, no-store", max-age=1"#);
        assert_eq!((all.max_age, all.no_store), (Some(1), false));
    }

    #[test]
    fn fields_of_no_cache_and_private_do_not_count_for_the_whole() {
        let all = of(r#"no-cache="a, b", private="c""#);
        assert_eq!((all.no_cache_fields.len(), all.private_fields.len()), (2, 1));
        assert!(!all.no_cache && !all.private);
    }

    #[test]
    fn surrogate_control_prefers_what_is_meant_for_this_proxy() {
        let mut headers = HeaderMap::new();
        assert_eq!(CacheControl::of_surrogate(&headers, "me"), None);
        let value = HeaderValue::from_static("max-age=1, max-age=9;me, no-store;other");
        headers.insert("surrogate-control", value);
        let mine = CacheControl::of_surrogate(&headers, "me").expect("there is one");
        assert_eq!((mine.max_age, mine.no_store), (Some(9), false));
    }
}
