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
    match client.link.call(Request::Slabs { former: Vec::new() }).unwrap() {
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
    assert_eq!(list(&client), slabs);
    for (slab, _) in &slabs {
        assert_eq!(whole(&client, *slab), Ok(vec![5; SLAB_BYTES as usize]));
    }
    world.check();
    // Sealed, and sealed again by a restart before it asked anything: it shows the token of the last session that
    // answered it.
    let token = client.welcome.token;
    varve_ipc::Service::gone(&*world.kernel, client.id());
    drop(again(&world, token));
    world = world.restart();
    let client = again(&world, token);
    assert_eq!(list(&client), slabs);
    client.link.call(Request::Bye).unwrap();
    assert_eq!(world.kernel.store().slabs(), []);
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
    grant(&far, Tier::Ssd).unwrap();
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
