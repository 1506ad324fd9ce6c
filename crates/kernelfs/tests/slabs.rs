//! Slabs of sessions: what each finds in its own, what nobody else gets, life over seals, restarts and deaths, and
//! who yields to whom.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, World, hello};
use std::time::Duration;
use varve_format::log::CHUNK_BYTES;
use varve_format::{BLOCK_BYTES, LeaseNo, Tier};
use varve_ipc::{Admin, Hello, IpcError, JobAct, Link, Peer, Request, Response, SLAB_BYTES, Upcall};
use varve_kernelfs::{Config, EvacuationAsked, Users};

const ENXIO: Result<Vec<u8>, IpcError> = Err(IpcError::Errno(libc::ENXIO));

fn world_with(change: impl FnOnce(&mut Config)) -> World {
    let mut config = Config {
        log_initial_bytes: CHUNK_BYTES,
        users: Users::All,
        lease_ms: 200,
        wait_ms: 2_000,
        ..Config::default()
    };
    change(&mut config);
    World::with_tiers(config, &[("ssd", 64 << 20), ("hdd", 128 << 20)])
}

fn world() -> World {
    world_with(|_| ())
}

fn grant(client: &Client, tier: Tier) -> Result<LeaseNo, IpcError> {
    match client.link.call(Request::GrantSlab { tier })? {
        Response::Slab(slab) => Ok(slab),
        other => panic!("{other:?}"),
    }
}

fn read(client: &Client, slab: LeaseNo, ranges: &[(u32, u32)]) -> Result<Vec<u8>, IpcError> {
    let ranges = ranges.to_vec();
    match client.link.call(Request::ReadSlab { slab, ranges })? {
        Response::Bytes(bytes) => Ok(bytes),
        other => panic!("{other:?}"),
    }
}

fn whole(client: &Client, slab: LeaseNo) -> Result<Vec<u8>, IpcError> {
    read(client, slab, &[(0, SLAB_BYTES as u32)])
}

fn write(client: &Client, slab: LeaseNo, offset: u32, bytes: Vec<u8>) -> Result<Vec<u8>, IpcError> {
    let answer = client.link.call(Request::WriteSlab { slab, offset, bytes });
    answer.map(|_| Vec::new())
}

fn fill(client: &Client, slab: LeaseNo, byte: u8) {
    write(client, slab, 0, vec![byte; SLAB_BYTES as usize]).unwrap();
}

fn free(client: &Client, slabs: &[LeaseNo]) -> Result<Response, IpcError> {
    let slabs = slabs.to_vec();
    client.link.call(Request::FreeSlabs { slabs })
}

fn list(client: &Client) -> Vec<(LeaseNo, Tier)> {
    take_over(client, &[])
}

/// Takes over what the sessions of these tokens had.
fn take_over(client: &Client, former: &[u128]) -> Vec<(LeaseNo, Tier)> {
    let former = former.to_vec();
    match client.link.call(Request::Slabs { former }).unwrap() {
        Response::Slabs(_, slabs) => slabs,
        other => panic!("{other:?}"),
    }
}

fn user(world: &World, uid: u32) -> Client {
    let peer = Peer {
        uid,
        gid: uid,
        ..Peer::this_process()
    };
    world.client_as(peer, hello())
}

fn zeros() -> Vec<u8> {
    vec![0; SLAB_BYTES as usize]
}

#[test]
fn slab_of_each_tier_holds_what_its_session_writes_and_no_other_session_reaches_it() {
    let world = world();
    let (one, other) = (world.client(), world.client());
    for tier in Tier::ALL {
        let slab = grant(&one, tier).unwrap();
        assert_eq!(whole(&one, slab), Ok(zeros()));
        write(&one, slab, 8192, vec![7; 4096]).unwrap();
        let parts = read(&one, slab, &[(4096, 4096), (8192, 4096), (0, 4096)]).unwrap();
        assert_eq!(parts, [vec![0; 4096], vec![7; 4096], vec![0; 4096]].concat());
        assert_eq!(whole(&other, slab), ENXIO);
        assert_eq!(write(&other, slab, 0, vec![1; 4096]), ENXIO);
        assert_eq!(free(&other, &[slab]), Err(IpcError::Errno(libc::ENXIO)));
        assert_eq!(list(&one), [(slab, tier)]);
        assert_eq!(list(&other), []);
        free(&one, &[slab]).unwrap();
        assert_eq!(whole(&one, slab), ENXIO);
    }
    world.check();
}

