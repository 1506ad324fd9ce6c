//! Standard output, standard error and progress. A closed pipe (`varve status 2>&1 | head`) is no error.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// Prints text and a line's end.
pub fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    // The reader closed the pipe; an error could not be shown.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Prints text and a line's end on standard error.
pub fn note(text: &str) {
    // The reader closed the pipe; an error could not be shown.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// A path in JSON, which has no bytes that are not UTF-8.
pub fn path(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// A spinner on a terminal during a long operation; nothing elsewhere. Ends when dropped.
pub struct Progress(indicatif::ProgressBar);

impl Progress {
    /// Starts a spinner with a message.
    pub fn start(what: &'static str) -> Self {
        let bar = indicatif::ProgressBar::new_spinner();
        if let Ok(style) = indicatif::ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(what);
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
