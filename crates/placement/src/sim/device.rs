//! One device: channels that serve pieces of requests, a queue before them, seeks of a disk, stalls of flash.
//! Knows no policy.

use crate::{Op, Tier};
use std::collections::VecDeque;

/// Largest piece that one channel serves: several channels serve larger requests at once.
const PIECE_BYTES: u32 = 64 << 10;
/// Time for which background requests wait for a gap; after it they are served like others, so that they end.
const PATIENCE_NS: u64 = 20_000_000;
/// Number of requests among which a disk chooses the nearest.
const NCQ: usize = 16;

/// Channel time of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Time of each request, in microseconds.
    pub base_us: f64,
    /// Time of each KiB, in microseconds.
    pub kib_us: f64,
}

/// Mechanics of a disk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seek {
    /// Seek to the next track, in microseconds.
    pub least_us: f64,
    /// Seek over all tracks, in microseconds.
    pub most_us: f64,
    /// One rotation, in microseconds.
    pub turn_us: f64,
}

/// Erasing of flash: all channels stop after every `every_bytes` written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stall {
    /// Bytes written between two stalls.
    pub every_bytes: u64,
    /// Length of a stall, in microseconds.
    pub us: f64,
}

/// A kind of device.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Name in tables.
    pub name: &'static str,
    /// Kind of medium.
    pub tier: Tier,
    /// Size in bytes.
    pub total_bytes: u64,
    /// Requests served at once.
    pub parallel: u32,
    /// Cost of reads.
    pub read: Cost,
    /// Cost of writes.
    pub write: Cost,
    /// Seeks, for a disk.
    pub seek: Option<Seek>,
    /// Stalls, for flash.
    pub stall: Option<Stall>,
}

impl Model {
    /// Returns this model with another size.
    #[must_use]
    pub const fn sized(mut self, total_bytes: u64) -> Self {
        self.total_bytes = total_bytes;
        self
    }
}

/// A request at a device.
#[derive(Debug, Clone, Copy)]
pub struct Io {
    /// The driver's number of the request.
    pub tag: usize,
    /// Direction.
    pub op: Op,
    /// First byte on the device.
    pub at: u64,
    /// Bytes not yet started.
    pub bytes: u32,
    /// Whether foreground requests go first.
    pub background: bool,
    /// Time of its arrival, in nanoseconds.
    pub since_ns: u64,
}

/// A piece that a channel has begun.
#[derive(Debug, Clone, Copy)]
pub struct Started {
    /// The number of its request.
    pub tag: usize,
    /// Time of its end, in nanoseconds.
    pub ends_ns: u64,
}

/// A simulated device.
#[derive(Debug)]
pub struct Device {
    /// Its kind.
    pub model: Model,
    /// Its time per request as a multiple of the model's (1: normal).
    pub slow: f64,
    front: VecDeque<Io>,
    back: VecDeque<Io>,
    at_work: u32,
    back_at_work: u32,
    head: u64,
    written: u64,
    stalled_until_ns: u64,
    depth: u32,
    busy_ns: u64,
    depth_ns: u64,
    since_ns: u64,
}

impl Device {
    /// An idle device.
    #[must_use]
    pub const fn new(model: Model) -> Self {
        Self {
            model,
            slow: 1.0,
            front: VecDeque::new(),
            back: VecDeque::new(),
            at_work: 0,
            back_at_work: 0,
            head: 0,
            written: 0,
            stalled_until_ns: 0,
            depth: 0,
            busy_ns: 0,
            depth_ns: 0,
            since_ns: 0,
        }
    }

    /// Number of pieces of a request.
    #[must_use]
    pub const fn pieces(bytes: u32) -> u32 {
        let pieces = bytes.div_ceil(PIECE_BYTES);
        if pieces == 0 { 1 } else { pieces }
    }

    /// Queues a request.
    pub fn submit(&mut self, io: Io, now_ns: u64) {
        self.account(now_ns);
        self.depth += 1;
        if io.background {
            self.back.push_back(io);
        } else {
            self.front.push_back(io);
        }
    }

