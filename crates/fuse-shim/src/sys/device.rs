//! Duplicates a descriptor of a mount's device.

use rustix::ioctl::{Setter, ioctl, opcode};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `FUSE_DEV_IOC_CLONE`.
const CLONE: rustix::ioctl::Opcode = opcode::read::<u32>(229, 0);

/// Opens another descriptor from which requests of the mount of `device` can be read, with a queue of its own
/// for the requests being processed.
pub(crate) fn one_more(device: &File) -> io::Result<File> {
    let new = File::options().read(true).write(true).open("/dev/fuse")?;
    // SAFETY: `FUSE_DEV_IOC_CLONE` reads one `u32`, a descriptor's number, through the pointer that `Setter`
    // passes, and keeps no pointer; the descriptor is open while `device` is borrowed, and the kernel refuses
    // any other number.
    unsafe { ioctl(&new, Setter::<CLONE, u32>::new(device.as_raw_fd() as u32)) }?;
    Ok(new)
}
