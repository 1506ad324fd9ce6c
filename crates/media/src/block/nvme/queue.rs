//! A submission and a completion queue in memory shared with the device: entries, doorbells, phase,
//! identifiers. Trusts no completion: an impossible one is a [`Breach`]. Knows no operation.

use std::sync::Arc;

use super::bus::{Bus, DmaMemory, PAGE_BYTES};
use super::command::{COMMAND_BYTES, COMPLETION_BYTES, Command, Completion, Status, prp};
use super::registers::Capabilities;
use crate::error::MediaError;

/// Most entries of a queue: they fit in a page, and every slot has a list of its own in another page.
pub(super) const ENTRIES_MAX: u16 = 32;
/// Bits of a command's identifier that name its slot; the others count the slot's commands.
const SLOT_BITS: u32 = 5;
/// Bytes of a slot's list of pages.
const LIST_BYTES: usize = PAGE_BYTES / ENTRIES_MAX as usize;
/// Most bytes that the list of a slot can describe: the command names one page itself.
pub(super) const TRANSFER_MAX: usize = (LIST_BYTES / 8) * PAGE_BYTES;

const SUBMISSION_OFF: usize = 0;
const COMPLETION_OFF: usize = PAGE_BYTES;
const LISTS_OFF: usize = 2 * PAGE_BYTES;
const DATA_OFF: usize = 3 * PAGE_BYTES;

const _: () = {
    assert!(ENTRIES_MAX as usize <= 1 << SLOT_BITS);
    assert!(ENTRIES_MAX as usize * COMMAND_BYTES <= PAGE_BYTES);
    assert!(ENTRIES_MAX as usize * COMPLETION_BYTES <= PAGE_BYTES);
};

/// Why a queue cannot go on before the controller is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Breach {
    /// The device broke the protocol; the text says how.
    Protocol(&'static str),
    /// A command did not come back in time.
    Timeout,
    /// The controller reports a fatal error.
    Fatal,
    /// Its registers read as all ones.
    Removed,
    /// The host wants the device back.
    WantedBack,
    /// Another thread is about to reset the controller.
    Reset,
}

impl std::fmt::Display for Breach {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Protocol(what) => write!(f, "it broke the protocol ({what})"),
            Self::Timeout => f.write_str("a command did not come back in time"),
            Self::Fatal => f.write_str("it met a fatal error (CSTS.CFS)"),
            Self::Removed => f.write_str("it was removed: its registers read as all ones"),
            Self::WantedBack => f.write_str("the host took it back, as before a removal"),
            Self::Reset => f.write_str("it is being reset"),
        }
    }
}

/// A command that has ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub slot: usize,
    /// The ticket given to [`QueuePair::submit`].
    pub ticket: usize,
    /// `None`: success.
    pub status: Option<Status>,
    /// Command-specific.
    pub result: u32,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    /// Identifier and ticket of the command in flight.
    busy: Option<(u16, usize)>,
    /// Commands issued from this slot so far.
    count: u16,
}

/// A queue pair with a data buffer for each command that may be in flight.
pub(super) struct QueuePair {
    id: u16,
    entries: u16,
    slot_bytes: usize,
    memory: Arc<dyn DmaMemory>,
    submission_doorbell: usize,
    completion_doorbell: usize,
    tail: u16,
    head: u16,
    phase: bool,
    /// Whether the device still has to be told of the tail, and of the head.
    unrung: (bool, bool),
    slots: Vec<Slot>,
    in_flight: usize,
    list: Vec<u64>,
}

impl QueuePair {
    /// Makes queue `id` with this number of entries (2 to [`ENTRIES_MAX`]), and a buffer of `slot_bytes`
    /// (whole pages, at most [`TRANSFER_MAX`]) for each command in flight, one less than there are entries.
    ///
    /// # Errors
    /// No memory.
    pub(super) fn new(
        bus: &dyn Bus,
        capabilities: &Capabilities,
        id: u16,
        entries: u16,
        slot_bytes: usize,
    ) -> Result<Self, MediaError> {
        assert!((2..=ENTRIES_MAX).contains(&entries));
        assert!(slot_bytes.is_multiple_of(PAGE_BYTES) && slot_bytes <= TRANSFER_MAX);
        let slots = usize::from(entries) - 1;
        let memory = bus.allocate(DATA_OFF + slots * slot_bytes)?;
        assert!(memory.len_bytes() >= DATA_OFF + slots * slot_bytes);
        Ok(Self {
            id,
            entries,
            slot_bytes,
            memory,
            submission_doorbell: capabilities.doorbell(id, false),
            completion_doorbell: capabilities.doorbell(id, true),
            tail: 0,
            head: 0,
            phase: true,
            unrung: (false, false),
            slots: vec![Slot::default(); slots],
            in_flight: 0,
            list: Vec::new(),
        })
    }

