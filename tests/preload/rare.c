/* Calls that programs seldom make and that must find a served file all the same, in the working directory: waiting for readiness, pipes, handles,
 * processes that share some things and others not, other roots and users. Run by tests/run.rs under `varve run`; says which line found something
 * else, and ends with 1 then. It must pass on every file system. What needs root is left out, and said, where it is somebody else's. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/fsuid.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOBODY = 65534, STACK = 1 << 18 };

#define FAILS(what, with) CHECK((what) < 0 && errno == (with))

static int made(const char *name, const char *text) {
    int fd = open(name, O_CREAT | O_TRUNC | O_RDWR, 0644);
    CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    return fd;
}

/* Whether what is behind the descriptor, from its start, is this text. */
static int holds(int fd, const char *text) {
    char found[64] = {0};
    ssize_t got = pread(fd, found, sizeof found - 1, 0);
    return got == (ssize_t)strlen(text) && !strcmp(found, text);
}

static void files_are_always_ready(void) {
    struct timespec at_once = {0, 0};
    struct timeval none = {0, 0};
    struct epoll_event event = {.events = EPOLLIN}, found;
    sigset_t mask;
    fd_set reads, writes;
    int file = made("ready", "x"), ends[2];
    CHECK(pipe(ends) == 0 && sigemptyset(&mask) == 0);
    FD_ZERO(&reads);
    FD_SET(file, &reads);
    FD_SET(ends[0], &reads);
    writes = reads;
    FD_CLR(ends[0], &writes);
    int most = (ends[1] > file ? ends[1] : file) + 1;
    CHECK(select(most, &reads, &writes, NULL, &none) == 2 && FD_ISSET(file, &reads) && FD_ISSET(file, &writes) && !FD_ISSET(ends[0], &reads));
    FD_SET(ends[0], &reads);
    CHECK(syscall(SYS_select, most, &reads, NULL, NULL, &none) == 1 && FD_ISSET(file, &reads));
    CHECK(pselect(most, &reads, &writes, NULL, &at_once, &mask) == 2);
    struct pollfd both[] = {{.fd = ends[0], .events = POLLIN}, {.fd = file, .events = POLLIN | POLLOUT}};
    CHECK(ppoll(both, 2, &at_once, &mask) == 1 && both[1].revents == (POLLIN | POLLOUT) && both[0].revents == 0);
    /* It is served still. */
    CHECK(write(file, "y", 1) == 1 && holds(file, "xy"));
    int set = epoll_create1(0);
    FAILS(epoll_ctl(set, EPOLL_CTL_ADD, file, &event), EPERM);
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0);
    CHECK(epoll_pwait(set, &found, 1, 0, &mask) == 0 && write(ends[1], "z", 1) == 1 && epoll_pwait(set, &found, 1, 1000, &mask) == 1);
    /* A number that is closed is none of the served file's. */
    CHECK(close(file) == 0);
    FD_ZERO(&reads);
    FD_SET(file, &reads);
    FAILS(select(most, &reads, NULL, NULL, &none), EBADF);
    close(set), close(ends[0]), close(ends[1]);
}

static void pipes_carry_files(void) {
    char text[16] = {0}, piece[] = "mapped";
    struct iovec memory = {piece, 6};
    int from[2], to[2], file = made("piped", "");
    CHECK(pipe(from) == 0 && pipe(to) == 0);
    FAILS(tee(file, to[1], 4, 0), EINVAL);
    FAILS(tee(from[0], file, 4, SPLICE_F_NONBLOCK), EINVAL);
    CHECK(write(from[1], "both", 4) == 4 && tee(from[0], to[1], 4, 0) == 4);
    CHECK(read(to[0], text, 4) == 4 && !memcmp(text, "both", 4));
    CHECK(splice(from[0], NULL, file, NULL, 4, 0) == 4 && holds(file, "both"));
    FAILS(vmsplice(file, &memory, 1, 0), EBADF);
    CHECK(vmsplice(from[1], &memory, 1, 0) == 6 && splice(from[0], NULL, file, NULL, 6, 0) == 6 && holds(file, "bothmapped"));
    CHECK(write(file, "!", 1) == 1 && holds(file, "bothmapped!") && lseek(file, 0, SEEK_CUR) == 11);
    close(from[0]), close(from[1]), close(to[0]), close(to[1]), close(file);
}

