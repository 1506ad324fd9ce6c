/* A signal handler may have interrupted malloc: the calls that it makes must not come to need malloc themselves. The handlers here
 * interrupt nothing, but whatever is allocated in one, by whomever, is counted. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include "check.h"

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Thread_local volatile int in_handler;
static volatile int breaches;

static void noted(void) {
    if (in_handler) __atomic_fetch_add(&breaches, 1, __ATOMIC_RELAXED);
}

void *malloc(size_t len) { return noted(), __libc_malloc(len); }
void *calloc(size_t count, size_t len) { return noted(), __libc_calloc(count, len); }
void *realloc(void *block, size_t len) { return noted(), __libc_realloc(block, len); }
void *memalign(size_t align, size_t len) { return noted(), __libc_memalign(align, len); }
void *aligned_alloc(size_t align, size_t len) { return noted(), __libc_memalign(align, len); }
void free(void *block) {
    if (block) noted();
    __libc_free(block);
}

enum { THREADS = 8, ROUNDS = 400 };
static _Thread_local int thread, rounds;

static void on_signal(int number) {
    char name[32] = "own00_000";
    struct stat stat_;
    (void)number;
    in_handler = 1;
    for (int i = 0; i < rounds; i++) {
        int fd = open("shared", O_CREAT | O_RDWR | O_APPEND, 0644);
        if (fd < 0 || write(fd, "!", 1) != 1 || fstat(fd, &stat_) || close(fd)) _exit(91);
        name[3] = '0' + thread / 10, name[4] = '0' + thread % 10;
        name[6] = '0' + i / 100, name[7] = '0' + i / 10 % 10, name[8] = '0' + i % 10;
        fd = open(name, O_CREAT | O_EXCL | O_RDWR, 0644);
        if (fd < 0 || write(fd, "text", 4) != 4 || pread(fd, name + 16, 4, 0) != 4 || close(fd)) _exit(92);
        if (i % 2 && unlink(name)) _exit(93);
        fd = open("shared", O_RDONLY);
        char *map = mmap(NULL, 1, PROT_READ, MAP_SHARED, fd, 0);
        if (fd < 0 || map == MAP_FAILED || *map != '!' || munmap(map, 1) || close(fd)) _exit(94);
    }
    in_handler = 0;
}

static void *in_thread(void *number) {
    thread = (int)(long)number, rounds = ROUNDS;
    pthread_kill(pthread_self(), SIGUSR1);
    return NULL;
}

/* With one round, a new thread's and a new process' first calls are a handler's. */
static void in_child(int number) {
    pid_t child = fork();
    if (child == 0) {
        thread = number, rounds = 100;
        raise(SIGUSR1);
        _exit(breaches > 100 ? 100 : breaches);
    }
    int status = status_of(child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
    struct sigaction action = {.sa_handler = on_signal};
    struct stat stat_;
    pthread_t threads[THREADS];
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    thread = THREADS, rounds = 200;
    raise(SIGUSR1);
    CHECK(breaches == 0);
    for (int i = 0; i < 200; i++) CHECK(stat("shared", &stat_) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, in_thread, (void *)(long)i) == 0);
    in_child(THREADS + 1);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    in_child(THREADS + 2);
    CHECK(breaches == 0);
    CHECK(stat("shared", &stat_) == 0 && stat_.st_size == 200 + THREADS * ROUNDS + 200);
    if (breaches) printf("%d allocations in handlers\n", breaches);
    if (failures == 0) puts("good");
    return failures != 0;
}