#[test]
fn requests_that_make_no_sense_are_refused_and_change_nothing() {
    let world = world();
    let client = world.client();
    for tier in Tier::ALL {
        let slab = grant(&client, tier).unwrap();
        fill(&client, slab, 9);
        let invalid = Err(IpcError::Errno(libc::EINVAL));
        for ranges in [
            &[(1, 4096)][..],
            &[(0, 4095)],
            &[(SLAB_BYTES as u32, 4096)],
            &[(u32::MAX - 4095, 4096)],
            &[(0, u32::MAX)],
            &[(0, 1 << 20), (0, 4096)],
        ] {
            assert_eq!(read(&client, slab, ranges), invalid, "{ranges:?}");
        }
        let many = vec![(0, 0); 257];
        assert_eq!(read(&client, slab, &many), Err(IpcError::Errno(libc::E2BIG)));
        for (offset, len) in [
            (0, 1),
            (1, 4096),
            (SLAB_BYTES as u32, 4096),
            (4096, SLAB_BYTES as usize),
            (0, 2 << 20),
        ] {
            assert_eq!(
                write(&client, slab, offset, vec![1; len]),
                invalid,
                "{offset} {len}"
            );
        }
        for strange in [0, slab.0 + 1, u64::MAX] {
            assert_eq!(whole(&client, LeaseNo(strange)), ENXIO);
            assert_eq!(
                free(&client, &[LeaseNo(strange)]),
                Err(IpcError::Errno(libc::ENXIO))
            );
        }
        assert_eq!(free(&client, &vec![slab; 257]), Err(IpcError::Errno(libc::E2BIG)));
        // Twice in one request: the second is gone, so nothing is freed.
        assert_eq!(free(&client, &[slab, slab]), Err(IpcError::Errno(libc::ENXIO)));
        assert_eq!(whole(&client, slab), Ok(vec![9; SLAB_BYTES as usize]));
    }
    // A slab's number is no lease.
    let slab = grant(&client, Tier::Nvm).unwrap();
    let items = vec![varve_ipc::ReleaseItem {
        key: common::ROOT,
        lease: slab,
        downgrade: false,
        last_seq: varve_format::LogSeq(0),
        open: false,
        changes: 0,
        cached_ms: 0,
    }];
    let _ = client.link.call(Request::Release { items });
    assert_eq!(whole(&client, slab), Ok(zeros()));
    let reader = world.client_as(
        Peer::this_process(),
        Hello {
            read_only: true,
            ..hello()
        },
    );
    assert_eq!(grant(&reader, Tier::Nvm), Err(IpcError::Errno(libc::EROFS)));
    world.check();
}

#[test]
fn another_user_finds_nothing_in_freed_slabs() {
    let world = world_with(|config| config.far_percent = 50);
    let (one, other) = (user(&world, 1000), user(&world, 1001));
    for tier in Tier::ALL {
        for _ in 0..3 {
            let mut slabs = Vec::new();
            while let Ok(slab) = grant(&one, tier) {
                fill(&one, slab, 0xa5);
                slabs.push(slab);
            }
            assert!(!slabs.is_empty(), "{tier:?}");
            free(&one, &slabs).unwrap();
            let mut got = Vec::new();
            while let Ok(slab) = grant(&other, tier) {
                assert_eq!(whole(&other, slab), Ok(zeros()), "{tier:?}");
                got.push(slab);
            }
            assert_eq!(got.len(), slabs.len());
            free(&other, &got).unwrap();
        }
    }
    world.check();
}

