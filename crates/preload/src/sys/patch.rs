//! Replaces the sites found by `sites` in loaded libraries by jumps to stubs, which call `entry`.

use super::kernel;
use super::noted::Notes;
use super::sites::Site;
use std::ffi::CStr;

/// Bytes reserved per stub.
const STUB: usize = 64;
/// Longest site in bytes.
const SITE: usize = 8;
const PAGE: usize = 4096;
/// Greatest distance in bytes between a library and its stubs.
const REACH: usize = 0x6000_0000;
const STEP: usize = 0x10_0000;

/// The executable part of a loaded library.
#[derive(Debug, Clone)]
pub struct Library {
    /// Its name as the loader has it.
    pub name: Vec<u8>,
    /// Start address.
    pub start: usize,
    len: usize,
}

/// Returns the loaded libraries, and the program.
#[must_use]
pub fn loaded() -> Vec<Library> {
    extern "C" fn note(info: *mut libc::dl_phdr_info, _size: usize, out: *mut libc::c_void) -> i32 {
        // SAFETY: the loader passes a valid record, and `out` is the vector given below.
        let (info, out) = unsafe { (&*info, &mut *out.cast::<Vec<Library>>()) };
        let name = if info.dlpi_name.is_null() {
            Vec::new()
        } else {
            // SAFETY: the loader's names end with a zero byte.
            unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes().to_vec()
        };
        for i in 0..usize::from(info.dlpi_phnum) {
            // SAFETY: there are `dlpi_phnum` headers.
            let header = unsafe { &*info.dlpi_phdr.add(i) };
            if header.p_type == libc::PT_LOAD
                && header.p_flags & libc::PF_X != 0
                && header.p_flags & libc::PF_R != 0
            {
                let start = info.dlpi_addr as usize + header.p_vaddr as usize;
                out.push(Library {
                    name: name.clone(),
                    start,
                    len: header.p_memsz as usize,
                });
            }
        }
        0
    }
    let mut found = Vec::<Library>::new();
    // SAFETY: the callback has the right type, and the vector outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut found).cast()) };
    found
}

/// Maps memory for stubs within jump distance of the code at `near`.
fn map_near(near: usize, len: usize) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE | libc::MAP_POPULATE;
    let mut distance = STEP;
    while distance < REACH {
        if let Some(at) = (near & !(STEP - 1)).checked_sub(distance) {
            let a = [
                at,
                len,
                (libc::PROT_READ | libc::PROT_WRITE) as usize,
                flags as usize,
                usize::MAX,
                0,
            ];
            // SAFETY: NOREPLACE maps over nothing.
            let got = unsafe { kernel::call(libc::SYS_mmap as usize, a) };
            if got == at as isize {
                return Some(at);
            }
            if got > 0 {
                // An old kernel without NOREPLACE put it elsewhere.
                // SAFETY: just mapped, and not yet used.
                unsafe { kernel::call(libc::SYS_munmap as usize, [got as usize, len, 0, 0, 0, 0]) };
                return None;
            }
        }
        distance += STEP;
    }
    None
}

fn protect(start: usize, len: usize, protection: i32) -> bool {
    let from = start & !(PAGE - 1);
    let to = (start + len).next_multiple_of(PAGE);
    // SAFETY: the caller names memory of a library or of stubs, and requests all the rights that are needed
    // to go on.
    unsafe {
        kernel::call(
            libc::SYS_mprotect as usize,
            [from, to - from, protection as usize, 0, 0, 0],
        ) == 0
    }
}

/// A library whose code can be written until this is dropped.
struct Restored<'l>(&'l Library);

impl Drop for Restored<'_> {
    fn drop(&mut self) {
        protect(self.0.start, self.0.len, libc::PROT_READ | libc::PROT_EXEC);
    }
}

/// Has the kernel copy the pages of a library that are about to be changed, several in a call: a fault for
/// each takes twice as long. `offsets` are in order, and a hint: where they lie outside, nothing is done.
fn populate(library: &Library, offsets: impl Iterator<Item = usize>) {
    let mut run: Option<(usize, usize)> = None;
    let pages = offsets
        .filter(|offset| *offset < library.len)
        .map(|offset| (library.start + offset) & !(PAGE - 1));
    for page in pages.map(Some).chain([None]) {
        match (&mut run, page) {
            (Some((_, end)), Some(page)) if page == *end || page + PAGE == *end => *end = page + PAGE,
            _ => {
                if let Some((from, end)) = run.take() {
                    let a = [from, end - from, libc::MADV_POPULATE_WRITE as usize, 0, 0, 0];
                    // SAFETY: pages of a loaded segment, which keep what they hold. Before Linux 5.14 it is
                    // refused.
                    unsafe { kernel::call(libc::SYS_madvise as usize, a) };
                }
                run = page.map(|page| (page, page + PAGE));
            }
        }
    }
}

