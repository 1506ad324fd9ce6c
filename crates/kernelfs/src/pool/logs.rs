//! Logs and pages of sessions as files: live copies in memory files and, where the pool is on disk, backing
//! files beside it. Owns their names and the choice between two copies; interprets no entry.

use super::arena::{Arena, SlotLog};
use super::copies::CopyFiles;
use super::segments::SegmentFiles;
use super::stale::LeftLog;
use crate::logs::{LogStore, SessionArea};
use crate::process::ProcessId;
use crate::user_segments::SegmentFile;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use varve_format::SessionId;
use varve_format::log::{LIVE_HEADER_SIZE, LiveHeader};
use varve_ipc::{CopiesAt, DaxAt, DaxMaps, Descriptors, Page};
use varve_media::emulated::{EmulatedRegion, NvmModel};
use varve_media::{Backing, DeviceName, LiveLog, MappedOptions, MappedRegion, MediaError, Region};
use zerocopy::{FromBytes, IntoBytes};

/// Numbers of logs of earlier daemons, by the copy that was used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Recovered {
    /// From memory: every completed call is in them.
    pub live: u64,
    /// From disk: they hold the state that was durable before a power cut (or before the live copy was lost).
    pub backing: u64,
    /// Copies that were of another boot or another pool, or damaged.
    pub ignored: u64,
}

#[derive(Clone)]
enum Files {
    /// A live file and its backing file, and whether the latter has a durable name and header.
    Backed(Arc<LiveLog>, Arc<AtomicBool>),
    /// Memory only.
    Memory(Arc<MappedRegion>),
    /// Persistent memory: a file.
    Dax(Arc<MappedRegion>),
    /// Persistent memory: a slot of a device.
    Slot(Arc<SlotLog>),
}

/// Where the logs of privileged sessions are persistent memory.
enum DaxLogs {
    /// Files beside the backing files.
    Files,
    /// Slots of a device.
    Device(Arc<Arena>),
}

impl Files {
    fn region(&self) -> Arc<dyn Region> {
        match self {
            Self::Backed(log, _) => Arc::clone(log) as _,
            Self::Memory(log) | Self::Dax(log) => Arc::clone(log) as _,
            Self::Slot(log) => Arc::clone(log) as _,
        }
    }
}

/// The copy of a log that the next start of the daemon uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogCopy {
    /// Session of the log.
    pub session: SessionId,
    /// The file.
    pub path: PathBuf,
    /// In memory; else on disk.
    pub live: bool,
}

/// Logs of a pool of files.
pub struct HostLogs {
    live: PathBuf,
    /// Directory of the backing files; `None` for a memory-only pool.
    backing: Option<PathBuf>,
    nvm: PathBuf,
    boot_id: [u8; 16],
    pool_uuid: [u8; 16],
    open: Mutex<HashMap<SessionId, Files>>,
    recovered: Mutex<Recovered>,
    segments: SegmentFiles,
    copies: CopyFiles,
    /// The names of logs could not be made durable: whether later ones are, is not known any more.
    names_failed: AtomicBool,
    /// Model that the daemon's reads of logs are slowed down to.
    model: Option<NvmModel>,
    dax: Option<DaxLogs>,
}

pub(super) fn setup(path: &Path, what: &'static str, error: &io::Error) -> MediaError {
    let device = DeviceName::from(path);
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => MediaError::NoSpace {
            device,
            off: 0,
            len: 0,
        },
        errno => MediaError::Setup {
            device,
            what,
            errno: errno.unwrap_or(libc::EIO),
        },
    }
}

/// Removes a file that may not be there.
fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!("{} is left behind: {error}", path.display());
    }
}

/// Returns the numbers in file names `PREFIX<number>SUFFIX` of a directory; none if it does not exist.
fn numbers(dir: &Path, prefix: &str, suffix: &str) -> Result<Vec<SessionId>, MediaError> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(setup(dir, "list it", &error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.map_err(|error| setup(dir, "list it", &error))?.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix(prefix)?.strip_suffix(suffix)?.parse().ok());
        found.extend(number.map(SessionId));
    }
    Ok(found)
}

/// Whether a file holds no byte but zeros, as a log that was never synced. What its client made it longer by is
/// not read.
fn is_blank(path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::FileExt;
    let file = File::open(path)?;
    let mut piece = vec![0; 256 << 10];
    let mut at = 0;
    loop {
        at = match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => return Ok(true),
            Err(error) => return Err(error.into()),
        };
        match file.read_at(&mut piece, at)? {
            0 => return Ok(true),
            len if piece[..len].iter().any(|byte| *byte != 0) => return Ok(false),
            len => at += len as u64,
        }
    }
}

