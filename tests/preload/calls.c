/* What a program of C may expect of its file calls, in the working directory. Run by tests/run.rs under `varve run`; says which line found
 * something else, and ends with 1 then. It must pass on every file system. */
#define _GNU_SOURCE
#include "check.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

extern char **environ;

static volatile int stop;

static void *write_files(void *number) {
    char name[32];
    snprintf(name, sizeof name, "thread%ld", (long)number);
    /* At least once, however late the thread starts: the file is used later. */
    do {
        char back[10];
        int fd = open(name, O_CREAT | O_RDWR | O_TRUNC, 0644);
        CHECK(fd >= 0);
        CHECK(write(fd, "0123456789", 10) == 10);
        CHECK(pread(fd, back, 10, 0) == 10);
        close(fd);
    } while (!stop);
    return NULL;
}

static void children_write_while_threads_do(void) {
    enum { THREADS = 3, CHILDREN = 12 };
    pthread_t threads[THREADS];
    struct stat stat_;
    for (long i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, write_files, (void *)i);
    for (int i = 0; i < CHILDREN; i++) {
        pid_t child = fork();
        if (child == 0) {
            int fd = open("child", O_CREAT | O_WRONLY | O_APPEND, 0644);
            _exit(fd < 0 || write(fd, "c\n", 2) != 2);
        }
        CHECK(status_of(child) == 0);
    }
    stop = 1;
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    CHECK(stat("child", &stat_) == 0 && stat_.st_size == 2 * CHILDREN);
}

static void thousands_of_descriptors_share_offsets_with_a_child(void) {
    enum { COUNT = 2000 };
    static int fds[COUNT];
    char buffer[10];
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max < 6000 ? limit.rlim_max : 6000;
    setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur < COUNT + 200) {
        printf("SKIPPED: %d descriptors are allowed\n", (int)limit.rlim_cur);
        return;
    }
    for (int i = 0; i < COUNT; i++) {
        fds[i] = open("thread0", O_RDONLY);
        CHECK(fds[i] >= 0 && (i == 0 || fds[i] > fds[i - 1]));
    }
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < COUNT; i++)
            if (read(fds[i], buffer, 10) != 10) _exit(1);
        _exit(0);
    }
    CHECK(status_of(child) == 0);
    for (int i = 0; i < COUNT; i++) {
        CHECK(read(fds[i], buffer, 10) == 0);
        CHECK(close(fds[i]) == 0);
    }
}

static void programs_write_behind_each_other(void) {
    pid_t child;
    char text[64] = {0}, line[8];
    char *arguments[] = {"cat", "-", NULL};
    posix_spawn_file_actions_t actions;
    int fd = open("spawned", O_CREAT | O_RDWR, 0644);
    CHECK(write(fd, "a\n", 2) == 2);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, 1);
    posix_spawn_file_actions_addopen(&actions, 0, "thread0", O_RDONLY, 0);
    CHECK(posix_spawnp(&child, "cat", &actions, NULL, arguments, environ) == 0);
    CHECK(status_of(child) == 0);
    CHECK(write(fd, "b\n", 2) == 2);
    CHECK(pread(fd, text, 63, 0) == 14 && !strcmp(text, "a\n0123456789b\n"));
    FILE *pipe_ = popen("cat spawned; echo x >> spawned; echo done", "r");
    CHECK(fgets(line, sizeof line, pipe_) && !strcmp(line, "a\n"));
    while (fgets(line, sizeof line, pipe_)) {}
    pclose(pipe_);
    CHECK(system("test $(wc -c < spawned) = 16") == 0);
    child = vfork();
    if (child == 0) {
        execl("/nonexistent", "nonexistent", (char *)NULL);
        _exit(7);
    }
    CHECK(WEXITSTATUS(status_of(child)) == 7);
    CHECK(pread(fd, text, 1, 0) == 1);
    /* A program goes on where its parent stopped. */
    int half = open("thread1", O_RDONLY);
    CHECK(read(half, text, 2) == 2);
    CHECK(dup2(half, 0) == 0);
    pipe_ = popen("cat", "r");
    memset(text, 0, sizeof text);
    CHECK(fread(text, 1, 63, pipe_) == 8 && !strcmp(text, "23456789"));
    pclose(pipe_);
    CHECK(close(0) == 0 && open("thread0", O_RDONLY) == 0);
}

