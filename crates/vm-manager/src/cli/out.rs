//! Standard output and standard error of the commands. A closed pipe (`varve vm policy | head`) is no error.

use std::io::Write;

/// Prints `text` as it is.
pub(super) fn text(text: &str) {
    let mut out = std::io::stdout().lock();
    // The reader closed the pipe; an error could not be shown.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Prints `line` and a line end.
pub(super) fn line(line: &str) {
    text(&format!("{line}\n"));
}

/// Prints `text` and a line end on standard error.
pub(super) fn note(text: &str) {
    // As above.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
