//! The pager's end of the line to one agent.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use varve_far::wire;
use zerocopy::IntoBytes;

/// One run of a command: target or first byte, source, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub first: u64,
    pub second: u64,
    pub len: u64,
}

/// An agent. One command at a time.
#[derive(Debug)]
pub(super) struct Agent {
    socket: OwnedFd,
}

impl Agent {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Has the agent carry out a command and waits for it. Gives for each run the bytes done or a negative
    /// errno.
    ///
    /// # Errors
    /// When the program has ended.
    pub(super) fn command(&self, what: u64, runs: &[Run]) -> io::Result<Vec<i64>> {
        let mut answers = Vec::with_capacity(runs.len());
        for part in runs.chunks(wire::RUNS_MAX) {
            let mut words = vec![what, part.len() as u64];
            words.extend(part.iter().flat_map(|run| [run.first, run.second, run.len]));
            send(&self.socket, &words, None)?;
            let (got, _) = receive(&self.socket, part.len())?;
            if got.len() != part.len() {
                return Err(io::ErrorKind::InvalidData.into());
            }
            answers.extend(got.into_iter().map(|word| word as i64));
        }
        Ok(answers)
    }
}

/// Sends a packet of words, with at most one descriptor.
pub(super) fn send(socket: &OwnedFd, words: &[u64], fd: Option<&OwnedFd>) -> io::Result<()> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd.as_fd()]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let bytes = io::IoSlice::new(words.as_bytes());
    rustix::net::sendmsg(socket, &[bytes], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a packet of at most `most` words, and the descriptor that came with it.
///
/// # Errors
/// `UnexpectedEof` when the other side is gone.
pub(super) fn receive(socket: &OwnedFd, most: usize) -> io::Result<(Vec<u64>, Option<OwnedFd>)> {
    let mut words = vec![0u64; most];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let bytes = io::IoSliceMut::new(words.as_mut_bytes());
        match rustix::net::recvmsg(socket, &mut [bytes], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    if got.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    words.truncate(got.bytes / size_of::<u64>());
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((words, fd))
}
