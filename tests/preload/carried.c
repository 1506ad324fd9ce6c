/* Descriptors inside the arguments of other calls, in the working directory. Run by tests/run/ under `varve run`; says which line found something else, and
 * ends with 1 then. It must pass on every file system. */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/kcmp.h>
#include <linux/loop.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

enum { IMAGE = 1 << 20 };

/* What is behind a loop device is the file, whichever call binds it. */
static void a_loop_device_has_the_file(int configure) {
    char path[32], text[16] = {0};
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC), image = open("image", O_CREAT | O_TRUNC | O_RDWR, 0644);
    int number = control < 0 ? -1 : ioctl(control, LOOP_CTL_GET_FREE), device = -1;
    snprintf(path, sizeof path, "/dev/loop%d", number);
    if (number < 0 || (device = open(path, O_RDWR | O_CLOEXEC)) < 0) {
        fprintf(stderr, "SKIPPED: no loop devices here\n");
        return;
    }
    CHECK(ftruncate(image, IMAGE) == 0 && pwrite(image, "through the loop", 16, 4096) == 16 && fsync(image) == 0);
    struct loop_config config = {.fd = image};
    int bound = configure ? ioctl(device, LOOP_CONFIGURE, &config) : ioctl(device, LOOP_SET_FD, image);
    /* Another process may have taken the free one. */
    CHECK(bound == 0 || errno == EBUSY);
    if (bound == 0) {
        CHECK(pread(device, text, 16, 4096) == 16 && !memcmp(text, "through the loop", 16));
        CHECK(pwrite(device, "and back", 8, 8192) == 8 && fsync(device) == 0);
        CHECK(pread(image, text, 8, 8192) == 8 && !memcmp(text, "and back", 8));
        CHECK(ioctl(device, LOOP_CLR_FD) == 0);
    }
    CHECK(lseek(image, 0, SEEK_CUR) == 0);
    close(device), close(control), close(image);
}

static void different_files_are_different(void) {
    int one = open("one", O_CREAT | O_RDWR, 0644), other = open("other", O_CREAT | O_RDWR, 0644), same = dup(one);
    long me = getpid(), differ = syscall(SYS_kcmp, me, me, KCMP_FILE, one, other);
    if (differ < 0 && (errno == ENOSYS || errno == EPERM)) return;
    CHECK(differ > 0 && syscall(SYS_kcmp, me, me, KCMP_FILE, one, same) == 0);
    close(one), close(other), close(same);
}

/* An `ioctl` that the library does not know, on something that is no descriptor, and one whose argument is none. */
static void bad_descriptors_stay_bad(void) {
    int file = open("one", O_RDWR), null = open("/dev/null", O_RDWR), before = lseek(file, 1, SEEK_SET);
    CHECK(ioctl(-1, 0x1234, file) == -1 && errno == EBADF);
    CHECK(ioctl(null, FICLONE, 9999) == -1);
    CHECK(before == 1 && lseek(file, 0, SEEK_CUR) == 1);
    close(file), close(null);
}

#ifndef SYS_getxattrat
#define SYS_getxattrat 464
#endif

/* An empty path is the descriptor's own file, not the root of its file system. */
static void an_empty_path_is_the_file(void) {
    char value[16] = {0};
    struct { unsigned long value; unsigned size, flags; } arguments = {(unsigned long)value, sizeof value, 0};
    int file = open("one", O_RDWR), tree;
    struct stat mine, theirs;
    if (syscall(SYS_fsetxattr, file, "user.a", "mine", 4, 0) == 0) {
        long got = syscall(SYS_getxattrat, file, "", AT_EMPTY_PATH, "user.a", &arguments, sizeof arguments);
        CHECK(got == 4 ? !memcmp(value, "mine", 4) : errno == ENOSYS);
    }
    if ((tree = syscall(SYS_open_tree, file, "", AT_EMPTY_PATH)) >= 0) {
        CHECK(fstat(file, &mine) == 0 && fstat(tree, &theirs) == 0 && mine.st_ino == theirs.st_ino);
        close(tree);
    }
    close(file);
}

int main(void) {
    a_loop_device_has_the_file(0);
    a_loop_device_has_the_file(1);
    different_files_are_different();
    bad_descriptors_stay_bad();
    an_empty_path_is_the_file();
    if (failures == 0) puts("good");
    return failures != 0;
}
