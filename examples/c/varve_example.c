/* A tour of varve.h: files, names, directories, errors, several threads, and a transaction.
 *
 *   varve up ./pool &              (or: varve_example --embed ./newpool)
 *   cc varve_example.c $(pkg-config --cflags --libs varve) -lpthread -o varve_example
 *   ./varve_example ./pool
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

static void files(varve_fs *fs)
{
    char text[64] = "";
    struct stat st;
    int fd;

    CHECK(varve_mkdir(fs, "/example", 0755) == 0);
    CHECK((fd = varve_open(fs, "/example/note", O_CREAT | O_EXCL | O_RDWR, 0644)) >= 0);
    CHECK(varve_write(fs, fd, "hello, ", 7) == 7);
    CHECK(varve_write(fs, fd, "world\n", 6) == 6);
    CHECK(varve_pwrite(fs, fd, "H", 1, 0) == 1);
    CHECK(varve_fsync(fs, fd) == 0); /* from here on it survives power loss */
    CHECK(varve_lseek(fs, fd, 7, SEEK_SET) == 7);
    CHECK(varve_read(fs, fd, text, sizeof text) == 6 && memcmp(text, "world\n", 6) == 0);
    CHECK(varve_pread(fs, fd, text, 5, 0) == 5 && memcmp(text, "Hello", 5) == 0);
    CHECK(varve_fstat(fs, fd, &st) == 0 && st.st_size == 13 && S_ISREG(st.st_mode));
    CHECK(varve_ftruncate(fs, fd, 5) == 0);
    CHECK(varve_close(fs, fd) == 0);
    CHECK(varve_stat(fs, "/example/note", &st) == 0 && st.st_size == 5);
    CHECK(varve_rename(fs, "/example/note", "/example/letter") == 0);
    CHECK(varve_link(fs, "/example/letter", "/example/copy") == 0);
    CHECK(varve_symlink(fs, "letter", "/example/link") == 0);
    CHECK(varve_readlink(fs, "/example/link", text, sizeof text) == 6 && memcmp(text, "letter", 6) == 0);
    CHECK(varve_chmod(fs, "/example/letter", 0600) == 0);
    CHECK(varve_stat(fs, "/example/link", &st) == 0 && st.st_nlink == 2 && (st.st_mode & 07777) == 0600);
    CHECK(varve_lstat(fs, "/example/link", &st) == 0 && S_ISLNK(st.st_mode));
    CHECK(varve_unlink(fs, "/example/copy") == 0);
    CHECK(varve_access(fs, "/example/letter", R_OK | W_OK) == 0);
}

static void directories(varve_fs *fs)
{
    varve_dirent entry;
    varve_dir *dir;
    int got, count = 0;

    CHECK((dir = varve_opendir(fs, "/example")) != NULL);
    while ((got = varve_readdir(dir, &entry)) == 1) {
        printf("/example/%s: inode %llu\n", entry.d_name, (unsigned long long)entry.d_ino);
        count++;
    }
    CHECK(got == 0 && count == 2);
    CHECK(varve_rewinddir(dir) == 0 && varve_readdir(dir, &entry) == 1);
    CHECK(varve_closedir(dir) == 0);
    FAILS(varve_readdir(dir, &entry), EBADF);
}

static void errors(varve_fs *fs)
{
    char byte;
    int fd;

    FAILS(varve_open(fs, "/example/none", O_RDONLY, 0), ENOENT);
    FAILS(varve_open(fs, "/example/letter", O_CREAT | O_EXCL | O_WRONLY, 0644), EEXIST);
    FAILS(varve_mkdir(fs, "/example", 0755), EEXIST);
    FAILS(varve_rmdir(fs, "/example"), ENOTEMPTY);
    FAILS(varve_unlink(fs, "/example"), EISDIR);
    FAILS(varve_open(fs, "/example/letter/x", O_RDONLY, 0), ENOTDIR);
    CHECK((fd = varve_open(fs, "/example/letter", O_RDONLY, 0)) >= 0);
    FAILS(varve_write(fs, fd, "x", 1), EBADF);
    FAILS(varve_pread(fs, fd, &byte, 1, -1), EINVAL);
    FAILS(varve_lseek(fs, fd, 0, 99), EINVAL);
    FAILS(varve_read(fs, fd, NULL, 1), EFAULT);
    CHECK(varve_close(fs, fd) == 0);
    FAILS(varve_close(fs, fd), EBADF);
    FAILS(varve_stat(fs, NULL, NULL), EFAULT);
    /* Handles that are none, or no more. */
    FAILS(varve_sync(NULL), EINVAL);
    FAILS(varve_sync((varve_fs *)&byte), EBADF);
    FAILS(varve_tx_commit((varve_tx *)fs), EBADF);
}

