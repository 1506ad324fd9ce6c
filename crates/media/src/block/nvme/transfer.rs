//! Reads, writes, flushes and deallocations as commands of one queue pair: cut to the size of a command, as
//! many in flight as there are slots, polled until all have ended. Knows sectors; `device` handles a device
//! that does not answer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::bus::Bus;
use super::command::{Command, Meaning, Status, io};
use super::controller::check_status;
use super::identify::NamespaceIdentity;
use super::queue::{Breach, Ended, QueuePair};

/// How often a command is sent again after the device answered "later".
const TRIES_MAX: u8 = 4;
/// Interval between reads of the status register while nothing completes: each costs a microsecond.
const LOOK: Duration = Duration::from_millis(1);
/// Ranges of one dataset management command.
pub(super) const RANGES_MAX: usize = 256;
/// Bytes of a range.
const RANGE_BYTES: usize = 16;

/// The operation of a command.
pub(super) enum Work<'a> {
    /// Reads bytes from an offset, both of any alignment.
    Read { off: u64, out: &'a mut [u8] },
    /// Writes whole sectors; durably if the device has a write cache and the write is to bypass it.
    Write { off: u64, src: &'a [u8], durable: bool },
    /// Makes all completed writes durable.
    Flush,
    /// Frees ranges: first sector, sectors.
    Deallocate { ranges: Vec<(u64, u32)> },
}

/// A command to be sent, or one that has succeeded.
pub(super) struct Piece<'a> {
    pub work: Work<'a>,
    done: bool,
    tries: u8,
}

impl<'a> Piece<'a> {
    pub(super) const fn new(work: Work<'a>) -> Self {
        Self {
            work,
            done: false,
            tries: 0,
        }
    }

    /// Cuts a read so that each piece, extended to whole sectors, fits in `piece_bytes`.
    pub(super) fn cut_read(
        pieces: &mut Vec<Self>,
        mut off: u64,
        mut out: &'a mut [u8],
        piece_bytes: usize,
        sector: u64,
    ) {
        while !out.is_empty() {
            let skip = (off % sector) as usize;
            let len = out.len().min(piece_bytes - skip);
            let (head, rest) = out.split_at_mut(len);
            pieces.push(Self::new(Work::Read { off, out: head }));
            off += len as u64;
            out = rest;
        }
    }

    /// Cuts a write of whole sectors.
    pub(super) fn cut_write(
        pieces: &mut Vec<Self>,
        off: u64,
        src: &'a [u8],
        piece_bytes: usize,
        durable: bool,
    ) {
        for (index, src) in src.chunks(piece_bytes).enumerate() {
            let off = off + (index * piece_bytes) as u64;
            pieces.push(Self::new(Work::Write { off, src, durable }));
        }
    }
}

/// Properties of the namespace that commands depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub nsid: u32,
    pub namespace: NamespaceIdentity,
    /// Most time that a command may wait while nothing else ends.
    pub timeout: Duration,
}

/// How a run over a queue failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// A command ended with this status; none is in flight.
    Status(Status, i32),
    /// The queue cannot be used before a reset; commands may be in flight.
    Breach(Breach),
}

impl From<Breach> for Failure {
    fn from(breach: Breach) -> Self {
        Self::Breach(breach)
    }
}

