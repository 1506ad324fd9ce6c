//! Replaces the sites found by `sites` in loaded libraries by jumps to stubs, which call `entry`: in memory, or
//! by a copy of the library in which another process has done so.

use super::image::{self, Image, NoImage};
use super::kernel;
use super::noted::{self, Notes};
use super::sites::Site;
use std::ffi::CStr;

/// Bytes reserved per stub.
const STUB: usize = 64;
/// Longest site in bytes.
const SITE: usize = 8;
pub(super) const PAGE: usize = 4096;
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
    /// Where the part lies in the library's file.
    pub offset: usize,
    /// Address and length of what is loaded of the start of the file.
    first: Option<(usize, usize)>,
}

impl Library {
    /// Its code in memory.
    #[must_use]
    pub fn code(&self) -> &[u8] {
        // SAFETY: a loaded, readable segment; libraries are not unloaded while this one starts.
        unsafe { std::slice::from_raw_parts(self.start as *const u8, self.len) }
    }

    /// The first bytes of its file, as far as they are loaded.
    #[must_use]
    pub fn head(&self, len: usize) -> Option<&[u8]> {
        let (at, loaded) = self.first?;
        // SAFETY: as above.
        (len <= loaded).then(|| unsafe { std::slice::from_raw_parts(at as *const u8, len) })
    }
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
        let mut first = None;
        for i in 0..usize::from(info.dlpi_phnum) {
            // SAFETY: there are `dlpi_phnum` headers.
            let header = unsafe { &*info.dlpi_phdr.add(i) };
            if header.p_type == libc::PT_LOAD && header.p_offset == 0 && header.p_flags & libc::PF_R != 0 {
                let start = info.dlpi_addr as usize + header.p_vaddr as usize;
                first = Some((start, header.p_filesz as usize));
            }
            if header.p_type == libc::PT_LOAD
                && header.p_flags & libc::PF_X != 0
                && header.p_flags & libc::PF_R != 0
            {
                let start = info.dlpi_addr as usize + header.p_vaddr as usize;
                out.push(Library {
                    name: name.clone(),
                    start,
                    len: header.p_memsz as usize,
                    offset: header.p_offset as usize,
                    first,
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

pub(super) fn protect(start: usize, len: usize, protection: i32) -> bool {
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

/// The stub of a site. `here`: its address; `site_at`: the site's; `original`: the replaced bytes; `slot`:
/// where the address that it calls is.
fn stub(here: usize, site_at: usize, site: &Site, original: &[u8], slot: usize) -> Code<STUB> {
    let mut code = Code::new(0xcc); // int3
    if site.loads.is_some() {
        code.add(&original[..5]);
    }
    code.add(&[0x48, 0x8d, 0x64, 0x24, 0x80]); // lea rsp, [rsp - 128]: beyond the red zone
    code.add(&[0xff, 0x15]); // call [rip + distance to the slot]
    let next = here + code.len + 4;
    code.add(&(slot.wrapping_sub(next) as u32).to_le_bytes());
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

/// Puts stubs for the sites of `code`, whose memory lies at `start`, into `stubs`, whose memory lies behind the
/// page at `slot`.
fn put_stubs(sites: &[Site], code: &[u8], start: usize, slot: usize, stubs: &mut [u8]) {
    for ((i, site), out) in sites.iter().enumerate().zip(stubs.chunks_exact_mut(STUB)) {
        let original = &code[site.start..site.start + site.len];
        let here = slot + PAGE + i * STUB;
        out.copy_from_slice(&stub(here, start + site.start, site, original, slot).bytes);
    }
}

/// Puts jumps to these stubs into `code`.
fn put_jumps(sites: &[Site], code: &mut [u8], start: usize, slot: usize) {
    for (i, site) in sites.iter().enumerate() {
        let jump = jump(slot + PAGE + i * STUB, start + site.start);
        let len = site.len.min(SITE);
        code[site.start..site.start + len].copy_from_slice(&jump.bytes[..len]);
    }
}

/// Replaces the sites in `library`, by its copy if there can be one. Returns the number of replaced sites.
/// Changes nothing, and returns `None`, if neither can be done: the memory cannot be made writable (a security
/// policy), or no memory for stubs is free near it.
///
/// # Safety
/// No other thread may run code of the library meanwhile. `entry` is the address of the code that stubs call.
pub unsafe fn patch(
    library: &Library,
    entry: usize,
    wanted: impl Fn(u32) -> bool,
    unknown: bool,
) -> Option<usize> {
    let path = noted::path_for(&library.name);
    let mut image = path
        .as_deref()
        .map_or(Err(NoImage::Unfit), |path| Image::open(path, library));
    let mut notes = None;
    let find = |notes: &Notes| notes.find(library.code(), &wanted, unknown);
    if let (Some(path), Err(NoImage::Missing)) = (&path, &image) {
        let notes = notes.insert(Notes::at(Some(path.clone())));
        let sites = find(notes);
        if sites.is_empty() {
            return Some(0);
        }
        image::write(path, library, sites.len() * STUB, |code, slot, stubs| {
            put_stubs(&sites, code, library.start, slot, stubs);
            put_jumps(&sites, code, library.start, slot);
            sites.len()
        });
        image = Image::open(path, library);
    }
    if let Ok(image) = &image {
        // SAFETY: the caller promises that there is one thread; the copy was judged.
        if let Some(sites) = unsafe { image.map(library, entry) } {
            return Some(sites);
        }
    }
    let notes = notes.unwrap_or_else(|| Notes::at(path));
    let (read, write, exec) = (libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC);
    if !protect(library.start, library.len, read | write | exec) {
        return None;
    }
    let done = Restored(library);
    populate(library, notes.starts());
    let sites = find(&notes);
    if sites.is_empty() {
        return Some(0);
    }
    let len = PAGE + (sites.len() * STUB).next_multiple_of(PAGE);
    let slot = map_near(library.start, len)?;
    // SAFETY: the memory mapped above, which nothing else uses.
    let near = unsafe { std::slice::from_raw_parts_mut(slot as *mut u8, len) };
    let (first, stubs) = near.split_at_mut(PAGE);
    first[..size_of::<usize>()].copy_from_slice(&entry.to_ne_bytes());
    put_stubs(&sites, library.code(), library.start, slot, stubs);
    if !protect(slot, len, read | exec) {
        // SAFETY: no site jumps there yet.
        unsafe { kernel::call(libc::SYS_munmap as usize, [slot, len, 0, 0, 0, 0]) };
        return None;
    }
    // SAFETY: the library's code, made writable above; no other thread runs it, as the caller promises, and
    // nothing here is in it.
    let code = unsafe { std::slice::from_raw_parts_mut(library.start as *mut u8, library.len) };
    put_jumps(&sites, code, library.start, slot);
    drop(done);
    Some(sites.len())
}
