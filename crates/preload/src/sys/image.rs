//! A copy of a library's file in which the sites are replaced already, with the stubs behind it. A process
//! maps the copy's code over its own: the pages are those of all processes, where each would copy and change
//! some fifty of them. If anything is not as expected, nothing is mapped, and the caller replaces the sites in
//! memory.
//!
//! # Why the mapped code may be run
//! - *Nobody else wrote it*: the file belongs to root or to this process' user, and only they may write to it;
//!   it lies beside the preload library, which is believed for the same reason.
//! - *It is this library*: the file's name has the device, inode, size and time of the library's file, and its
//!   first bytes, with the build id, are those in memory.
//! - *It is whole*: it is durable before it has its name.
//! - *Nobody has changed the code*: what a debugger, a probe or another preloaded library did would be lost.

use super::kernel;
use super::patch::{Library, PAGE};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

const MAGIC: [u8; 8] = *b"VRVCODE1";
/// Bytes at the file's end: magic, six numbers, their sum.
const FOOT: usize = 64;
/// Bytes at the library's start that are compared.
const HEAD: usize = 1024;
/// Distance in bytes from the page with the address that stubs call to the library's code. Other libraries
/// are closer, as a rule.
const DISTANCE: usize = 0x100_0000;

/// Where a copy has what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Foot {
    /// Bytes of the library's code.
    code: u64,
    /// Where the code begins in the file.
    code_at: u64,
    /// Bytes of the stubs, whole pages.
    stubs: u64,
    /// Where they begin in the file.
    stubs_at: u64,
    /// See [`DISTANCE`].
    distance: u64,
    /// Sites that are replaced.
    sites: u64,
}

impl Foot {
    fn encode(&self) -> [u8; FOOT] {
        let mut bytes = [0; FOOT];
        bytes[..8].copy_from_slice(&MAGIC);
        let numbers = [
            self.code,
            self.code_at,
            self.stubs,
            self.stubs_at,
            self.distance,
            self.sites,
        ];
        for (out, number) in bytes[8..].chunks_exact_mut(8).zip(numbers) {
            out.copy_from_slice(&number.to_le_bytes());
        }
        let sum = sum(&bytes[..FOOT - 8]);
        bytes[FOOT - 8..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; FOOT]) -> Option<Self> {
        let mut words = bytes[8..]
            .as_chunks::<8>()
            .0
            .iter()
            .map(|word| u64::from_le_bytes(*word));
        let mut next = || words.next();
        let foot = Self {
            code: next()?,
            code_at: next()?,
            stubs: next()?,
            stubs_at: next()?,
            distance: next()?,
            sites: next()?,
        };
        (bytes[..8] == MAGIC && next()? == sum(&bytes[..FOOT - 8])).then_some(foot)
    }
}

/// FNV-1a.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The path of the copy of a library whose sites are noted at `notes`.
fn path_beside(notes: &Path) -> PathBuf {
    let mut path = notes.as_os_str().to_owned();
    path.push(".code");
    path.into()
}

/// Why there is no copy to map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoImage {
    /// There is none, or a damaged one: it can be made.
    Missing,
    /// It may not be believed, or is another library's, or the code in memory was changed.
    Unfit,
}

/// A copy that fits a library in memory.
#[derive(Debug)]
pub struct Image {
    file: File,
    foot: Foot,
}

