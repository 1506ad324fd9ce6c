//! The live directory: memory files beside a pool that survive every process but not the machine. Owns its
//! place, its permissions and the messages when it does not fit; knows nothing of its content.

use super::size;
use crate::{Config, KernelError};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use varve_format::log::CHUNK_BYTES;
use varve_media::host::host_capacity;

/// Default parent of live directories; `varve.toml` may name another.
pub const DEFAULT_PARENT: &str = "/dev/shm";

/// Returns the place of a pool's live directory.
#[must_use]
pub fn place(parent: &Path, uuid: &str, owner_uid: u32) -> PathBuf {
    parent.join(format!("varve-{uuid}-{owner_uid}"))
}

/// Name of the file with the path of the live directory's pool; a serving daemon has it locked.
const NOTE: &str = "pool";

/// Returns the pool's UUID from the name of a live directory.
pub fn uuid_in(name: &str) -> Option<&str> {
    let (uuid, uid) = name.strip_prefix("varve-")?.rsplit_once('-')?;
    (uuid.len() == 36 && uid.parse::<u32>().is_ok()).then_some(uuid)
}

/// Returns the pool's directory at the last start of its daemon. `None`: an earlier version did not note it.
pub fn pool_of(live: &Path) -> Option<PathBuf> {
    let path = std::fs::read(live.join(NOTE)).ok()?;
    (!path.is_empty()).then(|| PathBuf::from(std::ffi::OsString::from_vec(path)))
}

/// Whether a daemon serves this live directory.
pub fn is_in_use(live: &Path) -> bool {
    let lock = |file: &File| rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    File::open(live.join(NOTE)).is_ok_and(|note| lock(&note) == Err(rustix::io::Errno::WOULDBLOCK))
}

/// Notes the pool in its live directory. As long as the returned file is open, the directory is [in
/// use](is_in_use).
///
/// # Errors
/// It cannot be written.
pub fn note_pool(live: &Path, pool: &Path) -> Result<File, KernelError> {
    let path = live.join(NOTE);
    let write = || -> io::Result<File> {
        let mut note = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)?;
        note.write_all(pool.as_os_str().as_bytes())?;
        rustix::fs::flock(&note, rustix::fs::FlockOperation::NonBlockingLockShared)?;
        Ok(note)
    };
    write().map_err(|error| KernelError::io(format!("cannot write {}", path.display()), error))
}

/// Removes the directory if only the note is left in it.
pub fn remove_empty(live: &Path) {
    let only_note =
        std::fs::read_dir(live).is_ok_and(|entries| entries.flatten().all(|entry| entry.file_name() == NOTE));
    if only_note {
        let _ = std::fs::remove_file(live.join(NOTE));
        let _ = std::fs::remove_dir(live);
    }
}

/// Makes the directory (0700) if it does not exist, and refuses one that another user made.
///
/// # Errors
/// A message that says what to do.
pub fn ensure(live: &Path) -> Result<(), KernelError> {
    let parent = live.parent().unwrap_or(Path::new("/"));
    match std::fs::DirBuilder::new().mode(0o700).create(live) {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(KernelError::Pool(format!(
                "{parent} is not there: the logs of running sessions are kept in memory files. Mount a \
                tmpfs there \
                 (`mount -t tmpfs tmpfs {parent}`), or name another one with `live = \"DIR\"` in varve.toml",
                parent = parent.display()
            )));
        }
        Err(error) => return Err(KernelError::io(format!("cannot make {}", live.display()), error)),
    }
    let meta = std::fs::symlink_metadata(live)
        .map_err(|error| KernelError::io(format!("cannot look at {}", live.display()), error))?;
    let own_uid = rustix::process::geteuid().as_raw();
    if !meta.is_dir() || meta.uid() != own_uid || meta.mode() & 0o077 != 0 {
        return Err(KernelError::Pool(format!(
            "{} is not a directory of this user with mode 0700; somebody else made it. Remove it and try \
            again",
            live.display()
        )));
    }
    Ok(())
}

/// Returns the settings with logs that fit into a slot of a device.
#[must_use]
pub fn fit_slot(config: Config, nvm_bytes: u64, slot_bytes: u64) -> Config {
    let most = slot_bytes / CHUNK_BYTES * CHUNK_BYTES;
    if config.log_limit(nvm_bytes) <= most {
        return config;
    }
    Config {
        log_initial_bytes: config.log_initial_bytes.min(most),
        log_max_bytes: most,
        ..config
    }
}

