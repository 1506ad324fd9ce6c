//! Maps that are served in the program's process: they show what is there, whoever changes it, and whatever
//! becomes of their process or the daemon.

mod common;

use common::{Pool, cannot_mount, kill, run_ok, varve, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{DirEntry, File};
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

const TIERS: [&str; 6] = ["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"];
const PAGE: u64 = 4096;
/// Longer than a lease is waited for, with room for a busy machine.
const LONG: Duration = Duration::from_secs(4);

/// A pool, and the program that maps.
struct Place {
    pool: Pool,
    program: PathBuf,
}

/// `None` where this cannot be tried; says why.
fn place() -> Option<Place> {
    if !cfg!(all(
        target_arch = "x86_64",
        target_os = "linux",
        target_env = "gnu"
    )) {
        eprintln!("SKIPPED: calls are served in-process on x86-64 with glibc only");
        return None;
    }
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("SKIPPED: cc is not installed");
        return None;
    }
    if cannot_mount() {
        return None;
    }
    let pool = Pool::up(&TIERS);
    let program = pool.outside().join("mapper");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/preload/mapper.c");
    run_ok(
        Command::new("cc")
            .args(["-O1", "-w", "-pthread", "-o"])
            .arg(&program)
            .arg(source),
    );
    Some(Place { pool, program })
}

/// A file of so many pages, each of which begins with `word`.
fn write_pages(at: &Path, pages: u64, word: u64) {
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(at)
        .expect("it can be written");
    let mut bytes = vec![0; (pages * PAGE) as usize];
    for page in bytes.chunks_mut(PAGE as usize) {
        page[..8].copy_from_slice(&word.to_le_bytes());
    }
    file.write_all_at(&bytes, 0).expect("written");
}

