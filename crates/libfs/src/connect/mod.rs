//! Sessions over the daemon's Unix socket: maps the descriptors that come with the answer. Knows nothing of a
//! session's operations.

mod served;

use served::ServedLog;
pub use served::named_by_daemon;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use varve_ipc::{DaxAt, DevicePart, Hello, IpcError, Link, Page, Welcome, socket};
use varve_media::emulated::{EmulatedRegion, NvmModel};
use varve_media::span::Span;
use varve_media::{
    Backing, BlockDevice, DaxPart, DeviceName, LiveLog, MappedRegion, MediaError, ReaderPart, Region,
    Verified,
};

use crate::options::{Connection, Connector};

/// Opens sessions with the daemon that listens at `path`.
#[derive(Debug, Clone)]
pub struct SocketConnector {
    /// The socket, in the pool's directory.
    pub path: PathBuf,
}

impl Connector for SocketConnector {
    fn connect(&self, hello: Hello) -> Result<Connection, IpcError> {
        // Before the connection has a thread: in a process with several threads, the kernel waits for all
        // processors, some 10 ms.
        varve_ipc::page::register_for_membarrier();
        let (link, welcome, descriptors) = socket::connect(&self.path, hello)?;
        let link: Arc<dyn Link> = Arc::new(link);
        let page = descriptors.page.ok_or_else(|| broken("no session page"))?;
        let page = Page::from_descriptor(page).map_err(|error| broken(&error.to_string()))?;
        let log = match descriptors.log {
            Some(log) if !welcome.read_only => Some(map_log(log, descriptors.log_backing, &welcome, &link)?),
            _ => None,
        };
        let nvm = match descriptors.nvm {
            Some(nvm) => {
                let name = DeviceName::from(self.path.with_file_name("nvm").as_path());
                // Read only: the daemon alone writes to it.
                let (file, len) = (File::from(nvm), welcome.nvm_bytes);
                let region = match welcome.dax.nvm {
                    Some(at) => map_dax(file, name, at, len, len, false),
                    None => MappedRegion::from_file(file, name, Backing::File, len, false),
                };
                Some(Arc::new(region.map_err(|error| unmapped(&error))?) as Arc<dyn Region>)
            }
            None => None,
        };
        // Without the shared marks the session compares checksums for itself.
        let verified = descriptors
            .verified
            .and_then(|bits| Verified::from_descriptor(bits).ok());
        let slowed = |region| {
            if welcome.nvm_emulated {
                Arc::new(EmulatedRegion::new(region, NvmModel::STRATA)) as Arc<dyn Region>
            } else {
                region
            }
        };
        let (log, nvm) = (log.map(slowed), nvm.map(slowed));
        Ok(Connection {
            link,
            welcome,
            page: Arc::new(page),
            log,
            nvm,
            ssd: open_ssd(descriptors.ssd),
            verified: verified.map(Arc::new),
        })
    }

    fn pool_dir(&self) -> Option<PathBuf> {
        // As mounts name it: without symbolic links.
        self.path.parent()?.canonicalize().ok()
    }
}

/// Opens the SSD for reading. `None` if no part of it is shared, or cannot be used: the daemon reads then.
fn open_ssd(parts: Vec<(DevicePart, OwnedFd)>) -> Option<Arc<dyn BlockDevice>> {
    if parts.is_empty() {
        return None;
    }
    let parts = parts.into_iter().map(|(part, fd)| ReaderPart {
        index: part.index,
        first_byte: part.first_byte,
        len_bytes: part.len_bytes,
        data_offset: part.data_offset,
        file: File::from(fd),
        emulated: part.emulated,
    });
    let opened = Span::of_reader_parts(parts).inspect_err(|error| {
        tracing::warn!(%error, "the SSD is read by the daemon");
    });
    Some(Arc::new(opened.ok()?))
}

fn map_log(
    live: OwnedFd,
    backing: Option<OwnedFd>,
    welcome: &Welcome,
    link: &Arc<dyn Link>,
) -> Result<Arc<dyn Region>, IpcError> {
    let name = DeviceName::from(PathBuf::from(format!("log-{}", welcome.session)).as_path());
    let max = welcome.log_max_bytes.max(welcome.log_bytes);
    if let Some(at) = welcome.dax.log {
        let region = map_dax(File::from(live), name, at, welcome.log_bytes, max, true);
        return Ok(Arc::new(region.map_err(|error| unmapped(&error))?.retirable()));
    }
    Ok(match backing {
        Some(backing) => {
            let log = LiveLog::from_fds(live, backing, name, max).map_err(|error| unmapped(&error))?;
            named_by_daemon(Arc::new(log), Arc::clone(link))
        }
        None => {
            let region = MappedRegion::from_file(File::from(live), name, Backing::Shm, max, true);
            let region = region.map_err(|error| unmapped(&error))?.retirable();
            if welcome.needs_sync && !welcome.privileged {
                Arc::new(ServedLog::new(region, Arc::clone(link)))
            } else {
                Arc::new(region)
            }
        }
    })
}

/// Maps persistent memory.
fn map_dax(
    file: File,
    name: DeviceName,
    at: DaxAt,
    len_bytes: u64,
    max_bytes: u64,
    writable: bool,
) -> Result<MappedRegion, MediaError> {
    if !at.is_device {
        return MappedRegion::from_file(file, name, Backing::Dax, max_bytes, writable);
    }
    let part = DaxPart {
        off: at.off,
        align_bytes: at.align_bytes,
    };
    MappedRegion::of_device(file, name, part, len_bytes, max_bytes, writable)
}

fn broken(why: &str) -> IpcError {
    IpcError::Protocol(why.to_owned())
}

fn unmapped(error: &MediaError) -> IpcError {
    IpcError::Protocol(error.to_string())
}
