//! GET and HEAD through the store: fresh answers, validation, stale answers where they are allowed, and
//! request coalescing.

use super::answer::{ensure_date, strip_for_client};
use super::{Answer, Asked, Live, Proxy};
use crate::body::Upload;
use crate::conditional;
use crate::config::Limits;
use crate::flights::{Joined, Lead, Waited};
use crate::headers::{self, now_ms};
use crate::metrics::Outcome;
use crate::policy::{self, Freshness, Reuse, Rules};
use crate::ranges;
use crate::record::Stored;
use crate::storage::Found;
use http::header::{self, HeaderMap};
use http::{Method, StatusCode};
use std::sync::Arc;
use std::time::Duration;

/// How long an answer waits until the fields that a validation changed are stored.
const UPDATE_WAIT: Duration = Duration::from_millis(20);

/// Whether this status of an origin allows to serve a stale response instead (RFC 5861 §4).
const fn is_failure(status: StatusCode) -> bool {
    matches!(status.as_u16(), 500 | 502 | 503 | 504)
}

pub(super) fn freshness_of(stored: &Stored, rules: &Rules) -> Freshness {
    policy::freshness(
        stored.status,
        &stored.headers,
        stored.asked_ms,
        stored.came_ms,
        now_ms(),
        rules,
    )
}

/// Returns the key that requests coalesce on: the whole response, or one range of it.
fn flight_key(asked: &Asked) -> Vec<u8> {
    let mut key = asked.key.bytes().to_vec();
    if let Some(range) = asked.headers.get(header::RANGE) {
        key.extend_from_slice(b"\nrange ");
        key.extend_from_slice(range.as_bytes());
    }
    key
}

impl Proxy {
    pub(super) async fn cached(self: &Arc<Self>, live: &Arc<Live>, asked: Arc<Asked>) -> Answer {
        let rules = live.config.rules(asked.mode);
        let mut lead = None;
        let mut may_wait = self.may_wait(&asked);
        let mut may_wait_for_whole = may_wait && ranges::is_asked(&asked.headers);
        loop {
            let ended = self.flights.ended(asked.key.bytes());
            let found = self.find(&asked).await;
            let mut or_stale = false;
            if let Some(found) = &found {
                let fresh = freshness_of(&found.stored, &rules);
                let reuse = fresh.reuse(&asked.directives);
                let outcome = match reuse {
                    Reuse::Fresh if fresh.stale_s() == 0 => Some(Outcome::Hit),
                    Reuse::Fresh => Some(Outcome::Stale),
                    Reuse::WhileRevalidating => {
                        self.revalidate_later(live, &asked, found);
                        Some(Outcome::Stale)
                    }
                    Reuse::Revalidate { or_stale: may } => {
                        or_stale = may;
                        None
                    }
                };
                if let Some(outcome) = outcome
                    && let Some(answer) = self
                        .from_store(&asked, found, &fresh, outcome, rules.surrogate)
                        .await
                {
                    return answer;
                }
            }
            if asked.directives.only_if_cached {
                return Answer::refuse(
                    StatusCode::GATEWAY_TIMEOUT,
                    "Nothing is stored that could be served (only-if-cached).",
                );
            }
            if may_wait_for_whole {
                may_wait_for_whole = false;
                let limits = live.limits();
                // A fetch of the whole response may serve the part; wait for it briefly only, as it may be
                // long.
                let timeout = Limits::ms(limits.waiting_timeout_ms / 10);
                let whole = Box::pin(self.flights.wait(asked.key.bytes(), limits.waiting, timeout)).await;
                if whole == Waited::Ended {
                    self.metrics.collapsed.inc();
                    continue;
                }
            }
            if may_wait && lead.is_none() {
                let limits = live.limits();
                let timeout = Limits::ms(limits.waiting_timeout_ms);
                let key = flight_key(&asked);
                match Box::pin(self.flights.join(&key, limits.waiting, timeout)).await {
                    Joined::Lead(taken) => lead = Some(taken),
                    Joined::Waited => {
                        self.metrics.collapsed.inc();
                        may_wait = false;
                    }
                    Joined::Alone => may_wait = false,
                }
                // Look again if a response may have been stored since the lookup. A lookup may cost a seek, so
                // not otherwise.
                if ranges::is_asked(&asked.headers) || self.flights.ended(asked.key.bytes()) != ended {
                    continue;
                }
            }
            return match found {
                Some(found) if found.is_whole() => {
                    Box::pin(self.validate(live, &asked, found, or_stale, lead)).await
                }
                _ => Box::pin(self.miss(live, &asked, lead)).await,
            };
        }
    }

