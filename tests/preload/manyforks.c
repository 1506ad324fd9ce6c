/* Many open files across fork, in the working directory: each process has the same ones, at the same offsets, whatever became of their
 * names. Run by tests/run under `varve run`, where each is opened on the mount once; it must pass on every file system. */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* Enough for several threads to open them, in several directories. */
enum { DIRS = 3, EACH = 70, FILES = DIRS * EACH, RECORD = 8 };
enum { LOCKED = 2, APPENDING = 3, CLOSED_BY_EXEC = 4, FOR_A_PROGRAM = 5 };

static int files[FILES + 1];
static int also; /* A duplicate of the first one that is in the moved directory. */

static void put(int fd, char who, int number) {
    char record[RECORD + 1];
    snprintf(record, sizeof record, "%c%06d\n", who, number);
    CHECK(write(fd, record, RECORD) == RECORD);
}

/* Whether the next record is this one. */
static int is_next(int fd, char who, int number) {
    char record[RECORD + 1] = {0}, expected[RECORD + 1];
    snprintf(expected, sizeof expected, "%c%06d\n", who, number);
    return read(fd, record, RECORD) == RECORD && !memcmp(record, expected, RECORD);
}

static void another(const char *name) {
    int fd = open(name, O_CREAT | O_EXCL | O_WRONLY, 0644);
    CHECK(fd >= 0 && write(fd, "another", 7) == 7 && close(fd) == 0);
}

static void make(void) {
    char name[32];
    for (int i = 0; i < FILES; i++) {
        int flags = O_CREAT | O_EXCL | O_RDWR;
        if (i % EACH == 0) {
            snprintf(name, sizeof name, "d%d", i / EACH);
            CHECK(mkdir(name, 0755) == 0);
        }
        if (i == APPENDING) flags |= O_APPEND;
        if (i == CLOSED_BY_EXEC) flags |= O_CLOEXEC;
        snprintf(name, sizeof name, "d%d/f%d", i / EACH, i % EACH);
        files[i] = open(name, flags, 0600);
        CHECK(files[i] >= 0);
        put(files[i], 'm', i);
    }
    files[FILES] = open("d1", O_TMPFILE | O_RDWR, 0600);
    CHECK(files[FILES] >= 0);
    put(files[FILES], 'm', FILES);
    also = dup(files[2 * EACH]);
    CHECK(flock(files[LOCKED], LOCK_EX) == 0);
}

/* Names lead elsewhere, or nowhere. */
static void move_names(void) {
    CHECK(rename("d0/f0", "d1/moved") == 0);
    another("d0/f0");
    CHECK(unlink("d0/f1") == 0);
    another("d0/f1");
    CHECK(rename("d2", "d3") == 0 && mkdir("d2", 0755) == 0);
    another("d2/f0");
}

/* A process that was there before the files were opened moves some of them. */
static pid_t start_mover(int *tell) {
    char byte;
    int both[2];
    CHECK(pipe(both) == 0);
    pid_t mover = fork();
    if (mover == 0) {
        close(both[1]);
        if (read(both[0], &byte, 1) == 1) {
            CHECK(rename("d0/f10", "d1/elsewhere") == 0 && rename("d0/f11", "d0/beside") == 0);
            another("d0/f10");
        }
        _exit(failures != 0);
    }
    close(both[0]);
    *tell = both[1];
    return mover;
}

/* Only one number is left. */
static void leave_one_descriptor(void) {
    struct rlimit limit;
    int next;
    do next = dup(0);
    while (next >= 0 && next < also);
    CHECK(close(next) == 0 && getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = next + 1;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

static void child_finds_all_and_moves_offsets(void) {
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i <= FILES; i++) {
            CHECK(lseek(files[i], 0, SEEK_CUR) == RECORD);
            CHECK(lseek(files[i], 0, SEEK_SET) == 0 && is_next(files[i], 'm', i));
            put(files[i], 'c', i);
        }
        _exit(failures != 0);
    }
    CHECK(status_of(child) == 0);
    for (int i = 0; i <= FILES; i++) {
        CHECK(lseek(files[i], 0, SEEK_CUR) == 2 * RECORD);
        put(files[i], 'p', i);
    }
    CHECK(lseek(also, 0, SEEK_CUR) == 3 * RECORD);
}

static void grandchild_and_child_that_closes(void) {
    pid_t child = fork(), grandchild;
    if (child == 0) {
        for (int i = 0; i < FILES; i += 2) CHECK(close(files[i]) == 0);
        if ((grandchild = fork()) == 0) {
            for (int i = 1; i < FILES; i += 2) put(files[i], 'g', i);
            CHECK(lseek(also, 0, SEEK_CUR) == 3 * RECORD);
            put(also, 'g', 2 * EACH);
            _exit(failures != 0);
        }
        CHECK(status_of(grandchild) == 0);
        _exit(failures != 0);
    }
    CHECK(status_of(child) == 0);
    for (int i = 0; i < FILES; i++) {
        int wrote = i % 2 == 1 || i == 2 * EACH;
        CHECK(lseek(files[i], 0, SEEK_CUR) == (3 + wrote) * RECORD);
        CHECK(lseek(files[i], 2 * RECORD, SEEK_SET) >= 0 && is_next(files[i], 'p', i));
        CHECK(!wrote || is_next(files[i], 'g', i));
    }
}

