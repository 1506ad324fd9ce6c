//! Numbers for new inodes: requested many at a time, with their leases, and kept by the directories that will
//! need them.

use std::sync::{Arc, Weak};
use varve_format::{InodeKey, LeaseNo};
use varve_ipc::{LeaseMode, NUMBERS_MAX, Request, Response};

use super::{Event, Leases, StartAsker};
use crate::errno::{Errno, OpError, OpResult};
use crate::hash::{KeyMap, KeySet};
use crate::lease::node::Node;
use crate::sync::atomic::Ordering;
use crate::sync::lock_held_long;

/// Numbers in a directory's first request.
const NUMBERS_MIN: u16 = 16;
/// Unused numbers, of all directories together, from which on each request asks for a few only.
const SPARE_MAX: usize = 8192;

/// Numbers for new inodes that are held and not used.
#[derive(Default)]
pub(super) struct Spare {
    /// The directories that keep them.
    pub(super) keepers: KeyMap<Weak<Node>>,
    /// Number of requests for more that are under way.
    pub(super) asking: u32,
    /// Numbers that were recalled while requests were under way: an answer that brings them comes too late.
    pub(super) denied: KeySet,
}

impl Leases {
    /// Has `dir` keep more numbers for new inodes, with their leases: twice as many as the last time, since
    /// it seems to need them.
    pub(crate) fn alloc<T>(&self, dir: &Arc<Node>) -> OpResult<(), T> {
        let near = dir.key();
        let many = {
            let mut spare = self.spare.lock();
            spare.asking += 1;
            spare.keepers.len() >= SPARE_MAX
        };
        let count = {
            let mut numbers = dir.numbers.lock();
            let most = if many { 4 * NUMBERS_MIN } else { NUMBERS_MAX };
            numbers.asked = (2 * numbers.asked).clamp(NUMBERS_MIN, most);
            numbers.asked
        };
        let answer = self
            .call(Request::AllocInodes { near, count })
            .map_err(OpError::from);
        let answer = answer.and_then(|answer| match answer {
            Response::Inodes(batch) if !batch.is_empty() && batch.len() <= usize::from(count) => Ok(batch),
            _ => Err(OpError::Failed(Errno(libc::EIO))),
        });
        // In this order, so that a thread that finds the keeper of a number finds the number.
        let mut numbers = dir.numbers.lock();
        let mut spare = self.spare.lock();
        let answer = answer.map(|batch| {
            // Taken from the end: the lowest first, so that neighbours in time are neighbours on media;
            // numbers that were kept before go first.
            let before = std::mem::take(&mut numbers.kept);
            for number in batch.into_iter().rev() {
                if !spare.denied.contains(&number.0) {
                    spare.keepers.insert(number.0, Arc::downgrade(dir));
                    numbers.kept.push(number);
                }
            }
            numbers.kept.extend(before);
        });
        spare.asking -= 1;
        if spare.asking == 0 {
            spare.denied = KeySet::default();
        }
        answer
    }

    /// Has `dir` keep numbers after it had none, unless another thread has done that meanwhile: of many
    /// threads that make files in a directory at once, one asks. If each asked, for twice as many as the one
    /// before, a session of 50 threads would hold tens of thousands.
    pub(crate) fn provide<T>(&self, dir: &Arc<Node>) -> OpResult<(), T> {
        let _one = lock_held_long(&*self.clock, &dir.provider);
        if dir.numbers.lock().kept.is_empty() {
            self.alloc(dir)?;
        }
        Ok(())
    }

    /// Carries out the request of [`take_number`](Self::take_number): gets numbers before they are needed,
    /// for a directory whose lease is still held.
    pub(crate) fn ask_ahead(&self, dir: &Arc<Node>) {
        if dir.try_pin(LeaseMode::Write) {
            // A failure shows when a thread needs a number.
            let _: OpResult<(), ()> = self.alloc(dir);
            self.unpin(dir);
        }
        dir.numbers.lock().asking = false;
    }

    /// Takes a number that `dir` keeps: a recall of its lease waits until [`adopt`](Self::adopt) or
    /// [`unreserve`](Self::unreserve). A directory that has asked more than once is given more before it runs
    /// out.
    pub(crate) fn take_number(&self, dir: &Arc<Node>) -> Option<(InodeKey, LeaseNo)> {
        let mut numbers = dir.numbers.lock();
        let number = numbers.kept.pop()?;
        self.reserved.lock().insert(number.0);
        self.spare.lock().keepers.remove(&number.0);
        let few = numbers.kept.len() < usize::from(numbers.asked / 2);
        let asks = few && numbers.asked > NUMBERS_MIN && !numbers.asking;
        numbers.asking |= asks;
        drop(numbers);
        if asks {
            self.need_asker();
            if self.asks.send(Arc::downgrade(dir)).is_err() {
                dir.numbers.lock().asking = false;
            }
        }
        Some(number)
    }

    /// Has `start` called when numbers are first to be asked for ahead: most programs make few files.
    pub(crate) fn ask_by(&self, start: StartAsker) {
        *self.asker.lock() = Some(start);
    }

    /// Has the worker start the thread that asks ahead, unless it was told so: a signal handler, which may have
    /// interrupted `malloc`, must not start one.
    fn need_asker(&self) {
        if !self.needs_asker.swap(true, Ordering::Relaxed) {
            self.tell(Event::StartAsker);
        }
    }

    /// Starts the thread that asks ahead. Without one each number is asked for when it is needed.
    pub(crate) fn start_asker(&self) {
        let start = self.asker.lock().take();
        if let Some(Err(error)) = start.map(|start| start()) {
            tracing::debug!(%error, "no thread asks for inode numbers ahead");
        }
    }

    /// Returns an unused number to `dir`.
    pub(crate) fn put_number_back(&self, dir: &Arc<Node>, number: (InodeKey, LeaseNo)) {
        {
            let mut numbers = dir.numbers.lock();
            self.spare.lock().keepers.insert(number.0, Arc::downgrade(dir));
            numbers.kept.push(number);
        }
        self.unreserve(number.0);
    }

    /// Takes all numbers that a directory keeps, since its own lease goes.
    pub(crate) fn take_spare(&self, dir: &Node) -> Vec<(InodeKey, LeaseNo)> {
        let kept = {
            let mut numbers = dir.numbers.lock();
            numbers.asked = 0;
            std::mem::take(&mut numbers.kept)
        };
        let mut spare = self.spare.lock();
        for (key, _) in &kept {
            spare.keepers.remove(key);
        }
        kept
    }
}
