//! Crash exploration: a workload is recorded on the simulated machine; at each crash point the images that a
//! kill or a power cut may leave are recovered and judged. Owns the form of workloads and their recording;
//! the allowed states after a crash are in `oracle`, the extent of an exploration and the judgement in
//! `explore`. Refuses to know how recovery works.

mod explore;
mod generate;
mod oracle;
mod shrink;
mod strain;
mod text;

pub use explore::{Effort, Known, Tally, explore_all, tried};
pub use generate::{Flavour, Syncs, sequence, shared};
pub use shrink::{Shrunk, explore_or_shrink, shrink};
pub use strain::Strain;
pub use text::NotAScript;

use crate::helper::Helper;
use crate::lockstep;
use crate::lookup;
use crate::model::Model;
use crate::ops::{Op, Path};
use crate::rig::{MountNo, Rig, Shape};
use crate::target;
use oracle::History;
use std::fmt::Display;
use std::sync::Arc;
use varve_format::inode::InodeSlot;
use varve_format::{Ino, Pin, PinTo, PinnedBy, Tier};
use varve_ipc::{Admin, JobAct, Peer, Pinned, RemovalAct};
use varve_libfs::{Errno, Fs, OpenFile, OpenFlags};
use varve_media::BlockDevice;
use varve_media::sim::Recording;
use varve_store::DeviceUse;

/// One act of a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act {
    /// An operation of the first session.
    Op(Op),
    /// An operation of one of the sessions.
    By(usize, Op),
    /// An operation by a second thread of one of the sessions, in another lane of its log.
    Beside(usize, Op),
    /// Digests all logs.
    Digest,
    /// As [`Self::Digest`], by a second thread of the daemon.
    DigestBeside,
    /// Lets threads run until all of them wait: sessions carry out the daemon's requests.
    Rest,
    /// A tick of the daemon: it frees and forgets.
    Tick,
    /// A step of placement: data moves between tiers, and metadata is demoted.
    Place,
    /// An operator pins everything to a tier: the root directory, for what is made in it later, and each
    /// inode.
    Pin(Tier),
    /// An operator wants what all files share on a tier, or leaves it to the policy again.
    PlaceShared(Option<Tier>),
    /// An operator has a tier evacuated, or ends that.
    Evacuate(Tier),
    /// An operator gives a tier its second device, unless it has it.
    AddDevice(Tier),
    /// An operator has one of the devices `ssd`, `ssd-2`, `hdd`, `hdd-2` taken out, or ends that.
    RemoveDevice(&'static str),
    /// A checkpoint, which empties the journal.
    Checkpoint,
    /// All sessions are sealed by force and resume.
    Seal,
    /// One session is sealed by force; it resumes at its next use.
    SealOne(usize),
    /// The session whose client makes this number of stores to its log from now on is sealed just before the
    /// last of them: amid a call.
    Amid(u64),
    /// The client of a session dies; a new one takes its place.
    Die(usize),
    /// The session is ended properly; a new one takes its place.
    Remount(usize),
    /// The client is stopped: a waiter for its leases seals it when it is late.
    Freeze(usize),
    /// The stopped client continues.
    Thaw(usize),
    /// The first session opens a file and keeps it open.
    Hold(Path),
    /// A session reads a whole file: several times make it hot.
    Read(usize, Path),
    /// The first session closes all files that it keeps open.
    LetGo,
    /// The daemon is killed and starts again.
    Restart,
}

impl Act {
    /// Whether a session is sealed by the act itself, by the next daemon, or by a waiter for a stopped
    /// client.
    const fn seals(&self) -> bool {
        matches!(
            self,
            Self::Seal
                | Self::SealOne(_)
                | Self::Amid(_)
                | Self::Die(_)
                | Self::Remount(_)
                | Self::Restart
                | Self::Freeze(_)
        )
    }

    /// The activity that the act counts as.
    const fn activity(&self) -> &'static str {
        match self {
            Self::Op(Op::Fsync(_)) | Self::By(_, Op::Fsync(_)) | Self::Beside(_, Op::Fsync(_)) => "fsync",
            Self::Op(_) | Self::Beside(..) => "operation",
            Self::By(..) => "operation with leases passed on",
            Self::Digest | Self::DigestBeside => "digest",
            Self::Tick | Self::Rest | Self::Hold(_) | Self::LetGo => "tick",
            Self::Place => "migration",
            Self::Pin(_) | Self::PlaceShared(_) => "pinning",
            Self::Evacuate(_) => "evacuation",
            Self::AddDevice(_) => "addition of a device",
            Self::RemoveDevice(_) => "removal of a device",
            Self::Read(..) => "reading",
            Self::Checkpoint => "checkpoint",
            Self::Seal | Self::SealOne(_) | Self::Amid(_) | Self::Freeze(_) | Self::Thaw(_) => "seal",
            Self::Die(_) => "death of a client",
            Self::Remount(_) => "unmount",
            Self::Restart => "restart",
        }
    }
}

