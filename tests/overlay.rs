//! An overlay with its upper and work directory on the mount does what one on the host's own file system
//! does: as root and in a user's namespace.

mod common;

use common::{Mounted, Pool, SecondMount, cannot_mount, run_ok, text_of, varve};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, linkat, openat, renameat_with};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

const TIERS: [&str; 6] = ["--nvm", "shm:64M", "--ssd", "128M", "--hdd", "0"];

/// What is changed through the overlay. `$1` is where it is mounted.
const CHANGES: &str = r#"
set -e
cd "$1"
echo more >> kept                 # copied up
rm gone                           # a whiteout
mv moved moved-away               # a rename that leaves a whiteout
rm -r tree                        # a whiteout in place of a directory
mkdir tree; echo new > tree/new   # an opaque directory
mv tree tree-moved                # and one that leaves a whiteout
mv dir/inner dir/other
mkdir dir/empty
rm -r replaced; mv new-file replaced 2>/dev/null || echo x > replaced
ln kept kept-too
ln -s kept symlink
chmod 640 plain
mkdir filled; echo 1 > filled/a; echo 2 > filled/b; rm filled/a
mv filled dir/filled
: > dir/filled/c; mv -f dir/filled/c plain-too
"#;

/// The lower layer.
fn lower(at: &Path) {
    for dir in ["tree/deep", "dir", "replaced"] {
        std::fs::create_dir_all(at.join(dir)).expect("a directory");
    }
    for file in [
        "kept",
        "gone",
        "moved",
        "plain",
        "plain-too",
        "tree/old",
        "tree/deep/old",
        "dir/inner",
        "dir/beside",
        "replaced/in",
    ] {
        std::fs::write(at.join(file), format!("{file}\n")).expect("a file");
    }
}

/// Every name below `at`: kind, mode, device, links, content or target, and what the overlay has noted on it.
fn dump(at: &Path, attribute: &str) -> String {
    let mut lines = Vec::new();
    walk(at, at, attribute, &mut lines);
    lines.sort();
    lines.join("\n")
}

fn walk(top: &Path, dir: &Path, attribute: &str, lines: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        let meta = path.symlink_metadata().expect("attributes");
        let mut opaque = [0; 8];
        let opaque = rustix::fs::lgetxattr(&path, attribute, &mut opaque).map_or(String::new(), |len| {
            String::from_utf8_lossy(&opaque[..len]).into_owned()
        });
        let content = if meta.is_file() {
            std::fs::read_to_string(&path).expect("its data")
        } else if meta.is_symlink() {
            std::fs::read_link(&path)
                .expect("its target")
                .display()
                .to_string()
        } else {
            String::new()
        };
        let links = if meta.is_dir() { 0 } else { meta.nlink() };
        lines.push(format!(
            "{} {:o} dev={} links={links} opaque={opaque:?} {content:?}",
            path.strip_prefix(top).expect("below").display(),
            meta.mode(),
            meta.rdev(),
        ));
        if meta.is_dir() {
            walk(top, &path, attribute, lines);
        }
    }
}

/// An overlay that is mounted until this goes.
struct Overlay {
    _mounted: Mounted,
    merged: PathBuf,
    upper: PathBuf,
}

impl Overlay {
    /// Over `lower`, with upper and work directory in `on`.
    fn mount(lower: &Path, on: &Path, merged: &Path) -> Self {
        for dir in ["upper", "work"] {
            std::fs::create_dir(on.join(dir)).expect("a directory");
        }
        std::fs::create_dir_all(merged).expect("a directory");
        let options = format!(
            "lowerdir={},upperdir={2}/upper,workdir={2}/work,{1}",
            lower.display(),
            "index=off,metacopy=off,redirect_dir=off,xino=off",
            on.display()
        );
        run_ok(
            Command::new("mount")
                .args(["-t", "overlay", "overlay", "-o", &options])
                .arg(merged),
        );
        Self {
            _mounted: Mounted(merged.to_owned()),
            merged: merged.to_owned(),
            upper: on.join("upper"),
        }
    }

    fn change(&self) {
        run_ok(Command::new("sh").args(["-c", CHANGES, "sh"]).arg(&self.merged));
    }
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: mounting an overlay needs root");
    }
    root
}

fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).expect("its mode");
}

