//! Every system call that the library looks at, with one bad argument at a time: it is answered as a file
//! system of the kernel answers it, under `varve run` and through the mount. The list of calls is the
//! library's own.

use super::{Talking, cannot_run, counters, has};
use crate::common::{KernelsOwn, Pool, run_ok, varve};
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

#[path = "../../crates/preload/src/syscalls.rs"]
#[allow(dead_code, reason = "shared with the library")]
mod syscalls;

/// An ordinary one.
const USER: &str = "65534";

/// Beginnings of lines (call, argument, what was bad), and why the answer may be another one than the
/// kernel's own file system gives.
type Differences = &'static [(&'static str, &'static str)];

/// Both ways, whatever it is compared with.
const ANYWHERE: Differences = &[
    (
        "preadv2 5 bit 7:",
        "RWF_DONTCACHE is an offer: EOPNOTSUPP, as on tmpfs",
    ),
    ("pwritev2 5 bit 7:", "the same"),
    (
        "fallocate 1 bit 3:",
        "collapsing is not there, so blocks are not looked at",
    ),
    ("fallocate 1 bit 5:", "inserting likewise"),
    (
        "ioctl 1 -1:",
        "FUSE copies what the number says before it is asked",
    ),
];
const SERVED: Differences = &[(
    "pwritev2 5 bit 3:",
    "a write has nothing to wait for, so RWF_NOWAIT is taken, as on XFS",
)];
const MOUNTED: Differences = &[
    ("preadv2 5 bit 3:", "FUSE has no RWF_NOWAIT"),
    ("lseek 1 9223372036854775807:", "FUSE knows no longest file"),
    ("lseek 1 4611686018427387904:", "the same"),
    ("epoll_ctl", "any file of a FUSE mount can be polled"),
];
/// What tmpfs alone does otherwise than ext4 and Varve.
const TMPFS: Differences = &[
    ("preadv2 5 bit 3:", "no RWF_NOWAIT there"),
    ("pwritev2 5 bit 3:", "the same"),
    ("pwrite64 3 4611686018427387904:", "files are longer there"),
    ("pwritev 3 4611686018427387904:", "the same"),
    ("pwritev2 3 4611686018427387904:", "the same"),
    ("lseek 1 9223372036854775807:", "the same"),
    ("lseek 1 4611686018427387904:", "the same"),
    ("ftruncate 1 9223372036854775807:", "the same"),
    ("ftruncate 1 4611686018427387904:", "the same"),
    ("truncate 1 9223372036854775807:", "the same"),
    ("truncate 1 4611686018427387904:", "the same"),
    ("fallocate 2 4611686018427387904:", "the same"),
    ("fallocate 3 9223372036854775807:", "the same"),
    ("fallocate 3 4611686018427387904:", "the same"),
    ("fallocate 1 bit 4:", "no FALLOC_FL_ZERO_RANGE there"),
    (
        "name_to_handle_at 4 bit 1:",
        "AT_HANDLE_CONNECTABLE: another refusal",
    ),
];

/// Modes of a directory and of all above it. Bad arguments that reach further than they should, in a broken
/// library, would change them first.
struct Above(Vec<(PathBuf, u32)>);

impl Above {
    fn of(dir: &Path) -> Self {
        let mode = |dir: &Path| std::fs::metadata(dir).expect("it is there").permissions().mode();
        Self(dir.ancestors().map(|dir| (dir.to_owned(), mode(dir))).collect())
    }

    /// Puts back what was changed. How much that was.
    fn put_back(&self) -> Vec<&Path> {
        let changed = |(dir, mode): &&(PathBuf, u32)| {
            std::fs::metadata(dir).map_or(true, |now| now.permissions().mode() != *mode)
        };
        let changed: Vec<_> = self.0.iter().rev().filter(changed).collect();
        for (dir, mode) in &changed {
            let _ = std::fs::set_permissions(dir, Permissions::from_mode(*mode));
        }
        changed.iter().map(|(dir, _)| dir.as_path()).collect()
    }
}

