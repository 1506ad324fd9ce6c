//! The descriptor table: numbers and their open file descriptions.

use std::sync::{Arc, OnceLock};
use varve_format::InodeKey;
use varve_media::lock::{Mutex, RwLock};

use super::locks::Beside;
use crate::errno::{Errno, Result};
use crate::file::open::OpenFile;

/// A descriptor.
pub type Fd = i32;

/// Most descriptors.
const FDS_MAX: usize = 1 << 20;

/// An open file description, shared by descriptors made by `dup`.
pub(super) struct Open {
    pub file: OpenFile,
    pub is_dir: bool,
    /// The flags of `open`.
    pub flags: i32,
    /// File offset; for a directory the cookie of the next entry.
    pub offset: Mutex<u64>,
    /// The directory in which it was opened, and its name there; no name if it was made without one.
    pub place: (InodeKey, Vec<u8>),
    /// The kernel's descriptor of the file, once it was locked.
    pub beside: OnceLock<Box<Beside>>,
}

/// Descriptors by number; a new one gets the lowest free number.
#[derive(Default)]
pub(super) struct Table {
    slots: RwLock<Vec<Option<Arc<Open>>>>,
}

impl Table {
    pub(super) fn insert(&self, open: Arc<Open>, from: usize) -> Result<Fd> {
        let mut slots = self.slots.write();
        let free = slots
            .iter()
            .skip(from)
            .position(Option::is_none)
            .map(|at| at + from);
        let at = free.unwrap_or_else(|| slots.len().max(from));
        if at >= FDS_MAX {
            return Err(Errno(libc::EMFILE));
        }
        if at >= slots.len() {
            slots.resize_with(at + 1, || None);
        }
        slots[at] = Some(open);
        Ok(at as Fd)
    }

    /// Puts `open` at `fd`; returns the old description, which the caller closes.
    pub(super) fn replace(&self, fd: Fd, open: Arc<Open>) -> Result<Option<Arc<Open>>> {
        let at = usize::try_from(fd)
            .ok()
            .filter(|at| *at < FDS_MAX)
            .ok_or(Errno(libc::EBADF))?;
        let mut slots = self.slots.write();
        if at >= slots.len() {
            slots.resize_with(at + 1, || None);
        }
        Ok(slots[at].replace(open))
    }

    pub(super) fn get(&self, fd: Fd) -> Result<Arc<Open>> {
        let slots = self.slots.read();
        let slot = usize::try_from(fd).ok().and_then(|at| slots.get(at));
        slot.and_then(Clone::clone).ok_or(Errno(libc::EBADF))
    }

    /// Whether `fd` is a descriptor of `open`.
    pub(super) fn is(&self, fd: Fd, open: &Arc<Open>) -> bool {
        self.get(fd).is_ok_and(|there| Arc::ptr_eq(&there, open))
    }

    /// Removes `fd`. The caller closes the description, since that may need the daemon, and the mount.
    pub(super) fn remove(&self, fd: Fd) -> Result<Arc<Open>> {
        let mut slots = self.slots.write();
        let slot = usize::try_from(fd).ok().and_then(|at| slots.get_mut(at));
        slot.and_then(Option::take).ok_or(Errno(libc::EBADF))
    }

    /// Removes all descriptors.
    pub(super) fn remove_all(&self) -> Vec<Arc<Open>> {
        std::mem::take(&mut *self.slots.write())
            .into_iter()
            .flatten()
            .collect()
    }
}