#[test]
fn overlay_on_the_mount_equals_one_on_the_host() {
    if !is_root() || cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&TIERS);
    let low = pool.outside().join("lower");
    lower(&low);
    // The host's file system under it may itself be an overlay, which is no upper layer.
    let host = pool.outside().join("host");
    std::fs::create_dir(&host).expect("a directory");
    run_ok(Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(&host));
    let memory = Mounted(host.clone());
    let results = [pool.mnt(), host.clone()].map(|on| {
        let overlay = Overlay::mount(&low, &on, &pool.outside().join("merged"));
        overlay.change();
        let seen = dump(&overlay.merged, "user.none");
        (seen, dump(&overlay.upper, "trusted.overlay.opaque"))
    });
    drop(memory);
    let [(seen, upper), (host_seen, host_upper)] = results;
    assert_eq!(seen, host_seen);
    assert_eq!(upper, host_upper);
    assert!(upper.contains("opaque=\"y\""), "an opaque directory: {upper}");
    assert!(
        upper.contains("moved 20000 dev=0"),
        "a whiteout by rename: {upper}"
    );
    // It is all there in another overlay, after the mount has come up again.
    pool.down();
    pool.start();
    let again = pool.outside().join("again");
    std::fs::create_dir(&again).expect("a directory");
    let options = format!(
        "lowerdir={}:{}",
        pool.mnt().join("upper").display(),
        low.display()
    );
    run_ok(
        Command::new("mount")
            .args(["-t", "overlay", "overlay", "-o", &options])
            .arg(&again),
    );
    let mounted = Mounted(again);
    assert_eq!(dump(&mounted.0, "user.none"), host_seen);
    drop(mounted);
    pool.down();
}

#[test]
fn ordinary_user_has_an_overlay_on_the_mount_in_a_namespace_of_its_own() {
    if !is_root() || cannot_mount() {
        return;
    }
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let own = ["unshare", "--user", "--map-root-user", "--mount"];
    let able = Command::new(user[0])
        .args(&user[1..])
        .args(own)
        .arg("true")
        .output();
    if !able.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED: setpriv and user namespaces for ordinary users are not here");
        return;
    }
    let mut options = TIERS.to_vec();
    options.push("--allow-other");
    let mut pool = Pool::up(&options);
    open_to_all(pool.outside());
    let low = pool.outside().join("lower");
    lower(&low);
    open_to_all(&pool.mnt());
    let script = format!(
        r#"set -e
        mkdir {on}/upper {on}/work {out}/merged
        mount -t overlay overlay -o userxattr,lowerdir={low},upperdir={on}/upper,workdir={on}/work {out}/merged
        chmod -R u+w {out}/merged 2>/dev/null || true
        set -- {out}/merged
        {CHANGES}
        ls -R ."#,
        on = pool.mnt().display(),
        out = pool.outside().display(),
        low = low.display(),
    );
    run_ok(Command::new("chown").args(["-R", "65534:65534"]).arg(&low));
    let listed = text_of(
        Command::new(user[0])
            .args(&user[1..])
            .args(own)
            .args(["sh", "-c", &script]),
    );
    assert!(
        listed.contains("moved-away") && listed.contains("tree-moved"),
        "{listed}"
    );
    let upper = dump(&pool.mnt().join("upper"), "user.overlay.opaque");
    assert!(upper.contains("gone 20000 dev=0"), "{upper}");
    assert!(upper.contains("opaque=\"y\""), "{upper}");
    let owner = pool
        .mnt()
        .join("upper/moved")
        .symlink_metadata()
        .expect("a whiteout");
    assert_eq!((owner.uid(), owner.gid()), (65534, 65534));
    pool.down();
}

/// Renames that leave a whiteout, called directly: what overlays ask for and what they do not.
fn renames_with_whiteouts(at: &Path) {
    let path = |name: &str| at.join(name);
    let rename = |from: &str, to: &str, flags| renameat_with(CWD, path(from), CWD, path(to), flags);
    let is_whiteout = |name: &str| {
        let meta = path(name).symlink_metadata().expect("a whiteout");
        meta.mode() == libc::S_IFCHR && meta.rdev() == 0
    };
    std::fs::create_dir(path("d")).expect("a directory");
    std::fs::create_dir(path("full")).expect("a directory");
    std::fs::write(path("full/f"), "f").expect("a file");
    std::fs::write(path("f"), "f").expect("a file");
    std::fs::write(path("g"), "g").expect("a file");
    use rustix::io::Errno;
    let whiteout = RenameFlags::WHITEOUT;
    assert_eq!(
        rename("f", "g", whiteout | RenameFlags::NOREPLACE),
        Err(Errno::EXIST)
    );
    assert_eq!(
        rename("f", "g", whiteout | RenameFlags::EXCHANGE),
        Err(Errno::INVAL)
    );
    assert_eq!(rename("none", "g", whiteout), Err(Errno::NOENT));
    assert_eq!(rename("d", "full", whiteout), Err(Errno::NOTEMPTY));
    assert_eq!(rename("full", "full/f/x", whiteout), Err(Errno::NOTDIR));
    rename("f", "g", whiteout).expect("over a file");
    rename("full", "d", whiteout).expect("over an empty directory");
    std::fs::create_dir(path("new")).expect("a directory");
    rename("d", "new/d", whiteout).expect("to another directory");
    assert!(is_whiteout("f") && is_whiteout("full") && is_whiteout("d"));
    assert_eq!(std::fs::read(path("g")).expect("the file"), b"f");
    assert_eq!(std::fs::read(path("new/d/f")).expect("the file"), b"f");
    // A whiteout is a name as any other.
    std::fs::remove_file(path("f")).expect("removed");
    rename("g", "f", RenameFlags::NOREPLACE).expect("back");
    assert_eq!(
        path("").metadata().expect("attributes").nlink(),
        3,
        "one directory is left"
    );
}

