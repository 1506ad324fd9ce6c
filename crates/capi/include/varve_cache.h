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

// Open a cache although devices are missing: lookups of keys on them miss, and puts are not stored.
#define VARVE_CACHE_DEGRADED 1

// Make a store even if there is one already; its contents are lost.
#define VARVE_CACHE_FORCE 2

// Purge one object.
#define VARVE_CACHE_KEY 1

// Purge the objects put with a tag.
#define VARVE_CACHE_TAG 2

// Purge the objects put with a host.
#define VARVE_CACHE_HOST 3

// Purge the objects whose key has a prefix.
#define VARVE_CACHE_PREFIX 4

// Purge everything.
#define VARVE_CACHE_ALL 5

// An open cache. All threads of the process may use it at once; only one process at a time can have it open.
typedef struct varve_cache varve_cache;

// An object that was found. It does not protect the object from being overwritten: a reader that is too slow
// gets ESTALE.
typedef struct varve_cache_hit varve_cache_hit;

// An object that is being put piece by piece. One thread at a time writes to it.
typedef struct varve_cache_stream varve_cache_stream;

// Options of an open cache. Zeros are the defaults, and so is NULL in place of the structure.
typedef struct {
    // Memory for hot objects, in bytes; 0: 16 MiB.
    uint64_t hot_bytes;
    // Longest interval in milliseconds between flushes, as long as puts or `varve_cache_tick`s come: a power
    // cut loses at most the puts of that interval; 0: 2,000.
    uint32_t flush_ms;
    // Write an object only when it is put for the second time within about this number of objects; 0: write
    // all.
    uint32_t second_request_window;
    // Write only this share of the objects, chosen at random, between 0 and 1; 0: write all. Not together
    // with a window.
    double admit_probability;
    // VARVE_CACHE_DEGRADED, or 0.
    uint32_t flags;
} varve_cache_options;

// Properties of an object that was found.
typedef struct {
    // Length of the body in bytes.
    uint64_t body_len;
    // Length of the metadata in bytes.
    uint64_t meta_len;
    // Sequence number of the write that stored it; later writes to a device have greater numbers.
    uint64_t version;
    // Time when it was put, in seconds since 1970.
    uint64_t written_s;
    // Time from which it is no longer served, in seconds since 1970; 0: never.
    uint64_t expires_s;
} varve_cache_info;

// Attributes of an object. Zeros are valid, and so is NULL in place of the structure.
typedef struct {
    // Metadata, returned with the object; at most 256 KiB.
    const void *meta;
    // Length of the metadata in bytes.
    size_t meta_len;
    // Tags by which the object can be purged, NUL-terminated.
    const char *const *tags;
    // Number of tags, at most 16.
    size_t tag_count;
    // Host by which the object can be purged, NUL-terminated, or NULL.
    const char *host;
    // Time from which it is no longer served, in seconds since 1970; 0: never.
    uint64_t expires_s;
} varve_cache_attrs;

// One object of `varve_cache_put_related`.
typedef struct {
    // Its key.
    const void *key;
    // Length of the key in bytes, at most 2,048.
    size_t key_len;
    // Its body.
    const void *body;
    // Length of the body in bytes.
    size_t body_len;
    // Its attributes, or NULL.
    const varve_cache_attrs *attrs;
} varve_cache_object;

// Counters since the cache was opened, of all its devices.
typedef struct {
    // Lookups that found their object.
    uint64_t hits;
    // Hits that were served from memory.
    uint64_t memory_hits;
    // Lookups that found no object.
    uint64_t misses;
    // Objects or pieces found damaged, or overwritten before they were read.
    uint64_t damaged;
    // Objects found expired or purged.
    uint64_t outdated;
    // Objects put.
    uint64_t puts;
    // Objects put that were written.
    uint64_t admitted;
    // Bytes of keys, metadata and bodies written for puts.
    uint64_t admitted_bytes;
    // Bytes written to the devices for any purpose.
    uint64_t written_bytes;
    // Objects read ahead, along with the one requested.
    uint64_t prefetched;
    // Objects removed.
    uint64_t removed;
    // Failed reads.
    uint64_t read_errors;
    // Bytes of memory used by the index.
    uint64_t index_bytes;
    // Devices that are missing or were given up after errors.
    uint64_t devices_lost;
} varve_cache_counters;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes a cache on files or block devices: `count` names in `devices`. Files that do not exist are made with
// a length of `bytes` each; 0 for block devices, and for files that exist. `policy`: a name as `varve cache
// model` prints it; NULL for "log-prefetch". `flags`: VARVE_CACHE_FORCE, or 0. EEXIST if there is a store
// already, ENOSPC if the devices are too small.
int varve_cache_mkstore(const char *const *devices,
                        size_t count,
                        uint64_t bytes,
                        const char *policy,
                        uint32_t flags);