#[test]
fn slabs_take_a_share_of_a_tier_and_a_user_a_part_of_that() {
    let world = world();
    let root = world.client();
    let stats = world.kernel.store().space();
    for (tier, stats) in Tier::ALL.into_iter().zip(&stats.tiers) {
        let mut slabs = Vec::new();
        let refused = loop {
            match grant(&root, tier) {
                Ok(slab) => slabs.push(slab),
                Err(error) => break error,
            }
        };
        assert_eq!(refused, IpcError::Errno(libc::ENOSPC));
        let taken = world.kernel.store().slab_use()[tier as usize].taken;
        assert!(
            taken <= stats.total / 4 && taken + 2048 + 256 > stats.total / 4,
            "{tier:?}: {taken} of {}",
            stats.total
        );
        for slabs in slabs.chunks(256) {
            free(&root, slabs).unwrap();
        }
        // Two sessions of a user have it together.
        let own = [user(&world, 1000), user(&world, 1000)];
        let mut count = 0;
        while own.iter().any(|client| grant(client, tier).is_ok()) {
            count += 1;
        }
        assert!(count * 256 <= stats.total / 16, "{tier:?}: {count}");
        for client in own {
            client.link.call(Request::Bye).unwrap();
        }
        world.kernel.tick();
    }
    assert_eq!(world.kernel.store().slabs(), []);
    let none = world_with(|config| config.far_percent = 0);
    let client = none.client();
    assert_eq!(grant(&client, Tier::Hdd), Err(IpcError::Errno(libc::ENOSPC)));
    none.check();
}

#[test]
fn slabs_end_with_their_session() {
    let world = world();
    let client = world.client();
    for tier in Tier::ALL {
        fill(&client, grant(&client, tier).unwrap(), 1);
    }
    client.link.call(Request::Bye).unwrap();
    assert_eq!(world.kernel.store().slabs(), []);
    // One whose process is gone.
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let peer = Peer {
        pid: child.id(),
        ..Peer::this_process()
    };
    let client = world.client_as(peer, hello());
    for tier in Tier::ALL {
        grant(&client, tier).unwrap();
    }
    world.kernel.tick();
    assert_eq!(world.kernel.store().slabs().len(), 3);
    child.kill().unwrap();
    child.wait().unwrap();
    world.kernel.tick();
    world.kernel.tick();
    assert_eq!(world.kernel.store().slabs(), []);
    world.check();
}

#[test]
fn client_that_comes_again_has_its_slabs_and_no_other_does() {
    let mut world = world();
    let client = user(&world, 1000);
    let slabs: Vec<_> = Tier::ALL
        .into_iter()
        .map(|tier| (grant(&client, tier).unwrap(), tier))
        .collect();
    for (slab, _) in &slabs {
        fill(&client, *slab, 5);
    }
    let (token, first) = (client.welcome.token, client.id());
    world = world.restart();
    assert_eq!(world.kernel.store().slabs().len(), 3);
    // Another user with the token; the same one without.
    for (uid, resume) in [(1001, Some(token)), (1000, None)] {
        let peer = Peer {
            uid,
            gid: uid,
            ..Peer::this_process()
        };
        let other = world.client_as(peer, Hello { resume, ..hello() });
        assert_eq!(list(&other), []);
        for (slab, _) in &slabs {
            assert_eq!(whole(&other, *slab), ENXIO);
            assert_eq!(free(&other, &[*slab]), Err(IpcError::Errno(libc::ENXIO)));
        }
    }
    let peer = Peer {
        uid: 1000,
        gid: 1000,
        ..Peer::this_process()
    };
    let again = |world: &World, token| {
        world.client_as(
            peer,
            Hello {
                resume: Some(token),
                ..hello()
            },
        )
    };
    // The answer to the first try is lost.
    drop(again(&world, token));
    let client = again(&world, token);
    assert_ne!(client.id(), first);
    assert_eq!(list(&client), [], "nothing passes on unasked");
    assert_eq!(take_over(&client, &[token]), slabs);
    for (slab, _) in &slabs {
        assert_eq!(whole(&client, *slab), Ok(vec![5; SLAB_BYTES as usize]));
    }
    assert_eq!(take_over(&client, &[token, 77, client.welcome.token]), slabs);
    world.check();
    client.link.call(Request::Bye).unwrap();
    assert_eq!(world.kernel.store().slabs(), []);
    world.check();
}