/// Files without a name, and their first name.
fn unnamed_files(at: &Path) {
    let open = |flags| openat(CWD, at, OFlags::TMPFILE | flags, Mode::RUSR | Mode::WUSR);
    let mut file = std::fs::File::from(open(OFlags::RDWR).expect("a file without a name"));
    file.write_all(b"unnamed").expect("written");
    assert_eq!(file.metadata().expect("attributes").nlink(), 0);
    assert_eq!(std::fs::read_dir(at).expect("a directory").count(), 0);
    linkat(&file, "", CWD, at.join("named"), AtFlags::EMPTY_PATH).expect("its first name");
    assert_eq!(file.metadata().expect("attributes").nlink(), 1);
    drop(file);
    assert_eq!(std::fs::read(at.join("named")).expect("by name"), b"unnamed");
    let never = open(OFlags::RDWR | OFlags::EXCL).expect("one that gets none");
    let refused = linkat(&never, "", CWD, at.join("never"), AtFlags::EMPTY_PATH);
    assert_eq!(refused, Err(rustix::io::Errno::NOENT));
    assert_eq!(open(OFlags::RDONLY).err(), Some(rustix::io::Errno::INVAL));
}

#[test]
fn whiteouts_and_unnamed_files_are_had_alone_and_beside_another_session() {
    if !is_root() || cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&TIERS);
    let dir = |name: &str| {
        let dir = pool.mnt().join(name);
        std::fs::create_dir(&dir).expect("a directory");
        dir
    };
    renames_with_whiteouts(&dir("alone"));
    unnamed_files(&dir("unnamed"));
    let second = pool.outside().join("second");
    let mount = SecondMount::start(&pool, &second);
    renames_with_whiteouts(&dir("beside"));
    assert!(second.join("beside/new/d/f").exists());
    let there = second.join("beside/full").symlink_metadata().expect("a whiteout");
    assert_eq!(there.mode(), libc::S_IFCHR);
    unnamed_files(&dir("unnamed-beside"));
    drop(mount);
    pool.down();
}

#[test]
fn program_under_run_leaves_whiteouts() {
    if !cfg!(all(
        target_arch = "x86_64",
        target_os = "linux",
        target_env = "gnu"
    )) {
        eprintln!("SKIPPED: calls are served in-process on x86-64 with glibc only");
        return;
    }
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("SKIPPED: cc is not installed");
        return;
    }
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&TIERS);
    let program = pool.outside().join("whiteout");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/preload/whiteout.c");
    run_ok(
        Command::new("cc")
            .args(["-O1", "-w", "-o"])
            .arg(&program)
            .arg(source),
    );
    let mnt = pool.mnt();
    std::fs::create_dir(mnt.join("d")).expect("a directory");
    std::fs::write(mnt.join("d/f"), "f").expect("a file");
    for (from, to) in [("d/f", "g"), ("d", "e")] {
        let mut run = varve();
        run.args(["run", "--stats", "--session-after", "0", "--mount"])
            .arg(&mnt)
            .arg("--");
        let output = run_ok(run.arg(&program).arg(mnt.join(from)).arg(mnt.join(to)));
        assert_eq!(output.stdout, b"a whiteout\n");
    }
    assert_eq!(std::fs::read(mnt.join("g")).expect("the file"), b"f");
    for whiteout in ["d", "e/f"] {
        let left = mnt.join(whiteout).symlink_metadata().expect("a whiteout");
        assert_eq!((left.mode(), left.rdev()), (libc::S_IFCHR, 0), "{whiteout}");
    }
    pool.down();
}
