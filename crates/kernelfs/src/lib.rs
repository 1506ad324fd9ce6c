//! The KernelFS daemon: sessions, leases, digest, recovery, placement.