static void duplicates_say_whether_they_end_with_the_program(void) {
    int file = made("twice", "ab"), other = open("/dev/null", O_WRONLY), copy = dup3(file, other, O_CLOEXEC);
    CHECK(copy == other && fcntl(copy, F_GETFD) == FD_CLOEXEC && fcntl(file, F_GETFD) == 0);
    CHECK(write(copy, "cd", 2) == 2 && lseek(file, 0, SEEK_CUR) == 4 && holds(file, "abcd"));
    CHECK(dup3(file, copy, 0) == copy && fcntl(copy, F_GETFD) == 0);
    FAILS(dup3(file, file, 0), EINVAL);
    FAILS(dup3(file, copy, O_APPEND), EINVAL);
    FAILS(dup3(1000, copy, 0), EBADF);
    CHECK(write(copy, "e", 1) == 1);
    /* A file elsewhere takes the number. */
    other = open("/dev/null", O_RDWR);
    CHECK(dup3(other, copy, 0) == copy && read(copy, &other, 1) == 0 && holds(file, "abcde"));
    close(copy), close(other), close(file);
}

static int open2(int dir, const char *path, unsigned long flags, unsigned long resolve) {
    struct open_how how = {.flags = flags, .mode = flags & O_CREAT ? 0640 : 0, .resolve = resolve};
    return syscall(SYS_openat2, dir, path, &how, sizeof how);
}

static void files_are_opened_below_a_directory(void) {
    struct stat stat_;
    struct { struct open_how how; long more; } longer = {.how = {.flags = O_RDONLY}, .more = 1};
    CHECK(mkdir("below", 0755) == 0 && symlink("../ready", "below/out") == 0);
    int dir = open("below", O_RDONLY | O_DIRECTORY), file = open2(dir, "in", O_CREAT | O_RDWR, 0);
    CHECK(file >= 0 && write(file, "in", 2) == 2 && fstat(file, &stat_) == 0 && (stat_.st_mode & 0777) == 0640);
    int again = open2(dir, "in", O_RDONLY, RESOLVE_BENEATH);
    CHECK(again >= 0 && holds(again, "in") && close(again) == 0);
    FAILS(open2(dir, "../ready", O_RDONLY, RESOLVE_BENEATH), EXDEV);
    FAILS(open2(dir, "out", O_RDONLY, RESOLVE_BENEATH), EXDEV);
    FAILS(open2(dir, "out", O_RDONLY, RESOLVE_NO_SYMLINKS), ELOOP);
    again = open2(dir, "out", O_RDONLY, 0);
    CHECK(again >= 0 && holds(again, "xy") && close(again) == 0);
    again = open2(dir, "/in", O_RDONLY, RESOLVE_IN_ROOT);
    CHECK(again >= 0 && close(again) == 0);
    FAILS(open2(dir, "in", O_RDONLY | 1UL << 40, 0), EINVAL);
    FAILS(open2(dir, "in", O_RDONLY, 1UL << 40), EINVAL);
    FAILS(syscall(SYS_openat2, dir, "in", &longer, sizeof longer), E2BIG);
    FAILS(syscall(SYS_openat2, dir, "in", &longer, 8UL), EINVAL);
    close(file), close(dir);
}

static void handles_and_file_systems_are_the_same_by_every_way(void) {
    union { struct file_handle handle; char room[sizeof(struct file_handle) + MAX_HANDLE_SZ]; } by_name = {0}, by_number = {0};
    struct statfs a, b;
    int mount_a = -1, mount_b = -2, file = made("handled", "h"), dir = open(".", O_RDONLY | O_DIRECTORY);
    by_name.handle.handle_bytes = by_number.handle.handle_bytes = MAX_HANDLE_SZ;
    int first = name_to_handle_at(AT_FDCWD, "handled", &by_name.handle, &mount_a, 0), why = errno;
    int second = name_to_handle_at(file, "", &by_number.handle, &mount_b, AT_EMPTY_PATH);
    CHECK(first == second && (first == 0 || (errno == why && why == EOPNOTSUPP)));
    CHECK(first != 0 || (mount_a == mount_b && !memcmp(&by_name, &by_number, sizeof by_name)));
    CHECK(name_to_handle_at(dir, "handled", &by_name.handle, &mount_a, 0) == first);
    CHECK(statfs("handled", &a) == 0 && fstatfs(file, &b) == 0);
    CHECK(a.f_type == b.f_type && a.f_bsize == b.f_bsize && a.f_namelen == 255 && b.f_namelen == 255 && a.f_blocks == b.f_blocks && a.f_blocks > 0);
    CHECK(fstatfs(dir, &b) == 0 && a.f_type == b.f_type && holds(file, "h"));
    close(file), close(dir);
    FAILS(fstatfs(file, &b), EBADF);
}