/// Opens a session of user 1000 that goes on with another.
fn resume(world: &World, token: u128) -> Client {
    let peer = Peer {
        uid: 1000,
        gid: 1000,
        ..Peer::this_process()
    };
    let hello = Hello {
        resume: Some(token),
        ..hello()
    };
    world.client_as(peer, hello)
}

#[test]
fn whichever_answers_are_lost_the_client_has_its_slabs() {
    // A client keeps each token that it heard until the request to take slabs over was answered. What of a session is
    // lost: 0: its welcome; 1: the request; 2: the answer; 3: the daemon, before the request; 4: after it; 5: nothing.
    const LOSSES: usize = 6;
    // Each of the fifth: it has all pairs.
    for case in (0..LOSSES * LOSSES * LOSSES).step_by(5) {
        let losses = [case % LOSSES, case / LOSSES % LOSSES, case / LOSSES / LOSSES];
        let mut world = world();
        let client = user(&world, 1000);
        let slabs: Vec<_> = Tier::ALL
            .into_iter()
            .map(|tier| (grant(&client, tier).unwrap(), tier))
            .collect();
        for (slab, _) in &slabs {
            fill(&client, *slab, 5);
        }
        let mut tokens = vec![client.welcome.token];
        if case % 2 == 0 {
            varve_ipc::Service::gone(&*world.kernel, client.id());
        }
        drop(client);
        for loss in losses {
            let client = resume(&world, *tokens.last().unwrap());
            if loss == 0 {
                continue;
            }
            let former = tokens.clone();
            tokens.push(client.welcome.token);
            if [2, 4, 5].contains(&loss) {
                assert_eq!(take_over(&client, &former), slabs, "{losses:?}");
            }
            if loss == 5 {
                tokens = vec![client.welcome.token];
                assert_eq!(list(&client), slabs, "{losses:?}");
            }
            let id = client.id();
            drop(client);
            match loss {
                3 | 4 => world = world.restart(),
                _ => varve_ipc::Service::gone(&*world.kernel, id),
            }
            world.kernel.tick();
        }
        let last = resume(&world, *tokens.last().unwrap());
        assert_eq!(take_over(&last, &tokens), slabs, "{losses:?}");
        for (slab, _) in &slabs {
            assert_eq!(
                whole(&last, *slab),
                Ok(vec![5; SLAB_BYTES as usize]),
                "{losses:?}"
            );
        }
        world.check();
        last.link.call(Request::Bye).unwrap();
        assert_eq!(world.kernel.store().slabs(), []);
    }
}

#[test]
fn slabs_pass_on_from_a_session_that_still_lives_and_without_those_that_are_taken() {
    let world = world_with(|config| config.far_percent = 50);
    let client = user(&world, 1000);
    let slabs: Vec<_> = (0..3).map(|_| grant(&client, Tier::Nvm).unwrap()).collect();
    let other = user(&world, 1000);
    let own = grant(&other, Tier::Ssd).unwrap();
    // Not of another user.
    let stranger = user(&world, 1001);
    assert_eq!(take_over(&stranger, &[client.welcome.token]), []);
    assert!(client.is_live());
    free(&client, &slabs[1..2]).unwrap();
    let all = [(slabs[0], Tier::Nvm), (slabs[2], Tier::Nvm), (own, Tier::Ssd)];
    let mut got = take_over(&other, &[client.welcome.token]);
    got.sort_unstable();
    let mut want = all.to_vec();
    want.sort_unstable();
    assert_eq!(got, want);
    assert_eq!(grant(&client, Tier::Nvm), Err(IpcError::Sealed));
    let many = Request::Slabs { former: vec![1; 65] };
    assert_eq!(other.link.call(many), Err(IpcError::Errno(libc::E2BIG)));
    world.check();
}

#[test]
fn pool_that_becomes_read_only_before_slabs_pass_on_keeps_them() {
    let mut world = world();
    let client = user(&world, 1000);
    for tier in Tier::ALL {
        fill(&client, grant(&client, tier).unwrap(), 5);
    }
    let token = client.welcome.token;
    world = world.restart();
    let again = resume(&world, token);
    world.kernel.store().latch("a device failed");
    for _ in 0..2 {
        let former = vec![token];
        let refused = again.link.call(Request::Slabs { former });
        assert_eq!(refused, Err(IpcError::Errno(libc::EROFS)));
    }
    world = world.restart();
    let again = resume(&world, token);
    assert_eq!(take_over(&again, &[again.welcome.token, token]).len(), 3);
    world.check();
}

