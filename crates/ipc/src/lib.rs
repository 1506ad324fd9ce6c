//! The only contract between LibFS and KernelFS: messages, the session page, links, transports and the clock.

mod messages;

pub use messages::{
    Admin, ClientKind, Clock, Cred, DATA_MAX, DirEntry, Grant, HELD_MAX, Hello, ITEMS_MAX, IpcError,
    LeaseMode, Link, MappedExtent, MediatedOp, MediatedResult, PROTOCOL_VERSION, ReleaseItem, Request,
    Response, StatFs, Upcall, Want, Welcome,
};
