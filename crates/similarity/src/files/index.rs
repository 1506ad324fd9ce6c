//! The index of a state: the files whose words are in `sums`, and whether a directory is a state at all.

use super::state::StateError;
use super::sums::Words;
use super::walk::Chosen;
use crate::hash::BLOCK_BYTES;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"VARVSUM2";
/// Magic of the form before, which had words for zeros, too.
const OLD_MAGIC: &[u8; 8] = b"VARVSUMS";
const NAME: &str = "index";
pub(super) const LOCK: &str = "lock";

/// A file with kept checksums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Its path at the last scan.
    #[serde(with = "path_bytes")]
    pub path: PathBuf,
    id: (u64, u64),
    pub(super) len: u64,
    times: (i128, i128),
    /// Place of its first word.
    pub(super) at: u64,
    pub(super) words: Words,
    /// Looked at in this scan.
    #[serde(skip)]
    pub(super) is_current: bool,
}

impl Kept {
    pub(super) fn new(chosen: Chosen, at: u64, words: Words) -> Self {
        Self {
            path: chosen.path,
            id: chosen.id,
            len: chosen.len,
            times: (chosen.mtime_ns, chosen.ctime_ns),
            at,
            words,
            is_current: true,
        }
    }

    /// Device and inode number.
    pub const fn id(&self) -> (u64, u64) {
        self.id
    }

    /// Whether this is the file as it was read: the number, size and times are the same.
    pub fn is(&self, chosen: &Chosen) -> bool {
        (self.id, self.len, self.times) == (chosen.id, chosen.len, (chosen.mtime_ns, chosen.ctime_ns))
    }

    fn is_sound(&self) -> bool {
        self.words
            .is_sound(self.at, self.len.div_ceil(BLOCK_BYTES as u64))
    }

    /// The next free place.
    pub(super) fn next(&self) -> u64 {
        self.words.next(self.at)
    }
}

/// A path as its bytes, which need not be UTF-8.
mod path_bytes {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    pub fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().as_bytes().serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        Vec::<u8>::deserialize(from).map(|bytes| OsString::from_vec(bytes).into())
    }
}

/// Options that open a file of a state: no link is followed, and nothing is waited for.
pub(super) fn options() -> OpenOptions {
    let mut options = File::options();
    options
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC);
    options
}

/// The bytes of the index; `None` if there is none.
fn read(dir: &Path) -> Result<Option<Vec<u8>>> {
    let mut file = match options().open(dir.join(NAME)) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if !file.metadata()?.is_file() {
        return Err(Error::new(ErrorKind::InvalidData, "its `index` is no file"));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Whether a directory is a state, or may become one: it is empty, but for what is left of a state whose
/// first index was not written.
pub(super) fn is_own(dir: &Path) -> Result<bool> {
    if let Some(bytes) = read(dir)? {
        return Ok(bytes.starts_with(MAGIC) || bytes.starts_with(OLD_MAGIC));
    }
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let (name, about) = (entry.file_name(), entry.metadata()?);
        let is_lock = name == LOCK && about.len() == 0;
        let name = name.to_string_lossy();
        let is_new = name.starts_with(NAME) && name.ends_with(".new");
        if !about.is_file() || !is_lock && !is_new {
            return Ok(false);
        }
    }
    Ok(true)
}

/// What an index says.
pub(super) enum Index {
    /// There is none yet.
    New,
    /// It is of the form before.
    Old,
    Files(Vec<Kept>),
}

/// Reads the index of a directory that is a state.
pub(super) fn open(dir: &Path) -> std::result::Result<Index, StateError> {
    let bytes = read(dir).map_err(|error| StateError::Io {
        dir: dir.to_owned(),
        error,
    })?;
    let Some(bytes) = bytes else {
        return Ok(Index::New);
    };
    decode(&bytes).ok_or_else(|| StateError::Damaged(dir.to_owned()))
}

/// Replaces the index; durable when this returns.
pub(super) fn write(dir: &Path, kept: &[Kept]) -> Result<()> {
    let body = postcard::to_allocvec(kept).map_err(Error::other)?;
    let bytes = [&MAGIC[..], &crc32c::crc32c(&body).to_le_bytes(), &body].concat();
    crate::manifest::replace(&dir.join(NAME), &bytes)
}

fn decode(bytes: &[u8]) -> Option<Index> {
    let (magic, rest) = bytes.split_at_checked(MAGIC.len())?;
    let (sum, body) = rest.split_at_checked(4)?;
    if crc32c::crc32c(body).to_le_bytes() != sum {
        return None;
    }
    if magic == OLD_MAGIC {
        return Some(Index::Old);
    }
    let kept: Vec<Kept> = postcard::from_bytes(body).ok().filter(|_| magic == MAGIC)?;
    let is_sound = kept.iter().all(Kept::is_sound) && kept.is_sorted_by(|a, b| a.next() <= b.at);
    is_sound.then_some(Index::Files(kept))
}
