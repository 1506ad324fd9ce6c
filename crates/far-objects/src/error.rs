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
    /// The heap has no file for checkpoints.
    #[error("the heap lies on {device}, which has no checkpoints")]
    NoCheckpoints {
        /// The backend's name.
        device: String,
    },
    /// No block is free that the next checkpoint does not need, and another checkpoint makes some free.
    /// What was to be written stays in memory; an object that only the store had is not changed.
    #[error(
        "the object store on {device} is full until the next checkpoint; the last holds {held_bytes} bytes"
    )]
    Held {
        /// The backend's name.
        device: String,
        /// What the next checkpoint frees without cleaning.
        held_bytes: u64,
    },
    /// The file is not used.
    #[error("{file}: {reason}")]
    Refused {
        /// The file's name.
        file: String,
        /// Why.
        reason: Refusal,
    },
}

/// Why a file is not used for a heap.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It has no root of a heap.
    #[error("no heap with checkpoints lies in this file")]
    Foreign,
    /// Roots are there, none with a right checksum.
    #[error("the file has no complete checkpoint")]
    Incomplete,
    /// A later version of this program made it.
    #[error(
        "the checkpoint has format {version}, newer than {}: use the program that made it",
        crate::CHECKPOINT_VERSION
    )]
    Newer {
        /// Version of the format.
        version: u32,
    },
    /// The program's types are others than those that the file was made with.
    #[error("the checkpoint's schema tag is {found:#x}, not {wanted:#x}: the program's types have changed")]
    Schema {
        /// The file's.
        found: u64,
        /// The program's.
        wanted: u64,
    },
    /// A checkpoint is there whose bytes are damaged.
    #[error("the checkpoint is damaged: {0}")]
    Malformed(String),
    /// It was made for objects at addresses, or for handles alone, and is restored as the other.
    #[error("the checkpoint is of a heap {found}: restore it as such")]
    Kind {
        /// What was found.
        found: &'static str,
    },
    /// Another heap uses the file.
    #[error("another heap uses the file")]
    InUse,
    /// A new heap was to be made in a file that has bytes.
    #[error("the file has {len_bytes} bytes, and a new heap takes an empty one")]
    NotEmpty {
        /// Length of the file.
        len_bytes: u64,
    },
    /// The name of a handle is not known, its handle is there already, or it is of another kind or size.
    #[error("handle {handle:#x} is {what}")]
    Handle {
        /// The name.
        handle: u64,
        /// What is the matter.
        what: &'static str,
    },
}