static void flags_and_locks_are_the_descriptions(void) {
    int other = open("d0/f2", O_RDWR);
    CHECK(flock(other, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK);
    pid_t child = fork();
    if (child == 0) {
        CHECK(fcntl(files[APPENDING], F_GETFL) & O_APPEND);
        CHECK(fcntl(files[CLOSED_BY_EXEC], F_GETFD) == FD_CLOEXEC);
        CHECK(flock(files[LOCKED], LOCK_UN) == 0);
        CHECK(fcntl(files[APPENDING], F_SETFL, 0) == 0);
        CHECK(lseek(files[APPENDING], 0, SEEK_SET) == 0);
        _exit(failures != 0);
    }
    CHECK(status_of(child) == 0);
    CHECK(flock(other, LOCK_EX | LOCK_NB) == 0 && close(other) == 0);
    put(files[APPENDING], 'x', APPENDING);
    CHECK(lseek(files[APPENDING], 0, SEEK_CUR) == RECORD);
    CHECK(!(fcntl(files[APPENDING], F_GETFL) & O_APPEND));
}

static void program_writes_behind_its_parent(void) {
    char command[128];
    off_t at = lseek(files[FOR_A_PROGRAM], 0, SEEK_CUR);
    pid_t child = fork();
    if (child == 0) {
        snprintf(command, sizeof command, "echo program >&9; test ! -e /proc/self/fd/%d", files[CLOSED_BY_EXEC]);
        CHECK(dup2(files[FOR_A_PROGRAM], 9) == 9);
        execlp("sh", "sh", "-c", command, NULL);
        _exit(1);
    }
    CHECK(status_of(child) == 0);
    CHECK(lseek(files[FOR_A_PROGRAM], 0, SEEK_CUR) == at + 8);
    put(files[FOR_A_PROGRAM], 'y', 0);
    char text[9] = {0};
    CHECK(pread(files[FOR_A_PROGRAM], text, 8, at) == 8 && !strcmp(text, "program\n"));
}

/* A limit below the numbers that are open takes none of them. */
static void limit_below_what_is_open(void) {
    struct rlimit before, limit;
    int fd = open("limited", O_CREAT | O_EXCL | O_RDWR, 0600);
    put(fd, 'l', 0);
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    limit = before;
    limit.rlim_cur = fd;
    CHECK(close(0) == 0 && setrlimit(RLIMIT_NOFILE, &limit) == 0);
    pid_t child = fork();
    if (child == 0) {
        CHECK(lseek(fd, 0, SEEK_SET) == 0 && is_next(fd, 'l', 0));
        put(fd, 'c', 0);
        _exit(failures != 0);
    }
    CHECK(status_of(child) == 0 && lseek(fd, 0, SEEK_CUR) == 2 * RECORD);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0 && close(fd) == 0);
}

static atomic_int over;

/* Takes numbers, and looks whether somebody else uses them. */
static void *open_and_close(void *unused) {
    struct stat stat_;
    (void)unused;
    while (!over) {
        int fd = open("/dev/null", O_RDWR);
        CHECK(fd >= 0 && fstat(fd, &stat_) == 0 && S_ISCHR(stat_.st_mode));
        CHECK(write(fd, "nothing", 7) == 7 && close(fd) == 0);
    }
    return NULL;
}

static void program_of_several_threads_forks(void) {
    char name[32];
    int fds[FILES];
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, open_and_close, NULL) == 0);
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "t%d", i);
        fds[i] = open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
        CHECK(fds[i] >= 0);
        put(fds[i], 't', i);
    }
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < FILES; i++) CHECK(lseek(fds[i], 0, SEEK_SET) == 0 && is_next(fds[i], 't', i));
        _exit(failures != 0);
    }
    CHECK(status_of(child) == 0);
    over = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    for (int i = 0; i < FILES; i++) {
        put(fds[i], 'u', i);
        CHECK(lseek(fds[i], 0, SEEK_SET) == 0 && is_next(fds[i], 't', i) && is_next(fds[i], 'u', i));
        CHECK(close(fds[i]) == 0);
    }
}

int main(void) {
    struct rlimit before;
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    int tell;
    pid_t mover = start_mover(&tell);
    make();
    move_names();
    CHECK(write(tell, "", 1) == 1 && close(tell) == 0 && status_of(mover) == 0);
    leave_one_descriptor();
    child_finds_all_and_moves_offsets();
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    grandchild_and_child_that_closes();
    flags_and_locks_are_the_descriptions();
    program_writes_behind_its_parent();
    program_of_several_threads_forks();
    limit_below_what_is_open();
    if (failures == 0) puts("good");
    return failures != 0;
}
