//! Workloads as text, as a failure prints them and `VARVE_CRASH_SCRIPT` passes them back. Owns both
//! directions; refuses to know the effects.

use super::{Act, Effort, Script};
use crate::ops::{Op, Path};
use crate::rig::{Policy, Shape};
use std::fmt;
use std::str::FromStr;
use varve_format::Tier;
use varve_media::sim::SimMedium;

/// A text that is not a workload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} is not understood: {text}")]
pub struct NotAScript {
    what: &'static str,
    text: String,
}

fn no(what: &'static str, text: &str) -> NotAScript {
    NotAScript {
        what,
        text: text.to_owned(),
    }
}

fn show(path: &Path) -> String {
    format!("/{}", path.join("/"))
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Op(op) => write!(f, "{op}"),
            Self::By(session, op) => write!(f, "{session}: {op}"),
            Self::Beside(session, op) => write!(f, "{session} beside: {op}"),
            Self::Digest => f.write_str("digest"),
            Self::DigestBeside => f.write_str("digest-beside"),
            Self::Rest => f.write_str("rest"),
            Self::Tick => f.write_str("tick"),
            Self::Place => f.write_str("place"),
            Self::Pin(tier) => write!(f, "pin {}", tier.name()),
            Self::PlaceShared(Some(tier)) => write!(f, "place-shared {}", tier.name()),
            Self::PlaceShared(None) => f.write_str("unplace-shared"),
            Self::Evacuate(tier) => write!(f, "evacuate {}", tier.name()),
            Self::AddDevice(tier) => write!(f, "add-device {}", tier.name()),
            Self::RemoveDevice(name) => write!(f, "remove-device {name}"),
            Self::Checkpoint => f.write_str("checkpoint"),
            Self::Seal => f.write_str("seal-all"),
            Self::SealOne(session) => write!(f, "seal {session}"),
            Self::Amid(stores) => write!(f, "amid {stores}"),
            Self::Die(session) => write!(f, "die {session}"),
            Self::Remount(session) => write!(f, "remount {session}"),
            Self::Freeze(session) => write!(f, "freeze {session}"),
            Self::Thaw(session) => write!(f, "thaw {session}"),
            Self::Hold(path) => write!(f, "hold {}", show(path)),
            Self::Read(session, path) => write!(f, "read {session} {}", show(path)),
            Self::LetGo => f.write_str("let-go"),
            Self::Restart => f.write_str("restart"),
        }
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |acts: &[Act]| acts.iter().map(Act::to_string).collect::<Vec<_>>().join(", ");
        write!(f, "[{}] then [{}]", list(&self.before), list(&self.acts))
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            medium,
            nvm_bytes,
            journal_bytes,
            blocks_bytes,
            policy,
            verify_nvm,
        } = self;
        write!(
            f,
            "{medium:?} {policy:?} nvm={nvm_bytes} journal={journal_bytes} blocks={blocks_bytes} \
            verify={verify_nvm}"
        )
    }
}

impl fmt::Display for Effort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            every_point,
            torn,
            stride,
            seeds,
            combinations,
            recovery_stride,
            seed,
        } = self;
        write!(
            f,
            "every-point={every_point} torn={torn} stride={stride} seeds={seeds} \
            combinations={combinations} recovery={recovery_stride} seed={seed}"
        )
    }
}

/// The words of a text, one after the other.
struct Words<'t> {
    what: &'static str,
    text: &'t str,
    rest: std::str::Split<'t, char>,
}

impl<'t> Words<'t> {
    fn of(what: &'static str, text: &'t str) -> Self {
        Self {
            what,
            text,
            rest: text.split(' '),
        }
    }

    fn no(&self) -> NotAScript {
        no(self.what, self.text)
    }

