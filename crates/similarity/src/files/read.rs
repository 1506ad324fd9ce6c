//! Reads files: at a bounded rate, without their holes, and without blocking on files that were replaced.

use super::walk::{Chosen, Filter, Found, walk};
use crate::estimate::{Estimator, LARGEST};
use crate::hash::Domain;
use crate::image::{Form, Profile};
use crate::input::disk::OfFile;
use crate::input::{Collector, Limits, ReadAt};
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::Xxh3;

/// Limits the bytes read a second, averaged over a scan.
#[derive(Debug)]
pub struct ReadRate {
    bytes_per_second: Option<u64>,
    since: Instant,
    bytes: u64,
    waited: Duration,
}

impl ReadRate {
    /// Limits reads to this number of bytes a second, or not at all.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self {
            bytes_per_second,
            since: Instant::now(),
            bytes: 0,
            waited: Duration::ZERO,
        }
    }

    /// Counts `bytes` and waits until the rate allows them.
    pub fn take(&mut self, bytes: u64) {
        self.bytes += bytes;
        let Some(rate) = self.bytes_per_second else { return };
        let due = Duration::from_secs_f64(self.bytes as f64 / rate.max(1) as f64);
        let early = due.saturating_sub(self.since.elapsed());
        if early > Duration::from_millis(5) {
            std::thread::sleep(early);
            self.waited += early;
        }
    }

    /// Bytes read.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Time waited.
    pub const fn waited(&self) -> Duration {
        self.waited
    }
}

/// Opens a file that a walk has found, if it is still the same file.
pub(super) fn open(chosen: &Chosen) -> Result<OfFile> {
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(&chosen.path)?;
    let now = Chosen::new(&chosen.path, &file.metadata()?);
    if now.id != chosen.id || !file.metadata()?.is_file() {
        return Err(Error::new(
            ErrorKind::NotFound,
            "another file has taken its place",
        ));
    }
    OfFile::new(file)
}

/// Calls `each` with the data of a file, without its holes: pieces aligned to [`LARGEST`], with their offset.
pub(super) fn pieces(file: &OfFile, rate: &mut ReadRate, each: &mut dyn FnMut(u64, &[u8])) -> Result<()> {
    let mut buffer = vec![0; LARGEST];
    let mut at = 0;
    while let Some((from, to)) = file.next_data(at)? {
        at = at.max(from / LARGEST as u64 * LARGEST as u64);
        while at < to {
            let now = (file.len() - at).min(LARGEST as u64);
            let piece = &mut buffer[..now as usize];
            rate.take(now);
            file.read_at(at, piece)?;
            each(at, piece);
            at += now;
        }
    }
    Ok(())
}

/// Counts duplicates in all files under `roots`; `progress` is called with the bytes so far, and ends the
/// count by returning false.
pub fn estimate(
    roots: &[PathBuf],
    filter: &Filter,
    rate: &mut ReadRate,
    estimator: &mut Estimator,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Found {
    let mut errors = Vec::new();
    let mut found = walk(roots, filter, &mut |chosen| {
        let mut whole = Xxh3::with_seed(Domain::File as u64 + 1);
        let read = open(&chosen).and_then(|file| {
            pieces(&file, rate, &mut |at, piece| {
                whole.update(&at.to_le_bytes());
                whole.update(piece);
                estimator.add(piece);
            })
        });
        match read {
            Ok(()) => {
                whole.update(&chosen.len.to_le_bytes());
                estimator.add_file(whole.digest(), chosen.len);
            }
            Err(error) if errors.len() < 100 => errors.push(format!("{}: {error}", chosen.path.display())),
            Err(_) => {}
        }
        progress(rate.bytes())
    });
    found.errors.extend(errors);
    found
}

/// Reads a directory as the root of an image and returns its profile.
///
/// # Errors
/// If the directory itself cannot be read.
pub fn profile(
    name: &str,
    dir: &Path,
    filter: &Filter,
    rate: &mut ReadRate,
    limits: &Limits,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<Profile> {
    std::fs::read_dir(dir)?;
    let mut collector = Collector::new(name, limits);
    let mut notes = Vec::new();
    let found = walk(&[dir.to_owned()], filter, &mut |chosen| {
        let path = chosen
            .path
            .strip_prefix(dir)
            .unwrap_or(&chosen.path)
            .to_string_lossy()
            .into_owned();
        let mut file = collector.file(&path, true);
        let mut end = 0;
        let read = open(&chosen).and_then(|from| {
            let all = pieces(&from, rate, &mut |at, piece| {
                collector.hole(&mut file, at - end);
                collector.write(&mut file, piece);
                end = at + piece.len() as u64;
            });
            collector.hole(&mut file, from.len().saturating_sub(end));
            all
        });
        match read {
            Ok(()) => collector.end(file),
            Err(error) => notes.push(format!("{path}: {error}")),
        }
        progress(rate.bytes())
    });
    notes
        .into_iter()
        .chain(found.errors)
        .for_each(|note| collector.note(note));
    let mut profile = collector.finish();
    profile.form = Form::Directory;
    Ok(profile)
}
