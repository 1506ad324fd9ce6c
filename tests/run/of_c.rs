//! Programs of C (`tests/preload/*.c`) that try the calls one by one, on another file system and served.

use super::{SESSIONS_AFTER, Talking, cannot_run, counters, has, served, served_after};
use crate::common::{Pool, run_ok, text_of};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Compiles a C program of `tests/preload`.
pub(super) fn compile(pool: &Pool, name: &str, options: &[&str]) -> PathBuf {
    let program = pool.outside().join(format!("{name}{}", options.concat()));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/preload/{name}.c"));
    run_ok(
        Command::new("cc")
            .args(["-O1", "-w", "-pthread"])
            .args(options)
            .arg("-o")
            .arg(&program)
            .arg(source),
    );
    program
}

/// Compiles a C program of `tests/preload`, finds that it is content with another file system, and runs it
/// served.
fn run_c(pool: &Pool, name: &str) -> serde_json::Value {
    run_program(pool, &compile(pool, name, &[]), "")
}

/// Programs that see what the mount's kernel does otherwise: it looks at a buffer before the end of the file
/// (`faults`), and at its own idea of a file's length where `O_APPEND` meets `RLIMIT_FSIZE` (`refused`). And
/// one that counts the library's descriptors, which come with the session (`own`).
const ONLY_SERVED: [&str; 3] = ["faults", "refused", "own"];

/// Runs such a program on another file system and served, after `before` in the shell that starts it.
fn run_program(pool: &Pool, program: &Path, before: &str) -> serde_json::Value {
    let script = format!("{before} exec {}", program.display());
    // It asks nothing of us that another file system would not give.
    let plain = tempfile::tempdir_in(pool.outside()).expect("a directory");
    let elsewhere = text_of(
        Command::new("sh")
            .args(["-euc", &script])
            .current_dir(plain.path()),
    );
    assert_eq!(elsewhere, "good\n");
    let output = run_ok(&mut served(pool, &script));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "good\n");
    let name = program.file_name().map(|name| name.to_string_lossy());
    let is_for_sessions = name.is_some_and(|name| ONLY_SERVED.contains(&&*name));
    for calls in SESSIONS_AFTER.iter().filter(|_| !is_for_sessions) {
        let fresh = tempfile::tempdir_in(pool.mnt()).expect("a directory");
        let output = served_after(pool, *calls, &script)
            .current_dir(fresh.path())
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        let told = String::from_utf8_lossy(&output.stdout);
        assert_eq!(told, "good\n", "{script} after {calls} calls: {said}");
    }
    counters(&output)
}

#[test]
fn a_program_of_c_finds_its_calls_as_the_kernel_makes_them() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    assert!(run_c(&pool, "calls")["served_total"].as_u64() > Some(1000));
}

#[test]
fn nothing_is_allocated_by_the_c_library_in_a_signal_handler() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    run_c(&pool, "allocates");
    if !has("readelf") {
        return;
    }
    let library = std::fs::read_dir(pool.dir())
        .expect("it can be read")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|end| end == "so"))
        .expect("the library is in the pool's directory");
    let symbols = text_of(Command::new("readelf").args(["-W", "--dyn-syms"]).arg(&library));
    let imported: Vec<&str> = symbols
        .lines()
        .filter(|line| line.contains(" UND "))
        .filter_map(|line| line.split_whitespace().nth(7)?.split('@').next())
        .collect();
    assert!(imported.contains(&"pthread_create"), "{symbols}");
    let unwanted = "malloc calloc realloc free posix_memalign aligned_alloc realpath opendir scandir strdup getline \
                    getdelim getaddrinfo __cxa_thread_atexit_impl";
    for name in unwanted.split(' ') {
        assert!(!imported.contains(&name), "{name} of the C library is called");
    }
    // What these keep for the whole process, a thread that a fork leaves behind may hold.
    let all = text_of(Command::new("readelf").args(["-W", "--symbols"]).arg(library));
    assert!(
        all.contains("varve_libfs"),
        "the library has no table of its symbols"
    );
    for held in ["parking_lot_core", "foldhash"] {
        assert!(!all.contains(held), "{held} is in the library");
    }
}