static int shared_fd;

/* In a child on a stack of its own. */
static int writes_on(void *name) {
    char byte;
    int fd = open(name, O_CREAT | O_RDWR, 0644);
    if (write(shared_fd, "child", 5) != 5 || fd < 0 || write(fd, "own", 3) != 3 || pread(shared_fd, &byte, 1, 0) != 1 || byte != 'p') return 1;
    return rename(name, "of-a-stack") != 0;
}

static int closes(void *nothing) {
    (void)nothing;
    return close(shared_fd) != 0;
}

static int goes_below(void *nothing) {
    (void)nothing;
    return chdir("below") != 0;
}

static pid_t on_a_stack(int (*start)(void *), int flags, void *argument) {
    static char stack[STACK] __attribute__((aligned(64)));
    return clone(start, stack + STACK, flags | SIGCHLD, argument);
}

static void children_on_stacks_of_their_own_go_on(void) {
    char text[16] = {0};
    shared_fd = made("stacks", "parent,");
    pid_t child = on_a_stack(writes_on, 0, "first-name");
    CHECK(status_of(child) == 0 && write(shared_fd, ",on", 3) == 3 && holds(shared_fd, "parent,child,on"));
    int fd = open("of-a-stack", O_RDONLY);
    CHECK(read(fd, text, 15) == 3 && !strcmp(text, "own") && close(fd) == 0 && unlink("of-a-stack") == 0);
    for (int i = 0; i < 50; i++) CHECK(pwrite(shared_fd, "P", 1, 0) == 1);
    CHECK(pread(shared_fd, text, 1, 0) == 1 && text[0] == 'P' && close(shared_fd) == 0);
}

/* Each in a process of its own, since nothing of what it does later may be served. */
static void in_a_child(void (*act)(void)) {
    pid_t child = fork();
    if (child == 0) {
        act();
        _exit(failures != 0);
    }
    CHECK(status_of(child) == 0);
}

static void descriptors_are_shared_with_a_process(void) {
    shared_fd = made("shared", "s");
    CHECK(status_of(on_a_stack(closes, CLONE_FILES, NULL)) == 0);
    FAILS(write(shared_fd, "x", 1), EBADF);
    CHECK(open("/dev/null", O_RDWR) == shared_fd && write(shared_fd, "x", 1) == 1 && close(shared_fd) == 0);
    CHECK((shared_fd = open("shared", O_RDONLY)) >= 0 && holds(shared_fd, "s"));
}

static void directory_is_shared_with_a_process(void) {
    int fd = open("ready", O_RDONLY);
    CHECK(fd >= 0 && status_of(on_a_stack(goes_below, CLONE_FS, NULL)) == 0);
    CHECK(access("in", F_OK) == 0 && access("ready", F_OK) < 0 && holds(fd, "xy"));
}

static void *leaves_the_others(void *nothing) {
    CHECK(unshare(CLONE_FILES) == 0);
    CHECK(write(shared_fd, "thread", 6) == 6 && close(shared_fd) == 0);
    FAILS(write(shared_fd, "x", 1), EBADF);
    int fd = open("own", O_CREAT | O_RDWR, 0644);
    CHECK(fd == shared_fd && write(fd, "own", 3) == 3 && holds(fd, "own"));
    return nothing;
}

