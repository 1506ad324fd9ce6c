//! A pool that was shut down is opened again at once in the same process, while threads of its mounts may
//! still be at their last requests.
#![allow(clippy::unwrap_used)]

use varve_embed::{Embedded, SimPool};
use varve_ipc::Cred;
use varve_kernelfs::Config;
use varve_libfs::OpenFlags;
use varve_media::sim::{SimMedium, SimWorld};

const POOL: SimPool = SimPool {
    medium: SimMedium::Dax,
    nvm_bytes: 64 << 20,
    journal_bytes: 2 << 20,
    ssd_bytes: 64 << 20,
    hdd_bytes: 0,
};
const MOUNTS: usize = 4;
const ROUNDS: usize = 8;
const FILES: usize = 120;

fn open(world: &SimWorld) -> Embedded {
    let config = Config {
        grace_ms: 0,
        ..Config::default()
    };
    POOL.open(world, config).unwrap()
}

/// The logs of mounts that are dropped are digested by whoever comes to it; a daemon that had ended went on
/// writing beside the next one.
#[test]
fn pool_that_is_opened_again_at_once_is_whole_though_its_mounts_were_only_dropped() {
    let world = SimWorld::new();
    POOL.mkfs(&world).unwrap();
    let me = Cred::root();
    for round in 0..ROUNDS {
        let embedded = open(&world);
        assert_eq!(embedded.kernel().store().check().unwrap(), [], "round {round}");
        assert_eq!(
            embedded.kernel().store().check_data().unwrap(),
            [],
            "round {round}"
        );
        embedded.start().unwrap();
        let mounts: Vec<_> = (0..MOUNTS).map(|_| embedded.mount().unwrap()).collect();
        for (mount, fs) in mounts.iter().enumerate() {
            let dir = format!("{round} {mount}");
            let dir = fs
                .create(fs.root(), dir.as_bytes(), 0o040_755, 0, &me)
                .unwrap()
                .key;
            for file in 0..FILES {
                let made = fs
                    .create(dir, format!("{file}").as_bytes(), 0o100_644, 0, &me)
                    .unwrap();
                let open = fs.open(made.key, OpenFlags::READ_WRITE, &me).unwrap();
                assert_eq!(open.write_at(0, &[round as u8; 5000], &me).unwrap(), 5000);
            }
        }
        drop(mounts);
        embedded.shutdown().unwrap();
    }
    let embedded = open(&world);
    let fs = embedded.mount().unwrap();
    for round in 0..ROUNDS {
        for mount in 0..MOUNTS {
            let dir = fs
                .lookup(fs.root(), format!("{round} {mount}").as_bytes(), &me)
                .unwrap()
                .key;
            assert_eq!(fs.readdir(dir, 0, 1000).unwrap().len(), FILES, "{round} {mount}");
        }
    }
    fs.unmount().unwrap();
    embedded.shutdown().unwrap();
}

/// Whether rows of sessions say that their logs are on the disk, in no order.
fn synced(embedded: &Embedded) -> Vec<bool> {
    let rows = embedded.kernel().store().sessions().unwrap();
    rows.iter()
        .map(|row| row.flags & varve_format::session::SESSION_SYNCED != 0)
        .collect()
}

#[test]
fn log_on_a_disk_is_noted_with_its_first_sync_and_missed_from_then_on() {
    let me = Cred::root();
    for (syncs, medium) in [
        (false, SimMedium::File),
        (true, SimMedium::File),
        (true, SimMedium::Dax),
    ] {
        let (world, pool) = (SimWorld::new(), SimPool { medium, ..POOL });
        pool.mkfs(&world).unwrap();
        let config = Config {
            grace_ms: 0,
            sync_ms: 0,
            ..Config::default()
        };
        let embedded = pool.open(&world, config.clone()).unwrap();
        let fs = embedded.mount().unwrap();
        let made = fs.create(fs.root(), b"file", 0o100_644, 0, &me).unwrap();
        let open = fs.open(made.key, OpenFlags::READ_WRITE, &me).unwrap();
        open.write_at(0, b"first", &me).unwrap();
        // Part of it is digested.
        embedded.kernel().digest_all().unwrap();
        open.write_at(0, b"second", &me).unwrap();
        assert_eq!(synced(&embedded), [false]);
        if syncs {
            open.fsync(false).unwrap();
            let noted = medium == SimMedium::File;
            assert_eq!(synced(&embedded), [noted]);
        }
        // The daemon dies, and the log is not there when the next one starts.
        std::mem::forget((open, fs, embedded));
        for name in world.names().iter().filter(|name| name.starts_with("log-")) {
            assert!(world.remove(name));
        }
        let embedded = pool.open(&world, config).unwrap();
        let damage = format!("{:?}", embedded.kernel().status());
        assert_eq!(damage.contains("the log is gone"), syncs, "{damage}");
    }
}
