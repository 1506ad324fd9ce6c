//! A file's handle (`name_to_handle_at`) opens it as long as it is there: also when the kernel has forgotten
//! it, when others have moved it, by another mount of the pool, and after the mount has come up again. It
//! never opens the next file with its number.

mod common;

use common::{Pool, SecondMount, cannot_mount, run_ok, text_of, varve};
use std::path::{Path, PathBuf};
use std::process::Command;

const TIERS: [&str; 6] = ["--nvm", "shm:64M", "--ssd", "128M", "--hdd", "0"];

/// The program that keeps handles.
fn program(pool: &Pool) -> PathBuf {
    let program = pool.outside().join("handle");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/preload/handle.c");
    run_ok(
        Command::new("cc")
            .args(["-O1", "-w", "-o"])
            .arg(&program)
            .arg(source),
    );
    program
}

fn can_try() -> bool {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("SKIPPED: cc is not installed");
        return false;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root opens by handle");
        return false;
    }
    !cannot_mount()
}

/// The kernel forgets all inodes that nobody has open.
fn forget() {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "2").expect("dropped");
}

struct Handles {
    program: PathBuf,
    kept: PathBuf,
}

impl Handles {
    fn file(&self, name: &str) -> PathBuf {
        self.kept.join(format!("{name}.handle"))
    }

    fn save(&self, name: &str, path: &Path) {
        let said = text_of(
            Command::new(&self.program)
                .arg("save")
                .arg(path)
                .arg(self.file(name)),
        );
        assert_eq!(said, "saved\n", "{name}");
    }

    fn open(&self, name: &str, mount: &Path) -> String {
        let said = text_of(
            Command::new(&self.program)
                .arg("open")
                .arg(mount)
                .arg(self.file(name)),
        );
        said.trim_end().to_owned()
    }
}

const STALE: &str = "open_by_handle_at ESTALE";

#[test]
fn handle_lives_as_long_as_the_file() {
    if !can_try() {
        return;
    }
    let mut pool = Pool::up(&TIERS);
    let handles = Handles {
        program: program(&pool),
        kept: pool.outside().to_owned(),
    };
    let mnt = pool.mnt();
    let make = |name: &str| {
        std::fs::create_dir_all(mnt.join("a/b")).expect("directories");
        std::fs::write(mnt.join("a/b").join(name), name).expect("a file");
        handles.save(name, &mnt.join("a/b").join(name));
    };
    make("f");
    make("g");
    handles.save("dir", &mnt.join("a/b"));
    handles.save("root", &mnt);
    let check = |mount: &Path| {
        for _ in 0..2 {
            forget();
            assert_eq!(handles.open("f", mount), "file of f");
            assert_eq!(handles.open("dir", mount), "directory of 2");
            assert_eq!(handles.open("root", mount), "directory of 1");
        }
    };
    check(&mnt);
    // Under another name, given by another session that stays.
    let second = pool.outside().join("second");
    let beside = SecondMount::start(&pool, &second);
    std::fs::rename(second.join("a/b"), second.join("moved")).expect("moved");
    std::fs::remove_dir(second.join("a")).expect("removed");
    check(&mnt);
    check(&second);
    // Deleted there, and its number used again.
    std::fs::remove_file(second.join("moved/g")).expect("deleted");
    for number in 0..200 {
        std::fs::write(second.join(format!("moved/{number}")), "another").expect("a file");
    }
    forget();
    assert_eq!(handles.open("g", &mnt), STALE);
    assert_eq!(handles.open("g", &second), STALE);
    assert_eq!(handles.open("f", &mnt), "file of f");
    drop(beside);
    // The mount has come up again, and knows nothing.
    pool.down();
    pool.start();
    assert_eq!(handles.open("f", &mnt), "file of f");
    assert_eq!(handles.open("g", &mnt), STALE);
    pool.down();
}

#[test]
fn handle_of_a_program_under_run_is_the_mounts() {
    if !can_try() {
        return;
    }
    if !cfg!(all(
        target_arch = "x86_64",
        target_os = "linux",
        target_env = "gnu"
    )) {
        eprintln!("SKIPPED: calls are served in-process on x86-64 with glibc only");
        return;
    }
    let mut pool = Pool::up(&TIERS);
    let program = program(&pool);
    let (path, kept) = (pool.mnt().join("f"), pool.outside().join("f.handle"));
    let run = |words: &[&Path]| {
        let mut command = varve();
        command
            .args(["run", "--session-after", "0", "--mount"])
            .arg(pool.mnt())
            .arg("--");
        text_of(command.arg(&program).args(words))
    };
    run_ok(
        varve()
            .args(["run", "--session-after", "0", "--mount"])
            .arg(pool.mnt())
            .args(["--", "sh", "-c", "echo hello > $0"])
            .arg(&path),
    );
    assert_eq!(run(&[Path::new("save"), &path, &kept]), "saved\n");
    forget();
    assert_eq!(run(&[Path::new("open"), &pool.mnt(), &kept]), "file of hello\n\n");
    std::fs::remove_file(&path).expect("deleted");
    forget();
    assert_eq!(
        run(&[Path::new("open"), &pool.mnt(), &kept]),
        format!("{STALE}\n")
    );
    pool.down();
}
