//! The access log: a line of JSON for each request, written by a thread of its own. Requests never wait for
//! it: lines that cannot be written fast enough are dropped and counted.

use crate::metrics::Metrics;
use serde::Serialize;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Capacity of the queue to the writing thread, in lines.
const WAITING: usize = 4096;

/// One line of the access log.
#[derive(Debug, Serialize)]
pub struct Line {
    /// Arrival of the request, milliseconds since 1970.
    pub time_ms: u64,
    /// Address of the client.
    pub client: String,
    /// Method of the request.
    pub method: String,
    /// URL of the request.
    pub url: String,
    /// The version of HTTP.
    pub version: &'static str,
    /// Status of the answer.
    pub status: u16,
    /// Label of the [`Outcome`](crate::metrics::Outcome).
    pub cache: &'static str,
    /// Bytes of the answer's body that were sent.
    pub bytes: u64,
    /// Time from the request to the start of the answer, milliseconds.
    pub first_byte_ms: f64,
    /// Time from the request to the end of the answer, milliseconds.
    pub total_ms: f64,
    /// `User-Agent`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
}

enum Message {
    Line(Line),
    Reopen,
}

/// Handle to the writing thread.
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
    /// Starts the writing thread for the file at `path`; without a path, lines are discarded.
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

    /// Whether lines are written.
    pub const fn is_on(&self) -> bool {
        self.lines.is_some()
    }

    /// Queues a line; drops and counts it if the queue is full.
    pub fn write(&self, line: Line) {
        if let Some(lines) = &self.lines
            && lines.try_send(Message::Line(line)).is_err()
        {
            self.metrics.log_dropped.inc();
        }
    }

    /// Reopens the file, for log rotation.
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
