/* A program that sets up rings for its input and output, in the working directory: the library cannot see what goes through them, so from then on
 * the kernel makes all its calls. Run by tests/run.rs under `varve run`, which counts them: the numbers below are its. It must pass on every file
 * system. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/io_uring.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BEFORE = 7, AFTER = 100 };

static void write_some(int fd, int count) {
    for (int i = 0; i < count; i++) CHECK(pwrite(fd, "01234567", 8, i * 8) == 8);
}

int main(void) {
    char here[PATH_MAX - 16], path[PATH_MAX];
    unsigned long context = 0;
    struct io_uring_params params = {0};
    struct stat stat_;
    CHECK(getcwd(here, sizeof here) != NULL);
    int fd = open("file", O_CREAT | O_RDWR, 0644), elsewhere = open("/dev/null", O_WRONLY);
    CHECK(fd >= 0 && elsewhere >= 0);
    write_some(fd, BEFORE);

    /* Where one kind of rings is forbidden, the other one does. */
    int ring = syscall(SYS_io_uring_setup, 4, &params);
    CHECK(syscall(SYS_io_setup, 4, &context) == 0 || ring >= 0);

    /* A descriptor that was served, its duplicates, and what is opened now. */
    write_some(fd, AFTER);
    int again = dup(fd), moved = fcntl(fd, F_DUPFD_CLOEXEC, 100);
    CHECK(again >= 0 && moved >= 100 && dup2(elsewhere, 90) == 90 && dup2(fd, 90) == 90);
    CHECK(fsync(again) == 0 && fsync(moved) == 0 && fsync(90) == 0);
    CHECK(close(again) == 0 && close(moved) == 0 && dup2(elsewhere, 90) == 90 && write(90, "x", 1) == 1);
    snprintf(path, sizeof path, "%s/new", here);
    int fresh = open(path, O_CREAT | O_RDWR, 0644);
    CHECK(fresh >= 0);
    write_some(fresh, AFTER);
    CHECK(fchmod(fresh, 0600) == 0 && close_range(fresh, fresh, 0) == 0);
    /* The number is another file's now. */
    CHECK(open("/dev/null", O_WRONLY) == fresh && pwrite(fresh, "x", 1, 0) == 1 && close(fresh) == 0);

    /* Paths: of the mount, relative and whole; not there; elsewhere; two. */
    CHECK(mkdir("dir", 0755) == 0 && access("new", F_OK) == 0 && access(path, F_OK) == 0);
    CHECK(access("dir/none", F_OK) < 0 && errno == ENOENT);
    CHECK(access("none/at/all", F_OK) < 0 && errno == ENOENT);
    CHECK(access("/dev/null", F_OK) == 0 && access("/none/at/all", F_OK) < 0);
    CHECK(rename("new", "dir/renamed") == 0 && unlink("dir/renamed") == 0 && rmdir("dir") == 0);
    CHECK(chdir("/") == 0 && access("dev/null", F_OK) == 0 && chdir(here) == 0);
    pid_t child = fork();
    if (child == 0) {
        write_some(fd, AFTER);
        CHECK(access("file", F_OK) == 0);
        _exit(failures != 0);
    }
    CHECK(status_of(child) == 0 && stat("file", &stat_) == 0 && stat_.st_size == 8 * AFTER);
    CHECK(close(fd) == 0);
    if (failures == 0) puts("good");
    return failures != 0;
}
