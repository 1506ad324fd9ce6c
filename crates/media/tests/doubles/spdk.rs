//! A double of SPDK: its functions over disks in memory that lose their volatile cache at a power cut, and
//! that do what a test has told them to. It checks what a caller owes the library: one thread, its own
//! memory, each end freed once, nothing under way at a close. A breach ends the test's process.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;
use varve_media::block::spdk::Library;
use varve_media::block::spdk::api::{
    Api, Bdev, BdevIo, Channel, Descriptor, EnvOpts, OnEnd, OnEvent, OnMessage, OnPciDevice, OnStep,
    OnStopped, PciAddr, PciDevice, Thread,
};

/// What a disk does with the next operation, instead of what it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The library has no room for it now.
    NoRoom,
    /// The library refuses it.
    Refused(i32),
    /// It ends with an NVMe status.
    Nvme(i32, i32),
    /// It ends with an errno of the kernel's.
    Errno(i32),
    /// It ends with the next reset only, aborted.
    UntilReset,
    /// It never ends.
    Never,
    /// If it is a reset, it fails; anything else is done.
    Fails,
}

/// What a disk is.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub sector: u32,
    pub sectors: u64,
    pub metadata: u32,
    /// A namespace of an NVMe controller, with a volatile cache.
    pub nvme: bool,
    pub can_reset: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            sector: 512,
            sectors: 16 << 11,
            metadata: 0,
            nvme: true,
            can_reset: true,
        }
    }
}

/// A disk.
pub struct Disk {
    pub shape: Shape,
    /// As reads see it, and as a power cut leaves it.
    bytes: Mutex<(Vec<u8>, Vec<u8>)>,
    faults: Mutex<VecDeque<Fault>>,
    /// The event to tell of.
    event: Mutex<Option<u32>>,
    under_way: AtomicU64,
    pub resets: AtomicU64,
    pub operations: AtomicU64,
    open: AtomicBool,
}

static DISKS: Mutex<BTreeMap<String, Arc<Disk>>> = Mutex::new(BTreeMap::new());

impl Disk {
    pub fn new(name: &str, shape: Shape) -> Arc<Self> {
        let bytes = vec![0; (u64::from(shape.sector) * shape.sectors) as usize];
        let disk = Arc::new(Self {
            shape,
            bytes: Mutex::new((bytes.clone(), bytes)),
            faults: Mutex::default(),
            event: Mutex::default(),
            under_way: AtomicU64::new(0),
            resets: AtomicU64::new(0),
            operations: AtomicU64::new(0),
            open: AtomicBool::new(false),
        });
        DISKS.lock().insert(name.into(), Arc::clone(&disk));
        disk
    }

    pub fn fail(&self, faults: impl IntoIterator<Item = Fault>) {
        self.faults.lock().extend(faults);
    }

    pub fn tell(&self, event: u32) {
        *self.event.lock() = Some(event);
    }

    /// What is there after a power cut.
    pub fn durable(&self, off: usize, len: usize) -> Vec<u8> {
        self.bytes.lock().1[off..off + len].to_vec()
    }

    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::SeqCst)
    }
}

#[derive(Clone, Copy)]
struct End {
    ok: bool,
    nvme: (i32, i32),
    errno: i32,
}

const DONE: End = End {
    ok: true,
    nvme: (0, 0),
    errno: 0,
};

struct Pending {
    disk: Arc<Disk>,
    end: End,
    on_end: OnEnd,
    context: *mut c_void,
    /// Waits for a reset.
    held: bool,
}

struct Opened {
    disk: Arc<Disk>,
    on_event: OnEvent,
    context: *mut c_void,
}

/// State of the one thread that runs the library.
#[derive(Default)]
struct State {
    started: Option<ThreadId>,
    thread: bool,
    exiting: bool,
    subsystems: bool,
    steps: Vec<(OnStep, c_int)>,
    stops: Vec<OnStopped>,
    pending: Vec<Pending>,
    opened: Vec<*mut Opened>,
    memory: BTreeMap<usize, Box<[u8]>>,
    message: Option<OnMessage>,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

/// Calls of `thread_poll` by all libraries, and bytes of memory that were not freed at a stop.
pub static POLLS: AtomicU64 = AtomicU64::new(0);
pub static LEFT: AtomicU64 = AtomicU64::new(0);

fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
    STATE.with_borrow_mut(|state| {
        assert_eq!(
            state.started,
            Some(std::thread::current().id()),
            "another thread called the library"
        );
        work(state)
    })
}

