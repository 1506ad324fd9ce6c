//! The functions of SPDK that are used, as a table that is filled when the library is loaded. Owns the
//! signatures and the one structure whose layout is known; calls nothing.
//!
//! The table is small so that many releases fit it: the block device layer, the configuration by JSON, one
//! thread, and memory. Everything else of SPDK is reached by the configuration. All signatures are those of
//! the releases 24.05 to 26.05, whose headers agree in them.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};

/// A thread of SPDK's: a set of pollers and messages, not a thread of the kernel's.
pub type Thread = c_void;
/// A block device of SPDK's.
pub type Bdev = c_void;
/// An opened block device.
pub type Descriptor = c_void;
/// One thread's queue to a block device.
pub type Channel = c_void;
/// An operation that has ended.
pub type BdevIo = c_void;
/// A function of a PCI device.
pub type PciDevice = c_void;

/// Told of the end of an operation.
pub type OnEnd = unsafe extern "C" fn(io: *mut BdevIo, success: bool, context: *mut c_void);
/// Told of an event of a block device: 0 removal, 1 another size.
pub type OnEvent = unsafe extern "C" fn(event: c_uint, bdev: *mut Bdev, context: *mut c_void);
/// Told of the end of a step of the start, with 0 or a negative errno.
pub type OnStep = unsafe extern "C" fn(rc: c_int, context: *mut c_void);
/// Told that everything has stopped.
pub type OnStopped = unsafe extern "C" fn(context: *mut c_void);
/// Given each PCI device.
pub type OnPciDevice = unsafe extern "C" fn(context: *mut c_void, device: *mut PciDevice);
/// Given each message of the log. The last parameter is a `va_list`, which both x86-64 and AArch64 pass as a
/// pointer.
pub type OnMessage = unsafe extern "C" fn(
    level: c_int,
    file: *const c_char,
    line: c_int,
    function: *const c_char,
    format: *const c_char,
    arguments: *mut c_void,
);

/// A PCI address as SPDK has it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PciAddr {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device.
    pub device: u8,
    /// Function.
    pub function: u8,
}

/// Options of the environment (`struct spdk_env_opts`), with room for what later releases append.
///
/// From 24.05 on the fields below have these places; 24.09 added `opts_size`, by which a later release knows
/// how much of the structure its caller has. The start compares the
/// defaults that the library fills in with what it expects at these places, before it uses any of them.
/// Flags are bytes here, so that whatever the library writes is a value.
#[repr(C)]
pub struct EnvOpts {
    /// Name for messages.
    pub name: *const c_char,
    /// Processors, as `[N]`.
    pub core_mask: *const c_char,
    /// The same in another form; not with `core_mask`.
    pub lcore_map: *const c_char,
    /// Negative: this process shares nothing.
    pub shm_id: c_int,
    /// Memory channels.
    pub mem_channel: c_int,
    /// Main processor.
    pub main_core: c_int,
    /// MiB of memory; negative: as needed.
    pub mem_size: c_int,
    /// Without PCI.
    pub no_pci: u8,
    /// One file for all huge pages.
    pub hugepage_single_segments: u8,
    /// Remove the files of huge pages.
    pub unlink_hugepage: u8,
    /// Ordinary pages.
    pub no_huge: u8,
    /// Unused.
    pub reserved: u32,
    /// Length of one of the lists below.
    pub num_pci_addr: usize,
    /// Mount of hugetlbfs.
    pub hugedir: *const c_char,
    /// Devices that are not looked at.
    pub pci_blocked: *mut PciAddr,
    /// Devices that alone are looked at.
    pub pci_allowed: *mut PciAddr,
    /// Kind of bus addresses; null: SPDK's choice.
    pub iova_mode: *const c_char,
    /// First address that is tried for mappings.
    pub base_virtaddr: u64,
    /// Further arguments for DPDK, a string.
    pub env_context: *const c_char,
    /// Token of a virtual function.
    pub vf_token: *const c_char,
    /// Bytes of this structure that the caller knows; from 24.09 on.
    pub opts_size: usize,
    /// From 24.09 on.
    pub enforce_numa: u8,
    /// From 24.09 on.
    pub reserved2: [u8; 7],
    /// For what a later release clears or sets.
    pub room: [u8; 3968],
}

/// Bytes of [`EnvOpts`] that are known, and said to the library.
pub const ENV_OPTS_BYTES: usize = 128;