#[test]
fn maps_that_only_read_are_as_the_kernel_makes_them() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let counters = run_c(&pool, "maps");
    assert!(counters["served"]["mmap"].as_u64() > Some(80), "{counters}");
    for reason in ["file mapped for writing", "map of another kind"] {
        assert!(counters["why"][reason].as_u64() > Some(0), "{reason}: {counters}");
    }
}

/// A file system that is mounted, and unmounted when this goes.
struct Mounted(PathBuf);

impl Mounted {
    /// An empty one in memory; `None` where there can be none with these options, or this user may not mount.
    /// Says so.
    fn tmpfs(at: &Path, options: &str) -> Option<Self> {
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "varve-test"])
            .arg(at)
            .stderr(Stdio::null())
            .status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(Self(at.to_owned()));
        }
        eprintln!("SKIPPED: this user may not mount a tmpfs ({options})");
        None
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// Where one page is written, 512 come to be there.
#[test]
fn maps_that_only_read_are_as_the_kernel_makes_them_where_pages_are_huge() {
    if cannot_run() || !has("cc") {
        return;
    }
    let huge = tempfile::tempdir().expect("a directory");
    let Some(_mounted) = Mounted::tmpfs(huge.path(), "huge=always,size=1G") else {
        return;
    };
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "256M", "--hdd", "0"]);
    pool.down();
    let settings = pool.dir().join("varve.toml");
    let text = std::fs::read_to_string(&settings).expect("settings");
    let live = format!("live = {:?}\nuuid = ", huge.path());
    std::fs::write(&settings, text.replacen("uuid = ", &live, 1)).expect("written");
    pool.start();
    let counters = run_c(&pool, "maps");
    assert!(counters["served"]["mmap"].as_u64() > Some(80), "{counters}");
    assert!(std::fs::read_dir(huge.path()).expect("it lies there").count() > 0);
    // Before what it lies in.
    drop(pool);
}

#[test]
fn calls_of_a_process_that_set_up_rings_are_counted_as_fallen_back() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let counts = run_c(&pool, "rings");
    let number = |side: &str, call: &str| counts[side][call].as_u64().unwrap_or(0);
    assert_eq!(number("served", "pwrite64"), 7, "{counts}");
    let off = &counts["why"]["serving switched off"];
    assert!(off.as_u64() > Some(300), "{counts}");
    // Of the process itself on two files, and of its child.
    assert_eq!(number("fell_back", "pwrite64"), 300, "{counts}");
    for (call, count) in [
        ("open", 0),
        ("openat", 1),
        ("write", 0),
        ("fsync", 3),
        ("fchmod", 1),
        ("dup", 1),
        ("fcntl", 1),
        ("mkdir", 1),
        ("access", 5),
        ("rename", 1),
        ("unlink", 1),
        ("rmdir", 1),
    ] {
        assert_eq!(number("fell_back", call), count, "{call}: {counts}");
    }
    // What switched it off is named, once, whichever kind of rings this machine allows.
    let rings = number("fell_back", "io_uring_setup") + number("fell_back", "io_setup");
    assert_eq!(rings, 1, "{counts}");
    assert!(counts["share"].as_f64() < Some(0.1), "{counts}");
}

#[test]
fn a_program_that_is_another_user_for_a_while_is_served_afterwards() {
    if cannot_run() || !has("cc") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become another user");
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0", "--allow-other"]);
    let counts = run_c(&pool, "ids");
    // Of 300 files that are made after it, each is opened, written and closed.
    assert!(counts["served"]["write"].as_u64() >= Some(300), "{counts}");
    assert!(
        counts["fell_back"]["write"].as_u64().unwrap_or(0) < 20,
        "{counts}"
    );
}

