//! `varve dedup scan`.

use super::args::{FileArgs, ScanArgs};
use super::{Reading, memory, percent, require_roots, tell_errors};
use crate::out;
use serde_json::json;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;
use varve_kernelfs::pool::size;
use varve_similarity::candidates::{self, Run, SearchOutcome, SearchSettings};
use varve_similarity::files::{Chosen, Found, Looked, ReadRate, State, StateError, walk};

/// Bytes of a block.
const BLOCK: u64 = 4096;

/// Someone who knows the checksums of files, or a better way to read them: a pool.
pub trait Knows {
    /// Calls `each` with the number of a block and the CRC-32C of it and of successive ones, in ascending
    /// order; what is left out is zeros. `rate` bounds the bytes that are read. `None`: the file's checksums
    /// are not known.
    fn tell(
        &mut self,
        chosen: &Chosen,
        rate: &mut ReadRate,
        each: &mut dyn FnMut(u64, &[u32]),
    ) -> Option<std::io::Result<()>>;

    /// Whether it reads all bytes.
    fn reads(&self) -> bool;
}

/// How files were looked at.
#[derive(Default)]
pub struct Counts {
    pub unchanged: u64,
    pub read: u64,
    /// Files whose checksums were known.
    pub told: u64,
    /// Bytes of these checksums.
    pub told_bytes: u64,
    pub changing: Vec<String>,
}

impl Counts {
    /// What was read, in words.
    pub fn text(&self, read_bytes: u64) -> String {
        let read = format!("{} read ({} files)", size::show(read_bytes), self.read);
        match self.told {
            0 => read,
            told => format!(
                "{} of checksums told by the pool ({told} files), {read}",
                size::show(self.told_bytes)
            ),
        }
    }
}

/// Opens the state of a scan; says it if it was of an older form.
pub fn open_state(dir: &Path) -> Result<State, StateError> {
    let state = State::open(dir)?;
    if state.was_old() {
        let dir = dir.display();
        out::note(&format!(
            "varve: the state in {dir} is of an older version; all files are read anew"
        ));
    }
    Ok(state)
}

/// Updates the state and prints runs of identical blocks.
pub fn scan(args: &ScanArgs, known: Option<&mut dyn Knows>) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut rate = args.files.rate();
    let mut state = open_state(&args.state)?;
    let (found, counts) = look_at(
        &args.paths,
        &args.files,
        &mut state,
        &mut rate,
        known,
        &mut |_| ControlFlow::Continue(true),
    )?;
    tell_errors(&found);
    let read_seconds = started.elapsed().as_secs_f64();
    let (runs, result) = search(args, &mut state)?;
    let total = state.files().count();
    let blocks = candidates::Checksums::blocks(&state);
    let listed = runs.iter().filter_map(|run| listed(&state, run));
    if args.json {
        let value = json!({
            "files": total,
            "files_unchanged": counts.unchanged,
            "files_read": counts.read,
            "files_told": counts.told,
            "checksum_bytes_told": counts.told_bytes,
            "files_changing": counts.changing,
            "files_left_out": found.left_out,
            "files_too_young": found.too_young,
            "errors": found.errors,
            "bytes": blocks * BLOCK,
            "bytes_read": rate.bytes(),
            "seconds_reading": read_seconds,
            "seconds_waited": rate.waited().as_secs_f64(),
            "seconds": started.elapsed().as_secs_f64(),
            "passes": result.passes,
            "memory_bytes": args.memory,
            "duplicate_runs": result.runs,
            "duplicate_bytes": result.blocks * BLOCK,
            "duplicate_bytes_in_short_runs": result.blocks_in_short_runs * BLOCK,
            "runs": args.list.then(|| listed.map(|listed| listed.json()).collect::<Vec<_>>()),
        });
        out::line(&format!("{value:#}"));
        return require_roots(&found);
    }
    listed.for_each(|listed| out::line(&listed.text()));
    for path in &counts.changing {
        out::line(&format!("{path}: changed while it was read; left out"));
    }
    out::line(&format!(
        "{total} files, {}: {} in {read_seconds:.1} s, {} files unchanged",
        size::show(blocks * BLOCK),
        counts.text(rate.bytes()),
        counts.unchanged,
    ));
    let share = percent(result.blocks as f64, blocks as f64);
    out::line(&format!(
        "{} ({share:.1} %) are probably there already, in {} runs of {} blocks and more; {} in shorter \
        ones; passes: {}",
        size::show(result.blocks * BLOCK),
        result.runs,
        args.min_run,
        size::show(result.blocks_in_short_runs * BLOCK),
        result.passes,
    ));
    require_roots(&found)
}

