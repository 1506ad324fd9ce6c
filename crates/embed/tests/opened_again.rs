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