static void streams_read_what_they_wrote(void) {
    char line[8];
    int value = -1, count = 0;
    struct stat stat_;
    FILE *stream = fopen("stream", "w+");
    for (int i = 0; i < 10000; i++) fprintf(stream, "%d\n", i);
    rewind(stream);
    while (fscanf(stream, "%d", &value) == 1) count++;
    CHECK(count == 10000 && value == 9999);
    CHECK(fseek(stream, -5, SEEK_END) == 0 && fgets(line, sizeof line, stream) && !strcmp(line, "9999\n"));
    fclose(stream);
    stream = fopen("stream", "a");
    fputs("end\n", stream);
    fclose(stream);
    CHECK(stat("stream", &stat_) == 0 && stat_.st_size == 48894);
}

static int visited;

static int visit(const char *path, const struct stat *stat_, int kind, struct FTW *state) {
    (void)path, (void)stat_, (void)kind, (void)state;
    visited++;
    return 0;
}

static void trees_are_walked(void) {
    char path[4096], template[] = "tempXXXXXX";
    glob_t found;
    mkdir("tree", 0755);
    mkdir("tree/a", 0755);
    mkdir("tree/a/b", 0755);
    CHECK(close(creat("tree/a/b/file", 0644)) == 0);
    CHECK(close(creat("tree/other", 0644)) == 0);
    CHECK(nftw("tree", visit, 10, FTW_PHYS) == 0 && visited == 5);
    CHECK(glob("tree/*", 0, NULL, &found) == 0 && found.gl_pathc == 2);
    CHECK(realpath("tree/a/../a/b/./file", path) && strstr(path, "/tree/a/b/file"));
    CHECK(close(mkstemp(template)) == 0);
    CHECK(chdir("tree/a") == 0 && getcwd(path, sizeof path) && strstr(path, "/tree/a"));
    CHECK(access("b/file", R_OK) == 0 && chdir("../..") == 0);
    DIR *dir = opendir("tree");
    int count = 0;
    long half = -1;
    while (readdir(dir))
        if (++count == 2) half = telldir(dir);
    CHECK(count == 4);
    seekdir(dir, half);
    for (count = 0; readdir(dir);) count++;
    CHECK(count == 2);
    rewinddir(dir);
    for (count = 0; readdir(dir);) count++;
    CHECK(count == 4);
    closedir(dir);
}

static void descriptors_are_the_kernels_numbers(void) {
    char byte;
    int a = open("thread1", O_RDONLY), b = open("stream", O_RDONLY);
    CHECK(dup2(a, b) == b);
    CHECK(read(a, &byte, 1) == 1 && byte == '0');
    CHECK(read(b, &byte, 1) == 1 && byte == '1');
    CHECK(close_range((unsigned)a, (unsigned)a, 0) == 0);
    CHECK(read(a, &byte, 1) < 0 && errno == EBADF);
    CHECK(open("thread1", O_RDONLY) == a);
    struct pollfd ready = {.fd = b, .events = POLLIN};
    CHECK(poll(&ready, 1, 0) == 1);
    CHECK(syscall(SYS_openat, AT_FDCWD, "thread0", O_RDONLY) >= 0);
    unsigned long long hint = 2;
    CHECK(fcntl(b, F_SET_RW_HINT, &hint) == 0 && fcntl(b, F_GET_RW_HINT, &hint) == 0);
    CHECK(read(a, (void *)8, 10) < 0 && errno == EFAULT);
    CHECK(open((char *)8, O_RDONLY) < 0 && errno == EFAULT);
}

