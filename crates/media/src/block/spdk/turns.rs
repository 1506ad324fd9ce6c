//! The one thread on which the library runs: takes requests, hands them to devices, answers when they have
//! ended. Owns time limits, retries, resets and the decision to give a device up. Spins while operations are
//! under way and sleeps while none are.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::config;
use super::reactor::{Link, Message, Opened, PIECE_BYTES, Reply, Request, Shared, Wanted};
use super::sys::{DmaBuffer, Ended, Event, OpenBdev, Operation, Outcome, Runtime, is_exiting};
use crate::block::PciAddress;
use crate::block::nvme::Places;
use crate::block::nvme::command::{Meaning, Status};

/// Operations with data that a device has under way at most.
const PIECES_MAX: usize = 64;
/// How often an operation is sent again after a status that may pass.
const TRIES_MAX: u32 = 4;
/// Resets without an operation that ends between them, before a device is given up.
const RESETS_MAX: u32 = 3;

/// While operations are under way: how long the thread spins, and then only yields, before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
const YIELD: Duration = Duration::from_millis(1);
const NAP: Duration = Duration::from_micros(50);
/// How long the thread sleeps without work. SPDK's own housekeeping, such as the admin queues, runs between.
const IDLE: Duration = Duration::from_millis(20);
/// Why a device whose controller is gone was given up.
const GONE: &str = "it was pulled out, or the host took it back, as before a removal";
/// Interval between checks for time limits and removed devices.
const LOOK: Duration = Duration::from_millis(250);

/// An operation that the library has, or is to have.
struct Flight {
    device: u64,
    /// `None`: a reset, or one whose caller was answered already.
    request: Option<Request>,
    /// Kept until the operation ends, after its caller was answered.
    kept: Option<DmaBuffer>,
    tries: u32,
}

struct Device {
    /// SPDK's name of it.
    name: String,
    /// `None` once it is closed.
    bdev: Option<OpenBdev>,
    shared: Arc<Shared>,
    controller: Option<(PciAddress, String)>,
    io_timeout: Duration,
    /// Operations that the library has.
    in_flight: usize,
    /// Operations that it had no room for.
    waiting: VecDeque<u64>,
    /// When an operation ended last, or the first of those under way began.
    progress: Instant,
    /// The reset under way.
    reset: Option<u64>,
    resets: u32,
    /// The controller is to be detached after this, when nothing is under way.
    detach: Option<Instant>,
    /// It was given up, and was reset then, which ends what is under way.
    purged: bool,
}

impl Device {
    fn is_dead(&self) -> bool {
        self.shared.dead.load(Ordering::Relaxed)
    }

    /// Whether anybody waits for it.
    fn is_busy(&self) -> bool {
        !self.is_dead() && (self.in_flight > 0 || !self.waiting.is_empty())
    }
}

/// The thread's state.
pub(super) struct Loop {
    runtime: Runtime,
    inbox: Receiver<Message>,
    devices: HashMap<u64, Device>,
    flights: HashMap<u64, Flight>,
    next: u64,
    ended: Vec<Ended>,
    places: Places,
    looked: Instant,
    /// When something happened last.
    active: Instant,
    /// Closings that wait for operations to end.
    closing: Vec<(u64, Sender<()>)>,
}

impl Loop {
    pub(super) fn new(runtime: Runtime, inbox: Receiver<Message>) -> Self {
        let now = Instant::now();
        Self {
            runtime,
            inbox,
            devices: HashMap::new(),
            flights: HashMap::new(),
            next: 1,
            ended: Vec::new(),
            places: Places::default(),
            looked: now,
            active: now,
            closing: Vec::new(),
        }
    }

    /// Works until it is told to stop, and stops the library.
    pub(super) fn run(mut self) {
        loop {
            if is_exiting() {
                // The process ends meanwhile.
                loop {
                    std::thread::park();
                }
            }
            let mut stop = false;
            while let Ok(message) = self.inbox.try_recv() {
                stop |= self.take(message);
            }
            self.turn();
            if stop {
                break;
            }
            if let Some(message) = self.pause()
                && self.take(message)
            {
                break;
            }
        }
        self.end();
    }

