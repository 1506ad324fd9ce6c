//! What a file of a Varve pool can be told: where its data is to be. By the attribute that each file of a
//! pool has, so that this crate needs no pool and no library of one.

use std::fs::File;
use std::path::Path;

/// The attribute (`varve_ipc::PIN_ATTRIBUTE`).
const PIN: &str = "system.varve.pin";
/// The longest value of it.
const PIN_MAX: usize = 16;

/// Where a file's data is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pinned {
    /// The file is on no pool.
    NoPool,
    /// It is on a pool, of which this user may not pin anything.
    NotPermitted,
    /// On this tier; `policy`: where the pool puts it; `stay`: where it is.
    To(String),
}

impl Pinned {
    /// Whether it is on a pool.
    pub fn is_on_pool(&self) -> bool {
        *self != Self::NoPool
    }

    /// Whether it is pinned to the pool's NVM.
    pub fn is_on_nvm(&self) -> bool {
        matches!(self, Self::To(tier) if tier == "nvm")
    }

    fn of(read: rustix::io::Result<usize>, value: &[u8]) -> Self {
        match read {
            Ok(len) => Self::To(String::from_utf8_lossy(&value[..len]).into_owned()),
            Err(rustix::io::Errno::PERM) => Self::NotPermitted,
            // Whatever else a file system says of an attribute that it does not have.
            Err(_) => Self::NoPool,
        }
    }
}

/// Where the data of an open file is to be.
pub fn pin_of(file: &File) -> Pinned {
    let mut value = [0; PIN_MAX];
    Pinned::of(rustix::fs::fgetxattr(file, PIN, &mut value[..]), &value)
}

/// Where the data of the file at a path is to be.
pub fn pin_at(path: &Path) -> Pinned {
    let mut value = [0; PIN_MAX];
    Pinned::of(rustix::fs::getxattr(path, PIN, &mut value[..]), &value)
}

/// Pins a file of a pool to its NVM, if the user may. Durable when it returns; what is elsewhere moves in the
/// background. Where it cannot be, the file stays where the pool puts it; [`pin_of`] says which.
pub fn pin_to_nvm(file: &File) {
    let _ = rustix::fs::fsetxattr(file, PIN, b"nvm", rustix::fs::XattrFlags::empty());
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{Pinned, pin_at, pin_of, pin_to_nvm};

    #[test]
    fn file_of_another_file_system_is_on_no_pool_and_stays_as_it_is() {
        let file = tempfile::NamedTempFile::new().unwrap();
        pin_to_nvm(file.as_file());
        assert_eq!(pin_of(file.as_file()), Pinned::NoPool);
        assert_eq!(pin_at(file.path()), Pinned::NoPool);
        assert!(!Pinned::NoPool.is_on_pool());
        assert!(Pinned::NotPermitted.is_on_pool() && !Pinned::NotPermitted.is_on_nvm());
    }
}
