//! The rules of a shared cache: which responses it may store, how long they are fresh, and when it may serve
//! them stale (RFC 9111 §3, §4.2; RFC 5861). Pure: headers and times in, verdicts out.

use crate::cache_control::{CacheControl, SECONDS_MAX};
use crate::headers;
use http::header::{self, HeaderMap};
use http::{Method, StatusCode};

/// The name by which `Surrogate-Control` may address this proxy.
pub const SURROGATE: &str = "varve";

/// Settings of the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Whether responses with `Set-Cookie` are stored.
    pub store_set_cookie: bool,
    /// Whether `Surrogate-Control` is honoured: the proxy acts for the origin.
    pub surrogate: bool,
    /// Percent of the time since the last change for which a response without a lifetime is fresh.
    pub heuristic_percent: u64,
    /// Longest heuristic lifetime, seconds.
    pub heuristic_max_s: u64,
    /// `stale-if-error` of responses that have no such directive, seconds.
    pub stale_if_error_s: u64,
}

/// Why a response is not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotStored {
    /// The method is not GET.
    Method,
    /// The status forbids it, or the proxy does not understand it.
    Status,
    /// The request or the response forbids it.
    NoStore,
    /// The response is private to one user.
    Private,
    /// The request had `Authorization`, and no directive of the response allows to store it.
    Authorization,
    /// The response sets cookies.
    SetCookie,
    /// `Vary: *`: no request field selects the response.
    VaryAny,
    /// The response has neither a lifetime nor a validator.
    NoLifetime,
}

/// Age, lifetime and reuse limits of a stored response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Freshness {
    /// Seconds for which it is fresh.
    pub lifetime_s: u64,
    /// Its age in seconds.
    pub age_s: u64,
    /// It is never served without asking the origin.
    pub no_cache: bool,
    /// It is never served stale.
    pub no_stale: bool,
    /// Seconds after its lifetime in which it may be served while the origin is asked.
    pub stale_while_revalidate_s: u64,
    /// Seconds after its lifetime in which it may be served if the origin fails.
    pub stale_if_error_s: u64,
}

/// The permitted use of a stored response for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reuse {
    /// As it is.
    Fresh,
    /// As it is, while the origin is asked.
    WhileRevalidating,
    /// Only after validation by the origin.
    Revalidate {
        /// Whether it may be served if the origin fails.
        or_stale: bool,
    },
}

/// Statuses whose meaning for caches the proxy knows: all final ones that RFC 9110 defines.
fn is_understood(status: StatusCode) -> bool {
    matches!(status.as_u16(), 200 | 203 | 204 | 300..=303 | 307 | 308 | 400..=417 | 421 | 422 | 426 | 451 | 500..=505)
}

/// Statuses that may be stored without a lifetime of their own (RFC 9110 §15.1).
pub fn is_heuristic(status: StatusCode) -> bool {
    matches!(
        status.as_u16(),
        200 | 203 | 204 | 300 | 301 | 308 | 404 | 405 | 410 | 414 | 501
    )
}

/// Whether the proxy may store a response.
///
/// # Errors
/// The reason why it may not.
pub fn may_store(
    method: &Method,
    request: &HeaderMap,
    status: StatusCode,
    response: &HeaderMap,
    rules: &Rules,
) -> Result<(), NotStored> {
    if method != Method::GET {
        return Err(NotStored::Method);
    }
    let asked = CacheControl::of(request);
    let surrogate = surrogate_of(response, rules);
    let said = surrogate.clone().unwrap_or_else(|| CacheControl::of(response));
    if status.is_informational() || matches!(status.as_u16(), 206 | 304) {
        return Err(NotStored::Status);
    }
    let knows = is_understood(status);
    if said.must_understand && !knows {
        return Err(NotStored::Status);
    }
    // RFC 9111 §5.2.2.3: a cache that understands the status may ignore a `no-store` beside
    // `must-understand`.
    if asked.no_store || (said.no_store && !(said.must_understand && knows)) {
        return Err(NotStored::NoStore);
    }
    if said.private {
        return Err(NotStored::Private);
    }
    if request.contains_key(header::AUTHORIZATION)
        && !(said.public || said.must_revalidate || said.s_maxage.is_some())
    {
        return Err(NotStored::Authorization);
    }
    if response.contains_key(header::SET_COOKIE) && !rules.store_set_cookie {
        return Err(NotStored::SetCookie);
    }
    if headers::list(response, &header::VARY).any(|name| name == "*") {
        return Err(NotStored::VaryAny);
    }
    let explicit = said.max_age.is_some()
        || said.s_maxage.is_some()
        || (surrogate.is_none() && response.contains_key(header::EXPIRES));
    if !(explicit || is_heuristic(status) || said.public) {
        return Err(NotStored::Status);
    }
    let validator = response.contains_key(header::ETAG) || response.contains_key(header::LAST_MODIFIED);
    if explicit || validator {
        Ok(())
    } else {
        Err(NotStored::NoLifetime)
    }
}

