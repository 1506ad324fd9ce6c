/* What distributions' compilers make of file calls (`-O2 -D_FORTIFY_SOURCE=2`): lengths and flags that are known only when the program runs go
 * through the C library's checking variants (`__read_chk`, `__open_2`, …), in the working directory. Run by tests/run.rs under `varve run`, which
 * looks whether they are called at all; says which line found something else, and ends with 1 then. It must pass on every file system. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <unistd.h>

/* A number that the compiler does not know. */
static size_t some(size_t number) {
    __asm__("" : "+r"(number));
    return number;
}

static void files_are_opened_and_read(void) {
    char text[32] = {0};
    int dir = open(".", some(O_RDONLY | O_DIRECTORY)), fd = openat(dir, "file", O_CREAT | O_RDWR, 0644);
    CHECK(dir >= 0 && fd >= 0 && write(fd, "fortified text", 14) == 14 && close(fd) == 0);
    CHECK((fd = open("file", some(O_RDONLY))) >= 0 && read(fd, text, some(9)) == 9 && !strcmp(text, "fortified"));
    CHECK(pread(fd, text, some(4), some(10)) == 4 && !memcmp(text, "text", 4));
    CHECK(pread64(fd, text, some(31), 0) == 14 && lseek(fd, 0, SEEK_CUR) == 9 && close(fd) == 0);
    CHECK((fd = open64("file", some(O_RDWR))) >= 0 && read(fd, text, some(1)) == 1 && close(fd) == 0);
    CHECK((fd = openat(dir, "file", some(O_RDONLY))) >= 0 && read(fd, text, some(1)) == 1 && text[0] == 'f' && close(fd) == 0);
    CHECK((fd = openat64(dir, "file", some(O_RDONLY))) >= 0);
    struct pollfd ready[2] = {{.fd = fd, .events = POLLIN}};
    struct timespec at_once = {0, 0};
    CHECK(poll(ready, some(1), 0) == 1 && ppoll(ready, some(1), &at_once, NULL) == 1);
    fd_set set;
    struct timeval none = {0, 0};
    FD_ZERO(&set);
    FD_SET(some(fd), &set);
    CHECK(select(fd + 1, &set, NULL, NULL, &none) == 1 && close(fd) == 0 && close(dir) == 0);
}

static void names_are_read(void) {
    char path[PATH_MAX], here[PATH_MAX];
    int dir = open(".", O_RDONLY);
    CHECK(symlink("file", "link") == 0);
    CHECK(readlink("link", path, some(PATH_MAX)) == 4 && !memcmp(path, "file", 4));
    CHECK(readlinkat(dir, "link", path, some(PATH_MAX)) == 4 && !memcmp(path, "file", 4));
    CHECK(getcwd(here, some(PATH_MAX)) && realpath("link", path) && !strncmp(path, here, strlen(here)) && !strcmp(path + strlen(here), "/file"));
    CHECK(mkdir("inner", 0755) == 0 && chdir("inner") == 0 && getcwd(path, some(PATH_MAX)) && !strcmp(path + strlen(here), "/inner"));
    CHECK(realpath("../link", path) && !strcmp(path + strlen(here), "/file") && chdir("..") == 0 && close(dir) == 0);
}

static void streams_are_read(void) {
    char text[32] = {0};
    FILE *stream = fopen("stream", "w+");
    CHECK(stream && fprintf(stream, "%s %zu\n", "line", some(1)) == 7 && fputs("second\n", stream) >= 0 && fflush(stream) == 0);
    rewind(stream);
    CHECK(fgets(text, some(32), stream) && !strcmp(text, "line 1\n"));
    CHECK(fread(text, 1, some(7), stream) == 7 && !memcmp(text, "second\n", 7) && fclose(stream) == 0);
    stream = fopen("stream", "r");
    CHECK(fread_unlocked(text, 1, some(4), stream) == 4 && fgets_unlocked(text, some(32), stream) && !strcmp(text, " 1\n") && fclose(stream) == 0);
}

int main(void) {
    files_are_opened_and_read();
    names_are_read();
    streams_are_read();
    if (failures == 0) puts("good");
    return failures != 0;
}