const _: () = {
    assert!(offset_of!(EnvOpts, shm_id) == 24);
    assert!(offset_of!(EnvOpts, no_huge) == 43);
    assert!(offset_of!(EnvOpts, num_pci_addr) == 48);
    assert!(offset_of!(EnvOpts, base_virtaddr) == 88);
    assert!(offset_of!(EnvOpts, opts_size) == 112);
    assert!(offset_of!(EnvOpts, room) == ENV_OPTS_BYTES);
    assert!(size_of::<EnvOpts>() == 4096);
    assert!(size_of::<PciAddr>() == 8);
};

/// Declares the table and the function that fills it, so that a name is written once.
macro_rules! api {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions of a loaded SPDK (or of a double of it).
        ///
        /// All are called on the one thread that called `env_init`.
        #[derive(Clone, Copy)]
        pub struct Api {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Api {
            /// Fills the table by a function that finds a symbol.
            ///
            /// # Errors
            /// Names of the symbols that were not found.
            ///
            /// # Safety
            /// `find` must return null, or the address of the function that SPDK defines under that name.
            pub unsafe fn resolve(
                mut find: impl FnMut(&CStr) -> *const c_void,
            ) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                let mut address = |symbol: &'static CStr| {
                    let address = find(symbol);
                    if address.is_null() {
                        missing.push(symbol.to_str().unwrap_or("?"));
                    }
                    address
                };
                $(let $name = address($symbol);)*
                if !missing.is_empty() {
                    return Err(missing);
                }
                Ok(Self {
                    $(
                        // SAFETY: not null, checked above, and the function of that name, as the caller
                        // promises; its signature is the one in SPDK's headers.
                        $name: unsafe {
                            std::mem::transmute::<
                                *const c_void,
                                unsafe extern "C" fn($($arg),*) $(-> $ret)?,
                            >($name)
                        },
                    )*
                })
            }
        }
    };
}

