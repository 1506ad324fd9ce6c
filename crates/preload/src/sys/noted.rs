//! A file with the sites that `sites` finds in a library, for processes that start later: finding them takes
//! milliseconds, and a process may be shorter than that. If anything in the file is not as expected, it is
//! ignored and the library searched again.

use super::image::fresh_suffix;
use super::kernel;
use super::sites::{self, Site};
use crate::config;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

const MAGIC: [u8; 8] = *b"VRVSITE1";
/// Bytes before the sites: magic, length of the code, checksum of the sites.
const HEAD: usize = 24;
/// Bytes of one site: start, loaded number (or all ones), length, tail, two zeros.
const EACH: usize = 12;
const NO_LOAD: u32 = u32::MAX;
/// Upper bound on the sites of a valid file.
const SITES_MAX: usize = 4096;

/// Returns the FNV-1a hash of `parts`.
fn sum(parts: &[&[u8]]) -> u64 {
    parts
        .iter()
        .flat_map(|part| part.iter())
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
            (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        })
}

/// Returns the path of the file for the present version of the library at `name`. `None` if nothing is to be
/// recorded.
#[must_use]
pub fn path_for(name: &[u8]) -> Option<PathBuf> {
    let begin = std::env::var_os(config::SITES)?;
    let meta = std::fs::metadata(Path::new(OsStr::from_bytes(name))).ok()?;
    let stamps = [
        meta.dev(),
        meta.ino(),
        meta.size(),
        meta.mtime() as u64,
        meta.mtime_nsec() as u64,
        // One that was changed in place may have its old times.
        meta.ctime() as u64,
        meta.ctime_nsec() as u64,
    ];
    let bytes: Vec<u8> = stamps.iter().flat_map(|stamp| stamp.to_le_bytes()).collect();
    let mut path = begin;
    path.push(format!("-{:016x}", sum(&[name, &bytes])));
    Some(path.into())
}

fn encode(code: &[u8], sites: &[Site]) -> Vec<u8> {
    let mut body = Vec::with_capacity(sites.len() * EACH);
    for site in sites {
        body.extend_from_slice(&(site.start as u32).to_le_bytes());
        body.extend_from_slice(&site.loads.unwrap_or(NO_LOAD).to_le_bytes());
        body.extend_from_slice(&[site.len as u8, site.tail as u8, 0, 0]);
    }
    let mut all = MAGIC.to_vec();
    all.extend_from_slice(&(code.len() as u64).to_le_bytes());
    all.extend_from_slice(&sum(&[&body]).to_le_bytes());
    all.extend_from_slice(&body);
    all
}

/// Decodes the sites in `bytes`, if they belong to `code`: each must be a system call with the recorded
/// neighbour.
fn decode(bytes: &[u8], code: &[u8]) -> Option<Vec<Site>> {
    let (head, body) = bytes.split_at_checked(HEAD)?;
    let word = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
    let right = head[..8] == MAGIC && word(8)? == code.len() as u64 && word(16)? == sum(&[body]);
    if !right || body.len() % EACH != 0 || body.len() / EACH > SITES_MAX {
        return None;
    }
    let mut sites = Vec::with_capacity(body.len() / EACH);
    let mut end = 0;
    for entry in body.as_chunks::<EACH>().0 {
        let [a, b, c, d, e, f, g, h, len, tail, _, _] = *entry;
        let loads = u32::from_le_bytes([e, f, g, h]);
        let site = Site {
            start: u32::from_le_bytes([a, b, c, d]) as usize,
            len: len.into(),
            loads: (loads != NO_LOAD).then_some(loads),
            tail: tail.into(),
        };
        if site.start < end || !site.fits(code) {
            return None;
        }
        end = site.start + site.len;
        sites.push(site);
    }
    Some(sites)
}

/// Largest file of notes.
const BYTES_MAX: usize = HEAD + EACH * SITES_MAX;

