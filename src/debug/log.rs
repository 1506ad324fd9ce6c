//! Entries of logs, chunk by chunk, as they lie in the file that the next start will read. Does not decide
//! which of them recovery counts.

use super::stopped;
use crate::out;
use anyhow::Context;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use varve_format::SessionId;
use varve_format::log::{
    CHUNK_BYTES, EntryHeader, HEADER_SIZE, LIVE_HEADER_SIZE, LogOp, crc_seed, entry_crc, entry_size,
    payload_crc,
};
use zerocopy::FromBytes;

/// Prints all entries of all logs.
pub fn print(at: &Path, as_json: bool) -> anyhow::Result<()> {
    let pool = stopped(at)?;
    let _lock = pool.host().lock()?;
    let copies = pool.host().logs()?.copies()?;
    let mut logs = Vec::new();
    for copy in &copies {
        let place = if copy.live { "memory" } else { "disk" };
        let entries = entries(&copy.path, copy.session).with_context(|| copy.path.display().to_string())?;
        if as_json {
            logs.push(
                json!({ "session": copy.session.0, "copy": place, "path": out::path(&copy.path), "entries": entries }),
            );
            continue;
        }
        out::line(&format!(
            "session {} ({place}: {}), {} entries",
            copy.session,
            copy.path.display(),
            entries.len()
        ));
        for entry in &entries {
            out::line(&format!(
                "  {:>10} stable<{:<8} base {:<6} {:>4} {}",
                entry["seq"],
                entry["stable_below"],
                entry["base"],
                entry["tx_left"],
                entry["op"].as_str().unwrap_or("?")
            ));
        }
    }
    if as_json {
        out::line(&format!("{:#}", json!({ "logs": logs })));
    } else if copies.is_empty() {
        out::line("no logs: everything is digested");
    }
    Ok(())
}

fn entries(path: &Path, session: SessionId) -> anyhow::Result<Vec<Value>> {
    let file = File::open(path)?;
    let len_bytes = file.metadata()?.len();
    let mut all = Vec::new();
    for chunk in 0..len_bytes / CHUNK_BYTES {
        let mut bytes = vec![0; CHUNK_BYTES as usize];
        file.read_exact_at(&mut bytes, chunk * CHUNK_BYTES)?;
        let start = if chunk == 0 { LIVE_HEADER_SIZE } else { 0 };
        scan(&bytes, start, session, chunk, &mut all);
    }
    all.sort_by_key(|(seq, _)| *seq);
    Ok(all.into_iter().map(|(_, entry)| entry).collect())
}

/// Collects the entries of one chunk, up to the first invalid one.
fn scan(bytes: &[u8], mut at: usize, session: SessionId, chunk: u64, all: &mut Vec<(u64, Value)>) {
    let mut last = 0;
    while let Some(head) = bytes.get(at..at + HEADER_SIZE) {
        let Ok(header) = EntryHeader::read_from_bytes(head) else {
            return;
        };
        let payload_len = header.payload_len.get() as usize;
        let Some(payload) = bytes.get(at + HEADER_SIZE..(at + HEADER_SIZE).saturating_add(payload_len))
        else {
            return;
        };
        let crc = entry_crc(payload_crc(crc_seed(session), payload), &header);
        let seq = header.seq.get();
        if crc != header.crc32c.get() || seq <= last {
            return;
        }
        last = seq;
        let op = match LogOp::parse(&header, payload) {
            Ok(op) => words(&op),
            Err(error) => format!("not an operation: {error}"),
        };
        let entry = json!({
            "seq": seq,
            "stable_below": seq.saturating_sub(u64::from(header.stable_delta.get())),
            "base": header.base.get(),
            "tx_left": header.tx_left.get(),
            "time_ns": header.time_ns.get(),
            "flags": header.flags,
            "chunk": chunk,
            "offset": at,
            "op": op,
        });
        all.push((seq, entry));
        at += entry_size(payload_len);
    }
}

fn words(op: &LogOp<'_>) -> String {
    match op {
        LogOp::Write { key, offset, data } => format!("write {key} {offset}..+{}", data.len()),
        LogOp::SetXattr { key, name, value } => {
            format!(
                "setxattr {key} {:?} ({} bytes)",
                String::from_utf8_lossy(name),
                value.len()
            )
        }
        LogOp::Create {
            dir, name, key, mode, ..
        } => {
            format!(
                "create {key} as {:?} in {dir}, mode {mode:o}",
                String::from_utf8_lossy(name)
            )
        }
        LogOp::Link { dir, name, key } => {
            format!("link {key} as {:?} in {dir}", String::from_utf8_lossy(name))
        }
        LogOp::Unlink { dir, name, key } => {
            format!("unlink {:?} in {dir} ({key})", String::from_utf8_lossy(name))
        }
        LogOp::Rename {
            dir,
            name,
            key,
            new_dir,
            new_name,
            victim,
            exchange,
        } => format!(
            "{} {key}: {:?} in {dir} to {:?} in {new_dir}{}",
            if *exchange { "exchange" } else { "rename" },
            String::from_utf8_lossy(name),
            String::from_utf8_lossy(new_name),
            victim.map_or(String::new(), |victim| format!(", over {victim}"))
        ),
        LogOp::RemoveXattr { key, name } => format!("removexattr {key} {:?}", String::from_utf8_lossy(name)),
        other => format!("{other:?}"),
    }
}
