//! The functions of `varve_cache.h`: a cache store (`varve-cache`) for C. Beside [`crate::ffi`] the only
//! module with `unsafe` code, by the same rules; decides nothing.
//!
//! # Safety
//! As in [`crate::ffi`]: buffers are as long as their lengths say, strings are NUL-terminated, results point
//! to memory of their type, arrays have as many elements as their counts say, and none of them changes during
//! the call. NULL is refused where a value is needed. Handles may have any value.
#![allow(unsafe_code)]
#![allow(
    clippy::missing_safety_doc,
    reason = "what callers owe is the same for all, and said once, above and at the top of varve_cache.h"
)]

use crate::ffi::{Outcome, as_path, c_path, guard, input, note, output, store, zero};
use crate::registry::{CACHE_HITS, CACHE_STREAMS, CACHES};
use ::varve_cache::device::{Device, DeviceError, FileDevice};
use ::varve_cache::store::Admission;
use ::varve_cache::{
    Cache, Hit, Options, Policy, PutOptions, PutOutcome, Related, Scope, StoreError, StorePlan,
};
use libc::{c_char, c_int, c_void, size_t, ssize_t};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use varve_libfs::Errno;

/// An open cache. All threads of the process may use it at once; only one process at a time can have it open.
#[allow(non_camel_case_types)]
pub struct varve_cache {
    _private: (),
}

/// An object that was found. It does not protect the object from being overwritten: a reader that is too slow
/// gets ESTALE.
#[allow(non_camel_case_types)]
pub struct varve_cache_hit {
    _private: (),
}

/// An object that is being put piece by piece. One thread at a time writes to it.
#[allow(non_camel_case_types)]
pub struct varve_cache_stream {
    _private: (),
}

/// Options of an open cache. Zeros are the defaults, and so is NULL in place of the structure.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct varve_cache_options {
    /// Memory for hot objects, in bytes; 0: 16 MiB.
    pub hot_bytes: u64,
    /// Longest interval in milliseconds between flushes, as long as puts or `varve_cache_tick`s come: a power
    /// cut loses at most the puts of that interval; 0: 2,000.
    pub flush_ms: u32,
    /// Write an object only when it is put for the second time within about this number of objects; 0: write
    /// all.
    pub second_request_window: u32,
    /// Write only this share of the objects, chosen at random, between 0 and 1; 0: write all. Not together
    /// with a window.
    pub admit_probability: f64,
    /// VARVE_CACHE_DEGRADED, or 0.
    pub flags: u32,
}

/// Open a cache although devices are missing: lookups of keys on them miss, and puts are not stored.
pub const VARVE_CACHE_DEGRADED: u32 = 1;
/// Make a store even if there is one already; its contents are lost.
pub const VARVE_CACHE_FORCE: u32 = 2;

/// Attributes of an object. Zeros are valid, and so is NULL in place of the structure.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy)]
#[repr(C)]
pub struct varve_cache_attrs {
    /// Metadata, returned with the object; at most 256 KiB.
    pub meta: *const c_void,
    /// Length of the metadata in bytes.
    pub meta_len: size_t,
    /// Tags by which the object can be purged, NUL-terminated.
    pub tags: *const *const c_char,
    /// Number of tags, at most 16.
    pub tag_count: size_t,
    /// Host by which the object can be purged, NUL-terminated, or NULL.
    pub host: *const c_char,
    /// Time from which it is no longer served, in seconds since 1970; 0: never.
    pub expires_s: u64,
}

/// One object of `varve_cache_put_related`.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy)]
#[repr(C)]
pub struct varve_cache_object {
    /// Its key.
    pub key: *const c_void,
    /// Length of the key in bytes, at most 2,048.
    pub key_len: size_t,
    /// Its body.
    pub body: *const c_void,
    /// Length of the body in bytes.
    pub body_len: size_t,
    /// Its attributes, or NULL.
    pub attrs: *const varve_cache_attrs,
}

/// Properties of an object that was found.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy)]
#[repr(C)]
pub struct varve_cache_info {
    /// Length of the body in bytes.
    pub body_len: u64,
    /// Length of the metadata in bytes.
    pub meta_len: u64,
    /// Sequence number of the write that stored it; later writes to a device have greater numbers.
    pub version: u64,
    /// Time when it was put, in seconds since 1970.
    pub written_s: u64,
    /// Time from which it is no longer served, in seconds since 1970; 0: never.
    pub expires_s: u64,
}

