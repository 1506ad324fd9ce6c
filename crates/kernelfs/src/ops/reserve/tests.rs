//! Grants when space is short: clients that answer, late, too soon, never, or with lies; step by step, or in
//! threads that wait for each other.
#![allow(clippy::unwrap_used)]

use super::Reservations;
use crate::common::{Client, ROOT, World, write_file};
use crate::config::{Config, Users};
use crate::ops::teardown::Teardown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use varve_format::log::CHUNK_BYTES;
use varve_format::{FallocateMode, InodeKey, LogOp};
use varve_ipc::{IpcError, Link, Request, Response, Service, SessionPage, StatFs, Upcall};

fn available(world: &World) -> u64 {
    world.kernel.store.space().available
}

fn reserved(world: &World) -> u64 {
    world.kernel.store.space().reserved
}

/// Requests exactly this number of blocks.
fn ask(client: &Client, blocks: u64) -> Result<u64, IpcError> {
    let blocks = blocks as u32;
    let least = blocks;
    match client.link.call(Request::Reserve { blocks, least })? {
        Response::Reserved(granted) => Ok(u64::from(granted)),
        other => panic!("{other:?}"),
    }
}

fn back(client: &Client, blocks: u64, of: u64) {
    let answer = client.link.call(Request::ReturnReservation { blocks, of });
    assert_eq!(answer, Ok(Response::Done));
}

const NO_SPACE: Result<u64, IpcError> = Err(IpcError::Errno(libc::ENOSPC));

fn wanted(client: &Client) {
    assert_eq!(client.upcall(), Upcall::ReclaimReservations);
}

/// Whether the daemon has asked the client for its reservations.
fn is_asked(client: &Client) -> bool {
    let upcall = client.link.upcall(Duration::ZERO);
    matches!(upcall, Ok(Some(Upcall::ReclaimReservations)))
}

fn stat(client: &Client) -> StatFs {
    match client.link.call(Request::StatFs).unwrap() {
        Response::StatFs(stat) => stat,
        other => panic!("{other:?}"),
    }
}

/// Blocks that a file is given at once, and their highest cost.
const BLOCKS: u64 = 100;
const COST: u64 = BLOCKS + 3;

/// Logs the `number`th hundred of a file's blocks.
fn take_blocks(client: &mut Client, key: InodeKey, number: u64) {
    client.log_op(&LogOp::Fallocate {
        key,
        mode: FallocateMode::Allocate,
        offset: number * BLOCKS * 4096,
        len: BLOCKS * 4096,
    });
}

/// Whether all its logged entries are digested, or refused.
fn is_digested(client: &Client) -> bool {
    client.page.digested().0 == client.seq
}

/// Makes a file and keeps only the file's lease.
fn file(client: &mut Client, name: &[u8]) -> InodeKey {
    let key = write_file(client, name, b"x");
    let lease = client.write_lease(ROOT).lease;
    client.release(ROOT, lease, true);
    key
}

#[test]
fn unused_credits_of_another_come_back_before_anybody_is_refused() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let all = available(&world);
    assert_eq!(ask(&a, all - 100), Ok(all - 100));
    assert_eq!(ask(&b, 90), Ok(90));
    assert!(!is_asked(&a), "there was enough");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wanted(&a);
            // Half of it is used.
            back(&a, all / 2, all - 100);
        });
        assert_eq!(ask(&b, all / 2), Ok(all / 2));
    });
    assert_eq!(reserved(&world), all - 10);
    // The asking session's own blocks are recalled, too: its threads that do not ask may have them.
    wanted(&b);
}

#[test]
fn nobody_is_asked_for_what_does_not_help() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let all = available(&world);
    assert_eq!(ask(&a, all / 2), Ok(all / 2));
    assert_eq!(ask(&b, all + 1), NO_SPACE);
    assert!(!is_asked(&a));
    let most = world.config.credits_max_blocks + 1;
    assert_eq!(ask(&b, most), NO_SPACE);
    for (blocks, least) in [(0, 0), (1, 2)] {
        let answer = b.link.call(Request::Reserve { blocks, least });
        assert_eq!(answer, Err(IpcError::Errno(libc::EINVAL)));
    }
}

#[test]
fn who_asks_for_many_is_given_a_part_of_the_last_ones() {
    let world = World::new();
    let a = world.client();
    let all = available(&world);
    let wish = Request::Reserve {
        blocks: 16_384,
        least: 1,
    };
    let mut before = all;
    while before > 20 {
        let Response::Reserved(granted) = a.link.call(wish.clone()).unwrap() else {
            panic!()
        };
        // Never less than a part of the request while enough is left, and never more than half of the rest.
        let granted = u64::from(granted);
        assert!(granted <= (before / 2).max(2048) && granted >= before.min(4) / 4);
        before -= granted;
        assert_eq!(available(&world), before);
    }
}

