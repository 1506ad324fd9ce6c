//! A second thread of a process that takes turns: it does work while the caller waits. Owns handing work
//! over; refuses to know the work.

use crate::turns::Turns;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Desk {
    work: Option<Work>,
    closed: bool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A second thread. It ends when this is dropped.
pub(crate) struct Helper {
    desk: Arc<Mutex<Desk>>,
    turns: Arc<Turns>,
}

impl Helper {
    /// Starts the thread, in a process or in none.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(crate) fn start(turns: &Arc<Turns>, process: Option<usize>) -> std::io::Result<Self> {
        let desk = Arc::new(Mutex::new(Desk::default()));
        let (own, its_turns) = (Arc::clone(&desk), Arc::clone(turns));
        turns.spawn("second", process, Box::new(move || serve(&own, &its_turns)))?;
        Ok(Self {
            desk,
            turns: Arc::clone(turns),
        })
    }

    /// Runs `work` in the thread and waits for it. Returns `None` if the work did not finish: the thread
    /// panicked or the run is over.
    pub(crate) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let slot = Arc::new(Mutex::new(None));
        let own = Arc::clone(&slot);
        locked(&self.desk).work = Some(Box::new(move || *locked(&own) = Some(work())));
        self.turns.tell(|| "the second thread has work".into());
        loop {
            if let Some(done) = locked(&slot).take() {
                return Some(done);
            }
            if self.turns.is_over() || self.turns.panicked().is_some() {
                return None;
            }
            self.turns.pause(Duration::from_secs(1));
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        locked(&self.desk).closed = true;
        self.turns.tell(|| "the second thread ends".into());
    }
}

fn serve(desk: &Mutex<Desk>, turns: &Turns) {
    loop {
        let (work, closed) = {
            let mut desk = locked(desk);
            (desk.work.take(), desk.closed)
        };
        match work {
            Some(work) => {
                work();
                turns.tell(|| "the second thread is done".into());
            }
            None if closed || turns.is_over() => return,
            None => turns.pause(Duration::from_secs(3600)),
        }
    }
}
