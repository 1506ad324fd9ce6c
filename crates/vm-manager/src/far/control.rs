//! How `varve vm far` reaches a running pager: a socket in the directory of the user's state files.
//!
//! One request and one answer a connection, each a line of JSON. Whoever may open the socket owns the run:
//! the directory is the user's alone, and the kernel says who is at the other end.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use serde::{Deserialize, Serialize};

use super::pager::Pager;
use super::status::FarStatus;
use crate::types::Pid;

/// Longest request, bytes.
const REQUEST_MAX: u64 = 4096;
/// Longest answer that is read, bytes.
const ANSWER_MAX: u64 = 1 << 20;
/// Longest wait for the other side.
const PATIENCE: Duration = Duration::from_secs(2);
/// Most ancestors that are looked at.
const ANCESTORS_MAX: usize = 256;

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wish {
    /// Tell how things are.
    Status,
    /// Set this limit, in the words of `--local`.
    Local(String),
    /// Bring everything back.
    Drain,
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// A process of the run, or the pager itself.
    pub pid: i32,
    /// The wish.
    pub wish: Wish,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// The process is in another run, or in none.
    Elsewhere,
    /// It was not done; a sentence for people.
    Refused(String),
    /// It was done, or has begun.
    Done(Box<FarStatus>),
}

/// The socket of a pager, removed when this goes.
#[derive(Debug)]
pub(super) struct Control(PathBuf);

impl Drop for Control {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Serves requests at `path` as long as the process lives.
///
/// # Errors
/// When the socket cannot be made.
pub(super) fn listen(pager: &Arc<Pager>, path: &Path) -> io::Result<Control> {
    // Of a process that had our number and was killed.
    let _ = std::fs::remove_file(path);
    let socket = UnixListener::bind(path)?;
    let control = Control(path.to_owned());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    let pager = pager.clone();
    let serve = move || {
        for stream in socket.incoming() {
            match stream {
                Ok(stream) => {
                    if let Err(error) = answer(&pager, stream) {
                        tracing::debug!("a request was not served: {error}");
                    }
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    };
    std::thread::Builder::new()
        .name("far control".into())
        .spawn(serve)?;
    Ok(control)
}

/// Serves one request.
fn answer(pager: &Arc<Pager>, mut stream: UnixStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let peer = sockopt::socket_peercred(&stream)?;
    if !peer.uid.is_root() && peer.uid != rustix::process::geteuid() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut line = String::new();
    BufReader::new((&stream).take(REQUEST_MAX)).read_line(&mut line)?;
    let request: Request = serde_json::from_str(&line)?;
    let mut text = serde_json::to_string(&fulfil(pager, &request))?;
    text.push('\n');
    stream.write_all(text.as_bytes())
}

fn fulfil(pager: &Arc<Pager>, request: &Request) -> Answer {
    let pid = Pid(request.pid);
    if !pager.serves(pid) && !is_below(pid, std::process::id()) {
        return Answer::Elsewhere;
    }
    let done = match &request.wish {
        Wish::Status => Ok(()),
        Wish::Drain => pager.drain(),
        Wish::Local(words) => words
            .parse()
            .map_err(anyhow::Error::msg)
            .and_then(|local| pager.set_local(local)),
    };
    match done {
        Ok(()) => Answer::Done(Box::new(pager.status())),
        Err(error) => Answer::Refused(format!("{error:#}")),
    }
}

/// Whether a process is `ancestor` or comes from it: one that did not join is of the run all the same.
fn is_below(pid: Pid, ancestor: u32) -> bool {
    let mut at = u32::try_from(pid.0).ok();
    for _ in 0..ANCESTORS_MAX {
        match at {
            Some(pid) if pid == ancestor => return true,
            Some(pid) if pid > 1 => at = parent(pid),
            _ => return false,
        }
    }
    false
}

fn parent(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())
}

/// Asks the pager behind one socket.
///
/// # Errors
/// `ConnectionRefused` when no process has the socket; others when it says nothing that can be understood.
pub fn ask(path: &Path, request: &Request) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut text = serde_json::to_string(request)?;
    text.push('\n');
    stream.write_all(text.as_bytes())?;
    let mut line = String::new();
    BufReader::new((&stream).take(ANSWER_MAX)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_is_below_itself_and_its_parent_only() {
        let me = std::process::id();
        assert!(is_below(Pid(me as i32), me));
        assert!(parent(me).is_some_and(|parent| is_below(Pid(me as i32), parent)));
        assert!(!is_below(Pid(1), me));
        assert!(!is_below(Pid(-4), me));
        assert!(!is_below(Pid(i32::MAX), me), "no such process");
    }

    #[test]
    fn only_whole_requests_are_understood() {
        let request = Request {
            pid: 7,
            wish: Wish::Local("50%".into()),
        };
        let text = serde_json::to_string(&request).expect("JSON");
        assert_eq!(serde_json::from_str::<Request>(&text).ok(), Some(request));
        for bad in [
            "",
            "{}",
            r#"{"pid":7}"#,
            r#"{"pid":7,"wish":"stop"}"#,
            r#"{"pid":7,"wish":"drain","more":1}"#,
            r#"{"pid":99999999999,"wish":"drain"}"#,
        ] {
            assert!(serde_json::from_str::<Request>(bad).is_err(), "{bad}");
        }
    }
}