/// Counters since the cache was opened, of all its devices.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy)]
#[repr(C)]
pub struct varve_cache_counters {
    /// Lookups that found their object.
    pub hits: u64,
    /// Hits that were served from memory.
    pub memory_hits: u64,
    /// Lookups that found no object.
    pub misses: u64,
    /// Objects or pieces found damaged, or overwritten before they were read.
    pub damaged: u64,
    /// Objects found expired or purged.
    pub outdated: u64,
    /// Objects put.
    pub puts: u64,
    /// Objects put that were written.
    pub admitted: u64,
    /// Bytes of keys, metadata and bodies written for puts.
    pub admitted_bytes: u64,
    /// Bytes written to the devices for any purpose.
    pub written_bytes: u64,
    /// Objects read ahead, along with the one requested.
    pub prefetched: u64,
    /// Objects removed.
    pub removed: u64,
    /// Failed reads.
    pub read_errors: u64,
    /// Bytes of memory used by the index.
    pub index_bytes: u64,
    /// Devices that are missing or were given up after errors.
    pub devices_lost: u64,
}

/// Purge one object.
pub const VARVE_CACHE_KEY: c_int = 1;
/// Purge the objects put with a tag.
pub const VARVE_CACHE_TAG: c_int = 2;
/// Purge the objects put with a host.
pub const VARVE_CACHE_HOST: c_int = 3;
/// Purge the objects whose key has a prefix.
pub const VARVE_CACHE_PREFIX: c_int = 4;
/// Purge everything.
pub const VARVE_CACHE_ALL: c_int = 5;

/// Returns the errno of an error. If VARVE_DEBUG is set, prints the error to standard error as well: an errno
/// cannot tell which device failed.
fn errno(error: &StoreError) -> Errno {
    if std::env::var_os("VARVE_DEBUG").is_some() {
        note(error);
    }
    Errno(match error {
        StoreError::Device(error) => return device_errno(error),
        StoreError::NoStore { .. } => libc::ENODATA,
        StoreError::Version { .. } => libc::EPROTONOSUPPORT,
        StoreError::StoreExists { .. } => libc::EEXIST,
        StoreError::TooSmall { .. } => libc::ENOSPC,
        StoreError::Plan(_) | StoreError::Devices(_) | StoreError::OutOfRange { .. } => libc::EINVAL,
        StoreError::TooLong { .. } => libc::ENAMETOOLONG,
        StoreError::Gone => libc::ESTALE,
        StoreError::Length { .. } => libc::EMSGSIZE,
        StoreError::JournalFull => libc::EIO,
    })
}

fn device_errno(error: &DeviceError) -> Errno {
    match error.source.raw_os_error() {
        Some(errno) => Errno(errno),
        // An error that the device makes itself: another process has it open.
        None if error.source.kind() == std::io::ErrorKind::WouldBlock => Errno(libc::EWOULDBLOCK),
        None => Errno(libc::EIO),
    }
}

fn cache(cache: *const varve_cache) -> Outcome<Arc<Cache>> {
    CACHES.get(cache.addr()).map_err(Errno)
}

fn hit(hit: *const varve_cache_hit) -> Outcome<Arc<Hit>> {
    CACHE_HITS.get(hit.addr()).map_err(Errno)
}

/// Returns the elements of an array.
///
/// # Safety
/// `first` is NULL, or points to `count` elements that do not change while the result is used.
unsafe fn elements<'a, T>(first: *const T, count: size_t) -> Outcome<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    if count > 1 << 20 {
        return Err(Errno(libc::EINVAL));
    }
    // SAFETY: not NULL and of a bounded length; the caller vouches for the rest.
    Ok(unsafe { std::slice::from_raw_parts(first, count) })
}

/// [`varve_cache_attrs`] in Rust types; the slices of the tags need storage of their own.
struct Attrs<'a> {
    meta: &'a [u8],
    tags: Vec<&'a [u8]>,
    host: Option<&'a [u8]>,
    expires_s: u64,
}