    fn word(&mut self) -> Result<&'t str, NotAScript> {
        let word = self.rest.next().filter(|word| !word.is_empty());
        word.ok_or_else(|| self.no())
    }

    fn value<T: FromStr>(&mut self) -> Result<T, NotAScript> {
        let word = self.word()?;
        word.parse().map_err(|_| self.no())
    }

    fn tier(&mut self) -> Result<Tier, NotAScript> {
        let word = self.word()?;
        Tier::named(word).ok_or_else(|| self.no())
    }

    /// The devices of slower tiers.
    fn device(&mut self) -> Result<&'static str, NotAScript> {
        let word = self.word()?;
        let known = ["ssd", "ssd-2", "hdd", "hdd-2"].into_iter();
        known.clone().find(|name| *name == word).ok_or_else(|| self.no())
    }

    /// Parses the value behind `name=`.
    fn field<T: FromStr>(&mut self, name: &str) -> Result<T, NotAScript> {
        let word = self.word()?;
        let value = word.strip_prefix(name).and_then(|rest| rest.strip_prefix('='));
        value.and_then(|text| text.parse().ok()).ok_or_else(|| self.no())
    }

    /// Names live as long as the program: workloads are few and small.
    fn path(&mut self) -> Result<Path, NotAScript> {
        let word = self.word()?;
        let names = word.strip_prefix('/').ok_or_else(|| self.no())?;
        let kept = |name: &str| &*Box::leak(name.to_owned().into_boxed_str());
        Ok(names
            .split('/')
            .filter(|name| !name.is_empty())
            .map(kept)
            .collect())
    }

    fn end<T>(mut self, found: T) -> Result<T, NotAScript> {
        match self.rest.next() {
            None => Ok(found),
            Some(_) => Err(self.no()),
        }
    }
}

/// Parses the fields of an operation on a range, in the order in which they are written.
fn range(words: &mut Words<'_>) -> Result<(Path, u64, u64), NotAScript> {
    Ok((words.path()?, words.field("offset")?, words.field("len")?))
}

fn together(text: &str) -> Option<Result<Op, NotAScript>> {
    let inner = text.strip_prefix("together [")?.strip_suffix(']')?;
    let ops: Result<_, _> = inner.split("; ").map(str::parse).collect();
    Some(ops.map(Op::Together))
}

impl FromStr for Op {
    type Err = NotAScript;

    fn from_str(text: &str) -> Result<Self, NotAScript> {
        if let Some(all) = together(text) {
            return all;
        }
        let mut words = Words::of("an operation", text);
        let op = match words.word()? {
            "create" => Self::Create(words.path()?),
            "mkdir" => Self::Mkdir(words.path()?),
            "symlink" => Self::Symlink(words.path()?),
            "mkfifo" => Self::Mkfifo(words.path()?),
            "mknod" => Self::Mknod(words.path()?),
            "unlink" => Self::Unlink(words.path()?),
            "rmdir" => Self::Rmdir(words.path()?),
            "removexattr" => Self::RemoveXattr(words.path()?),
            "fsync" => Self::Fsync(words.path()?),
            "link" => Self::Link(words.path()?, words.path()?),
            "rename" => Self::Rename(words.path()?, words.path()?),
            "rename-noreplace" => Self::RenameNoReplace(words.path()?, words.path()?),
            "exchange" => Self::Exchange(words.path()?, words.path()?),
            kind => with_numbers(kind, &mut words)?,
        };
        words.end(op)
    }
}

