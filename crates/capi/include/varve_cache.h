// A cache store of Varve for C programs: objects (a key, metadata, a body of a byte to many GiB) on files or whole disks, found by an index
// of 0 to 55 bits an object. It needs no pool and no daemon. Link with -lvarve, or `pkg-config --cflags --libs varve`; in words:
// docs/guide/cache.md.
//
// Calls fail with -1 (or NULL) and `errno`: NULL for a handle is EINVAL, NULL for bytes that are needed EFAULT, a handle that is not (or no more)
// one EBADF. Keys, metadata and bodies are bytes with a length; tags and hosts of an object are NUL-terminated. With VARVE_DEBUG in
// the environment the cause of a failure goes to standard error in words.
//
// What is found is one whole version of the object that was asked for, whatever crash or damage; a cache may lose objects. Every function
// may be called from several threads at once, on the same handles too, and none of them after a fork without exec.


#ifndef VARVE_CACHE_H
#define VARVE_CACHE_H

// Made by cbindgen from crates/capi/src/cache.rs: change it there.

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

// Open a cache of which devices are missing: their share of keys is missed and not stored.
#define VARVE_CACHE_DEGRADED 1

// Make a store where there is one; what it holds is lost.
#define VARVE_CACHE_FORCE 2

// Purge one object.
#define VARVE_CACHE_KEY 1

// Purge what was put with a tag.
#define VARVE_CACHE_TAG 2

// Purge what was put with a host.
#define VARVE_CACHE_HOST 3

// Purge what has a key that begins so.
#define VARVE_CACHE_PREFIX 4

// Purge everything.
#define VARVE_CACHE_ALL 5

// An open cache. All threads of the process may use it at once; one process at a time has it open.
typedef struct varve_cache varve_cache;

// An object that was found. It keeps nothing from being overwritten: a reader that is too slow gets ESTALE.
typedef struct varve_cache_hit varve_cache_hit;

// An object that is being put piece by piece. One thread at a time writes to it.
typedef struct varve_cache_stream varve_cache_stream;

// How a cache is run. Zeros are the defaults, and so is NULL in place of it.
typedef struct {
    // Memory for hot objects, bytes; 0: 16 MiB.
    uint64_t hot_bytes;
    // At most so much is lost at a power cut, as long as puts or `varve_cache_tick`s come; 0: 2,000.
    uint32_t flush_ms;
    // Write only what is put for the second time within about so many objects; 0: everything.
    uint32_t second_request_window;
    // Write only this share of the objects, between 0 and 1; 0: everything. Not with a window.
    double admit_probability;
    // VARVE_CACHE_DEGRADED, or 0.
    uint32_t flags;
} varve_cache_options;

// What is known of an object that was found.
typedef struct {
    // Bytes of the body.
    uint64_t body_len;
    // Bytes of the metadata.
    uint64_t meta_len;
    // The number of the write that it comes from; later writes to a device have greater ones.
    uint64_t version;
    // When it was put, seconds since 1970.
    uint64_t written_s;
    // From when on it is not served, seconds since 1970; 0: never.
    uint64_t expires_s;
} varve_cache_info;

// What goes with an object. Zeros are good, and so is NULL in place of it.
typedef struct {
    // Given back with the object; at most 256 KiB.
    const void *meta;
    // Bytes of it.
    size_t meta_len;
    // Tags by which it can be purged, NUL-terminated.
    const char *const *tags;
    // How many, at most 16.
    size_t tag_count;
    // A host by which it can be purged, NUL-terminated, or NULL.
    const char *host;
    // From when on it is not served, seconds since 1970; 0: never.
    uint64_t expires_s;
} varve_cache_attrs;

// One object of `varve_cache_put_related`.
typedef struct {
    // Its key.
    const void *key;
    // Bytes of it, at most 2,048.
    size_t key_len;
    // Its body.
    const void *body;
    // Bytes of it.
    size_t body_len;
    // What goes with it, or NULL.
    const varve_cache_attrs *attrs;
} varve_cache_object;

// Counters since the cache was opened, of all its devices.
typedef struct {
    // Lookups that found their object.
    uint64_t hits;
    // Of these, from memory.
    uint64_t memory_hits;
    // Lookups that did not.
    uint64_t misses;
    // Objects or pieces that were damaged, or overwritten before they were read.
    uint64_t damaged;
    // Objects found expired or purged.
    uint64_t outdated;
    // Objects put.
    uint64_t puts;
    // Of these, written.
    uint64_t admitted;
    // Bytes of keys, metadata and bodies that were written for puts.
    uint64_t admitted_bytes;
    // Bytes written to the devices, for whatever reason.
    uint64_t written_bytes;
    // Objects read beside the one asked for.
    uint64_t prefetched;
    // Objects removed.
    uint64_t removed;
    // Reads that failed.
    uint64_t read_errors;
    // Bytes of memory that the index takes.
    uint64_t index_bytes;
    // Devices that are missing or were given up.
    uint64_t devices_lost;
} varve_cache_counters;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes a cache on files or block devices: `count` names in `devices`. Files that are not there are made,
// `bytes` long each; 0 for block devices, and for files that are there already. `policy`: as `varve cache
// model` prints them, "log-prefetch" for instance; NULL for that. `flags`: VARVE_CACHE_FORCE, or 0. EEXIST
// if there is a store already, ENOSPC if the devices are too small.
int varve_cache_mkstore(const char *const *devices,
                        size_t count,
                        uint64_t bytes,
                        const char *policy,
                        uint32_t flags);

