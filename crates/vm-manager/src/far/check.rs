//! Refusals before the program starts, each in a sentence.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::bail;
use varve_far::Page;

use super::config::Local;
use crate::sys::{Faults, read_memory, userfault_device};
use crate::types::Pid;

/// The first kernel with `UFFDIO_MOVE`.
const KERNEL: (u32, u32) = (6, 8);
/// Scripts may name scripts; the kernel follows four.
const SCRIPTS_MAX: usize = 5;
const SECCOMP: &str = "far memory needs system calls that a seccomp filter of this session forbids";

/// Looks at the kernel and at our rights. Gives `/dev/userfaultfd`.
///
/// # Errors
/// The missing requirement.
pub(super) fn machine() -> anyhow::Result<OwnedFd> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        bail!("far memory works on x86-64 only");
    }
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if version(&release).is_some_and(|version| version < KERNEL) {
        bail!(
            "far memory needs Linux {}.{} or later; this is {release}",
            KERNEL.0,
            KERNEL.1
        );
    }
    let device = match userfault_device() {
        Ok(device) => device,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => bail!(
            "far memory needs /dev/userfaultfd, which this user may not open: run it as root, or have a udev rule give the \
            device to your group. (Without it, system calls on far pages would fail with EFAULT.)"
        ),
        Err(error) => bail!(
            "far memory needs userfaultfd, which this kernel does not offer (/dev/userfaultfd: {error})"
        ),
    };
    let made = Faults::of_this_process(device.as_fd()).and_then(Faults::begin);
    match made.map_err(|error| (error.raw_os_error(), error)) {
        Ok(_) => {}
        Err((_, error)) if is_filtered() => bail!("{SECCOMP}: {error}"),
        Err((Some(libc::EPERM), _)) => bail!(
            "far memory needs CAP_SYS_PTRACE, to follow forks: run it as root. (Without it, a child would read zeros from far \
            pages.)"
        ),
        Err((Some(libc::EINVAL), _)) => {
            bail!("far memory needs a userfaultfd that can move pages; {release} cannot")
        }
        Err((_, error)) => bail!("far memory needs userfaultfd: {error}"),
    }
    let here = Page::default();
    let mut copy = Page::default();
    let me = Pid(std::process::id() as i32);
    let read = read_memory(
        me,
        &[(here.0.as_ptr().addr() as u64, 1)],
        std::slice::from_mut(&mut copy),
    );
    match read {
        Err(error) if is_filtered() => bail!("{SECCOMP}: process_vm_readv: {error}"),
        Err(error) => bail!("far memory needs process_vm_readv: {error}"),
        Ok(()) => Ok(device),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Whether a seccomp filter is on us, which the program would inherit.
fn is_filtered() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
    line.is_some_and(|mode| mode.trim() != "0")
}

/// Looks at the limit: it must be one that this machine can reach.
///
/// # Errors
/// When it is above all memory.
pub(super) fn limit(local: Local) -> anyhow::Result<()> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text.lines().find_map(|line| {
        line.strip_prefix("MemTotal:")?
            .split_ascii_whitespace()
            .next()?
            .parse::<u64>()
            .ok()
    });
    match (local, kib) {
        (Local::Bytes(bytes), Some(kib)) if bytes > kib << 10 => bail!(
            "--local is {} MiB, and this machine has {} MiB of memory: nothing would ever leave",
            bytes >> 20,
            kib >> 10
        ),
        _ => Ok(()),
    }
}

