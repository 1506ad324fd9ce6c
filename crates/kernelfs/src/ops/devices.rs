//! Operators' requests about the devices of tiers: lists them, and starts or cancels taking one out. Moves
//! nothing (`migrate` does); the pool's files and settings are the host's (`pool::more`).

use crate::error::no;
use crate::kernel::{Core, KernelFs};
use crate::ops::jobs::Jobs;
use crate::placement::jobs::Placer;
use crate::placement::{JobState, JobStatus};
use serde::{Deserialize, Serialize};
use varve_format::BLOCK_BYTES;
use varve_ipc::IpcError;
use varve_store::{DeviceStatus, DeviceUse, Store, StoreError};

/// A device of SSD or HDD, for operators.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierDevice {
    /// `ssd` or `hdd`.
    pub tier: String,
    /// As in its label; `None`: a tier's first device has no label.
    pub uuid: Option<String>,
    /// Path or given name.
    pub name: String,
    /// `in use`, `emptying`, `gone` or `failed`.
    pub state: String,
    /// Bytes that it can hold.
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes that were freed and may still be read.
    pub pending_bytes: u64,
    /// Why it takes no writes, or why data stays on a device that is emptied.
    pub why: Option<String>,
    /// Number of the job that empties it.
    #[serde(default)]
    pub job: Option<u64>,
}

/// Answer to a request about a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceAsked {
    /// It was added, is being emptied, or takes new data again.
    Done(TierDevice),
    /// Nothing was changed: the others do not take all that is on it.
    NoRoom {
        /// Bytes on the device.
        used_bytes: u64,
        /// Bytes that the others take below their high mark and that are promised to nobody.
        room_bytes: u64,
    },
    /// Nothing was changed, for this reason.
    Refused(String),
}

/// Context of requests about devices.
pub(crate) struct DeviceOps<'k> {
    core: Core<'k>,
    store: &'k Store,
    placer: &'k Placer,
    jobs: Jobs<'k>,
}

