//! Random access to the bytes of an image, for its parsers.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::FileExt;
use std::rc::Rc;

/// A source of fixed length that can be read at any offset.
pub trait ReadAt {
    /// Its length in bytes.
    fn len(&self) -> u64;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most bytes of data in it, without holes.
    fn max_data(&self) -> u64 {
        self.len()
    }

    /// Fills `buffer` from `offset_bytes`.
    ///
    /// # Errors
    /// If the range passes the end, or the bytes cannot be read.
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()>;

    /// The first range of bytes at or after `from` that is not known to be a hole; `None` if there is none.
    ///
    /// # Errors
    /// If the source cannot find its holes.
    fn next_data(&self, from: u64) -> Result<Option<(u64, u64)>> {
        Ok((from < self.len()).then_some((from, self.len())))
    }
}

/// The error of reading past the end.
pub(super) fn past_end() -> Error {
    Error::new(
        ErrorKind::UnexpectedEof,
        "it ends before the bytes that were to be read",
    )
}

/// A file; its length is the length at the start.
#[derive(Debug)]
pub struct OfFile {
    file: File,
    len: u64,
}

impl OfFile {
    /// Wraps a regular file or a block device.
    ///
    /// # Errors
    /// If its length cannot be determined.
    pub fn new(file: File) -> Result<Self> {
        // Works for a block device too, whose metadata have no length.
        let len = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))?;
        Ok(Self { file, len })
    }
}

impl ReadAt for OfFile {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buffer, offset_bytes)
    }

    fn next_data(&self, from: u64) -> Result<Option<(u64, u64)>> {
        if from >= self.len {
            return Ok(None);
        }
        let data = match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(from)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => return Ok(None),
            // The file does not report holes (a block device).
            Err(rustix::io::Errno::INVAL) => return Ok(Some((from, self.len))),
            Err(error) => return Err(error.into()),
        };
        let hole = rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Hole(data))?;
        Ok((data < self.len).then_some((data, hole.min(self.len))))
    }
}

impl ReadAt for Vec<u8> {
    fn len(&self) -> u64 {
        Vec::len(self) as u64
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()> {
        let from = usize::try_from(offset_bytes).map_err(|_| past_end())?;
        let to = from.checked_add(buffer.len()).ok_or_else(past_end)?;
        buffer.copy_from_slice(self.get(from..to).ok_or_else(past_end)?);
        Ok(())
    }
}

/// A part of a source, such as a partition of a disk.
#[derive(Clone)]
pub struct Window {
    whole: Rc<dyn ReadAt>,
    from: u64,
    len: u64,
}

impl Window {
    /// The range of `len` bytes from `from`, cut off at the end of the source.
    pub fn new(whole: Rc<dyn ReadAt>, from: u64, len: u64) -> Self {
        let len = whole.len().saturating_sub(from).min(len);
        Self { whole, from, len }
    }

    /// Its name in messages.
    pub fn label(&self) -> String {
        match (self.from, self.len == self.whole.len()) {
            (0, true) => "the file system".into(),
            (from, _) => format!("the file system at byte {from}"),
        }
    }
}

impl ReadAt for Window {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()> {
        let end = offset_bytes.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.len) {
            return Err(past_end());
        }
        self.whole.read_at(self.from + offset_bytes, buffer)
    }
}

/// Reads a source sequentially.
pub(super) struct Stream {
    source: Rc<dyn ReadAt>,
    at: u64,
}

impl Stream {
    pub(super) const fn new(source: Rc<dyn ReadAt>) -> Self {
        Self { source, at: 0 }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let left = usize::try_from(self.source.len() - self.at).unwrap_or(usize::MAX);
        let now = left.min(buffer.len());
        self.source.read_at(self.at, &mut buffer[..now])?;
        self.at += now as u64;
        Ok(now)
    }
}