#[test]
fn sessions_that_are_gone_leave_no_slab_after_a_restart() {
    let mut world = world();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let peer = Peer {
        pid: child.id(),
        ..Peer::this_process()
    };
    let client = world.client_as(peer, hello());
    for tier in Tier::ALL {
        grant(&client, tier).unwrap();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    world = world.restart();
    world.kernel.tick();
    assert_eq!(world.kernel.store().slabs(), []);
    world.check();
}

/// Asks for all blocks that there are, and as many more.
fn reserve(client: &Client, blocks: u64) -> Result<Response, IpcError> {
    let blocks = u32::try_from(blocks).unwrap();
    client.link.call(Request::Reserve {
        blocks,
        least: blocks,
    })
}

#[test]
fn files_get_what_slabs_give_back() {
    let world = world();
    let (far, files) = (world.client(), world.client());
    let slabs: Vec<_> = (0..6).map(|_| grant(&far, Tier::Ssd).unwrap()).collect();
    let kept = grant(&far, Tier::Hdd).unwrap();
    fill(&far, kept, 3);
    let wanted = world.kernel.store().space().available + 500;
    let asked = std::thread::scope(|scope| {
        let yields = scope.spawn(|| {
            let Upcall::YieldSlabs { slabs } = far.upcall() else {
                panic!("another upcall")
            };
            free(&far, &slabs).unwrap();
            slabs
        });
        reserve(&files, wanted).unwrap();
        yields.join().unwrap()
    });
    // A unit is enough.
    assert_eq!(
        asked.len(),
        if asked.contains(&kept) { 1 } else { 3 },
        "{asked:?}"
    );
    let left = list(&far).len();
    assert_eq!(left, slabs.len() + 1 - asked.len());
    world.check();
}

#[test]
fn slabs_that_are_not_given_back_are_taken() {
    let world = world();
    let (far, files) = (world.client(), world.client());
    for tier in Tier::ALL {
        grant(&far, tier).unwrap();
    }
    let wanted = world.kernel.store().space().available + 500;
    let began = std::time::Instant::now();
    reserve(&files, wanted).unwrap();
    assert!(
        began.elapsed() >= Duration::from_millis(900),
        "{:?}",
        began.elapsed()
    );
    let Upcall::YieldSlabs { slabs } = far.upcall() else {
        panic!("another upcall")
    };
    for slab in slabs {
        assert_eq!(whole(&far, slab), ENXIO);
    }
    assert!(far.is_live(), "the session goes on without them");
    // All are taken, and it is still not enough.
    let all = 1 << 17;
    assert_eq!(reserve(&files, all), Err(IpcError::Errno(libc::ENOSPC)));
    world.check();
}

/// Takes slabs of a tier, until there are no more or so many.
fn many(client: &Client, tier: Tier, most: usize) -> Vec<LeaseNo> {
    (0..most).map_while(|_| grant(client, tier).ok()).collect()
}

/// Promises all that is free.
fn fill_pool(world: &World) {
    let store = world.kernel.store();
    store.reserve(store.space().available).unwrap();
}

#[test]
fn holders_that_yield_nothing_cost_all_searches_together_one_wait() {
    let world = world_with(|config| (config.lease_ms, config.wait_ms) = (100, 4_000));
    let (bad, worse, good) = (world.client(), world.client(), world.client());
    let mut own = Vec::new();
    for tier in [Tier::Ssd, Tier::Hdd] {
        many(&bad, tier, 4);
        many(&worse, tier, 4);
        own.extend(many(&good, tier, 2));
        many(&bad, tier, 1000);
    }
    own.extend(many(&good, Tier::Nvm, 2));
    many(&worse, Tier::Nvm, 1000);
    let taken: u64 = world
        .kernel
        .store()
        .slab_use()
        .iter()
        .map(|tier| tier.taken)
        .sum();
    fill_pool(&world);
    // Each search waits a while for sessions to return reservations, too.
    let writers: Vec<_> = (0..3).map(|_| world.client()).collect();
    let each = (taken - 2 * 256) / 4;
    assert!(each > 1024, "{each}");
    let began = std::time::Instant::now();
    let over = std::sync::atomic::AtomicBool::new(false);
    let given = std::thread::scope(|scope| {
        let yields = scope.spawn(|| {
            let mut given = Vec::new();
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                if let Some(Upcall::YieldSlabs { slabs }) =
                    good.link.upcall(Duration::from_millis(5)).unwrap()
                {
                    free(&good, &slabs).unwrap();
                    given.extend(slabs);
                }
            }
            given
        });
        let writers = writers.iter().map(|writer| scope.spawn(|| reserve(writer, each)));
        let writers: Vec<_> = writers.collect();
        let results: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        let elapsed = began.elapsed();
        assert!(results.iter().all(Result::is_ok), "{results:?} {elapsed:?}");
        yields.join().unwrap()
    });
    let elapsed = began.elapsed();
    assert!(elapsed < Duration::from_millis(3_800), "{elapsed:?}");
    // Who keeps the rules loses only what it gives.
    let left: Vec<_> = list(&good).into_iter().map(|(slab, _)| slab).collect();
    for slab in own {
        assert!(
            left.contains(&slab) != given.contains(&slab),
            "{slab} of {left:?}, given {given:?}"
        );
    }
    world.check();
}

