//! The packages in an RPM database of the present form: an SQLite file whose table `Packages` has one header
//! a row.
//!
//! Only the needed parts of the two formats are read: table b-trees with overflow pages
//! (sqlite.org/fileformat2.html, sections 1.3 to 1.6 and 2.1), and the index of a header (rpm.org, "Package
//! format", "Header").

use super::packages::package;
use crate::image::{MAX_PACKAGES, Package};

const MAGIC: &[u8] = b"SQLite format 3\0";
/// Most levels of a b-tree: a file of 2^32 pages has fewer than 20.
const MAX_DEPTH: u32 = 20;
/// Bytes of one header, at most.
const MAX_HEADER_BYTES: u64 = 32 << 20;

/// Returns the packages of a database; none if it is damaged.
pub(super) fn database(bytes: &[u8]) -> Vec<Package> {
    let Some(file) = Sqlite::new(bytes) else {
        return Vec::new();
    };
    let Some(root) = file.table("Packages") else {
        return Vec::new();
    };
    let mut found = Vec::new();
    file.rows(root, MAX_DEPTH, &mut |row| {
        // Columns: hnum, blob.
        if let Some(Value::Bytes(header)) = row.get(1) {
            found.extend(of_header(header));
        }
        found.len() < MAX_PACKAGES
    });
    found
}

fn be(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Returns the bytes `from..from + len`, if the range is valid.
fn part(bytes: &[u8], from: usize, len: usize) -> Option<&[u8]> {
    bytes.get(from..from.checked_add(len)?)
}

/// Reads a number in SQLite's variable-length form, and returns it with its length.
fn varint(bytes: &[u8]) -> Option<(u64, usize)> {
    let mut number = 0;
    for (at, byte) in bytes.iter().enumerate().take(9) {
        if at == 8 {
            return Some((number << 8 | u64::from(*byte), 9));
        }
        number = number << 7 | u64::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            return Some((number, at + 1));
        }
    }
    None
}

enum Value {
    Number(u64),
    Bytes(Vec<u8>),
    Other,
}

struct Sqlite<'a> {
    bytes: &'a [u8],
    page: usize,
    usable: usize,
}

impl<'a> Sqlite<'a> {
    fn new(bytes: &'a [u8]) -> Option<Self> {
        let head = bytes.get(..100).filter(|head| head.starts_with(MAGIC))?;
        let page = match be(&head[16..18]) {
            1 => 65_536,
            page if page.is_power_of_two() && page >= 512 => page as usize,
            _ => return None,
        };
        let usable = page
            .checked_sub(usize::from(head[20]))
            .filter(|usable| *usable >= 480)?;
        Some(Self { bytes, page, usable })
    }

