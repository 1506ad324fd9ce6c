// Far memory that outlives its program: a list that grows by each run, also by those that end without a word.
//   cc $(pkg-config --cflags varve) varve_alloc_checkpoint.c $(pkg-config --libs varve) -lpthread -o checkpoint
//   ./checkpoint FILE        a list in FILE, or more of the one that is there
//   ./checkpoint FILE wrong  what is refused
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <varve_alloc.h>

#define CHECK(what)                                                                                                \
    do {                                                                                                           \
        if (!(what)) {                                                                                             \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno);                           \
            exit(1);                                                                                               \
        }                                                                                                          \
    } while (0)

// Another number when the structures below change.
#define SCHEMA 1
#define MORE 5000
#define STORE_BYTES (64 << 20)
#define MEMORY_BYTES (4 << 20)

struct node {
    struct node *next;
    uint64_t number;
    char *text;
};

// What the list begins with: an object in far memory, whose address is the checkpoint's record.
struct all {
    struct node *first;
    uint64_t count;
    // Counted by a thread all the time: the first is never behind the second, nor ahead by more than one.
    _Atomic uint64_t before, after;
};

static va_heap *heap;
static atomic_bool is_ending;

static void add(struct all *all) {
    struct node *node = va_oalloc(heap, 1, sizeof *node);
    CHECK(node != NULL);
    size_t len = 16 + all->count % 3000;
    node->text = va_malloc(heap, len);
    CHECK(node->text != NULL);
    memset(node->text, (int)(all->count % 251), len);
    node->number = all->count++;
    node->next = all->first;
    all->first = node;
}

// All nodes are there, and nothing else.
static void check(struct all *all) {
    uint64_t number = all->count;
    for (struct node *node = all->first; node != NULL; node = node->next) {
        number--;
        size_t len = 16 + number % 3000;
        CHECK(node->number == number);
        CHECK((unsigned char)node->text[0] == number % 251 && (unsigned char)node->text[len - 1] == number % 251);
    }
    CHECK(number == 0);
    CHECK(all->before - all->after <= 1);
}

static void *count(void *argument) {
    struct all *all = argument;
    while (!is_ending) {
        all->before++;
        all->after = all->before;
    }
    return NULL;
}

static int grow(const char *path) {
    struct all *all = NULL;
    size_t len = 0;
    heap = va_restore(path, SCHEMA, MEMORY_BYTES, NULL, &all, sizeof all, &len);
    if (heap != NULL && len == sizeof all) {
        check(all);
        printf("%llu nodes were there\n", (unsigned long long)all->count);
    } else {
        CHECK(heap == NULL && errno == ENOENT);
        heap = va_create(path, STORE_BYTES, SCHEMA, MEMORY_BYTES, NULL);
        if (heap == NULL && (errno == EPERM || errno == EACCES || errno == ENOSYS)) {
            fprintf(stderr, "the kernel does not let this process serve faults: %s\n", strerror(errno));
            return 77;
        }
        CHECK(heap != NULL);
        all = va_oalloc(heap, 1, sizeof *all);
        CHECK(all != NULL);
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, count, all) == 0);
    for (int number = 0; number < MORE; number++)
        add(all);
    va_checkpointed made;
    CHECK(va_checkpoint(heap, &all, sizeof all, &made) == 0);
    CHECK(made.generation > 1 && made.written_bytes > 0 && made.stopped_ns > 0);
    // No checkpoint has these, nor that one is gone.
    for (int number = 0; number < 100; number++)
        add(all);
    CHECK(va_free(heap, all->first) == 0);
    is_ending = true;
    CHECK(pthread_join(thread, NULL) == 0);
    printf("%llu nodes are there\n", (unsigned long long)all->count - 100);
    fflush(stdout);
    // As if it had crashed.
    _exit(0);
}

