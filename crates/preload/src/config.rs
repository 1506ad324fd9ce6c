//! Settings that `varve run` passes to the library in environment variables that children inherit.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use varve_libfs::Atime;

/// Path of the mount, without symbolic links in it.
pub const MOUNT: &str = "VARVE_PRELOAD_MOUNT";
/// Path of the daemon's socket.
pub const SOCKET: &str = "VARVE_PRELOAD_SOCKET";
/// `st_dev` of the mount.
pub const DEVICE: &str = "VARVE_PRELOAD_DEVICE";
/// Set if the mount is read-only.
pub const READ_ONLY: &str = "VARVE_PRELOAD_READ_ONLY";
/// Atime policy: "noatime" or "strictatime", else as relatime.
pub const ATIME: &str = "VARVE_PRELOAD_ATIME";
/// Number of calls by path that a process makes through the mount before it opens a session; four calls by
/// descriptor count as one.
pub const SESSION_AFTER: &str = "VARVE_PRELOAD_SESSION_AFTER";
/// Default of [`SESSION_AFTER`].
pub const SESSION_AFTER_DEFAULT: u32 = 16;
/// File of the counters, if they are wanted.
pub const STATS: &str = "VARVE_PRELOAD_STATS";

/// Beginning of the path of files in which processes record the system-call sites of a C library for
/// processes that start later.
pub const SITES: &str = "VARVE_PRELOAD_SITES";

/// Set by a process for the program that it `exec`s: open files that no other process has, so that the new
/// program can take their offset back from the kernel.
pub const ALONE: &str = "VARVE_PRELOAD_ALONE";
/// Upper bound on the files listed in [`ALONE`].
pub const ALONE_MAX: usize = 64;

/// An open file that no other process has, handed on to the program that the process `exec`s.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alone {
    /// Its descriptors.
    pub fds: Vec<i32>,
    /// Inode number and generation.
    pub key: (u64, u32),
    /// Flags as `F_GETFL` shows them.
    pub status: i32,
}

/// Encodes `files` as text for the process `pid`.
#[must_use]
pub fn alone_text(pid: i32, files: &[Alone]) -> String {
    let mut text = format!("{pid}");
    for file in files.iter().take(ALONE_MAX) {
        let fds: Vec<String> = file.fds.iter().map(ToString::to_string).collect();
        text.push_str(&format!(
            ";{}:{}:{}:{}",
            fds.join(","),
            file.key.0,
            file.key.1,
            file.status
        ));
    }
    text
}

/// Decodes the text of [`alone_text`]; empty if it was written for another process than `pid`.
#[must_use]
pub fn alone_files(text: &str, pid: i32) -> Vec<Alone> {
    let file = |part: &str| {
        let mut words = part.split(':');
        let fds: Option<Vec<i32>> = words.next()?.split(',').map(|fd| fd.parse().ok()).collect();
        let key = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let status = words.next()?.parse().ok()?;
        let fds = fds.filter(|fds| fds.iter().all(|fd| *fd >= 0))?;
        words.next().is_none().then_some(Alone { fds, key, status })
    };
    let mut parts = text.split(';');
    if parts.next().and_then(|first| first.parse().ok()) != Some(pid) {
        return Vec::new();
    }
    parts.take(ALONE_MAX).map_while(file).collect()
}

/// Most mounts that one run serves.
pub const MOUNTS_MAX: usize = 64;

/// Name of a variable of the mount with number `nth`, from 0 on.
#[must_use]
pub fn nth(variable: &str, nth: usize) -> String {
    match nth {
        0 => variable.to_owned(),
        nth => format!("{variable}_{}", nth + 1),
    }
}

/// The mounts' locations and the settings of `varve run`.
#[derive(Debug, Clone)]
pub struct Config {
    /// The mounts that are served: at least one, none inside another.
    pub mounts: Vec<MountConfig>,
    /// How many calls by path the mount makes before a session is opened for them.
    pub session_after: u32,
    /// File of the counters.
    pub stats: Option<PathBuf>,
}

/// Number of a mount in [`Config::mounts`], and of what the process has of its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PoolId(pub usize);

/// Where paths lead to one mount, and whom to ask.
#[derive(Debug, Clone)]
pub struct MountConfig {
    /// Path of the mount: absolute, no slash at its end.
    pub mount: Vec<u8>,
    /// The daemon's socket.
    pub socket: PathBuf,
    /// `st_dev` of the mount.
    pub device: u64,
    /// The mount is read-only.
    pub read_only: bool,
    /// Atime policy.
    pub atime: Atime,
}

