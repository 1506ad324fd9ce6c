//! Loads the library into this process, once, and never unloads it.

use std::ffi::{CStr, CString, c_int, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use crate::lock::Mutex;

use super::api::Api;
use super::runtime::Environment;
use super::signals::Dispositions;
use crate::block::spdk::library::{Installed, find};
use crate::pmem::guard;

/// A loaded SPDK, or a double of it.
pub struct Library {
    /// Its functions.
    pub api: Api,
    /// Its version, for people.
    pub version: String,
    /// What became of the environment in this process, which is started once and outlives its use.
    pub(super) environment: Mutex<Option<Result<Environment, String>>>,
    /// The thread that runs it, for the rest of the process: DPDK knows it as its own.
    thread: Mutex<Option<Sender<Job>>>,
}

/// Something to do on the library's thread.
type Job = Box<dyn FnOnce() + Send>;

/// Stack of the thread: C code with large buffers runs on it.
const STACK_BYTES: usize = 8 << 20;

impl Library {
    /// A library with these functions.
    pub const fn new(api: Api, version: String) -> Self {
        Self {
            api,
            version,
            environment: Mutex::new(None),
            thread: Mutex::new(None),
        }
    }

    /// Does something on the library's thread, after what it does now. Starts it the first time.
    ///
    /// # Errors
    /// The thread cannot be started, or has ended.
    pub(in crate::block::spdk) fn run(&self, job: Job) -> io::Result<()> {
        let mut thread = self.thread.lock();
        let jobs = match thread.take() {
            Some(jobs) => jobs,
            None => {
                let (jobs, inbox) = channel::<Job>();
                std::thread::Builder::new()
                    .name("spdk".into())
                    .stack_size(STACK_BYTES)
                    .spawn(move || inbox.into_iter().for_each(|job| job()))?;
                jobs
            }
        };
        let sent = jobs
            .send(job)
            .map_err(|_| io::Error::other("the thread has ended"));
        *thread = Some(jobs);
        sent
    }
}

/// The process exits, and the library's memory goes with it.
static EXITING: AtomicBool = AtomicBool::new(false);
/// A thread runs the library.
static RUNNING: AtomicBool = AtomicBool::new(false);

/// Says whether a thread runs the library.
pub(super) fn set_running(running: bool) {
    RUNNING.store(running, Ordering::SeqCst);
}

/// Whether the calling thread must leave the library alone from now on. It must not call it again then.
pub(in crate::block::spdk) fn is_exiting() -> bool {
    let exiting = EXITING.load(Ordering::SeqCst);
    if exiting {
        set_running(false);
    }
    exiting
}

/// The library that this process has loaded.
static LOADED: OnceLock<&'static Library> = OnceLock::new();

/// Waits until no thread is in the library: its destructors, which run after this, free its memory. Ends the
/// environment where nothing uses it.
extern "C" fn at_exit() {
    let is_idle = !RUNNING.load(Ordering::SeqCst);
    if let Some(library) = LOADED.get().filter(|_| is_idle)
        && let Some(environment) = library.environment.try_lock()
        && matches!(&*environment, Some(Ok(_)))
    {
        // SAFETY: started, and no thread uses it; none starts it again while this has the lock, which is
        // until the process has ended.
        unsafe { (library.api.env_fini)() };
        std::mem::forget(environment);
        return;
    }
    EXITING.store(true, Ordering::SeqCst);
    let begun = Instant::now();
    while RUNNING.load(Ordering::SeqCst) && begun.elapsed() < Duration::from_secs(1) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Makes C code print to stderr: SPDK greets on stdout, which is for the output of a command.
fn print_to_stderr() {
    unsafe extern "C" {
        static mut stdout: *mut c_void;
        static stderr: *mut c_void;
    }
    // SAFETY: variables of the C library's that it lets be set; nothing else in this process prints by them.
    unsafe { stdout = stderr };
}

/// The libraries need each other, so only the loader can find them: one alone has undefined symbols.
fn unloadable(installed: &Installed, file: &Path, error: &str) -> String {
    let home = installed.dirs[0].display();
    format!(
        "{} cannot be loaded: {error}. If what it needs is there but not in the loader's path, tell the \
         loader (`echo {home} > /etc/ld.so.conf.d/spdk.conf && ldconfig`, or LD_LIBRARY_PATH={home} in varve's \
         environment); DPDK's libraries, OpenSSL and ISA-L must be there too",
        file.display()
    )
}

/// Returns the library of this process; loads it the first time.
///
/// # Errors
/// For a person: what is missing, and the remedy.
pub fn load() -> Result<&'static Library, String> {
    static LOADING: Mutex<()> = Mutex::new(());
    let _loading = LOADING.lock();
    if let Some(library) = LOADED.get() {
        return Ok(library);
    }
    let installed = find()?;
    // Our handler is there before the library sets its own, so that it can be put back over it.
    if !guard::is_ready() {
        return Err("the handler of SIGBUS cannot be set; `spdk:` needs an x86-64 processor".into());
    }
    print_to_stderr();
    let signals = Dispositions::note();
    let api = open_all(&installed);
    if let Some(action) = signals.put_back() {
        guard::adopt(action);
    }
    let library: &Library = Box::leak(Box::new(Library::new(api?, installed.version)));
    // SAFETY: a function without parameters that may run at exit.
    unsafe { libc::atexit(at_exit) };
    Ok(LOADED.get_or_init(|| library))
}

fn open_all(installed: &Installed) -> Result<Api, String> {
    for file in &installed.helpers {
        // What is missed is named when a library that needs it is loaded.
        let _ = open(file);
    }
    for file in &installed.needed {
        open(file).map_err(|error| unloadable(installed, file, &error))?;
    }
    for file in &installed.useful {
        // A driver that needs something else of the machine is not there then; a configuration that names it
        // is refused by SPDK.
        let _ = open(file);
    }
    // SAFETY: the libraries were loaded for all to see, and this finds what they define; the names are
    // SPDK's.
    let api = unsafe { Api::resolve(|symbol| libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()).cast_const()) };
    api.map_err(|missing| {
        format!(
            "{} in {} does not have {}: this version is not supported. Releases from 24.05 to 26.05 are \
             known to fit",
            installed.version,
            installed.dirs[0].display(),
            missing.join(", ")
        )
    })
}

fn open(file: &Path) -> Result<(), String> {
    const FLAGS: c_int = libc::RTLD_NOW | libc::RTLD_GLOBAL;
    let path = CString::new(file.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: runs the constructors of a library that the operator has installed for this; there is no other
    // way to use it.
    let handle: *mut c_void = unsafe { libc::dlopen(path.as_ptr(), FLAGS) };
    if !handle.is_null() {
        return Ok(());
    }
    // SAFETY: `dlopen` of this thread has failed, so there is a message, or null.
    let message = unsafe { libc::dlerror() };
    if message.is_null() {
        return Err("the loader does not say why".into());
    }
    // SAFETY: a string of the loader's that lives until its next call on this thread.
    Ok(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()).and_then(Err)
}
