//! What `varve run` tells the library, by environment variables that children inherit.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Path of the mount, without symbolic links in it.
pub const MOUNT: &str = "VARVE_PRELOAD_MOUNT";
/// Path of the daemon's socket.
pub const SOCKET: &str = "VARVE_PRELOAD_SOCKET";
/// `st_dev` of the mount.
pub const DEVICE: &str = "VARVE_PRELOAD_DEVICE";
/// Set if the mount is read-only.
pub const READ_ONLY: &str = "VARVE_PRELOAD_READ_ONLY";
/// File of the counters, if they are wanted.
pub const STATS: &str = "VARVE_PRELOAD_STATS";

/// Where paths lead to us, and whom to ask.
#[derive(Debug, Clone)]
pub struct Config {
    /// Path of the mount: absolute, no slash at its end.
    pub mount: Vec<u8>,
    /// The daemon's socket.
    pub socket: PathBuf,
    /// `st_dev` of the mount.
    pub device: u64,
    /// The mount takes no changes.
    pub read_only: bool,
    /// File of the counters.
    pub stats: Option<PathBuf>,
}

impl Config {
    /// What the environment says; `None` if it does not ask for the library.
    #[must_use]
    pub fn from_environment() -> Option<Self> {
        let mount = std::env::var_os(MOUNT).map(OsString::into_vec)?;
        let device = std::env::var(DEVICE).ok()?.parse().ok()?;
        let usable = mount.len() > 1 && mount.starts_with(b"/") && !mount.ends_with(b"/");
        usable.then_some(Self {
            mount,
            socket: std::env::var_os(SOCKET)?.into(),
            device,
            read_only: std::env::var_os(READ_ONLY).is_some(),
            stats: std::env::var_os(STATS).map(Into::into),
        })
    }

    /// What follows the mount's path in `path`; `None` if `path` does not lexically begin with it.
    #[must_use]
    pub fn under_mount<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]> {
        if let Some(rest) = path.strip_prefix(self.mount.as_slice())
            && (rest.is_empty() || rest[0] == b'/')
        {
            return Some(rest);
        }
        // Doubled slashes and dots before the mount's last component.
        let mut rest = path;
        for part in self
            .mount
            .split(|byte| *byte == b'/')
            .filter(|part| !part.is_empty())
        {
            loop {
                rest = rest.strip_prefix(b"/")?;
                let end = rest.iter().position(|byte| *byte == b'/').unwrap_or(rest.len());
                let (name, after) = rest.split_at(end);
                if name.is_empty() || name == b"." {
                    rest = after;
                    continue;
                }
                if name != part {
                    return None;
                }
                rest = after;
                break;
            }
        }
        Some(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::Config;

    fn config() -> Config {
        Config {
            mount: b"/a/mnt".to_vec(),
            socket: "/a/sock".into(),
            device: 7,
            read_only: false,
            stats: None,
        }
    }

    #[test]
    fn paths_under_the_mount_are_told_from_others() {
        let config = config();
        for (path, rest) in [
            ("/a/mnt", Some("")),
            ("/a/mnt/", Some("/")),
            ("/a/mnt/x/../y", Some("/x/../y")),
            ("//a/./mnt//x", Some("//x")),
            ("/a/mnt2", None),
            ("/a", None),
            ("/a/", None),
            ("/", None),
            ("/b/mnt/x", None),
            ("/a/b/../mnt/x", None),
        ] {
            assert_eq!(
                config.under_mount(path.as_bytes()),
                rest.map(str::as_bytes),
                "{path}"
            );
        }
    }
}