impl Target {
    /// Writes a piece's command and data into a free slot.
    fn send(&self, queue: &mut QueuePair, slot: usize, piece: &Piece<'_>, ticket: usize) {
        let shift = self.namespace.sector_shift;
        let transfer = |opcode, first: u64, bytes: usize, flags: u32| Command {
            opcode,
            nsid: self.nsid,
            dwords: [
                first as u32,
                (first >> 32) as u32,
                flags | ((bytes >> shift) as u32 - 1),
                0,
                0,
                0,
            ],
            ..Command::default()
        };
        match &piece.work {
            Work::Read { off, out } => {
                let (first, span) = self.sectors(*off, out.len());
                queue.submit(slot, transfer(io::READ, first, span, 0), span, ticket);
            }
            Work::Write { off, src, durable } => {
                queue.fill(slot, 0, src);
                let flags = if *durable { io::FUA } else { 0 };
                let command = transfer(io::WRITE, off >> shift, src.len(), flags);
                queue.submit(slot, command, src.len(), ticket);
            }
            Work::Flush => {
                let command = Command {
                    opcode: io::FLUSH,
                    nsid: self.nsid,
                    ..Command::default()
                };
                queue.submit(slot, command, 0, ticket);
            }
            Work::Deallocate { ranges } => {
                for (index, (first, sectors)) in ranges.iter().enumerate() {
                    let mut range = [0; RANGE_BYTES];
                    range[4..8].copy_from_slice(&sectors.to_le_bytes());
                    range[8..].copy_from_slice(&first.to_le_bytes());
                    queue.fill(slot, index * RANGE_BYTES, &range);
                }
                let command = Command {
                    opcode: io::DATASET_MANAGEMENT,
                    nsid: self.nsid,
                    dwords: [ranges.len() as u32 - 1, io::DEALLOCATE, 0, 0, 0, 0],
                    ..Command::default()
                };
                queue.submit(slot, command, ranges.len() * RANGE_BYTES, ticket);
            }
        }
    }

    /// Returns the first sector and the bytes of the whole sectors that hold a range.
    const fn sectors(&self, off: u64, len: usize) -> (u64, usize) {
        let sector = self.namespace.sector_bytes();
        let first = off / sector;
        let end = (off + len as u64).next_multiple_of(sector);
        (first, (end - first * sector) as usize)
    }

    /// Handles an ended command. `Ok(true)`: it is to be sent again.
    fn finish(&self, queue: &QueuePair, piece: &mut Piece<'_>, ended: Ended) -> Result<bool, Failure> {
        match ended.status {
            None => {
                if let Work::Read { off, out } = &mut piece.work {
                    let skip = *off % self.namespace.sector_bytes();
                    queue.take(ended.slot, skip as usize, out);
                }
                piece.done = true;
                Ok(false)
            }
            Some(status) => match status.meaning() {
                Meaning::Again if piece.tries < TRIES_MAX => {
                    piece.tries += 1;
                    Ok(true)
                }
                Meaning::Again => Err(Failure::Status(status, libc::EIO)),
                Meaning::Errno(errno) => Err(Failure::Status(status, errno)),
            },
        }
    }

    /// Sends every piece that is not done and waits until all have ended.
    ///
    /// # Errors
    /// `Status`: that of the first command that failed; the others have ended too. `Breach`: at once.
    pub(super) fn drive(
        &self,
        bus: &dyn Bus,
        queue: &mut QueuePair,
        pieces: &mut [Piece<'_>],
        resetting: &AtomicBool,
    ) -> Result<(), Failure> {
        let mut ready: Vec<usize> = (0..pieces.len()).rev().filter(|at| !pieces[*at].done).collect();
        let mut failed = None;
        let mut idle_since: Option<Duration> = None;
        let mut looked = Duration::ZERO;
        loop {
            while failed.is_none() {
                let Some(slot) = queue.free_slot() else { break };
                let Some(ticket) = ready.pop() else { break };
                self.send(queue, slot, &pieces[ticket], ticket);
            }
            queue.ring(bus);
            if queue.in_flight() == 0 {
                return failed.map_or(Ok(()), Err);
            }
            if let Some(ended) = queue.poll()? {
                idle_since = None;
                let piece = pieces
                    .get_mut(ended.ticket)
                    .ok_or(Breach::Protocol("a completion names no command of this run"))?;
                match self.finish(queue, piece, ended) {
                    Ok(true) => ready.push(ended.ticket),
                    Ok(false) => {}
                    Err(failure) => {
                        failed.get_or_insert(failure);
                    }
                }
                continue;
            }
            if resetting.load(Ordering::Relaxed) {
                return Err(Breach::Reset.into());
            }
            let now = bus.now();
            let since = *idle_since.get_or_insert(now);
            let waited = now.saturating_sub(since);
            if waited > LOOK && now.saturating_sub(looked) > LOOK {
                looked = now;
                check_status(bus)?;
            }
            if waited > self.timeout {
                return Err(Breach::Timeout.into());
            }
            bus.pause(waited);
        }
    }
}
