//! Blocks that a crash left torn, when a device fails while their log should be digested.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, ROOT, START_NS, World, hello, want, write_file};
use std::sync::Arc;
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, FileBlock, InodeKey, LogOp, SessionId};
use varve_ipc::{LeaseMode, ManualClock, Page, Peer};
use varve_kernelfs::{Config, KernelFs, LogStore, Parts, SessionArea};
use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyRegion};
use varve_media::{MediaError, Region};
use varve_store::{Devices, OpenOptions, Store};

const BLOCK: usize = BLOCK_SIZE;

/// Logs whose medium fails as the script says.
struct FaultyLogs(Arc<dyn LogStore>, FaultScript);

impl LogStore for FaultyLogs {
    fn create(
        &self,
        session: SessionId,
        log_bytes: Option<(u64, u64)>,
        privileged: bool,
    ) -> Result<SessionArea, MediaError> {
        self.0.create(session, log_bytes, privileged)
    }

    fn start(&self, session: SessionId, log: &dyn Region, len_bytes: u64) -> Result<(), MediaError> {
        self.0.start(session, log, len_bytes)
    }

    fn pages(&self) -> Result<Vec<Arc<Page>>, MediaError> {
        self.0.pages()
    }

    fn open(&self, session: SessionId) -> Result<Option<Arc<dyn Region>>, MediaError> {
        let log = self.0.open(session)?;
        Ok(log.map(|log| Arc::new(FaultyRegion::new(log, self.1.clone())) as _))
    }

    fn list(&self) -> Result<Vec<SessionId>, MediaError> {
        self.0.list()
    }

    fn remove(&self, session: SessionId) {
        self.0.remove(session);
    }

    fn remove_log(&self, session: SessionId) {
        self.0.remove_log(session);
    }
}

/// The daemon dies while the first block of a file is overwritten: half of it is there. The next one's
/// devices fail as asked: log, NVM.
fn torn(log: Option<FaultRule>, nvm: Option<FaultRule>) -> (World, Arc<KernelFs>) {
    let world = World::with(Config::default());
    let mut client = world.client();
    let root = client.write_lease(ROOT);
    let (key, _) = client.alloc(1)[0];
    client.create(b"f", key);
    client.log_op(&LogOp::Write {
        key,
        offset: 0,
        data: &[1; 4 * BLOCK],
    });
    world.kernel.digest_all().unwrap();
    client.release(ROOT, root.lease, true);
    let place = world.kernel.store().map(key.ino, FileBlock(0), 1).unwrap()[0]
        .block
        .0;
    for what in [2, 3] {
        client.log_op(&LogOp::Write {
            key,
            offset: 0,
            data: &[what; BLOCK],
        });
    }
    let region = world.sim.region("nvm").unwrap();
    region.write(place * BLOCK_BYTES, &[3; BLOCK / 2]).unwrap();
    let (log_script, nvm_script) = (FaultScript::new(), FaultScript::new());
    log.into_iter().for_each(|rule| log_script.push(rule));
    let devices = common::devices(&world.sim);
    let devices = Devices {
        nvm: Arc::new(FaultyRegion::new(devices.nvm, nvm_script.clone())),
        ..devices
    };
    let (store, _) = Store::open(devices, OpenOptions::default()).unwrap();
    nvm.into_iter().for_each(|rule| nvm_script.push(rule));
    let parts = Parts::new(
        store,
        Arc::new(FaultyLogs(Arc::clone(&world.logs) as _, log_script)),
        Config::default(),
        Arc::new(ManualClock::new(START_NS + 2_000_000_000)),
    );
    let kernel = KernelFs::open(parts).unwrap();
    (world, kernel)
}

/// Nobody gets the file to read, and its blocks are no damage, as long as the daemon lives.
fn assert_kept(kernel: &Arc<KernelFs>) {
    assert!(kernel.store().latched().is_some());
    for _ in 0..2 {
        let client = Client::open(kernel, Peer::this_process(), hello()).unwrap();
        assert!(client.acquire(&[want(ROOT, LeaseMode::Read)]).is_err());
        assert!(kernel.store().is_torn());
        assert_eq!(kernel.store().check_data().unwrap(), []);
        kernel.tick();
    }
}

#[test]
fn torn_blocks_are_kept_from_readers_where_the_log_cannot_be_read() {
    let unreadable = FaultRule::always(FaultOp::Read, Fault::Errno(5));
    let (_world, kernel) = torn(Some(unreadable), None);
    assert_kept(&kernel);
}

#[test]
fn torn_blocks_are_kept_from_readers_where_the_pool_cannot_be_written() {
    let mut latched = 0;
    for calls in 0..40 {
        let broken = FaultRule::always(FaultOp::Write, Fault::Errno(5)).after(calls);
        let (_world, kernel) = torn(None, Some(broken));
        if kernel.store().latched().is_some() {
            latched += 1;
            assert_kept(&kernel);
        }
    }
    assert!(latched > 5, "{latched}");
}

