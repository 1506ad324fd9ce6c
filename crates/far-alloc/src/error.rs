//! What may go wrong, in one enum.

/// Why an operation was not done. Nothing changed then.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The object store: full, at its limit of memory, or its device failed.
    #[error(transparent)]
    Objects(#[from] varve_far_objects::Error),
    /// Faults cannot be served here.
    #[error(
        "far addresses need userfaultfd with page moves, for faults of system calls too (Linux 6.8; root, \
         CAP_SYS_PTRACE, access to /dev/userfaultfd or vm.unprivileged_userfaultfd=1): {what}: {error}"
    )]
    Userfault {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        error: std::io::Error,
    },
    /// The kernel refused memory or a thread.
    #[error("{what}: {error}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        error: std::io::Error,
    },
    /// No bytes were asked for.
    #[error("an allocation of 0 bytes")]
    ZeroSize,
    /// `count * size_bytes` is more than can be addressed.
    #[error("{count} objects of {size_bytes} bytes are more than can be addressed")]
    TooMany {
        /// How many objects.
        count: usize,
        /// Of how many bytes.
        size_bytes: usize,
    },
    /// The heap's range of addresses is used up.
    #[error("{pages} pages of addresses in one piece are not free among {of_pages}")]
    Addresses {
        /// What was wanted.
        pages: u64,
        /// What the heap has.
        of_pages: u64,
    },
    /// No allocation begins at this address: it was freed, or never was.
    #[error("no allocation begins at {0:#x}")]
    NotAllocated(usize),
    /// An object of `oalloc` has the size that it was given.
    #[error("{0:#x} is of oalloc, and its size does not change")]
    FixedSize(usize),
    /// Pins hold half of the page buffer already, or it cannot be emptied.
    #[error("the page buffer of {limit_bytes} bytes has no room")]
    PageBuffer {
        /// Its size.
        limit_bytes: u64,
    },
    /// A child of `fork` has no far memory.
    #[error("this process is a child of the one that made the heap")]
    Forked,
    /// A heap's addresses are in use, so that it cannot be restored in this process.
    #[error(
        "the heap lies at {start:#x} to {end:#x}, where this process has {by}: restore it before that is \
         mapped, or in another process"
    )]
    AddressesTaken {
        /// The first address of the heap.
        start: u64,
        /// The one behind its last.
        end: u64,
        /// What is there: lines of `/proc/self/maps`.
        by: String,
    },
    /// The checkpoint's records are damaged.
    #[error("the checkpoint is damaged: {0}")]
    Malformed(String),
    /// The configuration cannot work.
    #[error("{0}")]
    Config(String),
}
