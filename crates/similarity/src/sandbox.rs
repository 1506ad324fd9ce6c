//! Parses an image in an unprivileged process: no files, no sockets, no other programs, bounded memory and
//! time.
//!
//! The parent opens the image and starts a *worker* (its own program with an argument of the caller's
//! choice), whose standard input is the image and whose standard output takes the profile. Before it looks at
//! a byte, the worker gives up all rights except reading the one and writing the other. Its answer is checked
//! like any input, as an attacker may control the worker.

use crate::image::{Form, Profile};
use crate::input::disk::OfFile;
use crate::input::{self, InputError, Limits};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Bytes of an answer, at most.
const MAX_ANSWER_BYTES: u64 = 64 << 20;
/// Bytes of a message of the worker, at most.
const MAX_MESSAGE_BYTES: usize = 512;
/// What Rust's library says at the end of a process whose memory did not suffice.
const OUT_OF_MEMORY: &str = "memory allocation of ";
const MAGIC: [u8; 4] = *b"VPRF";

/// The command line of a worker.
#[derive(Debug, Clone)]
pub struct Worker {
    /// The program, usually the caller's own.
    pub program: PathBuf,
    /// Arguments that make it call [`work`].
    pub arguments: Vec<OsString>,
}

/// The reason why a worker returned no profile.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// It could not be started.
    #[error("cannot start the process that parses images: {0}")]
    Start(std::io::Error),
    /// It ended without an answer.
    #[error("the process that parsed it ended with {0}")]
    Ended(String),
    /// Its memory did not suffice.
    #[error("the process that parsed it needed more memory than {0} bytes; raise --image-memory")]
    Memory(u64),
    /// It took too long.
    #[error("parsing took longer than {0:?}")]
    Time(Duration),
    /// Its answer is not a valid profile.
    #[error("the process that parsed it gave no sensible answer")]
    Answer,
}

impl Worker {
    /// Returns the profile of an image. An image that a worker cannot parse is compared by blocks, by another
    /// worker that parses nothing.
    ///
    /// # Errors
    /// If the second worker fails too.
    pub fn profile(&self, name: &str, image: &File, limits: &Limits) -> Result<Profile, SandboxError> {
        match self.ask(name, image, limits, false) {
            Ok(profile) => Ok(profile),
            Err(SandboxError::Start(error)) => Err(SandboxError::Start(error)),
            Err(error) => {
                let mut profile = self.ask(name, image, limits, true)?;
                profile.note(format!("{error}; compared by blocks"));
                Ok(profile)
            }
        }
    }

    fn ask(&self, name: &str, image: &File, limits: &Limits, blocks: bool) -> Result<Profile, SandboxError> {
        let input = image.try_clone().map_err(SandboxError::Start)?;
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .args(arguments(limits, blocks))
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(input))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(SandboxError::Start)?;
        let answer = wait(&mut child, limits.time + Duration::from_secs(5));
        // Whatever the outcome, the worker is killed and reaped.
        let _ = child.kill();
        let _ = child.wait();
        let mut profile = answer.map_err(|error| match error {
            SandboxError::Ended(how) if how.contains(OUT_OF_MEMORY) => {
                SandboxError::Memory(limits.memory_bytes)
            }
            error => error,
        })?;
        profile.name = name.to_owned();
        Ok(profile)
    }
}

/// Reads the answer of a worker until it ends or the time is up.
fn wait(child: &mut Child, time: Duration) -> Result<Profile, SandboxError> {
    let (Some(output), Some(errors)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(SandboxError::Answer);
    };
    let until = Instant::now() + time;
    let read = |from: Box<dyn Read + Send>, most: u64| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // A killed worker ends its output: the bytes so far count.
            let _ = from.take(most).read_to_end(&mut bytes);
            bytes
        })
    };
    let answer = read(Box::new(output), MAX_ANSWER_BYTES + 1);
    let message = read(Box::new(errors), MAX_MESSAGE_BYTES as u64);
    let status = loop {
        // A worker that fills its pipe beyond the limit blocks; the timeout ends it too.
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
            _ => {
                let _ = child.kill();
                return Err(SandboxError::Time(time));
            }
        }
    };
    let bytes = answer.join().unwrap_or_default();
    if !status.success() {
        let message = message.join().unwrap_or_default();
        let text: String = String::from_utf8_lossy(&message)
            .chars()
            .filter(|c| !c.is_control())
            .collect();
        let comma = if text.is_empty() { "" } else { ": " };
        return Err(SandboxError::Ended(format!("{status}{comma}{text}")));
    }
    decode(&bytes).ok_or(SandboxError::Answer)
}

fn encode(profile: &Profile) -> Vec<u8> {
    let body = postcard::to_allocvec(profile).expect("a profile is plain data");
    [&MAGIC[..], &crc32c::crc32c(&body).to_le_bytes(), &body].concat()
}