/// A pool on whose mount a program that becomes another user goes on, where it can.
fn pool_for_other_users(nvm: &str) -> Pool {
    let mut words = vec!["--nvm", nvm, "--ssd", "256M", "--hdd", "0"];
    if rustix::process::geteuid().is_root() {
        words.push("--allow-other");
    }
    Pool::up(&words)
}

#[test]
fn descriptors_users_programs_and_nameless_files_are_as_the_kernel_has_them() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = pool_for_other_users("shm:128M");
    let counts = run_c(&pool, "corners");
    assert!(counts["served"]["linkat"].as_u64() >= Some(6), "{counts}");
    assert!(counts["served"]["sendfile"].as_u64() >= Some(14), "{counts}");
    assert!(counts["served"]["epoll_ctl"].as_u64() >= Some(3), "{counts}");
    pool.fsck_clean();
}

#[test]
fn what_the_kernel_refuses_is_refused_in_its_order() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let counts = run_c(&pool, "refused");
    for call in ["getcwd", "truncate", "copy_file_range", "fallocate", "readahead"] {
        assert!(counts["served"][call].as_u64() >= Some(1), "{call}: {counts}");
    }
    pool.fsck_clean();
}

#[test]
fn bad_pointers_are_efault_and_faults_are_the_programs_own() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let counts = run_c(&pool, "faults");
    assert!(counts["served"]["pwrite64"].as_u64() >= Some(10), "{counts}");
    assert!(counts["served"]["newfstatat"].as_u64() >= Some(10), "{counts}");
    pool.fsck_clean();
}

#[test]
fn descriptors_inside_arguments_are_made_real() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let counts = run_c(&pool, "carried");
    assert!(counts["fell_back"]["kcmp"].as_u64() >= Some(1), "{counts}");
    pool.fsck_clean();
}

/// Who has no session, as another user, is the mount's at once, and the counters say so.
#[test]
fn a_program_that_gives_up_root_is_served_or_falls_back_at_once() {
    if cannot_run() || !has("python3") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become another user");
        return;
    }
    let mut pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0", "--allow-other"]);
    std::fs::write(pool.mnt().join("all"), "read\n").expect("written");
    std::fs::set_permissions(pool.outside(), std::fs::Permissions::from_mode(0o755)).expect("a mode");
    let script = "exec python3 -c 'import os; os.setgroups([]); os.setgid(65534); os.setuid(65534); \
        print(open(\"all\").read(), end=str())'";
    for refused in [true, false] {
        if !refused {
            pool.down();
            let settings = pool.dir().join("varve.toml");
            let mut text = std::fs::read_to_string(&settings).expect("settings");
            text.push_str("users = [65534]\n");
            std::fs::write(&settings, text).expect("written");
            pool.start();
        }
        let begun = Instant::now();
        let output = run_ok(&mut served(&pool, script));
        let took = begun.elapsed();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "read\n");
        // It was 30 s.
        assert!(took < Duration::from_secs(20), "{took:?}");
        let counts = counters(&output);
        assert_eq!(
            counts["sessions"]["refused"].as_u64(),
            Some(u64::from(refused)),
            "{counts}"
        );
        assert_eq!(
            counts["fell_back"]["openat"].as_u64().is_some(),
            refused,
            "{counts}"
        );
    }
}

