//! The table of mounts, which is read again only when the kernel signals a change. So no file system is
//! asked, in particular not this mount, which may be stopped.

use crate::sys::kernel;
use crate::sys::reentry::{self, KernelFd};
use std::collections::HashSet;
use varve_libfs::mounts::places;

/// Bytes requested by one `read` of the table.
const PIECE: usize = 16 << 10;

/// The table of mounts as of the last read.
#[derive(Debug, Default)]
pub struct Mounts {
    table: Option<KernelFd>,
    places: HashSet<Vec<u8>>,
}

impl Mounts {
    /// Whether a file system is mounted at `path`, which is absolute and without symbolic links. `None` if
    /// the table cannot be read.
    pub fn has(&mut self, path: &[u8]) -> Option<bool> {
        let is_fresh = self.table.is_none();
        if is_fresh {
            let flags = libc::O_RDONLY | libc::O_CLOEXEC;
            let fd = i32::try_from(kernel::open(b"/proc/self/mountinfo\0", flags, 0)).ok()?;
            if fd < 0 {
                return None;
            }
            self.table = Some(KernelFd(reentry::adopt(fd)));
        }
        let fd = self.table.as_ref()?.0;
        if is_fresh || kernel::is_changed(fd) {
            self.places = places(&read_all(fd)?).collect();
        }
        Some(self.places.contains(path))
    }
}

fn read_all(fd: i32) -> Option<Vec<u8>> {
    kernel::lseek(fd, 0, libc::SEEK_SET);
    let mut text = Vec::new();
    loop {
        let len = text.len();
        text.resize(len + PIECE, 0);
        let got = usize::try_from(kernel::read(fd, &mut text[len..])).ok()?;
        text.truncate(len + got);
        if got == 0 {
            return Some(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Mounts;

    #[test]
    fn table_of_this_process_has_its_root_and_no_file_in_it() {
        let mut mounts = Mounts::default();
        assert_eq!(mounts.has(b"/proc"), Some(true));
        assert_eq!(mounts.has(b"/proc/self/status"), Some(false));
        assert!(!mounts.places.is_empty());
        mounts.places.clear();
        assert_eq!(
            mounts.has(b"/proc"),
            Some(false),
            "it is not read again for nothing"
        );
    }
}