api! {
    /// Fills in defaults.
    env_opts_init = c"spdk_env_opts_init": fn(*mut EnvOpts);
    /// Starts the environment.
    env_init = c"spdk_env_init": fn(*const EnvOpts) -> c_int;
    /// Stops it.
    env_fini = c"spdk_env_fini": fn();
    /// Allocates memory for transfers: bytes, alignment, null.
    dma_malloc = c"spdk_dma_zmalloc": fn(usize, usize, *mut u64) -> *mut c_void;
    /// Frees it.
    dma_free = c"spdk_dma_free": fn(*mut c_void);
    /// Given each PCI device that SPDK has.
    pci_for_each_device = c"spdk_pci_for_each_device": fn(*mut c_void, OnPciDevice);
    /// Its address.
    pci_device_get_addr = c"spdk_pci_device_get_addr": fn(*mut PciDevice) -> PciAddr;
    /// Whether it is gone, or the host wants it back.
    pci_device_is_removed = c"spdk_pci_device_is_removed": fn(*mut PciDevice) -> bool;
    /// Diverts the log.
    log_open = c"spdk_log_open": fn(Option<OnMessage>);
    /// Starts the thread library: two null functions, bytes of context, messages of its pool.
    thread_lib_init = c"spdk_thread_lib_init_ext": fn(*const c_void, *const c_void, usize, usize) -> c_int;
    /// Stops it.
    thread_lib_fini = c"spdk_thread_lib_fini": fn();
    /// Makes a thread: name, processors or null.
    thread_create = c"spdk_thread_create": fn(*const c_char, *const c_void) -> *mut Thread;
    /// Makes it the thread of the calling one.
    set_thread = c"spdk_set_thread": fn(*mut Thread);
    /// Runs its pollers and messages once. Positive: it had work.
    thread_poll = c"spdk_thread_poll": fn(*mut Thread, u32, u64) -> c_int;
    /// Asks it to end.
    thread_exit = c"spdk_thread_exit": fn(*mut Thread) -> c_int;
    /// Whether it has ended.
    thread_is_exited = c"spdk_thread_is_exited": fn(*mut Thread) -> bool;
    /// Frees it.
    thread_destroy = c"spdk_thread_destroy": fn(*mut Thread);
    /// 1: before the start of the subsystems; 2: after it.
    rpc_set_state = c"spdk_rpc_set_state": fn(u32);
    /// Carries out the entries of a configuration that the state allows: text, bytes, end, context, stop at
    /// an error.
    subsystem_load_config = c"spdk_subsystem_load_config":
        fn(*const c_void, isize, OnStep, *mut c_void, bool);
    /// Starts the subsystems.
    subsystem_init = c"spdk_subsystem_init": fn(OnStep, *mut c_void);
    /// Stops them.
    subsystem_fini = c"spdk_subsystem_fini": fn(OnStopped, *mut c_void);
    /// First of all block devices, or null.
    bdev_first = c"spdk_bdev_first": fn() -> *mut Bdev;
    /// The next one.
    bdev_next = c"spdk_bdev_next": fn(*mut Bdev) -> *mut Bdev;
    /// Its name.
    bdev_get_name = c"spdk_bdev_get_name": fn(*const Bdev) -> *const c_char;
    /// Opens a block device: name, for writing, events, their context.
    bdev_open_ext = c"spdk_bdev_open_ext":
        fn(*const c_char, bool, OnEvent, *mut c_void, *mut *mut Descriptor) -> c_int;
    /// Closes it.
    bdev_close = c"spdk_bdev_close": fn(*mut Descriptor);
    /// The block device of a descriptor.
    bdev_desc_get_bdev = c"spdk_bdev_desc_get_bdev": fn(*mut Descriptor) -> *mut Bdev;
    /// A channel of the calling thread, or null.
    bdev_get_io_channel = c"spdk_bdev_get_io_channel": fn(*mut Descriptor) -> *mut Channel;
    /// Gives it back.
    put_io_channel = c"spdk_put_io_channel": fn(*mut Channel);
    /// Kind of device, for people.
    bdev_get_product_name = c"spdk_bdev_get_product_name": fn(*const Bdev) -> *const c_char;
    /// Bytes of a block.
    bdev_get_block_size = c"spdk_bdev_get_block_size": fn(*const Bdev) -> u32;
    /// Blocks.
    bdev_get_num_blocks = c"spdk_bdev_get_num_blocks": fn(*const Bdev) -> u64;
    /// Bytes of metadata of a block.
    bdev_get_md_size = c"spdk_bdev_get_md_size": fn(*const Bdev) -> u32;
    /// Whether writes may stay in a volatile cache.
    bdev_has_write_cache = c"spdk_bdev_has_write_cache": fn(*const Bdev) -> bool;
    /// Whether it has an operation.
    bdev_io_type_supported = c"spdk_bdev_io_type_supported": fn(*mut Bdev, c_uint) -> bool;
    /// Reads: descriptor, channel, memory, first byte, bytes, end, context.
    bdev_read = c"spdk_bdev_read":
        fn(*mut Descriptor, *mut Channel, *mut c_void, u64, u64, OnEnd, *mut c_void) -> c_int;
    /// Writes.
    bdev_write = c"spdk_bdev_write":
        fn(*mut Descriptor, *mut Channel, *mut c_void, u64, u64, OnEnd, *mut c_void) -> c_int;
    /// Deallocates.
    bdev_unmap = c"spdk_bdev_unmap":
        fn(*mut Descriptor, *mut Channel, u64, u64, OnEnd, *mut c_void) -> c_int;
    /// Flushes.
    bdev_flush = c"spdk_bdev_flush":
        fn(*mut Descriptor, *mut Channel, u64, u64, OnEnd, *mut c_void) -> c_int;
    /// Sends an NVMe command of 64 bytes: descriptor, channel, command, memory, bytes, end, context.
    bdev_nvme_io_passthru = c"spdk_bdev_nvme_io_passthru": fn(
        *mut Descriptor, *mut Channel, *const c_void, *mut c_void, usize, OnEnd, *mut c_void
    ) -> c_int;
    /// Resets.
    bdev_reset = c"spdk_bdev_reset": fn(*mut Descriptor, *mut Channel, OnEnd, *mut c_void) -> c_int;
    /// Frees an ended operation.
    bdev_free_io = c"spdk_bdev_free_io": fn(*mut BdevIo);
    /// Its NVMe status: result, type, code.
    bdev_io_get_nvme_status = c"spdk_bdev_io_get_nvme_status":
        fn(*const BdevIo, *mut u32, *mut c_int, *mut c_int);
    /// Its negative errno, where a file or device of the kernel's is below it; else −EIO.
    bdev_io_get_aio_status = c"spdk_bdev_io_get_aio_status": fn(*const BdevIo, *mut c_int);
}

/// Numbers of `enum spdk_bdev_io_type`; the list has only grown at its end.
pub mod io_type {
    use std::ffi::c_uint;

    /// Deallocate.
    pub const UNMAP: c_uint = 3;
    /// Flush.
    pub const FLUSH: c_uint = 4;
    /// Reset.
    pub const RESET: c_uint = 5;
    /// An NVMe command.
    pub const NVME_IO: c_uint = 7;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::Api;

    #[test]
    fn missing_functions_are_all_named() {
        // SAFETY: no address at all is returned.
        let missing = unsafe { Api::resolve(|_| std::ptr::null()) }.err().unwrap();
        assert!(missing.contains(&"spdk_env_init") && missing.contains(&"spdk_bdev_read"));
        assert!(missing.len() > 40, "{missing:?}");
    }
}
