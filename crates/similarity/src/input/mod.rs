//! Inputs: raw disks, qcow2, ext4, tar and OCI layers, lists of packages. Each becomes a [`Profile`].
//!
//! Everything here is read as if an attacker had written it: lengths and offsets are checked against the
//! source's length, loops and depths are bounded, and [`Limits`] bound the rest. It is meant to run in an
//! unprivileged process (`sandbox`). Images that cannot be parsed are compared by blocks. This module opens
//! no file by name.

mod collect;
pub mod disk;
mod ext4;
mod packages;
mod partitions;
mod qcow2;
mod rpm;
mod tar;

pub use collect::Collector;
pub use disk::ReadAt;
pub use packages::list as package_list;

use crate::image::{Form, Profile};
use std::cell::RefCell;
use std::io::Read;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Limits for reading one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Time from the start, after which reading ends with an error.
    pub time: Duration,
    /// Bytes of memory of the process that parses.
    pub memory_bytes: u64,
    /// Depth of directories, of archives in archives, of chained partitions.
    pub depth: u32,
    /// Files and directories.
    pub entries: u64,
    /// Largest expansion of compressed data: bytes for each compressed byte.
    pub expansion: u64,
    /// Elements in a sketch.
    pub elements: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            time: Duration::from_secs(600),
            memory_bytes: 1 << 30,
            depth: 64,
            entries: 4 << 20,
            expansion: 1100,
            elements: crate::sketch::DEFAULT_ELEMENTS,
        }
    }
}

/// The reason why an image, or a part of it, could not be read.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// Reading its bytes failed.
    #[error("cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// Its structure is damaged.
    #[error("{what} is damaged: {detail}")]
    Damaged {
        /// The structure.
        what: &'static str,
        /// The problem.
        detail: String,
    },
    /// It uses an unsupported feature.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// A limit was reached.
    #[error("{0}")]
    Limit(String),
}

impl InputError {
    fn damaged(what: &'static str, detail: impl Into<String>) -> Self {
        Self::Damaged {
            what,
            detail: detail.into(),
        }
    }
}

/// Remaining time, bytes and entries.
#[derive(Debug)]
struct Budget {
    until: Instant,
    time: Duration,
    entries: u64,
    bytes: u64,
}

impl Budget {
    fn new(limits: &Limits, bytes: u64) -> Self {
        Self {
            until: Instant::now() + limits.time,
            time: limits.time,
            entries: limits.entries,
            bytes,
        }
    }

    fn entry(&mut self) -> Result<(), InputError> {
        self.look_at_time()?;
        self.entries = self
            .entries
            .checked_sub(1)
            .ok_or_else(|| InputError::Limit("it has too many files".into()))?;
        Ok(())
    }

    fn bytes(&mut self, bytes: u64) -> Result<(), InputError> {
        self.look_at_time()?;
        self.bytes = self
            .bytes
            .checked_sub(bytes)
            .ok_or_else(|| InputError::Limit("its files have more bytes than it can hold".into()))?;
        Ok(())
    }

    fn look_at_time(&self) -> Result<(), InputError> {
        if Instant::now() < self.until {
            return Ok(());
        }
        Err(InputError::Limit(format!(
            "reading it took longer than {:?}",
            self.time
        )))
    }
}

/// The kind of a file, by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Qcow2,
    Tar,
    Gzip,
    Zstd,
    Packages,
    Raw,
}

impl Kind {
    fn of(head: &[u8]) -> Self {
        let at = |from: usize, bytes: &[u8]| head.get(from..from + bytes.len()) == Some(bytes);
        if at(0, b"QFI\xfb") {
            Self::Qcow2
        } else if at(257, b"ustar") {
            Self::Tar
        } else if at(0, b"\x1f\x8b") {
            Self::Gzip
        } else if at(0, b"\x28\xb5\x2f\xfd") {
            Self::Zstd
        } else if packages::is_list(head) {
            Self::Packages
        } else {
            Self::Raw
        }
    }
}

