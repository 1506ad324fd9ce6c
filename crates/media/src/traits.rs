//! The two kinds of medium. These traits state the guarantees to callers; each backend implements them its
//! own way.

use std::fmt;
use std::fs::File;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{DeviceName, MediaError};

/// The kind of a medium, for humans and for policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MediumKind {
    /// Persistent memory, mapped.
    Dax,
    /// A file mapped through the page cache.
    File,
    /// Memory only: gone at a power cut.
    Shm,
    /// A memory copy with a backing file, written at durability points.
    LiveLog,
    /// A file read and written by system calls.
    DirectFile,
    /// A block device, or a file used as one.
    Block,
    /// Simulated, for crash tests.
    Sim,
}

/// Whether a device still takes writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceState {
    /// In service.
    Ok,
    /// Latched by an error: it answers reads as well as it can and refuses writes.
    Failed {
        /// The error that latched it, as text for a person.
        reason: Arc<str>,
    },
}

/// Description of a device: for `status` and for the head of every benchmark result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Path or given name.
    pub name: DeviceName,
    /// Kind of medium.
    pub kind: MediumKind,
    /// Backend and way of access, such as "io_uring, O_DIRECT", with any model it wraps ("emulated hdd over
    /// …").
    pub backend: String,
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.backend)
    }
}

/// A byte-addressable region: an NVM device, a log, a journal.
///
/// All methods take `&self`. Callers guarantee that ranges written concurrently do not overlap; reading a
/// range that is being written is allowed and gives some mixture of old and new bytes.
///
/// Three strengths: after `write` the bytes are *visible* to all that map the region; after `fence` they
/// survive a *kill* of every process (and, on `dax`, a power cut); after `sync` they survive a *power cut*
/// (as far as the medium can: `shm` cannot). One exception, [`JournalFile`](crate::JournalFile), has no copy
/// that outlives the process: there only `sync` helps.
pub trait Region: Send + Sync {
    /// Current length in bytes.
    fn len_bytes(&self) -> u64;

    /// Copies `out.len()` bytes from `off`.
    ///
    /// # Errors
    /// `OutOfRange`; `Io` where reading is a system call. `out` is then unspecified.
    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError>;

    /// [`read`](Self::read) of a file that another process can shorten at any time, as a client can its log:
    /// missing bytes read as zeros, and this process is not harmed.
    ///
    /// # Errors
    /// `OutOfRange`.
    fn read_shared(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.read(off, out)
    }

    /// Whether a small read costs a copy and no system call.
    fn is_mapped(&self) -> bool {
        self.as_ptr().is_some()
    }

    /// Copies `src` to `off`. Visible when this returns; ordered and durable as the next
    /// [`fence`](Self::fence) and [`sync`](Self::sync) say.
    ///
    /// # Errors
    /// `OutOfRange` or `ReadOnly`, and nothing is written; `Io`/`NoSpace` where writing is a system call.
    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError>;

    /// [`write`](Self::write) that also returns `crc32c_append(seed, bytes as stored)`. Each byte of `src` is
    /// loaded exactly once, so a buffer that another thread changes meanwhile cannot make checksum and stored
    /// bytes differ.
    ///
    /// # Errors
    /// As for `write`.
    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError>;

    /// Whether each write is a system call, so that a few large ones are better than many small.
    fn is_written_by_calls(&self) -> bool {
        false
    }

    /// Orders all earlier writes *of this thread* before its later ones, and commits them against a kill.
    ///
    /// # Errors
    /// `Failed` if the region has latched.
    fn fence(&self) -> Result<(), MediaError>;

    /// Gives the memory back while others still refer to the region: later stores have no effect, later loads
    /// return arbitrary bytes. Only for a region whose bytes are no longer trusted. Does nothing where there
    /// is no memory to give back.
    fn retire(&self) {}

    /// Fences, and makes everything fenced in `off..off + len` durable against a power cut. Durable when this
    /// returns.
    ///
    /// # Errors
    /// `Io`, which latches the region (the state of the host's pages is then unknown); `NoSpace`, which does
    /// not.
    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError>;

    /// [`sync`](Self::sync) of several ranges, each its first byte and its length, with one wait for the
    /// device where the backend can. A power cut before the return may leave any subset of them durable.
    ///
    /// # Errors
    /// As `sync`; any of the ranges may be durable then.
    fn sync_all(&self, ranges: &[(u64, u64)]) -> Result<(), MediaError> {
        ranges.iter().try_for_each(|(off, len)| self.sync(*off, *len))
    }

    /// Prepares a range for syncs of small parts of it, where the first write to it costs more than later
    /// ones. Changes no content, may be called at any time, and promises nothing.
    ///
    /// # Errors
    /// As `sync`.
    fn prepare(&self, _off: u64, _len: u64) -> Result<(), MediaError> {
        Ok(())
    }

    /// Makes the region at least `new_len` bytes long, with zeros and with space allocated on the host
    /// *first*, so that no later store can raise SIGBUS. Never shrinks; a smaller length is no error.
    ///
    /// # Errors
    /// `NoSpace`: the length is unchanged. `TooLong`: the region's limit.
    fn grow(&self, new_len: u64) -> Result<(), MediaError>;

