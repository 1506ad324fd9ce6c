//! A finished history: its crash points, and the images at them.

use std::sync::Arc;

use crate::lock::Mutex;

use super::history::{Crash, Event, Replay};
use super::pages::Pages;
use super::{Device, Log, SimMedium, SimWorld, World, hash_devices};

/// The kind of event that follows a crash point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PointKind {
    /// A store to a region, or a write to a block device.
    Store,
    /// A fence.
    Fence,
    /// A sync of a range.
    Sync,
    /// A flush of a device.
    Flush,
    /// A trim.
    Trim,
    /// A device is created, removed, or grown.
    Device,
    /// The end of the history.
    End,
}

/// A point of the history at which the machine may crash: after `index` events, before the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CrashPoint {
    /// Events that happened before.
    pub index: usize,
    /// The next event.
    pub next: PointKind,
    /// The device of the next event, if it has one.
    pub device: Option<String>,
    /// The last label before.
    pub label: Option<Arc<str>>,
}

/// A recorded history. Images are quickest when asked for in order of their points.
pub struct Recording {
    devices: Vec<Device>,
    media: Arc<[SimMedium]>,
    log: Log,
    cursor: Mutex<Replay>,
}

impl Recording {
    pub(super) fn new(devices: Vec<Device>, log: Log) -> Self {
        let media: Arc<[SimMedium]> = devices.iter().map(|device| device.medium).collect();
        let cursor = Mutex::new(Replay::new(media.clone(), &log.base, &log.lens));
        Self {
            devices,
            media,
            log,
            cursor,
        }
    }

    /// Events recorded: the index of the last crash point.
    pub fn events_len(&self) -> usize {
        self.log.events.len()
    }

    /// All crash points: before every store, fence, sync, flush, trim and change of a device, and at the end.
    pub fn points(&self) -> Vec<CrashPoint> {
        let mut label = None;
        let mut points = Vec::new();
        for (index, event) in self.log.events.iter().enumerate() {
            let (next, device) = match event {
                Event::Label(text) => {
                    label = Some(text.clone());
                    continue;
                }
                Event::Store { device, .. } | Event::WriteBack { device, .. } => {
                    (PointKind::Store, Some(*device))
                }
                Event::Fence { .. } => (PointKind::Fence, None),
                Event::Sync { device, .. } => (PointKind::Sync, Some(*device)),
                Event::Flush { device } => (PointKind::Flush, Some(*device)),
                Event::Trim { device, .. } => (PointKind::Trim, Some(*device)),
                Event::Grow { device, .. } | Event::Create { device, .. } | Event::Remove { device } => {
                    (PointKind::Device, Some(*device))
                }
            };
            let device = device.map(|device| self.devices[device].name.to_string());
            points.push(CrashPoint {
                index,
                next,
                device,
                label: label.clone(),
            });
        }
        points.push(CrashPoint {
            index: self.log.events.len(),
            next: PointKind::End,
            device: None,
            label,
        });
        points
    }

    /// Returns the points just before an event that makes writes durable (where most is pending), and the
    /// end.
    pub fn durability_points(&self) -> Vec<CrashPoint> {
        let mut points = self.points();
        points.retain(|point| {
            matches!(
                point.next,
                PointKind::Fence | PointKind::Sync | PointKind::Flush | PointKind::End
            )
        });
        points
    }

    fn at<T>(&self, index: usize, look: impl FnOnce(&Replay) -> T) -> T {
        assert!(
            index <= self.log.events.len(),
            "the history has {} events",
            self.log.events.len()
        );
        let mut cursor = self.cursor.lock();
        if cursor.at > index {
            *cursor = Replay::new(self.media.clone(), &self.log.base, &self.log.lens);
        }
        while cursor.at < index {
            let at = cursor.at;
            cursor.step(&self.log.events[at]);
        }
        look(&cursor)
    }

    /// Returns the number of units (lines, pages, sectors) that a power cut at that point may take or leave.
    ///
    /// # Panics
    /// If `index` is past the end.
    pub fn pending_units(&self, index: usize) -> usize {
        self.at(index, |replay| replay.units().len())
    }

    /// Returns the contents that a crash after `index` events leaves.
    ///
    /// # Panics
    /// If `index` is past the end.
    pub fn image(&self, index: usize, crash: Crash) -> Image {
        let (pages, lens): (Vec<Pages>, Vec<Option<u64>>) =
            self.at(index, |replay| replay.crash(crash, self.log.events.get(index)));
        let devices = self.devices.iter().zip(pages).zip(lens);
        Image(
            devices
                .filter_map(|((device, pages), len)| {
                    Some(Device {
                        pages,
                        len_bytes: len?,
                        removed: false,
                        ..device.without_pages()
                    })
                })
                .collect(),
        )
    }
}

/// The contents of all devices after a crash. Shares pages with the history it came from.
pub struct Image(Vec<Device>);

impl Image {
    /// Hash of names, lengths and contents: equal images need to be tried only once.
    pub fn content_hash(&self) -> u64 {
        hash_devices(&self.0)
    }

    /// A new machine that begins with these contents, not recording.
    pub fn into_world(self) -> SimWorld {
        SimWorld(Arc::new(Mutex::new(World {
            devices: self.0,
            log: None,
            label: None,
        })))
    }
}
