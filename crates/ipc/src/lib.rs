//! The contract between LibFS and KernelFS: messages, session pages, transports.
