/* Locks by varve.h and, in children, on the mount of the same pool: `locks POOL MOUNT`. Without a mount, `locks POOL`: there are none. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include <varve.h>

#define CHECK(what)                                                                   \
    do {                                                                              \
        if (!(what)) {                                                                \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, strerror(errno));   \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)

/* A call that must fail with this errno. */
#define FAILS(what, wanted)  \
    do {                     \
        errno = 0;           \
        CHECK((what) == -1 && errno == (wanted)); \
    } while (0)

static char path[4096];
static varve_fs *fs;

static struct flock range(int type, off_t start, off_t len)
{
    struct flock lock;

    memset(&lock, 0, sizeof lock);
    lock.l_type = (short)type;
    lock.l_whence = SEEK_SET;
    lock.l_start = start;
    lock.l_len = len;
    return lock;
}

static int take(int fd, int command, int type, off_t start, off_t len)
{
    struct flock lock = range(type, start, len);
    return varve_fcntl_lock(fs, fd, command, &lock);
}

static int plain_open(void)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    return fd;
}

/* A plain program that holds a lock until it is told to end, or for so long. */
struct holder {
    pid_t pid;
    int tell;
};

static struct holder hold(int command, off_t start, off_t len, int millis)
{
    struct holder holder;
    int there[2], end[2];
    char byte;

    CHECK(pipe(there) == 0 && pipe(end) == 0);
    CHECK((holder.pid = fork()) >= 0);
    if (holder.pid == 0) {
        struct flock lock = range(F_WRLCK, start, len);
        int fd = plain_open();

        close(end[1]);
        if (command == 0)
            CHECK(flock(fd, LOCK_EX) == 0);
        else
            CHECK(fcntl(fd, command, &lock) == 0);
        CHECK(write(there[1], "x", 1) == 1);
        if (millis > 0)
            usleep((useconds_t)millis * 1000);
        else
            CHECK(read(end[0], &byte, 1) == 0);
        CHECK(pwrite(fd, "child", 5, 0) == 5);
        _exit(0);
    }
    close(there[1]);
    close(end[0]);
    CHECK(read(there[0], &byte, 1) == 1);
    close(there[0]);
    holder.tell = end[1];
    return holder;
}

static void over(struct holder holder)
{
    int status;

    close(holder.tell);
    CHECK(waitpid(holder.pid, &status, 0) == holder.pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* What a plain program finds: 1 if `flock` would wait. */
static int is_locked(void)
{
    int status;
    pid_t pid = fork();

    CHECK(pid >= 0);
    if (pid == 0)
        _exit(flock(plain_open(), LOCK_EX | LOCK_NB) == 0 ? 0 : errno == EWOULDBLOCK ? 1 : 2);
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) < 2);
    return WEXITSTATUS(status);
}

/* What a plain program finds in the way of all of the file: nothing is 0, else whether it is this lock of this process. */
static int in_the_way(off_t start, off_t len)
{
    int status;
    pid_t own = getpid(), pid = fork();

    CHECK(pid >= 0);
    if (pid == 0) {
        struct flock lock = range(F_WRLCK, 0, 0);

        CHECK(fcntl(plain_open(), F_GETLK, &lock) == 0);
        if (lock.l_type == F_UNLCK)
            _exit(0);
        _exit(lock.l_pid == own && lock.l_start == start && lock.l_len == len ? 1 : 2);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) < 3);
    return WEXITSTATUS(status);
}

