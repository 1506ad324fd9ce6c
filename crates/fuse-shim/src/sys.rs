//! The one system call that has no safe form: one more descriptor of a mount's device.

use rustix::ioctl::{Setter, ioctl, opcode};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `FUSE_DEV_IOC_CLONE`.
const CLONE: rustix::ioctl::Opcode = opcode::read::<u32>(229, 0);

/// One more descriptor from which requests of the mount of `device` can be read, with a queue of its own for
/// those that are being answered.
pub(crate) fn one_more(device: &File) -> io::Result<File> {
    let new = File::options().read(true).write(true).open("/dev/fuse")?;
    // SAFETY: `FUSE_DEV_IOC_CLONE` reads one `u32`, a descriptor's number, behind the pointer that `Setter`
    // gives it, and keeps no pointer; the descriptor is open while `device` is borrowed, and any other number
    // would be refused.
    unsafe { ioctl(&new, Setter::<CLONE, u32>::new(device.as_raw_fd() as u32)) }?;
    Ok(new)
}