#[test]
fn client_that_does_not_answer_is_sealed_in_time_and_what_it_logged_stays() {
    let world = World::new();
    let (mut stopped, b) = (world.client(), world.client());
    let all = available(&world);
    let key = write_file(&mut stopped, b"f", b"kept");
    let left = available(&world);
    assert_eq!(ask(&stopped, left - 10), Ok(left - 10));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The client was asked; the time passes.
            wanted(&stopped);
            assert!(stopped.is_live());
            while !over.load(Ordering::SeqCst) {
                world.clock.advance_ms(10);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let before_ms = world.kernel.now_ms();
        let granted = ask(&b, left - 100);
        let waited_ms = world.kernel.now_ms() - before_ms;
        over.store(true, Ordering::SeqCst);
        assert_eq!(granted, Ok(left - 100));
        assert!(waited_ms >= world.config.lease_ms, "{waited_ms} ms");
    });
    assert!(!stopped.is_live() && b.is_live());
    // The client runs again: it has lost nothing.
    assert_eq!(
        stopped.link.call(Request::ReturnReservation { blocks: 5, of: 5 }),
        Err(IpcError::Sealed)
    );
    let resumed = stopped.resume(&world.kernel, vec![key]);
    resumed.read_lease(key);
    assert_eq!(resumed.read(key, 10), b"kept");
    back(&b, left - 100, left - 100);
    assert_eq!(reserved(&world), 0);
    assert!(available(&world) + 10 >= all);
    world.check();
}

#[test]
fn clients_that_do_not_answer_are_waited_for_all_at_once() {
    let world = World::new();
    let stopped: Vec<_> = (0..8).map(|_| world.client()).collect();
    let b = world.client();
    let all = available(&world);
    for client in &stopped {
        assert_eq!(ask(client, all / 8), Ok(all / 8));
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            stopped.iter().for_each(wanted);
            while !over.load(Ordering::SeqCst) {
                world.clock.advance_ms(10);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let before_ms = world.kernel.now_ms();
        let granted = ask(&b, all);
        let waited_ms = world.kernel.now_ms() - before_ms;
        over.store(true, Ordering::SeqCst);
        assert_eq!(granted, Ok(all));
        assert!(waited_ms < 2 * world.config.lease_ms, "{waited_ms} ms");
    });
    assert_eq!(world.kernel.sessions(), 1);
}

/// The clock stands still, and no thread seals the sessions: the wait still has a bound.
#[test]
fn search_ends_when_neither_answers_nor_time_come() {
    let world = World::with(crate::Config {
        lease_ms: 100,
        users: crate::Users::All,
        ..crate::Config::default()
    });
    let (silent, b) = (world.client(), world.client());
    let all = available(&world);
    assert_eq!(ask(&silent, all / 2), Ok(all / 2));
    let began = Instant::now();
    assert_eq!(ask(&b, all), NO_SPACE);
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn client_that_did_not_know_of_a_grant_is_asked_again() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let all = available(&world);
    let half = all / 2;
    assert_eq!(ask(&a, half), Ok(half));
    assert_eq!(ask(&a, half), Ok(half));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The answer to the second grant has not come: the first grant is used.
            wanted(&a);
            back(&a, 0, half);
            wanted(&a);
            back(&a, half, 2 * half);
        });
        assert_eq!(ask(&b, half), Ok(half));
    });
    // A client that never learns of the grant is late.
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wanted(&b);
            back(&b, 0, half);
            while !over.load(Ordering::SeqCst) {
                while a.is_live() && is_asked(&a) {
                    let _ = a.link.call(Request::ReturnReservation { blocks: 0, of: 0 });
                }
                world.clock.advance_ms(10);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let granted = ask(&b, half);
        over.store(true, Ordering::SeqCst);
        assert_eq!(granted, Ok(half));
    });
    assert!(!a.is_live());
}

/// A client's worker, which takes from the stock and no more.
struct Worker<'c> {
    client: &'c Client,
    stock: parking_lot::Mutex<(u64, u64)>,
}

impl Worker<'_> {
    fn ask(&self, blocks: u64) -> Result<u64, IpcError> {
        let granted = ask(self.client, blocks)?;
        let mut stock = self.stock.lock();
        stock.0 += granted;
        stock.1 += granted;
        Ok(granted)
    }

    /// Uses up to `blocks` of its stock, for good.
    fn use_up(&self, blocks: u64) -> u64 {
        let mut stock = self.stock.lock();
        let used = stock.0.min(blocks);
        stock.0 -= used;
        used
    }

    fn serve(&self, over: &AtomicBool) {
        while !over.load(Ordering::SeqCst) {
            let Ok(asked) = self.client.link.upcall(Duration::from_millis(1)) else {
                return;
            };
            if asked == Some(Upcall::ReclaimReservations) {
                let (blocks, of) = {
                    let mut stock = self.stock.lock();
                    (std::mem::take(&mut stock.0), stock.1)
                };
                back(self.client, blocks, of);
            }
        }
    }
}

