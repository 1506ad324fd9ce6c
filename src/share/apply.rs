//! `varve dedup apply`: finds runs of blocks that look the same in files of a running pool, and has its daemon
//! share them. Decides which files are left; the daemon compares and shares.

use super::files::{Ends, Files, Open, Verdict};
use super::tally::BLOCK;
use crate::dedup::args::ApplyArgs;
use crate::dedup::scan::{Counts, look_at};
use crate::dedup::{Reading, memory, tell_errors};
use crate::in_pool::InPool;
use crate::out;
use crate::signals::Stop;
use anyhow::{Context, bail};
use rustix::process::geteuid;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use varve_kernelfs::DedupScope;
use varve_kernelfs::pool::size;
use varve_libfs::{Errno, OwnedBlocks};
use varve_similarity::candidates::{self, FindError, Run, SearchSettings};
use varve_similarity::files::{Chosen, ReadRate, State};

/// Bytes that are compared and shared in one call: as many as the daemon takes at once.
const STEP: u64 = 16 << 20;
/// Reasons that are kept; of more, only the number of bytes.
const LEFT_MOST: usize = 10_000;

/// Owners of the files of a state, by device and inode number.
type Owners = HashMap<(u64, u64), (u32, u32)>;

/// What was done, in bytes.
#[derive(Debug, Default)]
struct Done {
    runs: u64,
    shared: u64,
    /// Of `shared`: blocks that no other file had, and that are free now.
    freed: u64,
    already: u64,
    differing: u64,
    left: u64,
    reasons: BTreeMap<PathBuf, String>,
    files: BTreeSet<(u64, u64)>,
}

impl Done {
    fn leave(&mut self, path: &Path, why: &str, bytes: u64) {
        self.left += bytes;
        if self.reasons.len() < LEFT_MOST {
            self.reasons
                .entry(path.to_owned())
                .or_insert_with(|| why.to_owned());
        }
    }
}

/// Why it ended before it was through.
enum Ended {
    Signal,
    NoSpace(PathBuf),
    OldFormat,
    Lost(PathBuf, Errno),
    Other(anyhow::Error),
}

/// Shares what is the same in the files below some paths.
pub fn apply(args: &ApplyArgs) -> anyhow::Result<()> {
    let stop = Stop::install().context("cannot catch signals")?;
    let pool = InPool::of(&args.paths)?;
    if pool.mount.is_read_only {
        bail!("{} is mounted read-only", pool.mount.at.display());
    }
    let temporary = match args.state {
        Some(_) => None,
        None => Some(Temporary::new()?),
    };
    let dir = match (&args.state, &temporary) {
        (Some(dir), _) => dir.as_path(),
        (None, Some(temporary)) => &temporary.0,
        (None, None) => bail!("there is no place for the checksums"),
    };
    let mut state = State::open(dir)?;
    let mut done = Done::default();
    let (mut rate, mut compared) = (args.files.rate(), args.files.rate());
    let user = geteuid().as_raw();
    let mut owners = Owners::new();
    let mine = |chosen: &Chosen| pool.privileged || chosen.owner.0 == user;
    let (found, counts) = look_at(&args.paths, &args.files, &mut state, &mut rate, &mut |chosen| {
        if !mine(chosen) {
            done.leave(&chosen.path, "belongs to another user", 0);
            return ControlFlow::Break(());
        }
        owners.insert(chosen.id, chosen.owner);
        ControlFlow::Continue(stop.count() == 0)
    })?;
    tell_errors(&found);
    for path in &counts.changing {
        done.leave(Path::new(path), "changed while it was read", 0);
    }
    let mut ended = (stop.count() > 0).then_some(Ended::Signal);
    let scope = pool.pool.host().config().dedup_scope;
    let mut passes = 0;
    if ended.is_none() {
        let bar = Reading::start();
        let why = args.files.rate.map_or("", |_| "(held to --rate)");
        let mut sharer = Sharer {
            files: Files::new(&pool),
            owners: &owners,
            dry_run: args.dry_run,
            done: &mut done,
            rate: &mut compared,
        };
        for group in groups(scope, &owners) {
            let runs = match search(args, dir, &mut state, &owners, group, &stop) {
                Ok(Some((runs, more))) => {
                    passes += more;
                    runs
                }
                Ok(None) => {
                    ended = Some(Ended::Signal);
                    break;
                }
                Err(error) => {
                    ended = Some(Ended::Other(error));
                    break;
                }
            };
            ended = sharer.share_all(&state, runs, &mut |shared| {
                bar.at(shared, why);
                stop.count() > 0
            });
            if ended.is_some() {
                break;
            }
        }
        if let Some(lost) = sharer.files.close_all() {
            ended = ended.or(Some(Ended::from(lost)));
        }
    }
    tell(args, &counts, &done, passes, &rate, ended.is_none());
    let Some(ended) = ended else { return pool.end() };
    let again = "what is shared stays shared, nothing is lost, and another run goes on from here";
    match ended {
        Ended::Signal => bail!("stopped by a signal; {again}"),
        Ended::Other(error) => Err(error),
        Ended::OldFormat => bail!(
            "the pool is of an older format, which has no shared blocks; stop it and run `varve upgrade {}`",
            pool.pool.dir().display()
        ),
        Ended::NoSpace(path) => bail!(
            "no space was left for the records of shared blocks at {}; {again}",
            path.display()
        ),
        Ended::Lost(path, errno) => bail!(
            "the pool's daemon went away or failed at {}: {}; {again} (see `varve status {}`)",
            path.display(),
            std::io::Error::from_raw_os_error(errno.0),
            pool.pool.dir().display()
        ),
    }
}

