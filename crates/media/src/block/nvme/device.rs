//! An NVMe namespace as a block device. Owns the assignment of threads to queue pairs, resets, and the
//! decision to give the device up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::lock::{Mutex, MutexGuard};

use super::bus::Bus;
use super::controller::{Controller, ControllerError, Identity, check_status};
use super::queue::{Breach, ENTRIES_MAX, QueuePair, TRANSFER_MAX};
use super::transfer::{Failure, Piece, RANGES_MAX, Target, Work};
use crate::DEVICE_BLOCK_BYTES;
use crate::error::{DeviceName, MediaError, check_blocks, check_range};
use crate::latch::Latch;
use crate::traits::{BlockDevice, DeviceInfo, DeviceState, MediumKind};

/// How often one call resets the controller before it gives up.
const RESETS_MAX: u32 = 3;
/// Most queue pairs: each takes 2 MiB.
const QUEUE_PAIRS_MAX: usize = 16;
/// Sectors of one range of a deallocation.
const RANGE_SECTORS_MAX: u64 = 1 << 20;

/// Settings of the driver. The default suits a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvmeOptions {
    /// I/O queue pairs; 0: one for each processor, at most 16. The controller may give fewer.
    pub queue_pairs: usize,
    /// Entries of a queue, 2 to 32; at most one less is in flight.
    pub entries: u16,
    /// How long a command may take while no other ends. After that the controller is reset and the command
    /// sent again.
    pub io_timeout: Duration,
    /// How long an administrative command may take.
    pub admin_timeout: Duration,
}

impl Default for NvmeOptions {
    fn default() -> Self {
        Self {
            queue_pairs: 0,
            entries: ENTRIES_MAX,
            io_timeout: Duration::from_secs(30),
            admin_timeout: Duration::from_secs(30),
        }
    }
}

/// A namespace of a controller that this process drives.
pub struct NvmeDevice {
    name: DeviceName,
    bus: Arc<dyn Bus>,
    target: Target,
    identity: Identity,
    piece_bytes: usize,
    entries: u16,
    /// Lock order: the controller, then queues by their number.
    controller: Mutex<Controller>,
    queues: Vec<Mutex<QueuePair>>,
    /// Resets so far. Changes while the controller and all queues are locked.
    resets: AtomicU64,
    /// A thread waits for all queues, to reset the controller.
    resetting: AtomicBool,
    /// Given up: no command is sent any more.
    dead: AtomicBool,
    latch: Latch,
}

/// A number for each thread, from 0 on.
fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}

impl NvmeDevice {
    /// Resets the controller on `bus`, and takes its namespace `nsid` into use.
    ///
    /// # Errors
    /// `Refused`: it is not a usable controller, or misbehaves. Its DMA is stopped then.
    pub fn open(
        bus: Arc<dyn Bus>,
        name: DeviceName,
        nsid: u32,
        options: NvmeOptions,
    ) -> Result<Self, MediaError> {
        Self::start(&bus, name.clone(), nsid, options).map_err(|error| {
            bus.stop_dma();
            match error {
                ControllerError::Host(error) => error,
                error => MediaError::Refused {
                    device: name,
                    why: format!("cannot be used: {error}").into(),
                },
            }
        })
    }

