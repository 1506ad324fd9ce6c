/* One bad argument at a time, for every system call that `varve run` looks at, in the working directory: prints what each was answered, and what became of the file.
 * tests/run/ hands the list of calls (the library's own) on standard input, runs this on a file system of the kernel and under `varve run`, and compares. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PAGE = 4096, FILE_FD = 100, READ_FD, WRITE_FD, DIR_FD, PATH_FD, PLACE_FD, EPOLL_FD, PIPE_OUT, PIPE_IN, NO_FD };

/* Kinds of arguments:
 *   P path   X name of an attribute   b memory for an answer   B memory with data   v vector   T two timespec   U two timeval   O offset or null
 *   f file   e directory   d where a path starts   n pieces of a vector   z bytes   o offset   g flags   i number of a kind   m mode   t another descriptor   k the same always
 * Values are those that work. */
struct row {
    const char *name, *kinds;
    long a[6];
};

static char *good, *bad, *constant, *texts;
static struct iovec *vector;
static char *name_none = "none", *name_new = "new", *name_file = "f", *name_link = "l", *name_dir = "d", *attribute = "user.a";
static int64_t *offset;
static struct timespec *times;

#define S(text) ((long)(text))

static struct row *rows(void) {
    enum { CWD = AT_FDCWD };
    static struct row all[200];
    struct row list[] = {
        {"read", "fbz", {FILE_FD, S(good), 64}},
        {"write", "fBz", {FILE_FD, S(good), 64}},
        {"pread64", "fbzo", {FILE_FD, S(good), 64, 0}},
        {"pwrite64", "fBzo", {FILE_FD, S(good), 64, 0}},
        {"readv", "fvn", {FILE_FD, S(vector), 2}},
        {"writev", "fvn", {FILE_FD, S(vector), 2}},
        {"preadv", "fvnok", {FILE_FD, S(vector), 2, 0, 0}},
        {"preadv2", "fvnokg", {FILE_FD, S(vector), 2, 0, 0, 0}},
        {"pwritev", "fvnok", {FILE_FD, S(vector), 2, 0, 0}},
        {"pwritev2", "fvnokg", {FILE_FD, S(vector), 2, 0, 0, 0}},
        {"lseek", "foi", {FILE_FD, 0, SEEK_SET}},
        {"ftruncate", "fo", {FILE_FD, 3}},
        {"fallocate", "fgoo", {FILE_FD, 0, 0, 16}},
        {"fsync", "f", {FILE_FD}},
        {"fdatasync", "f", {FILE_FD}},
        {"syncfs", "f", {FILE_FD}},
        {"sync_file_range", "foog", {FILE_FD, 0, 16, 0}},
        {"sync", "", {0}},
        {"fadvise64", "fooi", {FILE_FD, 0, 16, 0}},
        {"readahead", "foz", {FILE_FD, 0, 16}},
        {"copy_file_range", "fOfOzg", {READ_FD, 0, FILE_FD, S(offset), 4, 0}},
        {"sendfile", "ffOz", {PIPE_IN, FILE_FD, 0, 4}},
        {"open", "Pgm", {S(name_file), O_RDWR, 0644}},
        {"creat", "Pm", {S(name_file), 0644}},
        {"openat", "dPgm", {CWD, S(name_file), O_RDWR, 0644}},
        {"openat2", "dPbz", {CWD, S(name_file), S(texts), 24}},
        {"close", "f", {FILE_FD}},
        {"close_range", "kkk", {200, 300, 0}},
        {"dup", "f", {FILE_FD}},
        {"dup2", "ft", {FILE_FD, 120}},
        {"dup3", "ftg", {FILE_FD, 120, 0}},
        {"fcntl", "fik", {FILE_FD, F_GETFL, 0}},
        {"ioctl", "fib", {FILE_FD, 0x541b, S(good)}},
        {"flock", "fi", {FILE_FD, 2}},
        {"fstat", "fb", {FILE_FD, S(good)}},
        {"stat", "Pb", {S(name_file), S(good)}},
        {"lstat", "Pb", {S(name_link), S(good)}},
        {"newfstatat", "dPbg", {CWD, S(name_file), S(good), 0}},
        {"statx", "dPgib", {CWD, S(name_file), 0, 0x7ff, S(good)}},
        {"access", "Pi", {S(name_file), R_OK}},
        {"faccessat", "dPi", {CWD, S(name_file), R_OK}},
        {"faccessat2", "dPig", {CWD, S(name_file), R_OK, 0}},
        {"chmod", "Pm", {S(name_file), 0600}},
        {"fchmodat", "dPm", {CWD, S(name_file), 0600}},
        {"fchmodat2", "dPmg", {CWD, S(name_file), 0600, 0}},
        {"fchmod", "fm", {FILE_FD, 0600}},
        {"chown", "Pkk", {S(name_file), -1, -1}},
        {"lchown", "Pkk", {S(name_link), -1, -1}},
        {"fchownat", "dPkkg", {CWD, S(name_file), -1, -1, 0}},
        {"fchown", "fkk", {FILE_FD, -1, -1}},
        {"truncate", "Po", {S(name_file), 3}},
        {"utime", "PT", {S(name_file), S(times)}},
        {"utimes", "PU", {S(name_file), S(times)}},
        {"futimesat", "dPU", {CWD, S(name_file), S(times)}},
        {"utimensat", "dPTg", {CWD, S(name_file), S(times), 0}},
        {"getxattr", "PXbz", {S(name_file), S(attribute), S(good), 64}},
        {"lgetxattr", "PXbz", {S(name_file), S(attribute), S(good), 64}},
        {"fgetxattr", "fXbz", {FILE_FD, S(attribute), S(good), 64}},
        {"setxattr", "PXBzg", {S(name_file), S(attribute), S(good), 4, 0}},
        {"lsetxattr", "PXBzg", {S(name_file), S(attribute), S(good), 4, 0}},
        {"fsetxattr", "fXBzg", {FILE_FD, S(attribute), S(good), 4, 0}},
        {"listxattr", "Pbz", {S(name_file), S(good), 64}},
        {"llistxattr", "Pbz", {S(name_file), S(good), 64}},
        {"flistxattr", "fbz", {FILE_FD, S(good), 64}},
        {"removexattr", "PX", {S(name_file), S(attribute)}},
        {"lremovexattr", "PX", {S(name_file), S(attribute)}},
        {"fremovexattr", "fX", {FILE_FD, S(attribute)}},
        {"mkdir", "Pm", {S(name_new), 0755}},
        {"mkdirat", "dPm", {CWD, S(name_new), 0755}},
        {"mknod", "Pik", {S(name_new), S_IFREG | 0644, 0}},
        {"mknodat", "dPik", {CWD, S(name_new), S_IFREG | 0644, 0}},
        {"rmdir", "P", {S(name_dir)}},
        {"unlink", "P", {S(name_file)}},
        {"unlinkat", "dPg", {CWD, S(name_file), 0}},
        {"rename", "PP", {S(name_file), S(name_new)}},
        {"renameat", "dPdP", {CWD, S(name_file), CWD, S(name_new)}},
        {"renameat2", "dPdPg", {CWD, S(name_file), CWD, S(name_new), 0}},
        {"link", "PP", {S(name_file), S(name_new)}},
        {"linkat", "dPdPg", {CWD, S(name_file), CWD, S(name_new), 0}},
        {"symlink", "PP", {S(name_file), S(name_new)}},
        {"symlinkat", "PdP", {S(name_file), CWD, S(name_new)}},
        {"readlink", "Pbz", {S(name_link), S(good), 64}},
        {"readlinkat", "dPbz", {CWD, S(name_link), S(good), 64}},
        {"getdents64", "ebz", {DIR_FD, S(good), PAGE}},
        {"getdents", "ebz", {DIR_FD, S(good), PAGE}},
        {"chdir", "P", {S(name_dir)}},
        {"fchdir", "e", {DIR_FD}},
        {"getcwd", "bz", {S(good), PAGE}},
        {"umask", "k", {022}},
        {"setrlimit", "kB", {RLIMIT_CORE, S(texts)}},
        {"prlimit64", "kkBb", {0, RLIMIT_CORE, 0, S(good)}},
        {"mmap", "kzkkfo", {0, PAGE, PROT_READ, MAP_PRIVATE, FILE_FD, 0}},
        {"poll", "Bkk", {S(texts), 1, 0}},
        {"ppoll", "BkkBk", {S(texts), 1, S(texts + 512), 0, 8}},
        {"select", "kBBBk", {101, 0, 0, 0, S(texts + 512)}},
        {"pselect6", "kBBBkB", {101, 0, 0, 0, S(texts + 512), 0}},
        {"epoll_ctl", "kifB", {EPOLL_FD, EPOLL_CTL_ADD, FILE_FD, S(texts)}},
        {"splice", "fOfOzg", {FILE_FD, 0, PIPE_IN, 0, 4, 0}},
        {"tee", "ffzg", {PIPE_OUT, FILE_FD, 4, 0}},
        {"sendmsg", "fBg", {FILE_FD, S(texts), 0}},
        {"sendmmsg", "fBkg", {FILE_FD, S(texts), 1, 0}},
        {"vmsplice", "kvng", {FILE_FD, S(vector), 2, 0}},
        {"fstatfs", "fb", {FILE_FD, S(good)}},
        {"name_to_handle_at", "dPbbg", {CWD, S(name_file), S(good), S(good + 512), 0}},
        {"open_by_handle_at", "fBg", {FILE_FD, S(texts), 0}},
        {"execve", "PBB", {S(name_none), 0, 0}},
        {"execveat", "dPBBg", {CWD, S(name_none), 0, 0, 0}},
        {"rt_sigaction", "iBbz", {SIGUSR2, S(texts), S(good), 8}},
        {"rt_sigprocmask", "iBbz", {SIG_BLOCK, S(texts), S(good), 8}},
        {"inotify_add_watch", "fPg", {FILE_FD, S(name_file), 0}},
        {"fanotify_mark", "fgidP", {FILE_FD, 0, 0, CWD, S(name_file)}},
        {"bind", "fkk", {FILE_FD, 0, 0}},
        {"connect", "fkk", {FILE_FD, 0, 0}},
        {"listen", "fk", {FILE_FD, 1}},
        {"accept", "fkk", {FILE_FD, 0, 0}},
        {"accept4", "fkkk", {FILE_FD, 0, 0, 0}},
        {"shutdown", "fk", {FILE_FD, 0}},
        {"getsockname", "fkk", {FILE_FD, S(good), S(texts)}},
        {"getpeername", "fkk", {FILE_FD, S(good), S(texts)}},
        {"getsockopt", "fkkkk", {FILE_FD, SOL_SOCKET, SO_TYPE, S(good), S(texts)}},
        {"setsockopt", "fkkkk", {FILE_FD, SOL_SOCKET, SO_DEBUG, S(texts), 4}},
        {"sendto", "fkk", {FILE_FD, S(good), 4}},
        {"recvfrom", "fkk", {FILE_FD, S(good), 4}},
        {"recvmsg", "fkk", {FILE_FD, S(texts), 0}},
        {"recvmmsg", "fkkkk", {FILE_FD, S(texts), 1, 0, 0}},
        {"kcmp", "kkikk", {getpid(), getpid(), 0, FILE_FD, FILE_FD}},
        {"pidfd_getfd", "ffg", {FILE_FD, FILE_FD, 0}},
        {"fsconfig", "fikkk", {FILE_FD, 5, 0, 0, FILE_FD}},
        {"landlock_add_rule", "fiBg", {FILE_FD, 1, S(texts), 0}},
        {"open_tree", "dPg", {CWD, S(name_file), 0}},
        {"fspick", "dPg", {CWD, S(name_file), 0}},
        {"mount_setattr", "dPgkk", {CWD, S(name_file), 0, 0, 0}},
        {"cachestat", "fBbg", {FILE_FD, S(texts), S(good), 0}},
        {"setxattrat", "dPgXBk", {CWD, S(name_file), 0, S(attribute), S(texts), 16}},
        {"getxattrat", "dPgXBk", {CWD, S(name_file), 0, S(attribute), S(texts), 16}},
        {"listxattrat", "dPgbz", {CWD, S(name_file), 0, S(good), 64}},
        {"removexattrat", "dPgX", {CWD, S(name_file), 0, S(attribute)}},
        /* About memory (maps.c), processes (calls.c, forks.c), users (ids.c) or threads. */
        {"munmap"}, {"mremap"}, {"mprotect"}, {"pkey_mprotect"}, {"madvise"}, {"fork"}, {"vfork"}, {"clone"}, {"clone3"}, {"exit_group"},
        {"setuid"}, {"setgid"}, {"setreuid"}, {"setregid"}, {"setresuid"}, {"setresgid"}, {"setfsuid"}, {"setfsgid"}, {"setgroups"}, {"prctl"},
        /* After these nothing is served any more. */
        {"chroot"}, {"pivot_root"}, {"setns"}, {"unshare"}, {"mount"}, {"move_mount"}, {"io_setup"}, {"io_uring_setup"},
        /* They could change the machine, or are about what no file system here has. */
        {"bpf"}, {"kexec_file_load"}, {"finit_module"}, {"quotactl_fd"}, {"open_tree_attr"}, {"file_getattr"}, {"file_setattr"},
        {0},
    };
    memcpy(all, list, sizeof list);
    return all;
}

