/* Two file systems at once: tries in the directories A and B what leads from one to the other, and prints what it was answered.
 * tests/run/ runs this on two file systems of the kernel and, served, on two pools, and compares.
 *     pools A B B-FROM-A      (the last: a relative path from A to B) */
#define _GNU_SOURCE
#include "check.h"
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#define SAY(call) said(#call, (call))

static void said(const char *what, long result) {
    printf("%s: %s\n", what, result < 0 ? strerrorname_np(errno) : "ok");
    fflush(stdout);
}

static char a[PATH_MAX], b[PATH_MAX];

static const char *in(const char *dir, const char *name) {
    static char texts[8][2 * PATH_MAX];
    static int turn;
    char *text = texts[turn++ % 8];
    snprintf(text, sizeof texts[0], "%s/%s", dir, name);
    return text;
}

static void put(const char *path, const char *text) {
    int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0644);
    CHECK(fd >= 0);
    CHECK(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    CHECK(close(fd) == 0);
}

static int holds(const char *path, const char *text) {
    char found[64] = {0};
    int fd = open(path, O_RDONLY);
    if (fd < 0) return 0;
    ssize_t len = read(fd, found, sizeof found - 1);
    close(fd);
    return len == (ssize_t)strlen(text) && !strcmp(found, text);
}

static dev_t device(const char *path) {
    struct stat is;
    CHECK(stat(path, &is) == 0);
    return is.st_dev;
}

/* The same names are made in the same order in both, so that inodes of two new pools have the same numbers. */
static void plant(const char *dir, const char *text) {
    CHECK(mkdir(in(dir, "d"), 0755) == 0);
    put(in(dir, "f"), text);
    put(in(dir, "d/g"), text);
    put(in(dir, "locked"), text);
    put(in(dir, "mapped"), text);
}

static void names(void) {
    SAY(rename(in(a, "f"), in(b, "new")));
    SAY(rename(in(a, "f"), in(b, "f")));
    SAY(rename(in(a, "f"), in(b, "none/new")));
    SAY(rename(in(a, "none/f"), in(b, "new")));
    SAY(rename(in(a, "none"), in(b, "new")));
    SAY(rename(in(a, "f/x"), in(b, "new")));
    SAY(rename(in(a, "d"), in(b, "new")));
    SAY(rename(in(a, "d/."), in(b, "new")));
    SAY(rename(in(a, "d/"), in(b, "new/")));
    SAY(renameat2(AT_FDCWD, in(a, "f"), AT_FDCWD, in(b, "f"), RENAME_NOREPLACE));
    SAY(renameat2(AT_FDCWD, in(a, "f"), AT_FDCWD, in(b, "f"), RENAME_EXCHANGE));
    SAY(renameat2(AT_FDCWD, in(a, "f"), AT_FDCWD, in(b, "new"), RENAME_EXCHANGE));
    SAY(link(in(a, "f"), in(b, "new")));
    SAY(link(in(a, "f"), in(b, "f")));
    SAY(link(in(a, "none"), in(b, "f")));
    SAY(link(in(a, "f"), in(b, "none/x")));
    int from = open(a, O_RDONLY | O_DIRECTORY), to = open(b, O_PATH | O_DIRECTORY);
    CHECK(from >= 0 && to >= 0);
    SAY(renameat(from, "f", to, "new"));
    SAY(linkat(from, "f", to, "new", 0));
    int file = open(in(a, "f"), O_RDONLY), unnamed = open(a, O_TMPFILE | O_RDWR, 0600);
    char self[64];
    snprintf(self, sizeof self, "/proc/self/fd/%d", file);
    SAY(linkat(AT_FDCWD, self, to, "new", AT_SYMLINK_FOLLOW));
    CHECK(unnamed >= 0);
    snprintf(self, sizeof self, "/proc/self/fd/%d", unnamed);
    SAY(linkat(AT_FDCWD, self, to, "new", AT_SYMLINK_FOLLOW));
    SAY(linkat(AT_FDCWD, self, from, "linked", AT_SYMLINK_FOLLOW));
    CHECK(holds(in(a, "f"), "a") && holds(in(b, "f"), "b") && access(in(b, "new"), F_OK) != 0);
    close(from), close(to), close(file), close(unnamed);
}