fn decode(bytes: &[u8]) -> Option<Profile> {
    let body = bytes.strip_prefix(&MAGIC)?;
    let (sum, body) = body.split_at_checked(4)?;
    if crc32c::crc32c(body).to_le_bytes() != sum || body.len() as u64 > MAX_ANSWER_BYTES {
        return None;
    }
    let profile: Profile = postcard::from_bytes(body).ok()?;
    profile.is_sound().then_some(profile)
}

/// Arguments for a worker, which [`work`] parses.
fn arguments(limits: &Limits, blocks: bool) -> [String; 7] {
    [
        limits.time.as_millis().to_string(),
        limits.memory_bytes.to_string(),
        limits.depth.to_string(),
        limits.entries.to_string(),
        limits.expansion.to_string(),
        limits.elements.to_string(),
        u8::from(blocks).to_string(),
    ]
}

fn parse_arguments(arguments: &[String]) -> Option<(Limits, bool)> {
    let numbers: Vec<u64> = arguments
        .iter()
        .map(|text| text.parse().ok())
        .collect::<Option<_>>()?;
    let [time, memory_bytes, depth, entries, expansion, elements, blocks] = numbers[..] else {
        return None;
    };
    let limits = Limits {
        time: Duration::from_millis(time),
        memory_bytes,
        depth: u32::try_from(depth).ok()?,
        entries,
        expansion,
        elements: usize::try_from(elements).ok()?,
    };
    Some((limits, blocks == 1))
}

/// Runs a worker: its program calls this with the arguments that follow [`Worker::arguments`].
pub fn work(arguments: &[String]) -> ExitCode {
    match try_work(arguments) {
        Ok(answer) => match std::io::stdout().write_all(&answer) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn try_work(arguments: &[String]) -> Result<Vec<u8>, InputError> {
    let unsupported = |text: &str| InputError::Unsupported(text.to_owned());
    let (limits, blocks) = parse_arguments(arguments).ok_or_else(|| unsupported("this call"))?;
    let image = OfFile::new(File::from(std::io::stdin().as_fd().try_clone_to_owned()?))?;
    confine(&limits).map_err(|error| unsupported(&format!("a process without rights ({error})")))?;
    let source: Rc<dyn input::ReadAt> = Rc::new(image);
    let profile = if blocks {
        input::by_blocks("", &source, &limits, None)?
    } else {
        input::read("", source, &limits)?
    };
    debug_assert!(profile.form != Form::Directory);
    Ok(encode(&profile))
}

/// Gives up all rights except reading and writing open files, for the whole process and permanently.
///
/// # Errors
/// If the kernel refuses. Nothing must be parsed then.
pub fn confine(limits: &Limits) -> Result<(), Box<dyn std::error::Error>> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let most = |value| Rlimit {
        current: Some(value),
        maximum: Some(value),
    };
    setrlimit(Resource::As, most(limits.memory_bytes))?;
    setrlimit(Resource::Cpu, most(limits.time.as_secs() + 1))?;
    setrlimit(Resource::Core, most(0))?;
    setrlimit(Resource::Nofile, most(3))?;
    setrlimit(Resource::Fsize, most(0))?;
    let filter = SeccompFilter::new(
        rules()?,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        std::env::consts::ARCH.try_into()?,
    )?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter_all_threads(&program)?;
    Ok(())
}

/// Permitted system calls: reading, writing, memory that is not executable, time, and exit.
fn rules() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = [
        libc::SYS_read,
        libc::SYS_pread64,
        libc::SYS_write,
        libc::SYS_lseek,
        libc::SYS_brk,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_madvise,
        libc::SYS_futex,
        libc::SYS_clock_gettime,
        libc::SYS_getrandom,
        libc::SYS_sched_yield,
        libc::SYS_sigaltstack,
        libc::SYS_rt_sigreturn,
        libc::SYS_close,
        libc::SYS_exit,
        libc::SYS_exit_group,
    ]
    .into_iter()
    .map(|call| (call, Vec::new()))
    .collect();
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let not_executable = SeccompCondition::new(
            2,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64),
            0,
        )?;
        rules.insert(call, vec![SeccompRule::new(vec![not_executable])?]);
    }
    // The standard library checks that a descriptor is open before it closes it (with debug assertions).
    let only_looked_at =
        SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, libc::F_GETFD as u64)?;
    rules.insert(libc::SYS_fcntl, vec![SeccompRule::new(vec![only_looked_at])?]);
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_back_and_others_refused() {
        let limits = Limits::default();
        for blocks in [false, true] {
            let told = arguments(&limits, blocks);
            assert_eq!(parse_arguments(&told), Some((limits.clone(), blocks)));
        }
        assert_eq!(parse_arguments(&[]), None);
        assert_eq!(parse_arguments(&["x".to_owned()]), None);
    }

    #[test]
    fn answers_that_are_damaged_or_unsound_are_refused() {
        let mut profile = Profile::named("x");
        let good = encode(&profile);
        assert_eq!(decode(&good), Some(profile.clone()));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert_eq!(decode(&bad), None, "byte {at}");
        }
        profile.notes = vec![String::new(); 1000];
        assert_eq!(decode(&encode(&profile)), None);
    }
}