static int refuse(const char *path) {
    char record[VA_RECORD_MAX + 1] = "program";
    va_options options = {0};
    size_t len = 0;
    options.start_address = 0x300000000000;
    heap = va_create(path, STORE_BYTES, SCHEMA, MEMORY_BYTES, &options);
    if (heap == NULL && (errno == EPERM || errno == EACCES || errno == ENOSYS)) {
        fprintf(stderr, "the kernel does not let this process serve faults: %s\n", strerror(errno));
        return 77;
    }
    CHECK(heap != NULL);
    char *bytes = va_malloc(heap, 100000);
    CHECK(bytes != NULL && (uintptr_t)bytes >> 44 == 3);
    memset(bytes, 'v', 100000);
    CHECK(va_checkpoint(heap, record, VA_RECORD_MAX + 1, NULL) == -1 && errno == EINVAL);
    CHECK(va_checkpoint(heap, NULL, 1, NULL) == -1 && errno == EFAULT);
    CHECK(va_checkpoint(heap, NULL, 0, NULL) == 0);
    CHECK(va_checkpoint(heap, record, VA_RECORD_MAX, NULL) == 0);
    CHECK(va_restore(path, SCHEMA, MEMORY_BYTES, NULL, NULL, 0, NULL) == NULL && errno == EBUSY);
    CHECK(va_create(path, STORE_BYTES, SCHEMA, MEMORY_BYTES, NULL) == NULL && errno == EBUSY);
    CHECK(va_close(heap) == 0);
    CHECK(va_create(path, STORE_BYTES, SCHEMA, MEMORY_BYTES, NULL) == NULL && errno == EEXIST);
    CHECK(va_restore(path, SCHEMA + 1, MEMORY_BYTES, NULL, NULL, 0, NULL) == NULL && errno == EINVAL);
    CHECK(va_restore(path, SCHEMA, MEMORY_BYTES, NULL, record, 100, &len) == NULL && errno == ERANGE);
    CHECK(len == VA_RECORD_MAX);
    CHECK(va_restore(NULL, SCHEMA, MEMORY_BYTES, NULL, NULL, 0, NULL) == NULL && errno == EFAULT);
    // Something else lies there.
    void *at = mmap((void *)0x300000000000, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    CHECK(at == (void *)0x300000000000);
    CHECK(va_restore(path, SCHEMA, MEMORY_BYTES, NULL, NULL, 0, NULL) == NULL && errno == EADDRINUSE);
    CHECK(munmap(at, 4096) == 0);
    memset(record, 0, sizeof record);
    heap = va_restore(path, SCHEMA, MEMORY_BYTES, NULL, record, sizeof record, &len);
    CHECK(heap != NULL && len == VA_RECORD_MAX && strcmp(record, "program") == 0);
    CHECK(bytes[0] == 'v' && bytes[99999] == 'v');
    CHECK(va_realloc(heap, bytes, 200000) != NULL);
    CHECK(va_close(heap) == 0);
    CHECK(va_checkpoint(heap, NULL, 0, NULL) == -1 && errno == EBADF);

    char other[4096];
    snprintf(other, sizeof other, "%s.other", path);
    options.start_address = 4096;
    CHECK(va_create(other, STORE_BYTES, SCHEMA, MEMORY_BYTES, &options) == NULL && errno == EINVAL);
    CHECK(access(other, F_OK) == -1 && errno == ENOENT);
    CHECK(va_create("/no/such/file", STORE_BYTES, SCHEMA, MEMORY_BYTES, NULL) == NULL && errno == ENOENT);
    int fd = open(other, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(fd >= 0 && ftruncate(fd, 2 << 20) == 0 && close(fd) == 0);
    CHECK(va_restore(other, SCHEMA, MEMORY_BYTES, NULL, NULL, 0, NULL) == NULL && errno == EINVAL);
    CHECK(unlink(other) == 0);
    // A damaged root, both of them: no complete checkpoint.
    fd = open(path, O_RDWR);
    CHECK(fd >= 0 && pwrite(fd, "x", 1, 100) == 1 && pwrite(fd, "x", 1, 4196) == 1 && close(fd) == 0);
    CHECK(va_restore(path, SCHEMA, MEMORY_BYTES, NULL, NULL, 0, NULL) == NULL && errno == EINVAL);

    // A heap of va_open has no checkpoints.
    options.start_address = 1 << 21;
    CHECK(va_open("/var/tmp", STORE_BYTES, MEMORY_BYTES, &options) == NULL && errno == EINVAL);
    heap = va_open("/var/tmp", STORE_BYTES, MEMORY_BYTES, NULL);
    CHECK(heap != NULL && va_checkpoint(heap, NULL, 0, NULL) == -1 && errno == EINVAL);
    CHECK(va_close(heap) == 0);
    printf("all went well\n");
    return 0;
}

int main(int count, char **arguments) {
    CHECK(count == 2 || (count == 3 && strcmp(arguments[2], "wrong") == 0));
    return count == 2 ? grow(arguments[1]) : refuse(arguments[1]);
}