/* Where it began, and where attempts are made: a directory of its own, so that `..` is nobody else's either. */
static char base[PATH_MAX], here[PATH_MAX + 32];
/* The last attempt was about the directory itself, or went elsewhere: the next one needs another. */
static int spoiled = 1;

static int open_at(int to, const char *path, int flags) {
    int fd = open(path, flags, 0644);
    if (fd < 0 || dup2(fd, to) != to || close(fd)) return perror(path), exit(2), -1;
    return to;
}

/* Removes what is in the directory `fd`, and closes it. */
static void empty(int fd) {
    DIR *dir = fdopendir(fd);
    struct dirent *entry;
    if (!dir) return;
    while ((entry = readdir(dir))) {
        const char *name = entry->d_name;
        if (!strcmp(name, ".") || !strcmp(name, "..") || unlinkat(fd, name, 0) == 0) continue;
        fchmodat(fd, name, 0700, 0);
        empty(openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
        if (unlinkat(fd, name, AT_REMOVEDIR)) spoiled = 1;
    }
    closedir(dir);
}

/* The same beginning for every attempt. */
static void begin(void) {
    static int nth;
    int ends[2], epoll;
    umask(022);
    close_range(3, 300, 0);
    if (!spoiled) empty(open(".", O_RDONLY | O_DIRECTORY));
    if (spoiled) {
        snprintf(here, sizeof here, "%s/t%d", base, nth++);
        if (chdir(base) || mkdir(here, 0755) || chdir(here) || mkdir("w", 0755) || chdir("w")) perror(here), exit(2);
        spoiled = 0;
    }
    if (write(open_at(FILE_FD, "f", O_CREAT | O_RDWR), "hello", 5) != 5) perror("f"), exit(2);
    lseek(FILE_FD, 0, SEEK_SET);
    if (fsetxattr(FILE_FD, "user.a", "value", 5, 0)) perror("user.a"), exit(2);
    mkdir("d", 0755), mkdir("shut", 0), symlink("f", "l"), symlink("loop", "loop"), symlink("none", "dangling");
    close(open_at(NO_FD, "d/in", O_CREAT | O_RDWR));
    open_at(READ_FD, "f", O_RDONLY), open_at(WRITE_FD, "f", O_WRONLY), open_at(DIR_FD, "d", O_RDONLY);
    if ((epoll = epoll_create1(0)) < 0 || dup2(epoll, EPOLL_FD) < 0 || close(epoll) || pipe2(ends, O_NONBLOCK)) exit(2);
    dup2(ends[0], PIPE_OUT), dup2(ends[1], PIPE_IN), close(ends[0]), close(ends[1]);
    memset(good, 'g', 3 * PAGE), memset(texts, 0, 1024);
    vector[0] = (struct iovec){good, 4}, vector[1] = (struct iovec){good + 8, 4};
    times[0] = (struct timespec){1000, 5}, times[1] = (struct timespec){2000, 6};
    *offset = 64;
}

static void attempt(long number, const struct row *row, int i, const char *what, long value) {
    long a[6];
    char text[8] = "";
    struct stat now;
    memcpy(a, row->a, sizeof a);
    if (i >= 0) a[i] = value;
    if (strstr(row->name, "chdir") || what[0] == '.') spoiled = 1;
    printf("%s %d %s:", row->name, i, what);
    fflush(stdout);
    errno = 0;
    long got = syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    printf(" %s", got == -1 ? strerrorname_np(errno) : "ok");
    if (got >= 0 && got <= PAGE && strcmp(row->name, "getcwd")) printf(" %ld", got);
    if (stat("f", &now) == 0 || fstat(FILE_FD, &now) == 0) {
        long there = pread(READ_FD, text, 7, 0);
        printf(" file %ld %o %s", (long)now.st_size, now.st_mode, there > 0 ? text : "");
    }
    puts(access("new", F_OK) == 0 ? " new" : "");
    fflush(stdout);
}

static void pointers(long number, const struct row *row, int i, int answers) {
    struct { const char *what; char *value; } all[] = {
        {"null", NULL}, {"bad", bad}, {"kernel's", (char *)0xffff800000000000}, {"no address", (char *)(1L << 62)}, {"across", bad - 3}, {"constant", constant}};
    for (int k = 0; k < 5 + answers; k++) begin(), attempt(number, row, i, all[k].what, (long)all[k].value);
}

static void strings(long number, const struct row *row, int i, const char *const *list) {
    pointers(number, row, i, 0);
    begin(), memset(bad - 4, 'f', 4), attempt(number, row, i, "no end", (long)(bad - 4));
    for (; *list; list++) begin(), attempt(number, row, i, *list, (long)*list);
    for (int len = 255; len < 2 * PAGE; len += len == 255 ? 1 : PAGE - 256 + (len > PAGE)) {
        char what[32];
        begin(), memset(good, 'n', len), good[len] = 0;
        snprintf(what, sizeof what, "%d bytes", len);
        attempt(number, row, i, what, (long)good);
    }
}

static void numbers(long number, const struct row *row, int i, const long *list, int count) {
    char what[32];
    for (int k = 0; k < count; k++) {
        snprintf(what, sizeof what, "%ld", list[k]);
        begin();
        /* Only where it is asked for: such a descriptor is the kernel's, who has to look the file up. */
        if (list[k] == PATH_FD) open_at(PATH_FD, "f", O_PATH);
        if (list[k] == PLACE_FD) open_at(PLACE_FD, "d", O_PATH | O_DIRECTORY);
        attempt(number, row, i, what, list[k]);
    }
}

#define NUMBERS(...)                                                       \
    do {                                                                   \
        long list[] = {__VA_ARGS__};                                       \
        numbers(number, row, i, list, sizeof list / sizeof *list);         \
    } while (0)

static void vectors(long number, const struct row *row, int i) {
    pointers(number, row, i, 0);
    begin(), vector[0].iov_base = bad, attempt(number, row, i, "first is bad", (long)vector);
    begin(), vector[1].iov_base = bad, attempt(number, row, i, "second is bad", (long)vector);
    begin(), vector[1].iov_base = (void *)(1L << 63), attempt(number, row, i, "second is no address", (long)vector);
    begin(), vector[1].iov_len = -1, attempt(number, row, i, "negative length", (long)vector);
    begin(), vector[0].iov_len = 0, vector[0].iov_base = bad, attempt(number, row, i, "first is empty", (long)vector);
}

static void moments(long number, const struct row *row, int i, long unit) {
    pointers(number, row, i, 0);
    begin(), times[0].tv_nsec = unit, attempt(number, row, i, "first too long", (long)times);
    begin(), times[1].tv_nsec = -1, attempt(number, row, i, "second negative", (long)times);
    begin(), times[0].tv_nsec = UTIME_OMIT, times[1].tv_nsec = UTIME_NOW, attempt(number, row, i, "now, and none", (long)times);
}

static void flags(long number, const struct row *row, int i) {
    char what[32];
    for (int bit = 0; bit < 32; bit++) {
        snprintf(what, sizeof what, "bit %d", bit);
        begin(), attempt(number, row, i, what, row->a[i] | 1L << bit);
    }
    begin(), attempt(number, row, i, "all", -1);
}

static void argument(long number, const struct row *row, int i) {
    static const char *const paths[] = {"", "none", "none/x", "f/x", "f/", "f/.", "loop", "loop/x", "dangling", "dangling/", "l", "l/", "d", "d/", "d/.",
                                        "d/in", "d/in/", ".", "..", "shut", "shut/x", "new/", "new", NULL};
    static const char *const attributes[] = {"", "user.", "user.none", "nothing.a", "trusted.a", "plain", NULL};
    switch (row->kinds[i]) {
        case 'P': strings(number, row, i, paths); break;
        case 'X': strings(number, row, i, attributes); break;
        case 'b': pointers(number, row, i, 1); break;
        case 'B': pointers(number, row, i, 0); break;
        case 'v': vectors(number, row, i); break;
        case 'T': moments(number, row, i, 1000000000); break;
        case 'U': moments(number, row, i, 1000000); break;
        case 'O':
            pointers(number, row, i, 1);
            begin(), *offset = -1, attempt(number, row, i, "negative", (long)offset);
            break;
        case 'f':
        case 'e': NUMBERS(-1, 9999, AT_FDCWD, FILE_FD, READ_FD, WRITE_FD, DIR_FD, PATH_FD, PLACE_FD, PIPE_IN, PIPE_OUT, NO_FD); break;
        case 'd': NUMBERS(-1, 9999, FILE_FD, DIR_FD, PATH_FD, PLACE_FD, PIPE_IN, NO_FD); break;
        case 't': NUMBERS(-1, 120, FILE_FD, DIR_FD, 1 << 24, INT_MAX); break;
        case 'n': NUMBERS(0, 1, -1, 1024, 1025, 1L << 40); break;
        case 'z': NUMBERS(0, 1, 3, -1, 1L << 40, 1L << 47, INT64_MIN); break;
        case 'o': NUMBERS(-1, 1, 4, 100, INT64_MIN, INT64_MAX, 1L << 62); break;
        case 'i': NUMBERS(-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 64, 65, 1032, 1 << 30); break;
        case 'm': NUMBERS(0, -1, 07777, 1 << 20); break;
        case 'g': flags(number, row, i); break;
    }
}

int main(void) {
    char line[128], name[64];
    long number;
    // At one place in every process: whether 1 TiB from there ends above what a process may have is an answer too.
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    good = mmap((void *)(1L << 44), 6 * PAGE, PROT_READ | PROT_WRITE, how, -1, 0), bad = good + 3 * PAGE;
    if (good != (void *)(1L << 44)) return 3;
    texts = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    constant = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    vector = calloc(1024, sizeof *vector), times = calloc(2, sizeof *times), offset = calloc(1, sizeof *offset);
    mprotect(bad, 3 * PAGE, PROT_NONE);
    signal(SIGPIPE, SIG_IGN);
    if (!getcwd(base, sizeof base)) return 2;
    struct row *all = rows();
    while (fgets(line, sizeof line, stdin) && sscanf(line, "%63s %ld", name, &number) == 2) {
        struct row *row = all;
        while (row->name && strcmp(row->name, name)) row++;
        if (!row->name) {
            printf("%s is not in the table\n", name);
            continue;
        }
        if (!row->kinds) continue;
        begin(), attempt(number, row, -1, "as it should be", 0);
        for (int i = 0; row->kinds[i]; i++) argument(number, row, i);
    }
    return 0;
}