impl HostLogs {
    /// Opens logs in `live`, with backing files in `backing` unless the pool is memory only. `nvm` is the
    /// file that privileged clients map.
    #[must_use]
    pub fn new(
        live: PathBuf,
        backing: Option<PathBuf>,
        nvm: PathBuf,
        boot_id: [u8; 16],
        pool_uuid: [u8; 16],
    ) -> Self {
        Self {
            live,
            backing,
            nvm,
            boot_id,
            pool_uuid,
            open: Mutex::default(),
            recovered: Mutex::default(),
            segments: SegmentFiles::default(),
            copies: CopyFiles::default(),
            names_failed: AtomicBool::new(false),
            model: None,
            dax: None,
        }
    }

    /// Keeps the logs of privileged sessions in files of the backing directory that are mapped as persistent
    /// memory.
    #[must_use]
    pub(super) fn on_dax_files(self) -> Self {
        Self {
            dax: Some(DaxLogs::Files),
            ..self
        }
    }

    /// Keeps the logs of privileged sessions in slots of a device, as far as there are any.
    #[must_use]
    pub(super) fn on_device(self, arena: Arc<Arena>) -> Self {
        Self {
            dax: Some(DaxLogs::Device(arena)),
            ..self
        }
    }

    const fn arena(&self) -> Option<&Arc<Arena>> {
        match &self.dax {
            Some(DaxLogs::Device(arena)) => Some(arena),
            _ => None,
        }
    }

    /// Slows the logs down to a model of NVM.
    #[must_use]
    pub const fn slowed_to(mut self, model: NvmModel) -> Self {
        self.model = Some(model);
        self
    }

    fn slowed(&self, log: Arc<dyn Region>) -> Arc<dyn Region> {
        match self.model {
            Some(model) => Arc::new(EmulatedRegion::new(log, model)),
            None => log,
        }
    }

    /// Removes an earlier daemon's segments: they are copies. Clients that map them keep their mappings.
    pub fn forget_segments(&self) {
        SegmentFiles::remove_left(&self.live);
    }

    /// Removes the copies that clients keep of data they read: no session is left.
    pub fn forget_copies(&self) {
        CopyFiles::remove_all(&self.live);
    }

    /// Returns the copies that were used for the sessions of earlier daemons.
    #[must_use]
    pub fn recovered(&self) -> Recovered {
        self.recovered.lock().clone()
    }

    /// Returns the existing logs and the copy of each that counts. Changes nothing.
    ///
    /// # Errors
    /// A directory cannot be listed.
    pub fn copies(&self) -> Result<Vec<LogCopy>, MediaError> {
        let mut copies = Vec::new();
        for session in LogStore::list(self)? {
            if let Some(arena) = self.arena()
                && arena.log_at(session).is_some()
            {
                let (path, live) = (PathBuf::from(arena.name().as_str()), true);
                copies.push(LogCopy { session, path, live });
                continue;
            }
            let dax = self.dax_path(session).map(|path| (path, false));
            let live = (self.log_path(session), true);
            let backing = self.backing_path(session).map(|path| (path, false));
            let found = dax
                .into_iter()
                .chain([live])
                .chain(backing)
                .find(|(path, live)| self.belongs(path, session, *live));
            copies.extend(found.map(|(path, live)| LogCopy { session, path, live }));
        }
        Ok(copies)
    }

    fn page_path(&self, session: SessionId) -> PathBuf {
        self.live.join(format!("page-{session}"))
    }

    fn log_path(&self, session: SessionId) -> PathBuf {
        self.live.join(format!("log-{session}"))
    }

    fn backing_path(&self, session: SessionId) -> Option<PathBuf> {
        Some(self.backing.as_ref()?.join(format!("{session}.log")))
    }

    /// File of a log that is persistent memory.
    fn dax_path(&self, session: SessionId) -> Option<PathBuf> {
        match self.dax {
            Some(DaxLogs::Files) => Some(self.backing.as_ref()?.join(format!("{session}.dax"))),
            _ => None,
        }
    }