#[test]
fn footers_of_units_are_no_space_that_slabs_give_back() {
    let world = world();
    let far = world.client();
    let stats = world.kernel.store().space().tiers[Tier::Ssd as usize];
    let slabs = many(&far, Tier::Ssd, 6);
    let taken = world.kernel.store().slab_use()[Tier::Ssd as usize].taken;
    let unit = taken / 2;
    assert!(unit < stats.unit_blocks && slabs.len() == 6, "{taken}");
    fill_pool(&world);
    let writer = world.client();
    reserve(&writer, unit + 1).unwrap();
    assert_eq!(list(&far), []);
    // More than all slabs are worth: none is asked for, and none goes.
    let slab = grant(&far, Tier::Nvm);
    let wanted = match slab {
        Ok(_) => 5_000,
        Err(_) => panic!("{slab:?}"),
    };
    while far.link.upcall(Duration::ZERO).unwrap().is_some() {}
    assert_eq!(reserve(&writer, wanted), Err(IpcError::Errno(libc::ENOSPC)));
    assert_eq!(far.link.upcall(Duration::ZERO).unwrap(), None);
    assert_eq!(list(&far).len(), 1);
    world.check();
}

#[test]
fn every_slab_yields_before_a_file_gets_no_space() {
    for step in [1, 255, 257, 1021] {
        let world = world();
        let far = world.client();
        for tier in Tier::ALL {
            many(&far, tier, 1000);
        }
        let total = world.kernel.store().space().available
            + world
                .kernel
                .store()
                .slab_use()
                .iter()
                .map(|tier| tier.taken)
                .sum::<u64>();
        fill_pool(&world);
        let writer = world.client();
        let mut got = world.kernel.store().space().reserved;
        while reserve(&writer, step).is_ok() {
            got += step;
            if step == 1 {
                break;
            }
        }
        let left: u64 = world
            .kernel
            .store()
            .slab_use()
            .iter()
            .map(|tier| tier.taken)
            .sum();
        assert!(
            step == 1 || (left == 0 && got + step > total),
            "{step}: {got} of {total}, {left}"
        );
        world.check();
    }
}

#[test]
fn slabs_whose_space_is_not_needed_any_more_stay() {
    let world = world();
    let (one, other) = (world.client(), world.client());
    let mine = grant(&one, Tier::Ssd).unwrap();
    let theirs = grant(&other, Tier::Hdd).unwrap();
    fill_pool(&world);
    let writer = world.client();
    std::thread::scope(|scope| {
        let yields = scope.spawn(|| {
            // Both are asked, and one is enough.
            assert_eq!(one.upcall(), Upcall::YieldSlabs { slabs: vec![mine] });
            assert_eq!(other.upcall(), Upcall::YieldSlabs { slabs: vec![theirs] });
            free(&one, &[mine]).unwrap();
        });
        reserve(&writer, 500).unwrap();
        yields.join().unwrap();
    });
    world.clock.advance_ms(10_000);
    world.kernel.tick();
    world.kernel.tick();
    assert!(whole(&other, theirs) == Ok(zeros()));
    // It was asked for long ago.
    let began = std::time::Instant::now();
    reserve(&writer, world.kernel.store().space().available + 100).unwrap();
    let elapsed = began.elapsed();
    assert!(elapsed < Duration::from_millis(950), "{elapsed:?}");
    assert!(whole(&other, theirs) == ENXIO);
    world.check();
}

