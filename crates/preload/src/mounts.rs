//! Where file systems are mounted: the table of mounts, which is read again only when the kernel says that it changed. So no file system is asked,
//! ours neither, which may be stopped.

use crate::internal;
use crate::ofd::KernelFd;
use crate::sys::kernel;
use std::collections::HashSet;

/// What one `read` of the table asks for.
const PIECE: usize = 16 << 10;

/// The table of mounts as it was last read.
#[derive(Debug, Default)]
pub struct Mounts {
    table: Option<KernelFd>,
    places: HashSet<Vec<u8>>,
}

impl Mounts {
    /// Whether something is mounted at `path`, which is absolute and without symbolic links. `None` if there is no table to be read.
    pub fn has(&mut self, path: &[u8]) -> Option<bool> {
        let is_fresh = self.table.is_none();
        if is_fresh {
            let flags = libc::O_RDONLY | libc::O_CLOEXEC;
            let fd = i32::try_from(kernel::open(b"/proc/self/mountinfo\0", flags, 0)).ok()?;
            if fd < 0 {
                return None;
            }
            self.table = Some(KernelFd(internal::adopt(fd)));
        }
        let fd = self.table.as_ref()?.0;
        if is_fresh || kernel::is_changed(fd) {
            self.places = places(&read_all(fd)?);
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

/// The fifth word of each line.
fn places(table: &[u8]) -> HashSet<Vec<u8>> {
    let lines = table.split(|byte| *byte == b'\n');
    lines
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4))
        .map(unescaped)
        .collect()
}

/// Blanks and backslashes are octal numbers in the table.
fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if first == b'\\' => {
                plain.push(byte);
                rest = &after[3..];
            }
            _ => {
                plain.push(first);
                rest = after;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::{Mounts, places};

    #[test]
    fn places_are_taken_from_the_table_as_they_are_called() {
        let table = b"22 1 0:20 / / rw - ext4 /dev/vda rw\n36 25 0:31 / /tmp/a\\040b\\134c/mnt rw,nosuid shared:1 - fuse varve:/x rw\n";
        let places = places(table);
        assert_eq!(places.len(), 2);
        assert!(places.contains(b"/".as_slice()) && places.contains(b"/tmp/a b\\c/mnt".as_slice()));
    }

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
