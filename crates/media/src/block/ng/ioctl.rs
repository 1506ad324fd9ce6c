//! The three ioctls on a namespace's nodes that are not transfers.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::block::ring::NvmeCommand;

/// `_IO('N', 0x40)`.
const NVME_IOCTL_ID: libc::Ioctl = 0x4e40 as libc::Ioctl;
/// `_IOWR('N', 0x41, struct nvme_passthru_cmd)`.
const NVME_IOCTL_ADMIN_CMD: libc::Ioctl = 0xc048_4e41_u32 as libc::Ioctl;
/// `_IO(0x12, 97)`.
const BLKFLSBUF: libc::Ioctl = 0x1261 as libc::Ioctl;

fn result(returned: libc::c_int) -> io::Result<u32> {
    u32::try_from(returned).map_err(|_| io::Error::last_os_error())
}

/// Returns the number of the namespace behind a node.
pub(super) fn namespace_id(file: &File) -> io::Result<u32> {
    // SAFETY: takes no argument; the descriptor is open as long as `file` is borrowed.
    result(unsafe { libc::ioctl(file.as_raw_fd(), NVME_IOCTL_ID) })
}

/// Sends an admin command that reads into `out`. Returns its status, 0 for success.
pub(super) fn administer(file: &File, command: &NvmeCommand, out: &mut [u8; 4096]) -> io::Result<u32> {
    // `struct nvme_passthru_cmd` is laid out as the command of io_uring, with the result in its last word.
    let mut bytes = command.bytes(out.as_mut_ptr() as u64, out.len() as u32);
    // SAFETY: the kernel reads and writes the first 72 of 80 bytes, which live through the call, and lets the
    // device write 4,096 bytes to `out`, whose address and length they name and which is borrowed for
    // writing.
    result(unsafe { libc::ioctl(file.as_raw_fd(), NVME_IOCTL_ADMIN_CMD, bytes.as_mut_ptr()) })
}

/// Empties the kernel's cache of a block device. Best effort: a process without the right to do so has not
/// used that cache either.
pub(super) fn drop_cache(block: &File) {
    // SAFETY: the argument is ignored; the descriptor is open as long as `block` is borrowed.
    unsafe { libc::ioctl(block.as_raw_fd(), BLKFLSBUF, 0) };
}
