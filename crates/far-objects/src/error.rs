//! What may go wrong, in one enum.

use varve_far::BackendError;

/// Why an operation on far objects was not done. Unless a variant says otherwise nothing changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An object or an element of no bytes: there is nothing to store.
    #[error("an object of 0 bytes cannot be allocated")]
    ZeroSize,
    /// An object does not fit into the log's blocks.
    #[error("an object of {len_bytes} bytes is larger than {max_bytes} bytes, the largest that is stored")]
    TooLarge {
        /// What was wanted.
        len_bytes: usize,
        /// [`OBJECT_MAX_BYTES`](crate::OBJECT_MAX_BYTES), or less where the object holds more than the value.
        max_bytes: usize,
    },
    /// `count * len_bytes` overflows, or there are no table numbers left.
    #[error("{count} objects of {len_bytes} bytes are more than can be addressed")]
    TooMany {
        /// How many objects.
        count: usize,
        /// Of how many bytes.
        len_bytes: usize,
    },
    /// The store has no room for another object. Free some, or give it a larger backend.
    #[error("the object store on {device} is full")]
    Full {
        /// The backend's name.
        device: String,
    },
    /// The memory limit does not suffice even with an empty cache.
    #[error("{needed_bytes} bytes do not fit below the limit of {limit_bytes} beside tables and guards")]
    MemoryLimit {
        /// What was wanted.
        needed_bytes: u64,
        /// The limit of all memory of the heap.
        limit_bytes: u64,
    },
    /// Guards hold as many bytes as the page buffer may have.
    #[error("guards hold the whole page buffer of {limit_bytes} bytes")]
    PageBuffer {
        /// Its size.
        limit_bytes: u64,
    },
    /// No object has this name: it was freed, or never was.
    #[error("object {0:#x} is not allocated")]
    NotAllocated(u64),
    /// A range or an index beyond the end.
    #[error("{index} is beyond the end, {len}")]
    OutOfRange {
        /// What was asked for: an element's index, or the end of a range of bytes.
        index: usize,
        /// How many there are.
        len: usize,
    },
    /// The device failed. A read may succeed later; a write left its object in memory.
    #[error("{device}: {error}")]
    Io {
        /// The backend's name.
        device: String,
        /// Its message.
        error: BackendError,
    },
    /// The bytes on the device are not those that were written. Writing the whole object anew mends it.
    #[error("{device}: object {object:#x} at sector {sector} has a wrong checksum")]
    Damaged {
        /// The backend's name.
        device: String,
        /// The object's number in the log.
        object: u64,
        /// Sector of 512 bytes, of the log.
        sector: u64,
    },
    /// The configuration cannot work.
    #[error("{0}")]
    Config(String),
}