    fn start(
        bus: &Arc<dyn Bus>,
        name: DeviceName,
        nsid: u32,
        options: NvmeOptions,
    ) -> Result<Self, ControllerError> {
        let mut controller = Controller::new(Arc::clone(bus), nsid, options.admin_timeout)?;
        controller.enable()?;
        let identity = controller.identify()?;
        let wanted = match options.queue_pairs {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            pairs => pairs,
        };
        let pairs = controller.negotiate_queues(wanted.min(QUEUE_PAIRS_MAX) as u16)?;
        let most = u16::try_from(controller.capabilities().entries_max).unwrap_or(u16::MAX);
        let entries = options.entries.clamp(2, ENTRIES_MAX).min(most);
        let transfer_max = identity.controller.transfer_max.unwrap_or(TRANSFER_MAX);
        let piece_bytes = transfer_max.min(TRANSFER_MAX);
        let mut queues = Vec::new();
        for id in 1..=pairs {
            let mut queue = QueuePair::new(&**bus, controller.capabilities(), id, entries, piece_bytes)?;
            queue.clear();
            match controller.create_queues(&queue) {
                Ok(()) => queues.push(Mutex::new(queue)),
                // It promised more than it has; some are enough.
                Err(ControllerError::Refused(..)) if !queues.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        Ok(Self {
            name,
            bus: Arc::clone(bus),
            target: Target {
                nsid,
                namespace: identity.namespace,
                timeout: options.io_timeout,
            },
            identity,
            piece_bytes,
            entries,
            controller: Mutex::new(controller),
            queues,
            resets: AtomicU64::new(0),
            resetting: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            latch: Latch::default(),
        })
    }

    /// I/O queue pairs in use.
    pub fn queue_pairs(&self) -> usize {
        self.queues.len()
    }

    /// How often the controller was reset.
    pub fn resets(&self) -> u64 {
        self.resets.load(Ordering::Relaxed)
    }

    /// Bytes of a sector.
    pub const fn sector_bytes(&self) -> u64 {
        self.target.namespace.sector_bytes()
    }

    /// Whether a write may stay in a volatile cache of the device until a flush.
    pub const fn has_write_cache(&self) -> bool {
        self.identity.controller.has_write_cache
    }

    /// Checks that the device is still present, while it is idle. Latches if it is not.
    pub fn look(&self) -> DeviceState {
        if !self.dead.load(Ordering::Relaxed)
            && let Err(breach @ (Breach::Removed | Breach::WantedBack)) = check_status(&*self.bus)
        {
            self.give_up(&breach.to_string());
        }
        self.state()
    }

    /// Returns this thread's queue pair, or a free one while another thread that shares it uses it.
    fn queue(&self) -> MutexGuard<'_, QueuePair> {
        let own = thread_number() % self.queues.len();
        let order = (own..self.queues.len()).chain(0..own);
        for at in order {
            if let Some(queue) = self.queues[at].try_lock() {
                return queue;
            }
        }
        self.queues[own].lock()
    }

    /// Latches, for reads too. From here on no code uses the memory that the device may still write.
    fn give_up(&self, reason: &str) -> MediaError {
        self.latch.set(format!(
            "{reason}; restart the daemon when the device is well again"
        ));
        self.dead.store(true, Ordering::Relaxed);
        self.bus.stop_dma();
        self.failed()
    }

    fn failed(&self) -> MediaError {
        match self.latch.check(&self.name) {
            Err(error) => error,
            Ok(()) => MediaError::from_errno(&self.name, "use", 0, 0, libc::ENODEV),
        }
    }

    /// Resets the controller, unless another thread has done so since `resets`.
    fn recover(&self, resets: u64, breach: Breach) -> Result<(), MediaError> {
        let mut controller = self.controller.lock();
        if self.dead.load(Ordering::Relaxed) {
            return Err(self.failed());
        }
        // A removal often shows as another failure first.
        let gone = check_status(&*self.bus).err().unwrap_or(breach);
        if matches!(gone, Breach::Removed | Breach::WantedBack) {
            return Err(self.give_up(&gone.to_string()));
        }
        if self.resets.load(Ordering::Acquire) != resets {
            return Ok(());
        }
        self.resetting.store(true, Ordering::Relaxed);
        let mut queues: Vec<_> = self.queues.iter().map(Mutex::lock).collect();
        self.resetting.store(false, Ordering::Relaxed);
        match self.restart(&mut controller, &mut queues) {
            Ok(()) => {
                self.resets.store(resets + 1, Ordering::Release);
                Ok(())
            }
            Err(error) => Err(self.give_up(&format!("{breach}, and could not be reset: {error}"))),
        }
    }

    fn restart(
        &self,
        controller: &mut Controller,
        queues: &mut [MutexGuard<'_, QueuePair>],
    ) -> Result<(), ControllerError> {
        controller.enable()?;
        let identity = controller.identify()?;
        if identity != self.identity {
            return Err(ControllerError::Unusable("it is another device now".into()));
        }
        let given = controller.negotiate_queues(queues.len() as u16)?;
        if usize::from(given) < queues.len() {
            return Err(ControllerError::Unusable(format!(
                "it gives {given} queue pairs now, {} are in use",
                queues.len()
            )));
        }
        for queue in queues {
            queue.clear();
            controller.create_queues(queue)?;
        }
        Ok(())
    }

    /// Carries out pieces, over resets. The range is for messages.
    fn run(&self, op: &'static str, off: u64, len: u64, pieces: &mut [Piece<'_>]) -> Result<(), MediaError> {
        let mut broken = 0;
        loop {
            if self.dead.load(Ordering::Relaxed) {
                return Err(self.failed());
            }
            let (resets, result) = {
                let mut queue = self.queue();
                let resets = self.resets.load(Ordering::Acquire);
                let result = self.target.drive(&*self.bus, &mut queue, pieces, &self.resetting);
                (resets, result)
            };
            match result {
                Ok(()) => return Ok(()),
                Err(Failure::Status(_, errno)) => {
                    return Err(MediaError::from_errno(&self.name, op, off, len, errno));
                }
                Err(Failure::Breach(breach)) => {
                    self.recover(resets, breach)?;
                    broken += u32::from(breach != Breach::Reset);
                    if broken > RESETS_MAX {
                        return Err(MediaError::from_errno(&self.name, op, off, len, libc::ETIMEDOUT));
                    }
                }
            }
        }
    }

    fn check_write(&self, off: u64, len: u64) -> Result<(), MediaError> {
        check_range(&self.name, off, len, self.len_bytes())?;
        check_blocks(&self.name, off, len, DEVICE_BLOCK_BYTES)?;
        self.latch.check(&self.name)
    }

    fn write_parts(&self, parts: &[(u64, &[u8])], durable: bool) -> Result<(), MediaError> {
        let durable = durable && self.has_write_cache();
        let mut pieces = Vec::with_capacity(parts.len());
        for (off, src) in parts {
            self.check_write(*off, src.len() as u64)?;
            Piece::cut_write(&mut pieces, *off, src, self.piece_bytes, durable);
        }
        let (off, len) = parts
            .first()
            .map_or((0, 0), |(off, src)| (*off, src.len() as u64));
        self.run("write", off, len, &mut pieces)
            .map_err(|error| self.latch.note(error))
    }
}

impl BlockDevice for NvmeDevice {
    fn len_bytes(&self) -> u64 {
        self.target.namespace.len_bytes
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.read_batch(&mut [(off, out)])
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.write_parts(&[(off, src)], false)
    }