impl<'a> Attrs<'a> {
    /// # Safety
    /// The caller's promise at the top of this file holds for as long as the result is used.
    unsafe fn of(attrs: *const varve_cache_attrs) -> Outcome<Self> {
        if attrs.is_null() {
            return Ok(Self {
                meta: &[],
                tags: Vec::new(),
                host: None,
                expires_s: 0,
            });
        }
        // SAFETY: not NULL; the caller vouches for its target.
        let attrs = unsafe { attrs.read() };
        // SAFETY: the caller's promise.
        let meta = unsafe { input(attrs.meta, attrs.meta_len) }?;
        // SAFETY: the caller's promise.
        let tags = unsafe { elements(attrs.tags, attrs.tag_count) }?;
        // SAFETY: the caller's promise.
        let tags = tags.iter().map(|tag| unsafe { c_path(*tag) });
        let host = match attrs.host.is_null() {
            true => None,
            // SAFETY: the caller's promise.
            false => Some(unsafe { c_path(attrs.host) }?),
        };
        Ok(Self {
            meta,
            tags: tags.collect::<Outcome<_>>()?,
            host,
            expires_s: attrs.expires_s,
        })
    }

    fn options(&self) -> PutOptions<'_> {
        PutOptions {
            meta: self.meta,
            tags: &self.tags,
            host: self.host,
            expires_s: self.expires_s,
        }
    }
}

/// Returns 0 (stored), 1 (not admitted) or an errno.
const fn put_outcome(outcome: PutOutcome) -> Outcome<c_int> {
    match outcome {
        PutOutcome::Stored { .. } => Ok(0),
        PutOutcome::NotAdmitted => Ok(1),
        PutOutcome::TooLarge => Err(Errno(libc::EFBIG)),
        PutOutcome::Unavailable => Err(Errno(libc::ENODEV)),
    }
}

/// Makes a cache on files or block devices: `count` names in `devices`. Files that do not exist are made with
/// a length of `bytes` each; 0 for block devices, and for files that exist. `policy`: a name as `varve cache
/// model` prints it; NULL for "log-prefetch". `flags`: VARVE_CACHE_FORCE, or 0. EEXIST if there is a store
/// already, ENOSPC if the devices are too small.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_mkstore(
    devices: *const *const c_char,
    count: size_t,
    bytes: u64,
    policy: *const c_char,
    flags: u32,
) -> c_int {
    zero(|| {
        if flags & !VARVE_CACHE_FORCE != 0 {
            return Err(Errno(libc::EINVAL));
        }
        let policy = match policy.is_null() {
            true => Policy::LogPrefetch,
            false => {
                // SAFETY: the caller's promise.
                let name = std::str::from_utf8(unsafe { c_path(policy) }?);
                let known = name.ok().and_then(|name| name.parse().ok());
                known.ok_or(Errno(libc::EINVAL))?
            }
        };
        let mut opened = Vec::new();
        // SAFETY: the caller's promise.
        for device in unsafe { elements(devices, count) }? {
            // SAFETY: the caller's promise.
            let path = as_path(unsafe { c_path(*device) }?);
            let device = match bytes > 0 && !path.exists() {
                true => FileDevice::create(path, bytes),
                false => FileDevice::open(path),
            };
            opened.push(device.map_err(|error| device_errno(&error))?);
        }
        let devices: Vec<&dyn Device> = opened.iter().map(|device| device as &dyn Device).collect();
        let force = flags & VARVE_CACHE_FORCE != 0;
        let made = Cache::format(&devices, &StorePlan::new(policy), force);
        made.map(drop).map_err(|error| errno(&error))
    })
}