/// A piece of code, put together without memory from the heap: there are hundreds at every start.
struct Code<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Code<N> {
    /// `N` times the filler.
    fn new(filler: u8) -> Self {
        Self {
            bytes: [filler; N],
            len: 0,
        }
    }

    fn add(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }
}

/// The stub of a site. `here`: its address; `site_at`: the site's; `original`: the replaced bytes.
fn stub(here: usize, site_at: usize, site: &Site, original: &[u8], entry: usize) -> Code<STUB> {
    let mut code = Code::new(0xcc); // int3
    if site.loads.is_some() {
        code.add(&original[..5]);
    }
    code.add(&[0x48, 0x8d, 0x64, 0x24, 0x80]); // lea rsp, [rsp - 128]: beyond the red zone
    code.add(&[0x49, 0xbb]); // movabs r11, entry
    code.add(&(entry as u64).to_le_bytes());
    code.add(&[0x41, 0xff, 0xd3]); // call r11
    code.add(&[0x48, 0x8d, 0xa4, 0x24, 0x80, 0, 0, 0]); // lea rsp, [rsp + 128]
    code.add(&[0x45, 0x85, 0xdb]); // test r11d, r11d
    code.add(&[0x74, 0x02]); // je over the call
    code.add(&[0x0f, 0x05]); // syscall
    code.add(&original[original.len() - site.tail..]);
    code.add(&[0xe9]); // jmp behind the site
    let next = here + code.len + 4;
    let back = (site_at + site.len).wrapping_sub(next) as u32;
    code.add(&back.to_le_bytes());
    code
}

/// The jump that takes the place of a site, to its stub.
fn jump(here: usize, site_at: usize) -> Code<SITE> {
    let mut code = Code::new(0x90); // nop
    code.add(&[0xe9]);
    code.add(&(here.wrapping_sub(site_at + 5) as u32).to_le_bytes());
    code
}

/// Replaces the sites in `library`. Returns the number of replaced sites. Changes nothing, and returns
/// `None`, if the memory cannot be made writable (a security policy) or no memory for stubs is free near it.
///
/// # Safety
/// No other thread may run code of the library meanwhile. `entry` is the address of the code that stubs call.
pub unsafe fn patch(
    library: &Library,
    entry: usize,
    wanted: impl Fn(u32) -> bool,
    unknown: bool,
) -> Option<usize> {
    // SAFETY: a loaded, readable segment.
    let code = unsafe { std::slice::from_raw_parts(library.start as *const u8, library.len) };
    let notes = Notes::of(&library.name);
    let (read, write, exec) = (libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC);
    if !protect(library.start, library.len, read | write | exec) {
        return None;
    }
    let done = Restored(library);
    populate(library, notes.starts());
    let sites = notes.find(code, wanted, unknown);
    if sites.is_empty() {
        return Some(0);
    }
    let len = (sites.len() * STUB).next_multiple_of(PAGE);
    let stubs = map_near(library.start, len)?;
    for (i, site) in sites.iter().enumerate() {
        let (here, site_at) = (stubs + i * STUB, library.start + site.start);
        let original = &code[site.start..site.start + site.len];
        let stub = stub(here, site_at, site, original, entry);
        // SAFETY: the stub's part of the memory mapped above, still writable.
        unsafe { std::ptr::copy_nonoverlapping(stub.bytes.as_ptr(), here as *mut u8, STUB) };
    }
    if !protect(stubs, len, read | exec) {
        // SAFETY: no site jumps there yet.
        unsafe { kernel::call(libc::SYS_munmap as usize, [stubs, len, 0, 0, 0, 0]) };
        return None;
    }
    for (i, site) in sites.iter().enumerate() {
        let site_at = library.start + site.start;
        let jump = jump(stubs + i * STUB, site_at);
        // SAFETY: inside the segment, made writable above; no thread runs it, as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(jump.bytes.as_ptr(), site_at as *mut u8, site.len.min(SITE)) };
    }
    drop(done);
    Some(sites.len())
}