#[test]
fn tier_that_is_evacuated_asks_its_slabs_back() {
    let world = world();
    let far = world.client();
    let slab = grant(&far, Tier::Ssd).unwrap();
    let stays = grant(&far, Tier::Hdd).unwrap();
    let asked = world.kernel.admin_request(
        Peer::this_process(),
        Admin::Evacuate {
            tier: Tier::Ssd,
            partly: false,
        },
    );
    let Ok(Response::Json(json)) = asked else {
        panic!("{asked:?}")
    };
    let asked: EvacuationAsked = serde_json::from_str(&json).unwrap();
    let EvacuationAsked::Started(job) = asked else {
        panic!("{json}")
    };
    world.kernel.tick();
    world.kernel.tick();
    assert_eq!(far.upcall(), Upcall::YieldSlabs { slabs: vec![slab] });
    assert!(far.link.upcall(Duration::ZERO).unwrap().is_none(), "asked once");
    assert_eq!(grant(&far, Tier::Ssd), Err(IpcError::Errno(libc::ENOSPC)));
    assert_eq!(whole(&far, slab), Ok(zeros()));
    world.clock.advance_ms(1_001);
    world.kernel.tick();
    assert_eq!(whole(&far, slab), ENXIO);
    assert_eq!(list(&far), [(stays, Tier::Hdd)]);
    world
        .kernel
        .admin_request(
            Peer::this_process(),
            Admin::Job {
                id: job.id,
                act: JobAct::Cancel,
            },
        )
        .unwrap();
    let slab = grant(&far, Tier::Ssd).unwrap();
    // One that is cancelled in time.
    let asked = world.kernel.admin_request(
        Peer::this_process(),
        Admin::Evacuate {
            tier: Tier::Ssd,
            partly: false,
        },
    );
    let Ok(Response::Json(json)) = asked else {
        panic!("{asked:?}")
    };
    let EvacuationAsked::Started(job) = serde_json::from_str(&json).unwrap() else {
        panic!("{json}")
    };
    world.kernel.tick();
    assert_eq!(far.upcall(), Upcall::YieldSlabs { slabs: vec![slab] });
    let jobs = world.kernel.admin_request(Peer::this_process(), Admin::Jobs);
    let Ok(Response::Json(told)) = jobs else {
        panic!("{jobs:?}")
    };
    let named = format!("asked back from session {}", far.id());
    assert!(told.contains(&named), "{named} in {told}");
    let cancel = Admin::Job {
        id: job.id,
        act: JobAct::Cancel,
    };
    world.kernel.admin_request(Peer::this_process(), cancel).unwrap();
    world.clock.advance_ms(5_000);
    world.kernel.tick();
    assert_eq!(whole(&far, slab), Ok(zeros()));
    world.check();
}

#[test]
fn status_counts_slabs_by_tier_and_session() {
    let world = world();
    let client = world.client();
    grant(&client, Tier::Nvm).unwrap();
    grant(&client, Tier::Ssd).unwrap();
    grant(&client, Tier::Ssd).unwrap();
    let status = world.kernel.status();
    let told: Vec<_> = status
        .tiers
        .iter()
        .map(|tier| (tier.slabs, tier.slab_bytes / BLOCK_BYTES))
        .collect();
    assert_eq!(told, [(1, 256), (2, 1020), (0, 0)]);
    let session = status
        .sessions
        .iter()
        .find(|session| session.id == client.id().0)
        .unwrap();
    assert_eq!(session.slab_bytes, [1 << 20, 2 << 20, 0]);
}