/// Opens the cache on these devices, in any order. NULL and errno on failure: ENODATA if there is no store,
/// EWOULDBLOCK if another process has it open, EINVAL if devices are missing or belong to different caches.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_open(
    devices: *const *const c_char,
    count: size_t,
    options: *const varve_cache_options,
) -> *mut varve_cache {
    guard(std::ptr::null_mut(), || {
        let given = match options.is_null() {
            true => varve_cache_options::default(),
            // SAFETY: not NULL; the caller vouches for its target.
            false => unsafe { options.read() },
        };
        let both = given.second_request_window > 0 && given.admit_probability != 0.0;
        let is_share = (0.0..=1.0).contains(&given.admit_probability);
        if given.flags & !VARVE_CACHE_DEGRADED != 0 || both || !is_share {
            return Err(Errno(libc::EINVAL));
        }
        let mut options = Options::default();
        if given.hot_bytes > 0 {
            options.hot_bytes = usize::try_from(given.hot_bytes).unwrap_or(usize::MAX);
        }
        if given.flush_ms > 0 {
            options.flush_interval = Duration::from_millis(given.flush_ms.into());
        }
        if given.second_request_window > 0 {
            options.admission = Admission::SecondRequest {
                window: given.second_request_window,
            };
        } else if given.admit_probability > 0.0 {
            options.admission = Admission::Probability(given.admit_probability);
        }
        let degraded = given.flags & VARVE_CACHE_DEGRADED != 0;
        let mut opened: Vec<Arc<dyn Device>> = Vec::new();
        // SAFETY: the caller's promise.
        for device in unsafe { elements(devices, count) }? {
            // SAFETY: the caller's promise.
            let path = as_path(unsafe { c_path(*device) }?);
            match FileDevice::open(path) {
                Ok(device) => opened.push(Arc::new(device)),
                Err(_) if degraded => {}
                Err(error) => return Err(device_errno(&error)),
            }
        }
        let (cache, _) = Cache::open(opened, &options, degraded).map_err(|error| errno(&error))?;
        Ok(std::ptr::without_provenance_mut(CACHES.add(cache)))
    })
}

/// Writes all objects and the index, so that the next start is quick, and closes the cache. Objects that were
/// found are still readable; streams can put nothing any more. The handle is invalid afterwards, whatever
/// this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_close(c: *mut varve_cache) -> c_int {
    zero(|| {
        let cache = CACHES.take(c.addr()).map_err(Errno)?;
        cache.close().map_err(|error| errno(&error))
    })
}

/// Looks an object up; release it with `varve_cache_release`. NULL and ENOENT if it is not found: damage,
/// expiry, a purge and a failing device are misses too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_get(
    c: *mut varve_cache,
    key: *const c_void,
    key_len: size_t,
) -> *mut varve_cache_hit {
    guard(std::ptr::null_mut(), || {
        let cache = cache(c)?;
        // SAFETY: the caller's promise.
        let found = cache.get(unsafe { input(key, key_len) }?);
        let hit = found.ok_or(Errno(libc::ENOENT))?;
        Ok(std::ptr::without_provenance_mut(CACHE_HITS.add(hit)))
    })
}

/// Returns the properties of an object that was found.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_hit_info(h: *mut varve_cache_hit, info: *mut varve_cache_info) -> c_int {
    zero(|| {
        let hit = hit(h)?;
        let known = varve_cache_info {
            body_len: hit.body_len(),
            meta_len: hit.meta_len(),
            version: hit.version(),
            written_s: hit.written_s(),
            expires_s: hit.expires_s(),
        };
        // SAFETY: the caller's promise.
        unsafe { store(info, known) }
    })
}

/// Returns the length of the metadata of an object that was found, and copies its first `len` bytes to
/// `buffer`. ESTALE if it was overwritten or damaged meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_hit_meta(
    h: *mut varve_cache_hit,
    buffer: *mut c_void,
    len: size_t,
) -> ssize_t {
    guard(-1, || {
        let hit = hit(h)?;
        // SAFETY: the caller's promise.
        let out = unsafe { output(buffer, len) }?;
        let meta = hit.meta().map_err(|error| errno(&error))?;
        let now = meta.len().min(out.len());
        out[..now].copy_from_slice(&meta[..now]);
        Ok(meta.len() as ssize_t)
    })
}

/// Reads from the body of an object that was found, as pread(2). Returns the number of bytes read, 0 at the
/// end. Call it with a growing offset to stream a large body. ESTALE if the bytes were overwritten or damaged
/// meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_read(
    h: *mut varve_cache_hit,
    buffer: *mut c_void,
    len: size_t,
    offset: u64,
) -> ssize_t {
    guard(-1, || {
        let hit = hit(h)?;
        // SAFETY: the caller's promise.
        let out = unsafe { output(buffer, len) }?;
        let read = hit.read_at(offset, out).map_err(|error| errno(&error))?;
        Ok(read as ssize_t)
    })
}

/// Releases an object that was found. The handle is invalid afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_release(h: *mut varve_cache_hit) -> c_int {
    zero(|| CACHE_HITS.take(h.addr()).map(drop).map_err(Errno))
}