impl<'k> DeviceOps<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            store: &kernel.store,
            placer: &kernel.placer,
            jobs: Jobs::of(kernel),
        }
    }

    /// Returns the devices of SSD and HDD that are not gone.
    pub(crate) fn list(&self) -> Vec<TierDevice> {
        let listed = self.store.device_list().unwrap_or_default();
        let jobs = self.jobs.list().unwrap_or_default();
        let there = listed.iter().filter(|device| device.state != DeviceUse::Gone);
        there.map(|device| Self::shown(device, &jobs)).collect()
    }

    fn shown(device: &DeviceStatus, jobs: &[JobStatus]) -> TierDevice {
        let state = match (device.state, &device.failed) {
            (DeviceUse::Gone, _) => "gone",
            (_, Some(_)) => "failed",
            (DeviceUse::Emptying, None) => "emptying",
            (DeviceUse::InUse, None) => "in use",
        };
        let failed = device.failed.as_ref().map(ToString::to_string);
        let is_its =
            |job: &&JobStatus| job.tier == device.tier.name() && job.device.as_ref() == Some(&device.name);
        let job = jobs.iter().find(is_its);
        let waits = |job: &JobStatus| match job.state {
            JobState::Paused => Some("its job is paused".into()),
            _ => job.stays.keys().next().cloned(),
        };
        TierDevice {
            tier: device.tier.name().into(),
            uuid: device.uuid_text(),
            name: device.name.clone(),
            state: state.into(),
            capacity_bytes: device.total * BLOCK_BYTES,
            used_bytes: device.used() * BLOCK_BYTES,
            pending_bytes: device.pending * BLOCK_BYTES,
            why: failed.or_else(|| job.and_then(waits)),
            job: job.map(|job| job.id),
        }
    }

    /// Finds a device by its name, the end of its path, or the start of its UUID.
    fn find(&self, text: &str) -> Result<Result<DeviceStatus, String>, StoreError> {
        let listed = self.store.device_list()?;
        let is_it = |device: &&DeviceStatus| {
            let uuid = device.uuid_text();
            let file = std::path::Path::new(&device.name).file_name();
            device.name == text
                || file.is_some_and(|file| file == text)
                || text.len() >= 4 && uuid.is_some_and(|uuid| uuid.starts_with(text))
        };
        let there = listed.iter().filter(|device| device.state != DeviceUse::Gone);
        let names: Vec<&str> = there.clone().map(|device| device.name.as_str()).collect();
        let found: Vec<&DeviceStatus> = there.filter(is_it).collect();
        Ok(match found[..] {
            [one] => Ok(one.clone()),
            [] => Err(format!(
                "the pool has no device {text}; its devices: {}",
                names.join(", ")
            )),
            _ => Err(format!(
                "{text} means several devices: give its whole path or UUID"
            )),
        })
    }

    /// Begins to take a device out; `partly`: although the others do not take all that is on it. Durable when
    /// this returns; the data moves in the background, and the device is taken out when it is empty.
    ///
    /// # Errors
    /// EROFS, EIO.
    pub(crate) fn remove(&self, text: &str, first: [u8; 16], partly: bool) -> Result<DeviceAsked, IpcError> {
        self.core.check_writable()?;
        let refused = |error: StoreError| self.core.refused(&error);
        let device = match self.find(text).map_err(refused)? {
            Ok(device) => device,
            Err(why) => return Ok(DeviceAsked::Refused(why)),
        };
        let space = self.store.space();
        let room = self.placer.evacuations.room_beside_device(&device, &space);
        // Its free blocks may be what logs were promised, also if nothing is on it.
        let promised = device.failed.is_none() && space.available < device.free;
        let lacks = device.used() > room || promised;
        if lacks && !partly && device.state == DeviceUse::InUse {
            return Ok(DeviceAsked::NoRoom {
                used_bytes: device.used() * BLOCK_BYTES,
                room_bytes: room * BLOCK_BYTES,
            });
        }
        let now_ns = self.core.env.clock.now_ns();
        let begun = self
            .store
            .start_emptying(device.tier, device.numbers.0, first, now_ns);
        let why = match begun {
            Ok(_) => None,
            Err(StoreError::Invalid(_) | StoreError::NotFound) => Some(format!(
                "{} is the only device of the {} tier in use: a tier keeps one. `varve evacuate` \
                 empties a tier; \
                 `varve add-device` gives it another device first",
                device.name,
                device.tier.name()
            )),
            Err(StoreError::Exists) => Some(format!("{} is being emptied already", device.name)),
            Err(StoreError::TableFull(_)) => Some("too many devices are being emptied already".into()),
            Err(error) => return Err(refused(error)),
        };
        if let Some(why) = why {
            return Ok(DeviceAsked::Refused(why));
        }
        tracing::info!(device = device.name, "a device is being emptied");
        self.placer.note_pins(true);
        self.now(&device)
    }

    /// Lets a device that is emptied take new data again. Durable when this returns.
    ///
    /// # Errors
    /// EROFS, EIO.
    pub(crate) fn keep(&self, text: &str) -> Result<DeviceAsked, IpcError> {
        self.core.check_writable()?;
        let refused = |error: StoreError| self.core.refused(&error);
        let device = match self.find(text).map_err(refused)? {
            Ok(device) => device,
            Err(why) => return Ok(DeviceAsked::Refused(why)),
        };
        match self.store.cancel_emptying(device.tier, device.numbers.0) {
            Ok(()) => self.now(&device),
            Err(StoreError::NotFound) => Ok(DeviceAsked::Refused(format!(
                "{} is not being emptied: there is nothing to cancel",
                device.name
            ))),
            Err(error) => Err(refused(error)),
        }
    }

    /// What a device is now.
    fn now(&self, device: &DeviceStatus) -> Result<DeviceAsked, IpcError> {
        let listed = self
            .store
            .device_list()
            .map_err(|error| self.core.refused(&error))?;
        let same = |other: &&DeviceStatus| (other.tier, other.numbers) == (device.tier, device.numbers);
        let found = listed.iter().find(same).ok_or(no(libc::EIO))?;
        Ok(DeviceAsked::Done(Self::shown(found, &self.jobs.list()?)))
    }

    /// What a device of this name is, after it was added.
    pub(crate) fn named(&self, name: &str) -> DeviceAsked {
        let found = self.list().into_iter().find(|device| device.name == name);
        found.map_or_else(
            || DeviceAsked::Refused(format!("{name} is not there after it was added")),
            DeviceAsked::Done,
        )
    }
}