    /// Returns the page of this number, counted from 1.
    fn page(&self, number: u64) -> Option<&'a [u8]> {
        let from = usize::try_from(number.checked_sub(1)?)
            .ok()?
            .checked_mul(self.page)?;
        part(self.bytes, from, self.page)
    }

    /// The root of a table.
    fn table(&self, name: &str) -> Option<u64> {
        let mut root = None;
        self.rows(1, MAX_DEPTH, &mut |row| {
            // Columns of the schema: type, name, tbl_name, rootpage, sql.
            if let [
                Value::Bytes(kind),
                Value::Bytes(named),
                _,
                Value::Number(page),
                ..,
            ] = row
                && kind == b"table"
                && named == name.as_bytes()
            {
                root = Some(*page);
            }
            root.is_none()
        });
        root
    }

    /// Calls `each` with the rows of a table until it returns false. Returns false if it did, or at damage.
    fn rows(&self, root: u64, depth: u32, each: &mut dyn FnMut(&[Value]) -> bool) -> bool {
        self.rows_of(root, depth, each).unwrap_or(false)
    }

    fn rows_of(&self, number: u64, depth: u32, each: &mut dyn FnMut(&[Value]) -> bool) -> Option<bool> {
        let depth = depth.checked_sub(1)?;
        let page = self.page(number)?;
        let at = if number == 1 { 100 } else { 0 };
        let kind = *page.get(at)?;
        let cells = be(part(page, at + 3, 2)?) as usize;
        let pointers = at + if kind == 5 { 12 } else { 8 };
        for cell in 0..cells {
            let cell = be(part(page, pointers + 2 * cell, 2)?) as usize;
            let goes_on = match kind {
                5 => self.rows_of(be(part(page, cell, 4)?), depth, each)?,
                13 => self.row(page, cell).is_none_or(|row| each(&row)),
                _ => return None,
            };
            if !goes_on {
                return Some(false);
            }
        }
        match kind {
            5 => self.rows_of(be(part(page, at + 8, 4)?), depth, each),
            _ => Some(true),
        }
    }

    /// The row in a cell of a leaf.
    fn row(&self, page: &[u8], cell: usize) -> Option<Vec<Value>> {
        let (len, a) = varint(page.get(cell..)?)?;
        let (_, b) = varint(page.get(cell + a..)?)?;
        if len > MAX_HEADER_BYTES {
            return None;
        }
        let payload = self.payload(page, cell + a + b, len as usize)?;
        let (head, mut at) = varint(&payload)?;
        let mut data = usize::try_from(head).ok()?;
        let mut row = Vec::new();
        while (at as u64) < head && row.len() < 16 {
            let (kind, used) = varint(payload.get(at..)?)?;
            at += used;
            let len = match kind {
                0 | 8 | 9 => 0,
                1..=4 => kind as usize,
                5 => 6,
                6 | 7 => 8,
                kind if kind >= 12 => usize::try_from((kind - 12) / 2).ok()?,
                _ => return None,
            };
            let bytes = part(&payload, data, len)?;
            data += len;
            row.push(match kind {
                1..=6 => Value::Number(be(bytes)),
                8 | 9 => Value::Number(kind - 8),
                kind if kind >= 12 => Value::Bytes(bytes.to_vec()),
                _ => Value::Other,
            });
        }
        Some(row)
    }

    /// Returns the bytes of a cell, with those on overflow pages.
    fn payload(&self, page: &[u8], from: usize, len: usize) -> Option<Vec<u8>> {
        let most = self.usable - 35;
        if len <= most {
            return part(page, from, len).map(<[u8]>::to_vec);
        }
        let least = (self.usable - 12) * 32 / 255 - 23;
        let fitting = least + (len - least) % (self.usable - 4);
        let here = if fitting <= most { fitting } else { least };
        let mut bytes = part(page, from, here)?.to_vec();
        let mut next = be(part(page, from + here, 4)?);
        // Every page adds bytes, so a loop of pages ends when all are read.
        while bytes.len() < len {
            let page = self.page(next)?;
            next = be(page.get(..4)?);
            let now = (len - bytes.len()).min(self.usable - 4);
            bytes.extend_from_slice(part(page, 4, now)?);
        }
        Some(bytes)
    }
}