impl Config {
    /// The mount to which `path` leads as far as names tell, and what follows its path.
    #[must_use]
    pub fn under_mount<'a>(&self, path: &'a [u8]) -> Option<(PoolId, &'a [u8])> {
        self.find(|mount| mount.under_mount(path))
    }

    /// As [`MountConfig::entered`], of the mount into which `path` leads.
    #[must_use]
    pub fn entered<'a>(&self, from: &[u8], path: &'a [u8]) -> Option<(PoolId, (&'a [u8], bool))> {
        self.find(|mount| mount.entered(from, path))
    }

    /// Whether a path that begins with this component could lead from a directory outside into a mount by
    /// names alone.
    #[must_use]
    pub fn could_enter(&self, path: &[u8]) -> bool {
        self.mounts.iter().any(|mount| mount.could_enter(path))
    }

    /// Returns the rest of `path` if, walked from the directory that holds the mount `pool`, it leads into a
    /// mount.
    #[must_use]
    pub fn back_from_above<'a>(&self, pool: PoolId, path: &'a [u8]) -> Option<(PoolId, &'a [u8])> {
        let mount = &self.mounts.get(pool.0)?.mount;
        let above = mount.iter().rposition(|byte| *byte == b'/')?;
        let (entered, (rest, _)) = self.entered(&mount[..above], path)?;
        Some((entered, rest))
    }

    fn find<T>(&self, found: impl Fn(&MountConfig) -> Option<T>) -> Option<(PoolId, T)> {
        let mut mounts = self.mounts.iter().enumerate();
        mounts.find_map(|(number, mount)| Some((PoolId(number), found(mount)?)))
    }

    /// Reads the environment; `None` if it does not ask for the library.
    #[must_use]
    pub fn from_environment() -> Option<Self> {
        let mounts: Vec<MountConfig> = (0..MOUNTS_MAX).map_while(MountConfig::from_environment).collect();
        (!mounts.is_empty()).then_some(Self {
            mounts,
            session_after: std::env::var(SESSION_AFTER)
                .ok()
                .and_then(|text| text.parse().ok())
                .unwrap_or(SESSION_AFTER_DEFAULT),
            stats: std::env::var_os(STATS).map(Into::into),
        })
    }
}

impl MountConfig {
    /// Reads the environment's settings of the mount with number `n`, from 0 on.
    fn from_environment(n: usize) -> Option<Self> {
        let mount = std::env::var_os(nth(MOUNT, n)).map(OsString::into_vec)?;
        let device = std::env::var(nth(DEVICE, n)).ok()?.parse().ok()?;
        let usable = mount.len() > 1 && mount.starts_with(b"/") && !mount.ends_with(b"/");
        usable.then_some(Self {
            mount,
            socket: std::env::var_os(nth(SOCKET, n))?.into(),
            device,
            read_only: std::env::var_os(nth(READ_ONLY, n)).is_some(),
            atime: match std::env::var(nth(ATIME, n)).as_deref() {
                Ok("noatime") => Atime::Never,
                Ok("strictatime") => Atime::Strict,
                _ => Atime::Relative,
            },
        })
    }

