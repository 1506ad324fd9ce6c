//! Numbers of userfaultfd (linux/userfaultfd.h): requests with the length of their arguments, features, modes and
//! events. Who calls the kernel has `unsafe` of its own.

/// `UFFDIO_API`; three words.
pub const API: u64 = 0xc018_aa3f;
/// `UFFDIO_REGISTER`; four words.
pub const REGISTER: u64 = 0xc020_aa00;
/// `UFFDIO_UNREGISTER`; two words.
pub const UNREGISTER: u64 = 0x8010_aa01;
/// `UFFDIO_WAKE`; two words.
pub const WAKE: u64 = 0x8010_aa02;
/// `UFFDIO_COPY`; five words.
pub const COPY: u64 = 0xc028_aa03;
/// `UFFDIO_ZEROPAGE`; four words.
pub const ZEROPAGE: u64 = 0xc020_aa04;
/// `UFFDIO_MOVE`; five words. Linux 6.8.
pub const MOVE: u64 = 0xc028_aa05;
/// `UFFDIO_WRITEPROTECT`; three words.
pub const WRITEPROTECT: u64 = 0xc018_aa06;
/// Mode of [`WRITEPROTECT`]: pages are protected, not the opposite.
pub const WRITEPROTECT_MODE_WP: u64 = 1;
/// `UFFDIO_POISON`; four words. Linux 6.6.
pub const POISON: u64 = 0xc020_aa08;
/// `USERFAULTFD_IOC_NEW` of `/dev/userfaultfd`; takes flags.
pub const NEW: u64 = 0xaa00;

/// The only version of the interface.
pub const VERSION: u64 = 0xaa;

/// Faults of writes to write-protected pages.
pub const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
/// Events of forks.
pub const FEATURE_EVENT_FORK: u64 = 1 << 1;
/// Events of moved mappings.
pub const FEATURE_EVENT_REMAP: u64 = 1 << 2;
/// Events of contents that are given up.
pub const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
/// Events of unmapped ranges.
pub const FEATURE_EVENT_UNMAP: u64 = 1 << 6;
/// A fault is SIGBUS in the thread.
pub const FEATURE_SIGBUS: u64 = 1 << 7;
/// Write protection of pages that are not there.
pub const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
/// [`POISON`].
pub const FEATURE_POISON: u64 = 1 << 14;
/// Faults of writes that nobody is asked about.
pub const FEATURE_WP_ASYNC: u64 = 1 << 15;
/// [`MOVE`].
pub const FEATURE_MOVE: u64 = 1 << 16;

/// Of [`REGISTER`]: missing pages.
pub const MODE_MISSING: u64 = 1;
/// Of [`REGISTER`]: write protection.
pub const MODE_WP: u64 = 2;
/// Of [`COPY`]: the page is write-protected.
pub const COPY_MODE_WP: u64 = 2;

/// A thread touched a page.
pub const EVENT_PAGEFAULT: u8 = 0x12;
/// Of a fault: it was a write.
pub const FLAG_WRITE: u64 = 1;
/// Of a fault: the page is there and write-protected.
pub const FLAG_WP: u64 = 2;
