//! The search for runs of equal-looking blocks, in one set of files after the other, and the files that it
//! keeps: the runs that were found, and a state that is thrown away. Shares nothing.

use super::interruption::Interruption;
use super::open_files::FileId;
use crate::dedup::args::ApplyArgs;
use crate::dedup::memory;
use crate::signals::Stop;
use anyhow::Context;
use rustix::process::geteuid;
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use varve_kernelfs::DedupScope;
use varve_similarity::candidates::{self, FindError, Run, SearchSettings};
use varve_similarity::files::State;

/// User and group of each file that is searched.
pub type Owners = HashMap<FileId, (u32, u32)>;

/// A set of files that may share blocks with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SharingSet {
    All,
    User(u32),
    Group(u32),
}

impl SharingSet {
    fn has(self, (uid, gid): (u32, u32)) -> bool {
        match self {
            Self::All => true,
            Self::User(user) => user == uid,
            Self::Group(group) => group == gid,
        }
    }
}

/// Returns the sets of files under this scope. A file may be in two: what was shared in the one is found
/// shared in the other.
pub fn sharing_sets(scope: DedupScope, owners: &Owners) -> BTreeSet<SharingSet> {
    let users = owners.values().map(|(uid, _)| SharingSet::User(*uid));
    match scope {
        DedupScope::User => users.collect(),
        DedupScope::Group => {
            let groups = owners.values().map(|(_, gid)| SharingSet::Group(*gid));
            groups.chain(users).collect()
        }
        DedupScope::Pool => BTreeSet::from([SharingSet::All]),
    }
}

/// Finds the runs of a set; returns them, in order, and the number of passes over the state.
pub fn search(
    args: &ApplyArgs,
    dir: &Path,
    state: &mut State,
    owners: &Owners,
    set: SharingSet,
    stop: &Stop,
) -> Result<(RunFile, u32), Interruption> {
    let settings = SearchSettings {
        memory_bytes: memory(args.memory)?,
        min_run_blocks: args.min_run,
        spill_dir: dir.to_owned(),
    };
    let mut runs = RunFile::new(state)?;
    let mut failed = None;
    let mut source = state.only(|kept| owners.get(&kept.id()).is_some_and(|owner| set.has(*owner)));
    let mut progress = |_| match stop.count() {
        0 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    };
    let found = candidates::find(&mut source, &settings, &mut progress, &mut |run| {
        if let Err(error) = runs.put(&run) {
            failed.get_or_insert(error);
        }
    });
    if let Some(error) = failed {
        return Err(anyhow::Error::new(error)
            .context("cannot keep the runs that were found")
            .into());
    }
    match found {
        Ok(found) => Ok((runs, found.passes)),
        Err(FindError::Stopped) => Err(Interruption::Signal),
        Err(error) => Err(Interruption::Error(error.into())),
    }
}

/// Runs in a file without a name.
pub struct RunFile {
    out: BufWriter<File>,
    count: u64,
}

impl RunFile {
    fn new(state: &State) -> anyhow::Result<Self> {
        let file = state
            .temporary()
            .context("cannot keep runs beside the state of the search")?;
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

    /// Returns the runs in the order in which they were put.
    ///
    /// # Errors
    /// The file cannot be written or read.
    pub fn into_runs(self) -> std::io::Result<impl Iterator<Item = std::io::Result<Run>>> {
        let mut file = self.out.into_inner().map_err(|error| error.into_error())?;
        file.seek(SeekFrom::Start(0))?;
        let mut reader = BufReader::new(file);
        Ok((0..self.count).map(move |_| read_run(&mut reader)))
    }
}

fn read_run(from: &mut impl Read) -> std::io::Result<Run> {
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

/// A directory that is removed when the value is dropped.
pub struct TempDir(PathBuf);

impl TempDir {
    /// Makes a directory that only this user may use.
    pub fn new() -> anyhow::Result<Self> {
        let name = format!("varve-dedup-{}-{}", geteuid().as_raw(), std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&dir)
            .with_context(|| format!("cannot make {}; --state names another place", dir.display()))?;
        Ok(Self(dir))
    }
}

impl AsRef<Path> for TempDir {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::{DedupScope, Owners, SharingSet, sharing_sets};

    #[test]
    fn sets_of_files_are_those_that_the_scope_admits() {
        let owners = Owners::from([((1, 1), (5, 50)), ((1, 2), (5, 60)), ((1, 3), (6, 60))]);
        let all = |scope| sharing_sets(scope, &owners).into_iter().collect::<Vec<_>>();
        assert_eq!(all(DedupScope::User), [SharingSet::User(5), SharingSet::User(6)]);
        assert_eq!(all(DedupScope::Pool), [SharingSet::All]);
        assert_eq!(
            all(DedupScope::Group),
            [
                SharingSet::User(5),
                SharingSet::User(6),
                SharingSet::Group(50),
                SharingSet::Group(60)
            ]
        );
    }
}