unsafe extern "C" fn env_opts_init(options: *mut EnvOpts) {
    // SAFETY: the caller's structure, as long as this one.
    let options = unsafe { &mut *options };
    let bytes = options.opts_size;
    // SAFETY: the first 128 bytes are those of this release; zeros are values of all their fields.
    unsafe { ptr::write_bytes((&raw mut *options).cast::<u8>(), 0, 128) };
    options.opts_size = bytes;
    defaults(options);
}

fn defaults(options: &mut EnvOpts) {
    options.name = c"spdk".as_ptr();
    options.core_mask = c"0x1".as_ptr();
    options.shm_id = -1;
    options.mem_size = -1;
    options.main_core = -1;
    options.mem_channel = -1;
    options.base_virtaddr = 0x2000_0000_0000;
}

/// As releases before 24.09, whose structure has 112 bytes.
pub unsafe extern "C" fn short_env_opts_init(options: *mut EnvOpts) {
    // SAFETY: as for `env_opts_init`.
    let options = unsafe { &mut *options };
    // SAFETY: as above.
    unsafe { ptr::write_bytes((&raw mut *options).cast::<u8>(), 0, 112) };
    defaults(options);
}

/// As releases before 23.09, which had no `lcore_map`: everything lies 8 bytes before.
pub unsafe extern "C" fn old_env_opts_init(options: *mut EnvOpts) {
    // SAFETY: all within the caller's structure.
    unsafe {
        let at = options.cast::<u8>();
        ptr::write_bytes(at, 0, 104);
        for field in [16, 20, 24, 28] {
            at.add(field).cast::<i32>().write(-1);
        }
        at.add(80).cast::<u64>().write(0x2000_0000_0000);
    }
}

unsafe extern "C" fn env_init(options: *const EnvOpts) -> c_int {
    STATE.with_borrow_mut(|state| {
        assert_eq!(state.started, None, "started twice");
        state.started = Some(std::thread::current().id());
    });
    // SAFETY: the caller's structure; its strings are alive.
    let mask = unsafe { CStr::from_ptr((*options).core_mask) };
    assert!(mask.to_bytes().starts_with(b"["), "{mask:?}");
    0
}

unsafe extern "C" fn env_fini() {}

unsafe extern "C" fn dma_malloc(len: usize, align: usize, unused: *mut u64) -> *mut c_void {
    assert!(unused.is_null() && align == 4096);
    with(|state| {
        let part = vec![0u8; len + align].into_boxed_slice();
        let address = (part.as_ptr() as usize).next_multiple_of(align);
        state.memory.insert(address, part);
        ptr::with_exposed_provenance_mut(address)
    })
}

unsafe extern "C" fn dma_free(at: *mut c_void) {
    with(|state| assert!(state.memory.remove(&at.addr()).is_some(), "freed twice"));
}

unsafe extern "C" fn pci_for_each_device(_: *mut c_void, _: OnPciDevice) {}

unsafe extern "C" fn pci_device_get_addr(_: *mut PciDevice) -> PciAddr {
    PciAddr {
        domain: 0,
        bus: 0,
        device: 0,
        function: 0,
    }
}

unsafe extern "C" fn pci_device_is_removed(_: *mut PciDevice) -> bool {
    false
}

unsafe extern "C" fn log_open(log: Option<OnMessage>) {
    STATE.with_borrow_mut(|state| state.message = log);
}

unsafe extern "C" fn thread_lib_init(_: *const c_void, _: *const c_void, _: usize, _: usize) -> c_int {
    0
}

unsafe extern "C" fn thread_lib_fini() {
    with(|state| {
        assert!(!state.thread && !state.subsystems, "stopped in the wrong order");
        state.exiting = false;
        LEFT.fetch_add(
            state.memory.values().map(|part| part.len() as u64).sum(),
            Ordering::SeqCst,
        );
    });
}

unsafe extern "C" fn thread_create(_: *const c_char, _: *const c_void) -> *mut Thread {
    with(|state| state.thread = true);
    ptr::dangling_mut()
}

unsafe extern "C" fn set_thread(_: *mut Thread) {}