/// Returns the package that a header describes.
fn of_header(header: &[u8]) -> Option<Package> {
    let (entries, store_bytes) = (be(header.get(..4)?) as usize, be(header.get(4..8)?) as usize);
    let index = part(header, 8, entries.checked_mul(16)?)?;
    let store = part(header, 8 + index.len(), store_bytes)?;
    let entry = |tag: u64| {
        let entry = index.chunks(16).find(|entry| be(&entry[..4]) == tag)?;
        store.get(be(&entry[8..12]) as usize..)
    };
    let text = |tag| {
        let bytes = entry(tag)?;
        let end = bytes.iter().take(256).position(|byte| *byte == 0)?;
        std::str::from_utf8(&bytes[..end]).ok()
    };
    let number = |tag, len| Some(be(entry(tag)?.get(..len)?));
    // RPMTAG_NAME, _VERSION, _RELEASE, _ARCH; _LONGSIZE (8 bytes) or _SIZE (4).
    let (name, version, release) = (text(1000)?, text(1001)?, text(1002)?);
    let name = match text(1022) {
        Some(arch) => format!("{name}:{arch}"),
        None => name.to_owned(),
    };
    let bytes = number(5009, 8).or_else(|| number(1009, 4)).unwrap_or(0);
    package(&name, &format!("{version}-{release}"), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &str, arch: &str, bytes: u32) -> Vec<u8> {
        let mut store = Vec::new();
        let mut index = Vec::new();
        for (tag, text) in [(1000u32, name), (1001, "1.2"), (1002, "3.fc40"), (1022, arch)] {
            for number in [tag, 6, store.len() as u32, 1] {
                index.extend(number.to_be_bytes());
            }
            store.extend(text.bytes().chain([0]));
        }
        for number in [1009, 4, store.len() as u32, 1] {
            index.extend(number.to_be_bytes());
        }
        store.extend(bytes.to_be_bytes());
        let mut header = Vec::new();
        header.extend(5u32.to_be_bytes());
        header.extend((store.len() as u32).to_be_bytes());
        header.extend(index);
        header.extend(store);
        header
    }

    #[test]
    fn header_gives_name_version_and_size() {
        let found = of_header(&header("bash", "x86_64", 8_000_000)).expect("a package");
        assert_eq!(
            (&found.name[..], &found.version[..]),
            ("bash:x86_64", "1.2-3.fc40")
        );
        assert_eq!(found.bytes, 8_000_000);
        let whole = header("bash", "x86_64", 1);
        for cut in 0..whole.len() {
            let _ = of_header(&whole[..cut]);
        }
    }

    #[test]
    fn varints_are_as_sqlite_has_them() {
        assert_eq!(varint(&[0x7f]), Some((127, 1)));
        assert_eq!(varint(&[0x81, 0x00]), Some((128, 2)));
        assert_eq!(varint(&[0xff; 9]), Some((u64::MAX, 9)));
        assert_eq!(varint(&[0x80]), None);
    }

    #[test]
    fn database_written_by_sqlite_is_read_and_damage_is_survived() {
        // Made with python3's sqlite3; it has interior pages and overflow pages.
        let script = "
import sqlite3, struct, sys
def header(name, pad):
    store = b''; index = b''
    for tag, text in ((1000, name), (1001, '1.2'), (1002, '3'), (1022, 'x86_64'), (1004, 'x' * pad)):
        index += struct.pack('>IIII', tag, 6, len(store), 1); store += text.encode() + b'\\0'
    index += struct.pack('>IIII', 1009, 4, len(store), 1); store += struct.pack('>I', 1000)
    return struct.pack('>II', 6, len(store)) + index + store
db = sqlite3.connect(sys.argv[1])
db.execute('CREATE TABLE Name (key TEXT, hnum INTEGER)')
db.execute('CREATE TABLE Packages (hnum INTEGER PRIMARY KEY AUTOINCREMENT, blob BLOB NOT NULL)')
for n in range(400):
    db.execute('INSERT INTO Packages(blob) VALUES (?)', (header('package-%03d' % n, n * 97 % 20000),))
db.commit()
";
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("rpmdb.sqlite");
        let made = std::process::Command::new("python3")
            .args(["-c", script])
            .arg(&path)
            .status();
        if !made.is_ok_and(|status| status.success()) {
            eprintln!("SKIPPED: needs python3 with sqlite3");
            return;
        }
        let bytes = std::fs::read(&path).expect("read");
        let found = database(&bytes);
        assert_eq!(found.len(), 400);
        assert_eq!(found[399].name, "package-399:x86_64");
        assert!(found.iter().all(|package| package.bytes == 1000));
        for seed in 0..300u64 {
            let mut damaged = bytes.clone();
            for n in 0..8 {
                let at = crate::hash::mix(seed * 8 + n);
                // Mostly in the pages that locate others.
                let bound = if n < 4 { 8192 } else { damaged.len() as u64 };
                damaged[(at % bound) as usize] = (at >> 40) as u8;
            }
            assert!(database(&damaged).len() <= MAX_PACKAGES);
        }
    }
}
