/* Calls that are rare, and that earlier libraries of this kind got wrong, in the working directory: descriptors that travel, files without
 * names, programs that run, users that change, handlers amid `sendfile`. Run by tests/run.rs under `varve run`; says which line found something
 * else, and ends with 1 then. It must pass on every file system (one without `O_TMPFILE` may say so, unless the program is served). */
#define _GNU_SOURCE
#include "check.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <grp.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

#define FAILS(what, with) CHECK((what) < 0 && errno == (with))

static int is_served(void) { return getenv("VARVE_PRELOAD_MOUNT") != NULL; }

static void put_file(const char *name, const char *text) {
    int fd = open(name, O_CREAT | O_TRUNC | O_WRONLY, 0644);
    CHECK(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    CHECK(close(fd) == 0);
}

static int holds(const char *name, const char *text) {
    char found[256] = {0};
    int fd = open(name, O_RDONLY);
    ssize_t got = fd < 0 ? -1 : read(fd, found, sizeof found - 1);
    close(fd);
    return got == (ssize_t)strlen(text) && !strcmp(found, text);
}

static void the_lowest_free_number_is_given(void) {
    int ends[2], keep = dup(0), first = open("low", O_CREAT | O_RDWR, 0644);
    CHECK(write(first, "low", 3) == 3);
    CHECK(close(0) == 0 && open("low", O_RDONLY) == 0 && close(0) == 0);
    CHECK(open(".", O_RDONLY | O_DIRECTORY) == 0 && close(0) == 0);
    CHECK(open("low", O_RDONLY | O_CLOEXEC) == 0 && close(0) == 0);
    CHECK(open(".", O_PATH) == 0 && close(0) == 0);
    CHECK(dup(first) == 0 && close(0) == 0);
    CHECK(fcntl(first, F_DUPFD, 0) == 0 && close(0) == 0);
    FILE *stream = fopen("low", "r");
    CHECK(stream && fileno(stream) == 0 && fclose(stream) == 0);
    CHECK(pipe(ends) == 0 && ends[0] == 0 && close(ends[0]) == 0 && close(ends[1]) == 0);
    CHECK(dup2(keep, 0) == 0 && close(keep) == 0);
    int second = open("low", O_RDONLY), third = open("low", O_RDONLY);
    CHECK(second == keep && third > second);
    CHECK(close(second) == 0 && socket(AF_UNIX, SOCK_STREAM, 0) == second);
    CHECK(read(second, ends, 1) < 0 && errno != EBADF);
    CHECK(close(second) == 0 && fcntl(first, F_DUPFD, 100) == 100 && close(100) == 0);
    CHECK(close(third) == 0 && close(first) == 0);
}

/* Sends a descriptor, by `sendmsg` or `sendmmsg`. */
static void send_descriptor(int socket, int fd, int many) {
    char byte = 'x', control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec piece = {&byte, 1};
    struct mmsghdr message = {.msg_hdr = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control}};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message.msg_hdr);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    CHECK(many ? sendmmsg(socket, &message, 1, 0) == 1 : sendmsg(socket, &message.msg_hdr, 0) == 1);
}

static int receive_descriptor(int socket) {
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    int fd = -1;
    CHECK(recvmsg(socket, &message, 0) == 1);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header) memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
}

static void descriptors_travel_over_sockets(void) {
    for (int many = 0; many < 2; many++) {
        int pair[2];
        char text[8] = {0};
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
        pid_t child = fork();
        if (child == 0) {
            int fd = receive_descriptor(pair[1]);
            CHECK(fd >= 0 && lseek(fd, 0, SEEK_CUR) == 2);
            CHECK(write(fd, "cd", 2) == 2);
            _exit(failures != 0);
        }
        /* Opened after the fork: the child has it from the socket alone. */
        int fd = open("sent", O_CREAT | O_TRUNC | O_RDWR, 0644), own;
        CHECK(write(fd, "ab", 2) == 2);
        send_descriptor(pair[0], fd, many);
        CHECK(status_of(child) == 0);
        CHECK(write(fd, "ef", 2) == 2 && holds("sent", "abcdef"));
        /* To itself, as event loops do. */
        send_descriptor(pair[0], fd, many);
        CHECK((own = receive_descriptor(pair[1])) >= 0);
        CHECK(lseek(own, 1, SEEK_SET) == 1 && read(fd, text, 7) == 5 && !strcmp(text, "bcdef"));
        CHECK(pwrite(fd, "B", 1, 1) == 1 && pread(own, text, 2, 0) == 2 && text[1] == 'B');
        CHECK(close(own) == 0 && close(fd) == 0 && close(pair[0]) == 0 && close(pair[1]) == 0);
    }
}