static void whole_files(int fd)
{
    char text[8] = "";
    struct holder holder;
    int other, copy;

    CHECK(varve_flock(fs, fd, LOCK_EX) == 0 && is_locked());
    CHECK(varve_flock(fs, fd, LOCK_UN) == 0 && !is_locked());
    /* Who waits sees what the holder wrote. */
    holder = hold(0, 0, 0, 200);
    FAILS(varve_flock(fs, fd, LOCK_EX | LOCK_NB), EWOULDBLOCK);
    CHECK(varve_flock(fs, fd, LOCK_EX) == 0);
    CHECK(varve_pread(fs, fd, text, 5, 0) == 5 && memcmp(text, "child", 5) == 0);
    over(holder);
    /* Descriptions keep each other out; copies of one are one, and the last that is closed lets go. */
    CHECK((other = varve_open(fs, "/locked", O_RDONLY, 0)) >= 0);
    FAILS(varve_flock(fs, other, LOCK_SH | LOCK_NB), EWOULDBLOCK);
    CHECK(varve_flock(fs, fd, LOCK_UN) == 0 && varve_flock(fs, other, LOCK_EX) == 0);
    CHECK((copy = varve_dup(fs, other)) >= 0 && varve_flock(fs, copy, LOCK_EX) == 0);
    CHECK(varve_close(fs, other) == 0 && is_locked());
    CHECK(varve_close(fs, copy) == 0 && !is_locked());
    FAILS(varve_flock(fs, copy, LOCK_EX), EBADF);
    FAILS(varve_flock(fs, fd, 99), EINVAL);
}

