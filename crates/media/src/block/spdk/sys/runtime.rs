//! The library at work on the calling thread: environment, one thread of SPDK's, subsystems, opened devices.
//! All calls of the library are made here and in [`memory`](super::memory); what they mean for requests is
//! the reactor's.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::time::{Duration, Instant};

use super::api::{Api, Bdev, Channel, Descriptor, ENV_OPTS_BYTES, EnvOpts, PciAddr, Thread, io_type};
use super::inbox::{self, Ended, Event};
use super::load::Library;
use super::memory::DmaBuffer;
use super::{load, said, signals};
use crate::block::PciAddress;
use crate::block::nvme::Places;

/// How long a step of start or stop may take. The slowest is a controller that does not answer.
const STEP_MAX: Duration = Duration::from_secs(60);
/// Messages between SPDK's threads, of which there is one; the default takes 30 MiB.
const MESSAGES: usize = 4095;
/// MiB of ordinary memory where there are no huge pages. Taken as it is touched.
const ORDINARY_MIB: c_int = 512;
/// What the bytes of the options are before the library writes them.
const UNTOUCHED: u8 = 0xa5;

/// What the environment of SPDK can do in this process; fixed at its first start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Environment {
    /// Huge pages, or ordinary ones.
    pub huge: bool,
    /// Devices of PCI can be used.
    pub pci: bool,
}

/// An operation on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::block::spdk) enum Operation {
    Read,
    Write,
    Flush,
    Unmap,
    Reset,
}

/// What a device says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::block::spdk) struct Facts {
    pub product: String,
    pub block_bytes: u64,
    pub blocks: u64,
    pub metadata_bytes: u32,
    pub has_write_cache: bool,
    /// It takes NVMe commands as they are: it is a namespace, not something above one.
    pub is_nvme: bool,
    pub can_flush: bool,
    pub can_unmap: bool,
    pub can_reset: bool,
}

/// An opened device.
pub(in crate::block::spdk) struct OpenBdev {
    descriptor: *mut Descriptor,
    channel: *mut Channel,
    pub facts: Facts,
}

/// The library at work. Not `Send`: it belongs to the thread that started it.
pub(in crate::block::spdk) struct Runtime {
    library: &'static Library,
    thread: *mut Thread,
    /// The subsystems were started, if only in part. After an earlier use SPDK takes those that were not for
    /// started, and would stop them.
    subsystems: Cell<bool>,
}

fn errno(rc: c_int) -> std::io::Error {
    std::io::Error::from_raw_os_error(rc.saturating_neg())
}

/// Copies a string of the library's.
///
/// # Safety
/// Null, or a string that ends with a zero.
unsafe fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
}

/// Lets the library fill in its defaults, and checks that they are where this code has the fields.
fn options(api: &Api) -> Result<Box<EnvOpts>, String> {
    let mut options: Box<MaybeUninit<EnvOpts>> = Box::new(MaybeUninit::uninit());
    let mut options = {
        // SAFETY: all fields are integers and raw pointers, for which any bytes are values.
        unsafe {
            ptr::write_bytes(options.as_mut_ptr(), UNTOUCHED, 1);
            options.assume_init()
        }
    };
    options.opts_size = ENV_OPTS_BYTES;
    // SAFETY: writes the structure of the library's release, of which the longest known has 128 bytes; there
    // are 4,096.
    unsafe { (api.env_opts_init)(&raw mut *options) };
    let untouched = [UNTOUCHED; 8];
    let grown = options.enforce_numa == 0 && options.reserved2 == [0; 7];
    let short = options.enforce_numa == UNTOUCHED && options.reserved2 == untouched[..7];
    let numbers = [
        options.shm_id,
        options.mem_channel,
        options.main_core,
        options.mem_size,
    ];
    let flags = [
        options.no_pci,
        options.hugepage_single_segments,
        options.unlink_hugepage,
        options.no_huge,
    ];
    let fits = numbers == [-1; 4]
        && flags == [0; 4]
        && options.num_pci_addr == 0
        && [
            options.lcore_map,
            options.hugedir,
            options.iova_mode,
            options.env_context,
        ]
        .iter()
        .all(|at| at.is_null())
        && options.vf_token.is_null()
        && options.pci_allowed.is_null()
        && options.pci_blocked.is_null()
        && options.base_virtaddr != 0
        && options.opts_size == ENV_OPTS_BYTES
        && (grown || short);
    if !fits {
        return Err(
            "its options of the environment are laid out in a way that is not known. Releases from 24.05 to \
             26.05 are known to fit"
                .into(),
        );
    }
    // Later fields that were filled in keep their defaults; the rest is not ours to guess.
    if options.room.iter().all(|byte| *byte == UNTOUCHED) {
        options.room = [0; 3968];
    }
    Ok(options)
}