/* A directory that is open as a place: duplicated, moved, removed, given to children and programs. */
static void places_are_directories_that_stay(void) {
    struct stat stat_, other;
    char path[64], text[8] = "";
    CHECK(mkdir("stays", 0700) == 0);
    int place = open("stays", O_PATH | O_NOFOLLOW | O_CLOEXEC), copy = dup(place);
    CHECK(place >= 0 && copy >= 0 && fcntl(place, F_GETFD) == FD_CLOEXEC && fcntl(copy, F_GETFD) == 0);
    CHECK((fcntl(place, F_GETFL) & (O_PATH | O_ACCMODE)) == O_PATH && fcntl(place, F_SETFL, O_APPEND) < 0 && errno == EBADF);
    CHECK(fchmod(place, 0755) < 0 && errno == EBADF && fsync(place) < 0 && errno == EBADF && flock(place, LOCK_SH) < 0 && errno == EBADF);
    CHECK(fsetxattr(place, "user.a", "b", 1, 0) < 0 && errno == EBADF && futimens(place, NULL) < 0 && errno == EBADF);
    CHECK(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, place, 0) == MAP_FAILED && errno == EBADF);
    CHECK(syscall(SYS_getdents64, place, text, sizeof text) < 0 && errno == EBADF && lseek(place, 0, SEEK_SET) < 0 && errno == EBADF);
    snprintf(path, sizeof path, "/proc/self/fd/%d", place);
    CHECK(chmod(path, 0711) == 0 && stat("stays", &stat_) == 0 && (stat_.st_mode & 07777) == 0711);
    CHECK(fchmodat(AT_FDCWD, path, 0755, 0) == 0 && fstat(copy, &stat_) == 0 && (stat_.st_mode & 07777) == 0755);
    CHECK(fchownat(place, "", 0, 0, AT_EMPTY_PATH) == 0 || errno == EPERM);
    CHECK(rename("stays", "moved") == 0 && fstatat(copy, "", &other, AT_EMPTY_PATH) == 0 && other.st_ino == stat_.st_ino);
    CHECK(mkdirat(copy, "in", 0755) == 0 && access("moved/in", F_OK) == 0);
    int back = open(".", O_RDONLY | O_DIRECTORY);
    CHECK(fchdir(place) == 0 && access("in", F_OK) == 0 && fchdir(back) == 0 && close(back) == 0);
    pid_t child = fork();
    if (child == 0) {
        /* It goes on without the parent's copy, and the next program has it too. */
        close(place);
        if (fstat(copy, &other) || other.st_ino != stat_.st_ino || mkdirat(copy, "by child", 0700)) _exit(1);
        snprintf(path, sizeof path, "test -d /proc/self/fd/%d/in", copy);
        execl("/bin/sh", "sh", "-c", path, NULL);
        _exit(2);
    }
    CHECK(status_of(child) == 0 && unlinkat(copy, "by child", AT_REMOVEDIR) == 0 && unlinkat(place, "in", AT_REMOVEDIR) == 0);
    CHECK(rmdir("moved") == 0 && fstat(place, &stat_) == 0 && stat_.st_nlink == 0);
    CHECK(mkdirat(place, "late", 0700) < 0 && errno == ENOENT && openat(copy, "x", O_CREAT | O_RDWR, 0600) < 0 && errno == ENOENT);
    CHECK(close(place) == 0 && close(copy) == 0 && fstat(copy, &stat_) < 0 && errno == EBADF);
}

static void places_are_directories_to_start_from(void) {
    char byte;
    struct stat stat_, other;
    int place = open("tree", O_PATH | O_DIRECTORY), below = openat(place, "a/b", O_PATH | O_NOFOLLOW);
    CHECK(place >= 0 && below >= 0);
    CHECK(read(place, &byte, 1) < 0 && errno == EBADF);
    CHECK(fstat(place, &stat_) == 0 && stat("tree", &other) == 0 && stat_.st_ino == other.st_ino);
    CHECK(mkdirat(place, "new", 0755) == 0 && stat("tree/new", &stat_) == 0);
    int fd = openat(below, "../../new/file", O_CREAT | O_RDWR, 0644);
    CHECK(fd >= 0 && write(fd, "x", 1) == 1 && close(fd) == 0);
    CHECK(rename("tree", "grown") == 0 && fstatat(place, "new/file", &stat_, 0) == 0 && stat_.st_size == 1);
    pid_t child = fork();
    if (child == 0) _exit(unlinkat(place, "new/file", 0) != 0);
    CHECK(status_of(child) == 0 && access("grown/new/file", F_OK) < 0);
    CHECK(unlinkat(place, "new", AT_REMOVEDIR) == 0 && rename("grown", "tree") == 0);
    CHECK(openat(below, "none", O_PATH) < 0 && errno == ENOENT);
    CHECK(openat(below, "file", O_PATH | O_DIRECTORY) < 0 && errno == ENOTDIR);
    CHECK(close(place) == 0 && close(below) == 0);
    places_are_directories_that_stay();
    /* The number is another directory's now. */
    CHECK(open("tree/a", O_RDONLY | O_DIRECTORY) == place);
    CHECK(faccessat(place, "b/file", F_OK, 0) == 0 && close(place) == 0);
    place = open("tree", O_PATH);
    CHECK(dup2(STDIN_FILENO, place) == place && openat(place, "a", O_RDONLY) < 0);
    close(place);
}