fn surrogate_of(response: &HeaderMap, rules: &Rules) -> Option<CacheControl> {
    rules
        .surrogate
        .then(|| CacheControl::of_surrogate(response, SURROGATE))
        .flatten()
}

/// Returns the `Age` of a response: 0 without one, and the maximum if it is malformed.
fn age_value_s(response: &HeaderMap) -> u64 {
    if !response.contains_key(header::AGE) {
        return 0;
    }
    headers::single(response, &header::AGE)
        .filter(|age| !age.is_empty() && age.bytes().all(|byte| byte.is_ascii_digit()))
        .map_or(SECONDS_MAX, |age| {
            age.parse().unwrap_or(SECONDS_MAX).min(SECONDS_MAX)
        })
}

/// Returns the age of a response (RFC 9111 §4.2.3), seconds.
pub fn age_s(response: &HeaderMap, asked_ms: u64, came_ms: u64, now_ms: u64) -> u64 {
    let came_s = came_ms / 1000;
    let apparent = headers::date_s(response, &header::DATE).map_or(0, |date_s| came_s.saturating_sub(date_s));
    let delay_s = came_ms.saturating_sub(asked_ms) / 1000;
    let corrected = age_value_s(response).saturating_add(delay_s);
    let resident_s = now_ms.saturating_sub(came_ms) / 1000;
    apparent
        .max(corrected)
        .saturating_add(resident_s)
        .min(SECONDS_MAX)
}

fn lifetime_s(
    said: &CacheControl,
    surrogate: bool,
    status: StatusCode,
    response: &HeaderMap,
    came_s: u64,
    rules: &Rules,
) -> u64 {
    if let Some(explicit) = said.s_maxage.or(said.max_age) {
        return explicit;
    }
    if surrogate {
        return 0;
    }
    let date_s = headers::date_s(response, &header::DATE).unwrap_or(came_s);
    if response.contains_key(header::EXPIRES) {
        return headers::date_s(response, &header::EXPIRES)
            .map_or(0, |expires_s| expires_s.saturating_sub(date_s));
    }
    if !(is_heuristic(status) || said.public) {
        return 0;
    }
    headers::date_s(response, &header::LAST_MODIFIED).map_or(0, |changed_s| {
        let guess = date_s
            .saturating_sub(changed_s)
            .saturating_mul(rules.heuristic_percent)
            / 100;
        guess.min(rules.heuristic_max_s)
    })
}

/// Computes the freshness of a stored response.
pub fn freshness(
    status: StatusCode,
    response: &HeaderMap,
    asked_ms: u64,
    came_ms: u64,
    now_ms: u64,
    rules: &Rules,
) -> Freshness {
    let surrogate = surrogate_of(response, rules);
    let is_surrogate = surrogate.is_some();
    let said = surrogate.unwrap_or_else(|| CacheControl::of(response));
    let no_stale = said.must_revalidate || said.proxy_revalidate || said.s_maxage.is_some();
    Freshness {
        lifetime_s: lifetime_s(&said, is_surrogate, status, response, came_ms / 1000, rules),
        age_s: age_s(response, asked_ms, came_ms, now_ms),
        no_cache: said.no_cache,
        no_stale,
        stale_while_revalidate_s: said.stale_while_revalidate.unwrap_or(0),
        stale_if_error_s: said.stale_if_error.unwrap_or(rules.stale_if_error_s),
    }
}

impl Freshness {
    /// Returns the seconds since the lifetime ended; 0 while fresh.
    pub const fn stale_s(&self) -> u64 {
        if self.age_s < self.lifetime_s {
            0
        } else {
            self.age_s - self.lifetime_s + 1
        }
    }

    /// Decides how the response may be used for a request with the directives `asked`.
    pub fn reuse(&self, asked: &CacheControl) -> Reuse {
        let stale_s = self.stale_s();
        let or_stale = !self.no_cache
            && !self.no_stale
            && !asked.no_cache
            && stale_s <= self.stale_if_error_s.max(asked.stale_if_error.unwrap_or(0));
        let revalidate = Reuse::Revalidate { or_stale };
        if self.no_cache || asked.no_cache || asked.max_age.is_some_and(|most| self.age_s > most || most == 0)
        {
            return revalidate;
        }
        if let Some(at_least) = asked.min_fresh
            && self.lifetime_s < self.age_s.saturating_add(at_least)
        {
            return revalidate;
        }
        if stale_s == 0 {
            return Reuse::Fresh;
        }
        if self.no_stale {
            return revalidate;
        }
        if stale_s <= self.stale_while_revalidate_s {
            return Reuse::WhileRevalidating;
        }
        if asked.max_stale.is_some_and(|most| stale_s - 1 <= most) {
            return Reuse::Fresh;
        }
        revalidate
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderName;
    use http::HeaderValue;

    const RULES: Rules = Rules {
        store_set_cookie: false,
        surrogate: true,
        heuristic_percent: 10,
        heuristic_max_s: 86_400,
        stale_if_error_s: 0,
    };

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = fields
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        let mut headers = HeaderMap::new();
        pairs.for_each(|(name, value)| {
            headers.append(name, value);
        });
        headers
    }