    /// Makes a log in persistent memory; `None` where there is none, or no slot of it is free.
    fn create_dax(
        &self,
        session: SessionId,
        len_bytes: u64,
        max_bytes: u64,
    ) -> Result<Option<Files>, MediaError> {
        if let Some(path) = self.dax_path(session) {
            let options = MappedOptions {
                backing: Backing::Dax,
                len_bytes,
                max_bytes,
                sparse: false,
            };
            let log = MappedRegion::create(&path, options)?;
            // The first store to each page of unwritten blocks waits for the host's journal.
            log.populate(0, len_bytes);
            return Ok(Some(Files::Dax(Arc::new(log))));
        }
        let Some(arena) = self.arena() else {
            return Ok(None);
        };
        let log = arena.take(session, len_bytes)?;
        if log.is_none() {
            tracing::warn!(
                %session,
                "{}: no slot is free for a log; this one is durable only when it is synced",
                arena.name()
            );
        }
        Ok(log.map(|log| Files::Slot(Arc::new(log))))
    }

    /// Makes a log in memory, with a backing file unless the pool is memory only.
    fn create_in_memory(
        &self,
        session: SessionId,
        len_bytes: u64,
        max_bytes: u64,
    ) -> Result<Files, MediaError> {
        let live = self.log_path(session);
        if let Some(backing) = self.backing_path(session) {
            let log = LiveLog::create(&live, &backing, len_bytes, max_bytes)?;
            return Ok(Files::Backed(Arc::new(log), Arc::default()));
        }
        let options = MappedOptions {
            backing: Backing::Shm,
            len_bytes,
            max_bytes,
            sparse: false,
        };
        Ok(Files::Memory(Arc::new(MappedRegion::create(&live, options)?)))
    }

    fn create_log(
        &self,
        session: SessionId,
        (len_bytes, max_bytes): (u64, u64),
        privileged: bool,
    ) -> Result<Files, MediaError> {
        let dax = match privileged {
            true => self.create_dax(session, len_bytes, max_bytes)?,
            false => None,
        };
        let Some(files) = dax else {
            let files = self.create_in_memory(session, 0, max_bytes)?;
            // Where the disk has no room, a client is told before it relies on the log.
            if let Files::Backed(log, _) = &files {
                log.reserve(len_bytes)?;
            }
            return Ok(files);
        };
        let log = files.region();
        self.write_header(session, &*log)?;
        log.sync(0, LIVE_HEADER_SIZE as u64)?;
        self.sync_names()?;
        Ok(files)
    }

    /// Writes the header of a log, which survives the daemon then.
    fn write_header(&self, session: SessionId, log: &dyn Region) -> Result<(), MediaError> {
        let header = LiveHeader::new(self.boot_id, self.pool_uuid, session);
        log.write(0, header.as_bytes())?;
        log.fence()
    }

    /// Makes the names of logs durable.
    fn sync_names(&self) -> Result<(), MediaError> {
        let Some(dir) = &self.backing else { return Ok(()) };
        let failed = |errno| setup(dir, "sync it", &io::Error::from_raw_os_error(errno));
        if self.names_failed.load(Ordering::Acquire) {
            return Err(failed(libc::EIO));
        }
        let opened = File::open(dir).map_err(|error| setup(dir, "open it", &error))?;
        opened.sync_all().map_err(|error| {
            // The kernel tells of a failure once.
            self.names_failed.store(true, Ordering::Release);
            setup(dir, "sync it", &error)
        })
    }

    /// Whether a copy is of this pool and session, and (for a live one) of this boot.
    fn belongs(&self, path: &Path, session: SessionId, live: bool) -> bool {
        let mut bytes = [0; LIVE_HEADER_SIZE];
        let read = File::open(path).and_then(|mut file| io::Read::read_exact(&mut file, &mut bytes));
        let header = read.ok().and_then(|()| LiveHeader::read_from_bytes(&bytes).ok());
        header.is_some_and(|header| {
            header.is_valid()
                && header.pool_uuid == self.pool_uuid
                && header.session.get() == session.0
                && (!live || header.boot_id == self.boot_id)
        })
    }

    fn ignore(&self, path: &Path) {
        self.recovered.lock().ignored += 1;
        tracing::warn!(
            "{} is of another boot or pool, or damaged; ignored",
            path.display()
        );
    }

