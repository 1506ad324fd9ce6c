//! Two ordinary users of one pool. Each has sessions of its own; what one has, the other tries to get at: its
//! files, logs, pages, segments and processes; descriptors that it was given itself, and its own log, it
//! turns against the daemon. And what either may do works as it does on any file system. Needs root, to
//! become the two.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

#[path = "../hostile/client.rs"]
#[allow(dead_code)]
mod client;

mod attack;
mod person;
mod place;

use person::{A, B, C, GROUP, Person, Role};
use place::Place;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use varve_libfs::{Errno, Posix};

/// Content that only B may read.
pub const SECRET: &str = "what only B may know, whatever A does";
/// Content of A's own.
const OWN: &str = "what A has written itself, and may read";

fn cannot() -> bool {
    if rustix::process::geteuid().is_root() {
        return false;
    }
    eprintln!("SKIPPED: two ordinary users need root to become them");
    true
}

/// The process that the others start; does nothing in an ordinary run of the tests.
#[test]
fn person() {
    person::live();
}

/// Directories of both, and one for all.
fn furnish(root: &Posix) {
    root.umask(0);
    for (dir, mode, uid) in [
        ("/a", 0o700, A),
        ("/b", 0o700, B),
        ("/common", 0o777, 0),
        ("/sticky", 0o777, 0),
        ("/group", 0o777, 0),
    ] {
        root.mkdir(dir.as_bytes(), mode).unwrap();
        root.chown(dir.as_bytes(), Some(uid), Some(uid)).unwrap();
    }
    root.chmod(b"/sticky", 0o1777).unwrap();
    root.chown(b"/group", Some(0), Some(GROUP)).unwrap();
    root.chmod(b"/group", 0o2777).unwrap();
}