    /// Lets the library work, and answers what has ended.
    fn turn(&mut self) {
        let worked = self.runtime.poll();
        let mut ended = std::mem::take(&mut self.ended);
        self.runtime.take_ended(&mut ended);
        if worked && !ended.is_empty() {
            self.active = Instant::now();
        }
        // Before the ends, of which a removal makes failures.
        for (id, event) in self.runtime.take_events() {
            self.event(id, event);
        }
        for one in ended.drain(..) {
            self.end_of(one);
        }
        self.ended = ended;
        if self.devices.values().any(|device| !device.waiting.is_empty()) {
            self.send_waiting();
        }
        if self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            self.look();
        }
        self.finish_closing();
    }

    /// Passes time: less, the more there is to do. Returns a message that came meanwhile.
    fn pause(&mut self) -> Option<Message> {
        let quiet = self.active.elapsed();
        let idle = self.closing.is_empty() && !self.devices.values().any(Device::is_busy);
        if quiet < SPIN {
            std::hint::spin_loop();
        } else if !idle && quiet < YIELD {
            std::thread::yield_now();
        } else {
            return match self.inbox.recv_timeout(if idle { IDLE } else { NAP }) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => None,
                // All handles are gone, which sends `Stop` before.
                Err(RecvTimeoutError::Disconnected) => Some(Message::Stop),
            };
        }
        None
    }

    /// Returns whether the thread is to end.
    fn take(&mut self, message: Message) -> bool {
        self.active = Instant::now();
        match message {
            Message::Open(wanted, reply) => {
                let _ = reply.send(self.open(*wanted));
            }
            Message::Io(request) => self.start(request),
            Message::Close(id, buffers, reply) => {
                for buffer in buffers {
                    self.runtime.free(buffer);
                }
                self.closing.push((id, reply));
            }
            Message::Stop => return true,
        }
        false
    }

    fn open(&mut self, wanted: Wanted) -> Result<Opened, String> {
        if !wanted.json.is_empty() {
            self.runtime.configure(&wanted.json)?;
        }
        let name = match wanted.bdev {
            Some(name) => name,
            None => only(self.runtime.names())?,
        };
        // SPDK would open it twice.
        if self.devices.values().any(|device| device.name == name) {
            return Err(format!("{name} is in use in this process"));
        }
        let id = self.number();
        let bdev = self.runtime.open(&name, id)?;
        let mut buffers = Vec::new();
        while buffers.len() < PIECES_MAX {
            match self.runtime.allocate(PIECE_BYTES) {
                Some(buffer) => buffers.push(buffer),
                None => break,
            }
        }
        if buffers.is_empty() {
            self.runtime.close(bdev);
            return Err("there is no memory for transfers; reserve more huge pages (`varve doctor`)".into());
        }
        let shared = Arc::new(Shared::default());
        let facts = bdev.facts.clone();
        self.devices.insert(
            id,
            Device {
                name: name.clone(),
                bdev: Some(bdev),
                shared: Arc::clone(&shared),
                controller: wanted.controller,
                io_timeout: wanted.io_timeout,
                in_flight: 0,
                waiting: VecDeque::new(),
                progress: Instant::now(),
                reset: None,
                resets: 0,
                detach: None,
                purged: false,
            },
        );
        let link = Link {
            id,
            name,
            facts,
            shared,
        };
        Ok((link, buffers))
    }

    fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }

    /// Takes a caller's operation.
    fn start(&mut self, request: Request) {
        let (id, device) = (self.number(), request.device);
        self.flights.insert(
            id,
            Flight {
                device,
                request: Some(request),
                kept: None,
                tries: 0,
            },
        );
        self.send(id);
    }

    /// Hands an operation to the library, or keeps it for later.
    fn send(&mut self, id: u64) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let Some(request) = &flight.request else { return };
        let Some(device) = self.devices.get_mut(&flight.device) else {
            return self.answer(id, Err(libc::ENODEV));
        };
        let Some(bdev) = device.bdev.as_ref().filter(|_| !device.is_dead()) else {
            return self.answer(id, Err(libc::ENODEV));
        };
        if device.in_flight == 0 {
            device.progress = Instant::now();
        }
        let range = (request.off, request.len);
        match self
            .runtime
            .submit(bdev, id, request.operation, range, request.buffer.as_ref())
        {
            Ok(()) => device.in_flight += 1,
            Err(libc::ENOMEM) => device.waiting.push_back(id),
            Err(errno) => self.answer(id, Err(errno)),
        }
    }

    fn send_waiting(&mut self) {
        let ids: Vec<u64> = self.devices.keys().copied().collect();
        for id in ids {
            let Some(device) = self.devices.get_mut(&id) else {
                continue;
            };
            // Once round: what has no room still goes to the end of the line again.
            for flight in std::mem::take(&mut device.waiting) {
                self.send(flight);
            }
        }
    }

    /// Answers the caller of an operation that the library does not have.
    fn answer(&mut self, id: u64, result: Result<(), i32>) {
        let Some(flight) = self.flights.remove(&id) else {
            return;
        };
        if let Some(buffer) = flight.kept {
            self.runtime.free(buffer);
        }
        if let Some(request) = flight.request {
            // A caller that has given up does not listen; its memory goes back to the library.
            let unheard = request.reply.send(Reply {
                tag: request.tag,
                result,
                buffer: request.buffer,
            });
            if let Err(error) = unheard
                && let Some(buffer) = error.0.buffer
            {
                self.runtime.free(buffer);
            }
        }
    }

    fn end_of(&mut self, ended: Ended) {
        let Some(flight) = self.flights.get_mut(&ended.id) else {
            return;
        };
        let Some(device) = self.devices.get_mut(&flight.device) else {
            return;
        };
        device.in_flight -= 1;
        device.progress = Instant::now();
        if device.reset == Some(ended.id) {
            device.reset = None;
            let id = flight.device;
            self.flights.remove(&ended.id);
            if ended.outcome != Outcome::Done {
                self.give_up(id, "it did not answer in time, and its reset failed");
            }
            return;
        }
        if ended.outcome == Outcome::Done {
            device.resets = 0;
        } else if device.controller.is_some() && !device.is_dead() {
            // A removal often shows as another failure first.
            let id = flight.device;
            if self.is_gone(id) {
                self.give_up(id, GONE);
            }
        }
        let Some(flight) = self.flights.get_mut(&ended.id) else {
            return;
        };
        match meaning(ended.outcome) {
            None => self.answer(ended.id, Ok(())),
            Some(Meaning::Again) if flight.tries < TRIES_MAX && flight.request.is_some() => {
                flight.tries += 1;
                self.send(ended.id);
            }
            Some(Meaning::Again) => self.answer(ended.id, Err(libc::EIO)),
            Some(Meaning::Errno(errno)) => self.answer(ended.id, Err(errno)),
        }
    }

    fn event(&mut self, id: u64, event: Event) {
        let reason = match event {
            Event::Removed => "it was removed, or detached from SPDK",
            Event::Resized => {
                let Some(device) = self.devices.get(&id) else {
                    return;
                };
                device
                    .shared
                    .latch
                    .set("its size has changed; restart the daemon when it has its former size again".into());
                return;
            }
        };
        self.give_up(id, reason);
    }

    /// Whether a device's controller was removed, or is about to be.
    fn is_gone(&self, id: u64) -> bool {
        let controller = self
            .devices
            .get(&id)
            .and_then(|device| device.controller.as_ref());
        controller.is_some_and(|(address, _)| {
            !self.places.function(*address).exists() || self.runtime.is_removed(*address)
        })
    }

    /// Looks for operations that take too long, and for devices that are gone.
    fn look(&mut self) {
        let ids: Vec<u64> = self.devices.keys().copied().collect();
        for id in ids {
            let Some(device) = self.devices.get(&id) else {
                continue;
            };
            if device.is_dead() {
                self.bury(id);
                continue;
            }
            let is_late = device.in_flight > 0 && device.progress.elapsed() > device.io_timeout;
            if self.is_gone(id) {
                self.give_up(id, GONE);
            } else if is_late {
                self.late(id);
            }
        }
    }

    /// No operation of a device ends any more: resets it, or gives it up.
    fn late(&mut self, id: u64) {
        let number = self.number();
        let Some(device) = self.devices.get_mut(&id) else {
            return;
        };
        let Some(bdev) = &device.bdev else { return };
        if device.reset.is_some() {
            return self.give_up(id, "it did not answer in time, and its reset did not end");
        }
        if device.resets == RESETS_MAX || !bdev.facts.can_reset {
            return self.give_up(id, "it does not answer");
        }
        device.resets += 1;
        self.reset(id, number);
    }

    /// Starts a reset.
    fn reset(&mut self, id: u64, number: u64) {
        let Some(device) = self.devices.get_mut(&id) else {
            return;
        };
        let Some(bdev) = &device.bdev else { return };
        device.progress = Instant::now();
        if self
            .runtime
            .submit(bdev, number, Operation::Reset, (0, 0), None)
            .is_err()
        {
            return;
        }
        device.in_flight += 1;
        device.reset = Some(number);
        let flight = Flight {
            device: id,
            request: None,
            kept: None,
            tries: 0,
        };
        self.flights.insert(number, flight);
    }

    /// Latches a device, for reads too, and answers all its callers. Memory that the device may still write
    /// is kept until its operation ends.
    fn give_up(&mut self, id: u64, reason: &str) {
        let Some(device) = self.devices.get_mut(&id) else {
            return;
        };
        device.shared.latch.set(format!(
            "{reason}; restart the daemon when the device is well again"
        ));
        device.shared.dead.store(true, Ordering::Release);
        let waiting = std::mem::take(&mut device.waiting);
        if device.controller.is_some() {
            device.detach = Some(Instant::now() + LOOK);
        }
        for flight in waiting {
            self.answer(flight, Err(libc::ENODEV));
        }
        for flight in self.flights.values_mut().filter(|flight| flight.device == id) {
            if let Some(mut request) = flight.request.take() {
                flight.kept = request.buffer.take();
                let _ = request.reply.send(Reply {
                    tag: request.tag,
                    result: Err(libc::ENODEV),
                    buffer: None,
                });
            }
        }
    }

    /// Closes a device that was given up, as far as it lets itself be closed, and lets its controller go: a
    /// host that wants it back waits for that.
    fn bury(&mut self, id: u64) {
        let number = self.number();
        let Some(device) = self.devices.get_mut(&id) else {
            return;
        };
        if device.in_flight > 0 && device.reset.is_none() && !device.purged {
            device.purged = true;
            return self.reset(id, number);
        }
        if device.in_flight == 0
            && let Some(bdev) = device.bdev.take()
        {
            self.runtime.close(bdev);
        }
        if device.bdev.is_none()
            && device.detach.take_if(|when| *when <= Instant::now()).is_some()
            && let Some((_, name)) = &device.controller
        {
            // Where it has gone by itself there is nothing to detach.
            let _ = self.runtime.configure(&config::detach(name));
        }
    }

    fn finish_closing(&mut self) {
        let mut at = 0;
        while at < self.closing.len() {
            let id = self.closing[at].0;
            let busy = self.devices.get(&id).is_some_and(Device::is_busy);
            if busy {
                at += 1;
                continue;
            }
            let (_, reply) = self.closing.swap_remove(at);
            if let Some(mut device) = self.devices.remove(&id)
                && device.in_flight == 0
                && let Some(bdev) = device.bdev.take()
            {
                self.runtime.close(bdev);
            }
            let _ = reply.send(());
        }
    }

    /// Stops the library. Operations that have not ended keep it from stopping.
    fn end(mut self) {
        for (_, device) in self.devices.drain() {
            if device.in_flight == 0
                && let Some(bdev) = device.bdev
            {
                self.runtime.close(bdev);
            }
        }
        // Said by the library itself, on stderr; the process goes on without it.
        let _ = self.runtime.stop();
    }
}

