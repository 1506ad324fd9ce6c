/* What the kernel refuses, in its order and with its errors, in the working directory. Run by tests/run/ under `varve run`; says which line found
 * something else, and ends with 1 then. It must pass on every file system. */
#define _GNU_SOURCE
#include "check.h"
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#define FAILS(call, error) CHECK((call) == -1 && errno == (error))

enum { LIMIT = 8192 };

static volatile sig_atomic_t signals;

static void count(int number) { (void)number, signals++; }

/* A signal with each refusal. */
#define TOO_LONG(call)                    \
    do {                                  \
        signals = 0;                      \
        FAILS(call, EFBIG);               \
        CHECK(signals == 1);              \
    } while (0)

static off_t size_of(int fd) {
    struct stat now;
    return fstat(fd, &now) == 0 ? now.st_size : -1;
}

static void files_grow_to_the_limit_and_no_further(void) {
    static char bytes[3 * LIMIT];
    struct rlimit all, few = {LIMIT, RLIM_INFINITY};
    int big = open("big", O_CREAT | O_RDWR, 0644), fd = open("limited", O_CREAT | O_RDWR, 0644);
    struct iovec two[2] = {{bytes, 100}, {bytes, 100}};
    CHECK(write(big, bytes, sizeof bytes) == sizeof bytes && getrlimit(RLIMIT_FSIZE, &all) == 0);
    few.rlim_max = all.rlim_max;
    CHECK(signal(SIGXFSZ, count) != SIG_ERR && setrlimit(RLIMIT_FSIZE, &few) == 0);
    CHECK(pwrite(fd, bytes, 9000, 0) == LIMIT && size_of(fd) == LIMIT && signals == 0);
    TOO_LONG(pwrite(fd, bytes, 1, LIMIT));
    CHECK(pwrite(fd, bytes, 0, LIMIT) == 0 && lseek(fd, LIMIT - 10, SEEK_SET) == LIMIT - 10);
    CHECK(writev(fd, two, 2) == 10 && lseek(fd, 0, SEEK_CUR) == LIMIT);
    TOO_LONG(write(fd, bytes, 1));
    TOO_LONG(pwritev(fd, two, 2, LIMIT + 1));
    TOO_LONG(ftruncate(fd, LIMIT + 1));
    TOO_LONG(truncate("limited", LIMIT + 1));
    TOO_LONG(fallocate(fd, 0, LIMIT, 1));
    TOO_LONG(copy_file_range(big, NULL, fd, NULL, 1, 0));
    CHECK(ftruncate(fd, LIMIT) == 0 && size_of(fd) == LIMIT && fallocate(fd, 0, 0, LIMIT) == 0);
    /* What is longer already may become shorter, and be changed below the limit. */
    CHECK(ftruncate(big, 2 * LIMIT) == 0 && pwrite(big, bytes, 10, 0) == 10);
    TOO_LONG(pwrite(big, bytes, 1, 2 * LIMIT - 1));
    CHECK(fcntl(big, F_SETFL, O_APPEND) == 0);
    TOO_LONG(write(big, bytes, 1));
    pid_t child = fork();
    if (child == 0) {
        CHECK(signal(SIGXFSZ, SIG_DFL) != SIG_ERR);
        write(big, bytes, 1);
        _exit(0);
    }
    int status = status_of(child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ);
    CHECK(prlimit(0, RLIMIT_FSIZE, &all, NULL) == 0 && write(big, bytes, 1) == 1);
    CHECK(size_of(big) == 2 * LIMIT + 1 && close(big) == 0 && close(fd) == 0);
}

static void removed_working_directory_is_nowhere(void) {
    char path[PATH_MAX];
    int here = open(".", O_RDONLY | O_DIRECTORY);
    CHECK(mkdir("gone", 0755) == 0 && chdir("gone") == 0 && getcwd(path, sizeof path) && strstr(path, "/gone"));
    FAILS(syscall(SYS_getcwd, path, 3), ERANGE);
    CHECK(rmdir("../gone") == 0);
    FAILS(syscall(SYS_getcwd, path, sizeof path), ENOENT);
    FAILS(open("x", O_RDONLY), ENOENT);
    FAILS(open("x", O_RDWR | O_CREAT, 0644), ENOENT);
    FAILS(mkdir("x", 0755), ENOENT);
    FAILS(symlink("to", "x"), ENOENT);
    FAILS(rename("x", "y"), ENOENT);
    CHECK(fchdir(here) == 0 && mkdir("before", 0755) == 0 && mkdir("before/in", 0755) == 0 && chdir("before/in") == 0);
    CHECK(renameat(here, "before", here, "after") == 0 && getcwd(path, sizeof path) && strstr(path, "/after/in"));
    CHECK(fchdir(here) == 0 && close(here) == 0);
}