static void ranges(int fd)
{
    struct flock lock;
    struct holder holder;
    int other;

    CHECK(take(fd, F_SETLK, F_WRLCK, 10, 5) == 0 && in_the_way(10, 5) == 1);
    CHECK(take(fd, F_SETLK, F_UNLCK, 0, 0) == 0 && in_the_way(0, 0) == 0);
    holder = hold(F_SETLK, 20, 5, 0);
    FAILS(take(fd, F_SETLK, F_WRLCK, 22, 1), EAGAIN);
    lock = range(F_RDLCK, 0, 0);
    CHECK(varve_fcntl_lock(fs, fd, F_GETLK, &lock) == 0);
    CHECK(lock.l_type == F_WRLCK && lock.l_pid == holder.pid && lock.l_start == 20 && lock.l_len == 5);
    over(holder);
    lock = range(F_RDLCK, 3, 0);
    CHECK(varve_fcntl_lock(fs, fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK && lock.l_start == 3);
    /* As POSIX has it: any descriptor of the file that is closed takes the process' locks with it. */
    CHECK(take(fd, F_SETLK, F_WRLCK, 10, 5) == 0);
    CHECK((other = varve_open(fs, "/locked", O_RDONLY, 0)) >= 0 && in_the_way(10, 5) == 1);
    CHECK(take(other, F_SETLK, F_RDLCK, 30, 1) == 0);
    FAILS(take(other, F_SETLK, F_WRLCK, 30, 1), EBADF);
    CHECK(varve_close(fs, other) == 0 && in_the_way(0, 0) == 0);
    /* Those of the description stay. */
    CHECK(take(fd, F_OFD_SETLK, F_WRLCK, 10, 5) == 0);
    CHECK((other = varve_open(fs, "/locked", O_RDWR, 0)) >= 0);
    FAILS(take(other, F_OFD_SETLK, F_WRLCK, 14, 1), EAGAIN);
    CHECK(varve_close(fs, other) == 0 && in_the_way(0, 0) == 2);
    CHECK(take(fd, F_OFD_SETLK, F_UNLCK, 0, 0) == 0);
    lock = range(F_WRLCK, 0, 0);
    lock.l_pid = 1;
    FAILS(varve_fcntl_lock(fs, fd, F_OFD_SETLK, &lock), EINVAL);
    FAILS(varve_fcntl_lock(fs, fd, F_GETFL, &lock), EINVAL);
    FAILS(varve_fcntl_lock(fs, fd, F_SETLK, NULL), EFAULT);
    FAILS(varve_fcntl_lock(NULL, fd, F_SETLK, &lock), EINVAL);
}

static void rung(int number)
{
    (void)number;
}

/* A signal whose handler does not ask for the call to go on. */
static void signals(int fd)
{
    struct itimerval soon = {{0, 0}, {0, 100 * 1000}};
    struct sigaction action;
    struct holder holder = hold(F_SETLK, 0, 1, 0), whole = hold(0, 0, 0, 0);

    memset(&action, 0, sizeof action);
    action.sa_handler = rung;
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
    FAILS(varve_flock(fs, fd, LOCK_EX), EINTR);
    CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
    FAILS(take(fd, F_SETLKW, F_WRLCK, 0, 1), EINTR);
    /* The second child has the first one's pipe too. */
    over(whole);
    over(holder);
    CHECK(take(fd, F_SETLK, F_WRLCK, 0, 1) == 0 && take(fd, F_SETLK, F_UNLCK, 0, 1) == 0);
}

/* Each holds a byte and waits for the other's: one of them is told. */
static void deadlock(int fd)
{
    int there[2], status, here;
    char byte;
    pid_t pid;

    CHECK(pipe(there) == 0 && take(fd, F_SETLK, F_WRLCK, 1, 1) == 0);
    CHECK((pid = fork()) >= 0);
    if (pid == 0) {
        struct flock first = range(F_WRLCK, 0, 1), second = range(F_WRLCK, 1, 1);
        int own = plain_open();

        CHECK(fcntl(own, F_SETLK, &first) == 0 && write(there[1], "x", 1) == 1);
        _exit(fcntl(own, F_SETLKW, &second) == 0 ? 0 : errno == EDEADLK ? 1 : 2);
    }
    CHECK(read(there[0], &byte, 1) == 1);
    here = take(fd, F_SETLKW, F_WRLCK, 0, 1) == 0 ? 0 : errno == EDEADLK ? 1 : 2;
    CHECK(take(fd, F_SETLK, F_UNLCK, 0, 0) == 0);
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    CHECK(here + WEXITSTATUS(status) == 1);
    close(there[0]);
    close(there[1]);
}

/* A child that lives on does not keep what its parent closes, and takes nothing away when it ends. */
static void forks(int fd)
{
    int end[2], status, other;
    char byte;
    pid_t pid;

    CHECK((other = varve_open(fs, "/locked", O_RDWR, 0)) >= 0);
    CHECK(varve_flock(fs, other, LOCK_EX) == 0 && take(fd, F_SETLK, F_WRLCK, 10, 5) == 0);
    CHECK(pipe(end) == 0 && (pid = fork()) >= 0);
    if (pid == 0) {
        close(end[1]);
        _exit(read(end[0], &byte, 1) == 0 ? 0 : 1);
    }
    CHECK(is_locked() && in_the_way(10, 5) == 1);
    CHECK(varve_close(fs, other) == 0);
    CHECK(!is_locked() && in_the_way(0, 0) == 0);
    CHECK(varve_flock(fs, fd, LOCK_EX) == 0);
    close(end[1]);
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(is_locked() && varve_flock(fs, fd, LOCK_UN) == 0);
}

int main(int argc, char **argv)
{
    varve_dir *dir;
    int fd;

    CHECK(argc == 2 || argc == 3);
    CHECK((fs = varve_connect(argv[1], 0)) != NULL);
    CHECK((fd = varve_open(fs, "/locked", O_CREAT | O_RDWR, 0644)) >= 0);
    if (argc == 2) {
        FAILS(varve_flock(fs, fd, LOCK_EX), ENOLCK);
        FAILS(take(fd, F_SETLK, F_WRLCK, 0, 1), ENOLCK);
        CHECK(varve_disconnect(fs) == 0);
        return 0;
    }
    snprintf(path, sizeof path, "%s/locked", argv[2]);
    whole_files(fd);
    ranges(fd);
    signals(fd);
    deadlock(fd);
    forks(fd);
    /* The end of a connection, also while a directory is open. */
    CHECK(varve_flock(fs, fd, LOCK_EX) == 0 && take(fd, F_SETLK, F_WRLCK, 10, 5) == 0);
    CHECK(is_locked() && in_the_way(10, 5) == 1 && (dir = varve_opendir(fs, "/")) != NULL);
    CHECK(varve_disconnect(fs) == 0 && !is_locked() && in_the_way(0, 0) == 0);
    CHECK(varve_closedir(dir) == 0);
    return 0;
}
