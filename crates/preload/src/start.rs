//! How the library starts: sets up the process state, and registers the handlers of the program's calls.

use crate::config::Config;
use crate::sys::handlers::Handlers;
use crate::{calls, process, sys};

sys::start::at_load!(begin);

/// Runs before the program's own code. `None` if the library has nothing to do.
fn begin() -> Option<Handlers> {
    let config = Config::from_environment()?;
    process::begin(config);
    if !process::forking::watch() {
        return None;
    }
    calls::limits::look();
    Some(Handlers {
        program: |args| calls::dispatch(process::current()?, args),
        lent: |args| {
            if let Some(process) = process::current() {
                calls::lent(process, args);
            }
        },
        switch_off: process::switch_off,
    })
}
