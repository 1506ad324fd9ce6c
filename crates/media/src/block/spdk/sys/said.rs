//! The last errors and warnings of the library, for the texts of our own errors. Safe code.

use std::collections::VecDeque;
use std::io::Write;

use crate::lock::Mutex;

/// Lines that are kept.
const LINES_MAX: usize = 4;

static LINES: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

/// Notes a message, and prints it, as SPDK would.
pub(super) fn add(text: &str) {
    let text: Vec<&str> = text.split_whitespace().collect();
    let text = text.join(" ");
    if text.is_empty() {
        return;
    }
    // Nobody to tell where even this cannot be written.
    let _ = writeln!(std::io::stderr(), "spdk: {text}");
    let mut lines = LINES.lock();
    if lines.len() == LINES_MAX {
        lines.pop_front();
    }
    lines.push_back(text);
}

/// Forgets what was said before a step.
pub(super) fn clear() {
    LINES.lock().clear();
}

/// Adds what the library said to a text.
pub(super) fn explain(what: &str) -> String {
    let said: Vec<String> = LINES.lock().drain(..).collect();
    match said.is_empty() {
        true => what.to_owned(),
        false => format!("{what}; SPDK says: {}", said.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::{add, clear, explain};

    #[test]
    fn last_words_of_the_library_are_in_the_error() {
        clear();
        assert_eq!(explain("it failed"), "it failed");
        for n in 0..9 {
            add(&format!("line\n {n}"));
        }
        add("\n");
        let text = explain("it failed");
        assert_eq!(text, "it failed; SPDK says: line 5; line 6; line 7; line 8");
        assert_eq!(explain("then"), "then");
    }
}
