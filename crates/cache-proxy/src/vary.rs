//! Which stored response answers which request (RFC 9111 §4.1): the request fields that `Vary` names, in a
//! normal form.

use crate::headers;
use http::header::{self, HeaderMap, HeaderName};

/// Variants that are kept of one key.
pub const VARIANTS_MAX: usize = 16;

/// Names and normal values of the request fields that a response was chosen by.
pub type Selecting = Vec<(String, Option<String>)>;

/// The fields that a response varies by, with the values of its request. Sorted by name.
pub fn selecting(request: &HeaderMap, response: &HeaderMap) -> Selecting {
    let mut names: Vec<String> = headers::list(response, &header::VARY)
        .map(str::to_ascii_lowercase)
        .collect();
    names.sort_unstable();
    names.dedup();
    names
        .into_iter()
        .map(|name| {
            let value = normal_value(&name, request);
            (name, value)
        })
        .collect()
}

/// Whether a request would have been answered by the response that these fields chose.
pub fn matches(selecting: &Selecting, request: &HeaderMap) -> bool {
    selecting
        .iter()
        .all(|(name, value)| normal_value(name, request) == *value)
}

/// A request field in normal form: lines combined, white space around commas left out; languages and codings
/// in small letters, and in order of name where their order says nothing.
fn normal_value(name: &str, request: &HeaderMap) -> Option<String> {
    let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
    if !request.contains_key(&name) {
        return None;
    }
    if request.get_all(&name).iter().any(|value| value.to_str().is_err()) {
        // No text: compared as it is, never with a text.
        let raw: Vec<_> = request
            .get_all(&name)
            .iter()
            .map(|value| format!("{:?}", value.as_bytes()))
            .collect();
        return Some(format!("\u{0}{}", raw.join(",")));
    }
    let mut members: Vec<String> = headers::list(request, &name).map(str::to_owned).collect();
    if matches!(
        name.as_str(),
        "accept-language" | "accept-encoding" | "accept-charset"
    ) {
        for member in &mut members {
            member.retain(|letter| !letter.is_ascii_whitespace());
            member.make_ascii_lowercase();
        }
        members.sort_unstable();
    }
    Some(members.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn request_matches_when_all_selecting_fields_are_the_same() {
        let chosen = selecting(&map(&[("foo", "1")]), &map(&[("vary", "Foo, Bar")]));
        assert!(matches(&chosen, &map(&[("foo", "1"), ("other", "x")])));
        assert!(!matches(&chosen, &map(&[("foo", "2")])));
        assert!(!matches(&chosen, &map(&[])));
        assert!(!matches(&chosen, &map(&[("foo", "1"), ("bar", "")])));
    }

    #[test]
    fn languages_match_in_any_order_and_case() {
        let chosen = selecting(
            &map(&[("accept-language", "en, DE;q=0.5")]),
            &map(&[("vary", "accept-language")]),
        );
        assert!(matches(
            &chosen,
            &map(&[("accept-language", "de; q=0.5"), ("accept-language", "EN")])
        ));
        assert!(!matches(&chosen, &map(&[("accept-language", "de, en")])));
    }
}