impl Image {
    /// Opens the copy beside the notes on a library.
    pub fn open(notes: &Path, library: &Library) -> Result<Self, NoImage> {
        let path = path_beside(notes);
        let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let file = File::options().read(true).custom_flags(flags).open(path);
        let file = file.map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => NoImage::Missing,
            _ => NoImage::Unfit,
        })?;
        Self::judge(file, library)
    }

    fn judge(file: File, library: &Library) -> Result<Self, NoImage> {
        let meta = file.metadata().map_err(|_| NoImage::Unfit)?;
        // SAFETY: takes no arguments.
        let own = unsafe { kernel::call(libc::SYS_geteuid as usize, [0; 6]) } as u32;
        if !meta.is_file() || (meta.uid() != 0 && meta.uid() != own) || meta.mode() & 0o022 != 0 {
            return Err(NoImage::Unfit);
        }
        let mut bytes = [0; FOOT];
        let foot_at = meta.size().checked_sub(FOOT as u64).ok_or(NoImage::Missing)?;
        file.read_exact_at(&mut bytes, foot_at)
            .map_err(|_| NoImage::Unfit)?;
        let foot = Foot::decode(&bytes).ok_or(NoImage::Missing)?;
        let page = PAGE as u64;
        let fits = foot.code == library.code().len() as u64
            && foot.code_at == library.offset as u64
            && library.start.is_multiple_of(PAGE)
            && foot.code_at.is_multiple_of(page)
            && foot.stubs_at.is_multiple_of(page)
            && foot.stubs.is_multiple_of(page)
            && foot.stubs_at.checked_add(foot.stubs) == Some(foot_at)
            && foot.distance == DISTANCE as u64;
        let mut head = [0; HEAD];
        file.read_exact_at(&mut head, 0).map_err(|_| NoImage::Unfit)?;
        if fits && library.head(HEAD) == Some(&head[..]) && !is_changed(library) {
            return Ok(Self { file, foot });
        }
        Err(NoImage::Unfit)
    }

    /// Maps the copy over the library's code; the stubs call `entry`. Returns how many sites are replaced.
    ///
    /// # Safety
    /// No other thread may run code of the library meanwhile, and the file must be the library's copy, as
    /// [`open`](Self::open) has found.
    pub unsafe fn map(&self, library: &Library, entry: usize) -> Option<usize> {
        let slot = library.start.checked_sub(DISTANCE)?;
        let stubs = self.foot.stubs as usize;
        let (read, write, exec) = (libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC);
        let fresh = libc::MAP_PRIVATE | libc::MAP_FIXED_NOREPLACE;
        let fd = self.file.as_raw_fd();
        let map = |at: usize, len: usize, protection: i32, flags: i32, fd: i32, from: u64| {
            let a = [
                at,
                len,
                protection as usize,
                flags as usize,
                fd as usize,
                from as usize,
            ];
            // SAFETY: either over nothing, or over the library's code, with its own bytes but for the sites.
            let got = unsafe { kernel::call(libc::SYS_mmap as usize, a) };
            if got > 0 && got as usize != at {
                // An old kernel without NOREPLACE put it elsewhere.
                unmap(got as usize, len);
            }
            got as usize == at
        };
        if !map(slot, PAGE, read | write, fresh | libc::MAP_ANONYMOUS, -1, 0) {
            return None;
        }
        // SAFETY: a page of this process, just mapped.
        unsafe { std::ptr::write(slot as *mut usize, entry) };
        let is_closed = super::patch::protect(slot, PAGE, read);
        if !is_closed || !map(slot + PAGE, stubs, read | exec, fresh, fd, self.foot.stubs_at) {
            unmap(slot, PAGE);
            return None;
        }
        let over = libc::MAP_PRIVATE | libc::MAP_FIXED;
        let len = library.code().len().next_multiple_of(PAGE);
        if !map(library.start, len, read | exec, over, fd, self.foot.code_at) {
            unmap(slot, PAGE + stubs);
            return None;
        }
        Some(self.foot.sites as usize)
    }
}

fn unmap(at: usize, len: usize) {
    // SAFETY: memory that was mapped a moment ago, and that nothing refers to.
    unsafe { kernel::call(libc::SYS_munmap as usize, [at, len, 0, 0, 0, 0]) };
}

/// Whether the library's code in memory may be another than its file's: some of its pages are this process'
/// own, as after a change by a debugger, a probe or another preloaded library; or that cannot be told.
fn is_changed(library: &Library) -> bool {
    /// Bits of a page in `/proc/self/pagemap`.
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_A_FILE: u64 = 1 << 61;
    const EACH: usize = size_of::<u64>();
    let fd = kernel::open(b"/proc/self/pagemap\0", libc::O_RDONLY | libc::O_CLOEXEC, 0);
    if fd < 0 {
        return true;
    }
    let (mut page, end) = (
        library.start / PAGE,
        (library.start + library.code().len()).div_ceil(PAGE),
    );
    let mut words = [0; 512 * EACH];
    let mut is_changed = false;
    while page < end && !is_changed {
        let want = ((end - page) * EACH).min(words.len());
        let got = kernel::pread(fd as i32, &mut words[..want], (page * EACH) as u64);
        let words = words[..got.max(0) as usize].as_chunks::<EACH>().0;
        page += words.len();
        let is_own = |word: &[u8; EACH]| {
            let word = u64::from_ne_bytes(*word);
            word & SWAPPED != 0 || word & (PRESENT | OF_A_FILE) == PRESENT
        };
        is_changed = words.is_empty() || words.iter().any(is_own);
    }
    kernel::close(fd as i32);
    is_changed
}

