/* Clones of a file and the writes after them, in a directory. Prints one figure a line. Run by clones.sh. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 4096, PIECE = 1 << 20, CLONES = 5, PLAIN_MIB = 1024 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void must(int good, const char *what) {
    if (good) return;
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static unsigned long long state = 88172645463325252ULL;

static unsigned long long dice(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static int make(const char *name, long mib) {
    static char bytes[PIECE];
    int fd = open(name, O_CREAT | O_TRUNC | O_RDWR, 0644);
    must(fd >= 0, name);
    for (long i = 0; i < mib; i++) {
        memset(bytes, (int)(i % 251 + 1), PIECE);
        must(pwrite(fd, bytes, PIECE, i * PIECE) == PIECE, "write");
    }
    must(fsync(fd) == 0, "fsync");
    return fd;
}

/* Microseconds of a synced write of 4 KiB, at random. */
static double writes(int fd, long mib, long count, unsigned long long seed) {
    static char bytes[BLOCK];
    state = seed;
    double began = now();
    for (long i = 0; i < count; i++) {
        memset(bytes, (int)i, BLOCK);
        long block = (long)(dice() % (unsigned long long)(mib * (PIECE / BLOCK)));
        must(pwrite(fd, bytes, BLOCK, block * BLOCK) == BLOCK, "write");
        must(fdatasync(fd) == 0, "fdatasync");
    }
    return (now() - began) * 1e6 / (double)count;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    long mib = argc > 1 ? atol(argv[1]) : 512, count = argc > 2 ? atol(argv[2]) : 2000;
    long few = mib < PLAIN_MIB ? mib : PLAIN_MIB;
    int base = make("base", mib), plain = make("plain", few), clone[CLONES];
    double took[CLONES], synced[CLONES];
    for (int i = 0; i < CLONES; i++) {
        char name[32];
        snprintf(name, sizeof name, "clone%d", i);
        clone[i] = open(name, O_CREAT | O_TRUNC | O_RDWR, 0644);
        double began = now();
        must(clone[i] >= 0 && ioctl(clone[i], FICLONE, base) == 0, "FICLONE");
        took[i] = (now() - began) * 1e3;
        must(fsync(clone[i]) == 0, "fsync");
        synced[i] = (now() - began) * 1e3;
    }
    qsort(took, CLONES, sizeof took[0], by_size);
    qsort(synced, CLONES, sizeof synced[0], by_size);
    printf("clone_ms %.3f\n", took[CLONES / 2]);
    printf("durable_ms %.3f\n", synced[CLONES / 2]);
    printf("plain_us %.1f\n", writes(plain, few, count, 7));
    printf("first_us %.1f\n", writes(clone[0], mib, count, 7));
    printf("again_us %.1f\n", writes(clone[0], mib, count, 7));
    printf("source_us %.1f\n", writes(base, mib, count, 9));
    double began = now();
    must(ioctl(clone[1], FICLONE, clone[0]) == 0, "FICLONE of what was written");
    printf("cloneagain_ms %.3f\n", (now() - began) * 1e3);
    began = now();
    must(unlink("clone2") == 0, "unlink");
    close(clone[2]);
    printf("remove_ms %.3f\n", (now() - began) * 1e3);
    return 0;
}