/* Paths that begin in one and end in the other. */
static void paths(const char *over) {
    char here[PATH_MAX];
    CHECK(chdir(a) == 0 && holds("f", "a") && holds(in(over, "f"), "b") && holds(in(over, "d/../f"), "b"));
    int from = open(".", O_PATH | O_DIRECTORY);
    int fd = openat(from, in(over, "d/g"), O_RDWR);
    CHECK(from >= 0 && fd >= 0);
    struct stat is;
    CHECK(fstat(fd, &is) == 0 && is.st_dev == device(b) && is.st_dev != device(a));
    CHECK(pwrite(fd, "B", 1, 0) == 1 && holds(in(b, "d/g"), "B") && holds(in(a, "d/g"), "a"));
    SAY(rename("f", in(over, "new")));
    SAY(rename(in(over, "f"), in(over, "moved")));
    CHECK(chdir(over) == 0 && getcwd(here, sizeof here) != NULL && !strcmp(here, b) && holds("moved", "b"));
    CHECK(rename("moved", "f") == 0);
    CHECK(fchdir(from) == 0 && getcwd(here, sizeof here) != NULL && !strcmp(here, a) && holds("f", "a"));
    /* Symbolic links across. */
    CHECK(symlink(in(b, "d"), in(a, "to-d")) == 0 && symlink(in(over, "f"), in(a, "to-f")) == 0);
    CHECK(holds(in(a, "to-d/g"), "B") && holds(in(a, "to-f"), "b") && holds(in(a, "to-d/../f"), "b"));
    put(in(a, "to-d/made"), "made there");
    CHECK(holds(in(b, "d/made"), "made there"));
    SAY(rename(in(a, "to-d/made"), in(a, "made")));
    CHECK(rename(in(a, "to-d/made"), in(b, "made")) == 0 && unlink(in(a, "to-f")) == 0 && holds(in(b, "f"), "b"));
    CHECK(lstat(in(a, "to-d"), &is) == 0 && S_ISLNK(is.st_mode) && is.st_dev == device(a));
    CHECK(chmod(in(a, "to-d/g"), 0640) == 0 && stat(in(b, "d/g"), &is) == 0 && (is.st_mode & 0777) == 0640);
    CHECK(truncate(in(a, "to-d/g"), 0) == 0 && stat(in(b, "d/g"), &is) == 0 && is.st_size == 0);
    int entries = 0;
    DIR *dir = opendir(in(a, "to-d"));
    for (struct dirent *entry; dir != NULL && (entry = readdir(dir)) != NULL;) entries++;
    CHECK(dir != NULL && closedir(dir) == 0);
    printf("entries: %d\n", entries);
    close(from), close(fd);
}

/* As `cp` does. */
static void copy(const char *from, const char *to) {
    int in_fd = open(from, O_RDONLY), out = open(to, O_CREAT | O_TRUNC | O_WRONLY, 0644);
    CHECK(in_fd >= 0 && out >= 0);
    ssize_t got;
    while ((got = copy_file_range(in_fd, NULL, out, NULL, 1 << 30, 0)) > 0) {}
    if (got < 0) {
        CHECK(errno == EXDEV);
        while ((got = sendfile(out, in_fd, NULL, 1 << 30)) > 0) {}
    }
    CHECK(got == 0);
    struct stat one, other;
    CHECK(fstat(in_fd, &one) == 0 && fstat(out, &other) == 0 && one.st_size == other.st_size);
    close(in_fd), close(out);
}

