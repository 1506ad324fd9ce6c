//! The devices of SSD and HDD in the text of a `varve.toml`: changes them, and nothing else in it. Comments, order
//! and line breaks stay, but for a line that named only a device that is not there any more.

use super::spec::{PoolSpec, TierSpec};
use std::ops::Range;
use varve_format::Tier;

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

fn names(spec: &PoolSpec, tier: Tier) -> Vec<String> {
    spec.devices_of(tier).map(ToString::to_string).collect()
}

/// Returns the line of a new `varve.toml` for the devices of a tier.
pub(super) fn tier_line(spec: &PoolSpec, tier: Tier) -> String {
    format!("{} = {}", tier.name(), value(&names(spec, tier)))
}

fn value(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| quoted(name)).collect();
    match &quoted[..] {
        [one] => one.clone(),
        more => format!("[{}]", more.join(", ")),
    }
}

/// Returns the text with other devices of SSD and HDD. The caller looks whether it reads back: a text that is
/// written in an unusual way stays as it is, or comes out wrong.
pub(super) fn with_tiers(text: &str, spec: &PoolSpec) -> String {
    let mut text = text.to_owned();
    for tier in [Tier::Ssd, Tier::Hdd] {
        if let Some(found) = Value::find(&text, tier) {
            text = found.with(&text, &names(spec, tier));
        }
    }
    text
}

/// Returns the number, from 1 on, and the text of the line that names a device of a tier.
pub(super) fn line_naming(text: &str, tier: Tier, device: &TierSpec) -> Option<(usize, String)> {
    let found = Value::find(text, tier)?;
    let device = device.to_string();
    let at = found.names.iter().position(|name| *name == device)?;
    let number = text[..found.strings[at].start].matches('\n').count();
    Some((number + 1, text.lines().nth(number)?.trim().to_owned()))
}

/// The value of a tier's key.
struct Value {
    whole: Range<usize>,
    is_array: bool,
    /// Where its strings lie, with their quotes.
    strings: Vec<Range<usize>>,
    /// What they mean, as Varve writes it.
    names: Vec<String>,
}

impl Value {
    fn find(text: &str, tier: Tier) -> Option<Self> {
        let (mut at, mut in_tiers) = (0, false);
        for line in text.split_inclusive('\n') {
            let trimmed = line.trim_start();
            if trimmed.starts_with('[') {
                in_tiers = line.split('#').next().map(str::trim) == Some("[tiers]");
            }
            if let Some((key, value)) = line.split_once('=')
                && in_tiers
                && key.trim() == tier.name()
            {
                let spaces = value.len() - value.trim_start().len();
                return Self::read(text, at + key.len() + 1 + spaces, tier);
            }
            at += line.len();
        }
        None
    }

    /// Reads a string, or an array of strings.
    fn read(text: &str, start: usize, tier: Tier) -> Option<Self> {
        let bytes = text.as_bytes();
        let is_array = bytes.get(start) == Some(&b'[');
        let (mut at, mut strings) = (start + usize::from(is_array), Vec::new());
        loop {
            match *bytes.get(at)? {
                quote @ (b'"' | b'\'') => {
                    let from = at;
                    at += 1;
                    while *bytes.get(at)? != quote {
                        at += if quote == b'"' && bytes[at] == b'\\' { 2 } else { 1 };
                    }
                    at += 1;
                    strings.push(from..at);
                    if !is_array {
                        break;
                    }
                }
                b'#' if is_array => at += text.get(at..)?.find('\n')?,
                b']' if is_array => {
                    at += 1;
                    break;
                }
                b',' | b' ' | b'\t' | b'\r' | b'\n' if is_array => at += 1,
                _ => return None,
            }
        }
        let meant = |range: &Range<usize>| {
            let table: toml::Table = toml::from_str(&format!("v = {}", text.get(range.clone())?)).ok()?;
            let text = table.get("v")?.as_str()?.to_owned();
            Some(TierSpec::parse(tier.name(), &text).map_or(text, |spec| spec.to_string()))
        };
        let names = strings.iter().map(meant).collect::<Option<_>>()?;
        Some(Self {
            whole: start..at,
            is_array,
            strings,
            names,
        })
    }

    /// Returns the text with other names in this value.
    fn with(&self, text: &str, wanted: &[String]) -> String {
        if wanted == self.names {
            return text.to_owned();
        }
        let (Some(first), true) = (wanted.first(), self.is_array && !self.strings.is_empty()) else {
            let new = value(wanted);
            return [&text[..self.whole.start], &new, &text[self.whole.end..]].concat();
        };
        let mut edits: Vec<(Range<usize>, String)> = Vec::new();
        if *first != self.names[0] {
            edits.push((self.strings[0].clone(), quoted(first)));
        }
        let mut last = 0;
        for (at, name) in self.names.iter().enumerate().skip(1) {
            if wanted[1..].contains(name) {
                last = at;
            } else {
                edits.push((self.removed(text, at), String::new()));
            }
        }
        let new = wanted[1..].iter().filter(|name| !self.names[1..].contains(name));
        for name in new {
            edits.extend(self.added(text, last, name));
        }
        edited(text, edits)
    }