/// What is asked, and as whom.
struct Question {
    program: PathBuf,
    user: Option<&'static str>,
}

impl Question {
    /// What the program prints, started by `words` in a new directory some levels below `top`; and all it
    /// said.
    fn ask(&self, words: &[&str], top: &Path) -> (Vec<String>, Output) {
        let mut command = Command::new("sh");
        command.args(["-euc", "exec \"$@\"", "sh"]);
        // Nothing that root mounts outlives it.
        if rustix::process::geteuid().is_root() {
            command.args(["unshare", "--mount"]);
        }
        if let Some(user) = self.user {
            command.args(["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]);
        }
        command.args(words).arg(&self.program);
        let dir = top.join("x/y/z").join(self.user.unwrap_or("own"));
        std::fs::create_dir_all(&dir).expect("directories");
        std::fs::set_permissions(&dir, Permissions::from_mode(0o777)).expect("a mode");
        let above = Above::of(&dir);
        let output = answered(command.current_dir(&dir));
        let changed = above.put_back();
        assert!(
            changed.is_empty(),
            "modes were changed, and put back: {changed:?}"
        );
        let text = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let (status, said) = (output.status, String::from_utf8_lossy(&output.stderr));
        assert!(status.success(), "{status} after {:?}: {said}", lines.last());
        // Directories without rights could not be removed.
        run_ok(Command::new("chmod").args(["-R", "u+rwX"]).arg(&dir));
        (lines, output)
    }

    /// As [`ask`](Self::ask), under `varve run` in a pool.
    fn ask_served(&self, pool: &Pool) -> (Vec<String>, Output) {
        let (run, mnt) = (varve().get_program().to_owned(), pool.mnt());
        let text = |path: &Path| path.to_str().expect("text").to_owned();
        let (run, at) = (text(Path::new(&run)), text(&mnt));
        let words = ["run", "--stats", "--session-after", "0", "--mount", &at, "--"];
        let words: Vec<&str> = [run.as_str()].into_iter().chain(words).collect();
        self.ask(&words, &mnt)
    }

    /// Compares with what the kernel's own file system answers.
    fn compare(&self, own: &KernelsOwn, found: &[String], what: &str, different: &[Differences]) {
        let (expected, _) = self.ask(&[], own.dir());
        let missing: Vec<&String> = expected
            .iter()
            .filter(|line| line.ends_with("is not in the table"))
            .collect();
        assert!(missing.is_empty(), "tests/preload/answers.c lacks {missing:?}");
        assert_eq!(expected.len(), found.len(), "{:?}", found.last());
        let tmpfs = (own.kind() == "tmpfs").then_some(TMPFS);
        let is_right = |line: &str| {
            let mut lists = different.iter().copied().chain([ANYWHERE]).chain(tmpfs);
            lists.any(|list| list.iter().any(|(beginning, _)| line.starts_with(beginning)))
        };
        let differ = || {
            expected
                .iter()
                .zip(found)
                .filter(|(expected, found)| expected != found)
        };
        let wrong: Vec<String> = differ()
            .filter(|(expected, _)| !is_right(expected))
            .map(|(expected, found)| format!("{expected}\n    but {found}"))
            .collect();
        let (user, all) = (self.user.unwrap_or("this user"), expected.len());
        let kind = own.kind();
        assert!(
            wrong.is_empty(),
            "{what}, as {user}: {} of {all} answers are not those of {kind}:\n{}",
            wrong.len(),
            wrong.join("\n")
        );
        println!(
            "{what}, as {user}: {all} answers compared with {kind}, {} differ rightly",
            differ().count()
        );
    }
}

/// Runs it with the list of calls as its input.
fn answered(command: &mut Command) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let list: String = syscalls::LOOKED_AT
        .iter()
        .map(|(name, number)| format!("{} {number}\n", name.trim_start_matches("SYS_")))
        .collect();
    let mut input = child.stdin.take().expect("piped");
    let writer = std::thread::spawn(move || input.write_all(list.as_bytes()));
    let output = child.wait_with_output().expect("it ends");
    // One that ended early says so itself.
    let _ = writer.join().expect("it ends");
    output
}

/// A pool and the compiled program, the pool open to an ordinary user where there can be one, and as whom to
/// ask.
fn place(program: &str) -> Option<(Pool, Vec<Question>)> {
    if cannot_run() || !has("cc") {
        return None;
    }
    let as_root = rustix::process::geteuid().is_root();
    let mut words = vec!["--nvm", "shm:128M", "--ssd", "256M", "--hdd", "0"];
    if as_root {
        words.push("--allow-other");
    }
    let mut pool = Pool::up(&words);
    let program = super::of_c::compile(&pool, program, &[]);
    let mut users = vec![None];
    if as_root && has("setpriv") {
        pool.down();
        let settings = pool.dir().join("varve.toml");
        let mut text = std::fs::read_to_string(&settings).expect("settings");
        text.push_str(&format!("users = [{USER}]\n"));
        std::fs::write(&settings, text).expect("written");
        std::fs::set_permissions(pool.outside(), Permissions::from_mode(0o755)).expect("a mode");
        pool.start();
        users.push(Some(USER));
    } else {
        eprintln!("SKIPPED: only root can ask as another user");
    }
    let question = |user| Question {
        program: program.clone(),
        user,
    };
    Some((pool, users.into_iter().map(question).collect()))
}

#[test]
fn every_served_call_answers_a_bad_argument_as_the_kernel_does() {
    let Some((mut pool, questions)) = place("answers") else {
        return;
    };
    let own = KernelsOwn::new(pool.outside());
    for question in &questions {
        let (found, output) = question.ask_served(&pool);
        let counts = counters(&output);
        assert!(
            counts["share"].as_f64() > Some(0.95),
            "the mount answered: {counts}"
        );
        question.compare(&own, &found, "served", &[SERVED]);
    }
    drop(own);
    pool.down();
    pool.fsck_clean();
}

/// By root alone, and by an ordinary user while another session is there.
#[test]
fn every_call_on_the_mount_answers_a_bad_argument_as_the_kernel_does() {
    let Some((mut pool, questions)) = place("answers") else {
        return;
    };
    let own = KernelsOwn::new(pool.outside());
    for question in &questions {
        let mut company = question
            .user
            .map(|_| Talking::start(&pool, "ls $line > /dev/null"));
        if let Some(company) = &mut company {
            company.say(".");
        }
        let (found, _) = question.ask(&[], &pool.mnt());
        question.compare(&own, &found, "on the mount", &[MOUNTED]);
        if let Some(company) = company {
            assert!(company.end().status.success());
        }
    }
    drop(own);
    pool.down();
    pool.fsck_clean();
}

#[test]
fn openat2_with_any_rules_answers_as_the_kernel_does() {
    let Some((mut pool, questions)) = place("resolve") else {
        return;
    };
    let own = KernelsOwn::new(pool.outside());
    let device = |path: &Path| {
        let meta = std::fs::metadata(path).expect("it is there");
        std::os::unix::fs::MetadataExt::dev(&meta)
    };
    if device(own.dir()) == device(Path::new("/")) {
        eprintln!(
            "SKIPPED: needs a file system of the kernel that is not the root's, to tell steps to another mount"
        );
        return;
    }
    for question in &questions {
        let (found, output) = question.ask_served(&pool);
        let counts = counters(&output);
        let count = |side: &str| counts[side]["openat2"].as_u64().unwrap_or(0);
        // The kernel's are paths that leave the mount, and what is opened with `O_PATH` and is no directory.
        assert!(
            count("served") > count("fell_back"),
            "the mount answered: {counts}"
        );
        question.compare(&own, &found, "served", &[]);
    }
    drop(own);
    pool.down();
    pool.fsck_clean();
}