/// A directory that goes with its value.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> anyhow::Result<Self> {
        let name = format!("varve-dedup-{}-{}", geteuid().as_raw(), std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::DirBuilder::new()
            .create(&dir)
            .with_context(|| format!("cannot make {}; --state names another place", dir.display()))?;
        let made = Self(dir);
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&made.0, std::fs::Permissions::from_mode(0o700))?;
        Ok(made)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Files that are searched together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Together {
    All,
    User(u32),
    Group(u32),
}

impl Together {
    fn has(self, (uid, gid): (u32, u32)) -> bool {
        match self {
            Self::All => true,
            Self::User(user) => user == uid,
            Self::Group(group) => group == gid,
        }
    }
}

/// Files that may share with each other under this scope: what one group has shared, the next one finds shared.
fn groups(scope: DedupScope, owners: &Owners) -> BTreeSet<Together> {
    let users = owners.values().map(|(uid, _)| Together::User(*uid));
    match scope {
        DedupScope::User => users.collect(),
        DedupScope::Group => {
            let groups = owners.values().map(|(_, gid)| Together::Group(*gid));
            groups.chain(users).collect()
        }
        DedupScope::Pool => BTreeSet::from([Together::All]),
    }
}

/// Finds the runs of a group: a file of them, in order, and the number of passes. `None`: stopped.
fn search(
    args: &ApplyArgs,
    dir: &Path,
    state: &mut State,
    owners: &Owners,
    group: Together,
    stop: &Stop,
) -> anyhow::Result<Option<(Runs, u32)>> {
    let settings = SearchSettings {
        memory_bytes: memory(args.memory)?,
        min_run_blocks: args.min_run,
        spill_dir: dir.to_owned(),
    };
    let mut runs = Runs::new(dir)?;
    let mut failed = None;
    let mut source = state.only(|kept| owners.get(&kept.id()).is_some_and(|owner| group.has(*owner)));
    let mut progress = |_| match stop.count() {
        0 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    };
    let found = candidates::find(&mut source, &settings, &mut progress, &mut |run| {
        if let Err(error) = runs.put(&run) {
            failed.get_or_insert(error);
        }
    });
    match (found, failed) {
        (_, Some(error)) => Err(error).context("cannot keep the runs that were found"),
        (Err(FindError::Stopped), None) => Ok(None),
        (Err(error), None) => Err(error.into()),
        (Ok(found), None) => Ok(Some((runs, found.passes))),
    }
}

/// Runs in a file without a name.
struct Runs {
    out: BufWriter<File>,
    count: u64,
}

