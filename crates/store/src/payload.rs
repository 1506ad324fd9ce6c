//! Bytes to be written: in memory, or still in a session's log. Does not know the log, and does not interpret
//! the bytes.

use crate::{Result, StoreError};
use std::fmt;

/// Supplies payload that is not in memory when its blocks are written.
pub trait PayloadSource {
    /// Copies bytes of payload `id`, from `skip` on. Each byte is requested once, in ascending order, except
    /// for blocks that one call writes twice.
    ///
    /// # Errors
    /// The payload is unavailable: the transaction is abandoned.
    fn fetch(&self, id: u64, skip: usize, out: &mut [u8]) -> std::result::Result<(), PayloadUnavailable>;
}

/// The source could not supply the payload; it knows why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PayloadUnavailable;

/// A piece of the data to be written.
#[derive(Clone, Copy)]
pub enum Payload<'a> {
    /// Bytes in memory.
    Inline(&'a [u8]),
    /// Bytes that are fetched when they are written (delayed writeback).
    Deferred {
        /// Supplier of the bytes.
        source: &'a dyn PayloadSource,
        /// Identifier of the payload within that source.
        id: u64,
        /// First byte of it.
        skip: usize,
        /// Number of bytes.
        len: usize,
        /// The bytes are written again after a crash, whether or not this write succeeded: so whole blocks of
        /// them may overwrite the old ones in place.
        redone: bool,
    },
}

impl<'a> Payload<'a> {
    /// Returns the length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::Inline(data) => data.len(),
            Self::Deferred { len, .. } => *len,
        }
    }

    /// Returns whether the length is 0.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether it is written again after a crash.
    pub(crate) const fn is_redone(&self) -> bool {
        matches!(self, Self::Deferred { redone: true, .. })
    }

    /// Joins both into one if `next` continues this piece in the same payload.
    pub(crate) fn joined(&self, next: &Self) -> Option<Self> {
        match (*self, *next) {
            (
                Self::Deferred {
                    source,
                    id,
                    skip,
                    len,
                    redone,
                },
                Self::Deferred {
                    id: other,
                    skip: behind,
                    len: more,
                    ..
                },
            ) if id == other && skip + len == behind => Some(Self::Deferred {
                source,
                id,
                skip,
                len: len + more,
                redone,
            }),
            _ => None,
        }
    }

    /// Returns the `len` bytes from `start` on, which must exist.
    pub(crate) fn part(&self, start: usize, len: usize) -> Self {
        debug_assert!(start + len <= self.len());
        match *self {
            Self::Inline(data) => Self::Inline(&data[start..start + len]),
            Self::Deferred {
                source,
                id,
                skip,
                redone,
                ..
            } => Self::Deferred {
                source,
                id,
                skip: skip + start,
                len,
                redone,
            },
        }
    }

    /// Copies all bytes to `out`, which has the same length.
    ///
    /// # Errors
    /// `Invalid`: the source could not supply them.
    pub(crate) fn copy_to(&self, out: &mut [u8]) -> Result<()> {
        match *self {
            Self::Inline(data) => {
                out.copy_from_slice(data);
                Ok(())
            }
            Self::Deferred { source, id, skip, .. } => source
                .fetch(id, skip, out)
                .map_err(|PayloadUnavailable| StoreError::Invalid("payload that cannot be fetched")),
        }
    }
}

impl fmt::Debug for Payload<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inline(data) => write!(f, "Inline({} bytes)", data.len()),
            Self::Deferred { id, skip, len, .. } => write!(f, "Deferred({id}, {skip}, {len} bytes)"),
        }
    }
}