static void data(void) {
    enum { LEN = 3 << 20 };
    char *block = malloc(LEN), *found = malloc(LEN);
    CHECK(block != NULL && found != NULL);
    for (int i = 0; i < LEN; i++) block[i] = (char)(i * 7 + (i >> 12));
    int fd = open(in(a, "large"), O_CREAT | O_RDWR, 0644);
    CHECK(fd >= 0 && write(fd, block, LEN) == LEN);
    close(fd);
    copy(in(a, "large"), in(b, "copied"));
    fd = open(in(b, "copied"), O_RDONLY);
    CHECK(fd >= 0 && read(fd, found, LEN) == LEN && memcmp(block, found, LEN) == 0);
    /* Maps of both, and what another descriptor changes meanwhile. */
    for (int turn = 0; turn < 2; turn++) {
        const char *dir = turn ? b : a;
        int mapped = open(in(dir, "mapped"), O_RDONLY), writer = open(in(dir, "mapped"), O_WRONLY);
        char *map = mmap(NULL, 1, PROT_READ, MAP_SHARED, mapped, 0);
        CHECK(map != MAP_FAILED && *map == (turn ? 'b' : 'a'));
        CHECK(pwrite(writer, turn ? "y" : "x", 1, 0) == 1 && *map == (turn ? 'y' : 'x'));
        close(mapped), close(writer);
        if (turn) {
            CHECK(holds(in(a, "mapped"), "x") && holds(in(b, "mapped"), "y"));
        }
    }
    close(fd);
    free(block), free(found);
}

/* Locks, removal and children: by the file, not by its number. */
static void files(void) {
    int one = open(in(a, "locked"), O_RDWR), other = open(in(b, "locked"), O_RDWR);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 0};
    CHECK(one >= 0 && other >= 0 && fcntl(one, F_SETLK, &lock) == 0 && fcntl(other, F_SETLK, &lock) == 0);
    /* With this go the locks on the first file only. */
    int again = open(in(a, "locked"), O_RDONLY);
    CHECK(again >= 0 && close(again) == 0);
    pid_t child = fork();
    if (child == 0) {
        int mine = open(in(a, "locked"), O_RDWR), yours = open(in(b, "locked"), O_RDWR);
        int free_one = fcntl(mine, F_SETLK, &lock) == 0, taken = fcntl(yours, F_SETLK, &lock) < 0 && (errno == EAGAIN || errno == EACCES);
        CHECK(write(one, "1", 1) == 1 && write(other, "2", 1) == 1);
        put(in(a, "of-child"), "a");
        put(in(b, "of-child"), "b");
        _exit(failures ? 3 : free_one && taken ? 0 : 1);
    }
    CHECK(child > 0 && status_of(child) == 0);
    CHECK(lseek(one, 0, SEEK_CUR) == 1 && lseek(other, 0, SEEK_CUR) == 1);
    CHECK(holds(in(a, "locked"), "1") && holds(in(b, "locked"), "2") && holds(in(a, "of-child"), "a") && holds(in(b, "of-child"), "b"));
    CHECK(unlink(in(a, "locked")) == 0 && access(in(b, "locked"), F_OK) == 0 && unlink(in(b, "locked")) == 0);
    CHECK(pwrite(one, "x", 1, 0) == 1 && pwrite(other, "y", 1, 0) == 1);
    char text = 0;
    CHECK(pread(one, &text, 1, 0) == 1 && text == 'x' && pread(other, &text, 1, 0) == 1 && text == 'y');
    CHECK(dup2(one, other) == other && pread(other, &text, 1, 0) == 1 && text == 'x');
    CHECK(syncfs(one) == 0 && fsync(other) == 0);
    close(one), close(other);
}

int main(int count, char **words) {
    CHECK(count == 4);
    CHECK(realpath(words[1], a) != NULL && realpath(words[2], b) != NULL && device(a) != device(b));
    plant(a, "a");
    plant(b, "b");
    names();
    paths(words[3]);
    data();
    files();
    printf(failures ? "bad\n" : "good\n");
    return failures != 0;
}
