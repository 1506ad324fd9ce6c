/* Does what makes events in the working directory, step by step as it is told; `..` is a directory that nobody watches. Answers "done". */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <dirent.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/xattr.h>

static int early = -1;

static void files(void) {
    char buffer[16];
    int fd = open("a", O_CREAT | O_RDWR | O_TRUNC, 0644);
    CHECK(fd >= 0 && write(fd, "hello", 5) == 5 && pwrite(fd, "J", 1, 0) == 1);
    CHECK(ftruncate(fd, 3) == 0 && fchmod(fd, 0600) == 0 && pread(fd, buffer, 16, 0) == 3);
    CHECK(lseek(fd, 0, SEEK_CUR) == 5 && close(fd) == 0);
    fd = open("a", O_RDONLY);
    CHECK(fd >= 0 && read(fd, buffer, 16) == 3 && !memcmp(buffer, "Jel", 3) && close(fd) == 0);
    fd = open("a", O_WRONLY | O_APPEND);
    CHECK(fd >= 0 && write(fd, "more", 4) == 4 && close(fd) == 0);
    CHECK(truncate("a", 1) == 0 && chmod("a", 0644) == 0 && utimes("a", NULL) == 0);
    CHECK(setxattr("a", "user.x", "y", 1, 0) == 0 && removexattr("a", "user.x") == 0);
    struct stat found;
    CHECK(stat("a", &found) == 0 && found.st_size == 1 && access("a", R_OK) == 0);
}

static void names(void) {
    CHECK(rename("a", "b") == 0 && rename("b", "../b") == 0 && rename("../b", "c") == 0);
    CHECK(link("c", "d") == 0 && symlink("c", "s") == 0 && unlink("d") == 0 && unlink("s") == 0);
    CHECK(mkdir("m", 0755) == 0 && rename("m", "n") == 0 && rmdir("n") == 0 && mkfifo("f", 0644) == 0 && unlink("f") == 0);
    DIR *dir = opendir(".");
    CHECK(dir != NULL);
    while (readdir(dir)) {
    }
    CHECK(closedir(dir) == 0 && unlink("c") == 0);
    CHECK(open("missing", O_RDONLY) < 0 && errno == ENOENT);
}

static void elsewhere(void) {
    for (int i = 0; i < 100; i++) {
        int fd = open("../quiet", O_CREAT | O_WRONLY, 0644);
        CHECK(fd >= 0 && write(fd, "x", 1) == 1 && close(fd) == 0);
    }
    CHECK(unlink("../quiet") == 0);
}

int main(void) {
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        if (!strcmp(line, "early\n")) {
            early = open("e", O_CREAT | O_WRONLY, 0644);
            CHECK(early >= 0 && write(early, "1", 1) == 1);
        } else if (!strcmp(line, "probe\n")) {
            CHECK(mkdir("probe", 0755) == 0 && rmdir("probe") == 0);
        } else if (!strcmp(line, "files\n")) {
            files();
        } else if (!strcmp(line, "names\n")) {
            names();
        } else if (!strcmp(line, "elsewhere\n")) {
            elsewhere();
        } else if (!strcmp(line, "late\n")) {
            CHECK(write(early, "2", 1) == 1 && close(early) == 0);
        } else {
            CHECK(mkdir("end", 0755) == 0 && rmdir("end") == 0);
        }
        puts(failures ? "bad" : "done");
        fflush(stdout);
    }
    return failures;
}
