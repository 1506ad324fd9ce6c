/* What a program of root's may expect that is another user for a while, in the working directory, which all may use. Run by tests/run.rs under
 * `varve run`; says which line found something else, and ends with 1 then. It must pass on every file system. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NOBODY = 65534 };

static void make(const char *path, unsigned mode, const char *text, long len) {
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY, mode);
    CHECK(fd >= 0 && write(fd, text, len) == len && close(fd) == 0);
}

static int owner_is(const char *path, uid_t uid) {
    struct stat stat_;
    return stat(path, &stat_) == 0 && stat_.st_uid == uid;
}

/* Whose rights count, and who owns what is made. */
static void as_nobody(const char *path) {
    CHECK(open("secret", O_RDONLY) < 0 && errno == EACCES);
    CHECK(open("theirs/no", O_CREAT | O_WRONLY, 0644) < 0 && errno == EACCES);
    make(path, 0644, "x", 1);
    CHECK(owner_is(path, NOBODY));
}

static void as_root(const char *path) {
    char text[6];
    int fd = open("secret", O_RDONLY);
    CHECK(fd >= 0 && read(fd, text, 6) == 6 && close(fd) == 0);
    make(path, 0600, "x", 1);
    CHECK(owner_is(path, 0));
}

static pthread_barrier_t turn;

static void *other_thread(void *nothing) {
    pthread_barrier_wait(&turn);
    as_nobody("shared/by-thread");
    pthread_barrier_wait(&turn);
    pthread_barrier_wait(&turn);
    as_root("shared/by-thread-of-root");
    return nothing;
}

int main(void) {
    char path[40];
    pthread_t thread;
    umask(0);
    make("secret", 0600, "secret", 6);
    CHECK(mkdir("shared", 0777) == 0 && mkdir("theirs", 0755) == 0);
    CHECK(seteuid(NOBODY) == 0);
    as_nobody("shared/for-a-while");
    CHECK(seteuid(0) == 0);
    as_root("shared/of-root");
    /* The service goes on: these are counted. */
    for (int i = 0; i < 300; i++) {
        snprintf(path, sizeof path, "shared/file%d", i);
        make(path, 0600, path, 10);
    }
    /* What one thread changes is so for all. */
    pthread_barrier_init(&turn, NULL, 2);
    CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0);
    CHECK(seteuid(NOBODY) == 0);
    pthread_barrier_wait(&turn);
    pthread_barrier_wait(&turn);
    CHECK(seteuid(0) == 0);
    pthread_barrier_wait(&turn);
    pthread_join(thread, NULL);
    if (failures == 0) puts("good");
    return failures != 0;
}
