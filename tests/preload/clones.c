/* Files that share blocks, by ioctl, in the working directory. Run by tests/clone.rs under `varve run`; says which line found
 * something else, and ends with 1 then. It must pass on every file system that has FICLONE (XFS, btrfs). */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { BLOCK = 4096, BLOCKS = 64 };

static char text[BLOCKS * BLOCK], found[BLOCKS * BLOCK + BLOCK];

static int file(const char *name, long size, int seed) {
    int fd = open(name, O_CREAT | O_TRUNC | O_RDWR, 0644);
    for (long at = 0; at < size; at++) text[at] = (char)(at / 7 % 251 + seed);
    CHECK(fd >= 0 && pwrite(fd, text, size, 0) == size);
    return fd;
}

static int holds(int fd, long size, int seed) {
    struct stat st;
    if (fstat(fd, &st) || st.st_size != size || pread(fd, found, size, 0) != size) return 0;
    for (long at = 0; at < size; at++)
        if (found[at] != (char)(at / 7 % 251 + seed)) return 0;
    return 1;
}

static int range(int to, int from, long at, long len, long to_at) {
    struct file_clone_range args = {.src_fd = from, .src_offset = at, .src_length = len, .dest_offset = to_at};
    return ioctl(to, FICLONERANGE, &args) ? errno : 0;
}

static void clone_goes_its_own_way(void) {
    int from = file("from", BLOCKS * BLOCK - 100, 1), to = file("to", 5000, 2);
    CHECK(ioctl(to, FICLONE, from) == 0);
    CHECK(holds(to, BLOCKS * BLOCK - 100, 1) && holds(from, BLOCKS * BLOCK - 100, 1));
    CHECK(lseek(to, 0, SEEK_CUR) == 0 && lseek(from, 0, SEEK_CUR) == 0);
    CHECK(pwrite(to, "new", 3, 9000) == 3 && holds(from, BLOCKS * BLOCK - 100, 1));
    CHECK(pread(to, found, 3, 9000) == 3 && !memcmp(found, "new", 3));
    CHECK(ftruncate(from, 0) == 0 && pread(to, found, 10, 4096) == 10 && found[0] == (char)(4096 / 7 % 251 + 1));
    close(from), close(to);
}

/* A map of the target shows the clone. Under `varve run` a file that is mapped shared is the kernel's, which passes no clone on. */
static void map_shows_it(void) {
    int from = file("mapped-from", 4 * BLOCK, 3), to = file("mapped-to", 4 * BLOCK, 4);
    char *map = mmap(NULL, 4 * BLOCK, PROT_READ, MAP_SHARED, to, 0);
    CHECK(map != MAP_FAILED && map[0] == 4);
    int cloned = ioctl(to, FICLONE, from) == 0;
    CHECK(cloned || errno == EOPNOTSUPP);
    CHECK(map[0] == (cloned ? 3 : 4) && map[3 * BLOCK] == (char)(3 * BLOCK / 7 % 251 + (cloned ? 3 : 4)));
    munmap(map, 4 * BLOCK), close(from), close(to);
}

static void wrong_ranges_are_refused(void) {
    int from = file("from", 8 * BLOCK + 9, 5), to = file("to", 16 * BLOCK, 6), other = open("to", O_RDONLY);
    int append = open("to", O_WRONLY | O_APPEND), blind = open("from", O_WRONLY), dir = open(".", O_RDONLY), null = open("/dev/null", O_RDWR);
    CHECK(range(to, from, 1, BLOCK, 0) == EINVAL && range(to, from, 0, BLOCK, 1) == EINVAL && range(to, from, 0, 9, 0) == EINVAL);
    CHECK(range(to, from, 0, 9 * BLOCK, 0) == EINVAL && range(to, from, 8 * BLOCK, 9, 0) == EINVAL);
    CHECK(range(to, from, 0, 0, 0) == EINVAL && range(to, to, 0, 2 * BLOCK, BLOCK) == EINVAL);
    CHECK(range(other, from, 0, BLOCK, 0) == EBADF && range(append, from, 0, BLOCK, 0) == EBADF);
    CHECK(range(to, blind, 0, BLOCK, 0) == EBADF && range(to, 9999, 0, BLOCK, 0) == EBADF);
    CHECK(range(to, dir, 0, BLOCK, 0) == EISDIR && range(to, null, 0, BLOCK, 0) != 0);
    CHECK(holds(to, 16 * BLOCK, 6) && holds(from, 8 * BLOCK + 9, 5));
    CHECK(range(to, to, 0, 2 * BLOCK, 4 * BLOCK) == 0 && range(to, from, 8 * BLOCK, 9, 16 * BLOCK) == 0);
    close(from), close(to), close(other), close(append), close(blind), close(dir), close(null);
}

