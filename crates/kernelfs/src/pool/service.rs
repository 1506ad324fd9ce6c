//! The daemon for its clients on this host: adds bounds by the space of the host's disks, and a status with
//! paths. Owns those amendments; all other calls go through.

use super::files::HostPool;
use super::logs::HostLogs;
use super::more::Settings;
use super::space::HostSpace;
use crate::{DeviceAsked, KernelFs};
use serde_json::{Value, json};
use std::sync::Arc;
use varve_format::{SessionId, Tier};
use varve_ipc::{Admin, Hello, IpcError, Opened, Peer, Request, Response, Service, StatFs};
use varve_store::SpaceStats;

/// A [`KernelFs`] on files of this host.
pub struct HostService {
    kernel: Arc<KernelFs>,
    pool: HostPool,
    logs: Arc<HostLogs>,
    space: HostSpace,
    remarks: Vec<String>,
    settings: Arc<Settings>,
}

impl HostService {
    /// Amends `kernel`. `remarks` are shown in the status.
    #[must_use]
    pub fn new(
        kernel: Arc<KernelFs>,
        pool: HostPool,
        logs: Arc<HostLogs>,
        settings: Arc<Settings>,
        space: HostSpace,
        remarks: Vec<String>,
    ) -> Self {
        let high_percent = u64::from(kernel.config().placement_high_percent);
        let host = space.clone();
        // Where nothing is missing the pool itself is the bound.
        kernel.set_host_left(Box::new(move |stats| {
            (host.missing_blocks(stats) > 0).then(|| left(&host, stats, high_percent))
        }));
        Self {
            kernel,
            pool,
            logs,
            space,
            remarks,
            settings,
        }
    }

    fn clamp(&self, stat: StatFs) -> StatFs {
        let stats = self.kernel.store().space();
        let missing = self.space.missing_blocks(&stats);
        if missing == 0 {
            return stat;
        }
        StatFs {
            blocks: stat.blocks.saturating_sub(missing),
            blocks_free: stat.blocks_free.saturating_sub(missing),
            ..stat
        }
    }

    /// Adds a device to the pool in service.
    fn add_device(&self, tier: Tier, device: &str) -> DeviceAsked {
        match self.settings.add(self.kernel.store(), tier, device) {
            Ok(name) => {
                tracing::info!(device = name, tier = tier.name(), "a device was added");
                self.kernel.device_named(&name)
            }
            Err(error) => DeviceAsked::Refused(error.to_string()),
        }
    }

    fn host_status(&self) -> Value {
        let stats = self.kernel.store().space();
        json!({
            "directory": self.pool.dir(),
            "live_directory": self.pool.live(),
            "durability": self.pool.durability(),
            "recovered_logs": self.logs.recovered(),
            "missing_bytes": self.space.missing_blocks(&stats) * varve_format::BLOCK_BYTES,
            "remarks": self.remarks,
        })
    }

    fn amend(&self, json: String) -> String {
        match serde_json::from_str::<Value>(&json) {
            Ok(Value::Object(mut status)) => {
                status.insert("host".into(), self.host_status());
                Value::Object(status).to_string()
            }
            _ => json,
        }
    }
}

/// Returns the blocks that can still be reserved on this host. Of the NVM only blocks below the mark count,
/// from which on new data goes to slower tiers.
fn left(host: &HostSpace, stats: &SpaceStats, high_percent: u64) -> u64 {
    let nvm = &stats.tiers[0];
    let mark = nvm.total.saturating_sub(nvm.kept) * high_percent / 100;
    let room = mark.saturating_sub(nvm.total.saturating_sub(nvm.free));
    let slower = host.usable_blocks(stats).saturating_sub(nvm.free);
    can_be_promised(slower, room, stats.reserved)
}

/// Returns the blocks that can be reserved. A digest writes its data of a file as a whole: to NVM if it is
/// less than `room`, else to the slower tiers. Blocks beyond each of the two must not be reserved: they would
/// be written to the slower tiers, their part of `room` would be reserved repeatedly, and use up the host's
/// margin.
fn can_be_promised(slower: u64, room: u64, reserved: u64) -> u64 {
    slower.max(room.saturating_sub(1)).saturating_sub(reserved)
}

impl Service for HostService {
    fn hello(&self, peer: Peer, hello: Hello) -> Result<Opened, IpcError> {
        self.kernel.hello(peer, hello)
    }

    fn call(&self, session: SessionId, request: Request) -> Result<Response, IpcError> {
        match request {
            Request::StatFs => match self.kernel.call(session, request)? {
                Response::StatFs(stat) => Ok(Response::StatFs(self.clamp(stat))),
                other => Ok(other),
            },
            Request::Admin(Admin::Status) => match self.kernel.call(session, request)? {
                Response::Json(json) => Ok(Response::Json(self.amend(json))),
                other => Ok(other),
            },
            Request::Admin(Admin::AddDevice { .. }) => Err(IpcError::Errno(libc::ENOSYS)),
            request => self.kernel.call(session, request),
        }
    }

    fn admin(&self, peer: Peer, admin: Admin) -> Result<Response, IpcError> {
        if let Admin::AddDevice { tier, device } = admin {
            // The daemon does not stop under it.
            let _entered = self.kernel.lifecycle.begin_request()?;
            self.kernel.may_administer(peer)?;
            let asked = self.add_device(tier, &device);
            let json = serde_json::to_string(&asked).map_err(|_| IpcError::Errno(libc::EIO))?;
            return Ok(Response::Json(json));
        }
        let status = admin == Admin::Status;
        match self.kernel.admin(peer, admin)? {
            Response::Json(json) if status => Ok(Response::Json(self.amend(json))),
            other => Ok(other),
        }
    }

    fn gone(&self, session: SessionId) {
        self.kernel.gone(session);
    }
}

#[cfg(test)]
mod tests {
    use super::can_be_promised;

    /// Sessions write until nothing can be reserved any more; the host must hold all of it.
    #[test]
    fn what_is_promised_fits_however_much_a_digest_takes_at_once() {
        for (below, above, write) in [
            (1000, 230, 256),
            (51, 230, 256),
            (0, 300, 7),
            (300, 0, 100),
            (250, 251, 250),
        ] {
            let (mut slower, mut room) = (below, above);
            for _ in 0..10_000 {
                let mut logged = 0;
                while can_be_promised(slower, room, logged) >= write && logged < 3 * write {
                    logged += write;
                }
                if logged == 0 {
                    break;
                }
                // As `Hierarchy::target` decides.
                let tier = if room > logged { &mut room } else { &mut slower };
                assert!(*tier >= logged, "{below} {above} {write}: {logged} into {tier}");
                *tier -= logged;
            }
            assert!(
                slower < write && room <= write,
                "{below} {above} {write}: all is used, but for what is too little"
            );
        }
    }
}
