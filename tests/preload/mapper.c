/* Maps files and says what it sees: `map FILE BYTES`, `page N` of the last one (its first word, or "bus"), `watch FILE` (threads that load the
   words of all its pages, against what FILE says was written), `end` of that. One answer a line. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096L
#define THREADS 3

static sigjmp_buf back;
static volatile uint64_t *map;
static long pages;
static _Atomic uint64_t *written;
static _Atomic int stop, wrong;
static _Atomic long loads;

static void on_bus(int signal) { siglongjmp(back, 1); }

static void *watch(void *seed) {
    uint64_t *last = calloc(pages, 8);
    unsigned at = (unsigned)(uintptr_t)seed * 77 + 1;
    while (!stop && !wrong) {
        at = at * 1103515245 + 12345;
        long page = (at >> 8) % pages;
        uint64_t least = atomic_load(&written[page]), seen = map[page * (PAGE / 8)], most = atomic_load(&written[page]) + 1;
        if (seen < least || seen < last[page] || seen > most) {
            fprintf(stderr, "page %ld shows %lu, not %lu (and %lu before) to %lu\n", page, seen, least, last[page], most);
            wrong = 1;
        }
        last[page] = seen;
        loads++;
    }
    free(last);
    return NULL;
}

int main(void) {
    char line[4300], file[4200];
    long number;
    pthread_t threads[THREADS];
    signal(SIGBUS, on_bus);
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "map %4199s %ld", file, &number) == 2) {
            int fd = open(file, O_RDONLY);
            pages = (number + PAGE - 1) / PAGE;
            map = mmap(NULL, number, PROT_READ, MAP_SHARED, fd, 0);
            printf("%s\n", fd < 0 || map == MAP_FAILED ? "failed" : "mapped");
        } else if (sscanf(line, "page %ld", &number) == 1) {
            if (sigsetjmp(back, 1)) printf("bus\n");
            else printf("%lu\n", map[number * (PAGE / 8)]);
        } else if (sscanf(line, "watch %4199s", file) == 1) {
            written = mmap(NULL, pages * 8, PROT_READ, MAP_SHARED, open(file, O_RDONLY), 0);
            for (long i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, watch, (void *)i);
            printf("watching\n");
        } else {
            stop = 1;
            for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
            printf("%s %ld\n", wrong ? "wrong" : "right", loads);
        }
    }
    return 0;
}
