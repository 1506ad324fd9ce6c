/* Open files across fork, spawn and exec, in the working directory: offsets are shared, and nobody loses what another wrote. Run by
 * tests/run.rs under `varve run`, where nearly all of it must be served in-process; it must pass on every file system. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
enum { TURNS = 400, RECORD = 8 };

static void put(int fd, char who, int count) {
    char record[RECORD + 1];
    for (int i = 0; i < count; i++) {
        snprintf(record, sizeof record, "%c%06d\n", who, i);
        CHECK(write(fd, record, RECORD) == RECORD);
    }
}

/* How many records of `who` the file holds, in their order; -1 if something else is in it. */
static int count_of(const char *name, char who) {
    char record[RECORD + 1] = {0};
    int count = 0, fd = open(name, O_RDONLY);
    ssize_t got;
    while ((got = read(fd, record, RECORD)) == RECORD) {
        if (record[RECORD - 1] != '\n' || record[0] < 'a' || record[0] > 'z') return -1;
        if (record[0] == who && atoi(record + 1) != count++) return -1;
    }
    close(fd);
    return got == 0 ? count : -1;
}

static void parents_go_on_after_children_that_touch_nothing(void) {
    char *arguments[] = {"true", NULL};
    pid_t child;
    int fd = open("alone", O_CREAT | O_RDWR | O_TRUNC | O_CLOEXEC, 0644);
    put(fd, 'a', 1);
    if ((child = fork()) == 0) _exit(0);
    CHECK(status_of(child) == 0);
    put(fd, 'b', TURNS);
    if ((child = fork()) == 0) {
        execvp("true", arguments);
        _exit(1);
    }
    CHECK(status_of(child) == 0);
    put(fd, 'c', TURNS);
    CHECK(posix_spawnp(&child, "true", NULL, NULL, arguments, environ) == 0);
    CHECK(status_of(child) == 0);
    put(fd, 'd', TURNS);
    CHECK(lseek(fd, 0, SEEK_CUR) == (3 * TURNS + 1) * RECORD);
    close(fd);
    CHECK(count_of("alone", 'b') == TURNS && count_of("alone", 'c') == TURNS && count_of("alone", 'd') == TURNS);
}

static void both_write_at_one_offset(int flags, const char *name) {
    pid_t child, grandchild;
    int fd = open(name, O_CREAT | O_RDWR | O_TRUNC | flags, 0644);
    put(fd, 'x', 1);
    if ((child = fork()) == 0) {
        if ((grandchild = fork()) == 0) {
            put(dup(fd), 'g', TURNS);
            _exit(failures != 0);
        }
        put(fd, 'c', TURNS);
        CHECK(status_of(grandchild) == 0);
        _exit(failures != 0);
    }
    put(fd, 'p', TURNS);
    CHECK(status_of(child) == 0);
    CHECK(lseek(fd, 0, SEEK_CUR) == (3 * TURNS + 1) * RECORD);
    put(fd, 'q', TURNS);
    close(fd);
    CHECK(count_of(name, 'p') == TURNS && count_of(name, 'c') == TURNS && count_of(name, 'g') == TURNS);
    CHECK(count_of(name, 'q') == TURNS);
}

