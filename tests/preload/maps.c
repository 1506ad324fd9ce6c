/* Maps that only read, as the kernel makes them: what they show, what changes show, what they may become. */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define PAGE 4096L
#define LARGE (9L * 1024 * 1024 + 1234)

static sigjmp_buf back;

static void on_bus(int signal) { siglongjmp(back, 1); }

/* A load that may get SIGBUS: -1 then. */
static int load(const volatile unsigned char *at) {
    if (sigsetjmp(back, 1)) return -1;
    return *at;
}

static unsigned char byte_of(long at, int version) { return (at * 31 + at / PAGE * 7 + version * 101 + 1) & 0xff; }

static void fill(int fd, long from, long len, int version) {
    unsigned char *bytes = malloc(len);
    for (long i = 0; i < len; i++) bytes[i] = byte_of(from + i, version);
    CHECK(pwrite(fd, bytes, len, from) == len);
    free(bytes);
}

static int made(const char *name, long len) {
    int fd = open(name, O_CREAT | O_RDWR | O_TRUNC, 0644);
    fill(fd, 0, len, 0);
    return fd;
}

static int shows(const unsigned char *map, long from, long len, int version) {
    for (long i = 0; i < len; i++)
        if (map[i] != byte_of(from + i, version)) {
            printf("at %ld: %d, not %d\n", from + i, map[i], byte_of(from + i, version));
            return 0;
        }
    return 1;
}

static void contents_of_all_sizes(void) {
    long sizes[] = {1, 100, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE + 17, 1 << 20, LARGE};
    for (int i = 0; i < 8; i++)
        for (int flags = MAP_SHARED; flags <= MAP_PRIVATE; flags++) {
            long size = sizes[i];
            close(made("content", size));
            int fd = open("content", O_RDONLY);
            unsigned char *map = mmap(NULL, size, PROT_READ, flags, fd, 0);
            CHECK(map != MAP_FAILED);
            close(fd);
            CHECK(shows(map, 0, size, 0));
            for (long end = size; end % PAGE; end++) CHECK(map[end] == 0);
            CHECK(munmap(map, size) == 0);
        }
    close(made("content", LARGE));
    int fd = open("content", O_RDONLY);
    unsigned char *map = mmap(NULL, 100000, PROT_READ, MAP_SHARED, fd, 300 * PAGE);
    CHECK(shows(map, 300 * PAGE, 100000, 0));
    munmap(map, 100000);
    /* Backwards, and here and there. */
    map = mmap(NULL, LARGE, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
    for (long page = LARGE / PAGE; page >= 0; page -= 3) CHECK(map[page * PAGE] == byte_of(page * PAGE, 0));
    unsigned at = 1;
    for (int i = 0; i < 3000; i++) {
        at = at * 1103515245 + 12345;
        CHECK(map[at % LARGE] == byte_of(at % LARGE, 0));
    }
    munmap(map, LARGE);
    CHECK(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 7) == MAP_FAILED && errno == EINVAL);
    CHECK(mmap(NULL, 0, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED && errno == EINVAL);
    close(fd);
    fd = open("content", O_WRONLY);
    CHECK(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED && errno == EACCES);
    close(fd);
}

static void own_changes_are_seen(void) {
    int fd = made("own", LARGE), other = made("other", LARGE);
    int reader = open("own", O_RDONLY);
    unsigned char *map = mmap(NULL, LARGE, PROT_READ, MAP_SHARED, reader, 0);
    unsigned char *part = mmap(NULL, 2 * PAGE, PROT_READ, MAP_PRIVATE, fd, 7 * PAGE);
    CHECK(shows(map, 0, LARGE, 0) && shows(part, 7 * PAGE, 2 * PAGE, 0));
    for (int version = 1; version < 50; version++) {
        fill(fd, 7 * PAGE - 5, PAGE, version);
        CHECK(shows(map + 7 * PAGE - 5, 7 * PAGE - 5, PAGE, version));
        CHECK(shows(part, 7 * PAGE, PAGE - 5, version));
        CHECK(part[PAGE - 5] == byte_of(8 * PAGE - 5, 0) && map[7 * PAGE - 6] == byte_of(7 * PAGE - 6, 0));
    }
    off_t from = 0, to = 100 * PAGE;
    fill(other, 0, 3 * PAGE, 9);
    CHECK(copy_file_range(other, &from, fd, &to, 3 * PAGE, 0) == 3 * PAGE);
    CHECK(shows(map + 100 * PAGE, 0, 1, 9) && map[102 * PAGE + 9] == byte_of(2 * PAGE + 9, 9));
    CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 200 * PAGE, PAGE) == 0);
    CHECK(map[200 * PAGE] == 0 && map[201 * PAGE] == byte_of(201 * PAGE, 0));
    /* From a map of the file itself. */
    CHECK(pwrite(fd, map + 300 * PAGE, 4 * PAGE, 400 * PAGE) == 4 * PAGE);
    CHECK(shows(map + 400 * PAGE, 300 * PAGE, 1, 0) && map[403 * PAGE] == byte_of(303 * PAGE, 0));
    long behind = 5L * 1024 * 1024 + PAGE / 2;
    CHECK(pwrite(fd, map + 500 * PAGE, 1 << 20, behind) == 1 << 20);
    for (long i = 0; i < 1 << 20; i += 97) CHECK(map[behind + i] == byte_of(500 * PAGE + i, 0));
    close(reader);
    close(other);
    munmap(map, LARGE);
    munmap(part, 2 * PAGE);
    close(fd);
}

