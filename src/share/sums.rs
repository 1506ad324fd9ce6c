//! Checksums that a running pool keeps of its files' blocks: a search for equal blocks need not read them.

use crate::dedup::scan::Knows;
use crate::pool_session::PoolSession;
use varve_libfs::Errno;
use varve_similarity::files::Chosen;

/// The checksums of the files of one mounted pool.
pub struct PoolSums<'p>(pub &'p PoolSession);

impl Knows for PoolSums<'_> {
    /// Another user's file is not told of, and what is not below the mount is not known.
    fn tell(&mut self, chosen: &Chosen, each: &mut dyn FnMut(u64, &[u32])) -> Option<std::io::Result<()>> {
        if chosen.id.0 != self.0.mount.device {
            return None;
        }
        let path = self.0.pool_path(&chosen.path).ok()?;
        let posix = &self.0.posix;
        let fd = match posix.open(&path, libc::O_RDONLY | libc::O_NOFOLLOW, 0) {
            Ok(fd) => fd,
            Err(Errno(errno)) => return Some(Err(std::io::Error::from_raw_os_error(errno))),
        };
        let is_same = posix.fstat(fd).is_ok_and(|attr| attr.key.number() == chosen.id.1);
        let told = match is_same {
            true => posix.for_each_checksum(fd, |part| each(part.file_block.0, &part.sums)),
            false => Err(Errno(libc::ENOENT)),
        };
        let _ = posix.close(fd);
        match told {
            Ok(_) => Some(Ok(())),
            Err(Errno(libc::EPERM)) => None,
            Err(Errno(errno)) => Some(Err(std::io::Error::from_raw_os_error(errno))),
        }
    }
}