static void what_is_read_is_read_once(void) {
    int *seen = mmap(NULL, TURNS * sizeof *seen, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char record[RECORD];
    pid_t child;
    int fd = open("once", O_CREAT | O_RDWR | O_TRUNC, 0644);
    put(fd, 'r', TURNS);
    CHECK(lseek(fd, 0, SEEK_SET) == 0);
    child = fork();
    while (read(fd, record, RECORD) == RECORD) __atomic_add_fetch(&seen[atoi(record + 1)], 1, __ATOMIC_SEQ_CST);
    if (child == 0) _exit(0);
    CHECK(status_of(child) == 0);
    for (int i = 0; i < TURNS; i++) CHECK(seen[i] == 1);
    close(fd);
}

static void a_child_moves_the_offset_and_changes_flags(void) {
    char text[8] = {0};
    pid_t child;
    int fd = open("moved", O_CREAT | O_RDWR | O_TRUNC, 0644), two = dup(fd);
    CHECK(write(fd, "0123456789", 10) == 10);
    if ((child = fork()) == 0) {
        CHECK(lseek(two, 3, SEEK_SET) == 3);
        CHECK(read(fd, text, 2) == 2 && !memcmp(text, "34", 2));
        _exit(failures != 0);
    }
    CHECK(status_of(child) == 0);
    CHECK(read(two, text, 2) == 2 && !memcmp(text, "56", 2));
    if ((child = fork()) == 0) _exit(fcntl(fd, F_SETFL, O_APPEND) != 0);
    CHECK(status_of(child) == 0);
    CHECK(lseek(fd, 1, SEEK_SET) == 1);
    CHECK(write(fd, "end", 3) == 3);
    CHECK(pread(fd, text, 3, 10) == 3 && !memcmp(text, "end", 3));
    CHECK(fcntl(fd, F_GETFL) & O_APPEND);
    close(fd);
    close(two);
}

static void a_child_that_is_killed_stops_nobody(void) {
    struct stat stat_;
    pid_t child;
    int fd = open("killed", O_CREAT | O_RDWR | O_TRUNC | O_CLOEXEC, 0644);
    if ((child = fork()) == 0)
        for (;;) put(fd, 'k', 1);
    while (fstat(fd, &stat_) == 0 && stat_.st_size < 20 * RECORD) usleep(100);
    kill(child, SIGKILL);
    /* Not waited for yet: it is a zombie, and may have died with the lock. */
    put(fd, 'l', 50);
    CHECK(WIFSIGNALED(status_of(child)));
    put(fd, 'm', 50);
    close(fd);
    CHECK(count_of("killed", 'l') == 50 && count_of("killed", 'm') == 50);
}

static void programs_write_behind_parents_and_parents_behind_programs(void) {
    char text[64] = {0}, command[64];
    int fd = open("behind", O_CREAT | O_RDWR | O_TRUNC, 0644);
    int log = open("log", O_CREAT | O_WRONLY | O_TRUNC | O_APPEND, 0644);
    CHECK(write(fd, "1\n", 2) == 2 && write(log, "a\n", 2) == 2);
    snprintf(command, sizeof command, "echo 2 >&%d; echo b >&%d", fd, log);
    CHECK(system(command) == 0);
    CHECK(write(fd, "3\n", 2) == 2 && write(log, "c\n", 2) == 2);
    CHECK(system(command) == 0);
    pid_t child = vfork();
    if (child == 0) {
        if (write(fd, "4\n", 2) != 2) _exit(1);
        _exit(0);
    }
    CHECK(status_of(child) == 0);
    CHECK(write(fd, "5\n", 2) == 2 && write(log, "d\n", 2) == 2);
    CHECK(pread(fd, text, 63, 0) == 12 && !strcmp(text, "1\n2\n3\n2\n4\n5\n"));
    CHECK(lseek(fd, 0, SEEK_CUR) == 12);
    memset(text, 0, sizeof text);
    int back = open("log", O_RDONLY);
    CHECK(read(back, text, 63) == 10 && !strcmp(text, "a\nb\nc\nb\nd\n"));
    close(back);
    close(fd);
    close(log);
}

static void a_program_that_is_not_there_changes_nothing(void) {
    pid_t child;
    int fd = open("failed", O_CREAT | O_RDWR | O_TRUNC | O_CLOEXEC, 0644);
    int script = open("script", O_CREAT | O_WRONLY | O_TRUNC, 0755);
    CHECK(write(script, "neither a program nor a script", 30) == 30 && close(script) == 0);
    put(fd, 'p', 1);
    if ((child = fork()) == 0) {
        char *arguments[] = {"none", NULL};
        execv("/nonexistent/none", arguments);
        execv("./script", arguments);
        put(fd, 'c', 10);
        _exit(failures != 0);
    }
    CHECK(status_of(child) == 0);
    put(fd, 'q', 10);
    close(fd);
    CHECK(count_of("failed", 'c') == 10 && count_of("failed", 'q') == 10);
}

int main(void) {
    parents_go_on_after_children_that_touch_nothing();
    both_write_at_one_offset(0, "both");
    both_write_at_one_offset(O_APPEND, "appended");
    what_is_read_is_read_once();
    a_child_moves_the_offset_and_changes_flags();
    a_child_that_is_killed_stops_nobody();
    programs_write_behind_parents_and_parents_behind_programs();
    a_program_that_is_not_there_changes_nothing();
    if (failures == 0) puts("good");
    return failures != 0;
}
