//! An ordinary user's process: takes a command a line, does it through LibFS (or by hand, see
//! [`attack`](crate::attack)), and answers in a line. Owns that language.

use crate::attack;
use crate::place::Place;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use varve_format::InodeKey;
use varve_ipc::Admin;
use varve_libfs::{Errno, Fs, FsOptions, Posix, SocketConnector};

/// Two users that nobody is, and one that has no right to the pool in some tests; each with a group of its
/// number.
pub const A: u32 = 64_501;
pub const B: u32 = 64_502;
pub const C: u32 = 64_503;
/// A group of none of them.
pub const GROUP: u32 = 64_510;

/// Tells a test process who it is: uid and socket, a word a line.
const ENV: &str = "VARVE_TWO_UIDS_PERSON";
/// Begins a line that answers.
const ANSWER: &str = "= ";
/// No command takes longer.
const PATIENCE: Duration = Duration::from_secs(120);

/// Whom a process is.
#[derive(Clone, Copy)]
pub struct Role {
    uid: u32,
}

impl Role {
    pub const fn user(uid: u32) -> Self {
        Self { uid }
    }
}

/// The process, as the test sees it.
pub struct Person {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

impl Person {
    pub fn start(place: &Place, role: Role) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["person", "--exact", "--nocapture", "--test-threads=1"])
            .env(ENV, format!("{}\n{}", role.uid, place.socket().display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = child.stdout.take().unwrap();
        let (send, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The harness writes its own words before.
                if let Some((_, answer)) = line.split_once(ANSWER)
                    && send.send(answer.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        Self {
            child,
            input,
            answers,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn ask(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").expect("it lives");
        self.answers
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|_| panic!("no answer to `{command}`"))
    }

    /// A command that must be done; what it answers.
    pub fn ok(&mut self, command: &str) -> String {
        let answer = self.ask(command);
        match answer.strip_prefix("ok ") {
            Some(text) => text.to_owned(),
            None => panic!("`{command}`: {answer}"),
        }
    }

    /// A command that must fail; how.
    pub fn errno(&mut self, command: &str) -> String {
        let answer = self.ask(command);
        match answer.strip_prefix("errno ") {
            Some(name) => name.to_owned(),
            None => panic!("`{command}` was to fail: {answer}"),
        }
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Person {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What the process does, if it is one.
pub fn live() {
    let Ok(role) = std::env::var(ENV) else { return };
    let (uid, socket) = role.split_once('\n').expect("two words");
    let uid: u32 = uid.parse().unwrap();
    // SAFETY: plain calls on this process' own credentials; all its threads change with them (the C library
    // sees to that).
    let dropped = unsafe {
        libc::setgroups(0, std::ptr::null()) == 0
            && libc::setresgid(uid, uid, uid) == 0
            && libc::setresuid(uid, uid, uid) == 0
    };
    assert!(dropped, "cannot become user {uid}");
    // As a program that was started by that user: else its own descriptors would be closed to it, and its
    // memory to others, for no reason of ours.
    // SAFETY: a flag of this process.
    let plain = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) };
    assert_eq!(plain, 0);
    let mut me = Me {
        uid,
        socket: PathBuf::from(socket),
        posix: None,
        open: Vec::new(),
        kept: Vec::new(),
    };
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let answer = match me.obey(&line) {
            Ok(text) => format!("ok {text}"),
            Err(errno) => format!("errno {errno}"),
        };
        println!("{ANSWER}{answer}");
    }
}

struct Me {
    uid: u32,
    socket: PathBuf,
    posix: Option<Posix>,
    /// Descriptors by the number that the test gives them.
    open: Vec<(String, i32)>,
    /// Segments that it was given.
    kept: Vec<File>,
}

impl Me {
    /// The session, made when it is first needed.
    fn posix(&mut self) -> Result<&Posix, Errno> {
        if self.posix.is_none() {
            let connector = SocketConnector {
                path: self.socket.clone(),
            };
            let fs = Fs::mount(Arc::new(connector), FsOptions::default()).map_err(|error| match error {
                varve_libfs::MountError::Session(varve_ipc::IpcError::Errno(errno)) => Errno(errno),
                other => panic!("no session: {other}"),
            })?;
            let cred = fs
                .acts_for()
                .expect("an ordinary user's session acts for that user only");
            assert_eq!((cred.uid, cred.gid), (self.uid, self.uid));
            assert!(cred.groups.is_empty());
            let posix = Posix::new(fs, cred);
            posix.umask(0);
            self.posix = Some(posix);
        }
        Ok(self.posix.as_ref().expect("just made"))
    }

    fn fd(&self, name: &str) -> i32 {
        self.open
            .iter()
            .find(|(open, _)| open == name)
            .expect("it is open")
            .1
    }

    fn obey(&mut self, line: &str) -> Result<String, Errno> {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        let words: Vec<&str> = rest.split(' ').collect();
        let first = words[0].as_bytes();
        let octal = |word: &str| u32::from_str_radix(word, 8).unwrap();
        match command {
            "create" => {
                let mut parts = rest.splitn(3, ' ');
                let (path, mode) = (parts.next().unwrap(), octal(parts.next().unwrap()));
                let content = parts.next().unwrap_or("");
                let posix = self.posix()?;
                let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY;
                let fd = posix.open(path.as_bytes(), flags, mode)?;
                posix.write(fd, content.as_bytes())?;
                posix.close(fd)?;
            }
            "append" => {
                let (path, content) = rest.split_once(' ').unwrap();
                let posix = self.posix()?;
                let fd = posix.open(path.as_bytes(), libc::O_APPEND | libc::O_WRONLY, 0)?;
                let put = posix.write(fd, content.as_bytes());
                posix.close(fd)?;
                put?;
            }
            "read" => {
                let posix = self.posix()?;
                let fd = posix.open(first, libc::O_RDONLY, 0)?;
                let text = whole(posix, fd);
                posix.close(fd)?;
                return text;
            }
            "open" => {
                let [name, how, mode, path] = words[..] else {
                    panic!("{line}")
                };
                let flags = match how {
                    "r" => libc::O_RDONLY,
                    "a" => libc::O_WRONLY | libc::O_APPEND,
                    "w" => libc::O_RDWR | libc::O_CREAT | libc::O_APPEND,
                    "w+" => libc::O_RDWR | libc::O_CREAT | libc::O_EXCL,
                    other => panic!("{other}"),
                };
                let fd = self.posix()?.open(path.as_bytes(), flags, octal(mode))?;
                self.open.push((name.into(), fd));
            }
            "put" => {
                let (name, content) = rest.split_once(' ').unwrap();
                let fd = self.fd(name);
                self.posix()?.write(fd, content.as_bytes())?;
            }
            "get" => {
                let fd = self.fd(words[0]);
                return whole(self.posix()?, fd);
            }
            "fsync" => {
                let fd = self.fd(words[0]);
                self.posix()?.fsync(fd)?;
            }
            "close" => {
                let fd = self.fd(words[0]);
                self.open.retain(|(name, _)| name != words[0]);
                self.posix()?.close(fd)?;
            }
            "chmod" => self.posix()?.chmod(first, octal(words[1]))?,
            "chown" => self
                .posix()?
                .chown(first, Some(words[1].parse().unwrap()), None)?,
            // dedupe FROM TO BYTES; whether the bytes are the same.
            "dedupe" => {
                let posix = self.posix()?;
                let from = posix.open(first, libc::O_RDONLY, 0)?;
                let to = posix.open(words[1].as_bytes(), libc::O_RDONLY, 0)?;
                let len = words[2].parse().unwrap();
                let same = posix.dedupe_range(from, 0, to, 0, len);
                posix.close(from)?;
                posix.close(to)?;
                return Ok(same?.to_string());
            }
            "owners" => {
                let posix = self.posix()?;
                let fd = posix.open(first, libc::O_RDONLY, 0)?;
                let mut owners = Vec::new();
                let told = posix.for_each_owned(fd, 0, 0, |part| owners.push(part.owners));
                posix.close(fd)?;
                told?;
                return Ok(format!("{owners:?}"));
            }
            "undo" => {
                let posix = self.posix()?;
                let fd = posix.open(first, libc::O_RDONLY, 0)?;
                let undone = posix.unshare_range(fd, 0, 0);
                posix.close(fd)?;
                undone?;
            }
            "unlink" => self.posix()?.unlink(first)?,
            // Many files, each as long as a window, of one text again and again.
            "fill" => {
                let (count, content) = rest.split_once(' ').unwrap();
                let text = content.repeat((256 << 10) / content.len());
                let uid = self.uid;
                let posix = self.posix()?;
                for number in 0..count.parse().unwrap() {
                    let name = format!("{}/fill{number}", home(uid));
                    let fd = posix.open(
                        name.as_bytes(),
                        libc::O_CREAT | libc::O_RDWR | libc::O_TRUNC,
                        0o600,
                    )?;
                    posix.write(fd, text.as_bytes())?;
                    posix.close(fd)?;
                }
            }
            "read-all" => {
                let uid = self.uid;
                let posix = self.posix()?;
                let mut bytes = vec![0; 256 << 10];
                for number in 0..words[0].parse().unwrap() {
                    let name = format!("{}/fill{number}", home(uid));
                    let fd = posix.open(name.as_bytes(), libc::O_RDONLY, 0)?;
                    let got = posix.pread(fd, &mut bytes, 0)?;
                    posix.close(fd)?;
                    let text = words[1..].join(" ");
                    let right = bytes[..got]
                        .chunks_exact(text.len())
                        .all(|part| part == text.as_bytes());
                    assert!(got > 200_000 && right, "{name} reads as something else");
                }
            }
            // Two files grow side by side, by so many blocks at a time: their extents lie between each other.
            "grow" => {
                let (blocks, step): (u64, u64) = (words[0].parse().unwrap(), words[1].parse().unwrap());
                let uid = self.uid;
                let posix = self.posix()?;
                let flags = libc::O_CREAT | libc::O_TRUNC | libc::O_WRONLY;
                let open = |file| posix.open(long(uid, file).as_bytes(), flags, 0o600);
                let fds = [open(0)?, open(1)?];
                for from in (0..blocks).step_by(step as usize) {
                    for (file, fd) in fds.iter().enumerate() {
                        let bytes: Vec<u8> = (from..blocks.min(from + step))
                            .flat_map(|number| block(file as u64, number))
                            .collect();
                        posix.write(*fd, &bytes)?;
                    }
                    posix.sync()?;
                }
                for fd in fds {
                    posix.close(fd)?;
                }
            }
            // Whether each of their blocks is what it was, looked at in another order, by so many at a time.
            "read-grown" => {
                let (blocks, step): (usize, usize) = (words[0].parse().unwrap(), words[1].parse().unwrap());
                let uid = self.uid;
                let posix = self.posix()?;
                for file in 0..2 {
                    let fd = posix.open(long(uid, file).as_bytes(), libc::O_RDONLY, 0)?;
                    let mut bytes = vec![0; step * BLOCK];
                    for from in (0..blocks).step_by(step).rev() {
                        let got = posix.pread(fd, &mut bytes, (from * BLOCK) as u64)?;
                        assert_eq!(got, (blocks.min(from + step) - from) * BLOCK);
                        for (number, found) in (from..).zip(bytes[..got].chunks_exact(BLOCK)) {
                            assert!(found == block(file, number as u64), "file {file}, block {number}");
                        }
                    }
                    posix.close(fd)?;
                }
            }
            "mknod" => {
                let posix = self.posix()?;
                posix.mknodat(varve_libfs::posix::AT_FDCWD, first, libc::S_IFBLK | 0o666, 0x801)?;
            }
            "sync" => self.posix()?.sync()?,
            "admin" => {
                return match varve_ipc::socket::admin(&self.socket, Admin::Shutdown) {
                    Ok(text) => Ok(text),
                    Err(varve_ipc::IpcError::Errno(errno)) => Err(Errno(errno)),
                    Err(other) => panic!("{other}"),
                };
            }
            "key" => {
                let key = self.posix()?.stat(first)?.key;
                return Ok(format!("{}/{}", key.ino.0, key.generation.0));
            }
            // Takes its segments and keeps them; what of `rest` is in all that it has kept.
            "keep" => self.kept.push(attack::segments(&self.socket)),
            "scan" => {
                let found = self
                    .kept
                    .iter()
                    .filter(|file| attack::holds(file, rest.as_bytes()));
                return Ok(format!("{} of {}", found.count(), self.kept.len()));
            }
            "token" => {
                self.posix()?;
                return Ok(attack::token_of(&self.socket).to_string());
            }
            "attack" => {
                let [key, token, daemon, other, live, pool] = words[..] else {
                    panic!("{line}")
                };
                let (ino, generation) = key.split_once('/').unwrap();
                let job = attack::Job {
                    uid: self.uid,
                    socket: self.socket.clone(),
                    secret: InodeKey::new(ino.parse().unwrap(), generation.parse().unwrap()),
                    token: token.parse().unwrap(),
                    pids: [daemon.parse().unwrap(), other.parse().unwrap()],
                    live: live.into(),
                    pool: pool.into(),
                };
                return Ok(attack::all(&job));
            }
            other => panic!("no such command: {other}"),
        }
        Ok(String::new())
    }
}

fn whole(posix: &Posix, fd: i32) -> Result<String, Errno> {
    let mut bytes = vec![0; 1 << 16];
    let got = posix.pread(fd, &mut bytes, 0)?;
    bytes.truncate(got);
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

const BLOCK: usize = 4096;

/// Path of one of the files of `grow`.
fn long(uid: u32, file: u64) -> String {
    format!("{}/long{file}", home(uid))
}

/// What is in one of its blocks: no other's, and never zeros.
fn block(file: u64, number: u64) -> Vec<u8> {
    ((number << 8) | (file + 1)).to_le_bytes().repeat(BLOCK / 8)
}

/// The directory that is a user's own.
const fn home(uid: u32) -> &'static str {
    if uid == A { "/a" } else { "/b" }
}
