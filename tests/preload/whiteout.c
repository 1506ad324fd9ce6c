// Renames, and leaves a whiteout: "whiteout FROM TO".
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <sys/stat.h>

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    if (renameat2(AT_FDCWD, argv[1], AT_FDCWD, argv[2], RENAME_WHITEOUT) != 0) {
        perror("renameat2");
        return 1;
    }
    struct stat left;
    if (lstat(argv[1], &left) != 0 || left.st_mode != S_IFCHR || left.st_rdev != 0) return 3;
    puts("a whiteout");
    return 0;
}