    /// Allocates host space for a range of a sparse region, before it is handed to a client that stores to
    /// it.
    ///
    /// # Errors
    /// `OutOfRange`; `NoSpace`, and some of the range may be allocated then.
    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError>;

    /// Faults the pages of a range in for writing, so that the first store to each is as fast as later ones.
    /// Changes no content; does nothing where there are no pages.
    fn populate(&self, _off: u64, _len: u64) {}

    /// Sets bit 0 of each byte of `pages` to whether that page of 4 KiB, from `off` on (a multiple of it), is
    /// in the host's memory. `false`: residency is not known, and `pages` is unchanged.
    fn residency(&self, _off: u64, _pages: &mut [u8]) -> bool {
        false
    }

    /// First byte of the mapping, valid for `len_bytes()` bytes as long as the region lives; `None` where
    /// there is no mapping or where an access by pointer would bypass a simulation or a model. Safe code does
    /// not need it: one [`read`](Self::read) of an extent costs one virtual call.
    fn as_ptr(&self) -> Option<NonNull<u8>> {
        None
    }

    /// Whether the region still takes writes.
    fn state(&self) -> DeviceState {
        DeviceState::Ok
    }

    /// Description for humans.
    fn info(&self) -> DeviceInfo;
}

/// A part of a block device as another process reads it.
#[derive(Debug)]
pub struct ReaderPart {
    /// Which of the device's own devices it is, below 64; 0 if it is one.
    pub index: u8,
    /// Its first byte on the device.
    pub first_byte: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Offset in the file of its first byte.
    pub data_offset: u64,
    /// Open for reading only. Reads bypass the page cache if the device's own do.
    pub file: File,
    /// Reads are to be slowed down to a model of an SSD
    /// ([`DiskModel::SSD`](crate::emulated::DiskModel::SSD)).
    pub emulated: bool,
}

/// Writes to a [`BlockDevice`] begin and end at multiples of this many bytes.
pub const DEVICE_BLOCK_BYTES: u64 = 4096;

/// An SSD or HDD. Reads may begin anywhere; writes are whole blocks of [`DEVICE_BLOCK_BYTES`].
pub trait BlockDevice: Send + Sync {
    /// Length in bytes, a multiple of the block.
    fn len_bytes(&self) -> u64;

    /// Reads `out.len()` bytes from `off`, all of them. Buffers aligned to 4,096 avoid a copy.
    ///
    /// # Errors
    /// `OutOfRange`, `Io`; a failed read does not latch.
    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError>;

    /// Writes all of `src` at `off`. Later reads see it when this returns; durable after the next
    /// [`flush`](Self::flush).
    ///
    /// # Errors
    /// `OutOfRange`/`Misaligned`: nothing is written. `NoSpace`: some may be written; not latched. `Io`:
    /// latched.
    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError>;

    /// [`write`](Self::write) that is durable when it returns, past the device's cache where possible. Does
    /// not make other writes durable.
    ///
    /// # Errors
    /// As for `write` and `flush`.
    fn write_durable(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.write(off, src)?;
        self.flush()
    }

    /// Makes every write that returned before this call durable against a power cut.
    ///
    /// # Errors
    /// `Io`: latched, since the host may have dropped the data.
    fn flush(&self) -> Result<(), MediaError>;

    /// Tells the device that the range is free. It reads as zeros or as before until written again: the
    /// caller must not rely on either.
    ///
    /// # Errors
    /// `OutOfRange`/`Misaligned`. A device that cannot trim returns `Ok`.
    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError>;

    /// Reads several ranges, at once where the backend can.
    ///
    /// # Errors
    /// The first error met; all buffers are then unspecified.
    fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        parts.iter_mut().try_for_each(|(off, out)| self.read(*off, out))
    }

    /// Writes several ranges that do not overlap, at once where the backend can.
    ///
    /// # Errors
    /// The first error met; any of the ranges may be written then.
    fn write_batch(&self, parts: &[(u64, &[u8])]) -> Result<(), MediaError> {
        parts.iter().try_for_each(|(off, src)| self.write(*off, src))
    }

    /// Opens what another process can read this device by, without this one: what was written here and
    /// returned is seen there. Parts in order; what lies in none of them is read by this process only. Empty
    /// where no part of it can be read so.
    fn reader_parts(&self) -> Vec<ReaderPart> {
        Vec::new()
    }

    /// Closes those of the device's own devices that another process has taken out of it, by the bits of
    /// [`ReaderPart::index`]: they are not read any more. For a device made of such parts.
    fn let_go(&self, _gone: u64) {}

    /// The devices that were taken out of it, as [`let_go`](Self::let_go) takes them.
    fn gone_parts(&self) -> u64 {
        0
    }

    /// Whether reads move a head and nobody below sorts them: [`Elevator`](crate::elevator::Elevator) then
    /// does.
    fn wants_order(&self) -> bool {
        false
    }

    /// Whether the device still takes writes.
    fn state(&self) -> DeviceState {
        DeviceState::Ok
    }

    /// Path or given name.
    fn name(&self) -> DeviceName {
        self.info().name
    }

    /// Description for humans.
    fn info(&self) -> DeviceInfo;
}