/// A workload, the pool that it runs on, and the extent of its exploration.
pub type Job = (Script, Shape, Effort);

/// The acts of a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    /// Acts before the recording.
    pub before: Vec<Act>,
    /// Recorded acts.
    pub acts: Vec<Act>,
}

/// A finished recording with the history that determines the allowed states.
pub struct Recorded {
    recording: Recording,
    shape: Shape,
    history: History,
    /// Last event of each act, and its activity.
    activities: Vec<(usize, &'static str)>,
    /// Whether sessions are sealed in it.
    seals: bool,
    /// The workload, for messages.
    what: String,
    /// Operations that the daemon did for the sessions.
    pub forwarded: u64,
    /// Sessions that were lost and continued.
    pub resumed: u64,
    /// Blocks moved between tiers.
    pub moved: u64,
    /// Of these, blocks moved to NVM.
    pub promoted: u64,
    /// Blocks of metadata demoted to slower tiers.
    pub cooled: u64,
}

fn say(error: impl Display) -> String {
    error.to_string()
}

/// Most blocks of metadata that a step of placement demotes.
const COOLED: u64 = 24;

/// A living client.
struct Client {
    fs: Fs,
    no: MountNo,
    /// Its second thread, if one was needed.
    second: Option<Helper>,
}

/// A pool with its clients, and the model of its content.
struct Stage {
    rig: Rig,
    clients: Vec<Client>,
    held: Vec<OpenFile>,
    model: Model,
    forwarded: u64,
    resumed: u64,
    moved: u64,
    promoted: u64,
    cooled: u64,
    /// Devices added.
    added: u8,
    /// A second thread of the daemon, if one was needed.
    second: Option<Helper>,
}

impl Script {
    /// Whether tiers get and lose devices.
    fn has_devices(&self) -> bool {
        let mut acts = self.before.iter().chain(&self.acts);
        acts.any(|act| matches!(act, Act::AddDevice(_) | Act::RemoveDevice(_)))
    }

    /// Number of sessions that take part.
    fn sessions(&self) -> usize {
        let used = self.before.iter().chain(&self.acts).map(|act| match act {
            Act::By(session, _)
            | Act::Beside(session, _)
            | Act::SealOne(session)
            | Act::Die(session)
            | Act::Remount(session)
            | Act::Freeze(session)
            | Act::Thaw(session)
            | Act::Read(session, _) => session + 1,
            _ => 1,
        });
        used.max().unwrap_or(1)
    }

    /// Runs the script on a new pool.
    ///
    /// # Errors
    /// The file system disagrees with the model although nothing crashed.
    pub fn record(&self, shape: Shape) -> Result<Recorded, String> {
        let what = format!("{self} on {shape}");
        self.record_as(shape, &what)
            .map_err(|why| format!("{what}\n  without a crash: {why}"))
    }

