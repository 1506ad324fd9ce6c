/* One of two processes that use the same file, each in its own way. Run by tests/run.rs: peer WAY FILE, where the way of its reads and writes is
 *   calls   the C library's (served under `varve run`; through the mount when the program is static),
 *   raw     `syscall` instructions of its own, which the library does not see: opening too,
 *   uring   io_uring, set up when the file is open already,
 *   aio     Linux' asynchronous I/O, likewise,
 *   map     loads and stores in a shared map of pages that the file has.
 * Does what each line of its input says: `w OFFSET TEXT`, `r OFFSET LEN`, `many FIRST COUNT` (writes every second record from FIRST on, reads it back, and
 * fails if it is another one); answers a line, `unavailable` before all else where the kernel does not have the way. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { RECORD = 8, TEXT = 256 };

/* A system call that no library sees. */
static long raw(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return result;
}

static int fd;

static long by_calls(int writes, char *text, size_t len, off_t at) {
    return writes ? pwrite(fd, text, len, at) : pread(fd, text, len, at);
}

static long by_instructions(int writes, char *text, size_t len, off_t at) {
    return raw(writes ? SYS_pwrite64 : SYS_pread64, fd, (long)text, len, at, 0, 0);
}

static long by_map(int writes, char *text, size_t len, off_t at) {
    long page = sysconf(_SC_PAGESIZE), first = at / page * page, bytes = at + len - first;
    char *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, first);
    if (map == MAP_FAILED) return -1;
    if (writes) memcpy(map + (at - first), text, len);
    else memcpy(text, map + (at - first), len);
    return msync(map, bytes, MS_SYNC) || munmap(map, bytes) ? -1 : (long)len;
}

/* Where a file has no pages in its cache, Linux takes the length that it knows for such reads and asks nobody (docs/reference/semantics.md, "asynchronous
 * reads"): it is told to ask. */
static void know_the_length(int writes) {
    struct stat stat_;
    if (!writes) fstat(fd, &stat_);
}

static int ring;
static struct io_uring_params ring_params;
static char *submissions, *completions;
static struct io_uring_sqe *entries;

static void *ring_part(size_t len, off_t which) {
    void *part = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, which);
    if (part == MAP_FAILED) exit(3);
    return part;
}

static int uring_is_there(void) {
    ring = syscall(SYS_io_uring_setup, 4, &ring_params);
    if (ring < 0) return 0;
    submissions = ring_part(ring_params.sq_off.array + ring_params.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    completions = ring_part(ring_params.cq_off.cqes + ring_params.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    entries = ring_part(ring_params.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
    return 1;
}

static unsigned *word(char *part, unsigned offset) { return (unsigned *)(part + offset); }

static long by_uring(int writes, char *text, size_t len, off_t at) {
    know_the_length(writes);
    unsigned tail = *word(submissions, ring_params.sq_off.tail), slot = tail & *word(submissions, ring_params.sq_off.ring_mask);
    memset(&entries[slot], 0, sizeof entries[slot]);
    entries[slot].opcode = writes ? IORING_OP_WRITE : IORING_OP_READ;
    entries[slot].fd = fd;
    entries[slot].addr = (unsigned long)text;
    entries[slot].len = len;
    entries[slot].off = at;
    word(submissions, ring_params.sq_off.array)[slot] = slot;
    __atomic_store_n(word(submissions, ring_params.sq_off.tail), tail + 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1) exit(4);
    unsigned head = *word(completions, ring_params.cq_off.head);
    if (head == __atomic_load_n(word(completions, ring_params.cq_off.tail), __ATOMIC_ACQUIRE)) exit(5);
    struct io_uring_cqe *done = (struct io_uring_cqe *)(completions + ring_params.cq_off.cqes) + (head & *word(completions, ring_params.cq_off.ring_mask));
    long result = done->res;
    __atomic_store_n(word(completions, ring_params.cq_off.head), head + 1, __ATOMIC_RELEASE);
    return result;
}

static aio_context_t context;

static long by_aio(int writes, char *text, size_t len, off_t at) {
    struct iocb block = {.aio_lio_opcode = writes ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD, .aio_fildes = fd, .aio_buf = (unsigned long)text,
                         .aio_nbytes = len, .aio_offset = at};
    struct iocb *blocks[] = {&block};
    struct io_event event;
    know_the_length(writes);
    if (syscall(SYS_io_submit, context, 1, blocks) != 1) exit(6);
    if (syscall(SYS_io_getevents, context, 1, 1, &event, NULL) != 1) exit(7);
    return event.res;
}

static long (*transfer)(int writes, char *text, size_t len, off_t at);

/* Whether the file can be used in this way here. */
static int is_there(const char *way, const char *path) {
    int flags = O_RDWR | O_CREAT;
    fd = strcmp(way, "raw") ? open(path, flags, 0644) : raw(SYS_openat, AT_FDCWD, (long)path, flags, 0644, 0, 0);
    if (fd < 0) exit(2);
    if (!strcmp(way, "calls")) transfer = by_calls;
    if (!strcmp(way, "raw")) transfer = by_instructions;
    if (!strcmp(way, "map")) transfer = by_map;
    if (!strcmp(way, "uring")) {
        transfer = by_uring;
        return uring_is_there();
    }
    if (!strcmp(way, "aio")) {
        transfer = by_aio;
        return syscall(SYS_io_setup, 4, &context) == 0;
    }
    return transfer != NULL;
}

/* Others write the records between meanwhile. */
static const char *many(long first, long count) {
    char record[TEXT], found[RECORD + 1] = {0};
    for (long i = first; i < first + 2 * count; i += 2) {
        snprintf(record, sizeof record, "%07ld\n", i);
        if (transfer(1, record, RECORD, i * RECORD) != RECORD) return "not written";
        if (transfer(0, found, RECORD, i * RECORD) != RECORD || strcmp(record, found)) return "not read back";
    }
    return "done";
}

int main(int count, char **words) {
    char line[2 * TEXT], text[TEXT];
    long at, len;
    if (count != 3) return 2;
    puts(is_there(words[1], words[2]) ? "ready" : "unavailable");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "w %ld %255s", &at, text) == 2) {
            len = strlen(text);
            puts(transfer(1, text, len, at) == len ? "done" : "not written");
        } else if (sscanf(line, "r %ld %ld", &at, &len) == 2 && len < TEXT) {
            memset(text, 0, sizeof text);
            puts(transfer(0, text, len, at) >= 0 ? text : "not read");
        } else if (sscanf(line, "many %ld %ld", &at, &len) == 2) {
            puts(many(at, len));
        } else {
            return 2;
        }
        fflush(stdout);
    }
    return 0;
}