/// Returns the processors of the calling thread.
fn affinity() -> libc::cpu_set_t {
    // SAFETY: an empty set is all zeros; the call writes at most its size.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set);
        set
    }
}

fn set_affinity(set: &libc::cpu_set_t) {
    // SAFETY: reads the set.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), set) };
}

impl Runtime {
    /// Starts the environment, if this is its first use, and makes a thread of SPDK's for the calling one.
    /// `devices` are the PCI devices that may be looked at now; others can be attached later, if there are
    /// any.
    ///
    /// # Errors
    /// For a person.
    pub(in crate::block::spdk) fn start(
        library: &'static Library,
        devices: &[PciAddress],
        huge: bool,
    ) -> Result<Self, String> {
        let api = &library.api;
        inbox::begin(api);
        signals::leave_to_other_threads();
        let handlers = signals::Dispositions::note();
        let processors = affinity();
        let started = start_environment(library, devices, huge);
        // DPDK binds the thread to one processor, and may set handlers; neither is the daemon's wish.
        set_affinity(&processors);
        handlers.put_back();
        started?;
        // SAFETY: the environment is started; two null functions are allowed: nobody is told of new threads.
        let rc = unsafe { (api.thread_lib_init)(ptr::null(), ptr::null(), 0, MESSAGES) };
        if rc != 0 {
            return Err(said::explain(&format!(
                "its threads cannot be started: {}",
                errno(rc)
            )));
        }
        // SAFETY: the name is a string; null: all processors.
        let thread = unsafe { (api.thread_create)(c"varve".as_ptr(), ptr::null()) };
        if thread.is_null() {
            // SAFETY: started, and without a thread.
            unsafe { (api.thread_lib_fini)() };
            return Err(said::explain("its thread cannot be made"));
        }
        // SAFETY: the new thread of SPDK's has no other thread of the kernel's. The first state of
        // configuration is that before the start of the subsystems, also after an earlier use.
        unsafe {
            (api.set_thread)(thread);
            (api.rpc_set_state)(1);
        }
        load::set_running(true);
        Ok(Self {
            library,
            thread,
            subsystems: Cell::new(false),
        })
    }