// Opens the cache on these devices, in any order. NULL and errno on failure: ENODATA if there is no store,
// EWOULDBLOCK if another process has it open, EINVAL if devices are missing or of different caches.
varve_cache *varve_cache_open(const char *const *devices, size_t count, const varve_cache_options *options);

// Writes everything and the index, so that the next start is quick, and closes the cache. Objects that were
// found are still readable; streams put nothing any more. The handle is gone, whatever this returns.
int varve_cache_close(varve_cache *c);

// Looks an object up; give it back with `varve_cache_release`. NULL and ENOENT if it is not there: damage,
// expiry, a purge and a device that fails are misses too.
varve_cache_hit *varve_cache_get(varve_cache *c, const void *key, size_t key_len);

// What is known of an object that was found.
int varve_cache_hit_info(varve_cache_hit *h, varve_cache_info *info);

// The metadata of an object that was found: how many bytes it has, of which as many as `len` are stored in
// `buffer`. ESTALE if it was overwritten or damaged meanwhile.
ssize_t varve_cache_hit_meta(varve_cache_hit *h, void *buffer, size_t len);

// As pread(2), of the body of an object that was found: how many bytes were read, 0 at its end. Call it with
// a growing offset to stream a large one. ESTALE if the bytes were overwritten or damaged meanwhile.
ssize_t varve_cache_read(varve_cache_hit *h, void *buffer, size_t len, uint64_t offset);

// Gives an object back that was found. The handle is gone.
int varve_cache_release(varve_cache_hit *h);

// Looks an object up and reads a range of its body, as `varve_cache_get`, `varve_cache_read` and
// `varve_cache_release`. `body_len`: NULL, or gets the length of the whole body.
ssize_t varve_cache_get_range(varve_cache *c,
                              const void *key,
                              size_t key_len,
                              void *buffer,
                              size_t len,
                              uint64_t offset,
                              uint64_t *body_len);

// Puts an object. 0: it is in the cache, and durable after the next flush. 1: it was not admitted. An older
// version is gone in any case. EFBIG if it is larger than half the log, ENODEV if its device is missing or
// was given up, ENAMETOOLONG if a bound of `varve_cache_attrs` or of keys is passed.
int varve_cache_put(varve_cache *c,
                    const void *key,
                    size_t key_len,
                    const void *body,
                    size_t body_len,
                    const varve_cache_attrs *attrs);

// Puts objects that will be asked for together, at most 1,024: the first one first, the others when it was
// read. Policies with prefetch read them all at once then. 0, whatever was admitted.
int varve_cache_put_related(varve_cache *c, const varve_cache_object *objects, size_t count);

// Begins to put an object of `body_len` bytes, piece by piece; large ones go to the device as they come. End
// it with
// `varve_cache_put_end` or `varve_cache_put_abort`. NULL and errno on failure, as `varve_cache_put`.
varve_cache_stream *varve_cache_put_begin(varve_cache *c,
                                          const void *key,
                                          size_t key_len,
                                          uint64_t body_len,
                                          const varve_cache_attrs *attrs);

// The next bytes of an object. EMSGSIZE if there are more than were declared.
int varve_cache_put_write(varve_cache_stream *s, const void *buffer, size_t len);

// Puts the object, now that its bytes are there; returns as `varve_cache_put`. EMSGSIZE if there are fewer
// than were declared: nothing is put then. The handle is gone, whatever this returns.
int varve_cache_put_end(varve_cache_stream *s);

// Puts nothing after all. The handle is gone.
int varve_cache_put_abort(varve_cache_stream *s);

// Deletes an object: it is not found from now on. Durable after the next flush. 0 also if it was not there.
int varve_cache_delete(varve_cache *c, const void *key, size_t key_len);

// Purges what was put into a scope before: `kind` is VARVE_CACHE_KEY, _TAG, _HOST, _PREFIX or _ALL, `what`
// the bytes of the key, tag, host or prefix. Durable when this returns; costs the same whatever it covers.
int varve_cache_purge(varve_cache *c, int kind, const void *what, size_t len);

// Makes everything before durable. Durable when this returns.
int varve_cache_flush(varve_cache *c);

// Flushes if the interval has gone by. Call it about once a second, so that what was put is durable also
// when nothing follows.
int varve_cache_tick(varve_cache *c);

// Counters since the cache was opened.
int varve_cache_stats(varve_cache *c, varve_cache_counters *counters);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VARVE_CACHE_H */