/// A suffix that no other process uses, whatever it takes its number for.
pub fn fresh_suffix() -> String {
    use std::hash::{BuildHasher, RandomState};
    format!(".{:016x}", RandomState::new().hash_one(kernel::gettid()))
}

/// Writes the copy of a library whose code in memory is as its file has it. `replace` is given the code, where
/// the page with the entry's address lies in memory, and the stubs' memory, as many bytes as `stubs`; it
/// returns how many sites it has replaced. Failures leave nothing behind.
pub fn write(
    notes: &Path,
    library: &Library,
    stubs: usize,
    replace: impl FnOnce(&mut [u8], usize, &mut [u8]) -> usize,
) -> Option<()> {
    // A file that is longer than the process' files may be would end it.
    let name = Path::new(std::ffi::OsStr::from_bytes(&library.name));
    let len = std::fs::metadata(name).ok()?.len().next_multiple_of(PAGE as u64)
        + (stubs.next_multiple_of(PAGE) + FOOT) as u64;
    if len > kernel::file_max() || is_changed(library) {
        return None;
    }
    let path = path_beside(notes);
    let mut fresh = path.clone().into_os_string();
    fresh.push(fresh_suffix());
    // Who may not write here, or finds no room, learns it before the work.
    let mut file = File::options().write(true).create_new(true).open(&fresh).ok()?;
    let written = has_room(&file, len)
        .then(|| changed_copy(name, library, stubs, replace))
        .flatten()
        .filter(|bytes| bytes.len() as u64 == len)
        .and_then(|bytes| {
            file.write_all(&bytes).ok()?;
            // Whatever the umask is: others read it, too.
            file.set_permissions(PermissionsExt::from_mode(0o644)).ok()?;
            // Durable before it has its name: after a power cut programs would run what the file then has.
            file.sync_all().ok()?;
            std::fs::rename(&fresh, &path).ok()
        });
    if written.is_none() {
        let _ = std::fs::remove_file(&fresh);
    }
    written
}

/// Reserves room for a file. Where the file system cannot, it is found out later.
fn has_room(file: &File, len: u64) -> bool {
    let a = [file.as_raw_fd() as usize, 0, 0, len as usize, 0, 0];
    // SAFETY: takes numbers only.
    let got = unsafe { kernel::call(libc::SYS_fallocate as usize, a) };
    got == 0 || got == -(libc::EOPNOTSUPP as isize)
}

/// The bytes of a copy, with its foot.
fn changed_copy(
    name: &Path,
    library: &Library,
    stubs: usize,
    replace: impl FnOnce(&mut [u8], usize, &mut [u8]) -> usize,
) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(name).ok()?.read_to_end(&mut bytes).ok()?;
    let code = library.code();
    let within = library.offset..library.offset.checked_add(code.len())?;
    let is_same = bytes.get(within.clone()) == Some(code) && bytes.get(..HEAD) == library.head(HEAD);
    let slot = library.start.checked_sub(DISTANCE)?;
    if !is_same {
        return None;
    }
    let stubs_at = bytes.len().next_multiple_of(PAGE);
    let stubs = stubs.next_multiple_of(PAGE);
    bytes.resize(stubs_at + stubs, 0xcc);
    let (copy, behind) = bytes.split_at_mut(stubs_at);
    let sites = replace(&mut copy[within], slot, behind);
    let foot = Foot {
        code: code.len() as u64,
        code_at: library.offset as u64,
        stubs: stubs as u64,
        stubs_at: stubs_at as u64,
        distance: DISTANCE as u64,
        sites: sites as u64,
    };
    bytes.extend_from_slice(&foot.encode());
    Some(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{FOOT, Foot};

    #[test]
    fn foot_that_is_damaged_is_none() {
        let foot = Foot {
            code: 1,
            code_at: 2,
            stubs: 3,
            stubs_at: 4,
            distance: 5,
            sites: 6,
        };
        let good = foot.encode();
        assert_eq!(Foot::decode(&good), Some(foot));
        for at in 0..FOOT {
            let mut bad = good;
            bad[at] ^= 1;
            assert_eq!(Foot::decode(&bad), None, "byte {at}");
        }
    }
}
