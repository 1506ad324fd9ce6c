//! A client that logs as fast as its log is digested: whoever digests for others must come to an end.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, START_NS, World, hello};
use std::sync::{Arc, Mutex};
use varve_format::log::{CHUNK_BYTES, LIVE_HEADER_SIZE};
use varve_format::{FileBlock, InodeKey, LogOp, LogSeq, Tier};
use varve_ipc::{ManualClock, Peer};
use varve_kernelfs::placement::{Placement, Use, Written};
use varve_kernelfs::{Config, KernelFs, Parts};
use varve_store::{DataTarget, OpenOptions, SpaceStats, Store};

/// Chunks of the log.
const CHUNKS: u64 = 4;
/// Entries that are written to one chunk: more than one batch has.
const ENTRIES: u64 = 8200;
/// Times that the client goes on when some of its log was digested.
const FEEDS: u64 = 24;

/// A client that writes another chunk whenever a batch of its log is applied.
struct Feed {
    client: Client,
    key: InodeKey,
    chunks: u64,
    left: u64,
}

impl Feed {
    fn write_chunk(&mut self) {
        let chunk = self.chunks % CHUNKS;
        let start = if chunk == 0 { LIVE_HEADER_SIZE as u64 } else { 0 };
        self.client.offset = chunk * CHUNK_BYTES + start;
        self.chunks += 1;
        for _ in 0..ENTRIES {
            self.client.log_op(&LogOp::Write {
                key: self.key,
                offset: 0,
                data: &[7; 128],
            });
        }
    }
}

#[derive(Clone, Default)]
struct Feeder(Arc<Mutex<Option<Feed>>>);

impl Placement for Feeder {
    fn target(&self, _: &Written, _: &SpaceStats) -> DataTarget {
        DataTarget::prefer(Tier::Nvm)
    }

    fn used(&self, _: InodeKey, _: FileBlock, _: u64, how: Use) {
        if let (Use::Written, Some(feed)) = (how, &mut *self.0.lock().unwrap())
            && feed.left > 0
        {
            feed.left -= 1;
            feed.write_chunk();
        }
    }
}

#[test]
fn digest_ends_although_its_client_logs_as_fast_as_it_digests() {
    let world = World::new();
    let (sim, logs) = (world.sim.clone(), Arc::clone(&world.logs));
    drop(world);
    let (store, _) = Store::open(common::devices(&sim), OpenOptions::default()).unwrap();
    let feeder = Feeder::default();
    let config = Config {
        log_initial_bytes: CHUNKS * CHUNK_BYTES,
        ..Config::default()
    };
    let clock = Arc::new(ManualClock::new(START_NS + 2_000_000_000));
    let kernel = KernelFs::open(Parts {
        placement: Box::new(feeder.clone()),
        ..Parts::new(store, logs, config, clock)
    })
    .unwrap();
    let mut client = Client::open(&kernel, Peer::this_process(), hello()).unwrap();
    let (page, id) = (Arc::clone(&client.page), client.id());
    client.write_lease(common::ROOT);
    let (key, _) = client.alloc(1)[0];
    client.create(b"file", key);
    kernel.digest_all().unwrap();
    let mut feed = Feed {
        client,
        key,
        chunks: 0,
        left: FEEDS,
    };
    // Always two batches ahead of the digest, as the next one is gathered while one is applied.
    (0..3).for_each(|_| feed.write_chunk());
    let logged = LogSeq(feed.client.seq);
    *feeder.0.lock().unwrap() = Some(feed);
    kernel.digest_all().unwrap();
    let mut feed = feeder.0.lock().unwrap().take().unwrap();
    assert!(
        feed.left > FEEDS / 3,
        "it went on for {} chunks of a log of {CHUNKS}",
        FEEDS - feed.left
    );
    use varve_ipc::SessionPage;
    assert!(page.digested() >= logged, "what was logged before is digested");
    feed.left = 0;
    // What came meanwhile is digested next.
    while page.digested() < LogSeq(feed.client.seq) {
        let before = page.digested();
        kernel.digest_all().unwrap();
        assert!(page.digested() > before, "{id}");
    }
}
