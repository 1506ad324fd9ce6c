//! A whole NVMe namespace by its character device (`/dev/ng0n1`): commands go from io_uring straight to the
//! kernel's NVMe driver, past the block layer, and the device stays the kernel's. Owns the translation of
//! transfers into commands; `ring` owns the rings.

#[allow(unsafe_code)]
mod ioctl;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use io_uring::opcode;

use super::nvme::Places;
use super::nvme::command::{Meaning, Status, admin, io as op};
use super::nvme::identify::{
    CNS_CONTROLLER, CNS_NAMESPACE, ControllerIdentity, IDENTIFY_BYTES, NamespaceIdentity,
};
use super::ring::{Kind, NvmeCommand, Passthrough, Request, Rings};
use crate::DEVICE_BLOCK_BYTES;
use crate::aligned::{AlignedBuf, BufPool};
use crate::block::file::whole_part;
use crate::block::queue::BlockQueue;
use crate::error::{DeviceName, MediaError, check_blocks, check_range};
use crate::latch::Latch;
use crate::traits::{BlockDevice, DeviceInfo, DeviceState, MediumKind, ReaderPart};

/// Most bytes of one command: the kernel splits nothing here.
const PIECE_BYTES_MAX: usize = 128 << 10;
/// Bytes moved through one bounce buffer.
const BOUNCE_BYTES: usize = PIECE_BYTES_MAX;
/// Alignment in memory that the kernel requires to hand a buffer to the device.
const MEMORY_ALIGN: usize = 4;
/// Ranges of one deallocation, and sectors of a range.
const RANGES_MAX: usize = 256;
const RANGE_SECTORS_MAX: u64 = 1 << 20;
/// How often a command is sent again after the device answered "later".
const TRIES_MAX: u32 = 4;

/// A namespace behind its character device.
pub struct NgDevice {
    name: DeviceName,
    namespace: NamespaceIdentity,
    controller: ControllerIdentity,
    piece_bytes: usize,
    rings: Rings<Passthrough>,
    bounce: BufPool,
    latch: Latch,
    _file: File,
    /// The block device, claimed so that it cannot be mounted meanwhile.
    claim: File,
}

/// The block device of the same namespace: `/dev/ng0n1` and `/dev/nvme0n1`.
fn sibling(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    Some(path.with_file_name(format!("nvme{}", name.strip_prefix("ng")?)))
}

/// Returns the error for a status, with an errno; `EBUSY`: send the command again.
fn status_error(field: u16) -> io::Error {
    let errno = match Status::parse(field).map(Status::meaning) {
        Some(Meaning::Errno(errno)) => errno,
        Some(Meaning::Again) => libc::EBUSY,
        None => libc::EIO,
    };
    io::Error::from_raw_os_error(errno)
}

/// The command of a request.
fn command(nsid: u32, namespace: NamespaceIdentity, request: &Request) -> NvmeCommand {
    let first = request.off >> namespace.sector_shift;
    let sectors = (request.len >> namespace.sector_shift) as u32;
    let transfer = |opcode, flags: u32| NvmeCommand {
        opcode,
        nsid,
        dwords: [
            first as u32,
            (first >> 32) as u32,
            flags | sectors.saturating_sub(1),
            0,
            0,
            0,
        ],
    };
    let other = |opcode, dword10: u32, dword11: u32| NvmeCommand {
        opcode,
        nsid,
        dwords: [dword10, dword11, 0, 0, 0, 0],
    };
    match request.kind {
        Kind::Read => transfer(op::READ, 0),
        Kind::Write => transfer(op::WRITE, 0),
        Kind::WriteDurable => transfer(op::WRITE, op::FUA),
        Kind::Flush => other(op::FLUSH, 0, 0),
        Kind::Deallocate(ranges) => other(op::DATASET_MANAGEMENT, ranges - 1, op::DEALLOCATE),
    }
}