    fn api(&self) -> &'static Api {
        &self.library.api
    }

    /// Runs SPDK's pollers and messages once. Returns whether there was work.
    pub(in crate::block::spdk) fn poll(&self) -> bool {
        // SAFETY: the thread lives as long as `self`, and belongs to this thread of the kernel's.
        unsafe { (self.api().thread_poll)(self.thread, 0, 0) > 0 }
    }

    /// Waits for a step whose callback is [`inbox::on_step`] or [`inbox::on_stopped`].
    fn finish(&self, what: &str) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            match inbox::take_step() {
                Some(0) => return Ok(()),
                Some(rc) => return Err(said::explain(&format!("{what} failed: {}", errno(rc)))),
                None if begun.elapsed() > STEP_MAX => {
                    return Err(said::explain(&format!(
                        "{what} did not end in {} s",
                        STEP_MAX.as_secs()
                    )));
                }
                None if self.poll() => {}
                // Configuration goes through a socket of the library's own, at its pace.
                None => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }

    /// Carries out the entries of a configuration that belong to the present state.
    ///
    /// # Errors
    /// For a person, with what SPDK said.
    pub(in crate::block::spdk) fn configure(&self, json: &str) -> Result<(), String> {
        said::clear();
        // SAFETY: SPDK copies the text before it returns; the callback needs no context.
        unsafe {
            (self.api().subsystem_load_config)(
                json.as_ptr().cast(),
                json.len() as isize,
                inbox::on_step,
                ptr::null_mut(),
                true,
            );
        }
        self.finish("its configuration")
    }

    /// Starts the subsystems. Later configurations are those of a running system.
    ///
    /// # Errors
    /// For a person.
    pub(in crate::block::spdk) fn start_subsystems(&self) -> Result<(), String> {
        said::clear();
        self.subsystems.set(true);
        // SAFETY: the callback needs no context.
        unsafe { (self.api().subsystem_init)(inbox::on_step, ptr::null_mut()) };
        self.finish("the start of its subsystems")?;
        // SAFETY: they are started, which is what this state says.
        unsafe { (self.api().rpc_set_state)(2) };
        Ok(())
    }

    /// Names of all block devices.
    pub(in crate::block::spdk) fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        // SAFETY: the list is changed by this thread only; each element lives until then.
        unsafe {
            let mut at = (self.api().bdev_first)();
            while !at.is_null() {
                names.push(text((self.api().bdev_get_name)(at)));
                at = (self.api().bdev_next)(at);
            }
        }
        names
    }

    /// Opens a block device for writing. Its events come with the number `id`.
    ///
    /// # Errors
    /// For a person.
    pub(in crate::block::spdk) fn open(&self, name: &str, id: u64) -> Result<OpenBdev, String> {
        let api = self.api();
        said::clear();
        let c_name = CString::new(name).map_err(|_| "its name has a zero in it".to_owned())?;
        let mut descriptor = ptr::null_mut();
        // SAFETY: the name is a string; the descriptor is written where the call succeeds.
        let rc = unsafe {
            (api.bdev_open_ext)(
                c_name.as_ptr(),
                true,
                inbox::on_event,
                inbox::context(id),
                &raw mut descriptor,
            )
        };
        if rc != 0 {
            let error = errno(rc);
            return Err(said::explain(&match error.raw_os_error() {
                Some(libc::ENODEV) => format!(
                    "there is no block device {name}; there are: {}",
                    self.names().join(", ")
                ),
                Some(libc::EPERM) => format!(
                    "{name} belongs to another block device of SPDK's; name that one, or leave it out of the \
                     configuration"
                ),
                _ => format!("{name} cannot be opened: {error}"),
            }));
        }
        // SAFETY: the descriptor was opened by this thread.
        let channel = unsafe { (api.bdev_get_io_channel)(descriptor) };
        if channel.is_null() {
            // SAFETY: as above; it has no channel.
            unsafe { (api.bdev_close)(descriptor) };
            return Err(said::explain(&format!(
                "{name} has no queue left for this process"
            )));
        }
        // SAFETY: the device of an open descriptor lives as long as that is open.
        let facts = unsafe { self.facts((api.bdev_desc_get_bdev)(descriptor)) };
        Ok(OpenBdev {
            descriptor,
            channel,
            facts,
        })
    }

    /// # Safety
    /// `bdev` must be open.
    unsafe fn facts(&self, bdev: *mut Bdev) -> Facts {
        let api = self.api();
        // SAFETY: as the caller promises.
        unsafe {
            Facts {
                product: text((api.bdev_get_product_name)(bdev)),
                block_bytes: (api.bdev_get_block_size)(bdev).into(),
                blocks: (api.bdev_get_num_blocks)(bdev),
                metadata_bytes: (api.bdev_get_md_size)(bdev),
                has_write_cache: (api.bdev_has_write_cache)(bdev),
                is_nvme: (api.bdev_io_type_supported)(bdev, io_type::NVME_IO),
                can_flush: (api.bdev_io_type_supported)(bdev, io_type::FLUSH),
                can_unmap: (api.bdev_io_type_supported)(bdev, io_type::UNMAP),
                can_reset: (api.bdev_io_type_supported)(bdev, io_type::RESET),
            }
        }
    }

    /// Hands an operation to the device; its end comes with the number `id`. Data of a read or write is the
    /// beginning of `buffer`.
    ///
    /// # Errors
    /// The errno; ENOMEM: later. There will be no end then.
    pub(in crate::block::spdk) fn submit(
        &self,
        bdev: &OpenBdev,
        id: u64,
        operation: Operation,
        (off, len): (u64, u64),
        buffer: Option<&DmaBuffer>,
    ) -> Result<(), i32> {
        let api = self.api();
        let (descriptor, channel) = (bdev.descriptor, bdev.channel);
        let context = inbox::context(id);
        let data = buffer.map_or(ptr::null_mut(), |buffer| buffer.address().cast::<c_void>());
        // SAFETY: descriptor and channel are open and of this thread. The reactor keeps a buffer, which is as
        // long as what it asks for, until the end of the operation has come, and for ever if it does not
        // come. The command is copied before the call returns.
        let rc = unsafe {
            match operation {
                Operation::Read => {
                    (api.bdev_read)(descriptor, channel, data, off, len, inbox::on_end, context)
                }
                Operation::Write => {
                    (api.bdev_write)(descriptor, channel, data, off, len, inbox::on_end, context)
                }
                Operation::Unmap => (api.bdev_unmap)(descriptor, channel, off, len, inbox::on_end, context),
                Operation::Reset => (api.bdev_reset)(descriptor, channel, inbox::on_end, context),
                // SPDK's own driver answers a flush without asking the device, unless it was told otherwise
                // in a way that only later releases have. A command of 64 zeros is a flush: its opcode is 0,
                // and SPDK puts the namespace in.
                Operation::Flush if bdev.facts.is_nvme => {
                    let command = [0u64; 8];
                    let at = command.as_ptr().cast();
                    let end = inbox::on_end;
                    (api.bdev_nvme_io_passthru)(descriptor, channel, at, ptr::null_mut(), 0, end, context)
                }
                Operation::Flush => (api.bdev_flush)(descriptor, channel, off, len, inbox::on_end, context),
            }
        };
        match rc {
            0 => Ok(()),
            rc => Err(-rc),
        }
    }

    /// Moves the ends of operations to `ended`.
    pub(in crate::block::spdk) fn take_ended(&self, ended: &mut Vec<Ended>) {
        inbox::take_ended(ended);
    }

    /// Takes the events of devices.
    pub(in crate::block::spdk) fn take_events(&self) -> Vec<(u64, Event)> {
        inbox::take_events()
    }

    /// Whether the host wants a PCI device back, or has lost it.
    pub(in crate::block::spdk) fn is_removed(&self, address: PciAddress) -> bool {
        // SAFETY: the callback is called during the call only.
        unsafe { (self.api().pci_for_each_device)(ptr::null_mut(), inbox::on_pci_device) };
        inbox::take_removed().contains(&pci_addr(address))
    }

    /// Allocates memory for transfers.
    pub(in crate::block::spdk) fn allocate(&self, len: usize) -> Option<DmaBuffer> {
        DmaBuffer::new(self.api(), len)
    }

    /// Frees it.
    pub(in crate::block::spdk) fn free(&self, buffer: DmaBuffer) {
        buffer.free(self.api());
    }

    /// Closes a device whose operations have all ended.
    pub(in crate::block::spdk) fn close(&self, bdev: OpenBdev) {
        // SAFETY: open, of this thread, without operations; both end here.
        unsafe {
            (self.api().put_io_channel)(bdev.channel);
            (self.api().bdev_close)(bdev.descriptor);
        }
        // Channels are given back by a message.
        while self.poll() {}
    }

    /// Stops the subsystems and the thread; the environment stays for the next use. All devices are closed.
    ///
    /// # Errors
    /// For a person: something did not stop, and is left alone.
    pub(in crate::block::spdk) fn stop(self) -> Result<(), String> {
        let api = self.api();
        said::clear();
        let mut stopped = Ok(());
        if self.subsystems.get() {
            // SAFETY: the callback needs no context.
            unsafe { (api.subsystem_fini)(inbox::on_stopped, ptr::null_mut()) };
            stopped = self.finish("its stop");
        }
        let stopped = stopped.and_then(|()| self.end_thread());
        // Past this the thread does not enter the library, whatever has become of it.
        load::set_running(false);
        if let Err(error) = stopped {
            *self.library.environment.lock() = Some(Err(error.clone()));
            return Err(error);
        }
        // SAFETY: the thread of SPDK's has ended, and nothing of the library is in use.
        unsafe {
            (api.thread_destroy)(self.thread);
            (api.thread_lib_fini)();
        }
        Ok(())
    }

    fn end_thread(&self) -> Result<(), String> {
        let begun = Instant::now();
        // SAFETY: the thread is the one of this runtime.
        unsafe { (self.api().thread_exit)(self.thread) };
        // SAFETY: as above.
        while !unsafe { (self.api().thread_is_exited)(self.thread) } {
            self.poll();
            if begun.elapsed() > STEP_MAX {
                return Err(said::explain("its thread does not end"));
            }
        }
        Ok(())
    }
}

