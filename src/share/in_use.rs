//! Files of a mount that programs have open for writing or have mapped shared, by the kernel's tables of
//! processes (`/proc`). Sees the processes that this user may look at: root all, others their own. Programs
//! that a session of their own serves are the daemon's to name.

use rustix::fs::OFlags;
use std::collections::{HashMap, HashSet};
use std::fs::{read, read_dir, read_to_string};
use std::path::Path;
use std::time::{Duration, Instant};

/// Age at which the tables are read again.
const OLD: Duration = Duration::from_secs(1);

/// Use of a file by a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    /// The process.
    pub pid: u32,
    /// The name of its program.
    pub program: String,
    /// It has the file mapped shared; else open for writing.
    pub mapped: bool,
}

impl Use {
    /// The reason for which a file is left.
    pub fn reason(&self) -> String {
        let how = if self.mapped {
            "mapped shared"
        } else {
            "open for writing"
        };
        format!("{how} by {} (process {})", self.program, self.pid)
    }
}

/// Files in use on one device, as far as they are known.
#[derive(Debug)]
pub struct InUse {
    /// Major and minor number.
    device: (u32, u32),
    uses: HashMap<u64, Use>,
    read: Option<Instant>,
}

impl InUse {
    /// Of the device of a mount; the tables are read at the first question.
    pub fn on(device: u64) -> Self {
        Self {
            device: (rustix::fs::major(device), rustix::fs::minor(device)),
            uses: HashMap::new(),
            read: None,
        }
    }

    /// Returns a use of the inode, at most a second old.
    pub fn of(&mut self, inode: u64) -> Option<&Use> {
        if self.read.is_none_or(|read| read.elapsed() > OLD) {
            self.uses = look(Path::new("/proc"), self.device);
            self.read = Some(Instant::now());
        }
        self.uses.get(&inode)
    }
}

/// Reads the tables of all processes. One that ends meanwhile, or may not be looked at, has none.
fn look(proc: &Path, device: (u32, u32)) -> HashMap<u64, Use> {
    let mut uses = HashMap::new();
    let processes = read_dir(proc).into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for pid in numbers.filter(|pid| *pid != std::process::id()) {
        let dir = proc.join(pid.to_string());
        let maps = read(dir.join("maps")).unwrap_or_default();
        let mapped = maps
            .split(|byte| *byte == b'\n')
            .filter_map(|line| mapped(line, device));
        let written = written(&dir, device);
        let all = mapped.map(|inode| (inode, true));
        for (inode, mapped) in all.chain(written.into_iter().map(|inode| (inode, false))) {
            uses.entry(inode).or_insert_with(|| Use {
                pid,
                program: read_to_string(dir.join("comm"))
                    .map_or_else(|_| "a program".into(), |name| name.trim().to_owned()),
                mapped,
            });
        }
    }
    uses
}

/// The inode of a line of `maps`, if that maps a file of the device shared.
fn mapped(line: &[u8], device: (u32, u32)) -> Option<u64> {
    let line = std::str::from_utf8(line).ok().or_else(|| {
        // A path that is no text comes last.
        let end = line.iter().position(|byte| !byte.is_ascii())?;
        std::str::from_utf8(&line[..end]).ok()
    })?;
    let mut words = line.split_ascii_whitespace().skip(1);
    let rights = words.next()?;
    let (major, minor) = words.nth(1)?.split_once(':')?;
    let hex = |text| u32::from_str_radix(text, 16).ok();
    let inode = words.next()?.parse().ok()?;
    (rights.ends_with('s') && (hex(major)?, hex(minor)?) == device).then_some(inode)
}

/// Inodes of the device that a process has open for writing. Touches no file of it.
fn written(dir: &Path, device: (u32, u32)) -> Vec<u64> {
    let table = read_to_string(dir.join("mountinfo")).unwrap_or_default();
    let mounts: HashSet<&str> = table
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            let id = words.next()?;
            let (major, minor) = words.nth(1)?.split_once(':')?;
            ((major.parse().ok()?, minor.parse().ok()?) == device).then_some(id)
        })
        .collect();
    if mounts.is_empty() {
        return Vec::new();
    }
    let infos = read_dir(dir.join("fdinfo")).into_iter().flatten().flatten();
    infos
        .filter_map(|info| {
            let text = read_to_string(info.path()).ok()?;
            let field = |name| {
                text.lines()
                    .find_map(|line| line.strip_prefix(name))
                    .map(str::trim)
            };
            let flags = u32::from_str_radix(field("flags:")?, 8).ok()?;
            let writes = flags & OFlags::ACCMODE.bits() != 0;
            (writes && mounts.contains(field("mnt_id:")?)).then(|| field("ino:")?.parse().ok())?
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{InUse, mapped};
    use std::os::unix::fs::MetadataExt;
    use std::process::{Command, Stdio};

    #[test]
    fn shared_maps_of_the_device_are_found() {
        let line = "7f0000000000-7f0000001000 rw-s 00000000 00:2a 4711                       /mnt/x y";
        assert_eq!(mapped(line.as_bytes(), (0, 0x2a)), Some(4711));
        assert_eq!(mapped(line.as_bytes(), (0, 0x2b)), None);
        let private = line.replace("rw-s", "rw-p");
        assert_eq!(mapped(private.as_bytes(), (0, 0x2a)), None);
        let odd = [line.as_bytes(), &[0xff, 0xfe]].concat();
        assert_eq!(mapped(&odd, (0, 0x2a)), Some(4711));
        assert_eq!(mapped(b"", (0, 0x2a)), None);
    }

    #[test]
    fn program_that_has_a_file_open_for_writing_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("f");
        let file = std::fs::File::create(&path).expect("made");
        let is = std::fs::metadata(&path).expect("there");
        let reader = std::fs::File::open(&path).expect("opened");
        let sleep = |stdin: std::fs::File| {
            Command::new("sleep")
                .arg("60")
                .stdin(Stdio::from(stdin))
                .spawn()
                .expect("started")
        };
        let mut child = sleep(reader);
        let reads = InUse::on(is.dev()).of(is.ino()).cloned();
        let _ = child.kill().and_then(|()| child.wait());
        assert_eq!(
            reads, None,
            "this process' own use does not count, nor does a reader"
        );
        let mut child = sleep(file);
        let writes = InUse::on(is.dev()).of(is.ino()).cloned();
        let _ = child.kill().and_then(|()| child.wait());
        let writes = writes.expect("it is found");
        assert_eq!(writes.pid, child.id());
        assert_eq!(
            writes.reason(),
            format!("open for writing by sleep (process {})", child.id())
        );
    }
}