/// Reads a number from a file of sysfs.
fn queue_limit(places: &Places, namespace: &str, limit: &str) -> Option<usize> {
    let path = places.sys.join("block").join(namespace).join("queue").join(limit);
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

impl NgDevice {
    /// Opens the character device of a namespace, and claims its block device.
    ///
    /// # Errors
    /// `Refused`: it is not a namespace, is in use, or the kernel cannot pass commands on; the text names the
    /// remedy. `Setup`.
    pub fn open(path: &Path) -> Result<Self, MediaError> {
        let name = DeviceName::from(format!("ng:{}", path.display()));
        let refused = |why: String| MediaError::Refused {
            device: name.clone(),
            why: why.into(),
        };
        let places = Places::default();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|error| {
                refused(format!(
                    "cannot be opened: {error}; `ls /dev/ng*` shows namespaces, and it needs root or the \
                     node's rights (`varve doctor`)"
                ))
            })?;
        let block = sibling(path);
        let is_node = file
            .metadata()
            .is_ok_and(|meta| meta.file_type().is_char_device());
        let Some(block) = block.filter(|_| is_node) else {
            return Err(refused(
                "is no character device of an NVMe namespace, which are called /dev/ng0n1; for others use \
                 uring:PATH"
                    .into(),
            ));
        };
        let claim = claim(&places, &block).map_err(refused)?;
        if let Ok(meta) = claim.metadata() {
            BlockQueue::of(&places.sys, meta.rdev()).check_zones(&name)?;
        }
        let (controller, namespace, nsid) = identify(&file).map_err(refused)?;
        let namespace_name = block
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let limit = |limit| queue_limit(&places, &namespace_name, limit);
        let hardware = limit("max_hw_sectors_kb").unwrap_or(64) << 10;
        // Each page of a caller's buffer may be a segment of its own, plus one where it does not begin on a
        // page.
        let segments = limit("max_segments").unwrap_or(17).saturating_sub(1) * 4096;
        let most = PIECE_BYTES_MAX.min(hardware).min(segments).max(4096);
        let piece_bytes = most.min(controller.transfer_max.unwrap_or(most)) / 4096 * 4096;
        let polled = limit("io_poll") == Some(1);
        let rings = rings(&file, nsid, namespace, polled).map_err(|error| {
            refused(format!(
                "this kernel cannot pass commands on ({error}): it needs Linux 5.19 with io_uring; uring:{} \
                 works",
                block.display()
            ))
        })?;
        Ok(Self {
            name,
            namespace,
            controller,
            piece_bytes,
            rings,
            bounce: BufPool::new(BOUNCE_BYTES),
            latch: Latch::default(),
            _file: file,
            claim,
        })
    }

    fn sector(&self) -> u64 {
        self.namespace.sector_bytes()
    }

    fn error(&self, op: &'static str, off: u64, len: usize, error: &io::Error) -> MediaError {
        MediaError::from_io(&self.name, op, off, len as u64, error)
    }

    /// Runs the requests that `make` builds, again if the device says that a retry may help.
    fn run(&self, mut make: impl FnMut() -> Vec<Request>) -> io::Result<()> {
        let mut tries = 0;
        loop {
            match self.rings.run(&mut make()) {
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && tries < TRIES_MAX => tries += 1,
                other => return other,
            }
        }
    }

    fn is_direct(&self, bytes: &[u8], off: u64) -> bool {
        let whole = (off | bytes.len() as u64).is_multiple_of(self.sector());
        whole && (bytes.as_ptr() as usize).is_multiple_of(MEMORY_ALIGN)
    }

    fn read_parts(&self, parts: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        self.run(|| {
            let cut = parts.iter_mut().flat_map(|(off, out)| {
                let pieces = out.chunks_mut(self.piece_bytes).enumerate();
                pieces.map(|(at, out)| Request::read(*off + (at * self.piece_bytes) as u64, out))
            });
            cut.collect()
        })
    }

    fn write_parts(&self, parts: &[(u64, &[u8])], kind: Kind) -> io::Result<()> {
        self.run(|| {
            let cut = parts.iter().flat_map(|(off, src)| {
                let pieces = src.chunks(self.piece_bytes).enumerate();
                pieces.map(move |(at, src)| Request::write(off + (at * self.piece_bytes) as u64, src, kind))
            });
            cut.collect()
        })
    }

    /// Reads a range that is not aligned to sectors, or into a buffer that is not aligned in memory.
    fn read_through_bounce(&self, off: u64, out: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < out.len() {
            let at = off + done as u64;
            let begin = at / self.sector() * self.sector();
            let n = (out.len() - done).min(BOUNCE_BYTES - self.sector() as usize);
            let span = ((at + n as u64).next_multiple_of(self.sector()) - begin) as usize;
            self.bounce.with(|buf| {
                self.read_parts(&mut [(begin, &mut buf.bytes_mut()[..span])])?;
                let skip = (at - begin) as usize;
                out[done..done + n].copy_from_slice(&buf.bytes()[skip..skip + n]);
                io::Result::Ok(())
            })?;
            done += n;
        }
        Ok(())
    }

    fn write_all(&self, off: u64, src: &[u8], kind: Kind) -> io::Result<()> {
        if self.is_direct(src, off) {
            return self.write_parts(&[(off, src)], kind);
        }
        for (piece, part) in src.chunks(BOUNCE_BYTES).enumerate() {
            self.bounce.with(|buf| {
                buf.bytes_mut()[..part.len()].copy_from_slice(part);
                let off = off + (piece * BOUNCE_BYTES) as u64;
                self.write_parts(&[(off, &buf.bytes()[..part.len()])], kind)
            })?;
        }
        Ok(())
    }

    fn check_write(&self, off: u64, len: u64) -> Result<(), MediaError> {
        check_range(&self.name, off, len, self.len_bytes())?;
        check_blocks(&self.name, off, len, DEVICE_BLOCK_BYTES)?;
        self.latch.check(&self.name)
    }

    fn write_kind(&self, off: u64, src: &[u8], kind: Kind) -> Result<(), MediaError> {
        self.check_write(off, src.len() as u64)?;
        self.write_all(off, src, kind)
            .map_err(|error| self.latch.note(self.error("write", off, src.len(), &error)))
    }
}

