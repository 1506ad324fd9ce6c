//! Compression of single pages (LZ4 block format) and the sizes of objects in slabs.
//!
//! A compressed object is a length of two bytes, little-endian, and that number of compressed bytes.

use crate::page::{PAGE_BYTES, Page};

/// Object sizes are multiples of this, in bytes.
pub const CLASS_BYTES: usize = 256;
/// A page that needs more than this compressed is stored as it is.
pub const COMPRESSED_MAX_BYTES: usize = 3072;
const LENGTH_BYTES: usize = 2;

/// Size class of objects: `1..=12` for compressed pages of `class` × 256 bytes, 16 for whole pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Class(u8);

impl Class {
    /// Pages as they are.
    pub const RAW: Self = Self((PAGE_BYTES / CLASS_BYTES) as u8);

    /// The smallest class that holds `len_bytes`.
    #[must_use]
    pub fn of(len_bytes: usize) -> Self {
        Self(len_bytes.div_ceil(CLASS_BYTES).clamp(1, 16) as u8)
    }

    /// Bytes of one object.
    #[must_use]
    pub fn object_bytes(self) -> usize {
        usize::from(self.0) * CLASS_BYTES
    }

    /// Whether objects are compressed.
    #[must_use]
    pub fn is_compressed(self) -> bool {
        self != Self::RAW
    }
}

/// Compresses `page` as an object; `None` when it takes more than [`COMPRESSED_MAX_BYTES`].
#[must_use]
pub fn compress(page: &Page, out: &mut Vec<u8>) -> Option<Class> {
    let most = lz4_flex::block::get_maximum_output_size(PAGE_BYTES);
    out.resize(LENGTH_BYTES + most, 0);
    let len = lz4_flex::block::compress_into(&page.0, &mut out[LENGTH_BYTES..]).ok()?;
    if LENGTH_BYTES + len > COMPRESSED_MAX_BYTES {
        return None;
    }
    out[..LENGTH_BYTES].copy_from_slice(&u16::try_from(len).ok()?.to_le_bytes());
    out.truncate(LENGTH_BYTES + len);
    Some(Class::of(out.len()))
}

/// Restores a page from its object. False when the object is damaged.
#[must_use]
pub fn decompress(object: &[u8], page: &mut Page) -> bool {
    let Some((length, rest)) = object.split_first_chunk::<LENGTH_BYTES>() else {
        return false;
    };
    let Some(bytes) = rest.get(..usize::from(u16::from_le_bytes(*length))) else {
        return false;
    };
    lz4_flex::block::decompress_into(bytes, &mut page.0).is_ok_and(|len| len == PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn page_comes_back_as_it_was(seed in proptest::collection::vec(any::<u8>(), 1..4096)) {
            let mut page = Page::default();
            for (at, byte) in page.0.iter_mut().enumerate() {
                *byte = seed[at % seed.len()];
            }
            let mut object = Vec::new();
            if let Some(class) = compress(&page, &mut object) {
                prop_assert!(object.len() <= class.object_bytes());
                let mut back = Page::default();
                prop_assert!(decompress(&object, &mut back));
                prop_assert_eq!(back.0, page.0);
            }
        }

        #[test]
        fn damaged_objects_give_no_panic(object in proptest::collection::vec(any::<u8>(), 0..3072)) {
            let _ = decompress(&object, &mut Page::default());
        }
    }

    #[test]
    fn noise_is_not_compressed() {
        let mut page = Page::default();
        fastrand::Rng::with_seed(1).fill(&mut page.0);
        assert!(compress(&page, &mut Vec::new()).is_none());
    }
}
