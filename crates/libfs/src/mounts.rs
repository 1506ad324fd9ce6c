//! Mounts of pools, from the kernel's table of mounts (`/proc/self/mountinfo`). Owns the table's format and
//! when it is read again; never asks a file system, which may be stopped.

use crate::options::Atime;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Result, Seek};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// The table of mounts of this process.
const TABLE: &str = "/proc/self/mountinfo";
/// Prefix of the source of a pool's mount; the pool's directory follows.
const SOURCE: &[u8] = b"varve:";

/// A mount of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolMount {
    /// Mount point.
    pub at: PathBuf,
    /// The pool's directory.
    pub pool: PathBuf,
    /// `st_dev` of its files.
    pub device: u64,
    /// The mount shows the pool's root, not a directory of it (a bind mount can).
    pub is_whole: bool,
    /// The mount is read-only.
    pub is_read_only: bool,
    /// When reads move the time of the last read.
    pub atime: Atime,
}

/// Mounts of pools among the lines of a table, in its order: of several mounts at one path, the last one is
/// visible.
#[must_use]
pub fn pool_mounts(table: &[u8]) -> Vec<PoolMount> {
    table
        .split(|byte| *byte == b'\n')
        .filter_map(pool_mount)
        .collect()
}

/// Paths at which something is mounted: the fifth word of each line.
pub fn places(table: &[u8]) -> impl Iterator<Item = Vec<u8>> + '_ {
    let lines = table.split(|byte| *byte == b'\n');
    lines
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4))
        .map(unescaped)
}

fn pool_mount(line: &[u8]) -> Option<PoolMount> {
    let mut words = line.split(|byte| *byte == b' ');
    let device = device(words.nth(2)?)?;
    let root = words.next()?;
    let at = words.next()?;
    let options = words.next()?;
    // Optional fields end with a dash; then come the file system and its source.
    let source = words.skip_while(|word| *word != b"-").nth(2)?;
    let has = |wanted: &[u8]| options.split(|byte| *byte == b',').any(|option| option == wanted);
    let path = |text: &[u8]| PathBuf::from(OsString::from_vec(unescaped(text)));
    Some(PoolMount {
        at: path(at),
        pool: path(source.strip_prefix(SOURCE)?),
        device,
        is_whole: root == b"/",
        is_read_only: has(b"ro"),
        atime: match (has(b"noatime"), has(b"relatime")) {
            (true, _) => Atime::Never,
            (false, true) => Atime::Relative,
            (false, false) => Atime::Strict,
        },
    })
}

fn device(text: &[u8]) -> Option<u64> {
    let (major, minor) = std::str::from_utf8(text).ok()?.split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Blanks and backslashes are octal numbers in the table.
#[must_use]
pub fn unescaped(text: &[u8]) -> Vec<u8> {
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

/// The table of mounts, which is read again only when the kernel reports a change.
#[derive(Debug)]
pub struct Table(File);

impl Table {
    /// Opens the table; [`read`](Self::read) returns its mounts.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open() -> Result<Self> {
        File::open(TABLE).map(Self)
    }

    /// Whether anything was mounted or unmounted since the last call, or since the table was opened.
    #[must_use]
    pub fn has_changed(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::PRI)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // After a failed poll, the mounts that were read before are not to be trusted.
        poll(&mut fds, Some(&now)).is_err() || !fds[0].revents().is_empty()
    }

    /// The mounts of pools.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read(&mut self) -> Result<Vec<PoolMount>> {
        let mut text = Vec::new();
        self.0.rewind()?;
        self.0.read_to_end(&mut text)?;
        Ok(pool_mounts(&text))
    }
}

#[cfg(test)]
mod tests {
    use super::{PoolMount, Table, places, pool_mounts};
    use crate::options::Atime;

    const LINES: &[u8] = b"22 1 0:20 / / rw - ext4 /dev/vda rw\n\
        36 25 0:31 / /tmp/a\\040b\\134c/mnt rw,nosuid,relatime shared:1 master:2 - fuse varve:/tmp/a\\040b \
        rw,user_id=0\n\
        37 25 0:31 /sub /other ro,noatime - fuse.varve varve:/tmp/a\\040b rw\n\
        38 25 0:32 / /not rw - fuse sshfs:/x rw\n\
        39 25 0:33 / /cut rw -\n";

    #[test]
    fn mounts_of_pools_are_told_from_others() {
        let one = PoolMount {
            at: "/tmp/a b\\c/mnt".into(),
            pool: "/tmp/a b".into(),
            device: rustix::fs::makedev(0, 31),
            is_whole: true,
            is_read_only: false,
            atime: Atime::Relative,
        };
        let bound = PoolMount {
            at: "/other".into(),
            is_whole: false,
            is_read_only: true,
            atime: Atime::Never,
            ..one.clone()
        };
        assert_eq!(pool_mounts(LINES), [one, bound]);
    }

    #[test]
    fn places_are_taken_from_the_table_as_they_are_called() {
        let places: Vec<Vec<u8>> = places(LINES).collect();
        let wanted: [&[u8]; 5] = [b"/", b"/tmp/a b\\c/mnt", b"/other", b"/not", b"/cut"];
        assert_eq!(places, wanted);
    }

    #[test]
    fn table_of_this_process_can_be_read_again_and_has_not_changed_by_that() {
        let mut table = Table::open().expect("a table of mounts");
        let _ = table.has_changed();
        let first = table.read().expect("it is read");
        let second = table.read().expect("it is read again");
        if !table.has_changed() {
            assert_eq!(first, second);
        }
    }
}
