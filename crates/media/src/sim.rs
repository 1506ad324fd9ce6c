//! A simulated machine whose media record every store, fence, sync, write and flush as one ordered history,
//! and which builds the contents that a crash at any point may leave. For tests; knows nothing of the meaning
//! of the contents.
//!
//! ```
//! use varve_media::Region;
//! use varve_media::sim::{Crash, SimMedium, SimWorld};
//!
//! let world = SimWorld::new();
//! let nvm = world.add_region("nvm", SimMedium::Dax, 1 << 20, 1 << 20);
//! let (recording, result) = world.record(|| {
//!     nvm.write(0, b"payload!")?;
//!     nvm.fence()
//! });
//! result?;
//! for point in recording.points() {
//!     let after = recording.image(point.index, Crash::PowerSeeded(7)).into_world();
//!     let nvm = after.region("nvm").expect("it was there before");
//!     let mut bytes = [0; 8];
//!     nvm.read(0, &mut bytes)?;
//!     assert!(bytes == *b"payload!" || bytes == [0; 8]); // eight aligned bytes are never torn
//! }
//! # Ok::<(), varve_media::MediaError>(())
//! ```

mod device;
mod history;
mod pages;
mod recording;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::lock::Mutex;

pub use device::{SimBlock, SimRegion};
pub use history::Crash;
pub use recording::{CrashPoint, Image, PointKind, Recording};

use crate::error::DeviceName;
use history::{DeviceIndex, Event};
use pages::{Pages, mix};

/// The rules that a simulated device keeps when the power fails (see `Crash`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SimMedium {
    /// Persistent memory: a fence makes the thread's stores durable.
    Dax,
    /// Persistent memory to which the copy and flush functions of `dax` store: a fence makes durable what the
    /// thread streamed or wrote back before it, and nothing else.
    DaxByStore(Flaw),
    /// A mapped or live file: `sync` makes a range durable, by 4 KiB pages.
    File,
    /// Memory: a power cut leaves zeros.
    Shm,
    /// A block device: `flush` makes all writes durable, by 512-byte sectors.
    Block,
}

/// A step that `dax` leaves out, so that a test shows that it is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Flaw {
    /// All steps are taken.
    None,
    /// Lines are not written back from the cache.
    NoWriteBack,
    /// Fences do nothing.
    NoFence,
}

impl SimMedium {
    /// Whether a fence is all that durability needs.
    pub const fn is_dax(self) -> bool {
        matches!(self, Self::Dax | Self::DaxByStore(_))
    }

    /// Bytes that usually survive or are lost together.
    const fn unit_bytes(self) -> u64 {
        match self {
            Self::Dax | Self::DaxByStore(_) | Self::Shm => 64,
            Self::File => 4096,
            Self::Block => 512,
        }
    }

    /// Bytes that are never torn.
    const fn atom_bytes(self) -> u64 {
        match self {
            Self::Dax | Self::DaxByStore(_) | Self::Shm => 8,
            Self::File | Self::Block => 512,
        }
    }
}

/// A simulated machine. Clones share it.
#[derive(Clone, Default)]
pub struct SimWorld(Arc<Mutex<World>>);

#[derive(Default)]
struct World {
    devices: Vec<Device>,
    log: Option<Log>,
    label: Option<Arc<str>>,
}

#[derive(Clone)]
struct Device {
    name: DeviceName,
    medium: SimMedium,
    len_bytes: u64,
    max_bytes: u64,
    /// Removed from the machine; its index is not reused.
    removed: bool,
    pages: Pages,
}

/// The history since `start_recording`.
struct Log {
    base: Vec<Pages>,
    lens: Vec<Option<u64>>,
    events: Vec<Event>,
}

impl World {
    fn record(&mut self, event: Event) {
        if let Some(log) = &mut self.log {
            log.events.push(event);
        }
    }

    fn find(&self, name: &str) -> Option<DeviceIndex> {
        self.devices
            .iter()
            .position(|device| !device.removed && device.name.as_str() == name)
    }
}

impl SimWorld {
    /// A machine without devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a region of zeros that can grow to `max_bytes`.
    ///
    /// # Panics
    /// If the name is taken, or `medium` is `Block`.
    pub fn add_region(
        &self,
        name: &str,
        medium: SimMedium,
        len_bytes: u64,
        max_bytes: u64,
    ) -> Arc<SimRegion> {
        assert!(medium != SimMedium::Block, "a region is not a block device");
        let index = self.add(name, medium, len_bytes, max_bytes.max(len_bytes));
        Arc::new(SimRegion::new(self.clone(), index, name.into(), medium))
    }

    /// Adds a block device of zeros.
    ///
    /// # Panics
    /// If the name is taken or the length is not whole blocks.
    pub fn add_block(&self, name: &str, len_bytes: u64) -> Arc<SimBlock> {
        assert!(
            len_bytes.is_multiple_of(crate::DEVICE_BLOCK_BYTES),
            "a device is whole blocks"
        );
        let index = self.add(name, SimMedium::Block, len_bytes, len_bytes);
        Arc::new(SimBlock::new(self.clone(), index, name.into(), len_bytes))
    }

