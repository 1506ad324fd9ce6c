//! Services of the host that this crate and its users need: the boot id, free space, memory barriers, file
//! space. No policy.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};

use once_cell::race::OnceBool;

/// Returns the kernel's identifier of this boot, as 16 bytes: a live copy from another boot must not be used.
///
/// # Errors
/// If `/proc/sys/kernel/random/boot_id` cannot be read or is not a UUID.
pub fn boot_id() -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    parse_uuid(text.trim()).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "boot_id is not a UUID"))
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u32> = text
        .chars()
        .filter(|c| *c != '-')
        .map(|c| c.to_digit(16))
        .collect::<Option<_>>()?;
    let mut out = [0u8; 16];
    if digits.len() != 32 {
        return None;
    }
    for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = (pair[0] << 4 | pair[1]) as u8;
    }
    Some(out)
}

/// Space of the host file system that holds a path, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostCapacity {
    /// Size of the file system.
    pub total_bytes: u64,
    /// Bytes free for this user.
    pub available_bytes: u64,
}

/// Returns the space of the file system at `path`.
///
/// # Errors
/// The host's, such as "not found".
pub fn host_capacity(path: &Path) -> io::Result<HostCapacity> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(HostCapacity {
        total_bytes: stat.f_blocks * stat.f_frsize,
        available_bytes: stat.f_bavail * stat.f_frsize,
    })
}

/// Whether the kernel can run a barrier on the running threads of all registered processes.
pub fn has_global_membarrier() -> bool {
    // A `OnceLock` that a thread is filling would stay so in a forked child.
    static HAS: OnceBool = OnceBool::new();
    HAS.get_or_init(|| membarrier_query().contains_command(MembarrierCommand::GlobalExpedited))
}

/// Registers this process for [`membarrier_global`] and [`membarrier_private`]. To be called once before its
/// sessions begin, and again in the child after a fork. Returns whether the kernel accepted both; if not, the
/// barriers fall back to slower ones.
pub fn membarrier_register() -> bool {
    let take = |command| membarrier(command).is_ok();
    take(MembarrierCommand::RegisterGlobalExpedited) & take(MembarrierCommand::RegisterPrivateExpedited)
}

/// Full barrier on every running thread of every registered process: the caller sees all that they stored
/// before it, and they see all that the caller stored. Returns `false` if the kernel offers none; the caller
/// must then wait out its time bounds.
pub fn membarrier_global() -> bool {
    fence(Ordering::SeqCst);
    let done = has_global_membarrier() && membarrier(MembarrierCommand::GlobalExpedited).is_ok()
        || membarrier(MembarrierCommand::Global).is_ok();
    fence(Ordering::SeqCst);
    done
}

/// Full barrier on every running thread of this process. Registers the process if that was not done. Returns
/// `false` if the kernel offers none: both sides must then use sequentially consistent fences of their own.
pub fn membarrier_private() -> bool {
    fence(Ordering::SeqCst);
    let mut done = membarrier(MembarrierCommand::PrivateExpedited);
    if done == Err(Errno::PERM) {
        membarrier_register();
        done = membarrier(MembarrierCommand::PrivateExpedited);
    }
    let done = done.is_ok() || membarrier(MembarrierCommand::Global).is_ok();
    fence(Ordering::SeqCst);
    done
}

/// Makes the names in a directory durable: to be called after files in it were made, renamed or removed.
///
/// # Errors
/// The host's.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Allocates space for `off..off + len` of a file and grows the file to that end, keeping its contents.
/// Writes zeros past the end where the file system cannot allocate.
pub(crate) fn allocate_file(file: &File, off: u64, len: u64) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    let before = file.metadata()?.len();
    let result = retry(|| fallocate(file, FallocateFlags::empty(), off, len));
    let result = match result {
        // A program may be forbidden to call it, where the daemon has made room before.
        Err(Errno::PERM) if before >= off + len => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => write_zeros(file, before.max(off), off + len),
        other => other.map_err(io::Error::from),
    };
    if result.is_err() && file.metadata()?.len() > before {
        // Part of the range may have been allocated past the old end: restore the old length.
        file.set_len(before)?;
    }
    result
}

/// Frees a range of a file, which then reads as zeros. `Ok(false)` where the file system cannot.
pub(crate) fn punch_file(file: &File, off: u64, len: u64) -> io::Result<bool> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match retry(|| fallocate(file, flags, off, len)) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

fn write_zeros(file: &File, mut from: u64, to: u64) -> io::Result<()> {
    let zeros = vec![0u8; 1 << 20];
    while from < to {
        let n = (to - from).min(zeros.len() as u64);
        file.write_all_at(&zeros[..n as usize], from)?;
        from += n;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{
        allocate_file, boot_id, host_capacity, membarrier_global, membarrier_private, membarrier_register,
    };

    #[test]
    fn boot_id_is_the_same_when_asked_twice() {
        let first = boot_id().unwrap();
        assert_eq!(first, boot_id().unwrap());
        assert_ne!(first, [0; 16]);
        assert_eq!(super::parse_uuid("00000000-0000-0000-0000-00000000000g"), None);
    }

    #[test]
    fn host_capacity_is_bounded_by_the_size_when_asked() {
        let space = host_capacity(std::path::Path::new("/")).unwrap();
        assert!(space.total_bytes > 0 && space.available_bytes <= space.total_bytes);
        assert!(host_capacity(std::path::Path::new("/no/such/path")).is_err());
    }

    #[test]
    fn membarrier_runs_when_the_process_is_registered() {
        if !membarrier_register() {
            eprintln!("SKIP: the kernel has no expedited membarrier");
            return;
        }
        assert!(membarrier_private());
        assert!(membarrier_global());
    }

    #[test]
    fn allocate_file_keeps_contents_when_it_grows() {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, b"kept").unwrap();
        allocate_file(&file, 0, 10_000).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 10_000);
        let mut out = [0u8; 4];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut out, 0).unwrap();
        assert_eq!(&out, b"kept");
    }
}