unsafe extern "C" fn thread_poll(_: *mut Thread, _: u32, _: u64) -> c_int {
    POLLS.fetch_add(1, Ordering::Relaxed);
    let (steps, stops, ended, events) = with(|state| {
        let (held, ended) = std::mem::take(&mut state.pending)
            .into_iter()
            .partition(|one| one.held);
        state.pending = held;
        let events: Vec<_> = state
            .opened
            .iter()
            .filter_map(|at| {
                // SAFETY: made by `bdev_open_ext`, not closed yet.
                let opened = unsafe { &**at };
                let event = opened.disk.event.lock().take()?;
                Some((opened.on_event, event, opened.context))
            })
            .collect();
        let ended: Vec<Pending> = ended;
        (
            std::mem::take(&mut state.steps),
            std::mem::take(&mut state.stops),
            ended,
            events,
        )
    });
    let busy = !(steps.is_empty() && ended.is_empty() && events.is_empty() && stops.is_empty());
    // SAFETY: the callbacks get what they were registered with.
    unsafe {
        for (step, rc) in steps {
            step(rc, ptr::null_mut());
        }
        for stop in stops {
            stop(ptr::null_mut());
        }
        for one in ended {
            one.disk.under_way.fetch_sub(1, Ordering::SeqCst);
            let io = Box::into_raw(Box::new(one.end));
            (one.on_end)(io.cast(), one.end.ok, one.context);
        }
        for (on_event, event, context) in events {
            on_event(event, ptr::null_mut(), context);
        }
    }
    busy.into()
}

unsafe extern "C" fn thread_exit(_: *mut Thread) -> c_int {
    with(|state| state.exiting = true);
    0
}

unsafe extern "C" fn thread_is_exited(_: *mut Thread) -> bool {
    with(|state| state.exiting)
}

unsafe extern "C" fn thread_destroy(_: *mut Thread) {
    with(|state| state.thread = false);
}

unsafe extern "C" fn rpc_set_state(_: u32) {}

unsafe extern "C" fn load_config(json: *const c_void, len: isize, step: OnStep, _: *mut c_void, stop: bool) {
    assert!(stop);
    // SAFETY: the caller's text.
    let text = unsafe { std::slice::from_raw_parts(json.cast::<u8>(), len as usize) };
    let bad = text.windows(7).any(|part| part == b"\"wrong\"");
    let message = with(|state| {
        state.steps.push((step, if bad { -22 } else { 0 }));
        state.message
    });
    if let Some(message) = message.filter(|_| bad) {
        let format = c"Method 'wrong' was not found\n";
        // A list of no arguments, on x86-64.
        let mut arguments = [0u64; 3];
        // SAFETY: a format without conversions takes no argument out of the list.
        unsafe {
            message(
                0,
                ptr::null(),
                1,
                ptr::null(),
                format.as_ptr(),
                (&raw mut arguments).cast(),
            )
        };
    }
}

unsafe extern "C" fn subsystem_init(step: OnStep, _: *mut c_void) {
    with(|state| {
        state.subsystems = true;
        state.steps.push((step, 0));
    });
}

unsafe extern "C" fn subsystem_fini(stop: OnStopped, _: *mut c_void) {
    with(|state| {
        state.subsystems = false;
        state.stops.push(stop);
    });
}

unsafe extern "C" fn bdev_first() -> *mut Bdev {
    ptr::null_mut()
}

unsafe extern "C" fn bdev_next(_: *mut Bdev) -> *mut Bdev {
    ptr::null_mut()
}

unsafe extern "C" fn bdev_get_name(_: *const Bdev) -> *const c_char {
    ptr::null()
}

unsafe extern "C" fn bdev_open_ext(
    name: *const c_char,
    _: bool,
    on_event: OnEvent,
    context: *mut c_void,
    out: *mut *mut Descriptor,
) -> c_int {
    // SAFETY: the caller's string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let Some(disk) = DISKS.lock().get(&name).cloned() else {
        return -libc::ENODEV;
    };
    if disk.open.swap(true, Ordering::SeqCst) {
        return -libc::EPERM;
    }
    let opened = Box::into_raw(Box::new(Opened {
        disk,
        on_event,
        context,
    }));
    with(|state| state.opened.push(opened));
    // SAFETY: the caller's place for it.
    unsafe { out.write(opened.cast()) };
    0
}

unsafe extern "C" fn bdev_close(descriptor: *mut Descriptor) {
    with(|state| state.opened.retain(|at| !ptr::addr_eq(*at, descriptor)));
    // SAFETY: made by `bdev_open_ext`, and closed once.
    let opened = unsafe { Box::from_raw(descriptor.cast::<Opened>()) };
    assert_eq!(
        opened.disk.under_way.load(Ordering::SeqCst),
        0,
        "closed with operations under way"
    );
    opened.disk.open.store(false, Ordering::SeqCst);
}

