//! The library at work: its start and stop, and what its users hand to it. The thread's own side is
//! [`turns`](super::turns).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use crate::lock::Mutex;

use super::config;
use super::sys::{DmaBuffer, Facts, Library, Operation, Runtime};
use super::turns::Loop;
use crate::block::PciAddress;
use crate::latch::Latch;

/// Bytes of one operation's data, at most.
pub(super) const PIECE_BYTES: usize = 64 << 10;

/// What a device's users and the reactor both see.
#[derive(Default)]
pub(super) struct Shared {
    pub latch: Latch,
    /// Given up: nothing is sent any more.
    pub dead: AtomicBool,
}

/// An operation, on its way to the device.
pub(super) struct Request {
    pub device: u64,
    pub operation: Operation,
    pub off: u64,
    pub len: u64,
    /// Memory with, or for, its data.
    pub buffer: Option<DmaBuffer>,
    /// Of the caller.
    pub tag: usize,
    pub reply: Sender<Reply>,
}

/// Its answer.
pub(super) struct Reply {
    pub tag: usize,
    /// Or the errno.
    pub result: Result<(), i32>,
    /// The memory; not there where the device may still write it.
    pub buffer: Option<DmaBuffer>,
}

/// How to reach a device.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// A configuration to carry out before; empty: none.
    pub json: String,
    /// Name of the block device; `None`: the only one.
    pub bdev: Option<String>,
    /// The function of a controller, and SPDK's name of it.
    pub controller: Option<(PciAddress, String)>,
    /// How long an operation may take while no other ends.
    pub io_timeout: Duration,
}

/// A device that was opened.
pub(super) struct Link {
    pub id: u64,
    pub name: String,
    pub facts: Facts,
    pub shared: Arc<Shared>,
}

/// A device, and memory for its transfers.
pub(super) type Opened = (Link, Vec<DmaBuffer>);

/// What the thread is asked for.
pub(super) enum Message {
    Open(Box<Wanted>, Sender<Result<Opened, String>>),
    Io(Request),
    Close(u64, Vec<DmaBuffer>, Sender<()>),
    Stop,
}

/// Nothing is ever sent of it.
enum Never {}

/// The library at work on its thread. It stops when this is dropped.
pub struct Reactor {
    messages: Sender<Message>,
    /// Closed when the thread has stopped the library.
    stopped: Mutex<Receiver<Never>>,
    /// Version of the library and kind of its memory.
    pub(super) about: String,
}

impl Reactor {
    /// Starts the library on its thread, with what `json` configures. `devices` are the PCI devices
    /// that it may look at.
    ///
    /// # Errors
    /// For a person.
    pub fn start(
        library: &'static Library,
        devices: Vec<PciAddress>,
        huge: bool,
        json: String,
    ) -> Result<Self, String> {
        let (messages, inbox) = channel();
        let (report, started) = channel();
        let (running, stopped) = channel();
        let run = move || {
            let _running: Sender<Never> = running;
            match begin(library, &devices, huge, &json) {
                Ok(runtime) => {
                    // The other end waits for it.
                    let _ = report.send(Ok(()));
                    Loop::new(runtime, inbox).run();
                }
                Err(error) => {
                    let _ = report.send(Err(error));
                }
            }
        };
        library
            .run(Box::new(run))
            .map_err(|error| format!("its thread cannot be started: {error}"))?;
        started
            .recv()
            .unwrap_or_else(|_| Err("its thread has ended".into()))?;
        let pages = if huge { "huge pages" } else { "ordinary pages" };
        Ok(Self {
            messages,
            stopped: Mutex::new(stopped),
            about: format!("{}, {pages}", library.version),
        })
    }

    pub(super) fn open(&self, wanted: Wanted) -> Result<Opened, String> {
        let (reply, answer) = channel();
        let _ = self.messages.send(Message::Open(Box::new(wanted), reply));
        answer
            .recv()
            .unwrap_or_else(|_| Err("its thread has ended".into()))
    }

    /// Hands a request over. Without the thread, its reply's channel is closed.
    pub(super) fn submit(&self, request: Request) {
        let _ = self.messages.send(Message::Io(request));
    }

    /// Closes a device, with the memory that its users had.
    pub(super) fn close(&self, id: u64, buffers: Vec<DmaBuffer>) {
        let (reply, answer) = channel();
        let _ = self.messages.send(Message::Close(id, buffers, reply));
        let _ = answer.recv();
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        let _ = self.messages.send(Message::Stop);
        // Ends with an error, when the other end is gone.
        let _ = self.stopped.get_mut().recv();
    }
}

/// Starts the library on this thread.
fn begin(
    library: &'static Library,
    devices: &[PciAddress],
    huge: bool,
    json: &str,
) -> Result<Runtime, String> {
    let runtime = Runtime::start(library, devices, huge)?;
    let configured = (|| {
        runtime.configure(&config::base(!devices.is_empty()))?;
        if !json.is_empty() {
            runtime.configure(json)?;
        }
        runtime.start_subsystems()
    })();
    match configured {
        Ok(()) => Ok(runtime),
        Err(error) => {
            // The first error is the one that says something.
            let _ = runtime.stop();
            Err(error)
        }
    }
}