    /// Returns the copy of an earlier daemon's log that counts. From now on it is only read.
    fn find(&self, session: SessionId) -> Result<Option<Arc<dyn Region>>, MediaError> {
        let open = |path: &Path| match LeftLog::open(path) {
            Ok(log) => Ok(Arc::new(log) as Arc<dyn Region>),
            Err(error) => Err(setup(path, "open it", &error)),
        };
        if let Some(arena) = self.arena()
            && let Some(log) = arena.find(session)?
        {
            self.recovered.lock().live += 1;
            return Ok(Some(Arc::new(log)));
        }
        if let Some(path) = self.dax_path(session).filter(|path| path.exists()) {
            if self.belongs(&path, session, false) {
                let log = open(&path)?;
                self.recovered.lock().live += 1;
                return Ok(Some(log));
            }
            self.ignore(&path);
        }
        let live = self.log_path(session);
        let backing = self.backing_path(session).filter(|path| path.exists());
        if live.exists() {
            if self.belongs(&live, session, true) {
                let log = open(&live)?;
                self.recovered.lock().live += 1;
                return Ok(Some(log));
            }
            self.ignore(&live);
            remove(&live);
        }
        let Some(backing) = backing else { return Ok(None) };
        if !self.belongs(&backing, session, false) {
            if !is_blank(&backing).map_err(|error| setup(&backing, "read it", &error))? {
                self.ignore(&backing);
            }
            return Ok(None);
        }
        let log = open(&backing)?;
        self.recovered.lock().backing += 1;
        Ok(Some(log))
    }
}

impl LogStore for HostLogs {
    fn create(
        &self,
        session: SessionId,
        log_bytes: Option<(u64, u64)>,
        privileged: bool,
    ) -> Result<SessionArea, MediaError> {
        // A session that was never committed may have left files of its name.
        self.remove(session);
        let path = self.page_path(session);
        let made = Page::create(&path, session).map_err(|error| setup(&path, "create it", &error));
        let page = made.inspect_err(|_| remove(&path))?;
        let files = match log_bytes {
            Some(bytes) => Some(
                self.create_log(session, bytes, privileged)
                    .inspect_err(|_| self.remove(session))?,
            ),
            None => None,
        };
        let log = files.as_ref().map(|files| self.slowed(files.region()));
        if let Some(files) = files {
            self.open.lock().insert(session, files);
        }
        Ok(SessionArea {
            page: Arc::new(page),
            log,
        })
    }

    fn start(&self, session: SessionId, log: &dyn Region, len_bytes: u64) -> Result<(), MediaError> {
        match self.open.lock().get(&session) {
            // They were made whole: what a client maps of a device has a fixed place.
            Some(Files::Dax(_) | Files::Slot(_)) => return Ok(()),
            Some(Files::Backed(..) | Files::Memory(_)) | None => {}
        }
        log.grow(len_bytes)?;
        self.write_header(session, log)
    }

    fn sync(&self, session: SessionId, log: &dyn Region, ranges: &[(u64, u64)]) -> Result<(), MediaError> {
        let named = match self.open.lock().get(&session) {
            Some(Files::Backed(_, named)) if !named.load(Ordering::Acquire) => Arc::clone(named),
            _ => return log.sync_all(ranges),
        };
        let mut first = vec![(0, LIVE_HEADER_SIZE as u64)];
        first.extend_from_slice(ranges);
        log.sync_all(&first)?;
        self.sync_names()?;
        named.store(true, Ordering::Release);
        Ok(())
    }

    fn pages(&self) -> Result<Vec<Arc<Page>>, MediaError> {
        let mut pages = Vec::new();
        for session in numbers(&self.live, "page-", "")? {
            let path = self.page_path(session);
            match Page::open(&path) {
                Ok(page) => pages.push(Arc::new(page)),
                // Its making was interrupted: no client has it.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => remove(&path),
                Err(error) => return Err(setup(&path, "open it", &error)),
            }
        }
        Ok(pages)
    }

    fn open(&self, session: SessionId) -> Result<Option<Arc<dyn Region>>, MediaError> {
        Ok(self.find(session)?.map(|log| self.slowed(log)))
    }

    fn list(&self) -> Result<Vec<SessionId>, MediaError> {
        let mut all: BTreeSet<_> = numbers(&self.live, "log-", "")?.into_iter().collect();
        all.extend(numbers(&self.live, "page-", "")?);
        if let Some(dir) = &self.backing {
            all.extend(numbers(dir, "", ".log")?);
            all.extend(numbers(dir, "", ".dax")?);
        }
        all.extend(self.arena().into_iter().flat_map(|arena| arena.list()));
        Ok(all.into_iter().collect())
    }

    fn remove(&self, session: SessionId) {
        remove(&self.page_path(session));
        self.remove_log(session);
    }

