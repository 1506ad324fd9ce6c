// Keeps a file's handle (name_to_handle_at) and opens it again (open_by_handle_at): "save PATH KEPT", "open MOUNT KEPT".
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static union {
    struct file_handle handle;
    char room[sizeof(struct file_handle) + MAX_HANDLE_SZ];
} kept;

static int fail(const char *what) {
    printf("%s %s\n", what, strerrorname_np(errno));
    return 0;
}

static int save(const char *path, const char *to) {
    int mount;
    kept.handle.handle_bytes = MAX_HANDLE_SZ;
    if (name_to_handle_at(AT_FDCWD, path, &kept.handle, &mount, 0) != 0) return fail("name_to_handle_at");
    FILE *file = fopen(to, "w");
    if (!file || fwrite(&kept, sizeof kept, 1, file) != 1 || fclose(file) != 0) return fail("fwrite");
    puts("saved");
    return 0;
}

static int open_kept(const char *mount, const char *from) {
    FILE *file = fopen(from, "r");
    if (!file || fread(&kept, sizeof kept, 1, file) != 1) return fail("fread");
    int at = open(mount, O_RDONLY | O_DIRECTORY);
    int fd = open_by_handle_at(at, &kept.handle, O_RDONLY);
    if (fd < 0) return fail("open_by_handle_at");
    struct stat is;
    fstat(fd, &is);
    if (S_ISDIR(is.st_mode)) {
        DIR *dir = fdopendir(fd);
        int names = 0;
        while (readdir(dir)) names++;
        printf("directory of %d\n", names - 2);
    } else {
        char text[64] = "";
        if (read(fd, text, sizeof text - 1) < 0) return fail("read");
        printf("file of %s\n", text);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    return strcmp(argv[1], "save") == 0 ? save(argv[2], argv[3]) : open_kept(argv[2], argv[3]);
}