static void loads_behind_the_end(void) {
    int fd = made("end", 20 * PAGE);
    unsigned char *map = mmap(NULL, 20 * PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
    int pipes[2];
    CHECK(map[19 * PAGE] == byte_of(19 * PAGE, 0) && pipe(pipes) == 0);
    CHECK(ftruncate(fd, 5 * PAGE + 10) == 0);
    CHECK(load(map + 5 * PAGE + 9) == byte_of(5 * PAGE + 9, 0) && load(map + 5 * PAGE + 10) == 0);
    CHECK(load(map + 6 * PAGE) == -1 && load(map + 19 * PAGE) == -1 && load(map + 6 * PAGE) == -1);
    CHECK(write(pipes[1], map + 7 * PAGE, 1) == -1 && errno == EFAULT);
    CHECK(write(pipes[1], map + 4 * PAGE, 1) == 1);
    CHECK(truncate("end", 8 * PAGE) == 0);
    CHECK(load(map + 6 * PAGE) == 0 && load(map + 8 * PAGE) == -1);
    fill(fd, 0, 20 * PAGE, 3);
    CHECK(shows(map, 0, 20 * PAGE, 3));
    close(open("end", O_WRONLY | O_TRUNC));
    CHECK(load(map) == -1 && load(map + 10 * PAGE) == -1);
    fill(fd, 0, 20 * PAGE, 4);
    CHECK(shows(map, 0, 20 * PAGE, 4));
    CHECK(unlink("end") == 0 && shows(map, 0, 20 * PAGE, 4));
    fill(fd, 0, PAGE, 5);
    close(fd);
    CHECK(shows(map, 0, PAGE, 5) && shows(map + PAGE, PAGE, PAGE, 4));
    munmap(map, 20 * PAGE);
}

static void parts_and_other_rights(void) {
    int fd = made("parts", 64 * PAGE), rd = open("parts", O_RDONLY), zero = open("/dev/zero", O_RDONLY);
    unsigned char *map = mmap(NULL, 64 * PAGE, PROT_READ, MAP_SHARED, rd, 0);
    CHECK(munmap(map + 10 * PAGE, 3 * PAGE) == 0);
    CHECK(shows(map, 0, 10 * PAGE, 0) && shows(map + 13 * PAGE, 13 * PAGE, 51 * PAGE, 0));
    CHECK(msync(map + 10 * PAGE, PAGE, MS_ASYNC) == -1 && errno == ENOMEM);
    /* What came into the hole is nobody else's business. */
    unsigned char *hole = mmap(map + 10 * PAGE, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memset(hole, 77, 3 * PAGE);
    fill(fd, 0, 64 * PAGE, 1);
    CHECK(hole[0] == 77 && hole[3 * PAGE - 1] == 77 && shows(map, 0, 10 * PAGE, 1) && shows(map + 13 * PAGE, 13 * PAGE, 51 * PAGE, 1));
    CHECK(mmap(map + 20 * PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == map + 20 * PAGE);
    CHECK(map[20 * PAGE] == 0);
    CHECK(mmap(map + 21 * PAGE, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, rd, 0) == map + 21 * PAGE);
    fill(fd, 0, 64 * PAGE, 2);
    CHECK(map[20 * PAGE] == 0 && shows(map + 21 * PAGE, 0, PAGE, 2) && shows(map + 22 * PAGE, 22 * PAGE, PAGE, 2));
    CHECK(madvise(map + 22 * PAGE, 20 * PAGE, MADV_DONTNEED) == 0 && shows(map + 22 * PAGE, 22 * PAGE, 20 * PAGE, 2));
    CHECK(mprotect(map + 30 * PAGE, PAGE, PROT_READ | PROT_WRITE) == -1 && errno == EACCES);
    CHECK(shows(map + 30 * PAGE, 30 * PAGE, PAGE, 2));
    CHECK(mprotect(map + 31 * PAGE, PAGE, PROT_NONE) == 0 && mprotect(map + 31 * PAGE, PAGE, PROT_READ) == 0);
    fill(fd, 0, 64 * PAGE, 3);
    CHECK(shows(map + 30 * PAGE, 30 * PAGE, 2 * PAGE, 3));
    unsigned char *moved = mremap(map + 40 * PAGE, 8 * PAGE, 12 * PAGE, MREMAP_MAYMOVE);
    CHECK(moved != MAP_FAILED && shows(moved, 40 * PAGE, 12 * PAGE, 3));
    fill(fd, 0, 64 * PAGE, 4);
    CHECK(shows(moved, 40 * PAGE, 12 * PAGE, 4));
    munmap(moved, 12 * PAGE);
    munmap(map, 64 * PAGE);
    map = mmap(NULL, 64 * PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK(shows(map, 0, 64 * PAGE, 4) && mprotect(map + PAGE, PAGE, PROT_READ | PROT_WRITE) == 0);
    map[PAGE] = 1;
    fill(fd, 0, 64 * PAGE, 5);
    CHECK(map[PAGE] == 1 && shows(map, 0, PAGE, 5) && shows(map + 2 * PAGE, 2 * PAGE, 62 * PAGE, 5));
    munmap(map, 64 * PAGE);
    /* A map that can change the file takes it away from those that read. */
    map = mmap(NULL, 64 * PAGE, PROT_READ, MAP_SHARED, rd, 0);
    CHECK(shows(map, 0, 64 * PAGE, 5));
    unsigned char *writes = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    writes[9 * PAGE] = 1;
    CHECK(map[9 * PAGE] == 1);
    writes[9 * PAGE] = 2;
    CHECK(map[9 * PAGE] == 2);
    munmap(writes, 64 * PAGE);
    munmap(map, 64 * PAGE);
    close(zero);
    close(rd);
    close(fd);
}

static void texts_and_buffers_in_maps(void) {
    int fd = open("text", O_CREAT | O_RDWR | O_TRUNC, 0644), pipes[2];
    char name[PAGE] = "named-by-a-map", found[32];
    struct stat st;
    CHECK(write(fd, name, PAGE) == PAGE && pipe(pipes) == 0);
    char *map = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
    close(open(map, O_CREAT | O_WRONLY, 0644));
    CHECK(stat("named-by-a-map", &st) == 0 && unlink(map) == 0);
    CHECK(madvise(map, PAGE, MADV_DONTNEED) == 0);
    CHECK(write(pipes[1], map, 14) == 14 && read(pipes[0], found, 14) == 14 && memcmp(found, name, 14) == 0);
    CHECK(pwrite(fd, "y", 1, 0) == 1 && write(pipes[1], map, 14) == 14 && read(pipes[0], found, 14) == 14);
    CHECK(found[0] == 'y');
    munmap(map, PAGE);
    close(fd);
}

static void parents_and_children(void) {
    int fd = made("forked", 3000 * PAGE), pipes[2], answers[2];
    unsigned char *map = mmap(NULL, 3000 * PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
    char go;
    CHECK(shows(map, 0, 10 * PAGE, 0) && pipe(pipes) == 0 && pipe(answers) == 0);
    pid_t child = fork();
    if (child == 0) {
        CHECK(shows(map + 2000 * PAGE, 2000 * PAGE, 10 * PAGE, 0));
        CHECK(write(answers[1], "r", 1) == 1 && read(pipes[0], &go, 1) == 1);
        CHECK(shows(map, 0, 3000 * PAGE, 1));
        unsigned char *mine = mmap(NULL, 5 * PAGE, PROT_READ, MAP_SHARED, open("forked", O_RDONLY), 0);
        CHECK(shows(mine, 0, 5 * PAGE, 1));
        fill(fd, 0, 5 * PAGE, 2);
        CHECK(shows(mine, 0, 5 * PAGE, 2) && shows(map, 0, 5 * PAGE, 2));
        _exit(failures != 0);
    }
    CHECK(read(answers[0], &go, 1) == 1);
    fill(fd, 0, 3000 * PAGE, 1);
    CHECK(shows(map, 0, 3000 * PAGE, 1) && write(pipes[1], "g", 1) == 1);
    CHECK(status_of(child) == 0);
    CHECK(shows(map, 0, 5 * PAGE, 2) && shows(map + 5 * PAGE, 5 * PAGE, 5 * PAGE, 1));
    unsigned char *again = mmap(NULL, 10 * PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK(shows(again, 0, 5 * PAGE, 2));
    CHECK(system("exit 7") == 7 << 8 && shows(again, 0, 5 * PAGE, 2));
    munmap(again, 10 * PAGE);
    munmap(map, 3000 * PAGE);
    close(fd);
}

#define WORDS 512
static _Atomic uint64_t written[WORDS];
static volatile uint64_t *words;
static _Atomic int stop;

/* A load shows no less than what was written before it began, nor than what was seen before. */
static void *loads(void *unused) {
    uint64_t last[WORDS] = {0};
    unsigned at = (unsigned)(uintptr_t)&last;
    while (!stop) {
        at = at * 1103515245 + 12345;
        int i = at >> 8 & (WORDS - 1);
        uint64_t least = atomic_load(&written[i]), seen = words[i * (PAGE / 8)];
        if (seen < least || seen < last[i] || seen > atomic_load(&written[i]) + 1) {
            printf("word %d: %lu, at least %lu and %lu\n", i, seen, least, last[i]);
            failures++;
            return NULL;
        }
        last[i] = seen;
    }
    return NULL;
}

static void *writes_up(void *file) {
    int fd = *(int *)file;
    for (uint64_t round = 1; round <= 40; round++)
        for (int i = 0; i < WORDS; i += round % 7 + 1) {
            uint64_t next = atomic_load(&written[i]) + 1;
            if (pwrite(fd, &next, 8, i * PAGE) != 8) failures++;
            atomic_store(&written[i], next);
        }
    return NULL;
}

static void threads_load_while_one_writes(void) {
    int fd = open("words", O_CREAT | O_RDWR | O_TRUNC, 0644);
    pthread_t readers[3], writer;
    CHECK(ftruncate(fd, WORDS * PAGE) == 0);
    words = mmap(NULL, WORDS * PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
    for (int i = 0; i < 3; i++) pthread_create(&readers[i], NULL, loads, NULL);
    pthread_create(&writer, NULL, writes_up, &fd);
    pthread_join(writer, NULL);
    stop = 1;
    for (int i = 0; i < 3; i++) pthread_join(readers[i], NULL);
    for (int i = 0; i < WORDS; i++) CHECK(words[i * (PAGE / 8)] == written[i]);
    munmap((void *)words, WORDS * PAGE);
    close(fd);
}

/* More than fits at once. */
static void many_maps(void) {
    enum { MAPS = 60, LEN = 6 << 20 };
    static unsigned char *maps[MAPS];
    int fd = made("many", LEN);
    for (int i = 0; i < MAPS; i++) maps[i] = mmap(NULL, LEN, PROT_READ, MAP_PRIVATE, fd, 0);
    for (int i = 0; i < MAPS; i++)
        for (long at = 0; at < LEN; at += 30 * PAGE) CHECK(maps[i][at + i] == byte_of(at + i, 0));
    fill(fd, 0, LEN, 1);
    for (int i = 0; i < MAPS; i++) CHECK(maps[i][i * PAGE] == byte_of(i * PAGE, 1));
    for (int i = 0; i < MAPS; i++) CHECK(munmap(maps[i], LEN) == 0);
    close(fd);
}

/* Where memory is scarce (a sixteenth of it is for copies), this is more than there is room for. */
static void more_than_fits(void) {
    enum { FILES = 5, LEN = 16 << 20 };
    const unsigned char *maps[FILES];
    int fds[FILES];
    for (int i = 0; i < FILES; i++) {
        char name[16];
        snprintf(name, sizeof name, "much%d", i);
        close(made(name, LEN));
        fds[i] = open(name, O_RDWR);
        int fd = open(name, O_RDONLY);
        maps[i] = mmap(NULL, LEN, PROT_READ, MAP_SHARED, fd, 0);
        CHECK(maps[i] != MAP_FAILED && close(fd) == 0);
    }
    unsigned random = 1;
    for (int turn = 0; turn < 3; turn++)
        for (long i = 0; i < 20000; i++) {
            random = random * 1664525 + 1013904223;
            long at = (long)(random >> 4) % LEN;
            if (turn == 1 && i % 1000 == 0) fill(fds[i / 1000 % FILES], at / PAGE * PAGE, PAGE, 0);
            CHECK(maps[i % FILES][at] == byte_of(at, 0));
        }
    for (int i = 0; i < FILES; i++) {
        fill(fds[i], LEN / 2, PAGE, 3);
        CHECK(shows(maps[i] + LEN / 2, LEN / 2, PAGE, 3) && shows(maps[i] + LEN / 2 + PAGE, LEN / 2 + PAGE, PAGE, 0));
        CHECK(munmap((void *)maps[i], LEN) == 0 && close(fds[i]) == 0);
        char name[16];
        snprintf(name, sizeof name, "much%d", i);
        CHECK(unlink(name) == 0);
    }
}

int main(void) {
    signal(SIGBUS, on_bus);
    contents_of_all_sizes();
    own_changes_are_seen();
    loads_behind_the_end();
    parts_and_other_rights();
    texts_and_buffers_in_maps();
    threads_load_while_one_writes();
    many_maps();
    more_than_fits();
    parents_and_children();
    if (!failures) printf("good\n");
    return failures != 0;
}
