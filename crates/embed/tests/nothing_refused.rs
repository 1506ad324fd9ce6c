//! Threads that open, change, unlink and close the same few names: whatever the client logs, the digest
//! takes.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};
use varve_embed::SimPool;
use varve_ipc::Cred;
use varve_kernelfs::Config;
use varve_libfs::{AttrChange, Errno, Fs, OpenFlags, RenameFlags};
use varve_media::sim::SimWorld;

const FILE: u32 = libc::S_IFREG | 0o644;
/// What one caller's race with another may end in.
const ALLOWED: &[i32] = &[libc::ENOENT, libc::EEXIST, libc::ESTALE];

fn random(seed: &mut u64, bound: u64) -> u64 {
    *seed = seed
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) % bound
}

fn step(fs: &Fs, seed: &mut u64) -> Result<(), Errno> {
    let me = Cred::root();
    let name = format!("n{}", random(seed, 3));
    let name = name.as_bytes();
    let both = OpenFlags::READ_WRITE;
    match random(seed, 5) {
        0 | 1 => {
            let key = fs.create(fs.root(), name, FILE, 0, &me)?.key;
            let file = fs.open(key, both, &me)?;
            file.write_at(0, b"some bytes", &me)?;
            file.read_at(0, &mut [0; 4])?;
        }
        2 => fs.unlink(fs.root(), name, &me)?,
        3 => {
            let key = fs.lookup(fs.root(), name, &me)?.key;
            let change = AttrChange {
                mode: Some(0o600),
                size: Some(3),
                ..AttrChange::default()
            };
            fs.setattr(key, &change, &me)?;
        }
        _ => {
            let key = fs.lookup(fs.root(), name, &me)?.key;
            let file = fs.open(key, both, &me)?;
            match fs.unlink(fs.root(), name, &me) {
                Ok(()) | Err(Errno(libc::ENOENT)) => {}
                Err(errno) => return Err(errno),
            }
            file.append(b"more", &me)?;
            let change = AttrChange {
                mode: Some(0o640),
                ..AttrChange::default()
            };
            fs.setattr(key, &change, &me)?;
        }
    }
    Ok(())
}

#[test]
fn unlinked_and_closed_file_is_stale_for_those_who_come_late() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let embedded = SimPool::default().open(&world, Config::default()).unwrap();
    let fs = embedded.mount().unwrap();
    let me = Cred::root();
    let key = fs.create(fs.root(), b"a", FILE, 0, &me).unwrap().key;
    fs.create(fs.root(), b"b", FILE, 0, &me).unwrap();
    fs.rename(fs.root(), b"b", fs.root(), b"a", RenameFlags::default(), &me)
        .unwrap();
    for change in [
        AttrChange {
            mode: Some(0o600),
            ..AttrChange::default()
        },
        AttrChange {
            size: Some(3),
            ..AttrChange::default()
        },
    ] {
        let late = fs.setattr(key, &change, &me).map(|_| ());
        assert_eq!(late, Err(Errno(libc::ESTALE)));
    }
    let late = fs.setxattr(key, b"user.x", b"1", false, false, &me);
    assert_eq!(late, Err(Errno(libc::ESTALE)));
    embedded.kernel().digest_all().unwrap();
    assert_eq!(embedded.kernel().status().digest.refused, 0);
    fs.unmount().unwrap();
    drop(fs);
    embedded.shutdown().unwrap();
}

#[test]
fn nothing_is_refused_when_threads_race_for_the_last_close_of_unlinked_files() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let embedded = SimPool::default().open(&world, Config::default()).unwrap();
    embedded.start().unwrap();
    let fs = embedded.mount().unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Numbers come back to their session as soon as their inodes are gone.
        let digester = scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                embedded.kernel().digest_all().unwrap();
            }
        });
        let workers: Vec<_> = (0..4_u64)
            .map(|thread| {
                let fs = &fs;
                scope.spawn(move || {
                    let mut seed = 1 + thread * 13;
                    for _ in 0..1500 {
                        if let Err(errno) = step(fs, &mut seed) {
                            assert!(ALLOWED.contains(&errno.0), "{errno}");
                        }
                    }
                })
            })
            .collect();
        let ends: Vec<_> = workers
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect();
        over.store(true, Ordering::Release);
        digester.join().unwrap();
        ends.into_iter().for_each(|end| end.unwrap());
    });
    embedded.kernel().digest_all().unwrap();
    let status = embedded.kernel().status();
    assert!(
        status.digest.operations > 1000,
        "it did something: {}",
        status.digest.operations
    );
    assert_eq!(status.digest.refused, 0);
    fs.unmount().unwrap();
    drop(fs);
    embedded.shutdown().unwrap();
}
