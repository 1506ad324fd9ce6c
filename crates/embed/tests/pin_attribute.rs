//! The pin of a file as an attribute: what is set is what the daemon keeps, for those who may set it.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use varve_embed::{Embedded, SimPool};
use varve_format::{PinTo, PinnedBy, Tier};
use varve_ipc::{Cred, PIN_ATTRIBUTE, SystemClock};
use varve_kernelfs::Config;
use varve_libfs::{Errno, OpenFlags};
use varve_media::sim::SimWorld;

#[test]
fn pin_is_set_read_and_taken_away_by_those_who_may() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let (parts, _) = SimPool::default()
        .parts(&world, Config::default(), Arc::new(SystemClock))
        .unwrap();
    let embedded = Embedded::open(parts).unwrap();
    embedded.start().unwrap();
    let fs = embedded.mount().unwrap();
    let (root, name) = (Cred::root(), PIN_ATTRIBUTE.as_bytes());
    let file = fs.create(fs.root(), b"f", 0o100_666, 0, &root).unwrap().key;
    let open = fs.open(file, OpenFlags::READ_WRITE, &root).unwrap();
    open.write_at(0, &[7; 20_000], &root).unwrap();
    let set = |value: &[u8], cred: &Cred| fs.setxattr(file, name, value, false, false, cred);
    let kept = || embedded.kernel().store().get_key(file).unwrap().pin;

    // Not digested yet.
    assert_eq!(fs.getxattr(file, name, &root).unwrap(), b"policy");
    set(b"nvm", &root).unwrap();
    assert_eq!(fs.getxattr(file, name, &root).unwrap(), b"nvm");
    assert_eq!(
        (kept().to, kept().by),
        (PinTo::Tier(Tier::Nvm), PinnedBy::Command)
    );
    set(b"stay", &root).unwrap();
    assert_eq!(kept().to, PinTo::Stay);
    for wrong in [&b"NVM"[..], b"", b"nvm2"] {
        assert_eq!(set(wrong, &root), Err(Errno(libc::EINVAL)));
    }

    // Who owns the file may not, unless it is the pool's owner.
    let other = Cred {
        uid: 4_000_000,
        gid: 4_000_000,
        groups: Vec::new(),
    };
    assert_eq!(set(b"hdd", &other), Err(Errno(libc::EPERM)));
    assert_eq!(fs.removexattr(file, name, &other), Err(Errno(libc::EPERM)));
    assert_eq!(fs.getxattr(file, name, &other).unwrap(), b"stay");

    // It is no attribute of the file.
    assert!(fs.listxattr(file, &root).unwrap().is_empty());
    fs.removexattr(file, name, &root).unwrap();
    assert_eq!(fs.getxattr(file, name, &root).unwrap(), b"policy");
    assert_eq!(
        fs.getxattr(file, b"system.varve.other", &root),
        Err(Errno(libc::EOPNOTSUPP))
    );
    drop(open);
    fs.unmount().unwrap();
    embedded.shutdown().unwrap();
}
