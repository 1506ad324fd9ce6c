//! Data many times the NVM, through real clients: it spills to every tier, the end of space is told before
//! anything is lost.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use varve_embed::{Embedded, SimPool};
use varve_ipc::Cred;
use varve_kernelfs::Config;
use varve_libfs::{Errno, Fs, OpenFlags};
use varve_media::sim::SimWorld;

/// Bytes of one file.
const FILE: usize = 640 << 10;

const POOL: SimPool = SimPool {
    medium: varve_media::sim::SimMedium::Dax,
    nvm_bytes: 24 << 20,
    journal_bytes: 2 << 20,
    ssd_bytes: 24 << 20,
    hdd_bytes: 64 << 20,
};

fn open(world: &SimWorld) -> Embedded {
    // No grace: what is deleted is freed at once.
    let config = Config {
        grace_ms: 0,
        ..Config::default()
    };
    POOL.open(world, config).unwrap()
}

fn body(number: u64) -> Vec<u8> {
    (0..FILE as u64 / 8)
        .flat_map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number << 9).to_le_bytes())
        .collect()
}

fn name(number: u64) -> Vec<u8> {
    format!("file-{number}").into_bytes()
}

fn write_file(fs: &Fs, number: u64) -> Result<(), Errno> {
    let root = Cred::root();
    let attr = fs.create(fs.root(), &name(number), 0o100_644, 0, &root)?;
    let flags = OpenFlags::READ_WRITE;
    let written = fs.open(attr.key, flags, &root).and_then(|file| {
        let (body, mut at) = (body(number), 0);
        while at < body.len() {
            at += file.write_at(at as u64, &body[at..], &root)?;
        }
        Ok(())
    });
    if written.is_err() {
        fs.unlink(fs.root(), &name(number), &root)?;
    }
    written
}

fn read_file(fs: &Fs, number: u64) -> Vec<u8> {
    let root = Cred::root();
    let attr = fs.lookup(fs.root(), &name(number), &root).unwrap();
    let file = fs.open(attr.key, OpenFlags::READ, &root).unwrap();
    let (mut out, mut at) = (vec![0; FILE + 1], 0);
    loop {
        match file.read_at(at as u64, &mut out[at..]).unwrap() {
            0 => break,
            count => at += count,
        }
    }
    out.truncate(at);
    out
}

/// Background work, now.
fn work(embedded: &Embedded) {
    embedded.tick();
    while embedded.kernel().place() > 0 {}
}

#[test]
fn pool_many_times_its_nvm_keeps_everything_until_it_is_full_and_after() {
    let world = SimWorld::new();
    POOL.mkfs(&world).unwrap();
    let embedded = open(&world);
    let fs = embedded.mount().unwrap();
    let mut files = BTreeMap::new();
    let mut number = 0;
    let full = loop {
        match write_file(&fs, number) {
            Ok(()) => files.insert(number, ()),
            Err(error) => break error,
        };
        number += 1;
        work(&embedded);
        if number % 8 == 0 {
            // Meanwhile files go, and old ones are read.
            let gone = number / 2;
            if files.remove(&gone).is_some() {
                fs.unlink(fs.root(), &name(gone), &Cred::root()).unwrap();
            }
            assert!(read_file(&fs, 0) == body(0));
        }
        assert!(number < 400, "it never becomes full");
    };
    assert_eq!(full.0, libc::ENOSPC);
    let status = embedded.kernel().status();
    for tier in &status.tiers {
        assert!(tier.used_bytes * 10 > tier.capacity_bytes * 8, "{tier:?}");
    }
    assert!(
        status.tiers[1].moved_in_bytes > 0 && status.tiers[2].moved_in_bytes > 0,
        "{:?}",
        status.tiers
    );
    for number in files.keys() {
        assert!(
            read_file(&fs, *number) == body(*number),
            "file {number} of the full pool"
        );
    }
    // Deletes work, and make room.
    for gone in files.keys().copied().step_by(2).collect::<Vec<_>>() {
        fs.unlink(fs.root(), &name(gone), &Cred::root()).unwrap();
        files.remove(&gone);
    }
    fs.unmount().unwrap();
    work(&embedded);
    embedded.kernel().store().checkpoint().unwrap();
    let fs = embedded.mount().unwrap();
    for again in 1000..1020 {
        write_file(&fs, again).unwrap();
        files.insert(again, ());
        work(&embedded);
    }
    fs.unmount().unwrap();
    embedded.shutdown().unwrap();
    let embedded = open(&world);
    let fs = embedded.mount().unwrap();
    for number in files.keys() {
        assert!(
            read_file(&fs, *number) == body(*number),
            "file {number} at the end"
        );
    }
    fs.unmount().unwrap();
    assert_eq!(embedded.kernel().store().check().unwrap(), []);
    assert_eq!(embedded.kernel().store().check_data().unwrap(), []);
}