    /// Returns to the initial state. Only while the controller is disabled: nothing may be in flight on the
    /// device.
    pub(super) fn clear(&mut self) {
        self.memory
            .write(SUBMISSION_OFF, &[0; COMPLETION_OFF - SUBMISSION_OFF]);
        self.memory
            .write(COMPLETION_OFF, &[0; LISTS_OFF - COMPLETION_OFF]);
        (self.tail, self.head, self.phase) = (0, 0, true);
        self.unrung = (false, false);
        self.in_flight = 0;
        for slot in &mut self.slots {
            slot.busy = None;
        }
    }

    pub(super) const fn id(&self) -> u16 {
        self.id
    }

    pub(super) const fn entries(&self) -> u16 {
        self.entries
    }

    pub(super) const fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Bus addresses of the two queues.
    pub(super) fn addresses(&self) -> (u64, u64) {
        let at = |off| self.memory.bus_address(off);
        (at(SUBMISSION_OFF), at(COMPLETION_OFF))
    }

    /// A slot without a command.
    pub(super) fn free_slot(&self) -> Option<usize> {
        self.slots.iter().position(|slot| slot.busy.is_none())
    }

    const fn data_off(&self, slot: usize) -> usize {
        DATA_OFF + slot * self.slot_bytes
    }

    /// Copies into the buffer of a slot.
    pub(super) fn fill(&self, slot: usize, off: usize, src: &[u8]) {
        assert!(off + src.len() <= self.slot_bytes);
        self.memory.write(self.data_off(slot) + off, src);
    }

    /// Copies out of the buffer of a slot.
    pub(super) fn take(&self, slot: usize, off: usize, out: &mut [u8]) {
        assert!(off + out.len() <= self.slot_bytes);
        self.memory.read(self.data_off(slot) + off, out);
    }

    /// Queues a command that transfers the first `len` bytes of a free slot's buffer; with `len` 0 its
    /// addresses are left as they are. The device fetches it after the next [`ring`](Self::ring).
    pub(super) fn submit(&mut self, slot: usize, mut command: Command, len: usize, ticket: usize) {
        assert!(self.slots[slot].busy.is_none() && len <= self.slot_bytes);
        let (memory, data_off) = (&self.memory, self.data_off(slot));
        let list_off = LISTS_OFF + slot * LIST_BYTES;
        let page = |n: usize| memory.bus_address(data_off + n * PAGE_BYTES);
        self.list.clear();
        if len > 0 {
            command.prp = prp(len, page, memory.bus_address(list_off), &mut self.list);
        }
        for (index, address) in self.list.iter().enumerate() {
            memory.write(list_off + 8 * index, &address.to_le_bytes());
        }
        let entry = &mut self.slots[slot];
        entry.count = entry.count.wrapping_add(1);
        let id = entry.count << SLOT_BITS | slot as u16;
        entry.busy = Some((id, ticket));
        let at = SUBMISSION_OFF + usize::from(self.tail) * COMMAND_BYTES;
        memory.write(at, &command.bytes(id));
        self.tail = (self.tail + 1) % self.entries;
        self.unrung.0 = true;
        self.in_flight += 1;
    }

    /// Tells the device the new tail and head.
    pub(super) fn ring(&mut self, bus: &dyn Bus) {
        // The head first: the device may wait for room.
        if std::mem::take(&mut self.unrung.1) {
            bus.write32(self.completion_doorbell, u32::from(self.head));
        }
        if std::mem::take(&mut self.unrung.0) {
            bus.write32(self.submission_doorbell, u32::from(self.tail));
        }
    }

    /// The next command that has ended, if one has.
    ///
    /// # Errors
    /// The completion matches no command in flight, or contradicts itself.
    pub(super) fn poll(&mut self) -> Result<Option<Ended>, Breach> {
        let at = COMPLETION_OFF + usize::from(self.head) * COMPLETION_BYTES;
        let last = self.memory.load_u32(at + 12);
        if (last >> 16 & 1 == 1) != self.phase {
            return Ok(None);
        }
        let mut bytes = [0; COMPLETION_BYTES];
        self.memory.read(at, &mut bytes);
        // The phase and status that were checked count, even if the device changes them meanwhile.
        bytes[12..].copy_from_slice(&last.to_le_bytes());
        let completion = Completion::parse(&bytes);
        if completion.sq_id != self.id {
            return Err(Breach::Protocol("a completion names another queue"));
        }
        if completion.sq_head >= self.entries {
            return Err(Breach::Protocol(
                "a completion's queue head is past the queue's end",
            ));
        }
        let slot = usize::from(completion.id & ((1 << SLOT_BITS) - 1));
        let busy = self.slots.get(slot).and_then(|slot| slot.busy);
        let Some((_, ticket)) = busy.filter(|(id, _)| *id == completion.id) else {
            return Err(Breach::Protocol("a completion names no command in flight"));
        };
        self.slots[slot].busy = None;
        self.in_flight -= 1;
        self.head += 1;
        if self.head == self.entries {
            (self.head, self.phase) = (0, !self.phase);
        }
        self.unrung.1 = true;
        Ok(Some(Ended {
            slot,
            ticket,
            status: Status::parse(completion.status),
            result: completion.result,
        }))
    }
}