impl Runs {
    fn new(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join("runs");
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .and_then(|file| std::fs::remove_file(&path).map(|()| file))
            .with_context(|| format!("cannot keep runs in {}", dir.display()))?;
        Ok(Self {
            out: BufWriter::new(file),
            count: 0,
        })
    }

    fn put(&mut self, run: &Run) -> std::io::Result<()> {
        self.count += 1;
        for word in [run.at, run.same_as, run.blocks] {
            self.out.write_all(&word.to_le_bytes())?;
        }
        Ok(())
    }

    fn into_reader(self) -> std::io::Result<(BufReader<File>, u64)> {
        let mut file = self.out.into_inner().map_err(|error| error.into_error())?;
        file.seek(SeekFrom::Start(0))?;
        Ok((BufReader::new(file), self.count))
    }
}

fn next_run(from: &mut impl Read) -> std::io::Result<Run> {
    let mut word = || {
        let mut bytes = [0; 8];
        from.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
    };
    Ok(Run {
        at: word()?,
        same_as: word()?,
        blocks: word()?,
    })
}

/// A stretch of a run, in bytes from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) at: u64,
    pub(super) len: u64,
    /// Of it, blocks of the target that no other extent names.
    pub(super) alone: u64,
}

/// Shares runs.
struct Sharer<'a> {
    files: Files<'a>,
    owners: &'a Owners,
    dry_run: bool,
    done: &'a mut Done,
    rate: &'a mut ReadRate,
}

/// Who keeps its blocks, and who gets them.
struct Sides<'f> {
    from: (&'f Open, u64),
    to: (&'f Open, u64),
}

impl Sharer<'_> {
    /// Shares all runs, until `look` says that it must stop.
    fn share_all(&mut self, state: &State, runs: Runs, look: &mut dyn FnMut(u64) -> bool) -> Option<Ended> {
        let other = |error: std::io::Error| {
            Some(Ended::Other(
                anyhow::Error::new(error).context("cannot read the runs that were found"),
            ))
        };
        let (mut reader, count) = match runs.into_reader() {
            Ok(reader) => reader,
            Err(error) => return other(error),
        };
        for _ in 0..count {
            if look(self.done.shared + self.done.already) {
                return Some(Ended::Signal);
            }
            match next_run(&mut reader) {
                Ok(run) => {
                    self.done.runs += 1;
                    if let Some(ended) = self.share_run(state, &run, look) {
                        return Some(ended);
                    }
                }
                Err(error) => return other(error),
            }
        }
        None
    }

    fn share_run(&mut self, state: &State, run: &Run, look: &mut dyn FnMut(u64) -> bool) -> Option<Ended> {
        let (Some(at), Some(same)) = (state.place(run.at), state.place(run.same_as)) else {
            return None;
        };
        let (Some(file), Some(source)) = (state.file_at(run.at), state.file_at(run.same_as)) else {
            return None;
        };
        let mut len = (run.blocks * BLOCK).min(at.left_bytes).min(same.left_bytes);
        // A part of a block is shared only where both files end.
        if !len.is_multiple_of(BLOCK) && at.left_bytes != same.left_bytes {
            len = len / BLOCK * BLOCK;
        }
        for kept in [file, source] {
            match self.files.check(kept) {
                Verdict::Fine => {}
                Verdict::Left(why) => {
                    self.done.leave(&kept.path, &why, len);
                    return None;
                }
                Verdict::Lost(lost) => return Some(lost.into()),
            }
        }
        // Ranges of one file that overlap are shared in steps as long as the distance.
        let apart = match file.id() == source.id() {
            true => at.offset_bytes.abs_diff(same.offset_bytes),
            false => len,
        };
        if apart == 0 {
            return None;
        }
        for start in (0..len).step_by(usize::try_from(apart).unwrap_or(usize::MAX)) {
            let (offset, source_offset) = (at.offset_bytes + start, same.offset_bytes + start);
            let ids = (file.id(), source.id());
            if let Some(ended) = self.share_range(ids, (offset, source_offset), apart.min(len - start), look)
            {
                return Some(ended);
            }
        }
        None
    }

    /// Shares what is not shared yet in two ranges that do not overlap.
    fn share_range(
        &mut self,
        (to_id, from_id): ((u64, u64), (u64, u64)),
        (offset, source_offset): (u64, u64),
        len: u64,
        look: &mut dyn FnMut(u64) -> bool,
    ) -> Option<Ended> {
        let (to, from) = (self.files.get(to_id)?, self.files.get(from_id)?);
        let sides = Sides {
            from: (from, source_offset),
            to: (to, offset),
        };
        let stretches = match self.files.not_shared_yet(sides.from, sides.to, len) {
            Ok(stretches) => stretches,
            Err(errno) => return refused(self.done, &sides, errno, len),
        };
        let left: u64 = stretches.iter().map(|stretch| stretch.len).sum();
        self.done.already += len - left.min(len);
        let same_user =
            self.owners.get(&to_id).map(|own| own.0) == self.owners.get(&from_id).map(|own| own.0);
        for stretch in stretches {
            if self.dry_run {
                self.done.shared += stretch.len;
                self.done.freed += stretch.alone;
                continue;
            }
            for step in (0..stretch.len).step_by(STEP as usize) {
                if look(self.done.shared + self.done.already) {
                    return Some(Ended::Signal);
                }
                let bytes = STEP.min(stretch.len - step);
                self.rate.take(bytes);
                match self
                    .files
                    .dedupe(&sides.from, &sides.to, stretch.at + step, bytes, same_user)
                {
                    Ok(true) => {
                        self.done.shared += bytes;
                        self.done.freed += stretch.alone.min(stretch.len) * bytes / stretch.len;
                        self.done.files.extend([to_id, from_id]);
                    }
                    Ok(false) => self.done.differing += bytes,
                    Err(Errno(libc::EOPNOTSUPP)) if same_user => return Some(Ended::OldFormat),
                    Err(errno) => {
                        if let Some(ended) = refused(self.done, &sides, errno, stretch.len - step) {
                            return Some(ended);
                        }
                        break;
                    }
                }
            }
        }
        None
    }
}

