//! Data that goes to a device in one transaction: small runs side by side are one write, and are read back
//! before it is made.

use super::{NVM, Rig, devices_of, make, pattern};
use crate::{DataTarget, OpenOptions, Store};
use parking_lot::Mutex;
use std::sync::Arc;
use varve_format::{FileBlock, ROOT_INO, Tier};
use varve_media::{BlockDevice, DeviceInfo, MediaError};

/// A device that notes its writes: first byte and length.
struct Noted {
    inner: Arc<dyn BlockDevice>,
    writes: Arc<Mutex<Vec<(u64, usize)>>>,
}

impl BlockDevice for Noted {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.inner.read(off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.writes.lock().push((off, src.len()));
        self.inner.write(off, src)
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.inner.flush()
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.inner.trim(off, len)
    }

    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
}

#[test]
fn scattered_blocks_that_move_in_one_transaction_are_one_write() {
    let Rig { world, store } = Rig::new();
    drop(store);
    let writes = Arc::new(Mutex::new(Vec::new()));
    let mut devices = devices_of(&world);
    devices.hdd = devices.hdd.map(|inner| {
        let writes = Arc::clone(&writes);
        Arc::new(Noted { inner, writes }) as _
    });
    let (store, _) = Store::open(devices, OpenOptions::default()).unwrap();
    let mut tx = store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    tx.commit().unwrap();
    // Two blocks of each eight, so that they are no run of the file.
    let data = |n: u64| pattern(8192, n);
    for n in 0..20 {
        let mut tx = store.begin().unwrap();
        tx.write_data(file, FileBlock(n * 8), &data(n), true, NVM)
            .unwrap();
        tx.commit().unwrap();
    }
    writes.lock().clear();
    let mut tx = store.begin().unwrap();
    for n in 0..20 {
        let old = store.map(file, FileBlock(n * 8), 1).unwrap()[0];
        let moved = tx.migrate(
            file,
            FileBlock(n * 8),
            2,
            (Tier::Nvm, old.block),
            DataTarget::only(Tier::Hdd),
        );
        assert!(moved.unwrap());
        let mut back = vec![0; 8192];
        tx.read(file, n * 8 * 4096, &mut back).unwrap();
        assert!(back == data(n), "as this transaction sees it");
    }
    assert!(writes.lock().is_empty());
    tx.commit().unwrap();
    let written = writes.lock().clone();
    assert_eq!(written.len(), 1, "{written:?}");
    assert_eq!(written[0].1, 20 * 8192);
    for n in 0..20 {
        let mut back = vec![0; 8192];
        store.read(file, n * 8 * 4096, &mut back).unwrap();
        assert!(back == data(n));
    }
}
