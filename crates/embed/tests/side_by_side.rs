//! Logs of several sessions digested side by side while the pool's metadata goes down and comes up under all
//! of them.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use varve_embed::{Embedded, SimPool};
use varve_format::{InodeKey, Tier};
use varve_ipc::Cred;
use varve_kernelfs::Config;
use varve_libfs::{Fs, OpenFlags, RenameFlags};
use varve_media::sim::SimWorld;

const POOL: SimPool = SimPool {
    medium: varve_media::sim::SimMedium::Dax,
    nvm_bytes: 6 << 20,
    journal_bytes: 2 << 20,
    ssd_bytes: 24 << 20,
    hdd_bytes: 48 << 20,
};

const MOUNTS: usize = 4;
const FILES: usize = 900;
const DIR: u32 = 0o040_755;
const FILE: u32 = 0o100_644;

fn open(world: &SimWorld) -> Embedded {
    let config = Config {
        grace_ms: 0,
        digest_threads: 3,
        log_initial_bytes: 2 << 20,
        ..Config::default()
    };
    POOL.open(world, config).unwrap()
}

/// Names of one mount, long enough that few fit into a block; every third one is of all mounts' directory.
fn name(mount: usize, file: usize) -> Vec<u8> {
    format!("{:a<90}{mount}-{file}", "").into_bytes()
}

fn is_shared(file: usize) -> bool {
    file.is_multiple_of(3)
}

/// Files are made in one's own directory. Some go to the shared one, some are removed, the others are
/// written.
fn run(fs: &Fs, mount: usize, own: InodeKey, shared: InodeKey) {
    let me = Cred::root();
    for file in 0..FILES {
        let key = fs.create(own, &name(mount, file), FILE, 0, &me).unwrap().key;
        if file % 2 == 0 {
            let open = fs.open(key, OpenFlags::READ_WRITE, &me).unwrap();
            let text = format!("{mount} {file}");
            assert_eq!(open.write_at(0, text.as_bytes(), &me).unwrap(), text.len());
        }
        if is_shared(file) {
            let to = name(mount, file);
            fs.rename(own, &to, shared, &to, RenameFlags::default(), &me)
                .unwrap();
        }
        // One of long ago, whose metadata is away by now.
        if let Some(old) = file.checked_sub(FILES / 2).filter(|old| old % 5 == 0) {
            let from = if is_shared(old) { shared } else { own };
            fs.unlink(from, &name(mount, old), &me).unwrap();
        }
    }
}

#[test]
fn metadata_goes_down_and_comes_up_under_several_digests() {
    let world = SimWorld::new();
    POOL.mkfs(&world).unwrap();
    let embedded = open(&world);
    embedded.start().unwrap();
    let me = Cred::root();
    let mounts: Vec<Fs> = (0..MOUNTS).map(|_| embedded.mount().unwrap()).collect();
    let root = mounts[0].root();
    let make = |name: &str| mounts[0].create(root, name.as_bytes(), DIR, 0, &me).unwrap().key;
    let shared = make("shared");
    let own: Vec<InodeKey> = (0..MOUNTS).map(|mount| make(&format!("own {mount}"))).collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let store = embedded.kernel().store();
        let over = &over;
        // Whatever room there is.
        scope.spawn(move || {
            while !over.load(Ordering::Acquire) {
                store.demote(64).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let start = |(mount, fs): (usize, &'_ Fs)| {
            let own = format!("own {mount}");
            let own = fs.lookup(root, own.as_bytes(), &Cred::root()).unwrap().key;
            let fs = fs.clone();
            scope.spawn(move || run(&fs, mount, own, shared))
        };
        let threads: Vec<_> = mounts.iter().enumerate().map(start).collect();
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        over.store(true, Ordering::Release);
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    drop(mounts);
    embedded.kernel().digest_all().unwrap();
    let moved = embedded.kernel().store().demotion_stats();
    assert!(moved.away > 100 && moved.back > 0, "{moved:?}");
    assert_eq!(embedded.kernel().status().digest.refused, 0);
    embedded.shutdown().unwrap();
    let embedded = open(&world);
    assert_eq!(embedded.kernel().store().check().unwrap(), []);
    assert_eq!(embedded.kernel().store().check_data().unwrap(), []);
    let fs = embedded.mount().unwrap();
    for (mount, own) in own.iter().enumerate() {
        for file in 0..FILES {
            let dir = if is_shared(file) { shared } else { *own };
            let gone = file < FILES.div_ceil(2) && file % 5 == 0;
            let found = fs.lookup(dir, &name(mount, file), &me);
            assert_eq!(found.is_err(), gone, "{mount} {file}: {found:?}");
            if let Ok(attr) = found
                && file % 2 == 0
            {
                let text = format!("{mount} {file}").into_bytes();
                let mut bytes = vec![0; text.len()];
                let open = fs.open(attr.key, OpenFlags::READ, &me).unwrap();
                assert_eq!(open.read_at(0, &mut bytes).unwrap(), text.len());
                assert_eq!(bytes, text);
            }
        }
    }
    assert!(embedded.kernel().store().space().tiers[Tier::Nvm as usize].free > 0);
}
