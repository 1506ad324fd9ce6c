//! Messages between the agent in a program and the pager, over a SOCK_SEQPACKET socket of the Unix domain.
//!
//! Every packet is a row of 64-bit words of this machine. The agent speaks first:
//!
//! | from | words | descriptor |
//! | --- | --- | --- |
//! | agent | [`MAGIC`], [`VERSION`], [`NEW`] or [`FORKED`], first byte of the set-aside area, its bytes | – |
//! | pager | [`GO`] | to a new program: `/dev/userfaultfd`; to a forked one: its userfaultfd |
//! | agent, a new program | [`GO`] | the userfaultfd that it made |
//! | pager, to a new program | [`GO`], when all is registered | – |
//! | agent's thread | [`GO`], when it answers commands; none is sent before | – |
//!
//! From then on the pager sends a command and the agent answers it: [`MOVE`], [`DROP`] or [`OWN`], the number
//! of runs, and three words for each run; the answer has one word for each run, the bytes done or a negative
//! errno.

/// First word of a greeting.
pub const MAGIC: u64 = 0x7261_665f_6576_7276;
/// Version of these packets.
pub const VERSION: u64 = 1;
/// A program that was just started.
pub const NEW: u64 = 0;
/// A child that the C library's fork just made.
pub const FORKED: u64 = 1;
/// All is well.
pub const GO: u64 = 1;

/// Moves pages: target, source, bytes. Stops at the first page of a run that cannot be moved.
pub const MOVE: u64 = 1;
/// Empties memory: first byte, 0, bytes.
pub const DROP: u64 = 2;
/// Makes pages the process' own, after a fork: first byte, 0, bytes.
pub const OWN: u64 = 3;

/// Most runs of one command.
pub const RUNS_MAX: usize = 128;
/// Words of the longest packet.
pub const WORDS_MAX: usize = 2 + 3 * RUNS_MAX;

/// Bytes of the set-aside area, the mailbox included.
pub const ASIDE_BYTES: u64 = 256 << 20;
/// The end of the set-aside area that holds no page of the program. The pager puts a number into it to find
/// which userfaultfd a forked child has.
pub const MAILBOX_BYTES: u64 = 4096;

/// The environment variable that names the pager's socket.
pub const SOCKET_VARIABLE: &str = "VARVE_FAR_SOCKET";