    fn store(
        request: &[(&'static str, &'static str)],
        response: &[(&'static str, &'static str)],
    ) -> Result<(), NotStored> {
        may_store(
            &Method::GET,
            &map(request),
            StatusCode::OK,
            &map(response),
            &RULES,
        )
    }

    fn fresh(response: &[(&'static str, &'static str)], now_s: u64) -> Freshness {
        freshness(
            StatusCode::OK,
            &map(response),
            1_000_000,
            1_000_000,
            (1000 + now_s) * 1000,
            &RULES,
        )
    }

    #[test]
    fn what_is_for_one_user_is_not_stored() {
        let lifetime = ("cache-control", "max-age=60");
        assert_eq!(store(&[], &[lifetime]), Ok(()));
        assert_eq!(
            store(&[], &[("cache-control", "max-age=60, private")]),
            Err(NotStored::Private)
        );
        assert_eq!(
            store(&[], &[("cache-control", "max-age=60, no-store")]),
            Err(NotStored::NoStore)
        );
        assert_eq!(
            store(&[("cache-control", "no-store")], &[lifetime]),
            Err(NotStored::NoStore)
        );
        assert_eq!(
            store(&[], &[lifetime, ("set-cookie", "a=b")]),
            Err(NotStored::SetCookie)
        );
        assert_eq!(
            store(&[], &[lifetime, ("vary", "accept, *")]),
            Err(NotStored::VaryAny)
        );
        assert_eq!(store(&[], &[]), Err(NotStored::NoLifetime));
    }

    #[test]
    fn authorization_needs_leave() {
        let with = [("authorization", "Basic x")];
        assert_eq!(
            store(&with, &[("cache-control", "max-age=60")]),
            Err(NotStored::Authorization)
        );
        for leave in ["max-age=60, public", "s-maxage=60", "max-age=60, must-revalidate"] {
            assert_eq!(store(&with, &[("cache-control", leave)]), Ok(()));
        }
    }

    #[test]
    fn lifetime_comes_from_the_most_specific_field() {
        let date = ("date", "Thu, 01 Jan 1970 00:16:40 GMT");
        let expires = ("expires", "Thu, 01 Jan 1970 00:18:20 GMT");
        assert_eq!(fresh(&[date, expires], 0).lifetime_s, 100);
        assert_eq!(
            fresh(&[date, expires, ("cache-control", "max-age=7")], 0).lifetime_s,
            7
        );
        assert_eq!(
            fresh(&[date, expires, ("cache-control", "max-age=7, s-maxage=8")], 0).lifetime_s,
            8
        );
        assert_eq!(
            fresh(&[expires, ("surrogate-control", "max-age=9")], 0).lifetime_s,
            9
        );
        assert_eq!(fresh(&[("expires", "0")], 0).lifetime_s, 0);
        let changed = ("last-modified", "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(fresh(&[date, changed], 0).lifetime_s, 100);
    }

    #[test]
    fn age_that_is_no_number_is_old() {
        assert_eq!(fresh(&[("age", "abc")], 0).age_s, SECONDS_MAX);
        assert_eq!(fresh(&[("age", "0"), ("age", "0")], 0).age_s, SECONDS_MAX);
        assert_eq!(fresh(&[("age", "30")], 5).age_s, 35);
    }

    #[test]
    fn stale_is_served_only_as_far_as_both_sides_let_it() {
        let none = CacheControl::default();
        let state = fresh(
            &[(
                "cache-control",
                "max-age=10, stale-while-revalidate=5, stale-if-error=20",
            )],
            9,
        );
        assert_eq!(state.reuse(&none), Reuse::Fresh);
        let at = |now_s| {
            fresh(
                &[(
                    "cache-control",
                    "max-age=10, stale-while-revalidate=5, stale-if-error=20",
                )],
                now_s,
            )
        };
        assert_eq!(at(12).reuse(&none), Reuse::WhileRevalidating);
        assert_eq!(at(20).reuse(&none), Reuse::Revalidate { or_stale: true });
        assert_eq!(at(40).reuse(&none), Reuse::Revalidate { or_stale: false });
        let asked = CacheControl {
            max_stale: Some(100),
            ..none.clone()
        };
        assert_eq!(at(40).reuse(&asked), Reuse::Fresh);
        let asked = CacheControl {
            no_cache: true,
            ..none.clone()
        };
        assert_eq!(at(1).reuse(&asked), Reuse::Revalidate { or_stale: false });
        let strict = fresh(
            &[(
                "cache-control",
                "max-age=1, must-revalidate, stale-while-revalidate=50",
            )],
            9,
        );
        assert_eq!(strict.reuse(&none), Reuse::Revalidate { or_stale: false });
    }
}