static void transactions(varve_fs *fs)
{
    char text[8] = "";
    struct stat st;
    varve_tx *tx;
    int from, to, log, made;

    CHECK((from = varve_open(fs, "/example/from", O_CREAT | O_RDWR, 0644)) >= 0);
    CHECK((to = varve_open(fs, "/example/to", O_CREAT | O_RDWR, 0644)) >= 0);
    CHECK(varve_pwrite(fs, from, "100", 3, 0) == 3 && varve_pwrite(fs, to, "000", 3, 0) == 3);

    /* Money moves and the receipt appears: all of it, or nothing, whenever the power fails. */
    CHECK((tx = varve_tx_begin(fs)) != NULL);
    CHECK(varve_tx_pwrite(tx, from, "070", 3, 0) == 0);
    CHECK(varve_tx_pwrite(tx, to, "030", 3, 0) == 0);
    CHECK(varve_tx_mkdir(tx, "/example/receipts", 0755) == 0);
    CHECK((made = varve_tx_create(tx, "/example/receipts/1", 0644)) >= 0);
    CHECK(varve_tx_append(tx, made, "30\n", 3) == 0);
    FAILS(varve_stat(fs, "/example/receipts", &st), ENOENT); /* not before the commit */
    CHECK(varve_pread(fs, from, text, 3, 0) == 3 && memcmp(text, "100", 3) == 0);
    CHECK(varve_tx_commit(tx) == 0);
    CHECK(varve_fsync(fs, from) == 0);
    CHECK(varve_pread(fs, from, text, 3, 0) == 3 && memcmp(text, "070", 3) == 0);
    CHECK(varve_pread(fs, to, text, 3, 0) == 3 && memcmp(text, "030", 3) == 0);
    CHECK(varve_stat(fs, "/example/receipts/1", &st) == 0 && st.st_size == 3);
    FAILS(varve_tx_commit(tx), EBADF); /* the handle is gone */

    /* One impossible call, and nothing happens. */
    CHECK((tx = varve_tx_begin(fs)) != NULL);
    CHECK(varve_tx_pwrite(tx, from, "000", 3, 0) == 0);
    CHECK(varve_tx_unlink(tx, "/example/never") == 0);
    FAILS(varve_tx_commit(tx), ENOENT);
    CHECK(varve_pread(fs, from, text, 3, 0) == 3 && memcmp(text, "070", 3) == 0);

    /* Abort is forgetting. */
    CHECK((tx = varve_tx_begin(fs)) != NULL);
    CHECK(varve_tx_unlink(tx, "/example/from") == 0);
    CHECK(varve_tx_abort(tx) == 0);
    CHECK(varve_stat(fs, "/example/from", &st) == 0);

    /* Bounds are told when a call is added, and the group stays good. */
    CHECK((tx = varve_tx_begin(fs)) != NULL);
    CHECK((log = varve_tx_create(tx, "/example/log", 0644)) >= 0);
    for (int i = 0; i < 63; i++)
        CHECK(varve_tx_append(tx, log, "line\n", 5) == 0);
    FAILS(varve_tx_append(tx, log, "line\n", 5), E2BIG);
    CHECK(varve_tx_commit(tx) == 0);
    CHECK(varve_stat(fs, "/example/log", &st) == 0 && st.st_size == 63 * 5);
    CHECK(varve_close(fs, from) == 0 && varve_close(fs, to) == 0);
}

struct job {
    varve_fs *fs;
    int number;
};

static void *append_lines(void *argument)
{
    struct job *job = argument;
    int fd = varve_open(job->fs, "/example/shared", O_CREAT | O_WRONLY | O_APPEND, 0644);

    CHECK(fd >= 0);
    for (int i = 0; i < 100; i++) {
        char line[16];
        int len = snprintf(line, sizeof line, "%d %3d\n", job->number, i);
        CHECK(varve_write(job->fs, fd, line, (size_t)len) == len);
        /* errno is the thread's own. */
        FAILS(varve_close(job->fs, 1000 + job->number), EBADF);
    }
    CHECK(varve_close(job->fs, fd) == 0);
    return NULL;
}

static void threads(varve_fs *fs)
{
    pthread_t thread[4];
    struct job jobs[4];
    struct stat st;

    for (int i = 0; i < 4; i++) {
        jobs[i] = (struct job){fs, i};
        CHECK(pthread_create(&thread[i], NULL, append_lines, &jobs[i]) == 0);
    }
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
    CHECK(varve_stat(fs, "/example/shared", &st) == 0 && st.st_size == 4 * 100 * 6);
}

static void clean_up(varve_fs *fs)
{
    const char *names[] = {"/example/letter", "/example/link", "/example/from",  "/example/to",
                           "/example/log",    "/example/shared", "/example/receipts/1"};

    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        CHECK(varve_unlink(fs, names[i]) == 0);
    CHECK(varve_rmdir(fs, "/example/receipts") == 0);
    CHECK(varve_rmdir(fs, "/example") == 0);
}

int main(int argc, char **argv)
{
    int embed = argc == 3 && strcmp(argv[1], "--embed") == 0;
    varve_fs *fs;

    if (argc != 2 && !embed) {
        fprintf(stderr, "usage: %s POOL         a pool that a daemon serves\n"
                        "       %s --embed DIR  a new pool, served by this process\n", argv[0], argv[0]);
        return 2;
    }
    if (embed) {
        CHECK(varve_mkpool(argv[2], "16M", "0", "0") == 0);
        FAILS(varve_mkpool(argv[2], "16M", "0", "0"), EEXIST);
        CHECK(varve_connect(argv[2], 0) == NULL && errno == ECONNREFUSED);
        CHECK((fs = varve_embed(argv[2], 0)) != NULL);
    } else {
        CHECK((fs = varve_connect(argv[1], 0)) != NULL);
    }
    printf("libvarve %s\n", varve_version());
    files(fs);
    directories(fs);
    errors(fs);
    transactions(fs);
    threads(fs);
    clean_up(fs);
    CHECK(varve_disconnect(fs) == 0);
    FAILS(varve_disconnect(fs), EBADF);
    CHECK(varve_connect("/nonexistent", 0) == NULL && errno == ENOENT);
    CHECK(varve_connect(argv[argc - 1], 1u << 31) == NULL && errno == EINVAL);
    puts("all went well");
    return 0;
}