unsafe extern "C" fn desc_get_bdev(descriptor: *mut Descriptor) -> *mut Bdev {
    descriptor
}

unsafe extern "C" fn get_io_channel(descriptor: *mut Descriptor) -> *mut Channel {
    descriptor
}

unsafe extern "C" fn put_io_channel(_: *mut Channel) {}

fn disk(at: *const c_void) -> Arc<Disk> {
    // SAFETY: a descriptor or device of this double, not closed yet.
    Arc::clone(unsafe { &(*at.cast::<Opened>()).disk })
}

unsafe extern "C" fn product_name(_: *const Bdev) -> *const c_char {
    c"Double".as_ptr()
}

unsafe extern "C" fn block_size(bdev: *const Bdev) -> u32 {
    disk(bdev).shape.sector
}

unsafe extern "C" fn num_blocks(bdev: *const Bdev) -> u64 {
    disk(bdev).shape.sectors
}

unsafe extern "C" fn md_size(bdev: *const Bdev) -> u32 {
    disk(bdev).shape.metadata
}

unsafe extern "C" fn has_write_cache(bdev: *const Bdev) -> bool {
    disk(bdev).shape.nvme
}

unsafe extern "C" fn io_type_supported(bdev: *mut Bdev, kind: c_uint) -> bool {
    let shape = disk(bdev).shape;
    match kind {
        5 => shape.can_reset,
        7 => shape.nvme,
        _ => true,
    }
}

/// Starts an operation.
fn begin(
    descriptor: *mut Descriptor,
    is_reset: bool,
    on_end: OnEnd,
    context: *mut c_void,
    work: impl FnOnce(&Disk),
) -> c_int {
    let disk = disk(descriptor);
    disk.operations.fetch_add(1, Ordering::SeqCst);
    let fault = disk.faults.lock().pop_front();
    let failed = |nvme, errno| End {
        ok: false,
        nvme,
        errno,
    };
    let (end, held) = match fault {
        Some(Fault::NoRoom) => return -libc::ENOMEM,
        Some(Fault::Refused(errno)) => return -errno,
        Some(Fault::Nvme(kind, code)) => (failed((kind, code), -libc::EIO), false),
        Some(Fault::Errno(errno)) => (failed((0, 6), -errno), false),
        Some(Fault::UntilReset) => (failed((0, 8), -libc::EIO), true),
        Some(Fault::Never) => (failed((7, 7), -libc::EIO), true),
        Some(Fault::Fails) if is_reset => (failed((0, 6), -libc::EIO), false),
        Some(Fault::Fails) | None => {
            work(&disk);
            (DONE, false)
        }
    };
    disk.under_way.fetch_add(1, Ordering::SeqCst);
    with(|state| {
        if is_reset && end.ok {
            disk.resets.fetch_add(1, Ordering::SeqCst);
            let held = state
                .pending
                .iter_mut()
                .filter(|one| Arc::ptr_eq(&one.disk, &disk));
            held.filter(|one| one.end.nvme != (7, 7))
                .for_each(|one| one.held = false);
        }
        state.pending.push(Pending {
            disk,
            end,
            on_end,
            context,
            held,
        });
    });
    0
}

/// The memory of an operation, which must be the library's own.
fn memory(at: *mut c_void, len: u64) {
    with(|state| {
        let (base, part) = state
            .memory
            .range(..=at.addr())
            .next_back()
            .expect("memory of the library's");
        assert!(
            at.addr() + len as usize <= base + part.len() - 4096,
            "beyond the memory"
        );
    });
}

fn range(disk: &Disk, off: u64, len: u64) -> std::ops::Range<usize> {
    let sector = u64::from(disk.shape.sector);
    assert!(
        off.is_multiple_of(sector) && len.is_multiple_of(sector) && len > 0,
        "{off}+{len}"
    );
    off as usize..(off + len) as usize
}

unsafe extern "C" fn bdev_read(
    descriptor: *mut Descriptor,
    _: *mut Channel,
    to: *mut c_void,
    off: u64,
    len: u64,
    on_end: OnEnd,
    context: *mut c_void,
) -> c_int {
    memory(to, len);
    begin(descriptor, false, on_end, context, |disk| {
        let bytes = disk.bytes.lock();
        let part = &bytes.0[range(disk, off, len)];
        // SAFETY: the library's memory, long enough, checked above.
        unsafe { ptr::copy_nonoverlapping(part.as_ptr(), to.cast(), part.len()) };
    })
}