    /// Whether this request may coalesce with others.
    fn may_wait(&self, asked: &Asked) -> bool {
        asked.method == Method::GET
            && !asked.headers.contains_key(header::AUTHORIZATION)
            && !conditional::CONDITIONS
                .iter()
                .any(|name| asked.headers.contains_key(name))
    }

    async fn find(&self, asked: &Asked) -> Option<Found> {
        let found = self.storage.lookup(&asked.key, &asked.headers).await;
        if found.as_ref().is_some_and(Found::is_whole) {
            return found;
        }
        if asked.method == Method::GET && ranges::is_asked(&asked.headers) {
            return Box::pin(self.storage.lookup_parts(&asked.key)).await;
        }
        None
    }

    /// Fetches from the origin: the store has nothing usable for the request.
    async fn miss(self: &Arc<Self>, live: &Arc<Live>, asked: &Arc<Asked>, lead: Option<Lead>) -> Answer {
        let turn = self.storage.turn(&asked.key);
        let asked_ms = now_ms();
        let answer = self
            .ask(live, asked, &asked.method, asked.headers.clone(), Upload::Empty)
            .await;
        match answer {
            Ok(response) => self.take(live, asked, response, asked_ms, turn, lead).await,
            Err(error) => Self::origin_failed(&error),
        }
    }

    /// Validates a stored response with the origin before it is served.
    async fn validate(
        self: &Arc<Self>,
        live: &Arc<Live>,
        asked: &Arc<Asked>,
        mut found: Found,
        or_stale: bool,
        lead: Option<Lead>,
    ) -> Answer {
        let rules = live.config.rules(asked.mode);
        if asked.method == Method::HEAD {
            return self.validate_by_head(live, asked, found, or_stale).await;
        }
        let turn = self.storage.turn(&asked.key);
        let asked_ms = now_ms();
        let mut request = asked.headers.clone();
        request.remove(header::RANGE);
        let asks = conditional::ask_for_changes(&mut request, &found.stored.headers);
        let response = match self.ask(live, asked, &Method::GET, request, Upload::Empty).await {
            Ok(response) if or_stale && is_failure(response.status()) => None,
            Ok(response) => Some(response),
            Err(error) if or_stale => {
                tracing::info!(key = asked.key.text(), %error, "stale response served");
                None
            }
            Err(error) => return Self::origin_failed(&error),
        };
        let Some(response) = response else {
            let stale = self.stored_answer(asked, &found, Outcome::Stale, &rules).await;
            return stale.unwrap_or_else(|| {
                Answer::own(StatusCode::BAD_GATEWAY, "The origin failed.", Outcome::Error)
            });
        };
        if response.status() != StatusCode::NOT_MODIFIED || !asks {
            return self.take(live, asked, response, asked_ms, turn, lead).await;
        }
        if conditional::speaks_of(response.headers(), &found.stored.headers) {
            let mut new = response.headers().clone();
            headers::strip_hop_by_hop(&mut new);
            self.freshen(asked, &mut found, &new, asked_ms).await;
            let answer = self
                .stored_answer(asked, &found, Outcome::Revalidated, &rules)
                .await;
            if let Some(answer) = answer {
                return answer;
            }
        }
        // The 304 is about another response, or the stored bytes are gone: the stored response is of no use.
        self.forget(asked).await;
        let mut plain = Asked::clone(asked);
        conditional::CONDITIONS.iter().for_each(|name| {
            plain.headers.remove(name);
        });
        self.miss(live, &Arc::new(plain), lead).await
    }

    /// Answers from a stored response with its present freshness; `None` as for
    /// [`from_store`](Self::from_store).
    async fn stored_answer(
        self: &Arc<Self>,
        asked: &Asked,
        found: &Found,
        outcome: Outcome,
        rules: &Rules,
    ) -> Option<Answer> {
        let fresh = freshness_of(&found.stored, rules);
        self.from_store(asked, found, &fresh, outcome, rules.surrogate)
            .await
    }