/// Looks an object up and reads a range of its body, as `varve_cache_get`, `varve_cache_read` and
/// `varve_cache_release`. `body_len`: NULL, or receives the length of the whole body.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_get_range(
    c: *mut varve_cache,
    key: *const c_void,
    key_len: size_t,
    buffer: *mut c_void,
    len: size_t,
    offset: u64,
    body_len: *mut u64,
) -> ssize_t {
    guard(-1, || {
        let cache = cache(c)?;
        // SAFETY: the caller's promise.
        let (key, out) = unsafe { (input(key, key_len)?, output(buffer, len)?) };
        let hit = cache.get(key).ok_or(Errno(libc::ENOENT))?;
        let read = match hit.read_at(offset, out) {
            Err(StoreError::Gone) => Err(Errno(libc::ENOENT)),
            read => read.map_err(|error| errno(&error)),
        }?;
        if !body_len.is_null() {
            // SAFETY: the caller's promise.
            unsafe { store(body_len, hit.body_len()) }?;
        }
        Ok(read as ssize_t)
    })
}

/// Puts an object. Returns 0 if it is in the cache, durable after the next flush; 1 if it was not admitted.
/// An older version is gone in either case. EFBIG if it is larger than half the log, ENODEV if its device is
/// missing or was given up, ENAMETOOLONG if a limit of `varve_cache_attrs` or of keys is exceeded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_put(
    c: *mut varve_cache,
    key: *const c_void,
    key_len: size_t,
    body: *const c_void,
    body_len: size_t,
    attrs: *const varve_cache_attrs,
) -> c_int {
    guard(-1, || {
        let cache = cache(c)?;
        // SAFETY: the caller's promise.
        let (key, body) = unsafe { (input(key, key_len)?, input(body, body_len)?) };
        // SAFETY: the caller's promise.
        let attrs = unsafe { Attrs::of(attrs) }?;
        let put = cache.put(key, body, attrs.options());
        put_outcome(put.map_err(|error| errno(&error))?)
    })
}

/// Puts at most 1,024 objects that are requested together: the first one first, the others after it was read.
/// Policies with prefetch then read all of them at once. Returns 0 no matter which were admitted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_put_related(
    c: *mut varve_cache,
    objects: *const varve_cache_object,
    count: size_t,
) -> c_int {
    zero(|| {
        let cache = cache(c)?;
        // SAFETY: the caller's promise.
        let objects = unsafe { elements(objects, count) }?;
        if objects.len() > 1024 {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the caller's promise.
        let attrs = objects.iter().map(|object| unsafe { Attrs::of(object.attrs) });
        let attrs = attrs.collect::<Outcome<Vec<_>>>()?;
        let related = objects.iter().zip(&attrs).map(|(object, attrs)| {
            // SAFETY: the caller's promise.
            let (key, body) = unsafe {
                (
                    input(object.key, object.key_len)?,
                    input(object.body, object.body_len)?,
                )
            };
            Ok(Related {
                key,
                body,
                options: attrs.options(),
            })
        });
        let related = related.collect::<Outcome<Vec<_>>>()?;
        cache.put_related(&related).map_err(|error| errno(&error))
    })
}

/// Begins to put an object of `body_len` bytes, piece by piece; large objects go to the device as the pieces
/// come. End it with `varve_cache_put_end` or `varve_cache_put_abort`. NULL and errno on failure, as
/// `varve_cache_put`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_put_begin(
    c: *mut varve_cache,
    key: *const c_void,
    key_len: size_t,
    body_len: u64,
    attrs: *const varve_cache_attrs,
) -> *mut varve_cache_stream {
    guard(std::ptr::null_mut(), || {
        let cache = cache(c)?;
        // SAFETY: the caller's promise.
        let key = unsafe { input(key, key_len) }?;
        // SAFETY: the caller's promise.
        let attrs = unsafe { Attrs::of(attrs) }?;
        let stream = cache.put_stream(key, body_len, attrs.options());
        let stream = stream
            .map_err(|error| errno(&error))?
            .ok_or(Errno(libc::ENODEV))?;
        let number = CACHE_STREAMS.add(Mutex::new(Some(stream)));
        Ok(std::ptr::without_provenance_mut(number))
    })
}