fn read(path: &Path) -> Option<Vec<u8>> {
    // At once: each further call would be one more for every process that starts.
    let mut bytes = Vec::with_capacity(BYTES_MAX + 1);
    let file = File::open(path).ok()?;
    file.take(BYTES_MAX as u64 + 1).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    // A file that is longer than the process' files may be would end it.
    if bytes.len() as u64 > kernel::file_max() {
        return Err(std::io::ErrorKind::FileTooLarge.into());
    }
    let mut fresh = path.to_owned().into_os_string();
    fresh.push(fresh_suffix());
    let mut file = File::options().write(true).create_new(true).open(&fresh)?;
    // Whatever the umask is: others read it, too.
    let written = file
        .set_permissions(PermissionsExt::from_mode(0o644))
        .and_then(|()| file.write_all(bytes))
        .and_then(|()| std::fs::rename(&fresh, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&fresh);
    }
    written
}

/// The notes of an earlier process on a library, not verified yet.
#[derive(Debug)]
pub struct Notes {
    path: Option<PathBuf>,
    bytes: Option<Vec<u8>>,
}

impl Notes {
    /// Those at [`path_for`] a library.
    #[must_use]
    pub fn at(path: Option<PathBuf>) -> Self {
        let bytes = path.as_deref().and_then(read);
        Self { path, bytes }
    }

    /// Where sites are said to start: a hint.
    pub fn starts(&self) -> impl Iterator<Item = usize> + '_ {
        let body = self.bytes.as_deref().and_then(|bytes| bytes.get(HEAD..));
        let entries = body.unwrap_or_default().as_chunks::<EACH>().0.iter();
        entries.map(|[a, b, c, d, ..]| u32::from_le_bytes([*a, *b, *c, *d]) as usize)
    }

    /// As [`sites::find`], or what was noted for the same question: `wanted` and `unknown` are the same for
    /// all processes of one version of this library.
    #[must_use]
    pub fn find(&self, code: &[u8], wanted: impl Fn(u32) -> bool, unknown: bool) -> Vec<Site> {
        if let Some(sites) = self.bytes.as_deref().and_then(|bytes| decode(bytes, code)) {
            return sites;
        }
        let sites = sites::find(code, wanted, unknown).0;
        if let Some(path) = self.path.as_deref().filter(|_| sites.len() <= SITES_MAX) {
            let _ = write(path, &encode(code, &sites));
        }
        sites
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{EACH, HEAD, Notes, decode, encode};
    use crate::sys::sites::find;

    fn code() -> Vec<u8> {
        let mut code = vec![0xcc; 64];
        code.extend_from_slice(&[0x0f, 0x05, 0x48, 0x3d, 0x00, 0xf0, 0xff, 0xff]);
        code.extend_from_slice(&[0xcc, 0xb8, 0x03, 0, 0, 0, 0x0f, 0x05, 0xcc]);
        code.extend_from_slice(&[0xcc; 64]);
        code
    }

    #[test]
    fn what_was_noted_is_what_was_found() {
        let code = code();
        let sites = find(&code, |_| true, true).0;
        assert_eq!(sites.len(), 2);
        let bytes = encode(&code, &sites);
        assert_eq!(decode(&bytes, &code).unwrap(), sites);
        let notes = Notes {
            path: None,
            bytes: Some(bytes),
        };
        let starts: Vec<usize> = sites.iter().map(|site| site.start).collect();
        assert_eq!(notes.starts().collect::<Vec<_>>(), starts);
        assert_eq!(
            notes.find(&code, |_| false, false),
            sites,
            "it is not looked for again"
        );
    }

    #[test]
    fn notes_that_do_not_fit_the_code_are_not_believed() {
        let code = code();
        let good = encode(&code, &find(&code, |_| true, true).0);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert_eq!(decode(&bad, &code), None, "byte {at}");
            assert_eq!(decode(&good[..at], &code), None, "{at} bytes");
        }
        let mut other = code.clone();
        other[64] = 0xcc;
        assert_eq!(decode(&good, &other), None);
        assert_eq!(good.len(), HEAD + 2 * EACH);
    }
}