fn text(root: &Posix, path: &str) -> Result<String, Errno> {
    let fd = root.open(path.as_bytes(), libc::O_RDONLY, 0)?;
    let mut bytes = vec![0; 1 << 16];
    let got = root.pread(fd, &mut bytes, 0);
    root.close(fd)?;
    bytes.truncate(got?);
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn put(root: &Posix, path: &str, content: &str, mode: u32, uid: u32, gid: u32) {
    let fd = root
        .open(
            path.as_bytes(),
            libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY,
            0o600,
        )
        .unwrap();
    root.write(fd, content.as_bytes()).unwrap();
    root.close(fd).unwrap();
    root.chown(path.as_bytes(), Some(uid), Some(gid)).unwrap();
    root.chmod(path.as_bytes(), mode).unwrap();
}

#[test]
fn what_ordinary_users_may_do_they_do_in_their_own_sessions() {
    if cannot() {
        return;
    }
    let place = Place::new(&format!("users = [{A}, {B}]"), "96M");
    let mut daemon = place.start();
    let root = place.root();
    furnish(&root);
    let mut a = Person::start(&place, Role::user(A));
    let mut b = Person::start(&place, Role::user(B));
    a.ok(&format!("create /a/own 600 {OWN}"));
    assert_eq!(a.ok("read /a/own"), OWN);
    assert_eq!(b.errno("read /a/own"), "EACCES");
    assert_eq!(b.errno("create /a/of-b 600 x"), "EACCES");

    // The owner of a file that nobody may write lets himself write it, under the lease that he has.
    a.ok("create /common/read-only 444 before,");
    place.digest();
    assert_eq!(a.errno("append /common/read-only no"), "EACCES");
    a.ok("chmod /common/read-only 644");
    a.ok("append /common/read-only after");
    // A file that only its owner may write is read by the descriptor that made it.
    a.ok("open 1 w+ 200 /a/write-only");
    a.ok("put 1 read back");
    place.digest();
    assert_eq!(a.ok("get 1"), "read back");
    assert_eq!(a.errno("read /a/write-only"), "EACCES");

    // What is open stays open as it was opened.
    b.ok("create /common/shared 666 b,");
    a.ok("open 2 a 0 /common/shared");
    a.ok("put 2 one,");
    a.ok("open 3 r 0 /common/shared");
    assert_eq!(a.ok("get 3"), "b,one,");
    b.ok("chmod /common/shared 600");
    b.ok("append /common/shared b again,");
    a.ok("put 2 two");
    assert_eq!(a.ok("get 3"), "b,one,b again,two");
    assert_eq!(a.errno("read /common/shared"), "EACCES");
    assert_eq!(a.errno("open 4 a 0 /common/shared"), "EACCES");
    a.ok("close 2");
    a.ok("close 3");
    assert_eq!(a.errno("open 4 a 0 /common/shared"), "EACCES");

    // Owners, groups, devices, sticky directories.
    b.ok("create /sticky/of-b 666 x");
    assert_eq!(a.errno("unlink /sticky/of-b"), "EPERM");
    assert_eq!(a.errno(&format!("chown /a/own {B}")), "EPERM");
    assert_eq!(a.errno("chmod /sticky/of-b 600"), "EPERM");
    assert_eq!(a.errno("mknod /a/device"), "EPERM");
    a.ok("create /group/handed-on 644 x");
    place.digest();
    assert_eq!(root.stat(b"/group/handed-on").unwrap().gid, GROUP);
    assert_eq!(root.stat(b"/a/own").unwrap().gid, A);

    // Whoever is not named has no session, and operators' requests are root's.
    let mut c = Person::start(&place, Role::user(C));
    assert_eq!(c.errno("read /common/shared"), "EACCES");
    let status = a.errno("admin");
    assert_eq!(status, "EPERM");
    drop(c);

    // Nothing that was acknowledged is refused afterwards.
    drop((a, b));
    place.wait_sessions(&daemon, 1);
    assert_eq!(text(&root, "/common/read-only").unwrap(), "before,after");
    assert_eq!(text(&root, "/common/shared").unwrap(), "b,one,b again,two");
    assert_eq!(place.status()["digest"]["refused"], 0, "{}", daemon.said());
    root.fs().unmount().unwrap();
    daemon.stop();
    place.fsck();
}

#[test]
fn fsync_of_an_ordinary_user_outlives_power_and_its_daemon() {
    if cannot() {
        return;
    }
    // Nothing in the background: what is durable is so by `fsync`.
    let place = Place::new("users = \"all\"\nsync_ms = 0\nidle_digest_ms = 60000", "96M");
    let mut daemon = place.start();
    let root = place.root();
    furnish(&root);
    root.fs().unmount().unwrap();
    drop(root);
    let mut a = Person::start(&place, Role::user(A));
    a.ok(&format!("create /a/synced 600 {OWN}"));
    a.ok("sync");
    a.ok("create /a/after 600 not synced");
    // The power goes: what lies in memory only is lost.
    daemon.kill();
    a.kill();
    place.lose_memory();
    let mut daemon = place.start();
    let mut a = Person::start(&place, Role::user(A));
    assert_eq!(a.ok("read /a/synced"), OWN);
    assert_eq!(a.errno("read /a/after"), "ENOENT");
    // A client whose daemon dies goes on with the next one; its `fsync` waits for it.
    a.ok("open 1 w 600 /a/goes-on");
    a.ok("put 1 before,");
    daemon.kill();
    let mut daemon = place.start();
    a.ok("fsync 1");
    a.ok("put 1 after");
    a.ok("fsync 1");
    assert_eq!(a.ok("read /a/goes-on"), "before,after");
    drop(a);
    daemon.stop();
    place.fsck();
}

/// Files of two users with the same bytes: who may share what with whom, and who is told.
#[test]
fn deduplication_tells_and_maps_nothing_of_another_user() {
    if cannot() {
        return;
    }
    const LEN: usize = 8 * 4096;
    let content = "the same in all files".repeat(LEN / 21 + 1)[..LEN].to_owned();
    for (scope, refusal) in [("user", "EPERM"), ("group", "EPERM"), ("pool", "EOPNOTSUPP")] {
        let settings = format!("users = [{A}, {B}]\ndedup_scope = \"{scope}\"");
        let place = Place::new(&settings, "96M");
        let mut daemon = place.start();
        let root = place.root();
        furnish(&root);
        for (path, mode, uid) in [
            ("/a/one", 0o600, A),
            ("/a/two", 0o600, A),
            ("/common/of-a", 0o644, A),
            ("/b/own", 0o600, B),
        ] {
            let rest = if uid == A { "only A wrote this" } else { "" };
            put(&root, path, &(content.clone() + rest), mode, uid, uid);
        }
        let mut a = Person::start(&place, Role::user(A));
        let mut b = Person::start(&place, Role::user(B));
        assert_eq!(a.ok(&format!("dedupe /a/one /a/two {LEN}")), "true");
        assert_eq!(a.ok(&format!("dedupe /a/one /common/of-a {LEN}")), "true");
        // More than one, and not how many.
        assert_eq!(a.ok("owners /a/one"), "[2, 1]");
        // What B may not read it may not compare; what it may read, only within the scope, and never in NVM.
        let with = |path: &str| format!("dedupe {path} /b/own {LEN}");
        assert_eq!(b.errno(&with("/a/one")), "EACCES");
        assert_eq!(b.errno(&with("/common/of-a")), refusal, "{scope}");
        assert_eq!(b.errno(&format!("dedupe /b/own /common/of-a {LEN}")), "EACCES");
        assert_eq!(b.ok("owners /b/own"), "[1]");
        assert_eq!(b.errno("owners /common/of-a"), "EPERM");
        assert_eq!(b.errno("undo /common/of-a"), "EACCES");
        // Root's command is bound by the scope as well.
        let [from, to] =
            ["/a/one", "/b/own"].map(|path| root.open(path.as_bytes(), libc::O_RDONLY, 0).unwrap());
        let refused = root.dedupe_range(from, 0, to, 0, LEN as u64).unwrap_err();
        let expected = if refusal == "EPERM" {
            libc::EPERM
        } else {
            libc::EOPNOTSUPP
        };
        assert_eq!(refused, Errno(expected));
        assert_eq!(b.ok("owners /b/own"), "[1]");
        // B maps nothing that it did not map before A's files were shared: its segments hold its own files.
        b.ok("keep");
        b.ok("read /b/own");
        b.ok("read /common/of-a");
        assert_eq!(b.ok("scan only A wrote this"), "0 of 1");
        assert_eq!(
            b.ok("scan the same in all files"),
            "1 of 1",
            "its own file is there"
        );
        a.ok("undo /a/one");
        assert!(!a.ok("owners /a/one").contains('2'));
        for path in ["/a/one", "/a/two", "/common/of-a"] {
            assert_eq!(
                text(&root, path).unwrap(),
                content.clone() + "only A wrote this",
                "{path}"
            );
        }
        drop((a, b));
        place.wait_sessions(&daemon, 1);
        root.fs().unmount().unwrap();
        daemon.stop();
        place.fsck();
    }
}

/// What A does to B, with B at work beside it. See [`attack`].
fn assault(nvm: &str) {
    let place = Place::new("users = \"all\"\nlease_ms = 500", nvm);
    let mut daemon = place.start();
    let root = place.root();
    furnish(&root);
    put(&root, "/sticky/theirs", "B's", 0o644, B, B);
    put(&root, "/common/set-id", "B's program", 0o4775, B, A);
    put(&root, "/a/own", OWN, 0o600, A, A);
    root.sync().unwrap();
    let mut b = Person::start(&place, Role::user(B));
    b.ok(&format!("create /b/secret 666 {SECRET}"));
    place.digest();
    let secret = b.ok("key /b/secret");
    let log = b.ok("token");
    // Not digested: it is in B's log alone.
    b.ok(&format!("create /b/logged 600 {SECRET}"));
    let mut a = Person::start(&place, Role::user(A));
    let said = a.ok(&format!(
        "attack {secret} {log} {} {} {} {}",
        daemon.pid(),
        b.pid(),
        place.live().display(),
        place.pool().display()
    ));
    assert_eq!(said, "nothing", "{}", daemon.said());
    assert!(daemon.lives(), "{}", daemon.said());
    // B has noticed nothing.
    assert_eq!(b.ok("read /b/secret"), SECRET);
    assert_eq!(b.ok("read /b/logged"), SECRET);
    a.kill();
    // Root, and two of B.
    place.wait_sessions(&daemon, 3);
    place.digest();

    // What A logged: all of what it may, nothing of what it may not.
    assert_eq!(text(&root, "/a/control").unwrap(), "logged by hand");
    let set_id = root.stat(b"/common/set-id").unwrap();
    assert_eq!(
        set_id.mode & 0o7777,
        0o775,
        "a program that A has written runs as B"
    );
    assert_eq!(text(&root, "/common/set-id").unwrap(), "A's program");
    let own = root.stat(b"/a/own").unwrap();
    assert_eq!((own.uid, own.gid, own.mode & 0o7777), (A, A, 0o600));
    assert_eq!(root.listxattr(b"/a/own").unwrap(), Vec::<Vec<u8>>::new());
    let theirs = root.stat(b"/sticky/theirs").unwrap();
    assert_eq!((theirs.uid, theirs.mode & 0o7777), (B, 0o644));
    assert_eq!(text(&root, "/sticky/theirs").unwrap(), "B's");
    let errno = |path: &str| root.stat(path.as_bytes()).map(|attr| attr.mode).unwrap_err().0;
    for path in [
        "/a/device",
        "/a/of-b",
        "/a/of-root",
        "/a/foreign-group",
        "/sticky/moved",
        "/b/planted",
        "/planted",
    ] {
        assert_eq!(errno(path), libc::ENOENT, "{path} was accepted");
    }
    assert_eq!(text(&root, "/b/secret").unwrap(), SECRET);
    assert!(place.status()["digest"]["refused"].as_u64().unwrap() >= 19);
    root.fs().unmount().unwrap();
    drop(b);
    daemon.stop();
    assert!(!daemon.said().contains("panicked"), "{}", daemon.said());
    place.fsck();
}

#[test]
fn user_gets_at_nothing_of_another_one_when_the_pool_is_on_disk() {
    if !cannot() {
        assault("96M");
    }
}

#[test]
fn user_gets_at_nothing_of_another_one_when_the_pool_is_in_memory() {
    if !cannot() {
        assault("shm:96M");
    }
}

/// A's files are read in A's segments; nothing of B's comes into them, whatever becomes of the files, and
/// whatever A has kept.
fn segments(nvm: &str) {
    let place = Place::new("users = \"all\"\nuser_bytes = 4194304", nvm);
    let mut daemon = place.start();
    let root = place.root();
    furnish(&root);
    let (mut a, mut b) = (
        Person::start(&place, Role::user(A)),
        Person::start(&place, Role::user(B)),
    );
    a.ok(&format!("create /a/own 600 {OWN}"));
    b.ok(&format!("create /b/secret 600 {SECRET}"));
    // For all to read: but in B's segments only.
    b.ok(&format!("create /common/of-b 644 {SECRET}"));
    place.digest();
    for person in [&mut a, &mut b] {
        person.ok("keep");
    }
    assert_eq!(
        (a.ok(&format!("scan {OWN}")), b.ok(&format!("scan {SECRET}"))),
        ("0 of 1".into(), "0 of 1".into())
    );
    // When they read what they have written no more in their logs, that is where they read it.
    common::wait_until("reads in the segments", || {
        assert_eq!(
            (a.ok("read /a/own"), b.ok("read /b/secret")),
            (OWN.into(), SECRET.into())
        );
        assert_eq!(
            (a.ok("read /common/of-b"), b.ok("read /common/of-b")),
            (SECRET.into(), SECRET.into())
        );
        let found = (a.ok(&format!("scan {OWN}")), b.ok(&format!("scan {SECRET}")));
        found == ("1 of 1".into(), "1 of 1".into())
    });
    let secret = format!("scan {SECRET}");
    assert_eq!(
        (a.ok(&secret), b.ok(&format!("scan {OWN}"))),
        ("0 of 1".into(), "0 of 1".into())
    );

    // The file goes to B, who writes what A must not know.
    root.chown(b"/a/own", Some(B), Some(B)).unwrap();
    root.chmod(b"/a", 0o711).unwrap();
    place.digest();
    b.ok(&format!("append /a/own {SECRET}"));
    place.digest();
    assert_eq!(b.ok("read /a/own"), format!("{OWN}{SECRET}"));
    assert_eq!(a.errno("read /a/own"), "EACCES");
    a.ok("keep");
    assert_eq!(a.ok(&secret), "0 of 2");
    // And back: what B has written is A's by now.
    root.chown(b"/a/own", Some(A), Some(A)).unwrap();
    assert_eq!(a.ok("read /a/own"), format!("{OWN}{SECRET}"));
    a.ok("unlink /a/own");
    // Its segments end with its last session.
    drop(a);
    let segments_of = |uid: u32| {
        let mut left = std::fs::read_dir(place.live()).unwrap().flatten();
        let prefix = format!("user-{uid}-");
        left.any(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
    };
    assert!(segments_of(B));
    common::wait_until("the end of A's segments", || !segments_of(A));

    // More than fits, of both at once, written anew and deleted: each finds its own in its own, and the
    // blocks of one become the other's.
    let mut a = Person::start(&place, Role::user(A));
    for round in 0..3 {
        let mine = format!("what A wrote in round {round};");
        a.ok(&format!("fill 40 {mine}"));
        b.ok(&format!("fill 40 {SECRET}"));
        place.digest();
        a.ok("keep");
        // As soon as the places of what was there before are forgotten by all.
        common::wait_until("some of it in A's segments", || {
            a.ok(&format!("read-all 40 {mine}"));
            b.ok(&format!("read-all 40 {SECRET}"));
            assert_eq!(a.ok(&secret), format!("0 of {}", round + 1));
            a.ok(&format!("scan {mine}")) == format!("{0} of {0}", round + 1)
        });
        if round == 1 {
            for number in 0..40 {
                b.ok(&format!("unlink /b/fill{number}"));
            }
        }
    }
    assert_eq!(b.ok("scan what A wrote"), "0 of 1");
    // What B writes where A's blocks were comes into nothing that A has.
    let kept = a.ok("scan what A wrote in round 2;");
    b.ok(&format!("fill 40 {SECRET}"));
    place.digest();
    assert_eq!(
        (a.ok("scan what A wrote in round 2;"), a.ok(&secret)),
        (kept, "0 of 3".into())
    );
    assert_eq!(place.status()["digest"]["refused"], 0);
    drop((a, b));
    place.wait_sessions(&daemon, 1);
    common::wait_until("the end of all segments", || !segments_of(A) && !segments_of(B));
    root.fs().unmount().unwrap();
    daemon.stop();
    place.fsck();
}

#[test]
fn segments_of_a_user_hold_that_users_files_only_when_the_pool_is_on_disk() {
    if !cannot() {
        segments("96M");
    }
}

#[test]
fn segments_of_a_user_hold_that_users_files_only_when_the_pool_is_in_memory() {
    if !cannot() {
        segments("shm:96M");
    }
}

/// Of each file an ordinary user's session is told the map by windows (256 KiB): extents begin and end
/// anywhere in them.
#[test]
fn long_files_of_ordinary_users_are_read_as_they_were_written() {
    if cannot() {
        return;
    }
    for nvm in ["shm:96M", "96M"] {
        let place = Place::new("users = \"all\"", nvm);
        let mut daemon = place.start();
        let root = place.root();
        furnish(&root);
        for (blocks, written, read) in [(1000, 25, 1), (1000, 100, 7), (777, 63, 256), (130, 1, 65)] {
            let mut a = Person::start(&place, Role::user(A));
            a.ok(&format!("grow {blocks} {written}"));
            place.digest();
            a.ok(&format!("read-grown {blocks} {read}"));
            drop(a);
            // One that has no log of its own to find it in.
            let mut a = Person::start(&place, Role::user(A));
            a.ok(&format!("read-grown {blocks} {read}"));
            a.ok(&format!("read-grown {blocks} 1"));
        }
        place.wait_sessions(&daemon, 1);
        root.fs().unmount().unwrap();
        daemon.stop();
        place.fsck();
    }
}

/// A file that anybody may run, in a place that anybody reaches.
fn program_for_all(dir: &Path) -> std::path::PathBuf {
    let program = dir.join("varve");
    std::fs::copy(env!("CARGO_BIN_EXE_varve"), &program).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    program
}

#[test]
fn ordinary_users_programs_are_served_in_their_process() {
    let here = cfg!(all(
        target_arch = "x86_64",
        target_os = "linux",
        target_env = "gnu"
    ));
    if cannot() || !here || common::cannot_mount() {
        return;
    }
    // Not in memory: where it is mounted `noexec` nothing could be run from there.
    let outside = tempfile::tempdir().unwrap();
    std::fs::set_permissions(outside.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    let program = program_for_all(outside.path());
    let place = Place::new("users = \"all\"", "96M");
    let up = Command::new(env!("CARGO_BIN_EXE_varve"))
        .args(["up", "--allow-other"])
        .arg(place.pool())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut up = place::Up::new(up, &place.pool());
    let mnt = place.pool().join("mnt");
    common::wait_until("the mount", || {
        varve_mounted(&mnt) && place.pool().join("sock").exists()
    });
    std::fs::create_dir(mnt.join("a")).unwrap();
    std::os::unix::fs::chown(mnt.join("a"), Some(A), Some(A)).unwrap();
    std::fs::write(mnt.join("secret"), SECRET).unwrap();
    std::fs::set_permissions(mnt.join("secret"), std::fs::Permissions::from_mode(0o600)).unwrap();
    let script = "echo one > a/f; chmod 400 a/f; chmod 600 a/f; echo two >> a/f; cat a/f; mkdir a/d; mv a/f \
        a/d/g; \
                  ls -A a/d; (cat secret && echo read) || echo refused; (echo x > new && echo made) || echo \
                  refused; stat -c %u:%g a/d/g";
    let run = Command::new(&program)
        .args(["run", "--stats", "--session-after", "0", "--mount"])
        .arg(&mnt)
        .args(["--", "sh", "-uc", script])
        .current_dir(&mnt)
        .uid(A)
        .gid(A)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stderr);
    // Where the library was put that only A and root may change.
    let _ = std::fs::remove_dir_all(format!("/tmp/varve-{A}"));
    assert_eq!(
        String::from_utf8_lossy(&run.stdout),
        format!("one\ntwo\ng\nrefused\nrefused\n{A}:{A}\n"),
        "{said}"
    );
    let counters: serde_json::Value = serde_json::from_str(said.lines().last().unwrap_or_default()).unwrap();
    assert!(counters["served_total"].as_u64().unwrap() > 10, "{said}");
    assert_eq!(std::fs::read_to_string(mnt.join("a/d/g")).unwrap(), "one\ntwo\n");
    assert_eq!(place.status()["digest"]["refused"], 0);
    up.down();
    place.fsck();
}

fn varve_mounted(mnt: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().any(|line| line.split(' ').nth(4) == mnt.to_str())
}