/// Returns the settings with logs that fit into the available memory, and a remark if they had to be made
/// smaller.
///
/// # Errors
/// The smallest log does not fit.
pub fn fit(config: &Config, nvm_bytes: u64, live: &Path) -> Result<(Config, Option<String>), KernelError> {
    let parent = live.parent().unwrap_or(Path::new("/"));
    let space = host_capacity(parent).map_err(|error| {
        KernelError::io(format!("cannot ask for the space at {}", parent.display()), error)
    })?;
    if space.total_bytes == 0 {
        // The tmpfs has no limit.
        return Ok((config.clone(), None));
    }
    let least = CHUNK_BYTES + varve_ipc::page::PAGE_BYTES as u64;
    if space.available_bytes < least {
        return Err(KernelError::Pool(format!(
            "{} has {} free of {}; a session needs at least {} there for its log. Free some, or make it \
            larger \
             (`mount -o remount,size=1G {}`; for a container `--shm-size=1g`)",
            parent.display(),
            size::show(space.available_bytes),
            size::show(space.total_bytes),
            size::show(least),
            parent.display()
        )));
    }
    // One log may take a quarter, so that a few sessions fit side by side; initially a sixteenth.
    let chunks = |bytes: u64| (bytes / CHUNK_BYTES).max(1) * CHUNK_BYTES;
    let most = chunks(space.total_bytes / 4);
    let first = chunks(space.total_bytes / 16);
    let limit = config.log_limit(nvm_bytes);
    if limit <= most && config.log_initial_bytes <= first {
        return Ok((config.clone(), None));
    }
    let mut fitted = config.clone();
    fitted.log_initial_bytes = config.log_initial_bytes.min(first);
    fitted.log_max_bytes = limit.min(most).max(fitted.log_initial_bytes);
    let remark = format!(
        "{} has only {}: a session's log starts at {} and grows to {} at most, so it is digested more often. \
         More memory there makes bursts faster",
        parent.display(),
        size::show(space.total_bytes),
        size::show(fitted.log_initial_bytes),
        size::show(fitted.log_max_bytes)
    );
    Ok((fitted, Some(remark)))
}

/// Refuses a memory-only pool that does not fit.
///
/// # Errors
/// A message with the numbers and what to do.
pub fn check_memory_pool(live: &Path, nvm_bytes: u64, journal_bytes: u64) -> Result<(), KernelError> {
    let parent = live.parent().unwrap_or(Path::new("/"));
    let space = host_capacity(parent).map_err(|error| {
        KernelError::io(format!("cannot ask for the space at {}", parent.display()), error)
    })?;
    let need = nvm_bytes + journal_bytes + 2 * CHUNK_BYTES;
    if space.total_bytes == 0 || need <= space.available_bytes {
        return Ok(());
    }
    Err(KernelError::Pool(format!(
        "an NVM of {} in memory needs {} at {} (with journal and logs), which has {} free of {}. Use a \
        smaller \
         --nvm shm:SIZE, or --nvm SIZE for a plain file, or make it larger (`mount -o remount,size=SIZE \
         {}`; for a \
         container `--shm-size=SIZE`)",
        size::show(nvm_bytes),
        size::show(need),
        parent.display(),
        size::show(space.available_bytes),
        size::show(space.total_bytes),
        parent.display()
    )))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{check_memory_pool, ensure, fit, place};
    use crate::Config;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn live_directory_is_refused_when_others_may_enter_or_nothing_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let live = place(dir.path(), "u-u", 7);
        assert!(live.ends_with("varve-u-u-7"));
        ensure(&live).unwrap();
        ensure(&live).unwrap();
        std::fs::set_permissions(&live, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(ensure(&live).unwrap_err().to_string().contains("0700"));
        let error = ensure(&dir.path().join("no/such")).unwrap_err();
        assert!(error.to_string().contains("mount -t tmpfs"), "{error}");
    }

    #[test]
    fn memory_pool_is_refused_with_numbers_when_it_does_not_fit() {
        let dir = tempfile::tempdir().unwrap();
        let live = dir.path().join("live");
        let error = check_memory_pool(&live, 1 << 60, 1 << 20)
            .unwrap_err()
            .to_string();
        assert!(error.contains("PiB") && error.contains("--shm-size"), "{error}");
        check_memory_pool(&live, 4096, 4096).unwrap();
        let (config, _) = fit(&Config::default(), 64 << 20, &live).unwrap();
        config.validate().unwrap();
    }
}
