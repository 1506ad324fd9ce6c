//! Byte ranges of a representation (RFC 9110 §14). Only single ranges are supported; a request for several
//! gets the whole.

use crate::headers;
use http::header::{self, HeaderMap};
use std::ops::Range;

/// The bytes that a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// The whole representation.
    Whole,
    /// One range of bytes.
    Part(Range<u64>),
    /// A range beyond the end.
    Unsatisfiable,
}

/// Returns the range that a request asks for in a representation of `len` bytes. Malformed, multiple or
/// non-byte ranges are ignored.
pub fn wanted(request: &HeaderMap, len: u64) -> Wanted {
    let Some(spec) = headers::single(request, &header::RANGE) else {
        return Wanted::Whole;
    };
    let Some((first, last)) = spec
        .split_once('=')
        .filter(|(unit, _)| unit.eq_ignore_ascii_case("bytes"))
        .and_then(|(_, range)| range.trim().split_once('-'))
    else {
        return Wanted::Whole;
    };
    let number = |text: &str| -> Option<u64> {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse().unwrap_or(u64::MAX))
    };
    match (first.is_empty(), number(first), last.is_empty(), number(last)) {
        (true, _, false, Some(0)) => Wanted::Unsatisfiable,
        (true, _, false, Some(_)) if len == 0 => Wanted::Unsatisfiable,
        (true, _, false, Some(suffix)) => Wanted::Part(len.saturating_sub(suffix)..len),
        (false, Some(first), true, _) if first < len => Wanted::Part(first..len),
        (false, Some(first), true, _) if first >= len => Wanted::Unsatisfiable,
        (false, Some(first), false, Some(last)) if first <= last => {
            if first < len {
                Wanted::Part(first..last.saturating_add(1).min(len))
            } else {
                Wanted::Unsatisfiable
            }
        }
        _ => Wanted::Whole,
    }
}

/// Whether a request has a `Range`.
pub fn is_asked(request: &HeaderMap) -> bool {
    request.contains_key(header::RANGE)
}

/// Parses a `Content-Range` to the range and the length of the whole; `None` unless both are given.
pub fn content_range(response: &HeaderMap) -> Option<(Range<u64>, u64)> {
    let text = headers::single(response, &header::CONTENT_RANGE)?;
    let (range, len) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let number = |text: &str| -> Option<u64> {
        text.bytes()
            .all(|byte| byte.is_ascii_digit())
            .then(|| text.parse().ok())
            .flatten()
    };
    let (first, last, len) = (number(first)?, number(last)?, number(len)?);
    (first <= last && last < len).then_some((first..last + 1, len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn of(range: &'static str, len: u64) -> Wanted {
        let mut headers = HeaderMap::new();
        headers.insert(header::RANGE, HeaderValue::from_static(range));
        wanted(&headers, len)
    }

    #[test]
    fn range_is_cut_to_what_is_there() {
        assert_eq!(of("bytes=0-1", 10), Wanted::Part(0..2));
        assert_eq!(of("bytes=8-100", 10), Wanted::Part(8..10));
        assert_eq!(of("bytes=4-", 10), Wanted::Part(4..10));
        assert_eq!(of("bytes=-3", 10), Wanted::Part(7..10));
        assert_eq!(of("bytes=-30", 10), Wanted::Part(0..10));
        assert_eq!(of("bytes=0-99999999999999999999", 10), Wanted::Part(0..10));
    }

    #[test]
    fn range_outside_is_unsatisfiable_and_nonsense_is_ignored() {
        for range in ["bytes=10-", "bytes=10-11", "bytes=-0"] {
            assert_eq!(of(range, 10), Wanted::Unsatisfiable, "{range}");
        }
        for range in [
            "bytes=3-2",
            "lines=1-2",
            "bytes=1-2,4-5",
            "bytes=a-b",
            "bytes",
            "bytes=-",
        ] {
            assert_eq!(of(range, 10), Wanted::Whole, "{range}");
        }
    }

    #[test]
    fn content_range_must_say_everything_and_fit() {
        let of = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_RANGE, HeaderValue::from_static(value));
            content_range(&headers)
        };
        assert_eq!(of("bytes 2-4/10"), Some((2..5, 10)));
        for bad in [
            "bytes 2-4/*",
            "bytes 4-2/10",
            "bytes 2-10/10",
            "bytes */10",
            "bytes +2-4/10",
        ] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }
}