/// Reads an image. Parts that cannot be parsed are noted in the profile.
///
/// # Errors
/// If its bytes cannot be read or a limit is reached.
pub fn read(name: &str, source: Rc<dyn ReadAt>, limits: &Limits) -> Result<Profile, InputError> {
    let mut head = [0; 512];
    let known = usize::try_from(source.len())
        .unwrap_or(usize::MAX)
        .min(head.len());
    source.read_at(0, &mut head[..known])?;
    match Kind::of(&head[..known]) {
        Kind::Packages => read_packages(name, &source, limits),
        Kind::Tar | Kind::Gzip | Kind::Zstd => {
            match tar::read(name, source.clone(), limits) {
                Ok(profile) => Ok(profile),
                // It may be any compressed file.
                Err(error) => by_blocks(name, &source, limits, Some(error)),
            }
        }
        Kind::Qcow2 => match qcow2::Qcow2::open(source.clone()) {
            Ok(disk) => {
                let note = disk.note();
                match read_disk(name, Rc::new(disk), limits) {
                    Ok(mut profile) => {
                        note.into_iter().for_each(|note| profile.note(note));
                        Ok(profile)
                    }
                    Err(error @ InputError::Limit(_)) => Err(error),
                    Err(error) => by_blocks(name, &source, limits, Some(error)),
                }
            }
            Err(error) => by_blocks(name, &source, limits, Some(error)),
        },
        Kind::Raw => read_disk(name, source, limits),
    }
}

/// Reads a disk: its blocks, and the files of recognised file systems.
fn read_disk(name: &str, disk: Rc<dyn ReadAt>, limits: &Limits) -> Result<Profile, InputError> {
    let mut profile = by_blocks(name, &disk, limits, None)?;
    let (parts, notes) = partitions::find(&disk, limits);
    notes.into_iter().for_each(|note| profile.note(note));
    let mut collector = Collector::new(name, limits);
    // Files can be as large as the file system, and several times that if they share blocks.
    let mut budget = Budget::new(limits, disk.len().saturating_mul(4));
    for part in parts {
        let label = part.label();
        match ext4::read(part, &mut collector, &mut budget, limits) {
            Ok(()) => profile.form = Form::Disk,
            Err(InputError::Read(error)) => return Err(error.into()),
            Err(error) => profile.note(format!("{label}: {error}")),
        }
    }
    let files = collector.finish();
    profile.sketches.files = files.sketches.files;
    profile.sketches.packages = files.sketches.packages;
    (profile.files, profile.packages, profile.areas) = (files.files, files.packages, files.areas);
    files.notes.into_iter().for_each(|note| profile.note(note));
    Ok(profile)
}

/// Reads only the blocks of an image; `why` is the reason.
///
/// # Errors
/// If its bytes cannot be read or the time is up.
pub fn by_blocks(
    name: &str,
    source: &Rc<dyn ReadAt>,
    limits: &Limits,
    why: Option<InputError>,
) -> Result<Profile, InputError> {
    let mut collector = Collector::new(name, limits);
    let budget = Budget::new(limits, 0);
    let mut left = source.max_data();
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while let Some((from, to)) = source.next_data(at)? {
        // Blocks are aligned in the image, also where its data begins amid one.
        at = from / crate::hash::BLOCK_BYTES as u64 * crate::hash::BLOCK_BYTES as u64;
        while at < to {
            let now = (source.len() - at).min(buffer.len() as u64);
            let piece = &mut buffer[..now as usize];
            source.read_at(at, piece)?;
            budget.look_at_time()?;
            left = left.checked_sub(now).ok_or_else(|| {
                InputError::damaged("the image", "its tables name more data than it can hold")
            })?;
            collector.blocks(piece);
            at += now;
        }
    }
    let mut profile = collector.finish();
    if let Some(error) = why {
        profile.note(format!("{error}; compared by blocks"));
    }
    Ok(profile)
}

fn read_packages(name: &str, source: &Rc<dyn ReadAt>, limits: &Limits) -> Result<Profile, InputError> {
    if source.len() > packages::MAX_BYTES {
        return Err(InputError::Limit(format!(
            "a list of packages has {} bytes; the most are {}",
            source.len(),
            packages::MAX_BYTES
        )));
    }
    let mut text = vec![0; source.len() as usize];
    source.read_at(0, &mut text)?;
    let mut collector = Collector::new(name, limits);
    collector.packages(packages::list(&text));
    let mut profile = collector.finish();
    profile.form = Form::Packages;
    profile.bytes = profile.packages.iter().map(|package| package.bytes).sum();
    Ok(profile)
}

/// A reader bounded by the budget's bytes and time; exceeding it is an error, not an end of file.
struct Bounded<R> {
    inner: R,
    budget: Rc<RefCell<Budget>>,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.budget
            .borrow_mut()
            .bytes(read as u64)
            .map_err(std::io::Error::other)?;
        Ok(read)
    }
}

#[cfg(test)]
mod tests;
