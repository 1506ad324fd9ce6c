// Far memory: a linked list and an array that are larger than the memory they may have. What other programs do:
//   cc $(pkg-config --cflags varve) varve_alloc_example.c $(pkg-config --libs varve) -lpthread -o example
//   ./example DIRECTORY
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <varve_alloc.h>

#define CHECK(what)                                                                                                \
    do {                                                                                                           \
        if (!(what)) {                                                                                             \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno);                           \
            exit(1);                                                                                               \
        }                                                                                                          \
    } while (0)

struct node {
    struct node *next;
    uint64_t number;
    char text[112];
};

static va_heap *heap;

// Nodes are objects: pointers between them are plain pointers.
static void list(void) {
    struct node *first = NULL;
    for (uint64_t number = 0; number < 40000; number++) {
        struct node *node = va_oalloc(heap, 1, sizeof *node);
        CHECK(node != NULL);
        node->next = first;
        node->number = number;
        snprintf(node->text, sizeof node->text, "node %llu", (unsigned long long)number);
        first = node;
    }
    uint64_t number = 40000;
    for (struct node *node = first; node != NULL; node = node->next) {
        char text[32];
        number--;
        snprintf(text, sizeof text, "node %llu", (unsigned long long)number);
        CHECK(node->number == number && strcmp(node->text, text) == 0);
    }
    CHECK(number == 0);
    while (first != NULL) {
        struct node *next = first->next;
        CHECK(va_free(heap, first) == 0);
        first = next;
    }
}

static void array(void) {
    size_t count = 20000, stride = va_stride(128);
    char *all = va_oalloc(heap, count, 128);
    CHECK(all != NULL && stride == 4096);
    for (size_t index = 0; index < count; index++)
        memset(all + index * stride, (int)(index % 251), 128);
    for (size_t index = 0; index < count; index++)
        CHECK((unsigned char)all[index * stride + 127] == index % 251);
    CHECK(va_free(heap, all + stride) == -1 && errno == EINVAL);
    CHECK(va_free(heap, all) == 0);
}

static void *bytes(void *seed) {
    unsigned state = (unsigned)(uintptr_t)seed;
    for (int round = 0; round < 200; round++) {
        size_t len = 1 + rand_r(&state) % 60000;
        char *some = va_calloc(heap, len, 1);
        CHECK(some != NULL && some[0] == 0 && some[len - 1] == 0);
        memset(some, round, len);
        some = va_realloc(heap, some, 2 * len);
        CHECK(some != NULL && some[len - 1] == (char)round);
        CHECK(va_free(heap, some) == 0);
    }
    return NULL;
}

static void calls(const char *directory) {
    char name[4096], *far = va_malloc(heap, 100000);
    snprintf(name, sizeof name, "%s/bytes", directory);
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(far != NULL && fd >= 0);
    memset(far, 'v', 100000);
    CHECK(va_flush(heap) == 0);
    CHECK(write(fd, far, 100000) == 100000);
    memset(far, 0, 100000);
    CHECK(va_flush(heap) == 0);
    CHECK(pread(fd, far, 100000, 0) == 100000);
    CHECK(far[0] == 'v' && far[99999] == 'v');
    CHECK(close(fd) == 0 && unlink(name) == 0);
    CHECK(va_pin(heap, far, 8192) == 0);
    CHECK(va_unpin(heap, far, 8192) == 0);
    CHECK(va_unpin(heap, far, 8192) == -1 && errno == EINVAL);
    CHECK(va_free(heap, far) == 0);
}

static void wrong(void) {
    int local;
    errno = 0;
    CHECK(va_malloc(heap, 0) == NULL && errno == EINVAL);
    CHECK(va_oalloc(heap, 0, 8) == NULL && errno == EINVAL);
    CHECK(va_calloc(heap, SIZE_MAX, 2) == NULL && errno == ENOMEM);
    CHECK(va_oalloc(heap, SIZE_MAX / 2, 128) == NULL && errno == ENOMEM);
    CHECK(va_malloc(heap, (size_t)1 << 29) == NULL && errno == ENOSPC);
    CHECK(va_free(heap, &local) == -1 && errno == EINVAL);
    CHECK(va_free(heap, NULL) == 0);
    CHECK(va_pin(heap, NULL, 1) == -1 && errno == EINVAL);
    CHECK(va_realloc(heap, &local, 10) == NULL && errno == EINVAL);
    CHECK(va_malloc(NULL, 10) == NULL && errno == EINVAL);
    CHECK(va_malloc((va_heap *)&local, 10) == NULL && errno == EBADF);
    void *twice = va_malloc(heap, 10);
    CHECK(va_free(heap, twice) == 0);
    CHECK(va_free(heap, twice) == -1 && errno == EINVAL);
    CHECK(va_stats(heap, NULL) == -1 && errno == EFAULT);
    CHECK(va_open(NULL, 1, 1, NULL) == NULL && errno == EFAULT);
    va_options options = {0};
    options.flags = 1;
    CHECK(va_open("/tmp", 8 << 20, 8 << 20, &options) == NULL && errno == EINVAL);
}

static void child(void) {
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        _exit(va_malloc(heap, 10) == NULL && errno == EPERM ? 0 : 1);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    // 64 MiB of a file, 4 MiB of memory for everything.
    heap = va_open(arguments[1], 64 << 20, 4 << 20, NULL);
    if (heap == NULL && (errno == EPERM || errno == EACCES || errno == ENOSYS)) {
        fprintf(stderr, "the kernel does not let this process serve faults: %s\n", strerror(errno));
        return 77;
    }
    CHECK(heap != NULL);
    list();
    array();
    pthread_t threads[3];
    for (uintptr_t number = 0; number < 3; number++)
        CHECK(pthread_create(&threads[number], NULL, bytes, (void *)(number + 1)) == 0);
    for (int number = 0; number < 3; number++)
        CHECK(pthread_join(threads[number], NULL) == 0);
    calls(arguments[1]);
    wrong();
    child();
    va_counters counters;
    CHECK(va_stats(heap, &counters) == 0);
    CHECK(counters.memory_used_bytes <= counters.memory_limit_bytes);
    CHECK(counters.faults > 1000 && counters.device_write_bytes > 0);
    CHECK(va_close(heap) == 0);
    CHECK(va_close(heap) == -1 && errno == EBADF);
    printf("all went well\n");
    return 0;
}