    /// Updates a stored response from a 304 or from a response to HEAD.
    async fn freshen(&self, asked: &Asked, found: &mut Found, new: &HeaderMap, asked_ms: u64) {
        let came_ms = now_ms();
        let mut new = new.clone();
        ensure_date(&mut new, came_ms);
        new.remove(header::VARY);
        let stored = Arc::make_mut(&mut found.stored);
        conditional::update(&mut stored.headers, &new);
        stored.asked_ms = asked_ms;
        stored.came_ms = came_ms;
        let (storage, key, found) = (Arc::clone(&self.storage), asked.key.clone(), found.clone());
        let update = tokio::spawn(async move { storage.update(&key, &found).await });
        // Usually done at once, and the client's next request finds it. A client does not wait for a device.
        let _ = tokio::time::timeout(UPDATE_WAIT, update).await;
    }

    /// Validates by forwarding a HEAD: its response shows whether the stored one is still valid (RFC 9111
    /// §4.3.5).
    async fn validate_by_head(
        self: &Arc<Self>,
        live: &Arc<Live>,
        asked: &Arc<Asked>,
        mut found: Found,
        or_stale: bool,
    ) -> Answer {
        let rules = live.config.rules(asked.mode);
        let turn = self.storage.turn(&asked.key);
        let asked_ms = now_ms();
        let response = match self
            .ask(live, asked, &Method::HEAD, asked.headers.clone(), Upload::Empty)
            .await
        {
            Ok(response) => response,
            Err(error) => {
                let stale = self.stored_answer(asked, &found, Outcome::Stale, &rules).await;
                return stale
                    .filter(|_| or_stale)
                    .unwrap_or_else(|| Self::origin_failed(&error));
            }
        };
        if response.status() == StatusCode::OK && found.stored.status == StatusCode::OK {
            let mut new = response.headers().clone();
            headers::strip_hop_by_hop(&mut new);
            let same = |name: &header::HeaderName| match (new.get(name), found.stored.headers.get(name)) {
                (Some(new), Some(old)) => new == old,
                (None, None) => true,
                _ => false,
            };
            let len = new
                .get(header::CONTENT_LENGTH)
                .and_then(|len| len.to_str().ok()?.parse::<u64>().ok());
            let same_len = len.is_none_or(|len| len == found.whole_len());
            let still = same(&header::ETAG) && same(&header::LAST_MODIFIED) && same_len;
            if still && policy::may_store(&Method::GET, &asked.headers, StatusCode::OK, &new, &rules).is_ok()
            {
                self.freshen(asked, &mut found, &new, asked_ms).await;
                let answer = self
                    .stored_answer(asked, &found, Outcome::Revalidated, &rules)
                    .await;
                if let Some(answer) = answer {
                    return answer;
                }
            } else if !still {
                self.forget(asked).await;
            }
        }
        self.take(live, asked, response, asked_ms, turn, None).await
    }

    pub(super) async fn forget(&self, asked: &Asked) {
        if let Err(error) = self.storage.remove(&asked.key).await {
            tracing::warn!(key = asked.key.text(), %error, "the store failed to remove an object");
        }
    }

    /// Validates a stored response in the background, after the client got its answer.
    fn revalidate_later(self: &Arc<Self>, live: &Arc<Live>, asked: &Arc<Asked>, found: &Found) {
        // Bounds the background fetches; a later request for the key tries again.
        if self.flights.len() >= live.limits().connections {
            return;
        }
        let Some(lead) = self.flights.try_lead(asked.key.bytes()) else {
            return;
        };
        let mut asked = Asked::clone(asked);
        asked.method = Method::GET;
        conditional::CONDITIONS.iter().for_each(|name| {
            asked.headers.remove(name);
        });
        asked.headers.remove(header::RANGE);
        let (proxy, live, found) = (Arc::clone(self), Arc::clone(live), found.clone());
        tokio::spawn(async move {
            // The answer has no reader; storing the body continues in a task of its own.
            drop(
                proxy
                    .validate(&live, &Arc::new(asked), found, true, Some(lead))
                    .await,
            );
        });
    }
}

/// Returns the fields to store: without those that the response restricts to one user or one use.
pub(super) fn stored_headers(response: &HeaderMap) -> HeaderMap {
    let mut headers = response.clone();
    let said = crate::cache_control::CacheControl::of(response);
    for name in said.private_fields.iter().chain(&said.no_cache_fields) {
        headers.remove(name);
    }
    headers.remove(header::CONTENT_LENGTH);
    headers.remove("cache-status");
    headers
}

/// Prepares the fields of a response that is passed on without storing.
pub(super) fn passing_headers(headers: &mut HeaderMap, surrogate: bool, now_ms: u64) {
    headers::strip_hop_by_hop(headers);
    ensure_date(headers, now_ms);
    strip_for_client(headers, surrogate);
}