static void ranges_that_are_alike_are_shared(void) {
    int one = file("from", 8 * BLOCK, 7), alike = file("to", 8 * BLOCK, 7), differs = file("third", 8 * BLOCK, 7);
    CHECK(pwrite(differs, "x", 1, 100) == 1);
    struct file_dedupe_range *args = calloc(1, sizeof *args + 3 * sizeof args->info[0]);
    args->src_length = 8 * BLOCK, args->dest_count = 3;
    args->info[0].dest_fd = alike, args->info[1].dest_fd = differs, args->info[2].dest_fd = 9999;
    CHECK(ioctl(one, FIDEDUPERANGE, args) == 0);
    CHECK(args->info[0].status == FILE_DEDUPE_RANGE_SAME && args->info[0].bytes_deduped == 8 * BLOCK);
    CHECK(args->info[1].status == FILE_DEDUPE_RANGE_DIFFERS && args->info[2].status == -EBADF);
    CHECK(holds(one, 8 * BLOCK, 7) && holds(alike, 8 * BLOCK, 7));
    free(args), close(one), close(alike), close(differs);
}

/* What a clone changes clears what a write clears. */
static void set_id_bits_go(void) {
    int from = file("from", BLOCK, 8), to = file("suid", BLOCK, 9);
    CHECK(fchmod(to, 06755) == 0 && ioctl(to, FICLONE, from) == 0);
    struct stat st;
    CHECK(fstat(to, &st) == 0 && (geteuid() == 0 || !(st.st_mode & 06000)));
    close(from), close(to);
}

static int dedupe(int from, long at, long len, int to, long to_at, unsigned long long *bytes) {
    struct file_dedupe_range *args = calloc(1, sizeof *args + sizeof args->info[0]);
    args->src_offset = at, args->src_length = len, args->dest_count = 1;
    args->info[0].dest_fd = to, args->info[0].dest_offset = to_at;
    int status = ioctl(from, FIDEDUPERANGE, args) ? 1000 + errno : args->info[0].status;
    *bytes = args->info[0].bytes_deduped;
    free(args);
    return status;
}

/* What lies beyond the last whole block is left out; a range beyond the end of the source is refused as a whole. */
static void ends_within_a_block_are_left_out(void) {
    int one = file("from", 5 * BLOCK + 100, 10), same = file("to", 5 * BLOCK + 101, 10), other = file("third", 5 * BLOCK, 11);
    unsigned long long bytes = 99;
    CHECK(dedupe(one, 0, 5000, same, 0, &bytes) == FILE_DEDUPE_RANGE_SAME && bytes == 5000);
    CHECK(dedupe(one, 0, 5 * BLOCK + 100, same, 0, &bytes) == FILE_DEDUPE_RANGE_SAME && bytes == 5 * BLOCK + 100);
    CHECK(dedupe(one, 0, 100, other, 0, &bytes) == FILE_DEDUPE_RANGE_SAME && bytes == 100);
    CHECK(dedupe(one, 0, BLOCK, other, 0, &bytes) == FILE_DEDUPE_RANGE_DIFFERS && bytes == 0);
    CHECK(dedupe(one, 0, 5 * BLOCK + 101, same, 0, &bytes) == 1000 + EINVAL);
    CHECK(dedupe(one, BLOCK, 5 * BLOCK, same, 0, &bytes) == 1000 + EINVAL);
    CHECK(dedupe(one, 0, 5 * BLOCK + 100, other, 0, &bytes) == -EINVAL);
    CHECK(holds(one, 5 * BLOCK + 100, 10) && holds(same, 5 * BLOCK + 101, 10) && holds(other, 5 * BLOCK, 11));
    CHECK(range(other, one, 5 * BLOCK + 100, 0, 0) == 0 && range(other, one, 6 * BLOCK, 0, 0) == EINVAL);
    CHECK(mkfifo("fifo", 0600) == 0 && unlink("third") == 0);
    int fifo = open("fifo", O_RDWR), path = open("to", O_PATH);
    CHECK(dedupe(one, 0, BLOCK, fifo, 0, &bytes) == -EINVAL && dedupe(one, 0, BLOCK, path, 0, &bytes) == -EBADF);
    CHECK(unlink("fifo") == 0);
    close(one), close(same), close(other), close(fifo), close(path);
}

int main(void) {
    clone_goes_its_own_way();
    map_shows_it();
    wrong_ranges_are_refused();
    ranges_that_are_alike_are_shared();
    set_id_bits_go();
    if (failures == 0) puts("good");
    return failures != 0;
}