impl From<Ends> for Ended {
    fn from(ends: Ends) -> Self {
        Self::Lost(ends.path, ends.errno)
    }
}

/// What a refusal means for the file, and for the whole.
fn refused(done: &mut Done, sides: &Sides<'_>, errno: Errno, bytes: u64) -> Option<Ended> {
    let path = &sides.to.0.path;
    let why = match errno.0 {
        libc::ENOSPC => return Some(Ended::NoSpace(path.clone())),
        libc::EPERM => {
            "it belongs to another user than the file with the same bytes (dedup_scope in varve.toml)"
        }
        libc::EACCES => "it may not be read or written",
        libc::EOPNOTSUPP => "its bytes are in NVM, and belong to several users",
        libc::EMLINK => "a block has as many owners as a block can have",
        libc::EINVAL => "changed while it was shared",
        libc::ENOENT | libc::ESTALE => "it is gone",
        _ => return Some(Ended::Lost(path.clone(), errno)),
    };
    done.leave(path, why, bytes);
    None
}

/// Returns the stretches of two ranges that begin at the blocks `from` and `to` and have `blocks` blocks in which
/// they do not name the same numbers. Holes of either are left out.
pub(super) fn stretches(
    from: (&[OwnedBlocks], u64),
    to: (&[OwnedBlocks], u64),
    blocks: u64,
) -> Vec<(std::ops::Range<u64>, u64)> {
    let mut found: Vec<(std::ops::Range<u64>, u64)> = Vec::new();
    let (mut source, mut target) = (from.0.iter().peekable(), to.0.iter().peekable());
    let place = |part: &OwnedBlocks, first: u64| {
        let at = part.file_block.0 as i64 - first as i64;
        (at, at + i64::from(part.blocks))
    };
    while let (Some(one), Some(other)) = (source.peek(), target.peek()) {
        let ((one_at, one_end), (other_at, other_end)) = (place(one, from.1), place(other, to.1));
        let (start, end) = (
            one_at.max(other_at).max(0),
            one_end.min(other_end).min(blocks as i64),
        );
        if start < end {
            let number = |part: &OwnedBlocks, at: i64| part.number.map(|first| first + (start - at) as u64);
            let (here, there) = (number(one, one_at), number(other, other_at));
            if here.is_none() || here != there {
                let (start, end) = (start as u64, end as u64);
                let alone = if other.owners == 1 { end - start } else { 0 };
                match found.last_mut() {
                    Some((range, sum)) if range.end == start => {
                        range.end = end;
                        *sum += alone;
                    }
                    _ => found.push((start..end, alone)),
                }
            }
        }
        if one_end <= other_end {
            source.next();
        } else {
            target.next();
        }
    }
    found
}

