//! The session's own threads: one receives the daemon's upcalls, one gives leases back, and one, started when
//! it is first needed, asks for numbers of new inodes ahead. They own the order of the daemon's requests, and
//! know no names and no data.
//!
//! The first thread never waits: it returns unused space and obeys barriers at once (under an inode's lock,
//! which no request holds across a call to the daemon), and passes everything about leases to the second. The
//! second waits for the daemon's `Release` only. Waits for the kernel have threads of their own.

use crossbeam_channel::{Receiver, RecvError, RecvTimeoutError, TryRecvError};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;
use varve_format::{InodeKey, LogSeq};
use varve_ipc::{Clock, LeaseMode, Request, Upcall};

use crate::lease::{Event, Leases, Node, Recalls, Surroundings};
use crate::options::{CacheObserver, Copies};
use crate::session::Session;
use crate::sync::spawn;

/// Longest sleep of a thread before it checks whether its session still exists.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Interval at which log space is reclaimed when nothing else happens.
const RECLAIM: Duration = Duration::from_millis(500);
/// Interval of ticks while the kernel is waited for.
const TICK: Duration = Duration::from_millis(50);
/// Most events that are acted on before leases that are ready are given back.
const EVENTS_AT_ONCE: usize = 32;

impl Surroundings for Session {
    fn last_seq(&self, node: &Node) -> LogSeq {
        node.inode.last_seq(self.log_last())
    }

    fn log_last(&self) -> LogSeq {
        self.data.log().map_or(LogSeq(0), crate::log::Log::last_seq)
    }

    fn is_open(&self, key: InodeKey) -> bool {
        self.opens.is_open(key)
    }

    fn observer(&self) -> Option<Arc<dyn CacheObserver>> {
        self.options.observer.clone()
    }

    fn copies(&self) -> Option<Arc<dyn Copies>> {
        self.options.copies.clone()
    }
}

/// Starts the threads of `session`. They end when it is lost or dropped.
pub(crate) fn start(
    session: &Arc<Session>,
    inbox: Receiver<Event>,
    asked: Receiver<Weak<Node>>,
    recalls: Recalls,
) -> std::io::Result<()> {
    if cfg!(feature = "shuttle") {
        // Test threads cannot wait for the session's: the test does the worker's part.
        return Ok(());
    }
    let clock = &session.options.clock;
    let weak = Arc::downgrade(session);
    spawn(&**clock, "varve-release", {
        let clock = Arc::clone(clock);
        move || give_back(&weak, &*clock, &inbox, recalls)
    })?;
    ask_ahead(&session.leases, clock, asked);
    let weak = Arc::downgrade(session);
    let link = Arc::clone(&session.link);
    spawn(&**clock, "varve-upcall", move || {
        loop {
            let upcall = link.upcall(LOOK_AGAIN);
            let Some(session) = weak.upgrade() else { return };
            if session.leases.is_lost() {
                return;
            }
            match upcall {
                Ok(None) => {}
                Ok(Some(upcall)) => obey(&session, upcall),
                Err(_) => return session.lose(),
            }
        }
    })?;
    if session.welcome.sync_ms > 0 {
        let (weak, pause) = (
            Arc::downgrade(session),
            Duration::from_millis(session.welcome.sync_ms),
        );
        let own = Arc::clone(clock);
        let (ahead, asked) = crossbeam_channel::bounded(1);
        session.data.tell_ahead(ahead);
        spawn(&**clock, "varve-sync", move || {
            sync_now_and_then(&weak, &*own, pause, &asked)
        })?;
    }
    Ok(())
}

/// Starts the thread that asks for numbers of new inodes, when it is first needed.
fn ask_ahead(leases: &Arc<Leases>, clock: &Arc<dyn Clock>, asked: Receiver<Weak<Node>>) {
    let (weak, clock) = (Arc::downgrade(leases), Arc::clone(clock));
    leases.ask_by(Box::new(move || {
        let (own, queue) = (Arc::clone(&clock), asked.clone());
        let started = spawn(&*clock, "varve-numbers", move || {
            // The leases hold the other end.
            while let Ok(dir) = next(&*own, &asked) {
                if let (Some(leases), Some(dir)) = (weak.upgrade(), dir.upgrade()) {
                    leases.ask_ahead(&dir);
                }
            }
        });
        if started.is_err() {
            let dirs = queue.try_iter().filter_map(|dir| dir.upgrade());
            dirs.for_each(|dir| dir.numbers.lock().asking = false);
        }
        started
    }));
}