unsafe extern "C" fn bdev_write(
    descriptor: *mut Descriptor,
    _: *mut Channel,
    from: *mut c_void,
    off: u64,
    len: u64,
    on_end: OnEnd,
    context: *mut c_void,
) -> c_int {
    memory(from, len);
    begin(descriptor, false, on_end, context, |disk| {
        // SAFETY: as for a read.
        let data = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len as usize) };
        disk.bytes.lock().0[range(disk, off, len)].copy_from_slice(data);
    })
}

unsafe extern "C" fn bdev_unmap(
    descriptor: *mut Descriptor,
    _: *mut Channel,
    off: u64,
    len: u64,
    on_end: OnEnd,
    context: *mut c_void,
) -> c_int {
    begin(descriptor, false, on_end, context, |disk| {
        disk.bytes.lock().0[range(disk, off, len)].fill(0);
    })
}

fn flush(disk: &Disk) {
    let mut bytes = disk.bytes.lock();
    bytes.1 = bytes.0.clone();
}

unsafe extern "C" fn bdev_flush(
    descriptor: *mut Descriptor,
    _: *mut Channel,
    off: u64,
    len: u64,
    on_end: OnEnd,
    context: *mut c_void,
) -> c_int {
    begin(descriptor, false, on_end, context, |disk| {
        range(disk, off, len);
        // As SPDK's driver: a namespace is not asked.
        if !disk.shape.nvme {
            flush(disk);
        }
    })
}

unsafe extern "C" fn nvme_io_passthru(
    descriptor: *mut Descriptor,
    _: *mut Channel,
    command: *const c_void,
    data: *mut c_void,
    len: usize,
    on_end: OnEnd,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a command has 64 bytes.
    let command = unsafe { std::slice::from_raw_parts(command.cast::<u8>(), 64) };
    assert!(command.iter().all(|byte| *byte == 0) && data.is_null() && len == 0);
    begin(descriptor, false, on_end, context, flush)
}

unsafe extern "C" fn bdev_reset(
    descriptor: *mut Descriptor,
    _: *mut Channel,
    on_end: OnEnd,
    context: *mut c_void,
) -> c_int {
    begin(descriptor, true, on_end, context, |_| {})
}

unsafe extern "C" fn free_io(io: *mut BdevIo) {
    // SAFETY: made for the callback, and freed once by it.
    drop(unsafe { Box::from_raw(io.cast::<End>()) });
}

unsafe extern "C" fn get_nvme_status(io: *const BdevIo, _: *mut u32, kind: *mut c_int, code: *mut c_int) {
    // SAFETY: an end that was not freed, and the caller's places.
    unsafe {
        let end = &*io.cast::<End>();
        kind.write(end.nvme.0);
        code.write(end.nvme.1);
    }
}

unsafe extern "C" fn get_aio_status(io: *const BdevIo, errno: *mut c_int) {
    // SAFETY: as above.
    unsafe { errno.write((*io.cast::<End>()).errno) };
}

/// The functions of the double.
pub const API: Api = Api {
    env_opts_init,
    env_init,
    env_fini,
    dma_malloc,
    dma_free,
    pci_for_each_device,
    pci_device_get_addr,
    pci_device_is_removed,
    log_open,
    thread_lib_init,
    thread_lib_fini,
    thread_create,
    set_thread,
    thread_poll,
    thread_exit,
    thread_is_exited,
    thread_destroy,
    rpc_set_state,
    subsystem_load_config: load_config,
    subsystem_init,
    subsystem_fini,
    bdev_first,
    bdev_next,
    bdev_get_name,
    bdev_open_ext,
    bdev_close,
    bdev_desc_get_bdev: desc_get_bdev,
    bdev_get_io_channel: get_io_channel,
    put_io_channel,
    bdev_get_product_name: product_name,
    bdev_get_block_size: block_size,
    bdev_get_num_blocks: num_blocks,
    bdev_get_md_size: md_size,
    bdev_has_write_cache: has_write_cache,
    bdev_io_type_supported: io_type_supported,
    bdev_read,
    bdev_write,
    bdev_unmap,
    bdev_flush,
    bdev_nvme_io_passthru: nvme_io_passthru,
    bdev_reset,
    bdev_free_io: free_io,
    bdev_io_get_nvme_status: get_nvme_status,
    bdev_io_get_aio_status: get_aio_status,
};

/// A library of this double's, for the life of the process.
pub fn library(api: Api) -> &'static Library {
    Box::leak(Box::new(Library::new(api, "SPDK's double".into())))
}