#[test]
fn directory_with_a_file_system_on_it_is_busy_and_free_again_afterwards() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    std::fs::create_dir_all(pool.mnt().join("d/a place")).expect("directories");
    std::fs::create_dir(pool.mnt().join("d/other")).expect("a directory");
    let script = "if text=$(sh -c \"$line\" 2>&1); then echo well; else echo \"${text##*: }\"; fi >> said";
    let mut program = Talking::start(&pool, script);
    // The table of mounts is known before anything is mounted there.
    program.say("mkdir d/x && rmdir d/x");
    let Some(mounted) = Mounted::tmpfs(&pool.mnt().join("d/a place"), "size=1M") else {
        return;
    };
    program.say("rmdir 'd/a place'");
    for (from, to) in [("d/a place", "d/y"), ("d/other", "d/a place")] {
        program.say(&format!(
            "perl -e 'rename(q({from}), q({to})) or (print qq(x: $!) and exit 1)'"
        ));
    }
    drop(mounted);
    program.say("rmdir 'd/a place'");
    let output = program.end();
    assert!(output.status.success());
    let busy = "Device or resource busy";
    assert_eq!(
        std::fs::read_to_string(pool.mnt().join("said")).expect("readable"),
        format!("well\n{busy}\n{busy}\n{busy}\nwell\n")
    );
    assert!(counters(&output)["served"]["rmdir"].as_u64() >= Some(3));
}

#[test]
fn rare_calls_find_a_served_file_as_the_kernel_would() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = pool_for_other_users("shm:64M");
    let counts = run_c(&pool, "rare");
    let served = |call: &str| counts["served"][call].as_u64().unwrap_or(0);
    assert!(served("dup3") >= 2 && served("openat2") >= 2, "{counts}");
    for call in [
        "pselect6",
        "ppoll",
        "tee",
        "splice",
        "vmsplice",
        "fstatfs",
        "name_to_handle_at",
        "chroot",
        "unshare",
        "clone",
    ] {
        let count = counts["fell_back"][call].as_u64().unwrap_or(0);
        let as_root = rustix::process::geteuid().is_root() || call != "chroot";
        assert!(count >= u64::from(as_root), "{call}: {counts}");
    }
    assert!(counts["why"]["call not served"].as_u64() > Some(5), "{counts}");
    pool.fsck_clean();
}

#[test]
fn a_fortified_program_is_served_through_the_checking_variants() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let program = compile(&pool, "fortified", &["-O2", "-D_FORTIFY_SOURCE=2"]);
    if has("nm") {
        let symbols = text_of(Command::new("nm").arg("-D").arg(&program));
        for name in [
            "__read_chk",
            "__pread_chk",
            "__pread64_chk",
            "__open_2",
            "__open64_2",
            "__openat_2",
            "__openat64_2",
            "__realpath_chk",
            "__getcwd_chk",
            "__readlink_chk",
            "__readlinkat_chk",
            "__poll_chk",
            "__ppoll_chk",
            "__fdelt_chk",
            "__fgets_chk",
            "__fread_chk",
        ] {
            let is_called = |line: &str| {
                line.split_whitespace()
                    .any(|word| word.split('@').next() == Some(name))
            };
            assert!(symbols.lines().any(is_called), "{name} is not called: {symbols}");
        }
    }
    let counts = run_program(&pool, &program, "");
    for (call, least) in [
        ("openat", 9),
        ("read", 5),
        ("pread64", 2),
        ("readlink", 2),
        ("readlinkat", 1),
    ] {
        assert!(counts["served"][call].as_u64() >= Some(least), "{call}: {counts}");
    }
}

#[test]
fn descriptors_of_the_library_take_none_of_the_programs_and_cannot_be_closed_or_replaced() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let program = compile(&pool, "own", &[]);
    for limit in [256, 1024, 4096, 8000] {
        let may = Command::new("sh")
            .args(["-c", &format!("ulimit -Sn {limit}")])
            .stderr(Stdio::null())
            .status();
        if !may.is_ok_and(|status| status.success()) {
            eprintln!("SKIPPED: {limit} descriptors are not allowed here");
            continue;
        }
        let counts = run_program(&pool, &program, &format!("ulimit -Sn {limit};"));
        // After it has tried to close all, too.
        assert!(counts["served"]["write"].as_u64() >= Some(3), "{limit}: {counts}");
        assert_eq!(counts["fell_back"]["write"].as_u64(), None, "{limit}: {counts}");
    }
}