static volatile sig_atomic_t hits;
static int signalled;

static void on_signal(int number) {
    (void)number;
    hits++;
    if (write(signalled, "!", 1) != 1) _exit(99);
}

static void handlers_write_while_the_program_writes(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    struct stat stat_;
    long dots = 0;
    int status;
    pid_t self = getpid();
    signalled = open("signals", O_CREAT | O_WRONLY | O_APPEND | O_TRUNC, 0644);
    sigaction(SIGUSR1, &action, NULL);
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < 200; i++) {
            kill(self, SIGUSR1);
            usleep(200);
        }
        _exit(0);
    }
    do {
        CHECK(write(signalled, ".", 1) == 1);
        dots++;
    } while (waitpid(child, &status, WNOHANG) == 0);
    CHECK(hits > 0 && stat("signals", &stat_) == 0 && stat_.st_size == dots + hits);
}

static void on_alarm(int number) {
    int kept = errno, fd = open("alarms", O_CREAT | O_WRONLY | O_APPEND, 0644);
    struct stat stat_;
    (void)number;
    if (fd < 0 || write(fd, "!", 1) != 1 || close(fd) != 0 || stat("alarms", &stat_) != 0) _exit(98);
    hits++;
    errno = kept;
}

/* What a handler may call, it may call while the program allocates or forks. */
static void handlers_write_while_the_program_allocates(void) {
    enum { BLOCKS = 64, HITS = 3000 };
    struct itimerval often = {{0, 150}, {0, 150}}, never = {{0, 0}, {0, 0}};
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    struct stat stat_;
    char *blocks[BLOCKS] = {0};
    unsigned random = 1;
    pid_t self = getpid(), patience = fork();
    if (patience == 0) {
        sleep(60);
        kill(self, SIGKILL);
        _exit(0);
    }
    hits = 0;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    while (hits < HITS) {
        for (int i = 0; i < 1000; i++) {
            random = random * 1664525 + 1013904223;
            char **block = &blocks[random >> 8 & (BLOCKS - 1)];
            free(*block);
            *block = malloc(1500 + (random >> 16 & 8191));
        }
    }
    for (int i = 0; i < BLOCKS; i++) free(blocks[i]);
    int before = hits;
    while (hits < before + HITS / 4) {
        pid_t child = fork();
        if (child == 0) _exit(access("alarms", F_OK) != 0);
        CHECK(status_of(child) == 0);
    }
    setitimer(ITIMER_REAL, &never, NULL);
    CHECK(kill(patience, SIGKILL) == 0 && WIFSIGNALED(status_of(patience)));
    CHECK(stat("alarms", &stat_) == 0 && stat_.st_size == hits);
}

static int drained;
static volatile sig_atomic_t drained_bytes;

static void drain(int number) {
    static char bytes[1 << 16];
    ssize_t got;
    (void)number;
    while ((got = read(drained, bytes, sizeof bytes)) > 0) drained_bytes += got;
}

static void handlers_read_what_the_program_sends(void) {
    enum { LEN = 1 << 20 };
    static char bytes[LEN];
    int ends[2], fd = open("sent", O_CREAT | O_RDWR | O_TRUNC, 0644);
    struct itimerval often = {{0, 2000}, {0, 2000}}, never = {{0, 0}, {0, 0}};
    struct sigaction action = {.sa_handler = drain};
    pid_t self = getpid();
    long sent = 0;
    CHECK(write(fd, bytes, LEN) == LEN && lseek(fd, 0, SEEK_SET) == 0);
    CHECK(pipe(ends) == 0 && fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0);
    drained = ends[0];
    /* Whoever sends waits until the pipe has room: only the handler makes some. */
    pid_t patience = fork();
    if (patience == 0) {
        sleep(30);
        kill(self, SIGKILL);
        _exit(0);
    }
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    while (sent < LEN) {
        ssize_t some = sendfile(ends[1], fd, NULL, LEN - sent);
        if (some < 0 && errno == EINTR) continue;
        CHECK(some > 0);
        if (some <= 0) break;
        sent += some;
    }
    setitimer(ITIMER_REAL, &never, NULL);
    drain(0);
    CHECK(sent == LEN && drained_bytes == LEN && lseek(fd, 0, SEEK_CUR) == LEN);
    CHECK(kill(patience, SIGKILL) == 0 && WIFSIGNALED(status_of(patience)));
    close(ends[0]), close(ends[1]), close(fd);
}

