/* Random operations on two files that share blocks, against copies of both in memory. Each operation depends on the
   seed and its number alone, so any may be left out. Prints what each came to, one a line.
     shared_ops DIR SEED COUNT WAY [LEFT-OUT]
   WAY: "clones" (ioctls), or "mount" (maps, and `varve clone` as $VARVE says). LEFT-OUT: a file with numbers. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCK = 4096, MOST = 3 << 20, FILES = 2 };

static struct {
    char name[4200];
    int fd;
    long size;
    unsigned char *model;
} file[FILES];
static unsigned char *buffer;
static uint64_t seed, dice_state;
static long number;
static int with_clones;

static uint64_t dice(void) {
    uint64_t z = dice_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static long below(long n) { return (long)(dice() % (uint64_t)n); }

static void fail(const char *format, ...) {
    va_list list;
    va_start(list, format);
    fflush(stdout);
    fprintf(stderr, "seed %llu, operation %ld: ", (unsigned long long)seed, number);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    exit(1);
}

static void must(int good, const char *what) {
    if (!good) fail("%s: %s", what, strerror(errno));
}

/* Small numbers are as likely as large ones. */
static long length(long most) {
    long bound = most >> below(10);
    return 1 + below(bound < 1 ? 1 : bound);
}

static long place(void) {
    long at = below(MOST);
    return below(3) ? at / BLOCK * BLOCK : at;
}

static long min(long a, long b) { return a < b ? a : b; }

static void fill(unsigned char *at, long len) {
    for (long i = 0; i < len; i += 8) {
        uint64_t word = dice();
        memcpy(at + i, &word, (size_t)min(8, len - i));
    }
}

static void same(int f) {
    struct stat is;
    must(fstat(file[f].fd, &is) == 0, "fstat");
    if (is.st_size != file[f].size) fail("file %d has %ld bytes, and %ld in the model", f, (long)is.st_size, file[f].size);
    long got = pread(file[f].fd, buffer, MOST + 1, 0);
    if (got != file[f].size) fail("file %d: read %ld of %ld bytes (errno %d)", f, got, file[f].size, errno);
    if (memcmp(buffer, file[f].model, (size_t)got) == 0) return;
    long at = 0;
    while (buffer[at] == file[f].model[at]) at++;
    fail("file %d differs at byte %ld (block %ld): %d, and %d in the model", f, at, at / BLOCK, buffer[at], file[f].model[at]);
}

/* Bytes beyond the end are zero in the model. */
static void grow(int f, long end) {
    if (end > file[f].size) file[f].size = end;
}

static void shrink(int f, long size) {
    if (size < file[f].size) memset(file[f].model + size, 0, (size_t)(file[f].size - size));
    file[f].size = size;
}

static void move_bytes(int from, long at, int to, long to_at, long len) {
    memmove(file[to].model + to_at, file[from].model + at, (size_t)len);
    grow(to, to_at + len);
}

static void write_bytes(int f, long at, long len) {
    fill(file[f].model + at, len);
    must(pwrite(file[f].fd, file[f].model + at, (size_t)len, at) == len, "pwrite");
    grow(f, at + len);
}

static void allocate(int f, int mode, long at, long len) {
    must(fallocate(file[f].fd, mode, at, len) == 0, "fallocate");
    if (mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE)) {
        long end = min(at + len, file[f].size);
        if (at < end) memset(file[f].model + at, 0, (size_t)(end - at));
    }
    if (!(mode & FALLOC_FL_KEEP_SIZE)) grow(f, at + len);
}

/* Where a file says that it has no data, it has zeros; the end is a hole. */
static void holes(int f) {
    long at = 0;
    while (at < file[f].size) {
        long data = lseek(file[f].fd, at, SEEK_DATA);
        if (data < 0 && errno != ENXIO) fail("SEEK_DATA from %ld: errno %d", at, errno);
        long end = data < 0 ? file[f].size : data;
        for (long i = at; i < end; i++)
            if (file[f].model[i]) fail("file %d: byte %ld is in a hole, and %d in the model", f, i, file[f].model[i]);
        if (data < 0) return;
        at = lseek(file[f].fd, data, SEEK_HOLE);
        if (at <= data || at > file[f].size) fail("file %d: SEEK_HOLE from %ld says %ld (errno %d)", f, data, at, errno);
    }
}

/* What Linux demands of a range to be shared (generic_remap_file_range_prep); the length in `*len`. */
static int may_share(int from, long at, int to, long to_at, long *len, int compare) {
    long size = file[from].size;
    if (*len == 0) {
        if (compare || at == size) return 0;
        if (at > size) return EINVAL;
        *len = size - at;
    }
    if (at % BLOCK || to_at % BLOCK || at + *len > size) return EINVAL;
    if (compare && to_at + *len > file[to].size) return EINVAL;
    int ends = at + *len == size && (!compare || to_at + *len == file[to].size);
    long whole = ends ? (*len + BLOCK - 1) / BLOCK * BLOCK : *len / BLOCK * BLOCK;
    if (!compare && !ends && *len % BLOCK) return EINVAL;
    if (from == to && labs(at - to_at) < whole) return EINVAL;
    if (*len % BLOCK && to_at + *len < file[to].size) {
        if (!compare) return EINVAL;
    }
    if (!ends) *len = *len / BLOCK * BLOCK;
    return 0;
}

