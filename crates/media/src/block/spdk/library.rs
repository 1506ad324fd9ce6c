//! Finds an installed SPDK. Looks at directories and files only; [`sys`](super::sys) loads what is found.

use std::fs;
use std::path::{Path, PathBuf};

/// Environment variable with the directories of the library, separated by colons.
pub const VARIABLE: &str = "VARVE_SPDK_LIB";

/// Directories of libraries, besides those that `/etc/ld.so.conf` names.
const USUAL: [&str; 7] = [
    "/usr/local/lib",
    "/usr/local/lib64",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib",
    "/opt/spdk/lib",
];

/// What SPDK's libraries use without naming it, since they count on the program to be linked to it: OpenSSL
/// and others of the system, ISA-L, DPDK. Loaded before them, from the first directory that has it.
const HELPERS: [&str; 18] = [
    "crypto",
    "ssl",
    "uuid",
    "aio",
    "numa",
    "keyutils",
    "isal",
    "isal_crypto",
    "rte_log",
    "rte_kvargs",
    "rte_telemetry",
    "rte_argparse",
    "rte_eal",
    "rte_ring",
    "rte_mempool",
    "rte_mempool_ring",
    "rte_pci",
    "rte_bus_pci",
];

/// Libraries without which nothing works, in the order in which they are loaded.
const NEEDED: [&str; 7] = [
    "spdk_env_dpdk",
    "spdk_log",
    "spdk_thread",
    "spdk_rpc",
    "spdk_init",
    "spdk_bdev",
    "spdk_event_bdev",
];

/// Subsystems on which that of block devices depends in one release or another.
const USEFUL: [&str; 6] = [
    "spdk_event_iobuf",
    "spdk_event_accel",
    "spdk_event_vmd",
    "spdk_event_sock",
    "spdk_event_keyring",
    "spdk_sock_posix",
];

/// An SPDK on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// Its directory, then those in which the helpers were looked for.
    pub dirs: Vec<PathBuf>,
    /// Libraries of others, which are loaded first, where that works.
    pub helpers: Vec<PathBuf>,
    /// Libraries that must be loaded, in this order.
    pub needed: Vec<PathBuf>,
    /// Libraries that are loaded where that works: subsystems, and drivers of block devices.
    pub useful: Vec<PathBuf>,
    /// Its version, such as `SPDK v26.05`, for people.
    pub version: String,
}

/// Directories that [`VARIABLE`] names.
fn named() -> Vec<PathBuf> {
    let named = std::env::var_os(VARIABLE).filter(|named| !named.is_empty());
    named.iter().flat_map(std::env::split_paths).collect()
}

/// Directories of the system's loader.
fn usual() -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = std::env::var_os("LD_LIBRARY_PATH")
        .iter()
        .flat_map(std::env::split_paths)
        .filter(|dir| dir.is_absolute())
        .collect();
    let mut configured: Vec<_> = fs::read_dir("/etc/ld.so.conf.d")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    configured.sort();
    for file in configured {
        let text = fs::read_to_string(file).unwrap_or_default();
        let lines = text.lines().map(str::trim);
        dirs.extend(lines.filter(|line| line.starts_with('/')).map(PathBuf::from));
    }
    dirs.extend(USUAL.map(PathBuf::from));
    dirs
}

/// Looks for SPDK in the directories that [`VARIABLE`] names, or else in those of the system's loader.
///
/// # Errors
/// For a person: where there is none, and the remedy.
pub fn find() -> Result<Installed, String> {
    find_in(&named(), &usual())
}

/// Looks in the directories `named`, if there are any, or else in `usual`; for other libraries in all.
fn find_in(named: &[PathBuf], usual: &[PathBuf]) -> Result<Installed, String> {
    let looked = if named.is_empty() { usual } else { named };
    let Some(home) = looked.iter().find(|dir| library(dir, NEEDED[0]).is_some()) else {
        return Err(not_found(looked, named.is_empty()));
    };
    let mut needed = Vec::new();
    for name in NEEDED {
        needed.push(library(home, name).ok_or_else(|| {
            format!(
                "the SPDK in {} has no lib{name}.so; install all of its shared libraries",
                home.display()
            )
        })?);
    }
    let mut useful: Vec<_> = USEFUL.iter().filter_map(|name| library(home, name)).collect();
    useful.extend(drivers(home).iter().filter_map(|name| library(home, name)));
    let version = version(&needed[0]).unwrap_or_else(|| "SPDK of an unknown version".into());
    let mut dirs = vec![home.clone()];
    dirs.extend(named.iter().chain(usual).filter(|dir| *dir != home).cloned());
    let helper = |name: &&str| dirs.iter().find_map(|dir| library(dir, name));
    Ok(Installed {
        helpers: HELPERS.iter().filter_map(helper).collect(),
        dirs,
        needed,
        useful,
        version,
    })
}

