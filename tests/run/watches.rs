//! Who watches with `inotify` is told of what programs under `varve run` do, as of what is done through the
//! mount.

use super::of_c::compile;
use super::{Talking, cannot_run, counters, has, served};
use crate::common::{Pool, varve, wait_until};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A watcher, and the lines that it has printed so far.
struct Watcher {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl Watcher {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let lines = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&lines);
        let reader = std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                seen.lock().expect("no panic").push(line);
            }
        });
        let watcher = Self {
            child,
            lines,
            reader: Some(reader),
        };
        wait_until("the mark", || watcher.seen("ready"));
        watcher
    }

    fn seen(&self, line: &str) -> bool {
        self.lines
            .lock()
            .expect("no panic")
            .iter()
            .any(|seen| seen == line)
    }

    /// What it has printed and was not taken before.
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.lines.lock().expect("no panic"))
    }

    /// All that is left, after the file that ends it.
    fn end(&mut self) -> Vec<String> {
        assert!(self.child.wait().expect("it ends").success());
        self.reader.take().expect("once").join().expect("no panic");
        self.take()
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The events of `steps`, done by an actor in `dir` (served if `run`), as a watcher tells of them.
fn events(
    pool: &Pool,
    actor: &Path,
    watcher: &mut Watcher,
    dir: &Path,
    run: bool,
    steps: &[&str],
) -> Vec<String> {
    let mut command = if run {
        served(pool, &format!("exec {}", actor.display()))
    } else {
        Command::new(actor)
    };
    let mut acting = Talking::with(command.current_dir(dir));
    for step in steps {
        acting.say(step);
    }
    acting.say("end");
    assert!(acting.end().status.success());
    once(watcher.end())
}

/// The kernel tells of the same event twice or once, as the watcher reads in between or not.
fn once(mut lines: Vec<String>) -> Vec<String> {
    lines.dedup();
    lines
}

#[test]
fn watchers_are_told_of_what_served_programs_do() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let (actor, watcher) = (compile(&pool, "actor", &[]), compile(&pool, "watcher", &[]));
    let place = |name: &str| {
        let dir = pool.mnt().join(name);
        std::fs::create_dir_all(dir.join("in")).expect("a directory");
        dir.join("in")
    };
    let native = |dir: &Path| Watcher::start(Command::new(&watcher).arg(dir));
    let steps = ["files", "names"];
    let plain = place("plain");
    let expected = events(&pool, &actor, &mut native(&plain), &plain, false, &steps);
    assert!(expected.len() > 30, "{expected:?}");

    // The watch is there before the session.
    let dir = place("before");
    let told = events(&pool, &actor, &mut native(&dir), &dir, true, &steps);
    assert_eq!(told, expected);

    // Set by a served program while another one is at work.
    let dir = place("within");
    let mut acting = Talking::with(served(&pool, &format!("exec {}", actor.display())).current_dir(&dir));
    acting.say("elsewhere");
    let mut within = Watcher::start(
        varve()
            .args(["run", "--session-after", "0", "--mount"])
            .arg(pool.mnt())
            .arg("--")
            .arg(&watcher)
            .arg(&dir),
    );
    for step in ["files", "names", "end"] {
        acting.say(step);
    }
    assert!(acting.end().status.success());
    assert_eq!(once(within.end()), expected);
}

#[test]
fn watch_is_noticed_while_a_served_program_has_files_open_and_costs_nothing_elsewhere() {
    if cannot_run() || !has("cc") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let (actor, watcher) = (compile(&pool, "actor", &[]), compile(&pool, "watcher", &[]));
    let dir = pool.mnt().join("top/in");
    std::fs::create_dir_all(&dir).expect("a directory");
    let mut acting = Talking::with(served(&pool, &format!("exec {}", actor.display())).current_dir(&dir));
    acting.say("early");
    let mut native = Watcher::start(Command::new(&watcher).arg(&dir));
    // Looked for every second.
    wait_until("news of the watch", || {
        acting.say("probe");
        native.seen("create isdir probe")
    });
    wait_until("the probe's end", || native.seen("delete isdir probe"));
    native.take();
    acting.say("late");
    wait_until("its end", || native.seen("close_write e"));
    assert!(native.seen("modify e"));
    acting.say("elsewhere");
    acting.say("end");
    let counts = counters(&acting.end());
    native.end();
    let number = |side: &str, call: &str| counts[side][call].as_u64().unwrap_or(0);
    assert!(number("served", "write") >= 101, "{counts}");
    assert!(number("fell_back", "write") <= 1, "{counts}");

    // Nobody watches any more: served again, once that has been noticed.
    let mut acting = Talking::with(served(&pool, &format!("exec {}", actor.display())).current_dir(&dir));
    wait_until("the end of the watch", || {
        acting.say("files");
        let marks = rustix::fs::getxattr(pool.mnt(), "system.varve.watched", &mut [0_u8; 0]);
        assert_eq!(marks, Err(rustix::io::Errno::NODATA), "it is not an attribute");
        let counts = Command::new(env!("CARGO_BIN_EXE_varve"))
            .args(["run", "--stats", "--session-after", "0", "--mount"])
            .arg(pool.mnt())
            .args(["--", "sh", "-c", "echo x > y; rm y"])
            .current_dir(&dir)
            .output()
            .expect("it starts");
        counters(&counts)["served"]["openat"].as_u64() > Some(0)
    });
    assert!(acting.end().status.success());
}
