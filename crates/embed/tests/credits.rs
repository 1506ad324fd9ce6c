//! Space that is promised to a session is used up by what it logs, and by nothing else.
#![allow(clippy::unwrap_used)]

use varve_embed::SimPool;
use varve_ipc::Cred;
use varve_kernelfs::Config;
use varve_libfs::RenameFlags;
use varve_media::sim::SimWorld;

const FILE: u32 = libc::S_IFREG | 0o644;

#[test]
fn operations_that_are_refused_use_up_no_space_that_was_promised() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let embedded = SimPool::default().open(&world, Config::default()).unwrap();
    let fs = embedded.mount().unwrap();
    let me = Cred::root();
    let promised = || {
        embedded.kernel().digest_all().unwrap();
        embedded.kernel().status().sessions[0].credits
    };
    let (root, nobody) = (
        fs.root(),
        Cred {
            uid: 65_534,
            gid: 65_534,
            groups: Vec::new(),
        },
    );
    let key = fs.create(root, b"a", FILE, 0, &me).unwrap().key;
    fs.create(root, b"b", FILE, 0, &me).unwrap();
    fs.setxattr(key, b"user.x", b"1", false, false, &me).unwrap();
    let before = promised();
    // More than a bulk of credits, if each used some up.
    for _ in 0..8000 {
        fs.setxattr(key, b"system.posix_acl_access", b"1", false, false, &me)
            .unwrap_err();
        fs.setxattr(key, b"user.x", b"1", true, false, &me).unwrap_err();
        fs.create(root, b"c", FILE, 0, &nobody).unwrap_err();
        fs.link(key, root, b"c", &nobody).unwrap_err();
        fs.rename(root, b"a", root, b"c", RenameFlags::default(), &nobody)
            .unwrap_err();
        fs.link(root, root, b"c", &me).unwrap_err();
    }
    assert_eq!(promised(), before);
    fs.unmount().unwrap();
    drop(fs);
    embedded.shutdown().unwrap();
}