fn tell(args: &ApplyArgs, counts: &Counts, done: &Done, passes: u32, rate: &ReadRate, complete: bool) {
    let files = counts.unchanged + counts.read;
    if args.json {
        let left = |(path, why): (&PathBuf, &String)| json!({"path": path.to_string_lossy(), "why": why});
        let told = json!({
            "dry_run": args.dry_run,
            "files": files,
            "files_read": counts.read,
            "bytes_read": rate.bytes(),
            "passes": passes,
            "runs": done.runs,
            "shared_bytes": done.shared,
            "freed_bytes": done.freed,
            "files_sharing": done.files.len(),
            "already_shared_bytes": done.already,
            "differing_bytes": done.differing,
            "left_bytes": done.left,
            "left": done.reasons.iter().map(left).collect::<Vec<_>>(),
            "complete": complete,
        });
        return out::line(&format!("{told:#}"));
    }
    for (path, why) in &done.reasons {
        out::line(&format!("left {}: {why}", path.display()));
    }
    out::line(&format!(
        "{files} files: {} read ({} files); passes: {passes}",
        size::show(rate.bytes()),
        counts.read
    ));
    let what = if args.dry_run {
        "look the same and could be shared"
    } else {
        "shared"
    };
    out::line(&format!(
        "{} {what}, which {} {}; {} were shared already",
        size::show(done.shared),
        if args.dry_run { "would free" } else { "freed" },
        size::show(done.freed),
        size::show(done.already),
    ));
    if done.differing > 0 {
        out::line(&format!(
            "{} had equal checksums and different bytes",
            size::show(done.differing)
        ));
    }
    if !done.reasons.is_empty() {
        out::line(&format!(
            "left: {} in {} files",
            size::show(done.left),
            done.reasons.len()
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::{DedupScope, Owners, Together, groups, stretches};
    use varve_format::{FileBlock, Tier};
    use varve_libfs::OwnedBlocks;

    fn part(at: u64, blocks: u32, number: Option<u64>) -> OwnedBlocks {
        OwnedBlocks {
            file_block: FileBlock(at),
            blocks,
            number,
            owners: if number.is_some() { 2 } else { 1 },
            tier: Tier::Nvm,
        }
    }

    #[test]
    fn only_what_does_not_name_equal_numbers_is_to_be_shared() {
        let source = [part(10, 4, None), part(14, 6, Some(100)), part(25, 5, Some(7))];
        let target = [
            part(50, 2, Some(300)),
            part(52, 3, None),
            part(55, 3, Some(101)),
            part(58, 1, Some(9)),
            // A hole; then equal numbers at another place.
            part(66, 4, Some(8)),
        ];
        let found = stretches((&source, 10), (&target, 50), 20);
        // 4..5 of the target is plain, and of the source shared; 5..8 is shared with each other already.
        assert_eq!(found, [(0..5, 3), (8..9, 0)]);
        assert_eq!(stretches((&source, 10), (&target, 50), 2), [(0..2, 0)]);
        assert_eq!(stretches((&[], 10), (&target, 50), 20), []);
    }

    #[test]
    fn groups_of_files_are_those_that_the_scope_admits() {
        let owners = Owners::from([((1, 1), (5, 50)), ((1, 2), (5, 60)), ((1, 3), (6, 60))]);
        let all = |scope| groups(scope, &owners).into_iter().collect::<Vec<_>>();
        assert_eq!(all(DedupScope::User), [Together::User(5), Together::User(6)]);
        assert_eq!(all(DedupScope::Pool), [Together::All]);
        assert_eq!(
            all(DedupScope::Group),
            [
                Together::User(5),
                Together::User(6),
                Together::Group(50),
                Together::Group(60)
            ]
        );
    }
}
