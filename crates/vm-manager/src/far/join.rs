//! How programs come to the pager: the socket, and the exchange of `varve_far::wire`.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use varve_far::{PAGE_BYTES, Page, wire};

use super::agent::{Agent, receive, send};
use super::pager::Pager;
use super::program::Area;
use super::write_out;
use crate::sys::{Faults, Pagemap, read_memory};
use crate::types::Pid;

/// Longest wait for a word of a program that joins.
const PATIENCE: Duration = Duration::from_secs(5);

/// Listens at `path` and takes in every program that comes, as long as the process lives. `device` is
/// `/dev/userfaultfd`.
///
/// # Errors
/// When the socket cannot be made.
pub(super) fn listen(pager: &Arc<Pager>, path: &Path, device: OwnedFd) -> io::Result<()> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 128)?;
    let pager = pager.clone();
    let device = Arc::new(device);
    std::thread::Builder::new()
        .name("far joins".into())
        .spawn(move || {
            loop {
                let Ok(line) = rustix::net::accept_with(&socket, SocketFlags::CLOEXEC) else {
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                };
                let (pager, device) = (pager.clone(), device.clone());
                // A program that says nothing keeps no other from joining.
                let greeting = std::thread::Builder::new()
                    .name("far join".into())
                    .spawn(move || {
                        if let Err(error) = greet(&pager, line, &device) {
                            tracing::warn!("a program could not join and runs without far memory: {error}");
                        }
                    });
                drop(greeting);
            }
        })?;
    Ok(())
}

/// Takes one program in.
fn greet(pager: &Arc<Pager>, line: OwnedFd, device: &OwnedFd) -> io::Result<()> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    sockopt::set_socket_timeout(&line, sockopt::Timeout::Recv, Some(PATIENCE))?;
    let peer = sockopt::socket_peercred(&line)?;
    let pid = Pid(peer.pid.as_raw_nonzero().get());
    let (words, _) = receive(&line, 8)?;
    let [wire::MAGIC, wire::VERSION, kind, start, wire::ASIDE_BYTES] = words[..] else {
        return Err(wrong("its library is of another version"));
    };
    let end = start.checked_add(wire::ASIDE_BYTES);
    if !start.is_multiple_of(PAGE_BYTES as u64) || start == 0 || end.is_none_or(|end| end > 1 << 47) {
        return Err(wrong("its set-aside area cannot be"));
    }
    match kind {
        wire::NEW => new(pager, line, device, pid, Area { start }),
        wire::FORKED => forked(pager, line, pid, Area { start }),
        _ => Err(wrong("it asks for something unknown")),
    }
}

fn new(pager: &Arc<Pager>, line: OwnedFd, device: &OwnedFd, pid: Pid, area: Area) -> io::Result<()> {
    send(&line, &[wire::GO], Some(device))?;
    let (_, uffd) = receive(&line, 1)?;
    let uffd = uffd.ok_or_else(|| io::Error::other("it could not make a userfaultfd"))?;
    let faults = Faults::begin(uffd)?;
    faults.register(area.start, wire::ASIDE_BYTES)?;
    send(&line, &[wire::GO], None)?;
    pager.add_new(faults, area, pid, ready(line)?)
}

/// Waits until the agent's thread runs. A command before that would hold the lock that faults of the program
/// need, of the thread that starts the agent too.
fn ready(line: OwnedFd) -> io::Result<Agent> {
    let (words, _) = receive(&line, 1)?;
    if words != [wire::GO] {
        return Err(io::Error::other("its agent did not start"));
    }
    sockopt::set_socket_timeout(&line, sockopt::Timeout::Recv, None)?;
    Ok(Agent::new(line))
}

/// A child of the C library's fork: which userfaultfd it has says the number in its mailbox.
fn forked(pager: &Arc<Pager>, line: OwnedFd, pid: Pid, area: Area) -> io::Result<()> {
    let begun = Instant::now();
    let program = loop {
        if let Some(number) = mailbox(pid, area)? {
            // A number that no child has is that of an ancestor which did not join: this one cannot be told
            // from it.
            let unknown = || io::Error::other("it is the child of a program that did not join");
            break pager.child(number).ok_or_else(unknown)?;
        }
        if begun.elapsed() > PATIENCE {
            return Err(io::Error::other("its parent's fork was not followed"));
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    program.set_pid(pid);
    {
        // The state that its parent could not be asked for. The child empties the area when it hears of us.
        let mut pages = program.pages();
        write_out::flush(pager, &program, &mut pages, None);
        if !pages.empty_ring() {
            return Err(io::Error::other("its set-aside area cannot be read"));
        }
    }
    let uffd = rustix::io::fcntl_dupfd_cloexec(&program.faults, 0)?;
    send(&line, &[wire::GO], Some(&uffd))?;
    drop(uffd);
    program.join(pid, ready(line)?);
    pager.evict(&program)
}

/// The number in a child's mailbox, if one is there. Never touches an empty mailbox: that would fill it.
fn mailbox(pid: Pid, area: Area) -> io::Result<Option<u64>> {
    let start = area.mailbox();
    let mut is_there = false;
    Pagemap::open(pid)?.present(start, start + wire::MAILBOX_BYTES, |_| is_there = true)?;
    if !is_there {
        return Ok(None);
    }
    let mut page = Page::default();
    read_memory(pid, &[(start, 1)], std::slice::from_mut(&mut page))?;
    let number = page.0.first_chunk::<8>().map(|bytes| u64::from_ne_bytes(*bytes));
    Ok(number)
}
