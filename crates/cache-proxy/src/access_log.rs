//! The access log: a line of JSON for each request, written by a thread of its own. Who is answered never
//! waits for it: when it cannot be written fast enough, lines are left out and counted.

use crate::metrics::Metrics;
use serde::Serialize;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Lines that may wait.
const WAITING: usize = 4096;

/// What is written of a request.
#[derive(Debug, Serialize)]
pub struct Line {
    /// When it came, milliseconds since 1970.
    pub time_ms: u64,
    /// From where.
    pub client: String,
    /// Its method.
    pub method: String,
    /// What it asked for.
    pub url: String,
    /// The version of HTTP.
    pub version: &'static str,
    /// Status of the answer.
    pub status: u16,
    /// How it was answered.
    pub cache: &'static str,
    /// Bytes of the answer's body that were handed over.
    pub bytes: u64,
    /// Until the answer began, milliseconds.
    pub first_byte_ms: f64,
    /// Until it ended.
    pub total_ms: f64,
    /// `User-Agent`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
}

enum Message {
    Line(Line),
    Reopen,
}

/// Where lines go.
#[derive(Clone)]
pub struct AccessLog {
    lines: Option<SyncSender<Message>>,
    metrics: Arc<Metrics>,
}

fn open(path: &Path) -> std::io::Result<Box<dyn Write + Send>> {
    if path == Path::new("-") {
        return Ok(Box::new(std::io::stdout()));
    }
    Ok(Box::new(OpenOptions::new().create(true).append(true).open(path)?))
}

impl AccessLog {
    /// Into a file, or nowhere.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn start(path: Option<PathBuf>, metrics: Arc<Metrics>) -> std::io::Result<Self> {
        let Some(path) = path else {
            return Ok(Self { lines: None, metrics });
        };
        let file = open(&path)?;
        let (lines, waiting) = sync_channel(WAITING);
        std::thread::Builder::new()
            .name("access-log".to_owned())
            .spawn(move || write_lines(&waiting, &path, file))?;
        Ok(Self {
            lines: Some(lines),
            metrics,
        })
    }

    /// Whether lines go anywhere.
    pub const fn is_on(&self) -> bool {
        self.lines.is_some()
    }

    /// Writes a line, some time.
    pub fn write(&self, line: Line) {
        if let Some(lines) = &self.lines
            && lines.try_send(Message::Line(line)).is_err()
        {
            self.metrics.log_dropped.inc();
        }
    }

    /// Opens the file anew, for programs that move logs away.
    pub fn reopen(&self) {
        if let Some(lines) = &self.lines {
            let _ = lines.try_send(Message::Reopen);
        }
    }
}

fn write_lines(waiting: &Receiver<Message>, path: &Path, mut file: Box<dyn Write + Send>) {
    while let Ok(message) = waiting.recv() {
        match message {
            Message::Line(line) => {
                let mut text = serde_json::to_vec(&line).unwrap_or_default();
                text.push(b'\n');
                if let Err(error) = file.write_all(&text) {
                    tracing::warn!(path = %path.display(), %error, "the access log cannot be written");
                }
            }
            Message::Reopen => match open(path) {
                Ok(opened) => file = opened,
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "the access log cannot be opened anew")
                }
            },
        }
    }
}
