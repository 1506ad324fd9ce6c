//! Lists of packages as text: the databases of dpkg and apk, and one package a line as `dpkg-query -W` and
//! `rpm -qa` print them. Other lines are skipped.

use crate::image::{MAX_NAME_BYTES, MAX_PACKAGES, Package};

/// Bytes of a list, at most.
pub const MAX_BYTES: u64 = 64 << 20;

/// Most bytes that a package is taken to have: an image may claim any number, and a hundred thousand of these
/// can still be added.
const MAX_PACKAGE_BYTES: u64 = 1 << 40;

/// Returns a package with these fields; `None` if the name is not plausible.
pub(super) fn package(name: &str, version: &str, bytes: u64) -> Option<Package> {
    let sensible = |text: &str| {
        !text.is_empty() && text.len() <= MAX_NAME_BYTES && text.chars().all(|c| c.is_ascii_graphic())
    };
    (sensible(name) && sensible(version)).then(|| Package {
        name: name.to_owned(),
        version: version.to_owned(),
        bytes: bytes.min(MAX_PACKAGE_BYTES),
    })
}

/// Whether the first bytes of a file begin a list of packages.
pub(super) fn is_list(head: &[u8]) -> bool {
    let text = String::from_utf8_lossy(head);
    let mut lines = text.lines();
    let Some(first) = lines.next() else { return false };
    if first.starts_with("Package: ") || (first.starts_with("C:Q1") && head.contains(&b'\n')) {
        return true;
    }
    // The last line may be cut off.
    let whole: Vec<_> = text.lines().take(text.matches('\n').count()).collect();
    !whole.is_empty() && whole.iter().all(|line| of_line(line).is_some())
}

/// Parses a list in any of the forms.
pub fn list(bytes: &[u8]) -> Vec<Package> {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_BYTES as usize)]);
    if text.starts_with("Package: ") {
        dpkg(bytes)
    } else if text.starts_with("C:Q1") {
        apk(bytes)
    } else {
        text.lines().filter_map(of_line).take(MAX_PACKAGES).collect()
    }
}

/// Parses `name[:arch] version [arch] size-in-bytes`, separated by spaces or tabs.
fn of_line(line: &str) -> Option<Package> {
    let fields: Vec<_> = line.split_whitespace().take(5).collect();
    match fields[..] {
        [name, version, size] => package(name, version, size.parse().ok()?),
        [name, version, arch, size] => package(&format!("{name}:{arch}"), version, size.parse().ok()?),
        _ => None,
    }
}

/// dpkg's `status`: paragraphs of fields. Packages of which only the configuration is left do not count.
pub(super) fn dpkg(bytes: &[u8]) -> Vec<Package> {
    let text = String::from_utf8_lossy(bytes);
    let paragraphs = text.split("\n\n").filter_map(|paragraph| {
        let field = |name: &str| {
            let line = paragraph.lines().find_map(|line| line.strip_prefix(name));
            line.map(str::trim)
        };
        let status = field("Status:").unwrap_or("install ok installed");
        if !status.ends_with(" installed") {
            return None;
        }
        // In KiB.
        let size = field("Installed-Size:").and_then(|kib| kib.parse::<u64>().ok());
        let name = field("Package:")?;
        let name = match field("Architecture:") {
            Some(arch) => format!("{name}:{arch}"),
            None => name.to_owned(),
        };
        package(&name, field("Version:")?, size.unwrap_or(0).saturating_mul(1024))
    });
    paragraphs.take(MAX_PACKAGES).collect()
}

/// apk's `installed`: paragraphs of one-letter fields.
pub(super) fn apk(bytes: &[u8]) -> Vec<Package> {
    let text = String::from_utf8_lossy(bytes);
    let paragraphs = text.split("\n\n").filter_map(|paragraph| {
        let field = |name: &str| paragraph.lines().find_map(|line| line.strip_prefix(name));
        let size = field("I:").and_then(|bytes| bytes.trim().parse().ok());
        let name = match field("A:") {
            Some(arch) => format!("{}:{arch}", field("P:")?),
            None => field("P:")?.to_owned(),
        };
        package(&name, field("V:")?, size.unwrap_or(0))
    });
    paragraphs.take(MAX_PACKAGES).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Package: base-files\nStatus: install ok installed\nInstalled-Size: 341\n\
        Architecture: amd64\nVersion: 12.4\nDescription: x\n Version: not this\n\n\
        Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n\
        Package: zsh\nStatus: install ok installed\nArchitecture: all\nVersion: 5.9\n";

    #[test]
    fn dpkg_status_gives_what_is_installed() {
        let found = list(STATUS.as_bytes());
        let named: Vec<_> = found
            .iter()
            .map(|p| (&p.name[..], &p.version[..], p.bytes))
            .collect();
        assert_eq!(
            named,
            [("base-files:amd64", "12.4", 341 * 1024), ("zsh:all", "5.9", 0)]
        );
        assert!(is_list(STATUS.as_bytes()));
    }

    #[test]
    fn apk_database_is_read() {
        let text =
            "C:Q1abc=\nP:musl\nV:1.2.4-r2\nA:x86_64\nS:383459\nI:622592\nF:lib\n\nC:Q1d\nP:zlib\nV:1\n";
        let found = list(text.as_bytes());
        assert_eq!((&found[0].name[..], found[0].bytes), ("musl:x86_64", 622_592));
        assert_eq!((&found[1].name[..], &found[1].version[..]), ("zlib", "1"));
        assert!(is_list(text.as_bytes()));
    }

    #[test]
    fn lines_of_rpm_and_dpkg_query_are_read() {
        let text = "bash 5.2.26-3.fc40 x86_64 8154789\nzlib\t1.3\t100\n";
        assert!(is_list(text.as_bytes()));
        let found = list(text.as_bytes());
        assert_eq!(found.len(), 2);
        assert_eq!((&found[0].name[..], found[0].bytes), ("bash:x86_64", 8_154_789));
    }

    #[test]
    fn other_text_is_no_list() {
        assert!(!is_list(b"#!/bin/sh\necho hello\n"));
        assert!(!is_list(b""));
        assert!(!is_list(&[0; 512]));
        assert!(list(b"\xff\xfe\n\n\nPackage:\n").is_empty());
    }
}