static void clone_range(int from, long at, int to, long to_at, long len) {
    struct file_clone_range range = {file[from].fd, (uint64_t)at, (uint64_t)len, (uint64_t)to_at};
    int got = ioctl(file[to].fd, FICLONERANGE, &range) == 0 ? 0 : errno;
    int want = may_share(from, at, to, to_at, &len, 0);
    printf(" = %d", got);
    if (got != want) fail("FICLONERANGE: errno %d, not %d", got, want);
    if (got == 0 && len > 0) move_bytes(from, at, to, to_at, len);
}

static void clone_all(int from, int to) {
    int got = ioctl(file[to].fd, FICLONE, file[from].fd) == 0 ? 0 : errno;
    long len = 0;
    int want = may_share(from, 0, to, 0, &len, 0);
    printf(" = %d", got);
    if (got != want) fail("FICLONE: errno %d, not %d", got, want);
    if (got == 0) move_bytes(from, 0, to, 0, len);
}

static void dedupe(int from, long at, int to, long to_at, long len) {
    struct {
        struct file_dedupe_range head;
        struct file_dedupe_range_info info;
    } all = {{(uint64_t)at, (uint64_t)len, 1, 0, 0}, {file[to].fd, (uint64_t)to_at, 0, 0, 0}};
    int got = ioctl(file[from].fd, FIDEDUPERANGE, &all) == 0 ? 0 : errno;
    int status = all.info.status;
    printf(" = %d, status %d, %llu bytes", got, status, (unsigned long long)all.info.bytes_deduped);
    int want = at + len > file[from].size ? EINVAL : 0;
    if (got != want) fail("FIDEDUPERANGE: errno %d, not %d", got, want);
    if (got) return;
    int refused = may_share(from, at, to, to_at, &len, 1);
    int differs = !refused && memcmp(file[from].model + at, file[to].model + to_at, (size_t)len) != 0;
    int expected = refused ? -refused : differs ? FILE_DEDUPE_RANGE_DIFFERS : FILE_DEDUPE_RANGE_SAME;
    if (status != expected) fail("FIDEDUPERANGE: status %d, not %d", status, expected);
}

static void copy(int from, long at, int to, long to_at, long len) {
    long done = 0, want = at < file[from].size ? min(len, file[from].size - at) : 0;
    int overlaps = from == to && labs(at - to_at) < want;
    while (done < want || overlaps) {
        loff_t in = at + done, out = to_at + done;
        ssize_t got = copy_file_range(file[from].fd, &in, file[to].fd, &out, (size_t)(len - done), 0);
        if (got < 0 && overlaps && errno == EINVAL) {
            printf(" = EINVAL");
            return;
        }
        if (overlaps) fail("copy_file_range: %zd (errno %d) within a file that overlaps", got, errno);
        if (got <= 0) fail("copy_file_range: %zd (errno %d) after %ld of %ld", got, errno, done, want);
        done += got;
    }
    if (done != want) fail("copy_file_range: %ld, not %ld", done, want);
    if (want) move_bytes(from, at, to, to_at, want);
}

static void open_again(int f) {
    if (file[f].fd >= 0) close(file[f].fd);
    file[f].fd = open(file[f].name, O_RDWR | O_CREAT, 0644);
    must(file[f].fd >= 0, file[f].name);
}

static void map_write(int f, long at, long len) {
    long first = at / BLOCK * BLOCK, end = min(at + len, file[f].size);
    if (at >= end) return;
    unsigned char *map = mmap(0, (size_t)(end - first), PROT_READ | PROT_WRITE, MAP_SHARED, file[f].fd, first);
    must(map != MAP_FAILED, "mmap");
    if (memcmp(map, file[f].model + first, (size_t)(end - first)) != 0) fail("file %d differs where it is mapped", f);
    fill(file[f].model + at, end - at);
    memcpy(map + (at - first), file[f].model + at, (size_t)(end - at));
    must(below(2) || msync(map, (size_t)(end - first), MS_SYNC) == 0, "msync");
    munmap(map, (size_t)(end - first));
}

static void by_command(int from, int to) {
    const char *varve = getenv("VARVE");
    pid_t child = varve ? fork() : -1;
    if (child < 0) return;
    if (child == 0) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, 1);
        execl(varve, "varve", "clone", "--force", file[from].name, file[to].name, (char *)0);
        _exit(127);
    }
    int status;
    must(waitpid(child, &status, 0) == child, "waitpid");
    if (status) fail("varve clone ended with %d", status);
    open_again(to);
    shrink(to, 0);
    move_bytes(from, 0, to, 0, file[from].size);
}