    fn record_as(&self, shape: Shape, what: &str) -> Result<Recorded, String> {
        let sessions = self.sessions();
        let rig = Rig::new(shape).map_err(say)?;
        if self.has_devices() {
            rig.attach_more();
        }
        let mut stage = Stage {
            rig,
            clients: Vec::new(),
            held: Vec::new(),
            model: Model::new(),
            forwarded: 0,
            resumed: 0,
            moved: 0,
            promoted: 0,
            cooled: 0,
            added: 0,
            second: None,
        };
        for _ in 0..sessions {
            stage.join()?;
        }
        for act in &self.before {
            stage.perform(act)?;
        }
        let world = stage.rig.world.clone();
        world.start_recording();
        let mut history = History::new(stage.model.clone(), sessions);
        let mut activities = Vec::new();
        for act in &self.acts {
            let begin = world.events_len();
            let before =
                matches!(act, Act::Op(_) | Act::By(..) | Act::Beside(..)).then(|| stage.model.clone());
            let done = stage.perform(act)?;
            let end = world.events_len();
            if let Some(before) = before {
                let (session, op) = match act {
                    Act::By(session, op) | Act::Beside(session, op) => (*session, op),
                    Act::Op(op) => (0, op),
                    _ => continue,
                };
                let touched = stage.model.changed(&before);
                history.operation(session, op, (begin, end), touched, stage.model.clone());
                if done && matches!(op, Op::Fsync(_)) {
                    history.durable(Some(session), end);
                }
            }
            match act {
                Act::Digest | Act::DigestBeside | Act::Seal | Act::Restart => history.durable(None, end),
                Act::SealOne(session) | Act::Die(session) | Act::Remount(session) => {
                    history.durable(Some(*session), end);
                }
                _ => {}
            }
            activities.push((end, act.activity()));
        }
        let recording = world.finish_recording();
        for index in 0..sessions {
            stage.rig.freeze(stage.clients[index].no, false);
        }
        let want = stage.model.tree();
        for (index, client) in stage.clients.iter().enumerate() {
            let got = target::tree(&client.fs).map_err(|errno| format!("session {index}: {errno:?}"))?;
            if want != got {
                let lines = target::difference(&want, &got).join("; ");
                return Err(format!("session {index} sees another tree: {lines}"));
            }
        }
        stage.held.clear();
        // A new client has no entries of its own in view.
        let got = target::tree(&stage.rig.mount().map_err(say)?);
        let got = got.map_err(|errno| format!("a new session: {errno:?}"))?;
        if want != got {
            let lines = target::difference(&want, &got).join("; ");
            return Err(format!("a new session sees another tree: {lines}"));
        }
        stage.rig.check().map_err(say)?;
        let clients = stage.clients.iter().map(|client| &client.fs);
        stage.rig.check_reservations(clients).map_err(say)?;
        (0..sessions).for_each(|index| stage.note(index));
        Ok(Recorded {
            recording,
            shape,
            history,
            activities,
            seals: self.acts.iter().any(Act::seals),
            what: what.to_owned(),
            forwarded: stage.forwarded,
            resumed: stage.resumed,
            moved: stage.moved,
            promoted: stage.promoted,
            cooled: stage.cooled,
        })
    }
}

impl Stage {
    fn join(&mut self) -> Result<(), String> {
        let (fs, no) = self.rig.mount_no().map_err(say)?;
        self.clients.push(Client { fs, no, second: None });
        Ok(())
    }

    /// Adds the counters of a client that is about to leave.
    fn note(&mut self, index: usize) {
        let counters = self.clients[index].fs.counters();
        self.forwarded += counters.forwarded;
        self.resumed += counters.resumed;
    }

    fn replace(&mut self, index: usize) -> Result<(), String> {
        self.join()?;
        self.clients.swap_remove(index);
        Ok(())
    }

    /// All inodes, as an operator names them.
    fn inodes(&self) -> Result<Vec<Pinned>, String> {
        let mut inodes = Vec::new();
        self.rig
            .kernel()
            .store()
            .for_each_inode_from(Ino(0), &mut |_, slot| {
                if let InodeSlot::Used(inode) = slot {
                    inodes.push(Pinned {
                        key: inode.attr.key,
                        name: None,
                    });
                }
                true
            })
            .map_err(say)?;
        Ok(inodes)
    }

    fn place_shared(&mut self, to: Option<Tier>) -> Result<(), String> {
        let files = self.inodes()?;
        let kernel = self.rig.kernel();
        kernel
            .admin_request(Peer::this_process(), Admin::PlaceShared { files, to })
            .map_err(say)
            .map(drop)
    }

    fn pin(&mut self, tier: Tier) -> Result<(), String> {
        let inodes = self.inodes()?;
        let kernel = self.rig.kernel();
        let pin = Pin {
            to: PinTo::Tier(tier),
            by: PinnedBy::Directory,
        };
        let asked = Admin::Pin {
            inodes,
            pin,
            over_own: true,
        };
        kernel
            .admin_request(Peer::this_process(), asked)
            .map_err(say)
            .map(drop)
    }

    fn evacuate(&mut self, tier: Tier) -> Result<(), String> {
        let kernel = self.rig.kernel();
        let row = kernel.store().evacuations().map_err(say)?[tier as usize];
        let asked = match row.is_job() {
            true => Admin::Job {
                id: row.job.get(),
                act: JobAct::Cancel,
            },
            false => Admin::Evacuate { tier, partly: true },
        };
        kernel
            .admin_request(Peer::this_process(), asked)
            .map_err(say)
            .map(drop)
    }

    fn add_device(&mut self, tier: Tier) -> Result<(), String> {
        let kernel = self.rig.kernel();
        let name = format!("{}-2", tier.name());
        let listed = kernel.store().device_list().map_err(say)?;
        if listed.iter().any(|device| device.name == name) {
            return Ok(());
        }
        let device = self
            .rig
            .world
            .block(&name)
            .ok_or("the machine has no such device")?;
        self.added += 1;
        let device = device as Arc<dyn BlockDevice>;
        let added = kernel.store().add_device(tier, &device, [self.added; 16]);
        added.map_err(say)
    }

