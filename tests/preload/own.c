/* The library's own descriptors, which are the exception to "descriptors have the numbers that the kernel would give" (docs/guide/run.md): where they
 * lie, that a program cannot close or replace them, and that it has all other numbers. In the working directory; run by tests/run.rs under `varve
 * run` with several soft limits. It must pass on every file system: where nothing is served, there are none. */
#define _GNU_SOURCE
#include "check.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { ROOM = 128, CEILING = 4096, MOST = 64 };

#define FAILS(what, with) CHECK((what) < 0 && errno == (with))

static int own[MOST], count;

/* The descriptors from `least` on that are open, as the kernel has them. */
static int open_from(int least, int *found) {
    DIR *dir = opendir("/proc/self/fd");
    struct dirent *entry;
    int many = 0;
    while ((entry = readdir(dir)))
        if (entry->d_name[0] != '.' && atoi(entry->d_name) >= least && many < MOST) found[many++] = atoi(entry->d_name);
    closedir(dir);
    return many;
}

static void all_are_there(int least) {
    int now[MOST];
    CHECK(open_from(least, now) == count && !memcmp(now, own, count * sizeof *own));
}

static void write_and_read(int fd) {
    char text[4];
    CHECK(fd >= 0 && write(fd, "text", 4) == 4 && pread(fd, text, 4, 0) == 4 && !memcmp(text, "text", 4));
}

int main(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    int soft = limit.rlim_cur, above = soft <= CEILING && limit.rlim_max >= soft + 256UL, lowest = dup(0);
    /* Above the limit, where the hard one allows; else below it, or below a number that spares the kernel a large table. */
    int least = above ? soft : (soft < CEILING ? soft : CEILING) - ROOM;
    CHECK(close(lowest) == 0);
    /* What a shell left open up there. */
    CHECK(close_range(least, UINT_MAX, 0) == 0);
    int fd = open("file", O_CREAT | O_TRUNC | O_RDWR, 0644);
    CHECK(fd == lowest);
    write_and_read(fd);
    count = open_from(least, own);
    CHECK(count == 0 ? getenv("VARVE_PRELOAD_MOUNT") == NULL : count < 16);

    for (int i = 0; i < count; i++) {
        FAILS(close(own[i]), EBADF);
        FAILS(dup2(fd, own[i]), EBADF);
        FAILS(dup2(0, own[i]), EBADF);
        FAILS(dup3(fd, own[i], O_CLOEXEC), EBADF);
        FAILS(dup2(own[i], fd), EBADF);
        FAILS(fcntl(own[i], F_GETFD), EBADF);
        FAILS(fcntl(own[i], F_SETFD, 0), EBADF);
    }
    all_are_there(least);

    /* As services do when they start. */
    for (int i = lowest; i < soft && i < 2 * CEILING; i++) close(i);
    all_are_there(least);
    CHECK(close_range(lowest, UINT_MAX, 0) == 0);
    all_are_there(least);
    CHECK((fd = open("file", O_RDWR)) == lowest);
    write_and_read(fd);

    /* Every other number can be had, in order. */
    int before = fd, opened = 0, last;
    while ((last = open("file", O_RDWR)) >= 0 && opened < 2 * CEILING) {
        CHECK(last > before);
        for (int i = 0; i < count; i++) CHECK(last != own[i]);
        before = last, opened++;
    }
    CHECK(opened == 2 * CEILING || (errno == EMFILE && opened == soft - lowest - 1 - (above ? 0 : count)));
    if (last >= 0) close(last);
    write_and_read(before);
    CHECK(close_range(lowest, UINT_MAX, 0) == 0);
    all_are_there(least);
    if (failures == 0) puts("good");
    return failures != 0;
}
