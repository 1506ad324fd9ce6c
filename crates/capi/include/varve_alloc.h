// Far memory at addresses for C programs (SSDAlloc): objects and bytes that lie in a log on a slow device, but for those in use. Pointers are
// plain pointers; touching what is not in memory brings it. It needs no pool and no daemon. Link with -lvarve, or
// `pkg-config --cflags --libs varve`; in words: docs/guide/far-objects.md.
//
// Calls fail with -1 (or NULL) and `errno`: NULL for a heap is EINVAL, one that is not (or no more) open EBADF, a pointer that nothing begins at
// EINVAL, no bytes EINVAL, too many ENOMEM, a full store ENOSPC, and so is one with checkpoints that is full until the next checkpoint. With
// VARVE_DEBUG in the environment the cause goes to standard error in words.
//
// Every function may be called from several threads at once, but not from signal handlers. System calls may be given these addresses. A page that
// cannot be read, because its device fails, is SIGBUS for who touches it (EFAULT of a system call), and so is memory that was freed; after a second it
// is tried again. In a heap with checkpoints (va_create) whose file is full until the next one, a touch for which a page must leave waits for two
// seconds, and is SIGBUS then: make checkpoints in a thread that touches no far memory. A child of `fork` does not have the memory: touching it is
// SIGSEGV, calls are EPERM.


#ifndef VARVE_ALLOC_H
#define VARVE_ALLOC_H

// Made by cbindgen from crates/capi/src/alloc.rs: change it there.

#include <stddef.h>
#include <stdint.h>

// Bytes that a program may put into a checkpoint.
#define VA_RECORD_MAX 4064

// A heap of far memory. All threads of the process may use it at once.
typedef struct va_heap va_heap;

// Options of a heap. Zeros are the defaults, and so is NULL in place of the structure.
typedef struct {
    // Memory for pages that are in use, in bytes, of the limit; 0: 25 MiB. A quarter of the limit at most.
    uint64_t page_buffer_bytes;
    // Addresses, in bytes; 0: 32 times the store. Without effect for va_restore: the file says it.
    uint64_t address_bytes;
    // Where the addresses begin, a multiple of 2 MiB; 0: where there is room. For va_create alone: 0 for
    // va_open, without effect for va_restore.
    uint64_t start_address;
    // Threads that bring pages, 1 to 16; 0: 2.
    uint32_t threads;
    // 0.
    uint32_t flags;
} va_options;

// What a checkpoint took.
typedef struct {
    // Its number in the file: larger than that of the one before.
    uint64_t generation;
    // How long threads that write were stopped at once, in nanoseconds.
    uint64_t stopped_ns;
    // Bytes that the call wrote to the file.
    uint64_t written_bytes;
    // Those of tables, of them.
    uint64_t table_bytes;
} va_checkpointed;

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

// Makes a heap with checkpoints, in a file of its own: it is made with mode 0600, or is there and empty. It
// grows to store_bytes (rounded up to MiB) and 1 MiB at most: twice as large as what it is to hold.
// schema_tag is a number of the program for the layout of what it stores; va_restore wants the same. An
// empty checkpoint and the file's name are durable when this returns. While the heap is open its file is
// locked; a child of fork that was made meanwhile holds the lock, too, until it ends or calls exec.
//
// NULL and errno on failure, and a file that was made is gone again, unless another heap took it: as
// va_open; EEXIST if the file has bytes; EBUSY if another heap uses it; EADDRINUSE if something is at
// start_address; EINVAL if that is no multiple of 2 MiB, or the addresses do not lie between 2 MiB and 2^47;
// ENOENT, EACCES and others as open(2); EIO.
va_heap *va_create(const char *path,
                   uint64_t store_bytes,
                   uint64_t schema_tag,
                   uint64_t memory_bytes,
                   const va_options *options);

// Makes a checkpoint: all memory of the heap, and what is allocated, as it is at one moment of this call. It
// is durable when this returns 0; until then a crash leaves the one before, and what was changed since that
// one is lost. record_len bytes of record, VA_RECORD_MAX at most, go with it: the pointers that the program
// begins with. made tells what it took; NULL: nobody asks.
//
// May be called at any time by any thread; calls at once wait for each other. Other threads stop for the
// moment itself, and go on while it is written. The moment is one of all threads: each is between two
// instructions, as if the machine lost its power then. Allocations and frees are in it whole or not at all,
// but a va_realloc that moves more than 1 MiB may be in it with both blocks, of which the new one has no
// name. What a device or io_uring writes to a page by itself at that moment (direct I/O, registered buffers)
// is in it in part.
//
// On failure the checkpoint before is the last: EINVAL for a heap of va_open and for a long record; EFAULT
// if record is NULL and record_len is not 0; ENOSPC if the file has no room; EIO if it cannot be written.
// After a sync that failed all others fail with EIO: va_close and va_restore. EPERM in a child of fork.
int va_checkpoint(va_heap *h, const void *record, size_t record_len, va_checkpointed *made);

// The heap of the last complete checkpoint of a file of va_create, at the same addresses: pointers into it
// are as they were. It goes on in the file, and its checkpoints too. Reads tables, no objects. The
// checkpoint's record goes to record, which has room for record_size bytes (VA_RECORD_MAX are always
// enough), and its length to record_len; NULL for either: nobody asks.
//
// NULL and errno on failure, and the file is as useful as before: EADDRINUSE if this process has something
// at the heap's addresses (restore it before that is mapped, or in another process); EBUSY if another heap
// uses the file; EINVAL if the file holds no heap with addresses, has no complete checkpoint, was made by a
// newer version, or with another schema_tag; EIO if its checkpoint is damaged or cannot be read or written;
// ENOMEM if the tables do not fit into memory_bytes; ERANGE if the record is longer than record_size,
// record_len has its length then; ENOENT and others as open(2); as va_open.
va_heap *va_restore(const char *path,
                    uint64_t schema_tag,
                    uint64_t memory_bytes,
                    const va_options *options,
                    void *record,
                    size_t record_size,
                    size_t *record_len);

// Ends a heap and all that was allocated; a heap with checkpoints has its last one in its file, and none is
// made. Threads that touch it meanwhile get SIGBUS, and SIGSEGV after that; calls that have begun end first.
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