    fn write_durable(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.write_parts(&[(off, src)], true)
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.latch.check(&self.name)?;
        if !self.has_write_cache() {
            // A write that has returned is durable.
            return Ok(());
        }
        self.run("flush", 0, 0, &mut [Piece::new(Work::Flush)])
            .map_err(|error| self.latch.note(error))
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.check_write(off, len)?;
        if len == 0 || !self.identity.controller.can_deallocate {
            return Ok(());
        }
        let shift = self.target.namespace.sector_shift;
        let (mut first, end) = (off >> shift, (off + len) >> shift);
        let mut ranges = Vec::new();
        while first < end {
            let sectors = (end - first).min(RANGE_SECTORS_MAX);
            ranges.push((first, sectors as u32));
            first += sectors;
        }
        let mut pieces: Vec<_> = ranges
            .chunks(RANGES_MAX)
            .map(|ranges| {
                Piece::new(Work::Deallocate {
                    ranges: ranges.into(),
                })
            })
            .collect();
        self.run("trim", off, len, &mut pieces)
    }

    fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        let mut pieces = Vec::with_capacity(parts.len());
        let (off, len) = parts
            .first()
            .map_or((0, 0), |(off, out)| (*off, out.len() as u64));
        for (off, out) in parts {
            check_range(
                &self.name,
                *off,
                out.len() as u64,
                self.target.namespace.len_bytes,
            )?;
            Piece::cut_read(&mut pieces, *off, out, self.piece_bytes, self.sector_bytes());
        }
        self.run("read", off, len, &mut pieces)
    }

    fn write_batch(&self, parts: &[(u64, &[u8])]) -> Result<(), MediaError> {
        self.write_parts(parts, false)
    }

    fn state(&self) -> DeviceState {
        self.latch.state()
    }

    fn name(&self) -> DeviceName {
        self.name.clone()
    }

    fn info(&self) -> DeviceInfo {
        let controller = &self.identity.controller;
        let cache = if self.has_write_cache() {
            "volatile write cache"
        } else {
            "no volatile write cache"
        };
        let backend = format!(
            "nvme in user space, {}, {} ({}), {} queue pairs of {}, sectors of {}, {cache}",
            self.bus.describe(),
            controller.model,
            controller.serial,
            self.queues.len(),
            self.entries,
            self.sector_bytes(),
        );
        DeviceInfo {
            name: self.name.clone(),
            kind: MediumKind::Block,
            backend,
        }
    }
}

impl Drop for NvmeDevice {
    fn drop(&mut self) {
        if !*self.dead.get_mut() {
            self.controller.get_mut().shut_down();
        }
        // The memory whose addresses the device has is freed after this.
        self.bus.stop_dma();
    }
}