/// A served program that maps.
struct Mapper {
    child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Mapper {
    fn start(place: &Place) -> Self {
        let mut child = varve()
            .args(["run", "--session-after", "0", "--mount"])
            .arg(place.pool.mnt())
            .arg("--")
            .arg(&place.program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        Self {
            input: child.stdin.take().expect("piped"),
            lines: BufReader::new(child.stdout.take().expect("piped")).lines(),
            child,
        }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("it reads");
    }

    fn answer(&mut self) -> String {
        self.lines.next().expect("an answer").expect("text")
    }

    fn say(&mut self, line: &str) -> String {
        self.tell(line);
        self.answer()
    }

    fn map(&mut self, file: &Path, pages: u64) {
        let said = self.say(&format!("map {} {}", file.display(), pages * PAGE));
        assert_eq!(said, "mapped");
        assert!(
            copies_of(self.child.id()).is_some(),
            "the map is the mount's: this test tries nothing"
        );
    }

    fn page(&mut self, page: u64) -> String {
        self.say(&format!("page {page}"))
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a pid");
        kill_process(pid, signal).expect("it is there");
    }

    fn end(self) {
        let Self { mut child, input, .. } = self;
        drop(input);
        assert!(child.wait().expect("it ends").success());
    }
}

/// The file of copies of a process, or of what `varve run` has become in it.
fn copies_of(pid: u32) -> Option<DirEntry> {
    let wanted = format!("copies-{pid}-");
    let dirs = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    dirs.flat_map(|dir| std::fs::read_dir(dir.path()).into_iter().flatten().flatten())
        .find(|entry| entry.file_name().to_string_lossy().starts_with(&wanted))
}

/// Bytes of copies that a process has.
fn bytes_of_copies(pid: u32) -> u64 {
    let about = copies_of(pid).and_then(|entry| entry.metadata().ok());
    about.map_or(0, |about| about.blocks() * 512)
}

fn run_served(place: &Place, script: &str) {
    run_ok(
        varve()
            .args(["run", "--session-after", "0", "--mount"])
            .arg(place.pool.mnt())
            .args(["--", "sh", "-euc", script])
            .current_dir(place.pool.mnt()),
    );
}

#[test]
fn changes_of_others_are_shown_when_their_calls_have_returned() {
    let Some(mut place) = place() else { return };
    let file = place.pool.mnt().join("file");
    let pages = 3000;
    write_pages(&file, pages, 1);
    let mut mapper = Mapper::start(&place);
    mapper.map(&file, pages);
    assert_eq!((mapper.page(0), mapper.page(2999)), ("1".into(), "1".into()));
    for word in 2..12 {
        write_pages(&file, pages, word);
        for page in [0, 1, 1500, 2999] {
            assert_eq!(mapper.page(page), word.to_string());
        }
    }
    std::fs::write(place.pool.outside().join("new"), 77_u64.to_le_bytes()).expect("written");
    run_served(
        &place,
        &format!(
            "dd if={} of=file seek=100 bs=4096 conv=notrunc 2> /dev/null",
            place.pool.outside().join("new").display()
        ),
    );
    assert_eq!((mapper.page(99), mapper.page(100)), ("11".into(), "77".into()));
    run_served(&place, "truncate -s 40960 file");
    assert_eq!((mapper.page(9), mapper.page(10)), ("11".into(), "bus".into()));
    let open = File::options().write(true).open(&file).expect("it is there");
    open.set_len(pages * PAGE).expect("longer");
    assert_eq!((mapper.page(10), mapper.page(100)), ("0".into(), "0".into()));
    drop(open);
    // It is another file's name from now on; the map is of the first, deleted one.
    write_pages(&place.pool.mnt().join("other"), 5, 5);
    std::fs::rename(place.pool.mnt().join("other"), &file).expect("renamed");
    assert_eq!((mapper.page(0), mapper.page(3)), ("11".into(), "11".into()));
    mapper.end();
    place.pool.down();
    place.pool.fsck_clean();
}

/// What was read ahead of loads is read before anybody has asked for it: a change that comes between must
/// count all the same.
#[test]
fn loads_that_follow_each_other_are_read_ahead_of_and_show_what_was_changed_meanwhile() {
    let Some(mut place) = place() else { return };
    let file = place.pool.mnt().join("file");
    let pages = 2500;
    write_pages(&file, pages, 1);
    let mut mapper = Mapper::start(&place);
    mapper.map(&file, pages);
    let pid = mapper.child.id();
    // Two windows of loads, 128 and 256 KiB; what follows comes by itself.
    assert_eq!((mapper.page(0), mapper.page(32)), ("1".into(), "1".into()));
    wait_until("reading ahead", || {
        bytes_of_copies(pid) >= (128 + 256 + 512) << 10
    });
    assert!(
        bytes_of_copies(pid) < pages * PAGE / 2,
        "not all of it for two loads"
    );
    for word in 2..5_u64 {
        write_pages(&file, pages, word);
        let other = File::options().write(true).open(&file).expect("it is there");
        for page in 0..pages {
            if page % 100 == 50 {
                // The next page, one that is read ahead by now, and one that is not.
                for later in [page + 1, page + 40, page + 700] {
                    if later < pages {
                        other
                            .write_all_at(&(word * 1000).to_le_bytes(), later * PAGE)
                            .expect("written");
                    }
                }
            }
            let changed = |ahead: u64| page >= ahead && (page - ahead) % 100 == 50;
            let wanted = if [1, 40, 700].into_iter().any(changed) {
                word * 1000
            } else {
                word
            };
            assert_eq!(mapper.page(page), wanted.to_string(), "page {page}");
        }
    }
    mapper.end();
    place.pool.down();
    place.pool.fsck_clean();
}

/// The first load after a process was stopped for longer than its leases last shows what others have done
/// meanwhile: it was told to load before it was continued, so nothing of ours has run there.
#[test]
fn first_load_after_a_stop_shows_what_others_have_written() {
    let Some(mut place) = place() else { return };
    let (file, gone) = (place.pool.mnt().join("file"), place.pool.mnt().join("gone"));
    let (mut mapper, mut other) = (Mapper::start(&place), Mapper::start(&place));
    for round in 0..3 {
        let (old, new) = (10 + round, 100 + round);
        write_pages(&file, 2000, old);
        write_pages(&gone, 300, old);
        mapper.map(&file, 2000);
        other.map(&gone, 300);
        for page in [0, 1, 1999] {
            assert_eq!(mapper.page(page), old.to_string());
        }
        assert_eq!(other.page(0), old.to_string());
        mapper.signal(Signal::STOP);
        other.signal(Signal::STOP);
        write_pages(&file, 2000, new);
        std::fs::remove_file(&gone).expect("removed");
        // What was freed is used again.
        for i in 0..10 {
            write_pages(&place.pool.mnt().join(format!("filler{i}")), 300, 66);
        }
        std::thread::sleep(LONG);
        for page in [0, 1, 1999] {
            mapper.tell(&format!("page {page}"));
        }
        other.tell("page 0");
        mapper.signal(Signal::CONT);
        other.signal(Signal::CONT);
        for _ in 0..3 {
            assert_eq!(mapper.answer(), new.to_string(), "what was there before is shown");
        }
        assert_eq!(other.answer(), old.to_string(), "the deleted file is open");
        assert_eq!(mapper.page(1000), new.to_string());
    }
    mapper.end();
    other.end();
    place.pool.down();
    place.pool.fsck_clean();
}

#[test]
fn maps_outlive_the_daemon_and_show_what_comes_after_it() {
    let Some(mut place) = place() else { return };
    let file = place.pool.mnt().join("file");
    write_pages(&file, 2000, 1);
    let mut mapper = Mapper::start(&place);
    mapper.map(&file, 2000);
    assert_eq!((mapper.page(0), mapper.page(1999)), ("1".into(), "1".into()));
    for word in 2..5_u64 {
        let stopped = word % 2 == 0;
        if stopped {
            mapper.signal(Signal::STOP);
        }
        wait_until("the daemon", || place.pool.child_pid("serve").is_some());
        kill(place.pool.child_pid("serve").expect("it was just there"));
        write_pages(&file, 2000, word);
        mapper.tell("page 0");
        mapper.tell("page 1999");
        if stopped {
            mapper.signal(Signal::CONT);
        }
        assert_eq!(
            (mapper.answer(), mapper.answer()),
            (word.to_string(), word.to_string())
        );
        assert_eq!(mapper.page(1000), word.to_string());
    }
    // One that ends in order removes all files of copies: maps of them are the mount's then, and the next one
    // has a new file.
    let serve = place.pool.child_pid("serve").expect("it runs");
    kill_process(Pid::from_raw(serve as i32).expect("a pid"), Signal::TERM).expect("it is there");
    wait_until("the next daemon", || {
        place.pool.child_pid("serve").is_some_and(|next| next != serve)
    });
    assert!(copies_of(mapper.child.id()).is_none());
    write_pages(&file, 2000, 9);
    assert_eq!((mapper.page(0), mapper.page(1999)), ("9".into(), "9".into()));
    assert!(copies_of(mapper.child.id()).is_none());
    let next = place.pool.mnt().join("next");
    write_pages(&next, 2000, 10);
    mapper.map(&next, 2000);
    assert_eq!((mapper.page(0), mapper.page(1999)), ("10".into(), "10".into()));
    assert!(copies_of(mapper.child.id()).is_some(), "the map is the mount's");
    mapper.end();
    place.pool.down();
    place.pool.fsck_clean();
}

#[test]
fn nothing_is_left_in_memory_when_processes_and_the_daemon_are_gone() {
    let Some(mut place) = place() else { return };
    let file = place.pool.mnt().join("file");
    write_pages(&file, 2000, 1);
    let mut pids = Vec::new();
    for killed in [false, true] {
        let mut mapper = Mapper::start(&place);
        mapper.map(&file, 2000);
        assert_eq!(mapper.page(1000), "1");
        let pid = mapper.child.id();
        if killed {
            mapper.child.kill().expect("killed");
            mapper.child.wait().expect("it ends");
        } else {
            mapper.end();
        }
        wait_until("its copies are gone", || copies_of(pid).is_none());
        pids.push(pid);
    }
    // The daemon dies first.
    let mut mapper = Mapper::start(&place);
    mapper.map(&file, 2000);
    let pid = mapper.child.id();
    mapper.signal(Signal::STOP);
    kill(place.pool.child_pid("serve").expect("it runs"));
    mapper.child.kill().expect("killed");
    mapper.child.wait().expect("it ends");
    wait_until("its copies are gone", || copies_of(pid).is_none());
    pids.push(pid);
    place.pool.down();
    assert!(pids.iter().all(|pid| copies_of(*pid).is_none()));
    place.pool.fsck_clean();
}

/// Threads load the words of a file's pages while two other processes write them: no load shows less than
/// what was written before it began, nor than what its thread has seen.
fn loads_go_up(stops: u32) {
    let Some(mut place) = place() else { return };
    let pages = 64;
    let (file, told) = (place.pool.mnt().join("file"), place.pool.outside().join("told"));
    write_pages(&file, pages, 0);
    let said = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&told)
        .expect("made");
    said.set_len(pages * 8).expect("as long as it must be");
    let mut mapper = Mapper::start(&place);
    mapper.map(&file, pages);
    assert_eq!(mapper.say(&format!("watch {}", told.display())), "watching");
    let open = File::options().write(true).open(&file).expect("it is there");
    let mut words = vec![0_u64; pages as usize];
    let start = std::time::Instant::now();
    let mut rounds = 0_usize;
    for part in 0..=2 * stops {
        // Amid its loads it is stopped, until the next write has waited for its lease, and then goes on for a
        // while.
        let stopped = part % 2 == 1;
        if stopped {
            mapper.signal(Signal::STOP);
        }
        let until = LONG * (part + 1) / 2;
        while start.elapsed() < until {
            for page in (0..words.len()).step_by(rounds % 5 + 1) {
                words[page] += 1;
                let bytes = words[page].to_le_bytes();
                open.write_all_at(&bytes, page as u64 * PAGE).expect("written");
                said.write_all_at(&bytes, page as u64 * 8).expect("said");
            }
            rounds += 1;
            if rounds.is_multiple_of(3) {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        if stopped {
            mapper.signal(Signal::CONT);
        }
    }
    let answer = mapper.say("end");
    println!("{rounds} rounds, {answer} loads");
    assert!(answer.starts_with("right "), "{answer}");
    for (page, word) in words.iter().enumerate() {
        assert_eq!(mapper.page(page as u64), word.to_string());
    }
    mapper.end();
    drop(open);
    place.pool.down();
    place.pool.fsck_clean();
}

#[test]
fn loads_go_up_while_others_write() {
    loads_go_up(0);
}

#[test]
fn loads_go_up_while_others_write_and_the_loader_is_stopped_again_and_again() {
    loads_go_up(5);
}