    /// The line of a string, if nothing else is on it but a comma and a comment.
    fn own_line(&self, text: &str, at: usize) -> Option<Range<usize>> {
        let string = &self.strings[at];
        let start = text[..string.start].rfind('\n')? + 1;
        let end = string.end + text[string.end..].find('\n')? + 1;
        let rest = text[string.end..end].trim();
        let rest = rest.strip_prefix(',').unwrap_or(rest).trim();
        let alone = text[start..string.start].trim().is_empty() && (rest.is_empty() || rest.starts_with('#'));
        alone.then_some(start..end)
    }

    /// What goes with a string that is not the first: its line, or the comma before it.
    fn removed(&self, text: &str, at: usize) -> Range<usize> {
        let before = self.strings[at - 1].end;
        self.own_line(text, at).unwrap_or(before..self.strings[at].end)
    }

    /// What comes after the last string that stays.
    fn added(&self, text: &str, last: usize, name: &str) -> Vec<(Range<usize>, String)> {
        let end = self.strings[last].end;
        let Some(line) = self.own_line(text, last) else {
            return vec![(end..end, format!(", {}", quoted(name)))];
        };
        let indent = &text[line.start..self.strings[last].start];
        let new = (line.end..line.end, format!("{indent}{},\n", quoted(name)));
        match text[end..].trim_start().starts_with(',') {
            true => vec![new],
            false => vec![(end..end, ",".into()), new],
        }
    }
}

/// Returns the text with parts replaced. Parts that overlap go once.
fn edited(text: &str, mut edits: Vec<(Range<usize>, String)>) -> String {
    edits.sort_by_key(|(range, _)| (range.start, range.end));
    let (mut out, mut at) = (String::new(), 0);
    for (range, new) in edits {
        out.push_str(text.get(at..range.start).unwrap_or_default());
        out.push_str(&new);
        at = at.max(range.end);
    }
    out.push_str(text.get(at..).unwrap_or_default());
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{line_naming, with_tiers};
    use crate::pool::{PoolSpec, TierSpec};
    use varve_format::Tier;

    fn spec(ssd: &[&str], hdd: &[&str]) -> PoolSpec {
        let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        PoolSpec::parse_lists(Some("64M"), &owned(ssd), &owned(hdd)).unwrap()
    }

    #[test]
    fn only_the_devices_change() {
        let text = "# mine\nversion = 1\n\n[tiers] # them\nnvm = \"64M\"\n\
            ssd = [\"1G\", \"/dev/b\", '/dev/c'] # fast\nhdd=\"0\"   # none\n\n[daemon]\nssd = 7\n";
        let without = with_tiers(text, &spec(&["1G", "/dev/c"], &["0"]));
        let line = "ssd = [\"1G\", \"/dev/b\", '/dev/c'] # fast";
        assert_eq!(without, text.replace(line, "ssd = [\"1G\", '/dev/c'] # fast"));
        let first = with_tiers(text, &spec(&["0", "/dev/b"], &["0"]));
        assert_eq!(first, text.replace(line, "ssd = [\"0\", \"/dev/b\"] # fast"));
        let none = with_tiers(text, &spec(&["1G"], &["0"]));
        assert_eq!(none, text.replace(line, "ssd = [\"1G\"] # fast"));
        let more = with_tiers(
            text,
            &spec(&["1G", "/dev/b", "/dev/c", "/dev/d"], &["0", "/dev/e"]),
        );
        let longer = text.replace("'/dev/c']", "'/dev/c', \"/dev/d\"]");
        assert_eq!(more, longer.replace("hdd=\"0\"", "hdd=[\"0\", \"/dev/e\"]"));
        assert_eq!(with_tiers(text, &spec(&["1G", "/dev/b", "/dev/c"], &["0"])), text);
        let odd = "[tiers]\nssd = [[1]]\n";
        assert_eq!(with_tiers(odd, &spec(&["1G"], &["0"])), odd);
    }

    #[test]
    fn list_on_several_lines_stays_one() {
        let text = "[tiers]\nnvm = \"64M\"\nssd = [\n  \"1G\", # first ]\n  # old\n  \"/dev/b\", # b\n  \
            \"/dev/c\" # \"c\"\n]\nhdd = \"0\"\n";
        let without = with_tiers(text, &spec(&["1G", "/dev/c"], &["0"]));
        assert_eq!(without, text.replace("  \"/dev/b\", # b\n", ""));
        let without = with_tiers(text, &spec(&["1G", "/dev/b"], &["0"]));
        assert_eq!(without, text.replace("  \"/dev/c\" # \"c\"\n", ""));
        let more = with_tiers(text, &spec(&["1G", "/dev/b", "/dev/c", "/dev/d"], &["0"]));
        let line = "  \"/dev/c\" # \"c\"\n";
        assert_eq!(more, text.replace(line, "  \"/dev/c\", # \"c\"\n  \"/dev/d\",\n"));
        for changed in [without, more] {
            assert!(toml::from_str::<toml::Table>(&changed).is_ok(), "{changed}");
        }
        let device = |text| TierSpec::parse("ssd", text).unwrap();
        let named = line_naming(text, Tier::Ssd, &device("/dev/b"));
        assert_eq!(named, Some((6, "\"/dev/b\", # b".to_owned())));
        assert_eq!(line_naming(text, Tier::Ssd, &device("/dev/x")), None);
    }
}