    /// Ends a piece; `last`: the last one of its request.
    pub fn ended(&mut self, background: bool, last: bool, now_ns: u64) {
        self.account(now_ns);
        self.at_work -= 1;
        if background {
            self.back_at_work -= 1;
        }
        if last {
            self.depth -= 1;
        }
    }

    /// Starts all pieces that can start, the foreground first; background on one channel only.
    pub fn start(&mut self, now_ns: u64, rng: &mut fastrand::Rng, started: &mut Vec<Started>) {
        self.account(now_ns);
        while self.at_work < self.model.parallel {
            let may = self.back_at_work == 0;
            let late = |io: &Io| now_ns.saturating_sub(io.since_ns) >= PATIENCE_NS;
            let background = may
                && self
                    .back
                    .front()
                    .is_some_and(|io| self.front.is_empty() || late(io));
            if !background && self.front.is_empty() {
                return;
            }
            let at = self.nearest(background);
            let queue = if background {
                &mut self.back
            } else {
                &mut self.front
            };
            let Some(mut io) = queue.remove(at) else { return };
            let bytes = io.bytes.min(PIECE_BYTES);
            let (tag, op, from) = (io.tag, io.op, io.at);
            io.at += u64::from(bytes);
            io.bytes -= bytes;
            if io.bytes > 0 {
                queue.push_front(io);
            }
            let us = self.cost_us(op, from, bytes, rng) * self.slow;
            let begins_ns = now_ns.max(self.stalled_until_ns);
            self.stall(op, bytes, begins_ns);
            self.at_work += 1;
            self.back_at_work += u32::from(background);
            let ends_ns = begins_ns + ((us * 1000.0) as u64).max(1);
            started.push(Started { tag, ends_ns });
        }
    }

    /// Whether no foreground request waits for a channel.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.front.is_empty()
    }

    /// Requests queued or in flight.
    #[must_use]
    pub const fn depth(&self) -> u32 {
        self.depth
    }

    /// Channel × nanoseconds in use and request × nanoseconds present, since the last call.
    pub fn take_load(&mut self, now_ns: u64) -> (u64, u64) {
        self.account(now_ns);
        (
            std::mem::take(&mut self.busy_ns),
            std::mem::take(&mut self.depth_ns),
        )
    }

    const fn account(&mut self, now_ns: u64) {
        let ns = now_ns.saturating_sub(self.since_ns);
        self.busy_ns += ns * self.at_work as u64;
        self.depth_ns += ns * self.depth as u64;
        self.since_ns = now_ns;
    }

    /// Index in the queue of the next request: a disk takes the nearest among the oldest, but no request
    /// waits for ever.
    fn nearest(&self, background: bool) -> usize {
        if self.model.seek.is_none() || background {
            return 0;
        }
        let far = |io: &Io| io.at.abs_diff(self.head);
        let near = self.front.iter().take(NCQ).enumerate();
        near.min_by_key(|(at, io)| far(io) + *at as u64 * (self.model.total_bytes / 64))
            .map_or(0, |(at, _)| at)
    }

    fn cost_us(&mut self, op: Op, at: u64, bytes: u32, rng: &mut fastrand::Rng) -> f64 {
        let cost = match op {
            Op::Read => self.model.read,
            Op::Write => self.model.write,
        };
        let mut us = cost.base_us + cost.kib_us * f64::from(bytes) / 1024.0;
        if let Some(seek) = self.model.seek {
            let far = at.abs_diff(self.head);
            if far > 0 {
                let share = (far as f64 / self.model.total_bytes as f64).min(1.0).sqrt();
                us += seek.least_us + (seek.most_us - seek.least_us) * share + seek.turn_us * rng.f64();
            }
            self.head = at + u64::from(bytes);
        } else {
            // Service times vary at random.
            us *= 0.9 + 0.2 * rng.f64();
        }
        us
    }

    fn stall(&mut self, op: Op, bytes: u32, begins_ns: u64) {
        let (Op::Write, Some(stall)) = (op, self.model.stall) else {
            return;
        };
        self.written += u64::from(bytes);
        if self.written >= stall.every_bytes {
            self.written = 0;
            self.stalled_until_ns = begins_ns + (stall.us * self.slow * 1000.0) as u64;
        }
    }
}