    fn add(&self, name: &str, medium: SimMedium, len_bytes: u64, max_bytes: u64) -> DeviceIndex {
        let mut world = self.0.lock();
        assert!(world.find(name).is_none(), "the name {name} is taken");
        let device = world.devices.len();
        let (name, pages) = (name.into(), Pages::default());
        world.devices.push(Device {
            name,
            medium,
            len_bytes,
            max_bytes,
            removed: false,
            pages,
        });
        world.record(Event::Create { device, len_bytes });
        device
    }

    /// Removes a device from the machine for good, as when its file is deleted. `false` if no device has that
    /// name.
    pub fn remove(&self, name: &str) -> bool {
        let mut world = self.0.lock();
        let Some(device) = world.find(name) else {
            return false;
        };
        world.devices[device].removed = true;
        world.devices[device].pages = Pages::default();
        world.record(Event::Remove { device });
        true
    }

    /// A handle on the region of that name.
    pub fn region(&self, name: &str) -> Option<Arc<SimRegion>> {
        let world = self.0.lock();
        let index = world.find(name)?;
        let device = &world.devices[index];
        let made = || {
            Arc::new(SimRegion::new(
                self.clone(),
                index,
                device.name.clone(),
                device.medium,
            ))
        };
        (device.medium != SimMedium::Block).then(made)
    }

    /// A handle on the block device of that name.
    pub fn block(&self, name: &str) -> Option<Arc<SimBlock>> {
        let world = self.0.lock();
        let index = world.find(name)?;
        let device = &world.devices[index];
        let made = || {
            Arc::new(SimBlock::new(
                self.clone(),
                index,
                device.name.clone(),
                device.len_bytes,
            ))
        };
        (device.medium == SimMedium::Block).then(made)
    }

    /// Names of all existing devices, in order of creation.
    pub fn names(&self) -> Vec<String> {
        let world = self.0.lock();
        world
            .devices
            .iter()
            .filter(|device| !device.removed)
            .map(|device| device.name.to_string())
            .collect()
    }

    /// Notes the test's next step in the history; the crash points that follow carry it.
    pub fn label(&self, text: &str) {
        let text: Arc<str> = text.into();
        let mut world = self.0.lock();
        world.label = Some(text.clone());
        world.record(Event::Label(text));
    }

    /// Begins a history. Everything stored so far counts as durable, so begin when no work is under way.
    ///
    /// # Panics
    /// If a recording is under way.
    pub fn start_recording(&self) {
        let mut world = self.0.lock();
        assert!(world.log.is_none(), "this machine is being recorded already");
        let base = world.devices.iter().map(|device| device.pages.clone()).collect();
        let lens = world
            .devices
            .iter()
            .map(|device| (!device.removed).then_some(device.len_bytes))
            .collect();
        world.log = Some(Log {
            base,
            lens,
            events: Vec::new(),
        });
    }

    /// Ends the history and returns it. The machine stays usable.
    ///
    /// # Panics
    /// If no recording is under way.
    pub fn finish_recording(&self) -> Recording {
        let mut world = self.0.lock();
        let log = world.log.take().expect("start_recording comes first");
        Recording::new(
            world
                .devices
                .iter()
                .map(|device| device.without_pages())
                .collect(),
            log,
        )
    }

    /// Records the events of `work`.
    ///
    /// # Panics
    /// If a recording is under way.
    pub fn record<T>(&self, work: impl FnOnce() -> T) -> (Recording, T) {
        self.start_recording();
        let result = work();
        (self.finish_recording(), result)
    }

    /// Events recorded so far: the index that the next crash point will have.
    pub fn events_len(&self) -> usize {
        self.0.lock().log.as_ref().map_or(0, |log| log.events.len())
    }

    /// Hash of all contents as the processes see them.
    pub fn content_hash(&self) -> u64 {
        hash_devices(&self.0.lock().devices)
    }

    /// Memory held for contents.
    pub fn resident_bytes(&self) -> u64 {
        self.0
            .lock()
            .devices
            .iter()
            .map(|device| device.pages.resident_bytes())
            .sum()
    }
}

impl Device {
    fn without_pages(&self) -> Self {
        Self {
            pages: Pages::default(),
            ..self.clone()
        }
    }
}

/// Returns a hash over names, lengths and contents of the existing devices.
fn hash_devices(devices: &[Device]) -> u64 {
    let there = devices.iter().filter(|device| !device.removed);
    there.fold(0, |sum, device| {
        let name = device
            .name
            .as_str()
            .bytes()
            .fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        sum ^ mix(name ^ mix(device.len_bytes) ^ device.pages.content_hash().rotate_left(17))
    })
}
