//! Pools on a simulated machine, for tests: made, opened, crashed and opened again on the images of a crash.

use crate::Embedded;
use std::sync::Arc;
use varve_format::SessionId;
use varve_ipc::{Clock, SystemClock};
use varve_kernelfs::{Config, KernelError, Parts, SimLogs};
use varve_media::sim::{SimMedium, SimWorld};
use varve_store::{Devices, MkfsOptions, OpenOptions, OpenReport, Store, StoreError};

/// Sizes of a simulated pool and its medium.
#[derive(Debug, Clone, Copy)]
pub struct SimPool {
    /// Medium of NVM, journal and logs.
    pub medium: SimMedium,
    /// Bytes of NVM.
    pub nvm_bytes: u64,
    /// Bytes of the journal.
    pub journal_bytes: u64,
    /// Bytes of the SSD; 0 for none.
    pub ssd_bytes: u64,
    /// Bytes of the HDD; 0 for none.
    pub hdd_bytes: u64,
}

impl Default for SimPool {
    /// 32 MiB of NVM with a 1 MiB journal, 32 MiB of SSD and 64 MiB of HDD.
    fn default() -> Self {
        Self {
            medium: SimMedium::Dax,
            nvm_bytes: 32 << 20,
            journal_bytes: 1 << 20,
            ssd_bytes: 32 << 20,
            hdd_bytes: 64 << 20,
        }
    }
}

const NVM: &str = "nvm";
const JOURNAL: &str = "journal";
const SSD: &str = "ssd";
const HDD: &str = "hdd";

impl SimPool {
    /// Makes the devices in `world` and a pool on them.
    ///
    /// # Errors
    /// As [`Store::mkfs`].
    pub fn mkfs(&self, world: &SimWorld) -> Result<(), StoreError> {
        world.add_region(NVM, self.medium, self.nvm_bytes, self.nvm_bytes);
        world.add_region(JOURNAL, self.medium, self.journal_bytes, self.journal_bytes);
        for (name, bytes) in [(SSD, self.ssd_bytes), (HDD, self.hdd_bytes)] {
            if bytes > 0 {
                world.add_block(name, bytes);
            }
        }
        let options = MkfsOptions {
            pool_uuid: [7; 16],
            dir_hash_key: [9; 16],
            ..MkfsOptions::default()
        };
        Store::mkfs(&Self::devices(world)?, &options)
    }

    /// Returns the devices of the pool in `world`.
    ///
    /// # Errors
    /// `Devices` when there is no NVM or journal in it.
    pub fn devices(world: &SimWorld) -> Result<Devices, StoreError> {
        let missing = |name: &str| StoreError::Devices(format!("the simulated machine has no {name}"));
        Ok(Devices {
            nvm: world.region(NVM).ok_or_else(|| missing(NVM))?,
            journal: world.region(JOURNAL).ok_or_else(|| missing(JOURNAL))?,
            ssd: world.block(SSD).map(|device| device as _),
            hdd: world.block(HDD).map(|device| device as _),
            more: Vec::new(),
        })
    }

    /// Opens the pool in `world`: replays the journal and finds the logs.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn parts(
        &self,
        world: &SimWorld,
        config: Config,
        clock: Arc<dyn Clock>,
    ) -> Result<(Parts, OpenReport), KernelError> {
        let (store, report) = Store::open(Self::devices(world)?, OpenOptions::default())?;
        let logs = Arc::new(SimLogs::new(world.clone(), self.medium));
        let mut parts = Parts::new(store, logs, config, clock);
        parts.owner_uid = 0;
        Ok((parts, report))
    }

    /// Opens the pool in `world` for service, with the system's clock; no threads are started.
    ///
    /// # Errors
    /// As [`Embedded::open`].
    pub fn open(&self, world: &SimWorld, config: Config) -> Result<Embedded, KernelError> {
        Embedded::open(self.parts(world, config, Arc::new(SystemClock))?.0)
    }
}

/// Names of the simulated logs in `world`, for tests that damage or drop them.
#[must_use]
pub fn power_cut_logs(world: &SimWorld) -> Vec<SessionId> {
    let number = |name: &String| {
        name.strip_prefix("log-")
            .and_then(|id| id.parse().ok())
            .map(SessionId)
    };
    world.names().iter().filter_map(number).collect()
}
