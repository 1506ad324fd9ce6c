// Far memory at addresses for C programs (SSDAlloc): objects and bytes that lie in a log on a slow device, but for those in use. Pointers are
// plain pointers; touching what is not in memory brings it. It needs no pool and no daemon. Link with -lvarve, or
// `pkg-config --cflags --libs varve`; in words: docs/guide/far-objects.md.
//
// Calls fail with -1 (or NULL) and `errno`: NULL for a heap is EINVAL, one that is not (or no more) open EBADF, a pointer that nothing begins at
// EINVAL, no bytes EINVAL, too many ENOMEM, a full store ENOSPC. With VARVE_DEBUG in the environment the cause goes to standard error in words.
//
// Every function may be called from several threads at once, but not from signal handlers. System calls may be given these addresses. A page that
// cannot be read, because its device fails, is SIGBUS for who touches it (EFAULT of a system call), and so is memory that was freed; after a second it
// is tried again. A child of `fork` does not have the memory: touching it is SIGSEGV, calls are EPERM.


#ifndef VARVE_ALLOC_H
#define VARVE_ALLOC_H

// Made by cbindgen from crates/capi/src/alloc.rs: change it there.

#include <stddef.h>
#include <stdint.h>

// A heap of far memory. All threads of the process may use it at once.
typedef struct va_heap va_heap;

// Options of a heap. Zeros are the defaults, and so is NULL in place of the structure.
typedef struct {
    // Memory for pages that are in use, in bytes, of the limit; 0: 25 MiB. A quarter of the limit at most.
    uint64_t page_buffer_bytes;
    // Addresses, in bytes; 0: 32 times the store.
    uint64_t address_bytes;
    // Threads that bring pages, 1 to 16; 0: 2.
    uint32_t threads;
    // 0.
    uint32_t flags;
} va_options;

// What a heap has and did.
typedef struct {
    // Faults that brought a page.
    uint64_t faults;
    // First writes to pages that were read before.
    uint64_t write_faults;
    // Pages that left memory.
    uint64_t left;
    // Touches that were SIGBUS.
    uint64_t poisoned;
    // Pages in memory now.
    uint64_t pages;
    // Memory in use, in bytes.
    uint64_t memory_used_bytes;
    // The limit of it.
    uint64_t memory_limit_bytes;
    // Bytes read from the device.
    uint64_t device_read_bytes;
    // Bytes written to the device.
    uint64_t device_write_bytes;
} va_counters;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes a heap: at most store_bytes (rounded up to MiB, at least 4 MiB) in a file without a name in the
// directory, and memory_bytes for everything that it keeps in memory, at least 2 MiB. NULL and errno on
// failure: EPERM, EACCES or ENOSYS if the kernel lets nobody, or not this process, serve faults (root,
// CAP_SYS_PTRACE, access to /dev/userfaultfd, or vm.unprivileged_userfaultfd=1; Linux 6.8, else EINVAL).
va_heap *va_open(const char *directory,
                 uint64_t store_bytes,
                 uint64_t memory_bytes,
                 const va_options *options);

// Ends a heap and all that was allocated. Threads that touch it meanwhile get SIGBUS, and SIGSEGV after
// that; calls that have begun end first.
int va_close(va_heap *h);

// Memory for count objects of size bytes, all zeros. Each begins on a page of its own: the next object of
// an array is va_stride bytes further. What is stored and read is the object, not the page.
void *va_oalloc(va_heap *h, size_t count, size_t size);

// Distance in bytes of the objects of an array of va_oalloc.
size_t va_stride(size_t size);

// Memory of size bytes in pages that are stored as a whole, aligned to 16. EINVAL for 0 bytes.
void *va_malloc(va_heap *h, size_t size);

// As va_malloc, for count times size bytes of zeros. ENOMEM if that product overflows.
void *va_calloc(va_heap *h, size_t count, size_t size);

// Makes memory of va_malloc or va_calloc larger or smaller; NULL is as for va_malloc. On failure it is as
// before: EINVAL for 0 bytes and for memory of va_oalloc.
void *va_realloc(va_heap *h, void *memory, size_t size);

// Frees memory of this heap; NULL is nothing to do. EINVAL if nothing begins there, as after it was freed.
int va_free(va_heap *h, void *memory);

// Brings len bytes and keeps their pages in memory until va_unpin. Pins count. ENOMEM beyond a quarter of
// the page buffer; EIO if a page cannot be read; nothing is pinned then.
int va_pin(va_heap *h, void *memory, size_t len);

// Ends va_pin of the same range. EINVAL if a page of it has no pin.
int va_unpin(va_heap *h, void *memory, size_t len);

// Lets all pages that are not pinned leave memory.
int va_flush(va_heap *h);

// Gives the counters of a heap.
int va_stats(va_heap *h, va_counters *counters);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VARVE_ALLOC_H */