/* Shares a range of the other file, or compares it; now and then one that is no good. */
static void share(int kind, int to) {
    int from = below(6) ? !to : to;
    long at = below(MOST) / BLOCK * BLOCK, to_at = below(3) ? at : below(MOST) / BLOCK * BLOCK, len = length(MOST);
    if (below(4)) len = (len + BLOCK - 1) / BLOCK * BLOCK;
    if (!below(16)) at += below(BLOCK);
    if (!below(16)) to_at += below(BLOCK);
    int to_end = !below(4), to_size = below(4), whole = !below(8), equal = below(3);
    if (!to_size) at = file[from].size ? at % file[from].size / BLOCK * BLOCK : 0;
    if (to_end && at < file[from].size) len = file[from].size - at;
    len = min(len, MOST - (at > to_at ? at : to_at));
    if (at + len > file[from].size && below(8)) len = at < file[from].size ? file[from].size - at : len;
    len = min(len, MOST - to_at);
    int fits = file[from].size - at <= MOST - to_at;
    printf(" %d %ld to %d %ld, %ld bytes", from, at, to, to_at, len);
    if (kind == 0 && with_clones && whole && from != to) clone_all(from, to);
    else if (kind == 0 && with_clones) clone_range(from, at, to, to_at, below(16) || !fits ? len : 0);
    else if (kind == 1 && with_clones) {
        long have = at < file[from].size ? min(len, file[from].size - at) : 0;
        int apart = from != to || labs(at - to_at) >= have;
        if (equal && have && apart) {
            move_bytes(from, at, to, to_at, have);
            must(pwrite(file[to].fd, file[to].model + to_at, (size_t)have, to_at) == have, "pwrite");
        }
        dedupe(from, at, to, to_at, len);
    } else copy(from, at, to, to_at, len);
}

static void step(void) {
    int f = (int)below(FILES), kind = (int)below(32);
    long at = place(), len = min(length(1 << 18), MOST - at);
    static const int modes[] = {0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_ZERO_RANGE, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE,
                                FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE};
    static const char *names[] = {"clone", "dedupe", "copy"};
    if (kind < 9) printf("%ld write %d %ld %ld", number, f, at, len), write_bytes(f, at, len);
    else if (kind < 11) {
        long size = below(3) ? place() : MOST - below(BLOCK);
        printf("%ld truncate %d %ld", number, f, size);
        must(ftruncate(file[f].fd, size) == 0, "ftruncate");
        shrink(f, size);
    } else if (kind < 15) {
        int mode = modes[below(5)];
        printf("%ld fallocate %d %d %ld %ld", number, f, mode, at, len);
        allocate(f, mode, at, len);
    } else if (kind < 25) {
        int which = kind < 19 ? 0 : kind < 23 ? 1 : 2;
        printf("%ld %s", number, names[which]);
        share(which, f);
    } else if (kind == 25) printf("%ld open %d", number, f), open_again(f);
    else if (kind == 26) printf("%ld sync %d", number, f), must(fsync(file[f].fd) == 0, "fsync");
    else if (kind < 29) printf("%ld holes %d", number, f), holes(f);
    else if (kind == 31 && !with_clones && !below(8)) printf("%ld command %d", number, f), by_command(!f, f);
    else if (!with_clones) printf("%ld map %d %ld %ld", number, f, at, len), map_write(f, at, len);
    else printf("%ld read %d", number, f), same(f);
    putchar('\n');
    if (!below(6)) same(f);
    if (!below(24)) same(!f), holes(!f);
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    seed = strtoull(argv[2], 0, 10);
    long count = atol(argv[3]);
    with_clones = strcmp(argv[4], "clones") == 0;
    unsigned char *left_out = calloc((size_t)count + 1, 1);
    FILE *list = argc > 5 ? fopen(argv[5], "r") : 0;
    for (long n; list && fscanf(list, "%ld", &n) == 1;)
        if (n >= 0 && n < count) left_out[n] = 1;
    buffer = malloc(MOST + 1);
    for (int f = 0; f < FILES; f++) {
        file[f].model = calloc(2 * MOST + BLOCK, 1);
        snprintf(file[f].name, sizeof file[f].name, "%s/shared%d", argv[1], f);
        unlink(file[f].name);
        file[f].fd = -1;
        open_again(f);
    }
    for (number = 0; number < count; number++) {
        dice_state = seed * 0x2545f4914f6cdd1du + (uint64_t)number * 0x9e6c63d0876a9a47u;
        if (!left_out[number]) step();
    }
    for (int f = 0; f < FILES; f++) same(f), holes(f);
    return 0;
}