    fn remove_device(&mut self, name: &str) -> Result<(), String> {
        let kernel = self.rig.kernel();
        let listed = kernel.store().device_list().map_err(say)?;
        let Some(found) = listed.iter().find(|device| device.name == name) else {
            return Ok(());
        };
        let act = match found.state {
            DeviceUse::Emptying => RemovalAct::Cancel,
            DeviceUse::InUse | DeviceUse::Gone => RemovalAct::Begin { partly: true },
        };
        // The last device of a tier stays: it says so.
        let device = name.to_owned();
        kernel
            .admin_request(Peer::this_process(), Admin::RemoveDevice { device, act })
            .map_err(say)
            .map(drop)
    }

    fn place(&mut self) -> Result<(), String> {
        let kernel = self.rig.kernel();
        let promoted = || kernel.status().tiers[0].moved_in_bytes / varve_format::BLOCK_BYTES;
        let before = promoted();
        self.moved += kernel.place();
        self.promoted += promoted() - before;
        self.cooled += kernel.store().demote(COOLED).map_err(say)?;
        Ok(())
    }

    /// Runs an operation in the second thread of a session.
    fn beside(&mut self, session: usize, op: &Op) -> Result<bool, String> {
        let turns = &self.rig.turns;
        let client = &mut self.clients[session];
        let second = match client.second.take() {
            Some(second) => second,
            None => Helper::start(turns, Some(client.no.number())).map_err(say)?,
        };
        let (fs, own) = (client.fs.clone(), op.clone());
        let done = lockstep::both_by(&mut self.model, op, || {
            // A thread that did not finish has no errno.
            let done = second.run(move || target::apply(&fs, &own));
            done.unwrap_or(Err(Errno(libc::EINTR)))
        });
        client.second = Some(second);
        done
    }

    /// Performs an act; returns `false` for an operation that the model refuses too.
    fn perform(&mut self, act: &Act) -> Result<bool, String> {
        match act {
            Act::Op(op) => return lockstep::both(&mut self.model, &self.clients[0].fs, op),
            Act::By(session, op) => return lockstep::both(&mut self.model, &self.clients[*session].fs, op),
            Act::Beside(session, op) => return self.beside(*session, op),
            Act::Digest => self.rig.kernel().digest_all().map_err(say)?,
            Act::DigestBeside => {
                let second = match self.second.take() {
                    Some(second) => second,
                    None => Helper::start(&self.rig.turns, None).map_err(say)?,
                };
                let kernel = self.rig.kernel();
                let done = second.run(move || kernel.digest_all().map_err(say));
                self.second = Some(second);
                done.unwrap_or_else(|| Err("a thread of the daemon came to no end".into()))?;
            }
            Act::Rest => self.rig.rest(),
            Act::Tick => self.rig.settle(),
            Act::Place => self.place()?,
            Act::Pin(tier) => self.pin(*tier)?,
            Act::PlaceShared(to) => self.place_shared(*to)?,
            Act::Evacuate(tier) => self.evacuate(*tier)?,
            Act::AddDevice(tier) => self.add_device(*tier)?,
            Act::RemoveDevice(name) => self.remove_device(name)?,
            Act::Read(session, path) => {
                let read = target::content(&self.clients[*session].fs, path);
                read.map_err(|errno| format!("read: {errno:?}"))?;
            }
            Act::Checkpoint => self.rig.kernel().store().checkpoint().map_err(say)?,
            Act::Seal => self.rig.seal_all(),
            Act::SealOne(session) => self.rig.seal(self.clients[*session].no),
            Act::Amid(stores) => self.rig.seal_before_store(*stores),
            Act::Die(session) => {
                // Its connection breaks with it, and no client comes back within the grace time.
                self.note(*session);
                self.rig.seal(self.clients[*session].no);
                self.replace(*session)?;
                self.rig.settle();
            }
            Act::Remount(session) => {
                self.note(*session);
                let unmounted = self.clients[*session].fs.unmount();
                unmounted.map_err(|errno| format!("unmount: {errno:?}"))?;
                self.replace(*session)?;
            }
            Act::Freeze(session) => self.rig.freeze(self.clients[*session].no, true),
            Act::Thaw(session) => self.rig.freeze(self.clients[*session].no, false),
            Act::Hold(path) => {
                let fs = &self.clients[0].fs;
                let flags = OpenFlags::READ;
                let file = lookup::find(fs, path)
                    .and_then(|attr| fs.open(attr.key, flags, &varve_ipc::Cred::root()))
                    .map_err(|errno| format!("open: {errno:?}"))?;
                self.held.push(file);
            }
            Act::LetGo => self.held.clear(),
            Act::Restart => self.rig.restart().map_err(say)?,
        }
        Ok(true)
    }
}
