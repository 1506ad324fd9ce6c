//! Old blocks on a slower tier are read before the transaction that merges them.

use super::machine::{FILE, Machine, ROOT, devices};
use crate::digest::{BatchLimit, Digested, Environment, GatherLimits, Source, digest};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use varve_format::{FileBlock, InodeKey, LogOp, Tier};
use varve_media::{BlockDevice, DeviceInfo, DeviceState, MediaError};
use varve_store::{DataTarget, Devices};

const BLOCK: usize = 4096;
/// More than are fetched at once.
const BLOCKS: u64 = 2200;

/// A device that asks before each read, and waits for the answer.
struct Asking {
    device: Arc<dyn BlockDevice>,
    asks: parking_lot::Mutex<Option<(Sender<()>, Receiver<()>)>>,
    waited_in_vain: AtomicBool,
}

impl BlockDevice for Asking {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.read_batch(&mut [(off, out)])
    }

    fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        if !self.waited_in_vain.load(Ordering::Relaxed)
            && let Some((ask, answer)) = &*self.asks.lock()
        {
            ask.send(()).unwrap();
            let answered = answer.recv_timeout(Duration::from_secs(20)).is_ok();
            self.waited_in_vain.fetch_or(!answered, Ordering::Relaxed);
        }
        self.device.read_batch(parts)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.device.write(off, src)
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.device.flush()
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.device.trim(off, len)
    }

    fn state(&self) -> DeviceState {
        self.device.state()
    }

    fn info(&self) -> DeviceInfo {
        self.device.info()
    }
}

/// A machine with a file of `BLOCKS` whole blocks on the SSD, which asks.
fn machine() -> (Machine, InodeKey, Arc<Asking>) {
    let mut machine = Machine::with_flash();
    let key = machine.numbers(1)[0];
    machine.create(ROOT, b"f", key, FILE);
    machine.digest(1000).unwrap();
    let mut tx = machine.store.begin().unwrap();
    for at in 0..BLOCKS {
        let target = DataTarget::only(Tier::Ssd);
        tx.write_data(key.ino, FileBlock(at), &[at as u8; BLOCK], true, target)
            .unwrap();
    }
    tx.commit().unwrap();
    let world = machine.world.clone();
    let (seq, end) = machine.at();
    drop(machine);
    let plain = devices(&world);
    let asking = Arc::new(Asking {
        device: plain.ssd.clone().unwrap(),
        asks: parking_lot::Mutex::new(None),
        waited_in_vain: AtomicBool::new(false),
    });
    let with_it = Devices {
        ssd: Some(Arc::clone(&asking) as _),
        ..plain
    };
    let mut machine = Machine::open_on(world, with_it);
    machine.go_on_at(seq, end);
    // Footers are read once.
    machine.data(key);
    (machine, key, asking)
}

#[test]
fn other_transactions_commit_while_a_digest_reads_old_blocks() {
    let (mut machine, key, asking) = machine();
    let mut expected = machine.data(key);
    for at in 0..BLOCKS {
        let offset = at * BLOCK as u64 + at % 1000;
        machine.op(LogOp::Write {
            key,
            offset,
            data: &[0xaa; 20],
        });
        expected[offset as usize..][..20].fill(0xaa);
    }
    let log = machine.log();
    let newest = machine.store.newest_tx();
    let batch = machine
        .reader
        .gather(
            &*log,
            machine.digested(),
            &|| newest,
            BatchLimit::Live(None),
            &GatherLimits::default(),
        )
        .unwrap();
    let source = Source {
        batch: &batch,
        log: &*log,
        client: machine.client(),
    };
    let (ask, asked) = channel();
    let (answer, answered) = channel();
    *asking.asks.lock() = Some((ask, answered));
    let store = &machine.store;
    let reads = std::thread::scope(|scope| {
        let other = scope.spawn(move || {
            let mut reads = 0;
            while asked.recv().is_ok() {
                let mut tx = store.begin().unwrap();
                tx.edit(ROOT.ino, |attr| attr.mtime_ns += 1).unwrap();
                tx.commit().unwrap();
                reads += 1;
                // Whoever asked may have given up.
                let _ = answer.send(());
            }
            reads
        });
        let env = Environment {
            fetch_blocks: 1000,
            ..machine.environment()
        };
        let done = digest(store, &[source], &env, || (), &mut |_| {}).unwrap();
        assert_eq!(done, Digested::All);
        *asking.asks.lock() = None;
        other.join().unwrap()
    });
    let in_vain = asking.waited_in_vain.load(Ordering::Relaxed);
    assert!(
        !in_vain,
        "no other transaction was possible while the digest read"
    );
    assert_eq!(
        reads,
        BLOCKS.div_ceil(1000),
        "as much as is fetched at once, and the rest"
    );
    assert!(machine.data(key) == expected);
}