#[test]
fn sessions_that_all_ask_at_once_all_come_to_an_end_and_use_up_all_there_is() {
    let world = World::new();
    let clients: Vec<_> = (0..6).map(|_| world.client()).collect();
    let all = available(&world);
    let workers: Vec<_> = clients
        .iter()
        .map(|client| Worker {
            client,
            stock: parking_lot::Mutex::default(),
        })
        .collect();
    let over = AtomicBool::new(false);
    let used: u64 = std::thread::scope(|scope| {
        for worker in &workers {
            scope.spawn(|| worker.serve(&over));
        }
        // Each thread asks for more than it needs, and for more while others are asked for theirs.
        let ask = |worker: &Worker<'_>, number: u64| {
            let mut used = 0;
            while worker.ask(97 + number).is_ok() {
                used += worker.use_up(50);
            }
            while worker.ask(1).is_ok() {
                used += worker.use_up(1);
            }
            used
        };
        let numbered = workers.iter().zip(0..);
        let asking: Vec<_> = numbered
            .map(|(worker, number)| scope.spawn(move || ask(worker, number)))
            .collect();
        let used = asking.into_iter().map(|thread| thread.join().unwrap()).sum();
        over.store(true, Ordering::SeqCst);
        used
    });
    let kept: u64 = workers.iter().map(|worker| worker.stock.lock().0).sum();
    assert_eq!(reserved(&world), used + kept);
    assert!(clients.iter().all(Client::is_live));
    // At the last ENOSPC no session had blocks that were not in use.
    assert!(used + 6 >= all, "{used} of {all}");
}

#[test]
fn credits_of_a_session_that_ends_while_it_is_asked_come_back() {
    for background in [false, true] {
        let world = World::new();
        let (mut a, b) = (world.client(), world.client());
        let key = write_file(&mut a, b"f", b"x");
        let all = available(&world);
        assert_eq!(ask(&a, all - 10), Ok(all - 10));
        take_blocks(&mut a, key, 0);
        let daemon = background.then(|| crate::Daemon::start(std::sync::Arc::clone(&world.kernel)).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                wanted(&a);
                world.kernel.gone(a.id());
            });
            assert_eq!(ask(&b, all - 200), Ok(all - 200));
        });
        assert_eq!(reserved(&world), all - 200);
        if let Some(daemon) = daemon {
            daemon.stop().unwrap();
        }
    }
}

#[test]
fn session_that_is_over_is_promised_nothing() {
    let world = World::new();
    let a = world.client();
    let session = world.kernel.locked().live(a.id()).unwrap();
    assert_eq!(ask(&a, 100), Ok(100));
    // Its request is under way.
    Teardown::of(&world.kernel).seal_session(a.id(), "a test");
    let granted = Reservations::of(&world.kernel).reserve(&session, 100, 1);
    assert_eq!(granted, Err(IpcError::Sealed));
    Teardown::of(&world.kernel).finish_sealed();
    assert_eq!(reserved(&world), 0);
    assert_eq!(
        Reservations::of(&world.kernel).reserve(&session, 100, 1),
        Err(IpcError::Sealed)
    );
    Reservations::of(&world.kernel).return_reservation(&session, 50, 100);
    assert_eq!(reserved(&world), 0);
}

#[test]
fn who_gives_back_more_than_it_has_takes_nothing_from_others() {
    let world = World::new();
    let (mut liar, mut honest) = (world.client(), world.client());
    let key = file(&mut liar, b"liar");
    let other = file(&mut honest, b"honest");
    world.kernel.digest_all().unwrap();
    let all = available(&world);
    assert_eq!(ask(&liar, 1000), Ok(1000));
    assert_eq!(ask(&honest, all - 1000), Ok(all - 1000));
    // The daemon takes back all that it has, and no more; then there is nothing.
    for _ in 0..3 {
        back(&liar, u64::MAX, u64::MAX);
        assert_eq!(reserved(&world), all - 1000);
    }
    assert_eq!(ask(&honest, 1000), Ok(1000));
    assert_eq!(available(&world), 0);
    // Operations that it logs without a reservation find no space, and stall no other session.
    let refused = world.kernel.status().digest.refused;
    (0..20).for_each(|number| take_blocks(&mut liar, key, number));
    world.kernel.digest_all().unwrap();
    assert!(is_digested(&liar));
    assert_eq!(world.kernel.status().digest.refused, refused + 20);
    // All that was reserved for the other is there.
    (0..all / COST).for_each(|number| take_blocks(&mut honest, other, number));
    world.kernel.digest_all().unwrap();
    assert!(is_digested(&honest));
    assert_eq!(world.kernel.status().digest.refused, refused + 20);
    assert_eq!(reserved(&world), all % COST);
    world.check();
}

