/* `openat2` with every combination of rules (RESOLVE_*), in the working directory: prints what each was answered, and what was opened.
 * tests/run/ runs this on a file system of the kernel and under `varve run`, and compares. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CHECK(what) \
    do { \
        if (!(what)) { printf("line %d: %s: %s\n", __LINE__, #what, strerror(errno)); exit(1); } \
    } while (0)

enum { ALL = 0x3f, UNKNOWN = 0x40 };

/* A walk that stays below a directory is refused (EAGAIN) where anything on the machine is renamed meanwhile, and asked for again. */
static long openat2_(int dir, const char *path, const struct open_how *how, size_t size) {
    for (int i = 0;; i++) {
        long result = syscall(SYS_openat2, dir, path, how, size);
        if (result >= 0 || errno != EAGAIN || i == 50) return result < 0 ? -errno : result;
    }
}

static const char *known[] = {".", "top", "top/a", "top/a/b", "top/a/b/file", "outside", "top/in", "top/closed", "/", "top/up", "top/abs", "top/a/rootlink"};
enum { KNOWN = sizeof known / sizeof *known };
static struct stat is[KNOWN];

/* What a descriptor is open on. */
static const char *what(int fd) {
    struct stat now;
    if (fstat(fd, &now) != 0) return "nothing";
    for (int i = 0; i < KNOWN; i++)
        if (now.st_dev == is[i].st_dev && now.st_ino == is[i].st_ino) return known[i];
    return "something else";
}

static void touch(const char *path) {
    int fd = open(path, O_CREAT | O_WRONLY, 0644);
    CHECK(fd >= 0);
    close(fd);
}

static void plant(void) {
    char here[4096], path[4200];
    CHECK(getcwd(here, sizeof here) != NULL);
    CHECK(mkdir("top", 0755) == 0 && mkdir("top/a", 0755) == 0 && mkdir("top/a/b", 0755) == 0);
    CHECK(mkdir("top/closed", 0600) == 0);
    touch("top/a/b/file");
    touch("outside");
    snprintf(path, sizeof path, "%s/top", here);
    CHECK(symlink("..", "top/up") == 0 && symlink("/", "top/abs") == 0 && symlink("a/b/file", "top/in") == 0);
    CHECK(symlink("loop", "top/loop") == 0 && symlink("../../outside", "top/a/out") == 0);
    CHECK(symlink("/a/b/file", "top/a/rootlink") == 0 && symlink(path, "top/self") == 0);
    CHECK(symlink("../../a", "top/a/b/dots") == 0 && symlink("nothing", "top/dangling") == 0);
    CHECK(symlink("../../../../../../../../../../../../..", "top/a/far") == 0 && symlink("a/b/", "top/slash") == 0);
    for (int i = 0; i < KNOWN; i++) CHECK(lstat(known[i], &is[i]) == 0);
}

static const struct {
    const char *name;
    int flags;
    int mode;
} opens[] = {
    {"read", O_RDONLY, 0},
    {"path", O_PATH, 0},
    {"path-nofollow", O_PATH | O_NOFOLLOW, 0},
    {"path-directory", O_PATH | O_DIRECTORY | O_NOFOLLOW, 0},
    {"directory", O_RDONLY | O_DIRECTORY, 0},
    {"nofollow", O_RDONLY | O_NOFOLLOW, 0},
    {"create", O_RDWR | O_CREAT, 0600},
    {"exclusive", O_RDWR | O_CREAT | O_EXCL, 0600},
    {"truncate", O_RDWR | O_TRUNC, 0},
    {"unnamed", O_RDWR | O_TMPFILE, 0600},
};
enum { OPENS = sizeof opens / sizeof *opens, FIRST_THAT_CHANGES = 6 };

/* One line. A walk of cached names alone may always be refused (EAGAIN): a program asks again without that rule. */
static void one(const char *from, int dir, const char *path, int i, unsigned resolve) {
    struct open_how how = {.flags = opens[i].flags, .mode = opens[i].mode, .resolve = resolve};
    long fd = openat2_(dir, path, &how, sizeof how);
    if (fd == -EAGAIN && resolve & RESOLVE_CACHED && i < FIRST_THAT_CHANGES) {
        how.resolve &= ~RESOLVE_CACHED;
        fd = openat2_(dir, path, &how, sizeof how);
    }
    printf("%s %s %s %x: %s\n", from, path, opens[i].name, resolve, fd < 0 ? strerrorname_np(-fd) : what(fd));
    if (fd >= 0 && i >= FIRST_THAT_CHANGES && !strcmp(what(fd), "something else")) {
        /* It was made: it goes again, wherever it is. One without a name is gone by itself. */
        char link[64], made[4096];
        snprintf(link, sizeof link, "/proc/self/fd/%ld", fd);
        ssize_t len = readlink(link, made, sizeof made - 1);
        CHECK(len > 0);
        made[len] = 0;
        CHECK(opens[i].flags & O_TMPFILE & ~O_DIRECTORY || unlink(made) == 0);
    }
    if (fd >= 0) close(fd);
}

