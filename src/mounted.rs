//! Queries on the table of mounts. They never access a mount itself, whose server may be dead or stopped.

use crate::pool::Pool;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use varve_libfs::mounts::pool_mounts;

/// Whether something is mounted at `path`.
pub fn is_mounted(path: &Path) -> bool {
    mount_minor(path).is_some()
}

/// Whether the pool is mounted at the mountpoint of `up`.
pub fn is_ours(pool: &Pool) -> bool {
    let Ok(at) = absolute(&pool.mountpoint()) else {
        return false;
    };
    let table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let mounts = pool_mounts(&table);
    // Another file system may be mounted there too, below or above it.
    mounts
        .iter()
        .any(|mounted| mounted.at == at && mounted.pool == pool.dir())
}

/// Returns the minor number of the device mounted last at `path`; for a FUSE mount it is the number of its
/// connection.
pub fn mount_minor(path: &Path) -> Option<u32> {
    mount_device(path)?.split_once(':')?.1.parse().ok()
}

/// Returns the processes of `varve mount` that serve the connection `minor`, as far as this user may see
/// them. The caller must know that the mount stays meanwhile: another one may get the number afterwards.
/// Needs Linux 6.10.
pub fn servers(minor: u32) -> Vec<OwnedFd> {
    let own = std::process::id();
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|&pid| pid != own && is_server(pid, minor))
        .filter_map(|pid| {
            pidfd_open(Pid::from_raw(pid as i32)?, PidfdFlags::empty())
                .ok()
                .zip(Some(pid))
        })
        // The process that was looked at may have ended, and the descriptor be of its successor.
        .filter(|&(_, pid)| is_server(pid, minor))
        .map(|(process, _)| process)
        .collect()
}

fn is_server(pid: u32, minor: u32) -> bool {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if words.split(|byte| *byte == 0).nth(1) != Some(b"mount") {
        return false;
    }
    let connection = format!("fuse_connection:\t{minor}");
    let files = std::fs::read_dir(format!("/proc/{pid}/fdinfo"));
    files.into_iter().flatten().flatten().any(|file| {
        let text = std::fs::read_to_string(file.path()).unwrap_or_default();
        text.lines().any(|line| line == connection)
    })
}

/// Returns the device mounted last at `path`, as "major:minor".
pub fn mount_device(path: &Path) -> Option<String> {
    let path = absolute(path).ok()?;
    let table = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let at_path = |line: &&str| {
        let at = line.split(' ').nth(4);
        at.is_some_and(|at| unescape(at) == path.as_os_str())
    };
    let line = table.lines().rfind(at_path)?;
    line.split(' ').nth(2).map(str::to_owned)
}

/// Returns the absolute path of a mountpoint without accessing the mount itself.
pub fn absolute(path: &Path) -> std::io::Result<PathBuf> {
    let whole = std::path::absolute(path)?;
    match (whole.parent(), whole.file_name()) {
        (Some(parent), Some(name)) => Ok(parent.canonicalize()?.join(name)),
        _ => Ok(whole),
    }
}

/// Decodes a path of `/proc/self/mountinfo`, where space, tab, newline and backslash are octal.
fn unescape(text: &str) -> OsString {
    use std::os::unix::ffi::OsStringExt;
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = bytes.get(at + 1..at + 4).filter(|_| bytes[at] == b'\\');
        match octal
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|d| u8::from_str_radix(d, 8).ok())
        {
            Some(byte) => {
                out.push(byte);
                at += 4;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::unescape;

    #[test]
    fn mount_table_paths_are_unescaped() {
        assert_eq!(unescape("/a\\040b\\134c"), "/a b\\c");
        assert_eq!(unescape("/plain"), "/plain");
        assert_eq!(unescape("/end\\04"), "/end\\04");
    }
}