/// Claims a namespace's block device and empties the kernel's cache of it, which commands bypass.
fn claim(places: &Places, block: &Path) -> Result<File, String> {
    let name = block.file_name().unwrap_or_default().to_string_lossy();
    if let Some(used) = places.uses_of_namespace(&name).first() {
        return Err(format!(
            "{} {}; take it out of use first, or choose another",
            used.node, used.what
        ));
    }
    let claim = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL)
        .open(block)
        .map_err(|error| match error.raw_os_error() {
            Some(libc::EBUSY) => format!(
                "{0} is in use, perhaps by another pool; `lsof {0}` may say by whom",
                block.display()
            ),
            _ => format!("its block device {} cannot be opened: {error}", block.display()),
        })?;
    ioctl::drop_cache(&claim);
    Ok(claim)
}

/// Identifies the controller and the namespace.
fn identify(file: &File) -> Result<(ControllerIdentity, NamespaceIdentity, u32), String> {
    let nsid = ioctl::namespace_id(file).map_err(|error| {
        format!("is no NVMe namespace ({error}); `ls /dev/ng*` shows those that there are")
    })?;
    let ask = |cns, nsid| -> Result<[u8; IDENTIFY_BYTES], String> {
        let mut bytes = [0; IDENTIFY_BYTES];
        let command = NvmeCommand {
            opcode: admin::IDENTIFY,
            nsid,
            dwords: [cns, 0, 0, 0, 0, 0],
        };
        match ioctl::administer(file, &command, &mut bytes) {
            Ok(0) => Ok(bytes),
            Ok(status) => Err(format!("does not identify itself (NVMe status {status:#x})")),
            Err(error) => Err(format!("does not identify itself ({error}); run as root")),
        }
    };
    let controller = ControllerIdentity::parse(&ask(CNS_CONTROLLER, 0)?)?;
    let namespace = NamespaceIdentity::parse(&ask(CNS_NAMESPACE, nsid)?, nsid)?;
    Ok((controller, namespace, nsid))
}

/// Returns the best rings that work, as a read shows.
fn rings(
    file: &File,
    nsid: u32,
    namespace: NamespaceIdentity,
    polled: bool,
) -> io::Result<Rings<Passthrough>> {
    let tried = |polled| {
        let protocol = Passthrough {
            command: Box::new(move |request| command(nsid, namespace, request)),
            status: status_error,
        };
        let rings = Rings::probe(file.as_raw_fd(), polled, protocol, &[opcode::UringCmd80::CODE])?;
        let mut buf = AlignedBuf::new(4096);
        rings.run(&mut [Request::read(0, buf.bytes_mut())])?;
        Ok(rings)
    };
    match polled.then(|| tried(true)) {
        Some(Ok(rings)) => Ok(rings),
        _ => tried(false),
    }
}

impl BlockDevice for NgDevice {
    fn len_bytes(&self) -> u64 {
        self.namespace.len_bytes
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        check_range(&self.name, off, out.len() as u64, self.len_bytes())?;
        let len = out.len();
        let done = match self.is_direct(out, off) {
            true => self.read_parts(&mut [(off, out)]),
            false => self.read_through_bounce(off, out),
        };
        done.map_err(|error| self.error("read", off, len, &error))
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.write_kind(off, src, Kind::Write)
    }

    fn write_durable(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        let kind = match self.controller.has_write_cache {
            true => Kind::WriteDurable,
            false => Kind::Write,
        };
        self.write_kind(off, src, kind)
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.latch.check(&self.name)?;
        if !self.controller.has_write_cache {
            return Ok(());
        }
        self.run(|| vec![Request::write(0, &[], Kind::Flush)])
            .map_err(|error| self.latch.note(self.error("flush", 0, 0, &error)))
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.check_write(off, len)?;
        if len == 0 || !self.controller.can_deallocate {
            return Ok(());
        }
        let (mut first, end) = (off / self.sector(), (off + len) / self.sector());
        let mut ranges = Vec::new();
        while first < end {
            let sectors = (end - first).min(RANGE_SECTORS_MAX);
            let mut range = [0; 16];
            range[4..8].copy_from_slice(&(sectors as u32).to_le_bytes());
            range[8..].copy_from_slice(&first.to_le_bytes());
            ranges.push(range);
            first += sectors;
        }
        for some in ranges.chunks(RANGES_MAX) {
            let done = self.bounce.with(|buf| {
                let bytes = &mut buf.bytes_mut()[..16 * some.len()];
                bytes.copy_from_slice(some.as_flattened());
                let kind = Kind::Deallocate(some.len() as u32);
                self.run(|| vec![Request::write(0, bytes, kind)])
            });
            done.map_err(|error| self.error("trim", off, len as usize, &error))?;
        }
        Ok(())
    }

    fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        if !parts.iter().all(|(off, out)| self.is_direct(out, *off)) {
            return parts.iter_mut().try_for_each(|(off, out)| self.read(*off, out));
        }
        for (off, out) in parts.iter() {
            check_range(&self.name, *off, out.len() as u64, self.len_bytes())?;
        }
        let first = parts.first().map_or((0, 0), |(off, out)| (*off, out.len()));
        self.read_parts(parts)
            .map_err(|error| self.error("read of a batch", first.0, first.1, &error))
    }

    fn write_batch(&self, parts: &[(u64, &[u8])]) -> Result<(), MediaError> {
        if !parts.iter().all(|(off, src)| self.is_direct(src, *off)) {
            return parts.iter().try_for_each(|(off, src)| self.write(*off, src));
        }
        for (off, src) in parts {
            self.check_write(*off, src.len() as u64)?;
        }
        let first = parts.first().map_or((0, 0), |(off, src)| (*off, src.len()));
        self.write_parts(parts, Kind::Write).map_err(|error| {
            self.latch
                .note(self.error("write of a batch", first.0, first.1, &error))
        })
    }

    /// By the namespace's block device: commands that another process could send by the character device are
    /// not only reads.
    fn reader_parts(&self) -> Vec<ReaderPart> {
        whole_part(&self.claim, true, self.len_bytes())
            .into_iter()
            .collect()
    }

    fn state(&self) -> DeviceState {
        self.latch.state()
    }

    fn name(&self) -> DeviceName {
        self.name.clone()
    }

    fn info(&self) -> DeviceInfo {
        let cache = match self.controller.has_write_cache {
            true => "volatile write cache",
            false => "no volatile write cache",
        };
        let backend = format!(
            "io_uring passthrough ({}), {} ({}), sectors of {}, {cache}",
            self.rings.plan(),
            self.controller.model,
            self.controller.serial,
            self.sector()
        );
        DeviceInfo {
            name: self.name.clone(),
            kind: MediumKind::Block,
            backend,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{command, sibling, status_error};
    use crate::block::nvme::identify::NamespaceIdentity;
    use crate::block::ring::{Kind, Request};
    use std::path::Path;

    #[test]
    fn request_becomes_the_command_that_it_stands_for() {
        let namespace = NamespaceIdentity {
            sector_shift: 9,
            len_bytes: 1 << 40,
        };
        let of = |off, src: &[u8], kind| command(7, namespace, &Request::write(off, src, kind));
        let write = of(1 << 41, &[0; 4096], Kind::WriteDurable);
        assert_eq!((write.opcode, write.nsid), (1, 7));
        assert_eq!(write.dwords[..3], [0, 1, 1 << 30 | 7]);
        assert_eq!(of(0, &[0; 512], Kind::Write).dwords[2], 0);
        let trim = of(0, &[0; 48], Kind::Deallocate(3));
        assert_eq!((trim.opcode, trim.dwords[0], trim.dwords[1]), (9, 2, 4));
        assert_eq!(of(0, &[], Kind::Flush).opcode, 0);
        let read = command(7, namespace, &Request::read(8192, &mut [0; 1024]));
        assert_eq!((read.opcode, read.dwords[0], read.dwords[2]), (2, 16, 1));
    }

    #[test]
    fn status_is_an_errno() {
        assert_eq!(status_error(0x81).raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(status_error(0x4281).raw_os_error(), Some(libc::EIO));
        assert_eq!(status_error(0x82).raw_os_error(), Some(libc::EBUSY));
    }

    #[test]
    fn node_that_is_no_namespace_is_refused_with_what_would_be_right() {
        let said = |path: &str| {
            super::NgDevice::open(Path::new(path))
                .map(|_| ())
                .unwrap_err()
                .to_string()
        };
        assert!(said("/dev/ng77n1").contains("ls /dev/ng*"));
        assert!(said("/dev/null").contains("uring:PATH"));
        assert_eq!(
            sibling(Path::new("/dev/ng1n2")).unwrap(),
            Path::new("/dev/nvme1n2")
        );
        assert_eq!(sibling(Path::new("/dev/sda")), None);
    }
}