static void descriptors_are_a_threads_own(void) {
    pthread_t thread;
    shared_fd = made("all", "begin,");
    CHECK(pthread_create(&thread, NULL, leaves_the_others, NULL) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(write(shared_fd, ",end", 4) == 4 && holds(shared_fd, "begin,thread,end"));
    int fd = open("own", O_RDONLY);
    CHECK(fd >= 0 && holds(fd, "own"));
}

static void root_is_another_directory(void) {
    char here[PATH_MAX];
    CHECK(getcwd(here, sizeof here) != NULL);
    int before = open("below/in", O_RDWR);
    CHECK(chroot("below") == 0 && chdir("/") == 0);
    FAILS(access(here, F_OK), ENOENT);
    int fd = open("/in", O_RDWR);
    CHECK(fd >= 0 && holds(fd, "in") && write(fd, "IN", 2) == 2 && holds(before, "IN"));
    FAILS(open("/out", O_RDONLY), ENOENT);
    CHECK(mkdir("/new", 0755) == 0 && rmdir("/../new") == 0 && pwrite(before, "in", 2, 0) == 2 && holds(fd, "in"));
}

static void owner_is(const char *name, uid_t uid) {
    struct stat stat_;
    CHECK(stat(name, &stat_) == 0 && stat_.st_uid == uid && unlink(name) == 0);
}

static void rights_are_anothers_for_a_while(void) {
    CHECK(mkdir("everybody", 0755) == 0 && chmod("everybody", 0777) == 0 && chmod(".", 0755) == 0);
    int secret = made("secret", "secret");
    CHECK(fchmod(secret, 0600) == 0);
    for (int by_files = 0; by_files < 2; by_files++) {
        CHECK(by_files ? setfsuid(NOBODY) == 0 : setresuid(-1, NOBODY, -1) == 0);
        FAILS(open("secret", O_RDONLY), EACCES);
        FAILS(unlink("secret"), EACCES);
        int fd = open("everybody/made", O_CREAT | O_RDWR, 0600);
        CHECK(fd >= 0 && write(fd, "m", 1) == 1 && holds(fd, "m") && holds(secret, "secret"));
        /* What was opened before goes to children as it was, whatever they could open now. */
        pid_t child = fork();
        if (child == 0) _exit(!holds(secret, "secret") || !holds(fd, "m"));
        CHECK(status_of(child) == 0 && close(fd) == 0);
        CHECK(by_files ? setfsuid(0) == NOBODY : setresuid(-1, 0, -1) == 0);
        owner_is("everybody/made", NOBODY);
        CHECK((fd = open("secret", O_RDWR)) >= 0 && close(fd) == 0 && close(made("of-root", "")) == 0);
        owner_is("of-root", 0);
    }
    /* Descriptors that the kernel did not know before. */
    CHECK(close(secret) == 0 && (secret = open("secret", O_RDWR)) >= 0);
    for (int by_files = 0; by_files < 2; by_files++) {
        CHECK(close(secret) == 0 && (secret = open("secret", O_RDWR)) >= 0);
        CHECK(by_files ? setfsuid(NOBODY) == 0 : seteuid(NOBODY) == 0);
        pid_t child = fork();
        if (child == 0) _exit(!holds(secret, "secret"));
        CHECK(status_of(child) == 0 && holds(secret, "secret"));
        CHECK(by_files ? setfsuid(0) == NOBODY : seteuid(0) == 0);
    }
    close(secret);
    CHECK(setresgid(NOBODY, NOBODY, NOBODY) == 0 && setresuid(NOBODY, NOBODY, NOBODY) == 0);
    FAILS(open("secret", O_RDONLY), EACCES);
    FAILS(setresuid(0, 0, 0), EPERM);
    int fd = open("everybody/last", O_CREAT | O_RDWR, 0600);
    CHECK(fd >= 0 && write(fd, "m", 1) == 1 && holds(fd, "m"));
}

int main(void) {
    umask(022);
    files_are_always_ready();
    pipes_carry_files();
    duplicates_say_whether_they_end_with_the_program();
    files_are_opened_below_a_directory();
    handles_and_file_systems_are_the_same_by_every_way();
    children_on_stacks_of_their_own_go_on();
    in_a_child(descriptors_are_shared_with_a_process);
    in_a_child(directory_is_shared_with_a_process);
    in_a_child(descriptors_are_a_threads_own);
    if (geteuid() == 0) {
        in_a_child(root_is_another_directory);
        in_a_child(rights_are_anothers_for_a_while);
    } else {
        fprintf(stderr, "SKIPPED: other roots and users are root's\n");
    }
    if (failures == 0) puts("good");
    return failures != 0;
}
