//! Selection of stored responses (RFC 9111 §4.1): the request fields that `Vary` names, in a normal form.

use crate::headers;
use http::header::{self, HeaderMap, HeaderName};

/// Most variants of one key.
pub const VARIANTS_MAX: usize = 16;

/// Names and normalized values of the request fields that select a response.
pub type Selecting = Vec<(String, Option<String>)>;

/// Returns the fields that `Vary` names, with the values of the request, sorted by name.
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

/// Whether a request has the values of the selecting fields.
pub fn matches(selecting: &Selecting, request: &HeaderMap) -> bool {
    selecting
        .iter()
        .all(|(name, value)| normal_value(name, request) == *value)
}

/// Normalizes a request field: combines its lines and removes white space around commas; languages and
/// codings are lower-cased, and sorted where their order has no meaning.
fn normal_value(name: &str, request: &HeaderMap) -> Option<String> {
    let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
    if !request.contains_key(&name) {
        return None;
    }
    if request.get_all(&name).iter().any(|value| value.to_str().is_err()) {
        // Not text: compared byte by byte, and never equal to a text.
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
