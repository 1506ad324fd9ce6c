//! What a change of a file takes away from it: set-id bits and file capabilities are gone when the call
//! returns, to the mount's kernel, to `exec` and to other sessions, whoever made the change and by which way
//! in. Needs root.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{KernelsOwn, Pool, cannot_mount, varve};
use nix::fcntl::{FallocateFlags, SpliceFFlags, copy_file_range, fallocate, splice};
use nix::sys::sendfile::sendfile;
use rustix::fs::XattrFlags;
use std::fs::{File, OpenOptions};
use std::io::{Error, IoSlice, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use varve_libfs::{Cred, Fs, FsOptions, SocketConnector};

const SMALL: [&str; 7] = ["--allow-other", "--nvm", "64M", "--ssd", "64M", "--hdd", "0"];
/// An ordinary user.
const USER: u32 = 65_534;
/// Tells a test process that it is the one that changes a file: which call, and the file.
const ENV: &str = "VARVE_PRIVILEGES_CHANGE";
const CAPABILITY: &str = "security.capability";
/// `cap_dac_override+ep`, version 2 (linux/capability.h).
const CAP_DAC_OVERRIDE: [u8; 20] = [1, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Calls that change the data of a file.
const CHANGES: [&str; 15] = [
    "write",
    "append",
    "pwrite",
    "writev",
    "direct",
    "truncate",
    "ftruncate",
    "O_TRUNC",
    "fallocate",
    "punch",
    "zero",
    "copy_file_range",
    "sendfile",
    "splice",
    "io_uring",
];

/// A store through a shared map, which changes data without a call that could take anything away.
const MAP: &str = "map";

/// By the C library, as programs do; what goes past it goes past `varve run`.
fn change(call: &str, path: &Path) -> std::io::Result<()> {
    let open = || OpenOptions::new().read(true).write(true).open(path);
    let allocate = |flags| Ok(fallocate(open()?, flags, 0, 4096)?);
    let source = || File::open(path.with_file_name("source"));
    match call {
        "write" => OpenOptions::new().write(true).open(path)?.write_all(b"x"),
        "append" => OpenOptions::new().append(true).open(path)?.write_all(b"x"),
        "pwrite" => open()?.write_all_at(b"x", 1),
        "writev" => open()?
            .write_vectored(&[IoSlice::new(b"x"), IoSlice::new(b"y")])
            .map(drop),
        "direct" => OpenOptions::new()
            .write(true)
            .custom_flags(libc::O_DIRECT)
            .open(path)?
            .write_all(b"x"),
        "truncate" => nix::unistd::truncate(path, 1).map_err(Error::from),
        "ftruncate" => open()?.set_len(1),
        "O_TRUNC" => OpenOptions::new().write(true).truncate(true).open(path).map(drop),
        "fallocate" => allocate(FallocateFlags::empty()),
        "punch" => allocate(FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE),
        "zero" => allocate(FallocateFlags::FALLOC_FL_ZERO_RANGE),
        "copy_file_range" => Ok(copy_file_range(source()?, None, open()?, None, 4).map(drop)?),
        "sendfile" => Ok(sendfile(open()?, source()?, None, 4).map(drop)?),
        "splice" => {
            let (reader, mut writer) = std::io::pipe()?;
            writer.write_all(b"x")?;
            Ok(splice(reader, None, open()?, None, 1, SpliceFFlags::empty()).map(drop)?)
        }
        "io_uring" => by_peer("uring", path),
        MAP => by_peer("map", path),
        "chown" => std::os::unix::fs::chown(path, Some(USER), Some(USER)),
        other => panic!("no call {other}"),
    }
}

/// By a program that writes in another way (`tests/preload/peer.c`), and says so where this kernel has none.
fn by_peer(way: &str, path: &Path) -> std::io::Result<()> {
    let peer = std::env::current_exe()?.with_file_name("peer");
    let mut child = Command::new(peer)
        .arg(way)
        .arg(path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    child.stdin.take().expect("piped").write_all(b"w 0 x\n")?;
    let output = child.wait_with_output()?;
    match String::from_utf8_lossy(&output.stdout).as_ref() {
        "ready\ndone\n" => Ok(()),
        said if said.starts_with("unavailable") => {
            eprintln!("SKIPPED: no {way} here");
            OpenOptions::new().write(true).open(path)?.write_all(b"x")
        }
        said => Err(Error::other(said.to_owned())),
    }
}

/// The process that changes a file; does nothing in an ordinary run of the tests.
#[test]
fn changer() {
    let Ok(job) = std::env::var(ENV) else { return };
    let (call, path) = job.split_once(':').unwrap();
    change(call, Path::new(path)).unwrap();
}

/// How the changing program reaches the file.
#[derive(Debug, Clone, Copy)]
enum Way {
    Mount,
    Run,
}

struct Place {
    pool: Pool,
    changer: PathBuf,
}

impl Place {
    fn new() -> Self {
        let pool = Pool::up(&SMALL);
        let outside = pool.outside().to_owned();
        std::fs::set_permissions(&outside, PermissionsExt::from_mode(0o755)).unwrap();
        let changer = outside.join("changer");
        std::fs::copy(std::env::current_exe().unwrap(), &changer).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/preload/peer.c");
        let made = Command::new("cc")
            .args(["-O1", "-w", "-pthread", "-o"])
            .args([&outside.join("peer"), &source])
            .status();
        assert!(
            made.is_ok_and(|status| status.success()),
            "this test needs a C compiler"
        );
        std::fs::write(pool.mnt().join("source"), "source").unwrap();
        Self { pool, changer }
    }

    fn change(&self, way: Way, uid: u32, call: &str, file: &Path) {
        let arguments = ["changer", "--exact", "--test-threads", "1"];
        let mut command = match way {
            Way::Mount => Command::new(&self.changer),
            Way::Run => {
                let mut run = varve();
                run.args(["run", "--session-after", "0", "--mount"])
                    .arg(self.pool.mnt())
                    .arg("--")
                    .arg(&self.changer);
                run
            }
        };
        command
            .args(arguments)
            .env(ENV, format!("{call}:{}", file.display()));
        if uid != 0 {
            command.uid(uid).gid(uid);
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{call} by {uid}: {output:?}");
    }

    /// A program under `varve run` that has looked at the mount and stays.
    fn shared(&self) -> Sharing {
        let child = varve()
            .args(["run", "--session-after", "0", "--mount"])
            .arg(self.pool.mnt())
            .args(["--", "sh", "-c", "ls . > /dev/null; echo there; exec sleep 600"])
            .current_dir(self.pool.mnt())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut shared = Sharing(child);
        let mut said = [0; 5];
        std::io::Read::read_exact(&mut shared.0.stdout.take().unwrap(), &mut said).unwrap();
        shared
    }

    /// What another session sees of a file in the root directory: mode bits, and whether it has capabilities.
    fn seen_elsewhere(&self, name: &str) -> (u32, bool) {
        let connector = SocketConnector {
            path: self.pool.dir().join("sock"),
        };
        let fs = Fs::mount(Arc::new(connector), FsOptions::default()).unwrap();
        let attr = fs.lookup(fs.root(), name.as_bytes(), &Cred::root()).unwrap();
        let capability = fs.getxattr(attr.key, CAPABILITY.as_bytes(), &Cred::root());
        (attr.mode & 0o7777, capability.is_ok())
    }
}

/// Ends with the test.
struct Sharing(Child);

impl Drop for Sharing {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn has_capability(file: &Path) -> bool {
    let mut value = [0; 64];
    match rustix::fs::getxattr(file, CAPABILITY, &mut value) {
        Ok(_) => true,
        Err(rustix::io::Errno::NODATA) => false,
        Err(error) => panic!("{}: {error}", file.display()),
    }
}

fn set_capability(file: &Path) {
    rustix::fs::setxattr(file, CAPABILITY, &CAP_DAC_OVERRIDE, XattrFlags::empty()).unwrap();
    assert!(has_capability(file));
}

/// A program of root's that everybody may write.
fn program(dir: &Path, name: &str) -> PathBuf {
    let file = dir.join(name);
    let _ = std::fs::remove_file(&file);
    std::fs::copy("/bin/true", &file).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o777)).unwrap();
    file
}

fn mode(file: &Path) -> u32 {
    std::fs::metadata(file).unwrap().mode() & 0o7777
}

fn cannot() -> bool {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: set-id programs and file capabilities need root");
        return true;
    }
    cannot_mount()
}

fn file_capabilities_go(place: &Place, when: &str) {
    let mnt = place.pool.mnt();
    for (way, uid) in [
        (Way::Mount, 0),
        (Way::Mount, USER),
        (Way::Run, 0),
        (Way::Run, USER),
    ] {
        for call in CHANGES.into_iter().chain((uid == 0).then_some("chown")) {
            let name = format!("caps-{call}-{way:?}-{uid}");
            let file = program(&mnt, &name);
            set_capability(&file);
            place.change(way, uid, call, &file);
            assert!(
                !has_capability(&file),
                "{call} by {uid}, {way:?}, {when}: they stay"
            );
            assert!(
                !place.seen_elsewhere(&name).1,
                "{call} by {uid}, {way:?}, {when}: another session sees them"
            );
            set_capability(&file);
            std::fs::remove_file(&file).unwrap();
        }
    }
}

fn set_id_bits_go(place: &Place, when: &str) {
    let mnt = place.pool.mnt();
    for way in [Way::Mount, Way::Run] {
        for call in CHANGES {
            let name = format!("set-id-{call}-{way:?}");
            let file = program(&mnt, &name);
            std::fs::set_permissions(&file, PermissionsExt::from_mode(0o6777)).unwrap();
            assert_eq!(mode(&file), 0o6777);
            place.change(way, USER, call, &file);
            assert_eq!(mode(&file), 0o777, "{call}, {way:?}, {when}");
            assert_eq!(
                place.seen_elsewhere(&name).0,
                0o777,
                "{call}, {way:?}, {when}: elsewhere"
            );
            std::fs::remove_file(&file).unwrap();
        }
    }
}

/// An ordinary user puts another program into one with rights, and runs it at once.
fn changed_program_has_no_rights(place: &Place, when: &str) {
    let mnt = place.pool.mnt();
    let file = mnt.join("id");
    for capability in [false, true] {
        let _ = std::fs::remove_file(&file);
        std::fs::copy("/usr/bin/id", &file).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o6777)).unwrap();
        if capability {
            set_capability(&file);
        }
        place.change(Way::Mount, USER, "append", &file);
        let id = Command::new(&file).uid(USER).gid(USER).output().unwrap();
        let said = String::from_utf8(id.stdout).unwrap();
        assert!(
            said.contains("uid=65534") && !said.contains("euid="),
            "{when}: {said}"
        );
    }
}