/// Appends the next bytes of an object. EMSGSIZE if there are more than were declared.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_put_write(
    s: *mut varve_cache_stream,
    buffer: *const c_void,
    len: size_t,
) -> c_int {
    zero(|| {
        let stream = CACHE_STREAMS.get(s.addr()).map_err(Errno)?;
        // SAFETY: the caller's promise.
        let bytes = unsafe { input(buffer, len) }?;
        let mut stream = stream.lock();
        let stream = stream.as_mut().ok_or(Errno(libc::EBADF))?;
        stream.write(bytes).map_err(|error| errno(&error))
    })
}

/// Ends the put of an object after its last bytes; returns as `varve_cache_put`. EMSGSIZE if there are fewer
/// bytes than were declared: nothing is put then. The handle is invalid afterwards, whatever this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_put_end(s: *mut varve_cache_stream) -> c_int {
    guard(-1, || {
        let stream = CACHE_STREAMS.take(s.addr()).map_err(Errno)?;
        let stream = stream.lock().take().ok_or(Errno(libc::EBADF))?;
        put_outcome(stream.finish().map_err(|error| errno(&error))?)
    })
}

/// Abandons the put of an object. The handle is invalid afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_put_abort(s: *mut varve_cache_stream) -> c_int {
    zero(|| {
        let stream = CACHE_STREAMS.take(s.addr()).map_err(Errno)?;
        drop(stream.lock().take());
        Ok(())
    })
}

/// Deletes an object: later lookups do not find it. Durable after the next flush. Returns 0 also if there was
/// no such object.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_delete(
    c: *mut varve_cache,
    key: *const c_void,
    key_len: size_t,
) -> c_int {
    zero(|| {
        let cache = cache(c)?;
        // SAFETY: the caller's promise.
        let key = unsafe { input(key, key_len) }?;
        cache.remove(key).map_err(|error| errno(&error))
    })
}

/// Purges the objects put into a scope so far: `kind` is VARVE_CACHE_KEY, _TAG, _HOST, _PREFIX or _ALL,
/// `what` the bytes of the key, tag, host or prefix. Durable when this returns; the cost does not depend on
/// the size of the scope.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_purge(
    c: *mut varve_cache,
    kind: c_int,
    what: *const c_void,
    len: size_t,
) -> c_int {
    zero(|| {
        let cache = cache(c)?;
        // SAFETY: the caller's promise.
        let what = unsafe { input(what, len) }?;
        let scope = match kind {
            VARVE_CACHE_KEY => Scope::Key(what),
            VARVE_CACHE_TAG => Scope::Tag(what),
            VARVE_CACHE_HOST => Scope::Host(what),
            VARVE_CACHE_PREFIX if !what.is_empty() => Scope::Prefix(what),
            VARVE_CACHE_ALL => Scope::Everything,
            _ => return Err(Errno(libc::EINVAL)),
        };
        cache.purge(scope).map_err(|error| errno(&error))
    })
}

/// Makes all earlier changes durable when this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_flush(c: *mut varve_cache) -> c_int {
    zero(|| cache(c)?.flush().map_err(|error| errno(&error)))
}

/// Flushes if the flush interval has passed. Call it about once a second, so that puts become durable even if
/// no other call follows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_tick(c: *mut varve_cache) -> c_int {
    zero(|| cache(c)?.tick().map_err(|error| errno(&error)))
}

/// Returns the counters since the cache was opened.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_cache_stats(
    c: *mut varve_cache,
    counters: *mut varve_cache_counters,
) -> c_int {
    zero(|| {
        let cache = cache(c)?;
        let stats = cache.stats();
        let there = cache.shards().filter(|shard| !shard.is_failed()).count();
        let counted = varve_cache_counters {
            hits: stats.hits,
            memory_hits: stats.memory_hits,
            misses: stats.misses,
            damaged: stats.damaged,
            outdated: stats.outdated,
            puts: stats.puts,
            admitted: stats.admitted,
            admitted_bytes: stats.admitted_bytes,
            written_bytes: stats.written_bytes,
            prefetched: stats.prefetched,
            removed: stats.removed,
            read_errors: stats.read_errors,
            index_bytes: cache.shards().map(|shard| shard.index_memory_bytes().0).sum(),
            devices_lost: (cache.device_count() - there) as u64,
        };
        // SAFETY: the caller's promise.
        unsafe { store(counters, counted) }
    })
}
