//! Two sessions that take strict turns at a file, by a token that they rename: what a turn costs, and that
//! nobody starves.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_embed::{Embedded, SimPool};
use varve_ipc::{Cred, ManualClock};
use varve_kernelfs::Config;
use varve_libfs::{Errno, Fs, FsOptions, OpenFile, OpenFlags, RenameFlags};
use varve_media::sim::SimWorld;

const FILE: u32 = libc::S_IFREG | 0o644;
const RW: OpenFlags = OpenFlags {
    read: true,
    write: true,
    append: false,
    truncate: false,
    sync: false,
    dsync: false,
    direct: false,
    no_atime: false,
};

/// A pool whose time stands still: nothing is contended for less long, and nobody waits for less long,
/// because a machine is slow.
fn pool(clock: &Arc<ManualClock>) -> Embedded {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let config = Config {
        min_hold_ms: 0,
        ..Config::default()
    };
    let parts = SimPool::default().parts(&world, config, Arc::clone(clock) as _);
    Embedded::open(parts.unwrap().0).unwrap()
}

fn mount(embedded: &Embedded, clock: &Arc<ManualClock>) -> Fs {
    let options = FsOptions {
        clock: Arc::clone(clock) as _,
        ..FsOptions::default()
    };
    Fs::mount(embedded.connector(), options).unwrap()
}

/// One of the two.
struct Player {
    fs: Fs,
    who: usize,
    data: OpenFile,
}

impl Player {
    fn rename(&self, from: &str, to: &str) -> Result<(), Errno> {
        let (root, me) = (self.fs.root(), Cred::root());
        let (from, to) = (from.as_bytes(), to.as_bytes());
        self.fs.rename(root, from, root, to, RenameFlags::default(), &me)
    }

    /// Takes the token if it is there, counts in the file, and hands the token on.
    fn turn(&self) -> bool {
        let (own, other) = (format!("token-{}", self.who), format!("token-{}", 1 - self.who));
        match self.rename(&own, "held") {
            Ok(()) => {}
            Err(Errno(libc::ENOENT)) => return false,
            Err(errno) => panic!("{errno}"),
        }
        let mut count = [0; 8];
        self.data.read_at(0, &mut count).unwrap();
        let count = u64::from_le_bytes(count) + 1;
        let written = self.data.write_at(0, &count.to_le_bytes(), &Cred::root());
        assert_eq!(written, Ok(8));
        self.rename("held", &other).unwrap();
        true
    }
}

fn players(embedded: &Embedded, clock: &Arc<ManualClock>) -> [Player; 2] {
    let maker = mount(embedded, clock);
    let me = Cred::root();
    let data = maker.create(maker.root(), b"data", FILE, 0, &me).unwrap().key;
    let file = maker.open(data, RW, &me).unwrap();
    file.write_at(0, &[0; 8], &me).unwrap();
    drop(file);
    maker.create(maker.root(), b"token-0", FILE, 0, &me).unwrap();
    maker.unmount().unwrap();
    [0, 1].map(|who| {
        let fs = mount(embedded, clock);
        let key = fs.lookup(fs.root(), b"data", &me).unwrap().key;
        let data = fs.open(key, RW, &me).unwrap();
        Player { fs, who, data }
    })
}

#[test]
fn turns_are_forwarded_and_leases_return_when_one_is_left() {
    let clock = Arc::new(ManualClock::new(1));
    let embedded = pool(&clock);
    embedded.start().unwrap();
    let players = players(&embedded, &clock);
    for _ in 0..20 {
        assert!(players[0].turn() && players[1].turn());
    }
    let totals = || players.each_ref().map(|player| player.fs.counters());
    let before = totals();
    for _ in 0..50 {
        assert!(!players[1].turn(), "it is the other's turn");
        assert!(players[0].turn() && players[1].turn());
    }
    for (before, after) in before.iter().zip(totals()) {
        assert_eq!(after.forwarded - before.forwarded, 50 * 3, "renames and writes");
        // The file is read under a lease, which goes back for the write. Nothing else is asked for.
        assert_eq!(after.acquires - before.acquires, 50);
        assert_eq!(after.names_missed, before.names_missed);
    }
    // One is left: by and by it has everything under leases.
    let left = &players[0];
    for _ in 0..10 {
        clock.advance_ms(100);
        left.rename("token-0", "mine").unwrap();
        left.data.write_at(8, b"mine", &Cred::root()).unwrap();
        left.rename("mine", "token-0").unwrap();
    }
    let before = left.fs.counters();
    for _ in 0..50 {
        left.rename("token-0", "mine").unwrap();
        left.data.write_at(8, b"mine", &Cred::root()).unwrap();
        left.rename("mine", "token-0").unwrap();
    }
    let after = left.fs.counters();
    assert_eq!(
        (after.forwarded, after.acquires),
        (before.forwarded, before.acquires)
    );
    assert_eq!(after.logged - before.logged, 150);
    // And the other is not shut out.
    assert!(!players[1].turn());
    assert!(players[0].turn() && players[1].turn());
    let mut count = [0; 8];
    players[0].data.read_at(0, &mut count).unwrap();
    assert_eq!(u64::from_le_bytes(count), 20 * 2 + 50 * 2 + 2);
    drop(players);
    embedded.shutdown().unwrap();
}

#[test]
fn two_threads_that_wait_for_their_turns_both_get_all_of_them() {
    let clock = Arc::new(ManualClock::new(1));
    let embedded = pool(&clock);
    embedded.start().unwrap();
    let players = players(&embedded, &clock);
    let turns = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for player in &players {
            let (turns, clock) = (&turns, &clock);
            scope.spawn(move || {
                let mut own = 0;
                while own < 300 {
                    if player.turn() {
                        own += 1;
                        // Into trials of leases and out of them again.
                        if turns.fetch_add(1, Ordering::Relaxed) % 3 == 0 {
                            clock.advance_ms(1);
                        }
                    } else {
                        std::thread::yield_now();
                    }
                }
            });
        }
    });
    let mut count = [0; 8];
    players[0].data.read_at(0, &mut count).unwrap();
    assert_eq!(u64::from_le_bytes(count), 600);
    drop(players);
    embedded.shutdown().unwrap();
}