fn with_numbers(kind: &str, words: &mut Words<'_>) -> Result<Op, NotAScript> {
    Ok(match kind {
        "tmpfile" => Op::Tmpfile {
            path: words.path()?,
            len: words.field("len")?,
            seed: words.field("seed")?,
        },
        "write" => Op::Write {
            path: words.path()?,
            offset: words.field("offset")?,
            len: words.field("len")?,
            seed: words.field("seed")?,
        },
        "append" => Op::Append {
            path: words.path()?,
            len: words.field("len")?,
            seed: words.field("seed")?,
        },
        "truncate" => Op::Truncate {
            path: words.path()?,
            size: words.field("size")?,
        },
        "clone" => Op::Clone {
            from: words.path()?,
            to: words.path()?,
            offset: words.field("offset")?,
            to_offset: words.field("to-offset")?,
            len: words.field("len")?,
        },
        "dedupe" => Op::Dedupe {
            from: words.path()?,
            to: words.path()?,
            offset: words.field("offset")?,
            to_offset: words.field("to-offset")?,
            len: words.field("len")?,
        },
        "dedupe-blocks" => Op::DedupeBlocks {
            from: words.path()?,
            to: words.path()?,
            offset: words.field("offset")?,
            len: words.field("len")?,
        },
        "unshare" => range(words).map(|(path, offset, len)| Op::Unshare { path, offset, len })?,
        "defrag" => range(words).map(|(path, offset, len)| Op::Defrag { path, offset, len })?,
        "punch" => range(words).map(|(path, offset, len)| Op::Punch { path, offset, len })?,
        "zero" => range(words).map(|(path, offset, len)| Op::Zero { path, offset, len })?,
        "zero-keep" => range(words).map(|(path, offset, len)| Op::ZeroKeep { path, offset, len })?,
        "allocate" => range(words).map(|(path, offset, len)| Op::Allocate { path, offset, len })?,
        "allocate-keep" => range(words).map(|(path, offset, len)| Op::AllocateKeep { path, offset, len })?,
        "chmod" => {
            let path = words.path()?;
            let mode = words.word()?;
            Op::Chmod(path, u32::from_str_radix(mode, 8).map_err(|_| words.no())?)
        }
        "chown" => {
            let path = words.path()?;
            let (uid, gid) = words.word()?.split_once(':').ok_or_else(|| words.no())?;
            let number = |text: &str| text.parse().map_err(|_| words.no());
            Op::Chown(path, number(uid)?, number(gid)?)
        }
        "utimens" => Op::Utimens {
            path: words.path()?,
            secs: words.value()?,
        },
        "setxattr" => Op::SetXattr(words.path()?, words.field("len")?, words.field("seed")?),
        _ => return Err(words.no()),
    })
}

impl FromStr for Act {
    type Err = NotAScript;

    fn from_str(text: &str) -> Result<Self, NotAScript> {
        if let Some((who, op)) = text.split_once(": ") {
            if let Ok(session) = who.parse() {
                return Ok(Self::By(session, op.parse()?));
            }
            if let Some(Ok(session)) = who.strip_suffix(" beside").map(str::parse) {
                return Ok(Self::Beside(session, op.parse()?));
            }
        }
        let mut words = Words::of("an act", text);
        let act = match words.word()? {
            "digest" => Self::Digest,
            "digest-beside" => Self::DigestBeside,
            "rest" => Self::Rest,
            "tick" => Self::Tick,
            "place" => Self::Place,
            "pin" => Self::Pin(words.tier()?),
            "place-shared" => Self::PlaceShared(Some(words.tier()?)),
            "unplace-shared" => Self::PlaceShared(None),
            "evacuate" => Self::Evacuate(words.tier()?),
            "add-device" => Self::AddDevice(words.tier()?),
            "remove-device" => Self::RemoveDevice(words.device()?),
            "checkpoint" => Self::Checkpoint,
            "seal-all" => Self::Seal,
            "seal" => Self::SealOne(words.value()?),
            "amid" => Self::Amid(words.value()?),
            "die" => Self::Die(words.value()?),
            "remount" => Self::Remount(words.value()?),
            "freeze" => Self::Freeze(words.value()?),
            "thaw" => Self::Thaw(words.value()?),
            "hold" => Self::Hold(words.path()?),
            "read" => Self::Read(words.value()?, words.path()?),
            "let-go" => Self::LetGo,
            "restart" => Self::Restart,
            _ => return text.parse().map(Self::Op),
        };
        words.end(act)
    }
}

impl FromStr for Script {
    type Err = NotAScript;

    fn from_str(text: &str) -> Result<Self, NotAScript> {
        let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        let parts = inner.and_then(|inner| inner.split_once("] then ["));
        let (before, acts) = parts.ok_or_else(|| no("a script", text))?;
        let list = |text: &str| -> Result<Vec<Act>, NotAScript> {
            let acts = text.split(", ").filter(|act| !act.is_empty());
            acts.map(str::parse).collect()
        };
        Ok(Self {
            before: list(before)?,
            acts: list(acts)?,
        })
    }
}

impl FromStr for Shape {
    type Err = NotAScript;