#[test]
fn privileges_of_a_file_are_gone_when_a_change_returns() {
    if cannot() {
        return;
    }
    let mut place = Place::new();
    for when in ["alone", "in shared mode"] {
        let shared = (when == "in shared mode").then(|| place.shared());
        file_capabilities_go(&place, when);
        set_id_bits_go(&place, when);
        changed_program_has_no_rights(&place, when);
        drop(shared);
    }
    place.pool.down();
    place.pool.fsck_clean();
}

/// What a program of root's has left when a store through a shared map, by `uid`, is written back: mode bits,
/// and whether it has capabilities.
fn left_by_a_map(place: &Place, way: Way, uid: u32, dir: &Path) -> (PathBuf, (u32, bool)) {
    let file = program(dir, &format!("mapped-{way:?}-{uid}"));
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o6777)).unwrap();
    set_capability(&file);
    assert_eq!(mode(&file), 0o6777);
    place.change(way, uid, MAP, &file);
    assert_eq!(std::fs::read(&file).unwrap()[0], b'x', "nothing was stored");
    let left = (mode(&file), has_capability(&file));
    (file, left)
}

/// No constant is right for set-id bits: whatever a file system of this machine's kernel does is. File
/// capabilities may go where it keeps them (docs/reference/semantics.md), and never stay where it takes them.
#[test]
fn store_through_a_map_leaves_set_id_bits_as_the_kernels_own_file_systems_do() {
    if cannot() {
        return;
    }
    let mut place = Place::new();
    let own = KernelsOwn::new(place.pool.outside());
    for uid in [0, USER] {
        let (_, expected) = left_by_a_map(&place, Way::Mount, uid, own.dir());
        let says = |(mode, capability): (u32, bool)| format!("{mode:o}, capabilities: {capability}");
        println!("a store by {uid} leaves on {}: {}", own.kind(), says(expected));
        for when in ["alone", "in shared mode"] {
            let shared = (when == "in shared mode").then(|| place.shared());
            for way in [Way::Mount, Way::Run] {
                let (file, found) = left_by_a_map(&place, way, uid, &place.pool.mnt());
                println!("    {way:?}, {when}: {}", says(found));
                assert_eq!(found.0, expected.0, "by {uid}, {way:?}, {when}");
                assert!(
                    found.1 <= expected.1,
                    "by {uid}, {way:?}, {when}: capabilities stay"
                );
                let name = file.file_name().unwrap().to_string_lossy();
                assert_eq!(
                    place.seen_elsewhere(&name),
                    found,
                    "by {uid}, {way:?}, {when}: elsewhere"
                );
                std::fs::remove_file(&file).unwrap();
            }
            drop(shared);
        }
    }
    drop(own);
    place.pool.down();
    place.pool.fsck_clean();
}

#[test]
fn file_capabilities_that_stay_outlive_a_restart_and_those_that_went_do_not_return() {
    if cannot() {
        return;
    }
    let mut place = Place::new();
    let mnt = place.pool.mnt();
    let (kept, gone) = (program(&mnt, "kept"), program(&mnt, "gone"));
    set_capability(&kept);
    set_capability(&gone);
    place.change(Way::Run, USER, "pwrite", &gone);
    place.pool.kill_all();
    place.pool.start();
    assert!(has_capability(&kept) && !has_capability(&gone));
    std::fs::set_permissions(&kept, PermissionsExt::from_mode(0o755)).unwrap();
    assert!(has_capability(&kept), "chmod leaves them");
    place.pool.down();
    place.pool.fsck_clean();
}