#[test]
fn operation_of_the_daemon_takes_nothing_that_is_promised_and_has_unused_credits_come_back() {
    let world = World::new();
    let (a, mut b) = (world.client(), world.client());
    let key = file(&mut b, b"f");
    let lease = b.write_lease(key).lease;
    b.release(key, lease, true);
    let all = available(&world);
    assert_eq!(ask(&a, all), Ok(all));
    let write = LogOp::Write {
        key,
        offset: 0,
        data: &[1; 4096],
    };
    std::thread::scope(|scope| {
        // The session uses all of it.
        scope.spawn(|| {
            for _ in 0..2 {
                wanted(&a);
                back(&a, 0, all);
            }
        });
        assert_eq!(b.forward(&write), Err(IpcError::Errno(libc::ENOSPC)));
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wanted(&a);
            back(&a, 100, all);
        });
        b.forward(&write).unwrap();
    });
    assert_eq!(reserved(&world), all - 100);
    world.check();
}

#[test]
fn free_space_is_what_a_session_can_get_though_others_have_some() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let before = stat(&b).blocks_available;
    assert_eq!(before, available(&world));
    assert_eq!(ask(&a, before / 2), Ok(before / 2));
    // A session knows its own blocks better.
    assert_eq!(stat(&b).blocks_available, before);
    assert_eq!(stat(&a).blocks_available, before - before / 2);
    assert!(stat(&b).blocks_free >= before);
}

/// An operation that does not fit into one record is done record by record, in pre-steps.
#[test]
fn space_that_nobody_paid_for_is_refused_however_much_it_is() {
    let config = Config {
        log_initial_bytes: CHUNK_BYTES,
        credits_max_blocks: 1 << 24,
        users: Users::All,
        ..Config::default()
    };
    let world = World::with_tiers(config, &[("ssd", 60 << 30)]);
    let (mut liar, honest) = (world.client(), world.client());
    let key = file(&mut liar, b"liar");
    world.kernel.digest_all().unwrap();
    let all = available(&world);
    assert_eq!(ask(&honest, all - 200), Ok(all - 200));
    let free = world.kernel.store.space().tiers[1].free;
    liar.log_op(&LogOp::Fallocate {
        key,
        mode: FallocateMode::AllocateKeepSize,
        offset: 0,
        len: free * 4096,
    });
    world.kernel.digest_all().unwrap();
    assert!(is_digested(&liar));
    assert_eq!(world.kernel.status().digest.refused, 1);
    assert_eq!(available(&world), 200);
    assert_eq!(world.kernel.store.space().tiers[1].free, free);
    world.check();
}

#[test]
fn session_that_has_all_that_it_may_have_asks_nobody_else() {
    let config = Config {
        log_initial_bytes: CHUNK_BYTES,
        credits_max_blocks: 1000,
        users: Users::All,
        ..Config::default()
    };
    let world = World::with(config);
    let (a, b) = (world.client(), world.client());
    assert_eq!(ask(&b, 10), Ok(10));
    assert_eq!(ask(&a, 990), Ok(990));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wanted(&a);
            back(&a, 500, 990);
        });
        assert_eq!(ask(&a, 500), Ok(500));
    });
    assert!(!is_asked(&b));
}

/// A long search is no reason to refuse available space.
#[test]
fn who_cannot_search_in_time_takes_what_there_is() {
    let config = Config {
        log_initial_bytes: CHUNK_BYTES,
        lease_ms: 100,
        wait_ms: 100,
        users: Users::All,
        ..Config::default()
    };
    let world = World::with(config);
    let a = world.client();
    let _searching = world.kernel.space.turn.write();
    assert_eq!(ask(&a, 10), Ok(10));
}

/// A wait for space does not make a session late: a write that waits for space has pinned the lease that is
/// asked back.
#[test]
fn session_that_waits_for_space_is_not_late_with_its_leases() {
    for waits in [true, false] {
        let world = World::new();
        let (mut b, c) = (world.client(), world.client());
        let key = file(&mut b, b"f");
        let lease = b.write_lease(key).lease;
        let session = world.kernel.locked().live(b.id()).unwrap();
        let work = waits.then(|| Reservations::of(&world.kernel).work_for(&session));
        world.clock.advance_ms(world.config.min_hold_ms);
        std::thread::scope(|scope| {
            scope.spawn(|| c.write_lease(key));
            while !matches!(b.upcall(), Upcall::Revoke { .. }) {}
            world.clock.advance_ms(world.config.lease_ms + 1);
            world.kernel.tick();
            assert_eq!(world.kernel.locked().live(b.id()).is_some(), waits);
            drop(work);
            if waits {
                b.release(key, lease, false);
            }
        });
    }
}