    fn from_str(text: &str) -> Result<Self, NotAScript> {
        let mut words = Words::of("a pool", text);
        let (medium, policy) = (words.word()?, words.word()?);
        let media = [SimMedium::Dax, SimMedium::File, SimMedium::Shm];
        let named = |medium: &SimMedium| format!("{medium:?}");
        let shape = Self {
            medium: media
                .into_iter()
                .find(|known| named(known) == medium)
                .ok_or_else(|| words.no())?,
            policy: Policy::ALL
                .into_iter()
                .find(|known| format!("{known:?}") == policy)
                .ok_or_else(|| words.no())?,
            nvm_bytes: words.field("nvm")?,
            journal_bytes: words.field("journal")?,
            blocks_bytes: words.field("blocks")?,
            verify_nvm: words.field("verify")?,
        };
        words.end(shape)
    }
}

impl FromStr for Effort {
    type Err = NotAScript;

    fn from_str(text: &str) -> Result<Self, NotAScript> {
        let mut words = Words::of("an effort", text);
        let effort = Self {
            every_point: words.field("every-point")?,
            torn: words.field("torn")?,
            stride: words.field("stride")?,
            seeds: words.field("seeds")?,
            combinations: words.field("combinations")?,
            recovery_stride: words.field("recovery")?,
            seed: words.field("seed")?,
        };
        words.end(effort)
    }
}

/// Formats a job as text.
pub(super) fn job_text((script, shape, effort): &super::Job) -> String {
    format!("{script} on {shape} with {effort}")
}

impl Script {
    /// Parses a workload, its pool and the extent of its exploration, as a failure prints them.
    ///
    /// # Errors
    /// The part that cannot be parsed.
    pub fn job_from(text: &str) -> Result<super::Job, NotAScript> {
        let parts = text
            .split_once(" on ")
            .and_then(|(script, rest)| rest.split_once(" with ").map(|rest| (script, rest)));
        let (script, (shape, effort)) = parts.ok_or_else(|| no("a job", text))?;
        Ok((script.parse()?, shape.parse()?, effort.parse()?))
    }
}

#[cfg(test)]
mod tests {
    use super::{Script, job_text};
    use crate::crash::{Act, Effort, Flavour, Strain, shared};
    use crate::ops::Op;
    use crate::rig::{Policy, Shape};
    use crate::workload;
    use varve_format::Tier;
    use varve_media::sim::SimMedium;

    #[test]
    fn workload_is_read_back_as_it_was_written() {
        let singles = Script {
            before: vec![
                Act::Hold(vec!["d", "f"]),
                Act::LetGo,
                Act::Pin(Tier::Hdd),
                Act::PlaceShared(Some(Tier::Ssd)),
                Act::PlaceShared(None),
                Act::Evacuate(Tier::Ssd),
                Act::AddDevice(Tier::Hdd),
                Act::RemoveDevice("ssd-2"),
                Act::Seal,
                Act::Read(1, vec!["f"]),
            ],
            acts: [
                vec![Act::Amid(3), Act::Op(Op::Together(workload::setup()))],
                workload::singles().into_iter().map(Act::Op).collect(),
            ]
            .concat(),
        };
        let shared_runs = (0..40).map(|seed| shared(seed, 3, 30, Flavour::All));
        let strains = Strain::ALL.iter().map(|strain| strain.script(3));
        for (index, script) in std::iter::once(singles)
            .chain(shared_runs)
            .chain(strains)
            .enumerate()
        {
            let medium = [SimMedium::Dax, SimMedium::File, SimMedium::Shm][index % 3];
            let shape = Shape::tiny(medium).with(Policy::ALL[index % Policy::ALL.len()]);
            let effort = Effort::all(index as u64);
            let job = (script, shape, effort);
            assert_eq!(Script::job_from(&job_text(&job)).as_ref(), Ok(&job));
        }
    }

    #[test]
    fn text_that_is_no_workload_is_refused_with_the_part_that_is_not_understood() {
        for (text, part) in [
            ("[create /f] then [explode /f]", "explode /f"),
            ("[create /f] then [create /f twice]", "create /f twice"),
            ("[create f] then []", "create f"),
            ("[] then [seal]", "seal"),
            ("create /f", "create /f"),
        ] {
            let said = text.parse::<Script>().map_err(|error| error.to_string());
            assert!(said.as_ref().is_err_and(|said| said.ends_with(part)), "{said:?}");
        }
    }
}
