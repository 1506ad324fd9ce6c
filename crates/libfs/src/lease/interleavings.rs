//! A session's leases, its worker and a daemon under a scheduler that tries interleavings: the daemon still
//! counts every entry that a request logs under its pins. Run by `cargo test -p varve-libfs --features
//! shuttle --lib interleavings`.
#![allow(clippy::unwrap_used)]

use super::Use;
use super::node::Node;
use super::recall::{Event, Recalls, Surroundings};
use super::table::Leases;
use crate::options::CacheObserver;
use crate::seeded::{self, Bug};
use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use varve_format::{InodeAttr, InodeKey, LeaseNo, LogSeq, SessionId};
use varve_ipc::{Grant, IpcError, LeaseMode, Link, Page, Request, Response, Upcall, Want};

const ROOT: InodeKey = InodeKey::ROOT;
const DIR: InodeKey = InodeKey::new(5, 1);

/// The daemon's state for this session.
#[derive(Default)]
struct Book {
    held: HashMap<InodeKey, LeaseNo>,
    granted: u64,
    /// Last number of the log.
    last: u64,
    /// The last number that concerns each inode.
    logged: HashMap<InodeKey, u64>,
}

/// A daemon that grants at once. The test stands for other sessions that want a lease.
#[derive(Default)]
struct Daemon(Mutex<Book>);

impl Daemon {
    /// Logs an operation on `keys`, as a request with pins on them does.
    fn log(&self, keys: &[InodeKey]) {
        let mut book = self.0.lock().unwrap();
        book.last += 1;
        let seq = book.last;
        for key in keys {
            assert!(
                book.held.contains_key(key),
                "{seq} is about {key}, which was given back"
            );
            book.logged.insert(*key, seq);
        }
    }

    fn last_about(&self, key: InodeKey) -> u64 {
        self.0.lock().unwrap().logged.get(&key).copied().unwrap_or(0)
    }
}

impl Link for Daemon {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        let answer = match request {
            Request::Acquire { wants } | Request::AcquireNear { wants, .. } => {
                let mut book = self.0.lock().unwrap();
                let mut grant = |want: &Want| {
                    let fresh = LeaseNo(book.granted + 1);
                    let lease = *book.held.entry(want.key).or_insert(fresh);
                    book.granted += u64::from(lease == fresh);
                    Grant {
                        lease,
                        mode: LeaseMode::Write,
                        replaces: None,
                        attr: InodeAttr::new(want.key, 0o040_755, 0),
                        told: varve_ipc::Told::default(),
                    }
                };
                Response::Granted(wants.iter().map(&mut grant).collect())
            }
            Request::Release { items } => {
                let mut book = self.0.lock().unwrap();
                for item in items {
                    if book.held.get(&item.key) != Some(&item.lease) {
                        continue;
                    }
                    let logged = book.logged.get(&item.key).copied().unwrap_or(0);
                    assert!(
                        logged <= item.last_seq.0,
                        "{logged} is about {}, of which the release names {:?}",
                        item.key,
                        item.last_seq
                    );
                    book.held.remove(&item.key);
                }
                Response::Done
            }
            other => panic!("{other:?}"),
        };
        // The answer is on its way.
        thread::yield_now();
        Ok(answer)
    }

    fn upcall(&self, _: Duration) -> Result<Option<Upcall>, IpcError> {
        Ok(None)
    }
}

struct Around(Arc<Daemon>);

impl Surroundings for Around {
    fn last_seq(&self, node: &Node) -> LogSeq {
        LogSeq(self.0.last_about(node.key()))
    }

    fn log_last(&self) -> LogSeq {
        LogSeq(self.0.0.lock().unwrap().last)
    }

    fn is_open(&self, _: InodeKey) -> bool {
        false
    }

    fn observer(&self) -> Option<Arc<dyn CacheObserver>> {
        None
    }
}

fn want(key: InodeKey) -> Want {
    let mode = LeaseMode::Write;
    Want { key, mode }
}

/// One thread changes a directory and its parent, another the parent alone, in its slot if possible; both
/// leases are recalled meanwhile.
fn pinned_is_not_given_back() {
    let daemon = Arc::new(Daemon::default());
    let page = Arc::new(Page::heap(SessionId(1)));
    let (events, inbox) = crossbeam_channel::unbounded();
    let link = Arc::clone(&daemon) as Arc<dyn Link>;
    let leases = Arc::new(Leases::new(
        link,
        page,
        events.clone(),
        crossbeam_channel::unbounded().0,
        64,
        false,
    ));
    let stop = Arc::new(AtomicU64::new(0));
    let worker = {
        let (leases, stop) = (Arc::clone(&leases), Arc::clone(&stop));
        let around = Around(Arc::clone(&daemon));
        let mut recalls = Recalls::new(leases, events, 100_000);
        thread::spawn(move || {
            loop {
                let last = stop.load(Ordering::SeqCst) == 1;
                let mut any = false;
                while let Ok(event) = inbox.try_recv() {
                    recalls.take(event, &around);
                    any = true;
                }
                recalls.flush(&around).unwrap();
                if last && !any {
                    return;
                }
                thread::yield_now();
            }
        })
    };
    let both = {
        let (leases, daemon) = (Arc::clone(&leases), Arc::clone(&daemon));
        thread::spawn(move || {
            for _ in 0..2 {
                let pins = leases.pin::<()>(&[want(ROOT), want(DIR)], Use::Own).unwrap();
                daemon.log(&[ROOT, DIR]);
                drop(pins);
            }
        })
    };
    let one = {
        let (leases, daemon) = (Arc::clone(&leases), Arc::clone(&daemon));
        thread::spawn(move || {
            for _ in 0..2 {
                let node = leases.get(ROOT);
                let slot = node
                    .as_ref()
                    .and_then(|node| leases.try_pin_slot(node, LeaseMode::Write, Use::Own));
                if slot.is_some() {
                    daemon.log(&[ROOT]);
                    continue;
                }
                let pin = leases.pin_one::<()>(ROOT, LeaseMode::Write, Use::Own).unwrap();
                daemon.log(&[ROOT]);
                drop(pin);
            }
        })
    };
    for key in [ROOT, DIR, ROOT] {
        let held = daemon.0.lock().unwrap().held.get(&key).copied();
        if let Some(number) = held {
            leases.tell(Event::Revoke {
                key,
                number,
                only_read: false,
            });
        }
        thread::yield_now();
    }
    both.join().unwrap();
    one.join().unwrap();
    // All granted leases go back in the end, and nothing is pinned.
    for key in [ROOT, DIR] {
        let held = daemon.0.lock().unwrap().held.get(&key).copied();
        if let Some(number) = held {
            leases.tell(Event::Revoke {
                key,
                number,
                only_read: false,
            });
        }
    }
    stop.store(1, Ordering::SeqCst);
    worker.join().unwrap();
    assert!(daemon.0.lock().unwrap().held.is_empty());
    assert_eq!(leases.all().iter().map(|node| node.pins()).sum::<u64>(), 0);
}

#[test]
fn what_is_logged_under_a_pin_counts_when_leases_are_wanted_back() {
    shuttle::check_random(pinned_is_not_given_back, 4_000);
    shuttle::check_pct(pinned_is_not_given_back, 2_000, 3);
}

#[test]
fn lease_that_counts_as_given_back_too_late_is_caught() {
    let found = seeded::is_found(Bug::GivenBackLate, &[pinned_is_not_given_back]);
    assert!(found, "the seeded bug is not found");
}
