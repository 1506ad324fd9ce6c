/* Pointers to memory that may not be touched, with and without a handler of the program's for faults, in the working directory. Run by tests/run/
 * under `varve run`; says which line found something else, and ends with 1 then. It must pass on every file system. */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define FAULTS(call) CHECK((call) == -1 && errno == EFAULT)

enum { PAGE = 4096, LARGE = 1 << 20 };

/* Of three pages the last is bad. */
static char *pages;
static char *bad;

static void map_pages(void) {
    pages = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bad = pages + 2 * PAGE;
    CHECK(mprotect(bad, PAGE, PROT_NONE) == 0);
    memset(pages, 'x', 2 * PAGE);
}

static off_t size_of(int fd) {
    struct stat now;
    return fstat(fd, &now) == 0 ? now.st_size : -1;
}

static void every_pointer_is_looked_at(void) {
    char path[32];
    int fd = open("file", O_CREAT | O_TRUNC | O_RDWR, 0644);
    struct iovec good_then_bad[2] = {{pages, 5}, {bad, 5}}, only_bad[2] = {{bad, 5}, {pages, 5}};
    CHECK(write(fd, "hello", 5) == 5);
    FAULTS(pread(fd, bad, 5, 0));
    FAULTS(pwrite(fd, bad, 5, 0));
    FAULTS(pwrite(fd, bad, LARGE, 0));
    FAULTS(pread(fd, (void *)(1UL << 63), 5, 0));
    FAULTS(pread(fd, (void *)-8L, 5, 0));
    FAULTS(preadv(fd, (struct iovec *)bad, 1, 0));
    FAULTS(preadv(fd, (struct iovec *)(bad - 8), 2, 0));
    FAULTS(preadv(fd, only_bad, 2, 0));
    FAULTS(pwritev(fd, only_bad, 2, 0));
    CHECK(size_of(fd) == 5 && pread(fd, path, 5, 0) == 5 && !memcmp(path, "hello", 5));
    FAULTS(stat("file", (struct stat *)bad));
    FAULTS(stat("file", (struct stat *)(bad - 8)));
    FAULTS(fstat(fd, (struct stat *)bad));
    FAULTS(open(bad, O_RDONLY));
    memcpy(bad - 4, "file", 4);
    FAULTS(open(bad - 4, O_RDONLY));
    bad[-4] = 'x';
    FAULTS(mkdir(bad, 0755));
    FAULTS(rename("file", bad));
    FAULTS(rename(bad, "file"));
    unlink("to");
    CHECK(symlink("file", "to") == 0);
    FAULTS(readlink("to", bad, 10));
    FAULTS(readlink("to", bad - 2, 10));
    FAULTS(utimensat(AT_FDCWD, "file", (struct timespec *)(bad - 16), 0));
    FAULTS(syscall(SYS_getcwd, bad, PAGE));
    FAULTS(syscall(SYS_fgetxattr, fd, bad, pages, 1));
    CHECK(lseek(fd, 0, SEEK_SET) == 0);
    FAULTS(read(fd, bad, 5));
    FAULTS(write(fd, bad, 5));
    CHECK(lseek(fd, 0, SEEK_CUR) == 0 && size_of(fd) == 5);
    /* As far as it goes. */
    CHECK(readv(fd, good_then_bad, 2) == 5 || lseek(fd, 0, SEEK_CUR) == 5);
    CHECK(pwritev(fd, good_then_bad, 2, 5) == 5 && size_of(fd) == 10);
    CHECK(pwrite(fd, pages, 3 * PAGE, 0) == 2 * PAGE && size_of(fd) == 2 * PAGE);
    CHECK(pwrite(fd, pages, 2 * PAGE, 2 * PAGE) == 2 * PAGE && pread(fd, pages + 100, 3 * PAGE, 0) == 2 * PAGE - 100);
    /* What is behind the end of the file is not touched. */
    CHECK(ftruncate(fd, PAGE) == 0 && pread(fd, pages, 3 * PAGE, 0) == PAGE && pread(fd, bad, 3 * PAGE, PAGE) == 0);
    close(fd);
}

static void memory_for_reading_takes_no_answers(void) {
    char *constant = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int fd = open("file", O_RDWR);
    FAULTS(pread(fd, constant, 10, 0));
    FAULTS(fstat(fd, (struct stat *)constant));
    CHECK(pwrite(fd, constant, 10, 0) == 10 && munmap(constant, PAGE) == 0);
    FAULTS(pwrite(fd, constant, 10, 0));
    close(fd);
}

/* The memory is there, and the file behind it is not: SIGBUS elsewhere. */
static void maps_behind_the_end_of_a_file_are_bad(void) {
    int fd = open("short", O_CREAT | O_RDWR | O_TRUNC, 0644), to = open("file", O_RDWR);
    CHECK(ftruncate(fd, 2 * PAGE) == 0);
    char *map = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(map != MAP_FAILED && ftruncate(fd, PAGE) == 0);
    FAULTS(pwrite(to, map + PAGE, 5, 0));
    FAULTS(pread(to, map + PAGE, 5, 0));
    FAULTS(open(map + PAGE, O_RDONLY));
    munmap(map, 2 * PAGE), close(fd), close(to);
}