    /// Returns the rest of `path` behind the mount's path; `None` if `path` does not lexically begin with it.
    #[must_use]
    pub fn under_mount<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]> {
        if let Some(rest) = path.strip_prefix(self.mount.as_slice())
            && (rest.is_empty() || rest[0] == b'/')
        {
            return Some(rest);
        }
        // Skips doubled slashes and dots before the mount's last component.
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

    /// Whether `path`, walked from the directory `from` (outside the mount, absolute, without symbolic
    /// links), leads into the mount as far as names tell. Returns the rest of the path, and whether it
    /// climbed above `from`. Every component is `..` or part of the mount's own path, so none of them is a
    /// symbolic link.
    #[must_use]
    pub fn entered<'a>(&self, from: &[u8], path: &'a [u8]) -> Option<(&'a [u8], bool)> {
        let mount = self.mount.as_slice();
        // A prefix of `from` or of the mount's path; the root is empty.
        let mut at = from.strip_suffix(b"/").unwrap_or(from);
        let (mut rest, mut climbed) = (path, false);
        loop {
            if at == mount {
                return Some((rest, climbed));
            }
            while let Some(after) = rest.strip_prefix(b"/") {
                rest = after;
            }
            let end = rest.iter().position(|byte| *byte == b'/').unwrap_or(rest.len());
            let (name, after) = rest.split_at(end);
            rest = after;
            match name {
                b"" => return None,
                b"." => {}
                b".." => {
                    climbed = true;
                    at = &at[..at.iter().rposition(|byte| *byte == b'/').unwrap_or(0)];
                }
                name => {
                    let part = mount.strip_prefix(at)?.strip_prefix(b"/")?.strip_prefix(name)?;
                    if !part.is_empty() && part[0] != b'/' {
                        return None;
                    }
                    at = &mount[..mount.len() - part.len()];
                }
            }
        }
    }

    /// Whether a path that begins with this component could lead from a directory outside into the mount by
    /// names alone.
    #[must_use]
    pub fn could_enter(&self, path: &[u8]) -> bool {
        let first = path.split(|byte| *byte == b'/').next().unwrap_or_default();
        matches!(first, b"." | b"..") || self.mount.split(|byte| *byte == b'/').any(|part| part == first)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Alone, Atime, Config, MOUNT, MountConfig, PoolId, SESSION_AFTER, SOCKET, alone_files, alone_text, nth,
    };

    fn config() -> MountConfig {
        MountConfig {
            mount: b"/a/mnt".to_vec(),
            socket: "/a/sock".into(),
            device: 7,
            read_only: false,
            atime: Atime::Relative,
        }
    }

    #[test]
    fn mounts_know_programs_under_run_by_the_names_of_the_variables() {
        for name in [MOUNT, SOCKET, SESSION_AFTER] {
            assert!(name.starts_with(varve_ipc::PRELOAD_VARIABLES), "{name}");
        }
    }

    #[test]
    fn files_are_handed_to_the_same_process_only() {
        let files = [
            Alone {
                fds: vec![1, 2],
                key: (77, 3),
                status: 0o102_001,
            },
            Alone {
                fds: vec![9],
                key: (u64::MAX, u32::MAX),
                status: 0,
            },
        ];
        let text = alone_text(12, &files);
        assert_eq!(alone_files(&text, 12), files);
        assert!(alone_files(&text, 13).is_empty());
        for bad in [
            "",
            "12;",
            "12;x",
            "12;1:2:3",
            "12;-1:2:3:4",
            "12;1:2:3:4:5",
            "x12;1:2:3:4",
        ] {
            assert!(alone_files(bad, 12).is_empty(), "{bad}");
        }
    }

    #[test]
    fn paths_into_the_mount_from_outside_are_told_from_others() {
        let config = config();
        for (from, path, found) in [
            ("/a", "mnt/x", Some(("/x", false))),
            ("/a", "mnt", Some(("", false))),
            ("/a", "./mnt//x/../..", Some(("//x/../..", false))),
            ("/", "a/mnt/x", Some(("/x", false))),
            ("/a/b/c", "../../mnt/x", Some(("/x", true))),
            ("/a", "../../../a/mnt/x", Some(("/x", true))),
            ("/b", "../a/mnt/", Some(("/", true))),
            ("/a", "mnt2/x", None),
            ("/a", "mn", None),
            ("/a", "link/../mnt/x", None),
            ("/a/b", "mnt/x", None),
            ("/ab", "mnt/x", None),
            ("/a", "..", None),
            ("/a", ".", None),
            ("/a", "", None),
        ] {
            let found = found.map(|(rest, climbed): (&str, bool)| (rest.as_bytes(), climbed));
            assert_eq!(
                config.entered(from.as_bytes(), path.as_bytes()),
                found,
                "{from} {path}"
            );
            assert!(found.is_none() || config.could_enter(path.as_bytes()), "{path}");
        }
        assert!(!config.could_enter(b"usr/lib"));
    }

    #[test]
    fn each_of_several_mounts_has_its_own_paths() {
        let at = |path: &[u8]| MountConfig {
            mount: path.to_vec(),
            ..config()
        };
        let config = Config {
            mounts: vec![at(b"/a/mnt"), at(b"/a/mnt2"), at(b"/b/c/mnt")],
            session_after: 0,
            stats: None,
        };
        for (path, found) in [
            ("/a/mnt/x", Some((0, "/x"))),
            ("/a/mnt2/x", Some((1, "/x"))),
            ("/b/./c/mnt", Some((2, ""))),
            ("/b/c/mn", None),
        ] {
            let found = found.map(|(pool, rest)| (PoolId(pool), rest.as_bytes()));
            assert_eq!(config.under_mount(path.as_bytes()), found, "{path}");
        }
        for (pool, path, found) in [
            (0, "/mnt/x", Some((0, "/x"))),
            (0, "/mnt2/x", Some((1, "/x"))),
            (1, "/../b/c/mnt/", Some((2, "/"))),
            (2, "/../../a/mnt", Some((0, ""))),
            (2, "/d", None),
        ] {
            let found = found.map(|(pool, rest)| (PoolId(pool), rest.as_bytes()));
            assert_eq!(
                config.back_from_above(PoolId(pool), path.as_bytes()),
                found,
                "{path}"
            );
        }
        assert!(config.could_enter(b"b/c") && !config.could_enter(b"usr"));
        assert_eq!((nth("X", 0), nth("X", 1)), ("X".to_owned(), "X_2".to_owned()));
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
