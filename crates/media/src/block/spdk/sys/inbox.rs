//! What SPDK tells the thread that runs it: ends of operations, events of devices, ends of steps. The
//! callbacks only note it here, as numbers, and whoever polls takes it out. No pointer of ours is ever given
//! to the library as a context: one that comes back late, or twice, is a number that is known or not.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

use super::api::{Api, Bdev, BdevIo, PciAddr, PciDevice};

/// The end of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::block::spdk) struct Ended {
    /// Its number.
    pub id: u64,
    /// What became of it.
    pub outcome: Outcome,
}

/// What became of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::block::spdk) enum Outcome {
    /// It was done.
    Done,
    /// The kernel's file or device below answered with an errno.
    Errno(i32),
    /// An NVMe status: type and code.
    Nvme(u8, u8),
}

/// An event of an opened device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::block::spdk) enum Event {
    /// It goes, and wants to be closed.
    Removed,
    /// It has another size.
    Resized,
}

#[derive(Default)]
struct Inbox {
    ended: Vec<Ended>,
    events: Vec<(u64, Event)>,
    steps: Vec<c_int>,
    removed: Vec<PciAddr>,
}

thread_local! {
    static INBOX: RefCell<Inbox> = RefCell::default();
    static API: Cell<Option<&'static Api>> = const { Cell::new(None) };
}

/// Makes the calling thread the one that runs this library.
pub(super) fn begin(api: &'static Api) {
    API.set(Some(api));
    INBOX.take();
}

/// Moves the ends of operations to `ended`.
pub(super) fn take_ended(ended: &mut Vec<Ended>) {
    INBOX.with_borrow_mut(|inbox| ended.append(&mut inbox.ended));
}

/// Takes the events, each with its device's number.
pub(super) fn take_events() -> Vec<(u64, Event)> {
    INBOX.with_borrow_mut(|inbox| std::mem::take(&mut inbox.events))
}

/// Takes the result of a step that has ended.
pub(super) fn take_step() -> Option<c_int> {
    INBOX.with_borrow_mut(|inbox| inbox.steps.pop())
}

/// Takes the removed PCI devices that [`on_pci_device`] found.
pub(super) fn take_removed() -> Vec<PciAddr> {
    INBOX.with_borrow_mut(|inbox| std::mem::take(&mut inbox.removed))
}

/// A number as a context.
pub(super) fn context(id: u64) -> *mut c_void {
    ptr::without_provenance_mut(id as usize)
}

pub(super) unsafe extern "C" fn on_end(io: *mut BdevIo, success: bool, context: *mut c_void) {
    let Some(api) = API.get() else { return };
    let outcome = if success {
        Outcome::Done
    } else {
        let (mut errno, mut result, mut kind, mut code) = (-libc::EIO, 0, 0, 0);
        // SAFETY: `io` is an ended operation that was not freed yet, which is what these functions want; the
        // other pointers are to values that live through the calls.
        unsafe {
            (api.bdev_io_get_aio_status)(io, &raw mut errno);
            (api.bdev_io_get_nvme_status)(io, &raw mut result, &raw mut kind, &raw mut code);
        }
        match errno {
            // Also where there is no such status.
            -5 | 0 => Outcome::Nvme(kind as u8, code as u8),
            errno => Outcome::Errno(-errno),
        }
    };
    // SAFETY: as above; nothing uses it after this.
    unsafe { (api.bdev_free_io)(io) };
    let id = context.addr() as u64;
    INBOX.with_borrow_mut(|inbox| inbox.ended.push(Ended { id, outcome }));
}

pub(super) unsafe extern "C" fn on_event(event: c_uint, _: *mut Bdev, context: *mut c_void) {
    let event = match event {
        0 => Event::Removed,
        1 => Event::Resized,
        _ => return,
    };
    INBOX.with_borrow_mut(|inbox| inbox.events.push((context.addr() as u64, event)));
}

pub(super) unsafe extern "C" fn on_step(rc: c_int, _: *mut c_void) {
    INBOX.with_borrow_mut(|inbox| inbox.steps.push(rc));
}

pub(super) unsafe extern "C" fn on_stopped(_: *mut c_void) {
    INBOX.with_borrow_mut(|inbox| inbox.steps.push(0));
}

pub(super) unsafe extern "C" fn on_pci_device(_: *mut c_void, device: *mut PciDevice) {
    let Some(api) = API.get() else { return };
    // SAFETY: SPDK passes a device that it holds through this call.
    let (address, removed) = unsafe {
        (
            (api.pci_device_get_addr)(device),
            (api.pci_device_is_removed)(device),
        )
    };
    if removed {
        INBOX.with_borrow_mut(|inbox| inbox.removed.push(address));
    }
}

/// Levels of messages: errors and warnings are kept, the rest is not worth a line.
const WARNING: c_int = 1;

/// Takes a message of the library's log; on any of its threads.
pub(super) unsafe extern "C" fn on_message(
    level: c_int,
    _file: *const c_char,
    _line: c_int,
    _function: *const c_char,
    format: *const c_char,
    arguments: *mut c_void,
) {
    unsafe extern "C" {
        // With a `va_list`, which is a pointer as a parameter on the processors for which this is built.
        fn vsnprintf(to: *mut c_char, bytes: usize, format: *const c_char, arguments: *mut c_void) -> c_int;
    }
    if level > WARNING || format.is_null() {
        return;
    }
    let mut text = [0u8; 512];
    // SAFETY: writes at most the length of `text` with its final zero; format and arguments are SPDK's, made
    // for each other, and are used once.
    let len = unsafe { vsnprintf(text.as_mut_ptr().cast(), text.len(), format, arguments) };
    let len = usize::try_from(len).unwrap_or(0).min(text.len() - 1);
    super::said::add(&String::from_utf8_lossy(&text[..len]));
}
