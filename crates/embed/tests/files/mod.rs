//! Files of a pool in this process: their content, the space in use, and the checks of the store.

use varve_embed::Embedded;
use varve_format::BLOCK_SIZE;
use varve_ipc::Cred;
use varve_libfs::Posix;
use varve_libfs::posix::Fd;

pub const BLOCK: u64 = BLOCK_SIZE as u64;

/// Opens a session of root.
pub fn root(embedded: &Embedded) -> Posix {
    Posix::new(embedded.mount().unwrap(), Cred::root())
}

pub fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at / 13 % 250) as u8 ^ seed).collect()
}

/// Writes a file from its beginning, and leaves it open.
pub fn put(posix: &Posix, name: impl AsRef<[u8]>, data: &[u8]) -> Fd {
    let fd = posix
        .open(name.as_ref(), libc::O_CREAT | libc::O_RDWR, 0o644)
        .unwrap();
    assert_eq!(posix.pwrite(fd, data, 0).unwrap(), data.len());
    fd
}

/// Blocks in use after a digest.
pub fn used(embedded: &Embedded) -> u64 {
    embedded.kernel().digest_all().unwrap();
    let space = embedded.kernel().store().space();
    let tiers = space.tiers.iter();
    tiers.map(|tier| tier.total - tier.free - tier.pending).sum()
}

/// Digests all logs and checks metadata and data.
pub fn check(embedded: &Embedded) {
    embedded.kernel().digest_all().unwrap();
    let store = embedded.kernel().store();
    assert_eq!(store.check().unwrap(), []);
    assert_eq!(store.check_data().unwrap(), []);
}