    fn remove_log(&self, session: SessionId) {
        self.open.lock().remove(&session);
        remove(&self.log_path(session));
        if let Some(arena) = self.arena()
            && let Err(error) = arena.free(session)
        {
            tracing::warn!(%session, "its log is left behind: {error}");
        }
        if let Some(path) = self.dax_path(session) {
            remove(&path);
        }
        if let Some(path) = self.backing_path(session) {
            remove(&path);
        }
    }

    fn descriptors(&self, session: SessionId, privileged: bool) -> Result<Descriptors, MediaError> {
        let path = self.page_path(session);
        let page = Page::open_for_client(&path).map_err(|error| setup(&path, "open it", &error))?;
        let mut descriptors = Descriptors {
            page: Some(page),
            ..Descriptors::default()
        };
        let files = self.open.lock().get(&session).cloned();
        let share = |file: &File| {
            let copy = file.try_clone();
            copy.map(Into::into)
                .map_err(|error| setup(&self.log_path(session), "share it", &error))
        };
        // Opened anew: the client must not change flags and position of the daemon's own descriptor.
        let own = |path: &Path| {
            let file = File::options().read(true).write(true).open(path);
            file.map(Into::into)
                .map_err(|error| setup(path, "open it", &error))
        };
        match files {
            Some(Files::Backed(log, _)) => {
                descriptors.log = Some(own(&self.log_path(session))?);
                if privileged {
                    descriptors.log_backing = Some(share(log.backing_file())?);
                }
            }
            Some(Files::Memory(_)) => descriptors.log = Some(own(&self.log_path(session))?),
            Some(Files::Dax(_)) => {
                descriptors.log = self.dax_path(session).map(|path| own(&path)).transpose()?;
            }
            Some(Files::Slot(_)) => {
                let shared = self.arena().map(|arena| arena.share(session)).transpose()?;
                descriptors.log = shared.flatten().map(Into::into);
            }
            None => {}
        }
        if privileged {
            let file = File::open(&self.nvm).map_err(|error| setup(&self.nvm, "open it", &error))?;
            descriptors.nvm = Some(file.into());
        }
        Ok(descriptors)
    }

    fn segment_file(&self, uid: u32, len_bytes: u64) -> Result<Option<Box<dyn SegmentFile>>, MediaError> {
        self.segments.make(&self.live, uid, len_bytes)
    }

    fn copies_at(&self, process: ProcessId) -> Option<CopiesAt> {
        self.copies.of(&self.live, process)
    }

    fn drop_copies(&self, process: ProcessId) {
        self.copies.drop_of(&self.live, process);
    }

    fn drop_left_copies(&self) {
        self.copies.drop_left(&self.live);
    }

    fn sweep_copies(&self, lives: &dyn Fn(ProcessId) -> bool) {
        self.copies.sweep(&self.live, lives);
    }

    fn needs_sync(&self) -> bool {
        self.backing.is_some() && self.dax.is_none()
    }

    fn log_needs_sync(&self, session: SessionId) -> bool {
        matches!(self.open.lock().get(&session), Some(Files::Backed(..)))
            || self.needs_sync() && !self.open.lock().contains_key(&session)
    }

    fn fenced_is_durable(&self, others: bool) -> bool {
        match (&self.dax, &self.backing) {
            (None, backing) => backing.is_none(),
            // Slots run out, other users' logs are memory, and so may logs be that are left.
            (Some(DaxLogs::Device(_)), _) => false,
            (Some(DaxLogs::Files), Some(dir)) => {
                !others && numbers(dir, "", ".log").is_ok_and(|left| left.is_empty())
            }
            (Some(DaxLogs::Files), None) => false,
        }
    }

    fn dax_maps(&self, session: SessionId, privileged: bool) -> DaxMaps {
        const FILE: DaxAt = DaxAt {
            off: 0,
            align_bytes: 4096,
            is_device: false,
        };
        let log = match self.open.lock().get(&session) {
            Some(Files::Dax(_)) => Some(FILE),
            Some(Files::Slot(_)) => self.arena().and_then(|arena| arena.log_at(session)),
            Some(Files::Backed(..) | Files::Memory(_)) | None => None,
        };
        let nvm = match &self.dax {
            Some(DaxLogs::Device(arena)) => Some(arena.nvm_at()),
            Some(DaxLogs::Files) => Some(FILE),
            None => None,
        };
        DaxMaps {
            nvm: nvm.filter(|_| privileged),
            log,
        }
    }
}

#[cfg(test)]
mod tests;