/// Receives the next message; waits without bound.
fn next<T>(clock: &dyn Clock, from: &Receiver<T>) -> Result<T, RecvError> {
    if !clock.takes_turns() {
        return from.recv();
    }
    loop {
        match from.try_recv() {
            Ok(message) => return Ok(message),
            Err(TryRecvError::Empty) => clock.pause(LOOK_AGAIN),
            Err(TryRecvError::Disconnected) => return Err(RecvError),
        }
    }
}

/// Receives the next message; waits for at most `pause`.
fn next_within<T>(clock: &dyn Clock, from: &Receiver<T>, pause: Duration) -> Result<T, RecvTimeoutError> {
    if !clock.takes_turns() {
        return from.recv_timeout(pause);
    }
    let until = clock.moment() + pause;
    loop {
        match from.try_recv() {
            Ok(message) => return Ok(message),
            Err(TryRecvError::Disconnected) => return Err(RecvTimeoutError::Disconnected),
            Err(TryRecvError::Empty) => {}
        }
        let left = until.saturating_sub(clock.moment());
        if left.is_zero() {
            return Err(RecvTimeoutError::Timeout);
        }
        clock.pause(left);
    }
}

fn obey(session: &Arc<Session>, upcall: Upcall) {
    match upcall {
        Upcall::Revoke { key, lease, keep } => session.leases.tell(Event::Revoke {
            key,
            number: lease,
            only_read: keep == Some(LeaseMode::Read),
        }),
        Upcall::Barrier { tx, keys } => {
            session.leases.note_barrier();
            for key in keys {
                if let Some(node) = session.node(key) {
                    session.data.forget_extents(&node.inode);
                }
            }
            // A failed answer means that the link is gone: the next upcall reports that.
            let _ = session.link.call(Request::BarrierAck { tx });
        }
        Upcall::ReclaimReservations => session.data.return_reservation(),
        Upcall::Sharing => {
            session.set_shared(true);
            let _ = session.link.call(Request::SharingNoted);
        }
        Upcall::Exclusive => session.set_shared(false),
        Upcall::Sealed => session.lose(),
    }
}

fn give_back(weak: &Weak<Session>, clock: &dyn Clock, inbox: &Receiver<Event>, mut recalls: Recalls) {
    loop {
        let pause = match (recalls.has_left(), recalls.has_passes()) {
            (true, _) => Duration::ZERO,
            (_, true) => TICK,
            _ => RECLAIM,
        };
        let pause = recalls.next_expiry().map_or(pause, |left| left.min(pause));
        let first = next_within(clock, inbox, pause);
        let Some(session) = weak.upgrade() else { return };
        match first {
            Ok(event) => {
                let more = std::iter::from_fn(|| inbox.try_recv().ok());
                for event in std::iter::once(event).chain(more).take(EVENTS_AT_ONCE) {
                    if matches!(event, Event::Stop) {
                        return;
                    }
                    recalls.take(event, &*session);
                }
            }
            Err(RecvTimeoutError::Timeout) if pause < TICK => {}
            Err(RecvTimeoutError::Timeout) => {
                session.data.reclaim();
                session.data.report();
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
        recalls.tick(&*session);
        if session.leases.is_lost() {
            tracing::debug!(under_way = ?recalls.describe(), "the session is lost");
            return;
        }
        // Before others have the leases.
        session
            .expiring_ms
            .store(recalls.expiring_ms(), Ordering::Relaxed);
        if recalls.flush(&*session).is_err() {
            return session.lose();
        }
        session.revoked.store(recalls.revoked(), Ordering::Relaxed);
    }
}

/// Syncs the log every `pause`, and in between readies the log on request.
fn sync_now_and_then(weak: &Weak<Session>, clock: &dyn Clock, pause: Duration, asked: &Receiver<()>) {
    loop {
        let until = clock.moment() + pause;
        loop {
            let left = until.saturating_sub(clock.moment());
            if left.is_zero() {
                break;
            }
            let ahead = next_within(clock, asked, left.min(LOOK_AGAIN));
            let Some(session) = weak.upgrade() else { return };
            if session.leases.is_lost() {
                return;
            }
            match ahead {
                Ok(()) => session.data.ready_log(),
                Err(RecvTimeoutError::Timeout) => {}
                // The session's data is gone, and so is the session.
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        let Some(session) = weak.upgrade() else { return };
        if let Err(error) = session.data.sync_unasked() {
            tracing::error!(%error, "the log could not be made durable");
        }
        session.data.report();
    }
}