/// Searches for identical blocks. Keeps the runs only if they are to be listed.
fn search(args: &ScanArgs, state: &mut State) -> anyhow::Result<(Vec<Run>, SearchOutcome)> {
    let settings = SearchSettings {
        memory_bytes: memory(args.memory)?,
        min_run_blocks: args.min_run,
        spill_dir: args.state.clone(),
    };
    let bar = indicatif::ProgressBar::new_spinner();
    let mut progress = |now: candidates::Progress| {
        bar.set_message(format!("searching, pass {} of {}", now.pass, now.passes));
        bar.tick();
        ControlFlow::Continue(())
    };
    let mut runs: Vec<Run> = Vec::new();
    let result = if args.list {
        candidates::find(state, &settings, &mut progress, &mut |run| runs.push(run))
    } else {
        candidates::find(state, &settings, &mut progress, &mut |_| ())
    }?;
    bar.finish_and_clear();
    Ok((runs, result))
}

/// Reads all files, but for those whose checksums someone knows. `admit` says of each whether to read it and
/// go on (`true`) or end (`false`), or to leave it out (`Break`). A scan that was ended, also by `rate`,
/// forgets no file.
pub fn look_at(
    paths: &[PathBuf],
    files: &FileArgs,
    state: &mut State,
    rate: &mut ReadRate,
    mut known: Option<&mut dyn Knows>,
    admit: &mut dyn FnMut(&Chosen) -> ControlFlow<(), bool>,
) -> anyhow::Result<(Found, Counts)> {
    let filter = files.filter()?;
    let reading = Reading::start(files);
    let mut counts = Counts::default();
    let mut errors = Vec::new();
    let mut failed = None;
    let mut cut = false;
    let mut found = walk(paths, &filter, &mut |chosen| {
        match admit(&chosen) {
            ControlFlow::Break(()) => return true,
            ControlFlow::Continue(false) => {
                cut = true;
                return false;
            }
            ControlFlow::Continue(true) => {}
        }
        let path = chosen.path.display().to_string();
        let (looked, told_bytes) = look(state, chosen, rate, known.as_deref_mut());
        match looked {
            Ok(Ok(Looked::Unchanged)) => counts.unchanged += 1,
            Ok(Ok(Looked::Read)) => match told_bytes {
                Some(bytes) => {
                    counts.told += 1;
                    counts.told_bytes += bytes;
                }
                None => counts.read += 1,
            },
            Ok(Ok(Looked::Changing)) => counts.changing.push(path),
            Ok(Err(_)) if rate.is_stopped() => cut = true,
            Ok(Err(error)) => errors.push(format!("{path}: {error}")),
            Err(error) => failed = Some(error),
        }
        reading.at(rate.bytes());
        failed.is_none() && !cut
    });
    if let Some(error) = failed {
        return Err(error.into());
    }
    errors.into_iter().for_each(|error| found.note(error));
    if cut {
        state.save()?;
    } else {
        state.finish(&|path| found.has_missed(path))?;
    }
    Ok((found, counts))
}

/// Looks at one file; returns also how many bytes of checksums were told, if they are known.
fn look(
    state: &mut State,
    chosen: Chosen,
    rate: &mut ReadRate,
    known: Option<&mut (dyn Knows + '_)>,
) -> (Result<std::io::Result<Looked>, StateError>, Option<u64>) {
    let Some(known) = known else {
        return (state.look(chosen, rate), None);
    };
    let again = chosen.clone();
    let (mut told, mut unknown) = (0, false);
    let looked = state.look_told(chosen, &mut |chosen, each| {
        let answer = known.tell(chosen, rate, &mut |first, sums| {
            told += 4 * sums.len() as u64;
            each(first, sums);
        });
        unknown = answer.is_none();
        answer.unwrap_or_else(|| Err(std::io::ErrorKind::Unsupported.into()))
    });
    match (unknown, known.reads()) {
        (true, _) => (state.look(again, rate), None),
        (false, true) => (looked, None),
        (false, false) => (looked, Some(told)),
    }
}

/// A run, with the path and offset of each copy.
struct Listed<'a> {
    path: std::borrow::Cow<'a, str>,
    offset: u64,
    bytes: u64,
    same_path: std::borrow::Cow<'a, str>,
    same_offset: u64,
}

fn listed<'a>(state: &'a State, run: &Run) -> Option<Listed<'a>> {
    let (at, same) = (state.place(run.at)?, state.place(run.same_as)?);
    Some(Listed {
        path: at.path.to_string_lossy(),
        offset: at.offset_bytes,
        bytes: (run.blocks * BLOCK).min(at.left_bytes),
        same_path: same.path.to_string_lossy(),
        same_offset: same.offset_bytes,
    })
}

impl Listed<'_> {
    fn json(&self) -> serde_json::Value {
        json!({
            "path": self.path,
            "offset": self.offset,
            "bytes": self.bytes,
            "same_path": self.same_path,
            "same_offset": self.same_offset,
        })
    }

    fn text(&self) -> String {
        format!(
            "{} {}+{} = {} {}",
            self.path, self.offset, self.bytes, self.same_path, self.same_offset
        )
    }
}
