//! A pool of plain files on this machine: pool directory, live directory, lock, configuration file, the socket server's set-up.
//! (Being written together with the command line by its author; the rest of the crate only declares `pub mod host;`.)