static void becomes(const char *path) {
    char *arguments[] = {(char *)path, NULL};
    execv(path, arguments);
    _exit(errno == ETXTBSY ? 42 : 43);
}

static void nobody_runs_what_is_open_for_writing(void) {
    pid_t child;
    int fd = open("program", O_CREAT | O_WRONLY, 0755);
    CHECK(fd >= 0 && write(fd, "#!/bin/sh\nexit 3\n", 17) == 17 && close(fd) == 0);
    /* One's own, which the program would not inherit. */
    if ((child = fork()) == 0) {
        CHECK(open("program", O_WRONLY | O_CLOEXEC) >= 0);
        becomes("./program");
    }
    CHECK(WEXITSTATUS(status_of(child)) == 42);
    if ((child = fork()) == 0) {
        int own = open("own", O_CREAT | O_RDWR | O_CLOEXEC, 0755);
        CHECK(write(own, "#!/bin/sh\nexit 3\n", 17) == 17);
        becomes("./own");
    }
    CHECK(WEXITSTATUS(status_of(child)) == 42);
    /* That of a process which is no parent: it was forked before. */
    int go[2];
    CHECK(pipe(go) == 0);
    if ((child = fork()) == 0) {
        char byte;
        if (read(go[0], &byte, 1) == 1) becomes("./program");
        _exit(44);
    }
    CHECK((fd = open("program", O_RDWR)) >= 0 && write(go[1], "x", 1) == 1);
    CHECK(WEXITSTATUS(status_of(child)) == 42);
    CHECK(close(fd) == 0 && close(go[0]) == 0 && close(go[1]) == 0 && WEXITSTATUS(system("./program")) == 3);
}

static void flags_and_descriptors_are_looked_at_first(void) {
    struct open_how how = {.flags = 1 << 28};
    int dir = open(".", O_RDONLY | O_DIRECTORY), fd = open("plain", O_CREAT | O_RDWR, 0644), other = open("plain", O_RDWR);
    int only = open("/dev/null", O_RDONLY);
    FAILS(syscall(SYS_openat2, AT_FDCWD, "missing", &how, sizeof how), EINVAL);
    how.flags = 1ULL << 40;
    FAILS(syscall(SYS_openat2, AT_FDCWD, "plain", &how, sizeof how), EINVAL);
    how = (struct open_how){.flags = O_RDONLY, .mode = 0600};
    FAILS(syscall(SYS_openat2, AT_FDCWD, "plain", &how, sizeof how), EINVAL);
    FAILS(sendfile(-1, fd, NULL, 5), EBADF);
    FAILS(sendfile(only, fd, NULL, 5), EBADF);
    /* Bytes that are not there do not overlap. */
    off_t from = 0, behind = 5;
    int own = open("tail", O_RDWR | O_CREAT, 0600);
    CHECK(write(own, "hello", 5) == 5 && copy_file_range(own, &from, own, &behind, 1L << 40, 0) == 5 && size_of(own) == 10);
    from = 0, behind = 9;
    FAILS(copy_file_range(own, &from, own, &behind, 1L << 40, 0), EINVAL);
    FAILS(readahead(dir, 0, 10), EINVAL);
    FAILS(posix_fadvise(fd, 0, 0, 77) ? (errno = EINVAL, -1) : 0, EINVAL);
    CHECK(fcntl(fd, F_SETLEASE, F_RDLCK) == -1 && (errno == EAGAIN || errno == EINVAL));
    CHECK(fcntl(fd, F_SETLEASE, F_WRLCK) == -1 && (errno == EAGAIN || errno == EINVAL));
    FAILS(fcntl(fd, F_SETLEASE, F_UNLCK), EAGAIN);
    CHECK(fcntl(fd, F_GETLEASE) == F_UNLCK);
    FAILS(fcntl(fd, F_NOTIFY, DN_CREATE), ENOTDIR);
    close(dir), close(fd), close(other), close(only);
}

static void there_are_as_many_descriptors_as_the_limit_says(void) {
    enum { MANY = 512 };
    struct rlimit all, few = {MANY, MANY};
    int first = open("plain", O_RDONLY), last = first;
    CHECK(getrlimit(RLIMIT_NOFILE, &all) == 0);
    few.rlim_max = all.rlim_max;
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    for (int fd; (fd = open("plain", O_RDONLY)) >= 0;) last = fd;
    CHECK(errno == EMFILE && last == MANY - 1);
    CHECK(close_range(first, MANY - 1, 0) == 0 && setrlimit(RLIMIT_NOFILE, &all) == 0);
}

int main(void) {
    files_grow_to_the_limit_and_no_further();
    removed_working_directory_is_nowhere();
    nobody_runs_what_is_open_for_writing();
    flags_and_descriptors_are_looked_at_first();
    there_are_as_many_descriptors_as_the_limit_says();
    if (failures == 0) puts("good");
    return failures != 0;
}