static void what_runs_or_has_a_mount_on_it_is_busy(void) {
    pid_t child;
    char *arguments[] = {"./running", "60", NULL};
    CHECK(system("cp $(command -v sleep) running && chmod 755 running") == 0);
    CHECK(posix_spawn(&child, "./running", NULL, NULL, arguments, environ) == 0);
    CHECK(open("running", O_WRONLY) < 0 && errno == ETXTBSY);
    CHECK(open("running", O_RDWR | O_TRUNC) < 0 && errno == ETXTBSY);
    CHECK(truncate("running", 0) < 0 && errno == ETXTBSY);
    CHECK(access("running", X_OK) == 0);
    CHECK(kill(child, SIGKILL) == 0 && WIFSIGNALED(status_of(child)));
    CHECK(truncate("running", 0) == 0 && unlink("running") == 0);
    CHECK(mkdir("point", 0755) == 0);
    if (mount("none", "point", "tmpfs", 0, NULL) == 0) {
        CHECK(rmdir("point") < 0 && errno == EBUSY);
        CHECK(umount2("point", MNT_DETACH) == 0);
    } else {
        fprintf(stderr, "SKIPPED: nothing may be mounted\n");
    }
    CHECK(rmdir("point") == 0);
}

static void shared_maps_and_reads_agree(void) {
    char text[6] = {0};
    int fd = open("map", O_CREAT | O_RDWR, 0644);
    CHECK(ftruncate(fd, 8192) == 0);
    char *map = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(map != MAP_FAILED);
    strcpy(map, "first");
    pid_t child = fork();
    if (child == 0) {
        strcpy(map + 4096, "child");
        int again = open("map", O_RDONLY);
        if (pread(again, text, 5, 0) != 5 || strcmp(text, "first")) _exit(1);
        if (pread(again, text, 5, 4096) != 5 || strcmp(text, "child")) _exit(2);
        _exit(0);
    }
    CHECK(status_of(child) == 0);
    CHECK(!strcmp(map + 4096, "child"));
    CHECK(pread(fd, text, 5, 4096) == 5 && !strcmp(text, "child"));
    /* Opening a file that could be a program keeps the locks on it. */
    int tool = open("tool", O_CREAT | O_RDWR, 0755);
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    CHECK(fcntl(tool, F_SETLK, &whole) == 0);
    int second = open("tool", O_WRONLY | O_TRUNC);
    child = fork();
    if (child == 0) _exit(fcntl(tool, F_SETLK, &whole) == 0);
    CHECK(second >= 0 && status_of(child) == 0);
    /* What was written after a lock was taken is inside the file for a map. */
    int locked = open("locked", O_CREAT | O_RDWR, 0644);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 100, .l_len = 1};
    CHECK(fcntl(locked, F_SETLK, &lock) == 0);
    CHECK(pwrite(locked, "grown", 5, 4096) == 5);
    map = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, locked, 0);
    CHECK(map != MAP_FAILED && !strcmp(map + 4096, "grown"));
}

static void an_unlinked_file_lives_on_in_parent_and_child(void) {
    char text[9] = {0};
    int fd = open("unlinked", O_CREAT | O_RDWR, 0644);
    CHECK(write(fd, "keep", 4) == 4 && unlink("unlinked") == 0);
    pid_t child = fork();
    if (child == 0) _exit(!(pread(fd, text, 4, 0) == 4 && !strcmp(text, "keep")));
    CHECK(status_of(child) == 0);
    CHECK(write(fd, "more", 4) == 4);
    CHECK(pread(fd, text, 8, 0) == 8 && !strcmp(text, "keepmore"));
}

int main(void) {
    children_write_while_threads_do();
    thousands_of_descriptors_share_offsets_with_a_child();
    programs_write_behind_each_other();
    streams_read_what_they_wrote();
    trees_are_walked();
    descriptors_are_the_kernels_numbers();
    places_are_directories_to_start_from();
    handlers_write_while_the_program_writes();
    handlers_write_while_the_program_allocates();
    handlers_read_what_the_program_sends();
    what_runs_or_has_a_mount_on_it_is_busy();
    shared_maps_and_reads_agree();
    an_unlinked_file_lives_on_in_parent_and_child();
    if (failures == 0) puts("good");
    return failures != 0;
}
