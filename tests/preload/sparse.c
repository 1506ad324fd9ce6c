// Changes a file and says where its data is: "sparse FILE STEP...". A step is w (write), a (allocate), k (allocate, the size stays), p (punch a
// hole), z (zero), y (zero, the size stays), each with :OFFSET:BYTES; t:SIZE (truncate); s (fsync); f (syncfs); r (say so, and wait for a
// line); i (let the last read be an hour ago); d (drop the page cache); c (read a byte); x (say whether the time of the last read has moved); m (say where data is) or n (say size and blocks). A step that fails is said with its errno.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static void map(int file) {
    off_t at = 0, end = lseek(file, 0, SEEK_END);
    printf("m");
    while (at < end) {
        off_t data = lseek(file, at, SEEK_DATA);
        if (data < 0) break;
        at = lseek(file, data, SEEK_HOLE);
        if (at < 0) {
            printf(" errno %d", errno);
            break;
        }
        printf(" %lld-%lld", (long long)data, (long long)at);
    }
    printf(" of %lld\n", (long long)end);
}

static int fill(int file, long long offset, long long len) {
    static char bytes[1 << 16];
    memset(bytes, 'x', sizeof bytes);
    while (len > 0) {
        ssize_t done = pwrite(file, bytes, len < (long long)sizeof bytes ? len : (long long)sizeof bytes, offset);
        if (done < 0) return -1;
        offset += done;
        len -= done;
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    int file = open(argv[1], O_RDWR | O_CREAT, 0644);
    if (file < 0) return perror(argv[1]), 1;
    for (int step = 2; step < argc; step++) {
        long long offset = 0, len = 0;
        sscanf(argv[step] + 1, ":%lld:%lld", &offset, &len);
        static struct timespec read_at;
        struct stat is;
        char byte;
        int moved;
        int keep = FALLOC_FL_KEEP_SIZE, failed = 0;
        switch (argv[step][0]) {
        case 'w': failed = fill(file, offset, len); break;
        case 'a': failed = fallocate(file, 0, offset, len); break;
        case 'k': failed = fallocate(file, keep, offset, len); break;
        case 'p': failed = fallocate(file, FALLOC_FL_PUNCH_HOLE | keep, offset, len); break;
        case 'z': failed = fallocate(file, FALLOC_FL_ZERO_RANGE, offset, len); break;
        case 'y': failed = fallocate(file, FALLOC_FL_ZERO_RANGE | keep, offset, len); break;
        case 't': failed = ftruncate(file, offset); break;
        case 's': failed = fsync(file); break;
        case 'i': failed = futimens(file, (struct timespec[2]){{time(0) - 3600, 0}, {time(0) - 7200, 0}}); break;
        case 'd': failed = posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED); break;
        case 'c': usleep(20000), failed = pread(file, &byte, 1, 0) != 1; break;
        case 'x':
            if (fstat(file, &is) != 0) return perror("fstat"), 1;
            moved = memcmp(&read_at, &is.st_atim, sizeof read_at) != 0;
            read_at = is.st_atim;
            puts(moved ? "moved" : "same");
            break;
        case 'f': failed = syncfs(file); break;
        case 'r': puts("waits"), fflush(stdout), getchar(); break;
        case 'm': map(file); break;
        case 'n':
            if (fstat(file, &is) != 0) return perror("fstat"), 1;
            printf("n %lld %lld\n", (long long)is.st_size, (long long)is.st_blocks * 512);
            break;
        default: return 2;
        }
        if (failed) printf("%s: errno %d\n", argv[step], errno);
    }
    return 0;
}
