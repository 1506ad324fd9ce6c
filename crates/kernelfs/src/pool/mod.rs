//! A pool of plain files on this machine: its directory and configuration, its live directory, its logs, its
//! devices, the daemon on a socket. Holds all code that knows the host.

mod arena;
mod copies;
mod daemon;
mod destroy;
mod devices;
mod files;
mod live;
mod logs;
mod more;
mod prefault;
mod readonly;
mod report;
mod segments;
mod service;
pub mod size;
mod space;
mod spec;
mod stale;
mod tier_lines;

pub use daemon::{HostDaemon, explain};
pub use destroy::{Destroyed, Orphan, orphans};
pub use files::{HostPool, LAYOUT_VERSION, PoolLock, TOML, create_pool, uuid_text};
pub use logs::{HostLogs, LogCopy, Recovered};
pub use more::{Settings, add_device};
pub use readonly::{ReadOnlyDevice, ScratchDevice, ScratchRegion};
pub use report::{CheckItem, CheckReport, describe, describe_loss};
pub use service::HostService;
pub use space::HostSpace;
pub use spec::{NvmSpec, PoolSpec, TierSpec};
