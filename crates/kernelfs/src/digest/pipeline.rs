//! Pipelining: a thread gathers a log's next batch while the previous one is applied. Decides nothing:
//! `varve_digest` decides which entries count, the caller when a batch is applied.
//!
//! # Why a prefetched batch equals one gathered later
//! The caller holds the session's reader from before the first batch until [`BatchPrefetch`] is dropped, so
//! no other thread moves the cursors, scans for a seal, or digests. Under that lock:
//! - [`BatchPrefetch::take`] hands a batch out only if the previous batch was digested whole: then it equals
//!   the result of [`SessionLog::gather`], since it starts at that batch's end and cursors. If the previous
//!   batch failed, or was digested in part, the prefetched one is dropped. Gathering changes nothing, so its
//!   entries are found again.
//! - A batch gathered earlier may hold fewer entries, never more: entries committed before the digest was
//!   requested are in the log, because a client reuses a chunk only when its session page reports the chunk
//!   as digested.
//! - The thread that read an entry also reads the newest transaction, after the entry.
//! - A seal takes the reader before it looks for the end of the log. Everything applied by then lies below
//!   that end; a batch that was gathered and not applied is dropped, and the scan sees its entries in the
//!   log.
//! - A digest has one such thread and one prefetched batch, so at most two batches are in memory.

use crate::digest::{Batch, SessionLog};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, Scope};
use varve_format::{LogSeq, seeded};
use varve_media::MediaError;

type Gathered = Result<Batch, MediaError>;

/// Both ends of the thread's channels: start positions to it, gathered batches from it.
type Thread = (SyncSender<(SessionLog, LogSeq)>, Receiver<Gathered>);

/// Prefetches batches. Dropping it ends its thread, at the end of the batch under way.
pub(crate) struct BatchPrefetch<'s, 'e, F> {
    scope: &'s Scope<'s, 'e>,
    gather: Option<F>,
    thread: Option<Thread>,
    /// Where the batch under way starts.
    under_way: Option<LogSeq>,
}

impl<'s, 'e, F> BatchPrefetch<'s, 'e, F>
where
    F: Fn(&SessionLog, LogSeq) -> Gathered + Send + 's,
{
    /// Starts without a thread and with nothing under way. `gather` is called with a log's reading end and
    /// its digested number.
    pub(crate) const fn new(scope: &'s Scope<'s, 'e>, gather: F) -> Self {
        Self {
            scope,
            gather: Some(gather),
            thread: None,
            under_way: None,
        }
    }

    /// Starts to gather the batch after `batch`. Does nothing if no thread can be started.
    pub(crate) fn begin(&mut self, log: &SessionLog, batch: &Batch) {
        if self.thread.is_none()
            && let Some(gather) = self.gather.take()
        {
            self.thread = spawn(self.scope, gather);
        }
        if let Some((next, _)) = &self.thread
            && self.under_way.is_none()
            && next.send((log.after(batch), batch.upto)).is_ok()
        {
            self.under_way = Some(batch.upto);
        }
    }

    /// Returns the prefetched batch, if it follows `digested`; waits until it is gathered. `None`: the caller
    /// gathers.
    pub(crate) fn take(&mut self, digested: LogSeq) -> Option<Gathered> {
        let start = self.under_way.take()?;
        let (_, gathered) = self.thread.as_ref()?;
        let gathered = gathered.recv().ok()?;
        (start == digested).then_some(gathered)
    }
}

fn spawn<'s, F>(scope: &'s Scope<'s, '_>, gather: F) -> Option<Thread>
where
    F: Fn(&SessionLog, LogSeq) -> Gathered + Send + 's,
{
    let (next, starts) = sync_channel::<(SessionLog, LogSeq)>(1);
    let (done, gathered) = sync_channel(1);
    let bug = seeded::current();
    let work = move || {
        seeded::arm(bug);
        for (log, digested) in starts {
            if done.send(gather(&log, digested)).is_err() {
                return;
            }
        }
    };
    // A machine without threads to spare digests one batch after the other.
    Builder::new()
        .name("varve-gather".into())
        .spawn_scoped(scope, work)
        .ok()?;
    Some((next, gathered))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::BatchPrefetch;
    use crate::digest::{Batch, SessionLog};
    use std::sync::Mutex;
    use varve_format::{LogSeq, SessionId};

    fn batch(upto: u64) -> Batch {
        let mut batch = Batch::default();
        batch.upto = LogSeq(upto);
        batch
    }

    #[test]
    fn ahead_hands_a_batch_out_only_when_the_one_before_was_digested_whole() {
        let log = SessionLog::new(SessionId(1));
        let starts = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let mut ahead = BatchPrefetch::new(scope, |_, digested| {
                starts.lock().unwrap().push(digested.0);
                Ok(batch(digested.0 + 10))
            });
            assert!(ahead.take(LogSeq(0)).is_none(), "nothing was begun");
            ahead.begin(&log, &batch(10));
            let next = ahead.take(LogSeq(10)).unwrap().unwrap();
            assert_eq!(next.upto, LogSeq(20));
            ahead.begin(&log, &next);
            assert!(
                ahead.take(LogSeq(15)).is_none(),
                "the batch before was digested in part"
            );
            assert!(ahead.take(LogSeq(20)).is_none(), "a batch is handed out once");
            ahead.begin(&log, &batch(15));
            assert_eq!(ahead.take(LogSeq(15)).unwrap().unwrap().upto, LogSeq(25));
            // A drop with a batch under way ends the thread, and the scope.
            ahead.begin(&log, &batch(25));
        });
        assert_eq!(*starts.lock().unwrap(), [10, 20, 15, 25]);
    }
}
