//! Bytes to write: at hand, or still where somebody else keeps them. Knows neither where that is nor what they are.

use crate::{Result, StoreError};
use std::fmt;

/// Where bytes are fetched from when they are written to their place.
pub trait Fetch {
    /// Copies bytes of `what`, from `skip` on. Each byte is asked for once, ascending, but where blocks are written again that the same call has
    /// written.
    ///
    /// # Errors
    /// They cannot be had: the transaction is given up.
    fn fetch(&self, what: u64, skip: usize, out: &mut [u8]) -> std::result::Result<(), NotFetched>;
}

/// Bytes could not be fetched; why is known to whoever was to fetch them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotFetched;

/// A piece of what is to be written.
#[derive(Clone, Copy)]
pub enum Bytes<'a> {
    /// These.
    Here(&'a [u8]),
    /// To be fetched.
    There {
        /// From where.
        from: &'a dyn Fetch,
        /// What of it.
        what: u64,
        /// First byte.
        skip: usize,
        /// Bytes.
        len: usize,
    },
}

impl<'a> Bytes<'a> {
    /// How many.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::Here(data) => data.len(),
            Self::There { len, .. } => *len,
        }
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `len` of them from `start` on, which they have.
    pub(crate) fn part(&self, start: usize, len: usize) -> Self {
        debug_assert!(start + len <= self.len());
        match *self {
            Self::Here(data) => Self::Here(&data[start..start + len]),
            Self::There { from, what, skip, .. } => Self::There {
                from,
                what,
                skip: skip + start,
                len,
            },
        }
    }

    /// Copies all of them to `out`, which is as long.
    ///
    /// # Errors
    /// `Invalid`: they could not be fetched.
    pub(crate) fn copy_to(&self, out: &mut [u8]) -> Result<()> {
        match *self {
            Self::Here(data) => {
                out.copy_from_slice(data);
                Ok(())
            }
            Self::There { from, what, skip, .. } => from
                .fetch(what, skip, out)
                .map_err(|NotFetched| StoreError::Invalid("bytes that cannot be fetched")),
        }
    }
}

impl fmt::Debug for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Here(data) => write!(f, "Here({} bytes)", data.len()),
            Self::There { what, skip, len, .. } => write!(f, "There({what}, {skip}, {len} bytes)"),
        }
    }
}
