//! Joining partial responses (RFC 9111 §3.4, RFC 9110 §15.3.7.3): which spans of a representation are stored,
//! whether two responses are parts of the same representation, and which spans give a range. Knows no store.

use crate::headers;
use http::header::{self, HeaderMap};
use std::ops::Range;

/// Most spans of one representation; the shortest goes when there is one more.
pub const SPANS_MAX: usize = 16;

/// Stored bytes of a representation, an object of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Offset of the first byte.
    pub start: u64,
    /// Number of bytes, not 0.
    pub len: u64,
    /// Number of the object.
    pub id: u64,
}

impl Span {
    /// Offset after the last byte.
    pub const fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }
}

/// The stored spans of a representation, in order of their starts. None lies within another.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spans(Vec<Span>);

impl Spans {
    /// Checks spans that were read from a medium: order, number, and that all lie within `whole_len`.
    pub fn checked(spans: Vec<Span>, whole_len: u64) -> Option<Self> {
        let fits = |span: &Span| {
            span.len > 0
                && span
                    .start
                    .checked_add(span.len)
                    .is_some_and(|end| end <= whole_len)
        };
        let ordered = spans
            .windows(2)
            .all(|pair| pair[0].start < pair[1].start && pair[0].end() < pair[1].end());
        let right = !spans.is_empty() && spans.len() <= SPANS_MAX && ordered && spans.iter().all(fits);
        right.then_some(Self(spans))
    }

    /// Iterates in order of start.
    pub fn iter(&self) -> impl Iterator<Item = &Span> {
        self.0.iter()
    }

    /// Number of spans.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no span.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a span; those that it covers go. With more than [`SPANS_MAX`], the shortest of the others goes.
    pub fn add(&mut self, new: Span) {
        self.0
            .retain(|old| old.start < new.start || old.end() > new.end());
        if self.covering(&new).is_some() {
            // An older, longer span has the bytes already.
            return;
        }
        let at = self.0.partition_point(|old| old.start < new.start);
        self.0.insert(at, new);
        if self.0.len() > SPANS_MAX {
            let others = self.0.iter().enumerate().filter(|(n, _)| *n != at);
            if let Some((shortest, _)) = others.min_by_key(|(_, span)| span.len) {
                self.0.remove(shortest);
            }
        }
    }

    /// Returns a span that has all bytes of another.
    pub fn covering(&self, new: &Span) -> Option<Span> {
        let covers = |old: &&Span| old.start <= new.start && old.end() >= new.end();
        self.0.iter().find(covers).copied()
    }

    /// Drops the span of an object.
    pub fn remove(&mut self, id: u64) {
        self.0.retain(|span| span.id != id);
    }

    /// Whether all bytes of a range are there.
    pub fn cover(&self, range: &Range<u64>) -> bool {
        cut(self.0.iter().map(|span| span.start..span.end()), range).is_some()
    }
}

/// Cuts a range into pieces, each within one of `spans` (in order of start): the number of the span, and the
/// piece. `None` if a byte of the range is in none.
pub fn cut(spans: impl Iterator<Item = Range<u64>>, range: &Range<u64>) -> Option<Vec<(usize, Range<u64>)>> {
    let mut pieces: Vec<(usize, Range<u64>)> = Vec::new();
    let mut at = range.start;
    for (n, span) in spans.enumerate() {
        if at >= range.end {
            break;
        }
        if span.start <= at && span.end > at {
            let end = span.end.min(range.end);
            pieces.push((n, at..end));
            at = end;
        }
    }
    (at >= range.end).then_some(pieces)
}

/// Whether two responses are parts of the same representation: both have the same strong validator (RFC 9110
/// §8.8.1), and no other one speaks against it.
pub fn are_of_one(old: &HeaderMap, new: &HeaderMap) -> bool {
    let tags = [old, new].map(|headers| headers::single(headers, &header::ETAG));
    match tags {
        [Some(old), Some(new)] => old == new && !old.starts_with("W/"),
        [None, None] => {
            let strong = |headers: &HeaderMap| {
                let changed_s = headers::date_s(headers, &header::LAST_MODIFIED)?;
                let date_s = headers::date_s(headers, &header::DATE)?;
                // A second before `Date`, so that it cannot have changed twice in the second of the stamp.
                (changed_s < date_s).then_some(changed_s)
            };
            matches!((strong(old), strong(new)), (Some(old), Some(new)) if old == new)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};
    use proptest::prelude::*;

    fn span(start: u64, end: u64, id: u64) -> Span {
        Span {
            start,
            len: end - start,
            id,
        }
    }

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = fields
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        pairs.collect()
    }

    #[test]
    fn spans_join_to_a_range_only_without_a_gap() {
        let mut spans = Spans::default();
        spans.add(span(10, 20, 1));
        spans.add(span(30, 40, 2));
        assert!(!spans.cover(&(10..40)) && spans.cover(&(12..20)));
        spans.add(span(15, 30, 3));
        assert!(spans.cover(&(10..40)) && !spans.cover(&(9..40)) && !spans.cover(&(10..41)));
        spans.add(span(5, 45, 4));
        assert_eq!(spans.iter().count(), 1, "it covers all others");
        spans.add(span(6, 10, 5));
        assert_eq!(spans.iter().next().map(|span| span.id), Some(4));
    }

    #[test]
    fn parts_are_of_one_only_with_one_strong_validator() {
        let tag = |tag| map(&[("etag", tag)]);
        assert!(are_of_one(&tag("\"a\""), &tag("\"a\"")));
        assert!(!are_of_one(&tag("\"a\""), &tag("\"b\"")));
        assert!(!are_of_one(&tag("W/\"a\""), &tag("W/\"a\"")));
        assert!(!are_of_one(&tag("\"a\""), &map(&[])));
        assert!(!are_of_one(&map(&[]), &map(&[])));
        let changed = ("last-modified", "Thu, 01 Jan 1970 00:00:10 GMT");
        let late = map(&[changed, ("date", "Thu, 01 Jan 1970 00:01:00 GMT")]);
        assert!(are_of_one(&late, &late));
        let at_once = map(&[changed, ("date", "Thu, 01 Jan 1970 00:00:10 GMT")]);
        assert!(
            !are_of_one(&at_once, &at_once),
            "it may have changed twice in that second"
        );
    }

    proptest! {
        #[test]
        fn spans_cover_what_was_added_and_nothing_else(added in proptest::collection::vec((0u64..60, 1u64..12), 1..12), asked in (0u64..60, 1u64..20)) {
            let mut spans = Spans::default();
            let mut bytes = [false; 100];
            for (id, (start, len)) in added.iter().enumerate() {
                spans.add(Span { start: *start, len: *len, id: id as u64 });
                bytes[*start as usize..(start + len) as usize].fill(true);
            }
            prop_assert!(Spans::checked(spans.iter().copied().collect(), 100).is_some());
            let range = asked.0..asked.0 + asked.1;
            let all = bytes[range.start as usize..range.end as usize].iter().all(|there| *there);
            prop_assert_eq!(spans.cover(&range), all);
        }
    }
}