/// Looks at the program: it must be one that loads our library.
///
/// # Errors
/// Why it cannot have far memory.
pub(super) fn program(name: &OsStr) -> anyhow::Result<()> {
    // `exec` reports a missing file better.
    let Some(mut path) = find(name) else { return Ok(()) };
    for _ in 0..SCRIPTS_MAX {
        let meta = std::fs::metadata(&path)?;
        if meta.mode() & 0o6000 != 0 && !rustix::process::geteuid().is_root() {
            bail!(
                "{} changes its user when it starts (set-uid), so the loader ignores our library: it cannot have far memory",
                path.display()
            );
        }
        let mut head = Vec::new();
        // The program headers of real programs lie in the first page.
        if let Ok(file) = std::fs::File::open(&path) {
            file.take(4096).read_to_end(&mut head)?;
        }
        match kind(&head) {
            Kind::Script(interpreter) => path = interpreter,
            Kind::Static => bail!(
                "{} is statically linked, so no library can be loaded into it: it cannot have far memory",
                path.display()
            ),
            Kind::Foreign => bail!(
                "{} is not a 64-bit x86 program: it cannot have far memory",
                path.display()
            ),
            Kind::Dynamic | Kind::Other => return Ok(()),
        }
    }
    Ok(())
}

/// The kind of a program by its first bytes.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Dynamic,
    Static,
    Foreign,
    Script(PathBuf),
    Other,
}

const PT_INTERP: u32 = 3;
const EM_X86_64: u16 = 62;

fn kind(head: &[u8]) -> Kind {
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let mut words = line
            .split(|byte| matches!(byte, b' ' | b'\t'))
            .filter(|word| !word.is_empty());
        return words.next().map_or(Kind::Other, |word| {
            Kind::Script(PathBuf::from(OsStr::from_bytes(word)))
        });
    }
    if !head.starts_with(b"\x7fELF") {
        return Kind::Other;
    }
    let half = |at: usize| {
        head.get(at..at + 2)
            .map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
    };
    if head.get(4) != Some(&2) || half(18) != Some(EM_X86_64) {
        return Kind::Foreign;
    }
    let offset = head
        .get(32..40)
        .and_then(|bytes| bytes.try_into().ok())
        .map(u64::from_le_bytes);
    let (Some(offset), Some(size), Some(count)) = (offset, half(54), half(56)) else {
        return Kind::Other;
    };
    let types = (0..usize::from(count)).map(|number| {
        let at = usize::try_from(offset)
            .ok()?
            .checked_add(number * usize::from(size))?;
        let bytes = head.get(at..at.checked_add(4)?)?;
        bytes.try_into().ok().map(u32::from_le_bytes)
    });
    let types: Vec<Option<u32>> = types.collect();
    match types.contains(&Some(PT_INTERP)) {
        true => Kind::Dynamic,
        // Headers elsewhere than at the start: unusual, and not our business.
        false if types.contains(&None) => Kind::Other,
        false => Kind::Static,
    }
}

fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name)).filter(|path| path.is_file());
    }
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths)
        .map(|dir| dir.join(name))
        .find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A little ELF: one program header of this type.
    fn elf(class: u8, machine: u16, header: u32) -> Vec<u8> {
        let mut bytes = vec![0u8; 64 + 56];
        bytes[..4].copy_from_slice(b"\x7fELF");
        bytes[4] = class;
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = 1;
        bytes[64..68].copy_from_slice(&header.to_le_bytes());
        bytes
    }

    #[test]
    fn kinds_of_programs_are_told_apart() {
        assert_eq!(kind(&elf(2, 62, 3)), Kind::Dynamic);
        assert_eq!(kind(&elf(2, 62, 1)), Kind::Static);
        assert_eq!(kind(&elf(1, 3, 3)), Kind::Foreign);
        assert_eq!(kind(&elf(2, 62, 3)[..60]), Kind::Other);
        assert_eq!(kind(b"#! /bin/sh -e\necho"), Kind::Script("/bin/sh".into()));
        assert_eq!(kind(b"#!"), Kind::Other);
        assert_eq!(kind(b""), Kind::Other);
        assert_eq!(kind(&[0xff; 200]), Kind::Other);
    }

    #[test]
    fn kernel_versions_are_compared_by_number() {
        assert_eq!(version("6.18.44-fc"), Some((6, 18)));
        assert!(version("6.7.0").unwrap() < KERNEL);
        assert!(version("6.10-rc1").unwrap() > KERNEL);
        assert_eq!(version("unknown"), None);
    }
}