fn not_found(looked: &[PathBuf], of_loader: bool) -> String {
    let archive = |dir: &&PathBuf| dir.join(format!("lib{}.a", NEEDED[0])).exists();
    if let Some(dir) = looked.iter().find(archive) {
        return format!(
            "{} has SPDK as archives only; `spdk:` needs shared libraries (SPDK's `configure --with-shared`)",
            dir.display()
        );
    }
    let shown: Vec<String> = looked.iter().map(|dir| dir.display().to_string()).collect();
    let shown = match of_loader {
        true => "the directories of the loader".to_owned(),
        false => shown.join(", "),
    };
    format!(
        "no SPDK is installed: there is no lib{}.so in {}. Install its shared libraries (SPDK's `configure \
         --with-shared`), and name their directory in {VARIABLE} if the loader does not know it; `nvme:` \
         needs nothing installed",
        NEEDED[0], shown
    )
}

/// Returns the file of a library: without a version, as development packages have it, or the highest one.
pub(super) fn library(dir: &Path, name: &str) -> Option<PathBuf> {
    let plain = dir.join(format!("lib{name}.so"));
    // A linker script begins otherwise, and cannot be loaded.
    if fs::read(&plain).is_ok_and(|bytes| bytes.starts_with(b"\x7fELF")) {
        return Some(plain);
    }
    let prefix = format!("lib{name}.so.");
    let versions = names(dir).into_iter().filter_map(|file| {
        // `1t64` is a `1` that was renamed when times became longer.
        let parts = file.strip_prefix(&prefix)?.split('.');
        let parts = parts.map(|part| part.trim_end_matches("t64").parse::<u32>());
        Some((parts.collect::<Result<Vec<_>, _>>().ok()?, file))
    });
    versions.max().map(|(_, file)| dir.join(file))
}

/// Names of the libraries of drivers of block devices.
fn drivers(dir: &Path) -> Vec<String> {
    let mut found: Vec<String> = names(dir)
        .iter()
        .filter_map(|file| {
            let name = file.strip_prefix("lib")?.split_once(".so")?.0;
            name.starts_with("spdk_bdev_").then(|| name.to_owned())
        })
        .collect();
    found.sort();
    found.dedup();
    found
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Finds the version in the text that the library prints at its start. What it can do is found out by its
/// symbols; this is for people.
fn version(file: &Path) -> Option<String> {
    const MARK: &[u8] = b"SPDK v";
    let bytes = fs::read(file).ok()?;
    let at = bytes.windows(MARK.len()).position(|part| part == MARK)?;
    let text = bytes[at..].split(|byte| *byte == 0).next()?;
    let text = std::str::from_utf8(text.get(..text.len().min(64))?).ok()?;
    Some(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{NEEDED, find_in};
    use std::fs;

    #[test]
    fn library_is_found_with_its_drivers_and_version() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("lib");
        fs::create_dir(&dir).unwrap();
        for (at, name) in NEEDED.iter().enumerate() {
            // Some with a development package's link, some without.
            let version = if at % 2 == 0 { "" } else { ".12.1" };
            fs::write(dir.join(format!("lib{name}.so{version}")), b"\x7fELF").unwrap();
        }
        fs::write(
            dir.join("libspdk_env_dpdk.so"),
            b"\x7fELF..Starting\0SPDK v26.05\0x",
        )
        .unwrap();
        for file in [
            "libspdk_bdev_nvme.so.9.0",
            "libspdk_bdev_nvme.so.10.0",
            "libspdk_bdev_aio.so.7",
            "libspdk_bdev_aio.a",
            "libspdk_event_nvmf.so.7",
            "../libaio.so.1t64",
        ] {
            fs::write(dir.join(file), b"\x7fELF").unwrap();
        }
        let found = find_in(&[root.path().join("none"), dir.clone()], &[root.path().into()]).unwrap();
        assert_eq!(found.version, "SPDK v26.05");
        assert_eq!(found.needed.len(), NEEDED.len());
        assert_eq!(found.needed[1], dir.join("libspdk_log.so.12.1"));
        let of = |name: &str| dir.join(name);
        assert_eq!(
            found.useful,
            [of("libspdk_bdev_aio.so.7"), of("libspdk_bdev_nvme.so.10.0")]
        );
        assert_eq!(found.dirs[0], dir);
        assert_eq!(found.helpers, [root.path().join("libaio.so.1t64")]);
    }

    #[test]
    fn what_is_not_whole_is_refused_with_what_to_do() {
        let root = tempfile::tempdir().unwrap();
        let find = || find_in(&[], &[root.path().into()]).unwrap_err();
        let none = find();
        assert!(
            none.contains("no SPDK is installed") && none.contains("VARVE_SPDK_LIB"),
            "{none}"
        );
        fs::write(root.path().join("libspdk_env_dpdk.a"), b"!<arch>").unwrap();
        assert!(find().contains("archives only"));
        // A script of the linker's is no library.
        fs::write(root.path().join("libspdk_env_dpdk.so"), b"/* GNU ld script */").unwrap();
        assert!(find().contains("archives only"));
        fs::write(root.path().join("libspdk_env_dpdk.so"), b"\x7fELF").unwrap();
        assert!(find().contains("has no libspdk_log.so"), "{}", find());
    }
}