// Opens the cache on these devices, in any order. NULL and errno on failure: ENODATA if there is no store,
// EWOULDBLOCK if another process has it open, EINVAL if devices are missing or belong to different caches.
varve_cache *varve_cache_open(const char *const *devices, size_t count, const varve_cache_options *options);

// Writes all objects and the index, so that the next start is quick, and closes the cache. Objects that were
// found are still readable; streams can put nothing any more. The handle is invalid afterwards, whatever
// this returns.
int varve_cache_close(varve_cache *c);

// Looks an object up; release it with `varve_cache_release`. NULL and ENOENT if it is not found: damage,
// expiry, a purge and a failing device are misses too.
varve_cache_hit *varve_cache_get(varve_cache *c, const void *key, size_t key_len);

// Returns the properties of an object that was found.
int varve_cache_hit_info(varve_cache_hit *h, varve_cache_info *info);

// Returns the length of the metadata of an object that was found, and copies its first `len` bytes to
// `buffer`. ESTALE if it was overwritten or damaged meanwhile.
ssize_t varve_cache_hit_meta(varve_cache_hit *h, void *buffer, size_t len);

// Reads from the body of an object that was found, as pread(2). Returns the number of bytes read, 0 at the
// end. Call it with a growing offset to stream a large body. ESTALE if the bytes were overwritten or damaged
// meanwhile.
ssize_t varve_cache_read(varve_cache_hit *h, void *buffer, size_t len, uint64_t offset);

// Releases an object that was found. The handle is invalid afterwards.
int varve_cache_release(varve_cache_hit *h);

// Looks an object up and reads a range of its body, as `varve_cache_get`, `varve_cache_read` and
// `varve_cache_release`. `body_len`: NULL, or receives the length of the whole body.
ssize_t varve_cache_get_range(varve_cache *c,
                              const void *key,
                              size_t key_len,
                              void *buffer,
                              size_t len,
                              uint64_t offset,
                              uint64_t *body_len);

// Puts an object. Returns 0 if it is in the cache, durable after the next flush; 1 if it was not admitted.
// An older version is gone in either case. EFBIG if it is larger than half the log, ENODEV if its device is
// missing or was given up, ENAMETOOLONG if a limit of `varve_cache_attrs` or of keys is exceeded.
int varve_cache_put(varve_cache *c,
                    const void *key,
                    size_t key_len,
                    const void *body,
                    size_t body_len,
                    const varve_cache_attrs *attrs);

// Puts at most 1,024 objects that are requested together: the first one first, the others after it was read.
// Policies with prefetch then read all of them at once. Returns 0 no matter which were admitted.
int varve_cache_put_related(varve_cache *c, const varve_cache_object *objects, size_t count);

// Begins to put an object of `body_len` bytes, piece by piece; large objects go to the device as the pieces
// come. End it with `varve_cache_put_end` or `varve_cache_put_abort`. NULL and errno on failure, as
// `varve_cache_put`.
varve_cache_stream *varve_cache_put_begin(varve_cache *c,
                                          const void *key,
                                          size_t key_len,
                                          uint64_t body_len,
                                          const varve_cache_attrs *attrs);

// Appends the next bytes of an object. EMSGSIZE if there are more than were declared.
int varve_cache_put_write(varve_cache_stream *s, const void *buffer, size_t len);

// Ends the put of an object after its last bytes; returns as `varve_cache_put`. EMSGSIZE if there are fewer
// bytes than were declared: nothing is put then. The handle is invalid afterwards, whatever this returns.
int varve_cache_put_end(varve_cache_stream *s);

// Abandons the put of an object. The handle is invalid afterwards.
int varve_cache_put_abort(varve_cache_stream *s);

// Deletes an object: later lookups do not find it. Durable after the next flush. Returns 0 also if there was
// no such object.
int varve_cache_delete(varve_cache *c, const void *key, size_t key_len);

// Purges the objects put into a scope so far: `kind` is VARVE_CACHE_KEY, _TAG, _HOST, _PREFIX or _ALL,
// `what` the bytes of the key, tag, host or prefix. Durable when this returns; the cost does not depend on
// the size of the scope.
int varve_cache_purge(varve_cache *c, int kind, const void *what, size_t len);

// Makes all earlier changes durable when this returns.
int varve_cache_flush(varve_cache *c);

// Flushes if the flush interval has passed. Call it about once a second, so that puts become durable even if
// no other call follows.
int varve_cache_tick(varve_cache *c);

// Returns the counters since the cache was opened.
int varve_cache_stats(varve_cache *c, varve_cache_counters *counters);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VARVE_CACHE_H */
