//! Reads files: at a bounded rate, without their holes, and without blocking on files that were replaced.

use super::walk::{Chosen, Filter, Found, walk};
use crate::estimate::{Estimator, LARGEST};
use crate::hash::Domain;
use crate::image::{Form, Profile};
use crate::input::disk::OfFile;
use crate::input::{Collector, Limits, ReadAt};
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::Xxh3;

/// The longest sleep between two looks at the stop flag.
const SLICE: Duration = Duration::from_millis(50);

/// Limits the bytes read a second, averaged over a scan, and ends reading when it is to stop.
pub struct ReadRate {
    bytes_per_second: Option<u64>,
    since: Instant,
    bytes: u64,
    waited: Duration,
    stop: Option<Box<dyn Fn() -> bool>>,
}

impl std::fmt::Debug for ReadRate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadRate")
            .field("bytes_per_second", &self.bytes_per_second)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl ReadRate {
    /// Limits reads to this number of bytes a second, or not at all.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self {
            bytes_per_second,
            since: Instant::now(),
            bytes: 0,
            waited: Duration::ZERO,
            stop: None,
        }
    }

    /// Ends reading and waiting once `stop` returns true.
    #[must_use]
    pub fn until(mut self, stop: impl Fn() -> bool + 'static) -> Self {
        self.stop = Some(Box::new(stop));
        self
    }

    /// Whether reading is to end.
    pub fn is_stopped(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop())
    }

    /// Counts `bytes` and waits until the rate allows them.
    ///
    /// # Errors
    /// If reading is to end.
    pub fn take(&mut self, bytes: u64) -> Result<()> {
        self.bytes += bytes;
        let early = |rate: u64| {
            let due = self.bytes as f64 / rate.max(1) as f64;
            // Of what is too long for a `Duration`, no one sees the end.
            let due = Duration::try_from_secs_f64(due).unwrap_or(Duration::MAX);
            due.saturating_sub(self.since.elapsed())
        };
        while !self.is_stopped() {
            let early = self.bytes_per_second.map_or(Duration::ZERO, early);
            if early <= Duration::from_millis(5) {
                return Ok(());
            }
            let slice = early.min(SLICE);
            std::thread::sleep(slice);
            self.waited += slice;
        }
        Err(Error::other("stopped"))
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
            rate.take(now)?;
            file.read_at(at, piece)?;
            each(at, piece);
            at += now;
        }
    }
    Ok(())
}

/// Opens a regular file or a block device, without waiting for anyone: what else a name leads to is refused,
/// also if it takes the name meanwhile.
///
/// # Errors
/// If it is something else, or cannot be opened.
pub fn open_image(path: &Path) -> Result<File> {
    let check = |about: std::fs::Metadata| match about.is_file() || about.file_type().is_block_device() {
        true => Ok(()),
        false => Err(Error::new(
            ErrorKind::InvalidInput,
            "it is neither a file nor a block device",
        )),
    };
    // Opening some devices does something.
    check(std::fs::metadata(path)?)?;
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY)
        .open(path)?;
    check(file.metadata()?)?;
    Ok(file)
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
    let mut unread = 0;
    let mut found = walk(roots, filter, &mut |chosen| {
        let mut whole = Xxh3::with_seed(Domain::File as u64 + 1);
        // Without its holes.
        let mut bytes = 0;
        let read = open(&chosen).and_then(|file| {
            pieces(&file, rate, &mut |at, piece| {
                bytes += piece.len() as u64;
                whole.update(&at.to_le_bytes());
                whole.update(piece);
                estimator.add(piece);
            })
        });
        match read {
            Ok(()) => {
                whole.update(&chosen.len.to_le_bytes());
                estimator.add_file(whole.digest(), bytes);
            }
            Err(error) => {
                unread += 1;
                if errors.len() < 100 {
                    errors.push(format!("{}: {error}", chosen.path.display()));
                }
            }
        }
        progress(rate.bytes())
    });
    found.files -= unread;
    errors.into_iter().for_each(|error| found.note(error));
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn wait_for_the_rate_ends_with_the_stop() {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let mut rate = ReadRate::new(Some(1)).until(move || seen.load(Ordering::Relaxed));
        let started = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                stop.store(true, Ordering::Relaxed);
            });
            assert!(rate.take(u64::MAX / 2).is_err());
        });
        assert!(rate.is_stopped() && started.elapsed() < Duration::from_secs(20));
        assert!(rate.waited() >= Duration::from_millis(100));
        // Without a rate, too.
        assert!(ReadRate::new(None).until(|| true).take(1).is_err());
        assert!(ReadRate::new(None).take(1 << 60).is_ok());
    }

    #[test]
    fn only_files_and_block_devices_are_opened_as_images() {
        let dir = tempfile::tempdir().expect("a directory");
        let fifo = dir.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).expect("made");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&fifo, &link).expect("linked");
        for other in [&fifo, &link, Path::new("/dev/zero"), dir.path()] {
            let error = open_image(other).expect_err("refused");
            assert!(error.to_string().contains("neither"), "{error}");
        }
        std::fs::write(dir.path().join("file"), "x").expect("written");
        assert!(open_image(&dir.path().join("file")).is_ok());
    }

    #[test]
    fn estimate_counts_what_it_has_read() {
        // It is shorter than its length.
        let unreadable = PathBuf::from("/sys/kernel/uevent_seqnum");
        if !unreadable.exists() {
            println!("skipped: needs sysfs in /sys");
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("a"), [7; 5000]).expect("written");
        let mut estimator = Estimator::new(1 << 20);
        let (filter, mut rate) = (Filter::default(), ReadRate::new(None));
        let roots = [unreadable, dir.path().to_owned()];
        let found = estimate(&roots, &filter, &mut rate, &mut estimator, &mut |_| true);
        assert_eq!((found.files, found.errors.len()), (1, 1), "{found:?}");
    }

    #[test]
    fn holes_count_for_nothing_in_an_estimate() {
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["a", "b"] {
            let file = File::create(dir.path().join(name)).expect("made");
            file.set_len(1 << 40).expect("sparse");
            std::os::unix::fs::FileExt::write_all_at(&file, &[7; 4096], 1 << 30).expect("written");
        }
        let mut estimator = Estimator::new(1 << 20);
        let (filter, mut rate) = (Filter::default(), ReadRate::new(None));
        estimate(
            &[dir.path().to_owned()],
            &filter,
            &mut rate,
            &mut estimator,
            &mut |_| true,
        );
        let savings = estimator.savings();
        let files = savings.last().expect("whole files");
        assert!(
            files.bytes <= 2 * LARGEST as u64 && files.saved_bytes > 0.0,
            "{files:?}"
        );
    }
}
