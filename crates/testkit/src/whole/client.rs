//! A client of the whole system: a mount and the thread that calls it. Owns passing calls on and collecting
//! answers; refuses to know the calls' meaning.

use super::history::{Answer, Call, History, digest_of};
use crate::lookup;
use crate::ops::Path;
use crate::rig::{MountNo, Rig};
use crate::target;
use crate::turns::Turns;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use varve_ipc::Cred;
use varve_libfs::{Errno, Fs, OpenFlags};

/// Larger than any file of a workload.
const FILE_MAX: usize = 256 << 10;

/// The history, and the first impossible result.
pub(super) struct Shared {
    pub history: History,
    pub wrong: Option<String>,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct Desk {
    job: Option<(u64, Call)>,
    busy: bool,
    closed: bool,
}

/// A living client.
pub(super) struct Client {
    pub fs: Fs,
    pub no: MountNo,
    desk: Arc<Mutex<Desk>>,
}

fn look(fs: &Fs, path: &Path) -> Result<Option<u64>, Errno> {
    let file = match lookup::find(fs, path) {
        Ok(attr) if attr.mode & libc::S_IFMT == libc::S_IFREG => attr,
        Ok(_) | Err(Errno(libc::ENOENT | libc::ENOTDIR)) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    let file = fs.open(file.key, OpenFlags::READ, &Cred::root())?;
    let mut content = vec![0xa5; FILE_MAX];
    let count = file.read_at(0, &mut content)?;
    Ok(Some(digest_of(&content[..count])))
}

fn carry_out(fs: &Fs, call: &Call) -> Answer {
    let done = match call {
        Call::Do(op) => target::apply(fs, op).map(|()| Answer::Done),
        Call::Look(path) => look(fs, path).map(Answer::Seen),
    };
    done.unwrap_or_else(|errno| Answer::Refused(errno.0))
}

impl Client {
    /// Starts the thread that calls `fs`.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(super) fn start(
        fs: Fs,
        no: MountNo,
        rig: &Arc<Rig>,
        shared: &Arc<Mutex<Shared>>,
    ) -> Result<Self, String> {
        let desk = Arc::new(Mutex::new(Desk::default()));
        let work = {
            let (desk, turns, shared) = (Arc::clone(&desk), Arc::clone(&rig.turns), Arc::clone(shared));
            let (fs, rig) = (fs.clone(), Arc::downgrade(rig));
            let is_dead = move || rig.upgrade().is_none_or(|rig| rig.is_dead(no));
            move || serve(&fs, &desk, &turns, &shared, is_dead)
        };
        rig.turns
            .spawn("program", Some(no.number()), Box::new(work))
            .map_err(|error| error.to_string())?;
        Ok(Self { fs, no, desk })
    }

    pub(super) fn is_busy(&self) -> bool {
        locked(&self.desk).busy
    }

    /// Makes the client do a call. It must not be busy.
    pub(super) fn call(&self, number: u64, call: Call) {
        let mut desk = locked(&self.desk);
        (desk.job, desk.busy) = (Some((number, call)), true);
    }

    /// Ends its thread after the current call.
    pub(super) fn close(&self) {
        locked(&self.desk).closed = true;
    }
}

fn serve(fs: &Fs, desk: &Mutex<Desk>, turns: &Turns, shared: &Mutex<Shared>, is_dead: impl Fn() -> bool) {
    loop {
        let (job, closed) = {
            let mut desk = locked(desk);
            (desk.job.take(), desk.closed)
        };
        let Some((number, call)) = job else {
            if closed || turns.is_over() {
                return;
            }
            turns.pause(Duration::from_secs(3600));
            continue;
        };
        turns.tell(|| format!("begins {call}"));
        let answer = carry_out(fs, &call);
        turns.tell(|| format!("ends {call}: {answer:?}"));
        // A dead client has no answer.
        if is_dead() {
            return;
        }
        locked(desk).busy = false;
        let mut shared = locked(shared);
        if let Err(why) = shared.history.end(number, answer) {
            shared.wrong.get_or_insert(why);
        }
    }
}