const fn pci_addr(address: PciAddress) -> PciAddr {
    PciAddr {
        domain: address.domain,
        bus: address.bus,
        device: address.device,
        function: address.function,
    }
}

fn start_environment(library: &Library, devices: &[PciAddress], huge: bool) -> Result<(), String> {
    let api = &library.api;
    let wanted = Environment {
        huge,
        pci: !devices.is_empty(),
    };
    let mut environment = library.environment.lock();
    said::clear();
    // SAFETY: the callback takes messages of any thread.
    unsafe { (api.log_open)(Some(inbox::on_message)) };
    if let Some(Err(error)) = &*environment {
        return Err(format!("{error}; restart the process to try again"));
    }
    if let Some(Ok(started)) = *environment {
        if wanted.pci && !started.pci {
            return Err("SPDK was started in this process without PCI devices; restart it".into());
        }
        // It is not stopped between two uses: SPDK would not translate addresses after a second start.
        return Ok(());
    }
    let mut options = options(api)?;
    let first = affinity();
    // SAFETY: tests a bit of the set.
    let processor = (0..libc::CPU_SETSIZE as usize).find(|at| unsafe { libc::CPU_ISSET(*at, &first) });
    let core_mask = CString::new(format!("[{}]", processor.unwrap_or(0))).unwrap_or_default();
    let mut allowed: Vec<PciAddr> = devices.iter().map(|address| pci_addr(*address)).collect();
    options.name = c"varve".as_ptr();
    options.core_mask = core_mask.as_ptr();
    options.no_pci = (!wanted.pci).into();
    // DPDK's virtual addresses have 46 bits; one that the IOMMU does not translate is no bus address. SPDK
    // looks at this too, for some processors.
    let bits = Places::default().iommu_address_bits();
    if wanted.pci && bits.is_some_and(|bits| bits < 48) {
        options.iova_mode = c"pa".as_ptr();
    }
    if wanted.pci {
        options.num_pci_addr = allowed.len();
        options.pci_allowed = allowed.as_mut_ptr();
    }
    if huge {
        // Huge pages without files: no mount of hugetlbfs is needed, and a kill leaves nothing behind.
        options.env_context = c"--in-memory".as_ptr();
    } else {
        options.no_huge = 1;
        options.mem_size = ORDINARY_MIB;
    }
    // SAFETY: the options are laid out as the library has them, checked above; strings and list live through
    // the call, which copies them.
    let rc = unsafe { (api.env_init)(&raw const *options) };
    if rc != 0 {
        let error = said::explain(&format!(
            "its environment (DPDK) does not start: {}; what it printed before this says more, and `varve \
             doctor` what is missing",
            errno(rc)
        ));
        // DPDK starts once, also where SPDK then finds it unfit.
        *environment = Some(Err(error.clone()));
        return Err(error);
    }
    *environment = Some(Ok(wanted));
    Ok(())
}
