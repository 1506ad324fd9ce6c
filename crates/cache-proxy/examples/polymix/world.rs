//! What there is to ask for: pages with embedded objects, and large objects that belong to no page. Sizes,
//! and what may be stored, follow from an object's number alone. Knows no sockets.

/// Objects of pages are below this; what is larger stands alone.
const EMBEDDED_MAX: u64 = 64 << 10;
/// Sizes in KiB and the share of objects below them in a thousand (thesis, Table 2.5).
const SIZES: [(u64, u64); 6] = [(8, 748), (16, 872), (32, 938), (64, 971), (128, 988), (256, 995)];
/// Least and most size of a download, bytes: 0.1 % of the requests are for 300 KB or more (§2.5.1).
const DOWNLOAD_BYTES: (u64, u64) = (300_000, 1_000_000);
/// Lifetime in seconds of the objects of which 5 % are, so that they are validated.
const SHORT_LIFE_S: u64 = 30;

/// An object of a page (0 is the page itself), or one that stands alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Object {
    /// Page and place in it.
    Embedded(u64, u64),
    /// Number; 64 KiB to 300 KB.
    Large(u64),
    /// Number; 300 KB and more.
    Download(u64),
}

/// SplitMix64: one well mixed number of another.
pub fn mixed(n: u64) -> u64 {
    let mut z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number between two, evenly on a logarithmic scale.
fn between(low: u64, high: u64, draw: u64) -> u64 {
    let part = (draw >> 11) as f64 / (1u64 << 53) as f64;
    (low as f64 * (high as f64 / low as f64).powf(part)) as u64
}

/// Objects of a page: itself and 10 to 20 embedded ones.
pub fn objects_of(page: u64) -> u64 {
    11 + mixed(page ^ 0x0b1e_c700) % 11
}

/// Bytes of a page with all that is embedded.
pub fn page_bytes(page: u64) -> u64 {
    (0..objects_of(page))
        .map(|n| Object::Embedded(page, n).size_bytes())
        .sum()
}

impl Object {
    /// A number of the object, with a salt for what is drawn.
    fn draw(self, salt: u64) -> u64 {
        let id = match self {
            Self::Embedded(page, n) => page << 8 | n,
            Self::Large(n) => 1 << 60 | n,
            Self::Download(n) => 2 << 60 | n,
        };
        mixed(mixed(id) ^ salt)
    }

    /// Length of the body.
    pub fn size_bytes(self) -> u64 {
        let (first, beyond) = match self {
            Self::Download(_) => return between(DOWNLOAD_BYTES.0, DOWNLOAD_BYTES.1, self.draw(1)),
            Self::Embedded(..) => (0, EMBEDDED_MAX),
            Self::Large(_) => (EMBEDDED_MAX, DOWNLOAD_BYTES.0),
        };
        // A draw from the part of the table between the two bounds.
        let share = |bytes: u64| {
            SIZES
                .iter()
                .find(|(kib, _)| kib << 10 == bytes)
                .map_or(999, |row| row.1)
        };
        let low = if first == 0 { 0 } else { share(first) };
        let drawn = low + self.draw(1) % (share(beyond) - low);
        let at = SIZES
            .iter()
            .position(|(_, below)| drawn < *below)
            .unwrap_or(SIZES.len());
        let high = SIZES.get(at).map_or(DOWNLOAD_BYTES.0, |row| row.0 << 10);
        let least = match at {
            0 => 512,
            at => SIZES[at - 1].0 << 10,
        };
        between(least, high, self.draw(2))
    }

    /// Whether a cache may store it: 90 %, so that 75 % of the misses at 60 % hits are stored (§2.3.6).
    pub fn is_cacheable(self) -> bool {
        matches!(self, Self::Download(_)) || !self.draw(3).is_multiple_of(10)
    }

    /// Lifetime, seconds.
    pub fn lifetime_s(self) -> u64 {
        match self.draw(4) % 20 {
            0 => SHORT_LIFE_S,
            _ => 86_400,
        }
    }

    /// Its path on the origin.
    pub fn path(self) -> String {
        match self {
            Self::Embedded(page, 0) => format!("/p/{page}/"),
            Self::Embedded(page, n) => format!("/p/{page}/{n}"),
            Self::Large(n) => format!("/l/{n}"),
            Self::Download(n) => format!("/d/{n}"),
        }
    }

    /// The object of a path.
    pub fn of_path(path: &str) -> Option<Self> {
        let mut parts = path.strip_prefix('/')?.split('/');
        let (kind, number) = (parts.next()?, parts.next()?.parse().ok()?);
        match (kind, parts.next()) {
            ("p", Some("")) => Some(Self::Embedded(number, 0)),
            ("p", Some(n)) => Some(Self::Embedded(number, n.parse().ok()?)),
            ("l", None) => Some(Self::Large(number)),
            ("d", None) => Some(Self::Download(number)),
            _ => None,
        }
    }

    /// Its validator.
    pub fn etag(self) -> String {
        format!("\"{:x}\"", self.draw(5))
    }

    /// Eight bytes of which its body consists, over and over.
    pub fn unit(self) -> [u8; 8] {
        self.draw(6).to_le_bytes()
    }
}

/// Whether a body that begins at byte `at` of its object is that object's.
pub fn is_body_of(object: Object, at: u64, bytes: &[u8]) -> bool {
    let unit = object.unit();
    (at..)
        .zip(bytes)
        .step_by(61)
        .all(|(n, byte)| unit[n as usize % 8] == *byte)
}
