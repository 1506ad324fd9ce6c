//! The copy of the C library in which the system calls are replaced already: who uses it, and who does not.

use super::of_c::compile;
use super::{cannot_run, counters, has, served};
use crate::common::{Pool, run_ok, text_of, varve};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime};

/// The copies beside the preload library.
fn copies(pool: &Pool) -> Vec<PathBuf> {
    let all = std::fs::read_dir(pool.dir()).expect("a directory");
    let paths = all.map(|entry| entry.expect("an entry").path());
    paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "code"))
        .collect()
}

/// Whether a program that is started so runs the code of the copy. Its calls are served in any case.
fn uses_copy(pool: &Pool, before: &str) -> bool {
    let script = format!("echo text > file; {before} cat file /proc/self/maps; rm file");
    let output = run_ok(&mut served(pool, &script));
    let maps = String::from_utf8_lossy(&output.stdout);
    assert!(maps.starts_with("text\n"), "{maps}");
    assert!(counters(&output)["served_total"].as_u64() > Some(3));
    maps.lines()
        .any(|line| line.contains(" r-xp ") && line.ends_with(".code"))
}

#[test]
fn programs_share_a_copy_of_the_c_library_unless_somebody_could_have_changed_it() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    assert!(copies(&pool).is_empty());
    // The shell makes it, and uses it.
    assert!(uses_copy(&pool, ""));
    let [copy] = &copies(&pool)[..] else {
        panic!("{:?}", copies(&pool));
    };
    let meta = std::fs::metadata(copy).expect("it is there");
    assert_eq!(meta.permissions().mode() & 0o777, 0o644);
    let good = std::fs::read(copy).expect("it can be read");

    // Others may write to it: not used, and left as it is.
    std::fs::set_permissions(copy, PermissionsExt::from_mode(0o664)).expect("permissions");
    assert!(!uses_copy(&pool, ""));
    assert_eq!(std::fs::read(copy).expect("it can be read"), good);
    std::fs::set_permissions(copy, PermissionsExt::from_mode(0o644)).expect("permissions");
    assert!(uses_copy(&pool, ""));
    // It is another's.
    if chown(copy, Some(12_345), None).is_ok() {
        assert!(!uses_copy(&pool, ""));
        chown(copy, Some(0), None).expect("root may");
    }
    // A link is not followed.
    let aside = copy.with_extension("aside");
    std::fs::rename(copy, &aside).expect("a name");
    std::os::unix::fs::symlink(&aside, copy).expect("a link");
    assert!(!uses_copy(&pool, ""));
    std::fs::remove_file(copy).expect("it goes");
    std::fs::rename(&aside, copy).expect("a name");

    // The copy of another library, by its first bytes.
    let mut other = good.clone();
    other[0x300] ^= 1;
    std::fs::write(copy, &other).expect("written");
    assert!(!uses_copy(&pool, ""));
    // Whose files may not be so long does not make it, and runs.
    std::fs::remove_file(copy).expect("it goes");
    let output = run_ok(
        Command::new("sh")
            .args(["-c", "ulimit -f 1; exec \"$@\"", "sh"])
            .arg(varve().get_program())
            .args(["run", "--mount"])
            .arg(pool.mnt())
            .args(["--", "cat", "/proc/self/maps"]),
    );
    assert!(!String::from_utf8_lossy(&output.stdout).contains(".code"));
    assert!(copies(&pool).is_empty());
    // Damaged: made again.
    for bad in [&good[..good.len() - 1], &good[..4096], &[]] {
        std::fs::write(copy, bad).expect("written");
        assert!(uses_copy(&pool, ""));
        assert!(std::fs::read(copy).expect("it can be read") == good);
    }
}

#[test]
fn what_is_left_beside_the_library_goes_when_it_is_old() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let place = |name: &str, hours: u64| {
        let path = pool.dir().join(name);
        let time = SystemTime::now() - Duration::from_secs(hours * 3600);
        let file = std::fs::File::create(&path).expect("a file");
        file.set_modified(time).expect("a time");
        path
    };
    let old = [
        place(".preload-1.tmp", 2),
        place("preload-1.sites-1", 24 * 8),
        place("preload-1.sites-1.code", 24 * 8),
        place("preload-1.sites-1.code.2", 24 * 8),
    ];
    let kept = [
        place(".preload-2.tmp", 0),
        place("preload-2.sites-1.code", 24 * 6),
        place("preload-notes", 24 * 30),
    ];
    assert!(uses_copy(&pool, ""));
    assert!(old.iter().all(|path| !path.exists()));
    assert!(kept.iter().all(|path| path.exists()));
}

#[test]
fn what_another_library_or_a_debugger_has_changed_stays_changed() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    assert!(uses_copy(&pool, ""));
    let hook = compile(&pool, "hook", &["-DHOOK", "-shared", "-fPIC"]);
    let program = compile(&pool, "hook", &[]);
    let run = || {
        let mut command = varve();
        command
            .args(["run", "--mount"])
            .arg(pool.mnt())
            .arg("--")
            .arg(&program);
        command
    };
    assert_ne!(text_of(&mut run()), "4242\n");
    assert_eq!(text_of(run().env("LD_PRELOAD", hook)), "4242\n");
}