#[test]
fn what_is_not_served_and_what_is_see_each_others_writes() {
    const TURNS: usize = 60;
    const RECORDS: usize = 300;
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let program = compile(&pool, "peer", &[]);
    let fixed = compile(&pool, "peer", &["-static"]);
    for (other, way) in [
        (&fixed, "calls"),
        (&program, "raw"),
        (&program, "uring"),
        (&program, "aio"),
    ] {
        let file = format!("{way}-{}", other == &fixed);
        let start = |program: &Path, way: &str| {
            let script = format!("exec {} {way} {file}", program.display());
            Talking::with(&mut served(&pool, &script))
        };
        let mut ours = start(&program, "calls");
        assert_eq!(ours.answer(), "ready");
        let mut theirs = start(other, way);
        if theirs.answer() != "ready" {
            eprintln!("SKIPPED: {way} is not to be had from this kernel");
            continue;
        }
        for i in 0..TURNS {
            // In one page, and on to the next, where the file grows too.
            let at = i * 90;
            ours.say(&format!("w {at} ours{i:04}"));
            assert_eq!(theirs.ask(&format!("r {at} 8")), format!("ours{i:04}"), "{way}");
            theirs.say(&format!("w {} their{i:04}", at + 4));
            assert_eq!(
                ours.ask(&format!("r {at} 13")),
                format!("ourstheir{i:04}"),
                "{way}"
            );
            let old = (i / 2) * 90 + 4;
            theirs.say(&format!("w {old} again{i:04}"));
            assert_eq!(ours.ask(&format!("r {old} 9")), format!("again{i:04}"), "{way}");
        }
        // Both at the same time, every second record each.
        ours.tell(&format!("many 0 {RECORDS}"));
        theirs.tell(&format!("many 1 {RECORDS}"));
        assert_eq!((ours.answer(), theirs.answer()), ("done".into(), "done".into()));
        for i in 0..2 * RECORDS {
            let ask = format!("r {} 7", i * 8);
            assert_eq!(ours.ask(&ask), format!("{i:07}"), "{way}");
            assert_eq!(theirs.ask(&ask), format!("{i:07}"), "{way}");
        }
        let (ours, theirs) = (counters(&ours.end()), counters(&theirs.end()));
        assert!(ours["served"]["pwrite64"].as_u64() > Some(300), "{way}: {ours}");
        assert_eq!(
            theirs["served"]["pwrite64"].as_u64(),
            None,
            "the library saw {way}: {theirs}"
        );
    }
    pool.fsck_clean();
}

#[test]
fn open_files_are_served_in_parents_and_children_after_a_fork() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let counts = run_c(&pool, "forks");
    let number = |side: &str, call: &str| counts[side][call].as_u64().unwrap_or(0);
    // A child's first few calls are the kernel's, and those of programs that inherited a file.
    assert!(number("served", "write") > 5000, "{counts}");
    assert!(number("fell_back", "write") < 400, "{counts}");
    assert!(number("fell_back", "read") < 100, "{counts}");
    for reason in ["child without the library", "offset kept by the kernel"] {
        assert!(counts["why"][reason].as_u64() > Some(0), "{reason}: {counts}");
    }
}

/// Each file is opened on the mount once, however many processes have it, by whichever thread and way.
#[test]
fn many_open_files_are_the_same_in_children_and_opened_on_the_mount_once() {
    /// Files that the program has open when it forks first, with one that has no name; the one that it opens
    /// to try a lock; those of the program with threads; the one under a low limit.
    const OPENED: u64 = 211 + 1 + 210 + 1;
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let counts = run_c(&pool, "manyforks");
    assert_eq!(counts["opened_on_mount"].as_u64(), Some(OPENED), "{counts}");
    pool.fsck_clean();
}