/// Returns the only name.
fn only(mut names: Vec<String>) -> Result<String, String> {
    match names.len() {
        0 => Err("its configuration makes no block device".into()),
        1 => Ok(names.remove(0)),
        _ => Err(format!(
            "its configuration makes several block devices ({}); add #NAME for one of them",
            names.join(", ")
        )),
    }
}

/// Returns the consequence of an end; `None`: it was done.
const fn meaning(outcome: Outcome) -> Option<Meaning> {
    /// Do not try again: SPDK has done that already, as often as its settings say.
    const FINAL: u16 = 1 << 14;
    match outcome {
        Outcome::Done => None,
        Outcome::Errno(libc::EAGAIN | libc::EINTR) => Some(Meaning::Again),
        Outcome::Errno(errno) => Some(Meaning::Errno(errno)),
        // Aborted, by a reset as a rule; its queue was deleted; not ready.
        Outcome::Nvme(0, 0x07 | 0x08 | 0x82) => Some(Meaning::Again),
        Outcome::Nvme(kind, code) => match Status::parse((kind as u16) << 8 | code as u16 | FINAL) {
            Some(status) => Some(status.meaning()),
            None => Some(Meaning::Errno(libc::EIO)),
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Meaning, Outcome, meaning, only};

    #[test]
    fn ends_have_their_errno() {
        assert_eq!(meaning(Outcome::Done), None);
        for (outcome, errno) in [
            (Outcome::Errno(libc::ENOSPC), libc::ENOSPC),
            (Outcome::Nvme(0, 0x81), libc::ENOSPC),
            (Outcome::Nvme(0, 0x06), libc::EIO),
            (Outcome::Nvme(2, 0x81), libc::EIO),
            (Outcome::Nvme(0, 0), libc::EIO),
        ] {
            assert_eq!(meaning(outcome), Some(Meaning::Errno(errno)), "{outcome:?}");
        }
        assert_eq!(meaning(Outcome::Nvme(0, 0x08)), Some(Meaning::Again));
    }

    #[test]
    fn one_of_several_devices_must_be_named() {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        assert_eq!(only(names(&["Malloc0"])), Ok("Malloc0".into()));
        assert!(
            only(names(&["A", "B"]))
                .unwrap_err()
                .contains("(A, B); add #NAME")
        );
        assert!(only(Vec::new()).unwrap_err().contains("no block device"));
    }
}