static void epoll_refuses_files_and_directories(void) {
    struct epoll_event event = {.events = EPOLLIN};
    int set = epoll_create1(EPOLL_CLOEXEC), file = open("low", O_RDWR), dir = open(".", O_RDONLY), ends[2];
    FAILS(epoll_ctl(set, EPOLL_CTL_ADD, file, &event), EPERM);
    FAILS(epoll_ctl(set, EPOLL_CTL_ADD, dir, &event), EPERM);
    FAILS(epoll_ctl(set, EPOLL_CTL_DEL, file, NULL), EPERM);
    FAILS(epoll_ctl(1000, EPOLL_CTL_ADD, file, &event), EBADF);
    CHECK(write(file, "x", 1) == 1);
    CHECK(pipe(ends) == 0 && epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0);
    CHECK(write(ends[1], "x", 1) == 1 && epoll_wait(set, &event, 1, 1000) == 1);
    close(set), close(file), close(dir), close(ends[0]), close(ends[1]);
}

static int names_in(const char *path) {
    DIR *dir = opendir(path);
    int count = 0;
    while (readdir(dir)) count++;
    closedir(dir);
    return count - 2;
}

static void files_without_a_name_live_and_get_one(void) {
    char text[16] = {0}, path[64];
    struct stat stat_;
    mkdir("nameless", 0755);
    umask(027);
    int fd = open("nameless", O_TMPFILE | O_RDWR, 0666);
    umask(022);
    if (fd < 0 && errno == EOPNOTSUPP && !is_served()) return;
    CHECK(fd >= 0 && fstat(fd, &stat_) == 0 && stat_.st_nlink == 0 && stat_.st_mode == (S_IFREG | 0640));
    CHECK(write(fd, "hidden", 6) == 6 && pread(fd, text, 15, 0) == 6 && !strcmp(text, "hidden"));
    CHECK(names_in("nameless") == 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    CHECK(linkat(AT_FDCWD, path, AT_FDCWD, "nameless/found", AT_SYMLINK_FOLLOW) == 0);
    CHECK(holds("nameless/found", "hidden") && fstat(fd, &stat_) == 0 && stat_.st_nlink == 1);
    FAILS(linkat(AT_FDCWD, path, AT_FDCWD, "nameless/found", AT_SYMLINK_FOLLOW), EEXIST);
    CHECK(write(fd, "!", 1) == 1 && holds("nameless/found", "hidden!") && close(fd) == 0);
    CHECK(unlink("nameless/found") == 0);

    /* What the kernel must know of it: children, maps, locks, programs; its first name comes after that. */
    CHECK((fd = open("nameless", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)) >= 0);
    CHECK(ftruncate(fd, 8192) == 0 && pwrite(fd, "begin", 5, 0) == 5);
    char *map = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK(map != MAP_FAILED && !memcmp(map, "begin", 5));
    CHECK(flock(fd, LOCK_EX | LOCK_NB) == 0 && names_in("nameless") == 0);
    pid_t child = fork();
    if (child == 0) {
        CHECK(pread(fd, text, 5, 0) == 5 && !memcmp(text, "begin", 5));
        for (int i = 0; i < 100; i++) CHECK(pwrite(fd, "child", 5, 4096) == 5);
        _exit(failures != 0);
    }
    CHECK(status_of(child) == 0 && pread(fd, text, 5, 4096) == 5 && !memcmp(text, "child", 5));
    CHECK(pwrite(fd, "agree", 5, 0) == 5 && !memcmp(map, "agree", 5));
    CHECK(munmap(map, 8192) == 0 && names_in("nameless") == 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    CHECK(rename("nameless", "renamed") == 0);
    CHECK(linkat(AT_FDCWD, path, AT_FDCWD, "renamed/late", AT_SYMLINK_FOLLOW) == 0);
    CHECK(stat("renamed/late", &stat_) == 0 && stat_.st_size == 8192 && stat_.st_nlink == 1);
    CHECK(close(fd) == 0 && names_in("renamed") == 1 && unlink("renamed/late") == 0);

    /* A program writes into it; the directory was moved. */
    posix_spawn_file_actions_t actions;
    char *arguments[] = {"echo", "out", NULL};
    CHECK((fd = open("renamed", O_TMPFILE | O_RDWR, 0600)) >= 0 && rename("renamed", "nameless") == 0);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, 1);
    CHECK(posix_spawnp(&child, "echo", &actions, NULL, arguments, environ) == 0 && status_of(child) == 0);
    memset(text, 0, sizeof text);
    CHECK(pread(fd, text, 15, 0) == 4 && !strcmp(text, "out\n") && close(fd) == 0);

    /* One that never gets a name, appends, and is written by many. */
    CHECK((fd = open("nameless", O_TMPFILE | O_WRONLY | O_EXCL | O_APPEND, 0600)) >= 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    FAILS(linkat(AT_FDCWD, path, AT_FDCWD, "nameless/never", AT_SYMLINK_FOLLOW), ENOENT);
    CHECK(write(fd, "ab", 2) == 2 && pwrite(fd, "c", 1, 0) == 1 && fstat(fd, &stat_) == 0 && stat_.st_size == 3);
    FAILS(read(fd, text, 1), EBADF);
    CHECK(close(fd) == 0 && names_in("nameless") == 0);

    FAILS(open("nameless", O_TMPFILE | O_RDONLY, 0600), EINVAL);
    FAILS(open("none", O_TMPFILE | O_RDWR, 0600), ENOENT);
    FAILS(open("low", O_TMPFILE | O_RDWR, 0600), ENOTDIR);
    FILE *stream = tmpfile();
    CHECK(stream && fputs("x", stream) >= 0 && fclose(stream) == 0);
}

static void open_files_get_names_by_their_number(void) {
    char path[64];
    struct stat stat_;
    put_file("source", "text");
    int fd = open("source", O_RDONLY), dir = open(".", O_RDONLY);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    CHECK(linkat(AT_FDCWD, path, dir, "by-number", AT_SYMLINK_FOLLOW) == 0 && holds("by-number", "text"));
    CHECK(stat("source", &stat_) == 0 && stat_.st_nlink == 2);
    CHECK(unlink("source") == 0 && unlink("by-number") == 0);
    FAILS(linkat(AT_FDCWD, path, AT_FDCWD, "back", AT_SYMLINK_FOLLOW), ENOENT);
    CHECK(close(fd) == 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", dir);
    FAILS(linkat(AT_FDCWD, path, AT_FDCWD, "dir", AT_SYMLINK_FOLLOW), EPERM);
    CHECK(close(dir) == 0);
}

static void programs_that_run_are_not_written(void) {
    static char code[1 << 20];
    char *arguments[] = {"sleep", "100", NULL};
    ssize_t got;
    pid_t child;
    int from = open("/bin/sleep", O_RDONLY), to = open("program", O_CREAT | O_TRUNC | O_WRONLY, 0755);
    while ((got = read(from, code, sizeof code)) > 0) CHECK(write(to, code, got) == got);
    CHECK(close(from) == 0 && close(to) == 0);
    CHECK(posix_spawn(&child, "./program", NULL, NULL, arguments, environ) == 0);
    FAILS(open("program", O_WRONLY), ETXTBSY);
    FAILS(open("program", O_RDWR | O_TRUNC), ETXTBSY);
    FAILS(truncate("program", 1), ETXTBSY);
    CHECK(access("program", W_OK) == 0);
    /* A new one in its place, as installers do. */
    put_file("fresh", "#!/bin/sh\nexit 3\n");
    CHECK(chmod("fresh", 0755) == 0 && rename("fresh", "program") == 0);
    CHECK(kill(child, SIGKILL) == 0);
    status_of(child);
    CHECK(WEXITSTATUS(system("./program")) == 3);
    /* By its descriptor. */
    CHECK((to = open("program", O_RDONLY)) >= 0);
    if ((child = fork()) == 0) {
        fexecve(to, arguments, environ);
        _exit(1);
    }
    CHECK(WEXITSTATUS(status_of(child)) == 3 && close(to) == 0);
    CHECK((to = open("program", O_WRONLY)) >= 0 && close(to) == 0);
}

static int becomes(const char *program) {
    char *arguments[] = {(char *)program, NULL};
    execve(program, arguments, environ);
    return errno;
}

/* Opens it as `flags` say and becomes it, in a child. */
static int status_of_who_writes_and_becomes(const char *program, int flags) {
    pid_t child = fork();
    if (child == 0) _exit(open(program, flags) < 0 ? 1 : becomes(program));
    return WEXITSTATUS(status_of(child));
}

/* A child that becomes it when `go` can be read. */
static pid_t who_becomes_later(const char *program, int go[2]) {
    pid_t child;
    char byte;
    CHECK(pipe(go) == 0);
    if ((child = fork()) == 0) {
        close(go[1]);
        _exit(read(go[0], &byte, 1) == 1 ? becomes(program) : 1);
    }
    return child;
}

/* The kernel knows of programs that a served one has open for writing. */
static void programs_that_are_written_do_not_run(void) {
    char *arguments[] = {"written", NULL};
    int first_go[2], second_go[2], to;
    put_file("written", "#!/bin/sh\nexit 3\n");
    CHECK(chmod("written", 0755) == 0);
    /* From before the file is open: they do not have it. */
    pid_t child, first = who_becomes_later("written", first_go), second = who_becomes_later("written", second_go);
    CHECK((to = open("written", O_RDWR | O_CLOEXEC)) >= 0 && write(first_go[1], "x", 1) == 1);
    CHECK(WEXITSTATUS(status_of(first)) == ETXTBSY);
    CHECK(posix_spawn(&child, "./written", NULL, NULL, arguments, environ) == ETXTBSY);
    if ((child = fork()) == 0) _exit(becomes("written"));
    CHECK(WEXITSTATUS(status_of(child)) == ETXTBSY);
    CHECK(write(second_go[1], "x", 1) == 1 && WEXITSTATUS(status_of(second)) == ETXTBSY);
    CHECK(close(to) == 0 && WEXITSTATUS(system("./written")) == 3);
    for (int end = 0; end < 2; end++) close(first_go[end]), close(second_go[end]);
    CHECK(status_of_who_writes_and_becomes("written", O_WRONLY) == ETXTBSY);
    CHECK(status_of_who_writes_and_becomes("written", O_WRONLY | O_CLOEXEC) == ETXTBSY);
}

static void *idle(void *stop) {
    while (!__atomic_load_n((int *)stop, __ATOMIC_SEQ_CST)) usleep(1000);
    return NULL;
}

/* In a child. As another user one may do what that user may, and be root again. */
static void users_change(int with_threads) {
    enum { OTHER = 65534 };
    int stop = 0, fd = open("secret", O_RDONLY);
    pthread_t thread;
    struct stat stat_;
    char byte;
    if (with_threads) pthread_create(&thread, NULL, idle, &stop);
    CHECK(fd >= 0 && seteuid(OTHER) == 0);
    FAILS(open("secret", O_RDONLY), EACCES);
    FAILS(open("closed/new", O_CREAT | O_WRONLY, 0644), EACCES);
    FAILS(unlink("closed/there"), EACCES);
    FAILS(chmod("secret", 0777), EPERM);
    CHECK(read(fd, &byte, 1) == 1);
    int made = open("everybody/made", O_CREAT | O_TRUNC | O_WRONLY, 0644);
    CHECK(made >= 0 && write(made, "x", 1) == 1 && fstat(made, &stat_) == 0 && stat_.st_uid == OTHER);
    CHECK(close(made) == 0 && unlink("everybody/made") == 0);
    CHECK(seteuid(0) == 0);
    CHECK((made = open("secret", O_RDWR)) >= 0 && close(made) == 0);
    CHECK(setegid(OTHER) == 0 && (made = open("everybody/group", O_CREAT | O_WRONLY, 0644)) >= 0);
    CHECK(fstat(made, &stat_) == 0 && stat_.st_gid == OTHER && close(made) == 0 && setegid(0) == 0);
    CHECK(unlink("everybody/group") == 0);
    CHECK(setgroups(0, NULL) == 0 && setgid(OTHER) == 0 && setuid(OTHER) == 0);
    FAILS(open("secret", O_RDONLY), EACCES);
    FAILS(open("closed/new", O_CREAT | O_WRONLY, 0644), EACCES);
    CHECK(pread(fd, &byte, 1, 0) == 1);
    CHECK((made = open("everybody/own", O_CREAT | O_WRONLY, 0600)) >= 0 && write(made, "own", 3) == 3);
    CHECK(fstat(made, &stat_) == 0 && stat_.st_uid == OTHER && stat_.st_gid == OTHER && stat_.st_size == 3);
    CHECK(rename("everybody/own", "everybody/mine") == 0 && unlink("everybody/mine") == 0);
    stop = 1;
    _exit(failures != 0);
}

static void users_have_their_own_rights(void) {
    if (geteuid() != 0) return;
    put_file("secret", "s");
    CHECK(chmod("secret", 0600) == 0 && chmod(".", 0755) == 0);
    CHECK(mkdir("closed", 0755) == 0 && mkdir("everybody", 0755) == 0 && chmod("everybody", 01777) == 0);
    put_file("closed/there", "");
    for (int with_threads = 0; with_threads < 2; with_threads++) {
        pid_t child = fork();
        if (child == 0) users_change(with_threads);
        CHECK(status_of(child) == 0);
    }
}

static int handled;
static volatile sig_atomic_t hits;

static void on_alarm(int number) {
    (void)number;
    if (write(handled, "!", 1) != 1) _exit(99);
    hits++;
}

static void handlers_run_while_a_file_is_sent(void) {
    enum { BYTES = 8 << 20 };
    static unsigned char piece[1 << 16];
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    struct itimerval often = {{0, 2000}, {0, 2000}}, never = {{0, 0}, {0, 0}};
    struct stat stat_;
    int pair[2], file = open("large", O_CREAT | O_TRUNC | O_RDWR, 0644);
    handled = open("handled", O_CREAT | O_TRUNC | O_WRONLY | O_APPEND, 0644);
    for (int i = 0; i < BYTES / (int)sizeof piece; i++) {
        for (unsigned k = 0; k < sizeof piece; k++) piece[k] = (unsigned char)(k * 7 + i);
        CHECK(write(file, piece, sizeof piece) == sizeof piece);
    }
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && lseek(file, 0, SEEK_SET) == 0);
    pid_t child = fork();
    if (child == 0) {
        size_t all = 0;
        ssize_t got;
        close(pair[0]);
        /* Slowly, so that who sends must wait. */
        while ((got = read(pair[1], piece, sizeof piece)) > 0) {
            for (ssize_t k = 0; k < got; k++, all++)
                if (piece[k] != (unsigned char)((all % sizeof piece) * 7 + all / sizeof piece)) _exit(1);
            usleep(500);
        }
        _exit(all != BYTES);
    }
    close(pair[1]);
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    size_t sent = 0;
    while (sent < BYTES) {
        ssize_t got = sendfile(pair[0], file, NULL, BYTES - sent);
        if (got < 0 && errno == EINTR) continue;
        CHECK(got > 0);
        if (got <= 0) break;
        sent += got;
        CHECK(lseek(file, 0, SEEK_CUR) == (off_t)sent);
    }
    setitimer(ITIMER_REAL, &never, NULL);
    CHECK(close(pair[0]) == 0 && status_of(child) == 0);
    CHECK(hits > 0 && fstat(handled, &stat_) == 0 && stat_.st_size == hits);
    close(file), close(handled);
}

static void *write_and_leave(void *number) {
    char name[32], text[16];
    snprintf(name, sizeof name, "leaving%ld", (long)number % 8);
    int fd = open(name, O_CREAT | O_WRONLY | O_APPEND, 0644);
    int len = snprintf(text, sizeof text, "%06ld\n", (long)number);
    CHECK(write(fd, text, len) == len && close(fd) == 0);
    return NULL;
}

static void threads_leave_while_others_write(void) {
    enum { WAVES = 12, THREADS = 24 };
    pthread_t threads[THREADS];
    struct stat stat_;
    off_t all = 0;
    for (int wave = 0; wave < WAVES; wave++) {
        for (long i = 0; i < THREADS; i++)
            pthread_create(&threads[i], NULL, write_and_leave, (void *)(wave * (long)THREADS + i));
        for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    }
    for (int i = 0; i < 8; i++) {
        char name[32];
        snprintf(name, sizeof name, "leaving%d", i);
        CHECK(stat(name, &stat_) == 0);
        all += stat_.st_size;
    }
    CHECK(all == WAVES * THREADS * 7);
}

static void bytes_move_in_every_way(void) {
    char text[16] = {0}, other[16] = {0};
    struct iovec two[2] = {{"abc", 3}, {"def", 3}}, back[2] = {{text, 4}, {other, 4}};
    int ends[2], fd = open("ways", O_CREAT | O_TRUNC | O_RDWR, 0644), to = open("ways2", O_CREAT | O_TRUNC | O_RDWR, 0644);
    CHECK(writev(fd, two, 2) == 6 && pwritev(fd, two, 2, 6) == 6 && lseek(fd, 0, SEEK_CUR) == 6);
    CHECK(pwritev2(fd, two, 1, 12, RWF_DSYNC) == 3 && pwritev2(fd, two, 2, -1, 0) == 6);
    CHECK(lseek(fd, 0, SEEK_CUR) == 12 && lseek(fd, 0, SEEK_END) == 15);
    CHECK(pwritev2(fd, two, 1, 0, RWF_APPEND) == 3 && lseek(fd, 0, SEEK_END) == 18);
    CHECK(preadv(fd, back, 2, 1) == 8 && !memcmp(text, "bcde", 4) && !memcmp(other, "fabc", 4));
    CHECK(preadv2(fd, back, 1, 0, RWF_NOWAIT) == 4 || errno == EAGAIN || errno == EOPNOTSUPP);
    CHECK(lseek(fd, 0, SEEK_SET) == 0 && readv(fd, back, 2) == 8 && lseek(fd, 0, SEEK_CUR) == 8);
    CHECK(pipe(ends) == 0);
    off_t at = 3;
    CHECK(splice(fd, &at, ends[1], NULL, 3, 0) == 3 && at == 6 && read(ends[0], text, 16) == 3 && !memcmp(text, "def", 3));
    CHECK(write(ends[1], "piped", 5) == 5 && splice(ends[0], NULL, to, NULL, 5, 0) == 5 && holds("ways2", "piped"));
    CHECK(lseek(fd, 0, SEEK_SET) == 0 && lseek(to, 0, SEEK_END) == 5);
    CHECK(copy_file_range(fd, NULL, to, NULL, 6, 0) == 6 && holds("ways2", "pipedabcdef"));
    at = 0;
    CHECK(sendfile(to, fd, &at, 3) == 3 && holds("ways2", "pipedabcdefabc"));
    // An int leaves the other half of its register as it was.
    long stale = 0x5eed5eed00000000L;
    off_t from = 0, behind = 14;
    CHECK(syscall(SYS_copy_file_range, fd, &from, to, &behind, 2L, stale) == 2 && holds("ways2", "pipedabcdefabcab"));
    int moved = (int)syscall(SYS_fcntl, fd, (long)F_DUPFD, stale | 90);
    CHECK(moved >= 90 && moved < 100 && close(moved) == 0);
    struct pollfd polled = {fd, POLLIN, 0};
    CHECK(syscall(SYS_poll, &polled, stale | 1, 0L) == 1 && polled.revents == POLLIN);
    CHECK(syscall(SYS_ioctl, fd, stale | FIOCLEX, 0L) == 0 && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    CHECK(posix_fallocate(to, 0, 4096) == 0 && lseek(to, 0, SEEK_END) == 4096);
    CHECK(posix_fadvise(to, 0, 0, POSIX_FADV_DONTNEED) == 0 && sync_file_range(to, 0, 0, SYNC_FILE_RANGE_WRITE) == 0);
    close(fd), close(to), close(ends[0]), close(ends[1]);
}

static void files_are_sent_to_files(void) {
    char text[8] = {0};
    int ends[2], there = memfd_create("there", 0), to = open("sent", O_CREAT | O_TRUNC | O_RDWR, 0644);
    int only_write = open("sent", O_WRONLY), append = open("sent", O_WRONLY | O_APPEND), dir = open(".", O_RDONLY);
    int version = open("/proc/version", O_RDONLY);
    CHECK(write(there, "0123456789", 10) == 10 && lseek(there, 0, SEEK_SET) == 0);
    // By the offset of the source, which moves by what was sent; and of the target.
    CHECK(sendfile(to, there, NULL, 4) == 4 && lseek(there, 0, SEEK_CUR) == 4 && lseek(to, 0, SEEK_CUR) == 4);
    off_t at = 6;
    CHECK(sendfile(to, there, &at, 1 << 30) == 4 && at == 10 && lseek(there, 0, SEEK_CUR) == 4 && holds("sent", "01236789"));
    CHECK(sendfile(to, there, &at, 5) == 0 && sendfile(to, there, NULL, 0) == 0 && lseek(there, 0, SEEK_CUR) == 4);
    // From a served file to itself, through one description: what it reads is what it has written.
    at = 0;
    CHECK(sendfile(to, to, &at, 2) == 2 && at == 2 && holds("sent", "0123678901"));
    CHECK(pread(to, text, 4, 6) == 4 && !memcmp(text, "8901", 4));
    CHECK(version >= 0 && sendfile(to, version, NULL, 5) == 5 && holds("sent", "0123678901Linux"));
    // In the kernel's order.
    at = -1;
    CHECK(sendfile(to, there, &at, 1) == -1 && errno == EINVAL);
    CHECK(sendfile(to, -1, NULL, 1) == -1 && errno == EBADF);
    CHECK(sendfile(to, only_write, NULL, 1) == -1 && errno == EBADF);
    CHECK(sendfile(dir, there, NULL, 1) == -1 && errno == EBADF);
    CHECK(sendfile(append, there, NULL, 1) == -1 && errno == EINVAL);
    CHECK(sendfile(to, dir, NULL, 1) == -1 && errno == EINVAL);
    CHECK(pipe(ends) == 0 && write(ends[1], "x", 1) == 1);
    CHECK(sendfile(to, ends[0], NULL, 1) == -1 && errno == EINVAL);
    CHECK(sendfile(to, ends[0], &(off_t){0}, 1) == -1 && errno == ESPIPE);
    // The longest file that the program may make matters only where something is to be written.
    struct rlimit limit, now = {0};
    CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0 && signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    now = limit, now.rlim_cur = 17;
    CHECK(setrlimit(RLIMIT_FSIZE, &now) == 0 && lseek(to, 0, SEEK_CUR) == 15);
    CHECK(sendfile(to, there, &(off_t){0}, 10) == 2 && sendfile(to, there, &(off_t){10}, 10) == 0);
    CHECK(sendfile(to, there, &(off_t){0}, 10) == -1 && errno == EFBIG);
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0 && holds("sent", "0123678901Linux01"));
    close(there), close(to), close(only_write), close(append), close(dir), close(version), close(ends[0]), close(ends[1]);
}

static int by_name(const FTSENT **a, const FTSENT **b) { return strcmp((*a)->fts_name, (*b)->fts_name); }

static void names_are_found_in_every_way(void) {
    char path[PATH_MAX], template[] = "pathXXXXXX.c", dir_template[] = "dirXXXXXX";
    char *roots[] = {"forest", NULL};
    struct dirent **entries;
    struct statx statx_;
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {1000, 5}};
    int files = 0, dirs = 0;
    CHECK(mkdir("forest", 0755) == 0 && mkdir("forest/b", 0755) == 0);
    put_file("forest/a", "1");
    put_file("forest/b/c", "22");
    CHECK(symlink("b/c", "forest/link") == 0);
    CHECK(scandir("forest", &entries, NULL, alphasort) == 5 && !strcmp(entries[2]->d_name, "a"));
    FTS *walk = fts_open(roots, FTS_PHYSICAL, by_name);
    for (FTSENT *entry; (entry = fts_read(walk));) {
        files += entry->fts_info == FTS_F;
        dirs += entry->fts_info == FTS_D;
    }
    CHECK(fts_close(walk) == 0 && files == 2 && dirs == 2);
    CHECK(realpath("forest/link", path) && strstr(path, "/forest/b/c"));
    CHECK(statx(AT_FDCWD, "forest/link", 0, STATX_BASIC_STATS, &statx_) == 0 && statx_.stx_size == 2);
    CHECK(statx(AT_FDCWD, "forest/link", AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &statx_) == 0 && S_ISLNK(statx_.stx_mode));
    int fd = mkostemps(template, 2, O_CLOEXEC), dir;
    CHECK(fd >= 0 && fcntl(fd, F_GETFD) == FD_CLOEXEC && mkdtemp(dir_template));
    CHECK(futimens(fd, times) == 0 && fstat(fd, (struct stat *)path) == 0 && ((struct stat *)path)->st_mtim.tv_nsec == 5);
    CHECK((dir = open("forest", O_RDONLY | O_DIRECTORY)) >= 0 && faccessat(dir, "b/c", R_OK, AT_EACCESS) == 0);
    DIR *stream = fdopendir(dup(dir));
    CHECK(stream && readdir(stream) && closedir(stream) == 0);
    CHECK(renameat2(dir, "a", dir, "b/c", RENAME_EXCHANGE) == 0 && holds("forest/a", "22") && holds("forest/b/c", "1"));
    FAILS(renameat2(dir, "a", dir, "b/c", RENAME_NOREPLACE), EEXIST);
    CHECK(readlinkat(dir, "link", path, sizeof path) == 3);
    CHECK(fchdir(dir) == 0 && getcwd(path, sizeof path) && strstr(path, "/forest") && chdir("..") == 0);
    CHECK(creat("forest/b/new", 0600) >= 0 && truncate("forest/b/new", 5) == 0 && stat("forest/b/new", (struct stat *)path) == 0);
    FAILS(rmdir("forest/b"), ENOTEMPTY);
    FAILS(rename("forest", "forest/b/in"), EINVAL);
    FAILS(open("forest/a/x", O_RDONLY), ENOTDIR);
    close(fd), close(dir);
}

static void descriptors_end_with_the_program_if_they_say_so(void) {
    int kept = open("low", O_RDONLY), gone = open("low", O_RDONLY | O_CLOEXEC), soon = open("low", O_RDONLY);
    char script[128];
    CHECK(fcntl(soon, F_SETFD, FD_CLOEXEC) == 0);
    snprintf(script, sizeof script, "test -e /proc/self/fd/%d && ! test -e /proc/self/fd/%d && ! test -e /proc/self/fd/%d", kept, gone, soon);
    CHECK(system(script) == 0);
    close(kept), close(gone), close(soon);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    the_lowest_free_number_is_given();
    descriptors_travel_over_sockets();
    epoll_refuses_files_and_directories();
    files_without_a_name_live_and_get_one();
    open_files_get_names_by_their_number();
    programs_that_run_are_not_written();
    programs_that_are_written_do_not_run();
    users_have_their_own_rights();
    handlers_run_while_a_file_is_sent();
    threads_leave_while_others_write();
    bytes_move_in_every_way();
    files_are_sent_to_files();
    names_are_found_in_every_way();
    descriptors_end_with_the_program_if_they_say_so();
    if (failures == 0) puts("good");
    return failures != 0;
}
