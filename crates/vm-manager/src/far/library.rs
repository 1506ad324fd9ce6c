//! The agent's library, which this binary carries, and where programs find it and the pager's socket.

use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The library. Empty where cargo only checked.
static LIBRARY: &[u8] = include_bytes!(concat!(env!("VARVE_FAR_AGENT_DIR"), "/libvarve_far_agent.so"));

/// A directory of this run alone. Removed when this goes.
#[derive(Debug)]
pub(super) struct RunDir {
    dir: PathBuf,
}

impl RunDir {
    /// Makes the directory and puts the library in. Others may read the library, since a program may change
    /// its user and start others; the socket is this user's.
    ///
    /// # Errors
    /// When it cannot be made, or this binary was built without the library.
    pub(super) fn make() -> io::Result<Self> {
        if LIBRARY.is_empty() {
            return Err(io::Error::other(
                "this binary was built without the library of far memory; build it with `cargo build --release`",
            ));
        }
        let base = std::env::temp_dir();
        // The loader splits its list at these.
        let base = if base.to_string_lossy().contains([' ', ':', '\t']) {
            PathBuf::from("/tmp")
        } else {
            base
        };
        let name = format!("varve-far-{}-{:08x}", std::process::id(), random());
        let made = Self { dir: base.join(name) };
        std::fs::DirBuilder::new().mode(0o711).create(&made.dir)?;
        let mut file = std::fs::File::options()
            .write(true)
            .create_new(true)
            .mode(0o755)
            .open(made.library())?;
        file.write_all(LIBRARY)?;
        Ok(made)
    }

    /// The library's path.
    pub(super) fn library(&self) -> PathBuf {
        self.dir.join("agent.so")
    }

    /// The socket's path.
    pub(super) fn socket(&self) -> PathBuf {
        self.dir.join("pager.sock")
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(Path::new(&self.dir));
    }
}

/// A number that others do not guess.
fn random() -> u32 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish() as u32
}