static sigjmp_buf back;
static volatile sig_atomic_t hits;
static void *volatile hit_at;

static void on_fault(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    hits++;
    hit_at = info->si_addr;
    siglongjmp(back, 1);
}

static void a_handler_gets_its_own_faults_and_no_others(void) {
    struct sigaction mine = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK}, old;
    CHECK(sigaction(SIGSEGV, NULL, &old) == 0 && old.sa_handler == SIG_DFL);
    sigfillset(&mine.sa_mask);
    CHECK(sigaction(SIGSEGV, &mine, &old) == 0 && old.sa_handler == SIG_DFL && !(old.sa_flags & SA_SIGINFO));
    CHECK(sigaction(SIGSEGV, NULL, &old) == 0 && old.sa_sigaction == on_fault && sigismember(&old.sa_mask, SIGBUS) == 1);
    CHECK(old.sa_flags & SA_ONSTACK);
    for (int i = 0; i < 3; i++) {
        if (sigsetjmp(back, 1) == 0) *(volatile char *)bad = 1;
        FAULTS(open(bad, O_RDONLY));
    }
    CHECK(hits == 3 && hit_at == bad);
    CHECK(sigaction(SIGSEGV, &(struct sigaction){.sa_handler = SIG_DFL}, &old) == 0 && old.sa_sigaction == on_fault);
    every_pointer_is_looked_at();
}

static void on_other(int number) {
    (void)number;
    FAULTS(open(bad, O_RDONLY));
    hits++;
}

static void *blocked(void *nothing) {
    FAULTS(open(bad, O_RDONLY));
    return nothing;
}

/* Blocked for the program, also in handlers that block everything and in threads. */
static void blocked_signals_change_nothing(void) {
    sigset_t all, old;
    struct sigaction mine = {.sa_handler = on_other};
    pthread_t thread;
    sigfillset(&all), sigfillset(&mine.sa_mask);
    CHECK(sigprocmask(SIG_SETMASK, &all, &old) == 0 && sigismember(&old, SIGSEGV) == 0);
    every_pointer_is_looked_at();
    CHECK(sigprocmask(SIG_SETMASK, NULL, &all) == 0 && sigismember(&all, SIGSEGV) == 1 && sigismember(&all, SIGBUS) == 1);
    sigemptyset(&all), sigaddset(&all, SIGSEGV);
    CHECK(sigprocmask(SIG_UNBLOCK, &all, NULL) == 0 && sigprocmask(SIG_BLOCK, NULL, &all) == 0);
    CHECK(sigismember(&all, SIGSEGV) == 0 && sigismember(&all, SIGBUS) == 1);
    CHECK(pthread_create(&thread, NULL, blocked, NULL) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(sigprocmask(SIG_SETMASK, &old, NULL) == 0);
    hits = 0;
    CHECK(sigaction(SIGUSR1, &mine, NULL) == 0 && raise(SIGUSR1) == 0 && hits == 1);
}

static int ended_by(void (*what)(void)) {
    pid_t child = fork();
    if (child == 0) {
        what();
        _exit(0);
    }
    int status = status_of(child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void touch(void) { *(volatile char *)bad = 1; }
static void send_it(void) { raise(SIGSEGV); }
static void ignore_and_touch(void) { signal(SIGSEGV, SIG_IGN), touch(); }
static void ignore_and_send(void) { signal(SIGSEGV, SIG_IGN), send_it(); }
static void default_and_send(void) { signal(SIGBUS, SIG_DFL), raise(SIGBUS); }
static void open_and_touch(void) {
    FAULTS(open(bad, O_RDONLY));
    touch();
}

static void who_has_no_handler_ends_as_ever(void) {
    CHECK(ended_by(touch) == SIGSEGV && ended_by(send_it) == SIGSEGV && ended_by(open_and_touch) == SIGSEGV);
    CHECK(ended_by(ignore_and_touch) == SIGSEGV && ended_by(ignore_and_send) == 0 && ended_by(default_and_send) == SIGBUS);
}

static void messages_with_bad_parts_are_refused(void) {
    struct iovec part = {"x", 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = bad, .msg_controllen = 64};
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    FAULTS(sendmsg(pair[0], (struct msghdr *)bad, 0));
    FAULTS(sendmsg(pair[0], &message, 0));
    close(pair[0]), close(pair[1]);
}

int main(void) {
    map_pages();
    every_pointer_is_looked_at();
    memory_for_reading_takes_no_answers();
    maps_behind_the_end_of_a_file_are_bad();
    a_handler_gets_its_own_faults_and_no_others();
    blocked_signals_change_nothing();
    who_has_no_handler_ends_as_ever();
    messages_with_bad_parts_are_refused();
    if (failures == 0) puts("good");
    return failures != 0;
}