int main(void) {
    static const char *paths[] = {
        "a/b/file", "a/../a/b/file", "../outside", "a/../../outside", "..", "../", "../top/a", "a/..", "a/b/../..", ".", "./", "", "a//b/./file", "a/b/file/", "a/b/file/x",
        "in", "in/", "abs", "abs/", "abs/top", "up", "up/outside", "up/top/a", "a/out", "a/rootlink", "self", "self/a", "loop", "loop/x", "a/b/dots", "a/b/dots/b/file",
        "a/far", "a/far/a/b/file", "slash", "slash/file", "none", "none/x", "none/..", "dangling", "dangling/", "closed", "closed/x", "closed/..", "closed/../..", "/", "/a/b/file", "//a/../..",
        "a/../../../../../../../../../../../../../..", "new", "a/new", "../new", "a/../../new", "/new", "new/",
    };
    enum { PATHS = sizeof paths / sizeof *paths };
    plant();
    int top = open("top", O_RDONLY | O_DIRECTORY), place = open("top", O_PATH | O_DIRECTORY);
    int file = open("outside", O_RDONLY), elsewhere = open("/", O_RDONLY | O_DIRECTORY);
    CHECK(top >= 0 && place >= 0 && file >= 0 && elsewhere >= 0 && chdir("top") == 0);
    char absolute[4300], here[4096];
    CHECK(getcwd(here, sizeof here) != NULL);
    const struct {
        const char *name;
        int fd;
    } froms[] = {{"cwd", AT_FDCWD}, {"top", top}, {"place", place}};
    for (int i = 0; i < OPENS; i++)
        for (int at = 0; at < PATHS; at++)
            for (unsigned resolve = 0; resolve <= ALL; resolve++)
                for (int from = 0; from < 3; from++) {
                    /* Rules that change nothing here need not be tried with all others. */
                    int idle = resolve & (RESOLVE_CACHED | RESOLVE_NO_MAGICLINKS);
                    if (idle && (i > 1 || resolve != ALL) && (idle & (idle - 1) || from != 1)) continue;
                    if (i > 0 && from == 2) continue;
                    if (opens[i].flags & O_PATH && (from == 0 || (idle && resolve != ALL))) continue;
                    /* To make something in "/" is not asked. */
                    int leaves = i >= FIRST_THAT_CHANGES && !(resolve & (RESOLVE_BENEATH | RESOLVE_IN_ROOT));
                    if (leaves && (paths[at][0] == '/' || strstr(paths[at], "far") || strstr(paths[at], "abs") || strstr(paths[at], "../../.."))) continue;
                    CHECK(chdir("..") == 0);
                    if (from == 0) CHECK(chdir("top") == 0);
                    one(froms[from].name, froms[from].fd, paths[at], i, resolve);
                    if (from != 0) CHECK(chdir("top") == 0);
                }
    for (int i = 0; i < OPENS; i++)
        for (unsigned resolve = 0; resolve <= ALL; resolve++) {
            struct open_how how = {.flags = opens[i].flags, .mode = opens[i].mode, .resolve = resolve};
            int changes = i >= FIRST_THAT_CHANGES;
            snprintf(absolute, sizeof absolute, "%s/a/b/file", here);
            /* The path is another one on each file system. */
            long fd = openat2_(top, absolute, &how, sizeof how);
            if (fd == -EAGAIN && resolve & RESOLVE_CACHED && !changes) {
                how.resolve &= ~RESOLVE_CACHED;
                fd = openat2_(top, absolute, &how, sizeof how);
            }
            printf("absolute %s %x: %s\n", opens[i].name, resolve, fd < 0 ? strerrorname_np(-fd) : what(fd));
            if (fd >= 0) close(fd);
            one("file", file, "a", i, resolve);
            one("none", 999, "a", i, resolve);
            if (!changes) one("elsewhere", elsewhere, "no-such-name", i, resolve);
        }
    for (int i = 0; i < OPENS; i++) one("top", top, "a/b/file", i, UNKNOWN);
    /* The size of the structure. */
    for (size_t size = 0; size <= 64; size += 8) {
        char how[64] = {0};
        ((struct open_how *)how)->resolve = RESOLVE_BENEATH;
        printf("size %zu: %s\n", size, openat2_(top, "a", (void *)how, size) < 0 ? strerrorname_np(errno) : "opened");
        how[size ? size - 1 : 0] = 1;
        printf("size %zu, its last byte: %s\n", size, openat2_(top, "a", (void *)how, size) < 0 ? strerrorname_np(errno) : "opened");
    }
    /* What was moved away from below: the walk does not climb out of it. */
    CHECK(mkdirat(top, "m", 0755) == 0 && mkdirat(top, "m/n", 0755) == 0);
    int inner = openat(top, "m/n", O_RDONLY | O_DIRECTORY);
    CHECK(inner >= 0 && renameat(top, "m", AT_FDCWD, "../moved") == 0);
    one("moved", inner, "..", 0, RESOLVE_BENEATH);
    one("moved", inner, ".", 0, RESOLVE_BENEATH);
    one("moved", inner, "../../../outside", 0, RESOLVE_IN_ROOT);
    printf("end\n");
    return 0;
}