#[test]
fn overwrite_that_fails_in_the_middle_makes_the_pool_read_only() {
    for fault in [Fault::Full, Fault::Errno(5), Fault::Short { bytes: 100 }] {
        let world = World::with(Config::default());
        let script = FaultScript::new();
        let devices = common::devices(&world.sim);
        let devices = Devices {
            nvm: Arc::new(FaultyRegion::new(devices.nvm, script.clone())),
            ..devices
        };
        let (store, _) = Store::open(devices, OpenOptions::default()).unwrap();
        let parts = Parts::new(
            store,
            Arc::clone(&world.logs) as _,
            Config::default(),
            Arc::new(ManualClock::new(START_NS + 2_000_000_000)),
        );
        let kernel = KernelFs::open(parts).unwrap();
        let mut client = Client::open(&kernel, Peer::this_process(), hello()).unwrap();
        let key = write_file(&mut client, b"f", &vec![1; 4 * BLOCK]);
        kernel.digest_all().unwrap();
        let place = kernel.store().map(key.ino, FileBlock(0), 1).unwrap()[0].block.0;
        for what in [2, 3] {
            client.log_op(&LogOp::Write {
                key,
                offset: 0,
                data: &[what; 2 * BLOCK],
            });
        }
        client.log_op(&LogOp::Write {
            key,
            offset: 0,
            data: &[4; BLOCK],
        });
        let second = (place + 1) * BLOCK_BYTES;
        script.push(FaultRule::once(FaultOp::Write, fault).within(second..second + 1));
        let _ = kernel.digest_all();
        assert_eq!(script.fired(), 1, "{fault:?}");
        // Its log redoes it; until then nothing moves it, and nothing takes it for whole.
        assert!(kernel.store().latched().is_some(), "{fault:?}");
        drop(kernel);
        let world = world.restart();
        let mut out = vec![0; 2 * BLOCK];
        world.kernel.store().read(key.ino, 0, &mut out).unwrap();
        assert_eq!((&out[..BLOCK], &out[BLOCK..]), (&[4; BLOCK][..], &[3; BLOCK][..]));
        assert_eq!(world.kernel.store().check_data().unwrap(), []);
    }
}

/// The daemon dies while the first block is overwritten; behind it the log has what needs a part of it.
fn torn_before(op: &dyn Fn(InodeKey) -> Vec<LogOp<'static>>) -> Vec<u8> {
    let world = World::with(Config::default());
    let mut client = world.client();
    client.write_lease(ROOT);
    let (key, _) = client.alloc(1)[0];
    client.create(b"f", key);
    client.log_op(&LogOp::Write {
        key,
        offset: 0,
        data: &[1; 4 * BLOCK],
    });
    world.kernel.digest_all().unwrap();
    let place = world.kernel.store().map(key.ino, FileBlock(0), 1).unwrap()[0]
        .block
        .0;
    client.log_op(&LogOp::Write {
        key,
        offset: 0,
        data: &[2; BLOCK],
    });
    for op in op(key) {
        client.log_op(&op);
    }
    let region = world.sim.region("nvm").unwrap();
    region.write(place * BLOCK_BYTES, &[2; BLOCK / 2]).unwrap();
    let world = world.restart();
    let status = world.kernel.status();
    assert_eq!(status.logs.damaged, 0);
    assert!(
        status.media.iter().all(|medium| medium.last.is_none()),
        "{:?}",
        status.media
    );
    assert_eq!(status.digest.refused, 0);
    assert_eq!(world.kernel.store().check_data().unwrap(), []);
    world.check();
    let mut out = vec![0; 5 * BLOCK];
    let len = world.kernel.store().read(key.ino, 0, &mut out).unwrap();
    out.truncate(len);
    out
}

#[test]
fn what_needs_a_part_of_a_torn_block_comes_after_what_makes_it_whole() {
    let cut = torn_before(&|key| vec![LogOp::Truncate { key, size: 100 }]);
    assert_eq!(cut, [2; 100]);
    let hole = torn_before(&|key| {
        vec![LogOp::Fallocate {
            key,
            mode: varve_format::FallocateMode::PunchHole,
            offset: 50,
            len: 100,
        }]
    });
    assert_eq!(
        (&hole[..50], &hole[50..150], &hole[150..BLOCK]),
        (&[2; 50][..], &[0; 100][..], &[2; BLOCK - 150][..])
    );
    let part = torn_before(&|key| {
        vec![LogOp::Write {
            key,
            offset: 7,
            data: &[3; 20],
        }]
    });
    assert_eq!(
        (&part[..7], &part[7..27], &part[27..BLOCK]),
        (&[2; 7][..], &[3; 20][..], &[2; BLOCK - 27][..])
    );
    let both = torn_before(&|key| {
        vec![
            LogOp::Truncate { key, size: 100 },
            LogOp::Truncate {
                key,
                size: 3 * BLOCK as u64,
            },
            LogOp::Write {
                key,
                offset: 200,
                data: &[3; 20],
            },
        ]
    });
    assert_eq!(
        (&both[..100], &both[100..200], &both[200..220]),
        (&[2; 100][..], &[0; 100][..], &[3; 20][..])
    );
}
