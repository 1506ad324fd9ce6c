//! Reads during which other threads write, and the daemon overwrites a block in place with the written data.

use super::fake::{Fake, attr};
use crate::data::DataPlane;
use crate::inode::Inode;
use crate::seeded::{Bug, arm};
use std::sync::Arc;
use varve_format::log::CHUNK_BYTES;
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, EntryFlags, FileBlock};
use varve_ipc::{Link, ManualClock, Request, Response};
use varve_media::lock::Mutex;
use varve_media::{DeviceInfo, MediaError, Region};

type Hook = Box<dyn FnOnce() + Send>;

/// NVM that runs an action in the middle of the next read.
struct Interrupted {
    inner: Arc<dyn Region>,
    hook: Mutex<Option<Hook>>,
}

impl Region for Interrupted {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let Some(hook) = self.hook.lock().take() else {
            return self.inner.read(off, out);
        };
        let (front, back) = out.split_at_mut(out.len() / 2);
        self.inner.read(off, front)?;
        hook();
        self.inner.read(off + front.len() as u64, back)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.inner.write(off, src)
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        self.inner.write_crc(off, src, seed)
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.inner.fence()
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.inner.sync(off, len)
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        self.inner.grow(new_len)
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.inner.allocate(off, len)
    }

    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
}

/// Returns the result of a read of a block of ones, during which it is overwritten with twos in the log and
/// in place, and then with threes in the log; and whether the read was optimistic. `bug`: in the reader.
fn read_amid(tries: bool, bug: Option<Bug>) -> (Vec<u8>, bool) {
    let dir = tempfile::tempdir().unwrap();
    // So long that each thread of the tests has a lane: a write without one waits for the read, which waits for it.
    let fake = Fake::new(dir.path(), 2 * CHUNK_BYTES, 128 * CHUNK_BYTES, 60_000);
    let nvm = Arc::new(Interrupted {
        inner: fake.nvm.clone(),
        hook: Mutex::new(None),
    });
    let plane = Arc::new(DataPlane::new(
        &fake.welcome(),
        fake.clone(),
        fake.page.clone(),
        Some(fake.log.clone()),
        Some(nvm.clone()),
        None,
        Arc::new(ManualClock::new(1_000)),
    ));
    let inode = Arc::new(Inode::new(attr(7)));
    let write = |plane: &DataPlane, inode: &Arc<Inode>, what: u8| {
        plane
            .write(inode, 0, &[what; BLOCK_SIZE], EntryFlags::empty())
            .unwrap();
    };
    write(&plane, &inode, 1);
    fake.digest(u64::MAX);
    plane.reclaim();
    let mut out = vec![0; BLOCK_SIZE];
    plane.read(&inode, 0, &mut out).unwrap();
    assert_eq!(out, [1; BLOCK_SIZE]);
    let request = Request::MapExtents {
        key: inode.key,
        from: FileBlock(0),
        max: 1,
    };
    let Response::Extents(runs, _) = fake.call(request).unwrap() else {
        panic!("the daemon does not say where the block is");
    };
    let place = runs[0].block.0;
    *nvm.hook.lock() = Some({
        let (plane, inode, nvm) = (plane.clone(), inode.clone(), nvm.clone());
        Box::new(move || {
            // Another thread's: it has no bug.
            let others = std::thread::spawn(move || {
                write(&plane, &inode, 2);
                nvm.inner.write(place * BLOCK_BYTES, &[2; BLOCK_SIZE]).unwrap();
                write(&plane, &inode, 3);
            });
            others.join().unwrap();
        })
    });
    arm(bug);
    let tried = tries
        .then(|| plane.try_read(&inode, 0, &mut out, || true))
        .flatten();
    if tried.is_none() {
        plane.read(&inode, 0, &mut out).unwrap();
    }
    arm(None);
    assert!(nvm.hook.lock().is_none(), "something happened amid the read");
    (out, tried.is_some())
}

#[test]
fn read_amid_which_a_block_is_overwritten_in_place_shows_one_of_its_contents() {
    for tries in [false, true] {
        let (out, tried) = read_amid(tries, None);
        assert_eq!(out, [3; BLOCK_SIZE]);
        assert!(!tried, "what was tried does not count");
        if cfg!(debug_assertions) {
            // A write that finds its lane taken by another test's thread ends the optimistic read in any
            // case.
            let mut reads = (0..20).map(|_| read_amid(tries, Some(Bug::ReadUnderOverwrite)));
            let read = reads.find(|(_, tried)| *tried == tries);
            let (out, _) = read.expect("one of the reads is as asked for");
            assert!(out.contains(&1) && out.contains(&2), "the bug shows a torn block");
        }
    }
}
